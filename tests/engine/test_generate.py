"""transformers' entry points on a real, tiny model: the same tokens as `model.generate`, and the model left as it was found."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

import cb_ray
from cb_ray.config import ContinuousBatchingConfig
from cb_ray.engine.build import build
from cb_ray.engine.generate import (
    attach,
    continuous_batching_context_manager,
    destroy_cached_continuous_batching_manager,
    generate_batch,
    init_continuous_batching,
)
from cb_ray.engine.manager import CACHED_MANAGER
from cb_ray.engine.ways import find_way
from cb_ray.errors import ConfigError, UnsupportedModelError
from cb_ray.messages import GenerationOutput, RequestStatus
from tests.engine.fakes import PATIENCE, Background
from tests.tiny import break_token, make_model

SMALL: dict[str, Any] = {"page_size": 8, "num_blocks": 96, "max_batch_tokens": 64}
PROMPTS = [[5, 6, 7, 8], [9], list(range(20, 50)), [11, 12]]


def greedy(count: int | None = 6, **settings: Any) -> GenerationConfig:
    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def alone(model: Any, prompt: list[int], config: GenerationConfig) -> list[int]:
    """What transformers generates from one prompt."""
    config = copy.deepcopy(config)
    config.eos_token_id = None if config.eos_token_id == -1 else config.eos_token_id
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :].tolist()


def plain_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPTS[2]]), use_cache=False).logits


@contextmanager
def at_first_layer(model: Any, hook: Any) -> Iterator[None]:
    """Call `hook` whenever another thread than this one runs the model's first layer."""
    me = threading.get_ident()
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: None if threading.get_ident() == me else hook())
    try:
        yield
    finally:
        handle.remove()


def test_a_batch_is_what_each_prompt_gets_alone() -> None:
    """In input order, under req_0 …, with prompts, whatever the company."""
    model = make_model("llama")
    outputs = generate_batch(model, PROMPTS, greedy(), SMALL)
    assert list(outputs) == [f"req_{i}" for i in range(4)]
    for prompt, output in zip(PROMPTS, outputs.values(), strict=True):
        assert (output.prompt_ids, output.generated_tokens) == (prompt, alone(model, prompt, greedy()))
    assert generate_batch(model, []) == {}


@pytest.mark.parametrize("kind", [tuple, torch.tensor, np.array], ids=["tuple", "tensor", "array"])
def test_prompts_may_be_any_sequence_of_ids(kind: Any) -> None:
    """Tuples, 1-D tensors, arrays (tensors used to give an empty result)."""
    model = make_model("llama")
    outputs = generate_batch(model, [kind(prompt) for prompt in PROMPTS[:2]], greedy(), SMALL)
    assert [output.prompt_ids for output in outputs.values()] == PROMPTS[:2]
    assert all(output.status == RequestStatus.FINISHED for output in outputs.values())


def test_children_come_before_their_parent() -> None:
    """num_return_sequences: each id is preceded by its children; greedy ones are equal."""
    model = make_model("llama")
    outputs = generate_batch(model, PROMPTS[:2], greedy(num_return_sequences=3), SMALL)
    assert list(outputs) == [f"req_{i}{suffix}" for i in range(2) for suffix in ("__child#0", "__child#1", "")]
    assert len({tuple(output.generated_tokens) for output in list(outputs.values())[:3]}) == 1


def test_keywords_are_settings_of_this_call() -> None:
    """max_new_tokens, eos_token_id and any other; None leaves a setting alone; unknown ones are a TypeError with a hint."""
    model = make_model("llama")
    config = greedy(3)
    longer = alone(model, PROMPTS[0], greedy(8))
    assert generate_batch(model, PROMPTS[:1], config, SMALL, max_new_tokens=8)["req_0"].generated_tokens == longer
    assert len(generate_batch(model, PROMPTS[:1], config, SMALL, max_new_tokens=None)["req_0"].generated_tokens) == 3
    ended = generate_batch(model, PROMPTS[:1], greedy(8), SMALL, eos_token_id=longer[2])["req_0"]
    assert (ended.generated_tokens, ended.finish_reason) == (longer[: longer.index(longer[2]) + 1], "stop")
    with pytest.raises(TypeError, match="did you mean 'max_new_tokens'"):
        generate_batch(model, PROMPTS[:1], config, SMALL, max_new_toekns=3)
    assert (config.max_new_tokens, config.eos_token_id) == (3, -1)


