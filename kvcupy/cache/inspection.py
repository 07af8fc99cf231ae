"""The contents of a file of kvcupy: a saved sequence, or the blocks of a disk tier."""

from __future__ import annotations

import json
import sys
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
        header = file.read(disk_format.BLOCK_BYTES)
        if disk_format.is_header(header):
            layout, identity = disk_format.decode_header(header, path)
            return {
                "kind": "disk tier", **identity, "file_bytes": layout.num_bytes,
                "page_bytes": layout.page_bytes, "slots": layout.num_slots,
                **_blocks(file, layout, verify),
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


def _blocks(file: BinaryIO, layout: Layout, verify: bool) -> dict[str, Any]:
    """Count the blocks of a disk tier; a block with an incomplete record or payload is damaged."""
    blocks = damaged = torn = 0
    hashes: set[int] = set()
    for first in range(0, layout.num_slots, _TABLE_BYTES // disk_format.RECORD_BYTES):
        count = min(_TABLE_BYTES // disk_format.RECORD_BYTES, layout.num_slots - first)
        file.seek(layout.record_at(first))
        table = memoryview(file.read(count * disk_format.RECORD_BYTES))
        for slot in range(first, first + count):
            at = (slot - first) * disk_format.RECORD_BYTES
            raw = table[at : at + disk_format.RECORD_BYTES]
            if raw == disk_format.NO_RECORD:
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
                damaged += disk_format.checksum(record.hash, [payload]) != record.checksum
    return {
        "blocks": blocks, "hashes": len(hashes), "torn_records": torn,
        "damaged": damaged if verify else None,
    }  # fmt: skip


def main(path: Path, *, verify: bool = False, as_json: bool = False) -> int:
    """Print the contents of a file; return 1 if it cannot be read, or parts are damaged."""
    try:
        contents = inspect(path, verify=verify)
    except (OSError, ValueError, ImportError) as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(contents, indent=2))
    else:
        width = max(map(len, contents))
        for name, value in contents.items():
            for line in _lines(value):
                print(f"{name.replace('_', ' '):{width}}  {line}")
                name = ""
    return int(bool(contents.get("damaged") or contents.get("torn_records")))


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        width = max(map(len, value), default=0)
        return [f"{name:{width}}  {text}" for name, text in value.items()]
    if value is None:
        return ["not looked for: --verify"]
    return [f"{value:,}" if isinstance(value, int) else str(value)]
