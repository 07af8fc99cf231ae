"""Host functions in the order of a stream, and what becomes of the exceptions that they raise.

No Python runs on a thread of the driver. The driver may hold its own lock while it calls a host
function. A Python function would then wait for the GIL, whose owner may be waiting for the driver's
lock in a query that keeps the GIL (CuPy has several): a deadlock. So a call puts four things on its
stream:

    word = ARRIVED            by the GPU, into pinned memory
    sem_post(semaphore)       a host function: the C library's own, which needs no GIL
    wait for word == RETURNED by the GPU
    word = IDLE               for the next replay, if it is in a graph

The semaphore wakes a thread of kvcupy's, which calls the function and writes RETURNED. The waits
form no cycle: the driver waits for no thread, the GPU waits for that thread, that thread waits for
the GIL, and the owner of the GIL waits for neither: whatever may wait for the GPU, including for
room in a stream's queue, is called without it.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import arrays
from ..cuda_api import HOST_ALLOC_MAPPED, HOST_ALLOC_PORTABLE
from ..errors import CaptureError, DeviceError
from . import host_memory
from .cuda_graph import FOREIGN, Graph

if TYPE_CHECKING:
    from .cuda import CudaDevice
    from .cuda_streams import Stream

IDLE, ARRIVED, RETURNED = 0, 1, 2  # what a word says
_WORDS = 1024  # of a block of pinned memory
_WAIT_FOR_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


class Call:
    """A function on a stream, or in a graph, and its word.

    Whoever holds it, the list of what is in flight or the graph, lets go of it on a thread of the
    caller's: it may be the last one to know of pinned memory, which CUDA releases when the device
    is idle, and the device may be waiting for the thread that calls functions.
    """

    __slots__ = ("__weakref__", "function", "graph", "stream")

    def __init__(self, function: Callable[[], object], stream: int, graph: Graph | None) -> None:
        self.function = function
        self.stream = stream
        self.graph = None if graph is None else weakref.ref(graph)

    def where(self) -> int:
        """Return the stream on which it runs: of a graph, where that was last launched."""
        graph = None if self.graph is None else self.graph()
        return self.stream if graph is None else graph.last_stream


class _Context(threading.local):
    ready = False  # whether this thread has the device's context


class HostCalls:
    """The host functions of one device.

    They are called one at a time, on one thread. An exception has nowhere to go there: it is noted
    with the stream, and raised when somebody synchronises that stream or the device.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._failures: list[tuple[int, str, BaseException]] = []
        self._lock = threading.Lock()
        self._semaphore: Semaphore | None = None
        self._thread: threading.Thread | None = None
        self._blocks: list[tuple[Any, np.ndarray[Any, Any]]] = []  # pinned memory, and its words
        self._free: list[int] = []  # addresses of words
        self._context = _Context()
        self._calls: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()

    @property
    def here(self) -> bool:
        """Whether this is the thread that calls functions, for which streams may be waiting."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def enqueue(self, stream: Stream, function: Callable[[], object]) -> None:
        """Put a function on a stream, or into the graph that the stream is captured into."""
        device = self._device
        graph = device.capture_of(stream.pointer)
        if graph is FOREIGN:
            raise CaptureError("a host function can only be captured by Stream.capture")
        call = Call(function, stream.pointer, graph)
        try:
            with device.current():
                semaphore, address = self._start(), self._take_word()
                self._calls[address] = call
                comes_back = weakref.finalize(call, self._free.append, address)
                comes_back.atexit = False
                try:
                    self._put(stream.pointer, address, semaphore)
                except BaseException:
                    comes_back.detach()  # who knows what the stream still does with the word
                    del self._calls[address]
                    raise
        except device.api.errors as error:
            raise device.api.failure(
                f"call in {stream!r}, by stream memory operations", error
            ) from error
        device.retain(stream, (call,))

    def raise_failures(self, pointer: int | None = None) -> None:
        """Raise the first exception of a stream's functions, or of all, and forget the others."""
        if not self._failures:
            return
        with self._lock:
            mine = [f for f in self._failures if pointer is None or f[0] == pointer]
            self._failures = [f for f in self._failures if f not in mine]
        if mine:
            _, name, error = mine[0]
            raise DeviceError(
                f"host function {name} on {self._device.name} failed: {error!r}"
            ) from error

    def _put(self, stream: int, address: int, semaphore: Semaphore) -> None:
        """Put what calls a function on a stream."""
        api = self._device.api
        if not self._context.ready:  # as for a launch: no context before a call of the runtime
            with api.relaxed():
                api.runtime.setDevice(self._device.index)
                api.runtime.memGetInfo()
            self._context.ready = True
        library, word = api.library, ctypes.c_uint64(address)
        try:
            write, wait = library.cuStreamWriteValue32_v2, library.cuStreamWaitValue32_v2
        except AttributeError as error:
            message = f"Stream.call needs a driver of CUDA 11.7 or newer: {error}"
            raise DeviceError(message) from None
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
        """Return what wakes the thread, started at the first call."""
        with self._lock:
            if self._semaphore is None:
                self._semaphore = semaphore = Semaphore()
                self._thread = threading.Thread(
                    target=_serve, args=(semaphore, weakref.ref(self)),
                    name=f"kvcupy host functions, {self._device.name}", daemon=True,
                )  # fmt: skip
                self._thread.start()
                weakref.finalize(self, semaphore.post).atexit = False
                atexit.register(_drain, weakref.ref(self._device))
            return self._semaphore

    def _take_word(self) -> int:
        """Return the address of an idle word."""
        with suppress(IndexError):
            return self._free.pop()
        api = self._device.api
        with api.relaxed():
            memory = api.cupy.cuda.PinnedMemory(4 * _WORDS, HOST_ALLOC_PORTABLE | HOST_ALLOC_MAPPED)
        words = arrays.array_at(memory, memory.ptr, (_WORDS,), np.dtype(np.uint32))
        words[:] = IDLE
        self._blocks.append((memory, words))
        self._free.extend(range(memory.ptr + 4, memory.ptr + words.nbytes, 4))
        return int(memory.ptr)

    def call_arrived(self) -> None:
        """Call the functions that streams have come to."""
        for memory, words in tuple(self._blocks):
            for i in np.flatnonzero(words == ARRIVED).tolist():
                self._call(memory.ptr + 4 * i)
                words[i] = RETURNED  # from here on somebody else may let go of the function

    def _call(self, address: int) -> None:
        call = self._calls.get(address)
        if call is None:  # it could not be put on its stream as a whole
            return
        try:
            call.function()
        except BaseException as error:
            name = getattr(call.function, "__name__", repr(call.function))
            with self._lock:
                self._failures.append((call.where(), name, error))


class Semaphore:
    """A semaphore of the C library's, which the driver can post.

    It stays when this object goes: the driver may post it as long as the process lives.

    Attributes
    ----------
    address : where it is
    post_function : the address of `sem_post`
    """

    def __init__(self) -> None:
        self.address, _ = host_memory.map_pages(1)
        self._libc = _libc()
        self.post_function = ctypes.cast(self._libc.sem_post, ctypes.c_void_p).value or 0
        self._libc.sem_init(self.address, 0, 0)

    def post(self) -> None:
        """Let one wait return."""
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
    """Call functions until nobody can put any on a stream. Keeps nothing alive while it waits."""
    while True:
        semaphore.wait()
        calls = owner()
        if calls is None:
            return
        calls.call_arrived()
        del calls


def _drain(owner: weakref.ref[CudaDevice]) -> None:
    """Let functions run while there is an interpreter to run them: a stream waits for ever else."""
    device = owner()
    if device is not None:
        with suppress(*device.api.errors), device.current():
            device.api.runtime.deviceSynchronize()
