"""`PoolView`: what the HTTP side of a Router asks the Board: a place before it tokenizes, and why things are as they are.

Owns the `Pool`-side protocol of the door. A Board that cannot be reached costs nobody a request: places
are then not kept (the request itself is admitted or refused later), and there is nothing to explain.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ray.exceptions import RayActorError

from ..errors import QueueFullError
from ..routing.loads import RoutingDecision
from ..routing.pool import Granted, Refused


class PoolView:
    """`find` gives a handle to the Board's actor, or None."""

    def __init__(self, find: Callable[[], Awaitable[Any | None]]) -> None:
        self._find = find
        self._board: Any | None = None

    @asynccontextmanager
    async def places(self, request_ids: Sequence[str]) -> AsyncGenerator[None]:
        """Places in the pool for requests that will ask shortly: all or none. What has not asked by the end is given back.

        Raises QueueFullError.
        """
        kept: list[str] = []
        try:
            for request_id in request_ids:
                kept.append(request_id)  # before asking: the call may be cancelled when the place is already kept
                answer = await self._ask("reserve", request_id, "")
                if isinstance(answer, Refused):
                    raise QueueFullError(answer.waiting, answer.limit, answer.retry_after_s)
            yield
        finally:
            for request_id in kept:
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

    async def _ask(self, method: str, *args: Any) -> Any:
        with contextlib.suppress(RayActorError):
            if self._board is None:
                self._board = await self._find()
            if self._board is not None:
                return await getattr(self._board, method).remote(*args)
        self._board = None
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
