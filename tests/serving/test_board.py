"""The Board and its client in one event loop, without Ray: what is heard when, and what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from cb_ray.errors import NoReplicaError, QueueFullError
from cb_ray.routing.loads import Ask
from cb_ray.routing.members import Beat, Member
from cb_ray.routing.pool import PoolLimits
from cb_ray.serving.board import BoardState
from cb_ray.serving.board_client import BoardClient, BoardLostError


class LocalBoard:
    """A Board's actor handle as the client sees it: `board.method.remote(...)` gives something to await. `dead` ends it."""

    def __init__(self, limits: PoolLimits, slots: int = 1) -> None:
        self.state = BoardState(limits)
        self.state.pool.members(self.state.now, [Member(replica="r", slots=slots)])
        self.dead = asyncio.Event()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return _Method(self, name)

    async def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.dead.is_set():
            raise RayActorError
        self.calls.append(name)
        if name in ("configure", "lost"):
            return None
        result = getattr(self.state, name)(*args, **kwargs)
        if not asyncio.iscoroutine(result):
            return result
        work, end = asyncio.ensure_future(result), asyncio.ensure_future(self.dead.wait())
        await asyncio.wait((work, end), return_when=asyncio.FIRST_COMPLETED)
        if self.dead.is_set():
            work.cancel()
            raise RayActorError
        end.cancel()
        return work.result()


class _Method:
    def __init__(self, board: LocalBoard, name: str) -> None:
        self._board, self._name = board, name

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._board.run(self._name, *args, **kwargs))


def run(story: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(story(), 20))


def make(board: LocalBoard | None) -> BoardClient:
    async def find() -> Any:
        return board

    return BoardClient(find, PoolLimits())


def ask(client: BoardClient, name: str, **more: Any) -> Ask:
    return Ask(ticket=client.new_ticket(), request_id=name, holder=client.holder, num_tokens=4, **more)


async def settled(board: LocalBoard, waiting: int, leases: int) -> None:
    """The Board has heard everything that was sent to it."""
    while (board.state.pool.num_waiting, board.state.pool.num_leases) != (waiting, leases):
        await asyncio.sleep(0)


def test_a_grant_reaches_who_waits_as_soon_as_a_slot_is_free():
    """Two processes, one slot: the second waits, the third is refused, and the release of the first wakes the second."""

    async def story():
        board = LocalBoard(PoolLimits(max_queue_size=1))
        one, two = make(board), make(board)
        first = ask(one, "a")
        assert (await one.acquire(first)).replica == "r"
        waiting = asyncio.ensure_future(two.acquire(ask(two, "b")))
        await settled(board, 1, 1)
        with pytest.raises(QueueFullError) as refused:
            await one.acquire(ask(one, "c"))
        assert (refused.value.waiting, refused.value.limit) == (1, 1)
        one.release(first.ticket)
        assert (await waiting).replica == "r"
        await settled(board, 0, 1)

    run(story)


@pytest.mark.parametrize("granted_meanwhile", [False, True])
def test_whoever_stops_waiting_leaves_nothing_behind(granted_meanwhile):
    """A cancelled caller leaves the line, even when its grant was already on its way."""

    async def story():
        board = LocalBoard(PoolLimits(max_queue_size=4))
        client = make(board)
        first = ask(client, "a")
        await client.acquire(first)
        waiting = asyncio.ensure_future(client.acquire(ask(client, "b")))
        await settled(board, 1, 1)
        if granted_meanwhile:
            board.state.release(first.ticket)  # the news is in the mailbox when the caller gives up
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        if not granted_meanwhile:
            await settled(board, 0, 1)
        client.release(first.ticket)
        await settled(board, 0, 0)

    run(story)


def test_many_wait_over_one_open_call():
    """A thousand waiting requests of one process cost the Board one waiting call, and are served in their order."""

    async def story():
        board = LocalBoard(PoolLimits())
        client, served = make(board), list[int]()

        async def one(number: int) -> None:
            asked = ask(client, f"q{number}")
            await client.acquire(asked)
            served.append(number)
            client.release(asked.ticket)

        await asyncio.gather(*(one(number) for number in range(1000)))
        assert served == list(range(1000))
        await settled(board, 0, 0)

    run(story)


