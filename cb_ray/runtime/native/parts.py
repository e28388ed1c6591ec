"""What the native kernels can stand in for: linears, norms and activations, told by what they are and what they compute.

Owns the tests that a module must pass, and up to how many rows the kernels are worth it. Knows no family of models.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from .loader import NativeOps, Unavailable, load

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MANY = 1 << 30  # rows: no limit
_PROBE_ROWS = 3


def most_rows(dtype: torch.dtype) -> int:
    """Up to how many rows native products are at least as fast as torch's, from measurements.

    With the same instructions the kernels and torch's libraries are equal from some 256 rows on, and the kernels are ahead
    below. Torch's libraries have tile units (AMX) on some machines, are tuned for one vendor in float32, and have no fast path
    at all for the half types where the processor has no instructions for them.
    """
    flags = _cpu_flags()
    if dtype == torch.float32 and "genuineintel" in flags:
        return 32
    if dtype == torch.bfloat16 and "amx_bf16" in flags:
        return 16
    if dtype == torch.float16 and ("amx_fp16" in flags or "avx512_fp16" in flags):
        return 16
    return MANY


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16; without them torch's own are slower than float32."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & _cpu_flags())


def widens_weights(model: nn.Module) -> bool:
    """Whether the kernels here multiply nearly all of a model's weights as they lie, half types widened in registers.

    A decode step reads every weight, so with half the bytes it is faster than in float32 (1.3 to 1.5 times by measurement with
    AVX-512 and no instructions for bfloat16) and a prefill is no slower. Not so at the portable level.
    """
    ops = load()
    if isinstance(ops, Unavailable) or ops.level == "portable":
        return False
    # Tables of embeddings are looked up, not multiplied, unless they are the head's weight too.
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linears = {id(module.weight): module.weight.numel() for module in model.modules() if is_linear(module)}
    others = {id(weight): weight.numel() for weight in model.parameters() if id(weight) not in tables | linears.keys()}
    native = sum(linears.values())
    return native >= 0.9 * (native + sum(others.values()))


@functools.cache
def _cpu_flags() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    if platform.system() != "Linux" or not info.exists():
        return frozenset()
    return frozenset(info.read_text().split("\n\n", 1)[0].lower().split())


def is_plain(module: nn.Module) -> bool:
    """Untouched by anyone: no forward of its own, no hooks."""
    return "forward" not in module.__dict__ and not module._forward_hooks and not module._forward_pre_hooks


def is_linear(module: object) -> TypeGuard[nn.Linear]:
    """Exactly nn.Linear (a subclass may compute something else), with a weight that the kernels can read."""
    if type(module) is not nn.Linear or not is_plain(module):
        return False
    weight = module.weight
    return (
        weight.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.dtype in DTYPES
        and weight.stride(1) == 1
        and weight.shape[1] % 32 == 0
    )


def ready(x: Tensor, weight: Tensor, rows: int) -> bool:
    """Whether a call is one that the kernels are made for."""
    return (
        torch.is_inference_mode_enabled()
        and x.dtype == weight.dtype
        and x.numel() <= rows * x.shape[-1]
        and x.dim() > 1
        and x.is_contiguous()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """An RMS norm and where it rounds; called with x [..., width]."""

    module: nn.Module
    width: int
    epsilon: float
    style: int
    op: Callable[..., Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.op(x, self.module.weight, self.epsilon, self.style)


def find_norm(module: nn.Module, ops: NativeOps) -> Norm | None:
    """The norm that `module` computes, if it is an RMS norm with a weight and nothing else."""
    weight, parameters = getattr(module, "weight", None), list(module.parameters())
    epsilon = next(
        (e for e in (getattr(module, name, None) for name in ("variance_epsilon", "eps")) if isinstance(e, float)), None
    )
    if not isinstance(weight, Tensor) or weight.dim() != 1 or len(parameters) != 1 or list(module.children()):
        return None
    if epsilon is None or not is_plain(module) or weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return None
    # A weight of its own for the probe: under ones, as many models begin with, all styles are the same.
    other = torch.linspace(-1.5, 2.5, len(weight)).to(weight.dtype)

    def own(x: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": other}, (x,))

    tolerance = 8.0 if weight.dtype == torch.float32 else 0.5  # what sums in another order may do; less than a wrong style does
    for style in range(3):
        found = Norm(module=module, width=len(weight), epsilon=epsilon, style=style, op=ops.rms_norm)
        if agree(own, lambda x, style=style: ops.rms_norm(x, other, epsilon, style), len(weight), weight.dtype, tolerance):
            return found
    return None


def find_gelu(activation: object) -> bool | None:
    """False: it computes SiLU; True: the tanh form of GELU; None: something else."""
    if not callable(activation) or isinstance(activation, type):
        return None
    grid = torch.linspace(-9, 9, 64)
    try:
        values = activation(grid)
    except Exception:  # takes something else than one tensor
        return None
    known = {False: functional.silu(grid), True: functional.gelu(grid, approximate="tanh")}
    close = [isinstance(values, Tensor) and torch.allclose(values, expected, atol=1e-6) for expected in known.values()]
    return next((gelu for gelu, fits in zip(known, close, strict=True) if fits), None)


def agree(
    own: Callable[[Tensor], object], native: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype, tolerance: float
) -> bool:
    """Whether two forwards give the same on a probe, as `same` has it."""
    draw = torch.Generator().manual_seed(0)
    probe = torch.randn((1, _PROBE_ROWS, width), generator=draw).to(dtype) * 2
    try:
        return same(own(probe), native(probe), tolerance)
    except Exception:  # a module that takes other arguments, or shapes the kernel refuses: not one of ours
        return False


def same(expected: object, got: Tensor, tolerance: float) -> bool:
    """Same shape and dtype, some number not zero, and apart by `tolerance` units in the last place of the greatest at most."""
    if not isinstance(expected, Tensor) or expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    greatest = float(expected.abs().max())
    return (
        greatest > 0 and float((expected.float() - got.float()).abs().max()) <= tolerance * torch.finfo(got.dtype).eps * greatest
    )
