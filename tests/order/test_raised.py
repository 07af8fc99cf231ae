"""OrderError from work in the background: who gets it, and that nothing is half-changed."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import pytest
from agents import Network
from engine_cases import PATIENCE_S, contents, parts_of, poll, pool_of
from protocols import Groups
from test_migration_controls import Ends
from tiered_cases import Blocks, MemoryStore, StoreBlocks, names

import kvcupy as kv


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


def test_the_advice_names_the_lease_of_groups(device):
    world, hashes, main = Groups(device), kv.block_hashes(range(8), 2), device.stream()
    world.cache.add_sequence("a", hashes=hashes)
    world.step("a", 8)
    world.cache.remove_sequence("a")
    for waits in (False, True):
        world.tiers.evict(16)
        with kv.order_checker("record") as checker, world.tiers.acquire(hashes) as lease:
            if waits:
                lease.wait(main)
            page = world.cache.pools[1].k(0)[int(lease.leases[1].pages[0])]
            with kv.declare(reads=page, stream=main):
                pass
            device.synchronize()
        assert {r.edge for r in checker.reports} == (set() if waits else {"lease.wait(main)"})


class AnnouncingStore(MemoryStore):
    """Announces what it reads, as `kv.BlockStore` does."""

    def put(self, hashes, pages):
        with kv.declare(reads=self._parts(pages)):
            return super().put(hashes, pages)

    def _parts(self, pages):
        return [part[page] for page in pages for part in parts_of(self.pool)]


class HeldStore(AnnouncingStore):
    """Puts once it is let."""

    entered, let = threading.Event(), threading.Event()

    def put(self, hashes, pages):
        self.entered.set()
        assert self.let.wait(PATIENCE_S)
        return super().put(hashes, pages)


@pytest.mark.parametrize("call", ["flush", "insert", "close"])
def test_a_put_of_a_store_in_the_background(device, other, call):
    """The thread of the cache continues; the next call raises, and changes nothing."""
    store = HeldStore()
    store.entered.clear(), store.let.clear()
    blocks = StoreBlocks(device, store=store, write="through")
    with kv.order_checker() as checker:
        blocks.insert(names(1))
        assert store.entered.wait(PATIENCE_S)
        pages = blocks.device_pool.allocator.alloc(1)
        written_on(other, blocks.host_pool)
        store.let.set()
        poll(lambda: blocks.cache.stats()["store_errors"], PATIENCE_S)
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
        if call != "close":
            with suppress(kv.OrderError):  # of the put that was repeated before
                blocks.cache.flush()
            assert blocks.cache.flush() == 0
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


def test_the_advice_names_the_pull(ends):
    main = kv.device("host").stream()
    for waits in (False, True):
        with kv.order_checker("record") as checker:
            pulled = ends.receiver.pull(ends.sender.offer(ends.source.allocator.alloc(1)), [3])
            if waits:
                pulled.wait_layer(1, main)
            with kv.declare(reads=ends.target.k(1)[3], stream=main):
                pass
        pulled.synchronize()
        main.synchronize()
        advice = {report.edge for report in checker.reports}
        assert advice == (set() if waits else {"pulled.wait_layer(1, main)"})


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
