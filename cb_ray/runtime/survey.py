"""What a model's attention layers really do, found by watching one small forward pass instead of reading config fields.

Owns `survey` and what it finds: for every attention call its module, head counts, dims, window, softcap and sinks. The window
is read off the mask that the model itself builds for the layer, so a new family needs no table of ours. Knows no cache and no
request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from ..core.layout import LayerSpec
from .attention_switch import AttentionSwitch

_NAME = "cb_ray_survey"
_FAR = 1 << 20  # a position far beyond any window that is not "everything"


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """One attention layer as the model calls it."""

    index: int
    module: nn.Module
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None
    softcap: float | None
    has_sinks: bool
    dtype: torch.dtype  # of queries and keys
    odd: tuple[str, ...]  # keywords with a value that change the result and that no backend here honours

    @property
    def spec(self) -> LayerSpec:
        kind = "full" if self.window is None else "sliding"
        return LayerSpec(self.index, kind, self.kv_heads, self.k_dim, self.v_dim, self.window)


@dataclass(frozen=True, slots=True)
class Survey:
    """What the forward pass showed. `reason` says why packed steps cannot serve the model; empty: nothing speaks against it."""

    sites: tuple[AttentionSite, ...]
    vocab_size: int
    reason: str = ""


@dataclass(slots=True)
class _Call:
    module: nn.Module
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    mask: torch.Tensor | None
    extras: dict[str, Any]


class _Watcher:
    """Stands in for attention and for mask building during the survey's forward pass."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.masks: list[tuple[torch.Tensor, Callable[..., torch.Tensor]]] = []

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **extras: Any
    ) -> tuple[torch.Tensor, None]:
        self.calls.append(
            _Call(module, tuple(query.shape), tuple(key.shape), tuple(value.shape), query.dtype, attention_mask, extras)
        )
        heads = query.shape[1] // value.shape[1]
        return value.repeat_interleave(heads, dim=1).transpose(1, 2).contiguous(), None

    def build_mask(self, *args: Any, mask_function: Callable[..., torch.Tensor], **kwargs: Any) -> torch.Tensor:
        mask = eager_mask(*args, mask_function=mask_function, **{**kwargs, "dtype": kwargs.get("dtype", torch.float32)})
        self.masks.append((mask, mask_function))
        return mask

    def mask_function_of(self, call: _Call) -> Callable[..., torch.Tensor] | None:
        """The function behind the mask that the layer was given, sliced or whole; None when it is no mask that was built here."""
        if not isinstance(call.mask, torch.Tensor):
            return None
        return next((function for mask, function in self.masks if mask.data_ptr() == call.mask.data_ptr()), None)


def survey(model: PreTrainedModel) -> Survey:
    """Run `model` once on five tokens and describe its attention. Leaves the model as it was."""
    watcher = _Watcher()
    AttentionInterface.register(_NAME, watcher.attend)
    AttentionMaskInterface.register(_NAME, watcher.build_mask)
    switch = AttentionSwitch(model, _NAME)
    switch.install()
    try:
        with torch.no_grad():
            ids = torch.arange(1, 6, device=model.device)[None]
            keywords: dict[str, Any] = {"use_cache": False}
            if "position_ids" in inspect.signature(model.forward).parameters:
                keywords["position_ids"] = torch.arange(5, device=model.device)[None]
            logits = model(input_ids=ids, **keywords).logits
    finally:
        switch.restore()
        AttentionInterface._global_mapping.pop(_NAME, None)
        AttentionMaskInterface._global_mapping.pop(_NAME, None)
    return _describe(watcher, int(logits.shape[-1]))


def _describe(watcher: _Watcher, vocab_size: int) -> Survey:
    sites: list[AttentionSite] = []
    reason = ""
    for index, call in enumerate(watcher.calls):
        if call.query[0] != 1 or call.query[2] != 5 or call.key[2] != 5:
            reason = f"attention call {index} has the shape {call.query} over {call.key} for five tokens"
            continue
        window, note = _window(watcher, call)
        reason = reason or note
        extras = call.extras
        odd = tuple(
            name for name in ("position_bias", "attention_bias", "indices", "topk_indices") if extras.get(name) is not None
        )
        if odd:
            reason = reason or f"attention call {index} uses {', '.join(odd)}"
        sites.append(
            AttentionSite(
                index=index,
                module=call.module,
                heads=call.query[1],
                kv_heads=call.key[1],
                k_dim=call.key[3],
                v_dim=call.value[3],
                window=window,
                softcap=extras.get("softcap"),
                has_sinks=extras.get("s_aux") is not None,
                dtype=call.dtype,
                odd=odd,
            )
        )
    if not sites:
        reason = "no attention layer goes through transformers' attention interface"
    if len({id(site.module) for site in sites}) != len(sites):
        reason = reason or "a layer attends more than once in a forward pass"
    return Survey(tuple(sites), vocab_size, reason)


def _window(watcher: _Watcher, call: _Call) -> tuple[int | None, str]:
    """The layer's window, and why its mask is no window if it is something else."""
    function = watcher.mask_function_of(call)
    said = call.extras.get("sliding_window") or None
    if function is None:
        return said, "" if call.mask is None else "a layer changes its mask by what its tokens are"
    first, later = _first_visible(function, _FAR), _first_visible(function, _FAR + 3)
    if first == 0 and later == 0:
        return None, ""
    if later - first == 3:
        return _FAR - first + 1, ""
    return None, f"layer mask sees positions {first} … {_FAR} and then {later} … {_FAR + 3}, which is no sliding window"


def _first_visible(function: Callable[..., torch.Tensor], query: int) -> int:
    """The first key position that a query at `query` sees, if what it sees is one stretch that ends with itself."""
    low, high = 0, query
    zero, at = torch.tensor(0), torch.tensor(query)
    while low < high:
        middle = (low + high) // 2
        if bool(function(zero, zero, at, torch.tensor(middle))):
            high = middle
        else:
            low = middle + 1
    return low
