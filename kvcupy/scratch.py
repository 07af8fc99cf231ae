"""Buffers that operations need for a while: page lists on their way, staged pages.

A buffer is lent as an ArrayView and comes back by itself when nobody holds it any more. Work in
flight holds its arrays, so what comes back is idle, and no event is needed to hand it out again.
A capture that another library began holds nothing of kvcupy's, and its graph may be replayed at any
time: what goes into one never comes back.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .arrays import ArrayView
from .devices.protocol import Device, Stream
from .exporters import view

_SMALLEST_BYTES = 4096
_MOST_IDLE = 8  # of one size; what comes back beyond that is freed

_Idle = dict[tuple[bool, int], list[Any]]
_stores: WeakKeyDictionary[Device, _Idle] = WeakKeyDictionary()
_captured: list[ArrayView] = []  # by others
_lock = threading.Lock()


class _Loan:
    """Keeps a buffer away from others until nothing refers to it."""

    __slots__ = ("_array", "_idle")

    def __init__(self, array: Any, idle: list[Any]) -> None:
        self._array = array
        self._idle = idle

    def __del__(self) -> None:
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(self._array)


def borrow(device: Device, num_bytes: int, on: Stream, *, pinned: bool = False) -> ArrayView:
    """Return an int8 view (num_bytes,) of memory that nobody else uses while it is held.

    Parameters
    ----------
    on : the stream of the work that it is for
    pinned : page-locked host memory instead of the device's own

    Raises
    ------
    DeviceError : there is no memory for it
    """
    size = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
    with _lock:
        idle = _stores.setdefault(device, defaultdict(list))[pinned, size]
    try:
        array = idle.pop()
    except IndexError:
        make = device.empty_pinned if pinned else device.zeros  # zeros: ready for any stream
        array = make((size,), np.int8)
    whole = view(array)
    lent = ArrayView(
        whole.pointer, (num_bytes,), whole.strides, "int8", whole.device,
        library=whole.library, owner=_Loan(array, idle),
    )  # fmt: skip
    if not on.keeps:
        _captured.append(lent)
    return lent
