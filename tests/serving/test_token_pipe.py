"""The token pipe: chunks arrive whole and in order, late readers get them merged, and whatever breaks is told to whom it concerns."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from cb_ray.errors import InvalidRequestError, ReplicaLostError
from cb_ray.messages import GenerateRequest, RequestStatus, TokenChunk, Usage
from cb_ray.serving import handle_source
from cb_ray.serving.handle_source import HandleSource
from cb_ray.serving.token_pipe import Channel, Outlet, PipeAddress, PipeInlet, PipeOutlets, PipeTicket

REQUEST = GenerateRequest(request_id="r", token_ids=(1, 2))


def token(number: int, request_id: str = "r") -> TokenChunk:
    return TokenChunk(request_id=request_id, token_ids=(number,))


def end(request_id: str = "r", count: int = 0) -> TokenChunk:
    usage = Usage(num_prompt_tokens=2, num_generated_tokens=count)
    return TokenChunk(request_id=request_id, status=RequestStatus.FINISHED, finish_reason="length", usage=usage)


@contextlib.asynccontextmanager
async def pipe() -> AsyncGenerator[tuple[PipeInlet, PipeOutlets]]:
    inlet, outlets = PipeInlet("127.0.0.1"), PipeOutlets()
    try:
        yield inlet, outlets
    finally:
        await outlets.aclose()
        await inlet.aclose()


async def connected(inlet: PipeInlet, outlets: PipeOutlets) -> tuple[Channel, PipeTicket, Outlet]:
    channel, ticket = await inlet.open()
    outlet = await outlets.to(ticket.address)
    assert outlet is not None
    return channel, ticket, outlet


async def read(channel: Channel) -> tuple[list[int], int]:
    """All tokens to the end, and in how many chunks they came."""
    tokens: list[int] = []
    for chunks in range(1, 10**6):
        chunk = await channel.next()
        tokens += chunk.token_ids
        if chunk.is_terminal:
            return tokens, chunks
    raise AssertionError


def run(scenario: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("seed", range(3))
def test_many_requests_share_a_connection_and_none_sees_anothers_tokens(seed: int) -> None:
    """Whatever the order in which requests speak, each reader gets its own tokens in order, and exactly one end."""

    async def scenario() -> None:
        dice = random.Random(seed)
        async with pipe() as (inlet, outlets):
            lines = [await connected(inlet, outlets) for _ in range(20)]
            assert len({id(outlet) for _, _, outlet in lines}) == 1
            readers = [asyncio.create_task(read(channel)) for channel, _, _ in lines]
            left = {number: list(range(dice.randint(0, 30))) for number in range(20)}
            said = {number: len(tokens) for number, tokens in left.items()}
            while left:
                number = dice.choice(list(left))
                _, ticket, outlet = lines[number]
                if left[number]:
                    await outlet.send(ticket.channel, token(left[number].pop(0)))
                else:
                    del left[number]
                    await outlet.send(ticket.channel, end())
                if dice.random() < 0.3:
                    await asyncio.sleep(0)
            for number, reader in enumerate(readers):
                assert (await reader)[0] == list(range(said[number]))

    run(scenario)


def test_a_step_is_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all requests of a step send goes out together: that is what the pipe is for."""
    frames: list[int] = []
    dumps = pickle.dumps

    def counted(value: Any, *rest: Any) -> bytes:
        frames.append(len(value))
        return dumps(value, *rest)

    async def scenario() -> None:
        async with pipe() as (inlet, outlets):
            lines = [await connected(inlet, outlets) for _ in range(32)]
            monkeypatch.setattr("cb_ray.serving.token_pipe.pickle.dumps", counted)
            for step in range(3):
                await asyncio.gather(*(outlet.send(ticket.channel, token(step)) for _, ticket, outlet in lines))
                for channel, _, _ in lines:
                    assert (await channel.next()).token_ids == (step,)

    run(scenario)
    assert frames == [32, 32, 32]


