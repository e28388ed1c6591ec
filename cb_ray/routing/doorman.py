"""What a door refuses by itself while the pool is full: it has places promised ahead, and hears as soon as there is one.

Owns `Doorman`. May know no clock or network: `now` is the door's own (seconds, any origin), and what the pool says comes in as
`Room`, in the order in which it was said.

    the pool says that it is full, with promises ────────────▶ refused here, each caller with a promise of its own
    it says that there are places; it has not been heard ────▶ the pool is asked, by as many at once as there are places
    for `believes_s`; or no promise is left

Invariants: a doorman refuses and never admits; after word of places it refuses nobody before as many are asking for them; a promise
is given to one caller, and before its time.
"""

from __future__ import annotations

import heapq
import math

from .replies import Refused, Room

_CONTESTED_S = 1.0  # so short a while after a refusal, the next may be near
_CALM_S = 10.0


class Doorman:
    """See the module. `promises`: how many are kept ahead."""

    def __init__(self, promises: int = 8, believes_s: float = 2.0) -> None:
        self._promises, self._believes_s = promises, believes_s
        self._room: Room | None = None  # as the pool last said
        self._heard_at = self._refused_at = -math.inf
        self._returns: list[float] = []  # a heap: when promised places should be free
        self._untold = 0
        self._asking = 0  # callers whose question is on its way

    def hear(self, now: float, room: Room) -> None:
        """What the pool says. What was said before the last that was heard brings its promises only."""
        if self._room is None or room.number >= self._room.number:
            self._room = room
        self.stock(now, room)

    def ask(self) -> None:
        """A caller asks the pool for a place."""
        self._asking += 1

    def answer(self, now: float, room: Room | None) -> None:
        """The pool has answered one who asked; `room` is how it looks since. Who does not listen to the pool does not note it: he would
        not hear when it changes."""
        self._asking -= 1
        if room is not None and self._room is not None:
            self.hear(now, room)

    def stock(self, now: float, room: Room) -> None:
        """Promises for what comes next, and a sign that the pool lives."""
        self._heard_at = now
        for wait in room.returns:
            heapq.heappush(self._returns, now + wait)

    def lose(self) -> None:
        """The pool is not heard any more, and its promises are void."""
        self._room, self._heard_at, self._returns = None, -math.inf, []

    def refused(self, now: float) -> None:
        """Somebody was refused, here or by the pool."""
        self._refused_at = now

    def refuse(self, now: float, priority: int = 0) -> Refused | None:
        """A refusal with a place promised to nobody else, or None: then the pool is to be asked."""
        room = self._room
        if room is None or now - self._heard_at > self._believes_s or self._goes_first(priority):
            return None
        if self._asking < room.free:
            return None
        self._forget_past(now)
        if not self._returns:
            return None
        self.refused(now)
        self._untold += 1
        return Refused(ticket="", waiting=room.waiting, limit=room.limit, retry_after_s=heapq.heappop(self._returns) - now)

    def asks_first(self, now: float, priority: int = 0) -> bool:
        """Whether a request should ask for a place before it costs anything. Who goes before all that wait is not refused for their
        number alone, so he asks for a replica at once."""
        return now - self._refused_at < _CONTESTED_S and not self._goes_first(priority)

    def is_calm(self, now: float) -> bool:
        """Whether nobody was refused for so long that the pool need not be watched."""
        return now - self._refused_at >= _CALM_S

    def is_low(self, now: float) -> bool:
        """Whether the pool should be asked for more promises, or for a sign of life, before one is missed."""
        self._forget_past(now)
        return len(self._returns) <= self._promises // 2 or now - self._heard_at > self._believes_s / 2

    def wants(self, now: float) -> int:
        """How many promises to ask for."""
        self._forget_past(now)
        return self._promises - len(self._returns)

    def tell(self) -> int:
        """How many were refused here since this was last asked."""
        told, self._untold = self._untold, 0
        return told

    def _goes_first(self, priority: int) -> bool:
        return self._room is not None and self._room.first is not None and priority < self._room.first

    def _forget_past(self, now: float) -> None:
        while self._returns and self._returns[0] <= now:
            heapq.heappop(self._returns)
