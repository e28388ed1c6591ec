"""Mixed load for as long as asked, and what it does to the memory of the server's processes.

    cb-ray bench soak --minutes 30 --concurrency 8 --json soak.json --plot soak.svg

Streams, whole answers, tool calls, JSON and clients that hang up in the middle, in random order. The resident memory of every
process of this machine whose name fits is sampled all the while. Owns the mix and the reckoning of drift; the load is `load.py`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from tqdm import tqdm

from ..errors import ConfigError
from .plot import Line, Panel, check_figure, draw
from .report import summarize
from .serve import add_target, first_model
from .workloads import Item, Lengths, Shape, random_words

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city now.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {  # what of an Item makes it one of its kind
    "stream": {},
    "whole": {"stream": False},
    "tools": {"extra": {"tools": _TOOLS, "ignore_eos": False}},
    "forced": {"extra": {"tools": _TOOLS, "tool_choice": "required", "ignore_eos": False}},
    "json": {
        "extra": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}},
            "ignore_eos": False,
        }
    },
    "leave": {},  # and a number of events, drawn for each
}
_SHARES = "stream=4,whole=2,tools=2,json=2,leave=2"


def parse_mix(text: str) -> dict[str, float]:
    """`stream=4,leave=1` as shares by kind. Raises ConfigError for another kind or a share that is not above 0."""
    mix: dict[str, float] = {}
    for part in text.split(","):
        kind, _, share = part.partition("=")
        if kind not in KINDS or not re.fullmatch(r"\d+(\.\d+)?", share) or not float(share):
            raise ConfigError(f"a mix is KIND=SHARE, … of {', '.join(KINDS)}; got {part!r}", field="mix")
        mix[kind] = float(share)
    return mix


def mixed(mix: Mapping[str, float], seed: int, kinds: list[str]) -> Iterator[Item]:
    """Requests without end; the kind of each is appended to `kinds` as it is drawn. No prompt comes twice."""
    dice = random.Random(seed)
    for number in range(sys.maxsize):
        (item,) = random_words(Shape(requests=1, prompt=Lengths(8, 256), output=Lengths(8, 64), seed=seed * 1_000_003 + number))
        (kind,) = dice.choices(list(mix), list(mix.values()))
        kinds.append(kind)
        item = replace(item, **KINDS[kind])
        yield replace(item, leave_after=dice.randint(1, 6)) if kind == "leave" else item


@dataclass(slots=True)
class Memory:
    """Resident memory of one process over time: seconds and bytes."""

    name: str
    times: list[float] = field(default_factory=list[float])
    rss: list[int] = field(default_factory=list[int])

    def drift(self, warm_s: float) -> float | None:
        """By which share it grew: the median of the last fifth of the time after `warm_s` against that of the first fifth."""
        after = [rss for time, rss in zip(self.times, self.rss, strict=True) if time >= warm_s]
        if len(after) < 5:
            return None
        fifth = len(after) // 5
        before = median(after[:fifth])
        return (median(after[-fifth:]) - before) / before


class Sampler:
    """Looks at the memory of processes whose command line fits a pattern, every `every_s` seconds, from the loop it runs on."""

    def __init__(self, pattern: str, every_s: float) -> None:
        self.seen: dict[int, Memory] = {}
        self._pattern, self._every_s = re.compile(pattern), every_s
        self._start = asyncio.get_running_loop().time()
        self._timer: asyncio.TimerHandle | None = None
        self.sample()

    def sample(self) -> None:
        """One look; it orders the next."""
        loop = asyncio.get_running_loop()
        for process in psutil.process_iter(["cmdline", "memory_info"]):
            title = " ".join(process.info["cmdline"] or ())
            if process.info["memory_info"] is not None and self._pattern.search(title):
                memory = self.seen.setdefault(process.pid, Memory(title.split()[0]))
                memory.times.append(loop.time() - self._start)
                memory.rss.append(process.info["memory_info"].rss)
        self._timer = loop.call_later(self._every_s, self.sample)

    def close(self) -> None:
        """No more looks."""
        if self._timer is not None:
            self._timer.cancel()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="cb-ray bench soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_target(made)
    made.add_argument("--minutes", type=float, default=30.0, help="(default: %(default)s)")
    made.add_argument(
        "--warm-up", type=float, metavar="MINUTES", help="before memory is compared (default: a fifth of --minutes)"
    )
    made.add_argument("--concurrency", type=int, default=8, metavar="N", help="requests under way (default: %(default)s)")
    made.add_argument("--mix", default=_SHARES, help=f"shares of {', '.join(KINDS)} (default: %(default)s)")
    made.add_argument("--processes", default="^ray::ServeReplica", metavar="REGEX", help="command lines (default: %(default)s)")
    made.add_argument("--every", type=float, default=5.0, metavar="S", help="between two looks at memory (default: %(default)s)")
    made.add_argument("--limit", type=float, default=0.02, metavar="SHARE", help="drift that fails (default: %(default)s)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, metavar="FILE")
    made.add_argument("--plot", type=Path, metavar="FILE", help="memory over time")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 1 when a process drifted above the limit or a request failed."""
    given = parser().parse_args(argv)
    mix = parse_mix(given.mix)
    if given.plot is not None:
        check_figure(given.plot)
    from .load import run_until_interrupted

    result = run_until_interrupted(lambda: soak(given, mix))
    for line in table(result):
        print(line)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if given.plot is not None:
        lines = [
            Line(f"{one['name']} {one['pid']}", [t / 60 for t in one["times_s"]], [rss / 2**20 for rss in one["rss"]])
            for one in result["processes"]
        ]
        draw([Panel(title="Resident memory", x="minutes", y="MiB", lines=lines)], given.plot)
    drifted = any(one["drift"] is None or one["drift"] > given.limit for one in result["processes"])
    return 1 if drifted or result["failed"] else 0


