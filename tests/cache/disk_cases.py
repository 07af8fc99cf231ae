"""Blocks for tests of the disk tier, whose contents follow from their hashes."""

from __future__ import annotations

import os
import subprocess
import sys
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
