"""What every request passes on its way in: request ids, the access log, API keys and tenants' limits, as plain ASGI middleware.

Owns these. Knows ASGI, tenants and the error envelopes; nothing of models or engines.

    RequestIds ─▶ AccessLog ─▶ CORS ─▶ Callers ─▶ routes        `request.state`: request_id, log (a dictionary), tenant
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import AuthenticationError, CbRayError, TenantLimitError
from .envelopes import error_response, speaks_anthropic
from .metrics import Metrics
from .tenants import EVERYBODY, Keyring, Tenant, TenantGate

_USABLE_ID = re.compile(r"[\x21-\x7e]{1,256}")
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/"})  # probes and scrapers carry no key; the page asks for one

access_logger = logging.getLogger("cb_ray.access")


def log_to_stdout() -> None:
    """Write the access log to this process's standard output, once."""
    if not access_logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        access_logger.addHandler(handler)
        access_logger.setLevel(logging.INFO)
        access_logger.propagate = False


class RequestIds:
    """Gives every request an id: the client's X-Request-Id where it sent a usable one, else a fresh one.

    It stands in `request.state.request_id` and, if `adds_header`, comes back in the response's X-Request-Id; on Anthropic's paths
    also as `request-id`, where its clients look.
    """

    def __init__(self, app: ASGIApp, *, adds_header: bool = True) -> None:
        self._app, self._adds_header = app, adds_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if _USABLE_ID.fullmatch(sent) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, log={}, tenant=EVERYBODY)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if self._adds_header:
                    headers["X-Request-Id"] = request_id
                if speaks_anthropic(scope["path"]):
                    headers["request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class AccessLog:
    """One JSON object per request in the logger `cb_ray.access`. No header, query or body is in it, so no secret is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, line = time.monotonic(), dict[str, Any](status=499, bytes=0)

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                line["status"] = message["status"]
            elif message["type"] == "http.response.body" and message.get("body"):
                line.setdefault("first_byte_ms", _milliseconds(began))
                line["bytes"] += len(message["body"])
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            state = scope["state"]
            known = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "request_id": state["request_id"],
                "tenant": state["tenant"].name or None,
                "client": (scope.get("client") or [None])[0],
                "method": scope["method"],
                "path": scope["path"],
            }
            access_logger.info(json.dumps({**known, **line, "ms": _milliseconds(began), **state["log"]}))


def _milliseconds(since: float) -> float:
    return round((time.monotonic() - since) * 1000, 3)


class Callers:
    """Lets through only who has a known key, as a bearer token or x-api-key, and no more of a tenant's requests than it may send.

    What only reads (GET) and probes count against no limit.
    """

    def __init__(self, app: ASGIApp, *, keyring: Keyring, gate: TenantGate, metrics: Metrics) -> None:
        self._app, self._keyring, self._gate, self._metrics = app, keyring, gate, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        tenant = self._keyring.find(presented(Headers(scope=scope)))
        if tenant is None:
            await self._refuse(AuthenticationError(), scope, receive, send)
            return
        scope["state"]["tenant"] = tenant
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        await self._within_limits(tenant, scope, receive, send)

    async def _within_limits(self, tenant: Tenant, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            since = self._gate.enter(tenant)
        except TenantLimitError as error:
            await self._refuse(error, scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.leave(tenant, since)

    async def _refuse(self, error: CbRayError, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.rejections.labels(error.code or error.openai_type).inc()
        await error_response(error, scope["path"], scope["state"]["request_id"])(scope, receive, send)


def presented(headers: Headers) -> str:
    """The key that a request brings; "" for none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
