"""Bytes of layers of some pages and heads, in migration order.

    K of page 0, K of page 1, ..., V of page 0, ..., scales of K, scales of V

for each layer, and each run of pages: all pages, or as many as both ends can stage. Each item is
(page_size, heads, width) in every layout, so that pools of all layouts exchange pages. Pages that
are contiguous in this form are sent and received in place, with neighbouring pages as one run;
other pages are packed, some hundred kilobytes at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, groupby
from typing import Any

import numpy as np

from ...arrays import ArrayView, array_at, bytes_of
from ...cache.pages import Pages
from ...cache.pool import Pool, pool_like
from ...cache.threads import Waiters
from ...ops import transfer

_CHUNK_BYTES = 1 << 20  # fits the CPU cache while it is checksummed
_PACKED_BYTES = 256 << 10
_STAGING_POLL_S = 0.02  # interval of `meanwhile` during a wait for staging pages
_DEFAULT_STAGING_PAGES = 64

Group = tuple[list[memoryview], int]  # pieces of memory, and their total bytes
_Slices = dict[tuple[int, int, int], list[slice]]  # by stride, start and page bytes of the memory


class PageBytes:
    """Pages of a pool as bytes.

    Parameters
    ----------
    pool : a pool in host-addressable memory
    heads : range of the pool's heads

    Attributes
    ----------
    page_bytes : bytes per page and layer
    """

    def __init__(self, pool: Pool, heads: range) -> None:
        self._last: tuple[Pages | None, _Slices] = None, {}
        self._layers: list[list[_Part]] = [[] for _ in range(pool.num_layers)]
        for group in pool.groups:
            for part in (*map(bytes_of, group.parts), *group.scale_parts):
                for i, layer in enumerate(group.layers):
                    self._layers[layer].append(_Part(part[:, i], heads))
        self.page_bytes = sum(part.page_bytes for part in self._layers[0])

    def reading(self, pages: Pages, layers: range) -> Iterator[Group]:
        """Yield the bytes to send, in groups; each group is valid until the next one."""
        slices = self._slices_of(pages)
        return _grouped([part.reading(pages, slices) for part in self._parts(layers)])

    def writing(self, pages: Pages, layers: range) -> Iterator[Group]:
        """Yield memory to fill, in groups; fill each group before requesting the next."""
        slices = self._slices_of(pages)
        for is_packed, parts in groupby(self._parts(layers), key=lambda part: part.is_packed):
            if is_packed:
                yield from _grouped([part.runs(pages, slices) for part in parts])
                continue
            for part in parts:
                for chunk in part.chunks(pages):
                    packed = np.empty((len(chunk), *part.array.shape[1:]), np.uint8)
                    yield [_flat(packed)], packed.size
                    part.array[chunk] = packed

    def _slices_of(self, pages: Pages) -> _Slices:
        """Return the runs that `_Part.runs` found for these pages in other layers."""
        last, slices = self._last
        if last is not pages:
            slices = {}
            self._last = pages, slices
        return slices

    def _parts(self, layers: range) -> Iterator[_Part]:
        for layer in layers:
            yield from self._layers[layer]


def _flat(array: Any) -> memoryview:
    return memoryview(array.reshape(-1))


def _grouped(parts: Iterable[Iterable[memoryview]]) -> Iterator[Group]:
    """Cut and group memory into groups of `_CHUNK_BYTES`; the last may be smaller."""
    group: list[memoryview] = []
    space = _CHUNK_BYTES
    for view in chain.from_iterable(parts):
        num_bytes = view.nbytes
        if num_bytes < space:
            group.append(view)
            space -= num_bytes
            continue
        start = 0
        while num_bytes - start >= space:
            group.append(view[start : start + space])
            yield group, _CHUNK_BYTES
            start, group, space = start + space, [], _CHUNK_BYTES
        if start < num_bytes:
            group.append(view[start:])
            space -= num_bytes - start
    if group:
        yield group, _CHUNK_BYTES - space


class _Part:
    """K, V or scales of one layer and some heads, as uint8 (pages, page_size, heads, bytes).

    Attributes
    ----------
    is_packed : whether the memory of a page is contiguous in migration order
    """

    def __init__(self, part: ArrayView, heads: range) -> None:
        num_pages, page_size, _, width = part.shape
        shape = (num_pages, page_size, len(heads), width * part.itemsize)
        first = part.pointer + heads.start * part.strides[2]
        strides = (*part.strides[:3], 1)
        self.array: Any = array_at(part.owner, first, shape, np.dtype(np.uint8), strides)
        self.page_bytes = self.array[0].size
        self.is_packed = self.array[0].flags.c_contiguous
        if self.is_packed:
            stride, last = strides[0], strides[0] * (num_pages - 1)
            size = abs(last) + self.page_bytes
            start = first + min(0, last)
            span: Any = array_at(part.owner, start, (size,), np.dtype(np.uint8))
            self._span, self._stride, self._zero = memoryview(span), stride, first - start

    def chunks(self, pages: Pages) -> Iterator[Pages]:
        """Split pages into pieces of about `_PACKED_BYTES`."""
        step = max(1, _PACKED_BYTES // self.page_bytes)
        for i in range(0, len(pages), step):
            yield pages[i : i + step]

    def reading(self, pages: Pages, slices: _Slices) -> Iterable[memoryview]:
        """Return the bytes of pages: the pool's memory if `is_packed`, else packed copies."""
        if self.is_packed:
            return self.runs(pages, slices)
        return (_flat(np.ascontiguousarray(self.array[chunk])) for chunk in self.chunks(pages))

    def runs(self, pages: Pages, slices: _Slices) -> list[memoryview]:
        """Return the memory of pages, merging neighbours into runs."""
        span, key = self._span, (self._stride, self._zero, self.page_bytes)
        if key not in slices:
            slices[key] = self._find_runs(pages)
        return [span[each] for each in slices[key]]

    def _find_runs(self, pages: Pages) -> list[slice]:
        stride, size, numbers = self._stride, self.page_bytes, pages.tolist()
        bounds = [(number * stride + self._zero, size) for number in numbers]
        if stride == size:
            bounds, last = [], None
            for number in numbers:
                if number != last:
                    bounds.append((number * size + self._zero, 0))
                start, num_bytes = bounds[-1]
                bounds[-1] = start, num_bytes + size
                last = number + 1
        return [slice(start, start + num_bytes) for start, num_bytes in bounds]


