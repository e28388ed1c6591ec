"""The end of Serve and of Ray in a process that lives on.

Ray ends the whole process, with status 1 and without a word, when any thread still calls it in the moment between the end of its
worker and the end of Python's view of it. Two things of ours and Serve's make such calls from other threads: Serve's routing loop,
which outlives every cluster, and the collector of cyclic garbage, which lets go of references to objects in whatever thread it
happens to run. So both are held while Ray ends.

    serve.shutdown ─▶ the loop hears of it ─▶ loop held, garbage collected, collector off ─▶ ray.shutdown ─▶ both go on
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator
from concurrent.futures import Future

import ray
from ray import serve

from .replica_router import routing_loop

_TURNS = 1000  # of the loop: what it hears when actors end leads to other calls, a few turns later …
_TURNING_S = 5.0  # … which a busy loop takes so long for at most
_STUCK_S = 30.0  # a loop that does not turn at all is left alone then: ending must not hang


def shut_down() -> None:
    """End Serve, then Ray, of this process; both may be started again. Does nothing where neither runs."""
    serve.shutdown()
    with _held(routing_loop()), _uncollected():
        ray.shutdown()


@contextlib.contextmanager
def _held(loop: asyncio.AbstractEventLoop | None) -> Iterator[None]:
    """Let `loop` take in what has happened, then stop it in its tracks."""
    if loop is None or not loop.is_running():
        yield
        return
    held: Future[None] = Future()
    go_on: Future[None] = Future()

    def turn(left: int, until: float) -> None:
        if left and loop.time() < until:
            loop.call_soon(turn, left - 1, until)
            return
        held.set_result(None)
        go_on.result()  # blocks the loop's thread, which is the point

    loop.call_soon_threadsafe(turn, _TURNS, loop.time() + _TURNING_S)
    try:
        with contextlib.suppress(TimeoutError):
            held.result(_STUCK_S)
        yield
    finally:
        go_on.set_result(None)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collect now, and not again until the end."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
