"""Refusals without asking the pool: a pool and two doors, with words on their way between them, in any order that can be."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cb_ray.routing.doorman import Doorman
from cb_ray.routing.loads import Ask
from cb_ray.routing.members import Member
from cb_ray.routing.pool import Pool, PoolLimits
from cb_ray.routing.replies import Queued, Room

BELIEVES_S = 2.0


class Door:
    """A doorman with a clock of its own, and what its model knows: the last word, and promises that arrived and were not given out."""

    def __init__(self, offset: float) -> None:
        self.offset, self.man = offset, Doorman(promises=4, believes_s=BELIEVES_S)
        self.heard: bool | None = None  # what the last word that arrived said
        self.word: Room | None = None  # the newest of all that arrived
        self.answers: list[Room] = []  # to callers who asked, on their way
        self.coming: Room | None = None  # that is on its way
        self.stock: list[Room] = []  # promises alone that are on their way
        self.heard_at = -1e9
        self.promises: list[float] = []


class DoorsBeforeAPool(RuleBasedStateMachine):
    @initialize(limit=st.integers(1, 2), slots=st.integers(1, 2))
    def start(self, limit, slots):
        self.pool, self.now, self.count = Pool(PoolLimits(max_queue_size=limit)), 50.0, 0
        self.pool.members(self.now, [Member(replica="r", slots=slots)])
        self.doors = [Door(0.0), Door(1000.0)]
        self.inside: list[str] = []
        self.places: list[str] = []
        self.given = self.refused = self.refused_there = 0
        for _ in range(limit + slots):
            self.somebody_is_admitted(priority=1)
        for door in (0, 1):
            self.the_pool_answers(door)
            self.a_word_arrives(door)

    @rule(priority=st.integers(0, 2))
    def somebody_is_admitted(self, priority):
        self.count += 1
        ask = Ask(ticket=f"t{self.count}", request_id=f"q{self.count}", priority=priority)
        if not self.pool.is_full(self.now):
            self.pool.acquire(self.now, ask)
            self.inside.append(ask.ticket)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def somebody_leaves(self, data):
        ticket = data.draw(st.sampled_from(self.inside))
        self.inside.remove(ticket)
        self.pool.release(self.now, ticket)

    @rule(which=st.integers(0, 1))
    def the_pool_answers(self, which):
        """As the Board does: a door is told when it is otherwise than it heard, and asks again when that has arrived."""
        door = self.doors[which]
        if door.coming is None and door.heard is not self.pool.is_full(self.now):
            door.coming = self.room(door)

    @rule(which=st.integers(0, 1))
    def a_door_wants_promises(self, which):
        door = self.doors[which]
        if door.man.is_low(self.now + door.offset) and len(door.stock) < 2:
            door.stock.append(self.room(door))

    def room(self, door: Door) -> Room:
        self.refused += (told := door.man.tell())
        room = self.pool.room(self.now, door.man.wants(self.now + door.offset), told)
        self.given += len(room.returns)
        return room

    @rule(which=st.integers(0, 1))
    def a_word_arrives(self, which):
        door = self.doors[which]
        if door.coming is not None:
            word, door.coming = door.coming, None
            door.heard = word.full
            door.man.hear(self.now + door.offset, word)
            self.arrived(door, word)
            self.is_known(door, word)

    @rule(which=st.integers(0, 1))
    def a_caller_asks(self, which):
        """As a Router does: who is not refused asks for a place, and is answered with how the pool looks since."""
        door = self.doors[which]
        if door.man.refuse(self.now + door.offset) is not None:
            self.forget_promise(door)
            return
        self.count += 1
        name, free, full = f"q{self.count}", self.pool.free_places(self.now), self.pool.is_full(self.now)
        door.man.ask()
        if self.pool.reserve(self.now, name) is None:
            self.places.append(name)
            assert free > 0 and self.pool.free_places(self.now) == free - 1, "as many are admitted as there are places"
        else:
            assert full and free == 0
            self.refused_there += 1
        door.answers.append(self.pool.room(self.now))

    @precondition(lambda self: any(door.answers for door in self.doors))
    @rule(data=st.data())
    def an_answer_arrives(self, data):
        door = data.draw(st.sampled_from([door for door in self.doors if door.answers]))
        room = door.answers.pop(data.draw(st.integers(0, len(door.answers) - 1)))
        door.man.answer(self.now + door.offset, room)
        if door.word is not None:
            door.heard_at = self.now
            self.is_known(door, room)

    def is_known(self, door: Door, room: Room) -> None:
        if door.word is None or room.number >= door.word.number:
            door.word = room

    @precondition(lambda self: self.places)
    @rule()
    def a_place_is_given_back(self):
        self.pool.unreserve(self.places.pop())

    @rule(which=st.integers(0, 1))
    def promises_arrive(self, which):
        door = self.doors[which]
        if door.stock:
            room = door.stock.pop()  # calls may overtake each other
            door.man.stock(self.now + door.offset, room)
            self.arrived(door, room)

    def arrived(self, door: Door, room: Room) -> None:
        door.heard_at = self.now
        door.promises += [self.now + wait for wait in room.returns]

    @rule(which=st.integers(0, 1), priority=st.integers(-1, 2))
    def a_newcomer(self, which, priority):
        door = self.doors[which]
        answer = door.man.refuse(self.now + door.offset, priority)
        if answer is None:
            return
        assert door.word is not None, "nobody is refused before a word"
        assert door.word.full or len(door.answers) >= door.word.free, "nobody is refused while fewer ask than there are places"
        assert self.now - door.heard_at <= BELIEVES_S, "a pool that says nothing refuses nobody for long"
        assert door.word.first is None or priority >= door.word.first, "who goes first is the pool's to judge"
        assert answer.retry_after_s > 0 and (answer.waiting, answer.limit) == (door.word.waiting, door.word.limit)
        kept = self.forget_promise(door)
        assert answer.retry_after_s == pytest.approx(kept - self.now), "the next one promised to this door, and to nobody else"

    def forget_promise(self, door: Door) -> float:
        kept = next(at for at in sorted(door.promises) if at > self.now)
        door.promises.remove(kept)
        return kept

    @rule(which=st.integers(0, 1))
    def the_pool_is_lost(self, which):
        door = self.doors[which]
        door.man.lose()
        door.word, door.heard, door.coming, door.stock, door.promises = None, None, None, [], []

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.1, 1.6, 2.5, 30.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @invariant()
    def what_was_refused_is_counted_once(self):
        if hasattr(self, "pool"):
            assert self.pool.counters["refused"] == self.refused + self.refused_there

    def teardown(self):
        if hasattr(self, "pool"):
            left = sum(door.man.tell() for door in self.doors)
            assert self.refused + left <= self.given, "no more were refused than were promised a place"


TestDoorsBeforeAPool = DoorsBeforeAPool.TestCase
TestDoorsBeforeAPool.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def full_pool() -> Pool:
    pool = Pool(PoolLimits(max_queue_size=1))
    pool.members(0.0, [Member(replica="r", slots=1)])
    pool.acquire(0.0, Ask(ticket="a", request_id="a"))
    assert isinstance(pool.acquire(0.0, Ask(ticket="b", request_id="b")), Queued)
    return pool


def test_doors_have_promises_of_their_own():
    """Two doors and a caller at the pool itself are told different times, and no place in between is left out."""
    pool, doors = full_pool(), [Doorman(promises=3), Doorman(promises=3)]
    for door in doors:
        door.hear(0.0, pool.room(0.0, door.wants(0.0)))
    times = [refused.retry_after_s for door in doors for _ in range(3) if (refused := door.refuse(0.0))]
    asked = pool.reserve(0.0, "c")
    assert asked is not None and [door.refuse(0.0) for door in doors] == [None, None]
    assert len(times) == 6 and times == sorted(times) and times[-1] < asked.retry_after_s


def test_promises_outlast_a_place_that_was_taken_at_once():
    """In a storm a place is gone as soon as it is there. Promises stay, or callers would be told later and later."""
    pool, door = full_pool(), Doorman(promises=4)
    door.hear(0.0, pool.room(0.0, door.wants(0.0)))
    assert door.refuse(0.0) is not None
    door.hear(0.1, Room(free=1, waiting=0, limit=1, number=2))
    assert door.refuse(0.1) is None and door.asks_first(0.1) and not door.asks_first(1.2)
    assert door.wants(0.1) == 1


def test_as_many_ask_as_there_are_places():
    """The second caller after word of one place was refused by the pool, after a way there and back that takes tens of milliseconds
    on a busy machine. Now he is refused at the door while the first is asking, and asks when the first did not get it."""
    pool, door = full_pool(), Doorman(promises=4)
    door.hear(0.0, pool.room(0.0, door.wants(0.0)))
    pool.release(0.1, "a")
    door.hear(0.1, word := pool.room(0.1))
    assert (word.full, word.free) == (False, 1) and door.refuse(0.1) is None
    door.ask()
    assert door.refuse(0.1) is not None
    assert pool.reserve(0.1, "first") is None
    taken = pool.room(0.1)
    pool.unreserve("first")
    door.answer(0.2, pool.room(0.2))
    assert door.refuse(0.2) is None, "it is free again"
    door.ask()
    door.answer(0.3, taken)
    assert door.refuse(0.3) is None, "an answer that was overtaken says nothing new"
