"""The one place where an engine is wired: model + settings → facts, layout, cache, forward, runner, core.

Owns the translation of a model into the numbers that sizing needs. Nothing runs here beyond the small forward passes of the
survey and the trial; a model that cannot be served is refused by name, and left as it was found.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import ContinuousBatchingConfig, EngineFacts, WorkloadHints
from ..core.engine_core import EngineCore
from ..core.layout import CacheLayout
from ..core.request import RequestLimits
from ..runtime.grammar import GrammarCompiler, GrammarMasks
from ..runtime.graphs import CudaRecorder, Recorder, Sizes
from ..runtime.hidden_states import HiddenStates
from ..runtime.inputs import Padded
from ..runtime.kv_cache import KVCache
from ..runtime.model_runner import EvalMode, ModelRunner
from ..runtime.orders import Follower, Orders
from ..runtime.packed_forward import PackedForward
from ..runtime.ranks import Ranks, check_heads
from ..runtime.sampling import Processor
from ..sizing import ModelFacts, resolve
from .kept_way import kept_way
from .machine import least, measure
from .parts import EngineParts
from .processors import transformers_processors
from .profile import profiled
from .sampling_config import token_ids
from .ways import Running, Way, find_way, long_from, max_length

logger = logging.getLogger(__name__)
_MOST_WIDTHS = 16  # graphs serve requests up to this many times as long as a short one
_GRAPH_BYTES_PER_LAYER = 64 * 2**10  # what a graph keeps of its kernels; reckoned, not measured


def build(
    model: PreTrainedModel,
    generation_config: Any,
    config: ContinuousBatchingConfig,
    hints: WorkloadHints | None = None,
    *,
    processors: Sequence[Processor] = (),
    backend: str | None = None,
    owned: bool = True,
) -> EngineParts:
    """An engine for `model`. `backend` names an attention backend; None takes the best that can serve every layer.

    For a model that is divided among ranks every rank builds at the same time, and what is settled is settled for all of them.
    `owned`: each rank's program has a manager of its own, as under torchrun.

    Raises UnsupportedModelError when the model has something that would be computed wrongly, ConfigError for a bad setting, and
    MemoryError when what was asked for does not fit.
    """
    config.validate()
    ranks = Ranks.of(model, math.inf if config.cpu_group_timeout is None else config.cpu_group_timeout)
    if ranks is not None:
        _check_divided(model, config, ranks)
    mode = EvalMode(model)
    mode.enter()
    try:
        flash = config.auto_switch_to_flash
        wishes = (config.page_size, backend, flash)
        way = kept_way(model, wishes, lambda: find_way(model, config.page_size, backend, ranks, flash))
    finally:
        mode.leave()
    if not way.pages:
        logger.warning("%s is served row by row, %s: right, but slower than packed", type(model).__name__, way.name)
    chosen = tuple(processors) or tuple(transformers_processors(model, generation_config))
    return _assemble(model, way, config, hints, chosen, _grammars(model, way, generation_config), ranks, owned)


def _check_divided(model: PreTrainedModel, config: ContinuousBatchingConfig, ranks: Ranks) -> None:
    """Raises UnsupportedModelError for heads that are cut; says what is different about a divided model."""
    check_heads(model.config, model.tp_plan, ranks.size)
    if ranks.is_leader:
        logger.info("tensor parallel over %d ranks: linear layers run as transformers divides them", ranks.size)
    mixing = os.environ.get("NCCL_GRAPH_MIXING_SUPPORT") != "0"
    if config.disable_nccl_graph_mixing and mixing and model.device.type == "cuda":
        logger.warning(
            "set NCCL_GRAPH_MIXING_SUPPORT=0 before the process group is made (a ContinuousBatchingConfig made before the model "
            "is loaded does); tensor parallel steps are slower without"
        )


def _assemble(
    model: PreTrainedModel,
    way: Way,
    config: ContinuousBatchingConfig,
    hints: WorkloadHints | None,
    processors: tuple[Processor, ...],
    grammars: GrammarCompiler,
    ranks: Ranks | None,
    owned: bool,
) -> EngineParts:
    """Everything after the model was tried: measured, sized and allocated anew each time."""
    recorder = graph_recorder(model.device) if way.static and not long_from(model) else None
    if ranks is not None and not any(config.cuda_graph_booleans):
        recorder = None  # what a rank captures alone, others wait for; only where it is asked for
    sized = _model_facts(model, way, has_graphs=recorder is not None)
    if model.device.type == "cuda" and way.pages and ranks is None:
        sized = replace(sized, activation_bytes_per_token=profiled(model, way, config))
    machine = measure(model.device)

    def settle() -> EngineFacts:
        return resolve(config, sized, machine, hints=hints, entropy=secrets.randbits(62), compile_fallback=None)

    if ranks is not None:
        machine = least(machine, ranks, shared=model.device.type == "cpu")
    facts = settle() if ranks is None else ranks.decide(settle)
    if not way.pages:  # pages are only counted: what a request computed stays with it
        facts = replace(facts, allow_block_sharing=False, cpu_offload_bytes=0)
    for note in facts.notes:
        logger.warning(note)
    layout = CacheLayout.sized(way.layers, page_size=facts.page_size, itemsize=model.dtype.itemsize, num_blocks=facts.num_blocks)
    host_sectors = facts.cpu_offload_bytes // layout.bytes_per_sector
    cache = None
    if way.pages:
        cache = KVCache(layout, dtype=model.dtype, device=model.device, num_host_sectors=host_sectors)
    longest = max_length(model)
    limits = RequestLimits(
        vocab_size=_input_vocabulary(model, way),
        max_length=longest,
        max_cached_tokens=layout.max_tokens_alone(layout.max_chunk(facts.max_batch_tokens, longest)),
        page_size=facts.page_size,
        long_from=long_from(model),
    )
    orders = Orders(ranks, owned=owned) if ranks is not None and ranks.is_leader else None
    forward = way.make(cache, ranks, orders, _running(facts, limits, recorder))
    depth = 2 if facts.use_async_batching and way.pages else 1
    masks, hidden = GrammarMasks(grammars), HiddenStates(_head(model))
    runner = ModelRunner(forward, model.device, processors, EvalMode(model), masks, hidden, depth)
    follower = None
    if ranks is not None and not ranks.is_leader:
        follower = Follower(ranks, runner, cast("PackedForward", forward))
    core = EngineCore(facts=facts, layout=layout, limits=limits, num_host_sectors=host_sectors)
    rebuild = partial(_assemble, model, way, config, hints, processors, grammars, ranks, owned)
    summary = _summary(model, way, facts)
    logger.info(summary)
    return EngineParts(
        core=core,
        runner=runner,
        facts=facts,
        limits=limits,
        rebuild=rebuild,
        grammars=grammars,
        summary=summary,
        orders=orders,
        follower=follower,
    )


def _grammars(model: PreTrainedModel, way: Way, generation_config: Any) -> GrammarCompiler:
    """What compiles grammars for this model; its tokenizer is loaded from the model's files when the first one comes."""

    def load() -> Any:
        from transformers import AutoTokenizer

        maker: Any = AutoTokenizer

        name = str(getattr(model, "name_or_path", ""))
        if not name:
            raise OSError("the model was not loaded from files")
        return maker.from_pretrained(name)

    eos = generation_config.eos_token_id
    if eos is None:
        config: Any = model.config
        eos = getattr(config.get_text_config(), "eos_token_id", None)
    return GrammarCompiler(load, way.vocab_size, () if eos is None else token_ids(eos, "eos_token_id"))


