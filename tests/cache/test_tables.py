"""The tables of steps: their cost, streams, lifetime and failures. See `test_paged_order.py`."""

from __future__ import annotations

import gc
import weakref

import pytest
from engine_cases import poll
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import Gate, Log, delay
from table_cases import HOLD_S, Source, World, background

import kvcupy as kv
from kvcupy import observe
from kvcupy.arrays import ArrayView, contiguous_strides
from kvcupy.cache.hazards import CopyStream
from kvcupy.cache.paged.tables import TableRing
from kvcupy.devices.host import HostDevice

# Order -------------------------------------------------------------------------------------------
#
# Each case leads up to the wait that it is about, which is what comes after its `yield`.


def pieces(world, count, seed=0):
    """Graphs captured in one step, each of which copies the tables away."""
    source = Source(seed)
    tables = world.ring.open(source)
    found = []
    for _ in range(count):
        with world.compute.capture() as graph:
            views = tables.on(world.compute)
            outs = {name: world.private(view) for name, view in views.items()}
            for name, view in views.items():
                world.device.copy(outs[name], view, stream=world.compute)
        found.append((graph, outs))
    tables.close()
    return found


# The case, the slots of the ring, what waits, and which of its waits it is.


def test_streams_that_do_not_read_hold_nothing_up(device):
    world = World(device)
    gate = Gate(world.other)
    for seed in range(5):
        world.step(seed, world.compute)
    world.compute.synchronize()
    gate.open()
    world.check()


# What a step costs -------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [1, 5])
def test_a_step_that_no_stream_reads_costs_nothing(device, opened):
    world = World(device)
    with observe.attached(Log()) as log:
        for seed in range(opened):
            source = Source(seed)
            tables = world.ring.open(source)
            assert world.ring.current is tables
            tables.close()
            assert world.ring.current is None
            assert source.asked == 0
    assert log.lines == []
    assert world.entered == []


def test_what_a_step_puts_on_streams(device):
    """One copy, one wait for each reader, and an event for the copy and for each reader."""
    world = World(device)
    for seed in range(3):
        world.step(seed)
    source = Source(3)
    with observe.attached(Log()) as log:
        tables = world.ring.open(source)
        first = tables.on(world.compute)
        lines = log.take()
        assert [line[0] for line in lines] == ["waited", "before", "after", "recorded", "waited"]
        (copy,) = log.operations
        assert (copy.name, copy.stream) == ("copy", world.copy_stream)
        assert lines[-1][1:] == (lines[-2][1], world.compute)
        assert tables.on(world.compute) is first
        assert log.take() == []
        tables.on(world.other)
        assert [line[0] for line in log.take()] == ["waited"]
        tables.close()
        assert [(line[0], line[2]) for line in log.take()] == [
            ("recorded", world.compute),
            ("recorded", world.other),
        ]
        tables.close()
        assert log.take() == []
    assert source.asked == 1


def test_a_copy_is_as_long_as_what_is_in_use(device):
    world = World(device)
    world.step(0, count=300, pages=20)
    with observe.attached(Log()) as log:
        world.ring.open(Source(1, count=2, pages=1)).on(world.compute)
    (copy,) = log.operations
    end = max(start + a.nbytes for start, a in laid_out(Source(1, count=2, pages=1).arrays))
    assert copy.reads[0].view.size == copy.writes[0].view.size == end
    assert copy.reads[0].view.pinned


