"""Runs: what `Device.copy_runs` copies, as three arrays of addresses and sizes in bytes."""

from __future__ import annotations

from typing import Any

import numpy as np


def require_equal(dst: Any, src: Any, sizes: Any) -> None:
    """Refuse arrays that do not describe runs.

    Raises
    ------
    TypeError : one of them is no NumPy array of uint64
    ValueError : one of them is not one-dimensional, or they differ in length
    """
    for name, array in (("dst", dst), ("src", src), ("sizes", sizes)):
        if not isinstance(array, np.ndarray) or array.dtype != np.uint64:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(f"{name}: expected a NumPy array of uint64, got {kind}")
        if array.ndim != 1 or len(array) != len(dst):
            wanted = f"({len(dst)},)" if dst.ndim == 1 else "(runs,)"
            raise ValueError(f"{name}: expected shape {wanted}, got {array.shape}")
