"""Failover without Ray: whatever breaks whenever, the client reads one stream without a repeat or a gap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.errors import (
    EngineFailedError,
    EngineStoppedError,
    InvalidRequestError,
    LogitsError,
    QueueFullError,
    ReplicaLostError,
)
from cb_ray.messages import GenerateRequest, RequestStatus, SamplingParams, TokenChunk, Usage
from cb_ray.serving.steady_source import SteadySource

PROMPT = (5, 6, 7)
STOP = 999


def answer(total: int, stops: bool) -> list[int]:
    """What an unbroken engine says: token n is n + 10, the last one a stop token if it stops."""
    tokens = [n + 10 for n in range(total)]
    return [*tokens[:-1], STOP] if stops else tokens


class Brittle:
    """Engines that break as told: `breaks` says after how many tokens each attempt ends and how. The rest of an answer depends
    on the seed's position alone, as an engine's does."""

    def __init__(self, whole: list[int], breaks: list[tuple[int, str]], merge: int) -> None:
        self.whole, self.breaks, self.merge = whole, breaks, merge
        self.asked: list[GenerateRequest] = []
        self.served: list[tuple[int, ...]] = []  # versions of each attempt's tokens
        self.closed = 0

    async def generate(self, request: GenerateRequest, attempt: int = 0) -> AsyncGenerator[TokenChunk]:
        assert attempt == len(self.asked)
        self.asked.append(request)
        done = request.resumed_tokens
        assert request.token_ids == (*PROMPT, *self.whole[:done]), "the prompt, and what the client has, and nothing else"
        assert request.max_new_tokens == len(self.whole) - done > 0
        self.served.append(())
        left = self.whole[done:]
        after, how = self.breaks[attempt] if attempt < len(self.breaks) else (len(left), "ends")
        try:
            for start in range(0, min(after, len(left)), self.merge):
                part = tuple(left[start : min(start + self.merge, after)])
                last = how == "ends" and start + len(part) == len(left)
                yield self.chunk(request, part, start + len(part), last)
            if how == "raises":
                raise ReplicaLostError("r1", after)
            if how == "stops":
                raise EngineStoppedError("stopping")
            if how == "fails":
                error = RuntimeError("CUDA error")
                yield TokenChunk(request_id="q", status=RequestStatus.FAILED, finish_reason="failed", error=error)
        finally:
            self.closed += 1

    def chunk(self, request: GenerateRequest, part: tuple[int, ...], count: int, last: bool) -> TokenChunk:
        attempt = len(self.asked)
        usage = Usage(
            num_prompt_tokens=len(request.token_ids),
            num_generated_tokens=count,
            num_cached_tokens=3,
            weights_versions=(attempt // 2,) if count == len(part) else (attempt // 2, 7),  # each attempt ends under version 7
        )
        self.served[-1:] = [usage.weights_versions]
        if not last:
            return TokenChunk(request_id="q", token_ids=part, usage=usage)
        reason = "stop" if part[-1] == STOP else "length"
        return TokenChunk(request_id="q", token_ids=part, status=RequestStatus.FINISHED, finish_reason=reason, usage=usage)


def ask(total: int) -> GenerateRequest:
    return GenerateRequest(
        request_id="q", token_ids=PROMPT, max_new_tokens=total, sampling=SamplingParams(seed=3, stop_token_ids=(STOP,))
    )


async def read(source: SteadySource, request: GenerateRequest) -> tuple[list[int], list[TokenChunk]]:
    chunks = [chunk async for chunk in source.generate(request)]
    return [token for chunk in chunks for token in chunk.token_ids], chunks


breaks = st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["raises", "stops", "fails", "silent"])), max_size=3)


@given(total=st.integers(1, 12), stops=st.booleans(), story=breaks, merge=st.integers(1, 4))
def test_the_client_reads_one_stream(total, stops, story, merge):
    """Up to three breaks of any kind at any token: the same tokens, exactly one end, and usage of the whole request."""
    whole = answer(total, stops)
    brittle, moves = Brittle(whole, story, merge), []
    tokens, chunks = asyncio.run(read(SteadySource(brittle, 3, lambda: moves.append(1)), ask(total)))
    assert tokens == whole
    assert [chunk.is_terminal for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    last = chunks[-1]
    assert last.usage is not None and (last.usage.num_prompt_tokens, last.usage.num_generated_tokens) == (len(PROMPT), total)
    assert last.finish_reason == ("stop" if stops else "length")
    wanted = [version for name in brittle.served for version in name]
    assert list(last.usage.weights_versions) == [v for n, v in enumerate(wanted) if n == 0 or v != wanted[n - 1]]
    assert brittle.closed == len(brittle.asked) == len(moves) + 1


def test_after_the_last_failover_the_client_is_told_how_far_it_came():
    """Four replicas lost under one request: an error that says 503 and how many tokens there were."""
    brittle = Brittle(answer(9, False), [(2, "raises")] * 4, 1)

    async def story() -> None:
        got: list[int] = []

        async def take_all() -> None:
            async for chunk in SteadySource(brittle, 3).generate(ask(9)):
                got.extend(chunk.token_ids)

        with pytest.raises(ReplicaLostError) as lost:
            await take_all()
        assert lost.value.tokens_so_far == len(got) == 8 and lost.value.http_status == 503

    asyncio.run(story())


@pytest.mark.parametrize("error", [InvalidRequestError("no", param="top_p"), QueueFullError(3, 3), LogitsError()])
@pytest.mark.parametrize("raised", [True, False])
def test_errors_of_the_request_itself_do_not_move_it(error, raised):
    """A bad request is bad everywhere, a refusal is an answer, and NaN is computed anywhere: none is tried on all replicas in turn."""

    class Refusing:
        tries = 0

        async def generate(self, request: GenerateRequest, attempt: int = 0) -> AsyncGenerator[TokenChunk]:
            self.tries += 1
            if raised:
                raise error
            yield TokenChunk(request_id="q", status=RequestStatus.FAILED, finish_reason="failed", error=error)

    source = Refusing()

    async def story() -> None:
        if raised:
            with pytest.raises(type(error)):
                await read(SteadySource(source, 3), ask(4))
        else:
            _, chunks = await read(SteadySource(source, 3), ask(4))
            assert chunks[-1].error is error

    asyncio.run(story())
    assert source.tries == 1


def test_leaving_early_closes_the_stream_behind():
    """A client that goes away cancels the request where it runs now."""
    brittle = Brittle(answer(9, False), [(2, "raises")], 1)

    async def story() -> None:
        stream = SteadySource(brittle, 3).generate(ask(9))
        for _ in range(4):
            await anext(stream)
        await stream.aclose()
        assert brittle.closed == 2

    asyncio.run(story())


def test_an_engine_error_that_says_so_moves_on_too():
    """Errors of engines arrive as themselves or as the bare exception of a step; both mean another replica."""

    class Once:
        async def generate(self, request: GenerateRequest, attempt: int = 0) -> AsyncGenerator[TokenChunk]:
            failed = RequestStatus.FAILED
            if attempt == 0:
                error = EngineFailedError("step failed")
                yield TokenChunk(request_id="q", token_ids=(10,), status=failed, finish_reason="failed", error=error)
            else:
                assert request.resumed_tokens == 1
                usage = Usage(num_prompt_tokens=4, num_generated_tokens=1)
                done = RequestStatus.FINISHED
                yield TokenChunk(request_id="q", token_ids=(11,), status=done, finish_reason="length", usage=usage)

    tokens, _ = asyncio.run(read(SteadySource(Once(), 3), ask(2)))
    assert tokens == [10, 11]
