"""`/generate` and `/v1/capabilities`: for programs that bring tokens, and for clients that ask before they try."""

from __future__ import annotations

from typing import Any

import pytest

from cb_ray.messages import SamplingParams
from cb_ray.serving.settings import DoorSettings
from tests.serving.doors import CONTEXT, EOS, error_of, events, make_door, make_model


def test_tokens_in_tokens_out() -> None:
    """Every token comes back, with the one that ended it, its log-probability and the usage."""
    door = make_door()
    fields: dict[str, Any] = {"token_ids": [5, 6, 7], "sampling": {"logprobs": 2, "temperature": 0.0, "seed": 3}}
    answer = door.post("/generate", fields).json()
    tokens = [*door.model.codec.encode(door.source.says), EOS]
    (choice,) = answer["choices"]
    assert choice["token_ids"] == tokens and choice["logprobs"] == [-0.5] * len(tokens)
    assert (choice["finish_reason"], choice["stop_token"]) == ("stop", EOS)
    assert [top[0] for top in choice["top_logprobs"]] == [[token, -0.5] for token in tokens]
    assert answer["usage"]["completion_tokens"] == len(tokens)
    asked = door.source.requests[0]
    assert asked.token_ids == (5, 6, 7) and asked.sampling.eos_token_ids == (EOS,)
    assert (asked.sampling.temperature, asked.sampling.seed) == (0.0, 3)


def test_streamed_tokens_add_up() -> None:
    """The events' tokens are those of the whole answer, for each of n sequences."""
    door = make_door()
    fields = {"token_ids": [5, 6, 7], "n": 2, "sampling": {"logprobs": 0, "prompt_logprobs": 0}}
    whole = door.post("/generate", fields).json()["choices"]
    streamed: list[dict[str, Any]] = [{"token_ids": [], "logprobs": [], "scores": []} for _ in whole]
    for event in events(door.post("/generate", {**fields, "stream": True})):
        for choice in event["choices"]:
            streamed[choice["index"]]["token_ids"] += choice["token_ids"]
            streamed[choice["index"]]["logprobs"] += choice["logprobs"]
            streamed[choice["index"]]["scores"].append(choice.get("prompt_logprobs"))
    for one, other in zip(whole, streamed, strict=True):
        assert (one["token_ids"], one["logprobs"]) == (other["token_ids"], other["logprobs"])
        assert one["prompt_logprobs"] == other["scores"][0] == [None, -0.25, -0.25]
    assert door.source.requests[1].fork_of == door.source.requests[0].request_id


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"token_ids": [5] * (CONTEXT + 1)}, "token_ids"),
        ({"token_ids": [5], "sampling": {"temprature": 1.0}}, "sampling.temprature"),
        ({"token_ids": [5], "sampling": {"temperature": -1.0}}, "sampling.temperature"),
        ({"token_ids": [5], "sampling": {"logit_bias": [[1]]}}, "sampling.logit_bias[0][1]"),
        ({"token_ids": [5], "sampling": {"logit_bias": [[10**6, 1.0]]}}, "sampling.logit_bias"),
        ({"token_ids": [5], "sampling": {"bad_words": [[10**6]]}}, "sampling.bad_words"),
        ({"token_ids": [5], "sampling": {"bad_words": [[]]}}, "sampling.bad_words"),
        ({"token_ids": [5], "sampling": {"stop_sequences": [[3], []]}}, "sampling.stop_sequences"),
        ({"token_ids": [5], "sampling": {"full_history": True}}, "sampling.full_history"),
        ({"token_ids": [5], "sampling": {"grammar": {}}}, "sampling.grammar"),
        ({"token_ids": [5], "structured_outputs": {}}, "structured_outputs"),
        ({"token_ids": [5], "max_new_tokens": 0}, "max_new_tokens"),
        ({"token_ids": [5], "model": "other"}, "model"),
    ],
)
def test_bad_tokens_and_sampling_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """The same clear errors as for text."""
    response = make_door().post("/generate", fields)
    assert response.status_code in (400, 404) and error_of(response)["param"] == param, response.text


def test_an_answers_form_goes_to_the_engine() -> None:
    """A grammar is asked for as in the other dialects, and travels with the sampling."""
    door = make_door()
    door.post("/generate", {"token_ids": [5], "structured_outputs": {"regex": "[ab]+"}})
    grammar = door.source.requests[0].sampling.grammar
    assert grammar is not None and (grammar.kind, grammar.text) == ("regex", "[ab]+")


def test_every_sampling_parameter_can_be_set() -> None:
    """What the engine can do, `/generate` can ask for: the description lists the fields of SamplingParams."""
    schema = make_door().get("/openapi.json").json()["components"]["schemas"]["Sampling"]
    assert schema["properties"].keys() == SamplingParams.__dataclass_fields__.keys() - {"full_history", "grammar", "embed"}


def test_capabilities_are_what_requests_meet() -> None:
    """A feature is listed if and only if a request that uses it is served; limits and parameters are the real ones."""
    door = make_door(DoorSettings(max_choices=3, stored_response_bytes=0), model=make_model(context_length=4000))
    found = door.get("/v1/capabilities").json()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert door.chat(tools=[tool]).status_code == (200 if found["features"]["tools"] else 400)
    wanted = {"type": "json_object"}
    assert door.chat(response_format=wanted).status_code == (200 if found["features"]["json_object"] else 400)
    assert not found["features"]["reasoning_effort"] and not found["features"]["stored_responses"]
    assert found["limits"]["max_choices"] == 3 and found["model"]["max_model_len"] == 4000
    parameters = found["endpoints"]["POST /v1/chat/completions"]
    assert {"temperature", "min_p", "logit_bias"} <= set(parameters) and "web_search_options" not in parameters
