"""A GPU through CuPy. Importing this module does not import CuPy.

Its parts share a `cuda_context.CudaContext`: `cuda_streams` (streams, events, graphs),
`cuda_memory` (addresses, pinned memory, copies) and, below, the launcher of kernels.
"""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import arrays, cuda_api, formats, observe
from ..arrays import ArrayView
from ..cuda_api import (
    ATTRIBUTE_SHARED_BYTES,
    ATTRIBUTE_SM_COUNT,
    DEFAULT_SMEM_BYTES,
    FUNCTION_MAX_DYNAMIC_SMEM,
    FUNCTION_STATIC_SMEM,
    MEMCPY_DEFAULT,
    NO_COPY,
    CudaApi,
    cuda_version,
)  # fmt: skip
from ..errors import CaptureError, CompileError, DeviceError, KvcupyError, Unpicklable
from ..kernels import Specialisation, pointer_fields
from ..observe import Access
from . import cuda_memory, cuda_streams, nvrtc
from .cuda_context import CudaContext
from .cuda_memory import CopyPlan, RunCopies
from .cuda_streams import Event, Stream
from .protocol import Dim3, byte_pairs, copy_views, require_runs, stream_priority

_DRIVER_VERSION = Path("/sys/module/nvidia/version")  # of the driver; CUDA tells only its own
# CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, UNSUPPORTED_PTX_VERSION
_REFUSED_IMAGES = (200, 209, 218, 222)
_BUFFER_BYTES = 4096  # the most that all architectures take as parameters


