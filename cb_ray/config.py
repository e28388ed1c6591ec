"""What a user may wish for, and the facts an engine runs by.

Owns `ContinuousBatchingConfig` (the wish: transformers' fields, names, defaults and deprecated aliases), `CompileConfig`,
`WorkloadHints` and `EngineFacts` (the wish resolved: nothing optional, nothing changes later). The arithmetic that leads from one
to the other is in `sizing.py`. May know only the standard library and the errors beside it.

    ContinuousBatchingConfig ──of()──▶ a validated copy ──sizing.resolve()──▶ EngineFacts ──▶ core, runner, mailboxes
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from .errors import ConfigError, nearest

SCHEDULER_TYPES = ("fifo", "prefill_first", "priority")
COMPILE_LEVELS = (0, 1, 2, 3)
DEFAULT_PAGE_SIZE = 256
MIN_PAGE_SIZE = 4
_DEPRECATED = ("use_default_compile_configs", "max_cached_graphs", "block_size")


@dataclass
class CompileConfig:
    """Keyword arguments of `torch.compile`, under transformers' names and with its defaults."""

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = "reduce-overhead"
    options: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The keyword arguments, as a new dictionary."""
        return {f.name: copy.deepcopy(getattr(self, f.name)) for f in fields(self)}


@dataclass(kw_only=False)
class WorkloadHints:
    """What is known of the work to come; 0 means unknown. Lengths are in tokens."""

    max_prompt_length: int = 0
    max_generated_length: int = 0
    num_requests: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            _require(_whole(value, 0), f.name, value, "a whole number, 0 (unknown) or more")


@dataclass
class ContinuousBatchingConfig:
    """The public wish: every field of transformers' class of this name. None (or 0 for the paddings) means: decide for me.

    Values are checked when an engine is made of it (`of`), so a config may be built up field by field. An engine works on a copy
    and never changes the object it was given.
    """

    page_size: int = DEFAULT_PAGE_SIZE  # tokens per page; the default lets the engine choose what suits the device
    num_blocks: int | None = None  # capacity in whole-model blocks of page_size tokens; None: from memory
    max_batch_tokens: int | None = None  # tokens in one step; None: 8192 (512 on a CPU), less where memory is short
    max_memory_percent: float | None = None  # share of free memory, between 0 and 1
    max_requests_per_batch: int | None = None  # requests in one step; None: 1024, less where memory is short
    max_blocks_per_request: int | None = None  # width of the decode block table; 0 switches that path off
    allow_block_sharing: bool = True  # prefix caching, and forks that share pages
    use_async_batching: bool | None = None  # plan a step while the one before runs; None: where the device can
    use_cuda_graph: bool | tuple[bool, bool] | None = None  # one value, or (varlen, decode); None: where it pays
    q_padding_interval_size: int = 0  # tokens; steps are padded to a multiple of it, for graphs; 0: 64
    kv_padding_interval_size: int = 0  # cached tokens, likewise; 0: 16384
    varlen_compile_config: CompileConfig | None = None  # torch.compile for steps of any shape
    decode_compile_config: CompileConfig | None = None  # torch.compile for steps of single tokens
    default_compile_level: int = 0  # without a config: 1 default, 2 and 3 max-autotune, 3 static shapes; a CPU compiles nothing
    scheduler_type: str = "fifo"  # who is served first
    safety_margin: float | None = None  # share of blocks kept free of new requests; None: the scheduler's own
    return_logprobs: bool = False  # a logprob for each generated token
    seed: int | None = None  # of the engine; None: a random one
    auto_switch_to_flash: bool = True  # take a flash attention kernel where there is one
    cpu_offload_space: float | None = 0.0  # GiB; None: as much as the threshold allows
    cpu_offload_space_safety_threshold: float = 0.8  # share of available RAM
    max_queue_size: int = 0  # requests that may wait; 0: any number
    per_request_processors: bool = False  # requests may bring sampling parameters of their own
    drop_unsupported_processors: bool = True  # what is not computed is dropped with a warning; False: refused by name
    disable_nccl_graph_mixing: bool = True  # faster tensor parallelism; nobody else may use NCCL beside the engine
    cpu_group_timeout: float | None = 300.0  # seconds; None: wait for ever
    use_default_compile_configs: bool | None = None  # deprecated: default_compile_level
    max_cached_graphs: int | None = None  # deprecated, without effect
    block_size: int | None = None  # deprecated: page_size

    def __post_init__(self) -> None:
        self.varlen_compile_config = _compile_config("varlen_compile_config", self.varlen_compile_config)
        self.decode_compile_config = _compile_config("decode_compile_config", self.decode_compile_config)
        if self.use_default_compile_configs is not None:
            self.default_compile_level = 3 if self.use_default_compile_configs else 0
            _deprecated(
                "use_default_compile_configs",
                f"default_compile_level={self.default_compile_level} is used",
            )
        if self.max_cached_graphs is not None:
            _deprecated(
                "max_cached_graphs",
                "it has no effect: the number of graphs is bounded by itself",
            )
        if self.block_size is not None:
            self.page_size = self.block_size
            _deprecated("block_size", f"page_size={self.page_size} is used")
        if self.disable_nccl_graph_mixing and os.environ.get("WORLD_SIZE", "1") != "1":
            os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")  # NCCL reads it when the process group is made

    @classmethod
    def of(cls, value: Any = None) -> ContinuousBatchingConfig:
        """A validated copy of a wish in any of its forms: ours, transformers' class, a dictionary, or None for the defaults.

        Raises ConfigError for a value out of range, of the wrong type, or under a name that does not exist.
        """
        known = {f.name for f in fields(cls)}
        if value is None:
            config = cls()
        elif isinstance(value, ContinuousBatchingConfig):
            config = copy.copy(value)
        elif isinstance(value, Mapping):
            config = cls(**_known(cast("Mapping[str, Any]", value), known, "ContinuousBatchingConfig"))
        elif all(hasattr(value, name) for name in ("page_size", "scheduler_type", "max_batch_tokens")):
            config = cls(**{n: getattr(value, n) for n in known if hasattr(value, n) and n not in _DEPRECATED})
        else:
            raise ConfigError(
                f"continuous_batching_config must be a ContinuousBatchingConfig, a dictionary or None, got {type(value).__name__}"
            )
        config.validate()
        return config

    @property
    def cuda_graph_booleans(self) -> tuple[bool, bool]:
        """Graphs for (varlen, decode); False where undecided."""
        if isinstance(self.use_cuda_graph, tuple):
            return self.use_cuda_graph
        return (bool(self.use_cuda_graph), bool(self.use_cuda_graph))

    @property
    def fallback_max_blocks_per_request(self) -> int:
        """Width of the decode block table when nothing is known of the requests."""
        return 32

    def validate(self) -> None:
        """Raises ConfigError for the first field whose value is of the wrong type or out of range."""
        for name, holds, wanted in RULES:
            value = getattr(self, name)
            _require(holds(value), name, value, wanted)
        if self.scheduler_type not in SCHEDULER_TYPES:
            raise ConfigError(
                f"scheduler_type must be one of {', '.join(SCHEDULER_TYPES)}, got {self.scheduler_type!r}; "
                f"{nearest(str(self.scheduler_type), SCHEDULER_TYPES)}",
                "scheduler_type",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Every setting of one engine, resolved. Nothing is optional, nothing changes later; passed by hand to whoever needs it."""

    page_size: int  # tokens
    num_blocks: int  # whole-model blocks of page_size tokens
    max_batch_tokens: int
    max_requests_per_batch: int
    max_blocks_per_request: int  # width of the decode block table; 0: no such path
    scheduler_type: str
    safety_margin: float
    allow_block_sharing: bool
    max_queue_size: int  # 0: unbounded
    return_logprobs: bool
    seed: int
    use_async_batching: bool
    use_varlen_graphs: bool
    use_decode_graphs: bool
    q_padding_interval: int
    kv_padding_interval: int
    compile_level: int
    varlen_compile: tuple[tuple[str, Any], ...]  # keyword arguments of torch.compile; empty: not compiled
    decode_compile: tuple[tuple[str, Any], ...]
    auto_switch_to_flash: bool
    per_request_processors: bool
    drop_unsupported_processors: bool
    disable_nccl_graph_mixing: bool
    cpu_group_timeout: float  # seconds; inf: wait for ever
    cpu_offload_bytes: int
    cache_bytes: int  # of the whole KV cache, trash included
    available_bytes: int  # what the engine may use, as measured before it was built
    spending: tuple[tuple[str, int], ...] = field(repr=False)  # (what, bytes), largest idea first; what `explain` prints
    notes: tuple[str, ...] = field(repr=False)  # wishes that could not be granted, and why

    @classmethod
    def of(cls, **settings: Any) -> EngineFacts:
        """Facts for an engine without a device (simulation, tests): plain defaults, with `settings` in their place."""
        plain: dict[str, Any] = dict.fromkeys((f.name for f in fields(cls)), 0)
        plain |= dict.fromkeys(("varlen_compile", "decode_compile", "spending", "notes"), ())
        plain |= dict.fromkeys(("return_logprobs", "use_async_batching", "use_varlen_graphs", "use_decode_graphs"), False)
        plain |= {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 256, "max_requests_per_batch": 64}
        plain |= {"scheduler_type": "fifo", "safety_margin": 0.0, "allow_block_sharing": True, "auto_switch_to_flash": True}
        plain |= {"per_request_processors": True, "drop_unsupported_processors": True, "disable_nccl_graph_mixing": True}
        plain |= {"q_padding_interval": 64, "kv_padding_interval": 16384, "cpu_group_timeout": math.inf}
        return cls(**{**plain, **settings})

    def explain(self) -> str:
        """A table of where the engine's memory goes, one line an item, and what was decided beside it."""
        rows = [
            *self.spending,
            (
                "left over",
                self.available_bytes - sum(size for _, size in self.spending),
            ),
        ]
        lines = [f"{'memory the engine may use':<44}{_size(self.available_bytes):>12}"]
        for what, size in rows:
            share = f"{size / self.available_bytes:7.1%}" if self.available_bytes else ""
            lines.append(f"  {what:<42}{_size(size):>12}{share:>9}")
        lines.append(f"{self.num_blocks:,} blocks of {self.page_size} tokens hold {self.num_blocks * self.page_size:,} tokens")
        lines.append(f"a step takes up to {self.max_batch_tokens:,} tokens of {self.max_requests_per_batch:,} requests")
        return "\n".join([*lines, *self.notes])


