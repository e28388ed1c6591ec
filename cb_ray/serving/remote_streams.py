"""Streams of a whole pool, read in the background for a program that does not speak asyncio.

Owns `Courier` (an event loop in a thread, on which every stream is read to its end) and `Dispatch` (the inbox that a request is put
into and that makes the courier fetch it). What comes goes to an `Outbox`, exactly as an engine thread's output does.

    Intake ─▶ Dispatch ─▶ Courier ─▶ SteadySource ─▶ the pool
                             └─ chunks ─▶ Outbox ─▶ get_result, handlers, iteration

A refusal is not an error here unless its caller can be told at once: requests of a batch wait at home until there is a place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..engine.intake import Intake
from ..engine.mailbox import Cancel, Inbox, Message, Outbox
from ..errors import CbRayError, EngineStoppedError, QueueFullError, RequestCancelledError
from ..grammar import Grammar
from ..messages import FinishReason, GenerateRequest, RequestStatus, TokenChunk, merge_chunks

if TYPE_CHECKING:  # it needs Ray, and this file is imported by programs that only name `RemoteManager`
    from .pool_view import PoolView

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_AGAIN_S = 1.0  # how old a batch lets its knowledge of the pool's size become
_BLIND_WINDOW = 16  # requests of a batch under way while the pool's size is not known: no replica yet, no Board


class Source(Protocol):
    """`SteadySource`, or a stand-in."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]: ...


