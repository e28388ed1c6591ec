"""What operators and tools ask: the model, health, readiness, metrics, what the pool knows, and the page that shows it.

Owns these handlers, and the proof that a first token can be made. Knows the model and the pool's view; no dialects.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from ..errors import NoReplicaError, ReplicaLostError
from ..messages import GenerateRequest, SamplingParams
from .connection import EventStream, while_connected
from .generation import TokenSource, close_source
from .metrics import Metrics
from .served_model import ServedModel
from .settings import DoorSettings

if TYPE_CHECKING:
    from .pool_view import PoolView

T = TypeVar("T")

_NO_POOL = "the pool cannot be asked now: it has no Board or no replica"
_PAGE = Path(__file__).with_name("page.html")
# The page's own style and script, and nothing from anywhere else; it speaks to the server that it came from.
_ONLY_ITSELF = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class Operations:
    """One for each application."""

    def __init__(
        self, model: ServedModel, source: TokenSource, metrics: Metrics, settings: DoorSettings, pool: PoolView | None
    ) -> None:
        self._model, self._source, self._metrics, self._settings, self._pool = model, source, metrics, settings, pool
        self._proof: asyncio.Task[None] | None = None  # that a first token can be made

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model.card() for model in (self._model, *self._model.beside)]})

    async def retrieve_model(self, request: Request) -> Response:
        self._model.check_name(request.path_params["name"])
        return JSONResponse(self._model.card())

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if self._proof is None or (self._proof.done() and (self._proof.cancelled() or self._proof.exception() is not None)):
            self._proof = asyncio.create_task(self._prove())
        await while_connected(request.receive, _finished(self._proof))
        return JSONResponse({"status": "ready"})

    async def metrics_text(self, request: Request) -> Response:
        pool = await self._pool.snapshot() if self._pool is not None else None
        return Response(self._metrics.text(pool), media_type=self._metrics.content_type)

    async def debug_pool(self, request: Request) -> Response:
        return JSONResponse(_known(await self._pool.snapshot() if self._pool is not None else None))

    async def debug_events(self, request: Request) -> Response:
        """The pool's snapshot as an event whenever it has changed."""
        if self._pool is None:
            raise NoReplicaError(_NO_POOL)
        first = await while_connected(request.receive, self._pool.watch(-1))
        return EventStream(self._snapshots(self._pool, _known(first)))

    async def _snapshots(self, pool: PoolView, news: tuple[int, dict[str, Any]] | None) -> AsyncGenerator[bytes]:
        while news is not None:
            seen, snapshot = news
            yield f"data: {json.dumps(snapshot, separators=(',', ':'))}\n\n".encode()
            news = await pool.watch(seen)

    async def page(self, request: Request) -> Response:
        return HTMLResponse(_PAGE.read_text(), headers={"Content-Security-Policy": _ONLY_ITSELF, "X-Frame-Options": "DENY"})

    async def explain(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Where a prompt would go now, and why. Raises NoReplicaError."""
        decision = _known(await self._pool.explain(token_ids) if self._pool is not None else None)
        return {"prompt_tokens": len(token_ids), **decision}

    async def _prove(self) -> None:
        """Make one token. Raises what the source raises."""
        request = GenerateRequest(
            request_id=f"ready-{uuid.uuid4().hex}",
            token_ids=(self._model.eos_token_ids[0] if self._model.eos_token_ids else 0,),
            max_new_tokens=1,
            sampling=SamplingParams(temperature=0.0),
        )
        chunks = self._source.generate(request)
        try:
            async for chunk in chunks:
                if chunk.error is not None:
                    raise chunk.error
                if chunk.token_ids or chunk.is_terminal:
                    return
        finally:
            await close_source(chunks)
        raise ReplicaLostError("")


def _known(found: T | None) -> T:
    """Raises NoReplicaError where there is no pool to speak of."""
    if found is None:
        raise NoReplicaError(_NO_POOL)
    return found


async def _finished(task: asyncio.Task[T]) -> T:
    """The result of a task that others wait for as well: it is not cancelled when this wait is."""
    return await asyncio.shield(task)
