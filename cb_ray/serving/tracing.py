"""OpenTelemetry spans from the door to the engine, one trace per request, where `tracing.otlp_endpoint` says where to.

Owns the spans' names and attributes, and the way of a trace through Ray: as `traceparent` in the request itself. Knows the
OpenTelemetry API (the extra `otel`), which is imported only where tracing is on; without it every method does nothing.

    POST /v1/chat/completions ─┬─ tokenize
                               └─ engine ─┬─ queue     (in the replica's process, once for each attempt)
                                          ├─ prefill
                                          └─ decode
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..errors import ConfigError
from ..messages import GenerateRequest, TokenChunk, Usage
from .args import TracingArgs


class Tracing:
    """The tracer of one process. `provider` None: off."""

    def __init__(self, provider: Any | None = None) -> None:
        self._tracer = provider.get_tracer("cb_ray", __version__) if provider is not None else None

    @classmethod
    def of(cls, args: TracingArgs, service: str) -> Tracing:
        """As configured: spans go in batches, from a thread of their own. Raises ConfigError where the extra is not installed."""
        if args.otlp_endpoint is None:
            return cls()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ImportError:
            raise ConfigError("tracing needs OpenTelemetry: pip install 'cb-ray[otel]'", "tracing.otlp_endpoint") from None
        sampler = ParentBased(TraceIdRatioBased(args.sample_ratio))
        provider = TracerProvider(sampler=sampler, resource=Resource.create({"service.name": service}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=args.otlp_endpoint)))
        return cls(provider)

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    def span(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A span around a piece of work of the current request."""
        return self._tracer.start_as_current_span(name) if self._tracer is not None else contextlib.nullcontext()

    def traceparent(self) -> str:
        """The current span as W3C writes it; "" when there is none."""
        if self._tracer is None:
            return ""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        return carrier.get("traceparent", "")

    def begin(self, name: str, traceparent: str, *, server: bool = False, start_ns: int | None = None) -> Any:
        """A span under the one that `traceparent` names, or a new trace."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        assert self._tracer is not None
        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        return self._tracer.start_span(name, context=parent, kind=kind, start_time=start_ns)

    async def around(
        self, request: GenerateRequest, chunks: AsyncGenerator[TokenChunk], queued_s: float, replica: str
    ) -> AsyncGenerator[TokenChunk]:
        """`chunks` as they are, and an engine's span with its stages when they end. For a process whose tracing is on."""
        now = time.time_ns
        began, first, usage = now() - int(queued_s * 1e9), None, None
        span = self.begin("engine", request.traceparent, start_ns=began)
        span.set_attribute("cb_ray.replica", replica)
        span.set_attribute("cb_ray.engine_request_id", request.request_id)
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    first = first or now()
                    usage = chunk.usage or usage
                    yield chunk
        finally:
            self._stages(span, began, first, now(), queued_s, usage)
            span.end()

    def _stages(self, span: Any, began: int, first: int | None, ended: int, queued_s: float, usage: Usage | None) -> None:
        """Queue, prefill and decode as spans below an engine's."""
        from opentelemetry.trace import set_span_in_context

        assert self._tracer is not None
        started = began + int((queued_s + (usage.queue_time if usage else 0.0)) * 1e9)
        started = min(started, first or ended)
        stages = [("queue", began, started), ("prefill", started, first or ended)]
        for name, start, end in [*stages, *([("decode", first, ended)] if first else [])]:
            self._tracer.start_span(name, context=set_span_in_context(span), start_time=start).end(end)
        if usage is not None:
            span.set_attribute("gen_ai.usage.input_tokens", usage.num_prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", usage.num_generated_tokens)
            span.set_attribute("cb_ray.cached_tokens", usage.num_cached_tokens)
            span.set_attribute("cb_ray.preemptions", usage.num_preemptions)


class Traces:
    """Middleware: a server span around every request but probes, under the client's `traceparent` if it sent one."""

    def __init__(self, app: ASGIApp, *, tracing: Callable[[], Tracing], open_paths: frozenset[str]) -> None:
        self._app, self._tracing, self._open_paths = app, tracing, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tracing = self._tracing()
        if scope["type"] != "http" or not tracing.is_on or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import StatusCode, use_span

        sent = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"), "")
        span = tracing.begin(f"{scope['method']} {scope['path'][:100]}", sent, server=True)
        state = scope["state"]

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(StatusCode.ERROR)
            await send(message)

        try:
            with use_span(span):
                await self._app(scope, receive, send_and_note)
        finally:
            span.set_attribute("http.request.method", scope["method"])
            span.set_attribute("cb_ray.request_id", state["request_id"])
            for name, value in state["log"].items():
                span.set_attribute(f"cb_ray.{name}", value)
            span.end()
