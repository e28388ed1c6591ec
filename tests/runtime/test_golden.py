"""Greedy tokens are those of `model.generate`, prompt by prompt, whatever batching does to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cb_ray.errors import UnsupportedModelError

from .driving import generate, random_prompts, run

FAMILIES = ["llama", "qwen3", "mistral", "mistral_sliding", "gemma2", "gpt2"]
SMALL = {"page_size": 4, "max_batch_tokens": 16}
REAL_PROMPTS = [
    "What is the capital of France?",
    "The quick brown fox jumps over",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a land far away, there lived",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at a temperature of",
    "Dear Sir or Madam, I am writing to complain about",
    "Die Hauptstadt von Deutschland ist",
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["cpu", "sdpa", "eager"])
def test_chunks_prefixes_and_preemption_change_nothing(tiny_model, family, backend) -> None:
    """fp32: chunked prefill, shared prefixes and a cache so small that requests are sent back; all backends."""
    model = tiny_model(family)
    prompts = random_prompts([1, 5, 17, 33, 40])
    prompts += [prompts[3][:20] + [7, 8, 9], prompts[4][:32]]
    if family == "gemma2" and backend == "sdpa":
        with pytest.raises(UnsupportedModelError, match="caps its attention logits"):
            run(model, prompts, 8, backend=backend, num_blocks=14, **SMALL)
        return
    outputs, stats = run(model, prompts, 12, backend=backend, num_blocks=15, safety_margin=0.0, **SMALL)
    assert [list(output.token_ids) for output in outputs] == [generate(model, prompt, 12) for prompt in prompts]
    if family not in ("gemma2", "mistral_sliding"):
        assert stats.num_preemptions > 0 and stats.cached_tokens > 0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_parking_on_the_host_changes_nothing(tiny_model, family) -> None:
    """Requests whose pages went to host memory and came back go on as if nothing had been; on a CPU-only machine too."""
    model = tiny_model(family)
    prompts = random_prompts([9, 12, 20, 30], seed=1)
    outputs, stats = run(
        model, prompts, 16, num_blocks=16, safety_margin=0.0, cpu_offload_space=0.01, allow_block_sharing=False, **SMALL
    )
    assert stats.num_preemptions > 0
    assert [list(output.token_ids) for output in outputs] == [generate(model, prompt, 16) for prompt in prompts]


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "gemma2"])
def test_a_prefix_is_found_again_in_every_kind_of_layer(tiny_model, family) -> None:
    """Prefix caching serves full, sliding and hybrid models: what is matched is not computed, and the answer is the same."""
    model = tiny_model(family)
    (prompt,) = random_prompts([50], seed=2)
    prompts = [prompt, prompt[:48] + [5, 6], prompt + [9]]
    outputs, stats = run(model, prompts, 6, num_blocks=64, page_size=4, max_batch_tokens=64)
    assert [list(output.token_ids) for output in outputs] == [generate(model, p, 6) for p in prompts]
    assert stats.cached_tokens >= 96


def test_a_model_without_the_interface_runs_row_by_row() -> None:
    """ALiBi (bloom) does not go through the attention interface: it is served with its own cache, preempted and chunked alike."""
    from transformers import AutoModelForCausalLM, BloomConfig

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=320, hidden_size=64, n_layer=2, n_head=4, pad_token_id=0, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config).eval()
    prompts = random_prompts([1, 7, 30, 18], seed=3)
    outputs, _ = run(model, prompts, 8, num_blocks=12, safety_margin=0.0, **SMALL)
    assert [list(output.token_ids) for output in outputs] == [generate(model, prompt, 8) for prompt in prompts]


def test_recurrent_states_are_kept_per_request() -> None:
    """Mamba's layers keep a state instead of keys: requests do not see each other's, and a restart begins from nothing."""
    from transformers import AutoModelForCausalLM, MambaConfig

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=8, pad_token_id=0, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config).eval()
    prompts = random_prompts([3, 21, 9], seed=4)
    outputs, _ = run(model, prompts, 6, **SMALL)
    assert [list(output.token_ids) for output in outputs] == [generate(model, prompt, 6) for prompt in prompts]


def test_a_model_that_no_way_serves_is_refused_and_left_alone(tiny_model) -> None:
    """A model whose answer depends on its neighbours in time is refused by name, with its attention as it was."""
    model = tiny_model("llama")
    forward, calls = model.forward, []

    def drifting(*args, **kwargs):
        calls.append(1)
        outputs = forward(*args, **kwargs)
        outputs.logits = outputs.logits + torch.randn_like(outputs.logits) * outputs.logits.std()
        return outputs

    model.forward = drifting
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM is not supported.*standard deviations"):
        run(model, [[1, 2, 3]], 2)
    assert model.config._attn_implementation == before and calls


@pytest.mark.real
def test_the_real_model_on_real_prompts(smollm2: Path) -> None:
    """SmolLM2-135M in fp32: eight prompts at once, tiny pages and chunks, little memory: the tokens of `generate`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prompts = [tokenizer.encode(text) for text in REAL_PROMPTS]
    prompts[1] = prompts[0] + prompts[1]
    outputs, stats = run(model, prompts, 16, num_blocks=18, safety_margin=0.0, **SMALL)
    assert stats.num_preemptions > 0
    assert [list(output.token_ids) for output in outputs] == [generate(model, prompt, 16) for prompt in prompts]
