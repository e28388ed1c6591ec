"""Puts native kernels under a model's own modules: linear layers, gated MLPs, RMS norms, and the three linears before attention.

Owns which modules are exchanged. Knows shapes and a probe's answer, no family by name: a module is taken when its class is
`nn.Linear` itself, or when on a probe it computes what the kernel computes. Weights stay the model's own and are read where they
are at each call, so there is nothing to refresh when they change and no second copy.

Nothing but `forward` in a module's own dictionary is set, and `release` takes that away again. Outside inference mode, for other
dtypes and for more rows than the kernels are made for, the module's own forward runs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from .loader import NativeOps

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROBE_ROWS = 3


class NativeModules:
    """The modules of one model that the native kernels compute. `refresh` exchanges them, `release` gives them back."""

    def __init__(self, model: nn.Module, ops: NativeOps) -> None:
        """Probes the model's modules; changes none."""
        self._forwards: list[tuple[nn.Module, Callable[..., Tensor]]] = []
        taken: set[int] = set()
        with torch.inference_mode():
            for module in model.modules():
                for find in (_gated_mlp, _attention, _norm, _linear):
                    if id(module) not in taken and (found := find(module, ops, taken)):
                        self._forwards += found
                        taken.update(id(part) for part, _ in found)

    def __len__(self) -> int:
        """How many modules are exchanged."""
        return len(self._forwards)

    def refresh(self) -> None:
        """Let the kernels compute. Idempotent."""
        for module, forward in self._forwards:
            module.forward = forward

    def release(self) -> None:
        """Let the modules compute as before. Idempotent."""
        for module, _ in self._forwards:
            module.__dict__.pop("forward", None)


def most_rows(dtype: torch.dtype, level: str) -> int:
    """Up to how many rows native products are at least as fast as torch's, from measurements; see docs/performance.md.

    Torch's libraries have tile units (AMX) on some machines, are tuned for one vendor in float32, and have no fast path at all
    for the half types where the processor has no instructions for them.
    """
    flags = _cpu_flags()
    if dtype == torch.float32:
        return 32 if "genuineintel" in flags else 1024
    if dtype == torch.bfloat16 and "amx_bf16" in flags:
        return 16
    if dtype == torch.float16 and ("amx_fp16" in flags or "avx512_fp16" in flags):
        return 16
    return 128 if level == "avx512_bf16" else 1024


def _cpu_flags() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    if platform.system() != "Linux" or not info.exists():
        return frozenset()
    return frozenset(info.read_text().split("\n\n", 1)[0].lower().split())


def _plain(module: nn.Module) -> bool:
    """Untouched by anyone: no forward of its own, no hooks."""
    return "forward" not in module.__dict__ and not module._forward_hooks and not module._forward_pre_hooks


def _native_weight(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.dtype in _DTYPES
        and weight.dim() == 2
        and weight.stride(1) == 1
        and weight.shape[1] % 32 == 0
    )


def _is_linear(module: nn.Module | None) -> bool:
    """Exactly nn.Linear: a subclass may compute something else."""
    return type(module) is nn.Linear and _plain(module) and _native_weight(module.weight)


def _ready(x: Tensor, weight: Tensor, rows: int) -> bool:
    return (
        torch.is_inference_mode_enabled()
        and x.dtype == weight.dtype
        and x.numel() <= rows * x.shape[-1]
        and x.is_contiguous()
        and x.dim() > 1
    )


Found = list[tuple[nn.Module, Callable[..., Tensor]]]


def _linear(module: nn.Module, ops: NativeOps, taken: set[int]) -> Found:
    if not _is_linear(module):
        return []
    assert isinstance(module, nn.Linear)
    linear, rows = ops.linear, most_rows(module.weight.dtype, ops.level)

    def forward(input: Tensor) -> Tensor:
        weight = module.weight
        if _ready(input, weight, rows):
            return linear(input, weight, module.bias, None)
        return functional.linear(input, weight, module.bias)

    return [(module, forward)]


