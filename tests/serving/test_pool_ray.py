"""The pool on a real Ray: Board, request router, two Engine replicas with a fake engine each, two Routers."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("ray")

import httpx
import ray
from ray import serve

from cb_ray import RemoteManager
from cb_ray.errors import QueueFullError, ReplicaLostError
from cb_ray.messages import GenerateRequest, TokenChunk
from cb_ray.serving.app import AppArgs, Cluster, application, engine_options, parse_args, settle
from cb_ray.serving.ending import shut_down
from cb_ray.serving.engine_deployment import Engine, EngineSpec
from cb_ray.serving.handle_source import own_error
from cb_ray.serving.replica_router import find_board
from tests.serving.fakes import ENDLESS, PACED, STAGE, Stage, load_fake, token_of

pytestmark = [pytest.mark.serve, pytest.mark.timeout(120)]
APP = "cb-ray"
SLOTS, WAITING, LEASE_S = 2, 3, 6.0
numbers = itertools.count()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


PORT = free_port()


def settings(model: object, replicas: int = 2, **more: Any) -> AppArgs:
    return parse_args(
        {
            "model": str(model),
            "served_model_name": "fake",
            "max_queue_size": WAITING,
            "pool": {
                "min_replicas": replicas,
                "max_replicas": replicas,
                "slots_per_replica": SLOTS,
                "health_check_period_s": 1,
                "lease_timeout_s": LEASE_S,
                "graceful_shutdown_timeout_s": 5,
            },
            "router": {"num_replicas": 2},
            "engine": {"num_cpus": 0.1},
            **more,
        }
    )


@pytest.fixture(scope="module")
def pool(tiny_model_dir) -> Iterator[None]:
    """Two engines with two slots each, two Routers, three places to wait."""
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 * 2**20, namespace="cb-ray-tests")
    try:
        stage = Stage.options(name=STAGE).remote()
        ray.get(stage.flows.remote())
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        app = application(settings(tiny_model_dir), cluster=Cluster(num_cpus=4, num_gpus=0), load=load_fake)
        serve.run(app, name=APP, route_prefix="/")
        yield
    finally:
        shut_down()


@pytest.fixture
def stage(pool) -> Iterator[Any]:
    """The stage with its tap closed and nothing heard yet; whatever a test leaves running is let through afterwards."""
    stage = ray.get_actor(STAGE, namespace="cb-ray-tests")
    ray.get(stage.close.remote())
    yield stage
    ray.get(stage.open.remote())


def request(length: int = 5, new: int = 4) -> GenerateRequest:
    return GenerateRequest(request_id=f"q{next(numbers)}", token_ids=tuple(range(1, length + 1)), max_new_tokens=new)


async def read(handle: Any, asked: GenerateRequest, **kwargs: Any) -> list[int] | Exception:
    """All tokens, or the error as ours."""
    tokens: list[int] = []
    try:
        async for chunk in handle.options(stream=True).generate.remote(request=asked, **kwargs):
            assert isinstance(chunk, TokenChunk)
            tokens += chunk.token_ids
    except Exception as error:
        return own_error(error)
    return tokens


def expected(asked: GenerateRequest) -> list[int]:
    return [token_of(asked, index) for index in range(asked.max_new_tokens or 0)]


def board() -> Any:
    return find_board(APP, "Engine")


async def until(holds: Any) -> dict[str, Any]:
    """The Board's counts, once they are as wanted. The Board tells nobody of a change, so its answers are read again."""
    while True:
        counts = await board().snapshot.remote()
        if holds(counts):
            return counts


def idle(counts: dict[str, Any]) -> bool:
    return (
        counts["waiting"] == 0
        and len(counts["replicas"]) == 2
        and not any(r["leases"] or r["strays"] for r in counts["replicas"].values())
    )


