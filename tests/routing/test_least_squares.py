"""Least squares without negative coefficients, against trying every set of zeros."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.routing.least_squares import _solve, _solve_three, solve_nonnegative

numbers = st.floats(-3, 3).map(lambda value: round(value, 2))


def gram(rows: list[list[float]], targets: list[float]) -> tuple[list[list[float]], list[float]]:
    """XᵀX with a small ridge, and Xᵀt."""
    size = len(rows[0])
    xx = [[sum(row[i] * row[j] for row in rows) + (0.1 if i == j else 0) for j in range(size)] for i in range(size)]
    return xx, [sum(row[i] * target for row, target in zip(rows, targets, strict=True)) for i in range(size)]


def error(xx, xt, p) -> float:
    quadratic = sum(p[i] * xx[i][j] * p[j] for i in range(len(p)) for j in range(len(p)))
    return quadratic - 2 * sum(a * b for a, b in zip(xt, p, strict=True))


@given(data=st.lists(st.tuples(st.lists(numbers, min_size=3, max_size=3), numbers), min_size=1, max_size=8))
def test_nothing_nonnegative_fits_better(data):
    """The slow twin: solve for every choice of coefficients that may be above zero, keep the best that has none below."""
    xx, xt = gram([row for row, _ in data], [target for _, target in data])
    found = solve_nonnegative(xx, xt)
    assert min(found) >= 0
    best = 0.0
    for free in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in range(4)):
        p = [0.0] * 3
        for _ in range(60):  # Gauss-Seidel, which converges for a positive definite matrix
            for i in free:
                p[i] += (xt[i] - sum(xx[i][j] * p[j] for j in range(3))) / xx[i][i]
        if min(p) >= 0:
            best = min(best, error(xx, xt, p))
    assert error(xx, xt, found) <= best + 1e-9


@given(data=st.lists(st.tuples(st.lists(numbers, min_size=3, max_size=3), numbers), min_size=1, max_size=8))
def test_three_unknowns_written_out(data):
    """The short way for three unknowns is the long way, to the last bit."""
    xx, xt = gram([row for row, _ in data], [target for _, target in data])
    assert _solve_three(xx, xt) == _solve(xx, xt, [0, 1, 2])


def test_known_prices_are_found():
    """Exact data gives exact coefficients, in whatever units."""
    rows = [[1.0, 2e6, 3.0], [1.0, 5e6, 1.0], [1.0, 1e6, 7.0], [1.0, 3e6, 2.0]]
    prices = [0.02, 4e-8, 0.0]
    targets = [sum(a * b for a, b in zip(row, prices, strict=True)) for row in rows]
    xx = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    xt = [sum(row[i] * target for row, target in zip(rows, targets, strict=True)) for i in range(3)]
    assert solve_nonnegative(xx, xt) == pytest.approx(prices, abs=1e-9)
