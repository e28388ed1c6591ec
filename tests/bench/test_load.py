"""The load client against a scripted server: what it records, when it sends, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.bench.client import EventReader, Record, Target, body_of
from cb_ray.bench.load import Run, closed_loop, new_session, open_loop
from cb_ray.bench.workloads import Item
from cb_ray.errors import ConfigError
from tests.bench.fake_server import Answer, chunk, serving, stream, usage_of, well

ITEM = Item(prompt="hello", max_tokens=10)


@given(st.lists(st.integers(1, 60)), st.sampled_from([b"\n", b"\r\n"]))
def test_events_come_out_whole_however_they_are_cut(cuts: list[int], newline: bytes) -> None:
    """A piece from the network may hold half an event or three; comments and other fields are skipped; data lines are joined."""
    text = b': comment\n\ndata: {"a": 1}\n\nevent: x\ndata: one\ndata:two\nid: 4\n\ndata: [DONE]\n\ndata: unfinished'
    text = text.replace(b"\n", newline)
    reader, seen, place = EventReader(), [], 0
    for cut in [*cuts, len(text)]:
        seen += list(reader.feed(text[place : place + cut]))
        place += cut
    assert seen == [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


def ask_all(answer: Answer, items: Sequence[Item], **fields: Any) -> Run:
    """All items at once against a server that answers so."""

    async def main() -> Run:
        async with serving(answer) as url, new_session() as session:
            target = Target(base_url=url, model="fake", **fields)
            return await open_loop(session, target, items, [0.0] * len(items))

    return asyncio.run(main())


def ask_one(answer: Answer, item: Item = ITEM, **fields: Any) -> Record:
    (record,) = ask_all(answer, [item], **fields).records
    return record


@pytest.mark.parametrize("streamed", [True, False])
def test_tokens_are_counted_by_usage_not_by_pieces(streamed: bool) -> None:
    """Five pieces of two tokens are ten tokens; a role alone is no output."""
    record = ask_one(well, Item(prompt="hello", max_tokens=10, stream=streamed))
    assert record.is_whole and record.status == 200 and record.finish_reason == "length"
    assert (record.prompt_tokens, record.output_tokens) == (7, 10)
    assert len(record.events) == (5 if streamed else 1)
    times = [record.due, record.sent, *record.events, record.ended]
    assert times == sorted(times)


def test_a_stream_without_its_end_is_no_answer() -> None:
    """A server that drops [DONE] has not said that the answer is whole."""

    async def dropped(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, chunk("a"), chunk("b", finish="stop"))

    record = ask_one(dropped)
    assert record.error == "cut off" and len(record.events) == 2


def test_an_error_in_the_stream_is_an_error() -> None:
    """Also where [DONE] follows it."""

    async def breaks(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, chunk("a"), b'data: {"error": {"message": "the engine failed"}}\n\n', b"data: [DONE]\n\n")

    record = ask_one(breaks)
    assert (record.error, record.detail) == ("error event", "the engine failed")


@pytest.mark.parametrize("content", [b"data: {not json}\n\n", b'data: {"id": 1}\n\n', b'data: {"choices": [null]}\n\n'])
def test_nonsense_is_an_error_of_its_request_alone(content: bytes) -> None:
    async def nonsense(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, content)

    assert ask_one(nonsense).error == "malformed answer"


def refusing(times: int, retry_after: str | None = "0.01", status: int = 429) -> Answer:
    """A server that refuses so often before it answers."""
    left = [times]

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if left[0]:
            left[0] -= 1
            headers = {} if retry_after is None else {"Retry-After": retry_after}
            return web.json_response({"error": {"message": "busy"}}, status=status, headers=headers)
        return await well(request, body)

    return answer


def test_a_refusal_is_recorded_with_what_it_says() -> None:
    record = ask_one(refusing(1, "2"))
    assert (record.error, record.status, record.detail, record.retry_after_s, record.retries) == ("429", 429, "busy", 2.0, 0)


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_obeyed_on_request(status: int) -> None:
    """The answer counts from when the request was first due; how often it was refused stays on record."""
    record = ask_one(refusing(2, status=status), retries=3)
    assert record.is_whole and record.retries == 2 and record.status == 200
    assert record.sent - record.due >= 0.02


@pytest.mark.parametrize(
    ("answer", "error"), [(refusing(3), "429"), (refusing(1, None), "429"), (refusing(1, "Wed, 21 Oct"), "429")]
)
def test_retries_end(answer: Answer, error: str) -> None:
    """After as many as allowed, and at once where the server names no time."""
    assert ask_one(answer, retries=1).error == error


def test_other_failures_have_names() -> None:
    """Nobody there; an answer that takes too long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def main() -> Record:
        async with new_session() as session:
            run = await open_loop(session, Target(base_url=f"http://127.0.0.1:{port}", model="x"), [ITEM], [0.0])
            return run.records[0]

    refused = asyncio.run(main())
    assert refused.error == "ClientConnectorError" and refused.status == 0

    async def never(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    assert ask_one(never, timeout_s=0.05).error == "timeout"


def test_a_client_may_leave_early() -> None:
    """A planned departure is told apart from a broken stream, and the server sees it."""
    gone: list[bool] = []

    async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(chunk("a"))
        gone.append(True)
        return response

    record = ask_one(endless, Item(prompt="x", leave_after=3))
    assert record.error == "left" and len(record.events) == 3
    assert gone == [True]


def test_open_loop_waits_for_no_answer() -> None:
    """A server that answers nobody before all have asked: a client that waited for answers would wait for ever."""
    arrived: list[asyncio.Event] = []

    async def together(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        mine = asyncio.Event()
        arrived.append(mine)
        if len(arrived) == 20:
            for one in arrived:
                one.set()
        await mine.wait()
        return await well(request, body)

    run = ask_all(together, [ITEM] * 20)
    assert run.is_open_loop and [record.index for record in run.records if record.is_whole] == list(range(20))


def test_requests_go_out_in_the_order_of_their_times_and_never_early() -> None:
    async def main() -> Run:
        async with serving() as url, new_session() as session:
            return await open_loop(session, Target(base_url=url, model="fake"), [ITEM] * 4, [0.0, 0.01, 0.02, 0.02])

    run = asyncio.run(main())
    assert [round(record.due, 9) for record in run.records] == [0.0, 0.01, 0.02, 0.02]
    assert all(record.sent >= record.due for record in run.records)


def test_closed_loop_keeps_its_number() -> None:
    """Never more than asked for under way, and as many as asked for at some time."""
    under_way, most = [0], [0]

    async def counted(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        await asyncio.sleep(0.01)
        under_way[0] -= 1
        return await well(request, body)

    async def main() -> Run:
        async with serving(counted) as url, new_session() as session:
            return await closed_loop(session, Target(base_url=url, model="fake"), [ITEM] * 12, 3)

    run = asyncio.run(main())
    assert most == [3] and len(run.records) == 12 and not run.is_open_loop and not run.unsent


@pytest.mark.parametrize("kind", ["open", "closed"])
def test_an_interrupt_keeps_what_was_measured(kind: str) -> None:
    """Ctrl-C in the middle: what ended is reported, what did not is counted, nothing is left running."""
    answered: list[asyncio.Task[Any]] = []

    async def half(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(answered) < 2:
            return await well(request, body)
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> tuple[Run, int]:
        async with serving(half) as url, new_session() as session:
            target, task = Target(base_url=url, model="fake"), asyncio.current_task()
            assert task is not None

            def ended(record: Record) -> None:
                answered.append(task)
                if len(answered) == 2:
                    asyncio.get_running_loop().call_later(0.05, task.cancel)

            if kind == "open":
                run = await open_loop(session, target, [ITEM] * 6, [0.01 * n for n in range(6)], ended)
            else:
                run = await closed_loop(session, target, [ITEM] * 6, 1, ended)
            ours = ("ask", "closed_loop.<locals>.worker")
            assert not [left for left in asyncio.all_tasks() if getattr(left.get_coro(), "__qualname__", "") in ours]
            return run, task.cancelling()

    run, cancelling = asyncio.run(main())
    assert len(run.records) == 2 and run.unsent == 4 and cancelling == 0


def test_bodies() -> None:
    """What is asked of either endpoint; an item's own fields win; what cannot be said is an error."""
    chat = Target(base_url="http://x/v1/", model="m", body={"temperature": 0, "seed": 1})
    text = Target(base_url="http://x/v1", model="m", endpoint="completions")
    assert chat.url == "http://x/v1/chat/completions" and text.url == "http://x/v1/completions"
    assert body_of(Item(prompt="hi", max_tokens=3, extra={"seed": 2}), chat) == {
        "model": "m",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "seed": 2,
    }
    assert body_of(Item(prompt_ids=[1, 2], stream=False), text) == {"model": "m", "max_tokens": 128, "prompt": [1, 2]}
    with pytest.raises(ConfigError, match="completions"):
        body_of(Item(prompt_ids=[1]), chat)
    with pytest.raises(ConfigError, match="chat"):
        body_of(Item(messages=[{"role": "user", "content": "hi"}]), text)


def test_usage_may_be_missing() -> None:
    async def silent(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, chunk("a"), b"data: [DONE]\n\n")

    record = ask_one(silent)
    assert record.is_whole and record.output_tokens is None
    assert usage_of(1, 2)["completion_tokens"] == 2
