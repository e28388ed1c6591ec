"""A simulated pool keeps the promises of the real one, and the same seed gives the same bytes."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_ray.routing.autoscaling import ScaleTargets
from cb_ray.routing.pool import Pool
from cb_ray.simulation.fleet import Fleet, simulate
from cb_ray.simulation.settings import Clients, Failure, WeightUpdate
from cb_ray.simulation.synthetic import Description
from cb_ray.simulation.workload import Told, Workload

from .pools import everything, pool, shape, workload

WORK = Description(requests=120, rate=6.0, documents=6, document_tokens=256, prompt_tokens=80, answer_tokens=40, seed=5)


def test_the_same_seed_gives_the_same_bytes():
    """Twice the same run; another seed of the workload is another run."""
    first, again = everything(Fleet(pool(), WORK.workload(16))), everything(Fleet(pool(), WORK.workload(16)))
    assert repr(first) == repr(again)
    assert repr(first) != repr(everything(Fleet(pool(), replace(WORK, seed=6).workload(16))))


def test_everybody_is_served_whole():
    """Law L2 for clients: every answer has the tokens that the script gave it, its first before its last."""
    outcome, script = simulate(pool(), WORK.workload(16)), list(WORK.workload(16))
    lines = list(outcome.ledger.lines())
    assert [line.num_answer for line in lines] == [told.num_answer for told in script]
    assert all(0 < line.ttft_s <= line.e2e_s for line in lines)
    assert sum(line.num_cached for line in lines) == outcome.counters["cached_tokens"] > 0
    assert sum(outcome.ledger.gaps.values()) == sum(told.num_answer - 1 for told in script)


def test_streams_move_on_when_their_replica_dies():
    """What was said is not said again, nothing is lost, and another replica is started in its place."""
    plan = pool(replicas=3, failures=(Failure(at_s=5.0, replica=1, after_s=0.5),), cold_start_s=2.0)
    outcome = simulate(plan, WORK.workload(16))
    lines, script = list(outcome.ledger.lines()), list(WORK.workload(16))
    assert sum(line.num_moved for line in lines) > 0
    assert [line.num_answer for line in lines] == [told.num_answer for told in script]
    replicas = [moment.replicas for moment in outcome.ledger.moments]
    assert min(replicas) == 2 and replicas[-1] == 3


def test_new_weights_reach_one_replica_after_the_other():
    """Never more than one stands still, everybody is served, and no page of old weights is found under new ones."""
    fleet = Fleet(pool(replicas=3, updates=(WeightUpdate(at_s=4.0, load_s=1.0),)), WORK.workload(16))
    outcome = fleet.run()
    assert {replica.core.weights_version for replica in fleet.replicas.values()} == {1}
    assert all(line.num_answer for line in outcome.ledger.lines())
    still = [line for line in outcome.ledger.lines() if 4.0 < line.at_s < 7.0]
    assert {line.replica for line in still} > {0} or len({line.replica for line in still}) >= 2


def test_the_pool_grows_and_shrinks_with_the_work():
    """From one replica to several and back, after a cold start each; those that go finish what they have."""
    rows = [(0.05, n % 4, 300, 60) for n in range(200)] + [(2.0, 0, 50, 5) for _ in range(20)]
    scaling = ScaleTargets(min_replicas=1, max_replicas=4, target_drain_s=0.5, upscale_delay_s=0.5, downscale_delay_s=5.0)
    outcome = simulate(pool(replicas=1, scaling=scaling, cold_start_s=3.0), workload(rows))
    replicas = [moment.replicas for moment in outcome.ledger.moments]
    first_growth = next(moment.at_s for moment in outcome.ledger.moments if moment.replicas > 1)
    assert max(replicas) > 1 and replicas[-1] == 1 and first_growth >= 3.5
    assert all(line.num_answer for line in outcome.ledger.lines())


def test_a_cold_pool_serves_the_first_caller():
    """From zero replicas: it waits for the cold start, and is served."""
    scaling = ScaleTargets(min_replicas=0, max_replicas=2, upscale_delay_s=0.0)
    outcome = simulate(pool(replicas=0, scaling=scaling, cold_start_s=4.0), workload([(1.0, 0, 50, 5)]))
    (line,) = outcome.ledger.lines()
    assert 4.0 < line.ttft_s < 5.0


def test_refused_clients_come_back_when_told():
    """The bound holds; who is refused is told when; who obeys is served in the end."""
    plan = pool(
        shape=shape(slots=4, max_requests=4), replicas=1, max_queue_size=3, clients=Clients(max_returns=50, whole_seconds=True)
    )
    outcome = simulate(plan, workload([(0.01, n, 200, 20) for n in range(40)]))
    lines = list(outcome.ledger.lines())
    assert outcome.counters["refused"] > 0 and len(outcome.ledger.promises) > 0
    assert all(line.num_answer == 20 for line in lines)
    assert max(moment.waiting for moment in outcome.ledger.moments) <= 3
    gone = simulate(replace(plan, clients=Clients()), workload([(0.01, n, 200, 20) for n in range(40)]))
    assert sum(math.isnan(line.ttft_s) for line in gone.ledger.lines()) == gone.counters["refused"]


@settings(max_examples=15, deadline=None)
@given(cut=st.floats(0.2, 6.0), seed=st.integers(0, 3))
def test_nobody_sees_how_long_answers_will_be(cut, seed):
    """The oracle boundary, by behaviour: when every answer under way at some time is made longer than it was, nothing that
    was decided before that time changes: no grant, no step, no price, no beat."""
    work = replace(WORK, seed=seed, requests=40, spread=0.0, answer_tokens=30)
    seen: list[list[object]] = []
    for longer in (False, True):
        scaling = ScaleTargets(min_replicas=1, max_replicas=3, target_drain_s=0.3)
        fleet = Fleet(pool(scaling=scaling, cold_start_s=0.5), work.workload(16))
        fleet.workload = _longer_after(fleet, cut, longer)
        log: list[object] = []
        _watch(fleet, log, cut)
        fleet.run()
        seen.append(log)
    assert seen[0] == seen[1] and seen[0]


def _longer_after(fleet: Fleet, cut: float, longer: bool) -> Workload:
    """Answers that could not be over at `cut`, even alone, become ten times as long: their ends lie after it in both runs."""
    source, costs = fleet.workload, fleet.plan.shape.costs
    fastest = 30 * (costs.step_s + costs.query_s)

    def make():
        for told in source:
            late = told.arrival.at_s + fastest > cut
            yield Told(told.arrival, told.num_answer * 10 if longer and late else told.num_answer)

    return Workload("longer", source.page_size, make)


def _watch(fleet: Fleet, log: list[object], cut: float) -> None:
    """Everything that the pool is told and says until `cut`."""
    pool_ = fleet.pool
    for name in ("acquire", "release", "beat", "members"):
        setattr(pool_, name, _watched(pool_, name, log, cut))


def _watched(pool_: Pool, name: str, log: list[object], cut: float):
    method = getattr(pool_, name)

    def watched(now, *args):
        answer = method(now, *args)
        if now <= cut:
            log.append((name, now, args, answer, pool_.rates, pool_.deadline))
        return answer

    return watched


def test_only_the_script_knows_how_long_answers_are():
    """The oracle boundary, by source: `num_answer` is handed from the workload to the script, and read nowhere else."""
    package = Path(__file__).parents[2] / "cb_ray"
    readers = {
        str(path.relative_to(package))
        for room in ("simulation", "routing", "core")
        for path in (package / room).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("num_answer", "left") and not isinstance(node.ctx, ast.Store)
    }
    makes, judges = {"workload", "traces"}, {"ledger", "summary"}  # before a run, and after it
    assert readers <= {f"simulation/{name}.py" for name in (*makes, *judges, "fleet", "oracle")}
    fleet = ast.parse((package / "simulation" / "fleet.py").read_text())
    uses = [node for node in ast.walk(fleet) if isinstance(node, ast.Attribute) and node.attr == "num_answer"]
    assert len(uses) == 1, "the fleet hands it to the script, once"


@pytest.mark.parametrize("policy", ["prefix_aware", "least_work", "power_of_two", "round_robin"])
def test_every_policy_runs(policy):
    """All four serve everybody, and differ in what they find cached."""
    outcome = simulate(pool(policy=policy), WORK.workload(16))
    assert all(line.num_answer for line in outcome.ledger.lines())
