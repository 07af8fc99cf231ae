"""Copies between strided arrays, as few calls of the copy engine, or as one kernel.

The axes that both arrays walk without a gap are joined first. What is left is a number of
rectangles: `height` rows of `width` contiguous bytes, a pitch apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_MAX_PITCH_BYTES = 2**31 - 1  # of one two-dimensional copy
_MAX_RECTANGLES = 16  # beyond that, or with rows shorter than this, a kernel moves them faster
_MIN_WIDTH_BYTES = 64


@dataclass(frozen=True)
class Rectangle:
    """One copy: offsets and pitches in bytes."""

    dst: int
    src: int
    dst_pitch: int
    src_pitch: int
    width: int
    height: int


@dataclass(frozen=True)
class CopyPlan:
    """How to copy one strided array to another of the same shape.

    Parameters
    ----------
    outer : axes that are walked one by one: (length, dst stride, src stride)
    row_axis : the axis of the rows of a rectangle; length 1 where there is none
    width : contiguous bytes a row
    """

    outer: tuple[tuple[int, int, int], ...]
    row_axis: tuple[int, int, int]
    width: int

    @property
    def count(self) -> int:
        """How many rectangles there are."""
        total = 1
        for length, _, _ in self.outer:
            total *= length
        return total

    @property
    def suits_engine(self) -> bool:
        """Whether the copy engine is the better choice where a kernel could do it too."""
        rows_are_long = self.width >= _MIN_WIDTH_BYTES or self.row_axis[0] == 1
        return self.count <= _MAX_RECTANGLES and rows_are_long

    def rectangles(self) -> Iterator[Rectangle]:
        """Yield every rectangle."""
        height, dst_pitch, src_pitch = self.row_axis
        for index in itertools.product(*(range(n) for n, _, _ in self.outer)):
            dst = sum(i * d for i, (_, d, _) in zip(index, self.outer, strict=True))
            src = sum(i * s for i, (_, _, s) in zip(index, self.outer, strict=True))
            yield Rectangle(dst, src, dst_pitch, src_pitch, self.width, height)


def plan(
    shape: tuple[int, ...],
    dst_strides: tuple[int, ...],
    src_strides: tuple[int, ...],
    itemsize: int,
) -> CopyPlan:
    """Return the plan for a copy of at least one element. Strides are in bytes.

    >>> plan((4, 8), (16, 2), (64, 2), 2)
    CopyPlan(outer=(), row_axis=(4, 16, 64), width=16)
    """
    axes = _join(shape, dst_strides, src_strides)
    width = itemsize
    if axes and axes[-1][1:] == (width, width):
        width *= axes.pop()[0]
    row_axis = (1, width, width)
    if axes and all(width <= pitch <= _MAX_PITCH_BYTES for pitch in axes[-1][1:]):
        row_axis = axes.pop()
    return CopyPlan(tuple(axes), row_axis, width)


def _join(
    shape: tuple[int, ...], dst_strides: tuple[int, ...], src_strides: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """Sort the axes, widest stride of `dst` first, and join neighbours without a gap."""
    axes = [a for a in zip(shape, dst_strides, src_strides, strict=True) if a[0] != 1]
    axes.sort(key=lambda axis: (-abs(axis[1]), -abs(axis[2])))
    joined: list[tuple[int, int, int]] = []
    for length, dst, src in axes:
        if joined and joined[-1][1:] == (dst * length, src * length):
            length *= joined.pop()[0]
        joined.append((length, dst, src))
    return joined


def enqueue(runtime: Any, copy: CopyPlan, dst: int, src: int, kind: int, stream: int) -> None:
    """Give a plan to the copy engine, on a stream. The arguments are addresses and handles."""
    for r in copy.rectangles():
        if r.height == 1:
            runtime.memcpyAsync(dst + r.dst, src + r.src, r.width, kind, stream)
        else:
            runtime.memcpy2DAsync(
                dst + r.dst, r.dst_pitch, src + r.src, r.src_pitch, r.width, r.height, kind, stream
            )


def words(
    copy: CopyPlan, dst: int, src: int
) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the same copy in the widest words that fit it: word bytes, shape, both strides.

    >>> words(plan((4, 8), (16, 2), (64, 2), 2), 0, 0)
    (8, (4, 2), (16, 8), (64, 8))
    """
    axes = [*copy.outer, copy.row_axis]
    numbers = [dst, src, copy.width, *(n for _, d, s in axes for n in (d, s))]
    word = next(w for w in (8, 4, 2, 1) if all(n % w == 0 for n in numbers))
    axes.append((copy.width // word, word, word))
    lengths, dst_strides, src_strides = zip(*axes, strict=True)
    return word, lengths, dst_strides, src_strides
