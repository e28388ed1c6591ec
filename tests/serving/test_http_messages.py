"""`/v1/messages` through the official Anthropic client: text, streams, tools, counting, errors in Anthropic's envelope."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from cb_ray.errors import EngineFailedError, QueueFullError
from cb_ray.serving.settings import DoorSettings
from tests.serving.doors import DoorUnderTest, listening, make_door, make_model

TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CALLS = 'Well. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ASK: Any = {"model": "tiny", "max_tokens": 150, "messages": [{"role": "user", "content": "Hi"}]}


def post(door: DoorUnderTest, **fields: Any) -> httpx.Response:
    return door.post("/v1/messages", {**ASK, **fields})


@pytest.fixture
def door() -> Iterator[tuple[DoorUnderTest, anthropic.Anthropic]]:
    """A door on a real connection that asks for a key, and the official client, which sends it in x-api-key."""
    made = make_door(DoorSettings(api_keys=("secret",)), model=make_model(context_length=4000))
    with listening(made.app) as url, anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as client:
        yield made, client


def test_a_message(door: tuple[DoorUnderTest, anthropic.Anthropic]) -> None:
    """Text, stop reason and usage are where the official client looks for them."""
    made, client = door
    answer = client.messages.create(**ASK, system="Be brief.", extra_body={"temperature": 0.5, "top_k": 3})
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "end_turn")
    assert answer.content[0].text == made.source.says
    prompt = len(made.source.requests[0].token_ids)
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (prompt - 7, 7)
    assert answer._request_id
    sampling = made.source.requests[0].sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 3)


def test_a_stream(door: tuple[DoorUnderTest, anthropic.Anthropic]) -> None:
    """The client's stream helper accumulates the events into the message that a plain call gives."""
    made, client = door
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == made.source.says
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", client.messages.create(**ASK).usage.output_tokens)
    kinds = [event.type for event in client.messages.create(**ASK, stream=True)]
    assert kinds[0] == "message_start" and kinds[1] == "content_block_start"
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_stop_sequence_is_named(door: tuple[DoorUnderTest, anthropic.Anthropic]) -> None:
    """Why an answer ended, and by which sequence; a limit is max_tokens."""
    _, client = door
    for final in (
        client.messages.create(**ASK, stop_sequences=["never", "lo"]),
        client.messages.stream(**ASK, stop_sequences=["never", "lo"]).__enter__().get_final_message(),
    ):
        assert (final.stop_reason, final.stop_sequence, final.content[0].text) == ("stop_sequence", "lo", "Hel")
    assert client.messages.create(**{**ASK, "max_tokens": 2}).stop_reason == "max_tokens"


def test_a_tool_is_used_and_its_result_read(door: tuple[DoorUnderTest, anthropic.Anthropic]) -> None:
    """Calls are tool_use blocks, whole and streamed; tool_result blocks are what the model reads next."""
    made, client = door
    made.source.says = CALLS
    first = client.messages.create(**ASK, tools=[TOOL])
    assert first.stop_reason == "tool_use" and [block.type for block in first.content] == ["text", "tool_use"]
    use: Any = first.content[1]
    assert (use.name, use.input) == ("add", {"a": 1})
    with client.messages.stream(**ASK, tools=[TOOL]) as stream:
        streamed: Any = stream.get_final_message().content[1]
    assert (streamed.name, streamed.input) == ("add", {"a": 1})
    result = [{"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "two"}]}]
    talk: Any = [*ASK["messages"], {"role": "assistant", "content": first.content}, {"role": "user", "content": result}]
    made.source.says = "2"
    assert client.messages.create(**{**ASK, "messages": talk}, tools=[TOOL]).content[0].text == "2"
    prompt = made.model.codec.decode(made.source.requests[-1].token_ids)
    assert "<tool_response>\ntwo" in prompt and '"a": 1' in prompt


def test_tokens_are_counted(door: tuple[DoorUnderTest, anthropic.Anthropic]) -> None:
    """The count is the whole prompt of the message."""
    made, client = door
    counted = client.messages.count_tokens(model="tiny", messages=ASK["messages"], system="Be brief.").input_tokens
    client.messages.create(**ASK, system="Be brief.")
    assert counted == len(made.source.requests[0].token_ids)


def test_errors_are_those_of_the_client(door: tuple[DoorUnderTest, anthropic.Anthropic]) -> None:
    """Each status is the exception that users of the client catch."""
    made, client = door
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**ASK, extra_body={"temperature": -1})
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**{**ASK, "model": "other"})
    with pytest.raises(anthropic.AuthenticationError, match="API key"):
        client.with_options(api_key="wrong").messages.create(**ASK)
    made.source.fails = QueueFullError(3, 3, 2.0)
    with pytest.raises(anthropic.RateLimitError) as caught:
        client.messages.create(**ASK, stream=True)
    assert caught.value.response.headers["retry-after"] == "2"


@pytest.mark.parametrize(
    ("fields", "status", "kind", "named"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, 400, "invalid_request_error", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0]",
        ),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400, "invalid_request_error", "thinking"),
        ({"stop": ["a"]}, 400, "invalid_request_error", "stop"),
        ({"surprise": 1}, 400, "invalid_request_error", "surprise"),
        ({"model": "other"}, 404, "not_found_error", "other"),
    ],
)
def test_errors_come_in_anthropics_envelope(fields: dict[str, Any], status: int, kind: str, named: str) -> None:
    """Type, message with the parameter's name, and the request's id."""
    response = post(make_door(), **fields)
    body = response.json()
    assert response.status_code == status and body.keys() == {"type", "error", "request_id"}, body
    assert (body["type"], body["error"]["type"]) == ("error", kind) and named in body["error"]["message"]
    assert body["request_id"] == response.headers["x-request-id"] == response.headers["request-id"]


def test_paths_and_methods_that_are_not_there() -> None:
    """Also what no handler sees is in the envelope of its API."""
    door = make_door()
    assert door.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    assert door.post("/v1/messages/batches", {}).json()["error"]["type"] == "not_found_error"


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    """The event is named error, as the client expects."""
    text = post(make_door(fails=EngineFailedError("no memory"), fails_after=3), stream=True).text
    last = text.strip().rpartition("\n\n")[2]
    assert last.startswith("event: error\n")
    assert json.loads(last.partition("data: ")[2])["error"] == {"type": "overloaded_error", "message": "no memory"}
