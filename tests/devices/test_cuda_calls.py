"""Host functions of a GPU: in the order of their stream, free of deadlocks, and what they hold."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

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
    """A function that is in the middle of its work until it is let go on."""

    def __init__(self):
        self.entered, self.go_on, self.ended = (threading.Event() for _ in range(3))

    def __call__(self):
        self.entered.set()
        assert self.go_on.wait(PATIENCE_S)
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
    function.go_on.set()
    gpu.join(PATIENCE_S)
    assert function.ended.is_set()
    assert api.machine.deadlocks == []


def test_a_stream_may_be_full_while_it_waits_for_a_function(api, device):
    """Putting more work there waits for room in the queue, and the function waits for the GIL."""
    stream, function = device.stream(), Half()
    stream.call(function)
    gpu = api.machine.in_background(stream.pointer)
    assert function.entered.wait(PATIENCE_S)
    api.machine.room = len(api.machine.queues[stream.pointer])
    event = stream.record()
    device.run(lambda: None, stream, (object(),))
    assert not event.done()
    function.go_on.set()
    gpu.join(PATIENCE_S)
    event.synchronize()
    assert api.machine.deadlocks == []


def test_a_thread_that_has_no_context_yet_records_too(api, device, monkeypatch):
    """The driver by itself gives it none."""
    stream, record = device.stream(), api.library.cuEventRecord
    monkeypatch.setattr(api.library, "cuEventRecord", lambda event, stream: 201)
    event = stream.record()
    assert not event.done()
    monkeypatch.setattr(api.library, "cuEventRecord", record)
    event.synchronize()
    assert event.done()


def test_a_function_may_ask_cuda(api, device):
    """It is on no thread of the driver."""
    event, stream, seen = device.stream().record(), device.stream(), []
    event.synchronize()
    stream.call(lambda: seen.append(event.done()))
    stream.synchronize()
    assert seen == [True]


# --- Order ---


def test_it_is_called_behind_the_work_before_it_and_before_the_work_behind_it(api, device):
    stream = device.stream()
    source, middle, target = (device.empty_pinned(8, "int8") for _ in range(3))
    source[:], middle[:], target[:] = 1, 0, 0
    seen = []
    device.copy(middle, source, stream=stream)
    stream.call(lambda: seen.append(middle.tolist()) or middle.fill(2))
    device.copy(target, middle, stream=stream)
    assert (seen, target.tolist()) == ([], [0] * 8)
    stream.synchronize()
    assert (seen, target.tolist()) == ([[1] * 8], [2] * 8)


def test_functions_of_a_stream_are_called_in_order_and_once(device):
    stream, seen = device.stream(), []
    for i in range(50):
        stream.call(lambda i=i: seen.append(i))
    stream.synchronize()
    assert seen == list(range(50))


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


def test_a_function_surfaces_at_its_own_stream_and_the_next_one_is_called(device):
    first, second, seen = device.stream(), device.stream(), []
    first.call(lambda: 1 / 0)
    first.call(lambda: seen.append("called"))
    second.call(lambda: None)
    second.synchronize()
    with pytest.raises(DeviceError, match=r"host function <lambda> on cuda:0 .*ZeroDivisionError"):
        first.synchronize()
    first.synchronize()
    assert seen == ["called"]


def test_the_default_stream_of_a_gpu_that_is_not_current_is_that_gpus(api):
    second, seen = cuda.CudaDevice(1, api), []
    stream = cuda.Stream(second.context, 0)
    stream.call(lambda: seen.append(threading.current_thread().name))
    assert api.runtime.current == 0
    assert not api.machine.queues.get(0)
    stream.synchronize()
    assert seen == ["kvcupy host functions, cuda:1"]


# --- Captures ---


def test_a_captured_function_is_called_at_each_replay(device):
    stream, target, called = device.stream(), device.stream(), []
    with stream.capture() as graph:
        stream.call(lambda: called.append(threading.current_thread().name) or 1 / 0)
    stream.synchronize()
    assert called == []
    for i in range(3):
        graph.launch(target)
        stream.synchronize()
        with pytest.raises(DeviceError, match="ZeroDivisionError"):
            target.synchronize()
        assert len(called) == i + 1


def test_a_graph_keeps_its_functions_and_lets_go_of_them(device):
    def function():
        called.append(1)

    stream, called = device.stream(), []
    gone = weakref.ref(function)
    with stream.capture() as graph:
        stream.call(function)
    del function
    gc.collect()
    graph.launch(stream)
    stream.synchronize()
    assert called == [1]
    device.context.retired.reap()
    del graph
    gc.collect()
    assert gone() is None


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


def owner_of(array):
    while isinstance(array, np.ndarray):
        array = array.base
    return array.owner


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


def test_a_function_is_held_until_its_stream_has_passed(device):
    def function():
        pass

    stream, gone = device.stream(), weakref.ref(function)
    stream.call(function)
    del function
    device.context.retired.reap()
    assert gone() is not None
    stream.synchronize()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("near", [False, True])
def test_memory_that_the_collector_finds_meanwhile_is_released_elsewhere(
    api, device, tmp_path, near
):
    """CUDA may wait for the device there, which waits for the function."""
    if near:
        near_the_gpu(api, tmp_path)
    stream, threads = device.stream(), []
    cycle = [device.empty_pinned(PAGE, "int8")]
    cycle.append(cycle)
    owner = weakref.ref(owner_of(cycle[0]))
    weakref.finalize(owner(), lambda: threads.append("found"))
    unregister = api.runtime.hostUnregister
    api.runtime.hostUnregister = lambda ptr: (
        threads.append(threading.current_thread().name) or unregister(ptr)
    )
    gc.disable()
    try:
        del cycle
        stream.call(gc.collect)
        stream.synchronize()
        assert owner() is None
        until = time.monotonic() + PATIENCE_S
        while near and len(threads) < 2 and time.monotonic() < until:
            time.sleep(0.001)
        assert threads == (["found", "kvcupy release"] if near else ["found"])
    finally:
        gc.enable()


# --- Words ---


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


def test_more_functions_may_be_in_flight_than_there_are_words_at_first(device):
    stream, called = device.stream(), []
    for i in range(1100):
        stream.call(lambda i=i: called.append(i))
    stream.synchronize()
    assert called == list(range(1100))


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


def test_a_driver_that_is_too_old_is_named(api, device):
    class Old:
        pass

    api.library = Old()
    with pytest.raises(DeviceError, match=r"Stream\.call needs a driver of CUDA 11\.7 or newer"):
        device.stream().call(lambda: None)


def test_a_lost_device_is_a_device_error(api, device):
    api.runtime.fault = 700
    with pytest.raises(DeviceError):
        cuda.Stream(device.context, 0).call(lambda: None)


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


def test_functions_run_before_python_ends():
    """A stream would wait for them for ever."""
    program = """
from fake_cuda import FakeApi
from kvcupy.devices import cuda
api = FakeApi(late=True)
stream = cuda.CudaDevice(0, api).stream()
stream.call(lambda: print("called", flush=True))
print("ending", flush=True)
"""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent.parent)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["ending", "called"]), done.stderr
