"""Autoscaling on a real Ray, with fake engines: from none to three and back, and nobody is lost on the way."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray import serve

from cb_ray.messages import GenerateRequest
from cb_ray.serving.app import Cluster, application, parse_args
from cb_ray.serving.ending import shut_down
from cb_ray.serving.replica_router import find_board
from tests.serving.fakes import STAGE, Stage, load_fake, token_of

pytestmark = [pytest.mark.serve, pytest.mark.timeout(200)]
APP = "cb-ray"
numbers = itertools.count()


@pytest.fixture(scope="module")
def stage(tiny_model_dir) -> Iterator[Any]:
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 * 2**20, namespace="cb-ray-tests")
    try:
        stage = Stage.options(name=STAGE).remote()
        ray.get(stage.flows.remote())
        serve.start(proxy_location="Disabled")
        args = {
            "model": str(tiny_model_dir),
            "max_queue_size": 20,
            "pool": {
                "min_replicas": 0,
                "max_replicas": 3,
                "slots_per_replica": 2,
                "target_drain_s": 0.05,
                "upscale_delay_s": 0.2,
                "downscale_delay_s": 2,
                "downscale_to_zero_delay_s": 3,
                "health_check_period_s": 1,
            },
            "engine": {"num_cpus": 0.1},
        }
        serve.run(
            application(parse_args(args), cluster=Cluster(num_cpus=4, num_gpus=0), load=load_fake), name=APP, route_prefix="/"
        )
        yield stage
    finally:
        shut_down()


async def replicas(wanted: int) -> dict[str, Any]:
    """The Board's counts, once it has so many replicas."""
    while True:
        counts = await find_board(APP, "Engine").snapshot.remote()
        if len(counts["replicas"]) == wanted:
            return counts


async def read(new: int = 40) -> bool:
    asked = GenerateRequest(request_id=f"q{next(numbers)}", token_ids=(1, 2, 3), max_new_tokens=new)
    tokens: list[int] = []
    async for chunk in serve.get_app_handle(APP).options(stream=True).generate.remote(asked):
        tokens += chunk.token_ids
    return tokens == [token_of(asked, index) for index in range(new)]


def test_none_to_three_and_back_and_nobody_is_lost(stage):
    """Idle: no replica. The first request waits for the cold start; twelve bring three replicas up; then they go again."""

    async def story():
        await replicas(0)
        assert await read()
        await stage.close.remote()
        calls = [asyncio.ensure_future(read()) for _ in range(12)]
        counts = await replicas(3)
        assert counts["owed_s"] > 0.15 and counts["waiting"] >= 6
        await stage.happened.remote("start", 6)
        await stage.open.remote()
        assert all(await asyncio.gather(*calls))
        await replicas(1)
        await replicas(0)
        assert await read()

    asyncio.run(story())
