"""The prefix index beside a slow twin: a set of pages per replica."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cb_ray.routing.prefix_index import BYTES_PER_ENTRY, PrefixIndex

CHAINS = [[bytes([chain, page]) * 8 for page in range(6)] for chain in range(3)]
PAGES = [page for chain in CHAINS for page in chain]
replicas = st.sampled_from([f"r{n}" for n in range(5)])
pages = st.lists(st.sampled_from(PAGES), max_size=8)
moves = st.one_of(
    st.tuples(st.just("add"), replicas, pages),
    st.tuples(st.just("discard"), replicas, pages),
    st.tuples(st.just("forget"), replicas, st.just([])),
)


def depth(held: set[bytes], chain: list[bytes]) -> int:
    """Leading pages of `chain` that are all held."""
    return next((n for n, page in enumerate(chain) if page not in held), len(chain))


@settings(max_examples=300, deadline=None)
@given(story=st.lists(moves, max_size=40), compact=st.booleans())
def test_the_index_knows_what_sets_would_know(story, compact):
    """Adding, evicting, dying and coming back under new weights: the index never invents and never loses a page."""
    index, twin = PrefixIndex(), dict[str, set[bytes]]()
    for verb, replica, digests in story:
        if verb == "add":
            index.add(replica, digests)
            twin.setdefault(replica, set()).update(digests)
        elif verb == "discard":
            index.discard(replica, digests)
            twin.get(replica, set()).difference_update(digests)
        else:
            index.forget(replica)
            twin.pop(replica, None)
        if compact:
            index._compact()
        for chain in CHAINS:
            wanted = {name: depth(held, chain) for name, held in twin.items()}
            assert index.depths(chain) == {name: pages for name, pages in wanted.items() if pages}


def test_it_stays_within_its_bytes_and_drops_what_was_used_longest_ago():
    """A router that runs for months must not grow, and a hot prefix must not fall out for a cold one."""
    index = PrefixIndex(max_bytes=8 * BYTES_PER_ENTRY)
    hot, cold = CHAINS[0][:4], CHAINS[1][:4]
    index.add("a", hot)
    index.add("b", cold)
    index.add("a", hot)
    index.add("b", CHAINS[2][:4])
    assert len(index) == 8
    assert index.depths(hot) == {"a": 4} and index.depths(cold) == {}
    index.resize(4 * BYTES_PER_ENTRY)
    assert len(index) == 4


def test_thousands_of_replicas_may_come_and_go():
    """Bits are given out again, so entries of an old pool stay small and true."""
    index = PrefixIndex()
    index.add("stays", CHAINS[0])
    for n in range(3000):
        index.add(f"r{n}", CHAINS[0][:2])
        index.forget(f"r{n}")
    assert index.depths(CHAINS[0]) == {"stays": 6}
    assert index._next < 1000


def test_who_gives_up_what_is_wanted_is_known_by_it():
    """Evicting the last copy of a page that is asked for again counts; other evictions, and pages of the long past, do not."""
    index = PrefixIndex()
    fresh = (n.to_bytes(16, "big") for n in range(10**6))
    for _ in range(200):
        wanted, copied = next(fresh), next(fresh)
        for replica in ("full", "roomy"):
            junk = next(fresh)
            index.add(replica, [junk])
            index.discard(replica, [junk])
        index.add("full", [wanted])
        index.discard("full", [wanted])
        index.add("other", [wanted, copied])  # it is asked for again, and computed elsewhere
        index.add("full", [copied])
        index.discard("full", [copied])
        index.add("full", [copied])
    assert index.regret("roomy") == index.regret("other") == index.regret("never seen") == 0.0
    assert 0.4 < index.regret("full") < 0.5
    assert len(index._gone) <= len(index)
    index.forget("full")
    assert index.regret("full") == 0.0