def _size(count: int) -> str:
    """Bytes for people, binary units."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:,.0f} {units[0]}" if units[0] == "B" else f"{value:,.1f} {units[0]}"


def _require(holds: bool, name: str, found: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {wanted}, got {found!r}", name)


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated; {instead}", FutureWarning, stacklevel=4)


def _compile_config(name: str, value: Any) -> CompileConfig | None:
    """Ours from a dictionary or from transformers' class of the same name; anything else is left for `validate` to refuse."""
    if isinstance(value, Mapping):
        given = cast("Mapping[str, Any]", value)
    elif value is None or isinstance(value, CompileConfig) or not hasattr(value, "to_dict"):
        return value
    else:
        given = cast("Mapping[str, Any]", value.to_dict())
    return CompileConfig(**_known(given, {f.name for f in fields(CompileConfig)}, name))


def _known(given: Mapping[str, Any], known: set[str], what: str) -> dict[str, Any]:
    for key in given:
        if key not in known:
            raise ConfigError(f"{what} has no setting {key!r}; {nearest(str(key), known)}", str(key))
    return dict(given)


def _whole(value: object, low: int, high: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)


def _number(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _graphs(value: object) -> bool:
    if value is None or _flag(value):
        return True
    pair = cast("tuple[object, ...]", value) if isinstance(value, tuple) else ()
    return len(pair) == 2 and all(map(_flag, pair))


def _optional(rule: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or rule(value)


def _at_least(low: int) -> Callable[[object], bool]:
    return lambda value: _whole(value, low)


def _between(low: float, high: float) -> Callable[[object], bool]:
    return lambda value: _number(value, low, high)


_Rule = tuple[str, Callable[[object], bool], str]
RULES: tuple[_Rule, ...] = (
    (
        "page_size",
        _at_least(MIN_PAGE_SIZE),
        f"a whole number of at least {MIN_PAGE_SIZE} tokens",
    ),
    ("num_blocks", _optional(_at_least(1)), "a whole number of at least 1, or None"),
    (
        "max_batch_tokens",
        _optional(_at_least(1)),
        "a whole number of at least 1, or None",
    ),
    (
        "max_memory_percent",
        _optional(lambda v: _number(v, 0.0, 1.0) and v != 0),
        "above 0 and at most 1, or None",
    ),
    (
        "max_requests_per_batch",
        _optional(_at_least(1)),
        "a whole number of at least 1, or None",
    ),
    (
        "max_blocks_per_request",
        _optional(_at_least(0)),
        "a whole number of at least 0, or None",
    ),
    ("allow_block_sharing", _flag, "True or False"),
    ("use_async_batching", _optional(_flag), "True, False or None"),
    (
        "use_cuda_graph",
        _graphs,
        "True, False, None, or a pair of booleans (varlen, decode)",
    ),
    ("q_padding_interval_size", _at_least(0), "a whole number of at least 0 tokens"),
    ("kv_padding_interval_size", _at_least(0), "a whole number of at least 0 tokens"),
    (
        "varlen_compile_config",
        _optional(lambda v: isinstance(v, CompileConfig)),
        "a CompileConfig, a dictionary or None",
    ),
    (
        "decode_compile_config",
        _optional(lambda v: isinstance(v, CompileConfig)),
        "a CompileConfig, a dictionary or None",
    ),
    ("default_compile_level", lambda v: _whole(v, 0, 3), "0, 1, 2 or 3"),
    ("safety_margin", _optional(_between(0.0, 1.0)), "between 0 and 1, or None"),
    ("return_logprobs", _flag, "True or False"),
    (
        "seed",
        _optional(lambda v: _whole(v, 0, 2**64 - 1)),
        "a whole number between 0 and 2**64 - 1, or None",
    ),
    ("auto_switch_to_flash", _flag, "True or False"),
    (
        "cpu_offload_space",
        _optional(_between(0.0, 2.0**40)),
        "a number of GiB, 0 or more, or None",
    ),
    ("cpu_offload_space_safety_threshold", _between(0.0, 1.0), "between 0 and 1"),
    ("max_queue_size", _at_least(0), "a whole number of at least 0 (0: unbounded)"),
    ("per_request_processors", _flag, "True or False"),
    ("drop_unsupported_processors", _flag, "True or False"),
    ("disable_nccl_graph_mixing", _flag, "True or False"),
    (
        "cpu_group_timeout",
        _optional(lambda v: _number(v, 0.0, math.inf) and v != 0),
        "a number of seconds above 0, or None",
    ),
)
