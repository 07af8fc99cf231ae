"""Streams of a GPU that are not kvcupy's: the current ones of CuPy and torch, default streams of
another GPU, the order checker's view of them, and streams of a forked child's parent."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cuda import captured_by_another
from fake_cuda.kernels import open_device
from forks import in_child, refused

import kvcupy as kv
from kvcupy import devices, observe
from kvcupy.arrays import dlpack, view
from kvcupy.devices import cuda, host_memory
from kvcupy.devices.cuda_streams import Stream

DEFAULT = 0


@pytest.fixture
def device(api, monkeypatch):
    device = cuda.CudaDevice(0, api)
    monkeypatch.setitem(devices._devices, "cuda:0", device)
    return device


@pytest.fixture
def streams(device):
    return device.stream(), device.stream()


# Current streams ---------------------------------------------------------------------------------


class Torch:
    """What is asked of torch: its current stream, which may be set."""

    def __init__(self):
        self.initialised, self.pointer, self.asked = True, DEFAULT, []
        self.cuda = SimpleNamespace(
            is_initialized=lambda: self.initialised, current_stream=self._current
        )

    def _current(self, index):
        assert self.initialised, "asking makes torch set up every GPU"
        self.asked.append(index)
        return SimpleNamespace(cuda_stream=self.pointer)


@pytest.fixture
def torch(monkeypatch):
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def pools_of(device):
    shape = {"page_size": 2, "num_layers": 3, "num_kv_heads": 2, "head_dim": 4, "dtype": "fp16"}
    return (
        kv.KVPool(8, **shape, device=device),
        kv.KVPool(12, **shape, layout="page_first_direct", placement="pinned", device=device),
    )


def streams_of_copies(api):
    return {entry[2] for entry in api.runtime.log if entry[0] == "copy"}


def current_in_cupy(api, stream):
    api.currents[0] = stream.cupy


@pytest.mark.parametrize("current", ["neither", "torch", "cupy"])
def test_a_transfer_goes_to_the_stream_that_is_current(api, device, streams, torch, current):
    ours, foreign = streams
    if current == "torch":
        torch.pointer = foreign.pointer
    if current == "cupy":
        current_in_cupy(api, ours)
    src, dst = pools_of(device)
    kv.transfer_pages(src, dst, [1, 5], [2, 7], method="copy")
    expected = {"neither": DEFAULT, "torch": foreign.pointer, "cupy": ours.pointer}[current]
    assert streams_of_copies(api) == {expected}


@pytest.mark.parametrize("which", ["missing", "half imported", "unused"])
def test_a_torch_that_has_used_no_gpu_is_not_asked(api, device, torch, monkeypatch, which):
    torch.initialised = False
    if which != "unused":
        module = None if which == "missing" else SimpleNamespace()
        monkeypatch.setitem(sys.modules, "torch", module)
    stream = device.stream()
    current_in_cupy(api, stream)
    assert device.as_stream(None) == stream
    assert torch.asked == []


def test_two_different_streams_are_refused_and_nothing_is_moved(api, device, torch):
    src, dst = pools_of(device)
    engine = kv.TransferEngine(src, dst, method="copy")
    ours, foreign = device.stream(), device.stream()
    current_in_cupy(api, ours)
    torch.pointer = foreign.pointer
    api.runtime.log.clear()
    message = f"expected one of cuda:0, got None while .* {ours.pointer:#x} .* {foreign.pointer:#x}"
    with pytest.raises(ValueError, match=f"^stream: {message}"):
        kv.transfer_pages(src, dst, [1], [2], method="copy")
    for call in (engine.save, engine.load):
        with pytest.raises(ValueError, match=f"^after: {message}"):
            call([1], [2])
    engine._flush()
    assert api.runtime.log == []
    kv.transfer_pages(src, dst, [1], [2], method="copy", stream=ours)
    assert streams_of_copies(api) == {ours.pointer}


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_page_lists_of_a_gpu_say_whose_stream_it_is(device, api, torch, library, monkeypatch):
    """Though both libraries have made a stream current."""
    src, dst = pools_of(device)
    ours, foreign = device.stream(), device.stream()
    current_in_cupy(api, ours)
    torch.pointer = foreign.pointer
    numbers = np.array([1, 2])
    pages = kv.ArrayView(
        numbers.ctypes.data, (2,), (8,), "int64", "cuda:0", library=library, owner=numbers
    )
    seen = []
    monkeypatch.setattr(
        type(device), "launch", lambda self, f, g, b, m, p, stream, keep=(): seen.append(stream)
    )
    monkeypatch.setattr(type(device), "load", lambda self, specialisation: None)
    kv.transfer_pages(src, dst, pages, pages, method="kernel")
    assert set(seen) == {foreign if library == "torch" else ours}


@pytest.mark.parametrize("torchs", [True, False])
def test_the_default_stream_of_a_thread_is_no_choice_where_it_is_cupys_default(
    api, device, torch, torchs
):
    """As with CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1."""
    stream = device.stream()
    torch.pointer = stream.pointer if torchs else DEFAULT
    api.default_stream = 2
    assert device.as_stream(None).pointer == (stream.pointer if torchs else 2)
    api.default_stream = DEFAULT
    current_in_cupy(api, cuda.Stream(device.context, 2))
    if torchs:
        with pytest.raises(ValueError, match="expected one of cuda:0, got None"):
            device.as_stream(None)


# Another GPU -------------------------------------------------------------------------------------

LEGACY, PER_THREAD = 0, 2


@pytest.fixture
def second(api, monkeypatch):
    device = cuda.CudaDevice(1, api)
    monkeypatch.setitem(devices._devices, "cuda:1", device)
    yield device
    assert api.runtime.current == 0, "as the caller left it"


@pytest.fixture(params=[LEGACY, 1, PER_THREAD])
def default(request, second):
    return Stream(second.context, request.param)


class Owner:
    """Something that must be kept alive."""


class Copy:
    """A copy of bytes on a stream."""

    def __init__(self, device, stream):
        self.src, self.dst = (device.empty_pinned(8, "uint8") for _ in range(2))
        self.src[:], self.dst[:] = 7, 0
        device.copy(self.dst, self.src, stream=stream)

    @property
    def done(self):
        return self.dst[0] == 7


def test_default_streams_of_the_other_gpu(api, second, default):
    """Their handles are the ones of the current GPU's default streams."""
    first = Stream(cuda.CudaDevice(0, api).context, default.pointer)
    foreign, work, owner = Copy(first.device, first), Copy(second, default), Owner()
    gone = weakref.ref(owner)
    second.run(lambda: None, default, (owner,))
    del owner
    event = default.record()
    assert not event.done() and not default.done()
    first.synchronize()
    assert (foreign.done, work.done, default.done()) == (True, False, False)
    second.context.retired.reap()
    assert gone() is not None
    event.synchronize()
    assert work.done
    default.synchronize()
    assert default.done() and gone() is None
    side, late = second.stream(), second.stream()
    early = Copy(second, side)
    default.wait(side)
    after = Copy(second, default)
    late.wait(default)
    late.synchronize()
    assert early.done and after.done