def test_one_bad_prompt_fails_alone() -> None:
    """It is FAILED in the result with its error and what can be shown of it; the others finish in their places."""
    model = make_model("llama")
    bad: list[Any] = [[], [320], [-1, 5], list(range(5, 305)) * 3, ["a", "b"], None, [5.5]]
    outputs = list(generate_batch(model, [PROMPTS[0], *bad, PROMPTS[1]], greedy(), SMALL).values())
    assert [output.request_id for output in outputs] == [f"req_{i}" for i in range(9)]
    for output in outputs[1:-1]:
        assert output.status == RequestStatus.FAILED and output.error and not output.generated_tokens
    assert outputs[2].prompt_ids == [320] and outputs[5].prompt_ids == []
    for output, prompt in ((outputs[0], PROMPTS[0]), (outputs[-1], PROMPTS[1])):
        assert output.generated_tokens == alone(model, prompt, greedy())


@pytest.mark.parametrize("use_async", [False, True])
def test_a_prompt_that_the_model_breaks_on_fails_alone(use_async: bool) -> None:
    """NaN in one token's embedding: its prompt's `error` names the cause, the others' tokens are generate's, the engine goes on."""
    model = make_model("llama")
    want = {index: alone(model, prompt, greedy()) for index, prompt in enumerate(PROMPTS)}
    break_token(model, 319)
    assert not any(319 in tokens for tokens in want.values()), "the test's token must not be one that the model says"
    with continuous_batching_context_manager(model, greedy(), {**SMALL, "use_async_batching": use_async}) as manager:
        for _ in range(2):
            names = [str(name) for name in manager.add_requests([*PROMPTS, [5, 319, 6], [319]])]
            outputs = [manager.get_result(name, timeout=PATIENCE) for name in names]
            for index, output in enumerate(outputs):
                assert output is not None
                if index < len(PROMPTS):
                    assert output.generated_tokens == want[index] and output.error is None
                else:
                    assert output.status == RequestStatus.FAILED and not output.generated_tokens
                    assert "no finite logits" in str(output.error)


def test_a_batch_larger_than_the_line_is_served() -> None:
    """max_queue_size bounds callers who can come back, not a batch that is in memory already."""
    config = {**SMALL, "max_queue_size": 2, "max_requests_per_batch": 1}
    assert len(generate_batch(make_model("llama"), PROMPTS, greedy(), config)) == 4


