"""TieredCache.hold and save: blocks for engines that own the pages of the device."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import PATIENCE_S, poll
from tiered_store_cases import Held, MemoryStore

import kvcupy as kv

HASHES = [2**100 + i for i in range(12)]


class Engine:
    """Device pages whose every element is their number, and a cache below them."""

    def __init__(self, device, *, host_pages=6, **options):
        shape = dict(page_size=2, num_layers=3, num_kv_heads=1, head_dim=8, dtype="fp16")
        self.device_pool = kv.KVPool(12, **shape, device=device)
        self.host_pool = kv.KVPool(host_pages, **shape, device=device, placement="pinned")
        if (blocks := options.pop("blocks", None)) is not None:
            self.store = MemoryStore(self.host_pool, blocks)
            options["stores"] = [self.store]
        self.cache = kv.TieredCache(self.device_pool, self.host_pool, **options)
        for page in range(12):
            self.fill(page, page + 1)

    def fill(self, page, value):
        for layer in range(3):
            self.device_pool.k(layer)[page] = value
            self.device_pool.v(layer)[page] = -value
        self.device_pool.device.synchronize()

    def values(self, pages):
        """The one value of each page; None if its elements differ."""
        found = []
        for page in pages:
            parts = [
                sign * np.asarray(self.device_pool.device.to_numpy(array), np.float32)
                for layer in range(3)
                for sign, array in (
                    (1, self.device_pool.k(layer)[page]), (-1, self.device_pool.v(layer)[page])
                )
            ]  # fmt: skip
            elements = np.unique(parts)
            found.append(float(elements[0]) if len(elements) == 1 else None)
        return found


@pytest.fixture
def engine(device):
    made = Engine(device)
    yield made
    made.cache.close()


@pytest.fixture
def with_store(device):
    made = Engine(device, blocks={})
    yield made
    made.cache.close()


def test_some_of_the_held_blocks_are_loaded(engine):
    engine.cache.save(HASHES[:3], [0, 1, 2]).synchronize()
    with engine.cache.hold(HASHES) as held:
        assert (held.num_blocks, held.sources) == (3, ["host"] * 3)
        assert repr(held) == "<HeldBlocks, 3 of 12, held>"
        held.load([7, 8], first=1).synchronize()
        assert engine.values([6, 7, 8, 9]) == [7, 2, 3, 10]
        held.load([7, 8], blocks=[2, 0]).synchronize()
    assert engine.values([6, 7, 8, 9]) == [7, 3, 1, 10]
    assert engine.device_pool.allocator.num_allocated == 0  # the engine's, not the cache's


def test_held_blocks_are_not_evicted(engine):
    engine.cache.save(HASHES[:3], [0, 1, 2]).synchronize()
    held = engine.cache.hold(HASHES[:3])
    engine.cache.save(HASHES[3:9], [3, 4, 5, 6, 7, 8]).synchronize()
    assert [engine.cache.match([h]).host for h in HASHES[:9]] == [1] * 6 + [0] * 3
    held.load([9, 10, 11]).synchronize()
    assert engine.values([9, 10, 11]) == [1, 2, 3]
    held.release()
    held.release()
    with pytest.raises(kv.KvcupyError, match="released"):
        held.load([9])
    engine.cache.save(HASHES[6:12], [6, 7, 8, 9, 10, 11]).synchronize()
    assert engine.cache.match(HASHES[:1]).host == 0


def test_blocks_come_back_from_a_store(with_store):
    with_store.cache.save(HASHES[:6], range(6)).synchronize()
    assert with_store.cache.flush() == 0
    with_store.cache.save(HASHES[6:12], range(6, 12)).synchronize()
    assert with_store.cache.match(HASHES) == (0, 0, 12)
    with with_store.cache.hold(HASHES) as held:
        assert (held.num_blocks, held.sources) == (3, ["store"] * 3)  # half of the host pages
        for page in range(12):
            with_store.fill(page, 0)
        held.load([3, 4, 5]).synchronize()
    assert with_store.values([3, 4, 5]) == [1, 2, 3]


def test_a_block_that_does_not_come_ends_the_prefix(with_store):
    with_store.cache.save(HASHES[:3], range(3)).synchronize()
    assert with_store.cache.flush() == 0
    with_store.cache.save(HASHES[6:12], range(6, 12)).synchronize()
    with_store.store.lacking = {HASHES[1]}
    with with_store.cache.hold(HASHES[:3]) as held:
        assert held.num_blocks == 1
        held.load([3]).synchronize()
    assert with_store.values([3]) == [1]


def test_a_save_does_not_wait_for_the_store(with_store):
    gate = Held(with_store.store, "put")
    with_store.cache.save(HASHES[:6], range(6)).synchronize()
    completion = with_store.cache.save(HASHES[6:8], [6, 7])  # each other block must be put first
    assert completion.done()
    assert with_store.cache.match(HASHES[6:8]).host == 0
    gate.open()
    assert with_store.cache.flush() == 0
    with_store.cache.save(HASHES[6:8], [6, 7]).synchronize()
    assert with_store.cache.match(HASHES[6:8]).host == 2
    assert poll(lambda: len(with_store.store.blocks) == 8, PATIENCE_S)


def test_blocks_come_from_the_store_of_another(device):
    blocks = {}
    first, second = (Engine(device, blocks=blocks) for _ in range(2))
    first.cache.save(HASHES[:2], [0, 1]).synchronize()
    assert first.cache.flush() == 0
    assert second.cache.match(HASHES) == (0, 0, 2)
    with second.cache.hold(HASHES) as held:
        assert (held.num_blocks, held.sources) == (2, ["store", "store"])
        held.load([5, 6]).synchronize()
    assert second.values([5, 6]) == [1, 2]
    assert second.cache.stats()["store_hits"] == 2
    first.cache.close()
    second.cache.close()


def test_arguments(engine):
    engine.cache.save(HASHES[:2], [0, 1]).synchronize()
    with pytest.raises(ValueError, match="pages: expected 2 like hashes, got 1"):
        engine.cache.save(HASHES[:2], [0])
    with pytest.raises(ValueError, match="pages: expected pages of the device pool"):
        engine.cache.save(HASHES[:1], [12])
    with engine.cache.hold(HASHES[:2]) as held:
        with pytest.raises(ValueError, match="pages: expected at most 2 blocks, got 2 from 1 on"):
            held.load([0, 1], first=1)
        with pytest.raises(ValueError, match="pages: expected at most 2 blocks, got 1 from 2 on"):
            held.load([0], blocks=[2])
        with pytest.raises(ValueError, match="pages: expected 1 like blocks, got 2"):
            held.load([0, 1], blocks=[0])
        with pytest.raises(ValueError, match="below 12"):
            held.load([12])
    with pytest.raises(ValueError, match="deadline_s: expected"):
        engine.cache.hold(HASHES, deadline_s=-1)
    assert not engine.cache._tiers[0].host.held
