"""/v1/chat/completions as clients know it: the official client is one judge, the bytes on the wire the other."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.chat import completion_create_params as chat_params

from cb_ray.serving.chat_dialect import ChatBody
from tests.serving.doors import EOS, chat_body, error_of, events, listening, make_door, make_model

SAYS = "Hello, 🎉 world"


def content(found: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in found for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_the_official_client_gets_every_field() -> None:
    """Over a real connection: id, model, message, finish_reason and a usage that adds up, plain and streamed."""
    door = make_door()
    with listening(door.app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
        with client.chat.completions.stream(model="tiny", messages=[{"role": "user", "content": "Hi"}]) as stream:
            final = stream.get_final_completion()
    choice, usage = answer.choices[0], answer.usage
    assert (choice.message.content, choice.finish_reason, choice.index) == (SAYS, "stop", 0)
    assert (answer.model, answer.object, answer.id[:9]) == ("tiny", "chat.completion", "chatcmpl-")
    assert answer.system_fingerprint and answer._request_id
    made = len(door.model.codec.encode(SAYS)) + 1
    assert usage is not None and usage.completion_tokens == made
    assert usage.total_tokens == usage.prompt_tokens + made and usage.prompt_tokens == len(door.source.requests[0].token_ids)
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens == 7
    assert final.choices[0].message.content == SAYS and final.id != answer.id


def test_a_stream_is_events_that_add_up() -> None:
    """Role first, then the text in whole characters, then the reason, all under one id; no usage unasked, [DONE] at the end."""
    response = make_door().chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream") and "content-length" not in response.headers
    found = events(response)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert content(found) == SAYS and len(found) > 5
    assert [event["choices"][0]["finish_reason"] for event in found] == [None] * (len(found) - 1) + ["stop"]
    assert {(event["id"], event["object"], event["created"]) for event in found} == {
        (found[0]["id"], "chat.completion.chunk", found[0]["created"])
    }
    assert not any("usage" in event for event in found)


def test_usage_comes_last_and_equals_the_plain_one() -> None:
    """include_usage adds one event without choices; the others say null."""
    door = make_door()
    *rest, last = events(door.chat(stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == [] and last["usage"] == door.chat().json()["usage"]
    assert all(event["usage"] is None and event["choices"] for event in rest)


def test_running_usage_grows() -> None:
    """continuous_usage_stats, which load generators ask for, puts the usage so far on every event."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [event["usage"]["completion_tokens"] for event in events(make_door().chat(stream=True, stream_options=options))]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == counts[-2] > 5


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(stream: bool) -> None:
    """n answers have indices of their own, each finishes once, the prompt counts once, and seeds are derived from the one given."""
    door = make_door()
    response = door.chat(n=3, stream=stream, seed=5, stream_options={"include_usage": True} if stream else None)
    if stream:
        found = events(response)
        texts = [content(found, index) for index in range(3)]
        reasons = [choice["finish_reason"] for event in found for choice in event["choices"] if choice["finish_reason"]]
        usage = found[-1]["usage"]
    else:
        body = response.json()
        texts = [choice["message"]["content"] for choice in body["choices"]]
        reasons, usage = [choice["finish_reason"] for choice in body["choices"]], body["usage"]
    assert texts == [SAYS] * 3 and reasons == ["stop"] * 3
    requests = door.source.requests
    assert usage["prompt_tokens"] == len(requests[0].token_ids)
    assert usage["completion_tokens"] == 3 * (len(door.model.codec.encode(SAYS)) + 1)
    assert [request.sampling.seed for request in requests] == [5, 6, 7]
    assert [request.fork_of for request in requests] == [None, requests[0].request_id, requests[0].request_id]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_the_work(stream: bool) -> None:
    """The answer ends before the stop string, which straddles tokens here; the engine's request is cancelled at once."""
    door = make_door()
    response = door.chat(stop=["lo, 🎉", "never"], stream=stream)
    if stream:
        assert content(events(response)) == "Hel"
    else:
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hel", "stop")
        assert response.json()["usage"]["completion_tokens"] < len(door.model.codec.encode(SAYS))
        assert response.json()["usage"]["prompt_tokens_details"] is None  # the engine had not told yet
    assert door.source.closed == [door.source.requests[0].request_id]


def test_log_probabilities() -> None:
    """One entry for each token of the text, with its bytes, which spell the text; the end-of-sequence has none."""
    body = make_door().chat(logprobs=True, top_logprobs=2).json()
    entries = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == SAYS
    assert len(entries) == body["usage"]["completion_tokens"] - 1
    for entry in entries:
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.0]
        assert entry["top_logprobs"][0]["token"] == entry["token"] and entry["logprob"] == -0.5


