"""Law L2 over the whole life of a manager: whatever is asked of it in whatever order, each request that was taken ends exactly once."""

from __future__ import annotations

import queue
from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from cb_ray.messages import GenerationOutput, RequestStatus
from tests.engine.fakes import FakeRunner, make_engine, tokens_after

MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 9), st.integers(0, 12), st.booleans(), st.integers(1, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("pause"), st.booleans(), st.booleans()),
        st.tuples(st.just("stop"), st.booleans(), st.booleans(), st.booleans()),
        st.tuples(st.just("start")),
        st.tuples(st.just("fetch"), st.integers(0, 20)),
        st.tuples(st.just("break")),
        st.tuples(st.just("drop_cache")),
    ),
    max_size=25,
)


class Life:
    """A manager, what was asked of it, and what it answered."""

    def __init__(self, depth: int, limit: int) -> None:
        def prepare(runner: FakeRunner) -> None:
            runner.depth = depth

        config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)
        self.engine = make_engine(config, prepare=prepare, num_blocks=24, max_queue_size=limit, max_requests_per_batch=3)
        self.manager = self.engine.manager
        self.asked: dict[str, tuple[int, int]] = {}  # id -> prompt length, tokens asked for
        self.names: list[str] = []  # ids that were returned, for cancelling and fetching
        self.outputs: dict[str, list[GenerationOutput]] = defaultdict(list)
        self.errors: list[Exception] = []  # that ended a session

    def do(self, move: tuple[Any, ...]) -> None:
        getattr(self, move[0])(*move[1:])

    def add(self, length: int, count: int, streaming: bool, sequences: int) -> None:
        try:
            name = self.manager.add_request(
                [1] * length, max_new_tokens=count, streaming=streaming, num_return_sequences=sequences
            )
        except queue.Full:
            return
        if name is not None:
            self.names.append(name)
            for member in (name, *(f"{name}__child#{k}" for k in range(sequences - 1))):
                assert member not in self.asked
                self.asked[member] = (length, count)

    def cancel(self, which: int) -> None:
        self.manager.cancel_request(self.names[which] if which < len(self.names) else "nobody")

    def pause(self, invalidate: bool, recompute: bool) -> None:
        if self.manager.is_running():
            try:
                with self.manager.pause(invalidate=invalidate, recompute=recompute):
                    assert not self.engine.runner.installed
            except RuntimeError:
                self.manager.join(0.0)  # it was refused because the engine was ending
                assert not self.manager.is_running()

    def stop(self, block: bool, keep: bool, hard: bool) -> None:
        if self.manager.is_running():
            self.manager.stop(block=block, keep_for_next_session=keep, hard_stop=hard)

    def start(self) -> None:
        self.note_error()
        self.manager.start()

    def note_error(self) -> None:
        if self.manager.fatal_error is not None:
            self.errors.append(self.manager.fatal_error)

    def fetch(self, which: int) -> None:
        name = self.names[which] if which < len(self.names) else None
        self.note(self.manager.get_result(name, timeout=0.0))

    def drop_cache(self) -> None:
        self.manager.drop_cache()

    def note(self, output: GenerationOutput | None) -> None:
        if output is not None:
            self.outputs[output.request_id].append(output)

    def end(self) -> None:
        """Destroy it, read what is left, and look at everything that ever came."""
        self.manager.destroy()
        self.note_error()
        for output in self.manager:
            self.note(output)
        assert self.outputs.keys() == self.asked.keys()
        assert all("4711" in str(error) for error in self.errors), self.errors
        for name, outputs in self.outputs.items():
            length, count = self.asked[name]
            assert [output.is_finished() for output in outputs] == [False] * (len(outputs) - 1) + [True], name
            sizes = [len(output.generated_tokens) for output in outputs]
            assert sizes[:-1] == list(range(1, len(sizes))), name
            last = outputs[-1]
            assert last.generated_tokens == tokens_after(length, len(last.generated_tokens)), name
            if last.status == RequestStatus.FINISHED:
                assert len(last.generated_tokens) == count and last.error is None
        for core in self.engine.cores:
            core.check()

    def break_(self) -> None:
        self.engine.runner.fail_at = self.engine.runner.steps + 2


setattr(Life, "break", Life.break_)


@settings(max_examples=150, deadline=None)
@given(moves=MOVES, depth=st.sampled_from([1, 2]), limit=st.sampled_from([0, 2]))
def test_every_request_that_was_taken_ends_exactly_once(moves: list[tuple[Any, ...]], depth: int, limit: int) -> None:
    """Adds, cancels, pauses, stops of every kind, starts and failing steps: each id gets its outputs in order and one end."""
    life = Life(depth, limit)
    for move in moves:
        life.do(move)
    life.end()
