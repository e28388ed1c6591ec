"""The HTTP door: which path does what, in front of any `TokenSource`.

Owns the routes, the order in which a request is checked, and how every error becomes a status in its API's envelope. Knows the
dialects; nothing of Ray, so that a test can serve it with a fake source.

    body ─▶ parse_body ─▶ tokenize ─▶ Choices ─▶ first delta ─▶ status and headers ─▶ the rest        (the last three: answering.py)
            400            400          source     429, 400, 503   200
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from .. import __version__
from ..errors import BodyTooLargeError, InvalidRequestError, QueueFullError, RequestTimeoutError
from . import messages_dialect, responses_dialect
from .answering import Answerer, AnyReply, public_error
from .chat_dialect import ChatBody, ChatReply, chat_choices, check_chat, tokenize_chat
from .completions_dialect import (
    CompletionsBody,
    CompletionsReply,
    check_completions,
    completion_choices,
    tokenize_prompts,
)
from .connection import ClientDisconnected
from .embeddings_dialect import EmbeddingsBody, EmbeddingsReply, check_embeddings, embedding_choices, tokenize_inputs
from .envelopes import error_response
from .generate_dialect import GenerateBody, GenerateReply, generate_choices
from .generation import Choice, TokenSource
from .messages_dialect import CountTokensBody, MessagesBody, MessagesReply
from .metrics import Metrics
from .middleware import OPEN_PATHS, AccessLog, Callers, RequestIds
from .openai import parse_body
from .openapi import describe
from .operations import Operations
from .reply import ReplyHead
from .response_store import Responses, ResponseStore
from .responses_dialect import ResponsesBody, check_responses
from .responses_reply import ResponsesReply
from .routes import Handler, Route
from .served_model import ServedModel
from .settings import DoorSettings
from .stored_responses import StoredResponses
from .tenants import Keyring, TenantGate
from .tokenize_dialect import DetokenizeBody, TokenizeBody, detokenize, tokenize
from .tracing import Traces, Tracing
from .translation import renamed

if TYPE_CHECKING:
    from .pool_view import PoolView

P = ParamSpec("P")
T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)

_LONG_TEXT = 4_000  # characters; more than this is tokenized in a thread, since it would hold up other streams


def build_http_app(
    model: ServedModel,
    source: TokenSource,
    settings: DoorSettings | None = None,
    pool: PoolView | None = None,
    store: Responses | None = None,
    gate: TenantGate | None = None,
) -> FastAPI:
    """The ASGI application that serves `model` with tokens from `source`. `pool` keeps places and explains decisions; `store` keeps
    responses (by default in this process); `gate` counts what tenants use, and may be that of other models' applications too.
    Raises ConfigError for keys that cannot be read."""
    settings = settings or DoorSettings()
    door = Door(model, source, settings, pool, store, gate)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        yield
        await door.close()

    app = FastAPI(title="cb-ray", version=__version__, lifespan=lifespan, middleware=_middleware(door))
    app.state.door = door
    routes = door.routes()
    for route in routes:
        handler = door.guard(route.path, route.handler)
        app.add_api_route(route.path, handler, methods=[route.method], summary=route.summary, name=route.handler.__name__)
    app.add_exception_handler(HTTPException, _http_error)
    describe(app, routes, model.name)
    return app


class Door:
    """The handlers of the routes that generate or tokenize, and the way every handler is called. One for each application."""

    def __init__(
        self,
        model: ServedModel,
        source: TokenSource,
        settings: DoorSettings,
        pool: PoolView | None = None,
        store: Responses | None = None,
        gate: TenantGate | None = None,
    ) -> None:
        self.model, self.settings = model, settings
        self.metrics = Metrics(model.name, vllm_names=settings.vllm_metric_names)
        self.keyring = Keyring(settings.api_keys, settings.api_keys_file)
        self.gate = gate or TenantGate(settings.num_routers)
        self.tracing = Tracing()  # off, unless who builds the door sets another
        self._pool = pool
        self._answerer = Answerer(source, self.metrics, settings, pool)
        if store is None and settings.stored_response_bytes:
            store = ResponseStore(settings.stored_response_bytes)
        self._stored = StoredResponses(store, self._answerer)
        self._operations = Operations(model, source, self.metrics, settings, pool)
        self._threads = ThreadPoolExecutor(settings.num_tokenizer_threads, thread_name_prefix="cb-ray-text")

    def routes(self) -> tuple[Route, ...]:
        """All routes, in the order in which they are looked up and shown."""
        operations, stored = self._operations, self._stored
        return (
            Route("GET", "/", operations.page, "A page to chat with the model and to watch the pool.", answers="text/html"),
            Route("GET", "/v1/models", operations.models, "List the model that is served."),
            Route("GET", "/v1/models/{name:path}", operations.retrieve_model, "The card of one model."),
            Route("GET", "/v1/capabilities", self.capabilities, "What this model, build and configuration can do."),
            Route("POST", "/v1/chat/completions", self.chat, "Answer a conversation.", ChatBody, "text/event-stream"),
            Route("POST", "/v1/completions", self.completions, "Continue a text.", CompletionsBody, "text/event-stream"),
            Route("POST", "/v1/responses", self.responses, "OpenAI's Responses API.", ResponsesBody, "text/event-stream"),
            Route("POST", "/v1/responses/input_tokens", self.count_input, "How many tokens an input has.", ResponsesBody),
            Route("GET", "/v1/responses/{response_id}", stored.retrieve, "A stored response."),
            Route("DELETE", "/v1/responses/{response_id}", stored.delete, "Forget a stored response."),
            Route("POST", "/v1/responses/{response_id}/cancel", stored.cancel, "Cancel a background response."),
            Route("GET", "/v1/responses/{response_id}/input_items", stored.input_items, "The input of a stored response."),
            Route("POST", "/v1/messages", self.messages, "Anthropic's Messages API.", MessagesBody, "text/event-stream"),
            Route("POST", "/v1/messages/count_tokens", self.count_tokens, "How many tokens a message has.", CountTokensBody),
            Route(
                "POST",
                "/v1/embeddings",
                self.embeddings,
                "Vectors of texts: the hidden state that each ends with.",
                EmbeddingsBody,
            ),
            Route("POST", "/generate", self.generate, "Tokens in, tokens out.", GenerateBody, "text/event-stream"),
            Route("POST", "/tokenize", self.tokenize, "Token ids of a text or of a conversation.", TokenizeBody),
            Route("POST", "/detokenize", self.detokenize, "The text of token ids.", DetokenizeBody),
            Route("GET", "/health", operations.health, "200 while this process answers."),
            Route("GET", "/ready", operations.ready, "200 once a first token has been made, which this asks for if need be."),
            Route("GET", "/metrics", operations.metrics_text, "Prometheus text.", answers="text/plain"),
            Route("GET", "/debug/pool", operations.debug_pool, "What the pool knows of its replicas and of who waits."),
            Route(
                "GET",
                "/debug/events",
                operations.debug_events,
                "The same, as an event whenever it changes.",
                answers="text/event-stream",
            ),
            Route("POST", "/debug/route", self.debug_route, "Where a prompt would go now, and why.", TokenizeBody),
        )

    async def close(self) -> None:
        """End what runs in the background, and let go of the tokenizer threads."""
        await self._stored.close()
        if self._pool is not None:
            self._pool.lookout.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # generating

    async def chat(self, request: Request) -> Response:
        body = await self._parsed(request, ChatBody)
        head = self._head("chatcmpl")
        async with self._chat(body, head) as reply:
            return await self._answer(request, reply, streams=bool(body.stream))

    async def responses(self, request: Request) -> Response:
        body = await self._parsed(request, ResponsesBody)
        check_responses(body, can_store=self._stored.can_store)
        history = await self._stored.history(request, body.previous_response_id)
        head = self._head("resp")
        with renamed(responses_dialect.NAMES):
            async with self._chat(responses_dialect.as_chat(body, history), head) as chat:
                reply = ResponsesReply(head, body, chat, self._stored.saver(request, body, history))
                if body.background:
                    return await self._stored.begin(request, reply, self._admitted(request, reply))
                return await self._answer(request, reply, streams=bool(body.stream))

    async def messages(self, request: Request) -> Response:
        body = await self._parsed(request, MessagesBody)
        head = self._head("msg")
        with renamed(messages_dialect.NAMES):
            async with self._chat(messages_dialect.as_chat(body, self.model), head) as chat:
                return await self._answer(request, MessagesReply(head, chat), streams=bool(body.stream))

    async def completions(self, request: Request) -> Response:
        body = await self._parsed(request, CompletionsBody)
        check_completions(body)
        head, long = self._head("cmpl"), body.num_chars > _LONG_TEXT
        async with self._places(head, len(body.prompts) * (body.n or 1), long, body.priority):
            prompts = await self._in_thread_if(long, tokenize_prompts, body, self.model)
            choices = completion_choices(body, self.model, head, prompts)
            reply = CompletionsReply(head, body, self.model, choices)
            return await self._answer(request, reply, streams=bool(body.stream))

    async def generate(self, request: Request) -> Response:
        body = await self._parsed(request, GenerateBody)
        head = self._head("gen")
        async with self._places(head, body.n or 1, long=False, priority=body.priority):
            reply = GenerateReply(head, generate_choices(body, self.model, head))
            return await self._answer(request, reply, streams=bool(body.stream))

    async def embeddings(self, request: Request) -> Response:
        body = await self._parsed(request, EmbeddingsBody)
        check_embeddings(body, self.settings.max_choices)
        head, long = self._head("embd"), body.num_chars > _LONG_TEXT
        async with self._places(head, len(body.inputs), long, body.priority):
            inputs = await self._in_thread_if(long, tokenize_inputs, body, self.model)
            return await self._answer(request, EmbeddingsReply(head, body, embedding_choices(body, head, inputs)), streams=False)

    # counting tokens

    async def count_input(self, request: Request) -> Response:
        body = await self._parsed(request, ResponsesBody)
        history = await self._stored.history(request, body.previous_response_id)
        with renamed(responses_dialect.NAMES):
            count = await self._count(responses_dialect.as_chat(body, history))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    async def count_tokens(self, request: Request) -> Response:
        body = await self._parsed(request, CountTokensBody)
        with renamed(messages_dialect.NAMES):
            return JSONResponse({"input_tokens": await self._count(messages_dialect.as_chat(body, self.model))})

    async def tokenize(self, request: Request) -> Response:
        body = await self._parsed(request, TokenizeBody)
        return JSONResponse(await self._in_thread_if(body.num_chars > _LONG_TEXT, tokenize, body, self.model))

    async def detokenize(self, request: Request) -> Response:
        body = await self._parsed(request, DetokenizeBody)
        return JSONResponse(await self._in_thread_if(len(body.tokens) > _LONG_TEXT, detokenize, body, self.model))

    async def debug_route(self, request: Request) -> Response:
        body = await self._parsed(request, TokenizeBody)
        found = await self._in_thread_if(body.num_chars > _LONG_TEXT, tokenize, body, self.model)
        return JSONResponse(await self._operations.explain(found["tokens"]))

    async def capabilities(self, request: Request) -> Response:
        from .capabilities import capabilities

        return JSONResponse(capabilities(self.model, self.settings, self.routes(), can_store=self._stored.can_store))

    # every request

    def guard(self, route: str, handler: Handler) -> Handler:
        """`handler` with every error as a status in its API's envelope, and every response counted."""

        async def guarded(request: Request) -> Response:
            request_id = request.state.request_id
            try:
                response = await handler(request)
            except (ClientDisconnected, ClientDisconnect):
                response = Response(status_code=499)  # nobody reads it; it is for the log and the counters
            except Exception as error:
                if self._pool is not None and isinstance(error, QueueFullError):
                    self._pool.lookout.refused()
                shown = public_error(error, request_id)
                self.metrics.rejections.labels(shown.code or shown.openai_type).inc()
                request.state.log.update(error=str(shown))
                response = error_response(shown, request.url.path, request_id)
            if ignored := getattr(request.state, "ignored", None):
                response.headers["X-Cb-Ray-Warning"] = f"ignored: {', '.join(ignored)}"[:1000]
            self.metrics.responses.labels(route, str(response.status_code)).inc()
            return response

        return guarded

    def _head(self, prefix: str) -> ReplyHead:
        return ReplyHead.new(prefix, self.model, int(time.time()))

    @contextlib.asynccontextmanager
    async def _chat(self, body: ChatBody, head: ReplyHead) -> AsyncGenerator[ChatReply]:
        """The reply to a chat, whichever dialect it came in, inside its places in the pool. Raises InvalidRequestError."""
        check_chat(body, self.model)
        long = body.num_chars > _LONG_TEXT
        async with self._places(head, body.n or 1, long, body.priority):
            ids = await self._in_thread_if(long, tokenize_chat, body, self.model)
            yield ChatReply(head, body, self.model, chat_choices(body, self.model, head, ids))

    async def _count(self, body: ChatBody) -> int:
        """Prompt tokens of a chat."""
        check_chat(body, self.model)
        return len(await self._in_thread_if(body.num_chars > _LONG_TEXT, tokenize_chat, body, self.model))

    async def _answer(self, request: Request, reply: AnyReply, *, streams: bool) -> Response:
        return await self._answerer.answer(request, reply, self._admitted(request, reply), streams=streams)

    def _admitted(self, request: Request, reply: AnyReply) -> list[Choice]:
        """The reply's choices within the operator's limits, under the tenant's salt. Raises InvalidRequestError."""
        settings, tenant = self.settings, request.state.tenant
        if len(reply.choices) > settings.max_choices:
            raise InvalidRequestError(
                f"n (times the number of prompts) must be at most {settings.max_choices} here, got {len(reply.choices)}",
                param="n",
            )
        choices: list[Choice] = []
        for choice in reply.choices:
            asked = choice.request
            logprobs = max(asked.sampling.logprobs or 0, asked.sampling.prompt_logprobs or 0)
            if logprobs > settings.max_logprobs:
                raise InvalidRequestError(
                    f"at most {settings.max_logprobs} logprobs a token are given here, got {logprobs}", param="logprobs"
                )
            limit = settings.max_output_tokens
            if limit is not None and (asked.max_new_tokens or 0) > limit:
                raise InvalidRequestError(
                    f"at most {limit} tokens are generated here, got {asked.max_new_tokens}", param="max_tokens"
                )
            admitted = replace(
                asked,
                max_new_tokens=limit if asked.max_new_tokens is None else asked.max_new_tokens,
                timeout_s=settings.request_timeout_s,
                session=request.headers.get("x-session-id", ""),
                cache_salt=tenant.salt(asked.cache_salt),
                traceparent=self.tracing.traceparent(),
            )
            choices.append(choice if admitted == asked else replace(choice, request=admitted))
        return choices

    @contextlib.asynccontextmanager
    async def _places(self, head: ReplyHead, count: int, long: bool, priority: int | None) -> AsyncGenerator[None]:
        """Places in the pool while a long text is tokenized: a full pool refuses it before, not after, the work. While others are
        refused all ask for places first, since a refusal then takes one call to the Board; and none while the pool is known to be full.
        """
        if self._pool is None or not (self._pool.lookout.asks_first(priority or 0) or long):
            yield
            return
        async with self._pool.places([f"{head.id}-{index}" for index in range(count)]):
            yield

    async def _parsed(self, request: Request, kind: type[Body]) -> Body:
        """The body of a request as `kind`, for the model that is served. Raises InvalidRequestError, UnknownModelError."""
        ignored: list[str] | None = [] if self.settings.ignores_unknown else None
        body = parse_body(kind, await self._body(request), ignored)
        request.state.ignored = ignored
        name = getattr(body, "model", None)
        if name is not None:
            self.model.check_name(name)
        return body

    async def _body(self, request: Request) -> bytes:
        """The body of a JSON request. Raises InvalidRequestError for another content type, BodyTooLargeError, RequestTimeoutError."""
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise InvalidRequestError(f"the content type must be application/json, got {kind[:80]!r}")
        limit, pieces, size = self.settings.max_body_bytes, [], 0
        if _announced(request) > limit:
            raise BodyTooLargeError(limit)
        try:
            async with asyncio.timeout(self.settings.body_timeout_s):
                async for piece in request.stream():
                    size += len(piece)
                    if size > limit:
                        raise BodyTooLargeError(limit)
                    pieces.append(piece)
        except TimeoutError:
            raise RequestTimeoutError(self.settings.body_timeout_s or 0.0) from None
        return b"".join(pieces)

    async def _in_thread_if(self, long: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns; off the event loop when it may take long enough to hold up other streams."""
        with self.metrics.tokenize_time.time(), self.tracing.span("tokenize"):
            if not long:
                return work(*args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args, **kwargs))


def _announced(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        message = f"there is no {path[:200]} here"
    elif error.status_code == 405:
        message = f"{request.method} is not a method of {path[:200]}"
    else:
        message = str(error.detail)
    response = error_response(InvalidRequestError(message), path, request.state.request_id, error.status_code)
    response.headers.update(error.headers or {})
    return response


def _middleware(door: Door) -> list[Middleware]:
    """From the outside in: ids on every response, spans, the log, then CORS (whose preflights carry no key), then keys and limits."""
    settings = door.settings
    layers = [Middleware(RequestIds, adds_header=settings.adds_request_id)]
    layers.append(Middleware(Traces, tracing=lambda: door.tracing, open_paths=OPEN_PATHS))
    if settings.access_log:
        layers.append(Middleware(AccessLog))
    if settings.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After", "X-Cb-Ray-Decision", "X-Cb-Ray-Warning"],
            )
        )
    if not door.keyring.is_open:
        layers.append(Middleware(Callers, keyring=door.keyring, gate=door.gate, metrics=door.metrics))
    return layers
