"""Tool calls as text: showing tools to models whose template does not, and finding calls in what a model writes.

Owns the forms of calls. Hermes, Qwen and SmolLM2 were trained on the first, Llama 3 on the second:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

    {"name": "add", "parameters": {"a": 1, "b": 2}}

Knows nothing but text and JSON. What looks like a call and is none stays text: nothing that a model wrote gets lost.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_MANUAL = """You can call functions. These are described here, one JSON object per line:
<tools>
{tools}
</tools>
To call a function, write its name and arguments as JSON between tags, like this:
<tool_call>
{{"name": "function", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCall:
    """A call that a model wrote; `arguments` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreArguments:
    """The next piece of the last call's arguments."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a model writes a call: opening, head with the name, a JSON object, tail. Further calls follow after `between`."""

    opening: str  # "": an answer that calls begins with the head
    before_name: str
    after_name: str
    tail: str
    between: str


HERMES = CallForm(opening=OPEN, before_name='\n{"name": ', after_name=', "arguments": ', tail="}\n" + CLOSE, between="\n")
LLAMA3 = CallForm(opening="", before_name='{"name": ', after_name=', "parameters": ', tail="}", between="; ")


class CallFinder(Protocol):
    """Splits text that comes in pieces into text and calls. A call may come in parts: what follows it then are its arguments."""

    num_calls: int

    def push(self, text: str) -> list[str | FoundCall | MoreArguments]: ...
    def finish(self) -> list[str | FoundCall | MoreArguments]: ...


class PlainText:
    """For conversations without tools: all is text."""

    num_calls = 0

    def push(self, text: str) -> list[str | FoundCall | MoreArguments]:
        return [text] if text else []

    def finish(self) -> list[str | FoundCall | MoreArguments]:
        return []


class ToolCallFinder:
    """Splits text that comes in pieces into plain text and calls of functions in `names`.

    Text that may be the beginning of a call is held back until it is known. Spaces around calls are not content. With `single`,
    all that follows the first call is left out. Without names all is text.
    """

    def __init__(self, names: Collection[str], *, single: bool = False) -> None:
        self._names, self._single = frozenset(names), single
        self._rest = ""  # not yet known to be text or call
        self.num_calls = 0

    def push(self, text: str) -> list[str | FoundCall | MoreArguments]:
        """What is now known: text and calls, in order."""
        if not self._names:
            return [text] if text else []
        self._rest += text
        found: list[str | FoundCall] = []
        while self._step(found):
            pass
        return _joined(found)

    def finish(self) -> list[str | FoundCall | MoreArguments]:
        """The rest, now that no more text comes. A call whose end tag never came counts if its JSON is whole."""
        rest, self._rest = self._rest, ""
        found: list[str | FoundCall] = []
        before, tag, body = rest.partition(OPEN)
        call = self._parse(body.removesuffix(CLOSE)) if tag else None
        self._say(found, before if call is not None else rest)
        if call is not None:
            self._call(found, call)
        return _joined(found)

    def _step(self, found: list[str | FoundCall]) -> bool:
        """Decide about the beginning of the rest; False when more text is needed."""
        start = self._rest.find(OPEN)
        if start < 0:
            keep = overlap(self._rest, OPEN)
            text, self._rest = self._rest[: len(self._rest) - keep], self._rest[len(self._rest) - keep :]
            trailing = len(text) - len(text.rstrip())  # may turn out to be the space before a call
            text, self._rest = text[: len(text) - trailing], text[len(text) - trailing :] + self._rest
            self._say(found, text)
            return False
        end = self._rest.find(CLOSE, start)
        if end < 0:
            self._say(found, self._rest[:start].rstrip())
            self._rest = self._rest[start:]
            return False
        before, body, after = self._rest[:start], self._rest[start + len(OPEN) : end], self._rest[end + len(CLOSE) :]
        call = self._parse(body)
        self._say(found, before.rstrip() if call is not None else self._rest[: end + len(CLOSE)])
        if call is not None:
            self._call(found, call)
        self._rest = after
        return True

    def _say(self, found: list[str | FoundCall], text: str) -> None:
        if self.num_calls:
            text = "" if self._single else text if text.strip() else ""
        if text:
            found.append(text)

    def _call(self, found: list[str | FoundCall], call: FoundCall) -> None:
        if not (self._single and self.num_calls):
            found.append(call)
            self.num_calls += 1

    def _parse(self, body: str) -> FoundCall | None:
        try:
            return as_call(json.loads(body), self._names)
        except (ValueError, RecursionError):
            return None


def as_call(value: Any, names: Collection[str]) -> FoundCall | None:
    """A JSON value as a call of one of `names`, if it is one."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as text, as OpenAI's dialect has them
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return FoundCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def spell_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows nothing of tools: tools in the system turn, calls and their results as text."""
    turns = [_spelled(message) for message in messages]
    if not tools:
        return turns
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    manual = _MANUAL.format(tools=lines)
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{manual}"}, *turns[1:]]
    return [{"role": "system", "content": manual}, *turns]


def _spelled(message: Mapping[str, Any]) -> dict[str, Any]:
    turn = dict(message)
    if turn["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
    calls = [call["function"] for call in turn.pop("tool_calls", ())]
    if calls:
        told = (json.dumps({"name": call.get("name"), "arguments": call.get("arguments")}, ensure_ascii=False) for call in calls)
        turn["content"] = "\n".join(filter(None, [turn["content"], *(f"{OPEN}\n{call}\n{CLOSE}" for call in told)]))
    return turn


def overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` that begins `tag`."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


def _joined(found: Sequence[str | FoundCall]) -> list[str | FoundCall | MoreArguments]:
    """Neighbouring texts as one."""
    joined: list[str | FoundCall | MoreArguments] = []
    for item in found:
        if isinstance(item, str) and joined and isinstance(joined[-1], str):
            joined[-1] += item
        else:
            joined.append(item)
    return joined
