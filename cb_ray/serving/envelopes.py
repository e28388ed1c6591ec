"""How an error looks to the client that caused it: each API has an envelope of its own, and a path belongs to one API.

Owns the two envelopes and the choice between them. Knows the error tree and JSON responses; no dialects, no engines.
"""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse

from ..errors import CbRayError

ANTHROPIC_PATHS = "/v1/messages"  # and whatever begins with it
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def speaks_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATHS or path.startswith(ANTHROPIC_PATHS + "/")


def error_object(error: CbRayError) -> dict[str, Any]:
    """OpenAI's envelope of an error."""
    fields = {"message": str(error), "type": error.openai_type, "param": getattr(error, "param", None), "code": error.code}
    return {"error": fields}


def anthropic_error_object(error: CbRayError, request_id: str = "", status: int | None = None) -> dict[str, Any]:
    """Anthropic's envelope of an error. `status` where it is not the error's own."""
    kind = _ANTHROPIC_TYPES.get(status or error.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": _with_param(error)}, "request_id": request_id or None}


def error_response(error: CbRayError, path: str = "", request_id: str = "", status: int | None = None) -> JSONResponse:
    """An error as status, envelope and, where it says when to come back, Retry-After."""
    status = status or error.http_status
    retry = getattr(error, "retry_after_s", None)
    headers = {"Retry-After": str(max(1, math.ceil(retry)))} if retry is not None else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    anthropic = speaks_anthropic(path)
    body = anthropic_error_object(error, request_id, status) if anthropic else error_object(error)
    return JSONResponse(body, status_code=status, headers=headers)


def _with_param(error: CbRayError) -> str:
    """Anthropic's envelope has no place for the parameter, so the message names it."""
    param, message = getattr(error, "param", None), str(error)
    return message if not param or param in message else f"{param}: {message}"
