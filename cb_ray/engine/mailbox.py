"""Everything that passes between the engine thread and the others. With `gates.py`, the only place with locks.

Owns `Inbox` (any thread → engine), `Outbox` (engine → whoever listens), `Results` (the shared line of outputs), `Mailbox` (one
reader's chunks), `Bell` (one event loop's wake-up) and `PageNames` (what the prefix cache holds, for a router). Knows requests and
chunks as values; knows no model and no scheduler.

    add, cancel, … ──▶ Inbox ──▶ engine thread ──▶ Outbox ─┬─▶ Mailbox   chunks, merged when the reader is late
                                                           ├─▶ handler   outputs, on the event loop that registered it
                                                           └─▶ Results   outputs, for get_result, iteration and request_id_iter

Nobody polls: each reader sleeps on a condition (or a future) of its own, and is woken by what it waits for. A step's mail rings
each event loop at most once. A reader that is gone, or raises, costs nobody else anything.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ..errors import EngineStoppedError, InvalidRequestError, QueueFullError
from ..messages import GenerateRequest, GenerationOutput, RequestStatus, TokenChunk, merge_chunks
from .outputs import OutputRecord, Snapshot

logger = logging.getLogger(__name__)
Callback = Callable[[GenerationOutput], object]


# ---- any thread -> engine ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Add:
    """A request to serve; `created` is when its caller handed it over, seconds of the engine's clock."""

    request: GenerateRequest
    created: float


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class NewWeights:
    """The model has other weights now; None: the version after the present one."""

    version: int | None
    recompute: bool


@dataclass(frozen=True, slots=True)
class DropCache:
    pass


@dataclass(frozen=True, slots=True)
class Broken:
    """The model can no longer be computed with."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Tell:
    """Something for the owners of a divided model's other ranks."""

    message: bytes


Message = Add | Cancel | NewWeights | DropCache | Broken | Tell


class Inbox:
    """What the engine is asked to do, in order. `limit` bounds the requests that wait, here or in the engine; 0: no bound."""

    def __init__(self, limit: int = 0) -> None:
        self._mail = threading.Condition()
        self._messages: list[Message] = []
        self._new = 0  # requests among the messages
        self.left = 0  # requests that the last plan had no room for
        self._behind = 0  # requests that wait in the engine; never counted too low between a drain and the next `settle`
        self._refusing: str | None = None
        self._rung = False
        self.limit = limit

    @property
    def waiting(self) -> int:
        """Requests that are not in any step yet."""
        return self._new + self._behind

    def add(
        self, requests: Sequence[GenerateRequest], created: float, accept: Callable[[], None], *, places: int | None = 1
    ) -> None:
        """Put requests in line, all or none. `places` is how many must be free under the limit; None: it does not count here.

        `accept` is called once it is sure that they are taken and before the engine can see them.
        Raises QueueFullError at once when there is no room, EngineStoppedError when the engine takes no more.
        """
        with self._mail:
            if self._refusing is not None:
                raise EngineStoppedError(self._refusing)
            if places is not None and self.limit and self.waiting + places > self.limit:
                raise QueueFullError(self.waiting, self.limit)
            accept()
            self._messages += [Add(request, created) for request in requests]
            self._new += len(requests)
            self._mail.notify_all()

    def put(self, message: Message) -> None:
        """Ask for something else than a request. Always taken."""
        with self._mail:
            self._messages.append(message)
            self._mail.notify_all()

    def ring(self) -> None:
        """Wake the engine thread to look at its gates."""
        with self._mail:
            self._rung = True
            self._mail.notify_all()

    def drain(self, *, wait: bool) -> list[Message]:
        """For the engine thread: take all messages; with `wait`, sleep until there are some or somebody rings."""
        with self._mail:
            if wait:
                self._mail.wait_for(lambda: self._messages or self._rung)
            self._rung = False
            messages, self._messages = self._messages, []
            self._behind += self._new
            self._new = 0
            return messages

    def settle(self, waiting: int) -> None:
        """For the engine thread, after a plan: so many of the drained requests still wait."""
        with self._mail:
            self._behind = self.left = waiting

    def refuse(self, reason: str) -> None:
        """No more requests from now on; what is here stays."""
        with self._mail:
            self._refusing = reason

    @property
    def refusing(self) -> str | None:
        """Why no more requests are taken; None: they are."""
        return self._refusing

    def reopen(self) -> None:
        with self._mail:
            self._refusing = None

    def clear(self) -> None:
        """Forget what is here; for the end of a session, when every request has been told."""
        with self._mail:
            self._messages, self._new, self._behind, self.left, self._rung = [], 0, 0, 0, False


