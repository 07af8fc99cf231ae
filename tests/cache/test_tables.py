"""The order of accesses to pages, and the tables of steps: cost, memory, captures and failures.

Their waits are in `order_cases.py`.
"""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest
from devices.fake_cuda import FakeApi
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import Gate, Log, delay

import kvcupy as kv
from kvcupy import observe
from kvcupy.cache.hazards import AccessOrder, CopyStream
from kvcupy.cache.paged.tables import TableRing
from kvcupy.devices import cuda
from kvcupy.devices.host import HostDevice

# --- Accesses ---


class Accesses:
    """Bytes that streams access one after another: each reads them, then writes its own."""

    def __init__(self, device, count=3):
        self.device = device
        self.order = AccessOrder()
        self.streams = [device.stream() for _ in range(count)]
        self.bytes = device.zeros((4,), np.int64)
        self.seen = []

    def work(self, stream, value):
        """Read what is there, and write `value` over it, in one access."""
        self.order.begin(stream)
        self.put(stream, value)
        self.order.end(stream)

    def put(self, stream, value):
        before = self.device.zeros((4,), np.int64)
        self.device.copy(before, self.bytes, stream=stream)
        self.device.copy(self.bytes, self.device.asarray(np.full(4, value)), stream=stream)
        self.seen.append(before)

    def check(self, *values):
        """Each has seen what the one before it wrote; the last is what remains."""
        self.device.synchronize()
        found = [self.device.to_numpy(a).tolist() for a in (*self.seen, self.bytes)]
        assert found == [[value] * 4 for value in values]


def lines(function):
    with observe.attached(Log()) as log:
        function()
    return [(line[0], line[2]) for line in log.lines]


def test_no_stream_waits_twice(device):
    world = Accesses(device)
    first, second, third = world.streams
    world.work(first, 1)
    assert lines(lambda: world.order.begin(second)) == [("waited", second)]
    assert lines(lambda: world.order.begin(second)) == []
    assert lines(lambda: world.order.begin(third)) == [("waited", third)]
    world.order.end(second)
    assert lines(lambda: world.order.begin(third)) == [("waited", third)], "for the second"
    world.order.end(third)
    assert len(world.order) == 1


def test_it_remembers_no_more_than_works_at_once(device):
    """However many streams there have been, and with the same few events."""
    order, most = AccessOrder(), 0
    with observe.attached(Log()) as log:
        for _ in range(30):
            together = [device.stream() for _ in range(3)]
            for stream in together:
                order.begin(stream)
            for stream in together:
                order.end(stream)
            most = max(most, len(order))
        remembered = {s for a in order._ended.values() for s in (a.stream, *a.waited)}
        assert len(remembered) == most == 3
        assert len(order._spare) <= 6
        events = {id(event): event for verb, event, _ in log.lines if verb == "recorded"}
    assert len(events) <= 6


def test_a_captured_stream_cannot_begin(device):
    world = Accesses(device)
    first, second, _ = world.streams
    with first.capture(), pytest.raises(kv.CaptureError, match=f"{first.name} is being captured"):
        world.order.begin(first)
    world.order.begin(first)
    world.put(first, 1)
    with first.capture():
        assert lines(lambda: world.order.end(first)) == []
        for _ in range(2):
            with pytest.raises(kv.CaptureError, match="end its capture"):
                world.order.begin(second)
    world.work(second, 2)
    world.check(0, 1, 2)


def test_the_calling_thread_may_wait_for_what_fails():
    world = Accesses(HostDevice())
    first, second, _ = world.streams

    def fail():
        raise OSError("no such luck")

    first.call(fail)
    world.order.end(first)
    with pytest.raises(kv.DeviceError, match="luck"):
        world.order.begin(world.device.as_stream(None))
    world.work(world.device.as_stream(None), 1)
    world.work(second, 2)
    world.check(0, 1, 2)


@settings(max_examples=examples(60), deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=15))
def test_random_accesses(device, steps):
    """Each reads what the one before it wrote, however late that comes."""
    world = Accesses(device)
    for value, (number, late) in enumerate(steps, start=1):
        stream = world.streams[number]
        world.order.begin(stream)
        if late:
            stream.call(lambda: time.sleep(0.002))
        world.put(stream, value)
        world.order.end(stream)
        assert len(world.order) == 1
    world.check(*range(len(steps) + 1))


# --- The ring of tables ---

POISON = 0x5A


