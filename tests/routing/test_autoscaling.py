"""How many replicas: quick up, slow down, never outside the bounds, and the last one goes last; and what they are reckoned by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.routing.autoscaling import Fleet, ScaleMemory, ScaleTargets, desired_replicas
from cb_ray.routing.loads import Ask
from cb_ray.routing.members import Beat, Member
from cb_ray.routing.pool import Pool, PoolLimits

TARGETS = ScaleTargets(
    min_replicas=0, max_replicas=8, target_drain_s=10, upscale_delay_s=1, downscale_delay_s=60, downscale_to_zero_delay_s=300
)


class Walk:
    """Calls the policy over time as Serve does, each wish coming true at once."""

    def __init__(self, targets: ScaleTargets = TARGETS, replicas: int = 1) -> None:
        self.targets, self.replicas, self.memory, self.now = targets, replicas, ScaleMemory(), 0.0

    def go(self, seconds: float, owed_s: float, requests: int = 1, cache: float = 0.0, tick: float = 0.5) -> int:
        end = self.now + seconds
        while self.now < end:
            fleet = Fleet(replicas=self.replicas, target=self.replicas, owed_s=owed_s, num_requests=requests, cache_used=cache)
            self.replicas, self.memory = desired_replicas(fleet, self.targets, self.memory, self.now)
            self.now += tick
        return self.replicas


def test_up_at_once_down_later():
    """80 s of work and 10 s to do it in: eight replicas within two seconds; when it is gone, they stay for a minute."""
    walk = Walk()
    assert walk.go(2, owed_s=80, requests=20) == 8
    assert walk.go(50, owed_s=5) == 8
    assert walk.go(12, owed_s=5) == 1


def test_a_moment_of_load_is_no_reason_to_grow():
    """A spike shorter than upscale_delay_s passes by."""
    walk = Walk()
    walk.go(0.5, owed_s=80, requests=20)
    assert walk.go(5, owed_s=1) == 1


def test_down_to_the_highest_need_of_the_last_minute():
    """A second wave within the minute finds the replicas that it needs still there."""
    walk = Walk()
    walk.go(2, owed_s=80, requests=20)
    walk.go(30, owed_s=35, requests=9)
    assert walk.go(40, owed_s=5) == 4, "eight were wanted more than a minute ago, four within it"


def test_the_last_replica_stays_longer_and_nothing_wakes_nothing():
    """Idle: one replica until downscale_to_zero_delay_s, then none; the first request brings one back at once."""
    walk = Walk()
    walk.go(2, owed_s=80, requests=20)
    assert walk.go(70, owed_s=0, requests=0) == 1
    assert walk.go(225, owed_s=0, requests=0) == 1
    assert walk.go(10, owed_s=0, requests=0) == 0
    assert walk.go(0.5, owed_s=3, requests=1) == 1


def test_a_full_cache_asks_for_one_more():
    """Long prompts can fill the memory before the work in seconds looks like much."""
    assert Walk(replicas=2).go(2, owed_s=1, requests=4, cache=0.95) > 2


def test_what_is_starting_is_not_taken_back():
    """While replicas come up, a dip in the work owed must not undo the decision."""
    memory, targets = ScaleMemory(), TARGETS
    fleet = Fleet(replicas=1, target=4, owed_s=2, num_requests=3)
    assert desired_replicas(fleet, targets, memory, 0.0)[0] == 4


@given(
    story=st.lists(
        st.tuples(st.floats(0, 500), st.integers(0, 50), st.floats(0, 1), st.floats(0.01, 400)), min_size=1, max_size=30
    ),
    low=st.integers(0, 3),
    high=st.integers(3, 9),
)
def test_never_outside_the_bounds_and_memory_stays_small(story, low, high):
    """Whatever is measured, the answer is between min and max, and a controller that runs for weeks remembers a handful."""
    targets = ScaleTargets(min_replicas=low, max_replicas=high)
    replicas, memory, now = max(low, 1), ScaleMemory(), 0.0
    for owed_s, requests, cache, pause in story:
        fleet = Fleet(replicas=replicas, target=replicas, owed_s=owed_s, num_requests=requests, cache_used=cache)
        replicas, memory = desired_replicas(fleet, targets, memory, now)
        assert low <= replicas <= high
        assert len(memory.peaks) <= high + 2
        now += pause


def owed(replicas: int, requests: int, answer: int = 1000, slots: int = 16) -> float:
    """What a pool owes whose replicas have been seen to make one answer token a step, with so many requests under way."""
    pool = Pool(PoolLimits(max_queue_size=0, policy="round_robin"))
    pool.members(0.0, [Member(replica=f"r{n}", slots=slots) for n in range(replicas)])
    for number in range(200):
        beat = Beat(replica="r0", number=number, decode_tokens=5, num_steps=5, busy_s=5 * 0.021)
        pool.beat(0.0, beat)
    for number in range(requests):
        pool.acquire(0.0, Ask(ticket=f"t{number}", request_id=f"q{number}", num_tokens=1, max_new_tokens=answer))
    return pool.owed_s()


def test_requests_alone_owe_no_more_than_requests_together():
    """Two replicas with a request each owed as much as if steps could not be shared, so a pool that had grown never shrank."""
    assert owed(replicas=2, requests=2) == pytest.approx(owed(replicas=1, requests=2))
    assert owed(replicas=4, requests=4) < owed(replicas=1, requests=16)


def test_one_long_answer_calls_for_no_second_replica():
    """A thousand tokens, one a step of 21 ms, take 21 s wherever they are made; more replicas would not end them sooner."""
    assert owed(replicas=1, requests=1, answer=1000) < TARGETS.target_drain_s


def test_what_waits_owes_its_share_of_full_steps():
    """Sixteen run, thirty-two wait: three times what sixteen owe."""
    assert owed(replicas=1, requests=48, answer=256) == pytest.approx(3 * owed(replicas=1, requests=16, answer=256), rel=0.01)


def test_memory_that_ends_before_the_slots_makes_full_batches_smaller():
    """Two hundred slots are a promise that a cache for four long prompts does not keep: work takes as long as with four slots."""
    pool = Pool(PoolLimits(max_queue_size=0))
    pool.members(0.0, [Member(replica="r0", slots=200)])
    for number in range(8):
        pool.acquire(0.0, Ask(ticket=f"t{number}", request_id=f"q{number}", num_tokens=1, max_new_tokens=100))
    before = pool.owed_s()
    live = tuple((f"q{number}", 0) for number in range(8))
    pool.beat(0.0, Beat(replica="r0", number=0, live=live, num_waiting=4))
    rates = pool.rates
    assert pool.owed_s() == pytest.approx(rates.seconds(8, 800, batch=4), rel=0.3) and pool.owed_s() > 3 * before
