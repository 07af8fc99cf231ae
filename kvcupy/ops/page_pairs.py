"""The page lists of a transfer, source and target, on the host and where kernels read them."""

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


@dataclass(frozen=True)
class Lists:
    """Page numbers where the kernels find them: address, byte stride and bytes of an index."""

    count: int
    src: tuple[int, int, int]
    dst: tuple[int, int, int]


_Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PageRuns:
    """Pages in order of their targets, neighbours on both sides put together.

    Attributes
    ----------
    src, dst : int64 (runs,), the first pages of each run
    lengths : int64 (runs,), pages
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
    """The pairs whose pages exist: int64 arrays of the host."""

    def __init__(self, src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any]) -> None:
        self.src, self.dst = src, dst
        self.count = len(src)

    @cached_property
    def runs(self) -> PageRuns:
        """The pairs as runs of pages that are consecutive on both sides."""
        return page_runs(self.src, self.dst)


class PagePairs:
    """Pairs of pages: the source of each, and its target.

    Parameters
    ----------
    src_pages, dst_pages : int32 or int64 (N,), or sequences of ints
    names : of the two arguments, for errors

    Attributes
    ----------
    count : N
    views : both lists described
    src, dst : both as int64 (N,) host arrays, or None where a GPU has them

    Raises
    ------
    TypeError, ValueError : a list is of another type, or they differ in length
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
        self._lists: tuple[Lists, tuple[object, ...]] | None = None
        self._existing: dict[tuple[int, int], Existing] = {}
        self.methods: dict[object, str] = {}  # that were chosen, by the kind of transfer

    @classmethod
    def of_arrays(cls, src: _Numbers, dst: _Numbers) -> PagePairs:
        """Return the pairs of two contiguous int64 (N,) host arrays.

        The arrays are neither checked nor copied: they must not change until the transfers are
        done.
        """
        pairs = cls.__new__(cls)
        pairs.views = (_view_of(src), _view_of(dst))
        pairs.count, pairs.src, pairs.dst = len(src), src, dst
        pairs._lists, pairs._existing, pairs.methods = None, {}, {}
        return pairs

    def lists(self, device: Device, stream: Stream) -> tuple[Lists, tuple[object, ...]]:
        """Return the lists where kernels of `device` read them, and what keeps them alive.

        Lists that kernels cannot reach are uploaded on `stream`, once. All calls are for one device
        and one stream.
        """
        if self._lists is None:
            addresses = [device.address(v) for v in self.views]
            kept: tuple[object, ...] = tuple(self.views)
            places = [
                (address or 0, v.strides[0], v.itemsize)
                for address, v in zip(addresses, self.views, strict=True)
            ]
            unreached = [i for i, address in enumerate(addresses) if address is None]
            if unreached:
                uploaded = send([self.on_host(_NAMES[i]) for i in unreached], device, stream)
                kept = (*kept, uploaded)
                for row, i in enumerate(unreached):
                    places[i] = (uploaded.pointer + row * uploaded.strides[0], 8, 8)
            self._lists = Lists(self.count, *places), kept
        return self._lists

    def existing(self, src_count: int, dst_count: int) -> Existing:
        """Return the pairs whose pages exist in pools of so many pages."""
        key = src_count, dst_count
        if key not in self._existing:
            src, dst = self.on_host("src_pages"), self.on_host("dst_pages")
            inside = (src >= 0) & (dst >= 0) & (src < src_count) & (dst < dst_count)
            if not inside.all():
                src, dst = src[inside], dst[inside]
            self._existing[key] = Existing(src, dst)
        return self._existing[key]

    def on_host(self, name: str) -> np.ndarray[Any, Any]:
        """Return one list as an array of the host; ValueError if it is in GPU memory."""
        pages = self.src if name == _NAMES[0] else self.dst
        if pages is None:
            raise ValueError(
                f"{name}: expected an array of the host, which the call can read, got one on "
                f'{self.views[_NAMES.index(name)].device}; method "kernel" takes it'
            )
        return pages


def send(lists: Sequence[np.ndarray[Any, Any]], device: Device, stream: Stream) -> ArrayView:
    """Upload lists of the host to where kernels of `device` read them, in one copy on `stream`.

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
    """Check a page list; return it described, and as int64 host array unless a GPU has it."""
    if isinstance(pages, (list, tuple, range)):
        array = _int64(pages, name)
        return _view_of(array), array
    v = view(pages, name)
    checks.indices(v, name)
    if v.device != "host":
        return v, None
    array = array_at(v.owner, v.pointer, v.shape, np.dtype(v.format), v.strides)
    return v, array.astype(np.int64)


def _int64(pages: Sequence[Any], name: str) -> _Numbers:
    if not {int}.issuperset(map(type, pages)):  # ABCs are slow to ask
        for page in pages:
            checks.require_int(page, name)
    try:
        return np.array(pages, np.int64)
    except OverflowError:
        raise ValueError(f"{name}: expected 64-bit ints, got {pages!r}") from None


def _view_of(array: _Numbers) -> ArrayView:
    pointer = array.__array_interface__["data"][0]
    return ArrayView(pointer, array.shape, array.strides, "int64", "host", owner=array)