def test_a_late_reader_gets_its_tokens_merged() -> None:
    """Nobody waits for a slow client, and its chunks do not pile up one by one."""

    async def scenario() -> None:
        async with pipe() as (inlet, outlets):
            late, first, outlet = await connected(inlet, outlets)
            prompt, second, _ = await connected(inlet, outlets)
            for number in range(200):
                await outlet.send(first.channel, token(number))
            await outlet.send(first.channel, end(count=200))
            await outlet.send(second.channel, end())
            await read(prompt)  # by now everything before it has come
            assert await read(late) == (list(range(200)), 1)

    run(scenario)


def test_a_reader_who_left_costs_nobody_anything() -> None:
    async def scenario() -> None:
        async with pipe() as (inlet, outlets):
            gone, first, outlet = await connected(inlet, outlets)
            stays, second, _ = await connected(inlet, outlets)
            inlet.close(gone)
            await outlet.send(first.channel, token(1))
            await outlet.send(second.channel, end())
            assert await read(stays) == ([], 1)

    run(scenario)


def test_a_replica_that_dies_is_told_to_those_it_was_serving() -> None:
    """Those whose tokens were coming; not those who have all of theirs, and what came is still read."""

    async def scenario() -> None:
        async with pipe() as (inlet, outlets):
            served, first, outlet = await connected(inlet, outlets)
            whole, second, _ = await connected(inlet, outlets)
            await outlet.send(second.channel, end())
            await outlet.send(first.channel, token(1))
            assert await read(whole) == ([], 1)
            await outlets.aclose()
            assert (await served.next()).token_ids == (1,)
            with pytest.raises(ReplicaLostError):
                await served.next()

    run(scenario)


def test_an_engine_notices_that_its_router_is_gone_and_finds_the_next() -> None:
    """Sending fails then, which cancels the request; another Router is another connection."""

    async def scenario() -> None:
        async with pipe() as (inlet, outlets):
            _, ticket, outlet = await connected(inlet, outlets)
            await outlet.send(ticket.channel, token(1))
            await inlet.aclose()

            async def go_on() -> None:
                while True:
                    await outlet.send(ticket.channel, token(2))
                    await asyncio.sleep(0)

            with pytest.raises(ReplicaLostError):
                await go_on()
        async with pipe() as (inlet, _):
            channel, ticket, outlet = await connected(inlet, outlets)
            await outlet.send(ticket.channel, end())
            assert await read(channel) == ([], 1)
            await outlets.aclose()

    run(scenario)


def test_a_slow_router_holds_up_its_own_requests_alone() -> None:
    """A Router that reads nothing fills a bounded buffer; then `send` waits, and the engine merges what it makes meanwhile."""

    async def scenario() -> None:
        released, over = asyncio.Event(), asyncio.Event()

        async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await released.wait()
            while await reader.read(2**20):
                pass
            writer.close()
            await writer.wait_closed()
            over.set()

        server = await asyncio.start_server(deaf, "127.0.0.1", 0, limit=1024)
        outlets = PipeOutlets()
        address = PipeAddress("127.0.0.1", server.sockets[0].getsockname()[1], b"k" * 32)
        outlet = await outlets.to(address)
        assert outlet is not None
        big = TokenChunk(request_id="r", token_ids=tuple(range(100_000)))

        async def fill() -> None:
            for _ in range(200):
                await outlet.send(1, big)
                await asyncio.sleep(0)

        filling = asyncio.create_task(fill())
        done, _ = await asyncio.wait([filling], timeout=0.3)
        assert not done
        released.set()
        await filling
        await outlets.aclose()
        await over.wait()
        server.close()
        await server.wait_closed()

    run(scenario)


def test_who_does_not_know_the_key_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of a stranger's is unpickled."""

    async def scenario() -> None:
        async with pipe() as (inlet, _):
            _, ticket = await inlet.open()
            reader, writer = await asyncio.open_connection("127.0.0.1", ticket.address.port)
            writer.write(b"x" * 32 + b"\0\0\0\1.")
            with contextlib.suppress(ConnectionResetError):  # as a system may say that what was sent is not wanted
                assert await reader.read() == b""
            writer.close()

    run(scenario)
    assert "without its key" in caplog.text


