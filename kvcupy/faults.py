"""The fault record: what only the device can see, raised when the host asks.

A kernel that meets an index past the end skips it and notes operation, position and value
(`report_fault` in `kernels_src/common.cuh`). `check_faults` raises the first of them.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from . import devices
from .errors import IndexFault

RECORD_FIELDS = ("count", "operation", "position", "value")

_operations: list[str] = ["an unknown operation: its index"]
_lock = threading.Lock()


def operation_id(operation: str, argument: str) -> int:
    """Return the number under which kernels report a fault in `argument` of `operation`."""
    text = f"{operation}: {argument}"
    with _lock:
        if text not in _operations:
            _operations.append(text)
        return _operations.index(text)


def check_faults(device: Any = None) -> None:
    """Raise the first index fault of a device since the last check, and clear the record.

    Parameters
    ----------
    device : Device or its name; None: the default device

    Raises
    ------
    IndexFault : names the operation, the position in the index array and the value there, and
        how many faults there were

    Notes
    -----
    Stream: waits for all work on the device. Capture: illegal.
    """
    target = devices.get(device)
    target.synchronize()
    fault = recorded(target.to_numpy(target.fault_array()))
    if fault is None:
        return
    target.fault_array().fill(0)
    target.synchronize()
    raise fault


def recorded(record: np.ndarray[Any, Any]) -> IndexFault | None:
    """Return the error for a fault record in this processor's memory, or None if it is empty."""
    count, operation, position, value = (int(n) for n in record)
    if count == 0:
        return None
    name = _operations[operation if operation < len(_operations) else 0]
    return IndexFault(
        f"{name}[{position}] is {value}, past the end; it was skipped"
        + (f", as were {count - 1} more" if count > 1 else "")
    )
