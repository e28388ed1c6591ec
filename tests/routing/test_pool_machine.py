"""The pool beside a model: whatever happens in whatever order, its laws hold."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cb_ray.routing.loads import Ask
from cb_ray.routing.members import Beat, Member
from cb_ray.routing.pool import Pool, PoolLimits
from cb_ray.routing.replies import Changes, Granted, Queued, Refused

PAGES = [bytes([n]) * 16 for n in range(6)]


class PoolBesideAModel(RuleBasedStateMachine):
    """The model keeps what callers and engines know: who was granted what, who waits, what each engine runs."""

    @initialize(
        limit=st.integers(0, 3),
        policy=st.sampled_from(["round_robin", "least_work", "power_of_two", "prefix_aware"]),
        slots=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        step=st.sampled_from([None, 30]),
    )
    def start(self, limit, policy, slots, step):
        self.limit, self.step = limit, step
        limits = PoolLimits(max_queue_size=limit, policy=policy, page_size=4, lease_timeout_s=30, cold_start_timeout_s=60)
        self.pool = Pool(limits)
        self.now, self.count, self.numbers = 100.0, 0, 0
        self.slots = {f"r{n}": count for n, count in enumerate(slots)}
        self.waiting: list[Ask] = []  # in order of arrival
        self.running: dict[str, tuple[Ask, str]] = {}  # ticket → ask, replica; the pool's leases
        self.engine: dict[str, dict[str, int]] = {name: {} for name in self.slots}  # what really runs where
        self.places: list[str] = []
        self.steered: set[str] = set()
        self.in_charge = True
        self.apply(
            self.pool.members(self.now, [Member(replica=name, slots=n, step_tokens=self.step) for name, n in self.slots.items()])
        )

    def apply(self, changes: Changes) -> None:
        for grant in changes.granted:
            head = min(self.waiting, key=lambda ask: ask.priority)  # min is stable: the first to arrive among the best
            assert grant.ticket == head.ticket, "the line is first come, first served within a priority"
            self.waiting.remove(head)
            self.settle(head, grant)
        for gone in changes.expired:
            self.waiting = [ask for ask in self.waiting if ask.ticket != gone.ticket]

    def settle(self, ask: Ask, grant: Granted) -> None:
        assert grant.replica in self.slots and grant.replica not in self.steered
        self.running[ask.ticket] = (ask, grant.replica)

    def ask(self, priority=0, size=1, pages=0, readmit=False, request_id=None) -> Ask:
        self.count += 1
        return Ask(
            ticket=f"t{self.count}",
            request_id=request_id or f"q{self.count}",
            holder="caller",
            num_tokens=size,
            max_new_tokens=size,
            digests=tuple(PAGES[:pages]),
            priority=priority,
            readmit=readmit,
        )

    @rule(priority=st.integers(0, 2), size=st.integers(1, 40), pages=st.integers(0, 6))
    def acquire(self, priority, size, pages):
        self.take(self.ask(priority, size, pages))

    @precondition(lambda self: self.places)
    @rule()
    def acquire_with_a_place(self):
        self.take(self.ask(request_id=self.places.pop(0)))

    def take(self, ask: Ask) -> None:
        answer = self.pool.acquire(self.now, ask)
        if isinstance(answer, Granted):
            assert answer.ticket == ask.ticket
            assert not any(other.priority <= ask.priority for other in self.waiting), "nobody overtakes"
            self.settle(ask, answer)
        elif isinstance(answer, Queued):
            self.waiting.append(ask)
        else:
            assert isinstance(answer, Refused)
            assert self.limit and answer.retry_after_s > 0
            if not self.stalls:
                assert len(self.waiting) + len(self.places) >= self.limit, "nobody is refused while there is a place to wait"

    @rule()
    def reserve(self):
        self.count += 1
        name, said = f"q{self.count}", self.pool.room(self.now, promises=2)
        assert len(said.returns) == (2 if said.full else 0)
        if self.pool.reserve(self.now, name, "caller") is None:
            assert not said.full
            self.places.append(name)
        else:
            assert said.full, "doors are told what the pool would answer"
            assert self.limit and len(self.waiting) + len(self.places) + self.stalls >= self.limit

    @precondition(lambda self: self.places)
    @rule()
    def unreserve(self):
        self.pool.unreserve(self.places.pop())

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def reaches_its_engine(self, data):
        ask, replica = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        self.engine[replica].setdefault(ask.request_id, 0)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), still_runs=st.booleans())
    def release(self, data, still_runs):
        """The caller says it is over; its engine may hear of it later."""
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        ask, replica = self.running.pop(ticket)
        if not still_runs:
            self.engine[replica].pop(ask.request_id, None)
        self.apply(self.pool.release(self.now, ticket))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def replica_rejects(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        ask, replica = self.running.pop(ticket)
        self.engine[replica].pop(ask.request_id, None)
        self.apply(self.pool.release(self.now, ticket, rejected=True))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def gives_up_waiting(self, data):
        ask = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(ask)
        self.apply(self.pool.release(self.now, ask.ticket))

    @rule(data=st.data(), waiting=st.integers(0, 2), free=st.none() | st.integers(0, 60))
    def beat(self, data, waiting, free):
        name = data.draw(st.sampled_from(sorted(self.engine)))
        self.numbers += 1
        live = self.engine[name]
        seen_before = {ask.request_id for ask, where in self.running.values() if where == name and live.get(ask.request_id)}
        ended = [request_id for request_id in live if data.draw(st.booleans())]
        told = [request_id for request_id in ended if data.draw(st.booleans()) or request_id not in seen_before]
        for request_id in ended:
            del live[request_id]
        for request_id in live:
            live[request_id] += 1
        beat = Beat(
            replica=name,
            number=self.numbers,
            live=tuple(live.items()),
            ended=tuple(told),
            num_waiting=min(waiting, len(live)),
            free_tokens=free,
            prefill_tokens=5,
            decode_tokens=len(live),
            busy_s=0.2,
            added=tuple(PAGES[:2]),
            evicted=tuple(PAGES[4:]),
        )
        reply, changes = self.pool.beat(self.now, beat)
        assert reply.known == (name in self.slots)
        assert set(reply.abandoned) <= set(live), "only what is live can be abandoned"
        if reply.known:
            self.forget_leases(lambda ask, where: where == name and ask.request_id not in live)
            assert not [ask for ask, where in self.running.values() if where == name and ask.request_id in ended]
        self.apply(changes)

    def forget_leases(self, over) -> None:
        """The pool may end a lease by itself; the model follows it, but only where it had a reason."""
        held = {ticket for replica in self.pool._replicas.values() for ticket in replica.leases}
        for ticket in list(self.running):
            if ticket not in held:
                ask, replica = self.running.pop(ticket)
                assert over(ask, replica), f"{ticket} lost its lease without a reason"

    @rule(slots=st.integers(1, 3))
    def replica_joins(self, slots):
        name = f"r{len(self.engine)}"
        self.slots[name] = slots
        self.engine[name] = {}
        self.apply(
            self.pool.members(self.now, [Member(replica=n, slots=s, step_tokens=self.step) for n, s in self.slots.items()])
        )

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), seen_by_a_caller=st.booleans())
    def replica_dies(self, data, seen_by_a_caller):
        name = data.draw(st.sampled_from(sorted(self.slots)))
        del self.slots[name]
        self.steered.discard(name)
        self.engine[name] = {}
        if seen_by_a_caller:
            self.apply(self.pool.lost(self.now, name))
            self.forget_leases(lambda ask, where: where == name)
        self.apply(
            self.pool.members(self.now, [Member(replica=n, slots=s, step_tokens=self.step) for n, s in self.slots.items()])
        )
        self.forget_leases(lambda ask, where: where == name)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), accepting=st.booleans())
    def steer(self, data, accepting):
        name = data.draw(st.sampled_from(sorted(self.slots)))
        (self.steered.discard if accepting else self.steered.add)(name)
        self.apply(self.pool.steer(self.now, name, accepting))

    @rule(in_charge=st.booleans())
    def another_version_comes_or_goes(self, in_charge):
        self.in_charge = in_charge
        self.pool.take_charge(self.now, in_charge)

    @rule(seconds=st.sampled_from([0.05, 1.0, 29.0, 61.0]), alive=st.booleans())
    def time_passes(self, seconds, alive):
        before, abandoned = self.pool.deadline, self.pool.counters["abandoned"]
        self.now += seconds
        if alive:
            self.pool.renew(self.now, "caller")
        if self.now >= before:
            self.apply(self.pool.tick(self.now))
            self.forget_leases(lambda ask, where: seconds > 0.05)
            self.places = [name for name in self.places if name in self.pool._places]
            assert self.pool.deadline > self.now
            assert self.in_charge or self.pool.counters["abandoned"] == abandoned, "whom it cancels may be held elsewhere"

    @property
    def stalls(self) -> int:
        return sum(replica.waiting for replica in self.pool._replicas.values())

    @invariant()
    def the_bound_holds(self):
        if self.limit:
            assert self.pool.num_waiting <= self.limit

    @invariant()
    def both_count_alike(self):
        assert [w.ask.ticket for w in self.pool._line] == [a.ticket for a in sorted(self.waiting, key=lambda ask: ask.priority)]
        held = {(ticket, name) for name, replica in self.pool._replicas.items() for ticket in replica.leases}
        assert held == {(ticket, replica) for ticket, (_, replica) in self.running.items()}
        assert self.pool.num_leases == len(held)
        assert set(self.pool._places) == set(self.places)

    @invariant()
    def no_replica_has_more_than_it_takes(self):
        for name, replica in self.pool._replicas.items():
            # strays were granted once, or by somebody who lost sight of the pool; leases alone never exceed the slots
            assert len(replica.leases) <= self.slots[name]

    @invariant()
    def nobody_waits_while_there_is_room(self):
        head = self.pool._line.head()
        if head is not None:
            assert self.pool._choose(self.now, head.ask) is None or self.now >= self.pool.deadline

    @invariant()
    def sums_equal_their_parts(self):
        for replica in self.pool._replicas.values():
            leases = list(replica.leases.values())
            assert replica.owed_prefill == sum(lease.prefill for lease in leases)
            assert replica.owed_decode == sum(lease.decode for lease in leases)
            assert replica.inside == sum(lease.inside for lease in leases)
            fit = replica.owed_prefill <= (self.step or replica.owed_prefill)
            assert fit or replica.inside or sum(lease.prefill > 0 for lease in leases) == 1
            assert replica.unconfirmed_tokens == sum(lease.prefill for lease in leases if not lease.confirmed)
        assert self.pool._num_inside == self.stalls
        assert self.pool._line.num_tokens == sum(ask.num_tokens for ask in self.waiting)
        assert self.pool.owed_s() >= 0

    def teardown(self):
        """However the story went, when everybody lets go, nothing is left behind."""
        if not hasattr(self, "pool"):
            return
        for ask in list(self.waiting):
            self.waiting.remove(ask)
            self.apply(self.pool.release(self.now, ask.ticket))
        for ticket in list(self.running):
            self.running.pop(ticket)
            self.pool.release(self.now, ticket)
        for name in self.places:
            self.pool.unreserve(name)
        for name in self.slots:
            self.numbers += 1
            self.pool.beat(self.now, Beat(replica=name, number=self.numbers))
        self.pool.take_charge(self.now, True)
        self.pool.tick(self.now + 1000)
        assert self.pool.num_leases == self.pool.num_waiting == 0
        assert all(replica.taken == 0 for replica in self.pool._replicas.values())
        assert not self.pool._holders and not self.pool._places and self.pool._lease_at == {}


TestPoolBesideAModel = PoolBesideAModel.TestCase
TestPoolBesideAModel.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_same_calls_same_answers():
    """A trace replayed gives the same grants, refusals and times to come back, so a simulation is repeatable."""

    def story() -> list[object]:
        pool, dice, out = Pool(PoolLimits(max_queue_size=4, policy="power_of_two")), random.Random(3), []
        pool.members(0.0, [Member(replica=f"r{n}", slots=2) for n in range(3)])
        held: list[str] = []
        for step in range(300):
            now = step * 0.1
            if held and dice.random() < 0.4:
                out.append(pool.release(now, held.pop(dice.randrange(len(held)))))
            answer = pool.acquire(now, Ask(ticket=f"t{step}", request_id=f"q{step}", num_tokens=dice.randint(1, 900)))
            out.append(answer)
            if not isinstance(answer, Refused):
                held.append(answer.ticket)
        return out

    assert story() == story()
