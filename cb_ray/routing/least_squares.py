"""Least squares in which no coefficient is negative, for a handful of unknowns. Owns `solve_nonnegative`. Knows only numbers."""

from __future__ import annotations

from collections.abc import Sequence

_DEPENDENT = 1e-12  # what is left of a scaled diagonal when others explain it all


def solve_nonnegative(xx: Sequence[Sequence[float]], xt: Sequence[float], floor: float = 0.0) -> list[float]:
    """The p ≥ 0 that minimises |X p - t|², from xx = XᵀX (positive definite) and xt = Xᵀt; zeros are given back as `floor`.

    Active sets (Lawson and Hanson, Solving Least Squares Problems, ch. 23): solve for those that are free; who comes out
    negative is held at zero, who would gain by leaving zero is freed, until neither happens. Ties cannot go round for ever:
    nobody is freed twice.
    """
    size = len(xt)
    free, freed = set(range(size)), set[int]()
    while True:
        p = _solve(xx, xt, sorted(free))
        worst = min(free, key=lambda i: p[i], default=None)
        if worst is not None and p[worst] < 0:
            free.remove(worst)
            continue
        gains = {i: xt[i] - sum([xx[i][j] * p[j] for j in free]) for i in range(size) if i not in free and i not in freed}
        best = max(gains, key=lambda i: gains[i], default=None)
        if best is None or gains[best] <= 1e-9 * abs(xt[best]):
            return [max(floor, p[i]) if i in free else floor for i in range(size)]
        free.add(best)
        freed.add(best)


def _solve(xx: Sequence[Sequence[float]], xt: Sequence[float], free: Sequence[int]) -> list[float]:
    """Gaussian elimination over the rows and columns in `free`; zero elsewhere, and for who says nothing that others do not.

    Scaled, so that units do not matter.
    """
    scale = [xx[i][i] ** -0.5 for i in free]
    rows = [[xx[i][j] * a * b for j, b in zip(free, scale, strict=True)] + [xt[i] * a] for i, a in zip(free, scale, strict=True)]
    count = len(rows)
    for k in range(count):  # positive definite: the diagonal is a good pivot
        pivot = rows[k]
        if pivot[k] < _DEPENDENT:
            continue
        for row in rows[k + 1 :]:
            ratio = row[k] / pivot[k]
            for j in range(k, count + 1):
                row[j] -= ratio * pivot[j]
    p = [0.0] * len(xt)
    for k in reversed(range(count)):
        row = rows[k]
        if row[k] < _DEPENDENT:
            continue
        p[free[k]] = (row[count] - sum([row[j] * p[free[j]] / scale[j] for j in range(k + 1, count)])) / row[k] * scale[k]
    return p
