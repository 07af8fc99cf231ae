"""DLPack capsules, read and written: any exporter of `__dlpack__`, every format, no copy.

Only the layout of the structs is needed (dmlc/dlpack, `dlpack.h`, versions 0.8 and 1.x), so ctypes
mirrors it here. NumPy and CuPy neither import nor export bfloat16 and float8. Here a capsule of
them is read directly; to write one, the library exports the bits as integers, and the type code in
its capsule is replaced. So the capsule's memory and deleter remain the library's, and may be
released on any thread.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .. import cuda_api, formats

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_READ_ONLY = 1

# (type code, bits) -> format
_FORMATS = {
    (0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64",
    (1, 8): "uint8", (1, 16): "uint16", (1, 32): "uint32", (1, 64): "uint64",
    (2, 16): "fp16", (2, 32): "fp32", (2, 64): "float64", (4, 16): "bf16", (6, 8): "bool",
    (10, 8): "fp8_e4m3", (12, 8): "fp8_e5m2",
}  # fmt: skip


class _Tensor(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Managed(ctypes.Structure):
    _fields_: ClassVar = [
        ("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


class _Versioned(ctypes.Structure):
    _fields_: ClassVar = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]  # fmt: skip


_api = ctypes.pythonapi
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)

_CODES = {format: code for (code, _), format in _FORMATS.items()}


def export(carrier: Any, format: str, options: Mapping[str, Any]) -> object:
    """Return the capsule of an array of NumPy or CuPy under the code of `format`."""
    options = {name: value for name, value in options.items() if value is not None}
    on_host = isinstance(carrier, np.ndarray)
    if on_host and "stream" in options:  # NumPy's versions raise errors of different types
        raise TypeError(f"options: expected stream=None for host memory, got {options}")
    try:
        # The base class's method: `ExportsBits.__dlpack__` calls this function.
        if on_host:
            capsule = np.ndarray.__dlpack__(carrier, **options)
        else:  # for CuPy the current GPU's current stream is the producer's
            with cuda_api.current_device(carrier.data.device_id) as cupy:
                capsule = cupy.ndarray.__dlpack__(carrier, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        names = "stream, max_version, dl_device and copy"
        raise kind(f"options: expected {names} of DLPack, got {options}: {error}") from error
    if format in _CODES:
        _tensor_of(capsule).code = _CODES[format]
    return capsule


class ExportsBits:
    """An array of NumPy or CuPy that exports bfloat16 and float8 under their own codes."""

    dtype: np.dtype[Any]

    def __dlpack__(self, **options: Any) -> object:
        format = formats.tag(self.dtype)
        bits = self.view(formats.carrier_dtype(format))  # type: ignore[attr-defined]
        return export(bits, format, options)


class HostArray(ExportsBits, np.ndarray[Any, Any]):  # type: ignore[misc]
    """A NumPy array that exports DLPack in every format. Results computed from it are plain."""

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else array


@cache
def _exporting_type(kind: type) -> Any:
    return type("CupyArray", (ExportsBits, kind), {})


def exporting(array: Any) -> Any:
    """Return the same array, of a number format, as one that exports DLPack whichever that is.

    >>> exporting(np.zeros(3, formats.numpy_dtype("bf16"))).__dlpack_device__()
    (1, 0)
    """
    is_numpy = isinstance(array, np.ndarray)
    cupy = sys.modules.get("cupy")
    if not is_numpy and (cupy is None or not isinstance(array, cupy.ndarray)):
        return array  # an ArrayView exports DLPack itself
    if formats.FORMATS[formats.tag(array.dtype)].native:
        return array
    if is_numpy:
        return array.view(HostArray)
    assert cupy is not None
    kind = _exporting_type(cupy.ndarray)
    return kind(array.shape, array.dtype, memptr=array.data, strides=array.strides)


def _tensor_of(capsule: object) -> _Tensor:
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        tensor: _Tensor = versioned.tensor
    else:
        tensor = _Managed.from_address(_get_pointer(capsule, b"dltensor")).tensor
    return tensor


class Capsule:
    """Keeps the exporter and its unconsumed capsule, whose destructor releases the export.

    `pinned` is whether it is page-locked host memory, which DLPack says by the device type.
    """

    def __init__(self, exporter: Any, capsule: object, pinned: bool) -> None:
        self.exporter = exporter
        self.capsule = capsule
        self.pinned = pinned

    def __getitem__(self, index: Any) -> Any:
        """Index the exporter."""
        return self.exporter[index]


class Export(NamedTuple):
    """The array of a capsule; strides in bytes, or None for one that is C-contiguous."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    format: str
    device: str
    readonly: bool
    owner: Capsule


def read(exporter: Any) -> Export:
    """Return the array of `exporter.__dlpack__`, without a copy.

    The capsule is kept unconsumed: its destructor releases the export when `owner` is dropped.
    """
    device_type, index = (int(number) for number in exporter.__dlpack_device__())
    try:
        if device_type in (_CUDA, _CUDA_MANAGED):
            with cuda_api.dlpack_stream(index) as stream:
                capsule = _export(exporter, stream=stream)
        else:
            capsule = _export(exporter)
    except BufferError as error:
        raise TypeError(f"got {type(exporter).__name__}: {error}") from error

    readonly = False
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise TypeError(f"got DLPack version {versioned.major}.{versioned.minor}")
        readonly = bool(versioned.flags & _READ_ONLY)
    tensor = _tensor_of(capsule)

    format = _FORMATS.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if format is None:
        raise TypeError(f"got DLPack type code {tensor.code} of {tensor.bits} bits")
    if tensor.device_type in (_CPU, _CUDA_HOST):
        device = "host"
    elif tensor.device_type in (_CUDA, _CUDA_MANAGED):
        device = f"cuda:{tensor.device_id}"
    else:
        raise TypeError(f"got DLPack device type {tensor.device_type}")
    shape = tuple(tensor.shape[: tensor.ndim])
    itemsize = tensor.bits // 8
    strides = tensor.strides and tuple(s * itemsize for s in tensor.strides[: tensor.ndim])
    owner = Capsule(exporter, capsule, tensor.device_type == _CUDA_HOST)
    pointer = (tensor.data or 0) + tensor.byte_offset
    return Export(pointer, shape, strides or None, format, device, readonly, owner)


def let_wait(stream: int, exporter: Any) -> None:
    """Let a stream of the GPU wait for what writes an exporter's array, as `read` has let CuPy's
    current stream wait. On the host nothing is awaited."""
    device_type, index = exporter.__dlpack_device__()
    if device_type in (_CUDA, _CUDA_MANAGED):
        with cuda_api.dlpack_stream(int(index)) as current:
            if current != (stream or 1):
                _export(exporter, stream=stream or 1)


def _export(exporter: Any, **arguments: int) -> object:
    """Return a capsule of version 1, or an unversioned one from exporters before DLPack 1.0."""
    try:
        return exporter.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError:
        return exporter.__dlpack__(**arguments)
