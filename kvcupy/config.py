"""Settings of the process. There is one: what to do where a kernel cannot be compiled."""

from __future__ import annotations

import logging
import threading
from copy import copy

from .errors import CompileError, KvcupyError

logger = logging.getLogger("kvcupy")


class Config:
    """The settings object `kvcupy.config`.

    `fallback` decides what an operation does where its kernel cannot be compiled or loaded:
    "warn" runs it as array expressions and logs the cause once, "error" raises `CompileError`.
    """

    def __init__(self) -> None:
        self._fallback = "warn"
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(f"kvcupy.config has no setting {name!r}")
        super().__setattr__(name, value)

    @property
    def fallback(self) -> str:
        return self._fallback

    @fallback.setter
    def fallback(self, value: str) -> None:
        if value not in ("warn", "error"):
            raise ValueError(f'fallback: expected "warn" or "error", got {value!r}')
        self._fallback = value

    def fall_back(self, operation: str, cause: KvcupyError) -> None:
        """Raise `cause`, or log it once an operation and reason, as `fallback` says."""
        if self._fallback == "error" or not isinstance(cause, CompileError):
            raise copy(cause)  # whose traceback keeps no frame of another call
        reason = f"{operation}: {str(cause).splitlines()[0]}"
        with self._lock:
            if reason in self._warned:
                return
            self._warned.add(reason)
        # A copy: a handler may keep it, and a traceback keeps the arrays of the call.
        logger.warning("%s runs as array expressions, slowly, because %s", operation, copy(cause))


config = Config()
