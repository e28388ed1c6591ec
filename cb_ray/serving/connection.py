"""One HTTP connection while an answer is being made: noticing that the client left, and sending an event stream.

Owns `while_connected` and `EventStream`. Knows ASGI; nothing of models, dialects or engines. Nothing here polls: a departure is
an ASGI message, and something always waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .generation import cancel_and_wait

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client closed the connection before its answer was done."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first.

    Raises ClientDisconnected then, after the cancelled work has cleaned up. The request's body must have been read before.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if watcher.done():  # also when both are: a server need not say twice that the client has left
            raise ClientDisconnected
        return worker.result()
    finally:
        await cancel_and_wait((worker, watcher))


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events from a generator of ready-made bytes, which is closed as soon as the client leaves."""

    def __init__(self, frames: AsyncGenerator[bytes], headers: Mapping[str, str] | None = None) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._frames):
            with contextlib.suppress(ClientDisconnected):
                await while_connected(receive, self.stream_response(send))
