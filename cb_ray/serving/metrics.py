"""Counters, gauges and histograms of one Router, and their Prometheus text.

Owns the names. What fleet tools and dashboards look for has vLLM's name as well, as a copy made when somebody reads. Each
`Metrics` has a registry of its own, so that nothing is global; `mirror` hears every number too (Ray's own metrics, where there is
a cluster). Knows prometheus_client and what the pool tells of itself; no HTTP, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

from .pool_families import pool_families

# seconds
_SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_MIDDLE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LONG = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

# our family → vLLM's, where both count the same thing
VLLM_NAMES = {
    "cb_ray_requests_running": "vllm:num_requests_running",
    "cb_ray_requests_waiting": "vllm:num_requests_waiting",
    "cb_ray_prompt_tokens": "vllm:prompt_tokens",
    "cb_ray_generated_tokens": "vllm:generation_tokens",
    "cb_ray_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "cb_ray_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "cb_ray_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "cb_ray_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "cb_ray_queue_time_seconds": "vllm:request_queue_time_seconds",
    "cb_ray_request_prompt_tokens": "vllm:request_prompt_tokens",
    "cb_ray_request_generated_tokens": "vllm:request_generation_tokens",
    "cb_ray_requests_finished": "vllm:request_success",
    "cb_ray_replica_cache_used": "vllm:kv_cache_usage_perc",
    "cb_ray_replica_prompt_tokens": "vllm:prefix_cache_queries",
    "cb_ray_replica_cached_tokens": "vllm:prefix_cache_hits",
    "cb_ray_replica_preemptions": "vllm:num_preemptions",
}
_VLLM_LABELS = {"reason": "finished_reason", "replica": "engine"}

Mirror = Callable[[str, str, float, Mapping[str, str]], None]  # (kind, name, value, labels)


class Metrics:
    """What one Router counts. Times are seconds, from the request's arrival in `generation`."""

    content_type: str = CONTENT_TYPE_LATEST

    def __init__(self, model: str, *, vllm_names: bool = True, mirror: Mirror | None = None) -> None:
        self.registry = CollectorRegistry()
        self.mirror = mirror
        self._model, self._vllm_names = model, vllm_names
        self._running = Gauge("cb_ray_requests_running", "Requests whose tokens are coming.", registry=self.registry)
        self._waiting = Gauge("cb_ray_requests_waiting", "Requests whose first token has not come.", registry=self.registry)
        self.running = self.waiting = 0
        self.responses = self._counter("http_responses", "HTTP responses.", "route", "status")
        self.rejections = self._counter("rejections", "Requests not served, by reason.", "reason")
        self.failovers = self._counter("failovers", "Streams that moved on to another replica.")
        self._finished = self._counter("requests_finished", "Requests that ended by themselves.", "reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self._cached_tokens = self._counter("cached_tokens", "Prompt tokens found in the prefix cache.")
        self._generated_tokens = self._counter("generated_tokens", "Tokens generated.")
        self._preemptions = self._counter("preemptions", "Times that requests which ended were preempted.")
        self.tokenize_time = self._histogram("tokenize_seconds", "Templates and tokenizer, for one request.", _SHORT)
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _MIDDLE)
        self._between = self._histogram("inter_token_latency_seconds", "Between two deliveries of a stream, a token.", _SHORT)
        self._per_token = self._histogram("time_per_output_token_seconds", "First token to last, a token after it.", _SHORT)
        self._duration = self._histogram("request_duration_seconds", "Arrival to last token.", _LONG)
        self._queue = self._histogram("queue_time_seconds", "Waiting, in the pool's line and in the engine.", _MIDDLE)
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._answer_length = self._histogram("request_generated_tokens", "Tokens generated for a request.", _TOKENS)

    def text(self, pool: Mapping[str, Any] | None = None) -> bytes:
        """All of it in Prometheus' text format, with `pool`: the Board's snapshot."""
        self._running.set(self.running)
        self._waiting.set(self.waiting)
        families = [*self.registry.collect(), *(pool_families(pool) if pool is not None else ())]
        if self._vllm_names:
            families += [self._as_vllm(family) for family in families if family.name in VLLM_NAMES]
        return generate_latest(_Collected(families))  # type: ignore[arg-type]

    # what happens to a request

    def first_token(self, seconds: float) -> None:
        self._observe(self._first_token, seconds)

    def delivery(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` came together, so long after those before."""
        self._between.observe(seconds / max(1, num_tokens))

    def ended(
        self,
        *,
        seconds: float,
        prompt_tokens: int,
        generated_tokens: int,
        cached_tokens: int = 0,
        preemptions: int = 0,
        queue_s: float | None = None,
        since_first_s: float | None = None,
        reason: str | None = None,
    ) -> None:
        """A request is over. `reason`: why it ended by itself; None: it failed or its client left."""
        self._observe(self._duration, seconds)
        self._inc(self._prompt_tokens, prompt_tokens)
        self._inc(self._cached_tokens, cached_tokens)
        self._inc(self._generated_tokens, generated_tokens)
        self._inc(self._preemptions, preemptions)
        self._prompt_length.observe(prompt_tokens)
        self._answer_length.observe(generated_tokens)
        if queue_s is not None:
            self._observe(self._queue, queue_s)
        if since_first_s is not None and generated_tokens > 1:
            self._observe(self._per_token, since_first_s / (generated_tokens - 1))
        if reason is not None:
            self._inc(self._finished, 1, reason=reason)
        if self.mirror is not None:
            self.mirror("gauge", "cb_ray_requests_running", self.running, {})
            self.mirror("gauge", "cb_ray_requests_waiting", self.waiting, {})

    # inside

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"cb_ray_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"cb_ray_{name}", text, buckets=tuple(buckets), registry=self.registry)

    def _inc(self, counter: Counter, amount: float, **labels: str) -> None:
        (counter.labels(**labels) if labels else counter).inc(amount)
        if self.mirror is not None and amount:
            self.mirror("counter", counter._name, amount, labels)

    def _observe(self, histogram: Histogram, value: float) -> None:
        histogram.observe(value)
        if self.mirror is not None:
            self.mirror("histogram", histogram._name, value, {})

    def _as_vllm(self, family: Metric) -> Metric:
        """The family under vLLM's name and with the labels that its dashboards filter by."""
        name = VLLM_NAMES[family.name]
        copy = Metric(name, family.documentation, family.type, family.unit)
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = {_VLLM_LABELS.get(label, label): value for label, value in sample.labels.items()}
                named = {"model_name": self._model, "engine": "0"} | labels
                copy.add_sample(name + sample.name.removeprefix(family.name), named, sample.value)
        return copy


class _Collected:
    """Families that were collected already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
