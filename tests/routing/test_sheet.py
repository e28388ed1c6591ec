"""Quick decisions beside slow ones: who is picked off the columns is who comes first when all replicas are ranked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_ray.routing.loads import Ask
from cb_ray.routing.members import Beat, Member
from cb_ray.routing.pool import Pool, PoolLimits
from cb_ray.routing.replies import Granted

PAGES = [bytes([n]) * 16 for n in range(8)]
NAMES = [f"r{n}" for n in range(5)]


@pytest.mark.parametrize("policy", ["least_work", "prefix_aware"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whoever_is_picked_is_ranked_first(policy, data):
    """Whatever pools have gone through: grants, beats of all kinds, evictions that are regretted, strays, replicas that come, go, are
    steered away from or refuse. Equal replica, equal cached tokens, equal reason, and equal prices of those that are named."""
    draw = data.draw
    pool, now, held = Pool(PoolLimits(policy=policy, page_size=4)), 0.0, list[str]()
    slots = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))

    def members(count: int) -> None:
        pool.members(now, [Member(replica=NAMES[n], slots=slots[n], step_tokens=draw(steps)) for n in range(count)])

    steps = st.sampled_from([None, 8, 40])
    members(len(slots))
    for number in range(draw(st.integers(1, 25))):
        now += draw(st.sampled_from([0.0, 0.01, 0.2]))
        tokens, pages = draw(st.integers(1, 40)), draw(st.integers(0, 8))
        ask = Ask(ticket=f"t{number}", request_id=f"q{number}", num_tokens=tokens, digests=tuple(PAGES[:pages]))
        loads = pool._loads(now, ask, with_room=True)
        wanted = pool._policy.rank(ask, loads, pool.rates) if loads else None
        found = pool._choose(now, ask)
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert (found.order[0], found.cached_tokens, found.reason) == (wanted.order[0], wanted.cached_tokens, wanted.reason)
            assert found.order[0] in found.prices
            assert all(wanted.prices[name] == price for name, price in found.prices.items())
        if isinstance(pool.acquire(now, ask), Granted):
            held.append(ask.ticket)
        kind = draw(st.sampled_from(["nothing", "release", "beat", "steer", "members"]))
        if kind == "release" and held:
            pool.release(now, held.pop(draw(st.integers(0, len(held) - 1))), rejected=draw(st.booleans()))
        elif kind == "beat":
            evicted = draw(st.lists(st.sampled_from(PAGES), max_size=8))
            live = draw(st.dictionaries(st.sampled_from([f"q{n}" for n in range(30)]), st.integers(0, 9), max_size=4))
            beat = Beat(
                replica=draw(st.sampled_from(NAMES)),
                number=number,
                live=tuple(live.items()),
                num_waiting=draw(st.integers(0, len(live))),
                free_tokens=draw(st.none() | st.integers(0, 60)),
                prefill_tokens=draw(st.integers(0, 50)),
                decode_tokens=draw(st.integers(0, 9)),
                num_steps=3,
                busy_s=draw(st.floats(0.01, 1)),
                evicted=tuple(evicted),
            )
            pool.beat(now, beat)
        elif kind == "steer":
            pool.steer(now, draw(st.sampled_from(NAMES)), draw(st.booleans()))
        elif kind == "members":
            members(draw(st.integers(1, len(slots))))
        assert pool._num_inside == sum(replica.waiting for replica in pool._replicas.values())
