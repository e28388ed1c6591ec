"""Routing policies: given what is asked and how loaded the replicas with room are, the order to try them in, and why.

Owns `RoundRobin`, `LeastWork`, `PowerOfTwo`, `PrefixAware` and `make_policy`. `rank` orders all of them; `pick`, where a
policy has it, only says who is first, and does so quickly. Every
price is in seconds of one replica's time. May know nothing but the values beside it.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from .loads import Ask, Rates, ReplicaLoad, RoutingDecision

_SHOWN = 16  # replicas whose prices a quick decision tells


class Patience(Enum):
    """Which replicas a policy is shown that are behind with their prompts, so that one more would wait inside the engine."""

    NONE = "none"
    CACHED = "cached"  # those where waiting is worth it, for what they have cached


class Policy(Protocol):
    """`loads` holds at least one replica; the decision's order holds each of them once."""

    name: str
    patience: Patience

    def rank(self, ask: Ask, loads: Sequence[ReplicaLoad], rates: Rates) -> RoutingDecision: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """All replicas as one request sees them, in columns: what `rank` is given as a row for each. Entries are places in `names`."""

    names: Sequence[str]
    able: Sequence[int]  # who may be granted it, in order
    owed_s: Sequence[float]
    taken: Sequence[int]
    found: Mapping[int, int]  # entry → tokens of the prompt that are cached there; who has none is absent
    regrets: Mapping[int, float]  # entry → regret; none is absent


class Picker(Policy, Protocol):
    """A policy that can also say who is first without ranking the others: the same replica, cached tokens and reason."""

    def pick(self, ask: Ask, field: Field, rates: Rates) -> RoutingDecision:
        """The decision names only those that came close; `order` holds the first alone."""
        ...


class RoundRobin:
    """The next one in a fixed order that can begin, whatever else it is doing."""

    name = "round_robin"
    patience = Patience.NONE

    def __init__(self) -> None:
        self._last = ""

    def rank(self, ask: Ask, loads: Sequence[ReplicaLoad], rates: Rates) -> RoutingDecision:
        names = sorted(load.replica for load in loads)
        first = next((at for at, name in enumerate(names) if name > self._last), 0)
        self._last = names[first]
        order = tuple(names[first:] + names[:first])
        cached = next(load.cached_tokens for load in loads if load.replica == order[0])
        return RoutingDecision(policy=self.name, order=order, reason="next in turn", prices={}, cached_tokens=cached)


class LeastWork:
    """The replica that would be done first with what it owes."""

    name = "least_work"
    patience = Patience.NONE

    def rank(self, ask: Ask, loads: Sequence[ReplicaLoad], rates: Rates) -> RoutingDecision:
        order = sorted(loads, key=lambda load: (load.owed_s, load.num_leases, rendezvous(ask.request_id.encode(), load.replica)))
        return RoutingDecision(
            policy=self.name,
            order=tuple(load.replica for load in order),
            reason="least work owed",
            prices={load.replica: load.owed_s for load in loads},
            cached_tokens=order[0].cached_tokens,
        )

    def pick(self, ask: Ask, field: Field, rates: Rates) -> RoutingDecision:
        owed, taken, names = field.owed_s, field.taken, field.names
        least = min([owed[at] for at in field.able])
        ties = [at for at in field.able if owed[at] == least]
        first = min(ties, key=lambda at: (taken[at], rendezvous(ask.request_id.encode(), names[at])))
        return RoutingDecision(
            policy=self.name,
            order=(names[first],),
            reason="least work owed",
            prices={names[at]: least for at in ties[:_SHOWN]},
            cached_tokens=field.found.get(first, 0),
        )


class PowerOfTwo:
    """The less loaded of two drawn at random: nearly as good as the best, and never a herd."""

    name = "power_of_two"
    patience = Patience.NONE

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def rank(self, ask: Ask, loads: Sequence[ReplicaLoad], rates: Rates) -> RoutingDecision:
        drawn = self._random.sample(list(loads), len(loads))
        pair = sorted(drawn[:2], key=lambda load: (load.owed_s, load.num_leases))
        return RoutingDecision(
            policy=self.name,
            order=tuple(load.replica for load in pair + drawn[2:]),
            reason="less work of two drawn",
            prices={load.replica: load.owed_s for load in pair},
            cached_tokens=pair[0].cached_tokens,
        )


