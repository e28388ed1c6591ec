"""The Board's part in a weight update: it keeps the sources, hands orders to replicas, and tells who waits how it ended.

Owns `BoardWeights`, `PoolWeights` (what an update did), `Stored` (weights in the object store), and who holds the whole pool in a
pause. What is ordered when is `routing/weights.py`'s to decide. Replicas keep one call open, in which they report and are given
orders; nothing is polled.

    update ──▶ WeightsBook ──orders──▶ (open call) ──▶ replica: check, load
                    ▲                                      │
                    └────────────────── report ◀───────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray

from ..errors import CbRayError, WeightsError
from ..routing.pool import Pool
from ..routing.replies import Changes
from ..routing.weights import Ended, InFlight, Mode, Order, Report, WeightsBook

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Stored:
    """Weights in the object store. The reference is inside, so that it crosses Ray as itself."""

    ref: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWeights:
    """What an update of the pool led to. `fingerprint` is the same on all `replicas`."""

    version: int
    fingerprint: str
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """What a replica that starts is to load before it serves. Version 0 is the model that its settings name."""

    version: int = 0
    fingerprint: str = ""
    source: Any = None
    model: str = ""


class BoardWeights:
    """`apply` puts what changed in the pool into mailboxes; `peers` gives older Boards of the same deployment, while there are some."""

    def __init__(
        self,
        pool: Pool,
        *,
        clock: Callable[[], float],
        apply: Callable[[Changes], None],
        peers: Callable[[], list[Any]] = list,
        lease_timeout_s: float = 30.0,
    ) -> None:
        self._pool, self._clock, self._apply, self._peers = pool, clock, apply, peers
        self._timeout_s = lease_timeout_s
        self.book = WeightsBook(pool.is_busy, timeout_s=lease_timeout_s)
        self._sources: dict[int, Any] = {}
        self._lost: set[int] = set()  # versions of which the object store has no copy any more
        self._model = ""
        self._mail: dict[str, list[Order]] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._off: frozenset[str] = frozenset()
        self._ends: dict[int, asyncio.Future[Ended]] = {}
        self._mine: set[str] | None = None  # replicas of this Board among the running ones; None: not heard yet
        self._foreign = False  # replicas of another version of the application run as well
        self._attached = asyncio.Event()  # set when somebody attached or the members changed
        self._inherited: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._holds: dict[str, float] = {}  # token → until when it holds
        self._released = asyncio.Event()  # never set: what is waited for is the time
        self._numbers = 0
        self._acknowledged: dict[int, asyncio.Future[None]] = {}
        self._waiting_for: dict[str, list[asyncio.Future[None]]] = {}
        self._going_on: asyncio.Future[None] | None = None

    # ---- what callers do ----------------------------------------------------------------------------------------------------

    async def update(self, source: Any, version: int | None, mode: Mode, in_flight: InFlight) -> PoolWeights:
        """Bring the pool to other weights; returns when all have them. A caller who leaves does not stop it.

        Raises WeightsError when a replica refuses them (all have the old ones then), UpdateRunningError, NoReplicaError, and
        InvalidRequestError for a version that does not rise.
        """
        if self._foreign:
            raise WeightsError("a new version of the application is being rolled out; update the weights when that has ended")
        began = self.book.begin(self._clock(), version=version, mode=mode, in_flight=in_flight)
        end = self._ends[began] = asyncio.get_running_loop().create_future()
        logger.info("Weights version %d: replicas check it (%s, %s).", began, mode, in_flight)
        try:
            self._sources[began] = await own(source)
        except Exception as error:
            self._sources[began] = _Unreadable(error)
        self._settle()
        ended = await asyncio.shield(end)
        if ended.error is not None:
            raise ended.error
        return PoolWeights(version=ended.version, fingerprint=ended.fingerprint, replicas=ended.replicas)

    async def hold(self, token: str) -> None:
        """Let all engines stand still; returns when they do. Until `let_go`, or until nobody has said `keep` for the lease timeout.
        Replicas that start meanwhile stand still as well.
        """
        self._holds[token] = self._clock() + self._timeout_s
        await self._all("pause")
        self._arm()

    async def keep(self, token: str) -> bool:
        """The holder lives. Returns after a third of the lease timeout; False: it holds nothing any more."""
        if token not in self._holds:
            return False
        self._holds[token] = self._clock() + self._timeout_s
        self._arm()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s / 3):
                await self._released.wait()
        return token in self._holds

    async def let_go(self, token: str) -> None:
        """The engines go on when the last holder has let go."""
        if self._holds.pop(token, None) is not None and not self._holds:
            await self._all("resume")

    async def _all(self, kind: Literal["pause", "resume"]) -> None:
        """Every replica obeys, or is gone."""
        acknowledged = [self._tell(replica, kind) for replica in self._mail]
        if acknowledged:
            await asyncio.wait(acknowledged)

    def _tell(self, replica: str, kind: Literal["pause", "resume"]) -> asyncio.Future[None]:
        self._numbers -= 1  # below zero: none of the book's
        done = self._acknowledged[self._numbers] = asyncio.get_running_loop().create_future()
        self._mail[replica].append(Order(number=self._numbers, replica=replica, kind=kind, version=0))
        self._changed[replica].set()
        self._waiting_for.setdefault(replica, []).append(done)
        return done

    # ---- what replicas do ---------------------------------------------------------------------------------------------------

    async def current(self, model: str) -> Current:
        """What a replica over `model` is to load before it attaches. A Board that is new asks those first who know."""
        self._model = model
        await self._remember(model)
        version = self.book.target
        return Current(
            version=version,
            fingerprint=self.book.fingerprint if version == self.book.wanted else "",
            source=self._sources.get(version),
            model=model,
        )

    async def known(self) -> Current:
        """What a newer Board of this deployment takes over."""
        wanted = self.book.wanted
        return Current(version=wanted, fingerprint=self.book.fingerprint, source=self._sources.get(wanted), model=self._model)

    async def attach(self, replica: str, has: Current) -> bool:
        """A replica says which weights it has, and where they can be read. True: it should `give` them, for what was in the object
        store went with the Board that owned it.
        """
        self._model = has.model
        if has.version and has.version not in self._sources:
            self._sources[has.version] = has.source
            if isinstance(has.source, Stored):
                self._lost.add(has.version)
        self._gone(replica)
        self._mail[replica], self._changed[replica] = [], asyncio.Event()
        if self._holds:
            self._tell(replica, "pause")
        self.book.attach(self._clock(), replica, has.version, has.fingerprint)
        self._attached.set()
        self._settle()
        return has.version in self._lost

    async def give(self, version: int, source: Stored) -> None:
        """The weights of a replica, for those that come after it."""
        if version in self._lost:
            self._lost.discard(version)  # one is enough
            self._sources[version] = await own(source)

    async def orders(self, replica: str, reports: Sequence[Report]) -> list[tuple[Order, Any]] | None:
        """The replica's reports, and then the next orders for it, with their sources: when there are some, else none after a third
        of the lease timeout. None: it is not known here, and should attach.
        """
        if not self.book.heard(self._clock(), replica):
            return None
        for report in reports:
            done = self._acknowledged.pop(report.number, None)
            if done is None:
                self.book.report(self._clock(), replica, report)
            elif not done.done():
                done.set_result(None)
        self._settle()
        changed = self._changed[replica]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s / 3):
                await changed.wait()
        changed.clear()
        orders = self._mail.get(replica, [])
        self._mail[replica] = []
        return [(order, self._sources.get(order.version)) for order in orders]

    # ---- what the pool does -------------------------------------------------------------------------------------------------

    def members(self, mine: set[str], foreign: bool) -> None:
        """Serve's list: replicas of this Board, and whether there are others."""
        self._mine, self._foreign = mine, foreign
        self.book.members(self._clock(), mine)
        self._attached.set()
        self._settle()

    def lost(self, replica: str) -> None:
        self.book.lost(self._clock(), replica)
        self._settle()

    def advance(self) -> None:
        """Requests have ended, perhaps."""
        if self.book.phase is not None:
            self.book.advance(self._clock())
            self._settle()

    # ---- inside -------------------------------------------------------------------------------------------------------------

    async def _remember(self, model: str) -> None:
        """A Board that was made anew waits until the replicas that run have told it what they have; one of a new version of the
        application takes over what the old one wanted, if the model is the same.
        """
        if self._inherited is None:
            self._inherited = asyncio.ensure_future(self._inherit(model))
        await asyncio.shield(self._inherited)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                while self._mine is None or self._mine - self.book.versions.keys():
                    self._attached.clear()
                    await self._attached.wait()

    async def _inherit(self, model: str) -> None:
        for peer in await asyncio.to_thread(self._peers):
            with contextlib.suppress(Exception):  # it is on its way out
                known: Current = await peer.known_weights.remote()
                if known.version > self.book.wanted and known.model == model and not self.book.versions:
                    source = await own(known.source)
                    self.book.inherit(known.version, known.fingerprint)
                    self._sources[known.version] = source
                    logger.info("Weights version %d is taken over from the Board before this one.", known.version)

    def _settle(self) -> None:
        """Deliver orders, steer requests away from who must not get any, tell who waits, set the timer."""
        for order in self.book.take_orders():
            if order.kind == "check" and order.version not in self._sources:
                self.book.requeue(order)  # its source is on its way to the object store
                continue
            if order.replica in self._mail:
                self._mail[order.replica].append(order)
                self._changed[order.replica].set()
        off, now = self.book.off, self._clock()
        for replica in off ^ self._off:
            self._apply(self._pool.steer(now, replica, accepting=replica not in off))
        self._off = off
        for ended in self.book.take_ended():
            self._finish(ended)
        for gone in self._mail.keys() - self.book.versions.keys():
            self._gone(gone)
        self._arm()

    def _gone(self, replica: str) -> None:
        """Nobody waits for it any more."""
        self._mail.pop(replica, None)
        changed = self._changed.pop(replica, None)
        if changed is not None:
            changed.set()
        for done in self._waiting_for.pop(replica, ()):
            if not done.done():
                done.set_result(None)

    def _finish(self, ended: Ended) -> None:
        for version in self._sources.keys() - self.book.needed:
            del self._sources[version]
        if ended.error is None:
            logger.info("Weights version %d is on all %d replicas.", ended.version, len(ended.replicas))
        else:
            logger.error("The weights were refused, version %d is on all replicas: %s", ended.version, ended.error)
        for future in self._ends.values():
            if not future.done():
                future.set_result(ended)
        self._ends.clear()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = min([self.book.deadline, *self._holds.values()])
        if deadline < float("inf"):
            self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - self._clock()), self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = self._clock()
        for token in [token for token, until in self._holds.items() if until <= now]:
            logger.warning("Whoever held the pool in a pause is gone; it goes on.")
            self._going_on = asyncio.ensure_future(self.let_go(token))
        self.book.advance(now)
        self._settle()


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """A source that could not be had: every replica is told why, and refuses it."""

    error: Exception

    def __call__(self) -> Any:
        error = self.error
        raise error if isinstance(error, CbRayError) else WeightsError(f"the weights cannot be had: {error}")


async def own(source: Any) -> Any:
    """Weights in the object store that belong to this process, so that they outlive whoever brought them; other sources as they are."""
    if not isinstance(source, Stored):
        return source
    value = await source.ref
    if isinstance(value, Mapping):
        from ..engine.weights_source import pack_weights

        value = await asyncio.to_thread(pack_weights, value)
    return Stored(await asyncio.to_thread(ray.put, value))
