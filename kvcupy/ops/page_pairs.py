"""The page lists of a transfer: pairs of pages, on the host and where kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .. import scratch
from ..arrays import ArrayView, array_at, contiguous_strides, view
from ..devices.protocol import Device, Stream
from . import checks

_NAMES = ("src_pages", "dst_pages")
_Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Lists:
    """Page lists as kernels read them: address, byte stride, and bytes of an index."""

    count: int
    src: tuple[int, int, int]
    dst: tuple[int, int, int]


@dataclass(frozen=True)
class PageRuns:
    """Runs of pages that are consecutive in both pools, in the order of their targets.

    Attributes
    ----------
    src, dst : int64 (runs,), the first page of each run
    lengths : int64 (runs,), how many pages
    """

    src: _Numbers
    dst: _Numbers
    lengths: _Numbers


def page_runs(src: _Numbers, dst: _Numbers) -> PageRuns:
    """Return the runs of pairs of pages, all of which exist.

    >>> page_runs(np.array([7, 3, 6]), np.array([2, 9, 1])).lengths
    array([2, 1])
    """
    order = np.argsort(dst, kind="stable")
    src, dst = src[order], dst[order]
    breaks = (np.diff(src) != 1) | (np.diff(dst) != 1)
    starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(src)), bool), breaks]))
    lengths = np.diff(np.append(starts, len(src)))
    return PageRuns(src[starts], dst[starts], lengths)


class Existing:
    """Pairs of pages that exist in both pools: int64 host arrays."""

    def __init__(self, src: _Numbers, dst: _Numbers) -> None:
        self.src, self.dst = src, dst
        self.count = len(src)

    @cached_property
    def runs(self) -> PageRuns:
        """The pairs as runs of pages that are consecutive in both pools."""
        return page_runs(self.src, self.dst)


class PagePairs:
    """Pairs of pages: the source of each, and its target.

    Parameters
    ----------
    src_pages, dst_pages : int32 or int64 (N,), or sequences of ints
    names : argument names of both, for errors

    Attributes
    ----------
    count : N
    views : ArrayViews of both lists
    src, dst : both as int64 (N,) host arrays, or None where they are in GPU memory
    on_device : what `lists` returned, or None before its first call
    methods : the methods that were chosen for these pages, by kind of transfer

    Raises
    ------
    TypeError, ValueError : a list does not fit, or they differ in length
    """

    def __init__(self, src_pages: Any, dst_pages: Any, names: tuple[str, str] = _NAMES) -> None:
        src, self.src = _page_list(src_pages, names[0])
        dst, self.dst = _page_list(dst_pages, names[1])
        self.views = (src, dst)
        self.count = src.shape[0]
        if dst.shape[0] != self.count:
            raise ValueError(
                f"{names[1]}: expected {self.count} like {names[0]}, got {dst.shape[0]}"
            )
        self.on_device: tuple[Lists, tuple[object, ...]] | None = None
        self._existing: dict[tuple[int, int], Existing] = {}
        self.methods: dict[object, str] = {}

    @classmethod
    def of_arrays(cls, src: _Numbers, dst: _Numbers) -> PagePairs:
        """Return the pairs of two contiguous int64 (N,) host arrays.

        The arrays are neither checked nor copied: they must not change until the transfers are
        done.
        """
        pairs = cls.__new__(cls)
        pairs.views = (_view_of(src), _view_of(dst))
        pairs.count, pairs.src, pairs.dst = len(src), src, dst
        pairs.on_device, pairs._existing, pairs.methods = None, {}, {}
        return pairs

    def lists(self, device: Device, stream: Stream) -> tuple[Lists, tuple[object, ...]]:
        """Return the lists where kernels of `device` read them, and what keeps them alive.

        Lists that kernels cannot reach are uploaded on `stream`, once. All calls are for one device
        and one stream.
        """
        if self.on_device is None:
            keep: tuple[object, ...] = self.views
            places: list[tuple[int, int, int]] = []
            unreachable = []
            for i, v in enumerate(self.views):
                address = device.address(v)
                places.append((address or 0, v.strides[0], v.itemsize))
                if address is None:
                    unreachable.append(i)
            if unreachable:
                uploaded = upload([self.on_host(_NAMES[i]) for i in unreachable], device, stream)
                keep = (*keep, uploaded)
                for row, i in enumerate(unreachable):
                    places[i] = (uploaded.pointer + row * uploaded.strides[0], 8, 8)
            self.on_device = Lists(self.count, *places), keep
        return self.on_device

    def existing(self, src_count: int, dst_count: int) -> Existing:
        """Return the pairs whose pages exist in pools of so many pages."""
        key = src_count, dst_count
        if key not in self._existing:
            src, dst = self.on_host("src_pages"), self.on_host("dst_pages")
            exist = (src >= 0) & (dst >= 0) & (src < src_count) & (dst < dst_count)
            if not exist.all():
                src, dst = src[exist], dst[exist]
            self._existing[key] = Existing(src, dst)
        return self._existing[key]

    def on_host(self, name: str) -> _Numbers:
        """Return a list as host array; ValueError if it is in GPU memory."""
        pages = self.src if name == _NAMES[0] else self.dst
        if pages is None:
            raise ValueError(
                f"{name}: expected an array of the host, which the call can read, got one on "
                f'{self.views[_NAMES.index(name)].device}; method "kernel" takes it'
            )
        return pages


def upload(lists: Sequence[_Numbers], device: Device, stream: Stream) -> ArrayView:
    """Upload host lists to where kernels of `device` read them, in one copy on `stream`.

    Parameters
    ----------
    lists : int64 (N,) each; they may change as soon as this returns

    Returns
    -------
    ArrayView : int64 (lists, N), borrowed memory, returned when the view is dropped
    """
    shape = len(lists), len(lists[0])
    num_bytes = 8 * shape[0] * shape[1]
    pinned = scratch.borrow(device, num_bytes, stream, pinned=True)
    rows = array_at(pinned.owner, pinned.pointer, shape, np.dtype(np.int64))
    for row, values in zip(rows, lists, strict=True):
        row[...] = values
    uploaded = scratch.borrow(device, num_bytes, stream)
    device.copy(uploaded, pinned, stream=stream)
    return ArrayView(
        uploaded.pointer, shape, contiguous_strides(shape, 8), "int64", uploaded.device,
        library=uploaded.library, owner=uploaded.owner,
    )  # fmt: skip


def _page_list(pages: Any, name: str) -> tuple[ArrayView, _Numbers | None]:
    """Check a page list; return a view of it, and an int64 host array, None for GPU memory."""
    if isinstance(pages, (list, tuple, range)):
        if not {int}.issuperset(map(type, pages)):  # isinstance of an ABC is slow
            for page in pages:
                checks.require_int(page, name)
        try:
            array = np.array(pages, np.int64)
        except OverflowError:
            raise ValueError(f"{name}: expected 64-bit ints, got {pages!r}") from None
        return _view_of(array), array
    v = view(pages, name)
    checks.indices(v, name)
    checks.require_aligned([(name, v)])
    if v.device != "host":
        return v, None
    array = array_at(v.owner, v.pointer, v.shape, np.dtype(v.format), v.strides)
    return v, array.astype(np.int64)


def _view_of(array: _Numbers) -> ArrayView:
    pointer = array.__array_interface__["data"][0]
    return ArrayView(pointer, array.shape, array.strides, "int64", "host", owner=array)
