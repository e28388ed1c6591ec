"""The pool: who is granted which replica, who waits, who is refused. The one writer of leases, owed work and the waiting line.

Owns `Pool` and `PoolLimits`. May know no clock, thread or network: `now` (seconds, any origin) comes in, and what changed goes out
(`replies.py`): an actor can wake futures, a simulator can replay a trace.

    acquire ─┬─ a replica has room and nobody is before it ──▶ Granted (reserved in the same step)
             ├─ fewer than max_queue_size wait ──────────────▶ Queued ──(release, beat, members)──▶ Granted
             └─ otherwise ───────────────────────────────────▶ Refused, with the time to come back

Invariants: never more than `max_queue_size` wait (who was admitted before and comes back is not counted again); order is FIFO
within a priority; nobody waits while a replica has room for the head of the line; every lease ends by release, by beat, by the
loss of its replica, or by not being confirmed or renewed in time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from .admission import LengthMeter, RateMeter, ReturnPacer
from .line import Waiting, WaitingLine
from .loads import Ask, Rates, ReplicaLoad, RoutingDecision
from .members import Beat, BeatReply, Lease, Member, Replica
from .policies import Field, LeastWork, Patience, Picker, Policy, PrefixAware, make_policy
from .prefix_index import PrefixIndex
from .replies import Changes, Expired, Granted, Queued, Refused, Room
from .sheet import Sheet, worth_waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """What the pool may do. `max_queue_size` 0 means no bound. Times are seconds."""

    max_queue_size: int = 0
    policy: str = "prefix_aware"
    page_size: int = 256
    index_max_bytes: int = 256 * 2**20
    lease_timeout_s: float = 30.0
    cold_start_timeout_s: float = 300.0
    block_s: float = 0.1  # how long a replica that refused a grant is left alone


@dataclass(frozen=True, slots=True)
class _Place:
    since: float
    holder: str


_COUNTERS = (
    *("granted", "queued", "refused", "expired", "reaped", "abandoned", "rejected"),
    *("prompt_tokens", "predicted_tokens", "cached_tokens"),  # granted; of them expected in caches; found in caches
)
_NOTHING = Changes()
_UNBOUNDED = 2**31  # places, where any number may wait
_BEAT_S = 0.05  # between two beats of an engine for which others wait
_ENDS_AGE_S = 0.05  # under a storm of refusals, when places free up is worked out this often and not for each of them


class Pool:
    """See the module. Every public method is one transition; `deadline` is when `tick` is due at the latest."""

    def __init__(self, limits: PoolLimits | None = None, seed: int = 0, policy: Policy | None = None) -> None:
        self.limits = limits or PoolLimits()
        self.deadline = math.inf
        self._index = PrefixIndex(self.limits.index_max_bytes)
        self._policy = policy or make_policy(self.limits.policy, self.limits.page_size)
        self._replicas: dict[str, Replica] = {}
        self._sheet = Sheet(self._replicas)
        self._inside: dict[str, int] = {}  # who waits inside engines, by replica …
        self._num_inside = 0  # … and in all
        self._lost: set[str] = set()
        self._off: set[str] = set()  # steered away from, members or not
        self._lease_at: dict[str, str] = {}  # ticket → replica
        self._line = WaitingLine()
        self._places: dict[str, _Place] = {}  # request id → admitted, not yet asking
        self._holders: dict[str, float] = {}  # → last heard of
        self._no_replica_since: float | None = None
        self._in_charge = True
        self._rates, self._lengths, self._pacer = RateMeter(), LengthMeter(), ReturnPacer(seed)
        self._prefill_per_request = 0.0
        self._ends: list[float] = []  # seconds until each running request should end, as of …
        self._ends_at = -math.inf
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self.peak_waiting = 0  # the most that ever waited
        self._num_said = 0  # rooms told of
        self.reasons: dict[str, int] = {}  # why replicas were chosen → how often

    # what callers do

    def reserve(self, now: float, request_id: str, holder: str = "") -> Refused | None:
        """Keep a place for a request that will ask shortly (it is still being tokenized), or refuse it now."""
        if self.is_full(now):
            return self._refuse(now, request_id)
        self._places[request_id] = _Place(now, holder)
        self._seen(now, holder)
        self._expect_tick(now + self.limits.lease_timeout_s)
        return None

    def unreserve(self, request_id: str) -> None:
        """The request will not ask after all. Unknown ids are ignored."""
        self._places.pop(request_id, None)

    def acquire(self, now: float, ask: Ask) -> Granted | Queued | Refused:
        """Grant a replica, let it wait, or refuse. A ticket that is known already is refused as a programming error."""
        if ask.ticket in self._lease_at or ask.ticket in self._line:
            raise ValueError(f"ticket {ask.ticket!r} is in use; every acquire needs a ticket of its own")
        self._seen(now, ask.holder)
        had_place = self._places.pop(ask.request_id, None) is not None
        decision = self._choose(now, ask) if self._may_go_first(ask) else None
        full = self._num_waiting() >= (self.limits.max_queue_size or math.inf) if had_place else self.is_full(now)
        if decision is not None and not (full and self._waits_inside(ask, decision)):
            return self._grant(now, Waiting(ask=ask, since=now), decision)
        if full and not ask.readmit:
            return self._refuse(now, ask.ticket)
        ahead = (
            sum(1 for waiting in self._line if waiting.ask.priority <= ask.priority) if len(self._line) < 64 else len(self._line)
        )
        self._line.push(Waiting(ask=ask, since=now))
        self.peak_waiting = max(self.peak_waiting, self._num_waiting())
        self.counters["queued"] += 1
        self._expect_tick(now + self.limits.lease_timeout_s)
        if not self._replicas:
            self._expect_tick(now + self.limits.cold_start_timeout_s)
        return Queued(ticket=ask.ticket, ahead=ahead)

    def release(self, now: float, ticket: str, rejected: bool = False) -> Changes:
        """The request is over, has left the line, or (`rejected`) was refused by its replica. Unknown tickets are ignored."""
        if self._line.remove(ticket) is None:
            name = self._lease_at.get(ticket)
            if name is None:
                return Changes()
            self._touched(name)
            if rejected:
                self.counters["rejected"] += 1
                self._replicas[name].blocked_until = now + self.limits.block_s
                self._expect_tick(now + self.limits.block_s)
            else:
                self._replicas[name].blocked_until = 0.0
            self._drop_lease(ticket)
        return self._granted(now)

    def renew(self, now: float, holder: str, held: Iterable[tuple[str, str, str]] = ()) -> None:
        """`holder` lives. `held`: (ticket, request id, replica) of what it has in engines without this pool's doing. What a replica
        reports of them becomes leases; of one that does not report here (it is of an older version) the holder's word is taken.
        """
        self._seen(now, holder)
        for ticket, request_id, name in held:
            replica = self._replicas.get(name)
            if ticket in self._lease_at or replica is None:
                continue
            reported = replica.strays.pop(request_id, None) is not None
            if not reported and replica.is_heard:
                continue
            replica.abandoned.discard(request_id)
            ask = Ask(ticket=ticket, request_id=request_id, holder=holder)
            decode = self._lengths.expect(None)
            lease = Lease(ask=ask, replica=name, granted_at=now, prefill=0, decode=decode, as_of=now, confirmed=reported)
            replica.take(lease)
            self._lease_at[ticket] = name
            self._touched(name)

    # what is known of replicas

    def members(self, now: float, members: Sequence[Member]) -> Changes:
        """The replicas that serve now, all of them. Leases on others end; a replica once `lost` never comes back."""
        wanted = {member.replica: member for member in members if member.replica not in self._lost}
        for name in [name for name in self._replicas if name not in wanted]:
            self._drop_replica(name)
        self._lost &= {member.replica for member in members}
        for name, member in wanted.items():
            if name in self._replicas:
                self._replicas[name].member = member
            else:
                self._replicas[name] = Replica(
                    member=member, free_tokens=member.cache_tokens, heard_at=now, accepting=name not in self._off
                )
        self._sheet.rebuild()
        if not self._replicas and self._no_replica_since is None:
            self._no_replica_since = now
        elif self._replicas:
            self._no_replica_since = None
        return Changes(granted=self._pump(now))

    def lost(self, now: float, replica: str) -> Changes:
        """A caller saw this replica die; the full list of members will follow."""
        self._lost.add(replica)
        if replica in self._replicas:
            self._drop_replica(replica)
            if not self._replicas:
                self._no_replica_since = now
        return Changes()

    def steer(self, now: float, replica: str, accepting: bool) -> Changes:
        """Give this replica no new requests, or give it some again (while its weights change, or before it stops). It may be one
        that is no member yet.
        """
        (self._off.discard if accepting else self._off.add)(replica)
        if replica in self._replicas:
            self._replicas[replica].accepting = accepting
            self._touched(replica)
        return Changes(granted=self._pump(now))

    def take_charge(self, now: float, in_charge: bool) -> None:
        """Whether callers ask here, or at the pool of another version of the application while that rolls out. They renew there
        what they have here, and what it grants runs here without a lease: so until they are back, silence means nothing.
        """
        if in_charge and not self._in_charge:
            self._holders = dict.fromkeys(self._holders, now)
            for replica in self._replicas.values():
                replica.strays = dict.fromkeys(replica.strays, now)
        self._in_charge = in_charge
        self._set_deadline(now)

    def beat(self, now: float, beat: Beat) -> tuple[BeatReply, Changes]:
        """An engine says what it has and does. Beats that overtook each other are dropped."""
        replica = self._replicas.get(beat.replica)
        if replica is None:
            return BeatReply(known=False), Changes()  # not yet a member, or draining
        if beat.number > replica.beat_number:
            replica.beat_number, replica.heard_at = beat.number, now
            replica.cache_used, replica.free_tokens, replica.blocked_until = beat.cache_used, beat.free_tokens, 0.0
            replica.engine = beat.engine or replica.engine
            self._hear_pages(replica, beat)
            self._hear_requests(now, replica, beat)
            self._rates.observe(beat.prefill_tokens, beat.decode_tokens, beat.num_steps, beat.busy_s)
            self.counters["cached_tokens"] += beat.cached_tokens
        reply = BeatReply(
            known=True,
            want_full=not replica.has_index,
            abandoned=tuple(replica.abandoned),
            owed_s=self._owed_s(replica),
            line_s=self._line_s(self._full_batch(replica)),
            num_waiting=len(self._line),
            expected_tokens=self._lengths.mean,
        )
        return reply, self._granted(now)

    def tick(self, now: float) -> Changes:
        """End what has been neither confirmed, renewed nor served in time. Due at `deadline`; harmless at any time."""
        timeout = self.limits.lease_timeout_s
        judged = self._holders if self._in_charge else {}
        silent = {holder for holder, at in judged.items() if holder and at + timeout <= now}
        for ticket, name in list(self._lease_at.items()):
            self._reap(now, ticket, self._replicas[name], silent)
        for replica in self._replicas.values() if self._in_charge else ():
            overdue = {request_id for request_id, since in replica.strays.items() if since + timeout <= now} - replica.abandoned
            self.counters["abandoned"] += len(overdue)
            replica.abandoned |= overdue
        self._places = {
            name: place for name, place in self._places.items() if place.since + timeout > now and place.holder not in silent
        }
        expired = tuple(self._expire(now, silent))
        for holder in silent:
            self._holders.pop(holder, None)
        self._set_deadline(now)
        return Changes(granted=self._pump(now), expired=expired)

    def configure(self, now: float, limits: PoolLimits) -> Changes:
        """Take new limits. The index is kept; a lower bound refuses newcomers and leaves those who wait."""
        if (limits.policy, limits.page_size) != (self.limits.policy, self.limits.page_size):
            self._policy = make_policy(limits.policy, limits.page_size)
        self.limits = limits
        self._index.resize(limits.index_max_bytes)
        self._set_deadline(now)
        return Changes(granted=self._pump(now))

    def room(self, now: float, promises: int = 0, refused: int = 0) -> Room:
        """How a door should treat newcomers; if it should refuse them, with so many promises for it to give out. `refused`: how many
        it has refused since it last asked."""
        self.counters["refused"] += refused
        self._num_said += 1
        free, head = self.free_places(now), self._line.head()
        return Room(
            free=free,
            waiting=self._num_waiting() + len(self._places),
            limit=self.limits.max_queue_size,
            first=None if head is None else head.ask.priority,
            number=self._num_said,
            returns=() if free else tuple(self._promise(now) for _ in range(promises)),
        )

    # questions

    def is_full(self, now: float) -> bool:
        """Whether as many wait, or have places, as may."""
        limit = self.limits.max_queue_size
        if not limit:
            return False
        waiting, places = self._num_waiting(), len(self._places)
        if waiting + places < limit or waiting >= limit:
            return waiting >= limit
        return waiting + max(0, places - self._free_slots(now)) >= limit

    def free_places(self, now: float) -> int:
        """How many newcomers would be given a place now, one after the other."""
        limit = self.limits.max_queue_size
        if not limit or self.is_full(now):
            return 0 if limit else _UNBOUNDED
        return limit - self._num_waiting() + self._free_slots(now) - len(self._places)

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def num_leases(self) -> int:
        return len(self._lease_at)

    @property
    def rates(self) -> Rates:
        return self._rates.rates

    def owed_s(self) -> float:
        """Seconds that one replica alone would need for everything that runs and waits, in full batches."""
        batches = [self._full_batch(replica) for replica in self._replicas.values()]
        mean = sum(batches) / len(batches) if batches else None
        return sum(self._owed_s(replica) for replica in self._replicas.values()) + self._line_s(mean)

    def is_busy(self, replica: str) -> bool:
        """Whether requests are with this replica, or on their way to it."""
        known = self._replicas.get(replica)
        return known is not None and known.taken > 0

    def explain(self, now: float, ask: Ask) -> RoutingDecision | None:
        """Where this request would go if every replica had room; nothing is reserved. None without replicas."""
        loads = self._loads(now, ask, with_room=False)
        return self._policy.rank(ask, loads, self.rates) if loads else None

    def snapshot(self, now: float) -> dict[str, object]:
        """Counts for people and metrics."""
        return {
            "waiting": len(self._line),
            "peak_waiting": self.peak_waiting,
            "places": len(self._places),
            "limit": self.limits.max_queue_size,
            "policy": self.limits.policy,
            "owed_s": self.owed_s(),
            "rates": asdict(self.rates),
            "expected_tokens": self._lengths.mean,
            "index_pages": len(self._index),
            "counters": dict(self.counters),
            "reasons": dict(self.reasons),
            "replicas": {name: self._describe(now, replica) for name, replica in self._replicas.items()},
        }

    # inside

    def _may_go_first(self, ask: Ask) -> bool:
        head = self._line.head()
        return head is None or ask.priority < head.ask.priority or (ask.readmit and ask.priority == head.ask.priority)

    def _num_waiting(self) -> int:
        """Who waits anywhere: in the line, or inside an engine. Who came back after an admission is not counted again."""
        return len(self._line) - self._line.num_readmitted + self._num_inside

    def _refuse(self, now: float, ticket: str) -> Refused:
        self.counters["refused"] += 1
        wait, waiting = self._promise(now), self._num_waiting() + len(self._places)
        return Refused(ticket=ticket, waiting=waiting, limit=self.limits.max_queue_size, retry_after_s=wait)

    def _promise(self, now: float) -> float:
        """Seconds until the next place that nobody was promised."""
        if now - self._ends_at >= _ENDS_AGE_S:
            self._ends_at = now
            self._ends = sorted(end for replica in self._replicas.values() for end in replica.ends(now, self.rates))
        interval = self._service_s() / max(1, len(self._replicas))
        return self._pacer.next_return(now, self._ends, interval, self._lengths.spread)

    def _service_s(self) -> float:
        """Seconds of one replica's time that a request takes here, as far as is known."""
        return self.rates.seconds(self._prefill_per_request or 256, self._lengths.mean)

    def _choose(self, now: float, ask: Ask) -> RoutingDecision | None:
        policy = self._policy
        if isinstance(policy, (PrefixAware, LeastWork)):
            return self._pick(now, ask, policy)
        loads = self._loads(now, ask, with_room=True)
        return policy.rank(ask, loads, self.rates) if loads else None

    def _pick(self, now: float, ask: Ask, policy: Picker) -> RoutingDecision | None:
        """What ranking all would put first, read off the sheet."""
        sheet, page, tokens = self._sheet, self.limits.page_size, ask.num_tokens
        sheet.settle(now)
        at = sheet.at
        depths = self._index.depths(ask.digests) if ask.digests else {}
        found = {at[name]: min(pages * page, tokens - 1) for name, pages in depths.items() if name in at}
        able = sheet.able(tokens, found, self._since_beat(), patient=policy.patience is not Patience.NONE)
        if not able:
            return None
        field = Field(
            names=sheet.names,
            able=able,
            owed_s=sheet.owed_s(self.rates, self._lengths.mean),
            taken=sheet.taken,
            found=found,
            regrets={at[name]: regret for name, regret in self._index.regrets() if name in at},
        )
        return policy.pick(ask, field, self.rates)

    def _loads(self, now: float, ask: Ask, *, with_room: bool) -> list[ReplicaLoad]:
        """How each replica looks to this request; `with_room`: only those to which it may be granted now."""
        depths = self._index.depths(ask.digests) if ask.digests else {}
        mean, page, tokens, regret = self._lengths.mean, self.limits.page_size, ask.num_tokens, self._index.regret
        prefill_s, decode_s = self.rates.prefill_s, self.rates.decode_s
        loads: list[ReplicaLoad] = []
        behind: list[ReplicaLoad] = []  # who cannot begin with it soon
        soon = tokens - self._since_beat()
        spared = 0  # tokens that are cached where it could begin
        for name, replica in self._replicas.items():
            cached = min(depths[name] * page, tokens - 1) if name in depths else 0  # the last token's logits are always computed
            if with_room and replica.room(now) < tokens - cached:
                continue
            owed_s = replica.owed_prefill * prefill_s + (replica.owed_decode + len(replica.strays) * mean) * decode_s
            load = ReplicaLoad(name, owed_s, replica.taken, cached, regret(name), now - replica.heard_at)
            if with_room and replica.step_left < soon - cached:
                behind.append(load)
            else:
                loads.append(load)
                spared = max(spared, cached)
        if self._policy.patience is Patience.CACHED:
            loads += [load for load in behind if worth_waiting(tokens, load.cached_tokens, spared)]
        return loads

    def _waits_inside(self, ask: Ask, decision: RoutingDecision) -> bool:
        """Whether it may have to wait behind other prompts in the engine. Who was admitted before is not counted again."""
        left = self._replicas[decision.order[0]].step_left
        return not ask.readmit and left < ask.num_tokens - decision.cached_tokens

    def _since_beat(self) -> float:
        """Prompt tokens that an engine computes before it is heard of again: what it owes less by then."""
        return _BEAT_S / self.rates.prefill_s

    def _grant(self, now: float, waiting: Waiting, decision: RoutingDecision) -> Granted:
        ask, name = waiting.ask, decision.order[0]
        prefill, decode = ask.num_tokens - decision.cached_tokens, self._lengths.expect(ask.max_new_tokens)
        inside = self._waits_inside(ask, decision)
        lease = Lease(ask=ask, replica=name, granted_at=now, prefill=prefill, decode=decode, as_of=now, inside=inside)
        self._replicas[name].take(lease)
        self._lease_at[ask.ticket] = name
        self._touched(name)
        if inside:
            self.peak_waiting = max(self.peak_waiting, self._num_waiting())
        self._index.add(name, ask.digests)
        self._prefill_per_request += (prefill - self._prefill_per_request) * (0.05 if self._prefill_per_request else 1.0)
        self.counters["granted"] += 1
        self.counters["prompt_tokens"] += ask.num_tokens
        self.counters["predicted_tokens"] += decision.cached_tokens
        self.reasons[decision.reason] = self.reasons.get(decision.reason, 0) + 1
        self._expect_tick(now + self.limits.lease_timeout_s)
        return Granted(ticket=ask.ticket, replica=name, decision=decision, holder=ask.holder, waited_s=now - waiting.since)

    def _granted(self, now: float) -> Changes:
        return Changes(granted=self._pump(now)) if len(self._line) else _NOTHING

    def _pump(self, now: float) -> tuple[Granted, ...]:
        """Grant from the head of the line for as long as there is room for the head."""
        granted: list[Granted] = []
        while (head := self._line.head()) is not None:
            decision = self._choose(now, head.ask)
            if decision is None:
                break
            self._line.remove(head.ask.ticket)
            granted.append(self._grant(now, head, decision))
        return tuple(granted)

    def _hear_pages(self, replica: Replica, beat: Beat) -> None:
        name = beat.replica
        if beat.full or beat.weights_version != replica.weights_version:
            self._index.forget(name)
            self._index.add(name, (digest for lease in replica.leases.values() for digest in lease.ask.digests))
        replica.weights_version = beat.weights_version
        replica.has_index = replica.has_index or beat.full
        self._index.discard(name, beat.evicted)
        self._index.add(name, beat.added)

    def _hear_requests(self, now: float, replica: Replica, beat: Beat) -> None:
        live, ended = dict(beat.live), set(beat.ended)
        if beat.num_finished:
            self._lengths.observe(beat.finished_tokens / beat.num_finished, beat.num_finished)
        leased = set[str]()
        usual = self._lengths.expect(None)
        for ticket, lease in list(replica.leases.items()):
            request_id, most = lease.ask.request_id, lease.ask.max_new_tokens
            emitted = live.get(request_id)
            if emitted is not None:
                leased.add(request_id)
                replica.progress(now, lease, emitted, usual if most is None else self._lengths.expect(most, emitted))
            elif lease.confirmed or request_id in ended:
                self._drop_lease(ticket)
        if replica.strays or len(leased) < len(live):
            replica.strays = {name: replica.strays.get(name, now) for name in live if name not in leased}
        if replica.abandoned:
            replica.abandoned &= live.keys()
        replica.stalled = beat.num_waiting
        self._touched(beat.replica)
        self.peak_waiting = max(self.peak_waiting, self._num_waiting())
        if replica.strays:
            self._expect_tick(now + self.limits.lease_timeout_s)

    def _reap(self, now: float, ticket: str, replica: Replica, silent: set[str]) -> None:
        lease = replica.leases[ticket]
        gone = lease.ask.holder in silent
        late = lease.granted_at + self.limits.lease_timeout_s <= now and replica.is_heard
        if not lease.confirmed and (late or gone):
            self.counters["reaped"] += 1
            self._drop_lease(ticket)
        elif gone and lease.ask.request_id not in replica.abandoned:
            self.counters["abandoned"] += 1
            replica.abandoned.add(lease.ask.request_id)

    def _expire(self, now: float, silent: set[str]) -> Iterable[Expired]:
        for waiting in list(self._line):
            since = waiting.since if self._no_replica_since is None else max(waiting.since, self._no_replica_since)
            cold = not self._replicas and since + self.limits.cold_start_timeout_s <= now
            if cold or waiting.ask.holder in silent:
                self._line.remove(waiting.ask.ticket)
                self.counters["expired"] += 1
                reason = "no_replica" if cold else "holder_gone"
                yield Expired(ticket=waiting.ask.ticket, holder=waiting.ask.holder, waited_s=now - waiting.since, reason=reason)

    def _drop_lease(self, ticket: str) -> None:
        name = self._lease_at.pop(ticket)
        self._replicas[name].drop(ticket)
        self._touched(name)

    def _touched(self, name: str) -> None:
        """This replica's book has changed."""
        self._sheet.touch(name)
        waiting = self._replicas[name].waiting
        self._num_inside += waiting - self._inside.get(name, 0)
        self._inside[name] = waiting

    def _drop_replica(self, name: str) -> None:
        for ticket in list(self._replicas[name].leases):
            self._drop_lease(ticket)
        self._num_inside -= self._inside.pop(name, 0)
        del self._replicas[name]
        self._sheet.rebuild()
        self._index.forget(name)

    def _seen(self, now: float, holder: str) -> None:
        if holder:
            self._holders[holder] = now
            self._expect_tick(now + self.limits.lease_timeout_s)

    def _expect_tick(self, at: float) -> None:
        self.deadline = min(self.deadline, at)

    def _set_deadline(self, now: float) -> None:
        """The next time at which something could be due; never, when nothing is held and nobody waits."""
        timeout = self.limits.lease_timeout_s
        times = [at + timeout for holder, at in self._holders.items() if holder and self._in_charge]
        times += [place.since + timeout for place in self._places.values()]
        for replica in self._replicas.values():
            if replica.is_heard:
                times += [lease.granted_at + timeout for lease in replica.leases.values() if not lease.confirmed]
            if self._in_charge:
                times += [since + timeout for name, since in replica.strays.items() if name not in replica.abandoned]
            times += [replica.blocked_until] if replica.blocked_until > now else []
        if not self._replicas:
            times += [max(w.since, self._no_replica_since or 0.0) + self.limits.cold_start_timeout_s for w in self._line]
        self.deadline = min(times, default=math.inf)

    def _free_slots(self, now: float) -> int:
        """Of all replicas; while requests are in line, none is free for others."""
        return 0 if self._line else sum(replica.free_slots(now) for replica in self._replicas.values())

    def _owed_s(self, replica: Replica) -> float:
        return self.rates.seconds(*replica.owed(self._lengths.mean), self._full_batch(replica))

    def _line_s(self, batch: float | None) -> float:
        return self.rates.seconds(self._line.num_tokens, len(self._line) * self._lengths.mean, batch)

    def _full_batch(self, replica: Replica) -> float:
        tokens = (self._prefill_per_request or 256) + self._lengths.mean  # new ones in the cache, of a request
        return max(self.rates.batch, replica.full_batch(tokens, crowded=bool(self._line)))

    def _describe(self, now: float, replica: Replica) -> dict[str, object]:
        return {
            "slots": replica.member.slots,
            "leases": len(replica.leases),
            "strays": len(replica.strays),
            "stalled": replica.stalled,
            "owed_s": self._owed_s(replica),
            "cache_used": replica.cache_used,
            "weights_version": replica.weights_version,
            "accepting": replica.accepting,
            "heard_s_ago": now - replica.heard_at,
            "engine": None if replica.engine is None else asdict(replica.engine),
        }
