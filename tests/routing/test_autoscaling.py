"""How many replicas: quick up, slow down, never outside the bounds, and the last one goes last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cb_ray.routing.autoscaling import Fleet, ScaleMemory, ScaleTargets, desired_replicas

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
