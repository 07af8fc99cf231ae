"""Blocks in a file: written in a crash-safe order, and verified when they are read."""

from __future__ import annotations

import errno
import io
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ... import observe
from ...arrays import ArrayView, array_at, bytes_of
from ...config import cache_logger
from ...errors import ProcessLocal, file_path
from ...formats import stored_as
from ...observe import Access
from ...ops import checks
from ..threads import Helpers
from . import disk_format
from .disk_format import Layout, Record

if TYPE_CHECKING:
    from ..pool import Pool
    from .policies import Policy

Buffer = memoryview | Sequence[memoryview]  # one page: whole, or its parts in order
Item = tuple[int, int, Buffer]  # slot, hash of the block, memory
Parts = list[memoryview]  # one page as bytes

_Job = tuple[Any, ...]
_Result = TypeVar("_Result")

_MAX_PARTS = 1024  # buffers per system call


class DiskBlocks:
    """The disk tier of a cache: the blocks in the slots of a file, and their eviction order.

    The caller holds a lock. The CPU accesses the pages: no transfer may write pages that are being
    written to disk, or access pages that are being read from it.

    Parameters
    ----------
    pool : the host pool

    Attributes
    ----------
    slots : by hash
    num_slots, page_bytes : as in `DiskTier`
    read_bytes, read_s, written_bytes, write_s : cumulative bytes and seconds
    errors : number of failed writes and damaged blocks
    """

    def __init__(self, path: Any, num_bytes: int, pool: Pool, order: Policy) -> None:
        if any(part.device != "host" for part in (*pool.parts, *pool.scale_parts)):
            raise ValueError("host_pool: expected memory of the host where there is a disk")
        self._pool = pool
        self._pieces = [_pieces(bytes_of(part)) for part in (*pool.parts, *pool.scale_parts)]
        Layout.fit(num_bytes, pool.page_bytes, "disk_bytes")  # an error names the user's argument
        self._file = DiskTier(path, num_bytes, pool.page_bytes, _identity(pool))
        self.num_slots, self.page_bytes = self._file.num_slots, pool.page_bytes
        self.order = order
        self.slots: dict[int, int] = {}
        self.read_bytes = self.written_bytes = self.errors = 0
        self.read_s = self.write_s = 0.0
        for hash, slot in self._file.entries():  # oldest first; the newest of a hash counts
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
        """Choose up to `count` blocks to evict, in order; they stay until they are evicted."""
        if count <= 0:
            return []
        return list(islice((h for h in self.order.victims() if h not in keep), count))

    def evict(self, hashes: Iterable[int]) -> None:
        """Forget blocks, and free their slots."""
        self._free += self._forget(hashes)

    def use(self, hashes: Sequence[int]) -> None:
        """Mark blocks as used, from the last block of a prefix to the first."""
        slots, touch = self.slots, self.order.touch
        for hash in reversed(hashes):
            if hash in slots:
                touch(hash)

    def write(self, pages: Mapping[int, int]) -> dict[int, OSError]:
        """Write host pages, by hash, to free slots; return the errors by hash.

        Enough slots must be free.
        """
        started = time.perf_counter()
        slots = [self._free.pop() for _ in pages]
        try:
            results = self._write(slots, list(pages), list(pages.values()))
        except (
            BaseException
        ):  # an interrupt; blocks that were written are found when the file is opened
            self._free += slots
            raise
        failed = {}
        for slot, hash, error in zip(slots, pages, results, strict=True):
            if error is None:
                self.slots[hash] = slot
                self.order.add(hash)
            else:
                failed[hash] = error
                self._free.append(slot)
        if failed:
            self.errors += len(failed)
            first = next(iter(failed.values()))
            cache_logger.warning("%d blocks could not be written to disk: %s", len(failed), first)
        self.written_bytes += self.page_bytes * (len(pages) - len(failed))
        self.write_s += time.perf_counter() - started
        return failed

    def read(self, hashes: Sequence[int], pages: Sequence[int]) -> int:
        """Read blocks into host pages; return the number of leading blocks that were read.

        Damaged blocks are forgotten. The contents of the other pages are undefined.
        """
        started = time.perf_counter()
        whole = self._read(hashes, pages)
        bad = [hash for hash, good in zip(hashes, whole, strict=True) if not good]
        if bad:
            self.errors += len(bad)
            cache_logger.warning("%d blocks on disk are damaged, and forgotten", len(bad))
            self._free += self._forget(bad)
        self.read_bytes += self.page_bytes * (len(hashes) - len(bad))
        self.read_s += time.perf_counter() - started
        return next((i for i, good in enumerate(whole) if not good), len(hashes))

    def clear(self, order: Policy) -> None:
        """Empty every slot, and start with a new eviction order."""
        for slot in self.slots.values():
            try:
                self._file.drop(slot)
            except OSError as error:
                self.errors += 1
                cache_logger.warning("a block may be on disk again upon opening: %s", error)
        self._free += self.slots.values()
        self.slots = {}
        self.order = order

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _forget(self, hashes: Iterable[int]) -> list[int]:
        freed = []
        for hash in hashes:
            freed.append(self.slots.pop(hash))
            self.order.remove(hash)
        return freed

    def _write(
        self, slots: Sequence[int], hashes: Sequence[int], pages: Sequence[int]
    ) -> list[OSError | None]:
        """Write host pages to slots; return the error of each block, or None."""
        return self._file.write_many([
            (slot, hash, self._memory(page))
            for slot, hash, page in zip(slots, hashes, pages, strict=True)
        ])  # fmt: skip

    def _read(self, hashes: Sequence[int], pages: Sequence[int]) -> list[bool]:
        """Read blocks into host pages; return whether each is whole."""
        self.announce("read from disk", pages, is_read=False)
        whole = self._file.read_many([
            (self.slots[hash], hash, self._memory(page))
            for hash, page in zip(hashes, pages, strict=True)
        ])  # fmt: skip
        self._pool.note_written()
        return whole

    def announce(self, name: str, pages: Iterable[int], *, is_read: bool) -> None:
        """Notify order checkers that the CPU reads or writes pages."""
        if observe.order_observers:
            parts = (*self._pool.parts, *self._pool.scale_parts)
            accesses = [Access(part[page], name="host_pool") for page in pages for part in parts]
            observe.touched_by_host(name, *((accesses, ()) if is_read else ((), accesses)))

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


