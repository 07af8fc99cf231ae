"""Simulated `time`, `threading`, `queue` and `concurrent.futures`."""

from __future__ import annotations

import queue as real_queue
import threading as real_threading
from collections import deque
from collections.abc import Callable
from typing import Any

from .scheduler import Task, World


class Time:
    """The module `time` of a world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        self._world.pause()
        return self._world.now

    perf_counter = time = monotonic

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)

    perf_counter_ns = time_ns = monotonic_ns

    def sleep(self, seconds: float) -> None:
        self._world.wait(lambda: False, self._world.now + max(0.0, seconds))


def threading_of(world: World) -> Any:
    """Make the module `threading` of a world."""

    class Lock:
        def __init__(self) -> None:
            self._owner: Task | None = None

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            world.pause()
            return self._take(blocking, timeout)

        def _take(self, blocking: bool, timeout: float) -> bool:
            if world.is_over or world.current is None:
                return True
            if self._owner is not None:
                if not blocking:
                    return False
                deadline = world.now + timeout if timeout >= 0 else float("inf")
                if not world.wait(lambda: self._owner is None, deadline):
                    return False
            self._owner = world.task
            return True

        def release(self) -> None:
            if world.is_over or world.current is None:
                return
            if self._owner is None:
                raise RuntimeError("release unlocked lock")
            self._owner = None

        def locked(self) -> bool:
            return self._owner is not None

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *exception: object) -> None:
            self.release()

    class RLock(Lock):
        def __init__(self) -> None:
            super().__init__()
            self._depth = 0

        def _take(self, blocking: bool, timeout: float) -> bool:
            if self._owner is not world.current and not super()._take(blocking, timeout):
                return False
            self._depth += 1
            return True

        def release(self) -> None:
            if world.is_over or world.current is None:
                return
            if self._owner is not world.current:
                raise RuntimeError("cannot release un-acquired lock")
            self._depth -= 1
            if not self._depth:
                self._owner = None

    class Thread:
        def __init__(
            self, group: None = None, target: Callable[..., object] | None = None,
            name: str | None = None, args: Any = (), kwargs: Any = None, *,
            daemon: bool | None = None,
        ) -> None:  # fmt: skip
            self._target, self._args, self._kwargs = target, args, kwargs or {}
            self.name, self.daemon = name or "thread", bool(daemon)
            self._task: Task | None = None

        def run(self) -> None:
            if self._target is not None:
                self._target(*self._args, **self._kwargs)

        def start(self) -> None:
            world.pause()
            self._task = world.start(world.task.process, self.run, self.name)
            self._task.is_daemon = self.daemon
            self._task.locals["thread"] = self

        def is_alive(self) -> bool:
            return self._task is not None and not self._task.is_over

        @property
        def ident(self) -> int | None:
            return None if self._task is None else self._task.ident

        def join(self, timeout: float | None = None) -> None:
            deadline = float("inf") if timeout is None else world.now + max(0.0, timeout)
            world.wait(lambda: self._task is None or self._task.is_over, deadline)

    def current_thread() -> Any:
        task = world.task
        if "thread" not in task.locals:
            task.locals["thread"] = thread = Thread(name=task.name)
            thread._task = task
        return task.locals["thread"]

    class Threading:
        TIMEOUT_MAX = real_threading.TIMEOUT_MAX

        def get_ident(self) -> int:
            return world.task.ident

    Threading.Lock, Threading.RLock, Threading.Thread = Lock, RLock, Thread  # type: ignore[attr-defined]
    Threading.current_thread = staticmethod(current_thread)  # type: ignore[attr-defined]
    return Threading()


def queue_of(world: World) -> Any:
    """Make the module `queue` of a world."""

    class SimpleQueue:
        def __init__(self) -> None:
            self._items: deque[Any] = deque()

        def put(self, item: Any) -> None:
            self._items.append(item)
            world.pause()

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            deadline = float("inf") if timeout is None else world.now + timeout
            if not self._items and block:
                world.wait(lambda: bool(self._items), deadline)
            try:
                return self._items.popleft()
            except IndexError:
                raise real_queue.Empty from None

        def get_nowait(self) -> Any:
            return self.get(block=False)

        def empty(self) -> bool:
            return not self._items

        def qsize(self) -> int:
            return len(self._items)

    class Queue:
        Empty = real_queue.Empty

    Queue.SimpleQueue = SimpleQueue  # type: ignore[attr-defined]
    return Queue()


def futures_of(world: World, threading: Any) -> Any:
    """Make the part of `concurrent.futures` that `cache.threads` uses."""

    class ThreadPoolExecutor:
        def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
            self._count, self._name = max_workers, thread_name_prefix
            self._jobs: deque[Callable[[], object]] = deque()
            self._num_working = 0

        def submit(self, function: Callable[..., object], *arguments: Any) -> None:
            self._jobs.append(lambda: function(*arguments))
            if self._num_working < self._count:
                self._num_working += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()

        def _work(self) -> None:
            while self._jobs:
                self._jobs.popleft()()
            self._num_working -= 1

        def shutdown(self, wait: bool = True) -> None:
            world.wait(lambda: not self._num_working)

    class Futures:
        pass

    Futures.ThreadPoolExecutor = ThreadPoolExecutor  # type: ignore[attr-defined]
    return Futures()
