"""What the tests of the HTTP door stand on: a source of tokens that obeys a script, and clients that can do what they must not.

`FakeSource` says a given text, token by token; nothing in it is random and nothing waits but where a test says so.
`Exchange` is one HTTP exchange by hand, so that a test can leave at a chosen moment. `listening` is a real server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from cb_ray.messages import GenerateRequest, RequestStatus, TokenChunk, Usage
from cb_ray.serving.http import build_http_app
from cb_ray.serving.lookout import Lookout
from cb_ray.serving.served_model import ServedModel
from cb_ray.serving.settings import DoorSettings
from cb_ray.text.codec import TextCodec
from tests.tiny import make_tokenizer

CONTEXT = 200
EOS = 3  # <|im_end|>
JSON = "application/json"


def make_model(**changes: Any) -> ServedModel:
    """A model with the tiny tokenizer, called "tiny", whose context holds CONTEXT tokens."""
    codec = TextCodec(make_tokenizer())
    fields = {"name": "tiny", "codec": codec, "vocab_size": codec.size, "context_length": CONTEXT, "eos_token_ids": (EOS,)}
    return ServedModel(**{**fields, **changes})


def no_board() -> Lookout:
    """What a pool's view without a Board knows of it."""

    async def ask(*_: Any) -> None: ...

    return Lookout(ask, lambda: 0.0)


