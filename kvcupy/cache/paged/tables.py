"""The tables of a step, packed on the host and uploaded when a stream first asks for them.

    host             pack slot 0 |        pack slot 1 |        wait for copy 0, pack slot 0 |
    copy stream                  | copy 0             | copy 1    wait for the readers of 0 | copy
    compute stream   ... earlier work ...  wait for copy 0 | attention, every layer | event ...

Nothing is uploaded before a stream asks for it, and each stream waits once per step. Every wait is
for an event, and the host waits only for the last copy out of the pinned memory that it writes.

Graphs read tables at addresses that stay the same. Each launch happens in a step, whose tables are
uploaded there first:

    host               pack            launch | pack                              launch
    copy stream        | copy, event          | wait for the readers, copy, event
    launching stream     wait | graph | event                        wait | graph | event
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from weakref import ref

import numpy as np

from ... import formats, observe
from ...arrays import ArrayView, contiguous_strides, describe, reshaped, transposed, view
from ...devices.protocol import Device, Event, Stream
from ...errors import CaptureError, DeviceError, KvcupyError
from ..pool import positive_int

Arrays = Mapping[str, "np.ndarray[Any, Any]"]
Tables = Mapping[str, ArrayView]
Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Shape and format of each of several arrays, by name."""

TRANSPOSED_TABLE = "transposed_block_table"
"""Name of a captured step's page table, (pages, sequences): its first rows are in use.

Where there is a pool of old tokens, the columns of its pages follow.
"""

_ALIGNMENT = 16  # bytes; what the widest load of a kernel asks for
_MIN_BYTES = 4096
_MAX_SPARE_EVENTS = 8  # that device memory keeps for later readers


def block_table(tables: Tables) -> ArrayView:
    """Return a step's page table, (sequences, pages), in whichever order it lies in memory."""
    table = tables.get("block_table")
    if table is not None:
        return table
    return transposed(tables[TRANSPOSED_TABLE], (1, 0))[: tables["seq_lens"].shape[0]]


def past_table(tables: Tables) -> ArrayView:
    """Return a step's page table of old tokens, likewise."""
    table = tables.get("past_table")
    if table is not None:
        return table
    return transposed(tables[TRANSPOSED_TABLE], (1, 0))[tables["seq_lens"].shape[0] :]


# --- Memory ---


