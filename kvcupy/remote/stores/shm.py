"""Shared-memory backend: blocks in a file that processes of one machine map, without a server.

    0        4096       records_at        payloads_at
    | header | buckets  | record 0 | ...  | payload 0 |   | payload 1 |  ...
      4096 B   8 B each   256 B each        block_bytes each, at multiples of 4096

A bucket has 32 bits of a key's hash and a slot (open addressing, linear probing). The record of a
slot has the key, the header, and a generation, which is odd while the slot is being written.
Numbers are in native byte order.

Readers take no lock: they read the generation, copy the block, and check the generation again.
Writers hold a file lock for some blocks at a time; the system releases it when a writer dies. A
writer marks the file dirty before changing it, and clean at the end. If a writer dies, the next
process that takes the lock rebuilds the buckets from the records, and drops the slots that were
being written.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import os
import re
import stat
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...cache.threads import Helpers, Users
from ...config import cache_logger
from ...errors import ProcessLocal, file_path
from ...ops import checks
from ..identity import KEY_BYTES
from ..wire import WirePages
from .backend import (
    FAILED,
    FULL,
    KNOWN,
    MAX_HEADER_BYTES,
    STORED,
    BackendLost,
    Block,
    SummedBlock,
)

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

VERSION = 1
HEADER_BYTES = 4096
RECORD_BYTES = 256

_MAGIC = b"kvcupysm"
_HEADER = struct.Struct("=8sIIQQQ16s")  # magic, version, record, block bytes, slots, buckets, id
_DIGEST_BYTES = 16
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_FOLDER = "/dev/shm"

_WORDS_AT = 2048  # offset of the mutable words of the header
_DIRTY, _HIGH_WATER, _HAND, _FREE, _NUM_BLOCKS, _EVICTED, _RECOVERED, _WAITING = range(8)

# Start of a record: generation, length, key, length of the header.
_RECORD = struct.Struct(f"@QQ{KEY_BYTES}sQ")
_DESCRIPTION = struct.Struct(f"@Q{KEY_BYTES}sQQQ")  # fields after the generation, up to `_USED`
# Words of a record. `_NEXT` links free slots: the number of the next one plus one.
_GENERATION, _LENGTH, _KEY, _HEADER_LENGTH, _NEXT, _USED = 0, 1, 2, 6, 7, 8
_RECORD_WORDS = RECORD_BYTES // 8
_KEY_AT, _HEADER_AT = 8 * _KEY, RECORD_BYTES - MAX_HEADER_BYTES

_SLOT_MASK = 2**32 - 1
_FLAGS = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_MIN_NUMPY_PIECE_BYTES = 2**17  # NumPy copies release the GIL, memoryview copies do not
_MIN_THREADED_BYTES = 2**21  # below this, a copy ends before another thread wakes up
_PART_BYTES = 2**19  # fits the CPU cache while it is copied and hashed
_MAX_BATCH_BYTES = 2**24  # bounds the time for which a writer holds the lock
_POLL_S, _MAX_POLL_S = 1e-4, 5e-3
_WAITING_TTL_NS = 5_000_000  # age up to which `_WAITING` means that a process waits for the lock
# After a timed-out wait of at least _STUCK_S, the holder of the lock counts as stopped: for
# _STUCK_TTL_S, calls wait at most _BRIEF_WAIT_S, as long as a live writer holds the lock.
_STUCK_S, _STUCK_TTL_S, _BRIEF_WAIT_S = 0.1, 10.0, 0.05
_MADV_POPULATE_READ = 22  # since Linux 5.14
_MAX_DEFAULT_THREADS = 4


def open_backend(
    url: str, pages: WirePages, *,
    namespace: bytes, capacity_bytes: int | None, deadline: float, folder: Any = _FOLDER,
    threads: int | None = None,
) -> ShmBackend:  # fmt: skip
    """Open "shm:NAME", a file in `folder`; create it if it does not exist."""
    if threads is None:
        threads = default_threads()
    checks.require_int(threads, "threads")
    if not 1 <= threads <= 64:
        raise ValueError(f"threads: expected 1 to 64, got {threads}")
    name = url.removeprefix("shm:")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"url: expected shm:NAME, a name of up to 100 letters, digits and ._- that does not "
            f"start with . or -, got {url!r}"
        )
    path = file_path(folder, "folder") / f"kvcupy-{name}"
    return ShmBackend(path, pages.block_bytes, capacity_bytes, threads=int(threads))


def default_threads() -> int:
    """Return the default number of threads that copy the blocks of a call: at most 4."""
    if hasattr(os, "sched_getaffinity"):
        return min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)))
    return min(_MAX_DEFAULT_THREADS, os.cpu_count() or 1)


class ShmBackend(ProcessLocal):
    """Blocks of equal length in a file that processes map into memory.

    Parameters
    ----------
    path : path of the file, in an in-memory file system
    block_bytes : length of a block
    capacity_bytes : size of the file; None opens an existing file of any size
    threads : number of threads that copy the blocks of one call, including the caller's

    Raises
    ------
    TypeError, ValueError : an argument is invalid, or the file is not a shared store, is truncated,
        belongs to another user, or was made with another capacity or for blocks of another length
    FileNotFoundError : the file does not exist, and `capacity_bytes` is None
    OSError : the file cannot be created, opened or mapped
    """

    put_asks_first = True

    def __init__(
        self, path: Path, block_bytes: int, capacity_bytes: int | None, *, threads: int = 1
    ) -> None:
        if fcntl is None or not hasattr(os, "posix_fallocate"):
            message = "url: expected a system with flock and posix_fallocate for shm:"
            raise OSError(errno.ENOTSUP, message, str(path))
        self.path = path
        layout = None
        if capacity_bytes is not None:
            checks.require_int(capacity_bytes, "capacity_bytes")
            layout = Layout.fit(int(capacity_bytes), block_bytes)
        try:
            self._fd, self._map, layout = _open_mapped(path, block_bytes, capacity_bytes, layout)
        except OSError as error:  # may name a temporary file
            raise OSError(error.errno, error.strerror, str(path)) from error
        self._layout = layout
        self._close_file = weakref.finalize(self, os.close, self._fd)
        self._bytes = memoryview(self._map)
        self._array = np.frombuffer(self._map, np.uint8)
        words = self._bytes[: layout.payloads_at].cast("Q")
        self._words = words[_WORDS_AT // 8 : HEADER_BYTES // 8]
        self._buckets = words[HEADER_BYTES // 8 :][: layout.num_buckets]
        self._records = words[layout.records_at // 8 :]
        self._mask = layout.num_buckets - 1
        self._threads = Users(1)  # flock excludes processes, not threads
        self._holder: object = None  # the thread's entry that holds the lock
        self.blocks_per_get = max(1, _MAX_BATCH_BYTES // layout.block_bytes)
        self._helpers = Helpers(threads - 1, "kvcupy-shared")
        self._putting: _Put | None = None  # the put that holds the lock
        self._is_mapped = bytearray(layout.num_slots)  # slots whose pages this process has mapped
        self._torn = 0
        self._lock_timeouts = 0
        self._stuck_until = -math.inf
        _opened.add(self)

    def __repr__(self) -> str:
        return f"<ShmBackend of {self._layout.num_slots} blocks at {self.path}>"

    # --- Reading, without a lock ---

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self._require_whole()
        return [self._used(self._find(key)) for key in keys]

    def get(
        self, keys: Sequence[bytes], blocks: Sequence[Block], deadline: float
    ) -> list[bytes | None]:
        self._require_whole()
        headers: list[bytes | None] = [None] * len(keys)
        for start in range(0, len(keys), self.blocks_per_get):
            if start and time.monotonic() >= deadline:
                break
            some = range(start, min(start + self.blocks_per_get, len(keys)))
            found = [(i, self._look_up(keys[i], blocks[i])) for i in some]
            reads = [(i, read) for i, read in found if read is not None]
            self._at("copying")
            self._copy(_read_parts, [(blocks[i], read.slot) for i, read in reads])
            for i, read in reads:
                headers[i] = self._confirmed(read)
        return headers

    def _look_up(self, key: bytes, block: Block) -> _Read | None:
        """Locate the block of a key; None if it is missing."""
        slot = self._find(key)
        if slot < 0:
            return None
        record_at = self._layout.record_at(slot)
        generation, length, stored_key, header_length = _RECORD.unpack_from(self._map, record_at)
        if (
            generation & 1
            or stored_key != key
            or length != sum(map(len, block))
            or not 0 < header_length <= MAX_HEADER_BYTES
        ):
            return None
        header = self._map[record_at + _HEADER_AT : record_at + _HEADER_AT + header_length]
        self._records[slot * _RECORD_WORDS + _USED] = 1  # writers evict other slots meanwhile
        return _Read(slot, generation, header)

    def _confirmed(self, read: _Read) -> bytes | None:
        """Return the header of a copied block; None if the block changed during the copy."""
        # On a CPU that reorders loads, a changed block may pass this check; the checksum detects
        # it.
        if self._records[read.slot * _RECORD_WORDS + _GENERATION] != read.generation:
            self._torn += 1
            return None
        return read.header

    def _find(self, key: bytes) -> int:
        """Return the slot of a key, or -1."""
        bucket = self._bucket(key)
        return -1 if bucket < 0 else (self._buckets[bucket] & _SLOT_MASK) - 1

    def _bucket(self, key: bytes) -> int:
        """Return the bucket of a key, or -1."""
        buckets, mask = self._buckets, self._mask
        hash = int.from_bytes(key[:4], "little")
        i = hash & mask
        for _ in range(mask + 1):
            entry = buckets[i]
            if not entry:
                return -1
            if entry >> 32 == hash and self._key((entry & _SLOT_MASK) - 1) == key:
                return i
            i = i + 1 & mask
        return -1

    def _key(self, slot: int) -> bytes | None:
        layout = self._layout
        if not 0 <= slot < layout.num_slots:  # the bucket is damaged
            return None
        start = layout.records_at + slot * RECORD_BYTES + _KEY_AT
        return self._map[start : start + KEY_BYTES]

    def _map_payload(self, slot: int) -> None:
        """Map the memory of a slot with one call, which is much cheaper than a fault per page."""
        start = self._layout.payload_at(slot)
        stop = start + self._layout.stride
        start = start // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError):  # such as an older kernel: accesses then fault
            self._map.madvise(_MADV_POPULATE_READ, start, stop - start)
        self._is_mapped[slot] = 1

    def _copy(self, copy: Callable[[_Parts], None], blocks: Sequence[tuple[Block, int]]) -> None:
        """Copy blocks from or to slots in parts, with several threads if they are large."""
        jobs = [self._parts(block, slot) for block, slot in blocks]
        # For less, waking threads takes longer than the copy, and small parts hold the GIL.
        is_large = len(jobs) > 1 and len(jobs) * self._layout.block_bytes >= _MIN_THREADED_BYTES
        is_helped = is_large and isinstance(jobs[0].pairs[0][0], np.ndarray)
        share = min(self._helpers.count, len(jobs) - 1) if is_helped else 0

        def copy_one(parts: _Parts) -> None:
            copy(parts)
            self._at("piece")

        self._helpers.each(copy_one, jobs, share)

    def _parts(self, block: Block, slot: int) -> _Parts:
        """Pair the parts of a slot with the parts of a block."""
        if not self._is_mapped[slot]:
            self._map_payload(slot)
        start = self._layout.payload_at(slot)
        pairs: list[tuple[Any, Any]] = []
        for piece in block:
            if len(piece) < _MIN_NUMPY_PIECE_BYTES:
                pairs.append((self._bytes[start : start + len(piece)], piece))
                start += len(piece)
                continue
            array = np.frombuffer(piece, np.uint8)
            for first in range(0, len(array), _PART_BYTES):
                part = array[first : first + _PART_BYTES]
                pairs.append((self._array[start : start + len(part)], part))
                start += len(part)
        return _Parts(pairs, block.begin() if isinstance(block, SummedBlock) else None)

    def _used(self, slot: int) -> bool:
        """Return whether a slot has a whole block, and mark it used, which delays its eviction."""
        records, at = self._records, slot * _RECORD_WORDS
        if (
            slot < 0
            or records[at + _GENERATION] & 1
            or records[at + _LENGTH] != self._layout.block_bytes
            or not 0 < records[at + _HEADER_LENGTH] <= MAX_HEADER_BYTES
        ):
            return False
        if not records[at + _USED]:
            records[at + _USED] = 1
        return True

    # --- Writing, with the lock ---

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], headers: Sequence[bytes],
        deadline: float,
    ) -> list[str]:  # fmt: skip
        self._require_whole()
        outcomes = [FAILED] * len(keys)
        new = []
        for i, key in enumerate(keys):
            if self._used(self._find(key)):
                outcomes[i] = KNOWN
            else:
                new.append(i)
        put = _Put(keys, blocks, headers, outcomes)
        for start in range(0, len(new), self.blocks_per_get):
            if start:
                self._yield_lock()
            try:
                if not self._lock(deadline):
                    break
            except BackendLost as error:
                raise BackendLost(str(error), outcomes) from error
            try:
                self._put(put, new[start : start + self.blocks_per_get])
            finally:
                self._unlock()
        return outcomes

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        self._require_whole()
        for key in keys:
            if not self._lock(deadline):
                return
            try:
                bucket = self._bucket(key)
                if bucket >= 0:
                    slot = (self._buckets[bucket] & _SLOT_MASK) - 1
                    self._words[_DIRTY] = 1
                    self._vacate(slot, bucket)
                    self._free(slot)
                    self._words[_DIRTY] = 0
            finally:
                self._unlock()

    def _put(self, put: _Put, numbers: Sequence[int]) -> None:
        """Reserve slots for some blocks of a put, then write the blocks."""
        self._putting = put
        try:
            for i in numbers:
                put.outcomes[i] = self._reserve(put, i)
            self._write_reserved(put)
        finally:
            self._putting = None

    def _reserve(self, put: _Put, i: int) -> str:
        """Reserve a slot for a block, unless it has one; return the outcome of the block."""
        key = put.keys[i]
        if key in put.reserved:
            return KNOWN
        if (slot := self._find(key)) >= 0:
            if self._used(slot):
                return KNOWN
            self._recover()  # this process holds the lock, so the slot is damaged
        if sum(map(len, put.blocks[i])) != self._layout.block_bytes:
            return FULL
        free = self._take_slot(put.kept)
        if free is None:
            return FULL
        self._at("marked")
        self._records[free * _RECORD_WORDS + _GENERATION] |= 1  # odd: readers skip it
        self._at("odd")
        put.reserved[key] = i, free
        put.kept.add(free)
        return STORED

    def _write_reserved(self, put: _Put) -> None:
        """Write the blocks with reserved slots, with several threads, and publish them."""
        reserved, put.reserved = put.reserved, {}
        if not reserved:
            return
        self._copy(_write_parts, [(put.blocks[i], slot) for i, slot in reserved.values()])
        for key, (i, slot) in reserved.items():
            self._publish(key, put.headers[i], slot)
        self._words[_DIRTY] = 0
        self._at("clean")

    def _publish(self, key: bytes, header: bytes, slot: int) -> None:
        """Write the record of a slot, and insert the slot into the buckets."""
        start = self._layout.record_at(slot)
        self._map[start + _HEADER_AT : start + _HEADER_AT + len(header)] = header
        _DESCRIPTION.pack_into(
            self._map, start + 8 * _LENGTH, self._layout.block_bytes, key, len(header), 0, 0
        )
        self._at("described")
        self._records[slot * _RECORD_WORDS + _GENERATION] += 1
        self._at("even")
        self._insert(key, slot)
        self._words[_NUM_BLOCKS] += 1
        self._at("inserted")

    def _take_slot(self, kept: set[int]) -> int | None:
        """Mark the file dirty, and return a slot that is in no bucket; None if the file is full."""
        words, records, num_slots = self._words, self._records, self._layout.num_slots
        for _ in range(2):
            free, fresh = words[_FREE] - 1, words[_HIGH_WATER]
            if free >= 0:
                if free < num_slots and not records[free * _RECORD_WORDS + _LENGTH]:
                    words[_DIRTY] = 1
                    words[_FREE] = records[free * _RECORD_WORDS + _NEXT]
                    return free
            elif fresh < num_slots and self._allocate(fresh):
                if not records[fresh * _RECORD_WORDS + _LENGTH]:
                    words[_DIRTY] = 1
                    words[_HIGH_WATER] = fresh + 1
                    return fresh
            else:
                victim = self._victim(kept)
                if victim is None:
                    return None
                bucket = self._bucket(self._key(victim) or b"")
                if bucket >= 0 and (self._buckets[bucket] & _SLOT_MASK) - 1 == victim:
                    words[_DIRTY] = 1
                    self._at("chosen")
                    self._vacate(victim, bucket)
                    words[_EVICTED] += 1
                    return victim
            self._recover()  # an impossible state: the file is damaged
        return None

    def _allocate(self, slot: int) -> bool:
        """Reserve memory for a slot, so that writes to it cannot fail; False if none is left."""
        try:
            os.posix_fallocate(self._fd, self._layout.payload_at(slot), self._layout.stride)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
                raise
            return False
        return True

    def _victim(self, kept: set[int]) -> int | None:
        """Return the next slot not used since the clock hand passed it."""
        words, records = self._words, self._records
        count = min(words[_HIGH_WATER], self._layout.num_slots)
        hand = words[_HAND] % count if count else 0
        for _ in range(2 * count):
            slot, hand = hand, (hand + 1) % count
            at = slot * _RECORD_WORDS + _USED
            if slot in kept:
                continue
            if not records[at]:
                words[_HAND] = hand
                return slot
            records[at] = 0
        return None

    def _vacate(self, slot: int, bucket: int) -> None:
        """Remove the block of a slot, which is in `bucket`."""
        self._erase(bucket)
        records, at = self._records, slot * _RECORD_WORDS
        records[at + _GENERATION] += 1
        self._at("erased")
        start = self._layout.record_at(slot)
        self._map[start + 8 * _LENGTH : start + _KEY_AT + KEY_BYTES] = bytes(8 + KEY_BYTES)
        records[at + _GENERATION] += 1
        self._words[_NUM_BLOCKS] = max(0, self._words[_NUM_BLOCKS] - 1)

    def _free(self, slot: int) -> None:
        self._records[slot * _RECORD_WORDS + _NEXT] = self._words[_FREE]
        self._words[_FREE] = slot + 1

    def _insert(self, key: bytes, slot: int) -> None:
        buckets, mask = self._buckets, self._mask
        hash = int.from_bytes(key[:4], "little")
        i = hash & mask
        for _ in range(len(buckets)):  # at least twice as many as slots
            if not buckets[i]:
                buckets[i] = hash << 32 | slot + 1
                return
            i = i + 1 & mask

    def _erase(self, bucket: int) -> None:
        """Empty a bucket, and move back later entries that were displaced by it.

        A reader may miss a block while its entry moves.
        """
        buckets, mask = self._buckets, self._mask
        i = empty = bucket
        for _ in range(len(buckets)):
            i = i + 1 & mask
            entry = buckets[i]
            if not entry:
                break
            home = entry >> 32 & mask
            if (i - home & mask) >= (i - empty & mask):
                buckets[empty] = entry
                empty = i
        buckets[empty] = 0

    def _recover(self) -> None:
        """Rebuild the buckets and counters from the records of whole blocks."""
        cache_logger.warning(
            "%s: a write was interrupted, or bytes are damaged; keeping whole blocks", self.path
        )
        if self._putting is not None:  # its slots would be dropped as a dead writer's
            self._write_reserved(self._putting)
        words, buckets = self._words, self._buckets
        words[_DIRTY] = 1
        for i in range(len(buckets)):
            buckets[i] = 0
        words[_FREE] = words[_NUM_BLOCKS] = 0
        self._at("emptied")
        records = np.frombuffer(self._records, np.uint64).reshape(-1, _RECORD_WORDS)
        records = records[: self._layout.num_slots]
        generations, header_lengths = records[:, _GENERATION], records[:, _HEADER_LENGTH]
        whole = generations & np.uint64(1) == 0
        whole &= records[:, _LENGTH] == np.uint64(self._layout.block_bytes)
        whole &= (header_lengths > 0) & (header_lengths <= MAX_HEADER_BYTES)
        for slot in np.flatnonzero(whole).tolist():
            key = self._key(slot)
            assert key is not None
            if self._find(key) < 0:
                self._insert(key, slot)
                words[_NUM_BLOCKS] += 1
            else:
                whole[slot] = False
        generations[~whole] = (generations[~whole] | np.uint64(1)) + np.uint64(1)
        records[~whole, _LENGTH] = 0
        words[_HIGH_WATER] = np.flatnonzero(whole)[-1] + 1 if whole.any() else 0
        for slot in np.flatnonzero(~whole[: words[_HIGH_WATER]]).tolist():
            self._free(slot)
        words[_RECOVERED] += 1
        self._at("rebuilt")
        words[_DIRTY] = 0

    def _at(self, step: str) -> None:
        """Do nothing; a hook for tests, which stop or kill the process here."""

    # --- The lock ---

    def _lock(self, deadline: float) -> bool:
        """Take the lock, and recover the file if the last writer died; False after the deadline.

        If a stopped process holds the lock, one call waits until its deadline; later calls wait
        only briefly for a while.
        """
        holder = self._threads.enter(deadline - time.monotonic())
        if holder is None:
            return False
        self._holder = holder
        pause_s = _POLL_S
        started = time.monotonic()
        if started < self._stuck_until:
            deadline = min(deadline, started + _BRIEF_WAIT_S)
        try:
            while True:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    pass
                now = time.monotonic()
                if now >= deadline:
                    self._lock_timeouts += 1
                    if now - started >= _STUCK_S:
                        self._stuck_until = now + _STUCK_TTL_S
                    self._threads.leave(self._holder)
                    return False
                self._words[_WAITING] = time.monotonic_ns()
                time.sleep(min(pause_s, deadline - now))
                pause_s = min(1.2 * pause_s, _MAX_POLL_S)
        except OSError as error:
            self._threads.leave(self._holder)
            raise BackendLost(f"{self.path}: cannot lock the file: {error}") from error
        except BaseException:
            self._threads.leave(self._holder)
            raise
        self._stuck_until = -math.inf
        try:
            if self._words[_DIRTY]:
                self._recover()
        except BaseException:
            self._unlock()
            raise
        return True

    def _unlock(self) -> None:
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            except OSError:  # closing the descriptor releases the lock, so replace the descriptor
                another = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    os.dup2(another, self._fd, inheritable=False)
                finally:
                    os.close(another)
        finally:
            self._threads.leave(self._holder)

    def _yield_lock(self) -> None:
        """Pause so that another process can take the lock, if one waited for it recently."""
        waiting_ns = self._words[_WAITING]
        if waiting_ns and 0 <= time.monotonic_ns() - waiting_ns < _WAITING_TTL_NS:
            self._words[_WAITING] = 0
            time.sleep(2 * _POLL_S)

    # --- The file ---

    def busy(self, keys: Sequence[bytes]) -> None:
        return None

    def remove(self, deadline: float) -> None:
        """Unlink the file. Its memory is freed when all processes have closed it."""
        if not self._lock(deadline):
            raise BackendLost(f"{self.path}: another process holds its lock")
        try:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._fd), self.path.stat()):
                    self.path.unlink()
        finally:
            self._unlock()

    def close(self) -> None:
        _opened.discard(self)
        if self._fd < 0:
            return
        self._helpers.close()
        views = self._words, self._buckets, self._records, self._bytes
        del self._array
        for release in (*(view.release for view in views), self._map.close):
            with suppress(BufferError):  # a traceback may still refer to it, and then releases it
                release()
        self._close_file()
        self._fd = -1

    def stats(self) -> dict[str, Any]:
        """Return `blocks`, `capacity_blocks`, `bytes` (of memory), `evicted`, `recovered`, `torn`,
        `lock_timeouts`.

        `evicted` and `recovered` (recoveries after a writer died) count all processes; `torn`
        (reads overtaken by a writer) and `lock_timeouts` (calls that did not get the lock in time)
        count this process.
        """
        words = self._words
        return {
            "blocks": words[_NUM_BLOCKS], "capacity_blocks": self._layout.num_slots,
            "bytes": os.fstat(self._fd).st_blocks * 512, "evicted": words[_EVICTED],
            "recovered": words[_RECOVERED], "torn": self._torn,
            "lock_timeouts": self._lock_timeouts,
        }  # fmt: skip

    def _require_whole(self) -> None:
        """Raise if the file was truncated: accessing its memory would then be fatal (SIGBUS)."""
        size = os.fstat(self._fd).st_size
        if size < self._layout.num_bytes:
            raise BackendLost(f"{self.path}: the file was truncated to {size} bytes")


class _Read(NamedTuple):
    """A block to read: its slot, generation and header."""

    slot: int
    generation: int
    header: bytes


class _Parts(NamedTuple):
    """Pairs of parts of a slot and of a block, and the checksum function for the block's parts."""

    pairs: list[tuple[Any, Any]]
    update: Callable[[Any], None] | None


