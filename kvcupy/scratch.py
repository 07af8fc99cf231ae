"""Temporary buffers of operations: page lists being uploaded, staged pages, workspaces.

A buffer is lent as an ArrayView and returned when the last reference to it is dropped. Work in
flight holds its arrays, so a returned buffer is idle, and needs no event to be lent again.

In a capture nothing is in flight: the work is replayed later, in the order of each stream. There a
returned buffer may be lent again at once, but only to work that is captured behind it in the same
stream; so the layers of a model share one workspace. All buffers of a capture belong to its graph.
If another library began the capture, nothing tells when its graph is destroyed: they are kept until
the process ends.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from . import observe
from .arrays import ArrayView, view
from .devices.protocol import Device, Stream
from .errors import in_child, process_lock

_SMALLEST_BYTES = 4096
_MAX_IDLE = 8  # of one size; a buffer returned beyond that, and beyond the bytes, is freed
_MAX_IDLE_BYTES = 1 << 20  # of one size: to allocate pinned memory, or free it, may block the host

_Key = tuple[bool, int]  # pinned, bytes
_Idle = dict[_Key, list[ArrayView]]
_stores: WeakKeyDictionary[Device, _Idle] = WeakKeyDictionary()
_captured: list[object] = []  # by other libraries
_lock = process_lock()


class _Loan:
    """Owns a buffer until nothing refers to it."""

    __slots__ = ("__weakref__", "_captured", "_device", "_idle", "_key", "_whole")

    def __init__(
        self, device: Device, key: _Key, whole: ArrayView, idle: list[ArrayView],
        captured: _Captured | None = None,
    ) -> None:  # fmt: skip
        self._device = device
        self._key = key
        self._whole = whole
        self._idle = idle
        self._captured = captured

    @property
    def memory(self) -> Any:
        """The array that is lent."""
        return self._whole.owner

    def lend(self, num_bytes: int) -> ArrayView:
        """Return the first bytes of the buffer as a view that holds the loan."""
        whole = self._whole
        return ArrayView(
            whole.pointer, (num_bytes,), whole.strides, "int8", whole.device,
            library=whole.library, owner=self,
        )  # fmt: skip

    @property
    def kept_by_capture(self) -> bool:
        """Whether the graph keeps this buffer through its capture, so need not keep the loan."""
        return self._captured is not None

    # At exit this module's names may be gone before the last buffers are.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():
            return
        buffer = [self._whole]
        del self._whole
        _give_back(self._device, self._key, buffer, self._idle)


class _Captured:
    """The buffers of one captured stream. They are idle again when its graph is gone."""

    def __init__(self, device: Device, store: _Idle) -> None:
        self.idle: _Idle = defaultdict(list)
        self._device = device
        self._store = store
        self.all: list[tuple[_Key, list[ArrayView]]] = []  # each buffer in its own list

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():
            return
        self.idle.clear()
        for key, buffer in self.all:
            _give_back(self._device, key, buffer, self._store[key])


_streams: WeakValueDictionary[tuple[Device, int, Stream], _Captured] = WeakValueDictionary()
in_child(_streams.clear)


def borrow(device: Device, num_bytes: int, stream: Stream, *, pinned: bool = False) -> ArrayView:
    """Return an int8 view (num_bytes,) of memory that nothing else uses while the view is held.

    Legal in captures, of other libraries too: memory is allocated outside of them, on a stream that
    they do not contain.
    """
    key = pinned, max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
    store = _stores.get(device)
    if store is None:
        with _lock:
            store = _stores.setdefault(device, defaultdict(list))
    capturing = stream.capturing
    capture = stream.capture_id if capturing else None
    if capture is None:
        whole = _take(store[key])
        is_new = whole is None
        if whole is None:
            whole = _make(device, key, stream)
        loan = _Loan(device, key, whole, store[key])
        if is_new and not pinned and not capturing:
            # The block may have been freed behind work of the stream, and is idle only behind that.
            device.keep((loan,), stream)
    else:
        loan = _lend_to_capture(device, key, stream, capture, store)
        whole = loan._whole
    lent = loan.lend(num_bytes)
    if capturing and capture is None and not stream.retains_owners:
        _captured.append(lent)
    if observe.order_observers:
        # Memory of a graph is in use by every launch, however short the loan.
        used = lent if capture is None else whole[:num_bytes]
        if pinned:
            observe.touched_by_host("borrow", (), (observe.Access(used, name="scratch"),))
        else:
            observe.lent(used, stream)
    return lent


def borrowed_array(
    pinned: ArrayView, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Return pinned memory from `borrow` as an array for the host, which does not hold the loan."""
    loan: Any = pinned.owner
    return np.ndarray(shape, dtype, loan.memory)


# What calls on a stream from one thread share, while work in flight holds it.
_workspaces: WeakValueDictionary[tuple[Device, Stream, int], _Loan] = WeakValueDictionary()
in_child(_workspaces.clear)


def workspace(device: Device, num_bytes: int, stream: Stream) -> ArrayView:
    """Return memory as `borrow` does, which later calls of this thread on the stream share.

    Only for work that is issued before the next call, and needs nothing that it left there.
    """
    if stream.capturing:  # shared already, or kept
        return borrow(device, num_bytes, stream)
    where = device, stream, threading.get_ident()
    loan = _workspaces.get(where)
    if loan is None or loan._key[1] < num_bytes:
        lent = borrow(device, num_bytes, stream)
        assert isinstance(lent.owner, _Loan)
        _workspaces[where] = lent.owner
        return lent
    lent = loan.lend(num_bytes)
    if observe.order_observers:
        observe.lent(lent, stream)
    return lent


def _lend_to_capture(
    device: Device, key: _Key, stream: Stream, capture: int, store: _Idle
) -> _Loan:
    where = device, capture, stream
    with _lock:
        buffers = _streams.get(where)
        is_new = buffers is None
        if buffers is None:
            _streams[where] = buffers = _Captured(device, store)
    if is_new:
        if stream.retains_owners:
            device.keep((buffers,), stream)
        else:
            _captured.append(buffers)
    whole = _take(buffers.idle[key])
    if whole is None:
        device.release([])  # what has passed since the last call may be idle now
        whole = _take(store[key])
        if whole is None:
            whole = _make(device, key, stream)
        buffers.all.append((key, [whole]))
    # Each replay reads what the host wrote into a pinned buffer: no later call may reuse it.
    return _Loan(device, key, whole, [] if key[0] else buffers.idle[key], buffers)


def _make(device: Device, key: _Key, stream: Stream) -> ArrayView:
    pinned, size = key
    if pinned:
        return view(device.empty_pinned((size,), np.int8))
    return view(device.allocate((size,), np.int8, stream, zeroed=False))


def _take(idle: list[ArrayView]) -> ArrayView | None:
    try:
        return idle.pop()
    except IndexError:  # also if another thread was faster
        return None


def _give_back(device: Device, key: _Key, buffer: list[ArrayView], idle: list[ArrayView]) -> None:
    """Keep the view in `buffer`, which holds the last reference to it, or free it."""
    if len(idle) < max(_MAX_IDLE, _MAX_IDLE_BYTES // key[1]):
        idle.append(buffer.pop())
        return
    device.release(buffer)