class Layout:
    """Where arrays lie in one buffer: C-contiguous, each at a multiple of 16 bytes.

    Attributes
    ----------
    shapes : shape and format of each, in their order
    num_bytes : of the buffer

    Examples
    --------
    >>> layout = Layout({"slots": ((3,), "int64"), "table": ((2, 2), "int32")})
    >>> layout.num_bytes
    48
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.num_bytes = 0
        self._offsets: dict[str, int] = {}
        for name, (shape, format) in shapes.items():
            self._offsets[name] = self.num_bytes = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
            self.num_bytes += math.prod(shape) * formats.numpy_dtype(format).itemsize

    def views(self, whole: ArrayView) -> dict[str, ArrayView]:
        """Return the arrays in a buffer as views, which keep it alive."""
        return {
            name: ArrayView(
                whole.pointer + self._offsets[name], shape,
                contiguous_strides(shape, formats.numpy_dtype(format).itemsize), format,
                whole.device, library=whole.library, owner=whole.owner,
            )
            for name, (shape, format) in self.shapes.items()
        }  # fmt: skip

    def check(self, arrays: Arrays) -> None:
        """Raise if arrays do not fit; the last one may be shorter than its space on axis 0."""
        for number, (name, (shape, format)) in enumerate(self.shapes.items(), start=1):
            array = arrays[name]
            shorter = number == len(self.shapes) and array.shape[:1] < shape[:1]
            if array.shape[shorter:] != shape[shorter:] or formats.tag(array.dtype) != format:
                expected = describe(ArrayView(0, shape, (), format, ""))
                raise ValueError(f"{name}: expected {expected}, got {describe(view(array))}")

    def pack(self, arrays: Arrays, buffer: np.ndarray[Any, Any]) -> int:
        """Write arrays that fit into a buffer, int8 (bytes,); return how many bytes are in use."""
        end = 0
        for name in self.shapes:
            array, start = arrays[name], self._offsets[name]
            end = start + array.nbytes
            buffer[start:end].view(array.dtype).reshape(array.shape)[...] = array
        return end


class PinnedBuffer:
    """Pinned memory that is repacked for each copy.

    Attributes
    ----------
    copied : an event, recorded behind the last copy out of it
    bytes, whole : the memory, int8 (bytes,), as an array and as a view
    """

    def __init__(self, device: Device) -> None:
        self.copied = device.event()
        self.bytes: np.ndarray[Any, Any] = np.empty(0, np.int8)
        self.whole = view(self.bytes)
        self._device = device
        self._replaced: list[object] = []  # freeing pinned memory waits for the device

    def reserve(self, num_bytes: int) -> None:
        """Have at least so many bytes. The last copy must be done."""
        if self.bytes.size < num_bytes:
            self._replaced.append(self.bytes)
            self.bytes = self._device.empty_pinned((_rounded(num_bytes),), np.int8)
            self.whole = view(self.bytes)


class DeviceBuffer:
    """Memory of the device that copies overwrite, and the streams that read it in between.

    Attributes
    ----------
    whole : the memory as int8 (bytes,); None before `reserve`
    """

    def __init__(self, device: Device) -> None:
        self.whole: ArrayView | None = None
        self._device = device
        self._readers: dict[Stream, Event] = {}
        self._unrecorded: list[Stream] = []  # to be waited for too, with all their work
        self._replaced: list[ArrayView] = []
        self._spare: list[Event] = []

    def reserve(self, num_bytes: int) -> ArrayView:
        """Have at least so many bytes, and return the memory; old memory lives for its readers."""
        if self.whole is None or self.whole.shape[0] < num_bytes:
            whole = view(self._device.empty((_rounded(num_bytes),), np.int8))
            if self.whole is not None:
                self._replaced.append(self.whole)
            self.whole = whole
            # The previous owner of this memory may still use it in the order of the stream that is
            # current here. Not `zeros`: it waits, or, in a capture, is repeated by every launch.
            self._unrecorded.append(self._device.as_stream(None, whole.library))
        return self.whole

    def read_by(self, stream: Stream) -> None:
        """Record that `stream` may read the memory up to here. Never raises a device's failure."""
        if stream.capturing:
            self._unrecorded.append(stream)
            return
        event = self._readers.get(stream)
        try:
            if event is None:
                event = self._spare.pop() if self._spare else self._device.event()
            self._readers[stream] = stream.record(event)
        except KvcupyError:  # the stream has failed, and reports it to whatever waits for it
            self._unrecorded.append(stream)

    def wait_for_readers(self, copy_stream: Stream) -> None:
        """Make `copy_stream` wait until no stream reads the memory any more."""
        while self._readers:
            stream, event = next(iter(self._readers.items()))
            copy_stream.wait(event)
            del self._readers[stream]
            if len(self._spare) < _MAX_SPARE_EVENTS:
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
            # The stream keeps them alive until it gets here.
            self._device.run(lambda: None, copy_stream, [old.owner for old in self._replaced])
            self._replaced.clear()


class Uploader:
    """Uploads arrays to the device on the copy stream, its own if none is passed."""

    def __init__(self, device: Device, stream: Any = None) -> None:
        self.device = device
        self.stream: Stream = device.stream() if stream is None else device.as_stream(stream)
        if stream is None:
            self.stream.name = "tables"
        self._owns_stream = stream is None
        self._last: Event | None = None
        self._recorded: Event | None = None

    def upload(
        self, arrays: Arrays, layout: Layout, pinned: PinnedBuffer, target: DeviceBuffer
    ) -> None:
        """Copy arrays that fit a layout to `target`, by way of `pinned`, and record its event.

        The host waits for the last copy out of `pinned`, the copy stream for the readers of
        `target`. After an error both may be used again. A failure of a copy stream that the user
        passed surfaces here too.
        """
        self.recover()
        self._synchronize(pinned.copied)
        pinned.reserve(layout.num_bytes)
        whole = target.reserve(layout.num_bytes)
        if observe.order_observers:
            packed = observe.Access(pinned.whole, name="pinned tables")
            observe.touched_by_host("pack", (), (packed,))
        num_bytes = layout.pack(arrays, pinned.bytes)
        target.wait_for_readers(self.stream)
        # The first bytes of both.
        source = reshaped(pinned.whole, (num_bytes,), pinned.whole.strides)
        copy = reshaped(whole, (num_bytes,), whole.strides)
        self.device.copy(copy, source, stream=self.stream)
        self.stream.record(pinned.copied)
        self._last = pinned.copied

    def recover(self) -> None:
        """Make the stream fit for work: behind a failure that has not surfaced it would be skipped.

        The failure is raised if the user passed the stream.
        """
        if self.stream.capturing:
            raise CaptureError(f"copy_stream: {self.stream.name} is being captured")
        if self._last is not None and self._last.error() is not None:
            self._synchronize(self._last)

    def record(self) -> None:
        """Record other work that was put on the stream, for `recover`."""
        self._last = self._recorded = self.stream.record(self._recorded)

    def _synchronize(self, copied: Event) -> None:
        """Wait for a copy, and let what has failed before it surface.

        No user ever looks at a stream of the cache's own. The users of a failed copy learn of it by
        their own streams, which have waited for it.
        """
        try:
            copied.synchronize()
        except DeviceError:
            if not self._owns_stream:
                raise


