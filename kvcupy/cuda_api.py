"""The CUDA API of kvcupy: CuPy's bindings, what they lack by ctypes, and kvcupy's errors.

`CudaApi` gathers all of it in one object, so that a test without a GPU can pass in another of the
same shape. CuPy's part is a thin layer over the CUDA runtime and driver: its queries return an
unchecked status, its other calls raise. Calls by ctypes also release the interpreter's lock.
Handles 0 to 2 mean streams of the device that is current, as in CuPy. The last section makes CuPy
load the NVRTC and cuBLAS that match CuPy's CUDA version.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CaptureError, DeviceError, KvcupyError
from .extras import install

NUMPY_OF_BFLOAT16 = (2, 1, 2)
SUCCESS, NOT_READY = 0, 600
NO_CONTEXT = 201  # the driver's: the thread has made no call of the runtime yet
NOT_SUPPORTED = 801
CAPTURE_ERRORS = range(900, 909)  # cudaErrorStreamCapture...; the driver has the same numbers
UNJOINED = 904
DISABLE_TIMING = 2
NON_BLOCKING = 1  # cudaStreamNonBlocking
ATTRIBUTE_SM_COUNT = 16
ATTRIBUTE_SHARED_BYTES = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
ATTRIBUTE_REGISTERED_HOST_POINTERS = 91  # ...CanUseHostPointerForRegisteredMem
FUNCTION_STATIC_SMEM, FUNCTION_MAX_DYNAMIC_SMEM = 1, 8
DEFAULT_SMEM_BYTES = 48 * 1024
MEMCPY_DEFAULT = 4  # the driver tells host from device by the address
PINNED_FLAGS = 1 | 2  # cudaHostAlloc... and cudaHostRegister...: Portable and Mapped
UNREGISTERED_MEMORY = 0
CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
CAPTURE_STATUS_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
DEFAULT_STREAMS = (0, 1, 2)  # of the device, or of the device and the thread, that are current


class StreamAddress:
    """A CUDA stream known by its address, which CuPy takes too; keeps `source` alive."""

    def __init__(self, pointer: int, source: object = None) -> None:
        self.pointer = pointer
        self.source = source

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.pointer)


class RelaxedCapture:
    """Allow this thread, for a with block, calls that other captures would prohibit.

    While torch captures, in the global mode, a thread that allocates, queries or synchronises gets
    an error, and the capture is invalidated. Calls on which no captured work depends are made in
    the relaxed mode instead, which is set per thread.

    The driver refuses the exchange in a thread that has no context yet. Such a thread gets the
    context of its current device first, so enter this with the right device current.
    """

    __slots__ = ("_before", "_exchange", "_runtime")

    def __init__(self, library: Any, runtime: Any) -> None:
        self._exchange = library.cuThreadExchangeStreamCaptureMode
        self._runtime = runtime
        self._before: ctypes.c_int | None = None

    def __enter__(self) -> None:
        mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
        status = self._exchange(ctypes.byref(mode))
        if status == NO_CONTEXT:
            self._runtime.setDevice(self._runtime.getDevice())  # legal in any capture mode
            status = self._exchange(ctypes.byref(mode))
        if status == 0:  # else the mode is unchanged
            self._before = mode

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            self._exchange(ctypes.byref(self._before))


class CudaApi:
    """CuPy, its runtime and its driver bindings."""

    def __init__(self) -> None:
        require_numpy(np.__version__)
        load_matching_libraries()
        try:
            import cupy
            from cupy_backends.cuda.api import driver, runtime
        except ImportError as error:
            remedy = install(cuda_extra())
            raise DeviceError(f"cuda: CuPy cannot be imported: {error} ({remedy})") from error
        self.cupy: Any = cupy
        self.runtime: Any = runtime
        self.driver: Any = driver
        self.errors: tuple[type[Exception], ...] = (
            runtime.CUDARuntimeError, driver.CUDADriverError, cupy.cuda.memory.OutOfMemoryError,
        )  # fmt: skip
        self.pci_devices = Path("/sys/bus/pci/devices")

    @cached_property
    def memcpy_batch(self) -> Callable[..., int] | None:
        """The driver's batched copy (`BATCH_TYPE`); None where it has none."""
        return find_batch(self.runtime.driverGetVersion(), self.library)

    @property
    def default_stream(self) -> int:
        """CuPy's default: the legacy stream, or with CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1 the
        calling thread's own."""
        from cupy_backends.cuda.stream import get_default_stream_ptr

        return int(get_default_stream_ptr())

    @cached_property
    def library(self) -> Any:
        """The driver, for what CuPy does not bind."""
        return ctypes.CDLL("libcuda.so.1")

    @cached_property
    def nvrtc_version(self) -> tuple[int, int] | None:
        """The version of the NVRTC that CuPy uses; None where it cannot be loaded."""
        try:
            from cupy_backends.cuda.libs import nvrtc

            major, minor = nvrtc.getVersion()
        except Exception:  # CuPy raises several kinds; `devices.nvrtc` reports them
            return None
        return int(major), int(minor)

    def complaint(self) -> str:
        """Return one line on why the driver cannot run kernels compiled here, "" if it can."""
        driver, cupy = self.runtime.driverGetVersion(), self.runtime.runtimeGetVersion()
        nvrtc = self.nvrtc_version if driver else None  # which is slow to load
        return driver_complaint(driver, cupy, nvrtc)

    def relaxed(self) -> RelaxedCapture:
        """Return a context in which this thread may allocate, query and synchronise while other
        streams are captured."""
        return RelaxedCapture(self.library, self.runtime)

    def capture_id(self, pointer: int) -> int | None:
        """Return the unique number of the capture that a stream is part of.

        None outside a capture and in an invalidated one.
        """
        query = self.library.cuStreamGetCaptureInfo_v2
        status, number = ctypes.c_int(0), ctypes.c_uint64(0)
        handle = ctypes.c_void_p(pointer)
        failed = query(handle, ctypes.byref(status), ctypes.byref(number), None, None, None)
        return None if failed or status.value != CAPTURE_STATUS_ACTIVE else number.value

    def failure(self, what: str, error: Exception) -> KvcupyError:
        """Return the kvcupy exception for a CUDA error met while doing `what`."""
        status = getattr(error, "status", None)
        if status in CAPTURE_ERRORS:
            return CaptureError(f"{what}: {error}")
        memory = ""
        if isinstance(error, MemoryError):
            with suppress(*self.errors):
                free, total = self.runtime.memGetInfo()
                memory = f" {free:,} of {total:,} bytes are free"
        return DeviceError(f"{what}: {error}{memory}")

    @contextmanager
    def errors_as(self, what: str) -> Iterator[None]:
        """Raise CUDA errors met in a with block, while doing `what`, as kvcupy's."""
        try:
            yield
        except self.errors as error:
            raise self.failure(what, error) from error

    def query(self, what: str, status: int) -> bool:
        """Return whether a queried point has passed; raise if the query met a fault."""
        if status in (SUCCESS, NOT_READY):
            return status == SUCCESS
        with self.errors_as(what):
            self.runtime.check_status(status)
        raise DeviceError(f"{what}: CUDA status {status}")

    def is_capturing(self, pointer: int) -> bool:
        """Return whether a stream is being captured; also where the capture is invalidated."""
        try:
            return bool(self.runtime.streamIsCapturing(pointer))
        except self.errors as error:
            if getattr(error, "status", None) in CAPTURE_ERRORS:
                return True
            raise self.failure(f"stream {pointer:#x}", error) from error
        except RuntimeError:  # CuPy: an error has invalidated the capture
            return True


