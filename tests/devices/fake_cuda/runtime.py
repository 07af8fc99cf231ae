"""The runtime and the driver as CuPy binds them, and libcuda as kvcupy calls it through ctypes.

Public methods are called as the real ones are."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace

from kvcupy.cuda_api import BATCH_TYPE

from .machine import (
    CAPTURED_EVENT,
    ILLEGAL,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_READY,
    OUT_OF_MEMORY,
    UNSUPPORTED,
    CudaError,
    Event,
    Memory,
)

_FREED = 0xDD
_STAGED_AT_ONCE = 1 << 16  # bytes of pageable memory that a copy takes without waiting
_GRID, _BLOCK, _THREADS = (2**31 - 1, 65535, 65535), (1024, 1024, 64), 1024
_SMEM, _MAX_SMEM = 48 << 10, 227 << 10


class Runtime:
    """The runtime API: `log` has every call that puts work somewhere.

    CUDA knows what memory it has given out or registered. All other memory is the host's and
    pageable: kernels do not reach it, and a copy has read it when the call returns, or written it.
    """

    streamCaptureModeGlobal, streamCaptureModeThreadLocal, streamCaptureModeRelaxed = 0, 1, 2

    def __init__(self, machine):
        self._machine = machine
        self.log = []
        self.count = 2
        self.fault = 0  # the status that every call answers with once the device is lost
        self.capturing = machine.capturing
        self.events = {}  # handle -> Event
        self.priorities = {}
        self.driver_version, self.runtime_version = 12040, 12090
        self.attributes = {16: 132, 91: 1, 97: 227 << 10}
        self.bus_id = "0000:3B:00.0"
        self.refused_copies = {}  # destination -> status
        self.refused_registration = 0
        self.pinned = {}  # address -> bytes
        self.registered = {}  # address -> bytes
        self.limit_bytes = 1 << 30
        self.allocated = {}  # address -> Memory
        self._freed = []  # poisoned; the next block of such a size is the latest of them

    @property
    def current(self):
        """The calling thread's device."""
        return self._machine.thread.device

    @current.setter
    def current(self, index):
        self._machine.thread.device = index

    def check_status(self, status):
        if status:
            raise CudaError(status)

    # Devices.
    def getDeviceCount(self):
        return self.count

    def getDevice(self):
        return self.current

    def setDevice(self, index):
        self._machine.enter()
        self.current = index

    def memGetInfo(self):
        self._machine.enter()
        self._machine.require_safe()
        self.log.append(("context", self.current))
        used = sum(len(memory.bytes) for memory in list(self.allocated.values()))
        return self.limit_bytes - used, self.limit_bytes

    def deviceGetAttribute(self, attribute, index):
        return self.attributes[attribute]

    def getDeviceProperties(self, index):
        return {"name": b"NVIDIA H200", "totalGlobalMem": 1}

    def driverGetVersion(self):
        return self.driver_version

    def runtimeGetVersion(self):
        return self.runtime_version

    def deviceGetPCIBusId(self, index):
        self.check_status(0 if self.bus_id else 1)
        return self.bus_id

    def deviceSynchronize(self):
        self._machine.enter()
        for capture in list(self.capturing.values()):
            capture.invalidated = True
        self.check_status(UNSUPPORTED if self.capturing else self.fault)
        self._machine.progress_device()
        self.check_status(self.fault)

    # Events.
    def eventCreateWithFlags(self, flags):
        self._machine.enter()
        self._machine.require_safe()  # as for streams
        event = self._machine.new_handle()
        self._machine.events.add(event)
        self.events[event] = Event(self.current)
        self.log.append(("create event", flags))
        return event

    def eventRecord(self, event, stream):
        self._machine.enter()
        where, known = self._machine.stream(stream), self.events[event]
        if self._machine.device_of_stream(where) != known.device:
            raise CudaError(INVALID_HANDLE)
        known.work = self._machine.submit(where, lambda: None)
        known.stream, known.capture = where, self.capturing.get(where)
        known.known = dict(known.capture.known[where]) if known.capture else {}
        self.log.append(("record", event, stream))

    def _event_status(self, event):
        known = self.events[event]
        if self.fault:
            return self.fault
        if known.capture:
            known.capture.invalidated = True
            return CAPTURED_EVENT
        if status := self._machine.unsafe():
            return status
        return NOT_READY if known.work is not None and not known.work.done else 0

    def eventQuery(self, event):
        self._machine.enter()
        return self._event_status(event)

    def eventSynchronize(self, event):
        self._machine.enter()
        status = self._event_status(event)
        self.check_status(0 if status == NOT_READY else status)
        if status == NOT_READY:
            self._machine.run(self.events[event].work)
            self.check_status(self.fault)

    def eventElapsedTime(self, start, end):
        return 1.5

    # Streams.
    def streamCreateWithPriority(self, flags, priority):
        assert flags == 1, "a stream that would wait for the default one, which is not modelled"
        self._machine.enter()
        self._machine.require_safe()  # CUDA does not promise that it is not
        stream = self._machine.new_handle()
        self.priorities[stream] = priority
        return stream

    def streamDestroy(self, stream):
        self._machine.enter()
        self._machine.destroy(stream)
        self.log.append(("destroy stream", stream))

    def streamGetPriority(self, stream):
        return self.priorities.get(stream, 0)

    def streamWaitEvent(self, stream, event, flags=0):
        self._machine.enter()
        self.log.append(("wait", stream, event))
        self._machine.wait(self._machine.stream(stream), self.events[event])

    def _spoil(self, stream):
        return self._machine.spoil(self._machine.stream(stream)) or self.fault

    def streamSynchronize(self, stream):
        self._machine.enter()
        self.log.append(("synchronize", stream, self.current))
        self.check_status(self._spoil(stream))
        self._machine.progress(stream)
        self.check_status(self.fault)

    def streamQuery(self, stream):
        self._machine.enter()
        status = self._spoil(stream)
        busy = self._machine.queues.get(self._machine.stream(stream))
        return status or (NOT_READY if busy else 0)

    def streamIsCapturing(self, stream):
        self._machine.enter()
        where = self._machine.stream(stream)
        capture = self.capturing.get(where)
        if capture and capture.invalidated:
            raise RuntimeError("an error has invalidated the capture sequence")
        return capture is not None

    # Memory.
    def malloc(self, size):
        self._machine.enter()
        self._machine.require_safe()
        self.check_status(self.fault)
        used = sum(len(memory.bytes) for memory in list(self.allocated.values()))
        self.check_status(OUT_OF_MEMORY if used + size > self.limit_bytes else 0)
        alike = [m for m in self._freed if len(m.bytes) == size]
        memory = alike[-1] if alike else Memory(size)
        if alike:
            self._freed.remove(memory)
        memory.device = self.current
        self.allocated[memory.ptr] = memory
        self.log.append(("malloc", size, self.current))
        return memory.ptr

    def free(self, ptr):
        self._begin_release()
        self.check_status(0 if ptr in self.allocated else INVALID_VALUE)
        memory = self.allocated.pop(ptr)
        ctypes.memset(ptr, _FREED, len(memory.bytes))
        self._freed.append(memory)

    def freeHost(self, ptr):
        self._begin_release()
        self.check_status(0 if self.pinned.pop(ptr, 0) else INVALID_VALUE)
        self.log.append(("free host", ptr))

    def _begin_release(self):
        """Begin a call that waits for the device, since its work may use the memory."""
        self._machine.enter()
        self._machine.require_safe()
        self._machine.progress_device()

    def memcpyAsync(self, dst, src, size, kind, stream):
        assert kind == 4, "host or device: the driver tells by the address"
        self._machine.enter()
        self.log.append(("copy", size, stream, dst, src))
        self.check_status(self.fault or self.refused_copies.get(dst, 0))
        self._put_copies(stream, [(dst, src, size)])

    def memcpy2DAsync(self, dst, dst_pitch, src, src_pitch, width, height, kind, stream):
        assert min(dst_pitch, src_pitch) >= width
        self._machine.enter()
        self.log.append(("copy 2d", (width, height), stream))
        rows = [(dst + i * dst_pitch, src + i * src_pitch, width) for i in range(height)]
        self._put_copies(stream, rows)

    def _put_copies(self, stream, runs):
        """Put copies, (dst, src, bytes) each, on a stream."""
        where = self._machine.stream(stream)
        for to, of, size in runs:
            self.check_status(
                0 if self._holds(to, size) and self._holds(of, size) else INVALID_VALUE
            )

        def copy():
            for run in runs:
                ctypes.memmove(*run)

        dst, src, _ = runs[0]
        if where not in self.capturing and not self._is_known(src):
            if sum(size for _, _, size in runs) > _STAGED_AT_ONCE:
                self._machine.require_usable(where)
                self._machine.progress(stream)
            staged = [ctypes.string_at(of, size) for _, of, size in runs]
            runs = [(to, of, len(of)) for (to, _, _), of in zip(runs, staged, strict=True)]
        work = self._machine.submit(where, copy)
        if work is not None and not self._is_known(dst):
            self._machine.run(work)

    def memsetAsync(self, ptr, value, size, stream):
        self._machine.enter()
        self.log.append(("memset", size, stream, self.current))
        assert self._device_of_memory(ptr) is not None, "a memset of memory that is none"
        self._machine.submit(self._machine.stream(stream), lambda: ctypes.memset(ptr, value, size))

    def hostRegister(self, ptr, size, flags):
        self._machine.enter()
        self._machine.require_safe()
        self.log.append(("register", ptr, size, flags))
        self.check_status(self.refused_registration)
        assert ptr not in self.registered
        ctypes.memset(ptr, 0x5A, size)  # a crash if any of it were not mapped
        self.registered[ptr] = size

    def hostUnregister(self, ptr):
        self._begin_release()
        self.log.append(("unregister", ptr, self.current))
        ctypes.memset(ptr, 0xA5, self.registered.pop(ptr))

    def pointerGetAttributes(self, ptr):
        self._machine.enter()
        self.check_status(self.fault)
        device = self._device_of_memory(ptr)
        if device is not None:
            return SimpleNamespace(type=2, devicePointer=ptr, device=device)
        if self._is_pinned(ptr):
            return SimpleNamespace(type=1, devicePointer=ptr, device=0)
        return SimpleNamespace(type=0, devicePointer=0, device=-1)

    def _is_pinned(self, ptr):
        blocks = [*self.pinned.items(), *self.registered.items()]
        return any(start <= ptr < start + size for start, size in blocks)

    def _device_of_memory(self, ptr):
        for start, memory in list(self.allocated.items()):
            if start <= ptr < start + len(memory.bytes):
                return memory.device
        return None

    def _is_known(self, ptr):
        return self._is_pinned(ptr) or self._device_of_memory(ptr) is not None

    def _holds(self, ptr, size):
        """Whether bytes lie in one allocation; of pageable memory that is not known."""
        blocks = {**{p: len(m.bytes) for p, m in list(self.allocated.items())}, **self.pinned}
        return all(ptr + size <= p + n for p, n in blocks.items() if p <= ptr < p + n)

    def _reaches(self, ptr):
        """Return whether a kernel reaches an address; else the device is lost."""
        is_known = self._is_known(ptr)
        self.fault = self.fault if is_known else ILLEGAL
        return is_known


