"""kv.TieredCache on the device and in host memory: what its calls do, one by one.

Any order of calls, failures included, is walked through in `test_tiered_stateful.py`; the waits of
streams are listed and left out in `tests/order/catalogue.py`.
"""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
from engine_cases import NUM_LAYERS, PATIENCE_S, pool_of
from stream_cases import Gate, Log
from tiered_cases import Blocks, StoreBlocks, in_time, names, snapshot

import kvcupy as kv
from kvcupy import observe

A, B, C, D, E, F, G = range(10, 17)


@pytest.fixture
def blocks(device):
    return Blocks(device)


# --- Match, acquire, insert ---


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


def test_the_load_of_an_acquire_starts_at_once(blocks):
    blocks.insert([A])
    blocks.evict_all()
    blocks.settle()
    with blocks.cache.acquire([A]) as lease:
        blocks.engine.load_stream.synchronize()
        blocks.assert_holds(lease, [A])


def test_a_block_that_only_the_host_has_takes_the_page(blocks):
    blocks.insert([A])
    blocks.evict_all()
    blocks.settle()
    saved = blocks.cache.stats()["save_bytes"]
    assert blocks.insert([A]) == []
    blocks.use([A], known=1)
    blocks.settle()
    assert blocks.cache.stats()["save_bytes"] == saved, "the host has it"


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


# --- Eviction ---


def insert_each(blocks, hashes):
    for hash in hashes:
        blocks.insert([hash])


def test_a_suffix_that_was_inserted_under_a_lease_goes_before_its_prefix(device):
    """In both tiers: alone it would be of no use."""
    blocks = Blocks(device, 4, 4)
    blocks.insert([A, B])
    with blocks.cache.acquire([A, B]):
        blocks.insert([C, D])
    assert blocks.order("device") == blocks.order("host") == [D, C, B, A]


def test_the_least_recently_used_go_first(device):
    blocks = Blocks(device)
    insert_each(blocks, [A, B, C, D])
    blocks.use([A])
    blocks.use([D])
    blocks.cache.evict(2)
    assert blocks.blocks()[0] == {A, D}


def test_without_a_number_all_that_may_go_are_evicted(device):
    """Also more than fit into host memory at once."""
    blocks = StoreBlocks(device, 6, 2, write="back")
    blocks.cache.evict()
    A, B, C, D, E = names(*range(5))
    insert_each(blocks, [A, B, C, D, E])
    with blocks.cache.acquire([B]):
        blocks.cache.evict()
        assert blocks.blocks()[0] == {B}
        blocks.cache.evict()
    blocks.cache.evict()
    assert blocks.blocks()[0] == set()
    assert blocks.blocks()[1] | set(blocks.store.blocks) == {A, B, C, D, E}
    assert blocks.cache.stats()["lost"] == 0
    blocks.settle()
    assert blocks.device_pool.allocator.num_free == 6


def test_more_leave_the_device_than_the_host_can_take(device):
    blocks = Blocks(device, 4, 2, write="back")
    blocks.insert([A, B, C, D])
    blocks.cache.evict(4)
    assert blocks.blocks()[1] == {A, B}, "the last to go are kept"
    assert blocks.cache.stats()["lost"] == 2
    blocks.use([A, B], known=2)
    blocks.assert_no_leak()


def test_acquire_without_pages_changes_nothing(device):
    blocks = Blocks(device, 4, 8)
    blocks.insert([A, B, C, D])
    blocks.evict_all()
    blocks.insert([E, F])
    lease = blocks.cache.acquire([E, F])
    blocks.insert([G])
    blocks.settle()
    before = snapshot(blocks)
    with pytest.raises(kv.CacheFull, match=r"^hashes: expected at most 2 blocks to load.* got 3"):
        blocks.cache.acquire([A, B, C])
    assert snapshot(blocks) == before
    blocks.use([A, B], known=2)
    lease.release()
    blocks.use([A, B, C, D], known=4)


# --- Figures, closing, threads ---


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


# --- Transfers that fail: only the destination copies are forgotten ---


def boom():
    raise OSError("no such luck")


@pytest.fixture
def on_host(blocks):
    """A and B in host memory, nothing on the device."""
    blocks.insert([A, B])
    blocks.evict_all()
    blocks.settle()
    return blocks


