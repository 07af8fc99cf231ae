"""The file of the shared-memory backend: its layout, making and opening it, and memory limits."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...config import cache_logger

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
_FLAGS = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)

_CGROUPS_OF_THIS_PROCESS = "/proc/self/cgroup"
_CGROUP_FOLDER = "/sys/fs/cgroup"
_MEMORY_INFO = "/proc/meminfo"


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
        if low >= 2**30:
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


def open_mapped(
    path: Path, block_bytes: int | None, capacity_bytes: int | None, layout: Layout | None
) -> tuple[int, mmap.mmap, Layout]:
    """Open and map a file; create it if it does not exist and `layout` is not None."""
    while True:
        try:
            descriptor = os.open(path, _FLAGS)
        except FileNotFoundError:
            if layout is None:
                raise FileNotFoundError(
                    errno.ENOENT, "url: the store does not exist; capacity_bytes creates it"
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
    """Create, open and map a file, which gets its name when it is complete."""
    descriptor, unfinished = _new_file(path)
    own = unfinished or Path(f"/proc/self/fd/{descriptor}")
    try:
        os.ftruncate(descriptor, layout.num_bytes)
        os.posix_fallocate(descriptor, 0, layout.payloads_at)
        os.pwrite(descriptor, layout.header(), 0)
        mapped = _mapped(own, descriptor, layout, _FLAGS & ~os.O_NOFOLLOW)
        assert mapped is not None
        try:
            if unfinished is None:
                # Only linkat, which a directory descriptor selects, follows links of /proc.
                os.link(own, path, src_dir_fd=descriptor, follow_symlinks=True)
            else:
                os.link(own, path)
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        except BaseException:
            mapped.close()
            raise
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        if unfinished is not None:
            unfinished.unlink()
    return descriptor, mapped


def _new_file(path: Path) -> tuple[int, Path | None]:
    """Open a new file in the folder of `path`, without a name if the file system can do that.

    Otherwise return its temporary name, too. The file is then locked, and is removed by the next
    process that makes this store if its creator dies.
    """
    try:
        flags = getattr(os, "O_TMPFILE", 0) | os.O_RDWR | os.O_CLOEXEC
        return os.open(path.parent, flags, 0o600), None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    for leftover in path.parent.glob(f".{path.name}.*"):
        with suppress(OSError), _opened_file(leftover) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()
    while True:
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        descriptor = os.open(unfinished, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, unfinished
        os.close(descriptor)  # another process took it for a leftover before it was locked


@contextmanager
def _opened_file(path: Path, flags: int = _FLAGS) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _mapped(path: Path, descriptor: int, layout: Layout, flags: int = _FLAGS) -> mmap.mmap | None:
    """Map an open file; None if the path no longer refers to it.

    An mmap duplicates its descriptor, and children inherit the duplicate. The descriptor is
    therefore opened separately, so that it does not share the lock.
    """
    with suppress(FileNotFoundError), _opened_file(path, flags) as another:
        if os.path.samestat(os.fstat(another), os.fstat(descriptor)):
            return mmap.mmap(another, layout.num_bytes)
    return None


def _read_layout(
    descriptor: int, path: Path, block_bytes: int | None, capacity_bytes: int | None
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
    if block_bytes is None:
        block_bytes = stored_block_bytes
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


# --- The memory that this process may use ---


def memory_limit() -> tuple[int, Path] | None:
    """Return the lowest memory limit of this process's control groups, and its file, if any."""
    limits = []
    for path in _limit_files():
        with suppress(OSError, ValueError):  # "max" is no limit
            limits.append((int(path.read_text()), path))
    return min(limits, default=None)


def _limit_files() -> Iterator[Path]:
    """Yield the files that may limit this process's memory, of control groups version 2 and 1."""
    with suppress(OSError):
        for line in Path(_CGROUPS_OF_THIS_PROCESS).read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                root, name = Path(_CGROUP_FOLDER), "memory.max"
            elif "memory" in controllers.split(","):
                root, name = Path(_CGROUP_FOLDER, "memory"), "memory.limit_in_bytes"
            else:
                continue
            folder = root / group.lstrip("/")
            while folder != root.parent:
                yield folder / name
                folder = folder.parent


def warn_if_tight(
    path: Path, num_bytes: int, allocated_bytes: int, limit: tuple[int, Path] | None
) -> None:
    """Log a warning if the store may take more than half of the memory of this process."""
    if limit is not None and num_bytes > limit[0] // 2:
        cache_logger.warning(
            "%s: takes up to %d bytes of the %d that %s allows; pages count there until the store "
            "is removed, whether its processes live or not", path, num_bytes, *limit,
        )  # fmt: skip
    with suppress(OSError):
        found = re.search(r"MemAvailable: *(\d+) kB", Path(_MEMORY_INFO).read_text())
        available = 1024 * int(found[1]) if found else num_bytes
        if num_bytes - allocated_bytes > available // 2:
            cache_logger.warning(
                "%s: takes up to %d bytes more, and the system has %d available",
                path, num_bytes - allocated_bytes, available,
            )  # fmt: skip


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // 4096) * 4096


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
