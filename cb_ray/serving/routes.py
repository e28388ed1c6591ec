"""`Route`: one path of the door, with all that its description needs.

Owns that value. Knows pydantic and Starlette's types; no handlers, no models.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """`body`: what a JSON body must be, None: there is none. `answers`: the media type besides, or in place of, JSON."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[BaseModel] | None = None
    answers: str | None = None
