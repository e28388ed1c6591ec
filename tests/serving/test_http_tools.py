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


NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_bind_the_engine(choice: Any) -> None:
    """A forced call is a grammar of the request, and its arguments stream while they are written."""
    door = make_door(model=ROOMY, says=CALL)
    message = door.chat(tools=TOOLS, tool_choice=choice).json()["choices"][0]["message"]
    grammar = door.source.requests[0].sampling.grammar
    assert grammar is not None and grammar.param == "tools" and '\\"add\\"' in grammar.text
    assert message["content"] is None and message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    deltas = [c["delta"] for e in events(door.chat(tools=TOOLS, tool_choice=choice, stream=True)) for c in e["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["function"].get("name") for call in calls] == ["add"] + [None] * (len(calls) - 1) and len(calls) > 3
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert {call["index"] for call in calls} == {0} and [("id" in call) for call in calls].count(True) == 1


def test_a_forced_call_that_was_cut_off() -> None:
    """finish_reason length: what was written of the arguments comes out."""
    door = make_door(model=ROOMY, says=CALL)
    length = len(door.model.codec.encode('<tool_call>\n{"name": "add", "arguments": {"a"'))
    choice = door.chat(tools=TOOLS, tool_choice=NAMED, max_tokens=length).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a"'}


@pytest.mark.parametrize(
    "choice", ["any", {"type": "function"}, {"type": "function", "function": {"name": "other"}}, {"type": "custom"}, 7]
)
def test_choices_that_choose_nothing(choice: Any) -> None:
    """A 400 that names tool_choice."""
    assert error_of(make_door(model=ROOMY).chat(tools=TOOLS, tool_choice=choice))["param"] == "tool_choice"


def test_strict_tools_bind_calls_that_the_model_makes_by_itself() -> None:
    """strict: true is kept to with tool_choice auto as well; without it nothing binds."""
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    door = make_door(model=ROOMY, says=f"I add.\n{CALL}")
    message = door.chat(tools=strict).json()["choices"][0]["message"]
    door.chat(tools=TOOLS)
    bound, free = (request.sampling.grammar for request in door.source.requests)
    assert bound is not None and free is None
    assert message["content"] == "I add." and message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
