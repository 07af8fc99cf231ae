"""The stand-in for CUDA: that it refuses, delays and reuses as CUDA and CuPy do."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from fake_cuda import (
    GLOBAL,
    RELAXED,
    THREAD_LOCAL,
    CudaError,
    Deadlock,
    OutOfMemoryError,
    captured_by_another,
)

from kvcupy.arrays import array_at


def stream(api, non_blocking=True):
    return api.cupy.cuda.Stream(non_blocking=non_blocking)


def refusal(call, *arguments):
    """Return the status with which a call is refused; 0 if it is not."""
    try:
        return call(*arguments) or 0
    except CudaError as error:
        return error.status


def in_a_thread(work):
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def pinned(api, values):
    """Return pinned memory with the bytes of an array."""
    memory = api.cupy.cuda.PinnedMemory(values.nbytes, 3)
    array = array_at(memory, memory.ptr, values.shape, values.dtype)
    array[...] = values
    return array


class Buffers:
    """Two blocks of pinned memory, and copies from one to the other."""

    def __init__(self, api):
        self.src, self.dst = (
            pinned(api, np.full(8, 7, np.uint8)),
            pinned(api, np.zeros(8, np.uint8)),
        )

    def copy(self, api, on):
        api.runtime.memcpyAsync(self.dst.ctypes.data, self.src.ctypes.data, 8, 4, on.ptr)

    @property
    def copied(self):
        return self.dst[0] == 7


# --- Late work ---


def test_work_is_done_when_its_stream_is_waited_for(api):
    on, other, copy = stream(api), stream(api), Buffers(api)
    copy.copy(api, on)
    event = api.runtime.eventCreateWithFlags(2)
    api.runtime.eventRecord(event, on.ptr)
    assert (api.runtime.streamQuery(on.ptr), api.runtime.eventQuery(event)) == (600, 600)
    api.runtime.streamSynchronize(other.ptr)
    assert not copy.copied
    api.runtime.eventSynchronize(event)
    assert copy.copied
    assert (api.runtime.streamQuery(on.ptr), api.runtime.eventQuery(event)) == (0, 0)


def test_a_wait_puts_the_work_of_another_stream_first(api):
    first, second, copy, event = stream(api), stream(api), Buffers(api), 0
    copy.copy(api, first)
    api.runtime.eventRecord(event := api.runtime.eventCreateWithFlags(2), first.ptr)
    api.runtime.streamWaitEvent(second.ptr, event)
    api.runtime.streamSynchronize(second.ptr)
    assert copy.copied


@pytest.mark.parametrize("non_blocking", [False, True])
def test_the_legacy_stream_waits_for_blocking_streams_alone(api, non_blocking):
    on, copy = stream(api, non_blocking), Buffers(api)
    copy.copy(api, on)
    api.runtime.eventRecord(api.runtime.eventCreateWithFlags(2), 0)
    api.runtime.streamSynchronize(0)
    assert copy.copied != non_blocking


def test_captured_work_is_done_by_the_graph(api):
    on, copy = stream(api), Buffers(api)
    on.begin_capture()
    copy.copy(api, on)
    graph = on.end_capture()
    api.runtime.deviceSynchronize()
    assert not copy.copied
    for _ in range(2):
        copy.dst[:] = 0
        graph.launch(on)
        assert not copy.copied
        api.runtime.streamSynchronize(on.ptr)
        assert copy.copied


# --- Memory ---


def test_a_freed_block_is_handed_out_again_on_the_stream_of_its_allocation(api):
    cupy, on = api.cupy, stream(api)
    array = cupy.empty((100,), np.uint8)
    pointer = array.data.ptr
    del array
    with on:
        assert cupy.empty((100,), np.uint8).data.ptr != pointer
    assert cupy.empty((77,), np.uint8).data.ptr == pointer


def test_a_block_that_is_freed_too_early_shows_as_wrong_bytes(api):
    """A control: what the device must prevent, done by hand."""
    on, got = stream(api), pinned(api, np.zeros(100, np.uint8))
    api.cupy.empty((100,), np.uint8).fill(1)  # loads the kernel, for which the driver waits
    array = api.cupy.zeros((100,), np.uint8)
    api.runtime.streamSynchronize(0)
    api.runtime.memcpyAsync(got.ctypes.data, array.data.ptr, 100, 4, on.ptr)
    del array
    api.cupy.empty((100,), np.uint8).fill(99)
    api.runtime.streamSynchronize(0)
    api.runtime.streamSynchronize(on.ptr)
    assert got[0] == 99


def test_memory_ends(api):
    api.runtime.limit_bytes = 4096
    kept = api.cupy.empty((2048,), np.uint8)
    with pytest.raises(OutOfMemoryError, match="4,096"):
        api.cupy.empty((4000,), np.uint8)
    assert api.runtime.memGetInfo() == (2048, 4096)
    assert kept.nbytes == 2048


# --- Devices and handles ---


def test_handles_of_default_streams_mean_the_current_device(api):
    copy, event = Buffers(api), api.runtime.eventCreateWithFlags(2)
    with api.cupy.cuda.Device(1):
        copy.copy(api, api.cupy.cuda.get_current_stream())
        assert refusal(api.runtime.eventRecord, event, 0) == 400
    api.runtime.streamSynchronize(0)
    assert not copy.copied
    with api.cupy.cuda.Device(1):
        api.runtime.streamSynchronize(1)
    assert copy.copied
    assert in_a_thread(api.runtime.getDevice) == 0


def test_a_launch_needs_the_device_of_its_stream(api):
    on = stream(api)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(ctypes.c_uint64()))
    launch = (0xF00, 1, 1, 1, 1, 1, 1, 0, on.ptr, ctypes.addressof(arguments), 0)
    with api.cupy.cuda.Device(1):
        assert refusal(api.driver.launchKernel, *launch) == 400
    assert refusal(api.driver.launchKernel, *launch) == 0


# --- Captures ---


def unsafe_calls(api):
    event, on = api.runtime.eventCreateWithFlags(2), stream(api)
    return {
        "malloc": lambda: api.runtime.malloc(8) and 0,
        "event": lambda: api.runtime.eventQuery(event),
        "stream": lambda: api.runtime.streamQuery(on.ptr),
        "wait": lambda: api.runtime.streamSynchronize(on.ptr),
    }


@pytest.mark.parametrize("call", ["malloc", "event", "stream", "wait"])
@pytest.mark.parametrize(
    ("mode", "thread_mode", "same_thread", "refused"),
    [
        (GLOBAL, GLOBAL, True, True),
        (GLOBAL, GLOBAL, False, True),
        (GLOBAL, THREAD_LOCAL, True, True),
        (GLOBAL, THREAD_LOCAL, False, False),
        (GLOBAL, RELAXED, True, False),
        (GLOBAL, RELAXED, False, False),
        (THREAD_LOCAL, GLOBAL, True, True),
        (THREAD_LOCAL, GLOBAL, False, False),
        (RELAXED, GLOBAL, True, False),
        (RELAXED, GLOBAL, False, False),
    ],
)
def test_unsafe_calls_and_modes(api, call, mode, thread_mode, same_thread, refused):
    ask, captured = unsafe_calls(api)[call], stream(api)
    captured.begin_capture(mode)

    def work():
        api.runtime.setDevice(0)
        before = ctypes.c_int(thread_mode)
        api.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(before))
        status = refusal(ask)
        api.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(before))
        return status

    assert (work() if same_thread else in_a_thread(work)) == (900 if refused else 0)
    assert refusal(lambda: captured.end_capture() and 0) == (901 if refused else 0)


def test_the_errors_of_captures(api):
    runtime, main, fork = api.runtime, stream(api), stream(api)
    before, inside = (runtime.eventCreateWithFlags(2) for _ in range(2))
    runtime.eventRecord(before, fork.ptr)

    def end(on=main):
        return refusal(lambda: on.end_capture() and 0)

    main.begin_capture()
    assert refusal(runtime.streamWaitEvent, main.ptr, before) == 905
    assert refusal(runtime.eventRecord, inside, main.ptr) == 901
    assert end() == 901
    main.begin_capture()
    runtime.eventRecord(inside, main.ptr)
    assert refusal(runtime.eventQuery, inside) == 907
    assert end() == 901
    assert refusal(runtime.streamWaitEvent, fork.ptr, inside) == 907
    main.begin_capture()
    runtime.eventRecord(inside, main.ptr)
    runtime.streamWaitEvent(fork.ptr, inside)
    assert end(fork) == 903
    assert end() == 901
    main.begin_capture()
    runtime.eventRecord(inside, main.ptr)
    runtime.streamWaitEvent(fork.ptr, inside)
    assert end() == 904
    main.begin_capture()
    fork.begin_capture()
    runtime.eventRecord(inside, main.ptr)
    assert refusal(runtime.streamWaitEvent, fork.ptr, inside) == 902
    assert (end(), end(fork)) == (901, 901)
    main.begin_capture(GLOBAL)
    assert in_a_thread(end) == 908
    assert end() == 0


def test_the_legacy_stream_is_drawn_into_captures_of_blocking_streams_alone(api):
    copy = Buffers(api)
    with captured_by_another(api):
        copy.copy(api, api.cupy.cuda.get_current_stream())
    blocking = stream(api, non_blocking=False)
    blocking.begin_capture(GLOBAL)
    assert refusal(api.runtime.streamIsCapturing, 0) == 906
    assert api.runtime.streamIsCapturing(blocking.ptr)
    with pytest.raises(CudaError, match="906"):
        copy.copy(api, api.cupy.cuda.get_current_stream())
    assert refusal(lambda: blocking.end_capture() and 0) == 901


# --- Host functions ---


def test_a_host_function_runs_elsewhere_and_may_not_call_cuda(api):
    on, seen = stream(api), []

    def work(_):
        seen.append(threading.current_thread().name)
        seen.append(refusal(api.runtime.eventCreateWithFlags, 0) or refusal(api.runtime.malloc, 8))

    api.runtime.launchHostFunc(on.ptr, work, 0)
    assert seen == []
    api.runtime.streamSynchronize(on.ptr)
    assert seen == ["driver", 800]


def test_a_query_that_keeps_the_interpreter_while_a_host_function_is_called_is_a_deadlock(api):
    on, begun, end = stream(api), threading.Event(), threading.Event()
    event = api.runtime.eventCreateWithFlags(2)
    api.runtime.launchHostFunc(on.ptr, lambda _: (begun.set(), end.wait(5)), 0)
    thread = api.machine.in_background(on.ptr)
    begun.wait(5)
    with pytest.raises(Deadlock, match="GIL"):
        api.runtime.eventQuery(event)
    threading.Timer(0.05, end.set).start()
    api.runtime.eventRecord(event, on.ptr)  # waits, and lets Python go on
    thread.join(5)
    assert len(api.machine.deadlocks) == 1
    api.machine.deadlocks.clear()  # it was meant
