"""Which weights each replica has and which it should have: one update at a time, replica by replica, all of them or none.

Owns `WeightsBook`. May know no clock, no network and no tensor: what replicas report comes in, and orders for them go out.

    begin ─▶ checking ──all agree──▶ loading ──all have it──▶ wanted = target
                │ one refuses           │ one refuses
                ▼                       ▼
             refused               going back ──all have the old ones──▶ refused

    rolling       one replica at a time is taken out of the pool, loads, and comes back
    all at once   all of them together, for training loops that want no token of the old weights any more

A replica takes requests only while its weights are those that are wanted, or one of the two between which an update moves. Whoever
comes in late, or comes back, is brought there first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ..errors import InvalidRequestError, NoReplicaError, UpdateRunningError, WeightsError

Mode = Literal["rolling", "all_at_once"]
InFlight = Literal["keep", "recompute", "finish"]
Kind = Literal["check", "load", "retire", "pause", "resume"]  # the last two are the Board's, outside any update
Phase = Literal["checking", "loading", "going back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a replica is to do next. `number` is unique; its report names it. Who is to `retire` lets itself be replaced."""

    number: int
    replica: str
    kind: Kind
    version: int
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of an order. `error` is why it was refused; the replica has then the weights it had before."""

    number: int
    error: Exception | None = None
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An update is over. `error`: why the old weights are wanted still."""

    version: int
    fingerprint: str
    replicas: tuple[str, ...]
    error: Exception | None = None


@dataclass(slots=True)
class _Replica:
    version: int
    fingerprint: str
    heard_at: float
    member: bool = False  # Serve counts it as running
    order: Order | None = None
    checked: bool = False
    going_off: bool = False  # its turn has come; its streams may be ending still
    unfit: bool = False  # it refused what the others have


@dataclass(slots=True)
class _Update:
    version: int
    before: int
    mode: Mode
    in_flight: InFlight
    phase: Phase
    fingerprint: str = ""
    fingerprint_before: str = ""
    error: Exception | None = None
    missing: int = 0  # replicas that died while they loaded and were not replaced yet …
    missing_until: float = 0.0  # … for which is waited so long


