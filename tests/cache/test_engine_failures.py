"""kv.TransferEngine when something fails: which calls raise, and that all others still work."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref

import numpy as np
import pytest
from engine_cases import NUM_LAYERS, PATIENCE_S, World, contents, poll, pool_of, transfers_in
from stream_cases import Gate, Log

import kvcupy as kv
from kvcupy import observe


@pytest.fixture
def world(device):
    return World(device)


@pytest.fixture
def host_world(device):
    if device.kind != "host":
        pytest.skip("work behind a failure is skipped on the host device only")
    return World(device)


def boom():
    raise OSError("no such luck")


ASKED = {
    "wait": lambda t, world: t.wait(world.compute),
    "wait_layer": lambda t, world: t.wait_layer(0, world.compute),
    "done": lambda t, world: t.done(),
    "synchronize": lambda t, world: t.synchronize(),
    "elapsed_us": lambda t, world: t.elapsed_us,
    "gb_per_s": lambda t, world: t.gb_per_s,
}


def assert_failed(transfer, world, cause, said):
    """Everything that is asked raises DeviceError, as often as it is asked."""
    for _ in range(2):
        for ask in ASKED.values():
            with pytest.raises(kv.DeviceError, match=said) as caught:
                ask(transfer, world)
            assert isinstance(caught.value.__cause__, cause)
            assert f"{transfer.kind} {transfer.number}: " in str(caught.value)
    assert "failed" in repr(transfer)


def assert_works(world):
    """Transfers of both directions still move what they should, and no page is held back."""
    before = contents(world.device_pool)
    world.engine.save([0, 1], [8, 9], after=world.compute).synchronize()
    load = world.engine.load([8, 9], [2, 3], after=world.compute)
    load.wait_layer(NUM_LAYERS - 1, world.compute)
    load.synchronize()
    assert np.array_equal(contents(world.device_pool)[2:4], before[0:2])
    world.device.synchronize()
    for pool in (world.device_pool, world.host_pool):
        pages = pool.allocator.alloc(pool.num_pages)
        pool.allocator.free(pages)
        assert pool.allocator.num_free == pool.num_pages
        pool.allocator.check_leaks()


# Refused at the call -----------------------------------------------------------------------------

REFUSED = [
    (([0, 1], [0]), ValueError, "{1}"),
    (([8], [0]), ValueError, "device_pages: expected pages below 8, got 8"),
    (([0], [12]), ValueError, "host_pages: expected pages below 12, got 12"),
    (([0], [2**62]), ValueError, "host_pages"),
    (([0.0], [0]), TypeError, "device_pages"),
    (([0], ["a"]), TypeError, "host_pages"),
    (([True], [0]), TypeError, "device_pages"),
    ((3, [0]), TypeError, "device_pages"),
    (([0], None), TypeError, "host_pages"),
    ((np.zeros(1, np.uint8), [0]), TypeError, "device_pages"),
    (([0], np.zeros(1, np.float32)), TypeError, "host_pages"),
    ((np.zeros((1, 1), np.int64), [0]), ValueError, "device_pages"),
    ((np.int64(0), [0]), (TypeError, ValueError), "device_pages"),
]


@pytest.mark.parametrize(("lists", "error", "said"), REFUSED)
@pytest.mark.parametrize("kind", ["save", "load"])
def test_invalid_page_lists(world, kind, lists, error, said):
    said = said.format(None, "host_pages" if kind == "save" else "device_pages")
    lists = lists if kind == "save" else lists[::-1]
    with observe.attached(Log()) as log:
        with pytest.raises(error, match=f"^{said}"):
            getattr(world.engine, kind)(*lists, after=world.compute)
        world.engine._flush()
    assert log.take() == []
    assert_works(world)


@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_stream_that_is_none(world, kind):
    with pytest.raises(TypeError, match=r"^after: expected"):
        getattr(world.engine, kind)([0], [0], after=7)
    transfer = getattr(world.engine, kind)([5], [5])
    for wait in (transfer.wait, lambda s: transfer.wait_layer(0, s)):
        with pytest.raises(TypeError, match="stream"):
            wait(7)
    assert_works(world)


@pytest.mark.parametrize(
    ("layer", "error"),
    [(-1, ValueError), (NUM_LAYERS, ValueError), (1.0, TypeError), (None, TypeError),
     (True, TypeError)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["save", "load"])
def test_layers_that_there_are_not(world, kind, layer, error):
    transfer = getattr(world.engine, kind)([0], [0])
    with pytest.raises(error, match="layer"):
        transfer.wait_layer(layer, world.compute)
    assert "queued" in repr(transfer)


def test_pools_that_do_not_go_together(device):
    right = pool_of(device, 4)
    for changes in (
        {"num_layers": 2}, {"page_size": 4}, {"head_dim": 8}, {"num_kv_heads": 1},
        {"dtype": "bf16"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^host_pool: .*device_pool"):
            kv.TransferEngine(right, pool_of(device, 4, **changes))
    with pytest.raises(ValueError, match=r"^host_pool"):
        kv.TransferEngine(right, kv.MLAPool(4, 2, 3, 8, dtype="fp16", device=device))
    with pytest.raises(ValueError, match=r"^host_pool"):
        kv.TransferEngine(right, right)
    with pytest.raises(TypeError, match=r"^host_pool"):
        kv.TransferEngine(right, np.zeros(3))
    with pytest.raises(TypeError, match=r"^device_pool"):
        kv.TransferEngine(None, right)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"load_stream": 7}, TypeError), ({"save_stream": "main"}, TypeError),
     ({"method": "magic"}, ValueError), ({"max_blocks": 0}, ValueError)],
)  # fmt: skip
def test_invalid_options(device, options, error):
    (name,) = options
    with pytest.raises(error, match=f"^{name}"):
        kv.TransferEngine(pool_of(device, 4), pool_of(device, 4), **options)


# Captures ----------------------------------------------------------------------------------------


def test_a_captured_stream_raises_and_nothing_is_queued(world):
    queued = world.engine.save([1], [1])
    with world.compute.capture():
        for call in (world.engine.save, world.engine.load):
            with pytest.raises(kv.CaptureError, match="after"):
                call([1], [1], after=world.compute)
        for wait in (queued.wait, lambda s: queued.wait_layer(0, s)):
            with pytest.raises(kv.CaptureError, match="stream"):
                wait(world.compute)
        assert "queued" in repr(queued)
    with observe.attached(Log()) as log:
        queued.synchronize()
        world.engine._flush()
    assert [operation.name for operation in transfers_in(log, world.device)] == ["save"]
    assert_works(world)


def test_a_stream_of_the_user_that_is_captured(device):
    stream = device.stream()
    world = World(device, load_stream=stream)
    pages = world.device_pool.allocator.alloc(1)
    queued = world.engine.load([1], pages)
    world.device_pool.allocator.free(pages)
    with stream.capture():
        for ask in (
            queued.done, queued.synchronize, world.engine._flush,
            lambda: queued.wait(world.compute),
            lambda: world.engine.save([1], [1]), lambda: world.engine.load([1], [1]),
        ):  # fmt: skip
            with pytest.raises(kv.CaptureError, match="load_stream"):
                ask()
        assert world.device_pool.allocator.num_free == world.device_pool.num_pages - 1
    assert "queued" in repr(queued)
    queued.synchronize()
    assert_works(world)


# Failures while a batch is issued ----------------------------------------------------------------


@pytest.mark.parametrize("ask", [*ASKED, "flush", "conflict", "allocator"])
@pytest.mark.parametrize("failing", ["save", "load 0", "load 1", f"load {NUM_LAYERS - 1}"])
def test_a_batch_that_cannot_be_issued(world, failing, ask):
    engine, kind = world.engine, failing.partition(" ")[0]
    loads = [engine.load([1], [1]), engine.load([2, 3], [2, 3])]
    saves = [engine.save([5], [5]), engine.save([6, 7], [6, 7])]
    bad, good = (loads, saves) if kind == "load" else (saves, loads)
    where = "" if kind == "save" else f", layer {failing[5:]}"
    first, second = (rf"{t.kind} {t.number}: " for t in bad)
    said = rf"1 page{where}: KvcupyError: refused"
    with observe.attached(Log(refuse=failing)):
        if ask == "flush":
            with pytest.raises(kv.DeviceError, match=f"{first[:-2]}, {second}3 pages{where}: Kv"):
                engine._flush()
        elif ask == "conflict":
            engine.save([1], [1])
        elif ask == "allocator":
            pages = world.device_pool.allocator.alloc(8)
            world.device_pool.allocator.free(pages)
            assert len(world.device_pool.allocator.alloc(8)) == 8
            world.device_pool.allocator.free(pages)
        else:
            with pytest.raises(kv.DeviceError, match=first + said):
                ASKED[ask](bad[0], world)
    for transfer in good:  # asked first: the failure alongside is not theirs
        transfer.wait(world.compute)
        transfer.synchronize()
        assert transfer.elapsed_us > 0
    assert_failed(bad[0], world, kv.KvcupyError, said)
    assert_failed(bad[1], world, kv.KvcupyError, said.replace("1 page", "2 pages", 1))
    world.compute.synchronize()
    world.engine._flush()
    assert_works(world)


def test_the_source_is_intact_and_layers_before_the_failure_are_ordered(world):
    gate = Gate(world.engine.load_stream)
    pages = world.device_pool.allocator.alloc(2)
    transfer = world.engine.load([1, 2], pages)
    world.device_pool.allocator.free(pages)
    with observe.attached(Log(refuse="load 2")), pytest.raises(kv.DeviceError, match="layer 2"):
        world.engine._flush()
    with pytest.raises(kv.DeviceError, match="layer 2"):
        transfer.done()
    assert world.device_pool.allocator.num_free == 6, "layers 0 and 1 are still being written"
    gate.open()
    with pytest.raises(kv.DeviceError, match="layer 2"):
        transfer.synchronize()
    assert world.device_pool.allocator.num_free == 8
    assert np.array_equal(contents(world.host_pool), world.before[1])
    assert np.array_equal(contents(world.device_pool)[2:], world.before[0][2:])


class RefusesRecords(Log):
    """Raises when events are recorded in a stream, once armed: after the record is made."""

    def __init__(self, stream, skip):
        super().__init__()
        self.stream, self.skip = stream, skip

    def recorded(self, event, stream):
        if stream == self.stream:
            self.skip -= 1
            if self.skip < 0:
                raise kv.KvcupyError("no record")


@pytest.mark.parametrize("skip", range(NUM_LAYERS + 2))
def test_events_that_cannot_be_recorded(world, skip):
    """The start, each layer's, or the end: then the stream itself says when it is over."""
    pages = world.device_pool.allocator.alloc(1)
    transfer = world.engine.load([1], pages)
    world.device_pool.allocator.free(pages)
    gate = Gate(world.engine.load_stream)
    with observe.attached(RefusesRecords(world.engine.load_stream, skip)):
        world.engine._send()
        assert world.device_pool.allocator.num_free == 7
    later = world.engine.save([3], [1])
    later.done()
    assert not later.done(), "it writes the page that the broken load reads"
    gate.open()
    later.synchronize()
    where = f", layer {skip - 1}" if 0 < skip <= NUM_LAYERS else ""
    assert_failed(transfer, world, kv.KvcupyError, f"1 page{where}: KvcupyError: no record")
    assert world.device_pool.allocator.num_free == 8
    assert_works(world)


