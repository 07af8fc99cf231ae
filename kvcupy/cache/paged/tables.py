"""The tables of a step on their way to the streams that attend over them.

    host             pack slot 0 |        pack slot 1 |        wait for copy 0, pack slot 0 |
    copy stream                  | copy 0             | copy 1    wait for the readers of 0 | copy
    compute stream   ... earlier work ...  wait for copy 0 | attention, every layer | event ...

Nothing is sent before a stream asks for it, and each stream waits once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import CaptureError, KvcupyError
from ...ops import checks
from .captured import CapturedTables
from .staging import Arrays, Courier, DeviceSide, Layout, PinnedSide, Room

if TYPE_CHECKING:
    from ...arrays import ArrayView
    from ...devices.protocol import Device, Stream


class TableSource(Protocol):
    """A step, which knows its tables."""

    def tables(self) -> Arrays:
        """Return the arrays that attention of this step reads."""

    def room(self) -> Room:
        """Return shape and format of the arrays that a captured step like this one reads.

        Raises CaptureError or ValueError if it cannot be captured.
        """

    def fixed(self, room: Room) -> Arrays:
        """Return arrays of these shapes; the last one may be shorter on axis 0.

        Raises ValueError if the step does not fit.
        """

    def launching(self, stream: Stream) -> None:
        """Let `stream` wait for what else the step needs, before a launch of a graph."""


class _Slot:
    """An entry of the ring: a buffer on either side."""

    def __init__(self, device: Device) -> None:
        self.pinned = PinnedSide(device)
        self.target = DeviceSide(device)


class TableRing:
    """Sends the tables of each step with one copy, while those of earlier steps are being read.

    Parameters
    ----------
    copy_stream : Stream, or a CuPy or torch stream; None: one of its own. Or the `courier` of
        another ring, to share its stream
    num_slots : steps whose tables may be on their way or in use at once, at least 1
    entering : called with each stream before its first work of a step, as `Turns.enter`

    Attributes
    ----------
    current : the step that is open, or None
    courier, copy_stream : who brings the tables, and where

    Raises
    ------
    TypeError, ValueError : `num_slots` is no number, or below 1

    Notes
    -----
    Stream: the host waits for the last copy out of the pinned memory that it is about to write, and
    for nothing else; the copy waits for the readers of the memory that it overwrites.
    Bytes: those of the tables, once a step. Not for several threads at once.
    """

    def __init__(
        self,
        device: Device,
        copy_stream: Any,
        num_slots: int,
        entering: Callable[[Stream], object],
    ) -> None:
        checks.require_int(num_slots, "num_slots")
        if num_slots < 1:
            raise ValueError(f"num_slots: expected at least 1, got {num_slots}")
        self.device = device
        shared = isinstance(copy_stream, Courier)
        self.courier: Courier = copy_stream if shared else Courier(device, copy_stream)
        self.entering = entering
        self.current: StepTables | None = None
        self._slots = [_Slot(device) for _ in range(num_slots)]
        self._sent = 0

    @property
    def copy_stream(self) -> Stream:
        return self.courier.stream

    def open(self, source: TableSource) -> StepTables:
        """Begin a step; nothing is put on any stream.

        Raises
        ------
        KvcupyError : a step is open already
        """
        if self.current is not None:
            raise KvcupyError("a step is open already: close it first")
        self.current = StepTables(self, source)
        return self.current

    def send(self, arrays: Arrays) -> tuple[_Slot, Layout]:
        """Send arrays to the next slot. After an error that slot is still the next."""
        slot, layout = self._slots[self._sent % len(self._slots)], Layout.of(arrays)
        self.courier.send(arrays, layout, slot.pinned, slot.target)
        self._sent += 1
        return slot, layout


class StepTables:
    """The tables of one step. Made by `TableRing.open`.

    Attributes
    ----------
    source : the step
    streams : those that have used the tables, in order, launches of graphs included
    """

    def __init__(self, ring: TableRing, source: TableSource) -> None:
        self.source = source
        self.streams: list[Stream] = []
        self._ring = ring
        self._slot: _Slot | None = None
        self._views: Mapping[str, ArrayView] = {}
        self._readers: dict[Stream, Mapping[str, ArrayView]] = {}
        self._captured: CapturedTables | None = None
        self._closed = False

    def on(self, stream: Stream) -> Mapping[str, ArrayView]:
        """Return the tables, for work that is put on `stream` from now on.

        The first call of a step sends them, the first for each further stream makes it wait.

        Returns
        -------
        Views of device memory, valid until the step is closed. While `stream` is captured: views of
        memory that stays where it is, into which every launch of the graph brings the tables of
        the step that is open then

        Raises
        ------
        KvcupyError : the step has been closed
        ValueError, CaptureError : the source refuses; or a stream is captured by another library
        DeviceError : the copy was refused or, where `stream` is the calling thread, has failed

        Notes
        -----
        After an error nothing is lost: the next call sends the tables again.
        """
        if self._closed:
            raise KvcupyError("the step is over: its tables are gone")
        if stream.capturing:
            return self._for_graph(stream)
        if stream in self._readers:
            return self._readers[stream]
        if self._slot is None or self._slot.pinned.copied.error() is not None:
            self._send()
        assert self._slot is not None
        stream.wait(self._slot.pinned.copied)
        self.enter(stream)
        self._readers[stream] = self._views
        return self._views

    def enter(self, stream: Stream) -> None:
        """Count `stream` among the users of the step, before its first work."""
        if stream not in self.streams:
            self._ring.entering(stream)
            self.streams.append(stream)

    def close(self) -> None:
        """End the step: whoever reuses its memory waits for what its readers hold by now.

        Nothing is recorded in a stream that is being captured. A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._ring.current = None
        if self._slot is not None:
            for stream in self._readers:
                self._slot.target.read_by(stream)

    def _send(self) -> None:
        self._readers = {}  # of a copy that has failed, if there are any: all wait once more
        self._slot, layout = self._ring.send(self.source.tables())
        assert self._slot.target.whole is not None
        self._views = layout.views(self._slot.target.whole)

    def _for_graph(self, stream: Stream) -> Mapping[str, ArrayView]:
        if not stream.retains_owners:
            raise CaptureError(
                f"{stream.name} is captured by another library, whose graphs do not say when they "
                "are launched; use Stream.capture"
            )
        if self._captured is None:  # one for all captures of the step
            self._captured = CapturedTables(self._ring, self.source.room())
        stream.on_launch(self._captured.before, self._captured.after)
        return self._captured.views