# ---- engine -> event loops --------------------------------------------------------------------------------------------------


class Bell:
    """One event loop's wake-up. Jobs left here run on the loop, in order; however many there are, it is rung once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], object]] = deque()
        self._rung = False

    def leave(self, job: Callable[[], object]) -> None:
        with self._lock:
            self._jobs.append(job)

    def ring(self) -> bool:
        """False when the loop is closed and will never answer."""
        with self._lock:
            if self._rung or not self._jobs:
                return not self.loop.is_closed()
            self._rung = True
        try:
            self.loop.call_soon_threadsafe(self._answer)
        except RuntimeError:
            return False
        return True

    def _answer(self) -> None:
        with self._lock:
            self._rung = False
            jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            try:
                job()
            except Exception as error:
                self.loop.call_exception_handler({"message": "a result handler raised", "exception": error})


class Mailbox:
    """The chunks of one reader's requests. Late readers get them merged, one chunk per request.

    Read by threads with `take`, or on the event loop it was made for with `next`; by one reader at a time.
    """

    def __init__(self, bell: Bell | None = None) -> None:
        self.bell = bell
        self._mail = threading.Condition()
        self._chunks: dict[str, list[TokenChunk]] = {}
        self._reader: asyncio.Future[None] | None = None

    def deliver(self, chunk: TokenChunk) -> None:
        """For the engine thread. The reader's event loop is rung afterwards, once a step."""
        with self._mail:
            self._chunks.setdefault(chunk.request_id, []).append(chunk)
            self._mail.notify()
        if self.bell is not None:
            self.bell.leave(self._wake)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _first(self) -> TokenChunk | None:
        with self._mail:
            request_id = next(iter(self._chunks), None)
            return None if request_id is None else merge_chunks(self._chunks.pop(request_id))

    def take(self, timeout: float | None = None) -> TokenChunk | None:
        """The next chunk, all of one request's unread ones in one; None when none came within `timeout` seconds."""
        with self._mail:
            self._mail.wait_for(lambda: self._chunks, timeout)
        return self._first()

    async def next(self) -> TokenChunk:
        """The next chunk, all of one request's unread ones in one."""
        while (chunk := self._first()) is None:
            assert self.bell is not None, "a mailbox without an event loop is read with take()"
            self._reader = self.bell.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return chunk


# ---- the shared line of outputs ---------------------------------------------------------------------------------------------


class _Line:
    """Unread outputs of one id. While somebody claims the id, only claimants get them."""

    __slots__ = ("claims", "items", "mail")

    def __init__(self, lock: threading.Lock) -> None:
        self.items: deque[tuple[int, Snapshot]] = deque()
        self.claims = 0
        self.mail = threading.Condition(lock)


