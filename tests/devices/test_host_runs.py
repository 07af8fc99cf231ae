"""Failures of the host device as its copies and events report them; addresses; its model name."""

from __future__ import annotations

import platform

import numpy as np
import pytest
from stream_cases import Gate
from test_device_runs import Pieces

from kvcupy import arrays
from kvcupy.arrays import ArrayView
from kvcupy.devices import host, host_memory
from kvcupy.devices.host import HostDevice
from kvcupy.errors import DeviceError


@pytest.fixture
def device():
    return HostDevice()


def fail():
    raise OSError("no such luck")


# --- Copies ---


def test_a_copy_that_fails_is_a_device_error(device, monkeypatch):
    def refuse(*_):
        raise MemoryError("no room")

    pieces, stream = Pieces(device), device.stream()
    monkeypatch.setattr(host_memory.ctypes, "memmove", refuse)
    pieces.enqueue(stream)
    event = stream.record()
    with pytest.raises(DeviceError, match="no room"):
        stream.synchronize()
    assert isinstance(event.error(), MemoryError)
    with pytest.raises(MemoryError):
        pieces.enqueue(device.as_stream(None))


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
    pieces, stream = Pieces(device), device.stream()
    gate = Gate(stream)
    stream.call(fail)
    first = stream.record()
    pieces.enqueue(stream)
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
