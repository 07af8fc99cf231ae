"""The page lists of a transfer, source and target, on the host and where kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from .. import scratch
from ..arrays import ArrayView, array_at, contiguous_strides
from ..devices.protocol import Device, Stream
from ..exporters import view
from . import checks
from .transfer_kernels import Lists
from .transfer_runs import PageRuns, page_runs

_NAMES = ("src_pages", "dst_pages")


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
    views : of both lists
    src, dst : both as int64 (N,) arrays of the host, or None where they are in GPU memory

    Raises
    ------
    TypeError, ValueError : a list is of another type, or they differ in length
    """

    def __init__(self, src_pages: Any, dst_pages: Any, names: tuple[str, str] = _NAMES) -> None:
        owners = [_as_array(p, n) for p, n in zip((src_pages, dst_pages), names, strict=True)]
        self.views = [view(owner, name) for owner, name in zip(owners, names, strict=True)]
        counts = [checks.length_of(v, name) for v, name in zip(self.views, names, strict=True)]
        if counts[0] != counts[1]:
            raise ValueError(f"{names[1]}: expected {counts[0]} like {names[0]}, got {counts[1]}")
        self.count = counts[0]
        self.src, self.dst = (_on_host(v, o) for v, o in zip(self.views, owners, strict=True))
        self._lists: tuple[Lists, tuple[object, ...]] | None = None
        self._existing: dict[tuple[int, int], Existing] = {}
        self.methods: dict[object, str] = {}  # chosen for them, by what the choice depends on

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


def _as_array(pages: Any, name: str) -> Any:
    """Return a sequence of ints as an array; anything else unchanged."""
    if not isinstance(pages, (list, tuple, range)):
        return pages
    for page in pages:
        checks.require_int(page, name)
    try:
        return np.array(pages, np.int64)
    except OverflowError:
        raise ValueError(f"{name}: expected 64-bit ints, got {pages!r}") from None


def _on_host(v: ArrayView, owner: Any) -> np.ndarray[Any, Any] | None:
    if v.device != "host":
        return None
    return array_at(v.owner, v.pointer, v.shape, np.dtype(v.format), v.strides).astype(np.int64)