@dataclass(kw_only=True)
class FakeSource:
    """Answers every request with `says` and an end-of-sequence, as far as it may, one token a chunk.

    `fails` is raised instead of the first chunk, or after `fails_after` tokens. With `holds_after` set, that many tokens come
    and then nothing until `released` is set. `closed` are the ids of requests whose iterator was closed before its end, `ended`
    those of the others.
    """

    codec: TextCodec
    says: str = "Hello, 🎉 world"
    fails: Exception | None = None
    fails_after: int = 0
    in_a_chunk: bool = False  # `fails` comes as an engine tells of a failed request, not as an exception
    holds_after: int | None = None
    scores_prompts: bool = True
    requests: list[GenerateRequest] = field(default_factory=list[GenerateRequest])
    closed: list[str] = field(default_factory=list[str])
    ended: list[str] = field(default_factory=list[str])
    released: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        self.requests.append(request)
        self.asked.set()
        over = False
        try:
            chunks = list(self._chunks(request))
            for number, chunk in enumerate(chunks):
                if self.fails is not None and number >= self.fails_after:
                    if not self.in_a_chunk:
                        raise self.fails
                    chunk = replace(chunk, error=self.fails, status=RequestStatus.FAILED, finish_reason="failed")
                if self.holds_after is not None and number >= self.holds_after:
                    await self.released.wait()
                over = chunk.is_terminal
                yield chunk
            over = True
        except Exception:
            over = True
            raise
        finally:
            (self.ended if over else self.closed).append(request.request_id)

    def _chunks(self, request: GenerateRequest) -> Iterator[TokenChunk]:
        sampling = request.sampling
        if sampling.embed:
            vector = (3.0 / 5, 4.0 / 5, 0.0)
            done = {"status": RequestStatus.FINISHED, "finish_reason": "stop", "usage": self._usage(request, 0)}
            yield TokenChunk(request_id=request.request_id, embedding=vector, **done)
            return
        tokens = [*self.codec.encode(self.says), *([] if sampling.ignore_eos else [EOS])]
        limit = 1000 if request.max_new_tokens is None else request.max_new_tokens
        tokens = (tokens * (limit // len(tokens) + 1) if sampling.ignore_eos else tokens)[:limit]
        groups = [[token] for token in tokens] if request.stream else [tokens]
        for number, group in enumerate(groups):
            last = number == len(groups) - 1
            reason = "stop" if tokens[-1] == EOS else "length"
            yield TokenChunk(
                request_id=request.request_id,
                token_ids=tuple(group),
                logprobs=tuple(-0.5 for _ in group) if sampling.logprobs is not None else (),
                top_logprobs=tuple(self._top(token, sampling.logprobs) for token in group) if sampling.logprobs else (),
                prompt_logprobs=self._scores(request) if number == 0 else None,
                status=RequestStatus.FINISHED if last else RequestStatus.DECODING,
                finish_reason=reason if last else None,
                stop_token=EOS if last and reason == "stop" else None,
                usage=self._usage(request, len(tokens)) if last else None,
            )

    @staticmethod
    def _usage(request: GenerateRequest, made: int) -> Usage:
        return Usage(num_prompt_tokens=len(request.token_ids), num_generated_tokens=made, num_cached_tokens=7)

    @staticmethod
    def _top(token: int, count: int) -> tuple[tuple[int, float], ...]:
        return ((token, -0.5), *((100 + rank, -1.0 - rank) for rank in range(count - 1)))

    def _scores(self, request: GenerateRequest) -> tuple[float | None, ...] | None:
        if request.sampling.prompt_logprobs is None or not self.scores_prompts:
            return None
        return (None, *(-0.25 for _ in request.token_ids[1:]))


@dataclass(slots=True, kw_only=True)
class DoorUnderTest:
    """An app, the source behind it, and plain ways to ask it."""

    app: FastAPI
    source: FakeSource
    model: ServedModel

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """POST a JSON value, or bytes as they are, and wait for the whole answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, content, {"content-type": "application/json", **(headers or {})})

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self.request("GET", path, b"", headers or {})

    def request(self, method: str, path: str, content: bytes, headers: Mapping[str, str]) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
                return await client.request(method, path, content=content, headers=headers)

        return asyncio.run(ask())

    def chat(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", chat_body(prompt, **fields))

    def complete(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "tiny", "prompt": prompt, **fields})


def make_door(settings: DoorSettings | None = None, *, model: ServedModel | None = None, **script: Any) -> DoorUnderTest:
    """A door in front of a FakeSource with the fields of `script`."""
    model = model or make_model()
    source = FakeSource(codec=model.codec, **script)
    return DoorUnderTest(app=build_http_app(model, source, settings), source=source, model=model)


def chat_body(prompt: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": prompt}], **fields}


def events(response: httpx.Response | bytes) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    content = response if isinstance(response, bytes) else response.content
    blocks = content.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], blocks[-3:]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, which must be in OpenAI's envelope."""
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}, body
    return body["error"]


class Exchange:
    """One POST by hand: what the app sends is in `sent`, and the client leaves when told to."""

    def __init__(self, app: FastAPI, path: str, body: Any, headers: Mapping[str, str] | None = None) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(name.encode(), value.encode()) for name, value in {"content-type": JSON, **(headers or {})}.items()],
            "client": ("127.0.0.1", 1),
            "server": ("door", 80),
        }
        self.task = asyncio.create_task(app(scope, self._inbox.get, self._send))  # type: ignore[arg-type]

    async def _send(self, message: Any) -> None:
        self.sent.put_nowait(message)

    def leave(self) -> None:
        """The client closes the connection."""
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def read(self, text: str) -> None:
        """Wait until `text` has been sent in the body."""
        seen = b""
        while text.encode() not in seen:
            seen += (await self.sent.get()).get("body", b"")


@contextlib.contextmanager
def listening(app: FastAPI, send_buffer: int | None = None) -> Iterator[str]:
    """`app` behind a real HTTP server on this machine; gives its base URL. It listens before this returns. `send_buffer`: bytes that
    the system takes of what a client has not read."""
    with socket.socket() as server_socket:
        if send_buffer is not None:
            server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        server_socket.bind(("127.0.0.1", 0))
        server_socket.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [server_socket]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server_socket.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def gauge(door: DoorUnderTest, name: str) -> float:
    """The sum of all samples of one metric."""
    lines = [line for line in door.get("/metrics").text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    assert lines, f"no metric {name}"
    return sum(float(line.rpartition(" ")[2]) for line in lines)


Script = Callable[..., DoorUnderTest]
