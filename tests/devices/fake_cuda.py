"""A stand-in for what kvcupy calls of CuPy: enough of CUDA's rules to test the calls without a GPU.

Device memory is host memory, work is done when it is issued, except behind `hold`: then events and
streams answer "not ready". Streams follow the rules of capture and CUDA's way of spoiling one.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from kvcupy.arrays import array_at
from kvcupy.devices.cuda_driver import BATCH_TYPE, find_batch

ILLEGAL, UNSUPPORTED, INVALIDATED, UNJOINED, ISOLATION, CAPTURED_EVENT = (
    700,
    900,
    901,
    904,
    905,
    907,
)


class CudaError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"cudaError {status}")
        self.status = status


class Capture:
    def __init__(self, origin):
        self.origin = origin
        self.streams = {origin}
        self.joined = {origin}
        self.spoilt = False


class Runtime:
    """The runtime API: `log` has every call that puts work somewhere."""

    streamCaptureModeRelaxed = 2

    def __init__(self):
        self.log = []
        self.handles = itertools.count(0x1000, 0x10)
        self.current = 0
        self.count = 2
        self.fault = 0
        self.held = set()  # streams whose work does not finish
        self.capturing = {}  # stream -> Capture
        self.events = {}  # event -> (stream, Capture) where last recorded, None before
        self.priorities = {}
        self.calls = []  # host functions of captures
        self.memory_type = 1
        self.driver_version = 12040
        self.bus_id = "0000:3B:00.0"
        self.refused_copies = {}  # destination -> status
        self.refused_registration = 0
        self.refused_unregistration = 0
        self.registered = {}  # address -> bytes

    def check_status(self, status):
        if status:
            raise CudaError(status)

    # Devices.
    def getDeviceCount(self):
        return self.count

    def getDevice(self):
        return self.current

    def setDevice(self, index):
        self.current = index

    def memGetInfo(self):
        self.log.append(("context", self.current))
        return 0, 0

    def deviceGetAttribute(self, attribute, index):
        return {16: 132}[attribute]

    def getDeviceProperties(self, index):
        return {"name": b"NVIDIA H200", "totalGlobalMem": 1}

    def driverGetVersion(self):
        return self.driver_version

    def deviceGetPCIBusId(self, index):
        self.check_status(0 if self.bus_id else 1)
        return self.bus_id

    def deviceSynchronize(self):
        self.check_status(UNSUPPORTED if self.capturing else self.fault)
        self.held.clear()

    # Events.
    def eventCreateWithFlags(self, flags):
        event = next(self.handles)
        self.events[event] = None
        self.log.append(("create event", flags))
        return event

    def eventRecord(self, event, stream):
        capture = self.capturing.get(stream)
        self.events[event] = (stream, capture)
        if capture and stream != capture.origin:
            capture.joined.discard(stream)
        self.log.append(("record", event, stream))

    def _event_status(self, event):
        if self.fault:
            return self.fault
        where = self.events[event]
        if where and where[1]:
            where[1].spoilt = True
            return UNSUPPORTED
        return 600 if where and where[0] in self.held else 0

    def eventQuery(self, event):
        return self._event_status(event)

    def eventSynchronize(self, event):
        where = self.events[event]
        status = self._event_status(event)
        if status == 600:
            self.held.discard(where[0])
        else:
            self.check_status(status)

    def eventElapsedTime(self, start, end):
        return 1.5

    # Streams.
    def streamGetPriority(self, stream):
        return self.priorities.get(stream, 0)

    def streamWaitEvent(self, stream, event, flags=0):
        self.log.append(("wait", stream, event))
        there = self.events[event] and self.events[event][1]
        here = self.capturing.get(stream)
        if there and there not in self.capturing.values():
            raise CudaError(CAPTURED_EVENT)
        if there:
            there.streams.add(stream)
            self.capturing[stream] = there
            if stream == there.origin:
                there.joined.add(self.events[event][0])
        elif here:
            here.spoilt = True
            raise CudaError(ISOLATION)

    def _spoil(self, stream):
        if stream in self.capturing:
            self.capturing[stream].spoilt = True
            return UNSUPPORTED
        return self.fault

    def streamSynchronize(self, stream):
        self.check_status(self._spoil(stream))
        self.held.discard(stream)

    def streamQuery(self, stream):
        return self._spoil(stream) or (600 if stream in self.held else 0)

    def streamIsCapturing(self, stream):
        capture = self.capturing.get(stream)
        if capture and capture.spoilt:
            raise RuntimeError("an error has invalidated the capture sequence")
        return capture is not None

    def launchHostFunc(self, stream, function, argument):
        function(argument)

    def _launchHostFuncUnmanaged(self, stream, entry):
        self.calls.append(entry)

    # Memory.
    def memcpyAsync(self, dst, src, size, kind, stream):
        assert kind == 4, "host or device: the driver tells by the address"
        self.log.append(("copy", size, stream, dst, src))
        self.check_status(self.fault or self.refused_copies.get(dst, 0))
        ctypes.memmove(dst, src, size)

    def memcpy2DAsync(self, dst, dst_pitch, src, src_pitch, width, height, kind, stream):
        assert min(dst_pitch, src_pitch) >= width
        self.log.append(("copy 2d", (width, height), stream))
        for row in range(height):
            ctypes.memmove(dst + row * dst_pitch, src + row * src_pitch, width)

    def memsetAsync(self, pointer, value, size, stream):
        ctypes.memset(pointer, value, size)

    def hostRegister(self, pointer, size, flags):
        self.log.append(("register", pointer, size, flags))
        self.check_status(self.refused_registration)
        assert pointer not in self.registered
        ctypes.memset(pointer, 0x5A, size)  # a crash if any of it were not mapped
        self.registered[pointer] = size

    def hostUnregister(self, pointer):
        self.log.append(("unregister", pointer, self.current))
        self.check_status(self.refused_unregistration)
        ctypes.memset(pointer, 0xA5, self.registered.pop(pointer))  # likewise

    def pointerGetAttributes(self, pointer):
        self.check_status(self.fault)
        return SimpleNamespace(type=self.memory_type, devicePointer=pointer, device=0)


class Driver:
    """The driver API: `launches` has every launch with the bytes that the driver would copy."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.launches = []
        self.attributes = []
        self.params_bytes = {}
        self.error = None

    def check_status(self, status):
        self.runtime.check_status(status)

    def launchKernel(self, function, *numbers):
        *shape, smem, stream, arguments, extra = numbers
        if self.error:
            raise CudaError(self.error)
        pointer = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
        params = ctypes.string_at(pointer, self.params_bytes[function])
        self.launches.append(
            (function, tuple(shape), smem, stream, params, self.runtime.current, extra)
        )

    def funcGetAttribute(self, attribute, function):
        return 1024

    def funcSetAttribute(self, function, attribute, value):
        self.attributes.append((function, attribute, value))