def test_a_frame_too_large_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with pipe() as (inlet, _):
            _, ticket = await inlet.open()
            reader, writer = await asyncio.open_connection("127.0.0.1", ticket.address.port)
            writer.write(ticket.address.key + b"\xff\xff\xff\xff")
            with contextlib.suppress(ConnectionResetError):  # as a system may say that what was sent is not wanted
                assert await reader.read() == b""
            writer.close()

    run(scenario)
    assert "no frame of ours" in caplog.text


def test_a_router_that_cannot_be_reached_is_not_tried_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    """One warning and one attempt; the tokens go through Ray."""

    async def scenario() -> None:
        inlet = PipeInlet("127.0.0.1")
        _, ticket = await inlet.open()
        await inlet.aclose()
        outlets = PipeOutlets()
        assert [await outlets.to(ticket.address) for _ in range(3)] == [None] * 3

    run(scenario)
    assert caplog.text.count("tokens go through Ray") == 1


# ---- with a call beside it --------------------------------------------------------------------------------------------------


class FakeEngine:
    """A handle to an engine that sends `through` the pipe and the call what it is told, then ends its call as it is told."""

    def __init__(
        self, outlets: PipeOutlets, piped: list[TokenChunk], called: list[TokenChunk], error: BaseException | None
    ) -> None:
        self.outlets, self.piped, self.called, self.error = outlets, piped, called, error
        self.cancelled = 0

    def options(self, **_: Any) -> FakeEngine:
        return self

    @property
    def generate(self) -> FakeEngine:
        return self

    def remote(self, *, request: GenerateRequest, pipe: PipeTicket) -> FakeEngine:
        self._call = self._chunks(pipe)
        return self

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        return self._call

    def cancel(self) -> None:
        self.cancelled += 1

    async def _chunks(self, ticket: PipeTicket) -> AsyncIterator[TokenChunk]:
        outlet = await self.outlets.to(ticket.address)
        assert outlet is not None
        for chunk in self.piped:
            await outlet.send(ticket.channel, chunk)
        for chunk in self.called:
            yield chunk
        if self.error is not None:
            await asyncio.sleep(0.02)
            raise self.error


def through(piped: list[TokenChunk], called: list[TokenChunk], error: BaseException | None = None) -> tuple[list[int], int]:
    """The tokens that a HandleSource gives, and how often its call was cancelled."""

    async def scenario() -> tuple[list[int], int]:
        async with pipe() as (inlet, outlets):
            engine = FakeEngine(outlets, piped, called, error)
            source = HandleSource(engine, inlet)  # type: ignore[arg-type]
            tokens = [number async for chunk in source.generate(REQUEST) for number in chunk.token_ids]
            assert not inlet._channels
            return tokens, engine.cancelled

    return run(scenario)


def test_tokens_come_through_the_pipe_or_the_call() -> None:
    """An engine that reaches the pipe yields nothing; one that does not yields everything."""
    assert through([token(1), token(2), end()], []) == ([1, 2], 0)
    assert through([], [token(1), token(2), end()]) == ([1, 2], 0)


@pytest.mark.parametrize("error", [InvalidRequestError("no", "x"), ReplicaLostError(""), asyncio.CancelledError()])
def test_what_goes_wrong_comes_through_the_call(error: BaseException) -> None:
    """Before the first token or after some; a call that Serve takes away is a lost replica, never a reader who waits for ever."""
    want = ReplicaLostError if isinstance(error, asyncio.CancelledError) else type(error)
    for piped in ([], [token(1)]):
        with pytest.raises(want):
            through(piped, [], error)


def test_a_last_word_that_was_lost_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call has ended well, but the connection broke under the last frame."""
    monkeypatch.setattr(handle_source, "_LAST_WORD_S", 0.05)
    with pytest.raises(ReplicaLostError):
        through([token(1)], [])


def test_leaving_early_cancels_the_call_and_closes_the_channel() -> None:
    async def scenario() -> None:
        async with pipe() as (inlet, outlets):
            engine = FakeEngine(outlets, [token(1), token(2)], [], ReplicaLostError(""))
            source = HandleSource(engine, inlet)  # type: ignore[arg-type]
            stream = source.generate(REQUEST)
            async for _ in stream:
                break
            await stream.aclose()
            assert engine.cancelled == 1 and not inlet._channels
            await asyncio.gather(*source._followers, return_exceptions=True)

    run(scenario)
