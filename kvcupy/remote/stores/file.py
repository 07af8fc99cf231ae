"""Blocks as files in a directory, which processes of this user share.

    PATH/3f/3f5a...-NAMESPACE   a block: header, contents, start of the key
    PATH/writers/PROCESS        how many bytes a process has added, and has put in all

A block is named by its key and namespace in hexadecimal, in a folder by the first byte of the key.
A file that is being written has mode 0200 and becomes 0600 at the end, so a block is there whole or
not at all, also after a writer was killed. Modification times are the order of use: a hit sets it.
Nothing is synchronized: after a power failure, checksums show what is damaged.

Readers and writers lock files (`flock`). An evicted file gets the mode of one that is being written
and another name, and is then written over, which takes a fraction of the time of deleting it and
allocating another one; a file that is being read is deleted instead. A reader that has opened a
file just before finds another key at its end, and misses.

There is no index. Each process counts its own puts at once, and reads the counters of others after
it has put a sixteenth of the capacity: n processes exceed it by at most (n - 1) / 16. It lists the
directory for its first put, when others have put as much as the capacity, since it cannot know
what they use, and when one of them has ended, since its counter may be out of date.
"""

# Paths are strings: making a Path takes longer than the call of the system.
# ruff: noqa: PTH104, PTH108, PTH119

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from heapq import heapify, heappop, heappush
from io import FileIO
from pathlib import Path
from typing import Any

from ... import checks
from ...config import BoundedLog, cache_logger
from ...errors import ProcessLocal, file_path
from ...files import make_folder, require_private
from .backend import FAILED, FULL, KNOWN, STORED, Block

_MODE, _PARTIAL_MODE = 0o600, 0o200  # keys and values reveal prompts; while it is being written
_KEY_BYTES = 16  # of the key, at the end of a file, which may get another name while it is opened
_GRAIN_BYTES = 4096  # in which file systems allocate
_MAX_PIECES = 1024  # buffers per system call
_BYTES_PER_CALL = 2**20  # few blocks, which are then verified while they are in the CPU cache
_MIN_THREADED_BYTES = 2**20  # below this, most of the time of a block is Python's
_LOOKS_PER_CAPACITY = 16  # after each such part that a process has put, it reads others' counters
_MAX_REMEMBERED = 2**17  # files that evictions find without listing the directory
_STALE_S = 60.0  # age of files that are being written whose writers are taken for dead
_NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{32}")
_SHARD, _PROCESS = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{16}")
_COUNTER = struct.Struct("<qq")  # bytes added less those deleted, bytes put
# Without waiting for the other end of a FIFO of this name.
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

_File = tuple[int, int, str]  # time of its last use in ns, bytes on disk, path


def open_backend(
    url: str, *, namespace: bytes, num_bytes: int, capacity_bytes: int | None, deadline: float
) -> FileBackend:
    """Open a directory of blocks, which is made if it does not exist."""
    path = url.removeprefix("file:")
    path = path[2:] if path.startswith("///") else path
    if not path or path.startswith("//") or "\0" in path:
        raise ValueError(f"url: expected file:PATH, got {url!r}")
    if capacity_bytes is not None:
        checks.require_int(capacity_bytes, "capacity_bytes")
        if capacity_bytes < (size := _on_disk(num_bytes + _KEY_BYTES)):
            raise ValueError(
                f"capacity_bytes: expected at least the {size} bytes of a block, "
                f"got {capacity_bytes}"
            )
    folder = file_path(path, "url").expanduser().absolute()
    make_folder(folder)
    folder = folder.resolve()
    require_private(folder)
    backend = FileBackend(folder, namespace, num_bytes, capacity_bytes)
    try:
        backend.publish()
    except OSError as error:
        if error.errno not in _NO_SPACE:  # blocks of a full disk can be read
            raise
    return backend


