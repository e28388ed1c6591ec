"""The laws of the core, on a model that reads its memory through block tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.errors import InvalidRequestError
from cb_ray.messages import RequestStatus, SamplingParams

from .fakes import VOCAB, Harness, one_by_one

WINDOWS = st.sampled_from([(None,), (5,), (None, 5), (3, None, None), (4, 9, None), (2, 7)])


def tokens(**size):
    return st.lists(st.integers(0, VOCAB - 1), **size)


@given(
    windows=WINDOWS,
    page=st.integers(1, 5),
    shared=tokens(max_size=12),
    tails=st.lists(st.tuples(tokens(min_size=1, max_size=9), st.integers(1, 9)), min_size=1, max_size=8),
    budget=st.integers(1, 40),
    spare=st.floats(1, 4),
    depth=st.sampled_from([1, 2]),
    host=st.integers(0, 8),
    most=st.integers(1, 6),
    sharing=st.booleans(),
    kind=st.sampled_from(["fifo", "prefill_first", "priority"]),
    forks=st.booleans(),
)
def test_batching_never_changes_the_answer(
    windows, page, shared, tails, budget, spare, depth, host, most, sharing, kind, forks
) -> None:
    """Whatever the chunking, sharing, preemption, parking, forking, sliding or double buffering, each gets what it would
    alone.
    """
    jobs = [(shared + tail, count) for tail, count in tails]
    longest = max(-(-(len(prompt) + count) // page) for prompt, count in jobs)
    harness = Harness(
        windows=windows,
        page=page,
        blocks=int(spare * longest) + len(windows),
        budget=budget,
        depth=depth,
        host_sectors=host,
        max_requests_per_batch=min(most, budget),
        allow_block_sharing=sharing,
        scheduler_type=kind,
    )
    jobs = [(prompt, count) for prompt, count in jobs if len(prompt) <= harness.limits.max_cached_tokens]
    for index, (prompt, count) in enumerate(jobs):
        harness.add(f"r{index}", prompt, count, priority=index % 3)
        if forks:
            harness.add(f"r{index}'", prompt, count, priority=index % 3, fork_of=f"r{index}")
    harness.run()
    for index, (prompt, count) in enumerate(jobs):
        room = harness.limits.max_cached_tokens - len(prompt) + 1
        expected = one_by_one(prompt, min(count, room), harness.layout.groups)
        for name in [f"r{index}", f"r{index}'"] if forks else [f"r{index}"]:
            assert harness.tokens(name) == expected
            assert harness.chunks[name][-1].finish_reason == "length"
    total, held, cached = harness.core._blocks.counts()
    assert held == 0, "blocks leak"
    assert sharing or cached == 0


@given(
    data=st.data(),
    windows=WINDOWS,
    depth=st.sampled_from([1, 2]),
    host=st.integers(0, 6),
    blocks=st.integers(6, 20),
    kind=st.sampled_from(["fifo", "prefill_first", "priority"]),
)
def test_coming_and_going(data, windows, depth, host, blocks, kind) -> None:
    """Requests of several tenants and priorities come and fork, are cancelled, fail alone, and weights change at any moment: the
    others are served right, no page crosses a salt or a weights version wrongly, nothing leaks.
    """
    harness = Harness(
        windows=windows,
        page=2,
        blocks=blocks,
        budget=7,
        depth=depth,
        host_sectors=host,
        max_requests_per_batch=4,
        scheduler_type=kind,
    )
    prompts: dict[str, list[int]] = {}
    expected: dict[str, list[int]] = {}
    spoiled: set[str] = set()
    for index in range(data.draw(st.integers(1, 25), label="moves")):
        move = data.draw(
            st.sampled_from(["add", "add", "fork", "step", "step", "cancel", "poison", "weights", "drop"]), label="move"
        )
        if move == "add":
            prompt = data.draw(tokens(min_size=1, max_size=7))
            count = data.draw(st.integers(0, 6))
            if len(prompt) <= harness.limits.max_cached_tokens:
                room = harness.limits.max_cached_tokens - len(prompt) + 1
                expected[f"q{index}"] = one_by_one(prompt, min(count, room), harness.layout.groups)
                extras = {
                    "cache_salt": data.draw(st.sampled_from(["", "a", "b"])),
                    "priority": data.draw(st.integers(0, 2)),
                }
                harness.add(f"q{index}", prompt, count, **extras)
                prompts[f"q{index}"] = prompt
        elif move == "fork" and prompts:
            parent = data.draw(st.sampled_from(sorted(prompts)))
            count = data.draw(st.integers(1, 6))
            room = harness.limits.max_cached_tokens - len(prompts[parent]) + 1
            expected[f"q{index}"] = one_by_one(prompts[parent], min(count, room), harness.layout.groups)
            harness.add(f"q{index}", prompts[parent], count, fork_of=parent)
        elif move == "step":
            harness.step()
        elif move in ("cancel", "poison") and expected:
            name = data.draw(st.sampled_from(sorted(expected)))
            if harness.core.is_live(name):
                spoiled.add(name)
                if move == "cancel":
                    harness.core.cancel(name, harness.now)
                    harness.collect_chunks()
                else:
                    harness.runner.bad_requests.add(name)
        elif move == "weights":
            while harness.tickets:  # weights change with the stream idle
                ticket = harness.tickets.popleft()
                harness.core.commit(ticket.plan, ticket.result, harness.now)
            harness.collect_chunks()
            harness.core.set_weights_version(index + 1, recompute=data.draw(st.booleans()))
        elif move == "drop":
            harness.core.drop_cache()
    harness.run()
    assert set(harness.chunks) == set(expected), "law L2: each request ends"
    for name, wanted in expected.items():
        last = harness.chunks[name][-1]
        assert last.is_terminal and last.usage is not None
        if name in spoiled:
            assert last.status in (RequestStatus.CANCELLED, RequestStatus.FAILED, RequestStatus.FINISHED)
            assert harness.tokens(name) == wanted[: len(harness.tokens(name))]
        else:
            assert harness.tokens(name) == wanted and last.status == RequestStatus.FINISHED
    assert harness.core._blocks.counts()[1] == 0
    assert harness.core.stats().owed_tokens == 0


@given(
    jobs=st.lists(st.tuples(tokens(min_size=1, max_size=9), st.integers(1, 5)), min_size=1, max_size=5),
    depth=st.sampled_from([1, 2]),
)
def test_equal_inputs_equal_plans(jobs, depth) -> None:
    """Law L6: a plan is a function of what was added, so followers and replays can trust it."""
    runs = []
    for _ in range(2):
        harness = Harness(blocks=12, page=2, budget=6, depth=depth, max_requests_per_batch=3)
        for index, (prompt, count) in enumerate(jobs):
            harness.add(f"r{index}", prompt, count)
        harness.run()
        runs.append(harness.plans)
    assert runs[0] == runs[1]


def test_a_prompt_is_found_again_and_one_token_is_left_to_compute() -> None:
    """A finished prompt of four pages is matched but for its last page's worth: at least one token must give logits."""
    harness = Harness(page=4, blocks=32, budget=64)
    prompt = list(range(17))
    harness.add("first", prompt, 3)
    harness.run()
    harness.add("second", prompt, 3)
    harness.run()
    assert harness.chunks["second"][-1].usage.num_cached_tokens == 16
    assert harness.plans[-3].rows[0].start == 16


