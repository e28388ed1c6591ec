"""What an answer must look like, over HTTP: a real engine with a random tiny model behind the door, and the official client."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from cb_ray.messages import GenerateRequest, TokenChunk
from cb_ray.serving.http import build_http_app
from cb_ray.serving.served_model import ServedModel
from tests.serving.doors import chat_body, error_of, events, listening, make_door, make_model
from tests.tiny import save_model

SHIRT = {
    "type": "object",
    "properties": {"size": {"enum": ["S", "M", "L"]}, "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["size", "tags"],
    "additionalProperties": False,
}
HOT = {"temperature": 2.0, "max_tokens": 200}
THINKING = "{% for m in messages %}{{ m['content'] }}{% endfor %}<think>\n{# </think> #}"


class EngineSource:
    """An engine in this process as the door's source of tokens."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        return self._manager.chunks(request)


def serve(path: Path, name: str) -> Iterator[openai.OpenAI]:
    """The official client of a door before an engine with the model in `path`."""
    import torch
    from transformers import AutoModelForCausalLM

    from cb_ray.config import ContinuousBatchingConfig
    from cb_ray.engine.manager import ContinuousBatchingManager

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    config = ContinuousBatchingConfig(num_blocks=200, page_size=16, per_request_processors=True)
    manager = ContinuousBatchingManager(model, model.generation_config, config)
    manager.start()
    try:
        app = build_http_app(ServedModel.load(str(path), name), EngineSource(manager))
        with listening(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client
    finally:
        manager.stop(hard_stop=True)
        manager.destroy()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    yield from serve(save_model(tmp_path_factory.mktemp("roomy"), max_position_embeddings=2048), "tiny")


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], **(HOT | fields))


def schema(value: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value, **fields}}


def test_json_by_schema_in_every_choice(client: openai.OpenAI) -> None:
    """A random model at temperature 2 writes gibberish; under a schema all its choices follow it, and end by themselves."""
    for choice in ask(client, n=4, seed=1, response_format=schema(SHIRT, strict=True)).choices:
        value = json.loads(choice.message.content)
        assert value["size"] in {"S", "M", "L"} and len(value["tags"]) <= 3 and choice.finish_reason == "stop"


def test_a_schema_in_a_stream_and_in_completions(client: openai.OpenAI) -> None:
    """Streamed, and for plain prompts."""
    stream = ask(client, seed=2, stream=True, response_format=schema(SHIRT))
    assert json.loads("".join(chunk.choices[0].delta.content or "" for chunk in stream))["size"]
    extra = {"response_format": schema(SHIRT)}
    done = client.completions.create(model="tiny", prompt=["a", "b"], seed=3, extra_body=extra, **HOT)
    assert all(json.loads(choice.text)["size"] for choice in done.choices)


