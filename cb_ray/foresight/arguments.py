"""The command line that describes a pool and a workload, as `plan size`, `plan compare` and `replay` share it.

Owns the flags and their translation into `PoolPlan`, `Workload` and `Slo`. A workload is named by its file, or described in place:

    trace.jsonl (Mooncake's form, or a request log) │ trace.csv (Azure's) │ directory of request logs │ description.json
    requests=2000,rate=8,documents=40,document_tokens=2048,prompt_tokens=128,answer_tokens=150
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import ConfigError
from ..simulation.costs import StepCosts
from ..simulation.engine_shape import EngineShape
from ..simulation.planner import POLICIES
from ..simulation.settings import Clients, Failure, PoolPlan, WeightUpdate
from ..simulation.summary import Slo
from ..simulation.synthetic import Description
from ..simulation.traces import azure, is_mooncake, mooncake, request_log
from ..simulation.workload import Workload


def add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload", help="a trace, a request log, a description, or name=value,… (see the module's documentation)"
    )
    parser.add_argument("--speed", type=float, default=1.0, help="2: everything comes twice as fast")
    parser.add_argument("--limit", type=int, help="only the first so many requests")
    parser.add_argument("--seed", type=int, default=0)


def add_pool(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """A pool of simulated replicas. `required`: what its steps cost must be said."""
    costs = parser.add_argument_group("what a replica is like (sizes in tokens)")
    costs.add_argument(
        "--costs", required=required, help="what `cb-ray plan fit --out` wrote, or step_s=0.01,query_s=4e-5,… in seconds"
    )
    costs.add_argument("--page-size", type=int, default=64)
    costs.add_argument("--cache-tokens", type=int, default=262_144, help="what one replica's KV cache holds")
    costs.add_argument("--max-batch-tokens", type=int, default=2048)
    costs.add_argument("--max-requests", type=int, default=256, help="in one step, and granted to one replica at once")
    costs.add_argument("--scheduler", default="fifo", choices=("fifo", "prefill_first", "priority"))
    pool = parser.add_argument_group("the pool")
    pool.add_argument("--replicas", type=int, default=2)
    pool.add_argument("--policy", default="prefix_aware", choices=POLICIES)
    pool.add_argument("--max-queue-size", type=int, default=0, help="0: no bound")
    pool.add_argument("--max-returns", type=int, default=0, help="refused clients come back when told, so many times")
    pool.add_argument("--cold-start", type=float, default=30.0, metavar="SECONDS")
    pool.add_argument("--fail-at", type=float, nargs="*", default=(), metavar="SECONDS", help="the oldest replica dies then")
    pool.add_argument(
        "--update-at", type=float, nargs="*", default=(), metavar="SECONDS", help="new weights, one replica after another"
    )
    slo = parser.add_argument_group("the promise (seconds)")
    slo.add_argument("--ttft", type=float, default=math.inf, metavar="SECONDS", help="to the first token")
    slo.add_argument("--itl", type=float, default=math.inf, metavar="SECONDS", help="between two tokens")
    slo.add_argument("--share", type=float, default=0.99, help="of requests, and of gaps, for which it holds")
    out = parser.add_argument_group("reports")
    out.add_argument("--warm-up", type=float, default=0.0, metavar="SECONDS", help="arrivals before this count for nothing")
    out.add_argument("--json", type=Path, metavar="FILE")
    out.add_argument("--html", type=Path, metavar="FILE")


def pool_of(given: argparse.Namespace, page_size: int) -> PoolPlan:
    shape = EngineShape(
        costs=costs_of(given.costs),
        page_size=page_size,
        cache_tokens=given.cache_tokens,
        max_batch_tokens=given.max_batch_tokens,
        max_requests=given.max_requests,
        slots=given.max_requests,
        scheduler=given.scheduler,
        safety_margin=0.0 if given.scheduler == "prefill_first" else 0.15,
    )
    return PoolPlan(
        shape=shape,
        replicas=given.replicas,
        policy=given.policy,
        max_queue_size=given.max_queue_size,
        clients=Clients(max_returns=given.max_returns, whole_seconds=True),
        cold_start_s=given.cold_start,
        failures=tuple(Failure(at_s=at) for at in given.fail_at),
        updates=tuple(WeightUpdate(at_s=at) for at in given.update_at),
        seed=given.seed,
    )


def slo_of(given: argparse.Namespace) -> Slo:
    return Slo(ttft_s=given.ttft, itl_s=given.itl, share=given.share)


def costs_of(text: str) -> StepCosts:
    """From a file or name=value pairs. Raises ConfigError."""
    return StepCosts.parse(_pairs(text, "costs") if "=" in text else _file(Path(text), "costs").get("costs", {}))


def workload_of(given: argparse.Namespace) -> Workload:
    """Raises ConfigError when it cannot be read as any of the forms."""
    text, path = given.workload, Path(given.workload)
    common: dict[str, Any] = {"page_size": given.page_size, "speed": given.speed, "limit": given.limit}
    if "=" in text and not path.exists():
        return _described(_pairs(text, "workload"), given)
    if path.is_dir():
        return request_log(path, **common)
    if not path.exists():
        raise ConfigError(f"there is no workload {text!r}; name a file, a directory of request logs, or name=value,…", "workload")
    if path.suffix == ".csv":
        return azure(path, **common)
    if path.suffix == ".json":
        return _described(_file(path, "workload"), given)
    return mooncake(path, **common) if is_mooncake(path) else request_log(path, **common)


def _described(values: Mapping[str, Any], given: argparse.Namespace) -> Workload:
    made = Description.parse({"seed": given.seed, **values})
    made = replace(made, rate=made.rate * given.speed, requests=min(made.requests, given.limit or made.requests))
    return made.workload(given.page_size)


def watched(workload: Workload, label: str) -> Workload:
    """The same, with a progress bar over its arrivals whenever it is run."""
    total = workload.description.get("requests")
    count = total if isinstance(total, int) else sum(1 for _ in workload)
    return replace(workload, make=lambda: tqdm(workload, desc=label, total=count, unit="req", leave=False, disable=None))


def _pairs(text: str, name: str) -> dict[str, Any]:
    try:
        return {key.strip(): json.loads(value) for key, value in (pair.split("=", 1) for pair in text.split(","))}
    except ValueError as error:
        raise ConfigError(f"{name} must be a file or name=number,name=number,…; got {text!r}", name) from error


def _file(path: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {path} cannot be read as JSON: {error}", name) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: {path} must hold a JSON object", name)
    return found
