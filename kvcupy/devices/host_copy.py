"""Copies on the host device: of arrays, and of runs of bytes."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from .protocol import require_runs


def copy_array(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Copy an array to another of the same shape and dtype."""
    if target.flags.c_contiguous and source.flags.c_contiguous:
        ctypes.memmove(target.ctypes.data, source.ctypes.data, target.nbytes)
    else:
        np.copyto(target, source)


def copy_of_runs(
    dst: np.ndarray[Any, Any], src: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]
) -> Callable[[], None]:
    """Return a function that copies runs one by one; it may be called again.

    Parameters
    ----------
    dst, src, sizes : uint64, (runs,), addresses and bytes; read before this returns
    """
    require_runs(dst, src, sizes)
    arguments = dst.tolist(), src.tolist(), sizes.tolist()

    def copy() -> None:
        # A map that is run to its end within C: there may be tens of thousands of short runs.
        deque(map(ctypes.memmove, *arguments), maxlen=0)

    return copy
