"""Leaping is stepping, only sooner: the same tokens at the same instants, the same blocks, the same words to the Board."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cb_ray.routing.autoscaling import ScaleTargets
from cb_ray.simulation.costs import StepCosts
from cb_ray.simulation.fleet import Fleet
from cb_ray.simulation.settings import Clients, Failure, WeightUpdate
from cb_ray.simulation.synthetic import Description

from .pools import everything, pool, shape, workload

rows = st.tuples(st.sampled_from([0.0, 0.001, 0.0625, 0.3, 2.0]), st.integers(0, 2), st.integers(1, 300), st.integers(1, 120))


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(rows, min_size=1, max_size=14),
    page=st.sampled_from([1, 4, 16]),
    spare=st.sampled_from([1.0, 1.3, 4.0]),
    budget=st.sampled_from([4, 40, 512]),
    running=st.sampled_from([1, 3, 256]),
    scheduler=st.sampled_from(["fifo", "prefill_first", "priority"]),
    bound=st.sampled_from([0, 2]),
    limit=st.sampled_from([None, 30]),
    costs=st.sampled_from(
        [
            StepCosts(step_s=0.0625, query_s=0.0),
            StepCosts(step_s=0.01, query_s=1e-4, kv_s=1e-6),
            StepCosts(step_s=0.0, query_s=1e-3),
        ]
    ),
    events=st.booleans(),
)
def test_leaping_is_stepping(requests, page, spare, budget, running, scheduler, bound, limit, costs, events):
    """Every line of the ledger, every gap, every price and every block agree, under shared prefixes, preemption, refusals,
    failures and updates; costs that make many things happen at one instant are among those tried."""
    longest = max(tokens + min(answer, limit or answer) for _, _, tokens, answer in requests)
    cache = int(spare * (longest // page + 2)) * page

    def run(leaps: bool) -> dict[str, object]:
        plan = pool(
            shape=shape(
                costs=costs,
                page_size=page,
                cache_tokens=max(cache, 2 * page),
                max_batch_tokens=budget,
                max_requests=running,
                scheduler=scheduler,
                leaps=leaps,
            ),
            max_queue_size=bound,
            clients=Clients(max_returns=3, whole_seconds=True),
            cold_start_s=0.5,
            failures=(Failure(at_s=0.25, after_s=0.1),) if events else (),
            updates=(WeightUpdate(at_s=0.5, load_s=0.2),) if events else (),
        )
        return everything(Fleet(plan, workload(requests, page, limit)))

    leaping, stepping = run(True), run(False)
    for name in stepping:
        assert leaping[name] == stepping[name], name


def test_a_leaping_run_makes_far_fewer_events():
    """What leaping is for; and that a longer run with scaling agrees, too."""
    scaling = ScaleTargets(min_replicas=1, max_replicas=3, target_drain_s=0.5, upscale_delay_s=0.2, downscale_delay_s=2.0)
    work = Description(requests=150, rate=8.0, documents=5, document_tokens=128, prompt_tokens=60, answer_tokens=150, seed=3)

    def fleet(leaps: bool) -> Fleet:
        return Fleet(pool(shape=shape(leaps=leaps), replicas=1, scaling=scaling, cold_start_s=1.0), work.workload(16))

    leaping, stepping = fleet(True), fleet(False)
    assert everything(leaping) == everything(stepping)
    assert max(moment.replicas for moment in leaping.ledger.moments) > 1
    assert leaping.agenda.num_events < 0.7 * stepping.agenda.num_events
