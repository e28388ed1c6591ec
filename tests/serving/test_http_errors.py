"""Whatever is wrong with a request or behind the door: a right status, OpenAI's envelope, the field at fault, and no internals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cb_ray.errors import (
    CbRayError,
    EngineFailedError,
    EngineStoppedError,
    InvalidRequestError,
    LogitsError,
    NoReplicaError,
    ProcessorError,
    QueueFullError,
    ReplicaLostError,
    RequestTimeoutError,
)
from cb_ray.serving.http import DoorSettings
from tests.serving.doors import CONTEXT, Exchange, chat_body, error_of, gauge, make_door

CHAT = "/v1/chat/completions"
HALF = "\ud83c"


def tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "parameters": {}, **changes}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": [1]}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": CONTEXT}, "max_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stream": "perhaps"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"seed": 10**40}, "seed"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"999999999": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"content": "no role"}]}, "messages[0].role"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "a", "cntent": 1}]}, "messages[0].cntent"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [tool(name="no spaces")], "tool_choice": "none"}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"functions": []}, "functions"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"model": None}, "model"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
@pytest.mark.parametrize("stream", [None, True])
def test_the_field_at_fault_is_named(fields: dict[str, Any], param: str, stream: bool | None) -> None:
    """Each bad value is a 400 whose `param` is its path, streaming or not, and the engine never hears of it."""
    door = make_door()
    if stream and "stream" not in fields and "stream_options" not in fields:
        fields = {"stream": True, **fields}
    response = door.post(CHAT, {**chat_body(), **fields})
    error = error_of(response)
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert door.source.requests == []


def test_an_unknown_field_names_its_nearest() -> None:
    """A misspelt parameter is never ignored; the answer says which one was meant."""
    error = error_of(make_door().chat(temprature=1))
    assert error["param"] == "temprature" and "'temperature'" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": ',
        b"hello",
        b"",
        b"\x00\x01",
        b"null",
        b"[]",
        b'"text"',
        b"5",
        json.dumps(chat_body("XX")).encode().replace(b"XX", b"\xff\xfe\xc3"),
        json.dumps(chat_body(metadata="DEEP")).replace('"DEEP"', "[" * 5000 + "]" * 5000).encode(),
        json.dumps(chat_body(temperature="ODD")).replace('"ODD"', "NaN").encode(),
        json.dumps(chat_body(temperature="ODD")).replace('"ODD"', "1e999").encode(),
    ],
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    """Broken JSON, other JSON, broken UTF-8, absurd nesting and numbers that JSON does not have are each a 400."""
    response = make_door().post(CHAT, body)
    assert response.status_code == 400 and error_of(response)["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": HALF}]},
        {"stop": HALF},
        {"user": HALF},
        {"model": HALF},
        {"tools": [tool(description=HALF)], "tool_choice": "none"},
    ],
)
def test_half_an_emoji_is_no_crash(fields: dict[str, Any]) -> None:
    """Half a surrogate pair, as JavaScript clients cut them, is answered or refused in every field."""
    assert make_door().post(CHAT, chat_body() | fields).status_code < 500


def test_other_content_types_are_refused_as_such() -> None:
    """curl's default content type is the likeliest mistake; the answer says what to send."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = make_door().post(CHAT, chat_body(), {"content-type": kind})
        assert response.status_code == 400 and "application/json" in error_of(response)["message"]
    for kind in ("application/json; charset=utf-8", "application/vnd.api+json"):
        assert make_door().post(CHAT, chat_body(), {"content-type": kind}).status_code == 200


def test_routes_and_methods_that_are_not_here() -> None:
    """404 and 405 come in the envelope as well, and a 405 says what is allowed."""
    door = make_door()
    missing, wrong = door.get("/v1/nothing"), door.get(CHAT)
    assert (missing.status_code, wrong.status_code, wrong.headers["allow"]) == (404, 405, "POST")
    assert "/v1/nothing" in error_of(missing)["message"] and "GET" in error_of(wrong)["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [CONTEXT * 2, 2_000_000])
def test_a_prompt_beyond_the_context(length: int, stream: bool) -> None:
    """Agents shorten their history when they see this code; a huge text is refused without being tokenized."""
    response = make_door().chat("a " * (length // 2), stream=stream)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]


def test_a_body_beyond_the_limit_is_not_read() -> None:
    """A body that is longer than the setting allows is a 413, whatever is in it."""
    response = make_door(DoorSettings(max_body_bytes=100)).chat("a" * 200)
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


BEHIND = [
    (QueueFullError(3, 3, 4.2), 429, "queue_full", "5"),
    (NoReplicaError("none", 7.0), 503, "no_replica", "7"),
    (EngineStoppedError("stopping"), 503, "engine_stopped", None),
    (EngineFailedError("CUDA error"), 503, "engine_failed", None),
    (ReplicaLostError("r"), 503, "replica_lost", None),
    (LogitsError(), 500, "nan_logits", None),
    (ProcessorError("KeyError"), 500, "processor_failed", None),
    (RequestTimeoutError(3.0), 408, "timeout", None),
    (InvalidRequestError("too long for the cache", param="token_ids"), 400, None, None),
    (RuntimeError("secret /etc/path"), 500, None, None),
]


@pytest.mark.parametrize(("error", "status", "code", "retry"), BEHIND)
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}])
def test_a_refusal_from_behind_is_a_status(error: Exception, status: int, code: str, retry: str, fields: dict[str, Any]) -> None:
    """What the pool or an engine refuses is a status with JSON, streaming or not: headers wait for the first token."""
    response = make_door(fails=error).chat(**fields)
    found = error_of(response)
    assert (response.status_code, found["code"], response.headers.get("retry-after")) == (status, code, retry)
    assert "secret" not in found["message"] and "/etc" not in found["message"]


