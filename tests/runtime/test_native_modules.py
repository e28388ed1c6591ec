"""Native kernels under a model's own modules: what is taken, what is left alone, and that no answer changes."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cb_ray.messages import SamplingParams
from cb_ray.runtime.native import NativeOps, Unavailable, decoder_layer, load
from cb_ray.runtime.native.modules import NativeModules

from .driving import random_prompts, run


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    loaded = load()
    if isinstance(loaded, Unavailable):
        pytest.skip(f"no native kernels: {loaded.reason}")
    return loaded


def logits(model: nn.Module, rows: int = 23) -> Tensor:
    ids = torch.randint(4, 300, (1, rows), generator=torch.Generator().manual_seed(rows))
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits[0]


@contextlib.contextmanager
def exchanged(modules: NativeModules) -> Iterator[None]:
    modules.refresh()
    try:
        yield
    finally:
        modules.release()


def kinds(modules: NativeModules) -> Counter[str]:
    return Counter(type(module).__name__.removesuffix("RMSNorm") for module in modules.modules)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "mistral_sliding", "gemma2", "gpt2"])
def test_a_model_says_the_same_on_native_modules(
    ops: NativeOps, tiny_model: Callable[..., PreTrainedModel], family: str, dtype: torch.dtype
) -> None:
    """Logits are those of the model's own code up to rounding; afterwards the modules are as they were."""
    model = tiny_model(family).to(dtype)
    expected, before = logits(model), {id(module): dict(module.__dict__) for module in model.modules()}
    modules = NativeModules(model, ops)
    assert {id(module): dict(module.__dict__) for module in model.modules()} == before
    threads = torch.get_num_threads()
    modules.refresh()
    modules.refresh()
    got = logits(model)
    modules.release()
    modules.release()
    assert torch.get_num_threads() == threads and ops.own_threads(0) == 0
    assert {id(module): dict(module.__dict__) for module in model.modules()} == before
    assert torch.equal(logits(model), expected)
    spread = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype] * float(expected.float().std())
    torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=spread)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"LlamaDecoderLayer": 2, "LlamaMLP": 2, "Llama": 5, "Linear": 15}),
        ("qwen3", {"Qwen3DecoderLayer": 2, "Qwen3MLP": 2, "Qwen3": 9, "Linear": 15}),
        ("mistral_sliding", {"MistralDecoderLayer": 2, "MistralMLP": 2, "Mistral": 5, "Linear": 15}),
        ("gemma2", {"Gemma2MLP": 2, "Gemma2": 9, "Linear": 15}),
        ("gpt2", {"Linear": 1}),
    ],
)
def test_parts_are_told_by_what_they_compute(
    ops: NativeOps, tiny_model: Callable[..., PreTrainedModel], family: str, expected: dict[str, int]
) -> None:
    """Whole layers where they have the common shape, else their parts; gpt2's layers have other parts and stay."""
    assert kinds(NativeModules(tiny_model(family), ops)) == expected


def test_changed_weights_are_used_at_once(ops: NativeOps, tiny_model: Callable[..., PreTrainedModel]) -> None:
    """Nothing is copied: a weight update, in place or by new parameters, needs no refresh."""
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    modules = NativeModules(model, ops)
    with exchanged(modules):
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(logits(model), logits(other), rtol=0, atol=1e-3)
        model.load_state_dict({name: value.clone() for name, value in tiny_model("llama").state_dict().items()}, assign=True)
        torch.testing.assert_close(logits(model), logits(tiny_model("llama")), rtol=0, atol=1e-3)


def test_outside_inference_mode_a_model_is_its_owners(ops: NativeOps, tiny_model: Callable[..., PreTrainedModel]) -> None:
    """Gradients flow, and a cache works, through the modules' own forwards while the native ones are in place."""
    model = tiny_model("llama")
    ids = torch.arange(5, 14)[None]
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # its name until 5.40
    expected = model(input_ids=ids, use_cache=True)
    modules = NativeModules(model, ops)
    with exchanged(modules):
        outputs = model(input_ids=ids, use_cache=True)
        torch.testing.assert_close(outputs.logits, expected.logits, rtol=0, atol=1e-5)
        assert outputs.past_key_values.get_seq_length() == 9
        outputs.logits.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        with torch.inference_mode():
            cached = model(input_ids=ids, use_cache=True).past_key_values
            assert cached.get_seq_length() == 9
            later = model(input_ids=ids[:, :1], **{cache: cached}).logits
        torch.testing.assert_close(later, model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:], rtol=0, atol=1e-3)


