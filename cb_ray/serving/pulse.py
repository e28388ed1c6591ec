"""What an engine replica tells the Board, and when: soon after something happened, at most every `interval_s`, never when idle.

Owns `Pulse`: one timer and the sending. What is told, and when it is due, is `routing/reporter.py`'s to say. Knows the messages
and the event loop it runs on; no Ray, no model. Nothing is polled: a request that begins, moves or ends starts the timer; when the
last change has been told there is no timer.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections.abc import Awaitable, Callable

from ..messages import EngineStats
from ..routing.members import Beat, BeatReply
from ..routing.reporter import PageNews, Reporter

logger = logging.getLogger("ray.serve")


class Pulse:
    """`send` delivers a beat and returns the answer, or None when it did not arrive; `stats` and `pages` read the engine;
    `cancel` ends a request in it. Must be made and used on one event loop."""

    def __init__(
        self,
        replica: str,
        *,
        send: Callable[[Beat], Awaitable[BeatReply | None]],
        stats: Callable[[], EngineStats],
        cancel: Callable[[str], None],
        page_size: int,
        pages: Callable[[bool], PageNews] | None = None,
        interval_s: float = 0.25,
        busy_interval_s: float = 0.05,
    ) -> None:
        self._send, self._read, self._cancel, self._pages = send, stats, cancel, pages
        self._reporter = Reporter(replica, stats(), page_size=page_size, interval_s=interval_s, busy_interval_s=busy_interval_s)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0  # when the timer rings; not every event loop's handles tell
        self._sending: asyncio.Task[None] | None = None

    @property
    def num_live(self) -> int:
        return self._reporter.num_live

    @property
    def reply(self) -> BeatReply | None:
        """What the Board last said."""
        return self._reporter.reply

    def begin(self, request_id: str) -> None:
        self._reporter.begin(request_id)
        self._arm()

    def moved(self, request_id: str, tokens: int) -> None:
        """So many more tokens were emitted."""
        self._reporter.moved(request_id, tokens)
        self._arm()

    def end(self, request_id: str, finished: bool) -> None:
        """The request has left the engine; `finished`: by itself, so that its length tells something of others."""
        self._reporter.end(request_id, finished)
        self._arm()

    def touch(self, soon: bool = False) -> None:
        """There is something to tell; `soon`, if it frees a slot."""
        self._reporter.touch(soon)
        self._arm()

    async def flush(self) -> None:
        """Tell now, and wait until it was told."""
        if self._sending is None:
            self._fire()
        if self._sending is not None:
            await asyncio.shield(self._sending)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        """The timer, at the time the next beat is due."""
        due_at = self._reporter.due_at
        if self._sending is not None or due_at == math.inf or (self._timer is not None and self._due_at <= due_at):
            return
        self.close()
        self._due_at = due_at
        delay = max(0.0, due_at - self._loop.time())
        # a context of its own: Ray cancels what a cancelled request has called, and this is usually called from one
        self._timer = self._loop.call_later(delay, self._fire, context=contextvars.Context())

    def _fire(self) -> None:
        self.close()
        self._sending = self._loop.create_task(self._tell(), context=contextvars.Context())

    async def _tell(self) -> None:
        reporter = self._reporter
        news = self._pages(reporter.want_full) if self._pages else None
        beat = reporter.compose(self._read(), news)
        try:
            reply = await self._send(beat)
        except Exception:
            logger.exception("a beat could not be sent")
            reply = None
        finally:
            self._sending = None
        for request_id in reply.abandoned if reply is not None else ():
            logger.warning("Request %s is cancelled: nobody holds its stream any more.", request_id)
            self._cancel(request_id)
        reporter.told(self._loop.time(), beat, reply)
        self._arm()
