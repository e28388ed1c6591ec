"""`cb-ray bench abuse`: malformed requests and clients that leave, against a running server.

Owns the ways to misbehave, all drawn from one seed. Knows HTTP by hand, since no client library would send these; of the server it
knows only its URL, and learns routes and fields from /openapi.json. Nothing may answer 5xx or not at all, and when everybody has
gone, nothing may be left: running and waiting requests, and the blocks they held, go back to 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

PATIENCE_S = 60.0  # an answer that takes longer counts as none
SETTLE_S = 15.0  # what is left then is a leak
_GONE = ("cb_ray_requests_running", "cb_ray_requests_waiting", "cb_ray_pool_waiting", "cb_ray_replica_leases")
_HELD = ("cb_ray_replica_running", "cb_ray_replica_waiting", "cb_ray_replica_blocks_held")
_ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    1e-320,
    2**63,
    -(2**70),
    1e308,
    0.5,
    "",
    "a",
    "\x00",
    "🎉",
    [],
    {},
    [[]],
    [None],
    {"": {}},
)
_BOUNDS = ("max_tokens", "max_new_tokens", "max_output_tokens", "max_completion_tokens", "n", "ignore_eos")
_WORDS = ("type", "text", "role", "user", "assistant", "tool", "content", "function", "name", "auto", "json_schema", "id")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What happened. `faults` are answers that should not be; `left` what did not go back to 0."""

    statuses: Counter[str] = field(default_factory=Counter[str])
    moments: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list[str])
    left: dict[str, float] = field(default_factory=dict[str, float])
    seconds: float = 0.0
    served_after: bool = False

    @property
    def is_well(self) -> bool:
        return not self.faults and not self.left and self.served_after


