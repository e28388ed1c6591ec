"""Incremental detokenization and stop strings.

Owns `Detokenizer` (tokens in, whole characters out), `StopStrings` (text in, text that is surely no stop string out) and
`TextStream`, which puts the two behind each other for the chunks of one request:

    TokenChunk ─▶ Detokenizer ─▶ StopStrings ─▶ TextDelta
                  holds back      holds back
                  half characters half stop strings

Knows the messages and a codec; no sockets, no JSON, no event loop. What comes out does not depend on how the tokens were
grouped into chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..messages import TokenChunk, TopLogprobs, Usage

if TYPE_CHECKING:
    from .codec import TextCodec

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns tokens into text one by one. Text comes out as soon as its last character is whole, and never changes after."""

    def __init__(self, codec: TextCodec, *, skip_special_tokens: bool = True) -> None:
        from tokenizers.decoders import DecodeStream

        self._codec = codec
        self._skip = skip_special_tokens
        self._new_stream = DecodeStream
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        # `_said` are the tokens of the last text that came out, `_held` those after it; a decoder may need `_said` as context.
        self._said: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that became whole with this token; often one word, "" inside a character."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._codec.backend, token_id)
        except Exception:  # the decoder rewrote text that is already out (some WordPiece ones do): begin afresh after it
            return self._restart()
        if text is None:
            return ""
        self._said, self._held = self._held, []
        return text

    def finish(self, *, keep_incomplete: bool = True) -> str:
        """The text still held back. Bytes that never became a character are U+FFFD, or left out unless `keep_incomplete`."""
        if not self._held:
            return ""
        before = self._codec.decode(self._said, skip_special_tokens=self._skip)
        whole = self._codec.decode(self._said + self._held, skip_special_tokens=self._skip)
        self._said, self._held = self._held, []
        text = whole[len(before) :]
        return text if keep_incomplete else text.rstrip(REPLACEMENT)

    def _restart(self) -> str:
        text = self._codec.decode(self._held, skip_special_tokens=self._skip)
        self._stream = self._new_stream(skip_special_tokens=self._skip)
        self._said, self._held = [], []
        return text


