"""The ranks of one Engine replica: where they run, how they find each other, and that none outlives the others.

Owns `Team` (in the replica: the followers' actors) and `FollowerRank` (such an actor). Knows Ray's placement groups; what a rank
does is `engine/`'s business.

    placement group of the replica      ┌ bundle 0 ──────────┐ ┌ bundle 1 ─────────┐     ┌ bundle N−1 ───────┐
    (made and removed by Serve)         │ Engine = rank 0    │ │ FollowerRank 1    │  …  │ FollowerRank N−1  │
                                        └──┬───────┬─────────┘ └─────▲─────────────┘     └─────▲─────────────┘
                                           │       └── orders, gloo ─┴─────────────────────────┘
                                           └── TCPStore on a free port: everyone meets there

A follower that ends while it should follow ends the replica's process at once: Ray ends the other followers with their owner, Serve
removes the placement group and makes a new replica, and streams go on elsewhere (`steady_source.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import ConfigError, EngineFailedError
from .args import EngineArgs

logger = logging.getLogger("ray.serve")
T = TypeVar("T")
_PING_TIMEOUT_S = 5.0  # a rank that cannot say a word for this long does not step either
_PATIENCE = 3  # checks in a row without an answer: a rank that is only slow gets through one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank's place: where the store of its team listens, and which of how many it is."""

    host: str
    port: int
    rank: int
    size: int

    def join(self, device: Any, *, graph_mixing: bool) -> None:
        """Meet the others, from the process that has this place."""
        from ..engine.rendezvous import join

        address = ray.util.get_node_ip_address()
        join(self.host, self.port, self.rank, self.size, address=address, device=device, graph_mixing=graph_mixing)


def bundles(engine: EngineArgs) -> list[dict[str, float]]:
    """What each rank of a replica is given, rank 0 first."""
    if engine.placement_group_bundles is not None:
        return [dict(bundle) for bundle in engine.placement_group_bundles]
    size = engine.tensor_parallel_size
    shares = {"CPU": (engine.num_cpus or 0.0) / size, "GPU": (engine.num_gpus or 0.0) / size, **engine.resources}
    if not any(shares.values()):
        shares["CPU"] = 0.01  # a bundle of nothing cannot be placed
    return [{name: round(amount, 4) for name, amount in shares.items() if amount} for _ in range(size)]


def actor_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """The options of an actor that takes a whole bundle."""
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "resources": others}
    return {**options, **({"memory": bundle["memory"]} if "memory" in bundle else {})}


def by_node(table: dict[str, Any]) -> list[int]:
    """Bundles in the order of ranks: 0 first, then those on its node, then node by node, so that neighbours are near."""
    nodes: dict[int, str] = {int(index): node for index, node in table["bundles_to_node_id"].items()}
    first: dict[str, int] = {}
    for index in sorted(nodes):
        first.setdefault(nodes[index], index)
    return sorted(nodes, key=lambda index: (first[nodes[index]], index))


