"""Schedules of open-loop load: functions of rate, number and seed."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from cb_ray.bench.arrivals import Arrivals
from cb_ray.bench.workloads import Item
from cb_ray.errors import ConfigError

ITEMS = [Item(prompt="x")] * 4_000


def gaps(text: str, rate: float, seed: int = 0) -> np.ndarray:
    times = Arrivals.parse(text).times(ITEMS, rate, seed)
    assert len(times) == len(ITEMS) and all(late >= early for early, late in pairwise(times))
    return np.diff([0.0, *times])


def test_a_seed_is_a_schedule() -> None:
    """The same seed repeats a measurement; another one makes another sample."""
    first, again, other = (Arrivals().times(ITEMS, 3.0, seed) for seed in (7, 7, 8))
    assert first == again != other


def test_poisson_gaps_are_exponential() -> None:
    """Mean and standard deviation are both 1/rate, and a gap says nothing about the next."""
    seen = gaps("poisson", 5.0)
    assert seen.mean() == pytest.approx(0.2, rel=0.05) and seen.std() == pytest.approx(0.2, rel=0.05)
    assert abs(np.corrcoef(seen[:-1], seen[1:])[0, 1]) < 0.05
    assert (seen > 0.4).mean() == pytest.approx(math.exp(-2), rel=0.1)


@pytest.mark.parametrize("variation", [0.5, 2.0])
def test_gamma_gaps_vary_as_asked(variation: float) -> None:
    """The rate stays, the coefficient of variation is the one given."""
    seen = gaps(f"gamma:{variation}", 5.0)
    assert seen.mean() == pytest.approx(0.2, rel=0.1) and seen.std() / seen.mean() == pytest.approx(variation, rel=0.1)


def test_even_gaps_bursts_and_all_at_once() -> None:
    """Constant gaps are equal; a burst of four comes every 4/rate seconds; an infinite rate is one burst."""
    few = ITEMS[:8]
    assert Arrivals.parse("constant").times(few, 4.0) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
    assert Arrivals.parse("burst:4").times(few, 2.0) == [0.0] * 4 + [2.0] * 4
    assert Arrivals().times(few, math.inf) == [0.0] * 8


def test_a_trace_starts_at_once_and_has_a_speed() -> None:
    """Records say when; the first is the start, and twice the speed is half the time."""
    trace = [Item(prompt="x", at_s=at) for at in (100.0, 101.0, 104.0)]
    assert Arrivals.parse("trace").times(trace, 2.0) == [0.0, 0.5, 2.0]
    with pytest.raises(ConfigError, match="at_s"):
        Arrivals.parse("trace").times([*trace, Item(prompt="x")], 1.0)
    with pytest.raises(ConfigError, match="not decreasing"):
        Arrivals.parse("trace").times(trace[::-1], 1.0)


@pytest.mark.parametrize("text", ["poison", "burst", "burst:0", "burst:1.5", "gamma:-1", "gamma:x", "constant:3", ""])
def test_what_is_no_schedule_is_said(text: str) -> None:
    """A typing error is an error of the command line, not another load."""
    with pytest.raises(ConfigError):
        Arrivals.parse(text)
