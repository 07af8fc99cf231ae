"""The contents of a file of kvcupy: a saved sequence, or the blocks of a disk tier."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..formats import tag
from .paged.contents import check_metadata, read_file
from .tiered import disk_format
from .tiered.disk_format import Layout

_TABLE_BYTES = 2**20  # of records, read at once


def inspect(path: str | Path, *, verify: bool = False) -> dict[str, Any]:
    """Return the contents of a file, in names and numbers that JSON can express.

    Parameters
    ----------
    path : a file of `PagedKVCache.save_sequence`, or one of a disk tier, which may be in use
    verify : read the blocks of a disk tier, and compare them with their checksums

    Raises
    ------
    OSError : the file cannot be read
    ValueError : it is neither, or its header is damaged
    ImportError : it may be a saved sequence, and the package safetensors is missing

    Notes
    -----
    Bytes: the header of a saved sequence; header and table of a disk tier, and with `verify` its
    blocks. A file in use is not locked: blocks that are written meanwhile may count as empty or
    damaged.

    Examples
    --------
    >>> import tempfile
    >>> from kvcupy.cache.tiered.disk import DiskTier
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = Path(folder.name, "blocks.kv")
    >>> with DiskTier(path, 2**16, 5000, {"layout": "page_first"}) as tier:
    ...     tier.write(0, 17, memoryview(bytes(5000)))
    >>> file = inspect(path, verify=True)
    >>> file["slots"], file["blocks"], file["damaged"], file["layout"]
    (7, 1, 0, 'page_first')
    >>> folder.cleanup()
    """
    path = Path(path)
    with path.open("rb") as file:
        start = file.read(disk_format.BLOCK_BYTES)
        if disk_format.is_header(start):
            header = disk_format.decode_header(start, path)
            version, layout, identity = header
            return {
                **identity, "kind": "disk tier", "file_version": version,
                "file_bytes": layout.num_bytes, "page_bytes": layout.page_bytes,
                "slots": layout.num_slots, **_blocks(file, header, verify),
            }  # fmt: skip
    tensors, metadata = read_file(path)
    check_metadata(metadata, {})
    fields = {name: value for name, value in metadata.items() if name not in ("kvcupy", "kind")}
    numbers = {n: int(v) if v.lstrip("-").isdecimal() else v for n, v in fields.items()}
    return {
        "kind": "saved sequence",
        **dict(sorted(numbers.items())),
        "file_bytes": path.stat().st_size,
        "tensors": {name: f"{tag(array.dtype)} {array.shape}" for name, array in tensors.items()},
    }


def _blocks(file: BinaryIO, header: disk_format.Header, verify: bool) -> dict[str, Any]:
    """Count the blocks of a disk tier; a block with an incomplete record or payload is damaged.

    Of encrypted blocks only the number of records is known.
    """
    layout, is_encrypted = header.layout, "encryption" in header.identity
    checksum = disk_format.checksum_of(header.version)
    in_file = os.fstat(file.fileno()).st_size - layout.record_at(0)
    torn = max(0, layout.num_slots + -in_file // disk_format.RECORD_BYTES)  # past its end
    blocks = damaged = 0
    hashes: set[int] = set()
    for slot, raw in records(file, layout):
        if is_encrypted:
            blocks += 1
            continue
        whole = len(raw) == disk_format.RECORD_BYTES
        record = disk_format.decode_record(raw, layout, slot) if whole else None
        if record is None:
            torn += 1
            continue
        blocks += 1
        hashes.add(record.hash)
        if verify:
            file.seek(layout.payload_at(slot))
            payload = memoryview(file.read(layout.page_bytes))
            damaged += checksum(record.hash, [payload]) != record.checksum
    return {
        "blocks": blocks, "hashes": None if is_encrypted else len(hashes),
        "torn_records": None if is_encrypted else torn,
        "damaged": damaged if verify and not is_encrypted else None,
    }  # fmt: skip


def records(file: BinaryIO, layout: Layout) -> Iterator[tuple[int, memoryview]]:
    """Yield the slots whose records are not empty, and the records.

    Skips holes of the file, in which a header can claim any number of records.
    """
    record_bytes, end = disk_format.RECORD_BYTES, layout.record_at(layout.num_slots)
    at = layout.record_at(0)
    while at < end:
        first = (_next_data(file, at) - layout.record_at(0)) // record_bytes
        at = layout.record_at(first)
        file.seek(at)
        expected = max(0, min(_TABLE_BYTES, end - at))
        table = memoryview(file.read(expected))
        for start in range(0, len(table), record_bytes):
            raw = table[start : start + record_bytes]
            if raw != disk_format.NO_RECORD:
                yield first + start // record_bytes, raw
        if len(table) < expected:  # the end of the file
            return
        at += expected


def _next_data(file: BinaryIO, at: int) -> int:
    """Return the next offset that is not in a hole; at the end of the file, one past it."""
    if not hasattr(os, "SEEK_DATA"):
        return at
    try:
        return os.lseek(file.fileno(), at, os.SEEK_DATA)
    except OSError:  # no more data, or the file system cannot tell
        return max(at, os.fstat(file.fileno()).st_size)


def main(path: Path, *, verify: bool = False, as_json: bool = False) -> int:
    """Print the contents of a file; return 1 if it cannot be read, or parts are damaged."""
    try:
        contents = inspect(path, verify=verify)
    except (OSError, ValueError, ImportError) as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 1
    print_report(contents, as_json=as_json)
    return int(bool(contents.get("damaged") or contents.get("torn_records")))


def seconds(text: str) -> float:
    """Read a time limit of a command."""
    with suppress(ValueError):
        if 0 <= (value := float(text)) < 1e9:
            return value
    raise ArgumentTypeError(f"expected 0 to 1e9 seconds, got {text!r}")


def print_report(report: dict[str, Any], *, as_json: bool) -> None:
    """Print names and values, as JSON or in lines; a dict or a list takes a line per item."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    width = max(map(len, report))
    for name, value in report.items():
        for line in _lines(value) or ["none"]:
            print(f"{name.replace('_', ' '):{width}}  {line}")
            name = ""


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        width = max(map(len, value), default=0)
        return [f"{name or '-':{width}}  {text}" for name, text in value.items()]
    if isinstance(value, list):
        return [str(item) for item in value]
    if value is None:
        return ["unknown: not verified (--verify), or encrypted"]
    return [str(value)]
