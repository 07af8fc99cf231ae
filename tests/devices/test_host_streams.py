"""Streams, events, graphs and copies of the host device."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref

import ml_dtypes
import numpy as np
import pytest

from kvcupy.config import config
from kvcupy.devices.host import HostDevice
from kvcupy.errors import CaptureError, DeviceError

PATIENCE_S = 60  # nothing here takes as long; a test that hangs fails instead


@pytest.fixture
def device():
    return HostDevice()


class Gate:
    """Holds up the streams that it is put in, until it is opened."""

    def __init__(self):
        self._open = threading.Event()

    def put_in(self, stream):
        stream.call(self._wait)
        return self

    def _wait(self):
        if not self._open.wait(PATIENCE_S):
            raise TimeoutError("the gate was never opened")

    def open(self):
        self._open.set()


def fail():
    raise OSError("no such luck")


# Order -------------------------------------------------------------------------------------------


def test_a_stream_is_first_in_first_out(device):
    stream, seen = device.stream(), []
    for i in range(200):
        stream.call(lambda i=i: (time.sleep(0.001 if i % 50 == 0 else 0), seen.append(i)))
    stream.synchronize()
    assert seen == list(range(200))


def test_different_streams_overlap(device):
    """Each waits for the other to have begun."""
    both = threading.Barrier(2)
    streams = [device.stream() for _ in range(2)]
    for stream in streams:
        stream.call(lambda: both.wait(PATIENCE_S))
    device.synchronize()


def test_issuing_waits_for_nothing_and_all_streams_run_at_once(device):
    """Functions that block are issued on four streams, where they all meet this thread."""
    meeting = threading.Barrier(5)
    for _ in range(4):
        device.stream().call(lambda: meeting.wait(PATIENCE_S))
    meeting.wait(PATIENCE_S)
    device.synchronize()


def test_no_stream_is_the_calling_thread(device):
    seen = []
    main = device.as_stream(None)
    main.call(lambda: seen.append(threading.current_thread()))
    assert seen == [threading.current_thread()]
    assert main.done()
    main.synchronize()


def test_a_failure_on_no_stream_is_raised_at_once(device):
    with pytest.raises(OSError, match="luck"):
        device.as_stream(None).call(fail)
    device.synchronize()


@pytest.mark.parametrize("priority", [-5, 0, 5])
def test_priorities(device, priority):
    stream, seen = device.stream(priority), []
    stream.call(lambda: seen.append(1))
    stream.synchronize()
    assert stream.priority == priority
    assert seen == [1]


def test_done(device):
    stream = device.stream()
    assert stream.done(), "an empty stream"
    gate = Gate().put_in(stream)
    assert not stream.done()
    gate.open()
    stream.synchronize()
    assert stream.done()


@pytest.mark.parametrize("wrong", [7, "main", object(), threading.Lock()])
def test_what_is_no_stream(device, wrong):
    a, b = np.zeros(2), np.ones(2)
    with pytest.raises(TypeError, match=r"^stream:"):
        device.as_stream(wrong)
    with pytest.raises(TypeError, match=r"^stream:"):
        device.copy(a, b, stream=wrong)
    assert not a.any()
    with pytest.raises(TypeError, match="event"):
        device.stream().wait(wrong)
    with pytest.raises(TypeError, match="event"):
        device.stream().record(wrong)


# Events ------------------------------------------------------------------------------------------


def test_an_event_never_recorded_is_done(device):
    event, stream, seen = device.event(), device.stream(), []
    assert event.done()
    event.synchronize()
    stream.wait(event)
    stream.call(lambda: seen.append(1))
    stream.synchronize()
    assert seen == [1]


def test_an_event_is_done_when_the_stream_has_passed_it(device):
    stream = device.stream()
    gate = Gate().put_in(stream)
    event = stream.record()
    after = Gate().put_in(stream)
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
    gate = Gate().put_in(stream)
    stream.record(event)
    assert not event.done()
    gate.open()
    event.synchronize()
    assert event.done()


def test_a_wait_is_for_the_point_recorded_when_it_was_called(device):
    first, second, waiting = (device.stream() for _ in range(3))
    early, late = Gate().put_in(first), Gate().put_in(second)
    event, seen = device.event(), []
    first.record(event)
    waiting.wait(event)
    waiting.call(lambda: seen.append("waiting"))
    second.record(event)  # the wait above is not for this
    early.open()
    waiting.synchronize()
    assert seen == ["waiting"]
    assert not event.done()
    late.open()
    event.synchronize()


def test_a_wait_for_a_stream_is_for_what_it_holds_so_far(device):
    producer, consumer, seen = device.stream(), device.stream(), []
    gate = Gate().put_in(producer)
    producer.call(lambda: seen.append("produced"))
    consumer.wait(producer)
    consumer.call(lambda: seen.append("consumed"))
    later = Gate().put_in(producer)
    time.sleep(0.05)
    assert seen == []
    gate.open()
    consumer.synchronize()
    assert seen == ["produced", "consumed"]
    later.open()


def test_the_calling_thread_waits_for_a_stream(device):
    stream, seen = device.stream(), []
    stream.call(lambda: (time.sleep(0.05), seen.append(1)))
    device.as_stream(None).wait(stream)
    assert seen == [1]
    assert device.as_stream(None).record().done()


def test_elapsed(device):
    stream = device.stream()
    start, end = device.event(timing=True), device.event(timing=True)
    began = time.perf_counter()
    stream.record(start)
    stream.call(lambda: time.sleep(0.05))
    stream.record(end)
    elapsed_us = end.elapsed_us(start)  # waits for both
    assert 50_000 <= elapsed_us <= 1e6 * (time.perf_counter() - began)
    assert start.elapsed_us(end) == -end.elapsed_us(start)
    assert end.elapsed_us(end) == 0


def test_elapsed_needs_two_recorded_events_with_timing(device):
    timed, never, plain = device.event(timing=True), device.event(timing=True), device.event()
    stream = device.stream()
    stream.record(timed)
    stream.record(plain)
    for event, since in (
        (timed, plain),
        (plain, timed),
        (timed, never),
        (never, timed),
        (timed, None),
    ):
        with pytest.raises(ValueError, match="timing=True"):
            event.elapsed_us(since)


# Failures ----------------------------------------------------------------------------------------


def by_stream(device, stream, event):
    stream.synchronize()


def by_event(device, stream, event):
    event.synchronize()


def by_device(device, stream, event):
    device.synchronize()


def by_no_stream(device, stream, event):
    device.as_stream(None).wait(stream)


WAYS = pytest.mark.parametrize("wait", [by_stream, by_event, by_device, by_no_stream])


@WAYS
def test_a_failure_surfaces_once_and_the_stream_goes_on(device, wait):
    stream, seen = device.stream(), []
    for repeat in range(3):
        before = stream.record()
        stream.call(fail)
        stream.call(lambda: seen.append("between"))
        event = stream.record()
        with pytest.raises(DeviceError, match="no such luck") as error:
            wait(device, stream, event)
        assert isinstance(error.value.__cause__, OSError)
        stream.call(lambda repeat=repeat: seen.append(repeat))
        for other in (before, event, stream, device):
            other.synchronize()
        assert stream.done()
    assert seen == [0, 1, 2]


@WAYS
def test_nothing_runs_between_a_failure_and_its_surfacing(device, wait):
    """What was queued before it surfaced is skipped, even if the stream only gets there later."""
    stream, seen = device.stream(), []
    target = np.zeros(4)
    stream.call(fail)
    event = stream.record()
    stream.call(lambda: seen.append("between"))
    device.copy(target, np.ones(4), stream=stream)
    gate = Gate().put_in(stream)
    stream.call(lambda: seen.append("late"))
    with pytest.raises(DeviceError):
        wait(device, stream, event)
    gate.open()
    stream.call(lambda: seen.append("after"))
    stream.synchronize()
    assert seen == ["after"]
    assert not target.any()


def test_an_event_before_a_failure_knows_nothing_of_it(device):
    stream = device.stream()
    event = stream.record()
    stream.call(fail)
    with pytest.raises(DeviceError):
        stream.record().synchronize()
    event.synchronize()


def test_done_tells_of_a_failure_and_does_not_settle_it(device):
    stream = device.stream()
    stream.call(fail)
    stream.call(lambda: None)
    deadline = time.monotonic() + PATIENCE_S
    with pytest.raises(DeviceError, match="luck"):
        while time.monotonic() < deadline:
            stream.done()
    with pytest.raises(DeviceError, match="luck"):
        stream.synchronize()
    assert stream.done()


@pytest.mark.parametrize("through", ["stream", "event"])
def test_a_failure_flows_to_who_waits(device, through):
    first, second, third, seen = *(device.stream() for _ in range(3)), []
    gate = Gate().put_in(first)
    first.call(fail)
    second.wait(first if through == "stream" else first.record())
    second.call(lambda: seen.append("second"))
    third.wait(second)
    third.call(lambda: seen.append("third"))
    gate.open()
    for stream in (third, second, first):  # each skipped work of its own
        with pytest.raises(DeviceError, match="luck"):
            stream.synchronize()
        stream.synchronize()
    assert seen == []
    second.wait(first)
    second.call(lambda: seen.append("again"))
    device.synchronize()
    assert seen == ["again"]


def test_a_failure_that_surfaced_does_not_flow(device):
    first, second, seen = device.stream(), device.stream(), []
    first.call(fail)
    event = first.record()
    with pytest.raises(DeviceError):
        first.synchronize()
    second.wait(event)
    second.call(lambda: seen.append(1))
    second.synchronize()
    assert seen == [1]


def test_the_device_waits_for_all_streams_though_one_failed(device):
    streams, seen = [device.stream() for _ in range(4)], []
    streams[0].call(fail)
    for stream in streams[1:]:
        stream.call(lambda: (time.sleep(0.05), seen.append(1)))
    with pytest.raises(DeviceError):
        device.synchronize()
    assert seen == [1, 1, 1]
    device.synchronize()


def test_a_function_cannot_wait_for_its_own_stream(device):
    stream = device.stream()
    stream.call(stream.synchronize)
    with pytest.raises(DeviceError, match="wait for that stream"):
        stream.synchronize()


# Lifetime ----------------------------------------------------------------------------------------


def test_arrays_live_while_they_are_queued_and_no_longer(device):
    stream, target = device.stream(), np.zeros(1000)
    source, other = np.ones(1000), np.ones(3)
    watched = [weakref.ref(source), weakref.ref(other)]
    gate = Gate().put_in(stream)
    device.copy(target[::-1], source, stream=stream)
    device.run(lambda: None, stream, (other,))
    del source, other
    gc.collect()
    assert all(ref() is not None for ref in watched)
    gate.open()
    stream.synchronize()
    assert target.all()
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_a_failure_that_surfaced_keeps_no_array(device):
    stream, source = device.stream(), np.ones(3)
    watched = weakref.ref(source)

    def use(source=source):
        fail()

    stream.call(use)
    del use, source
    with pytest.raises(DeviceError):
        stream.synchronize()
    gc.collect()
    assert watched() is None


def test_a_thread_ends_with_its_stream_after_its_work(device):
    stream, seen = device.stream(), []
    gate = Gate().put_in(stream)
    stream.call(lambda: seen.append(1))
    (thread,) = [t for t in threading.enumerate() if t.name == stream.name]
    del stream
    gc.collect()
    gate.open()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert seen == [1]


def test_a_graph_leaves_no_threads(device):
    before = threading.active_count()
    main, side = device.stream(), device.stream()
    with main.capture() as graph:
        side.wait(main)
        side.call(lambda: None)
        main.wait(side)
    graph.launch(main)
    graph.launch()
    main.synchronize()
    del main, side, graph
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


# Copies ------------------------------------------------------------------------------------------

CUTS = {
    "contiguous": lambda a: a,
    "strided": lambda a: a[::2, :, 1:],
    "reversed": lambda a: a[::-1, :, ::-1],
    "transposed": lambda a: a.transpose(2, 0, 1),
    "empty": lambda a: a[:0],
    "scalar": lambda a: a[1, 2, 3],
}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.uint8])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("on_stream", [False, True], ids=["inline", "stream"])
def test_copy(device, dtype, cut, on_stream):
    rng = np.random.default_rng(0)
    stream = device.stream() if on_stream else None
    source = rng.integers(0, 255, (6, 4, 8)).astype(dtype)
    for dst_is_cut, src_is_cut in ((True, False), (False, True), (True, True)):
        base = np.zeros((6, 4, 8), dtype)
        whole = np.asarray(CUTS[cut](source))
        src = whole if src_is_cut else whole.copy()
        dst = np.asarray(CUTS[cut](base)) if dst_is_cut else np.zeros_like(whole)
        if cut == "scalar" and dst_is_cut:
            dst = base[1, 2, 3:4].reshape(())
        device.copy(dst, src, stream=stream)
        device.synchronize()
        assert np.array_equal(dst, whole), f"got {dst}, want {whole}"
        if dst_is_cut:
            assert np.count_nonzero(base) == np.count_nonzero(whole), "wrote outside"


def test_copy_overlapping_halves(device):
    array = np.arange(10)
    device.copy(array[2:], array[:-2])
    assert array.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]
    device.copy(array, array[::-1])
    assert array.tolist() == [7, 6, 5, 4, 3, 2, 1, 0, 1, 0]


def test_copy_refuses_what_does_not_fit(device):
    dst = np.zeros((2, 3), np.float32)
    for src in (
        np.ones((3, 2), np.float32),
        np.ones(6, np.float32),
        np.ones((2, 3), np.float64),
        np.ones((2, 3), np.int32),
    ):
        with pytest.raises(ValueError, match=r"^dst: expected \(.*got \(2, 3\) fp32"):
            device.copy(dst, src)
    with pytest.raises(TypeError, match=r"^src:"):
        device.copy(dst, 3.0)
    with pytest.raises(TypeError, match=r"^dst:"):
        device.copy([0.0], dst)
    assert not dst.any()
    dst.setflags(write=False)
    with pytest.raises(ValueError, match=r"^dst: expected a writable"):
        device.copy(dst, np.ones((2, 3), np.float32))
    assert not dst.any()


def test_memory(device):
    for make in (device.empty, device.zeros, device.empty_pinned):
        for shape in (0, 5, (3, 0, 2), (7, 33)):
            array = make(shape, "bf16")
            assert array.dtype == ml_dtypes.bfloat16
            assert array.shape == (shape if isinstance(shape, tuple) else (shape,))
            assert array.ctypes.data % 256 == 0 or array.size == 0
            array[...] = 1
    assert not device.zeros((100, 100), np.int16).any()
    source = np.arange(12).reshape(3, 4).T
    copy = device.asarray(source)
    assert np.array_equal(copy, source)
    assert not np.shares_memory(copy, source)


# Capture -----------------------------------------------------------------------------------------


def test_a_graph_reads_its_arrays_at_replay(device):
    stream = device.stream()
    source, target, seen = np.zeros(3), np.zeros(3), []
    with stream.capture() as graph:
        device.copy(target, source, stream=stream)
        stream.call(lambda: seen.append(target.sum()))
    assert seen == [] and stream.done(), "capturing runs nothing"
    for value in (1, 2, 3):
        source[...] = value
        graph.launch(stream)
        stream.synchronize()
        assert target.tolist() == [value] * 3
    assert seen == [3, 6, 9]


def test_launch_without_a_stream_returns_when_done(device):
    stream, seen = device.stream(), []
    with stream.capture() as graph:
        stream.call(lambda: (time.sleep(0.05), seen.append(1)))
    graph.launch()
    assert seen == [1]
    with stream.capture() as failing:
        stream.call(fail)
    with pytest.raises(DeviceError, match="luck"):
        failing.launch()
    graph.launch()
    assert seen == [1, 1]


def delayed(function, delay_s=0.02):
    return lambda: (time.sleep(delay_s), function())


def capture_fork_and_join(device, main, side, source, middle, target):
    """source -> middle on `main`, middle -> middle + 1 on `side`, -> target on `main`."""

    def add_one():
        middle[...] += 1

    with main.capture() as graph:
        main.call(delayed(lambda: np.copyto(middle, source)))
        side.wait(main)
        side.call(delayed(add_one))
        main.wait(side)
        device.copy(target, middle, stream=main)
    return graph


def test_fork_and_join_in_a_graph_keep_their_order(device):
    main, side, other = (device.stream() for _ in range(3))
    source, middle, target = np.zeros(1), np.zeros(1), np.zeros(1)
    graph = capture_fork_and_join(device, main, side, source, middle, target)
    assert not main.capturing and not side.capturing
    for value, stream in ((5, main), (6, side), (7, other), (8, None)):
        source[0], target[0] = value, 0
        graph.launch(stream)
        device.synchronize()
        assert target[0] == value + 1, f"launched on {stream}"


def test_the_lanes_of_a_graph_overlap(device):
    main, side, both = device.stream(), device.stream(), threading.Barrier(2)
    with main.capture() as graph:
        side.wait(main)
        side.call(lambda: both.wait(PATIENCE_S))
        main.call(lambda: both.wait(PATIENCE_S))
        main.wait(side)
    for _ in range(3):
        graph.launch(main)
    main.synchronize()


def test_a_fork_is_joined_through_others(device):
    """main -> a -> b, and back b -> a -> main."""
    main, a, b, seen = *(device.stream() for _ in range(3)), []
    with main.capture() as graph:
        main.call(lambda: seen.append("main"))
        a.wait(main)
        event = a.record()
        b.wait(event)
        b.call(delayed(lambda: seen.append("b")))
        a.wait(b)
        a.call(delayed(lambda: seen.append("a")))
        main.wait(a)
        main.call(lambda: seen.append("end"))
    graph.launch(main)
    main.synchronize()
    assert seen == ["main", "b", "a", "end"]


@pytest.mark.parametrize("where", ["one stream", "several streams"])
def test_replays_of_one_graph_do_not_overlap(device, where):
    main, side = device.stream(), device.stream()
    counter = {"main": 0, "side": 0}

    def count(name):
        seen = counter[name]
        time.sleep(0.002)
        counter[name] = seen + 1

    with main.capture() as graph:
        side.wait(main)
        side.call(lambda: count("side"))
        main.call(lambda: count("main"))
        main.wait(side)
    streams = [main, main] if where == "one stream" else [device.stream(), device.stream()]
    for repeat in range(20):
        graph.launch(streams[repeat % 2])
    device.synchronize()
    assert counter == {"main": 20, "side": 20}


def test_a_graph_is_in_the_order_of_its_stream(device):
    stream, seen = device.stream(), []
    with stream.capture() as graph:
        stream.call(delayed(lambda: seen.append("graph")))
    stream.call(delayed(lambda: seen.append("before")))
    graph.launch(stream)
    stream.call(lambda: seen.append("after"))
    stream.synchronize()
    assert seen == ["before", "graph", "after"]


def test_a_strict_host_launches_no_graph_into_a_capture(device, monkeypatch):
    """As CUDA, which gives up the capture."""
    monkeypatch.setattr(config, "_strict", True)
    stream, other, seen = device.stream(), device.stream(), []
    with stream.capture() as graph:
        stream.call(lambda: seen.append("graph"))
    refusal = pytest.raises(CaptureError, match=f"{other.name} is being captured: a graph")
    with other.capture() as outer, refusal:
        graph.launch(other)
    outer.launch(other)
    graph.launch(stream)
    device.synchronize()
    assert seen == ["graph"]


def test_a_graph_in_a_graph(device, monkeypatch):
    monkeypatch.setattr(config, "_strict", False)
    inner_stream, outer_stream, side = (device.stream() for _ in range(3))
    seen = []
    with inner_stream.capture() as inner:
        side.wait(inner_stream)
        side.call(delayed(lambda: seen.append("inner")))
        inner_stream.wait(side)
    with outer_stream.capture() as outer:
        outer_stream.call(lambda: seen.append("begin"))
        inner.launch(outer_stream)
        outer_stream.call(lambda: seen.append("end"))
    assert seen == []
    for _ in range(2):
        outer.launch(outer_stream)
    outer_stream.synchronize()
    assert seen == ["begin", "inner", "end"] * 2


def test_a_graph_keeps_its_arrays(device):
    stream, target = device.stream(), np.zeros(2)
    source = np.ones(2)
    watched = weakref.ref(source)
    with stream.capture() as graph:
        device.copy(target, source, stream=stream)
    del source
    gc.collect()
    assert watched() is not None
    graph.launch()
    assert target.all()
    del graph
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("where", ["main", "side"])
def test_a_failure_in_a_graph(device, where):
    """It surfaces where the graph was launched; the next replay is as good as new."""
    main, side, broken, seen = device.stream(), device.stream(), [True], []

    def maybe_fail():
        if broken[0]:
            fail()

    with main.capture() as graph:
        side.wait(main)
        (main if where == "main" else side).call(maybe_fail)
        main.wait(side)
        main.call(lambda: seen.append(1))
    for repeat in range(2):
        broken[0] = True
        graph.launch(main)
        with pytest.raises(DeviceError, match="luck"):
            main.synchronize()
        broken[0] = False
        graph.launch(main)
        main.synchronize()
        assert seen == [1] * (repeat + 1)


# What a capture forbids --------------------------------------------------------------------------


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
    "synchronising an event": lambda c: c.event.synchronize(),
    "asking whether an event is done": lambda c: c.event.done(),
    "waiting for an event outside streams": lambda c: c.device.as_stream(None).wait(c.event),
    "waiting for the stream outside streams": lambda c: c.device.as_stream(None).wait(c.main),
    "synchronising the device": lambda c: c.device.synchronize(),
    "a second capture": lambda c: c.main.capture().__enter__(),
    "a second capture of a forked stream": lambda c: c.side.capture().__enter__(),
    "launching the graph": lambda c: c.graph.launch(),
    "launching the graph into itself": lambda c: c.graph.launch(c.main),
    "launching the graph elsewhere": lambda c: c.graph.launch(c.other),
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

    def in_another_capture(self):
        with self.other.capture():
            self.other.wait(self.event)


@pytest.mark.parametrize("what", FORBIDDEN)
@pytest.mark.parametrize("caught", ["inside", "outside"])
def test_forbidden_in_a_capture(device, what, caught):
    """Refused; a capture that goes on all the same is whole, one that ends there is not launched.
    Either way all streams are usable afterwards."""
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
        c.graph.launch()
        assert c.seen == ["main", "side"]
        assert c.event.done()
    else:
        with pytest.raises(CaptureError):
            capture(lambda forbidden: forbidden())
        assert c.seen == []
        with pytest.raises(CaptureError):
            c.graph.launch(c.main)
    assert_usable(c.main, c.side, c.other)
    device.synchronize()


@pytest.mark.parametrize("work_after_join", [False, True])
def test_a_fork_must_be_joined(device, work_after_join):
    main, side, seen = device.stream(), device.stream(), []
    with pytest.raises(CaptureError, match=side.name), main.capture() as graph:
        side.wait(main)
        if work_after_join:
            main.wait(side)
        side.call(lambda: seen.append(1))
    with pytest.raises(CaptureError):
        graph.launch(main)
    assert seen == []
    assert_usable(main, side)


def test_an_event_joins_what_was_before_it_alone(device):
    main, side = device.stream(), device.stream()
    with pytest.raises(CaptureError), main.capture():
        side.wait(main)
        event = side.record()
        side.call(lambda: None)
        main.wait(event)
    with main.capture() as graph:
        side.wait(main)
        side.call(lambda: None)
        event = side.record()
        main.wait(event)
    graph.launch()
    assert_usable(main, side)


def test_an_exception_ends_a_capture(device):
    main, side, seen = device.stream(), device.stream(), []
    with pytest.raises(ZeroDivisionError), main.capture() as graph:
        main.call(lambda: seen.append(1))
        side.wait(main)
        1 / 0  # noqa: B018
    with pytest.raises(CaptureError):
        graph.launch(main)
    assert seen == []
    assert_usable(main, side)


def test_the_calling_thread_cannot_be_captured(device):
    with pytest.raises(CaptureError, match="stream"):
        device.as_stream(None).capture().__enter__()


def test_work_before_a_capture_is_not_part_of_it(device):
    stream, seen = device.stream(), []
    gate = Gate().put_in(stream)
    stream.call(lambda: seen.append("before"))
    with stream.capture() as graph:
        stream.call(lambda: seen.append("captured"))
    gate.open()
    stream.synchronize()
    assert seen == ["before"]
    graph.launch()
    assert seen == ["before", "captured"]


def test_streams_outside_go_on_during_a_capture(device):
    stream, other, seen = device.stream(), device.stream(), []
    with stream.capture():
        other.call(lambda: seen.append(1))
        other.synchronize()
        assert seen == [1]
        other.record().synchronize()
        assert other.done()


def test_an_event_of_a_capture_can_be_recorded_outside_again(device):
    stream, other = device.stream(), device.stream()
    event = device.event()
    with stream.capture():
        stream.record(event)
    gate = Gate().put_in(other)
    other.record(event)
    assert not event.done()
    gate.open()
    event.synchronize()


def test_a_stream_of_usual_priority_keeps_what_its_process_has(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "setpriority", lambda *arguments: asked.append(arguments[2]))
    device = HostDevice()
    for priority in (0, 5):
        stream = device.stream(priority)
        stream.call(lambda: None)
        stream.synchronize()
    assert asked == [5]


def test_streams_come_and_go_while_the_device_is_waited_for():
    """In other threads, and in finalizers: they change what `synchronize` looks at."""
    device, over = HostDevice(), threading.Event()

    def make_and_drop():
        while not over.is_set():
            device.stream().call(lambda: None)

    threads = [threading.Thread(target=make_and_drop) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        stop = time.monotonic() + 0.7
        while time.monotonic() < stop:
            device.synchronize()
    finally:
        sys.setswitchinterval(interval)
        over.set()
        for thread in threads:
            thread.join()
    device.synchronize()
    assert not device.context.dropped
