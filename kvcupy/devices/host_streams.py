"""Streams of the host device, their events and graphs.

A stream is a thread that works off a queue. `stream=None` is the calling thread itself
(`InlineStream`). A captured stream writes its work into a program instead of its queue; replaying
the graph puts that program on queues again.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from .. import faults, observe
from ..config import config
from ..errors import (
    CaptureError,
    DeviceError,
    ProcessLocal,
    Unpicklable,
    device_failure,
    finalize,
    process_lock,
)
from ..waiting import Latch, Waiters
from .protocol import Device, Hook, LaunchHooks

Task = Callable[["State", int], "Marker | None"]
"""Takes the state and the epoch that it was queued in; returns the marker that it passes."""


class HostContext:
    """What the parts of the host device share: `device`, made of them, and its fault record."""

    name = "host"

    def __init__(self, device: Device) -> None:
        self.device = device
        self.faults = np.zeros(4, np.int64)
        self.dropped: set[State] = set()  # of streams, while they work
        self._lock = process_lock()

    def new_stream(self) -> HostStream:
        """Return a stream for the work of a graph."""
        return HostStream(self)

    def raise_fault(self) -> None:
        """Raise the first index fault on record, if there is one, and clear the record."""
        with self._lock:
            fault = faults.recorded(self.faults)
            self.faults.fill(0)
        if fault is not None:
            raise fault


class InlineStream(Unpicklable):
    """The calling thread as a stream: its work is done when the call returns."""

    inline = True
    priority = 0
    capturing = False
    retains_owners = True
    capture_id = None
    identity = None
    name = "calling thread"

    def __init__(self, context: HostContext) -> None:
        self.context = context
        self.device = context.device

    def wait(self, other: Any) -> None:
        """Block until `other`, an event or a stream, has passed."""
        event = _as_event(other)
        event.synchronize()
        observe.waited(self, event)

    def record(self, event: Any = None) -> HostEvent:
        """Record `event`, or a new one, which is done at once."""
        recorded = _own_event(event)
        recorded._captured = None
        recorded._marker = Marker()
        recorded._marker.finish(None)
        observe.recorded(recorded, self)
        return recorded

    def enqueue(self, function: Callable[[], object]) -> None:
        function()

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` now."""
        observe.call(self, function, self.enqueue)

    def synchronize(self) -> None:
        """Return at once: nothing is ever outstanding."""

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

    def __init__(self, context: HostContext, priority: int = 0) -> None:
        self.context = context
        self.device = context.device
        self.priority = priority
        number = next(self._numbers)
        self.name = f"stream {number}"
        self.identity = ("host", number)
        self._state = State(context.dropped)
        self._submitted = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._capture: Capture | None = None
        self._make_marker: Callable[[], Marker] = Marker

    def __repr__(self) -> str:
        return f"<{self.name} of {self.context.name}>"

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
        observe.call(self, function, self.enqueue)

    def wait(self, other: Any) -> None:
        """Let later work here wait for an event, or for all that a stream holds so far.

        A failure before that point, unless it has surfaced, is one of this stream too.
        """
        event = _as_event(other)
        self._follow(event)
        observe.waited(self, event)

    def _follow(self, event: HostEvent) -> None:
        if event._captured is not None and event._captured.capture.open:
            event._captured.capture.join(self, event._captured)
        elif self._capture is not None:
            if event._marker is not None:
                raise CaptureError("a captured stream cannot wait for work outside the capture")
        elif (marker := event._marker) is not None and not _settled(marker):
            self._put(lambda state, epoch: _pass(marker, state, epoch), marker)

    def record(self, event: Any = None) -> HostEvent:
        """Record `event`, or a new one, after all that the stream holds so far."""
        recorded = _own_event(event)
        self._mark(recorded)
        observe.recorded(recorded, self)
        return recorded

    def _mark(self, event: HostEvent) -> HostEvent:
        if self._capture is not None:
            event._captured = self._capture.mark(self)
        else:
            event._captured = None
            event._marker = marker = self._make_marker()
            self._put(lambda state, epoch: marker)
        return event

    def synchronize(self) -> None:
        """Wait for all work; DeviceError if any of it failed since the last synchronisation."""
        self._refuse_captured()
        state, target = self._state, self._submitted
        if state.thread is threading.current_thread():
            raise DeviceError("a function on a stream cannot wait for that stream")
        if state.finished < target:
            state.changed.wait_for(lambda: state.finished >= target)
        with state.lock:
            failure = state.failure_in(state.epoch)
            if state.finished == self._submitted:
                state.failure = None  # no work is left to skip, and it may hold arrays
        if observe.order_observers:
            observe.synchronized(self)
        if failure is not None:
            failure.surface()
        if config.raises_index_faults:
            self.context.raise_fault()

    def forgive(self) -> None:
        """Let work that is queued from now on run, including after a failure."""
        with self._state.lock:
            self._state.epoch += 1

    def done(self) -> bool:
        """Return whether all work is done; DeviceError if some of it failed."""
        self._refuse_captured()
        with self._state.lock:
            failure = self._state.failure_in(self._state.epoch)
            all_done = self._state.finished == self._submitted
        if failure is not None:
            raise stream_failure(failure.error)
        if all_done and observe.order_observers:
            observe.synchronized(self)
        return all_done

    @contextmanager
    def capture(self) -> Iterator[HostGraph]:
        """Record what is put on this stream, and on streams that wait for it, into a graph."""
        self._refuse_captured("a second capture")
        capture = Capture(self)
        graph = HostGraph(self.context, capture)
        observe.capture_began(graph, self)
        try:
            yield graph
            capture.require_joined()
        finally:
            capture.close()
            observe.capture_ended(graph)
        graph.finished = True

    def on_launch(self, before: Hook, after: Hook) -> None:
        """Let the graph of the capture call functions around each launch (`protocol.Stream`)."""
        if self._capture is None:
            raise CaptureError(f"{self.name} is not being captured: there is no graph to launch")
        self._capture.hooks.add(before, after)

    def _refuse_captured(self, what: str = "synchronising it") -> None:
        if self._capture is not None:
            raise CaptureError(f"{self.name} is being captured: {what} is illegal")

    def _put(self, task: Task, awaits: Marker | None = None) -> None:
        """Queue a task, which waits by itself for the marker that it `awaits`."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(
                    target=work, args=(self._state, self.priority), name=self.name, daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    raise DeviceError(f"{self.name}: no thread for its work: {error}") from error
                self._thread = thread
                finalize(self, _drop, self._state)
            self._submitted += 1
            self._state.queue.put((self._state.epoch, task))


def _drop(state: State) -> None:
    """Let the thread of a stream that nobody holds end, after what is queued."""
    state.dropped.add(state)
    state.queue.put(None)


def _settled(marker: Marker) -> bool:
    """Return whether waiting for a marker has no effect: passed, and its failure surfaced."""
    if not marker.time_ns:
        return False
    return marker.failure is None or marker.failure.surfaced


def _pass(marker: Marker, state: State, epoch: int) -> None:
    marker.passed.wait()
    if marker.failure is not None and state.failure_in(epoch) is None:
        state.fail(marker.failure.error, epoch)


def _own_event(event: Any) -> HostEvent:
    if event is None:
        return HostEvent()
    if not isinstance(event, HostEvent):
        raise TypeError(f"event: expected an event of {HostContext.name}, got {event!r}")
    return event


def _as_event(other: Any) -> HostEvent:
    if isinstance(other, HostEvent):
        return other
    if isinstance(other, (HostStream, InlineStream)):
        return other.record()
    raise TypeError(f"other: expected an event or stream of {HostContext.name}, got {other!r}")


# --- Events, and the threads of streams -------------------------------------------------------


@dataclass(eq=False)
class Failure:
    """A failure in a stream. All work that was queued before it surfaced is skipped."""

    error: BaseException
    state: State
    epoch: int

    @property
    def surfaced(self) -> bool:
        return self.state.epoch > self.epoch

    def surface(self) -> None:
        """Raise DeviceError, the first time: what is queued from now on runs again."""
        with self.state.lock:
            if self.surfaced:
                return
            self.state.epoch = self.epoch + 1
        raise stream_failure(self.error)


class Marker:
    """One passing of a point in a stream: whether and when it passed, and after which failure.

    The host asks and waits by `passed`, where the simulated scheduler lets streams run; a stream
    asks by `time_ns`, 0 until all the rest is known.
    """

    def __init__(self) -> None:
        self.passed = Latch()
        self.time_ns = 0
        self.failure: Failure | None = None

    def finish(self, failure: Failure | None) -> None:
        self.failure = failure
        self.time_ns = time.perf_counter_ns()
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
        if self._marker is None:
            return True
        passed = self._marker.passed.is_set()
        if passed and observe.order_observers:
            observe.synchronized(self)
        return passed

    def synchronize(self) -> None:
        """Wait until the stream has passed the point; DeviceError if its work failed before."""
        self._refuse_captured()
        if self._marker is not None:
            self._marker.passed.wait()
            if observe.order_observers:
                observe.synchronized(self)
            if self._marker.failure is not None:
                self._marker.failure.surface()

    def error(self) -> BaseException | None:
        """Return the failure of work before the point, even where that has surfaced already.

        Work after a failure is skipped, which waiters must be able to find out.
        """
        marker = self._marker
        if self._captured is not None or marker is None or not marker.passed.is_set():
            return None
        return None if marker.failure is None else marker.failure.error

    def elapsed_us(self, since: Any) -> float:
        """Return the microseconds from `since` to this event, waiting for both."""
        for name, event in (("event", self), ("since", since)):
            if not isinstance(event, HostEvent) or not event.timing or event._marker is None:
                raise ValueError(f"{name}: expected a recorded event made with timing=True")
            event.synchronize()
        assert self._marker is not None
        return float(self._marker.time_ns - since._marker.time_ns) / 1000

    def _refuse_captured(self) -> None:
        if self._captured is not None and self._captured.capture.open:
            raise CaptureError("an event recorded in a capture cannot be waited for by the host")


def stream_failure(error: BaseException) -> DeviceError:
    """Return the error that a synchronisation raises for a failure of a stream's work."""
    return device_failure(f"work on a host stream failed: {error!r}", error)


