"""Pools, blocks whose contents follow from their hashes, and stores, for tests of shared stores."""

from __future__ import annotations

import numpy as np

import kvcupy as kv
from kvcupy.remote.wire import WirePages

SIZE, LAYERS, HEADS, WIDTH = 4, 2, 2, 64


def new_pool(num_pages=8, *, layout="page_first_direct", **changes):
    """K and V of 2 KiB each a page: two pieces in this layout, and none in the others."""
    options = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": WIDTH, **changes}
    return kv.KVPool(num_pages, SIZE, layout=layout, dtype="fp16", device="host", **options)


def block_hashes(count, first=0):
    """Hashes of 128 bits, each of a prompt of its own."""
    return [kv.block_hashes([first + i], 1)[0] for i in range(count)]


def contents(block_hash, num_bytes):
    """What is always stored under a hash: words that differ by place and by hash."""
    words = np.arange(-(-num_bytes // 8), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64((block_hash * 0xC2B2AE3D27D4EB4F ^ block_hash >> 64) & (1 << 64) - 1)
    return words.tobytes()[:num_bytes]


def fill(pool, pages, hashes):
    """Write what belongs to some hashes into pages."""
    wire = WirePages(pool)
    for page, block_hash in zip(pages, hashes, strict=True):
        wire.write_from(page, contents(block_hash, wire.block_bytes))


def bytes_of(pool, page):
    wire = WirePages(pool)
    buffer = bytearray(wire.block_bytes)
    wire.read_into(page, buffer)
    return bytes(buffer)


def holds(pool, page, block_hash):
    """Whether a page has what belongs to a hash."""
    return bytes_of(pool, page) == contents(block_hash, pool.page_bytes)


class Writer:
    """A store and its pool, to put and get blocks by hash."""

    def __init__(self, url, *, num_pages=8, layout="page_first_direct", width=WIDTH, **options):
        self.pool = new_pool(num_pages, layout=layout, head_dim=width)
        self.store = kv.SharedStore.open(url, self.pool, **options)

    def put(self, *hashes):
        pages = range(len(hashes))
        fill(self.pool, pages, hashes)
        return self.store.put(hashes, pages)

    def get(self, *hashes):
        """Return which blocks were there; those must be right."""
        pages = list(range(self.pool.num_pages))[: len(hashes)]
        there = self.store.get(hashes, pages)
        for page, block_hash, hit in zip(pages, hashes, there, strict=True):
            assert not hit or holds(self.pool, page, block_hash), f"wrong bytes of {block_hash:x}"
        return there

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.store.close()
