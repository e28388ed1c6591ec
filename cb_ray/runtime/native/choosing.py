"""A step's tokens chosen by the native kernels, and tokens forbidden, for rows of logits on a CPU.

Owns the translation of sampling parameters into the vectors that the kernel reads. Knows nothing of what shaped the logits before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...messages import SamplingParams
from .loader import NativeOps, Unavailable, load
from .parts import DTYPES


def choose(
    logits: torch.Tensor, samplings: Sequence[SamplingParams], numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """One token per row: logits [S, V] → (greatest logit float32 [S], token int64 [S]); None where there are no kernels for them.

    `numbers` float64 [S] in [0, 1): what a row is drawn by, unless it is greedy. No copy of the logits is made, nothing is sorted.
    """
    ops = _ops(logits)
    if ops is None:
        return None
    if all(params.greedy for params in samplings):
        return ops.greatest(logits)
    vocab, count = logits.shape[1], len(samplings)  # more tokens than there are is all of them, however large the number
    temperature = np.fromiter((0.0 if params.greedy else divisor(params) for params in samplings), np.float32, count)
    top_k = np.fromiter((min(max(0, params.top_k), vocab) for params in samplings), np.int32, count)
    fewest = np.fromiter((min(params.min_tokens_to_keep, vocab) for params in samplings), np.int32, count)
    top_p = np.fromiter((params.top_p for params in samplings), np.float32, count)
    min_p = np.fromiter((params.min_p for params in samplings), np.float32, count)
    vectors = [torch.from_numpy(vector) for vector in (temperature, top_k, top_p, min_p, fewest)]
    return ops.sample(logits, *vectors, numbers)


def forbid(logits: torch.Tensor, places: Sequence[int], allowed: np.ndarray) -> bool:
    """-inf where a row's bit is 0: `logits` [S, V] in place, `allowed` int32 [len(places), words], the lowest bit first.

    False, and nothing is done, where there are no kernels for them.
    """
    ops = _ops(logits)
    if ops is None:
        return False
    ops.forbid_(logits, torch.tensor(places), torch.from_numpy(allowed))
    return True


def _ops(logits: torch.Tensor) -> NativeOps | None:
    """The kernels, where there are some for these logits."""
    if logits.device.type != "cpu" or logits.dtype not in DTYPES or (logits.shape[1] > 1 and logits.stride(1) != 1):
        return None
    ops = load()
    return None if isinstance(ops, Unavailable) else ops


def divisor(params: SamplingParams) -> float:
    """What logits are divided by: the temperature, within what leaves them numbers. Beyond, it is as good as 0 or without end."""
    return min(max(params.temperature, 1e-30), 1e30)