def test_its_default_streams_are_not_captured_because_others_are(api, second):
    first = cuda.CudaDevice(0, api)
    mine = api.cupy.cuda.Stream.from_external(Stream(first.context, PER_THREAD))
    with captured_by_another(api, mine):
        assert Stream(first.context, PER_THREAD).capturing
        assert not Stream(second.context, PER_THREAD).capturing
    with second.context.current(), captured_by_another(api, mine):
        api.runtime.current = 0
        assert Stream(second.context, PER_THREAD).capturing
        assert not Stream(first.context, PER_THREAD).capturing
        api.runtime.current = 1


class Exporter:
    """Exports NumPy's capsule, and says who was current and on which stream it was asked."""

    def __init__(self, api, index):
        self.api, self.index, self.asked = api, index, None

    def __dlpack_device__(self):
        return 2, self.index

    def __dlpack__(self, *, stream, max_version=None):
        self.asked = self.api.runtime.current, stream
        return np.zeros(3).__dlpack__()


def test_an_exporter_there_is_asked_with_its_own_current_stream(api, second):
    exporter = Exporter(api, 1)
    dlpack.read(exporter)
    assert exporter.asked == (1, 1)
    api.currents[1] = second.stream().cupy
    api.currents[0] = api.cupy.cuda.Stream()
    dlpack.read(exporter)
    assert exporter.asked == (1, api.currents[1].ptr)


def test_the_default_stream_of_a_thread_is_not_captured_because_another_threads_is(api):
    device, answers = cuda.CudaDevice(0, api), []
    with Stream(device.context, PER_THREAD).capture():
        thread = threading.Thread(
            target=lambda: answers.append(Stream(device.context, PER_THREAD).capturing)
        )
        thread.start()
        thread.join()
    assert answers == [False]


# The order checker -------------------------------------------------------------------------------
# `order/test_on_cuda.py` runs the tests of the checker here.


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


# Forks -------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_gpu_of_the_parent(monkeypatch, tmp_path):
    """CUDA works in no child: the error says so, and the driver is not called."""
    device = open_device(monkeypatch)
    runtime, parents = device.context.api.runtime, SimpleNamespace()
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("0\n")
    device.context.api.pci_devices = tmp_path
    parents.stream, parents.event = device.stream(), device.event(timing=True)
    parents.stream.record(parents.event)
    with parents.stream.capture() as parents.graph:
        pass
    parents.pinned = [device.empty_pinned(1 << size, "int8") for size in (4, 16)]
    parents.pool = kv.KVPool(4, 2, 1, 1, 8, dtype="fp16", device=device)
    parents.stream.call(lambda: None)
    parents.stream.synchronize()

    def use():
        stream, event = parents.stream, parents.event
        for call in (
            stream.synchronize, stream.done, stream.record, event.synchronize, event.done,
            lambda: stream.wait(event), lambda: stream.call(lambda: None), device.synchronize,
            lambda: stream.capture().__enter__(), lambda: device.empty((2,), "fp16"),
            lambda: device.empty_pinned((2,), "fp16"), device.stream,
            lambda: device.zeros(2, "fp16"), lambda: kv.KVPool(4, 2, 1, 1, 8, device=device),
            lambda: stream.capturing,
        ):  # fmt: skip
            with pytest.raises(kv.KvcupyError, match=r"^CudaContext: .*; CUDA works in no forked"):
                call()
        refused(lambda: parents.graph.launch(stream), "Graph")
        refused(lambda: parents.pool.k(0), "KVPool")
        assert (
            repr(stream) and repr(device) == "<kvcupy device cuda:0>" and stream == parents.stream
        )

    def work():
        def called(*arguments):
            print("the child has called", arguments, file=sys.stderr)

        for name in dir(runtime):
            if not name.startswith("_") and callable(getattr(runtime, name)):
                setattr(runtime, name, called)
        host_memory.unmap = called
        use()
        vars(parents).clear()
        gc.collect()
        host = kv.device("host")
        stream = host.stream()
        host.copy(copy := host.zeros(2, "fp16"), host.zeros(2, "fp16") + 1, stream=stream)
        stream.synchronize()
        assert (copy == 1).all() and kv.metrics.collect() is not None

    in_child(work)
    parents.stream.synchronize()
    assert parents.event.done()
