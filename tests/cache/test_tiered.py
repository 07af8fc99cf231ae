"""kv.TieredCache: blocks by hash on the device and in host memory, as a user sees them."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from engine_cases import NUM_LAYERS, PATIENCE_S, layer_bits, poll, pool_of
from stream_cases import Gate, delay
from tiered_cases import Blocks, in_time, snapshot

import kvcupy as kv
from kvcupy.cache.tiered.cache import TieredCache

A, B, C, D, E, F = 0xA, 0xB, 0xC, 0xD, 0xE, 0xF


@pytest.fixture
def blocks(device):
    return Blocks(device)


# Match and acquire -------------------------------------------------------------------------------


def test_a_block_comes_back_as_it_was(blocks):
    assert blocks.insert([A, B]) == []
    assert blocks.cache.match([A, B, C]) == (2, 2, 2)
    blocks.cache.evict(2)
    blocks.settle()
    assert blocks.device_pool.allocator.num_free == 4
    assert blocks.cache.match([A, B, C]) == (0, 2, 2)
    blocks.use([A, B, C], known=2)
    assert blocks.cache.match([A, B, C]) == (2, 2, 2)


def test_a_lease(blocks):
    blocks.insert([A, B])
    lease = blocks.cache.acquire([A, B, C])
    assert isinstance(lease, kv.cache.tiered.leases.Lease)
    assert lease.pages.dtype == np.int64 and lease.pages.shape == (2,)
    assert not lease.pages.flags.writeable
    assert repr(lease) == "<Lease of 2 blocks, held>"
    lease.release()
    lease.release()
    assert lease.released and repr(lease) == "<Lease of 2 blocks, released>"
    for wait in (lease.wait, lambda: lease.wait_layer(0)):
        with pytest.raises(kv.KvcupyError, match="released"):
            wait()
    blocks.cache.evict(2)
    assert repr(blocks.cache) == "<TieredCache of 0 device, 2 host blocks, 0 stores>"
    blocks.cache.close()
    assert repr(blocks.cache) == "<TieredCache, closed>"


def test_with_releases_upon_an_error_too(blocks):
    blocks.insert([A])
    with pytest.raises(ZeroDivisionError), blocks.cache.acquire([A]):
        raise ZeroDivisionError
    blocks.cache.evict(1)


@pytest.mark.parametrize(
    ("layer", "error"),
    [(-1, ValueError), (NUM_LAYERS, ValueError), (0.0, TypeError), (None, TypeError)],
)
def test_layers_that_there_are_not(blocks, layer, error):
    blocks.insert([A])
    with blocks.cache.acquire([A]) as lease, pytest.raises(error, match="layer"):
        lease.wait_layer(layer)


@pytest.mark.parametrize("wait", ["layer", "all"])
def test_a_stream_waits_for_each_layer(blocks, wait):
    """While the load is held up, a read that does not wait comes too early."""
    blocks.insert([A, B])
    blocks.evict_all()
    blocks.settle()
    compute, seen = blocks.device.stream(), []
    delay(blocks.engine.load_stream)
    with blocks.cache.acquire([A, B], after=compute) as lease:
        for layer in range(NUM_LAYERS):
            if wait == "layer":
                lease.wait_layer(layer, compute)
            else:
                lease.wait(compute)
            for page in lease.pages.tolist():
                parts = [view(layer)[page] for view in (blocks.device_pool.k, blocks.device_pool.v)]
                copies = [blocks.device.zeros(part.shape, np.float16) for part in parts]
                for copy, part in zip(copies, parts, strict=True):
                    blocks.device.copy(copy, part, stream=compute)
                seen.append((layer, copies))
        compute.synchronize()
    for i, (layer, copies) in enumerate(seen):
        found = [blocks.device.to_numpy(copy).reshape(-1).view(np.uint8) for copy in copies]
        expected = layer_bits(blocks.device_pool, blocks.bits((A, B)[i % 2]), layer)
        assert np.array_equal(np.concatenate(found), expected), f"layer {layer}, block {i % 2}"


@pytest.mark.races
def test_several_leases_share_one_load(blocks, monkeypatch):
    blocks.insert([A, B, C])
    blocks.evict_all()
    blocks.settle()
    calls, genuine = [], blocks.engine.load

    def load(*args, **options):
        calls.append(len(args[0]))
        return genuine(*args, **options)

    monkeypatch.setattr(blocks.engine, "load", load)
    gate = Gate(blocks.engine.load_stream)
    leases = [blocks.cache.acquire(h) for h in ([A, B], [A, B], [A, B, C], [A])]
    assert calls == [2, 1]
    gate.open()
    for lease, hashes in zip(leases, ([A, B], [A, B], [A, B, C], [A]), strict=True):
        lease.wait()
        blocks.assert_holds(lease, hashes)
        lease.release()


def test_the_load_of_an_acquire_starts_at_once(blocks):
    blocks.insert([A])
    blocks.evict_all()
    blocks.settle()
    with blocks.cache.acquire([A]) as lease:
        blocks.engine.load_stream.synchronize()
        blocks.assert_holds(lease, [A])


def test_a_load_waits_for_readers_of_the_pages_that_it_overwrites(device):
    """`after` still reads what was evicted for it, and so does the save of that."""
    for write in ("through", "back"):
        blocks = Blocks(device, 2, 8, write=write)
        blocks.insert([A, B])
        blocks.evict_all()
        blocks.insert([C, D])
        compute, lease = device.stream(), blocks.cache.acquire([C, D])
        part = blocks.device_pool.k(0)
        copy = device.zeros(part.shape, np.float16)
        gate = Gate(compute)
        device.copy(copy, part, stream=compute)
        before = device.to_numpy(part).copy()
        lease.release()
        lease = blocks.cache.acquire([A, B], after=compute)
        assert not lease.completion._arriving[0].done()
        gate.open()
        lease.wait()
        compute.synchronize()
        assert np.array_equal(device.to_numpy(copy).view(np.uint8), before.view(np.uint8))
        blocks.assert_holds(lease, [A, B])
        lease.release()
        blocks.use([C, D], known=2)


# Insert ------------------------------------------------------------------------------------------


def test_a_block_that_only_the_host_has_takes_the_page(blocks):
    blocks.insert([A])
    blocks.evict_all()
    blocks.settle()
    saved = blocks.cache.stats()["save_bytes"]
    assert blocks.insert([A]) == []
    blocks.use([A], known=1)
    blocks.settle()
    assert blocks.cache.stats()["save_bytes"] == saved, "the host has it"


def test_hashes_with_a_sign(blocks):
    blocks.insert([2**64 - 1, 5])
    assert blocks.cache.match(np.array([-1, 5])) == (2, 2, 2)


@pytest.mark.parametrize(
    ("hashes", "pages", "error", "said"),
    [
        ([A], [0, 1], ValueError, "pages: expected 1 like hashes"),
        ([A, B], [0], ValueError, "pages: expected 2 like hashes"),
        ([A, B], [0, 0], ValueError, "pages: expected each page once"),
        ([A], [3], ValueError, "pages: expected allocated pages"),
        ([A], [4], ValueError, "pages: expected 0 to 3"),
        ([A], [-1], ValueError, "pages: expected 0 to 3"),
        ([A], [2**70], ValueError, "pages: expected 0 to 3"),
        ([A], [2], ValueError, "pages: expected the caller's"),
        ([A], 3, TypeError, "pages"),
        ([A], [0.5], ValueError, "pages"),
        ([A], [[0]], ValueError, "pages"),
        ([0.5], [0], TypeError, "hashes"),
        ([2**128], [0], ValueError, "hashes"),
        (7, [0], TypeError, "hashes"),
    ],
)
def test_invalid_inserts(blocks, hashes, pages, error, said):
    """Pages 0 and 1 are the caller's, 2 is the cache's, 3 is free."""
    taken = blocks.device_pool.allocator.alloc(3)
    blocks.cache.insert([C], taken[2:])
    blocks.settle()
    before = snapshot(blocks)
    with pytest.raises(error, match=f"^{said}"):
        blocks.cache.insert(hashes, pages)
    assert snapshot(blocks) == before


@pytest.mark.parametrize("write", ["through", "back"])
def test_pages_that_a_stream_still_writes(device, write):
    """Leases wait for them; they are saved when they are complete, even if evicted earlier."""
    blocks = Blocks(device, 3, write=write)
    compute = device.stream()
    gate = Gate(compute)
    pages = blocks.device_pool.allocator.alloc(2).tolist()
    for page, hash in zip(pages, (A, B), strict=True):
        blocks.fill(page, hash, stream=compute)
    blocks.cache.insert([A, B], pages, after=compute)
    lease, other = blocks.cache.acquire([A, B]), device.stream()
    lease.wait_layer(0, other)
    assert not other.done()
    lease.release()
    in_time(lambda: blocks.cache.evict(2))
    assert blocks.device_pool.allocator.num_free == 1, "they are still being written"
    gate.open()
    other.synchronize()
    blocks.use([A, B], known=2)
    blocks.assert_no_leak()


def test_a_page_that_is_still_written_is_not_overwritten_by_a_load(device):
    """Its block needs no save, for the host has it."""
    blocks = Blocks(device, 1, write="back")
    for hash in (A, B):
        blocks.insert([hash])
        blocks.cache.evict(1)
    compute = device.stream()
    gate = Gate(compute)
    pages = blocks.device_pool.allocator.alloc(1)
    blocks.fill(int(pages[0]), A, stream=compute)
    blocks.cache.insert([A], pages, after=compute)
    lease = in_time(lambda: blocks.cache.acquire([B]))
    gate.open()
    lease.wait()
    blocks.assert_holds(lease, [B])


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_page_that_is_still_written_is_not_allocated(device, write):
    """Evicted without a save, for the host has the block."""
    blocks = Blocks(device, 1, write=write)
    blocks.insert([A])
    blocks.cache.evict(1)
    pages = blocks.device_pool.allocator.alloc(1)
    compute = device.stream()
    gate = Gate(compute)
    blocks.cache.insert([A], pages, after=compute)
    in_time(lambda: blocks.cache.evict(1))
    assert blocks.device_pool.allocator.num_free == 0
    gate.open()
    assert in_time(lambda: blocks.device_pool.allocator.alloc(1)).tolist() == pages.tolist()


def test_copies_of_what_is_inserted_are_not_evicted_for_the_rest_of_it(device):
    blocks = Blocks(device, 4, 2)
    for hash in (A, C):
        blocks.insert([hash])
        blocks.cache.evict(1)
    blocks.settle()
    blocks.insert([A, B])
    assert blocks.blocks()[1] == {A, B}


# Write through and back --------------------------------------------------------------------------


def test_through_copies_at_once_and_back_when_a_block_leaves(device):
    saved = {}
    for write in ("through", "back"):
        blocks = Blocks(device, write=write)
        blocks.insert([A, B, C])
        saved[write] = [blocks.blocks()[1]]
        blocks.cache.evict(1)
        saved[write].append(blocks.blocks()[1])
        blocks.use([A, B, C], known=3)
        blocks.evict_all()
        blocks.use([A, B, C], known=3)
    assert saved == {"through": [{A, B, C}] * 2, "back": [set(), {C}]}


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_block_is_saved_once(device, write):
    blocks = Blocks(device, write=write)
    blocks.insert([A, B])
    for _ in range(3):
        blocks.evict_all()
        blocks.use([A, B], known=2)
    blocks.settle()
    assert blocks.cache.stats()["save_bytes"] == 2 * blocks.device_pool.page_bytes


def test_through_saves_the_first_blocks_if_there_is_no_space_for_all(device):
    blocks = Blocks(device, 4, 2)
    blocks.insert([A, B, C])
    assert blocks.blocks() == ({A, B, C}, {A, B})
    blocks.insert([D])
    assert blocks.blocks()[1] == {A, D}, "the leaf has gone"


def test_a_page_in_flight_is_not_allocated(device):
    blocks = Blocks(device, 2, write="back")
    blocks.insert([A, B])
    gate = Gate(blocks.engine.save_stream)
    blocks.cache.evict(2)
    assert blocks.device_pool.allocator.num_free == 0
    gate.open()
    pages = in_time(lambda: blocks.device_pool.allocator.alloc(2))
    for page in pages.tolist():
        blocks.fill(page, F)
    blocks.device_pool.allocator.free(pages)
    blocks.use([A, B], known=2)


def test_acquire_waits_for_pages_that_a_save_still_reads(device):
    blocks = Blocks(device, 2, write="back")
    blocks.insert([A, B])
    delay(blocks.engine.save_stream)
    blocks.cache.evict(2)
    blocks.use([A, B], known=2)


def test_a_load_of_what_is_still_being_saved(device):
    """Without waiting: the save and the load are ordered on the device."""
    blocks = Blocks(device, 4, write="back")
    blocks.insert([A, B])
    gate = Gate(blocks.engine.save_stream)
    blocks.cache.evict(2)
    lease = in_time(lambda: blocks.cache.acquire([A, B]))
    gate.open()
    lease.wait()
    blocks.assert_holds(lease, [A, B])


# Figures, clearing, closing ----------------------------------------------------------------------


def test_stats(blocks):
    blocks.insert([A, B, C])
    blocks.cache.evict(1)
    blocks.use([A, B, C, D])
    blocks.settle()
    found = blocks.cache.stats()
    page = blocks.device_pool.page_bytes
    expected = {
        "device_hits": 2, "host_hits": 1, "misses": 1, "inserted": 3,
        "device_evicted": 1, "host_evicted": 0, "lost": 0,
        "failed_loads": 0, "failed_saves": 0, "save_bytes": 3 * page, "load_bytes": page,
        "device_blocks": 3, "host_blocks": 3,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    assert found["save_s"] > 0 and found["load_s"] > 0
    assert set(found) == {*expected, "load_s", "save_s"}
    assert all(type(value) in (int, float) for value in found.values())


def test_closing(blocks):
    blocks.insert([A, B])
    lease = blocks.cache.acquire([A])
    blocks.cache.close()
    blocks.cache.close()
    for call in (
        lambda: blocks.cache.match([A]), lambda: blocks.cache.acquire([A]), blocks.cache.flush,
        lambda: blocks.cache.insert([], []), lambda: blocks.cache.evict(0), blocks.cache.clear,
    ):  # fmt: skip
        with pytest.raises(kv.KvcupyError, match=r"^TieredCache: the cache is closed"):
            call()
    lease.wait()
    blocks.assert_holds(lease, [A])
    assert blocks.device_pool.allocator.allocated().tolist() == lease.pages.tolist()
    lease.release()
    for pool in (blocks.device_pool, blocks.host_pool):
        pool.allocator.check_leaks()
    assert blocks.cache.stats()["inserted"] == 2


def test_flush_waits_for_saves(blocks):
    delay(blocks.engine.save_stream)
    blocks.insert([A, B])
    blocks.cache.flush()
    assert blocks.engine.save_stream.done()
    assert blocks.cache.stats()["save_bytes"] == 2 * blocks.device_pool.page_bytes


def test_a_cache_that_goes_lets_its_pools_go(device):
    blocks = Blocks(device)
    blocks.insert([A])
    blocks.use([A])
    blocks.settle()
    watched = weakref.ref(blocks.device_pool)
    del blocks

    def gone():
        gc.collect()
        return watched() is None

    assert poll(gone, PATIENCE_S)  # the streams' threads let go of what they ran last


# Arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"write": "around"}, ValueError, "write"),
        ({"host_bytes": 5}, ValueError, "host_bytes"),
        ({"stores": "file:/kv"}, TypeError, "stores"),
        ({"stores": 3}, TypeError, "stores"),
        ({"stores": [3]}, TypeError, "stores"),
        ({"heads": (1, 2, 3)}, TypeError, "heads"),
        ({"heads": (1, 2)}, ValueError, "heads"),
    ],
)
def test_invalid_options(device, options, error, said):
    with pytest.raises(error, match=f"^{said}: expected"):
        TieredCache(pool_of(device, 2), pool_of(device, 2), **options)


def test_pools_that_do_not_go_together(device):
    with pytest.raises(ValueError, match=r"^host_pool"):
        TieredCache(pool_of(device, 2), pool_of(device, 2, head_dim=8))


def test_invalid_arguments(blocks):
    blocks.insert([A])
    blocks.settle()
    before = snapshot(blocks)
    for call, error, said in (
        (lambda: blocks.cache.acquire([A], after=3), TypeError, "after"),
        (lambda: blocks.cache.acquire([0.5]), TypeError, "hashes"),
        (lambda: blocks.cache.match(3), TypeError, "hashes"),
        (lambda: blocks.cache.insert([], [], after="x"), TypeError, "after"),
        (lambda: blocks.cache.evict(-1), ValueError, "num_blocks"),
        (lambda: blocks.cache.evict(1.0), TypeError, "num_blocks"),
        (lambda: blocks.cache.evict(2), kv.CacheFull, "num_blocks"),
    ):
        with pytest.raises(error, match=f"^{said}"):
            call()
        assert snapshot(blocks) == before


def test_captures_raise(blocks):
    blocks.insert([A])
    blocks.settle()
    stream, (page,) = blocks.device.stream(), blocks.device_pool.allocator.alloc(1).tolist()
    lease = blocks.cache.acquire([A])
    before = snapshot(blocks)
    with stream.capture():
        for call in (
            lambda: blocks.cache.acquire([A], after=stream),
            lambda: blocks.cache.insert([B], [page], after=stream),
        ):
            with pytest.raises(kv.CaptureError, match="after"):
                call()
        with pytest.raises(kv.CaptureError, match="stream"):
            lease.wait(stream)
    assert snapshot(blocks) == before


def test_blocks_at_rest_are_not_visited_by_garbage_collections(device):
    """Otherwise a collection takes as long as there are blocks, in whichever call it happens."""
    blocks = Blocks(device, 1000, 2000)

    def visited(hashes):
        """Insert and use blocks; return how many references a collection follows then."""
        blocks.cache.insert(hashes, blocks.device_pool.allocator.alloc(len(hashes)))
        blocks.cache.acquire(hashes[::2]).release()
        blocks.settle()
        gc.collect()
        return sum(len(gc.get_referents(each)) for each in gc.get_objects())

    few, many = visited(range(100)), visited(range(100, 1000))
    assert len(blocks.blocks()[0]) == len(blocks.blocks()[1]) == 1000
    assert many - few < 500
    blocks.assert_no_leak()
