"""The leader's orders to the other ranks of a model, in one stream. Owns their form on the wire, and what a follower does with each.

The leader alone has requests, a scheduler and a clock. Followers keep nothing between two orders but the bytes of their cache, so
there is nothing that could drift; and since every collective happens inside an order, no two ranks can disagree on what is next.

    leader's engine thread                                          follower's thread
    ──────────────────────                                          ─────────────────
    install()  ─────────── INSTALL ─────────────────────────────▶   the model's attention on our pages
    core.plan ─▶ move ──── MOVE    [(park|unpark|fork) × (g, s, t)] ▶ copy blocks
                 pack ──── RUN     [ids positions … slots tables] ─▶ unpack
                   │                                                  │
                   ├── carried tokens (device group) ────────────────▶┤      only where a row needs the step before
                   ▼                                                  ▼
                 forward ◀────── the model's own all-reduces ─────▶ forward
                   ▼                                                  ▼
                 logits, gathered on all ranks                      dropped
                   ▼
                 sample ─▶ commit ─▶ chunks                          (followers never sample: nothing depends on equal rounding)
    restore()  ─────────── RESTORE [together] ──────────────────▶   the model as its owner knows it
                             a pause that every rank's owner takes part in ends when all have met
    reload()   ─────────── RELOAD  ─────────────────────────────▶   copies of weights in other layouts are made anew
    tell()     ─────────── TELL    [bytes] ─────────────────────▶   for the owner on that rank
    stop()     ─────────── STOP    [keep] ──────────────────────▶   the session is over

One order is one broadcast of a frame of fixed size; what does not fit follows in a second one.

    frame int32   │ command │ number │ argument │ n │ six sizes │ … 16 │ first 4,080 integers of the payload │
    rest  int32   │ payload[4,080 : n] │                                 only if n > 4,080
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from ..core.plan import BatchPlan, BlockCopy
from .ranks import Ranks

logger = logging.getLogger(__name__)
_HEAD, _FRAME = 16, 4096  # integers
_NOTHING = np.empty(0, np.int32)


class Command(enum.IntEnum):
    """What a follower is told to do."""

    INSTALL = 1
    RESTORE = 2
    RELOAD = 3
    MOVE = 4
    RUN = 5
    TELL = 6
    STOP = 7


@dataclass(frozen=True, slots=True)
class Order:
    """One order as it arrives. `payload` is int32 [n]; what `argument` and `sizes` mean depends on the command."""

    command: Command
    argument: int
    sizes: tuple[int, ...]
    payload: np.ndarray


class Runner(Protocol):
    """What puts the model on our pages and gives it back: a `ModelRunner`."""

    def install(self) -> None: ...
    def restore(self) -> None: ...
    def reload(self) -> None: ...


class Executor(Protocol):
    """What moves blocks and runs the model over a packed buffer: a `PackedForward`."""

    def move(self, plan: BatchPlan) -> None: ...
    def execute(self, host: np.ndarray, sizes: tuple[int, ...], every_token: bool) -> object: ...


class _Stream:
    """Both ends of the stream count orders: a lost one would be noticed."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._frame = torch.zeros(_FRAME, dtype=torch.int32)
        self._number = 0

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=self.ranks.leader, group=self.ranks.orders_group)


