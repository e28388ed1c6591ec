"""How a model can be run: packed over pages, or row by row with its own cache. Owns the choice and the trial each way must pass.

Knows the runtime's forwards and the survey; no core, no request. A way that raises or gives other logits than the model's plain
forward pass is not taken; a model that no way serves is refused with the reasons, and left as it was found.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from ..core.layout import LayerSpec
from ..errors import UnsupportedModelError
from ..runtime import flash_kernels
from ..runtime.attention import Backend, PagedAttention
from ..runtime.backends import EagerBackend, SdpaBackend
from ..runtime.compilation import Calls, Keywords
from ..runtime.flash_backend import FlashBackend
from ..runtime.graphs import Graphs, Recorder, Sizes
from ..runtime.inputs import Padded
from ..runtime.kv_cache import KVCache
from ..runtime.model_runner import Forward
from ..runtime.native import NativeOps, load
from ..runtime.native.modules import NativeModules
from ..runtime.native_backend import NativeBackend
from ..runtime.orders import Orders
from ..runtime.own_cache_forward import Manner, OwnCacheForward, items_per_token
from ..runtime.packed_forward import PackedForward
from ..runtime.ranks import Ranks
from ..runtime.survey import Survey, survey
from ..runtime.trial import self_disagreement, trial_error, trial_layout

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}  # of the trial, in standard deviations of the logits
_HALF_TOLERANCE = 0.25
_MOST_DOUBT = 0.1  # a model that is further from itself than by a tie here and there is no model to be served
_SEEDS = (0, 1, 2)  # of the texts of a trial
_AGAIN = "own cache (again)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """How a way's steps are run, once an engine is sized. The trial runs them plainly."""

    decode_width: int = 32  # pages of a request that counts as short; 0: no decode kernel
    graphs: tuple[Sizes, Recorder] | None = None  # what is captured, and by what
    varlen_compile: Keywords = ()
    decode_compile: Keywords = ()
    largest: Padded = Padded(1, 1, 1, 1)  # noqa: RUF009 (frozen) — the largest step: tokens, rows, and pages of the former


class Make(Protocol):
    """Makes a way's forward over a cache; `ranks` and `orders` for a model that is divided."""

    def __call__(
        self,
        cache: KVCache | None,
        ranks: Ranks | None = None,
        orders: Orders | None = None,
        running: Running | None = None,
    ) -> Forward: ...


@dataclass(frozen=True, slots=True)
class Way:
    """A way of running the model that gave the right logits."""

    name: str
    pages: bool  # whether keys and values lie in our pages
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    masked: bool
    make: Make
    page_multiple: int = 1  # pages hold a multiple of this many tokens
    static: bool = False  # block tables are read by kernels, so that steps of equal shape make equal calls


def find_way(
    model: PreTrainedModel, page_size: int, backend: str | None = None, ranks: Ranks | None = None, flash: bool = True
) -> Way:
    """The fastest way that serves `model` rightly, on every one of its ranks. Raises UnsupportedModelError with what spoke against
    each. `flash`: kernels other than the model's own attention may be taken (`auto_switch_to_flash`).
    """
    reasons: list[str] = []
    seen: Survey | None = None
    try:
        seen = survey(model)
        kinds = _unusual_layers(model)
        if kinds and not seen.reason:
            seen = replace(seen, reason=f"{kinds[0]} keeps more than keys and values")
        reasons += [f"packed: {seen.reason}"] if seen.reason else []
    except Exception as error:
        reasons.append(f"packed: the model's layers could not be watched ({type(error).__name__}: {error})")
    doubt = 0.0
    candidates = _candidates(model, seen, backend, page_size, flash)
    for way in candidates if ranks is None else _common(list(candidates), ranks):
        try:
            if not way.pages and not doubt:
                doubt = _doubt(model, way.vocab_size)
            error = _try(model, way, page_size)
            raised = None
        except Exception as caught:
            error, raised = 0.0, f"{type(caught).__name__}: {caught}"
        if ranks is not None:
            error, raised = _worst(ranks.gather((error, raised)))
        if raised is not None:
            reasons.append(f"{way.name}: {raised}")
            continue
        if error <= _tolerance(model) and (doubt <= _tolerance(model) or way.name == _AGAIN):
            return way
        if way.name == _AGAIN and _tolerance(model) < doubt <= _MOST_DOUBT and error <= 2 * doubt:
            return way
        logger.info("%s is not run %s: its logits are off by %.2g", type(model).__name__, way.name, error)
        reasons.append(f"{way.name}: its logits differ from the model's own by {error:.2g} standard deviations")
    raise UnsupportedModelError(type(model).__name__, "; ".join([*_unusual_layers(model), *reasons]))


