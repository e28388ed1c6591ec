"""The only door to blocks. Owns which request holds which block in every group, what is named, and what is parked on the host.

Knows counters and block ids, no tensor. Every verb does all or nothing. Both kinds of layer group index by absolute position:

    slot of position p = table[p // page_size] * page_size + p % page_size

A full-attention table keeps all its blocks. A sliding one gives back the blocks that lie wholly left of the window and points
their entries at the trash block, so that one slot formula serves both and a prefix can be shared in both:

    position     0 ……………… | first visible ………… num_computed
    sliding      trash trash | block  block  block
    full         block block | block  block  block

A prefix of n pages matches when full groups know all n pages, and sliding groups know those that the next token can see.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from .layout import TRASH, CacheLayout
from .plan import BlockCopy
from .pool import SectorPool
from .request import Request


class BlockManager:
    """Seats requests in the cache. `num_host_sectors` sectors of host memory hold parked requests (0: none)."""

    def __init__(self, layout: CacheLayout, *, allow_sharing: bool = True, num_host_sectors: int = 0) -> None:
        self._layout = layout
        self._page = layout.page_size
        self._groups = layout.groups
        self._sharing = allow_sharing
        shape = [layout.blocks_per_sector(g) for g in range(len(layout.groups))]
        self._memory = SectorPool(layout.num_sectors, shape)
        self._pools = self._memory.pools
        self._host = SectorPool(num_host_sectors, shape) if num_host_sectors else None
        self._full = [pool for pool, group in zip(self._pools, layout.groups, strict=True) if group.window is None]
        self._all_full = len(self._full) == len(self._pools)
        self._total = sum(layout.num_sectors * count for count in shape) // len(shape)

    # ---- asking -----------------------------------------------------------------------------------------------------------

    @property
    def sharing(self) -> bool:
        return self._sharing

    @property
    def slides(self) -> bool:
        """Whether any group gives blocks back as its window moves on."""
        return not self._all_full

    def free_fraction(self) -> float:
        return self._memory.free_fraction()

    def counts(self) -> tuple[int, int, int]:
        """(all, held, cached) blocks of the first group's kind, counted over all groups."""
        held = cached = 0
        for pool in self._pools:
            held, cached = held + pool.num_held, cached + pool.num_cached
        return self._total, held, cached

    def lookup(self, request: Request) -> int:
        """Leading tokens of the request that are in the cache: whole pages, and never all of its tokens."""
        if not self._sharing or request.sampling.prompt_logprobs is not None:
            return 0
        pages = (request.num_known - 1) // self._page
        for pool in self._full:
            pages = pool.match(request.page_names(0, pages, self._page))
        return self._page * (pages if self._all_full else self._visible_match(request, pages))

    def _visible_match(self, request: Request, pages: int) -> int:
        """The most pages, up to `pages`, of which every sliding group knows those that the next token sees."""
        known_before: list[tuple[int, list[int]]] = []  # per sliding group: its index, known pages in a row before page n
        for g, group in enumerate(self._groups):
            if group.window is None:
                continue
            runs = [0]
            for name in request.page_names(0, pages, self._page):
                runs.append(runs[-1] + 1 if self._pools[g].find(name) is not None else 0)
            known_before.append((g, runs))
        while pages and any(
            runs[pages] < pages - self._groups[g].first_visible(pages * self._page) // self._page for g, runs in known_before
        ):
            pages -= 1
        return pages

    # ---- seating ----------------------------------------------------------------------------------------------------------

    def admit(self, request: Request, matched: int, upto: int, margin: float) -> bool:
        """Give a waiting request its matched pages and room for positions up to `upto`, leaving `margin` of the memory free.

        Admission looks ahead: the whole of its known tokens must fit, though only `upto` are seated now, so that a prompt that is
        computed in chunks does not start what it cannot end.
        """
        pages = matched // self._page
        ahead: list[int] = []
        taken = 0.0
        for g, group in enumerate(self._groups):
            pool = self._pools[g]
            first = group.first_visible(matched) // self._page
            cached = pool.count_cached(request.page_names(first, pages, self._page))
            need = group.blocks_needed(request.num_known, max(upto - matched, 1), self._page) - (pages - first - cached)
            ahead.append(max(need, cached))
            taken += ahead[-1] / pool.blocks_per_sector
        if not self._memory.can_take(ahead) or self.free_fraction() - taken / self._layout.num_sectors < margin:
            return False
        self._hold_prefix(request, pages)
        request.num_computed = matched
        request.seated = True
        if not self.grow(request, upto):
            self.vacate(request)
            return False
        return True

    def _hold_prefix(self, request: Request, pages: int) -> None:
        for g, group in enumerate(self._groups):
            table = request.block_tables[g]
            first = group.first_visible(pages * self._page) // self._page
            table.extend([TRASH] * min(first, pages))
            table.extend(self._pools[g].share(request.page_names(first, pages, self._page)))
            request.first_block[g] = min(first, pages)
        request.named_pages = pages

    def grow(self, request: Request, upto: int) -> bool:
        """Make the tables cover positions up to `upto` (exclusive), giving back first what slid out of sight."""
        if not self._all_full:
            self._slide(request)
        pages = -(-upto // self._page)
        needs = [max(0, pages - len(table)) for table in request.block_tables]
        if not any(needs):
            return True
        if not self._memory.can_take(needs):
            return False
        for table, blocks in zip(request.block_tables, self._memory.take(needs), strict=True):
            table.extend(blocks)
        return True

    def _slide(self, request: Request) -> None:
        for g, group in enumerate(self._groups):
            if group.window is None:
                continue
            table = request.block_tables[g]
            keep = min(group.first_visible(request.num_computed) // self._page, len(table))
            gone = range(request.first_block[g], keep)
            if gone:
                self._pools[g].release(table[page] for page in gone)
                for page in gone:
                    table[page] = TRASH
                request.first_block[g] = keep

    def name_full(self, request: Request) -> None:
        """Publish the pages that are computed, or planned to be, and whose tokens are all known."""
        full = min(request.num_computed, request.num_known) // self._page
        if not self._sharing or full <= request.named_pages:
            return
        for pool, table, first in zip(self._pools, request.block_tables, request.first_block, strict=True):
            start = max(first, request.named_pages)
            pool.name(table[start:full], request.page_names(start, full, self._page))
        request.named_pages = full

    def vacate(self, request: Request, *, forget: bool = False) -> None:
        """Take the seat away: every block is released, named ones stay findable unless `forget`. The last pages go first."""
        for g, table in enumerate(request.block_tables):
            held = table[request.first_block[g] :]
            if forget:
                self._pools[g].forget(block for block in held if self._pools[g].refs(block) == 1)
            self._pools[g].release(reversed(held))
            del table[:]
            request.first_block[g] = 0
        request.named_pages = 0
        request.num_computed = 0
        request.seated = False

    # ---- forks --------------------------------------------------------------------------------------------------------------

    def fork(self, parent: Request, child: Request, margin: float) -> list[BlockCopy] | None:
        """Seat `child`, which has the same prompt, on the pages of `parent`, whose prompt is computed.

        Full pages are shared; the page of the last prompt token is copied, and the child computes that token itself, so that it
        samples a first token of its own. None when there is no room, or nothing to share.
        """
        start = child.num_prompt - 1  # recomputed by the child
        if not self._sharing or start == 0 or parent.num_computed < child.num_prompt or not parent.seated:
            return None
        last = start // self._page  # page of position `start`
        for g, group in enumerate(self._groups):
            if parent.first_block[g] > group.first_visible(start) // self._page:
                return None  # the parent has moved on and given back what the child would see
        needs = [1] * len(self._groups)
        if not self._memory.can_take(needs) or self.free_fraction() < margin:
            return None
        copies: list[BlockCopy] = []
        for g, blocks in enumerate(self._memory.take(needs)):
            first = parent.first_block[g]
            source, table = parent.block_tables[g], child.block_tables[g]
            for block in source[first:last]:
                self._pools[g].hold_again(block)
            table.extend(source[:last])
            table.append(blocks[0])
            if start % self._page:
                copies.append(BlockCopy(g, source[last], blocks[0]))
            child.first_block[g] = first
        child.num_computed = start
        child.named_pages = last
        child.seated = True
        return copies

    # ---- host memory --------------------------------------------------------------------------------------------------------

    def park(self, request: Request) -> list[BlockCopy] | None:
        """Move a seated request's pages to host memory and take its seat; None when there is no host memory for all of them."""
        if self._host is None or not request.num_computed:
            return None
        pages = -(-request.num_computed // self._page)
        firsts = [min(first, pages) for first in request.first_block]
        needs = [pages - first for first in firsts]
        if not self._host.can_take(needs):
            return None
        copies: list[BlockCopy] = []
        parked: list[tuple[int, array[int]]] = []
        for g, blocks in enumerate(self._host.take(needs)):
            copies.extend(map(BlockCopy, [g] * len(blocks), request.block_tables[g][firsts[g] : pages], blocks))
            parked.append((firsts[g], array("i", blocks)))
        computed = request.num_computed
        self.vacate(request)
        request.num_computed, request.parked = computed, tuple(parked)
        return copies

    def unpark(self, request: Request, upto: int, margin: float) -> list[BlockCopy] | None:
        """Give a parked request its seat back with room for positions up to `upto`; None when it does not fit now."""
        assert request.parked is not None and self._host is not None
        pages = -(-upto // self._page)
        needs = [pages - first for first, _ in request.parked]
        taken = sum(need / pool.blocks_per_sector for need, pool in zip(needs, self._pools, strict=True))
        if not self._memory.can_take(needs) or self.free_fraction() - taken / self._layout.num_sectors < margin:
            return None
        copies: list[BlockCopy] = []
        for g, blocks in enumerate(self._memory.take(needs)):
            first, parked = request.parked[g]
            request.block_tables[g].extend([TRASH] * first)
            request.block_tables[g].extend(blocks)
            request.first_block[g] = first
            copies.extend(map(BlockCopy, [g] * len(parked), parked, blocks[: len(parked)]))
        self.drop_parked(request)
        request.seated = True
        return copies

    def drop_parked(self, request: Request) -> None:
        """Give back the host blocks of a parked request."""
        if request.parked is not None and self._host is not None:
            for pool, (_, blocks) in zip(self._host.pools, request.parked, strict=True):
                pool.release(blocks)
            request.parked = None

    # ---- names --------------------------------------------------------------------------------------------------------------

    def forget_all(self) -> None:
        """No page is found again."""
        for pool in self._pools:
            pool.forget_all()

    def track_names(self) -> None:
        """Start recording which pages become findable and which stop being so (`take_names`)."""
        self._pools[0].tracks_names = True

    def take_names(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """(added, forgotten) page names since the last call, as (weights version, digest), of the first group.

        Only what is so now: a page that came and went in between is in neither list, whichever came last.
        """
        return self._pools[0].take_names()  # type: ignore[return-value]

    def check(self, requests: Sequence[Request]) -> None:
        """Laws L1 and L4: block states add up, and every reference belongs to a request. Raises AssertionError."""
        self._memory.check()
        if self._host is not None:
            self._host.check()
        for g, pool in enumerate(self._pools):
            expected: dict[int, int] = {}
            for request in requests:
                for block in request.block_tables[g][request.first_block[g] :]:
                    expected[block] = expected.get(block, 0) + 1
            assert all(pool.refs(block) == refs for block, refs in expected.items()), "a block's references do not add up"
            assert pool.num_held == len(expected), "a block is held by nobody"
            for request in requests:
                writable = request.block_tables[g][request.num_computed // self._page :]
                assert all(pool.refs(block) == 1 for block in writable), "a page still to be written is shared"
