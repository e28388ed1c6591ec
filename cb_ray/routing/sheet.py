"""What decisions read of all replicas, side by side: columns instead of objects, so that a decision over hundreds costs microseconds.

Owns `Sheet`: one entry per replica in each column, brought up to date when the replica was touched and somebody looks. Prices come
out the same, to the last bit, as those that a policy works out from `ReplicaLoad`s. May know nothing but the values beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .loads import Rates
from .members import Replica

CLOSED = -1.0  # room of a replica that takes nobody now


class Sheet:
    """Columns over `replicas`, in the order of that mapping. `touch` whoever changed; `rebuild` when replicas came or went."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        self._replicas = replicas
        self._touched: set[str] = set()
        self._stale = True
        self._blocked = False  # somebody is left alone for a while, so that time alone opens a replica
        self.names: list[str] = []
        self.at: dict[str, int] = {}
        self.room: list[float] = []  # of a replica for a prompt …
        self.step_left: list[float] = []  # … that its next step begins with
        self.taken: list[int] = []
        self._prefill: dict[int, float] = {}  # of those that owe any; whole numbers all the same, which multiply twice as fast
        self._decode: list[float] = []
        self._strays: list[int] = []

    def touch(self, name: str) -> None:
        self._touched.add(name)

    def rebuild(self) -> None:
        self._stale = True

    def settle(self, now: float) -> None:
        """Every column is true at `now`."""
        if self._stale or self._blocked:
            self._stale = self._blocked = False
            self._touched.clear()
            self.names = list(self._replicas)
            self.at = {name: at for at, name in enumerate(self.names)}
            count = len(self.names)
            self.room, self.step_left, self.taken = [CLOSED] * count, [CLOSED] * count, [0] * count
            self._prefill, self._decode, self._strays = {}, [0.0] * count, [0] * count
            for at, replica in enumerate(self._replicas.values()):
                self._write(now, at, replica)
        elif self._touched:
            for name in self._touched:
                self._write(now, self.at[name], self._replicas[name])
            self._touched.clear()

    def _write(self, now: float, at: int, replica: Replica) -> None:
        self.room[at], self.step_left[at], self.taken[at] = float(replica.room(now)), float(replica.step_left), replica.taken
        self._decode[at] = float(replica.owed_decode)
        if replica.owed_prefill:
            self._prefill[at] = float(replica.owed_prefill)
        else:
            self._prefill.pop(at, None)
        self._strays[at] = len(replica.strays)
        self._blocked |= now < replica.blocked_until

    def owed_s(self, rates: Rates, mean: float) -> list[float]:
        """By how much the work owed by each makes other work later; `mean`: tokens that a request of which nothing is known owes."""
        prefill_s, decode_s = rates.prefill_s, rates.decode_s
        owed = [decode * decode_s for decode in self._decode]
        if any(self._strays):
            owed = [(decode + strays * mean) * decode_s for decode, strays in zip(self._decode, self._strays, strict=True)]
        for at, prefill in self._prefill.items():
            owed[at] += prefill * prefill_s
        return owed

    def able(self, tokens: int, found: Mapping[int, int], since_beat: float, *, patient: bool) -> Sequence[int]:
        """Entries of those that may be granted a prompt of `tokens` now. `found`: tokens of it that are cached, by entry;
        `since_beat`: tokens of prompts that an engine computes between two beats.

        Those that can begin soon; and, of those behind with their prompts, whoever is `worth_waiting` for, to one who is `patient`.
        """
        room, step_left = self.room, self.step_left
        soon = tokens - since_beat
        if min(room, default=CLOSED) >= tokens and min([step_left[at] for at in self._prefill], default=soon) >= soon:
            return range(len(room))  # everyone, whatever is cached; who owes no prompts begins with any
        able = [at for at, most in enumerate(room) if most >= tokens and step_left[at] >= soon and at not in found]
        if not found:
            return able
        fit = [at for at, cached in found.items() if room[at] >= tokens - cached]
        able += [at for at in fit if step_left[at] >= soon - found[at]]
        if patient:
            spared = max([found[at] for at in fit if step_left[at] >= soon - found[at]], default=0)
            able += [at for at in fit if step_left[at] < soon - found[at] and worth_waiting(tokens, found[at], spared)]
        return sorted(able)


def worth_waiting(tokens: int, cached: int, elsewhere: int) -> bool:
    """Whether a prompt of `tokens` should go where `cached` of them are, though it cannot begin at once there, when at most
    `elsewhere` are cached where it could."""
    return cached - elsewhere >= tokens - cached
