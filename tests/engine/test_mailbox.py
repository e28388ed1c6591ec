"""What passes between threads arrives once, in order, where it belongs; nobody polls, and nobody pays for another's fault."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.engine.mailbox import Add, Bell, Cancel, Inbox, Mailbox, Outbox, Results
from cb_ray.engine.outputs import OutputRecord
from cb_ray.errors import EngineStoppedError, InvalidRequestError, QueueFullError
from cb_ray.messages import GenerateRequest, RequestStatus, TokenChunk
from tests.engine.fakes import PATIENCE, Background


def request(name: str, prompt: tuple[int, ...] = (1, 2)) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=prompt)


def chunk(name: str, *tokens: int, end: bool = False) -> TokenChunk:
    status = RequestStatus.FINISHED if end else RequestStatus.DECODING
    return TokenChunk(request_id=name, token_ids=tokens, status=status, finish_reason="length" if end else None)


def nothing() -> None:
    pass


# ---- inbox --------------------------------------------------------------------------------------------------------------------


def test_messages_keep_their_order() -> None:
    """An add before a cancel is drained before it."""
    inbox = Inbox()
    inbox.add([request("a")], 1.0, nothing)
    inbox.put(Cancel("a"))
    inbox.add([request("b")], 2.0, nothing)
    assert inbox.drain(wait=True) == [Add(request("a"), 1.0), Cancel("a"), Add(request("b"), 2.0)]
    assert inbox.drain(wait=False) == []


def test_the_limit_counts_everyone_who_waits_here_or_in_the_engine() -> None:
    """max_queue_size refuses at once with a queue.Full, and takes requests again when others have left the line."""
    inbox = Inbox(limit=3)
    inbox.add([request("a"), request("b")], 0.0, nothing)
    inbox.drain(wait=False)
    assert inbox.waiting == 2, "drained requests wait until a plan says otherwise"
    inbox.add([request("c")], 0.0, nothing)
    with pytest.raises(queue.Full) as caught:
        inbox.add([request("d")], 0.0, nothing)
    assert isinstance(caught.value, QueueFullError) and (caught.value.waiting, caught.value.limit) == (3, 3)
    inbox.drain(wait=False)
    inbox.settle(1)
    inbox.add([request("d"), request("e")], 0.0, nothing, places=2)
    assert inbox.waiting == 3


def test_a_group_enters_whole_or_not_at_all() -> None:
    """What is refused leaves nothing behind, and its listeners are never set up."""
    inbox = Inbox(limit=3)
    accepted: list[str] = []
    inbox.add([request("a"), request("b")], 0.0, lambda: accepted.append("ab"), places=2)
    with pytest.raises(QueueFullError):
        inbox.add([request("c"), request("d")], 0.0, lambda: accepted.append("cd"), places=2)
    assert len(inbox.drain(wait=False)) == 2 and accepted == ["ab"]


def test_refusing_says_why_and_reopening_forgets_it() -> None:
    """After a stop nothing more comes in; other messages are still taken."""
    inbox = Inbox()
    inbox.refuse("the engine is stopping")
    with pytest.raises(EngineStoppedError, match="the engine is stopping"):
        inbox.add([request("a")], 0.0, nothing)
    inbox.put(Cancel("a"))
    assert inbox.drain(wait=False) == [Cancel("a")]
    inbox.reopen()
    inbox.add([request("a")], 0.0, nothing)
    assert inbox.waiting == 1


def test_a_ring_wakes_the_engine_even_if_it_comes_first() -> None:
    """A ring before the wait is not lost, and one during the wait ends it."""
    inbox = Inbox()
    inbox.ring()
    assert inbox.drain(wait=True) == []
    waiter = Background(lambda: inbox.drain(wait=True))
    inbox.ring()
    assert waiter.value() == []


# ---- mailbox -----------------------------------------------------------------------------------------------------------------


def test_a_late_reader_gets_one_chunk_per_request() -> None:
    """Chunks merge while nobody reads; a reader in time gets them one by one."""
    mailbox = Mailbox()
    mailbox.deliver(chunk("a", 1))
    assert mailbox.take() == chunk("a", 1)
    for one in (chunk("a", 2), chunk("b", 7), chunk("a", 3, end=True)):
        mailbox.deliver(one)
    assert mailbox.take() == chunk("a", 2, 3, end=True)
    assert mailbox.take() == chunk("b", 7)
    assert mailbox.take(timeout=0.0) is None


def test_a_thread_waits_for_its_mail() -> None:
    """`take` sleeps until something comes."""
    mailbox = Mailbox()
    reader = Background(mailbox.take)
    mailbox.deliver(chunk("a", 1))
    assert reader.value() == chunk("a", 1)


def test_a_coroutine_waits_for_its_mail() -> None:
    """`next` sleeps on its own event loop, and what another thread delivered meanwhile comes merged."""

    async def read() -> list[TokenChunk]:
        bell = Bell(asyncio.get_running_loop())
        mailbox = Mailbox(bell)
        reader = asyncio.ensure_future(mailbox.next())
        await asyncio.sleep(0)
        mailbox.deliver(chunk("a", 1))
        assert bell.ring()
        first = await reader
        mailbox.deliver(chunk("a", 2))
        mailbox.deliver(chunk("a", 3, end=True))
        assert bell.ring()
        return [first, await mailbox.next()]

    assert asyncio.run(read()) == [chunk("a", 1), chunk("a", 2, 3, end=True)]


# ---- bell ---------------------------------------------------------------------------------------------------------------------


class CountingLoop:
    """Stands for an event loop; counts its wake-ups."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.errors: list[dict[str, Any]] = []
        self.closed = False

    def call_soon_threadsafe(self, callback: Any) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.calls.append(callback)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def is_closed(self) -> bool:
        return self.closed


