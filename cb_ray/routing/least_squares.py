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
    if size == 3:  # prices of work, asked for at every beat: where nobody is held at zero, there is nothing to choose
        p = _solve_three(xx, xt)
        if min(p) >= 0:
            return [max(floor, value) for value in p]
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


def _solve_three(xx: Sequence[Sequence[float]], xt: Sequence[float]) -> list[float]:
    """`_solve` for three unknowns, written out: the same operations in the same order, so the same bits, in a fifth of the time."""
    (xx_00, xx_01, xx_02), (xx_10, xx_11, xx_12), (xx_20, xx_21, xx_22) = xx
    a, b, c = xx_00**-0.5, xx_11**-0.5, xx_22**-0.5
    m00, m01, m02, t0 = xx_00 * a * a, xx_01 * a * b, xx_02 * a * c, xt[0] * a
    m10, m11, m12, t1 = xx_10 * b * a, xx_11 * b * b, xx_12 * b * c, xt[1] * b
    m20, m21, m22, t2 = xx_20 * c * a, xx_21 * c * b, xx_22 * c * c, xt[2] * c
    if m00 >= _DEPENDENT:
        ratio = m10 / m00
        m11, m12, t1 = m11 - ratio * m01, m12 - ratio * m02, t1 - ratio * t0
        ratio = m20 / m00
        m21, m22, t2 = m21 - ratio * m01, m22 - ratio * m02, t2 - ratio * t0
    if m11 >= _DEPENDENT:
        ratio = m21 / m11
        m22, t2 = m22 - ratio * m12, t2 - ratio * t1
    p2 = 0.0 if m22 < _DEPENDENT else t2 / m22 * c
    p1 = 0.0 if m11 < _DEPENDENT else (t1 - m12 * p2 / c) / m11 * b
    p0 = 0.0 if m00 < _DEPENDENT else (t0 - (m01 * p1 / b + m02 * p2 / c)) / m00 * a
    return [p0, p1, p2]
