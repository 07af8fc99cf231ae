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
import math
import mmap
import os
import re
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...cache.identity import KEY_BYTES
from ...cache.threads import Call, Helpers, Users
from ...config import cache_logger
from ...errors import ProcessLocal, file_path, finalize
from ...ops import checks
from ..wire import WirePages
from .backend import (
    FAILED,
    FULL,
    KNOWN,
    MAX_HEADER_BYTES,
    STORED,
    BackendLost,
    Block,
    StoredBlock,
    SummedBlock,
)
from .shm_file import HEADER_BYTES, RECORD_BYTES, Layout, memory_limit, open_mapped, warn_if_tight

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_FOLDER = "/dev/shm"

_WORDS_AT = 2048  # offset of the mutable words of the header
_DIRTY, _HIGH_WATER, _HAND, _FREE, _NUM_BLOCKS, _EVICTED, _RECOVERED = range(7)
_WAITING, _WAITING_SINCE = 7, 8  # the process that waits longest for the lock: last try, first try
_DRAINING = 9  # whether puts are refused

# Start of a record: generation, length, key, length of the header.
_RECORD = struct.Struct(f"@QQ{KEY_BYTES}sQ")
_DESCRIPTION = struct.Struct(f"@Q{KEY_BYTES}sQQQ")  # fields after the generation, up to `_USED`
# Fields after `_USED`: expiry in Unix time, tenant, and the generation that they belong to, since
# earlier releases leave them when they reuse a slot.
_OWNER = struct.Struct("@Q16sQ")
# Words of a record. `_NEXT` links free slots: the number of the next one plus one.
_GENERATION, _LENGTH, _KEY, _HEADER_LENGTH, _NEXT, _USED, _EXPIRY = 0, 1, 2, 6, 7, 8, 9
_TENANT, _OWNED_GENERATION = 10, 12
_RECORD_WORDS = RECORD_BYTES // 8
_KEY_AT, _HEADER_AT = 8 * _KEY, RECORD_BYTES - MAX_HEADER_BYTES

_SLOT_MASK = 2**32 - 1
_MIN_NUMPY_PIECE_BYTES = 2**17  # NumPy copies release the GIL, memoryview copies do not
_MIN_THREADED_BYTES = 2**21  # below this, a copy ends before another thread wakes up
_PART_BYTES = 2**19  # fits the CPU cache while it is copied and hashed
# Bound the time for which a writer holds the lock.
_MAX_BATCH_BYTES, _MAX_BATCH_BLOCKS, _MAX_SWEEP = 2**24, 64, 1024
_COUNTING_SHARE = 0.05  # of time, to find a tenant's blocks for its quota
# Pauses between tries to take the lock: at first, at most of the process that waits longest, and at
# most of others, whose tries would take CPU time from the process that has it.
_POLL_S, _MAX_POLL_S, _MAX_QUEUE_POLL_S = 1e-4, 3e-4, 5e-3
_PATIENCE_NS = 30_000_000  # age of a wait after which others let that process take the lock
_WAITING_TTL_NS = 5_000_000  # age up to which `_WAITING` means that a process waits for the lock
# After a timed-out wait of at least _STUCK_S, the holder of the lock counts as stopped: for
# _STUCK_TTL_S, calls wait at most _BRIEF_WAIT_S, as long as a live writer holds the lock.
_STUCK_S, _STUCK_TTL_S, _BRIEF_WAIT_S = 0.1, 10.0, 0.05
_MADV_POPULATE_READ = 22  # since Linux 5.14
_MAX_DEFAULT_THREADS = 4


def open_backend(
    url: str, pages: WirePages, *,
    namespace: bytes, capacity_bytes: int | None, deadline: float, folder: Any = _FOLDER,
    threads: int | None = None, ttl_s: float | None = None, quota_bytes: int | None = None,
) -> ShmBackend:  # fmt: skip
    """Open "shm:NAME", a file in `folder`; create it if it does not exist."""
    if threads is None:
        threads = default_threads()
    checks.require_int(threads, "threads")
    if not 1 <= threads <= 64:
        raise ValueError(f"threads: expected 1 to 64, got {threads}")
    if ttl_s is not None:
        checks.require_number(ttl_s, "ttl_s")
        if not 0.001 <= ttl_s < 1e9:
            raise ValueError(f"ttl_s: expected 0.001 to 1e9 seconds, got {ttl_s!r}")
    quota = None
    if quota_bytes is not None:
        checks.require_int(quota_bytes, "quota_bytes")
        quota = int(quota_bytes) // Layout(pages.block_bytes, 1).stride
        if quota < 1:
            raise ValueError(
                f"quota_bytes: expected at least {pages.block_bytes}, one block, got {quota_bytes}"
            )
    return ShmBackend(
        path_of(url, folder), pages.block_bytes, capacity_bytes, threads=int(threads),
        tenant=namespace, ttl_s=ttl_s, quota=quota,
    )  # fmt: skip