class WeightsBook:
    """See the module. Each public method is one transition; `take_orders`, `take_ended` and `off` say what came of it.

    `busy` tells whether requests are still with a replica. Times are seconds of any clock.
    """

    def __init__(
        self, busy: Callable[[str], bool] = lambda _: False, *, timeout_s: float = 30.0, patience_s: float = 300.0
    ) -> None:
        self.wanted = 0
        self.fingerprint = ""
        self._busy, self._timeout_s, self._patience_s = busy, timeout_s, patience_s
        self._replicas: dict[str, _Replica] = {}
        self._update: _Update | None = None
        self._numbers, self._newest = 0, 0  # the highest version that ever was, also of updates that were taken back
        self._orders: list[Order] = []
        self._ended: list[Ended] = []

    # ---- what there is to see -----------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase | None:
        """Of the update under way; None: there is none."""
        return None if self._update is None else self._update.phase

    @property
    def target(self) -> int:
        """What everybody is being brought to, and what a replica that starts now had better load."""
        update = self._update
        return update.version if update is not None and update.phase == "loading" else self.wanted

    @property
    def versions(self) -> dict[str, int]:
        return {name: replica.version for name, replica in self._replicas.items()}

    @property
    def off(self) -> frozenset[str]:
        """Replicas that must not be given requests now."""
        return frozenset(name for name, replica in self._replicas.items() if not self._may_serve(replica))

    @property
    def needed(self) -> set[int]:
        """Versions that somebody may still have to load."""
        update = self._update
        return {self.wanted} if update is None else {self.wanted, update.version, update.before}

    @property
    def deadline(self) -> float:
        """When `advance` is due at the latest."""
        update = self._update
        times = [replica.heard_at + self._silence(replica) for replica in self._replicas.values() if not replica.member]
        if update is not None and update.missing:
            times.append(update.missing_until)
        return min(times, default=math.inf)

    def take_orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def take_ended(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    # ---- transitions --------------------------------------------------------------------------------------------------------

    def begin(self, now: float, *, version: int | None = None, mode: Mode = "rolling", in_flight: InFlight = "keep") -> int:
        """Start an update; returns the version it leads to, the next one unless it is given.

        Raises UpdateRunningError beside another one, NoReplicaError when there is nobody to check the weights, InvalidRequestError
        for a version that was used before.
        """
        if self._update is not None:
            raise UpdateRunningError(f"weights version {self._update.version}")
        if not self._replicas:
            raise NoReplicaError("no replica runs that could check the weights; try again when one is up")
        version = self._newest + 1 if version is None else version
        if version <= self._newest:
            raise InvalidRequestError(
                f"weights_version must rise: the pool has seen {self._newest}, got {version}", param="weights_version"
            )
        self._newest = version
        self._update = _Update(version, self.wanted, mode, in_flight, "checking", fingerprint_before=self.fingerprint)
        for replica in self._replicas.values():
            replica.checked = False
        self._go_on(now)
        return version

    def attach(self, now: float, name: str, version: int, fingerprint: str) -> None:
        """A replica says what it has: when it starts, and whenever it finds the Board anew."""
        known = self._replicas.get(name)
        if known is None:
            self._replicas[name] = _Replica(version, fingerprint, now)
        else:
            known.version, known.fingerprint, known.heard_at = version, fingerprint, now
            known.order, known.going_off = None, False
        self._newest = max(self._newest, version)
        if self._update is None and version > self.wanted:
            # The Board is new and the replica is not: what it has was wanted. The others follow, one at a time.
            self._update = _Update(version, self.wanted, "rolling", "keep", "loading", fingerprint, self.fingerprint)
        self._go_on(now)

    def inherit(self, version: int, fingerprint: str) -> None:
        """What was wanted before there was this book. Only while nobody has attached."""
        assert not self._replicas, "replicas say for themselves what they have"
        self.wanted, self.fingerprint, self._newest = version, fingerprint, max(self._newest, version)

    def requeue(self, order: Order) -> None:
        """An order that cannot be handed over yet."""
        self._orders.append(order)

    def heard(self, now: float, name: str) -> bool:
        """A replica asks for orders. False: it is not known here and should attach."""
        replica = self._replicas.get(name)
        if replica is not None:
            replica.heard_at = now
        return replica is not None

    def report(self, now: float, name: str, report: Report) -> None:
        """What became of an order. One that is no longer outstanding is ignored."""
        replica = self._replicas.get(name)
        if replica is None or replica.order is None or replica.order.number != report.number:
            return
        order, replica.order, replica.heard_at = replica.order, None, now
        if order.kind == "check":
            replica.checked = True
            self._checked(name, order, report)
        else:
            self._loaded(name, replica, order, report)
        self._go_on(now)

    def members(self, now: float, names: Iterable[str]) -> None:
        """Serve's list of running replicas. Who was on it and is no longer is gone."""
        names = set(names)
        for name, replica in list(self._replicas.items()):
            if name in names:
                self._found(replica)
            elif replica.member:
                self._gone(now, name)
        self._go_on(now)

    def lost(self, now: float, name: str) -> None:
        """This replica has died."""
        if name in self._replicas:
            self._gone(now, name)
            self._go_on(now)

    def advance(self, now: float) -> None:
        """Time has passed, or a replica has become idle."""
        for name, replica in list(self._replicas.items()):
            if not replica.member and replica.heard_at + self._silence(replica) <= now:
                self._gone(now, name)  # it died before Serve counted it
        self._go_on(now)

    # ---- inside -------------------------------------------------------------------------------------------------------------

    def _may_serve(self, replica: _Replica) -> bool:
        update = self._update
        right = {self.wanted} if update is None or update.phase == "checking" else {update.version, update.before}
        loading = replica.order is not None and replica.order.kind == "load"
        return replica.version in right and not loading and not replica.going_off and not replica.unfit

    def _silence(self, replica: _Replica) -> float:
        """How long nothing need be heard of a replica that Serve does not count yet: while it loads it says nothing."""
        return self._timeout_s if replica.order is None else self._patience_s

    def _counted(self) -> list[_Replica]:
        """Those an update waits for: the running ones. Who is only starting may be gone without anybody saying so."""
        running = [replica for replica in self._replicas.values() if replica.member]
        return running or list(self._replicas.values())

    def _found(self, replica: _Replica) -> None:
        if not replica.member:
            replica.member = True
            if self._update is not None:
                self._update.missing = max(0, self._update.missing - 1)

    def _gone(self, now: float, name: str) -> None:
        replica, update = self._replicas.pop(name), self._update
        self._orders = [order for order in self._orders if order.replica != name]
        if update is not None and replica.member and (replica.order is not None and replica.order.kind == "load"):
            update.missing, update.missing_until = update.missing + 1, now + self._patience_s

    def _checked(self, name: str, order: Order, report: Report) -> None:
        update = self._update
        if update is None or update.phase != "checking" or order.version != update.version:
            return
        update.error = update.error or report.error or self._other_weights(name, update, report.fingerprint)

    def _loaded(self, name: str, replica: _Replica, order: Order, report: Report) -> None:
        update = self._update
        wanted = self.fingerprint if update is None or update.phase != "loading" else update.fingerprint
        if report.error is None:
            replica.version, replica.fingerprint = order.version, report.fingerprint
        if update is None or order.version != self._goal(update):
            replica.unfit = replica.unfit or report.error is not None
        elif update.phase == "loading":
            error = report.error or self._other_weights(name, update, report.fingerprint)
            if error is not None and update.error is None:
                update.error, update.phase = error, "going back"
        else:
            different = bool(wanted and report.fingerprint and wanted != report.fingerprint)
            replica.unfit = report.error is not None or different
        replica.going_off = False

    def _other_weights(self, name: str, update: _Update, found: str) -> Exception | None:
        """Two replicas that read one source must have read the same."""
        if not found:
            return None
        update.fingerprint = update.fingerprint or found
        if found == update.fingerprint:
            return None
        return WeightsError(
            f"replica {name} read other weights from this source than the others did ({found}, {update.fingerprint}); it must give "
            "the same everywhere: the same files on each machine, a fixed revision, a callable without chance"
        )

    def _goal(self, update: _Update) -> int:
        return update.before if update.phase == "going back" else update.version

    def _go_on(self, now: float) -> None:
        """Give every order that can be given now; end the update when nothing is left to be done."""
        update = self._update
        if update is not None and update.phase == "checking":
            self._check(update)
        update = self._update
        if update is not None and update.phase != "checking":
            self._bring(now, update, self._goal(update))
        for name, replica in self._replicas.items():
            if replica.order is not None:
                continue
            if replica.unfit:
                self._give(name, replica, "retire", self.wanted)
            elif self._update is None and replica.version != self.wanted:  # they serve nobody, so they need not take turns
                self._give(name, replica, "load", self.wanted, recompute=True)

    def _check(self, update: _Update) -> None:
        for name, replica in self._replicas.items():
            if not replica.checked and replica.order is None and update.error is None:
                self._give(name, replica, "check", update.version)
        if any(replica.order is not None and not replica.unfit for replica in self._counted()):
            return
        if update.error is not None or not self._replicas:
            update.error = update.error or NoReplicaError("all replicas have gone while they checked the weights")
            self._finish(update, update.before, update.fingerprint_before)
        else:
            update.phase = "loading"

    def _bring(self, now: float, update: _Update, goal: int) -> None:
        for replica in self._replicas.values():
            if replica.version == goal and not self._loads(replica):
                replica.going_off = False  # the update went back before this one's streams had ended: it has what is wanted
        left = {name: replica for name, replica in self._replicas.items() if replica.version != goal and not replica.unfit}
        serving = [replica for replica in left.values() if self._may_serve(replica)]
        for name, replica in left.items():
            if replica.order is not None:
                continue
            if self._may_serve(replica):
                if update.mode == "rolling" and not self._has_turn(now, update, replica, serving):
                    continue
                replica.going_off = True
            if replica.going_off and update.in_flight == "finish" and self._busy(name):
                continue
            self._give(name, replica, "load", goal, recompute=update.in_flight == "recompute" or goal < replica.version)
        if not any(self._loads(r) or r.going_off or (r.version != goal and not r.unfit) for r in self._counted()):
            fingerprint = update.fingerprint_before if update.error is not None else update.fingerprint
            self._finish(update, goal, fingerprint)

    def _has_turn(self, now: float, update: _Update, replica: _Replica, serving: list[_Replica]) -> bool:
        """Never two at a time, and none while one is missing that died loading, unless nothing comes in its place."""
        if update.missing and now < update.missing_until:
            return False
        if any(other.going_off for other in self._replicas.values()):
            return False
        return replica.member or not any(other.member for other in serving)

    def _loads(self, replica: _Replica) -> bool:
        return replica.order is not None and replica.order.kind == "load"

    def _give(self, name: str, replica: _Replica, kind: Kind, version: int, recompute: bool = False) -> None:
        self._numbers += 1
        replica.order = Order(number=self._numbers, replica=name, kind=kind, version=version, recompute=recompute)
        self._orders.append(replica.order)

    def _finish(self, update: _Update, version: int, fingerprint: str) -> None:
        self.wanted, self.fingerprint, self._update = version, fingerprint, None
        have = sorted(name for name, replica in self._replicas.items() if replica.version == version and not replica.unfit)
        self._ended.append(Ended(version=version, fingerprint=fingerprint, replicas=tuple(have), error=update.error))