def require_numpy(version: str) -> None:
    """Raise DeviceError if CuPy has no bfloat16 with this version of NumPy."""
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < NUMPY_OF_BFLOAT16:
        oldest = ".".join(map(str, NUMPY_OF_BFLOAT16))
        raise DeviceError(
            f"cuda: this is NumPy {version}, and CuPy has bfloat16 with {oldest} or newer: "
            f"pip install 'numpy>={oldest}'"
        )


def device_of_pointer(pointer: int) -> int:
    """Return the index of the GPU that an address belongs to; 0 for a null pointer."""
    if not pointer:
        return 0
    api = CudaApi()
    with api.errors_as(f"got memory on a GPU, at {pointer:#x}"):
        return int(api.runtime.pointerGetAttributes(pointer).device)


@contextmanager
def current_device(index: int) -> Iterator[Any]:
    """Make a GPU current for the length of a with block, and yield CuPy.

    CUDA errors, of the block too, become kvcupy's.
    """
    api = CudaApi()
    with api.errors_as(f"got memory on cuda:{index}"):
        is_current = api.runtime.getDevice() == index
        with nullcontext() if is_current else api.cupy.cuda.Device(index):
            yield api.cupy


@contextmanager
def dlpack_stream(index: int) -> Iterator[int]:
    """Make a GPU current, and yield CuPy's current stream there as DLPack's `stream=` names it.

    DLPack's 1 is the default stream of the current GPU, so the exporter must be called inside the
    with block.
    """
    with current_device(index) as cupy:
        yield int(cupy.cuda.get_current_stream(index).ptr) or 1