def test_twenty_at_once_give_seven_answers_and_thirteen_refusals(stage):
    """2×2 slots and 3 places to wait, over two Routers: the bound is the pool's, exactly, and refusals come at once."""

    async def story():
        handle = serve.get_app_handle(APP)
        asked = [request() for _ in range(20)]
        calls = [asyncio.ensure_future(read(handle, each)) for each in asked]
        refused: list[Any] = []
        for call in asyncio.as_completed(calls):  # nobody can finish while the tap is closed
            refused.append(await call)
            if len(refused) == 13:
                break
        assert all(isinstance(answer, QueueFullError) for answer in refused), refused
        assert all(answer.limit == WAITING and answer.waiting == WAITING and answer.retry_after_s > 0 for answer in refused)
        counts = await board().snapshot.remote()
        assert counts["waiting"] == WAITING and [r["leases"] for r in counts["replicas"].values()] == [SLOTS, SLOTS]
        await stage.open.remote()
        answers = await asyncio.gather(*calls)
        given = [(each, answer) for each, answer in zip(asked, answers, strict=True) if not isinstance(answer, Exception)]
        assert len(given) == 2 * SLOTS + WAITING
        assert all(answer == expected(each) for each, answer in given)
        await until(idle)

    asyncio.run(story())


def test_who_waits_and_leaves_is_out_of_the_line_and_never_reaches_an_engine(stage):
    """A caller that cancels while it waits gives its place to the next one."""

    async def story():
        handle = serve.get_deployment_handle("Engine", APP).options(stream=True)
        asked = [request() for _ in range(2 * SLOTS + 2)]
        streams = [handle.generate.remote(request=each) for each in asked]
        running = {name for name, _ in await stage.happened.remote("start", 2 * SLOTS)}
        await until(lambda counts: counts["waiting"] == 2)
        waiting = [n for n, each in enumerate(asked) if each.request_id not in running]
        streams[waiting[0]].cancel()
        await until(lambda counts: counts["waiting"] == 1)
        await stage.open.remote()
        for n, stream in enumerate(streams):
            if n != waiting[0]:
                assert [token async for chunk in stream for token in chunk.token_ids] == expected(asked[n])
        await until(idle)
        started = {name for name, _ in await stage.happened.remote("start", len(asked) - 1)}
        assert asked[waiting[0]].request_id not in started

    asyncio.run(story())


def test_http_refusal_says_when_to_come_back_and_a_client_that_leaves_frees_its_place(stage):
    """429 with Retry-After before any stream has begun, also by Routers that have heard that the pool is full; they hear when it is not
    any more. Closing a connection that waits or streams ends the request behind it."""

    async def story():
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}/v1", timeout=60) as client:

            def post(**more: Any) -> asyncio.Task[httpx.Response]:
                body = {"model": "fake", "prompt": "hello", "max_tokens": 4, "stream": True, **more}
                return asyncio.ensure_future(client.post("/completions", json=body))

            running = [post() for _ in range(2 * SLOTS)]
            await stage.happened.remote("start", 2 * SLOTS)
            waiting = [post() for _ in range(WAITING)]
            await until(lambda counts: counts["waiting"] == WAITING)
            refused = await post()
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
            before = (await board().snapshot.remote())["counters"]["refused"]
            assert {(await post()).status_code for _ in range(20)} == {429}
            for call in waiting:
                call.cancel()
            await until(lambda counts: counts["waiting"] == 0 and counts["counters"]["refused"] >= before + 20)

            async def insist() -> None:
                while (await post()).status_code == 429:
                    pass

            insisting = asyncio.ensure_future(insist())
            await until(lambda counts: counts["waiting"] == 1)
            insisting.cancel()
            await until(lambda counts: counts["waiting"] == 0)
            for call in running:
                call.cancel()
            await stage.happened.remote("cancelled", 2 * SLOTS)
            await until(idle)

    asyncio.run(story())


