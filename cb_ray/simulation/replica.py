"""One engine replica in simulated time: the production core and reporter, and a runner that only takes time.

Owns `Replica`. It does what `engine/loop.py` does between two waits, in the same order: drain the inbox, plan, run, commit, post;
publish a snapshot of itself at most every 50 ms. What the Board hears is as old as in production: the tokens of live requests as
they are when a beat is made, everything else as it was at the last snapshot.

    receive ─▶ inbox ─▶ plan ──(the step takes its time)──▶ commit ─▶ listener: first tokens, ends
                          └─ or a leap: as many steady steps as nothing disturbs; whoever comes cuts it short

Knows an agenda and a script of what is said; no pool, no client.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from ..core.plan import BatchPlan, StepResult, StepWork
from ..messages import GenerateRequest, RequestStatus, TokenChunk
from ..routing.members import Beat, BeatReply
from ..routing.reporter import PageNews, Reporter
from .agenda import Agenda, Turn, seconds, ticks
from .costs import StepClock
from .engine_shape import EngineShape
from .leaping_core import LeapingCore
from .ledger import GAP
from .workload import Answer, Script, say_on, steps_to_an_end

SNAPSHOT_S = 0.05  # as engine/loop.py's STATS_INTERVAL


class Listener(Protocol):
    """Who is told what happens in a replica. Times are ticks."""

    def first_token(self, now: int, request_id: str) -> None: ...
    def ended(self, now: int, replica: Replica, chunk: TokenChunk) -> None: ...
    def beat_due(self, now: int, replica: Replica) -> None: ...
    def paused(self, now: int, replica: Replica) -> None: ...


class Leap:
    """Steady steps under way: they begin at `start`; the first takes `first` ticks and each next one `more` longer."""

    __slots__ = ("answers", "done", "fillers", "first", "ids", "more", "said", "start", "steps")

    def __init__(self, start: int, steps: int, ids: Sequence[str], answers: Sequence[Answer], first: int, more: int) -> None:
        self.start, self.steps, self.first, self.more = start, steps, first, more
        self.take(ids, answers)
        self.done = 0  # steps that the core has made …
        self.said = 0  # … and whose tokens the reporter has heard of

    def take(self, ids: Sequence[str], answers: Sequence[Answer]) -> None:
        """These run in it, in this order."""
        self.ids, self.answers, self.fillers = ids, answers, [answer.filler for answer in answers]

    def end_of(self, step: int) -> int:
        """When step 1, 2, … is over."""
        return self.start + step * self.first + self.more * (step * (step - 1) // 2)

    def first_from(self, due: int) -> int:
        """The first step that is not done and begins at `due` or later; it may lie beyond the leap."""
        return max(self.done, self.steps_by(due - 1) + 1 if due > self.start else 0) + 1

    def steps_by(self, now: int) -> int:
        """Steps that are over at `now`."""
        since, steps, first = now - self.start, self.steps, self.first
        low = min(steps, since // (first + self.more * steps))  # if each took as long as the longest
        high = min(steps, since // first)
        return low if low == high else low + bisect_right(range(low + 1, high + 1), now, key=self.end_of)


class Replica:
    """See the module."""

    def __init__(
        self,
        name: str,
        number: int,
        shape: EngineShape,
        *,
        script: Script,
        agenda: Agenda,
        listener: Listener,
        gaps: Counter[int],
    ) -> None:
        """`gaps` counts, for all replicas together, how often so many GAPs lay between two tokens of a request."""
        self.name, self.number, self.born_at = name, number, agenda.now
        self.draining = False
        self.dead = False
        self._shape, self._script, self._agenda, self._listener = shape, script, agenda, listener
        self._clock = StepClock(shape.costs)
        self.core: LeapingCore = shape.make_core(number)
        self.stats = self.core.stats()
        self.reporter = Reporter(name, self.stats, page_size=shape.page_size)
        self._inbox: list[tuple[int, GenerateRequest]] = []
        self._busy = False  # a step or a leap is under way
        self._leap: Leap | None = None
        self._turn = 0  # numbers what was put on the agenda, so that what a cut leap left there is known to be stale
        self._wants_pause = self._paused = False
        self._stats_due = 0
        self._snapshot_every = ticks(SNAPSHOT_S)
        self._pages: dict[bytes, bool] = {}  # changed since the last beat → findable
        self._pages_version = 0
        self._unseated = 0  # requests that the last step was planned without
        self._beat_at = -1  # when the next beat is on the agenda; -1: it is not
        self._gaps = gaps
        self.busy_ticks = self.steps = 0  # of steps that are over

    # ---- from outside ---------------------------------------------------------------------------------------------------------

    def receive(self, now: int, request: GenerateRequest) -> None:
        """A request arrives."""
        self._inbox.append((now, request))
        self.reporter.begin(request.request_id)
        self._expect_beat()
        self._disturb(now)

    def cancel(self, now: int, request_id: str) -> None:
        """The client has left, or nobody holds the request any more."""
        self.settle(now)
        self._inbox = [each for each in self._inbox if each[1].request_id != request_id]
        self.core.cancel(request_id, seconds(now))
        if self._leap is not None:
            self._leap.take(*self._running())
        self.reporter.end(request_id, finished=False)
        self._post(now)
        self._expect_beat()
        self._disturb(now)

    def pause(self, now: int) -> None:
        """Stand still after the step under way, and tell the listener."""
        self._wants_pause = True
        self._disturb(now)

    def resume(self, now: int, weights_version: int) -> None:
        """Go on, with these weights."""
        self._wants_pause = self._paused = False
        self.core.set_weights_version(weights_version)
        self._go(now)

    def die(self, now: int) -> None:
        """Everything in it is lost, and nothing more comes out of it."""
        self.settle(now)
        self.dead = True
        self._turn += 1

    def beat(self, now: int) -> Beat:
        """What it tells the Board now."""
        leap = self._leap
        if leap is not None:
            done = leap.steps_by(now)
            self._take_snapshots(leap, done)
            self._say(leap, done)
        self._beat_at = -1
        changed, self._pages = self._pages, {}
        news = PageNews(
            full=self.reporter.want_full,
            added=[page for page, held in changed.items() if held],
            evicted=[] if self.reporter.want_full else [page for page, held in changed.items() if not held],
        )
        stats = self.stats if self.stats.num_unseated == self._unseated else replace(self.stats, num_unseated=self._unseated)
        return self.reporter.compose(stats, news)

    def told(self, now: int, beat: Beat, reply: BeatReply) -> None:
        """What the Board answered."""
        leap = self._leap
        done = leap.steps_by(now) if leap is not None else 0
        if leap is not None and done > leap.said:
            self.reporter.touch()
        self.reporter.told(seconds(now), beat, reply)
        if leap is not None:
            self._expect_news(leap.end_of(done + 1))
        for request_id in reply.abandoned:
            self.cancel(now, request_id)

    @property
    def num_live(self) -> int:
        return self.reporter.num_live

    def live_ids(self) -> list[str]:
        return [request.request_id for _, request in self._inbox] + self.core.live_ids()

    def settle(self, now: int) -> None:
        """Make every counter what it is at `now`."""
        leap = self._leap
        if leap is not None:
            done = leap.steps_by(now)
            self._take_snapshots(leap, done)
            self._make(leap, done)
            self._say(leap, done)

    # ---- steps ----------------------------------------------------------------------------------------------------------------

    def _disturb(self, now: int) -> None:
        """Something is to be taken in after the step under way; at once, if there is none."""
        if self._leap is not None:
            self._cut(now)
        elif not self._busy:
            self._go(now)

    def _go(self, now: int) -> None:
        """Between two steps."""
        if self._wants_pause:
            self._busy = False
            if not self._paused:
                self._paused = True
                self._publish(now)
                self._listener.paused(now, self)
            return
        if self._inbox:
            for created, request in self._inbox:
                self.core.add(request, seconds(created))
            self._inbox.clear()
            self._post(now)
            self._expect_beat()
        self._busy = self.core.has_work
        if not self._busy:
            self._unseated = 0
            self._publish(now)
        elif not self._leap_from(now):
            self._step(now)

    def _step(self, now: int) -> None:
        plan = self.core.plan(seconds(now))
        self._unseated = self.core.num_waiting
        due = now + self._clock.of(StepWork.of(plan.rows))
        self._schedule(due, lambda at: self._commit(at, now, plan))

    def _commit(self, now: int, started: int, plan: BatchPlan) -> None:
        self.busy_ticks += now - started
        self.steps += 1
        answers, gaps, took = self._script.answers, self._gaps, (now - started) // GAP
        tokens: list[int] = []
        went_on: list[str] = []
        for row in plan.rows:
            if not row.samples:
                continue
            request_id = row.request_id
            answer = answers[request_id]
            tokens.append(answer.say())
            if row.token_index == 0:
                self.reporter.moved(request_id, 1)
                self._listener.first_token(now, request_id)
            else:
                went_on.append(request_id)
                gaps[took if answer.last_at == started else (now - answer.last_at) // GAP] += 1
            answer.last_at = now
        self.reporter.went_on(went_on, 1)
        self.core.commit(plan, StepResult(tokens), seconds(now))
        self._post(now)
        self._expect_beat()
        if started >= self._stats_due:
            self._publish(started)
        self._go(now)

    def _leap_from(self, now: int) -> bool:
        """Begin a leap, if the next step is steady."""
        ids, answers = self._running() if self._shape.leaps else ((), ())
        steps = self.core.steady_steps(steps_to_an_end(answers)) if ids else 0
        if not steps:
            return False
        self._unseated = self.core.num_waiting
        leap = self._leap = Leap(now, steps, ids, answers, *self._clock.decode(*self.core.contexts()))
        self._schedule(leap.end_of(steps), self._land)
        if self._beat_at < 0 and not self.reporter.is_under_way:
            self._expect_news(leap.end_of(1))
        return True

    def _running(self) -> tuple[list[str], list[Answer]]:
        answers, ids = self._script.answers, self.core.running_ids()
        return ids, [answers[request_id] for request_id in ids]

    def _land(self, now: int) -> None:
        """The leap is over, and whoever said a last token in its last step."""
        leap = self._leap
        assert leap is not None
        self._take_snapshots(leap, leap.steps - 1)
        begun = leap.end_of(leap.steps - 1)
        self._make(leap, leap.steps)
        self._say(leap, leap.steps)
        self._leap = None
        self._post(now)
        self._expect_beat()
        if begun >= self._stats_due:
            self._publish(begun)
        self._go(now)

    def _cut(self, now: int) -> None:
        """End the leap with the step that is under way."""
        leap = self._leap
        assert leap is not None
        steps = leap.steps_by(now) + 1
        if steps < leap.steps:
            leap.steps = steps
            self._schedule(leap.end_of(steps), self._land)

    def _take_snapshots(self, leap: Leap, upto: int) -> None:
        """Where the loop would have taken them in the leap's steps up to `upto`. All but the last are never looked at: what a leap
        calls a page is held by someone who runs, and stays so called."""
        if upto <= leap.done:
            return
        begun, last = leap.end_of(upto - 1), 0
        while self._stats_due <= begun:
            last = leap.first_from(self._stats_due)
            self._stats_due = leap.end_of(last - 1) + self._snapshot_every
        if last:
            if last - leap.done > self.core.steps_to_page():
                self._make(leap, last)
            self._take_pages()
            self._take_stats(last - leap.done, leap.end_of(last) - leap.end_of(leap.done))

    def _make(self, leap: Leap, upto: int) -> None:
        """Let the core make the steps of the leap up to `upto`."""
        done, gaps, answers = leap.done, self._gaps, leap.answers
        count, begin, end = upto - done, leap.end_of(done), leap.end_of(upto)
        if not count:
            return
        first, final = leap.first + leap.more * done, leap.first + leap.more * (upto - 1)
        if first // GAP == final // GAP:
            gaps[first // GAP] += count * len(answers)
        else:
            for step in range(done, upto):
                gaps[(leap.first + leap.more * step) // GAP] += len(answers)
        for answer in answers:
            if answer.last_at != begin:  # it was left out of a step before
                gaps[first // GAP] -= 1
                gaps[(first + begin - answer.last_at) // GAP] += 1
            answer.last_at = end
        self.core.repeat(count, leap.fillers, say_on(answers, count), seconds(end))
        self.busy_ticks += end - begin
        self.steps += count
        leap.done = upto

    def _say(self, leap: Leap, upto: int) -> None:
        """The reporter hears of the tokens of the leap's steps up to `upto`."""
        if upto > leap.said:
            self.reporter.went_on(leap.ids, upto - leap.said)
            leap.said = upto

    # ---- what is told -----------------------------------------------------------------------------------------------------------

    def _post(self, now: int) -> None:
        for chunk in self.core.take_chunks():
            if chunk.is_terminal:
                self.reporter.end(chunk.request_id, chunk.status == RequestStatus.FINISHED)
                self._listener.ended(now, self, chunk)

    def _publish(self, at: int) -> None:
        self._stats_due = at + self._snapshot_every
        self._take_stats()
        self._take_pages()

    def _take_stats(self, steps: int = 0, busy: int = 0) -> None:
        """As they will be after so many steps of a leap, which take `busy` ticks."""
        self.stats = self.core.stats_after(steps, seconds(self.busy_ticks + busy))

    def _take_pages(self) -> None:
        version = self.core.weights_version
        if version != self._pages_version:
            self._pages_version = version
            self._pages.clear()
        added, forgotten = self.core.take_names()
        for held, names in ((False, forgotten), (True, added)):
            for of_version, page in names:
                if of_version == version:
                    self._pages[page] = held

    def _expect_news(self, at: int) -> None:
        """The step that is over at `at` will be news, and nothing else disturbs the leap it is part of."""
        self.reporter.touch()
        self._expect_beat(at)

    def _expect_beat(self, earliest: int = 0) -> None:
        """Put the next beat on the agenda, if one is due."""
        due = self.reporter.due_at
        if due == math.inf:
            return
        at = max(self._agenda.now, earliest, ticks(due)) if due > 0 else max(self._agenda.now, earliest)
        if self._beat_at < 0 or at < self._beat_at:
            self._beat_at = at
            self._agenda.at(at, Turn.BEAT, self.number, self._ring)

    def _ring(self, now: int) -> None:
        if now == self._beat_at and not self.dead:
            self._listener.beat_due(now, self)

    def _schedule(self, at: int, call: Callable[[int], None]) -> None:
        self._turn += 1
        turn = self._turn

        def due(now: int) -> None:
            if self._turn == turn:
                call(now)

        self._agenda.at(at, Turn.STEP, self.number, due)
