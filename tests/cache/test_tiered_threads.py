"""kv.TieredCache in several threads."""

from __future__ import annotations

import random
import threading
import time

import helpers
import pytest
from engine_cases import PATIENCE_S, bits_of, parts_of
from stream_cases import Gate
from tiered_cases import Blocks, in_time
from tiered_store_cases import MemoryStore, StoreBlocks, names

import kvcupy as kv

SECONDS = 1.0 if helpers.full else 0.4  # hundreds of requests
MIN_ROUNDS = 6  # of each thread, however long they take


class SlowStore(MemoryStore):
    def _pass(self, name, when):
        time.sleep(random.random() * 1e-3)


@pytest.mark.parametrize("tiers", ["two tiers", "a store", "a small host tier, slow stores"])
@pytest.mark.parametrize("write", ["through", "back"])
def test_many_threads(device, write, tiers):
    """Requests with shared prefixes: acquire, verify, compute the rest, insert, release."""
    is_slow, stores = "slow" in tiers, []
    if tiers == "a store":
        stores = [MemoryStore()]
    elif is_slow:
        stores = [SlowStore(), SlowStore()]
    sizes = 24, 6 if is_slow else 40
    if stores:
        blocks = StoreBlocks(device, *sizes, write=write, stores=stores)
    else:
        blocks = Blocks(device, *sizes, write=write)
    cache, allocator = blocks.cache, blocks.device_pool.allocator
    until, errors, done = time.monotonic() + SECONDS, [], []

    def pages_for(count):
        while True:
            try:
                return allocator.alloc(count)
            except kv.CacheFull:
                pass
            try:
                cache.evict(count)
            except kv.CacheFull:
                time.sleep(0.001)

    def misses():
        """What has not happened yet, on a slow machine."""
        found, below = cache.stats(), "store_hits" if is_slow else "host_hits"
        return [name for name in ("device_hits", below, "inserted") if not found[name]]

    def serve(seed):
        rng, stream, rounds = random.Random(seed), device.stream(), 0
        try:
            while (
                rounds < MIN_ROUNDS
                or time.monotonic() < until
                or (misses() and time.monotonic() < until + PATIENCE_S / 2)
            ):
                user = rng.randrange(8)
                hashes = names(user // 4, *(100 * user + i for i in range(rng.randrange(1, 5))))
                try:
                    lease = cache.acquire(hashes, after=stream)
                except kv.CacheFull:
                    continue
                with lease:
                    lease.wait_layer(2, stream)
                    stream.synchronize()
                    for page, hash in zip(lease.pages.tolist(), hashes, strict=False):
                        assert (read(page) == blocks.bits(hash)).all(), f"block {hash}"
                    rest = hashes[lease.num_blocks :]
                    pages = pages_for(len(rest)) if rng.random() < 0.9 else pages_for(0)
                    rest = rest[: len(pages)]
                    for page, hash in zip(pages.tolist(), rest, strict=True):
                        blocks.fill(page, hash, stream=stream)
                    if rng.random() < 0.5:
                        stream.synchronize()
                    unneeded = cache.insert(rest, pages, after=stream)
                    stream.synchronize()  # which still writes what is to be freed
                    allocator.free(unneeded)
                chance = rng.random()
                if chance < 0.05:
                    cache.flush()
                elif chance < 0.15:
                    cache.match(hashes)
                    cache.stats()
                rounds += 1
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            done.append(rounds)

    def read(page):
        return bits_of([device.to_numpy(part[page]) for part in parts_of(blocks.device_pool)])

    threads = [threading.Thread(target=serve, args=(i,), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), f"a deadlock: rounds {done}"
    assert not errors, errors
    blocks.settle()
    found = cache.stats()
    assert misses() == []
    assert not stores or found["lost"] == 0, "the stores have room for all blocks"
    assert found["failed_loads"] == found["failed_saves"] == found.get("store_errors", 0) == 0
    blocks.assert_no_leak()


def test_one_that_waits_for_a_transfer_does_not_hold_up_others(device):
    """The acquire needs pages that a save still reads; meanwhile leases come and go."""
    blocks = Blocks(device, 3, 8, write="back")
    blocks.insert([1, 2])
    gate = Gate(blocks.engine.save_stream)
    blocks.cache.evict(2)
    waiting = threading.Thread(target=lambda: blocks.use([1, 2], known=2), daemon=True)
    waiting.start()
    pages = blocks.device_pool.allocator.alloc(1)
    in_time(lambda: blocks.cache.insert([3], pages))
    lease = in_time(lambda: blocks.cache.acquire([3]))
    time.sleep(0.05)
    assert waiting.is_alive()
    in_time(lambda: blocks.cache.match([1, 2]))
    in_time(blocks.cache.stats)
    in_time(lease.release)
    gate.open()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_a_lease_that_is_released_on_the_compute_stream(device):
    """From a host function there, while another thread waits for that very stream."""
    blocks = Blocks(device, 2, 8)
    blocks.insert([1, 2])
    blocks.evict_all()
    compute = device.stream()
    lease = blocks.cache.acquire([1], after=compute)
    lease.wait(compute)
    gate = Gate(compute)
    compute.call(lease.release)
    threading.Timer(0.05, gate.open).start()
    with in_time(lambda: blocks.cache.acquire([2], after=compute)) as other:
        in_time(other.wait)
        assert other.num_blocks == 1
    compute.synchronize()
    assert lease.released
    blocks.cache.evict(2)


def test_closing_while_others_work(device):
    blocks = StoreBlocks(device, 8, 8)
    started, outcome = threading.Event(), []

    def work():
        try:
            while True:
                blocks.use(names(1, 2, 3))
                started.set()
        except kv.KvcupyError as error:
            outcome.append(str(error))

    blocks.insert(names(1, 2, 3))
    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait(PATIENCE_S)
    closing = [threading.Thread(target=blocks.cache.close, daemon=True) for _ in range(3)]
    for thread in (*closing, *threads):
        if thread in closing:
            thread.start()
    for thread in (*closing, *threads):
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert outcome == ["TieredCache: the cache is closed"] * 3
    for pool in (blocks.device_pool, blocks.host_pool):
        pool.allocator.check_leaks()
