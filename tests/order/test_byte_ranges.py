"""Byte ranges against the bytes that NumPy finds by marking them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcupy.arrays import view
from kvcupy.order.history import ByteRanges, byte_ranges, locate

MEMORY = np.zeros(4096, np.uint8)
BASE = MEMORY.__array_interface__["data"][0]


@st.composite
def strided(draw):
    """An array of any strides within `MEMORY`: reversed, broadcast, overlapping itself."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    strides = tuple(draw(st.integers(-40, 40)) for _ in shape)
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.uint64]))
    middle = MEMORY[2048:].view(np.uint8)
    return np.lib.stride_tricks.as_strided(middle[:8].view(dtype), shape, strides)


def marked(array, index=...):
    """The bytes of part of an array, as offsets into `MEMORY`."""
    pointer, offsets = array.__array_interface__["data"][0] - BASE, set()
    where = np.full(array.shape, pointer, np.int64)
    for axis, (n, step) in enumerate(zip(array.shape, array.strides, strict=True)):
        where += (np.arange(n) * step).reshape([-1 if i == axis else 1 for i in range(array.ndim)])
    for start in where[index].ravel():
        offsets |= set(range(start, start + array.itemsize))
    return offsets


def listed(ranges: ByteRanges):
    starts, ends = ranges.starts - BASE, ranges.ends - BASE
    assert (ranges.starts < ranges.ends).all()
    assert (ranges.ends[:-1] < ranges.starts[1:]).all(), "neither sorted nor merged"
    return {i for a, b in zip(starts, ends, strict=True) for i in range(a, b)}


@settings(max_examples=examples(300))
@given(strided(), strided())
def test_views_and_what_they_share(a, b):
    first, second = byte_ranges(view(a)), byte_ranges(view(b))
    assert listed(first) == marked(a)
    assert listed(first & second) == marked(a) & marked(b)
    assert (first & second).num_bytes == len(marked(a) & marked(b))


@settings(max_examples=examples(200))
@given(strided(), st.lists(st.integers(-3, 40), max_size=8), st.integers(1, 3))
def test_slots(a, slots, axis):
    paged = a.ndim > axis and a.shape[axis] > 0
    page_size = a.shape[axis] if paged else 1
    numbers = np.array(slots, np.int64)
    existing = np.array([s for s in slots if 0 <= s < a.shape[0] * page_size], np.int64)
    if paged:
        index = [slice(None)] * a.ndim
        expected = set()
        for slot in existing:
            index[0], index[axis] = slot // page_size, slot % page_size
            expected |= marked(a, tuple(index))
    else:
        expected = marked(a, existing)
    assert listed(byte_ranges(view(a), numbers, page_size, axis if paged else 0)) == expected


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (np.s_[3], "page 3"),
        (np.s_[2:4, 1], "page 2-3, head 1"),
        (np.s_[[0, 2, 3, 5], :, 2], "page 0, 2-3, 5, index 2 on axis 2"),
        (np.s_[:, 0], "head 0"),
        (np.s_[...], ""),
        (np.s_[1, 0, 1:3], "page 1, head 0, index 1-2 on axis 2"),
    ],
)
def test_where_bytes_lie(part, said):
    pool = np.zeros((6, 2, 3, 4), np.float16)
    rest = pool[part]
    if isinstance(part, tuple) and isinstance(part[0], list):  # fancy indexing would copy
        ranges = byte_ranges(view(pool[:, :, 2]), np.array(part[0]))
    else:
        ranges = byte_ranges(view(rest))
    assert locate(view(pool), ranges, ("page", "head")) == said


def test_a_negative_stride_counts_from_the_other_end():
    pool = np.zeros((6, 4), np.float16)
    ranges = byte_ranges(view(pool[1]))
    assert locate(view(pool[::-1]), ranges, ("page",)) == "page 4"