class Results:
    """Outputs that anybody may fetch, oldest first, or by id without disturbing the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._anyone = threading.Condition(self._lock)
        self._lines: dict[str, _Line] = {}
        self._order: OrderedDict[int, str] = OrderedDict()  # arrival -> id, of what nobody claims
        self._arrivals = 0
        self._open = False

    def open(self) -> None:
        """Readers wait for more."""
        with self._lock:
            self._open = True

    def close(self) -> None:
        """Nothing more will come: readers get what is left, then None."""
        with self._lock:
            self._open = False
            self._anyone.notify_all()
            for line in self._lines.values():
                line.mail.notify_all()

    def put(self, snapshots: Iterable[Snapshot]) -> None:
        with self._lock:
            fresh = 0
            for snapshot in snapshots:
                line = self._line(snapshot.request_id)
                line.items.append((self._arrivals, snapshot))
                if line.claims:
                    line.mail.notify()
                else:
                    self._order[self._arrivals] = snapshot.request_id
                    fresh += 1
                self._arrivals += 1
            if fresh:
                self._anyone.notify(fresh)

    def get(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The oldest output, or the oldest one of `request_id`.

        None after `timeout` seconds, or at once when nothing is here and nothing will come.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            snapshot = self._oldest(deadline) if request_id is None else self._oldest_of(request_id, deadline)
        return None if snapshot is None else snapshot.output()

    @contextmanager
    def claim(self, request_id: str) -> Generator[None]:
        """Inside, outputs of `request_id` go only to those who ask for this id; what is left goes back in line."""
        with self._lock:
            line = self._claim(request_id)
        try:
            yield
        finally:
            with self._lock:
                self._unclaim(request_id, line)

    def _line(self, request_id: str) -> _Line:
        line = self._lines.get(request_id)
        if line is None:
            line = self._lines[request_id] = _Line(self._lock)
        return line

    def _oldest(self, deadline: float | None) -> Snapshot | None:
        while not self._order:
            if not self._wait(self._anyone, deadline):
                return None
        _, request_id = self._order.popitem(last=False)
        line = self._lines[request_id]
        snapshot = line.items.popleft()[1]
        if not line.items:
            del self._lines[request_id]
        return snapshot

    def _oldest_of(self, request_id: str, deadline: float | None) -> Snapshot | None:
        line = self._lines.get(request_id)
        if line is not None and line.items and not line.claims:
            arrival, snapshot = line.items.popleft()
            del self._order[arrival]
            if not line.items:
                del self._lines[request_id]
            return snapshot
        line = self._claim(request_id)
        try:
            while not line.items:
                if not self._wait(line.mail, deadline):
                    return None
            return line.items.popleft()[1]
        finally:
            self._unclaim(request_id, line)

    def _wait(self, mail: threading.Condition, deadline: float | None) -> bool:
        """Sleep until there may be news. False: there will be none in time."""
        left = None if deadline is None else deadline - time.monotonic()
        if not self._open or (left is not None and left <= 0):
            return False
        mail.wait(left)
        return True

    def _claim(self, request_id: str) -> _Line:
        line = self._line(request_id)
        line.claims += 1
        if line.claims == 1:
            for arrival, _ in line.items:
                del self._order[arrival]
        return line

    def _unclaim(self, request_id: str, line: _Line) -> None:
        line.claims -= 1
        if line.claims:
            return
        if not line.items:
            del self._lines[request_id]
            return
        left = {arrival: request_id for arrival, _ in line.items}
        self._order = OrderedDict(sorted([*self._order.items(), *left.items()]))
        self._anyone.notify(len(left))


# ---- engine -> listeners ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Handler:
    bell: Bell
    callback: Callback


@dataclass(slots=True)
class _Address:
    """Where a live request's chunks go: a mailbox, or a record for the handler or the shared line; or nowhere."""

    record: OutputRecord | None = None
    mailbox: Mailbox | None = None
    in_line: bool = False  # False: reserved, and not handed to the engine yet


def _answer(callback: Callback, snapshot: Snapshot) -> None:
    callback(snapshot.output())


