"""TieredCache.hold and save: blocks for engines that own the pages of the device."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvcupy as kv
from kvcupy.cache.tiered.disk import DiskTier
from kvcupy.cache.tiered.order import EvictionOrder

HASHES = [2**100 + i for i in range(12)]


class Engine:
    """Device pages whose every element is their number, and a cache below them."""

    def __init__(self, device, *, host_pages=6, **options):
        shape = dict(page_size=2, num_layers=3, num_kv_heads=1, head_dim=8, dtype="fp16")
        self.device_pool = kv.KVPool(12, **shape, device=device)
        self.host_pool = kv.KVPool(host_pages, **shape, device=device, placement="pinned")
        if "store" in options:
            self.store = kv.BlockStore.open(options.pop("store"), self.host_pool)
            options["shared"] = self.store
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
def on_disk(device, tmp_path):
    made = Engine(device, disk=tmp_path / "f", disk_bytes=2**20)
    yield made
    made.cache.close()


@pytest.mark.parametrize("call", ["hold", "acquire"])
def test_a_block_from_disk_counts_as_used_once(device, tmp_path, monkeypatch, call):
    """A second touch would take time, in which nothing changes."""
    used = []
    engine = Engine(device, disk=tmp_path / "f", disk_bytes=2**20)
    tiers = engine.cache._shared.tiers
    for first in (0, 6):  # the first six go to disk
        engine.cache.save(HASHES[first : first + 6], range(first, first + 6)).synchronize()
        engine.cache.flush()
    touch = EvictionOrder.touch

    def noting(order, hashes):
        name = next(t for t in ("device", "host", "disk") if getattr(tiers, t).order is order)
        hashes = list(hashes)
        used.extend((name, hash) for hash in hashes)
        touch(order, hashes)

    monkeypatch.setattr(EvictionOrder, "touch", noting)
    held = getattr(engine.cache, call)(HASHES[:2])
    assert held.num_blocks == 2
    names = {"hold": ["host", "disk"], "acquire": ["host", "disk", "device"]}[call]
    assert used == [(name, hash) for name in names for hash in HASHES[1::-1]]
    held.release()
    engine.cache.close()


def test_saved_blocks_are_loaded_into_other_pages(engine):
    engine.cache.save(HASHES[:3], [0, 1, 2]).synchronize()
    with engine.cache.hold(HASHES) as held:
        assert (held.num_blocks, held.sources) == (3, ["host"] * 3)
        assert repr(held) == "<HeldBlocks, 3 of 12, held>"
        completion = held.load([7, 8], first=1)
    for layer in range(3):
        completion.wait_layer(layer)
    completion.synchronize()
    assert completion.done() and completion.failure is None
    assert engine.values([6, 7, 8, 9]) == [7, 2, 3, 10]
    assert engine.device_pool.allocator.num_allocated == 0  # the engine's, not the cache's


def test_some_of_the_held_blocks_are_loaded(engine):
    engine.cache.save(HASHES[:3], [0, 1, 2]).synchronize()
    with engine.cache.hold(HASHES[:3]) as held:
        held.load([7, 8], blocks=[2, 0]).synchronize()
    assert engine.values([6, 7, 8, 9]) == [7, 3, 1, 10]


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


def test_blocks_come_from_disk(on_disk):
    on_disk.cache.save(HASHES[:6], range(6)).synchronize()
    on_disk.cache.flush()
    on_disk.cache.save(HASHES[6:12], range(6, 12)).synchronize()
    on_disk.cache.flush()
    assert on_disk.cache.match(HASHES) == (0, 0, 12, 12)
    with on_disk.cache.hold(HASHES) as held:
        assert (held.num_blocks, held.sources) == (3, ["disk"] * 3)  # half of the host pages
        for page in range(12):
            on_disk.fill(page, 0)
        held.load([3, 4, 5]).synchronize()
    assert on_disk.values([3, 4, 5]) == [1, 2, 3]


def test_a_block_that_cannot_be_read_ends_the_prefix(on_disk, monkeypatch):
    on_disk.cache.save(HASHES[:3], range(3)).synchronize()
    on_disk.cache.flush()
    on_disk.cache.save(HASHES[6:12], range(6, 12)).synchronize()
    read = DiskTier.read_many

    def fail_second(tier, items):
        results = list(read(tier, items))
        results[1] = OSError(5, "an injected failure")
        return results

    monkeypatch.setattr(DiskTier, "read_many", fail_second)
    with on_disk.cache.hold(HASHES[:3]) as held:
        assert held.num_blocks == 1
        held.load([3]).synchronize()
    assert on_disk.values([3]) == [1]


def test_a_save_does_not_wait_for_the_disk(on_disk, monkeypatch):
    release = threading.Event()
    write = DiskTier.write_many
    monkeypatch.setattr(
        DiskTier, "write_many", lambda tier, items: release.wait(30) and write(tier, items)
    )
    on_disk.cache.save(HASHES[:6], range(6)).synchronize()
    completion = on_disk.cache.save(HASHES[6:8], [6, 7])  # each other block must be written first
    assert completion.done()
    assert on_disk.cache.match(HASHES[6:8]).host == 0
    release.set()
    on_disk.cache.flush()
    on_disk.cache.save(HASHES[6:8], [6, 7]).synchronize()
    assert on_disk.cache.match(HASHES[6:8]).host == 2


def test_blocks_come_from_a_store(device, tmp_path):
    url = f"file:{tmp_path}/store"
    first, second = (Engine(device, store=url, shared_prefetch=1.0) for _ in range(2))
    try:
        first.cache.save(HASHES[:2], [0, 1]).synchronize()
        first.cache.flush()
        assert second.cache.match(HASHES, shared=False) == (0, 0, 0, 0)
        with second.cache.hold(HASHES) as held:
            assert (held.num_blocks, held.sources) == (2, ["shared", "shared"])
            held.load([5, 6]).synchronize()
        assert second.values([5, 6]) == [1, 2]
        assert second.cache.stats()["shared_hits"] == 2
    finally:
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
    with pytest.raises(ValueError, match="wait: expected one of"):
        engine.cache.hold(HASHES, wait="forever")
    assert not engine.cache._shared.tiers.host.held
