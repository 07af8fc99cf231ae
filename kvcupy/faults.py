"""The fault record: out-of-range indices that only the device could see, raised later by the host.

A kernel that meets an index past the end skips it, and records operation, position and value of the
first (`report_fault` in `kernels_src/common.cuh`). `kvcupy.check_faults` raises it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import IndexFault, process_lock

RECORD_FIELDS = ("count", "operation", "position", "value")

_operations: list[str] = ["an unknown operation: its index"]
_lock = process_lock()


def operation_id(operation: str, argument: str) -> int:
    """Return the number under which kernels report a fault in `argument` of `operation`."""
    text = f"{operation}: {argument}"
    with _lock:
        if text not in _operations:
            _operations.append(text)
        return _operations.index(text)


def recorded(record: np.ndarray[Any, Any]) -> IndexFault | None:
    """Return the error for a fault record in this processor's memory, or None if it is empty."""
    count, operation, position, value = (int(n) for n in record)
    if count == 0:
        return None
    name = _operations[operation if operation < len(_operations) else 0]
    return IndexFault(
        f"{name}[{position}] is {value}, {'negative' if value < 0 else 'past the end'}; "
        f"it was skipped" + (f", as were {count - 1} more" if count > 1 else "")
    )
