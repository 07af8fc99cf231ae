"""Statuses of CUDA, as the runtime and the driver number them alike, and the error that has one."""

from __future__ import annotations

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NO_CONTEXT = 201
INVALID_HANDLE = 400
NOT_READY = 600
ILLEGAL = 700
MISALIGNED = 716
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
UNSUPPORTED = 900
INVALIDATED = 901
MERGE = 902
UNMATCHED = 903
UNJOINED = 904
ISOLATION = 905
IMPLICIT = 906
CAPTURED_EVENT = 907
WRONG_THREAD = 908


class CudaError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"cudaError {status}")
        self.status = status


class OutOfMemoryError(MemoryError):
    """CuPy's own, which is no CUDA error: what its memory pool raises."""

    def __init__(self, size, total, limit=0):
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,}).")


class Deadlock(AssertionError):
    """Two threads would wait for one another for ever: the interpreter's lock and the driver's."""
