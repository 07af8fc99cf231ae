"""Small arrays on their way to the device: packed into pinned memory, sent as one copy.

    host           wait for the last copy out of this pinned side | pack
    copy stream    wait for the readers of this device side              | copy, event
    reader                                                                 wait | read, event

Every wait is for an event, and the first is the host's only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import formats as dtypes
from ...arrays import ArrayView, contiguous_strides, describe, view
from ...errors import CaptureError, DeviceError, KvcupyError

if TYPE_CHECKING:
    from ...devices.protocol import Device, Event, Stream

Arrays = Mapping[str, "np.ndarray[Any, Any]"]
Room = dict[str, tuple[tuple[int, ...], str]]
"""Shape and format of each of several arrays, by name."""

_ALIGNMENT = 16  # bytes; what the widest load of a kernel asks for
_SMALLEST_BYTES = 4096
_MOST_SPARE = 8  # events that a device side keeps for readers to come


class Layout:
    """Where arrays lie in one buffer: C-contiguous, each from a multiple of 16 bytes on.

    Attributes
    ----------
    room : shape and format of each, in their order
    num_bytes : of the buffer

    Examples
    --------
    >>> layout = Layout({"slots": ((3,), "int64"), "table": ((2, 2), "int32")})
    >>> layout.num_bytes
    48
    """

    def __init__(self, room: Room) -> None:
        self.room = room
        self.num_bytes = 0
        self._offsets: dict[str, int] = {}
        for name, (shape, format) in room.items():
            self._offsets[name] = self.num_bytes = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
            self.num_bytes += _num_bytes(shape, format)

    @classmethod
    def of(cls, arrays: Arrays) -> Layout:
        """Return the layout of arrays as they are."""
        return cls({name: (a.shape, dtypes.tag(a.dtype)) for name, a in arrays.items()})

    def views(self, whole: ArrayView) -> dict[str, ArrayView]:
        """Return the arrays in a buffer as views, which keep it."""
        return {
            name: ArrayView(
                whole.pointer + self._offsets[name], shape,
                contiguous_strides(shape, dtypes.numpy_dtype(format).itemsize), format,
                whole.device, library=whole.library, owner=whole.owner,
            )
            for name, (shape, format) in self.room.items()
        }  # fmt: skip

    def check(self, arrays: Arrays) -> None:
        """Refuse arrays that do not fit; the last one may be shorter than its room on axis 0.

        Raises
        ------
        ValueError : names the array, what was expected and what came
        """
        for number, (name, (shape, format)) in enumerate(self.room.items(), start=1):
            given = arrays[name]
            shorter = number == len(self.room) and given.shape[:1] < shape[:1]
            if given.shape[shorter:] != shape[shorter:] or dtypes.tag(given.dtype) != format:
                wanted = describe(ArrayView(0, shape, (), format, ""))
                raise ValueError(f"{name}: expected {wanted}, got {describe(view(given))}")

    def pack(self, arrays: Arrays, into: np.ndarray[Any, Any]) -> int:
        """Write arrays that fit into a buffer, int8 (bytes,); return how far it is in use."""
        end = 0
        for name in self.room:
            array, start = arrays[name], self._offsets[name]
            end = start + array.nbytes
            into[start:end].view(array.dtype).reshape(array.shape)[...] = array
        return end


class PinnedSide:
    """Pinned memory that is packed anew for each copy.

    Attributes
    ----------
    copied : an event, behind the last copy out of it
    """

    def __init__(self, device: Device) -> None:
        self.copied = device.event()
        self.bytes: np.ndarray[Any, Any] = np.empty(0, np.int8)
        self._device = device

    def grow(self, num_bytes: int) -> None:
        """Make room. The last copy must be done."""
        if self.bytes.size < num_bytes:
            self.bytes = self._device.empty_pinned((_rounded(num_bytes),), np.int8)


class DeviceSide:
    """Memory of the device that copies overwrite, and those who read it in between.

    Attributes
    ----------
    whole : the memory as int8 (bytes,); None before `grow`
    """

    def __init__(self, device: Device) -> None:
        self.whole: ArrayView | None = None
        self._device = device
        self._readers: dict[Stream, Event] = {}
        self._unrecorded: list[Stream] = []  # to be waited for too, as a whole
        self._replaced: list[ArrayView] = []
        self._spare: list[Event] = []

    def grow(self, num_bytes: int) -> ArrayView:
        """Make room and return it; memory that is replaced is kept for those who read it."""
        if self.whole is None or self.whole.shape[0] < num_bytes:
            made = view(self._device.empty((_rounded(num_bytes),), np.int8))
            if self.whole is not None:
                self._replaced.append(self.whole)
            self.whole = made
            # Whoever had this memory before may still use it in the order of the stream that is
            # current here. Not `zeros`: it waits, or, in a capture, is repeated by every launch.
            self._unrecorded.append(self._device.as_stream(None, made.library))
        return self.whole

    def read_by(self, stream: Stream) -> None:
        """Note that `stream` may read the memory up to here. Never raises a device's failure."""
        if stream.capturing:
            self._unrecorded.append(stream)
            return
        event = self._readers.get(stream)
        if event is None:
            event = self._spare.pop() if self._spare else self._device.event()
        try:
            self._readers[stream] = stream.record(event)
        except KvcupyError:  # it has failed, and says so to whoever waits for it
            self._unrecorded.append(stream)

    def free_for(self, copy_stream: Stream) -> None:
        """Make `copy_stream` wait until nobody uses the memory any more.

        Raises
        ------
        CaptureError : a stream that used it is being captured, and cannot be waited for
        """
        while self._readers:
            stream, event = next(iter(self._readers.items()))
            copy_stream.wait(event)
            del self._readers[stream]
            if len(self._spare) < _MOST_SPARE:
                self._spare.append(event)
        while self._unrecorded:
            if self._unrecorded[-1].capturing:
                raise CaptureError(
                    f"{self._unrecorded[-1].name} is being captured and may still use the memory "
                    "that this step needs; end its capture first"
                )
            copy_stream.wait(self._unrecorded[-1])
            self._unrecorded.pop()
        if self._replaced:
            self._device.run(_nothing, copy_stream, [old.owner for old in self._replaced])
            self._replaced.clear()


