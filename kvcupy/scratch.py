"""Buffers that operations need for a while: page lists on their way, staged pages, workspaces.

A buffer is lent as an ArrayView and comes back by itself when nobody holds it any more. Work in
flight holds its arrays, so what comes back is idle, and no event is needed to hand it out again.

In a capture nothing is in flight: the work is replayed later, in the order of each stream. There a
buffer that comes back may be lent again at once, but only to work that is captured behind it in the
same stream; so the layers of a model share one workspace, not one each. All buffers of a capture
belong to its graph. If another library began the capture, there is no notice of when its graph is
destroyed: they are kept until the process ends.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from .arrays import ArrayView, view
from .devices.protocol import Device, Stream

_SMALLEST_BYTES = 4096
_MOST_IDLE = 8  # of one size; what comes back beyond that is freed

_Key = tuple[bool, int]  # pinned, bytes
_Idle = dict[_Key, list[Any]]
_stores: WeakKeyDictionary[Device, _Idle] = WeakKeyDictionary()
_captured: list[object] = []  # by others
_lock = threading.Lock()


class _Loan:
    """Keeps a buffer away from others until nothing refers to it."""

    __slots__ = ("_array", "_captured", "_idle")

    def __init__(self, array: Any, idle: list[Any], captured: _Captured | None = None) -> None:
        self._array = array
        self._idle = idle
        self._captured = captured

    @property
    def kept_by_capture(self) -> bool:
        """Whether a graph is to keep the buffers of its capture instead, for others to reuse."""
        return self._captured is not None

    def __del__(self) -> None:
        _give(self._array, self._idle)


class _Captured:
    """The buffers of one captured stream. They are idle again when its graph is gone."""

    def __init__(self, store: _Idle) -> None:
        self.idle: _Idle = defaultdict(list)
        self._store = store
        self._all: list[tuple[_Key, Any]] = []

    def __del__(self) -> None:
        for key, array in self._all:
            _give(array, self._store[key])

    def add(self, key: _Key, array: Any) -> None:
        self._all.append((key, array))


_streams: WeakValueDictionary[tuple[Device, int, Stream], _Captured] = WeakValueDictionary()


def borrow(device: Device, num_bytes: int, on: Stream, *, pinned: bool = False) -> ArrayView:
    """Return an int8 view (num_bytes,) of memory that nobody else uses while it is held.

    Parameters
    ----------
    on : the stream of the work that it is for
    pinned : page-locked host memory instead of the device's own

    Raises
    ------
    DeviceError : there is no memory for it

    Notes
    -----
    Capture: legal, in captures of others too, in any mode. Memory is allocated outside the capture
    and beside its streams.
    """
    key = pinned, max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
    with _lock:
        store = _stores.setdefault(device, defaultdict(list))
    capture = on.capture_id
    if capture is None:
        array = _take(store[key])
        if array is None:
            array = _make(device, key)
        loan = _Loan(array, store[key])
    else:
        loan = _lend_to_capture(device, key, on, capture, store)
        array = loan._array
    whole = view(array)
    lent = ArrayView(
        whole.pointer, (num_bytes,), whole.strides, "int8", whole.device,
        library=whole.library, owner=loan,
    )  # fmt: skip
    if capture is None and not on.retains_owners:
        _captured.append(lent)
    return lent


def _lend_to_capture(device: Device, key: _Key, on: Stream, capture: int, store: _Idle) -> _Loan:
    where = device, capture, on
    with _lock:
        buffers = _streams.get(where)
        if buffers is None:
            _streams[where] = buffers = _Captured(store)
            is_new = True
        else:
            is_new = False
    if is_new:
        if on.retains_owners:
            device.run(_nothing, on, (buffers,))
        else:
            _captured.append(buffers)
    array = _take(buffers.idle[key])
    if array is None:
        side = device.stream()  # which also lets go of what has passed since the last call
        array = _take(store[key])
        if array is None:
            array = _make_beside(device, key, side)
        buffers.add(key, array)
    # What the host writes is read at each replay: a later call must not write it anew.
    return _Loan(array, [] if key[0] else buffers.idle[key], buffers)


def _make(device: Device, key: _Key) -> Any:
    pinned, size = key
    make = device.empty_pinned if pinned else device.zeros  # zeros: ready for any stream
    return make((size,), np.int8)


def _make_beside(device: Device, key: _Key, side: Stream) -> Any:
    """Make a buffer with a stream of its own as the current one, which no capture has to do with.

    The memory pool then finds no block that a captured stream, or the default one, may still use.
    """
    made: list[Any] = []
    device.run(lambda: made.append(_make(device, key)), side)
    return made[0]


def _take(idle: list[Any]) -> Any:
    try:
        return idle.pop()
    except IndexError:  # also if another thread was faster
        return None


def _give(array: Any, idle: list[Any]) -> None:
    if len(idle) < _MOST_IDLE:
        idle.append(array)


def _nothing() -> None:
    """Do nothing: what matters is what the graph keeps."""