def test_the_progress_bar_counts_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr, to the end, failed ones and children included; none unless asked for."""
    for shown in (True, False):
        screen = io.StringIO()
        monkeypatch.setattr(sys, "stderr", screen)
        generate_batch(make_model("llama"), [[1, 2], [], [3]], greedy(2, num_return_sequences=2), SMALL, progress_bar=shown)
        assert ("6/6" in screen.getvalue()) == shown


def test_a_broken_forward_pass_ends_the_call(caplog: pytest.LogCaptureFixture) -> None:
    """Every request is FAILED with the cause; the next call works."""
    model = make_model("llama")
    calls = iter(range(1000))

    def break_down() -> None:
        if next(calls) == 2:
            raise RuntimeError("injected failure 4711")

    with at_first_layer(model, break_down):
        outputs = generate_batch(model, PROMPTS, greedy(), SMALL)
    assert all("4711" in str(output.error) and output.status == RequestStatus.FAILED for output in outputs.values())
    assert "4711" in caplog.text
    assert generate_batch(model, PROMPTS[:1], greedy(), SMALL)["req_0"].generated_tokens == alone(model, PROMPTS[0], greedy())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_is_left_as_it_was_found(attention: str) -> None:
    """Attention, logits, mode and gradients; also after an engine under inference mode."""
    model = make_model("llama")
    model.set_attn_implementation(attention)
    before = plain_logits(model)
    with torch.inference_mode():
        generate_batch(model, PROMPTS, greedy(), SMALL)
    assert model.config._attn_implementation == attention
    assert torch.allclose(plain_logits(model), before, atol=1e-6)
    model(input_ids=torch.tensor([PROMPTS[2]]), labels=torch.tensor([PROMPTS[2]])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert len({thread for thread in threading.enumerate() if "cb-ray" in thread.name}) == 0


def test_a_model_that_is_refused_is_left_as_it_was_found() -> None:
    """Attention, mode and logits; the reason is in the error."""
    model = make_model("llama")
    model.set_attn_implementation("eager")
    before = plain_logits(model)
    model.train()
    with pytest.raises(UnsupportedModelError, match="no attention backend called 'nowhere'"):
        build(model, greedy(), ContinuousBatchingConfig.of(SMALL), backend="nowhere")
    assert model.training and model.config._attn_implementation == "eager"
    model.eval()
    assert torch.allclose(plain_logits(model), before, atol=1e-6)


def test_a_model_in_training_is_served_without_dropout_and_trains_on() -> None:
    """Between steps and in a pause its owner may set it to training; the engine computes in eval mode and puts that back."""
    model = make_model("llama", attention_dropout=0.5)
    wanted = alone(model, PROMPTS[0], greedy())
    model.train()
    model.lm_head.eval()
    assert generate_batch(model, PROMPTS[:1], greedy(), SMALL)["req_0"].generated_tokens == wanted
    assert model.training and model.model.layers[0].self_attn.training and not model.lm_head.training
    model.eval()
    manager = init_continuous_batching(model, greedy(), SMALL)
    manager.start()
    with manager.pause():
        model.train()
    name = manager.add_request(PROMPTS[0])
    output = manager.get_result(name, timeout=PATIENCE)
    assert output is not None and output.generated_tokens == wanted
    manager.destroy()
    assert model.training


def test_a_restart_does_not_try_the_model_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of running it was found at the first build; what comes later is sized and allocated anew, no more. A model that
    somebody changed is tried again, and a copy is a model of its own.
    """
    model, tried = make_model("llama"), []
    monkeypatch.setattr("cb_ray.engine.build.find_way", lambda *args: tried.append(1) or find_way(*args))
    manager = init_continuous_batching(model, greedy(), SMALL)
    for _ in range(3):
        manager.start()
        output = manager.get_result(manager.add_request(PROMPTS[0]), timeout=PATIENCE)
        assert output is not None and output.generated_tokens == alone(model, PROMPTS[0], greedy())
        manager.stop()
    manager.destroy()
    again = init_continuous_batching(model, greedy(), SMALL)
    again.start()
    again.destroy()
    assert len(tried) == 1
    pickle.dumps(model)
    model.lm_head.register_forward_hook(lambda *_: None)
    other = copy.deepcopy(model)
    for changed, tries in ((model, 2), (model, 2), (other, 3)):
        init_continuous_batching(changed, greedy(), SMALL).destroy()
        assert len(tried) == tries


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_threads_use_the_model_while_it_serves(attention: str) -> None:
    """The switch is the engine thread's alone: a plain forward, a copy and a pickle of the config in between are ordinary."""
    model = make_model("llama")
    model.set_attn_implementation(attention)
    before = plain_logits(model)
    inside, leave = threading.Event(), threading.Event()

    def stand() -> None:
        inside.set()
        assert leave.wait(PATIENCE)

    manager = init_continuous_batching(model, greedy(), SMALL)
    with at_first_layer(model, stand):
        manager.start()
        name = manager.add_request(PROMPTS[0])
        assert inside.wait(PATIENCE)
        assert torch.allclose(plain_logits(model), before, atol=1e-6)
        assert model.config._attn_implementation == attention
        for twin in (copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config))):
            assert type(twin) is LlamaConfig and twin.to_dict() == model.config.to_dict()
        leave.set()
        output = manager.get_result(name, timeout=PATIENCE)
        manager.destroy()
    assert output is not None and output.generated_tokens == alone(model, PROMPTS[0], greedy())


def test_the_context_manager_stops_whatever_happens() -> None:
    """After the block, and when the block raises, the engine has ended."""
    model = make_model("llama")
    with continuous_batching_context_manager(model, greedy(), continuous_batching_config=SMALL) as manager:
        assert manager.is_running()
        name = manager.add_request(PROMPTS[0])
    assert not manager.is_running()
    output = manager.get_result(name)
    assert output is not None and output.status == RequestStatus.FINISHED
    seen: list[Any] = []

    def fail_inside() -> None:
        with continuous_batching_context_manager(model, greedy(), continuous_batching_config=SMALL) as other:
            seen.append(other)
            other.add_request(PROMPTS[0], max_new_tokens=400)
            raise KeyError("from the body")

    with pytest.raises(KeyError):
        fail_inside()
    assert not seen[0].is_running() and seen[0] is not manager