class Target:
    """A server, and HTTP with it by hand."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.key, self.model = api_key, model or ""

    def head(self, method: str, path: str, length: int, kind: str = "application/json", more: str = "") -> bytes:
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        lines = f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n"
        return f"{lines}{key}{more}Connection: close\r\n\r\n".encode("utf-8", "surrogateescape")

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """One connection; leaving the block closes it, whatever is still to come."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def send(self, message: bytes) -> tuple[int, bytes]:
        """The status and the rest of the answer to some bytes. 0: the server closed without a word."""
        async with asyncio.timeout(PATIENCE_S), self.connection() as (reader, writer):
            try:
                writer.write(message)
                await writer.drain()
                if message.endswith(b"\xff\xff"):  # a request that promises more than it sends: nothing more comes
                    writer.write_eof()
                answer = await reader.read()
            except ConnectionError:
                return 0, b""
        found = re.match(rb"HTTP/1\.1 (\d{3})", answer)
        return (int(found[1]) if found else 0), answer.partition(b"\r\n\r\n")[2]

    async def get(self, path: str) -> bytes:
        status, content = await self.send(self.head("GET", path, 0))
        return _unchunked(content) if status == 200 else b""

    async def post(self, path: str, body: Any) -> tuple[int, bytes]:
        content = json.dumps(body).encode()
        return await self.send(self.head("POST", path, len(content)) + content)

    async def metrics(self) -> dict[str, float]:
        """The sum of each metric's samples."""
        sums: Counter[str] = Counter()
        for line in (await self.get("/metrics")).decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                sums[name.partition("{")[0]] += float(value)  # type: ignore[assignment]
        return dict(sums)

    async def is_served(self) -> bool:
        """Whether a plain good request is answered."""
        chat = {"model": self.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
        return (await self.post("/v1/chat/completions", chat))[0] == 200


def _unchunked(content: bytes) -> bytes:
    """A body without the lengths of chunked transfer, if it has them."""
    pieces, rest = [], content
    while found := re.match(rb"([0-9a-fA-F]+)\r\n", rest):
        size = int(found[1], 16)
        pieces.append(rest[found.end() : found.end() + size])
        rest = rest[found.end() + size + 2 :]
        if not size:
            return b"".join(pieces)
    return content


def _inner_fields(schema: Any, parts: dict[str, Any]) -> list[str]:
    """The fields of the objects that a field's schema allows, one level down."""
    found: set[str] = set()
    for one in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        if "$ref" in one:
            found.update(parts[one["$ref"].rpartition("/")[2]].get("properties", ()))
    return sorted(found)


class Malformer:
    """Malformed requests, one after another. `schema` is the server's own description."""

    def __init__(self, target: Target, schema: dict[str, Any], seed: int) -> None:
        self._target, self._dice = target, random.Random(seed)
        parts = schema["components"]["schemas"]
        self._fields: dict[str, dict[str, list[str]]] = {}  # path → field → the fields of its objects, if it has objects
        for path, operations in schema["paths"].items():
            body = operations.get("post", {}).get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                fields = parts[name]["properties"]
                self._fields[path] = {field: _inner_fields(fields[field], parts) for field in sorted(fields)}
        self._paths = list(schema["paths"])

    def next(self) -> bytes:
        kinds = (self._odd_fields,) * 5 + (
            self._damaged,
            self._damaged,
            self._noise,
            self._odd_http,
            self._odd_http,
            self._nested,
        )
        return self._dice.choice((*kinds, self._plain))()

    def _good(self, path: str) -> dict[str, Any]:
        """A small good body of a route."""
        turns = [{"role": "user", "content": "Hi 🎉"}]
        known: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": turns, "max_tokens": 2},
            "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
            "/v1/responses": {"input": "Hi", "max_output_tokens": 2, "store": False},
            "/v1/responses/input_tokens": {"input": "Hi"},
            "/v1/messages": {"messages": turns, "max_tokens": 2},
            "/v1/messages/count_tokens": {"messages": turns},
            "/generate": {"token_ids": [1, 2, 3], "max_new_tokens": 2},
            "/tokenize": {"prompt": "Hi"},
            "/detokenize": {"tokens": [1, 2]},
            "/debug/route": {"prompt": "Hi"},
        }
        return {"model": self._target.model, **known.get(path, {})}

    def _plain(self) -> bytes:
        """A good request among the others, which must not suffer from them."""
        path = self._dice.choice(list(self._fields))
        return self._post(path, json.dumps(self._good(path)).encode())

    def _odd_fields(self) -> bytes:
        path = self._dice.choice(list(self._fields))
        body = self._good(path)
        for _ in range(self._dice.randint(1, 3)):
            name = self._dice.choice([*self._fields[path], self._word()])
            if name not in _BOUNDS:
                inner = self._fields[path].get(name)
                body[name] = self._odd_object(inner) if inner and self._dice.random() < 0.7 else self._odd()
            else:  # a good but endless request would measure the model, not the door
                body[name] = self._dice.choice([-1, 0, 1, 2, "2", [], 2**40])
        return self._post(path, json.dumps(body).encode())

    def _odd_object(self, fields: list[str]) -> dict[str, Any]:
        return {self._dice.choice(fields): self._odd() for _ in range(self._dice.randint(1, 2))}

    def _odd(self, depth: int = 0) -> Any:
        roll = self._dice.random()
        if depth < 3 and roll < 0.2:
            return [self._odd(depth + 1) for _ in range(self._dice.randint(0, 3))]
        if depth < 3 and roll < 0.5:
            return {self._word(): self._odd(depth + 1) for _ in range(self._dice.randint(0, 3))}
        return self._word() if roll < 0.65 else self._dice.choice(_ODD)

    def _word(self) -> str:
        return (
            self._dice.choice(_WORDS)
            if self._dice.random() < 0.8
            else "".join(chr(self._dice.randrange(0xD7FF)) for _ in range(4))
        )

    def _damaged(self) -> bytes:
        path = self._dice.choice(list(self._fields))
        content = bytearray(json.dumps(self._good(path), ensure_ascii=False).encode())
        if self._dice.random() < 0.5:
            content[self._dice.randrange(len(content))] = self._dice.randrange(256)
        else:
            del content[self._dice.randrange(len(content)) :]
        return self._post(path, bytes(content))

    def _noise(self) -> bytes:
        return self._post(self._dice.choice(list(self._fields)), self._dice.randbytes(self._dice.randrange(200)))

    def _nested(self) -> bytes:
        depth = self._dice.choice([10, 200, 5000, 50_000])
        opening, closing = self._dice.choice([("[", "]"), ('{"a":', "}")])
        value = opening * depth + "1" + closing * (depth if self._dice.random() < 0.7 else 0)
        path = self._dice.choice(list(self._fields))
        name = self._dice.choice(list(self._fields[path]))
        return self._post(path, f'{{"model": {json.dumps(self._target.model)}, "{name}": {value}}}'.encode())

    def _odd_http(self) -> bytes:
        path, content, target = self._dice.choice(self._paths), b'{"a": 1}', self._target
        odd: list[Callable[[], bytes]] = [
            lambda: (
                target.head(self._dice.choice(["PUT", "PATCH", "DELETE", "HEAD", "TRACE", "X"]), path, len(content)) + content
            ),
            lambda: target.head("POST", path + "/../" + "%00%ff", len(content)) + content,
            lambda: target.head("POST", path, len(content), kind="text/plain") + content,
            lambda: target.head("POST", path, len(content), more="X-Request-Id: \xff\x01\r\n") + content,
            lambda: target.head("POST", path, len(content), more="Authorization: Bearer \r\n") + content,
            lambda: target.head("POST", path, 10**12) + content + b"\xff\xff",
            lambda: target.head("GET", "/v1/models/" + "a" * self._dice.choice([1, 1000, 10_000]), 0),
            lambda: self._dice.randbytes(60) + b"\r\n\r\n\xff\xff",
            lambda: b"POST / HTTP/9.9\r\n\r\n\xff\xff",
        ]
        return self._dice.choice(odd)()

    def _post(self, path: str, content: bytes) -> bytes:
        path = path.replace("{response_id}", "x").replace("{name}", "x")
        return self._target.head("POST", path, len(content)) + content