class Courier:
    """Sends arrays to the device on the copy stream, one copy a time.

    Parameters
    ----------
    stream : Stream, or a CuPy or torch stream; None: one of its own

    Attributes
    ----------
    device, stream
    """

    def __init__(self, device: Device, stream: Any = None) -> None:
        self.device = device
        self.stream: Stream = device.stream() if stream is None else device.as_stream(stream)
        if stream is None:
            self.stream.name = "tables"
        self._own = stream is None
        self._last: Event | None = None
        self._noted: Event | None = None

    def send(self, arrays: Arrays, layout: Layout, pinned: PinnedSide, target: DeviceSide) -> Event:
        """Copy arrays to `target`, and return the event behind the copy, `pinned.copied`.

        Raises
        ------
        ValueError : the arrays do not fit the layout
        CaptureError : the copy stream, or a stream that used the memory, is being captured
        DeviceError : the copy was refused; a failure of somebody else's copy stream surfaces
            here too

        Notes
        -----
        Stream: the host waits for the last copy out of `pinned`, the copy stream for the readers of
        `target`. After an error both may be used again.
        """
        layout.check(arrays)
        self.recover()
        self._join(pinned.copied)
        pinned.grow(layout.num_bytes)
        whole = target.grow(layout.num_bytes)
        used = layout.pack(arrays, pinned.bytes)
        target.free_for(self.stream)
        self.device.copy(whole[:used], pinned.bytes[:used], stream=self.stream)
        self.stream.record(pinned.copied)
        self._last = pinned.copied
        return pinned.copied

    def recover(self) -> None:
        """Make the stream fit for work: behind a failure that nobody has seen it would be skipped.

        Raises
        ------
        CaptureError : the stream is being captured
        DeviceError : the failure, if the stream is somebody else's
        """
        if self.stream.capturing:
            raise CaptureError(f"copy_stream: {self.stream.name} is being captured")
        if self._last is not None and self._last.error() is not None:
            self._join(self._last)

    def note(self) -> None:
        """Remember other work that the stream has been given, for `recover`."""
        self._last = self._noted = self.stream.record(self._noted)

    def _join(self, copied: Event) -> None:
        """Wait for a copy, and let what has failed before it surface.

        On a stream of its own nobody else would ever look. What failed is told to the users of that
        copy by their own streams, for these have waited for it.
        """
        try:
            copied.synchronize()
        except DeviceError:
            if not self._own:
                raise


def _nothing() -> None:
    """Do nothing: what matters is what the stream keeps alive until it gets here."""


def _num_bytes(shape: tuple[int, ...], format: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtypes.numpy_dtype(format).itemsize


def _rounded(num_bytes: int) -> int:
    """Return the bytes of a buffer that need not grow for every step that is a little longer."""
    return max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