class State:
    """The state that a stream shares with its worker thread.

    `epoch` counts the failures that have surfaced. Work carries the epoch that it was queued in,
    and is skipped after a failure of that same epoch. `dropped` has the states of all streams that
    nobody holds and that still work.
    """

    def __init__(self, dropped: set[State]) -> None:
        self.dropped = dropped
        self.queue: SimpleQueue[tuple[int, Task] | None] = SimpleQueue()
        self.failure: Failure | None = None
        self.epoch = 0
        self.finished = 0
        self.lock = threading.RLock()
        self.changed = Waiters(self.lock)
        self.thread: threading.Thread | None = None
        self.ended = Latch()

    def failure_in(self, epoch: int) -> Failure | None:
        """Return the failure after which work of `epoch` must not run."""
        failure = self.failure
        return failure if failure is not None and failure.epoch == epoch else None

    def fail(self, error: BaseException, epoch: int) -> None:
        self.failure = Failure(error, self, epoch)

    def drain(self) -> None:
        """Wait until the thread of a dropped stream has ended."""
        if self.thread is threading.current_thread():
            raise DeviceError("a function on a stream cannot wait for that stream")
        self.queue.put(None)  # again: an interrupt may have kept `_drop` from it
        self.ended.wait()


def work(state: State, priority: int) -> None:
    """Run the tasks of a stream's queue until it holds None: the body of its thread."""
    if priority:  # 0 would override what the thread inherits
        with suppress(OSError, AttributeError):  # best effort: raising it needs CAP_SYS_NICE
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), priority)
    with state.lock:
        if state.thread is not None:  # an interrupt kept `_put` from noting it
            return
        state.thread = threading.current_thread()
    while (queued := state.queue.get()) is not None:
        epoch, task = queued
        marker = task(state, epoch)
        del queued, task  # and with them the arrays that the task keeps alive
        with state.lock:
            state.finished += 1
            if marker is not None:
                marker.finish(state.failure_in(epoch))
            state.changed.notify()
    state.ended.set()
    state.dropped.discard(state)


