"""Numbers of a process in Ray's own metrics, which every node exports: what to scrape where there are several Routers.

Owns `RayMirror`. Knows `ray.util.metrics`; nothing of what the numbers mean. A name in /metrics is the same here, with Ray's
prefix: `ray_cb_ray_time_to_first_token_seconds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SECONDS = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0]


class RayMirror:
    """Call it with (kind, name, value, labels). Each metric is made when it is first heard of."""

    def __init__(self, model: str, **labels: str) -> None:
        self._labels = {"model_name": model, **labels}
        self._metrics: dict[str, Any] = {}

    def __call__(self, kind: str, name: str, value: float, labels: Mapping[str, str]) -> None:
        metric = self._metrics.get(name) or self._make(kind, name, labels)
        tags = {**self._labels, **labels}
        if kind == "counter":
            metric.inc(value, tags)
        elif kind == "gauge":
            metric.set(value, tags)
        else:
            metric.observe(value, tags)

    def _make(self, kind: str, name: str, labels: Mapping[str, str]) -> Any:
        from ray.serve.metrics import Counter, Gauge, Histogram

        keys: Any = (*self._labels, *labels)
        if kind == "counter":
            made: Any = Counter(f"{name}_total", tag_keys=keys)
        elif kind == "gauge":
            made = Gauge(name, tag_keys=keys)
        else:
            made = Histogram(name, boundaries=_SECONDS, tag_keys=keys)
        self._metrics[name] = made
        return made
