"""The admin route: not there unless switched on, closed without a key, and as strict as the others."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

pytest.importorskip("ray")

from cb_ray.errors import ConfigError, UpdateRunningError, WeightsError
from cb_ray.serving.admin import add_admin_routes
from cb_ray.serving.args import parse_args
from cb_ray.serving.board_weights import PoolWeights
from cb_ray.serving.http import DoorSettings, build_http_app
from tests.serving.doors import FakeSource, make_model

KEY = {"Authorization": "Bearer secret"}


class Pool:
    """Takes every update, or raises what it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, list[tuple[Any, ...]]()

    async def update_weights(self, source: str, *, mode: str, in_flight: str, weights_version: int | None) -> PoolWeights:
        self.asked.append((source, mode, in_flight, weights_version))
        if self.error is not None:
            raise self.error
        return PoolWeights(version=4, fingerprint="f", replicas=("a", "b"))


def post(pool: Pool, body: Any, headers: dict[str, str] | None = None, *, on: bool = True) -> httpx.Response:
    model = make_model()
    app = build_http_app(model, FakeSource(codec=model.codec), DoorSettings(api_keys=("secret",)))
    if on:
        add_admin_routes(app, pool)  # type: ignore[arg-type]

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door") as client:
            return await client.post("/admin/weights", json=body, headers=headers or {})

    return asyncio.run(ask())


def test_weights_over_http() -> None:
    """The answer comes when all replicas have them, and says which version they have."""
    pool = Pool()
    answer = post(pool, {"source": "org/model@step-200", "in_flight": "finish"}, KEY)
    assert answer.status_code == 200 and answer.json() == {"version": 4, "fingerprint": "f", "replicas": ["a", "b"]}
    assert pool.asked == [("org/model@step-200", "rolling", "finish", None)]


@pytest.mark.parametrize(
    ("error", "status"), [(WeightsError("lacks a name"), 400), (UpdateRunningError("weights version 3"), 409)]
)
def test_refusals_are_answers(error: Exception, status: int) -> None:
    """In the envelope of all errors, with the status of what went wrong."""
    answer = post(Pool(error), {"source": "/models/new"}, KEY)
    assert answer.status_code == status and answer.json()["error"]["message"] == str(error)


def test_it_is_closed_to_others() -> None:
    """No key: 401. Bad body: 400 that names the field. Not switched on: 404."""
    pool = Pool()
    assert post(pool, {"source": "/models/new"}).status_code == 401
    bad = post(pool, {"source": "/models/new", "mode": "at once"}, KEY)
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "mode"
    assert post(pool, {"source": "/models/new"}, KEY, on=False).status_code == 404
    assert pool.asked == []
    with pytest.raises(ConfigError, match="unless there are API keys"):
        parse_args({"router": {"admin_api": True}})
    assert parse_args({"router": {"admin_api": True, "api_keys": ["secret"]}}).router.admin_api