# --- Captures and graphs --------------------------------------------------------------------------


@dataclass(eq=False)
class Point:
    """An event recorded inside a capture: its node, and what happened before it."""

    capture: Capture
    node: int
    seen: dict[HostStream, int]


class Capture:
    """A capture in progress: the program so far, and what each stream has waited for.

    A lane is one of its streams, by number: each launch puts it on another stream.
    """

    def __init__(self, origin: HostStream) -> None:
        self.origin = origin
        self.open = True
        self.hooks = LaunchHooks()
        self.program: list[tuple[int, str, Any]] = []  # lane, kind, function or node
        self.lanes: dict[HostStream, int] = {}
        self.counts: dict[HostStream, int] = {}  # actions of each lane so far
        self.seen: dict[HostStream, dict[HostStream, int]] = {}  # of others, known to be done
        self._enter(origin)

    def _enter(self, stream: HostStream) -> None:
        self.lanes[stream] = len(self.lanes)
        self.counts[stream] = 0
        self.seen[stream] = {}
        stream._capture = self

    def add(self, stream: HostStream, kind: str, payload: Any) -> None:
        self.counts[stream] += 1
        self.seen[stream][stream] = self.counts[stream]
        self.program.append((self.lanes[stream], kind, payload))

    def mark(self, stream: HostStream) -> Point:
        point = Point(self, len(self.program), dict(self.seen[stream]))
        self.program.append((self.lanes[stream], "record", point.node))
        return point

    def join(self, stream: HostStream, point: Point) -> None:
        if stream._capture is None:
            self._enter(stream)
        elif stream._capture is not self:
            raise CaptureError("two captures cannot wait for one another")
        self.add(stream, "wait", point.node)
        seen = self.seen[stream]
        for other, count in point.seen.items():
            seen[other] = max(seen.get(other, 0), count)

    def require_joined(self) -> None:
        known = self.seen[self.origin]
        for stream, count in self.counts.items():
            if known.get(stream, 0) < count:
                raise CaptureError(f"{stream.name} was forked into the capture and never joined")

    def close(self) -> None:
        self.open = False
        for stream in self.lanes:
            stream._capture = None


