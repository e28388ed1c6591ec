"""The engine's mind: add, cancel, plan, commit. Owns every request's tokens, counters and phase, and the weights version.

Knows no thread, device or clock: `now` comes in as an argument, work goes out as a plan, tokens come back as a result. What
leaves for the callers collects in `take_chunks`. Driven by one thread at a time; with depth 2, `plan` is called once before
the `commit` of the plan before, so a plan may hold tokens that are still in flight.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any

from ..config import EngineFacts
from ..errors import InvalidRequestError, RequestCancelledError, RequestTimeoutError
from ..messages import EngineStats, FinishReason, GenerateRequest, RequestStatus, TokenChunk
from .block_manager import BlockManager
from .layout import CacheLayout
from .plan import BatchPlan, Row, StepResult
from .request import Request, RequestLimits, derived_seed
from .scheduler import Scheduler


class EngineCore:
    """Counts tokens and blocks, and decides. `facts` are the resolved settings, `layout` the cache's shape."""

    scheduler_type: type[Scheduler] = Scheduler

    def __init__(self, *, facts: EngineFacts, layout: CacheLayout, limits: RequestLimits, num_host_sectors: int = 0) -> None:
        self.facts = facts
        self.limits = limits
        self._layout = layout
        self._blocks = BlockManager(layout, allow_sharing=facts.allow_block_sharing, num_host_sectors=num_host_sectors)
        self._scheduler = self.scheduler_type(
            self._blocks,
            kind=facts.scheduler_type,
            page_size=layout.page_size,
            max_batch_tokens=facts.max_batch_tokens,
            max_requests=facts.max_requests_per_batch,
            margin=facts.safety_margin,
            max_chunk=layout.max_chunk(facts.max_batch_tokens, limits.max_length),
        )
        self._in_flight: deque[tuple[int, list[Request]]] = deque()
        self._chunks: list[TokenChunk] = []
        self._deadlines: list[tuple[float, int, Request]] = []
        self._arrivals = 0
        self._step = 0
        self._totals = {"preemptions": 0, "finished": 0, "failed": 0, "cancelled": 0, "prompt": 0, "cached": 0, "generated": 0}
        self._totals["computed"] = 0
        self._busy_s, self._busy_since = 0.0, 0.0  # seconds with a step in flight, not counting those since …

    # ---- requests in --------------------------------------------------------------------------------------------------

    def add(self, source: GenerateRequest, now: float) -> None:
        """Put a request in line. Raises InvalidRequestError when it can never be served, or its id is already in use."""
        if source.request_id in self._scheduler.live:
            raise InvalidRequestError(
                f"a request with the id {source.request_id!r} is being served; give each live request an id of its own",
                param="request_id",
            )
        self.limits.check(source)
        seed = source.sampling.seed
        request = Request(
            source,
            max_new=self.limits.max_new_tokens(source),
            seed=derived_seed(self.facts.seed, f"request {self._arrivals}") if seed is None else seed % 2**63,
            arrival=self._arrivals,
            now=now,
            num_groups=len(self._layout.groups),
        )
        self._arrivals += 1
        self._totals["prompt"] += request.num_prompt
        if self.limits.is_long(request.num_prompt):
            request.become_long()
        if request.max_new <= 0:
            request.started_time = now
            self._end(request, RequestStatus.FINISHED, "length", now)
            return
        self._scheduler.add(request)
        if source.timeout_s is not None:
            heapq.heappush(self._deadlines, (now + source.timeout_s, request.arrival, request))

    def cancel(self, request_id: str, now: float) -> None:
        """End a request early; what it generated is kept in its terminal chunk. Unknown ids are ignored."""
        request = self._scheduler.live.get(request_id)
        if request is not None:
            request.error = RequestCancelledError(request_id)
            self._remove(request, RequestStatus.CANCELLED, "cancelled", now)

    def fail_all(self, error: Exception, now: float) -> None:
        """End every request with `error`, and forget all cached pages: what is in memory can no longer be trusted."""
        for request in list(self._scheduler.live.values()):
            self._fail(request, error, now)
        self._in_flight.clear()
        self._blocks.forget_all()

    def cancel_all(self, error: Exception, now: float) -> None:
        """End every request with `error`; the cached pages stay good."""
        for request in list(self._scheduler.live.values()):
            request.error = error
            self._remove(request, RequestStatus.FAILED, "failed", now)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> BatchPlan:
        """The next step. Empty: nothing can run until a step in flight is committed, or a request is added (law L5)."""
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.ended:
                request.error = RequestTimeoutError(request.source.timeout_s or 0.0)
                self._remove(request, RequestStatus.FAILED, "failed", now)
        draft = self._scheduler.draft(now)
        self._totals["preemptions"] += draft.num_preempted
        self._totals["cached"] += draft.cached_tokens
        if draft.rows or draft.parks:
            self._step += 1
            self._totals["computed"] += draft.num_tokens
            if not self._in_flight:
                self._busy_since = now
            self._in_flight.append((self._step, draft.requests))
        elif not self._in_flight and self._scheduler.live:
            raise AssertionError(f"nothing can run though {len(self._scheduler.live)} requests are here (law L5)")
        return BatchPlan(
            step=self._step,
            rows=tuple(draft.rows),
            copies=tuple(draft.copies),
            parks=tuple(draft.parks),
            unparks=tuple(draft.unparks),
            released=self._scheduler.take_released() if draft.rows else (),
            weights_version=self._scheduler.weights_version,
            num_tokens=draft.num_tokens,
        )

    def commit(self, plan: BatchPlan, result: StepResult, now: float) -> None:
        """Take in what the oldest step in flight sampled. Raises AssertionError when `plan` is not that step."""
        step, requests = self._in_flight.popleft()
        assert step == plan.step, f"step {plan.step} was committed and step {step} was due"
        self._busy_s += now - self._busy_since
        self._busy_since = now
        slot = 0
        for index, (row, request) in enumerate(zip(plan.rows, requests, strict=True)):
            sampling, samples = row.sampling, row.samples
            at, slot = slot, slot + samples
            request.num_in_flight -= samples
            if request.ended:
                continue
            if index in result.errors:
                self._fail(request, result.errors[index], now)
                continue
            if sampling.prompt_logprobs is not None and index in result.prompt_logprobs:
                self._take_prompt_logprobs(request, row, result.prompt_logprobs[index])
            if samples and sampling.embed:
                request.embedding = result.embeddings.get(index)
                self._remove(request, RequestStatus.FINISHED, "stop", now)
            elif samples:
                self._take_token(request, at, index, plan, result, now)

    def _take_token(self, request: Request, slot: int, index: int, plan: BatchPlan, result: StepResult, now: float) -> None:
        token = result.token_ids[slot]
        request.tokens.append(token)
        sampling = request.sampling
        if sampling.logprobs is not None and result.logprobs is not None:
            request.logprobs.append(result.logprobs[slot])
            if sampling.logprobs:
                request.top_logprobs.append(result.top_logprobs.get(index, ()))
        if request.source.record_timestamps:
            request.timestamps.append(now)
        if not request.versions or request.versions[-1] != plan.weights_version:
            request.versions.append(plan.weights_version)
        self._totals["generated"] += 1
        reason = "stop" if index in result.complete else self._reason_to_stop(request, token)
        if reason is not None:
            self._remove(request, RequestStatus.FINISHED, reason, now)
            return
        if request.source.stream:
            self._chunks.append(request.chunk())
        if self.limits.long_from and request.num_known == self.limits.long_from + 1:
            request.become_long()
            self._scheduler.restart(request)  # what it computed with the short factors is of no use any more

    def _reason_to_stop(self, request: Request, token: int) -> FinishReason | None:
        generated = request.num_generated
        if token in request.stop_ids:
            request.stop_token = token
            return "stop"
        for sequence in request.sampling.stop_sequences:
            size = len(sequence)
            long_enough = generated >= size and generated + request.source.resumed_tokens >= request.sampling.min_tokens
            if long_enough and tuple(request.tokens[-size:]) == sequence:
                return "stop"
        return "length" if generated >= request.max_new else None

    def _take_prompt_logprobs(
        self, request: Request, row: Row, found: tuple[list[float], list[tuple[tuple[int, float], ...]]]
    ) -> None:
        """Logprobs of prompt tokens row.start + 1 …; the first token of a prompt has none."""
        if request.prompt_logprobs is None:
            request.prompt_logprobs = [None]
            request.prompt_top_logprobs = [()] if request.sampling.prompt_logprobs else None
        room = request.num_prompt - len(request.prompt_logprobs)
        fresh = max(0, len(request.prompt_logprobs) - (row.start + 1))  # known already, when a preempted prompt is computed again
        request.prompt_logprobs += found[0][fresh : fresh + room]
        if request.prompt_top_logprobs is not None:
            request.prompt_top_logprobs += found[1][fresh : fresh + room]

    # ---- requests out -------------------------------------------------------------------------------------------------

    def _fail(self, request: Request, error: Exception, now: float) -> None:
        request.error = error
        self._remove(request, RequestStatus.FAILED, "failed", now, forget=True)

    def _remove(self, request: Request, status: RequestStatus, reason: FinishReason, now: float, *, forget: bool = False) -> None:
        self._scheduler.remove(request, forget=forget)
        self._end(request, status, reason, now)

    def _end(self, request: Request, status: RequestStatus, reason: FinishReason, now: float) -> None:
        request.status, request.end_reason, request.ended_time = status, reason, now
        name = {RequestStatus.FINISHED: "finished", RequestStatus.FAILED: "failed", RequestStatus.CANCELLED: "cancelled"}[status]
        self._totals[name] += 1
        self._chunks.append(request.chunk())

    def take_chunks(self) -> list[TokenChunk]:
        """What has come out since the last call, in order. Each request's chunks end with exactly one terminal chunk (law L2)."""
        chunks, self._chunks = self._chunks, []
        return chunks

    # ---- weights ----------------------------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int:
        return self._scheduler.weights_version

    def set_weights_version(self, version: int, *, recompute: bool = False) -> None:
        """The model has other weights now. Pages of another version are never matched again by new requests (law L7).

        Requests under way go on over the pages they have; with `recompute` they compute all their tokens again first. A version
        that does not rise (weights put back, or loaded anew under their number) may have pages that other weights filled in for
        requests that began under it: all pages are forgotten and everyone computes again.
        """
        if version <= self._scheduler.weights_version:
            self._blocks.forget_all()
            recompute = True
        self._scheduler.weights_version = version
        if recompute:
            for request in list(self._scheduler.live.values()):
                self._scheduler.restart(request)

    def drop_cache(self) -> None:
        """Forget every cached page: nothing computed so far is shared with later requests."""
        self._blocks.forget_all()

    # ---- looking in ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Someone waits, runs or is in flight."""
        return bool(self._scheduler.live or self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._scheduler.live

    def live_ids(self) -> list[str]:
        return list(self._scheduler.live)

    def stats(self) -> EngineStats:
        """A snapshot. Costs time in proportion to the running requests, not to the waiting ones."""
        return EngineStats(**self._counts())

    def _counts(self) -> dict[str, Any]:
        total, held, cached = self._blocks.counts()
        totals, scheduler = self._totals, self._scheduler
        return {
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "owed_tokens": scheduler.waiting.owed_tokens
            + sum([r.num_prompt + r.max_new - r.num_computed for r in scheduler.running.values()]),
            "blocks_total": total,
            "blocks_held": held,
            "blocks_cached": cached,
            "num_steps": self._step,
            "num_preemptions": totals["preemptions"],
            "num_finished": totals["finished"],
            "num_failed": totals["failed"],
            "num_cancelled": totals["cancelled"],
            "prompt_tokens": totals["prompt"],
            "cached_tokens": totals["cached"],
            "generated_tokens": totals["generated"],
            "computed_tokens": totals["computed"],
            "busy_s": self._busy_s,
            "weights_version": scheduler.weights_version,
        }

    def track_names(self) -> None:
        """Start recording which pages become findable and which stop being so, for a router's index."""
        self._blocks.track_names()

    def take_names(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """(added, forgotten) page names since the last call, as (weights version, digest)."""
        return self._blocks.take_names()

    def check(self) -> None:
        """Laws L1, L3 and L4 as they stand now. Raises AssertionError; cheap enough for an idle engine and for tests."""
        live = list(self._scheduler.live.values())
        self._blocks.check(live)
        for request in live:
            total = request.num_known + request.num_in_flight
            assert request.num_computed <= total <= request.num_prompt + request.max_new, f"law L3 is broken by {request.id}"
            assert request.seated == (request.id in self._scheduler.running)
