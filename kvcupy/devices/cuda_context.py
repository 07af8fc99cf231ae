"""What the parts of one GPU share: the CUDA API, captures, and what must outlive work in flight.

Streams, memory and launches take a `CudaContext`, never the device that they are parts of. It owns
idle event handles, the list of owners in flight, and the thread that calls host functions.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from .. import arrays
from ..cuda_api import DEFAULT_STREAMS, DISABLE_TIMING, PINNED_FLAGS, SUCCESS, CudaApi
from ..errors import CaptureError, DeviceError, ProcessLocal, device_failure, finalize, in_child
from . import host_memory
from .protocol import Device, LaunchHooks

_AS_IS: AbstractContextManager[None] = nullcontext()

IDLE, ARRIVED, RETURNED = 0, 1, 2  # states of the word of a host function
_WORDS = 1024  # per block of pinned memory
_WAIT_FOR_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


class _Thread(threading.local):
    ready = False  # whether this thread has the device's CUDA context


class CudaContext(ProcessLocal):
    """One GPU as its parts see it.

    `captures` holds the kvcupy capture that each stream takes part in, and `streams` the streams
    of `Device.stream` that are referenced, both by address; `device` is made of the parts, and is
    what `Stream.device` returns to users.
    """

    _instead = "CUDA works in no forked child: start processes that use a GPU by spawn"
    _usable = ("device", "events", "index", "name")  # to compare, to print, and at destruction

    def __init__(self, device: Device, index: int, api: CudaApi) -> None:
        self.device = device
        self.index = index
        self.name = f"cuda:{index}"
        self.api = api
        self.captures: dict[int, Capture] = {}
        self.destroyed_streams: dict[int, int] = {}  # by address: how many of kvcupy's were there
        self.lent_streams: dict[int, object] = {}  # what keeps a stream of another library's use
        self.events = EventPool(self._create_event)
        self.retired = RetireList(self)
        self.calls = HostCalls(self)
        self.thread = _Thread()

    def current(self) -> AbstractContextManager[Any]:
        """Make this the thread's current CUDA device for the length of a with block."""
        if self.api.runtime.getDevice() == self.index:
            return _AS_IS
        device: AbstractContextManager[Any] = self.api.cupy.cuda.Device(self.index)
        return device

    @contextmanager
    def relaxed(self, what: str) -> Iterator[None]:
        """Let a with block do `what` on this device, on which no captured work depends."""
        with self.api.errors_as(what), self.current(), self.api.relaxed():
            yield

    def prepare_thread(self) -> None:
        """Give this thread a CUDA context: without one, calls of the driver fail.

        A thread has none before its first call of the runtime.
        """
        with self.api.relaxed():
            self.api.runtime.setDevice(self.index)
            self.api.runtime.memGetInfo()
        self.thread.ready = True

    def capture_of(self, pointer: int) -> Capture | None:
        """Return the capture that a CUDA stream is part of, FOREIGN if kvcupy did not begin it."""
        tracked = self.captures.get(pointer) if pointer not in DEFAULT_STREAMS else None
        if tracked is not None:
            return tracked
        with self.current():
            if not self.api.is_capturing(pointer):
                return None
            if not self.captures:
                return FOREIGN
            number = self.api.capture_id(pointer)
        for capture in set(self.captures.values()):  # another library may have forked ours
            if capture.id is not None and capture.id == number:
                return capture
        return FOREIGN

    def retain(self, stream: Any, keep: Sequence[object]) -> None:
        """Keep owners alive until `stream` has passed this point, or the captured graph is gone.

        Torch tensors on torch's current stream need no help: their allocator reuses memory in the
        order of that stream. CuPy's reuses it in the order of the stream that was current when an
        array was made, which may be another.
        """
        capture = self.capture_of(stream.pointer) if self.captures else None
        if capture is not None:
            if capture is not FOREIGN:
                capture.keep(keep)
            return
        owners: tuple[Any, ...] = tuple([owner for owner in keep if owner is not None])
        if self._orders_tensors(stream, owners):
            owners = tuple([owner for owner in owners if not is_tensor(owner.__class__)])
        if not owners:
            return
        failures: tuple[type[Exception], ...] = (*self.api.errors, DeviceError)
        try:
            with self.current():
                if self.api.is_capturing(stream.pointer):
                    return  # another library's capture, which keeps the arrays alive itself
                self.retired.hold(stream, owners)
        except failures:
            # The work is on its way, and a call that raised would be repeated.
            self.retired.hold_unrecorded(owners)

    def _orders_tensors(self, stream: Any, owners: Sequence[Any]) -> bool:
        """Return whether torch's allocator reuses memory in the order of `stream`.

        It does for torch's current stream, as far as torch's own operations go. CuPy's pool gives a
        block back to the stream that was current when it was allocated, and does not say which.
        """
        if stream.library:
            return bool(stream.library == "torch")
        if not arrays.TORCH_TYPES or not any([is_tensor(owner.__class__) for owner in owners]):
            return False
        current = sys.modules["torch"].cuda.current_stream(self.index)
        return bool(current.cuda_stream == stream.pointer)

    def _create_event(self, timing: bool) -> int:
        with self.relaxed(f"event on {self.name}"):
            return int(self.api.runtime.eventCreateWithFlags(0 if timing else DISABLE_TIMING))


