"""Memory of a GPU: how long CuPy's pool must not reuse it, and errors when it is exhausted."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cuda import CudaError

from kvcupy import arrays, scratch
from kvcupy.cuda_api import CudaApi
from kvcupy.devices import cuda
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


@pytest.mark.parametrize("used", ["current", "explicit", "graph"])
@pytest.mark.parametrize("allocated", ["default", "side"])
def test_memory_in_flight_is_not_handed_out_again(api, device, allocated, used):
    """Whatever stream was CuPy's current one when the array was made."""
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
    assert (dst._bytes == 7).all()


def test_memory_comes_back_when_the_stream_has_passed(api, device):
    stream, kernels, dst = device.stream(), Kernels(api, device), device.zeros(64, "uint8")
    src = device.zeros(64, "uint8")
    pointer = src.data.ptr
    kernels.copy(dst, src, stream)
    del src
    assert device.empty(64, "uint8").data.ptr != pointer
    stream.synchronize()
    assert device.empty(64, "uint8").data.ptr == pointer


@pytest.mark.parametrize("what", ["empty", "zeros"])
def test_no_memory_is_a_device_error_with_what_was_asked_for_and_what_is_free(api, device, what):
    kept = device.empty(1024, "uint8")
    api.runtime.limit_bytes = 4096
    with pytest.raises(DeviceError, match=r"4,000 bytes on cuda:0: .* 3,072 of 4,096 "):
        getattr(device, what)(1000, "fp32")
    assert kept.nbytes == 1024


def test_a_buffer_that_was_not_used_is_idle_behind_what_used_its_memory(device):
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


def test_no_memory_for_a_buffer_is_a_device_error(api, device):
    api.runtime.limit_bytes = 4096
    stream = device.stream()
    with pytest.raises(DeviceError, match="8,192 bytes"):
        scratch.borrow(device, 8192, stream)
    with stream.capture(), pytest.raises(DeviceError, match="8,192 bytes"):
        scratch.borrow(device, 8192, stream)


def test_no_memory_for_array_expressions_is_a_device_error(api, device):
    api.runtime.limit_bytes = 4096
    with pytest.raises(DeviceError, match=r"array expressions on .*: Out of memory"):
        device.run(lambda: api.cupy.empty((8192,), np.uint8), device.stream())


def test_the_error_of_cupys_pool_is_one_that_is_caught():
    cupy = pytest.importorskip("cupy")
    assert cupy.cuda.memory.OutOfMemoryError in CudaApi().errors


def test_a_lost_device_does_not_hide_that_there_was_no_memory(api, device, monkeypatch):
    def lost():
        raise CudaError(719)

    api.runtime.limit_bytes = 4096
    monkeypatch.setattr(api.runtime, "memGetInfo", lost)
    with pytest.raises(DeviceError, match="8,192 bytes on cuda:0: Out of memory"):
        device.empty(8192, "uint8")
