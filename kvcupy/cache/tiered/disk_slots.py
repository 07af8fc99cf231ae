"""The slots of a disk tier's file, which never have the record of a payload that is not whole."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ...config import logger
from . import disk_format, disk_io
from .disk_format import Layout, Record

Parts = list[memoryview]  # one page as bytes


class SlotFile:
    """An open file of a disk tier, and in memory the table of its records.

    Parameters
    ----------
    path, identity : as of `DiskTier`
    layout : where things lie

    Attributes
    ----------
    path
    num_used : slots that are not empty
    generations : iterator of numbers higher than those of all records before

    Raises
    ------
    As `DiskTier`

    Notes
    -----
    Arguments are not checked. Threads may share it; see `DiskTier`. Whoever calls a method keeps
    the file from being closed with `using`.
    """

    def __init__(self, path: Path, layout: Layout, identity: Mapping[str, str]) -> None:
        self.path = path
        self._records: dict[int, Record] = {}  # by slot, those that are valid
        self._layout = layout
        self._changed = threading.Condition()  # guards the records and the two below
        self._num_users = 0  # calls that use the file now
        self._closed = False
        header = disk_format.encode_header(layout, identity)
        self._file = disk_io.open_locked(path)
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
        self.generations = itertools.count(newest + 1)

    @property
    def num_used(self) -> int:
        return len(self._records)

    def entries(self) -> list[tuple[int, int]]:
        """Return hash and slot of every block, the one written first in front."""
        with self._changed:
            records = list(self._records.values())
        records.sort(key=lambda record: record.generation)
        return [(record.hash, record.slot) for record in records]

    def write(self, slot: int, hash: int, parts: Parts, generation: int) -> None:
        """Write a block; OSError leaves the slot empty."""
        num_bytes, checksum = self._layout.page_bytes, disk_format.checksum(hash, parts)
        record = Record(hash, generation, slot, num_bytes, checksum)
        encoded = memoryview(disk_format.encode_record(record))
        with self._naming_file() as descriptor:
            self._invalidate(slot)
            disk_io.write_all(descriptor, parts, self._layout.payload_at(slot))
            with self._changed:
                disk_io.write_all(descriptor, [encoded], self._layout.record_at(slot))
                self._records[slot] = record

    def read(self, slot: int, hash: int, parts: Parts) -> bool:
        """Read a block; empty the slot where that is not what was written."""
        record = self._records.get(slot)
        if record is None or record.hash != hash:
            return False
        try:
            there = disk_io.read_all(self._file.fileno(), parts, self._layout.payload_at(slot))
        except OSError as error:
            logger.warning("slot %d of %s cannot be read: %s", slot, self.path, error)
            there = False
        if there and disk_format.checksum(hash, parts) == record.checksum:
            return True
        try:
            self._invalidate(slot, only=record)
        except OSError as error:  # opened again, it would be found damaged again
            logger.warning("slot %d of %s cannot be emptied: %s", slot, self.path, error)
        return False

    def drop(self, slot: int) -> None:
        """Empty a slot."""
        with self._naming_file():
            self._invalidate(slot)

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        with self._naming_file() as descriptor:
            os.fsync(descriptor)

    def close(self) -> None:
        """Close the file, once nobody uses it."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._num_users)
        self._file.close()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the file from being closed; ValueError if it is."""
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

    def _invalidate(self, slot: int, only: Record | None = None) -> None:
        """Empty a slot; if `only` is given, then only while that is its record."""
        with self._changed:
            if only is not None and self._records.get(slot) is not only:
                return  # it was written anew meanwhile
            self._records.pop(slot, None)
            empty = memoryview(disk_format.NO_RECORD)
            disk_io.write_all(self._file.fileno(), [empty], self._layout.record_at(slot))

    @contextmanager
    def _naming_file(self) -> Iterator[int]:
        """Give the descriptor of the file, and let errors of the system say which file it is."""
        try:
            yield self._file.fileno()
        except OSError as error:
            error.filename = str(self.path)
            raise

    def _make(self, header: bytes) -> None:
        """Make an empty file into one of a disk tier."""
        descriptor = self._file.fileno()
        try:
            disk_io.write_all(descriptor, [memoryview(header)], 0)
            os.fsync(descriptor)  # before there are blocks that need it
            disk_io.allocate(descriptor, self._layout.num_bytes)
        except BaseException:
            os.ftruncate(descriptor, 0)
            self.path.unlink(missing_ok=True)
            raise

    def _load(self, identity: Mapping[str, str]) -> None:
        """Check a file, and read its table."""
        descriptor, layout = self._file.fileno(), self._layout
        size = os.fstat(descriptor).st_size
        header = os.pread(descriptor, disk_format.BLOCK_BYTES, 0)
        disk_format.check_header(header, layout, identity, self.path)
        disk_io.allocate(descriptor, layout.num_bytes)  # it was cut, or whoever made it killed
        table = memoryview(bytearray(layout.table_bytes))
        disk_io.read_all(descriptor, [table], layout.record_at(0))
        for slot in range(layout.num_slots):
            start = slot * disk_format.RECORD_BYTES
            raw = table[start : start + disk_format.RECORD_BYTES]
            if raw == disk_format.NO_RECORD:
                continue
            record = disk_format.decode_record(raw, layout, slot)
            if record is not None and layout.payload_at(slot) + record.num_bytes <= size:
                self._records[slot] = record
