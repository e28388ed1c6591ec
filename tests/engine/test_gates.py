"""Stop only rises; a pause has as many holders as like, and ends with the last."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.engine.gates import PauseGate, StopGate, StopLevel
from cb_ray.errors import EngineStoppedError
from tests.engine.fakes import PATIENCE, Background


class Engine:
    """What an engine thread does with its pause gate: parks whenever it is wanted, until told to end."""

    def __init__(self) -> None:
        self.rung = threading.Event()
        self.ended = threading.Event()
        self.parks = 0
        self.gate = PauseGate(self.rung.set)
        self.thread = Background(self._run)

    def _run(self) -> None:
        while not self.ended.is_set():
            assert self.rung.wait(PATIENCE)
            self.rung.clear()
            if self.gate.wanted:
                self.parks += 1
                self.gate.park()

    def end(self, cause: Exception | None = None) -> None:
        self.ended.set()
        self.rung.set()
        self.gate.let_go()
        self.thread.value()
        self.gate.end(cause)


@given(st.lists(st.sampled_from(list(StopLevel))))
def test_stop_only_rises(asked: list[StopLevel]) -> None:
    """Law L8: whatever is asked for in whatever order, the level is the highest so far, and the engine is rung each time."""
    rung: list[int] = []
    gate = StopGate(lambda: rung.append(1))
    for count, level in enumerate(asked, 1):
        gate.rise(level)
        assert gate.level == max(asked[:count])
    assert len(rung) == len(asked)


def test_the_engine_goes_on_when_the_last_holder_has_left() -> None:
    """Two threads hold one pause; the engine parks once and stays parked until both have left."""
    engine = Engine()
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.gate.hold():
            inside.set()
            assert leave.wait(PATIENCE)

    with engine.gate.hold():
        other = Background(hold)
        assert inside.wait(PATIENCE)
    assert engine.gate.wanted
    leave.set()
    other.value()
    assert not engine.gate.wanted
    assert engine.parks == 1
    engine.end()


def test_one_thread_may_hold_it_several_times_over() -> None:
    """Nested pauses of one thread are one pause; leaving the inner one ends nothing."""
    engine = Engine()
    with engine.gate.hold():
        with engine.gate.hold():
            assert engine.gate.held_here()
        assert engine.gate.held_here() and engine.gate.wanted
    assert not engine.gate.held_here() and not engine.gate.wanted
    engine.end()


def test_an_engine_that_ends_frees_who_waits_for_it_to_park() -> None:
    """A holder gets a RuntimeError that names the engine's own error, and holds nothing afterwards."""
    gate = PauseGate(lambda: None)
    waiting = Background(lambda: gate.hold().__enter__())
    gate.end(ValueError("the cause"))
    with pytest.raises(EngineStoppedError) as caught:
        waiting.value()
    assert isinstance(caught.value, RuntimeError) and isinstance(caught.value.__cause__, ValueError)
    assert not gate.wanted


def test_a_hard_stop_does_not_wait_for_holders() -> None:
    """The engine leaves its park; the holder keeps what it has and leaves in its own time."""
    engine = Engine()
    with engine.gate.hold():
        engine.end()
        assert engine.gate.held_here()
    assert not engine.gate.wanted
