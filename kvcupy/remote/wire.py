"""Wire format of a page, the byte order of blocks in stores, and block checksums.

    page_first_direct   K of all layers | V of all layers | scales of K | scales of V
                        (layers, page_size, heads, width) each, same as a page in that layout.
                        Rows of four-bit formats are codes and group scales, as in a pool
    page_head           the same parts, (heads, page_size, layers, width) each

MLA has one part of rows and one part of scales. Pools of all layouts except "page_head" use the
first order, so they can share blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from .. import observe
from ..arrays import ArrayView, array_at, bytes_of
from ..cache.pool import Pool
from ..observe import Access

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MIN_PIECE_BYTES = 4096  # average below which a page is first gathered into one buffer
_AXES, _HEAD_AXES = (1, 2, 3), (3, 2, 1)  # of (pages, layers, page_size, heads, width)


class _Run(NamedTuple):
    """Contiguous bytes of each page."""

    num_bytes: int
    span: memoryview  # array that contains the run in all pages
    start: int  # offset in the span, for page 0
    page_stride: int

    def of(self, page: int) -> memoryview:
        start = self.start + page * self.page_stride
        return self.span[start : start + self.num_bytes]


class WirePages:
    """The pages of a pool in host memory as blocks of bytes in wire order.

    A page consists of `num_pieces` contiguous pieces. `is_direct` says whether to use them: they
    are at least 4 KiB on average, or each part is one piece. Otherwise `read_into` and `write_from`
    copy through a buffer. Page numbers are not checked, and the caller orders these accesses with
    work on streams.

    >>> import kvcupy as kv
    >>> shape = dict(page_size=16, num_layers=2, num_kv_heads=8, head_dim=128, device="host")
    >>> one, other = kv.KVPool(4, **shape), kv.KVPool(4, **shape, layout="page_first")
    >>> one.k(1)[3, 5, 0, 0] = 7
    >>> source, target = WirePages(one), WirePages(other)
    >>> source.num_pieces, source.is_direct, target.num_pieces, target.is_direct
    (4, True, 64, False)
    >>> target.write_from(0, b"".join(source.pieces(3)))
    >>> float(other.k(1)[0, 5, 0, 0])
    7.0
    """

    def __init__(self, pool: Pool) -> None:
        if any(part.device != "host" for part in (*pool.parts, *pool.scale_parts)):
            raise ValueError(
                f"host_pool: expected memory of the host, got a pool with placement "
                f"{pool.placement} on {pool.device.name}"
            )
        self.pool = pool
        axes = _HEAD_AXES if pool.layout == "page_head" else _AXES
        by_group = [
            (group.layers, [*map(bytes_of, group.parts), *group.scale_parts])
            for group in pool.groups
        ]
        self._planes: list[_Plane] = []
        offset = 0
        for number in range(len(by_group[0][1])):
            parts = [(layers, parts[number]) for layers, parts in by_group]
            self._planes.append(_Plane(parts, offset, pool.num_layers, axes))
            offset += self._planes[-1].num_bytes
        self.block_bytes = offset
        self._runs = [run for plane in self._planes for run in plane.runs]
        self.num_pieces = len(self._runs)
        self.is_direct = (
            self.num_pieces == len(self._planes)
            or self.num_pieces * _MIN_PIECE_BYTES <= self.block_bytes
        )

    def pieces(self, page: int) -> list[memoryview]:
        """Return the bytes of a page in wire order, in contiguous pieces."""
        return [run.of(page) for run in self._runs]

    def read_into(self, page: int, buffer: Any) -> None:
        """Copy a page into a writable buffer of `block_bytes`, in wire order."""
        block = _as_bytes(buffer, self.block_bytes)
        for plane in self._planes:
            for in_block, in_pool in plane.halves(block, page):
                in_block[...] = in_pool

    def write_from(self, page: int, buffer: Any) -> None:
        """Copy a block of `block_bytes`, in wire order, into a page."""
        block = _as_bytes(buffer, self.block_bytes)
        for plane in self._planes:
            for in_block, in_pool in plane.halves(block, page):
                in_pool[...] = in_block

    def announce(self, operation: str, pages: Iterable[int], *, is_read: bool) -> None:
        """Notify order checkers that the CPU reads or writes pages."""
        if observe.order_observers:
            parts = (*self.pool.parts, *self.pool.scale_parts)
            accesses = [Access(part[page], name="host_pool") for page in pages for part in parts]
            reads, writes = (accesses, []) if is_read else ([], accesses)
            observe.touched_by_host(operation, reads, writes)


class _Plane:
    """One part of a block: K, V, or the scales of either, of all layers."""

    def __init__(
        self, parts: Sequence[tuple[range, ArrayView]], offset: int, num_layers: int,
        axes: tuple[int, ...],
    ) -> None:  # fmt: skip
        shape = parts[0][1].shape
        self._axes, self._arrays = axes, []
        self.offset = offset
        row_bytes = shape[-1] * parts[0][1].itemsize
        sizes = {1: num_layers, 2: shape[2], 3: shape[3]}
        self._shape = (*(sizes[axis] for axis in axes), row_bytes)  # in wire order
        self.num_bytes = num_layers * shape[2] * shape[3] * row_bytes
        self.runs: list[_Run] = []
        for layers, part in parts:
            strides = (*part.strides[:-1], 1)
            self._arrays.append((
                layers,
                array_at(
                    part.owner, part.pointer, (*part.shape[:-1], row_bytes), np.dtype(np.uint8),
                    strides,
                ),
            ))  # fmt: skip
            self.runs += _runs(part, axes, row_bytes)

    def halves(self, block: Bytes, page: int) -> Iterable[tuple[Bytes, Bytes]]:
        """Yield matching views of a block and of a page, for each group of layers."""
        plane = block[self.offset : self.offset + self.num_bytes].reshape(self._shape)
        by_layer = plane.transpose(*(self._axes.index(axis) for axis in (1, 2, 3)), 3)
        for layers, array in self._arrays:
            yield by_layer[layers.start : layers.stop], array[page]


def _runs(part: ArrayView, axes: Sequence[int], row_bytes: int) -> list[_Run]:
    """Split a part into contiguous runs, ordered by `axes`."""
    outer, num_bytes = list(axes), row_bytes
    while outer and (part.shape[outer[-1]] == 1 or part.strides[outer[-1]] == num_bytes):
        num_bytes *= part.shape[outer.pop()]
    steps = [[i * part.strides[axis] for i in range(part.shape[axis])] for axis in outer]
    starts = [sum(combination) for combination in itertools.product(*steps)]
    page_stride = part.strides[0]
    last_page = (part.shape[0] - 1) * page_stride
    low = min(starts) + min(0, last_page)
    span_bytes = max(starts) + max(0, last_page) + num_bytes - low
    span = array_at(part.owner, part.pointer + low, (span_bytes,), np.dtype(np.uint8)).data
    return [_Run(num_bytes, span, start - low, page_stride) for start in starts]


def _as_bytes(buffer: Any, num_bytes: int) -> Bytes:
    block: Bytes = np.frombuffer(buffer, np.uint8)
    if block.size != num_bytes:
        raise ValueError(f"buffer: expected {num_bytes} bytes, got {block.size}")
    return block


# --- Checksums ---


def checksum(buffers: Iterable[Any]) -> int:
    """Compute the checksum of the concatenated contiguous buffers, XXH3 of 64 bits.

    >>> checksum([b"12", b"345"]) == checksum([b"12345"])
    True
    """
    hasher = xxhash.xxh3_64()
    for buffer in buffers:
        hasher.update(buffer)
    return hasher.intdigest()
