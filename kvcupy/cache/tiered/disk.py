"""Blocks in a file: written in an order that a crash cannot hurt, and verified when read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ...ops import checks
from ...pickling import ProcessLocal
from . import disk_format
from .disk_format import Layout
from .disk_slots import Parts, SlotFile

Buffer = memoryview | Sequence[memoryview]  # one page: whole, or its parts in order
Item = tuple[int, int, Buffer]  # slot, hash of the block, memory

_Job = tuple[Any, ...]
_Result = TypeVar("_Result")


class DiskTier(ProcessLocal):
    """Keeps blocks in the slots of one file, each under its hash.

    Parameters
    ----------
    path : of the file, which is made if it is not there, or empty
    num_bytes : room for everything; there are as many slots as fit. All of it is taken at once
    page_bytes : bytes of a block, below 2**32
    identity : what a block is made of, such as layout, format and shape, in some 4000 bytes at
        most; a file is opened again only with the same
    num_threads : that `read_many` and `write_many` share, the caller's among them

    Attributes
    ----------
    path, num_slots, page_bytes

    Raises
    ------
    TypeError, ValueError : an argument does not fit. `disk`: the file is none of a disk tier, is
        damaged where it says what it is, or is of another version, identity or size
    BlockingIOError : another process, or another tier, has the file open
    OSError : there is no room, or the file cannot be opened

    Notes
    -----
    Threads may share a tier. Operations on one slot are the caller's to order; if they overlap,
    reads of it may say False, and no read gives wrong data.

    A process that is killed loses the block that it was writing and no other; what `write` had
    returned for is there. When the system fails, what `flush` had returned for is there, and what
    was written after may be missing. The file stays locked while a forked child has it too.

    Memory is a page as contiguous bytes, or a sequence of contiguous parts that add up to one;
    the division need not be the same when it is read. It is in use until the call returns.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> page, room = memoryview(b"12345678"), memoryview(bytearray(8))
    >>> with DiskTier(folder.name + "/kv", 2**20, 8, {"format": "int8"}) as disk:
    ...     disk.write(3, 0xFEED, page)
    >>> with DiskTier(folder.name + "/kv", 2**20, 8, {"format": "int8"}) as disk:
    ...     disk.entries() == [(0xFEED, 3)], disk.read(3, 0xFEED, room), bytes(room)
    (True, True, b'12345678')
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        num_bytes: int,
        page_bytes: int,
        identity: Mapping[str, str],
        *,
        num_threads: int = 4,
    ) -> None:
        named = {"num_bytes": num_bytes, "page_bytes": page_bytes, "num_threads": num_threads}
        for name, value in named.items():
            checks.require_int(value, name)
        if num_threads < 1:
            raise ValueError(f"num_threads: expected at least 1, got {num_threads}")
        layout = Layout.fit(int(num_bytes), int(page_bytes))
        self.num_slots, self.page_bytes = layout.num_slots, layout.page_bytes
        self.path = Path(path)
        self._slots = SlotFile(self.path, layout, identity)
        self._num_threads = int(num_threads)
        self._threads = ThreadPoolExecutor(max(1, self._num_threads - 1), "kvcupy disk")

    def __repr__(self) -> str:
        used = self._slots.num_used
        return f"<DiskTier {self.path}, {used} of {self.num_slots} slots of {self.page_bytes} B>"

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def entries(self) -> list[tuple[int, int]]:
        """Return hash and slot of every block there is, the one written first in front.

        Notes
        -----
        After opening, that is the table as the file has it; whether a payload is whole is seen
        when it is read. A hash that was written to two slots is there twice.
        """
        with self._slots.using():
            return self._slots.entries()

    # --- One block ---

    def write(self, slot: int, hash: int, data: Buffer) -> None:
        """Write a block in place of what the slot had.

        Parameters
        ----------
        slot : 0 to `num_slots` - 1
        hash : an int of 64 bits, with or without sign
        data : a page of `page_bytes`

        Raises
        ------
        TypeError, ValueError : an argument does not fit; nothing has changed
        OSError : the write failed, for want of room, say. The slot is empty, and others as before
        """
        job = self._job(slot, hash, data, "data")
        with self._slots.using():
            self._slots.write(*job, next(self._slots.generations))

    def read(self, slot: int, hash: int, into: Buffer) -> bool:
        """Read a block, if the slot has it whole.

        Parameters
        ----------
        slot, hash : as written
        into : writable, room for a page of `page_bytes`

        Returns
        -------
        False if the slot is empty or has another hash; or if its payload cannot be read or is not
            what was written, and then the slot is empty from now on. What is in `into` then is
            undefined

        Raises
        ------
        TypeError, ValueError : an argument does not fit
        """
        job = self._job(slot, hash, into, "into")
        with self._slots.using():
            return self._slots.read(*job)

    def drop(self, slot: int) -> None:
        """Empty a slot, which may be empty already.

        Raises
        ------
        TypeError, ValueError : there is no such slot
        OSError : the file could not be written, and may have the block when it is opened again
        """
        slot = self._slot(slot)
        with self._slots.using():
            self._slots.drop(slot)

    # --- Many blocks ---

    def write_many(self, items: Iterable[Item]) -> list[OSError | None]:
        """Write blocks as `write` does, several at a time; later ones count as written later.

        Parameters
        ----------
        items : slot, hash and data of each, no slot twice

        Returns
        -------
        for each, None, or the error with which it failed

        Raises
        ------
        TypeError, ValueError : an item does not fit; nothing has changed
        """
        jobs = [self._job(slot, hash, data, "data") for slot, hash, data in items]
        slots = [slot for slot, _, _ in jobs]
        if len(set(slots)) < len(slots):
            raise ValueError(f"items: expected no slot twice, got slots {slots}")

        def write(*job: Any) -> OSError | None:
            try:
                self._slots.write(*job)
            except OSError as error:
                return error
            return None

        with self._slots.using():
            return self._share(write, [(*job, next(self._slots.generations)) for job in jobs])

    def read_many(self, items: Iterable[Item]) -> list[bool]:
        """Read blocks as `read` does, several at a time.

        Parameters
        ----------
        items : slot, hash and memory to read into of each

        Returns
        -------
        for each, whether it was there and whole

        Raises
        ------
        TypeError, ValueError : an item does not fit; nothing was read
        """
        jobs = [self._job(slot, hash, into, "into") for slot, hash, into in items]
        with self._slots.using():
            return self._share(self._slots.read, jobs)

    # --- The file ---

    def flush(self) -> None:
        """Wait until all that was written is on the disk itself.

        Raises
        ------
        OSError : the disk failed; what was written since the last `flush` may be lost
        """
        with self._slots.using():
            self._slots.flush()

    def close(self) -> None:
        """Close the file, once the calls of other threads are through; again is a no-op.

        What was written outlives the process without `flush`, though not the system's end.
        """
        self._slots.close()
        self._threads.shutdown()

    def _share(self, work: Callable[..., _Result], jobs: Sequence[_Job]) -> list[_Result]:
        """Do jobs in several threads, this one among them; return when no thread is at one."""
        ways = max(1, min(self._num_threads, len(jobs)))

        def share(first: int) -> list[_Result]:
            return [work(*job) for job in jobs[first::ways]]

        others: list[Future[list[_Result]]] = []
        try:
            for first in range(1, ways):
                try:
                    others.append(self._threads.submit(share, first))
                except RuntimeError:  # at the interpreter's exit, when no thread can be had
                    break
            alone = [0, *range(1 + len(others), ways)]
            done = {first: share(first) for first in alone}
        finally:
            wait(others)  # they use the caller's memory
        done.update((first, other.result()) for first, other in enumerate(others, 1))
        return [done[i % ways][i // ways] for i in range(len(jobs))]

    # --- Arguments ---

    def _job(self, slot: int, hash: int, memory: Buffer, name: str) -> tuple[int, int, Parts]:
        """Return the arguments of a read ("into") or a write ("data"), checked."""
        slot = self._slot(slot)
        checks.require_int(hash, "hash")
        return slot, disk_format.require_hash(hash), self._parts(memory, name)

    def _slot(self, slot: int) -> int:
        checks.require_int(slot, "slot")
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot: expected 0 to {self.num_slots - 1}, got {slot}")
        return int(slot)

    def _parts(self, memory: Buffer, name: str) -> Parts:
        """Return memory as bytes, in parts none of which is empty."""
        given = [memory] if isinstance(memory, memoryview) else memory
        parts = []
        for view in given:
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
