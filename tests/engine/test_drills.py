"""Fault drills on a real, tiny model: whatever breaks, only the culprit pays, and what comes after is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from cb_ray.engine.build import build
from cb_ray.engine.generate import generate_batch, init_continuous_batching
from cb_ray.engine.manager import ContinuousBatchingManager
from cb_ray.messages import GenerateRequest, GenerationOutput, RequestStatus, SamplingParams
from tests.engine.fakes import PATIENCE
from tests.tiny import make_model

SMALL: dict[str, Any] = {"page_size": 4, "num_blocks": 32, "max_batch_tokens": 64}
POISON = 300  # a token whose embedding is not a number


def greedy(count: int = 6) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)


def alone(model: Any, prompt: list[int], count: int = 6) -> list[int]:
    ids = torch.tensor([prompt])
    config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :].tolist()


def result(manager: ContinuousBatchingManager, name: str) -> GenerationOutput:
    output = manager.get_result(name, timeout=PATIENCE)
    assert output is not None
    return output


@pytest.mark.parametrize("family", ["llama", "mistral_sliding"])
@pytest.mark.parametrize("backend", [None, "sdpa", "eager"])
def test_logits_that_are_no_numbers_cost_one_request(family: str, backend: str | None) -> None:
    """Its neighbours in the step are right, and so are those who get its pages afterwards, whatever it left in them."""
    model = make_model(family)
    good = [[5, 6, 7, 8, 9], [9, 10, 11]]
    wanted = [alone(model, prompt) for prompt in good]
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")  # type: ignore[index]
    manager = ContinuousBatchingManager(model, greedy(), SMALL, build=lambda m, g, c, h: build(m, g, c, h, backend=backend))
    names = manager.add_requests([good[0], [*range(20, 40), POISON, *range(40, 60)], good[1]])
    manager.start()
    outputs = [result(manager, name) for name in names]
    assert outputs[1].status == RequestStatus.FAILED and "no finite logits" in str(outputs[1].error)
    assert [output.generated_tokens for output in (outputs[0], outputs[2])] == wanted
    for _ in range(3):  # enough to be given every page of the cache
        again = manager.add_requests(good * 6)
        assert [result(manager, name).generated_tokens for name in again] == wanted * 6
    manager.destroy()


def test_a_processor_that_raises_costs_one_request() -> None:
    """The request that it was called for fails with its error; the others, and the engine, go on."""
    model = make_model("llama")

    def picky(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if int(input_ids[0, 0]) == 7:
            raise ValueError("no sevens here")
        return scores

    manager = ContinuousBatchingManager(model, greedy(), SMALL, build=lambda m, g, c, h: build(m, g, c, h, processors=[picky]))
    sampling = SamplingParams(do_sample=False, full_history=True)
    for name, first in (("good", 5), ("bad", 7)):
        manager.submit(GenerateRequest(request_id=name, token_ids=(first, 6), max_new_tokens=6, sampling=sampling, stream=False))
    manager.start()
    bad, good = result(manager, "bad"), result(manager, "good")
    assert bad.status == RequestStatus.FAILED and "ValueError: no sevens here" in str(bad.error)
    assert good.generated_tokens == alone(model, [5, 6])
    manager.destroy()


def test_a_forward_pass_that_raises_once_is_healed_by_a_start() -> None:
    """Everyone in flight fails with the cause; the next session computes the right tokens, prefixes of before included."""
    model = make_model("llama")
    prompt = list(range(20, 40))
    manager = init_continuous_batching(model, greedy(), SMALL)
    manager.start()
    assert result(manager, str(manager.add_request(prompt))).generated_tokens == alone(model, prompt)

    def break_down(*_: Any) -> None:
        handle.remove()
        raise RuntimeError("injected failure 4711")

    handle = model.model.layers[1].register_forward_pre_hook(break_down)
    output = result(manager, str(manager.add_request(prompt)))
    assert output.status == RequestStatus.FAILED and "4711" in str(output.error)
    manager.join(0.0)
    manager.start()
    assert result(manager, str(manager.add_request(prompt))).generated_tokens == alone(model, prompt)
    manager.destroy()


def test_no_memory_is_said_before_anything_starts() -> None:
    """The error reaches the caller, nothing runs, and the model serves with settings that fit."""
    model = make_model("llama")
    before = model.config._attn_implementation
    with pytest.raises(MemoryError, match="num_blocks"):
        generate_batch(model, [[1, 2]], greedy(), {**SMALL, "num_blocks": 10**10})
    assert model.config._attn_implementation == before
    assert generate_batch(model, [[1, 2]], greedy(), SMALL)["req_0"].generated_tokens == alone(model, [1, 2])
