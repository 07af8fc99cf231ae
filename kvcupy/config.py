"""Settings of the process: where a kernel cannot be compiled, and how strict the host device is."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from copy import copy
from typing import Literal

from .checks import flag
from .errors import CompileError, KvcupyError, Unpicklable, process_lock

# docs/running.md says what is logged where.
logger = logging.getLogger("kvcupy")
calls_logger, compile_logger, cache_logger = map(logger.getChild, ("calls", "compile", "cache"))

# Bytes of shared memory per block, by architecture; the other limits of a launch are the same for
# all of them (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"). For
# what is compiled or emulated without a GPU: a GPU is asked for its own (`Device.shared_bytes`).
SHARED_BYTES = {
    "sm_75": 64 << 10, "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_87": 163 << 10,
    "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_103": 227 << 10,
    "sm_110": 227 << 10, "sm_120": 99 << 10, "sm_121": 99 << 10,
}  # fmt: skip


def shared_bytes(arch: str) -> int:
    """Return the bytes of shared memory per block; of an unknown architecture, the least.

    >>> shared_bytes("sm_90"), shared_bytes("sm_999")
    (232448, 101376)
    """
    return SHARED_BYTES.get(arch, SHARED_BYTES["sm_86"])


class Config(Unpicklable):
    """The settings object `kvcupy.config`.

    Attributes
    ----------
    fallback : what an operation does on the host device where its kernel cannot be compiled or
        loaded: "warn" runs its reference in NumPy, slowly, and logs the cause once, "error" raises
        `CompileError`. On a GPU it raises
    strict : whether the host device refuses what goes wrong on a GPU, as `DeviceError` that names
        kernel, block, thread and address: misaligned accesses; shuffles, votes, matrix products and
        warp barriers whose lanes have exited or never arrive; barriers that not all threads reach;
        reads of uninitialised shared memory, and races in it; asynchronous copies that were not
        waited for; launches past the kernel's launch bounds or the limits of `strict_arch`. Threads
        and blocks then run in a random order for each launch. Kernels run several times slower. The
        end of a step of a `PagedKVCache` logs which layers did not attend, if others did.
        False, unless the environment has KVCUPY_STRICT=1
    strict_index_faults : when an index past the end is raised in strict mode: "raise", at the call,
        whose other rows are written, or at the next synchronisation of its stream; "record", by
        `check_faults`, as otherwise
    strict_arch : the architecture whose limits hold in strict mode: by default "sm_86", which has
        the least shared memory of those that every kernel runs on
    strict_seed : of the orders of threads and blocks; by default random. Setting it starts the
        sequence of orders again
    verify : "first_use" checks each kernel that has a plainer one against its reference before its
        first use with a GPU model and driver version, see `kvcupy.verify`, and attention of other
        libraries, see `PagedKVCache`; "never" does not. Kernels of the host device are not checked
    batch_invariant : whether `paged_attention` computes each sequence as if it were alone, unless a
        call says otherwise; see there
    nvtx : whether each operation is issued within an NVTX range "kvcupy.NAME", by CuPy's bindings,
        for profilers. False, unless the environment has KVCUPY_NVTX=1

    Raises
    ------
    TypeError, ValueError : a setting does not take the value
    AttributeError : there is no such setting
    """

    __slots__ = (
        "_batch_invariant", "_fallback", "_launches", "_lock", "_nvtx", "_nvtx_listener",
        "_strict", "_strict_arch", "_strict_index_faults", "_strict_seed", "_verify", "_warned",
    )  # fmt: skip

    def __init__(self) -> None:
        self._fallback: Literal["warn", "error"] = "warn"
        self._strict = os.environ.get("KVCUPY_STRICT", "") not in ("", "0")
        self._strict_index_faults: Literal["raise", "record"] = "raise"
        self._strict_arch = "sm_86"
        self._strict_seed = secrets.randbits(32)
        self._launches = itertools.count(1)
        self._verify: Literal["first_use", "never"] = "first_use"
        self._batch_invariant = False
        self._nvtx = os.environ.get("KVCUPY_NVTX", "") not in ("", "0")
        self._nvtx_listener: Callable[[bool], None] = lambda shown: None
        self._warned: set[str] = set()
        self._lock = process_lock()

    def __repr__(self) -> str:
        settings = (n for n, p in vars(type(self)).items() if isinstance(p, property) and p.fset)
        return f"<kvcupy.config {', '.join(f'{n}={getattr(self, n)!r}' for n in settings)}>"

    @property
    def fallback(self) -> Literal["warn", "error"]:
        return self._fallback

    @fallback.setter
    def fallback(self, value: Literal["warn", "error"]) -> None:
        if not isinstance(value, str) or value not in ("warn", "error"):
            raise ValueError(f'fallback: expected "warn" or "error", got {value!r}')
        self._fallback = value

    @property
    def strict(self) -> bool:
        return self._strict

    @strict.setter
    def strict(self, value: bool) -> None:
        self._strict = flag(value, "strict")

    @property
    def strict_index_faults(self) -> Literal["raise", "record"]:
        return self._strict_index_faults

    @strict_index_faults.setter
    def strict_index_faults(self, value: Literal["raise", "record"]) -> None:
        if not isinstance(value, str) or value not in ("raise", "record"):
            raise ValueError(f'strict_index_faults: expected "raise" or "record", got {value!r}')
        self._strict_index_faults = value

    @property
    def raises_index_faults(self) -> bool:
        """Whether an index past the end is raised without `check_faults`."""
        return self._strict and self._strict_index_faults == "raise"

    @property
    def strict_arch(self) -> str:
        return self._strict_arch

    @strict_arch.setter
    def strict_arch(self, value: str) -> None:
        if not isinstance(value, str) or value not in SHARED_BYTES:
            raise ValueError(
                f"strict_arch: expected one of {', '.join(SHARED_BYTES)}, got {value!r}"
            )
        self._strict_arch = value

    @property
    def strict_seed(self) -> int:
        return self._strict_seed

    @strict_seed.setter
    def strict_seed(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"strict_seed: expected a number from 0 on, got {value!r}")
        self._strict_seed = value
        self._launches = itertools.count(1)

    @property
    def verify(self) -> Literal["first_use", "never"]:
        return self._verify

    @verify.setter
    def verify(self, value: Literal["first_use", "never"]) -> None:
        if not isinstance(value, str) or value not in ("first_use", "never"):
            raise ValueError(f'verify: expected "first_use" or "never", got {value!r}')
        self._verify = value

    @property
    def batch_invariant(self) -> bool:
        return self._batch_invariant

    @batch_invariant.setter
    def batch_invariant(self, value: bool) -> None:
        self._batch_invariant = flag(value, "batch_invariant")

    @property
    def nvtx(self) -> bool:
        return self._nvtx

    @nvtx.setter
    def nvtx(self, value: bool) -> None:
        self._nvtx = flag(value, "nvtx")
        self._nvtx_listener(value)

    def notify_nvtx(self, listener: Callable[[bool], None]) -> None:
        """Let `nvtx` take effect by a function, which is called now and when it is set."""
        self._nvtx_listener = listener
        listener(self._nvtx)

    def launch_seed(self) -> int:
        """Return the seed of the next strict launch's order of threads and blocks."""
        number = next(self._launches)
        digest = hashlib.blake2b(f"{self._strict_seed} {number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") or 1

    def fall_back(self, operation: str, cause: KvcupyError) -> None:
        """Raise `cause`, or log it once per operation and reason, as `fallback` says."""
        if self._fallback == "error" or not isinstance(cause, CompileError):
            raise copy(cause)  # a copy: a traceback keeps the frames, so the arrays, of its call
        # A transient cause may be worded differently each time, with names of temporary files.
        reason = "transient" if cause.transient else str(cause).splitlines()[0]
        if self._is_new(f"{operation}: {reason}"):
            # A copy, for a handler may keep it.
            logger.warning("%s runs in NumPy, slowly, because %s", operation, copy(cause))

    def warn_once(self, message: str) -> None:
        """Log a warning once per message."""
        if self._is_new(message):
            logger.warning("%s", message)

    def _is_new(self, warning: str) -> bool:
        with self._lock:
            if warning in self._warned:
                return False
            self._warned.add(warning)
            return True


class BoundedLog:
    """Logs a message at most once in `interval_s`; the next one has the number of those between."""

    def __init__(self, logger: logging.Logger, interval_s: float = 10.0) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._lock = process_lock()
        self._next_at: dict[str, float] = {}
        self._num_suppressed: Counter[str] = Counter()

    def warning(self, message: str, *arguments: object) -> None:
        """Log a warning with %-style arguments, or count it."""
        self.log(logging.WARNING, message, *arguments)

    def log(self, level: int, message: str, *arguments: object) -> None:
        """Log a message with %-style arguments, or count it."""
        now = time.monotonic()
        with self._lock:
            if now < self._next_at.get(message, -math.inf):
                self._num_suppressed[message] += 1
                return
            self._next_at[message] = now + self._interval_s
            count = self._num_suppressed.pop(message, 0)
        more = f" (and {count} more before)" if count else ""
        self._logger.log(level, message + more, *arguments)


config = Config()
