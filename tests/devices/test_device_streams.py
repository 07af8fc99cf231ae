"""Streams, events, graphs, memory and copies: what every device does.

Runs on the device of ``--device`` and on the stand-in for CUDA. `test_host_streams.py` and
`test_cuda*.py` test what is specific to one kind of device.
"""

from __future__ import annotations

import gc
import itertools
import weakref

import ml_dtypes
import numpy as np
import pytest
from stream_cases import Gate

from kvcupy import arrays, formats
from kvcupy.arrays import is_pinned
from kvcupy.config import config
from kvcupy.errors import CaptureError, DeviceError


@pytest.fixture
def device(each_device):
    return each_device


def fail():
    raise OSError("no such luck")


class Rows:
    """Rows of four numbers on the device, the first of which is all ones."""

    def __init__(self, device, count=4):
        self.device = device
        self.rows = [device.empty_pinned(4, "fp32") for _ in range(count)]
        for row, value in zip(self.rows, (1, *[0] * count), strict=False):
            row[...] = value
        device.synchronize()

    def copy(self, dst, src, stream):
        self.device.copy(self.rows[dst], self.rows[src], stream=stream)

    def __getitem__(self, index):
        return self.rows[index].tolist()[0]


# Order -------------------------------------------------------------------------------------------


def test_functions_of_a_stream_are_called_once_and_in_order(device):
    stream, seen = device.stream(), []
    for i in range(50):
        stream.call(lambda i=i: seen.append(i))
    stream.synchronize()
    assert seen == list(range(50))


def test_a_function_is_between_the_work_before_and_behind_it(device):
    stream, rows, seen = device.stream(), Rows(device), []
    rows.copy(1, 0, stream)
    stream.call(lambda: seen.append(rows[1]) or rows.rows[1].fill(2))
    rows.copy(2, 1, stream)
    stream.synchronize()
    assert (seen, rows[2]) == ([1], 2)


def test_done(device):
    stream = device.stream()
    assert stream.done(), "an empty stream"
    gate = Gate(stream)
    assert not stream.done()
    gate.open()
    stream.synchronize()
    assert stream.done()


@pytest.mark.parametrize("wrong", [7, "main", object()])
def test_what_is_no_stream(device, wrong):
    a, b = np.zeros(2), np.ones(2)
    with pytest.raises(TypeError, match=r"^stream:"):
        device.as_stream(wrong)
    with pytest.raises(TypeError, match=r"^stream:"):
        device.copy(a, b, stream=wrong)
    assert not a.any()
    with pytest.raises(TypeError, match=r"^(event|stream|other):"):
        device.stream().wait(wrong)
    with pytest.raises(TypeError, match=r"^event:"):
        device.stream().record(wrong)


@pytest.mark.parametrize("priority", ["high", 2.5, True, None, 2**40])
def test_a_priority_is_an_int(device, priority):
    """Else the thread of a host stream ends at once, and a wait for the stream never does."""
    with pytest.raises((TypeError, ValueError), match=r"^priority: expected an int"):
        device.stream(priority=priority)
    for valid in (-5, np.int64(0), 5):
        stream = device.stream(priority=valid)
        stream.call(lambda: None)
        stream.synchronize()
        assert stream.priority == valid


def test_an_event_never_recorded_is_done(device):
    event, stream, rows = device.event(), device.stream(), Rows(device)
    assert event.done() and event.error() is None
    event.synchronize()
    stream.wait(event)
    rows.copy(1, 0, stream)
    stream.synchronize()
    assert rows[1] == 1


def test_an_event_is_done_when_its_stream_has_passed_it(device):
    stream = device.stream()
    gate = Gate(stream)
    event = stream.record()
    after = Gate(stream)
    assert not event.done()
    gate.open()
    event.synchronize()
    assert event.done()
    assert not stream.done(), "the event was recorded before the second gate"
    after.open()
    stream.synchronize()


def test_recording_again_moves_an_event(device):
    stream, event = device.stream(), device.event()
    assert stream.record(event) is event
    event.synchronize()
    gate = Gate(stream)
    stream.record(event)
    assert not event.done()
    gate.open()
    event.synchronize()
    assert event.done()


