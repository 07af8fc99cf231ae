"""A GPU that is not the current one: the handles of default streams mean streams of the other."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
from fake_cuda import captured_by_another

import kvcupy as kv
from kvcupy import arrays, devices
from kvcupy.arrays import dlpack
from kvcupy.devices import cuda, nvrtc
from kvcupy.devices.cuda_streams import Stream
from kvcupy.kernels import Kernel

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


def test_zeros_are_there_when_the_call_returns(second):
    array = second.empty(64, "fp32")
    with second.context.current():
        array.fill(7)
    second.synchronize()
    pointer = array.data.ptr
    del array
    again = second.zeros(64, "fp32")
    assert again.data.ptr == pointer
    assert not again._bytes.any()


def test_arrays_go_there_and_back(api, second):
    source = np.arange(12, dtype=np.float32)
    array = second.asarray(source)
    np.testing.assert_array_equal(array._bytes, source)
    np.testing.assert_array_equal(second.to_numpy(array), source)
    assert array.data.device_id == 1


def test_what_a_default_stream_there_still_writes_is_read(second):
    array = second.zeros(64, "fp32")
    with second.context.current():
        array.fill(7)
    assert (second.to_numpy(array) == 7).all()


def test_what_is_made_is_there(api, second, monkeypatch):
    priority, asked = api.runtime.streamGetPriority, []

    def watched(stream):
        asked.append(api.runtime.current)
        return priority(stream)

    monkeypatch.setattr(api.runtime, "streamGetPriority", watched)
    second.stream().record()
    assert second.fault_array().data.device_id == 1
    arrays = []
    second.run(lambda: arrays.append(api.cupy.empty((8,), np.uint8)), second.stream())
    assert arrays[0].data.device_id == 1
    assert Stream(second.context, LEGACY).priority == 0
    assert asked == [1]


def test_modules_are_loaded_there(api, second, monkeypatch):
    params = np.dtype([("data", np.uint64)])
    compiled = nvrtc.Compiled(b"image", "name", "", "sm_90")
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda s, arch: compiled)
    second.load(Kernel("any.cu", "any", params, "Params").specialise())
    assert api.loaded == [1]


def test_that_device_is_synchronised(api, second):
    first = cuda.CudaDevice(0, api)
    foreign, work = Copy(first, first.stream()), Copy(second, second.stream())
    second.synchronize()
    assert (foreign.done, work.done) == (False, True)


def test_its_own_free_memory_is_told(api, second):
    api.runtime.limit_bytes = 4096
    api.runtime.log.clear()
    with pytest.raises(kv.DeviceError, match="cuda:1"):
        second.zeros(8192, "uint8")
    assert ("context", 1) in api.runtime.log


def test_the_default_stream_of_a_thread_is_captured_there(second):
    stream = Stream(second.context, PER_THREAD)
    with stream.capture() as graph:
        work = Copy(second, stream)
    graph.launch(stream)
    assert not work.done
    stream.synchronize()
    assert work.done
    with pytest.raises(ZeroDivisionError), stream.capture():
        raise ZeroDivisionError
    assert not stream.capturing


def test_an_event_is_recorded_there(second, default):
    work = Copy(second, default)
    event = default.record()
    assert not event.done()
    event.synchronize()
    assert work.done


def test_owners_are_held_until_that_stream_has_passed(second, default):
    owner = Owner()
    gone = weakref.ref(owner)
    Copy(second, default)
    second.run(lambda: None, default, (owner,))
    del owner
    second.context.retired.reap()
    assert gone() is not None
    default.synchronize()
    assert gone() is None


def test_that_stream_waits_and_is_waited_for(api, second, default):
    side = second.stream()
    early, late = Copy(second, side), second.stream()
    default.wait(side)
    after = Copy(second, default)
    late.wait(default)
    late.synchronize()
    assert early.done
    assert after.done


def test_that_stream_is_synchronised_and_asked(api, second, default):
    first = Stream(cuda.CudaDevice(0, api).context, default.pointer)
    foreign = Copy(first.device, first)
    work = Copy(second, default)
    assert not default.done()
    first.synchronize()
    assert (foreign.done, work.done) == (True, False)
    assert not default.done()
    default.synchronize()
    assert work.done
    assert default.done()


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


def test_the_default_stream_of_a_thread_is_not_captured_because_another_threads_is(api):
    device, answers = cuda.CudaDevice(0, api), []
    with Stream(device.context, PER_THREAD).capture():
        thread = threading.Thread(
            target=lambda: answers.append(Stream(device.context, PER_THREAD).capturing)
        )
        thread.start()
        thread.join()
    assert answers == [False]


def test_none_is_the_current_stream_there(api, second):
    stream = second.stream()
    api.currents[0], api.currents[1] = api.cupy.cuda.Stream(), stream.cupy
    assert second.as_stream(None) == stream


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


def test_an_array_there_is_exported_with_that_gpu_current(api, second, monkeypatch):
    """CuPy lets the consumer wait for the current GPU's current stream."""
    current = []

    def export(array, **options):
        current.append(api.runtime.current)
        return np.zeros(3).__dlpack__()

    monkeypatch.setattr(api.cupy.ndarray, "__dlpack__", export, raising=False)
    array = second.empty(3, "bf16")
    arrays.view(array).__dlpack__(stream=1)
    assert current == [1]
