"""From an array of any library to its description.

`probe` is what an operation calls for each argument on every call: a pointer and a hashable
signature, from attributes that the library answers in nanoseconds. `view` gives the whole
description; operations ask for it only the first time that they see a signature.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from . import dtypes
from .arrays import ArrayView, contiguous_strides

Signature = tuple[Any, ...]
Probe = Callable[[Any], tuple[int, Signature]]


def _probe_view(x: ArrayView) -> tuple[int, Signature]:
    return x.pointer, (x.format, x.shape, x.strides, x.device, x.library, x.readonly)


def _probe_numpy(x: np.ndarray[Any, Any]) -> tuple[int, Signature]:
    pointer, readonly = x.__array_interface__["data"]
    return pointer, (x.dtype, x.shape, x.strides, readonly)


def _probe_torch(x: Any) -> tuple[int, Signature]:
    try:
        return x.data_ptr(), (x.dtype, x.shape, x.stride(), x.device)
    except RuntimeError as error:  # sparse, fake: without memory, or without strides
        raise TypeError(f"got a torch tensor with layout {x.layout} on {x.device}") from error


def _probe_cupy(x: Any) -> tuple[int, Signature]:
    # One more than a NumPy array has: its readonly False is equal to the number of a GPU, 0.
    memory = x.data
    return memory.ptr, (x.dtype, x.shape, x.strides, "cupy", memory.device_id)


def _probe_exporter(x: Any) -> tuple[int, Signature]:
    return _probe_view(_view_exporter(x))


_NOTHING = (0, None)  # what None probes to
_PROBES: dict[type, Probe] = {ArrayView: _probe_view, np.ndarray: _probe_numpy}


def probe(x: Any) -> tuple[int, Signature]:
    """Return address and signature of an array; equal signatures mean equal descriptions.

    Raises
    ------
    TypeError : `x` exports no array; the message starts with what came, for callers to complete
    """
    known = _PROBES.get(type(x))
    return known(x) if known is not None else _probe_for(x)(x)


def probe_argument(x: Any) -> tuple[int, Signature | float | None]:
    """Probe an argument that may also be None or a number, which have no address."""
    if x is None:
        return _NOTHING
    known = _PROBES.get(type(x))
    if known is not None:
        return known(x)
    if isinstance(x, numbers.Real):
        return 0, float(x)
    return _probe_for(x)(x)


def _probe_for(x: Any) -> Probe:
    kind = type(x)
    if isinstance(x, np.ndarray):
        found: Probe = _probe_numpy
    elif _is(x, "torch", "Tensor"):
        found = _probe_torch
    elif _is(x, "cupy", "ndarray"):
        found = _probe_cupy
    else:
        _view_exporter(x)  # refuses what exports nothing
        found = _probe_exporter
    _PROBES[kind] = found
    return found


def _is(x: object, module: str, name: str) -> bool:
    """Return whether `x` is an instance of a class of a module that need not be imported."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(x, getattr(loaded, name, ()))


# --- Views ----------------------------------------------------------------------------------------


def view(x: Any, name: str = "array") -> ArrayView:
    """Describe an array without copying it.

    Parameters
    ----------
    x : NumPy or CuPy array, torch tensor (CPU or CUDA), ArrayView, or any exporter of
        `__cuda_array_interface__` or DLPack
    name : the argument's name, for error messages

    Raises
    ------
    TypeError : `x` is none of these, or its dtype or device is not supported

    Examples
    --------
    >>> view(np.zeros((2, 3), np.float16))
    <(2, 3) fp16 on host at 0x...>
    """
    if isinstance(x, ArrayView):
        return x
    try:
        if isinstance(x, np.ndarray):
            return _view_numpy(x)
        if _is(x, "torch", "Tensor"):
            return _view_torch(x)
        if _is(x, "cupy", "ndarray"):
            return _view_cupy(x)
        return _view_exporter(x)
    except TypeError as error:
        raise TypeError(f"{name}: expected an array, {error}") from None


def _view_numpy(x: np.ndarray[Any, Any]) -> ArrayView:
    _require_plain(x.dtype)
    pointer, readonly = x.__array_interface__["data"]
    return ArrayView(
        pointer, x.shape, x.strides, dtypes.tag(x.dtype), "host", readonly=readonly, owner=x
    )


