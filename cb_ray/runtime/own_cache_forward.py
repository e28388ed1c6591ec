"""Row by row, each request with the model's own cache: the way that serves any model at all, one row at a time.

Owns one transformers cache (or the tokens themselves) per running request. Knows plans and a model; the pages that the core
counts are only a budget here, so nothing is shared between requests and nothing is parked. It is slower than the packed way, and right
where that cannot be: states of linear attention, ALiBi, encoder-like position counting, families that appeared yesterday.

    extend   a chunk of tokens is run on top of the cache                          most models
    single   the first chunk at once, later tokens of a prompt one at a time       states that cannot take several tokens at once
    again    all tokens are run again in every step                                models without a cache
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import DynamicCache, PreTrainedModel

from ..core.plan import BatchPlan, Row

Manner = Literal["extend", "single", "again"]


@dataclass(slots=True)
class _State:
    """What is kept of one request."""

    tokens: list[int] = field(default_factory=list[int])
    cache: Any = None


class OwnCacheForward:
    """Runs each row of a plan as a batch of one."""

    def __init__(self, model: PreTrainedModel, manner: Manner) -> None:
        self._model = model
        self._manner = manner
        self._states: dict[str, _State] = {}
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in ("cache", "past_key_values") if name in parameters), None)
        self._takes_positions = "position_ids" in parameters
        self._takes_mask = "attention_mask" in parameters
        self._keeps_rows = "logits_to_keep" in parameters

    def install(self) -> None:
        """Nothing to switch: the model runs with its own attention."""

    def restore(self) -> None:
        """Nothing to switch."""

    def reload(self) -> None:
        """Nothing is kept of the weights. Caches of running requests stay, as pages do."""

    def warmup(self, progress: bool) -> None:
        """Nothing is compiled or captured."""

    def close(self) -> None:
        self._states.clear()

    def run(self, plan: BatchPlan, sampled: torch.Tensor | None, every_token: bool) -> torch.Tensor:
        """Logits [S, V] of the sampling rows' last tokens, or [Q, V] of every token."""
        for name in plan.released:
            self._states.pop(name, None)
        outputs: list[torch.Tensor] = []
        for row in plan.rows:
            logits = self._run_row(row)
            if every_token:
                outputs.append(logits)
            elif row.samples:
                outputs.append(logits[-1:])
        return torch.cat(outputs) if outputs else torch.empty(0, 1)

    def _run_row(self, row: Row) -> torch.Tensor:
        """Logits [n, V] of the row's tokens."""
        if row.start == 0:
            self._states[row.request_id] = _State(cache=self._new_cache())
        state = self._states[row.request_id]
        state.tokens += row.token_ids
        if self._manner == "again":
            return self._call(state.tokens, 0, None)[row.start :]
        if self._manner == "single" and row.start > 0 and len(row.token_ids) > 1:
            return torch.cat([self._call([token], row.start + i, state) for i, token in enumerate(row.token_ids)])
        return self._call(list(row.token_ids), row.start, state)

    def _new_cache(self) -> Any:
        if self._manner == "again" or self._cache_name is None:
            return None
        return DynamicCache(config=self._model.config)

    def _call(self, token_ids: list[int], start: int, state: _State | None) -> torch.Tensor:
        device = self._model.device
        end = start + len(token_ids)
        keywords: dict[str, Any] = {"use_cache": state is not None}
        if self._takes_positions:
            keywords["position_ids"] = torch.arange(start, end, device=device)[None]
        if self._takes_mask:
            keywords["attention_mask"] = torch.ones(1, end, dtype=torch.int64, device=device)
        if state is not None and self._cache_name is not None:
            keywords[self._cache_name] = state.cache
        outputs = self._model(input_ids=torch.tensor([token_ids], device=device), **keywords)
        if state is not None and self._cache_name is not None:
            state.cache = getattr(outputs, self._cache_name, None) or state.cache
        return outputs.logits[0]


def items_per_token(model: PreTrainedModel) -> int:
    """By how many items one request's own cache grows with each token: what its pages are counted as. At least 2."""
    sizes: list[int] = []
    for length in (8, 16):
        forward = OwnCacheForward(model, "extend")
        state = _State(cache=forward._new_cache())
        with torch.no_grad():
            forward._call([1] * length, 0, state)
        sizes.append(_items(getattr(state.cache, "layers", None)))
    return max(2, (sizes[1] - sizes[0]) // 8)


def _items(value: Any) -> int:
    """Items of all tensors in a cache's layers."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, (list, tuple)):
        return sum(map(_items, value))
    if isinstance(value, dict):
        return sum(map(_items, value.values()))
    return sum(map(_items, vars(value).values())) if type(value).__module__.startswith("transformers.cache_utils") else 0
