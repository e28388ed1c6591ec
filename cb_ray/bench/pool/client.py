"""The client of the pool's benchmarks, a process of its own: sends completions, reads their streams, tells what it saw, line by line.

    plan (JSON, one line) ──stdin──▶ this process ──stdout──▶ {"tokens": …, "started": …} now and then, {"record": {…}} per request
    {"concurrency": n}, {"stop": true} ──stdin──▶

Owns the wire and the two ways to load a server: so many requests at once (closed loop), or each at its time (open loop). Knows
aiohttp; no Ray, and nothing of what the answers should be. Times are seconds of the machine's monotonic clock, so that they can be
laid beside the clocks of other processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

_TELL_EVERY = 32  # tokens
_PRIORITY = -10  # as `nice` counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to send. With `times` (seconds from the start) every body goes out at its time; otherwise `concurrency` are under way
    until every body was sent `rounds` times (0: until told to stop)."""

    url: str
    bodies: list[dict[str, Any]]
    times: list[float] | None = None
    concurrency: int = 1
    rounds: int = 1
    headers: dict[str, str] = field(default_factory=dict[str, str])
    obeys: bool = False  # comes back after a refusal, when its Retry-After says


@dataclass(slots=True, kw_only=True)
class Record:
    """What became of one request. `key` is the number of its body."""

    key: int
    sent: float = 0.0
    first: float | None = None  # the first piece with text
    ended: float = 0.0
    status: int = 0  # of HTTP; 0 where there was no answer
    error: str = ""  # "" for a whole answer
    text: str = ""
    longest_gap: float = 0.0  # between two pieces
    margin: float | None = None  # smallest difference between the two best logprobs, where they were asked for
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    weights_versions: list[int] | None = None
    retry_after: float | None = None
    refused: int = 0  # times, where the client obeys
    replica: str | None = None  # where the decision was asked for


class Client:
    """One run of a plan. `tell` writes a line."""

    def __init__(self, plan: Plan, session: aiohttp.ClientSession) -> None:
        self._plan, self._session = plan, session
        self._width = plan.concurrency
        self._next, self._tokens, self._started, self._told = 0, 0, 0, 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._over = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        if self._plan.times is None:
            self._fill()
        else:
            start = loop.time() + 0.05
            tell({"start": start})
            for key, at in enumerate(self._plan.times):
                loop.call_at(start + at, self._begin, key)
            loop.call_at(start + max(self._plan.times, default=0.0), self._settle)
        await self._over.wait()

    def obey(self, command: Mapping[str, Any]) -> None:
        """From stdin: another width, or enough."""
        self._width = command.get("concurrency", self._width)
        self._stopping = self._stopping or bool(command.get("stop"))
        self._fill()

    def _fill(self) -> None:
        plan = self._plan
        if plan.times is None:
            limit = plan.rounds * len(plan.bodies)
            while len(self._tasks) < self._width and not self._stopping and (not limit or self._next < limit):
                self._begin(self._next % len(plan.bodies))
        self._settle()

    def _begin(self, key: int) -> None:
        self._next += 1
        task = asyncio.get_running_loop().create_task(self._ask(key))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._fill()

    def _settle(self) -> None:
        """Nothing is under way and nothing will be."""
        sent = self._stopping if self._plan.times is None else self._next >= len(self._plan.times)
        if self._plan.times is None and self._plan.rounds:
            sent = sent or self._next >= self._plan.rounds * len(self._plan.bodies)
        if sent and not self._tasks:
            self._over.set()

    async def _ask(self, key: int) -> None:
        record = Record(key=key, sent=time.monotonic())
        refused = 0
        while True:
            try:
                await self._attempt(self._plan.bodies[key], record)
            except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
                record.error = f"{type(error).__name__}: {error}"
            record.ended = time.monotonic()
            if record.status != 429 or not self._plan.obeys:
                break
            refused += 1
            await _pause(record.retry_after or 1.0)
        record.refused = refused
        tell({"record": asdict(record)})

    async def _attempt(self, body: dict[str, Any], record: Record) -> None:
        data = json.dumps(body, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json", **self._plan.headers}
        record.error, last = "", None
        async with self._session.post(self._plan.url, data=data, headers=headers) as response:
            record.status = response.status
            if response.status != 200:
                record.error = (await response.text())[:300]
                record.retry_after = float(response.headers.get("Retry-After", 0)) or None
                return
            record.replica = _replica(response.headers.get("X-Cb-Ray-Decision"))
            record.error = "the stream was cut off"
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    record.error = "" if record.error == "the stream was cut off" else record.error
                    continue
                now = time.monotonic()
                if self._read(json.loads(line[6:]), record):
                    if last is None:
                        record.first = now
                        self._started += 1
                    else:
                        record.longest_gap = max(record.longest_gap, now - last)
                    last = now
                    self._progress()

    def _read(self, event: dict[str, Any], record: Record) -> bool:
        """Whether the event brought text."""
        if "error" in event:
            record.error = str(event["error"].get("message", event["error"]))
            return False
        usage = event.get("usage")
        if usage:
            record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        text = "".join(choice["text"] for choice in event["choices"])
        for choice in event["choices"]:
            for best in (choice.get("logprobs") or {}).get("top_logprobs") or ():
                first, second, *_ = *sorted(best.values(), reverse=True), float("-inf")
                record.margin = min(first - second, float("inf") if record.margin is None else record.margin)
        record.text += text
        self._tokens += len(text.split())
        return bool(text)

    def _progress(self) -> None:
        if self._tokens >= self._told + _TELL_EVERY:
            self._told = self._tokens
            tell({"tokens": self._tokens, "started": self._started})


def _replica(decision: str | None) -> str | None:
    first = (json.loads(decision) or [None])[0] if decision else None
    return first["replica"] if first else None


async def _pause(seconds: float) -> None:
    """As a Retry-After asks."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(seconds, over.set_result, None)
    await over


def tell(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def _main() -> None:
    loop = asyncio.get_running_loop()
    stdin = asyncio.StreamReader(limit=2**30)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    plan = Plan(**json.loads(await stdin.readline()))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20
    ) as session:
        client = Client(plan, session)
        run = asyncio.create_task(client.run())

        async def listen() -> None:
            while line := await stdin.readline():
                client.obey(json.loads(line))
            run.cancel()  # who started this process has gone

        listener = asyncio.create_task(listen())
        try:
            await run
        finally:
            listener.cancel()


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # clients have machines of their own; on this one they go first, where that is allowed
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to whoever started this, who closes stdin
    with contextlib.suppress(asyncio.CancelledError, BrokenPipeError):
        asyncio.run(_main())
