"""How many pieces of streams per second the way from engine to client carries: engine replica, Router, proxy, client.

Owns the scenario `plane`. The engines compute nothing: they give out tokens as fast as they are taken, so what is measured is the
way alone. With and without Serve's fast path, each in a process of its own, because Ray reads its settings once.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ...messages import EngineStats, GenerateRequest, RequestStatus, TokenChunk, Usage
from ...serving.engine_deployment import EngineSpec, LoadedEngine
from .client import Plan
from .failures import Tell, body
from .judge import Outcome, Verdict, percentile, waits
from .load import Load
from .sitting import Sitting

STREAMS, TOKENS = 32, 256
PIECES = (1, 8)  # tokens in one


class Fountain:
    """An engine that gives out word after word, `piece` at a time."""

    fatal_error = None

    def __init__(self, piece: int) -> None:
        self._piece = piece
        self._steps = self._tokens = 0

    def start(self) -> None: ...

    def stop(self, block: bool = True, timeout: float | None = None, *, hard_stop: bool = False) -> None: ...

    def cancel_request(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(num_steps=self._steps, generated_tokens=self._tokens)

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        loop, left = asyncio.get_running_loop(), request.max_new_tokens or TOKENS
        while left:
            turn = loop.create_future()
            loop.call_soon(turn.set_result, None)
            await turn  # the other streams'
            count = min(self._piece, left)
            left -= count
            self._steps, self._tokens = self._steps + 1, self._tokens + count
            tokens = tuple(1 + (left + n) % 500 for n in range(count))
            if left:
                yield TokenChunk(request_id=request.request_id, token_ids=tokens)
        usage = Usage(num_prompt_tokens=len(request.token_ids), num_generated_tokens=request.max_new_tokens or TOKENS)
        yield TokenChunk(
            request_id=request.request_id,
            token_ids=tokens,
            status=RequestStatus.FINISHED,
            finish_reason="length",
            usage=usage,
        )


def load(spec: EngineSpec, piece: int) -> LoadedEngine:
    return LoadedEngine(engine=Fountain(piece), page_size=16)


async def measure(sitting: Sitting, tell: Tell) -> list[dict[str, Any]]:
    """One row for each size of piece, on Serve as this process found it."""
    rows: list[dict[str, Any]] = []
    settings = {"max_queue_size": 0, "pool": {"slots_per_replica": STREAMS}, "router": {"num_replicas": 1}}
    for piece in PIECES:
        tell(f"pieces of {piece}")
        await sitting.deploy(settings, fountain=piece)
        bodies = [body([1, 2, 3, 4], TOKENS) for _ in range(8 * STREAMS)]
        async with Load.of(Plan(url=sitting.url, bodies=bodies[:STREAMS], concurrency=STREAMS)) as warm_up:
            await warm_up.done()
        async with Load.of(Plan(url=sitting.url, bodies=bodies, concurrency=STREAMS)) as flow:
            records = await flow.done()
        seconds = max(record.ended for record in records) - min(record.sent for record in records)
        failed = sum(bool(record.error) for record in records)
        rows.append(
            {
                "tokens in a piece": piece,
                "pieces/s": len(records) * TOKENS / piece / seconds,
                "tokens/s": len(records) * TOKENS / seconds,
                "requests/s": len(records) / seconds,
                "first token p50 ms": percentile(waits(records), 0.5) * 1e3,
                "failed": failed,
            }
        )
    return rows


async def run(options: list[str], tell: Tell, done: Callable[[Outcome], None]) -> None:
    """Both ways, each by a `cb-ray bench pool` of its own, which prints its rows."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, more in (("plain", ["--plain"]), ("fast", [])):
        tell(f"Serve's {name} path")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cb_ray.cli", "bench", "pool", "plane", "--rows", *more, *options), stdout=subprocess.PIPE
        )
        try:
            out, _ = await process.communicate()
        except asyncio.CancelledError:
            await process.wait()  # Ctrl-C reached it as well
            raise
        if process.returncode:
            raise RuntimeError(f"the measurement of the {name} path ended with status {process.returncode}")
        rows[name] = json.loads(out.decode().strip().splitlines()[-1])
    both = [{"path": name, **row} for name in rows for row in rows[name]]
    verdicts = [
        Verdict(
            promise="no stream breaks on either path",
            holds=not any(row["failed"] for row in both),
            found=f"{sum(row['failed'] for row in both)} broke",
        ),
    ]
    done(Outcome(scenario="plane", rows=both, verdicts=verdicts))
