"""Several models behind one door: each has a door of its own (`http.py`), and a request goes to that of the model it names.

Owns the choice of the door, and what is asked of all of them: readiness, metrics, the pools' books. It refuses nothing itself:
what names no model that is served, or cannot be read, goes to the first door, whose answer to it is the right one.

    POST {"model": "b"} ─▶ body is read ─▶ doors["b"], which reads it again from memory
    GET /v1/models/b    ─────────────────▶ doors["b"]
    anything else       ─────────────────▶ the first door

Knows ASGI; nothing of dialects, Ray or engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .middleware import presented
from .tenants import Keyring

_CARD = "/v1/models/"


def several(doors: Mapping[str, Any], *, max_body_bytes: int, body_timeout_s: float | None) -> Starlette:
    """The application of all `doors`: model name → FastAPI application, the first of them for what names no model.

    A body of more than `max_body_bytes`, or one that takes longer than `body_timeout_s`, is left to the first door to refuse.
    """
    keyring: Keyring = next(iter(doors.values())).state.door.keyring  # all doors have the Router's keys
    everyone = ManyModels(doors, keyring, max_body_bytes, body_timeout_s)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for door in doors.values():
                await stack.enter_async_context(door.router.lifespan_context(door))
            yield

    app = Starlette(lifespan=lifespan)
    app.mount("/", everyone)
    return app


class ManyModels:
    """The ASGI application that chooses."""

    def __init__(self, doors: Mapping[str, ASGIApp], keyring: Keyring, max_body_bytes: int, body_timeout_s: float | None) -> None:
        self._doors, self._first = dict(doors), next(iter(doors.values()))
        self._keyring = keyring
        self._max_body_bytes, self._body_timeout_s = max_body_bytes, body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._first(scope, receive, send)
            return
        path: str = scope["path"]
        if scope["method"] == "GET" and path in ("/ready", "/metrics", "/debug/pool"):
            answer = await self._of_all(path, scope, receive)
            await answer(scope, receive, send)
            return
        name = None
        if scope["method"] == "POST" and self._is_known(scope):
            messages = await self._body(receive)
            name, receive = _model_in(messages), _again(messages, receive)
        elif path.startswith(_CARD):
            name = path.removeprefix(_CARD)
        await self._doors.get(name or "", self._first)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        """Whether the body may be read here: of a caller without a key nothing is, and the first door refuses it."""
        return self._keyring.is_open or self._keyring.find(presented(Headers(scope=scope))) is not None

    async def _body(self, receive: Receive) -> list[Message]:
        """What arrived of the body: all of it, unless it is too long, too slow, or its sender left."""
        messages: list[Message] = []
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._body_timeout_s):
                while size <= self._max_body_bytes:
                    message = await receive()
                    messages.append(message)
                    size += len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body"):
                        break
        return messages

    async def _of_all(self, path: str, scope: Scope, receive: Receive) -> Response:
        """One answer from what every door says: the first refusal, or all of it together."""
        answers = {name: await _ask(door, scope, receive) for name, door in self._doors.items()}
        for status, headers, body in answers.values():
            if status != 200:
                return Response(body, status, dict(headers))
        bodies = {name: body for name, (_, _, body) in answers.items()}
        if path == "/debug/pool":
            return JSONResponse({name: json.loads(body) for name, body in bodies.items()})
        if path == "/metrics":
            return Response(merged([body.decode() for body in bodies.values()]), media_type="text/plain; version=0.0.4")
        return Response(next(iter(bodies.values())), media_type="application/json")


def merged(texts: list[str]) -> bytes:
    """Several Prometheus texts as one, in which every family stands once."""
    families: dict[str, Metric] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, family).samples.extend(() if family is families[family.name] else family.samples)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(list(families.values())))  # type: ignore[arg-type]
    return generate_latest(registry)


class _Families:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _model_in(messages: list[Message]) -> str | None:
    """The model that a whole JSON body names; None where there is none to be read."""
    try:
        body = json.loads(b"".join(message.get("body", b"") for message in messages))
    except (ValueError, RecursionError):
        return None
    name = body.get("model") if isinstance(body, dict) else None
    return name if isinstance(name, str) else None


def _again(messages: list[Message], receive: Receive) -> Receive:
    """`receive` that gives `messages` once more, then what comes after them."""
    left = list(reversed(messages))

    async def replayed() -> Message:
        return left.pop() if left else await receive()

    return replayed


async def _ask(door: ASGIApp, scope: Scope, receive: Receive) -> tuple[int, list[tuple[str, str]], bytes]:
    """(status, headers, body) of a GET without a body, as a door answers it."""
    status, headers, pieces = 500, list[tuple[str, str]](), list[bytes]()

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = [(key.decode(), value.decode()) for key, value in message.get("headers", ()) if key != b"content-length"]
        else:
            pieces.append(message.get("body", b""))

    await door({**scope, "state": dict(scope.get("state", {}))}, receive, send)
    return status, headers, b"".join(pieces)
