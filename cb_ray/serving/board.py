"""The Board: the one actor per Engine deployment that decides who is granted which replica. A clock and mailboxes round a `Pool`.

Owns `Board`. All thinking is in `routing/pool.py`; this adds the monotonic clock, one timer at the pool's deadline, and a mailbox
per holder (a process that makes requests). The Board is on the path of a request, never on the path of its tokens.

    caller's process                         Board                                engine replica
    acquire(ask) ──────────────────▶ Granted │ Queued │ Refused
    room(heard) ──────(waits)──────▶ full, or not any more; for a door that refuses by itself meanwhile
    listen(holder) ───(waits)──────▶ grants of those who were queued
    release(ticket) ───────────────▶ next in line is granted   ◀───────────────── beat(live, ended, pages, …)

A holder listens for as long as it has anything in the pool. One open call per process carries all its grants, renews its leases
when it comes round, and tells it at once when the Board dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray import serve

from ..digests import page_digests
from ..routing.loads import Ask, RoutingDecision
from ..routing.members import Beat, BeatReply, Member
from ..routing.pool import Pool, PoolLimits
from ..routing.replies import Changes, Expired, Granted, Queued, Refused, Room
from ..routing.weights import InFlight, Mode, Order, Report
from .board_weights import BoardWeights, Current, PoolWeights, Stored
from .replica_router import other_boards, watch_replicas

logger = logging.getLogger("ray.serve")

_DECISIONS_KEPT = 2048
_SEEN_S = 0.25  # who is told more often sees no more
_OFFER_S = 0.05  # so long is a place kept from doors that were not told of it: two that come for one are one refused late
_DECISION_S = (5e-05, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1.0)
_WAIT_S = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(slots=True)
class _Mailbox:
    """What a holder has not heard yet. Whoever fills it sets `filled`."""

    news: list[Granted | Expired] = field(default_factory=list["Granted | Expired"])
    filled: asyncio.Event = field(default_factory=asyncio.Event)


class Buckets:
    """A histogram as plain counts: values of at most each bound, and those above all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, how many are not above it), as Prometheus has it."""
        return list(zip([*map(str, self._bounds), "+Inf"], itertools.accumulate(self._counts), strict=True))


class BoardState:
    """The Board without Ray: usable in any event loop, with any clock."""

    def __init__(self, limits: PoolLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool = Pool(limits)
        self._clock = clock
        self._mailboxes: dict[str, _Mailbox] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0  # the deadline that the timer is for
        self._asked: dict[str, str] = {}  # ticket of one who waits → its request
        self._times = {"decision_s": Buckets(_DECISION_S), "line_wait_s": Buckets(_WAIT_S)}
        self.decisions: OrderedDict[str, Granted] = OrderedDict()  # the last ones, by request
        self._changes = 0
        self._telling: asyncio.TimerHandle | None = None
        self._news: asyncio.Event | None = None  # there while somebody watches
        self._words: dict[asyncio.Future[None], bool] = {}  # doors that wait for another word than this: the pool is full
        self._num_told = 0  # doors that were told of a place and have not come for it
        self._offer: asyncio.TimerHandle | None = None  # how long they have for that …
        self._tells_all = False  # … which is over

    @property
    def now(self) -> float:
        return self._clock()

    def acquire(self, ask: Ask) -> Granted | Queued | Refused:
        began = time.perf_counter()
        answer = self.pool.acquire(self.now, ask)
        self._times["decision_s"].observe(time.perf_counter() - began)
        if isinstance(answer, Granted):
            self._remember(ask.request_id, answer)
        elif isinstance(answer, Queued):
            self._asked[ask.ticket] = ask.request_id
        self._arm()
        return answer

    def release(self, ticket: str, rejected: bool = False) -> None:
        self._asked.pop(ticket, None)
        self.apply(self.pool.release(self.now, ticket, rejected))

    def reserve(self, request_id: str, holder: str = "") -> tuple[Refused | None, Room]:
        """A place, or a refusal; and how the pool looks since."""
        refused = self.pool.reserve(self.now, request_id, holder)
        if refused is None:
            self._num_told = max(0, self._num_told - 1)
        self._arm()
        return refused, self.pool.room(self.now)

    def unreserve(self, request_id: str) -> None:
        self.pool.unreserve(request_id)
        self._arm()

    async def room(self, heard: bool | None, promises: int, refused: int) -> Room:
        """Whether the pool is full: at once if nothing or no longer so is what was `heard`, else when it has changed, or after a third
        of the lease timeout. Of places as many doors are told as there are places, in turn; others when nobody has come for them."""
        if heard is not None and (heard or not self.pool.is_full(self.now)):
            word = asyncio.get_running_loop().create_future()
            self._words[word] = heard
            self._look()
            try:
                async with asyncio.timeout(self.pool.limits.lease_timeout_s / 3):
                    await word
            except TimeoutError:
                pass
            finally:
                self._words.pop(word, None)
        return self.pool.room(self.now, promises, refused)

    async def listen(self, holder: str, held: Sequence[tuple[str, str, str]] = ()) -> list[Granted | Expired]:
        """News for `holder`: at once if there is some, else when there is, else nothing after a third of the lease timeout."""
        self.pool.renew(self.now, holder, held)
        self._arm()
        mailbox = self._mailboxes.setdefault(holder, _Mailbox())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.pool.limits.lease_timeout_s / 3):
                await mailbox.filled.wait()
        news, mailbox.news = mailbox.news, []
        mailbox.filled.clear()
        if not news and self._mailboxes.get(holder) is mailbox:
            del self._mailboxes[holder]
        return news

    async def watch(self, seen: int) -> int:
        """How many changes there have been, once they are not `seen` any more; for eyes, so several in a quarter second are one."""
        if seen < 0:
            return self._changes
        if self._changes != seen:
            self._tell_soon()
        self._news = self._news or asyncio.Event()
        await self._news.wait()
        return self._changes

    def _tell_soon(self) -> None:
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(_SEEN_S, self._tell)

    def _tell(self) -> None:
        self._telling = None
        if self._news is not None:
            self._news.set()
            self._news = None

    def apply(self, changes: Changes) -> None:
        """Put what changed into the mailboxes of those it concerns, and set the timer."""
        for news in (*changes.granted, *changes.expired):
            request_id = self._asked.pop(news.ticket, "")
            if isinstance(news, Granted):
                self._remember(request_id, news)
            if isinstance(news, Expired) and news.reason == "holder_gone":
                self._mailboxes.pop(news.holder, None)
                continue
            mailbox = self._mailboxes.setdefault(news.holder, _Mailbox())
            mailbox.news.append(news)
            mailbox.filled.set()
        self._arm()

    def snapshot(self) -> dict[str, object]:
        """The pool's counts, and how long decisions and waiting took."""
        times = {name: {"buckets": times.cumulative(), "sum": times.total} for name, times in self._times.items()}
        return {**self.pool.snapshot(self.now), "times": times}

    def _remember(self, request_id: str, granted: Granted) -> None:
        self._times["line_wait_s"].observe(granted.waited_s)
        self.decisions[request_id] = granted
        while len(self.decisions) > _DECISIONS_KEPT:
            self.decisions.popitem(last=False)

    def _arm(self) -> None:
        """Whoever watches or waits is told; one timer, at the pool's deadline; none while there is nothing to wait for."""
        self._changes += 1
        if self._news is not None:
            self._tell_soon()
        self._look()
        deadline = self.pool.deadline
        if self._timer is not None:
            if self._due_at <= deadline:
                return
            self._timer.cancel()
            self._timer = None
        if deadline < float("inf"):
            self._due_at = deadline
            self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - self.now), self._tick)

    def _look(self) -> None:
        """Doors that wait for the pool to be full, or not to be any more, are told when it has come to that."""
        if not (self._words or self._num_told or self._tells_all):
            return
        free = self.pool.free_places(self.now)
        if not free:
            self._num_told, self._tells_all = 0, False
            if self._offer is not None:
                self._offer.cancel()
                self._offer = None
        waiting = [word for word, heard in self._words.items() if heard is bool(free)]
        if free and not self._tells_all:
            waiting = waiting[: max(0, free - self._num_told)]
            self._num_told += len(waiting)
            if self._num_told and self._offer is None:
                self._offer = asyncio.get_running_loop().call_later(_OFFER_S, self._tell_all)
        for word in waiting:
            del self._words[word]
            if not word.done():
                word.set_result(None)

    def _tell_all(self) -> None:
        """The doors that were told of places have not come for them."""
        self._offer, self._tells_all = None, True
        self._look()

    def _tick(self) -> None:
        self._timer = None
        self.apply(self.pool.tick(self.now))