class CudaDevice(Unpicklable):
    """One GPU. Made once each by `kvcupy.device("cuda:0")`."""

    _instead = "name it in each process, kvcupy.device(name)"

    kind = "cuda"
    has_copy_engine = True
    warp_lanes = 32

    def __init__(self, index: int = 0, api: CudaApi | None = None) -> None:
        self.context = CudaContext(self, index, CudaApi() if api is None else api)
        self.name = self.torch_name = self.context.name
        self.sm_count, self.shared_bytes, self.arch, self.model = properties(
            self.context.api, index
        )
        self._launcher = Launcher(self.context, self.arch)
        # CuPy raises OverflowError for a grid of 2**32 blocks or more.
        self._launch_errors: tuple[type[Exception], ...] = (
            *self.context.api.errors, OverflowError,
        )  # fmt: skip
        self._run_copies = RunCopies(self.context)
        self._faults: Any = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<kvcupy device {self.name}>"

    # --- Memory ---

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return an uninitialised array; `dtype` may be a format name or an Encoding.

        fp8 and four-bit formats come as ArrayView. Its memory belongs to the current stream's arena
        of CuPy's pool.
        """
        if encoding := arrays.four_bit_encoding(dtype):
            return arrays.four_bit_array(self.empty, shape, encoding)
        return self._allocate(shape, formats.tag(dtype))

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """Return an array of zeros, complete when the call returns; `dtype` may be a format name.

        It is never part of a capture.
        """
        if encoding := arrays.four_bit_encoding(dtype):
            return arrays.four_bit_array(self.zeros, shape, encoding)
        current = self.as_stream(None, "cupy")
        stream = self.stream() if current.capturing else current
        array = self.allocate(shape, dtype, stream, zeroed=True)
        stream.synchronize()
        return array

    def allocate(self, shape: Any, dtype: Any, stream: Any, *, zeroed: bool) -> Any:
        """Return an array for work on `stream`, of zeros or uninitialised, without waiting.

        The memory comes from the arena of `stream` in CuPy's pool: earlier work there may still use
        it, so no other stream may without waiting for `stream`. A graph is launched on any stream,
        so memory for a capture comes from a stream that has no work.
        """
        if encoding := arrays.four_bit_encoding(dtype):
            make = partial(self.allocate, stream=stream, zeroed=zeroed)
            return arrays.four_bit_array(make, shape, encoding)
        owner = self.stream() if stream.capturing else stream
        with self.context.current(), owner.cupy:
            array = self._allocate(shape, formats.tag(dtype))
        whole = arrays.view(array)
        if zeroed and whole.size:
            if stream.capturing:  # replays write it, also if the call that allocates it fails now
                self.context.retain(stream, (array,))
            num_bytes = whole.size * whole.itemsize
            with self.context.relaxed(f"memset of {num_bytes:,} bytes on {stream!r}"):
                runtime = self.context.api.runtime
                runtime.memsetAsync(whole.pointer, 0, num_bytes, stream.pointer)
        return array

    def release(self, owners: list[Any]) -> None:
        """Drop owners, also during captures of other libraries, and all that work has passed."""
        self.context.retired.reap()
        with self.context.relaxed(f"release of memory of {self.name}"):
            owners.clear()

    def empty_pinned(self, shape: Any, dtype: Any) -> Any:
        """Return pinned memory of exact size, near the GPU where known, as a NumPy array.

        Four-bit formats come as ArrayView.
        """
        if encoding := arrays.four_bit_encoding(dtype):
            return arrays.four_bit_array(self.empty_pinned, shape, encoding)
        element = formats.numpy_dtype(dtype)
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * element.itemsize
        memory = cuda_memory.pinned_memory(self.context, num_bytes)
        return arrays.pinned_at(memory, memory.ptr, shape, element)

    def asarray(self, array: np.ndarray[Any, Any]) -> Any:
        """Return a copy of a NumPy array on this device, complete when the call returns."""
        source = np.asarray(array)
        format = formats.tag(source.dtype)
        stream = self._uncaptured_stream("cupy", "asarray")
        with self.context.relaxed(f"asarray on {self.name}"):
            bits = self.context.api.cupy.array(source.view(formats.carrier_dtype(format)))
        stream.synchronize()
        return _tagged(bits, format)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a copy of an array as NumPy array (bf16, fp8: ml_dtypes).

        Four-bit formats give their bytes, uint8 (..., row_bytes).

        Stream: the current one of the array's library; it is waited for. Capture: illegal.
        """
        view = arrays.bytes_of(arrays.view(array))
        dtype = formats.numpy_dtype(view.format)
        if view.device == "host":
            if observe.order_observers:
                observe.touched_by_host("to_numpy", (Access(view, name="array"),))
            return arrays.array_at(view.owner, view.pointer, view.shape, dtype, view.strides).copy()
        stream = self._uncaptured_stream(view.library, "to_numpy")
        arrays.wait_for_producers((view,), stream)
        if observe.order_observers:
            observe.synchronized(stream)  # as the copy does
            observe.touched_by_host("to_numpy", (Access(view, name="array"),))
        shape = view.shape
        if any(n % view.itemsize for n in (view.pointer, *view.strides)):
            # CuPy gathers strided elements by a kernel, which reads only aligned ones.
            shape_in_bytes, strides = (*shape, view.itemsize), (*view.strides, 1)
            view = arrays.recast(view, shape_in_bytes, strides, "uint8")
        bits = self.carrier(view)
        with self.context.relaxed(f"to_numpy on {self.name}"), stream.cupy:
            host: np.ndarray[Any, Any] = bits.get()
        return host.view(dtype).reshape(shape)

    def copy(self, dst: Any, src: Any, *, stream: Any = None) -> None:
        """Copy `src` to `dst`, of equal shape and format, in the order of `stream`.

        Stream: asynchronous between GPU and pinned memory; with pageable memory on either side, or
        host memory on both, the call may block. Both arrays are kept alive until it is done.
        Capture: legal.
        """
        target, source = copy_views(dst, src)
        library = next((v.library for v in (target, source) if v.device == self.name), "cupy")
        queue = self.as_stream(stream, library)
        if source.size == 0:
            return
        arrays.wait_for_producers((target, source), queue)

        def enqueue() -> None:
            for pair in byte_pairs(target, source):
                self._enqueue_copy(*pair, queue)

        observe.issue(lambda: observe.copy_of(queue, source, target), enqueue)
        if target.library == "torch":
            arrays.note_written([target])

    def copy_runs(
        self, dst: np.ndarray[Any, Any], src: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any],
        stream: Any, keep: Sequence[object] = (), pageable: bool = False,
    ) -> None:  # fmt: skip
        """Copy contiguous runs in the order of `stream`; owners in `keep` live until it is done.

        Capture: legal; one node per run.
        """
        require_runs(dst, src, sizes)
        nonempty = sizes != 0
        runs = (dst[nonempty], src[nonempty], sizes[nonempty])  # contiguous, whatever they were
        if not len(runs[0]):
            return
        context, failed = self.context, ctypes.c_size_t(NO_COPY)
        try:
            with context.current():
                self._run_copies.enqueue(runs, stream, failed, pageable)
        except context.api.errors as error:
            with suppress(KvcupyError):  # part may be in flight; a lost device retains nothing
                context.retain(stream, keep)
            index = None
            if failed.value < len(runs[0]):
                index = int(np.flatnonzero(nonempty)[failed.value])
            what = cuda_memory.describe_runs((dst, src, sizes), index, stream)
            raise context.api.failure(what, error) from error
        if keep:
            context.retain(stream, keep)

    def carrier(self, view: ArrayView) -> Any:
        """Return the bytes of a view as a CuPy array of the carrier dtype, without a copy.

        The bytes of a four-bit format are (..., row_bytes).
        """
        view = arrays.bytes_of(view)
        pointer = cuda_memory.device_address(self.context, view)
        if pointer is None:
            raise ValueError(
                f"array: expected one on {self.name} or in pinned memory, got one on {view.device}"
            )
        dtype = formats.carrier_dtype(view.format)
        return _array_at(self.context, view.owner, pointer, view.shape, dtype, view.strides)

    def address(self, view: ArrayView) -> int | None:
        """Return where kernels find a view; None in pageable memory and on another GPU."""
        context = self.context
        try:
            with context.current():
                return cuda_memory.device_address(context, view)
        except context.api.errors as error:
            raise context.api.failure(f"address of {view!r} on {self.name}", error) from error

    def _allocate(self, shape: Any, format: str) -> Any:
        """Call `cupy.empty` with a dtype that CuPy has."""
        context = self.context
        context.retired.reap()
        is_fp8 = format.startswith("fp8")  # CuPy has bfloat16, but no 8-bit floats
        dtype = formats.carrier_dtype(format) if is_fp8 else formats.numpy_dtype(format)
        with context.current():
            try:
                with context.api.relaxed():
                    array = context.api.cupy.empty(shape, dtype)
            except context.api.errors as error:
                num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                what = f"an array of {num_bytes:,} bytes on {self.name}"
                raise context.api.failure(what, error) from error
        return _tagged(array, format)

    def _enqueue_copy(self, target: ArrayView, source: ArrayView, stream: Stream) -> None:
        context = self.context
        plan = cuda_memory.plan_copy(target.shape, target.strides, source.strides, target.itemsize)
        owners = (target.owner, source.owner)
        try:
            with context.current(), context.api.relaxed():  # CuPy may compile and load a kernel
                dst = src = None
                if not plan.suits_engine:
                    dst = cuda_memory.device_address(context, target)
                    src = cuda_memory.device_address(context, source)
                if dst is not None and src is not None:
                    self._copy_by_kernel(plan, dst, src, owners, stream)
                else:
                    where = target.pointer, source.pointer, stream.pointer
                    cuda_memory.enqueue_copy(context.api.runtime, plan, *where)
        except context.api.errors as error:
            with suppress(KvcupyError):  # part may be in flight; a lost device retains nothing
                context.retain(stream, owners)
            what = f"copy of {arrays.describe(source)} on {stream!r}"
            raise context.api.failure(what, error) from error
        context.retain(stream, owners)

    def _copy_by_kernel(
        self, plan: CopyPlan, dst: int, src: int, owners: tuple[object, object], stream: Stream
    ) -> None:
        word, shape, dst_strides, src_strides = cuda_memory.copy_in_words(plan, dst, src)
        dtype = np.dtype(f"u{word}")
        target = _array_at(self.context, owners[0], dst, shape, dtype, dst_strides)
        source = _array_at(self.context, owners[1], src, shape, dtype, src_strides)
        with stream.cupy:
            target[...] = source

    def _uncaptured_stream(self, library: str, what: str) -> Stream:
        stream = self.as_stream(None, library)
        if stream.capturing:
            raise CaptureError(f"{what} waits for {stream.name}, which is being captured")
        return stream

    # --- Streams ---

    def stream(self, priority: int = 0) -> Stream:
        """Return a new stream, which does not synchronise with the default stream."""
        self.context.retired.reap()
        return Stream.create(self.context, stream_priority(priority))

    def event(self, timing: bool = False) -> Event:
        """Return an event, not yet recorded."""
        return Event(self.context, timing)

    def as_stream(self, stream: Any, library: str = "", name: str = "stream") -> Stream:
        """Return `stream` as a stream of this device; None is the current one of `library`.

        Without a library None is the stream that was made current, in CuPy or in torch. Errors call
        the argument `name`.
        """
        if stream is None:
            return cuda_streams.current_stream(self.context, library, name)
        if not isinstance(stream, Stream):
            return cuda_streams.adopt(self.context, stream, name)
        if stream.context is not self.context:
            raise ValueError(f"{name}: expected one of {self.name}, got {stream!r}")
        return stream

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        context = self.context
        if self.capturing:
            raise CaptureError("synchronising the device is illegal while a stream is captured")
        what = f"synchronize, {self.name}"
        with context.retired.releasing_unrecorded(), context.api.errors_as(what), context.current():
            context.api.runtime.deviceSynchronize()
        if observe.order_observers:
            observe.synchronized(self)
        context.retired.reap()
        context.calls.raise_failures()

    @property
    def capturing(self) -> bool:
        """Whether a kvcupy stream, or the current one of CuPy or torch, is being captured."""
        return bool(self.context.captures) or cuda_streams.is_current_captured(self.context)

    # --- Kernels ---

    def fingerprint(self, specialisation: Specialisation) -> tuple[str, ...]:
        """Return what decides whether a kernel is right: the GPU, its driver, and machine code."""
        driver = str(self.context.api.runtime.driverGetVersion())
        with suppress(OSError):
            driver = f"{driver} {_DRIVER_VERSION.read_text().strip()}"
        return self.model, driver, str(specialisation), self.load(specialisation).digest

    def load(self, specialisation: Specialisation) -> CudaFunction:
        """Return a specialisation, compiled and loaded at the first call."""
        known = self._launcher.functions.get(specialisation)
        if known is not None:
            return known
        self.fault_array()  # allocated here, where it cannot meet a capture
        with self.context.current(), self.context.api.relaxed():
            return self._launcher.load(specialisation)

    def launch(
        self, function: CudaFunction, grid: Dim3, block: Dim3, smem_bytes: int, params: bytes,
        stream: Any, keep: Sequence[object] = (),
    ) -> None:  # fmt: skip
        """Launch a grid on `stream`; owners in `keep` live until it is done."""
        context, launcher = self.context, self._launcher
        api, launch = context.api, (function, grid, block, smem_bytes, params, stream)
        try:
            if api.runtime.getDevice() == context.index:
                launcher.launch(*launch)
            else:
                with api.cupy.cuda.Device(context.index):
                    launcher.launch(*launch)
        except self._launch_errors as error:
            raise launcher.failure(error, *launch) from error
        if keep:
            context.retain(stream, keep)

    def run(self, function: Callable[[], object], stream: Any, keep: Sequence[object] = ()) -> None:
        """Run array expressions with `stream` as CuPy's current one."""
        context = self.context
        try:
            with context.current(), context.api.relaxed(), stream.cupy:
                function()
        except context.api.errors as error:
            raise context.api.failure(f"array expressions on {stream!r}", error) from error
        except ImportError as error:  # CuPy loads cuBLAS when it first multiplies matrices
            remedy = cuda_api.install_cublas()
            raise DeviceError(f"array expressions on {stream!r}: {error} ({remedy})") from error
        if keep:
            context.retain(stream, keep)

    def keep(self, owners: Sequence[object], stream: Any) -> None:
        """Keep owners alive until `stream` has passed this point, or its graph is gone."""
        self.context.retain(stream, owners)

    def copy_bytes(self, dst: int, src: int, num_bytes: int, stream: Any) -> None:
        """Copy between addresses in the order of `stream`."""
        context = self.context
        try:
            with context.current():
                runtime = context.api.runtime
                runtime.memcpyAsync(dst, src, num_bytes, MEMCPY_DEFAULT, stream.pointer)
        except context.api.errors as error:
            what = f"copy of {num_bytes} bytes on {stream!r}"
            raise context.api.failure(what, error) from error

    def fall_back(self, operation: str, cause: CompileError) -> None:
        """Raise `cause`: a GPU has no other way to do an operation."""
        raise copy(cause)  # a copy: a traceback keeps the frames, so the arrays, of its call

    @property
    def fault_pointer(self) -> int:
        """Address of the fault record."""
        return int(self.fault_array().data.ptr)

    def fault_array(self) -> Any:
        """Return the fault record, a CuPy array of four int64, zero at first."""
        if self._faults is None:
            with self._lock:
                if self._faults is None:
                    self._faults = self._make_fault_record()
        return self._faults

    def _make_fault_record(self) -> Any:
        """Return four int64 zeros, outside the pool, cleared on a stream that no capture owns."""
        context, dtype = self.context, np.dtype(np.int64)
        cuda, runtime = context.api.cupy.cuda, context.api.runtime
        stream = self.stream()
        with context.relaxed(f"fault record of {self.name}"):
            memory = cuda.Memory(4 * dtype.itemsize)
            runtime.memsetAsync(memory.ptr, 0, 4 * dtype.itemsize, stream.pointer)
            runtime.streamSynchronize(stream.pointer)
            start = cuda.MemoryPointer(memory, 0)
            return context.api.cupy.ndarray((4,), dtype, memptr=start)


