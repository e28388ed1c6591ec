"""What an engine tells the pool of itself, and when: soon after something happened, at intervals at most, never when idle.

Owns `Reporter`: the list of live requests, the counts between two beats, and the time at which the next one is due. Pure: `now`
comes in, a `Beat` goes out. `serving/pulse.py` puts an event loop's timer round it; the simulator asks the very same object.

    begin, moved, end ─▶ due_at ─▶ compose ─▶ (the beat travels) ─▶ told ─▶ due_at again, if something happened meanwhile
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..messages import EngineStats
from .members import Beat, BeatReply


@dataclass(frozen=True, slots=True, kw_only=True)
class PageNews:
    """Digests of pages that can be found in the cache now, and of those that no longer can. `full`: `added` is all there are."""

    full: bool = False
    added: Sequence[bytes] = ()
    evicted: Sequence[bytes] = ()


class Reporter:
    """One replica's reports. `stats` are the engine's counts as they are now; times are seconds.

    `interval_s` lies between two beats, `busy_interval_s` when a slot or a step became free or others wait for a place.
    """

    def __init__(
        self, replica: str, stats: EngineStats, *, page_size: int, interval_s: float = 0.25, busy_interval_s: float = 0.05
    ) -> None:
        self.reply: BeatReply | None = None  # what the pool last said
        self.due_at = math.inf  # when the next beat is due; never, while there is nothing to tell or one is under way
        self.want_full = True  # the next beat must bring all pages
        self._replica, self._page_size = replica, page_size
        self._interval_s, self._busy_interval_s = interval_s, busy_interval_s
        self._live: dict[str, int] = {}  # request id → tokens emitted
        self._ended: list[str] = []
        self._finished, self._finished_tokens = 0, 0
        self._number, self._told_at = 0, -math.inf
        self._under_way, self._dirty, self._waited_for = False, False, False
        self._before = stats

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def is_under_way(self) -> bool:
        """Whether a beat is on its way, so that none is due until it was answered."""
        return self._under_way

    def begin(self, request_id: str) -> None:
        self._live[request_id] = 0
        self.touch()

    def moved(self, request_id: str, tokens: int) -> None:
        """So many more tokens were emitted."""
        if request_id in self._live:
            begins = not self._live[request_id]  # its prompt is computed: there is room for another one
            self._live[request_id] += tokens
            self.touch(soon=begins)

    def went_on(self, request_ids: Sequence[str], tokens: int) -> None:
        """Each of these, whose first token was told of before, emitted so many more."""
        live, known = self._live, False
        for request_id in request_ids:
            if request_id in live:
                live[request_id] += tokens
                known = True
        if known:
            self.touch()

    def end(self, request_id: str, finished: bool) -> None:
        """The request has left the engine; `finished`: by itself, so that its length tells something of others."""
        emitted = self._live.pop(request_id, None)
        if emitted is None:
            return
        self._ended.append(request_id)
        if finished:
            self._finished += 1
            self._finished_tokens += emitted
        self.touch(soon=True)

    def touch(self, soon: bool = False) -> None:
        """There is something to tell; `soon`, if it makes room for another request."""
        self._dirty = True
        if not self._under_way:
            at = self._told_at + (self._busy_interval_s if soon or self._waited_for else self._interval_s)
            self.due_at = min(self.due_at, at)

    def compose(self, stats: EngineStats, news: PageNews | None = None) -> Beat:
        """The beat that is due. It is under way until `told`."""
        before, news = self._before, news or PageNews()
        self._number += 1
        decode = max(0, stats.generated_tokens - before.generated_tokens)
        beat = Beat(
            replica=self._replica,
            number=self._number,
            live=tuple(self._live.items()),
            ended=tuple(self._ended),
            num_finished=self._finished,
            finished_tokens=self._finished_tokens,
            num_waiting=min(stats.num_unseated, len(self._live)),
            free_tokens=(stats.blocks_total - stats.blocks_held) * self._page_size if stats.blocks_total else None,
            cache_used=stats.cache_used,
            cached_tokens=max(0, stats.cached_tokens - before.cached_tokens),
            prefill_tokens=max(0, stats.computed_tokens - before.computed_tokens - decode),
            decode_tokens=decode,
            num_steps=max(0, stats.num_steps - before.num_steps),
            busy_s=max(0.0, stats.busy_s - before.busy_s),
            weights_version=stats.weights_version,
            full=news.full,
            added=tuple(news.added),
            evicted=tuple(news.evicted),
            engine=stats,
        )
        self._before, self._ended, self._finished, self._finished_tokens = stats, [], 0, 0
        self._under_way, self._dirty, self.due_at = True, False, math.inf
        return beat

    def told(self, now: float, beat: Beat, reply: BeatReply | None) -> None:
        """The pool answered `beat`, or (None) it did not arrive: what ended is told again, and all pages."""
        self._under_way = False
        if reply is None:
            self._ended[:0] = beat.ended
            self.want_full = True
        else:
            self.reply, self.want_full = reply, reply.want_full
        self._told_at, self._waited_for = now, reply is not None and reply.num_waiting > 0
        if self._dirty:
            self.touch(soon=bool(self._ended))
