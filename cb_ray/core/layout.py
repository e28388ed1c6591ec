"""The shape of the KV cache: all byte arithmetic of the engine is here.

Owns `LayerSpec`, `LayerGroup` and `CacheLayout`. Knows no tensor; sizes are in elements (items) of the cache's dtype or in bytes.

    page    P tokens of keys and values of one layer
    block   one page of every layer of a group            unit that requests hold
    sector  blocks of one group, same size for all groups  unit that groups borrow from each other

    memory   │ sector 0 (trash) │ sector 1          │ sector 2          │ …
    group A  │ 0  1  2          │ 3  4  5           │ (lent to B)       │     3 blocks a sector
    group B  │ 0  1             │ (lent to A)       │ 4  5              │     2 blocks a sector
    block    │ K page layer 0 │ V page layer 0 │ K page layer 3 │ V page layer 3 │ …

A sector is the smallest size that every group's block divides, so block b of a group starts at b * (items of its block) whichever
sector it lies in: one strided view per layer reaches them all. Sector 0 is never lent; block 0 of each group is the trash block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..errors import ConfigError

LayerKind = Literal["full", "sliding"]
TRASH = 0  # block 0 of every group: padding is written there, entries left of a window point there


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """KV geometry of one attention layer. `window` counts the keys a query sees, itself included (sliding layers)."""

    index: int
    kind: LayerKind
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None

    def __post_init__(self) -> None:
        if (self.kind == "sliding") != (self.window is not None):
            raise ConfigError(f"layer {self.index}: a sliding layer needs a window and a full one has none, got {self}")

    @property
    def items_per_token(self) -> int:
        return self.kv_heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that see the same keys; they share block tables."""

    kind: LayerKind
    window: int | None
    layers: tuple[LayerSpec, ...]

    @property
    def items_per_token(self) -> int:
        return sum(layer.items_per_token for layer in self.layers)

    def first_visible(self, position: int) -> int:
        """The first position that a query at `position` may see."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def blocks_needed(self, tokens: int, chunk: int, page_size: int) -> int:
        """Most blocks that one request of `tokens` tokens holds at a time, computed at most `chunk` tokens a step."""
        every = -(-tokens // page_size)
        if self.window is None:
            return every
        return min(every, -(-(self.window - 1 + chunk) // page_size) + 1)


@dataclass(frozen=True)
class CacheLayout:
    """Groups, page size and number of sectors; everything else about the cache's memory follows.

    `num_sectors` counts the sectors that can be lent; the trash sector comes on top.
    """

    page_size: int
    groups: tuple[LayerGroup, ...]
    itemsize: int
    num_sectors: int

    @staticmethod
    def group(layers: Sequence[LayerSpec]) -> tuple[LayerGroup, ...]:
        """Layers of equal kind and window form a group; groups with full attention come first."""
        by_kind: dict[tuple[LayerKind, int | None], list[LayerSpec]] = {}
        for layer in layers:
            by_kind.setdefault((layer.kind, layer.window), []).append(layer)
        ordered = sorted(by_kind.items(), key=lambda item: (item[0][0] != "full", item[0][1] or 0))
        return tuple(LayerGroup(kind, window, tuple(members)) for (kind, window), members in ordered)

    @classmethod
    def sized(
        cls,
        layers: Sequence[LayerSpec],
        *,
        page_size: int,
        itemsize: int,
        num_blocks: int | None = None,
        budget_bytes: int | None = None,
    ) -> CacheLayout:
        """A layout for `num_blocks` blocks of the whole model (rounded up to sectors), or for at most `budget_bytes`.

        Raises ConfigError when there is no layer to cache, or when the budget does not hold one sector for each group.
        """
        groups = cls.group(layers)
        if not groups:
            raise ConfigError("the model has no attention layer whose keys and values could be cached", "layers")
        shape = cls(page_size=page_size, groups=groups, itemsize=itemsize, num_sectors=len(groups))
        if num_blocks is not None:
            sectors = -(-num_blocks * shape.bytes_per_model_block // shape.bytes_per_sector)
        elif budget_bytes is not None:
            sectors = budget_bytes // shape.bytes_per_sector - 1
            if sectors < len(groups):
                need = (len(groups) + 1) * shape.bytes_per_sector
                raise ConfigError(
                    f"the KV cache needs at least {need:,} bytes for pages of {page_size} tokens and {budget_bytes:,} are "
                    "available; make page_size smaller, or give it more memory",
                    "page_size",
                )
        else:
            raise ConfigError("either num_blocks or a memory budget must be given", "num_blocks")
        return cls(page_size=page_size, groups=groups, itemsize=itemsize, num_sectors=max(sectors, len(groups)))

    @cached_property
    def items_per_sector(self) -> int:
        return math.lcm(*(self.items_per_block(g) for g in range(len(self.groups))))

    def items_per_block(self, group: int) -> int:
        return self.page_size * self.groups[group].items_per_token

    def blocks_per_sector(self, group: int) -> int:
        return self.items_per_sector // self.items_per_block(group)

    @property
    def bytes_per_sector(self) -> int:
        return self.items_per_sector * self.itemsize

    @property
    def bytes_per_model_block(self) -> int:
        """Bytes of one page of every layer of the model."""
        return sum(self.items_per_block(g) for g in range(len(self.groups))) * self.itemsize

    @property
    def bytes_per_token(self) -> int:
        return self.bytes_per_model_block // self.page_size

    @property
    def total_items(self) -> int:
        """Items of the whole flat tensor, trash sector included."""
        return (self.num_sectors + 1) * self.items_per_sector

    @property
    def num_blocks(self) -> int:
        """Capacity in blocks of the whole model."""
        return self.num_sectors * self.bytes_per_sector // self.bytes_per_model_block

    def page_offsets(self, group: int) -> dict[int, tuple[int, int]]:
        """For each layer index: where its K page and its V page begin inside a block, in items."""
        offsets: dict[int, tuple[int, int]] = {}
        at = 0
        for layer in self.groups[group].layers:
            k_items = self.page_size * layer.kv_heads * layer.k_dim
            offsets[layer.index] = (at, at + k_items)
            at += k_items + self.page_size * layer.kv_heads * layer.v_dim
        return offsets

    def sectors_needed(self, tokens: int, chunk: int) -> int:
        """Sectors that one request of `tokens` cached tokens needs when it has the cache to itself."""
        return sum(
            -(-group.blocks_needed(tokens, chunk, self.page_size) // self.blocks_per_sector(g))
            for g, group in enumerate(self.groups)
        )

    def max_chunk(self, most: int, wanted: int) -> int:
        """The most tokens, up to `most`, that one request may compute in a step.

        A chunk needs room beside the window that it slides over. In a cache so small that this would cost more than a quarter of
        the longest request that fits (or of `wanted`), a prompt goes in smaller steps.
        """
        wanted = min(wanted, self.max_tokens_alone(1))
        chunk = most
        while chunk > 1 and self.max_tokens_alone(chunk) < wanted * 3 // 4:
            chunk //= 2
        return chunk

    def max_tokens_alone(self, chunk: int, ceiling: int = 1 << 31) -> int:
        """The longest request, in cached tokens up to `ceiling`, that fits when it has the cache to itself."""
        low, high = 0, ceiling
        while low < high:
            middle = (low + high + 1) // 2
            if self.sectors_needed(middle, chunk) <= self.num_sectors:
                low = middle
            else:
                high = middle - 1
        return low
