"""Three times what the pool can do: the bound on those who wait, how fast the others are refused, and what the admitted notice.

Owns the scenario `overload`. What the pool can do is measured first, with every slot full. Then requests come at random times
(open loop), at nine tenths of that and at three times that; then a crowd comes at once and obeys Retry-After. The bound is read
from the Board's own high-water mark, and counted beside it at the client from when requests were sent and ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from .client import Plan, Record
from .failures import Tell, body
from .judge import Outcome, Verdict, most_at_once, percentile, waits
from .load import Load
from .model import prompt_of
from .sitting import Sitting, after

SLOTS = 4  # of a replica
QUEUE = 2  # who waits longer than half of what a calm first token takes had better come back: so short is a line that bounds TTFT
PROMPT, MEAN_ANSWER, LONGEST_ANSWER = 64, 32, 128
CALM, STORM = 0.9, 3.0
_REFUSAL_S, _SLOWER = 0.020, 1.5


def settings(routers: int) -> dict[str, Any]:
    pages = SLOTS * (PROMPT + LONGEST_ANSWER + 16) // 16
    return {
        "max_queue_size": QUEUE,
        "pool": {"slots_per_replica": SLOTS},
        "router": {"num_replicas": routers},
        "engine": {"max_requests_per_batch": SLOTS, "num_blocks": 2 * pages, "max_batch_tokens": 256},
    }


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts with nothing in common, answers of exponential length."""
    numbers = random.Random(seed)

    def length() -> int:
        return max(4, min(LONGEST_ANSWER, round(numbers.expovariate(1 / MEAN_ANSWER))))

    return [body(prompt_of(numbers, PROMPT), length()) for _ in range(count)]


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Poisson arrivals: `rate` per second, for so many seconds."""
    numbers, times, at = random.Random(seed), [], 0.0
    while (at := at + numbers.expovariate(rate)) < seconds:
        times.append(at)
    return times


async def run(sitting: Sitting, routers: Sequence[int], seconds: float, tell: Tell, done: Callable[[Outcome], None]) -> None:
    """`seconds` of overload for each number of Routers; a third of that at nine tenths, and as much to measure capacity."""
    rows: list[dict[str, Any]] = []
    verdicts: list[Verdict] = []
    for count in routers:
        name = "1 Router" if count == 1 else f"{count} Routers"
        tell(f"{name} and {sitting.replicas} replicas start")
        await sitting.deploy(settings(count))
        tell("capacity")
        slots = SLOTS * sitting.replicas
        full = Plan(url=sitting.url, bodies=bodies(256, 0), concurrency=slots + QUEUE // 2, rounds=0)
        capacity = await measure_capacity(full, slots, seconds / 3)
        phases: list[dict[str, Any]] = []
        for load, length in ((CALM, seconds / 3), (STORM, seconds)):
            tell(f"{name}, {load:g} times {capacity:.1f} requests/s")
            phases.append({"Routers": count, "load": f"{load:g}×", **await phase(sitting, load * capacity, length, seed=count)})
        tell(f"{name}, a crowd that obeys")
        rows += phases
        verdicts += judge(name, SLOTS * sitting.replicas + QUEUE, *phases) + [await crowd(sitting, name, capacity)]
    done(Outcome(scenario="overload", rows=rows, verdicts=verdicts, settings=sitting.settings))


async def measure_capacity(plan: Plan, slots: int, seconds: float) -> float:
    """Answers per second while every slot is full, its first quarter left out. `plan` keeps more requests up than there are slots.
    Raises RuntimeError when too few answers ended in `seconds`."""
    async with Load.of(plan) as load:
        await load.until(lambda heard: len(heard.records) >= slots)
        await after(seconds)
        records = await load.stop()
    ends = sorted(record.ended for record in records if not record.error)[slots // 2 : -slots]
    if len(ends) < slots:
        raise RuntimeError(
            f"{len(ends)} answers in {seconds:g} s are too few to measure by; give it more time or a smaller model"
        )
    return (len(ends) - 1) / (ends[-1] - ends[0])


async def phase(sitting: Sitting, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """Open loop at so many requests per second: one row."""
    times = arrivals(rate, seconds, seed)
    async with Load.of(Plan(url=sitting.url, bodies=bodies(len(times), seed), times=times)) as load:
        records = await load.done()
    books = await sitting.snapshot()
    refused = [record.ended - record.sent for record in records if record.status == 429]
    answered = [record for record in records if not record.error]
    transit = percentile(refused, 0.99) if refused else 0.0
    return {
        "offered/s": len(times) / seconds,
        "answered/s": len(answered) / (max(record.ended for record in records) - load.start),
        "refused": f"{len(refused) / len(records):.0%}",
        "first token p50 s": percentile(waits(records), 0.5),
        "first token p99 s": percentile(waits(records), 0.99),
        "refusal p50 ms": percentile(refused, 0.5) * 1e3,
        "refusal p99 ms": percentile(refused, 0.99) * 1e3,
        "most waiting": books["peak_waiting"],
        "most open": most_at_once([(record.sent, record.ended) for record in answered], transit),
        "5xx": sum(record.status >= 500 or (record.status in (0, 200) and bool(record.error)) for record in records),
        "client late p99 ms": percentile([record.sent - load.start - times[record.key] for record in records], 0.99) * 1e3,
    }


def judge(name: str, room: int, calm: dict[str, Any], storm: dict[str, Any]) -> list[Verdict]:
    """`room`: requests that may run or wait."""
    slower = storm["first token p99 s"] / calm["first token p99 s"]
    return [
        Verdict(
            promise=f"{name}: never more than max_queue_size wait",
            holds=storm["most waiting"] <= QUEUE and storm["most open"] <= room,
            found=f"by the Board {storm['most waiting']} of {QUEUE} at most; open at the client {storm['most open']} of {room}",
        ),
        Verdict(
            promise=f"{name}: refusals come within {_REFUSAL_S * 1e3:g} ms (p99)",
            holds=storm["refusal p99 ms"] < _REFUSAL_S * 1e3,
            found=f"{storm['refusal p99 ms']:.1f} ms, {storm['refusal p50 ms']:.1f} ms in the median",
        ),
        Verdict(
            promise=f"{name}: the admitted wait at most {_SLOWER:g} times as long as at {CALM:g} times capacity (p99)",
            holds=slower <= _SLOWER,
            found=f"{slower:.2f} times",
        ),
        Verdict(
            promise=f"{name}: no 5xx, no broken answer",
            holds=not calm["5xx"] + storm["5xx"],
            found=f"{calm['5xx'] + storm['5xx']}",
        ),
    ]


async def crowd(sitting: Sitting, name: str, capacity: float) -> Verdict:
    """Three times as many as there is room for come at once, and return when they are told to."""
    count = 3 * (SLOTS * sitting.replicas + QUEUE)
    async with Load.of(Plan(url=sitting.url, bodies=bodies(count, 9), concurrency=count, obeys=True)) as load:
        records: list[Record] = await load.done()
    refused = [record for record in records if record.refused]
    first = sum(record.refused == 1 for record in refused) / max(1, len(refused))
    took = max(record.ended for record in records) - min(record.sent for record in records)
    failed = sum(bool(record.error) for record in records)
    return Verdict(
        promise=f"{name}: who comes back when Retry-After says finds a place",
        holds=not failed and first >= 0.8,
        found=f"{first:.0%} of {len(refused)} at once; {count} answers took {took * capacity / count:.2f} times what capacity says",
    )
