"""Where a GPU's kernels read page lists: in place if they can access them, else uploaded."""

from __future__ import annotations

import numpy as np
import pytest
from devices.fake_cuda import FakeApi

import kvcupy as kv
from kvcupy.arrays import array_at
from kvcupy.devices import cuda
from kvcupy.ops import transfer
from kvcupy.ops.transfer_kernels import PagePairs

SRC, DST = [3, 1, 7], [2, 0, 5]


@pytest.fixture
def api(monkeypatch):
    api = FakeApi()
    api.install(monkeypatch)
    return api


@pytest.fixture
def gpu(api):
    return cuda.CudaDevice(0, api)


def on_gpu(numbers, dtype):
    array = np.array(numbers, dtype)
    return kv.ArrayView(
        array.ctypes.data, array.shape, array.strides, str(array.dtype), "cuda:0",
        library="torch", owner=array,
    )  # fmt: skip


def pinned(gpu, numbers, dtype):
    array = gpu.empty_pinned(len(numbers), dtype)
    array[:] = numbers
    return array


PLACES = {
    "gpu": (on_gpu, "int32"),
    "pageable": (np.array, "int64"),
    "pageable int32": (np.array, "int32"),
    "list": (lambda numbers, dtype: numbers, "int64"),
    "pinned": (None, "int32"),
}


def placed(gpu, where, numbers):
    make, dtype = PLACES[where]
    return pinned(gpu, numbers, dtype) if make is None else make(numbers, dtype)


@pytest.mark.parametrize("src", PLACES)
@pytest.mark.parametrize("dst", PLACES)
def test_kernels_read_every_list_where_it_is_or_where_it_was_sent(api, gpu, src, dst):
    stream = gpu.stream()
    pairs = PagePairs(placed(gpu, src, SRC), placed(gpu, dst, DST))
    found, kept = pairs.lists(gpu, stream)
    stream.synchronize()
    for where, numbers, (address, stride, size) in (
        (src, SRC, found.src), (dst, DST, found.dst)
    ):  # fmt: skip
        read = array_at(kept, address, (3,), np.dtype(f"i{size}"), (stride,))
        assert read.tolist() == numbers
        reached = where in ("gpu", "pinned")
        assert (size == 4) == reached
    sent = sum(where not in ("gpu", "pinned") for where in (src, dst))
    copies = [entry[1] for entry in api.runtime.log if entry[0] == "copy"]
    assert copies == ([8 * 3 * sent] if sent else [])
    assert pairs.lists(gpu, stream)[0] is found, "they are sent once"


def test_auto_is_a_kernel_for_lists_that_only_a_gpu_has(gpu):
    near, far = (
        kv.KVPool(9, 2, 3, 2, 4, layout=layout, placement=placement, device=gpu)
        for layout, placement in (("layer_first", "device"), ("page_first", "pinned"))
    )
    plan = transfer.prepare(near, far).plan
    assert plan.method_for(PagePairs(on_gpu(SRC, "int32"), DST)) == "kernel"
    assert plan.method_for(PagePairs(SRC, DST)) == "staged"
