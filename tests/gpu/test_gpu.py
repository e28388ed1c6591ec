"""The last inch: real kernels, real graphs, a real stream. `make gpu`; needs torch, transformers, triton and pytest, no Ray.

Low precision lets two right answers differ where logits are close, so a token is judged by the model itself: its plain forward pass
over the same text must give it the greatest logit, or one that is nearly that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cb_ray.bench import device as bench
from cb_ray.config import ContinuousBatchingConfig
from cb_ray.engine.build import build
from cb_ray.engine.manager import ContinuousBatchingManager
from cb_ray.errors import UnsupportedModelError
from cb_ray.runtime.flash_kernels import NAMES
from tests import tiny
from tests.runtime.driving import random_prompts, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
WIDER = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
SETTINGS: dict[str, Any] = dict(num_blocks=24, max_batch_tokens=256, max_requests_per_batch=16)
LENGTHS = [3, 300, 64, 17, 129, 5]


@pytest.fixture(autouse=True)
def give_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def model_of(family: str, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Any:
    return tiny.make_model(family, **(WIDER | fields)).to("cuda", dtype)


@torch.no_grad()
def check(model: Any, prompts: list[list[int]], outputs: list[list[int]], count: int) -> None:
    """Every token has the greatest logit but for rounding."""
    slack = 1e-3 if model.dtype == torch.float32 else 0.15
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert len(tokens) == count
        logits = model(torch.tensor([prompt + tokens[:-1]], device="cuda"), use_cache=False).logits[0, len(prompt) - 1 :].float()
        chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        worst = float(((logits.amax(dim=1) - chosen) / logits.std()).max())
        assert worst <= slack, f"a token is {worst:.3f} standard deviations below the greatest"


def tokens_of(
    model: Any, backend: str | None = None, count: int = 24, **settings: Any
) -> tuple[list[list[int]], list[list[int]], Any]:
    prompts = random_prompts(LENGTHS)
    chunks, stats = run(model, prompts, count, backend=backend, **(SETTINGS | settings))
    return prompts, [list(chunk.token_ids) for chunk in chunks], stats


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("family", ["qwen3", "mistral_sliding", "gemma2"])
@pytest.mark.parametrize("backend", [*NAMES, "sdpa"])
def test_parity(backend: str, family: str, graphs: bool) -> None:
    """Every backend that is here, windows and softcaps, with graphs of everything and without."""
    model = model_of(family)
    try:
        check(model, *tokens_of(model, backend, use_cuda_graph=graphs)[:2], 24)
    except UnsupportedModelError as error:
        pytest.skip(str(error))


def test_parity_in_full_precision() -> None:
    """float32 over sdpa: no rounding to hide behind."""
    model = model_of("qwen3", torch.float32)
    check(model, *tokens_of(model, "sdpa", page_size=16, num_blocks=200)[:2], 24)


def manager_tokens(model: Any, count: int, **settings: Any) -> tuple[list[list[int]], list[list[int]], Any]:
    prompts = random_prompts(LENGTHS)
    manager = ContinuousBatchingManager(model, model.generation_config, ContinuousBatchingConfig.of(SETTINGS | settings))
    manager.warmup()
    manager.start()
    try:
        names = manager.add_requests(prompts, max_new_tokens=count)
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=60)
            assert result is not None and result.error is None
            found[result.request_id] = result.generated_tokens
    finally:
        manager.stop(block=True, timeout=60)
    return prompts, [found[name] for name in names], manager.continuous_batching_config


@pytest.mark.parametrize("overlap", [False, True], ids=["one step", "two steps"])
def test_the_engine_thread_with_and_without_overlap(overlap: bool) -> None:
    """What is on by default here: graphs where a flash kernel is, a stream, two steps in flight."""
    model = model_of("qwen3")
    prompts, tokens, settled = manager_tokens(model, 40, use_async_batching=overlap)
    check(model, prompts, tokens, 40)
    assert settled.use_async_batching == overlap


def test_offload() -> None:
    """Parked in pinned memory and brought back, while steps run: the tokens of a cache that is large enough."""
    model = model_of("qwen3")
    prompts, tokens, stats = tokens_of(
        model, "sdpa", 60, page_size=16, num_blocks=40, cpu_offload_space=0.25, use_async_batching=False
    )
    assert stats.num_preemptions > 0
    check(model, prompts, tokens, 60)
    prompts, tokens, _ = manager_tokens(model, 60, num_blocks=3, cpu_offload_space=0.25)
    check(model, prompts, tokens, 60)


def test_compile_level() -> None:
    """Level 1 compiles both calls; attention stays outside."""
    model = model_of("llama")
    prompts, tokens, _ = tokens_of(model, default_compile_level=1, use_cuda_graph=False)
    check(model, prompts, tokens, 24)


def test_memory_is_what_was_promised() -> None:
    """The cache takes no more than the share asked for, and a full step fits beside it."""
    model = model_of("qwen3")
    free, _ = torch.cuda.mem_get_info()
    parts = build(model, model.generation_config, ContinuousBatchingConfig.of({"max_memory_percent": 0.2}))
    parts.runner.install()
    parts.runner.warmup()
    used = free - torch.cuda.mem_get_info()[0]
    parts.runner.close()
    assert used <= 0.25 * free
    assert parts.facts.cache_bytes > 0


def test_a_small_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of `cb-ray bench device` for one shape, as far as half a minute goes; its figures are printed, not judged."""
    assert bench.main(["--shapes", "0.6b", "--batches", "1", "32", "--context", "64", "--steps", "64"]) == 0
    shown = capsys.readouterr().out
    with capsys.disabled():
        print("\n" + shown)
    assert shown.count("0.6b") == 2
