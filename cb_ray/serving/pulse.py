"""What an engine replica tells the Board, and when: soon after something happened, at most every `interval_s`, never when idle.

Owns `Pulse`: the list of live requests, the counts between two beats, and the one timer. Knows the messages and the event loop it
runs on; no Ray, no model. Nothing is polled: a request that begins, moves or ends starts the timer; when the last change has been
told there is no timer.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ..messages import EngineStats
from ..routing.members import Beat, BeatReply

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageNews:
    """Digests of pages that can be found in the cache now, and of those that no longer can. `full`: `added` is all there are."""

    full: bool = False
    added: Sequence[bytes] = ()
    evicted: Sequence[bytes] = ()


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
        self.reply: BeatReply | None = None  # what the Board last said
        self._replica, self._send, self._read, self._cancel = replica, send, stats, cancel
        self._page_size, self._pages = page_size, pages
        self._interval_s, self._busy_interval_s = interval_s, busy_interval_s  # the second while others wait for a place
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, int] = {}  # request id → tokens emitted
        self._ended: list[str] = []
        self._finished, self._finished_tokens = 0, 0
        self._number, self._told_at, self._waited_for = 0, float("-inf"), False
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0  # when the timer rings; not every event loop's handles tell
        self._sending: asyncio.Task[None] | None = None
        self._dirty, self._want_full = False, True
        self._before = stats()
        self._busy_s = 0.0  # seconds with requests here since the last beat, not counting those since …
        self._busy_since: float | None = None

    @property
    def num_live(self) -> int:
        return len(self._live)

    def begin(self, request_id: str) -> None:
        self._live[request_id] = 0
        if self._busy_since is None:
            self._busy_since = self._loop.time()
        self.touch()

    def moved(self, request_id: str, tokens: int) -> None:
        """So many more tokens were emitted."""
        if request_id in self._live:
            self._live[request_id] += tokens
            self.touch()

    def end(self, request_id: str, finished: bool) -> None:
        """The request has left the engine; `finished`: by itself, so that its length tells something of others."""
        emitted = self._live.pop(request_id, None)
        if emitted is None:
            return
        self._ended.append(request_id)
        if finished:
            self._finished += 1
            self._finished_tokens += emitted
        if not self._live:
            self._count_busy()
            self._busy_since = None
        self.touch(soon=True)

    def touch(self, soon: bool = False) -> None:
        """There is something to tell; `soon`, if it frees a slot."""
        self._dirty = True
        at = self._told_at + (self._busy_interval_s if soon or self._waited_for else self._interval_s)
        if self._timer is not None and at < self._due_at:
            self.close()
        if self._timer is None and self._sending is None:
            self._due_at = at
            delay = max(0.0, at - self._loop.time())
            # a context of its own: Ray cancels what a cancelled request has called, and this is usually called from one
            self._timer = self._loop.call_later(delay, self._fire, context=contextvars.Context())

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

    def _fire(self) -> None:
        self.close()
        self._sending = self._loop.create_task(self._tell(), context=contextvars.Context())

    async def _tell(self) -> None:
        self._dirty = False
        beat = self._compose()
        try:
            reply = await self._send(beat)
        except Exception:
            logger.exception("a beat could not be sent")
            reply = None
        finally:
            self._sending = None
        if reply is None:
            self._ended[:0] = beat.ended
            self._want_full = True
        else:
            self.reply, self._want_full = reply, reply.want_full
            for request_id in reply.abandoned:
                logger.warning("Request %s is cancelled: nobody holds its stream any more.", request_id)
                self._cancel(request_id)
        self._told_at, self._waited_for = self._loop.time(), reply is not None and reply.num_waiting > 0
        if self._dirty:
            self.touch(soon=bool(self._ended))

    def _compose(self) -> Beat:
        stats, before = self._read(), self._before
        self._count_busy()
        news = self._pages(self._want_full) if self._pages else PageNews()
        self._number += 1
        cached = max(0, stats.cached_tokens - before.cached_tokens)
        prefill = stats.prompt_tokens - before.prompt_tokens - cached
        beat = Beat(
            replica=self._replica,
            number=self._number,
            live=tuple(self._live.items()),
            ended=tuple(self._ended),
            num_finished=self._finished,
            finished_tokens=self._finished_tokens,
            num_waiting=min(stats.num_waiting, len(self._live)),
            free_tokens=(stats.blocks_total - stats.blocks_held) * self._page_size if stats.blocks_total else None,
            cache_used=stats.cache_used,
            cached_tokens=cached,
            prefill_tokens=max(0, prefill),
            decode_tokens=max(0, stats.generated_tokens - before.generated_tokens),
            num_steps=max(0, stats.num_steps - before.num_steps),
            busy_s=self._busy_s,
            weights_version=stats.weights_version,
            full=news.full,
            added=tuple(news.added),
            evicted=tuple(news.evicted),
        )
        self._before, self._busy_s = stats, 0.0
        self._ended, self._finished, self._finished_tokens = [], 0, 0
        return beat

    def _count_busy(self) -> None:
        now = self._loop.time()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = now
