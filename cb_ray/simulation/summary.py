"""A run in the numbers that people ask for, and whether it kept what was promised. Owns `Slo`, `Summary` and `summarise`.

Rates and latencies are those of requests that arrived after a warm-up; `slo_share` counts requests that were refused for good, or
never answered, as broken promises.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from dataclasses import asdict, dataclass

from ..errors import ConfigError
from .ledger import Outcome, percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """At least `share` of all requests have their first token within `ttft_s`; the same share of all gaps is within `itl_s`."""

    ttft_s: float = math.inf
    itl_s: float = math.inf
    share: float = 0.99

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"an SLO's share must lie between 0 and 1, got {self.share}", "share")
        if min(self.ttft_s, self.itl_s) <= 0:
            raise ConfigError(f"an SLO's times must be above 0, got {self.ttft_s} and {self.itl_s}", "slo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Times in seconds, rates per second of the simulation. Percentiles are of requests (ttft, e2e) and of gaps (itl)."""

    requests: int
    served: int
    refused_for_good: int
    refusals: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    admitted_ttft_p50_s: float  # from the time that it was asked for and not refused
    admitted_ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    hit_rate: float  # prompt tokens found cached
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    utilisation: float  # share of replica time within steps
    replica_s: float
    most_replicas: int
    most_waiting: int
    preemptions: int
    failovers: int
    retry_error_p50: float  # of what refused callers were told, as a share of what was true
    slo_share: float  # requests whose first token came in time
    meets_slo: bool
    duration_s: float

    def as_dict(self) -> dict[str, float | int | bool | None]:
        """For JSON, which knows no nan."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in asdict(self).items()
        }


def summarise(outcome: Outcome, slo: Slo | None = None, warm_up_s: float = 0.0) -> Summary:
    """`outcome` in numbers; `slo` None: no promise, which is always kept."""
    slo = slo or Slo()
    ttfts, e2es, admitted = array("d"), array("d"), array("d")
    requests = refused_for_good = refusals = prompt = cached = answered = failovers = 0
    end = warm_up_s
    for line in outcome.ledger.lines():  # a million of them are not held at once
        if line.at_s < warm_up_s:
            continue
        requests += 1
        refusals, cached = refusals + line.num_refused, cached + line.num_cached
        answered, failovers = answered + line.num_answer, failovers + line.num_moved
        if not math.isnan(line.ttft_s):
            ttfts.append(line.ttft_s)
            admitted.append(line.ttft_s - (line.asked_s - line.at_s))
        if math.isnan(line.e2e_s):
            refused_for_good += line.num_refused > 0
        else:
            e2es.append(line.e2e_s)
            prompt += line.num_prompt
            end = max(end, line.at_s + line.e2e_s)
    span = max(1e-9, end - warm_up_s)
    ttfts, e2es, admitted = sorted(ttfts), sorted(e2es), sorted(admitted)
    errors = sorted([promise.error() for promise in outcome.ledger.promises])
    in_time = bisect_right(ttfts, slo.ttft_s) / requests if requests else 1.0
    moments = outcome.ledger.moments
    return Summary(
        requests=requests,
        served=len(e2es),
        refused_for_good=refused_for_good,
        refusals=refusals,
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p90_s=percentile(ttfts, 0.9),
        ttft_p99_s=percentile(ttfts, 0.99),
        admitted_ttft_p50_s=percentile(admitted, 0.5),
        admitted_ttft_p99_s=percentile(admitted, 0.99),
        itl_p50_s=outcome.gap_percentile(0.5),
        itl_p99_s=outcome.gap_percentile(0.99),
        e2e_p50_s=percentile(e2es, 0.5),
        e2e_p99_s=percentile(e2es, 0.99),
        hit_rate=cached / prompt if prompt else 0.0,
        output_tokens_per_s=answered / span,
        prompt_tokens_per_s=prompt / span,
        utilisation=outcome.busy_s / outcome.replica_s if outcome.replica_s else 0.0,
        replica_s=outcome.replica_s,
        most_replicas=max([moment.replicas for moment in moments], default=0),
        most_waiting=max([moment.waiting for moment in moments], default=0),
        preemptions=outcome.preemptions,
        failovers=failovers,
        retry_error_p50=percentile(errors, 0.5),
        slo_share=in_time,
        meets_slo=in_time >= slo.share and not outcome.gap_percentile(slo.share) > slo.itl_s,
        duration_s=outcome.duration_s,
    )
