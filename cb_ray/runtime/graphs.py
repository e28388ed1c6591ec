"""CUDA graphs of whole forward passes: which sizes steps are padded to, and which passes were captured. Owns both.

A captured pass runs the same kernels on the same addresses whatever the host knows, at the cost of one launch. So a step that fits is
padded to one of a few sizes, its packed buffer is copied to where every graph reads, and the pass of that size is replayed:

    rows         1 2 4 8 │ 16 … 64 by 8 │ … 256 by 16 │ by 64               of steps of single tokens; or 2ⁿ, of chunks
    tokens       the rows, or a multiple of `q_interval` up to 8 of them    of steps with chunks; larger ones gain nothing
    table pages  `decode_width` × 4ⁿ, or a multiple of `kv_interval` tokens

Tokens that are carried over are put in place before the replay, so their number is no matter of sizes. At most `limit` graphs are
kept; a new one takes the place of the one used longest ago only if that was long ago, and is run plainly otherwise. All share one pool
of memory, since no two ever run at once. Knows no plan, no model and no request.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from ..sizing import MOST_GRAPHS
from .inputs import Padded, StepInputs, unpack
from .streams import Staging

logger = logging.getLogger(__name__)
_MOST_INTERVALS = 8


class Capture(Protocol):
    """A captured pass."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """What captures: CUDA's graphs, or a stand-in that records torch's operations."""

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Capture, torch.Tensor]:
        """Record `run`, having run it before as often as it takes to be ready; its output is written anew by each replay."""
        ...


class CudaRecorder:
    """`torch.cuda.CUDAGraph` on the current stream, which must not be the default one; one pool for all captures."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Capture, torch.Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        run()  # libraries make their handles and workspaces now, not in the graph
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            output = run()
        finally:
            graph.capture_end()
        return graph, output


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """To what steps are padded. All lengths in pages but for those in tokens."""

    varlen: bool  # steps with chunks are captured, too
    decode: bool
    decode_width: int
    full_width: int  # pages of the longest request that a graph serves
    max_rows: int
    q_interval: int  # tokens
    kv_pages: int
    page_size: int

    def padding(self, sizes: Padded) -> Padded | None:
        """The sizes of the graph for such a step; None: it is run as it is."""
        if sizes.width > self.full_width:
            return None
        if sizes.tokens == sizes.rows:
            return self._decode(sizes) if self.decode and sizes.rows <= row_steps(self.max_rows) else None
        if not self.varlen or sizes.tokens > self.q_interval * _MOST_INTERVALS:
            return None
        tokens = _up(sizes.tokens, self.q_interval)
        rows = 1 << (sizes.rows + (tokens > sizes.tokens) - 1).bit_length()  # with one for the padding tokens
        rows = 2 * rows if rows == tokens else rows  # as many rows as tokens would be single tokens
        needed = max(sizes.width, -(-(tokens - sizes.tokens) // self.page_size))
        return Padded(tokens, rows, rows, max(needed, min(_up(needed, self.kv_pages), self.full_width)))

    def _decode(self, sizes: Padded) -> Padded | None:
        width = self.decode_width
        while width < sizes.width:
            width *= 4
        rows = row_steps(sizes.rows)
        return Padded(rows, rows, rows, max(sizes.width, min(width, self.full_width)))

    def has(self, sizes: Padded) -> bool:
        """Whether a step of these very sizes is run by a graph."""
        if sizes.samples != sizes.rows:
            return False
        if sizes.tokens == sizes.rows:
            return self.padding(sizes) == sizes
        whole = sizes.tokens % self.q_interval == 0 and sizes.rows & (sizes.rows - 1) == 0
        return whole and self.padding(replace(sizes, rows=1)) is not None

    def rehearsals(self) -> list[Padded]:
        """Decode sizes for every number of rows, the largest first: later captures find its memory in the pool."""
        rows, found = 1, []
        while self.decode and rows <= row_steps(self.max_rows):
            found.append(Padded(rows, rows, rows, min(self.decode_width, self.full_width)))
            rows = row_steps(rows + 1)
        return found[::-1]

    def capacity(self, num_groups: int) -> int:
        """Integers of the largest packed buffer."""
        rows = max(row_steps(self.max_rows), 2 * self.q_interval * _MOST_INTERVALS)
        return 8 * rows + num_groups * (rows + rows * (self.full_width + self.kv_pages))


def row_steps(rows: int) -> int:
    """The next number of rows that there is a graph for."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    return _up(rows, 8 if rows <= 64 else 16 if rows <= 256 else 64)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


@dataclass(slots=True)
class _Kept:
    capture: Capture
    inputs: StepInputs
    output: torch.Tensor
    used: int = 0  # the run that used it last


class Graphs:
    """The captured passes of one runner, and the static buffer that they read."""

    def __init__(
        self,
        sizes: Sizes,
        recorder: Recorder,
        device: torch.device,
        num_groups: int,
        limit: int = MOST_GRAPHS,
        patience: int = 2048,
    ) -> None:
        """`patience`: a graph that was used in one of so many runs is not given up for another."""
        self._patience = patience
        self._runs = 0
        self.sizes = sizes
        self._recorder = recorder
        self._limit = limit
        self._staging = Staging(device, sizes.capacity(num_groups), fixed=True)
        self._kept: OrderedDict[tuple[int, ...], _Kept] = OrderedDict()
        self._broken = False

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def buffer(self) -> torch.Tensor:
        """What every graph reads its step from."""
        return self._staging.buffer

    def padding(self, sizes: Padded) -> Padded | None:
        return None if self._broken else self.sizes.padding(sizes)

    def has(self, sizes: tuple[int, ...]) -> bool:
        return not self._broken and self.sizes.has(Padded.of(sizes))

    def rehearsals(self) -> list[Padded]:
        return self.sizes.rehearsals()

    def run(
        self,
        host: np.ndarray,
        sizes: tuple[int, ...],
        carry: Callable[[StepInputs], None],
        compute: Callable[[StepInputs], torch.Tensor],
    ) -> torch.Tensor:
        """The pass of a packed buffer of these sizes; `compute` is it, and is called only where it must be captured first.

        The result is written over by the next run.
        """
        self._runs += 1
        inputs = unpack(self._staging.send(host), host, sizes)
        carry(inputs)
        key = (*sizes[:3], *sizes[4:])
        kept = self._kept.get(key)
        if kept is None:
            empty = inputs.carry_to[:0]
            fixed = replace(inputs, row_starts=[], row_lengths=[], carry_to=empty, carry_from=empty, fixed=True)
            kept = self._capture(key, fixed, compute)
            if kept is None:
                return compute(fixed)
        self._kept.move_to_end(key)
        kept.used = self._runs
        kept.capture.replay()
        return kept.output

    def _capture(self, key: tuple[int, ...], inputs: StepInputs, compute: Callable[[StepInputs], torch.Tensor]) -> _Kept | None:
        if len(self._kept) >= self._limit:
            oldest, unused = next(iter(self._kept.items()))
            if self._runs - unused.used <= self._patience:
                return None
            del self._kept[oldest]
        try:
            capture, output = self._recorder.capture(lambda: compute(inputs))
        except Exception as error:  # an operation that asks the device, or no memory: slower, and still right
            logger.warning("steps are run without graphs from now on: %s: %s", type(error).__name__, error)
            self._broken = True
            self._kept.clear()
            return None
        kept = self._kept[key] = _Kept(capture, inputs, output)
        return kept
