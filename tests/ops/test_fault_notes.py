"""Faults that the host has found: recorded in stream order, without waiting."""

from __future__ import annotations

import numpy as np
import pytest
from devices.fake_cuda import FakeApi

import kvcupy as kv
from kvcupy import faults
from kvcupy.devices import cuda
from kvcupy.ops import by_reference, transfer_kernels


class OnDevice(np.ndarray):
    """An array of a GPU, whose elements the host cannot read."""

    def _refuse(self, *_):
        raise AssertionError("the host reads the record, and so waits for the device")

    def __getitem__(self, key):
        """Return an array for an index too, as CuPy does."""
        if isinstance(key, int):
            return super().__getitem__(slice(key, key + 1)).reshape(())
        return super().__getitem__(key)

    __int__ = __bool__ = __index__ = __float__ = item = tolist = _refuse


OnDevice.__module__ = "numpy"  # whose functions take it


@pytest.fixture
def record():
    return np.zeros(len(faults.RECORD_FIELDS), np.int64).view(OnDevice)


@pytest.fixture
def gpu(monkeypatch, record):
    """A fake GPU that logs its launches: (specialisation, fields)."""
    api = FakeApi()
    api.install(monkeypatch)
    gpu = cuda.CudaDevice(0, api)
    gpu._faults, gpu.launches = record, []
    monkeypatch.setattr(cuda.CudaDevice, "fault_pointer", 0x77)
    gpu.load = lambda specialisation: specialisation

    def launch(function, grid, block, smem_bytes, params, stream, keep=()):
        fields = np.frombuffer(params, function.kernel.params)[0]
        gpu.launches.append((function, grid, block, stream, fields))

    gpu.launch = launch
    return gpu


def pool_of(gpu, num_pages, **options):
    return kv.KVPool(num_pages, 2, 3, 2, 4, dtype="fp16", device=gpu, **options)


LISTS = [1, 8, -1, 2, 9], [2, 1, 50, 12, 3]  # of 8 and 12 pages: two are past the end, then one


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("method", ["copy", "staged"])
def test_pages_past_the_end_are_noted_by_launches(gpu, method, captured):
    src, dst = pool_of(gpu, 8), pool_of(gpu, 12, layout="page_first", placement="pinned")
    stream = gpu.stream()
    if captured:
        with stream.capture():
            kv.transfer_pages(src, dst, *LISTS, method=method, stream=stream)
    else:
        kv.transfer_pages(src, dst, *LISTS, method=method, stream=stream)
    notes = [launch for launch in gpu.launches if launch[0] == transfer_kernels.NOTE]
    assert [launch[1:4] for launch in notes] == [((1, 1, 1), (1, 1, 1), stream)] * 2
    assert [launch[4].tolist() for launch in notes] == [
        (0x77, 2, faults.operation_id("transfer_pages", "src_pages", "0 to 7"), 1, 8),
        (0x77, 1, faults.operation_id("transfer_pages", "dst_pages", "0 to 11"), 3, 12),
    ]


def test_the_kernel_notes_as_the_host_does(device):
    if device.kind != "host":
        pytest.skip("reads the record as an array of the host")
    noted = []
    for note in (
        lambda *fault: transfer_kernels.note_fault(device, fault, device.as_stream(None)),
        lambda *fault: by_reference.note_fault(device, *fault),
    ):
        note(2, 5, 7, 99)
        note(3, 6, 1, 2**40)
        noted.append(device.to_numpy(device.fault_array()).tolist())
        device.fault_array().fill(0)
    assert noted == [[5, 5, 7, 99]] * 2
