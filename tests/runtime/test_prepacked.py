"""Packed weights: the same answers in inference mode, the model's own weights everywhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cb_ray.runtime.prepacked import PrepackedLinears, has_packed_layouts


@pytest.fixture
def model() -> nn.Sequential:
    if not has_packed_layouts(torch.bfloat16):
        pytest.skip("this machine's matrix kernels have no packed layout for bfloat16")
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 32, bias=False)).to(torch.bfloat16)


def test_packed_layers_answer_as_before_and_follow_new_weights(model) -> None:
    """In inference mode the packed copy is used; after `refresh` it is a copy of the weights as they are now."""
    x = torch.randn(5, 48, dtype=torch.bfloat16)
    linears = PrepackedLinears(model)
    assert PrepackedLinears.bytes_needed(model) == 2 * (48 * 96 + 96 * 32)
    for _ in range(2):
        with torch.no_grad():
            plain = model(x)
        linears.refresh()
        with torch.inference_mode():
            torch.testing.assert_close(model(x), plain, atol=0.05, rtol=0.05)
        linears.release()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.neg_()


def test_training_uses_the_models_own_weights(model) -> None:
    """Outside inference mode gradients flow to the weights; released modules have nothing of ours left."""
    linears = PrepackedLinears(model)
    linears.refresh()
    model(torch.randn(5, 48, dtype=torch.bfloat16)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    linears.release()
    linears.release()
    assert all("forward" not in module.__dict__ for module in model)


def test_only_plain_linears_are_packed() -> None:
    """A subclass, a hooked module and a float32 one are left alone: they may compute something else, or need exactness."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    hooked = nn.Linear(8, 8, dtype=torch.bfloat16)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleList([Scaled(8, 8, dtype=torch.bfloat16), hooked, nn.Linear(8, 8)])
    assert PrepackedLinears.bytes_needed(model) == 0
