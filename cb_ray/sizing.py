"""From a wish to facts: how many tokens a step may take and how many blocks the cache gets. Pure arithmetic.

Owns `ModelFacts`, `Machine` and `resolve`. Reads no device, no clock and no random number: what it needs is handed in, so the
same input gives the same facts anywhere. May know only the standard library, the errors and the config beside it.

    what the engine may use = free memory × max_memory_percent
      ├── a step's workspace     max_batch_tokens × bytes per token  +  logits rows × bytes per row
      └── the KV cache           the rest, or num_blocks of it; whole sectors

Where memory is short the step shrinks before the cache does: max_batch_tokens goes down to 256 and the number of requests in a
step to 16, unless they were asked for. Only what was asked for and does not fit is an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .config import (
    DEFAULT_PAGE_SIZE,
    CompileConfig,
    ContinuousBatchingConfig,
    EngineFacts,
    WorkloadHints,
)
from .errors import ConfigError, DeviceError

GIB = 1 << 30
_INDEX_BYTES_PER_TOKEN = 64  # ids, positions, slots and the like, host and device
_CPU_CACHE_BYTES = 4 * GIB  # a host is shared, with other replicas too: more than this only by num_blocks or max_memory_percent
_MOST_BLOCKS = 1 << 18  # the host keeps a record of each; a model whose pages are tiny needs no more
_FEWEST_BATCH_TOKENS = 256
_FEWEST_REQUESTS = 16
_MOST_REQUESTS = 1024
MOST_GRAPHS = 96  # captured passes that an engine keeps at a time
_MARGINS = {"fifo": 0.15, "prefill_first": 0.0, "priority": 0.15}
_LEVELS = {
    1: CompileConfig(mode="default", dynamic=True),
    2: CompileConfig(mode="max-autotune-no-cudagraphs", dynamic=True),
    3: CompileConfig(mode="max-autotune-no-cudagraphs", dynamic=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What sizing needs to know of a model on its device. Bytes are per rank."""

    group_bytes_per_token: tuple[int, ...]  # K and V of one token, over all layers of each layer group
    activation_bytes_per_token: int  # peak of one forward pass, per token of the step
    logits_bytes_per_row: int  # one row of logits with its float32 copy
    logits_for_every_token: bool = False  # the model cannot be asked for the last rows alone
    state_bytes_per_request: int = 0  # fixed-size state (layers without a KV cache)
    device_type: str = "cpu"
    has_streams: bool = False  # whether steps may overlap (cuda, xpu)
    has_graphs: bool = False
    graph_bytes: int = 0  # of one captured graph, beside what its step needs
    has_decode_path: bool = False  # a kernel that reads pages through a block table, for steps of single tokens
    is_masked: bool = True  # attention needs a mask, so graphs and overlap do not pay by themselves
    page_multiple: int = 1  # the attention kernel wants pages of a multiple of this many tokens

    @property
    def bytes_per_token(self) -> int:
        return sum(self.group_bytes_per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Memory as measured before the engine is built, in bytes."""

    free_bytes: int  # on the model's device, others' use and container limits taken off
    free_host_bytes: int  # RAM, likewise


@dataclass(frozen=True, slots=True)
class _Room:
    """One way to divide the memory."""

    batch_tokens: int
    requests: int
    workspace: int
    sectors: int


def resolve(
    wish: ContinuousBatchingConfig,
    model: ModelFacts,
    machine: Machine,
    *,
    hints: WorkloadHints | None = None,
    entropy: int = 0,
    compile_fallback: CompileConfig | None = None,
) -> EngineFacts:
    """The facts of an engine for `model` on `machine`.

    `hints` may come from a batch that is known beforehand; `entropy` is the seed when the wish names none; `compile_fallback` is
    the generation config's. Raises ConfigError (out of range), DeviceError (not on this device) or MemoryError (does not fit).
    """
    wish.validate()
    hints = hints or WorkloadHints()
    notes: list[str] = []
    page_size, num_blocks = _pages(wish, model)
    sector = math.lcm(*(page_size * size for size in model.group_bytes_per_token)) if model.group_bytes_per_token else page_size
    offload = _offload_bytes(wish, model, machine, notes)
    free = machine.free_bytes - (offload if model.device_type == "cpu" else 0)
    varlen_graphs, decode_graphs = _graphs(wish, model, notes)
    graph_bytes = model.graph_bytes * MOST_GRAPHS if varlen_graphs or decode_graphs else 0
    budget = int(free * _share(wish, model)) - graph_bytes
    room = _divide(wish, model, hints, budget, sector, page_size, num_blocks)
    blocks = room.sectors * sector // max(1, page_size * model.bytes_per_token) if model.bytes_per_token else 0
    varlen, decode = _compile(wish, model, compile_fallback, notes)
    cache = (room.sectors + 1) * sector if model.bytes_per_token else 0
    spending = [("KV cache", cache), ("step: activations and indices", room.batch_tokens * _token_bytes(model))]
    spending.append(("step: logits", room.workspace - room.batch_tokens * _token_bytes(model)))
    if graph_bytes:
        spending.append(("graphs", graph_bytes))
    if model.state_bytes_per_request:
        spending.append(("states of running requests", room.requests * model.state_bytes_per_request))
    return EngineFacts(
        page_size=page_size,
        num_blocks=blocks,
        max_batch_tokens=room.batch_tokens,
        max_requests_per_batch=room.requests,
        max_blocks_per_request=_table_width(wish, model, hints, page_size),
        scheduler_type=wish.scheduler_type,
        safety_margin=_MARGINS[wish.scheduler_type] if wish.safety_margin is None else float(wish.safety_margin),
        allow_block_sharing=wish.allow_block_sharing,
        max_queue_size=wish.max_queue_size,
        return_logprobs=wish.return_logprobs,
        seed=entropy if wish.seed is None else wish.seed,
        use_async_batching=_overlap(wish, model),
        use_varlen_graphs=varlen_graphs,
        use_decode_graphs=decode_graphs,
        q_padding_interval=wish.q_padding_interval_size or 64,
        kv_padding_interval=wish.kv_padding_interval_size or 16384,
        compile_level=wish.default_compile_level,
        varlen_compile=varlen,
        decode_compile=decode,
        auto_switch_to_flash=wish.auto_switch_to_flash,
        per_request_processors=wish.per_request_processors,
        drop_unsupported_processors=wish.drop_unsupported_processors,
        disable_nccl_graph_mixing=wish.disable_nccl_graph_mixing,
        cpu_group_timeout=math.inf if wish.cpu_group_timeout is None else float(wish.cpu_group_timeout),
        cpu_offload_bytes=offload,
        cache_bytes=cache,
        available_bytes=budget + graph_bytes,
        spending=tuple(spending),
        notes=tuple(notes),
    )


# ---- memory ---------------------------------------------------------------------------------------------------------------


def _pages(wish: ContinuousBatchingConfig, model: ModelFacts) -> tuple[int, int | None]:
    """Page size and wished number of blocks. The default page is made smaller where no kernel minds: more prefixes are shared."""
    page_size, num_blocks = wish.page_size, wish.num_blocks
    if page_size == DEFAULT_PAGE_SIZE and model.page_multiple <= 64:
        num_blocks = None if num_blocks is None else num_blocks * (page_size // 64)
        page_size = 64
    if page_size % model.page_multiple:
        raise ConfigError(
            f"page_size must be a multiple of {model.page_multiple} for this attention kernel, got {page_size}", "page_size"
        )
    return page_size, num_blocks


def _share(wish: ContinuousBatchingConfig, model: ModelFacts) -> float:
    if wish.max_memory_percent is not None:
        return float(wish.max_memory_percent)
    if wish.num_blocks is not None:
        return 0.95  # asked for by name: anything that fits is right
    return 0.6 if model.device_type in ("cpu", "mps") else 0.9


def _offload_bytes(wish: ContinuousBatchingConfig, model: ModelFacts, machine: Machine, notes: list[str]) -> int:
    cap = int(machine.free_host_bytes * wish.cpu_offload_space_safety_threshold)
    if wish.cpu_offload_space is None:
        return cap // 2 if model.device_type == "cpu" else cap
    asked = int(wish.cpu_offload_space * GIB)
    if asked > cap:
        notes.append(
            f"cpu_offload_space of {wish.cpu_offload_space:g} GiB is cut to {cap / GIB:.2f} GiB: "
            f"{wish.cpu_offload_space_safety_threshold:.0%} of the memory that is free"
        )
    return min(asked, cap)


def _token_bytes(model: ModelFacts) -> int:
    logits = model.logits_bytes_per_row if model.logits_for_every_token else 0
    return model.activation_bytes_per_token + _INDEX_BYTES_PER_TOKEN + logits


def _workspace(model: ModelFacts, batch_tokens: int, requests: int) -> int:
    rows = 0 if model.logits_for_every_token else requests
    return batch_tokens * _token_bytes(model) + rows * model.logits_bytes_per_row


def _divide(
    wish: ContinuousBatchingConfig,
    model: ModelFacts,
    hints: WorkloadHints,
    budget: int,
    sector: int,
    page_size: int,
    num_blocks: int | None,
) -> _Room:
    tokens = wish.max_batch_tokens or (512 if model.device_type == "cpu" else 8192)
    requests = wish.max_requests_per_batch or min(_MOST_REQUESTS, hints.num_requests or _MOST_REQUESTS)
    block = page_size * model.bytes_per_token
    wanted = -(-num_blocks * block // sector) if num_blocks is not None and block else None
    groups = len(model.group_bytes_per_token)
    for_cache = (groups if wanted is None else max(wanted, groups)) + 1  # and the trash sector
    while True:
        requests = min(requests, tokens)
        states = requests * model.state_bytes_per_request
        workspace = _workspace(model, tokens, requests)
        left = budget - workspace - states
        comfortable = workspace <= budget // 2 and left >= for_cache * sector
        smaller_tokens = wish.max_batch_tokens is None and tokens > _FEWEST_BATCH_TOKENS
        smaller_requests = wish.max_requests_per_batch is None and requests > _FEWEST_REQUESTS
        if comfortable or not (smaller_tokens or smaller_requests):
            break
        if smaller_tokens and (not smaller_requests or workspace - states > 2 * requests * model.logits_bytes_per_row):
            tokens = max(_FEWEST_BATCH_TOKENS, tokens // 2)
        else:
            requests = max(_FEWEST_REQUESTS, requests // 2)
    if left < for_cache * sector:
        raise MemoryError(_too_small(wish, budget, workspace + states, for_cache * sector, tokens, requests))
    sectors = max(wanted, groups) if wanted is not None else left // sector - 1
    if wanted is None and block:
        sectors = min(sectors, _useful_sectors(hints, requests, page_size, sector, block, groups))
        sectors = min(sectors, max(groups, _MOST_BLOCKS * block // sector))
        if model.device_type == "cpu" and wish.max_memory_percent is None:
            sectors = min(sectors, max(groups, _CPU_CACHE_BYTES // sector))
    return _Room(tokens, requests, workspace, max(sectors, groups))


def _useful_sectors(hints: WorkloadHints, requests: int, page_size: int, sector: int, block: int, groups: int) -> int:
    """Sectors that a batch known beforehand could fill twice over; more would be taken from the machine for nothing."""
    if not hints.num_requests or not hints.max_prompt_length or not hints.max_generated_length:
        return 1 << 62
    pages = -(-(hints.max_prompt_length + hints.max_generated_length) // page_size) + 1
    return -(-2 * pages * hints.num_requests * block // sector) + groups


def _too_small(wish: ContinuousBatchingConfig, budget: int, workspace: int, cache: int, tokens: int, requests: int) -> str:
    asked = "the smallest cache" if wish.num_blocks is None else f"num_blocks={wish.num_blocks} of {wish.page_size} tokens"
    return (
        f"the engine may use {budget:,} bytes and needs {workspace + cache:,}: {cache:,} for {asked} and {workspace:,} for steps "
        f"of {tokens} tokens and {requests} requests; make num_blocks, page_size, max_batch_tokens or max_requests_per_batch "
        "smaller, or max_memory_percent larger"
    )


# ---- how steps run ----------------------------------------------------------------------------------------------------------


def _table_width(wish: ContinuousBatchingConfig, model: ModelFacts, hints: WorkloadHints, page_size: int) -> int:
    if not model.has_decode_path:
        return 0
    if wish.max_blocks_per_request is not None:
        return wish.max_blocks_per_request
    longest = hints.max_prompt_length + hints.max_generated_length
    if not longest:
        return wish.fallback_max_blocks_per_request
    width = -(-longest // page_size) + 1
    return width + width % 2


def _graphs(wish: ContinuousBatchingConfig, model: ModelFacts, notes: list[str]) -> tuple[bool, bool]:
    padded = bool(wish.q_padding_interval_size or wish.kv_padding_interval_size)
    asked = any(wish.cuda_graph_booleans)
    if not model.has_graphs:
        if asked:
            notes.append(f"use_cuda_graph is ignored: the device {model.device_type!r} has no graphs")
        return False, False
    if wish.use_cuda_graph is not None:
        return wish.cuda_graph_booleans
    own = padded or not model.is_masked
    return own, own and model.has_decode_path


def _overlap(wish: ContinuousBatchingConfig, model: ModelFacts) -> bool:
    if wish.use_async_batching and not model.has_streams:
        raise DeviceError(
            "use_async_batching needs a device whose work runs beside the host's (cuda, xpu), the model is on "
            f"{model.device_type!r}; leave it at None",
            "use_async_batching",
        )
    return model.has_streams if wish.use_async_batching is None else wish.use_async_batching


def _compile(
    wish: ContinuousBatchingConfig, model: ModelFacts, fallback: CompileConfig | None, notes: list[str]
) -> tuple[tuple[tuple[str, object], ...], tuple[tuple[str, object], ...]]:
    """Keyword arguments of torch.compile for (varlen, decode): the explicit config, else the level's, else the fallback.

    None on a CPU: native kernels, which torch.compile cannot look into, do all that it could join.
    """
    if model.device_type == "cpu":
        asked = {
            f"default_compile_level={wish.default_compile_level}": wish.default_compile_level,
            "varlen_compile_config": wish.varlen_compile_config,
            "decode_compile_config": wish.decode_compile_config,
        }
        for name in (name for name, value in asked.items() if value):
            notes.append(f"{name} is ignored: on a CPU steps run on native kernels, and torch.compile would make none faster")
        return (), ()
    level = _LEVELS.get(wish.default_compile_level)
    varlen = wish.varlen_compile_config or (level if model.is_masked else None) or fallback
    decode = wish.decode_compile_config or level or fallback
    if not model.has_decode_path:
        if wish.decode_compile_config is not None:
            notes.append("decode_compile_config is ignored: there is no decode path here")
        decode = None
    return _pairs(varlen), _pairs(decode)


def _pairs(config: CompileConfig | None) -> tuple[tuple[str, object], ...]:
    return () if config is None else tuple(config.to_dict().items())
