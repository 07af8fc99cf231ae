"""Memory of a GPU and copies of runs: how long CuPy's pool must not reuse memory, pinned pages near
their GPU, the calls of the driver that copies become, and what failures say."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cuda import Memory, log
from test_device_memory import Pieces

import kvcupy as kv
from kvcupy import arrays, cuda_api, scratch
from kvcupy.arrays import ArrayView, is_pinned
from kvcupy.cuda_api import CudaApi
from kvcupy.devices import cuda, host_memory
from kvcupy.devices.cuda import CudaFunction
from kvcupy.errors import DeviceError
from kvcupy.kernels import Kernel

PARAMS = np.dtype([("in", np.uint64), ("out", np.uint64)], align=True)
COPY = Kernel("copy.cu", "copy", PARAMS, "CopyParams").specialise()


@pytest.fixture
def device(api):
    return cuda.CudaDevice(0, api)


class Kernels:
    """A kernel that copies 64 bytes, late."""

    def __init__(self, api, device):
        self.device = device
        self.function = CudaFunction(COPY, SimpleNamespace(ptr=0xC0), static_smem=0)
        api.driver.params_bytes[0xC0] = PARAMS.itemsize
        api.driver.kernels[0xC0] = self._run

    def _run(self, params):
        of, to = np.frombuffer(params, np.uint64).tolist()
        ctypes.memmove(to, of, 64)

    def copy(self, dst, src, stream):
        params = np.array([(arrays.view(src).pointer, arrays.view(dst).pointer)], PARAMS).tobytes()
        self.device.launch(self.function, (1, 1, 1), (1, 1, 1), 0, params, stream, (dst, src))


def copied_late(api, device, allocated, used):
    """Copy an array of sevens late, drop it, and let others write what memory they then get."""
    side, stream, home = device.stream(), device.stream(), device.as_stream(None)
    kernels, dst = Kernels(api, device), device.zeros(64, "uint8")
    owner = side if allocated == "side" else home
    with owner.cupy:
        src = device.zeros(64, "uint8")
        src.fill(7)
    device.synchronize()
    if used == "current":
        with stream.cupy:
            kernels.copy(dst, src, device.as_stream(None, "cupy"))
    elif used == "explicit":
        kernels.copy(dst, src, stream)
    else:
        with stream.capture() as graph:
            kernels.copy(dst, src, stream)
    del src
    with owner.cupy:
        others = [api.cupy.empty((64,), np.uint8) for _ in range(3)]
        for array in others:
            array.fill(99)
    owner.synchronize()
    if used == "graph":
        graph.launch(stream)
    stream.synchronize()
    return set(dst._bytes.tolist())


@pytest.mark.parametrize("used", ["current", "explicit", "graph"])
@pytest.mark.parametrize("allocated", ["default", "side"])
def test_memory_in_flight_is_not_handed_out_again(api, device, allocated, used):
    """Whatever stream was CuPy's current one when the array was made."""
    assert copied_late(api, device, allocated, used) == {7}


