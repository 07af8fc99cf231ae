"""The stand-in for CUDA refuses, delays and reuses as CUDA does: what tests of devices rely on."""

from __future__ import annotations

import ctypes
import threading

import ml_dtypes
import numpy as np
import pytest
from fake_cuda import (
    GLOBAL,
    RELAXED,
    THREAD_LOCAL,
    CudaError,
    Deadlock,
    FakeApi,
    captured_by_another,
    machine,
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


def end(captured):
    return refusal(lambda: captured.end_capture() and 0)


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


class Copy:
    """A copy from one block of pinned memory to another."""

    def __init__(self, api, on=None):
        self.api = api
        self.src, self.dst = (pinned(api, np.full(8, value, np.uint8)) for value in (7, 0))
        if on is not None:
            self.issue(on)

    def issue(self, on):
        self.api.runtime.memcpyAsync(self.dst.ctypes.data, self.src.ctypes.data, 8, 4, on.ptr)

    @property
    def done(self):
        return self.dst[0] == 7


# --- Late work ---


def test_work_is_done_when_its_stream_is_waited_for(api):
    on, other = stream(api), stream(api)
    copy, event = Copy(api, on), api.runtime.eventCreateWithFlags(2)
    api.runtime.eventRecord(event, on.ptr)
    assert (api.runtime.streamQuery(on.ptr), api.runtime.eventQuery(event)) == (600, 600)
    api.runtime.streamSynchronize(other.ptr)
    assert not copy.done
    api.runtime.streamWaitEvent(other.ptr, event)
    api.runtime.streamSynchronize(other.ptr)
    assert copy.done
    assert (api.runtime.streamQuery(on.ptr), api.runtime.eventQuery(event)) == (0, 0)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_the_legacy_stream_waits_for_blocking_streams_alone(api, non_blocking):
    on = stream(api, non_blocking)
    copy = Copy(api, on)
    api.runtime.eventRecord(api.runtime.eventCreateWithFlags(2), 0)
    api.runtime.streamSynchronize(0)
    assert copy.done != non_blocking


def test_captured_work_is_done_by_the_graph(api):
    on = stream(api)
    on.begin_capture()
    copy = Copy(api, on)
    graph = on.end_capture()
    api.runtime.deviceSynchronize()
    assert not copy.done
    graph.launch(on)
    assert not copy.done
    api.runtime.streamSynchronize(on.ptr)
    assert copy.done


def order_of_two(seed):
    """The order in which two streams that do not wait for one another do their work."""
    api, done = FakeApi(seed=seed), []
    streams = [stream(api), stream(api)]
    for i in range(4):
        for on in streams:
            api.machine.submit(on.ptr, lambda key=(on.ptr, i): done.append(key))
    api.runtime.deviceSynchronize()
    for on in streams:
        assert [i for pointer, i in done if pointer == on.ptr] == list(range(4))
    return tuple(done)


def test_with_a_seed_streams_overtake_one_another(api):
    orders = [order_of_two(seed) for seed in range(20)]
    assert len(set(orders)) > 5
    assert orders == [order_of_two(seed) for seed in range(20)]


# --- Memory ---


def test_a_block_that_is_freed_too_early_shows_as_wrong_bytes(api):
    """A control: what the device must prevent, done by hand."""
    on, got = stream(api), pinned(api, np.zeros(100, np.uint8))
    api.cupy.empty((100,), np.uint8).fill(1)  # loads the kernel, for which the driver waits
    array = api.cupy.zeros((100,), np.uint8)
    pointer = array.data.ptr
    api.runtime.streamSynchronize(0)
    api.runtime.memcpyAsync(got.ctypes.data, pointer, 100, 4, on.ptr)
    del array
    with on:
        assert api.cupy.empty((100,), np.uint8).data.ptr != pointer, "the arena of another stream"
    api.cupy.empty((100,), np.uint8).fill(99)
    api.runtime.streamSynchronize(0)
    api.runtime.streamSynchronize(on.ptr)
    assert got[0] == 99


def test_kinds_of_memory(api):
    def kind(pointer):
        return api.runtime.pointerGetAttributes(pointer).type

    values, memory = np.full(8, 7, np.uint8), api.cupy.cuda.PinnedMemory(8, 3)
    array, freed = api.cupy.empty((8,), np.uint8), api.cupy.cuda.Memory(100)
    pointers = 64, values.ctypes.data, memory.ptr, array.data.ptr + 7
    assert list(map(kind, pointers)) == [0, 0, 1, 2]
    api.runtime.hostRegister(values.ctypes.data, 8, 3)
    assert kind(values.ctypes.data) == 1
    api.runtime.hostUnregister(values.ctypes.data)
    assert kind(values.ctypes.data) == 0
    pointer = freed.ptr
    del freed
    assert kind(pointer) == 0 and refusal(api.runtime.free, pointer) == 1
    assert api.cupy.cuda.Memory(100).ptr == pointer and ctypes.string_at(pointer, 1) == b"\xdd"
    on = stream(api)
    copy = memory.ptr, array.data.ptr, 1 << 50, 4, on.ptr
    assert refusal(api.runtime.memcpyAsync, *copy) == 1, "past the end of its memory"


@pytest.mark.parametrize("num_bytes", [8, 1 << 17])
def test_pageable_memory_is_read_and_written_before_a_copy_returns(api, num_bytes):
    """A large copy waits for the stream first."""
    on = stream(api)
    on_device, copy = api.cupy.empty((num_bytes,), np.uint8), Copy(api, on)
    source, target = np.full(num_bytes, 7, np.uint8), np.zeros(num_bytes, np.uint8)
    api.runtime.memcpyAsync(on_device.data.ptr, source.ctypes.data, num_bytes, 4, on.ptr)
    source[:] = 0
    assert copy.done == (num_bytes > 1 << 16)
    api.runtime.memcpyAsync(target.ctypes.data, on_device.data.ptr, num_bytes, 4, on.ptr)
    assert (target == 7).all()


def test_arrays_have_cupys_dtypes_alone(api):
    for dtype in (np.float16, ml_dtypes.bfloat16):
        api.cupy.empty((2,), dtype)
    api.has_bfloat16 = False  # with a NumPy that is too old
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e5m2):
        with pytest.raises(ValueError, match="Unsupported dtype"):
            api.cupy.empty((2,), dtype)


