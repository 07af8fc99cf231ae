"""Memory of one case: each array on separate pages, between pages that must not be accessed.

A byte read or written more than a page past an array ends the process, and the array lies at one
end of its page, so that on that side the next byte does. The rest of the page holds canaries.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from random import Random
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
_NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)


class Buffer:
    """The bytes between two guard pages, and an array in them."""

    def __init__(self, content: np.ndarray[Any, Any], at_end: bool, shift: int) -> None:
        inside = max(1, -(-(content.nbytes + shift) // PAGE)) * PAGE
        memory = mmap.mmap(-1, inside + 2 * PAGE)
        whole = np.frombuffer(memory, np.uint8)
        self.address = whole.ctypes.data + PAGE
        for guard in (self.address - PAGE, self.address + inside):
            if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), _NO_ACCESS):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.bytes = whole[PAGE : PAGE + inside]
        self.bytes[...] = 0xA5
        first = inside - content.nbytes - shift if at_end else shift
        inner = self.bytes[first : first + content.nbytes]
        if content.dtype.hasobject:
            raise TypeError("objects have no place in guarded memory")
        self.array = inner.view(content.dtype).reshape(content.shape)
        self.array[...] = content
        self.before = self.bytes.copy()

    def mask_of(self, view: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return which bytes a view of this buffer covers."""
        mask = np.zeros(len(self.bytes), bool)
        if view.size:
            np.ndarray(
                (*view.shape, view.itemsize), bool, mask, view.ctypes.data - self.address,
                (*view.strides, 1),
            )[...] = True  # fmt: skip
        return mask

    def holds(self, view: np.ndarray[Any, Any]) -> bool:
        return 0 <= view.ctypes.data - self.address < len(self.bytes)


class Arena:
    """The arrays of one case."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.buffers: list[Buffer] = []

    def place(self, content: Any, shift: int = 0) -> np.ndarray[Any, Any]:
        """Return a copy of an array, at the beginning or the end of its page."""
        buffer = Buffer(np.ascontiguousarray(content), self._rng.random() < 0.6, shift)
        self.buffers.append(buffer)
        array = buffer.array
        return array.reshape(np.shape(content))

    def remember(self) -> None:
        """Take what the arrays hold now as what they should hold."""
        for buffer in self.buffers:
            buffer.before = buffer.bytes.copy()

    def changed(self, allowed: Iterable[np.ndarray[Any, Any]] = ()) -> str:
        """Say which bytes changed outside of the views that may be written; "" if none did."""
        views = list(allowed)
        for number, buffer in enumerate(self.buffers):
            wrong = buffer.bytes != buffer.before
            if not wrong.any():
                continue
            for view in views:
                if buffer.holds(view):
                    wrong &= ~buffer.mask_of(view)
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                array = buffer.array
                return (
                    f"{int(wrong.sum())} bytes of array {number} {array.shape} {array.dtype}, the "
                    f"first at {at - (array.ctypes.data - buffer.address)} from its start"
                )
        return ""
