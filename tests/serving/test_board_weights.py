"""A Board and three replicas in one event loop, without Ray: real engines over tiny models, updates that fail at every place."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from cb_ray.engine.generate import init_continuous_batching
from cb_ray.engine.weights import Update
from cb_ray.errors import NoReplicaError, WeightsError
from cb_ray.routing.members import Member
from cb_ray.routing.pool import Pool
from cb_ray.routing.replies import Changes
from cb_ray.serving.board_weights import BoardWeights, Current
from cb_ray.serving.replica_weights import ReplicaWeights
from tests.engine.test_weights import PROMPT, SMALL, alone, greedy
from tests.tiny import make_model


class Handle:
    """A Board's actor as replicas see it. `alive` False: every call fails, as calls of a dead actor do."""

    METHODS: ClassVar = {
        "current_weights": "current",
        "attach_weights": "attach",
        "give_weights": "give",
        "weights_orders": "orders",
        "known_weights": "known",
    }

    def __init__(self, board: BoardWeights) -> None:
        self.board, self.alive, self.open = board, True, list[asyncio.Task[Any]]()

    def __getattr__(self, name: str) -> Any:
        return _Method(self, self.METHODS[name])

    def die(self) -> None:
        self.alive = False
        for call in self.open:
            call.cancel()


class _Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *args: Any) -> Awaitable[Any]:
        return asyncio.ensure_future(self._call(*args))

    async def _call(self, *args: Any) -> Any:
        if not self._handle.alive:
            raise RayActorError
        call = asyncio.ensure_future(getattr(self._handle.board, self._name)(*args))
        self._handle.open.append(call)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if call.cancelled():
                raise RayActorError from None
            raise


class Stage:
    """The pool, its Board, and replicas over models of seed 0, which is what the source "model" gives."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.changes: list[Changes] = []
        self.off: list[frozenset[str]] = []
        self.new_board()
        self.engines: dict[str, Any] = {}
        self.replicas: dict[str, ReplicaWeights] = {}

    def new_board(self, peers: Callable[[], list[Any]] = list) -> None:
        self.board = BoardWeights(
            self.pool, clock=asyncio.get_running_loop().time, apply=self.changes.append, peers=peers, lease_timeout_s=3
        )
        self.handle = Handle(self.board)

    def serve(self) -> None:
        """Serve counts all replicas as running."""
        self.pool.members(0.0, [Member(replica=name, slots=4) for name in self.replicas])
        self.board.members(set(self.replicas), False)

    async def start(self, name: str) -> ReplicaWeights:
        def make() -> Any:
            engine = init_continuous_batching(make_model("llama"), greedy(), SMALL)
            engine.start()
            return engine

        self.engines[name] = await asyncio.to_thread(make)
        replica = ReplicaWeights(name, "model", Sources(self.engines[name]), lambda: self.handle)
        await replica.start()
        self.replicas[name] = replica
        return replica

    async def say(self, version: int, seed: int) -> None:
        """Every engine answers with the weights of `seed`, and calls them `version`."""
        wanted = alone(make_model("llama", seed=seed), PROMPT)
        for name, engine in self.engines.items():
            output = await asyncio.to_thread(lambda engine=engine: engine.get_result(engine.add_request(PROMPT), timeout=20))
            assert (output.generated_tokens, output.weights_versions) == (wanted, (version,)), name


@functools.cache
def state_of(seed: int) -> Any:
    """Made on the main thread first: torch's random generator is one for all threads."""
    return make_model("llama", seed=seed).state_dict()


