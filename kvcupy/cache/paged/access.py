"""Access to bytes that several streams write, such as the pages of a pool, in order.

    stream A   begin | work | end
    stream B                      begin: wait for A | work | end
    stream C                                                     begin: wait for B | ...

C need not wait for A: B has ended its access behind A's, and has waited for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...devices.protocol import Event, Stream
from ...errors import CaptureError
from .sequences import CachedSequence
from .tables import TableRing


@dataclass(eq=False, slots=True)
class _Access:
    """The work of a stream on the bytes, up to an event; None: it could not be recorded yet."""

    stream: Stream
    event: Event | None


class AccessOrder:
    """Makes streams of one device that work on the same bytes wait for one another.

    Notes
    -----
    Stream: `begin` before the first work on the bytes, `end` behind the last. Streams that begin
    before any of them ends are not ordered. The host does not wait, but for a stream that is the
    calling thread. What is remembered is the accesses that no stream has waited for and then ended
    one of its own, at most one per stream: as many as work at once, however many streams there
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
        self._waited: dict[Stream, list[_Access]] = {}  # those of _ended that a stream waited for
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
        waited = self._waited.get(stream, [])
        for access in list(self._ended.values()):
            if access.stream == stream or access in waited:
                continue
            if access.event is None:
                access.event = self._record(access.stream)
            if access.event is None:
                raise CaptureError(
                    f"{access.stream.name} is being captured and cannot be waited for; end its "
                    "capture first"
                )
            stream.wait(access.event)
            waited.append(access)
            self._waited[stream] = waited

    def end(self, stream: Stream) -> None:
        """Record that `stream` may have work on the bytes up to here.

        Nothing is recorded in a captured stream. The next stream to begin then waits for all that
        this one holds by that time.
        """
        access = _Access(stream, self._record(stream))
        earlier = list(self._waited.get(stream, ()))
        if stream in self._ended:
            earlier.append(self._ended[stream])
        for old in earlier:
            self._forget(old)
        self._ended[stream] = access

    def _record(self, stream: Stream) -> Event | None:
        if stream.capturing:
            return None
        return stream.record(self._spare.pop() if self._spare else None)

    def _forget(self, access: _Access) -> None:
        """Drop an access that is covered by a later one."""
        if self._ended.get(access.stream) is access:
            del self._ended[access.stream]
        if access.event is not None:
            self._spare.append(access.event)  # waits for it are for what was recorded before
            access.event = None
        for stream, waited in list(self._waited.items()):
            if access in waited:
                waited.remove(access)
            if not waited:
                del self._waited[stream]


class PageAccess:
    """Work on the pages of a cache outside its attention: copies, reads, writes.

    The order is that of all streams that work on the pages, those of the ring's steps included.
    """

    def __init__(self, order: AccessOrder, ring: TableRing) -> None:
        self.order = order
        self.copy_stream = ring.copy_stream
        self._ring = ring

    @contextmanager
    def on(self, stream: Stream, *sequences: CachedSequence) -> Iterator[None]:
        """Let `stream` work on the pages, behind all work so far, that of the open step included.

        It waits for the transfers that load pages of `sequences`.
        """
        if self._ring.current is not None:
            for user in self._ring.current.streams:
                if not user.capturing:
                    self.order.end(user)
        uploader = self._ring.uploader
        if stream == self.copy_stream:
            uploader.recover()
        self.order.begin(stream)
        try:
            for load in {id(load): load for s in sequences for load in s.loads}.values():
                load.wait(stream)
            yield
        finally:
            self.order.end(stream)
            if stream == self.copy_stream:
                uploader.record()

    def copy_stream_behind_all(self) -> Stream:
        """Return the copy stream, which waits for all work on the pages so far."""
        with self.on(self.copy_stream):
            return self.copy_stream