class Driver:
    """The driver API: `launches` has every launch with the bytes that the driver would copy.

    `kernels` says what a function does: function -> callable of the bytes.
    """

    def __init__(self, runtime, machine):
        self._runtime, self._machine = runtime, machine
        self.launches = []
        self.attributes = []
        self.params_bytes = {}
        self.smem = {}  # of functions that have opted in to more, in bytes
        self.kernels = {}

    def check_status(self, status):
        self._runtime.check_status(status)

    def launchKernel(self, function, *numbers):
        *shape, smem, stream, arguments, extra = numbers
        if not all(0 <= n < 2**32 for n in (*shape, smem)):
            raise OverflowError("value too large to convert to unsigned int")
        self._machine.enter_driver()
        within = all(1 <= n <= most for n, most in zip(shape, _GRID + _BLOCK, strict=True))
        if not within or math.prod(shape[3:]) > _THREADS or smem > self.smem.get(function, _SMEM):
            raise CudaError(INVALID_VALUE)
        where = self._machine.stream(stream)
        if self._machine.device_of_stream(where) != self._runtime.current:
            raise CudaError(INVALID_HANDLE)
        pointer = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
        params = ctypes.string_at(pointer, self.params_bytes.get(function, 0))
        kernel = self.kernels.get(function)
        self._machine.submit(where, lambda: kernel(params) if kernel else None)
        self.launches.append(
            (function, tuple(shape), smem, stream, params, self._runtime.current, extra)
        )

    def funcGetAttribute(self, attribute, function):
        self._machine.enter_driver()
        return 0

    def funcSetAttribute(self, function, attribute, value):
        self._machine.enter_driver()
        if not 0 <= value <= _MAX_SMEM:
            raise CudaError(INVALID_VALUE)
        self.attributes.append((function, attribute, value))
        self.smem[function] = value


