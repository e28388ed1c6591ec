"""From a reply in the making to an HTTP response: whole, streamed, streamed late, or in the background.

Owns the order of things: the first delta is awaited before the headers go out, so that a refusal is a status and never a broken
stream; a streamed request that waits longer than `keep_alive_s` gets its headers then, and comments until its first token. Knows
generation, connections and metrics; nothing of the dialects but `AnyReply`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from ..errors import CbRayError
from ..text.detokenizer import TextDelta
from .connection import EventStream, ends_within, while_connected
from .generation import Choice, TokenSource, Written, cancel_and_wait, collect, deltas
from .metrics import Metrics
from .reply import ReplyHead

if TYPE_CHECKING:
    from .pool_view import PoolView
    from .settings import DoorSettings

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": waiting\n\n"
DEBUG_HEADER = "x-cb-ray-debug"


class AnyReply(Protocol):
    """An answer in the making, in any dialect. `extras` is set before the last word where the client may see how it was made."""

    head: ReplyHead
    choices: Sequence[Choice]
    extras: Callable[[], dict[str, Any]] | None

    async def settle(self, written: Sequence[Written] | None = None) -> None: ...
    def answer(self, written: Sequence[Written]) -> dict[str, Any]: ...
    def stream_events(self, choice: Choice, delta: TextDelta) -> bytes: ...
    def stream_end(self) -> bytes: ...
    def stream_error(self, error: CbRayError) -> bytes: ...


def public_error(error: Exception, request_id: str) -> CbRayError:
    """What a client may read of an error. Ours are written for clients; anything else is for the log alone, under its id."""
    if isinstance(error, CbRayError):
        return error
    logger.error("request %s failed", request_id, exc_info=error)
    return CbRayError(f"the server failed to answer this request; its log says why, under {request_id}")


class Answerer:
    """Makes responses of replies. One for each application."""

    def __init__(self, source: TokenSource, metrics: Metrics, settings: DoorSettings, pool: PoolView | None) -> None:
        self._source, self._metrics, self._settings, self._pool = source, metrics, settings, pool

    async def answer(self, request: Request, reply: AnyReply, choices: Sequence[Choice], *, streams: bool) -> Response:
        """The response to `request`. `choices` are the reply's, with what the operator adds to their requests."""
        request.state.log.update(id=reply.head.id)
        if not streams:
            written = await while_connected(request.receive, collect(self._source, choices, self._metrics))
            headers = await self._explain(request, reply)
            await reply.settle(written)
            self._log(request, reply)
            return JSONResponse(reply.answer(written), headers=headers)
        stream = deltas(self._source, choices, self._metrics)
        first = asyncio.create_task(_next(stream))
        try:
            if not await ends_within(request.receive, first, self._settings.keep_alive_s):
                return self._events(self._late(request, reply, first, stream))
            opening = reply.stream_events(*first.result())  # may still refuse
            headers = await self._explain(request, reply)
        except BaseException:
            await cancel_and_wait((first,))
            await stream.aclose()
            raise
        return self._events(self._frames(request, reply, stream, opening), headers)

    async def run(self, choices: Sequence[Choice]) -> list[Written]:
        """What the choices write, for an answer that nobody is connected for."""
        return await collect(self._source, choices, self._metrics)

    def _events(self, frames: AsyncGenerator[bytes], headers: dict[str, str] | None = None) -> Response:
        return EventStream(
            frames,
            headers,
            max_unread_bytes=self._settings.max_unread_bytes,
            send_timeout_s=self._settings.send_timeout_s,
            slow=self._metrics.rejections.labels("slow_reader").inc,
        )

    async def _late(
        self, request: Request, reply: AnyReply, first: asyncio.Task[tuple[Choice, TextDelta]], stream: AsyncGenerator[Any]
    ) -> AsyncGenerator[bytes]:
        """The event stream of a request that still waits: comments, then the rest. A refusal comes as an event now."""
        try:
            while not first.done():
                yield KEEP_ALIVE
                await asyncio.wait((first,), timeout=self._settings.keep_alive_s)
            try:
                opening = reply.stream_events(*first.result())
                await self._explain(request, reply)
            except Exception as error:
                yield self._broken(request, reply, error)
                return
            async with contextlib.aclosing(self._frames(request, reply, stream, opening)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            await cancel_and_wait((first,))
            await stream.aclose()

    async def _frames(
        self,
        request: Request,
        reply: AnyReply,
        stream: AsyncGenerator[tuple[Choice, TextDelta]],
        opening: bytes,
    ) -> AsyncGenerator[bytes]:
        """The event stream of a reply. An error on the way is an event of its own, and the last."""
        async with contextlib.aclosing(stream):
            try:
                yield opening
                async for choice, delta in stream:
                    yield reply.stream_events(choice, delta)
                await reply.settle()
                self._log(request, reply)
                yield reply.stream_end()
            except Exception as error:
                yield self._broken(request, reply, error)

    def _broken(self, request: Request, reply: AnyReply, error: Exception) -> bytes:
        shown = public_error(error, request.state.request_id)
        self._metrics.rejections.labels(shown.code or shown.openai_type).inc()
        request.state.log.update(error=str(shown), error_status=shown.http_status)
        return reply.stream_error(shown)

    async def _explain(self, request: Request, reply: AnyReply) -> dict[str, str]:
        """Where the request went and why, for a client that asked with X-Cb-Ray-Debug or a server that always tells."""
        asked = DEBUG_HEADER in request.headers
        if not asked and not self._settings.extension_fields:
            return {}
        ids = [choice.request.request_id for choice in reply.choices]
        found = [await self._pool.decision(request_id) for request_id in ids] if self._pool is not None else [None for _ in ids]
        reply.extras = lambda: _made(request.state.request_id, reply.choices, found)
        return {"X-Cb-Ray-Decision": json.dumps(found, separators=(",", ":"))} if asked and self._pool is not None else {}

    def _log(self, request: Request, reply: AnyReply) -> None:
        """What the access log tells of tokens."""
        usages = [choice.text.usage for choice in reply.choices]
        request.state.log.update(
            choices=len(reply.choices),
            prompt_tokens=len(reply.choices[0].request.token_ids),
            completion_tokens=sum(choice.text.num_tokens for choice in reply.choices),
            cached_tokens=sum(usage.num_cached_tokens for usage in usages if usage),
        )


def _made(request_id: str, choices: Sequence[Choice], decisions: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """How an answer was made: the extension field `cb_ray`. Times are milliseconds."""
    entries: list[dict[str, Any]] = []
    for choice, decision in zip(choices, decisions, strict=True):
        entry: dict[str, Any] = {"request_id": choice.request.request_id}
        usage, queue_s = choice.text.usage, 0.0
        if decision is not None:
            entry |= {name: decision[name] for name in ("replica", "reason", "predicted_cached_tokens")}
            queue_s = decision["waited_s"]
        if usage is not None:
            entry |= {
                "cached_tokens": usage.num_cached_tokens,
                "preemptions": usage.num_preemptions,
                "weights_versions": list(usage.weights_versions),
            }
            queue_s += usage.queue_time
        entries.append({**entry, "queue_ms": round(queue_s * 1000, 3)})
    return {"request_id": request_id, "choices": entries}


async def _next(stream: AsyncGenerator[Any]) -> Any:
    return await anext(stream)
