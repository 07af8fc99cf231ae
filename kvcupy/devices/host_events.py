"""Events of the host device, and what a stream shares with the thread that works it off."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ..errors import CaptureError, DeviceError
from ..pickling import ProcessLocal

if TYPE_CHECKING:
    from .host_graphs import Point

# Takes the state and the epoch that it was queued in; returns the marker that it passes.
Task = Callable[["State", int], "Marker | None"]


class Failure:
    """What went wrong in a stream. All that was queued before it surfaced is skipped."""

    def __init__(self, error: BaseException, state: State, epoch: int) -> None:
        self.error = error
        self.state = state
        self.epoch = epoch

    @property
    def surfaced(self) -> bool:
        return self.state.epoch > self.epoch

    def surface(self) -> None:
        """Raise DeviceError, the first time: what is queued from now on runs again."""
        with self.state.changed:
            if self.surfaced:
                return
            self.state.epoch = self.epoch + 1
        raise surfaced(self.error)


class Marker:
    """One passing of a point in a stream: done or not, when, and after which failure."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.time_ns = 0
        self.failure: Failure | None = None

    def finish(self, failure: Failure | None) -> None:
        self.time_ns = time.perf_counter_ns()
        self.failure = failure
        self.passed.set()


class HostEvent(ProcessLocal):
    """A point in a host stream; recording it again moves it."""

    def __init__(self, timing: bool = False) -> None:
        self.timing = timing
        self._marker: Marker | None = None
        self._captured: Point | None = None

    def done(self) -> bool:
        """Return whether the stream has passed the point (True if it was never recorded)."""
        self._refuse_captured()
        return self._marker is None or self._marker.passed.is_set()

    def synchronize(self) -> None:
        """Wait until the stream has passed the point; DeviceError if its work failed before."""
        self._refuse_captured()
        if self._marker is not None:
            self._marker.passed.wait()
            if self._marker.failure is not None:
                self._marker.failure.surface()

    def error(self) -> BaseException | None:
        """Return what work before the point failed with, even where that has surfaced already.

        Work behind a failure is skipped, so whoever waits for it must be able to tell.

        Returns
        -------
        None while the stream has not passed the point, and where nothing failed; never waits
        """
        marker = self._marker
        if self._captured is not None or marker is None or not marker.passed.is_set():
            return None
        return None if marker.failure is None else marker.failure.error

    def elapsed_us(self, since: Any) -> float:
        """Return the microseconds from `since` to this event, waiting for both.

        Raises
        ------
        ValueError : one of them has no timing, or was never recorded
        """
        for name, event in (("event", self), ("since", since)):
            if not isinstance(event, HostEvent) or not event.timing or event._marker is None:
                raise ValueError(f"{name}: expected a recorded event made with timing=True")
            event.synchronize()
        assert self._marker is not None
        return float(self._marker.time_ns - since._marker.time_ns) / 1000

    def _refuse_captured(self) -> None:
        if self._captured is not None and self._captured.capture.open:
            raise CaptureError("an event recorded in a capture cannot be waited for by the host")


def surfaced(error: BaseException) -> DeviceError:
    """Return the error that a synchronisation raises for a failure of a stream's work."""
    raised = DeviceError(f"work on a host stream failed: {error!r}")
    raised.__cause__ = error
    return raised


class State:
    """What a stream shares with its worker thread.

    `epoch` counts the failures that have surfaced. Work carries the epoch that it was queued in,
    and is skipped after a failure of that same epoch.
    """

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[int, Task] | None] = SimpleQueue()
        self.failure: Failure | None = None
        self.epoch = 0
        self.finished = 0
        self.changed = threading.Condition()

    def failure_in(self, epoch: int) -> Failure | None:
        """Return the failure after which work of `epoch` must not run."""
        failure = self.failure
        return failure if failure is not None and failure.epoch == epoch else None

    def fail(self, error: BaseException, epoch: int) -> None:
        self.failure = Failure(error, self, epoch)


def work(state: State, priority: int) -> None:
    """Work off the queue of a stream until it holds None: the body of its thread."""
    if priority:  # 0 would undo what the thread has from its process
        with suppress(OSError, AttributeError):  # a wish: raising it takes a privilege
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), priority)
    while (queued := state.queue.get()) is not None:
        epoch, task = queued
        marker = task(state, epoch)
        del queued, task  # and with them the arrays that the task kept alive
        with state.changed:
            state.finished += 1
            if marker is not None:
                marker.finish(state.failure_in(epoch))
            state.changed.notify_all()
