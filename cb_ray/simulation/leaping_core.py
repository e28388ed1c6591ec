"""The production core, with one addition: many equal decode steps are one leap. Owns `LeapingCore`.

A step is steady when it gives one more token to exactly those who run, admits and sends back nobody, and is the last of its leap
if it ends anyone. What k steady steps do is known without planning them: tokens and counters grow by k; where a request fills a
page, it takes the next block and publishes the full one, in the order in which stepping would have done it.
`tests/simulation/test_leaps.py` holds leaping and stepping equal: every counter, every block id, every page name.

    step      1     2     3     4     5          A (page of 4)   ….|xxxx|      names and grows at 3 / 4
    leap      └──────────────── 5 ────┘          B ……………………………… ends at 5
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from ..core.engine_core import EngineCore
from ..core.plan import BatchPlan, Row
from ..core.request import Request
from ..core.scheduler import Scheduler
from ..messages import EngineStats, GenerateRequest, RequestStatus

_FAR = 1 << 30
_ONE_TOKEN = array("i", [0])


class CountingScheduler(Scheduler):
    """The production scheduler, for a runner that only counts: rows say how long they are, not what is in them."""

    def _row(self, request: Request, start: int, end: int, samples: bool, index: int) -> Row:
        token_ids = _ONE_TOKEN if end - start == 1 else request.tokens[start:end]
        return Row(
            request.id, start, token_ids, (), samples, -1, request.sampling, request.seed, index, 0, None, request.num_prompt
        )


class LeapingCore(EngineCore):
    """`EngineCore` for a runner of depth 1 that only counts. `plan` and `commit` are the production core's own."""

    scheduler_type = CountingScheduler
    _leaps = True  # until a request comes whose every token must be looked at
    _tried: tuple[object, ...] | None = None  # under which circumstances the head of the line was last found not to fit

    def add(self, source: GenerateRequest, now: float) -> None:
        sampling = source.sampling
        plain = sampling.logprobs is None and sampling.prompt_logprobs is None and not sampling.stop_sequences
        self._leaps &= plain and not source.stream and not source.record_timestamps and source.fork_of is None
        super().add(source, now)

    def plan(self, now: float) -> BatchPlan:
        preempted = self._totals["preemptions"]
        plan = super().plan(now)
        calm = plan.is_decode and len(plan.rows) == len(self._scheduler.running) and preempted == self._totals["preemptions"]
        self._tried = self._circumstances() if calm else None
        return plan

    def steady_steps(self, most: int = _FAR) -> int:
        """How many of the next steps, up to `most`, are steady, if none before the last samples what ends someone. To be asked
        between commit and plan."""
        running = self._scheduler.running
        room = self.facts.max_batch_tokens - len(running)
        if not (self._leaps and running) or room < 0 or self._in_flight or self._deadlines:
            return 0
        if self._blocks.slides or self.limits.long_from:
            return 0
        waits = len(self._scheduler.waiting) > 0 and room > 0 and len(running) < self.facts.max_requests_per_batch
        if waits and self._tried != self._circumstances():
            return 0
        page = self._layout.page_size
        for request in running.values():
            known = len(request.tokens)
            if known - request.num_computed != 1 or known == request.num_prompt:
                return 0
            left = request.num_prompt + request.max_new - known
            if waits:  # it is tried again when a page is filled or taken, for then it may fit
                left = min(left, self._calm_steps(request, known, page))
            if left < most:
                most = left
        return self._within_memory(most, page)

    def repeat(self, steps: int, says: Sequence[array[int]], last: Mapping[int, int], now: float) -> None:
        """Make `steps` steady steps, at most `steady_steps()`, of which the last is over at `now`. `says`: for each request that runs,
        an array of the one token that it samples over and over; `last`: row → token that ends it in the last step."""
        page, version = self._layout.page_size, self.weights_version
        turns: list[tuple[int, int, int, Request]] = []  # step, row, tokens known in it: where a page begins or is full
        ending: list[tuple[Request, int]] = []
        running = self._scheduler.running.values()
        for row, (request, filler) in enumerate(zip(running, says, strict=True)):
            tokens = request.tokens
            known = len(tokens)
            upto, rest = known + steps, known % page
            if rest < 2 or rest + steps > page:
                for full in range(known - rest, upto, page):
                    turns += [(at - known, row, at, request) for at in (full, full + 1) if known <= at < upto]
            tokens.extend(filler * steps)
            request.num_computed = upto - 1
            if request.versions[-1] != version:
                request.versions.append(version)
            if row in last or upto - request.num_prompt >= request.max_new:
                tokens[-1] = last.get(row, filler[0])
                ending.append((request, tokens[-1]))
        turns.sort()  # no row has two turns in one step
        for _, _, known, request in turns:
            self._turn_page(request, known)
        self._step += steps
        self._totals["generated"] += steps * len(running)
        self._totals["computed"] += steps * len(running)
        for request, token in ending:
            reason = self._reason_to_stop(request, token)
            assert reason is not None
            self._remove(request, RequestStatus.FINISHED, reason, now)

    def _turn_page(self, request: Request, known: int) -> None:
        """What the step does that computes the last of `known` tokens: take a block, publish a page."""
        page = self._layout.page_size
        if known > len(request.block_tables[0]) * page:
            grown = self._blocks.grow(request, known)
            assert grown, "a leap went further than the memory"
        if known // page > request.named_pages:
            computed, request.num_computed = request.num_computed, known
            self._blocks.name_full(request)
            request.num_computed = computed

    def steps_to_page(self) -> int:
        """Steady steps until some request publishes a page or takes a block, not counting that one."""
        page, running = self._layout.page_size, self._scheduler.running.values()
        to_full = min([-len(request.tokens) % page for request in running], default=_FAR)
        to_grow = min([len(request.block_tables[0]) * page + 1 - len(request.tokens) for request in running], default=_FAR)
        return min(to_full, to_grow)

    def stats_after(self, steps: int, busy_s: float) -> EngineStats:
        """`stats` as they will be after so many steady steps, at most `steps_to_page()`; 0: as they are. `busy_s` is the caller's to
        count: leaps must not add up floats."""
        counts, more = self._counts(), steps * len(self._scheduler.running)
        counts["busy_s"] = busy_s
        counts["num_steps"] += steps
        counts["owed_tokens"] -= more
        counts["generated_tokens"] += more
        counts["computed_tokens"] += more
        return EngineStats(**counts)

    def contexts(self) -> tuple[int, int]:
        """(requests that run, tokens that they have together): what a steady step reads."""
        running = self._scheduler.running
        return len(running), sum([len(request.tokens) for request in running.values()])

    def running_ids(self) -> list[str]:
        return list(self._scheduler.running)

    # ---- for those who may know everything (simulation/oracle.py) ---------------------------------------------------------------

    def found(self, pages: Sequence[bytes]) -> int:
        """Leading pages of a prompt that are in the cache."""
        pool, version = self._blocks._pools[0], self.weights_version  # pyright: ignore[reportPrivateUsage]
        return next((n for n, page in enumerate(pages) if pool.find((version, page)) is None), len(pages))

    def coming(self, pages: Sequence[bytes]) -> int:
        """Leading pages of a prompt that a request which is here has, whether or not they are computed."""
        here = [request.source.digests for request in self._scheduler.live.values()]
        return max([_common(pages, digests) for digests in here], default=0)

    def owed(self, left: Callable[[str], int]) -> tuple[int, int]:
        """(prompt tokens, answer tokens) still to compute, when `left` says how many tokens a request will still say."""
        live = self._scheduler.live.values()
        return sum([max(0, r.num_known - r.num_computed - 1) for r in live]), sum([left(r.id) for r in live])

    def _circumstances(self) -> tuple[object, ...] | None:
        head = self._scheduler.waiting.peek()
        if head is None or head.fork_of is not None:
            return None
        return head.id, len(self._scheduler.running), self.weights_version, self._blocks.counts()

    def _calm_steps(self, request: Request, known: int, page: int) -> int:
        """Steps until `request` publishes a page or takes a block, not counting that one."""
        to_full = -known % page
        to_grow = len(request.block_tables[0]) * page + 1 - known
        return min(to_full, max(0, to_grow))

    def _within_memory(self, most: int, page: int) -> int:
        """The most steps up to `most` for which there are blocks."""
        total, held, _ = self._blocks.counts()
        if most > 0 and len(self._scheduler.running) * (-(-most // page) + 1) <= total - held:
            return most
        requests = [(len(r.tokens) - 1, len(r.block_tables[0])) for r in self._scheduler.running.values()]

        def need(steps: int) -> int:
            return sum([max(0, -(-(known + steps) // page) - have) for known, have in requests])

        if most <= 0 or need(most) <= total - held:
            return max(0, most)
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if need(middle) <= total - held else (low, middle - 1)
        return low


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
