"""Grammars of whole answers: what a model may think first, then the calls it must make or the text it may say.

Owns the composition, in Lark's notation as llguidance reads it. Knows how models write (`AnswerStyle`) and grammars as values;
compiles nothing.

    response_format            answer
    tool_choice required       call (between call)*
    auto, tools with strict    (text <tool_call> call)* text
    and before each of them    (<think> … </think>)?         where the model thinks
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..grammar import JSON_WHITESPACE, Grammar, literal
from .answer_reader import THINK, THINK_END, special_id, style_of
from .codec import TextCodec
from .tools import HERMES, CallForm


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFunction:
    """A function that may be called. `schema`: JSON Schema of its arguments; with `strict` all of it must be enforceable."""

    name: str
    schema: Mapping[str, Any]
    strict: bool = False


def call_form(
    codec: TextCodec, *, answer: Grammar | None, functions: Sequence[ToolFunction] = (), forced: bool = False
) -> CallForm | None:
    """The form that `answer_grammar` holds calls to; None where it leaves them to the model, or there are none."""
    style = style_of(codec)
    willing = bool(functions) and style.can_call and (answer is not None or any(f.strict for f in functions))
    return style.form or HERMES if forced or willing else None


def answer_grammar(
    codec: TextCodec,
    *,
    answer: Grammar | None,
    functions: Sequence[ToolFunction] = (),
    forced: bool = False,
    single: bool = False,
    thinking: bool = False,
) -> Grammar | None:
    """The grammar of an answer; None where nothing binds it.

    `answer` binds what is said. `functions` may be called; `forced`: they must be, `single`: once at most. `thinking`: the prompt
    ends inside a thought, which comes first.
    """
    form = call_form(codec, answer=answer, functions=functions, forced=forced)
    thinks = thinking or style_of(codec).thinks
    if form is None and (answer is None or not thinks):
        return answer
    rules: list[str] = []
    extra: list[dict[str, Any]] = []
    start = "text" if answer is None or forced else _answer_rule(answer, rules, extra)
    if form is not None:
        rules.append("call: " + " | ".join(_call(form, function) for function in functions))
        start = _with_calls(codec, form, start, rules, forced=forced, single=single)
    if thinks:
        start = _with_thought(codec, start, rules, thinking=thinking)
    if "text" in start:
        rules.append("text: /(?s:.*)/")
    source = "\n".join([f"start: {start}", *rules])
    param = "tools" if answer is None or form is not None else answer.param
    if not extra:
        return Grammar.lark(source, param=param)
    grammars = json.dumps({"grammars": [{"name": "whole", "lark_grammar": source}, *extra]}, ensure_ascii=False)
    return Grammar(kind="llguidance", text=grammars, param=param)


def _answer_rule(answer: Grammar, rules: list[str], extra: list[dict[str, Any]]) -> str:
    if answer.kind == "json_schema":
        rules.append(f"answer: {_json(json.loads(answer.text), lenient=answer.lenient)}")
        return "answer"
    source = f"start: /{_slashed(answer.text)}/" if answer.kind == "regex" else answer.text
    extra.append({"name": "answer", "lark_grammar": source})
    return "@answer"


def _with_calls(codec: TextCodec, form: CallForm, body: str, rules: list[str], *, forced: bool, single: bool) -> str:
    opening = special_id(codec, form.opening) if form.opening else None
    mark = f"<[{opening}]> " if opening is not None else f"{literal(form.opening)} " if form.opening else ""
    if forced or body != "text":
        calls = f"{mark}call" if single else f"{mark}call ({literal(form.between)} {mark}call)*"
        return calls if forced else f"({calls}) | {body}"
    if not form.opening:  # only an answer that begins as a call is one
        rules.append("said: /([^{](?s:.*))?/")
        return "call | said" if single else f"call ({literal(form.between)} call)* | said"
    if opening is not None:
        rules.append(f"begun: /(?s:.*)/ {mark}")
    else:
        rules.append(f"begun[lazy]: /(?s:.*){_slashed(re.escape(form.opening))}/")
    return "begun call | text" if single else "(begun call)* text"


def _with_thought(codec: TextCodec, body: str, rules: list[str], *, thinking: bool) -> str:
    end, begin = special_id(codec, THINK_END), special_id(codec, THINK)
    if end is not None:
        rules.append(f"thought: /(?s:.*)/ <[{end}]> /\\s*/")
    else:
        rules += [f"thought: thinking /\\s*/\nthinking[lazy]: /(?s:.*){_slashed(re.escape(THINK_END))}/"]
    mark = literal(THINK) if begin is None else f"<[{begin}]>"
    return f"thought ({body})" if thinking else f"({mark} thought)? ({body})"


def _call(form: CallForm, function: ToolFunction) -> str:
    head = literal(form.before_name + json.dumps(function.name) + form.after_name)
    return f"{head} {_json(_as_object(function.schema), lenient=not function.strict)} {literal(form.tail)}"


def _as_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments are an object, whatever their schema left unsaid."""
    return schema if {"type", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys() else {"type": "object", **schema}


def _json(schema: Any, *, lenient: bool) -> str:
    if isinstance(schema, Mapping):
        options = {"whitespace_pattern": JSON_WHITESPACE, "lenient": lenient, **schema.get("x-guidance", {})}
        schema = {**schema, "x-guidance": options}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _slashed(pattern: str) -> str:
    """A regular expression between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")