class TableBuffer:
    """Device memory for tables, and the pinned memory by way of which they are uploaded.

    Parameters
    ----------
    num_pinned : uploads of which one may be packed while the one before it is being copied
    shapes : of tables that stay where they are; None: each upload has its own layout

    Attributes
    ----------
    views : the tables, by name, of the last upload; with `shapes` at full size, from the start
    copied : the event behind the last upload
    target : the memory
    """

    def __init__(
        self, uploader: Uploader, num_pinned: int = 1, shapes: Shapes | None = None
    ) -> None:
        self.target = DeviceBuffer(uploader.device)
        self.views: Tables = {}
        self._uploader = uploader
        self._pinned = [PinnedBuffer(uploader.device) for _ in range(num_pinned)]
        self.copied = self._pinned[-1].copied
        self._uploads = 0
        self._fixed = shapes is not None
        self._layout = Layout(shapes or {})
        self._signature: list[tuple[str, tuple[int, ...], Any]] = []  # of the laid out arrays
        self._viewed: ArrayView | None = None  # memory that the views are of
        if self._fixed:
            self._viewed = self.target.reserve(self._layout.num_bytes)
            self.views = self._layout.views(self._viewed)

    @property
    def shapes(self) -> Shapes:
        return self._layout.shapes

    def upload(self, arrays: Arrays) -> None:
        """Upload arrays, behind the readers of those before them. See `Uploader.upload`."""
        if self._fixed:
            self._layout.check(arrays)
        else:
            signature = [(name, array.shape, array.dtype) for name, array in arrays.items()]
            if signature != self._signature:
                shapes = {name: (a.shape, formats.tag(a.dtype)) for name, a in arrays.items()}
                self._layout, self._signature = Layout(shapes), signature
                self._viewed = None
        pinned = self._pinned[self._uploads % len(self._pinned)]
        self._uploader.upload(arrays, self._layout, pinned, self.target)
        self._uploads += 1
        self.copied = pinned.copied
        if self._viewed is not self.target.whole:
            assert self.target.whole is not None
            self.views = self._layout.views(self.target.whole)
            self._viewed = self.target.whole


# --- Steps ---


class TableSource(Protocol):
    """A step, which computes its tables."""

    def tables(self) -> Arrays:
        """Return the arrays that attention of this step reads."""

    def captured_shapes(self) -> Shapes:
        """Return what a captured step like this one reads; raise if it cannot be captured."""

    def captured_tables(self, shapes: Shapes) -> Arrays:
        """Return arrays of these shapes, the last perhaps shorter on axis 0; raise if none fit."""

    def before_launch(self, stream: Stream) -> None:
        """Let `stream` wait for what else the step needs, before a launch of a graph."""


class TableRing:
    """Uploads the tables of each step with one copy, while those of earlier steps are being read.

    Parameters
    ----------
    copy_stream : Stream, or a CuPy or torch stream; None: one of its own. Or the `uploader` of
        another ring, to share its stream
    num_slots : steps whose tables may be in flight or in use at once, at least 1
    before_use : called with each stream before its first work of a step, as `AccessOrder.begin`

    Attributes
    ----------
    current : the step that is open, or None
    uploader, copy_stream : what uploads the tables, and on which stream
    """

    def __init__(
        self, device: Device, copy_stream: Any, num_slots: int,
        before_use: Callable[[Stream], object],
    ) -> None:  # fmt: skip
        positive_int(num_slots, "num_slots")
        shared = isinstance(copy_stream, Uploader)
        self.uploader: Uploader = copy_stream if shared else Uploader(device, copy_stream)
        self.before_use = before_use
        self.current: StepTables | None = None
        self._slots = [TableBuffer(self.uploader) for _ in range(num_slots)]
        self._uploads = 0

    @property
    def copy_stream(self) -> Stream:
        return self.uploader.stream

    def open(self, source: TableSource, tables: Callable[[], Arrays] | None = None) -> StepTables:
        """Begin a step; nothing is put on any stream. `tables` stand in for those of the source."""
        if self.current is not None:
            raise KvcupyError("a step is open already: close it first")
        self.current = StepTables(self, source, tables or source.tables)
        return self.current

    def upload(self, arrays: Arrays) -> TableBuffer:
        """Upload arrays to the next slot. After an error that slot is still the next."""
        slot = self._slots[self._uploads % len(self._slots)]
        slot.upload(arrays)
        self._uploads += 1
        return slot


