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
import gc
import os
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ..engine.model_source import resolve_model
from ..errors import InvalidRequestError, UnknownModelError, nearest
from ..grammar import Grammar
from ..messages import GenerateRequest, SamplingParams, TokenChunk, as_token_ids
from ..routing.weights import InFlight, Mode
from .admin import add_admin_routes
from .args import AppArgs, RouterArgs
from .board_weights import PoolWeights
from .handle_source import HandleSource
from .http import build_http_app
from .many_models import several
from .metrics import Metrics
from .middleware import log_to_stdout
from .pool_view import PoolView, view_of
from .ray_metrics import RayMirror
from .recording import Source, recorded
from .response_store import STORE, Responses, ResponseStore, StoreClient
from .served_model import ServedModel
from .settings import DoorSettings
from .steady_source import SteadySource
from .tenants import TenantGate
from .token_pipe import PipeInlet
from .tracing import Tracing

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Deployment
    from ray.serve.handle import DeploymentHandle
    from starlette.applications import Starlette


@dataclass(frozen=True, slots=True)
class Desk:
    """One model's side of a Router."""

    model: ServedModel
    source: Source
    http: FastAPI
    pool: PoolView


class Router:
    """One Router replica. It holds no request state of its own, so any number of them may run beside each other."""

    def __init__(self, models: AppArgs | Sequence[AppArgs], *engines: DeploymentHandle) -> None:
        """`engines` are the handles of the models' engine deployments. Loads configs and tokenizers, never weights.

        Raises ConfigError and ModelSourceError when a model cannot be found, UnsupportedModelError for its tokenizer.
        """
        apps: tuple[AppArgs, ...] = (models,) if isinstance(models, AppArgs) else tuple(models)
        common = next(iter(apps))  # what the Router itself goes by is the same in all
        loaded = [served(args) for args in apps]
        store = shared_store(common) or own_store(common)
        gate = TenantGate(common.router.num_replicas)
        self._desks: dict[str, Desk] = {}
        for args, model, engine in zip(apps, loaded, engines, strict=True):
            beside = tuple(other for other in loaded if other is not model)
            self._desks[model.name] = desk(args, replace(model, beside=beside), engine, store, gate)
        first = next(iter(self._desks.values()))
        self.model, self.http = first.model, first.http
        if len(apps) > 1:
            doors = {name: found.http for name, found in self._desks.items()}
            limits = door_settings(common)
            self.http = several(doors, max_body_bytes=limits.max_body_bytes, body_timeout_s=limits.body_timeout_s)
        if common.router.access_log:
            log_to_stdout()

    def __serve_build_asgi_app__(self) -> Starlette:
        """Serve asks for the ASGI application once the Router is made. What was made by then stays as long as the process, so the
        garbage collector looks through it no more: that would stop every stream here for a while, now and then."""
        gc.freeze()
        return self.http

    async def generate(
        self, request: GenerateRequest | Mapping[str, Any] | Sequence[int], model: str | None = None
    ) -> AsyncGenerator[TokenChunk]:
        """Tokens in, tokens out, for handle calls: `handle.options(stream=True).generate.remote([1, 2, 3])`.

        `request` is a GenerateRequest, its fields as a dictionary (`sampling` a dictionary too), or the token ids alone, which
        are continued as the model's author configured it. `model`: which, where several are served. Raises CbRayError.
        """
        found = self._desks.get(model or self.model.name)
        if found is None:
            raise UnknownModelError(model or "", tuple(self._desks))
        asked = as_request(request, found.model)
        async with contextlib.aclosing(found.source.generate(asked)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def update_weights(
        self,
        source: Any,
        *,
        mode: Mode = "rolling",
        in_flight: InFlight = "keep",
        weights_version: int | None = None,
        model: str | None = None,
    ) -> PoolWeights:
        """Other weights for a whole pool, for handle calls: `handle.update_weights.remote("/models/step-200")`.

        `model`: which one, where several are served; None: the first. See `PoolView.update_weights`.
        """
        found = self._desks.get(model or self.model.name)
        if found is None:
            raise UnknownModelError(model or "", tuple(self._desks))
        return await found.pool.update_weights(source, mode=mode, in_flight=in_flight, weights_version=weights_version)


def served(args: AppArgs) -> ServedModel:
    """What the door knows of a model. Raises ConfigError, ModelSourceError, UnsupportedModelError."""
    local = resolve_model(args.model, progress=False)
    model = ServedModel.load(local.path, args.model_name, args.engine.max_model_len)
    return replace(model, max_prompt_tokens=args.router.max_prompt_tokens)


def desk(
    args: AppArgs, model: ServedModel, engine: DeploymentHandle, store: Responses | None, gate: TenantGate | None = None
) -> Desk:
    """A model's door in front of its engines."""
    moved: list[Metrics] = []
    steady = SteadySource(HandleSource(engine, inlet_of(args)), args.router.max_failovers, lambda: moved[0].failovers.inc())
    source = recorded(steady, args.request_log)
    pool = view_of(engine.app_name, engine.deployment_name)
    http = build_http_app(model, source, door_settings(args), pool, store, gate)
    if args.router.admin_api:
        add_admin_routes(http, pool)
    door = http.state.door
    moved.append(door.metrics)
    door.tracing = Tracing.of(args.tracing, "cb-ray-router")
    if args.router.ray_metrics:
        door.metrics.mirror = RayMirror(model.name)
    return Desk(model, source, http, pool)


def router_deployment() -> Deployment:
    """`Router` as a Serve deployment with HTTP: `router_deployment().options(...).bind(models, *engines)`."""
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


def own_store(args: AppArgs) -> ResponseStore | None:
    """A store in this process, one for all its models."""
    limit = args.router.stored_response_bytes
    return ResponseStore(limit) if limit else None


def _names(cls: type) -> set[str]:
    return {spec.name for spec in fields(cls)}


def inlet_of(args: AppArgs) -> PipeInlet | None:
    """The Router's end of the pipe, or None where tokens go through Ray: switched off, or where Ray's own traffic is encrypted."""
    from ray.util import get_node_ip_address

    encrypted = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    return PipeInlet(get_node_ip_address()) if args.router.token_pipe and not encrypted else None


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