# --- Pools that the host cannot address -----------------------------------------------------------


class Staging:
    """Pinned staging pages for a pool in GPU memory.

    Parameters
    ----------
    pool : the pool to stage
    num_pages : number of staging pages, shared by concurrent transfers

    Attributes
    ----------
    share : maximum number of pages per transfer, so that a transfer with a slow peer cannot take
        all of them
    """

    def __init__(self, pool: Pool, num_pages: int) -> None:
        self.pool = pool_like(pool, num_pages, dtype=pool.dtype)
        self.share = max(1, num_pages // 4)
        self._owner = pool
        self._save = [transfer.prepare(pool, self.pool, layers=[i]) for i in range(pool.num_layers)]
        self._load = [transfer.prepare(self.pool, pool, layers=[i]) for i in range(pool.num_layers)]
        self._lock = threading.RLock()
        self._freed = Waiters(self._lock)

    @contextmanager
    def borrowed(
        self, count: int, deadline: float, meanwhile: Callable[[], None]
    ) -> Iterator[Pages]:
        """Borrow `count` staging pages; TimeoutError if they are not free by the deadline.

        Calls `meanwhile` every 20 ms during the wait; its exceptions propagate.
        """
        allocator = self.pool.allocator
        while True:
            pause_s = min(_STAGING_POLL_S, max(0.0, deadline - time.monotonic()))
            self._freed.wait_for(lambda: allocator.num_free >= count, pause_s)
            with self._lock:
                if allocator.num_free >= count:
                    pages = allocator.alloc(count)
                    break
            if time.monotonic() >= deadline:
                raise TimeoutError("no staging pages are free")
            meanwhile()
        try:
            yield pages
        finally:
            with self._lock:
                allocator.free(pages)
                self._freed.notify()

    def save(self, pages: Pages, staged: Pages, layer: int, stream: Any) -> None:
        """Copy pages of a layer to staging pages on a stream, and synchronize."""
        self._save[layer].issue(transfer.PagePairs.of_arrays(pages, staged), stream)
        stream.synchronize()

    def load(self, staged: Pages, pages: Pages, layer: int, stream: Any) -> None:
        """Copy staging pages of a layer to pages on a stream, and synchronize."""
        self._load[layer].issue(transfer.PagePairs.of_arrays(staged, pages), stream)
        stream.synchronize()


def staging_for(pool: Pool, staging_pages: int | None) -> Staging | None:
    """Create staging if requested, or if the pool's memory needs it."""
    addressable = all(part.device == "host" for part in (*pool.parts, *pool.scale_parts))
    if staging_pages is None and addressable:
        return None
    return Staging(pool, min(pool.num_pages, staging_pages or _DEFAULT_STAGING_PAGES))
