"""What could be known: a policy that looks into every cache and reads every script, and one cache as large as all. For comparison
only, and the one place where the oracle boundary is crossed. Owns `Oracle`, `Prefixes` and `survey`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..routing.loads import Ask, Rates, ReplicaLoad, RoutingDecision
from ..routing.policies import Patience, Policy, rendezvous
from .workload import Workload

if TYPE_CHECKING:
    from .fleet import Fleet


class Oracle:
    """Prefix-aware routing with true numbers: pages as they lie in the caches, or will when those who are there are done with
    their prompts; work as it will turn out, at its true cost."""

    name = "oracle"
    patience = Patience.CACHED

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def rank(self, ask: Ask, loads: Sequence[ReplicaLoad], rates: Rates) -> RoutingDecision:
        fleet, costs = self._fleet, self._fleet.plan.shape.costs
        prices: dict[str, float] = {}
        cached: dict[str, int] = {}
        page = fleet.plan.shape.page_size
        for load in loads:
            replica = fleet.replicas[load.replica]
            replica.settle(fleet.agenda.now)
            owed_prefill, owed_decode = replica.core.owed(lambda request_id: fleet.script.answers[request_id].left)
            found = max(replica.core.found(ask.digests) * page, min(load.cached_tokens, replica.core.coming(ask.digests) * page))
            cached[load.replica] = min(found, ask.num_tokens - 1)
            missing = ask.num_tokens - cached[load.replica]
            prices[load.replica] = (owed_prefill + missing) * costs.query_s + owed_decode * (costs.query_s + costs.sample_s)
        home = ask.digests[0] if ask.digests else ask.request_id.encode()
        order = tuple(
            sorted(prices, key=lambda name: (round(prices[name] / (page * costs.query_s + 1e-9)), rendezvous(home, name)))
        )
        return RoutingDecision(
            policy=self.name, order=order, reason="foreknowledge", prices=prices, cached_tokens=cached[order[0]]
        )


def oracle() -> Callable[[Fleet], Policy]:
    """For `simulate(…, policy=oracle())`."""
    return Oracle


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """What there is to be found in a workload. Tokens; shares are of all prompt tokens."""

    working_set: int  # of pages that come more than once
    distinct: int  # of all pages
    repeated: float  # would be found by a cache that forgets nothing
    ceiling: float  # would be found by one cache of the pool's size that forgets what was used longest ago
    replica_cache: int
    pool_cache: int

    def ratio(self) -> str:
        """Working set : one replica's cache : the pool's cache."""
        one = max(1, self.replica_cache)
        return f"{self.working_set / one:.2f} : 1 : {self.pool_cache / one:.0f}"


def survey(workload: Workload, replica_cache: int, replicas: int) -> Prefixes:
    """Read a workload for its prefixes."""
    page, size = workload.page_size, replica_cache * replicas // workload.page_size
    seen: dict[bytes, bool] = {}  # page → has come again
    cache: OrderedDict[bytes, None] = OrderedDict()
    total = repeated = found = 0
    for arrival, _ in workload:
        total += arrival.num_tokens
        still_seen = still_cached = True
        for name in arrival.pages:
            still_seen &= name in seen
            still_cached &= name in cache
            repeated += still_seen
            found += still_cached
            seen[name] = name in seen
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > size:
            cache.popitem(last=False)
    return Prefixes(
        working_set=page * sum(seen.values()),
        distinct=page * len(seen),
        repeated=page * repeated / max(1, total),
        ceiling=page * found / max(1, total),
        replica_cache=replica_cache,
        pool_cache=replica_cache * replicas,
    )
