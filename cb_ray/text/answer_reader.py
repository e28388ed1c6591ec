"""What a model writes, taken apart as it comes: what it thinks, what it says, what it calls.

Owns `AnswerStyle` (how a model was taught to write these, told from its chat template) and the readers. A tokenizer that brings a
response template is read by transformers' own `ResponseParser`; the others by the small parsers of this floor. Knows text and the
codec; no JSON of any API.

    "<think>\\nHm.\\n</think>\\n\\nIt is 4."  ─▶  Thought("Hm."), "It is 4."
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from .call_finders import PYTHON_TAG, BareCallFinder, CallStream
from .codec import TextCodec
from .tools import HERMES, LLAMA3, OPEN, CallFinder, CallForm, FoundCall, MoreArguments, PlainText, ToolCallFinder, overlap

logger = logging.getLogger(__name__)
THINK, THINK_END = "<think>", "</think>"
_THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
_TAIL_TOKENS = 4096  # of a prompt, in which a response template looks for the beginning of the answer


@dataclass(frozen=True, slots=True)
class Thought:
    """Something the model thought before it spoke."""

    text: str


Part = str | Thought | FoundCall | MoreArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """How a model writes. `form`: of its calls; None: in a way that only its response template can read, or nobody."""

    form: CallForm | None
    thinks: bool
    template: Any = None  # transformers' loaded response template
    has_marks: bool = False  # some of its marks are special tokens, which text leaves out unless it is asked to keep them

    @property
    def can_call(self) -> bool:
        """Whether calls that it writes by itself can be found."""
        return self.form is not None or (self.template is not None and "tool_calls" in self.template.fields)


@lru_cache(maxsize=8)
def style_of(codec: TextCodec) -> AnswerStyle:
    """The style of the model that this codec belongs to."""
    source = codec.chat_template or ""
    template = _response_template(codec)
    form: CallForm | None = None
    if "tools" not in source or (OPEN in source and "<function=" not in source):
        form = HERMES  # its template teaches it, or we do
    elif PYTHON_TAG in source or ("ipython" in source and '"parameters"' in source):
        form = LLAMA3
    thinks = THINK_END in source
    marks = [
        mark
        for mark, used in ((THINK, thinks), (THINK_END, thinks), (OPEN, form is HERMES), (PYTHON_TAG, form is LLAMA3))
        if used
    ]
    has_marks = template is not None or any(special_id(codec, mark) is not None for mark in marks)
    return AnswerStyle(form=form, thinks=thinks, template=template, has_marks=has_marks)


def special_id(codec: TextCodec, text: str) -> int | None:
    """The id of the special token that `text` is, if it is one."""
    token_id = codec.backend.token_to_id(text)
    if token_id is None:
        return None
    added = codec.backend.get_added_tokens_decoder().get(token_id)
    return token_id if added is not None and added.special else None


def _response_template(codec: TextCodec) -> Any:
    template = getattr(codec.tokenizer, "response_template", None)
    if template is None:
        return None
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        return load_response_template(template)
    except ValueError as error:
        logger.warning("the tokenizer's response template cannot be used, so answers stay as they are written: %s", error)
        return None


def ends_in_thought(prompt: str) -> bool:
    """Whether a rendered prompt leaves the model in the middle of thinking."""
    return prompt.rstrip().endswith(THINK)


class Reader(Protocol):
    """Text in, parts out. `thought_end`: characters of what was pushed that were thought; None while it may still be thinking."""

    thought_end: int | None

    @property
    def num_calls(self) -> int: ...
    def push(self, text: str) -> list[Part]: ...
    def finish(self) -> list[Part]: ...


def reader_for(
    codec: TextCodec,
    prompt: Sequence[int],
    *,
    names: Collection[str] = (),
    single: bool = False,
    forced: CallForm | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> Reader:
    """The reader of one answer to `prompt` (token ids). `names`: functions that may be called; `forced`: the form that a grammar
    holds the calls to; `single`: at most one call.
    """
    style = style_of(codec)
    if style.template is not None and forced is None:
        return TemplateReader(style.template, codec.decode(prompt[-_TAIL_TOKENS:]), names, tools=tools, single=single)
    finder: CallFinder = PlainText()
    if forced is not None:
        finder = CallStream(forced)
    elif names and style.form is not None:
        finder = (ToolCallFinder if style.form is HERMES else BareCallFinder)(names, single=single)
    if not style.thinks:
        return AnswerReader(finder, "answer")
    inside = ends_in_thought(codec.decode(prompt[-8:]))
    return AnswerReader(finder, "thought" if inside else "begin")


class AnswerReader:
    """Thoughts between tags, then what a finder makes of the rest. Text that may be the beginning of a tag is held back."""

    def __init__(self, finder: CallFinder, state: Literal["begin", "thought", "answer"]) -> None:
        self._finder = finder
        self._state: str = state
        self._rest = ""
        self._said = False  # something of the thought, or of the answer after it
        self._pushed = 0
        self.thought_end: int | None = 0 if state == "answer" else None

    @property
    def num_calls(self) -> int:
        return self._finder.num_calls

    def push(self, text: str) -> list[Part]:
        """What is now known."""
        self._pushed += len(text)
        if self._state == "answer":
            return self._answer(text)
        self._rest += text
        found: list[Part] = []
        if self._state == "begin":
            self._begin(found)
        if self._state == "thought":
            self._think(found)
        return found

    def finish(self) -> list[Part]:
        """The rest, now that no more text comes."""
        rest, self._rest = self._rest, ""
        if self._state == "thought":
            self.thought_end = self._pushed
            rest = rest.strip("\n") if not self._said else rest.rstrip()
            return [*([Thought(rest)] if rest else []), *self._finder.finish()]
        if self._state == "begin":
            self.thought_end = 0
        return [*self._answer(rest), *self._finder.finish()]

    def _begin(self, found: list[Part]) -> None:
        begun = self._rest.lstrip()
        if begun.startswith(THINK):
            self._state, self._rest = "thought", begun[len(THINK) :]
        elif not THINK.startswith(begun):
            self._state, self.thought_end = "answer", 0
            rest, self._rest = self._rest, ""
            self._said = True  # spaces before an answer without thoughts are the model's
            found += self._answer(rest)

    def _think(self, found: list[Part]) -> None:
        if not self._said:
            self._rest = self._rest.lstrip("\n")
        thought, mark, after = self._rest.partition(THINK_END)
        if not mark:
            thought = self._rest[: len(self._rest) - overlap(self._rest, THINK_END)].rstrip()
            self._rest = self._rest[len(thought) :]
        else:
            thought = thought.rstrip()
        if thought:
            self._said = True
            found.append(Thought(thought))
        if mark:
            self._state, self._rest, self._said = "answer", "", False
            self.thought_end = self._pushed - len(after)
            found += self._answer(after)

    def _answer(self, text: str) -> list[Part]:
        if not self._said and self._state == "answer" and self.thought_end:
            text = text.lstrip()  # the empty lines between thought and answer
        self._said = self._said or bool(text)
        return list(self._finder.push(text)) if text else []


class TemplateReader:
    """An answer as the tokenizer's response template reads it. What the template cannot parse stays text."""

    def __init__(
        self, template: Any, prefix: str, names: Collection[str], *, tools: Sequence[dict[str, Any]] = (), single: bool = False
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._parser = ResponseParser(template, prefix=prefix, tools=list(tools))
        self._names, self._single = frozenset(names), single
        self._raw = ""  # of the region that is parsed when it closes
        self._lost = ""
        self._pushed = 0
        self.num_calls = 0
        self.thought_end: int | None = None

    def push(self, text: str) -> list[Part]:
        """What is now known."""
        self._pushed += len(text)
        try:
            return self._parts(self._parser.feed(text))
        except Exception as error:  # a template is its author's program: whatever it raises is about this answer
            return self._unread(error, text)

    def finish(self) -> list[Part]:
        """The rest, now that no more text comes."""
        try:
            _, events = self._parser.finalize()
            found = self._parts(events)
        except Exception as error:
            found = self._unread(error, "")
        if self.thought_end is None:
            self.thought_end = 0
        return found

    def _unread(self, error: Exception, text: str) -> list[Part]:
        logger.info("the response template could not read an answer: %s", type(error).__name__)
        raw, self._raw = self._raw or text, ""
        return [raw] if raw else []

    def _parts(self, events: Sequence[dict[str, Any]]) -> list[Part]:
        found: list[Part] = []
        for event in events:
            kind, name = event["type"], event["field"]
            if kind == "region_chunk":
                if name in _THOUGHT_FIELDS:
                    found.append(Thought(event["text"]))
                    self.thought_end = self._pushed
                elif event["dirty"]:
                    self._raw += event["text"]
                elif name == "content":
                    found.append(event["text"])
            elif kind == "region_close" and event["field"] == "tool_calls":
                found += self._calls(event["value"])
                self._raw = ""
        return found

    def _calls(self, value: Any) -> list[Part]:
        found: list[Part] = []
        for item in value if isinstance(value, list) else [value]:
            function = item.get("function", item) if isinstance(item, dict) else {}
            arguments = function.get("arguments") or {}
            if function.get("name") not in self._names:
                return [*found, self._raw] if self._raw else found
            if not (self._single and self.num_calls):
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                found.append(FoundCall(name=function["name"], arguments=text))
                self.num_calls += 1
        return found
