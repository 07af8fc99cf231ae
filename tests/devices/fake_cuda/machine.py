"""What CUDA does behind the calls: current devices, streams whose work runs late, captures, memory.

Work is done when it is issued, unless the machine is `late`: then it waits in its stream until
somebody waits for it, or `progress` lets it run. Handles 0 and 1 are the legacy default stream of
the device that is current, 2 is the calling thread's own; here the legacy stream of device 0 is
known as 0, so a test may name it.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque
from contextlib import contextmanager

from .statuses import (
    CAPTURED_EVENT,
    IMPLICIT,
    INVALIDATED,
    ISOLATION,
    MERGE,
    NOT_PERMITTED,
    UNJOINED,
    UNMATCHED,
    UNSUPPORTED,
    WRONG_THREAD,
    CudaError,
    Deadlock,
)

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
_PATIENCE = 5  # seconds until a wait for the driver's lock counts as a deadlock


class Capture:
    """A capture in progress. `nodes` is its work, in the order of issue."""

    _ids = itertools.count(1)

    def __init__(self, origin, mode=RELAXED):
        self.id = next(self._ids)
        self.origin, self.mode = origin, mode
        self.thread = threading.get_ident()
        self.streams = {origin}
        self.joined = {origin}
        self.invalidated = False
        self.nodes = []


class Work:
    """One piece of work in a stream; `after` is work of other streams that goes first."""

    def __init__(self, stream, function, after=()):
        self.stream, self.function, self.after = stream, function, after
        self.done = False


class _Thread(threading.local):
    device = 0
    mode = GLOBAL


class Machine:
    """The devices of one process, and its threads as CUDA sees them.

    Attributes
    ----------
    late : whether work waits in its stream
    held : streams whose work does not finish, late or not
    capturing : stream -> Capture
    room : how much work a stream takes before calls that put more there wait; None: any
    deadlocks : every Deadlock that was raised, for some are swallowed on their way
    """

    def __init__(self, late):
        self.late = late
        self.thread = _Thread()
        self.handles = itertools.count(0x1000, 0x10)
        self.device_of = {}  # explicit stream or event -> device
        self.blocking = set()  # streams that synchronise with the legacy one
        self.held = set()
        self.capturing = {}
        self.queues = {}  # stream -> deque of Work
        self.last = {}  # stream -> its latest Work
        self.deadlocks = []
        self.room = None
        self._running = threading.RLock()  # whoever holds it is the GPU
        self._driver = threading.Lock()  # what the driver holds around a host function
        self._driver_thread = None
        self._driver_needs_gil = False

    # --- Streams ---

    def stream(self, handle):
        """Return what a handle means for the calling thread."""
        device = self.thread.device
        if handle in (0, 1):
            return ("legacy", device) if device else 0
        if handle == 2:
            return ("thread", device, threading.get_ident())
        return handle

    def device_of_stream(self, stream):
        """Return the device of a stream; None for one that the machine did not make."""
        if stream == 0:
            return 0
        return stream[1] if isinstance(stream, tuple) else self.device_of.get(stream)

    def new_handle(self):
        handle = next(self.handles)
        self.device_of[handle] = self.thread.device
        return handle

    def is_legacy(self, stream):
        return stream == 0 or (isinstance(stream, tuple) and stream[0] == "legacy")

    def _of_the_same_device(self, streams, stream):
        device = self.device_of_stream(stream)
        return [other for other in streams if self.device_of_stream(other) == device]

    # --- Work ---

    def submit(self, stream, function, after=()):
        """Put work on a stream, or into the graph that it is captured into."""
        self.require_usable(stream)
        capture = self.capturing.get(stream)
        if not self.late:
            function()
            return None
        if capture is not None:
            capture.nodes.append(function)
            return None
        others = ()
        if self.is_legacy(stream):
            others = self._of_the_same_device(self.blocking, stream)
        elif stream in self.blocking:
            others = [("legacy", d) if d else 0 for d in [self.device_of_stream(stream)]]
        implicit = [self.last[other] for other in others if other in self.last]
        work = Work(stream, function, [*after, *implicit])
        self.queues.setdefault(stream, deque()).append(work)
        self.last[stream] = work
        return work

    def require_usable(self, stream):
        """Raise if work on the stream would be refused, and spoil what CUDA then spoils."""
        capture = self.capturing.get(stream)
        if capture is not None and capture.invalidated:
            raise CudaError(INVALIDATED)
        for other in self.implicit_captures(stream):
            other.invalidated = True
            raise CudaError(IMPLICIT)

    def implicit_captures(self, stream):
        """Return the captures that work on a legacy stream would be drawn into."""
        if not self.is_legacy(stream):
            return []
        near = self._of_the_same_device(self.blocking & set(self.capturing), stream)
        return [self.capturing[other] for other in near]

    def require_room(self, stream):
        """Refuse to wait for room in a stream's queue with the interpreter's lock."""
        if self.room is not None and len(self.queues.get(stream, ())) >= self.room:
            raise self.deadlock("a call that keeps the GIL while it waits for room in a stream")

    def is_idle(self, stream):
        return stream not in self.held and not self.queues.get(stream)

    def progress(self, handle=None):
        """Do the work of one stream, or of all, and what it waits for."""
        chosen = list(self.queues) if handle is None else [self.stream(handle)]
        for stream in chosen:
            if stream in self.last:
                self.run(self.last[stream])

    def progress_device(self):
        """Do the work of the current device."""
        for stream in list(self.last):
            if self.device_of_stream(stream) in (None, self.thread.device):
                self.run(self.last[stream])

    def run(self, work):
        """Do the work of a stream up to and including `work`."""
        if not self._running.acquire(timeout=_PATIENCE):
            raise self.deadlock("the GPU waits for a host function, which waits for this thread")
        try:
            queue = self.queues[work.stream]
            while not work.done:
                first = queue[0]
                for other in first.after:
                    self.run(other)
                first.function()
                first.done, first.function, first.after = True, None, ()  # keeps nothing alive
                queue.popleft()
        finally:
            self._running.release()

    def in_background(self, handle=None):
        """Let the work of a stream, or of all, run on a thread of its own; return the thread."""
        thread = threading.Thread(target=self.progress, args=(handle,), daemon=True)
        thread.start()
        return thread

    # --- Host functions and the driver's lock ---

    def call_host(self, function, needs_gil=True):
        """Call a host function as the driver does: on its own thread, holding its lock. One that
        is C's needs no lock of the interpreter's."""
        failures = []

        def work():
            with self._driver:
                self._driver_thread = threading.get_ident()
                self._driver_needs_gil = needs_gil
                try:
                    function()
                except BaseException as error:
                    failures.append(error)
                finally:
                    self._driver_thread = None

        thread = threading.Thread(target=work, name="driver", daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        if thread.is_alive():
            raise self.deadlock("a host function does not end")
        for error in failures:  # nobody catches it there
            raise AssertionError(f"{error!r} left a host function") from error

    def wait_for(self, word, value):
        """Let a stream wait until the processor has written a word."""
        until = time.monotonic() + _PATIENCE
        while word.value != value:
            if time.monotonic() > until:
                raise self.deadlock("a stream waits for a word that nobody writes")
            time.sleep(1e-4)

    def enter(self, keeps_gil=False):
        """Begin a call of CUDA. Whoever keeps the interpreter's lock must not wait for the driver:
        the host function that the driver is about to call waits for the interpreter."""
        if threading.get_ident() == self._driver_thread:
            raise CudaError(NOT_PERMITTED)
        if not self._driver.locked():
            return
        if keeps_gil and self._driver_needs_gil:
            raise self.deadlock("a call that keeps the GIL while the driver calls a host function")
        if not self._driver.acquire(timeout=_PATIENCE):
            raise self.deadlock("the driver's lock is not released")
        self._driver.release()

    def deadlock(self, what):
        found = Deadlock(what)
        self.deadlocks.append(found)
        return found

    # --- Captures ---

    def begin(self, stream, mode):
        if self.is_legacy(stream):
            raise CudaError(UNSUPPORTED)
        if stream in self.capturing:
            raise CudaError(UNSUPPORTED)
        self.capturing[stream] = capture = Capture(stream, mode)
        return capture

    def end(self, stream):
        """End a capture and return it; its streams are usable again, whatever came of it."""
        capture = self.capturing.get(stream)
        if capture is None:
            raise CudaError(UNSUPPORTED)
        if capture.origin != stream:
            capture.invalidated = True
            raise CudaError(UNMATCHED)
        if capture.mode != RELAXED and capture.thread != threading.get_ident():
            raise CudaError(WRONG_THREAD)
        for member in capture.streams:
            del self.capturing[member]
        if capture.invalidated:
            raise CudaError(INVALIDATED)
        if capture.streams != capture.joined:
            raise CudaError(UNJOINED)
        return capture

    def exchange_mode(self, mode):
        """Set the calling thread's capture mode and return the one before."""
        before, self.thread.mode = self.thread.mode, mode
        return before

    def unsafe(self):
        """Return the status of a call that is potentially unsafe during captures.

        Which captures prohibit it depends on this thread's mode (cudaThreadExchangeStreamCapture-
        Mode in the runtime's documentation); those that do are invalidated.
        """
        if self.thread.mode == RELAXED:
            return 0
        here = threading.get_ident()
        prohibiting = [
            capture
            for capture in set(self.capturing.values())
            if (capture.thread == here and capture.mode != RELAXED)
            or (self.thread.mode == GLOBAL and capture.thread != here and capture.mode == GLOBAL)
        ]
        for capture in prohibiting:
            capture.invalidated = True
        return UNSUPPORTED if prohibiting else 0

    def require_safe(self):
        if status := self.unsafe():
            raise CudaError(status)

    def spoil(self, stream):
        """Return the status of a query of, or wait for, a stream; that invalidates its capture."""
        if stream in self.capturing:
            self.capturing[stream].invalidated = True
            return UNSUPPORTED
        for capture in self.implicit_captures(stream):
            capture.invalidated = True
            return IMPLICIT
        return self.unsafe()

    def wait(self, stream, event):
        """Let a stream wait for an event, which may draw it into a capture."""
        there, here = event.capture, self.capturing.get(stream)
        if there and there not in self.capturing.values():
            raise CudaError(CAPTURED_EVENT)
        if there and here and there is not here:
            there.invalidated = here.invalidated = True
            raise CudaError(MERGE)
        if there:
            if there.invalidated:
                raise CudaError(INVALIDATED)
            there.streams.add(stream)
            self.capturing[stream] = there
            if stream == there.origin:
                there.joined.add(event.stream)
        elif here:
            here.invalidated = True
            raise CudaError(ISOLATION)
        elif event.work is not None:
            self.submit(stream, lambda: None, [event.work])
        else:
            self.require_usable(stream)


class Event:
    """A CUDA event: where it was last recorded."""

    def __init__(self, device):
        self.device = device
        self.stream = self.capture = self.work = None


class Memory:
    """Host memory that stands for memory of any kind."""

    def __init__(self, size):
        self.bytes = (ctypes.c_char * max(size, 1))()
        self.ptr = ctypes.addressof(self.bytes)


@contextmanager
def entered(machine, index):
    """Make a device the thread's current one for the length of a with block."""
    before, machine.thread.device = machine.thread.device, index
    try:
        yield
    finally:
        machine.thread.device = before
