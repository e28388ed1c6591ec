"""What is foretold and what is measured are made from the same requests."""

from __future__ import annotations

from cb_ray.bench.pool.validate import PAGE, evened, foretell, requests, shape_of, workload
from cb_ray.simulation.costs import StepCosts
from cb_ray.simulation.fitting import Fit
from cb_ray.simulation.settings import PoolPlan


def test_the_simulator_gets_the_requests_that_the_app_gets():
    """Equal times, lengths and answers, and equal pages where prompts begin alike."""
    asked = requests([0.1 * n for n in range(40)], 3)
    told = list(workload(asked))
    assert [one.at_s for one in asked] == [each.arrival.at_s for each in told]
    assert [(len(one.prompt), one.answer) for one in asked] == [(each.arrival.num_tokens, each.num_answer) for each in told]
    alike = [(a, b) for a in range(40) for b in range(a) if asked[a].prompt[:PAGE] == asked[b].prompt[:PAGE]]
    assert alike and all(told[a].arrival.pages[0] == told[b].arrival.pages[0] for a, b in alike)
    fit = Fit(costs=StepCosts(step_s=0.01, query_s=1e-4), steps=9, held_out=3, error_p50=0.1, error_p90=0.2, bias=-0.5)
    assert evened(fit).step_s == 0.02
    seen = foretell(PoolPlan(shape=shape_of(evened(fit)), replicas=2), asked)
    assert 0.02 < seen.ttft_p50_s < 1 and 0 < seen.hit_rate < 1
    assert seen.tokens_per_s > 1
