"""Copies of runs on the host device, failures as its events report them, and its model name."""

from __future__ import annotations

import gc
import platform
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from kvcupy import arrays
from kvcupy.arrays import ArrayView
from kvcupy.devices import host, host_memory
from kvcupy.devices.host import HostDevice
from kvcupy.errors import DeviceError

PATIENCE_S = 60
WAYS = ["inline", "stream"]


@pytest.fixture
def device():
    return HostDevice()


def stream_for(device, way):
    return device.as_stream(None) if way == "inline" else device.stream()


class Pieces:
    """Parts of `src` that go to `dst` in reverse order, a byte apart, among bytes that stay."""

    def __init__(self, sizes=(3, 0, 1, 40, 17)):
        self.sizes = np.array(sizes, np.uint64)
        self.src = np.arange(1, 1 + sum(sizes), dtype=np.uint8)
        self.dst = np.zeros(sum(sizes) + len(sizes), np.uint8)
        self.starts = np.cumsum([0, *sizes], dtype=np.uint64)[:-1]
        reverse = np.array([0, *(n + 1 for n in sizes[:0:-1])], np.uint64)
        self.places = np.cumsum(reverse, dtype=np.uint64)[: len(sizes)][::-1]

    @property
    def runs(self):
        to = np.uint64(self.dst.ctypes.data) + self.places
        return to, np.uint64(self.src.ctypes.data) + self.starts, self.sizes

    def check(self):
        expected = np.zeros_like(self.dst)
        for to, of, size in zip(self.places, self.starts, self.sizes, strict=True):
            expected[int(to) : int(to + size)] = self.src[int(of) : int(of + size)]
        assert np.count_nonzero(expected) == len(self.src), "the pieces lie apart"
        np.testing.assert_array_equal(self.dst, expected)


class Gate:
    """Holds up a stream until it is opened."""

    def __init__(self, stream):
        self._open = threading.Event()
        stream.call(self._wait)

    def _wait(self):
        if not self._open.wait(PATIENCE_S):
            raise TimeoutError("the gate was never opened")

    def open(self):
        self._open.set()


def fail():
    raise OSError("no such luck")


# --- Copies ---


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [(3, 0, 1, 40, 17), (5,), (0, 0), (), (1,) * 200])
def test_runs_are_copied_exactly(device, way, sizes):
    pieces, stream = Pieces(sizes), stream_for(device, way)
    device.copy_runs(*pieces.runs, stream, (pieces.src, pieces.dst))
    if way == "stream":
        stream.synchronize()
    pieces.check()


def test_strided_lists_of_runs(device):
    pieces = Pieces()
    apart = [np.repeat(array, 2)[::2] for array in pieces.runs]
    device.copy_runs(*apart, device.as_stream(None))
    pieces.check()


def test_on_a_stream_runs_wait_their_turn_and_the_lists_may_change(device):
    pieces, stream = Pieces(), device.stream()
    gate = Gate(stream)
    lists = [array.copy() for array in pieces.runs]
    device.copy_runs(*lists, stream)
    for array in lists:
        array[...] = 0
    assert not pieces.dst.any()
    assert not stream.done()
    gate.open()
    stream.synchronize()
    pieces.check()


def test_runs_are_in_order_among_other_work(device):
    pieces, stream, seen = Pieces(), device.stream(), []
    device.copy_runs(*pieces.runs, stream)
    stream.call(lambda: seen.append(pieces.dst.copy()))
    stream.call(lambda: pieces.dst.fill(0))
    device.copy_runs(*pieces.runs, stream)
    stream.synchronize()
    pieces.check()
    np.testing.assert_array_equal(seen[0], pieces.dst)


def test_owners_live_until_the_copies_are_done_and_no_longer(device):
    pieces, stream = Pieces(), device.stream()
    gate, gone = Gate(stream), weakref.ref(pieces.src)
    device.copy_runs(*pieces.runs, stream, (pieces.src,))
    pieces.src = None
    gc.collect()
    assert gone() is not None
    gate.open()
    stream.synchronize()
    stream.call(lambda: None)
    stream.synchronize()
    assert gone() is None


def test_after_a_failure_nothing_is_copied_until_it_has_surfaced(device):
    pieces, stream = Pieces(), device.stream()
    stream.call(fail)
    device.copy_runs(*pieces.runs, stream)
    with pytest.raises(DeviceError, match="luck"):
        stream.synchronize()
    assert not pieces.dst.any()
    device.copy_runs(*pieces.runs, stream)
    stream.synchronize()
    pieces.check()