def test_a_persistent_manager_goes_on_and_compares_settings() -> None:
    """Ids and cache go on with equal settings; other settings make another engine (they used to be ignored)."""
    model = make_model("llama")
    prompt = list(range(40, 57))

    def call(config: GenerationConfig, **engine: Any) -> GenerationOutput:
        outputs = generate_batch(model, [prompt], config, {**SMALL, **engine}, persistent_manager=True)
        return next(iter(outputs.values()))

    first, second = call(greedy(8)), call(greedy(8))
    assert (first.request_id, second.request_id) == ("req_0", "req_1")
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    stop = first.generated_tokens[2]
    assert call(greedy(8, eos_token_id=stop)).finish_reason == "stop"
    kept = getattr(model, CACHED_MANAGER)
    call(greedy(8, eos_token_id=stop), page_size=16)
    assert getattr(model, CACHED_MANAGER) is not kept
    assert init_continuous_batching(model) is getattr(model, CACHED_MANAGER), "settings that are not given do not count"
    destroy_cached_continuous_batching_manager(model)
    destroy_cached_continuous_batching_manager(model)
    assert not hasattr(model, CACHED_MANAGER)


def test_attach_binds_the_methods_to_the_model() -> None:
    """Code written for transformers runs on this engine; attaching twice is attaching once."""
    model = attach(attach(make_model("llama")))
    outputs = model.generate_batch(PROMPTS[:1], greedy(), SMALL)
    assert isinstance(outputs["req_0"], GenerationOutput)
    assert isinstance(model.init_continuous_batching(greedy(), SMALL), cb_ray.ContinuousBatchingManager)


def test_what_is_missing_is_said() -> None:
    """No model is an AttributeError, no generation config a ValueError; the model's own config is used where none is given."""
    with pytest.raises(AttributeError, match="config"):
        init_continuous_batching(object(), greedy())
    model = make_model("llama")
    model.generation_config = greedy(3)
    assert len(generate_batch(model, [[1]], continuous_batching_config=SMALL)["req_0"].generated_tokens) == 3
    model.generation_config = None  # type: ignore[assignment]
    with pytest.raises(ConfigError):
        init_continuous_batching(model, continuous_batching_config=SMALL)


def test_a_config_inside_the_generation_config_is_still_read(caplog: pytest.LogCaptureFixture) -> None:
    """The deprecated way works, and warns."""
    model = make_model("llama")
    generation = greedy(3, continuous_batching_config={"page_size": 2})
    with pytest.raises(ConfigError, match="page_size"):
        generate_batch(model, [[1]], generation)
    assert "continuous_batching_config" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.8},
        {"sequence_bias": {(5, 6): 4.0, (7,): -2.0}},
        {"suppress_tokens": list(range(100, 200))},
        {"bad_words_ids": [[3], [50, 51]]},
        {"min_new_tokens": 5, "eos_token_id": list(range(160))},
        {"min_length": 15, "eos_token_id": list(range(160))},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_processors_do_what_generate_does(settings: dict[str, Any]) -> None:
    """History and all, side by side (history-dependent ones used to see one token)."""
    model = make_model("llama")
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 9], [30, 31, 32] * 4]
    config = greedy(12, **settings)
    outputs = generate_batch(model, prompts, config, SMALL)
    wanted = [alone(model, prompt, config) for prompt in prompts]
    assert [output.generated_tokens for output in outputs.values()] == wanted


def test_late_processors_cut_what_transformers_would_cut() -> None:
    """epsilon_cutoff after the temperature: sampled tokens and their logprobs are those that transformers' processors leave."""
    model = make_model("llama")
    config = GenerationConfig(max_new_tokens=10, do_sample=True, temperature=1.5, epsilon_cutoff=0.01, eos_token_id=-1)
    outputs = generate_batch(model, [PROMPTS[0]] * 20, config, {**SMALL, "seed": 1, "return_logprobs": True})
    processors = model._get_logits_processor(config, input_ids_seq_length=1)
    for output in outputs.values():
        ids = torch.tensor([output.prompt_ids + output.generated_tokens])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0]
        for i, (token, logprob) in enumerate(zip(output.generated_tokens, output.logprobs, strict=True)):
            at = len(output.prompt_ids) - 1 + i
            scores = processors(ids[:, : at + 1], logits[None, at].clone()).log_softmax(-1)[0]  # type: ignore[arg-type]
            assert abs(float(scores[token]) - logprob) < 1e-3
    assert len({tuple(output.generated_tokens) for output in outputs.values()}) > 1


def test_a_caller_in_another_thread_is_served_as_well() -> None:
    """generate_batch may be called from any thread."""
    model = make_model("llama")
    outputs = Background(lambda: generate_batch(model, PROMPTS[:1], greedy(), SMALL)).value()
    assert outputs["req_0"].generated_tokens == alone(model, PROMPTS[0], greedy())
