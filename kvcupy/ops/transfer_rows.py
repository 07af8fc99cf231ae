"""How the pages of two pools fall apart into rows that both keep contiguous.

The Params of `kernels_src/transfer_rows.cuh`, and the plain description that every method of
transfer works from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from ..arrays import ArrayView
from . import geometry

DIVISOR = np.dtype(
    [("divisor", np.uint32), ("multiplier", np.uint32), ("shift", np.int32)], align=True
)

STRIDES = np.dtype(
    [(f"{name}_bytes{axis}", np.int64) for name, axis in
     (("page", ""), ("axis", "_0"), ("axis", "_1"), ("axis", "_2"))],
    align=True,
)  # fmt: skip

ROWS = np.dtype(
    [
        ("src_stride_bytes", np.int64),
        ("dst_stride_bytes", np.int64),
        ("src_num_pages", np.int64),
        ("dst_num_pages", np.int64),
        ("src_operation", np.int64),
        ("dst_operation", np.int64),
        ("pieces_a_page", DIVISOR),
        ("pieces_a_row", DIVISOR),
        ("rows_a_step", DIVISOR),
        ("rows_2", DIVISOR),
        ("num_pieces", np.uint32),
        ("src_index_bytes", np.int32),
        ("dst_index_bytes", np.int32),
        ("lane_shift", np.int32),
    ],
    align=True,
)


def divisor(n: int) -> tuple[int, int, int]:
    """Return the Divisor of `n`, for numbers below 2**31.

    >>> number, multiplier, shift = divisor(7)
    >>> [((i * multiplier >> 32) + i) >> shift for i in (6, 7, 700, 2**31 - 1)]
    [0, 1, 100, 306783378]
    """
    shift = (n - 1).bit_length()
    return n, (2**32 * (2**shift - n)) // n + 1, shift


@dataclass(frozen=True)
class Axis:
    """An axis of rows: how many, and the bytes between them in each array, sources first."""

    count: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Rows of one or two parts (K and V) that go from arrays to arrays.

    Parameters
    ----------
    row_bytes : contiguous bytes of a row, one a part
    axes : of the rows of a page, at most three, the outermost first
    page_bytes : strides between pages, one an array: the source of each part, then the target of
        each part, as in `Axis.strides`
    addresses : of each array, in the same order
    """

    row_bytes: tuple[int, ...]
    axes: tuple[Axis, ...]
    page_bytes: tuple[int, ...]
    addresses: tuple[int, ...]

    @cached_property
    def rows_a_page(self) -> int:
        return prod(axis.count for axis in self.axes)

    @property
    def shape(self) -> tuple[object, ...]:
        """What does not depend on where the arrays are: alike for all layers of two pools."""
        return self.row_bytes, self.axes, self.page_bytes

    @cached_property
    def pages_join(self) -> bool:
        """Whether the rows of neighbouring pages follow one another on both sides."""
        return self.page_bytes == (*self.row_bytes, *self.row_bytes)

    @property
    def word_bytes(self) -> int:
        """The widest word (16, 8, 4, 2 or 1 bytes) in which all rows can be moved."""
        return geometry.widest((*self.row_bytes, self.word_of(range(len(self.addresses)))))

    def word_of(self, arrays: Iterable[int]) -> int:
        """Return the widest word at which all rows of some arrays begin."""
        numbers = []
        for i in arrays:
            own = [axis.strides[i] for axis in self.axes if axis.count > 1]
            numbers += [self.addresses[i], self.page_bytes[i], *own]
        return geometry.widest(abs(n) for n in numbers)

    def strides(self, array: int) -> tuple[int, int, int, int]:
        """Return the strides of one array as the kernels take them."""
        steps = [0] * (3 - len(self.axes)) + [axis.strides[array] for axis in self.axes]
        return self.page_bytes[array], steps[0], steps[1], steps[2]


def joined(
    sources: Sequence[ArrayView], targets: Sequence[ArrayView], addresses: Sequence[int]
) -> Rows:
    """Return the rows of parts (pages, layers, page_size, heads, width), as long as they get.

    Parameters
    ----------
    sources, targets : K and V, or one part, of either pool, of equal shapes but for the pages
    addresses : of the sources, then of the targets, in the memory that the rows are moved in
    """
    arrays = (*sources, *targets)
    row_bytes = tuple(v.shape[-1] * v.itemsize for v in sources)
    axes = [
        Axis(sources[0].shape[i], tuple(v.strides[i] for v in arrays))
        for i in (1, 2, 3)
        if sources[0].shape[i] != 1
    ]
    grown = True
    while grown:
        grown = False
        for axis in axes:
            if axis.strides == (*row_bytes, *row_bytes):
                row_bytes = tuple(n * axis.count for n in row_bytes)
                axes.remove(axis)
                grown = True
                break
    return Rows(
        row_bytes,
        tuple(_merged(sorted(axes, key=lambda axis: [-abs(s) for s in reversed(axis.strides)]))),
        tuple(v.strides[0] for v in arrays),
        tuple(addresses),
    )


def separate(
    sources: Sequence[ArrayView], targets: Sequence[ArrayView], addresses: Sequence[int]
) -> Rows:
    """Return the rows of parts with every (layer, offset, head) on its own."""
    arrays = (*sources, *targets)
    axes = tuple(Axis(sources[0].shape[i], tuple(v.strides[i] for v in arrays)) for i in (1, 2, 3))
    row_bytes = tuple(v.shape[-1] * v.itemsize for v in sources)
    return Rows(row_bytes, axes, tuple(v.strides[0] for v in arrays), tuple(addresses))


def _merged(axes: list[Axis]) -> list[Axis]:
    """Join neighbours that every array walks without a gap."""
    merged: list[Axis] = []
    for axis in axes:
        last = merged[-1] if merged else None
        if last and last.strides == tuple(axis.count * s for s in axis.strides):
            merged[-1] = Axis(last.count * axis.count, axis.strides)
        else:
            merged.append(axis)
    return merged


def fill(params: Any, rows: Rows, pieces_a_row: int, lane_shift: int) -> None:
    """Fill the part of a TransferRows that does not depend on the pages."""
    counts = [1] * (3 - len(rows.axes)) + [axis.count for axis in rows.axes]
    params["pieces_a_row"] = divisor(pieces_a_row)
    params["pieces_a_page"] = divisor(rows.rows_a_page * pieces_a_row)
    params["rows_a_step"] = divisor(counts[1] * counts[2])
    params["rows_2"] = divisor(counts[2])
    params["lane_shift"] = lane_shift