class StepTables:
    """The tables of one step. Made by `TableRing.open`.

    Attributes
    ----------
    source : the step
    streams : those that have used the tables, in order, launches of graphs included
    """

    def __init__(self, ring: TableRing, source: TableSource, tables: Callable[[], Arrays]) -> None:
        self.source = source
        self._tables = tables
        self.streams: list[Stream] = []
        self._ring = ring
        self._slot: TableBuffer | None = None
        self._readers: dict[Stream, Tables] = {}
        self._captured: CapturedTables | None = None
        self._closed = False

    def on(self, stream: Stream) -> Tables:
        """Return the tables, for work that is put on `stream` from now on.

        The first call of a step uploads them, the first for each further stream makes it wait.
        After an error nothing is lost: the next call uploads the tables again.

        Returns
        -------
        Views of device memory, valid until the step is closed. While `stream` is captured: views of
        memory that stays where it is, to which every launch of the graph uploads the tables of the
        step that is open then
        """
        if self._closed:
            raise KvcupyError("the step is over: its tables are gone")
        if stream.capturing:
            return self._for_graph(stream)
        tables = self._readers.get(stream)
        if tables is not None:
            return tables
        if self._slot is None or self._slot.copied.error() is not None:
            self._readers = {}  # of a copy that has failed, if there are any: all wait once more
            self._slot = self._ring.upload(self._tables())
        stream.wait(self._slot.copied)
        self.use_on(stream)
        self._readers[stream] = self._slot.views
        return self._slot.views

    def use_on(self, stream: Stream) -> None:
        """Add `stream` to those that work for the step, before its first work."""
        if stream not in self.streams:
            self._ring.before_use(stream)
            self.streams.append(stream)

    def close(self) -> None:
        """End the step: the next upload to its memory waits for what its readers hold by now.

        Nothing is recorded in a stream that is being captured. A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._ring.current = None
        if self._slot is not None:
            for stream in self._readers:
                self._slot.target.read_by(stream)

    def _for_graph(self, stream: Stream) -> Tables:
        if not stream.retains_owners:
            raise CaptureError(
                f"{stream.name} is captured by another library, whose graphs do not say when they "
                "are launched; use Stream.capture"
            )
        if self._captured is None:  # one for all captures of the step
            self._captured = CapturedTables(self._ring, self.source.captured_shapes())
        stream.on_launch(self._captured.before, self._captured.after)
        return self._captured.buffer.views


class CapturedTables:
    """The tables that graphs captured in one step share; those of a later step must fit."""

    def __init__(self, ring: TableRing, shapes: Shapes) -> None:
        self._ring = ring
        # Two pinned buffers, so that one is packed while the other is being copied.
        self.buffer = TableBuffer(ring.uploader, 2, shapes)
        self._step: Callable[[], StepTables | None] = lambda: None  # whose tables they are

    def before(self, stream: Stream) -> None:
        """Upload the tables of the open step, once per step, before a launch on `stream`."""
        step = self._ring.current
        if step is None:
            raise KvcupyError("a graph that attends over the cache is launched outside of a step")
        if self._step() is not step or self.buffer.copied.error() is not None:
            self.buffer.upload(step.source.captured_tables(self.buffer.shapes))
            self._step = ref(step)
        stream.wait(self.buffer.copied)
        step.use_on(stream)
        step.source.before_launch(stream)

    def after(self, stream: Stream) -> None:
        """Record that a launch on `stream` reads the tables."""
        self.buffer.target.read_by(stream)


def _rounded(num_bytes: int) -> int:
    """Return the bytes of a buffer that need not grow for every step that is a little longer."""
    return max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length())
