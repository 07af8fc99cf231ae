"""What kvcupy calls of CuPy, gathered in one object, and how its errors become kvcupy's.

Everything here is CuPy's thin layer over the CUDA runtime and driver. Its queries return a status
unchecked, its other calls raise. A test without a GPU hands in an object of the same shape.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import CaptureError, DeviceError, KvcupyError
from . import cuda_driver

SUCCESS, NOT_READY = 0, 600
NO_CONTEXT = 201  # the driver's: the thread has made no call of the runtime yet
NOT_SUPPORTED = 801
CAPTURE_ERRORS = range(900, 909)  # cudaErrorStreamCapture...; the driver numbers them alike
UNJOINED = 904
DISABLE_TIMING = 2
ATTRIBUTE_MULTIPROCESSORS = 16
ATTRIBUTE_REGISTERED_HOST_POINTERS = 91  # ...CanUseHostPointerForRegisteredMem
FUNCTION_STATIC_SMEM, FUNCTION_MAX_DYNAMIC_SMEM = 1, 8
DEFAULT_SMEM_BYTES = 48 * 1024
MEMCPY_DEFAULT = 4  # the driver tells host from device by the address
HOST_ALLOC_PORTABLE = HOST_REGISTER_PORTABLE = 1
HOST_ALLOC_MAPPED = HOST_REGISTER_MAPPED = 2
UNREGISTERED_MEMORY = 0
DEFAULT_STREAMS = (0, 1, 2)  # of the device, or of the device and the thread, that are current


class CudaApi:
    """CuPy, its runtime and its driver bindings.

    Attributes
    ----------
    errors : the exceptions with which the two bindings report a status, and the pool that there
        is no memory
    can_launch_packed : whether the driver binding takes a launch as plain integers
    pci_devices : where the system lists the devices on its buses
    """

    def __init__(self) -> None:
        try:
            import cupy
            from cupy_backends.cuda.api import driver, runtime
        except ImportError as error:
            raise DeviceError(f"cuda: CuPy cannot be imported: {error}") from error
        self.cupy: Any = cupy
        self.runtime: Any = runtime
        self.driver: Any = driver
        self.errors: tuple[type[Exception], ...] = (
            runtime.CUDARuntimeError,
            driver.CUDADriverError,
            cupy.cuda.memory.OutOfMemoryError,
        )
        self.can_launch_packed = hasattr(driver, "launchKernel")
        self.pci_devices = Path("/sys/bus/pci/devices")

    @cached_property
    def memcpy_batch(self) -> Callable[..., int] | None:
        """The driver's batched copy (`cuda_driver.BATCH_TYPE`); None where it has none."""
        return cuda_driver.find_batch(self.runtime.driverGetVersion(), self.library)

    @cached_property
    def library(self) -> Any:
        """The driver, for what CuPy does not bind; None where it is not found."""
        return cuda_driver.load()

    def relaxed(self) -> cuda_driver.RelaxedCapture:
        """Return a context in which captures prohibit nothing to this thread but what concerns
        them: to allocate, to ask and to wait are legal in it."""
        return cuda_driver.RelaxedCapture(self.library)

    def capture_id(self, pointer: int) -> int | None:
        """Return the number of the capture that a stream is part of (`cuda_driver.capture_id`)."""
        return cuda_driver.capture_id(self.library, pointer)

    def record(self, event: int, stream: int) -> None:
        """Record an event in a stream, with their device current.

        CuPy's binding keeps the interpreter's lock. Where the queue of the stream is full, the call
        waits for the stream, and that perhaps for a host function, which waits for the lock.
        """
        record = getattr(self.library, "cuEventRecord", None)
        status = NO_CONTEXT
        if record is not None:
            status = record(ctypes.c_void_p(event), ctypes.c_void_p(stream))
        if status == NO_CONTEXT:  # the runtime gives the thread one
            self.runtime.eventRecord(event, stream)
        else:
            self.driver.check_status(status)

    def failure(self, what: str, error: Exception) -> KvcupyError:
        """Return the kvcupy exception for a CUDA error met while doing `what`."""
        status = getattr(error, "status", None)
        if status in CAPTURE_ERRORS:
            return CaptureError(f"{what}: {error}")
        if isinstance(error, MemoryError):
            return DeviceError(f"{what}: {error}{self._free_memory()}")
        return DeviceError(f"{what}: {error}")

    def _free_memory(self) -> str:
        with suppress(*self.errors):
            free, total = self.runtime.memGetInfo()
            return f" {free:,} of {total:,} bytes are free"
        return ""

    def query(self, what: str, status: int) -> bool:
        """Return whether a queried point has passed; raise if the query met a fault."""
        if status == SUCCESS:
            return True
        if status == NOT_READY:
            return False
        try:
            self.runtime.check_status(status)
        except self.errors as error:
            raise self.failure(what, error) from error
        raise DeviceError(f"{what}: CUDA status {status}")

    def is_capturing(self, pointer: int) -> bool:
        """Return whether a stream is being captured, in good order or not."""
        try:
            return bool(self.runtime.streamIsCapturing(pointer))
        except self.errors as error:
            if getattr(error, "status", None) in CAPTURE_ERRORS:
                return True
            raise self.failure(f"stream {pointer:#x}", error) from error
        except RuntimeError:  # CuPy: an error has invalidated the capture
            return True


def why_not() -> str:
    """Return why no GPU is usable, or an empty string if one is. Never raises.

    >>> isinstance(why_not(), str)
    True
    """
    try:
        api = CudaApi()
        count = api.runtime.getDeviceCount()
    except DeviceError as error:
        return str(error)
    except Exception as error:  # a broken driver shows itself in many ways
        return f"cuda: the driver does not work: {error}"
    return "" if count > 0 else "cuda: the driver works but lists no GPU"


def cuda_available() -> bool:
    """Return whether a GPU is usable. Never raises."""
    return not why_not()


def properties(api: CudaApi, index: int) -> tuple[int, str, str]:
    """Return the multiprocessors of a GPU, its architecture ("sm_90") and its name.

    Raises
    ------
    DeviceError : there is no such GPU, or it cannot be used
    """
    name = f"cuda:{index}"
    try:
        count = api.runtime.getDeviceCount()
        if index >= count:
            raise DeviceError(f"{name}: there are {count} GPUs")
        multiprocessors = int(api.runtime.deviceGetAttribute(ATTRIBUTE_MULTIPROCESSORS, index))
        arch = f"sm_{api.cupy.cuda.Device(index).compute_capability}"
        model = api.runtime.getDeviceProperties(index)["name"]
    except api.errors as error:
        raise api.failure(name, error) from error
    return multiprocessors, arch, model.decode() if isinstance(model, bytes) else str(model)


def device_of_pointer(pointer: int) -> int:
    """Return the index of the GPU that an address belongs to; 0 for a null pointer."""
    if not pointer:
        return 0
    api = CudaApi()
    try:
        return int(api.runtime.pointerGetAttributes(pointer).device)
    except api.errors as error:
        raise api.failure(f"address {pointer:#x}", error) from error


@contextmanager
def dlpack_stream(index: int) -> Iterator[int]:
    """Make a GPU current, and give CuPy's current stream there as DLPack's `stream=` wants it.

    The default stream is 1 there, which means that of the current GPU, so the exporter is to be
    asked inside the with block.
    """
    api = CudaApi()
    here = api.runtime.getDevice() == index
    with nullcontext() if here else api.cupy.cuda.Device(index):
        yield int(api.cupy.cuda.get_current_stream(index).ptr) or 1
