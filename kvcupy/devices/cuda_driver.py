"""What CuPy does not bind of the driver: batched copies, capture modes, capture ids.

Called through ctypes, so they also let go of the interpreter's lock. Handles 0 to 2 mean streams of
the device that is current, as in CuPy.

`cuMemcpyBatchAsync` came with CUDA 12.8. CUDA 13 took an argument away, so there are two functions
of that name; a driver gives out the one that belongs to the version it is asked for. Asked for
12.8, every driver from then on gives the one with nine arguments, or none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any

BATCH_VERSION = 12080
NOWHERE = ctypes.c_size_t(-1).value  # the failure has to do with no copy in particular

_NAME = b"cuMemcpyBatchAsync"
_LEGACY_STREAM = 1  # CU_GET_PROC_ADDRESS_LEGACY_STREAM: stream 0 is not the calling thread's
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

# CUresult (CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
#           CUmemcpyAttributes* attrs, size_t* attrsIdxs, size_t numAttrs, size_t* failIdx,
#           CUstream stream)
BATCH_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_void_p,
)  # fmt: skip


class Location(ctypes.Structure):
    """CUmemLocation: where managed memory is thought to be; zero is no hint."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: how the copies of a batch are to be made."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location_hint", Location),
        ("dst_location_hint", Location),
        ("flags", ctypes.c_uint),
    )


def in_stream_order() -> CopyAttributes:
    """Return the attributes of copies that read their source when the stream gets to them."""
    return CopyAttributes(src_access_order=_IN_STREAM_ORDER)


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


def load() -> Any:
    """Return the driver that is installed, or None."""
    with suppress(OSError):
        return ctypes.CDLL("libcuda.so.1")
    return None


class RelaxedCapture:
    """While a with block runs, this thread may make calls that captures of others prohibit.

    In the global mode, which torch captures in, whoever allocates, asks or waits on any thread gets
    an error, and the capture is lost. Calls of which it is known that no captured work needs their
    outcome are made in the relaxed mode instead, which is a matter of the calling thread alone.
    """

    __slots__ = ("_before", "_exchange")

    def __init__(self, library: Any) -> None:
        self._exchange = getattr(library, "cuThreadExchangeStreamCaptureMode", None)
        self._before: ctypes.c_int | None = None

    def __enter__(self) -> None:
        if self._exchange is None:
            return
        mode = ctypes.c_int(_RELAXED)
        if self._exchange(ctypes.byref(mode)) == 0:  # else the mode is as it was
            self._before = mode

    def __exit__(self, *_: object) -> None:
        if self._exchange is not None and self._before is not None:
            self._exchange(ctypes.byref(self._before))


def capture_id(library: Any, stream: int) -> int | None:
    """Return the number of the capture that a stream is part of, which no other capture ever has.

    None if it is part of none, of one that is spoilt, or if the driver cannot be asked.
    """
    ask = getattr(library, "cuStreamGetCaptureInfo_v2", None)
    if ask is None:
        return None
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    handle = ctypes.c_void_p(stream)
    failed = ask(handle, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return None if failed or status.value != _ACTIVE else number.value


def find_batch(version: int, library: Any = None) -> Callable[..., int] | None:
    """Return the driver's batched copy with its nine arguments, or None where there is none.

    Parameters
    ----------
    version : of the driver, as `cudaDriverGetVersion` counts: 12080 is 12.8
    library : the driver; by default the one that is installed
    """
    if version < BATCH_VERSION:
        return None
    library = load() if library is None else library
    if library is None:
        return None
    address = _look_up(library)
    return BATCH_TYPE(address) if address else None


def _look_up(library: Any) -> int | None:
    """Ask the driver for the function, by the newer look-up of CUDA 12.0 or else the older one."""
    address, found = ctypes.c_void_p(), ctypes.c_int(0)
    asked = (_NAME, ctypes.byref(address), BATCH_VERSION, ctypes.c_uint64(_LEGACY_STREAM))
    newer = getattr(library, "cuGetProcAddress_v2", None)
    if newer is not None and newer(*asked, ctypes.byref(found)) == 0 and found.value == 0:
        return address.value
    older = getattr(library, "cuGetProcAddress", None)
    if newer is None and older is not None and older(*asked) == 0:
        return address.value
    return None
