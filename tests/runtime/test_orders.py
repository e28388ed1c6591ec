"""The leader's orders on the wire: what is sent is what is executed, in order, whatever its size."""

from __future__ import annotations

import queue
from array import array
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.core.plan import BatchPlan, BlockCopy
from cb_ray.runtime.orders import Command, Follower, Orders, message_of
from cb_ray.runtime.ranks import Ranks


class Wire:
    """A group of two ranks in one process: what the leader broadcasts, the follower finds."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self.log: list[Any] = []
        self.leader = Orders(cast("Ranks", self))
        self.follower = Follower(cast("Ranks", self), self, self)
        self.leader._broadcast = lambda tensor: self.sent.put(tensor.clone())
        self.follower._broadcast = lambda tensor: tensor.copy_(self.sent.get_nowait())

    def barrier(self) -> None:
        self.log.append("met")

    def install(self) -> None:
        self.log.append("install")

    def restore(self) -> None:
        self.log.append("restore")

    def reload(self) -> None:
        self.log.append("reload")

    def move(self, plan: BatchPlan) -> None:
        self.log.append(plan)

    def execute(self, host: np.ndarray, sizes: tuple[int, ...], every_token: bool) -> None:
        self.log.append((host.tolist(), sizes, every_token))

    def follow(self) -> None:
        while not self.sent.empty():
            self.follower.obey(self.follower.receive())


copies = st.lists(st.builds(BlockCopy, *[st.integers(0, 2**31 - 1)] * 3), max_size=1500).map(tuple)


@given(st.integers(0, 20_000), st.tuples(*[st.integers(0, 2**31 - 1)] * 6), st.booleans())
def test_a_pass_arrives_as_it_was_packed(count, sizes, every_token):
    """Buffers that fit the frame, fill it to the last integer, or need a second broadcast."""
    wire = Wire()
    for size in (count, 4079, 4080, 4081):
        host = np.arange(size, dtype=np.int32) - 7
        wire.leader.run(host, sizes, every_token)
        wire.follow()
        assert wire.log.pop() == (host.tolist(), sizes, every_token)
    assert wire.follower.num_passes == 4


@given(parks=copies, unparks=copies, forks=copies)
def test_moves_arrive_in_their_three_kinds(parks, unparks, forks):
    """Park, unpark and fork are done in this order on every rank; a plan without moves sends nothing."""
    wire = Wire()
    plan = BatchPlan(step=3, rows=(), parks=parks, unparks=unparks, copies=forks)
    wire.leader.move(plan)
    assert wire.sent.empty() == (not (parks or unparks or forks))
    wire.follow()
    assert wire.log == (
        [BatchPlan(step=0, rows=(), parks=parks, unparks=unparks, copies=forks)] if parks or unparks or forks else []
    )


@given(st.binary(max_size=40_000))
def test_a_message_arrives_byte_for_byte(message):
    """Whatever its length, which need not be a multiple of four."""
    wire = Wire()
    wire.leader.tell(message)
    order = wire.follower.receive()
    assert order.command == Command.TELL and message_of(order) == message


def test_installing_twice_is_one_order_and_a_common_pause_ends_when_all_have_met():
    """The model changes hands once; after a pause of all ranks the leader waits for the others before work goes on."""
    wire = Wire()
    wire.leader.install()
    wire.leader.install()
    wire.leader.together = True
    wire.leader.restore()
    wire.leader.restore()
    wire.leader.install()
    wire.leader.reload()
    wire.follow()
    assert wire.log == ["met", "install", "restore", "install", "reload"]  # the follower's side of the meeting is its owner's


def test_a_lost_order_is_noticed():
    """Orders are numbered; a follower that missed one does not go on."""
    wire = Wire()
    wire.leader.run(np.empty(0, np.int32), (), False)
    wire.leader.run(np.empty(0, np.int32), (), False)
    wire.sent.get()
    with pytest.raises(RuntimeError, match="order 1 is missing"):
        wire.follow()


def test_a_broken_stream_is_said_once_more_and_hurts_no_ending():
    """After a failed send the next step fails at once, while restoring the model and stopping stay silent."""
    wire = Wire()

    def fail(tensor: torch.Tensor) -> None:
        raise RuntimeError("Connection closed by peer")

    wire.leader.install()
    wire.leader._broadcast = fail
    with pytest.raises(RuntimeError, match="closed by peer"):
        wire.leader.run(np.array(array("i", [1]), np.int32), (), False)
    with pytest.raises(RuntimeError, match="start all of them again"):
        wire.leader.run(np.empty(0, np.int32), (), False)
    wire.leader.restore()
    wire.leader.stop(keep=False)
