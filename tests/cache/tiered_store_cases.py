"""A store in the memory of the test, which can be held up, fail, be full, lose blocks and lie."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager

import numpy as np
from engine_cases import PATIENCE_S, parts_of, poll
from tiered_cases import Blocks

BASE = 10**20  # hashes of 128 bits


def names(*numbers):
    """Hashes of blocks."""
    return [BASE + number for number in numbers]


def _arrays_of(pool):
    """The arrays with the bytes of all layers, K and V: packed rows of four-bit formats."""
    parts = parts_of(pool)
    return [p if getattr(p, "scales", None) is None else np.from_dlpack(p.packed) for p in parts]


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
    """A store of a host pool. Several may have the same `blocks`, by hash.

    Attributes
    ----------
    calls : (name, hashes) of each call
    fail : by the name of a call, what it raises instead
    answer : by the name of a call, what it returns instead, without doing anything
    lacking : hashes that `get` does not deliver, though `match` knows them
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

    def match(self, hashes):
        with self._calling("match", hashes) as answer:
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

    def clear(self):
        with self._calling("clear", ()):
            self.blocks.clear()

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
        self.pool.allocator._require_allocated(pages)

    def _put(self, hash, page):
        if hash in self.blocks:
            return "known"
        if len(self.blocks) >= self.capacity:
            return "full"
        self.blocks[hash] = [np.array(part[page]) for part in _arrays_of(self.pool)]
        return "stored"

    def _get(self, hash, page):
        content = self.blocks.get(hash)
        if content is None or hash in self.lacking:
            for part in _arrays_of(self.pool):
                part[page] = 77  # undefined
            return False
        for part, values in zip(_arrays_of(self.pool), content, strict=True):
            part[page] = values
        return True


class StoreBlocks(Blocks):
    """`Blocks` with stores, by default a new one: `store` is the first of `stores`."""

    def __init__(self, device, on_device=4, on_host=8, *, store=None, stores=None, **options):
        pools = options.pop("pools", None)
        if pools is None:
            plain = Blocks(device, on_device, on_host, host=options.pop("host", None))
            pools = plain.device_pool, plain.host_pool
        given = [store] if stores is None else stores
        self.stores = [MemoryStore(pools[1]) if s is None else s.of(pools[1]) for s in given]
        self.store = self.stores[0]
        super().__init__(device, pools=pools, stores=self.stores, **options)

    def publish(self, *numbers):
        """Let a store have blocks, without this cache."""
        for hash in names(*numbers):
            self.store.blocks[hash] = self.stored(hash)

    def stored(self, hash):
        """The block of a hash as the store has it."""
        return self.values(hash)

    @property
    def tier(self):
        return self.cache._tiers[0].store

    def idle(self):
        """Wait until the worker has nothing to do."""

        def over():
            with self.cache._tiers[0].lock:
                tiers = self.cache._tiers[0]
                tiers.process_ended()
                tier = self.tier
                moving = tier._num_getting or tier._num_putting
                return not (tier.pending or tier.is_writing or moving)

        assert poll(over, PATIENCE_S), "the worker does not come to rest"

    def counts(self, *which):
        found = self.cache.stats()
        return tuple(found[f"store_{name}"] for name in which)

    def assert_no_leak(self):
        self.idle()
        super().assert_no_leak()
