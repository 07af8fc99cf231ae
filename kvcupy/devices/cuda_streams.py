"""Streams of a GPU: CUDA's own, with the rules of capture checked before CUDA is asked.

CUDA answers an illegal call during a capture by spoiling the capture. Here such a call raises
`CaptureError` instead and CUDA never sees it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import observe
from ..errors import CaptureError
from ..pickling import ProcessLocal
from .cuda_events import Event
from .cuda_graph import FOREIGN, ForeignPoint, Graph

if TYPE_CHECKING:
    from .cuda import CudaDevice
    from .launch_hooks import Hook

_DEFAULT_STREAMS = {0: "default stream", 1: "default stream", 2: "per-thread default stream"}


class Handle:
    """Somebody else's stream in the form in which CuPy takes it; keeps the object alive."""

    def __init__(self, pointer: int, source: object) -> None:
        self.pointer = pointer
        self.source = source

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.pointer)


class Stream(ProcessLocal):
    """A CUDA stream: one of kvcupy's own, or a light wrapper around another library's.

    Two wrappers of one CUDA stream are equal.

    Attributes
    ----------
    pointer : the CUDA stream
    library : whose current stream this was when it was asked for; empty for an explicit one
    name : for people; may be set
    """

    _numbers = itertools.count(1)

    __slots__ = ("__weakref__", "_cupy", "_priority", "_source", "device", "library", "name",
                 "pointer")  # fmt: skip

    def __init__(
        self,
        device: CudaDevice,
        pointer: int,
        source: object = None,
        *,
        cupy_stream: Any = None,
        library: str = "",
        name: str = "",
        priority: int | None = None,
    ) -> None:
        self.device = device
        self.pointer = pointer
        self.library = library
        self.name = name or _DEFAULT_STREAMS.get(pointer) or f"stream {pointer:#x}"
        self._source = source
        self._cupy = cupy_stream
        self._priority = priority

    @classmethod
    def create(cls, device: CudaDevice, priority: int) -> Stream:
        """Return a new stream that does not synchronise with the default stream."""
        try:
            with device.current(), device.api.relaxed():
                made = device.api.cupy.cuda.Stream(non_blocking=True, priority=priority)
        except device.api.errors as error:
            raise device.api.failure(f"stream on {device.name}", error) from error
        name = f"stream {next(cls._numbers)}"
        return cls(device, made.ptr, cupy_stream=made, name=name, priority=priority)

    def __repr__(self) -> str:
        return f"<{self.name} of {self.device.name}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return NotImplemented
        return self.pointer == other.pointer and self.device is other.device

    def __hash__(self) -> int:
        return hash((self.pointer, self.device.index))

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return version and address (the CUDA stream protocol)."""
        return (0, self.pointer)

    @property
    def priority(self) -> int:
        """Lower numbers go first."""
        if self._priority is None:
            with self.device.current():
                self._priority = int(self.device.api.runtime.streamGetPriority(self.pointer))
        return self._priority

    @property
    def cupy(self) -> Any:
        """The same stream as a CuPy stream."""
        if self._cupy is None:
            handle = Handle(self.pointer, self._source)
            self._cupy = self.device.api.cupy.cuda.Stream.from_external(handle)
        return self._cupy

    @property
    def capturing(self) -> bool:
        """Whether the stream is part of a capture, anybody's."""
        return self.device.capture_of(self.pointer) is not None

    @property
    def capture_id(self) -> int | None:
        """CUDA's number of the capture that the stream is part of; None outside, or if spoilt."""
        if not self.capturing:  # CuPy tells sooner, and gives the thread the device's context
            return None
        with self.device.current():
            return self.device.api.capture_id(self.pointer)

    @property
    def retains_owners(self) -> bool:
        """Whether owners live until work here has run, replays too: not in somebody's capture."""
        return self.device.capture_of(self.pointer) is not FOREIGN

    def wait(self, other: Any) -> None:
        """Let later work here wait for an event, or for all that a stream holds so far.

        Raises
        ------
        CaptureError : a captured stream is to wait for work outside its capture
        """
        if isinstance(other, Event):
            event = other
        else:
            stream = other if isinstance(other, Stream) else self.device.as_stream(other)
            if stream == self:
                return
            event = stream.record()
        here = self.device.capture_of(self.pointer)
        if event.recorded:
            self._check_boundary(here, event.capture)
            self._call("wait", self.device.api.runtime.streamWaitEvent, event.pointer)
            if here is None and isinstance(event.capture, Graph):
                event.capture.join(self)
        observe.waited(self, event)

    def record(self, event: Any = None) -> Event:
        """Record `event`, or a new one, behind all that the stream holds so far.

        Raises
        ------
        TypeError, ValueError : `event` is none of kvcupy's, or another GPU's
        """
        if event is None:
            event = Event(self.device)
        elif not isinstance(event, Event):
            raise TypeError(f"event: expected an event of {self.device.name}, got {event!r}")
        elif event.device is not self.device:
            raise ValueError(
                f"event: expected one of {self.device.name}, got one of {event.device.name}"
            )
        capture = self.device.capture_of(self.pointer)
        try:
            with self.device.current():
                self.device.api.record(event.pointer, self.pointer)
        except self.device.api.errors as error:
            raise self.device.api.failure(f"record in {self!r}", error) from error
        event.mark(self, ForeignPoint(self) if capture is FOREIGN else capture)
        observe.recorded(event, self)
        recorded: Event = event
        return recorded

    def synchronize(self) -> None:
        """Wait for all work.

        Raises
        ------
        DeviceError : the GPU, or a host function of this stream, has failed
        CaptureError : the stream is being captured
        """
        self._refuse_captured("synchronising it")
        self._call("synchronize", self.device.api.runtime.streamSynchronize)
        self.device.retired.reap((self.pointer,))
        self.device.calls.raise_failures(self.pointer)

    def done(self) -> bool:
        """Return whether all work is done; raise as `synchronize` does."""
        self._refuse_captured("asking whether it is done")
        api = self.device.api
        with self.device.current(), api.relaxed():
            status = api.runtime.streamQuery(self.pointer)
        done = api.query(repr(self), status)
        self.device.calls.raise_failures(self.pointer)
        return done

    def call(self, function: Callable[[], object]) -> None:
        """Call a host function in the order of the stream.

        An exception in it surfaces as DeviceError at the next synchronisation.

        Raises
        ------
        DeviceError : the driver has no stream memory operations, by which the stream waits
        CaptureError : the stream is captured by another library

        Notes
        -----
        The function runs on a thread of kvcupy's, one for all streams of the device, while this
        stream waits for it, and whatever shares a hardware queue with it. It must not wait for the
        GPU, which allocating and freeing memory may do too, nor for another such function. It lives
        until the stream has passed. Capture: legal; each replay calls it again.
        """
        observe.issue(
            lambda: observe.Operation("call", self),
            lambda: self.device.calls.enqueue(self, function),
        )

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Record what is put on this stream, and on streams that wait for it, into a graph.

        Raises
        ------
        CaptureError : the stream is being captured already or cannot be, or a fork was not joined

        Notes
        -----
        The mode is relaxed: an allocation inside the block may grow the memory pool. What CuPy
        allocates inside the block and the graph uses must outlive the graph.
        """
        if self.pointer in (0, 1):
            raise CaptureError("the default stream cannot be captured; use device.stream()")
        self._refuse_captured("a second capture")
        graph = Graph(self.device)
        graph.begin(self)
        try:
            yield graph
        except BaseException:
            graph.abort()
            raise
        graph.finish()

    def on_launch(self, before: Hook, after: Hook) -> None:
        """Let the graph that this stream is captured into call functions around each launch.

        Parameters
        ----------
        before, after : called with the stream that the graph is launched on

        Raises
        ------
        CaptureError : the stream is not being captured, or by another library
        """
        graph = self.device.capture_of(self.pointer)
        if graph is None:
            raise CaptureError(f"{self.name} is not being captured: there is no graph to launch")
        if graph is FOREIGN:
            raise CaptureError(f"{self.name} is captured by another library; use Stream.capture")
        graph.hooks.add(before, after)

    def _check_boundary(self, here: Graph | None, there: Graph | ForeignPoint | None) -> None:
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

    def _call(self, what: str, function: Callable[..., object], *arguments: int) -> None:
        try:
            with self.device.current(), self.device.api.relaxed():
                function(self.pointer, *arguments)
        except self.device.api.errors as error:
            raise self.device.api.failure(f"{what}, {self!r}", error) from error
