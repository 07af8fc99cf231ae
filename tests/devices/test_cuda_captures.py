"""Captures on a GPU, other libraries' above all: what is legal beside them, in them, after them."""

from __future__ import annotations

import gc
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cuda import GLOBAL, RELAXED, THREAD_LOCAL, captured_by_another

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


def test_page_lists_in_a_capture_of_others(api, device, lent):
    """What the host writes is read at each replay, so pinned lists are not shared."""
    near = kv.KVPool(4, 2, 2, 1, 8, device=device)
    far = kv.KVPool(4, 2, 2, 1, 8, placement="pinned", device=device)
    with captured_by_another(api) as foreign:
        for _ in range(3):
            kv.transfer_pages(near, far, [0, 2], [1, 3], method="kernel", stream=foreign)
    pinned = lent[True]
    assert len(set(pinned)) == len(pinned)


def capture(stream):
    with stream.capture() as graph:
        pass
    graph.launch(stream)


def abort(stream):
    with pytest.raises(ZeroDivisionError), stream.capture():
        raise ZeroDivisionError


def legal_calls(device):
    event, busy = device.event(), device.stream()
    with device.stream().capture() as graph:
        pass
    busy.record(event)
    array = device.zeros(8, "fp32")
    return {
        "empty": lambda: device.empty(1 << 20, "fp32"),
        "zeros": lambda: device.zeros(1 << 20, "fp32"),
        "asarray": lambda: device.asarray(np.ones(8)),
        "to_numpy": lambda: device.to_numpy(array),
        "small pinned": lambda: device.empty_pinned(8, "fp32"),
        "event.done": event.done,
        "event.synchronize": event.synchronize,
        "stream.done": busy.done,
        "stream.synchronize": busy.synchronize,
        "new stream": device.stream,
        "retain": lambda: device.run(lambda: None, busy, (object(),)),
        "wait": lambda: busy.wait(device.stream()),
        "fault record": device.fault_array,
        "load": lambda: Attention(device)(device.stream()),
        "capture": lambda: capture(busy),
        "aborted capture": lambda: abort(busy),
        "launch": lambda: graph.launch(busy),
        "expressions": lambda: device.run(
            lambda: device.context.api.cupy.empty(1 << 20, np.int8), busy
        ),
        "copy by a kernel": lambda: device.copy(array[::2], array[1::2], stream=busy),
        "scratch": lambda: scratch.borrow(device, 1 << 16, busy),
    }


CALLS = [
    "empty", "zeros", "asarray", "to_numpy", "small pinned", "event.done", "event.synchronize",
    "stream.done", "stream.synchronize", "new stream", "retain", "wait", "fault record", "load",
    "capture", "aborted capture", "launch", "expressions", "copy by a kernel", "scratch",
]  # fmt: skip


@pytest.mark.parametrize("other_thread", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_calls_on_other_streams_leave_a_capture_whole(api, device, name, other_thread):
    device.run(lambda: None, device.stream(), (object(),))  # something to reap
    call, failures, kept = legal_calls(device)[name], [], []

    def work():
        try:
            kept.append(call())
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


def test_memory_from_inside_a_capture_is_let_go_of_inside_another(api, device):
    api.currents[0] = home = device.stream().cupy
    with captured_by_another(api, home):
        array, buffer = device.zeros(64, "fp32"), device.empty_pinned(64, "fp32")
        event = device.event()
        device.stream().record(event)
    with captured_by_another(api, home):
        del array, event
    assert buffer.nbytes == 256


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
def test_what_is_destroyed_beside_a_capture_leaves_it_whole(api, device, monkeypatch, what, pooled):
    if not pooled:  # as with cupy.cuda.set_allocator(None)
        monkeypatch.setattr(api.pool, "malloc", api.cupy.cuda.Memory)
    owner = [DESTROYED[what](device)]
    device.synchronize()
    with captured_by_another(api):
        owner.clear()
        gc.collect()
    refused = [entry for entry in api.runtime.log if entry[0].startswith("refused")]
    assert refused == []


def test_what_an_aborted_capture_kept_is_freed_beside_another(api, device, monkeypatch):
    monkeypatch.setattr(api.pool, "malloc", api.cupy.cuda.Memory)
    stream = device.stream()
    with captured_by_another(api), pytest.raises(ZeroDivisionError), stream.capture():
        device.run(lambda: None, stream, (device.empty(8, "fp32"),))
        raise ZeroDivisionError
    assert [entry for entry in api.runtime.log if entry[0].startswith("refused")] == []


def test_a_driver_that_is_not_found_changes_no_mode(api, device):
    api.library = None
    with api.relaxed():
        assert api.machine.thread.mode == GLOBAL
    assert api.capture_id(0) is None
    foreign = api.cupy.cuda.Stream(non_blocking=True)
    with device.stream().capture():
        foreign.begin_capture(RELAXED)
        assert not device.as_stream(foreign).retains_owners, (
            "what is not known to be ours is another's"
        )
        foreign.end_capture()


def test_a_mode_that_could_not_be_set_is_not_set_back(api, device):
    modes = []

    def refuse(mode):
        modes.append(mode._obj.value)
        return 3  # not initialised

    api.library.cuThreadExchangeStreamCaptureMode = refuse
    with api.relaxed():
        pass
    assert modes == [RELAXED]


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
    assert len({first, other, apart}) == 3, "two at a time, and a stream beside"
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


def test_a_capture_that_fails_gives_its_buffers_back(device):
    main = device.stream()
    with pytest.raises(ZeroDivisionError), main.capture():
        first = borrow(device, main)
        raise ZeroDivisionError
    assert borrow(device, main) == first


def test_pinned_buffers_of_a_capture_are_used_once(device):
    main = device.stream()
    with main.capture() as graph:
        pointers = [borrow(device, main, pinned=True) for _ in range(3)]
    assert len(set(pointers)) == 3
    del graph
    gc.collect()
    back = [scratch.borrow(device, 5000, main, pinned=True) for _ in range(3)]
    assert {buffer.pointer for buffer in back} == set(pointers)


# --- Whose capture a stream is in ---


def test_a_capture_of_others_beside_one_of_ours(api, device):
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


def test_a_fork_in_a_capture_of_others(api, device):
    with captured_by_another(api) as foreign:
        main, fork = device.as_stream(foreign), device.stream()
        fork.wait(main)
        assert fork.capturing
        assert not fork.retains_owners
        main.wait(fork)
    assert not fork.capturing
    fork.synchronize()


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


def test_an_event_of_a_spoilt_capture_is_usable_when_it_has_ended(api, device):
    foreign = api.cupy.cuda.Stream(non_blocking=True)
    foreign.begin_capture(GLOBAL)
    event = device.as_stream(foreign).record()
    api.runtime.streamQuery(foreign.ptr)
    with pytest.raises(CaptureError):
        event.done()
    with pytest.raises(RuntimeError, match="901"):
        foreign.end_capture()
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


def test_page_tables_are_not_made_in_a_capture(api, device):
    table, lens = device.zeros((2, 4), "int32"), device.zeros(2, "int32")
    with captured_by_another(api) as foreign:
        api.currents[0] = foreign
        with pytest.raises(CaptureError, match=r"page_table_csr.* captured"):
            kv.page_table_csr(table, lens, 4)
