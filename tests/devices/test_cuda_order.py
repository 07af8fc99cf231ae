"""The order checker on a GPU, through the stand-in: what is special there.

`order/test_on_cuda.py` runs the tests of the checker on it.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from fake_cuda import RELAXED, busy, captured_by_another

import kvcupy as kv
from kvcupy import devices, observe
from kvcupy.arrays import view
from kvcupy.devices import cuda


@pytest.fixture
def device(api, monkeypatch):
    device = cuda.CudaDevice(0, api)
    monkeypatch.setitem(devices._devices, "cuda:0", device)
    return device


@pytest.fixture
def streams(device):
    return device.stream(), device.stream()


@pytest.fixture
def arrays(device):
    return device.zeros((4, 2), np.float32), device.empty_pinned((4, 2), np.float32)


def kinds(checker):
    return [report.kind for report in checker.reports]


def test_reading_results_waits_for_one_stream_alone(device, streams, arrays):
    (main, _), (x, pinned) = streams, arrays
    with kv.order_checker("record") as checker:
        device.copy(x, pinned, stream=main)
        device.to_numpy(x)
        device.as_stream(None).wait(main)
        device.to_numpy(x)
    assert kinds(checker) == ["RAW"]


def test_streams_of_other_libraries_are_known_by_their_address(device, streams, arrays):
    """Every call makes a new wrapper of such a stream."""
    (main, other), (x, pinned) = streams, arrays

    class Foreign:
        def __cuda_stream__(self):
            return (0, main.pointer)

    with kv.order_checker() as checker:
        device.copy(x, pinned, stream=Foreign())
        device.copy(x, pinned, stream=main)
        with kv.declare(writes=x, stream=Foreign()):
            pass
        other.wait(cuda.Stream(main.context, main.pointer))
        device.copy(pinned, x, stream=other)
    assert checker.reports == []


def test_another_librarys_capture_is_left_alone(api, device, streams, arrays):
    (main, other), (x, pinned) = streams, arrays
    with kv.order_checker() as checker:
        with captured_by_another(api, main.cupy, RELAXED):
            device.copy(x, pinned, stream=main)
        device.copy(pinned, x, stream=other)
    assert checker.reports == []


def test_the_default_stream_has_two_handles(device, arrays):
    x, pinned = arrays
    legacy = [cuda.Stream(device.context, pointer) for pointer in (0, 1)]
    assert legacy[0].identity == legacy[1].identity
    with kv.order_checker() as checker:
        for stream in legacy:
            device.copy(x, pinned, stream=stream)
    assert checker.reports == []


def test_slots_are_read_without_the_lock(api, device, streams, arrays):
    """The current stream may be in a host function that announces something."""
    (main, _), (x, pinned) = streams, arrays
    slots, ran, delayed = device.asarray(np.array([1, 2])), [], threading.Event()
    current = device.as_stream(None, "cupy")

    def function():
        delayed.wait(0.05)  # by now the caller reads the slots
        with kv.declare(reads=pinned):
            ran.append(True)

    def write():
        access = observe.Access(view(x), view(slots))
        observe.issue(lambda: observe.Operation("write", main, (), (access,)), lambda: None)

    with kv.order_checker() as checker:
        write()
        current.call(function)
        thread = api.machine.in_background(current.pointer)
        write()
        thread.join(10)
    assert ran == [True] and checker.reports == [] and checker.unresolved == 0


def test_slots_are_not_waited_for_long(api, device, streams, arrays):
    """A stream that the caller holds up would be waited for in vain."""
    (main, _), (x, _) = streams, arrays
    slots = device.asarray(np.array([1, 2]))
    with kv.order_checker() as checker, busy(api, device.as_stream(None, "cupy")):
        access = observe.Access(view(x), view(slots))
        observe.issue(lambda: observe.Operation("write", main, (), (access,)), lambda: None)
    assert checker.unresolved == 1


def test_a_new_stream_is_not_an_old_one_with_its_address(api, device, streams, arrays):
    x, pinned = arrays
    with kv.order_checker("record") as checker:
        old = device.stream()
        device.copy(x, pinned, stream=old)
        api.machine.progress()  # which nothing tells the host
        device.context.retired.reap()
        pointer = old.pointer
        del old
        new = device.stream()
        assert new.pointer == pointer
        device.copy(pinned, x, stream=new)
    assert kinds(checker) == ["RAW", "WAR"]


def test_a_stream_of_cupy_is_not_a_dropped_one_with_its_address(api, device, arrays):
    """CuPy destroys the stream of an object that is dropped, and nothing tells kvcupy."""
    x, pinned = arrays
    with kv.order_checker("record") as checker:
        old = api.cupy.cuda.Stream()
        device.copy(x, pinned, stream=old)
        device.copy(x, pinned, stream=cuda.Stream(device.context, old.ptr))  # the same
        assert checker.reports == []
        api.machine.progress()  # which nothing tells the host
        device.context.retired.reap()
        pointer = old.ptr
        del old
        new = api.cupy.cuda.Stream()
        assert new.ptr == pointer
        device.copy(pinned, x, stream=new)
    assert kinds(checker) == ["RAW", "WAR"]


def test_wrappers_that_others_make_of_one_stream_are_the_same(api, device, streams, arrays):
    """Such as `torch.cuda.current_stream()`: a wrapper may end before its stream."""
    (main, _), (x, pinned) = streams, arrays
    with kv.order_checker() as checker:
        for _ in range(2):
            device.copy(x, pinned, stream=api.cupy.cuda.Stream.from_external(main))
    assert checker.reports == []
