"""The order of accesses to pages, and the tables of steps: cost, memory, captures and failures.

Their waits are in `order_cases.py`.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from devices.fake_cuda import FakeApi
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import Log

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


# --- The tables of steps ---


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