# --- The driver's batched copy ---
#
# It came with CUDA 12.8. CUDA 13 took an argument away, so there are two functions of that name; a
# driver gives out the one that belongs to the version it is asked for. Asked for 12.8, every driver
# from then on gives the one with nine arguments, or none.

BATCH_VERSION = 12080
NO_COPY = ctypes.c_size_t(-1).value  # a failure that concerns no copy in particular

_BATCH_NAME = b"cuMemcpyBatchAsync"
_LEGACY_STREAM = 1  # CU_GET_PROC_ADDRESS_LEGACY_STREAM: stream 0 is not the calling thread's
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

# CUresult (CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
#           CUmemcpyAttributes* attrs, size_t* attrsIdxs, size_t numAttrs, size_t* failIdx,
#           CUstream stream)
BATCH_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip


class Location(ctypes.Structure):
    """CUmemLocation: where managed memory is thought to be; zero is no hint."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: how the copies of a batch are to be made."""

    _fields_ = (
        ("src_access_order", ctypes.c_int), ("src_location_hint", Location),
        ("dst_location_hint", Location), ("flags", ctypes.c_uint),
    )  # fmt: skip


def find_batch(version: int, library: Any) -> Callable[..., int] | None:
    """Return the batched copy of a driver of a version (12080 is 12.8), or None if it has none."""
    if version < BATCH_VERSION:
        return None
    address, status = ctypes.c_void_p(), ctypes.c_int(0)
    failed = library.cuGetProcAddress_v2(
        _BATCH_NAME, ctypes.byref(address), BATCH_VERSION, ctypes.c_uint64(_LEGACY_STREAM),
        ctypes.byref(status),
    )  # fmt: skip
    return BATCH_TYPE(address.value) if not (failed or status.value) and address.value else None


# --- NVIDIA's libraries that CuPy loads ---
#
# Wheels for CUDA 12 and 13 can be installed side by side: torch from PyPI brings those for 13 into
# an environment with cupy-cuda12x. CuPy finds NVRTC and cuBLAS through cuda-pathfinder, which
# prefers the wheels for 13 unless a library of the same name is loaded already. But a driver for
# CUDA 12 cannot run what NVRTC 13 compiles, and cupy-cuda12x cannot use cuBLAS 13.

LIBRARIES = ("nvrtc", "cublas")
MAJORS = (12, 13)
_FOLDERS = {"nvrtc": "cuda_nvrtc", "cublas": "cublas"}  # of wheels for 12; those for 13 share one


@lru_cache
def load_matching_libraries() -> None:
    """Load the libraries of CuPy's CUDA version where wheels for another version are installed too.

    CuPy then uses these, if it has not loaded the others yet.
    """
    major = cupy_major()
    for library in LIBRARIES if major in MAJORS else ():
        if not any(wheel_library(library, other) for other in MAJORS if other != major):
            continue
        for place in _places(library, major):
            with suppress(OSError):
                ctypes.CDLL(place)
                break


