"""Depth 2: step N + 1 is submitted before what N sampled is known. On a CPU it hides nothing, and must say the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_ray.core.plan import UNKNOWN_TOKEN
from cb_ray.engine import build as engine_build
from cb_ray.engine.manager import ContinuousBatchingManager
from cb_ray.messages import GenerateRequest, SamplingParams, TokenChunk, merge_chunks
from tests import tiny
from tests.core.fakes import VOCAB, Harness
from tests.runtime.driving import GREEDY, random_prompts

SETTINGS = dict(page_size=4, num_blocks=40, max_batch_tokens=24, max_requests_per_batch=6, seed=7)


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a device whose work runs beside the host's."""
    monkeypatch.setattr(engine_build, "overlaps", lambda device: True)


def drive(
    model: Any,
    requests: list[GenerateRequest],
    depth: int,
    at_step: Callable[[int, Any], None] = lambda step, core: None,
    **settings: Any,
) -> tuple[dict[str, TokenChunk], int]:
    """Each request's whole output, and how many rows carried a token over."""
    wish = engine_build.ContinuousBatchingConfig.of(SETTINGS | settings | {"use_async_batching": depth == 2})
    parts = engine_build.build(model, model.generation_config, wish)
    core, runner = parts.core, parts.runner
    assert runner.depth == depth
    runner.install()
    chunks: dict[str, list[TokenChunk]] = {}
    tickets: deque[Any] = deque()
    carried = steps = 0
    try:
        for request in requests:
            core.add(request, 0.0)
        while core.has_work or tickets:
            at_step(steps, core)
            plan = core.plan(0.0)
            if not plan.is_empty:
                carried += sum(row.carry_from >= 0 for row in plan.rows)
                tickets.append(runner.submit(plan))
                steps += 1
            if tickets and (len(tickets) == depth or plan.is_empty):
                ticket = tickets.popleft()
                core.commit(ticket.plan, runner.collect(ticket), 0.0)
                core.check()
            for chunk in core.take_chunks():
                chunks.setdefault(chunk.request_id, []).append(chunk)
    finally:
        runner.close()
    return {name: merge_chunks(parts) for name, parts in chunks.items()}, carried


def requests_of(prompts: list[list[int]], count: int, sampling: list[SamplingParams] | None = None) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"r{i}", token_ids=tuple(p), max_new_tokens=count + i, sampling=GREEDY if sampling is None else sampling[i]
        )
        for i, p in enumerate(prompts)
    ]


def said(outputs: dict[str, TokenChunk]) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tuple(o.token_ids), o.finish_reason, o.logprobs and [round(p, 4) for p in o.logprobs])
        for name, o in outputs.items()
    }


WISHES = [
    GREEDY,
    SamplingParams(do_sample=True, temperature=0.9, top_p=0.9, seed=3),
    SamplingParams(do_sample=True, top_k=20, seed=5, logprobs=2),
    SamplingParams(do_sample=False, repetition_penalty=1.3),
    SamplingParams(do_sample=False, logprobs=0, eos_token_ids=tuple(range(100, 180))),
    SamplingParams(do_sample=True, seed=11, stop_sequences=((7,), (9, 9)), min_tokens=3),
    GREEDY,
]


@pytest.mark.parametrize("family", ["llama", "mistral_sliding"])
def test_two_steps_in_flight_change_no_answer(family: str, overlapping: None) -> None:
    """Chunked prompts, penalties that must wait, stops, logprobs, seeds, more requests than fit: all as with one."""
    model = tiny.make_model(family)
    requests = requests_of(random_prompts([3, 30, 9, 14, 6, 21, 2]), 9, WISHES)
    alone, none = drive(model, requests, 1)
    overlapped, carried = drive(model, requests, 2)
    assert said(overlapped) == said(alone)
    assert none == 0 and carried > 20


def test_preempted_and_parked_in_flight(overlapping: None) -> None:
    """A cache too small for all: victims are sent back, or to host memory, while their token is on its way."""
    model = tiny.make_model("llama")
    requests = requests_of(random_prompts([12, 14, 13, 16]), 20)
    for offload in (0.0, 0.001):
        small = dict(num_blocks=18, cpu_offload_space=offload)
        alone, _ = drive(model, requests, 1, **small)
        overlapped, _ = drive(model, requests, 2, **small)
        assert said(overlapped) == said(alone)


