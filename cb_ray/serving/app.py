"""`build(args)`: the Serve application `cb-ray` from the values in `deployments/app.yaml`.

Owns the translation of settings into Serve's options. It happens here, in one place, because Serve replaces whole dictionaries
when a YAML file overrides a deployment's options: set `args`, never `deployments:`.

    HTTP, handle calls ─▶ Router (num_replicas) ──handle, routed by the Board──▶ Engine (min_replicas … max_replicas)
                                    └── of several models, each has an Engine deployment and a Board of its own
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, DeploymentActorConfig, RequestRouterConfig

from ..routing.autoscaling import ScaleTargets
from ..routing.pool import PoolLimits
from .args import AppArgs, EngineArgs, PoolArgs, RouterArgs, RoutingArgs, engines_of, parse_args, parse_models
from .autoscaling import DrainTime
from .board import Board
from .engine_deployment import Engine, EngineSpec, LoadedEngine
from .replica_router import BOARD, BoardRouter
from .response_store import STORE, ResponseStore
from .router_deployment import router_deployment
from .tensor_parallel import actor_options, bundles

__all__ = ["AppArgs", "EngineArgs", "PoolArgs", "RouterArgs", "RoutingArgs", "build", "parse_args", "parse_models"]

NAME = "cb-ray"
METRICS_INTERVAL_S, LOOK_BACK_S = 1.0, 2.0
# of the free RAM that engines on one machine take for their caches together; Ray's object store, the weights and Routers live
# there too, and Ray kills processes when it runs out
SHARE_OF_RAM = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What there is to run on."""

    num_cpus: float
    num_gpus: float

    @classmethod
    def here(cls) -> Cluster:
        """The Ray cluster that this process belongs to; without one, this machine's CPUs."""
        found: Mapping[str, Any] = ray.cluster_resources() if ray.is_initialized() else {}
        return cls(num_cpus=float(found.get("CPU", os.cpu_count() or 1)), num_gpus=float(found.get("GPU", 0)))


def build(args: dict[str, Any]) -> serve.Application:
    """The application. `args` is what stands under `args:` in YAML. Raises ConfigError naming the setting that is wrong."""
    return application(parse_models(args))


def application(
    args: AppArgs | Sequence[AppArgs],
    *,
    cluster: Cluster | None = None,
    load: Callable[[EngineSpec], LoadedEngine] | None = None,
) -> serve.Application:
    """`build` for settings that were parsed. `load` replaces the engine, for tests."""
    models = (args,) if isinstance(args, AppArgs) else tuple(args)
    cluster, replicas = cluster or Cluster.here(), sum(model.pool.max_replicas for model in models)
    handles: list[Any] = []
    for model in models:
        engine = settle(model, cluster, replicas)
        spec = EngineSpec(
            model=model.model,
            engine=engine,
            slots=model.slots_per_replica,
            step_timeout_s=model.pool.step_timeout_s,
            tracing=model.tracing,
            ray_metrics=model.router.ray_metrics,
            load=load,
        )
        engines: Any = serve.deployment(name=engine_name(model, models))(Engine).options(**engine_options(model, engine))
        handles.append(engines.bind(spec))
    return router_deployment().options(**router_options(models[0])).bind(models, *handles)


def engine_name(model: AppArgs, models: Sequence[AppArgs]) -> str:
    """The deployment of a model's engines: `Engine`, or of several models `Engine-<model>`, so that one more restarts no other."""
    return engines_of(None if len(models) == 1 else model.model_name)


def settle(args: AppArgs, cluster: Cluster, replicas: int | None = None) -> EngineArgs:
    """The engine's settings with resources filled in: a GPU per rank where there are GPUs, else a fair share of CPUs and RAM.

    `replicas`: how many engines share the cluster when all are there; None: those of this model.
    """
    engine, replicas = args.engine, replicas or args.pool.max_replicas
    num_gpus = engine.num_gpus
    if num_gpus is None:
        wanted = engine.device != "cpu" and (cluster.num_gpus > 0 or engine.device.startswith("cuda"))
        num_gpus = float(engine.tensor_parallel_size) if wanted else 0.0
    left = max(0.1, cluster.num_cpus - args.router.num_replicas * args.router.num_cpus)
    share = min(1.0, left) if num_gpus else left / replicas
    num_cpus = engine.num_cpus if engine.num_cpus is not None else (int(share) if share >= 1 else max(0.1, int(share * 10) / 10))
    cores = num_cpus if num_gpus else cluster.num_cpus / replicas
    num_threads = engine.num_threads or max(1, round(cores / engine.tensor_parallel_size))
    config = dict(engine.config)
    if not num_gpus and not config.keys() & {"max_memory_percent", "num_blocks"}:
        config["max_memory_percent"] = SHARE_OF_RAM / replicas
    return replace(engine, num_gpus=num_gpus, num_cpus=float(num_cpus), num_threads=num_threads, config=config)


