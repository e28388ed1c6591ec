"""Step costs are found again from steps that they made, and the fit says how far it is off."""

from __future__ import annotations

import random

import pytest

from cb_ray.core.plan import StepWork
from cb_ray.errors import ConfigError
from cb_ray.simulation.costs import StepCosts
from cb_ray.simulation.fitting import MeasuredStep, fit_costs

TRUE = StepCosts(step_s=0.012, query_s=3e-5, sample_s=8e-5, kv_s=4e-8, attend_s=2e-9)


def steps(count: int, noise: float, disturbed: float = 0.0) -> list[MeasuredStep]:
    dice = random.Random(7)
    made: list[MeasuredStep] = []
    for _ in range(count):
        rows, prefill = dice.randrange(1, 60), dice.choice((0, 0, 100, 700))
        work = StepWork(rows + prefill, rows, rows * dice.randrange(20, 2000) + prefill, prefill * dice.randrange(1, 1500))
        strange = 20 if dice.random() < disturbed else 1
        made.append(MeasuredStep(work, TRUE.seconds(work) * strange * dice.lognormvariate(0, noise)))
    return made


def test_exact_steps_give_exact_costs():
    """Every coefficient, and no error."""
    fit = fit_costs(steps(300, 0.0))
    for name, value in TRUE.as_dict().items():
        assert fit.costs.as_dict()[name] == pytest.approx(value, rel=1e-3), name
    assert fit.error_p90 < 1e-6 and abs(fit.bias) < 1e-6


def test_noise_shows_in_the_error_and_strangers_do_not_bend_the_fit():
    """Steps with 10 % noise: the reported error says so. A few that were disturbed for long change no coefficient much."""
    fit = fit_costs(steps(800, 0.1, disturbed=0.01))
    assert fit.costs.step_s == pytest.approx(TRUE.step_s, rel=0.1)
    assert 0.03 < fit.error_p50 < 0.12 and fit.held_out == 200


def test_what_never_came_costs_nothing():
    """Only decode steps: the pairs of prompts are not guessed at."""
    decode = [MeasuredStep(StepWork(n, n, 100 * n, 0), 0.01 + 1e-4 * n) for n in range(1, 60)]
    assert fit_costs(decode).costs.attend_s == 0.0


def test_a_handful_of_steps_is_no_measurement():
    with pytest.raises(ConfigError, match="at least 40 steps, got 5"):
        fit_costs(steps(5, 0.0))
