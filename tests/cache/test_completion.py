"""What is in flight: each kind of Completion answers in the same way."""

from __future__ import annotations

import pytest
from engine_cases import World
from stream_cases import Gate
from tiered_cases import Blocks

import kvcupy as kv
from kvcupy.cache.hazards import StreamCompletion


def of_stream(device):
    """A completion, the stream that it is behind, and what ends it."""
    stream = device.stream()
    gate = Gate(stream)
    return StreamCompletion(stream), stream, gate.open


def of_transfer(device):
    world = World(device)
    gate = Gate(world.engine.load_stream)
    return world.engine.load([1], [1]), world.engine.load_stream, gate.open


def of_batch(device):
    transfer, stream, finish = of_transfer(device)
    return transfer._batch, stream, lambda: (transfer, finish())


def of_lease(device):
    blocks = Blocks(device)
    blocks.insert([1, 2])
    blocks.evict_all()
    blocks.settle()
    gate = Gate(blocks.engine.load_stream)
    lease = blocks.cache.acquire([1, 2])
    return lease.completion, blocks.engine.load_stream, lambda: (lease, gate.open())


@pytest.fixture
def host_world(device):
    if device.kind != "host":
        pytest.skip("work behind a failure is skipped on the host device only")
    return World(device)


KINDS = [of_stream, of_transfer, of_batch, of_lease]


@pytest.mark.parametrize("kind", KINDS)
def test_done_synchronize_and_wait(device, kind):
    completion, _, finish = kind(device)
    waiting = device.stream()
    for wait in (completion.wait, lambda stream: completion.wait_layer(1, stream)):
        wait(waiting)
        assert not waiting.record().done()
    assert not completion.done() and completion.failure is None
    finish()
    completion.synchronize()
    waiting.synchronize()
    assert completion.done() and completion.failure is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_stream_cannot_wait(device, kind):
    completion, _, finish = kind(device)
    waiting = device.stream()
    with waiting.capture(), pytest.raises(kv.CaptureError, match=r"^stream: .* outside it"):
        completion.wait(waiting)
    finish()
    completion.synchronize()


def test_a_failure(host_world):
    """`failure` has it without raising; waiting raises it; it surfaces for the owner as well."""
    stream = host_world.device.stream()
    stream.call(lambda: 1 / 0)
    completion = StreamCompletion(stream)
    completion.synchronize()
    assert completion.done()
    assert isinstance(completion.failure.__cause__, ZeroDivisionError)
    for wait in (completion.wait, lambda s: completion.wait_layer(0, s)):
        with pytest.raises(kv.DeviceError, match="never written"):
            wait(host_world.device.stream())
    with pytest.raises(kv.DeviceError):
        stream.synchronize()


def test_a_failed_transfer(host_world):
    transfer = host_world.engine.load([1], [1])
    assert transfer.failure is None and "queued" in repr(transfer)
    host_world.engine.load_stream.call(lambda: 1 / 0)
    batch = transfer._batch
    batch.synchronize()
    assert batch.done()
    for failure in (transfer.failure, batch.failure):
        assert str(failure).startswith("load 1: 1 page")
        assert isinstance(failure.__cause__, ZeroDivisionError)
    with pytest.raises(kv.DeviceError, match="load 1: 1 page"):
        transfer.done()


def test_a_released_lease_has_nothing_to_wait_for(device):
    blocks = Blocks(device)
    blocks.insert([1])
    blocks.evict_all()
    blocks.settle()
    gate = Gate(blocks.engine.load_stream)
    lease = blocks.cache.acquire([1])
    completion = lease.completion
    lease.release()
    assert completion.done() and completion.failure is None
    completion.wait(device.stream())
    completion.synchronize()
    with pytest.raises(kv.KvcupyError, match="released"):
        lease.wait()
    gate.open()
