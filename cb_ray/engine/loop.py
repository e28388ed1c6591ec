"""The engine thread's body: one loop for sync and async, from the first request to the last.

Owns `EngineLoop`: when to drain, plan, submit, commit and post, when to stand still and when to end. Makes no thread and no
engine; locks and sleeps are the inbox's and the gates'. What a step does is the core's and the runner's business.

    drain inbox ─▶ plan N+1 ─▶ submit N+1 ─▶ collect N ─▶ commit N ─▶ post          depth 1: N+1 is N, nothing else differs
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from ..core.plan import BatchPlan
from ..errors import CbRayError, EngineStoppedError
from ..messages import EngineStats, GenerateRequest, RequestStatus, TokenChunk, Usage
from .gates import PauseGate, StopGate, StopLevel
from .mailbox import Add, Broken, Cancel, Inbox, Message, NewWeights, Outbox, PageNames, Tell
from .parts import Core, Runner

logger = logging.getLogger(__name__)
STATS_INTERVAL = 0.05  # seconds between two snapshots of a busy engine; they cost time in proportion to what runs


class EngineLoop:
    """One session of an engine. `run` is the thread's body; it returns when the session is over and every request was told."""

    def __init__(
        self,
        *,
        core: Core,
        runner: Runner,
        inbox: Inbox,
        outbox: Outbox,
        stop: StopGate,
        pause: PauseGate,
        clock: Callable[[], float],
        pages: PageNames | None = None,
        on_step: Callable[[BatchPlan, float], None] | None = None,
        tell: Callable[[bytes], None] | None = None,
    ) -> None:
        """`on_step` is told of each step that is over, with the seconds since the one before, or since there was work."""
        self._tell = tell
        self._core, self._runner = core, runner
        self._inbox, self._outbox = inbox, outbox
        self._stop, self._pause = stop, pause
        self._clock = clock
        self._pages = pages
        self._tickets: deque[Any] = deque()
        self._on_step, self._since = on_step, 0.0
        self._stats_due = 0.0
        self.stats: EngineStats = core.stats()
        self.num_steps = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        """Serve until told to stop. Never raises: an error ends the session, is kept in `error` and told to every request."""
        try:
            self._runner.install()
            self._serve()
            self._end()
        except BaseException as error:
            self._fail(error)
        finally:
            self._runner.restore()

    # ---- serving --------------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (level := self._stop.level) < StopLevel.HARD:
            if self._pause.wanted:
                self._park()
                continue
            idle = not self._tickets and not self._core.has_work
            if idle:
                self._publish(self._clock(), idle=True)
            for message in self._inbox.drain(wait=idle and level == StopLevel.RUNNING):
                self._obey(message)
            if idle:
                self._since = self._clock()
            if not self._tickets and not self._core.has_work and level == StopLevel.FLUSH:
                break  # nothing was let in since the gate rose, so nothing is left
            self._post()
            if self._tickets or self._core.has_work:
                self._step()

    def _step(self) -> None:
        now = self._clock()
        plan = self._core.plan(now)
        self._inbox.settle(self._core.num_waiting)
        self._post()
        if not plan.is_empty:
            self._tickets.append(self._runner.submit(plan))
            self.num_steps += 1
        if self._tickets and (len(self._tickets) >= self._runner.depth or plan.is_empty):
            self._commit()
        elif plan.is_empty and self._core.has_work:
            raise AssertionError("the engine has work, nothing is in flight, and still nothing can run (law L5)")
        if now >= self._stats_due:
            self._publish(now, idle=False)

    def _commit(self) -> None:
        ticket = self._tickets.popleft()
        result = self._runner.collect(ticket)
        now = self._clock()
        self._core.commit(ticket.plan, result, now)
        if self._on_step is not None:
            self._on_step(ticket.plan, now - self._since)
        self._since = now
        self._post()

    def _obey(self, message: Message) -> None:
        if isinstance(message, Add):
            try:
                self._core.add(message.request, message.created)
            except CbRayError as error:
                self._refuse(message.request, error, message.created)
        elif isinstance(message, Cancel):
            self._core.cancel(message.request_id, self._clock())
        elif isinstance(message, NewWeights):
            version = self._core.weights_version + 1 if message.version is None else message.version
            self._core.set_weights_version(version, recompute=message.recompute)
            self._runner.reload()
        elif isinstance(message, Broken):
            raise message.error
        elif isinstance(message, Tell):
            assert self._tell is not None, "there is nobody to tell"
            self._tell(message.message)
        else:
            self._core.drop_cache()

    def _refuse(self, request: GenerateRequest, error: CbRayError, created: float) -> None:
        """A request that the core will not have ends alone."""
        usage = Usage(
            num_prompt_tokens=len(request.token_ids), num_generated_tokens=0, created_time=created, ended_time=self._clock()
        )
        failed = RequestStatus.FAILED
        name = request.request_id
        self._outbox.post([TokenChunk(request_id=name, status=failed, finish_reason="failed", error=error, usage=usage)])

    def _post(self) -> None:
        chunks = self._core.take_chunks()
        if chunks:
            for orphan in self._outbox.post(chunks):
                self._core.cancel(orphan, self._clock())

    def _park(self) -> None:
        """Stand still: nothing in flight, the model as its owner knows it."""
        while self._tickets:
            self._commit()
        self._runner.restore()
        self._pause.park()
        if self._stop.level < StopLevel.HARD:
            self._runner.install()

    def _publish(self, now: float, *, idle: bool) -> None:
        self.stats = self._core.stats()
        self._stats_due = now + STATS_INTERVAL
        if self._pages is not None:
            self._pages.put(self._core.weights_version, *self._core.take_names())
        if idle:
            self._inbox.settle(self._core.num_waiting)

    # ---- ending ---------------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """The orderly end. After a hard stop, everyone who is not done gets what they had so far."""
        while self._tickets:
            self._commit()
        stopped = EngineStoppedError("the engine was stopped hard (HARD_STOP) before this request was done; send it again")
        self._core.cancel_all(stopped, self._clock())
        self._post()
        self._inbox.refuse("the engine is stopped; start it first")
        for message in self._inbox.drain(wait=False):
            if isinstance(
                message, (NewWeights, Broken)
            ):  # left by a pause that a hard stop did not wait for; the cache may live on
                self._obey(message)
        self._publish(self._clock(), idle=True)
        self._outbox.fail_live(stopped)
        self._inbox.clear()

    def _fail(self, error: BaseException) -> None:
        """A step raised: every request fails with the cause, and the session is over."""
        self.error = error
        self._inbox.refuse(f"the engine failed: {error}; start it again")
        self._stop.rise(StopLevel.HARD)
        logger.error("the engine failed and ends; all its requests fail", exc_info=error)
        cause = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        self._tickets.clear()
        try:
            self._core.fail_all(cause, self._clock())
            self._outbox.post(self._core.take_chunks())
            self._publish(self._clock(), idle=True)
        except Exception:
            logger.exception("the engine could not tell its requests one by one")
        self._outbox.fail_live(cause)
        self._inbox.clear()