def test_a_bell_is_rung_once_however_much_is_waiting() -> None:
    """Jobs of several steps share one wake-up while the loop has not answered; after it has, the next one rings again."""
    loop, done = CountingLoop(), []
    bell = Bell(loop)  # type: ignore[arg-type]
    for i in range(5):
        bell.leave(lambda i=i: done.append(i))
        assert bell.ring()
    assert len(loop.calls) == 1
    loop.calls[0]()
    assert done == [0, 1, 2, 3, 4]
    bell.leave(lambda: done.append(5))
    assert bell.ring() and len(loop.calls) == 2


def test_a_job_that_raises_costs_the_others_nothing() -> None:
    """The loop's exception handler hears of it, and the next job runs."""
    loop, done = CountingLoop(), []
    bell = Bell(loop)  # type: ignore[arg-type]
    bell.leave(lambda: 1 // 0)
    bell.leave(lambda: done.append("next"))
    bell.ring()
    loop.calls[0]()
    assert done == ["next"]
    assert isinstance(loop.errors[0]["exception"], ZeroDivisionError)


def test_a_closed_loop_does_not_answer() -> None:
    """The bell says so, whether the loop closed before or after it was rung."""
    loop = CountingLoop()
    bell = Bell(loop)  # type: ignore[arg-type]
    bell.leave(nothing)
    assert bell.ring()
    loop.closed = True
    bell.leave(nothing)
    assert not bell.ring()


# ---- the shared line -----------------------------------------------------------------------------------------------------------


class Line:
    """Results fed with outputs that carry their number as a token."""

    def __init__(self, *names: str) -> None:
        self.results = Results()
        self.results.open()
        self.records: dict[str, OutputRecord] = {}
        self.put(*names)

    def put(self, *names: str) -> None:
        for name in names:
            record = self.records.setdefault(name, OutputRecord(request(name), 0.0))
            self.results.put([record.add(chunk(name, len(record.tokens)))])

    def get(self, name: str | None = None, timeout: float | None = 0.0) -> tuple[str, int] | None:
        output = self.results.get(name, timeout)
        return None if output is None else (output.request_id, len(output.generated_tokens))


def test_outputs_come_oldest_first_and_by_id() -> None:
    """Asking for one id takes nothing from the others and keeps their order."""
    line = Line("a", "b", "a", "c")
    assert line.get("b") == ("b", 1)
    assert [line.get(), line.get(), line.get(), line.get()] == [("a", 1), ("a", 2), ("c", 1), None]


def test_waiting_for_an_id_waits_for_that_id() -> None:
    """A waiter by id is not woken into taking, and gets its own although an impatient reader of anything waits, too."""
    line = Line()
    mine = Background(lambda: line.get("mine", PATIENCE))
    anything = Background(lambda: line.get(None, PATIENCE))
    line.put("other")
    assert anything.value() == ("other", 1)
    line.put("mine")
    assert mine.value() == ("mine", 1)


def test_what_a_claimant_leaves_goes_back_in_line_where_it_was() -> None:
    """While an id is claimed nobody else gets its outputs; afterwards the unread ones come in their old order."""
    line = Line("a", "b")
    with line.results.claim("a"):
        line.put("a", "c")
        assert line.get() == ("b", 1)
        assert line.get("a") == ("a", 1)
        assert [line.get(), line.get()] == [("c", 1), None]
        line.put("d", "a")
    assert [line.get() for _ in range(4)] == [("a", 2), ("d", 1), ("a", 3), None]


def test_closing_frees_everyone_and_keeps_what_is_left() -> None:
    """Readers of a closed line get what is there, then None at once, also without a time limit."""
    line = Line()
    waiters = [Background(lambda: line.get(None, None)), Background(lambda: line.get("x", None))]
    line.results.close()
    assert [waiter.value() for waiter in waiters] == [None, None]
    line.put("left")
    assert line.get(None, None) == ("left", 1)
    assert line.get(None, None) is None


def test_a_time_limit_holds() -> None:
    """An empty open line gives None after the time limit and not before."""
    started = time.monotonic()
    assert Line("other").get("nobody", 0.05) is None
    assert 0.05 <= time.monotonic() - started < PATIENCE


@given(st.lists(st.tuples(st.sampled_from(["put", "any", "a", "b", "claim a", "claim b", "leave"]), st.sampled_from("abc"))))
def test_the_line_beside_a_list(moves: list[tuple[str, str]]) -> None:
    """Whatever is put, fetched and claimed: outputs of one id come in order, each once, the oldest unclaimed one first."""
    line = Line()
    model: list[tuple[str, int]] = []
    counts: dict[str, int] = defaultdict(int)
    claims: list[Any] = []
    claimed: list[str] = []
    for move, name in moves:
        if move == "put":
            counts[name] += 1
            line.put(name)
            model.append((name, counts[name]))
        elif move.startswith("claim"):
            claims.append(line.results.claim(move[-1]))
            claims[-1].__enter__()
            claimed.append(move[-1])
        elif move == "leave":
            if claims:
                claims.pop().__exit__(None, None, None)
                claimed.pop()
        else:
            wanted = [item for item in model if (item[0] not in claimed if move == "any" else item[0] == move)]
            assert line.get(None if move == "any" else move) == (wanted[0] if wanted else None)
            if wanted:
                model.remove(wanted[0])
    while claims:
        claims.pop().__exit__(None, None, None)
    assert [line.get() for _ in range(len(model) + 1)] == [*model, None]


# ---- outbox ---------------------------------------------------------------------------------------------------------------------


def test_an_id_that_is_live_is_refused_and_a_generated_one_steps_aside() -> None:
    """Duplicate ids are a ValueError, children included; `req_{n}` skips what callers took."""
    outbox = Outbox(Results())
    assert outbox.reserve("req_0", children=1) == ["req_0", "req_0__child#0"]
    with pytest.raises(InvalidRequestError):
        outbox.reserve("req_0__child#0")
    assert outbox.reserve(None) == ["req_1"]
    outbox.forget(["req_0", "req_0__child#0"])
    assert outbox.reserve("req_0") == ["req_0"]


def test_a_terminal_chunk_frees_its_id() -> None:
    """After it the id may be used again; chunks of ids that are not live go nowhere."""
    results = Results()
    outbox = Outbox(results)
    outbox.reserve("a")
    outbox.listen(request("a"), 0.0)
    outbox.post([chunk("a", 5, end=True), chunk("a", 6), chunk("nobody", 7)])
    output = results.get(timeout=0.0)
    assert output is not None and output.generated_tokens == [5]
    assert results.get(timeout=0.0) is None
    assert outbox.reserve("a") == ["a"]


def test_chunks_go_to_mailbox_handler_or_line() -> None:
    """Each reader gets its own requests' mail and nobody else's."""
    results, mailbox = Results(), Mailbox()
    outbox = Outbox(results)
    for name in ("boxed", "handled", "plain"):
        outbox.reserve(name)
        outbox.listen(request(name), 0.0, mailbox if name == "boxed" else None)
    loop, heard = CountingLoop(), []
    outbox.register("handled", heard.append, loop)  # type: ignore[arg-type]
    outbox.post([chunk(name, n) for n in (1, 2) for name in ("boxed", "handled", "plain")])
    assert mailbox.take() == chunk("boxed", 1, 2)
    assert len(loop.calls) == 1
    loop.calls[0]()
    assert [output.generated_tokens for output in heard] == [[1], [1, 2]]
    lengths = [output.generated_tokens for output in (results.get(timeout=0.0), results.get(timeout=0.0)) if output]
    assert lengths == [[1], [1, 2]]


def test_requests_of_a_closed_loop_are_given_up() -> None:
    """Their ids are named once, so that the engine can cancel them; other clients' mail arrives all the same."""
    results = Results()
    outbox = Outbox(results)
    loop = CountingLoop()
    for name in ("gone", "here"):
        outbox.reserve(name)
        outbox.listen(request(name), 0.0)
    outbox.register("gone", lambda output: None, loop)  # type: ignore[arg-type]
    loop.closed = True
    assert outbox.post([chunk("gone", 1), chunk("here", 1)]) == ["gone"]
    assert outbox.post([chunk("gone", end=True), chunk("here", 2, end=True)]) == []
    last = [output.generated_tokens for output in (results.get(timeout=0.0), results.get(timeout=0.0)) if output]
    assert last == [[1], [1, 2]] and results.get(timeout=0.0) is None
    assert outbox.reserve("gone") == ["gone"]


def test_whoever_is_left_fails_with_the_cause() -> None:
    """`fail_live` ends what is in line, and leaves alone what is only reserved."""
    results = Results()
    outbox = Outbox(results)
    outbox.reserve("reserved")
    outbox.reserve("in line")
    outbox.listen(request("in line"), 3.0)
    outbox.fail_live(RuntimeError("the cause"))
    output = results.get(timeout=0.0)
    assert output is not None
    assert (output.request_id, output.status, output.error) == ("in line", RequestStatus.FAILED, "the cause")
    assert results.get(timeout=0.0) is None
    assert outbox.is_live("reserved")


def test_many_readers_cost_one_wake_up_each_and_no_turns() -> None:
    """Sixteen iterating threads get their own streams, complete and in order (one shared queue used to reorder them all)."""
    line = Line()
    names = [f"r{i}" for i in range(16)]
    ready = threading.Barrier(17)

    def read(name: str) -> list[int]:
        with line.results.claim(name):
            ready.wait(PATIENCE)
            return [line.get(name, PATIENCE)[1] for _ in range(60)]  # type: ignore[index]

    readers = [Background(lambda name=name: read(name)) for name in names]
    ready.wait(PATIENCE)
    for _ in range(60):
        line.put(*names)
    assert [reader.value() for reader in readers] == [list(range(1, 61))] * 16