def test_identical_prompts_of_one_batch_are_computed_once() -> None:
    """Pages are named when they are planned, so equal prompts that arrive together share within the very same step."""
    harness = Harness(page=4, blocks=64, budget=64)
    for index in range(4):
        harness.add(f"r{index}", list(range(13)), 2)
    harness.step()
    assert [row.length for row in harness.plans[0].rows] == [13, 1, 1, 1]
    harness.run()
    assert len({tuple(harness.tokens(f"r{i}")) for i in range(4)}) == 1


def test_salts_and_weights_versions_never_share() -> None:
    """Law L7: a page is found only under the salt and the weights version it was computed for."""
    harness = Harness(page=4, blocks=64, budget=64)
    prompt = list(range(17))
    for name, salt in [("a", "x"), ("b", "y"), ("c", "x")]:
        harness.add(name, prompt, 1, cache_salt=salt)
        harness.run()
    harness.core.set_weights_version(1)
    harness.add("d", prompt, 1, cache_salt="x")
    harness.run()
    cached = [harness.chunks[name][-1].usage.num_cached_tokens for name in "abcd"]
    assert cached == [0, 0, 16, 0]
    assert harness.chunks["d"][-1].usage.weights_versions == (1,)


def test_a_large_prompt_is_not_overtaken() -> None:
    """First come, first served: small prompts behind a large one that does not fit yet wait for it."""
    harness = Harness(page=2, blocks=10, budget=32, safety_margin=0.0)
    harness.add("running", [1, 2, 3], 8)
    harness.step()
    harness.add("large", list(range(16)), 1)
    harness.add("small", [4], 1)
    harness.run()
    order = [row.request_id for plan in harness.plans for row in plan.rows]
    assert order.index("large") < order.index("small")


