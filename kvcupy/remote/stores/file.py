"""Blocks as files in a directory, which processes of this user share.

    PATH/3f/3f5a...-NAMESPACE                    a block: its key and namespace in hexadecimal
    PATH/tmp/PROCESS/3f5a...-NAMESPACE.NUMBER    a block that is being written

The first byte of the key is the folder. A file is written under its temporary name and renamed, so
a block is there whole or not at all, also after a writer was killed. Modification times are the
order of use: a hit sets it. There is no index: the directory is listed to count what it holds, and
listed again when the folders of other processes in tmp/ show that they have put blocks.
"""

# Paths are strings: making a Path takes longer than the call of the system.
# ruff: noqa: PTH104, PTH106, PTH108, PTH119

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import secrets
import stat
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

from ... import checks
from ...config import BoundedLog, cache_logger
from ...errors import ProcessLocal, file_path
from ...files import make_folder, require_private
from .backend import FAILED, FULL, STORED, BackendLost, Block, num_bytes_of

_MODE = 0o600  # keys and values reveal prompts
_GRAIN_BYTES = 4096  # in which file systems allocate
_MAX_PIECES = 1024  # buffers per system call
_BYTES_PER_CALL = 2**20  # few blocks, which are then verified while they are in the CPU cache
_MIN_THREADED_BYTES = 2**20  # below this, most of the time of a block is Python's
_LOOKS_PER_CAPACITY = 16  # after each such part that a process has put, it looks for other writers
_MAX_REMEMBERED = 2**17  # files that an eviction knows without listing the directory
_STALE_S = 60.0  # age of temporary files whose writers are taken for dead
_NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{32}")
_TEMPORARY = re.compile(_NAME.pattern + r"\.[0-9]+")
_SHARD, _PROCESS = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{16}")


def open_backend(
    url: str, *, namespace: bytes, num_bytes: int, capacity_bytes: int | None, deadline: float
) -> FileBackend:
    """Open a directory of blocks, which is made if it does not exist.

    Raises
    ------
    TypeError, ValueError : an argument is invalid
    OSError : the directory cannot be made or written, or others may change what is in it
    """
    path = url.removeprefix("file:")
    path = path[2:] if path.startswith("///") else path
    if not path or path.startswith("//") or "\0" in path:
        raise ValueError(f"url: expected file:PATH, got {url!r}")
    if capacity_bytes is not None:
        checks.require_int(capacity_bytes, "capacity_bytes")
        if capacity_bytes < _on_disk(num_bytes):
            raise ValueError(
                f"capacity_bytes: expected at least the {_on_disk(num_bytes)} bytes of a block, "
                f"got {capacity_bytes}"
            )
    folder = file_path(path, "url").expanduser().absolute()
    make_folder(folder)
    folder = folder.resolve()
    require_private(folder)
    backend = FileBackend(folder, namespace, num_bytes, capacity_bytes)
    backend.try_to_write()
    return backend


class _File(NamedTuple):
    used_ns: int
    num_bytes: int
    path: str


class _Write:
    """A block that is being written. An interrupted call forgets it with its frame.

    Attributes
    ----------
    name : of its key
    spare : a temporary file of the same length, which an eviction has renamed; "" for none. Writing
        over it takes a fraction of the time of deleting it and allocating another one
    stored_ns : when it was stored
    """

    __slots__ = ("__weakref__", "name", "spare", "stored_ns")

    def __init__(self, name: str) -> None:
        self.name, self.spare, self.stored_ns = name, "", 0


