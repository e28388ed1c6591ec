"""How a test's Ray ends. Knows of Serve that all handles of a process are routed on one event loop, in a thread of its own."""

from __future__ import annotations

import asyncio

import ray
from ray import serve
from ray.serve._private.router import SingletonThreadRouter

_TURNS = 1000  # of the loop: what it hears when actors end leads to other calls, a few turns later


def shut_down() -> None:
    """Serve, then Ray. Between them the routing loop takes in that everything has ended: Ray ends the whole process, with status 1 and
    no word of it, when a thread still uses it while it shuts down."""
    serve.shutdown()
    loop = SingletonThreadRouter._asyncio_loop
    if loop is not None and loop.is_running():
        asyncio.run_coroutine_threadsafe(_turns(), loop).result(30)
    ray.shutdown()


async def _turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)
