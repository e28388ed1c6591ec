"""Does a way of running the model give what the model itself gives? Owns the trial that an engine stands before it serves.

Two short sequences are run in two steps, in chunks and side by side, through the very code that will serve; the logits must be
those of a plain forward pass. Knows plans and a forward; costs three small forward passes and a few pages of memory.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.layout import CacheLayout, LayerSpec
from ..core.plan import BatchPlan, Row
from ..messages import SamplingParams
from .model_runner import Forward

_LENGTHS = (11, 6)  # of the two sequences
_FIRST = (4, 5)  # tokens of each in the first step
_PAGES = 4  # per sequence, when pages hold at least 4 tokens


def trial_layout(layers: Sequence[LayerSpec], page_size: int, itemsize: int) -> CacheLayout:
    """A cache just large enough for a trial: for every group its own stretch of sectors."""
    shape = CacheLayout.sized(layers, page_size=page_size, itemsize=itemsize, num_blocks=1)
    needed = sum(-(-len(_LENGTHS) * _PAGES // shape.blocks_per_sector(g)) for g in range(len(shape.groups)))
    return replace(shape, num_sectors=needed)


def trial_error(model: PreTrainedModel, forward: Forward, layout: CacheLayout, vocab_size: int) -> float:
    """How far `forward` is from the model's plain forward pass: mean absolute difference of the logits, in standard deviations.

    Around 1e-6 in float32 and 1e-2 in bfloat16 when all is well. Whatever the model raises is raised.
    """
    sequences = [[(i * 37 + 11 * (s + 1)) % min(vocab_size, 1 << 15) for i in range(n)] for s, n in enumerate(_LENGTHS)]
    with torch.no_grad():
        expected = torch.stack([_plain(model, ids) for ids in sequences])
        forward.install()
        try:
            forward.run(_plan(1, sequences, (0, 0), _FIRST, layout), None, False)
            found = forward.run(_plan(2, sequences, _FIRST, _LENGTHS, layout), None, False)
        finally:
            forward.restore()
    difference = (found.float() - expected.float()).abs().mean(dim=-1).max()
    return float(difference / expected.float().std().clamp_min(1e-12))


def _plain(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits [V] of the last token, by the model's own code."""
    parameters = inspect.signature(model.forward).parameters
    ids = torch.tensor([token_ids], device=model.device)
    keywords: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    return model(input_ids=ids, **keywords).logits[0, -1]


def _plan(
    step: int, sequences: list[list[int]], starts: tuple[int, ...], ends: tuple[int, ...], layout: CacheLayout
) -> BatchPlan:
    """Rows for positions starts[s] … ends[s] - 1 of each sequence, whose blocks lie one after the other in each group's sectors."""
    rows: list[Row] = []
    for s, token_ids in enumerate(sequences):
        pages = -(-ends[s] // layout.page_size)
        tables: list[array[int]] = []
        sector = 1  # sector 0 is the trash
        for g in range(len(layout.groups)):
            per_sector = layout.blocks_per_sector(g)
            first = sector * per_sector + s * _PAGES
            tables.append(array("i", range(first, first + pages)))
            sector += -(-len(_LENGTHS) * _PAGES // per_sector)
        rows.append(
            Row(
                request_id=f"trial {s}",
                start=starts[s],
                token_ids=array("i", token_ids[starts[s] : ends[s]]),
                tables=tuple(tables),
                samples=ends[s] == len(token_ids),
                carry_from=-1,
                sampling=SamplingParams(do_sample=False),
                seed=0,
                token_index=0,
                min_tokens_left=0,
                history=None,
                num_prompt=len(token_ids),
            )
        )
    return BatchPlan(step=step, rows=tuple(rows), num_tokens=sum(row.length for row in rows))