def _axes_in_memory(part: ArrayView) -> str:
    """Return the order of layers, slots, heads and width, the outermost first."""
    order = sorted(range(1, part.ndim), key=lambda axis: -abs(part.strides[axis]))
    return "".join("PLSHD"[axis] for axis in order if part.shape[axis] > 1)


def _identity(pool: Pool) -> dict[str, str]:
    """Describe the format of a page."""
    parts = (*pool.parts, *pool.scale_parts)
    # The axes of wrapped arrays may be stored in any order.
    axes = {"axes": ", ".join(map(_axes_in_memory, parts))} if pool.is_wrapped else {}
    return {
        **axes,
        "pool": type(pool).__name__,
        "layout": pool.layout,
        "formats": ", ".join(stored_as(part.format, part.rotated_width) for part in parts),
        "shapes": ", ".join("x".join(map(str, part.shape[1:])) for part in parts),
        "page_bytes": str(pool.page_bytes),
    }


# --- The file ---


class DiskTier(ProcessLocal):
    """Keeps blocks in the slots of one file, each under its hash.

    A record is emptied before its payload is written, and written after it, so the table never
    has the record of an incomplete payload.

    Parameters
    ----------
    path : path of the file, created if it does not exist
    num_bytes : size of the file, which is allocated at once and has as many slots as fit
    page_bytes : bytes per block, below 2**32
    identity : description of a block, such as layout, format and shape, in at most about 4000
        bytes; reopening the file requires the same identity
    num_threads : number of threads of `read_many` and `write_many`, including the caller's

    Attributes
    ----------
    path, num_slots, page_bytes

    Raises
    ------
    TypeError, ValueError : an argument is invalid. `disk`: the file is not a disk tier's, its
        header is damaged, or it has another version, identity or size
    BlockingIOError : another process, or another tier, has the file open
    OSError : the disk is full, or the file cannot be opened

    Notes
    -----
    Threads may share a tier. The caller orders operations on one slot; if they overlap, reads of
    the slot may return False, but never wrong data.

    A killed process loses only the blocks that it was writing. After a system failure, blocks
    written before the last completed `flush` are intact; later ones may be missing. The file stays
    locked while a forked child has it open.

    A page is contiguous memory, or a sequence of contiguous parts with the total size of a page;
    the parts may differ between write and read. The memory is in use until the call returns.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> page, copy = memoryview(b"12345678"), memoryview(bytearray(8))
    >>> with DiskTier(folder.name + "/kv", 2**20, 8, {"format": "int8"}) as disk:
    ...     disk.write(3, 0xFEED, page)
    >>> with DiskTier(folder.name + "/kv", 2**20, 8, {"format": "int8"}) as disk:
    ...     disk.entries() == [(0xFEED, 3)], disk.read(3, 0xFEED, copy), bytes(copy)
    (True, True, b'12345678')
    >>> folder.cleanup()
    """

    def __init__(
        self, path: str | os.PathLike[str], num_bytes: int, page_bytes: int,
        identity: Mapping[str, str], *,
        num_threads: int = 4,
    ) -> None:  # fmt: skip
        named = {"num_bytes": num_bytes, "page_bytes": page_bytes, "num_threads": num_threads}
        for name, value in named.items():
            checks.require_int(value, name)
        if num_threads < 1:
            raise ValueError(f"num_threads: expected at least 1, got {num_threads}")
        self._layout = Layout.fit(int(num_bytes), int(page_bytes))
        self.num_slots, self.page_bytes = self._layout.num_slots, self._layout.page_bytes
        self.path = file_path(path, "disk")
        self._records: dict[int, Record] = {}  # valid records, by slot
        self._changed = threading.Condition()  # guards the records and the next two fields
        self._num_users = 0  # calls in progress
        self._closed = False
        header = disk_format.encode_header(self._layout, identity)
        self._file = _open_locked(self.path)
        try:
            with self._naming_file():
                if self._file.seek(0, os.SEEK_END):
                    self._load(identity)
                else:
                    self._make(header)
        except BaseException:
            self._file.close()
            raise
        newest = max((record.generation for record in self._records.values()), default=0)
        self._generations = itertools.count(newest + 1)
        self._helpers = Helpers(int(num_threads) - 1, "kvcupy disk")

    def __repr__(self) -> str:
        used = len(self._records)
        return f"<DiskTier {self.path}, {used} of {self.num_slots} slots of {self.page_bytes} B>"

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def entries(self) -> list[tuple[int, int]]:
        """Return hash and slot of every block, in the order of their writes.

        After opening, these are the records of the file; payloads are verified when they are read.
        A hash that was written to two slots is listed twice.
        """
        with self._using(), self._changed:
            records = list(self._records.values())
        records.sort(key=lambda record: record.generation)
        return [(record.hash, record.slot) for record in records]

    # --- One block ---

    def write(self, slot: int, hash: int, data: Buffer) -> None:
        """Write a block to a slot, replacing its previous block.

        Raises
        ------
        TypeError, ValueError : an argument is invalid; nothing has changed
        OSError : the write failed. The slot is empty, and other slots are unchanged
        """
        job = self._job(slot, hash, data, "data")
        with self._using():
            self._write(*job, next(self._generations))

    def read(self, slot: int, hash: int, into: Buffer) -> bool:
        """Read a block into writable memory, if the slot has it undamaged.

        Returns
        -------
        False if the slot is empty or has another hash; or if its payload cannot be read or is
            damaged, and then the slot is emptied. The contents of `into` are then undefined

        Raises
        ------
        TypeError, ValueError : an argument is invalid
        """
        job = self._job(slot, hash, into, "into")
        with self._using():
            return self._read(*job)

    def drop(self, slot: int) -> None:
        """Empty a slot.

        Raises
        ------
        TypeError, ValueError : `slot` is out of range
        OSError : the write failed; the file may have the block when it is reopened
        """
        slot = self._slot(slot)
        with self._using(), self._naming_file():
            self._invalidate(slot)

    # --- Many blocks ---

    def write_many(self, items: Iterable[Item]) -> list[OSError | None]:
        """Write blocks concurrently; `entries` lists them in the order of the items.

        Returns
        -------
        for each block None, or the error of its write

        Raises
        ------
        TypeError, ValueError : an item is invalid, or two items have the same slot; nothing has
            changed
        """
        jobs = [self._job(slot, hash, data, "data") for slot, hash, data in items]
        slots = [slot for slot, _, _ in jobs]
        if len(set(slots)) < len(slots):
            raise ValueError(f"items: expected no slot twice, got slots {slots}")

        def write(*job: Any) -> OSError | None:
            try:
                self._write(*job)
            except OSError as error:
                return error
            return None

        with self._using():
            return self._share(write, [(*job, next(self._generations)) for job in jobs])

    def read_many(self, items: Iterable[Item]) -> list[bool]:
        """Read blocks concurrently; return the result of `read` for each."""
        jobs = [self._job(slot, hash, into, "into") for slot, hash, into in items]
        with self._using():
            return self._share(self._read, jobs)

    def _share(self, work: Callable[..., _Result], jobs: Sequence[_Job]) -> list[_Result]:
        """Do jobs in several threads, including this one; return when all of them are done."""
        results: dict[int, _Result] = {}

        def do(number: int) -> None:
            results[number] = work(*jobs[number])

        self._helpers.each(do, range(len(jobs)), min(self._helpers.count, len(jobs) - 1))
        return [results[number] for number in range(len(jobs))]

    # --- The file ---

    def flush(self) -> None:
        """Wait until all written data is on the disk.

        Raises
        ------
        OSError : the disk failed; data written since the last `flush` may be lost
        """
        with self._using(), self._naming_file() as descriptor:
            os.fsync(descriptor)

    def close(self) -> None:
        """Close the file when the calls of other threads have ended. Idempotent.

        Without `flush`, written data survives the end of the process, but not a system failure.
        """
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._num_users)
        self._file.close()
        self._helpers.close()

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the file open during a call; ValueError if it is closed."""
        with self._changed:
            if self._closed:
                raise ValueError(f"disk: expected an open tier, got {self.path} after close()")
            self._num_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    @contextmanager
    def _naming_file(self) -> Iterator[int]:
        """Yield the file descriptor; OSErrors name the file."""
        try:
            yield self._file.fileno()
        except OSError as error:
            error.filename = str(self.path)
            raise

    # --- Arguments ---

    def _job(self, slot: int, hash: int, memory: Buffer, name: str) -> tuple[int, int, Parts]:
        """Check the arguments of a read ("into") or a write ("data")."""
        slot = self._slot(slot)
        checks.require_int(hash, "hash")
        return slot, disk_format.require_hash(hash), self._parts(memory, name)

    def _slot(self, slot: int) -> int:
        checks.require_int(slot, "slot")
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot: expected 0 to {self.num_slots - 1}, got {slot}")
        return int(slot)

    def _parts(self, memory: Buffer, name: str) -> Parts:
        """Return memory as bytes, in non-empty parts."""
        parts = []
        for view in [memory] if isinstance(memory, memoryview) else memory:
            if not isinstance(view, memoryview):
                raise TypeError(f"{name}: expected memoryviews, got {type(view).__name__}")
            if not view.c_contiguous:
                raise ValueError(f"{name}: expected contiguous memory, got strides {view.strides}")
            if name == "into" and view.readonly:
                raise ValueError(f"{name}: expected writable memory, got a read-only view")
            if view.nbytes:
                parts.append(view.cast("B"))
        num_bytes = sum(map(len, parts))
        if num_bytes != self.page_bytes:
            raise ValueError(f"{name}: expected {self.page_bytes} bytes, got {num_bytes}")
        return parts

    # --- Slots, with checked arguments, while the file is open ---

    def _write(self, slot: int, hash: int, parts: Parts, generation: int) -> None:
        """Write a block; OSError leaves the slot empty."""
        checksum = disk_format.checksum(hash, parts)
        record = Record(hash, generation, slot, self.page_bytes, checksum)
        encoded = memoryview(disk_format.encode_record(record))
        with self._naming_file() as descriptor:
            self._invalidate(slot)
            _write_all(descriptor, parts, self._layout.payload_at(slot))
            with self._changed:
                _write_all(descriptor, [encoded], self._layout.record_at(slot))
                self._records[slot] = record

    def _read(self, slot: int, hash: int, parts: Parts) -> bool:
        """Read a block; empty the slot if the payload is unreadable or damaged."""
        record = self._records.get(slot)
        if record is None or record.hash != hash:
            return False
        try:
            there = _read_all(self._file.fileno(), parts, self._layout.payload_at(slot))
        except OSError as error:
            cache_logger.warning("slot %d of %s cannot be read: %s", slot, self.path, error)
            there = False
        if there and disk_format.checksum(hash, parts) == record.checksum:
            return True
        try:
            self._invalidate(slot, only=record)
        except OSError as error:  # the damage is found again after reopening
            cache_logger.warning("slot %d of %s cannot be emptied: %s", slot, self.path, error)
        return False

    def _invalidate(self, slot: int, only: Record | None = None) -> None:
        """Empty a slot; with `only`, not if another record has replaced it."""
        with self._changed:
            if only is not None and self._records.get(slot) is not only:
                return  # another write has replaced it
            self._records.pop(slot, None)
            empty = memoryview(disk_format.NO_RECORD)
            _write_all(self._file.fileno(), [empty], self._layout.record_at(slot))

    def _make(self, header: bytes) -> None:
        """Initialise an empty file."""
        descriptor = self._file.fileno()
        try:
            _write_all(descriptor, [memoryview(header)], 0)
            os.fsync(descriptor)  # before any block depends on it
            _allocate(descriptor, self._layout.num_bytes)
        except BaseException:
            os.ftruncate(descriptor, 0)
            self.path.unlink(missing_ok=True)
            raise

    def _load(self, identity: Mapping[str, str]) -> None:
        """Check a file, and read its records."""
        descriptor, layout = self._file.fileno(), self._layout
        size = os.fstat(descriptor).st_size
        header = os.pread(descriptor, disk_format.BLOCK_BYTES, 0)
        disk_format.check_header(header, layout, identity, self.path)
        _allocate(descriptor, layout.num_bytes)  # truncated, or its creation was interrupted
        table = memoryview(bytearray(layout.table_bytes))
        _read_all(descriptor, [table], layout.record_at(0))
        for slot in range(layout.num_slots):
            start = slot * disk_format.RECORD_BYTES
            raw = table[start : start + disk_format.RECORD_BYTES]
            if raw == disk_format.NO_RECORD:
                continue
            record = disk_format.decode_record(raw, layout, slot)
            if record is not None and layout.payload_at(slot) + record.num_bytes <= size:
                self._records[slot] = record


# --- System calls ---


def _open_locked(path: Path) -> io.FileIO:
    """Open a file for reading and writing, create it if necessary, and lock it.

    Raises
    ------
    BlockingIOError : another process or another tier has it open
    ValueError : `path` is not a regular file
    OSError : it cannot be opened, or the system lacks file locks or vectored I/O
    """
    try:
        import fcntl
    except ImportError:
        fcntl = None  # type: ignore[assignment]
    if fcntl is None or not hasattr(os, "preadv"):
        raise OSError(errno.ENOTSUP, "disk: expected a system with flock and preadv", str(path))
    while True:
        # Only readable by the owner, since keys and values reveal prompts.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        file = io.FileIO(descriptor, "r+b")
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError(f"disk: expected the name of a file, got {path}")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BlockingIOError(
                    error.errno, "disk: expected a file that no other tier has open", str(path)
                ) from None
            if _is_at(descriptor, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # the previous owner of the lock removed the file


def _allocate(descriptor: int, num_bytes: int) -> None:
    """Extend a file, with its space allocated if the file system can do that."""
    if os.fstat(descriptor).st_size >= num_bytes:
        return
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    os.ftruncate(descriptor, num_bytes)  # then only writes report a full disk


def _write_all(descriptor: int, parts: list[memoryview], offset: int) -> None:
    """Write all parts at an offset of a file."""
    while parts:
        done = os.pwritev(descriptor, parts[:_MAX_PARTS], offset)
        if not done:
            raise OSError(errno.EIO, "nothing was written")
        parts, offset = _after(parts, done), offset + done


def _read_all(descriptor: int, parts: list[memoryview], offset: int) -> bool:
    """Fill parts from an offset of a file; return False if the file ends before."""
    while parts:
        done = os.preadv(descriptor, parts[:_MAX_PARTS], offset)
        if not done:
            return False
        parts, offset = _after(parts, done), offset + done
    return True


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    """Return the parts without their first `done` bytes."""
    for i, part in enumerate(parts):
        if done < len(part):
            return [part[done:], *parts[i + 1 :]]
        done -= len(part)
    return []


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether a path still refers to an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
