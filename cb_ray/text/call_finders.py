"""Finding calls in other ways than whole between tags: as a grammar forces them, and as Llama 3 writes them.

Owns `CallStream`, which needs not wait for a call's end because a grammar vouches for it, and `BareCallFinder`, which must. Knows
the forms of calls; no grammar and no model.

    <tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>
    └─ opening ┘└──────── head ──────────────┘└─ 1:1 ─┘└─── tail ────┘
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from .tools import CallForm, FoundCall, MoreArguments, as_call, overlap

Piece = str | FoundCall | MoreArguments
_NAME = r'("(?:[^"\\]|\\.)*")'
PYTHON_TAG = "<|python_tag|>"


class CallStream:
    """Calls in text whose form a grammar has seen to: name and arguments come out while they are written."""

    def __init__(self, form: CallForm) -> None:
        self._form = form
        self._head = re.compile(re.escape(form.before_name) + _NAME + re.escape(form.after_name))
        self._state = "text"
        self._rest = ""
        self._object = _ObjectScanner()
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """What is now known: text, calls, and pieces of their arguments, in order."""
        self._rest += text
        found: list[Piece] = []
        while self._step(found):
            pass
        return found

    def finish(self) -> list[Piece]:
        """The rest, now that no more text comes: of a call that was cut off, what has come out of it stays."""
        rest, self._rest = self._rest, ""
        if self._state == "tail" or (self.num_calls and not rest.strip()):
            return []
        if self._state == "head":
            rest = self._form.opening + rest
        return [rest] if rest else []

    def _step(self, found: list[Piece]) -> bool:
        """Move by one state; False when more text is needed."""
        return {"text": self._text, "head": self._begin, "arguments": self._arguments, "tail": self._end}[self._state](found)

    def _text(self, found: list[Piece]) -> bool:
        opening, rest = self._form.opening, self._rest
        if not opening:
            start = len(rest) - len(rest.lstrip(" \n;"))
            if start == len(rest):
                return False  # spaces so far: they may stand before a call
            if rest[start] == "{":
                self._state, self._rest = "head", rest[start:]
                return True
            found.append(rest)
            self._state, self._rest = "text", ""
            return False
        start = rest.find(opening)
        if start >= 0:
            if rest[:start].strip():
                found.append(rest[:start].rstrip())
            self._state, self._rest = "head", rest[start + len(opening) :]
            return True
        said = rest[: len(rest) - overlap(rest, opening)].rstrip()
        if said:
            found.append(said)
        self._rest = rest[len(said) :]
        return False

    def _begin(self, found: list[Piece]) -> bool:
        head = self._head.match(self._rest)
        if head is None or head.end() == len(self._rest):
            return False
        found.append(FoundCall(name=json.loads(head[1]), arguments=""))
        self.num_calls += 1
        self._object = _ObjectScanner()
        self._state, self._rest = "arguments", self._rest[head.end() :]
        return True

    def _arguments(self, found: list[Piece]) -> bool:
        end = self._object.end_in(self._rest)
        piece, self._rest = (self._rest, "") if end < 0 else (self._rest[:end], self._rest[end:])
        if piece:
            found.append(MoreArguments(text=piece))
        self._state = "arguments" if end < 0 else "tail"
        return end >= 0

    def _end(self, found: list[Piece]) -> bool:
        if len(self._rest) < len(self._form.tail):
            return False
        self._state, self._rest = "text", self._rest[len(self._form.tail) :]
        return True


class _ObjectScanner:
    """Where a JSON object that comes in pieces ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def end_in(self, text: str) -> int:
        """The place after the brace that closes the object, or -1 while it goes on."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return -1


class BareCallFinder:
    """Calls without tags: an answer that is nothing but JSON objects which call functions in `names`. With `single`, the first."""

    def __init__(self, names: Collection[str], *, single: bool = False) -> None:
        self._names, self._single = frozenset(names), single
        self._rest = ""
        self._is_text = False
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Text at once, unless the answer began like a call: then nothing before its end."""
        if self._is_text:
            return [text] if text else []
        self._rest += text
        begun = self._rest.lstrip()
        if not begun or begun[0] == "{" or PYTHON_TAG.startswith(begun) or begun.startswith(PYTHON_TAG):
            return []
        self._is_text = True
        text, self._rest = self._rest, ""
        return [text]

    def finish(self) -> list[Piece]:
        """The calls, or all of it as the text that it is."""
        rest, self._rest = self._rest, ""
        calls = self._calls(rest.strip().removeprefix(PYTHON_TAG).strip())
        if not calls:
            return [rest] if rest else []
        self.num_calls = 1 if self._single else len(calls)
        return list(calls[: self.num_calls])

    def _calls(self, text: str) -> list[FoundCall]:
        decoder, at = json.JSONDecoder(), 0
        calls: list[FoundCall] = []
        while at < len(text):
            try:
                value, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                return []
            call = as_call(value, self._names)
            if call is None:
                return []
            calls.append(call)
            at += len(text[at:]) - len(text[at:].lstrip(" \n\t;,"))
        return calls
