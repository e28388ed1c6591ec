"""Blocks on their way to host memory and back, where the host's memory is another device's."""

from __future__ import annotations

from typing import ClassVar

import torch

from cb_ray.core.layout import CacheLayout, LayerSpec
from cb_ray.core.plan import BatchPlan, BlockCopy
from cb_ray.runtime.kv_cache import KVCache


class _Elsewhere(torch.Tensor):
    """A CPU tensor that says it lies on another device; notes whether copies into it, or from it, would have waited."""

    waits: ClassVar[list[bool]] = []

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            cls.waits.append(not (kwargs or {}).get("non_blocking", False))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_between_devices_each_block_is_one_copy_that_nobody_waits_for() -> None:
    """Parked, then unparked elsewhere: the same bytes, for every group, without a gather."""
    layers = [LayerSpec(0, "full", 2, 4, 4), LayerSpec(1, "sliding", 2, 4, 4, 8), LayerSpec(2, "sliding", 2, 4, 4, 8)]
    layout = CacheLayout.sized(layers, page_size=4, itemsize=4, num_blocks=12)
    cache = KVCache(layout, dtype=torch.float32, device=torch.device("cpu"), num_host_sectors=4)
    cache.flat.normal_()
    assert cache._host is not None
    cache._host = [host.as_subclass(_Elsewhere) for host in cache._host]
    before = [blocks.clone() for blocks in cache._blocks]
    _Elsewhere.waits.clear()
    parks = (BlockCopy(0, 3, 2), BlockCopy(0, 2, 3), BlockCopy(1, 2, 2))
    cache.move(BatchPlan(step=1, rows=(), parks=parks))
    for g, source, _ in parks:
        cache._blocks[g][source] = 0.0
    cache.move(BatchPlan(step=2, rows=(), unparks=(BlockCopy(0, 2, 3), BlockCopy(0, 3, 2), BlockCopy(1, 2, 2))))
    for mine, theirs in zip(cache._blocks, before, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert _Elsewhere.waits == [False] * 6
