"""Grammars through the manager: every way in takes one, and what cannot be compiled never gets in line."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from cb_ray import Grammar, SamplingParams, generate_batch
from cb_ray.config import ContinuousBatchingConfig
from cb_ray.engine.build import build
from cb_ray.engine.manager import ContinuousBatchingManager
from cb_ray.errors import InvalidRequestError
from cb_ray.messages import GenerateRequest
from tests.tiny import make_model, make_tokenizer

END = 3
SIZE = {"type": "object", "properties": {"size": {"enum": ["S", "M"]}}, "required": ["size"], "additionalProperties": False}
SETTINGS: dict[str, Any] = {"page_size": 8, "num_blocks": 96, "max_batch_tokens": 64}
HOT = GenerationConfig(max_new_tokens=60, do_sample=True, temperature=2.0, eos_token_id=END, pad_token_id=0)


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def manager(model: Any) -> Iterator[ContinuousBatchingManager]:
    manager = ContinuousBatchingManager(model, HOT, ContinuousBatchingConfig(**SETTINGS, per_request_processors=True))
    manager.start()
    yield manager
    manager.destroy()


@pytest.fixture(scope="module")
def text(tiny_model_dir: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def test_every_way_in(manager: ContinuousBatchingManager, text: Any) -> None:
    """add_request with children, stream, chunks: by a Grammar or by how one is written."""

    async def read() -> list[list[int]]:
        stream = [out async for out in manager.stream([5, 6], grammar={"json_schema": SIZE}, seed=1)]
        sampling = SamplingParams(temperature=2.0, seed=2, eos_token_ids=(END,), grammar=Grammar.json_schema(SIZE))
        request = GenerateRequest(request_id="c", token_ids=(7, 8), max_new_tokens=60, sampling=sampling)
        return [stream[-1].generated_tokens, [t async for chunk in manager.chunks(request) for t in chunk.token_ids]]

    found = asyncio.run(read())
    name = manager.add_request([5, 6], grammar=Grammar.json_schema(SIZE), num_return_sequences=3)
    assert name is not None
    found += [manager.get_result(child, timeout=20).generated_tokens for child in (name, f"{name}__child#0", f"{name}__child#1")]
    assert [json.loads(text(tokens))["size"] in {"S", "M"} for tokens in found] == [True] * 5


def test_a_bad_grammar_never_gets_in_line(manager: ContinuousBatchingManager) -> None:
    """The caller is told at once; neither the engine nor the waiting line hears of it."""
    for grammar in ({"regex": "(a"}, {"json_schema": {"type": "nonsense"}}, "a+"):
        with pytest.raises(InvalidRequestError) as caught:
            manager.add_request([5], request_id="bad", grammar=grammar)
        assert caught.value.param == "grammar"

    async def ask() -> None:
        sampling = SamplingParams(grammar=Grammar.regex("(a", param="response_format"))
        async for _ in manager.chunks(GenerateRequest(request_id="bad", token_ids=(5,), sampling=sampling)):
            pass

    with pytest.raises(InvalidRequestError) as caught:
        asyncio.run(ask())
    assert caught.value.param == "response_format" and manager.stats().num_waiting == 0


def test_nobody_waits_for_a_grammar_to_compile(model: Any) -> None:
    """While one compiles, requests without a grammar are served, and the event loop goes on."""
    compiling, go = threading.Event(), threading.Event()

    def slow_build(*given: Any) -> Any:
        parts = build(*given)
        assert parts.grammars is not None

        def load() -> Any:
            compiling.set()
            assert go.wait(20)
            return AutoTokenizer.from_pretrained(model.name_or_path)

        parts.grammars._load = load  # type: ignore[attr-defined]
        return parts

    manager = ContinuousBatchingManager(
        model, HOT, ContinuousBatchingConfig(**SETTINGS, per_request_processors=True), build=slow_build
    )
    manager.start()

    async def ask() -> tuple[int, int]:
        async def stream(**fields: Any) -> list[Any]:
            return [out async for out in manager.stream([5], max_new_tokens=5, **fields)]

        bound = asyncio.create_task(stream(grammar={"choice": ["x"]}))
        while not compiling.is_set():
            await asyncio.to_thread(compiling.wait, 20)
        free = await stream(eos_token_id=-1)
        assert not bound.done()
        go.set()
        return len(free[-1].generated_tokens), len((await bound)[-1].generated_tokens)

    try:
        assert asyncio.run(ask()) == (5, 1)
    finally:
        go.set()
        manager.destroy()


def test_generate_batch_binds_all_outputs(model: Any, text: Any) -> None:
    """The offline entry point takes a grammar as well."""
    outputs = generate_batch(model, [[5], [6, 7]], HOT, ContinuousBatchingConfig(**SETTINGS), grammar={"regex": "[ab]{4}"})
    assert all(len(text(output.generated_tokens)) == 4 for output in outputs.values())
    failed = generate_batch(model, [[5]], HOT, ContinuousBatchingConfig(**SETTINGS), grammar={"regex": "(a"})
    assert all(output.error is not None and "unclosed" in output.error for output in failed.values())


def test_a_model_made_in_code_gets_its_tokenizer_by_hand() -> None:
    """Its files would have brought one; without, the error says what to do."""
    made = make_model("llama")
    config = ContinuousBatchingConfig(**SETTINGS, per_request_processors=True)
    bare = ContinuousBatchingManager(made, HOT, config)
    bare.start()
    with pytest.raises(InvalidRequestError, match="tokenizer="):
        bare.add_request([5], grammar=Grammar.choice(["x"]))
    bare.destroy()
    manager = ContinuousBatchingManager(made, HOT, config, tokenizer=make_tokenizer())
    manager.start()
    name = manager.add_request([5], grammar=Grammar.choice(["x"]))
    assert len(manager.get_result(name, timeout=20).generated_tokens) == 1
    manager.destroy()
