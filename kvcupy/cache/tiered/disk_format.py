"""The file format of a disk tier: its layout in bytes, and the checksums.

    0         4096                             payloads_at
    | header  | record 0 | record 1 | ... |    | payload 0 |    | payload 1 |    | ...
      4096 B    64 B each, one per slot          page_bytes each, at multiples of 4096

Numbers are little endian. The record of an empty slot is zeros.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

BLOCK_BYTES = 4096  # the unit that disks and file systems write atomically
RECORD_BYTES = 64
VERSION = 1
NO_RECORD = bytes(RECORD_BYTES)

_MAGIC = b"kvcupydt"
_DIGEST_BYTES = 16
_HASH_BYTES = 16  # for hashes of 64 or 128 bits
_HEADER = struct.Struct("<8sIIQQ")  # magic, version, identity bytes, page_bytes, num_slots
_RECORD = struct.Struct("<16sQII16s")  # hash, generation, slot, payload bytes, payload checksum


@dataclass(frozen=True)
class Layout:
    """Offsets of the parts of a file, in bytes."""

    num_slots: int
    page_bytes: int

    @classmethod
    def fit(cls, num_bytes: int, page_bytes: int, name: str = "num_bytes") -> Layout:
        """Return the layout with the most slots that fit; errors name the size `name`.

        >>> Layout.fit(2**20, 10_000)
        Layout(num_slots=84, page_bytes=10000)
        """
        if not 1 <= page_bytes < 2**32:
            raise ValueError(f"page_bytes: expected 1 to {2**32 - 1}, got {page_bytes}")
        smallest = cls(1, page_bytes).num_bytes
        if num_bytes < smallest:
            raise ValueError(
                f"{name}: expected at least {smallest}, the space of one page of {page_bytes} "
                f"bytes, got {num_bytes}"
            )
        num_slots = (num_bytes - BLOCK_BYTES) // (_blocks(page_bytes) + RECORD_BYTES)
        while cls(num_slots, page_bytes).num_bytes > num_bytes:  # the table is padded
            num_slots -= 1
        return cls(num_slots, page_bytes)

    @property
    def num_bytes(self) -> int:
        return self.payload_at(self.num_slots)

    @property
    def table_bytes(self) -> int:
        return self.num_slots * RECORD_BYTES

    def record_at(self, slot: int) -> int:
        return BLOCK_BYTES + slot * RECORD_BYTES

    def payload_at(self, slot: int) -> int:
        return BLOCK_BYTES + _blocks(self.table_bytes) + slot * _blocks(self.page_bytes)


class Record(NamedTuple):
    """The table's entry for one slot."""

    hash: int
    generation: int
    slot: int
    num_bytes: int
    checksum: bytes


# --- Header ---


def encode_header(layout: Layout, identity: Mapping[str, str]) -> bytes:
    """Return the first 4096 bytes of a file; `identity` must be a mapping of str to str."""
    if not isinstance(identity, Mapping) or not all(
        isinstance(text, str) for item in identity.items() for text in item
    ):
        raise TypeError(f"identity: expected names and values that are str, got {identity}")
    encoded = json.dumps(dict(identity), sort_keys=True).encode()
    limit = BLOCK_BYTES - _HEADER.size - _DIGEST_BYTES
    if len(encoded) > limit:
        raise ValueError(f"identity: expected at most {limit} bytes of JSON, got {len(encoded)}")
    fields = _HEADER.pack(_MAGIC, VERSION, len(encoded), layout.page_bytes, layout.num_slots)
    header = (fields + encoded).ljust(BLOCK_BYTES - _DIGEST_BYTES, b"\0")
    return header + _digest(header)


def is_header(header: bytes) -> bool:
    """Return whether a file with this start is a file of a disk tier."""
    return header.startswith(_MAGIC)


def decode_header(header: bytes, path: object) -> tuple[Layout, dict[str, str]]:
    """Decode the layout and the identity of a file; ValueError if the header is damaged.

    `header` is the first 4096 bytes of the file, or the whole file if it is shorter.
    """
    if not is_header(header):
        start = header[: len(_MAGIC)]
        raise ValueError(
            f"disk: expected a file of a disk tier, got {path}, which starts {start!r}"
        )
    if len(header) == BLOCK_BYTES:
        version = int.from_bytes(header[8:12], "little")
        if version != VERSION:  # checked before the digest, since its header may differ
            raise ValueError(
                f"disk: expected version {VERSION} of the file, got {version} in {path}"
            )
    body = header[:-_DIGEST_BYTES]
    if len(header) < BLOCK_BYTES or _digest(body) != header[-_DIGEST_BYTES:]:
        raise ValueError(f"disk: expected a whole header, got a damaged one in {path}")
    _, _, json_bytes, page_bytes, num_slots = _HEADER.unpack_from(body)
    identity = json.loads(body[_HEADER.size : _HEADER.size + json_bytes])
    return Layout(num_slots, page_bytes), identity


def check_header(header: bytes, layout: Layout, identity: Mapping[str, str], path: object) -> None:
    """Raise ValueError unless a file was made for the same pages."""
    stored_layout, stored = decode_header(header, path)
    actual = {**stored, **_sizes(stored_layout)}
    expected = {**identity, **_sizes(layout)}
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            want, got = expected.get(name, "none"), actual.get(name, "none")
            raise ValueError(f"disk: expected {name} {want}, got {got} in {path}")


def _sizes(layout: Layout) -> dict[str, object]:
    """Return the fields of a header besides the identity, named for messages."""
    return {
        "bytes of a page": layout.page_bytes,
        "number of slots (which num_bytes gives)": layout.num_slots,
    }


# --- Records --------------------------------------------------------------------------------------


def encode_record(record: Record) -> bytes:
    """Encode a record in 64 bytes, which end with a checksum of the record."""
    fields = _RECORD.pack(_hash_bytes(record.hash), *record[1:])
    return fields + _digest(fields)


def decode_record(raw: memoryview, layout: Layout, slot: int) -> Record | None:
    """Decode the record of a slot; None if it is damaged."""
    fields, digest = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if _digest(fields) != digest:
        return None
    hash, *others = _RECORD.unpack(fields)
    record = Record(int.from_bytes(hash, "little"), *others)
    fits = record.slot == slot and record.num_bytes == layout.page_bytes
    return record if fits else None


def require_hash(hash: int) -> int:
    """Check that a hash fits a record, and return it as an int."""
    if not 0 <= hash < 2**128:
        raise ValueError(f"hash: expected an int of 0 to 2**128 - 1, got {hash}")
    return int(hash)


# --- Checksums ------------------------------------------------------------------------------------


def checksum(hash: int, parts: Sequence[memoryview]) -> bytes:
    """Return 16 bytes that verify that a payload was written for a hash.

    The result does not depend on how the payload is split into parts. XXH3 of 128 bits, because
    cryptographic hashes are slower than disks; it detects accidental damage only.
    """
    hasher = xxhash.xxh3_128(_hash_bytes(hash))
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _blocks(num_bytes: int) -> int:
    """Round a number of bytes up to whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _hash_bytes(hash: int) -> bytes:
    return hash.to_bytes(_HASH_BYTES, "little")
