"""`Lookout`: knows in this process, for as long as requests are refused, whether the pool has a place.

Owns the calls by which the Board says so, and when they are made: one that it answers as soon as there is a place, or none any
more, begun by a refusal and ended when nobody was refused for a while; and a short one when promises run low. What is refused
here, with which promise, is `routing/doorman.py`'s to say. Knows asyncio and the Board's `room`; no Ray, no HTTP.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ..errors import QueueFullError
from ..routing.doorman import Doorman
from ..routing.replies import Room


class Lookout:
    """`ask` calls a method of the Board; None: there is no Board. One for each event loop."""

    def __init__(self, ask: Callable[..., Awaitable[Any]], clock: Callable[[], float]) -> None:
        self._ask, self._clock = ask, clock
        self._doorman = Doorman()
        self._watching: asyncio.Task[None] | None = None
        self._stocking: asyncio.Task[None] | None = None

    def asks_first(self, priority: int = 0) -> bool:
        """Whether a request should ask the Board for a place before anything else: others were refused a moment ago.

        Raises QueueFullError, without a word to the Board, while the pool is known to have none.
        """
        now = self._clock()
        refused = self._doorman.refuse(now, priority)
        if refused is None:
            return self._doorman.asks_first(now, priority)
        if self._doorman.is_low(now) and (self._stocking is None or self._stocking.done()):
            self._stocking = _apart(self._stock())
        raise QueueFullError(refused.waiting, refused.limit, refused.retry_after_s)

    def asking(self) -> None:
        """A request asks the Board for a place."""
        self._doorman.ask()

    def answered(self, room: Room | None) -> None:
        """It has its answer, and this is how the pool looks; None: there was none."""
        self._doorman.answer(self._clock(), room)

    def refused(self) -> None:
        """A request was refused."""
        self._doorman.refused(self._clock())
        if self._watching is None or self._watching.done():
            self._watching = _apart(self._watch())

    def lost(self) -> None:
        """The Board that was heard has died."""
        self._doorman.lose()

    def close(self) -> None:
        for task in (self._watching, self._stocking):
            if task is not None:
                task.cancel()

    async def _watch(self) -> None:
        """Hear whether there is a place, until there is one and nobody was refused for a while."""
        heard: bool | None = None
        try:
            while (room := await self._room(heard)) is not None:
                self._doorman.hear(self._clock(), room)
                heard = room.full
                if not heard and self._doorman.is_calm(self._clock()):
                    break
        finally:
            self._doorman.lose()

    async def _stock(self) -> None:
        room = await self._room(None)
        if room is not None:
            self._doorman.stock(self._clock(), room)

    async def _room(self, heard: bool | None) -> Room | None:
        return await self._ask("room", heard, self._doorman.wants(self._clock()), self._doorman.tell())


def _apart(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task that belongs to no request: Ray cancels what a cancelled request has called."""
    return asyncio.create_task(work, context=contextvars.Context())
