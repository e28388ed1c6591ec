"""One process's side of the Board: asks, waits, releases, renews; knows at once when the Board is gone, and finds it again.

Owns `BoardClient` and `BoardLostError`. Everything runs on the event loop that first uses it. Raw actor calls only: the loop may
be the one that Serve's handles route on, where creating or calling a handle would block for ever. Calls are made in a context of
their own: Ray cancels the calls of a cancelled request with it, and a release must not be lost that way.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from ray.exceptions import RayActorError

from ..errors import CbRayError, NoReplicaError, QueueFullError
from ..routing.loads import Ask
from ..routing.pool import PoolLimits
from ..routing.replies import Expired, Granted, Refused

_FIRST_RETRY_S, _LAST_RETRY_S = 0.25, 4.0


class BoardLostError(CbRayError):
    """The Board cannot be reached; whoever asks decides alone until it is back."""


class _BoardMovedError(Exception):
    """Another Board decides now; ask it."""


class _NotHeardError(BoardLostError):
    """The Board was dead before it heard the question. One that died while nothing was asked of it is noticed only then."""


class BoardClient:
    """`find` gives a handle to the Board's actor, or None while there is none; it may take its time, but must not block the loop.

    The client listens while it has anything in the pool, waiting or granted, and at no other time.
    """

    def __init__(self, find: Callable[[], Awaitable[Any | None]], limits: PoolLimits) -> None:
        self.holder = uuid.uuid4().hex
        self._find, self._limits = find, limits
        self._board: Any | None = None
        self._numbers = itertools.count()
        self._waiting: dict[str, asyncio.Future[Granted | Expired]] = {}
        self._held: dict[str, tuple[str, str, bool]] = {}  # ticket → request id, replica, known to this Board
        self._listener: asyncio.Task[None] | None = None
        self._finding: asyncio.Task[None] | None = None
        self._find_again_at = 0.0

    def new_ticket(self) -> str:
        return f"{self.holder}-{next(self._numbers)}"

    @property
    def connected(self) -> bool:
        return self._board is not None

    def move_on(self) -> None:
        """There is a newer Board to be found. Who waits at the old one asks the new one, and is not counted again there."""
        self._forget()
        if self._listener is not None:
            self._listener.cancel()  # it may be waiting for news from the old one
            self._listener = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_BoardMovedError())
        if self._waiting or self._held:
            self._listen()

    def _forget(self) -> None:
        self._board = None
        self._find_again_at = 0.0
        self._held = {ticket: (request_id, replica, False) for ticket, (request_id, replica, _) in self._held.items()}

    async def acquire(self, ask: Ask) -> Granted:
        """A grant, after waiting for it if need be. Cancel the call to leave the line.

        Raises QueueFullError, NoReplicaError (none came up in time) and BoardLostError.
        """
        may_retry = self.connected  # there may have been another Board for long
        while True:
            board = await self._connect()
            try:
                answer = await self._ask(board, ask)
                break
            except _NotHeardError:
                if not may_retry:
                    raise
                may_retry = False
            except _BoardMovedError:
                _call(board.release, ask.ticket)
                ask = replace(ask, readmit=True)
        if isinstance(answer, Expired):
            raise NoReplicaError(
                f"no replica became ready within {answer.waited_s:.0f} s; check the replicas' logs and resources"
            )
        self._hold(ask.ticket, ask.request_id, answer.replica, known=board is self._board)
        return answer

    async def _ask(self, board: Any, ask: Ask) -> Granted | Expired:
        # Before asking: another call's news may bring the grant before this call's own answer is read.
        granted = self._waiting[ask.ticket] = asyncio.get_running_loop().create_future()
        try:
            try:
                answer = await self._hear(board, _call(board.acquire, ask))
            except BoardLostError as error:
                raise _NotHeardError(str(error)) from error
            if isinstance(answer, Refused):
                raise QueueFullError(answer.waiting, answer.limit, answer.retry_after_s)
            if not isinstance(answer, Granted):
                self._listen()
                answer = await granted
            return answer
        except asyncio.CancelledError:
            _call(board.release, ask.ticket)  # wherever it stands: in line, or granted a moment ago
            raise
        finally:
            del self._waiting[ask.ticket]
            if granted.done() and not granted.cancelled():
                granted.exception()  # it may have been told of a move after all was answered

    def hold(self, ticket: str, request_id: str, replica: str) -> None:
        """A request was routed without the Board; tell it when it is back, so that it counts the request and keeps it alive."""
        self._hold(ticket, request_id, replica, known=False)

    def release(self, ticket: str, *, rejected: bool = False) -> None:
        """The request is over. Harmless for a ticket that is not held."""
        held = self._held.pop(ticket, None)
        if held is not None and self._board is not None:
            _call(self._board.release, ticket, rejected)

    def lost(self, replica: str) -> None:
        """This replica's actor has died."""
        if self._board is not None:
            _call(self._board.lost, replica)

    async def _connect(self) -> Any:
        if self._board is None and time.monotonic() >= self._find_again_at:
            if self._finding is None or self._finding.done():
                self._finding = asyncio.create_task(self._find_board(), context=contextvars.Context())
            await asyncio.shield(self._finding)
        if self._board is None:
            raise BoardLostError("the Board cannot be reached")
        return self._board

    async def _find_board(self) -> None:
        board = await self._find()
        try:
            if board is not None:  # with no replicas yet, nobody else may have told it its limits
                await _call(board.configure, self._limits, only_if_new=True)
            self._board = board
        except RayActorError:
            self._board = None
        if self._board is None:
            self._find_again_at = time.monotonic() + _FIRST_RETRY_S

    async def _hear(self, board: Any, ref: Any) -> Any:
        try:
            return await ref
        except RayActorError as error:
            if self._board is board:
                self._lose()
            raise BoardLostError("the Board has died") from error

    def _hold(self, ticket: str, request_id: str, replica: str, known: bool) -> None:
        self._held[ticket] = (request_id, replica, known)
        self._listen()

    def _lose(self) -> None:
        """Everybody who waits decides alone from here on."""
        self._forget()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(BoardLostError("the Board has died"))

    def _listen(self) -> None:
        if self._listener is None or self._listener.done():
            self._listener = asyncio.create_task(self._keep_listening(), context=contextvars.Context())

    async def _keep_listening(self) -> None:
        """Hear of grants and renew leases for as long as there is anything to hear of or to renew."""
        retry_s = _FIRST_RETRY_S
        while self._waiting or self._held:
            try:
                board = await self._connect()
                unknown = [(ticket, held[0], held[1]) for ticket, held in self._held.items() if not held[2]]
                for news in await self._hear(board, _call(board.listen, self.holder, unknown)):
                    self._deliver(board, news)
                retry_s = _FIRST_RETRY_S
            except BoardLostError:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)

    def _deliver(self, board: Any, news: Granted | Expired) -> None:
        future = self._waiting.get(news.ticket)
        if future is not None and not future.done():
            future.set_result(news)
        elif isinstance(news, Granted):
            _call(board.release, news.ticket)  # it stopped waiting while the grant was on its way


def _call(method: Any, *args: Any, **kwargs: Any) -> Any:
    """An actor call that belongs to no request, so that no request's cancellation takes it along."""
    return contextvars.Context().run(method.remote, *args, **kwargs)
