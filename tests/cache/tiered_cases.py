"""Blocks whose contents follow from their hashes: a cache of them, and a store in memory.

The store can be held up, fail, be full, lose blocks and lie.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager, suppress

import numpy as np
from engine_cases import (
    PATIENCE_S,
    bits_of,
    contents,
    load_kernels,
    page_values,
    parts_of,
    poll,
    pool_of,
)

from kvcupy import DeviceError
from kvcupy.cache.tiered.cache import TieredCache

TIMED = ("load_s", "save_s", "store_get_s", "store_put_s")


class Blocks:
    """Two pools, a cache between them, and pages that are filled by hash.

    `placement` and others of the pools' arguments may be given for the host pool.
    """

    def __init__(self, device, on_device=4, on_host=8, *, pools=None, host=None, **options):
        self.device = device
        self.device_pool, self.host_pool = pools or (
            pool_of(device, on_device),
            pool_of(
                device, on_host, **{"layout": "page_first", "placement": "pinned", **(host or {})}
            ),
        )
        if not pools:
            load_kernels(self.device_pool, self.host_pool)
        self.cache = TieredCache(self.device_pool, self.host_pool, **options)
        self.engine = self.cache.engine

    @property
    def tiers(self):
        return self.cache._tiers[0]

    def values(self, hash):
        return page_values(self.device_pool, hash)

    def bits(self, hash):
        return bits_of(self.values(hash))

    def fill(self, page, hash, stream=None):
        """Write the block of a hash into a device page, as a model would."""
        for part, value in zip(parts_of(self.device_pool), self.values(hash), strict=True):
            self.device.copy(part[page], self.device.asarray(value), stream=stream)

    def insert(self, hashes, **options):
        """Allocate pages, fill them, insert them; what is not needed is freed."""
        pages = self.device_pool.allocator.alloc(len(hashes))
        for page, hash in zip(pages.tolist(), hashes, strict=True):
            self.fill(page, hash)
        self.device.synchronize()
        unneeded = self.cache.insert(hashes, pages, **options)
        self.device_pool.allocator.free(unneeded)
        return unneeded

    def evict_all(self):
        self.cache.evict(len(self.tiers.device.pages))

    def assert_holds(self, lease, hashes):
        """A lease has exactly these blocks, whole."""
        assert lease.num_blocks == len(lease.pages) == len(hashes)
        found = contents(self.device_pool)
        for page, hash in zip(lease.pages.tolist(), hashes, strict=True):
            assert np.array_equal(found[page], self.bits(hash)), f"block {hash} on page {page}"

    def use(self, hashes, known=None):
        """Acquire, wait, verify and release."""
        with self.cache.acquire(hashes) as lease:
            lease.wait()
            self.assert_holds(lease, hashes[: lease.num_blocks])
            if known is not None:
                assert lease.num_blocks == known
        return lease.num_blocks

    def blocks(self):
        """The hashes in each tier."""
        return set(self.tiers.device.pages), set(self.tiers.host.pages)

    def order(self, tier):
        tier = getattr(self.tiers, tier)
        return [tier.hashes[page] for page in tier.order]

    def settle(self):
        """Wait for all transfers, and let the cache see it."""
        self.device.synchronize()
        for stream in (self.engine.load_stream, self.engine.save_stream):
            stream.synchronize()
        self.cache.stats()
        for pool in (self.device_pool, self.host_pool):
            assert pool.allocator.num_free >= 0  # asking lets it look at transfers

    def settle_quietly(self):
        """The same, where transfers and whatever else may have failed."""
        for stream in (self.device, self.engine.load_stream, self.engine.save_stream):
            with suppress(DeviceError):
                stream.synchronize()
        self.settle()

    def assert_no_leak(self):
        """Once all is forgotten, every page of both pools is free."""
        self.cache.clear()
        for pool in (self.device_pool, self.host_pool):
            pool.allocator.check_leaks()
            pages = pool.allocator.alloc(pool.num_pages)
            pool.allocator.free(pages)


def snapshot(blocks):
    """Return the state that a call must not change if it raises."""
    tiers, seen = blocks.tiers, {}
    for tier in (tiers.device, tiers.host):
        allocator = tier.pool.allocator
        seen[tier.name] = (
            (dict(tier.pages), dict(tier.pins), dict(tier.held)),
            [tier.hashes[page] for page in tier.order if page not in tier.pins],
            tier.owned.tolist(),
            allocator._state.tolist(),
            allocator._stack[: allocator.num_free].tolist(),
        )
    seen["stats"] = {k: v for k, v in blocks.cache.stats().items() if k not in TIMED}
    return seen


def in_time(function, patience_s=PATIENCE_S):
    """Call a function in a separate thread; fail if it hangs."""
    outcome = []

    def run():
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience_s)
    assert outcome, f"it hangs: {function}"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


# --- A store ---

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
