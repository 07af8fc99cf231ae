"""Threads that help a call to work on many items, such as blocks to copy."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent import futures
from contextlib import suppress
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Helpers:
    """Threads that share the work of a call with the calling thread, started on demand.

    Parameters
    ----------
    count : maximum number of threads, for all callers together
    name : prefix of their names
    """

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._executor = futures.ThreadPoolExecutor(count, name) if count else None

    def each(self, function: Callable[[_Item], None], items: Iterable[_Item], share: int) -> None:
        """Call a function with each item, in this thread and `share` others.

        Returns when all calls have ended. If a call raises, items that no thread has taken are
        skipped, and the exception propagates.
        """
        if share < 1 or self._executor is None:
            for item in items:
                function(item)
            return
        job = _Job(function, items)
        with suppress(RuntimeError):  # thread limit of the system: the caller does all the work
            for _ in range(share):
                self._executor.submit(job.work)
        job.work()
        job.wait()

    def close(self) -> None:
        """Stop the threads; no call may be in progress."""
        if self._executor is not None:
            self._executor.shutdown()


class _Job(Generic[_Item]):
    """Items that several threads work on.

    An executor that could not start a thread keeps the call queued, and may run it much later.
    Completion therefore depends on the items taken, not on the calls submitted.
    """

    def __init__(self, function: Callable[[_Item], None], items: Iterable[_Item]) -> None:
        self._function, self._rest = function, deque(items)
        self._changed = threading.Condition()
        self._num_working = 0
        self._error: BaseException | None = None

    def work(self) -> None:
        """Work on items until none are left; `wait` raises errors."""
        with self._changed:
            self._num_working += 1
        try:
            while True:
                try:
                    item = self._rest.popleft()
                except IndexError:
                    return
                self._function(item)
        except BaseException as error:
            self._rest.clear()
            self._error = self._error or error
        finally:
            with self._changed:
                self._num_working -= 1
                self._changed.notify_all()

    def wait(self) -> None:
        """Wait until no thread works on an item, despite interrupts; then raise any error."""
        while self._num_working:
            try:
                with self._changed:
                    self._changed.wait_for(lambda: not self._num_working)
            except BaseException as error:  # such as KeyboardInterrupt
                self._error = error
        failure, self._error = self._error, None
        if failure is not None:
            raise failure
