"""Other libraries' streams: the current one of CuPy or torch, and any that is passed as `stream=`.

The current stream is asked for at every call. One remembered from an earlier call would send work
to a stream that nobody waits for, or leave it out of a capture.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .cuda_streams import Stream

if TYPE_CHECKING:
    from .cuda import CudaDevice


_DEFAULT = (0, 1)  # two handles of the legacy default stream


def current_stream(device: CudaDevice, library: str) -> Stream:
    """Return the current stream of torch, or of CuPy for any other library's arrays.

    Parameters
    ----------
    library : empty where no array says whose stream is meant; then the two must not contradict

    Raises
    ------
    ValueError : nothing says whose is meant, and both have made a stream of theirs current
    """
    if not library:
        return _agreed_stream(device)
    if library == "torch":
        theirs = sys.modules["torch"].cuda.current_stream(device.index)
        return Stream(device, theirs.cuda_stream, theirs, library="torch")
    cupys = device.api.cupy.cuda.get_current_stream(device.index)
    return Stream(device, cupys.ptr, cupys, cupy_stream=cupys, library="cupy")


def _agreed_stream(device: CudaDevice) -> Stream:
    """Return the stream that was made current in torch, in CuPy or in both, else CuPy's default.

    Whoever works with torch inside `torch.cuda.stream(s)`, or captures with `torch.cuda.graph`,
    means `s`, though the memory may have come from CuPy. A torch that has not touched a GPU is not
    asked: it would set up all of them.
    """
    ours = current_stream(device, "cupy")
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return ours
    theirs = current_stream(device, "torch")
    if theirs == ours or theirs.pointer in _DEFAULT:
        return ours
    if ours.pointer in _DEFAULT:
        return theirs
    raise ValueError(
        f"stream: expected one of {device.name}, got None while CuPy's current stream is "
        f"{ours.pointer:#x} and torch's is {theirs.pointer:#x}; pass the one that is meant"
    )


def is_ordered(owner: Any, stream: Stream) -> bool:
    """Return whether the allocator of `owner` reuses its memory in the order of `stream`.

    Torch's does for its current stream, as far as torch's own operations go. CuPy's pool gives a
    block back to the stream that was current when it was allocated, and does not say which.
    """
    library = library_of(owner.__class__)
    if library != "torch":
        return owner is None
    if stream.library:
        return stream.library == library
    return current_stream(stream.device, library) == stream


def is_current_captured(device: CudaDevice) -> bool:
    """Return whether CuPy's or torch's current stream is being captured, as in torch.cuda.graph."""
    libraries = ["cupy"]
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():  # else asking would set up all GPUs
        libraries.append("torch")
    return any(current_stream(device, library).capturing for library in libraries)


def adopt(device: CudaDevice, stream: Any) -> Stream:
    """Return somebody else's stream as one of `device`.

    Raises
    ------
    TypeError : it is no stream
    ValueError : it belongs to another device
    """
    cuda = device.api.cupy.cuda
    if isinstance(stream, (cuda.Stream, getattr(cuda, "ExternalStream", cuda.Stream))):
        _require_index(device, stream, stream.device_id)
        return Stream(device, stream.ptr, stream, cupy_stream=stream)
    theirs = getattr(stream, "device", None)
    if getattr(theirs, "kind", "cuda") != "cuda":  # a stream of kvcupy's host device
        raise ValueError(f"stream: expected one of {device.name}, got {stream!r}")
    if isinstance(pointer := getattr(stream, "cuda_stream", None), int):  # torch
        _require_index(device, stream, getattr(theirs, "index", None))
        return Stream(device, pointer, stream)
    pointer = _protocol_pointer(stream)
    index = getattr(theirs, "device_id", None)  # cuda.core
    _require_index(device, stream, index if isinstance(index, int) else None)
    return Stream(device, pointer, stream)


def _protocol_pointer(stream: Any) -> int:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None or isinstance(stream, type):
        raise TypeError(
            "stream: expected None, a kvcupy, CuPy or torch stream, or an object with "
            f"__cuda_stream__, got {type(stream).__name__}"
        )
    answer = protocol() if callable(protocol) else protocol
    match answer:
        case (0, int(pointer)):
            return pointer
    raise TypeError(f"stream: expected __cuda_stream__() == (0, address), got {answer!r}")


def _require_index(device: CudaDevice, stream: object, index: int | None) -> None:
    if index is not None and index not in (-1, device.index):  # CuPy's -1: any device
        raise ValueError(
            f"stream: expected one of {device.name}, got one of cuda:{index}: {stream!r}"
        )


@lru_cache(maxsize=256)
def library_of(kind: type[Any]) -> str:
    """Return whose allocator is behind objects of a type: "cupy", "torch", or "" for others.

    >>> library_of(list)
    ''
    """
    for base in kind.__mro__:
        root, name = base.__module__.partition(".")[0], base.__name__
        if (root, name) in (("cupy", "ndarray"), ("torch", "Tensor")):
            return root
    return ""
