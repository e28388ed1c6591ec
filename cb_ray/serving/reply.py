"""`Reply`: how a dialect answers, whole or as server-sent events. The HTTP layer knows only this.

Owns the frame of an OpenAI answer (id, created, model, usage) and of its event stream. Knows generation; no sockets, no Ray.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from ..errors import CbRayError
from ..messages import Usage
from ..text.detokenizer import TextDelta
from .envelopes import error_object
from .generation import Choice, Written
from .openai import usage_object
from .served_model import ServedModel

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """What every object of one answer repeats."""

    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: ServedModel, created: int) -> ReplyHead:
        """A head with a fresh id, such as `chatcmpl-…`."""
        return cls(id=f"{prefix}-{uuid.uuid4().hex}", created=created, model=model.name, system_fingerprint=model.fingerprint)


class Reply:
    """One answer in the making. A dialect says how a choice looks, whole (`whole`) and in pieces (`events`)."""

    kind: str = ""  # the `object` of a whole answer
    chunk_kind: str = ""  # the `object` of an event

    def __init__(
        self, head: ReplyHead, choices: Sequence[Choice], *, include_usage: bool = False, running_usage: bool = False
    ) -> None:
        self.head, self.choices = head, choices
        self.extras: Callable[[], dict[str, Any]] | None = None  # how it was made, for a client that may see that
        self._include_usage, self._running_usage = include_usage, running_usage

    def events(self, choice: Choice, delta: TextDelta) -> Iterable[dict[str, Any]]:
        """The choice objects that a delta adds to the stream."""
        raise NotImplementedError

    def whole(self, choice: Choice, written: Written) -> dict[str, Any]:
        """The choice object of a whole answer."""
        raise NotImplementedError

    def num_generated(self, choice: Choice) -> int:
        """The tokens of one choice that count as completion tokens."""
        return choice.text.num_tokens

    def num_reasoning(self) -> int | None:
        """The completion tokens that were thought; None where the dialect does not tell."""
        return None

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage up to now: each prompt counts once, each choice's tokens count."""
        prompts: dict[int, int] = {}
        cached: dict[int, Usage | None] = {}
        for choice in self.choices:
            prompts[choice.prompt] = len(choice.request.token_ids)
            if cached.get(choice.prompt) is None:
                cached[choice.prompt] = choice.text.usage
        completion = sum(map(self.num_generated, self.choices))
        return usage_object(prompts.values(), completion, cached.values(), self.num_reasoning())

    def answer(self, written: Sequence[Written]) -> dict[str, Any]:
        """The whole answer, from what each of `choices` wrote."""
        objects = [self.whole(choice, words) for choice, words in zip(self.choices, written, strict=True)]
        return self._frame(self.kind, objects) | {"usage": self.usage()} | self._more()

    async def settle(self, written: Sequence[Written] | None = None) -> None:
        """All has been generated (`written`, unless it was streamed), and the last word is not sent yet. Most keep nothing."""

    def stream_events(self, choice: Choice, delta: TextDelta) -> bytes:
        """The events that a delta adds to the stream, as bytes of an event stream."""
        return b"".join(self._event([piece]) for piece in self.events(choice, delta))

    def stream_end(self) -> bytes:
        """The last events: the usage, and how the answer was made, so far as these were asked for, and [DONE]."""
        if not self._include_usage and self.extras is None:
            return DONE
        usage = {"usage": self.usage()} if self._include_usage else {}
        return _data(self._frame(self.chunk_kind, []) | usage | self._more()) + DONE

    def stream_error(self, error: CbRayError) -> bytes:
        """The event that ends a stream which failed on its way. No [DONE] follows: the answer is not whole."""
        return _data(error_object(error))

    def _more(self) -> dict[str, Any]:
        return {} if self.extras is None else {"cb_ray": self.extras()}

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        event = self._frame(self.chunk_kind, choices)
        if self._include_usage or self._running_usage:
            event["usage"] = self.usage() if self._running_usage else None
        return _data(event)

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self.head
        frame = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
        return {**frame, "choices": choices, "system_fingerprint": head.system_fingerprint}


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"
