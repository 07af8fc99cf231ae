"""The GPU device at its boundary with CuPy: what it asks for, refuses and keeps alive."""

from __future__ import annotations

import gc
import inspect
import re
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cuda import ILLEGAL, FakeApi, captured_by_another, log

from kvcupy import arrays, formats
from kvcupy.arrays import ArrayView, dlpack, is_pinned, probes
from kvcupy.cuda_api import CudaApi
from kvcupy.devices import cuda, host_memory
from kvcupy.devices.cuda import CudaFunction
from kvcupy.devices.cuda_streams import Stream
from kvcupy.errors import CaptureError, CompileError, DeviceError
from kvcupy.kernels import Kernel

PARAMS = np.dtype(
    [("in", np.uint64), ("out", np.uint64), ("count", np.int32), ("factor", np.float32)], align=True
)
SCALE = Kernel("scale.cu", "scale", PARAMS, "ScaleParams").specialise(128)


@pytest.fixture
def device(api):
    return cuda.CudaDevice(0, api)


def function_of(api, pointer=0xF00):
    api.driver.params_bytes[pointer] = PARAMS.itemsize
    return CudaFunction(SCALE, SimpleNamespace(ptr=pointer), static_smem=0)


def packed(count=5):
    return np.array([(1, 2, count, 0.5)], PARAMS).tobytes()


class Owner:
    """Something that a launch must keep alive."""


# --- Opening ---


@pytest.mark.parametrize("part", ["runtime", "driver"])
def test_the_fakes_have_the_shape_of_the_real_calls(part):
    """CuPy's compiled functions carry their signature as the first line of their docstring."""
    pytest.importorskip("cupy")
    real, fake = getattr(CudaApi(), part), getattr(FakeApi(), part)
    members = inspect.getmembers(fake, inspect.ismethod)
    methods = [m for m in members if not m[0].startswith("_") or hasattr(real, m[0])]
    methods = [m for m in methods if m[0] != "__init__"]
    assert len(methods) >= 3
    for name, method in methods:
        signature = re.match(rf"{name}\((.*?)\)", getattr(real, name).__doc__)
        expected = [p for p in signature[1].split(", ") if p]
        parameters = list(inspect.signature(method).parameters.values())
        if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            required = [p for p in parameters if p.default is p.empty]
            assert len(required) == len([p for p in expected if "=" not in p]), name


def test_the_real_packed_launch_takes_what_is_passed():
    pytest.importorskip("cupy")
    api = CudaApi()
    parameters = re.search(r"\((.*)\)", api.driver.launchKernel.__doc__)[1].split(", ")
    assert [p.split()[-1] for p in parameters] == [
        "f", "grid_dim_x", "grid_dim_y", "grid_dim_z", "block_dim_x", "block_dim_y", "block_dim_z",
        "shared_mem_bytes", "stream", "kernel_params", "extra",
    ]  # fmt: skip


def test_the_real_classes_are_there():
    cupy = pytest.importorskip("cupy")
    for name in vars(FakeApi().cupy.cuda):
        assert hasattr(cupy.cuda, name), name
    for name in ("begin_capture", "end_capture", "from_external", "__enter__"):
        assert hasattr(cupy.cuda.Stream, name), name
    runtime = CudaApi().runtime
    assert runtime.streamCaptureModeRelaxed == 2
    assert (runtime.eventDisableTiming, runtime.hostAllocPortable) == (2, 1)
    assert (runtime.memcpyDefault, runtime.cudaDevAttrMultiProcessorCount) == (4, 16)
    assert runtime.cudaDevAttrCanUseHostPointerForRegisteredMem == 91


def test_a_carrier_is_a_real_cupy_array_at_the_address_with_the_strides():
    cupy = pytest.importorskip("cupy")
    context = SimpleNamespace(api=CudaApi(), index=0, name="cuda:0")
    device = SimpleNamespace(context=context)
    view = ArrayView(0x10000, (3, 4), (-64, 4), "bf16", "cuda:0", library="cupy", owner="owner")
    carried = cuda.CudaDevice.carrier(device, view)
    assert isinstance(carried, cupy.ndarray)
    assert (carried.data.ptr, carried.shape, carried.strides) == (0x10000, (3, 4), (-64, 4))
    assert (carried.dtype, carried.data.device_id) == (np.uint16, 0)
    assert carried.data.mem._owner == "owner"


# --- Launching ---


