"""`cb-ray plan compare`: every routing policy, and an oracle that knows all caches and all answers, over one workload.

    cb-ray plan compare requests=2000,rate=5,documents=40,document_tokens=2048 --costs costs.json --replicas 4 --cache-tokens 34816

Says how large the prefixes are beside one cache and all caches; without that, a hit rate says nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from ..simulation.oracle import survey
from ..simulation.planner import POLICIES, Trial, compare
from .arguments import add_pool, add_workload, pool_of, slo_of, watched, workload_of
from .report import as_json, prefixes_text, print_header, print_trial, write_html


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cb-ray plan compare", description=(__doc__ or "").split("\n\n")[0])
    add_workload(parser)
    add_pool(parser)
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    given = parser.parse_args(argv)
    workload, slo = workload_of(given), slo_of(given)
    plan = pool_of(given, workload.page_size)
    prefixes = survey(workload, given.cache_tokens, given.replicas)
    print_header(workload, slo, prefixes_text(prefixes))
    tried: list[Trial] = []

    def tell(trial: Trial) -> None:
        tried.append(trial)
        print_trial(trial)

    compare(plan, watched(workload, "comparing"), slo, policies=given.policies, warm_up_s=given.warm_up, tried=tell)
    if given.json:
        found = as_json(workload, slo, tried, {"prefixes": {**asdict(prefixes), "ratio": prefixes.ratio()}})
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if given.html:
        write_html(given.html, f"Policies over {workload.name}", workload, slo, tried, tried, prefixes_text(prefixes))
    return 0