def _tagged(array: Any, format: str) -> Any:
    """Return an array of bits as one of `format`: an ArrayView, where CuPy has no such dtype."""
    if format.startswith("fp8"):
        return arrays.view_as(array, format)
    return array.view(formats.numpy_dtype(format))


def _array_at(
    context: CudaContext, owner: object, pointer: int, shape: tuple[int, ...],
    dtype: np.dtype[Any], strides: tuple[int, ...],
) -> Any:  # fmt: skip
    cupy, index = context.api.cupy, context.index
    return arrays.cupy_array_at(cupy, owner, pointer, shape, dtype, strides, index)


# --- Kernels --------------------------------------------------------------------------------------
#
# A kernel takes one struct, so the driver wants one pointer to it. Each thread has a buffer whose
# address, and whose pointer's address, are known beforehand; a launch copies the struct there and
# calls `cuLaunchKernel` through CuPy with plain integers. The driver copies the struct before it
# returns.


class CudaFunction:
    """A specialisation loaded on one device."""

    __slots__ = (
        "_function", "_lock", "digest", "pointer", "smem_ready", "specialisation"
    )  # fmt: skip

    def __init__(
        self, specialisation: Specialisation, function: Any, static_smem: int, image: bytes = b""
    ) -> None:
        self.specialisation = specialisation
        self.digest = hashlib.sha256(image).hexdigest()  # of the machine code
        self._function = function  # keeps CuPy's module loaded
        self.pointer = int(function.ptr)
        self.smem_ready = DEFAULT_SMEM_BYTES - static_smem  # dynamic bytes without another opt-in
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
        self.functions: dict[Specialisation, CudaFunction] = {}
        self._refused: dict[Specialisation, tuple[str, str]] = {}
        self._loading: dict[Specialisation, threading.Lock] = {}
        self._lock = threading.Lock()

    def load(self, specialisation: Specialisation) -> CudaFunction:
        """Compile, or find compiled, and load; one thread does, the others wait for it."""
        with self._lock:
            loading = self._loading.setdefault(specialisation, threading.Lock())
        with loading:
            if specialisation in self._refused:
                raise CompileError(*self._refused[specialisation])
            function = self.functions.get(specialisation)
            if function is None:
                try:
                    function = self._load(specialisation)
                except CompileError as error:
                    if not error.transient:
                        text = str(error).removesuffix(f"\n{error.log}")
                        self._refused[specialisation] = (text, error.log)
                    raise
                self.functions[specialisation] = function
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
        buffer.view[: len(params)] = params
        api.driver.launchKernel(
            function.pointer, *grid, *block, smem_bytes, stream.pointer, buffer.arguments, 0
        )

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


