"""The tables of a step, packed on the host and uploaded when a stream first asks for them.

    host             pack slot 0 |        pack slot 1 |        wait for copy 0, pack slot 0 |
    copy stream                  | copy 0             | copy 1    wait for the readers of 0 | copy
    compute stream   ... earlier work ...  wait for copy 0 | attention, every layer | event ...

Tables are uploaded when a stream first needs them, and each stream waits once per step. Every wait
is for an event, and the host waits only for the last copy out of the pinned memory that it writes.

Graphs read tables at fixed addresses. Each launch happens in a step, whose tables are uploaded
before it:

    host               pack            launch | pack                              launch
    copy stream        | copy, event          | wait for the readers, copy, event
    launching stream     wait | graph | event                        wait | graph | event
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol
from weakref import ref

import numpy as np

from ... import formats, observe
from ...arrays import ArrayView, contiguous_strides, describe, reshaped, transposed, view
from ...checks import positive_int
from ...devices.protocol import Device, Stream
from ...errors import CaptureError, KvcupyError
from ..hazards import AccessOrder, CopyStream

Arrays = Mapping[str, "np.ndarray[Any, Any]"]
Tables = Mapping[str, ArrayView]
Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Shape and format of each of several arrays, by name."""

TRANSPOSED_TABLE = "transposed_block_table"
"""Name of a captured step's page table, (pages, sequences): its first rows are in use.

Where there is a pool of old tokens, the columns of its pages follow.
"""

STATE_SLOTS = "state_slots"
"""Name of the table of each sequence's slot in the recurrent groups."""

_ALIGNMENT = 16  # bytes, of the widest load of a kernel
_MIN_BYTES = 4096


def block_table(tables: Tables) -> ArrayView:
    """Return a step's page table, (sequences, pages), in either order in memory."""
    table = tables.get("block_table")
    if table is not None:
        return table
    return transposed(tables[TRANSPOSED_TABLE], (1, 0))[: tables["seq_lens"].shape[0]]


def demoted_table(tables: Tables) -> ArrayView:
    """Return a step's page table of old tokens, (sequences, pages)."""
    table = tables.get("demoted_table")
    if table is not None:
        return table
    return transposed(tables[TRANSPOSED_TABLE], (1, 0))[tables["seq_lens"].shape[0] :]


@dataclass(frozen=True)
class GroupTables:
    """Finds the tables of a group of layers in the tables of a step.

    Tables of the first group have plain names; tables of another group have its number in their
    names, unless all groups share them. In a captured step all groups share `TRANSPOSED_TABLE`, in
    which each has some columns per sequence: `num_columns` from `first_column` on.
    """

    number: int
    first_column: int
    num_columns: int

    SHARED: ClassVar = frozenset((
        "positions", "seq_lens", "evicted_starts", "evicted_lens", "query_lens", "cu_query_lens",
        "tree_lens", "tree_mask", "tree_positions",
    ))  # fmt: skip

    def name(self, name: str) -> str:
        """Return the name of a table of the group in the tables of a step."""
        return name if not self.number or name in self.SHARED else f"{name} {self.number}"

    def columns(self, num_sequences: int) -> slice:
        """Return the columns of the group, in a captured step of `num_sequences`."""
        start = self.first_column * num_sequences
        return slice(start, start + self.num_columns * num_sequences)

    def of(self, tables: Tables) -> Tables:
        """Return the tables of the group by their plain names."""
        whole = tables.get(TRANSPOSED_TABLE)
        if not self.number:
            if whole is None:
                return tables
            found = dict(tables)
        else:
            ending = f" {self.number}"
            found = {n: v for n, v in tables.items() if n in self.SHARED}
            found |= {n.removesuffix(ending): v for n, v in tables.items() if n.endswith(ending)}
        if whole is not None:
            found[TRANSPOSED_TABLE] = whole[:, self.columns(tables["seq_lens"].shape[0])]
        return found


# --- Memory ---


