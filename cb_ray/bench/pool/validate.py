"""What the simulator says of a pool beside what the pool then does: the same requests, at the same times, in both.

Owns the scenario `validate`. The app is loaded with every slot full, which says what it can do and, by its step logs, what its steps
cost; lone requests then say what a request waits besides its step. With these, each load is foretold by `simulation` and measured.
Prompts begin with documents that come again. Knows nothing of how requests are routed: both sides run the same `Pool`.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.plan import StepWork
from ...digests import page_digests
from ...simulation.costs import StepCosts
from ...simulation.engine_shape import EngineShape
from ...simulation.fitting import Fit, fit_costs, read_steps
from ...simulation.fleet import simulate
from ...simulation.settings import Hops, PoolPlan
from ...simulation.summary import summarise
from ...simulation.workload import Arrival, Told, Workload
from .client import Plan, Record
from .failures import Tell, body
from .judge import Outcome, Verdict, percentile, waits
from .load import Load
from .model import prompt_of
from .overload import arrivals, measure_capacity
from .sitting import Sitting

PAGE, SLOTS, STEP_TOKENS, CACHE_PAGES = 16, 8, 256, 200
DOCUMENTS, DOCUMENT, OWN = 16, 128, 48  # tokens of a prompt: its document's and its own
MEAN_ANSWER, LONGEST_ANSWER = 32, 96
LOADS = (0.5, 0.9, 1.5)
_OFF = 0.15
_LONE = 30


@dataclass(frozen=True, slots=True)
class Request:
    """One request, for either side."""

    at_s: float
    prompt: tuple[int, ...]
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is compared."""

    ttft_p50_s: float
    ttft_p99_s: float
    tokens_per_s: float
    hit_rate: float


def settings(step_log: str) -> dict[str, Any]:
    return {
        "max_queue_size": 0,
        "pool": {"slots_per_replica": SLOTS},
        "router": {"num_replicas": 1},
        "engine": {
            "max_requests_per_batch": SLOTS,
            "num_blocks": CACHE_PAGES,
            "max_batch_tokens": STEP_TOKENS,
            "step_log": step_log,
        },
    }


def requests(times: Sequence[float], seed: int) -> list[Request]:
    """Documents drawn evenly, those of another seed have nothing in common with them; answers of exponential length."""
    numbers = random.Random(seed)
    documents = [prompt_of(numbers, DOCUMENT) for _ in range(DOCUMENTS)]

    def one(at: float) -> Request:
        answer = max(4, min(LONGEST_ANSWER, round(numbers.expovariate(1 / MEAN_ANSWER))))
        return Request(at, tuple(prompt_of(numbers, DOCUMENT + OWN, numbers.choice(documents))), answer)

    return [one(at) for at in times]


def workload(asked: Sequence[Request]) -> Workload:
    """The same for the simulator."""

    def make() -> Iterable[Told]:
        for one in asked:
            yield Told(Arrival(one.at_s, len(one.prompt), page_digests(one.prompt, PAGE), one.answer), one.answer)

    return Workload("measured", PAGE, make, {"requests": len(asked)})


async def run(sitting: Sitting, seconds: float, tell: Tell, done: Callable[[Outcome], None]) -> None:
    """`seconds` of each load, and as long to learn what steps cost."""
    rows: list[dict[str, Any]] = []
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="cb-ray-steps-") as logs:
        tell(f"{sitting.replicas} replicas start")
        await sitting.deploy(settings(logs))
        tell("every slot full")
        slots = SLOTS * sitting.replicas
        full = plan_of(sitting, requests([0.0] * 512, 0), concurrency=slots + 4, rounds=0)
        capacity = await measure_capacity(full, slots, seconds)
        fit = fit_costs(read_steps(sorted(Path(logs).glob("steps-*.jsonl"))))
        tell("lone requests")
        costs = evened(fit)
        plan = PoolPlan(shape=shape_of(costs), replicas=sitting.replicas, hops=hops_of(await lone(sitting), costs))
        for number, load in enumerate(LOADS):
            tell(f"{load:g} times {capacity:.1f} requests/s")
            asked = requests(arrivals(load * capacity, seconds, 1 + number), 1 + number)
            measured, foretold = await measure(sitting, asked), foretell(plan, asked)
            rows += table_of(f"{load:g}×", measured, foretold)
            off = {name: getattr(foretold, name) / getattr(measured, name) - 1 for name in asdict(measured)}
            worst = max(off, key=lambda name: abs(off[name]))
            verdicts.append(
                Verdict(
                    promise=f"at {load:g} times capacity all that is foretold lies within {_OFF:.0%} of what is measured",
                    holds=all(abs(share) <= _OFF for share in off.values()),
                    found=f"{worst} is off by {off[worst]:+.0%}",
                )
            )
    learnt = {"capacity": capacity, "fit": asdict(fit), "hops": asdict(plan.hops)}
    done(Outcome(scenario="validate", rows=rows, verdicts=verdicts, settings={**sitting.settings, "learnt": learnt}))


