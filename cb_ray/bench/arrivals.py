"""When requests arrive: at random, evenly, in bursts, or as a trace says. Never when the last one was answered.

Owns the schedules of open-loop load, as pure functions of rate, number and seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Self

from ..errors import ConfigError
from .workloads import Item

Kind = Literal["poisson", "constant", "burst", "gamma", "trace"]
FORMS = "poisson, constant, burst:SIZE, gamma:CV or trace"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A kind of arrivals. `parameter`: requests in a burst, or the coefficient of variation of gamma-distributed gaps."""

    kind: Kind = "poisson"
    parameter: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """From a command line. Raises ConfigError for what is none of the forms."""
        kind, _, number = text.partition(":")
        try:
            parameter = float(number or 1.0)
        except ValueError:
            parameter = math.nan
        takes_number = kind in ("burst", "gamma")
        whole = kind != "burst" or parameter == round(parameter or 0)
        if kind not in ("poisson", "constant", "burst", "gamma", "trace") or takes_number != bool(number):
            raise ConfigError(f"arrivals must be {FORMS}; got {text!r}", field="arrivals")
        if not (0 < parameter < math.inf) or not whole:
            raise ConfigError(f"the number in {text!r} must be above 0, and whole for a burst", field="arrivals")
        return cls(kind, parameter)

    def __str__(self) -> str:
        return f"{self.kind}:{self.parameter:g}" if self.kind in ("burst", "gamma") else self.kind

    def times(self, items: Sequence[Item], rate: float, seed: int = 0) -> list[float]:
        """Seconds from the start at which each item arrives, not decreasing. `rate`: requests a second; with a trace, its speed.

        Gaps are exponential (poisson), all equal (constant), gamma with mean 1/rate and the given coefficient of variation
        (gamma: above 1 is burstier than poisson, below 1 more even), or 0 within bursts whose starts keep the rate. An infinite
        rate lets all arrive at once. Raises ConfigError for a trace whose items do not say when.
        """
        if self.kind == "trace":
            return _trace(items, rate)
        if math.isinf(rate):
            return [0.0] * len(items)
        dice = random.Random(seed)
        match self.kind:
            case "constant":
                return [number / rate for number in range(len(items))]
            case "burst":
                size = round(self.parameter)
                return [number // size * size / rate for number in range(len(items))]
            case "gamma":
                shape = self.parameter**-2
                gaps = [dice.gammavariate(shape, 1 / (rate * shape)) for _ in items]
            case _:
                gaps = [dice.expovariate(rate) for _ in items]
        times: list[float] = []
        now = 0.0
        for gap in gaps:
            now += gap
            times.append(now)
        return times


def _trace(items: Sequence[Item], speed: float) -> list[float]:
    times = [item.at_s for item in items]
    given = [time for time in times if time is not None]
    if len(given) < len(times) or any(late < early for early, late in pairwise(given)):
        raise ConfigError("arrivals from a trace need at_s in every record of the workload, not decreasing", field="arrivals")
    return [(time - given[0]) / speed for time in given]
