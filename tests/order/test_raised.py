"""OrderError from work in the background: who gets it, and that nothing is half-changed."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from agents import Network
from engine_cases import contents, pool_of
from test_migration_controls import Ends
from tiered_cases import Blocks

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
