"""Two real engines over a tiny model on a real Ray: the same tokens as `model.generate`, wherever and however they are made."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
import torch
from ray import serve

from cb_ray import RemoteManager
from cb_ray.errors import ConfigError, InvalidRequestError, LogitsError
from cb_ray.messages import GenerateRequest, SamplingParams, TokenChunk, Usage
from cb_ray.serving.app import Cluster, application, parse_args
from cb_ray.serving.ending import shut_down
from cb_ray.serving.handle_source import own_error
from cb_ray.serving.replica_router import find_board
from tests.serving.teams import replicas
from tests.tiny import break_token, make_model, save_model

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]
APP, PAGE = "cb-ray", 4
numbers = itertools.count()


@pytest.fixture(scope="module")
def pool(tiny_model_dir) -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 * 2**20)
    try:
        serve.start(proxy_location="Disabled")
        args = {
            "model": str(tiny_model_dir),
            "max_queue_size": 64,
            "pool": {"min_replicas": 2, "max_replicas": 2, "slots_per_replica": 8, "health_check_period_s": 1},
            "engine": {"num_cpus": 0.1, "num_threads": 1, "page_size": PAGE, "num_blocks": 400, "dtype": "float32", "seed": 5},
        }
        serve.run(application(parse_args(args), cluster=Cluster(num_cpus=2, num_gpus=0)), name=APP, route_prefix="/")
        yield
    finally:
        shut_down()


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama")


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(3, 300) for _ in range(length))


def request(tokens: tuple[int, ...], new: int = 12, **sampling: Any) -> GenerateRequest:
    chosen = SamplingParams(**({"do_sample": False} | sampling))
    return GenerateRequest(request_id=f"q{next(numbers)}", token_ids=tokens, max_new_tokens=new, sampling=chosen)


async def read(asked: GenerateRequest, on_chunk: Any = None) -> tuple[list[int], Usage]:
    tokens: list[int] = []
    chunk: TokenChunk | None = None
    async for chunk in serve.get_app_handle(APP).options(stream=True).generate.remote(asked):
        tokens += chunk.token_ids
        if on_chunk is not None:
            on_chunk()
    assert chunk is not None and chunk.is_terminal and chunk.usage is not None, chunk
    assert chunk.usage.num_generated_tokens == len(tokens)
    return tokens, chunk.usage


def alone(model: Any, asked: GenerateRequest) -> list[int]:
    """What the model says to this prompt alone, greedily."""
    ids = torch.tensor([asked.token_ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked.max_new_tokens, do_sample=False)
    return out[0, len(asked.token_ids) :].tolist()


async def counts() -> dict[str, Any]:
    return await find_board(APP, "Engine").snapshot.remote()


def test_tokens_are_those_of_generate(pool, model):
    """Sixteen prompts at once over two engines, greedily in float32: token for token what the model says to each alone."""
    asked = [request(prompt(5 + 3 * n, n)) for n in range(16)]

    async def story():
        return await asyncio.gather(*(read(each) for each in asked))

    answers = asyncio.run(story())
    assert [tokens for tokens, _ in answers] == [alone(model, each) for each in asked]
    assert [usage.num_prompt_tokens for _, usage in answers] == [len(each.token_ids) for each in asked]


def test_a_prefix_is_found_where_it_was_computed_and_the_board_knows_it(pool):
    """Six documents, three questions each: what the Board predicted of the replica it granted is what the engine found cached.

    A warm replica is passed over when its measured steps make another one cheaper, so not every question need find its document;
    most do.
    """
    documents = [prompt(40, 100 + n) for n in range(6)]

    async def story():
        board = find_board(APP, "Engine")
        found = 0
        for turn in range(3):
            for n, document in enumerate(documents):
                asked = request((*document, 7 + turn, 9 + turn), new=4)
                explained = await board.explain.remote(asked.token_ids)
                assert (explained.reason == "nobody has this prefix") == (turn == 0)
                _, usage = await read(asked)
                granted = await board.decision.remote(asked.request_id)
                assert granted.decision.cached_tokens == usage.num_cached_tokens, f"document {n}, turn {turn}"
                assert usage.num_cached_tokens in ((0, 40) if turn else (0,))
                found += usage.num_cached_tokens > 0
        assert found >= 6, "each document found at least once, one way or another"

    asyncio.run(story())


def test_a_killed_engine_changes_no_token(pool, model):
    """Greedy and seeded streams, SIGKILL of one engine in the middle: the same tokens as without, and usage of the whole."""
    plain = [request(prompt(9, 50 + n), new=300) for n in range(3)]
    seeded = [request(prompt(9, 60 + n), new=300, do_sample=True, temperature=0.9, seed=n) for n in range(3)]

    async def story():
        undisturbed = [tokens for tokens, _ in await asyncio.gather(*(read(each) for each in seeded))]
        under_way, killed = asyncio.Event(), False
        again = [replace(each, request_id=f"{each.request_id}-again") for each in seeded]
        calls = [asyncio.ensure_future(read(each, under_way.set)) for each in (*plain, *again)]
        await under_way.wait()
        killed = kill_an_engine()
        answers = [tokens for tokens, _ in await asyncio.gather(*calls)]
        assert killed
        assert answers[:3] == [alone(model, each) for each in plain]
        assert answers[3:] == undisturbed

    asyncio.run(story())


def kill_an_engine() -> bool:
    replicas(APP)[0].kill()
    return True


def test_the_managers_methods_work_over_the_pool_from_any_task(pool, model):
    """`RemoteManager` in a task of its own process: by id, streamed, cancelled, as a batch; the tokens of `model.generate`."""
    prompts = [list(prompt(6 + n, 200 + n)) for n in range(12)]

    @ray.remote(num_cpus=0)
    def task(prompts: list[list[int]]) -> tuple[list[list[int]], list[int], int, str]:
        with RemoteManager(APP) as manager:
            outputs = manager.generate_batch(prompts, max_new_tokens=12, progress_bar=False, do_sample=False)
            name = manager.add_request(prompts[0], max_new_tokens=400, streaming=True, do_sample=False, ignore_eos=True)
            first = next(iter(manager.request_id_iter(name)))
            manager.cancel_request(name)
            *_, last = manager.request_id_iter(name)
            manager.add_requests(prompts[:3], max_new_tokens=2, do_sample=False)
            manager.stop()
            rest = [output.request_id for output in manager]
        return [output.generated_tokens for output in outputs.values()], first.generated_tokens, len(rest), last.status.name

    answers, first, rest, status = ray.get(task.remote(prompts))
    wanted = [alone(model, request(tuple(each))) for each in prompts]
    assert answers == wanted and first == wanted[0][: len(first)]
    assert (rest, status) == (3, "CANCELLED")


def test_a_batch_survives_the_death_of_a_replica(pool, model):
    """SIGKILL of one engine while a batch runs, through `RemoteManager`: no request fails, no token is another."""
    prompts = [list(prompt(9, 300 + n)) for n in range(24)]
    with RemoteManager(APP) as manager:
        killed: list[bool] = []
        bar = manager.run_batch(
            prompts,
            lambda: killed.append(kill_an_engine()) if not killed else None,
            max_new_tokens=100,
            sampling={"do_sample": False, "ignore_eos": True},
        )
        assert killed
        model.generation_config.eos_token_id = None
        assert [o.generated_tokens for o in bar.values()] == [alone(model, request(tuple(p), new=100)) for p in prompts]


def test_a_remote_manager_says_what_it_lacks(pool):
    """No such application: an error that says where to look."""
    with pytest.raises(ConfigError, match="serve status"):
        RemoteManager("nothing")


def test_bad_requests_fail_alone_and_say_what_is_wrong(pool, model):
    """Each poisoned request gets its own error, of our class, whatever crossed Ray; those beside it are served."""
    poison = {
        "input_ids": [request((1, 999_999)), request(prompt(600))],
        "stop_token_ids": [request((1, 2), stop_token_ids=(12_345,))],
    }

    async def fail(asked: GenerateRequest, param: str) -> None:
        try:
            await read(asked)
        except Exception as error:
            ours = own_error(error)
            assert isinstance(ours, InvalidRequestError) and ours.param == param and ours.http_status == 400
        else:
            raise AssertionError("it was served")

    async def story():
        good = [request(prompt(6, n)) for n in range(4)]
        calls = [asyncio.ensure_future(read(each)) for each in good]
        await asyncio.gather(*(fail(each, param) for param, bad in poison.items() for each in bad))
        assert [tokens for tokens, _ in await asyncio.gather(*calls)] == [alone(model, each) for each in good]

    asyncio.run(story())


def test_a_request_that_the_model_breaks_on_is_asked_once(pool, tmp_path):
    """NaN in one token's embedding: a prompt with it is an error that names the cause, on one engine, once; the others are served.

    It was taken for an engine that failed, moved from replica to replica, and was called replica_lost in the end.
    """
    token = 319
    broken = make_model("llama")
    good = [request(prompt(6, n), new=4) for n in range(6)]
    wanted = [alone(broken, each) for each in good]
    assert not any(token in tokens for tokens in wanted), "the test's token must not be one that the model says"
    break_token(broken, token)
    broken.save_pretrained(save_model(tmp_path))
    args = {
        "model": str(tmp_path),
        "engine": {"num_cpus": 0.1, "num_threads": 1, "page_size": PAGE, "num_blocks": 400, "dtype": "float32"},
    }
    serve.run(application(parse_args(args), cluster=Cluster(num_cpus=2, num_gpus=0)), name="broken", route_prefix="/broken")
    router = serve.get_app_handle("broken").options(stream=True)

    async def tokens_of(asked: GenerateRequest) -> list[int]:
        chunks = [chunk async for chunk in router.generate.remote(asked)]
        assert chunks[-1].error is None
        return [token for chunk in chunks for token in chunk.token_ids]

    async def story():
        calls = [asyncio.ensure_future(tokens_of(each)) for each in good]
        for bad in ((5, token, 6), (token,)):
            chunks = [chunk async for chunk in router.generate.remote(request(bad))]
            assert isinstance(chunks[-1].error, LogitsError) and not any(chunk.token_ids for chunk in chunks)
        assert await asyncio.gather(*calls) == wanted
        (stats,) = await serve.get_deployment_handle("Engine", "broken").broadcast("stats").results_async()
        assert stats.num_failed == 2

    try:
        asyncio.run(story())
    finally:
        serve.delete("broken")


def test_two_hundred_clients_that_leave_at_random_leave_nothing_behind(pool):
    """Streams cancelled at any moment, waiting or running: no lease, no place in line, no request in an engine stays."""
    dice, refused = random.Random(4), list[int]()

    async def leave_early(number: int) -> None:
        stream = serve.get_app_handle(APP).options(stream=True).generate.remote(request(prompt(8, number), new=200))
        leave_after = dice.randrange(0, 6)
        try:
            if leave_after:
                async for _ in stream:
                    leave_after -= 1
                    if not leave_after:
                        break
        except Exception as error:
            refused.append(own_error(error).http_status)
        stream.cancel()

    async def story():
        for start in range(0, 200, 40):
            await asyncio.gather(*(leave_early(number) for number in range(start, start + 40)))
        assert set(refused) <= {429}
        while (now := await counts())["waiting"] or any(r["leases"] or r["strays"] for r in now["replicas"].values()):
            pass
        engine = serve.get_deployment_handle("Engine", APP)
        for stats in await engine.broadcast("stats").results_async():
            assert (stats.num_running, stats.num_waiting, stats.blocks_held) == (0, 0, 0)
        assert len((await read(request(prompt(5))))[0]) == 12

    asyncio.run(story())