# --- libcuda.so.1 ---

_NONE, _ACTIVE, _INVALIDATED = 0, 1, 2


class LibCuda:
    """libcuda.so.1. Called through ctypes, so none of its functions keeps the interpreter's lock.

    They take what ctypes passes: handles as ints, out parameters by reference. `calls` has every
    batch of copies: (dst, src, sizes), the attributes as the header lays them out, the indices from
    which they hold, and the stream.
    """

    def __init__(self, machine, runtime):
        self._machine, self._runtime = machine, runtime
        self.memory_operations = 0  # the status of what they answer
        self.asked, self.calls = [], []
        self.found = 0  # whether there is a batched copy: 1 is no such symbol, 2 no such version
        self.status, self.fail_index = 0, None  # what a batch answers
        self._entry = BATCH_TYPE(self._copy)

    def cuGetProcAddress_v2(self, name, address, version, flags, found):
        self.asked.append((name, version, flags.value))
        found._obj.value = self.found
        if self.found != 1:
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
        return self.status or self._put_copies(list(zip(*runs, strict=True)), stream)

    def cuThreadExchangeStreamCaptureMode(self, mode):
        def exchange():
            mode._obj.value = self._machine.exchange_mode(mode._obj.value)

        return self._answer(exchange)

    def cuStreamGetCaptureInfo_v2(self, stream, status, id, graph, dependencies, count):
        def ask():
            where = self._machine.stream(_value(stream))
            capture = self._machine.capturing.get(where)
            if capture is None:
                status._obj.value = _NONE
            elif capture.invalidated:
                status._obj.value = _INVALIDATED
            else:
                status._obj.value = _ACTIVE
                id._obj.value = capture.id
            return 0

        return self._answer(ask)

    def cuLaunchHostFunc(self, stream, function, argument):
        """Call a function of C's, which takes an address."""
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.value)
        return self._put(stream, lambda: function(argument.value))

    def cuStreamWriteValue32_v2(self, stream, address, value, flags):
        assert flags.value == 0
        word = self._word(address)
        return self._put(stream, lambda: setattr(word, "value", value.value))

    def cuStreamWaitValue32_v2(self, stream, address, value, flags):
        """The GPU looks at a word until it is equal to `value` (flags 1)."""
        assert flags.value == 1
        word = self._word(address)
        return self._put(stream, lambda: None, lambda: word.value == value.value)

    def _put_copies(self, runs, stream):
        def put():
            where = self._machine.stream(stream or 0)
            if self._machine.is_legacy(where) or where in self._machine.capturing:
                return UNSUPPORTED
            return self._runtime._put_copies(stream, runs)

        return self._answer(put)

    def _word(self, address):
        assert self._runtime._is_pinned(address.value), "a word that the GPU cannot reach"
        return ctypes.c_uint32.from_address(address.value)

    def _put(self, stream, function, is_ready=None):
        def put():
            self._machine.submit(self._machine.stream(_value(stream)), function, (), is_ready)
            return self._runtime.fault or self.memory_operations

        return self._answer(put)

    def _answer(self, ask):
        try:
            self._machine.enter_driver()
            return ask() or 0
        except CudaError as error:
            return error.status


def _value(handle):
    return handle if isinstance(handle, int) else handle.value or 0