@pytest.mark.parametrize(
    ("outputs", "form"),
    [
        ({"regex": "[A-Z]{3}"}, "[A-Z]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"json": {"const": 5}}, "5"),
    ],
)
def test_other_forms(client: openai.OpenAI, outputs: dict[str, Any], form: str) -> None:
    """structured_outputs, as vLLM has them."""
    answer = ask(client, seed=4, extra_body={"structured_outputs": outputs})
    assert re.fullmatch(form, answer.choices[0].message.content)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema({"type": "nonsense"})}, "response_format"),
        ({"response_format": schema({"not": {"type": "string"}}, strict=True)}, "response_format"),
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "structured_outputs"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_a_bad_grammar_is_a_400_of_its_own_request(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    """It names the field, streamed or not; the next request is served."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, stream=stream, **fields)
        assert caught.value.param == param and caught.value.code == "invalid_grammar"
    assert ask(client, max_tokens=2, extra_body={"ignore_eos": True}).choices[0].finish_reason == "length"


def test_a_lenient_schema_leaves_out_what_cannot_be_enforced(client: openai.OpenAI) -> None:
    """Without strict, an unknown keyword is no reason to refuse."""
    answer = ask(client, seed=5, response_format=schema({"enum": [1, 2], "not": {"const": 3}}))
    assert answer.choices[0].message.content in {"1", "2"}


class Shirt(pydantic.BaseModel):
    """What `parse` makes of an answer."""

    size: Literal["S", "M", "L"]
    washed: bool


def test_the_clients_parse_and_its_streaming_twin(client: openai.OpenAI) -> None:
    """The official helpers give pydantic objects."""
    fields: Any = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "response_format": Shirt, "max_tokens": 200}
    assert isinstance(client.chat.completions.parse(**fields, temperature=2.0, seed=6).choices[0].message.parsed, Shirt)
    with client.chat.completions.stream(**fields, temperature=2.0, seed=7) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Shirt)


class Wash(pydantic.BaseModel):
    """Wash a shirt."""

    hot: bool
    size: Literal["S", "M", "L"]


@pytest.mark.parametrize("parallel", [False, True])
def test_forced_tools(client: openai.OpenAI, parallel: bool) -> None:
    """Required calls have arguments that their schema allows, and `parse` makes objects of them."""
    answer = client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        tools=[openai.pydantic_function_tool(Wash)],
        tool_choice="required",
        parallel_tool_calls=parallel,
        seed=8,
        temperature=2.0,
        max_tokens=1200,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls and all(isinstance(call.function.parsed_arguments, Wash) for call in calls)
    assert answer.choices[0].finish_reason == "tool_calls" and not answer.choices[0].message.content
    assert parallel or len(calls) == 1


def test_a_named_call_streams(client: openai.OpenAI) -> None:
    """The helper of the client adds the deltas up."""
    with client.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        tools=[openai.pydantic_function_tool(Wash)],
        tool_choice={"type": "function", "function": {"name": "Wash"}},
        seed=9,
        temperature=2.0,
        max_tokens=200,
    ) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Wash) and kinds.count("tool_calls.function.arguments.delta") > 1


def test_thoughts_and_their_tokens() -> None:
    """Reasoning comes apart from the content, whole and streamed, and its tokens are counted."""
    codec = make_model().codec
    codec.tokenizer.chat_template = THINKING
    model = make_model(codec=codec)
    thought, said = "Hm, so.\n</think>", "\n\nIt is 4."
    door = make_door(model=model, says=thought + said)
    body = door.chat().json()
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, so.", "It is 4.")
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(codec.encode(thought))}
    found = events(door.chat(stream=True, stream_options={"include_usage": True}))
    deltas = [choice["delta"] for event in found for choice in event["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm, so."
    assert "".join(delta.get("content") or "" for delta in deltas) == "It is 4."
    assert found[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(codec.encode(thought))}
    cut = door.chat(max_tokens=2).json()
    assert cut["choices"][0]["message"]["content"] is None and cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


def test_a_model_without_thoughts_counts_none() -> None:
    """completion_tokens_details is there for clients that read it."""
    assert make_door().chat().json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_two_forms_at_once_are_refused() -> None:
    """Which one should hold?"""
    fields = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    assert error_of(make_door().post("/v1/chat/completions", chat_body(**fields)))["param"] == "structured_outputs"


def test_embeddings(client: openai.OpenAI) -> None:
    """Vectors in the order of the texts, equal for equal texts, through the client's own decoding, and cut to fewer numbers."""
    answer = client.embeddings.create(model="tiny", input=["a cat", "a dog", "a cat"])
    first, other, again = (entry.embedding for entry in answer.data)
    assert first == pytest.approx(again, abs=1e-5) and first != pytest.approx(other, abs=1e-3)
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    short = client.embeddings.create(model="tiny", input=[[5, 6]], dimensions=4, encoding_format="float").data[0].embedding
    assert len(short) == 4 and sum(value * value for value in short) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a"] * 200}, "input"),
        ({"input": [999999]}, "input"),
        ({"input": "a", "dimensions": 10**6}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a " * 1000}, "input"),
    ],
)
def test_bad_embeddings_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """A 400 that says which field."""
    response = make_door().post("/v1/embeddings", {"model": "tiny", **fields})
    assert response.status_code == 400 and error_of(response)["param"] == param


@pytest.mark.real
def test_the_demo_model_fills_a_schema(smollm2: Path) -> None:
    """The official client's parse() with a real model: a shirt, not a story."""
    for client in serve(smollm2, "smollm2"):
        answer = client.chat.completions.parse(
            model="smollm2",
            messages=[{"role": "user", "content": "A washed shirt of medium size. Describe it in JSON."}],
            response_format=Shirt,
            temperature=0,
            max_tokens=60,
        )
        assert isinstance(answer.choices[0].message.parsed, Shirt)