class BatchDriver:
    """libcuda.so.1 as far as batched copies go. The function that it gives out is called through C.

    `calls` has every call: (dst, src, sizes), the attributes as the header lays them out, the
    indices from which they hold, and the stream. It copies unless it is told to fail.
    """

    def __init__(self, names=("cuGetProcAddress_v2", "cuGetProcAddress"), found=0):
        self.asked = []
        self.calls = []
        self.status, self.fail_index = 0, None
        self._found = found
        self._entry = BATCH_TYPE(self._copy)
        for name in names:
            setattr(self, name, functools.partial(self._look_up, name))

    def _look_up(self, how, name, address, version, flags, found=None):
        assert (found is None) == (how == "cuGetProcAddress")
        self.asked.append((how, name, version, flags.value))
        if found is not None:
            found._obj.value = self._found
        if self._found != 1:  # there, though perhaps not for the version that was asked for
            address._obj.value = ctypes.cast(self._entry, ctypes.c_void_p).value
        return 0

    def _copy(self, dst, src, sizes, count, attributes, starts, num_attributes, failed, stream):
        numbers = (ctypes.c_uint64 * count).from_address
        runs = tuple(list(numbers(address)) for address in (dst, src, sizes))
        fields = list((ctypes.c_int32 * (6 * num_attributes)).from_address(attributes))
        where = list((ctypes.c_size_t * num_attributes).from_address(starts))
        self.calls.append((runs, fields, where, stream))
        if self.fail_index is not None:
            ctypes.c_size_t.from_address(failed).value = self.fail_index
        for run in zip(*runs, strict=True) if not self.status else ():
            ctypes.memmove(*run)
        return self.status