def failing_stream(blocks, kind):
    """Let what is put on a stream next fail once it runs."""
    if blocks.device.kind != "host":
        pytest.skip("work behind a failure is skipped on the host device only")
    stream = getattr(blocks.engine, f"{kind}_stream")
    gate = Gate(stream)
    stream.call(boom)
    return gate


WAITS = [lambda lease: lease.wait(), lambda lease: lease.wait_layer(NUM_LAYERS - 1)]


@pytest.mark.parametrize("wait", WAITS, ids=["wait", "wait_layer"])
@pytest.mark.parametrize("layer", [0, NUM_LAYERS - 1])
def test_a_load_that_cannot_be_issued(on_host, layer, wait):
    blocks = on_host
    with observe.attached(Log(refuse=f"load {layer}")):
        lease = blocks.cache.acquire([A, B])
    for _ in range(2):
        with pytest.raises(kv.DeviceError, match="refused"):
            wait(lease)
    assert blocks.cache.match([A, B]) == (0, 2, 2)
    lease.release()
    blocks.use([A, B], known=2)
    found = blocks.cache.stats()
    assert (found["failed_loads"], found["lost"]) == (2, 0)
    blocks.assert_no_leak()


@pytest.mark.parametrize("wait", WAITS, ids=["wait", "wait_layer"])
def test_a_load_that_fails_on_its_way(on_host, wait):
    blocks = on_host
    gate = failing_stream(blocks, "load")
    first, second = (blocks.cache.acquire([A, B]) for _ in range(2))
    gate.open()
    for lease in (first, second, first):
        with pytest.raises(kv.DeviceError, match="no such luck"):
            wait(lease)
    assert blocks.cache.match([A, B]) == (0, 2, 2)
    pages = first.pages.tolist()
    assert blocks.device_pool.allocator.allocated().tolist() == pages, "the leases' until released"
    first.release()
    assert blocks.device_pool.allocator.allocated().tolist() == pages
    second.release()
    blocks.use([A, B], known=2)
    blocks.assert_no_leak()


def test_a_save_that_fails_while_the_device_has_the_block(device):
    blocks = Blocks(device)
    with observe.attached(Log(refuse="save")):
        blocks.insert([A, B])
    assert blocks.cache.match([A, B]) == (2, 2, 2)
    assert blocks.blocks()[1] == set()
    found = blocks.cache.stats()
    assert (found["failed_saves"], found["lost"]) == (2, 0)
    blocks.evict_all()
    assert blocks.cache.match([A, B]) == (0, 2, 2), "they are saved when they leave"
    blocks.use([A, B], known=2)
    blocks.assert_no_leak()


def test_a_save_that_fails_behind_an_eviction(device):
    """The block is lost, and a lease that loads it meanwhile raises."""
    blocks = Blocks(device, write="back")
    blocks.insert([A, B])
    gate = failing_stream(blocks, "save")
    blocks.cache.evict(2)
    lease = blocks.cache.acquire([A, B])
    gate.open()
    with pytest.raises(kv.DeviceError, match="no such luck"):
        lease.wait()
    assert blocks.cache.match([A, B]) == (0, 0, 0)
    lease.release()
    assert blocks.cache.stats()["lost"] == 2
    blocks.insert([A, B])
    blocks.use([A, B], known=2)
    blocks.assert_no_leak()


class Broken:
    """Stands in for a transfer that has failed without a trace on the streams behind it."""

    failure = kv.DeviceError("broken")

    def done(self):
        raise self.failure


def test_a_load_is_as_good_as_the_save_before_it(device):
    blocks = Blocks(device, write="back")
    blocks.insert([A])
    gate = Gate(blocks.engine.save_stream)
    blocks.cache.evict(1)
    lease = blocks.cache.acquire([A])
    (save,) = blocks.tiers.in_flight.saves()
    save._completion = Broken()
    gate.open()
    with pytest.raises(kv.DeviceError, match="broken"):
        lease.wait()
    lease.release()
    blocks.settle()
    assert blocks.cache.match([A]) == (0, 0, 0)
    blocks.assert_no_leak()


# --- What is refused ---