def test_a_failed_batch_keeps_nothing_alive(device):
    world = World(device)
    transfer = world.engine.load([1], [1])
    with observe.attached(Log(refuse="load 1")):
        world.engine._send()
    with pytest.raises(kv.DeviceError) as caught:
        transfer.synchronize()
    traceback.clear_frames(caught.tb)
    watched = weakref.ref(world.device_pool)
    del world, transfer, caught
    device.synchronize()  # which releases what the stream has passed
    gc.collect()
    assert watched() is None


# Failures that only the stream sees --------------------------------------------------------------

SAID = "OSError: no such luck"


@pytest.mark.parametrize("elsewhere", [None, "stream", "device", "other handle", "allocator"])
@pytest.mark.parametrize("kind", ["load", "save"])
def test_work_behind_a_failure_raises_for_every_transfer(host_world, kind, elsewhere):
    """Even if the failure has surfaced before anybody asks."""
    world, engine = host_world, host_world.engine
    stream, call = world.streams[kind], getattr(engine, kind)
    gate = Gate(stream)
    stream.call(boom)
    pages = world.device_pool.allocator.alloc(2)
    first, second = (call([i], [i]) for i in pages)
    engine._flush()
    third = call([3], [3])
    engine._flush()
    other = (engine.save if kind == "load" else engine.load)([6], [6])
    engine._flush()
    gate.open()
    if elsewhere == "allocator":
        world.device_pool.allocator.free(pages)
        world.device_pool.allocator.alloc(8)
        world.device_pool.allocator.free(range(8))
    elif elsewhere:
        with pytest.raises(kv.DeviceError, match="no such luck"):
            {"stream": stream, "device": world.device, "other handle": second}[
                elsewhere
            ].synchronize()
    for transfer in (first, second, third):
        with pytest.raises(kv.DeviceError, match=SAID):
            transfer.synchronize()
        assert_failed(transfer, world, OSError, f"1 page.*: {SAID}")
    other.synchronize()
    assert np.array_equal(contents(world.device_pool)[:6], world.before[0][:6])
    world.compute.synchronize()
    if elsewhere != "allocator":
        world.device_pool.allocator.free(pages)
    assert_works(world)