def test_log_probabilities_in_a_stream() -> None:
    """The same entries come chunk by chunk; without top_logprobs their lists are empty."""
    door = make_door()
    choices = [choice for event in events(door.chat(stream=True, logprobs=True)) for choice in event["choices"]]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert entries == door.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in entries)


@pytest.mark.parametrize(
    ("field", "value", "reads", "becomes"),
    [
        ("temperature", 0.0, "temperature", 0.0),
        ("top_p", 0.5, "top_p", 0.5),
        ("top_p", 0, "top_p", 1e-9),
        ("presence_penalty", -1.5, "presence_penalty", -1.5),
        ("frequency_penalty", 2, "frequency_penalty", 2),
        ("logit_bias", {"17": -100, "5": 3.5}, "logit_bias", ((17, -100), (5, 3.5))),
        ("seed", -3, "seed", -3),
        ("top_k", 4, "top_k", 4),
        ("min_p", 0.1, "min_p", 0.1),
        ("min_tokens", 3, "min_tokens", 3),
        ("ignore_eos", True, "ignore_eos", True),
        ("repetition_penalty", 1.2, "repetition_penalty", 1.2),
        ("stop_token_ids", [9, 8], "stop_token_ids", (9, 8)),
        ("allowed_token_ids", [9], "allowed_token_ids", (9,)),
    ],
)
def test_every_way_of_sampling_reaches_the_engine(field: str, value: Any, reads: str, becomes: Any) -> None:
    """No accepted field is ignored: each one stands in the engine's parameters."""
    door = make_door()
    assert door.chat(max_tokens=4, **{field: value}).status_code == 200
    sampling = door.source.requests[0].sampling
    assert getattr(sampling, reads) == becomes and sampling.eos_token_ids == (EOS,)


def test_what_is_not_given_is_as_the_author_set_it() -> None:
    """Sampling defaults come from the model's generation config; a field of the request wins; the rest is neutral."""
    door = make_door(model=make_model(defaults={"temperature": 0.6, "top_k": 20}))
    door.chat()
    door.chat(temperature=1.0)
    first, second = (request.sampling for request in door.source.requests)
    assert (first.temperature, first.top_k, first.top_p) == (0.6, 20, 1.0)
    assert (second.temperature, second.top_k) == (1.0, 20)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, None), ({"max_tokens": 5}, 5), ({"max_completion_tokens": 6}, 6), ({"max_tokens": 9, "max_completion_tokens": 6}, 6)],
)
def test_limits(fields: dict[str, int], limit: int | None) -> None:
    """Both names of the limit hold; without one the engine may use all the room there is."""
    door = make_door()
    body = door.chat(**fields).json()
    assert door.source.requests[0].max_new_tokens == limit
    assert body["choices"][0]["finish_reason"] == ("length" if limit else "stop")
    assert limit is None or body["usage"]["completion_tokens"] == limit


def test_requests_that_stream_nothing_ask_for_one_chunk() -> None:
    """A plain answer needs no message per token, unless a stop string must be watched for."""
    door = make_door()
    door.chat()
    door.chat(stop="x")
    door.chat(stream=True)
    assert [request.stream for request in door.source.requests] == [False, True, True]


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(("stop", "n", "top_p", "seed", "stream", "tools", "tool_choice", "response_format", "logprobs", "audio")),
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s"},
        {"modalities": ["text"], "verbosity": "medium", "response_format": {"type": "text"}, "prompt_cache_retention": "24h"},
        {"parallel_tool_calls": True, "tool_choice": "auto", "stop": []},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "none"},
    ],
)
def test_harmless_fields(fields: dict[str, Any]) -> None:
    """Nulls, OpenAI's bookkeeping fields and wishes that are met anyway break nothing."""
    assert make_door().chat(**fields).status_code == 200


def test_cache_salts() -> None:
    """prompt_cache_key and cache_salt keep one caller's cached prefixes apart from another's; the pool sees them as one thing."""
    door = make_door()
    door.chat(prompt_cache_key="a")
    door.chat(cache_salt="b", priority=-2)
    assert [(request.cache_salt, request.priority) for request in door.source.requests] == [("a", 0), ("b", -2)]


def test_every_field_of_the_official_client_is_known() -> None:
    """Each parameter that OpenAI documents is either served or refused by name; none falls under 'unknown'."""
    theirs = set(chat_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert theirs <= ChatBody.model_fields.keys()


def test_model_names_are_checked() -> None:
    """Another model's name is a 404 that names it, in the words clients look for."""
    response = make_door().post("/v1/chat/completions", chat_body() | {"model": "other"})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "other" in error["message"] and "tiny" in error["message"]
