"""Which work touches pages and tables, and which streams have to wait for it.

Every wait between streams of a cache is expressed by one of four things:

    Completion     a piece of work: queued, in flight, over or failed. Streams and hosts wait for it
    AccessOrder    streams that access the same bytes, one after another
    CopyStream     the stream of a cache's page and table copies, on which failures must surface
    PageAccess     work on the pages of a paged cache outside of attention, ordered by these

An allocator keeps freed pages back while a `Completion` touches them (`PageAllocator._mark_busy`).
A `TransferEngine` orders its loads and saves that touch the same pages by the events of its
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import CaptureError, DeviceError, KvcupyError, device_failure

if TYPE_CHECKING:
    from ..devices.protocol import Device, Event, Stream

_MAX_SPARE_EVENTS = 8  # kept for later accesses


# --- One piece of work ---


class Completion(Protocol):
    """Work that is queued, in flight, over, or has failed.

    `wait` and `wait_layer` order a stream after it, and raise DeviceError if it has failed. `done`
    and `synchronize` say when it no longer touches memory; in a handle for users (`Transfer`) they
    raise the failure too, in all others they leave it to `failure`. Each of them may raise
    CaptureError, which does not mean that the work has failed.
    """

    @property
    def failure(self) -> BaseException | None:
        """Why it has failed, as far as that is known. Neither waits nor raises."""

    def done(self) -> bool:
        """Return whether it is over, including after a failure. Does not wait."""
        ...

    def synchronize(self) -> None:
        """Block the host until it is over, including after a failure."""

    def wait(self, stream: Any = None) -> None:
        """Let later work of a stream wait for all of it."""

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Let later work of a stream wait for one layer; for all of it where it has no layers."""
        self.wait(stream)


def raise_failure(failure: BaseException | None) -> None:
    """Raise the failure of a completion, if there is one, with its cause."""
    if failure is not None:
        raise failure from failure.__cause__


class StreamCompletion(Completion):
    """All work of a stream so far. Its failure still surfaces for the owner of the stream too."""

    _failed = "the pages were never written"

    def __init__(self, stream: Stream) -> None:
        self._device = stream.device
        self._event = stream.record()
        self._relay: Stream | None = None

    @property
    def failure(self) -> BaseException | None:
        if (error := self._event.error()) is None:
            return None
        if self._relay is not None:  # it has passed, and its failure would surface nowhere else
            with suppress(DeviceError):
                self._relay.synchronize()
        return device_failure(f"{self._failed}: {error!r}", error)

    def done(self) -> bool:
        return self._event.done()

    def synchronize(self) -> None:
        with suppress(DeviceError):
            self._behind().synchronize()

    def wait(self, stream: Any = None) -> None:
        waiting = waiting_stream(self._device, stream, "pages")
        raise_failure(self.failure)
        if not self._event.done():
            waiting.wait(self._behind().record())
        raise_failure(self.failure)

    def _behind(self) -> Stream:
        """Return a stream after that work; waiting for the event would surface its failure."""
        if self._relay is None:
            relay = self._device.stream()
            relay.wait(self._event)
            self._relay = relay
        return self._relay


class CopiedPages(StreamCompletion):
    """Copies on the copy stream, which streams wait for elsewhere: `wait` only raises a failure."""

    _failed = "pages of the sequence were never copied"

    @property
    def succeeded(self) -> bool:
        """Whether the copies are over, and none has failed."""
        try:
            return self._event.done() and self._event.error() is None
        except DeviceError:  # the GPU has failed
            return False

    def wait(self, stream: Any = None) -> None:
        raise_failure(self.failure)


def waiting_stream(device: Device, stream: Any, awaited: str) -> Stream:
    """Return a stream argument as the Stream that is to wait, which must not be captured."""
    waiting = device.as_stream(stream)
    if waiting.capturing:
        raise CaptureError(f"stream: a captured stream cannot wait for {awaited} outside it")
    return waiting


# --- Streams that access the same bytes ---


@dataclass(eq=False, slots=True)
class _Access:
    """The work of a stream on the bytes, up to an event; None: it could not be recorded yet."""

    stream: Stream
    event: Event | None
    waited: set[Stream] = field(default_factory=set)  # streams that have waited for it


