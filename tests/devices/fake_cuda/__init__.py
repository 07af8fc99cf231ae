"""A stand-in for what kvcupy calls of CuPy, and of libcuda itself: CUDA's rules without a GPU.

Device memory is host memory. Work waits in its stream until it is waited for (or
`machine.progress`), captured work runs when its graph is launched, arrays come from a
stream-ordered pool like CuPy's. Threads, handles and addresses that CUDA would refuse are refused.
"""

from __future__ import annotations

import random
import sys
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from kvcupy import cuda_api
from kvcupy.cuda_api import find_batch

from . import arrays
from .machine import (  # noqa: F401  some are passed on to the tests
    GLOBAL,
    ILLEGAL,
    RELAXED,
    THREAD_LOCAL,
    UNSUPPORTED,
    CudaError,
    Machine,
    Memory,
    OutOfMemoryError,
)
from .runtime import Driver, LibCuda, Runtime


class FakeApi(cuda_api.CudaApi):
    """What `CudaApi` is, of fakes. `cupy` has only what kvcupy names."""

    default_stream = 0  # CuPy's: 2 with CUPY_CUDA_PER_THREAD_DEFAULT_STREAM

    def __init__(self, seed=None):
        """With a seed streams run by themselves, in an order drawn from it."""
        self.machine = machine = Machine()
        machine.chance = None if seed is None else random.Random(seed)
        self.runtime = runtime = Runtime(machine)
        self.driver = Driver(runtime, machine)
        self.errors = (CudaError, OutOfMemoryError)
        self.nvrtc_version = (12, 9)
        self.pci_devices = Path("/nowhere")
        self.library = LibCuda(machine, runtime)
        self.currents = {}  # CuPy's current stream by device, outside `with stream`
        self.expressions = set()  # array expressions whose kernels are loaded
        api = self

        def destroy(what, call, *arguments):
            try:
                call(*arguments)
            except CudaError as error:  # CuPy's destructor cannot raise either
                runtime.log.append((f"refused destruction of a {what}", error.status))

        class Stream:
            device_id = 0

            def __init__(self, non_blocking=False, priority=0):
                self.ptr = runtime.streamCreateWithPriority(1, priority)
                self.device_id = runtime.current
                gone = weakref.finalize(self, destroy, "stream", runtime.streamDestroy, self.ptr)
                gone.atexit = False

            @classmethod
            def from_external(cls, source):
                wrapped = cls.__new__(cls)  # which does not destroy the stream
                wrapped.ptr, wrapped.device_id = source.__cuda_stream__()[1], -1
                wrapped.source = source
                return wrapped

            def __enter__(self):
                if self.device_id not in (-1, runtime.current):
                    raise RuntimeError(f"a stream of device {self.device_id} on {runtime.current}")
                api._stack().append((runtime.current, self))
                return self

            def __exit__(self, *_):
                api._stack().pop()

            def begin_capture(self, mode=None):
                machine.enter()
                machine.begin(machine.stream(self.ptr), RELAXED if mode is None else mode)

            def end_capture(self):
                machine.enter()
                capture = machine.end(machine.stream(self.ptr))
                machine.require_safe()  # the graph is instantiated
                graph = Graph(capture.nodes)
                weakref.finalize(graph, destroy, "graph", machine.require_safe).atexit = False
                return graph

        class Graph:
            def __init__(self, nodes):
                self._nodes = nodes

            def launch(self, stream):
                machine.enter()
                where = machine.stream(stream.ptr)
                if where in runtime.capturing:
                    runtime.capturing[where].invalidated = True
                    raise CudaError(UNSUPPORTED)
                machine.require_safe()  # what it needs is put on the GPU at first
                for function, is_ready in self._nodes:
                    machine.submit(where, function, (), is_ready)

        class Device:
            def __init__(self, index):
                self.index = index

            @property
            def compute_capability(self):
                with self:
                    return "90"

            def __enter__(self):
                self.before = runtime.getDevice()
                runtime.setDevice(self.index)

            def __exit__(self, *_):
                runtime.setDevice(self.before)

        class RawModule:
            def __init__(self, *, path):
                machine.enter()
                machine.require_safe()
                machine.progress_device()  # which the driver may wait for
                self.image = Path(path).read_bytes()

            def get_function(self, name):
                return SimpleNamespace(kernel=SimpleNamespace(ptr=0xF00))

        def unowned(pointer, size, owner, device_id):
            return SimpleNamespace(ptr=pointer, owner=owner, device_id=device_id)

        def pinned(size, flags):
            machine.enter()
            machine.require_safe()
            return arrays.PinnedMemory(runtime, size)

        def default():
            return Stream.from_external(
                SimpleNamespace(__cuda_stream__=lambda: (0, self.default_stream))
            )

        def get_current_stream(device_id=-1):
            index = runtime.current if device_id < 0 else device_id
            for where, stream in reversed(api._stack()):
                if where == index:
                    return stream
            return self.currents.get(index) or default()

        self.cupy = SimpleNamespace(
            RawModule=RawModule,
            cuda=SimpleNamespace(
                Stream=Stream, Device=Device,
                Memory=lambda size: arrays.DeviceMemory(runtime, size),
                UnownedMemory=unowned, MemoryPointer=arrays.MemoryPointer,
                PinnedMemory=pinned, get_current_stream=get_current_stream,
            ),
            ndarray=arrays.array_class(self),
        )  # fmt: skip
        self.pool = arrays.Pool(runtime, get_current_stream)
        vars(self.cupy).update(vars(arrays.functions(self, self.cupy.ndarray)))

    def _stack(self):
        return vars(self.machine.thread).setdefault("streams", [])

    def load_expression(self, *kinds):
        """Load the kernel of an array expression at its first use."""
        self.machine.enter()
        self.machine.require_safe()
        if (self.runtime.current, *kinds) not in self.expressions:
            self.expressions.add((self.runtime.current, *kinds))
            self.machine.progress_device()  # which the driver may wait for

    def submit(self, function):
        """Put the work of an array expression on CuPy's current stream."""
        stream = self.cupy.cuda.get_current_stream()
        self.machine.submit(self.machine.stream(stream.ptr), function)

    @property
    def memcpy_batch(self):
        return find_batch(self.runtime.driver_version, self.library)

    def install(self, monkeypatch):
        """Let `import cupy` find these fakes."""
        modules = SimpleNamespace(**vars(self.cupy))
        modules.cuda.PinnedMemoryPointer = type("PinnedMemoryPointer", (), {})
        monkeypatch.setitem(sys.modules, "cupy", modules)
        monkeypatch.setattr(cuda_api, "CudaApi", lambda: self)


@contextmanager
def captured_by_another(api, stream=None, mode=GLOBAL):
    """Capture a stream, as torch captures: its own stream, in the global mode. Ends in an error if
    anything has invalidated the capture, else with the graph as an attribute of the stream."""
    foreign = api.cupy.cuda.Stream(non_blocking=True) if stream is None else stream
    foreign.begin_capture(mode)
    yield foreign
    foreign.graph = foreign.end_capture()


def log(api, kind):
    """Return what the runtime has logged of one kind of call."""
    return [entry[1:] for entry in api.runtime.log if entry[0] == kind]
