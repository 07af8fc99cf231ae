"""kv.TieredCache when transfers fail: only the destination copies are forgotten."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from engine_cases import NUM_LAYERS
from stream_cases import DELAY_S, Gate, Log
from tiered_cases import Blocks, in_time

import kvcupy as kv
from kvcupy import observe
from kvcupy.cache.tiered.in_flight import BlockCompletion, CompletionQueue

A, B, C, D = 0xA, 0xB, 0xC, 0xD


def evict_from_host(blocks):
    """Evict all blocks from host memory, as puts of other blocks would."""
    tiers = blocks.tiers
    with tiers.lock:
        tiers.require_open()
        pages = list(tiers.host.pages.values())
        tiers.host.forget(pages)
        tiers.host.give_back(pages)


def boom():
    raise OSError("no such luck")


@pytest.fixture
def blocks(device):
    """A and B in host memory, nothing on the device."""
    blocks = Blocks(device)
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


# Loads -------------------------------------------------------------------------------------------

WAITS = [lambda lease: lease.wait(), lambda lease: lease.wait_layer(NUM_LAYERS - 1)]


@pytest.mark.parametrize("wait", WAITS, ids=["wait", "wait_layer"])
@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_load_that_cannot_be_issued(blocks, layer, wait):
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


def test_a_cache_that_remembers_a_failure_is_collected(device):
    """The failure has a traceback, whose frames hold the cache: nothing global may hold that."""

    def fail():
        blocks = Blocks(device)
        blocks.insert([A, B])
        blocks.evict_all()
        blocks.settle()
        with observe.attached(Log(refuse="load 0")):
            lease = blocks.cache.acquire([A, B])
        with pytest.raises(kv.DeviceError, match="refused"):
            lease.wait()
        lease.release()
        blocks.cache.stats()
        return weakref.ref(blocks.cache)

    cache = fail()
    gc.collect()
    assert cache() is None


@pytest.mark.parametrize("wait", WAITS, ids=["wait", "wait_layer"])
def test_a_load_that_fails_on_its_way(blocks, wait):
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


def test_the_pages_of_a_failed_load_are_not_allocated_while_it_runs(blocks):
    """Layers 0 and 1 are still being written when it is known that layer 2 never is."""
    gate = Gate(blocks.engine.load_stream)
    with observe.attached(Log(refuse="load 2")):
        lease = blocks.cache.acquire([A, B])
    with pytest.raises(kv.DeviceError):
        lease.wait()
    lease.release()
    assert blocks.device_pool.allocator.num_free == 2
    assert blocks.device_pool.allocator.num_allocated == 0
    gate.open()
    pages = in_time(lambda: blocks.device_pool.allocator.alloc(4))
    blocks.device_pool.allocator.free(pages)
    blocks.use([A, B], known=2)


def test_acquire_waits_for_pages_that_a_failed_load_still_writes(blocks):
    taken = blocks.device_pool.allocator.alloc(2)
    gate = Gate(blocks.engine.load_stream)
    with observe.attached(Log(refuse="load 2")):
        lease = blocks.cache.acquire([A, B])
    with pytest.raises(kv.DeviceError):
        lease.wait()
    lease.release()
    threading.Timer(DELAY_S, gate.open).start()  # a GPU's stream could not: the gate holds it up
    in_time(lambda: blocks.use([A, B], known=2))
    blocks.device_pool.allocator.free(taken)


# Saves -------------------------------------------------------------------------------------------


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


def test_a_chain_of_transfers_behind_a_failed_save(device):
    """Save, load, save again: the last copy is forgotten too."""
    blocks = Blocks(device, 4, 8, write="back")
    blocks.insert([A, B])
    gate = failing_stream(blocks, "save")
    blocks.cache.evict(2)
    blocks.cache.acquire([A, B]).release()
    evict_from_host(blocks)
    blocks.cache.evict(2)
    assert blocks.cache.match([A, B]) == (0, 2, 2)
    gate.open()
    with pytest.raises(kv.DeviceError):
        blocks.settle()
    assert blocks.cache.match([A, B]) == (0, 0, 0)
    assert blocks.cache.stats()["lost"] == 2
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


def test_a_save_is_as_good_as_the_load_before_it(device):
    blocks = Blocks(device, write="back")
    blocks.insert([A])
    blocks.cache.evict(1)
    blocks.settle()
    gate = Gate(blocks.engine.load_stream)
    lease = blocks.cache.acquire([A])
    (load,) = lease.completion._arriving
    lease.release()
    evict_from_host(blocks)
    blocks.cache.evict(1)
    load._completion = Broken()
    gate.open()
    blocks.settle()
    assert blocks.cache.match([A]) == (0, 0, 0)
    blocks.assert_no_leak()


# Streams of others -------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("evicted", [False, True])
def test_pages_that_were_never_written(device, write, evicted):
    """The compute stream failed before the point of the insert: no such block."""
    if device.kind != "host":
        pytest.skip("work behind a failure is skipped on the host device only")
    blocks = Blocks(device, write=write)
    compute = device.stream()
    gate = Gate(compute)
    compute.call(boom)
    pages = blocks.device_pool.allocator.alloc(2)
    blocks.cache.insert([A, B], pages, after=compute)
    lease = blocks.cache.acquire([A, B])
    if evicted:
        lease.release()
        blocks.cache.evict(2)
        lease = blocks.cache.acquire([A, B])
    gate.open()
    with pytest.raises(kv.DeviceError, match="no such luck"):
        lease.wait()
    with pytest.raises(kv.DeviceError, match="no such luck"):
        compute.synchronize()  # its owner is notified too
    lease.release()
    blocks.settle_quietly()
    assert blocks.cache.match([A, B]) == (0, 0, 0)
    blocks.insert([A, B])
    blocks.use([A, B], known=2)
    blocks.assert_no_leak()


class Pending:
    """A transfer that ends when the test says so."""

    failure, num_bytes, elapsed_us, over = None, 7, 2e6, False

    def done(self):
        return self.over


def test_completions_that_end_out_of_order_are_settled():
    """Inserts are of independent streams; loads and saves end in their order."""
    queue = CompletionQueue()
    kinds = ("load", "load", "save", "save", "insert", "insert")
    transfers = [Pending() for _ in kinds]
    completions = [
        queue.add(BlockCompletion(kind, transfer, ["a page"], ()))
        for kind, transfer in zip(kinds, transfers, strict=True)
    ]
    assert queue.take_ended() == []
    assert queue.oldest() is completions[2], "a transfer rather than a stream of another user"
    assert queue.saves() == completions[2:4]
    for i in (0, 3, 5):
        transfers[i].over = True
    assert set(map(id, queue.take_ended())) == {id(completions[i]) for i in (0, 5)}
    for i in (1, 2, 4):
        transfers[i].over = True
    assert set(map(id, queue.take_ended())) == {id(completions[i]) for i in (1, 2, 3, 4)}
    queue.add_failed(completions[0])
    assert queue.oldest() is completions[0] and queue.oldest() is None