def test_a_module_that_somebody_touched_is_left_alone(ops: NativeOps, tiny_model: Callable[..., PreTrainedModel]) -> None:
    """Hooks and forwards of others keep being called; subclasses of Linear are not Linear."""
    model: Any = tiny_model("llama")
    calls: list[str] = []

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    layer = model.model.layers[0]
    layer.self_attn.o_proj.register_forward_hook(lambda *_: calls.append("hook"))
    old = layer.mlp.down_proj
    layer.mlp.down_proj = Doubled(old.in_features, old.out_features, bias=False)
    layer.mlp.down_proj.weight = old.weight
    expected = logits(model)
    modules = NativeModules(model, ops)
    assert kinds(modules) == {"LlamaDecoderLayer": 1, "LlamaMLP": 1, "Llama": 5, "Linear": 13}
    with exchanged(modules):
        calls.clear()
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-3)
        assert calls == ["hook"]


def test_a_layer_that_does_something_more_is_not_taken_for_a_common_one(
    ops: NativeOps, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    """Same parts, other arithmetic: the probe notices a scaled residual, a tensor given to attention, another activation."""
    model: Any = tiny_model("llama")
    base = type(model.model.layers[0])
    attention = type(model.model.layers[0].self_attn)

    class Scaled(base):
        def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
            return super().forward(hidden_states, *args, **given) * 1.1

    class WithSinks(attention):
        def forward(self, *args: Any, **given: Any) -> Any:
            return super().forward(*args, s_aux=torch.ones(4), **given)

    class Squared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.relu(x).square()

    other = copy.deepcopy(model)
    model.model.layers[0].__class__ = Scaled
    model.model.layers[1].self_attn.__class__ = WithSinks
    other.model.layers[0].mlp.act_fn = Squared()
    assert "LlamaMLP" in kinds(NativeModules(model, ops)) and not {"Scaled", base.__name__} & set(
        kinds(NativeModules(model, ops))
    )
    assert kinds(NativeModules(other, ops))[base.__name__] == 1 and kinds(NativeModules(other, ops))["LlamaMLP"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_sliding"])
def test_a_layer_in_one_call_is_what_seven_calls_give(
    ops: NativeOps,
    tiny_model: Callable[..., PreTrainedModel],
    family: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last bit, in chunks and steps, over pages that are shared; and the one call is what an engine uses."""
    model, prompts = tiny_model(family).to(dtype), random_prompts([1, 5, 17, 33])
    settings = {"page_size": 4, "max_batch_tokens": 16, "num_blocks": 64}
    calls: list[bool] = []
    found = decoder_layer._native_attention

    def counted(attention: Any) -> Any:
        calls.append(True)
        return found(attention)

    monkeypatch.setattr(decoder_layer, "_native_attention", counted)
    one, _ = run(model, prompts, 6, sampling=SamplingParams(do_sample=False, logprobs=3), **settings)
    assert calls
    monkeypatch.setattr(decoder_layer, "_native_attention", lambda _: None)
    seven, _ = run(model, prompts, 6, sampling=SamplingParams(do_sample=False, logprobs=3), **settings)
    assert [(c.token_ids, c.top_logprobs) for c in one] == [(c.token_ids, c.top_logprobs) for c in seven]


def test_more_rows_than_the_kernels_are_made_for_take_the_models_own_way(
    ops: NativeOps, tiny_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prefill falls back as a whole, and the linears before attention do not mix up their inputs."""
    monkeypatch.setattr("cb_ray.runtime.native.parts.most_rows", lambda *_: 8)
    monkeypatch.setattr("cb_ray.runtime.native.modules.most_rows", lambda *_: 8)
    monkeypatch.setattr("cb_ray.runtime.native.decoder_layer.most_rows", lambda *_: 8)
    model = tiny_model("gemma2")
    expected = [logits(model, rows) for rows in (5, 20, 5)]
    modules = NativeModules(model, ops)
    with exchanged(modules):
        for rows, wanted in zip((5, 20, 5), expected, strict=True):
            torch.testing.assert_close(logits(model, rows), wanted, rtol=0, atol=1e-3)
