"""A step's tokens chosen by the native kernels, for rows of logits on a CPU.

Owns the translation of sampling parameters into the vectors that the kernel reads. Knows nothing of what shaped the logits before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...messages import SamplingParams
from .loader import Unavailable, load
from .parts import DTYPES


def choose(
    logits: torch.Tensor, samplings: Sequence[SamplingParams], numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """One token per row: logits [S, V] → (greatest logit float32 [S], token int64 [S]); None where there are no kernels for them.

    `numbers` float64 [S] in [0, 1): what a row is drawn by, unless it is greedy. No copy of the logits is made, nothing is sorted.
    """
    if logits.device.type != "cpu" or logits.dtype not in DTYPES or (logits.shape[1] > 1 and logits.stride(1) != 1):
        return None
    ops = load()
    if isinstance(ops, Unavailable):
        return None
    if all(params.greedy for params in samplings):
        return ops.greatest(logits)
    temperature, top_p, min_p = _floats(samplings, "temperature"), _floats(samplings, "top_p"), _floats(samplings, "min_p")
    for s, params in enumerate(samplings):
        if params.greedy:
            temperature[s] = 0.0
    top_k = np.fromiter((max(0, params.top_k) for params in samplings), np.int32, len(samplings))
    fewest = np.fromiter((params.min_tokens_to_keep for params in samplings), np.int32, len(samplings))
    vectors = [torch.from_numpy(vector) for vector in (temperature, top_k, top_p, min_p, fewest)]
    return ops.sample(logits, *vectors, numbers)


def _floats(samplings: Sequence[SamplingParams], name: str) -> np.ndarray:
    return np.fromiter((getattr(params, name) for params in samplings), np.float32, len(samplings))
