"""One HTTP connection while an answer is being made: noticing that the client left or does not read, and sending an event stream.

Owns `while_connected`, `ends_within` and `EventStream`. Knows ASGI; nothing of models, dialects or engines. Nothing here polls: a
departure is an ASGI message, and something always waits for it.

A reader who is slow costs bounded memory. As long as the connection takes what is sent, events go straight from the generator to
it. Once it does not, events are read ahead into a backlog, so that nothing piles up further back where nobody counts it:

    frames ──▶ send                              the usual way: one event, one send, no task between
    frames ──▶ backlog (≤ max_unread_bytes) ──▶ send (≤ send_timeout_s each)          for a reader who has been slow once
"""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from .generation import cancel_and_wait

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client closed the connection before its answer was done."""


class SlowReader(Exception):
    """The client did not read its answer; its stream was ended."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first.

    Raises ClientDisconnected then, after the cancelled work has cleaned up. The request's body must have been read before.
    """
    worker = asyncio.create_task(work)
    try:
        await ends_within(receive, worker, None)
        return worker.result()
    finally:
        await cancel_and_wait((worker,))


async def ends_within(receive: Receive, worker: asyncio.Task[Any], patience_s: float | None) -> bool:
    """Wait for `worker`: True when it ended, False when `patience_s` passed first. It is the caller's to cancel.

    Raises ClientDisconnected when the client left.
    """
    watcher = asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait((worker, watcher), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if watcher.done():  # also when both are: a server need not say twice that the client has left
            raise ClientDisconnected
        return worker.done()
    finally:
        await cancel_and_wait((watcher,))


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events from a generator of ready-made bytes, which is closed as soon as the client leaves.

    `slow` is called when a stream is ended because its client does not read. Times are seconds.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes],
        headers: Mapping[str, str] | None = None,
        *,
        max_unread_bytes: int = 2**20,
        send_timeout_s: float = 60.0,
        slow: Callable[[], None] = lambda: None,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._frames, self._slow = frames, slow
        self._max_unread_bytes, self._send_timeout_s = max_unread_bytes, send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._frames):
            with contextlib.suppress(ClientDisconnected):
                await while_connected(receive, self.stream_response(send))

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for frame in self._frames:
            sending = _Begun(send(_body(frame)))
            if not sending.done:
                try:
                    await self._send_slowly(send, sending)
                except SlowReader:
                    self._slow()
                    return  # without the last message: the server closes the connection, and the client sees it was cut
                break
        await send(_body(b"", more=False))

    async def _send_slowly(self, send: Send, first: _Begun) -> None:
        """The rest of the stream, from the message on that the connection did not take at once."""
        backlog = _Backlog(self._max_unread_bytes)
        reader = asyncio.create_task(backlog.fill(self._frames))
        try:
            await self._in_time(backlog, first.rest())
            while (frames := await backlog.take()) is not None:
                if backlog.overflowed:
                    raise SlowReader
                await self._in_time(backlog, send(_body(frames)))
        finally:
            await cancel_and_wait((reader,))
        await reader  # raises what the generator raised

    async def _in_time(self, backlog: _Backlog, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s) as backlog.limit:
                await sending
        except TimeoutError:
            raise SlowReader from None


def _body(content: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


@dataclass(slots=True)
class _Backlog:
    """Events that have been made and not been taken. Past `max_bytes` it reads no further and ends the send that is stuck."""

    max_bytes: int
    frames: list[bytes] = field(default_factory=list[bytes])
    size: int = 0
    ended: bool = False
    overflowed: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    limit: asyncio.Timeout | None = None  # of the send that is on its way

    async def fill(self, frames: AsyncGenerator[bytes]) -> None:
        try:
            async for frame in frames:
                self.frames.append(frame)
                self.size += len(frame)
                self.changed.set()
                if self.size > self.max_bytes and len(self.frames) > 1:
                    self.overflowed = True
                    if self.limit is not None and not self.limit.expired():
                        with contextlib.suppress(RuntimeError):  # that send has just ended
                            self.limit.reschedule(asyncio.get_running_loop().time())
                    return
        finally:
            self.ended = True
            self.changed.set()

    async def take(self) -> bytes | None:
        """All that is there, as soon as there is something; None at the end."""
        while not self.frames:
            if self.ended:
                return None
            self.changed.clear()
            await self.changed.wait()
        taken, self.frames, self.size = b"".join(self.frames), [], 0
        return taken


class _Begun:
    """A coroutine that has run up to its first wait. `done` if it needed none, as a send to a connection that takes it."""

    def __init__(self, coroutine: Any) -> None:
        self._coroutine = coroutine
        self._waits_for: Any = None
        try:
            self._waits_for = coroutine.send(None)
            self.done = False
        except StopIteration:
            self.done = True

    @types.coroutine
    def rest(self) -> Generator[Any, Any, None]:
        """What is left of it; must be awaited in the task that began it."""
        waits_for = self._waits_for
        while True:
            try:
                value = yield waits_for
            except BaseException as error:
                step = self._coroutine.throw, error
            else:
                step = self._coroutine.send, value
            try:
                waits_for = step[0](step[1])
            except StopIteration:
                return
