"""Step costs from measured steps. Owns `MeasuredStep`, `Fit` and `fit_costs`.

The form is that of `costs.py`, the method that of the Board's prices (`routing/admission.py`, note 16): least squares of relative
errors, no coefficient negative. Every fourth step is held out and tells how good the fit is on steps that it has not seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..core.plan import StepWork
from ..errors import ConfigError
from ..routing.least_squares import solve_nonnegative
from .costs import StepCosts
from .ledger import percentile

_HELD_OUT = 4  # one step in so many
_FEWEST = 40
_STRANGE = 4.0  # a step that took so many times what the rest say was disturbed: left out of the second fit, not of the error
_RIDGE = 1e-9


class MeasuredStep(NamedTuple):
    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """`costs`, and their relative errors on `held_out` steps that were not fitted."""

    costs: StepCosts
    steps: int
    held_out: int
    error_p50: float
    error_p90: float
    bias: float  # predicted time of all held-out steps together, over the time they took, less one


def fit_costs(steps: Sequence[MeasuredStep]) -> Fit:
    """Raises ConfigError when there are too few steps to tell anything."""
    usable = [step for step in steps if step.seconds > 0 and step.work.query_tokens > 0]
    if len(usable) < _FEWEST:
        raise ConfigError(f"a fit needs at least {_FEWEST} steps, got {len(usable)}; measure for longer", "steps")
    fitted = [step for number, step in enumerate(usable) if number % _HELD_OUT]
    held_out = usable[::_HELD_OUT]
    costs = _fit(fitted)
    calm = [step for step in fitted if step.seconds < _STRANGE * costs.seconds(step.work)]
    costs = _fit(calm)
    errors = sorted([abs(costs.seconds(step.work) - step.seconds) / step.seconds for step in held_out])
    total = sum([step.seconds for step in held_out])
    return Fit(
        costs=costs,
        steps=len(fitted),
        held_out=len(held_out),
        error_p50=percentile(errors, 0.5),
        error_p90=percentile(errors, 0.9),
        bias=sum([costs.seconds(step.work) for step in held_out]) / total - 1,
    )


def _fit(steps: Iterable[MeasuredStep]) -> StepCosts:
    xx, xt = [[0.0] * 5 for _ in range(5)], [0.0] * 5
    for work, took in steps:
        row = [value / took for value in (1, *work)]  # per second, so that errors count in proportion
        for i, a in enumerate(row):
            xt[i] += a
            for j, b in enumerate(row):
                xx[i][j] += a * b
    largest = max(xx[i][i] for i in range(5))
    for i in range(5):  # what never came costs nothing, and does not make the matrix singular
        xx[i][i] = xx[i][i] * (1 + _RIDGE) or largest
    step_s, query_s, sample_s, kv_s, attend_s = solve_nonnegative(xx, xt)
    return StepCosts(step_s=step_s, query_s=query_s, sample_s=sample_s, kv_s=kv_s, attend_s=attend_s)


def read_steps(paths: Iterable[str | Path]) -> list[MeasuredStep]:
    """Steps from logs that engines wrote (setting `engine.step_log`). Raises ConfigError for a line of another form."""
    steps: list[MeasuredStep] = []
    for path in paths:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            try:
                found = json.loads(line)
                work = StepWork(int(found["query"]), int(found["samples"]), int(found["kv"]), int(found["pairs"]))
                steps.append(MeasuredStep(work, float(found["s"])))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"line {number} of {path} is no step of a step log: {error!r}", "step_log") from error
    return steps
