"""Serve's autoscaling policy: how many Engine replicas, by the work that is owed.

Owns `DrainTime`, which Serve's controller makes once and calls at every control tick; it must be quick. The decision is
`routing.autoscaling.desired_replicas`, the function that the simulator uses too; this reads Serve's numbers and keeps the memory.
"""

from __future__ import annotations

from typing import Any

from ..routing.autoscaling import Fleet, ScaleMemory, ScaleTargets, desired_replicas

_QUEUED_S = 5.0  # what a request that waits for a first replica is reckoned at


class DrainTime:
    """Keyword arguments are the fields of `ScaleTargets`."""

    def __init__(self, **targets: Any) -> None:
        self._targets = ScaleTargets(**targets)
        self._memory = ScaleMemory()

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        metrics: dict[str, dict[Any, float]] = context.aggregated_metrics or {}
        running = set(context.running_replicas or ())

        def of(name: str) -> list[float]:
            """The values of replicas that still run."""
            return [value for replica, value in (metrics.get(name) or {}).items() if not running or replica in running]

        owed_s = sum(of("owed_s")) + max(of("line_s"), default=0.0)
        queued, requests = float(context.total_queued_requests or 0), float(context.total_num_requests or 0)
        if not context.current_num_replicas:
            owed_s = max(owed_s, queued * _QUEUED_S)
        fleet = Fleet(
            replicas=context.current_num_replicas,
            target=context.target_num_replicas,
            owed_s=owed_s,
            num_requests=round(max(requests, queued)),
            cache_used=max(of("cache_used"), default=0.0),
        )
        wanted, self._memory = desired_replicas(fleet, self._targets, self._memory, context.current_time)
        return wanted, {}
