"""What an engine tells a router of its prefix cache: at every moment exactly what a lookup would find."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cb_ray.engine.mailbox import PageNames

digests = st.sampled_from([bytes([n]) for n in range(6)])
steps = st.lists(st.tuples(st.integers(0, 1), st.sets(digests), st.sets(digests), st.booleans(), st.booleans()), max_size=30)


@given(steps)
def test_the_reader_always_ends_up_with_what_the_cache_holds(story):
    """Deltas and full answers, in any mixture and over new weights, add up to the cache under the present weights."""
    names, held, reader, version, seen = PageNames(), set(), set(), 0, 0
    for newer, added, forgotten, full, reads in story:
        if newer:
            version += 1
            held = set()
        added, forgotten = added - held - forgotten, forgotten & held
        held = (held - forgotten) | added
        names.put(version, [(version, d) for d in added], [(version, d) for d in forgotten] + [(version - 1, b"old")])
        if reads:
            gained, lost = names.take(full)
            reader = (set() if full or seen != version else reader) - set(lost) | set(gained)
            seen = version
            assert reader == held
    names.clear()
    gained, lost = names.take()
    assert ((set() if seen != version else reader) - set(lost)) | set(gained) == set()
