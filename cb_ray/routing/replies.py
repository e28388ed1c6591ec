"""What the pool answers, and what happens to those who wait. Owns `Granted`, `Queued`, `Refused`, `Expired`, `Changes` and `Room`.

Plain data, so that doors and handles can read an answer without knowing the pool. May know nothing but the values of routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .loads import RoutingDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """`ticket` now names a lease on `replica`."""

    ticket: str
    replica: str
    decision: RoutingDecision
    holder: str = ""
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """`ticket` stands in line behind at most `ahead` others."""

    ticket: str
    ahead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """As many wait as may wait."""

    ticket: str
    waiting: int
    limit: int
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How a door should treat newcomers. `returns`: seconds until places that are promised to that door alone."""

    free: int  # places for newcomers; when there are none, the door refuses them itself
    waiting: int
    limit: int
    first: int | None = None  # priority of who is next in line; who goes before that one may be granted a replica all the same
    number: int = 0  # rises with everything that the pool says
    returns: tuple[float, ...] = ()

    @property
    def full(self) -> bool:
        return not self.free


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """`ticket` left the line without a grant: no replica came up in time, or its holder has gone."""

    ticket: str
    holder: str
    waited_s: float
    reason: Literal["no_replica", "holder_gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a transition did to those who waited."""

    granted: tuple[Granted, ...] = ()
    expired: tuple[Expired, ...] = ()
