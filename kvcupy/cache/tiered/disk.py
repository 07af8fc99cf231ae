"""A file of blocks, written in a crash-safe order, and verified when they are read."""

from __future__ import annotations

import errno
import io
import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ...config import BoundedLog, cache_logger
from ...errors import ProcessLocal, file_path, naming
from ...ops import checks
from ..encryption import NONCE_BYTES, BlockCipher
from ..threads import Helpers, Users
from . import disk_format
from .disk_format import Layout, Record

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

Buffer = memoryview | Sequence[memoryview]  # one page: whole, or its parts in order
Item = tuple[int, int, Buffer]  # slot, hash of the block, memory
Parts = list[memoryview]  # one page as bytes

_Job = tuple[Any, ...]
_Result = TypeVar("_Result")

_MAX_PARTS = 1024  # buffers per system call
_MODE = 0o600  # keys and values reveal prompts


class DiskTier(ProcessLocal):
    """Keeps blocks in the slots of one file, each under its hash.

    A record is emptied before its payload is written, and written after it, so the table never
    has the record of an incomplete payload.

    Parameters
    ----------
    path : path of the file, created if it does not exist
    num_bytes : size of the file, which is allocated at once and has as many slots as fit
    page_bytes : bytes per block, below 2**32
    identity : description of a block, such as model, layout and format, in at most about 4000
        bytes; reopening the file requires the same identity
    previous : description of the same blocks in files of the previous version, which are opened
        unchanged and stay readable for the previous release; None: such a file is refused
    encryption_key : None, or 32 bytes, with which hashes and payloads are encrypted; reopening
        the file requires the same key
    num_threads : number of threads of `read_many` and `write_many`, including the caller's

    Attributes
    ----------
    path, num_slots, page_bytes

    Raises
    ------
    TypeError, ValueError : an argument is invalid. `disk`: the file is not a disk tier's, its
        header is damaged, or it has another version, identity, key or size; or the path is a link
    BlockingIOError : another process, or another tier, has the file open
    OSError : the disk is full, or the file cannot be opened, or belongs to another user
    ImportError : the package cryptography is missing

    Notes
    -----
    Threads may share a tier. The caller orders operations on one slot; if they overlap, reads of
    the slot may return False, but never wrong data.

    A killed process loses only the blocks that it was writing. After a system failure, blocks
    written before the last completed `flush` are intact; later ones may be missing. A forked child
    has neither the file nor its lock: calls raise KvcupyError there.

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
        previous: Mapping[str, str] | None = None, encryption_key: bytes | None = None,
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
        self._lock = threading.Lock()  # guards the records
        self._users = Users()  # calls in progress
        self._cipher = None
        if encryption_key is not None:
            self._cipher = BlockCipher(encryption_key, disk_format.digest_of(identity))
            identity = {**identity, "encryption": f"AES-256-GCM, key {self._cipher.key_id}"}
        self._scratch: list[memoryview] = []  # one page each, for ciphertext
        self._log = BoundedLog(cache_logger)
        header = disk_format.encode_header(self._layout, identity)
        self._file, is_new = _open_locked(self.path, header)
        try:
            with self._naming_file():
                if not self._file.seek(0, os.SEEK_END):
                    is_new = True  # an empty file of the user
                    os.fchmod(self._file.fileno(), _MODE)
                    _write_header(self._file.fileno(), header)
                self._load(identity, previous)
        except BaseException:
            if is_new:
                self.path.unlink(missing_ok=True)
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
        with self._using(), self._lock:
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
        False if the slot is empty or has another hash; or if its payload is damaged or not
            authentic, and then the slot is emptied. The contents of `into` are then undefined

        Raises
        ------
        TypeError, ValueError : an argument is invalid
        OSError : the read failed; the slot keeps its block
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

    def read_many(self, items: Iterable[Item]) -> list[bool | OSError]:
        """Read blocks concurrently; return for each the result of `read`, or its error."""
        jobs = [self._job(slot, hash, into, "into") for slot, hash, into in items]

        def read(*job: Any) -> bool | OSError:
            try:
                return self._read(*job)
            except OSError as error:
                return error

        with self._using():
            return self._share(read, jobs)

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
        self._users.close()
        self._file.close()
        self._helpers.close()

    def _abandon(self) -> None:
        self._file.close()  # its lock would outlive the parent

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the file open during a call; ValueError if it is closed."""
        if (call := self._users.enter()) is None:
            raise ValueError(f"disk: expected an open tier, got {self.path} after close()")
        try:
            yield
        finally:
            self._users.leave(call)

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
        if self._cipher is None:
            self._write_payload(slot, hash, parts, generation, self._checksum(hash, parts))
            return
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = memoryview(bytearray(self.page_bytes))
        seal = self._cipher.seal(disk_format.payload_name(hash), parts, scratch)
        nonce, tag = seal[:NONCE_BYTES], seal[NONCE_BYTES:]
        self._write_payload(slot, hash, [scratch], generation, tag, nonce)
        self._scratch.append(scratch)

    def _write_payload(
        self, slot: int, hash: int, payload: Parts, generation: int, checksum: bytes,
        nonce: bytes = b"",
    ) -> None:  # fmt: skip
        record = Record(hash, generation, slot, self.page_bytes, checksum, nonce)
        encoded = memoryview(disk_format.encode_record(record, self._cipher))
        with self._naming_file() as descriptor:
            self._invalidate(slot)
            _write_all(descriptor, payload, self._layout.payload_at(slot))
            with self._lock:
                _write_all(descriptor, [encoded], self._layout.record_at(slot))
                self._records[slot] = record

    def _read(self, slot: int, hash: int, parts: Parts) -> bool:
        """Read a block; empty the slot if the payload is damaged. OSError if it is unreadable."""
        record = self._records.get(slot)
        if record is None or record.hash != hash:
            return False
        with self._naming_file() as descriptor:
            there = _read_all(descriptor, parts, self._layout.payload_at(slot))
        if there and self._is_whole(record, parts):
            return True
        try:
            self._invalidate(slot, only=record)
        except OSError as error:  # the damage is found again after reopening
            self._log.warning("slot %d of %s cannot be emptied: %s", slot, self.path, error)
        return False

    def _is_whole(self, record: Record, parts: Parts) -> bool:
        """Verify a payload, and decrypt it."""
        if self._cipher is None:
            return self._checksum(record.hash, parts) == record.checksum
        seal = record.nonce + record.checksum
        return self._cipher.open(disk_format.payload_name(record.hash), seal, parts)

    def _invalidate(self, slot: int, only: Record | None = None) -> None:
        """Empty a slot; with `only`, not if another record has replaced it."""
        with self._lock:
            if only is not None and self._records.get(slot) is not only:
                return  # another write has replaced it
            self._records.pop(slot, None)
            empty = memoryview(disk_format.NO_RECORD)
            _write_all(self._file.fileno(), [empty], self._layout.record_at(slot))

    def _load(self, identity: Mapping[str, str], previous: Mapping[str, str] | None) -> None:
        """Check a file, and read its records."""
        descriptor, layout = self._file.fileno(), self._layout
        size = os.fstat(descriptor).st_size
        header = os.pread(descriptor, disk_format.BLOCK_BYTES, 0)
        version = disk_format.check_header(header, layout, identity, previous, self.path)
        self._checksum = disk_format.checksum_of(version)
        os.fchmod(descriptor, _MODE)
        _allocate(descriptor, layout.num_bytes)  # truncated, or its creation was interrupted
        table = memoryview(bytearray(layout.table_bytes))
        _read_all(descriptor, [table], layout.record_at(0))
        for slot in range(layout.num_slots):
            start = slot * disk_format.RECORD_BYTES
            raw = table[start : start + disk_format.RECORD_BYTES]
            if raw == disk_format.NO_RECORD:
                continue
            record = disk_format.decode_record(raw, layout, slot, self._cipher)
            if record is not None and layout.payload_at(slot) + record.num_bytes <= size:
                self._records[slot] = record


