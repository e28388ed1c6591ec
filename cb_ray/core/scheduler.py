"""Who computes what next. Owns the waiting line and the set of running requests; asks the block manager for memory.

Knows no clock, thread or tensor. There is no prefill and no decode, only requests whose computed tokens catch up with their
tokens:

    running, in order ──▶ what is left of the token budget ──▶ waiting, in order; the first that does not fit ends the step

Every running request is in every step (as long as it has a token to compute), since no more run than a step may hold. When memory
runs out, the last in line among those not yet in this step is sent back to wait; its pages go to host memory if there is room,
and are computed again otherwise. Nobody is admitted in a step that sent someone back.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from ..messages import RequestStatus
from .block_manager import BlockManager
from .plan import UNKNOWN_TOKEN, BlockCopy, Row
from .request import Request

AGEING_S = 30.0  # a request overtakes another of one priority level better when it has waited this much longer

LineKey = tuple[float, int]


class WaitingLine:
    """Requests that wait, in the order of their keys. Push, pop and remove cost O(log n), whatever the length."""

    def __init__(self) -> None:
        self._heap: list[tuple[LineKey, int, Request]] = []
        self._ticket: dict[str, int] = {}  # request id -> its entry in the heap; entries without one are stale
        self._tickets = 0
        self.owed_tokens = 0

    def __len__(self) -> int:
        return len(self._ticket)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._ticket

    def push(self, request: Request, key: LineKey) -> None:
        self._tickets += 1
        self._ticket[request.id] = self._tickets
        request.owed = request.remaining
        self.owed_tokens += request.owed
        heapq.heappush(self._heap, (key, self._tickets, request))

    def peek(self) -> Request | None:
        """Who is next."""
        while self._heap:
            _, ticket, request = self._heap[0]
            if self._ticket.get(request.id) == ticket:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        """Take a request out of the line, wherever it stands."""
        del self._ticket[request.id]
        self.owed_tokens -= request.owed


@dataclass(slots=True)
class StepDraft:
    """A step while it is being planned."""

    room: int
    now: float
    rows: list[Row] = field(default_factory=list[Row])
    requests: list[Request] = field(default_factory=list[Request])
    starts: dict[str, int] = field(default_factory=dict[str, int])  # request id -> tokens computed before this step
    admitted: set[str] = field(default_factory=set[str])  # ids of requests that got their seat in this step
    copies: list[BlockCopy] = field(default_factory=list[BlockCopy])
    parks: list[BlockCopy] = field(default_factory=list[BlockCopy])
    unparks: list[BlockCopy] = field(default_factory=list[BlockCopy])
    num_samples: int = 0
    num_tokens: int = 0
    num_preempted: int = 0
    cached_tokens: int = 0


class Scheduler:
    """Orders: fifo (running ones oldest first, then arrivals), prefill_first (unfinished prompts before decodes), priority (by
    priority with ageing). `margin` is the share of memory that an admission must leave free while others run."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        kind: str,
        page_size: int,
        max_batch_tokens: int,
        max_requests: int,
        margin: float,
        max_chunk: int,
    ) -> None:
        self._blocks = blocks
        self._page = page_size
        self._kind = kind
        self._max_tokens = max_batch_tokens
        self._max_requests = max_requests
        self._margin = margin
        self._max_chunk = max_chunk  # tokens of one request in one step
        self.weights_version = 0
        self.running: dict[str, Request] = {}
        self.waiting = WaitingLine()
        self.live: dict[str, Request] = {}  # running and waiting, by id
        self._released: list[str] = []  # who lost a seat since the last plan

    # ---- who is here --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.live[request.id] = request
        self.waiting.push(request, self._key(request))

    def remove(self, request: Request, *, forget: bool = False) -> None:
        """Forget a request and release all it holds. `forget`: its pages must not be found again."""
        del self.live[request.id]
        if self.running.pop(request.id, None) is None:
            self.waiting.remove(request)
        if request.seated:
            self._released.append(request.id)
            if not forget:
                self._blocks.name_full(request)
            self._blocks.vacate(request, forget=forget)
        self._blocks.drop_parked(request)

    def restart(self, request: Request) -> None:
        """Make a request compute all its tokens again, under whatever weights there are now."""
        if self.running.pop(request.id, None) is not None:
            self._released.append(request.id)
            self._blocks.vacate(request)
            request.status = RequestStatus.PENDING
        else:
            self.waiting.remove(request)
            self._blocks.drop_parked(request)
            request.num_computed = 0
        self.waiting.push(request, self._key(request))

    def _key(self, request: Request) -> LineKey:
        if self._kind == "priority":
            return (request.source.priority * AGEING_S + request.created_time, request.arrival)
        return (0.0, request.arrival)

    # ---- one step ----------------------------------------------------------------------------------------------------

    def draft(self, now: float) -> StepDraft:
        """Plan one step: rows for running requests, then for as many waiting ones as fit."""
        draft = StepDraft(room=self._max_tokens, now=now)
        for request, due in self._running_in_order():
            if not draft.room:
                break
            if request.seated:  # not sent back meanwhile
                self._advance(request, due, draft)
        if not (draft.num_preempted and draft.rows):
            self._admit(draft)
        return draft

    def take_released(self) -> tuple[str, ...]:
        """Ids of requests that lost their seat since the last call; one that is seated anew starts from nothing."""
        released, self._released = tuple(self._released), []
        return released

    def _running_in_order(self) -> list[tuple[Request, int]]:
        """Running requests that have tokens to compute, and how many."""
        decoding: list[tuple[Request, int]] = []
        catching_up: list[tuple[Request, int]] = []
        for request in self.running.values():
            due = request.num_uncomputed
            if due == 1:
                decoding.append((request, 1))
            elif due:
                catching_up.append((request, due))
        if self._kind == "prefill_first":
            return catching_up + decoding
        return decoding + catching_up

    def _advance(self, request: Request, due: int, draft: StepDraft) -> None:
        if request.num_in_flight and request.sampling.reads_history:
            return  # its next token depends on one that is not known yet
        length = min(due, draft.room, self._max_chunk)
        upto = request.num_computed + length
        if self._blocks.slides or upto > len(request.block_tables[0]) * self._page:
            while not self._blocks.grow(request, upto):
                victim = max((r for r in self.running.values() if r.id not in draft.starts), key=self._key)
                self._send_back(victim, draft)
                if victim is request:
                    return
        self._add_row(request, length, draft)

    def _admit(self, draft: StepDraft) -> None:
        while draft.room and len(self.running) < self._max_requests:
            request = self.waiting.peek()
            if request is None or not self._seat(request, draft):
                return
            self.waiting.remove(request)
            self.running[request.id] = request
            draft.admitted.add(request.id)
            self._add_row(request, min(request.num_uncomputed, draft.room, self._max_chunk), draft)

    def _seat(self, request: Request, draft: StepDraft) -> bool:
        """Give the request at the head of the line its memory; False: it waits, and so does everyone behind it."""
        due = request.num_uncomputed
        if not due or (request.num_in_flight and request.sampling.reads_history):
            return False
        margin = self._margin if self.running else 0.0
        room = min(draft.room, self._max_chunk)
        if request.parked is not None:
            copies = self._blocks.unpark(request, request.num_computed + min(due, room), margin)
            if copies is not None:
                draft.unparks += copies
                return True
            if self.running:
                return False
            self._blocks.drop_parked(request)  # alone and still no room: compute it again
            request.num_computed = 0
        elif request.fork_of is not None and not request.num_generated and not request.num_in_flight:
            forked = self._fork(request, draft, margin)
            if forked is not None:
                return forked
        request.weights_version = self.weights_version
        matched = self._blocks.lookup(request)
        total = request.num_known + request.num_in_flight
        if not self._blocks.admit(request, matched, min(total, matched + room), margin):
            # Shared pages that lie scattered may leave no whole sector to a hybrid model; alone, it starts from nothing.
            if self.running or not matched or not self._blocks.admit(request, 0, min(total, room), 0.0):
                return False
            matched = 0
        self._note_first_match(request, matched, draft)
        return True

    def _fork(self, child: Request, draft: StepDraft, margin: float) -> bool | None:
        """True: seated on its parent's pages. False: the parent is still computing them. None: go the ordinary way."""
        parent = self.live.get(child.fork_of or "")
        if parent is None or not self._blocks.sharing or child.num_prompt == 1:
            return None
        if parent.salt != child.salt or parent.num_prompt != child.num_prompt or parent.weights_version != self.weights_version:
            return None
        if parent.id in draft.admitted or draft.starts.get(parent.id, parent.num_computed) < child.num_prompt:
            # Copies run before the rows, and a parent seated in this step may share pages that this very step fills.
            return False if parent.id in self.running else None
        copies = self._blocks.fork(parent, child, margin)
        if copies is None:
            return None
        child.weights_version = self.weights_version
        draft.copies += copies
        self._note_first_match(child, child.num_computed, draft)
        return True

    def _note_first_match(self, request: Request, matched: int, draft: StepDraft) -> None:
        if request.num_cached < 0:
            request.num_cached = min(matched, request.num_prompt)
            draft.cached_tokens += request.num_cached

    def _send_back(self, victim: Request, draft: StepDraft) -> None:
        copies = self._blocks.park(victim)
        if copies is None:
            self._blocks.vacate(victim)
        else:
            draft.parks += copies
        self._released.append(victim.id)
        del self.running[victim.id]
        victim.status = RequestStatus.PENDING
        victim.num_preemptions += 1
        draft.num_preempted += 1
        self.waiting.push(victim, self._key(victim))

    def _add_row(self, request: Request, length: int, draft: StepDraft) -> None:
        start = request.num_computed
        end, known = start + length, len(request.tokens) + request.num_in_flight
        samples = end == known
        draft.starts[request.id] = start
        draft.rows.append(self._row(request, start, end, samples, known - request.num_prompt + request.source.resumed_tokens))
        draft.requests.append(request)
        draft.room -= length
        draft.num_tokens += length
        request.num_computed = end
        if samples:
            request.num_in_flight += 1
            request.slot = draft.num_samples
            draft.num_samples += 1
            request.status = RequestStatus.DECODING
        else:
            request.status = RequestStatus.PREFILLING
        if request.started_time < 0:
            request.started_time = draft.now
        if end // self._page > request.named_pages:
            self._blocks.name_full(request)

    def _row(self, request: Request, start: int, end: int, samples: bool, index: int) -> Row:
        """Tokens `start` … `end` - 1 of a request, of which the last may be in flight; `index` is that of the token sampled next."""
        tokens, sampling = request.tokens, request.sampling
        token_ids = tokens[start:end]
        carry_from = -1
        if end > len(tokens):
            token_ids.append(UNKNOWN_TOKEN)
            carry_from = request.slot
        pages = -(-end // self._page)
        return Row(
            request.id,
            start,
            token_ids,
            tuple([table[:pages] for table in request.block_tables]),
            samples,
            carry_from,
            sampling,
            request.seed,
            index,
            max(0, sampling.min_tokens - index) if sampling.min_tokens else 0,
            tokens[:] if sampling.reads_history or sampling.prompt_logprobs is not None else None,
            request.num_prompt - request.source.resumed_tokens,
        )
