"""Memory of one case: each array on separate pages, between pages that must not be accessed.

A byte read or written more than a page past an array ends the process. Each array is at one end of
its pages, so on that side the next byte does. The rest of the pages holds canaries.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from random import Random
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

PAGE = mmap.PAGESIZE
_NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(num_bytes: int) -> Array:
    """Return at least so many bytes, whole pages, between two pages without access."""
    inside = max(1, -(-num_bytes // PAGE)) * PAGE
    whole = np.frombuffer(mmap.mmap(-1, inside + 2 * PAGE), np.uint8)
    for guard in (0, PAGE + inside):
        address = ctypes.c_void_p(whole.ctypes.data + guard)
        if _libc.mprotect(address, ctypes.c_size_t(PAGE), _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
    pages = whole[PAGE : PAGE + inside]
    pages[...] = 0xA5
    return pages


class Arena:
    """The arrays of one case. It stands for a device whose `empty` has guarded memory."""

    def __init__(self, rng: Random, device: Any = None) -> None:
        self._rng, self._device = rng, device
        self._pages: list[tuple[Array, Array]] = []  # and their bytes before a call
        self.arrays: list[Array] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def empty(self, shape: tuple[int, ...], dtype: Any, shift: int = 0) -> Array:
        """Return memory at one end of its pages, `shift` bytes away from there."""
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise TypeError("objects have no place in guarded memory")
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        pages = guarded(num_bytes + shift)
        at_end = self._rng.random() < 0.6
        start = len(pages) - num_bytes - shift if at_end else shift
        self._pages.append((pages, pages.copy()))
        array = pages[start : start + num_bytes].view(dtype).reshape(shape)
        self.arrays.append(array)
        return array

    def place(self, content: Any, shift: int = 0) -> Array:
        """Return a copy of an array."""
        content = np.asarray(content)
        array = self.empty(content.shape, content.dtype, shift)
        array[...] = content
        return array

    def remember(self) -> None:
        """Take what the arrays hold now as what they should hold."""
        self._pages = [(pages, pages.copy()) for pages, _ in self._pages]

    def changed(self, allowed: Iterable[Array] = ()) -> str:
        """Return which bytes changed outside of the views that may be written; "": none."""
        views = list(allowed)
        for number, (pages, before) in enumerate(self._pages):
            wrong = pages != before
            if not wrong.any():
                continue
            for view in views:
                first = view.ctypes.data - pages.ctypes.data
                if view.size and 0 <= first < len(pages):
                    strides = (*view.strides, 1)
                    np.ndarray((*view.shape, view.itemsize), bool, wrong, first, strides)[...] = 0
            if wrong.any():
                array = self.arrays[number]
                at = int(np.flatnonzero(wrong)[0]) - (array.ctypes.data - pages.ctypes.data)
                return (
                    f"{int(wrong.sum())} bytes of array {number} {array.shape} {array.dtype}, the "
                    f"first at {at} from its start"
                )
        return ""
