"""Fixtures of the tests of devices. A file that wants another `api` makes its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_cuda import FakeApi
from fake_cuda.kernels import open_device

import kvcupy as kv
from kvcupy import devices, scratch
from kvcupy.devices import cuda, nvrtc
from kvcupy.devices.host import HostDevice
from kvcupy.ops import call as op_call


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    """The stand-in for CUDA."""
    api = FakeApi()
    api.install(monkeypatch)
    yield api
    assert api.machine.deadlocks == []


@pytest.fixture
def device_of_kernels(api, monkeypatch):
    """The stand-in as `kv.device("cuda:0")`, whose kernels compile at once and compute nothing."""
    device = cuda.CudaDevice(0, api)
    monkeypatch.setitem(devices._devices, "cuda:0", device)
    monkeypatch.setattr(scratch, "_captured", [])
    monkeypatch.setattr(
        nvrtc, "compile_cubin", lambda s, arch: nvrtc.Compiled(b"image", "name", "", arch)
    )
    op_call.forget()
    yield device
    op_call.forget()


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture
def torch():
    """The real torch, with CUDA."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    return torch


@pytest.fixture(params=["chosen", "stand-in"])
def each_device(request, monkeypatch, device_name):
    """The device of ``--device``, and the stand-in for CUDA: for what every device does."""
    if request.param == "stand-in":
        device = open_device(monkeypatch)
    elif device_name == "host":
        device = HostDevice()
    else:
        device = kv.device(device_name)
    yield device
    device.synchronize()
    if request.param == "stand-in":
        assert device.context.api.machine.deadlocks == []
