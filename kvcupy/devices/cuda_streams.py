"""Streams of a GPU, their events and graphs, and other libraries' streams.

CUDA answers an illegal call during a capture by invalidating the capture. Here such a call raises
`CaptureError` instead, and CUDA never sees it.

The current stream of CuPy or torch is queried at every call: one remembered from an earlier call
would send work to a stream that is never waited for, or leave it out of a capture.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .. import observe
from ..cuda_api import NON_BLOCKING, UNJOINED, StreamAddress
from ..errors import CaptureError, DeviceError, ProcessLocal, Unpicklable, finalize
from .cuda_context import FOREIGN, Capture, CudaContext
from .protocol import Device, Hook

_DEFAULT_STREAM_NAMES = {0: "default stream", 1: "default stream", 2: "per-thread default stream"}
_LEGACY_STREAMS = (0, 1)  # two handles of one stream


class Stream(Unpicklable):
    """A CUDA stream: kvcupy's own, or a light wrapper around another library's.

    Two wrappers of one CUDA stream are equal.
    """

    _numbers = itertools.count(1)

    __slots__ = ("__weakref__", "_cupy", "_priority", "_source", "context", "device", "library",
                 "name", "pointer")  # fmt: skip

    def __init__(
        self, context: CudaContext, pointer: int, source: object = None, *,
        cupy_stream: Any = None, library: str = "", name: str = "", priority: int | None = None,
    ) -> None:  # fmt: skip
        self.context = context
        self.device: Device = context.device
        self.pointer = pointer
        self.library = library  # whose current stream this was; empty for an explicit one
        self.name = name or _DEFAULT_STREAM_NAMES.get(pointer) or f"stream {pointer:#x}"
        self._source = source
        self._cupy = cupy_stream
        self._priority = priority

    @classmethod
    def create(cls, context: CudaContext, priority: int) -> Stream:
        """Return a new stream that does not synchronise with the default stream."""
        with context.relaxed(f"stream on {context.name}"):
            pointer = context.api.runtime.streamCreateWithPriority(NON_BLOCKING, priority)
        owner = StreamAddress(pointer)
        # Not CuPy's Stream, which another library's capture would not allow to be destroyed. After
        # the interpreter, CUDA may be gone.
        finalize(owner, _release, context, pointer)
        name = f"stream {next(cls._numbers)}"
        stream = cls(context, pointer, owner, name=name, priority=priority)
        return stream

    def __repr__(self) -> str:
        return f"<{self.name} of {self.context.name}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return NotImplemented
        return self.pointer == other.pointer and self.context is other.context

    def __hash__(self) -> int:
        return hash((self.pointer, self.context.index))

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return version and address (the CUDA stream protocol)."""
        return (0, self.pointer)

    @property
    def priority(self) -> int:
        """Lower numbers go first."""
        if self._priority is None:
            with self.context.current():
                self._priority = int(self.context.api.runtime.streamGetPriority(self.pointer))
        return self._priority

    @property
    def cupy(self) -> Any:
        """The same stream as a CuPy stream."""
        if self._cupy is None:
            handle = StreamAddress(self.pointer, self._source)
            self._cupy = self.context.api.cupy.cuda.Stream.from_external(handle)
        return self._cupy

    def lend(self) -> None:
        """Keep the CUDA stream for as long as the process lives: another library may use it."""
        self.context.lent_streams.setdefault(self.pointer, self._source)

    @property
    def identity(self) -> tuple[str, int]:
        """What is equal for all wrappers of one CUDA stream, and keeps none of them alive."""
        pointer = 0 if self.pointer in _LEGACY_STREAMS else self.pointer
        # CUDA gives the address of a stream that was destroyed to a new one.
        return self.context.name, pointer | self.context.destroyed_streams.get(pointer, 0) << 64

    @property
    def owner(self) -> Any:
        """The CuPy stream that destroys the CUDA stream when it is dropped; None if unknown."""
        source, kind = self._source, self.context.api.cupy.cuda.Stream
        is_owner = isinstance(source, kind) and source.device_id != -1
        return source if is_owner and not hasattr(source, "_foreign_stream_ref") else None

    @property
    def capturing(self) -> bool:
        """Whether the stream is part of a capture, kvcupy's or another library's."""
        return self.context.capture_of(self.pointer) is not None

    @property
    def capture_id(self) -> int | None:
        """CUDA's number of the capture that the stream is part of; None if none, or invalidated."""
        if not self.capturing:  # cheaper, and gives the thread the device's context
            return None
        with self.context.current():
            return self.context.api.capture_id(self.pointer)

    @property
    def retains_owners(self) -> bool:
        """Whether owners live until work here has run, replays too: not in another's capture."""
        return self.context.capture_of(self.pointer) is not FOREIGN

    def wait(self, other: Any) -> None:
        """Let later work here wait for an event, or for all that a stream holds so far."""
        if isinstance(other, Event):
            event = other
        else:
            is_ours = isinstance(other, Stream)
            stream: Any = other if is_ours else self.context.device.as_stream(other)
            if stream == self:
                return
            event = stream.record()
        here = self.context.capture_of(self.pointer)
        if event.recorded:
            self._check_boundary(here, event.capture)
            try:
                with self.context.current():
                    self.context.api.runtime.streamWaitEvent(self.pointer, event.pointer)
            except self.context.api.errors as error:
                raise self.context.api.failure(f"wait, {self!r}", error) from error
            if here is None and isinstance(event.capture, Capture):
                event.capture.join(self)
        observe.waited(self, event)

    def record(self, event: Any = None) -> Event:
        """Record `event`, or a new one, after all that the stream holds so far."""
        if event is None:
            event = Event(self.context)
        elif not isinstance(event, Event):
            raise TypeError(f"event: expected an event of {self.context.name}, got {event!r}")
        elif event.context is not self.context:
            raise ValueError(
                f"event: expected one of {self.context.name}, got one of {event.context.name}"
            )
        capture = self.context.capture_of(self.pointer)
        try:
            with self.context.current():
                self.context.api.runtime.eventRecord(event.pointer, self.pointer)
        except self.context.api.errors as error:
            raise self.context.api.failure(f"record in {self!r}", error) from error
        event._stream = self
        event._num_calls = self.context.calls.count
        event.capture = ForeignPoint(self) if capture is FOREIGN else capture
        observe.recorded(event, self)
        return event  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """Wait for all work on the stream."""
        self._refuse_captured("synchronising it")
        with self.context.relaxed(f"synchronize, {self!r}"):
            self.context.api.runtime.streamSynchronize(self.pointer)
        if observe.order_observers:
            observe.synchronized(self)
        self.context.retired.reap((self.pointer,))
        self.context.calls.raise_failures(self)

    def done(self) -> bool:
        """Return whether all work is done; raise as `synchronize` does."""
        self._refuse_captured("asking whether it is done")
        api = self.context.api
        with self.context.current(), api.relaxed():
            status = api.runtime.streamQuery(self.pointer)
        done = api.query(repr(self), status)
        self.context.calls.raise_failures(self)
        if done and observe.order_observers:
            observe.synchronized(self)
        return done

    def call(self, function: Callable[[], object]) -> None:
        """Call a host function in the order of the stream.

        An exception in it surfaces as DeviceError at the next synchronisation.

        The function runs on a kvcupy thread, one for all streams of the device, while this stream
        waits for it, and with it any stream that shares its hardware queue; there are as many of
        those as CUDA_DEVICE_MAX_CONNECTIONS says. The function must not wait for the GPU, nor for
        another such function, nor for a thread that waits for the GPU. A thread also waits, for
        streams that a function holds up, when it uses a kernel for the first time, which loads it,
        or frees device or pinned memory. So load kernels before, and free memory after. The
        function is kept until the stream has passed. Capture: legal; each replay calls it again.
        """
        observe.call(self, function, lambda called: self.context.calls.enqueue(self, called))

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Record what is put on this stream, and on streams that wait for it, into a graph.

        The mode is relaxed: an allocation inside the block may grow the memory pool. What CuPy
        allocates inside the block and the graph uses must outlive the graph.
        """
        if self.pointer in _LEGACY_STREAMS:
            raise CaptureError("the default stream cannot be captured; use device.stream()")
        self._refuse_captured("a second capture")
        graph = Graph(self.context)
        graph.begin(self)
        observe.capture_began(graph, self)
        try:
            yield graph
        except BaseException:
            graph.abort()
            raise
        else:
            graph.finish()
        finally:
            observe.capture_ended(graph)

    def on_launch(self, before: Hook, after: Hook) -> None:
        """Let the graph of the capture call functions around each launch (`protocol.Stream`)."""
        graph = self.context.capture_of(self.pointer)
        if graph is None:
            raise CaptureError(f"{self.name} is not being captured: there is no graph to launch")
        if graph is FOREIGN:
            raise CaptureError(f"{self.name} is captured by another library; use Stream.capture")
        graph.hooks.add(before, after)

    def _check_boundary(self, here: Capture | None, there: Capture | ForeignPoint | None) -> None:
        if here is None or here is there:
            return
        if there is None:
            raise CaptureError("a captured stream cannot wait for work outside the capture")
        number = self.capture_id if here is FOREIGN else here.id
        if number != there.id:
            raise CaptureError("two captures cannot wait for one another")

    def _refuse_captured(self, what: str) -> None:
        if self.capturing:
            raise CaptureError(f"{self.name} is being captured: {what} is illegal")


def _release(context: CudaContext, pointer: int) -> None:
    """Destroy a stream, on any thread and during any capture; CUDA lets its work end."""
    context.destroyed_streams[pointer] = context.destroyed_streams.get(pointer, 0) + 1
    with suppress(*context.api.errors), context.current(), context.api.relaxed():
        context.api.runtime.streamDestroy(pointer)


# --- Events ---------------------------------------------------------------------------------------


class Event(Unpicklable):
    """A point in a stream; recording it again moves it. Made by `Device.event`.

    An event that was never recorded, or last in a capture that has ended, counts as done.
    """

    __slots__ = (
        "__weakref__", "_handle", "_num_calls", "_stream", "capture", "context", "timing"
    )  # fmt: skip

    def __init__(self, context: CudaContext, timing: bool = False) -> None:
        self.context = context
        self.timing = timing
        self._handle = 0  # no CUDA event before the first record
        self._stream: Stream | None = None  # of the last record
        self._num_calls = 0  # host functions before the last record
        self.capture: Capture | ForeignPoint | None = None  # in which it was last recorded

    def __del__(self) -> None:
        if self._handle and not sys.is_finalizing():
            self.context.events.give(self._handle, self.timing)

    @property
    def pointer(self) -> int:
        """The CUDA event, made at the first use."""
        if not self._handle:
            self._handle = self.context.events.take(self.timing)
        return self._handle

    @property
    def recorded(self) -> bool:
        """Whether there is a point to wait for."""
        return self._handle != 0 and (self.capture is None or self.capture.open)

    def done(self) -> bool:
        """Return whether the stream has passed the point."""
        self._refuse_captured()
        if not self.recorded:
            return True
        api = self.context.api
        with self.context.current(), api.relaxed():
            status = api.runtime.eventQuery(self._handle)
        done = api.query("event", status)
        if done and observe.order_observers:
            observe.synchronized(self)
        return done

    def synchronize(self) -> None:
        """Wait until the stream has passed the point; raise as `done` does."""
        self._refuse_captured()
        if not self.recorded:
            return
        api = self.context.api
        try:
            with self.context.current(), api.relaxed():
                api.runtime.eventSynchronize(self._handle)
        except api.errors as error:
            raise api.failure("waiting for an event", error) from error
        if observe.order_observers:
            observe.synchronized(self)
        self.context.calls.raise_failures(self._stream, self._num_calls)

    def error(self) -> BaseException | None:
        """Return None: after a failure on a GPU every later call raises."""
        return None

    def elapsed_us(self, since: Any) -> float:
        """Return the microseconds from `since` to this event, waiting for both."""
        for name, event in (("event", self), ("since", since)):
            if not isinstance(event, Event) or not event.timing or not event.recorded:
                raise ValueError(f"{name}: expected a recorded event made with timing=True")
            event.synchronize()
        api = self.context.api
        with api.errors_as("time between two events"):
            return float(api.runtime.eventElapsedTime(since._handle, self._handle)) * 1000

    def _refuse_captured(self) -> None:
        if self.capture is not None and self.capture.open:
            raise CaptureError("an event recorded in a capture cannot be waited for by the host")


# --- Captures and graphs --------------------------------------------------------------------------


class Graph(Capture, ProcessLocal):
    """A capture and the graph that it becomes. Each launch reads the arrays again."""

    _graph: Any = None

    def __init__(self, context: CudaContext) -> None:
        super().__init__()
        self.context = context

    def __del__(self) -> None:
        if self._graph is None or sys.is_finalizing():
            return
        api = self.context.api
        with suppress(*api.errors), self.context.current(), api.relaxed():
            self._graph = None
            self.kept.clear()

    def begin(self, stream: Stream) -> None:
        context = self.context
        with context.api.errors_as(f"capture of {stream!r}"), context.current():
            stream.cupy.begin_capture(context.api.runtime.streamCaptureModeRelaxed)
            self.id = context.api.capture_id(stream.pointer)
        self.last_stream = stream
        self.join(stream)

    def finish(self) -> None:
        context = self.context
        try:
            with context.current(), context.api.relaxed():  # instantiation allocates memory
                self._graph = self._origin.cupy.end_capture()
        except context.api.errors as error:
            if getattr(error, "status", None) == UNJOINED:
                forks = ", ".join(sorted({s.name for s in self.streams[1:]})) or "a stream"
                raise CaptureError(
                    f"{forks}: forked into the capture of {self._origin.name} and not joined; let "
                    f"{self._origin.name} wait for it before the block ends"
                ) from error
            raise context.api.failure(f"end of the capture of {self._origin!r}", error) from error
        finally:
            self._close()

    def abort(self) -> None:
        """End the capture and drop what it holds; the streams are usable again."""
        context = self.context
        try:
            # If it is invalidated, or a fork is not joined, CUDA raises and ends it all the same.
            with context.current(), context.api.relaxed(), suppress(RuntimeError):
                self._origin.cupy.end_capture()
        finally:
            self._close()

    def launch(self, stream: Any = None) -> None:
        """Replay on a stream; None means CuPy's current one.

        Capture: illegal. CUDA launches no graph into a capture; capture the work itself there.
        """
        if self._graph is None:
            raise CaptureError("the graph cannot be launched: its capture did not end well")
        target: Any = self.context.device.as_stream(stream, "cupy")
        with self.hooks.around(target):
            observe.issue(
                lambda: observe.Operation("graph", target, graph=self),
                lambda: self._launch(target),
            )

    def _launch(self, target: Stream) -> None:
        context = self.context
        self.last_stream = target
        try:
            with context.current(), context.api.relaxed():  # the first one may allocate memory
                self._graph.launch(target.cupy)
        except context.api.errors as error:
            raise context.api.failure(f"launch of a graph on {target!r}", error) from error
        context.retain(target, (self,))

    @property
    def _origin(self) -> Stream:
        if not self.streams:
            raise DeviceError("the capture was never begun")
        origin: Stream = self.streams[0]
        return origin

    def _close(self) -> None:
        self.open = False
        if self._graph is None:
            with self.context.current(), self.context.api.relaxed():
                self.kept.clear()
        for stream in self.streams:
            self.context.captures.pop(stream.pointer, None)


class ForeignPoint:
    """Where an event was recorded in another library's capture; `id` is CUDA's number of that."""

    __slots__ = ("_stream", "id")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream  # knows whether the capture has ended
        self.id = stream.capture_id

    @property
    def open(self) -> bool:
        """Whether the capture has not ended; also while it is invalidated."""
        return self._stream.capturing and self._stream.capture_id in (self.id, None)


# --- Other libraries' streams ---------------------------------------------------------------------


def current_stream(context: CudaContext, library: str, name: str = "stream") -> Stream:
    """Return the current stream of torch, or CuPy's for the arrays of any other library.

    Where `library` is empty, as no array decides, the two must not disagree, or it is a ValueError.
    """
    if not library:
        return _agreed_stream(context, name)
    if library == "torch":
        torchs = sys.modules["torch"].cuda.current_stream(context.index)
        return Stream(context, torchs.cuda_stream, torchs, library="torch")
    cupys = context.api.cupy.cuda.get_current_stream(context.index)
    return Stream(context, cupys.ptr, cupys, cupy_stream=cupys, library="cupy")


def _agreed_stream(context: CudaContext, name: str) -> Stream:
    """Return the stream that was made current in torch, in CuPy or in both, else CuPy's default.

    Inside `torch.cuda.stream(s)` or `torch.cuda.graph`, torch's stream is meant, though the memory
    may have come from CuPy.
    """
    from_cupy = current_stream(context, "cupy")
    if not _torch_uses_gpus():
        return from_cupy
    from_torch = current_stream(context, "torch")
    if from_torch == from_cupy or from_torch.pointer in _LEGACY_STREAMS:
        return from_cupy
    if from_cupy.pointer in (*_LEGACY_STREAMS, context.api.default_stream):
        return from_torch
    raise ValueError(
        f"{name}: expected one of {context.name}, got None while CuPy's current stream is "
        f"{from_cupy.pointer:#x} and torch's is {from_torch.pointer:#x}; pass the one that is meant"
    )


def _torch_uses_gpus() -> bool:
    """Return whether torch has used a GPU: else to ask it anything would initialise all of them."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def is_current_captured(context: CudaContext) -> bool:
    """Return whether CuPy's or torch's current stream is being captured, as in torch.cuda.graph."""
    libraries = ("cupy", "torch") if _torch_uses_gpus() else ("cupy",)
    return any(current_stream(context, library).capturing for library in libraries)