def test_priority_orders_the_line_and_ages() -> None:
    """A better priority goes first, but nobody waits for ever: one level is worth a bounded lead in waiting time."""
    harness = Harness(page=4, blocks=64, budget=8, max_requests_per_batch=1, scheduler_type="priority")
    harness.add("running", [1], 3)
    harness.step()
    harness.add("bulk", [2], 1, priority=1)
    harness.add("urgent", [3], 1, priority=0)
    harness.run()
    order = [row.request_id for plan in harness.plans for row in plan.rows]
    assert order.index("urgent") < order.index("bulk")
    harness.add("running2", [1], 3)
    harness.step()
    harness.add("old", [2], 1, priority=1)
    harness.now += 31
    harness.add("young", [3], 1, priority=0)
    harness.run()
    order = [row.request_id for plan in harness.plans for row in plan.rows]
    assert order.index("old") < order.index("young")


def test_forks_share_full_pages_and_copy_the_partial_one() -> None:
    """Children of one prompt hold their parent's full pages and compute only the last prompt token."""
    harness = Harness(page=4, blocks=64, budget=64)
    prompt = list(range(10))
    harness.add("p", prompt, 3)
    harness.add("c", prompt, 3, fork_of="p")
    harness.step()
    harness.step()
    plan = harness.plans[1]
    parent, child = plan.rows
    assert child.start == 9 and child.length == 1
    assert child.tables[0][:2] == parent.tables[0][:2] and child.tables[0][2] != parent.tables[0][2]
    assert [(copy.source, copy.target) for copy in plan.copies] == [(parent.tables[0][2], child.tables[0][2])]
    harness.run()
    assert harness.tokens("p") == harness.tokens("c")


@pytest.mark.parametrize(
    ("prompt", "fields", "names"),
    [
        ([], {}, "empty"),
        ([1, VOCAB], {}, f"between 0 and {VOCAB - 1}"),
        ([1, -1], {}, "got -1"),
        (list(range(40)) * 9, {}, "KV cache holds"),
        ([1], {"sampling": SamplingParams(stop_token_ids=(VOCAB,))}, "stop_token_ids"),
    ],
)
def test_poison_requests_are_refused_by_name(prompt, fields, names) -> None:
    """Bad input is refused when it is added, says what is wrong, and leaves everyone else alone."""
    harness = Harness(page=4, blocks=16, budget=16)
    harness.add("good", [1, 2, 3], 4)
    with pytest.raises(InvalidRequestError, match=names):
        harness.add("bad", prompt, 4, **fields)
    with pytest.raises(InvalidRequestError, match="is being served"):
        harness.add("good", [1], 1)
    harness.run()
    assert harness.tokens("good") == one_by_one([1, 2, 3], 4, harness.layout.groups)


def test_zero_tokens_end_at_once_without_a_step() -> None:
    """max_new_tokens=0 is a finished request with no token, and costs no step."""
    harness = Harness()
    harness.add("zero", [1, 2], 0)
    assert harness.chunks["zero"][0].finish_reason == "length" and harness.chunks["zero"][0].token_ids == ()
    assert not harness.core.has_work


def test_unlimited_requests_end_with_what_fits() -> None:
    """max_new_tokens=None runs to the end of the cache and ends with reason `length`; the engine lives on."""
    harness = Harness(page=4, blocks=8, budget=16)
    harness.add("endless", [1, 2], None)
    harness.run()
    assert len(harness.tokens("endless")) == 8 * 4 - 2 + 1
    harness.add("next", [1, 2], 2)
    harness.run()
    assert harness.chunks["next"][-1].status == RequestStatus.FINISHED


