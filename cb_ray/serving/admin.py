"""Routes for whoever runs the server: other weights for the pool. There only where the settings say so, and behind API keys.

Owns `/admin/weights`. Knows the door's guard and the pool; every source that can be named in JSON.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .openai import StrictModel, parse_body

if TYPE_CHECKING:
    from .pool_view import PoolView


class WeightsBody(StrictModel):
    """What `POST /admin/weights` takes."""

    source: str = Field(
        min_length=1, description="A directory that every replica can read, or a hub revision: org/name@revision."
    )
    model: str | None = Field(None, description="Which one, where several are served.")
    mode: Literal["rolling", "all_at_once"] = "rolling"
    in_flight: Literal["keep", "recompute", "finish"] = "keep"
    weights_version: int | None = Field(None, ge=1)


def add_admin_routes(app: FastAPI, pool: PoolView) -> None:
    """Add the routes to an application of `build_http_app`. Its middleware has asked for a key by then."""

    async def weights(request: Request) -> Response:
        body = parse_body(WeightsBody, await request.body())
        done = await pool.update_weights(
            body.source, mode=body.mode, in_flight=body.in_flight, weights_version=body.weights_version
        )
        return JSONResponse(asdict(done))

    guard: Any = app.state.door.guard
    app.add_api_route(
        "/admin/weights",
        guard("/admin/weights", weights),
        methods=["POST"],
        summary="Other weights for every replica; answers when all have them.",
        name="weights",
        include_in_schema=False,
    )