class StopStrings:
    """Lets text through up to the first stop string, holding back what may still become one.

    The first is the one whose last character comes first; where two end together, the longer one. So the cut is where it
    would be if text came one character at a time. Each string is matched by a Knuth-Morris-Pratt automaton: the cost per
    character does not depend on the length of the strings.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`stops` are not empty; `include` lets the stop string itself through as well."""
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._fallbacks = [_prefix_function(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._include = include
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """What of the text so far is now known not to be part of a stop string. After a hit nothing more comes out."""
        if not self._stops or self.hit is not None:
            return "" if self.hit is not None else text
        text, already = self._held + text, len(self._held)
        for position in range(already, len(text)):
            self.hit = self._step(text[position])
            if self.hit is not None:
                self._held = ""
                return text[: position + 1 if self._include else position + 1 - len(self.hit)]
        keep = len(text) - max(self._matched)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Move every automaton by one character; the longest stop string that ends here, if any."""
        hit = None
        for index, stop in enumerate(self._stops):
            length, fallback = self._matched[index], self._fallbacks[index]
            while length and stop[length] != character:
                length = fallback[length - 1]
            length += stop[length] == character
            if length == len(stop):
                hit = hit or stop
                length = fallback[length - 1]
            self._matched[index] = length
        return hit


def _prefix_function(text: str) -> list[int]:
    """For each position the length of the longest proper prefix of `text` that ends there."""
    lengths, length = [0] * len(text), 0
    for position in range(1, len(text)):
        while length and text[position] != text[length]:
            length = lengths[length - 1]
        length += text[position] == text[length]
        lengths[position] = length
    return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """One token of the answer with what was asked for about it. `offset`: characters of text before it."""

    token_id: int
    offset: int
    logprob: float | None = None
    top: TopLogprobs = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text of one request. `tokens` are those whose text begins in it; the last delta says why it is the last."""

    text: str = ""
    token_ids: tuple[int, ...] = ()  # all that arrived, with the one that ended the request
    tokens: tuple[TokenInfo, ...] = ()
    finish_reason: Literal["stop", "length"] | None = None
    stop: str | int | None = None  # the stop string or stop token that ended it


@dataclass(slots=True, kw_only=True)
class TextStream:
    """The text of one request, made from its chunks. Feed it chunks until a delta has a finish_reason."""

    codec: TextCodec
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0  # stop strings do not count before this many tokens
    stop_ids: frozenset[int] = frozenset()
    keep_tokens: bool = False  # whether deltas carry TokenInfo

    num_tokens: int = 0  # tokens of the answer so far, with the one that ended it
    usage: Usage | None = None  # as the engine counted, once it has said so
    prompt_logprobs: tuple[float | None, ...] | None = None  # once the engine has said so, where they were asked for
    prompt_top_logprobs: tuple[TopLogprobs, ...] | None = None
    _produced: int = 0  # characters out of the detokenizer
    _released: int = 0  # characters out of this object
    _waiting: deque[TokenInfo] = field(default_factory=deque[TokenInfo])
    _detokenizer: Detokenizer = field(init=False)
    _stops: StopStrings = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.codec, skip_special_tokens=self.skip_special_tokens)
        self._stops = StopStrings(self.stop, include=self.include_stop)

    def feed(self, chunk: TokenChunk) -> TextDelta:
        """The text that a chunk adds. A chunk that failed or was cancelled is the caller's to handle."""
        self.usage = chunk.usage or self.usage
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs
        self.prompt_top_logprobs = chunk.prompt_top_logprobs or self.prompt_top_logprobs
        stop_token = self._stop_token(chunk)
        pieces: list[str] = []
        for index, token_id in enumerate(chunk.token_ids):
            self.num_tokens += 1
            ends = stop_token is not None and index == len(chunk.token_ids) - 1
            if not ends or self.include_stop:
                pieces.append(self._push(chunk, index, token_id))
            if self._stops.hit is not None:
                return self._delta(pieces, chunk.token_ids[: index + 1], "stop", self._stops.hit)
        if chunk.finish_reason in ("stop", "length"):
            whole = chunk.finish_reason == "stop"  # a limit may cut a character in two: the half of it is left out
            pieces.append(self._drain(keep_incomplete=whole))
            if self._stops.hit is not None:
                return self._delta(pieces, chunk.token_ids, "stop", self._stops.hit)
            return self._delta(pieces, chunk.token_ids, chunk.finish_reason, stop_token)
        return self._delta(pieces, chunk.token_ids, None, None)

    def _stop_token(self, chunk: TokenChunk) -> int | None:
        """The last token of the chunk if it is the one that ended the request."""
        if chunk.finish_reason != "stop" or not chunk.token_ids:
            return None
        last = chunk.token_ids[-1]
        return last if last == chunk.stop_token or (chunk.stop_token is None and last in self.stop_ids) else None

    def _push(self, chunk: TokenChunk, index: int, token_id: int) -> str:
        if self.keep_tokens:
            logprob = chunk.logprobs[index] if chunk.logprobs else None
            top = chunk.top_logprobs[index] if chunk.top_logprobs else ()
            self._waiting.append(TokenInfo(token_id=token_id, offset=self._produced, logprob=logprob, top=top))
        text = self._detokenizer.push(token_id)
        self._produced += len(text)
        return self._stops.push(text) if self.num_tokens >= self.min_tokens else text

    def _drain(self, *, keep_incomplete: bool) -> str:
        tail = self._detokenizer.finish(keep_incomplete=keep_incomplete)
        self._produced += len(tail)
        return self._stops.push(tail) + self._stops.finish()

    def _delta(
        self, pieces: list[str], token_ids: tuple[int, ...], reason: Literal["stop", "length"] | None, stop: str | int | None
    ) -> TextDelta:
        text = "".join(pieces)
        self._released += len(text)
        everything = reason is not None and self._stops.hit is None
        ready: list[TokenInfo] = []
        while self._waiting and (everything or self._waiting[0].offset < self._released):
            ready.append(self._waiting.popleft())
        return TextDelta(text=text, token_ids=token_ids, tokens=tuple(ready), finish_reason=reason, stop=stop)
