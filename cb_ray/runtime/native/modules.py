"""Puts native kernels under a model's own modules: decoder layers, gated MLPs, RMS norms, the linears before attention, all others.

Owns which modules are exchanged, and the exchange. Weights stay the model's own and are read where they are at each call: there is
nothing to refresh when they change, and no second copy. Nothing but `forward` in a module's own dictionary is set, and `release`
takes that away again. Outside inference mode, for other dtypes and for more rows than the kernels are made for, the module's own
forward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .decoder_layer import find_layers
from .loader import NativeOps
from .parts import MANY, agree, find_gelu, find_norm, is_linear, is_plain, most_rows, ready

Found = list[tuple[nn.Module, Callable[..., Any]]]


class NativeModules:
    """The modules of one model that the native kernels compute. `refresh` exchanges them, `release` gives them back."""

    def __init__(self, model: nn.Module, ops: NativeOps) -> None:
        """Probes the model's modules; changes none."""
        self._ops = ops
        self._threads_before: tuple[int, int] | None = None  # our own, torch's
        with torch.inference_mode():
            self._forwards: Found = find_layers(model, ops)
            # Where all of a step's work is ours, so may be its threads.
            self._own_threads = bool(self._forwards) and all(most_rows(layer.weight.dtype) == MANY for layer in _linears(model))
            taken = {id(module) for module, _ in self._forwards}
            for module in model.modules():
                for find in (_gated_mlp, _before_attention, _norm, _linear):
                    if id(module) not in taken and (found := find(module, ops)):
                        found = [pair for pair in found if id(pair[0]) not in taken]
                        self._forwards += found
                        taken.update(id(part) for part, _ in found)

    def __len__(self) -> int:
        """How many modules are exchanged."""
        return len(self._forwards)

    @property
    def modules(self) -> list[nn.Module]:
        """Those that are exchanged."""
        return [module for module, _ in self._forwards]

    def refresh(self) -> None:
        """Let the kernels compute. Idempotent. Where all of a step's work is native, on threads that wait for nobody: the calling
        thread is the one that steps, and torch's pool is set to one thread for it.
        """
        if self._own_threads and self._threads_before is None:
            threads = torch.get_num_threads()
            self._threads_before = self._ops.own_threads(threads), threads
            torch.set_num_threads(1)
        for module, forward in self._forwards:
            module.forward = forward

    def reload(self) -> None:
        """The weights are others now. Nothing to do: they are the model's own, in the model's own layout."""

    def release(self) -> None:
        """Let the modules compute as before. Idempotent."""
        for module, _ in self._forwards:
            module.__dict__.pop("forward", None)
        if self._threads_before is not None:
            own, threads = self._threads_before
            self._ops.own_threads(own)
            torch.set_num_threads(threads)
            self._threads_before = None


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _linear(module: nn.Module, ops: NativeOps) -> Found:
    if not is_linear(module):
        return []
    linear, rows = ops.linear, most_rows(module.weight.dtype)

    def forward(input: Tensor) -> Tensor:
        weight = module.weight
        if ready(input, weight, rows):
            return linear(input, weight, module.bias, None)
        return functional.linear(input, weight, module.bias)

    return [(module, forward)]


def _norm(module: nn.Module, ops: NativeOps) -> Found:
    norm = find_norm(module, ops)
    if norm is None:
        return []
    own = module.forward

    def forward(x: Tensor) -> Tensor:
        return norm(x) if torch.is_inference_mode_enabled() and x.dtype == norm.module.weight.dtype else own(x)

    return [(module, forward)]


def _gated_mlp(module: nn.Module, ops: NativeOps) -> Found:
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not is_plain(module) or not (is_linear(gate) and is_linear(up) and is_linear(down)):
        return []
    if any(part.bias is not None for part in (gate, up, down)) or gate.weight.stride() != up.weight.stride():
        return []
    gelu = find_gelu(getattr(module, "act_fn", None))
    if gelu is None or gate.weight.shape != up.weight.shape or down.weight.shape[1] != up.weight.shape[0]:
        return []
    own, mlp, rows = module.forward, ops.gated_mlp, most_rows(gate.weight.dtype)

    def native(x: Tensor) -> Tensor:
        return mlp(x, gate.weight, up.weight, down.weight, gelu, None)

    def forward(x: Tensor) -> Tensor:
        return native(x) if ready(x, gate.weight, rows) else own(x)

    return [(module, forward)] if agree(own, native, gate.weight.shape[1], gate.weight.dtype, tolerance=8.0) else []


def _before_attention(module: nn.Module, ops: NativeOps) -> Found:
    """The three linears before attention, computed when the first is asked for. The other two find their answer by the very
    tensor object they are given, and compute it themselves if it is another.
    """
    query, key, value = (getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj"))
    if not (is_linear(query) and is_linear(key) and is_linear(value)):
        return []
    if len({(part.weight.shape[1], part.weight.dtype) for part in (query, key, value)}) > 1:
        return []
    rows, linears, linear = most_rows(query.weight.dtype), ops.linear_qkv, ops.linear
    left: dict[str, tuple[Tensor, Tensor]] = {}

    def first(input: Tensor) -> Tensor:
        left.clear()
        if not ready(input, query.weight, rows):
            return functional.linear(input, query.weight, query.bias)
        weights, biases = (query.weight, key.weight, value.weight), (query.bias, key.bias, value.bias)
        queries, keys, values = linears(input, *weights, *biases)
        left["k_proj"], left["v_proj"] = (input, keys), (input, values)
        return queries

    def later(name: str, part: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(input: Tensor) -> Tensor:
            known = left.pop(name, None)
            if known is not None and known[0] is input:
                return known[1]
            if ready(input, part.weight, rows):
                return linear(input, part.weight, part.bias, None)
            return functional.linear(input, part.weight, part.bias)

        return forward

    return [(query, first), (key, later("k_proj", key)), (value, later("v_proj", value))]
