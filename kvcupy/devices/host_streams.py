"""Streams of the host device.

A stream is a thread that works off a queue. `stream=None` is the calling thread itself
(`InlineStream`). A captured stream writes its work into a program instead of its queue; replaying
the graph puts that program back on queues.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from .. import observe
from ..config import config
from ..errors import CaptureError, DeviceError
from ..pickling import ProcessLocal
from .host_events import HostEvent, Marker, State, Task, surfaced, work
from .host_graphs import Capture, HostGraph

if TYPE_CHECKING:
    from .host import HostDevice
    from .protocol import Hook


class InlineStream(ProcessLocal):
    """The calling thread as a stream: whatever is put on it is done when the call returns."""

    inline = True
    priority = 0
    capturing = False
    retains_owners = True
    capture_id = None
    name = "calling thread"

    def __init__(self, device: HostDevice) -> None:
        self.device = device

    def wait(self, other: Any) -> None:
        """Block until `other`, an event or a stream, has passed."""
        event = _as_event(other, self.device)
        event.synchronize()
        observe.waited(self, event)

    def record(self, event: Any = None) -> HostEvent:
        """Record `event`, or a new one, which is done at once."""
        recorded = _own_event(event, self.device)
        recorded._captured = None
        recorded._marker = Marker()
        recorded._marker.finish(None)
        observe.recorded(recorded, self)
        return recorded

    def enqueue(self, function: Callable[[], object]) -> None:
        function()

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` now."""
        observe.issue(lambda: observe.Operation("call", self), lambda: self.enqueue(function))

    def synchronize(self) -> None:
        """Return: nothing is ever outstanding."""

    def done(self) -> bool:
        """Return True: nothing is ever outstanding."""
        return True

    def capture(self) -> AbstractContextManager[HostGraph]:
        raise CaptureError("stream: the calling thread cannot be captured; use device.stream()")

    def on_launch(self, before: Hook, after: Hook) -> None:
        raise CaptureError("stream: the calling thread is never captured")


