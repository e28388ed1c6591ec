"""The number of replicas under a step of load: from one to all and back, and from none to one; nobody is lost on the way.

Owns the scenario `scale` and its figure. The load is a number of clients that ask again and again (few, many, few), so that it does
not pile up for ever while replicas start.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .client import Plan
from .failures import Tell, body
from .judge import Outcome, Verdict, percentile, waits
from .load import Load
from .model import prompt_of
from .sitting import Sitting, after, replica_states, ticks

PROMPT, ANSWER = 32, 64
SLOTS = 16
FEW, MANY = 2, 48
SAMPLE_S = 0.5


def settings(low: int, high: int) -> dict[str, Any]:
    """Times are a tenth of the defaults, so that a scenario takes minutes."""
    return {
        "max_queue_size": 0,
        "pool": {
            "min_replicas": low,
            "max_replicas": high,
            "slots_per_replica": SLOTS,
            "target_drain_s": 1,
            "upscale_delay_s": 0.5,
            "downscale_delay_s": 8,
            "downscale_to_zero_delay_s": 8,
        },
        "router": {"num_replicas": 1},
        "engine": {"max_requests_per_batch": SLOTS, "num_blocks": 2 * SLOTS * (PROMPT + ANSWER) // 16, "max_batch_tokens": 256},
    }


class Watch:
    """Samples of the pool while something else runs: seconds, replicas that run and start, requests, seconds of work owed."""

    def __init__(self, sitting: Sitting) -> None:
        self._sitting = sitting
        self.samples: list[dict[str, float]] = []
        self._task = asyncio.create_task(self._watch())

    @property
    def running(self) -> float:
        return self.samples[-1]["running"] if self.samples else -1

    async def until(self, replicas: int, at_most_s: float) -> float | None:
        """Seconds until exactly so many ran and no other was starting or stopping; None after `at_most_s`."""
        begin = asyncio.get_running_loop().time()
        async for now in ticks(SAMPLE_S):
            if self._task.done():
                self._task.result()
            if self.samples and self.samples[-1]["running"] == self.samples[-1]["all"] == replicas:
                return now - begin
            if now - begin > at_most_s:
                return None
        raise AssertionError

    def close(self) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        start = asyncio.get_running_loop().time()
        async for now in ticks(SAMPLE_S):
            states = replica_states(await self._sitting.status()).get("Engine", {})
            books = await self._sitting.snapshot()
            requests = books["waiting"] + sum(facts["leases"] for facts in books["replicas"].values())
            self.samples.append(
                {
                    "s": round(now - start, 2),
                    "running": states.get("RUNNING", 0),
                    "all": sum(states.values()),
                    "requests": requests,
                    "owed_s": books["owed_s"],
                }
            )


async def run(sitting: Sitting, figure: Path | None, tell: Tell, done: Callable[[Outcome], None]) -> None:
    rows, series, verdicts = list[dict[str, Any]](), dict[str, Any](), list[Verdict]()
    top = sitting.replicas
    numbers = random.Random(5)
    bodies = [body(prompt_of(numbers, PROMPT), ANSWER) for _ in range(512)]

    tell("one replica starts")
    await sitting.deploy(settings(1, top), replicas=1)
    watch = Watch(sitting)
    async with Load.of(Plan(url=sitting.url, bodies=bodies, concurrency=FEW, rounds=0)) as load:
        tell(f"{FEW} clients at once")
        await after(15)
        tell(f"{MANY} clients at once")
        load.width(MANY)
        up = await watch.until(top, 180)
        await after(20)
        tell(f"{FEW} clients at once")
        load.width(FEW)
        down = await watch.until(1, 240)
        records = await load.stop()
    watch.close()
    series["1 to all and back"] = watch.samples
    failed = [record for record in records if record.error]
    rows.append(_row(f"1 → {top} → 1", up, down, records))
    verdicts.append(
        Verdict(
            promise=f"a step of load brings 1 replica to {top} and back, and no request is lost",
            holds=up is not None and down is not None and not failed,
            found=f"up in {_seconds(up)}, down in {_seconds(down)}, {len(failed)} of {len(records)} requests failed",
        )
    )

    tell("down to none")
    await sitting.start_deploying(settings(0, top))
    await sitting.whole(0)  # it may never have had the one
    watch = Watch(sitting)
    idle = await watch.until(0, 240)
    tell("a request for a pool without replicas")
    async with Load.of(Plan(url=sitting.url, bodies=bodies[:8], concurrency=8)) as load:
        records = await load.done()
    cold = min(waits(records), default=float("nan"))
    again = await watch.until(0, 240)
    watch.close()
    series["0 to 1 and back"] = watch.samples
    failed = [record for record in records if record.error]
    rows.append(_row("0 → 1 → 0", cold, again, records))
    verdicts.append(
        Verdict(
            promise="the first requests for a pool without replicas wait for the cold start, and it goes again when idle",
            holds=idle is not None and again is not None and not failed,
            found=f"first token after {cold:.1f} s, {len(failed)} of {len(records)} failed, none left {_seconds(again)} later",
        )
    )
    if figure is not None:
        draw_figure(series, figure)
    done(Outcome(scenario="scale", rows=rows, verdicts=verdicts, settings=sitting.settings, series=series))


def draw_figure(series: dict[str, list[dict[str, float]]], file: Path) -> None:
    """Replicas and requests over time."""
    from ..plot import Line, Panel, draw

    panels: list[Panel] = []
    for title, samples in series.items():
        seconds = [sample["s"] for sample in samples]
        replicas = [
            Line("running", seconds, [sample["running"] for sample in samples], steps=True),
            Line("starting and stopping, too", seconds, [sample["all"] for sample in samples], steps=True, dashed=True),
        ]
        requests = [Line("requests", seconds, [sample["requests"] for sample in samples])]
        panels.append(Panel(title=f"Replicas, {title}", x="seconds", y="replicas", lines=replicas))
        panels.append(Panel(title=f"Requests, {title}", x="seconds", y="running and waiting", lines=requests))
    draw(panels, file)


def _row(what: str, up: float | None, down: float | None, records: list[Any]) -> dict[str, Any]:
    return {
        "step": what,
        "up after": _seconds(up),
        "down after": _seconds(down),
        "requests": len(records),
        "failed": sum(bool(record.error) for record in records),
        "first token p50 s": percentile(waits(records), 0.5),
        "first token p99 s": percentile(waits(records), 0.99),
    }


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.0f} s"
