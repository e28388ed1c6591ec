"""The settings of a deployed app: everything that stands under `args:` in `deployments/app.yaml`, as frozen dataclasses.

Owns their names, defaults and checks: an unknown key is an error that names the nearest key, a value of the wrong type is an
error that names the setting by its path (`pool.max_replicas`). Knows nothing of Ray; `app.py` makes Serve options of them.

    AppArgs ── model, served_model_name, max_queue_size
      ├── routing: RoutingArgs   which replica a request goes to
      ├── pool:    PoolArgs      how many replicas, what each takes, when one is given up
      ├── router:  RouterArgs    the HTTP side
      ├── tracing: TracingArgs   where OpenTelemetry spans go
      ├── engine:  EngineArgs    any ContinuousBatchingConfig field, and where it runs
      └── request_log: RequestLogArgs  what was asked, in a file
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, TypeVar

from ..config import ContinuousBatchingConfig
from ..errors import ConfigError, nearest

T = TypeVar("T")

Policy = Literal["prefix_aware", "least_work", "power_of_two", "round_robin"]
Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingArgs:
    """Which replica a request goes to. `policy` is one of prefix_aware, least_work, power_of_two, round_robin."""

    policy: Policy = "prefix_aware"
    index_max_bytes: int = 256 * 2**20  # memory the Board may spend on knowing what is cached where

    def __post_init__(self) -> None:
        _require(self.index_max_bytes >= 2**16, "routing.index_max_bytes", self.index_max_bytes, "at least 65536")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolArgs:
    """How many replicas there are, how much each takes at once, and when one is given up. Times are seconds."""

    min_replicas: int = 1
    max_replicas: int = 1
    slots_per_replica: int | None = None  # requests granted to one replica at once; None: engine.max_requests_per_batch, else 256
    target_drain_s: float = 10.0  # scale so that the work owed would be done in this time
    upscale_delay_s: float = 1.0
    downscale_delay_s: float = 60.0
    downscale_to_zero_delay_s: float = 300.0
    cold_start_timeout_s: float = 300.0  # how long a request waits for a first replica before 503
    lease_timeout_s: float = 30.0  # a grant that no engine confirms within this time is taken back
    step_timeout_s: float = 120.0  # a step that takes longer counts as stuck and fails the health check
    graceful_shutdown_timeout_s: float = 610.0  # a draining replica may finish its streams; above the longest generation
    health_check_period_s: float = 5.0
    health_check_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        _require(self.min_replicas >= 0, "pool.min_replicas", self.min_replicas, "0 or more")
        _require(
            self.max_replicas >= max(1, self.min_replicas),
            "pool.max_replicas",
            self.max_replicas,
            f"at least 1 and at least min_replicas ({self.min_replicas})",
        )
        _require(
            self.slots_per_replica is None or self.slots_per_replica >= 1,
            "pool.slots_per_replica",
            self.slots_per_replica,
            "1 or more",
        )
        for spec in dataclasses.fields(self):
            if spec.name.endswith("_s"):
                value = getattr(self, spec.name)
                low_ok = value >= 0 if spec.name.startswith(("upscale", "downscale")) else value > 0
                _require(low_ok, f"pool.{spec.name}", value, "a positive number of seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterArgs:
    """The HTTP side: how many Router replicas, who may call, what may be asked, and what is told. Times are seconds; None: no bound."""

    num_replicas: int = 1
    num_cpus: float = 0.1  # what Ray's scheduler sets aside for one Router; no limit on what it uses
    max_ongoing_requests: int = 4096
    num_tokenizer_threads: int = 4
    max_failovers: int = 3  # how often a stream moves on when its replica dies
    token_pipe: bool = True  # tokens over one connection from each engine; False: over Ray's streams, a message for each token
    # who may call
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # neither keys nor a file: everyone may call
    api_keys_file: str | None = None  # one key a line, or tenants; read again when it changes
    cors_origins: tuple[str, ...] = ()
    # what may be asked
    max_body_bytes: int = 32 * 2**20
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None  # also the limit of requests that name none
    max_choices: int = 128  # n times the number of prompts
    max_logprobs: int = 20
    unknown_parameters: Literal["refuse", "warn"] = "refuse"  # warn: left out, and named in X-Cb-Ray-Warning
    # how long, and how much memory
    request_timeout_s: float | None = None
    body_timeout_s: float | None = 60.0  # for a body to arrive
    keep_alive_s: float | None = 15.0  # a stream that waits longer for its first token gets headers, and a comment so often
    send_timeout_s: float = 60.0  # a stream whose client takes nothing for so long is ended
    max_unread_bytes: int = 2**20  # events of one stream that are made and not read; more end it
    stored_response_bytes: int = 64 * 2**20  # memory for stored responses; 0: none are stored
    # what is told
    extension_fields: bool = False  # `cb_ray` in every answer, not only on X-Cb-Ray-Debug
    access_log: bool = False  # a line of JSON for each request on the Router's standard output
    vllm_metric_names: bool = True  # /metrics has vLLM's names as well
    ray_metrics: bool = True  # the same numbers in Ray's own metrics, from every Router and engine
    # what may be changed
    admin_api: bool = False  # POST /admin/weights, for holders of an API key

    def __post_init__(self) -> None:
        at_least_one = ("num_replicas", "max_ongoing_requests", "num_tokenizer_threads", "max_body_bytes", "max_choices")
        for name in (*at_least_one, "max_unread_bytes", "max_prompt_tokens", "max_output_tokens"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"router.{name}", value, "1 or more")
        for name in ("num_cpus", "max_failovers", "stored_response_bytes"):
            _require(getattr(self, name) >= 0, f"router.{name}", getattr(self, name), "0 or more")
        keys = bool(self.api_keys or self.api_keys_file)
        _require(not self.admin_api or keys, "router.admin_api", self.admin_api, "false unless there are API keys")
        _require(0 <= self.max_logprobs <= 20, "router.max_logprobs", self.max_logprobs, "between 0 and 20")
        for name in ("request_timeout_s", "body_timeout_s", "keep_alive_s", "send_timeout_s"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"router.{name}", value, "above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingArgs:
    """OpenTelemetry: spans from the door to the engine. Needs the extra `otel`."""

    otlp_endpoint: str | None = None  # such as http://collector:4318/v1/traces; None: off
    sample_ratio: float = 1.0  # of the traces that begin here; a client's own traceparent decides for itself

    def __post_init__(self) -> None:
        _require(0 <= self.sample_ratio <= 1, "tracing.sample_ratio", self.sample_ratio, "between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """One engine: where it runs, in what precision, and `config`: the ContinuousBatchingConfig fields that were set.

    In YAML the config fields stand beside the others (`engine: {page_size: 64, dtype: bfloat16}`); `parse_args` sorts them.
    """

    dtype: str = "auto"  # auto: as the checkpoint says; on a CPU float32 instead of float16, and of bfloat16 where that is slower
    device: str = "auto"  # auto: cuda where the replica was given a GPU, else cpu
    num_cpus: float | None = None  # what Ray sets aside for one replica; None: a fair share of this cluster
    num_gpus: float | None = None  # None: one per tensor-parallel rank where the cluster has GPUs, else none
    num_threads: int | None = None  # torch threads; None: a fair share of this machine's cores
    tensor_parallel_size: int = 1  # devices (on a CPU: processes) that run one model together; each gets its share of the above
    placement_group_strategy: Strategy = "PACK"  # where they are: together if possible, STRICT_PACK, SPREAD or STRICT_SPREAD
    placement_group_bundles: tuple[Mapping[str, float], ...] | None = None  # what each is given, rank 0 first; None: equal shares
    resources: Mapping[str, float] = field(default_factory=dict[str, float])  # custom resources of Ray's, of each rank
    label_selector: Mapping[str, str] = field(default_factory=dict[str, str])  # labels of the nodes that a replica may be on
    max_model_len: int | None = None  # tokens of prompt and answer; None: what the model was made for
    warmup: bool = True
    step_log: str | None = None  # a directory: each replica writes there what its steps did and how long they took
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        _require(self.tensor_parallel_size >= 1, "engine.tensor_parallel_size", self.tensor_parallel_size, "1 or more")
        for name in ("num_cpus", "num_gpus"):
            value = getattr(self, name)
            _require(value is None or value >= 0, f"engine.{name}", value, "0 or more")
        for name in ("num_threads", "max_model_len"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"engine.{name}", value, "1 or more")
        self._check_bundles()
        dtypes = ("auto", "float32", "float16", "bfloat16")
        _require(self.dtype in dtypes, "engine.dtype", self.dtype, f"one of {', '.join(dtypes)}")
        _refuse_unknown(self.config, _names(ContinuousBatchingConfig) | _names(EngineArgs), "engine")
        self.batching_config()

    def _check_bundles(self) -> None:
        bundles, size = self.placement_group_bundles, self.tensor_parallel_size
        for name, mapping in (("resources", self.resources), ("label_selector", self.label_selector)):
            _require(isinstance(mapping, typing.cast("type", Mapping)), f"engine.{name}", mapping, "a mapping")
        if bundles is None:
            return
        wanted = f"a list of {size} mappings from resources to amounts above 0, one for each rank"
        good = len(bundles) == size > 1 and all(_is_bundle(bundle) for bundle in bundles)
        _require(good, "engine.placement_group_bundles", bundles, wanted)

    def batching_config(self) -> ContinuousBatchingConfig:
        """The engine's ContinuousBatchingConfig; raises ConfigError for a value that it refuses."""
        from ..config import ContinuousBatchingConfig

        return ContinuousBatchingConfig.of(self.config)

    @property
    def page_size(self) -> int:
        return self.batching_config().page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLogArgs:
    """A file of what was asked, for `cb-ray plan` and `cb-ray replay`. `content` digests: salted names of the prompt's pages, which say
    what is equal and nothing else; tokens: the token ids of prompts and answers, which replays compare. Text is never written."""

    directory: str
    content: Literal["digests", "tokens"] = "digests"
    page_size: int = 64  # of the pages that are named
    salt: str | None = None  # the same for all Routers and restarts, to compare their logs; None: a random one for each
    max_bytes: int = 64 * 2**20  # of one file, and
    max_files: int = 8  # of them; the oldest goes

    def __post_init__(self) -> None:
        _require(bool(self.directory), "request_log.directory", self.directory, "a directory")
        for name in ("page_size", "max_bytes", "max_files"):
            _require(getattr(self, name) >= 1, f"request_log.{name}", getattr(self, name), "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppArgs:
    """The whole app. `max_queue_size` bounds the requests that wait anywhere in the pool (0: no bound)."""

    model: str = "demo:smollm2-135m"
    served_model_name: str | None = None
    max_queue_size: int = 256
    routing: RoutingArgs = field(default_factory=RoutingArgs)
    pool: PoolArgs = field(default_factory=PoolArgs)
    router: RouterArgs = field(default_factory=RouterArgs)
    tracing: TracingArgs = field(default_factory=TracingArgs)
    engine: EngineArgs = field(default_factory=EngineArgs)
    request_log: RequestLogArgs | None = None  # None: nothing is recorded

    def __post_init__(self) -> None:
        _require(bool(self.model), "model", self.model, "a hub id, a directory, a .gguf file or demo:smollm2-135m")
        _require(self.max_queue_size >= 0, "max_queue_size", self.max_queue_size, "0 (no bound) or more")

    @property
    def model_name(self) -> str:
        """The name that clients use: as given, or the last part of a path, or the hub id."""
        if self.served_model_name:
            return self.served_model_name
        source = self.model.removeprefix("demo:")
        if source.startswith(("/", ".", "~")) or source.endswith(".gguf"):
            return PurePath(source).name.removesuffix(".gguf")
        return source

    @property
    def slots_per_replica(self) -> int:
        """Requests that one replica is granted at once."""
        return self.pool.slots_per_replica or self.engine.config.get("max_requests_per_batch") or 256


def parse_args(values: Mapping[str, Any] | AppArgs) -> AppArgs:
    """AppArgs of what YAML gave. Raises ConfigError naming the setting, what was found and what is wanted."""
    return values if isinstance(values, AppArgs) else _parse(AppArgs, values, "")


def parse_models(values: Mapping[str, Any]) -> tuple[AppArgs, ...]:
    """The models of an application: one, or those of a list under `models:`, which share what stands beside the list.

    Each model has a pool, a policy and an engine of its own; `router` is common to all. Raises ConfigError naming the setting.
    """
    if not isinstance(values, Mapping) or "models" not in values:
        return (parse_args(values),)
    given: dict[str, Any] = dict(values)
    entries = given.pop("models")
    _require(isinstance(entries, (list, tuple)) and bool(entries), "models", entries, "a list of models with their settings")
    _refuse_unknown(given, _SHARED | {"models"}, "")
    for index, entry in enumerate(entries):
        _require(isinstance(entry, Mapping), f"models[{index}]", entry, "a mapping of settings")
        both = sorted(_SHARED & entry.keys())
        _require(not both, f"models[{index}]", both, f"free of {' and '.join(sorted(_SHARED))}, which stand beside the list")
    models = tuple(_parse(AppArgs, {**given, **entry}, "") for entry in entries)
    names = [model.model_name for model in models]
    _require(len(set(names)) == len(names), "models", names, "of different names; served_model_name gives one")
    return models


_SHARED = {"router", "tracing"}


def _parse(cls: type[T], values: object, path: str) -> T:
    _require(isinstance(values, Mapping), path or "args", values, "a mapping of settings")
    given = dict(typing.cast("Mapping[str, Any]", values))
    if cls is EngineArgs:
        extra = {name: given.pop(name) for name in list(given) if name not in _names(EngineArgs) or name == "config"}
        nested = extra.pop("config", {})
        _require(isinstance(nested, Mapping), "engine.config", nested, "a mapping of ContinuousBatchingConfig fields")
        given["config"] = {**extra, **nested}
    else:
        _refuse_unknown(given, _names(cls), path)
    hints = typing.get_type_hints(cls)
    return cls(**{name: _coerce(hints[name], value, f"{path}.{name}".lstrip(".")) for name, value in given.items()})


def _coerce(hint: Any, value: Any, path: str) -> Any:
    """`value` as the type `hint` says, or ConfigError. Accepts an int for a float and a list for a tuple; nothing else bends."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in options:
            return None
        return _coerce(next(option for option in options if option is not type(None)), value, path)
    if origin is Literal:
        _require(value in options, path, value, f"one of {', '.join(map(str, options))}")
        return value
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else _parse(hint, value if value is not None else {}, path)
    if origin is tuple:
        _require(isinstance(value, (list, tuple)), path, value, "a list")
        return tuple(_coerce(options[0], item, path) for item in value)
    if origin is not None:  # Mapping
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    kind: Any = hint
    right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    _require(right, path, value, f"of type {kind.__name__}")
    return value


def _is_bundle(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(v, (int, float)) and v > 0 for v in value.values())


def _names(cls: type) -> set[str]:
    return {spec.name for spec in dataclasses.fields(cls)}


def _refuse_unknown(given: Mapping[str, Any], known: set[str], path: str) -> None:
    for name in given:
        if name not in known:
            full = f"{path}.{name}".lstrip(".")
            raise ConfigError(f"unknown setting {full!r}; {nearest(str(name), known - {'config'})}", field=full)


def _require(holds: bool, name: str, found: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {wanted}, got {found!r}", field=name)


def engines_of(model_name: str | None) -> str:
    """The deployment of a model's engines in an application; None: of the only model."""
    return "Engine" if model_name is None else f"Engine-{re.sub(r'[^A-Za-z0-9_.-]+', '-', model_name)}"
