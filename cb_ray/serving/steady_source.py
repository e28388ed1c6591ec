"""`SteadySource`: one stream of tokens for the client, whatever happens to the replicas that make them.

Owns failover. When a replica dies, fails or is taken away, the prompt and the tokens that came so far go to another one, which
goes on where the first stopped: same request id, same position of the seed, what is left of the budget.

    ask  prompt ───────────▶ replica 1:  a b c ✗
         prompt a b c ─────▶ replica 2:        d e f ■      client: a b c d e f ■, one usage

Knows the messages and the error tree; nothing of Ray or replicas.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Protocol

from ..errors import CbRayError, EngineFailedError, EngineStoppedError, ReplicaLostError
from ..messages import GenerateRequest, RequestStatus, TokenChunk, Usage

logger = logging.getLogger("ray.serve")

_MOVES_ON = (ReplicaLostError, EngineFailedError, EngineStoppedError)


class AttemptSource(Protocol):
    """A source that is told how often a request was tried before."""

    def generate(self, request: GenerateRequest, attempt: int = 0) -> AsyncGenerator[TokenChunk]: ...


class SteadySource:
    """Any source, made steady. A request moves at most `max_failovers` times; `moved` is called each time, to be counted."""

    def __init__(self, source: AttemptSource, max_failovers: int, moved: Callable[[], None] = lambda: None) -> None:
        self._source, self._max_failovers, self._moved = source, max_failovers, moved

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        """The chunks of one request, without repeats or gaps. Closing it early cancels the request wherever it runs.

        Raises what the source raises; ReplicaLostError, with the number of tokens that came, when the last failover failed too.
        """
        emitted: list[int] = []
        versions: tuple[int, ...] = ()  # of the weights that made them
        for attempt in range(self._max_failovers + 1):
            asked, before = resumed(request, emitted), versions
            try:
                async with contextlib.aclosing(self._source.generate(asked, attempt)) as chunks:
                    async for chunk in chunks:
                        if chunk.usage is not None:
                            versions = _joined(before, chunk.usage.weights_versions)
                        lost = _engine_error(chunk)
                        if lost is not None:
                            emitted += chunk.token_ids
                            if chunk.token_ids:
                                yield replace(chunk, error=None, status=RequestStatus.DECODING, finish_reason=None, usage=None)
                            raise lost
                        emitted += chunk.token_ids
                        yield _whole(chunk, request, len(emitted), versions)
                        if chunk.is_terminal:
                            return
                raise ReplicaLostError("", len(emitted))  # the stream ended without its last chunk
            except _MOVES_ON as error:
                if attempt == self._max_failovers:
                    raise ReplicaLostError("", len(emitted)) from error
                if _is_complete(request, emitted):
                    yield _ending(request, emitted, versions)
                    return
                logger.warning("Request %s moves on after %d tokens: %s", request.request_id, len(emitted), error)
                self._moved()


def resumed(request: GenerateRequest, emitted: list[int]) -> GenerateRequest:
    """`request` as it must be asked of another engine when `emitted` came already."""
    if not emitted:
        return request
    sampling = replace(request.sampling, min_tokens=max(0, request.sampling.min_tokens - len(emitted)), prompt_logprobs=None)
    return replace(
        request,
        token_ids=(*request.token_ids, *emitted),
        max_new_tokens=None if request.max_new_tokens is None else request.max_new_tokens - len(emitted),
        sampling=sampling,
        resumed_tokens=request.resumed_tokens + len(emitted),
        fork_of=None,
        digests=(),  # they would lack the pages that the new tokens fill
    )


def _engine_error(chunk: TokenChunk) -> CbRayError | None:
    """The error of an engine that failed under this request; None for all else, and for errors of the request itself."""
    error = chunk.error
    if error is None or (isinstance(error, CbRayError) and not isinstance(error, _MOVES_ON)):
        return None
    return error if isinstance(error, CbRayError) else EngineFailedError(f"{type(error).__name__}: {error}")


def _is_complete(request: GenerateRequest, emitted: list[int]) -> bool:
    """Whether nothing is missing but the last word: the engine died between the last token and saying so."""
    full = request.max_new_tokens is not None and len(emitted) >= request.max_new_tokens
    return full or (bool(emitted) and emitted[-1] in request.sampling.stop_ids and len(emitted) > request.sampling.min_tokens)


def _joined(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    """Versions in the order in which they made tokens; the same one on both sides of a move is one."""
    return (*before, *after[1:]) if before and after[:1] == before[-1:] else (*before, *after)


def _ending(request: GenerateRequest, emitted: list[int], versions: tuple[int, ...]) -> TokenChunk:
    stopped = emitted[-1] in request.sampling.stop_ids
    return TokenChunk(
        request_id=request.request_id,
        status=RequestStatus.FINISHED,
        finish_reason="stop" if stopped else "length",
        stop_token=emitted[-1] if stopped else None,
        usage=Usage(num_prompt_tokens=len(request.token_ids), num_generated_tokens=len(emitted), weights_versions=versions),
    )


def _whole(chunk: TokenChunk, request: GenerateRequest, num_emitted: int, versions: tuple[int, ...]) -> TokenChunk:
    """What a chunk tells of the whole request, not of its last stretch."""
    usage = chunk.usage
    if usage is None or usage.num_generated_tokens == num_emitted:
        return chunk
    length = len(request.token_ids)
    cached = min(usage.num_cached_tokens, length)
    whole = replace(
        usage,
        num_prompt_tokens=length,
        num_generated_tokens=num_emitted,
        num_cached_tokens=cached,
        weights_versions=versions,
    )
    return replace(chunk, usage=whole)
