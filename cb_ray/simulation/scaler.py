"""Serve's controller in simulated time: it gathers what replicas report and asks `desired_replicas`. Owns `Scaler`.

As in production (`serving/app.py`, `serving/autoscaling.py`): a replica reports every `METRICS_S`, what it says is what the Board last
told it, the controller takes means over `LOOK_BACK_S` and decides every `CONTROL_S`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ..routing.autoscaling import Fleet as FleetState
from ..routing.autoscaling import ScaleMemory, ScaleTargets, desired_replicas
from .agenda import Turn, seconds, ticks

if TYPE_CHECKING:
    from .fleet import Fleet

METRICS_S, LOOK_BACK_S, CONTROL_S = 1.0, 2.0, 0.1
QUEUED_S = 5.0  # what a request that waits for a first replica is reckoned at


class Scaler:
    """Puts itself on the fleet's agenda."""

    def __init__(self, fleet: Fleet, targets: ScaleTargets) -> None:
        self._fleet, self._targets, self._memory = fleet, targets, ScaleMemory()
        self._reports: dict[str, deque[dict[str, float]]] = {}
        fleet.agenda.at(ticks(METRICS_S), Turn.CONTROL, 1, self._gather)
        fleet.agenda.at(ticks(CONTROL_S), Turn.CONTROL, 2, self._decide)

    def _gather(self, now: int) -> None:
        kept = max(1, round(LOOK_BACK_S / METRICS_S))
        replicas = self._fleet.replicas
        self._reports = {name: reports for name, reports in self._reports.items() if name in replicas}
        for name, replica in replicas.items():
            replica.settle(now)
            reply, live = replica.reporter.reply, replica.num_live
            known = reply if live else None
            report = {
                "owed_s": known.owed_s if known else 0.0,
                "line_s": known.line_s if known else 0.0,
                "num_requests": float(live + (known.num_waiting if known else 0)),
                "cache_used": replica.stats.cache_used,
            }
            self._reports.setdefault(name, deque(maxlen=kept)).append(report)
        if not self._fleet.is_over:
            self._fleet.agenda.at(now + ticks(METRICS_S), Turn.CONTROL, 1, self._gather)

    def _decide(self, now: int) -> None:
        fleet = self._fleet
        running, target = len(fleet.replicas), len(fleet.replicas) + fleet.starting
        owed_s = sum(self._means("owed_s")) + max(self._means("line_s"), default=0.0)
        queued = fleet.pool.num_waiting if not running else 0  # seen by the handle that waits for a first replica
        state = FleetState(
            replicas=running,
            target=target,
            owed_s=max(owed_s, queued * QUEUED_S),
            num_requests=round(max(sum(self._means("num_requests")), queued)),
            cache_used=max(self._means("cache_used"), default=0.0),
        )
        wanted, self._memory = desired_replicas(state, self._targets, self._memory, seconds(now))
        if wanted > target:
            fleet.start(now, wanted - target)
        elif wanted < running and not fleet.starting:
            fleet.stop(now, running - wanted)
        if not fleet.is_over:
            fleet.agenda.at(now + ticks(CONTROL_S), Turn.CONTROL, 2, self._decide)

    def _means(self, name: str) -> list[float]:
        return [sum(each[name] for each in reports) / len(reports) for reports in self._reports.values()]