# --- Devices and handles ---


def test_the_driver_needs_a_context_that_only_the_runtime_gives(api):
    on, mode = stream(api), ctypes.c_int(RELAXED)
    exchange = api.library.cuThreadExchangeStreamCaptureMode

    def work():
        without = exchange(ctypes.byref(mode)), refusal(api.driver.funcGetAttribute, 1, 0xF00)
        api.runtime.getDevice()
        still = exchange(ctypes.byref(mode))
        api.runtime.streamQuery(on.ptr)
        return without, still, exchange(ctypes.byref(mode))

    assert in_a_thread(work) == ((201, 201), 201, 0)


def test_a_destroyed_stream_does_its_work_and_the_next_one_has_its_handle(api):
    on = stream(api)
    handle, copy, event = on.ptr, Copy(api, on), api.runtime.eventCreateWithFlags(2)
    api.runtime.eventRecord(event, handle)
    del on
    assert refusal(api.runtime.streamQuery, handle) == 400
    again = stream(api)
    assert (again.ptr, api.runtime.streamQuery(handle)) == (handle, 0)
    api.runtime.streamSynchronize(handle)
    assert not copy.done
    api.runtime.eventSynchronize(event)
    assert copy.done


def test_handles_of_default_streams_mean_the_current_device(api):
    event = api.runtime.eventCreateWithFlags(2)
    with api.cupy.cuda.Device(1):
        copy = Copy(api, api.cupy.cuda.get_current_stream())
        assert refusal(api.runtime.eventRecord, event, 0) == 400
    api.runtime.streamSynchronize(0)
    assert not copy.done
    with api.cupy.cuda.Device(1):
        api.runtime.streamSynchronize(1)
    assert copy.done and in_a_thread(api.runtime.getDevice) == 0