class Team:
    """The followers of the replica in whose process this is made, from their start to their end."""

    def __init__(self, model: str, engine: EngineArgs) -> None:
        """Starts the followers, which load and wait for the leader. Call on an event loop.

        Raises ConfigError when the replica was given no placement group.
        """
        from ..engine.rendezvous import open_store

        group = ray.util.get_current_placement_group()
        if group is None:
            raise ConfigError(
                "a tensor parallel replica needs a placement group; deploy it with cb_ray.serving.app:build, which asks for one",
                "engine.tensor_parallel_size",
            )
        size = engine.tensor_parallel_size
        self._store, host, port = open_store(ray.util.get_node_ip_address(), size)
        self.place = Place(host=host, port=port, rank=0, size=size)
        order = by_node(placement_group_table(group))
        self._actors = [
            _start(group, bundle, engine, Place(host=host, port=port, rank=rank, size=size))
            for rank, bundle in enumerate(order)
            if rank
        ]
        self._ends = [actor.follow.remote(model, engine) for actor in self._actors]
        self._closing = False
        self._misses = 0
        self._watch: asyncio.Task[None] | None = None

    async def beside(self, load: Callable[[], T]) -> T:
        """`load` in a thread while the followers load, too. Raises what it raises, or what a follower raised first."""
        mine = asyncio.ensure_future(_in_thread(load))
        theirs = [asyncio.ensure_future(_end(end)) for end in self._ends]
        try:
            done, _ = await asyncio.wait({mine, *theirs}, return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in theirs if task in done]
            if mine not in done or mine.exception() is not None:
                await asyncio.wait(theirs, timeout=1.0)  # the first cause is often somebody else's
                ended = [task for task in theirs if task.done()]
            if ended:
                raise ended[0].result()
            return await mine
        except BaseException:
            self.close()
            raise

    def watch(self) -> None:
        """From now on, the replica's process ends with the first follower that ends."""
        self._watch = asyncio.ensure_future(self._end_with_them())

    async def _end_with_them(self) -> None:
        done, _ = await asyncio.wait(
            [asyncio.ensure_future(_end(end)) for end in self._ends], return_when=asyncio.FIRST_COMPLETED
        )
        if self._closing:
            return
        logger.error("A rank of this replica is lost, and the replica ends with it: %s", next(iter(done)).result())
        logging.shutdown()
        os._exit(1)

    @property
    def is_lost(self) -> bool:
        """Whether a rank has been silent for so many checks in a row that it is not waited for any more."""
        return self._misses >= _PATIENCE

    async def check(self) -> None:
        """Raises EngineFailedError when a rank does not answer."""
        try:
            await asyncio.wait_for(asyncio.gather(*(actor.ping.remote() for actor in self._actors)), _PING_TIMEOUT_S)
            self._misses = 0
        except Exception as error:
            self._misses += 1
            raise EngineFailedError(f"a rank of this replica does not answer: {type(error).__name__} {error}".strip()) from error

    def prepare_weights(self, source: Any) -> list[str]:
        """Followers read and check new weights for their shares: the fingerprints. Blocks; raises what a follower raises."""
        return self._all("prepare_weights", source)

    def apply_weights(self, restore_from: Any) -> list[str]:
        """Followers copy what they have checked, while nobody computes."""
        return self._all("apply_weights", restore_from)

    def _all(self, method: str, argument: Any) -> list[str]:
        try:
            return ray.get([getattr(actor, method).remote(argument) for actor in self._actors])
        except RayTaskError as error:
            raise error.cause from None

    def part(self) -> None:
        """From now on followers may end: the leader is about to stop them."""
        self._closing = True

    def close(self) -> None:
        """End the followers. Idempotent."""
        self.part()
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)


def _start(group: PlacementGroup, bundle: int, engine: EngineArgs, place: Place) -> Any:
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=True
    )
    wanted = actor_options(bundles(engine)[bundle])
    return ray.remote(FollowerRank).options(**wanted, max_restarts=0, scheduling_strategy=strategy).remote(place)


async def _end(end: Any) -> Exception:
    """How a follower ended."""
    try:
        await end
    except Exception as error:
        return getattr(error, "cause", None) or error
    return EngineFailedError("a rank stopped following")


async def _in_thread(work: Callable[[], T]) -> T:
    """`work` in a thread that nobody waits for when the process ends: it may be stuck in a collective whose other ranks are gone."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if not result.done():
            result.set_result(value) if error is None else result.set_exception(error)  # type: ignore[arg-type]

    def run() -> None:
        try:
            value, error = work(), None
        except BaseException as raised:
            value, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="cb-ray rank", daemon=True).start()
    return await result


class FollowerRank:
    """An actor that is one rank of a replica and not its first. It lives and dies with the replica's process, which owns it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._model: Any = None
        self._update: Any = None

    async def follow(self, model: str, engine: EngineArgs) -> None:
        """Load this rank's share of the model and follow the leader until it says stop. Raises whatever keeps it from that."""
        from .engine_loading import load_follower

        failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def tell(error: BaseException) -> None:
            loop.call_soon_threadsafe(lambda: failed.done() or failed.set_result(error))

        def live() -> None:
            follower, self._model = load_follower(model, engine, self._place, tell)
            follower.run()
            if follower.error is not None:
                raise follower.error

        living = asyncio.ensure_future(_in_thread(live))
        await asyncio.wait({living, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise failed.result()
        await living

    async def prepare_weights(self, source: Any) -> str:
        """Read and check new weights for this rank's share, and keep them for `apply_weights`: their fingerprint."""
        from ..engine.weights import Update

        self._update = await asyncio.to_thread(Update, source, self._model)
        return self._update.fingerprint

    async def apply_weights(self, restore_from: Any) -> str:
        """Copy them. The leader stands still, so this rank waits for an order meanwhile."""
        update, self._update = self._update, None
        await asyncio.to_thread(update.apply, restore_from)
        return update.fingerprint

    async def ping(self) -> int:
        """Whether this process still runs: its rank."""
        return self._place.rank
