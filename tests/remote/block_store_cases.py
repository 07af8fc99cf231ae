"""Pools, blocks whose contents follow from their hashes, and stores, for tests of block stores."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np

import kvcupy as kv
from kvcupy.remote.wire import WirePages

SIZE, LAYERS, HEADS, WIDTH = 4, 2, 2, 64


def new_pool(num_pages=8, *, layout="page_first_direct", **changes):
    """K and V of 2 KiB each a page: two pieces in this layout, and none in the others."""
    options = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": WIDTH, **changes}
    return kv.KVPool(num_pages, SIZE, layout=layout, dtype="fp16", device="host", **options)


def block_hashes(count, first=0):
    """Hashes of 128 bits, each of another prompt."""
    return [kv.block_hashes([first + i], 1)[0] for i in range(count)]


def contents(block_hash, num_bytes):
    """Return the contents of a hash: words that differ by offset and hash."""
    words = np.arange(-(-num_bytes // 8), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64((block_hash * 0xC2B2AE3D27D4EB4F ^ block_hash >> 64) & (1 << 64) - 1)
    return words.tobytes()[:num_bytes]


def fill(pool, pages, hashes):
    """Write the contents of hashes into pages."""
    wire = WirePages(pool)
    for page, block_hash in zip(pages, hashes, strict=True):
        wire.write_from(page, contents(block_hash, wire.block_bytes))


def bytes_of(pool, page):
    wire = WirePages(pool)
    buffer = bytearray(wire.block_bytes)
    wire.read_into(page, buffer)
    return bytes(buffer)


def holds(pool, page, block_hash):
    """Return whether a page has the contents of a hash."""
    return bytes_of(pool, page) == contents(block_hash, pool.page_bytes)


class Writer:
    """A store and its pool, to put and get blocks by hash."""

    def __init__(self, url, *, num_pages=8, layout="page_first_direct", width=WIDTH, **options):
        self.pool = new_pool(num_pages, layout=layout, head_dim=width)
        self.store = kv.BlockStore.open(url, self.pool, **options)
        self.backend = self.store._backend
        self.block_bytes = self.pool.page_bytes

    def put(self, *hashes):
        pages = range(len(hashes))
        fill(self.pool, pages, hashes)
        return self.store.put(hashes, pages)

    def get(self, *hashes):
        """Return which blocks arrived, after checking their contents."""
        pages = list(range(self.pool.num_pages))[: len(hashes)]
        fill(self.pool, pages, [0] * len(pages))
        there = self.store.get(hashes, pages)
        for page, block_hash, hit in zip(pages, hashes, there, strict=True):
            assert not hit or holds(self.pool, page, block_hash), f"wrong bytes of {block_hash:x}"
        return there

    def key(self, block_hash):
        return self.store._keys.keys([block_hash])[0]

    def path(self, block_hash):
        """Return the file of a block in a "file:" store."""
        return Path(getattr(self.backend, "_backend", self.backend)._path(self.key(block_hash)))

    def ask_again(self):
        """Forget which blocks have failed, and that the store is skipped."""
        self.store._retry_at.clear()
        self.store._skipped_until = self.store._lost_in_a_row = 0

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.store.close()


# --- Blocks of a backend alone ---


def soon(seconds=60.0):
    """Return a deadline."""
    return time.monotonic() + seconds


def key_of(number):
    return hashlib.blake2b(b"%d" % number, digest_size=32).digest()


def content(key, num_bytes):
    return hashlib.shake_128(key).digest(num_bytes)


def block_of(key, sizes):
    """Return a block with the content of a key, in pieces of these sizes."""
    data, pieces = bytearray(content(key, sum(sizes))), []
    start = 0
    for size in sizes:
        pieces.append(memoryview(data)[start : start + size])
        start += size
    return pieces


def empty_block(sizes):
    return [memoryview(bytearray(size)) for size in sizes]
