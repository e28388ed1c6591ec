"""`PoolView`: what the HTTP side of a Router asks the Board: a place before it tokenizes, and why things are as they are.

Owns the `Pool`-side protocol of the door. A Board that cannot be reached costs nobody a request: places
are then not kept (the request itself is admitted or refused later), and there is nothing to explain.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, get_args

from ray.exceptions import RayActorError, RayTaskError

from ..errors import InvalidRequestError, NoReplicaError, QueueFullError
from ..routing.loads import RoutingDecision
from ..routing.replies import Granted, Refused, Room
from ..routing.weights import InFlight, Mode
from .board_weights import PoolWeights
from .handle_source import own_error
from .lookout import Lookout


class PoolView:
    """`find` gives a handle to the Board's actor, or None. `lookout` says when the pool need not be asked."""

    def __init__(self, find: Callable[[], Awaitable[Any | None]], clock: Callable[[], float] = time.monotonic) -> None:
        self._find = find
        self._board: Any | None = None
        self.lookout = Lookout(self._ask, clock)

    @asynccontextmanager
    async def places(self, request_ids: Sequence[str]) -> AsyncGenerator[None]:
        """Places in the pool for requests that will ask shortly: all or none. What has not asked by the end is given back.

        Raises QueueFullError.
        """
        await self.reserve(request_ids)
        try:
            yield
        finally:
            self.give_back(request_ids)

    async def reserve(self, request_ids: Sequence[str]) -> None:
        """Places for requests that will ask shortly: all or none. Raises QueueFullError."""
        kept: list[str] = []
        try:
            for request_id in request_ids:
                kept.append(request_id)  # before asking: the call may be cancelled when the place is already kept
                refused = await self._place(request_id)
                if refused is not None:
                    kept.pop()
                    raise QueueFullError(refused.waiting, refused.limit, refused.retry_after_s)
        except BaseException:
            self.give_back(kept)
            raise

    def give_back(self, request_ids: Sequence[str]) -> None:
        """Places of requests that will not ask, or have asked."""
        for request_id in request_ids:
            self._tell("unreserve", request_id)

    async def explain(self, token_ids: Sequence[int]) -> dict[str, Any] | None:
        """Where this prompt would go now: policy, reason, price in seconds of each replica, tokens expected to be cached."""
        decision: RoutingDecision | None = await self._ask("explain", tuple(token_ids))
        return None if decision is None else as_dict(decision)

    async def decision(self, request_id: str) -> dict[str, Any] | None:
        """Where a request went and why, if that was not long ago."""
        granted: Granted | None = await self._ask("decision", request_id)
        if granted is None:
            return None
        return {"replica": granted.replica, "waited_s": round(granted.waited_s, 6), **as_dict(granted.decision)}

    async def snapshot(self) -> dict[str, Any] | None:
        """Counts of the whole pool."""
        return await self._ask("snapshot")

    async def watch(self, seen: int) -> tuple[int, dict[str, Any]] | None:
        """The snapshot once anything has changed since `seen` (-1: at once), and what to ask with next."""
        return await self._ask("watch", seen)

    async def update_weights(
        self, source: Any, *, mode: Mode = "rolling", in_flight: InFlight = "keep", weights_version: int | None = None
    ) -> PoolWeights:
        """Bring every replica to other weights; returns when all have them.

        `source`: a directory or hub revision that every replica can read, tensors or arrays by name, an ObjectRef of those, or a
        callable that each replica calls. `mode` "rolling": one replica at a time, requests go to the others meanwhile;
        "all_at_once": all together. `in_flight`: streams that run "keep" their pages, "recompute" them, or may "finish" first.

        Raises WeightsError when a replica refuses (all have the old weights then), UpdateRunningError beside another update,
        InvalidRequestError, and NoReplicaError when the Board, or every replica, is gone.
        """
        for name, value, known in (("mode", mode, get_args(Mode)), ("in_flight", in_flight, get_args(InFlight))):
            if value not in known:
                raise InvalidRequestError(f"{name} must be one of {', '.join(known)}, got {value!r}", param=name)
        from .replica_weights import as_source

        handed = await asyncio.to_thread(as_source, source)
        await self._ask("hello")  # one that lives; an update is not asked for twice
        if self._board is None:
            raise NoReplicaError("the Board cannot be reached now; try again when the application runs")
        try:
            return await self._board.update_weights.remote(handed, weights_version, mode, in_flight)
        except RayActorError as error:
            self._board = None
            raise NoReplicaError(
                "the Board was lost meanwhile; the pool settles on the newest weights that a replica has: update them again"
            ) from error
        except RayTaskError as error:
            raise own_error(error) from error

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        """All engines of the pool stand still inside. Raises NoReplicaError when the Board cannot be reached."""
        token = uuid.uuid4().hex
        await self._ask("hold", token)
        board = self._board
        if board is None:
            raise NoReplicaError("the Board cannot be reached now; try again when the application runs")

        async def keep() -> None:
            with contextlib.suppress(RayActorError):
                while await board.keep.remote(token):
                    pass

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            keeping.cancel()
            with contextlib.suppress(RayActorError):  # a Board that died has taken its pauses along
                await board.let_go.remote(token)

    async def _place(self, request_id: str) -> Refused | None:
        room: Room | None = None
        self.lookout.asking()
        try:
            refused, room = await self._ask("reserve", request_id, "") or (None, None)
        finally:
            self.lookout.answered(room)
        return refused

    async def _ask(self, method: str, *args: Any) -> Any:
        for _ in range(2):  # the Board that was known may have gone with its version of the application
            with contextlib.suppress(RayActorError):
                if self._board is None:
                    self._board = await self._find()
                if self._board is not None:
                    return await getattr(self._board, method).remote(*args)
            self._board = None
            self.lookout.lost()
        return None

    def _tell(self, method: str, *args: Any) -> None:
        if self._board is not None:  # in a context of its own, so that it is not cancelled with the request that calls
            contextvars.Context().run(getattr(self._board, method).remote, *args)


def view_of(app: str, deployment: str) -> PoolView:
    """The view of the pool behind a deployment."""
    from .replica_router import find_board

    return PoolView(lambda: asyncio.to_thread(find_board, app, deployment))


def as_dict(decision: RoutingDecision) -> dict[str, Any]:
    return {
        "policy": decision.policy,
        "reason": decision.reason,
        "order": list(decision.order),
        "prices_s": {replica: round(price, 6) for replica, price in decision.prices.items()},
        "predicted_cached_tokens": decision.cached_tokens,
    }
