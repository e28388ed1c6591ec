"""Who may ask the engine to stop or to stand still, and how it answers. With `mailbox.py`, the only place with locks.

Owns `StopGate` (only rises), `PauseGate` (several holders), `turnstile` (one thread at a time) and `UpdateGate` (one, and no
line). Knows no request and no model.
A gate never touches the engine: whoever asks also rings, and the engine thread looks at its gates between two steps.

    stop    RUNNING ──▶ FLUSH ──▶ HARD            never back; a restart gets a new gate
    pause   hold ──ring──▶ engine parks ──▶ holder works ──▶ last holder leaves ──▶ engine goes on
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

from ..errors import EngineStoppedError, UpdateRunningError

Ring = Callable[[], None]


class StopLevel(enum.IntEnum):
    """How much of its work the engine still does."""

    RUNNING = 0
    FLUSH = 1  # nothing new; what is here is finished
    HARD = 2  # nothing more; what is here fails


class StopGate:
    """How far the engine is to stop. It only rises (law L8)."""

    def __init__(self, ring: Ring) -> None:
        self._lock = threading.Lock()
        self._level = StopLevel.RUNNING
        self._ring = ring

    @property
    def level(self) -> StopLevel:
        return self._level

    def rise(self, level: StopLevel) -> None:
        """Stop at least this much. Any thread may ask; asking for less than before changes nothing."""
        with self._lock:
            self._level = max(self._level, level)
        self._ring()


class PauseGate:
    """Holds the engine between two steps for as long as anybody wants it held.

    A thread may hold it several times over; several threads may hold it at once; the engine goes on when the last one has left.
    """

    def __init__(self, ring: Ring) -> None:
        self._changed = threading.Condition()
        self._holders: dict[int, int] = {}  # thread -> how often
        self._parked = False
        self._ended = False
        self._let_go = False
        self._cause: BaseException | None = None
        self._ring = ring

    @property
    def wanted(self) -> bool:
        """Whether anybody holds the gate, or waits for it."""
        return bool(self._holders)

    def held_here(self) -> bool:
        """Whether the calling thread is inside `hold`."""
        return threading.get_ident() in self._holders

    @contextmanager
    def hold(self) -> Generator[None]:
        """Wait until the engine stands still; it stands still until the block ends.

        Raises EngineStoppedError (a RuntimeError), from the engine's own error if it had one, when the engine ends instead.
        """
        me = threading.get_ident()
        self._enter(me)
        try:
            yield
        finally:
            self._leave(me)

    def _enter(self, me: int) -> None:
        with self._changed:
            if not self._ended:
                self._holders[me] = self._holders.get(me, 0) + 1
                self._changed.notify_all()
        try:
            self._ring()
            with self._changed:
                self._changed.wait_for(lambda: self._parked or self._ended)
                if self._ended:
                    raise EngineStoppedError("the engine ended before it could be paused") from self._cause
        except BaseException:
            self._leave(me)
            raise

    def _leave(self, me: int) -> None:
        with self._changed:
            depth = self._holders.pop(me, 0) - 1
            if depth > 0:
                self._holders[me] = depth
            self._changed.notify_all()

    def park(self) -> None:
        """For the engine thread: stand still until the last holder has left, or until `let_go`."""
        with self._changed:
            self._parked = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._holders or self._let_go)
            self._parked = False

    def meet(self, timeout: float) -> None:
        """For the engine thread of a rank that does not lead: the leader's rank is paused, and a holder here will come, or has.

        Waits for it and stands still until the last holder here has left. Raises TimeoutError after `timeout` seconds without one.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._holders or self._let_go, None if timeout == math.inf else timeout):
                raise TimeoutError(f"the leader is paused, and nobody paused this rank within {timeout:g} s; all ranks must")
        self.park()

    def let_go(self) -> None:
        """A hard stop does not wait for holders."""
        with self._changed:
            self._let_go = True
            self._changed.notify_all()

    def end(self, cause: BaseException | None) -> None:
        """The engine has ended: free whoever waits for it to park."""
        with self._changed:
            self._ended, self._cause = True, cause
            self._changed.notify_all()


def turnstile() -> AbstractContextManager[object]:
    """Lets one thread at a time through; the same thread may pass again while it is inside."""
    return threading.RLock()


class UpdateGate:
    """Lets one weight update through; whoever comes meanwhile is told so instead of waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._what = ""

    @contextmanager
    def through(self, what: str) -> Generator[None]:
        """Raises UpdateRunningError, naming what is under way, while somebody is inside."""
        if not self._lock.acquire(blocking=False):
            raise UpdateRunningError(self._what)
        try:
            self._what = what
            yield
        finally:
            self._lock.release()
