"""The disk tier of a cache: blocks in the slots of a file, and their moves to and from pages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import observe
from ...arrays import ArrayView, array_at, bytes_of
from ...config import BoundedLog, cache_logger
from ...formats import stored_as
from ...observe import Access
from ...waiting import Latch
from .changes import Listener, Removed, Stored, announce
from .disk import DiskTier
from .disk_format import Layout

if TYPE_CHECKING:
    from ..identity import PoolIdentity
    from ..pool import Pool
    from .order import EvictionOrder

_MAX_FAILURES = 5  # in a row; then the disk is skipped for a while
_SKIP_S = 10.0
_MAX_CHECKED = 16  # blocks verified at once, each in separate memory


class DiskMove:
    """Blocks on their way between host pages and slots of the file.

    Begun with the lock of the cache, `run` without it, landed with it again. Until it has ended,
    the pages have no other user, and the slots no other block.

    Attributes
    ----------
    is_read : whether blocks move from disk to host memory
    pages : by hash; a write holds its pages in the host tier; a check, which reads blocks only to
        verify them, has none
    slots : by hash
    arrived : hashes of blocks that are whole at their destination, after `run`
    failed : errors of the system by hash, after `run`; blocks in neither were damaged, or an
        interrupt ended `run`
    seconds : duration of `run`
    completed : whether `run` has returned
    over : set when the move has ended
    thread : identifier of the thread that carries it out
    """

    def __init__(
        self, pages: Mapping[int, int], slots: Mapping[int, int], *, is_read: bool
    ) -> None:
        self.is_read = is_read
        self.pages, self.slots = dict(pages), dict(slots)
        self.arrived: list[int] = []
        self.failed: dict[int, OSError] = {}
        self.seconds, self.completed = 0.0, False
        self.over = Latch()
        self.thread = threading.get_ident()

    @property
    def ends_on_landing(self) -> bool:
        """Whether its pages are free after `land`: it is a write or a check."""
        return not (self.is_read and self.pages)


class DiskBlocks:
    """The blocks in the file of a cache, their eviction order, and moves in flight.

    All methods require the lock of the cache, except `run`, `flush` and `close`. The CPU accesses
    the pages of a move: no transfer may write pages that are being written to disk, or access pages
    that are being read from it.

    Parameters
    ----------
    pool : the host pool
    identity : of the pool
    encryption_key : None, or 32 bytes

    Attributes
    ----------
    slots : by hash
    unverified : hashes found in the file and not read since. After a power failure a record may be
        whole and its block torn
    num_slots, page_bytes : as in `DiskTier`
    moves : moves in flight, oldest first
    listeners : called with blocks that enter and leave; the cache has the same list
    read_bytes, read_s, written_bytes, write_s : cumulative bytes and seconds
    errors : number of failed reads and writes, and of damaged blocks
    """

    def __init__(
        self, path: Any, num_bytes: int, pool: Pool, order: EvictionOrder, identity: PoolIdentity,
        encryption_key: bytes | None = None,
    ) -> None:  # fmt: skip
        if any(part.device != "host" for part in (*pool.parts, *pool.scale_parts)):
            raise ValueError("host_pool: expected memory of the host where there is a disk")
        self._pool = pool
        self._pieces = [_pieces(bytes_of(part)) for part in (*pool.parts, *pool.scale_parts)]
        Layout.fit(num_bytes, pool.page_bytes, "disk_bytes")  # an error names the user's argument
        has_all_heads = identity.num_kv_heads == identity.total_kv_heads
        is_plain = has_all_heads and not identity.model and encryption_key is None
        self._file = DiskTier(
            path, num_bytes, pool.page_bytes, _description(pool, identity),
            previous=_previous_description(pool) if is_plain else None,
            encryption_key=encryption_key,
        )  # fmt: skip
        self.num_slots, self.page_bytes = self._file.num_slots, pool.page_bytes
        self.order = order
        self.slots: dict[int, int] = {}
        self.unverified: set[int] = set()
        self.moves: list[DiskMove] = []
        self.listeners: list[Listener] = []
        self.read_bytes = self.written_bytes = self.errors = 0
        self.read_s = self.write_s = 0.0
        self._num_failures = 0  # in a row
        self._skip_until = 0.0
        self._log = BoundedLog(cache_logger)
        for hash, slot in self._file.entries():  # oldest first; the newest of a hash counts
            self._forget([hash] if hash in self.slots else [])
            self.slots[hash] = slot
            order.touch([hash])
        self.unverified.update(self.slots)
        used = set(self.slots.values())
        self._free = [slot for slot in reversed(range(self._file.num_slots)) if slot not in used]

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> bool:
        """Whether to use the disk, which is skipped for a while after failures in a row."""
        return not self._skip_until or time.monotonic() >= self._skip_until

    def choose(self, count: int, keep: Container[int] = ()) -> list[int]:
        """Choose up to `count` blocks to evict, in order; they stay until they are evicted."""
        if count <= 0:
            return []
        reading = {hash for move in self.moves if move.is_read for hash in move.slots}
        victims = (h for h in self.order if h not in keep and h not in reading)
        return list(islice(victims, count))

    def evict(self, hashes: Iterable[int]) -> None:
        """Forget blocks, and free their slots."""
        self._free += self._forget(hashes)

    def use(self, hashes: Sequence[int]) -> None:
        """Mark blocks as used, from the last block of a prefix to the first."""
        self.order.touch([hash for hash in reversed(hashes) if hash in self.slots])

    # --- Moves ---

    def wait_for_others(self) -> Callable[[], object] | None:
        """Return a function that waits for a move of another thread, or None."""
        thread = threading.get_ident()
        return next((move.over.wait for move in self.moves if move.thread != thread), None)

    def begin_write(self, pages: Mapping[int, int]) -> DiskMove:
        """Begin to write host pages, by hash, to free slots; enough slots must be free."""
        slots = {hash: self._free.pop() for hash in pages}
        return self._begin(DiskMove(pages, slots, is_read=False))

    def begin_read(self, hashes: Sequence[int], pages: Iterable[int]) -> DiskMove:
        """Begin to read blocks to host pages."""
        slots = {hash: self.slots[hash] for hash in hashes}
        return self._begin(DiskMove(dict(zip(hashes, pages, strict=True)), slots, is_read=True))

    def begin_check(self, hashes: Sequence[int]) -> DiskMove:
        """Begin to verify blocks, some of the first; those that are not whole are forgotten."""
        slots = {hash: self.slots[hash] for hash in hashes[:_MAX_CHECKED]}
        return self._begin(DiskMove({}, slots, is_read=True))

    def _begin(self, move: DiskMove) -> DiskMove:
        self.moves.append(move)
        return move

    def run(self, move: DiskMove) -> None:
        """Read or write the blocks of a move."""
        started = time.perf_counter()
        if move.is_read:
            self.announce("read from disk", move.pages.values(), is_read=False)
        items = [
            (slot, hash, self._memory(move.pages[hash]) if move.pages else self._scratch())
            for hash, slot in move.slots.items()
        ]
        results: Sequence[bool | OSError | None]
        if move.is_read:
            results = self._file.read_many(items)
            self._pool.note_written()
        else:
            results = self._file.write_many(items)
        for hash, result in zip(move.slots, results, strict=True):
            if isinstance(result, OSError):
                move.failed[hash] = result
            elif result is not False:
                move.arrived.append(hash)
        move.seconds = time.perf_counter() - started
        move.completed = True

    def land(self, move: DiskMove) -> None:
        """Record what has arrived; the pages stay in use until `finish`."""
        num_bytes, arrived = self.page_bytes * len(move.arrived), set(move.arrived)
        if move.is_read:
            self.read_bytes += num_bytes
            self.read_s += move.seconds
            self.unverified -= arrived
        else:
            self.written_bytes += num_bytes
            self.write_s += move.seconds
            # An interrupted write may be found when the file is opened.
            self._free += [slot for hash, slot in move.slots.items() if hash not in arrived]
            for hash in move.arrived:
                self.slots[hash] = move.slots[hash]
            self.order.touch(move.arrived)
            if self.listeners and move.arrived:
                announce(self.listeners, Stored("disk", move.arrived))
        if not move.completed:
            return
        damaged = [
            hash
            for hash, slot in move.slots.items()
            if hash not in arrived
            and self.slots.get(hash) == slot  # else it is forgotten already
            and (hash not in move.failed or not move.pages)  # a newer copy replaces it
        ]
        if damaged:
            self.errors += len(damaged)
            self._log.warning("%d blocks on disk are damaged, and forgotten", len(damaged))
            self._free += self._forget(damaged)
        self._judge(move)

    def finish(self, move: DiskMove) -> None:
        """End a move, whose pages have another owner now."""
        self.moves.remove(move)
        move.over.set()

    def _judge(self, move: DiskMove) -> None:
        """Count failures, and skip the disk after several in a row."""
        self.errors += len(move.failed)
        for hash in move.slots:
            self._num_failures = self._num_failures + 1 if hash in move.failed else 0
        if self._num_failures >= _MAX_FAILURES:
            self._skip_until = time.monotonic() + _SKIP_S
        if move.failed:
            verb, error = "read" if move.is_read else "written", next(iter(move.failed.values()))
            self._log.warning("%d blocks could not be %s: %s", len(move.failed), verb, error)

    # --- The file ---

    def clear(self, order: EvictionOrder) -> None:
        """Empty every slot, and start with a new eviction order. No move may be in flight."""
        for _, slot in self._file.entries():  # also older copies in free slots
            try:
                self._file.drop(slot)
            except OSError as error:
                self.errors += 1
                self._log.warning("a block may be on disk again upon opening: %s", error)
        self._free += self.slots.values()
        self.slots, self.unverified = {}, set()
        self.order = order

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _forget(self, hashes: Iterable[int]) -> list[int]:
        hashes, freed = list(hashes), []
        for hash in hashes:
            freed.append(self.slots.pop(hash))
            self.unverified.discard(hash)
        self.order.remove(hashes)
        if self.listeners and hashes:
            announce(self.listeners, Removed("disk", hashes))
        return freed

    def announce(self, name: str, pages: Iterable[int], *, is_read: bool) -> None:
        """Notify order checkers that the CPU reads or writes pages."""
        if observe.order_observers:
            parts = (*self._pool.parts, *self._pool.scale_parts)
            accesses = [Access(part[page], name="host_pool") for page in pages for part in parts]
            observe.touched_by_host(name, *((accesses, ()) if is_read else ((), accesses)))

    def _scratch(self) -> list[memoryview]:
        return [memoryview(bytearray(self.page_bytes))]

    def _memory(self, page: int) -> list[memoryview]:
        """Return the bytes of a page, K and V and scales, without a copy."""
        return [
            memoryview(pieces[(page, *place)])
            for pieces in self._pieces
            for place in np.ndindex(pieces.shape[1:-1])
        ]


def _pieces(part: ArrayView) -> np.ndarray[Any, Any]:
    """View (pages, layers, page_size, heads, width) as uint8 (pages, ..., bytes per piece).

    A piece is contiguous: a whole page, or in the layout "layer_first" one layer of it.
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