def laid_out(arrays):
    """Where each array lies, if all begin at multiples of 16 bytes."""
    start = 0
    for array in arrays.values():
        start = -(-start // 16) * 16
        yield start, array
        start += array.nbytes


def test_events_are_used_again(device):
    world = World(device, num_slots=2)
    graph, outs = world.capture(0)

    def steps(count):
        for seed in range(count):
            world.step(seed, world.compute, world.other)
            world.graph_step(seed, graph, outs)

    steps(4)
    with observe.attached(Log()) as log:
        steps(10)
    events = {id(event): event for verb, event, _ in log.lines if verb == "recorded"}
    assert len(events) == 2 * (1 + 2) + 2 + 1, "slots: copy and readers; graph: copies, a reader"
    world.check()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_many_streams(device, num_slots):
    world = World(device, num_slots)
    streams = [device.stream() for _ in range(20)]
    for seed in range(3):
        tables = world.step(seed, *streams)
        assert tables.streams == streams
    assert world.entered == 3 * streams
    world.check()


def test_parts_are_aligned_and_in_one_buffer(device):
    world = World(device)
    source = Source(0, count=3)
    views = world.ring.open(source).on(world.compute)
    assert list(views) == list(source.arrays)
    for name, view in views.items():
        array = source.arrays[name]
        assert isinstance(view, ArrayView)
        assert view.pointer % 16 == 0
        assert (view.shape, view.format) == (array.shape, kv.formats.tag(array.dtype))
        assert view.strides == contiguous_strides(array.shape, array.itemsize)
        assert view.device == device.name
    low, high = (f(v.byte_range()[i] for v in views.values()) for i, f in ((0, min), (1, max)))
    assert high - low <= sum(a.nbytes + 15 for a in source.arrays.values())


def test_tables_without_any_byte(device):
    world = World(device)
    for seed in range(3):
        world.step(seed, count=0, pages=0)
    world.check()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_slots_grow_while_others_are_in_flight(device, num_slots):
    world = World(device, num_slots)
    gate = Gate(world.compute)
    for seed, pages in enumerate([1, 60000, 2, 90000][: 2 * num_slots]):
        world.step(seed, pages=pages)
    gate.open()
    for seed, pages in enumerate([1, 200000, 3]):
        world.step(seed, pages=pages)
    world.check()


def test_slots_do_not_grow_a_little_each_step(device, monkeypatch):
    world, shapes = World(device), []
    genuine = type(device).empty

    def empty(self, shape, dtype):
        shapes.append(shape)
        return genuine(self, shape, dtype)

    monkeypatch.setattr(type(device), "empty", empty)
    for pages in range(1, 1000, 10):
        world.ring.open(Source(0, pages=pages)).on(world.compute)
        world.ring.current.close()
    assert len(shapes) <= 4 * 2, "doubled from 4 KiB to 32 KiB, on the host device on either side"


def test_memory_that_is_replaced_lives_until_it_is_read(device):
    """What a reader in flight still needs is not given back, and afterwards it is."""
    world = World(device)
    world.step(0)
    device.synchronize()
    gone = weakref.ref(world.ring._slots[0].whole.owner)
    gate = Gate(world.compute)
    world.step(1)
    world.step(2, pages=100000)
    gc.collect()
    assert gone() is not None
    gate.open()
    world.check()
    device.synchronize()
    world.step(3)
    device.synchronize()
    gc.collect()
    assert gone() is None


def test_a_view_keeps_its_memory(device):
    world = World(device)
    source = Source(0)
    tables = world.ring.open(source)
    views = dict(tables.on(world.compute))
    tables.close()
    world.compute.synchronize()
    del world.ring, tables
    gc.collect()
    world.read(source, views, world.compute)
    world.check()


# Which streams -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("given", [False, True])
def test_the_copy_stream_may_read(device, num_slots, given):
    world = World(device, num_slots, device.stream() if given else None)
    gate = Gate(world.copy_stream)
    for seed in range(num_slots):
        world.step(seed, world.copy_stream, world.compute)
    gate.open()
    for seed in range(4):
        world.step(seed, world.copy_stream)
    graph, outs = world.capture(7, world.copy_stream)
    for seed in range(4):
        world.graph_step(seed, graph, outs, world.copy_stream)
    world.check()


def test_the_calling_thread_waits_for_the_copy():
    """The stream that is the calling thread exists on the host device alone."""
    world = World(HostDevice())
    inline = world.device.as_stream(None)
    world.step(0)
    world.device.synchronize()
    gate = Gate(world.copy_stream)
    with background(lambda: world.step(1, inline)) as thread:
        assert not poll(lambda: not thread.is_alive(), HOLD_S)
        gate.open()
    world.step(2, inline, world.compute)
    world.step(3, world.compute, inline)
    graph, outs = world.capture(4)
    for seed in range(3):
        world.graph_step(seed, graph, outs, None)
    assert len(world.reads) == 9
    world.check()


@pytest.mark.races("dropped")
@pytest.mark.parametrize("wait", ["dropped", "kept"])
def test_the_calling_thread_needs_its_wait(monkeypatch, wait):
    world = World(HostDevice())
    inline = world.device.as_stream(None)
    world.step(0)
    world.device.synchronize()
    gate = Gate(world.copy_stream)
    if wait == "dropped":
        monkeypatch.setattr(type(inline), "wait", lambda self, other: None)
    with background(lambda: world.step(1, inline)) as thread:
        poll(lambda: not thread.is_alive(), HOLD_S)
        gate.open()
    if wait == "kept":
        world.check()
    else:
        with pytest.raises(AssertionError, match="read"):
            world.check()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_the_calling_thread_as_copy_stream(num_slots):
    device = HostDevice()
    world = World(device, num_slots, device.as_stream(None))
    for seed in range(5):
        world.step(seed, world.compute, device.as_stream(None))
    gate = Gate(world.compute)
    for seed in range(num_slots):
        world.step(seed)
    with background(lambda: world.step(9)) as thread:
        assert not poll(lambda: not thread.is_alive(), HOLD_S), "its readers are waited for"
        gate.open()
    world.check()


def test_streams_are_counted_once(device):
    world = World(device)
    tables = world.ring.open(Source(0))
    for stream in (world.compute, world.other, world.compute):
        tables.on(stream)
    assert tables.streams == world.entered == [world.compute, world.other]
    tables.close()
    assert tables.streams == [world.compute, world.other]


def test_streams_enter_before_their_work(device):
    """A stream may be held up as it enters: its tables need not be there before."""
    world = World(device)
    gates = []
    world.ring.before_use = lambda stream: gates.append(Gate(stream))
    graph, outs = world.capture(0)
    assert gates == [], "captured work is for later"
    world.step(1, world.compute, world.other)
    world.graph_step(2, graph, outs, world.compute, world.compute)
    assert len(gates) == 3
    assert not poll(world.compute.done, HOLD_S)
    for gate in gates:
        gate.open()
    world.check()


# Failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ValueError("seqs: no"), kv.CaptureError("no"), MemoryError()], ids=repr
)
def test_a_source_that_refuses(device, error):
    world = World(device)
    world.step(0)
    source = Source(1, refuse=error)
    tables = world.ring.open(source)
    with observe.attached(Log()) as log:
        for _ in range(2):
            with pytest.raises(type(error)):
                tables.on(world.compute)
    assert log.lines == []
    source.refuse = None
    world.read(source, tables.on(world.compute), world.compute)
    tables.close()
    with pytest.raises(type(error)):
        world.step(2, refuse=error)
    world.step(3)
    assert world.entered == 3 * [world.compute]
    world.check()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_copy_that_is_refused(device, num_slots):
    world = World(device, num_slots)
    world.step(0)
    source = Source(1)
    tables = world.ring.open(source)
    with observe.attached(Log(refuse="copy")), pytest.raises(kv.KvcupyError, match="refused"):
        tables.on(world.compute)
    assert tables.streams == []
    world.read(source, tables.on(world.compute), world.compute)
    tables.close()
    tables = world.ring.open(Source(2))
    with observe.attached(Log(refuse="copy")), pytest.raises(kv.KvcupyError, match="refused"):
        tables.on(world.compute)
    tables.close()
    for seed in range(4):
        world.step(seed)
    world.check()


