"""The arithmetic of a report, against numpy and by hand."""

from __future__ import annotations

import json
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.bench.client import Record
from cb_ray.bench.load import Run
from cb_ray.bench.report import details, meets, parse_slo, percentile, spread, summarize
from cb_ray.errors import ConfigError


def record(due: float = 0.0, sent: float = 0.0, events: tuple[float, ...] = (), ended: float = 0.0, **fields: object) -> Record:
    made = Record(index=0, due=due, sent=sent, events=array("d", events), ended=ended, status=200)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def run_of(*records: Record, duration: float = 10.0, unsent: int = 0, is_open_loop: bool = True, cpu: float = 0.1) -> Run:
    return Run(records=list(records), unsent=unsent, duration_s=duration, cpu_share=cpu, is_open_loop=is_open_loop)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    """Linear between the two nearest values, at every share."""
    assert percentile(sorted(values), share) == pytest.approx(float(np.percentile(values, share * 100)), rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_a_spread_is_numpys(values: list[float]) -> None:
    """Mean, p50, p90, p99 and the largest."""
    seen = spread(values)
    assert seen is not None and list(seen) == ["mean", "p50", "p90", "p99", "max"]
    wanted = [np.mean(values), *np.percentile(values, [50, 90, 99]), np.max(values)]
    assert list(seen.values()) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_nothing_has_no_spread() -> None:
    assert spread([]) is None


def test_latencies_by_hand() -> None:
    """TTFT and e2e count from when a request was due, TPOT by the tokens of the usage, ITL by the pieces that came."""
    seen = summarize(run_of(record(1.0, 1.5, (2.0, 2.5, 4.0), 4.25, output_tokens=11, prompt_tokens=9, cached_tokens=4)))
    assert seen["ttft_s"]["p50"] == 1.0 and seen["e2e_s"]["p50"] == 3.25
    assert seen["tpot_s"]["p50"] == pytest.approx(0.2)
    assert seen["itl_s"]["max"] == 1.5 and seen["itl_s"]["mean"] == 1.0
    assert seen["output_tokens_per_s"] == 1.1 and seen["total_tokens_per_s"] == 2.0 and seen["requests_per_s"] == 0.1
    assert seen["tokens_per_event"] == pytest.approx(11 / 3)
    assert seen["cached_tokens"] == 4 and seen["client"]["lag_s"]["max"] == 0.5


def test_a_late_client_makes_the_server_look_worse_never_better() -> None:
    """Coordinated omission: what was sent late still counts from its time, and the report says so."""
    on_time = summarize(run_of(record(1.0, 1.0, (1.5,), 1.5, output_tokens=1)))
    late = summarize(run_of(record(1.0, 3.0, (3.5,), 3.5, output_tokens=1)))
    assert late["ttft_s"]["p50"] - on_time["ttft_s"]["p50"] == 2.0
    assert not on_time["warnings"] and "late" in late["warnings"][0]
    busy = summarize(run_of(record(output_tokens=1), cpu=0.95))
    assert "95%" in busy["warnings"][0]


def test_failures_count_against_goodput_and_lend_no_latency() -> None:
    """A refusal is quick: its time must not better the percentiles, and its request was not served well."""
    good = record(0.0, 0.0, (0.5, 0.6), 0.6, output_tokens=2)
    slow = record(0.0, 0.0, (2.0, 2.1), 2.1, output_tokens=2)
    refused = record(0.0, 0.0, (), 0.001, status=429, error="429", retry_after_s=3.0)
    seen = summarize(run_of(good, slow, refused), {"ttft": 1.0})
    assert seen["completed"] == 2 and seen["errors"] == {"429": 1} and seen["statuses"] == {"200": 2, "429": 1}
    assert seen["goodput"] == {"slo": {"ttft": 1.0}, "requests_per_s": 0.1, "share": pytest.approx(1 / 3)}
    assert seen["e2e_s"]["p50"] == 1.35
    assert seen["refusals"] == {
        "requests": 1,
        "with_retry_after": 1,
        "retry_after_s": {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0},
        "retries": 0,
        "completed_after_retry": 0,
    }


@pytest.mark.parametrize(("limit", "kept"), [("itl=0.2", False), ("itl=1.1", True), ("tpot=0.05", False), ("e2e=3,ttft=1", True)])
def test_each_limit_of_an_slo(limit: str, kept: bool) -> None:
    """All limits must be kept; one long gap breaks `itl` though the mean is fine."""
    assert meets(record(0.0, 0.0, (0.5, 0.6, 1.7, 1.8), 1.8, output_tokens=10), parse_slo(limit)) is kept


@pytest.mark.parametrize("text", ["ttf=1", "ttft", "ttft=0", "ttft=x", "itl=inf"])
def test_a_wrong_slo_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match=r"SLO"):
        parse_slo(text)


def test_answers_without_usage_are_not_guessed() -> None:
    """Pieces are not tokens: what a server does not count is left out and said."""
    seen = summarize(run_of(record(0.0, 0.0, (0.5, 0.6), 0.6)))
    assert seen["output_tokens"] == 0 and seen["without_usage"] == 1 and seen["tpot_s"] is None
    assert any("usage" in warning for warning in seen["warnings"])


def test_an_empty_run_is_a_report_too() -> None:
    """Interrupted before anything ended: figures are absent, not broken, and all is JSON."""
    seen = summarize(run_of(duration=0.0, unsent=5), {"ttft": 1.0})
    assert seen["requests"] == 0 and seen["ttft_s"] is None and seen["goodput"] is None
    assert json.loads(json.dumps([seen, details([record(events=(1.0,))])], allow_nan=False))