def cupy_major() -> int:
    """Return the CUDA version that the installed CuPy is built for, without importing it.

    0 if there is no CuPy, or it does not come from a wheel.
    """
    try:
        spec = find_spec("cupy")
        if spec is None or spec.origin is None:
            return 0
        described = Path(spec.origin).parent / ".data" / "_wheel.json"
        cuda = json.loads(described.read_text(encoding="utf-8"))["cuda"]
        return int(str(cuda).partition(".")[0])
    except (ImportError, OSError, ValueError, KeyError, TypeError):
        return 0


def cuda_extra() -> str:
    """Return kvcupy's extra for this machine: by the installed CuPy, else by the driver."""
    return "cuda13" if (cupy_major() or driver_version() // 1000) >= MAJORS[-1] else "cuda12"


def install_cublas() -> str:
    """Return the command that installs the cuBLAS that CuPy needs for matrix products."""
    return "pip install nvidia-cublas" + ("-cu12" if cuda_extra() == "cuda12" else "")


def driver_version() -> int:
    """Return the CUDA version of the driver, 12040 for 12.4; 0 without a driver."""
    version = ctypes.c_int(0)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def wheel_library(library: str, major: int) -> Path | None:
    """Return the file of a library from NVIDIA's wheel for a CUDA version; None without a wheel."""
    folder = _FOLDERS[library] if major == 12 else f"cu{major}"
    file = Path("nvidia", folder, "lib", f"lib{library}.so.{major}")
    paths = (Path(entry or ".", file) for entry in sys.path)
    return next((path for path in paths if path.is_file()), None)


def _places(library: str, major: int) -> Iterator[str]:
    """Yield the places to load a library from, in the order of cuda-pathfinder."""
    name = f"lib{library}.so.{major}"
    if path := wheel_library(library, major):
        yield str(path.absolute())
    if conda := os.environ.get("CONDA_PREFIX"):
        yield str(Path(conda, "lib", name))
    yield name
    for root in (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if root:
            yield str(Path(root, "lib64", name))


def loaded_library(library: str, major: int | str = "") -> str | None:
    """Return the path from which this process has loaded a library, None if it has not.

    It ends in the full version where the library was loaded through a link.
    """
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            path = line.split(maxsplit=5)[5:]
            if path and Path(path[0]).name.startswith(f"lib{library}.so.{major}"):
                return path[0]
    return None


def driver_complaint(driver: int, cupy: int, nvrtc: tuple[int, int] | None) -> str:
    """Return one line on why a driver cannot run kernels, with the remedy; "" if it can.

    A driver runs the code of every compiler of its major version, for the GPUs that it supports.
    """
    major, here = driver // 1000, f"the driver is for CUDA {cuda_version(driver)}"
    if not driver:
        return "no NVIDIA driver is installed (libcuda.so.1 cannot be loaded)"
    if major < MAJORS[0]:
        return f"{here}, kvcupy needs CUDA {MAJORS[0]}: install driver 525 or newer"
    command = install(f"cuda{min(major, MAJORS[-1])}")
    if cupy // 1000 > major:
        return (
            f"{here}, and CuPy is built for CUDA {cupy // 1000}: "
            f"pip uninstall -y cupy-cuda12x cupy-cuda13x && {command}"
        )
    if nvrtc is not None and nvrtc[0] > major:
        where = loaded_library("nvrtc", nvrtc[0])
        what = f"NVRTC {nvrtc[0]}.{nvrtc[1]}" + (f" ({where})" if where else "")
        was_loaded_first = wheel_library("nvrtc", major) is not None
        remedy = "pip uninstall -y nvidia-cuda-nvrtc" if was_loaded_first else command
        return f"{here}, and {what} compiles for CUDA {nvrtc[0]}: {remedy}"
    return ""


def cuda_version(number: int) -> str:
    """Return a version number of CUDA in the usual notation.

    >>> cuda_version(12040)
    '12.4'
    """
    return f"{number // 1000}.{number % 1000 // 10}"