def test_a_wait_is_for_the_point_recorded_when_it_was_called(device):
    first, second, waiting = (device.stream() for _ in range(3))
    event, rows = device.event(), Rows(device)
    first.record(event)
    waiting.wait(event)
    rows.copy(1, 0, waiting)
    gate = Gate(second)
    second.record(event)  # the wait above is not for this
    waiting.synchronize()
    assert rows[1] == 1
    assert not event.done()
    gate.open()
    event.synchronize()


def test_a_wait_for_a_stream_is_for_what_it_holds_so_far(device):
    producer, consumer, rows = device.stream(), device.stream(), Rows(device)
    gate = Gate(producer)
    rows.copy(1, 0, producer)
    consumer.wait(producer)
    rows.copy(2, 1, consumer)
    later = Gate(producer)
    assert not consumer.done()
    gate.open()
    consumer.synchronize()
    assert rows[2] == 1
    later.open()


def test_elapsed_time_needs_two_recorded_events_with_timing(device):
    timed, never, plain = device.event(timing=True), device.event(timing=True), device.event()
    stream = device.stream()
    stream.record(timed)
    stream.record(plain)
    for event, since in itertools.permutations((timed, never, plain), 2):
        with pytest.raises(ValueError, match="timing=True"):
            event.elapsed_us(since)
    with pytest.raises(ValueError, match="timing=True"):
        timed.elapsed_us(None)
    end = device.event(timing=True)
    Gate(stream).open()
    stream.record(end)
    assert end.elapsed_us(timed) > 0


@pytest.mark.parametrize("wait", ["stream", "event", "device"])
def test_a_failure_surfaces_once_at_its_own_stream(device, wait):
    stream, other, seen = device.stream(), device.stream(), []
    for repeat in range(3):
        before = stream.record()
        stream.call(fail)
        event = stream.record()
        before.synchronize()
        other.synchronize()
        waits = {"stream": stream, "event": event, "device": device}
        with pytest.raises(DeviceError, match="no such luck") as error:
            waits[wait].synchronize()
        assert isinstance(error.value.__cause__, OSError)
        stream.call(lambda repeat=repeat: seen.append(repeat))
        for each in (before, event, stream, device):
            each.synchronize()
        assert stream.done()
    assert seen == [0, 1, 2]


# Lifetime ----------------------------------------------------------------------------------------


def use(device, how, stream, target):
    """Let a stream use an array, and return a weak reference to it."""
    source = device.empty_pinned((8,), "fp32")
    source[...] = 1
    if how == "copy":
        device.copy(target[::-1], source, stream=stream)
    elif how == "run":
        device.run(lambda: None, stream, (source,))
    else:
        stream.call(lambda source=source: target.fill(source[0]))
    return weakref.ref(source)


@pytest.mark.parametrize("how", ["copy", "run", "function"])
def test_arrays_live_while_they_are_queued_and_no_longer(device, how):
    stream, target = device.stream(), device.empty_pinned((8,), "fp32")
    gate = Gate(stream)
    watched = use(device, how, stream, target)
    gc.collect()
    assert watched() is not None
    gate.open()
    stream.synchronize()
    device.synchronize()
    gc.collect()
    assert watched() is None
    assert how == "run" or target.all()


@pytest.mark.parametrize("how", ["copy", "run", "function"])
def test_a_graph_keeps_its_arrays(device, how):
    stream, target = device.stream(), device.empty_pinned((8,), "fp32")
    with stream.capture() as graph:
        watched = use(device, how, stream, target)
    gc.collect()
    for _ in range(2):
        assert watched() is not None
        graph.launch(stream)
        stream.synchronize()
    assert how == "run" or target.all()
    del graph
    device.synchronize()
    gc.collect()
    assert watched() is None


# Graphs ------------------------------------------------------------------------------------------


def test_a_graph_reads_its_arrays_at_replay(device):
    stream, rows, seen = device.stream(), Rows(device), []
    with stream.capture() as graph:
        rows.copy(1, 0, stream)
        stream.call(lambda: seen.append(rows[1]))
    device.synchronize()
    assert (seen, rows[1]) == ([], 0), "capturing runs nothing"
    for value in (1, 2, 3):
        rows.rows[0][...] = value
        graph.launch(stream)
        stream.synchronize()
        assert rows[1] == value
    assert seen == [1, 2, 3]