def test_a_launch_needs_the_device_of_its_stream(api):
    on = stream(api)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(ctypes.c_uint64()))
    launch = (0xF00, 1, 1, 1, 1, 1, 1, 0, on.ptr, ctypes.addressof(arguments), 0)
    with api.cupy.cuda.Device(1):
        assert refusal(api.driver.launchKernel, *launch) == 400
    assert refusal(api.driver.launchKernel, *launch) == 0


# --- What waits for the device, and what a capture prohibits ---

WAITING = {
    "module": lambda api, things: api.cupy.RawModule(path=__file__),
    "expression": lambda api, things: api.cupy.empty((8,), np.uint8).fill(1),
    "memory": lambda api, things: things.pop("memory"),
    "pinned memory": lambda api, things: things.pop("pinned memory"),
    "registered memory": lambda api, things: api.runtime.hostUnregister(things["registered"]),
}


@pytest.mark.parametrize("what", WAITING)
def test_loads_and_releases_wait_for_the_device(api, what):
    page = np.zeros(8, np.uint8)
    api.runtime.hostRegister(page.ctypes.data, 8, 3)
    things = {
        "memory": api.cupy.cuda.Memory(8), "pinned memory": api.cupy.cuda.PinnedMemory(8, 3),
        "registered": page.ctypes.data,
    }  # fmt: skip
    on = stream(api)
    copy = Copy(api, on)
    WAITING[what](api, things)
    assert copy.done


def test_a_load_after_a_stream_that_the_host_holds_up_is_a_deadlock(api, monkeypatch):
    monkeypatch.setattr(machine, "_PATIENCE", 0.05)
    on, word = stream(api), pinned(api, np.zeros(1, np.uint32))
    arguments = ctypes.c_uint64(word.ctypes.data), ctypes.c_uint32(1), ctypes.c_uint(1)
    api.library.cuStreamWaitValue32_v2(ctypes.c_void_p(on.ptr), *arguments)
    with pytest.raises(Deadlock, match="does not go on"):
        api.cupy.RawModule(path=__file__)
    word[0] = 1
    api.cupy.RawModule(path=__file__)
    api.machine.deadlocks.clear()  # it was meant


@pytest.mark.parametrize("what", ["stream", "graph", "memory", "pinned memory"])
def test_destruction_invalidates_a_global_capture(api, what):
    on = stream(api)
    on.begin_capture()
    things = {
        "stream": stream(api), "graph": on.end_capture(),
        "memory": api.cupy.cuda.Memory(8), "pinned memory": api.cupy.cuda.PinnedMemory(8, 3),
    }  # fmt: skip
    on.begin_capture(GLOBAL)
    del things[what]
    assert end(on) == 901


@pytest.mark.parametrize("call", ["malloc", "event", "stream", "wait"])
@pytest.mark.parametrize(
    ("mode", "thread_mode", "refused_here", "refused_elsewhere"),
    [
        (GLOBAL, GLOBAL, True, True),
        (GLOBAL, THREAD_LOCAL, True, False),
        (GLOBAL, RELAXED, False, False),
        (THREAD_LOCAL, GLOBAL, True, False),
        (RELAXED, GLOBAL, False, False),
    ],
)
def test_unsafe_calls_and_modes(api, call, mode, thread_mode, refused_here, refused_elsewhere):
    event, on, captured = api.runtime.eventCreateWithFlags(2), stream(api), stream(api)
    ask = {
        "malloc": lambda: api.runtime.malloc(8) and 0,
        "event": lambda: api.runtime.eventQuery(event),
        "stream": lambda: api.runtime.streamQuery(on.ptr),
        "wait": lambda: api.runtime.streamSynchronize(on.ptr),
    }[call]

    def work():
        api.runtime.setDevice(0)
        before = ctypes.c_int(thread_mode)
        api.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(before))
        status = refusal(ask)
        api.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(before))
        return status

    for refused, run in ((refused_here, lambda work: work()), (refused_elsewhere, in_a_thread)):
        captured.begin_capture(mode)
        assert run(work) == (900 if refused else 0)
        assert end(captured) == (901 if refused else 0)


