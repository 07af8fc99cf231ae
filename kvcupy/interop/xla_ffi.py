"""XLA's foreign function interface: a Python function as the handler of a custom call.

XLA calls a handler with a frame: the buffers of arguments and results, attributes, and on a GPU
the stream on which the work belongs. Only the layout of these structs is needed (openxla/xla,
`xla/ffi/api/c_api.h`, version 0), so ctypes mirrors it here. What is read here has been in them
from the start; what later versions append is not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from .. import cuda_api
from ..arrays import ArrayView, contiguous_strides
from ..formats import itemsize

_EXECUTE, _METADATA, _STRING = 3, 1, 4  # a stage, an extension, a kind of attribute
_INVALID_ARGUMENT, _INTERNAL = 3, 13
_ERROR_CREATE, _STREAM_GET = 0, 4  # functions, by their place in the table

_FORMATS = {
    1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64",
    6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64",
    10: "fp16", 11: "fp32", 12: "float64", 16: "bf16", 19: "fp8_e5m2", 20: "fp8_e4m3",
}  # fmt: skip


class _Struct(ctypes.Structure):
    """What nearly all structs begin with."""

    _fields_: ClassVar = [("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p)]


class _Version(_Struct):
    _fields_: ClassVar = [("major", ctypes.c_int), ("minor", ctypes.c_int)]


class _Api(_Struct):
    _fields_: ClassVar = [
        ("version", _Version), ("internal", ctypes.c_void_p), ("functions", ctypes.c_void_p * 5),
    ]  # fmt: skip


class _Span(ctypes.Structure):
    _fields_: ClassVar = [("text", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    @property
    def value(self) -> str:
        return ctypes.string_at(self.text, self.length).decode()


class _Buffer(_Struct):
    _fields_: ClassVar = [
        ("dtype", ctypes.c_int), ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64), ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]  # fmt: skip


class _Buffers(_Struct):
    _fields_: ClassVar = [
        ("size", ctypes.c_int64), ("types", ctypes.POINTER(ctypes.c_int)),
        ("items", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    ]  # fmt: skip


class _Attributes(_Struct):
    _fields_: ClassVar = [
        ("size", ctypes.c_int64), ("types", ctypes.POINTER(ctypes.c_int)),
        ("names", ctypes.POINTER(ctypes.POINTER(_Span))),
        ("items", ctypes.POINTER(ctypes.POINTER(_Span))),  # of strings
    ]  # fmt: skip


class _Frame(_Struct):
    _fields_: ClassVar = [
        ("api", ctypes.POINTER(_Api)), ("context", ctypes.c_void_p), ("stage", ctypes.c_int),
        ("arguments", _Buffers), ("results", _Buffers), ("attributes", _Attributes),
    ]  # fmt: skip


class _Metadata(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32),
    ]  # fmt: skip


class _Extension(ctypes.Structure):
    _fields_: ClassVar = [
        ("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),  # of an extension of that type
    ]  # fmt: skip


class _Error(_Struct):
    _fields_: ClassVar = [("message", ctypes.c_char_p), ("code", ctypes.c_int)]


class _StreamOf(_Struct):
    _fields_: ClassVar = [("context", ctypes.c_void_p), ("stream", ctypes.c_void_p)]


_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class Call(NamedTuple):
    """What XLA asks for: buffers as views, the string attribute `call`, and a GPU's stream."""

    arguments: tuple[ArrayView, ...]
    results: tuple[ArrayView, ...]
    attribute: str
    stream: cuda_api.StreamAddress | None


def handler(execute: Callable[[Call], None], *, on_gpu: bool) -> Any:
    """Return a C function that XLA can call, which calls a Python function.

    Parameters
    ----------
    execute : does the work of a call, on its stream. What it raises becomes an error of XLA's:
        TypeError and ValueError as an invalid argument. It runs on a thread of XLA's
    on_gpu : whether it is for GPUs

    Returns
    -------
    function : of ctypes, to be kept as long as XLA may call it
    """

    def run(address: int) -> int | None:
        frame = _Frame.from_address(address)
        try:
            extension = frame.extension and _Extension.from_address(frame.extension)
            if extension and extension.type == _METADATA:
                return _describe(frame, extension.metadata.contents)
            if frame.stage == _EXECUTE:
                execute(_read(frame, on_gpu))
        except BaseException as error:  # it must not pass through the frames of C++
            return _error(frame, error)
        return None

    return _Function(run)


def _describe(frame: _Frame, metadata: _Metadata) -> int | None:
    """Answer with the version that XLA has: its minor versions only append to what is read here.

    Before 0.2 it does not say which it is.
    """
    version = frame.api.contents.version if frame.api else _Version(major=0, minor=1)
    if version.major != 0:
        raise RuntimeError(f"XLA's foreign functions are of version {version.major}, expected 0")
    metadata.version.major, metadata.version.minor = version.major, version.minor
    metadata.traits = 0  # not for CUDA graphs: kernels may be compiled in a call
    return None


def _read(frame: _Frame, on_gpu: bool) -> Call:
    attributes = {
        frame.attributes.names[i].contents.value: frame.attributes.items[i].contents.value
        for i in range(frame.attributes.size)
        if frame.attributes.types[i] == _STRING
    }
    stream, device = None, "host"
    arguments = [each.contents for each in frame.arguments.items[: frame.arguments.size]]
    if on_gpu:
        stream = _stream_of(frame)
        pointer = next((each.data for each in arguments if each.data), 0)
        device = f"cuda:{cuda_api.device_of_pointer(pointer)}"
    results = [each.contents for each in frame.results.items[: frame.results.size]]
    return Call(
        tuple(_view(each, device) for each in arguments),
        tuple(_view(each, device) for each in results),
        attributes["call"],
        stream,
    )


def _view(buffer: _Buffer, device: str) -> ArrayView:
    """Return the view of a buffer, which XLA keeps alive until its stream has passed the call."""
    format = _FORMATS.get(buffer.dtype)
    if format is None:
        raise TypeError(f"got an array of XLA's element type {buffer.dtype}")
    shape = tuple(buffer.dims[: buffer.rank])
    strides = contiguous_strides(shape, itemsize(format))
    library = "numpy" if device == "host" else "cupy"
    return ArrayView(buffer.data or 0, shape, strides, format, device, library=library)


def _stream_of(frame: _Frame) -> cuda_api.StreamAddress:
    asked = _StreamOf(ctypes.sizeof(_StreamOf), None, frame.context, None)
    failed = _Function(frame.api.contents.functions[_STREAM_GET])(ctypes.addressof(asked))
    if failed:
        raise RuntimeError("XLA names no stream for this call")
    return cuda_api.StreamAddress(asked.stream or 0)


def _error(frame: _Frame, error: BaseException) -> int | None:
    """Return an error for XLA, which takes the message over."""
    kind = _INVALID_ARGUMENT if isinstance(error, (TypeError, ValueError)) else _INTERNAL
    message = f"{type(error).__name__}: {error}".encode()
    created = _Error(ctypes.sizeof(_Error), None, message, kind)
    function = _Function(frame.api.contents.functions[_ERROR_CREATE])
    address: int | None = function(ctypes.addressof(created))
    return address
