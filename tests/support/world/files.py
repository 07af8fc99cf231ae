"""Simulated `os`, `fcntl`, `mmap`, `io` and `pathlib`: files that outlive processes.

A file has the bytes that processes see, and those that a power failure would leave: writes since
the last `fsync` survive in any order, by sectors, or not at all.
"""

from __future__ import annotations

import errno
import io as real_io
import os as real_os
import pathlib
import stat as real_stat
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from .scheduler import Process, World

_SECTOR_BYTES = 512
_FIRST_DESCRIPTOR = 1_000_000  # far from real ones


class Memory(bytearray):
    """Contents of a file, and every mapping of it."""

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        return bytes(value) if isinstance(key, slice) else value

    def madvise(self, *arguments: int) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Inode:
    """A file.

    Attributes
    ----------
    data : bytes that processes see
    durable : bytes after the last `fsync`
    unsynced : (offset, bytes) written since
    owner : open file that holds the `flock`
    """

    def __init__(self, number: int, mode: int) -> None:
        self.number, self.mode = number, mode
        self.data = Memory()
        self.durable = b""
        self.unsynced: list[tuple[int, bytes]] = []
        self.num_links = 1
        self.owner: OpenFile | None = None
        self.allocated = 0


class OpenFile:
    """An open file description."""

    def __init__(self, inode: Inode, process: Process, path: str) -> None:
        self.inode, self.process, self.path = inode, process, path
        self.position = 0
        self.num_descriptors = 1

    def close_by_system(self) -> None:
        if self.inode.owner is self:
            self.inode.owner = None


