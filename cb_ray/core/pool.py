"""Who holds which block. Owns block ids, reference counts, and the names of full pages; knows nothing of requests or tensors.

A block is *held* (refs > 0), *cached* (nobody holds it, its contents have a name) or *blank*. Cached and blank are both free: a
name is a bonus, never a reason to say no. Cached blocks are forgotten one at a time, the one released longest ago first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import takewhile


class BlockPool:
    """The blocks of one layer group, in the sectors that are lent to it. Verbs do all or nothing.

    Law L1: held + cached + blank = all blocks of the lent sectors, at any time.
    """

    def __init__(self, blocks_per_sector: int, *, alone: bool = False) -> None:
        """`alone`: it has all sectors for ever, so nobody asks which of them are idle."""
        self.blocks_per_sector = blocks_per_sector
        self._alone = alone
        self._refs: dict[int, int] = {}  # held blocks only
        self._blank: dict[int, None] = {}  # used as a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._name: dict[int, Hashable] = {}
        self._named: dict[Hashable, int] = {}
        self._num_sectors = 0
        self._held_in: dict[int, int] = {}  # unless alone: sector -> how many of its blocks are held
        self._idle: dict[int, None] = {}  # sectors none of whose blocks is held
        self.named_since: list[Hashable] = []  # what became findable, and
        self.forgotten_since: list[Hashable] = []  # what stopped being so, since the owner last looked
        self.tracks_names = False

    # ---- asking -----------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_held(self) -> int:
        return len(self._refs)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_blocks(self) -> int:
        return self._num_sectors * self.blocks_per_sector

    @property
    def num_idle_sectors(self) -> int:
        return len(self._idle)

    def refs(self, block: int) -> int:
        return self._refs.get(block, 0)

    def find(self, name: Hashable) -> int | None:
        """The block of that name, held or cached."""
        return self._named.get(name)

    def match(self, names: Iterable[Hashable]) -> int:
        """How many of `names` are found before the first that is not."""
        return len(list(takewhile(self._named.__contains__, names)))

    def count_cached(self, names: Iterable[Hashable]) -> int:
        """How many of `names` are those of blocks that nobody holds."""
        named, cached = self._named, self._cached
        return sum([named.get(name, -1) in cached for name in names])

    # ---- sectors ----------------------------------------------------------------------------------------------------------

    def adopt(self, sectors: Sequence[int]) -> None:
        """The blocks of these sectors become ours, blank."""
        size = self.blocks_per_sector
        blocks = [block for sector in sectors for block in reversed(range(sector * size, (sector + 1) * size))]
        self._blank.update(dict.fromkeys(blocks))
        self._num_sectors += len(sectors)
        if not self._alone:
            self._held_in.update(dict.fromkeys(sectors, 0))
            self._idle.update(dict.fromkeys(sectors))

    def surrender(self) -> int:
        """Give up one idle sector and forget the pages cached in it. Needs one."""
        sector = next(iter(self._idle))
        first = sector * self.blocks_per_sector
        for block in range(first, first + self.blocks_per_sector):
            if block in self._cached:
                self._forget(block)
                del self._cached[block]
            else:
                del self._blank[block]
        del self._idle[sector], self._held_in[sector]
        self._num_sectors -= 1
        return sector

    # ---- blocks -----------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """Hand out `count` blank blocks; when those run out, the cached ones released longest ago. The caller has asked
        num_free.
        """
        if count > self.num_free:
            raise AssertionError(f"{count} blocks were taken and {self.num_free} are free: ask before taking")
        taken = [self._blank.popitem()[0] for _ in range(min(count, len(self._blank)))]
        for _ in range(count - len(taken)):
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            taken.append(block)
        self._hold(taken)
        return taken

    def share(self, names: Iterable[Hashable]) -> list[int]:
        """Hold the blocks of these names too, whether or not anyone holds them now. The caller has asked find."""
        named, refs, unheld = self._named, self._refs, list[int]()
        blocks = [named[name] for name in names]
        for block in blocks:
            if block in refs:
                refs[block] += 1
            else:
                del self._cached[block]
                unheld.append(block)
        self._hold(unheld)
        return blocks

    def hold_again(self, block: int) -> None:
        """One more holder for a block that is held."""
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Stop holding, in this order: the first released is the first forgotten later."""
        held, names, cached, blank, alone = self._refs, self._name, self._cached, self._blank, self._alone
        for block in blocks:
            refs = held[block]
            if refs > 1:
                held[block] = refs - 1
                continue
            del held[block]
            (cached if block in names else blank)[block] = None
            if not alone:
                sector = block // self.blocks_per_sector
                self._held_in[sector] -= 1
                if not self._held_in[sector]:
                    self._idle[sector] = None

    def name(self, blocks: Iterable[int], names: Iterable[Hashable]) -> None:
        """Publish the contents of held blocks, each under its name. The first block of a name keeps it."""
        named, name_of = self._named, self._name
        for block, name in zip(blocks, names, strict=True):
            if name not in named and block not in name_of:
                named[name] = block
                name_of[block] = name
                if self.tracks_names:
                    self.named_since.append(name)

    def take_names(self) -> tuple[list[Hashable], list[Hashable]]:
        """(added, forgotten) names since the last call. Only what is so now: one that came and went in between is in neither list,
        whichever came last."""
        if not (self.named_since or self.forgotten_since):
            return [], []
        named, added, forgotten = self._named, dict.fromkeys(self.named_since), dict.fromkeys(self.forgotten_since)
        self.named_since, self.forgotten_since = [], []
        return [name for name in added if name in named], [name for name in forgotten if name not in named]

    def forget(self, blocks: Iterable[int]) -> None:
        """Take the names of these held blocks away: their contents are not to be found again."""
        for block in blocks:
            if block in self._name:
                self._forget(block)

    def forget_all(self) -> None:
        """No page is found again; cached blocks become blank."""
        for block in list(self._name):
            self._forget(block)
        self._blank.update(self._cached)
        self._cached.clear()

    def check(self) -> None:
        """Law L1, and that names and states agree. Raises AssertionError; for tests and the idle engine."""
        held, cached, blank = set(self._refs), set(self._cached), set(self._blank)
        assert len(held) + len(cached) + len(blank) == self.num_blocks, (len(held), len(cached), len(blank), self.num_blocks)
        assert len(held | cached | blank) == self.num_blocks, "a block is in two states"
        assert all(refs > 0 for refs in self._refs.values())
        assert all(block in self._name for block in cached), "a cached block without a name"
        assert {name: block for block, name in self._name.items()} == self._named
        assert not blank & set(self._name), "a blank block with a name"
        for sector, count in self._held_in.items():
            assert count == sum(block // self.blocks_per_sector == sector for block in held)
            assert (count == 0) == (sector in self._idle)

    def _hold(self, blocks: Sequence[int]) -> None:
        self._refs.update(dict.fromkeys(blocks, 1))
        for block in () if self._alone else blocks:
            sector = block // self.blocks_per_sector
            if not self._held_in[sector]:
                del self._idle[sector]
            self._held_in[sector] += 1

    def _forget(self, block: int) -> None:
        name = self._name.pop(block)
        del self._named[name]
        if self.tracks_names:
            self.forgotten_since.append(name)


class SectorPool:
    """Lends the sectors of one memory to the block pools of all layer groups."""

    def __init__(self, num_sectors: int, blocks_per_sector: Sequence[int]) -> None:
        self.pools = tuple(BlockPool(count, alone=len(blocks_per_sector) == 1) for count in blocks_per_sector)
        self._free = list(range(num_sectors, 0, -1))  # sector 0 is the trash
        self._num_sectors = num_sectors
        if len(self.pools) == 1:
            self.pools[0].adopt(self._free[::-1])
            self._free.clear()

    def can_take(self, needs: Sequence[int]) -> bool:
        """Whether needs[g] blocks can be had for every group g at once."""
        if len(self.pools) == 1:
            return needs[0] <= self.pools[0].num_free
        missing, spare = 0, len(self._free)
        for pool, need in zip(self.pools, needs, strict=True):
            if need > pool.num_free:
                missing += -(-(need - pool.num_free) // pool.blocks_per_sector)
            else:
                spare += min(pool.num_idle_sectors, (pool.num_free - need) // pool.blocks_per_sector)
        return missing <= spare

    def take(self, needs: Sequence[int]) -> list[list[int]]:
        """needs[g] blocks for every group g. The caller has asked can_take."""
        if len(self.pools) > 1:
            for pool, need in zip(self.pools, needs, strict=True):
                while need > pool.num_free:
                    pool.adopt([self._free.pop() if self._free else self._reclaim(needs)])
        return [pool.take(need) for pool, need in zip(self.pools, needs, strict=True)]

    def free_fraction(self) -> float:
        """Share of the memory that nobody holds, cached pages included, between 0 and 1."""
        free = len(self._free) + sum([pool.num_free / pool.blocks_per_sector for pool in self.pools])
        return free / self._num_sectors

    def check(self) -> None:
        """Law L1 for the whole memory. Raises AssertionError."""
        for pool in self.pools:
            pool.check()
        lent = sum(pool.num_blocks // pool.blocks_per_sector for pool in self.pools)
        assert lent + len(self._free) == self._num_sectors, (lent, len(self._free), self._num_sectors)

    def _reclaim(self, needs: Sequence[int]) -> int:
        for pool, need in zip(self.pools, needs, strict=True):
            if pool.num_idle_sectors and pool.num_free - need >= pool.blocks_per_sector:
                return pool.surrender()
        raise AssertionError("no sector can be reclaimed: ask can_take before taking")
