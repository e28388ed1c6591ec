"""The one stream that a runner's device work is ordered on, and the packed buffer's way to the device.

Owns `ComputeStream` and `Staging`. Since everything runs on one stream in the order it was submitted, a block that step N has freed may
be given out while step N + 1 still runs, and a static buffer may be written again while the step that reads it is still queued.

    host     pack N │ pack N + 1 │ collect N │ pack N + 2 │ …
    stream          │ copy N │ step N │ tokens N │ copy N + 1 │ step N + 1 │ …
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np
import torch


class ComputeStream:
    """On a device without streams: everything happens at once, and there is nothing to order."""

    @staticmethod
    def of(device: torch.device) -> ComputeStream:
        return _CudaStream(device) if device.type == "cuda" else ComputeStream()

    def begin(self) -> None:
        """Work of other streams so far is done before any of this one's: weights may have been written there."""

    def end(self) -> None:
        """Wait until the stream is idle: what was computed here may be read anywhere."""

    def synchronize(self) -> None:
        self.end()

    def record(self) -> Any:
        """An event after the work so far, with a `synchronize`; None: the work is done."""
        return None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class _CudaStream(ComputeStream):
    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)
        self._entered: list[AbstractContextManager[Any]] = []

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def end(self) -> None:
        self._stream.synchronize()

    def record(self) -> Any:
        return self._stream.record_event()

    def __enter__(self) -> None:
        entered: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        entered.__enter__()
        self._entered.append(entered)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered.pop().__exit__(kind, error, trace)


class Staging:
    """Sends packed buffers to one buffer on the device: through pinned host buffers in turn, each used again when its copy is done.

    `capacity` in integers; a larger buffer takes its place when one is needed, unless it is `fixed`: graphs know its address.
    """

    def __init__(self, device: torch.device, capacity: int, *, fixed: bool = False, turns: int = 3) -> None:
        self._pins = device.type == "cuda"
        self._fixed = fixed
        self._device = device
        self._turns = turns
        self._turn = 0
        self._make(capacity)

    def _make(self, capacity: int) -> None:
        self.buffer = torch.zeros(capacity, dtype=torch.int32, device=self._device)
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=self._pins) for _ in range(self._turns)]
        self._copied: list[Any] = [None] * self._turns

    def send(self, host: np.ndarray) -> torch.Tensor:
        """`host` on the device: the first part of `buffer`, good until the next call's copy."""
        n = len(host)
        if n > len(self.buffer):
            assert not self._fixed, f"{n} integers do not fit the {len(self.buffer)} that graphs know"
            self._make(max(n, 2 * len(self.buffer)))
        turn = self._turn = (self._turn + 1) % self._turns
        if self._copied[turn] is not None:
            self._copied[turn].synchronize()
        self._hosts[turn][:n].numpy()[:] = host
        self.buffer[:n].copy_(self._hosts[turn][:n], non_blocking=self._pins)
        if self._pins:
            self._copied[turn] = torch.cuda.current_stream(self._device).record_event()
        return self.buffer[:n]
