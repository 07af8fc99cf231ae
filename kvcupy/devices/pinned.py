"""Host memory that a device reads and writes directly, as NumPy arrays that know that they are it.

A pinned array is an ordinary `numpy.ndarray`. What marks it is where its chain of `.base` ends.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..arrays import Memory, array_at


class PinnedBuffer(Memory):
    """Memory that a device reads and writes directly."""

    __slots__ = ()


def wrap(
    owner: object, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Return the contiguous array of pinned memory at an address that `owner` keeps alive."""
    return array_at(owner, pointer, shape, dtype, memory=PinnedBuffer)


def is_pinned(owner: object) -> bool:
    """Return whether host memory is page-locked, from the object that keeps it alive.

    >>> is_pinned(np.zeros(3))
    False
    """
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, PinnedBuffer):
        return True
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(owner, torch.Tensor):
        return bool(owner.is_pinned())
    if cupy is not None and isinstance(owner, cupy.cuda.PinnedMemoryPointer):
        return True
    return bool(getattr(owner, "pinned", False))  # a DLPack capsule says so itself
