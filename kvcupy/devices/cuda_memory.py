"""Memory of a GPU as the arrays that users see, and copies between them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import arrays, formats, observe
from ..cuda_api import MEMCPY_DEFAULT, UNREGISTERED_MEMORY
from ..errors import CaptureError, KvcupyError
from . import cuda_copy

if TYPE_CHECKING:
    from .cuda import CudaDevice
    from .cuda_streams import Stream


def empty(device: CudaDevice, shape: Any, dtype: Any) -> Any:
    """Return an uninitialised CuPy array, from the pool's arena of the current stream."""
    return _allocate(device, "empty", shape, formats.tag(dtype))


def zeros(device: CudaDevice, shape: Any, dtype: Any) -> Any:
    """Return a CuPy array of zeros, ready for any stream. It is never part of a capture."""
    stream = device.as_stream(None, "cupy")
    if stream.capturing:
        with device.current(), device.stream().cupy:
            return zeros(device, shape, dtype)
    array = _allocate(device, "zeros", shape, formats.tag(dtype))
    stream.synchronize()
    return array


def asarray(device: CudaDevice, array: np.ndarray[Any, Any]) -> Any:
    """Return a copy of a NumPy array on the device, ready for any stream."""
    source = np.asarray(array)
    format = formats.tag(source.dtype)
    stream = _uncaptured_stream(device, "cupy", "asarray")
    try:
        with device.current(), device.api.relaxed():
            made = device.api.cupy.array(source.view(formats.carrier_dtype(format)))
    except device.api.errors as error:
        raise device.api.failure(f"asarray on {device.name}", error) from error
    stream.synchronize()
    return _tagged(made, format)


def to_numpy(device: CudaDevice, array: Any) -> np.ndarray[Any, Any]:
    """Return a copy as a NumPy array, in the order of the array's library's current stream."""
    view = arrays.view(array)
    dtype = formats.numpy_dtype(view.format)
    if view.device == "host":
        return arrays.array_at(view.owner, view.pointer, view.shape, dtype, view.strides).copy()
    stream = _uncaptured_stream(device, view.library, "to_numpy")
    arrays.wait_for_producers((view,), stream)
    bits = carrier(device, view)
    try:
        with device.current(), device.api.relaxed(), stream.cupy:
            host: np.ndarray[Any, Any] = bits.get()
    except device.api.errors as error:
        raise device.api.failure(f"to_numpy on {device.name}", error) from error
    return host.view(dtype)


def fault_record(device: CudaDevice) -> Any:
    """Return four int64 zeros, outside the pool, cleared on a stream that no capture can own."""
    cuda, runtime = device.api.cupy.cuda, device.api.runtime
    dtype = np.dtype(np.int64)
    try:
        with device.current(), device.api.relaxed():
            memory = cuda.Memory(4 * dtype.itemsize)
            own = cuda.Stream(non_blocking=True)
            runtime.memsetAsync(memory.ptr, 0, 4 * dtype.itemsize, own.ptr)
            runtime.streamSynchronize(own.ptr)
            start = cuda.MemoryPointer(memory, 0)
            return device.api.cupy.ndarray((4,), dtype, memptr=start)
    except device.api.errors as error:
        raise device.api.failure(f"fault record of {device.name}", error) from error


def carrier(device: CudaDevice, view: arrays.ArrayView) -> Any:
    """Return the bytes of a view as a CuPy array in the carrier dtype of its format. No copy.

    Raises
    ------
    ValueError : the view is on another device, or in host memory that is not pinned
    """
    pointer = device_address(device, view)
    if pointer is None:
        raise ValueError(
            f"array: expected one on {device.name} or in pinned memory, got one on {view.device}"
        )
    dtype = formats.carrier_dtype(view.format)
    return _array(device, pointer, view.shape, view.strides, dtype, view.owner)


