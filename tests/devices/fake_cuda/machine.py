"""What the calls of CUDA do: contexts, streams whose work runs late, captures, memory.

Work stays in its stream until a caller waits for it (then only what must go first is done), or
`progress` lets it run. With `Machine.chance` streams run by themselves at every call, in random
order. Handles 0 and 1 are the legacy default stream of the device that is current, 2 is the
calling thread's own; here the legacy stream of device 0 is known as 0, so a test may name it.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque

# Statuses, as the runtime and the driver number them.
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NO_CONTEXT = 201
INVALID_HANDLE = 400
NOT_READY = 600
ILLEGAL = 700
MISALIGNED = 716
NOT_SUPPORTED = 801
UNSUPPORTED = 900
INVALIDATED = 901
MERGE = 902
UNMATCHED = 903
UNJOINED = 904
ISOLATION = 905
CAPTURED_EVENT = 907
WRONG_THREAD = 908

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
_PATIENCE = 5  # seconds until a wait for the driver's lock counts as a deadlock


class CudaError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"cudaError {status}")
        self.status = status


class OutOfMemoryError(MemoryError):
    """CuPy's own, which is no CUDA error: what its memory pool raises."""

    def __init__(self, size, total, limit=0):
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,}).")


class Deadlock(AssertionError):
    """A thread would wait for ever for a stream, or a stream for a thread."""


class Capture:
    """A capture in progress."""

    _ids = itertools.count(1)

    def __init__(self, origin, mode=RELAXED):
        self.id = next(self._ids)
        self.origin, self.mode = origin, mode
        self.thread = threading.get_ident()
        self.counts = {}  # of each stream, how much it has done in the capture; a join counts too
        self.known = {}  # of each stream, how much of each is known to be done before it continues
        self.enter(origin)
        self.invalidated = False
        self.nodes = []  # its work, in the order of issue

    def enter(self, stream):
        self.counts[stream] = 0
        self.known[stream] = {}
        self.note(stream)

    def note(self, stream):
        """Note that a stream has done something that must be joined."""
        self.counts[stream] += 1
        self.known[stream][stream] = self.counts[stream]

    @property
    def is_joined(self):
        known = self.known[self.origin]
        return all(known.get(stream, 0) == count for stream, count in self.counts.items())


class Work:
    """One piece of work in a stream, after work of other streams (`after`)."""

    def __init__(self, stream, function, after=(), is_ready=None):
        self.stream, self.function, self.after = stream, function, after
        self.is_ready = is_ready or (lambda: True)  # for what waits for a word in memory
        self.done = False

    def blockers(self):
        return [work for work in self.after if not work.done]


class _Thread(threading.local):
    device = 0
    has_context = False  # the driver's calls need one, which only the runtime's calls give
    is_gpu = False  # does work of a stream
    mode = GLOBAL


