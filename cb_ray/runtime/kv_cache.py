"""The bytes of the KV cache. Owns the flat tensor, its view for every layer, and the copies between blocks and to the host.

Knows the layout's arithmetic, not who holds which block. Every layer sees the flat tensor as pages of its own group's blocks:

    flat       │ block 0 of the group                                │ block 1 …
               │ K page l0 │ V page l0 │ K page l3 │ V page l3 │ …   │ K page l0 │ …
    keys(l3)                           ▲ [P, heads, k_dim]                       … stride: one block
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..core.layout import CacheLayout
from ..core.plan import BatchPlan, BlockCopy
from .native.memory import advise_huge_pages


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's window on the cache: `keys` [blocks, P, kv_heads, k_dim], `values` [blocks, P, kv_heads, v_dim], strided
    views.
    """

    group: int
    window: int | None
    keys: torch.Tensor
    values: torch.Tensor

    def write(self, key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Store `key` [Q, kv_heads, k_dim] and `value` [Q, kv_heads, v_dim] at (blocks[q], offsets[q])."""
        self.keys[blocks, offsets] = key
        self.values[blocks, offsets] = value


class KVCache:
    """All pages of one engine in one tensor on `device`, and the same geometry once more on the host for parked requests."""

    def __init__(self, layout: CacheLayout, *, dtype: torch.dtype, device: torch.device, num_host_sectors: int = 0) -> None:
        self.layout = layout
        self.flat = _zeros(layout.total_items, dtype, device)
        self._blocks = self._by_block(self.flat)
        self._host: list[torch.Tensor] | None = None
        if num_host_sectors:
            items = (num_host_sectors + 1) * layout.items_per_sector
            self._host = self._by_block(_zeros(items, dtype, torch.device("cpu"), pinned=device.type == "cuda"))
        self.layers: dict[int, LayerPages] = {}
        for g, group in enumerate(layout.groups):
            offsets = layout.page_offsets(g)
            for layer in group.layers:
                k_at, v_at = offsets[layer.index]
                self.layers[layer.index] = LayerPages(
                    group=g,
                    window=group.window,
                    keys=self._pages(g, k_at, layer.kv_heads, layer.k_dim),
                    values=self._pages(g, v_at, layer.kv_heads, layer.v_dim),
                )

    def _by_block(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Per group: the tensor as [blocks, items of a block]."""
        return [flat.view(-1, self.layout.items_per_block(g)) for g in range(len(self.layout.groups))]

    def _pages(self, group: int, offset: int, heads: int, dim: int) -> torch.Tensor:
        page, stride = self.layout.page_size, self.layout.items_per_block(group)
        blocks = self._blocks[group].shape[0]
        return self.flat.as_strided((blocks, page, heads, dim), (stride, heads * dim, dim, 1), offset)

    def move(self, plan: BatchPlan) -> None:
        """Do the plan's block copies: parks, then unparks, then forks. All on the current stream, before the step's rows."""
        if plan.parks or plan.unparks:
            assert self._host is not None, "a plan parks blocks and there is no host memory"
            self._copy(plan.parks, self._blocks, self._host)
            self._copy(plan.unparks, self._host, self._blocks)
        if plan.copies:
            self._copy(plan.copies, self._blocks, self._blocks)

    def _copy(self, copies: Sequence[BlockCopy], source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
        for g in range(len(self.layout.groups)):
            pairs = [(copy.source, copy.target) for copy in copies if copy.group == g]
            if not pairs:
                continue
            if source[g].device != target[g].device:
                # Blocks are whole stretches of memory on both sides, and the host's is pinned: each is one copy by the device's
                # copy engine, in the stream's order, and the host waits for none.
                for block, place in pairs:
                    target[g][place].copy_(source[g][block], non_blocking=True)
                continue
            froms, tos = torch.tensor(pairs, dtype=torch.int64).unbind(1)
            gathered = source[g].index_select(0, froms.to(source[g].device))
            target[g].index_copy_(0, tos.to(target[g].device), gathered)

    def poison(self, value: float = float("nan")) -> None:
        """Overwrite everything; for tests that prove nothing stale is read."""
        self.flat.fill_(value)


def _zeros(items: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    """Zeros. On the host the system's own zero pages, large ones if it has them: memory that no request has reached costs nothing.

    They must be zeros, not just any bytes: a masked score is no number where a key is none.
    """
    if device.type != "cpu" or pinned:
        return torch.zeros(items, dtype=dtype, device=device, pin_memory=pinned)
    zeros = torch.from_numpy(np.zeros(items * dtype.itemsize, np.uint8)).view(dtype)
    advise_huge_pages(zeros)
    return zeros
