"""`cb-ray drain` on real nodes: a pod that is told to go gives its streams their end, and the pool its replica elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray import serve
from ray.cluster_utils import Cluster as Nodes

from cb_ray import cli
from cb_ray.errors import ConfigError
from cb_ray.messages import GenerateRequest
from cb_ray.serving import drain
from cb_ray.serving.app import Cluster, application, parse_args
from cb_ray.serving.ending import shut_down
from cb_ray.serving.replica_router import find_board
from tests.serving.fakes import STAGE, Stage, load_fake, token_of

pytestmark = [pytest.mark.serve, pytest.mark.timeout(200)]
APP = "cb-ray"
SMALL = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="module")
def stage(tiny_model_dir) -> Iterator[Any]:
    """A head for the Router and the Board, and two nodes that hold one engine each."""
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, **SMALL})
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=3, object_store_memory=80 * 2**20)  # the Router may land there, too
        ray.init(address=nodes.address, namespace="cb-ray-tests")
        stage = Stage.options(name=STAGE).remote()
        ray.get(stage.flows.remote())
        serve.start(proxy_location="Disabled")
        args = {
            "model": str(tiny_model_dir),
            "pool": {"slots_per_replica": 4, "health_check_period_s": 1},
            "engine": {"num_cpus": 2},
        }
        app = application(parse_args(args), cluster=Cluster(num_cpus=4, num_gpus=0), load=load_fake)
        serve.run(app, name=APP, route_prefix="/")
        yield stage
    finally:
        shut_down()
        nodes.shutdown()


async def read(name: str) -> bool:
    asked = GenerateRequest(request_id=name, token_ids=(1, 2, 3), max_new_tokens=30)
    tokens: list[int] = []
    async for chunk in serve.get_app_handle(APP).options(stream=True).generate.remote(asked):
        tokens += chunk.token_ids
    return tokens == [token_of(asked, index) for index in range(30)]


def test_a_drained_node_ends_its_streams_and_is_replaced_first(stage):
    """While streams are held on one node it is drained: the other gets a replica, the streams end whole, then drain returns 0."""

    async def story() -> None:
        assert await read("warm")
        await stage.close.remote()
        streams = [asyncio.create_task(read(f"held-{index}")) for index in range(3)]
        await stage.happened.remote("start", 3)
        (busy,), (old,) = with_engines(), (await find_board(APP, "Engine").snapshot.remote())["replicas"]
        drained = asyncio.create_task(asyncio.to_thread(cli.main, ["drain", "--node-id", busy, "--deadline", "120"]))
        board, seen = find_board(APP, "Engine"), -1
        while True:
            seen, pool = await board.watch.remote(seen)
            if pool["replicas"].keys() - {old}:
                break
            assert not drained.done(), "the streams are still held"
        await stage.open.remote()
        assert all(await asyncio.gather(*streams))
        assert await drained == 0
        assert busy not in with_engines()
        assert await read("after")

    asyncio.run(story())


def with_engines() -> list[str]:
    """The nodes of this cluster that hold an engine; other clusters may run on this machine."""
    own = {node["NodeID"] for node in ray.nodes()}
    holds = {node: [replica.cmdline()[0] for replica in drain.replicas_under(raylet)] for node, raylet in drain.nodes_here()}
    return [node for node, titles in holds.items() if node in own and any("Engine" in title for title in titles)]


def test_which_node_must_be_said_where_several_run(stage):
    """Two nodes on one machine: to drain a guess would empty the wrong one."""
    with pytest.raises(ConfigError, match="running here: .*, .*"):
        drain.find_node(None)
    with pytest.raises(ConfigError, match="--node-id must name"):
        drain.find_node("00")