class PrefixAware:
    """Cheapest first, where the price is what the replica owes plus the part of this prompt that it would not find cached.

    Both are seconds by which other work comes later: prompt tokens and answer tokens at what one more of them adds to a step,
    without the steps themselves, which are made anyway. So while steps are bound by memory, a busy warm replica is cheap, and
    when they are bound by compute it is not. There is no weight and no threshold: affinity gives way by itself.

    What is computed here is kept here, and something else is given up for it. Where what is given up is asked for again (`regret`,
    measured), it will have to be computed again, which is added to the price: prefixes settle where caches have room, and copies
    are made only where they displace nothing that is wanted.

    Prices that differ by less than one page of prefill are ties; ties go to the replica that the prompt's first page (or its
    session) hashes to, so equal prefixes meet even before anything is known to be cached.
    """

    name = "prefix_aware"
    patience = Patience.CACHED

    def __init__(self, page_size: int) -> None:
        self._page = page_size

    def rank(self, ask: Ask, loads: Sequence[ReplicaLoad], rates: Rates) -> RoutingDecision:
        grain = max(self._page * rates.prefill_s, 1e-9)
        home = ask.session.encode() or (ask.digests[0] if ask.digests else ask.request_id.encode())
        prefill_s, tokens = rates.prefill_s, ask.num_tokens
        prices = {
            replica: owed_s + (tokens - cached) * prefill_s * (1 + regret) for replica, owed_s, _, cached, regret, _ in loads
        }
        least = round(min(prices.values()) / grain)
        ties = [replica for replica, price in prices.items() if round(price / grain) == least]
        first = sorted(ties, key=lambda replica: rendezvous(home, replica))  # only they need hashing; nobody else is first
        rest = prices.keys() - ties
        order = (*first, *[replica for replica in sorted(prices, key=prices.__getitem__) if replica in rest])
        cached = next(load.cached_tokens for load in loads if load.replica == order[0])
        warmest = max(load.cached_tokens for load in loads)
        reason = "cached prefix" if cached else "cheaper than the warm replica" if warmest else "nobody has this prefix"
        return RoutingDecision(
            policy=self.name,
            order=order,
            reason=reason,
            prices=prices,
            cached_tokens=cached,
        )

    def pick(self, ask: Ask, field: Field, rates: Rates) -> RoutingDecision:
        grain = max(self._page * rates.prefill_s, 1e-9)
        home = ask.session.encode() or (ask.digests[0] if ask.digests else ask.request_id.encode())
        prefill_s, tokens, able, owed, names = rates.prefill_s, ask.num_tokens, field.able, field.owed_s, field.names
        whole, found, regrets = tokens * prefill_s, field.found, field.regrets
        everyone = len(able) == len(names)
        prices = [price + whole for price in owed] if everyone else [owed[at] + whole for at in able]
        places: list[int] = []  # in `able`, of those that have some of it cached
        for at in found.keys() | regrets.keys() if regrets else found:
            place = at if everyone else bisect_left(able, at)
            if everyone or (place < len(able) and able[place] == at):
                cached = found.get(at, 0)
                prices[place] = owed[at] + (tokens - cached) * prefill_s * (1 + regrets.get(at, 0.0))
                if cached:
                    places.append(place)
        lowest = min(prices)
        least, near = round(lowest / grain), lowest + 2 * grain
        ties = [place for place, price in enumerate(prices) if price <= near and round(price / grain) == least]
        weigh = rendezvous_of(home)
        first = able[min(ties, key=lambda place: weigh(names[able[place]])) if len(ties) > 1 else ties[0]]
        cached = found.get(first, 0)
        reason = "cached prefix" if cached else "cheaper than the warm replica" if places else "nobody has this prefix"
        shown = {names[able[place]]: prices[place] for place in sorted({*ties[:_SHOWN], *places[:_SHOWN]})}
        return RoutingDecision(policy=self.name, order=(names[first],), reason=reason, prices=shown, cached_tokens=cached)


def rendezvous(key: bytes, replica: str) -> bytes:
    """The weight of `replica` for `key`: equal everywhere, and when a replica leaves only its own keys move."""
    return rendezvous_of(key)(replica)


def rendezvous_of(key: bytes) -> Callable[[str], bytes]:
    """`rendezvous` for one key and many replicas."""
    begun = hashlib.blake2b(digest_size=8, key=key[:64])

    def weigh(replica: str) -> bytes:
        mine = begun.copy()
        mine.update(replica.encode())
        return mine.digest()

    return weigh


def make_policy(name: str, page_size: int) -> Policy:
    """The policy of this name; raises KeyError for another."""
    makers: dict[str, Callable[[], Policy]] = {
        RoundRobin.name: RoundRobin,
        LeastWork.name: LeastWork,
        PowerOfTwo.name: PowerOfTwo,
        PrefixAware.name: lambda: PrefixAware(page_size),
    }
    return makers[name]()
