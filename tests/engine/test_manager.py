"""The manager's promises, on the real core and a runner that counts: life, requests, outputs, pause, failure. No model, no sleep."""

from __future__ import annotations

import asyncio
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from cb_ray.engine.manager import CACHED_MANAGER, ContinuousBatchingManager
from cb_ray.errors import ConfigError, EngineStoppedError, InvalidRequestError, QueueFullError
from cb_ray.messages import GenerateRequest, GenerationOutput, RequestStatus, SamplingParams
from tests.engine.fakes import PATIENCE, Background, Engine, FakeRunner, make_engine, tokens_after

FINISHED, FAILED, CANCELLED = RequestStatus.FINISHED, RequestStatus.FAILED, RequestStatus.CANCELLED
Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    """`make(**settings)` as `make_engine`; every engine is stopped hard at the end, whatever happened."""
    engines: list[Engine] = []

    def one(*args: Any, start: bool = True, **settings: Any) -> Engine:
        engines.append(make_engine(*args, **settings))
        if start:
            engines[-1].manager.start()
        return engines[-1]

    yield one
    for engine in engines:
        for runner in engine.runners:
            runner.release()
        if engine.manager.is_running():
            engine.manager.stop(hard_stop=True, timeout=PATIENCE)
        assert not engine.manager.is_running()


def result(manager: ContinuousBatchingManager, name: str) -> GenerationOutput:
    """The terminal output of a request."""
    while True:
        output = manager.get_result(name, timeout=PATIENCE)
        assert output is not None, f"{name} never ended"
        if output.is_finished():
            return output


def held(runner: FakeRunner) -> None:
    runner.hold()


def greedy(count: int = 8, **settings: Any) -> GenerationConfig:
    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1)
    for name, value in settings.items():
        setattr(config, name, value)
    return config


# ---- requests and outputs --------------------------------------------------------------------------------------------------


def test_a_request_is_answered(make: Make) -> None:
    """Tokens, prompt, times, reason: everything an output tells, in the order of time."""
    manager = make().manager
    name = manager.add_request([1, 2, 3], max_new_tokens=4, record_timestamps=True)
    assert name == "req_0"
    output = result(manager, name)
    assert (output.prompt_ids, output.generated_tokens, output.status) == ([1, 2, 3], tokens_after(3, 4), FINISHED)
    assert (output.finish_reason, output.error, output.logprobs) == ("length", None, [])
    assert output.created_time <= output.lifespan[0] <= output.lifespan[1]
    assert output.timestamps is not None and len(output.timestamps) == 4 and output.timestamps == sorted(output.timestamps)


def test_ids_count_on_and_step_aside(make: Make) -> None:
    """Generated ids skip an id of a live request that a caller chose; a finished request's id is free again."""
    engine = make(prepare=held)
    manager = engine.manager
    assert manager.add_request([1], request_id="req_0", max_new_tokens=2) == "req_0"
    assert manager.add_request([1], max_new_tokens=2) == "req_1"
    with pytest.raises(ValueError, match="req_1"):
        manager.add_request([1], request_id="req_1")
    engine.runner.release()
    assert result(manager, "req_0").status == FINISHED and result(manager, "req_1").status == FINISHED
    assert manager.add_request([1, 2], request_id="req_0", max_new_tokens=2) == "req_0"
    assert result(manager, "req_0").generated_tokens == tokens_after(2, 2)


