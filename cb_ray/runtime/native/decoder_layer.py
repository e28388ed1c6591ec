"""A whole decoder layer of the common shape as one native call, where a model's own code takes some fifty operations.

    norm ─▶ q, k, v ─▶ (norms of heads) ─▶ rotary ─▶ attention ─▶ output, + residual ─▶ norm ─▶ gated MLP, + residual

Owns which layers have that shape. Knows the names of submodules that dozens of families share, and no family: a layer is taken when
it has exactly these parts and a probe through the model's own code gives the same queries, keys, values, attention keywords and
answer. Attention itself stays whatever the model's config names, asked for in the way the model asks; then a layer is seven calls.
Where that is our own over native pages, which knows what the model asks it for, all of the layer is one.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention import PagedAttention
from ..attention_switch import AttentionSwitch
from .loader import NativeOps
from .parts import Norm, find_gelu, find_norm, is_linear, is_plain, most_rows, ready, same

_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_POSITIONS = (0, 5_003, 3_000_017)  # of the probe: some layers scale queries by how far they are
_ROWS = len(_POSITIONS)
_names = itertools.count()

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The parts of one layer, as modules: their weights are looked up at each call."""

    attention: nn.Module
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    before_attention: Norm
    before_mlp: Norm
    of_queries: Norm | None
    of_keys: Norm | None
    gelu: bool
    head_dim: int


@dataclass(slots=True)
class _Seen:
    """What attention was called with, and an answer that depends on all of it."""

    query: Tensor
    key: Tensor
    value: Tensor
    keywords: dict[str, Any]


class _Recorder:
    """Stands in for attention while layers are probed."""

    def __init__(self) -> None:
        self.seen: list[_Seen] = []

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
    ) -> tuple[Tensor, None]:
        self.seen.append(_Seen(query.clone(), key.clone(), value.clone(), {**keywords, "attention_mask": attention_mask}))
        heads = query.shape[1] // value.shape[1]
        return (query[..., : value.shape[3]] * value.repeat_interleave(heads, dim=1)).transpose(1, 2).contiguous(), None


def find_layers(model: nn.Module, ops: NativeOps) -> list[tuple[nn.Module, Forward]]:
    """The layers of `model` that the native kernels can compute, each with its new forward. The model is left as it was."""
    candidates = [(layer, parts) for layer in model.modules() if (parts := _parts(layer, ops)) is not None]
    if not candidates or not isinstance(model, PreTrainedModel):
        return []
    recorder, name = _Recorder(), f"cb_ray_probe_{next(_names)}"
    AttentionInterface.register(name, recorder.attend)
    switch = AttentionSwitch(model, name)
    switch.install()
    try:
        with torch.inference_mode():
            probed = [(layer, _probed(layer, parts, ops, recorder)) for layer, parts in candidates]
    finally:
        switch.restore()
        AttentionInterface._global_mapping.pop(name, None)
    return [(layer, forward) for layer, forward in probed if forward is not None]


def _parts(layer: Any, ops: NativeOps) -> _Parts | None:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if not isinstance(attention, nn.Module) or not isinstance(mlp, nn.Module) or _named(layer) != _LAYER:
        return None
    if _named(attention) not in (_ATTENTION, _ATTENTION | _HEAD_NORMS) or _named(mlp) != _MLP:
        return None
    if not all(is_plain(module) for module in (layer, attention, mlp)):
        return None
    linears = {name: getattr(owner, name) for owner, names in ((attention, _ATTENTION), (mlp, _MLP)) for name in names}
    head_dim, gelu = getattr(attention, "head_dim", None), find_gelu(getattr(mlp, "act_fn", None))
    if not all(is_linear(linear) for linear in linears.values()) or type(head_dim) is not int or gelu is None:
        return None
    gate, up, down = (linears[name] for name in ("gate_proj", "up_proj", "down_proj"))
    if any(part.bias is not None for part in (gate, up, down)) or gate.weight.stride() != up.weight.stride():
        return None
    if gate.weight.shape != up.weight.shape or up.weight.shape[0] % 32 or len({p.dtype for p in layer.parameters()}) > 1:
        return None
    norms = [find_norm(module, ops) for module in (layer.input_layernorm, layer.post_attention_layernorm)]
    head_norms: list[Norm | None] = [None, None]
    if _named(attention) != _ATTENTION:
        head_norms = [find_norm(getattr(attention, name), ops) for name in ("q_norm", "k_norm")]
        if None in head_norms or any(norm is not None and norm.width != head_dim for norm in head_norms):
            return None
    if norms[0] is None or norms[1] is None:
        return None
    return _Parts(
        attention=attention,
        query=linears["q_proj"],
        key=linears["k_proj"],
        value=linears["v_proj"],
        output=linears["o_proj"],
        gate=gate,
        up=up,
        down=down,
        before_attention=norms[0],
        before_mlp=norms[1],
        of_queries=head_norms[0],
        of_keys=head_norms[1],
        gelu=gelu,
        head_dim=head_dim,
    )


def _named(module: nn.Module) -> set[str]:
    """Names of the children that have parameters, and of parameters of its own."""
    return {name for name, child in module.named_children() if next(child.parameters(), None) is not None} | {
        name for name, _ in module.named_parameters(recurse=False)
    }