class Orders(_Stream):
    """The leader's end. Every method returns when the followers have taken the order, not when it is done.

    Raises RuntimeError when a follower is gone or takes nothing within the ranks' timeout, and from then on at once.
    """

    def __init__(self, ranks: Ranks, *, owned: bool = True) -> None:
        """`owned`: every rank's program has a manager of its own and pauses it together with the leader's (torchrun)."""
        super().__init__(ranks)
        self.owned = owned
        self.together = False  # set by whoever pauses: the owners of all ranks pause now, and meet before work goes on
        self._installed = False
        self._asked_together = False
        self._broken = False

    def install(self) -> None:
        """Idempotent."""
        if self._installed:
            return
        if self.together:
            if not self._asked_together:
                self._send(Command.RESTORE, argument=1)
            self.ranks.barrier()
            self.together = self._asked_together = False
        self._send(Command.INSTALL)
        self._installed = True

    def restore(self) -> None:
        """Idempotent. Never raises: the next order will."""
        if self._installed:
            self._installed = False
            self._asked_together = self.together
            self._try(Command.RESTORE, int(self.together))

    def reload(self) -> None:
        """The weights are others now, on every rank."""
        self._send(Command.RELOAD)

    def move(self, plan: BatchPlan) -> None:
        """The plan's block copies, if it has any."""
        kinds = (plan.parks, plan.unparks, plan.copies)
        if any(kinds):
            payload = np.array([number for copies in kinds for copy in copies for number in copy], np.int32)
            self._send(Command.MOVE, payload, tuple(map(len, kinds)))

    def run(self, host: np.ndarray, sizes: tuple[int, ...], every_token: bool) -> None:
        """A forward pass over a packed buffer (`inputs.pack`)."""
        self._send(Command.RUN, host, sizes, int(every_token))

    def tell(self, message: bytes) -> None:
        """Something for the owners of the other ranks."""
        padded = message + b"\0" * (-len(message) % 4)
        self._send(Command.TELL, np.frombuffer(padded, np.int32), argument=len(message))

    def stop(self, *, keep: bool) -> None:
        """The session is over; `keep`: parts are kept for the next one. Never raises."""
        self._try(Command.STOP, int(keep))

    def _try(self, command: Command, argument: int) -> None:
        if self._broken:
            return
        try:
            self._send(command, argument=argument)
        except RuntimeError as error:
            logger.warning("the other ranks of this model did not hear of %s: %s", command.name, error)

    def _send(self, command: Command, payload: np.ndarray = _NOTHING, sizes: Sequence[int] = (), argument: int = 0) -> None:
        if self._broken:
            raise RuntimeError("the other ranks of this model are gone; start all of them again")
        self._number += 1
        frame, n = self._frame.numpy(), len(payload)
        frame[:_HEAD] = 0
        frame[:4] = command, self._number, argument, n
        frame[4 : 4 + len(sizes)] = sizes
        head = payload[: _FRAME - _HEAD]
        frame[_HEAD : _HEAD + len(head)] = head
        try:
            self._broadcast(self._frame)
            if n > len(head):
                self._broadcast(torch.from_numpy(np.ascontiguousarray(payload[len(head) :], np.int32)))
        except BaseException:
            self._broken = True
            raise


class Follower(_Stream):
    """A follower's end: takes orders, and executes those about the model."""

    def __init__(self, ranks: Ranks, runner: Runner, executor: Executor) -> None:
        super().__init__(ranks)
        self._runner = runner
        self._executor = executor
        self.num_passes = 0

    def receive(self) -> Order:
        """The next order, however long it takes. Raises RuntimeError when the leader is gone."""
        self._broadcast(self._frame)
        command, number, argument, n, *sizes = self._frame[:_HEAD].tolist()
        self._number += 1
        if number != self._number:
            raise RuntimeError(f"order {self._number} is missing: the leader sent number {number}")
        payload = np.empty(n, np.int32)
        head = min(n, _FRAME - _HEAD)
        payload[:head] = self._frame.numpy()[_HEAD : _HEAD + head]
        if n > head:
            rest = torch.from_numpy(payload[head:])
            self._broadcast(rest)
        return Order(Command(command), argument, tuple(sizes[:6]), payload)

    def obey(self, order: Order) -> None:
        """Execute INSTALL, RESTORE, RELOAD, MOVE or RUN. Raises whatever the model raises."""
        if order.command == Command.INSTALL:
            self._runner.install()
        elif order.command == Command.RESTORE:
            self._runner.restore()
        elif order.command == Command.RELOAD:
            self._runner.reload()
        elif order.command == Command.MOVE:
            self._executor.move(_moves(order))
        elif order.command == Command.RUN:
            with torch.inference_mode():
                self._executor.execute(order.payload, order.sizes, bool(order.argument))
            self.num_passes += 1


def message_of(order: Order) -> bytes:
    """What a TELL says."""
    return order.payload.tobytes()[: order.argument]


def _moves(order: Order) -> BatchPlan:
    """A plan of nothing but the order's block copies."""
    copies = [BlockCopy(*triple) for triple in order.payload.reshape(-1, 3).tolist()]
    parks, unparks = order.sizes[0], order.sizes[0] + order.sizes[1]
    return BatchPlan(
        step=0, rows=(), parks=tuple(copies[:parks]), unparks=tuple(copies[parks:unparks]), copies=tuple(copies[unparks:])
    )
