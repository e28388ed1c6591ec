"""When an engine replica beats and what it says, on an event loop, without Ray."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("ray")

from cb_ray.messages import EngineStats
from cb_ray.routing.members import Beat, BeatReply
from cb_ray.routing.reporter import PageNews
from cb_ray.serving.pulse import Pulse


class Desk:
    """Where beats arrive. `answer` is what they get; None: they were lost."""

    def __init__(self) -> None:
        self.beats: asyncio.Queue[Beat] = asyncio.Queue()
        self.answer: BeatReply | None = BeatReply(known=True)
        self.stats = EngineStats(blocks_total=10, blocks_held=4)
        self.cancelled: list[str] = []
        self.asked_full: list[bool] = []

    async def send(self, beat: Beat) -> BeatReply | None:
        self.beats.put_nowait(beat)
        return self.answer

    def pages(self, full: bool) -> PageNews:
        self.asked_full.append(full)
        return PageNews(full=full, added=[b"p"])

    def pulse(self, **more: Any) -> Pulse:
        return Pulse(
            "r", send=self.send, stats=lambda: self.stats, cancel=self.cancelled.append, page_size=16, pages=self.pages, **more
        )


def run(story: Any) -> None:
    asyncio.run(asyncio.wait_for(story(), 20))


def test_the_first_change_is_told_at_once_and_the_next_ones_together():
    """A lease is confirmed within a round trip; a thousand tokens within one interval make one beat."""

    async def story():
        desk = Desk()
        pulse = desk.pulse(interval_s=0.05)
        pulse.begin("a")
        first = await desk.beats.get()
        assert first.live == (("a", 0),) and first.free_tokens == 96
        for _ in range(1000):
            pulse.moved("a", 1)
        desk.stats = replace(desk.stats, generated_tokens=1000, computed_tokens=1100, num_finished=1, busy_s=0.04)
        pulse.end("a", finished=True)
        second = await desk.beats.get()
        assert second.live == () and second.ended == ("a",)
        assert (second.num_finished, second.finished_tokens, second.decode_tokens) == (1, 1000, 1000)
        assert (second.busy_s, second.prefill_tokens) == (0.04, 100), "work is what was done, when it was done"
        assert second.number > first.number

    run(story)


def test_when_all_is_told_nothing_is_scheduled():
    """An idle engine neither beats nor holds a timer."""

    async def story():
        desk = Desk()
        pulse = desk.pulse(interval_s=0.01)
        pulse.begin("a")
        pulse.end("a", finished=False)
        await desk.beats.get()
        await asyncio.sleep(0)
        assert pulse._timer is None and pulse._sending is None and desk.beats.empty()

    run(story)


def test_a_beat_that_was_lost_is_made_good():
    """What ended is told again, and the Board that comes back gets the whole cache."""

    async def story():
        desk = Desk()
        pulse = desk.pulse(interval_s=0.01)
        desk.answer = None
        pulse.begin("a")
        pulse.end("a", finished=True)
        assert (await desk.beats.get()).ended == ("a",)
        desk.answer = BeatReply(known=True)
        pulse.begin("b")
        again = await desk.beats.get()
        assert again.ended == ("a",) and again.live == (("b", 0),) and again.full
        pulse.end("b", finished=True)
        assert not (await desk.beats.get()).full
        assert desk.asked_full == [True, True, False]

    run(story)


def test_what_nobody_holds_any_more_is_cancelled():
    """The Board names it in its answer; the engine hears of it at once."""

    async def story():
        desk = Desk()
        pulse = desk.pulse(interval_s=0.01)
        desk.answer = BeatReply(known=True, abandoned=("a",))
        pulse.begin("a")
        await pulse.flush()
        assert desk.cancelled == ["a"]

    run(story)
