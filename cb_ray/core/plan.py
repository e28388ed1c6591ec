"""What one step does and what came of it: values made of plain integers. No tensor, no behaviour.

Owns `Row`, `BlockCopy`, `BatchPlan`, `StepWork`, `StepResult`. A plan can be printed, compared, pickled and replayed; equal inputs
give equal plans (law L6).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..messages import SamplingParams, TopLogprobs

UNKNOWN_TOKEN = -1  # stands for a token that the step before is still computing


class Row(NamedTuple):
    """A stretch of one request's tokens that is computed in this step: positions start … start + len(token_ids) - 1."""

    request_id: str
    start: int
    token_ids: array[int]  # int32; the last one is UNKNOWN_TOKEN when it is carried
    tables: tuple[array[int], ...]  # per layer group: block of each page of positions 0 … start + len(token_ids) - 1
    samples: bool  # whether the last token's logits give a new token
    carry_from: int  # sampling row of the step before that holds the last token id; -1: it is known
    sampling: SamplingParams
    seed: int
    token_index: int  # how many tokens the request has generated before the one sampled here
    min_tokens_left: int  # stop ids are forbidden while this is above 0
    history: array[int] | None  # all known tokens, where sampling reads them
    num_prompt: int  # tokens that the caller gave; what was generated before a failover is not among them

    @property
    def length(self) -> int:
        return len(self.token_ids)


class BlockCopy(NamedTuple):
    """Copy one block of a group: device → device (fork), device → host (park) or host → device (unpark)."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step. Parks run first, then unparks, then copies, then the rows; all writes of a layer come before its reads."""

    step: int
    rows: tuple[Row, ...]
    copies: tuple[BlockCopy, ...] = ()
    parks: tuple[BlockCopy, ...] = ()
    unparks: tuple[BlockCopy, ...] = ()
    released: tuple[str, ...] = ()  # ids of requests that lost their seat since the plan before
    weights_version: int = 0
    num_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        """Nothing to do on the device. A plan may move blocks without computing anything."""
        return not (self.rows or self.parks)

    @property
    def is_decode(self) -> bool:
        """Every row is one token."""
        return self.num_tokens == len(self.rows)


class StepWork(NamedTuple):
    """What one step does, in counts: what its time depends on.

    A row at positions s … s + n - 1 reads s + n cached tokens; if n > 1 it has n·s + n(n + 1)/2 pairs of a query and a key.
    """

    query_tokens: int
    samples: int
    kv_tokens: int
    prefill_pairs: int

    @classmethod
    def of(cls, rows: Iterable[Row]) -> StepWork:
        query = samples = kv = pairs = 0
        for row in rows:
            length, start = len(row.token_ids), row.start
            query += length
            samples += row.samples
            kv += start + length
            if length > 1:
                pairs += length * start + length * (length + 1) // 2
        return cls(query, samples, kv, pairs)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled: one entry per sampling row, in row order (token_ids, logprobs); the rest by row index."""

    token_ids: list[int]
    logprobs: list[float] | None = None  # of the chosen tokens, when any row asked
    top_logprobs: dict[int, TopLogprobs] = field(default_factory=dict[int, TopLogprobs])
    prompt_logprobs: dict[int, tuple[list[float], list[TopLogprobs]]] = field(
        default_factory=dict[int, tuple[list[float], list[TopLogprobs]]]
    )  # row -> logprobs of tokens start + 1 … (each given all before it)
    errors: dict[int, Exception] = field(default_factory=dict[int, Exception])  # rows whose request must fail alone
    embeddings: dict[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])  # of rows that asked for one
    complete: frozenset[int] = frozenset()  # rows whose answer ends with this token, by its grammar
