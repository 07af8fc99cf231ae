"""The runtime and the driver as CuPy binds them. Public methods are called as the real ones are."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

from .machine import Event, Memory
from .statuses import (
    CAPTURED_EVENT,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_READY,
    OUT_OF_MEMORY,
    UNSUPPORTED,
    CudaError,
)

_FREED = 0xDD


class Runtime:
    """The runtime API: `log` has every call that puts work somewhere.

    Queries and whatever asks the driver a short question keep the interpreter's lock, as in CuPy.

    Attributes
    ----------
    fault : the status that every call answers with once the device is lost
    calls : host functions of captures
    limit_bytes : how much device memory there is
    """

    streamCaptureModeGlobal, streamCaptureModeThreadLocal, streamCaptureModeRelaxed = 0, 1, 2

    def __init__(self, machine):
        self._machine = machine
        self.log = []
        self.count = 2
        self.fault = 0
        self.held = machine.held
        self.capturing = machine.capturing
        self.events = {}  # handle -> Event
        self.priorities = {}
        self.calls = []
        self.memory_type = 1
        self.driver_version, self.runtime_version = 12040, 12090
        self.attributes = {16: 132, 91: 1}
        self.bus_id = "0000:3B:00.0"
        self.refused_copies = {}  # destination -> status
        self.refused_registration = 0
        self.refused_unregistration = 0
        self.registered = {}  # address -> bytes
        self.limit_bytes = 1 << 30
        self.allocated = {}  # address -> Memory
        self._freed = []  # poisoned, and never given back to the system

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
        self._machine.enter(keeps_gil=True)
        self.current = index

    def memGetInfo(self):
        self._machine.enter(keeps_gil=True)
        self._machine.require_safe()
        self.log.append(("context", self.current))
        used = sum(len(memory.bytes) for memory in self.allocated.values())
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
        for capture in self.capturing.values():
            capture.invalidated = True
        self.check_status(UNSUPPORTED if self.capturing else self.fault)
        self.held.clear()
        self._machine.progress_device()

    # Events.
    def eventCreateWithFlags(self, flags):
        self._machine.enter()
        self._machine.require_safe()  # as for streams
        event = self._machine.new_handle()
        self.events[event] = Event(self.current)
        self.log.append(("create event", flags))
        return event

    def eventRecord(self, event, stream):
        self._machine.enter(keeps_gil=True)
        self._machine.require_room(self._machine.stream(stream))
        self._record(event, stream)

    def _record(self, event, stream):
        where, known = self._machine.stream(stream), self.events[event]
        if self._machine.device_of_stream(where) not in (None, known.device):
            raise CudaError(INVALID_HANDLE)
        known.work = self._machine.submit(where, lambda: None)
        known.stream, known.capture = where, self.capturing.get(where)
        if known.capture and where != known.capture.origin:
            known.capture.joined.discard(where)
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
        pending = known.work is not None and not known.work.done
        return NOT_READY if pending or known.stream in self.held else 0

    def eventQuery(self, event):
        self._machine.enter(keeps_gil=True)
        return self._event_status(event)

    def eventSynchronize(self, event):
        self._machine.enter()
        status = self._event_status(event)
        self.check_status(0 if status == NOT_READY else status)
        if status == NOT_READY:
            known = self.events[event]
            self.held.discard(known.stream)
            if known.work is not None:
                self._machine.run(known.work)

    def eventElapsedTime(self, start, end):
        return 1.5

    # Streams.
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
        self.held.discard(self._machine.stream(stream))
        self._machine.progress(stream)

    def streamQuery(self, stream):
        self._machine.enter(keeps_gil=True)
        status = self._spoil(stream)
        idle = self._machine.is_idle(self._machine.stream(stream))
        return status or (0 if idle else NOT_READY)

    def streamIsCapturing(self, stream):
        self._machine.enter()
        where = self._machine.stream(stream)
        if self._machine.implicit_captures(where):  # which are none the worse for being asked for
            raise CudaError(906)
        capture = self.capturing.get(where)
        if capture and capture.invalidated:
            raise RuntimeError("an error has invalidated the capture sequence")
        return capture is not None

    def launchHostFunc(self, stream, function, argument):
        self._machine.enter()
        if not self._machine.late:
            function(argument)
            return
        held = [(function, argument)]
        del function

        def call():  # CuPy lets go of the function where the driver calls it
            function, argument = held.pop()
            function(argument)

        where = self._machine.stream(stream)
        self._machine.submit(where, lambda: self._machine.call_host(call))

    def _launchHostFuncUnmanaged(self, stream, entry):
        self._machine.enter()
        self.calls.append(entry)
        if self._machine.late:
            function, argument = entry
            where = self._machine.stream(stream)
            self._machine.submit(where, lambda: self._machine.call_host(lambda: function(argument)))

    # Memory.
    def malloc(self, size):
        self._machine.enter()
        self._machine.require_safe()
        self.check_status(self.fault)
        used = sum(len(memory.bytes) for memory in self.allocated.values())
        self.check_status(OUT_OF_MEMORY if used + size > self.limit_bytes else 0)
        memory = Memory(size)
        self.allocated[memory.ptr] = memory
        self.log.append(("malloc", size, self.current))
        return memory.ptr

    def free(self, ptr):
        self._machine.enter()
        self._machine.require_safe()
        memory = self.allocated.pop(ptr)
        if not self.capturing:
            self._machine.progress()  # it waits for the device
        ctypes.memset(ptr, _FREED, len(memory.bytes))
        self._freed.append(memory)

    def memcpyAsync(self, dst, src, size, kind, stream):
        assert kind == 4, "host or device: the driver tells by the address"
        self._machine.enter()
        self.log.append(("copy", size, stream, dst, src))
        self.check_status(self.fault or self.refused_copies.get(dst, 0))
        self._machine.submit(self._machine.stream(stream), lambda: ctypes.memmove(dst, src, size))

    def memcpy2DAsync(self, dst, dst_pitch, src, src_pitch, width, height, kind, stream):
        assert min(dst_pitch, src_pitch) >= width
        self._machine.enter()
        self.log.append(("copy 2d", (width, height), stream))

        def copy():
            for row in range(height):
                ctypes.memmove(dst + row * dst_pitch, src + row * src_pitch, width)

        self._machine.submit(self._machine.stream(stream), copy)

    def memsetAsync(self, ptr, value, size, stream):
        self._machine.enter()
        self.log.append(("memset", size, stream, self.current))
        self._machine.submit(self._machine.stream(stream), lambda: ctypes.memset(ptr, value, size))

    def hostRegister(self, ptr, size, flags):
        self._machine.enter()
        self._machine.require_safe()
        self.log.append(("register", ptr, size, flags))
        self.check_status(self.refused_registration)
        assert ptr not in self.registered
        ctypes.memset(ptr, 0x5A, size)  # a crash if any of it were not mapped
        self.registered[ptr] = size

    def freeHost(self, ptr):
        self._machine.enter()
        self._machine.require_safe()
        self.log.append(("free host", ptr))

    def hostUnregister(self, ptr):
        self._machine.enter()
        self._machine.require_safe()
        self._machine.require_safe()
        self.log.append(("unregister", ptr, self.current))
        self.check_status(self.refused_unregistration)
        ctypes.memset(ptr, 0xA5, self.registered.pop(ptr))  # likewise

    def pointerGetAttributes(self, ptr):
        self._machine.enter(keeps_gil=True)
        self.check_status(self.fault)
        device = self._device_of_memory(ptr)
        if device is not None:
            return SimpleNamespace(type=2, devicePointer=ptr, device=device)
        return SimpleNamespace(type=self.memory_type, devicePointer=ptr, device=0)

    def _device_of_memory(self, ptr):
        for start, memory in self.allocated.items():
            if start <= ptr < start + len(memory.bytes):
                return getattr(memory, "device", 0)
        return None


class Driver:
    """The driver API: `launches` has every launch with the bytes that the driver would copy.

    `kernels` says what a function does on a late machine: function -> callable of the bytes.
    """

    def __init__(self, runtime, machine):
        self._runtime, self._machine = runtime, machine
        self.launches = []
        self.attributes = []
        self.params_bytes = {}
        self.kernels = {}
        self.error = None

    def check_status(self, status):
        self._runtime.check_status(status)

    def launchKernel(self, function, *numbers):
        *shape, smem, stream, arguments, extra = numbers
        self._machine.enter()
        if self.error:
            raise CudaError(self.error)
        where = self._machine.stream(stream)
        if self._machine.device_of_stream(where) not in (None, self._runtime.current):
            raise CudaError(INVALID_HANDLE)
        pointer = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
        params = ctypes.string_at(pointer, self.params_bytes.get(function, 0))
        kernel = self.kernels.get(function)
        self._machine.submit(where, lambda: kernel(params) if kernel else None)
        self.launches.append(
            (function, tuple(shape), smem, stream, params, self._runtime.current, extra)
        )

    def funcGetAttribute(self, attribute, function):
        return 1024

    def funcSetAttribute(self, function, attribute, value):
        self._machine.enter()
        if value < 0:
            raise CudaError(INVALID_VALUE)
        self.attributes.append((function, attribute, value))
