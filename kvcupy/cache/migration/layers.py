"""The bytes of one layer of some pages, and of some of its heads, in the order of the wire.

    K of page 0, K of page 1, ..., V of page 0, ..., scales of K, scales of V

of each run of pages: all of them, or as many as both ends have staging for. Each of these is
(page_size, heads, width), whatever the layout of the pool, so that pools of all layouts exchange
pages. What lies in memory like that is sent and received in place, neighbours as one run;
the rest is packed, some hundred kilobytes at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...arrays import ArrayView, array_at
from ...ops import transfer
from ..pages import Pages
from ..pool import KVPool, MLAPool, Pool

_CHUNK_BYTES = 256 << 10  # that are checksummed while they are in the processor's cache
_STAGING_PAGES = 64  # where a pool needs staging, unless another number is asked for

_Bytes = np.ndarray[Any, Any]  # uint8


class PageBytes:
    """Pages of a pool as bytes.

    Parameters
    ----------
    pool : whose memory the host can address
    heads : of the pool, which of them

    Attributes
    ----------
    page_bytes : of a page of one layer
    """

    def __init__(self, pool: Pool, heads: range) -> None:
        self._pool = pool
        parts: list[list[ArrayView]] = [[] for _ in range(pool.num_layers)]
        for group in pool.groups:
            for part in (*group.parts, *group.scale_parts):
                for i, layer in enumerate(group.layers):
                    parts[layer].append(part[:, i])
        self._layers = [[_as_bytes(part, heads) for part in layer] for layer in parts]
        first = self._layers[0]
        self.page_bytes = sum(part[0].size for part in first)

    def reading(self, pages: Pages, layer: int) -> Iterator[list[memoryview]]:
        """Yield the bytes to send; those of one turn are valid until the next."""
        for part in self._layers[layer]:
            if _lies_packed(part):
                yield from _grouped(_runs(part, pages))
                continue
            step = max(1, _CHUNK_BYTES // part[0].size)
            for i in range(0, len(pages), step):
                packed = np.ascontiguousarray(part[pages[i : i + step]])
                yield [_flat(packed)]

    def writing(self, pages: Pages, layer: int) -> Iterator[list[memoryview]]:
        """Yield memory to fill, which must be filled when the next is asked for."""
        for part in self._layers[layer]:
            if _lies_packed(part):
                yield from _grouped(_runs(part, pages))
                continue
            step = max(1, _CHUNK_BYTES // part[0].size)
            packed = np.empty((min(step, len(pages)), *part.shape[1:]), np.uint8)
            for i in range(0, len(pages), step):
                chunk = pages[i : i + step]
                yield [_flat(packed[: len(chunk)])]
                part[chunk] = packed[: len(chunk)]


def _as_bytes(part: ArrayView, heads: range) -> _Bytes:
    """View (pages, page_size, heads, width) as uint8 (pages, page_size, chosen heads, bytes)."""
    num_pages, page_size, _, width = part.shape
    return array_at(
        part.owner, part.pointer + heads.start * part.strides[2],
        (num_pages, page_size, len(heads), width * part.itemsize), np.dtype(np.uint8),
        (*part.strides[:3], 1),
    )  # fmt: skip


def _flat(array: Any) -> memoryview:
    return memoryview(array.reshape(-1))


def _lies_packed(part: _Bytes) -> bool:
    return bool(part[0].flags.c_contiguous)


def _runs(part: _Bytes, pages: Pages) -> Iterator[memoryview]:
    """Yield the memory of pages, neighbours together."""
    size = part[0].size
    if part.strides[0] != size:
        for page in pages.tolist():
            yield _flat(part[page])
        return
    flat = _flat(part)
    ends = np.flatnonzero(np.diff(pages) != 1) + 1
    starts = [0, *ends.tolist()] if len(pages) else []
    for start, end in zip(starts, [*starts[1:], len(pages)], strict=True):
        first = int(pages[start]) * size
        yield flat[first : first + (end - start) * size]


def _grouped(runs: Iterator[memoryview]) -> Iterator[list[memoryview]]:
    """Cut and group memory into pieces of about `_CHUNK_BYTES`."""
    group: list[memoryview] = []
    room = _CHUNK_BYTES
    for run in runs:
        rest = run
        while rest.nbytes:
            group.append(rest[:room])
            taken = group[-1].nbytes
            rest, room = rest[taken:], room - taken
            if room == 0:
                yield group
                group, room = [], _CHUNK_BYTES
    if group:
        yield group


# --- Pools that the host cannot address -----------------------------------------------------------


class Staging:
    """Pinned pages through which those of a GPU's memory pass.

    Parameters
    ----------
    pool : that has the pages
    num_pages : of the staging pool, which transfers at one time share
    """

    def __init__(self, pool: Pool, num_pages: int) -> None:
        common: dict[str, Any] = {
            "dtype": pool.dtype, "layout": "page_first_direct", "placement": "pinned",
            "device": pool.device, "scales": bool(pool.scale_parts),
        }  # fmt: skip
        sizes = (num_pages, pool.page_size, pool.num_layers)
        self.pool: Pool
        if isinstance(pool, MLAPool):
            self.pool = MLAPool(*sizes, pool.head_dim, **common)
        else:
            self.pool = KVPool(
                *sizes, pool.num_kv_heads, pool.head_dim, v_head_dim=pool.v_head_dim, **common
            )
        self._owner = pool
        self._save = [transfer.prepare(pool, self.pool, layers=[i]) for i in range(pool.num_layers)]
        self._load = [transfer.prepare(self.pool, pool, layers=[i]) for i in range(pool.num_layers)]
        self._freed = threading.Condition()

    @contextmanager
    def borrowed(self, count: int, deadline: float) -> Iterator[Pages]:
        """Lend pages, at most all there are; TimeoutError if they are not free until a deadline."""
        allocator = self.pool.allocator
        with self._freed:
            while allocator.num_free < count:
                if not self._freed.wait(deadline - time.monotonic()):
                    raise TimeoutError("no staging pages are free")
            pages = allocator.alloc(count)
        try:
            yield pages
        finally:
            with self._freed:
                allocator.free(pages)
                self._freed.notify_all()

    def save(self, pages: Pages, staged: Pages, layer: int, stream: Any) -> None:
        """Copy pages of a layer to staging pages on a stream, and wait for that."""
        self._save[layer].issue(transfer.PagePairs.of_arrays(pages, staged), stream)
        stream.synchronize()

    def load(self, staged: Pages, pages: Pages, layer: int, stream: Any) -> None:
        """Copy staging pages of a layer to pages on a stream, and wait for that."""
        self._load[layer].issue(transfer.PagePairs.of_arrays(staged, pages), stream)
        stream.synchronize()


def staging_for(pool: Pool, staging_pages: int | None) -> Staging | None:
    """Return the staging of a pool: what was asked for, or what its memory needs."""
    addressable = all(part.device == "host" for part in (*pool.parts, *pool.scale_parts))
    if staging_pages is None and addressable:
        return None
    return Staging(pool, min(pool.num_pages, staging_pages or _STAGING_PAGES))
