"""The stand-in for CUDA as a device on which programs run, and the points that exist only there."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from devices.fake_cuda import CudaError, OutOfMemoryError
from devices.fake_cuda.kernels import open_device
from fault_points import MARK, STATUS, Point, compiler_crashed, no_page, no_thread
from fault_runs import World

import kvcupy as kv
from kvcupy.cache.pages import PageAllocator
from kvcupy.devices import nvrtc
from kvcupy.ops import call as op_call


class Refused(CudaError):
    """An error that CUDA answers with, of a status that nothing else has."""

    def __init__(self, status: int = STATUS) -> None:
        super().__init__(status)
        self.args = (f"{MARK}: cudaError {status}",)


class CudaWorld(World):
    """A new stand-in for every run."""

    kind = "cuda"

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self.renew(kernels=False)

    def renew(self, *, kernels: bool) -> None:
        self._patch.undo()
        self.device = open_device(self._patch)
        self.api = self.device.context.api
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

        refused, memory = Refused, functools.partial(Refused, 2)

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
            Point("cudaStreamCreate", ((runtime, "streamCreateWithPriority"),), refused),
            Point("cudaEventCreate", ((runtime, "eventCreateWithFlags"),), refused),
            Point("cudaEventRecord", ((runtime, "eventRecord"),), refused),
            Point("cudaStreamWaitEvent", ((runtime, "streamWaitEvent"),), refused),
            Point("cudaStreamSynchronize", ((runtime, "streamSynchronize"),), refused),
            Point("cudaEventSynchronize", ((runtime, "eventSynchronize"),), refused),
            Point("cudaEventQuery", ((runtime, "eventQuery"),), None, answers),
            Point("cuLaunchHostFunc", ((library, "cuLaunchHostFunc"),), None, answers),
            Point("cuStreamWriteValue32", ((library, "cuStreamWriteValue32_v2"),), None, answers),
            Point("cudaStreamBeginCapture", ((stream, "begin_capture"),), refused),
            Point("cudaGraphInstantiate", ((stream, "end_capture"),), refused, ends),
            Point("thread, cuda", ((threading.Thread, "start"),), no_thread, counts=_of_kvcupy),
        )  # fmt: skip


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