def path_of(url: str, folder: Any = _FOLDER) -> Path:
    """Return the file of "shm:NAME"."""
    name = url.removeprefix("shm:")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"url: expected shm:NAME, a name of up to 100 letters, digits and ._- that does not "
            f"start with . or -, got {url!r}"
        )
    return file_path(folder, "folder") / f"kvcupy-{name}"


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
    block_bytes : length of a block; None opens an existing file for blocks of any length
    capacity_bytes : size of the file; None opens an existing file of any size
    threads : number of threads that copy the blocks of one call, including the caller's
    tenant : digest stored with the blocks of this user, for operators
    ttl_s : seconds after which a block that this user puts is missing; None keeps it until eviction
    quota : number of blocks of the tenant, beyond which a put drops others of them; None for no
        limit. Processes of a tenant may exceed it by what the others have just put

    Raises
    ------
    TypeError, ValueError : an argument is invalid; `capacity_bytes` exceeds the memory limit of
        this process's control group; or the file is not a shared store, is truncated, belongs to
        another user, or was made with another capacity or for blocks of another length
    FileNotFoundError : the file does not exist, and `capacity_bytes` is None
    OSError : the file cannot be created, opened or mapped
    """

    put_asks_first = True

    def __init__(
        self, path: Path, block_bytes: int | None, capacity_bytes: int | None, *, threads: int = 1,
        tenant: bytes = bytes(16), ttl_s: float | None = None, quota: int | None = None,
    ) -> None:  # fmt: skip
        if fcntl is None or not hasattr(os, "posix_fallocate"):
            message = "url: expected a system with flock and posix_fallocate for shm:"
            raise OSError(errno.ENOTSUP, message, str(path))
        self.path = path
        layout = None
        if capacity_bytes is not None and block_bytes is not None:
            checks.require_int(capacity_bytes, "capacity_bytes")
            layout = Layout.fit(int(capacity_bytes), block_bytes)
        limit = memory_limit()
        if layout is not None and limit is not None and layout.num_bytes > limit[0]:
            raise ValueError(
                f"capacity_bytes: expected at most {limit[0]}, the memory limit of this process in "
                f"{limit[1]}, got {capacity_bytes}; the system would end it with SIGKILL"
            )
        try:
            self._fd, self._map, layout = open_mapped(path, block_bytes, capacity_bytes, layout)
        except OSError as error:  # may name a temporary file
            raise OSError(error.errno, error.strerror, str(path)) from error
        warn_if_tight(path, layout.num_bytes, os.fstat(self._fd).st_blocks * 512, limit)
        self._layout = layout
        self._tenant, self._ttl_ns = tenant, 0 if ttl_s is None else int(ttl_s * 1e9)
        self._quota = quota
        # With a quota: slots of this tenant, some of which are another's meanwhile; the slot after
        # the last one dropped; and when to look for those that other processes have put.
        self._own: deque[int] = deque()
        self._is_listed = bytearray()  # of each slot, whether it is there
        self._own_hand = 0
        self._count_at = -math.inf
        self._close_file = finalize(self, os.close, self._fd, at_exit=True)
        self._bytes = memoryview(self._map)
        self._array = np.frombuffer(self._map, np.uint8)
        words = self._bytes[: layout.payloads_at].cast("Q")
        self._words = words[_WORDS_AT // 8 : HEADER_BYTES // 8]
        self._buckets = words[HEADER_BYTES // 8 :][: layout.num_buckets]
        self._records = words[layout.records_at // 8 :]
        self._mask = layout.num_buckets - 1
        self._threads = Users(1)  # flock excludes processes, not threads
        self._holder: Call | None = None  # of the thread that holds the lock
        self.blocks_per_get = max(1, _MAX_BATCH_BYTES // layout.block_bytes)
        self.helpers = Helpers(threads - 1, "kvcupy-shared")
        self._putting: _Put | None = None  # the put that holds the lock
        self._is_mapped = bytearray(layout.num_slots)  # slots whose pages this process has mapped
        self._torn = 0
        self._lock_timeouts = 0
        self._stuck_until = -math.inf

    def _abandon(self) -> None:
        self._close_file()  # the lock belongs to all processes that have the descriptor

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
            self._copy(
                _read_parts, [self._parts(blocks[i], read.slot, read.header) for i, read in reads]
            )
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
            or self._has_expired(slot)
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

    def _copy(self, copy: Callable[[_Parts], None], jobs: Sequence[_Parts]) -> None:
        """Copy blocks from or to slots in parts, with several threads if they are large."""
        # For less, waking threads takes longer than the copy, and small parts hold the GIL.
        is_large = len(jobs) > 1 and len(jobs) * self._layout.block_bytes >= _MIN_THREADED_BYTES
        is_helped = is_large and isinstance(jobs[0].pairs[0][0], np.ndarray)
        share = min(self.helpers.count, len(jobs) - 1) if is_helped else 0

        def copy_one(parts: _Parts) -> None:
            copy(parts)
            self._at("piece")

        self.helpers.each(copy_one, jobs, share)

    def _parts(self, block: Block, slot: int, header: bytes | None = None) -> _Parts:
        """Pair the parts of a slot with the parts of a block; `header`: of a block to read."""
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
        return _Parts(pairs, block.begin(header) if isinstance(block, SummedBlock) else None)

    def _used(self, slot: int) -> bool:
        """Return whether a slot has a whole block, and mark it used, which delays its eviction."""
        if slot < 0 or not self._is_whole(slot) or self._has_expired(slot):
            return False
        if not self._records[at := slot * _RECORD_WORDS + _USED]:
            self._records[at] = 1
        return True

    def _is_whole(self, slot: int) -> bool:
        records, at = self._records, slot * _RECORD_WORDS
        return (
            not records[at + _GENERATION] & 1
            and records[at + _LENGTH] == self._layout.block_bytes
            and 0 < records[at + _HEADER_LENGTH] <= MAX_HEADER_BYTES
        )

    def _has_expired(self, slot: int) -> bool:
        records, at = self._records, slot * _RECORD_WORDS
        return (
            0 < records[at + _EXPIRY] <= time.time_ns()
            and records[at + _OWNED_GENERATION] == records[at + _GENERATION]
        )

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
        at_once = min(self.blocks_per_get, _MAX_BATCH_BLOCKS)
        for start in range(0, len(new), at_once):
            if start:
                self._yield_lock()
            try:
                if not self._lock(deadline):
                    break
            except BackendLost as error:
                raise BackendLost(str(error), outcomes) from error
            try:
                if self._words[_DRAINING]:
                    for i in new[start:]:
                        outcomes[i] = FULL
                    break
                self._put(put, new[start : start + at_once])
            finally:
                self._unlock()
        return outcomes

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        self._require_whole()
        for key in keys:
            if not self._lock(deadline):
                return
            try:
                self._discard(key)
            finally:
                self._unlock()

    def _discard(self, key: bytes) -> bool:
        """Drop a block; return whether there was one."""
        bucket = self._bucket(key)
        if bucket < 0:
            return False
        slot = (self._buckets[bucket] & _SLOT_MASK) - 1
        was_dirty, self._words[_DIRTY] = self._words[_DIRTY], 1  # during a put it stays dirty
        self._vacate(slot, bucket)
        self._free(slot)
        self._words[_DIRTY] = was_dirty
        return True

    # --- For an operator ---

    def blocks(self) -> Iterator[StoredBlock]:
        """Yield the whole blocks in the order of their eviction, if no other is used until then."""
        self._require_whole()
        count = min(self._words[_HIGH_WATER], self._layout.num_slots)
        hand = self._words[_HAND] % count if count else 0
        in_order = [*range(hand, count), *range(hand)]
        in_order.sort(key=lambda slot: self._records[slot * _RECORD_WORDS + _USED] > 0)
        for slot in in_order:
            key = self._key(slot)
            if key and self._is_whole(slot) and self._find(key) == slot:
                at = self._layout.record_at(slot) + 8 * _EXPIRY
                _, tenant, generation = _OWNER.unpack_from(self._map, at)
                is_known = generation == self._records[slot * _RECORD_WORDS + _GENERATION]
                known = tenant.hex() if is_known else ""
                yield StoredBlock(key, self._layout.block_bytes, tenant=known)

    def read(self, block: StoredBlock, deadline: float) -> tuple[bytes, memoryview] | None:
        """Return header and contents of a block; None if it is gone."""
        slot = self._find(block.key)
        used_at = slot * _RECORD_WORDS + _USED
        was_used = slot < 0 or self._records[used_at]
        contents = memoryview(bytearray(self._layout.block_bytes))
        (header,) = self.get([block.key], [[contents]], deadline)
        if not was_used:
            self._records[used_at] = 0  # an operator's read does not delay its eviction
        return None if header is None else (header, contents)

    def drop(self, keys: Sequence[bytes], deadline: float) -> int:
        """Drop blocks, some at a time, and return their number.

        Raises
        ------
        BackendLost : the lock was not released before the deadline
        """
        self._require_whole()
        dropped = 0
        for start in range(0, len(keys), _MAX_BATCH_BLOCKS):
            self._yield_lock()
            if not self._lock(deadline):
                raise BackendLost(f"{self.path}: another process holds its lock")
            try:
                dropped += sum(map(self._discard, keys[start : start + _MAX_BATCH_BLOCKS]))
            finally:
                self._unlock()
        return dropped

    def drain(self, deadline: float, *, undo: bool = False) -> None:
        """Refuse puts of all processes, and wait for the one in progress.

        Raises
        ------
        BackendLost : a put was still in progress at the deadline; nothing has changed
        """
        self._require_whole()
        if not self._lock(deadline):
            raise BackendLost(f"{self.path}: another process holds its lock")
        try:
            self._words[_DRAINING] = not undo
        finally:
            self._unlock()

    def _put(self, put: _Put, numbers: Sequence[int]) -> None:
        """Reserve slots for some blocks of a put, then write the blocks."""
        self._putting = put
        try:
            if self._quota is not None:
                numbers = self._within_quota(put, numbers, self._quota)
            for i in numbers:
                put.outcomes[i] = self._reserve(put, i)
            self._write_reserved(put)
        finally:
            self._putting = None

    def _within_quota(self, put: _Put, numbers: Sequence[int], quota: int) -> Sequence[int]:
        """Drop blocks of this tenant for new ones; return those that fit, and mark others FULL."""
        began = time.monotonic()
        if began >= self._count_at:
            self._find_own()
            self._count_at = began + (time.monotonic() - began) / _COUNTING_SHARE
        own = self._own
        new = dict.fromkeys(put.keys[i] for i in numbers)
        excess = len(own) + len(new) - quota
        for passes_used in (True, False):
            for _ in range(min(len(own), _MAX_SWEEP)):
                if excess <= 0:
                    break
                slot = own.popleft()
                self._is_listed[slot] = 0
                used_at = slot * _RECORD_WORDS + _USED
                if not self._is_own(slot):  # another process has evicted it
                    excess -= 1
                elif slot in put.kept or (
                    passes_used and self._records[used_at] and not self._has_expired(slot)
                ):
                    self._records[used_at] = 0
                    self._list(slot)
                else:
                    self._discard(self._key(slot) or b"")
                    self._words[_EVICTED] += 1
                    self._own_hand = slot + 1
                    excess -= 1
        refused = set(list(new)[max(0, len(new) - excess) :]) if excess > 0 else set()
        for i in numbers:
            if put.keys[i] in refused:
                put.outcomes[i] = FULL
        return [i for i in numbers if put.keys[i] not in refused]

    def _list(self, slot: int) -> None:
        if not self._is_listed[slot]:
            self._is_listed[slot] = 1
            self._own.append(slot)

    def _find_own(self) -> None:
        """List the slots with blocks of this tenant, from the one after the last dropped."""
        records = self._record_table()[: self._words[_HIGH_WATER]]
        tenant = np.frombuffer(self._tenant, np.uint64)
        own = np.flatnonzero(records[:, _TENANT] == tenant[0])
        some = records[own]
        own = own[
            (some[:, _TENANT + 1] == tenant[1])
            & (some[:, _OWNED_GENERATION] == some[:, _GENERATION])
            & (some[:, _LENGTH] == self._layout.block_bytes)
        ]
        self._own = deque(np.roll(own, -int(np.searchsorted(own, self._own_hand))).tolist())
        listed = np.zeros(self._layout.num_slots, np.uint8)
        listed[own] = 1
        self._is_listed = bytearray(listed)

    def _is_own(self, slot: int) -> bool:
        at = self._layout.record_at(slot)
        _, tenant, generation = _OWNER.unpack_from(self._map, at + 8 * _EXPIRY)
        current = self._records[slot * _RECORD_WORDS + _GENERATION]
        return tenant == self._tenant and generation == current and self._is_whole(slot)

    def _record_table(self) -> np.ndarray[Any, Any]:
        """View the words of all records."""
        records = np.frombuffer(self._records, np.uint64).reshape(-1, _RECORD_WORDS)
        return records[: self._layout.num_slots]

    def _reserve(self, put: _Put, i: int) -> str:
        """Reserve a slot for a block, unless it has one; return the outcome of the block."""
        key = put.keys[i]
        if key in put.reserved:
            return KNOWN
        if (slot := self._find(key)) >= 0:
            if self._used(slot):
                return KNOWN
            if self._is_whole(slot):
                self._discard(key)  # it has expired
            else:
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
        jobs = [self._parts(put.blocks[i], slot) for i, slot in reserved.values()]
        self._copy(_write_parts, jobs)
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
        expiry_ns = time.time_ns() + self._ttl_ns if self._ttl_ns else 0
        generation = self._records[slot * _RECORD_WORDS + _GENERATION] + 1
        _OWNER.pack_into(self._map, start + 8 * _EXPIRY, expiry_ns, self._tenant, generation)
        self._at("described")
        self._records[slot * _RECORD_WORDS + _GENERATION] = generation
        self._at("even")
        self._insert(key, slot)
        if self._quota is not None:
            self._list(slot)
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
        """Return the next slot not used since the clock hand passed it.

        If the next `_MAX_SWEEP` are all used, return the first of them, which bounds the time.
        """
        words, records = self._words, self._records
        count = min(words[_HIGH_WATER], self._layout.num_slots)
        hand = words[_HAND] % count if count else 0
        swept: list[int] = []
        for _ in range(2 * count):
            slot, hand = hand, (hand + 1) % count
            at = slot * _RECORD_WORDS + _USED
            if slot in kept:
                continue
            if not records[at]:
                words[_HAND] = hand
                return slot
            records[at] = 0
            swept.append(slot)
            if len(swept) == _MAX_SWEEP:
                words[_HAND] = (swept[0] + 1) % count
                return swept[0]
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
        words, layout = self._words, self._layout
        words[_DIRTY] = 1
        buckets = np.frombuffer(self._buckets, np.uint64)
        buckets[:] = 0
        words[_FREE] = words[_NUM_BLOCKS] = 0
        self._at("emptied")
        records = self._record_table()
        generations, lengths, header_lengths = (
            records[:, word].copy() for word in (_GENERATION, _LENGTH, _HEADER_LENGTH)
        )
        is_odd = generations & 1 == 1
        whole = ~is_odd & (lengths == layout.block_bytes)
        whole &= (header_lengths > 0) & (header_lengths <= MAX_HEADER_BYTES)
        slots = _fill_buckets(buckets, records[:, _KEY:_HEADER_LENGTH], np.flatnonzero(whole))
        whole[:] = False
        whole[slots] = True  # of several slots with one key, one
        dropped = np.flatnonzero(~whole & (is_odd | (lengths != 0)))
        records[dropped, _GENERATION] = (generations[dropped] | 1) + 1
        records[dropped, _LENGTH] = 0
        high_water = int(slots.max(initial=-1)) + 1
        free = np.flatnonzero(~whole[:high_water])
        numbers = np.concatenate([np.zeros(1, np.int64), free + 1])  # as `_NEXT` and `_FREE` have
        records[free, _NEXT] = numbers[:-1]
        words[_FREE], words[_HIGH_WATER] = int(numbers[-1]), high_water
        words[_NUM_BLOCKS] = len(slots)
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
        started, started_ns = time.monotonic(), time.monotonic_ns()
        words = self._words
        if started < self._stuck_until:
            deadline = min(deadline, started + _BRIEF_WAIT_S)
        try:
            while True:
                if not self._defers(started_ns):
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
                    self._threads.leave(holder)
                    return False
                now_ns = time.monotonic_ns()
                is_next = not (self._is_awaited(now_ns) and words[_WAITING_SINCE] < started_ns)
                if is_next:
                    words[_WAITING], words[_WAITING_SINCE] = now_ns, started_ns
                pause_s = min(1.5 * pause_s, _MAX_POLL_S if is_next else _MAX_QUEUE_POLL_S)
                time.sleep(min(pause_s, deadline - now))
        except OSError as error:
            self._threads.leave(holder)
            raise BackendLost(f"{self.path}: cannot lock the file: {error}") from error
        except BaseException:
            self._threads.leave(holder)
            raise
        self._stuck_until = -math.inf
        if words[_WAITING_SINCE] == started_ns:
            words[_WAITING] = 0
        try:
            if words[_DIRTY]:
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
            holder, self._holder = self._holder, None
            if holder is not None:
                self._threads.leave(holder)

    def _yield_lock(self) -> None:
        """Pause so that another process can take the lock, if one waited for it recently."""
        if self._is_awaited(time.monotonic_ns()):
            self._words[_WAITING] = 0
            time.sleep(2 * _POLL_S)

    def _defers(self, started_ns: int) -> bool:
        """Return whether another process has waited for the lock for long, and longer than this."""
        now_ns, since_ns = time.monotonic_ns(), self._words[_WAITING_SINCE]
        return (
            now_ns - since_ns > _PATIENCE_NS and since_ns < started_ns and self._is_awaited(now_ns)
        )

    def _is_awaited(self, now_ns: int) -> bool:
        """Return whether another process waits for the lock."""
        return 0 <= now_ns - self._words[_WAITING] < _WAITING_TTL_NS

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
        if self._fd < 0:
            return
        self.helpers.close()
        views = self._words, self._buckets, self._records, self._bytes
        del self._array
        for release in (*(view.release for view in views), self._map.close):
            with suppress(BufferError):  # a traceback may still refer to it, and then releases it
                release()
        self._close_file()
        self._fd = -1

    def stats(self) -> dict[str, Any]:
        """Return `blocks`, `capacity_blocks`, `block_bytes`, `bytes` (of memory), `evicted`,
        `draining`, `recovered`, `torn`, `lock_timeouts`.

        `evicted` and `recovered` (recoveries after a writer died) count all processes; `torn`
        (reads overtaken by a writer) and `lock_timeouts` (calls that did not get the lock in time)
        count this process.
        """
        words = self._words
        return {
            "blocks": words[_NUM_BLOCKS], "capacity_blocks": self._layout.num_slots,
            "block_bytes": self._layout.block_bytes,
            "bytes": os.fstat(self._fd).st_blocks * 512, "evicted": words[_EVICTED],
            "draining": bool(words[_DRAINING]),
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


def _fill_buckets(
    buckets: np.ndarray[Any, np.dtype[np.uint64]], keys: np.ndarray[Any, np.dtype[np.uint64]],
    slots: np.ndarray[Any, np.dtype[np.int64]],
) -> np.ndarray[Any, np.dtype[np.int64]]:  # fmt: skip
    """Insert slots into empty buckets, and return them without those whose key another one has.

    Each entry goes to its home, or to the bucket after the entry before, in the order of homes.

    Parameters
    ----------
    buckets : of the whole store
    keys : of all slots, (num_slots, 4) words
    """
    bits = (len(buckets) - 1).bit_length()
    hashes = keys[slots, 0].view("<u4")[::2].astype(np.uint64)
    # Sorts by home, the low bits of the hash, then by its other bits, then by slot.
    order = (hashes & (len(buckets) - 1)) << (32 - bits) | hashes >> bits
    order = np.sort(order << 32 | slots.astype(np.uint64))
    rotated, slots = order >> 32, (order & _SLOT_MASK).astype(np.int64)
    equals = np.flatnonzero(rotated[1:] == rotated[:-1])
    if len(equals):
        seen: set[bytes] = set()
        again = []
        for i in np.union1d(equals, equals + 1).tolist():
            key = keys[slots[i]].tobytes()
            if key in seen:
                again.append(i)
            seen.add(key)
        rotated, slots = np.delete(rotated, again), np.delete(slots, again)
    homes = (rotated >> (32 - bits)).astype(np.int64)
    hashes = (rotated & ((1 << (32 - bits)) - 1)) << bits | rotated >> (32 - bits)
    entries = hashes << 32 | (slots + 1).astype(np.uint64)
    numbers = np.arange(len(slots))
    places = np.maximum.accumulate(homes - numbers) + numbers
    num_fitting = int(np.searchsorted(places, len(buckets)))
    buckets[places[:num_fitting]] = entries[:num_fitting]
    if num_fitting < len(slots):  # the last continue at the start
        empty = np.flatnonzero(buckets == 0)[: len(slots) - num_fitting]
        buckets[empty] = entries[num_fitting:]
    return slots
