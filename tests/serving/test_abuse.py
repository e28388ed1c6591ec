"""A real engine behind a real server, and everybody misbehaves: no 5xx, no hang, and nothing of those who left stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from fastapi import FastAPI
from hypothesis import settings

from cb_ray.bench.abuse import Outcome, abuse
from cb_ray.messages import GenerateRequest, TokenChunk
from cb_ray.serving.args import EngineArgs
from cb_ray.serving.engine_loading import load_engine
from cb_ray.serving.http import build_http_app
from cb_ray.serving.served_model import ServedModel
from tests.serving.doors import listening, make_door

FULL = settings.get_current_profile_name() == "nightly"
MALFORMED, DISCONNECTS = (10_000, 1_000) if FULL else (300, 60)


class EngineSource:
    """An engine of this process as a source of tokens."""

    def __init__(self, engine) -> None:
        self._engine = engine

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        chunks = self._engine.chunks(request)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()


def misbehave(app: FastAPI, malformed: int, left: int) -> Outcome:
    with listening(app) as url:
        return asyncio.run(abuse(url, num_malformed=malformed, num_disconnects=left, concurrency=16))


def test_nothing_stays_behind(tiny_model_dir: Path) -> None:
    """Malformed requests are answered below 500 or not at all; clients that leave while waiting, computing or streaming give their
    blocks back; the server's tasks end; the next request is served."""
    args = EngineArgs(
        device="cpu", num_threads=1, warmup=False, config={"page_size": 4, "num_blocks": 200, "max_requests_per_batch": 4}
    )
    loaded = load_engine(str(tiny_model_dir), args)
    engine = loaded.engine
    engine.start()
    try:
        app = build_http_app(ServedModel.load(str(tiny_model_dir), "tiny"), EngineSource(engine))
        outcome = misbehave(app, MALFORMED, DISCONNECTS)
        assert outcome.is_well, outcome
        assert sum(outcome.statuses.values()) == MALFORMED and sum(outcome.moments.values()) == DISCONNECTS
        assert {"400", "404", "405"} <= outcome.statuses.keys() and len(outcome.moments) >= 4
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.blocks_held, stats.num_failed) == (0, 0, 0, 0), stats
        assert stats.num_cancelled > DISCONNECTS / 4
    finally:
        engine.stop(True, 30.0, hard_stop=True)


def test_faults_are_found() -> None:
    """The guard of the guard: a server that answers 500, or keeps counting who has left, is not well."""
    broken = make_door(fails=RuntimeError("a bug"))
    outcome = misbehave(broken.app, 80, 0)
    assert outcome.faults and not outcome.served_after and not outcome.is_well
    leaky = make_door()
    leaky.app.state.door.metrics.running = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cb_ray.bench.abuse.SETTLE_S", 0.0)
        assert misbehave(leaky.app, 0, 5).left == {"cb_ray_requests_running": 1.0}
