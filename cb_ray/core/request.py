"""One request inside the engine: its tokens and three counters. Owns `Request` and `RequestLimits`; knows no block pool.

    tokens          │ prompt ……………………… │ generated …… │            known: len(tokens)
    num_computed    │ KV computed or planned ▲                    grows when a step is planned
    num_in_flight                          │ ? │                 sampled, value not yet on the host

Law L3: num_computed ≤ known + in flight ≤ prompt + max_new. The phase (waiting, prefilling, decoding) follows from the
counters and from whether the request has a seat; it is never stored.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..digests import next_digest, root_digest
from ..errors import InvalidRequestError
from ..messages import FinishReason, GenerateRequest, RequestStatus, SamplingParams, TokenChunk, TopLogprobs, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What any request must keep to, known before the engine starts. Pure: any thread may ask."""

    vocab_size: int
    max_length: int  # prompt and output, in tokens: the model's positions
    max_cached_tokens: int  # that one request alone can hold in the cache
    page_size: int = 1
    long_from: int = 0  # requests of more tokens than this use the model's long-context rotary factors; 0: there are none

    def check(self, request: GenerateRequest) -> None:
        """Raises InvalidRequestError when the request can never be served, naming the parameter."""
        length = len(request.token_ids)
        if not length:
            raise InvalidRequestError("the prompt is empty; it needs at least one token", param="input_ids")
        self.check_token_ids(request.token_ids)
        if length >= self.max_length:
            raise InvalidRequestError(
                f"the prompt has {length} tokens and the model's context is {self.max_length} tokens, of which at least one is "
                "for the answer; shorten the prompt",
                param="input_ids",
                code="context_length_exceeded",
            )
        if length > self.max_cached_tokens:
            raise InvalidRequestError(
                f"the prompt has {length} tokens and the KV cache holds {self.max_cached_tokens}; shorten the prompt or make "
                "num_blocks larger",
                param="input_ids",
                code="context_length_exceeded",
            )
        self._check_ids("stop_token_ids", request.sampling.stop_token_ids)
        self._check_ids("allowed_token_ids", request.sampling.allowed_token_ids)
        self._check_ids("logit_bias", tuple(token for token, _ in request.sampling.logit_bias))

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequestError for an id outside the vocabulary."""
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequestError(f"token ids must lie between 0 and {self.vocab_size - 1}, got {bad}", param="input_ids")

    def _check_ids(self, name: str, ids: tuple[int, ...]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequestError(f"{name} must lie between 0 and {self.vocab_size - 1}, got {token}", param=name)

    def is_long(self, tokens: int) -> bool:
        """Whether a request of that many tokens is computed with the long-context factors, and so shares no page with short ones."""
        return 0 < self.long_from < tokens

    def max_new_tokens(self, request: GenerateRequest) -> int:
        """How many tokens the request may generate: its wish, cut to the model's context and the cache.

        The last token of a request is never fed back, so it needs no place in the cache.
        """
        length = len(request.token_ids)
        if request.sampling.embed:
            return 1  # a place in the plan, no token
        room = min(self.max_length - length, self.max_cached_tokens - length + 1)
        return room if request.max_new_tokens is None else max(0, min(request.max_new_tokens, room))


def derived_seed(seed: int, label: str) -> int:
    """A 63-bit seed for `label` (a request id, a child's number) under an engine's or a request's seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{label}".encode(), digest_size=8).digest()) >> 1


class Request:
    """The engine's record of one request. Touched by the engine thread only."""

    __slots__ = (
        "arrival",
        "block_tables",
        "created_time",
        "digests",
        "embedding",
        "end_reason",
        "ended_time",
        "error",
        "first_block",
        "fork_of",
        "id",
        "logprobs",
        "max_new",
        "named_pages",
        "num_cached",
        "num_computed",
        "num_emitted",
        "num_in_flight",
        "num_preemptions",
        "num_prompt",
        "num_versions_told",
        "owed",
        "parked",
        "prompt_logprobs",
        "prompt_top_logprobs",
        "salt",
        "sampling",
        "seated",
        "seed",
        "slot",
        "source",
        "started_time",
        "status",
        "stop_ids",
        "stop_token",
        "timestamps",
        "tokens",
        "top_logprobs",
        "versions",
        "weights_version",
    )

    def __init__(self, source: GenerateRequest, *, max_new: int, seed: int, arrival: int, now: float, num_groups: int) -> None:
        self.source = source
        self.id = source.request_id
        self.sampling: SamplingParams = source.sampling
        self.stop_ids = source.sampling.stop_ids
        self.tokens: array[int] = array("i", source.token_ids)
        self.num_prompt = len(source.token_ids)
        self.max_new = max_new
        self.seed = seed
        self.arrival = arrival
        self.fork_of = source.fork_of
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_emitted = 0  # generated tokens already handed out in chunks
        self.num_preemptions = 0
        self.num_cached = -1  # prompt tokens found in the cache at first admission; -1: not admitted yet
        self.seated = False
        self.slot = -1  # sampling row of the last step that computes the token in flight
        self.block_tables: tuple[array[int], ...] = tuple(array("i") for _ in range(num_groups))
        self.first_block = [0] * num_groups  # per group: table entries left of it have been given back
        self.named_pages = 0  # leading pages already published
        self.parked: tuple[tuple[int, array[int]], ...] | None = None  # per group: first page and host blocks
        self.salt = source.cache_salt
        self.digests: list[bytes] = list(source.digests)
        self.weights_version = 0
        self.versions: list[int] = []
        self.num_versions_told = 0
        self.status = RequestStatus.PENDING
        self.created_time, self.started_time, self.ended_time = now, -1.0, -1.0
        self.end_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.error: Exception | None = None
        self.timestamps: list[float] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.prompt_logprobs: list[float | None] | None = None
        self.prompt_top_logprobs: list[TopLogprobs] | None = None
        self.embedding: tuple[float, ...] | None = None
        self.owed = 0

    # ---- counters -----------------------------------------------------------------------------------------------------------

    @property
    def num_known(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens that exist, or will when the step in flight is done, and whose KV is not planned yet; 0 when nothing more is
        due.
        """
        if len(self.tokens) + self.num_in_flight - self.num_prompt >= self.max_new:
            return 0
        return len(self.tokens) + self.num_in_flight - self.num_computed

    @property
    def remaining(self) -> int:
        """Tokens still to compute if the request runs to its limit."""
        return self.num_prompt + self.max_new - self.num_computed

    @property
    def ended(self) -> bool:
        return self.status >= RequestStatus.FINISHED

    def become_long(self) -> None:
        """From here on all its tokens are computed another way: its pages have other names than those of short requests."""
        self.salt = f"{self.source.cache_salt} long"
        self.digests = []

    def page_digest(self, page: int, page_size: int) -> bytes:
        """Digest of full page `page`, whose tokens are known; computed once."""
        digests = self.digests
        while len(digests) <= page:
            start = len(digests) * page_size
            parent = digests[-1] if digests else root_digest(self.salt)
            digests.append(next_digest(parent, self.tokens[start : start + page_size]))
        return digests[page]

    def page_names(self, first: int, last: int, page_size: int) -> Iterable[tuple[int, bytes]]:
        """Under what pages `first` … `last` - 1 are found again: (weights version, digest). Digests are computed in their turn."""
        version, digests = self.weights_version, self.digests
        if last <= len(digests):
            return [(version, digest) for digest in digests[first:last]]
        return ((version, self.page_digest(page, page_size)) for page in range(first, last))

    # ---- what leaves the engine -----------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=self.num_prompt,
            num_generated_tokens=self.num_generated,
            num_cached_tokens=max(0, self.num_cached),
            num_preemptions=self.num_preemptions,
            created_time=self.created_time,
            started_time=self.started_time,
            ended_time=self.ended_time,
            weights_versions=tuple(self.versions),
        )

    def chunk(self) -> TokenChunk:
        """What was generated since the last chunk."""
        start, first = self.num_emitted, self.num_emitted == 0
        self.num_emitted = self.num_generated
        extras: dict[str, Any] = {}
        if self.sampling.logprobs is not None:
            extras["logprobs"] = tuple(self.logprobs[start:])
            if self.sampling.logprobs:
                extras["top_logprobs"] = tuple(self.top_logprobs[start:])
        if self.source.record_timestamps:
            extras["timestamps"] = tuple(self.timestamps[start:])
        if first and self.prompt_logprobs is not None:
            extras["prompt_logprobs"] = tuple(self.prompt_logprobs)
            if self.prompt_top_logprobs is not None:
                extras["prompt_top_logprobs"] = tuple(self.prompt_top_logprobs)
        if first or self.ended or len(self.versions) > self.num_versions_told:
            extras["usage"] = self.usage()  # whoever reads a stream that breaks off knows what made it
            self.num_versions_told = len(self.versions)
        if self.ended:
            extras.update(
                embedding=self.embedding,
                finish_reason=self.end_reason,
                stop_token=self.stop_token,
                error=self.error,
            )
        return TokenChunk(
            request_id=self.id, token_ids=tuple(self.tokens[self.num_prompt + start :]), status=self.status, **extras
        )
