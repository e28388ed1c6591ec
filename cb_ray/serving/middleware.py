"""What every request passes on its way in: request ids and API keys, as plain ASGI middleware.

Owns these two. Knows ASGI and the error envelope; nothing of models or engines.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import AuthenticationError
from .openai import error_object

_USABLE_ID = re.compile(r"[\x21-\x7e]{1,256}")
_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})  # probes and scrapers carry no key


class RequestIds:
    """Gives every request an id: the client's X-Request-Id where it sent a usable one, else a fresh one.

    It stands in `request.state.request_id` and, if `adds_header`, comes back in the response's X-Request-Id.
    """

    def __init__(self, app: ASGIApp, *, adds_header: bool = True) -> None:
        self._app, self._adds_header = app, adds_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if _USABLE_ID.fullmatch(sent) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and self._adds_header:
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeys:
    """Lets through only requests with one of `keys` as bearer token. Keys are compared as digests, in constant time."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError()
        response = JSONResponse(error_object(error), error.http_status, headers={"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        presented = _digest(token.strip() if scheme.lower() == "bearer" else "")
        matches = [hmac.compare_digest(presented, known) for known in self._digests]
        return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