@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.parametrize("kind", ["load", "save"])
def test_whatever_is_asked_first_finds_out(host_world, kind, ask):
    world = host_world
    world.streams[kind].call(boom)
    transfer = getattr(world.engine, kind)([1], [1])
    world.engine._flush()
    world.streams[kind].call(lambda: None)
    assert poll(transfer._batch.done, PATIENCE_S)
    with pytest.raises(kv.DeviceError, match=SAID):
        ASKED[ask](transfer, world)
    assert_failed(transfer, world, OSError, SAID)
    assert_works(world)


@pytest.mark.parametrize("surfaced", [False, True])
@pytest.mark.parametrize("sent", [False, True], ids=["queued", "sent"])
@pytest.mark.parametrize("kind", ["load", "save"])
def test_a_failure_of_the_compute_stream_before_the_fence(host_world, kind, sent, surfaced):
    """What the transfer builds on was never computed, so nothing may be moved."""
    world = host_world
    gate = Gate(world.compute)
    world.compute.call(boom)
    transfer = getattr(world.engine, kind)([1], [2], after=world.compute)
    world.compute.record()
    if sent:
        world.engine._flush()
    gate.open()
    if surfaced:
        with pytest.raises(kv.DeviceError):
            world.compute.synchronize()
    with pytest.raises(kv.DeviceError, match=SAID):
        transfer.synchronize()
    assert np.array_equal(contents(world.device_pool), world.before[0])
    assert np.array_equal(contents(world.host_pool), world.before[1])
    if not surfaced:
        with pytest.raises(kv.DeviceError):
            world.compute.synchronize()
    assert_failed(transfer, world, OSError, SAID)
    assert_works(world)