class Memory:
    def __init__(self, size):
        self.bytes = (ctypes.c_char * max(size, 1))()
        self.ptr = ctypes.addressof(self.bytes)


class FakeApi:
    """What `CudaApi` is, of fakes. `cupy` has only what kvcupy names."""

    def __init__(self, packed=True):
        self.runtime = runtime = Runtime()
        self.driver = Driver(runtime)
        self.errors = (CudaError,)
        self.can_launch_packed = packed
        self.pci_devices = Path("/nowhere")
        self.library = BatchDriver()
        self.currents = {}
        self.entered = []
        self.graphs = []
        api = self

        class Stream:
            device_id = 0

            def __init__(self, non_blocking=False, priority=0):
                self.ptr = next(runtime.handles)
                self.device_id = runtime.current
                runtime.priorities[self.ptr] = priority

            @classmethod
            def from_external(cls, source):
                made = cls.__new__(cls)
                made.ptr, made.device_id = source.__cuda_stream__()[1], -1
                return made

            def __enter__(self):
                api.entered.append(self.ptr)

            def __exit__(self, *_):
                pass

            def begin_capture(self, mode):
                runtime.capturing[self.ptr] = Capture(self.ptr)

            def end_capture(self):
                capture = runtime.capturing[self.ptr]
                for stream in capture.streams:
                    del runtime.capturing[stream]
                runtime.check_status(INVALIDATED if capture.spoilt else 0)
                runtime.check_status(UNJOINED if capture.streams != capture.joined else 0)
                graph = SimpleNamespace(launched=[])
                graph.launch = lambda stream: graph.launched.append(stream.ptr)
                api.graphs.append(graph)
                return graph

        class ExternalStream:
            pass

        class Device:
            def __init__(self, index):
                self.index = index
                self.compute_capability = "90"

            def __enter__(self):
                self.before, runtime.current = runtime.current, self.index

            def __exit__(self, *_):
                runtime.current = self.before

        class RawModule:
            def __init__(self, *, path):
                self.image = Path(path).read_bytes()

            def get_function(self, name):
                return SimpleNamespace(kernel=SimpleNamespace(ptr=0xF00))

        def unowned(pointer, size, owner, device_id):
            return SimpleNamespace(ptr=pointer, owner=owner)

        def ndarray(shape, dtype, memptr, strides=None):
            return array_at(memptr.mem, memptr.mem.ptr, shape, np.dtype(dtype), strides)

        default = Stream.from_external(SimpleNamespace(__cuda_stream__=lambda: (0, 0)))
        self.cupy = SimpleNamespace(
            RawModule=RawModule,
            cuda=SimpleNamespace(
                Stream=Stream, ExternalStream=ExternalStream, Device=Device,
                Memory=Memory, UnownedMemory=unowned,
                MemoryPointer=lambda mem, offset: SimpleNamespace(mem=mem),
                PinnedMemory=lambda size, flags: Memory(size),
                get_current_stream=lambda index: self.currents.get(index, default),
            ),
            ndarray=ndarray, empty=np.empty, zeros=np.zeros, array=np.array,
        )  # fmt: skip

    @property
    def memcpy_batch(self):
        return find_batch(self.runtime.driver_version, self.library)

    def install(self, monkeypatch):
        """Let `CudaApi` use these fakes and keep its own logic."""
        from kvcupy.devices.cuda_api import CudaApi

        for name in ("failure", "query", "is_capturing"):
            monkeypatch.setattr(type(self), name, getattr(CudaApi, name), raising=False)


@contextmanager
def busy(api, stream):
    """Keep the work of a stream unfinished for the length of a with block."""
    api.runtime.held.add(stream.pointer)
    yield
    api.runtime.held.discard(stream.pointer)