def table_of(load: str, measured: Seen, foretold: Seen) -> list[dict[str, Any]]:
    """Side by side."""
    names = {
        "ttft_p50_s": "first token p50 s",
        "ttft_p99_s": "first token p99 s",
        "tokens_per_s": "tokens/s",
        "hit_rate": "prompt tokens found cached",
    }
    return [
        {
            "load": load,
            "": text,
            "measured": getattr(measured, name),
            "foretold": getattr(foretold, name),
            "off": f"{getattr(foretold, name) / getattr(measured, name) - 1:+.1%}",
        }
        for name, text in names.items()
    ]


def evened(fit: Fit) -> StepCosts:
    """The fit, scaled so that all steps together take what they took: engines that share cores with the door are held up now and
    then, which a fit of relative errors leaves out and a run does not."""
    return StepCosts(**{name: value / (1 + fit.bias) for name, value in fit.costs.as_dict().items()})


def shape_of(costs: StepCosts) -> EngineShape:
    """The replicas of `settings`, as the simulator takes them."""
    return EngineShape(
        costs=costs,
        page_size=PAGE,
        cache_tokens=CACHE_PAGES * PAGE,
        max_batch_tokens=STEP_TOKENS,
        max_requests=SLOTS,
        slots=SLOTS,
        max_length=4096,
    )


def hops_of(alone: Sequence[Record], costs: StepCosts) -> Hops:
    """What a lone request waits for its first token besides the step is put before the Board, at the door."""
    usual, tokens = Hops(), DOCUMENT + OWN
    step_s = costs.seconds(StepWork(tokens, 1, 0, tokens * (tokens + 1) // 2))
    rest = percentile(waits(alone), 0.5) - step_s - usual.grant_s - usual.answer_s
    return Hops(door_s=max(0.0, rest))


async def lone(sitting: Sitting) -> list[Record]:
    """One request at a time, of which nothing is cached."""
    numbers = random.Random(77)
    asked = [Request(0.0, tuple(prompt_of(numbers, DOCUMENT + OWN)), 2) for _ in range(_LONE)]
    async with Load.of(plan_of(sitting, asked, concurrency=1)) as load:
        return await load.done()


async def measure(sitting: Sitting, asked: Sequence[Request]) -> Seen:
    """The app's side. Raises RuntimeError where a request fails."""
    async with Load.of(plan_of(sitting, asked, times=[one.at_s for one in asked])) as load:
        records = await load.done()
    failed = [record for record in records if record.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed; the first: {failed[0].status} {failed[0].error}")
    return Seen(
        ttft_p50_s=percentile(waits(records), 0.5),
        ttft_p99_s=percentile(waits(records), 0.99),
        tokens_per_s=sum(record.output_tokens or 0 for record in records)
        / (max(record.ended for record in records) - load.start),
        hit_rate=sum(record.cached_tokens or 0 for record in records) / sum(record.prompt_tokens or 0 for record in records),
    )


def foretell(plan: PoolPlan, asked: Sequence[Request]) -> Seen:
    """The simulator's side."""
    outcome = simulate(plan, workload(asked))
    ttfts = [line.ttft_s for line in outcome.ledger.lines() if not math.isnan(line.ttft_s)]
    summary = summarise(outcome)
    end = max(line.at_s + line.e2e_s for line in outcome.ledger.lines())
    return Seen(
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p99_s=percentile(ttfts, 0.99),
        tokens_per_s=sum(line.num_answer for line in outcome.ledger.lines()) / end,
        hit_rate=summary.hit_rate,
    )


def plan_of(sitting: Sitting, asked: Sequence[Request], **how: Any) -> Plan:
    return Plan(url=sitting.url, bodies=[body(one.prompt, one.answer) for one in asked], **how)
