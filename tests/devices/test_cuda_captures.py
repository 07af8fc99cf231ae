"""Captures on a GPU, other libraries' above all: what is legal during, in and after them."""

from __future__ import annotations

import gc
import sys
import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cuda import GLOBAL, RELAXED, THREAD_LOCAL, CudaError, captured_by_another

import kvcupy as kv
from kvcupy import scratch
from kvcupy.config import config
from kvcupy.devices import nvrtc
from kvcupy.devices.cuda_context import FOREIGN
from kvcupy.errors import CaptureError, CompileError

MODES = [GLOBAL, THREAD_LOCAL, RELAXED]


@pytest.fixture
def device(device_of_kernels):
    return device_of_kernels


@pytest.fixture
def lent(monkeypatch):
    """The addresses that were lent: of pinned memory, and of the device's."""
    seen, borrow = {True: [], False: []}, scratch.borrow

    def watched(device, num_bytes, on, *, pinned=False):
        buffer = borrow(device, num_bytes, on, pinned=pinned)
        seen[pinned].append(buffer.pointer)
        return buffer

    monkeypatch.setattr(scratch, "borrow", watched)
    return seen


class Attention:
    """A call of `paged_attention` whose keys are split, so it has a workspace."""

    def __init__(self, device):
        self.cache = device.zeros((64, 16, 1, 64), "fp16")
        self.query, self.out = (device.zeros((1, 4, 64), "fp16") for _ in range(2))
        self.table = device.zeros((1, 64), "int32")
        self.lens = device.asarray(np.array([1000], np.int32))

    def __call__(self, stream):
        kv.paged_attention(
            self.query, self.cache, self.cache, self.table, self.lens, out=self.out, stream=stream
        )


# --- Beside and in a capture of another library ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("warm", [False, True])
def test_calls_in_one_captured_stream_share_a_workspace(api, device, lent, warm, mode):
    """As in torch.cuda.graph: the first call may compile, load and allocate inside the capture."""
    attend = Attention(device)
    if warm:
        attend(device.stream())
        device.context.api.runtime.deviceSynchronize()
        workspace = lent[False].pop()
    with captured_by_another(api, mode=mode) as foreign:
        for _ in range(4):
            attend(foreign)
    assert len(lent[False]) == 4
    assert len(set(lent[False])) == 1
    assert not warm or lent[False][0] == workspace, "the one of the call before, which has passed"
    attend(device.stream())
    assert lent[False][-1] != lent[False][0], "their graph may be replayed at any time"


def capture(stream):
    with stream.capture() as graph:
        pass
    graph.launch(stream)


def abort(stream):
    with pytest.raises(ZeroDivisionError), stream.capture():
        raise ZeroDivisionError


class Before:
    """What was made before a capture of another library."""

    def __init__(self, device):
        self.device, self.busy, self.event = device, device.stream(), device.event()
        with device.stream().capture() as self.graph:
            pass
        self.busy.record(self.event)
        self.array = device.zeros(8, "fp32")
        device.run(lambda: None, device.stream(), (object(),))  # something to reap


LEGAL = {
    "empty": lambda b: b.device.empty(1 << 20, "fp32"),
    "zeros": lambda b: b.device.zeros(1 << 20, "fp32"),
    "asarray": lambda b: b.device.asarray(np.ones(8)),
    "to_numpy": lambda b: b.device.to_numpy(b.array),
    "small pinned": lambda b: b.device.empty_pinned(8, "fp32"),
    "event.done": lambda b: b.event.done(),
    "event.synchronize": lambda b: b.event.synchronize(),
    "stream.done": lambda b: b.busy.done(),
    "stream.synchronize": lambda b: b.busy.synchronize(),
    "new stream": lambda b: b.device.stream(),
    "retain": lambda b: b.device.run(lambda: None, b.busy, (object(),)),
    "wait": lambda b: b.busy.wait(b.device.stream()),
    "fault record": lambda b: b.device.fault_array(),
    "load": lambda b: Attention(b.device)(b.device.stream()),
    "capture": lambda b: capture(b.busy),
    "aborted capture": lambda b: abort(b.busy),
    "launch": lambda b: b.graph.launch(b.busy),
    "expressions": lambda b: b.device.run(
        lambda: b.device.context.api.cupy.empty(1 << 20, np.int8), b.busy
    ),
    "copy by a kernel": lambda b: b.device.copy(b.array[::2], b.array[1::2], stream=b.busy),
    "scratch": lambda b: scratch.borrow(b.device, 1 << 16, b.busy),
}


@pytest.mark.parametrize("other_thread", [False, True])
@pytest.mark.parametrize("name", LEGAL)
def test_calls_on_other_streams_leave_a_capture_whole(api, device, name, other_thread):
    before, failures, kept = Before(device), [], []

    def work():
        try:
            kept.append(LEGAL[name](before))
        except Exception as error:
            failures.append(error)

    with captured_by_another(api):
        if other_thread:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()
        assert failures == []
    assert api.machine.thread.mode == GLOBAL, "as it was before"