def test_forks_of_a_graph_keep_their_order(device):
    """main -> a -> b, and back b -> a -> main; by a stream and by an event."""
    main, a, b, other = (device.stream() for _ in range(4))
    rows = Rows(device, 5)
    with main.capture() as graph:
        rows.copy(1, 0, main)
        a.wait(main)
        b.wait(a.record())
        rows.copy(2, 1, b)
        a.wait(b)
        rows.copy(3, 2, a)
        main.wait(a)
        rows.copy(4, 3, main)
        assert main.capturing and a.capturing and b.capturing and not other.capturing
    assert not (main.capturing or a.capturing or b.capturing)
    for value, stream in ((5, main), (6, a), (7, other)):
        rows.rows[0][...] = value
        graph.launch(stream)
        stream.synchronize()
        assert rows[4] == value, f"launched on {stream}"


def test_a_graph_is_in_the_order_of_its_stream(device):
    stream, seen = device.stream(), []
    with stream.capture() as graph:
        stream.call(lambda: seen.append("graph"))
    stream.call(lambda: seen.append("before"))
    graph.launch(stream)
    stream.call(lambda: seen.append("after"))
    stream.synchronize()
    assert seen == ["before", "graph", "after"]


@pytest.mark.parametrize("where", ["main", "side"])
def test_a_failure_in_a_graph_surfaces_where_it_was_launched(device, where):
    """The next replay is as good as new."""
    main, side, target = (device.stream() for _ in range(3))
    broken, seen = [True], []
    with main.capture() as graph:
        side.wait(main)
        (main if where == "main" else side).call(lambda: fail() if broken[0] else seen.append(1))
        main.wait(side)
    for repeat in range(2):
        broken[0] = True
        graph.launch(target)
        main.synchronize()
        with pytest.raises(DeviceError, match="luck"):
            target.synchronize()
        broken[0] = False
        graph.launch(target)
        target.synchronize()
        assert seen == [1] * (repeat + 1)


def assert_usable(*streams):
    """Streams run work, and can be captured, as if nothing had been."""
    for stream in streams:
        seen = []
        assert not stream.capturing
        stream.call(lambda seen=seen: seen.append(1))
        stream.synchronize()
        stream.record().synchronize()
        with stream.capture() as graph:
            stream.call(lambda seen=seen: seen.append(2))
        graph.launch(stream)
        stream.synchronize()
        assert seen == [1, 2]


FORBIDDEN = {
    "synchronising the stream": lambda c: c.main.synchronize(),
    "synchronising a forked stream": lambda c: c.side.synchronize(),
    "asking whether the stream is done": lambda c: c.main.done(),
    "asking whether a forked stream is done": lambda c: c.side.done(),
    "synchronising an event": lambda c: c.event.synchronize(),
    "asking whether an event is done": lambda c: c.event.done(),
    "synchronising the device": lambda c: c.device.synchronize(),
    "a second capture": lambda c: c.main.capture().__enter__(),
    "a second capture of a forked stream": lambda c: c.side.capture().__enter__(),
    "launching the graph": lambda c: c.graph.launch(),
    "launching the graph into itself": lambda c: c.graph.launch(c.main),
    "launching the graph elsewhere": lambda c: c.graph.launch(c.other),
    "launching another graph into it": lambda c: c.finished.launch(c.main),
    "waiting for a stream outside": lambda c: c.main.wait(c.other),
    "waiting for an event outside": lambda c: c.main.wait(c.outside),
    "waiting for an event outside in a fork": lambda c: c.side.wait(c.outside),
    "waiting for another capture": lambda c: c.in_another_capture(),
}


class Captured:
    """A capture in progress, of `main` with a fork to `side`."""

    def __init__(self, device):
        self.device, self.seen = device, []
        self.main, self.side, self.other = (device.stream() for _ in range(3))
        self.outside = self.other.record()
        with self.other.capture() as self.finished:
            self.other.call(lambda: None)

    def in_another_capture(self):
        with self.other.capture():
            self.other.wait(self.event)


