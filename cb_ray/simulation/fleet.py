"""A pool of simulated replicas with the production `Pool`, clients, scaling, failures and weight updates. Owns `Fleet` and `simulate`.

    client ──door──▶ Pool.acquire ──grant──▶ Replica ──answer──▶ client            each arrow takes its hop's time
       ▲    429        ▲      ▲ release, beat   │
       └── Retry-After ┘      └─────────────────┘

Knows what clients show; what answers will be is in the script, which it hands to replicas unread.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

from ..messages import GenerateRequest, RequestStatus, SamplingParams, TokenChunk
from ..routing.loads import Ask
from ..routing.members import Beat, Member
from ..routing.policies import Policy
from ..routing.pool import Pool, PoolLimits
from ..routing.replies import Changes, Granted, Refused
from .agenda import Agenda, Turn, seconds, ticks
from .ledger import Ledger, Moment, Outcome
from .promises import Promises
from .replica import Replica
from .scaler import Scaler
from .settings import Failure, PoolPlan, WeightUpdate
from .workload import END_TOKEN, Arrival, Script, Told, Workload

GREEDY = SamplingParams(do_sample=False, eos_token_ids=(END_TOKEN,))
_MOMENTS = 400  # at which the pool is looked at, more or less
_COLLECT_EVERY = 200_000  # objects that were made and are still there


class Client:
    """One request on its way."""

    __slots__ = ("arrival", "line", "number", "replica", "request_id", "returns", "said", "ticket", "tries")

    def __init__(self, number: int, line: int, arrival: Arrival) -> None:
        self.number, self.line, self.arrival = number, line, arrival
        self.request_id = f"q{number}"
        self.ticket = ""
        self.tries = 0  # times that a replica was asked for
        self.returns = 0  # times that it was refused and came back
        self.said = 0  # tokens that came before it moved to another replica
        self.replica: Replica | None = None


class Fleet:
    """One run. `policy` takes the place of the plan's own, for an oracle."""

    def __init__(self, plan: PoolPlan, workload: Workload, policy: Callable[[Fleet], Policy] | None = None) -> None:
        self.plan, self.workload = plan, workload
        self.agenda, self.script, self.ledger = Agenda(), Script(), Ledger()
        limits = PoolLimits(
            max_queue_size=plan.max_queue_size,
            policy=plan.policy,
            page_size=plan.shape.page_size,
            index_max_bytes=plan.index_max_bytes,
        )
        self.pool = Pool(limits, plan.seed, policy(self) if policy else None)
        self.replicas: dict[str, Replica] = {}  # serving, oldest first
        self.draining: dict[str, Replica] = {}
        self.starting = 0
        self.promises = Promises(self.ledger)
        self._clients: dict[str, Client] = {}  # by request id, until they are served or gone
        self._tickets: dict[str, Client] = {}
        self._arrivals: Iterator[Told] = iter(())
        self._num_born = self._num_arrived = 0
        self._more_to_come = True
        self._tick_at = math.inf
        self._replica_ticks = self._busy_ticks = self._steps = self._preemptions = 0
        self._look_every = ticks(1.0)
        hops = plan.hops
        self._door, self._grant_hop, self._answer = ticks(hops.door_s), ticks(hops.grant_s), ticks(hops.answer_s)
        self._release_hop, self._beat_hop = ticks(hops.release_s), ticks(hops.beat_s)
        self._updating: list[tuple[Replica, int, int]] = []  # replica, ticks to load, new version: still to be done
        self._version = 0

    def run(self) -> Outcome:
        """Until the last request is over."""
        self._arrivals = iter(self.workload)
        for _ in range(self.plan.replicas):
            self._serve_with(self._bear(0), 0)
        self._next_arrival()
        if self.plan.scaling is not None:
            Scaler(self, self.plan.scaling)
        for failure in self.plan.failures:
            self.agenda.at(ticks(failure.at_s), Turn.CONTROL, 0, partial(self._fail, failure))
        for update in self.plan.updates:
            self.agenda.at(ticks(update.at_s), Turn.CONTROL, 0, partial(self._update, update))
        self.agenda.at(0, Turn.CONTROL, 0, self._look)
        with _few_collections():
            self.agenda.run()
        for replica in (*self.replicas.values(), *self.draining.values()):
            self._bury(replica)
        return Outcome(
            ledger=self.ledger,
            duration_s=seconds(self.agenda.now),
            replica_s=seconds(self._replica_ticks),
            busy_s=seconds(self._busy_ticks),
            steps=self._steps,
            preemptions=self._preemptions,
            counters=dict(self.pool.counters),
            reasons=dict(self.pool.reasons),
        )

    @property
    def is_over(self) -> bool:
        """Nobody is here and nobody will come."""
        return not (self._clients or self._more_to_come)

    # ---- clients --------------------------------------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        told = next(self._arrivals, None)
        if told is None:
            self._more_to_come = False
            return
        number, self._num_arrived = self._num_arrived, self._num_arrived + 1
        self.agenda.at(ticks(told.arrival.at_s), Turn.CLIENT, number, partial(self._arrive, number, told))

    def _arrive(self, number: int, told: Told, now: int) -> None:
        arrival = told.arrival
        client = Client(number, self.ledger.arrive(seconds(now), arrival.num_tokens), arrival)
        self._clients[client.request_id] = client
        self.script.write(client.request_id, number, told.num_answer)
        self.agenda.at(now + self._door, Turn.BOARD, number, partial(self._ask, client))
        self._next_arrival()

    def _ask(self, client: Client, now: int) -> None:
        """The Board is asked for a replica."""
        arrival = client.arrival
        client.ticket = f"{client.request_id}-{client.tries}"
        client.tries += 1
        ask = Ask(
            ticket=client.ticket,
            request_id=client.request_id,
            num_tokens=arrival.num_tokens + client.said,
            max_new_tokens=None if arrival.max_new_tokens is None else arrival.max_new_tokens - client.said,
            digests=arrival.pages,
            priority=arrival.priority,
            session=arrival.session,
            readmit=client.said > 0 or client.tries > 1 + client.returns,
        )
        self._tickets[client.ticket] = client
        answer = self.pool.acquire(seconds(now), ask)
        if isinstance(answer, Granted):
            self._granted(now, answer)
        elif isinstance(answer, Refused):
            self._refused(now, client, answer)
        self._arm_tick()

    def _granted(self, now: int, grant: Granted) -> None:
        client = self._tickets[grant.ticket]
        call = partial(self._deliver, client, grant.replica, grant.ticket)
        self.agenda.at(now + self._grant_hop, Turn.ENGINE, client.number, call)

    def _refused(self, now: int, client: Client, refused: Refused) -> None:
        del self._tickets[client.ticket]
        self.ledger.refused(client.line)
        wait, clients = refused.retry_after_s, self.plan.clients
        self.promises.refused(now, client.number, wait)
        if client.returns >= clients.max_returns:
            self._gone(client)
            return
        client.returns += 1
        if clients.whole_seconds:
            wait = max(1, math.ceil(wait))
        back = now + self._answer + ticks(wait)
        self.ledger.asked(client.line, seconds(back))
        self.agenda.at(back + self._door, Turn.BOARD, client.number, partial(self._ask, client))

    def _deliver(self, client: Client, name: str, ticket: str, now: int) -> None:
        """The granted replica gets the request; if it is not there any more, another is asked for."""
        if client.ticket != ticket:
            return
        replica = self.replicas.get(name) or self.draining.get(name)
        if replica is None:
            self._tell(now, client, partial(self._release, ticket))
            self.agenda.at(now, Turn.BOARD, client.number, partial(self._ask, client))
            return
        arrival, most = client.arrival, client.arrival.max_new_tokens
        client.replica = replica
        replica.receive(
            now,
            GenerateRequest(
                request_id=client.request_id,
                token_ids=cast("tuple[int, ...]", self.script.prompt(client.request_id, arrival.num_tokens, client.said)),
                max_new_tokens=None if most is None else most - client.said,
                sampling=GREEDY,
                stream=False,
                priority=arrival.priority,
                resumed_tokens=client.said,
                digests=arrival.pages,
                session=arrival.session,
            ),
        )

    def first_token(self, now: int, request_id: str) -> None:
        self.ledger.first_token(self._clients[request_id].line, seconds(now + self._answer))

    def ended(self, now: int, replica: Replica, chunk: TokenChunk) -> None:
        client, usage = self._clients[chunk.request_id], chunk.usage
        assert usage is not None
        self._tell(now + self._release_hop, client, partial(self._release, client.ticket))
        if chunk.status != RequestStatus.FINISHED:
            self._gone(client)
            return
        self.ledger.cached(client.line, usage.num_cached_tokens)
        said = client.said + usage.num_generated_tokens
        self.ledger.end(client.line, seconds(now + self._answer), said, replica.number)
        self._preemptions += usage.num_preemptions
        self._gone(client)
        if replica.draining and not replica.num_live:
            self._bury(self.draining.pop(replica.name))

    def _tell(self, at: int, client: Client, call: Callable[[int], None]) -> None:
        self.agenda.at(at, Turn.BOARD, client.number, call)

    def _release(self, ticket: str, now: int) -> None:
        self._tickets.pop(ticket, None)
        self.promises.place_free(now)
        self._apply(now, self.pool.release(seconds(now), ticket))

    def _gone(self, client: Client) -> None:
        del self._clients[client.request_id]
        self.script.close(client.request_id)

    # ---- the Board --------------------------------------------------------------------------------------------------------------

    def _apply(self, now: int, changes: Changes) -> None:
        for grant in changes.granted:
            self._granted(now, grant)
        for expired in changes.expired:
            self._gone(self._tickets.pop(expired.ticket))
        self._arm_tick()

    def _arm_tick(self) -> None:
        """One timer at the pool's deadline, as the Board has."""
        deadline = self.pool.deadline
        if deadline < self._tick_at and not self.is_over:
            self._tick_at = deadline
            self.agenda.at(ticks(deadline), Turn.BOARD, -1, self._tick)

    def _tick(self, now: int) -> None:
        if seconds(now) >= self._tick_at and not self.is_over:
            self._tick_at = math.inf
            self._apply(now, self.pool.tick(seconds(now)))

    def beat_due(self, now: int, replica: Replica) -> None:
        beat = replica.beat(now)
        self.agenda.at(now + self._beat_hop, Turn.BOARD, replica.number, partial(self._beat, replica, beat))

    def _beat(self, replica: Replica, beat: Beat, now: int) -> None:
        reply, changes = self.pool.beat(seconds(now), beat)
        self._apply(now, changes)

        def told(at: int) -> None:
            if not replica.dead:
                replica.told(at, beat, reply)

        self.agenda.at(now + self._beat_hop, Turn.ENGINE, replica.number, told)

    # ---- replicas ---------------------------------------------------------------------------------------------------------------

    def _bear(self, now: int) -> Replica:
        number, self._num_born = self._num_born, self._num_born + 1
        replica = Replica(
            f"r{number:04d}",
            number,
            self.plan.shape,
            script=self.script,
            agenda=self.agenda,
            listener=self,
            gaps=self.ledger.gaps,
        )
        replica.core.set_weights_version(self._version)
        return replica

    def start(self, now: int, count: int) -> None:
        """Serve starts so many more replicas."""
        self.starting += count
        ready = now + ticks(self.plan.cold_start_s)
        for _ in range(count):
            self._replica_ticks += ready - now
            self.agenda.at(ready, Turn.CONTROL, 0, self._started)

    def _started(self, now: int) -> None:
        self.starting -= 1
        self._serve_with(self._bear(now), now)

    def _serve_with(self, replica: Replica, now: int) -> None:
        self.replicas[replica.name] = replica
        self._members(now)

    def stop(self, now: int, count: int) -> None:
        """Serve takes so many away, the newest first; they finish what they have."""
        for name in list(self.replicas)[-count:] if count else ():
            replica = self.replicas.pop(name)
            replica.draining = True
            if replica.num_live:
                self.draining[name] = replica
            else:
                self._bury(replica)
        self._members(now)

    def _members(self, now: int) -> None:
        shape = self.plan.shape
        facts = {"slots": shape.slots, "cache_tokens": shape.cache_tokens, "step_tokens": shape.max_batch_tokens}
        members = [Member(replica=name, **facts) for name in self.replicas]
        self._apply(now, self.pool.members(seconds(now), members))

    def _bury(self, replica: Replica) -> None:
        self._replica_ticks += self.agenda.now - replica.born_at
        self._busy_ticks += replica.busy_ticks
        self._steps += replica.steps
        replica.dead = True

    def _fail(self, failure: Failure, now: int) -> None:
        """A replica dies. Its streams break at once, and go on elsewhere with the tokens that they have."""
        if failure.replica >= len(self.replicas):
            return
        replica = self.replicas.pop(list(self.replicas)[failure.replica])
        replica.die(now)
        self._bury(replica)
        self._updating = [each for each in self._updating if each[0] is not replica]
        self._apply(now, self.pool.lost(seconds(now), replica.name))
        for request_id in replica.live_ids():
            self._move(now, self._clients[request_id])
        self._members(now)
        self.agenda.at(now + ticks(failure.after_s), Turn.CONTROL, 0, lambda at: self.start(at, 1))

    def _move(self, now: int, client: Client) -> None:
        self._tickets.pop(client.ticket, None)
        self.ledger.moved(client.line)
        client.said = self.script.answers[client.request_id].said
        if client.tries - client.returns > self.plan.max_failovers:
            self._gone(client)
        else:
            self._tell(now + self._door, client, partial(self._ask, client))

    # ---- new weights ------------------------------------------------------------------------------------------------------------

    def _update(self, update: WeightUpdate, now: int) -> None:
        self._version += 1
        idle = not self._updating
        self._updating += [(replica, ticks(update.load_s), self._version) for replica in self.replicas.values()]
        if idle:
            self._update_next(now)

    def _update_next(self, now: int) -> None:
        self._updating = [each for each in self._updating if not (each[0].dead or each[0].draining)]
        if self._updating:
            replica = self._updating[0][0]
            self._apply(now, self.pool.steer(seconds(now), replica.name, False))
            replica.pause(now)

    def paused(self, now: int, replica: Replica) -> None:
        _, load, version = self._updating[0]

        def loaded(at: int) -> None:
            if not replica.dead:
                replica.resume(at, version)
                self._apply(at, self.pool.steer(seconds(at), replica.name, True))
            self._updating = self._updating[1:]
            self._update_next(at)

        self.agenda.at(now + load, Turn.CONTROL, replica.number, loaded)

    # ---- looking on -------------------------------------------------------------------------------------------------------------

    def _look(self, now: int) -> None:
        """Note how the pool stands; less often, the longer it runs."""
        pool, moments, counters = self.pool, self.ledger.moments, self.pool.counters
        moments.append(
            Moment(
                seconds(now),
                len(self.replicas),
                len(self.replicas) + self.starting,
                pool.num_leases,
                pool.num_waiting,
                counters["prompt_tokens"],
                counters["cached_tokens"],
                counters["refused"],
            )
        )
        if len(moments) >= 2 * _MOMENTS:
            moments[:] = moments[::2]
            self._look_every *= 2
        if not self.is_over:
            self.agenda.at(now + self._look_every, Turn.CONTROL, 0, self._look)


@contextmanager
def _few_collections() -> Generator[None]:
    """Runs leave next to no cycles behind, but many objects that stay: looking through them again and again finds nothing."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def simulate(plan: PoolPlan, workload: Workload, policy: Callable[[Fleet], Policy] | None = None) -> Outcome:
    """Run `workload` through the pool that `plan` describes. Equal arguments give equal outcomes, to the last byte."""
    return Fleet(plan, workload, policy).run()
