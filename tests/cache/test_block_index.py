"""The index of a tier: a mapping of a million blocks that stalls no call."""

from __future__ import annotations

import gc

import pytest

from kvcupy.cache.tiered.index import BlockIndex

HASHES = [*range(1000), *(2**127 + number * 3 for number in range(1000))]


def test_it_is_a_mapping():
    index, expected = BlockIndex(), {hash: hash % 7 for hash in HASHES}
    index.add(expected)
    index.remove([5, HASHES[-1]])
    del expected[5], expected[HASHES[-1]]
    assert dict(index) == expected
    assert len(index) == len(expected)
    assert 7 in index and 5 not in index
    assert index.get(5) is None and index.get(5, 3) == 3 and index.get(8) == index[8] == 1
    assert sorted(index.values()) == sorted(expected.values())
    for change in (lambda: index[5], lambda: index.remove([5])):
        with pytest.raises(KeyError):
            change()


def test_methods_with_many_hashes_agree_with_those_with_one():
    index, other = BlockIndex(), BlockIndex()
    index.add({hash: hash % 7 for hash in HASHES[:100]})
    other.add({hash: 1 for hash in HASHES[100:103]})
    asked = HASHES[98:105]
    assert index.find(asked) == [index.get(hash) for hash in asked]
    assert index.known_pages(asked) == [index[hash] for hash in asked[:2]]
    assert index.count_leading(asked) == index.count_leading(asked, index) == 2
    assert index.count_leading(asked, other) == 5
    assert index.count_leading([]) == index.count_leading(asked[3:], other) - 2 == 0


def test_blocks_are_spread_over_parts_that_collections_skip():
    index = BlockIndex()
    num_parts = len(index._parts)
    index.add({hash: hash for hash in range(100 * num_parts)})
    assert {len(part) for part in index._parts} == {100}
    assert not any(map(gc.is_tracked, index._parts))
