"""The values that routing speaks in: what work costs, what is asked, how loaded a replica is, what was decided.

Owns `Rates`, `Ask`, `ReplicaLoad`, `RoutingDecision`. Plain data; may know nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What work costs one replica, in seconds: a step takes step_s + prefill_s per prompt token + decode_s per answer token in it.

    The defaults stand until beats were measured. `batch` is the number of answer tokens that a step makes here.
    """

    prefill_s: float = 2e-4
    decode_s: float = 2e-4
    step_s: float = 2e-2
    batch: float = 4.0

    def seconds(self, prefill: float, decode: float, batch: float | None = None) -> float:
        """Time until so much work is done in steps of `batch` answer tokens. Drains and waits are reckoned at the usual batch, which
        is the default; the number of replicas at the batch of full ones, since fewer replicas would be fuller."""
        return prefill * self.prefill_s + decode * (self.decode_s + self.step_s / (batch or self.batch))

    def added(self, prefill: float, decode: float) -> float:
        """Time by which so much work makes all other work later: what routing is priced in. Steps are made anyway."""
        return prefill * self.prefill_s + decode * self.decode_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request as the pool sees it. `ticket` is chosen by the caller, is unique, and names the request's place in line and
    then its lease; `holder` is the process that must keep renewing it."""

    ticket: str
    request_id: str
    holder: str = ""
    num_tokens: int = 1
    max_new_tokens: int | None = None
    digests: tuple[bytes, ...] = ()
    priority: int = 0  # lower goes first
    session: str = ""
    readmit: bool = False  # was admitted before (its replica refused or died): goes to the head, is not counted again


class ReplicaLoad(NamedTuple):  # a tuple, since each decision makes one for each replica
    """A snapshot of one replica, as it looks to one request: what it owes, how full it is, how much of the prompt it has."""

    replica: str
    owed_s: float  # by which the work owed here makes other work later
    num_leases: int
    cached_tokens: int = 0  # of the asked prompt, so far as is known
    regret: float = 0.0  # of the pages that it must give up for new ones, the share that is asked for again
    age_s: float = 0.0  # since the replica was last heard of


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingDecision:
    """What a policy decided and why. `order` is best first; `prices` are seconds by replica; `cached_tokens` is the prediction
    for the first of `order`."""

    policy: str
    order: tuple[str, ...]
    reason: str
    prices: Mapping[str, float]
    cached_tokens: int = 0