class AccessOrder:
    """Makes streams of one device that work on the same bytes wait for one another.

        stream A   begin | work | end
        stream B                      begin: wait for A | work | end
        stream C                                                     begin: wait for B | ...

    C need not wait for A: B has ended its access after A's, and has waited for it.

    Notes
    -----
    Stream: `begin` before the first work on the bytes, `end` after the last. Streams that begin
    before any of them ends are not ordered. The host does not wait, unless the stream is the
    calling thread. An access is remembered until a stream that has waited for it ends an
    access. So there are as many accesses as streams that work at once, however many streams there
    have been. Not for several threads at once.

    Examples
    --------
    >>> import kvcupy as kv
    >>> host, seen = kv.device("host"), []
    >>> order, streams = AccessOrder(), [host.stream() for _ in range(3)]
    >>> for i, stream in enumerate(streams):
    ...     order.begin(stream)
    ...     stream.call(lambda i=i: seen.append(i))
    ...     order.end(stream)
    >>> streams[2].synchronize(), seen, len(order)
    (None, [0, 1, 2], 1)
    """

    def __init__(self) -> None:
        self._ended: dict[Stream, _Access] = {}
        self._spare: list[Event] = []

    def __len__(self) -> int:
        """Return how many accesses a new stream would wait for."""
        return len(self._ended)

    def begin(self, stream: Stream) -> None:
        """Make `stream` wait for the accesses of others, unless it has already."""
        if stream.capturing:
            raise CaptureError(
                f"stream: {stream.name} is being captured and cannot wait for work outside"
            )
        for access in list(self._ended.values()):
            if access.stream != stream and stream not in access.waited:
                stream.wait(access.event or self._record_late(access))
                access.waited.add(stream)

    def end(self, stream: Stream) -> None:
        """Record the work of `stream` so far; if that fails, the next stream waits for all."""
        access = _Access(stream, None)
        with suppress(KvcupyError):
            access.event = self._record(stream)
        for earlier in list(self._ended.values()):
            if earlier.stream == stream or stream in earlier.waited:
                self._forget(earlier)
        self._ended[stream] = access

    def end_later(self, stream: Stream) -> None:
        """Do as `end`, but record when a stream waits: a record now could spoil a capture."""
        self._ended[stream] = _Access(stream, None)

    def take_over(self, stream: Stream) -> None:
        """Make `stream` wait for all accesses, and forget them: later ones wait for `stream`."""
        for access in list(self._ended.values()):
            stream.wait(access.event or self._record_late(access))
            self._forget(access)

    def _record_late(self, access: _Access) -> Event:
        access.event = self._record(access.stream)
        if access.event is None:
            raise CaptureError(
                f"{access.stream.name} is being captured and may still use this memory; end its "
                "capture first"
            )
        return access.event

    def _record(self, stream: Stream) -> Event | None:
        if stream.capturing:
            return None
        return stream.record(self._spare.pop() if self._spare else None)

    def _forget(self, access: _Access) -> None:
        """Drop an access that a later one covers; a wait for its event is for what it held then."""
        del self._ended[access.stream]
        if access.event is not None and len(self._spare) < _MAX_SPARE_EVENTS:
            self._spare.append(access.event)


# --- Pages of a paged cache ---


class CopyStream:
    """The stream of a cache's table and page copies: the user's, or one of the cache."""

    def __init__(self, device: Device, stream: Any = None) -> None:
        self.stream: Stream = (
            device.stream() if stream is None else device.as_stream(stream, name="copy_stream")
        )
        if stream is None:
            self.stream.name = "tables"
        self._owns_stream = stream is None
        self._recorded = device.event()
        self._last: Event | None = None

    def recover(self) -> None:
        """Surface an earlier failure, which is raised if the user passed the stream."""
        if self.stream.capturing:
            raise CaptureError(f"copy_stream: {self.stream.name} is being captured")
        if self._last is not None and self._last.error() is not None:
            self.synchronize(self._last)

    def record(self, event: Event | None = None) -> None:
        """Record the last work on the stream, in which `recover` looks for a failure."""
        self._last = self.stream.record(self._recorded if event is None else event)

    def synchronize(self, copied: Event) -> None:
        """Wait for a copy; failures before it are raised if the user passed the stream."""
        try:
            copied.synchronize()
        except DeviceError:
            if not self._owns_stream:
                raise


class _Loaded(Protocol):
    """A sequence: `loads` bring some of its pages."""

    loads: list[Completion]


def loads_of(sequences: Iterable[_Loaded]) -> list[Completion]:
    """Return the loads of some sequences, each once."""
    return list({id(load): load for s in sequences for load in s.loads}.values())


class PageAccess:
    """Work on the pages of a cache outside its attention: copies, reads, writes."""

    def __init__(
        self, copies: CopyStream, order: AccessOrder, in_step: Callable[[], Iterable[Stream]]
    ) -> None:
        self.order = order
        self.copy_stream = copies.stream
        self._copies, self._in_step = copies, in_step

    @contextmanager
    def on(self, stream: Stream, *sequences: _Loaded) -> Iterator[None]:
        """Let `stream` work on the pages, after all work so far and the loads of `sequences`."""
        for user in self._in_step():
            if not user.capturing:
                self.order.end(user)
        if stream == self.copy_stream:
            self._copies.recover()
        self.order.begin(stream)
        try:
            for load in loads_of(sequences):
                load.wait(stream)
            yield
        finally:
            self.order.end(stream)
            if stream == self.copy_stream:
                self._copies.record()

    def copy_stream_after_all(self) -> Stream:
        """Return the copy stream, which waits for all work on the pages so far."""
        with self.on(self.copy_stream):
            return self.copy_stream
