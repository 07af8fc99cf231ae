"""OrderError from work in the background: who gets it, and that nothing is half-changed."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import pytest
from engine_cases import PATIENCE_S, contents, parts_of, poll, pool_of
from migration_cases import assert_pulled, eventually, filled, pair
from migration_cases import pool_of as migration_pool
from test_migration_controls import copied
from tiered_cases import Blocks
from tiered_store_cases import MemoryStore, StoreBlocks, names

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
    blocks.cache.close()


# --- Between processes ----------------------------------------------------------------------------


@pytest.fixture
def migration():
    device = kv.device("host")
    with pair(filled(device=device), migration_pool(device=device)) as made:
        yield made


def test_a_pull_whose_pages_are_in_use(migration):
    sender, receiver, source, target = migration
    ticket, writer = sender.offer(source.allocator.alloc(2)), kv.device("host").stream()
    with kv.order_checker():
        written_on(writer, target)
        with pytest.raises(kv.OrderError):
            receiver.pull(ticket, [3, 2])
        writer.synchronize()
        receiver.pull(ticket, [3, 2]).synchronize()
    assert_pulled(target, [3, 2], [0, 1])


@pytest.mark.parametrize("call", ["withdraw", "layer_done", "close"])
def test_a_sender_whose_pages_are_written(migration, call):
    """It is raised to both: to the receiver as a failed write, to the sender by its next call."""
    sender, receiver, source, _ = migration
    pages, writer = source.allocator.alloc(2), kv.device("host").stream()
    ticket = sender.offer(pages, after=False)
    with kv.order_checker() as checker:
        written_on(writer, source)
        pull = receiver.pull(ticket, [3, 2])
        with pytest.raises(kv.TransferError) as caught:
            pull.synchronize()
        assert caught.value.reason == "failed" and "send pages" in str(caught.value)
        eventually(lambda: source.allocator.num_free == 12)
        acts = {
            "withdraw": lambda: sender.withdraw(ticket),
            "layer_done": lambda: sender.layer_done(ticket, 0),
            "close": sender.close,
        }
        with pytest.raises(kv.OrderError) as caught:
            acts[call]()
        assert caught.value.report is checker.reports[0]
        sender.close()


@pytest.mark.parametrize("staged", ["sender", "receiver"])
def test_pieces_that_are_staged(staged):
    """The thread that copies them reports it to the side that it works for."""
    device = kv.device("host")
    pools = [copied(pool, device, placement="device") for pool in (filled(), migration_pool())]
    with pair(*pools, **{staged: {"staging_pages": 2}}) as (sender, receiver, source, target):
        busy, pool = device.stream(), source if staged == "sender" else target
        ticket = sender.offer(source.allocator.alloc(2), after=False)
        with kv.order_checker() as checker:
            written_on(busy, pool)
            with pytest.raises(kv.TransferError) as caught:
                receiver.pull(ticket, [3, 2]).synchronize()
            if staged == "sender":  # which had begun to send
                with pytest.raises(kv.OrderError) as caught:
                    sender.withdraw(ticket)
            assert isinstance(caught.value, kv.OrderError)
            assert caught.value.report is checker.reports[0]
            busy.synchronize()
