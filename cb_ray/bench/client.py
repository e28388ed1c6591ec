"""One request over HTTP, watched: when it was sent, when each piece came, what it cost, how it ended.

Owns the wire: bodies for either endpoint, server-sent events, and what counts as an end. Times are seconds of the event loop's
clock. Knows aiohttp (9 µs of processor time for an event on the machine where httpx took 25 and the official client 113: a load
generator that is busy measures itself) and no statistics.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from ..errors import ConfigError
from .workloads import Item

Endpoint = Literal["chat", "completions"]
PATHS: dict[str, str] = {"chat": "/chat/completions", "completions": "/completions"}
_MAX_WAIT_S = 60.0  # for a Retry-After
_CONTENT = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and what every request asks of it."""

    base_url: str  # with /v1
    model: str
    endpoint: Endpoint = "chat"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])  # in every request, unless its item says otherwise
    timeout_s: float = 600.0
    retries: int = 0  # how often a refusal is tried again, after the time that its Retry-After says

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + PATHS[self.endpoint]


@dataclass(slots=True, kw_only=True)
class Record:
    """What became of one request. `due` is when the schedule wanted it, `sent` when it really went out (the last time)."""

    index: int
    due: float
    sent: float = 0.0
    events: array[float] = field(default_factory=lambda: array("d"))  # arrival of each piece that carried output
    ended: float = 0.0
    status: int = 0  # of HTTP; 0 where there was no answer
    error: str = ""  # "" for a whole answer, "left" where the client hung up as planned, else a short name of what went wrong
    detail: str = ""  # of the error, in the server's words
    retry_after_s: float | None = None  # what the last refusal said
    retries: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the answer came whole."""
        return not self.error


class EventReader:
    """Server-sent events out of bytes, however they are cut: `feed` gives the data of each event that has become whole."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterable[bytes]:
        """The data of the events that `piece` completes. Comments are nothing; lines of one event's data are joined."""
        text = (self._rest + piece).replace(b"\r\n", b"\n") if b"\r" in piece or b"\r" in self._rest else self._rest + piece
        *events, self._rest = text.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                yield event[6:]
                continue
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


def body_of(item: Item, target: Target) -> dict[str, Any]:
    """The JSON body that asks `target` for `item`. Raises ConfigError where the endpoint cannot say it."""
    body: dict[str, Any] = {"model": target.model, "max_tokens": item.max_tokens}
    if target.endpoint == "chat":
        if item.prompt_ids is not None:
            raise ConfigError("token ids cannot be sent as a chat; use --endpoint completions", field="endpoint")
        body["messages"] = item.messages or [{"role": "user", "content": item.prompt}]
    else:
        if item.messages is not None:
            raise ConfigError("messages cannot be sent as a completion; use --endpoint chat", field="endpoint")
        body["prompt"] = item.prompt_ids or item.prompt
    if item.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return {**body, **target.body, **item.extra}


async def ask(session: aiohttp.ClientSession, target: Target, item: Item, record: Record) -> None:
    """Send `item` and fill in `record`, whatever happens; refusals are tried again as `target` says. Raises only when cancelled."""
    loop = asyncio.get_running_loop()
    data = json.dumps(body_of(item, target), separators=(",", ":")).encode()
    while True:
        record.sent, record.error, record.detail = loop.time(), "", ""
        try:
            async with asyncio.timeout_at(record.sent + target.timeout_s):
                await _attempt(session, target, item, record, data)
        except TimeoutError:
            record.error = "timeout"
        except (aiohttp.ClientError, ConnectionError) as error:
            record.error, record.detail = type(error).__name__, str(error)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            record.error, record.detail = "malformed answer", f"{type(error).__name__}: {error}"
        record.ended = loop.time()
        if record.status not in (429, 503) or record.retries >= target.retries or record.retry_after_s is None:
            return
        record.retries += 1
        await _pause(min(record.retry_after_s, _MAX_WAIT_S))


async def _pause(seconds: float) -> None:
    """As a Retry-After asks."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = asyncio.get_running_loop().call_later(seconds, over.set_result, None)
    try:
        await over
    finally:
        timer.cancel()


async def _attempt(session: aiohttp.ClientSession, target: Target, item: Item, record: Record, data: bytes) -> None:
    headers = {"Content-Type": "application/json", **target.headers}
    async with session.post(target.url, data=data, headers=headers) as response:
        record.status = response.status
        if response.status != 200:
            record.error, record.detail = str(response.status), _message(await response.text())
            record.retry_after_s = _seconds(response.headers.get("Retry-After"))
        elif item.stream:
            await _read_stream(response, item, record)
        else:
            answer = await response.json()
            record.events.append(asyncio.get_running_loop().time())
            _read_usage(answer.get("usage"), record)
            record.finish_reason = answer["choices"][0].get("finish_reason")


async def _read_stream(response: aiohttp.ClientResponse, item: Item, record: Record) -> None:
    now, reader = asyncio.get_running_loop().time, EventReader()
    record.error = "cut off"  # until its end is seen
    async for piece in response.content.iter_any():
        at = now()
        for data in reader.feed(piece):
            if data == b"[DONE]":
                record.error = "" if record.error == "cut off" else record.error
                continue
            event = json.loads(data)
            if "error" in event:
                record.error, record.detail = "error event", str(event["error"].get("message", event["error"]))
                continue
            if event.get("usage") is not None:
                _read_usage(event["usage"], record)
            if any(_carries(choice, record) for choice in event["choices"]):
                record.events.append(at)
                if len(record.events) == item.leave_after:
                    record.error = "left"
                    response.close()
                    return


def _carries(choice: Mapping[str, Any], record: Record) -> bool:
    """Whether an event's choice holds output, rather than a role or an end alone."""
    record.finish_reason = choice.get("finish_reason") or record.finish_reason
    delta = choice.get("delta")
    return bool(choice.get("text")) if delta is None else any(delta.get(name) for name in _CONTENT)


def _read_usage(usage: Mapping[str, Any] | None, record: Record) -> None:
    if usage:
        record.prompt_tokens, record.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _message(text: str) -> str:
    try:
        error = json.loads(text).get("error")
        return str(error.get("message") if isinstance(error, dict) else error)[:300]
    except (ValueError, AttributeError):
        return text[:300]


def _seconds(text: str | None) -> float | None:
    """A Retry-After in seconds; the other form, a date, is left alone."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
