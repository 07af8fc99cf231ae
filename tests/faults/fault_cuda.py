"""The stand-in for CUDA as a device on which programs run, and the points that exist only there.

Its kernels are those of the host device: what the driver is asked to launch is run by the build for
this processor, on the same packed Params, where the stand-in's streams get to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from devices.fake_cuda import CudaError, FakeApi, OutOfMemoryError
from fault_points import MARK, STATUS, Point, compiler_crashed, no_page, no_thread
from fault_runs import World

import kvcupy as kv
from kvcupy import devices, scratch
from kvcupy.cache.pages import PageAllocator
from kvcupy.devices import cuda, host, nvrtc
from kvcupy.kernels import Specialisation
from kvcupy.ops import call as op_call

_BUILDS: dict[Specialisation, host.HostFunction] = {}
_FUNCTIONS = 0x10000  # the driver's functions, by number of their specialisation


class Refused(CudaError):
    """An error that CUDA answers with, of a status that nothing else has."""

    def __init__(self, status: int = STATUS) -> None:
        super().__init__(status)
        self.args = (f"{MARK}: cudaError {status}",)


class Kernels:
    """Loads specialisations as functions of the stand-in's driver, and runs them."""

    def __init__(self, api: FakeApi) -> None:
        self.known: list[Specialisation] = []
        self._driver, self._launch = api.driver, api.driver.launchKernel
        api.driver.launchKernel = self.launch

    def compile(self, specialisation: Specialisation, arch: str) -> nvrtc.Compiled:
        self.known.append(specialisation)
        return nvrtc.Compiled(b"image", str(len(self.known) - 1), "", arch)

    def load(self, name: str) -> int:
        specialisation = self.known[int(name)]
        pointer = _FUNCTIONS + 16 * int(name)
        self._driver.params_bytes[pointer] = specialisation.kernel.params.itemsize
        return pointer

    def launch(self, function: int, *numbers: int) -> None:
        grid, block, smem_bytes = numbers[:3], numbers[3:6], numbers[6]
        specialisation = self.known[(function - _FUNCTIONS) // 16]
        build = _BUILDS.setdefault(specialisation, host.HostFunction(specialisation, ()))
        packed = host._config(grid, block, smem_bytes, 1, 0)

        def run(params: bytes) -> None:
            assert build.entry(params, packed) == 0, f"{specialisation} failed"

        self._driver.kernels[function] = run
        self._launch(function, *numbers)


class CudaWorld(World):
    """A new stand-in for every run."""

    kind = "cuda"

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self.renew(kernels=False)

    def renew(self, *, kernels: bool) -> None:
        self._patch.undo()
        op_call.forget()
        self.api = api = FakeApi(late=True)
        api.install(self._patch)
        self.device = device = cuda.CudaDevice(0, api)
        self._patch.setitem(devices._devices, "cuda:0", device)
        self._patch.setattr(scratch, "_captured", [])
        loads = Kernels(api)
        self._patch.setattr(nvrtc, "compile_cubin", loads.compile)
        modules = api.cupy.RawModule

        class RawModule(modules):  # type: ignore[misc, valid-type]
            def get_function(self, name: str) -> Any:
                function = super().get_function(name)
                function.kernel.ptr = loads.load(name)
                return function

        api.cupy.RawModule = RawModule
        device.fault_array()
        self._patch.setattr(kv.config, "_verify", "never")  # programs issue what they issue

    def close(self) -> None:
        self._patch.undo()
        op_call.forget()

    def leaks(self) -> list[str]:
        """Return what the device still holds once a program is gone."""
        device, api = self.device, self.api
        with contextlib.suppress(kv.KvcupyError):
            device.synchronize()
        held = [f"{len(device.context.retired)} owners in flight"] if device.context.retired else []
        if device.context.captures:
            held.append("a capture that is open")
        if api.machine.deadlocks:
            held.append(f"deadlocks: {api.machine.deadlocks}")
        return held

    def points(self) -> tuple[Point, ...]:
        api = self.api
        runtime, library = api.runtime, api.library

        def refused() -> Refused:
            return Refused()

        def memory() -> Refused:
            return Refused(2)

        def pinned() -> OutOfMemoryError:
            error = OutOfMemoryError(0, 0)
            error.args = (f"{MARK}: cudaErrorMemoryAllocation of pinned memory",)
            return error

        def answers(real: Any, error: Any, *arguments: Any) -> int:
            return STATUS

        def ends(real: Any, error: Any, stream: Any) -> None:
            real(stream)
            raise error

        stream = api.cupy.cuda.Stream
        return (
            Point("cudaMalloc", ((runtime, "malloc"),), memory, before_launch=True),
            Point("cudaHostAlloc", ((api.cupy.cuda, "PinnedMemory"),), pinned, before_launch=True),
            Point("allocation of pages, cuda", ((PageAllocator, "alloc"),), no_page),
            Point("NVRTC", ((nvrtc, "compile_cubin"),), compiler_crashed, before_launch=True),
            Point("cuModuleLoad", ((api.cupy, "RawModule"),), memory, before_launch=True),
            Point("cuLaunchKernel", ((api.driver, "launchKernel"),), refused),
            Point("cudaMemcpyAsync", ((runtime, "memcpyAsync"), (runtime, "memcpy2DAsync")),
                  refused),
            Point("cudaMemsetAsync", ((runtime, "memsetAsync"),), refused),
            Point("cudaStreamCreate", ((stream, "__init__"),), refused),
            Point("cudaEventCreate", ((runtime, "eventCreateWithFlags"),), refused),
            Point("cudaEventRecord", ((runtime, "eventRecord"),), refused),
            Point("cuEventRecord", ((library, "cuEventRecord"),), None, answers),
            Point("cudaStreamWaitEvent", ((runtime, "streamWaitEvent"),), refused),
            Point("cudaStreamSynchronize", ((runtime, "streamSynchronize"),), refused),
            Point("cudaEventSynchronize", ((runtime, "eventSynchronize"),), refused),
            Point("cudaEventQuery", ((runtime, "eventQuery"),), None, answers),
            Point("cuLaunchHostFunc", ((library, "cuLaunchHostFunc"),), None, answers),
            Point("cuStreamWriteValue32", ((library, "cuStreamWriteValue32_v2"),), None, answers),
            Point("cudaStreamBeginCapture", ((stream, "begin_capture"),), refused),
            Point("cudaGraphInstantiate", ((stream, "end_capture"),), refused, ends),
            Point("thread, cuda", ((_threads(), "start"),), no_thread, counts=_of_kvcupy),
        )  # fmt: skip


def _threads() -> Any:
    import threading

    return threading.Thread


def _of_kvcupy(thread: Any) -> bool:
    """Whether a thread is not one of the stand-in's."""
    return str(thread.name).startswith("kvcupy")


@contextlib.contextmanager
def cuda_world() -> Iterator[CudaWorld]:
    world = CudaWorld()
    try:
        yield world
    finally:
        world.close()
