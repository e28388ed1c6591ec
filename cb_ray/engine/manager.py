"""`ContinuousBatchingManager`: transformers' methods, under their names and with their meaning, over the engine thread.

Owns the engine's life (start, stop, pause, new weights, destroy). Makes the thread; decides nothing about batches. Every method
may be called from any thread. Teardown is the engine thread's own: `stop` asks and waits, no more. What concerns requests and
outputs is in `request_side.py`.

    caller ──add_request──▶ ids, validation ──▶ Inbox ──▶ EngineLoop (thread) ──▶ Outbox ──▶ get_result, handlers, streams
"""

from __future__ import annotations

import atexit
import copy
import logging
import pickle
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from ..config import ContinuousBatchingConfig, EngineFacts, WorkloadHints
from ..core.plan import BatchPlan
from ..errors import EngineStoppedError, WeightsError, WeightsLostError
from ..messages import EngineStats, GenerationOutput
from .gates import PauseGate, StopGate, StopLevel, UpdateGate, turnstile
from .intake import Intake, Terms
from .loop import EngineLoop
from .mailbox import Broken, DropCache, Inbox, NewWeights, Outbox, PageNames, Results, Tell
from .parts import Build, EngineParts
from .request_side import RequestSide
from .sampling_config import SamplingPolicy

if TYPE_CHECKING:
    from .follower import FollowerLoop
    from .weights import LoadedWeights, OtherRanks, Update
    from .weights_source import PackedWeights, WeightsSource

logger = logging.getLogger(__name__)
CACHED_MANAGER = "_cb_ray_manager"  # attribute of a model that keeps its manager between sessions
_EXIT_TIMEOUT = 10.0  # seconds that a program waits for a forgotten engine when it ends


@dataclass(slots=True)
class _Session:
    """From one start to the end of its thread."""

    loop: EngineLoop | FollowerLoop
    stop: StopGate
    pause: PauseGate
    thread: threading.Thread
    keep: bool = False


class BackgroundThreadStatus:
    """What became of the engine thread."""

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        self._manager = manager

    @property
    def fatal_error(self) -> Exception | None:
        """The error that ended the last session, until the next start; None when there was none."""
        return self._manager.fatal_error


