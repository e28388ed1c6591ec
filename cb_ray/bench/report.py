"""What the records of a run say: percentiles, rates, goodput, and how far the client itself is to be believed.

Owns the arithmetic and the names of the figures; pure functions of `Run`.

    due ──lag──▶ sent ────────▶ event 1 ──gap──▶ event 2 ──gap──▶ … event n ──▶ ended
     └──────── TTFT ───────────────┘└──────── TPOT × (tokens − 1) ───────┘
     └──────── e2e ────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..errors import ConfigError, nearest
from .client import Record
from .load import Run

SLO_NAMES = ("ttft", "tpot", "itl", "e2e")
_LATE_S = 0.01  # a client later than this in one request of a hundred is said to be
_BUSY = 0.8  # of a core


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of sorted `values` lie, interpolated linearly as numpy does. NaN for none."""
    if not values:
        return math.nan
    place = share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles and the largest of `values`; None for none."""
    ordered = sorted(values)
    if not ordered:
        return None
    named = {f"p{round(share * 100)}": percentile(ordered, share) for share in (0.5, 0.9, 0.99)}
    return {"mean": math.fsum(ordered) / len(ordered), **named, "max": ordered[-1]}


def ttft(record: Record) -> float | None:
    """From when the request was due to its first output, in seconds."""
    return record.events[0] - record.due if record.events else None


def e2e(record: Record) -> float:
    """From when the request was due to the end of its answer, in seconds."""
    return record.ended - record.due


def tpot(record: Record) -> float | None:
    """Seconds per output token after the first event; None without usage or with a single event."""
    if record.output_tokens is None or record.output_tokens < 2 or len(record.events) < 2:
        return None
    return (record.events[-1] - record.events[0]) / (record.output_tokens - 1)


def gaps(record: Record) -> list[float]:
    """Seconds between the outputs that the client saw. A server that sends tokens in lumps has fewer and longer ones."""
    return [late - early for early, late in pairwise(record.events)]


def parse_slo(text: str) -> dict[str, float]:
    """`ttft=1.0,itl=0.05` as seconds by name. Raises ConfigError for another name or a number that is not above 0."""
    slo: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if name not in SLO_NAMES:
            raise ConfigError(f"an SLO limits {', '.join(SLO_NAMES)}; not {name!r}: {nearest(name, SLO_NAMES)}", field="slo")
        try:
            slo[name] = float(number)
        except ValueError:
            slo[name] = math.nan
        if not 0 < slo[name] < math.inf:
            raise ConfigError(f"an SLO is NAME=SECONDS, above 0; got {part!r}", field="slo")
    return slo


def meets(record: Record, slo: Mapping[str, float]) -> bool:
    """Whether a whole answer kept every limit. `itl` is kept by a request whose 99th percentile gap keeps it."""
    if not record.is_whole:
        return False
    seen = {
        "ttft": ttft(record),
        "tpot": tpot(record),
        "itl": percentile(sorted(gaps(record)), 0.99) if len(record.events) > 1 else None,
        "e2e": e2e(record),
    }
    return all((value := seen[name]) is None or value <= limit for name, limit in slo.items())


def summarize(run: Run, slo: Mapping[str, float] | None = None) -> dict[str, Any]:
    """All figures of a run. Latencies are those of whole answers, in seconds; rates count from the start to the last end."""
    records, duration = run.records, run.duration_s or math.inf
    whole = [record for record in records if record.is_whole]
    counted = [record for record in whole if record.output_tokens is not None]
    outputs = sum(record.output_tokens or 0 for record in counted)
    prompts = sum(record.prompt_tokens or 0 for record in counted)
    cached = [record.cached_tokens for record in counted if record.cached_tokens is not None]
    events = sum(len(record.events) for record in counted)
    good = sum(meets(record, slo or {}) for record in whole)
    summary: dict[str, Any] = {
        "requests": len(records),
        "completed": len(whole),
        "errors": dict(Counter(record.error for record in records if record.error)),
        "statuses": dict(sorted(Counter(str(record.status or "none") for record in records).items())),
        "refusals": refusals(records),
        "unsent": run.unsent,
        "duration_s": run.duration_s,
        "requests_per_s": len(whole) / duration,
        "output_tokens_per_s": outputs / duration,
        "total_tokens_per_s": (outputs + prompts) / duration,
        "prompt_tokens": prompts,
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": outputs,
        "tokens_per_event": outputs / events if events else None,
        "without_usage": len(whole) - len(counted),
        "goodput": {"slo": dict(slo), "requests_per_s": good / duration, "share": good / len(records)}
        if slo and records
        else None,
        "ttft_s": spread(value for record in whole if (value := ttft(record)) is not None),
        "itl_s": spread(gap for record in whole for gap in gaps(record)),
        "tpot_s": spread(value for record in whole if (value := tpot(record)) is not None),
        "e2e_s": spread(e2e(record) for record in whole),
        "client": {"lag_s": spread(_lag(record) for record in records), "cpu_share": run.cpu_share},
    }
    return {**summary, "warnings": warnings_of(summary, is_open_loop=run.is_open_loop)}


def _lag(record: Record) -> float:
    """How much later than planned a request went out. One that was refused first is late on purpose."""
    return 0.0 if record.retries else record.sent - record.due


def refusals(records: Sequence[Record]) -> dict[str, Any]:
    """What 429 and 503 said and what was done about it."""
    refused = [record for record in records if record.retries or record.status in (429, 503)]
    said = [record.retry_after_s for record in refused if record.retry_after_s is not None]
    return {
        "requests": len(refused),
        "with_retry_after": len(said),
        "retry_after_s": spread(said),
        "retries": sum(record.retries for record in refused),
        "completed_after_retry": sum(record.is_whole and record.retries > 0 for record in refused),
    }


def warnings_of(summary: Mapping[str, Any], *, is_open_loop: bool) -> list[str]:
    """Why these figures may not be what they seem."""
    found: list[str] = []
    lag, share = summary["client"]["lag_s"], summary["client"]["cpu_share"]
    if is_open_loop and lag and lag["p99"] > _LATE_S:
        found.append(f"the client sent late: {lag['p99'] * 1e3:.0f} ms at p99; latencies include that")
    if share > _BUSY:
        found.append(f"the client was busy for {share:.0%} of a core; times are too long by what it could not keep up with")
    if summary["without_usage"]:
        found.append(f"{summary['without_usage']} answers came without usage; their tokens are not counted")
    if summary["unsent"]:
        found.append(f"interrupted: {summary['unsent']} requests were not finished")
    return found


def details(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One object for each request, for a file."""
    return [
        {
            "index": record.index,
            "due_s": record.due,
            "sent_s": record.sent,
            "events_s": list(record.events),
            "ended_s": record.ended,
            "status": record.status,
            "error": record.error,
            "detail": record.detail,
            "retries": record.retries,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "cached_tokens": record.cached_tokens,
            "finish_reason": record.finish_reason,
        }
        for record in records
    ]
