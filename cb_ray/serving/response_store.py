"""Responses that are kept: bounded memory, one owner for all Routers, nothing shared between tenants.

Owns `ResponseStore` (what is kept, and what is thrown out) and `StoreClient`, the Routers' side of one in an actor. Records are
bytes to it. A single Router has a store of its own; several share an actor of their deployment, so that any of them finds what
another one kept. It is not the Board, whose one thread is on the path of every request. It is memory, not a database.

    Router 1 ── put ──▶ ┌ actor ────────┐ ◀── get ── Router 2
    Router 1 ── watch ▶ │ ResponseStore │ ◀── cancel ── Router 2        watch returns, Router 1 ends the generation
                        └───────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

STORE = "responses"  # the actor's name among the deployment's actors
LEASE_S = 20.0  # a Router that makes a background response says so this often


@dataclass(slots=True, kw_only=True)
class Kept:
    """One record. `live`: a Router is still making it."""

    record: bytes
    live: bool = False
    seen_at: float = 0.0  # when its Router was last heard of, while it is live
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class Responses(Protocol):
    """What the door needs of a store. All of it is per tenant."""

    async def put(self, tenant: str, name: str, record: bytes, live: bool = False) -> None: ...
    async def get(self, tenant: str, name: str) -> tuple[bytes, bool] | None: ...
    async def delete(self, tenant: str, name: str) -> bool: ...
    async def cancel(self, tenant: str, name: str) -> bool: ...
    async def watch(self, tenant: str, name: str) -> bool: ...


class ResponseStore:
    """The store in one process. `max_bytes` bounds the records' bytes; the one used longest ago goes first."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self.num_bytes = 0

    async def put(self, tenant: str, name: str, record: bytes, live: bool = False) -> None:
        """Keep a record, in place of an older one of that name. One that is larger than the bound is not kept."""
        key = (tenant, name)
        kept = self._kept.pop(key, None)
        self.num_bytes -= len(kept.record) if kept else 0
        cancelled = kept.cancelled if kept else asyncio.Event()
        self._kept[key] = Kept(record=record, live=live, seen_at=self._clock(), cancelled=cancelled)
        self.num_bytes += len(record)
        while self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= len(oldest.record)
            oldest.cancelled.set()

    async def get(self, tenant: str, name: str) -> tuple[bytes, bool] | None:
        """The record, and whether it is lost: its Router has not been heard of for so long that nobody will finish it."""
        kept = self._kept.get((tenant, name))
        if kept is None:
            return None
        self._kept.move_to_end((tenant, name))
        return kept.record, kept.live and self._clock() - kept.seen_at > 3 * LEASE_S

    async def delete(self, tenant: str, name: str) -> bool:
        """Whether there was one. A response that is being made is cancelled."""
        kept = self._kept.pop((tenant, name), None)
        if kept is not None:
            self.num_bytes -= len(kept.record)
            kept.cancelled.set()
        return kept is not None

    async def cancel(self, tenant: str, name: str) -> bool:
        """Whether there is one. Who watches it is told."""
        kept = self._kept.get((tenant, name))
        if kept is not None:
            kept.cancelled.set()
        return kept is not None

    async def watch(self, tenant: str, name: str) -> bool:
        """True as soon as the response is cancelled, deleted or thrown out; False after a lease's time: ask again then."""
        kept = self._kept.get((tenant, name))
        if kept is None:
            return True
        kept.seen_at = self._clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEASE_S):
                await kept.cancelled.wait()
        return kept.cancelled.is_set()


class StoreClient:
    """A Router's side of the actor, found when it is first used. Calls are made in a context of their own: Ray would cancel them
    with the request that made them. Raises RuntimeError while the actor cannot be reached."""

    def __init__(self, find: Callable[[], Awaitable[Any]]) -> None:
        self._find = find
        self._actor: Any | None = None

    async def put(self, tenant: str, name: str, record: bytes, live: bool = False) -> None:
        await self._ask("put", tenant, name, record, live)

    async def get(self, tenant: str, name: str) -> tuple[bytes, bool] | None:
        return await self._ask("get", tenant, name)

    async def delete(self, tenant: str, name: str) -> bool:
        return await self._ask("delete", tenant, name)

    async def cancel(self, tenant: str, name: str) -> bool:
        return await self._ask("cancel", tenant, name)

    async def watch(self, tenant: str, name: str) -> bool:
        return await self._ask("watch", tenant, name)

    async def _ask(self, method: str, *args: Any) -> Any:
        from ray.exceptions import RayActorError

        try:
            if self._actor is None:
                self._actor = await self._find()
            return await contextvars.Context().run(getattr(self._actor, method).remote, *args)
        except (RayActorError, ValueError) as error:
            self._actor = None
            raise RuntimeError("the store of responses cannot be reached") from error