def test_a_launch_passes_the_struct_and_every_number(api, device):
    stream = device.stream()
    device.launch(function_of(api), (7, 2, 1), (128, 1, 1), 64, packed(9), stream)
    (launch,) = api.driver.launches
    assert launch == (0xF00, (7, 2, 1, 128, 1, 1), 64, stream.pointer, packed(9), 0, 0)


def test_threads_do_not_share_the_buffer_and_each_gets_a_context(api, device):
    function, stream = function_of(api), device.stream()
    threads = [
        threading.Thread(
            target=device.launch, args=(function, (1, 1, 1), (1, 1, 1), 0, packed(i), stream)
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {launch[4] for launch in api.driver.launches} == {packed(i) for i in range(4)}
    assert log(api, "context") == [(0,)] * 4


def test_shared_memory_past_48_kib_is_asked_for_once(api, device):
    function, stream = function_of(api), device.stream()
    for smem_bytes in (48 * 1024, 100_000, 90_000, 100_000, 120_000):
        device.launch(function, (1, 1, 1), (1, 1, 1), smem_bytes, packed(), stream)
    assert api.driver.attributes == [(0xF00, 8, 100_000), (0xF00, 8, 120_000)]


@pytest.mark.parametrize(
    ("grid", "block", "smem_bytes", "why"),
    [
        ((3, 1, 1), (2048, 1, 1), 16, "cudaError 1"),
        ((3, 1, 1), (32, 1, 65), 16, "cudaError 1"),
        ((3, 65536, 1), (32, 1, 1), 16, "cudaError 1"),
        ((0, 1, 1), (32, 1, 1), 16, "cudaError 1"),
        ((3, 1, 1), (32, 1, 1), 1 << 20, "cudaError 1"),
        ((1 << 33, 1, 1), (32, 1, 1), 16, "too large to convert"),  # CuPy's binding
    ],
)
def test_a_refused_launch_is_named_with_its_arguments(api, device, grid, block, smem_bytes, why):
    with pytest.raises(DeviceError) as caught:
        device.launch(function_of(api), grid, block, smem_bytes, packed(77), device.stream())
    for part in ("scale.cu:scale<128>", "cuda:0", f"grid {grid}", f"block {block}",
                 f"{smem_bytes} bytes of shared memory", "in: 0x1", "count: 77", why):  # fmt: skip
        assert part in str(caught.value)
    assert api.driver.launches == []


def test_loading_happens_once_and_a_failure_is_remembered(api, device, monkeypatch):
    from kvcupy.devices import nvrtc

    asked = []

    def compile_cubin(specialisation, arch):
        asked.append((specialisation, arch))
        if specialisation.kernel.name == "broken":
            raise CompileError("does not compile", "line 1: no")
        return nvrtc.Compiled(b"image", "_Z5scale", "", arch)

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    assert device.load(SCALE) is device.load(SCALE)
    broken = Kernel("scale.cu", "broken", PARAMS, "ScaleParams").specialise(1)
    messages = []
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            device.load(broken)
        messages.append((str(caught.value), caught.value.log))
    assert messages == [("does not compile\nline 1: no", "line 1: no")] * 2
    assert asked == [(SCALE, "sm_90"), (broken, "sm_90")]


# --- Streams of other libraries ---


def test_streams_of_other_libraries_are_taken(device, api):
    foreign = api.cupy.cuda.Stream()
    assert device.as_stream(foreign).pointer == foreign.ptr
    torchs = SimpleNamespace(cuda_stream=99, device=SimpleNamespace(index=0))
    assert device.as_stream(torchs).pointer == 99
    anyones = SimpleNamespace(__cuda_stream__=lambda: (0, 123))
    assert device.as_stream(anyones).pointer == 123
    ours = device.stream()
    assert device.as_stream(ours) is ours
    assert device.as_stream(SimpleNamespace(__cuda_stream__=ours.__cuda_stream__)) == ours


@pytest.mark.parametrize("answer", [(1, 5), 5, None, (0, "5"), (0, 5, 6)])
def test_a_broken_stream_protocol_is_a_type_error(device, answer):
    with pytest.raises(TypeError, match="stream: expected __cuda_stream__"):
        device.as_stream(SimpleNamespace(__cuda_stream__=lambda: answer))


def test_a_stream_of_another_device_is_a_value_error(api, device):
    other = cuda.CudaDevice(1, api)
    with other.context.current():
        cupys = api.cupy.cuda.Stream()
    torchs = SimpleNamespace(cuda_stream=99, device=SimpleNamespace(index=1))
    hosts = SimpleNamespace(device=SimpleNamespace(kind="host", name="host"))
    for wrong in (other.stream(), cupys, torchs, hosts):
        with pytest.raises(ValueError, match="stream: expected one of cuda:0"):
            device.as_stream(wrong)


def test_a_stream_that_was_lent_is_not_destroyed(api, device):
    lent, dropped = device.stream(), device.stream()
    pointers = [lent.pointer, dropped.pointer]
    lent.lend()
    del lent, dropped
    gc.collect()
    assert log(api, "destroy stream") == [(pointers[1],)]
    assert device.stream().pointer == pointers[1], "as CUDA uses handles again"


# --- Events ---


def test_a_fault_is_raised_where_it_is_met(api, device):
    stream = device.stream()
    event = stream.record()
    api.runtime.fault = ILLEGAL
    for ask in (event.done, event.synchronize, stream.done, stream.synchronize, device.synchronize):
        with pytest.raises(DeviceError, match="700"):
            ask()


def test_synchronisation_events_have_no_timing_and_handles_are_used_again(api, device):
    stream = device.stream()
    for _ in range(3):
        stream.record()
    assert log(api, "create event") == [(2,)]
    held = [stream.record(), stream.record()]
    assert held[0].pointer != held[1].pointer
    stream.record(device.event(timing=True))
    assert log(api, "create event") == [(2,), (2,), (0,)]


# --- Lifetime ---


def test_a_busy_stream_does_not_hold_up_the_others(api, device):
    slow, fast, owners = device.stream(), device.stream(), [Owner(), Owner()]
    gone = [weakref.ref(owner) for owner in owners]
    for stream, owner in zip((slow, fast), owners, strict=True):
        device.run(lambda: None, stream, (owner,))
    del owner
    owners.clear()
    api.machine.progress(fast.pointer)
    device.stream()
    assert [ref() is None for ref in gone] == [False, True]


def test_on_torchs_current_stream_its_tensors_are_not_held(api, device):
    """Its allocator reuses their memory in the order of that stream."""
    torchs = type("Tensor", (), {"__module__": "torch"})
    current = Stream(device.context, 0, library="torch")
    device.run(lambda: None, current, (torchs(), None))
    device.run(lambda: None, device.as_stream(device.stream()), ())
    assert log(api, "record") == []
    others = device.as_stream(None, "cupy")
    device.run(lambda: None, others, (torchs(),))
    assert len(device.context.retired) == 1


# --- Capture ---


def test_a_graph_is_not_launched_into_a_capture_of_another_library(api, device):
    stream = device.stream()
    with stream.capture() as graph:
        pass
    with captured_by_another(api) as foreign, pytest.raises(CaptureError, match="into a capture"):
        graph.launch(foreign)


# --- Memory ---


@pytest.mark.parametrize("format", ["int32", "bf16"])
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize(("shape", "strides"), [
    ((), ()), ((0,), (9,)), ((4,), (4,)), ((4,), (5,)), ((4,), (8,)), ((2, 3), (13, 4)),
])  # fmt: skip
def test_elements_at_any_address_are_read(device, shape, strides, format, start):
    """CuPy gathers strided ones by a kernel, which reads only aligned ones."""
    values = np.random.default_rng(1).integers(0, 256, 64, np.uint8)
    raw = device.asarray(values)
    pointer = arrays.view(raw).pointer + start
    v = ArrayView(pointer, shape, strides, format, device.name, owner=raw)
    got = device.to_numpy(v)
    dtype = formats.numpy_dtype(format)
    want = np.ndarray(shape, dtype, values, start, strides)
    assert (got.shape, got.dtype, got.tobytes()) == (shape, dtype, want.tobytes())


def host_zeros(device, pinned):
    """A function like `numpy.zeros`."""

    def zeros(shape, dtype):
        array = device.empty_pinned(shape, dtype) if pinned else np.empty(shape, dtype)
        array[...] = 0
        return array

    return zeros


@pytest.mark.parametrize(
    ("dst", "src", "calls"),
    [
        (lambda zeros: zeros((4, 64), "f8"), (4, 64), [("copy", 2048)]),
        (lambda zeros: zeros((4, 128), "f8")[:, :64], (4, 64), [("copy 2d", (512, 4))]),
        (
            lambda zeros: zeros((2, 4, 128), "f8")[:, 1:, :64], (2, 3, 64),
            [("copy 2d", (512, 3))] * 2,
        ),
        (lambda zeros: zeros((64, 4), "f8").T, (4, 64), []),  # by a kernel
    ],
)  # fmt: skip
def test_what_the_copy_engine_is_asked_for(api, device, dst, src, calls):
    zeros = host_zeros(device, pinned=True)
    dst, src = dst(zeros), zeros(src, "f8")
    src[...] = 1
    device.copy(dst, src)
    device.synchronize()
    assert [entry[:2] for entry in api.runtime.log if entry[0].startswith("copy")] == calls
    np.testing.assert_array_equal(dst, src)


def test_a_failed_copy_says_what_it_was(api, device):
    api.runtime.fault = 1
    with pytest.raises(DeviceError, match=r"copy of \(3,\) float64 on <default stream of cuda:0>"):
        device.copy(np.zeros(3), np.ones(3))


# --- Arrays that name the stream on which they are written ---


class Produced:
    """An array as Numba exports it."""

    def __init__(self, array, stream):
        self._array = array
        self.__cuda_array_interface__ = {
            "version": 3, "typestr": array.dtype.str, "shape": array.shape, "strides": None,
            "data": (array.ctypes.data, False), "stream": stream,
        }  # fmt: skip


@pytest.fixture
def produced_types(monkeypatch):
    from kvcupy import cuda_api

    monkeypatch.setattr(probes, "_PROBES", dict(probes._PROBES))
    monkeypatch.setattr(cuda_api, "device_of_pointer", lambda pointer: 0)
    known = set(arrays.STREAMED_TYPES)
    arrays.STREAMED_TYPES.clear()
    yield
    arrays.STREAMED_TYPES.clear()
    arrays.STREAMED_TYPES.update(known)


def test_a_copy_waits_for_the_producer_by_an_event(api, device, produced_types):
    """On the stream of the copy, and the host waits for nothing."""
    stream = device.stream()
    source, target = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    other = device.stream()
    there = other.pointer
    for number, given in enumerate((Produced(source, there), exported(Produced(source, there)))):
        api.runtime.log.clear()
        device.copy(target, given, stream=stream)
        ((event, producer),) = log(api, "record")[:1]
        assert producer == there and (stream.pointer, event) in log(api, "wait"), number
        assert not log(api, "synchronize")


def exported(array):
    """The same array as a view."""
    from kvcupy.arrays import view

    return view(array)[:]


def test_an_operation_waits_for_the_producers_of_its_arrays(api, device, produced_types):
    """Each once, and none in a capture, which nothing outside can be part of."""
    from kvcupy.arrays import view, wait_for_producers

    first, second = (device.stream() for _ in range(2))
    producers = [first.pointer, second.pointer]
    arrays = [Produced(np.zeros(3), stream.pointer) for stream in (first, first, second)]
    views = [view(a) for a in arrays]
    stream = device.stream()
    for given in (arrays, views, [*arrays, None, 2.0, np.zeros(3)]):
        api.runtime.log.clear()
        wait_for_producers(given, stream)
        assert [producer for _, producer in log(api, "record")] == producers
        assert [waiting for waiting, _ in log(api, "wait")] == [stream.pointer] * 2
    with stream.capture():
        api.runtime.log.clear()
        wait_for_producers(arrays, stream)
        assert not log(api, "wait")


class Asynchronous:
    """An array as JAX exports it: the interface names no stream, and DLPack takes the reader's."""

    def __init__(self, array):
        self._array, self.waiting = array, []
        self.__cuda_array_interface__ = {
            "version": 2, "typestr": array.dtype.str, "shape": array.shape, "strides": None,
            "data": (array.ctypes.data, False),
        }  # fmt: skip

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, *, stream, max_version=None):
        self.waiting.append(stream)
        capsule = self._array.__dlpack__()
        dlpack._tensor_of(capsule).device_type = 2
        return capsule


@pytest.mark.parametrize("tagged", [False, True])
def test_an_array_whose_interface_names_no_stream_is_read_by_dlpack(
    api, device, produced_types, monkeypatch, tagged
):
    from kvcupy import cuda_api

    monkeypatch.setattr(cuda_api, "CudaApi", lambda: api)
    home, stream = device.stream(), device.stream()
    api.currents[0] = home.cupy
    source, target = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    exporter = Asynchronous(source)
    array = exported(exporter) if tagged else exporter
    assert arrays.view(array).device == "cuda:0"
    device.copy(target, array)
    assert set(exporter.waiting) == {home.pointer}
    device.copy(target, array, stream=stream)
    assert exporter.waiting[-1] == stream.pointer
    with stream.capture():
        exporter.waiting.clear()
        device.copy(target, array, stream=stream)
        assert stream.pointer not in exporter.waiting


# --- Pinned memory of CuPy's own ---


def test_numpy_arrays_over_cupys_pinned_memory_are_pinned():
    cupy = pytest.importorskip("cupy")
    memory = np.zeros(4096, np.uint8)
    pinned = cupy.cuda.PinnedMemoryPointer(
        SimpleNamespace(ptr=memory.ctypes.data, size=memory.size), 0
    )
    array = np.frombuffer(pinned, np.float32, 100).reshape(10, 10)
    assert is_pinned(array) and is_pinned(array[2:, ::2])
    assert not is_pinned(np.frombuffer(memory, np.float32)) and not is_pinned(array.copy())


def test_a_gpu_that_is_not_there_is_a_device_error(api):
    with pytest.raises(DeviceError, match="cuda:2: there are 2 GPUs"):
        cuda.CudaDevice(2, api)


def test_the_right_device_is_current_during_a_launch_and_the_other_after_it(api):
    second = cuda.CudaDevice(1, api)
    stream = second.stream()
    second.launch(function_of(api), (1, 1, 1), (1, 1, 1), 0, packed(), stream)
    assert api.driver.launches[0][5] == 1
    assert api.runtime.current == 0


def test_a_carrier_of_pageable_memory_is_refused(device):
    with pytest.raises(ValueError, match="or in pinned memory, got one on host"):
        device.carrier(arrays.view(np.zeros(3)))


def test_holding_owners_does_not_use_up_events(api, device):
    stream = device.stream()
    for _ in range(20):
        device.run(lambda: None, stream, (Owner(),))
        api.machine.progress()
    assert len(log(api, "create event")) <= 2


# Host functions ----------------------------------------------------------------------------------

PATIENCE_S = 60
PAGE = host_memory.PAGE_BYTES


class Half:
    """A function that is in the middle of its work until the test lets it continue."""

    def __init__(self):
        self.entered, self.resume, self.ended = (threading.Event() for _ in range(3))

    def __call__(self):
        self.entered.set()
        assert self.resume.wait(PATIENCE_S)
        self.ended.set()


ASKING = {
    "event": lambda d: d.stream().record().done(),
    "stream": lambda d: d.stream().done(),
    "address": lambda d: d.address(arrays.view(np.zeros(4))),
    "allocation": lambda d: d.empty(1000, "fp16"),
    "reap": lambda d: d.context.retired.reap(),
    "another device": lambda d: cuda.CudaDevice(1, d.context.api).empty(1000, "fp16"),
    "call": lambda d: d.stream().call(lambda: None),
}


@pytest.mark.parametrize("what", ASKING)
def test_cuda_can_be_asked_while_a_function_runs(api, device, what):
    """The query may hold the GIL, which the function needs."""
    stream, function = device.stream(), Half()
    device.run(lambda: None, device.stream(), (object(),))
    stream.call(function)
    gpu = api.machine.in_background(stream.pointer)
    assert function.entered.wait(PATIENCE_S)
    ASKING[what](device)
    function.resume.set()
    gpu.join(PATIENCE_S)
    assert function.ended.is_set()
    assert api.machine.deadlocks == []


def test_functions_are_called_one_at_a_time_on_a_thread_of_kvcupys(api, device):
    seen, running = [], threading.Lock()

    def function():
        assert running.acquire(blocking=False)
        time.sleep(0.001)
        seen.append(threading.current_thread().name)
        running.release()

    streams = [device.stream() for _ in range(4)]
    for stream in streams * 3:
        stream.call(function)
    device.synchronize()
    assert seen == ["kvcupy host functions, cuda:0"] * 12


def test_another_librarys_capture_is_refused_before_anything_is_put_there(api, device):
    with captured_by_another(api) as foreign:
        stream = device.as_stream(foreign)
        with pytest.raises(CaptureError, match=r"only be captured by Stream\.capture"):
            stream.call(lambda: None)
        assert api.machine.capturing[foreign.ptr].nodes == []


def test_a_first_call_while_another_library_captures_spoils_nothing(api, device, tmp_path):
    """Nor does letting go of pinned memory; in the global mode much is prohibited."""
    near_the_gpu(api, tmp_path)
    stream, called = device.stream(), []
    with captured_by_another(api):
        stream.call(lambda: called.append(1))
        stream.synchronize()
        array = device.empty_pinned(PAGE, "int8")
        del array
    assert called == [1]
    assert len(unregistered(api)) == 1
    assert api.runtime.registered == {}


def near_the_gpu(api, tmp_path):
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    (folder / "numa_node").write_text("0\n")
    api.pci_devices = tmp_path


def unregistered(api):
    return [entry[1] for entry in api.runtime.log if entry[0] == "unregister"]


@pytest.mark.parametrize("captured", [False, True])
def test_the_last_array_that_a_function_knows_is_released_by_another_thread(
    api, device, tmp_path, captured
):
    """Neither on a thread of the driver, where CUDA refuses it, nor on the one that calls."""
    near_the_gpu(api, tmp_path)
    stream, array, threads = device.stream(), device.empty_pinned(PAGE, "int8"), []
    pointer, unregister = array.ctypes.data, api.runtime.hostUnregister

    def watched(ptr):
        threads.append(threading.current_thread())
        unregister(ptr)

    api.runtime.hostUnregister = watched
    if captured:
        with stream.capture() as graph:
            stream.call(lambda a=array: a.fill(3))
        graph.launch(stream)
        graph = None
    else:
        stream.call(lambda a=array: a.fill(3))
    del array
    gc.collect()
    assert unregistered(api) == []
    api.machine.in_background(stream.pointer).join(PATIENCE_S)
    stream.synchronize()
    gc.collect()
    assert unregistered(api) == [pointer]
    assert threads == [threading.current_thread()]


def test_memory_that_the_collector_finds_meanwhile_is_released_elsewhere(api, device, tmp_path):
    """CUDA may wait for the device there, which waits for the function."""
    near_the_gpu(api, tmp_path)
    stream, released, threads = device.stream(), threading.Event(), []
    cycle = [device.empty_pinned(PAGE, "int8")]
    cycle.append(cycle)
    unregister = api.runtime.hostUnregister

    def watched(ptr):
        threads.append(threading.current_thread().name)
        unregister(ptr)
        released.set()

    api.runtime.hostUnregister = watched
    gc.disable()
    try:
        del cycle
        stream.call(gc.collect)
        stream.synchronize()
        assert released.wait(PATIENCE_S)
    finally:
        gc.enable()
    assert threads == ["kvcupy release"]


def test_words_are_used_again(api, device, monkeypatch):
    allocations, pinned = [], api.cupy.cuda.PinnedMemory
    api.cupy.cuda.PinnedMemory = lambda *a: allocations.append(a) or pinned(*a)
    stream, called = device.stream(), []
    for i in range(1500):
        stream.call(lambda i=i: called.append(i))
        if i % 100 == 0:
            stream.synchronize()
    stream.synchronize()
    assert called == list(range(1500))
    assert len(allocations) == 1


def test_a_driver_without_stream_memory_operations_is_named(api, device):
    stream, called = device.stream(), []
    api.library.memory_operations = 801
    with pytest.raises(DeviceError, match="by stream memory operations: cudaError 801"):
        stream.call(lambda: called.append("refused"))
    api.library.memory_operations = 0
    stream.call(lambda: called.append("taken"))
    stream.synchronize()
    assert called == ["taken"]


def test_the_thread_ends_with_its_device(api):
    device = cuda.CudaDevice(0, api)
    stream = device.stream()
    stream.call(lambda: None)
    stream.synchronize()
    thread = device.context.calls._thread
    assert thread.is_alive()
    del device, stream
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def fail():
    raise ZeroDivisionError


def test_a_new_stream_has_no_failure_of_an_old_one(api, device):
    old = device.stream()
    old.call(fail)
    api.machine.progress(old.pointer)
    device.context.retired.reap()
    del old
    for _ in range(3):
        new = device.stream()
        new.synchronize()
        new.record().synchronize()
        assert new.done()
    with pytest.raises(DeviceError, match="ZeroDivisionError"):
        device.synchronize()


def test_a_point_before_a_function_has_not_failed_with_it(api, device):
    """Also where the host waits for the point when the failure is known already."""

    def fail():
        raise OSError("no such luck")

    stream = device.stream()
    before = stream.record()
    stream.call(fail)
    with device.context.current():
        api.runtime.streamSynchronize(stream.pointer)  # as another library does
    before.synchronize()
    with pytest.raises(DeviceError, match="no such luck"):
        stream.record().synchronize()