def test_when_the_board_dies_those_who_wait_hear_of_it_at_once():
    """They decide alone from then on; what was granted goes on, and is made known to the next Board as the caller's."""

    async def story():
        first, second = LocalBoard(PoolLimits(lease_timeout_s=0.3)), LocalBoard(PoolLimits(lease_timeout_s=0.3), slots=4)
        boards = [first]

        async def find() -> Any:
            return boards[-1] if boards else None

        client = BoardClient(find, PoolLimits())
        held = ask(client, "a")
        await client.acquire(held)
        waiting = [asyncio.ensure_future(client.acquire(ask(client, name))) for name in "bcd"]
        await settled(first, 3, 1)
        boards.clear()
        first.dead.set()
        for one in waiting:
            with pytest.raises(BoardLostError):
                await one
        with pytest.raises(BoardLostError):
            await client.acquire(ask(client, "e"))
        alone = client.new_ticket()
        client.hold(alone, "f", "r")  # routed without a Board
        boards.append(second)
        second.state.pool.beat(second.state.now, Beat(replica="r", number=1, live=(("a", 3), ("f", 1))))
        await settled(second, 0, 2)
        client.release(held.ticket)
        client.release(alone)
        await settled(second, 0, 0)

    run(story)


def test_a_board_that_died_unnoticed_costs_no_request_its_place():
    """While this process asked nothing, the Board died and another came. Its next requests, several at once, are the new Board's: to
    route them alone would leave the places that were kept for them there unused."""

    async def story():
        old, new = LocalBoard(PoolLimits()), LocalBoard(PoolLimits(), slots=3)
        boards = [old]
        client = BoardClient(lambda: found(boards[-1]), PoolLimits())
        first = ask(client, "a")
        await client.acquire(first)
        client.release(first.ticket)
        await settled(old, 0, 0)
        old.dead.set()
        boards.append(new)
        asked = [ask(client, name) for name in "bcd"]
        for each in asked:
            assert new.state.pool.reserve(new.state.now, each.request_id) is None
        await asyncio.gather(*(client.acquire(each) for each in asked))
        counts = new.state.pool.snapshot(new.state.now)
        assert counts["places"] == 0 and new.state.pool.counters["granted"] == 3
        for each in asked:
            client.release(each.ticket)
        await settled(new, 0, 0)

    run(story)


async def found(board: LocalBoard) -> LocalBoard:
    return board


def test_a_holder_that_falls_silent_loses_its_place_and_its_streams():
    """A killed process renews nothing: it leaves the line, and its engine is told to end what nobody reads."""

    async def story():
        board = LocalBoard(PoolLimits(lease_timeout_s=0.2))
        pool, now = board.state.pool, lambda: board.state.now
        board.state.acquire(Ask(ticket="t1", request_id="a", holder="gone", num_tokens=4))
        board.state.acquire(Ask(ticket="t2", request_id="b", holder="gone", num_tokens=4))
        pool.beat(now(), Beat(replica="r", number=1, live=(("a", 5),)))
        await settled(board, 0, 1)
        reply, _ = pool.beat(now(), Beat(replica="r", number=2, live=(("a", 9),)))
        assert reply.abandoned == ("a",)
        pool.beat(now(), Beat(replica="r", number=3, ended=("a",)))
        await settled(board, 0, 0)
        assert not board.state._mailboxes

    run(story)


