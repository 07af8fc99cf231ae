"""The fault record: out-of-range indices that only the device could see, raised later by the host.

A kernel that meets an index past the end skips it, and records operation, position and value of the
first (`report_fault` in `kernels_src/common.cuh`). `kvcupy.check_faults` raises it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import IndexFault, process_lock

RECORD_FIELDS = ("count", "operation", "position", "value")

_UNKNOWN = "an unknown operation: its index", None

_numbers: dict[tuple[str, str | None], int] = {_UNKNOWN: 0}
_lock = process_lock()


def operation_id(operation: str, argument: str, bound: str | None) -> int:
    """Return the number under which kernels report a fault in `argument` of `operation`.

    `bound` says what was expected there, `below(64)` say; None where only the kernel knows.
    """
    with _lock:
        return _numbers.setdefault((f"{operation}: {argument}", bound), len(_numbers))


def below(count: int) -> str:
    """Return the bound of indices of `count` entries.

    >>> below(64)
    '0 to 63'
    """
    return f"0 to {count - 1}" if count else "none"


def starts(num_tokens: int) -> str:
    """Return the bound of `cu_query_lens`.

    >>> starts(8)
    '0 to 8, not decreasing'
    """
    return f"0 to {num_tokens}, not decreasing"


def recorded(record: np.ndarray[Any, Any]) -> IndexFault | None:
    """Return the error for a fault record in this processor's memory, or None if it is empty."""
    count, operation, position, value = (int(n) for n in record)
    if count == 0:
        return None
    with _lock:
        name, bound = dict(zip(_numbers.values(), _numbers, strict=True)).get(operation, _UNKNOWN)
    return IndexFault(
        f"{name}[{position}]: expected {bound or 'an index in range'}, got {value}; it was skipped"
        + (f", as were {count - 1} more accesses" if count > 1 else ""),
        bound,
    )