def pool_limits(args: AppArgs) -> PoolLimits:
    return PoolLimits(
        max_queue_size=args.max_queue_size,
        policy=args.routing.policy,
        index_max_bytes=args.routing.index_max_bytes,
        lease_timeout_s=args.pool.lease_timeout_s,
        cold_start_timeout_s=args.pool.cold_start_timeout_s,
    )


def engine_options(args: AppArgs, engine: EngineArgs) -> dict[str, Any]:
    """Serve's options for the Engine deployment. The Board grants slots, so Serve's own limits only catch races and its loss."""
    pool, limits = args.pool, asdict(pool_limits(args))
    router: Any = f"{BoardRouter.__module__}:{BoardRouter.__name__}"
    return {
        **_replicas(pool),
        "max_ongoing_requests": 2 * args.slots_per_replica,
        "max_queued_requests": -1,
        "user_config": limits,
        "deployment_actors": [DeploymentActorConfig(name=BOARD, actor_class=Board)],
        "request_router_config": RequestRouterConfig(request_router_class=router, request_router_kwargs={"limits": limits}),
        **placement(engine),
        "graceful_shutdown_timeout_s": pool.graceful_shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": pool.health_check_period_s,
        "health_check_timeout_s": pool.health_check_timeout_s,
    }


def placement(engine: EngineArgs) -> dict[str, Any]:
    """Where replicas run and what is set aside for them: an actor's options, or a placement group with a bundle for each rank."""
    selector = dict(engine.label_selector)
    if engine.tensor_parallel_size == 1:
        options = {"num_cpus": engine.num_cpus, "num_gpus": engine.num_gpus, "resources": dict(engine.resources)}
        return {"ray_actor_options": {**options, **({"label_selector": selector} if selector else {})}}
    groups: dict[str, Any] = {
        "ray_actor_options": actor_options(bundles(engine)[0]),
        "placement_group_bundles": bundles(engine),
        "placement_group_strategy": engine.placement_group_strategy,
    }
    return {**groups, **({"placement_group_bundle_label_selector": [selector]} if selector else {})}


def router_options(args: AppArgs) -> dict[str, Any]:
    """Serve's options for the Router deployment. A Router outlives the streams that go through it, and when a new version rolls
    out, the new ones serve before the old ones stop taking requests, where Ray can do that (2.60)."""
    surges = "max_surge_percent" in inspect.signature(serve.deployment).parameters
    return {
        **({"max_surge_percent": 100} if surges else {}),
        **_shared_store(args),
        "num_replicas": args.router.num_replicas,
        "max_ongoing_requests": args.router.max_ongoing_requests,
        "max_queued_requests": -1,
        "ray_actor_options": {"num_cpus": args.router.num_cpus},
        "graceful_shutdown_timeout_s": args.pool.graceful_shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": args.pool.health_check_period_s,
        "health_check_timeout_s": args.pool.health_check_timeout_s,
    }


def _shared_store(args: AppArgs) -> dict[str, Any]:
    """Several Routers keep stored responses in one actor; a single one keeps them itself."""
    limit = args.router.stored_response_bytes
    if args.router.num_replicas == 1 or not limit:
        return {}
    actor: Any = ray.remote(num_cpus=0, max_concurrency=10_000)(ResponseStore)  # type: ignore[call-overload]
    return {"deployment_actors": [DeploymentActorConfig(name=STORE, actor_class=actor, init_args=(limit,))]}


def _replicas(pool: PoolArgs) -> dict[str, Any]:
    """A fixed number, or Serve's autoscaling by our policy. The delays are the policy's, so Serve adds none."""
    if pool.min_replicas == pool.max_replicas:
        return {"num_replicas": pool.max_replicas}
    targets = ScaleTargets(
        min_replicas=pool.min_replicas,
        max_replicas=pool.max_replicas,
        target_drain_s=pool.target_drain_s,
        upscale_delay_s=pool.upscale_delay_s,
        downscale_delay_s=pool.downscale_delay_s,
        downscale_to_zero_delay_s=pool.downscale_to_zero_delay_s,
    )
    policy = AutoscalingPolicy(policy_function=f"{DrainTime.__module__}:{DrainTime.__name__}", policy_kwargs=asdict(targets))
    with warnings.catch_warnings():
        # metrics_interval_s is to become an environment variable of Ray's; the default of 10 s reacts far too late
        warnings.simplefilter("ignore", DeprecationWarning)
        scaling = AutoscalingConfig(
            min_replicas=pool.min_replicas,
            max_replicas=pool.max_replicas,
            initial_replicas=max(1, pool.min_replicas),
            metrics_interval_s=METRICS_INTERVAL_S,
            look_back_period_s=LOOK_BACK_S,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=policy,
        )
    return {"autoscaling_config": scaling}