# Pages 0 and 1 are the caller's, 2 is the cache's, 3 is free; block C is leased and held.
CALLS = [
    *((lambda c, args=args: c.insert(*args), error, said) for args, error, said in (
        (([A], [0, 1]), ValueError, "pages: expected 1 like hashes"),
        (([A, B], [0]), ValueError, "pages: expected 2 like hashes"),
        (([A, B], [0, 0]), ValueError, "pages: expected each page once"),
        (([A], [3]), ValueError, "pages: expected allocated pages"),
        (([A], [4]), ValueError, "pages: expected 0 to 3"),
        (([A], [-1]), ValueError, "pages: expected 0 to 3"),
        (([A], [2**70]), ValueError, "pages: expected 0 to 3"),
        (([A], [2]), ValueError, "pages: expected the caller's"),
        (([A], 3), TypeError, "pages"), (([A], [0.5]), ValueError, "pages"),
        (([A], [[0]]), ValueError, "pages"), (([0.5], [0]), TypeError, "hashes"),
        (([2**128], [0]), ValueError, "hashes"), ((7, [0]), TypeError, "hashes"),
    )),
    (lambda c: c.insert([], [], after="x"), TypeError, "after"),
    (lambda c: c.acquire([A], after=3), TypeError, "after"),
    (lambda c: c.acquire([0.5]), TypeError, "hashes"),
    (lambda c: c.match(3), TypeError, "hashes"),
    *((lambda c, n=n: c.evict(n), error, "num_blocks")
      for n, error in ((-1, ValueError), (1.0, TypeError), (1, kv.CacheFull))),
    *((lambda c, call=call, s=s: getattr(c, call)(*[[A]] * (call in ("acquire", "hold")),
                                                  deadline_s=s), error, "deadline_s")
      for call in ("acquire", "hold", "flush", "close")
      for s, error in ((-1, ValueError), (float("nan"), ValueError), ("1", TypeError),
                       (-(10**400), ValueError))),
    *((lambda c, options=options: c.retain([A], **options), error, next(iter(options)))
      for options, error in (({"priority": 1.5}, TypeError), ({"ttl_s": -1}, ValueError),
                             ({"ttl_s": "1"}, TypeError), ({"ttl_s": float("nan")}, ValueError))),
    (lambda c: c.clear(stores=1), TypeError, "stores"),
    (lambda c: c.clear(), kv.KvcupyError, ".*leased"),
    (lambda c: c.save([A, B], [0]), ValueError, "pages: expected 2 like hashes, got 1"),
    (lambda c: c.save([A], [4]), ValueError, "pages: expected pages of the device pool"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_refused(blocks, number):
    call, error, said = CALLS[number]
    taken = blocks.device_pool.allocator.alloc(3)
    blocks.cache.insert([C], taken[2:])
    blocks.settle()
    with blocks.cache.acquire([C]):
        before = snapshot(blocks)
        with pytest.raises(error, match=f"^{said}"):
            call(blocks.cache)
        assert snapshot(blocks) == before and not blocks.cache.closed


@pytest.mark.parametrize(("layer", "error"), [
    (-1, ValueError), (NUM_LAYERS, ValueError), (0.0, TypeError), (None, TypeError)
])  # fmt: skip
def test_layers_of_a_lease_that_are_refused(blocks, layer, error):
    blocks.insert([A])
    with blocks.cache.acquire([A]) as lease, pytest.raises(error, match="layer"):
        lease.wait_layer(layer)


SECRET = "redis://:secret@h"


@pytest.mark.parametrize(("options", "error", "said"), [
    ({"write": "around"}, ValueError, "write"), ({"host_bytes": 5}, ValueError, "host_bytes"),
    ({"heads": (1, 2, 3)}, TypeError, "heads"), ({"heads": (1, 2)}, ValueError, "heads"),
    *(({"stores": stores}, TypeError, "stores") for stores in (
        "file:/kv", 3, [3], None, [object()], [lambda pool, model: object()], SECRET,
        [SECRET.encode()], [[SECRET]],
    )),
    ({"stores": ["mooncake://user:secret@h:1"]}, ValueError, "url"),
])  # fmt: skip
def test_options_that_are_refused(device, options, error, said):
    """No message has a password."""
    with pytest.raises(error, match=f"^{said}: expected") as caught:
        kv.TieredCache(pool_of(device, 2), pool_of(device, 2), **options)
    assert "secret" not in str(caught.value)


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