def test_the_errors_of_captures(api):
    runtime, main, fork = api.runtime, stream(api), stream(api)
    before, inside = (runtime.eventCreateWithFlags(2) for _ in range(2))
    runtime.eventRecord(before, fork.ptr)
    main.begin_capture()
    assert refusal(runtime.streamWaitEvent, main.ptr, before) == 905
    assert refusal(runtime.eventRecord, inside, main.ptr) == 901
    assert end(main) == 901
    main.begin_capture()
    runtime.eventRecord(inside, main.ptr)
    assert refusal(runtime.eventQuery, inside) == 907
    assert end(main) == 901
    assert refusal(runtime.streamWaitEvent, fork.ptr, inside) == 907
    for ended_first in (fork, main):
        main.begin_capture()
        runtime.eventRecord(inside, main.ptr)
        runtime.streamWaitEvent(fork.ptr, inside)
        assert end(ended_first) == (903 if ended_first is fork else 904)
        assert ended_first is main or end(main) == 901
    main.begin_capture()
    fork.begin_capture()
    runtime.eventRecord(inside, main.ptr)
    assert refusal(runtime.streamWaitEvent, fork.ptr, inside) == 902
    assert (end(main), end(fork)) == (901, 901)
    main.begin_capture(GLOBAL)
    assert in_a_thread(lambda: end(main)) == 908
    assert end(main) == 0


def test_the_legacy_stream_is_drawn_into_captures_of_blocking_streams_alone(api):
    legacy, copy = api.cupy.cuda.get_current_stream(), Copy(api)
    with captured_by_another(api):
        copy.issue(legacy)
    blocking = stream(api, non_blocking=False)
    blocking.begin_capture(GLOBAL)
    assert refusal(api.runtime.streamIsCapturing, 0) == 906
    assert api.runtime.streamIsCapturing(blocking.ptr)
    with pytest.raises(CudaError, match="906"):
        copy.issue(legacy)
    assert end(blocking) == 901


# --- Host functions ---


def test_a_host_function_runs_elsewhere_and_may_not_call_cuda(api):
    on, seen, caller = stream(api), [], threading.get_ident()

    def work(_):
        seen.append(threading.get_ident() != caller)
        seen.append(refusal(api.runtime.eventCreateWithFlags, 0) or refusal(api.runtime.malloc, 8))

    api.runtime.launchHostFunc(on.ptr, work, 0)
    assert seen == []
    api.runtime.streamSynchronize(on.ptr)
    assert seen == [True, 800]


def test_a_query_that_keeps_the_interpreter_while_a_host_function_is_called_is_a_deadlock(api):
    on, begun, finish = stream(api), threading.Event(), threading.Event()
    event = api.runtime.eventCreateWithFlags(2)
    api.runtime.launchHostFunc(on.ptr, lambda _: (begun.set(), finish.wait(5)), 0)
    thread = api.machine.in_background(on.ptr)
    begun.wait(5)
    with pytest.raises(Deadlock, match="GIL"):
        api.runtime.eventQuery(event)
    threading.Timer(0.05, finish.set).start()
    api.runtime.eventRecord(event, on.ptr)  # waits, and lets Python run
    thread.join(5)
    assert len(api.machine.deadlocks) == 1
    api.machine.deadlocks.clear()  # it was meant
