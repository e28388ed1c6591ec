"""The HTTP door: routes, statuses and envelopes in front of any `TokenSource`.

Owns which path does what, how errors look and what is refused before anything is computed. Knows the dialects and generation;
nothing of Ray, so that a test can serve it with a fake source.

    body ─▶ parse_body ─▶ tokenize ─▶ Choices ─▶ first delta ─▶ status and headers ─▶ the rest
            400            400          source     429, 400, 503   200

The first delta is awaited before the headers go out, so a refusal is always a status and never a broken stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from .. import __version__
from ..errors import BodyTooLargeError, CbRayError, InvalidRequestError, NoReplicaError, ReplicaLostError
from ..messages import GenerateRequest, SamplingParams
from ..text.detokenizer import TextDelta
from .chat_dialect import ChatBody, ChatReply, chat_choices, check_chat, tokenize_chat
from .completions_dialect import (
    CompletionsBody,
    CompletionsReply,
    check_completions,
    completion_choices,
    tokenize_prompts,
)
from .connection import ClientDisconnected, EventStream, while_connected
from .generation import Choice, TokenSource, close_source, collect, deltas
from .metrics import Metrics
from .middleware import ApiKeys, RequestIds
from .openai import error_object, parse_body
from .openapi import describe
from .reply import Reply, ReplyHead
from .served_model import ServedModel
from .tokenize_dialect import DetokenizeBody, TokenizeBody, detokenize, tokenize

if TYPE_CHECKING:
    from .pool_view import PoolView

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

_LONG_TEXT = 4_000  # characters; more than this is tokenized in a thread, since it would hold up other streams
_INTERNAL = "the server failed to answer this request; its log says why, under the request's id"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings:
    """What an operator may choose about the door."""

    max_body_bytes: int = 32 * 2**20
    num_tokenizer_threads: int = 4
    api_keys: tuple[str, ...] = ()  # none: everyone may call
    cors_origins: tuple[str, ...] = ()
    request_timeout_s: float | None = None  # of generation, from arrival at the engine
    adds_request_id: bool = True  # False where a proxy in front adds X-Request-Id to the response itself


def build_http_app(
    model: ServedModel, source: TokenSource, settings: DoorSettings | None = None, pool: PoolView | None = None
) -> FastAPI:
    """The ASGI application that serves `model` with tokens from `source`. `pool` keeps places and explains decisions."""
    settings = settings or DoorSettings()
    door = Door(model, source, settings, pool)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        yield
        door.close()

    app = FastAPI(title="cb-ray", version=__version__, lifespan=lifespan, middleware=_middleware(settings))
    app.state.door = door
    routes: Sequence[tuple[str, str, Handler, str]] = (
        ("GET", "/v1/models", door.models, "List the model that is served."),
        ("GET", "/v1/models/{name:path}", door.retrieve_model, "The card of one model."),
        ("POST", "/v1/chat/completions", door.chat, "Answer a conversation."),
        ("POST", "/v1/completions", door.completions, "Continue a text."),
        ("POST", "/tokenize", door.tokenize, "Token ids of a text or of a conversation."),
        ("POST", "/detokenize", door.detokenize, "The text of token ids."),
        ("GET", "/health", door.health, "200 while this process answers."),
        ("GET", "/ready", door.ready, "200 once a first token has been made, which this asks for if need be."),
        ("GET", "/metrics", door.metrics_text, "Prometheus text."),
        ("GET", "/debug/pool", door.debug_pool, "What the pool knows of its replicas and of who waits."),
        ("POST", "/debug/route", door.debug_route, "Where a prompt would go now, and why; takes what /tokenize takes."),
    )
    for method, path, handler, summary in routes:
        app.add_api_route(path, door.guard(path, handler), methods=[method], summary=summary, name=handler.__name__)
    app.add_exception_handler(HTTPException, _http_error)
    describe(app, _BODIES)
    return app


_BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionsBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/debug/route": TokenizeBody,
}


class Door:
    """The handlers of all routes. One for each application."""

    def __init__(self, model: ServedModel, source: TokenSource, settings: DoorSettings, pool: PoolView | None = None) -> None:
        self.model = model
        self.metrics = Metrics(model.name)
        self._source, self._settings, self._pool = source, settings, pool
        self._threads = ThreadPoolExecutor(settings.num_tokenizer_threads, thread_name_prefix="cb-ray-text")
        self._proof: asyncio.Task[None] | None = None  # that a first token can be made

    def close(self) -> None:
        """Let go of the tokenizer threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.model.card()]})

    async def retrieve_model(self, request: Request) -> Response:
        self.model.check_name(request.path_params["name"])
        return JSONResponse(self.model.card())

    async def chat(self, request: Request) -> Response:
        body = parse_body(ChatBody, await self._body(request))
        self.model.check_name(body.model)
        check_chat(body, self.model)
        head, long = ReplyHead.new("chatcmpl", self.model, int(time.time())), body.num_chars > _LONG_TEXT
        async with self._places(head, body.n or 1, long):
            ids = await self._in_thread_if(long, tokenize_chat, body, self.model)
            choices = chat_choices(body, self.model, head, ids)
            return await self._answer(request, ChatReply(head, body, self.model, choices), streams=bool(body.stream))

    async def completions(self, request: Request) -> Response:
        body = parse_body(CompletionsBody, await self._body(request))
        self.model.check_name(body.model)
        check_completions(body)
        head, long = ReplyHead.new("cmpl", self.model, int(time.time())), body.num_chars > _LONG_TEXT
        async with self._places(head, len(body.prompts) * (body.n or 1), long):
            prompts = await self._in_thread_if(long, tokenize_prompts, body, self.model)
            choices = completion_choices(body, self.model, head, prompts)
            return await self._answer(request, CompletionsReply(head, body, self.model, choices), streams=bool(body.stream))

    async def tokenize(self, request: Request) -> Response:
        body = parse_body(TokenizeBody, await self._body(request))
        if body.model is not None:
            self.model.check_name(body.model)
        return JSONResponse(await self._in_thread_if(body.num_chars > _LONG_TEXT, tokenize, body, self.model))

    async def detokenize(self, request: Request) -> Response:
        body = parse_body(DetokenizeBody, await self._body(request))
        if body.model is not None:
            self.model.check_name(body.model)
        return JSONResponse(await self._in_thread_if(len(body.tokens) > _LONG_TEXT, detokenize, body, self.model))

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if self._proof is None or (self._proof.done() and self._proof.exception() is not None):
            self._proof = asyncio.create_task(self._prove())
        await while_connected(request.receive, _finished(self._proof))
        return JSONResponse({"status": "ready"})

    async def metrics_text(self, request: Request) -> Response:
        pool = await self._pool.metrics() if self._pool is not None else b""
        return Response(self.metrics.text() + pool, media_type=self.metrics.content_type)

    async def debug_pool(self, request: Request) -> Response:
        return JSONResponse(_known(await self._pool.snapshot() if self._pool is not None else None))

    async def debug_route(self, request: Request) -> Response:
        body = parse_body(TokenizeBody, await self._body(request))
        ids = (await self._in_thread_if(body.num_chars > _LONG_TEXT, tokenize, body, self.model))["tokens"]
        decision = _known(await self._pool.explain(ids) if self._pool is not None else None)
        return JSONResponse({"prompt_tokens": len(ids), **decision})

    def guard(self, route: str, handler: Handler) -> Handler:
        """`handler` with every error as a status in the envelope, and every response counted."""

        async def guarded(request: Request) -> Response:
            try:
                response = await handler(request)
            except (ClientDisconnected, ClientDisconnect):
                response = Response(status_code=499)  # nobody reads it; it is for the log and the counters
            except Exception as error:
                if not isinstance(error, CbRayError):
                    logger.exception("%s failed, request %s", route, request.state.request_id)
                    error = CbRayError(_INTERNAL)
                self._reject(error)
                response = error_response(error)
            self.metrics.responses.labels(route, str(response.status_code)).inc()
            return response

        return guarded

    def _places(self, head: ReplyHead, count: int, long: bool) -> contextlib.AbstractAsyncContextManager[None]:
        """Places in the pool while a long text is tokenized: a full pool refuses it before, not after, the work."""
        if self._pool is None or not long:
            return contextlib.nullcontext()
        return self._pool.places([f"{head.id}-{index}" for index in range(count)])

    async def _explanation(self, request: Request, reply: Reply) -> dict[str, str]:
        """A header that says where the request went and why, for a client that asked with X-Cb-Ray-Debug."""
        if self._pool is None or "x-cb-ray-debug" not in request.headers:
            return {}
        decisions = [await self._pool.decision(choice.request.request_id) for choice in reply.choices]
        return {"X-Cb-Ray-Decision": json.dumps(decisions, separators=(",", ":"))}

    async def _answer(self, request: Request, reply: Reply, *, streams: bool) -> Response:
        session = request.headers.get("x-session-id", "")
        choices = [self._timed(choice, session) for choice in reply.choices]
        if not streams:
            written = await while_connected(request.receive, collect(self._source, choices, self.metrics))
            return JSONResponse(reply.answer(written), headers=await self._explanation(request, reply))
        stream = deltas(self._source, choices, self.metrics)
        try:
            first = reply.stream_events(*await while_connected(request.receive, _next(stream)))
        except BaseException:
            await stream.aclose()
            raise
        return EventStream(self._frames(reply, first, stream), await self._explanation(request, reply))

    async def _frames(
        self, reply: Reply, first: bytes, stream: AsyncGenerator[tuple[Choice, TextDelta]]
    ) -> AsyncGenerator[bytes]:
        """The event stream of a reply. An error on the way is an event of its own, and the last."""
        async with contextlib.aclosing(stream):
            try:
                yield first
                async for choice, delta in stream:
                    yield reply.stream_events(choice, delta)
                yield reply.stream_end()
            except Exception as error:
                if not isinstance(error, CbRayError):
                    logger.exception("stream %s failed", reply.head.id)
                    error = CbRayError(_INTERNAL)
                self._reject(error)
                yield reply.stream_error(error)

    def _reject(self, error: CbRayError) -> None:
        self.metrics.rejections.labels(error.code or error.openai_type).inc()

    def _timed(self, choice: Choice, session: str) -> Choice:
        limit = self._settings.request_timeout_s
        if limit is None and not session:
            return choice
        return replace(choice, request=replace(choice.request, timeout_s=limit, session=session))

    async def _body(self, request: Request) -> bytes:
        """The body of a JSON request. Raises InvalidRequestError for another content type, BodyTooLargeError."""
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise InvalidRequestError(f"the content type must be application/json, got {kind!r}")
        limit, pieces, size = self._settings.max_body_bytes, [], 0
        async for piece in request.stream():
            size += len(piece)
            if size > limit:
                raise BodyTooLargeError(limit)
            pieces.append(piece)
        return b"".join(pieces)

    async def _in_thread_if(self, long: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns; off the event loop when it may take long enough to hold up other streams."""
        if not long:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args, **kwargs))

    async def _prove(self) -> None:
        """Make one token. Raises what the source raises."""
        request = GenerateRequest(
            request_id=f"ready-{uuid.uuid4().hex}",
            token_ids=(self.model.eos_token_ids[0] if self.model.eos_token_ids else 0,),
            max_new_tokens=1,
            sampling=SamplingParams(temperature=0.0),
        )
        chunks = self._source.generate(request)
        try:
            async for chunk in chunks:
                if chunk.error is not None:
                    raise chunk.error
                if chunk.token_ids or chunk.is_terminal:
                    return
        finally:
            await close_source(chunks)
        raise ReplicaLostError("")


def _known(found: dict[str, Any] | None) -> dict[str, Any]:
    """Raises NoReplicaError where there is no pool to speak of."""
    if found is None:
        raise NoReplicaError("the pool cannot be asked now: it has no Board or no replica")
    return found


async def _next(stream: AsyncGenerator[T]) -> T:
    return await anext(stream)


async def _finished(task: asyncio.Task[T]) -> T:
    """The result of a task that others wait for as well: it is not cancelled when this wait is."""
    return await asyncio.shield(task)


def error_response(error: CbRayError) -> JSONResponse:
    """An error as status, envelope and, where it says when to come back, Retry-After."""
    retry = getattr(error, "retry_after_s", None)
    headers = {"Retry-After": str(max(1, math.ceil(retry)))} if retry is not None else None
    return JSONResponse(error_object(error), status_code=error.http_status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"there is no {request.url.path} here"
    elif error.status_code == 405:
        message = f"{request.method} is not a method of {request.url.path}"
    else:
        message = str(error.detail)
    body = error_object(InvalidRequestError(message))
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def _middleware(settings: DoorSettings) -> list[Middleware]:
    """From the outside in: ids on every response, then CORS (whose preflights carry no key), then keys."""
    layers = [Middleware(RequestIds, adds_header=settings.adds_request_id)]
    if settings.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        )
    if settings.api_keys:
        layers.append(Middleware(ApiKeys, keys=settings.api_keys))
    return layers
