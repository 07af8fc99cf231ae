"""What a disk tier asks of the system: a file of its own, room in it, reads and writes."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

_MOST_PARTS = 1024  # memory areas that one call to the system takes


def open_locked(path: Path) -> io.FileIO:
    """Open a file to read and write, made empty if it is not there, that nobody else has open so.

    Raises
    ------
    BlockingIOError : another process has it, or another tier of this one
    ValueError : `path` is something else than a file
    OSError : it cannot be opened, or the system lacks file locks or vectored reads and writes
    """
    try:
        import fcntl
    except ImportError:
        fcntl = None  # type: ignore[assignment]
    if fcntl is None or not hasattr(os, "preadv"):
        raise OSError(errno.ENOTSUP, "disk: expected a system with flock and preadv", str(path))
    while True:
        # Readable by its owner alone: what was said can be told from keys and values.
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
        file.close()  # whoever had the lock before removed the file


def allocate(descriptor: int, num_bytes: int) -> None:
    """Make a file that long, with room for every byte where the file system can promise it.

    Raises
    ------
    OSError : there is no room
    """
    if os.fstat(descriptor).st_size >= num_bytes:
        return
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    os.ftruncate(descriptor, num_bytes)  # a write may then find no room, which `write` reports


def write_all(descriptor: int, parts: list[memoryview], offset: int) -> None:
    """Write memory to one place of a file, part after part.

    Raises
    ------
    OSError : not all could be written
    """
    while parts:
        done = os.pwritev(descriptor, parts[:_MOST_PARTS], offset)
        if not done:
            raise OSError(errno.EIO, "nothing was written")
        parts, offset = _after(parts, done), offset + done


def read_all(descriptor: int, parts: list[memoryview], offset: int) -> bool:
    """Fill memory from one place of a file; False where the file ends before."""
    while parts:
        done = os.preadv(descriptor, parts[:_MOST_PARTS], offset)
        if not done:
            return False
        parts, offset = _after(parts, done), offset + done
    return True


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of memory areas after their first bytes."""
    for i, part in enumerate(parts):
        if done < len(part):
            return [part[done:], *parts[i + 1 :]]
        done -= len(part)
    return []


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether a file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
