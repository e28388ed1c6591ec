"""What requests cost, how long answers are, and when refused callers should return."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.routing.admission import LengthMeter, RateMeter, ReturnPacer
from cb_ray.routing.loads import Ask, Rates
from cb_ray.routing.members import Member
from cb_ray.routing.pool import Pool, PoolLimits
from cb_ray.routing.replies import Granted, Refused


@given(
    prefill_s=st.floats(1e-4, 1e-3),
    decode_s=st.floats(1e-4, 1e-3),
    step_s=st.floats(1e-2, 1e-1),
    seed=st.integers(0, 99),
)
def test_rates_are_found_from_mixed_work(prefill_s, decode_s, step_s, seed):
    """Beats tell only sums; what a prompt token, an answer token and a step cost comes out of them, whatever the prior was."""
    dice, meter = random.Random(seed), RateMeter()
    for _ in range(600):
        steps = dice.randint(2, 20)
        prefill, decode = dice.choice([0, dice.randint(0, 300)]) * steps, dice.randint(1, 64) * steps
        busy = prefill * prefill_s + decode * decode_s + steps * step_s
        meter.observe(prefill, decode, steps, busy * dice.uniform(0.98, 1.02))
    rates = meter.rates
    for prefill, decode, steps in [(5000, 0, 10), (0, 2000, 100), (1000, 500, 20)]:
        wanted = prefill * prefill_s + decode * decode_s + steps * step_s
        found = prefill * rates.prefill_s + decode * rates.decode_s + steps * rates.step_s
        assert found == pytest.approx(wanted, rel=0.2)


@given(
    story=st.lists(st.tuples(st.integers(-5, 5000), st.integers(-5, 500), st.integers(-2, 50), st.floats(-1, 10)), max_size=60)
)
def test_rates_are_always_positive_and_finite(story):
    """Whatever an engine reports, a price is a positive number: a router must never divide by, or sort by, nonsense."""
    meter = RateMeter()
    for observed in story:
        meter.observe(*observed)
        for price in (meter.rates.prefill_s, meter.rates.decode_s, meter.rates.step_s, meter.rates.batch):
            assert 0 < price < float("inf")


def test_one_kind_of_work_leaves_the_other_price_alone():
    """An engine that only decodes, always as many at once, says nothing about prefill; the prior stands."""
    meter = RateMeter(Rates(prefill_s=1e-3, decode_s=1e-3, step_s=1e-2))
    for _ in range(200):
        meter.observe(0, 40, 5, 0.25)
    assert meter.rates.prefill_s == pytest.approx(1e-3, rel=0.05)
    assert 40 * meter.rates.decode_s + 5 * meter.rates.step_s == pytest.approx(0.25, rel=0.05)
    assert meter.rates.batch == pytest.approx(8, rel=0.05)
    assert meter.rates.seconds(0, 40) == pytest.approx(0.25, rel=0.05)


def test_expected_lengths_follow_the_traffic_and_respect_the_bound():
    """max_tokens is what may come, not what comes; an answer cannot owe more than its bound leaves."""
    meter = LengthMeter(prior=256)
    for _ in range(200):
        meter.observe(40)
    assert meter.expect(None) == pytest.approx(40, abs=2)
    assert meter.expect(10) == 10 and meter.expect(10, emitted=9) == 1 and meter.expect(10, emitted=12) == 0
    assert meter.expect(1000, emitted=900) == pytest.approx(40, abs=2)


def test_each_refused_caller_is_promised_a_place_of_its_own():
    """Two requests end in 1 and 5 s, later ones every 2 s: promises follow that, not one moment for all."""
    pacer = ReturnPacer(seed=1)
    waits = [pacer.next_return(100.0, [1.0, 5.0], 2.0) for _ in range(5)]
    assert all(due <= wait <= due * 1.1 for due, wait in zip([1, 5, 7, 9, 11], waits, strict=True))
    late = pacer.next_return(112.2, [4.0, 6.0, 8.0], 2.0)
    assert 4 <= late <= 4.4, "promises whose time has come do not count any more"


def test_callers_that_never_return_do_not_push_the_others_away():
    """A promise lasts until its time; hammering gets nobody past the longest wait, and a minute later all is forgotten."""
    pacer = ReturnPacer(seed=1, longest_s=60)
    assert max(pacer.next_return(0.0, [], 1.0) for _ in range(1000)) == 60
    assert pacer.next_return(61.0, [2.0], 1.0) < 2.3


@pytest.mark.parametrize("burst", [20, 60, 90])
def test_after_a_burst_callers_that_obey_get_in_at_their_first_return(burst):
    """The point of computing Retry-After: no crowd comes back at once, and nine in ten find a place when they were told to."""
    dice, pool = random.Random(7), Pool(PoolLimits(max_queue_size=8), seed=3)
    pool.members(0.0, [Member(replica=f"r{n}", slots=4) for n in range(2)])
    service_s = pool.rates.seconds(100, 256) * 4  # four share a replica's time
    agenda: list[tuple[float, int, str]] = [(0.0, number, "") for number in range(burst)]  # time, caller, lease that ends
    tries, first_returns, won, done = [0] * burst, 0, 0, 0
    heapq.heapify(agenda)

    def started(granted: Granted, now: float) -> None:
        heapq.heappush(agenda, (now + service_s * dice.uniform(0.8, 1.2), int(granted.ticket.split("-")[0]), granted.ticket))

    while agenda:
        now, caller, lease = heapq.heappop(agenda)
        if lease:
            done += 1
            for granted in pool.release(now, lease).granted:
                started(granted, now)
            continue
        name = f"{caller}-{tries[caller]}"
        answer = pool.acquire(now, Ask(ticket=name, request_id=name, num_tokens=100, max_new_tokens=256))
        first_returns += tries[caller] == 1
        won += tries[caller] == 1 and not isinstance(answer, Refused)
        tries[caller] += 1
        if isinstance(answer, Granted):
            started(answer, now)
        elif isinstance(answer, Refused):
            heapq.heappush(agenda, (now + answer.retry_after_s, caller, ""))
    assert done == burst
    assert won >= 0.9 * first_returns
