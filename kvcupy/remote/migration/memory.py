"""Where the bytes of a pool's pages are, and which bytes of two pools belong together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ...arrays import bytes_of
from ...cache.pages import Pages
from ...cache.pool import Pool

Addresses = np.ndarray[Any, Any]

# First layer, last layer + 1, and of each part the address of page 0 and of the first layer, and
# bytes from page to page, from layer to layer, from token to token and from head to head.
Regions = Sequence[tuple[int, int, Sequence[Sequence[int]]]]


class PoolMemory:
    """The memory of a pool; ValueError if it is in GPU memory.

    Attributes
    ----------
    row_bytes : bytes of a row of each part: K, V, and the scales of each
    ranges : (address, bytes), which contain all pages and do not overlap
    """

    def __init__(self, pool: Pool) -> None:
        if any(part.device != "host" for part in (*pool.parts, *pool.scale_parts)):
            raise ValueError(
                f"pool: expected memory of the host (placement pinned or pageable), got {pool}"
            )
        self.pool = pool
        self.regions, extents = [], []
        for group in pool.groups:
            parts = [bytes_of(part) for part in (*group.parts, *group.scale_parts)]
            places = [[part.pointer, *part.strides[:4]] for part in parts]
            self.regions.append((group.layers.start, group.layers.stop, places))
            extents += [_extent_of(part) for part in parts]
        self.row_bytes = [part.shape[4] * part.itemsize for part in parts]
        self._tables = tables_of(self.regions)
        self.ranges: list[tuple[int, int]] = []  # parts may be interleaved
        start, end = min(extents)
        for low, high in sorted(extents):
            if low > end:
                self.ranges.append((start, end - start))
                start, end = low, high
            end = max(end, high)
        self.ranges.append((start, end - start))

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of a page in one layer."""
        return self.pool.page_size * self.pool.num_kv_heads * sum(self.row_bytes)

    def pieces(
        self, pages: Pages, their_tables: Addresses, their_pages: Pages, layers: range
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Pair the bytes of pages with the bytes of pages of another pool of the same identity.

        Returns int64 local addresses, remote addresses and sizes of pieces that are contiguous in
        both pools.
        """
        found = []
        for part, row_bytes in enumerate(self.row_bytes):
            tables = [t[part, layers.start : layers.stop] for t in (self._tables, their_tables)]
            heads, slots, size = self.pool.num_kv_heads, self.pool.page_size, row_bytes
            if all((table[:, 3] == size).all() for table in tables) or heads == 1:
                heads, size = 1, size * heads
                if all((table[:, 2] == size).all() for table in tables) or slots == 1:
                    slots, size = 1, size * slots
            both = [
                table[:, None, None, None, 0] + table[:, None, None, None, 1] * of[:, None, None]
                + table[:, None, None, None, 2] * np.arange(slots)[:, None]
                + table[:, None, None, None, 3] * np.arange(heads)
                for table, of in zip(tables, (pages, their_pages), strict=True)
            ]  # fmt: skip
            if all((np.diff(table[:, 0]) == size).all() for table in tables):  # page by page
                both = [addresses.swapaxes(0, 1) for addresses in both]
            found.append(_joined(both[0].reshape(-1), both[1].reshape(-1), size))
        local, remote, sizes = (np.concatenate(each) for each in zip(*found, strict=True))
        return local, remote, sizes


def tables_of(regions: Regions) -> Addresses:
    """Return int64 (parts, layers, 4): the address in page 0, and bytes from page to page, from
    token to token and from head to head."""
    tables = []
    for start, stop, places in regions:
        parts = np.array(places, np.int64)
        table = parts[:, None, [0, 1, 3, 4]].repeat(stop - start, axis=1)
        table[..., 0] += parts[:, 2:3] * np.arange(stop - start)
        tables.append(table)
    return np.concatenate(tables, axis=1)


def _extent_of(part: Any) -> tuple[int, int]:
    """Return the first address of a part, and the one after its last."""
    extents = [(count - 1) * stride for count, stride in zip(part.shape, part.strides, strict=True)]
    low = part.pointer + sum(min(0, extent) for extent in extents)
    return low, low + sum(map(abs, extents)) + part.itemsize


def _joined(
    local: Addresses, remote: Addresses, size: int
) -> tuple[Addresses, Addresses, Addresses]:
    """Merge pieces of `size` bytes that are neighbors in both pools.

    >>> _joined(np.array([0, 10, 40]), np.array([50, 60, 90]), 10)
    (array([ 0, 40]), array([50, 90]), array([20, 10]))
    """
    follows = (local[:-1] + size == local[1:]) & (remote[:-1] + size == remote[1:])
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    counts = np.diff(np.append(starts, len(local)))
    return local[starts], remote[starts], counts * size


def cut(
    local: Addresses, remote: Addresses, sizes: Addresses, num_bytes: int
) -> list[tuple[Addresses, Addresses, Addresses]]:
    """Cut pieces to at most `num_bytes`, and divide them into groups of less than twice that.

    >>> [sizes.tolist() for _, _, sizes in cut(*np.array([[0, 40], [50, 90], [10, 4]]), 4)]
    [[4], [4], [2], [4]]
    """
    counts = -(-sizes // num_bytes)
    numbers = np.repeat(np.arange(len(sizes)), counts)
    offsets = (np.arange(len(numbers)) - (np.cumsum(counts) - counts)[numbers]) * num_bytes
    local, remote = local[numbers] + offsets, remote[numbers] + offsets
    sizes = np.minimum(sizes[numbers] - offsets, num_bytes)
    groups = (np.cumsum(sizes) - 1) // num_bytes
    ends = [*(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(sizes)]
    starts = [0, *ends[:-1]]
    return [(local[i:j], remote[i:j], sizes[i:j]) for i, j in zip(starts, ends, strict=True)]
