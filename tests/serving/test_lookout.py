"""Refusals by the door itself: a door and a real pool in one event loop, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

pytest.importorskip("ray")

from cb_ray.errors import QueueFullError
from cb_ray.routing.loads import Ask
from cb_ray.routing.members import Beat, Member
from cb_ray.routing.pool import PoolLimits
from cb_ray.serving.board import BoardState
from tests.serving.doors import DoorUnderTest, FakeSource, chat_body, error_of
from tests.serving.test_pool_view import Clock, LocalBoard, door


class Pooled(FakeSource):
    """Asks the pool as a handle does, and leaves it at the end of an answer."""

    board: LocalBoard

    async def generate(self, request: Any) -> Any:
        state, name = self.board.actor._state, request.request_id
        if type(state.acquire(Ask(ticket=name, request_id=name, priority=request.priority))).__name__ == "Refused":
            raise QueueFullError(2, 2)
        try:
            async for chunk in super().generate(request):
                yield chunk
        finally:
            state.release(name)


class Stage:
    """A full pool of two slots and two places to wait, a door in front of it, and its clock."""

    def __init__(self, board: LocalBoard, here: DoorUnderTest, clock: Clock) -> None:
        self.board, self.door, self.clock = board, here, clock
        self.state: BoardState = board.actor._state
        for number in range(4):
            self.state.acquire(Ask(ticket=f"t{number}", request_id=f"other{number}", num_tokens=100 * (number + 1)))

    @property
    def lookout(self) -> Any:
        return self.door.app.state.door._pool.lookout

    async def ask(self, **fields: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.door.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            answer = await client.post("/v1/chat/completions", json=chat_body("Hi", **fields))
        if (stocking := self.lookout._stocking) is not None:
            await stocking
        return answer

    async def full_house(self) -> None:
        """Somebody was refused, and the door has heard that the pool is full."""
        assert (await self.ask()).status_code == 429
        await self.heard(full=True)

    async def heard(self, full: bool) -> None:
        while (room := self.lookout._doorman._room) is None or room.full is not full:
            await asyncio.sleep(0)


def on_stage(story: Callable[[Stage], Awaitable[None]], **limits: Any) -> None:
    async def play() -> None:
        board, clock = LocalBoard(), Clock()
        board.actor._state.apply(board.pool.configure(0.0, PoolLimits(max_queue_size=2, page_size=4, **limits)))
        stage = Stage(board, door(board, Pooled, clock), clock)
        stage.door.source.board = board  # type: ignore[attr-defined]
        await asyncio.wait_for(story(stage), 20)
        stage.lookout.close()

    asyncio.run(play())


def test_while_the_pool_is_full_nobody_asks_it_and_each_is_promised_a_place():
    """One call tells when there is a place; until then a refusal goes no further than the door, and its Retry-After rises from caller
    to caller. Promises are fetched before they run out, and the Board counts all refusals."""

    async def story(stage: Stage) -> None:
        await stage.full_house()
        stage.board.calls.clear()
        answers = [await stage.ask(n=1 + number % 3) for number in range(20)]
        assert {answer.status_code for answer in answers} == {429} and error_of(answers[0])["code"] == "queue_full"
        waits = [int(answer.headers["retry-after"]) for answer in answers]
        assert waits == sorted(waits) and waits[0] < waits[-1]
        assert "reserve" not in stage.board.calls and 3 <= len(stage.board.calls) <= 6, "and none for each refusal"
        assert stage.lookout._doorman.tell() + stage.board.pool.counters["refused"] == 21

    on_stage(story)


def test_the_first_request_after_a_place_is_free_gets_it():
    """The word of a place comes by itself, and whoever comes next asks the pool; the pool alone admits."""

    async def story(stage: Stage) -> None:
        await stage.full_house()
        stage.state.release("t0")
        stage.state.release("t1")
        await stage.heard(full=False)
        assert (await stage.ask()).status_code == 200
        assert stage.board.calls.count("reserve") == 1

    on_stage(story)


def test_who_goes_before_those_that_wait_is_judged_by_the_pool():
    """A full pool grants a replica to a request of higher priority that fits where the head of the line does not. The door leaves it
    to the pool, though it refuses others."""

    async def story(stage: Stage) -> None:
        await stage.full_house()
        asked = len(stage.door.source.requests)
        assert (await stage.ask(priority=0)).status_code == 429
        assert len(stage.door.source.requests) == asked and (await stage.ask(priority=-1)).status_code == 429
        pool, state = stage.board.pool, stage.state
        roomy = pool._lease_at["t0"]
        state.apply(pool.beat(state.now, Beat(replica=roomy, number=1, live=(("other0", 1),), free_tokens=200))[1])
        members = [Member(replica=name, slots=1 + (name == roomy)) for name in ("r0", "r1")]
        state.apply(pool.members(state.now, members))  # there is a slot now, but the head has 300 tokens
        assert pool.is_full(state.now) and (await stage.ask(priority=-1)).status_code == 200

    on_stage(story)


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_board_that_is_gone_makes_no_door_refuse(how):
    """One that dies is noticed by the call that waits for it; of one that says nothing, a word is believed for two seconds."""

    async def story(stage: Stage) -> None:
        await stage.full_house()
        assert (await stage.ask()).status_code == 429
        stage.state.apply(stage.board.pool.configure(0.0, PoolLimits(max_queue_size=0, page_size=4)))  # the handle decides alone
        if how == "dies":
            stage.board.dead = True
            stage.lookout.lost()
        else:
            stage.board.actor.room = lambda *_: asyncio.Event().wait()
            stage.clock.now += 2.1
        stage.lookout.asks_first()  # refuses nobody
        assert (await stage.ask(max_tokens=1)).status_code == 200

    on_stage(story)


def test_when_the_storm_is_over_nothing_is_left():
    """Nothing polls: once nobody was refused for a while and the pool has places, no call waits at the Board and no timer runs."""

    async def story(stage: Stage) -> None:
        await stage.full_house()
        for number in range(4):
            stage.state.release(f"t{number}")
        await stage.heard(full=False)
        stage.clock.now += 11
        await stage.lookout._watching
        assert not stage.lookout._doorman._returns and not stage.state._words
        assert stage.board.calls.count("room") == 3, "full; a place; still one"

    on_stage(story, lease_timeout_s=0.3)


def test_of_one_place_one_door_is_told_at_first():
    """Two doors that hear of one place send somebody each, and one of the two is refused late. So one is told; the other one is when
    nobody has come for the place, and at once when there are two."""

    async def story(stage: Stage) -> None:
        state = stage.state

        async def told(count: int) -> list[asyncio.Future[Any]]:
            while sum(word.done() for word in waiting) < count:
                await asyncio.sleep(0)
            return [word for word in waiting if word.done()]

        waiting = [asyncio.ensure_future(state.room(True, 1, 0)) for _ in range(3)]
        await asyncio.sleep(0)
        state.release("t3")
        (first,) = await told(1)
        assert (await first).free == 1
        assert state.reserve("q", "")[1].full
        state.unreserve("q")
        assert len(await told(2)) == 2, "the next one hears of the next place"
        state.release("t2")
        assert len(await told(3)) == 3
        waiting = [asyncio.ensure_future(state.room(True, 1, 0)) for _ in range(2)]
        assert state.pool.free_places(state.now) == 2
        assert len(await told(2)) == 2, "nobody came: all are told"

    on_stage(story)


def test_who_asks_is_told_how_the_pool_looks_since():
    """The answer to one who took the last place is word that the pool is full, so the next is refused without a question."""

    async def story(stage: Stage) -> None:
        await stage.full_house()
        stage.state.release("t3")
        await stage.heard(full=False)
        asked = stage.board.calls.count("reserve")
        first, second = await asyncio.gather(stage.ask(), stage.ask())
        assert sorted((first.status_code, second.status_code)) == [200, 429]
        assert stage.board.calls.count("reserve") == asked + 1

    on_stage(story)


def test_a_word_is_for_all_doors_and_for_what_they_heard():
    """Two doors wait for a place and both are told in the end; one that asks with an old word is answered at once."""

    async def story(stage: Stage) -> None:
        state = stage.state
        waiting = [asyncio.ensure_future(state.room(True, 1, 0)) for _ in range(2)]
        assert (await state.room(False, 2, 0)).full and len((await state.room(None, 2, 3)).returns) == 2
        assert not any(word.done() for word in waiting)
        state.release("t3")
        said = [await word for word in waiting]
        assert [room.full for room in said] == [False, False] and said[0].returns == ()
        again = asyncio.ensure_future(state.room(False, 1, 0))
        await asyncio.sleep(0)
        state.reserve("q", "")
        assert (await again).full and state.pool.counters["refused"] == 3
        state.unreserve("q")
        assert not (await state.room(True, 1, 0)).full

    on_stage(story)
