"""Streams while something dies: a replica, a drained one, a whole version, a stuck step, the Board, a Router.

Owns the scenarios `kill`, `drain`, `redeploy`, `stuck`, `board` and `router`. All have one form: so many greedy streams that fill
every slot, kept up from before until after; every answer is laid beside the one that the same prompt had in a quiet run.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import replica as inside
from .client import Plan, Record
from .judge import Faults, Outcome, Verdict, compare, percentile, waits
from .load import Load
from .model import prompt_of, tokens_of
from .sitting import MODEL, Sitting, merged, ticks

STREAMS = 64
PROMPT = 32
ANSWER = 96
LONG_ANSWER = 384  # outlives a lease
_CLEAR = 1e-4  # nats between the two best tokens; nearer ones may change places with the batch that a step happens to have
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Known:
    """Bodies of requests, and the tokens that each is answered with when nothing happens."""

    bodies: list[dict[str, Any]]
    answers: dict[int, list[int]]


def settings(streams: int, replicas: int, routers: int = 1) -> dict[str, Any]:
    """All slots together are as many as the streams; nobody is refused, so that who must move can wait."""
    slots = -(-streams // replicas)
    pages = slots * (PROMPT + LONG_ANSWER + 16) // 16
    return {
        "max_queue_size": 0,
        "pool": {"slots_per_replica": slots},
        "router": {"num_replicas": routers},
        "engine": {"max_requests_per_batch": slots, "num_blocks": pages, "max_batch_tokens": 256},
    }


def body(prompt: Sequence[int], answer: int, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": answer,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


async def quiet_run(sitting: Sitting, streams: int, answer: int, seed: int = 0) -> Known:
    """Prompts whose greedy answers never stand before a near tie, and those answers. Raises RuntimeError where any request fails."""
    numbers = random.Random(seed)
    prompts = [prompt_of(numbers, PROMPT) for _ in range(2 * streams)]
    bodies = [body(prompt, answer, logprobs=2) for prompt in prompts]
    async with Load.of(Plan(url=sitting.url, bodies=bodies, concurrency=streams)) as load:
        records = await load.done()
    bad = [record for record in records if record.error]
    if bad:
        raise RuntimeError(f"{len(bad)} requests failed in a quiet run; the first: {bad[0].status} {bad[0].error}")
    clear = sorted((record for record in records if (record.margin or 0.0) > _CLEAR), key=lambda record: record.key)[:streams]
    if len(clear) < streams:
        raise RuntimeError(f"only {len(clear)} of {len(records)} answers are free of near ties; {streams} are needed")
    return Known(
        [body(prompts[record.key], answer) for record in clear],
        {place: tokens_of(record.text) for place, record in enumerate(clear)},
    )


async def under_load(
    sitting: Sitting, known: Known, act: Callable[[], Awaitable[dict[str, Any]]]
) -> tuple[list[Record], dict[str, Any]]:
    """Keep every stream up, do `act` once all of them flow, go on until it has returned, let the last ones end."""
    streams, length = len(known.bodies), len(known.answers[0])
    async with Load.of(Plan(url=sitting.url, bodies=known.bodies, concurrency=streams, rounds=0)) as load:
        await load.until(lambda heard: heard.started >= streams and heard.tokens >= streams * length // 4)
        begin, tokens = time.monotonic(), load.tokens
        facts = await act()
        facts["took_s"] = round(time.monotonic() - begin, 1)
        facts["tokens_per_s"] = round((load.tokens - tokens) / max(0.1, facts["took_s"]))
        return await load.stop(), facts


async def kill(sitting: Sitting, known: Known) -> Outcome:
    """SIGKILL of the replica that has the most requests."""

    async def act() -> dict[str, Any]:
        victim, leases = await busiest(sitting)
        await sitting.kill("Engine", victim)
        await gone(sitting, victim)
        await sitting.whole()
        return {"requests there": leases}

    return story("kill", *await under_load(sitting, known, act), known)


async def drain(sitting: Sitting, known: Known) -> Outcome:
    """One replica fewer, then as many as before: the one that leaves finishes its streams."""

    async def act() -> dict[str, Any]:
        for count in (sitting.replicas - 1, sitting.replicas):
            await sitting.adjust(num_replicas=count)
            await sitting.whole()
        return {}

    return story("drain", *await under_load(sitting, known, act), known)


async def redeploy(sitting: Sitting, known: Known) -> Outcome:
    """A new version of everything, rolled out replica by replica, Routers as well."""
    before = sitting.settings

    async def act() -> dict[str, Any]:
        timeout = before["pool"]["step_timeout_s"] + 1
        failovers = before["router"].get("max_failovers", 3) + 1
        newer = {"pool": {"step_timeout_s": timeout}, "router": {"max_failovers": failovers}}
        await sitting.deploy(merged(before, newer))
        return {}

    return story("redeploy", *await under_load(sitting, known, act), known)


async def stuck(sitting: Sitting, known: Known) -> Outcome:
    """A step that never ends, in the replica that has the most requests."""

    async def act() -> dict[str, Any]:
        victim, leases = await busiest(sitting)
        await sitting.call("Engine", inside.hang, victim)
        await gone(sitting, victim)
        await sitting.whole()
        return {"requests there": leases}

    return story("stuck", *await under_load(sitting, known, act), known)


async def board(sitting: Sitting, known: Known) -> Outcome:
    """SIGKILL of the Board."""

    async def act() -> dict[str, Any]:
        import ray
        from ray.exceptions import RayActorError

        old = await sitting.board()
        ray.kill(old)
        async for _ in ticks(0.25):
            try:
                new = await sitting.board()
                if new != old and len((await new.snapshot.remote())["replicas"]) == sitting.replicas:
                    return {}
            except (RuntimeError, RayActorError):
                continue
        raise AssertionError

    return story("board", *await under_load(sitting, known, act), known)


async def router(sitting: Sitting, known: Known) -> Outcome:
    """SIGKILL of one of two Routers: its connections break, the others do not notice, and the engines drop what nobody reads."""
    streams, lease_s = len(known.bodies), sitting.settings["pool"]["lease_timeout_s"]
    async with Load.of(Plan(url=sitting.url, bodies=known.bodies, concurrency=streams)) as load:
        await load.until(lambda heard: heard.started >= streams)
        victim = sorted(await sitting.call("Router", inside.pid))[0]
        await sitting.kill("Router", victim)
        begin = time.monotonic()
        let_go_s = None
        async for _ in ticks(0.25):
            books = await sitting.snapshot()
            held = sum(facts["leases"] + facts["strays"] for facts in books["replicas"].values())
            if load.records and held <= streams - len(load.records):
                let_go_s = time.monotonic() - begin
                break
            if time.monotonic() - begin > 6 * lease_s:
                break
        abandoned = books["counters"]["abandoned"] + books["counters"]["reaped"]
        async with Load.of(Plan(url=sitting.url, bodies=known.bodies[: streams // 4], concurrency=streams // 4)) as fresh:
            later = compare(await fresh.done(), known.answers, tokens_of)
        records = await load.done()
    await sitting.whole()
    broken = [record for record in records if record.error]
    faults = compare([record for record in records if not record.error], known.answers, tokens_of)
    after = "never" if let_go_s is None else f"{let_go_s:.1f} s"
    row = {
        "scenario": "router",
        "streams": streams,
        "broken": len(broken),
        "unharmed": streams - len(broken),
        "given up by engines after": after,
        "abandoned": abandoned,
        "later requests failed": later.failed,
    }
    verdicts = [
        Verdict(
            promise="a Router that dies loses its own connections only",
            holds=0 < len(broken) < streams and _whole(faults),
            found=f"{len(broken)} of {streams} connections broke; of the others {_found(faults)}",
        ),
        Verdict(
            promise=f"engines cancel its requests within {1.5 * lease_s:g} s (a lease and a half)",
            holds=let_go_s is not None and let_go_s <= 1.5 * lease_s,
            found=f"after {after}",
        ),
        Verdict(
            promise="the other Router serves on", holds=_whole(later), found=f"{later.requests} new requests: {_found(later)}"
        ),
    ]
    return Outcome(scenario="router", rows=[row], verdicts=verdicts, settings=sitting.settings)


SCENARIOS: dict[str, Callable[[Sitting, Known], Awaitable[Outcome]]] = {
    "kill": kill,
    "drain": drain,
    "redeploy": redeploy,
    "stuck": stuck,
    "board": board,
}


async def run(sitting: Sitting, names: Sequence[str], streams: int, tell: Tell, done: Callable[[Outcome], None]) -> None:
    """Those of SCENARIOS that are named, on one deployment."""
    chosen = [name for name in SCENARIOS if name in names]
    if not chosen:
        return
    tell(f"{sitting.replicas} replicas start")
    await sitting.deploy(settings(streams, sitting.replicas))
    tell("a quiet run")
    known = await quiet_run(sitting, streams, ANSWER)
    for name in chosen:
        tell(name)
        done(await SCENARIOS[name](sitting, known))


async def run_router(sitting: Sitting, streams: int, tell: Tell, done: Callable[[Outcome], None]) -> None:
    """`router`, with two of them."""
    tell("two Routers start")
    await sitting.deploy(settings(streams, sitting.replicas, routers=2))
    tell("a quiet run of long answers")
    known = await quiet_run(sitting, streams, LONG_ANSWER, seed=1)
    tell("router")
    done(await router(sitting, known))


async def busiest(sitting: Sitting) -> tuple[str, int]:
    """(replica, requests granted to it)."""
    replicas = (await sitting.snapshot())["replicas"]
    name = max(replicas, key=lambda replica: replicas[replica]["leases"])
    return name, replicas[name]["leases"]


async def gone(sitting: Sitting, replica: str) -> None:
    """Wait until Serve has let go of this replica."""
    async for _ in ticks(0.25):
        if replica not in await asyncio.to_thread(sitting.names, "Engine"):
            return


def story(name: str, records: Sequence[Record], facts: dict[str, Any], known: Known) -> Outcome:
    """The common verdicts."""
    faults = compare(records, known.answers, tokens_of)
    first = waits(records)
    row = {
        "scenario": name,
        "requests": faults.requests,
        "failed": faults.failed,
        "tokens missing": faults.missing,
        "tokens repeated": faults.repeated,
        "other answers": faults.other,
        "first token p50 s": percentile(first, 0.5),
        "p99 s": percentile(first, 0.99),
        "longest pause s": max((record.longest_gap for record in records), default=0.0),
        "tokens/s": facts["tokens_per_s"],
        "whole again after s": facts["took_s"],
    }
    what = {
        "kill": "a replica killed",
        "drain": "a replica drained",
        "redeploy": "a new version rolled out",
        "stuck": "a step stuck",
        "board": "the Board killed",
    }[name]
    there = f"; {facts['requests there']} were there" if "requests there" in facts else ""
    verdict = Verdict(
        promise=f"{what}: no request fails, no token is lost, repeated or changed",
        holds=_whole(faults),
        found=f"{faults.requests} requests{there}: {_found(faults)}",
    )
    return Outcome(scenario=name, rows=[row], verdicts=[verdict], series={"reasons": faults.reasons})


def _whole(faults: Faults) -> bool:
    return not (faults.failed or faults.missing or faults.repeated or faults.other)


def _found(faults: Faults) -> str:
    counts = (
        f"{faults.failed} failed, {faults.missing} tokens missing, {faults.repeated} repeated, {faults.other} answers changed"
    )
    return f"{counts} ({'; '.join(faults.reasons)})" if faults.reasons else counts
