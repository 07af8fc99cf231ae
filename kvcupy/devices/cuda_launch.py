"""Kernels on a GPU: a loaded function, and the shortest way from packed bytes to a launch.

A kernel takes one struct, so the driver wants one pointer to it. Each thread has a buffer whose
address, and whose pointer's address, are known beforehand; a launch copies the struct there and
calls `cuLaunchKernel` through CuPy with plain integers. The driver copies the struct before it
returns.
"""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
import threading
from typing import Any

import numpy as np

from ..cuda_api import (
    DEFAULT_SMEM_BYTES,
    FUNCTION_MAX_DYNAMIC_SMEM,
    FUNCTION_STATIC_SMEM,
    CudaApi,
    cuda_version,
)  # fmt: skip
from ..errors import CompileError, KvcupyError
from ..kernels import Specialisation, pointer_fields
from . import nvrtc
from .cuda_context import CudaContext
from .cuda_streams import Stream
from .protocol import Dim3

# CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, UNSUPPORTED_PTX_VERSION
_REFUSED_IMAGES = (200, 209, 218, 222)
_BUFFER_BYTES = 4096  # the most that all architectures take as parameters


class CudaFunction:
    """A specialisation loaded on one device.

    Attributes
    ----------
    pointer : the driver's function
    function : CuPy's, which keeps its module loaded
    smem_ready : dynamic shared memory that a launch may have without another opt-in, in bytes
    digest : of the machine code
    """

    __slots__ = (
        "_lock", "digest", "function", "params_bytes", "pointer", "smem_ready", "specialisation"
    )  # fmt: skip

    def __init__(
        self, specialisation: Specialisation, function: Any, static_smem: int, image: bytes = b""
    ) -> None:
        self.specialisation = specialisation
        self.digest = hashlib.sha256(image).hexdigest()
        self.function = function
        self.pointer = int(function.ptr)
        self.params_bytes = specialisation.kernel.params.itemsize
        self.smem_ready = DEFAULT_SMEM_BYTES - static_smem
        self._lock = threading.Lock()

    def allow_smem(self, api: CudaApi, smem_bytes: int) -> None:
        """Raise the limit of dynamic shared memory, which a function must opt in to."""
        with self._lock:
            if smem_bytes > self.smem_ready:
                api.driver.funcSetAttribute(self.pointer, FUNCTION_MAX_DYNAMIC_SMEM, smem_bytes)
                self.smem_ready = smem_bytes


class ParamsBuffer(threading.local):
    """Where the calling thread puts the struct of a launch."""

    def __init__(self) -> None:
        self._bytes = (ctypes.c_uint64 * (_BUFFER_BYTES // 8))()
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._bytes))
        self.view = memoryview(self._bytes).cast("B")
        self.arguments = ctypes.addressof(self._pointers)  # of the `void*[1]` that points there


class Launcher:
    """Loads and launches the kernels of one device. The caller makes the device current."""

    def __init__(self, context: CudaContext, arch: str) -> None:
        self._context = context
        self._api = context.api
        self._thread = context.thread
        self._arch = arch
        self._buffer = ParamsBuffer()
        self._functions: dict[Specialisation, CudaFunction] = {}
        self._refused: dict[Specialisation, tuple[str, str]] = {}
        self._loading: dict[Specialisation, threading.Lock] = {}
        self._lock = threading.Lock()

    def known(self, specialisation: Specialisation) -> CudaFunction | None:
        return self._functions.get(specialisation)

    def load(self, specialisation: Specialisation) -> CudaFunction:
        """Compile, or find compiled, and load; one thread does, the others wait for it."""
        with self._lock:
            loading = self._loading.setdefault(specialisation, threading.Lock())
        with loading:
            if specialisation in self._refused:
                raise CompileError(*self._refused[specialisation])
            function = self._functions.get(specialisation)
            if function is None:
                try:
                    function = self._load(specialisation)
                except CompileError as error:
                    if not error.transient:
                        text = str(error).removesuffix(f"\n{error.log}")
                        self._refused[specialisation] = (text, error.log)
                    raise
                self._functions[specialisation] = function
            return function

    def _load(self, specialisation: Specialisation) -> CudaFunction:
        compiled = nvrtc.compile_cubin(specialisation, self._arch)
        api = self._api
        refusals: tuple[type[Exception], ...] = (OSError, *api.errors)
        try:
            # When RawModule returns the kernel, the driver has loaded the file.
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(compiled.image)
                file.flush()
                module = api.cupy.RawModule(path=file.name)
                function = module.get_function(compiled.lowered_name).kernel
            static_smem = api.driver.funcGetAttribute(FUNCTION_STATIC_SMEM, function.ptr)
        except refusals as error:
            what = f"{specialisation}, compiled for {compiled.target}"
            message = f"{what}, cannot be loaded: {error}"
            if lasting := getattr(error, "status", None) in _REFUSED_IMAGES:
                version = cuda_version(api.runtime.driverGetVersion())
                message += f" ({nvrtc.compiler()}; the driver is for CUDA {version})"
            raise CompileError(message, transient=not lasting) from error
        return CudaFunction(specialisation, function, static_smem, compiled.image)

    def launch(
        self, function: CudaFunction, grid: Dim3, block: Dim3, smem_bytes: int, params: bytes,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Launch; CuPy's exceptions pass."""
        api, buffer = self._api, self._buffer
        if not self._thread.ready:
            self._context.prepare_thread()
        if smem_bytes > function.smem_ready:
            function.allow_smem(api, smem_bytes)
        if api.can_launch_packed and len(params) <= _BUFFER_BYTES:
            buffer.view[: len(params)] = params
            api.driver.launchKernel(
                function.pointer, *grid, *block, smem_bytes, stream.pointer, buffer.arguments, 0
            )
        else:  # CuPy passes a structured array of one element by value
            struct = np.frombuffer(params, function.specialisation.kernel.params)
            function.function(grid, block, (struct,), shared_mem=smem_bytes, stream=stream.cupy)

    def failure(
        self, error: Exception, function: CudaFunction, grid: Dim3, block: Dim3, smem_bytes: int,
        params: bytes, stream: Stream,
    ) -> KvcupyError:  # fmt: skip
        """Return the error of a failed launch, with its configuration and arguments."""
        what = (
            f"{function.specialisation} failed on {self._context.name}: grid {grid}, "
            f"block {block}, {smem_bytes} bytes of shared memory, {stream!r}, "
            f"arguments {describe_params(function.specialisation.kernel.params, params)}"
        )
        return self._api.failure(what, error)


def describe_params(dtype: np.dtype[Any], params: bytes) -> str:
    """Return the fields of a packed struct as text, addresses in hexadecimal.

    >>> dtype = np.dtype([("data", np.uint64), ("count", np.int32)], align=True)
    >>> describe_params(dtype, np.array([(255, 3)], dtype).tobytes())
    '{data: 0xff, count: 3}'
    """
    record = np.frombuffer(params, dtype)[0]
    addresses = pointer_fields(dtype)
    shown = (
        f"{name}: {int(record[name]):#x}" if i < addresses else f"{name}: {record[name]}"
        for i, name in enumerate(dtype.names or ())
    )
    return "{" + ", ".join(shown) + "}"