@lru_cache(maxsize=256)
def is_tensor(kind: type[Any]) -> bool:
    """Return whether a type is of torch's tensors, without importing torch."""
    names = ((base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__)
    return ("torch", "Tensor") in names


class Capture:
    """A capture in progress, and what its graph keeps alive afterwards."""

    def __init__(self) -> None:
        self.open = True  # until the capture has ended
        self.id: int | None = None  # CUDA's number
        self.hooks = LaunchHooks()
        self.kept: list[object] = []  # arrays and host functions
        self.streams: list[Any] = []  # those that take part, the captured one first
        self.last_stream: Any = None  # of the last launch, where failures of host functions surface

    def join(self, stream: Any) -> None:
        """Note that `stream` takes part, because it waited for a captured one."""
        self.streams.append(stream)
        stream.context.captures[stream.pointer] = self

    def keep(self, owners: Sequence[object]) -> None:
        """Keep owners for as long as the graph may be launched.

        It keeps the buffers that `scratch` lends to a capture anyway.
        """
        loans = ((owner, getattr(owner, "owner", None)) for owner in owners)
        self.kept.append(tuple(o for o, x in loans if not getattr(x, "kept_by_capture", False)))


FOREIGN = Capture()
"""Stands for a capture that another library began, which keeps its arrays alive itself."""


# --- Memory in flight -----------------------------------------------------------------------------
#
# CuPy's pool hands a freed block to the next allocation on the stream where it was allocated, at
# once, whatever other streams still do with it. So an operation on any other stream leaves its
# arrays here with an event, and they are released when the event has passed.


class EventPool:
    """Event handles for reuse.

    A handle may be recorded again as soon as it has no holder: a stream that
    waits for an event waits for what was recorded then, not for what is recorded later.
    """

    def __init__(self, create: Callable[[bool], int]) -> None:
        self._create = create
        self._free: dict[bool, list[int]] = {False: [], True: []}

    def take(self, timing: bool = False) -> int:
        """Return an idle handle, or a new one."""
        try:
            return self._free[timing].pop()
        except IndexError:
            return self._create(timing)

    def give(self, handle: int, timing: bool = False) -> None:
        self._free[timing].append(handle)


class RetireList:
    """Owners in flight, first in, first out per stream.

    A queue may outlive its stream, and its address may become another stream's. Owners of the
    second stream are then released after owners of the first: perhaps late, never early.
    """

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._pool = context.events
        self._record = context.api.runtime.eventRecord
        self._queues: dict[int, deque[tuple[int, object]]] = {}  # by the address of the stream
        self._unrecorded: list[object] = []  # for which no event could be recorded
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def hold(self, stream: Any, owners: object) -> None:
        """Keep `owners` until `stream` has passed all its work so far; the device is current."""
        pointer = stream.pointer
        if pointer in self._queues:
            self._reap((pointer,))
        event = self._pool.take()
        try:
            self._record(event, pointer)
        except BaseException:
            self._pool.give(event)
            raise
        with self._lock:
            self._queues.setdefault(pointer, deque()).append((event, owners))

    def hold_unrecorded(self, owners: object) -> None:
        """Keep `owners`, for which no event could be recorded, until the device is synchronized."""
        with self._lock:
            self._unrecorded.append(owners)

    @contextmanager
    def releasing_unrecorded(self) -> Iterator[None]:
        """Release what was held so, unless a with block, which waits for the device, raises."""
        count = len(self._unrecorded)
        yield
        with self._lock:
            released, self._unrecorded = self._unrecorded[:count], self._unrecorded[count:]
        del released  # after the lock: destructors may run any code

    def reap(self, streams: Iterable[int] | None = None) -> None:
        """Release what has passed, on some streams or on all. Never waits."""
        if self._queues:
            with self._context.current():
                self._reap(list(self._queues) if streams is None else streams)

    def _reap(self, streams: Iterable[int]) -> None:
        """Release what has passed on some streams; the device is current."""
        passed = self._context.api.runtime.eventQuery
        with self._context.api.relaxed():
            released: list[object] = []  # after the lock: destructors may run any code
            if not self._lock.acquire(blocking=False):
                return  # another thread is reaping
            try:
                for stream in streams:
                    queue = self._queues.get(stream)
                    while queue and passed(queue[0][0]) == SUCCESS:
                        event, owners = queue.popleft()
                        self._pool.give(event)
                        released.append(owners)
                        del owners
                    if queue is not None and not queue:
                        del self._queues[stream]
            finally:
                self._lock.release()
            del released


# --- Host functions -------------------------------------------------------------------------------
#
# No Python runs on a thread of the driver. The driver may hold its own lock while it calls a host
# function. A Python function would then wait for the GIL, whose owner may be waiting for the
# driver's lock in a query that holds the GIL (CuPy has several): a deadlock. So a call puts four
# operations on its stream:
#
#     word = ARRIVED            by the GPU, into pinned memory
#     sem_post(semaphore)       a host function: the C library's own, which needs no GIL
#     wait for word == RETURNED by the GPU
#     word = IDLE               for the next replay, if it is in a graph
#
# The semaphore wakes a kvcupy thread, which calls the function and writes RETURNED. The waits
# form no cycle: the driver waits for no thread, the GPU waits for that thread, that thread waits
# for the GIL, and the owner of the GIL waits for neither: whatever may wait for the GPU, including
# for room in a stream's queue, is called without it.


class Call:
    """A function on a stream, or in a graph.

    Its holder, the list of what is in flight or the graph, releases it on a thread of the caller's,
    never on the one that calls functions: it may own the last reference to pinned memory, which
    CUDA frees when the device is idle, and the device may be waiting for that thread.
    """

    __slots__ = ("__weakref__", "capture", "function", "number", "stream")

    def __init__(
        self, number: int, function: Callable[[], object], stream: Any, capture: Capture | None
    ) -> None:
        self.number = number
        self.function = function
        self.stream = stream
        self.capture = None if capture is None else weakref.ref(capture)

    def where(self) -> Any:
        """Return the stream on which it runs; in a graph, the one it was last launched on."""
        capture = None if self.capture is None else self.capture()
        return self.stream if capture is None else capture.last_stream


class _Failure(NamedTuple):
    number: int
    stream: Any
    name: str
    error: BaseException


class HostCalls:
    """The host functions of one device.

    They are called one at a time, on one thread. An exception is recorded with its stream, and
    raised when that stream, an event that was recorded in it later, or the device is synchronised.
    Until then it keeps the stream, so that no new one gets its address, and its failures.
    """

    def __init__(self, context: CudaContext) -> None:
        self.count = 0  # of all functions so far, which are numbered in the order of their calls
        self._context = context
        self._failures: list[_Failure] = []
        self._lock = threading.Lock()
        self._semaphore: Semaphore | None = None
        self._thread: threading.Thread | None = None
        self._blocks: list[tuple[Any, np.ndarray[Any, Any]]] = []  # pinned memory, and its words
        self._free: list[int] = []  # addresses of words
        self._calls: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()

    @property
    def here(self) -> bool:
        """Whether this is the thread that calls functions, for which streams may be waiting."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def enqueue(self, stream: Any, function: Callable[[], object]) -> None:
        """Put a function on a stream, or into the graph that the stream is captured into."""
        context = self._context
        capture = context.capture_of(stream.pointer)
        if capture is FOREIGN:
            raise CaptureError("a host function can only be captured by Stream.capture")
        with self._lock:
            call = Call(self.count, function, stream, capture)
            self.count += 1
        what = f"call in {stream!r}, by stream memory operations"
        with context.api.errors_as(what), context.current():
            semaphore, address = self._start(), self._take_word()
            self._calls[address] = call
            give_back = finalize(call, self._free.append, address)
            try:
                self._put(stream.pointer, address, semaphore)
                context.retain(stream, (call,))
            except BaseException:
                give_back.detach()  # the stream may still use the word
                del self._calls[address]  # so that the function is not called
                raise

    def raise_failures(self, stream: Any = None, before: int | None = None) -> None:
        """Raise the first exception of a stream's functions, or of all, and forget the others.

        With `before`, only functions of lower numbers count.
        """
        if not self._failures:
            return
        with self._lock:
            raised = [
                f for f in self._failures
                if (stream is None or f.stream == stream) and (before is None or f.number < before)
            ]  # fmt: skip
            self._failures = [f for f in self._failures if f not in raised]
        if raised:
            _, _, name, error = raised[0]
            where = self._context.name
            raise device_failure(f"host function {name} on {where} failed: {error!r}", error)

    def _put(self, stream: int, address: int, semaphore: Semaphore) -> None:
        api = self._context.api
        if not self._context.thread.ready:
            self._context.prepare_thread()
        library, word = api.library, ctypes.c_uint64(address)
        write, wait = library.cuStreamWriteValue32_v2, library.cuStreamWaitValue32_v2
        steps: tuple[tuple[Any, ...], ...] = (
            (write, word, ctypes.c_uint32(ARRIVED), ctypes.c_uint(0)),
            (library.cuLaunchHostFunc, ctypes.c_void_p(semaphore.post_function),
             ctypes.c_void_p(semaphore.address)),
            (wait, word, ctypes.c_uint32(RETURNED), ctypes.c_uint(_WAIT_FOR_EQUAL)),
            (write, word, ctypes.c_uint32(IDLE), ctypes.c_uint(0)),
        )  # fmt: skip
        for function, *arguments in steps:
            api.driver.check_status(function(ctypes.c_void_p(stream), *arguments))

    def _start(self) -> Semaphore:
        """Return the semaphore that wakes the thread, started at the first call."""
        with self._lock:
            if self._semaphore is None:
                semaphore = Semaphore()
                thread = threading.Thread(
                    target=_serve, args=(semaphore, weakref.ref(self)),
                    name=f"kvcupy host functions, {self._context.name}", daemon=True,
                )  # fmt: skip
                try:
                    thread.start()
                except RuntimeError as error:
                    raise DeviceError(f"no thread for host functions: {error}") from error
                self._semaphore, self._thread = semaphore, thread
                finalize(self, semaphore.post)
                atexit.register(_drain, weakref.ref(self._context))
            return self._semaphore

    def _take_word(self) -> int:
        with suppress(IndexError):
            return self._free.pop()
        api = self._context.api
        with api.relaxed():
            memory = api.cupy.cuda.PinnedMemory(4 * _WORDS, PINNED_FLAGS)
        words = arrays.array_at(memory, memory.ptr, (_WORDS,), np.dtype(np.uint32))
        words[:] = IDLE
        self._blocks.append((memory, words))
        self._free.extend(range(memory.ptr + 4, memory.ptr + words.nbytes, 4))
        return int(memory.ptr)

    def call_arrived(self) -> None:
        """Call the functions that streams have reached."""
        for memory, words in tuple(self._blocks):
            for i in np.flatnonzero(words == ARRIVED).tolist():
                self._call(memory.ptr + 4 * i)
                words[i] = RETURNED  # from here on the function may be released elsewhere

    def _call(self, address: int) -> None:
        call = self._calls.get(address)
        if call is None:  # only part of it could be put on its stream
            return
        try:
            call.function()
        except BaseException as error:
            name = getattr(call.function, "__name__", repr(call.function))
            with self._lock:
                self._failures.append(_Failure(call.number, call.where(), name, error))


class Semaphore:
    """A semaphore of the C library's, which the driver can post.

    It is never freed: the driver may post it for as long as the process lives.
    """

    def __init__(self) -> None:
        self.address, _ = host_memory.map_pages(1)
        self._libc = _libc()
        self.post_function = ctypes.cast(self._libc.sem_post, ctypes.c_void_p).value or 0
        self._libc.sem_init(self.address, 0, 0)

    def post(self) -> None:
        self._libc.sem_post(self.address)

    def wait(self) -> None:
        """Wait for one post, without the interpreter's lock."""
        while self._libc.sem_wait(self.address) != 0:
            pass  # a signal


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    libc.sem_post.argtypes = libc.sem_wait.argtypes = (ctypes.c_void_p,)
    return libc


def _serve(semaphore: Semaphore, owner: weakref.ref[HostCalls]) -> None:
    """Call functions until their device is gone. Keeps nothing alive while it waits."""
    while True:
        semaphore.wait()
        calls = owner()
        if calls is None:
            return
        calls.call_arrived()
        del calls


def _drain(owner: weakref.ref[CudaContext]) -> None:
    """Let functions run before the interpreter exits: their streams would wait for ever."""
    context = owner()
    if context is not None:
        with suppress(*context.api.errors), context.current():
            context.api.runtime.deviceSynchronize()


in_child(partial(atexit.unregister, _drain))
