"""The body of the engine thread on a rank that does not lead: it takes orders and executes them, until the leader says stop.

Owns `FollowerLoop`. Knows no request, no plan and no clock; what a request was is known to the leader alone. An owner on this rank
may pause together with the leader's, hears what the leader tells, and sees the session end when the leader's ends.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..messages import EngineStats
from ..runtime.orders import Command, Order, message_of
from .gates import PauseGate

if TYPE_CHECKING:
    from ..runtime.orders import Follower
    from .parts import Runner

logger = logging.getLogger(__name__)


class FollowerLoop:
    """One session of a follower. `run` is the thread's body; it returns when the leader's session is over, or the leader gone."""

    def __init__(
        self,
        follower: Follower,
        runner: Runner,
        *,
        stats: EngineStats,
        pause: PauseGate | None = None,
        failed: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        """`failed` is called at once when something raises, though the loop goes on until the leader knows it, too."""
        self._follower, self._runner = follower, runner
        self._pause = pause
        self._failed = failed
        self.stats = stats
        self.error: BaseException | None = None
        self.keep = False
        self.told: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: nothing more will come

    @property
    def num_steps(self) -> int:
        """Forward passes made in this session."""
        return self._follower.num_passes

    def run(self) -> None:
        """Follow until told to stop. Never raises: an error is kept in `error`."""
        try:
            while (order := self._follower.receive()).command != Command.STOP:
                if self.error is None or order.command == Command.RESTORE:
                    self._obey(order)
            self.keep = bool(order.argument)
        except BaseException as error:
            self._fail(error)
        finally:
            self._runner.restore()
            self.told.put(None)

    def _obey(self, order: Order) -> None:
        """What raises here has raised on the leader as well, or will leave it waiting in vain: it ends its session, and says so."""
        try:
            if order.command == Command.TELL:
                self.told.put(message_of(order))
                return
            self._follower.obey(order)
        except Exception as error:
            self._fail(error)
        if order.command == Command.RESTORE and order.argument and self._pause is not None:
            self._pause.meet(self._follower.ranks.timeout_s)
            self._follower.ranks.barrier()

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            logger.error("rank %d failed and follows no more", self._follower.ranks.rank, exc_info=error)
            self._failed(error)
