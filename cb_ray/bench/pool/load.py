"""The measuring side of `client.py`: starts it, hears what it tells, waits for what is wanted of it.

Owns `Load`. Knows asyncio and the client's lines; no Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict
from typing import Any

from .client import Plan, Record


class Load:
    """A client under way. `tokens` and `started` rise as it reads; `records` has the requests that have ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._changed = asyncio.Condition()
        self._over = False
        self.tokens = self.started = 0
        self.start = 0.0  # of an open loop, on the monotonic clock
        self.records: list[Record] = []
        self._reader = asyncio.create_task(self._read())

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, plan: Plan) -> AsyncGenerator[Load]:
        """The client runs until the block ends; it is killed if the block raises."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cb_ray.bench.pool.client"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**26,
        )
        load = cls(process)
        try:
            load._say(asdict(plan))
            yield load
            await load.done()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()
            load._reader.cancel()

    async def until(self, holds: Callable[[Load], bool]) -> None:
        """Wait for a condition on what was heard. Raises RuntimeError when the client ended before."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._over or holds(self))
        if not holds(self):
            raise RuntimeError("the client ended before what was waited for had happened; its output is above")

    async def done(self) -> list[Record]:
        """The records of all requests, once the last has ended."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._over)
        return self.records

    async def stop(self) -> list[Record]:
        """No more requests; the records, once those under way have ended."""
        self._say({"stop": True})
        return await self.done()

    def width(self, concurrency: int) -> None:
        """So many at once from now on."""
        self._say({"concurrency": concurrency})

    def _say(self, line: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            told = json.loads(line)
            if "record" in told:
                self.records.append(Record(**told["record"]))
            self.tokens, self.started = told.get("tokens", self.tokens), told.get("started", self.started)
            self.start = told.get("start", self.start)
            await self._notify()
        self._over = True
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