def test_memory_in_flight_that_nothing_keeps_is_overwritten(api, device, monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(device.context, "retain", lambda stream, keep: None)
    assert copied_late(api, device, "default", "explicit") == {99}


@pytest.mark.parametrize("what", ["empty", "zeros"])
def test_no_memory_is_a_device_error_with_what_was_asked_for_and_what_is_free(api, device, what):
    kept = device.empty(1024, "uint8")
    api.runtime.limit_bytes = 4096
    with pytest.raises(DeviceError, match=r"4,000 bytes on cuda:0: .* 3,072 of 4,096 "):
        getattr(device, what)(1000, "fp32")
    assert kept.nbytes == 1024


def test_a_buffer_is_idle_after_what_used_its_memory(device):
    first, second = device.stream(), device.stream()
    with first.cupy:
        array = device.empty(8192, "uint8")
        array.fill(7)  # late
    pointer = array.data.ptr
    del array
    assert scratch.borrow(device, 8192, first).pointer == pointer
    assert scratch.borrow(device, 8192, second).pointer != pointer
    first.synchronize()
    back = [scratch.borrow(device, 8192, second).pointer for _ in range(3)]
    assert pointer in back


def test_the_error_of_cupys_pool_is_one_that_is_caught():
    cupy = pytest.importorskip("cupy")
    assert cupy.cuda.memory.OutOfMemoryError in CudaApi().errors


PAGE = host_memory.PAGE_BYTES
NEW, OLD = 12080, 12070
PORTABLE, MAPPED = 1, 2


@pytest.fixture
def api(api, tmp_path):
    """With a driver that has batched copies, and PCI devices that a test may add."""
    api.pci_devices = tmp_path
    api.runtime.driver_version = NEW
    return api


@pytest.fixture
def preferred_nodes(monkeypatch):
    """What the system is asked for; this machine may have no such node."""
    calls = []
    monkeypatch.setattr(host_memory, "prefer_node", lambda *arguments: calls.append(arguments))
    return calls


@pytest.fixture
def unmapped(api, monkeypatch):
    """What is given back to the system, with what is registered then."""
    seen, unmap = [], host_memory.unmap

    def watched(pointer, num_bytes):
        seen.append((pointer, num_bytes, dict(api.runtime.registered)))
        unmap(pointer, num_bytes)

    monkeypatch.setattr(host_memory, "unmap", watched)
    return seen


def attach(api, text="1\n", bus_id="0000:3b:00.0"):
    folder = api.pci_devices / bus_id
    folder.mkdir()
    (folder / "numa_node").write_text(text)


# --- Near the GPU ---


@pytest.mark.parametrize("extra", [0, 1, PAGE - 1])
def test_pages_are_registered_where_the_gpu_is(api, device, preferred_nodes, extra):
    attach(api)
    num_bytes = 3 * PAGE + extra
    array = device.empty_pinned(num_bytes, "int8")
    rounded = 3 * PAGE if extra == 0 else 4 * PAGE
    ((pointer, size, flags),) = log(api, "register")
    assert (pointer, size, flags) == (array.ctypes.data, rounded, PORTABLE | MAPPED)
    assert preferred_nodes == [(pointer, rounded, 1)]
    assert pointer % PAGE == 0
    assert array.nbytes == num_bytes
    array[:] = 7
    assert array.sum(dtype=int) == 7 * num_bytes


def test_every_view_is_known_as_pinned_and_keeps_the_pages(api, device, preferred_nodes, unmapped):
    attach(api)
    array = device.empty_pinned((4, PAGE), "bf16")
    view = array[2:].view(np.uint8)[:, ::2]
    assert is_pinned(array)
    assert is_pinned(view)
    del array
    gc.collect()
    assert unmapped == []
    view[...] = 3
    del view
    assert len(unmapped) == 1


def test_pages_are_unregistered_once_then_given_back(api, preferred_nodes, unmapped):
    attach(api)
    device = cuda.CudaDevice(1, api)
    array = device.empty_pinned(PAGE, "int8")
    pointer = array.ctypes.data
    assert log(api, "unregister") == []
    del array
    gc.collect()
    assert log(api, "unregister") == [(pointer, 1)]  # while its device is current
    assert unmapped == [(pointer, PAGE, {})]
    assert api.runtime.current == 0


def test_when_python_ends_functions_are_called_and_memory_is_left_alone():
    """A stream would wait for the function for ever; a global array outlives everything."""
    program = """
import sys, tempfile
from pathlib import Path
from fake_cuda import FakeApi
from kvcupy.devices import cuda
from kvcupy.cuda_api import CudaApi
for name in ("failure", "query", "is_capturing"):
    setattr(FakeApi, name, getattr(CudaApi, name))
api = FakeApi()
api.pci_devices = Path(tempfile.mkdtemp())
(api.pci_devices / "0000:3b:00.0").mkdir()
(api.pci_devices / "0000:3b:00.0" / "numa_node").write_text("0")
api.runtime.hostUnregister = lambda pointer: print("unregistered", flush=True)
device = cuda.CudaDevice(0, api)
early = device.empty_pinned(1 << 16, "int8")
kept = device.empty_pinned(1 << 16, "int8")
del early
stream = device.stream()
stream.call(lambda: print("called", flush=True))
print("ending", flush=True)
"""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent.parent)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["unregistered", "ending", "called"]), (
        done.stderr
    )


