"""Compiled calls and the profiled step, as far as a CPU goes: torch.compile with a backend that compiles nothing."""

from __future__ import annotations

import pytest
import torch

from cb_ray.config import ContinuousBatchingConfig
from cb_ray.engine.profile import profiled
from cb_ray.engine.ways import Running, Way, find_way
from cb_ray.runtime.inputs import Padded
from cb_ray.runtime.kv_cache import KVCache
from cb_ray.runtime.packed_forward import PackedForward
from cb_ray.runtime.trial import trial_error, trial_layout
from tests import tiny

EAGER = (("backend", "eager"), ("dynamic", True))


@pytest.fixture
def way() -> tuple[object, Way]:
    model = tiny.make_model("qwen3", num_hidden_layers=1)
    return model, find_way(model, 16, "sdpa")


def test_compiled_calls_give_the_models_logits(way: tuple[object, Way]) -> None:
    """Both calls are traced, attention and what a step is stay outside: later steps are not the first one's."""
    model, found = way
    layout = trial_layout(found.layers, 16, 4)
    cache = KVCache(layout, dtype=torch.float32, device=torch.device("cpu"))
    running = Running(varlen_compile=EAGER, decode_compile=EAGER, largest=Padded(32, 4, 4, 2))
    forward = found.make(cache, running=running)
    assert isinstance(forward, PackedForward)
    assert forward._calls.rehearsals() == [Padded(32, 1, 1, 2), Padded(4, 4, 4, 1)]
    try:
        forward.install()
        with torch.inference_mode():
            forward.warmup(False)
        forward.restore()
        assert trial_error(model, forward, layout, found.vocab_size, 512) < 1e-3
    finally:
        forward.close()
        torch._dynamo.reset()


class _Meter:
    """Memory for 600 tokens; each step of fewer says what it took."""

    def __init__(self, peaks: list[int]) -> None:
        self.peaks = peaks
        self.released = 0

    def begin(self) -> None: ...

    def peak(self) -> int:
        value = self.peaks.pop(0)
        if value < 0:
            raise torch.OutOfMemoryError("no")
        return value

    def release(self) -> None:
        self.released += 1


def test_a_step_is_measured_at_the_largest_size_that_fits(way: tuple[object, Way]) -> None:
    """Twice too large, then 250 tokens that take 500,000 bytes: 2,000 bytes a token, and a twentieth to spare."""
    model, found = way
    meter = _Meter([-1, 500_000])
    wish = ContinuousBatchingConfig(max_batch_tokens=500, page_size=16)
    assert profiled(model, found, wish, meter) == 2_101
    assert meter.released == 2 and not meter.peaks
    with pytest.raises(torch.OutOfMemoryError):
        profiled(model, found, ContinuousBatchingConfig(max_batch_tokens=64, page_size=16), _Meter([-1]))
