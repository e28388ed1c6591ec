"""What records of requests prove: faults against what should have come, percentiles, how many were open at once. Pure.

Owns the arithmetic of the pool's benchmarks and the shape of their results; knows the client's records and nothing else.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .client import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One promise, whether it held, and the figures that say so."""

    promise: str
    holds: bool
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a scenario says: rows for its table, verdicts, and anything else worth keeping."""

    scenario: str
    rows: Sequence[Mapping[str, Any]]
    verdicts: Sequence[Verdict]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    series: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Of requests whose answers are known beforehand. Tokens are counted, requests where it says so."""

    requests: int
    failed: int  # requests without a whole answer
    missing: int
    repeated: int
    other: int  # requests that say something else from some token on
    reasons: tuple[str, ...] = ()  # of failures, each once


def compare(records: Sequence[Record], expected: Mapping[int, Sequence[int]], tokens: Any) -> Faults:
    """`expected`: the answer's token ids by key. `tokens`: reads a text as token ids."""
    failed = missing = repeated = other = 0
    reasons: dict[str, None] = {}
    for record in records:
        if record.error:
            failed += 1
            reasons[f"{record.status}: {record.error}"[:200]] = None
            continue
        lost, twice, else_ = difference(tokens(record.text), expected[record.key])
        missing, repeated, other = missing + lost, repeated + twice, other + else_
        if record.output_tokens is not None and record.output_tokens != len(expected[record.key]):
            other += 1
            reasons[f"the usage says {record.output_tokens} tokens of {len(expected[record.key])}"] = None
    return Faults(
        requests=len(records), failed=failed, missing=missing, repeated=repeated, other=other, reasons=tuple(list(reasons)[:5])
    )


def difference(found: Sequence[int], wanted: Sequence[int]) -> tuple[int, int, int]:
    """(tokens missing, tokens repeated, 1 if it is something else): where `found` first leaves `wanted`, does it go on with a later
    or an earlier token of `wanted`?"""
    if list(found) == list(wanted):
        return 0, 0, 0
    at = next((n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
    rest = list(found[at:])
    for shift in range(1, len(wanted) + 1):
        if rest == list(wanted[at + shift :]):
            return shift, 0, 0
        if shift <= at and rest == list(wanted[at - shift :]):
            return 0, shift, 0
    return 0, 0, 1


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie; NaN for none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def waits(records: Iterable[Record]) -> list[float]:
    """Seconds to the first token of every answer."""
    return [record.first - record.sent for record in records if record.first is not None and not record.error]


def most_at_once(intervals: Iterable[tuple[float, float]], margin: float = 0.0) -> int:
    """The largest number of (begin, end) that overlap, each shortened by `margin` at both ends; what is left empty does not count."""
    ends: list[float] = []
    most = 0
    for begin, end in sorted((begin + margin, end - margin) for begin, end in intervals if end - begin > 2 * margin):
        while ends and ends[0] <= begin:
            heapq.heappop(ends)
        heapq.heappush(ends, end)
        most = max(most, len(ends))
    return most


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as a Markdown table."""
    if not rows:
        return ""
    names = list(rows[0])
    cells = [names] + [[_text(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[n]) for line in cells) for n in range(len(names))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells]
    return "\n".join([lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]])


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value)