@pytest.mark.parametrize(("error", "says"), [(ReplicaLostError("r", 3), "lost"), (RuntimeError("secret"), "failed")])
def test_a_failure_on_the_way_is_the_last_event(error: Exception, says: str) -> None:
    """When headers are out an error is an event in the envelope, and no [DONE] pretends that the answer is whole."""
    door = make_door(fails=error, fails_after=3)
    response = door.chat(stream=True)
    blocks = response.text.strip().split("\n\n")
    last = json.loads(blocks[-1].removeprefix("data: "))
    assert response.status_code == 200 and says in last["error"]["message"] and "secret" not in response.text
    assert len(blocks) > 3 and "[DONE]" not in response.text
    assert gauge(door, "cb_ray_rejections_total") == 1


def test_a_failed_choice_fails_the_request_and_ends_the_others() -> None:
    """With n=2 the failure of one choice is the answer, and nothing is left running."""
    door = make_door(fails=EngineFailedError("step failed"), fails_after=4)
    assert door.chat(n=2, stop="never").status_code == 503
    assert gauge(door, "cb_ray_requests_running") == 0


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(LogitsError(), 500, "nan_logits"), (InvalidRequestError("no token left", code="nothing_to_choose_from"), 400, None)],
)
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"logit_bias": {"5": -100}}])
def test_scores_that_are_no_numbers_are_whose_fault_they_are(error, status, code, fields: dict[str, Any]) -> None:
    """A request that leaves nothing to choose from is a 400; a model that gives no numbers is a fault of the server, by name."""
    response = make_door(fails=error, in_a_chunk=True).chat(**fields)
    found = error_of(response)
    assert (response.status_code, found["code"], found["message"]) == (status, code or error.code, str(error))


def test_errors_in_chunks_are_errors() -> None:
    """An engine reports a failed request as a chunk with an error; the door answers it like one that was raised."""

    async def scenario() -> dict[str, Any]:
        from cb_ray.messages import RequestStatus, TokenChunk

        door = make_door()

        async def generate(request):
            error = InvalidRequestError("no such adapter", param="adapter")
            yield TokenChunk(request_id=request.request_id, status=RequestStatus.FAILED, finish_reason="failed", error=error)

        door.source.generate = generate
        exchange = Exchange(door.app, CHAT, chat_body())
        return await exchange.sent.get()

    assert asyncio.run(scenario())["status"] == 400


@pytest.mark.parametrize(
    ("key", "status"), [(None, 401), ("Bearer wrong", 401), ("Basic one", 401), ("Bearer one", 200), ("bearer two", 200)]
)
def test_api_keys(key: str | None, status: int) -> None:
    """With keys in force every route but the probes asks for one, in OpenAI's words."""
    door = make_door(DoorSettings(api_keys=("one", "two")))
    headers = {"authorization": key} if key else {}
    response = door.post(CHAT, chat_body(), headers)
    assert response.status_code == status
    assert status == 200 or error_of(response)["code"] == "invalid_api_key"
    assert door.get("/v1/models", headers).status_code == status
    assert [door.get(path).status_code for path in ("/health", "/metrics")] == [200, 200]


def test_rejections_are_counted_by_reason() -> None:
    """An operator sees why requests were not served."""
    door = make_door(fails=QueueFullError(1, 1))
    door.chat()
    door.chat(temperature=-1)
    text = door.get("/metrics").text
    assert 'cb_ray_rejections_total{reason="queue_full"} 1.0' in text
    assert 'cb_ray_rejections_total{reason="invalid_request_error"} 1.0' in text


def test_every_error_has_a_status_and_a_type() -> None:
    """No error of this package reaches a client as anything but its own status."""
    kinds = [kind for kind in CbRayError.__subclasses__() if kind.__module__ == "cb_ray.errors"]
    assert kinds and all(400 <= kind.http_status < 600 and kind.openai_type for kind in kinds)
