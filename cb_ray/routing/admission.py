"""When to come back: what work costs here, measured, and a pace at which refused callers are told to return.

Owns `RateMeter` (seconds per prompt token, answer token and step, fitted to what engines report), `LengthMeter` (how long answers
are) and `ReturnPacer` (Retry-After). Pure; may know nothing but the values beside it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from .least_squares import solve_nonnegative
from .loads import Rates

_PRIOR_WEIGHT = 0.001
_MEMORYLESS = 0.4  # spread of lengths from which on the tokens so far say nothing of those to come
_SHORTEST_S = 1e-6  # what a step cannot be done in
_CHEAPEST = 1e-9  # seconds; a price of nothing would make all replicas alike


class RateMeter:
    """Fits busy_seconds ≈ prefill_s · prompt tokens + decode_s · answer tokens + step_s · steps to what engines report.

    Least squares that forgets, with no price below zero, and a prior that a few beats outweigh: prices stay defined while only
    one kind of work was seen, or while batches are always of one size, so that tokens and steps cannot be told apart.
    """

    def __init__(self, prior: Rates | None = None, forget: float = 0.98) -> None:
        self.rates = prior or Rates()
        self._forget = forget
        prices = (self.rates.prefill_s, self.rates.decode_s, self.rates.step_s)
        # the prior: one imagined second of each kind of work, with little weight
        squares, sums = [_PRIOR_WEIGHT / price**2 for price in prices], [_PRIOR_WEIGHT / price for price in prices]
        self._prior = [squares[0], 0.0, 0.0, squares[1], 0.0, squares[2], *sums]
        self._sums = self._prior  # XᵀX, of which the upper triangle is kept, row by row, and Xᵀt

    def observe(self, prefill: int, decode: int, steps: int, busy_s: float) -> None:
        """An engine was busy for `busy_s` seconds, made so many steps and computed so many tokens. Ignores what cannot be."""
        if busy_s < _SHORTEST_S or min(prefill, decode, steps) < 0 or not steps or prefill + decode == 0:
            return
        p, d, s = prefill / busy_s, decode / busy_s, steps / busy_s  # per second, so that errors count in proportion
        news, keep = (p * p, p * d, p * s, d * d, d * s, s * s, p, d, s), self._forget
        self._sums = [keep * (x - prior) + prior + new for x, prior, new in zip(self._sums, self._prior, news, strict=True)]
        pp, pd, ps, dd, ds, ss, *xt = self._sums
        batch = self.rates.batch + 0.05 * (max(1.0, decode / steps) - self.rates.batch) if decode else self.rates.batch
        prefill_s, decode_s, step_s = solve_nonnegative(((pp, pd, ps), (pd, dd, ds), (ps, ds, ss)), xt, _CHEAPEST)
        self.rates = Rates(prefill_s=prefill_s, decode_s=decode_s, step_s=step_s, batch=batch)


class LengthMeter:
    """How many tokens an answer has here. One under way is expected to need as many again (memoryless), within its bound."""

    def __init__(self, prior: float = 256.0, weight: float = 0.05) -> None:
        self.mean, self._weight, self._seen = prior, weight, 1  # the prior counts as one answer
        self.spread = 0.0  # mean distance from the mean, as a share of it: 0 if all are alike, 0.74 if exponential

    def observe(self, tokens: float, count: int = 1) -> None:
        """`count` answers ended with `tokens` tokens on average."""
        weight, self._seen = max(self._weight, 1 / (1 + self._seen)), self._seen + count
        share = 1 - (1 - weight) ** count
        if count == 1:  # of more, only their mean is known
            self.spread += self._weight * (min(1.0, abs(tokens - self.mean) / max(1.0, self.mean)) - self.spread)
        self.mean += share * (tokens - self.mean)

    def expect(self, max_new_tokens: int | None, emitted: int = 0) -> int:
        """Tokens still to come of an answer that has `emitted` and may have `max_new_tokens`."""
        expected = max(1, round(self.mean))
        return expected if max_new_tokens is None else max(0, min(expected, max_new_tokens - emitted))


class ReturnPacer:
    """Tells refused callers when to come back: each one is promised the next place that nobody was promised yet.

        places free up      ·  ·   ·    ·    ·    ·    ·     when running requests end, then one every `interval` seconds
        refused callers     1st 2nd 3rd …

    Promising everybody the same moment would only move the crowd. A promise is forgotten when its time has come, whether the
    caller came or not, so callers that never return do not push the others off for ever. Times are jittered by a tenth.
    """

    def __init__(self, seed: int = 0, shortest_s: float = 0.05, longest_s: float = 60.0) -> None:
        self._random = random.Random(seed)
        self._shortest, self._longest = shortest_s, longest_s
        self._promised: list[float] = []  # a heap of times that have not come yet

    def next_return(self, now: float, ends: Sequence[float], interval: float, spread: float = 0.0) -> float:
        """Seconds from `now` until an unpromised place should be free. `ends`: seconds until each running request ends, sorted.

        The more lengths `spread`, the less is known of who ends when, and the more does it look as if one ended every `interval`.
        """
        while self._promised and self._promised[0] <= now:
            heapq.heappop(self._promised)
        ahead = len(self._promised)
        wait = ends[ahead] if ahead < len(ends) else (ends[-1] if ends else 0.0) + (ahead - len(ends) + 1) * interval
        known = max(0.0, 1 - spread / _MEMORYLESS)
        wait = known * wait + (1 - known) * (ahead + 1) * interval
        wait = min(self._longest, max(self._shortest, wait * (1 + self._random.uniform(0.0, 0.1))))
        heapq.heappush(self._promised, now + wait)
        return wait
