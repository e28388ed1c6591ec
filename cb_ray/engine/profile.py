"""What a step of a model needs beside weights and cache, found by running one. Owns the measurement, before anything is sized.

Arithmetic over config fields is a guess; on a GPU the allocator knows. Knows ways and torch's memory counters; decides nothing.
"""

from __future__ import annotations

import logging
from typing import Protocol, cast

import torch
from transformers import PreTrainedModel

from ..config import ContinuousBatchingConfig
from ..runtime.inputs import Padded
from ..runtime.kv_cache import KVCache
from ..runtime.packed_forward import PackedForward
from ..runtime.trial import trial_layout
from .ways import Way

logger = logging.getLogger(__name__)
_FEWEST, _USUAL = 256, 8192  # tokens
_SPARE = 1.05  # the allocator hands out whole segments


class Meter(Protocol):
    """Counts a device's memory."""

    def begin(self) -> None: ...
    def peak(self) -> int:
        """The most bytes in use since `begin`, beyond those in use then."""
        ...

    def release(self) -> None:
        """Give back what is cached and not in use."""
        ...


class CudaMeter:
    """torch's counters of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def release(self) -> None:
        torch.cuda.empty_cache()


def profiled(model: PreTrainedModel, way: Way, config: ContinuousBatchingConfig, meter: Meter | None = None) -> int:
    """Bytes per token of a step's peak, measured with the largest step that is wished for and fits; the fewer, the less exact."""
    meter = meter or CudaMeter(model.device)
    page = max(config.page_size, way.page_multiple, 4)
    layout = trial_layout(way.layers, page, model.dtype.itemsize)
    cache = KVCache(layout, dtype=model.dtype, device=model.device)
    forward = cast("PackedForward", way.make(cache))
    tokens = config.max_batch_tokens or _USUAL
    try:
        forward.install()
        while True:
            meter.begin()
            try:
                with torch.inference_mode():
                    forward.rehearse(Padded(tokens, 1, 1, -(-tokens // page)))
                return int(_SPARE * meter.peak()) // tokens + 1
            except torch.OutOfMemoryError:
                if tokens <= _FEWEST:
                    raise
                meter.release()
                tokens //= 2
    finally:
        forward.close()
        del forward, cache
        meter.release()
