"""Who asks for what, when, and how long the answers will be. Owns `Arrival`, `Workload` and `Script`.

The oracle boundary: an `Arrival` is what a client shows, and all that admission, routing, scheduling and scaling may see. How long
its answer becomes is in the `Script`, which only the runner reads, token by token, as a model would say it.

    Workload ──▶ Arrival ──▶ client, Board, engine
        └──────▶ Script  ──▶ runner ──token──▶ engine
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

END_TOKEN = 1  # what the runner samples last; every other token is a filler of its request's own
FIRST_FILLER = 2


class Arrival(NamedTuple):
    """One request as its client sends it. `pages`: names of the prompt's full pages, equal where prefixes are equal."""

    at_s: float
    num_tokens: int
    pages: tuple[bytes, ...] = ()
    max_new_tokens: int | None = None
    priority: int = 0
    session: str = ""


class Told(NamedTuple):
    """An arrival and, for the script alone, how many tokens its answer has."""

    arrival: Arrival
    num_answer: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in the order of their times. `make` gives them anew from the beginning each time, from nothing but its seed."""

    name: str
    page_size: int
    make: Callable[[], Iterable[Told]] = field(repr=False)
    description: Mapping[str, object] = field(default_factory=dict[str, object])

    def __iter__(self) -> Iterator[Told]:
        return iter(self.make())

    def at_rate(self, per_second: float) -> Workload:
        """The same, sped up or slowed down until so many come per second on average."""
        count, last = 0, 0.0
        for told in self:
            count, last = count + 1, told.arrival.at_s
        speed = per_second * last / count if count and last else 1.0

        def make() -> Iterator[Told]:
            for arrival, num_answer in self:
                yield Told(arrival._replace(at_s=arrival.at_s / speed), num_answer)

        return replace(self, make=make)


class Answer:
    """What one request still has to say."""

    __slots__ = ("filler", "last_at", "left", "num_tokens")

    def __init__(self, number: int, num_tokens: int) -> None:
        self.filler = array("i", [FIRST_FILLER + number % (1 << 30)])
        self.left = self.num_tokens = max(1, num_tokens)
        self.last_at = 0  # ticks; when it last said something

    @property
    def said(self) -> int:
        return self.num_tokens - self.left

    def say(self) -> int:
        """The next token."""
        self.left -= 1
        return self.filler[0] if self.left else END_TOKEN


def steps_to_an_end(answers: Iterable[Answer]) -> int:
    """Tokens that each of these will say until one of them has said its last."""
    return min([answer.left for answer in answers])


def say_on(answers: Iterable[Answer], steps: int) -> dict[int, int]:
    """Each says so many tokens. Given back: who came to an end with the last of them, and that token."""
    ends: dict[int, int] = {}
    for row, answer in enumerate(answers):
        answer.left -= steps
        if answer.left <= 0:
            assert not answer.left, "a request would have ended within a leap"
            ends[row] = END_TOKEN
    return ends


class Script:
    """Every answer that is under way, by request. Read by the runner, and by nobody who decides."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}

    def write(self, request_id: str, number: int, num_tokens: int) -> None:
        self.answers[request_id] = Answer(number, num_tokens)

    def prompt(self, request_id: str, num_tokens: int, said: int) -> array[int]:
        """The tokens that an engine is given: a prompt of which only the pages' names matter, and what was said already."""
        prompt = array("i", bytes(4 * num_tokens))
        return prompt + self.answers[request_id].filler * said if said else prompt

    def close(self, request_id: str) -> Answer:
        return self.answers.pop(request_id)
