"""Memory in flight: owners held until a stream has passed the point where they were last used.

CuPy's pool hands a freed block to the next allocation on the stream where it was allocated, at
once, whatever other streams still do with it. So an operation on any other stream leaves its arrays
here, behind an event, and they are let go when the event has passed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class EventPool:
    """Event handles for reuse. A handle that is given back may be recorded again by anyone.

    That is safe as soon as nobody holds it: a stream that was told to wait for an event waits for
    what was recorded then, not for what is recorded later.
    """

    def __init__(self, create: Callable[[bool], int]) -> None:
        self._create = create
        self._free: dict[bool, list[int]] = {False: [], True: []}

    def take(self, timing: bool = False) -> int:
        """Return a handle that nobody else holds."""
        try:
            return self._free[timing].pop()
        except IndexError:
            return self._create(timing)

    def give(self, handle: int, timing: bool = False) -> None:
        """Take a handle back."""
        self._free[timing].append(handle)


class RetireList:
    """Owners in flight, first in first out a stream.

    Parameters
    ----------
    pool : of timing-free events
    record : `record(event, stream)`, given two handles
    passed : whether an event has passed
    asking : makes the context in which events are asked for, and what has passed is let go of
    """

    def __init__(
        self,
        pool: EventPool,
        record: Callable[[int, int], object],
        passed: Callable[[int], bool],
        asking: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._pool = pool
        self._record = record
        self._passed = passed
        self._asking = asking
        self._queues: dict[int, deque[tuple[int, object]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def hold(self, stream: int, owners: object) -> None:
        """Keep `owners` until `stream` has passed all that it holds now."""
        event = self._pool.take()
        try:
            self._record(event, stream)
        except BaseException:
            self._pool.give(event)
            raise
        with self._lock:
            self._queues.setdefault(stream, deque()).append((event, owners))
        self.reap((stream,))

    def reap(self, streams: Iterable[int] | None = None) -> None:
        """Let go of what has passed, on the given streams or on all. Never waits."""
        if not self._queues:
            return
        with self._asking():
            released: list[object] = []  # freed after the lock: freeing runs other people's code
            if not self._lock.acquire(blocking=False):
                return  # another thread is reaping
            try:
                for stream in list(self._queues) if streams is None else streams:
                    queue = self._queues.get(stream)
                    while queue and self._passed(queue[0][0]):
                        event, owners = queue.popleft()
                        self._pool.give(event)
                        released.append(owners)
                        del owners
                    if queue is not None and not queue:
                        del self._queues[stream]
            finally:
                self._lock.release()
            del released
