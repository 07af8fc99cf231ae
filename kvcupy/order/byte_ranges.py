"""Which bytes a strided view, or some slots of a cache, occupy; and which of them two share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import ArrayView

_Numbers = np.ndarray[Any, np.dtype[np.int64]]
_MAX_LISTED = 6  # indices that a description spells out


@dataclass(frozen=True)
class ByteRanges:
    """Ranges of addresses, ascending and disjoint: int64 (ranges,), the ends exclusive."""

    starts: _Numbers
    ends: _Numbers

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_bytes(self) -> int:
        return int((self.ends - self.starts).sum())

    def __and__(self, other: ByteRanges) -> ByteRanges:
        """Return the bytes that are in both."""
        first = np.searchsorted(other.ends, self.starts, side="right")
        stop = np.searchsorted(other.starts, self.ends, side="left")
        counts = np.maximum(stop - first, 0)
        mine = np.repeat(np.arange(len(self)), counts)
        within = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts)
        theirs = np.repeat(first, counts) + within
        return ByteRanges(
            np.maximum(self.starts[mine], other.starts[theirs]),
            np.minimum(self.ends[mine], other.ends[theirs]),
        )


def byte_ranges(
    view: ArrayView, slots: np.ndarray[Any, Any] | None = None, page_size: int = 1,
    offset_axis: int = 0,
) -> ByteRanges:  # fmt: skip
    """Return the bytes of a view, or of some of its slots.

    Parameters
    ----------
    slots : integers of any shape: indices on the first axis; with a `page_size` above 1,
        `page * page_size + offset`, where pages are the first axis and offsets the `offset_axis`.
        Those that do not exist are left out

    Examples
    --------
    >>> from kvcupy.arrays import view
    >>> cache = view(np.zeros((4, 2, 3), np.int8))  # two slots in each of four pages
    >>> (byte_ranges(cache, np.array([5, 6, 0, -1]), 2, 1).starts - cache.pointer).tolist()
    [0, 15]
    """
    if 0 in view.shape:
        return _NOTHING
    if view.scales is not None:
        parts = [byte_ranges(part, slots, page_size, offset_axis) for part in view.memory]
        return parts[0] if len(parts) == 1 else _joined(*parts)
    starts = np.full(1, view.pointer, np.int64)
    inner = list(zip(view.shape, view.strides, strict=True))
    if slots is not None:
        numbers = np.unique(np.asarray(slots).astype(np.int64))
        numbers = numbers[(numbers >= 0) & (numbers < view.shape[0] * page_size)]
        starts = starts + (numbers // page_size) * view.strides[0]
        if page_size > 1:
            starts = starts + (numbers % page_size) * view.strides[offset_axis]
        indexed = (0, offset_axis) if page_size > 1 else (0,)
        inner = [axis for i, axis in enumerate(inner) if i not in indexed]
    starts = starts + sum((n - 1) * step for n, step in inner if step < 0)
    axes = sorted((abs(step), n) for n, step in inner if n > 1 and step != 0)
    length = view.itemsize
    while axes and axes[0][0] <= length:  # neighbours on this axis touch
        step, n = axes.pop(0)
        length += (n - 1) * step
    for step, n in axes:
        starts = (starts[:, None] + np.arange(n, dtype=np.int64) * step).ravel()
    starts = np.sort(starts)
    ends = starts + length
    apart = starts[1:] > ends[:-1]
    first = np.concatenate([starts[:1], starts[1:][apart]])
    return ByteRanges(first, np.concatenate([ends[:-1][apart], ends[-1:]]))


def _joined(a: ByteRanges, b: ByteRanges) -> ByteRanges:
    """Return the bytes that are in one of two."""
    order = np.argsort(np.concatenate([a.starts, b.starts]), kind="stable")
    starts = np.concatenate([a.starts, b.starts])[order]
    reach = np.maximum.accumulate(np.concatenate([a.ends, b.ends])[order])
    first = np.flatnonzero(np.concatenate([[True], starts[1:] > reach[:-1]]))
    return ByteRanges(starts[first], reach[np.append(first[1:], len(starts)) - 1])


def locate(view: ArrayView, ranges: ByteRanges, axes: Sequence[str] = ()) -> str:
    """Say where in a view some of its bytes lie: `page 3, head 2-4`; "" if everywhere.

    Parameters
    ----------
    axes : what is counted on the leading axes; without a name it is `index 3 on axis 0`

    Examples
    --------
    >>> from kvcupy.arrays import view
    >>> cache = view(np.zeros((4, 2, 3), np.int8))
    >>> locate(cache, byte_ranges(cache[1:3]), ("page",))
    'page 1-2'
    """
    if not len(ranges):
        return ""
    if view.scales is not None:
        holding = [part for part in view.memory if len(byte_ranges(part) & ranges)]
        return locate(holding[0], byte_ranges(holding[0]) & ranges, axes) if holding else ""
    parts = []
    for axis, indices in _indices(view, ranges):
        if 1 < view.shape[axis] > len(indices):
            name = axes[axis] if axis < len(axes) else ""
            listed = _listed(indices)
            parts.append(f"{name} {listed}" if name else f"index {listed} on axis {axis}")
        if len(axes) <= axis and len(parts):
            break
    return ", ".join(parts)


def _indices(view: ArrayView, ranges: ByteRanges) -> Iterator[tuple[int, _Numbers]]:
    """Yield each axis, and the indices on it at which the ranges begin, end or pass."""
    steps = np.array([abs(s) for s in view.strides], np.int64)
    low = view.byte_range()[0]
    first, last = ranges.starts - low, ranges.ends - 1 - low
    on_axes: dict[int, _Numbers] = {}
    whole = np.zeros(len(ranges), bool)  # ranges that cross from one index to the next further out
    for axis in sorted(range(view.ndim), key=lambda i: (-steps[i], i)):
        if view.shape[axis] == 1 or steps[axis] == 0:
            on_axes[axis] = np.zeros(1, np.int64)
            continue
        limit = view.shape[axis] - 1
        begin = np.minimum(first // steps[axis], limit)
        end = np.minimum(last // steps[axis], limit)
        first, last = first - begin * steps[axis], last - end * steps[axis]
        if whole.any():
            on_axes[axis] = np.arange(limit + 1)
        else:
            spans = [np.arange(b, e + 1) for b, e in np.unique(np.stack([begin, end], 1), axis=0)]
            on_axes[axis] = np.unique(np.concatenate(spans))
            if view.strides[axis] < 0:
                on_axes[axis] = limit - on_axes[axis][::-1]
        whole |= begin != end
    for axis in range(view.ndim):
        yield axis, on_axes[axis]


def _listed(indices: _Numbers) -> str:
    """Return indices as text, neighbours as a span: `1, 4-7`."""
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    spans = np.split(indices, breaks)
    texts = [str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans[:_MAX_LISTED]]
    return ", ".join(texts) + (", ..." if len(spans) > _MAX_LISTED else "")


_NOTHING = ByteRanges(np.empty(0, np.int64), np.empty(0, np.int64))