def _gated_mlp(module: nn.Module, ops: NativeOps, taken: set[int]) -> Found:
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not _plain(module) or not (_is_linear(gate) and _is_linear(up) and _is_linear(down)):
        return []
    assert isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)
    if any(part.bias is not None for part in (gate, up, down)) or gate.weight.stride() != up.weight.stride():
        return []
    gelu = _gelu_tanh(getattr(module, "act_fn", None))
    if gelu is None or gate.weight.shape != up.weight.shape or down.weight.shape[1] != up.weight.shape[0]:
        return []
    own, mlp, rows = module.forward, ops.gated_mlp, most_rows(gate.weight.dtype, ops.level)

    def native(x: Tensor) -> Tensor:
        return mlp(x, gate.weight, up.weight, down.weight, gelu, None)

    def forward(x: Tensor) -> Tensor:
        return native(x) if _ready(x, gate.weight, rows) else own(x)

    return [(module, forward)] if _agree(own, native, gate.weight.shape[1], gate.weight.dtype, tolerance=8.0) else []


def _gelu_tanh(activation: object) -> bool | None:
    """False: it computes SiLU; True: the tanh form of GELU; None: something else."""
    if not callable(activation) or isinstance(activation, type):
        return None
    grid = torch.linspace(-9, 9, 64)
    try:
        values = activation(grid)
    except Exception:  # takes something else than one tensor
        return None
    known = {False: functional.silu(grid), True: functional.gelu(grid, approximate="tanh")}
    return next(
        (gelu for gelu, expected in known.items() if isinstance(values, Tensor) and torch.allclose(values, expected, atol=1e-6)),
        None,
    )


def _norm(module: nn.Module, ops: NativeOps, taken: set[int]) -> Found:
    weight, parameters = getattr(module, "weight", None), list(module.parameters())
    epsilon = next(
        (e for e in (getattr(module, name, None) for name in ("variance_epsilon", "eps")) if isinstance(e, float)), None
    )
    if not isinstance(weight, Tensor) or weight.dim() != 1 or len(parameters) != 1 or list(module.children()):
        return []
    if epsilon is None or not _plain(module) or weight.device.type != "cpu" or weight.dtype not in _DTYPES:
        return []
    own, norm, dtype = module.forward, ops.rms_norm, weight.dtype
    # A weight of its own for the probe: under ones, as many models begin with, all styles are the same.
    other = torch.linspace(-1.5, 2.5, len(weight)).to(dtype)

    def own_probe(x: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": other}, (x,))

    for style in range(3):
        if _agree(own_probe, lambda x, style=style: norm(x, other, epsilon, style), len(weight), dtype, tolerance=0.5):

            def forward(x: Tensor, style: int = style) -> Tensor:
                fits = torch.is_inference_mode_enabled() and x.dtype == module.weight.dtype
                return norm(x, module.weight, epsilon, style) if fits else own(x)

            return [(module, forward)]
    return []


def _attention(module: nn.Module, ops: NativeOps, taken: set[int]) -> Found:
    """The three linears before attention, computed when the first is asked for. The other two find their answer by the very
    tensor object they are given, and compute it themselves if it is another.
    """
    names = ("q_proj", "k_proj", "v_proj")
    parts = [getattr(module, name, None) for name in names]
    if not all(_is_linear(part) for part in parts):
        return []
    query, key, value = parts
    assert isinstance(query, nn.Linear) and isinstance(key, nn.Linear) and isinstance(value, nn.Linear)
    if len({part.weight.shape[1] for part in (query, key, value)}) > 1 or id(query) in taken:
        return []
    rows, linears, linear = most_rows(query.weight.dtype, ops.level), ops.linear_qkv, ops.linear
    left: dict[str, tuple[Tensor, Tensor]] = {}

    def first(input: Tensor) -> Tensor:
        left.clear()
        if not _ready(input, query.weight, rows):
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
            if _ready(input, part.weight, rows):
                return linear(input, part.weight, part.bias, None)
            return functional.linear(input, part.weight, part.bias)

        return forward

    return [(query, first), (key, later("k_proj", key)), (value, later("v_proj", value))]


def _agree(
    own: Callable[[Tensor], Tensor], native: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype, tolerance: float
) -> bool:
    """Whether two forwards give the same on a probe, up to `tolerance` units in the last place of the greatest number."""
    draw = torch.Generator().manual_seed(0)
    probe = torch.randn((1, _PROBE_ROWS, width), generator=draw).to(dtype) * 2
    try:
        expected, got = own(probe), native(probe)
    except Exception:  # a module that takes other arguments, or shapes the kernel refuses: not one of ours
        return False
    if not isinstance(expected, Tensor) or expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    greatest = float(expected.abs().max())
    return greatest > 0 and float((expected.float() - got.float()).abs().max()) <= tolerance * torch.finfo(dtype).eps * greatest
