"""An assistant's turn as segments: reasoning, text and calls, one after another, each opened, continued and closed.

Owns `Segments`. It reads what the chat dialect says (`delta` objects of chunks, or whole messages), so the dialects that speak of
items (Responses) or blocks (Messages) know nothing of tokens, parsers or templates.

    {"content": "Hm"}, {"content": "m"}, {"tool_calls": […]}  ─▶  open text, more "Hm", more "m", close text, open call, more …
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["reasoning", "text", "call"]
Step = Literal["open", "more", "close"]


@dataclass(slots=True, kw_only=True)
class Segment:
    """One part of the turn. `text` is what it holds so far: of a call, its arguments as JSON. `logprobs`: chat's token entries."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    number: int = -1  # of a call, as chat numbers them


class Segments:
    """The segments of one turn. Feed it every delta in order, then `end`."""

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self._open: Segment | None = None

    def feed(self, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None = None) -> Iterator[tuple[Step, Segment, str]]:
        """What a delta adds: (step, segment, new text). Empty texts open nothing."""
        reasoning = delta.get("reasoning_content") or ""
        if reasoning:
            yield from self._more(self._of("reasoning"), reasoning)
        content, entries = delta.get("content") or "", (logprobs or {}).get("content") or []
        if content or (entries and self._open is not None and self._open.kind == "text"):
            yield from self._more(self._of("text"), content, entries)
        for place, call in enumerate(delta.get("tool_calls") or ()):
            yield from self._call(call.get("index", place), call)

    def end(self) -> Iterator[tuple[Step, Segment, str]]:
        """Nothing more comes."""
        if self._open is not None:
            closed, self._open = self._open, None
            yield "close", closed, ""

    def _call(self, number: int, call: Mapping[str, Any]) -> Iterator[tuple[Step, Segment, str]]:
        function = call.get("function") or {}
        known = self._open is not None and self._open.kind == "call" and self._open.number == number
        segment = self._open if known else None
        if segment is None:
            segment = Segment(kind="call", index=-1, call_id=call.get("id") or "", name=function.get("name") or "", number=number)
        yield from self._more(segment, function.get("arguments") or "")

    def _of(self, kind: Kind) -> Segment:
        return self._open if self._open is not None and self._open.kind == kind else Segment(kind=kind, index=-1)

    def _more(self, segment: Segment, text: str, logprobs: Any = ()) -> Iterator[tuple[Step, Segment, str]]:
        if segment is not self._open:
            yield from self.end()
            segment.index = len(self.all)
            self.all.append(segment)
            self._open = segment
            yield "open", segment, ""
        segment.text += text
        new = list(logprobs)
        segment.logprobs += new
        if text or new:
            yield "more", segment, text
