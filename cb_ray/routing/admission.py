"""When to come back: what requests cost here, measured, and a pace at which refused callers are told to return.

Owns `RateMeter` (seconds per prefill and decode token, fitted to what engines report), `LengthMeter` (how long answers are) and
`ReturnPacer` (Retry-After). Pure; may know nothing but the values beside it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from .loads import Rates


class RateMeter:
    """Fits busy_seconds ≈ a · prefill_tokens + b · decode_tokens over the recent past, by least squares that forgets.

    A prior that a few beats outweigh keeps both prices positive and defined while only one kind of token has been seen.
    """

    def __init__(self, prior: Rates | None = None, forget: float = 0.98) -> None:
        prior = prior or Rates()
        self._forget = forget
        # the prior is one imagined second of each kind of work
        self._prior = (1 / prior.prefill_s, 1 / prior.decode_s)
        self._pp = self._dd = self._pd = self._pt = self._dt = 0.0
        self.rates = prior

    def observe(self, prefill: int, decode: int, busy_s: float) -> None:
        """An engine was busy for `busy_s` seconds and computed so many tokens. Ignores what cannot be."""
        if busy_s <= 0 or prefill < 0 or decode < 0 or prefill + decode == 0:
            return
        keep = self._forget
        self._pp = keep * self._pp + prefill * prefill
        self._dd = keep * self._dd + decode * decode
        self._pd = keep * self._pd + prefill * decode
        self._pt = keep * self._pt + prefill * busy_s
        self._dt = keep * self._dt + decode * busy_s
        self.rates = self._solve()

    def _solve(self) -> Rates:
        p, d = self._prior
        weight = 0.001
        pp, dd, pd = self._pp + weight * p * p, self._dd + weight * d * d, self._pd
        pt, dt = self._pt + weight * p, self._dt + weight * d
        det = pp * dd - pd * pd
        a, b = (pt * dd - dt * pd) / det, (dt * pp - pt * pd) / det
        if a <= 0:  # the boundary of the non-negative problem: the other kind explains all of the time
            a, b = 0.0, dt / dd
        elif b <= 0:
            a, b = pt / pp, 0.0
        floor = 1e-9
        return Rates(prefill_s=max(a, floor), decode_s=max(b, floor))


class LengthMeter:
    """How many tokens an answer has here. One under way is expected to need as many again (memoryless), within its bound."""

    def __init__(self, prior: float = 256.0, weight: float = 0.05) -> None:
        self.mean, self._weight = prior, weight

    def observe(self, tokens: float, count: int = 1) -> None:
        """`count` answers ended with `tokens` tokens on average."""
        share = 1 - (1 - self._weight) ** count
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

    def next_return(self, now: float, ends: Sequence[float], interval: float) -> float:
        """Seconds from `now` until an unpromised place should be free. `ends`: seconds until each running request ends, sorted."""
        while self._promised and self._promised[0] <= now:
            heapq.heappop(self._promised)
        ahead = len(self._promised)
        wait = ends[ahead] if ahead < len(ends) else (ends[-1] if ends else 0.0) + (ahead - len(ends) + 1) * interval
        wait = min(self._longest, max(self._shortest, wait * (1 + self._random.uniform(0.0, 0.1))))
        heapq.heappush(self._promised, now + wait)
        return wait