# --- Forks ---


def exit_of_child(work):
    """Run a function in a forked child; return how that ended: 0, or minus the signal."""
    child = os.fork()
    if not child:
        code = 1
        faulthandler.disable()  # a crash here is an answer
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_does_not_have_pages_that_a_gpu_may_write(api, device, preferred_nodes):
    attach(api)
    array = device.empty_pinned(2 * PAGE, "int8")
    array[:] = 3
    ordinary = np.full(2 * PAGE, 3, np.int8)
    assert exit_of_child(lambda: ordinary.sum()) == 0
    assert exit_of_child(lambda: array.sum()) == -signal.SIGSEGV
    assert (array == 3).all()


# --- Elsewhere ---


def no_pages(api, monkeypatch):
    def refuse(num_bytes):
        raise OSError(12, "no")

    attach(api)
    monkeypatch.setattr(host_memory, "map_pages", refuse)


ELSEWHERE = {
    "no such file": lambda api, monkeypatch: None,
    "no node": lambda api, monkeypatch: attach(api, "-1\n"),
    "no number": lambda api, monkeypatch: attach(api, ""),
    "no pages": no_pages,
}


@pytest.mark.parametrize("why", ELSEWHERE)
def test_without_a_node_or_pages_cuda_allocates(api, device, preferred_nodes, monkeypatch, why):
    ELSEWHERE[why](api, monkeypatch)
    assert is_pinned(device.empty_pinned((2, PAGE), "int8"))
    assert log(api, "register") == preferred_nodes == []


def test_where_registration_is_refused_cuda_allocates(api, device, preferred_nodes, unmapped):
    attach(api)
    api.runtime.refused_registration = 2
    asked = []
    api.cupy.cuda.PinnedMemory = lambda size, flags: asked.append((size, flags)) or Memory(size)
    array = device.empty_pinned(PAGE + 5, "int8")
    assert asked == [(PAGE + 5, PORTABLE | MAPPED)]
    assert is_pinned(array)
    assert [entry[:2] for entry in unmapped] == [(log(api, "register")[0][0], 2 * PAGE)]
    del array
    assert log(api, "unregister") == []


# --- Copies of runs ---


def copies(api):
    return [entry[1:] for entry in api.runtime.log if entry[0] == "copy"]


def test_all_runs_go_into_one_call(api, device):
    pieces, stream = Pieces(device, (8, 0, 64, 33)), device.stream()
    pieces.enqueue(stream)
    device.synchronize()
    pieces.check()
    assert api.library.asked == [(b"cuMemcpyBatchAsync", 12080, 1)]
    ((runs, attributes, starts, pointer),) = api.library.calls
    assert runs == tuple(array[pieces.sizes != 0].tolist() for array in pieces.runs)
    assert attributes == [1, 0, 0, 0, 0, 0]  # in stream order, no hints, no flags
    assert (starts, pointer, copies(api)) == ([0], stream.pointer, [])


def test_the_structs_are_laid_out_as_in_the_header():
    attributes = cuda_api.CopyAttributes
    assert ctypes.sizeof(attributes) == 24
    assert [getattr(attributes, name).offset for name, _ in attributes._fields_] == [0, 4, 12, 20]
    assert len(cuda_api.BATCH_TYPE._argtypes_) == 9


UNBATCHED = {
    "an old driver": lambda api: setattr(api.runtime, "driver_version", OLD),
    "no symbol": lambda api: setattr(api.library, "found", 1),
    "a symbol of another version": lambda api: setattr(api.library, "found", 2),
    "host addresses that the device has not": lambda api: api.runtime.attributes.update({91: 0}),
    "the default stream": lambda api: None,
    "the legacy stream": lambda api: None,
}