def test_bad_requests_are_refused_with_their_parameter(make: Make) -> None:
    """Each is told at once what is wrong; nobody else notices (one bad request used to end the engine)."""
    manager = make(page_size=4, num_blocks=8).manager
    good = manager.add_request([1, 2], max_new_tokens=3)
    bad: list[tuple[list[Any], dict[str, Any], str]] = [
        ([], {}, "input_ids"),
        ([5, 1000], {}, "input_ids"),
        ([-1], {}, "input_ids"),
        (["a"], {}, "input_ids"),
        ([5.5], {}, "input_ids"),
        ([[1, 2]], {}, "input_ids"),
        ([1] * 40, {}, "input_ids"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_k": "many"}, "top_k"),
        ([1], {"tempratur": 0.5}, "tempratur"),
        ([1], {"max_new_tokens": 1.5}, "max_new_tokens"),
        ([1], {"request_id": 7}, "request_id"),
        ([1], {"request_id": ""}, "request_id"),
        ([1], {"num_return_sequences": 0}, "num_return_sequences"),
        ([1], {"eos_token_id": "x"}, "eos_token_id"),
    ]
    for ids, keywords, param in bad:
        with pytest.raises(InvalidRequestError) as caught:
            manager.add_request(ids, **keywords)
        assert caught.value.param == param, f"{ids} {keywords}: {caught.value}"
    assert result(manager, str(good)).status == FINISHED
    with pytest.raises(InvalidRequestError, match=r"inputs\[1\]"):
        manager.add_requests([[1, 2], [], [3]])
    assert manager.get_result(timeout=0.0) is None


def test_several_prompts_keep_their_order(make: Make) -> None:
    """add_requests returns ids in input order, with the caller's own where given."""
    manager = make().manager
    assert manager.add_requests([[1], [1, 2], [1, 2, 3]], max_new_tokens=2) == ["req_0", "req_1", "req_2"]
    assert manager.add_requests([[1], [2]], request_ids=["x", "y"], max_new_tokens=2) == ["x", "y"]
    for name, length in (("req_0", 1), ("req_1", 2), ("req_2", 3), ("x", 1), ("y", 1)):
        assert result(manager, name).generated_tokens == tokens_after(length, 2)
    with pytest.raises(InvalidRequestError):
        manager.add_requests([[1], [2]], request_ids=["one"])


@pytest.mark.parametrize("depth", [1, 2])
def test_streams_are_cumulative_and_complete(make: Make, depth: int) -> None:
    """One output per token, DECODING until the FINISHED one; earlier outputs never change."""

    def deep(runner: FakeRunner) -> None:
        runner.depth = depth

    manager = make(prepare=deep).manager
    name = manager.add_request([1, 2, 3], max_new_tokens=9, streaming=True)
    outputs = list(manager.request_id_iter(str(name)))
    assert [output.generated_tokens for output in outputs] == [tokens_after(3, n) for n in range(1, 10)]
    assert [output.status for output in outputs] == [RequestStatus.DECODING] * 8 + [FINISHED]
    assert [output.finish_reason for output in outputs] == [None] * 8 + ["length"]
    assert len({output.lifespan[0] for output in outputs}) == 1 and outputs[0].lifespan[0] >= outputs[0].created_time
    assert [output.lifespan[1] > 0 for output in outputs] == [False] * 8 + [True]


def test_zero_and_negative_lengths_give_nothing(make: Make) -> None:
    """FINISHED without tokens, without error and without a step."""
    engine = make()
    for count in (0, -3):
        output = result(engine.manager, str(engine.manager.add_request([1, 2], max_new_tokens=count)))
        assert (output.generated_tokens, output.status, output.error) == ([], FINISHED, None)
    assert engine.runner.steps == 0


def test_the_end_of_sequence_ends_and_is_included(make: Make) -> None:
    """One id, several, per request, or a negative one for never; the reason is `stop`."""
    manager = make(greedy(8, eos_token_id=[tokens_after(3, 8)[4]])).manager
    cases: list[tuple[Any, int, str]] = [(None, 5, "stop"), (tokens_after(3, 8)[1], 2, "stop"), (-1, 8, "length")]
    for own, count, reason in cases:
        output = result(manager, str(manager.add_request([1, 2, 3], eos_token_id=own)))
        assert (output.generated_tokens, output.finish_reason) == (tokens_after(3, count), reason)


def test_children_are_requests_of_their_own(make: Make) -> None:
    """num_return_sequences gives ids `{id}__child#{k}`, per engine or per request; an id of a child is taken like any other."""
    manager = make(greedy(4, num_return_sequences=3)).manager
    assert manager.add_request([1, 2], request_id="p") == "p"
    for name in ("p", "p__child#0", "p__child#1"):
        assert result(manager, name).generated_tokens == tokens_after(2, 4)
    name = manager.add_request([1, 2], num_return_sequences=1)
    assert result(manager, str(name)).status == FINISHED
    assert manager.get_result(timeout=0.0) is None


def test_children_of_a_seeded_request_have_seeds_of_their_own(make: Make) -> None:
    """With one seed for all, siblings would be copies of each other."""
    engine = make(greedy(2))
    engine.manager.add_request([1, 2], request_id="p", seed=5, temperature=1.0, num_return_sequences=3)
    for name in ("p", "p__child#0", "p__child#1"):
        result(engine.manager, name)
    seeds = {row.request_id: row.seed for plan in engine.runner.plans for row in plan.rows}
    assert len(set(seeds.values())) == 3 and seeds["p"] == 5


# ---- the line --------------------------------------------------------------------------------------------------------------


def test_the_line_is_full_at_once(make: Make) -> None:
    """max_queue_size counts everyone who waits behind the running ones, and those before the start."""
    engine = make(max_queue_size=2, max_requests_per_batch=1, prepare=held, start=False)
    manager = engine.manager
    names = [manager.add_request([1], max_new_tokens=2) for _ in range(2)]
    with pytest.raises(QueueFullError) as caught:
        manager.add_request([1])
    assert isinstance(caught.value, queue.Full)
    manager.start()
    engine.runner.allow(1)  # one runs now, one waits
    names.append(manager.add_request([1], max_new_tokens=2))
    with pytest.raises(queue.Full):
        manager.add_request([1])
    with pytest.raises(queue.Full):
        manager.add_requests([[1]])
    engine.runner.release()
    assert [result(manager, str(name)).status for name in names] == [FINISHED] * 3
    assert manager.add_request([1], request_id="later") == "later"


# ---- results ---------------------------------------------------------------------------------------------------------------


def test_waiting_for_one_result_disturbs_nobody(make: Make) -> None:
    """get_result(id) waits for that id; the others stay in line in the order in which they finished."""
    manager = make().manager
    names = [str(manager.add_request([1], max_new_tokens=n)) for n in (30, 2, 4, 6)]
    assert result(manager, names[0]).generated_tokens == tokens_after(1, 30)
    others = [manager.get_result(timeout=PATIENCE) for _ in range(3)]
    assert [output.request_id for output in others if output] == names[1:]


def test_iteration_ends_with_the_engine_and_loses_nothing(make: Make) -> None:
    """A loop over the manager yields everything, then ends; over a stopped manager it yields what is left."""
    engine = make(prepare=held)
    manager = engine.manager
    names = manager.add_requests([[1], [1, 2], [1, 2, 3]], max_new_tokens=4)
    reader = Background(lambda: [output.request_id for output in manager])
    stopper = Background(manager.stop)
    engine.runner.release()
    stopper.value()
    assert sorted(reader.value()) == names
    manager.start()
    engine.runner.release()
    more = manager.add_requests([[1], [2]], max_new_tokens=2)
    manager.stop()
    left = list(manager)
    assert sorted(output.request_id for output in left) == more and {output.status for output in left} == {FINISHED}


def test_sixteen_streams_at_once(make: Make) -> None:
    """Every thread gets its own request's outputs, complete and in order."""
    engine = make(prepare=held)
    manager = engine.manager
    names = [str(manager.add_request([1] * (i + 1), max_new_tokens=20, streaming=True)) for i in range(16)]
    readers = [Background(lambda name=name: list(manager.request_id_iter(name))) for name in names]
    engine.runner.release()
    for i, reader in enumerate(readers):
        assert [output.generated_tokens for output in reader.value()] == [tokens_after(i + 1, n) for n in range(1, 21)]


# ---- handlers and coroutines -------------------------------------------------------------------------------------------------


def test_handlers_run_on_their_own_loops(make: Make) -> None:
    """Two clients in two threads each hear their own request on their own event loop."""
    manager = make().manager
    together = threading.Barrier(2)

    def client(name: str, length: int) -> tuple[list[list[int]], set[bool]]:
        me = threading.get_ident()
        heard: list[list[int]] = []
        right: set[bool] = set()

        async def main() -> None:
            ended = asyncio.Event()

            def handler(output: GenerationOutput) -> None:
                heard.append(output.generated_tokens)
                right.add(threading.get_ident() == me)
                if output.is_finished():
                    ended.set()

            manager.register_result_handler(name, handler)
            together.wait(PATIENCE)
            manager.add_request([1] * length, request_id=name, max_new_tokens=12, streaming=True)
            await asyncio.wait_for(ended.wait(), PATIENCE)

        asyncio.run(main())
        return heard, right

    clients = [Background(lambda i=i: client(f"c{i}", i + 1)) for i in range(2)]
    for i, one in enumerate(clients):
        assert one.value() == ([tokens_after(i + 1, n) for n in range(1, 13)], {True})
    assert manager.get_result(timeout=0.0) is None


def test_a_handler_needs_a_loop(make: Make) -> None:
    """Registering outside an event loop is a RuntimeError."""
    with pytest.raises(RuntimeError):
        make().manager.register_result_handler("x", print)


def test_a_client_whose_loop_is_closed_costs_nobody_anything(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Its request is cancelled and its id free again; others are served (it used to end the engine)."""
    engine = make(prepare=held)
    manager = engine.manager

    async def leave() -> None:
        manager.register_result_handler("gone", lambda output: None)
        manager.add_request([1], request_id="gone", max_new_tokens=100, streaming=True)

    asyncio.run(leave())
    other = str(manager.add_request([1, 2], max_new_tokens=10))
    engine.runner.release()
    assert result(manager, other).generated_tokens == tokens_after(2, 10)
    assert "gone" in caplog.text
    assert result(manager, str(manager.add_request([1], request_id="gone", max_new_tokens=1))).status == FINISHED
    assert manager.stats().num_cancelled == 1


def test_a_handler_that_raises_costs_the_others_nothing(make: Make) -> None:
    """The loop's exception handler hears of it; the next handler is called all the same."""
    manager = make().manager
    heard: list[int] = []
    complaints: list[Any] = []

    async def main() -> None:
        ended = asyncio.Event()

        def bad(output: GenerationOutput) -> None:
            raise ValueError("from a handler")

        def good(output: GenerationOutput) -> None:
            heard.append(len(output.generated_tokens))
            if output.is_finished():
                ended.set()

        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        manager.register_result_handler("bad", bad)
        manager.register_result_handler("good", good)
        for name in ("bad", "good"):
            manager.add_request([1], request_id=name, max_new_tokens=5, streaming=True)
        await asyncio.wait_for(ended.wait(), PATIENCE)

    asyncio.run(main())
    assert heard == [1, 2, 3, 4, 5]
    assert isinstance(complaints[0]["exception"], ValueError)


def asked(name: str, count: int, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(do_sample=False)
    return GenerateRequest(request_id=name, token_ids=(1, 2, 3), max_new_tokens=count, sampling=sampling, **fields)


def test_chunks_add_up_and_end_once(make: Make) -> None:
    """The first chunk comes at once; a reader who is late gets the rest merged, and exactly one chunk is terminal."""
    engine = make(prepare=held)

    async def read() -> list[tuple[tuple[int, ...], bool]]:
        seen: list[tuple[tuple[int, ...], bool]] = []
        async for chunk in engine.manager.chunks(asked("a", 6)):
            if not seen:
                await asyncio.to_thread(engine.runner.release)
                await asyncio.to_thread(engine.manager.stop)
            seen.append((chunk.token_ids, chunk.is_terminal))
        return seen

    started = Background(lambda: asyncio.run(read()))
    engine.runner.wait_until_asked(1)
    engine.runner.allow(1)
    assert started.value() == [((tokens_after(3, 1)[0],), False), (tuple(tokens_after(3, 6)[1:]), True)]


def test_leaving_a_stream_early_cancels_it_in_the_engine(make: Make) -> None:
    """The engine stops computing for a reader who has gone, and its id is free again."""
    engine = make(prepare=held)
    manager = engine.manager

    async def leave() -> None:
        chunks = manager.chunks(asked("a", 100))
        reading = asyncio.ensure_future(anext(chunks))  # type: ignore[arg-type]
        await asyncio.to_thread(engine.runner.allow, 1)
        await reading
        await chunks.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    engine.runner.release()
    manager.stop()
    assert engine.runner.steps < 5
    assert manager.stats().num_cancelled == 1
    assert manager.get_result(timeout=0.0) is None


def test_chunks_of_a_bad_request_raise_at_the_first_step(make: Make) -> None:
    """The caller hears of it before any chunk, and the engine not at all."""
    engine = make()

    async def read(request: GenerateRequest) -> None:
        async for _ in engine.manager.chunks(request):
            raise AssertionError("a chunk of a bad request")

    with pytest.raises(InvalidRequestError):
        asyncio.run(read(GenerateRequest(request_id="x", token_ids=())))
    engine.manager.stop()
    with pytest.raises(EngineStoppedError):
        asyncio.run(read(asked("x", 1)))


def test_stream_gives_cumulative_outputs_of_the_whole_family(make: Make) -> None:
    """`async for output in manager.stream(...)`: tokens so far; the children's outputs come with it."""
    manager = make().manager

    async def read() -> dict[str, list[int]]:
        last: dict[str, list[int]] = {}
        async for output in manager.stream([1, 2, 3], request_id="p", max_new_tokens=5, num_return_sequences=2):
            known = last.get(output.request_id, [])
            assert output.generated_tokens[: len(known)] == known
            last[output.request_id] = output.generated_tokens
        return last

    assert asyncio.run(read()) == {"p": tokens_after(3, 5), "p__child#0": tokens_after(3, 5)}


# ---- cancelling --------------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_ends_with_what_it_has(make: Make) -> None:
    """Running or waiting, it gets a CANCELLED output; a further cancel, or one of an unknown id, does nothing."""
    engine = make(prepare=held, max_requests_per_batch=1)
    manager = engine.manager
    running = str(manager.add_request([1], max_new_tokens=50))
    waiting = str(manager.add_request([1], max_new_tokens=50))
    engine.runner.allow(3)
    for name in (running, waiting, waiting, "nobody"):
        manager.cancel_request(name)
    engine.runner.release()
    first, second = result(manager, running), result(manager, waiting)
    assert (first.status, first.finish_reason) == (CANCELLED, "cancelled") and 3 <= len(first.generated_tokens) <= 4
    assert (second.status, second.generated_tokens) == (CANCELLED, [])
    assert manager.get_result(timeout=0.0) is None


def test_cancelling_a_parent_cancels_its_children(make: Make) -> None:
    """They were one submission; a child may be cancelled alone."""
    engine = make(prepare=held)
    manager = engine.manager
    for name in ("p", "q"):
        manager.add_request([1, 2], request_id=name, max_new_tokens=50, num_return_sequences=3)
    engine.runner.allow(2)
    manager.cancel_request("p")
    manager.cancel_request("q__child#0")
    engine.runner.release()
    family = ["p", "p__child#0", "p__child#1", "q__child#0"]
    assert {result(manager, name).status for name in family} == {CANCELLED}
    assert {result(manager, name).status for name in ("q", "q__child#1")} == {FINISHED}


# ---- life --------------------------------------------------------------------------------------------------------------------


def test_a_flush_finishes_what_is_here_and_takes_nothing_new(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """stop() waits for queued and running requests; adds meanwhile get None with a warning, add_requests raises."""
    engine = make(prepare=held, max_requests_per_batch=2)
    manager = engine.manager
    names = manager.add_requests([[1]] * 5, max_new_tokens=6)
    engine.runner.allow(1)
    manager.stop(block=False)
    waiting = Background(manager.stop)
    assert manager.add_request([7]) is None
    assert "refused" in caplog.text
    with pytest.raises(EngineStoppedError):
        manager.add_requests([[7]])
    engine.runner.release()
    waiting.value()
    assert not manager.is_running()
    assert {result(manager, name).status for name in names} == {FINISHED}


def test_a_hard_stop_tells_everyone_and_loses_nobody(make: Make) -> None:
    """Running, waiting, and just handed in: each gets a FAILED output with what it has (20 of 20 used to be lost)."""
    engine = make(prepare=held, max_requests_per_batch=1)
    manager = engine.manager
    first = str(manager.add_request([1], max_new_tokens=50))
    engine.runner.allow(3)
    names = manager.add_requests([[1]] * 20, max_new_tokens=50)
    manager.stop(block=False, hard_stop=True)
    engine.runner.release()
    manager.join(0.0)
    partial = result(manager, first)
    assert partial.status == FAILED and "HARD_STOP" in str(partial.error) and 3 <= len(partial.generated_tokens) <= 4
    assert {result(manager, name).status for name in names} == {FAILED}


def test_a_stop_nobody_waits_for_is_a_flush_too(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """stop(block=False), and a stop whose time runs out, leave the engine to finish by itself (they used to break it)."""
    engine = make(prepare=held)
    manager = engine.manager
    for stop in (lambda: manager.stop(block=False), lambda: manager.stop(timeout=0.01)):
        names = manager.add_requests([[1], [1, 2]], max_new_tokens=6)
        engine.runner.wait_until_asked(1)
        stop()
        assert manager.is_running()
        engine.runner.release()
        assert {result(manager, name).status for name in names} == {FINISHED}
        manager.join(0.0)
        assert not manager.is_running()
        manager.start()
    assert "still finishing" in caplog.text


def test_a_hard_stop_overtakes_a_flush(make: Make) -> None:
    """Both calls return, and what was not done fails."""
    engine = make(prepare=held)
    manager = engine.manager
    name = str(manager.add_request([1], max_new_tokens=300))
    engine.runner.allow(1)
    flush = Background(manager.stop)
    manager.stop(block=False, hard_stop=True)
    engine.runner.release()
    manager.join(0.0)
    flush.value()
    assert result(manager, name).status == FAILED


def test_restart_builds_anew_and_installs_attention_again(make: Make) -> None:
    """Every session runs on a model that is ours, and gives it back (a second session used to compute nonsense)."""
    engine = make()
    manager = engine.manager
    for session in range(3):
        name = str(manager.add_request([1, 2], max_new_tokens=3))
        assert name == f"req_{session}"
        assert result(manager, name).generated_tokens == tokens_after(2, 3)
        manager.stop()
        assert engine.runner.log == ["install", "restore", "close"]
        manager.start()
    assert len(engine.runners) == 4


def test_a_kept_engine_keeps_its_cache(make: Make) -> None:
    """keep_for_next_session keeps the parts, and hangs the manager on the model; a later stop gives both back."""
    engine = make()
    manager = engine.manager
    result(manager, str(manager.add_request([1] * 9, max_new_tokens=2)))
    manager.stop(keep_for_next_session=True)
    assert getattr(manager.model, CACHED_MANAGER) is manager
    assert "close" not in engine.runner.log
    manager.start()
    assert result(manager, str(manager.add_request([1] * 9, max_new_tokens=2))).num_cached_tokens == 8
    manager.destroy()
    assert engine.runner.log[-1] == "close" and len(engine.runners) == 1
    assert not hasattr(manager.model, CACHED_MANAGER)


def test_starting_while_it_finishes_waits_for_the_end(make: Make) -> None:
    """start() after stop(block=False) lets the old session finish, then serves again."""
    engine = make(prepare=held)
    manager = engine.manager
    old = str(manager.add_request([1], max_new_tokens=3))
    engine.runner.wait_until_asked(1)
    manager.stop(block=False)
    starting = Background(manager.start)
    engine.runner.release()
    starting.value()
    engine.runner.release()
    new = str(manager.add_request([1], max_new_tokens=3))
    assert result(manager, old).status == result(manager, new).status == FINISHED


def test_destroy_is_final(make: Make) -> None:
    """It flushes, may be called again, and there is no start after it; requests of an engine that never ran are told."""
    engine = make()
    manager = engine.manager
    name = str(manager.add_request([1], max_new_tokens=4))
    manager.destroy()
    manager.destroy()
    assert result(manager, name).status == FINISHED
    with pytest.raises(EngineStoppedError):
        manager.start()
    assert manager.add_request([1]) is None
    never = make(start=False).manager
    name = str(never.add_request([1]))
    never.destroy()
    output = never.get_result(name, timeout=0.0)
    assert output is not None and output.status == FAILED and "destroyed" in str(output.error)


def test_needless_starts_and_stops_only_warn(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A second start, a stop before the start and a second stop change nothing."""
    manager = make(start=False).manager
    manager.stop()
    assert "not running" in caplog.text
    manager.start()
    caplog.clear()
    manager.start()
    assert "running already" in caplog.text
    assert result(manager, str(manager.add_request([1], max_new_tokens=1))).status == FINISHED
    manager.stop()
    manager.stop()


def test_warmup_runs_on_our_model_and_gives_it_back(make: Make) -> None:
    """Before the start and while running; a rebuilt engine is cold again."""
    engine = make(start=False)
    manager = engine.manager
    assert not manager.warmed_up
    manager.warmup()
    assert manager.warmed_up and engine.runner.log == ["install", "warmup", "restore"]
    manager.start()
    manager.warmup()
    assert result(manager, str(manager.add_request([1], max_new_tokens=1))).status == FINISHED
    manager.stop()
    assert not manager.warmed_up


def test_a_program_that_forgets_to_stop_still_ends() -> None:
    """The engine goes with its program, and its requests with it; nothing hangs at the end (a thread of its own used to)."""
    program = """
from tests.engine.fakes import make_engine
engine = make_engine(num_blocks=4096)
engine.manager.start()
engine.runner.hold()
engine.manager.add_request([1], max_new_tokens=400)
engine.runner.wait_until_asked(1)
engine.runner.release()
print("end of program")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2], check=False
    )
    assert (done.returncode, done.stdout) == (0, "end of program\n"), done.stderr


def test_the_thread_is_gone_after_a_stop(make: Make) -> None:
    """Nothing is left running."""
    before = set(threading.enumerate())
    manager = make().manager
    manager.add_request([1])
    manager.stop()
    assert set(threading.enumerate()) <= before


# ---- pause -------------------------------------------------------------------------------------------------------------------


def test_inside_a_pause_nothing_steps_and_the_model_is_its_owners(make: Make) -> None:
    """In-flight steps are finished first, adds wait, and everything goes on where it was."""

    def deep(runner: FakeRunner) -> None:
        runner.depth = 2

    engine = make(prepare=deep, num_blocks=128)
    manager, runner = engine.manager, engine.runner
    name = str(manager.add_request([1, 2], max_new_tokens=300, streaming=True))
    runner.wait_until_asked(5)
    with manager.pause():
        steps = runner.steps
        assert not runner.installed and runner.in_flight == 0
        other = str(manager.add_request([1], max_new_tokens=3))
        with manager.pause():
            pass
        assert runner.steps == steps
    assert result(manager, other).status == FINISHED
    assert result(manager, name).generated_tokens == tokens_after(2, 300)


def test_new_weights_are_never_matched_with_old_pages(make: Make) -> None:
    """Leaving a pause counts the weights on, unless it is told that nothing changed (a stale prefix used to be served)."""
    manager = make().manager
    prompt = [1] * 9

    def cached() -> tuple[int, tuple[int, ...]]:
        output = result(manager, str(manager.add_request(prompt, max_new_tokens=2)))
        return output.num_cached_tokens, output.weights_versions

    assert cached() == (0, (0,))
    with manager.pause(invalidate=False):
        pass
    assert cached() == (8, (0,))
    with manager.pause():
        pass
    assert cached() == (0, (1,))
    with manager.pause(weights_version=7):
        pass
    assert cached() == (0, (7,))
    manager.drop_cache()
    assert cached() == (0, (7,))
    assert cached() == (8, (7,))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_request_under_way_goes_on_or_is_computed_again(make: Make, recompute: bool) -> None:
    """Its output names the versions that made it; with `recompute` the tokens it has are computed under the new weights first."""
    engine = make(prepare=held, start=False)
    manager, runner = engine.manager, engine.runner
    rung, ring = threading.Event(), manager._inbox.ring
    manager._inbox.ring = lambda: (ring(), rung.set())  # type: ignore[method-assign]
    manager.start()
    name = str(manager.add_request([1, 2], max_new_tokens=6))
    runner.allow(3)  # the engine stands before its fourth step

    def update() -> None:
        with manager.pause(recompute=recompute):
            pass

    updating = Background(update)
    assert rung.wait(PATIENCE)
    runner.release()
    updating.value()
    output = result(manager, name)
    assert (output.generated_tokens, output.weights_versions) == (tokens_after(2, 6), (0, 1))
    assert [plan.num_tokens for plan in runner.plans] == [2, 1, 1, 1, 6 if recompute else 1, 1]


def test_children_are_computed_again_like_anybody(make: Make) -> None:
    """After `recompute` a child that has tokens of its own cannot take its parent's pages again (that ended the engine)."""
    engine = make(prepare=held, page_size=4, start=False)
    manager, runner = engine.manager, engine.runner
    rung, ring = threading.Event(), manager._inbox.ring
    manager._inbox.ring = lambda: (ring(), rung.set())  # type: ignore[method-assign]
    manager.start()
    manager.add_request([1, 2, 3], request_id="p", max_new_tokens=12, num_return_sequences=3)
    runner.allow(6)

    def update() -> None:
        with manager.pause(recompute=True):
            pass

    updating = Background(update)
    assert rung.wait(PATIENCE)
    runner.release()
    updating.value()
    for name in ("p", "p__child#0", "p__child#1"):
        assert result(manager, name).generated_tokens == tokens_after(3, 12)


def test_pausing_needs_an_engine_and_stopping_inside_is_refused(make: Make) -> None:
    """RuntimeErrors both, and the engine survives the second."""
    manager = make(start=False).manager
    with pytest.raises(RuntimeError), manager.pause():
        pass
    manager.start()
    with manager.pause(), pytest.raises(RuntimeError):
        manager.stop()
    assert result(manager, str(manager.add_request([1], max_new_tokens=1))).status == FINISHED


def test_a_hard_stop_does_not_wait_for_a_pause_of_another_thread(make: Make) -> None:
    """The holder keeps working on the model; the engine ends and tells its requests."""
    engine = make(prepare=held)
    manager = engine.manager
    name = str(manager.add_request([1], max_new_tokens=50))
    engine.runner.release()
    with manager.pause():
        Background(lambda: manager.stop(hard_stop=True)).value()
        assert not manager.is_running()
    assert result(manager, name).status in (FAILED, FINISHED)


# ---- failure ------------------------------------------------------------------------------------------------------------------


def test_a_step_that_raises_fails_everyone_with_the_cause(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Running and waiting requests get it with their partial tokens; the engine refuses until a start heals it."""
    failures = iter([4, None])

    def broken_once(runner: FakeRunner) -> None:
        runner.fail_at = next(failures)

    engine = make(prepare=broken_once, max_requests_per_batch=2, start=False)
    manager = engine.manager
    names = manager.add_requests([[1]] * 4, max_new_tokens=20)
    manager.start()
    outputs = [result(manager, name) for name in names]
    assert {output.status for output in outputs} == {FAILED}
    assert all("4711" in str(output.error) for output in outputs)
    assert [len(output.generated_tokens) for output in outputs] == [3, 3, 0, 0]
    manager.join(0.0)
    assert not manager.is_running()
    assert isinstance(manager.background_thread_status.fatal_error, RuntimeError)
    assert manager.add_request([1]) is None and "4711" in caplog.text
    assert manager.get_result() is None, "nothing is left to wait for"
    manager.start()
    assert manager.fatal_error is None
    assert result(manager, str(manager.add_request([1], max_new_tokens=3))).generated_tokens == tokens_after(1, 3)
    assert len(engine.runners) == 2, "a broken engine is not used again"


def test_a_broken_core_still_tells_everyone(make: Make) -> None:
    """Even if failing them one by one raises, every request ends, and so do those still on their way in."""
    engine = make(prepare=held)
    manager = engine.manager

    def broken(*_: Any) -> None:
        raise KeyError("broken bookkeeping")

    engine.core.commit = broken  # type: ignore[method-assign]
    engine.core.fail_all = broken  # type: ignore[method-assign]
    names = [str(manager.add_request([1], max_new_tokens=5)) for _ in range(3)]
    engine.runner.release()
    for name in names:
        assert "broken bookkeeping" in str(result(manager, name).error)


def test_one_row_that_cannot_be_sampled_fails_alone(make: Make) -> None:
    """NaN logits of one request cost its neighbours nothing."""
    engine = make(prepare=held)
    engine.runner.bad_requests = {"bad"}
    manager = engine.manager
    for name in ("good", "bad", "fine"):
        manager.add_request([1], request_id=name, max_new_tokens=5)
    engine.runner.release()
    assert result(manager, "bad").status == FAILED and "no finite logits" in str(result_error(manager, "bad"))
    for name in ("good", "fine"):
        assert result(manager, name).generated_tokens == tokens_after(1, 5)


def result_error(manager: ContinuousBatchingManager, name: str) -> str | None:
    """The error of one more request like `name`."""
    manager.add_request([1], request_id=name, max_new_tokens=2)
    return result(manager, name).error


def test_waiters_are_freed_when_the_engine_dies(make: Make) -> None:
    """Threads that wait without a time limit get the failed output, then None; a pause that was asked for raises."""

    def broken(runner: FakeRunner) -> None:
        runner.fail_at = 2
        runner.hold()

    engine = make(prepare=broken)
    manager = engine.manager
    waiters = [Background(manager.get_result) for _ in range(2)]
    manager.add_request([1], max_new_tokens=20)
    engine.runner.release()
    outputs = [waiter.value() for waiter in waiters]
    assert sorted(output.status.name if output else "None" for output in outputs) == ["FAILED", "None"]
    manager.join(0.0)
    with pytest.raises(RuntimeError), manager.pause():
        pass


def test_a_build_that_fails_leaves_no_manager_and_no_thread(make: Make) -> None:
    """The error reaches the caller of the constructor, or of the start that had to build again."""
    with pytest.raises(ConfigError):
        ContinuousBatchingManager(object(), greedy(), {"page_size": 2}, build=lambda *_: pytest.fail("built all the same"))
    built: list[FakeRunner] = []
    with pytest.raises(ConfigError, match="guidance_scale"):
        make(greedy(guidance_scale=2.0), drop_unsupported_processors=False, prepare=built.append)
    assert built[0].log == ["close"]
    attempts = iter([None, MemoryError("no room")])

    def prepare(runner: FakeRunner) -> None:
        error = next(attempts)
        if error is not None:
            raise error

    manager = make(prepare=prepare).manager
    manager.stop()
    with pytest.raises(MemoryError):
        manager.start()
    assert not manager.is_running()


# ---- settings ------------------------------------------------------------------------------------------------------------------


def test_the_callers_objects_are_never_changed(make: Make) -> None:
    """Generation config and engine config stay as they were; the manager works on copies."""
    generation = greedy(4, eos_token_id=None)
    before = generation.to_dict()
    manager = make(generation).manager
    result(manager, str(manager.add_request([1])))
    generation.max_new_tokens = 1
    assert len(result(manager, str(manager.add_request([1]))).generated_tokens) == 4
    generation.max_new_tokens = 4
    assert generation.to_dict() == before


def test_sampling_keywords_need_an_engine_that_takes_them(make: Make) -> None:
    """Without per_request_processors they are refused, by name."""
    manager = make(per_request_processors=False).manager
    with pytest.raises(InvalidRequestError, match="per_request_processors"):
        manager.add_request([1], temperature=0.5)
    assert result(manager, str(manager.add_request([1], max_new_tokens=2))).status == FINISHED


def test_stats_tell_what_is_going_on(make: Make) -> None:
    """Counts of an engine that has nothing left to do are exact; what is on its way in counts as waiting."""
    engine = make(start=False)
    manager = engine.manager
    manager.add_requests([[1, 2]] * 3, max_new_tokens=4)
    assert manager.stats().num_waiting == 3
    manager.start()
    manager.stop()
    stats = manager.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_finished) == (0, 0, 3)
    assert (stats.prompt_tokens, stats.generated_tokens) == (6, 12)


def test_the_log_is_quiet_when_all_is_well(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """No warning in an ordinary session."""
    with caplog.at_level(logging.WARNING):
        manager = make().manager
        result(manager, str(manager.add_request([1], max_new_tokens=2)))
        manager.stop()
    assert not caplog.records
