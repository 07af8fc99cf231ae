"""The history of accesses: which work touched which bytes, and what that work was ordered after."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from ..arrays import ArrayView, describe
from ..observe import Access

Actor = tuple[str, int] | None
"""A stream, by its identity. None: the host, all of its threads."""
Clock = dict[Actor, int]
"""A vector clock: by actor, how much of its work comes first."""

HOST: Actor = None


_Numbers = np.ndarray[Any, np.dtype[np.int64]]
_MAX_LISTED = 6  # indices that a description spells out
_MAX_TOUCHES = 4096  # of one actor on one region; beyond that the older half is forgotten
_MAX_HOST_TOUCHES = 256


@dataclass(frozen=True)
class Site:
    """Work that was issued: what it is, on which stream, and from where."""

    operation: str
    stream: str  # its name; "the host" outside of all streams
    site: str  # file and line of the call, outside of kvcupy

    def __str__(self) -> str:
        return f"{self.operation} on {self.stream}, {self.site}"


@dataclass(frozen=True, slots=True)
class Point:
    """Where work stands: its actor, its number there, and the clock of what comes before it."""

    actor: Actor
    number: int
    clock: Clock

    def is_after(self, other: Point) -> bool:
        return self.clock.get(other.actor, 0) >= other.number


@dataclass(eq=False, slots=True)
class Lifetime:
    """Whether an allocation is alive, and how far streams keep it alive."""

    alive: bool = True
    ended_on: int = 0  # the thread that dropped it, by number
    ended_after: Clock = field(default_factory=dict)  # the work that had ended before
    kept: Clock = field(default_factory=dict)  # the work of each stream up to which it is kept


@dataclass(eq=False, slots=True)
class Work:
    """An operation as it was issued."""

    name: str
    stream_name: str
    stream: Callable[[], Any]  # weak: the stream, or None
    site: str
    point: Point
    keeps_arrays: bool
    copies_bytes: bool
    thread: int = 0

    @property
    def described(self) -> Site:
        return Site(self.name, self.stream_name, self.site)


@dataclass(eq=False, slots=True)
class Touch:
    """An access of a piece of work; keeps no array alive."""

    work: Work
    access: Access
    writes: bool
    low: int
    high: int
    slots: np.ndarray[Any, Any] | None  # None: all of the view, unless they are unknown
    unknown: bool
    lifetime: Lifetime | None
    snapshot: bytes | None = None  # what the bytes hold afterwards, if that is known
    _ranges: ByteRanges | None = None

    @property
    def number(self) -> int:
        return self.work.point.number

    def covers(self, other: Touch) -> bool:
        """Return whether this is the same access once more."""
        mine, its = self.access.view, other.access.view
        if self.writes != other.writes or self.lifetime is not other.lifetime:
            return False
        if (mine.pointer, mine.shape, mine.strides) != (its.pointer, its.shape, its.strides):
            return False
        scales, others = mine.scales, its.scales  # of four-bit formats
        if (scales and (scales.pointer, scales.strides)) != (
            others and (others.pointer, others.strides)
        ):
            return False
        if self.slots is None or other.slots is None:
            return self.slots is other.slots and not self.unknown and not other.unknown
        return np.array_equal(self.slots, other.slots)

    def ranges(self) -> ByteRanges:
        if self._ranges is None:
            access = self.access
            self._ranges = byte_ranges(
                access.view, self.slots, access.page_size, access.offset_axis
            )
        return self._ranges

    def shared_with(self, other: Touch) -> ByteRanges | None:
        """Return the bytes that both touch; None if there are none, or that is not certain."""
        if self.high <= other.low or other.high <= self.low:
            return None
        if self.unknown or other.unknown:
            some, whole = (self, other) if self.unknown else (other, self)
            covered = whole.ranges() if not whole.unknown and whole.slots is None else None
            if covered is None or len(covered) != 1:
                return None
            return covered if whole.low <= some.low and some.high <= whole.high else None
        shared = self.ranges() & other.ranges()
        return shared if len(shared) else None

    def describe(self, shared: ByteRanges) -> str:
        access = self.access
        name = f"{access.name} " if access.name else ""
        where = "" if self.unknown else locate(access.view, shared, access.axes)
        return f"{name}{describe(access.view)}{', ' if where else ''}{where}"


class _Region:
    """A range of addresses and its accesses, by actor in the order of their numbers."""

    __slots__ = ("high", "low", "touches", "writes")

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.touches: dict[Actor, list[Touch]] = {}
        self.writes: dict[Actor, list[Touch]] = {}

    def add(self, touch: Touch) -> None:
        _add(self.touches, touch)
        if touch.writes:
            _add(self.writes, touch)

    def absorb(self, other: _Region) -> None:
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        for own, others in ((self.touches, other.touches), (self.writes, other.writes)):
            for actor, touches in others.items():
                own[actor] = sorted([*own.get(actor, ()), *touches], key=_number)

    def forget(self, ended: Clock) -> None:
        """Drop the work of streams that has ended: what the host issues now comes after it."""
        for own in (self.touches, self.writes):
            for actor, touches in list(own.items()):
                if actor is not HOST:
                    del touches[: bisect_right(touches, ended.get(actor, 0), key=_number)]
                    if not touches:
                        del own[actor]


def _add(touches: dict[Actor, list[Touch]], touch: Touch) -> None:
    actor = touch.work.point.actor
    known = touches.setdefault(actor, [])
    if known and known[-1].number > touch.number:
        insort(known, touch, key=_number)
    elif known and touch.covers(known[-1]):  # work after this one is after that one too
        known[-1] = touch
    else:
        known.append(touch)
    most = _MAX_HOST_TOUCHES if actor is HOST else _MAX_TOUCHES
    if len(known) > most:
        del known[: most // 2]


class History:
    """The accesses to the memory of one device, in disjoint regions by address."""

    def __init__(self) -> None:
        self._lows: list[int] = []
        self._regions: list[_Region] = []

    def at(self, low: int, high: int) -> list[_Region]:
        """Return the regions that reach into a range of addresses."""
        first = bisect_right(self._lows, low) - 1
        if first < 0 or self._regions[first].high <= low:
            first += 1
        stop = first
        while stop < len(self._regions) and self._regions[stop].low < high:
            stop += 1
        return self._regions[first:stop]

    def add(self, touch: Touch) -> None:
        regions = self.at(touch.low, touch.high)
        if len(regions) == 1 and regions[0].low <= touch.low and touch.high <= regions[0].high:
            regions[0].add(touch)
            return
        merged = _Region(touch.low, touch.high)
        for region in regions:
            merged.absorb(region)
            self._remove(region)
        merged.add(touch)
        index = bisect_right(self._lows, merged.low)
        self._lows.insert(index, merged.low)
        self._regions.insert(index, merged)

    def unordered(self, point: Point, low: int, high: int) -> Iterator[Touch]:
        """Yield the accesses around a range that nothing orders before the work at a point."""
        for region in self.at(low, high):
            for actor, touches in region.touches.items():
                if actor == point.actor:
                    continue
                known = point.clock.get(actor, 0)
                if touches[-1].number <= known:
                    continue
                first = bisect_right(touches, known, key=_number)
                for touch in touches[first:]:
                    # A host function's accesses are noted when it runs, perhaps after later work.
                    if touch.work.point.clock.get(point.actor, 0) < point.number:
                        yield touch

    def forget(self, ended: Clock, low: int, high: int) -> None:
        """Drop what has ended in the regions of a range, and regions that become empty."""
        for region in self.at(low, high):
            region.forget(ended)
            if not region.touches:
                self._remove(region)

    def _remove(self, region: _Region) -> None:
        index = self._regions.index(region, bisect_right(self._lows, region.low) - 1)
        del self._regions[index], self._lows[index]


class Histories(defaultdict[str, History]):
    """The history of each device."""

    def __init__(self) -> None:
        super().__init__(History)


_number = attrgetter("number")


def join(clock: Clock, other: Clock) -> None:
    """Order an actor after what another clock counts too."""
    for actor, number in other.items():
        if number > clock.get(actor, 0):
            clock[actor] = number


def last_write(history: History, low: int, high: int, host: Clock) -> Touch | None:
    """Return the last write to some addresses that the host does not come after, if any."""
    latest: Touch | None = None
    for region in history.at(low, high):
        for actor, touches in region.writes.items():
            for touch in reversed(touches):
                if touch.number <= host.get(actor, 0):
                    break
                if touch.low < high and low < touch.high:
                    if latest is None or touch.work.point.is_after(latest.work.point):
                        latest = touch
                    break
    return latest


# --- The bytes of a strided view, or of some slots of a cache ------------------------------------


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
        """Return the intersection."""
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
    """Return the bytes of a view, or of some of its slots; those that do not exist are left out.

    A slot is an index on the first axis; with a `page_size` above 1, `page * page_size + offset`.
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
    """Return the union."""
    order = np.argsort(np.concatenate([a.starts, b.starts]), kind="stable")
    starts = np.concatenate([a.starts, b.starts])[order]
    reach = np.maximum.accumulate(np.concatenate([a.ends, b.ends])[order])
    first = np.flatnonzero(np.concatenate([[True], starts[1:] > reach[:-1]]))
    return ByteRanges(starts[first], reach[np.append(first[1:], len(starts)) - 1])


def locate(view: ArrayView, ranges: ByteRanges, axes: Sequence[str] = ()) -> str:
    """Say which part of a view some of its bytes are: `page 3, head 2-4`; "" if all."""
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