def test_stops_and_minimums() -> None:
    """A stop id ends the request and is part of its output; stop sequences too; `stop_token` says which."""
    harness = Harness(blocks=64)
    free = one_by_one([1, 2, 3], 8, harness.layout.groups)
    harness.add("id", [1, 2, 3], 8, sampling=SamplingParams(do_sample=False, eos_token_ids=(free[2],)))
    harness.add("ignored", [1, 2, 3], 8, sampling=SamplingParams(do_sample=False, eos_token_ids=(free[2],), ignore_eos=True))
    harness.add("sequence", [1, 2, 3], 8, sampling=SamplingParams(do_sample=False, stop_sequences=(tuple(free[1:4]),)))
    harness.run()
    assert harness.tokens("id") == free[: free.index(free[2]) + 1] and harness.chunks["id"][-1].stop_token == free[2]
    assert harness.tokens("ignored") == free
    assert harness.tokens("sequence") == free[:4] and harness.chunks["sequence"][-1].finish_reason == "stop"


def test_a_time_limit_ends_a_request_alone() -> None:
    """A request whose own time limit passes fails with its error, wherever it is."""
    harness = Harness(blocks=64, max_requests_per_batch=1)
    harness.add("running", [1, 2, 3], 30, timeout_s=4.5)
    harness.add("waiting", [1], 30, timeout_s=2.5)
    harness.add("patient", [2], 2)
    harness.run()
    assert 0 < len(harness.tokens("running")) < 30
    assert "time limit of 4.5 s" in str(harness.chunks["running"][-1].error)
    assert harness.chunks["waiting"][-1].status == RequestStatus.FAILED
    assert harness.chunks["patient"][-1].status == RequestStatus.FINISHED


def test_failing_all_starts_clean() -> None:
    """When a step dies, everyone fails with the cause; nothing cached survives, and the core serves again."""
    harness = Harness(blocks=64)
    harness.add("a", list(range(9)), 5)
    harness.step()
    harness.core.fail_all(RuntimeError("boom"), harness.now)
    harness.collect_chunks()
    harness.tickets.clear()
    assert str(harness.chunks["a"][-1].error) == "boom"
    harness.core.check()
    harness.add("b", list(range(9)), 2)
    harness.run()
    assert harness.chunks["b"][-1].usage.num_cached_tokens == 0


def test_chunks_shrink_only_where_the_cache_is_tiny() -> None:
    """A sliding model whose cache holds little more than a window takes small chunks; a roomy hybrid one takes whole steps."""
    tight = Harness(windows=(8,), page=4, blocks=5, budget=32)
    assert tight.limits.max_cached_tokens > 1000
    tight.add("long", [i % VOCAB for i in range(60)], 2)
    tight.run()
    assert max(row.length for plan in tight.plans for row in plan.rows) <= 8
    roomy = Harness(windows=(12, None), page=4, blocks=64, budget=64)
    prompt = [(i * 7) % VOCAB for i in range(50)]
    for name, tokens in (("a", prompt), ("b", prompt[:48] + [5, 6]), ("c", prompt + [9])):
        roomy.add(name, tokens, 6)
    roomy.run()
    assert [row.length for row in roomy.plans[0].rows] == [50, 2, 3]
    assert roomy.core.stats().cached_tokens == 96


def test_a_resumed_request_counts_on_from_where_it_was() -> None:
    """After a failover the prompt holds tokens that were generated elsewhere: indices, minimums and penalties count them as such."""
    harness = Harness(blocks=64)
    sampling = SamplingParams(do_sample=False, presence_penalty=1.0, min_tokens=5, eos_token_ids=(3,))
    harness.add("moved", [1, 2, 8, 9], 2, sampling=sampling, resumed_tokens=2)
    harness.step()
    (row,) = harness.plans[0].rows
    assert (row.token_index, row.min_tokens_left, row.num_prompt) == (2, 3, 2)


def test_a_fork_waits_until_its_parents_pages_are_filled() -> None:
    """Found by ten thousand examples: a parent that came back in this very step shared a page that the step was still filling, and
    the copy for its child, which runs before the rows, took what had been there before.
    """
    harness = Harness(windows=(None, 5), page=3, blocks=7, budget=9, max_requests_per_batch=3)
    jobs = [([0] * 6, 8), ([0] * 6, 8), ([0] * 6, 2)]
    for index, (prompt, count) in enumerate(jobs):
        harness.add(f"r{index}", prompt, count)
        harness.add(f"r{index}'", prompt, count, fork_of=f"r{index}")
    harness.run()
    for index, (prompt, count) in enumerate(jobs):
        expected = one_by_one(prompt, count, harness.layout.groups)
        assert harness.tokens(f"r{index}") == expected and harness.tokens(f"r{index}'") == expected
