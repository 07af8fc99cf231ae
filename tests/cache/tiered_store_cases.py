"""A shared store in the memory of the test, which can be held up, fail, lose blocks and lie."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager

import numpy as np
from engine_cases import PATIENCE_S, parts_of, poll, pool_of
from tiered_cases import Blocks

import kvcupy as kv
from kvcupy.cache.pool import pool_like
from kvcupy.cache.wire import WirePages

BASE = 10**20  # hashes of 128 bits


def names(*numbers):
    """Hashes of blocks."""
    return [BASE + number for number in numbers]


class Held:
    """Holds up calls of a store from now on, each before it looks at pages or after it has."""

    def __init__(self, store, call, *, after=False):
        self.entered, self._open = threading.Event(), threading.Event()
        self._store, self._call, self._when = store, call, "after" if after else "before"
        store.gates[self._call, self._when] = self

    def wait(self):
        self.entered.set()
        assert self._open.wait(PATIENCE_S), "the test has not opened it"

    def open(self):
        self._store.gates.pop((self._call, self._when), None)
        self._open.set()


class MemoryStore:
    """What several caches share: `blocks`, by hash. Each cache has one of these, of its host pool.

    Attributes
    ----------
    calls : (name, hashes) of each call
    fail : by the name of a call, what it raises instead
    answer : by the name of a call, what it returns instead, without doing anything
    lacking : hashes that `get` does not deliver, though `exists` knows them
    capacity : blocks
    """

    def __init__(self, pool=None, blocks=None, capacity=10**9):
        self.pool, self.capacity = pool, capacity
        self.blocks = {} if blocks is None else blocks
        self.calls, self.fail, self.answer, self.gates = [], {}, {}, {}
        self.lacking, self.closed = set(), False

    def of(self, pool):
        """The same blocks for another pool."""
        return type(self)(pool, self.blocks, self.capacity)

    def exists(self, hashes):
        with self._calling("exists", hashes) as answer:
            if answer is not None:
                return answer[0]
            return next((i for i, h in enumerate(hashes) if h not in self.blocks), len(hashes))

    def put(self, hashes, pages):
        with self._calling("put", hashes, pages) as answer:
            return [self._put(*pair) for pair in zip(hashes, pages, strict=True)] \
                if answer is None else answer[0]  # fmt: skip

    def get(self, hashes, pages, *, deadline_s=None):
        with self._calling("get", hashes, pages) as answer:
            return [self._get(*pair) for pair in zip(hashes, pages, strict=True)] \
                if answer is None else answer[0]  # fmt: skip

    def stats(self):
        return dict(Counter(name for name, _ in self.calls))

    def close(self):
        self.closed = True

    def asked(self, name):
        """The hashes of the calls of a name."""
        return [hashes for called, hashes in self.calls if called == name]

    @contextmanager
    def _calling(self, name, hashes, pages=()):
        self.calls.append((name, list(hashes)))
        self._require_pages(pages)
        self._pass(name, "before")
        if name in self.fail:
            raise self.fail[name]
        try:
            yield (self.answer[name],) if name in self.answer else None
        finally:
            self._pass(name, "after")
            self._require_pages(pages)

    def _pass(self, name, when):
        if (gate := self.gates.get((name, when))) is not None:
            gate.wait()

    def _require_pages(self, pages):
        """They are nobody else's during the call."""
        pages = [int(page) for page in pages]
        assert len(set(pages)) == len(pages)
        self.pool.allocator.require_allocated(pages)

    def _put(self, hash, page):
        if hash in self.blocks:
            return "known"
        if len(self.blocks) >= self.capacity:
            return "full"
        self.blocks[hash] = [np.array(part[page]) for part in parts_of(self.pool)]
        return "stored"

    def _get(self, hash, page):
        content = self.blocks.get(hash)
        if content is None or hash in self.lacking:
            for part in parts_of(self.pool):
                part[page] = 77  # undefined
            return False
        for part, values in zip(parts_of(self.pool), content, strict=True):
            part[page] = values
        return True


class WireStore(MemoryStore):
    """A store of blocks as bytes, for pools of any format."""

    def _put(self, hash, page):
        if hash in self.blocks:
            return "known"
        if len(self.blocks) >= self.capacity:
            return "full"
        pages = WirePages(self.pool)
        block = bytearray(pages.block_bytes)
        pages.read_into(page, block)
        self.blocks[hash] = bytes(block)
        return "stored"

    def _get(self, hash, page):
        content, pages = self.blocks.get(hash), WirePages(self.pool)
        is_missing = content is None or hash in self.lacking
        pages.write_from(page, b"M" * pages.block_bytes if is_missing else content)
        return not is_missing