async def malformed(target: Target, count: int, seed: int, concurrency: int, outcome: Outcome, bar: Any) -> None:
    """Send `count` malformed requests."""
    schema = json.loads(await target.get("/openapi.json") or b"{}")
    if not schema:
        raise RuntimeError("the server has no /openapi.json to learn its routes from, or wants an API key (--api-key)")
    if not await target.get("/debug/pool"):
        del schema["paths"]["/debug/route"]  # a door without a pool says 503 there, rightly
    malformer = Malformer(target, schema, seed)

    async def one() -> None:
        message = malformer.next()
        try:
            status, content = await target.send(message)
        except TimeoutError:
            outcome.faults.append(f"no answer within {PATIENCE_S:g} s to {message[:2000]!r}")
            return
        finally:
            bar.update()
        outcome.statuses[str(status) if status else "closed"] += 1
        if status >= 500 and status != 501:
            outcome.faults.append(f"{status} {content[:300]!r} to {message[:2000]!r}")

    await _crowd(one, count, concurrency)


async def disconnects(target: Target, count: int, seed: int, concurrency: int, outcome: Outcome, bar: Any) -> None:
    """Ask `count` times for something long, and leave: at once, a little later, or after some events."""
    dice = random.Random(seed)

    async def one() -> None:
        streams, roll = dice.random() < 0.6, dice.random()
        chat = {
            "model": target.model,
            "messages": [{"role": "user", "content": " ".join(dice.choice(_WORDS) for _ in range(dice.choice([3, 30, 300])))}],
            "stream": streams,
            "max_tokens": 100,
            "ignore_eos": True,
            "n": dice.choice([1, 1, 1, 2]),
        }
        moment, events, wait_s = "at once", dice.randint(1, 10), dice.uniform(0.0, 1.0)
        content = json.dumps(chat).encode()
        try:
            async with target.connection() as (reader, writer):
                writer.write(target.head("POST", "/v1/chat/completions", len(content)) + content)
                await writer.drain()
                if streams and roll < 0.6:
                    async with asyncio.timeout(PATIENCE_S):
                        while events and await reader.readuntil(b"\n\n"):
                            events -= 1
                    moment = "while decoding"
                elif roll < 0.9:
                    moment = "waiting or computing"
                    async with asyncio.timeout(wait_s):
                        await reader.read(1)
                    moment = "after the first byte"
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            if moment == "at once":
                moment = f"cut off by the server ({type(error).__name__})"
        outcome.moments[f"{'streamed' if streams else 'whole'}, {moment}"] += 1
        bar.update()

    await _crowd(one, count, concurrency)


async def _crowd(work: Callable[[], Awaitable[None]], count: int, concurrency: int) -> None:
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await work()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(worker())


async def settle(target: Target, outcome: Outcome) -> None:
    """Wait until nothing is left of those who went; what is left after SETTLE_S stands in `outcome.left`."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        found = await target.metrics()
        outcome.left = {name: found[name] for name in (*_GONE, *_HELD) if found.get(name)}
        if not outcome.left or time.monotonic() > deadline:
            return


async def abuse(
    url: str,
    *,
    num_malformed: int,
    num_disconnects: int,
    seed: int = 0,
    concurrency: int = 32,
    api_key: str | None = None,
    model: str | None = None,
    progress: bool = False,
) -> Outcome:
    """Misbehave against the server at `url`, and see what is left. Raises RuntimeError when it is no cb-ray server."""
    target, outcome, began = Target(url, api_key, model), Outcome(), time.monotonic()
    if not target.model:
        target.model = json.loads(await target.get("/v1/models"))["data"][0]["id"]
    with tqdm(total=num_malformed, desc="malformed", disable=not progress, unit="") as bar:
        await malformed(target, num_malformed, seed, concurrency, outcome, bar)
    with tqdm(total=num_disconnects, desc="disconnects", disable=not progress, unit="") as bar:
        await disconnects(target, num_disconnects, seed, concurrency, outcome, bar)
    await settle(target, outcome)
    outcome.served_after = await target.is_served()
    outcome.seconds = time.monotonic() - began
    return outcome


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="cb-ray bench abuse", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", help="bearer token, where the server wants one")
    parser.add_argument("--model", help="model name; default: the first that is listed")
    parser.add_argument("--malformed", type=int, default=1000, help="malformed requests (default: %(default)s)")
    parser.add_argument("--disconnects", type=int, default=100, help="clients that leave (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=32, help="clients at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    outcome = asyncio.run(
        abuse(
            given.base_url,
            num_malformed=given.malformed,
            num_disconnects=given.disconnects,
            seed=given.seed,
            concurrency=given.concurrency,
            api_key=given.api_key,
            model=given.model,
            progress=True,
        )
    )
    print(f"{given.malformed} malformed requests: {dict(sorted(outcome.statuses.items()))}")
    print(f"{given.disconnects} clients that left: {dict(sorted(outcome.moments.items()))}")
    print(f"left behind: {outcome.left or 'nothing'}; the next request is {'' if outcome.served_after else 'not '}served")
    for fault in outcome.faults[:10]:
        print(f"FAULT {fault}")
    print(f"{'well' if outcome.is_well else 'NOT WELL'}, {len(outcome.faults)} faults, {outcome.seconds:.1f} s")
    return 0 if outcome.is_well else 1
