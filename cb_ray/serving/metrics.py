"""Counters, gauges and histograms of one Router, and their Prometheus text.

Owns the names. Gauges and counters that fleet tools look for carry vLLM's names as well. Each `Metrics` has a registry of its
own, so that nothing is global. Knows prometheus_client; no HTTP, no engine.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOTAL_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """What one Router counts. `running` are requests whose tokens come, `waiting` those whose first token has not come."""

    content_type: str = CONTENT_TYPE_LATEST

    def __init__(self, model: str) -> None:
        self.running = 0
        self.waiting = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(self)  # type: ignore[arg-type]
        self.responses = Counter("cb_ray_http_responses", "HTTP responses.", ["route", "status"], registry=self._registry)
        self.rejections = Counter("cb_ray_rejections", "Requests not served, by reason.", ["reason"], registry=self._registry)
        self.first_token = Histogram(
            "cb_ray_time_to_first_token_seconds", "Arrival to first token.", buckets=_TTFT_S, registry=self._registry
        )
        self.duration = Histogram(
            "cb_ray_request_duration_seconds", "Arrival to last token.", buckets=_TOTAL_S, registry=self._registry
        )

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """The plain numbers, each under our name and vLLM's."""
        gauges = (
            ("requests_running", "num_requests_running", "Requests whose tokens are coming.", self.running),
            ("requests_waiting", "num_requests_waiting", "Requests whose first token has not come.", self.waiting),
        )
        counters = (
            ("prompt_tokens", "prompt_tokens", "Prompt tokens of requests that ended.", self.prompt_tokens),
            ("cached_tokens", "prefix_cache_hits", "Prompt tokens found in the prefix cache.", self.cached_tokens),
            ("generated_tokens", "generation_tokens", "Tokens generated.", self.generated_tokens),
        )
        for family, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for ours, alias, text, value in table:
                for name in (f"cb_ray_{ours}", f"vllm:{alias}"):
                    metric = family(name, text, labels=["model_name"])
                    metric.add_metric([self._model], value)
                    yield metric

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)
