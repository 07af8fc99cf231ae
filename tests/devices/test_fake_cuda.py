"""The stand-in for CUDA: that it refuses, delays and reuses as CUDA and CuPy do."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

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
    OutOfMemoryError,
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


def kind_of(api, pointer):
    return api.runtime.pointerGetAttributes(pointer).type


def test_memory_is_pageable_unless_cuda_knows_it(api):
    values, memory = np.full(8, 7, np.uint8), api.cupy.cuda.PinnedMemory(8, 3)
    array = api.cupy.empty((8,), np.uint8)
    assert [kind_of(api, p) for p in (64, values.ctypes.data, memory.ptr, array.data.ptr + 7)] == [
        0, 0, 1, 2,
    ]  # fmt: skip
    api.runtime.hostRegister(values.ctypes.data, 8, 3)
    assert kind_of(api, values.ctypes.data) == 1
    api.runtime.hostUnregister(values.ctypes.data)
    assert kind_of(api, values.ctypes.data) == 0


@pytest.mark.parametrize("num_bytes", [8, 1 << 17])
def test_pageable_memory_is_read_and_written_before_a_copy_returns(api, num_bytes):
    """A large copy waits for the stream first."""
    on, copy = stream(api), Buffers(api)
    there = api.cupy.empty((num_bytes,), np.uint8)
    source, target = np.full(num_bytes, 7, np.uint8), np.zeros(num_bytes, np.uint8)
    copy.copy(api, on)
    api.runtime.memcpyAsync(there.data.ptr, source.ctypes.data, num_bytes, 4, on.ptr)
    source[:] = 0
    assert copy.copied == (num_bytes > 1 << 16)
    api.runtime.memcpyAsync(target.ctypes.data, there.data.ptr, num_bytes, 4, on.ptr)
    assert (target == 7).all()


def test_a_copy_past_the_end_of_memory_is_refused(api):
    on, copy, array = stream(api), Buffers(api), api.cupy.empty((8,), np.uint8)
    arguments = copy.dst.ctypes.data, array.data.ptr, 1 << 50, 4, on.ptr
    assert refusal(api.runtime.memcpyAsync, *arguments) == 1


def test_a_wild_address_is_pageable_memory_to_a_copy_and_kills_the_process():
    program = """
