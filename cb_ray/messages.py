"""The values that cross threads and processes: what is asked of an engine and what it answers.

Owns `SamplingParams`, `GenerateRequest`, `TokenChunk`, `Usage`, `GenerationOutput`, `RequestStatus`, `EngineStats`. They are
plain data: picklable, without text, tensors, locks or clocks. May know only the errors and the grammars beside it.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from .errors import InvalidRequestError
from .grammar import Grammar

FinishReason = Literal["stop", "length", "cancelled", "failed"]


class RequestStatus(enum.IntEnum):
    """Where a request stands. The first five have transformers' names and values."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4
    CANCELLED = 5

    @property
    def is_terminal(self) -> bool:
        return self >= RequestStatus.FINISHED


def _check(holds: bool, name: str, found: object, wanted: str) -> None:
    if not holds:
        raise InvalidRequestError(f"{name} must be {wanted}, got {found!r}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Every field has a neutral default; `temperature=0` means greedy.

    Order of application (as transformers' factory has it): grammar, logit_bias, repetition, presence and frequency penalties, bad
    words, min_tokens, allowed ids, then temperature, top_k, top_p, min_p.
    """

    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    logprobs: int | None = None  # None: none; 0: of the chosen token; n: of the n best as well
    prompt_logprobs: int | None = None
    full_history: bool = False  # processors beyond these fields read all tokens of the request
    grammar: Grammar | None = None  # what the answer must look like
    embed: bool = False  # no tokens: the last hidden state of the prompt, at length 1

    def __post_init__(self) -> None:
        """Raises InvalidRequestError (a ValueError) naming the parameter."""
        _check_number("temperature", self.temperature, 0.0, math.inf)
        _check(type(self.top_k) is int and self.top_k >= -1, "top_k", self.top_k, "a whole number, 0 (off) or more")
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check(self.top_p > 0.0, "top_p", self.top_p, "above 0 and at most 1")
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        _check(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0")
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        _check(self.min_tokens_to_keep >= 1, "min_tokens_to_keep", self.min_tokens_to_keep, "1 or more")
        for name in ("bad_words", "stop_sequences"):
            _check(all(map(len, getattr(self, name))), name, getattr(self, name), "sequences of one token id or more")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or 0 <= value <= 20, name, value, "between 0 and 20")
        _check(self.seed is None or type(self.seed) is int, "seed", self.seed, "a whole number")
        _check(self.grammar is None or isinstance(cast(Any, self.grammar), Grammar), "grammar", self.grammar, "a Grammar")

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0.0 or self.top_k == 1

    @property
    def reads_history(self) -> bool:
        """Whether choosing a token needs the tokens before it, so that it must wait until they are known on the host."""
        return self.weighs_history or self.grammar is not None

    @property
    def weighs_history(self) -> bool:
        """Whether scores are changed by the tokens before, one by one."""
        return bool(
            self.full_history
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.bad_words
        )

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end the request: its own stop ids and, unless ignored, the end-of-sequence ids."""
        return frozenset(self.stop_token_ids if self.ignore_eos else (*self.eos_token_ids, *self.stop_token_ids))


def _check_number(name: str, value: float, low: float, high: float) -> None:
    wanted = f"a number of at least {low:g}" if high == math.inf else f"a number between {low:g} and {high:g}"
    _check(type(value) in (int, float), name, value, wanted)
    _check(math.isfinite(value) and low <= value <= high, name, value, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate, in tokens. Crosses processes; validated against the model by the engine that receives it."""

    request_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int | None = None  # None: as many as the model and the cache allow
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = True  # False: one chunk at the end is enough
    priority: int = 0  # lower is served earlier, by the priority scheduler
    cache_salt: str = ""  # requests share cached pages only under one salt
    record_timestamps: bool = False
    fork_of: str | None = None  # id of a request with the same prompt whose pages this one may take over
    resumed_tokens: int = 0  # how many of the last `token_ids` were generated before (failover); seeds and limits count on
    digests: tuple[bytes, ...] = ()  # of the prompt's full pages, if the sender has them (digests.page_digests)
    timeout_s: float | None = None
    session: str = ""  # requests of one session prefer one replica while nothing speaks for another
    traceparent: str = ""  # the span that asks, as W3C writes it; "": nobody traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one request cost. Times are seconds of the engine's monotonic clock."""

    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    created_time: float = 0.0
    started_time: float = -1.0  # first time in a step; -1: never
    ended_time: float = -1.0
    weights_versions: tuple[int, ...] = ()

    @property
    def queue_time(self) -> float:
        """Seconds between arrival and the first step."""
        return max(0.0, self.started_time - self.created_time) if self.started_time >= 0 else 0.0


TopLogprobs = tuple[tuple[int, float], ...]  # (token id, logprob), best first


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of one request. The chunks of a request add up to its whole output; exactly one is terminal."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # one per token when asked for
    top_logprobs: tuple[TopLogprobs, ...] = ()  # one per token when asked for
    timestamps: tuple[float, ...] = ()  # one per token when record_timestamps
    prompt_logprobs: tuple[float | None, ...] | None = None  # one per prompt token (None for the first); on the first chunk
    prompt_top_logprobs: tuple[TopLogprobs, ...] | None = None
    embedding: tuple[float, ...] | None = None  # where it was asked for, on the only chunk
    status: RequestStatus = RequestStatus.DECODING
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the token id that ended it, when one did
    error: Exception | None = None
    usage: Usage | None = None  # as it is then: on the first chunk, on one that other weights made, and on the terminal one

    @property
    def is_terminal(self) -> bool:
        return self.status.is_terminal


def merge_chunks(chunks: Sequence[TokenChunk]) -> TokenChunk:
    """One chunk that says what `chunks` of one request say together, in order. Needs at least one."""
    if len(chunks) == 1:
        return chunks[0]
    first, last = chunks[0], chunks[-1]
    return TokenChunk(
        request_id=first.request_id,
        token_ids=tuple(t for c in chunks for t in c.token_ids),
        logprobs=tuple(p for c in chunks for p in c.logprobs),
        top_logprobs=tuple(p for c in chunks for p in c.top_logprobs),
        timestamps=tuple(t for c in chunks for t in c.timestamps),
        prompt_logprobs=first.prompt_logprobs,
        prompt_top_logprobs=first.prompt_top_logprobs,
        embedding=last.embedding,
        status=last.status,
        finish_reason=last.finish_reason,
        stop_token=last.stop_token,
        error=last.error,
        usage=next((c.usage for c in reversed(chunks) if c.usage is not None), None),
    )


@dataclass
class GenerationOutput:
    """All that is known of one request so far: the fields of transformers' class of this name, then ours."""

    request_id: str
    prompt_ids: list[int] = field(default_factory=list[int])
    generated_tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    error: str | None = None
    status: RequestStatus = RequestStatus.PENDING
    created_time: float = field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1, -1)
    timestamps: list[float] | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    queue_time: float = 0.0
    num_preemptions: int = 0
    weights_versions: tuple[int, ...] = ()
    top_logprobs: list[TopLogprobs] | None = None
    prompt_logprobs: list[float | None] | None = None
    embedding: tuple[float, ...] | None = None

    def is_finished(self) -> bool:
        """Whether nothing more will come: FINISHED, FAILED or CANCELLED."""
        return self.status.is_terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of one engine, taken between two steps. Counts are of requests, tokens and blocks; totals only rise."""

    num_running: int = 0
    num_waiting: int = 0
    num_unseated: int = 0  # of those who wait, the ones that the last step was planned without
    owed_tokens: int = 0  # tokens still to compute for all known requests, with max_new_tokens as the bound
    blocks_total: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0  # of prompts and answers, again where a request was sent back
    busy_s: float = 0.0  # within steps
    weights_version: int = 0

    @property
    def cache_used(self) -> float:
        """Share of all blocks that requests hold, between 0 and 1."""
        return self.blocks_held / self.blocks_total if self.blocks_total else 0.0


def as_token_ids(value: Any, vocab_size: int | None = None) -> tuple[int, ...]:
    """A tuple of plain ints from any sequence of integers (list, tuple, array, 1-D tensor).

    Raises InvalidRequestError for an empty prompt, for what is no integer, and for ids outside [0, vocab_size).
    """
    if isinstance(value, (str, bytes)):
        raise InvalidRequestError("input_ids must be token ids, got text; tokenize it first", param="input_ids")
    if hasattr(value, "tolist"):
        value = value.tolist()
    try:
        items: list[Any] = list(value)
    except TypeError as error:
        raise InvalidRequestError(f"input_ids must be a sequence of token ids, got {value!r}", param="input_ids") from error
    ids: list[int] = []
    for item in items:
        if hasattr(item, "item"):
            item = item.item()
        if not isinstance(item, int) or isinstance(item, bool):
            raise InvalidRequestError(
                f"token ids must be integers, got {item!r} of type {type(item).__name__}", param="input_ids"
            )
        ids.append(item)
    if not ids:
        raise InvalidRequestError("the prompt is empty; it needs at least one token", param="input_ids")
    low, high = min(ids), max(ids)
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        bad = low if low < 0 else high
        limit = f"{vocab_size - 1}" if vocab_size is not None else "the vocabulary's last id"
        raise InvalidRequestError(f"token ids must lie between 0 and {limit}, got {bad}", param="input_ids")
    return tuple(ids)