def test_eight_choices_of_one_http_request_are_routed_side_by_side(stage):
    """Handle calls made at once inside one request share Serve's request id; they must neither hang nor be mixed up."""

    async def story():
        await stage.open.remote()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}/v1", timeout=60) as client:
            for n in (2, 7):  # seven find a place at once: four slots, three in line
                body = {"model": "fake", "prompt": "hello", "max_tokens": 3, "n": n, "temperature": 1.0}
                answer = await client.post("/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert [choice["index"] for choice in answer.json()["choices"]] == list(range(n))
                assert answer.json()["usage"]["completion_tokens"] == 3 * n
        await until(idle)

    asyncio.run(story())


def test_every_router_finds_a_stored_response(stage):
    """What one of two Routers kept, the other one reads, goes on from, cancels and forgets; and the wait in line is told."""

    async def story():
        await stage.open.remote()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as client:
            fields = {"model": "fake", "input": "hello", "max_output_tokens": 3}
            first = (await client.post("/v1/responses", json=fields)).json()
            for _ in range(6):  # whichever Router it is
                assert (await client.get(f"/v1/responses/{first['id']}")).json() == first
                again = await client.post("/v1/responses", json={**fields, "previous_response_id": first["id"]})
                assert again.status_code == 200 and again.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]
            await stage.close.remote()
            held = (await client.post("/v1/responses", json={**fields, "background": True})).json()
            await stage.happened.remote("start", 1)
            assert (await client.post(f"/v1/responses/{held['id']}/cancel")).json()["status"] == "cancelled"
            await stage.happened.remote("cancelled", 1)
            await until(idle)
            assert (await client.delete(f"/v1/responses/{first['id']}")).json()["deleted"]
            for _ in range(4):
                assert (await client.get(f"/v1/responses/{first['id']}")).status_code == 404

    asyncio.run(story())


def test_what_the_engines_count_and_what_waited_is_told(stage):
    """/metrics has each replica's own counts; a request that waited in line says so in its answer."""

    async def story():
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as client:
            body = {"model": "fake", "prompt": "hello", "max_tokens": 4}
            running = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(2 * SLOTS)]
            await stage.happened.remote("start", 2 * SLOTS)
            headers = {"x-cb-ray-debug": "1"}
            waiting = asyncio.ensure_future(client.post("/v1/completions", json=body, headers=headers))
            await until(lambda counts: counts["waiting"] == 1)
            await stage.open.remote()
            (made,) = (await waiting).json()["cb_ray"]["choices"]
            assert made["queue_ms"] > 0 and made["replica"] in (await board().snapshot.remote())["replicas"]
            await asyncio.gather(*running)
            await until(idle)
            text = (await client.get("/metrics")).text
        assert text.count("cb_ray_replica_generated_tokens_total{") == 2
        assert "cb_ray_routing_decision_seconds_count" in text and 'vllm:kv_cache_usage_perc{engine="' in text

    asyncio.run(story())


def test_a_task_in_another_process_streams_tokens(stage):
    """`serve.get_app_handle("cb-ray")` works from any Ray task, with plain iteration."""
    ray.get(stage.open.remote())
    asked = request()

    @ray.remote(num_cpus=0)
    def task(asked: GenerateRequest) -> tuple[int, list[int]]:
        handle = serve.get_app_handle(APP).options(stream=True)
        return os.getpid(), [token for chunk in handle.generate.remote(asked) for token in chunk.token_ids]

    pid, tokens = ray.get(task.remote(asked))
    assert pid != os.getpid() and tokens == expected(asked)