class FileBackend(ProcessLocal):
    """Blocks as files of one directory.

    Parameters
    ----------
    folder : belongs to this user, and nobody else may write to it
    namespace : suffix of the names, by which `clear` finds the files
    num_bytes : of a block with its header
    capacity_bytes : disk space of the files, a multiple of 4 KiB each, which this process keeps to
        by deleting the least recently used; None: until the disk is full

    Notes
    -----
    Capacity: files of all namespaces count. One process never exceeds it. Each process counts its
    own puts at once and looks for others' after it has put a sixteenth of the capacity: n processes
    exceed it by at most (n - 1) / 16.

    Readers and writers: a file with the name of a block is never written. An evicted one is renamed
    and written over, unless a reader has it open (`flock`); a reader that opened it just before
    sees that it has lost its name, and misses.

    Durability: nothing is synchronized. After a power failure, blocks may be missing or damaged,
    which their checksums show. A network file system serves several machines if a rename is atomic
    there; a call to a file system that hangs does not return at its deadline.
    """

    _instead = "open one in each process"

    def __init__(
        self, folder: Path, namespace: bytes, num_bytes: int, capacity_bytes: int | None
    ) -> None:
        self._folder, self._suffix = str(folder), f"-{namespace.hex()}"
        self._process = secrets.token_hex(8)  # folder of temporary files
        self._numbers = itertools.count()
        self._num_bytes, self._size = num_bytes, _on_disk(num_bytes)
        self._capacity_bytes = capacity_bytes
        self.blocks_per_call = max(1, _BYTES_PER_CALL // num_bytes)
        is_large = num_bytes >= _MIN_THREADED_BYTES
        self.num_threads = min(4, os.cpu_count() or 1) if is_large else 1
        self._log = BoundedLog(cache_logger)
        self._lock = threading.RLock()  # guards the fields below
        self._used_bytes = 0  # as far as this process knows
        self._files: list[_File] = []  # a heap, the least recently used first
        self._put_bytes = 0  # since the last look for other writers
        self._others: dict[str, int] | None = None  # when they had put; None: nothing is counted
        self._writes: weakref.WeakSet[_Write] = weakref.WeakSet()
        self._unlisted: list[str] = []  # folders, while the directory is being listed
        self._listed: list[_File] = []
        self._listed_bytes, self._listed_others = 0, dict[str, int]()
        self._counts: Counter[str] = Counter(evicted=0, errors=0, wrong_files=0)

    def __repr__(self) -> str:
        return f"<FileBackend of {self._folder}>"

    def try_to_write(self) -> None:
        """Delete what dead writers have left; OSError if the directory cannot be written."""
        self._make_folder(f"tmp/{self._process}")
        self._sweep_temporaries()
        path = self._temporary(bytes(32))
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _MODE))
            os.unlink(path)
        except OSError as error:
            if error.errno not in _NO_SPACE:  # blocks of a full disk can be read
                raise

    # --- Blocks ---

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return [self._exists(self._path(key)) for key in keys]

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], keep: Collection[bytes],
        deadline: float,
    ) -> list[str]:  # fmt: skip
        return [
            self._put(key, block, keep, deadline) for key, block in zip(keys, blocks, strict=True)
        ]

    def get(
        self, keys: Sequence[bytes], blocks: Sequence[Block], deadline: float
    ) -> list[bool | None]:
        return [self._get(key, block) for key, block in zip(keys, blocks, strict=True)]

    def discard(self, keys: Sequence[bytes], deadline: float) -> None:
        for key in keys:
            self._unlink(self._path(key))

    def clear(self, deadline: float) -> None:
        for shard in self._shards():
            for entry in _entries(shard):
                if _NAME.fullmatch(entry.name) and entry.name.endswith(self._suffix):
                    with suppress(FileNotFoundError):
                        os.unlink(entry.path)
        with self._lock:
            self._others = None

    def close(self) -> None:
        """Remove the folder of temporary files; no file stays open."""
        with suppress(OSError):
            os.rmdir(f"{self._folder}/tmp/{self._process}")

    def stats(self) -> dict[str, Any]:
        """Count `evicted` files, `errors` of the file system, and `wrong_files`, which had another
        length; `used_bytes`, as far as this process has counted."""
        return {**self._counts, "used_bytes": self._used_bytes}

    def _exists(self, path: str) -> bool:
        try:
            return os.lstat(path).st_size == self._num_bytes
        except OSError:
            return False

    def _put(self, key: bytes, block: Block, keep: Collection[bytes], deadline: float) -> str:
        write, outcome = _Write(key.hex()), FULL
        try:
            if self._reserve(write, deadline, keep) and (
                self._write(write, key, block)
                or (self._evict(self._size, deadline, keep) and self._write(write, key, block))
            ):
                outcome = STORED
        except OSError as error:
            outcome = self._failed("write", error)
        finally:
            self._end_write(write, key)
        return outcome

    def _write(self, write: _Write, key: bytes, block: Block) -> bool:
        """Write a file; return False if the disk is full."""
        path, temporary = self._path(key), write.spare or self._temporary(key)
        file = self._open_spare(write)
        is_spare = file is not None
        try:
            if file is None:
                temporary = self._temporary(key)
                file = self._create(temporary)
            try:
                num_bytes = _move(os.pwritev, file, block)
                used_ns = _touch(file)
            finally:
                if is_spare:
                    fcntl.flock(file, fcntl.LOCK_UN)  # a child forked meanwhile would keep it
                os.close(file)
            if num_bytes != self._num_bytes:
                raise OSError(errno.EIO, "a block was not written whole", path)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                self._make_folder(key.hex()[:2])
                os.rename(temporary, path)
            write.stored_ns = used_ns
        except BaseException as error:
            with suppress(OSError):
                os.unlink(temporary)
            if isinstance(error, OSError) and error.errno in _NO_SPACE:
                return False
            raise
        return True

    def _open_spare(self, write: _Write) -> int | None:
        """Open an evicted file to write over; None without one, or while a reader has it open."""
        path, write.spare = write.spare, ""
        if not path:
            return None
        try:
            file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(file)
                is_file = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
                if is_file and status.st_size == self._num_bytes:
                    return file
            except OSError:  # a reader, or a file system without locks
                pass
            except BaseException:
                os.close(file)
                raise
            os.close(file)
        except OSError:  # such as one that another process has taken for stale
            pass
        self._unlink(path)
        return None

    def _create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(path, flags, _MODE)
        except FileNotFoundError:
            self._make_folder(f"tmp/{self._process}")
            return os.open(path, flags, _MODE)

    def _get(self, key: bytes, block: Block) -> bool | None:
        path = self._path(key)
        try:
            # Without waiting for the other end of a FIFO of this name.
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status = os.fstat(file)
                is_block = stat.S_ISREG(status.st_mode) and status.st_size == self._num_bytes
                if is_block and not _keeps_name(file, path, status.st_ino):
                    return False
                if is_block and _move(os.preadv, file, block) == self._num_bytes:
                    with suppress(OSError):  # a file system that may only be read
                        _touch(file)
                    return True
            finally:
                os.close(file)
        except FileNotFoundError:
            return False
        except OSError as error:  # such as EIO, which may pass
            self._failed("read", error)
            return None
        self._counts["wrong_files"] += 1
        self._log.warning("dropping %s: expected a file of %d bytes", path, self._num_bytes)
        self._unlink(path)
        return None

    def _failed(self, verb: str, error: OSError) -> str:
        self._counts["errors"] += 1
        self._log.warning("cannot %s a block of %r: %s", verb, self, error)
        return FAILED

    # --- Space ---

    def _reserve(self, write: _Write, deadline: float, keep: Collection[bytes]) -> bool:
        """Count a block before it is written; return whether there is room for it."""
        limit = self._capacity_bytes
        with self._lock:
            if limit is not None:
                if self._others is None or self._put_bytes * _LOOKS_PER_CAPACITY >= limit:
                    if self._others is None or self._others != self._other_writers():
                        self._list(deadline)
                    self._put_bytes = 0
                excess = self._used_bytes + self._size - limit
                if excess > 0 and not self._evict(excess, deadline, keep, write):
                    return False
            self._used_bytes += self._size
            self._put_bytes += self._size
            self._writes.add(write)
            return True

    def _end_write(self, write: _Write, key: bytes) -> None:
        with self._lock:
            is_counted = write in self._writes
            self._writes.discard(write)
            if write.stored_ns:
                if self._capacity_bytes is not None and len(self._files) < _MAX_REMEMBERED:
                    heappush(self._files, _File(write.stored_ns, self._size, self._path(key)))
            elif is_counted:
                self._used_bytes -= self._size
        if write.spare:
            self._unlink(write.spare)

    def _evict(
        self, num_bytes: int, deadline: float, keep: Collection[bytes], write: _Write | None = None
    ) -> bool:
        """Delete the least recently used files; return whether that has freed so many bytes.

        `write` : keeps one of them to write over it
        """
        with self._lock:
            wanted, is_counted = self._used_bytes - num_bytes, self._others is not None
            if is_counted and self._evict_known(wanted, keep, write):
                return True
            before = self._used_bytes
            self._list(deadline)
            if not is_counted:  # then the difference is not what others have freed
                wanted += self._used_bytes - before
            return self._evict_known(wanted, keep, write)

    def _evict_known(
        self, wanted_bytes: int, keep: Collection[bytes], write: _Write | None
    ) -> bool:
        kept = []
        while self._used_bytes > wanted_bytes and self._files:
            file = heappop(self._files)
            if bytes.fromhex(os.path.basename(file.path)[:64]) in keep:
                kept.append(file)
                continue
            try:
                used_ns = os.lstat(file.path).st_mtime_ns
                if used_ns != file.used_ns:
                    heappush(self._files, file._replace(used_ns=used_ns))
                    continue
                if write is None or write.spare or file.num_bytes != self._size:
                    os.unlink(file.path)
                else:
                    spare = self._temporary(bytes.fromhex(write.name))
                    os.utime(file.path, follow_symlinks=False)  # else others take it for stale
                    os.rename(file.path, spare)
                    write.spare = spare
                self._counts["evicted"] += 1
            except FileNotFoundError:  # another process has evicted it
                pass
            except OSError as error:
                self._failed("evict", error)
                continue
            self._used_bytes -= file.num_bytes
        for file in kept:
            heappush(self._files, file)
        return self._used_bytes <= wanted_bytes

    def _list(self, deadline: float) -> None:
        """Count the files, and remember the oldest for evictions.

        BackendLost if that is not finished by the deadline; the next call continues.
        """
        if not self._unlisted:
            self._listed, self._listed_bytes = [], self._sweep_temporaries()
            self._listed_others, self._unlisted = self._other_writers(), self._shards()
        being_written = {write.name for write in self._writes}
        while self._unlisted:
            if time.monotonic() >= deadline:
                raise BackendLost(f"{self!r}: its files are not counted yet")
            for entry in _entries(self._unlisted[-1]):
                if _NAME.fullmatch(entry.name) is None or entry.name[:64] in being_written:
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        size = _on_disk(status.st_size)
                        self._listed.append(_File(status.st_mtime_ns, size, entry.path))
                        self._listed_bytes += size
            self._unlisted.pop()
        listed, self._listed = self._listed, []
        listed.sort()  # so that it is a heap
        self._files = listed[:_MAX_REMEMBERED]
        self._used_bytes = self._listed_bytes + len(self._writes) * self._size
        self._put_bytes, self._others = 0, self._listed_others

    def _other_writers(self) -> dict[str, int]:
        """Return when other processes have last begun or ended to write a block, in ns."""
        found = {}
        for entry in _entries(f"{self._folder}/tmp"):
            if _PROCESS.fullmatch(entry.name) and entry.name != self._process:
                with suppress(FileNotFoundError):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
        return found

    def _sweep_temporaries(self) -> int:
        """Delete files of dead writers; return the bytes that other processes are writing."""
        num_bytes, now = 0, time.time()
        for process, used_ns in self._other_writers().items():
            folder = f"{self._folder}/tmp/{process}"
            for entry in _entries(folder):
                if _TEMPORARY.fullmatch(entry.name) is None:
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if now - status.st_mtime > _STALE_S:
                        self._unlink(entry.path)
                    else:
                        num_bytes += _on_disk(status.st_size)
            if now - used_ns / 1e9 > _STALE_S:
                with suppress(OSError):  # its process makes it again
                    os.rmdir(folder)
        return num_bytes

    # --- Names ---

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}{self._suffix}"

    def _temporary(self, key: bytes) -> str:
        name = f"{key.hex()}{self._suffix}.{next(self._numbers)}"
        return f"{self._folder}/tmp/{self._process}/{name}"

    def _shards(self) -> list[str]:
        return [
            entry.path for entry in _entries(self._folder)
            if _SHARD.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]  # fmt: skip

    def _make_folder(self, name: str) -> None:
        """Make a folder; OSError if a link, or what others may change, is in its place."""
        path = Path(self._folder, name)
        make_folder(path)
        require_private(path)

    def _unlink(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._failed("delete", error)


def _on_disk(num_bytes: int) -> int:
    """Return the disk space of a file.

    >>> _on_disk(4096), _on_disk(4097)
    (4096, 8192)
    """
    return -(-num_bytes // _GRAIN_BYTES) * _GRAIN_BYTES


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield what is in a folder; nothing if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return


def _keeps_name(file: int, path: str, inode: int) -> bool:
    """Keep writers from writing over an open file; return whether it still has its name."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # without locks, no file is written over
        pass
    return os.lstat(path).st_ino == inode


def _touch(file: int) -> int:
    """Record a use, and return its time. The kernel's own times are some milliseconds apart."""
    now_ns = time.time_ns()
    os.utime(file, ns=(now_ns, now_ns))
    return now_ns


def _move(call: Callable[..., int], file: int, block: Block) -> int:
    """Read or write all pieces of a block; return the number of bytes moved."""
    pieces, start = list(block), 0
    total = num_bytes_of(block)
    while start < total:
        count = call(file, pieces[:_MAX_PIECES], start)
        if not count:
            break
        start += count
        while pieces and count >= pieces[0].nbytes:
            count -= pieces.pop(0).nbytes
        if count:
            pieces[0] = pieces[0][count:]
    return start