def _forward(layer: nn.Module, p: _Parts, ops: NativeOps, keywords: Mapping[str, Any]) -> Forward:
    """The layer on native kernels; `keywords` are what it gives attention besides what it is given itself."""
    own, rows, dim = layer.forward, most_rows(p.query.weight.dtype), p.head_dim
    whole = _whole(p, ops, keywords)
    qkv, turn, linear, mlp = ops.linear_qkv, ops.rotary_, ops.linear, ops.gated_mlp
    attention, query, key, value, output = p.attention, p.query, p.key, p.value, p.output

    def forward(hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        angles = given.get("position_embeddings")
        cached = given.get("cache") is not None or given.get("past_key_values") is not None
        if args or angles is None or cached or layer.training or not ready(hidden_states, query.weight, rows):
            return own(hidden_states, *args, **given)
        if whole is not None and (paged := _native_attention(attention)) is not None:
            return whole(hidden_states, *angles, paged)
        shape = hidden_states.shape[:-1]
        x = p.before_attention(hidden_states)
        weights, biases = (query.weight, key.weight, value.weight), (query.bias, key.bias, value.bias)
        q, k, v = (part.view(*shape, -1, dim) for part in qkv(x, *weights, *biases))
        if p.of_queries is not None and p.of_keys is not None:
            q, k = p.of_queries(q), p.of_keys(k)
        turn(q, k, *angles)
        rest = {name: value for name, value in given.items() if name not in _CONSUMED}
        mixed, _ = _attention_function(attention)(
            attention,
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            given.get("attention_mask"),
            **keywords,
            **rest,
        )
        mixed = mixed.reshape(*shape, -1).contiguous()
        hidden_states = linear(mixed, output.weight, output.bias, hidden_states)
        return mlp(p.before_mlp(hidden_states), p.gate.weight, p.up.weight, p.down.weight, p.gelu, hidden_states)

    return forward


def _whole(p: _Parts, ops: NativeOps, keywords: Mapping[str, Any]) -> Callable[..., Tensor] | None:
    """The layer as one call, (x, cos, sin, attention over native pages); None where its heads' norms differ in more than weights."""
    first, second, of_queries, of_keys = p.before_attention, p.before_mlp, p.of_queries, p.of_keys
    heads = (0.0, 0)
    if of_queries is not None and of_keys is not None:
        heads = (of_queries.epsilon, of_queries.style)
        if heads != (of_keys.epsilon, of_keys.style):
            return None
    query, key, value, output, gate, up, down = p.query, p.key, p.value, p.output, p.gate, p.up, p.down
    op, gelu, attention = ops.decoder_layer, p.gelu, p.attention
    scaling, softcap = keywords.get("scaling"), keywords.get("softcap") or 0.0
    scaling = p.head_dim**-0.5 if scaling is None else scaling

    def whole(x: Tensor, cos: Tensor, sin: Tensor, paged: PagedAttention) -> Tensor:
        pages, batch = paged.of_step(attention)
        return op(
            *(x, cos, sin),
            *(first.module.weight, first.epsilon, first.style),
            *(second.module.weight, second.epsilon, second.style),
            None if of_queries is None else of_queries.module.weight,
            None if of_keys is None else of_keys.module.weight,
            *heads,
            *(query.weight, key.weight, value.weight, output.weight),
            *(query.bias, key.bias, value.bias, output.bias),
            *(gate.weight, up.weight, down.weight, gelu),
            *(pages.keys, pages.values, batch.slots, batch.table, batch.cu_q, batch.starts),
            *(scaling, pages.window or 0, softcap),
        )

    return whole


def _native_attention(attention: Any) -> PagedAttention | None:
    """Our own attention over pages by the native kernels, if that is what the model's config names."""
    paged = getattr(_attention_function(attention), "__self__", None)
    return paged if isinstance(paged, PagedAttention) and paged.backend.name == "cpu" else None


_CONSUMED = {"attention_mask", "position_embeddings", "cache", "past_key_values"}


def _attention_function(attention: Any) -> Callable[..., tuple[Tensor, Any]]:
    fallback: Any = getattr(sys.modules[type(attention).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, fallback)


def _probed(layer: nn.Module, p: _Parts, ops: NativeOps, recorder: _Recorder) -> Forward | None:
    """The layer's new forward, if its own code and that ask attention for the same and answer the same."""
    draw, weight = torch.Generator().manual_seed(0), p.query.weight
    hidden = torch.randn((1, _ROWS, weight.shape[1]), generator=draw).to(weight.dtype)
    angles = torch.randn((1, _ROWS, p.head_dim // 2), generator=draw).repeat(1, 1, 2) * 3
    given: dict[str, Any] = {
        "attention_mask": None,
        "position_ids": torch.tensor([_POSITIONS]),
        "use_cache": False,
        "position_embeddings": (angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)),
    }
    recorder.seen.clear()
    try:
        expected = layer.forward(hidden, **given)
        keywords = {name: value for name, value in recorder.seen[0].keywords.items() if name not in given}
        if not all(value is None or isinstance(value, (bool, int, float, str)) for value in keywords.values()):
            return None
        forward = _forward(layer, p, ops, keywords)
        got = forward(hidden, **given)
    except Exception:  # it wants something else to be called with
        return None
    if len(recorder.seen) != 2 or not isinstance(expected, Tensor):
        return None
    one, two = recorder.seen
    tensors = [(expected, got, 16.0), (one.query, two.query, 8.0), (one.key, two.key, 8.0), (one.value, two.value, 8.0)]
    agrees = one.keywords == two.keywords and all(same(a, b, tolerance) for a, b, tolerance in tensors)
    return forward if agrees else None