def test_streams_that_nobody_holds_any_more_are_ended(stage):
    """A dropped generator, a task that returns with one open, and a caller that is killed: Serve lets all three run on."""

    def start(asked: GenerateRequest) -> Any:
        stream = serve.get_deployment_handle("Engine", APP).options(stream=True).generate.remote(request=asked)
        return stream, next(iter(stream))

    @ray.remote(num_cpus=0, max_restarts=0)
    class Caller:
        def begin(self, asked: GenerateRequest) -> None:
            self.stream = start(asked)

    @ray.remote(num_cpus=0)
    def task(asked: GenerateRequest) -> None:
        start(asked)

    dropped, returned, killed = (replace(request(), cache_salt=ENDLESS) for _ in range(3))
    ray.get(stage.open.remote())
    stream = start(dropped)
    ray.get(task.remote(returned))
    caller = Caller.remote()
    ray.get(caller.begin.remote(killed))
    del stream
    gc.collect()
    names = {name for name, _ in ray.get(stage.happened.remote("cancelled", 2))}
    assert names == {dropped.request_id, returned.request_id}
    ray.kill(caller)
    names = {name for name, _ in ray.get(stage.happened.remote("cancelled", 3))}
    assert killed.request_id in names
    asyncio.run(until(idle))


def test_a_replica_that_refuses_is_asked_again_later(stage, tiny_model_dir):
    """Serve's own limit below the Board's: the grant is given back, the request keeps its turn, and it ends well."""
    args = settings(tiny_model_dir, replicas=1)
    engine = settle(args, Cluster(num_cpus=4, num_gpus=0))
    options = {**engine_options(args, engine), "max_ongoing_requests": 1}
    spec = EngineSpec(model=args.model, engine=engine, slots=SLOTS, load=load_fake)
    handle = serve.run(serve.deployment(name="Engine")(Engine).options(**options).bind(spec), name="tight", route_prefix=None)

    async def story():
        asked = [request() for _ in range(3)]
        calls = [asyncio.ensure_future(read(handle, each)) for each in asked]
        await stage.happened.remote("start", 1)
        while not (counts := await find_board("tight", "Engine").snapshot.remote())["counters"]["rejected"]:
            pass
        assert counts["counters"]["refused"] == 0
        await stage.open.remote()
        assert await asyncio.gather(*calls) == [expected(each) for each in asked]

    try:
        asyncio.run(story())
    finally:
        serve.delete("tight")


def test_a_replica_whose_step_hangs_ends_and_its_streams_are_told_at_once(stage, tiny_model_dir):
    """Serve drains a replica that is unhealthy: streams behind a step that never ends hung for the whole grace period."""
    args = settings(tiny_model_dir, replicas=1)
    engine = settle(args, Cluster(num_cpus=4, num_gpus=0))
    options = {**engine_options(args, engine), "health_check_period_s": 0.2, "graceful_shutdown_timeout_s": 600}
    spec = EngineSpec(model=args.model, engine=engine, slots=SLOTS, step_timeout_s=1.0, load=load_fake)
    handle = serve.run(serve.deployment(name="Engine")(Engine).options(**options).bind(spec), name="stuck", route_prefix=None)

    async def story():
        asked = request()
        hung = asyncio.ensure_future(read(handle, asked))
        ((_, stuck),) = await stage.happened.remote("start", 1)
        assert isinstance(await hung, ReplicaLostError)
        await stage.open.remote()
        assert await read(handle, asked) == expected(asked)
        _, (_, fresh) = await stage.happened.remote("start", 2)
        assert fresh != stuck

    try:
        asyncio.run(story())
    finally:
        serve.delete("stuck")


def test_without_a_board_requests_go_on_and_it_comes_back(stage):
    """Killing the Board breaks no stream; requests are routed by local work until it is back and knows the engines again."""

    async def story():
        handle = serve.get_app_handle(APP)
        flowing = request(new=50)
        call = asyncio.ensure_future(read(handle, flowing))
        await stage.happened.remote("start", 1)
        before = board()
        ray.kill(before)
        await stage.open.remote()
        asked = [request() for _ in range(6)]
        assert await asyncio.gather(*(read(handle, each) for each in asked)) == [expected(each) for each in asked]
        assert await call == expected(flowing)
        while (again := board()) is None or again == before:
            await asyncio.to_thread(ray.get, stage.flows.remote())
        await until(lambda counts: len(counts["replicas"]) == 2 and counts["limit"] == WAITING)
        asked = [request() for _ in range(4)]
        assert await asyncio.gather(*(read(handle, each) for each in asked)) == [expected(each) for each in asked]
        assert (await until(idle))["counters"]["granted"] >= 4

    asyncio.run(story())


