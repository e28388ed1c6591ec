"""Grammars of whole answers: what the composed grammars let through, by a real matcher."""

from __future__ import annotations

from typing import Any

import pytest

from cb_ray.grammar import Grammar
from cb_ray.runtime.grammar import GrammarCompiler
from cb_ray.text.codec import TextCodec
from cb_ray.text.grammars import ToolFunction, answer_grammar, call_form
from tests.text.tokenizers_made import byte_level

THINKS = "{{ tools }} <tool_call> <think> </think>"
PLAIN = "{{ messages }}"
LLAMA = "{{ tools }} <|python_tag|>"
DIGIT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ADD = ToolFunction(name="add", schema=DIGIT, strict=True)
ANY = ToolFunction(name="any", schema={})
JSON = Grammar.json_schema(DIGIT)


def call(name: str = "add", arguments: str = '{"a": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def takes(codec: TextCodec, grammar: Grammar | None, text: str) -> bool:
    """Whether an answer may be `text`, whole."""
    assert grammar is not None
    compiler = GrammarCompiler(lambda: codec.tokenizer, codec.size, ())
    matcher = compiler.compile(grammar).matcher.deep_copy()
    tokens = codec.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (PLAIN, {"answer": JSON}, ['{"a": 1}'], ["a", ""]),
    (THINKS, {"answer": JSON}, ['{"a": 1}', '<think>\nHm {.\n</think>\n\n{"a": 1}'], ["<think>Hm.</think>", "Hm.</think>{}"]),
    (THINKS, {"answer": JSON, "thinking": True}, ['Hm.</think>\n\n{"a": 1}'], ['{"a": 1}', "Hm"]),
    (THINKS, {"answer": Grammar.regex("a/b\n|c"), "thinking": True}, ["x</think>a/b\n", "</think>c"], ["a/b\n"]),
    (THINKS, {"answer": Grammar.lark('root ::= "a" | "b"')}, ["<think></think>a", "b"], ["c"]),
    (THINKS, {"answer": Grammar.choice(["yes"])}, ["<think>no</think> yes"], ["<think>no</think> no"]),
    (
        PLAIN,
        {"functions": [ADD, ANY], "forced": True},
        [call(), call() + "\n" + call("any", '{"q": [1]}')],
        ["", call("sub"), "a"],
    ),
    (PLAIN, {"functions": [ADD], "forced": True}, [call()], [call("add", "{}"), call("any"), "x" + call()]),
    (PLAIN, {"functions": [ANY], "forced": True}, [call("any", "{}")], [call("any", "[]"), call("any", "1")]),
    (PLAIN, {"functions": [ADD], "forced": True, "single": True}, [call()], [call() + "\n" + call()]),
    (
        PLAIN,
        {"functions": [ADD, ANY]},
        ["text", f"I add.\n{call()}", call() + call("any", "{}") + "b"],
        [call("add", "{}"), "<tool_call>"],
    ),
    (PLAIN, {"functions": [ADD], "single": True}, ["text", f"I add.\n{call()}"], [call() + call(), call() + "b"]),
    (PLAIN, {"functions": [ANY], "answer": JSON}, ['{"a": 1}', call("any", "{}")], ["text", call("any", "{}") + '{"a": 1}']),
    (THINKS, {"functions": [ADD], "forced": True}, [call(), "<think>Hm</think>\n" + call()], ["<think>" + call()]),
    (THINKS, {"functions": [ADD]}, ["<think>Hm</think>\nNo.", "No.", "<think>Hm</think>\n" + call()], [call("x")]),
    (LLAMA, {"functions": [ADD], "forced": True}, ['{"name": "add", "parameters": {"a": 1}}'], [call()]),
    (LLAMA, {"functions": [ADD]}, ["Hi", "", '{"name": "add", "parameters": {"a": 1}}'], ['{"a": 1}']),
]


@pytest.mark.parametrize(("template", "wish", "good", "bad"), CASES)
def test_what_may_be_answered(template: str, wish: dict[str, Any], good: list[str], bad: list[str]) -> None:
    """Thought first where the model thinks, then what was asked for and nothing else."""
    codec = byte_level(420, template)
    grammar = answer_grammar(codec, **{"answer": None, **wish})
    for text in good:
        assert takes(codec, grammar, text), text
    for text in bad:
        assert not takes(codec, grammar, text), text


def test_marks_that_are_special_tokens() -> None:
    """A tokenizer may have them as special tokens, which no text spells."""
    codec = special_marks()
    wish: dict[str, Any] = {"answer": JSON, "functions": [ADD]}
    grammar = answer_grammar(codec, **wish)
    for text in ('{"a": 1}', '<think>Hm</think>{"a": 1}', f"<think>Hm</think>{call()}", call()):
        assert takes(codec, grammar, text), text
    assert takes(codec, answer_grammar(codec, answer=None, functions=[ADD]), f"Well. {call()} So.")
    assert takes(codec, answer_grammar(codec, answer=JSON, thinking=True), 'Hm</think>{"a": 1}')


def special_marks() -> TextCodec:
    from tests.tiny import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>", "<tool_call>"]})
    tokenizer.chat_template = THINKS
    return TextCodec(tokenizer)


def test_nothing_is_bound_without_a_wish() -> None:
    """Plain chats, and tools that promise nothing, are as free as ever."""
    codec = byte_level(420, THINKS)
    assert answer_grammar(codec, answer=None) is None
    assert answer_grammar(codec, answer=None, functions=[ANY]) is None
    assert call_form(codec, answer=None, functions=[ANY]) is None and call_form(codec, answer=None, functions=[ADD]) is not None


def test_equal_wishes_are_one_grammar() -> None:
    """So that an engine compiles it once."""
    codec = byte_level(420, THINKS)
    assert answer_grammar(codec, answer=JSON, functions=[ADD]) == answer_grammar(codec, answer=JSON, functions=[ADD])