def test_a_copy_that_fails_is_a_device_error(device, monkeypatch):
    def refuse(*_):
        raise MemoryError("no room")

    pieces, stream = Pieces(), device.stream()
    monkeypatch.setattr(host_memory.ctypes, "memmove", refuse)
    device.copy_runs(*pieces.runs, stream)
    event = stream.record()
    with pytest.raises(DeviceError, match="no room"):
        stream.synchronize()
    assert isinstance(event.error(), MemoryError)
    with pytest.raises(MemoryError):
        device.copy_runs(*pieces.runs, device.as_stream(None))


def test_captured_runs_are_copied_at_each_replay(device):
    pieces, stream = Pieces(), device.stream()
    with stream.capture() as graph:
        device.copy_runs(*pieces.runs, stream, (pieces.src, pieces.dst))
    assert not pieces.dst.any()
    for _ in range(2):
        pieces.src[...] = pieces.src[::-1].copy()
        graph.launch(stream)
        stream.synchronize()
        pieces.check()


@pytest.mark.parametrize("way", WAYS)
def test_lists_that_are_no_runs_are_refused_at_once(device, way):
    good, stream = np.zeros(3, np.uint64), stream_for(device, way)
    with pytest.raises(TypeError, match="src: expected a NumPy array of uint64, got int64"):
        device.copy_runs(good, good.astype(np.int64), good, stream)
    with pytest.raises(TypeError, match=r"dst: .* got list"):
        device.copy_runs([0], good, good, stream)
    with pytest.raises(ValueError, match=r"sizes: expected shape \(3,\), got \(4,\)"):
        device.copy_runs(good, good, np.zeros(4, np.uint64), stream)
    with pytest.raises(ValueError, match=r"dst: expected shape \(runs,\), got \(\)"):
        device.copy_runs(np.zeros((), np.uint64), good, good, stream)
    stream.synchronize()


# --- What events tell of failures ---


def test_an_event_knows_the_failure_before_it_though_it_surfaced(device):
    stream = device.stream()
    before = stream.record()
    stream.call(fail)
    behind = stream.record()
    with pytest.raises(DeviceError):
        stream.synchronize()
    for _ in range(2):
        assert isinstance(behind.error(), OSError)
    assert before.error() is None
    after = stream.record()
    stream.synchronize()
    assert after.error() is None
    assert isinstance(behind.error(), OSError), "it stays, whatever comes later"


def test_work_that_was_skipped_behind_a_failure_is_told_of_too(device):
    """Two transfers of one stream: waiting for the second reveals that it never happened."""
    pieces, stream = Pieces(), device.stream()
    gate = Gate(stream)
    stream.call(fail)
    first = stream.record()
    device.copy_runs(*pieces.runs, stream)
    second = stream.record()
    gate.open()
    with pytest.raises(DeviceError):
        first.synchronize()
    second.synchronize()  # says nothing: the failure has surfaced
    assert not pieces.dst.any()
    assert second.error() is first.error() is not None


def test_a_failure_is_told_of_through_other_streams(device):
    stream, other = device.stream(), device.stream()
    gate = Gate(stream)
    stream.call(fail)
    other.wait(stream)
    event = other.record()
    assert event.error() is None
    gate.open()
    with pytest.raises(DeviceError):
        other.synchronize()
    assert isinstance(event.error(), OSError)


def test_an_event_that_has_not_passed_has_no_error_and_does_not_wait(device):
    stream = device.stream()
    gate = Gate(stream)
    stream.call(fail)
    event = stream.record()
    assert event.error() is None  # had it waited, for a gate that nobody opened
    gate.open()
    with pytest.raises(DeviceError):
        event.synchronize()
    assert isinstance(event.error(), OSError)
    stream.record(event)
    stream.synchronize()
    assert event.error() is None, "recorded again, it is another point"


def test_events_that_never_were_or_are_inline_or_captured_have_no_error(device):
    assert device.event().error() is None
    assert device.as_stream(None).record().error() is None
    stream = device.stream()
    stream.call(fail)
    event = stream.record()
    with pytest.raises(DeviceError):
        event.synchronize()
    with stream.capture():
        stream.record(event)
        assert event.error() is None
    assert event.error() is None


# --- What the device says of memory and of itself ---


def test_addresses(device):
    array = np.arange(12).reshape(3, 4)[1:, ::-1]
    view = arrays.view(array)
    assert device.address(view) == array.__array_interface__["data"][0]
    pinned = device.empty_pinned(4, "fp32")
    assert device.address(arrays.view(pinned)) == pinned.ctypes.data
    assert device.address(ArrayView(0x1000, (4,), (2,), "fp16", "cuda:0")) is None


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


def test_the_device_has_that_model(device):
    assert device.model == host.processor_name(Path("/proc/cpuinfo"))
    assert device.model
