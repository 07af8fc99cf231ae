"""Threads that help a call to work on many items, and counts of the calls in progress."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent import futures
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from ..waiting import Waiters

_POLL_S = 0.05  # interval of checks for calls that ended without leaving

_Item = TypeVar("_Item")


class Call:
    """A call in progress, returned by `Users.enter`."""


class Users:
    """Calls in progress, one per thread, `limit` in total; they leave, or their frame ends."""

    def __init__(self, limit: float = math.inf) -> None:
        self._limit = limit
        self._lock = threading.RLock()
        self._changed = Waiters(self._lock)
        self._calls: dict[threading.Thread, weakref.ref[Call]] = {}
        self._closed = False

    def enter(self, timeout_s: float = 0.0) -> Call | None:
        """Begin a call; return it for `leave`, or None if closed, or full until the timeout."""
        thread, call = threading.current_thread(), Call()
        with self._lock:  # the usual case, without a wait
            is_over = self._add(thread, call)
        if not is_over:
            self._wait_for(partial(self._add, thread, call), timeout_s)
        return call if self._is_in(thread, call) else None

    def leave(self, call: Call) -> None:
        thread = threading.current_thread()
        with self._lock:
            if self._is_in(thread, call):
                del self._calls[thread]
                self._changed.notify()

    def close(self) -> bool:
        """Refuse new calls, and wait for other threads' calls; False if this thread is in one."""
        with self._lock:
            self._closed = True
        caller = {threading.current_thread()}
        self._wait_for(lambda: self._in_progress() <= caller, math.inf)
        return not self._in_progress()

    def _add(self, thread: threading.Thread, call: Call) -> bool:
        if self._closed:
            return True
        if len(self._calls) >= self._limit and len(self._in_progress() - {thread}) >= self._limit:
            return False
        self._calls[thread] = weakref.ref(call)
        return True

    def _is_in(self, thread: threading.Thread, call: Call) -> bool:
        entry = self._calls.get(thread)
        return entry is not None and entry() is call

    def _in_progress(self) -> set[threading.Thread]:
        """Return the threads whose calls have not ended. The caller holds the lock."""
        return {thread for thread, call in self._calls.items() if call() is not None}

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait like `Waiters.wait_for`, and also notice calls that end without leaving."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if self._changed.wait_for(condition, min(left_s, _POLL_S)):
                return


class Helpers:
    """Up to `count` threads that share the work of calls, started on demand."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._executor = futures.ThreadPoolExecutor(count, name) if count else None

    def each(self, function: Callable[[_Item], None], items: Iterable[_Item], share: int) -> None:
        """Call a function with each item, also in `share` threads; an error skips the rest."""
        if share < 1 or self._executor is None:
            for item in items:
                function(item)
            return
        job = _Job(function, items)
        try:
            with suppress(RuntimeError):  # thread limit of the system: the caller does all the work
                for _ in range(share):
                    self._executor.submit(job.work)
            job.take()
        except BaseException:  # also of the function
            job.cancel()
            raise
        finally:
            job.wait()

    def close(self) -> None:
        """Stop the threads; no call may be in progress."""
        if self._executor is not None:
            self._executor.shutdown()


class _Job(Generic[_Item]):
    """Items that threads work on. A queued call may run much later, so only taken items count."""

    def __init__(self, function: Callable[[_Item], None], items: Iterable[_Item]) -> None:
        self._function, self._rest = function, deque(items)
        self._lock = threading.RLock()
        self._changed = Waiters(self._lock)
        self._num_working = 0
        self._error: BaseException | None = None

    def take(self) -> None:
        """Work on items until none are left."""
        while True:
            try:
                item = self._rest.popleft()
            except IndexError:
                return
            self._function(item)

    def cancel(self) -> None:
        """Drop the items that no thread has taken."""
        self._rest.clear()

    def work(self) -> None:
        """Work on items in another thread; `wait` raises errors."""
        with self._lock:
            self._num_working += 1
        try:
            self.take()
        except BaseException as error:
            self.cancel()
            self._error = self._error or error
        finally:
            with self._lock:
                self._num_working -= 1
                self._changed.notify()

    def wait(self) -> None:
        """Wait until no other thread works on an item, despite interrupts; then raise any error."""
        while self._num_working:
            try:
                self._changed.wait_for(lambda: not self._num_working)
            except BaseException as error:  # such as KeyboardInterrupt
                self._error = error
        failure, self._error = self._error, None
        if failure is not None:
            raise failure
