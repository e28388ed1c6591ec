"""What operators see: metrics under both names, a dashboard whose metrics exist, the same numbers in Ray's, and traces."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cb_ray.errors import ConfigError
from cb_ray.messages import EngineStats, GenerateRequest, RequestStatus, TokenChunk, Usage
from cb_ray.routing.loads import Ask
from cb_ray.routing.members import Beat, Member
from cb_ray.routing.pool import PoolLimits
from cb_ray.serving.args import TracingArgs, parse_args
from cb_ray.serving.board import BoardState
from cb_ray.serving.http import build_http_app
from cb_ray.serving.metrics import VLLM_NAMES, Metrics
from cb_ray.serving.settings import DoorSettings
from cb_ray.serving.tracing import Tracing
from tests.serving.doors import DoorUnderTest, FakeSource, chat_body, gauge, make_door, make_model, no_board

CHAT = "/v1/chat/completions"
DASHBOARD = Path(__file__).parents[2] / "k8s" / "components" / "monitoring" / "cb-ray.json"


class BookView:
    """A PoolView over a Board without Ray: one replica that has been granted a request and has beaten once."""

    def __init__(self) -> None:
        self.lookout = no_board()

    async def snapshot(self) -> dict[str, Any]:
        state = BoardState(PoolLimits(max_queue_size=4))
        state.apply(state.pool.members(state.now, [Member(replica="r1", slots=2)]))
        state.acquire(Ask(ticket="t", request_id="q", num_tokens=5))
        stats = EngineStats(num_steps=3, num_preemptions=2, prompt_tokens=40, cached_tokens=30, blocks_total=4, blocks_held=1)
        state.pool.beat(state.now, Beat(replica="r1", number=1, cache_used=stats.cache_used, engine=stats))
        return state.snapshot()

    async def decision(self, request_id: str) -> dict[str, Any]:
        known = {"replica": "r1", "waited_s": 0.5, "policy": "prefix_aware", "reason": "cached", "order": ["r1"], "prices_s": {}}
        return {**known, "predicted_cached_tokens": 6}


def with_pool(settings: DoorSettings | None = None, **script: Any) -> DoorUnderTest:
    model = make_model()
    source = FakeSource(codec=model.codec, **script)
    app = build_http_app(model, source, settings, BookView())  # type: ignore[arg-type]
    return DoorUnderTest(app=app, source=source, model=model)


# ---- metrics


def families(door: DoorUnderTest) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\w+)$", door.get("/metrics").text, re.M))


def test_every_name_of_vllms_is_there() -> None:
    """Each alias is a metric of the same type as ours, labelled as vLLM labels it; with the setting off there is none."""
    door = with_pool()
    door.chat(stream=True)
    found = families(door)
    for ours, theirs in VLLM_NAMES.items():
        kinds = {found.get(name) or found.get(f"{name}_total") for name in (ours, theirs)}
        assert len(kinds) == 1 and kinds != {None}, (ours, theirs)
    text = door.get("/metrics").text
    assert 'vllm:kv_cache_usage_perc{engine="r1",model_name="tiny"} 0.25' in text
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 1.0' in text
    assert 'vllm:prefix_cache_hits_total{engine="r1",model_name="tiny"} 30.0' in text
    assert not any(name.startswith("vllm:") for name in families(with_pool(DoorSettings(vllm_metric_names=False))))


def test_each_stage_is_timed() -> None:
    """First token, gaps, whole requests, queue, tokenizing, decisions: each has counted what happened once."""
    door = with_pool()
    tokens = door.chat().json()["usage"]["completion_tokens"]
    door.chat(stream=True)
    counts = {
        "time_to_first_token": 1,
        "inter_token_latency": tokens - 1,
        "time_per_output_token": 1,
        "request_duration": 2,
        "queue_time": 2,
        "tokenize": 2,
        "routing_decision": 1,
        "pool_wait": 1,
    }
    assert {name: gauge(door, f"cb_ray_{name}_seconds_count") for name in counts} == counts
    assert gauge(door, "cb_ray_replica_preemptions_total") == 2


def test_the_dashboard_names_only_metrics_that_exist() -> None:
    """Every panel of the Grafana dashboard has something to show."""
    door = with_pool()
    door.chat(stream=True)
    door.chat(temperature=-1)
    text = door.get("/metrics").text
    samples = set(re.findall(r"^(\w[\w:]*)(?:\{| )", text, re.M))
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    named = {name for expression in expressions for name in re.findall(r"cb_ray_\w+", expression)}
    assert len(panels) > 15 and named - samples == set()


def test_ray_hears_the_same_numbers() -> None:
    """The mirror is told of every count and time under the name that /metrics has."""
    heard: list[tuple[str, str, float]] = []
    metrics = Metrics("m", mirror=lambda kind, name, value, labels: heard.append((kind, name, value)))
    metrics.first_token(0.5)
    metrics.ended(seconds=2.0, prompt_tokens=7, generated_tokens=3, queue_s=0.25, since_first_s=1.0, reason="stop")
    assert ("histogram", "cb_ray_time_to_first_token_seconds", 0.5) in heard
    assert ("counter", "cb_ray_prompt_tokens", 7) in heard and ("histogram", "cb_ray_queue_time_seconds", 0.25) in heard
    text = metrics.text().decode()
    assert all(name in text for _, name, _ in heard)


def test_where_an_answer_was_made() -> None:
    """With a pool the extension field names the replica, why it was chosen and what was expected of its cache."""
    (choice,) = with_pool().post(CHAT, chat_body(), {"x-cb-ray-debug": "1"}).json()["cb_ray"]["choices"]
    assert (choice["replica"], choice["reason"], choice["predicted_cached_tokens"]) == ("r1", "cached", 6)


# ---- traces


@pytest.fixture
def spans() -> tuple[Tracing, InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider), exporter


TRACE = "0af7651916cd43dd8448eb211c80319c"
SENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "r1"}


def test_a_request_is_a_span_under_the_clients(spans: tuple[Tracing, InMemorySpanExporter]) -> None:
    """The server's span continues the client's trace, holds tokenizing, and its own id goes to the engine."""
    tracing, exporter = spans
    door = make_door()
    door.app.state.door.tracing = tracing
    door.post(CHAT, chat_body(stream=True), SENT)
    by_name: dict[str, Any] = {span.name: span for span in exporter.get_finished_spans()}
    server, inner = by_name[f"POST {CHAT}"], by_name["tokenize"]
    assert f"{server.context.trace_id:032x}" == TRACE and f"{server.parent.span_id:016x}" == "b7ad6b7169203331"
    assert inner.parent.span_id == server.context.span_id
    assert server.attributes["cb_ray.request_id"] == "r1" and server.attributes["http.response.status_code"] == 200
    assert server.attributes["cb_ray.completion_tokens"] > 0
    assert door.source.requests[0].traceparent == f"00-{TRACE}-{server.context.span_id:016x}-01"


def test_an_engine_adds_its_stages(spans: tuple[Tracing, InMemorySpanExporter]) -> None:
    """In the replica's process: an engine span under the request's, and below it queue, prefill and decode, one after another."""
    tracing, exporter = spans
    closed: list[bool] = []

    async def chunks() -> AsyncGenerator[TokenChunk]:
        try:
            yield TokenChunk(request_id="q", token_ids=(1,))
            usage = Usage(num_prompt_tokens=4, num_generated_tokens=2, num_cached_tokens=3, created_time=1.0, started_time=1.25)
            yield TokenChunk(request_id="q", token_ids=(2,), status=RequestStatus.FINISHED, finish_reason="stop", usage=usage)
        finally:
            closed.append(True)

    async def scenario(stop_after: int) -> None:
        request = GenerateRequest(request_id="q", token_ids=(1,), traceparent=SENT["traceparent"])
        stream = tracing.around(request, chunks(), 0.5, "r1")
        async for _ in stream:
            stop_after -= 1
            if not stop_after:
                break
        await stream.aclose()

    asyncio.run(scenario(2))
    by_name: dict[str, Any] = {span.name: span for span in exporter.get_finished_spans()}
    engine = by_name["engine"]
    assert f"{engine.context.trace_id:032x}" == TRACE and engine.attributes["cb_ray.cached_tokens"] == 3
    stages = [by_name[name] for name in ("queue", "prefill", "decode")]
    assert all(stage.parent.span_id == engine.context.span_id for stage in stages)
    assert engine.start_time == stages[0].start_time and stages[-1].end_time <= engine.end_time
    for before, after in itertools.pairwise(stages):
        assert before.end_time == after.start_time
    assert stages[0].end_time - stages[0].start_time >= 0.5e9
    asyncio.run(scenario(1))  # a reader that leaves closes the engine's generator
    assert closed == [True, True]


def test_without_tracing_nothing_is_imported_or_sent() -> None:
    """Off is the default: no span is made, and no traceparent travels."""
    door = make_door()
    door.post(CHAT, chat_body(), SENT)
    assert door.source.requests[0].traceparent == "" and not Tracing.of(TracingArgs(), "s").is_on


def test_tracing_without_its_extra_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install; a ratio out of range is refused as well."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"cb-ray\[otel\]"):
        Tracing.of(TracingArgs(otlp_endpoint="http://localhost:4318/v1/traces"), "s")
    with pytest.raises(ConfigError, match="sample_ratio"):
        parse_args({"tracing": {"sample_ratio": 2.0}})
