"""More work than the pool can do: who waits, for how long, and what the others are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cb_ray.simulation.costs import StepCosts
from cb_ray.simulation.fleet import Fleet
from cb_ray.simulation.planner import capacity
from cb_ray.simulation.settings import Clients
from cb_ray.simulation.summary import summarise
from cb_ray.simulation.synthetic import Description
from tests.simulation.pools import pool, shape

PROMPTS = Description(requests=600, prompt_tokens=256, answer_tokens=40, spread=0.7)


def tight(**costs):
    """Two replicas of eight slots, whose prompts take several times as long to compute as a token."""
    paid = StepCosts(**{"step_s": 0.015, "query_s": 3e-4, "sample_s": 1e-4, **costs})
    kind = shape(costs=paid, cache_tokens=65_536, max_batch_tokens=512, max_requests=8, slots=8)
    return pool(shape=kind, max_queue_size=4, clients=Clients(max_returns=1000))


@pytest.mark.parametrize("step_s", [0.015, 0.2])
def test_never_more_wait_than_may(step_s):
    """A replica whose steps take longer than the time between two beats once told of requests on their way into the next step as of
    some that wait; with a full line, that made one more than max_queue_size."""
    plan = tight(step_s=step_s)
    fleet = Fleet(plan, replace(PROMPTS, requests=200).workload(16).at_rate(3 * capacity(plan, PROMPTS.workload(16))))
    fleet.run()
    assert fleet.pool.counters["refused"] > 100
    assert fleet.pool.peak_waiting == plan.max_queue_size


def test_the_admitted_hardly_notice_an_overload():
    """Issued three times what the pool can do, with clients that obey: first tokens of the admitted come at most half as late again
    as at nine tenths (p99), since no replica is granted more prompts than its next step begins; and Retry-After is true."""
    plan = tight()
    rate = capacity(plan, PROMPTS.workload(16))
    calm, storm = (summarise(Fleet(plan, PROMPTS.workload(16).at_rate(load * rate)).run()) for load in (0.9, 3.0))
    assert calm.served == storm.served == PROMPTS.requests
    assert storm.admitted_ttft_p99_s <= 1.5 * calm.admitted_ttft_p99_s
    assert storm.retry_error_p50 <= 0.25