def test_an_old_board_ends_no_streams_while_a_new_version_rolls_out():
    """Callers renew at the new Board, which also grants requests to old replicas: those still report to the old one, which had them
    cancelled after the lease timeout (35 of 300 streams in `cb-ray bench pool redeploy`). When it is asked again, time starts anew.
    """

    async def story():
        board = LocalBoard(PoolLimits(lease_timeout_s=0.2))
        pool, now = board.state.pool, lambda: board.state.now
        board.state.acquire(Ask(ticket="t1", request_id="granted-here", holder="moved", num_tokens=4))
        pool.take_charge(now(), False)
        live = (("granted-here", 5), ("granted-there", 5))
        pool.beat(now(), Beat(replica="r", number=1, live=live))
        await asyncio.sleep(0.3)
        board.state.apply(pool.tick(now()))
        assert pool.beat(now(), Beat(replica="r", number=2, live=live))[0].abandoned == ()
        pool.take_charge(now(), True)
        board.state.apply(pool.tick(now()))
        assert pool.beat(now(), Beat(replica="r", number=3, live=live))[0].abandoned == ()
        await asyncio.sleep(0.3)
        board.state.apply(pool.tick(now()))
        told = pool.beat(now(), Beat(replica="r", number=4, live=live))[0].abandoned
        assert sorted(told) == ["granted-here", "granted-there"], "nobody has come back for them"

    run(story)


def test_a_cold_start_that_takes_too_long_is_an_error_that_says_so():
    """With no replica in time: NoReplicaError, which is 503, instead of waiting for ever."""

    async def story():
        board = LocalBoard(PoolLimits(cold_start_timeout_s=0.2))
        board.state.apply(board.state.pool.members(board.state.now, []))
        client = make(board)
        with pytest.raises(NoReplicaError, match="no replica became ready"):
            await client.acquire(ask(client, "a"))
        await settled(board, 0, 0)

    run(story)


def test_an_idle_pool_has_no_timer_and_an_idle_client_no_call():
    """Nothing polls: when everything is over, nothing is scheduled on either side."""

    async def story():
        board = LocalBoard(PoolLimits(lease_timeout_s=0.3))
        client = make(board)
        asked = ask(client, "a")
        await client.acquire(asked)
        client.release(asked.ticket)
        await settled(board, 0, 0)
        assert client._listener is not None
        await client._listener
        while board.state._timer is not None:
            await asyncio.sleep(0.01)
        assert not board.state._mailboxes and board.state.pool.deadline == float("inf")

    run(story)


def test_who_watches_hears_of_changes_and_of_several_at_once_but_once():
    """The page's stream: the first look is at once, the next when something has changed; nothing is scheduled while nobody looks."""

    async def story():
        board = LocalBoard(PoolLimits())
        state = board.state
        seen = await state.watch(-1)
        waiting = asyncio.ensure_future(state.watch(seen))
        client = make(board)
        first, second = ask(client, "a"), ask(client, "b")
        await client.acquire(first)
        client.release(first.ticket)
        await client.acquire(second)
        assert await waiting > seen + 1, "several changes were one piece of news"
        client.release(second.ticket)
        await settled(board, 0, 0)
        assert state._news is None and state._telling is None


def test_who_waits_when_a_new_board_takes_over_asks_that_one():
    """A new version rolls out: its Board decides now. Whoever stood in the old line is granted by the new one, is not counted
    again in its bound, and what runs is told to it."""

    async def story():
        old, new = LocalBoard(PoolLimits(max_queue_size=1)), LocalBoard(PoolLimits(max_queue_size=1))
        boards = [old]

        async def find() -> Any:
            return boards[-1]

        client, other = BoardClient(find, PoolLimits()), make(new)
        running = ask(client, "running")
        await client.acquire(running)
        waiting = asyncio.ensure_future(client.acquire(ask(client, "waiting")))
        await settled(old, 1, 1)
        taken = ask(other, "taken")
        await other.acquire(taken)
        queued = asyncio.ensure_future(other.acquire(ask(other, "queued")))
        await settled(new, 1, 1)
        boards.append(new)
        client.move_on()
        await settled(new, 2, 2)  # both wait, though one may; the lease of the old Board is known: nobody reports here yet
        await settled(old, 0, 1)
        other.release(taken.ticket)
        client.release(running.ticket)
        assert (await waiting).replica == "r", "who waited before goes first"
        client.release(next(iter(client._held)))
        assert (await queued).replica == "r"
        await settled(new, 0, 1)

    run(story)
