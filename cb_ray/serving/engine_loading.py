"""From a model's name to an engine that is ready to start: resolve, load with transformers, wire.

Owns the choice of device, precision and threads. Imports torch and transformers, so it is imported only where an engine is made.
Blocks for as long as loading takes: call it in a thread.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..config import ContinuousBatchingConfig, WorkloadHints
from ..engine import build as engine_build
from ..engine.follower import FollowerLoop
from ..engine.machine import multiplies_bfloat16, widens_weights
from ..engine.manager import ContinuousBatchingManager
from ..engine.model_source import resolve_model
from ..engine.parts import EngineParts
from ..engine.rendezvous import load_share
from ..engine.step_log import StepLog
from ..errors import ConfigError
from ..routing.reporter import PageNews
from .args import EngineArgs
from .engine_deployment import LoadedEngine
from .tensor_parallel import Place

logger = logging.getLogger("ray.serve")


_NICE = 10


def give_way() -> None:
    """The calling thread, and those that it will start, go after all others: an engine that computes on the CPU shares it with the
    Board and the door, which need little and need it at once."""
    os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def load_engine(source: str, args: EngineArgs, place: Place | None = None) -> LoadedEngine:
    """The engine that `args` describe, over the model that `source` names; not started. `place`: it leads the ranks of a team.

    Raises ModelSourceError, ConfigError, UnsupportedModelError or MemoryError.
    """
    model = load_model(source, args, place)
    build = _builder(args.max_model_len)
    manager = ContinuousBatchingManager(model, model.generation_config, _settings(args), build=build)
    if args.warmup:
        manager.warmup()
    if model.device.type == "cpu":
        manager.on_start = give_way
    if args.step_log is not None:
        manager.on_step = StepLog(args.step_log).add
    logger.info(manager.summary)
    facts, names = manager.facts, manager.track_pages()

    def pages(full: bool) -> PageNews:
        added, forgotten = names.take(full)
        return PageNews(full=full, added=added, evicted=forgotten)

    cache_tokens = facts.num_blocks * facts.page_size
    return LoadedEngine(
        engine=manager,
        page_size=facts.page_size,
        cache_tokens=cache_tokens,
        step_tokens=facts.max_batch_tokens,
        pages=pages,
    )


def load_weights(path: str, dtype: Any, device: torch.device) -> Any:
    """The model, read straight to a GPU where accelerate is installed: a host need not hold it, and no tensor is copied twice."""
    straight = device.type == "cuda" and importlib.util.find_spec("accelerate") is not None
    place: dict[str, Any] = {"device_map": {"": device}} if straight else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **place)


def load_follower(
    source: str, args: EngineArgs, place: Place, failed: Callable[[BaseException], object]
) -> tuple[FollowerLoop, Any]:
    """A rank's share of that engine, which follows once it is run, and its model. `failed` hears at once of what goes wrong then."""
    model = load_model(source, args, place)
    parts = _builder(args.max_model_len)(model, model.generation_config, _settings(args), WorkloadHints())
    assert parts.follower is not None, "the first rank leads"
    if model.device.type == "cpu":
        give_way()
    return FollowerLoop(parts.follower, parts.runner, stats=parts.core.stats(), failed=failed), model


def load_model(source: str, args: EngineArgs, place: Place | None = None) -> Any:
    """The model, whole or this rank's share of it. Heads that cannot be shared out are refused before anything is loaded."""
    device = choose_device(args.device)
    torch.set_num_threads(args.num_threads or os.cpu_count() or 1)
    local = resolve_model(source, progress=False)
    if place is None:
        whole = load_weights(local.path, _named(args.dtype), device)
        if args.dtype == "auto" and device.type == "cpu" and not _serves(whole):
            whole = whole.float()
        return whole.to(device).eval()  # where it is already, unless it came by way of the host
    if device.type == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            "a tensor parallel engine runs on the GPU that its process sees; set engine.device to cuda", "engine.device"
        )
    place.join(device, graph_mixing=not args.batching_config().disable_nccl_graph_mixing)
    return load_share(local.path, _shares_dtype(args.dtype, device), place.size)


def _settings(args: EngineArgs) -> ContinuousBatchingConfig:
    return replace(args.batching_config(), per_request_processors=True)


def choose_device(wanted: str) -> torch.device:
    """`auto` is the GPU that Ray gave this process, if it gave one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("engine.device is cuda, but this replica sees no GPU; set engine.num_gpus", field="engine.device")
    return torch.device(wanted)


def _serves(whole: torch.nn.Module) -> bool:
    """Whether this CPU is to compute in the checkpoint's own type.

    bfloat16 where the processor multiplies it, or where our kernels widen it as they read it; float16 never: it is narrow, and
    meant for devices that sum in it.
    """
    dtype = next(whole.parameters()).dtype
    return dtype == torch.float32 or (dtype == torch.bfloat16 and (multiplies_bfloat16() or widens_weights(whole)))


def _shares_dtype(wanted: str, device: torch.device) -> Any:
    """What a rank loads its share in, before anyone has seen the model: torch's own products multiply it, not our kernels."""
    return torch.float32 if wanted == "auto" and device.type == "cpu" and not multiplies_bfloat16() else _named(wanted)


def _named(dtype: str) -> Any:
    return dtype if dtype == "auto" else getattr(torch, dtype)


def _builder(max_model_len: int | None) -> Any:
    """The engine's builder, with requests bounded to `max_model_len` tokens of prompt and answer."""

    def build(model: Any, generation_config: Any, config: ContinuousBatchingConfig, hints: WorkloadHints) -> EngineParts:
        parts = engine_build.build(model, generation_config, config, hints, owned=False)
        if max_model_len is None:
            return parts
        return replace(parts, limits=replace(parts.limits, max_length=min(max_model_len, parts.limits.max_length)))

    return build