def test_cancelled_in_flight(overlapping: None) -> None:
    """A request that is cancelled while its token is on its way ends with what is known; the others say what they would."""
    model = tiny.make_model("llama")
    requests = requests_of(random_prompts([5, 9, 7]), 16)

    def cancel(step: int, core: Any) -> None:
        if step == 6:
            core.cancel("r1", 0.0)

    alone, _ = drive(model, requests, 1)
    overlapped, _ = drive(model, requests, 2, cancel)
    for name in ("r0", "r2"):
        assert said(overlapped)[name] == said(alone)[name]
    known = overlapped["r1"].token_ids
    assert overlapped["r1"].finish_reason == "cancelled" and tuple(known) == tuple(alone["r1"].token_ids[: len(known)])


def test_the_engine_thread_overlaps(overlapping: None) -> None:
    """The manager's loop runs at the runner's depth: outputs are the same, through pauses, and nothing is left in flight."""
    model = tiny.make_model("llama")
    prompts = random_prompts([4, 11, 25])
    outputs = []
    for depth in (1, 2):
        manager = ContinuousBatchingManager(
            model,
            model.generation_config,
            engine_build.ContinuousBatchingConfig.of(SETTINGS | {"use_async_batching": depth == 2}),
        )
        manager.start()
        names = manager.add_requests(prompts, max_new_tokens=15)
        with manager.pause(invalidate=False):
            pass
        found = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=60)
            assert result is not None
            found[result.request_id] = result.generated_tokens
        manager.stop(block=True, timeout=60)
        outputs.append([found[name] for name in names])
        assert manager.continuous_batching_config.use_async_batching == (depth == 2)
    assert outputs[0] == outputs[1]


# ---- the fake runner ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    jobs=st.lists(
        st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), st.integers(1, 12), st.integers(0, 8)),
        min_size=1,
        max_size=6,
    ),
    page=st.integers(2, 5),
    budget=st.integers(2, 20),
    windows=st.sampled_from([(None,), (6,), (None, 5)]),
    host=st.integers(0, 2),
    cancel=st.integers(0, 12),
)
def test_depth_two_is_depth_one(jobs: Any, page: int, budget: int, windows: Any, host: int, cancel: int) -> None:
    """Whatever the pages, budget, windows, arrivals, stop tokens and host memory: every request that is not cancelled gets the same
    tokens for the same reason.
    """
    answers = []
    for depth in (1, 2):
        harness = Harness(windows=windows, page=page, blocks=60, budget=budget, depth=depth, host_sectors=host)
        for step in range(10):
            for index, (prompt, count, arrival) in enumerate(jobs):
                if arrival == step:
                    harness.add(f"r{index}", prompt, count, sampling=SamplingParams(do_sample=False, eos_token_ids=(1, 2)))
            if step == cancel:
                harness.core.cancel("r0", harness.now)
            harness.step()
        harness.run()
        harness.collect_chunks()
        answers.append({f"r{i}": (harness.tokens(f"r{i}"), harness.chunks[f"r{i}"][-1].finish_reason) for i in range(len(jobs))})
    alone, overlapped = answers
    if "cancelled" in (alone["r0"][1], overlapped["r0"][1]):
        shorter, longer = sorted((alone.pop("r0")[0], overlapped.pop("r0")[0]), key=len)
        assert longer[: len(shorter)] == shorter
    assert overlapped == alone


def test_a_carried_token_is_unknown_to_the_host(overlapping: None) -> None:
    """The plan says so, and the packed buffer has no token there: only the device knows it."""
    model = tiny.make_model("llama")
    wish = engine_build.ContinuousBatchingConfig.of(SETTINGS | {"use_async_batching": True})
    parts = engine_build.build(model, model.generation_config, wish)
    parts.runner.install()
    parts.core.add(requests_of([[5, 6, 7]], 4)[0], 0.0)
    first = parts.runner.submit(parts.core.plan(0.0))
    second = parts.core.plan(0.0)
    row = second.rows[0]
    assert row.token_ids[-1] == UNKNOWN_TOKEN and row.carry_from == 0
    ticket = parts.runner.submit(second)
    tokens = [parts.runner.collect(t).token_ids[0] for t in (first, ticket)]
    parts.runner.close()
    with torch.no_grad():
        ids = [5, 6, 7]
        for _ in tokens:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert tokens == ids[3:]