class Machine:
    """The devices of one process, and its threads as CUDA sees them."""

    def __init__(self):
        self.chance = None  # random.Random, by which streams run while the host does other things
        self.thread = _Thread()
        self.device_of = {}  # explicit stream or event -> device
        self.events = set()
        self.capturing = {}  # stream -> Capture
        self.queues = {}  # stream -> deque of Work
        self.last = {}  # stream -> its latest Work
        self.deadlocks = []  # that were raised, for some are swallowed on their way
        self._handles = itertools.count(0x1000, 0x10)
        self._free_handles = []  # of what was destroyed: the next one made has the latest
        self._destroyed = itertools.count()
        self._priorities = {}  # stream -> random number; the highest one that can goes first
        self._running = threading.RLock()  # the thread that holds it is the GPU

    # --- Streams ---

    def stream(self, handle):
        """Return what a handle means for the calling thread."""
        device = self.thread.device
        if handle in (0, 1):
            return ("legacy", device) if device else 0
        if handle == 2:
            return ("thread", device, threading.get_ident())
        if handle not in self.device_of or handle in self.events:
            raise CudaError(INVALID_HANDLE)
        return handle

    def device_of_stream(self, stream):
        if stream == 0:
            return 0
        return stream[1] if isinstance(stream, tuple) else self.device_of.get(stream)

    def new_handle(self):
        handle = self._free_handles.pop() if self._free_handles else next(self._handles)
        self.device_of[handle] = self.thread.device
        return handle

    def destroy(self, handle):
        """Destroy a stream. Its work is done all the same; its handle is the next stream's."""
        self.stream(handle)  # raises if it is no stream
        self.require_safe()  # CUDA does not promise that it is not
        if capture := self.capturing.pop(handle, None):
            capture.invalidated = True
        remains = ("destroyed", self.device_of.pop(handle), next(self._destroyed))
        with self._running:
            for work in self.queues.get(handle, ()):
                work.stream = remains
            for known in (self.queues, self.last):
                if handle in known:
                    known[remains] = known.pop(handle)
        self._free_handles.append(handle)

    def is_legacy(self, stream):
        return stream == 0 or (isinstance(stream, tuple) and stream[0] == "legacy")

    # --- Work ---

    def submit(self, stream, function, after=(), is_ready=None):
        """Put work on a stream, or into the graph that it is captured into."""
        self.require_usable(stream)
        capture = self.capturing.get(stream)
        if capture is not None:
            capture.nodes.append((function, is_ready))
            capture.note(stream)
            return None
        work = Work(stream, function, after, is_ready)
        self.queues.setdefault(stream, deque()).append(work)
        self.last[stream] = work
        return work

    def require_usable(self, stream):
        """Raise if work on the stream would be refused."""
        capture = self.capturing.get(stream)
        if capture is not None and capture.invalidated:
            raise CudaError(INVALIDATED)

    def progress(self, handle=None):
        """Do the work of one stream, or of all, and what it waits for."""
        chosen = None if handle is None else self.stream(handle)
        for stream, work in list(self.last.items()):
            if handle is None or stream == chosen:
                self.run(work)

    def progress_device(self):
        """Do the work of the current device."""
        if self.thread.is_gpu:
            return
        known = list(self.last.items())  # a stream may be destroyed meanwhile, its work is not
        for work in [w for s, w in known if self.device_of_stream(s) == self.thread.device]:
            self.run(work)

    def run(self, work):
        """Wait until `work` is done."""
        until = time.monotonic() + _PATIENCE
        while not work.done:
            if self.step(work):
                until = time.monotonic() + _PATIENCE
            elif time.monotonic() > until:
                raise self.deadlock("a thread waits for a stream that does not go on")
            else:
                time.sleep(1e-4)

    def step(self, wanted=None):
        """Do one piece of work, without chance one that `wanted` needs; return whether it could."""
        if self.thread.is_gpu:
            return False  # a destructor amid work that this thread does for the GPU
        if not self._running.acquire(timeout=_PATIENCE):
            raise self.deadlock("the GPU waits for a host function, which waits for this thread")
        self.thread.is_gpu = True  # a destructor may run any code, and at any allocation
        try:
            work = self._next(wanted)
            if work is None or not work.is_ready():
                return False
            function = work.function  # let go of without the lock: destructors may run any code
            queue = self.queues[work.stream]  # which they may destroy
            function()
            queue.popleft()
            work.done, work.function, work.after = True, None, ()
        finally:
            self.thread.is_gpu = False
            self._running.release()
        return True

    def _next(self, wanted):
        """Return the piece of work to do, or None."""
        if wanted is not None:
            if wanted.done:
                return None
            while (head := self.queues[wanted.stream][0]) is not wanted or head.blockers():
                wanted = next(iter(head.blockers()), head)
        if self.chance is None:
            return wanted
        heads = [queue[0] for queue in list(self.queues.values()) if queue]
        ready = [work for work in heads if not work.blockers() and work.is_ready()]
        if self.chance.random() < 0.25:
            self._priorities.clear()
        for work in ready:
            self._priorities.setdefault(work.stream, self.chance.random())
        return max(ready, key=lambda work: self._priorities[work.stream], default=None)

    def run_for_a_while(self):
        """Let streams run for a while, as they do while the host runs."""
        while self.chance is not None and self.chance.random() < 0.5 and self.step():
            pass

    def in_background(self, handle=None):
        """Let the work of a stream, or of all, run on another thread; return the thread."""
        thread = threading.Thread(target=self.progress, args=(handle,), daemon=True)
        thread.start()
        return thread

    # --- Calls ---

    def enter(self):
        """Begin a call of the runtime, which gives the thread a context."""
        self.thread.has_context = True
        self.run_for_a_while()

    def enter_driver(self):
        """Begin a call of the driver, which gives the thread no context."""
        if not self.thread.has_context:
            raise CudaError(NO_CONTEXT)
        self.enter()

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
        """End a capture and return it; its streams are usable again, even if it failed."""
        capture = self.capturing.get(stream)
        if capture is None:
            raise CudaError(UNSUPPORTED)
        if capture.origin != stream:
            capture.invalidated = True
            raise CudaError(UNMATCHED)
        if capture.mode != RELAXED and capture.thread != threading.get_ident():
            raise CudaError(WRONG_THREAD)
        for member in capture.counts:
            self.capturing.pop(member, None)
        if capture.invalidated:
            raise CudaError(INVALIDATED)
        if not capture.is_joined:
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
            if here is None:
                there.enter(stream)
                self.capturing[stream] = there
            known = there.known[stream]
            for other, count in event.known.items():
                known[other] = max(known.get(other, 0), count)
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
        self.known = {}  # in a capture, what of each stream is done when the event is


class Memory:
    """Host memory that stands for memory of any kind."""

    def __init__(self, size):
        self.bytes = (ctypes.c_char * max(size, 1))()
        self.ptr = ctypes.addressof(self.bytes)
