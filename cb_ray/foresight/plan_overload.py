"""`cb-ray plan overload`: three times what a pool can do, with clients that obey Retry-After, beside nine tenths of it.

    cb-ray plan overload requests=4000,prompt_tokens=512,answer_tokens=150 --costs costs.json --replicas 4 --max-queue-size 8

What the pool can do is measured first: the rate at which it serves the middle of the workload when all of it comes at once. Then the
workload is sped up or slowed down to nine tenths of that, and to three times that. Says how long the admitted wait for their first
token, from the call that was not refused, and how far Retry-After was off from the time at which a place was there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from ..errors import ConfigError
from ..simulation.planner import Trial, attempt, capacity
from ..simulation.settings import PoolPlan
from ..simulation.summary import Slo
from ..simulation.workload import Workload
from .arguments import add_pool, add_workload, pool_of, slo_of, watched, workload_of

CALM, STORM = 0.9, 3.0
_SLOWER, _ERROR = 1.5, 0.25  # what is promised


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 0 if both promises hold, else 1."""
    parser = argparse.ArgumentParser(prog="cb-ray plan overload", description=(__doc__ or "").split("\n\n")[0])
    add_workload(parser)
    add_pool(parser)
    parser.set_defaults(max_queue_size=8, max_returns=1000)
    given = parser.parse_args(argv)
    if not given.max_queue_size:
        raise ConfigError("without a bound nobody is refused; give --max-queue-size 1 or more", "max_queue_size")
    workload, slo = workload_of(given), slo_of(given)
    plan = pool_of(given, workload.page_size)
    per_second = capacity(plan, watched(workload, "capacity"))
    print(f"workload {workload.name}; {plan.replicas} replicas can do {per_second:.2f} requests per second")
    print(f"at most {plan.max_queue_size} wait; a refused client comes back when told, up to {given.max_returns} times\n")
    print(
        f"{'load':<6}{'refusals':>10}{'admitted p50':>14}{'p99':>9}{'Retry-After off by':>20}{'tokens/s':>10}{'most waiting':>14}"
    )
    trials = [_at(load * per_second, f"{load:g}×", plan, workload, slo) for load in (CALM, STORM)]
    slower, error = _ratio(trials), trials[1].summary.retry_error_p50
    verdicts = {
        f"the admitted wait at most {_SLOWER:g} times as long (p99)": (slower <= _SLOWER, f"{slower:.2f} times"),
        f"Retry-After is off by at most {_ERROR:.0%} (median)": (error <= _ERROR, f"{error:.0%}"),
    }
    print(
        "\n" + "\n".join(f"{'HOLDS' if holds else 'FAILS'}  {promise}: {found}" for promise, (holds, found) in verdicts.items())
    )
    if given.json:
        found = {
            "capacity_per_s": per_second,
            "runs": {trial.label: trial.summary.as_dict() for trial in trials},
            "verdicts": {promise: holds for promise, (holds, _) in verdicts.items()},
        }
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0 if all(holds for holds, _ in verdicts.values()) else 1


def _at(rate: float, label: str, plan: PoolPlan, workload: Workload, slo: Slo) -> Trial:
    trial = attempt(label, plan, watched(workload.at_rate(rate), label), slo, 0.0, lambda trial: None)
    summary = trial.summary
    print(
        f"{label:<6}{summary.refusals:>10}{summary.admitted_ttft_p50_s:>12.3f} s{summary.admitted_ttft_p99_s:>7.3f} s"
        f"{summary.retry_error_p50:>19.0%}{summary.output_tokens_per_s:>11.0f}{summary.most_waiting:>14}"
    )
    return trial


def _ratio(trials: Sequence[Trial]) -> float:
    calm, storm = trials
    return storm.summary.admitted_ttft_p99_s / calm.summary.admitted_ttft_p99_s
