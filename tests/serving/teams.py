"""Engine replicas of several ranks, seen from outside: their processes, and when those have ended."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

import psutil


def processes(kind: str) -> list[psutil.Process]:
    """Worker processes of this test's Ray that run an actor of a class."""
    found = (process for process in psutil.Process().children(recursive=True) if kind in title(process))
    return sorted(found, key=lambda process: process.pid)


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def followers() -> list[psutil.Process]:
    return processes("FollowerRank")


def replicas(app: str) -> list[psutil.Process]:
    return processes(f"ServeReplica:{app}:Engine")


def wait_for_ends(some: Iterable[psutil.Process], count: int) -> set[int]:
    """The pids of those that have ended, once `count` of them have. The kernel tells; the test's time limit bounds it."""
    ended: set[int] = set()
    waits: dict[int, int] = {}
    try:
        for process in some:
            try:
                waits[os.pidfd_open(process.pid)] = process.pid
            except ProcessLookupError:
                ended.add(process.pid)
        while len(ended) < count:
            for handle in select.select(waits.keys() - {h for h, pid in waits.items() if pid in ended}, (), ())[0]:
                ended.add(waits[handle])
    finally:
        for handle in waits:
            os.close(handle)
    return ended
