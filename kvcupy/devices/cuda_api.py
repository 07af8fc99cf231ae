"""What kvcupy calls of CuPy, gathered in one object, and how its errors become kvcupy's.

Everything here is CuPy's thin layer over the CUDA runtime and driver. Its queries return a status
unchecked, its other calls raise. A test without a GPU hands in an object of the same shape.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import CaptureError, DeviceError, KvcupyError
from . import cuda_driver

SUCCESS, NOT_READY = 0, 600
NOT_SUPPORTED = 801
CAPTURE_ERRORS = range(900, 909)  # cudaErrorStreamCapture...; the driver numbers them alike
UNJOINED = 904
DISABLE_TIMING = 2
ATTRIBUTE_MULTIPROCESSORS = 16
FUNCTION_STATIC_SMEM, FUNCTION_MAX_DYNAMIC_SMEM = 1, 8
DEFAULT_SMEM_BYTES = 48 * 1024
MEMCPY_DEFAULT = 4  # the driver tells host from device by the address
HOST_ALLOC_PORTABLE = HOST_REGISTER_PORTABLE = 1
HOST_ALLOC_MAPPED = HOST_REGISTER_MAPPED = 2
UNREGISTERED_MEMORY = 0


class CudaApi:
    """CuPy, its runtime and its driver bindings.

    Attributes
    ----------
    errors : the exceptions with which the two bindings report a status
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
        )
        self.can_launch_packed = hasattr(driver, "launchKernel")
        self.pci_devices = Path("/sys/bus/pci/devices")

    @cached_property
    def library(self) -> Any:
        """The driver, for what CuPy does not bind. Calls by ctypes drop the interpreter's lock."""
        return ctypes.CDLL("libcuda.so.1")

    @cached_property
    def memcpy_batch(self) -> Callable[..., int] | None:
        """The driver's batched copy (`cuda_driver.BATCH_TYPE`); None where it has none."""
        return cuda_driver.find_batch(self.runtime.driverGetVersion())

    def failure(self, what: str, error: Exception) -> KvcupyError:
        """Return the kvcupy exception for a CUDA error met while doing `what`."""
        status = getattr(error, "status", None)
        if status in CAPTURE_ERRORS:
            return CaptureError(f"{what}: {error}")
        return DeviceError(f"{what}: {error}")

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


def dlpack_stream() -> int:
    """Return CuPy's current stream as DLPack's `stream=` wants it, where 1 is the default one."""
    return int(CudaApi().cupy.cuda.get_current_stream().ptr) or 1