@pytest.mark.parametrize("what", FORBIDDEN)
@pytest.mark.parametrize("caught", ["inside", "outside"])
def test_forbidden_in_a_capture(device, monkeypatch, what, caught):
    """Refused; a capture that continues all the same is whole, one that ends there is not launched.
    Either way all streams are usable afterwards."""
    monkeypatch.setattr(config, "_strict", True)  # as a GPU is
    c = Captured(device)

    def capture(refused):
        with c.main.capture() as c.graph:
            c.main.call(lambda: c.seen.append("main"))
            c.side.wait(c.main)
            c.side.call(lambda: c.seen.append("side"))
            c.event = c.side.record()
            refused(lambda: FORBIDDEN[what](c))
            c.main.wait(c.side)

    def refused(forbidden):
        with pytest.raises(CaptureError):
            forbidden()

    if caught == "inside":
        capture(refused)
        assert c.seen == []
        c.graph.launch(c.other)
        c.other.synchronize()
        assert c.seen == ["main", "side"]
        assert c.event.done()
        c.other.wait(c.event)
    else:
        with pytest.raises(CaptureError):
            capture(lambda forbidden: forbidden())
        assert c.seen == []
        with pytest.raises(CaptureError, match="did not end well"):
            c.graph.launch(c.main)
    assert_usable(c.main, c.side, c.other)
    device.synchronize()


@pytest.mark.parametrize("joined", ["never", "before its work", "by an event before its work"])
def test_a_fork_must_be_joined(device, joined):
    main, side, seen = device.stream(), device.stream(), []
    side.name = "the fork"
    with pytest.raises(CaptureError, match=r"the fork.* joined"), main.capture() as graph:
        side.wait(main)
        event = side.record()
        if joined == "before its work":
            main.wait(side)
        side.call(lambda: seen.append(1))
        if joined == "by an event before its work":
            main.wait(event)
    with pytest.raises(CaptureError):
        graph.launch(main)
    assert seen == []
    assert_usable(main, side)


def test_an_exception_ends_a_capture_and_lets_go_of_what_it_kept(device):
    main, side, seen = device.stream(), device.stream(), []
    owner = device.empty_pinned((4,), "fp32")
    watched = weakref.ref(owner)
    with pytest.raises(ZeroDivisionError), main.capture() as graph:
        main.call(lambda: seen.append(1))
        side.wait(main)
        device.run(lambda: None, main, (owner,))
        1 / 0  # noqa: B018
    del owner
    with pytest.raises(CaptureError, match="did not end well"):
        graph.launch(main)
    assert seen == []
    assert_usable(main, side)
    del graph
    gc.collect()
    assert watched() is None


def test_the_current_stream_cannot_be_captured(device):
    with pytest.raises(CaptureError, match="stream"):
        device.as_stream(None).capture().__enter__()


def test_work_before_a_capture_is_not_part_of_it(device):
    stream, seen = device.stream(), []
    gate = Gate(stream)
    stream.call(lambda: seen.append("before"))
    with stream.capture() as graph:
        stream.call(lambda: seen.append("captured"))
    gate.open()
    stream.synchronize()
    assert seen == ["before"]
    graph.launch(stream)
    stream.synchronize()
    assert seen == ["before", "captured"]


def test_streams_outside_continue_during_a_capture(device):
    stream, other, seen = device.stream(), device.stream(), []
    with stream.capture():
        other.call(lambda: seen.append(1))
        other.synchronize()
        assert seen == [1]
        other.record().synchronize()
        assert other.done()


def test_an_event_of_a_capture_can_be_recorded_outside_again(device):
    stream, other, event = device.stream(), device.stream(), device.event()
    with stream.capture():
        stream.record(event)
    gate = Gate(other)
    other.record(event)
    assert not event.done()
    gate.open()
    event.synchronize()


# Memory and copies -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*formats.FORMATS, "int64", "int32"])
def test_arrays_of_every_format_go_there_and_back(device, name):
    source = np.arange(24).reshape(4, 6).astype(formats.numpy_dtype(name)).T
    there = device.asarray(source)
    assert arrays.view(there).format == name
    assert arrays.view(device.empty((3, 4), name)).format == name
    np.testing.assert_array_equal(device.to_numpy(there), source)
    assert not device.to_numpy(device.zeros((4, 6), name)).view(np.uint8).any()


def test_four_bit_arrays_are_views_of_bytes(device):
    """With scales in a separate array they are copied in two parts."""
    raw = np.random.default_rng(0).integers(0, 256, (3, 2, 72), dtype=np.uint8)
    source = arrays.view_as(device.asarray(raw), "nvfp4")
    assert source.shape == (3, 2, 128)
    target, pinned = device.zeros((3, 2, 128), "nvfp4"), device.empty_pinned((3, 2, 128), "nvfp4")
    assert (target.format, target.packed.shape, pinned.pinned) == ("nvfp4", (3, 2, 72), True)
    np.testing.assert_array_equal(device.to_numpy(target), 0)
    codes, scales = (device.zeros((3, 2, n), np.uint8) for n in (64, 8))
    apart = arrays.view_as(codes, "nvfp4", scales=scales)
    device.copy(apart, source)
    device.copy(target, apart)
    device.copy(pinned, target)
    device.synchronize()
    np.testing.assert_array_equal(device.to_numpy(pinned), raw)
    np.testing.assert_array_equal(device.to_numpy(target), raw)


