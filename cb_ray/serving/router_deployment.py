"""`Router`: the ingress deployment. Takes HTTP and handle calls, speaks text, and sends tokens to the pool of engines.

Owns the Router's construction and its two ways in: HTTP through `http.py`, `generate` for handle calls. Which replica serves a
request is decided inside the engine's handle (`replica_router.py`); nothing here knows replicas.

    HTTP ─▶ http.py ─┐
                     ├─▶ SteadySource ─▶ HandleSource ─▶ engine handle ─▶ a replica's `generate`
    handle calls ────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ..engine.model_source import resolve_model
from ..errors import InvalidRequestError, nearest
from ..grammar import Grammar
from ..messages import GenerateRequest, SamplingParams, TokenChunk, as_token_ids
from .args import AppArgs, RouterArgs
from .handle_source import HandleSource
from .http import build_http_app
from .metrics import Metrics
from .middleware import log_to_stdout
from .pool_view import view_of
from .ray_metrics import RayMirror
from .response_store import STORE, StoreClient
from .served_model import ServedModel
from .settings import DoorSettings
from .steady_source import SteadySource
from .tracing import Tracing

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Deployment
    from ray.serve.handle import DeploymentHandle


class Router:
    """One Router replica. It holds no request state of its own, so any number of them may run beside each other."""

    def __init__(self, args: AppArgs, engine: DeploymentHandle) -> None:
        """`engine` is the handle of the engine deployment. Loads the model's config and tokenizer, never its weights.

        Raises ConfigError and ModelSourceError when the model cannot be found, UnsupportedModelError for its tokenizer.
        """
        local = resolve_model(args.model, progress=False)
        loaded = ServedModel.load(local.path, args.model_name, args.engine.max_model_len)
        self.model = replace(loaded, max_prompt_tokens=args.router.max_prompt_tokens)
        self._source = SteadySource(HandleSource(engine), args.router.max_failovers, self._moved)
        pool = view_of(engine.app_name, engine.deployment_name)
        self.http = build_http_app(self.model, self._source, door_settings(args), pool, shared_store(args))
        self._metrics: Metrics = self.http.state.door.metrics
        self.http.state.door.tracing = Tracing.of(args.tracing, "cb-ray-router")
        if args.router.ray_metrics:
            self._metrics.mirror = RayMirror(self.model.name)
        if args.router.access_log:
            log_to_stdout()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the ASGI application once the Router is made."""
        return self.http

    def _moved(self) -> None:
        self._metrics.failovers.inc()

    async def generate(self, request: GenerateRequest | Mapping[str, Any] | Sequence[int]) -> AsyncGenerator[TokenChunk]:
        """Tokens in, tokens out, for handle calls: `handle.options(stream=True).generate.remote([1, 2, 3])`.

        `request` is a GenerateRequest, its fields as a dictionary (`sampling` a dictionary too), or the token ids alone, which
        are continued as the model's author configured it. Raises CbRayError.
        """
        asked = as_request(request, self.model)
        async with contextlib.aclosing(self._source.generate(asked)) as chunks:
            async for chunk in chunks:
                yield chunk


def router_deployment() -> Deployment:
    """`Router` as a Serve deployment with HTTP: `router_deployment().options(...).bind(args, engine)`."""
    from ray import serve

    return serve.deployment(name="Router")(serve.ingress()(Router))


def door_settings(args: AppArgs) -> DoorSettings:
    """The door's settings in an app. Serve's proxies add X-Request-Id to responses, so the door does not."""
    router = args.router
    same = {name: getattr(router, name) for name in _names(DoorSettings) & _names(RouterArgs)}
    ignores = router.unknown_parameters == "warn"
    return DoorSettings(**same, num_routers=router.num_replicas, ignores_unknown=ignores, adds_request_id=False)


def shared_store(args: AppArgs) -> StoreClient | None:
    """The store that several Routers share; None: each keeps responses itself, which is right for a single one."""
    if args.router.num_replicas == 1 or not args.router.stored_response_bytes:
        return None

    async def find() -> Any:
        from ray import serve

        return await asyncio.to_thread(serve.get_deployment_actor, STORE)

    return StoreClient(find)


def _names(cls: type) -> set[str]:
    return {spec.name for spec in fields(cls)}


def as_request(value: GenerateRequest | Mapping[str, Any] | Sequence[int], model: ServedModel) -> GenerateRequest:
    """A GenerateRequest from what a handle call may pass. Raises InvalidRequestError, naming an unknown field's nearest."""
    if isinstance(value, GenerateRequest):
        return value
    fields: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"token_ids": value}
    _known(fields, GenerateRequest)
    if "token_ids" not in fields:
        raise InvalidRequestError("token_ids are required", param="token_ids")
    sampling = fields.get("sampling") or {}
    if isinstance(sampling, Mapping):
        _known(sampling, SamplingParams)
        defaults = {**model.defaults, "eos_token_ids": model.eos_token_ids}
        given = {name: Grammar.of(item) if name == "grammar" else _frozen(item) for name, item in sampling.items()}
        fields["sampling"] = SamplingParams(**{**defaults, **given})
    fields["token_ids"] = as_token_ids(fields["token_ids"], model.vocab_size)
    fields.setdefault("request_id", f"gen-{uuid.uuid4().hex}")
    return GenerateRequest(**fields)


def _known(fields: Mapping[str, Any], kind: type) -> None:
    known = kind.__dataclass_fields__.keys()  # type: ignore[attr-defined]
    for name in fields.keys() - known:
        raise InvalidRequestError(f"{name!r} is no field of {kind.__name__}; {nearest(str(name), known)}", param=str(name))


def _frozen(value: Any) -> Any:
    """Lists as the tuples that a frozen value has."""
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value