@pytest.mark.parametrize(
    "name", ["empty", "event.done", "stream.synchronize", "new stream", "load"]
)
def test_without_the_relaxed_mode_they_spoil_it(api, device, monkeypatch, name):
    """The control of the test above."""
    before = Before(device)
    monkeypatch.setattr(api, "relaxed", nullcontext)
    with pytest.raises(CudaError, match="901"), captured_by_another(api), suppress(CaptureError):
        LEGAL[name](before)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_the_device_is_not_synchronised_in_a_capture_of_others(api, device, monkeypatch, library):
    """CUDA would refuse that in any mode, and spoil the capture."""
    with captured_by_another(api) as foreign:
        if library == "cupy":
            api.currents[0] = foreign
        else:
            stream = SimpleNamespace(cuda_stream=foreign.ptr)
            calls = {"is_initialized": lambda: True, "current_stream": lambda index: stream}
            monkeypatch.setitem(
                sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(**calls))
            )
        with pytest.raises(CaptureError, match="synchronising the device"):
            device.synchronize()
    device.synchronize()


def captured_graph(device):
    stream = device.stream()
    with stream.capture() as graph:
        scratch.borrow(device, 5000, stream)
    return graph


DESTROYED = {
    "stream": lambda device: device.stream(),
    "stream, and as CuPy's": lambda device: device.stream().cupy,
    "event": lambda device: device.stream().record(),
    "graph": captured_graph,
    "small pinned": lambda device: device.empty_pinned(8, "fp32"),
    "buffers": lambda device: [
        scratch.borrow(device, 1 << 20, device.as_stream(None)) for _ in range(10)
    ],
}  # fmt: skip


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("what", DESTROYED)
def test_what_is_destroyed_during_a_capture_leaves_it_whole(api, device, monkeypatch, what, pooled):
    if not pooled:  # as with cupy.cuda.set_allocator(None)
        monkeypatch.setattr(api.pool, "malloc", api.cupy.cuda.Memory)
    owner = [DESTROYED[what](device)]
    device.synchronize()
    with captured_by_another(api):
        owner.clear()
        gc.collect()
    refused = [entry for entry in api.runtime.log if entry[0].startswith("refused")]
    assert refused == []


# --- Buffers of a capture ---


def borrow(device, on, **options):
    """Borrow a buffer, use it on a stream, and return its address."""
    buffer = scratch.borrow(device, 5000, on, **options)
    device.run(lambda: None, on, (buffer,))
    return buffer.pointer


def test_buffers_of_a_graph_are_shared_in_order_and_come_back_with_it(device):
    main, fork = device.stream(), device.stream()
    with main.capture() as graph:
        first = borrow(device, main)
        assert borrow(device, main) == first
        held = scratch.borrow(device, 5000, main)
        other = borrow(device, main)
        fork.wait(main)
        apart = borrow(device, fork)
        main.wait(fork)
    assert held.pointer == first
    assert len({first, other, apart}) == 3, "two at a time, and another stream"
    with main.capture() as second:
        assert borrow(device, main) not in (first, other, apart), "both may be in flight"
    assert borrow(device, main) not in (first, other, apart)
    graph.launch(main)
    del graph, held
    gc.collect()
    assert borrow(device, main) not in (first, other, apart), "it is in flight"
    device.synchronize()
    gc.collect()
    back = [scratch.borrow(device, 5000, main) for _ in range(8)]
    assert {first, other, apart} <= {buffer.pointer for buffer in back}
    del second


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_buffers_of_a_capture_have_nothing_to_do_with_the_current_stream(api, device, whose):
    """It may be captured, or have work in flight that uses what CuPy's pool would hand out."""
    home, stream = device.stream(), api.cupy.cuda.Stream(non_blocking=True)
    api.currents[0] = home.cupy
    idle = device.empty(8192, "int8")
    pointer = idle.data.ptr
    del idle
    with captured_by_another(api, stream) if whose == "theirs" else home.capture():
        on = home if whose == "ours" else device.as_stream(stream)
        api.runtime.log.clear()
        assert borrow(device, on) != pointer
    used = {entry[2] for entry in api.runtime.log if entry[0] == "memset"}
    used |= {entry[1] for entry in api.runtime.log if entry[0] == "synchronize"}
    assert used == set()


# --- Whose capture a stream is in ---