class Source:
    """A step of `count` tokens whose tables are random numbers. `refuse` raises instead."""

    def __init__(self, seed, count=5, pages=4, refuse=None):
        rng = np.random.default_rng(seed)
        self.refuse = refuse
        self.asked = self.asked_shapes = 0
        self.arrays = {
            "slots": rng.integers(-(2**62), 2**62, count, np.int64),
            "mask": rng.integers(0, 2, (count, 3)).astype(bool),
            "positions": rng.integers(-(2**30), 2**30, count, np.int32),
            "none": np.zeros((count, 0), np.int32),
            "table": rng.integers(-(2**30), 2**30, (pages, count), np.int32),
        }

    def tables(self):
        self.asked += 1
        if self.refuse is not None:
            raise self.refuse
        return self.arrays

    def captured_shapes(self):
        self.asked_shapes += 1
        if self.refuse is not None:
            raise self.refuse
        shapes = {name: (a.shape, kv.formats.tag(a.dtype)) for name, a in self.arrays.items()}
        pages, count = self.arrays["table"].shape
        return {**shapes, "table": ((pages + 3, count), "int32")}

    def captured_tables(self, shapes):
        if shapes["table"][0][1] != self.arrays["table"].shape[1]:
            raise ValueError("seqs: expected as many as in the captured step")
        return self.tables()

    def before_launch(self, stream):
        pass


class Ring:
    """A ring, two compute streams, and all that they have read.

    `read` puts a reader on a stream, `check` compares what every reader has seen, once the device
    has been synchronised.
    """

    def __init__(self, device, num_slots=1, copy_stream=None, copies=None):
        self.device = device
        self.entered = []
        copies = copies or CopyStream(device, copy_stream)
        self.ring = TableRing(copies, num_slots, self.entered.append)
        self.compute, self.other = device.stream(), device.stream()
        self.compute.name, self.other.name = "compute", "other"
        self.reads = []

    @property
    def copy_stream(self):
        return self.ring.copies.stream

    @property
    def streams(self):
        return {"copy": self.copy_stream, "compute": self.compute, "other": self.other}

    def private(self, view):
        dtype = kv.formats.numpy_dtype(view.format)
        poison = np.full(view.shape, POISON, np.uint8 if dtype.kind == "b" else dtype)
        return self.device.asarray(poison.view(dtype))

    def read(self, source, views, stream):
        """Let a stream copy the tables away."""
        copies = {}
        for name, view in views.items():
            array = source.arrays[name]
            part = view[: array.shape[0]]  # of a captured table that has space for more
            copies[name] = self.private(part)
            self.device.copy(copies[name], part, stream=stream)
        self.reads.append((source, copies))

    def step(self, seed, *streams, **source):
        """A step that is read on streams, in order."""
        step_source = Source(seed, **source)
        tables = self.ring.open(step_source)
        try:
            for stream in streams or (self.compute,):
                self.read(step_source, tables.on(stream), stream)
        finally:
            tables.close()
        return tables

    def capture(self, seed, stream=None, **source):
        """A graph that copies its tables away; returns it and where to."""
        step_source, on = Source(seed, **source), stream or self.compute
        tables = self.ring.open(step_source)
        with on.capture() as graph:
            views = tables.on(on)
            outs = {name: self.private(view) for name, view in views.items()}
            for name, view in views.items():
                self.device.copy(outs[name], view, stream=on)
        tables.close()
        return graph, outs

    def launch(self, graph, outs, source, stream):
        """Launch a graph within the open step; the stream then takes away what it has read."""
        graph.launch(stream)
        copies = {}
        for name, out in outs.items():
            part = kv.arrays.view(out)[: source.arrays[name].shape[0]]
            copies[name] = self.private(part)
            self.device.copy(copies[name], part, stream=stream)
        self.reads.append((source, copies))

    def graph_step(self, seed, graph, outs, *streams, **source):
        step_source = Source(seed, **source)
        tables = self.ring.open(step_source)
        try:
            for stream in streams or (self.compute,):
                self.launch(graph, outs, step_source, stream)
        finally:
            tables.close()
        return tables

    def check(self, first=0):
        """Every reader has seen the tables of the right step."""
        self.device.synchronize()
        for number, (source, copies) in enumerate(self.reads[first:], start=first):
            for name, copy in copies.items():
                got, want = self.device.to_numpy(copy), source.arrays[name]
                assert got.dtype == want.dtype
                assert np.array_equal(got, want), f"read {number}, {name}: got {got}, want {want}"


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


# What a step costs -------------------------------------------------------------------------------


def test_what_a_step_puts_on_streams(device):
    """One copy, one wait for each reader, and an event for the copy and for each reader."""
    world = Ring(device)
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


@pytest.mark.parametrize("num_slots", [1, 2])
def test_slots_grow_while_others_are_in_flight(device, num_slots):
    world = Ring(device, num_slots)
    gate = Gate(world.compute)
    for seed, pages in enumerate([1, 60000, 2, 90000][: 2 * num_slots]):
        world.step(seed, pages=pages)
    gate.open()
    for seed, pages in enumerate([1, 200000, 3]):
        world.step(seed, pages=pages)
    world.check()


def test_memory_that_is_replaced_lives_until_it_is_read(device):
    """What a reader in flight still needs is not given back, and afterwards it is."""
    world = Ring(device)
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


# Which streams -----------------------------------------------------------------------------------


# Failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_copy_that_is_refused(device, num_slots):
    world = Ring(device, num_slots)
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


def fail():
    raise OSError("no such luck")


def test_a_stream_that_fails_and_surfaces():
    """Its failure is its user's; later steps have their tables. (A GPU would be lost.)"""
    world = Ring(HostDevice(), num_slots=2)
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


def test_a_copy_that_failed_is_made_again_for_the_next_stream():
    """Within one step: the failure has surfaced, and the memory is invalid."""
    world = Ring(HostDevice())
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
    world = Ring(device, num_slots)
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


# --- Captured steps ---


# Capture -----------------------------------------------------------------------------------------


# Launch ------------------------------------------------------------------------------------------


def test_tables_are_filled_once_a_step(device):
    world = Ring(device)
    graph, outs = world.capture(0)
    world.graph_step(1, graph, outs)
    source = Source(2)
    tables = world.ring.open(source)
    with observe.attached(Log()) as log:
        for stream in (world.compute, world.compute, world.other):
            graph.launch(stream)
    names = [operation.name for operation in log.operations]
    assert names == ["copy", "graph", "graph", "graph"]
    assert source.asked == 1
    assert [line[2] for line in log.lines if line[0] == "waited"] == [
        world.copy_stream, world.compute, world.compute, world.other,
    ]  # fmt: skip
    assert tables.streams == [world.compute, world.other]
    tables.close()
    with observe.attached(Log()) as log:
        world.graph_step(2, graph, outs)
    assert log.operations[0].name == "copy", "a later step, though with the same tables"
    world.check()


def test_a_graph_keeps_its_tables(device):
    world = Ring(device)
    source = Source(0)
    tables = world.ring.open(source)
    with world.compute.capture() as graph:
        views = tables.on(world.compute)
        outs = {name: world.private(view) for name, view in views.items()}
        for name, view in views.items():
            device.copy(outs[name], view, stream=world.compute)
    tables.close()
    gone = weakref.ref(views["slots"].owner)
    del tables, views, view
    gc.collect()
    world.graph_step(1, graph, outs)
    world.check()
    assert gone() is not None
    del graph, outs
    world.reads.clear()
    device.synchronize()
    world.step(2)  # a GPU releases what is done now and then
    device.synchronize()
    gc.collect()
    assert gone() is None


# A GPU, by what it is asked for ------------------------------------------------------------------


@pytest.fixture
def api(monkeypatch):
    api = FakeApi()
    api.install(monkeypatch)
    return api


@pytest.fixture
def gpu(api):
    return cuda.CudaDevice(0, api)


def ring_of(gpu, num_slots, before_use, copy_stream=None):
    return TableRing(CopyStream(gpu, copy_stream), num_slots, before_use)


def order_of(api):
    """The waits, records and copies that a GPU was given, by stream."""
    return [
        (entry[0], entry[2] if entry[0] in ("record", "copy") else entry[1])
        for entry in api.runtime.log
        if entry[0] in ("wait", "record", "copy")
    ]


def test_what_a_gpu_is_asked_for(api, gpu):
    ring = ring_of(gpu, 2, lambda stream: None)
    stream, copy = gpu.stream(), ring.copies.stream
    for seed in range(4):
        tables = ring.open(Source(seed))
        api.runtime.log.clear()
        tables.on(stream)
        tables.on(stream)
        tables.close()
    (length,) = [entry[1] for entry in api.runtime.log if entry[0] == "copy"]
    assert length == 5 * 8 + 8 + 15 + 1 + 20 + 12 + 80
    assert order_of(api) == [
        ("wait", copy.pointer),
        ("copy", copy.pointer),
        ("record", copy.pointer),  # holds the memory until then
        ("record", copy.pointer),
        ("wait", stream.pointer),
        ("record", stream.pointer),
    ]


def test_new_memory_waits_for_the_current_stream(api, gpu):
    """The pool hands out what the current stream may still be using; the host does not wait."""
    ring = ring_of(gpu, 1, lambda stream: None)
    home = gpu.stream()
    api.currents[0] = home.cupy
    gpu.empty(64, "fp32").fill(7)
    ring.open(Source(0)).on(gpu.stream())
    assert not home.done()
    assert order_of(api)[:2] == [("record", home.pointer), ("wait", ring.copies.stream.pointer)]


def test_another_librarys_capture(api, gpu):
    ring = ring_of(gpu, 1, lambda stream: None)
    foreign = api.cupy.cuda.Stream()
    stream = gpu.as_stream(foreign)
    tables = ring.open(Source(0))
    foreign.begin_capture(0)
    with pytest.raises(kv.CaptureError, match="another library"):
        tables.on(stream)
    assert order_of(api) == []
    assert tables.source.asked_shapes == 0, "memory taken here might spoil their capture"
    foreign.end_capture()
    tables.on(stream)
    foreign.begin_capture(0)
    tables.close()
    foreign.end_capture()
    ring.open(Source(1)).on(stream)
