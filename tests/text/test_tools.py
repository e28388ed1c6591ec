"""Calls in what a model writes: found whole, however the text arrives, and nothing else is lost or held back for long."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.text.answer_reader import style_of
from cb_ray.text.chat import render_chat
from cb_ray.text.tools import FoundCall, ToolCallFinder, spell_out
from tests.text.tokenizers_made import byte_level

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}\n</tool_call>'
NO_ARGUMENTS = '<tool_call>{"name": "now"}</tool_call>'
FOUND_ADD = FoundCall(name="add", arguments='{"a": 1, "b": [2, "é"]}')
FOUND_NOW = FoundCall(name="now", arguments="{}")


def find(pieces: list[str], *, single: bool = False) -> list[str | FoundCall]:
    """All that is found in `pieces`, neighbouring texts as one."""
    finder = ToolCallFinder({"add", "now"}, single=single)
    found = [item for piece in pieces for item in finder.push(piece)] + finder.finish()
    joined: list[str | FoundCall] = []
    for item in found:
        if isinstance(item, str) and joined and isinstance(joined[-1], str):
            joined[-1] += item
        else:
            joined.append(item)
    return joined


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("plain text, a < b \n", ["plain text, a < b \n"]),
        (ADD, [FOUND_ADD]),
        (f"Let me see.\n{ADD}\n{NO_ARGUMENTS}\n", ["Let me see.", FOUND_ADD, FOUND_NOW]),
        (ADD.removesuffix("</tool_call>"), [FOUND_ADD]),
        (ADD.removesuffix("call>"), ["<tool_call>\n" + ADD.split("\n")[1] + "\n</tool_"]),
        ("<tool_call>not json</tool_call> a", ["<tool_call>not json</tool_call> a"]),
        (
            '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
            ['<tool_call>{"name": "other", "arguments": {}}</tool_call>'],
        ),
        ('<tool_call>{"name": ["add"]}</tool_call>', ['<tool_call>{"name": ["add"]}</tool_call>']),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', [FoundCall(name="add", arguments="{}")]),
        (
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            ['<tool_call>{"name": "add", "arguments": [1]}</tool_call>'],
        ),
        ('<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', [FoundCall(name="add", arguments='{"a": 1}')]),
        ("<tool_call>" * 3, ["<tool_call>" * 3]),
    ],
)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_calls_do_not_depend_on_the_pieces(text: str, found: list[str | FoundCall], cuts: list[int]) -> None:
    """However a text arrives: well-formed calls of known functions are calls, everything else is text, to the letter."""
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
    assert find(pieces) == found


def test_text_is_not_held_back_without_reason() -> None:
    """Only spaces and what may become a tag wait; words come at once."""
    finder = ToolCallFinder({"add"})
    assert finder.push("Hello wor") == ["Hello wor"]
    assert finder.push("ld <tool") == ["ld"]
    assert finder.push("box>") == [" <toolbox>"]


def test_a_single_call() -> None:
    """parallel_tool_calls: false leaves out all that follows the first call."""
    assert find([f"First {ADD} and {NO_ARGUMENTS}"], single=True) == ["First", FOUND_ADD]


def test_without_tools_all_is_text_at_once() -> None:
    """A conversation without tools is not read for calls."""
    assert ToolCallFinder(()).push(f"a {ADD} ") == [f"a {ADD} "]


def test_templates_without_tools_get_them_as_text() -> None:
    """A model whose template drops tools sees them in its system turn, and its earlier calls and their results in their turns."""
    codec = byte_level(420, "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    tool = {"type": "function", "function": {"name": "add", "description": "Adds."}}
    text = render_chat(codec, turns, tools=[tool])
    assert text.startswith("[system:Be brief.\n\n") and json.dumps(tool["function"]) in text
    assert '[assistant:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>]' in text
    assert text.endswith("[user:<tool_response>\n3\n</tool_response>]")
    assert find([text.partition("[assistant:")[2].partition("]")[0]]) == [FoundCall(name="add", arguments='{"a": 1}')]


def test_tools_alone_make_a_system_turn() -> None:
    """A conversation without a system turn gets one for its tools, and none without tools."""
    turns = [{"role": "user", "content": "a"}]
    assert [turn["role"] for turn in spell_out(turns, [{"function": {"name": "f"}}])] == ["system", "user"]
    assert spell_out(turns, ()) == turns


@pytest.mark.parametrize(
    ("template", "can"),
    [
        ("plain", True),
        ("{{ tools }} as <tool_call>", True),
        ("{{ tools }} as <|python_tag|>", True),
        ("{{ tools }} as <tool_call><function=f>", False),
        ("{{ tools }} as [TOOL_CALLS]", False),
    ],
)
def test_forms_of_calls_that_can_be_read(template: str, can: bool) -> None:
    """A template that teaches another form of calls is not pretended to be understood."""
    assert style_of(byte_level(420, template)).can_call is can
