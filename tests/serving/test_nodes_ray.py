"""Several nodes: where the ranks of a replica are put, and what the loss of a node costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray import serve
from ray.cluster_utils import Cluster as Nodes
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group_table

from cb_ray.messages import GenerateRequest
from cb_ray.serving.app import Cluster, application, parse_args
from cb_ray.serving.ending import shut_down
from cb_ray.serving.replica_router import find_board
from tests.serving.fakes import PACED, STAGE, Stage, load_fake, token_of

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]
APP, SMALL = "cb-ray", 80 * 2**20


@pytest.fixture(scope="module")
def nodes(tiny_model_dir) -> Iterator[Any]:
    """A head that has the CPUs, for the Router, and two workers under a label, each with room for one replica of two ranks."""
    head: dict[str, Any] = {"num_cpus": 1, "resources": {"head": 1}, "object_store_memory": SMALL, "include_dashboard": False}
    # A lost node is seen in seconds also where its connection does not tell.
    head["_system_config"] = {"health_check_period_ms": 1000, "health_check_failure_threshold": 6}
    cluster = Nodes(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            add_worker(cluster)
        ray.init(address=cluster.address, namespace="cb-ray-tests")
        stage = Stage.options(name=STAGE, resources={"head": 0.1}).remote()
        ray.get(stage.flows.remote())
        serve.start(proxy_location="Disabled")
        yield cluster
    finally:
        shut_down()
        cluster.shutdown()


def add_worker(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=0, resources={"rank": 2}, object_store_memory=SMALL, labels={"pool": "engines"})


def deploy(model: object, pool: dict[str, Any], **engine: Any) -> None:
    """Replicas of two ranks. The engines are fakes: where they are is Ray's, what they compute is not the question."""
    args = {
        "model": str(model),
        "pool": {"slots_per_replica": 8, "health_check_period_s": 1, **pool},
        "engine": {"tensor_parallel_size": 2, "num_cpus": 0, "label_selector": {"pool": "engines"}, **engine},
        "router": {"num_cpus": 0.1, "max_failovers": 3},
    }
    app = application(parse_args(args), cluster=Cluster(num_cpus=4, num_gpus=0), load=load_fake)
    serve.run(app, name=APP, route_prefix="/")


def placed() -> list[set[str]]:
    """The nodes of each replica's placement group."""
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    return [set(group["bundles_to_node_id"].values()) for group in groups]


def workers(cluster: Any) -> set[str]:
    """The nodes that have the label and run: by the processes, since Ray takes a while to see that a node is lost."""
    return {node.node_id for node in cluster.worker_nodes}


async def read(name: str, salt: str = "") -> list[int]:
    request = GenerateRequest(request_id=name, token_ids=(1, 2, 3), max_new_tokens=12, cache_salt=salt)
    tokens: list[int] = []
    async for chunk in serve.get_app_handle(APP).options(stream=True).generate.remote(request):
        tokens += chunk.token_ids
    assert tokens == [token_of(request, index) for index in range(12)]
    return tokens


async def replicas_come(gone: set[str], count: int) -> None:
    """Until the pool has `count` replicas, besides those that are `gone`. The Board may have been on the node that was lost; then
    requests, which are served without it, pass the time until there is another."""
    board, seen, asked = find_board(APP, "Engine"), -1, 0
    while True:
        if board is None:
            asked += 1
            await read(f"meanwhile-{asked}")
            board, seen = find_board(APP, "Engine"), -1
            continue
        try:
            seen, pool = await board.watch.remote(seen)
        except RayActorError:
            board = None
            continue
        if len(pool["replicas"].keys() - gone) >= count:
            return


def test_a_lost_node_loses_no_request_and_the_pool_comes_back(nodes, tiny_model_dir):
    """Eight streams over two replicas, each packed on a node of its own; one node dies in the middle. Every stream ends with its
    right tokens on the other, more are served meanwhile, and when a new node comes the pool has two replicas again.
    """
    deploy(tiny_model_dir, {"min_replicas": 2, "max_replicas": 2}, resources={"rank": 1})
    assert all(len(group) == 1 for group in placed()) and set.union(*placed()) == workers(nodes)
    stage, lost = ray.get_actor(STAGE, namespace="cb-ray-tests"), next(iter(nodes.worker_nodes))

    async def story() -> None:
        await stage.close.remote()
        await stage.open.remote()
        old = set((await find_board(APP, "Engine").snapshot.remote())["replicas"])
        streams = [asyncio.create_task(read(f"paced-{number}", PACED)) for number in range(8)]
        await stage.happened.remote("paced", 8)
        begun = time.monotonic()
        await asyncio.to_thread(nodes.remove_node, lost, False)
        await stage.go_on.remote()
        await asyncio.gather(*streams)
        moved = time.monotonic() - begun
        await asyncio.gather(*(read(f"after-{number}") for number in range(4)))
        begun = time.monotonic()
        add_worker(nodes)  # in this thread: Ray's Node sets signal handlers
        await replicas_come(old, 1)
        back = time.monotonic() - begun
        print(f"a node lost: 8 streams whole, the last one {moved:.1f} s later; 2 replicas {back:.1f} s after a new node")
        await asyncio.gather(*(read(f"again-{number}") for number in range(4)))

    asyncio.run(story())
    kept = [group for group in placed() if group != {lost.node_id}]  # Ray may not yet have let go of what was there
    assert all(len(group) == 1 for group in kept) and set.union(*kept) == workers(nodes)


def test_ranks_are_spread_by_setting(nodes, tiny_model_dir):
    """SPREAD puts the two ranks of a replica on two nodes, with bundles as they are given."""
    given = [{"rank": 1}, {"rank": 0.9}]
    if APP in serve.status().applications:
        serve.delete(APP)  # replicas of the test before leave no node free
    deploy(tiny_model_dir, {}, placement_group_strategy="SPREAD", placement_group_bundles=given)
    assert workers(nodes) in placed()
    asyncio.run(read("spread"))