def _common(candidates: list[Way], ranks: Ranks) -> list[Way]:
    """What every rank can try, in the leader's order. Followers keep nothing of a request, so only ways over pages are."""
    said = ranks.gather([way.name for way in candidates if way.pages])
    mine = {way.name: way for way in candidates}
    return [mine[name] for name in said[0] if all(name in names for names in said)]


def _worst(verdicts: list[tuple[float, str | None]]) -> tuple[float, str | None]:
    """The ranks' verdicts on a way as one: the greatest error, and the first exception."""
    raised = next((f"rank {rank}: {text}" for rank, (_, text) in enumerate(verdicts) if text is not None), None)
    return max(error for error, _ in verdicts), raised


def _tolerance(model: PreTrainedModel) -> float:
    return _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)


def _doubt(model: PreTrainedModel, vocab_size: int) -> float:
    """How far the model's plain forward pass is from itself on a longer text, over a few texts.

    Layers that select the best keys break ties by their place, so such a model's answer depends on how much of a text it is shown.
    Only running all tokens again says what its forward pass says.
    """
    return max(self_disagreement(model, vocab_size, max_length(model), seed) for seed in _SEEDS)


def _candidates(model: PreTrainedModel, seen: Survey | None, wanted: str | None, page_size: int, flash: bool) -> Iterator[Way]:
    if seen is not None and not seen.reason:
        modules = native_modules(model)
        for backend in backends_for(model, seen, page_size, flash=flash, wanted=wanted):
            if modules is not None:
                yield _packed(model, seen, backend, modules)
            yield _packed(model, seen, backend, None)
    if wanted is not None:
        return
    vocab_size = seen.vocab_size if seen is not None else int(model.config.get_text_config(decoder=True).vocab_size)  # pyright: ignore
    manners: tuple[Manner, ...] = ("extend", "single", "again")
    for manner in manners:
        yield Way(f"own cache ({manner})", False, (_counted(model, manner),), vocab_size, True, _own(model, manner))


