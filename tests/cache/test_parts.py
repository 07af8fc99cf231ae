"""Containers of a million ints that stall no call."""

from __future__ import annotations

import gc

import pytest

from kvcupy.cache.tiered.parts import MASK, PartedDict


def test_it_is_a_dict():
    known = PartedDict()
    expected = {}
    for key in [*range(1000), *(2**127 + number * 3 for number in range(1000))]:
        known[key] = expected[key] = key % 7
    del known[5], expected[5]
    assert known.pop(6) == expected.pop(6)
    assert dict(known) == expected
    assert len(known) == len(expected)
    assert 7 in known and 5 not in known
    assert known.get(5) is None
    assert sorted(known.values()) == sorted(expected.values())
    with pytest.raises(KeyError):
        known[5]


def test_hashes_are_spread_over_parts_that_collections_skip():
    known = PartedDict()
    for key in range(100 * (MASK + 1)):
        known[key] = key
    assert {len(part) for part in known.parts} == {100}
    assert not any(map(gc.is_tracked, known.parts))