def copy(device: CudaDevice, dst: Any, src: Any, stream: Any) -> None:
    """Copy `src` to `dst` (`CudaDevice.copy`)."""
    to, of = arrays.view(dst, "dst"), arrays.view(src, "src")
    if to.shape != of.shape or to.format != of.format:
        raise ValueError(f"dst: expected {arrays.describe(of)}, got {arrays.describe(to)}")
    if to.readonly:
        raise ValueError("dst: expected a writable array, got a read-only one")
    library = next((v.library for v in (to, of) if v.device == device.name), "cupy")
    on = device.as_stream(stream, library)
    if of.size == 0:
        return
    arrays.wait_for_producers((to, of), on)
    observe.issue(
        lambda: observe.Operation(
            "copy", on, reads=(observe.Access(of),), writes=(observe.Access(to),)
        ),
        lambda: _enqueue_copy(device, to, of, on),
    )
    arrays.note_written([to])


def device_address(device: CudaDevice, view: arrays.ArrayView) -> int | None:
    """Return where kernels of the device find a view; None if they cannot reach it."""
    if view.device == device.name or view.size == 0:
        return view.pointer
    if view.device != "host":
        return None
    attributes = device.api.runtime.pointerGetAttributes(view.pointer)
    return None if attributes.type == UNREGISTERED_MEMORY else attributes.devicePointer or None


def address(device: CudaDevice, view: arrays.ArrayView) -> int | None:
    """Return the same as `device_address`, as a call that stands by itself."""
    try:
        with device.current():
            return device_address(device, view)
    except device.api.errors as error:
        raise device.api.failure(f"address of {view!r} on {device.name}", error) from error


def _enqueue_copy(
    device: CudaDevice, to: arrays.ArrayView, of: arrays.ArrayView, on: Stream
) -> None:
    plan = cuda_copy.plan(to.shape, to.strides, of.strides, to.itemsize)
    owners = (to.owner, of.owner)
    try:
        with device.current(), device.api.relaxed():  # CuPy may compile and load a kernel
            dst = src = None
            if not plan.suits_engine:
                dst, src = device_address(device, to), device_address(device, of)
            if dst is not None and src is not None:
                _copy_by_kernel(device, plan, dst, src, owners, on)
            else:
                cuda_copy.enqueue(
                    device.api.runtime, plan, to.pointer, of.pointer, MEMCPY_DEFAULT, on.pointer
                )
    except device.api.errors as error:
        with suppress(KvcupyError):  # part of it may be in flight; a lost device holds nothing
            device.retain(on, owners)
        raise device.api.failure(f"copy of {arrays.describe(of)} on {on!r}", error) from error
    device.retain(on, owners)


def _copy_by_kernel(
    device: CudaDevice,
    plan: cuda_copy.CopyPlan,
    dst: int,
    src: int,
    owners: tuple[object, object],
    on: Stream,
) -> None:
    word, shape, dst_strides, src_strides = cuda_copy.words(plan, dst, src)
    dtype = np.dtype(f"u{word}")
    target = _array(device, dst, shape, dst_strides, dtype, owners[0])
    source = _array(device, src, shape, src_strides, dtype, owners[1])
    with on.cupy:
        target[...] = source


def _allocate(device: CudaDevice, how: str, shape: Any, format: str) -> Any:
    """Call `cupy.empty` or `cupy.zeros` with a dtype that CuPy has."""
    device.retired.reap()
    quantised = format.startswith("fp8")  # CuPy has bfloat16, but no 8-bit floats
    dtype = formats.carrier_dtype(format) if quantised else formats.numpy_dtype(format)
    with device.current():
        try:
            with device.api.relaxed():
                made = getattr(device.api.cupy, how)(shape, dtype)
        except device.api.errors as error:
            num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            what = f"{how}, {num_bytes:,} bytes on {device.name}"
            raise device.api.failure(what, error) from error
    return _tagged(made, format)


def _tagged(array: Any, format: str) -> Any:
    if format.startswith("fp8"):
        return arrays.view_as(array, format)
    return array.view(formats.numpy_dtype(format))


def _array(
    device: CudaDevice,
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
    owner: object,
) -> Any:
    reach = sum(abs((n - 1) * s) for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
    cupy = device.api.cupy
    memory = cupy.cuda.UnownedMemory(pointer, reach, owner, device.index)
    start = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(shape, dtype, memptr=start, strides=strides)


def _uncaptured_stream(device: CudaDevice, library: str, what: str) -> Stream:
    stream = device.as_stream(None, library)
    if stream.capturing:
        raise CaptureError(f"{what} waits for {stream.name}, which is being captured")
    return stream
