"""Streams of the host device: their threads, failures and graphs (see test_device_streams.py)."""

from __future__ import annotations

import gc
import platform
import sys
import threading
import time

import numpy as np
import pytest
from stream_cases import PATIENCE_S, Gate

from kvcupy.devices import host
from kvcupy.devices.host import HostDevice
from kvcupy.errors import DeviceError


@pytest.fixture
def device():
    return HostDevice()


def fail():
    raise OSError("no such luck")


# Signal handlers ---------------------------------------------------------------------------------


def test_a_handler_may_query_the_stream_that_it_interrupts(device):
    """At every line of the calls: a trace function takes the place of the signal."""
    stream, lines = device.stream(), set()

    def trace(frame, event, argument):
        if frame.f_code.co_filename.endswith("host_streams.py"):
            lines.add(frame.f_lineno)
            stream.done()
            return trace
        return None

    def call():
        stream.call(lambda: None)
        sys.settrace(trace)
        try:
            stream.done()
            stream.synchronize()
            stream.forgive()
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and len(lines) > 15


def test_an_interrupt_while_the_thread_starts(device, monkeypatch):
    """The stream keeps its order: a second thread does not work at the same time."""
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        raise KeyboardInterrupt

    stream, order = device.stream(), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.call(lambda: order.append(0))
    gate = Gate(stream)
    stream.call(lambda: order.append(1))
    time.sleep(0.05)
    assert order == []
    gate.open()
    stream.synchronize()
    assert order == [1]


# Order -------------------------------------------------------------------------------------------


def test_a_failure_on_no_stream_is_raised_at_once(device):
    with pytest.raises(OSError, match="luck"):
        device.as_stream(None).call(fail)
    device.synchronize()


# Events ------------------------------------------------------------------------------------------


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


# Failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["stream", "event", "device", "no stream"])
def test_nothing_runs_between_a_failure_and_its_surfacing(device, wait):
    """What was queued before it surfaced is skipped, even if the stream only gets there later."""
    stream, seen = device.stream(), []
    target = np.zeros(4)
    stream.call(fail)
    event = stream.record()
    stream.call(lambda: seen.append("between"))
    device.copy(target, np.ones(4), stream=stream)
    gate = Gate(stream)
    stream.call(lambda: seen.append("late"))
    ways = {
        "stream": stream.synchronize,
        "event": event.synchronize,
        "device": device.synchronize,
        "no stream": lambda: device.as_stream(None).wait(stream),
    }
    with pytest.raises(DeviceError):
        ways[wait]()
    gate.open()
    stream.call(lambda: seen.append("after"))
    stream.synchronize()
    assert seen == ["after"]
    assert not target.any()


def test_done_raises_a_failure_which_has_not_surfaced_then(device):
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
    gate = Gate(first)
    first.call(fail)
    second.wait(first if through == "stream" else first.record())
    second.call(lambda: seen.append("second"))
    third.wait(second)
    third.call(lambda: seen.append("third"))
    gate.open()
    for stream in (third, second, first):  # each has skipped work
        with pytest.raises(DeviceError, match="luck"):
            stream.synchronize()
        stream.synchronize()
    assert seen == []
    second.wait(first)
    second.call(lambda: seen.append("again"))
    device.synchronize()
    assert seen == ["again"]


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


def test_a_thread_ends_with_its_stream_after_its_work(device):
    stream, seen = device.stream(), []
    gate = Gate(stream)
    stream.call(lambda: seen.append(1))
    (thread,) = [t for t in threading.enumerate() if t.name == stream.name]
    del stream
    gc.collect()
    gate.open()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert seen == [1]


# Copies ------------------------------------------------------------------------------------------


def test_copy_overlapping_halves(device):
    array = np.arange(10)
    device.copy(array[2:], array[:-2])
    assert array.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]
    device.copy(array, array[::-1])
    assert array.tolist() == [7, 6, 5, 4, 3, 2, 1, 0, 1, 0]


# Capture -----------------------------------------------------------------------------------------


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


def test_an_interrupt_as_a_stream_is_dropped(device):
    """It is still drained, though its thread was not told to end."""
    stream, done = device.stream(), []
    stream.call(lambda: done.append(1))
    state = stream._state
    state.dropped.add(state)  # as far as `_drop` came
    waiting = threading.Thread(target=device.synchronize, daemon=True)
    waiting.start()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive() and done and not state.dropped


# Events after failures ----------------------------------------------------------------------------


def test_an_event_knows_the_failure_before_it_though_it_surfaced(device):
    stream = device.stream()
    before = stream.record()
    stream.call(fail)
    failed = stream.record()
    with pytest.raises(DeviceError):
        stream.synchronize()
    for _ in range(2):
        assert isinstance(failed.error(), OSError)
    assert before.error() is None
    after = stream.record()
    stream.synchronize()
    assert after.error() is None
    assert isinstance(failed.error(), OSError), "it stays, whatever comes later"


# --- What the device says of memory and of itself ---


def test_the_model_is_what_the_system_calls_the_processor(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 17\nmodel name\t: A Processor: 9000 @ 2 GHz\n\n")
    assert host.processor_name(cpuinfo) == "A Processor: 9000 @ 2 GHz"
    monkeypatch.setattr(platform, "machine", lambda: "machine")
    for processor, expected in (("processor", "processor"), ("", "machine")):
        monkeypatch.setattr(platform, "processor", lambda processor=processor: processor)
        for text in ("processor\t: 0\nBogoMIPS\t: 50\n", "model name\t:\n"):
            cpuinfo.write_text(text)
            assert host.processor_name(cpuinfo) == expected
        assert host.processor_name(tmp_path / "missing") == expected
