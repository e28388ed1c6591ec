"""Simulated time: a heap of what is due, and nothing else. Owns `Agenda` and the unit of time.

Time is a whole number of femtoseconds, so that k equal steps end at the very instant at which one leap over them ends. What is due
at one instant runs in an order that does not depend on how it came to be due: by turn, then by actor, then first come, first served.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum

TICKS_PER_S = 10**15


def ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_S)


def seconds(at: int) -> float:
    return at / TICKS_PER_S


class Turn(IntEnum):
    """Who goes first at one instant. Steps end before anything else happens: whoever looks sees them done."""

    STEP = 0
    ENGINE = 1  # something reaches an engine
    BEAT = 2  # an engine tells of itself, and of what has just reached it
    BOARD = 3  # something reaches the Board
    CONTROL = 4  # Serve's controller
    CLIENT = 5


class Agenda:
    """What is still to happen. `run` ends when nothing is left."""

    def __init__(self) -> None:
        self.now = 0
        self._heap: list[tuple[int, int, int, int, Callable[[int], None]]] = []
        self._serial = 0

    def at(self, when: int, turn: Turn, actor: int, call: Callable[[int], None]) -> None:
        """Call `call(when)` then; the past counts as now. `actor` numbers who is concerned."""
        self._serial += 1
        heapq.heappush(self._heap, (when if when > self.now else self.now, turn, actor, self._serial, call))

    @property
    def num_events(self) -> int:
        """What has happened so far."""
        return self._serial - len(self._heap)

    def run(self) -> None:
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.now, _, _, _, call = pop(heap)
            call(self.now)
