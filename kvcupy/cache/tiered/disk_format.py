"""The file format of a disk tier: its layout in bytes, and the checksums.

    0         4096                             payloads_at
    | header  | record 0 | record 1 | ... |    | payload 0 |    | payload 1 |    | ...
      4096 B    64 B each, one per slot          page_bytes each, at multiples of 4096

Numbers are little endian. The record of an empty slot is zeros. In an encrypted file, payloads and
records are encrypted by a `BlockCipher`: a payload under its hash, a record under its slot, with
the nonce of the payload. Its 64 bytes are nonce, tag (12 bytes) and ciphertext, so that neither
hashes nor the order of writes can be read. The tag of a payload takes the place of its checksum.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from ..encryption import NONCE_BYTES, BlockCipher

BLOCK_BYTES = 4096  # the unit that disks and file systems write atomically
RECORD_BYTES = 64
VERSION = 2
PREVIOUS_VERSION = 1  # names neither the model nor its heads, and has another checksum
NO_RECORD = bytes(RECORD_BYTES)

_MAGIC = b"kvcupydt"
_DIGEST_BYTES = 16
_HASH_BYTES = 16  # for hashes of 64 or 128 bits
_HEADER = struct.Struct("<8sIIQQ")  # magic, version, identity bytes, page_bytes, num_slots
_RECORD = struct.Struct("<16sQII16s")  # hash, generation, slot, payload bytes, payload checksum
_SEALED = struct.Struct("<16sQ16s")  # hash, generation, tag of the payload
_SHORT_SEAL_BYTES = RECORD_BYTES - _SEALED.size

# Odd weights of the words of a block, for `previous_checksum`.
_BLOCK_WORDS = BLOCK_BYTES // 8
_WEIGHTS = np.frombuffer(
    hashlib.shake_256(b"kvcupy disk tier, weights of a block").digest(BLOCK_BYTES), "<u8"
).astype(np.uint64) | np.uint64(1)


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
    checksum: bytes  # or the tag of an encrypted payload
    nonce: bytes = b""  # of an encrypted payload


# --- Header ---


def encode_header(layout: Layout, identity: Mapping[str, str]) -> bytes:
    """Return the first 4096 bytes of a file; `identity` must be a mapping of str to str."""
    if not _is_text_mapping(identity):
        raise TypeError(f"identity: expected names and values that are str, got {identity}")
    encoded = _json(identity)
    limit = BLOCK_BYTES - _HEADER.size - _DIGEST_BYTES
    if len(encoded) > limit:
        raise ValueError(f"identity: expected at most {limit} bytes of JSON, got {len(encoded)}")
    fields = _HEADER.pack(_MAGIC, VERSION, len(encoded), layout.page_bytes, layout.num_slots)
    header = (fields + encoded).ljust(BLOCK_BYTES - _DIGEST_BYTES, b"\0")
    return header + _digest(header)


def digest_of(identity: Mapping[str, str]) -> bytes:
    """Return 16 bytes that distinguish identities."""
    return _digest(_json(identity))


def is_header(header: bytes) -> bool:
    """Return whether a file with this start is a file of a disk tier."""
    return header.startswith(_MAGIC)


class Header(NamedTuple):
    """The start of a file."""

    version: int
    layout: Layout
    identity: dict[str, str]


def decode_header(header: bytes, path: object) -> Header:
    """Decode a header; ValueError if it is damaged, or not one that `encode_header` makes.

    `header` is the first 4096 bytes of the file, or the whole file if it is shorter.
    """
    if not is_header(header):
        start = header[: len(_MAGIC)]
        raise ValueError(
            f"disk: expected a file of a disk tier, got {path}, which starts {start!r}"
        )
    if len(header) == BLOCK_BYTES:
        version = int.from_bytes(header[8:12], "little")
        if version not in (PREVIOUS_VERSION, VERSION):  # before the digest, which may differ
            raise ValueError(
                f"disk: expected version {PREVIOUS_VERSION} or {VERSION} of the file, got "
                f"{version} in {path}; remove the file, or pass the path of another"
            )
    body = header[:-_DIGEST_BYTES]
    if len(header) < BLOCK_BYTES or _digest(body) != header[-_DIGEST_BYTES:]:
        raise ValueError(f"disk: expected a whole header, got a damaged one in {path}")
    _, version, json_bytes, page_bytes, num_slots = _HEADER.unpack_from(body)
    layout = Layout(num_slots, page_bytes)
    try:
        identity = json.loads(body[_HEADER.size : _HEADER.size + json_bytes])
    except (ValueError, RecursionError):
        identity = None
    # The digest has no key, so a crafted header can have one that fits.
    if (
        not _is_text_mapping(identity)
        or not 1 <= page_bytes < 2**32
        or not (num_slots >= 1 and layout.num_bytes < 2**63)
    ):
        raise ValueError(f"disk: expected a header of kvcupy, got another in {path}")
    return Header(version, layout, identity)


def check_header(
    header: bytes, layout: Layout, identity: Mapping[str, str],
    previous: Mapping[str, str] | None, path: object,
) -> int:  # fmt: skip
    """Return the version of a file; ValueError unless it was made for the same pages.

    `previous` is their identity in a file of the previous version, or None if such a file does not
    say enough.
    """
    stored = decode_header(header, path)
    if stored.version == PREVIOUS_VERSION:
        if previous is None:
            raise ValueError(
                f"disk: expected version {VERSION} of the file, got {stored.version} in {path}, "
                "which names neither a model nor heads nor a key; remove the file, or pass the "
                "path of another"
            )
        identity = previous
    actual = {**stored.identity, **_sizes(stored.layout)}
    expected = {**identity, **_sizes(layout)}
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            want, got = expected.get(name) or "none", actual.get(name) or "none"
            raise ValueError(f"disk: expected {name} {want}, got {got} in {path}")
    return stored.version


def _json(identity: Mapping[str, str]) -> bytes:
    return json.dumps(dict(identity), sort_keys=True).encode()


def _is_text_mapping(value: object) -> bool:
    """Return whether a value is a mapping of str to str."""
    return isinstance(value, Mapping) and all(
        isinstance(text, str) for item in value.items() for text in item
    )


def _sizes(layout: Layout) -> dict[str, object]:
    """Return the fields of a header besides the identity, named for messages."""
    return {
        "bytes of a page": layout.page_bytes,
        "number of slots (which disk_bytes gives)": layout.num_slots,
    }


# --- Records ---


def encode_record(record: Record, cipher: BlockCipher | None = None) -> bytes:
    """Encode a record in 64 bytes, with a checksum of the record or encrypted."""
    hash = _hash_bytes(record.hash)
    if cipher is not None:
        fields = _SEALED.pack(hash, record.generation, record.checksum)
        sealed = bytearray(len(fields))
        seal = cipher.seal(
            _record_name(record.slot), [memoryview(fields)], memoryview(sealed), nonce=record.nonce
        )
        return seal[:_SHORT_SEAL_BYTES] + sealed
    fields = _RECORD.pack(hash, record.generation, record.slot, record.num_bytes, record.checksum)
    return fields + _digest(fields)


def decode_record(
    raw: memoryview, layout: Layout, slot: int, cipher: BlockCipher | None = None
) -> Record | None:
    """Decode the record of a slot; None if it is damaged, or encrypted with another key."""
    if cipher is not None:
        seal = bytes(raw[:_SHORT_SEAL_BYTES])
        fields = memoryview(bytearray(raw[_SHORT_SEAL_BYTES:]))
        if not cipher.open(_record_name(slot), seal, [fields]):
            return None
        hash, generation, tag = _SEALED.unpack(fields)
        number = int.from_bytes(hash, "little")
        return Record(number, generation, slot, layout.page_bytes, tag, seal[:NONCE_BYTES])
    fields, digest = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if _digest(fields) != digest:
        return None
    hash, *others = _RECORD.unpack(fields)
    record = Record(int.from_bytes(hash, "little"), *others)
    fits = record.slot == slot and record.num_bytes == layout.page_bytes
    return record if fits else None


def payload_name(hash: int) -> bytes:
    """Return the name under which the payload of a hash is encrypted."""
    return b"block" + _hash_bytes(hash)


def _record_name(slot: int) -> bytes:
    return b"record" + slot.to_bytes(8, "little")


def require_hash(hash: int) -> int:
    """Check that a hash fits a record, and return it as an int."""
    if not 0 <= hash < 2**128:
        raise ValueError(f"hash: expected an int of 0 to 2**128 - 1, got {hash}")
    return int(hash)


# --- Checksums ---


def checksum_of(version: int) -> Callable[[int, Sequence[memoryview]], bytes]:
    """Return the function that computes the checksums in files of a version."""
    return previous_checksum if version == PREVIOUS_VERSION else checksum


def checksum(hash: int, parts: Sequence[memoryview]) -> bytes:
    """Return 16 bytes that verify that a payload was written for a hash.

    The result does not depend on how the payload is split into parts. XXH3 of 128 bits, because
    cryptographic hashes are slower than disks; it detects accidental damage only.
    """
    hasher = xxhash.xxh3_128(_hash_bytes(hash))
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def previous_checksum(hash: int, parts: Sequence[memoryview]) -> bytes:
    """Return the 16 bytes that version 1 has for a payload, however it is split into parts.

    BLAKE2b over the hash, the weighted sum of the words of each whole block modulo 2**64, the bytes
    after the last whole block, and the payload's length and CRC-32.
    """
    payload = b"".join(parts)
    tail_at = len(payload) // BLOCK_BYTES * BLOCK_BYTES
    words = np.frombuffer(payload, "<u8", tail_at // 8).reshape(-1, _BLOCK_WORDS)
    hasher = hashlib.blake2b(_hash_bytes(hash), digest_size=_DIGEST_BYTES)
    hasher.update((words @ _WEIGHTS).astype("<u8"))
    hasher.update(payload[tail_at:])
    hasher.update(struct.pack("<QI", len(payload), zlib.crc32(payload)))
    return hasher.digest()


def _blocks(num_bytes: int) -> int:
    """Round a number of bytes up to whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _hash_bytes(hash: int) -> bytes:
    return hash.to_bytes(_HASH_BYTES, "little")