class HostStream(ProcessLocal):
    """A FIFO worker thread. Made by `Device.stream`."""

    inline = False
    retains_owners = True  # its graphs hold what was captured
    capture_id = None
    _numbers = itertools.count(1)

    def __init__(self, device: HostDevice, priority: int = 0) -> None:
        self.device = device
        self.priority = priority
        self.name = f"stream {next(self._numbers)}"
        self._state = State()
        self._submitted = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._capture: Capture | None = None

    def __repr__(self) -> str:
        return f"<{self.name} of {self.device.name}>"

    @property
    def capturing(self) -> bool:
        return self._capture is not None

    def enqueue(self, function: Callable[[], object]) -> None:
        """Run `function` in order; after a failure nothing runs until it has surfaced."""
        if self._capture is not None:
            self._capture.add(self, "run", function)
            return

        def task(state: State, epoch: int) -> None:
            if state.failure_in(epoch) is None:
                try:
                    function()
                except BaseException as error:
                    state.fail(error, epoch)

        self._put(task)

    def call(self, function: Callable[[], object]) -> None:
        """Call a host function in the order of the stream.

        An exception in it surfaces as DeviceError at the next synchronisation.
        """
        observe.issue(lambda: observe.Operation("call", self), lambda: self.enqueue(function))

    def wait(self, other: Any) -> None:
        """Let later work here wait for an event, or for all that a stream holds so far.

        A failure before that point, unless it has surfaced, is one of this stream too.
        """
        event = _as_event(other, self.device)
        self._follow(event)
        observe.waited(self, event)

    def _follow(self, event: HostEvent) -> None:
        if event._captured is not None and event._captured.capture.open:
            event._captured.capture.join(self, event._captured)
        elif self._capture is not None:
            if event._marker is not None:
                raise CaptureError("a captured stream cannot wait for work outside the capture")
        elif (marker := event._marker) is not None and not _settled(marker):
            self._put(lambda state, epoch: _pass(marker, state, epoch))

    def record(self, event: Any = None) -> HostEvent:
        """Record `event`, or a new one, behind all that the stream holds so far."""
        recorded = _own_event(event, self.device)
        self._mark(recorded)
        observe.recorded(recorded, self)
        return recorded

    def _mark(self, event: HostEvent) -> HostEvent:
        if self._capture is not None:
            event._captured = self._capture.mark(self)
        else:
            event._captured = None
            event._marker = marker = Marker()
            self._put(lambda state, epoch: marker)
        return event

    def synchronize(self) -> None:
        """Wait for all work; DeviceError if any of it failed since the last synchronisation."""
        self._refuse_captured()
        if self._thread is threading.current_thread():
            raise DeviceError("a function on a stream cannot wait for that stream")
        state, target = self._state, self._submitted
        with state.changed:
            state.changed.wait_for(lambda: state.finished >= target)
            failure = state.failure_in(state.epoch)
            if state.finished == self._submitted:
                state.failure = None  # nobody is left to skip, and it may hold arrays
        if failure is not None:
            failure.surface()
        if config.raises_index_faults:
            self.device.raise_fault()

    def forgive(self) -> None:
        """Let what is queued from now on run, whatever failed before."""
        with self._state.changed:
            self._state.epoch += 1

    def done(self) -> bool:
        """Return whether all work is done; DeviceError if some of it failed."""
        self._refuse_captured()
        with self._state.changed:
            failure = self._state.failure_in(self._state.epoch)
            all_done = self._state.finished == self._submitted
        if failure is not None:
            raise surfaced(failure.error)
        return all_done

    @contextmanager
    def capture(self) -> Iterator[HostGraph]:
        """Record what is put on this stream, and on streams that wait for it, into a graph.

        Raises
        ------
        CaptureError : the stream is being captured already, or a forked stream was not joined
        """
        self._refuse_captured("a second capture")
        capture = Capture(self)
        graph = HostGraph(self.device, capture, HostStream)
        try:
            yield graph
            capture.require_joined()
        finally:
            capture.close()
        graph.finished = True

    def on_launch(self, before: Hook, after: Hook) -> None:
        """Let the graph that this stream is captured into call functions around each launch.

        Parameters
        ----------
        before, after : called with the stream that the graph is launched on

        Raises
        ------
        CaptureError : the stream is not being captured
        """
        if self._capture is None:
            raise CaptureError(f"{self.name} is not being captured: there is no graph to launch")
        self._capture.hooks.add(before, after)

    def _refuse_captured(self, what: str = "synchronising it") -> None:
        if self._capture is not None:
            raise CaptureError(f"{self.name} is being captured: {what} is illegal")

    def _put(self, task: Task) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=work, args=(self._state, self.priority), name=self.name, daemon=True
                )
                self._thread.start()
                weakref.finalize(self, self._state.queue.put, None)
            self._submitted += 1
            self._state.queue.put((self._state.epoch, task))


def _settled(marker: Marker) -> bool:
    """Return whether waiting for a marker has no effect: it is passed, its failure surfaced."""
    failure = marker.failure
    return marker.passed.is_set() and (failure is None or failure.surfaced)


def _pass(marker: Marker, state: State, epoch: int) -> None:
    marker.passed.wait()
    if marker.failure is not None and state.failure_in(epoch) is None:
        state.fail(marker.failure.error, epoch)


def _own_event(event: Any, device: HostDevice) -> HostEvent:
    if event is None:
        return HostEvent()
    if not isinstance(event, HostEvent):
        raise TypeError(f"event: expected an event of {device.name}, got {event!r}")
    return event


def _as_event(other: Any, device: HostDevice) -> HostEvent:
    if isinstance(other, HostEvent):
        return other
    if isinstance(other, (HostStream, InlineStream)):
        return other.record()
    raise TypeError(f"expected an event or stream of {device.name}, got {other!r}")