class HostGraph(ProcessLocal):
    """Captured work of one or more streams. Each launch reads the arrays again."""

    def __init__(self, context: HostContext, capture: Capture) -> None:
        self.context = context
        self.finished = False
        self._capture = capture
        self._streams: list[HostStream] = []  # for the lanes other than the one launched on
        self._last: HostEvent | None = None
        self._lock = threading.Lock()

    def launch(self, stream: Any = None) -> None:
        """Replay on a stream; with None the call returns when the work is done."""
        if not self.finished:
            raise CaptureError("the graph cannot be launched: its capture did not end well")
        target: Any = self.context.device.as_stream(stream)
        with self._capture.hooks.around(target):
            observe.issue(
                lambda: observe.Operation("graph", target, graph=self),
                lambda: self._launch(target),
            )

    def _launch(self, target: Any) -> None:
        if not target.inline:
            self._replay(target)
            return
        stream = self.context.new_stream()
        self._replay(stream)
        stream.synchronize()

    def _replay(self, target: HostStream) -> None:
        with self._lock:
            while len(self._streams) < len(self._capture.lanes) - 1:
                self._streams.append(self.context.new_stream())
            lanes = [target, *self._streams]
            for stream in self._streams:
                stream.forgive()  # a failed replay surfaced in the stream that launched it
            if self._last is not None:
                target._follow(self._last)
            events: dict[int, HostEvent] = {}
            for lane, kind, payload in self._capture.program:
                if kind == "run":
                    lanes[lane].enqueue(payload)
                elif kind == "record":
                    events[payload] = lanes[lane]._mark(HostEvent())
                else:
                    lanes[lane]._follow(events[payload])
            self._last = target._mark(HostEvent())
