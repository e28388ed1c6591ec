"""The pool's benchmarks without Ray: what they conclude from records, and their client against a server that misbehaves."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp")

from aiohttp import web

from cb_ray.bench.pool.client import Plan, Record
from cb_ray.bench.pool.judge import compare, difference, most_at_once, percentile, table
from cb_ray.bench.pool.load import Load
from cb_ray.bench.pool.model import BANDS, VOCAB_SIZE, prompt_of, tokens_of, word
from cb_ray.bench.pool.overload import arrivals
from cb_ray.bench.pool.sitting import divide, merged
from cb_ray.bench.pool.weights import Update, stale_tokens

ANSWER = list(range(10, 30))


def text(tokens: list[int]) -> str:
    return " ".join(map(word, tokens))


def test_lost_and_repeated_tokens_are_told_from_other_answers():
    """A gap, a repeat and a changed answer are three faults; an answer as it should be is none."""
    assert difference(ANSWER, ANSWER) == (0, 0, 0)
    assert difference(ANSWER[:5] + ANSWER[8:], ANSWER) == (3, 0, 0)
    assert difference(ANSWER[:-2], ANSWER) == (2, 0, 0)
    assert difference(ANSWER[:7] + ANSWER[5:], ANSWER) == (0, 2, 0)
    assert difference([*ANSWER[:7], 99, *ANSWER[8:]], ANSWER) == (0, 0, 1)
    assert difference([*ANSWER, 99], ANSWER) == (0, 0, 1)


def test_records_are_laid_beside_what_should_have_come():
    """Broken streams fail, whatever text they brought; a usage that lies is a fault as well."""
    good = Record(key=0, text=text(ANSWER), output_tokens=len(ANSWER), status=200)
    cut = replace(good, error="the stream was cut off")
    lies = replace(good, output_tokens=len(ANSWER) + 1)
    gap = replace(good, text=text(ANSWER[3:]))
    faults = compare([good, cut, lies, gap], {0: ANSWER}, tokens_of)
    assert (faults.requests, faults.failed, faults.missing, faults.repeated, faults.other) == (4, 1, 3, 0, 1)
    assert len(faults.reasons) == 2


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30), st.integers(0, 4))
def test_overlaps_are_counted_as_a_walk_through_all_instants_would(spans, margin):
    """The observer's count: how many requests were open at one instant, each shortened at both ends."""
    intervals = [(begin, begin + length) for begin, length in spans]
    kept = [(a + margin, b - margin) for a, b in intervals if b - a > 2 * margin]
    slow = max((sum(a <= t + 0.5 < b for a, b in kept) for t in range(80)), default=0)
    assert most_at_once(intervals, margin) == slow


def test_cores_are_divided_and_settings_merged():
    """Engines get up to one core each and never more than half; a group of settings is merged, not replaced."""
    assert divide([0], 4) == ([0], [])
    assert divide([1, 0], 4) == ([0], [1])
    assert divide(range(16), 4) == (list(range(12)), [12, 13, 14, 15])
    assert merged({"pool": {"a": 1, "b": 2}, "c": 3}, {"pool": {"b": 4}}) == {"pool": {"a": 1, "b": 4}, "c": 3}
    assert percentile([3, 1, 2], 0.5) == 2
    assert table([{"a": 1.5, "b": None}]).splitlines()[2] == "| 1.5 |   |"
    times = arrivals(50.0, 20.0, seed=1)
    assert 800 < len(times) < 1200 and times == sorted(times) and times == arrivals(50.0, 20.0, seed=1)
    assert len(prompt_of(random.Random(0), 9, [1, 2])) == 9


def test_a_token_of_older_weights_is_stale_after_newer_ones():
    """Words tell whose weights said them: never older than the one before, nor than what all replicas had when it was asked."""
    size = VOCAB_SIZE // BANDS
    old, new = [word(3)], [word(size + 3)]
    updates = [Update(10.0, 12.0, 1)]

    def stale(words: list[str], sent: float) -> int:
        return stale_tokens(Record(key=0, sent=sent, text=" ".join(words)), updates)

    assert stale(old * 4, 9.0) == stale(old * 2 + new * 2, 11.0) == stale(new * 3, 13.0) == 0
    assert stale(old + new + old * 2, 11.0) == 2
    assert stale(old * 3, 12.5) == 3


def event(tokens: list[int], **more: Any) -> bytes:
    choices = [{"text": " " + text(tokens), "logprobs": None}] if tokens else []
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


class Door:
    """A server whose answers are chosen by the first token of the prompt."""

    def __init__(self) -> None:
        self.refusals = 2
        self.open = self.most = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind = (await request.json())["prompt"][0]
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            if kind == 3 and self.refusals:
                self.refusals -= 1
                return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "0.01"})
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for token in ANSWER:
                await response.write(event([token]))
            if kind == 2:
                request.transport.close()
                return response
            await response.write(event([], usage={"prompt_tokens": 1, "completion_tokens": len(ANSWER)}) + b"data: [DONE]\n\n")
            return response
        finally:
            self.open -= 1


def test_the_client_tells_whole_answers_from_broken_ones_and_obeys_refusals():
    """A process of its own that sends, reads, counts and comes back after a refusal; closed loop, then open loop."""

    async def story() -> None:
        door, app = Door(), web.Application()
        app.router.add_post("/", door.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        try:
            bodies = [{"prompt": [kind]} for kind in (1, 2, 3, 1)]
            async with Load.of(Plan(url=url, bodies=bodies, concurrency=2, obeys=True)) as load:
                await load.until(lambda heard: heard.tokens >= 32)
                records = {record.key: record for record in await load.done()}
            assert 1 <= door.most <= 2
            assert [bool(records[key].error) for key in range(4)] == [False, True, False, False]
            assert records[3].text.split() == text(ANSWER).split() and records[3].output_tokens == len(ANSWER)
            assert records[2].refused == 2 and records[0].first is not None
            async with Load.of(Plan(url=url, bodies=bodies[:1], rounds=0, concurrency=1)) as load:
                await load.until(lambda heard: len(heard.records) >= 3)
                load.width(3)
                assert len(await load.stop()) >= 3
            times = [0.0, 0.02, 0.04]
            async with Load.of(Plan(url=url, bodies=bodies[:1] * 3, times=times)) as load:
                sent = [record.sent - load.start for record in sorted(await load.done(), key=lambda record: record.sent)]
            assert all(at >= due for at, due in zip(sent, times, strict=True)) and all(a < b for a, b in pairwise(sent))
        finally:
            await runner.cleanup()

    asyncio.run(story())
