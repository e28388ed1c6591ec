"""Who has which page cached: page digest → set of replicas, bounded in bytes, least recently used out.

Owns `PrefixIndex`. It is fed by engines (pages they cached and evicted) and, ahead of that, by grants (pages they are about to
cache). What nobody has any more is remembered for a while, to tell caches that give up what is wanted from those with room to
spare. May know nothing but the standard library.

    digest ─▶ bits   one bit per replica; a replica that leaves or drops its cache gets a new bit and its old one goes dead,
                     so forgetting a replica costs nothing, and dead bits are masked out whenever an entry is read
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

BYTES_PER_ENTRY = 256  # 154 measured with half-empty tables: ordered dict slot, 16-byte digest, small int; the rest is margin
_FEW = 16.0  # pages: what is known of fewer evictions says little
_FORGET = 1 - 1 / 512  # at each eviction
_COMPACT_AT = 512  # bits ever given out; then all entries are rewritten once


class PrefixIndex:
    """A page is looked up by the digest that covers it and everything before it, so the first miss ends a match."""

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        self.max_entries = 1
        self._bits: OrderedDict[bytes, int] = OrderedDict()  # oldest use first
        self._bit_of: dict[str, int] = {}
        self._replica_at: dict[int, str] = {}
        self._live = 0  # all bits in use
        self._next = 0
        self._gone: OrderedDict[bytes, str] = OrderedDict()  # pages that nobody has any more → who had them last
        self._evicted: dict[str, float] = {}  # last copies that a replica gave up, lately …
        self._missed: dict[str, float] = {}  # … and how many of them were asked for afterwards
        self.resize(max_bytes)

    def __len__(self) -> int:
        return len(self._bits)

    def add(self, replica: str, digests: Iterable[bytes]) -> None:
        """`replica` has these pages, or will have them shortly."""
        bit = 1 << (self._bit_of[replica] if replica in self._bit_of else self._new_bit(replica))
        bits, live = self._bits, self._live
        for digest in digests:
            found = bits.get(digest)
            if found is None:
                bits[digest] = bit
                if digest in self._gone:
                    self._miss(digest)
            else:
                if not found & bit:
                    bits[digest] = (found & live) | bit
                bits.move_to_end(digest)
        self._trim()

    def resize(self, max_bytes: int) -> None:
        """Take another bound on memory; the entries used longest ago go first."""
        self.max_entries = max(1, max_bytes // BYTES_PER_ENTRY)
        self._trim()

    def _trim(self) -> None:
        while len(self._bits) + len(self._gone) > self.max_entries:
            (self._gone or self._bits).popitem(last=False)

    def discard(self, replica: str, digests: Iterable[bytes]) -> None:
        """`replica` has these pages no longer."""
        if replica not in self._bit_of:
            return
        keep = self._live & ~(1 << self._bit_of[replica])
        for digest in digests:
            found = self._bits.get(digest)
            if found is None:
                continue
            if found & keep:
                self._bits[digest] = found & keep
            else:
                del self._bits[digest]
                self._give_up(replica, digest)

    def regret(self, replica: str) -> float:
        """Of the pages that `replica` gives up, the share that is asked for again, as far as is known: between 0 and 1."""
        missed = self._missed.get(replica)
        return min(1.0, missed / (self._evicted.get(replica, 0.0) + _FEW)) if missed else 0.0

    def regrets(self) -> list[tuple[str, float]]:
        """(replica, regret) of those that have any."""
        return [(replica, self.regret(replica)) for replica, missed in self._missed.items() if missed]

    def _give_up(self, replica: str, digest: bytes) -> None:
        """What would be found if all caches together were twice as large is remembered, and nothing older."""
        self._gone[digest] = replica
        self._gone.move_to_end(digest)
        while len(self._gone) > len(self._bits):
            self._gone.popitem(last=False)
        self._evicted[replica] = self._evicted.get(replica, 0.0) * _FORGET + 1
        self._missed[replica] = self._missed.get(replica, 0.0) * _FORGET

    def _miss(self, digest: bytes) -> None:
        """A page that nobody has is wanted: that is held against the one who gave it up."""
        replica = self._gone.pop(digest)
        if replica in self._missed:
            self._missed[replica] += 1

    def forget(self, replica: str) -> None:
        """`replica` is gone or has dropped its whole cache (new weights)."""
        bit = self._bit_of.pop(replica, None)
        if bit is not None:
            self._live &= ~(1 << bit)
            del self._replica_at[bit]
        self._evicted.pop(replica, None)
        self._missed.pop(replica, None)

    def depths(self, digests: Sequence[bytes]) -> dict[str, int]:
        """How many leading pages each replica has; replicas without any are absent. Looking is no use: a grant adds them anew."""
        bits = self._bits
        alive, depth = self._live, 0
        out: dict[int, int] = {}  # bits of the replicas that stop here → pages they have
        for digest in digests:
            found = bits.get(digest, 0) & alive
            if found != alive and depth:
                out[depth] = alive & ~found
            alive = found
            if not alive:
                break
            depth += 1
        if alive and depth:
            out[depth] = alive
        depths: dict[str, int] = {}
        for pages, who in out.items():
            while who:
                low = who & -who
                depths[self._replica_at[low.bit_length() - 1]] = pages
                who ^= low
        return depths

    def _new_bit(self, replica: str) -> int:
        if self._next >= _COMPACT_AT and self._next > 4 * len(self._bit_of):
            self._compact()
        bit = self._bit_of[replica] = self._next
        self._next += 1
        self._replica_at[bit] = replica
        self._live |= 1 << bit
        return bit

    def _compact(self) -> None:
        """Give out bits from 0 again: rewrites every entry once, after hundreds of replicas have come and gone."""
        old = dict(self._bit_of)
        self._bit_of = {replica: new for new, replica in enumerate(old)}
        self._replica_at = {bit: replica for replica, bit in self._bit_of.items()}
        self._next, self._live = len(old), (1 << len(old)) - 1
        for digest in list(self._bits):
            found = self._bits[digest]
            fresh = sum(1 << self._bit_of[replica] for replica, bit in old.items() if found >> bit & 1)
            if fresh:
                self._bits[digest] = fresh
            else:
                del self._bits[digest]