class BoardActor:
    """The actor's methods: all of them one transition of the pool, on one event loop, so nothing needs a lock."""

    def __init__(self) -> None:
        self._state = BoardState(PoolLimits())
        self._pool = self._state.pool
        self._is_new = True  # nobody has told it its limits; they are no arguments, since changing those restarts all replicas
        self._name = ray.get_runtime_context().get_actor_name() or ""
        self._has_replicas, self._born = False, time.time()
        here = serve.get_deployment_actor_context().deployment_id
        self._weights = BoardWeights(
            self._pool,
            clock=lambda: self._state.now,
            apply=self._state.apply,
            peers=lambda: other_boards(here.app_name, here.name, self._name),
        )
        self._watch = watch_replicas(self._set_members)
        gc.freeze()  # what was imported stays: looking through it would keep all who ask waiting, now and then

    async def hello(self) -> str:
        """The name under which this Board is found."""
        return self._name

    async def standing(self) -> tuple[bool, float]:
        """Whether replicas of this Board run, and when it was made: who is in charge while there are two."""
        return self._has_replicas, self._born

    async def acquire(self, ask: Ask) -> Granted | Queued | Refused:
        return self._state.acquire(ask)

    async def release(self, ticket: str, rejected: bool = False) -> None:
        self._state.release(ticket, rejected)
        self._weights.advance()

    async def reserve(self, request_id: str, holder: str) -> tuple[Refused | None, Room]:
        return self._state.reserve(request_id, holder)

    async def unreserve(self, request_id: str) -> None:
        self._state.unreserve(request_id)

    async def room(self, heard: bool | None, promises: int, refused: int) -> Room:
        return await self._state.room(heard, promises, refused)

    async def listen(self, holder: str, held: Sequence[tuple[str, str, str]] = ()) -> list[Granted | Expired]:
        return await self._state.listen(holder, held)

    async def lost(self, replica: str) -> None:
        self._state.apply(self._pool.lost(self._state.now, replica))
        self._weights.lost(replica)

    async def steer(self, replica: str, accepting: bool) -> None:
        self._state.apply(self._pool.steer(self._state.now, replica, accepting))

    async def beat(self, beat: Beat) -> BeatReply:
        reply, changes = self._pool.beat(self._state.now, beat)
        self._state.apply(changes)
        self._weights.advance()
        return reply

    async def update_weights(self, source: Any, version: int | None, mode: Mode, in_flight: InFlight) -> PoolWeights:
        """Bring the whole pool to other weights (`BoardWeights.update`)."""
        return await self._weights.update(source, version, mode, in_flight)

    async def current_weights(self, model: str) -> Current:
        return await self._weights.current(model)

    async def known_weights(self) -> Current:
        return await self._weights.known()

    async def attach_weights(self, replica: str, has: Current) -> bool:
        return await self._weights.attach(replica, has)

    async def give_weights(self, version: int, source: Stored) -> None:
        await self._weights.give(version, source)

    async def weights_orders(self, replica: str, reports: Sequence[Report]) -> list[tuple[Order, Any]] | None:
        return await self._weights.orders(replica, reports)

    async def hold(self, token: str) -> None:
        await self._weights.hold(token)

    async def keep(self, token: str) -> bool:
        return await self._weights.keep(token)

    async def let_go(self, token: str) -> None:
        await self._weights.let_go(token)

    async def configure(self, limits: PoolLimits, only_if_new: bool = False) -> None:
        """Take new limits without a restart. The page size stays: it is the engines' to say."""
        if only_if_new and not self._is_new:
            return
        self._is_new = False
        limits = replace(limits, page_size=self._pool.limits.page_size)
        if limits != self._pool.limits:
            self._state.apply(self._pool.configure(self._state.now, limits))

    async def explain(self, token_ids: Sequence[int], cache_salt: str = "") -> RoutingDecision | None:
        """Where a prompt would go now, and why; nothing is reserved."""
        digests = page_digests(token_ids, self._pool.limits.page_size, cache_salt)
        ask = Ask(ticket="", request_id="dry run", num_tokens=len(token_ids), digests=digests)
        return self._pool.explain(self._state.now, ask)

    async def decision(self, request_id: str) -> Granted | None:
        """What was decided for a request, if that was not long ago."""
        return self._state.decisions.get(request_id)

    async def snapshot(self) -> dict[str, object]:
        book = self._weights.book
        return {
            **self._state.snapshot(),
            "weights": {"wanted": book.wanted, "update": book.phase, "versions": book.versions},
        }

    async def watch(self, seen: int) -> tuple[int, dict[str, object]]:
        """What to ask with next, and the snapshot: once anything has changed since `seen` (-1: at once)."""
        return await self._state.watch(seen), self._pool.snapshot(self._state.now)

    def _set_members(self, replicas: Sequence[tuple[str, dict[str, object]]]) -> None:
        """Serve's own list of running replicas, with what each said of itself.

        While a new version rolls out, replicas of the old one beat to a Board of theirs; the new one grants them by its leases, and
        callers tell it of those that the old Board granted. The old one, which callers have left, ends nobody's streams meanwhile.
        """
        known = [(name, facts) for name, facts in replicas if "slots" in facts]
        mine = [facts for _, facts in known if facts.get("board") == self._name]
        if mine and self._pool.limits.page_size != mine[-1]["page_size"]:
            limits = replace(self._pool.limits, page_size=int(str(mine[-1]["page_size"])))
            self._state.apply(self._pool.configure(self._state.now, limits))
        self._has_replicas = bool(mine)
        members = [
            Member(
                replica=name,
                slots=int(str(facts["slots"])),
                cache_tokens=_optional_int(facts.get("cache_tokens")),
                step_tokens=_optional_int(facts.get("step_tokens")),
            )
            for name, facts in known
        ]
        self._weights.members({name for name, facts in known if facts.get("board") == self._name}, len(mine) < len(known))
        newest = max((facts for _, facts in known), key=_since, default=None)
        self._pool.take_charge(self._state.now, newest is None or newest.get("board") == self._name)
        self._state.apply(self._pool.members(self._state.now, members))


def _since(facts: dict[str, object]) -> float:
    return float(str(facts.get("since", 0.0)))


def _optional_int(value: object) -> int | None:
    return None if value is None else int(str(value))


# One waiting call per process that has requests, and a few short ones: far below what would be queued.
Board: Any = ray.remote(num_cpus=0, max_concurrency=10_000)(BoardActor)  # type: ignore[call-overload]
