"""`Engine`: the deployment of which each replica is one engine. Tokens in, tokens out; it knows no text and no other replica.

Owns the replica's life (load, prove, serve, drain, stop), its stream of tokens, its health, and what it tells Serve and the Board.
The engine works in a thread of its own; nothing here blocks the event loop, on which Serve may run its control calls.

    handle ──generate(request)──▶ engine.chunks ──▶ TokenChunk, TokenChunk, …      as they are ready, merged when the reader is late
                 │ begins, moves, ends
                 ▼
               Pulse ──beat──▶ Board ──reply──▶ requests that nobody holds any more are cancelled
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from ray import serve
from ray.exceptions import RayActorError

from ..engine.intake import Terms
from ..errors import EngineFailedError
from ..messages import EngineStats, GenerateRequest, RequestStatus, SamplingParams, TokenChunk
from ..routing.members import Beat, BeatReply
from ..routing.pool import PoolLimits
from ..routing.reporter import PageNews
from .args import EngineArgs, TracingArgs
from .pool_families import engine_numbers
from .pulse import Pulse
from .ray_metrics import RayMirror
from .replica_router import BOARD
from .replica_weights import ReplicaWeights
from .tensor_parallel import Place, Team
from .token_pipe import PipeOutlets, PipeTicket
from .tracing import Tracing

logger = logging.getLogger("ray.serve")
_LAST_WORDS_S = 0.5  # for an error to reach Serve and the log


class EngineLike(Protocol):
    """What a replica needs of `engine.manager.ContinuousBatchingManager` to serve. To take other weights, and to tell callers what
    they may ask, it needs `replica_weights.Reloadable` and `terms` as well, which stand-ins may lack.
    """

    @property
    def fatal_error(self) -> Exception | None: ...
    def start(self) -> None: ...
    def stop(self, block: bool = True, timeout: float | None = None, *, hard_stop: bool = False) -> None: ...
    def chunks(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]: ...
    def cancel_request(self, request_id: str) -> None: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """An engine, not started yet, and the facts that a router wants. `pages(full)`: news of its prefix cache, if it gives any."""

    engine: EngineLike
    page_size: int
    cache_tokens: int | None = None
    step_tokens: int | None = None  # what a step computes at most
    pages: Callable[[bool], PageNews] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """All that a replica is made from. `load` makes its engine, in a thread; None: a transformers model as `engine` says."""

    model: str
    engine: EngineArgs
    slots: int
    step_timeout_s: float = 120.0
    tracing: TracingArgs = field(default_factory=TracingArgs)
    ray_metrics: bool = True
    load: Callable[[EngineSpec], LoadedEngine] | None = None


class Engine:
    """One replica."""

    async def __init__(self, spec: EngineSpec) -> None:
        """Loads the model and makes one token. Raises whatever keeps it from serving, so that Serve shows it and tries again."""
        self._spec = spec
        self._replica = serve.get_replica_context().replica_tag
        self._tracing = Tracing.of(spec.tracing, "cb-ray-engine")
        self._mirror = RayMirror(spec.model) if spec.ray_metrics else None
        self._team: Team | None = None
        if spec.engine.tensor_parallel_size > 1 and spec.load is None:
            self._team = team = Team(spec.model, spec.engine)
            self._loaded = await team.beside(lambda: _load_model(spec, team.place))
            team.watch()
        else:
            self._loaded = await asyncio.to_thread(spec.load or _load_model, spec)
        self._engine: Any = self._loaded.engine
        if self._team is not None:
            self._engine.others = self._team
        self._engine.start()
        self._outlets = PipeOutlets()
        self._board: Any | None = None
        self._limits: PoolLimits | None = None
        self._weights = ReplicaWeights(self._replica, spec.model, self._engine, self._find_board, self._forget_board)
        await self._weights.start()
        await self._prove()
        self._board_name: str = await self._find_board().hello.remote()
        self._since = time.time()
        self._progress = (-1, time.monotonic())  # steps made, since when
        self._pulse = Pulse(
            self._replica,
            send=self._send,
            stats=self._engine.stats,
            cancel=self._engine.cancel_request,
            page_size=self._loaded.page_size,
            pages=self._loaded.pages,
        )

    async def generate(
        self, request: GenerateRequest, attempt: int = 0, queued_s: float = 0.0, pipe: PipeTicket | None = None
    ) -> AsyncGenerator[TokenChunk]:
        """The chunks of one request: the first at once, later ones merged when the reader is late; the last has `usage`.

        Closing the generator cancels the request in the engine. `attempt` counts the times a caller has tried before, `queued_s`
        the seconds that it waited in the pool's line, which count as queue time in `usage`. With a `pipe` that can be reached the
        chunks go there, and nothing is yielded.
        Raises InvalidRequestError, QueueFullError and EngineStoppedError before the first chunk; later failures are in a chunk.
        """
        last: TokenChunk | None = None
        outlet = await self._outlets.to(pipe.address) if pipe is not None else None
        self._pulse.begin(request.request_id)
        try:
            source: Any = self._engine.chunks(request)
            if self._tracing.is_on and request.traceparent:
                source = self._tracing.around(request, source, queued_s, self._replica)
            async with contextlib.aclosing(source) as chunks:
                async for chunk in chunks:
                    self._pulse.moved(request.request_id, len(chunk.token_ids))
                    last = chunk
                    told = _with_wait(chunk, queued_s) if queued_s else chunk
                    if outlet is None or pipe is None:
                        yield told
                    else:
                        await outlet.send(pipe.channel, told)
        finally:
            self._pulse.end(request.request_id, finished=last is not None and last.status == RequestStatus.FINISHED)

    async def terms(self) -> Terms:
        """What requests may ask here: for callers that check them before they are sent."""
        return self._engine.terms

    async def stats(self) -> EngineStats:
        """The engine's latest snapshot."""
        return self._engine.stats()

    async def check_health(self) -> None:
        """Serve asks every few seconds. Raises EngineFailedError when the engine has failed, or a step or a rank is stuck."""
        error = self._engine.fatal_error or self._weights.unfit
        if error is not None:
            raise EngineFailedError(f"the engine has failed: {error}")
        steps, now = self._engine.stats().num_steps, time.monotonic()
        if steps != self._progress[0] or not self._pulse.num_live or self._weights.stands_still:
            self._progress = (steps, now)
        stuck_s = now - self._progress[1]
        if stuck_s > self._spec.step_timeout_s:
            error = EngineFailedError(f"no step has ended for {stuck_s:.0f} s though requests are in the engine")
            self._give_up(error)
            raise error
        if self._team is not None:
            try:
                await self._team.check()
            except EngineFailedError as error:
                if self._team.is_lost:
                    self._give_up(error)
                raise
        self._pulse.touch()  # the Board hears of an idle replica at this pace

    def _give_up(self, error: EngineFailedError) -> None:
        """End the process, a moment after its last words. A step that hangs cannot be stopped, and Serve would let the streams
        behind it wait for the whole grace period; so they move on now, and the device is free for the next replica."""
        logger.critical("%s: this replica ends", error)
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, os._exit, 1)

    async def reconfigure(self, limits: Mapping[str, Any]) -> None:
        """Serve's `user_config`: the pool's limits, which travel this way so that changing them restarts nothing."""
        self._limits = PoolLimits(**limits)
        await self._find_board().configure.remote(self._limits)

    def record_replica_metadata(self) -> dict[str, Any]:
        """What routers and the Board know of this replica from the start."""
        return {
            "board": self._board_name,
            "since": self._since,
            "slots": self._spec.slots,
            "page_size": self._loaded.page_size,
            "cache_tokens": self._loaded.cache_tokens,
            "step_tokens": self._loaded.step_tokens,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Seconds of work owed here and in the waiting line, as the Board last said; numbers only."""
        reply, live = self._pulse.reply, self._pulse.num_live
        return {
            "owed_s": reply.owed_s if reply and live else 0.0,
            "line_s": reply.line_s if reply and live else 0.0,
            "num_requests": float(live + (reply.num_waiting if reply and live else 0)),
            "cache_used": self._engine.stats().cache_used,
        }

    async def __del__(self) -> None:
        """Serve calls this after the drain: the engine finishes what is left and gives its memory back."""
        with contextlib.suppress(AttributeError):  # construction may not have come this far
            self._pulse.close()
            self._weights.close()
            await self._outlets.aclose()
        with contextlib.suppress(AttributeError):
            if self._team is not None:
                self._team.part()
            await asyncio.to_thread(self._engine.stop, True, 10.0, hard_stop=True)
        with contextlib.suppress(AttributeError):
            if self._team is not None:
                self._team.close()

    async def _prove(self) -> None:
        """Ready means: one real token came out."""
        greedy = SamplingParams(do_sample=False, ignore_eos=True)
        request = GenerateRequest(request_id="cb-ray-ready", token_ids=(0,), max_new_tokens=1, sampling=greedy)
        async for chunk in self._engine.chunks(request):
            if chunk.error is not None:
                raise chunk.error

    def _find_board(self) -> Any:
        """The Board's actor. It may have been made anew since it was last used."""
        if self._board is None:
            self._board = serve.get_deployment_actor(BOARD)
            if self._limits is not None:
                self._board.configure.remote(self._limits, only_if_new=True)
        return self._board

    async def _send(self, beat: Beat) -> BeatReply | None:
        if self._mirror is not None and beat.engine is not None:
            for kind, name, value in engine_numbers(asdict(beat.engine), beat.cache_used):
                self._mirror(kind, name, value, {})
        try:
            return await self._find_board().beat.remote(beat)
        except (RayActorError, ValueError):  # it has died, and may not have been made anew yet
            self._forget_board()
            return None

    def _forget_board(self) -> None:
        self._board = None


def _with_wait(chunk: TokenChunk, queued_s: float) -> TokenChunk:
    """The chunk with what was waited before the engine heard of the request as part of its queue time."""
    if chunk.usage is None:
        return chunk
    return replace(chunk, usage=replace(chunk.usage, created_time=chunk.usage.created_time - queued_s))


def _load_model(spec: EngineSpec, place: Place | None = None) -> LoadedEngine:
    """The engine of a transformers model. What importing and loading make stays as long as the process: the garbage collector neither
    looks through it meanwhile, a tenth of the time, nor again in the middle of a stream."""
    gc.disable()
    try:
        from .engine_loading import load_engine

        return load_engine(spec.model, spec.engine, place)
    finally:
        gc.freeze()
        gc.enable()
