"""Blocks for tests of the disk tier, whose contents follow from their hashes."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np

from kvcupy.cache.tiered.disk import DiskTier
from kvcupy.cache.tiered.disk_format import Layout

IDENTITY = {"layout": "page_first", "format": "bf16", "shape": "(2, 16, 8, 128)"}
PAGE_BYTES = 5000  # a whole 4096, and more


def contents(block_hash, page_bytes=PAGE_BYTES):
    """Return the contents of a hash: words that differ by offset and hash."""
    words = np.arange(-(-page_bytes // 8), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(block_hash * 0xC2B2AE3D27D4EB4F & (1 << 64) - 1)
    return memoryview(words.view(np.uint8)[:page_bytes])


def open_tier(path, num_slots=6, page_bytes=PAGE_BYTES, identity=IDENTITY, **options):
    return DiskTier(path, Layout(num_slots, page_bytes).num_bytes, page_bytes, identity, **options)


def write(tier, slot, block_hash):
    tier.write(slot, block_hash, contents(block_hash, tier.page_bytes))


def reads(tier, slot, block_hash):
    """Whether a block is served; if it is, it must be the right one."""
    into = memoryview(bytearray(b"\xa5" * tier.page_bytes))
    served = tier.read(slot, block_hash, into)
    if served:
        assert into == contents(block_hash, tier.page_bytes), (slot, block_hash)
    return served


def filled(path, blocks, **options):
    """Make a closed file with blocks, by slot, and return its bytes."""
    with open_tier(path, **options) as tier:
        for slot, block_hash in blocks.items():
            write(tier, slot, block_hash)
    return path.read_bytes()


def filled_by_previous(path, blocks, num_slots=6, identity=IDENTITY):
    """Make a file of version 1 with blocks, by slot, and return its bytes.

    Written from the format alone, and equal to what the release with version 1 wrote.
    """

    def digest(data):
        return hashlib.blake2b(data, digest_size=16).digest()

    layout = Layout(num_slots, PAGE_BYTES)
    text = json.dumps(identity, sort_keys=True).encode()
    header = struct.pack("<8sIIQQ", b"kvcupydt", 1, len(text), PAGE_BYTES, num_slots) + text
    header = header.ljust(4096 - 16, b"\0")
    file = bytearray(header + digest(header)).ljust(layout.num_bytes, b"\0")
    for generation, (slot, block_hash) in enumerate(blocks.items(), 1):
        page = bytes(contents(block_hash))
        record = block_hash.to_bytes(16, "little")
        record += struct.pack("<QII", generation, slot, PAGE_BYTES)
        record += checksum_of_previous(block_hash, page)
        record += digest(record)
        file[layout.record_at(slot) : layout.record_at(slot + 1)] = record
        file[layout.payload_at(slot) : layout.payload_at(slot) + PAGE_BYTES] = page
    path.write_bytes(file)
    return bytes(file)


def checksum_of_previous(block_hash, page):
    """Return the checksum that version 1 has of a page, in plain integers."""
    weights = hashlib.shake_256(b"kvcupy disk tier, weights of a block").digest(4096)
    weights = [weight | 1 for weight in struct.unpack("<512Q", weights)]
    whole = len(page) // 4096 * 4096
    data = block_hash.to_bytes(16, "little")
    for start in range(0, whole, 4096):
        words = struct.unpack_from("<512Q", page, start)
        total = sum(word * weight for word, weight in zip(words, weights, strict=True))
        data += (total % 2**64).to_bytes(8, "little")
    data += page[whole:] + struct.pack("<QI", len(page), zlib.crc32(page))
    return hashlib.blake2b(data, digest_size=16).digest()


def failing(monkeypatch, name, error, *, after=0, bytes_first=0):
    """Let a call of `os` raise once, after so many calls, having moved so many bytes."""
    real, calls = getattr(os, name), []

    def call(descriptor, parts, offset):
        calls.append(offset)
        if len(calls) == after + 1 and bytes_first:
            return real(descriptor, [parts[0][:bytes_first]], offset)
        if len(calls) == after + 1 + bool(bytes_first):
            raise error
        return real(descriptor, parts, offset)

    monkeypatch.setattr(os, name, call)
    return calls


def run(program):
    """Run Python lines in a separate process, and return their output."""
    here = Path(__file__).resolve().parent
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
