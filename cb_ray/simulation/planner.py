"""How many replicas, which scaling, how long a line: found by trying. Owns `capacity`, `smallest_pool`, `compare`, `choose_scaling`.

Each try is a whole run of the workload through the simulator. Knows no files and no terminal: `tried` is told of every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ..errors import ConfigError
from ..routing.autoscaling import ScaleTargets
from .fleet import Fleet, simulate
from .ledger import Outcome
from .oracle import Oracle
from .settings import PoolPlan
from .summary import Slo, Summary, summarise
from .workload import Workload

POLICIES = ("prefix_aware", "least_work", "power_of_two", "round_robin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run. `label` says what was different about it."""

    label: str
    plan: PoolPlan
    summary: Summary
    outcome: Outcome = field(repr=False)


Tried = Callable[[Trial], None]


def attempt(
    label: str, plan: PoolPlan, workload: Workload, slo: Slo, warm_up_s: float, tried: Tried, *, oracle: bool = False
) -> Trial:
    """Run `workload` once."""
    outcome = Fleet(plan, workload, Oracle).run() if oracle else simulate(plan, workload)
    trial = Trial(label=label, plan=plan, summary=summarise(outcome, slo, warm_up_s), outcome=outcome)
    tried(trial)
    return trial


def capacity(plan: PoolPlan, workload: Workload) -> float:
    """Requests per second that the pool serves when all of `workload` comes at once: of the middle, where it is full."""
    plan = replace(plan, max_queue_size=0, scaling=None, failures=(), updates=())
    outcome = simulate(plan, workload.at_rate(1e6))
    ends = sorted([line.at_s + line.e2e_s for line in outcome.ledger.lines() if not math.isnan(line.e2e_s)])
    first, last = len(ends) // 10, len(ends) * 7 // 10
    if last <= first:
        raise ConfigError(f"{len(ends)} requests are too few to say what the pool can do; give at least 20", "workload")
    return (last - first) / max(1e-9, ends[last] - ends[first])


def smallest_pool(
    plan: PoolPlan, workload: Workload, slo: Slo, *, most: int, warm_up_s: float = 0.0, tried: Tried = lambda trial: None
) -> Trial | None:
    """The pool with the fewest replicas that keeps `slo`, by doubling and halving; None when `most` replicas do not.

    Takes it that more replicas are never worse.
    """

    def run(replicas: int) -> Trial:
        return attempt(f"{replicas} replicas", replace(plan, replicas=replicas, scaling=None), workload, slo, warm_up_s, tried)

    low, best = 0, None  # `low` replicas are too few
    count = max(1, min(plan.replicas, most))
    while best is None:
        trial = run(count)
        if trial.summary.meets_slo:
            best = trial
        elif count == most:
            return None
        else:
            low, count = count, min(most, 2 * count)
    while best.plan.replicas - low > 1:
        trial = run((low + best.plan.replicas) // 2)
        if trial.summary.meets_slo:
            best = trial
        else:
            low = trial.plan.replicas
    return best


def compare(
    plan: PoolPlan,
    workload: Workload,
    slo: Slo,
    *,
    policies: Iterable[str] = POLICIES,
    warm_up_s: float = 0.0,
    tried: Tried = lambda trial: None,
) -> list[Trial]:
    """One run for each policy, and one for an oracle."""
    trials = [attempt(policy, replace(plan, policy=policy), workload, slo, warm_up_s, tried) for policy in policies]
    return [*trials, attempt("oracle", plan, workload, slo, warm_up_s, tried, oracle=True)]


def choose_scaling(
    plan: PoolPlan,
    workload: Workload,
    slo: Slo,
    *,
    drains_s: Iterable[float] = (1.0, 2.0, 5.0, 10.0),
    warm_up_s: float = 0.0,
    tried: Tried = lambda trial: None,
) -> Trial | None:
    """Scaling between one replica and half as many again as `plan` has: the target that keeps `slo` with least replica time."""
    best: Trial | None = None
    for drain_s in drains_s:
        targets = ScaleTargets(min_replicas=1, max_replicas=math.ceil(1.5 * plan.replicas), target_drain_s=drain_s)
        trial = attempt(f"scaled, target_drain_s {drain_s:g}", replace(plan, scaling=targets), workload, slo, warm_up_s, tried)
        if trial.summary.meets_slo and (best is None or trial.summary.replica_s < best.summary.replica_s):
            best = trial
    return best


def longest_line(trial: Trial, slo: Slo) -> int:
    """A `max_queue_size` with which those who wait still have a first token in time: by Little's law, what the pool serves within
    the time that is left of `slo` after a median first token. 0 (no bound) without a promise."""
    if math.isinf(slo.ttft_s):
        return 0
    summary = trial.summary
    if not summary.served:
        raise ConfigError("nobody was served in this run, so there is no rate to reckon a waiting line from", "replicas")
    per_second = summary.served / max(1e-9, summary.duration_s) / max(summary.utilisation, 1e-3)
    return max(1, round(per_second * max(0.0, slo.ttft_s - summary.ttft_p50_s)))
