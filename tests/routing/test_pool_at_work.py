"""The pool with four simulated replicas: what policies are worth. The replicas are `cb_ray/simulation`'s: production cores.

A step takes STEP_S + PREFILL_S per prompt token + DECODE_S per answer token. The pool is told none of this; it hears beats.
40 documents of 2048 tokens do not fit into one cache and do fit into four.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest

from cb_ray.routing.pool import Pool
from cb_ray.simulation.costs import StepCosts
from cb_ray.simulation.engine_shape import EngineShape
from cb_ray.simulation.fleet import Fleet
from cb_ray.simulation.settings import PoolPlan
from cb_ray.simulation.synthetic import Description

PAGE, DOCUMENTS, DOCUMENT, OWN = 64, 40, 2048, 135
ROOMY, TIGHT = 16, 13  # documents that one engine's cache holds; ten are its share
PREFILL_S, DECODE_S, STEP_S = 3e-4, 4e-4, 0.015
COSTS = StepCosts(step_s=STEP_S, query_s=PREFILL_S, sample_s=DECODE_S - PREFILL_S)
WARM_UP_S, END_S = 40.0, 160.0
BEST = DOCUMENT / (DOCUMENT + OWN)  # share of a prompt that an oracle would find cached


@dataclass(frozen=True)
class Outcome:
    hit_rate: float
    ttft_p50: float
    busiest: float  # requests that the busiest replica served, over the mean of all
    pool: Pool


@cache
def run(policy: str, rate: float, hot: float = 0.0, seed: int = 1, room: int = ROOMY) -> Outcome:
    """`rate` requests per second; a share `hot` of them is about document 0. `room`: documents in one cache."""
    cache_tokens = room * (DOCUMENT + 2 * PAGE)
    shape = EngineShape(
        costs=COSTS, page_size=PAGE, cache_tokens=cache_tokens, max_batch_tokens=512, max_requests=32, slots=32, safety_margin=0.0
    )
    work = Description(
        requests=int(rate * END_S),
        rate=rate,
        documents=DOCUMENTS,
        document_tokens=DOCUMENT,
        hot=hot,
        prompt_tokens=OWN,
        answer_tokens=150,
        max_new_tokens=512,
        seed=seed,
    )
    fleet = Fleet(PoolPlan(shape=shape, replicas=4, policy=policy, seed=seed), work.workload(PAGE))
    outcome = fleet.run()
    lines = [line for line in outcome.ledger.lines() if line.at_s > WARM_UP_S]
    served = Counter(line.replica for line in lines)
    return Outcome(
        sum(line.num_cached for line in lines) / sum(line.num_prompt for line in lines),
        sorted(line.ttft_s for line in lines)[len(lines) // 2],
        max(served.values()) / (len(lines) / 4),
        fleet.pool,
    )


@pytest.mark.parametrize("rate", [2.0, 5.0])
def test_prefix_aware_finds_nearly_all_that_could_be_found(rate):
    """At least nine tenths of the oracle's hits and more than twice those of round robin, and first tokens come sooner."""
    aware, blind = run("prefix_aware", rate), run("round_robin", rate)
    assert aware.hit_rate >= 0.9 * BEST
    assert aware.hit_rate >= 2.3 * blind.hit_rate
    assert aware.ttft_p50 < 0.35 * blind.ttft_p50


def test_caches_that_are_nearly_full_are_shared_out():
    """40 documents in room for 52, of which answers take a part: who gives up what is wanted gets dearer, so that documents
    settle where there is room."""
    aware, blind = run("prefix_aware", 5.0, room=TIGHT), run("round_robin", 5.0, room=TIGHT)
    assert aware.hit_rate >= 0.9 * BEST
    assert aware.hit_rate >= 2.7 * blind.hit_rate


def test_a_hot_prefix_does_not_collapse_onto_its_warm_replica():
    """Four fifths of the traffic about one document: it spreads by itself, and caches still serve it."""
    aware, spread = run("prefix_aware", 6.0, hot=0.8), run("least_work", 6.0, hot=0.8)
    assert aware.busiest < 1.5
    assert aware.hit_rate > spread.hit_rate > 0.7


def test_prices_are_measured_from_beats_alone():
    """What a prompt token, an answer token and a step cost is found while serving, under whatever policy."""
    for policy in ("prefix_aware", "least_work"):
        rates = run(policy, 5.0).pool.rates
        assert rates.prefill_s == pytest.approx(PREFILL_S, rel=0.15)
        assert rates.decode_s == pytest.approx(DECODE_S, rel=0.3)
        assert rates.step_s == pytest.approx(STEP_S, rel=0.15)


def test_predictions_are_what_engines_found():
    """The index follows caches that evict: predicted and actual hits differ by a few percent at most."""
    counters = run("prefix_aware", 5.0).pool.counters
    assert counters["predicted_tokens"] == pytest.approx(counters["cached_tokens"], rel=0.05)


if __name__ == "__main__":  # the table in docs/pool.md
    for rate in (2.0, 5.0, 8.0):
        found = {policy: run(policy, rate) for policy in ("prefix_aware", "least_work", "power_of_two", "round_robin")}
        print(rate, {policy: f"{one.hit_rate:.0%}, {one.ttft_p50:.2f} s" for policy, one in found.items()}, f"{BEST:.0%}")
    print("tight", {policy: f"{run(policy, 5.0, room=TIGHT).hit_rate:.0%}" for policy in ("prefix_aware", "round_robin")})
    print("hot", {rate: round(run("prefix_aware", rate, hot=0.8).busiest, 2) for rate in (5.0, 8.0)})
