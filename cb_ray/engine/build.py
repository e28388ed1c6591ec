"""The one place where an engine is wired: model + settings → facts, layout, cache, attention, runner, core.

Owns the choice of attention backend and the translation of a model into the numbers that sizing needs. Nothing runs here
beyond the survey's small forward pass; a model that cannot be served is refused by name, and left as it was found.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..config import ContinuousBatchingConfig, WorkloadHints
from ..core.engine_core import EngineCore
from ..core.layout import CacheLayout, LayerSpec
from ..core.request import RequestLimits
from ..errors import UnsupportedModelError
from ..runtime.attention import Backend, PagedAttention
from ..runtime.backends import EagerBackend, SdpaBackend
from ..runtime.kv_cache import KVCache
from ..runtime.model_runner import ModelRunner
from ..runtime.sampling import Processor
from ..runtime.survey import Survey, survey
from ..sizing import ModelFacts, resolve
from .machine import measure
from .parts import EngineParts

logger = logging.getLogger(__name__)


def build(
    model: PreTrainedModel,
    generation_config: Any,
    config: ContinuousBatchingConfig,
    hints: WorkloadHints | None = None,
    *,
    processors: Sequence[Processor] = (),
    backend: str | None = None,
) -> EngineParts:
    """An engine for `model`. `backend` names an attention backend; None takes the best that can serve every layer.

    Raises UnsupportedModelError when the model has something that would be computed wrongly, ConfigError for a bad setting, and
    MemoryError when what was asked for does not fit.
    """
    found = survey(model)
    if found.reason:
        raise UnsupportedModelError(_name(model), found.reason)
    chosen = choose_backend(found, model.device, backend)
    layers = [site.spec for site in found.sites]
    facts = resolve(
        config,
        _model_facts(model, found, layers),
        measure(model.device),
        hints=hints,
        entropy=secrets.randbits(62),
        compile_fallback=None,
    )
    for note in facts.notes:
        logger.warning(note)
    layout = CacheLayout.sized(layers, page_size=facts.page_size, itemsize=model.dtype.itemsize, num_blocks=facts.num_blocks)
    host_sectors = facts.cpu_offload_bytes // layout.bytes_per_sector
    cache = KVCache(layout, dtype=model.dtype, device=model.device, num_host_sectors=host_sectors)
    attention = PagedAttention(cache, chosen, {id(site.module): site.index for site in found.sites})
    runner = ModelRunner(model, cache, attention, processors)
    limits = RequestLimits(
        vocab_size=_input_vocabulary(model, found),
        max_length=max_length(model),
        max_cached_tokens=layout.max_tokens_alone(facts.max_batch_tokens),
        page_size=facts.page_size,
    )
    core = EngineCore(facts=facts, layout=layout, limits=limits, num_host_sectors=host_sectors)
    return EngineParts(core=core, runner=runner, facts=facts, limits=limits)


def choose_backend(found: Survey, device: torch.device, wanted: str | None = None) -> Backend:
    """The first backend that can serve every layer, or the one of that name. Raises UnsupportedModelError saying why not."""
    candidates: list[Backend] = [SdpaBackend(), EagerBackend()]
    if wanted is not None:
        candidates = [backend for backend in candidates if backend.name == wanted]
    reasons: list[str] = []
    for backend in candidates:
        against = [reason for site in found.sites if (reason := backend.reason_against(site, device))]
        if not against:
            return backend
        reasons.append(f"{backend.name}: {against[0]}")
    raise UnsupportedModelError("this model", "; ".join(reasons) or f"there is no attention backend called {wanted!r}")


def max_length(model: PreTrainedModel) -> int:
    """The model's context in tokens; a very large number when its config names none."""
    text: Any = model.config.get_text_config(decoder=True)  # pyright: ignore[reportUnknownMemberType]
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 1 << 30


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__


def _input_vocabulary(model: PreTrainedModel, found: Survey) -> int:
    embeddings = model.get_input_embeddings()
    return int(getattr(embeddings, "num_embeddings", found.vocab_size))


def _model_facts(model: PreTrainedModel, found: Survey, layers: list[LayerSpec]) -> ModelFacts:
    itemsize = model.dtype.itemsize
    groups = CacheLayout.group(layers)
    text: Any = model.config.get_text_config(decoder=True)  # pyright: ignore[reportUnknownMemberType]
    hidden = int(getattr(text, "hidden_size", 0) or getattr(text, "n_embd", 0) or 1024)
    inner = int(getattr(text, "intermediate_size", 0) or 4 * hidden)
    widest = max(site.heads * (site.k_dim + site.v_dim) for site in found.sites)
    kind = model.device.type
    return ModelFacts(
        group_bytes_per_token=tuple(group.items_per_token * itemsize for group in groups),
        activation_bytes_per_token=itemsize * (4 * hidden + 3 * inner + 2 * widest),
        logits_bytes_per_row=found.vocab_size * (itemsize + 4),
        device_type=kind,
        has_streams=False,
        has_graphs=False,
    )
