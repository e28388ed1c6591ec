"""Tools over HTTP: calls that the model writes come out as OpenAI's tool calls, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.doors import error_of, events, make_door, make_model

TOOLS = [{"type": "function", "function": {"name": "add", "description": "A sum.", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ROOMY = make_model(context_length=4000)


def test_a_call_in_a_whole_answer() -> None:
    """The call has an id, its function and arguments as text; the content beside it stays, and the reason is tool_calls."""
    choice = make_door(model=ROOMY, says=f"I add.\n{CALL}").chat(tools=TOOLS).json()["choices"][0]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("I add.", "tool_calls")
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})


def test_calls_in_a_stream() -> None:
    """Each call comes once under its own index, without a scrap of its tags in the content."""
    found = events(make_door(model=ROOMY, says=f"{CALL}\n{CALL}").chat(tools=TOOLS, stream=True, tool_choice="auto"))
    deltas = [choice["delta"] for event in found for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1] and len({call["id"] for call in calls}) == 2
    assert {call["function"]["arguments"] for call in calls} == {'{"a": 1}'}
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_one_call_at_most() -> None:
    """parallel_tool_calls: false is kept to."""
    body = make_door(model=ROOMY, says=f"{CALL}\n{CALL}").chat(tools=TOOLS, parallel_tool_calls=False).json()
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1
    assert body["choices"][0]["message"]["content"] is None


def test_plain_text_with_tools() -> None:
    """A model that does not call answers as ever, entries of log-probabilities and all."""
    door = make_door(model=ROOMY)
    choice = door.chat(tools=TOOLS, logprobs=True).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": door.source.says, "refusal": None}
    streamed = [c for event in events(door.chat(tools=TOOLS, logprobs=True, stream=True)) for c in event["choices"]]
    assert [entry for c in streamed if c["logprobs"] for entry in c["logprobs"]["content"]] == choice["logprobs"]["content"]
    assert choice["finish_reason"] == "stop"


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    """tool_choice none: the prompt is as without tools, and what looks like a call is text."""
    door = make_door(model=ROOMY, says=CALL)
    choice = door.chat(tools=TOOLS, tool_choice="none").json()["choices"][0]
    door.chat()
    assert choice["message"]["content"] == CALL and "tool_calls" not in choice["message"]
    assert door.source.requests[0].token_ids == door.source.requests[1].token_ids


def test_a_call_and_its_result_go_back() -> None:
    """What the client sends back, with null content as it got it, reaches the model."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "the result"},
    ]
    door = make_door(model=ROOMY)
    assert door.chat(messages=turns, tools=TOOLS).status_code == 200
    prompt = door.model.codec.decode(door.source.requests[0].token_ids)
    assert "the result" in prompt and '"arguments": {"a": 1}' in prompt and "A sum." in prompt


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_calls_are_refused(choice: Any) -> None:
    """A call cannot be forced without constrained decoding; that is said, not pretended."""
    error = error_of(make_door(model=ROOMY).chat(tools=TOOLS, tool_choice=choice))
    assert error["param"] == "tool_choice" and "not supported" in error["message"]