# --- System calls ---


def _open_locked(path: Path, header: bytes) -> tuple[io.FileIO, bool]:
    """Open a file for reading and writing, and lock it; create it with a header if necessary.

    Returns
    -------
    the file, and whether it was created

    Raises
    ------
    BlockingIOError : another process or another tier has it open
    ValueError : `path` is a link, or not a regular file
    OSError : it cannot be opened, or belongs to another user, or the system lacks file locks or
        vectored I/O
    """
    if fcntl is None or not hasattr(os, "preadv"):
        raise OSError(errno.ENOTSUP, "disk: expected a system with flock and preadv", str(path))
    is_new = False
    while True:
        try:  # in a folder for all users a link could name, or create, any file of this user
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            with naming(path.parent):
                is_new = _create(path, header)
            continue
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ValueError(f"disk: expected the name of a file, got a link: {path}") from None
        file = io.FileIO(descriptor, "r+b")
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise ValueError(f"disk: expected the name of a file, got {path}")
            if info.st_uid != os.geteuid():
                raise PermissionError(
                    errno.EPERM, "disk: expected a file of this user", str(path)
                )  # fmt: skip
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BlockingIOError(
                    error.errno, "disk: expected a file that no other tier has open", str(path)
                ) from None
            if _is_at(descriptor, path):
                return file, is_new
        except BaseException:
            file.close()
            raise
        file.close()  # the previous owner of the lock removed the file


def _create(path: Path, header: bytes) -> bool:
    """Create a file that has its header, or does not exist, whenever the power fails.

    Return False if another process was first.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(unfinished, flags, _MODE)
    try:
        _write_header(descriptor, header)
        try:
            os.link(unfinished, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                raise
            unfinished.rename(path)  # a file system without hard links
    finally:
        os.close(descriptor)
        unfinished.unlink(missing_ok=True)
    return True


def _write_header(descriptor: int, header: bytes) -> None:
    """Write a header to the disk, before any block depends on it."""
    _write_all(descriptor, [memoryview(header)], 0)
    os.fsync(descriptor)


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
