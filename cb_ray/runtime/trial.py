"""Does a way of running the model give what the model itself gives? Owns the trial that an engine stands before it serves.

Two short sequences are run in three steps, in chunks and side by side, through the very code that will serve; the logits must be
those of a plain forward pass. Knows plans and a forward; costs three small forward passes and a few pages of memory.
"""

from __future__ import annotations

import inspect
import random
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

_CUTS = ((0, 20, 40, 41), (0, 5, 6, 6))  # where each sequence is cut into the rows of three steps
_LENGTHS = tuple(cuts[-1] for cuts in _CUTS)
_PAGES = 11  # per sequence, when pages hold at least 4 tokens


def trial_layout(layers: Sequence[LayerSpec], page_size: int, itemsize: int) -> CacheLayout:
    """A cache just large enough for a trial: for every group its own stretch of sectors."""
    shape = CacheLayout.sized(layers, page_size=page_size, itemsize=itemsize, num_blocks=1)
    needed = sum(-(-len(_LENGTHS) * _PAGES // shape.blocks_per_sector(g)) for g in range(len(shape.groups)))
    return replace(shape, num_sectors=needed)


def trial_error(
    model: PreTrainedModel, forward: Forward, layout: CacheLayout, vocab_size: int, longest: int, seed: int = 0
) -> float:
    """How far `forward` is from the model's plain forward pass, in standard deviations of the logits.

    It is the mean absolute difference over the tokens of the worst row. Low precision alone makes it about 0.05 in a deep model; a
    wrong mask or a forgotten state makes it about 1.
    Whatever the model raises is raised. `longest` is the model's context: no position beyond it is tried.
    `seed` chooses the tokens.
    """
    every = [_shortened(cuts, longest) for cuts in _CUTS]
    sequences = [_tokens(2 * seed + s, cuts[-1], vocab_size) for s, cuts in enumerate(every)]
    with torch.no_grad():
        expected = [_plain(model, ids) for ids in sequences]
        worst = 0.0
        forward.install()
        try:
            for step in range(len(_CUTS[0]) - 1):
                spans = [(cuts[step], cuts[step + 1]) for cuts in every]
                if not any(end > start for start, end in spans):
                    continue
                found = forward.run(_plan(step + 1, sequences, spans, layout), None, True).float()
                wanted = torch.cat([logits[start:end] for logits, (start, end) in zip(expected, spans, strict=True)]).float()
                for difference in (found - wanted).abs().split([end - start for start, end in spans if end > start]):
                    worst = max(worst, float(difference.mean() / wanted.std().clamp_min(1e-12)))
        finally:
            forward.restore()
    return worst


def _shortened(cuts: tuple[int, ...], longest: int) -> tuple[int, ...]:
    """The cuts for a model whose context is shorter: the same steps, of fewer tokens."""
    return cuts if cuts[-1] <= longest else tuple(cut * longest // cuts[-1] for cut in cuts)


def _tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    """Token ids without a pattern, always the same."""
    return random.Random(seed).choices(range(vocab_size), k=count)


def self_disagreement(model: PreTrainedModel, vocab_size: int, longest: int, seed: int = 0) -> float:
    """How far the model's plain forward pass is from itself when it is shown less of a text, measured as in `trial_error`."""
    token_ids = _tokens(seed, min(60, longest), vocab_size)
    with torch.no_grad():
        whole = _plain(model, token_ids).float()
        worst = 0.0
        for cut in (len(token_ids) // 3, 2 * len(token_ids) // 3):
            part = _plain(model, token_ids[:cut]).float()
            worst = max(worst, float((part - whole[:cut]).abs().mean() / whole.std().clamp_min(1e-12)))
    return worst


def _plain(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits [n, V] of every token, by the model's own code."""
    parameters = inspect.signature(model.forward).parameters
    ids = torch.tensor([token_ids], device=model.device)
    keywords: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    return model(input_ids=ids, **keywords).logits[0]


def _plan(step: int, sequences: list[list[int]], spans: list[tuple[int, int]], layout: CacheLayout) -> BatchPlan:
    """Rows for each sequence's span of positions (start, end); its blocks lie one after the other in each group's sectors."""
    rows: list[Row] = []
    for s, token_ids in enumerate(sequences):
        start, end = spans[s]
        if start == end:
            continue
        pages = -(-end // layout.page_size)
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
                start=start,
                token_ids=array("i", token_ids[start:end]),
                tables=tuple(tables),
                samples=True,
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