def adopt(context: CudaContext, stream: Any, name: str = "stream") -> Stream:
    """Return another library's stream as a stream of this GPU; raise as `CudaDevice.as_stream`."""
    cuda = context.api.cupy.cuda
    if isinstance(stream, (cuda.Stream, getattr(cuda, "ExternalStream", cuda.Stream))):
        _require_index(context, name, stream, stream.device_id)
        return Stream(context, stream.ptr, stream, cupy_stream=stream)
    its_device = getattr(stream, "device", None)
    if getattr(its_device, "kind", "cuda") != "cuda":  # a stream of kvcupy's host device
        raise ValueError(f"{name}: expected one of {context.name}, got {stream!r}")
    if isinstance(pointer := getattr(stream, "cuda_stream", None), int):  # torch
        _require_index(context, name, stream, getattr(its_device, "index", None))
        return Stream(context, pointer, stream)
    pointer = _protocol_pointer(stream, name)
    index = getattr(its_device, "device_id", None)  # cuda.core
    _require_index(context, name, stream, index if isinstance(index, int) else None)
    return Stream(context, pointer, stream)


def _protocol_pointer(stream: Any, name: str) -> int:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None or isinstance(stream, type):
        raise TypeError(
            f"{name}: expected None, a kvcupy, CuPy or torch stream, or an object with "
            f"__cuda_stream__, got {type(stream).__name__}"
        )
    match answer := protocol() if callable(protocol) else protocol:
        case (0, int(pointer)):
            return pointer
    raise TypeError(f"{name}: expected __cuda_stream__() == (0, address), got {answer!r}")


def _require_index(context: CudaContext, name: str, stream: object, index: int | None) -> None:
    if index is not None and index not in (-1, context.index):  # CuPy's -1: any device
        raise ValueError(
            f"{name}: expected one of {context.name}, got one of cuda:{index}: {stream!r}"
        )