class Courier:
    """Reads streams in a thread of its own until `close`. Methods without `async` may be called from any thread."""

    def __init__(self, view: PoolView, outbox: Outbox) -> None:
        self._view, self._outbox = view, outbox
        self._source: Source | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lines: list[dict[str, GenerateRequest]] = []  # of each batch, what is not under way yet
        self._stopping: EngineStoppedError | None = None
        self._moved: asyncio.Event | None = None  # set, and forgotten, when a stream ends
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="cb-ray courier", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    # ---- any thread ---------------------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the courier's loop; the calling thread waits for it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def post(self, call: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # closed: nothing is left to be done
            self._loop.call_soon_threadsafe(call, *args)

    def connect(self, source: Source) -> None:
        self._source = source

    def reserve(self, names: Sequence[str]) -> None:
        """Places in the pool for requests that are sent next: all or none. Raises QueueFullError."""
        self.run(self._view.reserve(names))

    def send(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            self.post(self._begin, request)

    def send_batch(self, requests: Sequence[GenerateRequest]) -> None:
        """Send as many at a time as keep the pool busy, and the others as those end."""
        self.post(self._begin_batch, {request.request_id: request for request in requests})

    def cancel(self, name: str) -> None:
        self.post(self._cancel, name)

    async def drained(self) -> None:
        """Every request has ended."""
        while self._tasks or any(self._lines):
            await self._something_ends(None)

    def stop(self, error: EngineStoppedError) -> None:
        """End everything with `error`."""
        self.post(self._stop, error)

    def close(self) -> None:
        """End everything and the thread. Harmless when it has ended."""

        async def end() -> None:
            self._stop(EngineStoppedError("the remote manager was destroyed"))
            await self.drained()
            self._loop.stop()

        with contextlib.suppress(RuntimeError):
            asyncio.run_coroutine_threadsafe(end(), self._loop)

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    # ---- the loop -----------------------------------------------------------------------------------------------------------

    def _begin(self, request: GenerateRequest) -> asyncio.Task[None]:
        task = self._tasks[request.request_id] = self._loop.create_task(self._carry(request))
        task.add_done_callback(lambda task: self._over(request, task))
        return task

    def _over(self, request: GenerateRequest, task: asyncio.Task[None]) -> None:
        """A request has ended, or was cancelled before its task had taken a step: then nobody has been told yet."""
        name = request.request_id
        if task.cancelled():
            self._cut(request)
        if self._tasks.get(name) is task:
            del self._tasks[name]
        self._view.give_back([name])
        self._tell()
        if not self._tasks:
            self._stopping = None

    def _begin_batch(self, line: dict[str, GenerateRequest]) -> None:
        self._lines.append(line)
        task = self._loop.create_task(self._feed(line))
        task.add_done_callback(lambda _: self._lines.remove(line))

    def _cancel(self, name: str) -> None:
        for line in self._lines:
            request = line.pop(name, None)
            if request is not None:
                self._end(request, RequestCancelledError(name), RequestStatus.CANCELLED, "cancelled")
        if name in self._tasks:
            self._tasks[name].cancel()

    def _stop(self, error: EngineStoppedError) -> None:
        self._stopping = error
        for line in self._lines:
            for request in line.values():
                self._end(request, error, RequestStatus.FAILED, "failed")
            line.clear()
        for task in self._tasks.values():
            task.cancel()
        self._stopping = error if self._tasks else None

    async def _carry(self, request: GenerateRequest) -> None:
        """One request from its first token to its last. Whatever happens, it gets a terminal chunk."""
        name, unread = request.request_id, list[TokenChunk]()
        try:
            while not await self._read(request, unread):
                await self._place(name)
        except asyncio.CancelledError:
            self._cut(request, unread)
        except Exception as error:
            if not isinstance(error, CbRayError):
                logger.exception("reading the stream of %s failed", name)
            self._end(request, error, RequestStatus.FAILED, "failed", unread)

    def _cut(self, request: GenerateRequest, unread: Sequence[TokenChunk] = ()) -> None:
        """The end of a request that was cancelled, or that the stop of everything took along."""
        if self._stopping is None:
            self._end(request, RequestCancelledError(request.request_id), RequestStatus.CANCELLED, "cancelled", unread)
        else:
            self._end(request, self._stopping, RequestStatus.FAILED, "failed", unread)

    async def _read(self, request: GenerateRequest, unread: list[TokenChunk]) -> bool:
        """The stream to its end; False: the pool was full after all, and there is nothing yet."""
        assert self._source is not None
        try:
            async with contextlib.aclosing(self._source.generate(request)) as chunks:
                async for chunk in chunks:
                    unread.append(chunk)
                    if request.stream or chunk.is_terminal:
                        self._hand_out(merge_chunks(unread))
                        unread.clear()
        except QueueFullError:
            return False
        return True

    def _end(
        self,
        request: GenerateRequest,
        error: Exception,
        status: RequestStatus,
        reason: FinishReason,
        unread: Sequence[TokenChunk] = (),
    ) -> None:
        last = TokenChunk(request_id=request.request_id, status=status, finish_reason=reason, error=error)
        self._hand_out(merge_chunks([*unread, last]))

    def _hand_out(self, chunk: TokenChunk) -> None:
        for orphan in self._outbox.post([chunk]):  # its reader's event loop is closed
            self._cancel(orphan)

    async def _feed(self, line: dict[str, GenerateRequest]) -> None:
        """A batch: as many requests under way as the pool has places for, and about as many again in its line."""
        running: set[asyncio.Task[None]] = set()
        window, look_at = _BLIND_WINDOW, 0.0
        while line:
            if self._loop.time() >= look_at:
                window, look_at = await self._window(window), self._loop.time() + _LOOK_AGAIN_S
            if len(running) >= window:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                continue
            name = next(iter(line))
            try:
                await self._place(name)
            except Exception as error:
                self._end(line.pop(name), error, RequestStatus.FAILED, "failed")
                continue
            request = line.pop(name, None)  # it may have been cancelled meanwhile
            if request is None:
                self._view.give_back([name])
            else:
                running.add(self._begin(request))
        if running:
            await asyncio.wait(running)

    async def _window(self, known: int) -> int:
        pool = await self._view.snapshot()
        if pool is None:
            return known
        slots = sum(replica["slots"] for replica in pool["replicas"].values() if replica["accepting"])
        if not slots:
            return _BLIND_WINDOW
        return slots + (min(slots, pool["limit"] // 2) if pool["limit"] else slots)

    async def _place(self, name: str) -> None:
        """A place in the pool, after waiting for one if need be: until a stream of ours ends, or as long as the pool says."""
        while True:
            try:
                await self._view.reserve([name])
                return
            except QueueFullError as full:
                await self._something_ends(full.retry_after_s)

    async def _something_ends(self, timeout: float | None) -> None:
        if self._moved is None:
            self._moved = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._moved.wait()

    def _tell(self) -> None:
        if self._moved is not None:
            self._moved.set()
            self._moved = None


class RemoteIntake(Intake):
    """Checks requests here; grammars are compiled where the tokens are made."""

    async def compile_grammar(self, grammar: Any) -> None:
        """Raises InvalidRequestError when it is none."""
        if grammar is not None:
            Grammar.of(grammar)

    def _with_grammar(self, request: GenerateRequest) -> GenerateRequest:
        return request


class Dispatch(Inbox):
    """What `Intake` hands requests to, where an engine has its inbox."""

    def __init__(self, courier: Courier) -> None:
        super().__init__()
        self._courier = courier

    def add(
        self, requests: Sequence[GenerateRequest], created: float, accept: Callable[[], None], *, places: int | None = 1
    ) -> None:
        """Send requests, all or none; without `places` they may wait for places here.

        Raises QueueFullError when the pool is full, EngineStoppedError when no more are taken.
        """
        if self.refusing is not None:
            raise EngineStoppedError(self.refusing)
        if places is not None:
            self._courier.reserve([request.request_id for request in requests])
        accept()
        # Siblings may go to different replicas, so none can take over another's pages; they find them in the cache.
        sent = [replace(request, fork_of=None) for request in requests]
        if places is None:
            self._courier.send_batch([replace(request, stream=False) for request in sent])
        else:
            self._courier.send(sent)

    def put(self, message: Message) -> None:
        if isinstance(message, Cancel):
            self._courier.cancel(message.request_id)
