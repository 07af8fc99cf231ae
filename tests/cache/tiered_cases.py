"""A cache of blocks whose contents follow from their hashes, and its internal state."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
from engine_cases import (
    PATIENCE_S,
    bits_of,
    contents,
    load_kernels,
    page_values,
    parts_of,
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
