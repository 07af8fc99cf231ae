"""Host functions of a GPU: in the order of their stream, free of deadlocks, and what they hold."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
from fake_cuda import captured_by_another

from kvcupy import arrays
from kvcupy.devices import cuda, host_memory
from kvcupy.errors import CaptureError, DeviceError

PATIENCE_S = 60
PAGE = host_memory.PAGE_BYTES


@pytest.fixture
def device(api):
    return cuda.CudaDevice(0, api)


class Half:
    """A function that is in the middle of its work until the test lets it continue."""

    def __init__(self):
        self.entered, self.resume, self.ended = (threading.Event() for _ in range(3))

    def __call__(self):
        self.entered.set()
        assert self.resume.wait(PATIENCE_S)
        self.ended.set()


# --- Locks ---

ASKING = {
    "event": lambda d: d.stream().record().done(),
    "stream": lambda d: d.stream().done(),
    "address": lambda d: d.address(arrays.view(np.zeros(4))),
    "allocation": lambda d: d.empty(1000, "fp16"),
    "reap": lambda d: d.context.retired.reap(),
    "another device": lambda d: cuda.CudaDevice(1, d.context.api).empty(1000, "fp16"),
    "call": lambda d: d.stream().call(lambda: None),
}


@pytest.mark.parametrize("what", ASKING)
def test_cuda_can_be_asked_while_a_function_runs(api, device, what):
    """The query may hold the GIL, which the function needs."""
    stream, function = device.stream(), Half()
    device.run(lambda: None, device.stream(), (object(),))
    stream.call(function)
    gpu = api.machine.in_background(stream.pointer)
    assert function.entered.wait(PATIENCE_S)
    ASKING[what](device)
    function.resume.set()
    gpu.join(PATIENCE_S)
    assert function.ended.is_set()
    assert api.machine.deadlocks == []


# --- Order ---


def test_functions_are_called_one_at_a_time_on_a_thread_of_kvcupys(api, device):
    seen, running = [], threading.Lock()

    def function():
        assert running.acquire(blocking=False)
        time.sleep(0.001)
        seen.append(threading.current_thread().name)
        running.release()

    streams = [device.stream() for _ in range(4)]
    for stream in streams * 3:
        stream.call(function)
    device.synchronize()
    assert seen == ["kvcupy host functions, cuda:0"] * 12


# --- Captures ---


def test_another_librarys_capture_is_refused_before_anything_is_put_there(api, device):
    with captured_by_another(api) as foreign:
        stream = device.as_stream(foreign)
        with pytest.raises(CaptureError, match=r"only be captured by Stream\.capture"):
            stream.call(lambda: None)
        assert api.machine.capturing[foreign.ptr].nodes == []


def test_a_first_call_while_another_library_captures_spoils_nothing(api, device, tmp_path):
    """Nor does letting go of pinned memory; in the global mode much is prohibited."""
    near_the_gpu(api, tmp_path)
    stream, called = device.stream(), []
    with captured_by_another(api):
        stream.call(lambda: called.append(1))
        stream.synchronize()
        array = device.empty_pinned(PAGE, "int8")
        del array
    assert called == [1]
    assert len(unregistered(api)) == 1
    assert api.runtime.registered == {}


# --- What a function holds ---


def near_the_gpu(api, tmp_path):
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    (folder / "numa_node").write_text("0\n")
    api.pci_devices = tmp_path


def unregistered(api):
    return [entry[1] for entry in api.runtime.log if entry[0] == "unregister"]


@pytest.mark.parametrize("captured", [False, True])
def test_the_last_array_that_a_function_knows_is_released_by_another_thread(
    api, device, tmp_path, captured
):
    """Neither on a thread of the driver, where CUDA refuses it, nor on the one that calls."""
    near_the_gpu(api, tmp_path)
    stream, array, threads = device.stream(), device.empty_pinned(PAGE, "int8"), []
    pointer, unregister = array.ctypes.data, api.runtime.hostUnregister

    def watched(ptr):
        threads.append(threading.current_thread())
        unregister(ptr)

    api.runtime.hostUnregister = watched
    if captured:
        with stream.capture() as graph:
            stream.call(lambda a=array: a.fill(3))
        graph.launch(stream)
        graph = None
    else:
        stream.call(lambda a=array: a.fill(3))
    del array
    gc.collect()
    assert unregistered(api) == []
    api.machine.in_background(stream.pointer).join(PATIENCE_S)
    stream.synchronize()
    gc.collect()
    assert unregistered(api) == [pointer]
    assert threads == [threading.current_thread()]


def test_memory_that_the_collector_finds_meanwhile_is_released_elsewhere(api, device, tmp_path):
    """CUDA may wait for the device there, which waits for the function."""
    near_the_gpu(api, tmp_path)
    stream, released, threads = device.stream(), threading.Event(), []
    cycle = [device.empty_pinned(PAGE, "int8")]
    cycle.append(cycle)
    unregister = api.runtime.hostUnregister

    def watched(ptr):
        threads.append(threading.current_thread().name)
        unregister(ptr)
        released.set()

    api.runtime.hostUnregister = watched
    gc.disable()
    try:
        del cycle
        stream.call(gc.collect)
        stream.synchronize()
        assert released.wait(PATIENCE_S)
    finally:
        gc.enable()
    assert threads == ["kvcupy release"]


def test_words_are_used_again(api, device, monkeypatch):
    allocations, pinned = [], api.cupy.cuda.PinnedMemory
    api.cupy.cuda.PinnedMemory = lambda *a: allocations.append(a) or pinned(*a)
    stream, called = device.stream(), []
    for i in range(1500):
        stream.call(lambda i=i: called.append(i))
        if i % 100 == 0:
            stream.synchronize()
    stream.synchronize()
    assert called == list(range(1500))
    assert len(allocations) == 1


# --- Failures ---


def test_a_driver_without_stream_memory_operations_is_named(api, device):
    stream, called = device.stream(), []
    api.library.memory_operations = 801
    with pytest.raises(DeviceError, match="by stream memory operations: cudaError 801"):
        stream.call(lambda: called.append("refused"))
    api.library.memory_operations = 0
    stream.call(lambda: called.append("taken"))
    stream.synchronize()
    assert called == ["taken"]


def test_the_thread_ends_with_its_device(api):
    device = cuda.CudaDevice(0, api)
    stream = device.stream()
    stream.call(lambda: None)
    stream.synchronize()
    thread = device.context.calls._thread
    assert thread.is_alive()
    del device, stream
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def fail():
    raise ZeroDivisionError


def test_a_new_stream_has_no_failure_of_an_old_one(api, device):
    old = device.stream()
    old.call(fail)
    api.machine.progress(old.pointer)
    device.context.retired.reap()
    del old
    for _ in range(3):
        new = device.stream()
        new.synchronize()
        new.record().synchronize()
        assert new.done()
    with pytest.raises(DeviceError, match="ZeroDivisionError"):
        device.synchronize()


def test_a_point_before_a_function_has_not_failed_with_it(api, device):
    """Also where the host waits for the point when the failure is known already."""

    def fail():
        raise OSError("no such luck")

    stream = device.stream()
    before = stream.record()
    stream.call(fail)
    with device.context.current():
        api.runtime.streamSynchronize(stream.pointer)  # as another library does
    before.synchronize()
    with pytest.raises(DeviceError, match="no such luck"):
        stream.record().synchronize()
