"""Whose turn it is: order of streams over bytes that they all write, such as the pages of a pool.

    stream A   enter | work | leave
    stream B                        enter: wait for A | work | leave
    stream C                                                         enter: wait for B | ...

C need not wait for A: B has left after A, and has waited for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import CaptureError

if TYPE_CHECKING:
    from ...devices.protocol import Event, Stream


class _Turn:
    """What a stream has left behind, up to an event; None: it could not be recorded yet."""

    __slots__ = ("event", "stream")

    def __init__(self, stream: Stream, event: Event | None) -> None:
        self.stream = stream
        self.event = event


class Turns:
    """Makes streams of one device that work on the same bytes wait for one another.

    Notes
    -----
    Stream: `enter` before the first work on the bytes, `leave` behind the last. Streams that enter
    before any of them leaves are not ordered. The host does not wait, but for a stream that is the
    calling thread. What is remembered is the turns that nobody has waited for and then left
    himself, one a stream at most: as many as work at once, however many streams come by.
    Not for several threads at once.

    Examples
    --------
    >>> import kvcupy as kv
    >>> host, seen = kv.device("host"), []
    >>> turns, streams = Turns(), [host.stream() for _ in range(3)]
    >>> for i, stream in enumerate(streams):
    ...     turns.enter(stream)
    ...     stream.call(lambda i=i: seen.append(i))
    ...     turns.leave(stream)
    >>> streams[2].synchronize(), seen, len(turns)
    (None, [0, 1, 2], 1)
    """

    def __init__(self) -> None:
        self._left: dict[Stream, _Turn] = {}
        self._waited: dict[Stream, list[_Turn]] = {}  # of what is in _left, who has waited for what
        self._spare: list[Event] = []

    def __len__(self) -> int:
        """Return how many turns the next stream waits for, were it a new one."""
        return len(self._left)

    def enter(self, stream: Stream) -> None:
        """Make `stream` wait for what the others have left, unless it has already.

        Raises
        ------
        CaptureError : `stream` is being captured, or is to wait for one that is
        DeviceError : the calling thread waited for work that has failed
        """
        if stream.capturing:
            raise CaptureError(
                f"stream: {stream.name} is being captured and cannot wait for work outside"
            )
        waited = self._waited.get(stream, [])
        for turn in list(self._left.values()):
            if turn.stream == stream or turn in waited:
                continue
            if turn.event is None:
                turn.event = self._record(turn.stream)
            if turn.event is None:
                raise CaptureError(
                    f"{turn.stream.name} is being captured and cannot be waited for; end its "
                    "capture first"
                )
            stream.wait(turn.event)
            waited.append(turn)
            self._waited[stream] = waited

    def leave(self, stream: Stream) -> None:
        """Note that `stream` may have work on the bytes up to here.

        Notes
        -----
        Capture: legal, but nothing is recorded in a captured stream. Whoever enters next then waits
        for all that the stream holds by that time.
        """
        turn = _Turn(stream, self._record(stream))
        behind = list(self._waited.get(stream, ()))
        if stream in self._left:
            behind.append(self._left[stream])
        for old in behind:
            self._forget(old)
        self._left[stream] = turn

    def _record(self, stream: Stream) -> Event | None:
        if stream.capturing:
            return None
        return stream.record(self._spare.pop() if self._spare else None)

    def _forget(self, turn: _Turn) -> None:
        """Drop a turn that a later one stands for."""
        if self._left.get(turn.stream) is turn:
            del self._left[turn.stream]
        if turn.event is not None:
            self._spare.append(turn.event)  # who waits for it waits for what was recorded before
            turn.event = None
        for stream, waited in list(self._waited.items()):
            if turn in waited:
                waited.remove(turn)
            if not waited:
                del self._waited[stream]