def _read_parts(parts: _Parts) -> None:
    update = parts.update
    for in_slot, in_block in parts.pairs:
        in_block[:] = in_slot
        if update is not None:
            update(in_block)


def _write_parts(parts: _Parts) -> None:
    update = parts.update
    for in_slot, in_block in parts.pairs:
        if update is not None:
            update(in_block)
        in_slot[:] = in_block


class _Put:
    """The blocks of a put, and its progress.

    Attributes
    ----------
    reserved : blocks that have a slot but are not written: (index, slot) by key
    kept : slots of this put, which it must not evict
    """

    def __init__(
        self, keys: Sequence[bytes], blocks: Sequence[Block], headers: Sequence[bytes],
        outcomes: list[str],
    ) -> None:  # fmt: skip
        self.keys, self.blocks, self.headers, self.outcomes = keys, blocks, headers, outcomes
        self.reserved: dict[bytes, tuple[int, int]] = {}
        self.kept: set[int] = set()


# A lock belongs to all processes that inherited its descriptor. Children close theirs, so that the
# death of the parent releases the lock.
_opened: weakref.WeakSet[ShmBackend] = weakref.WeakSet()


def _close_in_child() -> None:
    for backend in list(_opened):
        backend._close_file()
        backend._fd = -1
    _opened.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