def test_entering_that_fails(device):
    world = World(device)

    def refuse(stream):
        raise kv.CaptureError("not now")

    world.ring.before_use = refuse
    source = Source(0)
    tables = world.ring.open(source)
    with pytest.raises(kv.CaptureError, match="not now"):
        tables.on(world.compute)
    assert tables.streams == []
    world.ring.before_use = world.entered.append
    world.read(source, tables.on(world.compute), world.compute)
    tables.close()
    assert source.asked == 1
    world.check()


def fail():
    raise OSError("no such luck")


def test_a_stream_that_fails_and_surfaces():
    """Its failure is its user's; later steps have their tables. (A GPU would be lost.)"""
    world = World(HostDevice(), num_slots=2)
    gate = Gate(world.compute)
    world.compute.call(fail)
    for seed in range(4):  # the last two copies wait for readers that never come
        world.step(seed)
    gate.open()
    with pytest.raises(kv.DeviceError, match="luck"):
        world.compute.synchronize()
    first = len(world.reads)
    for seed in range(5):
        world.step(seed, world.compute, world.other)
    world.compute.synchronize()
    world.other.synchronize()
    world.check(first)


def test_rings_that_share_an_uploader():
    """A failure surfaces no more often than with one ring."""
    device = HostDevice()
    first = World(device)
    second = World(device, copies=first.ring.copies)
    assert second.copy_stream is first.copy_stream
    gate = Gate(first.compute)
    first.compute.call(fail)
    first.step(0)
    second.step(1, first.compute)
    second.step(2, first.compute)  # its copy waits for a reader that never comes
    gate.open()
    with pytest.raises(kv.DeviceError, match="luck"):
        first.compute.synchronize()
    ends = len(first.reads), len(second.reads)
    for seed in range(4):
        first.step(seed)
        second.step(seed, first.compute)
    first.compute.synchronize()
    first.check(ends[0])
    second.check(ends[1])


def test_a_launching_stream_that_fails_and_surfaces():
    world = World(HostDevice())
    graph, outs = world.capture(0)
    gate = Gate(world.compute)
    world.compute.call(fail)
    for seed in range(2):
        world.graph_step(seed, graph, outs)
    gate.open()
    with pytest.raises(kv.DeviceError, match="luck"):
        world.compute.synchronize()
    first = len(world.reads)
    for seed in range(3):
        world.graph_step(seed, graph, outs)
    world.compute.synchronize()
    world.check(first)


