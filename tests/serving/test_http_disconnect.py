"""Clients that go away: at every moment their requests end in the engine, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.serving.doors import DoorUnderTest, Exchange, chat_body, gauge, listening, make_door

CHAT = "/v1/chat/completions"
pytestmark = pytest.mark.timeout(30)


def settled(door: DoorUnderTest, ended: int = 0) -> None:
    """Every request that began was closed before its end, but for `ended` ones, and none is counted as present."""
    begun = sorted(request.request_id for request in door.source.requests)
    assert sorted(door.source.closed + door.source.ended) == begun and len(door.source.ended) == ended
    assert gauge(door, "cb_ray_requests_running") == gauge(door, "cb_ray_requests_waiting") == 0


async def leave_when(door: DoorUnderTest, fields: dict[str, Any], text: str | None) -> Exchange:
    """Start a chat, wait until `text` came (None: until the engine was asked), leave, and wait for the end of the handler."""
    exchange = Exchange(door.app, CHAT, chat_body(**fields))
    await (exchange.read(text) if text is not None else door.source.asked.wait())
    exchange.leave()
    await exchange.task
    return exchange


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_cancels_it(n: int) -> None:
    """A client that has read a few tokens and leaves frees its places at once, with no token in between to notice it by."""
    door = make_door(holds_after=3)
    asyncio.run(leave_when(door, {"stream": True, "n": n}, '"content":"el"'))
    settled(door)


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": True, "n": 3}, {}, {"n": 3}, {"stop": "x"}])
def test_leaving_before_the_first_token_cancels(fields: dict[str, Any]) -> None:
    """A client that leaves while its request waits or computes is noticed without a token, streamed or not."""
    door = make_door(holds_after=0)
    exchange = asyncio.run(leave_when(door, fields, None))
    settled(door)
    assert not any(message.get("status") == 200 for message in list(exchange.sent._queue))  # type: ignore[attr-defined]


@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"stream": True, "n": 2}])
def test_a_cancelled_handler_cancels_its_request(fields: dict[str, Any]) -> None:
    """Ray Serve cancels the handler's task when the client leaves; the engine's request ends then as well."""
    door = make_door(holds_after=0)

    async def scenario() -> None:
        exchange = Exchange(door.app, CHAT, chat_body(**fields))
        await door.source.asked.wait()
        exchange.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange.task

    asyncio.run(scenario())
    settled(door)


def test_a_stream_cancelled_by_serve_on_the_way() -> None:
    """The same with headers out and a part of the text sent."""
    door = make_door(holds_after=3)

    async def scenario() -> None:
        exchange = Exchange(door.app, CHAT, chat_body(stream=True))
        await exchange.read('"content":"el"')
        exchange.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange.task

    asyncio.run(scenario())
    settled(door)


def test_headers_wait_for_the_first_token() -> None:
    """Nothing is promised before the engine has taken the request; the first token brings headers, role and text with it."""
    door = make_door(holds_after=0)

    async def scenario() -> None:
        exchange = Exchange(door.app, CHAT, chat_body(stream=True))
        await door.source.asked.wait()
        assert exchange.sent.empty()
        door.source.released.set()
        assert (await exchange.sent.get())["status"] == 200
        await exchange.task

    asyncio.run(scenario())


def test_gauges_tell_waiting_from_running() -> None:
    """Before its first token a streamed request waits, after it it runs, at its end it is gone."""
    door = make_door(holds_after=3)

    async def scenario() -> list[tuple[int, int]]:
        metrics, seen = door.app.state.door.metrics, []
        held = make_door(holds_after=0)
        waiting = Exchange(held.app, CHAT, chat_body(stream=True))
        await held.source.asked.wait()
        seen.append((held.app.state.door.metrics.waiting, held.app.state.door.metrics.running))
        waiting.leave()
        await waiting.task
        running = Exchange(door.app, CHAT, chat_body(stream=True))
        await running.read('"content":"el"')
        seen.append((metrics.waiting, metrics.running))
        door.source.released.set()
        await running.task
        return [*seen, (metrics.waiting, metrics.running)]

    assert asyncio.run(scenario()) == [(1, 0), (0, 1), (0, 0)]


def test_a_crowd_that_leaves_at_random() -> None:
    """Sixty clients, streamed and not, one and several choices, leave at random moments: nothing stays behind."""
    dice = random.Random(7)
    door = make_door(holds_after=5)

    async def one() -> None:
        fields = {"stream": dice.random() < 0.6, "n": dice.choice([1, 1, 2]), "stop": "never"}
        exchange = Exchange(door.app, CHAT, chat_body(**fields))
        if fields["stream"] and dice.random() < 0.7:
            await exchange.read('"content":"')
        exchange.leave()
        await exchange.task

    async def scenario() -> None:
        await asyncio.gather(*(one() for _ in range(60)))
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"tasks left behind: {others}"

    asyncio.run(scenario())
    settled(door)


def test_a_real_client_that_hangs_up() -> None:
    """Over a real connection: closing a stream halfway closes the engine's iterator, and the server goes on."""
    door = make_door(holds_after=4)
    with listening(door.app) as url, httpx.Client(base_url=url) as client:
        with client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
        assert client.get("/health").json() == {"status": "ok"}
    settled(door)  # the server waits for its connections before it ends