def _require_plain(dtype: np.dtype[Any]) -> None:
    """Refuse elements that are not numbers in this processor's byte order."""
    if not dtype.isnative or dtype.hasobject or dtype.names:
        raise TypeError(f"got NumPy dtype {dtype!r}")


def _view_torch(x: Any) -> ArrayView:
    torch = sys.modules["torch"]
    format, device = _torch_names(x.dtype, x.device)
    if device is None or x.layout is not torch.strided:
        raise TypeError(f"got a torch tensor with layout {x.layout} on {x.device}")
    if x.is_quantized or x.is_conj() or x.is_neg():
        raise TypeError(f"got a torch tensor of {x.dtype} whose bits are not its values")
    itemsize = x.element_size()
    return ArrayView(
        x.data_ptr(),
        tuple(x.shape),
        tuple([s * itemsize for s in x.stride()]),
        format,
        device,
        library="torch",
        owner=x,
    )


@lru_cache(maxsize=256)
def _torch_names(dtype: Any, device: Any) -> tuple[str, str | None]:
    """Return the names of a torch dtype and of a torch device, None if that is none of kvcupy's."""
    name = {"cpu": "host", "cuda": f"cuda:{device.index}"}.get(device.type)
    return dtypes.tag(str(dtype).removeprefix("torch.")), name


def _view_cupy(x: Any) -> ArrayView:
    return ArrayView(
        x.data.ptr,
        x.shape,
        x.strides,
        dtypes.tag(x.dtype),
        f"cuda:{x.data.device_id}",
        library="cupy",
        owner=x,
    )


def _view_exporter(x: Any) -> ArrayView:
    """View anything else: `__cuda_array_interface__` first, since it needs no capsule."""
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is not None:
        return _view_cuda_interface(x, interface)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        from . import dlpack

        return dlpack.view(x)
    raise TypeError(f"got {type(x).__name__}")


def _view_cuda_interface(x: Any, interface: dict[str, Any]) -> ArrayView:
    from .devices import cuda_api

    if interface.get("mask") is not None:
        raise TypeError(f"got {type(x).__name__} with a mask")
    dtype = np.dtype(interface["typestr"])
    _require_plain(dtype)
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or contiguous_strides(shape, dtype.itemsize)
    pointer, readonly = interface["data"]
    return ArrayView(
        pointer or 0,
        shape,
        tuple(strides),
        dtypes.tag(dtype),
        f"cuda:{cuda_api.device_of_pointer(pointer)}",
        library="cupy",
        readonly=readonly,
        owner=x,
    )


def view_as(array: Any, format: str) -> ArrayView:
    """Tag an array of integers that holds the bits of a number format.

    Parameters
    ----------
    array : uint16 or uint8 array (also int16, int8) of any library, any shape and strides
    format : one of "fp32 fp16 bf16 fp8_e4m3 fp8_e5m2 int8"

    Returns
    -------
    ArrayView : the same memory, accepted wherever an array is; it keeps `array` alive

    Raises
    ------
    ValueError : unknown format, or its size is not the array's
    TypeError : `array` holds neither integers nor that format

    Examples
    --------
    >>> view_as(np.zeros((4, 8), np.uint16), "bf16")
    <(4, 8) bf16 on host at 0x...>
    """
    if format not in dtypes.FORMATS:
        raise ValueError(f"format: expected one of {', '.join(dtypes.FORMATS)}, got {format!r}")
    v = view(array)
    if v.format != format:
        if not v.format.startswith(("int", "uint")):
            raise TypeError(f"array: expected integers that hold {format} bits, got {v.format}")
        if v.itemsize != dtypes.FORMATS[format].itemsize:
            wanted = 8 * dtypes.FORMATS[format].itemsize
            raise ValueError(f"array: expected {wanted}-bit integers for {format}, got {v.format}")
    return ArrayView(
        v.pointer,
        v.shape,
        v.strides,
        format,
        v.device,
        library=v.library,
        readonly=v.readonly,
        owner=v.owner,
    )