def test_a_given_copy_stream_that_fails_says_so_once():
    """Its failure is not swallowed, for the user may have caused it."""
    device = HostDevice()
    world = World(device, num_slots=2, copy_stream=device.stream())
    world.copy_stream.call(fail)
    world.step(0)
    with pytest.raises(kv.DeviceError, match="luck"):
        world.compute.synchronize()
    first = len(world.reads)
    with pytest.raises(kv.DeviceError, match="luck"):
        world.step(1)
    for seed in range(4):
        world.step(seed)
    world.compute.synchronize()
    world.check(first)


def test_a_copy_that_failed_is_made_again_for_the_next_stream():
    """Within one step: the failure has surfaced, and the memory is invalid."""
    world = World(HostDevice())
    world.step(0)
    world.copy_stream.call(fail)
    source = Source(1)
    tables = world.ring.open(source)
    with pytest.raises(kv.DeviceError, match="luck"):
        tables.on(world.device.as_stream(None))
    assert tables.streams == []
    first = len(world.reads)
    world.read(source, tables.on(world.compute), world.compute)
    world.read(source, tables.on(world.device.as_stream(None)), world.device.as_stream(None))
    tables.close()
    assert source.asked == 2
    world.step(2)
    world.check(first)


def test_streams_that_waited_for_a_failed_copy_wait_for_the_new_one():
    world = World(HostDevice(), num_slots=2)
    world.step(0)
    world.copy_stream.call(fail)
    source = Source(1)
    tables = world.ring.open(source)
    tables.on(world.compute)
    with pytest.raises(kv.DeviceError, match="luck"):
        world.compute.synchronize()
    world.copy_stream.forgive()  # so that only the wait for its event holds anybody up
    for stream in (world.other, world.compute):
        world.read(source, tables.on(stream), stream)
    assert tables.streams == [world.compute, world.other]
    tables.close()
    world.step(2)
    world.check()


def test_a_reader_that_cannot_be_recorded_is_waited_for_all_the_same(device, monkeypatch):
    world = World(device)
    world.step(0)
    device.synchronize()
    gate = Gate(world.compute)
    source = Source(1)
    tables = world.ring.open(source)
    world.read(source, tables.on(world.compute), world.compute)

    def record(self, event=None):
        raise kv.DeviceError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(type(world.compute), "record", record)
        tables.close()
    world.step(2)
    poll(world.copy_stream.done, HOLD_S)
    gate.open()
    world.check()


def test_use_after_the_end(device):
    world = World(device)
    tables = world.step(0)
    with pytest.raises(kv.KvcupyError, match="over"):
        tables.on(world.compute)
    with pytest.raises(kv.KvcupyError, match="over"):
        tables.on(world.other)


def test_one_step_at_a_time(device):
    world = World(device)
    tables = world.ring.open(Source(0))
    with pytest.raises(kv.KvcupyError, match="open already"):
        world.ring.open(Source(1))
    assert world.ring.current is tables
    tables.close()
    later = world.ring.open(Source(2))
    tables.close()
    assert world.ring.current is later, "the end of another step is not the end of this one"


@pytest.mark.parametrize(
    ("num_slots", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_numbers_of_slots_that_make_no_ring(device, num_slots, error):
    with pytest.raises(error, match="num_slots"):
        TableRing(CopyStream(device), num_slots, lambda stream: None)


# Random programs ---------------------------------------------------------------------------------

NAMES = st.sampled_from(["compute", "other", "copy"])
STEPS = st.one_of(
    st.tuples(
        st.just("step"),
        st.lists(NAMES, max_size=3),
        st.sampled_from([1, 40, 3000]),
    ),
    st.tuples(st.just("launch"), st.lists(NAMES, max_size=3), st.integers(1, 4)),
    st.tuples(st.just("both"), st.lists(NAMES, min_size=1, max_size=2), st.integers(1, 4)),
    st.tuples(st.just("refused"), st.lists(NAMES, min_size=1, max_size=2), st.just(1)),
    st.tuples(st.just("late"), st.lists(NAMES, min_size=1, max_size=1), st.just(1)),
)


@settings(max_examples=examples(60), deadline=None)
@given(steps=st.lists(STEPS, max_size=12), num_slots=st.integers(1, 3))
def test_random_programs(device, steps, num_slots):
    world = World(device, num_slots)
    graphs = dict(zip(world.streams, pieces(world, 3, seed=1000), strict=True))
    for seed, (verb, names, pages) in enumerate(steps):
        streams = [world.streams[name] for name in names]
        if verb == "late":
            delay(streams[0])
            continue
        source = Source(seed, pages=pages)
        tables = world.ring.open(source)
        if verb == "refused":
            with observe.attached(Log(refuse="copy")), pytest.raises(kv.KvcupyError):
                tables.on(streams[0])
        for i, name in enumerate(names):
            if verb == "launch" or (verb == "both" and i):
                world.launch(*graphs[name], source, streams[i])
            else:
                world.read(source, tables.on(streams[i]), streams[i])
        assert set(tables.streams) == set(streams)
        tables.close()
    world.check()
