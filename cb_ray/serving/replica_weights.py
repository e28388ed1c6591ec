"""A replica's part in a weight update: it loads what is wanted before it serves, then obeys the Board's orders one by one.

Owns `ReplicaWeights`. Knows the engine and the Board by a few methods each; the engine's work is done in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

from ..errors import EngineStoppedError, WeightsError
from ..routing.weights import Order, Report
from .board_weights import Current, Stored

logger = logging.getLogger("ray.serve")
_RETRY_S = 0.25


class Reloadable(Protocol):
    """What is needed of `engine.manager.ContinuousBatchingManager`."""

    def prepare_weights(self, source: Any) -> Any: ...
    def pack_weights(self) -> Any: ...
    def pause(self, *, invalidate: bool = True) -> AbstractContextManager[None]: ...
    def update_weights(
        self, source: Any, *, weights_version: int | None = None, recompute: bool = False, restore_from: Any = None
    ) -> Any: ...


class ReplicaWeights:
    """`find` gives the Board's handle, and raises ValueError while there is none; `forget` makes it look anew; `model` is what
    version 0 was loaded from.
    """

    def __init__(
        self, replica: str, model: str, engine: Reloadable, find: Callable[[], Any], forget: Callable[[], None] = lambda: None
    ) -> None:
        self.has = Current(model=model)
        self.unfit: Exception | None = None  # the Board wants this replica replaced
        self._replica, self._engine, self._find, self._forget = replica, engine, find, forget
        self._prepared: tuple[int, Any] | None = None
        self._pause = _Pause(engine)
        self._obeying = False
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load what the pool wants, tell the Board, and listen to it from then on.

        Raises WeightsError when it cannot be had, or is not what the other replicas have: such a replica must not serve.
        """
        wanted: Current = await self._find().current_weights.remote(self.has.model)
        if wanted.version:
            loaded = await self._load(wanted.version, wanted.source, recompute=False)
            if wanted.fingerprint and loaded.fingerprint != wanted.fingerprint:
                raise WeightsError(
                    f"version {wanted.version} read here is not what the other replicas have ({loaded.fingerprint}, "
                    f"{wanted.fingerprint}); its source must give the same everywhere and at all times"
                )
        await self._find().attach_weights.remote(self._replica, self.has)
        self._task = asyncio.create_task(self._listen())

    @property
    def stands_still(self) -> bool:
        """Whether no step need be made now: it is paused, or its weights are being loaded."""
        return self._obeying or self._pause.held

    def close(self) -> None:
        self._closing.set()
        self._pause.end()
        if self._task is not None:
            self._task.cancel()

    async def _listen(self) -> None:
        reports: list[Report] = []
        attached = True
        while not self._closing.is_set():
            try:
                if not attached:
                    self._pause.end()  # the Board that ordered it is gone; a new one says whether it is still wanted
                    if await self._find().attach_weights.remote(self._replica, self.has):
                        await self._give()
                    attached, reports = True, []
                orders = await self._find().weights_orders.remote(self._replica, reports)
            except (RayActorError, ValueError):  # the Board has died, and is made anew by Serve
                attached = False
                self._forget()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), _RETRY_S)
                continue
            attached = orders is not None
            reports = [await self._obey(order, source) for order, source in orders or ()]

    async def _give(self) -> None:
        """A new Board wants the weights themselves."""
        try:
            packed = await asyncio.to_thread(self._engine.pack_weights)
        except WeightsError as error:  # of a divided model no rank has them all
            logger.warning("the Board was lost with the weights that it kept, and this replica cannot give them: %s", error)
            return
        stored = Stored(await asyncio.to_thread(ray.put, packed))
        self.has = replace(self.has, source=stored)
        await self._find().give_weights.remote(self.has.version, stored)

    async def _obey(self, order: Order, source: Any) -> Report:
        """Whatever goes wrong is told, not raised: the Board decides what it means for the pool."""
        self._obeying = True
        try:
            if order.kind == "pause":
                await asyncio.to_thread(self._pause.begin)
                return Report(number=order.number)
            if order.kind == "resume":
                await asyncio.to_thread(self._pause.end)
                return Report(number=order.number)
            if order.kind == "check":
                prepared = await asyncio.to_thread(self._engine.prepare_weights, await self._open(source))
                self._prepared = (order.version, prepared)
                return Report(number=order.number, fingerprint=prepared.fingerprint)
            if order.kind == "retire":
                self.unfit = WeightsError("this replica could not take the weights that the pool has")
                return Report(number=order.number)
            loaded = await self._load(order.version, source, order.recompute)
            return Report(number=order.number, fingerprint=loaded.fingerprint)
        except Exception as error:
            logger.exception("weights version %d could not be %sed", order.version, order.kind)
            told = error if isinstance(error, WeightsError) else WeightsError(f"{type(error).__name__}: {error}")
            return Report(number=order.number, error=WeightsError(f"replica {self._replica}: {told}"))
        finally:
            self._obeying = False

    async def _load(self, version: int, source: Any, recompute: bool) -> Any:
        kept, self._prepared = self._prepared, None
        opened = kept[1] if kept is not None and kept[0] == version else await self._open(source)
        loaded = await asyncio.to_thread(
            self._engine.update_weights,
            opened,
            weights_version=version,
            recompute=recompute,
            restore_from=_again(self.has),
        )
        self.has = replace(self.has, version=version, fingerprint=loaded.fingerprint, source=source)
        return loaded

    async def _open(self, source: Any) -> Any:
        if source is None:
            return self.has.model
        return await source.ref if isinstance(source, Stored) else source


class _Pause:
    """Holds the engine in a pause from a thread of its own, since a pause belongs to the thread that entered it."""

    def __init__(self, engine: Reloadable) -> None:
        self._engine = engine
        self._end: threading.Event | None = None
        self._begun = threading.Event()

    @property
    def held(self) -> bool:
        """Whether the engine stands still or is about to."""
        return self._end is not None

    @property
    def begun(self) -> bool:
        """Whether no step is made any more."""
        return self.held and self._begun.is_set()

    def begin(self) -> None:
        """Returns when the engine stands still, or cannot be paused because it has ended."""
        if self._end is not None:
            return
        end, begun = threading.Event(), threading.Event()
        self._end, self._begun = end, begun

        def hold() -> None:
            try:
                with self._engine.pause(invalidate=False):
                    begun.set()
                    end.wait()
            except EngineStoppedError:
                logger.info("the engine ended while it was to be paused")
            finally:
                begun.set()

        threading.Thread(target=hold, name="cb-ray pause", daemon=True).start()
        begun.wait()

    def end(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end.set()


def _again(had: Current) -> Any:
    """Where the weights that are in place can be read again."""
    source = had.source
    if source is None:
        return had.model if not had.version else None
    return (lambda: ray.get(source.ref)) if isinstance(source, Stored) else source


def as_source(source: Any) -> Any:
    """What a caller hands over, made fit to cross Ray: tensors go to the object store, where they are read without a copy."""
    if isinstance(source, ray.ObjectRef):
        return Stored(source)
    if isinstance(source, Mapping) or type(source).__name__ == "PackedWeights":
        from ..engine.weights_source import PackedWeights, pack_weights

        packed = source if isinstance(source, PackedWeights) else pack_weights(source)
        return Stored(ray.put(packed))
    return source if callable(source) else str(source)
