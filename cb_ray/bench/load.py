"""Load on a server: requests sent when a schedule says so, or so that a fixed number is always under way.

Owns the running of one measurement. In open loop every request is sent at its time, however slow the answers are: who waits for an
answer before asking again measures less the worse it gets (coordinated omission). Latencies then count from the time the schedule
wanted, so that a late client makes the server look worse, never better; and how late it was is part of the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from .client import Record, Target, ask
from .workloads import Item

T = TypeVar("T")
_LEAD_S = 0.05  # between "now" and the first request: tasks are made and the loop is idle again


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one measurement saw. Times of records are seconds from `due == 0`, the start of its schedule."""

    records: list[Record]  # of the requests that ended, in the order of the schedule
    unsent: int  # requests that an interrupt left undone
    duration_s: float  # from the start to the last end
    cpu_share: float  # of one core, used by this client
    is_open_loop: bool


def new_session(**settings: Any) -> aiohttp.ClientSession:
    """A session that lets any number of requests be under way, each on a connection of its own, kept for the next."""
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=3600)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=True, **settings)


async def open_loop(
    session: aiohttp.ClientSession,
    target: Target,
    items: Sequence[Item],
    times: Sequence[float],
    ended: Callable[[Record], object] = lambda record: None,
) -> Run:
    """Send item n at `times[n]` seconds. `ended` is called after each request. Cancelled, it gives what has ended by then."""
    loop = asyncio.get_running_loop()
    start, cpu = loop.time() + _LEAD_S, time.process_time()
    tasks: set[asyncio.Task[None]] = set()
    done: list[Record] = []
    unscheduled = len(items)
    over: asyncio.Future[None] = loop.create_future()

    def send(number: int) -> None:
        nonlocal unscheduled
        unscheduled -= 1
        record = Record(index=number, due=start + times[number])
        task = loop.create_task(ask(session, target, items[number], record))
        tasks.add(task)
        task.add_done_callback(lambda task: finish(task, record))
        if number + 1 < len(items):
            arm(number + 1)

    def finish(task: asyncio.Task[None], record: Record) -> None:
        tasks.discard(task)
        if not task.cancelled():
            done.append(record)
            ended(record)
        if not tasks and not unscheduled and not over.done():
            over.set_result(None)

    def arm(number: int) -> None:
        nonlocal timer
        timer = loop.call_at(start + times[number], send, number)

    timer: asyncio.TimerHandle | None = None
    if items:
        arm(0)
    else:
        over.set_result(None)
    try:
        await _interruptible(over)
    finally:
        if timer is not None:
            timer.cancel()
        await _stop(tasks)
    return _run(done, start, cpu, len(items), is_open_loop=True)


async def closed_loop(
    session: aiohttp.ClientSession,
    target: Target,
    items: Iterable[Item],
    concurrency: int,
    ended: Callable[[Record], object] = lambda record: None,
    until: Callable[[], bool] = lambda: False,
) -> Run:
    """Keep `concurrency` requests under way until every item was sent, or `until` says that it is enough.

    A request is due when it is sent, so a slow server is asked less: good for the most a server can do, not for how long its
    users wait. Cancelled, it gives what has ended by then.
    """
    loop = asyncio.get_running_loop()
    start, cpu = loop.time(), time.process_time()
    done: list[Record] = []
    waiting = iter(enumerate(items))

    async def worker() -> None:
        for number, item in waiting:
            if until():
                return
            record = Record(index=number, due=loop.time())
            await ask(session, target, item, record)
            done.append(record)
            ended(record)

    tasks = {loop.create_task(worker()) for _ in range(concurrency)}
    try:
        await _interruptible(asyncio.wait(tasks))
    finally:
        await _stop(tasks)
    count = len(items) if isinstance(items, Sized) else len(done)
    return _run(done, start, cpu, count, is_open_loop=False)


async def _interruptible(work: Awaitable[object]) -> None:
    """Wait for `work`; a cancellation ends the wait and nothing else, so that what was measured by then can be told."""
    try:
        await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()


async def _stop(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _run(done: list[Record], start: float, cpu: float, count: int, *, is_open_loop: bool) -> Run:
    """Times of the records made relative to `start`."""
    duration = max((record.ended for record in done), default=start) - start
    share = (time.process_time() - cpu) / max(duration, 1e-9)
    for record in done:
        record.due -= start
        record.sent -= start
        record.ended -= start
        for place, at in enumerate(record.events):
            record.events[place] = at - start
    done.sort(key=lambda record: record.index)
    return Run(records=done, unsent=count - len(done), duration_s=duration, cpu_share=round(share, 3), is_open_loop=is_open_loop)


def run_until_interrupted(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """`asyncio.run` on the fastest loop there is. The first Ctrl-C cancels what `main` awaits, which may still return."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main())