class Outbox:
    """Who listens to which request. Knows which ids are live, from their submission to their terminal chunk."""

    def __init__(self, results: Results, prefix: str = "req_") -> None:
        """`prefix`: of the ids of requests that are not given one."""
        self._lock = threading.Lock()
        self._results = results
        self._prefix = prefix
        self._live: dict[str, _Address] = {}
        self._handlers: dict[str, _Handler] = {}
        self._bells: dict[asyncio.AbstractEventLoop, Bell] = {}
        self._names = 0

    # ---- any thread ---------------------------------------------------------------------------------------------------------

    def reserve(self, wanted: str | None, children: int = 0) -> list[str]:
        """Make an id live, the `wanted` one or the next `{prefix}{n}`, and those of its children: [id, its children …].

        Raises InvalidRequestError (a ValueError) when one of them is live already.
        """
        with self._lock:
            while True:
                name = wanted
                if name is None:
                    name, self._names = f"{self._prefix}{self._names}", self._names + 1
                names = [name, *(f"{name}__child#{k}" for k in range(children))]
                taken = [n for n in names if n in self._live]
                if not taken:
                    break
                if wanted is not None:
                    raise InvalidRequestError(
                        f"a request with the id {taken[0]!r} is being served; give each live request an id of its own",
                        param="request_id",
                    )
            self._live.update((n, _Address()) for n in names)
            return names

    def listen(self, request: GenerateRequest, created: float, mailbox: Mailbox | None = None) -> None:
        """Say where the chunks of a reserved id go, now that it is put in line: to the mailbox, else to its handler or all."""
        record = None if mailbox is not None else OutputRecord(request, created)
        with self._lock:
            self._live[request.request_id] = _Address(record, mailbox, in_line=True)

    def forget(self, names: Iterable[str]) -> None:
        """Take reserved ids back that were not put in line after all."""
        with self._lock:
            for name in names:
                self._live.pop(name, None)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    def family(self, request_id: str) -> list[str]:
        """Live ids among a request's and its children's. Looks at every live id."""
        children = f"{request_id}__child#"
        with self._lock:
            return [name for name in self._live if name == request_id or name.startswith(children)]

    def hang_up(self, request_id: str) -> None:
        """Its reader has left; what still comes for it is dropped."""
        with self._lock:
            address = self._live.get(request_id)
            if address is not None:
                address.record = address.mailbox = None

    def register(self, request_id: str, callback: Callback, loop: asyncio.AbstractEventLoop) -> None:
        """Outputs of `request_id` go to `callback`, on `loop`, until the terminal one has been given."""
        bell = self.bell(loop)
        with self._lock:
            self._handlers[request_id] = _Handler(bell, callback)

    def bell(self, loop: asyncio.AbstractEventLoop) -> Bell:
        """The one bell of this event loop."""
        with self._lock:
            bell = self._bells.get(loop)
            if bell is None:
                for closed in [old for old in self._bells if old.is_closed()]:
                    del self._bells[closed]
                bell = self._bells[loop] = Bell(loop)
            return bell

    # ---- engine thread ------------------------------------------------------------------------------------------------------

    def post(self, chunks: Iterable[TokenChunk]) -> list[str]:
        """Hand a step's chunks to their listeners. Returns live ids whose listener's event loop turned out to be closed."""
        snapshots: list[Snapshot] = []
        bells: dict[Bell, None] = {}
        with self._lock:
            for chunk in chunks:
                bell = self._deliver(chunk, snapshots)
                if bell is not None:
                    bells[bell] = None
        if snapshots:
            self._results.put(snapshots)
        gone = [bell for bell in bells if not bell.ring()]
        return self._evict(gone) if gone else []

    def _deliver(self, chunk: TokenChunk, snapshots: list[Snapshot]) -> Bell | None:
        name = chunk.request_id
        address = self._live.pop(name, None) if chunk.is_terminal else self._live.get(name)
        if address is None:
            return None
        if address.mailbox is not None:
            address.mailbox.deliver(chunk)
            return address.mailbox.bell
        if address.record is None:
            return None
        snapshot = address.record.add(chunk)
        handler = self._handlers.pop(name, None) if chunk.is_terminal else self._handlers.get(name)
        if handler is None:
            snapshots.append(snapshot)
            return None
        handler.bell.leave(partial(_answer, handler.callback, snapshot))
        return handler.bell

    def _evict(self, gone: list[Bell]) -> list[str]:
        orphans: list[str] = []
        with self._lock:
            for bell in gone:
                self._bells.pop(bell.loop, None)
            for name, handler in list(self._handlers.items()):
                if handler.bell in gone:
                    del self._handlers[name]
                    if name in self._live:
                        self._live[name].record = None
                        orphans.append(name)
            for name, address in self._live.items():
                if address.mailbox is not None and address.mailbox.bell in gone:
                    address.mailbox = None
                    orphans.append(name)
        if orphans:
            logger.warning("the event loop that listened to %s is closed; the requests are cancelled", ", ".join(orphans))
        return orphans

    def fail_live(self, error: Exception) -> None:
        """End every id that is still live with `error`: what never reached the engine, or could not be ended by it."""
        with self._lock:
            names = [name for name, address in self._live.items() if address.in_line]
        failed = RequestStatus.FAILED
        self.post([TokenChunk(request_id=name, status=failed, finish_reason="failed", error=error) for name in names])


# ---- engine -> router -------------------------------------------------------------------------------------------------------


class PageNames:
    """Which prefixes the cache holds under the present weights, kept by the engine thread and read by whoever routes to it.

    Names of older weights are never matched again, so they are not told.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version = 0
        self._held: set[bytes] = set()
        self._changed: dict[bytes, bool] = {}  # digest -> held, since the last `take`

    def clear(self) -> None:
        """The cache is a new one, and empty."""
        with self._lock:
            self._changed |= dict.fromkeys(self._held, False)
            self._held.clear()

    def put(self, version: int, added: Iterable[tuple[int, bytes]], forgotten: Iterable[tuple[int, bytes]]) -> None:
        """For the engine thread: names (weights version, digest) that are found now and before were not, and the reverse."""
        with self._lock:
            if version != self._version:
                self._version = version
                self._held.clear()
                self._changed.clear()
            for held, names in ((False, forgotten), (True, added)):
                for of_version, digest in names:
                    if of_version == version:
                        (self._held.add if held else self._held.discard)(digest)
                        self._changed[digest] = held

    def take(self, full: bool = False) -> tuple[list[bytes], list[bytes]]:
        """Digests (added, forgotten) since the last call; with `full`, (all that are held, none)."""
        with self._lock:
            changed, self._changed = self._changed, {}
            if full:
                return list(self._held), []
            return [name for name, held in changed.items() if held], [name for name, held in changed.items() if not held]
