"""`cb-ray plan size`: the smallest pool that keeps a promise, whether scaling would do it for less, and how long its line may be.

cb-ray plan size trace.jsonl --costs costs.json --page-size 512 --ttft 2 --share 0.99 --html plan.html
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from ..simulation.planner import Trial, choose_scaling, longest_line, smallest_pool
from .arguments import add_pool, add_workload, pool_of, slo_of, watched, workload_of
from .report import as_json, print_header, print_trial, write_html


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 0, or 1 when no pool of up to --most replicas keeps the promise."""
    parser = argparse.ArgumentParser(prog="cb-ray plan size", description=(__doc__ or "").split("\n\n")[0])
    add_workload(parser)
    add_pool(parser)
    parser.add_argument("--most", type=int, default=1024, help="replicas that may be tried")
    parser.add_argument("--no-scaling", action="store_true", help="a fixed number of replicas only")
    given = parser.parse_args(argv)
    workload, slo = workload_of(given), slo_of(given)
    plan = pool_of(given, workload.page_size)
    tried: list[Trial] = []

    def tell(trial: Trial) -> None:
        tried.append(trial)
        print_trial(trial)

    print_header(workload, slo)
    found = smallest_pool(plan, watched(workload, "trying"), slo, most=given.most, warm_up_s=given.warm_up, tried=tell)
    advice: dict[str, object] = {}
    if found is None:
        print(f"\nno pool of up to {given.most} replicas keeps this promise")
    else:
        line = longest_line(found, slo)
        scaled = (
            None
            if given.no_scaling
            else choose_scaling(found.plan, watched(workload, "scaling"), slo, warm_up_s=given.warm_up, tried=tell)
        )
        advice = _advice(found, scaled, line)
        print("\n" + _as_yaml(advice))
    if given.json:
        given.json.write_text(json.dumps(as_json(workload, slo, tried, advice), indent=1), encoding="utf-8")
    if given.html:
        best = [trial for trial in tried if trial.summary.meets_slo] or tried
        write_html(given.html, f"Plan for {workload.name}", workload, slo, tried, best[-3:], _as_yaml(advice) if advice else "")
    return 0 if found is not None else 1


def _advice(found: Trial, scaled: Trial | None, line: int) -> dict[str, object]:
    pool: dict[str, object] = {"min_replicas": found.plan.replicas, "max_replicas": found.plan.replicas}
    if scaled is not None and scaled.summary.replica_s < 0.95 * found.summary.replica_s and scaled.plan.scaling is not None:
        targets = scaled.plan.scaling
        pool = {
            "min_replicas": targets.min_replicas,
            "max_replicas": targets.max_replicas,
            "target_drain_s": targets.target_drain_s,
        }
    return {"max_queue_size": line, "routing": {"policy": found.plan.policy}, "pool": pool}


def _as_yaml(advice: dict[str, object]) -> str:
    """As it may stand under `args:` of an application; flow mappings need no library."""
    lines = ["# under args: of the application"]
    for name, value in advice.items():
        shown = value if not isinstance(value, dict) else "{" + ", ".join(f"{key}: {one}" for key, one in value.items()) + "}"
        lines.append(f"{name}: {shown}")
    return "\n".join(lines)