def test_a_capture_of_others_during_one_of_ours(api, device):
    ours = device.stream()
    foreign = api.cupy.cuda.Stream(non_blocking=True)
    with ours.capture() as graph:
        foreign.begin_capture(RELAXED)
        on = device.as_stream(foreign)
        assert device.context.capture_of(on.pointer) is FOREIGN
        assert not on.retains_owners
        lent = borrow(device, on)
        with pytest.raises(CaptureError, match="captured by another library"):
            on.on_launch(print, print)
        foreign.end_capture()
    del graph
    gc.collect()
    assert borrow(device, ours) != lent


def test_a_stream_that_another_library_forks_into_our_capture(api, device):
    ours, foreign = device.stream(), api.cupy.cuda.Stream(non_blocking=True)
    with ours.capture() as graph, device.stream().capture():
        event = ours.record()
        api.runtime.streamWaitEvent(foreign.ptr, event.pointer)
        assert device.context.capture_of(foreign.ptr) is graph
        back = api.runtime.eventCreateWithFlags(2)
        api.runtime.eventRecord(back, foreign.ptr)
        api.runtime.streamWaitEvent(ours.pointer, back)
    assert device.context.capture_of(foreign.ptr) is None


@pytest.mark.parametrize("who", ["ours waits", "theirs waits", "both are theirs"])
def test_two_captures_cannot_wait_for_one_another_and_stay_whole(api, device, who):
    with captured_by_another(api, mode=RELAXED) as foreign:
        on = device.as_stream(foreign)
        if who == "both are theirs":
            with captured_by_another(api, mode=RELAXED) as third:
                event = device.as_stream(third).record()
                with pytest.raises(CaptureError, match="two captures"):
                    on.wait(event)
            return
        with device.stream().capture():
            ours = next(iter(device.context.captures.values()))._origin
            waiting, other = (ours, on) if who == "ours waits" else (on, ours)
            with pytest.raises(CaptureError, match="two captures"):
                waiting.wait(other)


# --- Events ---


def test_an_event_of_a_capture_of_others_is_usable_after_it(api, device):
    with captured_by_another(api) as foreign:
        on = device.as_stream(foreign)
        event = on.record()
        for ask in (event.done, event.synchronize):
            with pytest.raises(CaptureError, match="recorded in a capture"):
                ask()
    assert event.done()
    event.synchronize()
    device.stream().wait(event)
    with captured_by_another(api, foreign):
        assert event.done(), "of a capture before this one"
        device.stream().wait(event)
    on.record(event)
    assert not event.done()
    event.synchronize()
    assert event.done()


# --- Kernels that do not compile ---


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("compiled", [0, 1])
def test_calls_without_a_kernel_raise_and_launch_nothing(
    api, device, monkeypatch, compiled, captured
):
    """Nothing else does their work on a GPU; a rotation on two streams has several kernels."""
    rows, rotated, query = (device.zeros((3, 1, 8), "fp16") for _ in range(3))
    slots, positions = device.asarray(np.arange(3)), device.asarray(np.arange(3))
    caches = [device.zeros((16, 1, 8), "fp16") for _ in range(2)]
    table, stream, loaded = kv.rope_table(16, 8, device=device), device.stream(), []

    def refuse(specialisation, arch):
        loaded.append(specialisation)
        if len(loaded) > compiled:
            raise CompileError("does not compile", "line 1: no")
        return nvrtc.Compiled(b"image", "name", "", arch)

    monkeypatch.setattr(nvrtc, "compile_cubin", refuse)
    monkeypatch.setattr(config, "_fallback", "warn")
    before = len(api.runtime.log)
    with stream.capture() if captured else nullcontext(), pytest.raises(CompileError, match="not"):
        kv.rope_store_kv(
            query, rotated, rows, table, positions, *caches, slots, stream=stream,
            alt_stream=stream,
        )  # fmt: skip
    assert len(loaded) > compiled
    kinds = {entry[0] for entry in api.runtime.log[before:]}
    assert not kinds & {"copy", "memset", "record", "wait", "synchronize"}
    assert api.driver.launches == []


def test_zeros_are_never_part_of_a_capture(api, device):
    home = device.stream()
    api.currents[0] = home.cupy
    device.empty(64, "fp32").fill(7)
    device.synchronize()
    with home.capture() as graph:
        array = device.zeros(64, "fp32")
        assert not array._bytes.any()
    array.fill(7)
    graph.launch(home)
    device.synchronize()
    assert (array._bytes == 7).all()


def test_page_lists_in_a_capture_of_others(api, device, lent):
    """What the host writes is read at each replay, so pinned lists are not shared."""
    near = kv.KVPool(4, 2, 2, 1, 8, device=device)
    far = kv.KVPool(4, 2, 2, 1, 8, placement="pinned", device=device)
    with captured_by_another(api) as foreign:
        for _ in range(3):
            kv.transfer_pages(near, far, [0, 2], [1, 3], method="kernel", stream=foreign)
    pinned = lent[True]
    assert len(set(pinned)) == len(pinned)
