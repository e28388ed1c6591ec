"""Small pools and workloads for tests of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cb_ray.simulation.costs import StepCosts
from cb_ray.simulation.engine_shape import EngineShape
from cb_ray.simulation.fleet import Fleet
from cb_ray.simulation.settings import PoolPlan
from cb_ray.simulation.workload import Arrival, Told, Workload

COSTS = StepCosts(step_s=0.008, query_s=4e-5, sample_s=2e-5, kv_s=2e-7, attend_s=1e-9)


def shape(**changes) -> EngineShape:
    return EngineShape(**{"costs": COSTS, "page_size": 16, "cache_tokens": 8192, "max_batch_tokens": 512, **changes})


def pool(**changes) -> PoolPlan:
    return PoolPlan(**{"shape": changes.pop("shape", None) or shape(), "replicas": 2, **changes})


def workload(rows: Sequence[tuple[float, int, int, int]], page_size: int = 16, limit: int | None = None) -> Workload:
    """Of each request: seconds after the one before, which document it begins with, tokens of its prompt, tokens of its answer."""

    def make():
        at = 0.0
        for number, (gap, document, tokens, answer) in enumerate(rows):
            at += gap
            shared = min(tokens // 2, 96) // page_size
            pages = [(document << 32 | page).to_bytes(16) for page in range(shared)]
            pages += [b"mine" + (number << 32 | page).to_bytes(12) for page in range(shared, tokens // page_size)]
            yield Told(Arrival(at, tokens, tuple(pages), limit), min(answer, limit or answer))

    return Workload("rows", page_size, make)


def everything(fleet: Fleet) -> dict[str, object]:
    """All that came of a run, down to the blocks of every cache."""
    outcome = fleet.run()
    ledger = outcome.ledger
    return {
        "lines": [tuple(map(repr, line)) for line in ledger.lines()],
        "gaps": sorted((gap, count) for gap, count in ledger.gaps.items() if count),
        "moments": ledger.moments,
        "promises": ledger.promises,
        "counts": (outcome.steps, outcome.preemptions, outcome.counters, outcome.reasons),
        "times": (outcome.duration_s, outcome.replica_s, outcome.busy_s),
        "pool": fleet.pool.snapshot(outcome.duration_s),
        "stats": {name: replace(replica.core.stats(), busy_s=0.0) for name, replica in fleet.replicas.items()},
        "blocks": {name: blocks(replica.core) for name, replica in fleet.replicas.items()},
    }


def blocks(core) -> dict[str, object]:
    """Which block is held, cached (oldest first) or blank (last first), and what each is called."""
    core.check()
    found = core._blocks._pools[0]
    return {"held": found._refs, "cached": list(found._cached), "blank": list(found._blank), "names": found._name}