class Files:
    """The file system of a world.

    Attributes
    ----------
    fault : called with the name of each call and its path; may raise OSError, or wait
    is_short : whether reads and writes may move fewer bytes than asked
    capacity_bytes : of the disk; writes and allocations past it fail
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.inodes: dict[str, Inode] = {}
        self.open_files: dict[int, OpenFile] = {}
        self.fault: Callable[[str, str], None] = lambda call, path: None
        self.is_short = False
        self.capacity_bytes = float("inf")
        self._descriptors = _FIRST_DESCRIPTOR
        self._inode_numbers = 0

    def next_descriptor(self) -> int:
        self._descriptors += 1
        return self._descriptors

    def _new_inode(self, mode: int) -> Inode:
        self._inode_numbers += 1
        return Inode(self._inode_numbers, mode)

    def lose_power(self) -> None:
        """Keep of each file what a power failure leaves. No process may be alive."""
        random = self.world.random
        for inode in self.inodes.values():
            kept = bytearray(inode.durable)
            if len(kept) < len(inode.data):
                kept += bytes(len(inode.data) - len(kept))
            writes = list(inode.unsynced)
            random.shuffle(writes)
            for offset, data in writes:
                for start in range(0, len(data), _SECTOR_BYTES):
                    if random.random() < 0.5:
                        piece = data[start : start + _SECTOR_BYTES]
                        kept[offset + start : offset + start + len(piece)] = piece
            inode.data[:] = kept[: len(inode.data)]
            inode.durable, inode.unsynced, inode.owner = bytes(inode.data), [], None

    # --- Calls ---

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        path = str(path)
        self._enter("open", path)
        if path.startswith("/proc/self/fd/"):
            inode = self._file(int(path.rpartition("/")[2])).inode
        elif path in self.inodes:
            if flags & real_os.O_CREAT and flags & real_os.O_EXCL:
                raise FileExistsError(errno.EEXIST, "File exists", path)
            inode = self.inodes[path]
        elif flags & real_os.O_CREAT:
            inode = self.inodes[path] = self._new_inode(real_stat.S_IFREG | mode & 0o777)
        elif flags & getattr(real_os, "O_TMPFILE", -1) == getattr(real_os, "O_TMPFILE", -2):
            inode = self._new_inode(real_stat.S_IFREG | mode & 0o777)
            inode.num_links = 0
        else:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        descriptor = self.next_descriptor()
        process = self.world.task.process
        self.open_files[descriptor] = opened = OpenFile(inode, process, path)
        process.handles[opened] = None
        return descriptor

    def close(self, descriptor: int) -> None:
        opened = self.open_files.pop(descriptor, None)
        if opened is None:
            if self.world.is_over:
                return
            raise OSError(errno.EBADF, "Bad file descriptor")
        opened.num_descriptors -= 1
        if not opened.num_descriptors:
            opened.close_by_system()
            opened.process.handles.pop(opened, None)

    def dup(self, descriptor: int) -> int:
        opened = self._file(descriptor)
        opened.num_descriptors += 1
        copy = self.next_descriptor()
        self.open_files[copy] = opened
        return copy

    def dup2(self, descriptor: int, other: int, inheritable: bool = True) -> int:
        opened = self._file(descriptor)
        if other in self.open_files:
            self.close(other)
        opened.num_descriptors += 1
        self.open_files[other] = opened
        return other

    def pread(self, descriptor: int, count: int, offset: int) -> bytes:
        data: bytes = self._entered("read", descriptor).data[offset : offset + self._some(count)]
        return data

    def preadv(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        data = self.pread(descriptor, sum(map(len, buffers)), offset)
        moved = len(data)
        for buffer in buffers:
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            data = data[count:]
        return moved

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        inode = self._entered("write", descriptor)
        some = bytes(data)[: self._some(len(data))]
        self._require_space(inode, offset + len(some))
        if len(inode.data) < offset:
            inode.data += bytes(offset - len(inode.data))
        if len(inode.data) < offset + len(some):
            inode.data += bytes(offset + len(some) - len(inode.data))
        inode.data[offset : offset + len(some)] = some
        inode.unsynced.append((offset, some))
        return len(some)

    def pwritev(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        return self.pwrite(descriptor, b"".join(map(bytes, buffers)), offset)

    def fsync(self, descriptor: int) -> None:
        inode = self._entered("fsync", descriptor)
        inode.durable, inode.unsynced = bytes(inode.data), []

    fdatasync = fsync

    def ftruncate(self, descriptor: int, size: int) -> None:
        inode = self._entered("truncate", descriptor)
        if size < len(inode.data):
            del inode.data[size:]
        else:
            inode.data += bytes(size - len(inode.data))

    def posix_fallocate(self, descriptor: int, offset: int, count: int) -> None:
        inode = self._entered("allocate", descriptor)
        self._require_space(inode, offset + count)
        if len(inode.data) < offset + count:
            inode.data += bytes(offset + count - len(inode.data))

    def fstat(self, descriptor: int) -> Any:
        return self._status(self._file(descriptor).inode)

    def stat(self, path: Any) -> Any:
        return self._status(self.inode_at(path))

    def inode_at(self, path: Any) -> Inode:
        inode = self.inodes.get(str(path))
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return inode

    def link(self, source: Any, target: Any, **options: Any) -> None:
        source, target = str(source), str(target)
        self._enter("link", target)
        if source.startswith("/proc/self/fd/"):
            inode = self._file(int(source.rpartition("/")[2])).inode
        else:
            inode = self.inode_at(source)
        if target in self.inodes:
            raise FileExistsError(errno.EEXIST, "File exists", target)
        self.inodes[target] = inode
        inode.num_links += 1

    def unlink(self, path: Any) -> None:
        self._enter("unlink", str(path))
        self.inode_at(path).num_links -= 1
        del self.inodes[str(path)]

    def rename(self, source: Any, target: Any) -> None:
        self._enter("rename", str(target))
        self.inode_at(source)
        self.inodes[str(target)] = self.inodes.pop(str(source))

    def flock(self, descriptor: Any, operation: int) -> None:
        import fcntl

        self.world.pause()
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        opened = self._file(number)
        inode = opened.inode
        if operation & fcntl.LOCK_UN:
            if inode.owner is opened:
                inode.owner = None
            return
        if inode.owner in (None, opened):
            inode.owner = opened
            return
        if operation & fcntl.LOCK_NB:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        self.world.wait(lambda: inode.owner is None)
        inode.owner = opened

    def chmod(self, path: Any, mode: int) -> None:
        inode = self.inodes[str(path)]
        inode.mode = real_stat.S_IFMT(inode.mode) | mode

    def fchmod(self, descriptor: int, mode: int) -> None:
        inode = self._file(descriptor).inode
        inode.mode = real_stat.S_IFMT(inode.mode) | mode

    def map(self, descriptor: int, count: int, *arguments: Any, **options: Any) -> Memory:
        return self._file(descriptor).inode.data

    # --- Parts ---

    def _file(self, descriptor: int) -> OpenFile:
        if descriptor not in self.open_files:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return self.open_files[descriptor]

    def _enter(self, call: str, path: str) -> None:
        self.world.pause()
        if not self.world.is_over:
            self.fault(call, path)

    def _entered(self, call: str, descriptor: int) -> Inode:
        opened = self._file(descriptor)
        self._enter(call, opened.path)
        return opened.inode

    def _some(self, count: int) -> int:
        if self.is_short and count > 1 and self.world.random.random() < 0.1:
            return self.world.random.randint(1, count)
        return count

    def _require_space(self, inode: Inode, size: int) -> None:
        others = sum(len(each.data) for each in set(self.inodes.values()) if each is not inode)
        if others + max(size, len(inode.data)) > self.capacity_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _status(self, inode: Inode) -> Any:
        return SimpleNamespace(
            st_mode=inode.mode, st_ino=inode.number, st_dev=1, st_size=len(inode.data),
            st_uid=real_os.geteuid(), st_gid=0, st_nlink=inode.num_links,
            st_blocks=len(inode.data) // 512, st_mtime=0.0, st_mtime_ns=0,
        )  # fmt: skip


def kept(module: Any, name: str, value: Any) -> Any:
    """Return an attribute that `__getattr__` has found, and find it there from now on."""
    setattr(module, name, value)
    return value


def modules_of(world: World, files: Files) -> tuple[Any, Any, Any, Any, Any]:
    """Make `os`, `fcntl`, `mmap`, `io` and `pathlib.Path` of a world."""
    calls = (
        "open", "close", "dup", "dup2", "pread", "preadv", "pwrite", "pwritev", "fsync",
        "fdatasync", "ftruncate", "posix_fallocate", "fstat", "stat", "link", "unlink", "rename",
        "fchmod", "chmod",
    )  # fmt: skip
    constants = (
        "path", "PathLike", "fspath", "fsencode", "fsdecode", "environ", "strerror", "error",
        "geteuid", "getuid", "cpu_count", "sep", "linesep",
    )  # fmt: skip

    class Os:
        def __getattr__(self, name: str) -> Any:
            if name in calls:
                return kept(self, name, getattr(files, name))
            if name in constants or name.startswith(("O_", "SEEK_")):
                return kept(self, name, getattr(real_os, name))
            raise AttributeError(f"the simulated module os has no {name}")

        replace = staticmethod(files.rename)

        def getpid(self) -> int:
            task = world.current
            return 1 if task is None else task.process.pid

        def urandom(self, count: int) -> bytes:
            return world.random.randbytes(count)

        def sched_getaffinity(self, pid: int) -> set[int]:
            return {0, 1}

        def register_at_fork(self, **functions: Any) -> None:
            pass

    class Fcntl:
        flock = staticmethod(files.flock)

        def __getattr__(self, name: str) -> Any:
            import fcntl

            if name.startswith("LOCK_"):
                return kept(self, name, getattr(fcntl, name))
            raise AttributeError(f"the simulated module fcntl has no {name}")

    class Mmap:
        mmap = staticmethod(files.map)
        PAGESIZE = 4096

    class Path(pathlib.PurePosixPath):
        """Paths of a world. `pathlib.Path` has many more methods; those in use are here."""

        def exists(self) -> bool:
            return str(self) in files.inodes

        def is_file(self) -> bool:
            return self.exists() and real_stat.S_ISREG(files.inodes[str(self)].mode)

        def is_dir(self) -> bool:
            return any(path.startswith(f"{self}/") for path in files.inodes)

        def stat(self) -> Any:
            return files.stat(self)

        lstat = stat

        def chmod(self, mode: int) -> None:
            files.chmod(self, mode)

        def read_text(self) -> str:
            return bytes(files.inode_at(self).data).decode()

        def rename(self, target: Any) -> None:
            files.rename(self, target)

        def unlink(self, missing_ok: bool = False) -> None:
            if not (missing_ok and not self.exists()):
                files.unlink(self)

        def glob(self, pattern: str) -> list[Path]:
            return [Path(path) for path in files.inodes if Path(path).parent == self
                    and Path(path).match(pattern)]  # fmt: skip

    class FileIO:
        """An unbuffered file, as `io.FileIO` and `open(buffering=0)` return."""

        def __init__(self, file: Any, mode: str = "rb", closefd: bool = True) -> None:
            self._fd = file if isinstance(file, int) else files.open(file, real_os.O_RDWR)
            self.closed = False

        def fileno(self) -> int:
            return self._fd

        def seek(self, offset: int, whence: int = 0) -> int:
            opened = files._file(self._fd)
            base = {0: 0, 1: opened.position, 2: len(opened.inode.data)}[whence]
            opened.position = base + offset
            return opened.position

        def close(self) -> None:
            if not self.closed:
                self.closed = True
                files.close(self._fd)

        def __enter__(self) -> FileIO:
            return self

        def __exit__(self, *exception: object) -> None:
            self.close()

    class Io:
        def __getattr__(self, name: str) -> Any:
            return kept(self, name, getattr(real_io, name))

    Io.FileIO = FileIO  # type: ignore[attr-defined]
    return Os(), Fcntl(), Mmap(), Io(), Path