def test_a_killed_replica_breaks_no_stream_and_comes_back(stage):
    """SIGKILL of one of two mid-stream: streams go on elsewhere without a repeat or a gap, and Serve brings a second one up."""

    async def story():
        handle = serve.get_app_handle(APP)
        asked = [replace(request(new=6), cache_salt=PACED) for _ in range(2 * SLOTS)]
        calls = [asyncio.ensure_future(read(handle, each)) for each in asked]
        await stage.open.remote()
        pids = {pid for _, pid in await stage.happened.remote("paced", 2 * SLOTS)}  # each has emitted three tokens
        assert len(pids) == 2
        known = set((await board().snapshot.remote())["replicas"])
        os.kill(victim := pids.pop(), signal.SIGKILL)
        await stage.go_on.remote()
        assert await asyncio.gather(*calls) == [expected(each) for each in asked]
        moved = {name for name, pid in await stage.happened.remote("start", 3 * SLOTS) if pid not in (victim,)}
        assert moved == {each.request_id for each in asked}
        await until(lambda counts: len(counts["replicas"]) == 2 and set(counts["replicas"]) != known)
        await stage.close.remote()
        calls = [asyncio.ensure_future(read(handle, request())) for _ in range(2 * SLOTS)]
        pids = {pid for _, pid in await stage.happened.remote("start", 2 * SLOTS)}
        assert len(pids) == 2 and victim not in pids
        await stage.open.remote()
        await asyncio.gather(*calls)

    asyncio.run(story())


def test_a_redeploy_loses_no_stream_and_keeps_the_weights(stage, tiny_model_dir):
    """A new version of the application replaces Board and replicas while streams run and others wait in the old Board's line: all
    of them end with their own tokens, those who waited are served, and the new replicas have the weights of the old ones."""
    ray.get(stage.open.remote())
    again = settings(tiny_model_dir)
    again = replace(again, pool=replace(again.pool, step_timeout_s=100.0))
    app = application(again, cluster=Cluster(num_cpus=4, num_gpus=0), load=load_fake)

    async def story(manager: RemoteManager) -> None:
        await until(idle)
        assert manager.update_weights("weights one").version == 1
        before = set((await board().snapshot.remote())["replicas"])
        asked = [replace(request(new=6), cache_salt=PACED) for _ in range(2 * SLOTS + WAITING)]
        names = [manager.add_request(each.token_ids, max_new_tokens=6, cache_salt=PACED) for each in asked]
        await stage.happened.remote("paced", 2 * SLOTS)
        await until(lambda counts: counts["waiting"] == WAITING)
        deploying = asyncio.create_task(asyncio.to_thread(serve.run, app, name=APP, route_prefix="/"))
        while (newest := board()) is None or not set((await newest.snapshot.remote())["weights"]["versions"]) - before:
            pass
        await stage.go_on.remote()
        for name, each in zip(names, asked, strict=True):
            output = await asyncio.to_thread(manager.get_result, name, 60)
            assert output is not None and output.error is None and output.generated_tokens == expected(each)
            assert output.weights_versions == (1,)
        await deploying
        counts = await until(lambda counts: len(counts["replicas"]) == 2 and not set(counts["replicas"]) & before)
        assert counts["weights"]["wanted"] == 1
        last = await asyncio.to_thread(lambda: manager.get_result(manager.add_request([1, 2, 3], max_new_tokens=4), timeout=60))
        assert last.weights_versions == (1,)

    with RemoteManager(APP) as manager:
        asyncio.run(story(manager))