_CODES = {
    "nvfp4": (6, [0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "fp8_e4m3": (448, [0, 1, 3, 8, 15, 26, 120, 224, 448]),
}
"""Numbers that a format has where the first is in each group of 16, so that its scale is 1."""


class SharedBlocks(Blocks):
    """`Blocks` with a shared store, by default one of its own.

    `stored_pool` makes the pool of the store from the host pool; None: it is that.
    """

    def __init__(self, device, on_device=4, on_host=8, *, store=None, stored_pool=None, **options):
        pools = options.pop("pools", None)
        if pools is None:
            plain = Blocks(device, on_device, on_host, host=options.pop("host", None))
            pools = plain.device_pool, plain.host_pool
        stored = pools[1] if stored_pool is None else stored_pool(pools[1])
        self.store = MemoryStore(stored) if store is None else store.of(stored)
        options = {"shared_prefetch": 1.0, **options}
        super().__init__(device, pools=pools, shared=self.store, **options)

    def publish(self, *numbers):
        """Let a store have blocks, without this cache."""
        for hash in names(*numbers):
            self.store.blocks[hash] = self.stored(hash)

    def stored(self, hash):
        """The block of a hash as the store has it."""
        return self.values(hash)

    @property
    def tier(self):
        return self.cache._store

    def idle(self):
        """Wait until the worker has nothing to do."""

        def over():
            with self.cache._shared.locked() as tiers:
                tiers.settle()
                tier = self.tier
                return not (tier.pending or tier._puts or tier._urgent_puts or tier.holding)

        assert poll(over, PATIENCE_S), "the worker does not come to rest"

    def counts(self, *which):
        found = self.cache.stats()
        return tuple(found[f"shared_{name}"] for name in which)

    def assert_no_leak(self):
        self.idle()
        super().assert_no_leak()


class ExactBlocks(SharedBlocks):
    """Blocks whose values survive that disk and store keep them in narrower formats.

    `below` is a format in which they are exact, as well as in bf16; `disk_dtype` and `shared_dtype`
    are one of these, or None.
    """

    def __init__(
        self, device, on_device=4, on_host=8, *, below, store, pools=None, shared_dtype=None,
        **options,
    ):  # fmt: skip
        self._below = below
        if pools is None:
            pools = tuple(
                pool_of(device, count, head_dim=16, v_head_dim=16, **where)
                for count, where in ((on_device, {}), (on_host, {"placement": "pinned"}))
            )
        self._formats = {"disk": options.get("disk_dtype"), "store": shared_dtype}
        self._known = {}
        super().__init__(
            device, pools=pools, store=store, shared_dtype=shared_dtype,
            stored_pool=None if shared_dtype is None else
            lambda pool: pool_like(pool, 3, dtype=shared_dtype), **options,
        )  # fmt: skip

    def values(self, hash):
        rng, (largest, numbers) = np.random.default_rng(hash), _CODES[self._below]
        values = []
        for part in parts_of(self.device_pool):
            codes = rng.choice(numbers, part.shape[1:]) * rng.choice([-1, 1], part.shape[1:])
            codes[..., ::16] = largest
            values.append(codes.astype(np.float16))
        return values

    def stored(self, hash):
        return self._block(hash, self._formats["store"] or self.host_pool.dtype)

    def first_bytes_on_disk(self, hash):
        return self._block(hash, self._formats["disk"] or self.host_pool.dtype)[:16]

    def _block(self, hash, dtype):
        """The block of a hash in a format, in the order of the wire."""
        if (hash, dtype) not in self._known:
            exact, narrow = (
                pool_like(self.host_pool, 1, dtype=d) for d in (self.host_pool.dtype, dtype)
            )
            for part, values in zip(parts_of(exact), self.values(hash), strict=True):
                part[0] = values
            pages = WirePages(exact)
            if dtype != exact.dtype:
                stream = self.device.stream()  # others may be about to raise a failure of theirs
                kv.transfer_pages(exact, narrow, [0], [0], convert=True, stream=stream)
                stream.synchronize()
                pages = WirePages(narrow)
            block = bytearray(pages.block_bytes)
            pages.read_into(0, block)
            self._known[hash, dtype] = bytes(block)
        return self._known[hash, dtype]