# --- The file: its layout, and making one ---


class Layout:
    """Offsets of the parts of a file, in bytes."""

    def __init__(self, block_bytes: int, num_slots: int) -> None:
        self.block_bytes, self.num_slots = block_bytes, num_slots
        self.num_buckets = 1 << (2 * num_slots - 1).bit_length()
        self.stride = _rounded(block_bytes)
        self.records_at = HEADER_BYTES + _rounded(8 * self.num_buckets)
        self.payloads_at = self.records_at + _rounded(RECORD_BYTES * num_slots)
        self.num_bytes = self.payloads_at + num_slots * self.stride

    @classmethod
    def fit(cls, capacity_bytes: int, block_bytes: int) -> Layout:
        """Return the layout with the most slots that fit."""
        smallest = cls(block_bytes, 1).num_bytes
        if not smallest <= capacity_bytes < 2**62:
            raise ValueError(
                f"capacity_bytes: expected at least {smallest}, the space of one block of "
                f"{block_bytes} bytes, and less than 2**62, got {capacity_bytes}"
            )
        low, high = 1, capacity_bytes // _rounded(block_bytes)
        while low < high:  # bisect the number of slots
            middle = (low + high + 1) // 2
            if cls(block_bytes, middle).num_bytes <= capacity_bytes:
                low = middle
            else:
                high = middle - 1
        if low >= _SLOT_MASK // 4:
            raise ValueError(f"capacity_bytes: expected less than 2**30 blocks, got {low}")
        return cls(block_bytes, low)

    def record_at(self, slot: int) -> int:
        return self.records_at + slot * RECORD_BYTES

    def payload_at(self, slot: int) -> int:
        return self.payloads_at + slot * self.stride

    def header(self) -> bytes:
        fields = _HEADER.pack(
            _MAGIC, VERSION, RECORD_BYTES, self.block_bytes, self.num_slots, self.num_buckets,
            os.urandom(16),
        )  # fmt: skip
        return fields + _digest(fields)


