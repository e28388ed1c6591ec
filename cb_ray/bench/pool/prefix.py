"""Documents that many prompts begin with, more of them than one replica's cache holds and fewer than all together do.

Owns the scenario `prefix`: the share of prompt tokens found in caches and the time to the first token, for each policy, at one rate
of arrivals; then four fifths of the traffic about one document. Every policy gets documents of its own, so that nobody finds what
another one left. The oracle finds every document: it would need a cache as large as all together in every replica.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from .client import Plan, Record
from .failures import Tell, body
from .judge import Outcome, Verdict, percentile, waits
from .load import Load
from .model import prompt_of
from .overload import arrivals
from .sitting import Sitting, ticks

POLICIES = ("prefix_aware", "least_work", "power_of_two", "round_robin")
PAGE = 16
DOCUMENT = 256  # tokens
OWN = 15  # tokens of a prompt after its document
ANSWER = 8
IN_CACHE = 8  # documents, each with what its prompt adds, that one replica's cache holds
WORKING_SET = 4.0  # times that, in documents; a cache that gives up what prompts add holds nine, and four hold 36
SLOTS = 8
ROUNDS = 6  # requests per document that are measured, after half as many that are not
BUSY = 0.6  # of what the engines do when nothing is cached
_NEAR_ORACLE, _BETTER, _HOT = 0.9, 3.0, 0.8


def settings(policy: str) -> dict[str, Any]:
    pages = IN_CACHE * -(-(DOCUMENT + OWN + ANSWER) // PAGE)
    return {
        "max_queue_size": 0,
        "routing": {"policy": policy},
        "pool": {"slots_per_replica": SLOTS},
        "router": {"num_replicas": 1},
        "engine": {"max_requests_per_batch": SLOTS, "num_blocks": pages, "max_batch_tokens": 256},
    }


async def run(sitting: Sitting, tell: Tell, done: Callable[[Outcome], None]) -> None:
    documents = round(WORKING_SET * IN_CACHE * sitting.replicas / 4)
    best = DOCUMENT / (DOCUMENT + OWN)
    tell(f"{sitting.replicas} replicas start")
    await sitting.deploy(settings(POLICIES[0]))
    rate = BUSY / await cold_seconds(sitting)
    rows: list[dict[str, Any]] = []
    hot: dict[str, dict[str, Any]] = {}
    for number, policy in enumerate(POLICIES):
        tell(f"{policy}, {documents} documents, {rate:.1f} requests/s")
        await switch(sitting, policy)
        rows.append({"policy": policy, **await traffic(sitting, rate, documents, 0.0, seed=number)})
    for number, policy in enumerate(("prefix_aware", "least_work")):
        tell(f"{policy}, {_HOT:.0%} about one document")
        await switch(sitting, policy)
        hot[policy] = await traffic(sitting, 2 * rate, documents, _HOT, seed=10 + number)
        rows.append({"policy": f"{policy}, {_HOT:.0%} about one", **hot[policy]})
    rows.append({"policy": "oracle", "found": f"{best:.1%}"})
    aware, blind = rows[0]["share"], rows[3]["share"]
    for row in rows:
        row.pop("share", None)
    verdicts = [
        Verdict(
            promise=f"prefix_aware finds at least {_NEAR_ORACLE:g} of what an oracle finds",
            holds=aware >= _NEAR_ORACLE * best,
            found=f"{aware:.1%} of {best:.1%}: {aware / best:.2f}",
        ),
        Verdict(
            promise=f"prefix_aware finds at least {_BETTER:g} times as much as round_robin",
            holds=aware >= _BETTER * blind,
            found=f"{aware:.1%} against {blind:.1%}: {aware / max(1e-9, blind):.1f} times",
        ),
        Verdict(
            promise=f"{_HOT:.0%} of the traffic about one document does not collapse onto its replica",
            holds=hot["prefix_aware"]["first token p99 s"] <= 1.25 * hot["least_work"]["first token p99 s"],
            found=f"first token p99 {hot['prefix_aware']['first token p99 s']:.2f} s (least_work "
            f"{hot['least_work']['first token p99 s']:.2f} s), {hot['prefix_aware']['busiest']} of requests at the busiest replica",
        ),
    ]
    workload = {
        "documents": documents,
        "tokens of a document": DOCUMENT,
        "tokens of a prompt": DOCUMENT + OWN,
        "tokens of one cache": settings("")["engine"]["num_blocks"] * PAGE,
        "working set : one cache": documents / IN_CACHE,
        "requests/s": rate,
    }
    done(Outcome(scenario="prefix", rows=rows, verdicts=verdicts, settings={**sitting.settings, "workload": workload}))


async def switch(sitting: Sitting, policy: str) -> None:
    """Another policy without a restart, by the way that limits travel to the Board."""
    from ...serving.app import parse_args, pool_limits

    await sitting.adjust(user_config={**asdict(pool_limits(parse_args(sitting.settings))), "policy": policy})
    async for _ in ticks(0.25):
        if (await sitting.snapshot())["policy"] == policy:
            break
    await sitting.whole()


async def cold_seconds(sitting: Sitting) -> float:
    """Seconds of the engines' cores that a prompt takes of which nothing is cached."""
    numbers = random.Random(99)
    prompts = [body(prompt_of(numbers, DOCUMENT + OWN), ANSWER) for _ in range(6 * sitting.replicas)]
    async with Load.of(Plan(url=sitting.url, bodies=prompts, concurrency=sitting.replicas)) as load:
        records = await load.done()
    ends = sorted(record.ended for record in records)[sitting.replicas :]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


async def traffic(sitting: Sitting, rate: float, documents: int, hot: float, seed: int) -> dict[str, Any]:
    """One row. Requests for documents drawn at random, `hot` of them for the first one."""
    numbers = random.Random(seed)
    texts = [prompt_of(numbers, DOCUMENT) for _ in range(documents)]
    count = round(1.5 * ROUNDS * documents)
    drawn = list(range(documents)) + [
        0 if numbers.random() < hot else numbers.randrange(documents) for _ in range(count - documents)
    ]
    bodies = [body(prompt_of(numbers, DOCUMENT + OWN, texts[number]), ANSWER) for number in drawn]
    times = arrivals(rate, 2 * count / rate, seed)[:count]
    plan = Plan(url=sitting.url, bodies=bodies[: len(times)], times=times, headers={"X-Cb-Ray-Debug": "1"})
    async with Load.of(plan) as load:
        records = await load.done()
    return row_of([record for record in records if record.key >= count // 3])


def row_of(records: list[Record]) -> dict[str, Any]:
    failed = [record for record in records if record.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed; the first: {failed[0].status} {failed[0].error}")
    share = sum(record.cached_tokens or 0 for record in records) / sum(record.prompt_tokens or 0 for record in records)
    places = Counter(record.replica for record in records)
    return {
        "share": share,
        "found": f"{share:.1%}",
        "first token p50 s": percentile(waits(records), 0.5),
        "first token p99 s": percentile(waits(records), 0.99),
        "busiest": f"{max(places.values()) / len(records):.0%}",
        "requests": len(records),
    }