def test_a_failure_of_the_compute_stream_behind_the_fence_is_none_of_the_transfers(host_world):
    world = host_world
    transfer = world.engine.save([1], [2], after=world.compute)
    world.compute.call(boom)
    transfer.synchronize()
    with pytest.raises(kv.DeviceError):
        world.compute.synchronize()
    assert np.array_equal(world.saved(2), world.before[0][1])


@pytest.mark.parametrize("wait", ["wait", "wait_layer"])
def test_a_failure_passes_to_a_stream_that_already_waits(host_world, wait):
    world = host_world
    gate, seen = Gate(world.engine.load_stream), []
    world.engine.load_stream.call(boom)
    transfer = world.engine.load([1], [1])
    ASKED[wait](transfer, world)
    world.compute.call(lambda: seen.append("computed"))
    gate.open()
    with pytest.raises(kv.DeviceError, match="no such luck"):
        world.compute.synchronize()
    assert seen == []
    assert_failed(transfer, world, OSError, SAID)
    assert_works(world)


def test_the_calling_thread_that_waits_gets_the_failure(host_world):
    world = host_world
    gate = Gate(world.engine.load_stream)
    world.engine.load_stream.call(boom)
    transfer = world.engine.load([1], [1])
    world.engine._flush()
    threading.Timer(0.05, gate.open).start()
    with pytest.raises(kv.DeviceError, match=rf"load 1: 1 page: {SAID}"):
        transfer.wait_layer(0)
    assert_failed(transfer, world, OSError, SAID)
    assert_works(world)


