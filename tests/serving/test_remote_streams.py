"""The remote manager without Ray: a pool of one bound and one number of slots, and everything that can happen to a stream."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ray")

from cb_ray.core.request import RequestLimits
from cb_ray.engine.intake import Terms
from cb_ray.engine.mailbox import Outbox, Results
from cb_ray.engine.request_side import RequestSide
from cb_ray.engine.sampling_config import SamplingPolicy
from cb_ray.errors import CbRayError, EngineStoppedError, NoReplicaError, QueueFullError
from cb_ray.messages import GenerateRequest, RequestStatus, TokenChunk, Usage
from cb_ray.serving.remote_streams import Courier, Dispatch, RemoteIntake

PATIENCE = 20.0


class FakePool:
    """Slots and a bounded line; a stream runs while `tap` is set. Counts what it is asked to bear at once."""

    def __init__(self, slots: int, limit: int, refuse_after_place: int = 0) -> None:
        self.slots, self.limit, self.refuse_after_place = slots, limit, refuse_after_place
        self.tap = threading.Event()
        self.tap.set()
        self.places: set[str] = set()
        self.inside: dict[str, int] = {}
        self.most, self.refused, self.closed = 0, 0, list[str]()
        self.opened: asyncio.Event | None = None
        self.room: asyncio.Condition | None = None
        self.failing: dict[str, CbRayError] = {}

    # the Board's side, as PoolView shows it

    async def snapshot(self) -> dict[str, Any]:
        return {"replicas": {"r": {"slots": self.slots, "accepting": True}}, "limit": self.limit}

    async def reserve(self, names: Sequence[str]) -> None:
        waiting = max(0, len(self.inside) - self.slots) + len(self.places - self.inside.keys())
        free = max(0, self.slots - len(self.inside))
        if self.limit and waiting + len(names) - free > self.limit:
            self.refused += 1
            raise QueueFullError(waiting, self.limit, 0.02)
        self.places |= set(names)

    def give_back(self, names: Sequence[str]) -> None:
        self.places -= set(names)

    # the engines' side

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        name = request.request_id
        if self.refuse_after_place:
            self.refuse_after_place -= 1
            raise QueueFullError(1, 1, 0.01)
        if request.token_ids[0] in self.failing:
            raise self.failing[request.token_ids[0]]
        self.places.discard(name)
        self.inside[name] = 0
        self.most = max(self.most, len(self.inside))
        try:
            for index in range(request.max_new_tokens or 0):
                while not self.tap.is_set() and index:
                    await asyncio.to_thread(self.tap.wait, 0.05)
                await asyncio.sleep(0)
                last = index == (request.max_new_tokens or 0) - 1
                usage = Usage(num_prompt_tokens=len(request.token_ids), num_generated_tokens=index + 1, weights_versions=(3,))
                yield TokenChunk(
                    request_id=name,
                    token_ids=(request.token_ids[0] + index,),
                    status=RequestStatus.FINISHED if last else RequestStatus.DECODING,
                    finish_reason="length" if last else None,
                    usage=usage,
                )
        finally:
            del self.inside[name]
            self.closed.append(name)


class Remote(RequestSide):
    """`RemoteManager` without its connection."""

    def __init__(self, pool: FakePool) -> None:
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=4, do_sample=False)
        policy = SamplingPolicy(config, None, vocab_size=1000, per_request=True, drop_unsupported=True, return_logprobs=False)
        terms = Terms(limits=RequestLimits(vocab_size=1000, max_length=512, max_cached_tokens=4096, page_size=4), policy=policy)
        self._results = Results()
        self._results.open()
        self._outbox = Outbox(self._results, prefix="x_")
        self.courier = Courier(pool, self._outbox)  # type: ignore[arg-type]
        self.courier.connect(pool)
        self.inbox = Dispatch(self.courier)
        self._intake = RemoteIntake(policy=policy, limits=terms.limits, inbox=self.inbox, outbox=self._outbox, clock=lambda: 0.0)

    def end(self) -> None:
        self.courier.close()
        self.courier.join(PATIENCE)
        self._results.close()


@pytest.fixture
def made() -> Iterator[Any]:
    """`made(slots, limit)`: a manager and its pool."""
    remotes: list[Remote] = []

    def make(slots: int = 2, limit: int = 0, **more: Any) -> tuple[Remote, FakePool]:
        pool = FakePool(slots, limit, **more)
        remotes.append(Remote(pool))
        return remotes[-1], pool

    yield make
    for remote in remotes:
        remote.end()


def tokens(prompt: Sequence[int], count: int = 4) -> list[int]:
    return [prompt[0] + index for index in range(count)]


@settings(max_examples=25)
@given(slots=st.integers(1, 5), limit=st.integers(0, 4), count=st.integers(0, 40), late=st.integers(0, 3))
def test_a_batch_keeps_the_pool_full_and_no_fuller(slots: int, limit: int, count: int, late: int) -> None:
    """Whatever the pool takes: every prompt is answered, in input order; half of a bounded line stays free for others."""
    pool = FakePool(slots, limit, refuse_after_place=late)
    remote = Remote(pool)
    try:
        prompts = [[10 * n + 1, 7] for n in range(count)]
        ended: list[int] = []
        outputs = remote.run_batch(prompts, lambda: ended.append(1))
        assert [output.generated_tokens for output in outputs.values()] == [tokens(prompt) for prompt in prompts]
        assert list(outputs) == [f"x_{n}" for n in range(count)] and len(ended) == count
        assert pool.most <= slots + (min(slots, limit // 2) if limit else slots)
        assert not pool.places and not pool.inside
    finally:
        remote.end()


def test_a_full_pool_tells_a_single_request_at_once(made) -> None:
    """`add_request` and `add_requests` raise QueueFullError with the time to come back, and leave nothing behind."""
    remote, pool = made(slots=1, limit=1)
    pool.tap.clear()
    first = remote.add_request([5], streaming=True)
    assert next(iter(remote.request_id_iter(first))).generated_tokens == [5]
    with pytest.raises(QueueFullError) as full:
        remote.add_requests([[1], [2]])
    assert full.value.retry_after_s == 0.02 and remote._outbox.family("x_1") == []
    pool.tap.set()
    assert remote.get_result(first, timeout=PATIENCE) is not None


def test_outputs_come_every_way(made) -> None:
    """By id, by anyone, streamed as snapshots, to a handler, and to an async reader: as in one process."""
    remote, _ = made()
    assert remote.get_result(remote.add_request([5]), timeout=PATIENCE).generated_tokens == tokens([5])
    names = remote.add_requests([[10], [20]], max_new_tokens=2)
    assert {remote.get_result(timeout=PATIENCE).request_id for _ in names} == set(names)
    last = list(remote.request_id_iter(remote.add_request([30], streaming=True)))[-1]
    assert (last.generated_tokens, last.status, last.weights_versions) == (tokens([30]), RequestStatus.FINISHED, (3,))

    async def story() -> list[Any]:
        heard: asyncio.Queue[Any] = asyncio.Queue()
        remote.register_result_handler("mine", heard.put_nowait)
        remote.add_request([40], "mine", streaming=True)
        outputs = [output async for output in remote.stream([50])]
        while not (output := await heard.get()).is_finished():
            pass
        return [output.generated_tokens, outputs[-1].generated_tokens]

    assert asyncio.run(story()) == [tokens([40]), tokens([50])]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_cancelled_request_ends_with_what_it_has(made, streaming: bool) -> None:
    """The stream is closed in the pool, and the last output is CANCELLED with the tokens so far."""
    remote, pool = made()
    pool.tap.clear()
    name = remote.add_request([5], streaming=streaming)
    while pool.inside.get(name) is None:
        threading.Event().wait(0.001)
    remote.cancel_request(name)
    *_, output = remote.request_id_iter(name)
    assert output.status == RequestStatus.CANCELLED and output.generated_tokens in ([], [5]) and pool.closed == [name]


def test_a_request_cancelled_before_its_stream_is_opened_ends_all_the_same(made) -> None:
    """A task that is cancelled before its first step runs no line of its own: such a request never ended, and nor did `drained`."""
    remote, pool = made()
    request = GenerateRequest(request_id="x_1", token_ids=(5,), max_new_tokens=4)
    ended: list[TokenChunk] = []
    remote.courier._outbox.post = lambda chunks: ended.extend(chunks) or []

    async def at_once(then: Any) -> None:
        remote.courier._begin(request)
        then()

    for then, status in (
        (lambda: remote.courier._cancel("x_1"), RequestStatus.CANCELLED),
        (lambda: remote.courier._stop(EngineStoppedError("all of it")), RequestStatus.FAILED),
    ):
        pool.places.add("x_1")
        remote.courier.run(at_once(then))
        remote.courier.run(asyncio.wait_for(remote.courier.drained(), PATIENCE))
        assert ended.pop().status == status and not ended and not pool.inside and not pool.places
    assert remote.courier._stopping is None


def test_an_interrupted_batch_leaves_nothing_in_the_pool(made) -> None:
    """Ctrl-C while a batch runs: what runs is cancelled, what waits at home is forgotten."""
    remote, pool = made(slots=2)
    ended: list[int] = []

    def interrupt() -> None:
        ended.append(1)
        pool.tap.clear()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        remote.run_batch([[n] for n in range(1, 50)], interrupt)
    remote.courier.run(remote.courier.drained())
    assert not pool.inside and not pool.places and len(ended) == 1
    pool.tap.set()
    assert remote.get_result(remote.add_request([5]), timeout=PATIENCE).generated_tokens == tokens([5])


def test_a_request_that_fails_fails_alone(made) -> None:
    """Bad prompts are refused here, and what the pool refuses is an output; the rest of a batch finishes."""
    remote, pool = made()
    pool.failing[20] = NoReplicaError("no replica came up")
    outputs = list(remote.run_batch([[10], [], [5000], [20], [30]], lambda: None).values())
    assert [output.status for output in outputs] == [
        *(RequestStatus.FINISHED, RequestStatus.FAILED, RequestStatus.FAILED, RequestStatus.FAILED, RequestStatus.FINISHED)
    ]
    assert "empty" in str(outputs[1].error) and "5000" in str(outputs[2].error) and "no replica came up" in str(outputs[3].error)


def test_a_hard_stop_ends_everyone_with_what_they_have(made) -> None:
    """FAILED with the reason, also those of a batch that had not been sent; new requests are refused."""
    remote, pool = made(slots=1)
    pool.tap.clear()
    name = remote.add_request([5], streaming=True)
    next(iter(remote.request_id_iter(name)))
    remote.inbox.refuse("stopped")
    remote.courier.stop(EngineStoppedError("stopped hard"))
    *_, output = remote.request_id_iter(name)
    assert (output.status, output.error, output.generated_tokens) == (RequestStatus.FAILED, "stopped hard", [5])
    assert remote.add_request([6]) is None
    with pytest.raises(EngineStoppedError):
        remote.add_requests([[6]])


def test_siblings_find_the_pool_by_themselves(made) -> None:
    """`num_return_sequences` makes children that may land anywhere, each with an output of its own."""
    remote, _ = made()
    name = remote.add_request([5], num_return_sequences=3)
    found = {remote.get_result(timeout=PATIENCE).request_id for _ in range(3)}
    assert found == {name, f"{name}__child#0", f"{name}__child#1"}
