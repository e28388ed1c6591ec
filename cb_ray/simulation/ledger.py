"""What came of a run: one line per request, and how the pool stood over time. Owns `Ledger` and `Outcome`.

Columns are packed arrays: a million requests take some 90 MB. Times are seconds of the simulation.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .agenda import TICKS_PER_S

NEVER = math.nan
GAP = 10**10  # ticks: times between tokens are counted in units of 10 µs


class Line(NamedTuple):
    """One request. What did not happen is nan."""

    at_s: float
    asked_s: float  # when it was asked for the last time: later than at_s where it was refused and came back
    ttft_s: float
    e2e_s: float
    num_prompt: int
    num_answer: int
    num_cached: int
    num_refused: int
    num_moved: int  # failovers
    replica: int


class Moment(NamedTuple):
    """How the pool stood."""

    at_s: float
    replicas: int  # that serve
    target: int  # that were asked for
    running: int
    waiting: int
    prompt_tokens: int  # granted so far, and of these
    cached_tokens: int  # those that engines found cached
    refused: int


class Promise(NamedTuple):
    """A refused caller was told to come back `told_s` later; a place of its own became free `true_s` later."""

    at_s: float
    told_s: float
    true_s: float

    def error(self, longest_s: float = 60.0) -> float:
        """As a share of the truth. Nobody is told to stay away for longer than `longest_s`, so that much means: at least so long."""
        early = 0.0 if self.told_s >= longest_s else max(0.0, self.true_s - self.told_s)
        return max(early, self.told_s - self.true_s) / max(self.true_s, 1e-9)


class Ledger:
    """Written while a run goes on."""

    def __init__(self) -> None:
        self._times = tuple(array("d") for _ in range(4))  # arrival, last asked, first token, end
        self._counts = tuple(array("i") for _ in range(6))
        self.gaps: Counter[int] = Counter()  # GAPs between two tokens → how often
        self.moments: list[Moment] = []
        self.promises: list[Promise] = []

    def __len__(self) -> int:
        return len(self._times[0])

    def arrive(self, at_s: float, num_prompt: int) -> int:
        """The number of the new line."""
        arrival, asked, first, end = self._times
        arrival.append(at_s)
        asked.append(at_s)
        first.append(NEVER)
        end.append(NEVER)
        prompt, answer, cached, refused, moved, replica = self._counts
        prompt.append(num_prompt)
        for column in (answer, cached, refused, moved):
            column.append(0)
        replica.append(-1)
        return len(arrival) - 1

    def asked(self, line: int, at_s: float) -> None:
        self._times[1][line] = at_s

    def first_token(self, line: int, at_s: float) -> None:
        self._times[2][line] = at_s

    def end(self, line: int, at_s: float, num_answer: int, replica: int) -> None:
        self._times[3][line] = at_s
        self._counts[1][line] = num_answer
        self._counts[5][line] = replica

    def cached(self, line: int, tokens: int) -> None:
        self._counts[2][line] += tokens

    def refused(self, line: int) -> None:
        self._counts[3][line] += 1

    def moved(self, line: int) -> None:
        self._counts[4][line] += 1

    def lines(self) -> Iterator[Line]:
        for at, asked, first, end, *counts in zip(*self._times, *self._counts, strict=True):
            yield Line(at, asked, first - at, end - at, *map(int, counts))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that a `share` of all do not exceed (nearest rank); nan for none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run that is over. `counters` and `reasons` are the pool's own."""

    ledger: Ledger
    duration_s: float
    replica_s: float  # seconds of replicas, starting and serving
    busy_s: float  # of replicas, within steps
    steps: int
    preemptions: int
    counters: dict[str, int] = field(default_factory=dict[str, int])
    reasons: dict[str, int] = field(default_factory=dict[str, int])

    def ttfts(self, since_s: float = 0.0) -> list[float]:
        """Sorted, of requests that arrived from `since_s` on."""
        return sorted([line.ttft_s for line in self.ledger.lines() if line.at_s >= since_s and not math.isnan(line.ttft_s)])

    def gap_percentile(self, share: float) -> float:
        """Seconds between two tokens of one request that a `share` of all pairs does not exceed."""
        total, seen = sum(self.ledger.gaps.values()), 0
        for gap in sorted(self.ledger.gaps):
            seen += self.ledger.gaps[gap]
            if seen >= share * total:
                return gap * GAP / TICKS_PER_S
        return NEVER
