"""The waiting line: first come, first served within a priority, and those who were admitted before go to the head.

Owns `WaitingLine`. May know nothing but the values beside it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from .loads import Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One who waits, and since when."""

    ask: Ask
    since: float


class WaitingLine:
    """Lower priorities are served first; within one, order of arrival. Leaving from anywhere costs O(1)."""

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[str, Waiting]] = {}
        self._priority: dict[str, int] = {}
        self.num_tokens = 0  # prompt tokens of all who wait
        self.num_readmitted = 0

    def __len__(self) -> int:
        return len(self._priority)

    def __contains__(self, ticket: str) -> bool:
        return ticket in self._priority

    def __iter__(self):  # type: ignore[no-untyped-def]
        """Everyone, in the order of service."""
        for priority in sorted(self._queues):
            yield from self._queues[priority].values()

    def push(self, waiting: Waiting) -> None:
        ask = waiting.ask
        queue = self._queues.setdefault(ask.priority, OrderedDict())
        queue[ask.ticket] = waiting
        if ask.readmit:
            queue.move_to_end(ask.ticket, last=False)
            self.num_readmitted += 1
        self._priority[ask.ticket] = ask.priority
        self.num_tokens += ask.num_tokens

    def head(self) -> Waiting | None:
        """Who is next, or None when nobody waits."""
        return next(iter(self._queues[min(self._queues)].values())) if self._queues else None

    def remove(self, ticket: str) -> Waiting | None:
        """Take one out, wherever it stands; None if it does not wait."""
        priority = self._priority.pop(ticket, None)
        if priority is None:
            return None
        queue = self._queues[priority]
        waiting = queue.pop(ticket)
        if not queue:
            del self._queues[priority]
        self.num_tokens -= waiting.ask.num_tokens
        self.num_readmitted -= waiting.ask.readmit
        return waiting