class _Spare:
    """A file to write a block to, open: a new one, or an evicted one of the same length, locked."""

    file, path = -1, ""

    def close(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a child forked meanwhile would keep it
            os.close(file)

    __del__ = close

    def delete(self) -> None:
        path, self.path = self.path, ""
        if path or self.file >= 0:
            with suppress(OSError):
                os.unlink(path)
            with suppress(OSError):
                self.close()


class FileBackend(ProcessLocal):
    """Blocks of `num_bytes` as files of one directory, of which all files count to the capacity."""

    _instead = "open one in each process"

    def __init__(
        self, folder: Path, namespace: bytes, num_bytes: int, capacity_bytes: int | None
    ) -> None:
        self._folder, self._suffix = str(folder), f"-{namespace.hex()}"
        self._num_bytes = num_bytes + _KEY_BYTES
        self._size = _on_disk(self._num_bytes)
        self._capacity_bytes = capacity_bytes
        self.blocks_per_call = max(1, _BYTES_PER_CALL // num_bytes)
        is_large = num_bytes >= _MIN_THREADED_BYTES
        self.num_threads = min(4, os.cpu_count() or 1) if is_large else 1
        self._log = BoundedLog(cache_logger)
        self._lock = threading.RLock()  # guards the fields below
        self._used_bytes = 0  # as far as this process knows
        self._files: list[_File] = []  # a heap, the least recently used first
        self._counter: FileIO | None = None  # locked as long as this process lives
        self._added_bytes = self._put_bytes = self._looked_at_bytes = 0
        self._others: dict[str, tuple[int, int]] | None = None  # counters; None: nothing is counted
        self._unseen_bytes = 0  # that others have put since the directory was listed
        self._writing: dict[str, str] = {}  # by path, the path of an evicted file to write over
        self._counts: Counter[str] = Counter(evicted=0, errors=0, wrong_files=0)

    def __repr__(self) -> str:
        return f"<FileBackend of {self._folder}>"

    # --- Blocks ---

    def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return [self._exists(self._path(key)) for key in keys]

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], used_ns: Mapping[bytes, int],
        deadline: float,
    ) -> list[str]:  # fmt: skip
        outcomes = [self._put(key, block, used_ns) for key, block in zip(keys, blocks, strict=True)]
        with suppress(OSError):  # such as a full disk
            self.publish()
        return outcomes

    def get(
        self, keys: Sequence[bytes], blocks: Sequence[Block], used_ns: Mapping[bytes, int],
        deadline: float,
    ) -> list[bool | None]:  # fmt: skip
        return [
            self._get(key, block, used_ns[key]) for key, block in zip(keys, blocks, strict=True)
        ]

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
            self.close()  # a counter that ends lets others list the directory

    def close(self) -> None:
        """Remove the counter of this process; no file stays open."""
        with self._lock:
            counter, self._counter = self._counter, None
            self._added_bytes = self._put_bytes = self._looked_at_bytes = 0
        if counter is not None:
            with suppress(OSError):
                os.unlink(counter.name)
            counter.close()

    def stats(self) -> dict[str, Any]:
        """Count `evicted` files, `errors` of the file system, and `wrong_files`, which had another
        length or key; `used_bytes`, as far as this process has counted."""
        return {**self._counts, "used_bytes": self._used_bytes}

    def _exists(self, path: str) -> bool:
        try:
            status = os.lstat(path)
        except OSError:
            return False
        return status.st_size == self._num_bytes and not _is_partial(status)

    def _put(self, key: bytes, block: Block, used_ns: Mapping[bytes, int]) -> str:
        path, spare, outcome = self._path(key), _Spare(), FULL
        try:
            with self._lock:
                if not self._has_room(used_ns, spare):
                    return FULL
                self._used_bytes += self._size
                self._writing[path] = spare.path
            try:
                outcome = self._write(path, spare, key, block, used_ns[key])
                if outcome == FULL and self._evict(self._size, used_ns):
                    outcome = self._write(path, spare, key, block, used_ns[key])
            finally:
                with self._lock:
                    self._writing.pop(path, None)
                    if outcome == STORED:
                        self._count_stored(used_ns[key], path)
                    else:
                        self._used_bytes -= self._size
        except OSError as error:
            return self._failed("write", error)
        finally:
            spare.delete()
        return outcome

    def _write(self, path: str, spare: _Spare, key: bytes, block: Block, used_ns: int) -> str:
        """Write a file; return "full" if the disk is."""
        try:
            if spare.file >= 0:
                self._rename_evicted(spare, path)
            if spare.file < 0:
                spare.file = self._create(path)
                if spare.file < 0:  # another process has stored it meanwhile
                    return KNOWN
                spare.path = path
            pieces = [*block, memoryview(key)[:_KEY_BYTES]]
            if _move(os.pwritev, spare.file, pieces, self._num_bytes) != self._num_bytes:
                raise OSError(errno.EIO, "a block was not written whole", path)
            os.utime(spare.file, ns=(used_ns, used_ns))
            os.fchmod(spare.file, _MODE)
            spare.close()
            spare.path = ""
        except OSError as error:
            if error.errno in _NO_SPACE:
                return FULL
            raise
        return STORED

    def _rename_evicted(self, spare: _Spare, path: str) -> None:
        """Give an evicted file the name of a block, unless it has been deleted."""
        try:
            os.fchmod(spare.file, _PARTIAL_MODE)
            try:
                os.rename(spare.path, path)
            except FileNotFoundError:
                self._make_shard(path)
                os.rename(spare.path, path)
            spare.path = path
        except FileNotFoundError:
            spare.delete()

    def _create(self, path: str) -> int:
        """Make a file to write to; return -1 if the block exists."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(3):
            try:
                return os.open(path, flags, _PARTIAL_MODE)
            except FileNotFoundError:
                self._make_shard(path)
            except FileExistsError:  # damaged, foreign, or a dead writer's
                if self._exists(path):
                    return -1
                os.unlink(path)
        raise OSError(errno.EBUSY, "other processes make and delete it", path)

    def _get(self, key: bytes, block: Block, used_ns: int) -> bool | None:
        path, end = self._path(key), memoryview(bytearray(_KEY_BYTES + 1))
        try:
            file = os.open(path, os.O_RDONLY | _FLAGS)
            try:
                if _lock(file, fcntl.LOCK_SH) is False:  # it is being written over
                    return False
                if (
                    _move(os.preadv, file, [*block, end], self._num_bytes) == self._num_bytes
                    and end[:-1] == key[:_KEY_BYTES]
                ):
                    with suppress(OSError):  # a file system that may only be read
                        os.utime(file, ns=(used_ns, used_ns))
                    return True
                status = os.fstat(file)
                if _is_partial(status) or os.lstat(path).st_ino != status.st_ino:
                    return False
            finally:
                os.close(file)
        except (FileNotFoundError, PermissionError):  # PermissionError: it is being written
            return False
        except OSError as error:  # such as EIO, which may pass
            self._failed("read", error)
            return None
        self._counts["wrong_files"] += 1
        self._log.warning("dropping %s: expected a block of %d bytes", path, self._num_bytes)
        self._unlink(path)
        return None

    def _failed(self, verb: str, error: OSError) -> str:
        self._counts["errors"] += 1
        self._log.warning("cannot %s a block of %r: %s", verb, self, error)
        return FAILED

    # --- Space ---

    def _has_room(self, keep: Collection[bytes], spare: _Spare) -> bool:
        """Return whether another block fits, after evictions."""
        limit = self._capacity_bytes
        if limit is None:
            return True
        unlooked_bytes = self._put_bytes - self._looked_at_bytes
        if self._others is None or unlooked_bytes * _LOOKS_PER_CAPACITY >= limit:
            self._look(limit)
        excess = self._used_bytes + self._size - limit
        return excess <= 0 or self._evict(excess, keep, spare)

    def _count_stored(self, used_ns: int, path: str) -> None:
        self._put_bytes += self._size
        self._added_bytes += self._size
        if self._capacity_bytes is not None and len(self._files) < _MAX_REMEMBERED:
            heappush(self._files, (used_ns, self._size, path))

    def _evict(self, num_bytes: int, keep: Collection[bytes], spare: _Spare | None = None) -> bool:
        """Evict the least recently used files; return whether that has freed so many bytes."""
        with self._lock:
            wanted, is_counted = self._used_bytes - num_bytes, self._others is not None
            if is_counted and self._evict_known(wanted, keep, spare):
                return True
            if spare is not None:  # else its file would be counted again
                spare.delete()
            before = self._used_bytes
            self._list()
            if not is_counted:  # then the difference is not what others have freed
                wanted += self._used_bytes - before
            return self._evict_known(wanted, keep, spare)

    def _evict_known(
        self, wanted_bytes: int, keep: Collection[bytes], spare: _Spare | None
    ) -> bool:
        kept, start = [], len(self._folder) + len("/3f/")
        while self._used_bytes > wanted_bytes and self._files:
            file = heappop(self._files)
            if bytes.fromhex(file[2][start : start + 64]) in keep:
                kept.append(file)
                continue
            try:
                self._evict_one(file, spare)
            except FileNotFoundError:  # another process has evicted it, and counts it
                pass
            except OSError as error:
                self._failed("evict", error)
        for file in kept:
            heappush(self._files, file)
        return self._used_bytes <= wanted_bytes

    def _evict_one(self, known: _File, spare: _Spare | None) -> None:
        """Evict a file, unless it was used meanwhile or is being written."""
        used_ns, num_bytes, path = known
        file = os.open(path, os.O_WRONLY | _FLAGS)
        try:
            is_locked = _lock(file, fcntl.LOCK_EX)
            status = os.fstat(file)
            if status.st_mtime_ns != used_ns:
                heappush(self._files, (status.st_mtime_ns, num_bytes, path))
                return
            if _is_partial(status) and time.time() - status.st_mtime < _STALE_S:
                return
            if is_locked is False and _lock(file, fcntl.LOCK_SH) is False:
                return  # another process writes over it
            self._counts["evicted"] += 1
            self._used_bytes -= num_bytes
            self._added_bytes -= num_bytes
            is_file = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            if (
                is_locked and is_file and status.st_size == self._num_bytes
                and spare is not None and spare.file < 0
            ):  # fmt: skip
                spare.file, spare.path, file = file, path, -1
            else:
                os.unlink(path)
        finally:
            if file >= 0:
                os.close(file)

    # --- Counting ---

    def _look(self, limit: int) -> None:
        """Count what other processes have added and deleted since the last look."""
        before, others = self._others, self._other_writers()
        if before is not None:
            for name, (added, put) in others.items():
                added_before, put_before = before.get(name, (0, 0))
                self._used_bytes += added - added_before
                self._unseen_bytes += put - put_before
        self._others = others
        self._looked_at_bytes = self._put_bytes
        has_ended = before is None or not before.keys() <= others.keys()
        if has_ended or self._unseen_bytes > limit:
            self._list()

    def _list(self) -> None:
        """Count the files, and remember the oldest for evictions."""
        listed: list[_File] = []
        being_written = {*self._writing, *self._writing.values()}
        for shard in self._shards():
            for entry in _entries(shard):
                if _NAME.fullmatch(entry.name) is None or entry.path in being_written:
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        size = _on_disk(status.st_size)
                        listed.append((status.st_mtime_ns, size, entry.path))
        self._used_bytes = sum(file[1] for file in listed) + len(self._writing) * self._size
        if len(listed) > _MAX_REMEMBERED:
            listed.sort()
            del listed[_MAX_REMEMBERED:]
        heapify(listed)
        self._files, self._unseen_bytes = listed, 0

    def publish(self) -> None:
        """Write the counter of this process, for others; OSError if that is impossible."""
        with self._lock:
            if self._counter is not None and not os.fstat(self._counter.fileno()).st_nlink:
                self.close()  # the directory was deleted
            if self._counter is None:
                self._make_folder("writers")
                path = f"{self._folder}/writers/{secrets.token_hex(8)}"
                counter = FileIO(path, "xb+", opener=_opener)
                _lock(counter.fileno(), fcntl.LOCK_EX)
                self._counter, self._others = counter, None
            counts = _COUNTER.pack(self._added_bytes, self._put_bytes)
            os.pwrite(self._counter.fileno(), counts, 0)

    def _other_writers(self) -> dict[str, tuple[int, int]]:
        """Return the counters of other processes, and delete the counters of dead ones."""
        found = {}
        name = "" if self._counter is None else os.path.basename(self._counter.name)
        for entry in _entries(f"{self._folder}/writers"):
            if _PROCESS.fullmatch(entry.name) is None or entry.name == name:
                continue
            with suppress(OSError):  # it has ended
                file = os.open(entry.path, os.O_RDONLY | _FLAGS)
                try:
                    if _lock(file, fcntl.LOCK_SH):
                        os.unlink(entry.path)
                    elif len(counter := os.pread(file, _COUNTER.size, 0)) == _COUNTER.size:
                        found[entry.name] = _COUNTER.unpack(counter)
                finally:
                    os.close(file)
        return found

    # --- Names ---

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}{self._suffix}"

    def _shards(self) -> list[str]:
        return [
            entry.path for entry in _entries(self._folder)
            if _SHARD.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]  # fmt: skip

    def _make_shard(self, path: str) -> None:
        self._make_folder(os.path.basename(path)[:2])

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


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return what is in a folder; nothing if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, _MODE)


def _is_partial(status: os.stat_result) -> bool:
    """Return whether a file is not written to its end."""
    return not status.st_mode & stat.S_IRUSR


def _lock(file: int, kind: int) -> bool | None:
    """Lock a file unless another descriptor has locked it; None: the file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _move(call: Callable[..., int], file: int, block: Block, num_bytes: int) -> int:
    """Read or write the pieces of a block up to `num_bytes`; return the number of bytes moved."""
    pieces, start = list(block), 0
    while start < num_bytes:
        count = call(file, pieces[:_MAX_PIECES], start)
        if not count:
            break
        start += count
        while pieces and count >= pieces[0].nbytes:
            count -= pieces.pop(0).nbytes
        if count:
            pieces[0] = pieces[0][count:]
    return start