@pytest.mark.parametrize("why", UNBATCHED)
def test_where_there_is_no_batch_runs_are_copied_in_order(api, device, why):
    UNBATCHED[why](api)
    handle = {"the default stream": 0, "the legacy stream": 1}.get(why)
    stream = device.stream() if handle is None else cuda.Stream(device.context, handle)
    pieces = Pieces(device, (8, 1, 64, 33))
    pieces.enqueue(stream)
    assert api.library.calls == []
    to, of, sizes = (array.tolist() for array in pieces.runs)
    assert copies(api) == list(zip(sizes, [stream.pointer] * 4, to, of, strict=True))
    device.synchronize()
    pieces.check()


@pytest.mark.parametrize(("placement", "batches"), [("pinned", 2), ("pageable", 0)])
def test_transfers_say_which_memory_is_pageable(api, device, placement, batches):
    near = kv.KVPool(4, 2, 2, 1, 8, device=device)
    far = kv.KVPool(4, 2, 2, 1, 8, placement=placement, device=device)
    for pools in ((near, far), (far, near)):
        kv.transfer_pages(*pools, [0, 2], [1, 3], method="copy", stream=device.stream())
    assert len(api.library.calls) == batches
    assert bool(copies(api)) == (batches == 0)


def test_a_capture_has_no_batch(api, device):
    pieces, stream = Pieces(device, (8, 1, 64, 33)), device.stream()
    with stream.capture():
        pieces.enqueue(stream)
    assert (len(api.library.calls), len(copies(api))) == (0, 4)
    pieces.enqueue(stream)
    assert len(api.library.calls) == 1


def test_a_driver_that_says_it_cannot_is_not_asked_again(api, device):
    api.library.status, api.library.fail_index = 801, 0
    pieces, stream = Pieces(device, (8, 1, 64, 33)), device.stream()
    for _ in range(2):
        pieces.enqueue(stream)
    device.synchronize()
    pieces.check()
    assert (len(api.library.calls), len(copies(api))) == (1, 8)


def one_by_one(api, pieces, index):
    api.runtime.driver_version = OLD
    api.runtime.refused_copies[int(pieces.runs[0][index])] = 1


def as_batch(api, pieces, index):
    api.library.status, api.library.fail_index = 1, int(np.count_nonzero(pieces.sizes[:index]))


@pytest.mark.parametrize("way", [one_by_one, as_batch])
@pytest.mark.parametrize("index", [1, 4])
def test_a_failure_names_the_run_and_keeps_the_memory(api, device, way, index):
    """Runs before it may be in flight."""
    pieces, stream = Pieces(device, (0, 5, 0, 7, 9)), device.stream()
    way(api, pieces, index)
    to, of, size = (int(array[index]) for array in pieces.runs)
    with pytest.raises(DeviceError) as caught:
        pieces.enqueue(stream)
    assert str(caught.value) == (
        f"copy of 5 runs on {stream!r}, run {index}: {size} bytes from {of:#x} to {to:#x}: "
        "cudaError 1"
    )
    gone = weakref.ref(pieces.src)
    del pieces, caught
    assert gone() is not None
    device.synchronize()
    gc.collect()
    assert gone() is None


# --- Addresses ---


def test_addresses(api, device):
    assert device.address(ArrayView(0x100, (4,), (2,), "fp16", "cuda:0")) == 0x100
    assert device.address(ArrayView(0x100, (4,), (2,), "fp16", "cuda:1")) is None
    pinned = arrays.view(device.empty_pinned(4, "fp32"))
    assert device.address(pinned) == pinned.pointer
    pageable = arrays.view(np.zeros(4))
    assert device.address(pageable) is None
    api.runtime.fault = 700
    with pytest.raises(DeviceError, match=r"address of .* on cuda:0: cudaError 700"):
        device.address(pageable)
