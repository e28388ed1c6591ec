"""Whatever a client sends, the answer is the client's or the door's, never a 5xx, and the next request is served."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cb_ray.serving.chat_dialect import ChatBody
from cb_ray.serving.completions_dialect import CompletionsBody
from cb_ray.serving.generate_dialect import GenerateBody
from cb_ray.serving.messages_dialect import CountTokensBody, MessagesBody
from cb_ray.serving.responses_dialect import ResponsesBody
from cb_ray.serving.tokenize_dialect import DetokenizeBody, TokenizeBody
from tests.serving.doors import chat_body, error_of, make_door

DOOR = make_door()
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["auto", "user", "text"])
)
keys = st.text(max_size=6) | st.sampled_from(["type", "text", "role", "content", "function", "name", "tool_calls", "id"])
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]), "content": values},
        optional={"tool_calls": values, "name": values, "refusal": values},
    ),
    max_size=3,
)
call = st.fixed_dictionaries({"id": st.text(max_size=3), "function": st.fixed_dictionaries({"name": keys, "arguments": keys})})
turns = st.lists(
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none() | keys, "tool_calls": st.lists(call, max_size=2)}),
    min_size=1,
    max_size=2,
)


def bodies(base: dict[str, Any], fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """`base` with a few of its fields, or of all known fields, set to anything that JSON can say."""
    return st.dictionaries(st.sampled_from(sorted(fields)) | keys, values | messages | turns, max_size=4).map(
        lambda odd: base | odd
    )


COMPLETION = {"model": "tiny", "prompt": "a"}
MESSAGE = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
EXAMPLES = 10_000 if settings.get_current_profile_name() == "nightly" else 100
CASES = {
    "/v1/chat/completions": bodies(chat_body(), ChatBody.model_fields),
    "/v1/completions": bodies(COMPLETION, CompletionsBody.model_fields),
    "/v1/responses": bodies({"model": "tiny", "input": "a"}, ResponsesBody.model_fields),
    "/v1/messages": bodies(MESSAGE, MessagesBody.model_fields),
    "/v1/messages/count_tokens": bodies({"model": "tiny", "messages": MESSAGE["messages"]}, CountTokensBody.model_fields),
    "/generate": bodies({"token_ids": [5]}, GenerateBody.model_fields),
    "/tokenize": bodies({}, TokenizeBody.model_fields),
    "/detokenize": bodies({}, DetokenizeBody.model_fields),
}


def holds(path: str, body: bytes) -> None:
    response = DOOR.post(path, body)
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"] if path.startswith("/v1/messages") else error_of(response)
        assert error["message"] and "Traceback" not in error["message"]
        assert response.status_code in (400, 404, 413), response.text


@pytest.mark.parametrize("path", CASES)
@given(data=st.data())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_odd_values_are_answered_or_refused(path: str, data: st.DataObject) -> None:
    """Any JSON in any field of any route."""
    holds(path, json.dumps(data.draw(CASES[path])).encode())


@given(body=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@settings(max_examples=EXAMPLES, deadline=None)
def test_odd_bytes_are_refused(body: bytes) -> None:
    """Any bytes for a body."""
    holds("/v1/chat/completions", body)


@given(cut=st.integers(0, 200), flip=st.integers(0, 200), to=st.integers(0, 255))
@settings(max_examples=EXAMPLES, deadline=None)
def test_damaged_requests_are_answered_or_refused(cut: int, flip: int, to: int) -> None:
    """A good request, cut short or with one byte changed."""
    body = bytearray(json.dumps(chat_body("🎉", stop=["a"], seed=1, stream=True), ensure_ascii=False).encode())
    body[flip % len(body)] = to
    holds("/v1/chat/completions", bytes(body[: cut % len(body)] if cut % 2 else body))


def test_the_next_request_is_served() -> None:
    """After all of that the door still answers."""
    assert DOOR.chat().json()["choices"][0]["message"]["content"] == DOOR.source.says
