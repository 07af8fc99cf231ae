"""Tables of captured steps: where they are, when they are filled, and what is refused.

The order of streams is tested in `test_paged_order.py` and `test_paged_graphs.py`.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from devices.fake_cuda import FakeApi
from engine_cases import poll
from stream_cases import Gate, Log
from table_cases import HOLD_S, Source, World

import kvcupy as kv
from kvcupy import observe
from kvcupy.cache.hazards import CopyStream
from kvcupy.cache.paged.tables import TableRing
from kvcupy.devices import cuda
from kvcupy.devices.host import HostDevice

# Capture -----------------------------------------------------------------------------------------


def test_captures_of_one_step_share_their_tables(device):
    world = World(device)
    source = Source(0)
    tables = world.ring.open(source)
    seen = []
    for stream in (world.compute, world.other, world.compute):
        with stream.capture():
            seen += [tables.on(stream), tables.on(stream)]
    tables.close()
    assert all(views is seen[0] for views in seen)
    other = world.ring.open(Source(1))
    with world.compute.capture():
        fresh = other.on(world.compute)
    assert fresh["slots"].pointer != seen[0]["slots"].pointer


def test_tables_have_the_shapes_of_the_source(device):
    world = World(device)
    source = Source(0, count=3)
    tables = world.ring.open(source)
    with world.compute.capture():
        views = tables.on(world.compute)
    shapes = source.captured_shapes()
    assert list(views) == list(shapes)
    for name, (shape, format) in shapes.items():
        view = views[name]
        assert (view.shape, view.format, view.device) == (shape, format, device.name)
        assert view.pointer % 16 == 0


def test_captured_work_is_no_work_of_the_step(device):
    """Nothing is uploaded, no stream uses the tables, and the end records nothing."""
    world = World(device)
    source = Source(0)
    with observe.attached(Log()) as log:
        tables = world.ring.open(source)
        with world.compute.capture():
            tables.on(world.compute)
        tables.close()
    assert log.lines == []
    assert (tables.streams, world.entered, source.asked) == ([], [], 0)


def test_a_fork_in_a_capture_has_the_same_tables(device):
    world = World(device)
    source = Source(0)
    tables = world.ring.open(source)
    with world.compute.capture() as graph:
        kv.fork(world.compute, world.other)
        views = tables.on(world.other)
        assert tables.on(world.compute) is views
        outs = {name: world.private(view) for name, view in views.items()}
        for name, view in views.items():
            device.copy(outs[name], view, stream=world.other)
        kv.join(world.compute, world.other)
    world.launch(graph, outs, source, world.compute)
    with observe.attached(Log()) as log:
        graph.launch(world.compute)
    waits = [line for line in log.lines if line[0] == "waited"]
    records = [line for line in log.lines if line[0] == "recorded"]
    assert (len(waits), len(records)) == (1, 1), "once a launch"
    tables.close()
    world.check()


def test_eager_streams_beside_a_captured_one(device):
    world = World(device)
    world.step(0, world.other)
    source = Source(1)
    tables = world.ring.open(source)
    with world.compute.capture() as graph:
        fixed = tables.on(world.compute)
        outs = {name: world.private(view) for name, view in fixed.items()}
        for name, view in fixed.items():
            device.copy(outs[name], view, stream=world.compute)
        views = tables.on(world.other)
        assert views["slots"].pointer != fixed["slots"].pointer
        world.read(source, views, world.other)
        assert tables.streams == [world.other]
    world.launch(graph, outs, source, world.compute)
    assert tables.streams == [world.other, world.compute]
    tables.close()
    for seed in range(3):
        world.graph_step(seed, graph, outs)
        world.step(seed, world.compute, world.other)
    world.check()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_reader_that_is_captured_when_the_step_ends(device, num_slots):
    """Its reads are from before, and are waited for; its graph gets nothing into it."""
    world = World(device, num_slots)
    world.step(0)
    device.synchronize()
    gate = Gate(world.compute)
    source = Source(1)
    tables = world.ring.open(source)
    world.read(source, tables.on(world.compute), world.compute)
    with world.compute.capture() as graph, observe.attached(Log()) as log:
        fixed = tables.on(world.compute)
        tables.close()
        assert log.lines == []
    for seed in range(2, 2 + num_slots):
        world.step(seed, world.other)
    assert not poll(world.other.done, HOLD_S)
    gate.open()
    tables = world.ring.open(Source(9))
    graph.launch(world.compute)
    tables.close()
    world.step(10)
    world.check()
    del fixed


@pytest.mark.parametrize("held", ["compute", "other"])
def test_readers_that_are_captured_when_the_step_ends(device, held):
    """All of them are waited for."""
    world = World(device)
    world.step(0)
    device.synchronize()
    gate = Gate(world.streams[held])
    source = Source(1)
    tables = world.ring.open(source)
    for stream in (world.compute, world.other):
        world.read(source, tables.on(stream), stream)
    with world.compute.capture(), world.other.capture():
        tables.close()
    third = device.stream()
    world.step(2, third)
    assert not poll(third.done, HOLD_S)
    gate.open()
    world.check()


def test_a_reader_that_stays_captured(device):
    """What it reads cannot be overwritten until its capture ends; then it can."""
    world = World(device)
    source = Source(1)
    tables = world.ring.open(source)
    world.read(source, tables.on(world.compute), world.compute)
    with world.compute.capture():
        tables.close()
        for _ in range(2):
            with pytest.raises(kv.CaptureError, match="compute is being captured"):
                world.step(2, world.other)
    world.step(3, world.other)
    world.check()


# Launch ------------------------------------------------------------------------------------------


def test_tables_are_filled_once_a_step(device):
    world = World(device)
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


@pytest.mark.parametrize("pages", [0, 1, 4, 7])
def test_only_what_is_in_use_is_copied(device, pages):
    world = World(device)
    graph, outs = world.capture(0, pages=4)  # with space for 7
    with observe.attached(Log()) as log:
        world.graph_step(1, graph, outs, pages=pages)
    space = Source(0, pages=4).captured_shapes()["table"][0]
    whole = next(op for op in log.operations if op.name == "copy").writes[0].view.size
    longest = World(device)
    full, full_outs = longest.capture(0, pages=4)
    with observe.attached(Log()) as log:
        longest.graph_step(1, full, full_outs, pages=7)
    most = next(op for op in log.operations if op.name == "copy").writes[0].view.size
    assert most - whole == (space[0] - pages) * space[1] * 4
    world.check()


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda array: array.astype(np.int64), r"\(5,\) int64"),
        (lambda array: array[:3], r"\(3,\) int32"),
        (lambda array: array[None], r"\(1, 5\) int32"),
    ],
    ids=["other format", "shorter", "other shape"],
)
def test_arrays_of_another_kind_are_refused(device, change, got):
    """The tables would be read as something that they are not."""
    world = World(device)
    graph, _ = world.capture(0)
    source = Source(1)
    source.arrays["positions"] = change(source.arrays["positions"])
    world.ring.open(source)
    with pytest.raises(ValueError, match=rf"^positions: expected \(5,\) int32, got {got}$"):
        graph.launch(world.compute)


@pytest.mark.parametrize("what", ["copy", "graph"])
def test_a_launch_that_is_refused(device, what):
    world = World(device)
    graph, outs = world.capture(0)
    world.graph_step(1, graph, outs)
    for seed in (2, 3):
        with pytest.raises(kv.KvcupyError, match="refused"), observe.attached(Log(refuse=what)):
            world.graph_step(seed, graph, outs)
    source = Source(4)
    tables = world.ring.open(source)
    with pytest.raises(kv.KvcupyError, match="refused"), observe.attached(Log(refuse=what)):
        graph.launch(world.compute)
    world.launch(graph, outs, source, world.compute)
    tables.close()
    world.check()


def test_a_fill_that_failed_is_made_again():
    """Within one step: the failure has surfaced, and the tables are invalid."""
    world = World(HostDevice())
    graph, outs = world.capture(0)
    world.graph_step(1, graph, outs)
    world.copy_stream.call(fail)
    source = Source(2)
    tables = world.ring.open(source)
    with pytest.raises(kv.DeviceError, match="luck"):
        graph.launch()
    world.launch(graph, outs, source, world.compute)
    tables.close()
    assert source.asked == 2
    world.check()


def fail():
    raise OSError("no such luck")


def test_entering_that_fails_launches_nothing(device):
    world = World(device)
    graph, outs = world.capture(0)
    world.graph_step(1, graph, outs)

    def refuse(stream):
        raise kv.KvcupyError("not now")

    world.ring.before_use = refuse
    source = Source(2)
    tables = world.ring.open(source)
    with observe.attached(Log()) as log, pytest.raises(kv.KvcupyError, match="not now"):
        graph.launch(world.compute)
    assert "graph" not in [operation.name for operation in log.operations]
    world.ring.before_use = world.entered.append
    world.launch(graph, outs, source, world.compute)
    tables.close()
    assert tables.streams == [world.compute]
    world.check()


def test_a_graph_keeps_its_tables(device):
    world = World(device)
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


def test_a_step_is_not_kept(device):
    world = World(device)
    graph, outs = world.capture(0)
    source = Source(1)
    tables = world.ring.open(source)
    graph.launch(world.compute)
    tables.close()
    gone = weakref.ref(source)
    del source, tables, outs
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


def test_wrappers_of_one_stream_are_one_stream(api, gpu):
    entered = []
    ring = ring_of(gpu, 1, entered.append)
    stream = gpu.stream()
    tables = ring.open(Source(0))
    first = tables.on(gpu.as_stream(stream.cupy))
    assert tables.on(gpu.as_stream(stream.cupy)) is first
    assert tables.streams == entered == [stream]


def test_a_copy_stream_of_another_library(api, gpu):
    foreign = api.cupy.cuda.Stream()
    ring = ring_of(gpu, 1, lambda stream: None, foreign)
    assert ring.copies.stream.pointer == foreign.ptr
    ring.open(Source(0)).on(gpu.stream())
    assert ("copy", foreign.ptr) in order_of(api)


def test_tables_captured_on_the_current_stream(api, gpu, monkeypatch):
    """Zeros would be put into the graph. And a previous owner of the memory may still use it."""
    ring = ring_of(gpu, 1, lambda stream: None)
    home = gpu.stream()
    api.currents[0] = home.cupy
    monkeypatch.setattr(api.cupy, "zeros", None)
    tables = ring.open(Source(0))
    with home.capture() as graph:
        tables.on(home)
    api.runtime.log.clear()
    graph.launch(gpu.stream())
    before_the_copy = order_of(api)[:2]
    assert before_the_copy == [("record", home.pointer), ("wait", ring.copies.stream.pointer)]
    assert order_of(api)[2] == ("copy", ring.copies.stream.pointer)
    api.runtime.log.clear()
    graph.launch(home)
    assert order_of(api)[0] == ("wait", home.pointer)


def test_new_memory_waits_for_the_current_stream(api, gpu):
    """The pool hands out what the current stream may still be using; the host does not wait."""
    ring = ring_of(gpu, 1, lambda stream: None)
    home = gpu.stream()
    api.currents[0] = home.cupy
    gpu.empty(64, "fp32").fill(7)
    ring.open(Source(0)).on(gpu.stream())
    assert not home.done()
    assert order_of(api)[:2] == [("record", home.pointer), ("wait", ring.copies.stream.pointer)]


def test_new_memory_while_the_current_stream_is_captured(api, gpu):
    ring = ring_of(gpu, 1, lambda stream: None)
    home, stream = gpu.stream(), gpu.stream()
    api.currents[0] = home.cupy
    tables = ring.open(Source(0))
    with home.capture():
        with pytest.raises(kv.CaptureError, match="captured and may still use"):
            tables.on(stream)
        assert ("copy", ring.copies.stream.pointer) not in order_of(api)
    tables.on(stream)
    tables.close()
    with home.capture():  # the memory is large enough by now
        ring.open(Source(1)).on(stream)


def test_memory_that_is_replaced_is_held_until_the_copy_stream_has_waited(gpu):
    """Its readers may be on the stream whose allocator takes it back, and are not distinguished."""
    ring = ring_of(gpu, 1, lambda stream: None)

    def step(pages):
        tables = ring.open(Source(0, pages=pages))
        tables.on(gpu.stream())
        tables.close()

    step(1)
    gone = weakref.ref(ring._slots[0].whole.owner)
    gpu.synchronize()
    step(10000)
    gc.collect()
    assert gone() is not None
    gpu.synchronize()
    step(1)
    gc.collect()
    assert gone() is None


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