def test_the_layer_that_failed_on_the_stream_is_named(host_world):
    """The layers before it are in place, and may be waited for until the failure is known."""
    world = host_world

    class Fails(Log):
        def before(self, operation):
            if operation.name == "load 1":
                gates.append(Gate(operation.stream))
                operation.stream.call(boom)

    gates = []
    transfer = world.engine.load([1], [1])
    with observe.attached(Fails()):
        world.engine._flush()
    transfer.wait_layer(0, world.compute)
    world.compute.synchronize()
    gates[0].open()
    with pytest.raises(kv.DeviceError, match=rf"load 1: 1 page, layer 1: {SAID}"):
        transfer.synchronize()
    assert_failed(transfer, world, OSError, "layer 1")
    assert_works(world)


def test_a_failure_that_is_never_observed_does_not_stop_later_transfers(host_world):
    """On a stream of the engine's own nothing else would let it surface."""
    world = host_world
    world.engine.save_stream.call(boom)
    forgotten = world.engine.save([1], [1])
    world.engine._flush()
    assert poll(forgotten._batch.done, PATIENCE_S)
    world.engine.save([2], [2]).synchronize()
    assert np.array_equal(world.saved(2), world.before[0][2])
    assert_failed(forgotten, world, OSError, SAID)
    assert_works(world)


def test_on_a_stream_of_the_user_a_failure_stays_for_its_owner(device):
    if device.kind != "host":
        pytest.skip("work behind a failure is skipped on the host device only")
    stream = device.stream()
    world = World(device, save_stream=stream)
    stream.call(boom)
    first = world.engine.save([1], [1])
    world.engine._flush()
    assert poll(first._batch.done, PATIENCE_S)
    second = world.engine.save([2], [2])
    world.engine._flush()
    with pytest.raises(kv.DeviceError, match="no such luck"):
        stream.synchronize()
    for transfer in (first, second):
        assert_failed(transfer, world, OSError, SAID)
    assert_works(world)


@pytest.mark.parametrize("ask", ASKED)
def test_a_failure_that_a_handle_raises_has_surfaced(device, ask):
    """So the stream runs again, including one of the user."""
    if device.kind != "host":
        pytest.skip("work behind a failure is skipped on the host device only")
    stream = device.stream()
    world = World(device, save_stream=stream)
    stream.call(boom)
    first = world.engine.save([1], [1])
    world.engine._flush()
    assert poll(first._batch.done, PATIENCE_S)
    with pytest.raises(kv.DeviceError, match=SAID):
        ASKED[ask](first, world)
    stream.synchronize()
    world.engine.save([2], [2]).synchronize()
    assert np.array_equal(world.saved(2), world.before[0][2])


def test_what_fails_on_the_stream_later_is_none_of_a_finished_transfer(device):
    stream, ran = device.stream(), threading.Event()
    world = World(device, save_stream=stream)
    transfer = world.engine.save([1], [1])
    transfer.synchronize()

    def fail_late():
        ran.set()
        boom()

    stream.call(fail_late)
    assert ran.wait(PATIENCE_S)
    assert transfer.done()
    transfer.synchronize()
    with pytest.raises(kv.DeviceError, match="no such luck"):
        stream.synchronize()


def test_a_host_function_that_fails_on_a_gpu(device):
    if device.kind == "host":
        pytest.skip("covered above: there the work behind it is skipped too")
    world = World(device)
    world.engine.save_stream.call(boom)
    transfers = [world.engine.save([i], [i]) for i in (1, 2)]
    for transfer in transfers:
        with pytest.raises(kv.DeviceError, match=SAID):
            transfer.synchronize()
        assert_failed(transfer, world, OSError, SAID)
    assert_works(world)
