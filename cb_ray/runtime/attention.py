"""The bridge between a transformers model and our pages. Owns the registered attention function and what it reads in a step.

Knows the cache's layer views and a backend; knows no request and no scheduler. transformers looks attention functions up by
name, so each engine registers one under a name of its own that is bound to its own cache: nothing is global, and a model whose
layers drop unknown keywords is served all the same.

    model layer ──(module, query, key, value)──▶ write keys and values into pages ──▶ backend.attend ──▶ output

All rows write before any row reads, so a row may read pages that another row of the same step fills.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from .inputs import StepInputs
from .kv_cache import KVCache, LayerPages

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One step as the layers of one group see it. Row b has queries cu_q[b] … cu_q[b + 1] - 1, the first at position
    starts[b].
    """

    table: torch.Tensor  # int32 [B, T]
    slots: torch.Tensor  # int32 [Q]
    blocks: torch.Tensor  # int64 [Q], slot // page size
    offsets: torch.Tensor  # int64 [Q], slot % page size
    cu_q: torch.Tensor  # int32 [B + 1]
    starts: torch.Tensor  # int32 [B]
    row_starts: list[int]
    row_lengths: list[int]
    prepared: Any = None  # what the backend's `prepare` made of the step


@dataclass(frozen=True, slots=True)
class Extras:
    """What a layer asks of attention beyond softmax(q k) v."""

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads]: a logit per head that takes part in the softmax and has no value


class Backend(Protocol):
    """One way to compute attention over pages."""

    name: str

    def reason_against(self, site: Any, device: torch.device) -> str | None:
        """Why this backend cannot serve a layer that the survey describes; None when it can."""
        ...

    def prepare(self, inputs: StepInputs, page_size: int, decode_width: int) -> Sequence[Any] | None:
        """What the layers of each group will need of this step, computed once. `decode_width`: pages of a short request."""
        ...

    def write_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: LayerPages,
        batch: GroupBatch,
        extras: Extras,
    ) -> torch.Tensor:
        """Store key [Q, kv_heads, k_dim] and value [Q, kv_heads, v_dim] in the step's slots, all of them; then attend.

        query [Q, heads, k_dim] → [Q, heads, v_dim]: each query sees the positions up to its own, inside the layer's window.
        """
        ...


def group_batches(inputs: StepInputs, page_size: int, prepared: Sequence[Any] | None = None) -> list[GroupBatch]:
    """The step for each layer group."""
    slots = inputs.slots.long()
    blocks, offsets = slots // page_size, slots % page_size
    return [
        GroupBatch(
            table=inputs.tables[g],
            slots=inputs.slots[g],
            blocks=blocks[g],
            offsets=offsets[g],
            cu_q=inputs.cu_q,
            starts=inputs.starts,
            row_starts=inputs.row_starts,
            row_lengths=inputs.row_lengths,
            prepared=None if prepared is None else prepared[g],
        )
        for g in range(inputs.slots.shape[0])
    ]


class PagedAttention:
    """The attention function of one engine. `begin` and `end` bracket each step; outside a step the model must not be run with
    it.
    """

    def __init__(self, cache: KVCache, backend: Backend, layer_of: dict[int, int], decode_width: int = 32) -> None:
        """`layer_of`: id of an attention module → the layer index under which its pages are kept. `decode_width`: see `prepare`."""
        shown = backend.name.replace("flash_attention_", "fa")  # transformers looks for "flash" inside names
        self.name = f"cb_ray_{shown}_{next(_numbers)}"
        self._decode_width = decode_width
        self.backend = backend
        self._cache = cache
        self._layer_of = layer_of
        self._groups: list[GroupBatch] = []
        AttentionInterface.register(self.name, self._forward)

    def hide_from_compiler(self) -> None:
        """What a step is is not among the arguments of a layer, so nothing here may be traced."""
        AttentionInterface.register(self.name, torch.compiler.disable(self._forward))

    def begin(self, inputs: StepInputs) -> None:
        page_size = self._cache.layout.page_size
        self._groups = group_batches(inputs, page_size, self.backend.prepare(inputs, page_size, self._decode_width))

    def end(self) -> None:
        self._groups = []

    def close(self) -> None:
        """Take the name back."""
        AttentionInterface._global_mapping.pop(self.name, None)

    def of_step(self, module: nn.Module) -> tuple[LayerPages, GroupBatch]:
        """Where the layer of an attention module keeps keys and values, and the step as its group sees it."""
        if not self._groups:
            raise RuntimeError("the model runs outside a step of its engine; use `with manager.pause():` to call it yourself")
        pages = self._cache.layers[self._layer_of[id(module)]]
        return pages, self._groups[pages.group]

    def _forward(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, heads, Q, k_dim], key and value [1, kv_heads, Q, dim] → [1, Q, heads, v_dim]."""
        pages, batch = self.of_step(module)
        extras = Extras(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
        query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
        return self.backend.write_and_attend(query, key, value, pages, batch, extras)[None], None