def _axes(pool: Pool) -> dict[str, str]:
    """Describe the order of axes in memory, if it does not follow from the layout."""
    parts = (*pool.parts, *pool.scale_parts)
    return {"axes": ", ".join(map(_axes_in_memory, parts))} if pool.is_wrapped else {}


def _axes_in_memory(part: ArrayView) -> str:
    """Return the order of layers, slots, heads and width, the outermost first."""
    order = sorted(range(1, part.ndim), key=lambda axis: -abs(part.strides[axis]))
    return "".join("PLSHD"[axis] for axis in order if part.shape[axis] > 1)


def _description(pool: Pool, identity: PoolIdentity) -> dict[str, str]:
    """Describe the blocks of a pool, for the header of their file."""
    fields = {name: str(value) for name, value in asdict(identity).items() if name != "kind"}
    return {**fields, "pool": type(pool).__name__, "layout": pool.layout, **_axes(pool)}


def _previous_description(pool: Pool) -> dict[str, str]:
    """Describe the blocks of a pool as version 1 of the file does."""
    parts = (*pool.parts, *pool.scale_parts)
    return {
        **_axes(pool),
        "pool": type(pool).__name__,
        "layout": pool.layout,
        "formats": ", ".join(stored_as(part.format, part.rotated_width) for part in parts),
        "shapes": ", ".join("x".join(map(str, part.shape[1:])) for part in parts),
        "page_bytes": str(pool.page_bytes),
    }