import faulthandler
from fake_cuda import FakeApi
api = FakeApi()
array, stream = api.cupy.empty((8,), "u1"), api.cupy.cuda.Stream()
faulthandler.disable()
api.runtime.memcpyAsync(array.data.ptr, 64, 8, 4, stream.ptr)
"""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent.parent)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=60)
    assert done.returncode == -signal.SIGSEGV


def test_what_is_freed_is_poisoned_and_handed_out_again(api):
    memory = api.cupy.cuda.Memory(100)
    pointer = memory.ptr
    del memory
    assert kind_of(api, pointer) == 0
    assert refusal(api.runtime.free, pointer) == 1
    again = api.cupy.cuda.Memory(100)
    assert again.ptr == pointer
    assert ctypes.string_at(pointer, 1) == b"\xdd"


@pytest.mark.parametrize(("dtype", "has_it"), [("float16", True), ("float8_e5m2", False)])
def test_arrays_have_cupys_dtypes_alone(api, dtype, has_it):
    with nullcontext() if has_it else pytest.raises(ValueError, match="Unsupported dtype"):
        api.cupy.empty((2,), getattr(ml_dtypes, dtype, dtype))


def test_bfloat16_needs_a_numpy_that_cupy_takes_it_from(api):
    api.cupy.zeros((2,), ml_dtypes.bfloat16)
    api.has_bfloat16 = False
    with pytest.raises(ValueError, match="Unsupported dtype bfloat16"):
        api.cupy.zeros((2,), ml_dtypes.bfloat16)


def test_views_know_the_array_that_they_are_of(api):
    array = api.cupy.empty((4, 2), np.float32)
    assert array.base is None
    for part in (array[1:], array[1:][:1], array.view(np.int32), array.reshape(-1)):
        assert part.base is array


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
    on, copy = stream(api), Buffers(api)
    handle = on.ptr
    copy.copy(api, on)
    event = api.runtime.eventCreateWithFlags(2)
    api.runtime.eventRecord(event, handle)
    del on
    assert refusal(api.runtime.streamQuery, handle) == 400
    assert refusal(api.runtime.streamDestroy, handle) == 400
    again = stream(api)
    assert (again.ptr, api.runtime.streamQuery(handle)) == (handle, 0)
    api.runtime.streamSynchronize(handle)
    assert not copy.copied
    api.runtime.eventSynchronize(event)
    assert copy.copied


def test_an_event_is_no_stream(api):
    on = stream(api)
    handle = on.ptr
    del on
    event = api.runtime.eventCreateWithFlags(2)
    assert event == handle
    assert refusal(api.runtime.eventRecord, event, handle) == 400


@pytest.mark.parametrize("what", ["stream", "graph", "memory", "pinned memory"])
def test_destruction_spoils_a_global_capture(api, what):
    on = stream(api)
    on.begin_capture()
    things = {
        "stream": stream(api), "graph": on.end_capture(),
        "memory": api.cupy.cuda.Memory(8), "pinned memory": api.cupy.cuda.PinnedMemory(8, 3),
    }  # fmt: skip
    on.begin_capture(GLOBAL)
    del things[what]
    assert refusal(lambda: on.end_capture() and 0) == 901


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
    on, copy = stream(api), Buffers(api)
    copy.copy(api, on)
    WAITING[what](api, things)
    assert copy.copied


def test_a_load_behind_a_stream_that_the_host_holds_up_is_a_deadlock(api, monkeypatch):
    monkeypatch.setattr(machine, "_PATIENCE", 0.05)
    on, word = stream(api), pinned(api, np.zeros(1, np.uint32))
    arguments = ctypes.c_uint64(word.ctypes.data), ctypes.c_uint32(1), ctypes.c_uint(1)
    api.library.cuStreamWaitValue32_v2(ctypes.c_void_p(on.ptr), *arguments)
    with pytest.raises(Deadlock, match="does not go on"):
        api.cupy.RawModule(path=__file__)
    word[0] = 1
    api.cupy.RawModule(path=__file__)
    api.machine.deadlocks.clear()  # it was meant


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


# --- Chance ---


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


def test_by_chance_streams_overtake_one_another_and_a_seed_repeats_it():
    orders = [order_of_two(seed) for seed in range(20)]
    assert len(set(orders)) > 5
    assert orders == [order_of_two(seed) for seed in range(20)]


def race(seed, *, ordered):
    """Two streams write the same bytes, the second behind the first if it waits for it."""
    api = FakeApi(seed=seed)
    first, second = stream(api), stream(api)
    target, *sources = (pinned(api, np.full(8, value, np.uint8)) for value in range(3))
    for source, on in zip(sources, (first, second), strict=True):
        if ordered and on is second:
            event = api.runtime.eventCreateWithFlags(2)
            api.runtime.eventRecord(event, first.ptr)
            api.runtime.streamWaitEvent(second.ptr, event)
        api.runtime.memcpyAsync(target.ctypes.data, source.ctypes.data, 8, 4, on.ptr)
    api.runtime.deviceSynchronize()
    return int(target[0])


def test_a_wait_that_is_missing_shows():
    assert {race(seed, ordered=True) for seed in range(20)} == {2}
    assert {race(seed, ordered=False) for seed in range(20)} == {1, 2}


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
    on, seen, caller = stream(api), [], threading.get_ident()

    def work(_):
        seen.append(threading.get_ident() != caller)
        seen.append(refusal(api.runtime.eventCreateWithFlags, 0) or refusal(api.runtime.malloc, 8))

    api.runtime.launchHostFunc(on.ptr, work, 0)
    assert seen == []
    api.runtime.streamSynchronize(on.ptr)
    assert seen == [True, 800]


def test_a_query_that_keeps_the_interpreter_while_a_host_function_is_called_is_a_deadlock(api):
    on, begun, end = stream(api), threading.Event(), threading.Event()
    event = api.runtime.eventCreateWithFlags(2)
    api.runtime.launchHostFunc(on.ptr, lambda _: (begun.set(), end.wait(5)), 0)
    thread = api.machine.in_background(on.ptr)
    begun.wait(5)
    with pytest.raises(Deadlock, match="GIL"):
        api.runtime.eventQuery(event)
    threading.Timer(0.05, end.set).start()
    api.runtime.eventRecord(event, on.ptr)  # waits, and lets Python run
    thread.join(5)
    assert len(api.machine.deadlocks) == 1
    api.machine.deadlocks.clear()  # it was meant
