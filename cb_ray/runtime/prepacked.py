"""Linear layers on a CPU with their weights in the layout that the matrix kernels want. Owns the packed copies.

Knows linear modules and nothing of what they compute for. The plain layout is repacked by the kernel at every call, which for the few
rows of a decode step costs as much as the product itself; a packed copy costs the memory of the weights once more. The model's own
weights stay as they are: a call outside inference mode (training, a plain forward pass by the model's owner) uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

_ROWS = 64  # the number of rows that the layout is chosen for
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Packed:
    module: nn.Linear
    weight: torch.Tensor | None = None


class PrepackedLinears:
    """The linear layers of one model. `refresh` after the weights have changed; `release` gives the modules back."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [_Packed(module) for module in _packable(model)]

    @staticmethod
    def bytes_needed(model: nn.Module) -> int:
        """Memory of the packed copies."""
        return sum(module.weight.numel() * module.weight.element_size() for module in _packable(model))

    def refresh(self) -> None:
        """Pack the weights as they are now, and let the modules use them."""
        with torch.inference_mode():
            for layer in self._layers:
                layer.weight = torch.ops.mkldnn._reorder_linear_weight(layer.module.weight.detach(), _ROWS)
                layer.module.__dict__["forward"] = _forward(layer)

    def release(self) -> None:
        """The modules compute as before; the copies are gone. Idempotent."""
        for layer in self._layers:
            layer.module.__dict__.pop("forward", None)
            layer.weight = None


def _packable(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear) and _can_pack(module)]


def _can_pack(module: nn.Linear) -> bool:
    """Exactly `nn.Linear` (a subclass may compute something else), untouched by anyone, on a CPU whose kernels have packed layouts."""
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and module.weight.device.type == "cpu"
        and module.weight.dtype in _DTYPES
        and module.weight.layout == torch.strided
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and has_packed_layouts(module.weight.dtype)
    )


def has_packed_layouts(dtype: torch.dtype) -> bool:
    """Whether this machine's matrix kernels take weights of `dtype` in a layout of their own."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    check = torch.ops.mkldnn._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else torch.ops.mkldnn._is_mkldnn_fp16_supported
    return bool(check())


def _forward(layer: _Packed) -> Callable[[torch.Tensor], torch.Tensor]:
    linear = torch.ops.mkldnn._linear_pointwise.default
    module = layer.module

    def forward(input: torch.Tensor) -> torch.Tensor:
        weight = layer.weight
        if weight is None or not torch.is_inference_mode_enabled():
            return functional.linear(input, module.weight, module.bias)
        return linear(input, weight, module.bias, "none", [], "")

    return forward
