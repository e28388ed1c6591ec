"""Engine replicas of two ranks each, on a real Ray: the same tokens as one rank, new weights for both, and one end for both."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
import torch
from ray import serve
from ray.util.placement_group import placement_group_table

from cb_ray import RemoteManager
from cb_ray.errors import WeightsError
from cb_ray.messages import GenerateRequest, SamplingParams, TokenChunk
from cb_ray.serving.app import Cluster, application, parse_args
from cb_ray.serving.ending import shut_down
from cb_ray.serving.replica_router import find_board
from tests.serving.teams import followers, replicas, wait_for_ends
from tests.tiny import make_model, save_model

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]
APP = "cb-ray"
numbers = itertools.count()


@pytest.fixture(scope="module")
def pool(tiny_model_dir) -> Iterator[None]:
    """Two replicas of two ranks, on CPUs: a rank takes a GPU wherever it sees one."""
    hidden = pytest.MonkeyPatch()
    hidden.setenv("CUDA_VISIBLE_DEVICES", "")
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 * 2**20)
    try:
        serve.start(proxy_location="Disabled")
        args = {
            "model": str(tiny_model_dir),
            "pool": {"min_replicas": 2, "max_replicas": 2, "slots_per_replica": 8, "health_check_period_s": 1},
            "engine": {
                "tensor_parallel_size": 2,
                "num_cpus": 0.4,
                "num_threads": 1,
                "page_size": 4,
                "num_blocks": 400,
                "dtype": "float32",
                "seed": 5,
            },
        }
        serve.run(application(parse_args(args), cluster=Cluster(num_cpus=2, num_gpus=0)), name=APP, route_prefix="/")
        yield
    finally:
        shut_down()
        hidden.undo()


def request(seed: int, new: int) -> GenerateRequest:
    dice = random.Random(seed)
    tokens = tuple(dice.randrange(3, 300) for _ in range(9))
    greedy = SamplingParams(do_sample=False, ignore_eos=True)
    return GenerateRequest(request_id=f"q{seed}-{next(numbers)}", token_ids=tokens, max_new_tokens=new, sampling=greedy)


async def read(asked: GenerateRequest, on_chunk: Any = None) -> list[int]:
    tokens: list[int] = []
    chunk: TokenChunk | None = None
    async for chunk in serve.get_app_handle(APP).options(stream=True).generate.remote(asked):
        tokens += chunk.token_ids
        if on_chunk is not None:
            on_chunk()
    assert chunk is not None and chunk.is_terminal and chunk.error is None, chunk
    return tokens


async def read_all(asked: list[GenerateRequest]) -> list[list[int]]:
    return await asyncio.gather(*(read(each) for each in asked))


def alone(model: Any, asked: GenerateRequest) -> list[int]:
    ids = torch.tensor([asked.token_ids])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=asked.max_new_tokens, do_sample=False, eos_token_id=None)
    return out[0, len(asked.token_ids) :].tolist()


def groups() -> list[dict[str, Any]]:
    return [group for group in placement_group_table().values() if group["state"] == "CREATED"]


def test_two_ranks_a_replica_give_the_tokens_of_one(pool):
    """Greedy tokens of `model.generate` from replicas whose ranks are two processes in one placement group."""
    model = make_model("llama")
    asked = [request(seed, 16) for seed in range(6)]
    assert asyncio.run(read_all(asked)) == [alone(model, each) for each in asked]
    assert len(replicas(APP)) == len(followers()) == len(groups()) == 2
    assert all(len(group["bundles"]) == 2 for group in groups())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_or_stuck_follower_ends_its_replica_and_no_stream(pool, how):
    """The whole replica goes with its follower and is replaced; streams go on elsewhere with the same tokens; no process stays."""
    model = make_model("llama")
    before = [*replicas(APP), *followers()]
    asked = [request(seed, 120) for seed in range(20, 24)]

    async def story() -> list[list[int]]:
        old = (await find_board(APP, "Engine").snapshot.remote())["replicas"].keys()
        under_way = asyncio.Event()
        calls = [asyncio.ensure_future(read(each, under_way.set)) for each in asked]
        await under_way.wait()
        followers()[0].send_signal(how)
        streams = await asyncio.gather(*calls)
        ended = await asyncio.to_thread(wait_for_ends, before, 2)
        assert len(ended & {process.pid for process in before[:2]}) == 1, "a follower and its leader, nobody else"
        board, seen = find_board(APP, "Engine"), -1
        while True:
            seen, now = await board.watch.remote(seen)
            if len(now["replicas"]) == 2 and now["replicas"].keys() - old:
                return streams

    assert asyncio.run(story()) == [alone(model, each) for each in asked]
    assert len(replicas(APP)) == len(followers()) == 2
    after = [request(seed, 4) for seed in range(90, 94)]
    assert asyncio.run(read_all(after)) == [alone(model, each) for each in after]


def test_new_weights_reach_every_rank(pool, tmp_path):
    """Both replicas load them on both ranks while they run; what does not fit is refused and changes nothing."""
    asked = [request(seed, 8) for seed in range(40, 44)]
    other = save_model(tmp_path / "other", "llama", seed=1)
    wrong = save_model(tmp_path / "wrong", "llama", hidden_size=48, intermediate_size=96)
    before, after = make_model("llama"), make_model("llama", seed=1)
    with RemoteManager(APP) as manager:
        with pytest.raises(WeightsError):
            manager.update_weights(str(wrong))
        assert asyncio.run(read_all(asked)) == [alone(before, each) for each in asked]
        manager.update_weights(str(other))
    again = [request(seed, 8) for seed in range(40, 44)]
    assert asyncio.run(read_all(again)) == [alone(after, each) for each in again] != [alone(before, each) for each in again]


def test_nothing_stays_when_the_application_goes(pool):
    """Deleting the application ends every rank's process and gives every placement group back."""
    ranks = [*replicas(APP), *followers()]
    serve.delete(APP)
    wait_for_ends(ranks, len(ranks))
    assert not replicas(APP) and not followers() and not groups()