class Layout:
    """Where arrays are stored in one buffer: C-contiguous, each at a multiple of 16 bytes.

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
        """Raise if arrays do not fit; axis 0 of the last one may be shorter than its space."""
        for number, (name, (shape, format)) in enumerate(self.shapes.items(), start=1):
            array = arrays[name]
            shorter = number == len(self.shapes) and array.shape[:1] < shape[:1]
            if array.shape[shorter:] != shape[shorter:] or formats.tag(array.dtype) != format:
                expected = describe(ArrayView(0, shape, (), format, ""))
                raise ValueError(f"{name}: expected {expected}, got {describe(view(array))}")

    def pack(self, arrays: Arrays, buffer: np.ndarray[Any, Any]) -> int:
        """Write arrays into a buffer, int8 (bytes,); return the number of bytes in use."""
        end = 0
        for name in self.shapes:
            array, start = arrays[name], self._offsets[name]
            end = start + array.nbytes
            buffer[start:end].view(array.dtype).reshape(array.shape)[...] = array
        return end


class PinnedBuffer:
    """Pinned memory that is repacked for each copy.

    copied : an event, recorded after the last copy out of it
    bytes, whole : the memory, int8 (bytes,), as an array and as a view
    """

    def __init__(self, device: Device) -> None:
        self.copied = device.event()
        self.bytes: np.ndarray[Any, Any] = np.empty(0, np.int8)
        self.whole = view(self.bytes)
        self._device = device
        self._replaced: list[object] = []  # freeing pinned memory waits for the device

    def reserve(self, num_bytes: int) -> None:
        """Make sure of at least `num_bytes`. The last copy must be done."""
        if self.bytes.size < num_bytes:
            self._replaced.append(self.bytes)
            self.bytes = self._device.empty_pinned((_rounded(num_bytes),), np.int8)
            self.whole = view(self.bytes)


class TableBuffer:
    """Device memory for tables, and the pinned memory from which they are uploaded.

    num_pinned : pinned buffers: one may be packed while another is being copied
    shapes : of tables at fixed addresses; None: each upload has another layout

    views : the tables, by name, of the last upload; with `shapes` at full size, from the start
    copied : the event after the last upload
    readers : the streams that read the tables, after which the next upload overwrites them
    whole : the device memory as int8 (bytes,), or None
    """

    def __init__(
        self, copies: CopyStream, num_pinned: int = 1, shapes: Shapes | None = None
    ) -> None:
        self.views: Tables = {}
        self.readers = AccessOrder()
        self.whole: ArrayView | None = None
        self._copies, self._device = copies, copies.stream.device
        self._pinned = [PinnedBuffer(self._device) for _ in range(num_pinned)]
        self.copied = self._pinned[-1].copied
        self._uploads = 0
        self._fixed = shapes is not None
        self._layout = Layout(shapes or {})
        self._signature: list[tuple[str, tuple[int, ...], Any]] = []  # of the laid out arrays
        self._viewed: ArrayView | None = None  # memory that the views are of
        self._replaced: list[ArrayView] = []  # memory that readers may still use
        if self._fixed:
            self._viewed = self._reserve()
            self.views = self._layout.views(self._viewed)

    def upload(self, arrays: Arrays) -> None:
        """Upload arrays, after the readers of those before them.

        The host waits for the last copy out of the pinned memory, the copy stream for the readers.
        After an error the buffer may be used again. A failure of a copy stream that the user passed
        surfaces here too.
        """
        if self._fixed:
            self._layout.check(arrays)
        else:
            signature = [(name, array.shape, array.dtype) for name, array in arrays.items()]
            if signature != self._signature:
                shapes = {name: (a.shape, formats.tag(a.dtype)) for name, a in arrays.items()}
                self._layout, self._signature = Layout(shapes), signature
                self._viewed = None
        pinned = self._pinned[self._uploads % len(self._pinned)]
        self._copies.recover()
        self._copies.synchronize(pinned.copied)
        pinned.reserve(self._layout.num_bytes)
        whole = self.whole
        if whole is None or whole.shape[0] < self._layout.num_bytes:
            whole = self._reserve()
        if observe.order_observers:
            packed = observe.Access(pinned.whole, name="pinned tables")
            observe.touched_by_host("pack", (), (packed,))
        num_bytes = self._layout.pack(arrays, pinned.bytes)
        stream = self._copies.stream
        self.readers.take_over(stream)
        if self._replaced:
            self._device.keep([old.owner for old in self._replaced], stream)
            self._replaced.clear()
        source = reshaped(pinned.whole, (num_bytes,), pinned.whole.strides)
        copy = reshaped(whole, (num_bytes,), whole.strides)
        self._device.copy(copy, source, stream=stream)
        self._copies.record(pinned.copied)
        self._uploads += 1
        self.copied = pinned.copied
        if self._viewed is not whole:
            self.views, self._viewed = self._layout.views(whole), whole

    def _reserve(self) -> ArrayView:
        """Allocate device memory for the layout; memory that is replaced lives for its readers."""
        whole = view(self._device.empty((_rounded(self._layout.num_bytes),), np.int8))
        if self.whole is not None:
            self._replaced.append(self.whole)
        self.whole = whole
        # The previous owner of this memory may still use it in the order of the stream that is
        # current here. Not `zeros`: it waits, or, in a capture, is repeated by every launch.
        self.readers.end_later(self._device.as_stream(None, whole.library))
        return whole


# --- Steps ---


class TableSource(Protocol):
    """A step, which computes its tables."""

    def tables(self) -> Arrays:
        """Return the arrays that attention of this step reads."""

    def captured_shapes(self) -> Shapes:
        """Return the arrays that a captured step reads; raise if the step cannot be captured."""

    def captured_tables(self, shapes: Shapes) -> Arrays:
        """Return arrays of `shapes`, the last possibly shorter on axis 0; raise if too large."""

    def before_launch(self, stream: Stream) -> None:
        """Let `stream` wait for the loads of the step, before a launch of a graph."""


class TableRing:
    """Uploads the tables of each step with one copy, while tables of earlier steps are being read.

    copies : the stream of the uploads
    num_slots : steps whose tables may be in flight or in use at once, at least 1
    before_use : called with each stream before its first work of a step, as `AccessOrder.begin`
    current : the step that is open, or None
    """

    def __init__(
        self, copies: CopyStream, num_slots: int, before_use: Callable[[Stream], object]
    ) -> None:
        positive_int(num_slots, "num_slots")
        self.copies, self.before_use = copies, before_use
        self.current: StepTables | None = None
        self._slots = [TableBuffer(copies) for _ in range(num_slots)]
        self._uploads = 0

    def streams_in_step(self) -> Sequence[Stream]:
        """Return the streams that have worked for the open step."""
        return self.current.streams if self.current is not None else ()

    def open(self, source: TableSource, tables: Callable[[], Arrays] | None = None) -> StepTables:
        """Begin a step; no stream gets work. `tables` replaces the tables of the source."""
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

    source : the step
    streams : those that have used the tables, in order, launches of graphs included
    states_used : whether the model may have updated states: it has their slots, or a graph has run
    """

    def __init__(self, ring: TableRing, source: TableSource, tables: Callable[[], Arrays]) -> None:
        self.source = source
        self._tables = tables
        self.streams: list[Stream] = []
        self.states_used = False
        self._ring = ring
        self._slot: TableBuffer | None = None
        self._readers: dict[Stream, Tables] = {}
        self._captured: CapturedTables | None = None
        self._closed = False

    def on(self, stream: Stream) -> Tables:
        """Return the tables, for work that is put on `stream` from now on.

        The first call of a step uploads them, the first for each further stream makes it wait.
        After an error the next call uploads the tables again.

        Returns
        -------
        Views of device memory, valid until the step is closed. While `stream` is captured: views of
        fixed memory, to which every launch of the graph uploads the tables of the step then open
        """
        if self._closed:
            raise KvcupyError("the step is over: its tables are gone")
        if stream.capturing:
            return self._for_graph(stream)
        tables = self._readers.get(stream)
        if tables is not None:
            return tables
        if self._slot is None or self._slot.copied.error() is not None:
            self._readers = {}  # all readers of a failed copy wait again
            self._slot = self._ring.upload(self._tables())
        stream.wait(self._slot.copied)
        self.use_on(stream)
        self._readers[stream] = self._slot.views
        return self._slot.views

    def use_on(self, stream: Stream) -> None:
        """Add `stream` to the streams of the step, before its first work."""
        if stream not in self.streams:
            self._ring.before_use(stream)
            self.streams.append(stream)

    def close(self) -> None:
        """End the step: the next upload to its memory waits for its readers. Idempotent.

        Nothing is recorded in a stream that is being captured.
        """
        if self._closed:
            return
        self._closed = True
        self._ring.current = None
        if self._slot is not None:
            for stream in self._readers:
                self._slot.readers.end(stream)

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
    """The tables that graphs captured in one step share; tables of a later step must fit."""

    def __init__(self, ring: TableRing, shapes: Shapes) -> None:
        self._ring, self._shapes = ring, shapes
        self.buffer = TableBuffer(ring.copies, 2, shapes)
        self._step: Callable[[], StepTables | None] = lambda: None  # whose tables they are

    def before(self, stream: Stream) -> None:
        """Upload the tables of the open step, once per step, before a launch on `stream`."""
        step = self._ring.current
        if step is None:
            raise KvcupyError("a graph that attends over the cache is launched outside of a step")
        if self._step() is not step or self.buffer.copied.error() is not None:
            self.buffer.upload(step.source.captured_tables(self._shapes))
            self._step = ref(step)
        stream.wait(self.buffer.copied)
        step.use_on(stream)
        step.states_used = True
        step.source.before_launch(stream)

    def after(self, stream: Stream) -> None:
        """Record that a launch on `stream` reads the tables."""
        self.buffer.readers.end(stream)


def _rounded(num_bytes: int) -> int:
    """Return a buffer size that need not grow whenever a step is a little longer."""
    return max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length())
