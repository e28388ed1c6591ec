"""From what a dialect wants to text that comes: the part of the door that all dialects share.

Owns `Choice` (one sequence to generate), the reading of one or many of them at once, and what is counted on the way. Knows the
messages and the text floor; no JSON, no sockets, no Ray: tokens come from any `TokenSource`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

from ..errors import ReplicaLostError, RequestCancelledError
from ..messages import GenerateRequest, RequestStatus, TokenChunk, TopLogprobs, Usage
from ..text.detokenizer import TextDelta, TokenInfo
from .metrics import Metrics

T = TypeVar("T")


class TokenSource(Protocol):
    """Whatever makes tokens: an engine in this process, a handle to a pool of them, a fake in a test."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """The chunks of one request. Closing the iterator early cancels the request."""
        ...


class ChunkReader(Protocol):
    """What makes deltas of chunks: `TextStream`, or the reader of a dialect without text."""

    num_tokens: int
    usage: Usage | None
    prompt_logprobs: tuple[float | None, ...] | None
    prompt_top_logprobs: tuple[TopLogprobs, ...] | None

    def feed(self, chunk: TokenChunk) -> TextDelta: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One sequence of a request: what is asked of the engine, and how its tokens become text. `prompt`: number of its prompt."""

    index: int
    prompt: int = 0
    request: GenerateRequest
    text: ChunkReader


@dataclass(slots=True, kw_only=True)
class Written:
    """All that one choice said, for answers that are sent whole."""

    text: str = ""
    tokens: list[TokenInfo] = field(default_factory=list[TokenInfo])
    finish_reason: str | None = None
    stop: str | int | None = None  # the stop string or stop token that ended it


async def deltas(source: TokenSource, choices: Sequence[Choice], metrics: Metrics) -> AsyncGenerator[tuple[Choice, TextDelta]]:
    """The text of all choices as it comes; a choice's last delta has a finish_reason. The first failure ends all of them.

    Closing it early cancels whatever still runs. Nothing is buffered ahead of a slow reader but one delta per choice.
    """
    if len(choices) == 1:
        async with contextlib.aclosing(_one(source, choices[0], metrics)) as stream:
            async for delta in stream:
                yield choices[0], delta
        return
    ready: asyncio.Queue[tuple[Choice, TextDelta] | Exception] = asyncio.Queue(maxsize=len(choices))
    readers = [asyncio.create_task(_read(source, choice, metrics, ready)) for choice in choices]
    try:
        unfinished = len(choices)
        while unfinished:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            unfinished -= item[1].finish_reason is not None
            yield item
    finally:
        await cancel_and_wait(readers)


async def collect(source: TokenSource, choices: Sequence[Choice], metrics: Metrics) -> list[Written]:
    """What every choice wrote, in the order of `choices`."""
    written = {choice.index: Written() for choice in choices}
    async with contextlib.aclosing(deltas(source, choices, metrics)) as stream:
        async for choice, delta in stream:
            answer = written[choice.index]
            answer.text += delta.text
            answer.tokens += delta.tokens
            answer.finish_reason, answer.stop = delta.finish_reason, delta.stop
    return [written[choice.index] for choice in choices]


async def cancel_and_wait(tasks: Sequence[asyncio.Task[T]]) -> None:
    """Cancel tasks and wait until they have cleaned up; what they raise on the way out is not news."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def close_source(chunks: AsyncIterator[TokenChunk]) -> None:
    """Close an iterator that may not be a generator."""
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()


async def _read(
    source: TokenSource, choice: Choice, metrics: Metrics, ready: asyncio.Queue[tuple[Choice, TextDelta] | Exception]
) -> None:
    try:
        async with contextlib.aclosing(_one(source, choice, metrics)) as stream:
            async for delta in stream:
                await ready.put((choice, delta))
    except Exception as error:
        await ready.put(error)


async def _one(source: TokenSource, choice: Choice, metrics: Metrics) -> AsyncGenerator[TextDelta]:
    """The text of one choice. Its request is cancelled in the engine when this is closed, and when a stop string ends it."""
    chunks = source.generate(choice.request)
    with _Count(metrics, choice) as count:
        try:
            async for chunk in chunks:
                if chunk.error is not None:
                    raise chunk.error
                if chunk.status is RequestStatus.CANCELLED:
                    raise RequestCancelledError(choice.request.request_id)
                count.chunk(len(chunk.token_ids))
                delta = choice.text.feed(chunk)
                count.reason = delta.finish_reason
                if delta.text or delta.tokens or delta.finish_reason:
                    yield delta
                if delta.finish_reason:
                    return
        finally:
            await close_source(chunks)
    raise ReplicaLostError("", choice.text.num_tokens)


class _Count:
    """One request in the metrics: waiting until its first chunk, running from then on, gone and added up when the block ends."""

    def __init__(self, metrics: Metrics, choice: Choice) -> None:
        self._metrics, self._choice = metrics, choice
        self._began = self._last = time.monotonic()
        self._first: float | None = None
        self._waits = self._streams = choice.request.stream  # a request that answers whole tells nothing until its end
        self.reason: str | None = None

    def __enter__(self) -> Self:
        self._metrics.waiting += self._waits
        self._metrics.running += not self._waits
        return self

    def chunk(self, num_tokens: int) -> None:
        """A chunk has come."""
        now = time.monotonic()
        if self._waits:
            self._waits = False
            self._metrics.waiting -= 1
            self._metrics.running += 1
            self._metrics.first_token(now - self._began)
            self._first = now
        elif self._streams and num_tokens:
            self._metrics.delivery(now - self._last, num_tokens)
        self._last = now

    def __exit__(self, *exc: object) -> None:
        metrics, text = self._metrics, self._choice.text
        metrics.waiting -= self._waits
        metrics.running -= not self._waits
        metrics.ended(
            seconds=time.monotonic() - self._began,
            prompt_tokens=len(self._choice.request.token_ids),
            generated_tokens=text.num_tokens,
            cached_tokens=text.usage.num_cached_tokens if text.usage else 0,
            preemptions=text.usage.num_preemptions if text.usage else 0,
            queue_s=text.usage.queue_time if text.usage else None,
            since_first_s=None if self._first is None else self._last - self._first,
            reason=self.reason,
        )
