"""OrderError from work in the background: who gets it, and that nothing is half-changed."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import pytest
from agents import Network
from engine_cases import PATIENCE_S, contents, poll, pool_of
from test_migration_controls import Ends
from tiered_cases import Blocks
from tiered_store_cases import MemoryStore, SharedBlocks, names

import kvcupy as kv
from kvcupy.cache.tiered.disk_format import Layout


@pytest.fixture
def other(device):
    return device.stream()


def written_on(stream, *pools):
    """Announce writes to pools that nothing orders."""
    with kv.declare(writes=pools, stream=stream):
        pass


# --- The transfer engine --------------------------------------------------------------------------


@pytest.fixture
def engine(device):
    engine = kv.TransferEngine(pool_of(device, 4), pool_of(device, 4, placement="pinned"))
    engine.device_pool.k(1)[...] = 3
    engine.host_pool.k(1)[...] = 5
    device.synchronize()
    return engine


WAITS = {
    "synchronize": lambda transfer, stream: transfer.synchronize(),
    "done": lambda transfer, stream: transfer.done(),
    "wait": lambda transfer, stream: transfer.wait(stream),
    "wait_layer": lambda transfer, stream: transfer.wait_layer(2, stream),
    "elapsed": lambda transfer, stream: transfer.elapsed_us,
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("kind", ["load", "save"])
def test_a_transfer_raises_where_it_is_waited_for(device, engine, other, kind, wait):
    """A conflict in the last layer alone prevents all layers."""
    target = engine.device_pool if kind == "load" else engine.host_pool
    before = contents(target)
    with kv.order_checker() as checker:
        with kv.declare(reads=target.k(2), stream=other):
            pass
        transfer = getattr(engine, kind)([1, 2], [2, 3], after=False)
        for _ in range(2):  # as every failure of a transfer
            with pytest.raises(kv.OrderError) as caught:
                wait(transfer, device.stream())
        assert isinstance(caught.value, kv.DeviceError)
        assert caught.value.report is checker.reports[0]
        assert caught.value.report.kind == "WAR" and f"{kind} 1" in str(caught.value)
        device.synchronize()
        np.testing.assert_array_equal(contents(target), before)
        getattr(engine, kind)([1, 2], [2, 3], after=False).synchronize()
    assert len(checker.reports) == 1
    assert (contents(target) != before).any()


def test_flushing_raises_it_too(engine, other):
    with kv.order_checker():
        with kv.declare(writes=engine.device_pool, stream=other):
            pass
        engine.save([0], [0], after=False)
        with pytest.raises(kv.OrderError):
            engine._flush()


def test_pages_of_a_transfer_that_raised_are_free_at_once(engine, other):
    pages = engine.device_pool.allocator.alloc(4)
    with kv.order_checker():
        with kv.declare(writes=engine.device_pool, stream=other):
            pass
        transfer = engine.save(pages, [0, 1, 2, 3], after=False)
        with pytest.raises(kv.OrderError):
            transfer.synchronize()
        engine.device_pool.allocator.free(pages)
        assert engine.device_pool.allocator.num_free == 4


def test_transfer_pages_raises_at_once(device, engine, other):
    with kv.order_checker():
        with kv.declare(writes=engine.device_pool, stream=other):
            pass
        with pytest.raises(kv.OrderError):
            kv.transfer_pages(engine.device_pool, engine.host_pool, [0], [0])
        other.synchronize()
        kv.transfer_pages(engine.device_pool, engine.host_pool, [0], [0])
    device.synchronize()


# --- Host functions -------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["stream", "event", "done"])
def test_a_host_function_raises_where_its_stream_is_waited_for(device, other, wait):
    x, main = np.zeros(4, np.float32), device.stream()

    def function():
        with kv.declare(reads=x):
            pass

    with kv.order_checker() as checker:
        with kv.declare(writes=x, stream=other):
            pass
        main.call(function)
        event = main.record()
        with pytest.raises(kv.OrderError) as caught:
            if wait == "done":
                while not main.done():
                    pass
                raise AssertionError("done, and not failed")
            (event if wait == "event" else main).synchronize()
    assert caught.value.report is checker.reports[0]
    assert isinstance(caught.value, kv.DeviceError)
    with suppress(kv.OrderError):
        main.synchronize()  # `done` leaves the failure there


# --- The tiers ------------------------------------------------------------------------------------


def stats(blocks):
    return {k: v for k, v in blocks.cache.stats().items() if not k.endswith("_s")}


def test_loads_and_saves_of_a_tiered_cache(device, other):
    blocks = Blocks(device, write="back")
    with kv.order_checker("raise"):
        blocks.insert([1, 2])
        blocks.evict_all()
        blocks.cache.flush()
        written_on(other, blocks.host_pool)
        lease = blocks.cache.acquire([1, 2])
        with pytest.raises(kv.OrderError):
            lease.wait(device.stream())
        lease.release()
        other.synchronize()
        with blocks.cache.acquire([1, 2]) as lease:
            lease.wait(device.as_stream(None))
            blocks.assert_holds(lease, [1, 2])
    blocks.settle()
    blocks.assert_no_leak()


@pytest.mark.parametrize("call", ["evict", "acquire", "flush"])
def test_what_the_disk_tier_is_about_to_read_or_write(device, other, tmp_path, call):
    """The call raises before it has evicted, read or written anything."""
    options = {"disk": tmp_path / "blocks", "disk_bytes": 1 << 16}
    blocks = Blocks(device, 4, 2, write="through" if call == "flush" else "back", **options)
    device.synchronize()
    with kv.order_checker():
        blocks.insert([1, 2])
        if call != "flush":
            blocks.evict_all()
        blocks.cache.flush() if call != "flush" else None
        if call == "acquire":
            blocks.insert([3, 4])
            blocks.evict_all()  # 1 and 2 go to disk
            blocks.cache.flush()
        else:
            blocks.insert([3, 4])
        device.synchronize()
        written_on(other, blocks.host_pool)
        before, known = stats(blocks), blocks.cache.match([1, 2, 3, 4])
        act = {
            "evict": lambda: blocks.cache.evict(2),
            "acquire": lambda: blocks.cache.acquire([1, 2]).release(),
            "flush": blocks.cache.flush,
        }[call]
        with pytest.raises(kv.OrderError):
            act()
        assert blocks.cache.match([1, 2, 3, 4]) == known
        assert stats(blocks) == before
        other.synchronize()
        act()
    blocks.settle()
    blocks.assert_no_leak()
    blocks.cache.close()


def test_a_full_disk_loses_no_block_to_one_that_is_not_written(device, other, tmp_path):
    """An eviction that takes a free host page, and the slot of another block on disk."""
    page_bytes = pool_of(device, 1, layout="page_first", placement="pinned").page_bytes
    disk_bytes = Layout(2, page_bytes).num_bytes
    blocks = Blocks(device, 4, 3, disk=tmp_path / "blocks", disk_bytes=disk_bytes, write="back")
    cache, host = blocks.cache, blocks.host_pool.allocator
    with kv.order_checker():
        blocks.insert([5, 6])
        blocks.evict_all()
        cache.flush()
        host.free(cache.take_host_pages(3))  # both go to disk
        blocks.insert([1, 2])
        blocks.evict_all()
        cache.flush()
        blocks.insert([3, 4])
        device.synchronize()
        written_on(other, blocks.host_pool)
        before = stats(blocks)
        assert (before["host_blocks"], before["disk_blocks"], host.num_free) == (2, 2, 1)
        with pytest.raises(kv.OrderError):
            cache.evict(2)
        assert stats(blocks) == before and host.num_free == 1
        assert cache.match([5, 6]).disk == 2
        other.synchronize()
        cache.evict(2)
        assert cache.match([5, 6]).disk < 2
    blocks.settle()
    blocks.assert_no_leak()
    cache.close()


def test_pages_that_blocks_from_disk_are_read_to(device, other, tmp_path):
    """The acquire loses no block, and holds no page."""
    blocks = Blocks(device, 4, 2, disk=tmp_path / "blocks", disk_bytes=1 << 16, write="back")
    cache, host = blocks.cache, blocks.host_pool.allocator
    device.synchronize()
    with kv.order_checker():
        blocks.insert([1, 2])
        blocks.evict_all()
        host.free(cache.take_host_pages(2))  # both go to disk
        written_on(other, blocks.host_pool)
        with pytest.raises(kv.OrderError):
            cache.acquire([1, 2])
        assert cache.match([1, 2]).disk == 2 and host.num_free == 2
        other.synchronize()
        blocks.use([1, 2], known=2)
    blocks.settle()
    blocks.assert_no_leak()
    cache.close()


def test_the_thread_of_the_shared_store_writes_to_disk(device, other, tmp_path):
    """It makes space for what it fetches; the next call raises, and the fetch is dropped."""
    options = {"disk": tmp_path / "blocks", "disk_bytes": 1 << 16, "shared_write": "second_use"}
    blocks = SharedBlocks(device, 4, 2, write="back", **options)
    cache = blocks.cache
    device.synchronize()
    with kv.order_checker() as checker:
        blocks.publish(3, 4)
        blocks.insert(names(1, 2))
        blocks.evict_all()
        cache.flush()
        written_on(other, blocks.host_pool)
        cache.prefetch(names(3, 4))
        poll(lambda: blocks.tier._order_error, PATIENCE_S)
        with pytest.raises(kv.OrderError) as caught:
            cache.prefetch(names(3))
        assert caught.value.report is checker.reports[0]
        other.synchronize()
        assert cache.match(names(1, 2)).host == 2
        blocks.use(names(3, 4), known=2)
        blocks.use(names(1, 2), known=2)
    blocks.settle()
    blocks.assert_no_leak()
    cache.close()


class AnnouncingStore(MemoryStore):
    """Announces what it reads, as `kv.BlockStore` does, once it is let."""

    entered, let = threading.Event(), threading.Event()

    def put(self, hashes, pages):
        self.entered.set()
        assert self.let.wait(PATIENCE_S)
        with kv.declare(reads=self.pool):
            return super().put(hashes, pages)


@pytest.mark.parametrize("call", ["flush", "insert", "close"])
def test_a_put_of_the_shared_store_in_the_background(device, other, call):
    """The thread of the cache continues; the next call raises, and changes nothing."""
    store = AnnouncingStore()
    store.entered.clear(), store.let.clear()
    blocks = SharedBlocks(device, store=store, write="through")
    with kv.order_checker() as checker:
        blocks.insert(names(1))
        assert store.entered.wait(PATIENCE_S)
        pages = blocks.device_pool.allocator.alloc(1)
        written_on(other, blocks.host_pool)
        store.let.set()
        poll(lambda: blocks.cache.stats()["shared_errors"], PATIENCE_S)
        act = {
            "flush": blocks.cache.flush,
            "insert": lambda: blocks.cache.insert(names(2), pages),
            "close": blocks.cache.close,
        }[call]
        with pytest.raises(kv.OrderError) as caught:
            act()
        assert caught.value.report is checker.reports[0]
        assert blocks.cache.closed == (call == "close")
        blocks.device_pool.allocator.free(pages)
        other.synchronize()
    blocks.cache.close()


# --- Between processes ----------------------------------------------------------------------------


@pytest.fixture
def ends(monkeypatch):
    Network(immediate=True).install(monkeypatch)
    with Ends(kv.device("host")) as ends:
        yield ends


def test_a_pull_whose_pages_are_in_use(ends):
    ticket, writer = ends.sender.offer(ends.source.allocator.alloc(2)), kv.device("host").stream()
    with kv.order_checker():
        written_on(writer, ends.target)
        with pytest.raises(kv.OrderError):
            ends.receiver.pull(ticket, [3, 2])
        writer.synchronize()
        ends.receiver.pull(ticket, [3, 2]).synchronize()
    assert ends.arrived([3, 2])


@pytest.mark.parametrize("call", ["offer", "close"])
def test_a_sender_whose_pages_are_written(ends, call):
    """It is raised to both: to the receiver as a failed write, to the sender by its next call."""
    allocator, writer = ends.source.allocator, kv.device("host").stream()
    with kv.order_checker() as checker:
        written_on(writer, ends.source)
        pull = ends.receiver.pull(ends.sender.offer(allocator.alloc(2), after=False), [3, 2])
        with pytest.raises(kv.TransferError) as caught:
            pull.synchronize()
        assert caught.value.reason == "failed"
        assert poll(lambda: allocator.num_free == allocator.num_pages, PATIENCE_S)
        pages = allocator.alloc(1)
        acts = {"offer": lambda: ends.sender.offer(pages), "close": ends.sender.close}
        with pytest.raises(kv.OrderError) as caught:
            acts[call]()
        assert caught.value.report is checker.reports[0]
        ends.sender.close()
        writer.synchronize()
