"""Copies of runs on a GPU: which calls of the driver they become, and what a failure tells."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import pytest
from fake_cuda import BatchDriver, FakeApi, captured_by_another

import kvcupy as kv
from kvcupy import arrays, cuda_api
from kvcupy.cuda_api import CudaApi
from kvcupy.devices import cuda
from kvcupy.errors import CaptureError, DeviceError

NEW, OLD = 12080, 12070
CAPTURE_FAILURE = 906


@pytest.fixture
def api(monkeypatch):
    api = FakeApi()
    api.install(monkeypatch)
    api.runtime.driver_version = NEW
    return api


@pytest.fixture
def device(api):
    return cuda.CudaDevice(0, api)


def test_what_no_event_is_behind_outlives_a_wait_that_fails(api, device):
    stream, owner = device.stream(), np.empty(1)
    alive = weakref.ref(owner)
    device.context.retired.hold_unrecorded(stream, (owner,))
    del owner
    api.runtime.fault = 900  # another thread's capture, say: the work is still on its way
    with pytest.raises(CaptureError):
        device.synchronize()
    assert alive() is not None
    api.runtime.fault = 0
    device.synchronize()
    assert alive() is None


class Case:
    """Rows of one pinned array to be copied to rows of another, in another order."""

    def __init__(self, device, sizes=(8, 1, 64, 33)):
        self.device = device
        shape = len(sizes), 64
        self.src, self.dst = (device.empty_pinned(shape, "uint8") for _ in range(2))
        self.src[:], self.dst[:] = np.random.default_rng(5).integers(0, 256, shape), 0xEE
        self.order = np.random.default_rng(6).permutation(len(sizes))
        self.sizes = np.array(sizes, np.uint64)
        self.to = np.uint64(self.dst.ctypes.data) + self.order.astype(np.uint64) * 64
        self.of = np.uint64(self.src.ctypes.data) + np.arange(len(sizes), dtype=np.uint64) * 64
        self.owner = np.empty(0)

    @property
    def runs(self):
        return self.to, self.of, self.sizes

    def check(self):
        self.device.synchronize()
        expected = np.full_like(self.src, 0xEE)
        for row, to, size in zip(self.src, self.order, self.sizes, strict=True):
            expected[to, : int(size)] = row[: int(size)]
        np.testing.assert_array_equal(self.dst, expected)


def copies(api):
    return [entry[1:] for entry in api.runtime.log if entry[0] == "copy"]


# --- As one batch ---


def test_all_runs_go_into_one_call(api, device):
    case, stream = Case(device), device.stream()
    device.copy_runs(*case.runs, stream)
    case.check()
    ((runs, attributes, starts, pointer),) = api.library.calls
    assert runs == tuple(array.tolist() for array in case.runs)
    assert attributes == [1, 0, 0, 0, 0, 0]  # in stream order, no hints, no flags
    assert starts == [0]
    assert pointer == stream.pointer
    assert copies(api) == []


@pytest.mark.parametrize("version", [NEW, 12090, 13000])
def test_empty_runs_are_left_out(api, device, version):
    api.runtime.driver_version = version
    case = Case(device, (0, 5, 0, 7, 0))
    device.copy_runs(*case.runs, device.stream())
    case.check()
    assert api.library.calls[0][0][2] == [5, 7]


def test_no_runs_are_no_call(api, device):
    cases, stream = [Case(device, ()), Case(device, (0, 0))], device.stream()
    before = list(api.runtime.log)
    for case in cases:
        device.copy_runs(*case.runs, stream, (case.owner,))
    assert api.library.calls == []
    assert api.runtime.log == before
    assert len(device.context.retired) == 0


def test_the_per_thread_default_stream_takes_a_batch(api, device):
    case = Case(device)
    device.copy_runs(*case.runs, cuda.Stream(device.context, 2))
    case.check()
    assert api.library.calls[0][3] == 2


def test_the_right_device_is_current_and_has_a_context(api):
    second = cuda.CudaDevice(1, api)
    case, stream = Case(second), second.stream()
    for _ in range(2):
        second.copy_runs(*case.runs, stream)
    assert [entry for entry in api.runtime.log if entry[0] == "context"] == [("context", 1)]
    assert api.runtime.current == 0
    case.check()


# --- One by one ---


def old_driver(api, device):
    api.runtime.driver_version = OLD
    return device.stream()


def no_symbol(api, device):
    api.library = BatchDriver(found=1)
    return device.stream()


def other_addresses(api, device):
    """Registered memory of the host has another address on the device, which a batch wants."""
    api.runtime.attributes[91] = 0
    return device.stream()


def default_stream(api, device):
    return cuda.Stream(device.context, 0)


def legacy_stream(api, device):
    return cuda.Stream(device.context, 1)


@pytest.mark.parametrize(
    "where", [old_driver, no_symbol, other_addresses, default_stream, legacy_stream]
)
def test_where_there_is_no_batch_runs_are_copied_in_order(api, device, where):
    case, stream = Case(device), where(api, device)
    device.copy_runs(*case.runs, stream)
    assert api.library.calls == []
    expected = zip(case.sizes, [stream.pointer] * 4, case.to, case.of, strict=True)
    assert copies(api) == [tuple(map(int, run)) for run in expected]
    case.check()


def test_in_a_capture_of_others_there_is_no_batch(api, device):
    case = Case(device)
    with captured_by_another(api) as foreign:
        device.copy_runs(*case.runs, device.as_stream(foreign))
    foreign.graph.launch(foreign)
    case.check()
    assert api.library.calls == []
    assert len(copies(api)) == 4


def test_pageable_memory_is_read_before_the_call_returns(api, device):
    """CUDA documents it for single copies, not for a batch."""
    case, stream = Case(device), device.stream()
    pageable = case.src.copy()
    case.of = pageable.ctypes.data + np.arange(4, dtype=np.uint64) * 64
    device.copy_runs(*case.runs, stream, (), True)
    pageable[:] = 0
    case.check()
    assert api.library.calls == []


@pytest.mark.parametrize(("placement", "batches"), [("pinned", 2), ("pageable", 0)])
def test_transfers_say_which_memory_is_pageable(api, device, placement, batches):
    near = kv.KVPool(4, 2, 2, 1, 8, device=device)
    far = kv.KVPool(4, 2, 2, 1, 8, placement=placement, device=device)
    for pools in ((near, far), (far, near)):
        kv.transfer_pages(*pools, [0, 2], [1, 3], method="copy", stream=device.stream())
    assert len(api.library.calls) == batches
    assert bool(copies(api)) == (batches == 0)


def test_one_run_needs_no_batch(api, device):
    case = Case(device, (0, 40, 0))
    device.copy_runs(*case.runs, device.stream())
    case.check()
    assert api.library.calls == []
    assert len(copies(api)) == 1


def test_in_a_capture_runs_are_copied_one_by_one_and_kept_with_the_graph(api, device):
    case, stream = Case(device), device.stream()
    gone = weakref.ref(case.owner)
    with stream.capture() as graph:
        device.copy_runs(*case.runs, stream, (case.owner,))
    case.owner = None
    assert api.library.calls == []
    assert len(copies(api)) == 4
    assert gone() is not None
    del graph
    assert gone() is None
    device.copy_runs(*case.runs, stream)
    assert len(api.library.calls) == 1


def test_a_driver_that_says_it_cannot_is_not_asked_again(api, device):
    api.library.status, api.library.fail_index = 801, 0
    case, stream = Case(device), device.stream()
    for _ in range(2):
        device.copy_runs(*case.runs, stream)
    case.check()
    assert len(api.library.calls) == 1
    assert len(copies(api)) == 8
    api.runtime.fault = 1
    with pytest.raises(DeviceError, match="run 0: 8 bytes"):
        device.copy_runs(*case.runs, stream)


# --- Failures and lifetime ---


def one_by_one(api, case, index, status):
    api.runtime.driver_version = OLD
    api.runtime.refused_copies[int(case.to[index])] = status


def as_batch(api, case, index, status):
    api.library.status = status
    api.library.fail_index = int(np.count_nonzero(case.sizes[:index]))


@pytest.mark.parametrize("way", [one_by_one, as_batch])
@pytest.mark.parametrize("index", [1, 4])
def test_a_failure_names_the_run_as_the_caller_counts(api, device, way, index):
    case, stream = Case(device, (0, 5, 0, 7, 9)), device.stream()
    way(api, case, index, 1)
    with pytest.raises(DeviceError) as caught:
        device.copy_runs(*case.runs, stream)
    to, of, size = (int(array[index]) for array in case.runs)
    assert str(caught.value) == (
        f"copy of 5 runs on {stream!r}, run {index}: {size} bytes from {of:#x} to {to:#x}: "
        "cudaError 1"
    )


def test_a_failure_of_no_run_in_particular_names_none(api, device):
    api.library.status = 700
    with pytest.raises(DeviceError, match=r"copy of 4 runs on .*, 106 bytes: cudaError 700"):
        device.copy_runs(*Case(device).runs, device.stream())


@pytest.mark.parametrize("way", [one_by_one, as_batch])
def test_a_failure_of_a_capture_is_a_capture_error(api, device, way):
    case = Case(device)
    way(api, case, 2, CAPTURE_FAILURE)
    with pytest.raises(CaptureError, match="run 2: 64 bytes"):
        device.copy_runs(*case.runs, device.stream())


@pytest.mark.parametrize("way", [None, one_by_one, as_batch])
def test_owners_live_until_the_stream_has_passed_though_a_copy_failed(api, device, way):
    case, stream = Case(device), device.stream()
    gone = weakref.ref(case.owner)
    if way:
        way(api, case, 3, 1)
    try:
        device.copy_runs(*case.runs, stream, (case.owner,))
    except DeviceError:
        assert way
    case.owner = None
    assert gone() is not None
    device.synchronize()
    assert gone() is None


def test_a_lost_device_still_names_the_copy(api, device, monkeypatch):
    def lost(event, stream):
        api.runtime.check_status(719)

    api.library.status = 719
    monkeypatch.setattr(device.context.retired, "_record", lost)
    with pytest.raises(DeviceError, match="copy of 4 runs"):
        device.copy_runs(*Case(device).runs, device.stream(), (object(),))


# --- Finding the function ---


def test_the_function_of_12_8_is_asked_for(api):
    found = cuda_api.find_batch(13010, api.library)
    assert found is not None
    assert api.library.asked == [(b"cuMemcpyBatchAsync", 12080, 1)]


def test_what_is_not_found_is_none(api):
    assert cuda_api.find_batch(OLD, api.library) is None
    assert api.library.asked == []
    for found in (1, 2):  # no such symbol; there, but not for this version
        assert cuda_api.find_batch(NEW, BatchDriver(found=found)) is None


@pytest.mark.parametrize("library", ["without copies", "LibCuda"])
def test_a_batch_that_is_not_made_has_a_status(api, library):
    """Of a driver without copies; and on a stream that was destroyed."""
    driver = BatchDriver() if library == "without copies" else api.library
    copy = cuda_api.find_batch(NEW, driver)
    stream = api.cupy.cuda.Stream()
    pointer = stream.ptr
    del stream
    api.runtime.memGetInfo()  # gives the thread a context
    word, attributes = (ctypes.c_uint64 * 1)(), (ctypes.c_uint64 * 3)()
    at = ctypes.addressof
    status = copy(at(word), at(word), at(word), 1, at(attributes), at(word), 1, at(word), pointer)
    assert status == (801 if library == "without copies" else 400)


def test_the_structs_are_laid_out_as_in_the_header():
    attributes = cuda_api.CopyAttributes
    assert ctypes.sizeof(attributes) == 24
    assert [getattr(attributes, name).offset for name, _ in attributes._fields_] == [0, 4, 12, 20]
    assert len(cuda_api.BATCH_TYPE._argtypes_) == 9


def test_the_real_api_finds_the_function_or_none():
    pytest.importorskip("cupy")
    api = CudaApi()
    if api.runtime.driverGetVersion() < NEW:
        assert api.memcpy_batch is None
    else:
        assert api.memcpy_batch is api.memcpy_batch


# --- What the device says of memory and of itself ---


def test_addresses(api, device):
    from kvcupy.arrays import ArrayView

    assert device.address(ArrayView(0x100, (4,), (2,), "fp16", "cuda:0")) == 0x100
    assert device.address(ArrayView(0x100, (4,), (2,), "fp16", "cuda:1")) is None
    pinned = arrays.view(device.empty_pinned(4, "fp32"))
    assert device.address(pinned) == pinned.pointer
    pageable = arrays.view(np.zeros(4))
    assert device.address(pageable) is None
    api.runtime.fault = 700
    with pytest.raises(DeviceError, match=r"address of .* on cuda:0: cudaError 700"):
        device.address(pageable)
