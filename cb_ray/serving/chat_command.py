"""Talk to a running server from the terminal: answers stream in, Ctrl-C stops one, Ctrl-D ends.

Owns the conversation and how it looks in a terminal. Speaks HTTP through the standard library alone, so that it starts at once and
works against any OpenAI-compatible server. Knows no model, no Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..errors import CbRayError, ConfigError

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="ask this and end; without it, a conversation")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the server's base URL (default: %(default)s)")
    parser.add_argument("--model", help="which model; default: the first that the server lists")
    parser.add_argument("--system", help="what the model is told before the conversation")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    parser.add_argument("--temperature", type=float, help="0 takes the likeliest token; default: the model's")
    parser.add_argument("--max-tokens", type=int, help="longest answer; default: as many as fit")
    parser.add_argument("--seed", type=int, help="the same seed and prompt give the same answer")


def run(given: argparse.Namespace) -> int:
    """Raises ConfigError for a URL that cannot be used, ChatError for what the server refuses."""
    server = Server(given.url, given.api_key)
    sampling = {"temperature": given.temperature, "max_tokens": given.max_tokens, "seed": given.seed}
    asked = {name: value for name, value in sampling.items() if value is not None}
    talk = Talk(server, given.model or server.first_model(), asked)
    if given.system:
        talk.messages.append({"role": "system", "content": given.system})
    if given.prompt:
        talk.ask(" ".join(given.prompt))
        return 0
    print(f"{talk.model} at {given.url}; Ctrl-C stops an answer, Ctrl-D ends", file=sys.stderr)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # arrows and history at the prompt
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return 0
        if line:
            try:
                talk.ask(line)
            except ChatError as error:
                talk.messages.pop()
                print(error, file=sys.stderr)


class ChatError(CbRayError):
    """The server could not be reached, or refused; the message is its own."""


class Server:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must look like http://127.0.0.1:8000/v1, got {url!r}", field="url")
        self._parts, self._path = parts, parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}

    def first_model(self) -> str:
        """Raises ChatError."""
        with self._answer("GET", "/models", None) as response:
            cards = json.loads(response.read())["data"]
        if not cards:
            raise ChatError("the server lists no model; --model names one")
        return cards[0]["id"]

    def chat(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The events of a streamed chat completion. Raises ChatError."""
        with self._answer("POST", "/chat/completions", json.dumps({**body, "stream": True}).encode()) as response:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ChatError(event["error"]["message"])
                yield event

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: bytes | None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.netloc)
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ChatError(_refusal(response))
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"{self._parts.scheme}://{self._parts.netloc} cannot be reached: {error}") from error
        finally:
            connection.close()


@dataclass(slots=True)
class Talk:
    """A conversation: what was said so far, and how to go on."""

    server: Server
    model: str
    sampling: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def ask(self, text: str) -> None:
        """Say `text` and print the answer as it comes. Ctrl-C keeps what was said until then. Raises ChatError."""
        self.messages.append({"role": "user", "content": text})
        body = {"model": self.model, "messages": self.messages, "stream_options": {"include_usage": True}, **self.sampling}
        said: list[str] = []
        began, first, usage = time.monotonic(), 0.0, None
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(self.server.chat(body)) as events:
            for event in events:
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        first = first or time.monotonic()
                        said.append(piece)
                        print(piece, end="", flush=True)
        print()
        self.messages.append({"role": "assistant", "content": "".join(said)})
        if usage and first:
            read, made = usage["prompt_tokens"], usage["completion_tokens"]
            rate = (made - 1) / max(1e-9, time.monotonic() - first)
            facts = f"first token after {first - began:.2f} s, {rate:.0f} tokens/s, {read} + {made} tokens"
            print(f"{_DIM}{facts}{_PLAIN}" if sys.stderr.isatty() else facts, file=sys.stderr)


def _refusal(response: http.client.HTTPResponse) -> str:
    body = response.read()
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:300] or response.reason
    wait = response.headers.get("Retry-After")
    return f"{response.status}: {message}" + (f" (again in {wait} s)" if wait else "")