@pytest.mark.parametrize("shape", [0, 5, (3, 0, 2), (7, 33)])
def test_shapes_and_pinned_memory(device, shape):
    for make in (device.empty, device.zeros, device.empty_pinned):
        array = arrays.view(make(shape, "bf16"))
        assert (array.shape, array.format) == (np.empty(shape).shape, "bf16")
    pinned = device.empty_pinned(shape, "bf16")
    assert pinned.dtype == ml_dtypes.bfloat16
    if pinned.size:
        assert all(map(is_pinned, (pinned, pinned[1:], pinned.view(np.uint16), pinned.T)))
        assert not is_pinned(pinned.copy())


def test_the_fault_record_is_four_zeros_made_once(device):
    assert device.to_numpy(device.fault_array()).tolist() == [0, 0, 0, 0]
    assert device.fault_array() is device.fault_array()


CUTS = {
    "contiguous": lambda a: a,
    "rows": lambda a: a[:, :, :5],
    "strided": lambda a: a[::2, :, 1:],
    "reversed": lambda a: a[::-1, :, ::-1],
    "transposed": lambda a: a.transpose((2, 0, 1)),
    "empty": lambda a: a[:0],
    "scalar": lambda a: a[1:2, 2:3, 3:4],
}
SIDES = ["pinned pinned", "pinned device", "device pinned", "pageable device", "device pageable",
         "device device", "pageable pageable"]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.uint8])
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("on_stream", [False, True], ids=["current", "stream"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.covering(2)
def test_copies_of_any_layout_are_exact(device, cut, sides, on_stream, dtype):
    shape, at = (6, 4, 8), CUTS[cut]
    values = np.random.default_rng(0).integers(1, 255, shape).astype(dtype)

    def make(kind, content):
        if kind == "device":
            return device.asarray(content)
        array = (device.empty_pinned if kind == "pinned" else np.empty)(shape, dtype)
        array[...] = content
        return array

    to, of = sides.split()
    stream = device.stream() if on_stream else None
    for dst_at, src_at in ((at, at), (at, None), (None, at)):
        whole = at(values)
        src = at(make(of, values)) if src_at else np.ascontiguousarray(whole)
        base = make(to, np.zeros_like(values))
        dst = at(base) if dst_at else np.zeros_like(whole)
        device.copy(dst, src, stream=stream)
        device.synchronize()
        expected = np.zeros_like(values)
        at(expected)[...] = whole
        np.testing.assert_array_equal(device.to_numpy(dst), whole)
        if dst_at:
            np.testing.assert_array_equal(device.to_numpy(base), expected)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_repeated_and_an_overlapping_source_are_copied(device, pinned):
    src = device.empty_pinned((5, 8), np.int32) if pinned else np.empty((5, 8), np.int32)
    src[...] = np.arange(40).reshape(5, 8)
    windows = np.lib.stride_tricks.sliding_window_view(src.reshape(-1)[:12], 8)
    for source in (np.broadcast_to(src[2], (5, 8)), windows):
        dst = np.zeros((5, 8), np.int32)
        device.copy(dst, source)
        device.synchronize()
        np.testing.assert_array_equal(dst, source)


def test_a_wrong_copy_is_refused_before_anything_is_copied(device):
    dst = np.zeros((2, 3), np.float32)
    for src in (np.ones((3, 2), np.float32), np.ones(6, np.float32), np.ones((2, 3), np.int32)):
        with pytest.raises(ValueError, match=r"^dst: expected \(.*got \(2, 3\) fp32"):
            device.copy(dst, src)
    with pytest.raises(TypeError, match=r"^src:"):
        device.copy(dst, 3.0)
    with pytest.raises(TypeError, match=r"^dst:"):
        device.copy([0.0], dst)
    dst.setflags(write=False)
    with pytest.raises(ValueError, match=r"^dst: expected a writable"):
        device.copy(dst, np.ones((2, 3), np.float32))
    device.synchronize()
    assert not dst.any()
