"""Waits that survive interrupts, for threads that share a lock.

A signal handler may raise between any two bytecodes of the main thread, as KeyboardInterrupt does.
`with` on a Lock is safe; `with` and `wait` of threading.Condition and Event run Python code, which
an exception can leave with the lock held, or released twice. `Waiters` and `Latch` replace them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

_Result = TypeVar("_Result")


class Waiters:
    """Threads that wait for changes of attributes that a lock guards.

    With an RLock, signal handlers that do not raise may call what they interrupt, except waits.
    An interrupted wait leaves nothing behind but an entry, until the next change.
    """

    def __init__(self, lock: threading.Lock | threading.RLock) -> None:
        self._lock = lock
        self._waiting: list[threading.Lock] = []  # held until the thread is to wake

    def notify(self) -> None:
        """Wake all waiting threads. The caller holds the lock until it has made the change.

        In the main thread, notify before the change, so that an interrupt between the two cannot
        lose a wake-up.
        """
        for each in self._waiting:
            if each.locked():  # else woken already, before an interrupt
                each.release()
        self._waiting.clear()

    def wait_for(self, condition: Callable[[], _Result], timeout_s: float | None = None) -> _Result:
        """Wait until `condition()` is true, or until the timeout; return its last result.

        The caller does not hold the lock, which is held during calls of `condition`.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                result = condition()
                seconds = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
                if result or seconds <= 0:
                    return result
                waiting = threading.Lock()
                waiting.acquire()
                self._waiting.append(waiting)
            if not waiting.acquire(timeout=seconds):
                with self._lock, suppress(ValueError):  # notified meanwhile
                    self._waiting.remove(waiting)


class Latch:
    """An event that stays set."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = Waiters(self._lock)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._lock:
            self._changed.notify()
            self._is_set = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the latch is set, or until the timeout; return whether it is set."""
        return self.is_set() or self._changed.wait_for(self.is_set, timeout_s)