def _counted(model: PreTrainedModel, manner: Manner) -> LayerSpec:
    """What a token costs in the model's own cache, as one layer for the core to count."""
    half = 1
    if manner != "again":
        with contextlib.suppress(Exception):  # a cache of another kind: its trial will tell
            half = -(-items_per_token(model) // 2)
    return LayerSpec(0, "full", 1, half, half)


def _packed(model: PreTrainedModel, seen: Survey, backend: Backend, modules: NativeModules | None) -> Way:
    layer_of = {id(site.module): site.index for site in seen.sites}

    def make(
        cache: KVCache | None, ranks: Ranks | None = None, orders: Orders | None = None, running: Running | None = None
    ) -> Forward:
        assert cache is not None
        how = running or Running()
        attention = PagedAttention(cache, backend, layer_of, how.decode_width)
        graphs = calls = None
        if how.graphs is not None:
            graphs = Graphs(*how.graphs, model.device, len(cache.layout.groups))
        if how.varlen_compile or how.decode_compile:
            attention.hide_from_compiler()
            calls = Calls.compiled(model, how.varlen_compile, how.decode_compile, how.largest)
        return PackedForward(model, cache, attention, long_from(model), modules, ranks, orders, graphs, calls)

    layers = tuple(site.spec for site in seen.sites)
    kernels = "" if modules is None else ", native modules"
    name, flash = f"packed ({backend.name}{kernels})", isinstance(backend, FlashBackend)
    multiple = backend.page_multiple if isinstance(backend, FlashBackend) else 1
    return Way(name, True, layers, seen.vocab_size, not flash, make, page_multiple=multiple, static=flash)


def native_modules(model: PreTrainedModel) -> NativeModules | None:
    """The model's linear layers, MLPs and norms on the native kernels; None where they cannot serve."""
    if model.device.type != "cpu":
        return None
    ops = load()
    if not isinstance(ops, NativeOps):
        return None
    modules = NativeModules(model, ops)
    return modules if len(modules) else None


def _own(model: PreTrainedModel, manner: Manner) -> Make:
    return lambda cache, ranks=None, orders=None, running=None: OwnCacheForward(model, manner)


def backends_for(
    model: PreTrainedModel, seen: Survey, page_size: int, *, flash: bool = True, wanted: str | None = None
) -> list[Backend]:
    """The backends that can serve every layer, the fastest first; or the one of that name. `flash`: see `auto_switch_to_flash`.

    Raises UnsupportedModelError saying why not.
    """
    device, own = model.device, str(model.config._attn_implementation or "")  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    flashes: list[Backend] = [FlashBackend(name, page_size) for name in flash_kernels.NAMES]
    candidates: list[Backend] = [NativeBackend(), *flashes, SdpaBackend(), EagerBackend()]
    if wanted is not None:
        candidates = [backend for backend in candidates if backend.name == wanted]
    elif not flash:
        candidates = [backend for backend in candidates if not isinstance(backend, FlashBackend) or backend.name == own]
    good: list[Backend] = []
    reasons: list[str] = []
    for backend in candidates:
        against = next((reason for site in seen.sites if (reason := backend.reason_against(site, device))), None)
        if against is None:
            good.append(backend)
        else:
            reasons.append(f"{backend.name}: {against}")
    if not good:
        raise UnsupportedModelError("this model", "; ".join(reasons) or f"there is no attention backend called {wanted!r}")
    if device.type == "cuda" and not isinstance(good[0], FlashBackend) and wanted is None:
        logger.warning("attention is computed by %s, without a flash kernel: %s", good[0].name, "; ".join(reasons))
    kernels = [backend for backend in good if isinstance(backend, FlashBackend)]  # a trial may find one wrong
    return [*kernels, *[backend for backend in good if backend not in kernels][:1]]


def _try(model: PreTrainedModel, way: Way, page_size: int) -> float:
    layout = trial_layout(way.layers, max(page_size, 4), model.dtype.itemsize)
    cache = KVCache(layout, dtype=model.dtype, device=model.device) if way.pages else None
    forward = way.make(cache)
    try:
        seeds = _SEEDS[:1] if way.pages else _SEEDS  # an unusual layer may agree on one text by luck
        return max(trial_error(model, forward, layout, way.vocab_size, max_length(model), seed) for seed in seeds)
    finally:
        forward.close()


def max_length(model: PreTrainedModel) -> int:
    """The model's context in tokens; a very large number when its config names none."""
    text: Any = model.config.get_text_config(decoder=True)  # pyright: ignore[reportUnknownMemberType]
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 1 << 30


def long_from(model: PreTrainedModel) -> int:
    """The length beyond which the model uses other rotary factors (longrope); 0 when it does not."""
    text: Any = model.config.get_text_config(decoder=True)  # pyright: ignore[reportUnknownMemberType]
    rope: Any = getattr(text, "rope_parameters", None) or {}
    kinds = rope.values() if rope and all(isinstance(value, dict) for value in rope.values()) else [rope]
    borders = [kind.get("original_max_position_embeddings", 0) for kind in kinds if kind.get("rope_type") == "longrope"]
    return min((int(border) for border in borders if border), default=0)


def _unusual_layers(model: PreTrainedModel) -> list[str]:
    """The layer types that the config names, apart from plain attention: usually the cause."""
    kinds: list[str] = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []  # pyright: ignore
    odd = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    return [f"the layer type {', '.join(odd)}"] if odd else []