class ContinuousBatchingManager(RequestSide):
    """Serves requests on a thread of its own, batching them step by step.

    `build` makes the engine's parts (default: `engine.build.build`); `clock` gives seconds, and is what times in outputs refer
    to; `tokenizer` is for grammars, by default the one beside the model's files.
    Raises ConfigError, UnsupportedModelError or MemoryError when the engine cannot be made; the model is then left as it was.
    """

    def __init__(
        self,
        model: Any,
        generation_config: Any,
        continuous_batching_config: Any = None,
        workload_hints: WorkloadHints | None = None,
        *,
        build: Build | None = None,
        clock: Callable[[], float] = time.perf_counter,
        tokenizer: Any = None,
    ) -> None:
        self.model = model
        self.generation_config = copy.deepcopy(generation_config)
        self.wish = ContinuousBatchingConfig.of(continuous_batching_config)
        self.warmed_up = False
        self.background_thread_status = BackgroundThreadStatus(self)
        self._hints = workload_hints or WorkloadHints()
        self._builder = build
        self._again: Callable[[], EngineParts] | None = None
        self._clock = clock
        self._life = turnstile()
        self._updating = UpdateGate()
        self._destroyed = False
        self._session: _Session | None = None
        self._pages: PageNames | None = None
        self.on_start: Callable[[], None] | None = None  # called first in the engine thread, from the next start on
        self.others: OtherRanks | None = None  # where the other ranks of a divided model have no manager: who loads weights there
        self.on_step: Callable[[BatchPlan, float], None] | None = (
            None  # told of each step and its seconds, from the next start on
        )
        self._parts: EngineParts | None
        parts = self._parts = self._build()
        if tokenizer is not None and parts.grammars is not None:
            parts.grammars.use(tokenizer)
        self.facts: EngineFacts = parts.facts
        self.summary = parts.summary  # what was chosen for this model on this machine, in a line
        self.is_tp_driver = parts.follower is None
        self._results = Results()
        self._outbox = Outbox(self._results)
        self._inbox = Inbox(self.facts.max_queue_size)
        self._stats = parts.core.stats()
        try:
            policy = self._policy(parts.limits.vocab_size)
        except BaseException:
            self._drop_parts()
            raise
        self._policy_of_requests, self.num_return_sequences = policy, policy.num_return_sequences
        self._intake = Intake(
            policy=policy,
            limits=parts.limits,
            inbox=self._inbox,
            outbox=self._outbox,
            clock=clock,
            grammars=parts.grammars,
        )

    def _policy(self, vocab_size: int) -> SamplingPolicy:
        return SamplingPolicy(
            self.generation_config,
            getattr(self.model, "config", None),
            vocab_size=vocab_size,
            per_request=self.facts.per_request_processors,
            drop_unsupported=self.facts.drop_unsupported_processors,
            return_logprobs=self.facts.return_logprobs,
        )

    def _build(self) -> EngineParts:
        if self._again is None:
            build = self._builder
            if build is None:
                from .build import build
            parts = build(self.model, self.generation_config, self.wish, self._hints)
        else:
            parts = self._again()
        self._again = parts.rebuild
        return parts

    # ---- what there is to see -----------------------------------------------------------------------------------------------

    @property
    def continuous_batching_config(self) -> ContinuousBatchingConfig:
        """The config with what was left open filled in; a new object each time."""
        facts = self.facts
        config = copy.copy(self.wish)
        config.page_size, config.num_blocks = facts.page_size, facts.num_blocks
        config.max_batch_tokens, config.max_requests_per_batch = facts.max_batch_tokens, facts.max_requests_per_batch
        config.max_blocks_per_request = facts.max_blocks_per_request
        config.use_async_batching = facts.use_async_batching
        config.use_cuda_graph = (facts.use_varlen_graphs, facts.use_decode_graphs)
        config.safety_margin, config.seed = facts.safety_margin, facts.seed
        config.q_padding_interval_size, config.kv_padding_interval_size = facts.q_padding_interval, facts.kv_padding_interval
        return config

    @property
    def fatal_error(self) -> Exception | None:
        """The error that ended the last session, until the next start."""
        error = None if self._session is None else self._session.loop.error
        return error if error is None or isinstance(error, Exception) else RuntimeError(repr(error))

    @property
    def terms(self) -> Terms:
        """What a request may ask here, and what it gets when it leaves something out."""
        return Terms(limits=self._intake.limits, policy=self._policy_of_requests)

    @property
    def current_batch(self) -> int:
        """Steps made in this session."""
        return 0 if self._session is None else self._session.loop.num_steps

    def stats(self) -> EngineStats:
        """The engine's latest snapshot of itself, some 50 ms old at most while it is busy; what is on its way in is waiting."""
        latest = self._stats if self._session is None else self._session.loop.stats
        return replace(latest, num_waiting=self._inbox.waiting, num_unseated=self._inbox.left)

    def is_running(self) -> bool:
        """Whether the engine thread lives: from `start` until everything it had to do after a stop is done."""
        session = self._session
        return session is not None and session.thread.is_alive()

    def track_pages(self) -> PageNames:
        """Tell from now on which prefixes the cache holds, for a router that reads it. Raises RuntimeError after `start`."""
        if self.is_running():
            raise RuntimeError("track_pages() must be called before start()")
        if self._pages is None:
            self._pages = PageNames()
            if self._parts is not None:
                self._parts.core.track_names()
        return self._pages

    # ---- life ---------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread. While it runs: a warning, no more. While it finishes after a stop: waits, then starts anew.

        Raises EngineStoppedError after `destroy`, and whatever building the engine raises.
        """
        with self._life:
            if self._destroyed:
                raise EngineStoppedError("this manager was destroyed; make a new one")
            session = self._session
            if session is not None and session.thread.is_alive():
                if session.stop.level == StopLevel.RUNNING:
                    logger.warning("the engine is running already; start() changes nothing")
                    return
                session.thread.join()
            parts = self._parts or self._rebuild()
            self._inbox.limit = self.facts.max_queue_size
            stop, pause = StopGate(self._inbox.ring), PauseGate(self._inbox.ring)
            loop = self._loop(parts, stop, pause)
            thread = threading.Thread(target=self._live, name="cb-ray engine", daemon=True)
            self._session = _Session(loop, stop, pause, thread)
            self._results.open()
            self._inbox.reopen()
            atexit.register(self._at_exit)
            thread.start()

    def _loop(self, parts: EngineParts, stop: StopGate, pause: PauseGate) -> EngineLoop | FollowerLoop:
        if parts.follower is not None:
            from .follower import FollowerLoop

            return FollowerLoop(parts.follower, parts.runner, stats=parts.core.stats(), pause=pause)
        return EngineLoop(
            core=parts.core,
            runner=parts.runner,
            inbox=self._inbox,
            outbox=self._outbox,
            stop=stop,
            pause=pause,
            clock=self._clock,
            pages=self._pages,
            on_step=self.on_step,
            tell=None if parts.orders is None else parts.orders.tell,
        )

    def _rebuild(self) -> EngineParts:
        parts = self._parts = self._build()
        if self._stats.weights_version:
            parts.core.set_weights_version(self._stats.weights_version)
        if self._pages is not None:
            self._pages.clear()
            parts.core.track_names()
        self._intake.limits, self._intake.grammars, self.facts = parts.limits, parts.grammars, parts.facts
        return parts

    def _live(self) -> None:
        """The thread: a session, and what has to be done after it."""
        session = self._session
        assert session is not None
        try:
            if self.on_start is not None:
                self.on_start()
            session.loop.run()
        finally:
            atexit.unregister(self._at_exit)
            self._stats = session.loop.stats
            self._agree_on_end(session)
            if session.loop.error is not None or not session.keep:
                self._drop_parts()
            session.pause.end(session.loop.error)
            self._results.close()

    def _agree_on_end(self, session: _Session) -> None:
        """The leader's session ends those of the other ranks, and says whether parts are kept."""
        if not self.is_tp_driver:
            session.keep = getattr(session.loop, "keep", False)
            self._inbox.refuse("the engine is stopped; start it first")
        elif self._parts is not None and self._parts.orders is not None:
            self._parts.orders.stop(keep=session.keep and session.loop.error is None)

    def _drop_parts(self) -> None:
        parts, self._parts, self.warmed_up = self._parts, None, False
        if parts is not None:
            parts.runner.close()

    def _at_exit(self) -> None:
        """A program that ends without `stop` takes its engine with it."""
        self.stop(block=True, timeout=_EXIT_TIMEOUT, hard_stop=True)

    def warmup(self) -> None:
        """Run what compiles or captures before the first request pays for it. Allowed before `start` and while running.

        Ranks that do not lead have nothing to do: they run what the leader's warm-up runs, once they are started.
        """
        if not self.is_tp_driver:
            self.warmed_up = True
            return
        session = self._session
        if session is not None and session.thread.is_alive():
            with session.pause.hold():
                self._warm_up()
            return
        with self._life:
            self._warm_up()

    def _warm_up(self) -> None:
        parts = self._parts or self._rebuild()
        parts.runner.install()
        try:
            parts.runner.warmup(progress=logger.isEnabledFor(logging.INFO))
        finally:
            parts.runner.restore()
        self.warmed_up = True

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests, finish those that are here (`hard_stop`: fail them with what they have), then end the thread.

        `block` waits for that, up to `timeout` seconds; the engine finishes by itself whether anybody waits or not.
        `keep_for_next_session` keeps cache and manager for the next `init_continuous_batching` on this model.
        Raises RuntimeError inside one's own `pause`.
        """
        session = self._session
        if session is None or not session.thread.is_alive():
            logger.warning("stop() has nothing to stop: the engine is not running")
            return
        if session.pause.held_here():
            raise RuntimeError("stop() inside pause() of the same thread would wait for itself; leave the pause first")
        asked = time.perf_counter()
        session.keep = keep_for_next_session
        if keep_for_next_session:
            setattr(self.model, CACHED_MANAGER, self)
        self._inbox.refuse("the engine is stopping")
        session.stop.rise(StopLevel.HARD if hard_stop else StopLevel.FLUSH)
        if hard_stop:
            session.pause.let_go()
        if block:
            self.join(asked, timeout)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the engine thread. `stop_trigger_time` is the perf_counter reading that the logged duration starts at."""
        session = self._session
        if session is None:
            return
        session.thread.join(timeout)
        if session.thread.is_alive():
            logger.warning("the engine is still finishing its requests after %g s; it will end by itself", timeout or 0.0)
        else:
            logger.info("the engine ended %.3f s after it was asked to stop", time.perf_counter() - stop_trigger_time)

    def destroy(self) -> None:
        """Finish what is here and give everything back. Final: there is no start after it. May be called again."""
        if self.is_running():
            self.stop(block=True)
        with self._life:
            self._destroyed = True
            self._drop_parts()
        gone = "this manager was destroyed"
        self._inbox.refuse(gone)
        self._outbox.fail_live(EngineStoppedError(gone))
        if self.model.__dict__.get(CACHED_MANAGER) is self:
            delattr(self.model, CACHED_MANAGER)

    @contextmanager
    def pause(self, *, invalidate: bool = True, recompute: bool = False, weights_version: int | None = None) -> Generator[None]:
        """Inside, the engine stands still between two steps and the model is its owner's: to run, to load other weights into.

        Several threads may hold a pause; the engine goes on when the last one leaves. `invalidate` (default) counts the weights
        as new, so that no page computed before is shared with a request that comes after; False is for a pause that changed
        nothing. `weights_version` names the new weights, else they are counted. Requests under way go on over the pages they
        have, or with `recompute` compute them again first. Raises EngineStoppedError (a RuntimeError) when nothing runs.
        """
        session = self._session
        if session is None or not session.thread.is_alive():
            raise EngineStoppedError("the engine is not running, so there is nothing to pause; start it first")
        orders = None if self._parts is None else self._parts.orders
        if orders is not None and orders.owned:
            orders.together = True
        with session.pause.hold():
            try:
                yield
            finally:
                if self.is_tp_driver and (invalidate or recompute or weights_version is not None):
                    self._inbox.put(NewWeights(weights_version, recompute))

    def prepare_weights(self, source: WeightsSource, *, progress_bar: bool = False) -> Update:
        """Check weights whole and read them once, without touching the model: `update_weights` takes what this returns.

        Raises WeightsError when they do not fit.
        """
        from .weights import SharedUpdate, Update

        if self.others is not None:
            return SharedUpdate(source, self.model, self.others, progress=progress_bar)
        return Update(source, self.model, progress=progress_bar)

    def pack_weights(self) -> PackedWeights:
        """The model's present weights, as another engine's `update_weights` takes them; no copy where they lie in host memory."""
        from .weights_source import pack_weights

        if self._parts is not None and (self._parts.orders is not None or self._parts.follower is not None):
            raise WeightsError("the weights of a divided model lie on several ranks; take them from where they were loaded from")
        return pack_weights(self.model.state_dict())

    def update_weights(
        self,
        source: WeightsSource | Update,
        *,
        weights_version: int | None = None,
        recompute: bool = False,
        restore_from: WeightsSource | None = None,
        progress_bar: bool = False,
    ) -> LoadedWeights:
        """Load other weights into the model, running or not: checked whole, read once, then copied while the engine stands still.

        `source` is a directory, a hub id with a revision (`org/name@revision`), tensors by name, or a callable that gives one of
        these, or what `prepare_weights` returned. Where every rank of a divided model has a manager, all of them call it, and each
        keeps its share. Requests stay; see `pause` for `weights_version` and `recompute`. Should copying fail, the old weights are
        read again from `restore_from`, or, without it, were kept in host memory meanwhile (as much as the model has weights).

        Raises WeightsError when the source does not fit (nothing was changed), UpdateRunningError beside another update, and
        WeightsLostError when neither old nor new weights are whole: the engine has then failed.
        """
        from .weights import LoadedWeights, Update

        if self._destroyed:
            raise EngineStoppedError("this manager was destroyed; make a new one")
        if self._parts is not None and self._parts.orders is not None and not self._parts.orders.owned and self.others is None:
            raise WeightsError(
                "the weights of a divided model are loaded by all its ranks, and nobody said how to reach the others"
            )
        with self._updating.through(f"weights version {weights_version or 'next'}"):
            update = source if isinstance(source, Update) else self.prepare_weights(source, progress_bar=progress_bar)
            with self._standing_still() as running:
                begun = time.perf_counter()
                try:
                    update.apply(restore_from)
                except WeightsLostError as error:
                    self._inbox.put(Broken(error))
                    raise
                version = self._next_version(weights_version)
                if running and self.is_tp_driver:
                    self._inbox.put(NewWeights(version, recompute))
                elif not running:
                    self._set_version(version)
        pause_s = time.perf_counter() - begun
        logger.info("weights version %d from %s: stood still for %.3f s", version, update.source, pause_s)
        return LoadedWeights(
            version=version,
            source=update.source,
            fingerprint=update.fingerprint,
            num_bytes=update.num_bytes,
            pause_s=pause_s,
        )

    @contextmanager
    def _standing_still(self) -> Generator[bool]:
        """Nobody computes inside: the engine is paused (True), or does not run and is not started meanwhile (False)."""
        with self._life:
            if not self.is_running():
                yield False
                return
        with self.pause(invalidate=False):
            yield True

    def _next_version(self, wanted: int | None) -> int:
        """The number of the new weights; where every rank has a manager and calls this, the leader's."""
        if wanted is not None:
            return wanted
        if self._parts is not None and self._parts.follower is not None:
            return self._parts.follower.ranks.decide(lambda: 0)
        if self._parts is not None and self._parts.orders is not None:
            return self._parts.orders.ranks.decide(self._count_version)
        return self._count_version()

    def _count_version(self) -> int:
        return (self._stats.weights_version if self._parts is None else self._parts.core.weights_version) + 1

    def _set_version(self, version: int) -> None:
        """For an engine whose thread does not live."""
        self._stats = replace(self._stats, weights_version=version)
        if self._parts is not None:
            self._parts.core.set_weights_version(version)
            self._parts.runner.reload()

    def run_batch(
        self, inputs: Sequence[Iterable[int]], on_end: Callable[[], object], **arguments: Any
    ) -> dict[str, GenerationOutput]:
        """As `RequestSide.run_batch`; every rank of a divided model gets the leader's outputs, whatever its own `inputs` are."""
        if not self.is_tp_driver:
            return self._told_batch(on_end)
        outputs = super().run_batch(inputs, on_end, **arguments)
        if self._parts is not None and self._parts.orders is not None and self._parts.orders.owned:
            self._inbox.put(Tell(pickle.dumps(outputs)))
        return outputs

    def _told_batch(self, on_end: Callable[[], object]) -> dict[str, GenerationOutput]:
        session = self._session
        if session is None or not isinstance(told := getattr(session.loop, "told", None), queue.SimpleQueue):
            raise EngineStoppedError("the engine is not running; start it first")
        message: bytes | None = cast("queue.SimpleQueue[bytes | None]", told).get()
        if message is None:
            raise EngineStoppedError("the leader's engine ended before the batch was done") from session.loop.error
        outputs: dict[str, GenerationOutput] = pickle.loads(message)
        for _ in outputs:
            on_end()
        return outputs

    def drop_cache(self) -> None:
        """Forget every cached prefix, at the next step."""
        self._inbox.put(DropCache())
