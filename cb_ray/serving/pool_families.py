"""The Board's snapshot as Prometheus families: the pool's counts, each replica's, and how long decisions and waiting took.

Owns their names. Knows prometheus_client and the snapshot's form; no actors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

_REPLICA_GAUGES = {
    "leases": "Requests granted to it.",
    "stalled": "Requests that wait inside its engine.",
    "owed_s": "Work it owes, in seconds.",
    "cache_used": "Share of its KV cache that requests hold, between 0 and 1.",
}
_ENGINE_GAUGES = {
    "num_running": ("running", "Requests in its steps."),
    "num_waiting": ("waiting", "Requests in its engine that wait for room."),
    "blocks_held": ("blocks_held", "Blocks that requests hold."),
    "blocks_cached": ("blocks_cached", "Free blocks that still hold prefixes."),
    "blocks_total": ("blocks", "Blocks there are."),
    "weights_version": ("weights_version", "Version of its weights."),
}
_ENGINE_COUNTERS = {
    "num_steps": ("steps", "Steps made."),
    "num_preemptions": ("preemptions", "Requests that lost their memory for a while."),
    "num_finished": ("finished", "Requests that ended by themselves."),
    "num_failed": ("failed", "Requests that failed."),
    "num_cancelled": ("cancelled", "Requests that were cancelled."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "cached_tokens": ("cached_tokens", "Of them, found in the prefix cache."),
    "generated_tokens": ("generated_tokens", "Tokens generated."),
}
_TIMES = {
    "decision_s": ("cb_ray_routing_decision_seconds", "What a routing decision takes in the Board."),
    "line_wait_s": ("cb_ray_pool_wait_seconds", "Waiting in the pool's line."),
}


def pool_families(counts: Mapping[str, Any]) -> list[Metric]:
    """All families of one snapshot."""
    replicas: Mapping[str, Mapping[str, Any]] = counts["replicas"]
    families: list[Metric] = [
        GaugeMetricFamily("cb_ray_pool_waiting", "Requests in the waiting line.", value=counts["waiting"]),
        GaugeMetricFamily("cb_ray_pool_waiting_limit", "max_queue_size; 0: no bound.", value=counts["limit"]),
        GaugeMetricFamily("cb_ray_pool_owed_seconds", "Work owed, in seconds of one replica.", value=counts["owed_s"]),
        GaugeMetricFamily("cb_ray_pool_replicas", "Replicas that may be granted requests.", value=len(replicas)),
        GaugeMetricFamily("cb_ray_pool_index_pages", "Pages in the prefix index.", value=counts["index_pages"]),
    ]
    families += [
        CounterMetricFamily(f"cb_ray_pool_{name}", "See docs/pool.md.", value=value) for name, value in counts["counters"].items()
    ]
    reasons = CounterMetricFamily("cb_ray_pool_decisions", "Grants by reason.", labels=["reason"])
    for reason, value in counts["reasons"].items():
        reasons.add_metric([reason], value)
    families.append(reasons)
    for name, text in _REPLICA_GAUGES.items():
        families.append(_per_replica(GaugeMetricFamily, name, text, {who: facts[name] for who, facts in replicas.items()}))
    engines = {who: facts["engine"] for who, facts in replicas.items() if facts.get("engine")}
    for kind, table in ((GaugeMetricFamily, _ENGINE_GAUGES), (CounterMetricFamily, _ENGINE_COUNTERS)):
        for source, (name, text) in table.items():
            families.append(_per_replica(kind, name, text, {who: stats[source] for who, stats in engines.items()}))
    for source, (name, text) in _TIMES.items():
        if times := counts.get("times", {}).get(source):
            families.append(HistogramMetricFamily(name, text, buckets=times["buckets"], sum_value=times["sum"]))
    return families


def engine_numbers(stats: Mapping[str, Any], cache_used: float) -> list[tuple[str, str, float]]:
    """What one engine counts as (kind, name, value), under the same names. Its totals are given as they stand: as gauges."""
    names = {**_ENGINE_GAUGES, **{source: (f"{name}_total", text) for source, (name, text) in _ENGINE_COUNTERS.items()}}
    numbers = [("gauge", f"cb_ray_replica_{name}", float(stats[source])) for source, (name, _) in names.items()]
    return [*numbers, ("gauge", "cb_ray_replica_cache_used", cache_used)]


def _per_replica(kind: type[Any], name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = kind(f"cb_ray_replica_{name}", text, labels=["replica"])
    for replica, value in values.items():
        family.add_metric([replica], value)
    return family
