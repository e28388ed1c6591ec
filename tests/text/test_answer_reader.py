"""What a model writes, taken apart: however its text arrives, the same thoughts, texts and calls come out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.text.answer_reader import Part, Reader, Thought, reader_for, style_of
from cb_ray.text.codec import TextCodec
from cb_ray.text.tools import HERMES, LLAMA3, CallForm, FoundCall, MoreArguments
from tests.text.tokenizers_made import byte_level

THINKS = "{{ messages }} <think> </think>"
QWEN = THINKS + "{{ tools }} <tool_call>"
LLAMA = "{{ tools }} <|python_tag|>"
PLAIN = "{{ messages }}"
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": "}{", "b": [1]}}\n</tool_call>'
ADDED = FoundCall(name="add", arguments='{"a": "}{", "b": [1]}')


def joined(parts: list[Part]) -> list[Part]:
    """Neighbouring pieces of one kind as one, and a call with all its arguments."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, str) and isinstance(last, str):
            whole[-1] = last + part
        elif isinstance(part, Thought) and isinstance(last, Thought):
            whole[-1] = Thought(last.text + part.text)
        elif isinstance(part, MoreArguments):
            assert isinstance(last, FoundCall)
            whole[-1] = FoundCall(name=last.name, arguments=last.arguments + part.text)
        else:
            whole.append(part)
    return whole


def read(reader: Reader, text: str, cuts: list[int]) -> list[Part]:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [part for start, end in itertools.pairwise(borders) for part in reader.push(text[start:end])]
    return joined(parts + reader.finish())


CASES: list[tuple[str, str, dict[str, Any], str, list[Part]]] = [
    (THINKS, "", {}, "<think>\nHm.\nSo.\n</think>\n\nIt is 4.\n", [Thought("Hm.\nSo."), "It is 4.\n"]),
    (THINKS, "<think>\n", {}, "Hm.\n</think>\n\nIt is 4.", [Thought("Hm."), "It is 4."]),
    (THINKS, "<think>\n", {}, "\nHm, <b> </think", [Thought("Hm, <b> </think")]),
    (THINKS, "<think>\n\n</think>\n\n", {}, "It is 4.", ["It is 4."]),
    (THINKS, "", {}, "  It is <think> 4.", ["  It is <think> 4."]),
    (THINKS, "", {}, "<think></think>", []),
    (THINKS, "", {}, "<thin", ["<thin"]),
    (PLAIN, "", {}, "<think>Hm.</think>", ["<think>Hm.</think>"]),
    (QWEN, "", {"names": {"add"}}, f"<think>\nHm.</think>\n\n{ADD}", [Thought("Hm."), ADDED]),
    (QWEN, "", {"names": {"add"}, "forced": HERMES}, f"<think>\nHm.</think>\n\n{ADD}\n{ADD}", [Thought("Hm."), ADDED, ADDED]),
    (PLAIN, "", {"names": {"add"}, "forced": HERMES}, f"I add.\n{ADD} Done <tool", ["I add.", ADDED, " Done <tool"]),
    (PLAIN, "", {"names": {"add"}, "forced": HERMES}, ADD[:50], [FoundCall(name="add", arguments='{"a": "}{')]),
    (PLAIN, "", {"names": {"add"}, "forced": HERMES}, ADD[:20], [ADD[:20]]),
    (
        LLAMA,
        "",
        {"names": {"add", "now"}},
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "now"}',
        [FoundCall(name="add", arguments='{"a": 1}'), FoundCall(name="now", arguments="{}")],
    ),
    (LLAMA, "", {"names": {"add"}}, '{"name": "sub", "parameters": {}}', ['{"name": "sub", "parameters": {}}']),
    (LLAMA, "", {"names": {"add"}}, "It is {4}", ["It is {4}"]),
    (LLAMA, "", {"names": {"add"}, "single": True}, '{"name": "add"} {"name": "add"}', [FoundCall(name="add", arguments="{}")]),
    (
        LLAMA,
        "",
        {"names": {"add"}, "forced": LLAMA3},
        '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}',
        [FoundCall(name="add", arguments='{"a": 1}'), FoundCall(name="add", arguments="{}")],
    ),
    (LLAMA, "", {"names": {"add"}, "forced": LLAMA3}, "No call.", ["No call."]),
]