def _head(model: PreTrainedModel) -> nn.Module | None:
    """The module that makes logits of hidden states."""
    get: Any = model.get_output_embeddings
    head = get()
    return head if isinstance(head, nn.Module) else None


def _summary(model: PreTrainedModel, way: Way, facts: EngineFacts) -> str:
    """What was chosen for this model on this machine, in a line."""
    place = f"{model.device}" if model.device.type != "cpu" else f"cpu, {torch.get_num_threads()} threads"
    cache = f"{facts.num_blocks} pages of {facts.page_size} tokens ({facts.cache_bytes / 2**30:.1f} GiB)"
    return (
        f"{type(model).__name__} on {place}, {str(model.dtype).removeprefix('torch.')}, {way.name}; steps of up to "
        f"{facts.max_batch_tokens} tokens and {facts.max_requests_per_batch} requests; {cache}"
    )


def _input_vocabulary(model: PreTrainedModel, way: Way) -> int:
    embeddings = model.get_input_embeddings()
    return int(getattr(embeddings, "num_embeddings", way.vocab_size))


def graph_recorder(device: torch.device) -> Recorder | None:
    """What captures graphs on a device; None: nothing does."""
    return CudaRecorder() if device.type == "cuda" else None


def overlaps(device: torch.device) -> bool:
    """Whether the device's work runs beside the host's."""
    return device.type == "cuda"


def _running(facts: EngineFacts, limits: RequestLimits, recorder: Recorder | None) -> Running:
    """How steps are run: what is captured and compiled."""
    page, width = facts.page_size, facts.max_blocks_per_request
    graphs = None
    if recorder is not None and (facts.use_decode_graphs or facts.use_varlen_graphs):
        longest = -(-min(limits.max_length, limits.max_cached_tokens) // page)
        sizes = Sizes(
            varlen=facts.use_varlen_graphs,
            decode=facts.use_decode_graphs,
            decode_width=max(1, width),
            full_width=min(longest, _MOST_WIDTHS * max(1, width)),
            max_rows=facts.max_requests_per_batch,
            q_interval=facts.q_padding_interval,
            kv_pages=max(1, facts.kv_padding_interval // page),
            page_size=page,
        )
        graphs = (sizes, recorder)
    tokens, rows = facts.max_batch_tokens, facts.max_requests_per_batch
    return Running(
        decode_width=width,
        graphs=graphs,
        varlen_compile=facts.varlen_compile,
        decode_compile=facts.decode_compile,
        largest=Padded(tokens, rows, rows, -(-tokens // page)),
    )


def _model_facts(model: PreTrainedModel, way: Way, *, has_graphs: bool) -> ModelFacts:
    itemsize = model.dtype.itemsize
    text: Any = model.config.get_text_config(decoder=True)  # pyright: ignore[reportUnknownMemberType]
    hidden = int(getattr(text, "hidden_size", 0) or getattr(text, "n_embd", 0) or 1024)
    inner = max(4 * hidden, _number(getattr(text, "intermediate_size", 0)))
    kv = max(layer.items_per_token for layer in way.layers)
    return ModelFacts(
        group_bytes_per_token=tuple(group.items_per_token * itemsize for group in CacheLayout.group(way.layers)),
        activation_bytes_per_token=itemsize * (4 * hidden + 3 * inner + 2 * kv),
        logits_bytes_per_row=way.vocab_size * (itemsize + 4),
        device_type=model.device.type,
        has_streams=way.pages and overlaps(model.device),
        has_graphs=has_graphs,
        graph_bytes=len(way.layers) * _GRAPH_BYTES_PER_LAYER,
        has_decode_path=way.static,
        is_masked=way.masked,
        page_multiple=way.page_multiple,
    )


def _number(value: Any) -> int:
    """A config field that may be one number or one per layer."""
    several = cast("Sequence[int]", value) if isinstance(value, (list, tuple)) else (int(value or 0),)
    return max(several, default=0)
