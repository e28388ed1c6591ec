"""Each policy's promise, on small numbers that can be checked by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.routing.loads import Ask, Rates, ReplicaLoad
from cb_ray.routing.policies import make_policy, rendezvous

RATES = Rates(prefill_s=0.001, decode_s=0.01)
NAMES = ("round_robin", "least_work", "power_of_two", "prefix_aware")


def load(name: str, owed_s: float = 0.0, cached: int = 0, leases: int = 0) -> ReplicaLoad:
    return ReplicaLoad(replica=name, owed_s=owed_s, num_leases=leases, cached_tokens=cached)


def ask(tokens: int = 100, **more) -> Ask:
    return Ask(ticket="t", request_id=more.pop("request_id", "q"), num_tokens=tokens, **more)


@pytest.mark.parametrize("name", NAMES)
@given(owed=st.lists(st.floats(0, 100), min_size=1, max_size=9), tokens=st.integers(1, 500), warm=st.integers(0, 8))
def test_every_policy_ranks_every_replica_once_and_says_why(name, owed, tokens, warm):
    """The order is a permutation, so that whoever refuses has a successor."""
    loads = [load(f"r{n}", seconds, cached=min(tokens - 1, 64) if n == warm else 0) for n, seconds in enumerate(owed)]
    decision = make_policy(name, 16).rank(ask(tokens), loads, RATES)
    assert sorted(decision.order) == sorted(one.replica for one in loads)
    assert decision.policy == name and decision.reason
    assert decision.cached_tokens == next(one.cached_tokens for one in loads if one.replica == decision.order[0])


def test_round_robin_takes_turns_whatever_the_load():
    """Twelve requests over three replicas: four each, in order, and a replica that is full now does not upset the turns."""
    policy = make_policy("round_robin", 16)
    loads = [load("a", 9.0), load("b"), load("c", 5.0)]
    assert [policy.rank(ask(), loads, RATES).order[0] for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    assert policy.rank(ask(), [loads[1]], RATES).order == ("b",)
    assert policy.rank(ask(), loads, RATES).order[0] == "c"


def test_least_work_goes_to_who_would_be_done_first():
    """Work counts in seconds, so one long answer weighs more than two short ones."""
    decision = make_policy("least_work", 16).rank(ask(), [load("a", 3.0, leases=1), load("b", 2.0, leases=2)], RATES)
    assert decision.order == ("b", "a") and decision.prices == {"a": 3.0, "b": 2.0}


def test_power_of_two_spreads_and_avoids_the_busiest():
    """Of two drawn the less loaded one: the busiest of three is never first, and the same seed draws the same."""
    loads = [load("a", 1.0), load("b", 2.0), load("c", 3.0)]

    def firsts() -> Counter[str]:
        policy = make_policy("power_of_two", 16)
        return Counter(policy.rank(ask(), loads, RATES).order[0] for _ in range(300))

    assert firsts() == firsts()
    assert firsts()["c"] == 0 and firsts()["a"] > firsts()["b"] > 50


def test_a_warm_replica_is_worth_the_prefill_it_saves_and_no_more():
    """Affinity gives way by itself when the warm replica owes more than the cached prefix saves; no threshold says when."""
    policy = make_policy("prefix_aware", 16)
    saved_s = 960 * RATES.prefill_s
    near = policy.rank(ask(1000), [load("warm", saved_s - 0.1, cached=960), load("cold")], RATES)
    far = policy.rank(ask(1000), [load("warm", saved_s + 0.1, cached=960), load("cold")], RATES)
    assert (near.order[0], near.cached_tokens) == ("warm", 960)
    assert (far.order[0], far.cached_tokens) == ("cold", 0)
    assert far.prices["cold"] == pytest.approx(1.0)


def test_equal_prices_send_equal_prefixes_to_one_place():
    """With nothing known of any cache, requests that begin alike meet on one replica, and different ones spread."""
    policy = make_policy("prefix_aware", 16)
    loads = [load(f"r{n}") for n in range(4)]
    firsts = {
        bytes([prefix]): {
            policy.rank(ask(100, request_id=f"q{n}", digests=(bytes([prefix]), bytes([n]))), loads, RATES).order[0]
            for n in range(5)
        }
        for prefix in range(40)
    }
    assert all(len(places) == 1 for places in firsts.values())
    assert len({place for places in firsts.values() for place in places}) == 4


def test_a_session_stays_where_it_was():
    """With the same session, prompts that share no page go to one replica while prices are equal."""
    policy = make_policy("prefix_aware", 16)
    loads = [load(f"r{n}") for n in range(4)]
    assert len({policy.rank(ask(session="s", digests=(bytes([n]),)), loads, RATES).order[0] for n in range(20)}) == 1


@given(key=st.binary(max_size=90), names=st.sets(st.text(min_size=1, max_size=5), min_size=2, max_size=8), data=st.data())
def test_when_a_replica_leaves_only_its_own_keys_move(key, names, data):
    """Rendezvous hashing: the best of the rest stays the best."""
    best = max(names, key=lambda name: rendezvous(key, name))
    gone = data.draw(st.sampled_from(sorted(names - {best})))
    assert max(names - {gone}, key=lambda name: rendezvous(key, name)) == best
