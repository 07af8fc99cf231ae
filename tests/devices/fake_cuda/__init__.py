"""A stand-in for what kvcupy calls of CuPy, and of libcuda itself: CUDA's rules without a GPU.

Device memory is host memory. Work is done when it is issued, except behind `busy`: then events and
streams answer "not ready". `FakeApi(late=True)` is the stricter one: work waits in its stream until
it is waited for (or `machine.progress`), captured work runs when its graph is launched, arrays
come from a stream-ordered pool like CuPy's, and host functions run on a thread that holds the
driver's lock. Both keep the rules of captures, modes, current devices and handles.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from kvcupy import cuda_api
from kvcupy.arrays import array_at
from kvcupy.cuda_api import find_batch

from . import arrays
from .libcuda import BatchDriver, LibCuda
from .machine import GLOBAL, RELAXED, THREAD_LOCAL, Capture, Machine, Memory
from .runtime import Driver, Runtime
from .statuses import (
    ILLEGAL,
    INVALIDATED,
    UNJOINED,
    UNSUPPORTED,
    CudaError,
    Deadlock,
    OutOfMemoryError,
)

__all__ = [
    "GLOBAL", "ILLEGAL", "INVALIDATED", "RELAXED", "THREAD_LOCAL", "UNJOINED", "UNSUPPORTED",
    "BatchDriver", "Capture", "CudaError", "Deadlock", "FakeApi", "Machine", "Memory",
    "OutOfMemoryError", "busy", "captured_by_another",
]  # fmt: skip


class FakeApi(cuda_api.CudaApi):
    """What `CudaApi` is, of fakes. `cupy` has only what kvcupy names.

    Attributes
    ----------
    machine : what CUDA does
    library : libcuda
    currents : CuPy's current stream by device, outside `with stream`
    entered : streams that were made CuPy's current one, in order
    graphs : that became of captures
    loaded : the device of each module
    pool : CuPy's memory pool, of a late machine
    """

    def __init__(self, packed=True, late=False):
        self.machine = machine = Machine(late)
        self.runtime = runtime = Runtime(machine)
        self.driver = Driver(runtime, machine)
        self.errors = (CudaError, OutOfMemoryError)
        self.can_launch_packed = packed
        self.nvrtc_version = (12, 9)
        self.pci_devices = Path("/nowhere")
        self.library = LibCuda(machine, runtime)
        self.currents = {}
        self.entered = []
        self.graphs = []
        self.loaded = []
        api = self

        class Stream:
            device_id = 0

            def __init__(self, non_blocking=False, priority=0):
                machine.require_safe()  # CUDA does not promise that it is not
                self.ptr = machine.new_handle()
                self.device_id = runtime.current
                runtime.priorities[self.ptr] = priority
                if not non_blocking:
                    machine.blocking.add(self.ptr)

            @classmethod
            def from_external(cls, source):
                wrapped = cls.__new__(cls)
                wrapped.ptr, wrapped.device_id = source.__cuda_stream__()[1], -1
                wrapped.source = source
                return wrapped

            def __enter__(self):
                if self.device_id not in (-1, runtime.current):
                    raise RuntimeError(f"a stream of device {self.device_id} on {runtime.current}")
                api.entered.append(self.ptr)
                api._stack().append((runtime.current, self))
                return self

            def __exit__(self, *_):
                api._stack().pop()

            def begin_capture(self, mode=None):
                machine.begin(machine.stream(self.ptr), RELAXED if mode is None else mode)

            def end_capture(self):
                capture = machine.end(machine.stream(self.ptr))
                machine.require_safe()  # the graph is instantiated
                graph = SimpleNamespace(launched=[])

                def launch(stream):
                    where = machine.stream(stream.ptr)
                    if where in runtime.capturing:
                        runtime.capturing[where].invalidated = True
                        raise CudaError(UNSUPPORTED)
                    machine.require_safe()  # what it needs is put on the GPU at first
                    graph.launched.append(stream.ptr)
                    for node in capture.nodes:
                        machine.submit(where, node)

                graph.launch = launch
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
                machine.require_safe()
                self.image = Path(path).read_bytes()
                api.loaded.append(runtime.current)

            def get_function(self, name):
                return SimpleNamespace(kernel=SimpleNamespace(ptr=0xF00))

        def unowned(pointer, size, owner, device_id):
            return SimpleNamespace(ptr=pointer, owner=owner, device_id=device_id)

        def pinned(size, flags):
            machine.require_safe()
            return arrays.PinnedMemory(runtime, size)

        def ndarray(shape, dtype, memptr, strides=None):
            return array_at(memptr.mem, memptr.mem.ptr, shape, np.dtype(dtype), strides)

        default = Stream.from_external(SimpleNamespace(__cuda_stream__=lambda: (0, 0)))

        def get_current_stream(device_id=-1):
            index = runtime.current if device_id < 0 else device_id
            for where, stream in reversed(api._stack()):
                if where == index:
                    return stream
            return self.currents.get(index, default)

        self.cupy = SimpleNamespace(
            RawModule=RawModule,
            cuda=SimpleNamespace(
                Stream=Stream, ExternalStream=ExternalStream, Device=Device,
                Memory=lambda size: arrays.DeviceMemory(runtime, size),
                UnownedMemory=unowned, MemoryPointer=arrays.MemoryPointer,
                PinnedMemory=pinned, get_current_stream=get_current_stream,
            ),
            ndarray=ndarray, empty=np.empty, zeros=np.zeros, array=np.array,
        )  # fmt: skip
        if late:
            self.pool = arrays.Pool(runtime, get_current_stream)
            self.cupy.ndarray = arrays.array_class(self)
            vars(self.cupy).update(vars(arrays.functions(self, self.cupy.ndarray)))

    def _stack(self):
        return vars(self.machine.thread).setdefault("streams", [])

    def submit(self, function):
        """Put the work of an array expression on CuPy's current stream."""
        stream = self.cupy.cuda.get_current_stream()
        self.machine.submit(self.machine.stream(stream.ptr), function)

    @property
    def memcpy_batch(self):
        return find_batch(self.runtime.driver_version, self.library)

    def install(self, monkeypatch):
        """Let `import cupy` find these fakes, if they have an array type of their own."""
        if self.machine.late:
            modules = SimpleNamespace(**vars(self.cupy))
            modules.cuda.PinnedMemoryPointer = type("PinnedMemoryPointer", (), {})
            monkeypatch.setitem(sys.modules, "cupy", modules)
            monkeypatch.setattr(cuda_api, "CudaApi", lambda: self)


@contextmanager
def busy(api, stream):
    """Keep the work of a stream unfinished for the length of a with block."""
    where = api.machine.stream(stream.pointer)
    api.machine.held.add(where)
    yield
    api.machine.held.discard(where)


@contextmanager
def captured_by_another(api, stream=None, mode=GLOBAL):
    """Capture a stream, as torch captures: its own stream, in the global mode. Ends in an error if
    anything has invalidated the capture."""
    foreign = api.cupy.cuda.Stream(non_blocking=True) if stream is None else stream
    foreign.begin_capture(mode)
    yield foreign
    foreign.end_capture()