class Sources:
    """An engine whose weights come from "model" or from "seed N"; `fails` makes copying fail, after the check."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.fails, self.loads = engine, False, list[int]()

    def _state(self, source: Any) -> Any:
        return state_of(0 if source == "model" else int(source.removeprefix("seed ")))

    def prepare_weights(self, source: Any) -> Any:
        return self.engine.prepare_weights(source if callable(source) else self._state(source))

    def update_weights(self, source: Any, *, restore_from: Any = None, **how: Any) -> Any:
        if self.fails:
            raise WeightsError("the disk is gone")
        self.loads.append(how["weights_version"])
        update = source if isinstance(source, Update) else self.prepare_weights(source)
        return self.engine.update_weights(update, restore_from=lambda: self._state(restore_from), **how)

    def pack_weights(self) -> Any:
        return self.engine.pack_weights()

    def pause(self, *, invalidate: bool = True) -> Any:
        return self.engine.pause(invalidate=invalidate)


def story(work: Callable[[Stage], Awaitable[None]], replicas: int = 3) -> None:
    for seed in range(4):
        state_of(seed)

    async def run() -> None:
        async with staged(replicas) as stage:
            await asyncio.wait_for(work(stage), 60)

    asyncio.run(run())


@asynccontextmanager
async def staged(replicas: int) -> AsyncGenerator[Stage]:
    stage = Stage()
    stage.board.members(set(), False)  # Serve has said that none runs yet: nobody is waited for
    try:
        for n in range(replicas):
            await stage.start(f"r{n}")
        stage.serve()
        yield stage
    finally:
        for replica in stage.replicas.values():
            replica.close()
        for engine in stage.engines.values():
            await asyncio.to_thread(engine.destroy)


def test_one_after_the_other_and_all_of_them() -> None:
    """The pool has the new weights, nobody is left steered away from, and the caller knows the fingerprint."""

    async def work(stage: Stage) -> None:
        await stage.say(0, 0)
        done = await stage.board.update("seed 1", None, "rolling", "keep")
        assert (done.version, done.replicas) == (1, ("r0", "r1", "r2"))
        await stage.say(1, 1)
        assert done.fingerprint == stage.board.book.fingerprint != ""
        assert all(stage.pool.snapshot(0.0)["replicas"][name]["accepting"] for name in stage.replicas)  # type: ignore[index]

    story(work)


@pytest.mark.parametrize("mode", ["rolling", "all_at_once"])
@pytest.mark.parametrize("broken", ["r0", "r2"])
def test_if_one_cannot_load_all_have_the_old_weights(mode: Any, broken: str) -> None:
    """Whoever had loaded goes back, under the old number; the error names who refused and why."""

    async def work(stage: Stage) -> None:
        await stage.board.update("seed 1", None, "rolling", "keep")
        engine: Any = stage.replicas[broken]._engine
        engine.fails = True
        with pytest.raises(WeightsError, match=f"replica {broken}: the disk is gone"):
            await stage.board.update("seed 2", None, mode, "recompute")
        engine.fails = False
        await stage.say(1, 1)
        assert stage.board.book.wanted == 1 and not stage.board.book.off
        done = await stage.board.update("seed 3", None, mode, "keep")
        assert done.version == 3, "the number of weights that were taken back is not used again"
        await stage.say(3, 3)

    story(work)


def test_what_does_not_fit_is_refused_before_anybody_changes() -> None:
    """A source that raises: no replica loads anything."""

    async def work(stage: Stage) -> None:
        def raising() -> Any:
            raise ConnectionError("no route")

        with pytest.raises(WeightsError, match="no route"):
            await stage.board.update(raising, None, "rolling", "keep")
        await stage.say(0, 0)
        assert all(not replica._engine.loads for replica in stage.replicas.values())  # type: ignore[attr-defined]

    story(work)


def test_who_starts_later_has_what_is_wanted() -> None:
    """A replica that starts after an update loads the new weights before it attaches; one whose source gives others does not serve."""

    async def work(stage: Stage) -> None:
        await stage.board.update("seed 1", None, "rolling", "keep")
        await stage.start("late")
        await stage.say(1, 1)
        stage.board._sources[1] = "seed 2"  # the directory was overwritten meanwhile
        with pytest.raises(WeightsError, match="not what the other replicas have"):
            await stage.start("wrong")

    story(work, replicas=1)


def test_a_board_that_was_made_anew_learns_from_the_replicas() -> None:
    """It knows the version again, gives it to those who start, and does not answer them before it knows."""

    async def work(stage: Stage) -> None:
        await stage.board.update("seed 1", None, "rolling", "keep")
        old = stage.handle
        stage.new_board()
        stage.board.members(set(stage.replicas), False)
        asked = asyncio.ensure_future(stage.board.current("model"))
        await asyncio.sleep(0)
        assert not asked.done(), "two replicas run that have not told what they have"
        old.die()
        current = await asked
        assert (current.version, current.source, current.fingerprint) == (1, "seed 1", stage.board.book.fingerprint)
        assert (await stage.board.update("seed 2", None, "rolling", "keep")).version == 2
        await stage.say(2, 2)

    story(work, replicas=2)


@pytest.mark.parametrize("model", ["model", "another"])
def test_a_new_version_of_the_application_takes_the_weights_over(model: str) -> None:
    """If it is about the same model; a new model comes with its own."""

    async def work(stage: Stage) -> None:
        await stage.board.update("seed 1", None, "rolling", "keep")
        old = stage.handle
        stage.new_board(peers=lambda: [old])
        stage.board.members(set(), True)
        assert (await stage.board.current(model)).version == (1 if model == "model" else 0)
        with pytest.raises(WeightsError, match="rolled out"):
            await stage.board.update("seed 2", None, "rolling", "keep")

    story(work, replicas=1)


def test_an_empty_pool_takes_no_weights() -> None:
    """There is nobody to check them."""

    async def work(stage: Stage) -> None:
        with pytest.raises(NoReplicaError):
            await stage.board.update("seed 1", None, "rolling", "keep")
        assert await stage.board.known() == Current()

    story(work, replicas=0)


def test_a_pause_holds_everybody_and_ends_with_its_last_holder() -> None:
    """Nothing steps inside, whoever starts stands still too, weights may be loaded, and a holder that dies lets go in time."""

    async def work(stage: Stage) -> None:
        await stage.board.hold("one")
        await stage.board.hold("two")
        names = {name: engine.add_request(PROMPT) for name, engine in stage.engines.items()}
        await stage.start("late")
        while not stage.replicas["late"]._pause.begun:
            await asyncio.sleep(0)
        names["late"] = stage.engines["late"].add_request(PROMPT)
        await stage.board.update("seed 1", None, "all_at_once", "keep")
        await stage.board.let_go("one")
        assert all(replica.stands_still for replica in stage.replicas.values())
        assert [engine.current_batch for engine in stage.engines.values()] == [0] * 3
        while stage.board._holds:  # nobody keeps the second one, so its time runs out
            await asyncio.sleep(0.05)
        wanted = alone(make_model("llama", seed=1), PROMPT)
        for name, engine in stage.engines.items():
            output = await asyncio.to_thread(lambda e=engine, n=names[name]: e.get_result(n, timeout=20))
            assert (output.generated_tokens, output.weights_versions) == (wanted, (1,))

    story(work, replicas=2)