# --- Which GPUs there are -------------------------------------------------------------------------


def why_not() -> str:
    """Return why no GPU is usable, or an empty string if one is. Never raises.

    >>> isinstance(why_not(), str)
    True
    """
    try:
        api = cuda_api.CudaApi()
        require_gpu(api, 0)
        with api.cupy.cuda.Device(0), api.relaxed():
            api.runtime.memGetInfo()  # needs a context, which a GPU in exclusive use refuses
    except DeviceError as error:
        return str(error).replace("cuda:0: ", "cuda: ", 1)
    except Exception as error:  # a broken driver shows itself in many ways
        return f"cuda: the driver does not work: {error}"
    return ""


def require_gpu(api: CudaApi, index: int) -> None:
    """Raise DeviceError if there is no such GPU, or its driver cannot run what is compiled here."""
    name = f"cuda:{index}"
    if complaint := api.complaint():
        raise DeviceError(f"{name}: {complaint}")
    with api.errors_as(name):
        count = api.runtime.getDeviceCount()
    if index >= count:
        raise DeviceError(f"{name}: there are {count} GPUs")


def properties(api: CudaApi, index: int) -> tuple[int, int, str, str]:
    """Return SMs and shared memory a block of a GPU, its architecture ("sm_90") and its name."""
    require_gpu(api, index)
    with api.errors_as(f"cuda:{index}"):
        sm_count = int(api.runtime.deviceGetAttribute(ATTRIBUTE_SM_COUNT, index))
        shared_bytes = int(api.runtime.deviceGetAttribute(ATTRIBUTE_SHARED_BYTES, index))
        arch = f"sm_{api.cupy.cuda.Device(index).compute_capability}"
        model: bytes = api.runtime.getDeviceProperties(index)["name"]
    return sm_count, shared_bytes, arch, model.decode()
