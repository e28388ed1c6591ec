"""A server that speaks the OpenAI dialect by script: each answer is a list of steps, so that tests decide what a client meets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def chunk(text: str = "", finish: str | None = None, usage: dict[str, Any] | None = None) -> bytes:
    """One event of a chat stream."""
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]
    event: dict[str, Any] = {"id": "x", "object": "chat.completion.chunk", "choices": choices, "usage": None}
    if usage is not None:
        event |= {"choices": [], "usage": usage}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def usage_of(prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}


async def stream(request: web.Request, *pieces: bytes | Awaitable[Any]) -> web.StreamResponse:
    """An event stream of `pieces`; an awaitable among them is waited for."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        if isinstance(piece, bytes):
            await response.write(piece)
        else:
            await piece
    await response.write_eof()
    return response


async def well(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A whole answer: a role, then two tokens an event, then the usage."""
    count = body["max_tokens"]
    if not body.get("stream"):
        return web.json_response({"choices": [{"finish_reason": "length"}], "usage": usage_of(7, count)})
    words = [chunk("two tokens") for _ in range(count // 2)]
    end = [chunk(finish="length"), chunk(usage=usage_of(7, count, cached=3)), b"data: [DONE]\n\n"]
    return await stream(request, chunk(""), *words, *end)


@contextlib.asynccontextmanager
async def serving(answer: Answer = well) -> AsyncGenerator[str]:
    """A server on a free port of this machine; gives its base URL."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(request, await request.json())

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    app.router.add_post("/v1/completions", handle)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def serving_beside(answer: Answer = well) -> Iterator[str]:
    """The same in a thread, for clients that bring a loop of their own."""
    ready: list[str] = []
    started, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with serving(answer) as url:
            ready.append(url)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[main()])
    thread.start()
    assert started.wait(30)
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