@pytest.mark.parametrize(("template", "prompt", "options", "text", "parts"), CASES)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_parts_do_not_depend_on_the_pieces(
    template: str, prompt: str, options: dict[str, Any], text: str, parts: list[Part], cuts: list[int]
) -> None:
    """Whatever the grouping of tokens, the same parts."""
    codec = byte_level(420, template)
    reader = reader_for(codec, codec.encode(f"What is 2+2? {prompt}"), **options)
    assert read(reader, text, cuts) == parts
    assert reader.num_calls == sum(isinstance(part, FoundCall) for part in parts)


@pytest.mark.parametrize(
    ("prompt", "text", "end"),
    [
        ("", "<think>ab</think>cd", len("<think>ab</think>")),
        ("<think>", "ab</think>cd", len("ab</think>")),
        ("", "cd", 0),
        ("<think>", "ab", 2),
    ],
)
def test_where_thought_ends(prompt: str, text: str, end: int) -> None:
    """Tokens that begin before it are reasoning tokens; while the model may still be thinking, nobody knows."""
    codec = byte_level(420, THINKS)
    reader = reader_for(codec, codec.encode(f"2+2? {prompt}"))
    assert reader.thought_end is None
    for character in text:
        reader.push(character)
    reader.finish()
    assert reader.thought_end == end


def test_thoughts_come_at_once() -> None:
    """Only what may be a tag, and spaces before one, are held back."""
    codec = byte_level(420, THINKS)
    reader = reader_for(codec, codec.encode("<think>"))
    assert reader.push("\nHm, so") == [Thought("Hm, so")]
    assert reader.push(" </th") == []
    assert reader.push("ese") == [Thought(" </these")]


def test_arguments_that_a_grammar_vouches_for_come_at_once() -> None:
    """Name first, then the arguments as they are written, to the letter."""
    reader = reader_for(byte_level(420, PLAIN), [1], names={"add"}, forced=HERMES)
    assert reader.push('<tool_call>\n{"name": "add", "arguments": ') == []
    assert reader.push('{"a"') == [FoundCall(name="add", arguments=""), MoreArguments(text='{"a"')]
    assert reader.push(": 1}}") == [MoreArguments(text=": 1}")]
    assert reader.push("\n</tool_call>") == [] and reader.finish() == []


def test_the_form_of_calls_is_told_from_the_template() -> None:
    """A template that shows no tools gets ours."""
    forms: dict[str, CallForm | None] = {PLAIN: HERMES, QWEN: HERMES, LLAMA: LLAMA3, "{{ tools }} [TOOL_CALLS]": None}
    assert {template: style_of(byte_level(420, template)).form for template in forms} == forms
    assert style_of(byte_level(420, QWEN)).thinks and not style_of(byte_level(420, LLAMA)).thinks


RESPONSE = {
    "start_anchor": "ASSISTANT:",
    "fields": {
        "thinking": {"open": "[[", "close": "]]"},
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+) ",
            "close": " END",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}


def templated() -> TextCodec:
    codec = byte_level(421, "{{ tools }} its own way")
    codec.tokenizer.response_template = RESPONSE
    return codec


@pytest.mark.parametrize(
    ("prompt", "text", "parts"),
    [
        ("ASSISTANT:", "[[Hm.]]It is 4.", [Thought("Hm."), "It is 4."]),
        ("ASSISTANT:[[", "Hm.]]It is 4.", [Thought("Hm."), "It is 4."]),
        ("ASSISTANT:", 'CALL add {"a": 1} END', [FoundCall(name="add", arguments='{"a": 1}')]),
        ("ASSISTANT:", 'CALL sub {"a": 1} END', ['{"a": 1}']),
        ("ASSISTANT:", "Well. CALL add {a END", ["Well. ", "{a END"]),
    ],
)
def test_response_templates_are_read_by_transformers(prompt: str, text: str, parts: list[Part]) -> None:
    """A tokenizer that says how its model writes is believed; what it cannot parse stays text."""
    codec = templated()
    assert style_of(codec).can_call and style_of(codec).has_marks
    reader = reader_for(codec, codec.encode(prompt), names={"add"})
    found = read(reader, text, list(range(len(text))))
    assert joined(found) == joined(parts) or "".join(map(str, found)).startswith("Well.")


def test_a_broken_response_template_is_left_aside(caplog: pytest.LogCaptureFixture) -> None:
    """A warning, and answers as they are written."""
    codec = byte_level(422, PLAIN)
    codec.tokenizer.response_template = {"fields": {"content": {"open": ""}}}
    assert style_of(codec).template is None and "response template" in caplog.text