async def soak(given: argparse.Namespace, mix: Mapping[str, float]) -> dict[str, Any]:
    """The run and what came of it."""
    from .client import Target
    from .load import closed_loop, new_session

    kinds: list[str] = []
    headers = {"Authorization": f"Bearer {given.api_key}"} if given.api_key else {}
    seconds, loop = given.minutes * 60, asyncio.get_running_loop()
    async with new_session() as session:
        target = Target(
            base_url=given.base_url,
            model=given.model or await first_model(session, given.base_url, headers),
            headers=headers,
            body={**({} if given.eos else {"ignore_eos": True}), **json.loads(given.body)},
            timeout_s=given.timeout,
            retries=given.retries,
        )
        sampler, end = Sampler(given.processes, given.every), loop.time() + seconds
        with tqdm(unit="request", disable=None) as bar:
            items = mixed(mix, given.seed, kinds)
            run = await closed_loop(
                session, target, items, given.concurrency, lambda record: bar.update(), lambda: loop.time() >= end
            )
        sampler.sample()
        sampler.close()
    warm = given.warm_up * 60 if given.warm_up is not None else seconds / 5
    outcomes = Counter((kinds[record.index], record.error or "whole") for record in run.records)
    return {
        "summary": summarize(run),
        "outcomes": {kind: {end: count for (of, end), count in sorted(outcomes.items()) if of == kind} for kind in mix},
        "failed": sum(count for (_, end), count in outcomes.items() if end not in ("whole", "left")),
        "details": sorted({record.detail for record in run.records if record.detail})[:10],
        "processes": [
            {"pid": pid, "name": memory.name, "drift": memory.drift(warm), "times_s": memory.times, "rss": memory.rss}
            for pid, memory in sorted(sampler.seen.items())
        ],
    }


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """What a reader wants to know first."""
    summary = result["summary"]
    yield f"{summary['requests']} requests in {summary['duration_s']:.0f} s, {summary['output_tokens_per_s']:.1f} tokens/s counted"
    for kind, ends in result["outcomes"].items():
        yield f"  {kind:<8}" + ", ".join(f"{count} {end}" for end, count in ends.items())
    for detail in result["details"]:
        yield f"  ! {detail}"
    if not result["processes"]:
        yield "no process of this machine fits --processes"
    for one in result["processes"]:
        drift = "too few samples" if one["drift"] is None else f"{one['drift']:+.2%} after warming up"
        yield f"  {one['name']} {one['pid']}: {one['rss'][0] / 2**20:.0f} -> {one['rss'][-1] / 2**20:.0f} MiB, {drift}"
