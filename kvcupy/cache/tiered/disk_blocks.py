"""Blocks in the slots of a disk tier, and the bytes of a host page that go there."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays import ArrayView, array_at
from ...config import logger
from .blocks import Copy
from .disk import DiskTier
from .policies import Policy

if TYPE_CHECKING:
    from ..pool import Pool


class DiskBlocks:
    """Which slot of a file has which block, and in which order they go.

    Parameters
    ----------
    path, num_bytes : of the file, as for `DiskTier`
    pool : whose pages are stored, as it has them in memory
    order : of eviction

    Attributes
    ----------
    slots : by hash
    num_slots, page_bytes : as of `DiskTier`
    read_bytes, read_s, written_bytes, write_s : moved so far, and how long that took
    errors : writes that failed, and blocks that were there no more

    Raises
    ------
    TypeError, ValueError, OSError : as `DiskTier`; the pool is not in memory of the host

    Notes
    -----
    The caller has a lock. Pages are read and written by the processor: no transfer may write those
    that go to disk, or touch those that come from there.
    """

    def __init__(self, path: Any, num_bytes: int, pool: Pool, order: Policy) -> None:
        parts = (*pool.parts, *pool.scale_parts)
        if any(part.device != "host" for part in parts):
            raise ValueError("host_pool: expected memory of the host where there is a disk")
        self._pool = pool
        self._pieces = [_pieces(part) for part in parts]
        self._file = DiskTier(path, num_bytes, pool.page_bytes, _identity(pool))
        self.num_slots, self.page_bytes = self._file.num_slots, pool.page_bytes
        self.order = order
        self.slots: dict[int, int] = {}
        self.read_bytes = self.written_bytes = self.errors = 0
        self.read_s = self.write_s = 0.0
        for hash, slot in self._file.entries():  # oldest first; the last of a hash counts
            self._forget([hash] if hash in self.slots else [])
            self.slots[hash] = slot
            order.add(hash)
        used = set(self.slots.values())
        self._free = [slot for slot in reversed(range(self._file.num_slots)) if slot not in used]

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def choose(self, count: int, keep: Container[int] = ()) -> list[int]:
        """Return the hashes of up to `count` blocks that may go, in order; nothing changes."""
        if count <= 0:
            return []
        return list(islice((h for h in self.order.victims() if h not in keep), count))

    def evict(self, hashes: Iterable[int]) -> None:
        """Forget blocks, so that others are written in their place."""
        self._free += self._forget(hashes)

    def use(self, hashes: Sequence[int]) -> None:
        """Mark blocks as used, from the last of a prefix to its first."""
        slots, touch = self.slots, self.order.touch
        for hash in reversed(hashes):
            if hash in slots:
                touch(hash)

    def write(self, copies: Sequence[Copy]) -> dict[int, OSError]:
        """Write blocks of the host, for which there are free slots.

        Returns
        -------
        why blocks are not there, by hash
        """
        started = time.perf_counter()
        slots = [self._free.pop() for _ in copies]
        items = [(s, c.hash, self._memory(c.page)) for s, c in zip(slots, copies, strict=True)]
        try:
            results = self._file.write_many(items)
        except BaseException:  # an interrupt; what has been written is found upon opening
            self._free += slots
            raise
        failed = {}
        for slot, copy, error in zip(slots, copies, results, strict=True):
            if error is None:
                self.slots[copy.hash] = slot
                self.order.add(copy.hash)
            else:
                failed[copy.hash] = error
                self._free.append(slot)
        if failed:
            self.errors += len(failed)
            first = next(iter(failed.values()))
            logger.warning("%d blocks could not be written to disk: %s", len(failed), first)
        self.written_bytes += self.page_bytes * (len(copies) - len(failed))
        self.write_s += time.perf_counter() - started
        return failed

    def read(self, hashes: Sequence[int], pages: Sequence[int]) -> int:
        """Read blocks into pages of the host, and forget those that are there no more.

        Returns
        -------
        how many leading blocks have been read; what is in the pages of the others is undefined
        """
        started = time.perf_counter()
        items = [
            (self.slots[h], h, self._memory(page)) for h, page in zip(hashes, pages, strict=True)
        ]
        whole = self._file.read_many(items)
        self._pool.note_written()
        bad = [hash for hash, good in zip(hashes, whole, strict=True) if not good]
        if bad:
            self.errors += len(bad)
            logger.warning("%d blocks on disk are damaged, and forgotten", len(bad))
            self._free += self._forget(bad)
        self.read_bytes += self.page_bytes * (len(hashes) - len(bad))
        self.read_s += time.perf_counter() - started
        return len(hashes) if not bad else hashes.index(bad[0])

    def clear(self, order: Policy) -> None:
        """Empty every slot, and take another order of eviction."""
        for slot in self.slots.values():
            try:
                self._file.drop(slot)
            except OSError as error:
                self.errors += 1
                logger.warning("a block may be on disk again upon opening: %s", error)
        self._free += self.slots.values()
        self.slots = {}
        self.order = order

    def flush(self) -> None:
        """Wait until all that was written is on the disk itself."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _forget(self, hashes: Iterable[int]) -> list[int]:
        freed = []
        for hash in hashes:
            freed.append(self.slots.pop(hash))
            self.order.remove(hash)
        return freed

    def _memory(self, page: int) -> list[memoryview]:
        """Return the bytes of a host page, K and V and scales, where they lie."""
        return [
            memoryview(pieces[(page, *place)])
            for pieces in self._pieces
            for place in np.ndindex(pieces.shape[1:-1])
        ]


def _pieces(part: ArrayView) -> np.ndarray[Any, Any]:
    """View (pages, layers, page_size, heads, width) as uint8 (pages, ..., bytes a piece).

    What lies together is one piece: a whole page, or in the layout "layer_first" one layer of it.
    """
    num_bytes = part.itemsize
    axes = [(abs(s), n) for n, s in zip(part.shape[1:], part.strides[1:], strict=True) if n > 1]
    axes.sort()
    while axes and axes[0][0] == num_bytes:
        num_bytes *= axes.pop(0)[1]
    outer = axes[::-1]
    back = sum(min(0, s * (n - 1)) for n, s in zip(part.shape[1:], part.strides[1:], strict=True))
    shape = (part.shape[0], *(n for _, n in outer), num_bytes)
    strides = (part.strides[0], *(step for step, _ in outer), 1)
    return array_at(part.owner, part.pointer + back, shape, np.dtype(np.uint8), strides)


def _axes_in_memory(part: ArrayView) -> str:
    """Return the order of layers, slots, heads and width, the outermost first."""
    order = sorted(range(1, part.ndim), key=lambda axis: -abs(part.strides[axis]))
    return "".join("PLSHD"[axis] for axis in order if part.shape[axis] > 1)


def _identity(pool: Pool) -> dict[str, str]:
    """Return what the bytes of a page mean."""
    parts = (*pool.parts, *pool.scale_parts)
    # Of arrays of others the axes may lie in any order.
    axes = {"axes": ", ".join(map(_axes_in_memory, parts))} if pool.is_wrapped else {}
    return {
        **axes,
        "pool": type(pool).__name__,
        "layout": pool.layout,
        "formats": ", ".join(part.format for part in parts),
        "shapes": ", ".join("x".join(map(str, part.shape[1:])) for part in parts),
        "page_bytes": str(pool.page_bytes),
    }
