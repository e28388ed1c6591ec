"""One replica as the pool knows it: what it was granted, what it owes, and what it says it is doing.

Owns `Member` (facts), `Beat` and `BeatReply` (what an engine and the pool tell each other), `Lease`, `Replica` (the book kept on
one). May know nothing but the values beside it.

    granted ──▶ lease, unconfirmed ──beat lists it──▶ confirmed ──beat lists it no longer──▶ over
                   └── nobody confirms it in time ──▶ over
    a beat lists a request without a lease ──▶ stray: it takes a slot all the same; if nobody claims it, it is abandoned
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..messages import EngineStats
from .loads import Ask, Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A replica that may be granted requests. `slots`: requests at once; `cache_tokens`: what its KV cache holds, `step_tokens`:
    what one step computes; None: not known."""

    replica: str
    slots: int
    cache_tokens: int | None = None
    step_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What an engine says of itself: a few times a second while it works, and now and then when idle."""

    replica: str
    number: int  # rises with every beat of this replica
    live: tuple[tuple[str, int], ...] = ()  # (request id, tokens emitted so far) of every request in the engine
    ended: tuple[str, ...] = ()  # request ids that left the engine since the last beat, for whatever reason
    num_finished: int = 0  # of `ended`, by themselves …
    finished_tokens: int = 0  # … with so many tokens together
    num_waiting: int = 0  # of `live`, those for whom the last step had no memory or room
    free_tokens: int | None = None  # prompt tokens the cache could still take
    cache_used: float = 0.0
    cached_tokens: int = 0  # of prompts, found in the cache since the last beat
    prefill_tokens: int = 0  # computed since the last beat …
    decode_tokens: int = 0
    num_steps: int = 0
    busy_s: float = 0.0  # … in so many seconds of work
    weights_version: int = 0
    full: bool = False  # `added` is the whole cache, not a change
    added: tuple[bytes, ...] = ()  # digests of pages that are cached now
    evicted: tuple[bytes, ...] = ()
    engine: EngineStats | None = None  # all that the engine counts, for whoever looks at the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatReply:
    """What the pool answers. An engine cancels `abandoned` and sends its whole cache next when `want_full`."""

    known: bool  # the replica is a member
    want_full: bool = False
    abandoned: tuple[str, ...] = ()
    owed_s: float = 0.0  # seconds this replica owes, in full batches
    line_s: float = 0.0  # seconds of work in the waiting line, all together, in full batches of this replica
    num_waiting: int = 0  # in the line
    expected_tokens: float = 0.0  # length of an answer here


@dataclass(slots=True, kw_only=True)
class Lease:
    """A request granted to a replica. `prefill` and `decode` are the tokens it is expected to owe still."""

    ask: Ask
    replica: str
    granted_at: float
    prefill: int
    decode: int
    as_of: float  # when `prefill` and `decode` were true
    confirmed: bool = False
    inside: bool = False  # granted although it may have to wait in the engine, and not begun so far


@dataclass(slots=True, kw_only=True)
class Replica:
    """The book kept on one replica. Sums are kept in step with the leases, so that a price costs nothing to read."""

    member: Member
    leases: dict[str, Lease] = field(default_factory=dict[str, Lease])  # by ticket
    strays: dict[str, float] = field(default_factory=dict[str, float])  # request id in the engine without a lease → since when
    abandoned: set[str] = field(default_factory=set[str])
    owed_prefill: int = 0
    owed_decode: int = 0
    unconfirmed_tokens: int = 0  # prefill granted since the engine last reported
    free_tokens: int | None = None
    stalled: int = 0  # requests that its last step was planned without
    inside: int = 0  # leases that were granted to wait inside the engine
    cache_used: float = 0.0
    blocked_until: float = 0.0  # it refused a grant a moment ago
    accepting: bool = True
    beat_number: int = -1
    heard_at: float = 0.0
    weights_version: int = 0
    has_index: bool = False
    engine: EngineStats | None = None  # as it last said

    @property
    def is_heard(self) -> bool:
        """Whether its engine reports here at all; if not (an older version, mid-rollout) only callers end its leases."""
        return self.beat_number >= 0

    @property
    def taken(self) -> int:
        """Slots in use."""
        return len(self.leases) + len(self.strays)

    @property
    def waiting(self) -> int:
        """Requests that wait inside the engine, as far as is known."""
        return max(self.stalled, self.inside)

    def full_batch(self, tokens: float, crowded: bool) -> float:
        """Requests that it computes at once when it can take no more: those it has, while others wait for its memory; else its slots,
        or as many requests of `tokens` as its cache holds. `crowded`: some wait for a place anywhere."""
        if self.taken and self.accepting and (self.waiting or crowded):
            return max(1, self.taken - self.waiting)
        held = math.inf if self.member.cache_tokens is None else self.member.cache_tokens / tokens
        return max(1.0, min(self.member.slots, held))

    def free_slots(self, now: float) -> int:
        if not self.accepting or now < self.blocked_until or self.stalled:
            return 0
        return max(0, self.member.slots - self.taken)

    def room(self, now: float) -> float:
        """Tokens of prefill that a request granted now may need; below 0: it may not be granted. An empty replica takes whatever
        its engine can."""
        taken = len(self.leases) + len(self.strays)
        if self.stalled or not self.accepting or now < self.blocked_until or taken >= self.member.slots:
            return -1.0
        if self.free_tokens is None or not taken:
            return math.inf
        return max(0, self.free_tokens - self.unconfirmed_tokens)

    @property
    def step_left(self) -> float:
        """Tokens of prefill that its next step has room for beside all that it owes, in whatever order they arrive; below 0: more than
        a step is owed. A replica that owes no prompts begins with any."""
        step = self.member.step_tokens
        return math.inf if step is None or not self.owed_prefill else step - self.owed_prefill - self.taken

    def owed(self, expected_tokens: float) -> tuple[int, float]:
        """Tokens of prompts and of answers still to compute. Of strays nothing is known, so each counts as a whole answer."""
        return self.owed_prefill, self.owed_decode + len(self.strays) * expected_tokens

    def take(self, lease: Lease) -> None:
        self.leases[lease.ask.ticket] = lease
        self.owed_prefill += lease.prefill
        self.owed_decode += lease.decode
        self.inside += lease.inside
        if not lease.confirmed:
            self.unconfirmed_tokens += lease.prefill

    def drop(self, ticket: str) -> None:
        lease = self.leases.pop(ticket)
        self.owed_prefill -= lease.prefill
        self.owed_decode -= lease.decode
        self.inside -= lease.inside
        if not lease.confirmed:
            self.unconfirmed_tokens -= lease.prefill
        self.stalled = min(self.stalled, self.taken)

    def progress(self, now: float, lease: Lease, emitted: int, decode: int) -> None:
        """The engine has the request and emitted so many tokens; `decode` more are expected."""
        if not lease.confirmed:
            lease.confirmed = True
            self.unconfirmed_tokens -= lease.prefill
        if emitted and (lease.prefill or lease.inside):
            self.owed_prefill -= lease.prefill
            lease.prefill = 0
            self.inside -= lease.inside
            lease.inside = False
        self.owed_decode += decode - lease.decode
        lease.decode, lease.as_of = decode, now

    def ends(self, now: float, rates: Rates) -> Iterator[float]:
        """Seconds until each request here should end, when all of them share the replica's time equally."""
        sharing = self.taken
        for lease in self.leases.values():
            yield max(0.0, sharing * rates.seconds(lease.prefill, lease.decode) - (now - lease.as_of))
