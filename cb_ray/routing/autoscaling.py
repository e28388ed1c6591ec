"""How many replicas there should be: a pure function of the work owed, with memory passed in and out.

Owns `ScaleTargets`, `Fleet`, `ScaleMemory`, `desired_replicas`. The one signal is seconds of work owed, the same number that
prices routing and admission. May know nothing but the standard library.

    owed seconds per replica ─▶ ÷ target_drain_s ─▶ wanted ─▶ up: at once after upscale_delay_s
                                                           └▶ down: only to the highest number wanted within downscale_delay_s
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTargets:
    """What scaling aims at. Times are seconds."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_drain_s: float = 10.0
    upscale_delay_s: float = 1.0
    downscale_delay_s: float = 60.0
    downscale_to_zero_delay_s: float = 300.0
    high_cache: float = 0.9  # share of KV blocks held above which one more replica is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The pool now. `owed_s`: seconds that one replica alone would need for all work owed, running and waiting, in full batches."""

    replicas: int  # running
    target: int  # asked for before; more than `replicas` while some are starting
    owed_s: float
    num_requests: int  # running and waiting; 0 means idle
    cache_used: float = 0.0  # of the fullest replica, between 0 and 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleMemory:
    """What the next call must know: since when more was wanted, and the highest number wanted lately, as (time, number)."""

    above_since: float | None = None
    peaks: tuple[tuple[float, int], ...] = ()  # falling numbers, rising times


def desired_replicas(fleet: Fleet, targets: ScaleTargets, memory: ScaleMemory, now: float) -> tuple[int, ScaleMemory]:
    """The number of replicas to have from `now` on, and the memory for the next call."""
    wanted = _wanted(fleet, targets)
    horizon = now - max(targets.downscale_delay_s, targets.downscale_to_zero_delay_s)
    peaks = tuple((at, peak) for at, peak in memory.peaks if at > horizon and peak > wanted)
    lately = max((peak for at, peak in peaks if at > now - targets.downscale_delay_s), default=wanted)
    if wanted == 0 and any(at > now - targets.downscale_to_zero_delay_s for at, _ in peaks):
        lately = max(1, lately)  # the last replica stays longer than the others
    peaks += ((now, wanted),)
    if wanted > fleet.target:
        since = now if memory.above_since is None else memory.above_since
        # nothing runs yet: there is no one to wait for
        if fleet.target == 0 or now - since >= targets.upscale_delay_s:
            return wanted, ScaleMemory(peaks=peaks)
        return fleet.target, ScaleMemory(above_since=since, peaks=peaks)
    return min(fleet.target, max(wanted, lately, _held_up(fleet, targets))), ScaleMemory(peaks=peaks)


def _wanted(fleet: Fleet, targets: ScaleTargets) -> int:
    wanted = math.ceil(fleet.owed_s / targets.target_drain_s - 1e-9)
    if fleet.num_requests:
        wanted = max(1, wanted)
    if fleet.cache_used > targets.high_cache and fleet.target <= fleet.replicas:
        wanted = max(wanted, fleet.replicas + 1)
    return max(targets.min_replicas, min(targets.max_replicas, wanted))


def _held_up(fleet: Fleet, targets: ScaleTargets) -> int:
    """While replicas are still starting, do not take back what was just asked for unless nothing is left to do."""
    return min(fleet.target, targets.max_replicas) if fleet.num_requests and fleet.replicas < fleet.target else 0
