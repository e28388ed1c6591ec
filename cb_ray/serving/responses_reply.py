"""`/v1/responses`: the answer side. A chat's answer as items, whole or as typed events, and what is kept of it.

Owns the `response` object, its events and their numbers. Knows the chat dialect's reply, which it asks for every delta, and the
store's record; no sockets, no store.

    response.created, in_progress ─▶ output_item.added ─▶ content_part.added ─▶ output_text.delta … ─▶ … .done ─▶ response.completed
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from ..errors import CbRayError
from ..text.detokenizer import TextDelta
from .chat_dialect import ChatReply
from .generation import Choice, Written
from .reply import ReplyHead
from .responses_dialect import ResponsesBody
from .segments import Segment, Segments, Step
from .translation import Message

Save = Callable[[dict[str, Any], Sequence[Message]], Awaitable[bool]]  # whether it is kept
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponsesReply:
    """One response in the making. `save` keeps the finished object and the assistant's turn; None: nothing is kept."""

    def __init__(self, head: ReplyHead, body: ResponsesBody, chat: ChatReply, save: Save | None = None) -> None:
        self.head, self.choices = head, chat.choices
        self.extras: Callable[[], dict[str, Any]] | None = None
        self._body, self._chat, self._save = body, chat, save
        self._segments, self._ids = Segments(), dict[int, str]()
        self._number = 0
        self._status, self._details, self._error = "in_progress", None, None
        self._finish: str | None = None
        self._completed_at: int | None = None

    # whole

    def answer(self, written: Sequence[Written]) -> dict[str, Any]:
        """The finished response."""
        if self._status == "in_progress":
            self.conclude(written)
        return self.object()

    def conclude(self, written: Sequence[Written]) -> None:
        """Take over what the one choice wrote."""
        choice = self._chat.whole(self.choices[0], written[0])
        for _ in (*self._segments.feed(choice["message"], choice["logprobs"]), *self._segments.end()):
            pass
        self._end(choice["finish_reason"])

    def fail(self, error: CbRayError) -> None:
        self._status = "failed"
        self._error = {"code": "rate_limit_exceeded" if error.http_status == 429 else "server_error", "message": str(error)}

    def cancel(self) -> None:
        self._status = "cancelled"

    async def settle(self, written: Sequence[Written] | None = None) -> None:
        """All has been generated: keep it, before the client hears that it is done."""
        if written is not None:
            self.conclude(written)
        elif self._status == "in_progress":
            self._end(self._finish)
        if self._save is not None and not await self.save([self.turn()]):
            self._save = None

    async def save(self, turns: Sequence[Message]) -> bool:
        """Keep the response as it stands; whether it is kept."""
        return self._save is not None and await self._save(self.object(), turns)

    # streamed

    def stream_events(self, choice: Choice, delta: TextDelta) -> bytes:
        """The events that a delta adds, with those that open the stream before the first."""
        events: list[dict[str, Any]] = []
        if not self._number:
            events += [self._about("created"), self._about("in_progress")]
        for piece in self._chat.events(choice, delta):
            self._finish = piece["finish_reason"] or self._finish
            for step, segment, text in self._segments.feed(piece["delta"], piece["logprobs"]):
                events += self._events(step, segment, text, piece["logprobs"])
        return b"".join(map(self._written, events))

    def stream_end(self) -> bytes:
        """The rest of the events: what is open is closed, and the response is told as a whole."""
        events = [event for step, segment, text in self._segments.end() for event in self._events(step, segment, text, None)]
        self._end(self._finish)
        return b"".join(map(self._written, [*events, self._about(self._status)]))

    def stream_error(self, error: CbRayError) -> bytes:
        """The last event of a stream that failed on its way."""
        self.fail(error)
        opening = [] if self._number else [self._about("created")]
        return b"".join(map(self._written, [*opening, self._about("failed")]))

    # both

    def turn(self) -> Message:
        """The assistant's turn as a chat message, for the response that goes on from this one."""
        turn: Message = {"role": "assistant"}
        for segment in self._segments.all:
            if segment.kind == "call":
                function = {"name": segment.name, "arguments": segment.text}
                turn.setdefault("tool_calls", []).append({"id": segment.call_id, "type": "function", "function": function})
            else:
                name = "content" if segment.kind == "text" else "reasoning_content"
                turn[name] = turn.get(name, "") + segment.text
        return turn if len(turn) > 1 else {**turn, "content": ""}

    def object(self) -> dict[str, Any]:
        """The response as it stands."""
        body, head = self._body, self.head
        known = {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "completed_at": self._completed_at,
            "status": self._status,
            "background": bool(body.background),
            "error": self._error,
            "incomplete_details": self._details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": head.model,
            "output": [self._item(segment) for segment in self._segments.all],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self._save is not None,
            "temperature": self._sampling("temperature"),
            "text": {"format": _format(body)},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._sampling("top_p"),
            "truncation": "disabled",
            "usage": self._usage() if self._status in ("completed", "incomplete") else None,
            "user": body.user,
        }
        return known if self.extras is None else known | {"cb_ray": self.extras()}

    def _end(self, finish: str | None) -> None:
        if self._status != "in_progress":
            return
        self._status = "incomplete" if finish == "length" else "completed"
        self._details = {"reason": "max_output_tokens"} if finish == "length" else None
        self._completed_at = int(time.time()) if self._status == "completed" else None

    def _usage(self) -> dict[str, Any]:
        usage = self._chat.usage()
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},  # as OpenAI counts: nothing is charged
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
        }

    def _sampling(self, name: str) -> float:
        return getattr(self.choices[0].request.sampling, name)

    def _id(self, segment: Segment) -> str:
        return self._ids.setdefault(segment.index, f"{_PREFIXES[segment.kind]}_{uuid.uuid4().hex}")

    def _part(self, segment: Segment) -> dict[str, Any]:
        if segment.kind == "reasoning":
            return {"type": "reasoning_text", "text": segment.text}
        return {"type": "output_text", "text": segment.text, "annotations": [], "logprobs": segment.logprobs}

    def _item(self, segment: Segment, status: str | None = None) -> dict[str, Any]:
        """A segment as an output item. Whether it ended is the response's own status, unless `status` says otherwise."""
        status = status or ("completed" if self._status == "in_progress" else self._status)
        status = "incomplete" if status in ("failed", "cancelled") else status
        head = {"id": self._id(segment), "status": status}
        if segment.kind == "call":
            call = {"call_id": segment.call_id, "name": segment.name, "arguments": segment.text}
            return {**head, "type": "function_call", **call}
        parts = [self._part(segment)] if status != "in_progress" else []
        if segment.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": parts}
        return {**head, "type": "message", "role": "assistant", "content": parts}

    def _events(self, step: Step, segment: Segment, text: str, logprobs: Mapping[str, Any] | None) -> Iterable[dict[str, Any]]:
        place = {"item_id": self._id(segment), "output_index": segment.index}
        inside = place if segment.kind == "call" else {**place, "content_index": 0}
        name = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}[segment.kind]
        if step == "open":
            item = self._item(segment, "in_progress")
            yield {"type": "response.output_item.added", "output_index": segment.index, "item": item}
            if segment.kind != "call":
                yield {"type": "response.content_part.added", **inside, "part": self._part(segment)}
        elif step == "more":
            new = {"logprobs": (logprobs or {}).get("content") or []} if segment.kind == "text" else {}
            yield {"type": f"response.{name}.delta", **inside, "delta": text, **new}
        else:
            whole = {"arguments": segment.text, "name": segment.name} if segment.kind == "call" else {"text": segment.text}
            more = {"logprobs": segment.logprobs} if segment.kind == "text" else {}
            yield {"type": f"response.{name}.done", **inside, **whole, **more}
            if segment.kind != "call":
                yield {"type": "response.content_part.done", **inside, "part": self._part(segment)}
            status = "incomplete" if self._finish == "length" else "completed"
            yield {"type": "response.output_item.done", "output_index": segment.index, "item": self._item(segment, status)}

    def _about(self, what: str) -> dict[str, Any]:
        return {"type": f"response.{what}", "response": self.object()}

    def _written(self, event: dict[str, Any]) -> bytes:
        """An event as bytes, with the next number."""
        numbered = {"type": event["type"], "sequence_number": self._number, **event}
        self._number += 1
        return b"event: " + event["type"].encode() + b"\ndata: " + to_json(numbered) + b"\n\n"


def _format(body: ResponsesBody) -> dict[str, Any]:
    wanted = body.text.format if body.text else None
    return {"type": "text"} if wanted is None else wanted.model_dump(exclude_none=True, by_alias=True)