def _open_mapped(
    path: Path, block_bytes: int, capacity_bytes: int | None, layout: Layout | None
) -> tuple[int, mmap.mmap, Layout]:
    """Open and map a file; create it if it does not exist and `layout` is not None."""
    while True:
        try:
            descriptor = os.open(path, _FLAGS)
        except FileNotFoundError:
            if layout is None:
                raise FileNotFoundError(
                    errno.ENOENT, "capacity_bytes: expected a size, since the store does not exist"
                ) from None
            with suppress(FileExistsError):  # another process was first
                return *_make(path, layout), layout
            continue
        try:
            actual = _read_layout(descriptor, path, block_bytes, capacity_bytes)
            if (mapped := _mapped(path, descriptor, actual)) is not None:
                return descriptor, mapped, actual
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another process removed the file just now


def _make(path: Path, layout: Layout) -> tuple[int, mmap.mmap]:
    """Create, open and map a file, under a temporary name until it is complete."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(unfinished, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, layout.num_bytes)
        os.posix_fallocate(descriptor, 0, layout.payloads_at)
        os.pwrite(descriptor, layout.header(), 0)
        mapped = _mapped(unfinished, descriptor, layout)
        assert mapped is not None
        try:
            os.link(unfinished, path)
        except BaseException:
            mapped.close()
            raise
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        unfinished.unlink()
    return descriptor, mapped


def _mapped(path: Path, descriptor: int, layout: Layout) -> mmap.mmap | None:
    """Map an open file; None if the path no longer refers to it.

    An mmap duplicates its descriptor, and children inherit the duplicate. The descriptor is
    therefore opened separately, so that it does not share the lock.
    """
    with suppress(FileNotFoundError):
        another = os.open(path, _FLAGS)
        try:
            if os.path.samestat(os.fstat(another), os.fstat(descriptor)):
                return mmap.mmap(another, layout.num_bytes)
        finally:
            os.close(another)
    return None


def _read_layout(
    descriptor: int, path: Path, block_bytes: int, capacity_bytes: int | None
) -> Layout:
    """Read the layout of a file; ValueError unless the file is valid and fits these blocks."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"url: expected a regular file, got {path}")
    if status.st_uid != os.geteuid():
        raise ValueError(
            f"url: expected a store of user {os.geteuid()}, got one of {status.st_uid}: {path}"
        )
    header = os.pread(descriptor, _HEADER.size + _DIGEST_BYTES, 0)
    if not header.startswith(_MAGIC):
        start = header[: len(_MAGIC)]
        raise ValueError(f"url: expected a shared store, got {path}, which starts {start!r}")
    fields = header[: _HEADER.size]
    if len(header) < _HEADER.size + _DIGEST_BYTES or _digest(fields) != header[_HEADER.size :]:
        raise ValueError(f"url: expected a whole header, got a damaged one in {path}")
    _, version, record_bytes, stored_block_bytes, num_slots, num_buckets, _ = _HEADER.unpack(fields)
    if (version, record_bytes) != (VERSION, RECORD_BYTES):
        raise ValueError(f"url: expected version {VERSION} of the file, got {version} in {path}")
    if stored_block_bytes != block_bytes:
        raise ValueError(
            f"host_pool: expected pages of {stored_block_bytes} bytes, as {path} was made for, "
            f"got {block_bytes}; use another name for these"
        )
    layout = Layout(block_bytes, num_slots)
    if layout.num_buckets != num_buckets or status.st_size != layout.num_bytes:
        raise ValueError(
            f"url: expected a file of {layout.num_bytes} bytes, got {status.st_size} in {path}"
        )
    if capacity_bytes is not None:
        asked = Layout.fit(int(capacity_bytes), block_bytes).num_slots
        if asked != num_slots:
            raise ValueError(
                f"capacity_bytes: expected None or a capacity of {num_slots} blocks as in {path}, "
                f"got {capacity_bytes}, a capacity of {asked}"
            )
    return layout


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // 4096) * 4096


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
