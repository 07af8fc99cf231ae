"""Pages moved by kernels: one launch for K and V, and one for the scales beside them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from .. import dtypes, faults
from ..arrays import ArrayView
from ..devices.protocol import Device, Stream
from ..kernels import Kernel, Specialisation, zeroed
from . import geometry
from .cache_rows import PACK, WORDS
from .page_pairs import Lists, PageRuns

_Numbers = np.ndarray[Any, Any]

DIVISOR = np.dtype(
    [("divisor", np.uint32), ("multiplier", np.uint32), ("shift", np.int32)], align=True
)

STRIDES = np.dtype(
    [(f"{name}_bytes{axis}", np.int64) for name, axis in
     (("page", ""), ("axis", "_0"), ("axis", "_1"), ("axis", "_2"))],
    align=True,
)  # fmt: skip

ROWS = np.dtype(
    [
        ("src_stride_bytes", np.int64),
        ("dst_stride_bytes", np.int64),
        ("src_num_pages", np.int64),
        ("dst_num_pages", np.int64),
        ("src_operation", np.int64),
        ("dst_operation", np.int64),
        ("pieces_a_page", DIVISOR),
        ("pieces_a_row", DIVISOR),
        ("rows_a_step", DIVISOR),
        ("rows_2", DIVISOR),
        ("num_pieces", np.uint32),
        ("src_index_bytes", np.int32),
        ("dst_index_bytes", np.int32),
        ("lane_shift", np.int32),
    ],
    align=True,
)


def divisor(n: int) -> tuple[int, int, int]:
    """Return the Divisor of `n`, for numbers below 2**31.

    >>> number, multiplier, shift = divisor(7)
    >>> [((i * multiplier >> 32) + i) >> shift for i in (6, 7, 700, 2**31 - 1)]
    [0, 1, 100, 306783378]
    """
    shift = (n - 1).bit_length()
    return n, (2**32 * (2**shift - n)) // n + 1, shift


@dataclass(frozen=True)
class Axis:
    """An axis of rows: how many, and the bytes between them in each array, sources first."""

    count: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Rows of one or two parts (K and V) that go from arrays to arrays.

    Parameters
    ----------
    row_bytes : contiguous bytes of a row, one a part
    axes : of the rows of a page, at most three, the outermost first
    page_bytes : strides between pages, one an array: the source of each part, then the target of
        each part, as in `Axis.strides`
    addresses : of each array, in the same order
    """

    row_bytes: tuple[int, ...]
    axes: tuple[Axis, ...]
    page_bytes: tuple[int, ...]
    addresses: tuple[int, ...]

    @cached_property
    def rows_a_page(self) -> int:
        return prod(axis.count for axis in self.axes)

    @property
    def shape(self) -> tuple[object, ...]:
        """What does not depend on where the arrays are: alike for all layers of two pools."""
        return self.row_bytes, self.axes, self.page_bytes

    @cached_property
    def pages_join(self) -> bool:
        """Whether the rows of neighbouring pages follow one another on both sides."""
        return self.page_bytes == (*self.row_bytes, *self.row_bytes)

    @property
    def word_bytes(self) -> int:
        """The widest word (16, 8, 4, 2 or 1 bytes) in which all rows can be moved."""
        return geometry.widest((*self.row_bytes, self.word_of(range(len(self.addresses)))))

    def word_of(self, arrays: Iterable[int]) -> int:
        """Return the widest word at which all rows of some arrays begin."""
        numbers = []
        for i in arrays:
            own = [axis.strides[i] for axis in self.axes if axis.count > 1]
            numbers += [self.addresses[i], self.page_bytes[i], *own]
        return geometry.widest(abs(n) for n in numbers)

    def strides(self, array: int) -> tuple[int, int, int, int]:
        """Return the strides of one array as the kernels take them."""
        steps = [0] * (3 - len(self.axes)) + [axis.strides[array] for axis in self.axes]
        return self.page_bytes[array], steps[0], steps[1], steps[2]


def joined(
    sources: Sequence[ArrayView], targets: Sequence[ArrayView], addresses: Sequence[int]
) -> Rows:
    """Return the rows of parts (pages, layers, page_size, heads, width), as long as they get.

    Parameters
    ----------
    sources, targets : K and V, or one part, of either pool, of equal shapes but for the pages
    addresses : of the sources, then of the targets, in the memory that the rows are moved in
    """
    arrays = (*sources, *targets)
    row_bytes = tuple(v.shape[-1] * v.itemsize for v in sources)
    axes = [
        Axis(sources[0].shape[i], tuple(v.strides[i] for v in arrays))
        for i in (1, 2, 3)
        if sources[0].shape[i] != 1
    ]
    grown = True
    while grown:
        grown = False
        for axis in axes:
            if axis.strides == (*row_bytes, *row_bytes):
                row_bytes = tuple(n * axis.count for n in row_bytes)
                axes.remove(axis)
                grown = True
                break
    return Rows(
        row_bytes,
        tuple(_merged(sorted(axes, key=lambda axis: [-abs(s) for s in reversed(axis.strides)]))),
        tuple(v.strides[0] for v in arrays),
        tuple(addresses),
    )


def separate(
    sources: Sequence[ArrayView], targets: Sequence[ArrayView], addresses: Sequence[int]
) -> Rows:
    """Return the rows of parts with every (layer, offset, head) on its own."""
    arrays = (*sources, *targets)
    axes = tuple(Axis(sources[0].shape[i], tuple(v.strides[i] for v in arrays)) for i in (1, 2, 3))
    row_bytes = tuple(v.shape[-1] * v.itemsize for v in sources)
    return Rows(row_bytes, axes, tuple(v.strides[0] for v in arrays), tuple(addresses))


def _merged(axes: list[Axis]) -> list[Axis]:
    """Join neighbours that every array walks without a gap."""
    merged: list[Axis] = []
    for axis in axes:
        last = merged[-1] if merged else None
        if last and last.strides == tuple(axis.count * s for s in axis.strides):
            merged[-1] = Axis(last.count * axis.count, axis.strides)
        else:
            merged.append(axis)
    return merged


def fill(params: Any, rows: Rows, pieces_a_row: int, lane_shift: int) -> None:
    """Fill the part of a TransferRows that does not depend on the pages."""
    counts = [1] * (3 - len(rows.axes)) + [axis.count for axis in rows.axes]
    params["pieces_a_row"] = divisor(pieces_a_row)
    params["pieces_a_page"] = divisor(rows.rows_a_page * pieces_a_row)
    params["rows_a_step"] = divisor(counts[1] * counts[2])
    params["rows_2"] = divisor(counts[2])
    params["lane_shift"] = lane_shift


def expand(rows: Rows, runs: PageRuns) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return (dst addresses, src addresses, sizes) of every contiguous piece, as uint64."""
    num_parts = len(rows.row_bytes)
    found: list[tuple[_Numbers, _Numbers, _Numbers]] = []
    for part, row_bytes in enumerate(rows.row_bytes):
        src = _addresses(rows, part, runs.src)
        dst = _addresses(rows, num_parts + part, runs.dst)
        if rows.pages_join:
            sizes = np.repeat(runs.lengths * row_bytes, rows.rows_a_page)
        else:
            src, dst = (
                _every_page(first, rows.page_bytes[array], runs.lengths)
                for first, array in ((src, part), (dst, num_parts + part))
            )
            sizes = np.full(src.size, row_bytes)
        found.append((dst.ravel(), src.ravel(), sizes))
    dst, src, sizes = (np.concatenate(one).astype(np.uint64) for one in zip(*found, strict=True))
    return dst, src, sizes


def fragments(rows: Rows, num_pages: int, num_runs: int) -> tuple[int, int]:
    """Return how many pieces a transfer has, and the bytes of one on average."""
    stretches = num_runs if rows.pages_join else num_pages
    pieces = stretches * rows.rows_a_page * len(rows.row_bytes)
    total = num_pages * rows.rows_a_page * sum(rows.row_bytes)
    return pieces, total // max(pieces, 1)


def _addresses(rows: Rows, array: int, pages: _Numbers) -> _Numbers:
    """Return the addresses of all rows of pages, (pages, rows)."""
    offsets = np.zeros(1, np.int64)
    for axis in rows.axes:
        steps = np.arange(axis.count) * axis.strides[array]
        offsets = (offsets[:, None] + steps).ravel()
    return rows.addresses[array] + pages[:, None] * rows.page_bytes[array] + offsets


def _every_page(first: _Numbers, page_bytes: int, lengths: _Numbers) -> _Numbers:
    """Return the rows of all pages of runs, from those of the first page of each."""
    if (lengths == 1).all():
        return first
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    pages: _Numbers = np.repeat(first, lengths, axis=0) + within[:, None] * page_bytes
    return pages


_ARRAYS = ("src_k", "src_v", "dst_k", "dst_v")
_SCALED = ("src_k", "src_v", "src_k_scale", "src_v_scale",
           "dst_k", "dst_v", "dst_k_scale", "dst_v_scale")  # fmt: skip
_LISTS = ("src_pages", "dst_pages", "faults")

_COPY_PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in (*_ARRAYS, *_LISTS)),
        *((f"{name}_strides", STRIDES) for name in _ARRAYS),
        ("rows", ROWS),
        ("k_words", np.int64),
        ("v_words", np.int64),
        ("piece_words", np.int32),
    ],
    align=True,
)

_CONVERT_PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in (*_SCALED, *_LISTS)),
        *((f"{name}_strides", STRIDES) for name in _SCALED),
        ("rows", ROWS),
        ("k_width", np.int32),
        ("v_width", np.int32),
    ],
    align=True,
)

COPY = Kernel("transfer.cu", "transfer_copy", _COPY_PARAMS, "TransferCopyParams")

# By the threads that step together: those of a warp exchange values; one alone has nobody to.
CONVERT = {
    lanes: Kernel("transfer.cu", "transfer_convert", _CONVERT_PARAMS, "TransferConvertParams",
                  barriers=lanes > 1)
    for lanes in (32, 1)
}  # fmt: skip

_NOTE_PARAMS = np.dtype(
    [("faults", np.uint64), *((name, np.int64) for name in faults.RECORD_FIELDS)], align=True
)

NOTE = Kernel("faults.cu", "note_fault", _NOTE_PARAMS, "NoteFaultParams").specialise(1)

# What each launch fills in: fields that follow one another in the Params.
_POINTERS = struct.Struct("=3Q")  # src_pages, dst_pages, faults
_PAIR = struct.Struct("=2q")  # of src and dst
_COUNTS = struct.Struct("=I2i")  # num_pieces, src_index_bytes, dst_index_bytes

_COPY_THREADS = 512  # kTransferThreads
_CONVERT_THREADS = 256  # kConvertThreads
_IN_FLIGHT = 4  # kInFlight of transfer_copy
_LONGEST_PIECE_BYTES = 64 * 1024  # where one thread takes a piece
_BLOCKS_A_MULTIPROCESSOR = 2


def specialisations() -> list[Specialisation]:
    """Return every specialisation that a transfer can ask for."""
    copies = [COPY.specialise(word, rows) for word in WORDS for rows in (1, _IN_FLIGHT)]
    converts = [
        CONVERT[32].specialise(source.ctype, target.ctype, count)
        for source in dtypes.FORMATS.values()
        for target in dtypes.FORMATS.values()
        for count in (PACK, 1)
        if source is not target
    ]
    return [*copies, *converts, NOTE]


def bounded_blocks(device: Device) -> int:
    """Return how many blocks a transfer over a link takes unless told otherwise.

    Few, so that the model keeps its multiprocessors: 5 of 132.
    """
    return max(1, device.multiprocessors // 24)


class KernelMove:
    """A launch that is ready but for the page lists.

    Parameters
    ----------
    specialisation : of `COPY` or `CONVERT`
    params : one record; addresses are filled here, lists and the number of pieces at each launch
    addresses : of the arrays, in the order of the Params
    threads : a block
    pieces_a_page, pieces_a_block : of the work, and of what a block takes in one go
    """

    def __init__(
        self,
        device: Device,
        specialisation: Specialisation,
        params: np.ndarray[Any, Any],
        addresses: Sequence[int],
        threads: int,
        pieces_a_page: int,
        pieces_a_block: int,
    ) -> None:
        self._device = device
        self._function = device.load(specialisation)
        self._threads = threads
        self._pieces_a_page = pieces_a_page
        self._pieces_a_block = pieces_a_block
        dtype = specialisation.kernel.params
        for name, address in zip(dtype.names or (), addresses, strict=False):
            params[name] = address
        self._constants = params.tobytes()
        rows = _offset(dtype, "rows")
        self._places = (
            _offset(dtype, "src_pages"),
            rows + _offset(ROWS, "src_stride_bytes"),
            rows + _offset(ROWS, "src_operation"),
            rows + _offset(ROWS, "num_pieces"),
        )

    def check(self, num_pairs: int) -> None:
        """Refuse more pairs of pages than a launch can count the pieces of."""
        geometry.require_countable(num_pairs * self._pieces_a_page, "src_pages")

    def launch(
        self, lists: Lists, max_blocks: int, on: Stream, keep: Sequence[object], *, reports: bool
    ) -> None:
        """Launch on `on`. `reports`: whether this launch notes pages past the end."""
        num_pieces = lists.count * self._pieces_a_page
        (src, src_stride, src_bytes), (dst, dst_stride, dst_bytes) = lists.src, lists.dst
        packed = bytearray(self._constants)
        pages, strides, operations, counts = self._places
        _POINTERS.pack_into(packed, pages, src, dst, self._device.fault_pointer)
        _PAIR.pack_into(packed, strides, src_stride, dst_stride)
        if not reports:
            _PAIR.pack_into(packed, operations, -1, -1)
        _COUNTS.pack_into(packed, counts, num_pieces, src_bytes, dst_bytes)
        blocks = min(max_blocks, -(-num_pieces // self._pieces_a_block))
        self._device.launch(
            self._function, (blocks, 1, 1), (self._threads, 1, 1), 0, bytes(packed), on, keep
        )


def note_fault(device: Device, fault: tuple[int, int, int, int], on: Stream) -> None:
    """Launch the note of a fault that the host knows of.

    The host neither reads the record nor waits for it, and a replay notes the fault again.

    Parameters
    ----------
    fault : the fields of the record (`faults.RECORD_FIELDS`)
    """
    params = np.array((device.fault_pointer, *fault), _NOTE_PARAMS)
    device.launch(device.load(NOTE), (1, 1, 1), (1, 1, 1), 0, params.tobytes(), on)


def copying(device: Device, rows: Rows, src_pages: int, dst_pages: int) -> KernelMove:
    """Return the move of rows as they are.

    Parameters
    ----------
    src_pages, dst_pages : how many pages either pool has
    """
    word = rows.word_bytes
    words = [n // word for n in rows.row_bytes]
    longest = max(words)
    lanes = _lanes(longest, device.warp_lanes)
    if lanes == 1 and device.warp_lanes == 1:
        in_flight_rows, piece_words = 1, min(longest, max(1, _LONGEST_PIECE_BYTES // word))
    elif longest >= lanes * _IN_FLIGHT:
        in_flight_rows, piece_words = 1, lanes * _IN_FLIGHT
    else:
        in_flight_rows, piece_words = _IN_FLIGHT, lanes
    pieces_a_row = -(-longest // piece_words)

    params = zeroed(_COPY_PARAMS)
    both = _pair(rows.addresses)
    for name, array in zip(_ARRAYS, _pair(range(len(rows.addresses))), strict=True):
        params[f"{name}_strides"] = rows.strides(array)
    params["k_words"], params["v_words"] = words[0], words[1] if len(words) > 1 else 0
    params["piece_words"] = piece_words
    _fill_rows(params, rows, pieces_a_row, lanes, src_pages, dst_pages)
    return KernelMove(
        device, COPY.specialise(word, in_flight_rows), params, both,
        _COPY_THREADS, rows.rows_a_page * pieces_a_row, _COPY_THREADS // lanes * in_flight_rows,
    )  # fmt: skip


def converting(
    device: Device,
    values: Rows,
    scales: tuple[Rows | None, Rows | None],
    formats: tuple[str, str],
    pages: tuple[int, int],
) -> KernelMove:
    """Return the move of rows from one format to another.

    Parameters
    ----------
    values : every (layer, offset, head) a row (`transfer_rows.separate`)
    scales : of the source, and of the target; each a Rows from that pool to itself, or None
    formats, pages : of the source, and of the target: the format's name, how many pages
    """
    source, target = (dtypes.FORMATS[name] for name in formats)
    widths = [n // source.itemsize for n in values.row_bytes]
    num_sources = len(values.row_bytes)
    indices = range(len(values.addresses))
    sides = (source, indices[:num_sources]), (target, indices[num_sources:])
    packed = all(n % PACK == 0 for n in widths) and all(
        values.word_of(own) >= min(16, PACK * form.itemsize) for form, own in sides
    )
    count = PACK if packed else 1
    lanes = _lanes(-(-max(widths) // count), device.warp_lanes)

    params = zeroed(_CONVERT_PARAMS)
    addresses = []
    for side, (_, own), scale in zip(("src", "dst"), sides, scales, strict=True):
        for part, index in zip("kv", (own[0], own[-1]), strict=True):
            params[f"{side}_{part}_strides"] = values.strides(index)
            addresses.append(values.addresses[index])
        for part, index in zip("kv", (0, num_sources - 1), strict=True):
            if scale is not None:
                params[f"{side}_{part}_scale_strides"] = scale.strides(index)
            addresses.append(0 if scale is None else scale.addresses[index])
    params["k_width"], params["v_width"] = widths[0], widths[1] if num_sources > 1 else 0
    _fill_rows(params, values, 1, lanes, *pages)
    kernel = CONVERT[1 if device.warp_lanes == 1 else 32]
    return KernelMove(
        device, kernel.specialise(source.ctype, target.ctype, count), params, addresses,
        _CONVERT_THREADS, values.rows_a_page, _CONVERT_THREADS // lanes,
    )  # fmt: skip


def _fill_rows(
    params: Any, rows: Rows, pieces_a_row: int, lanes: int, src_pages: int, dst_pages: int
) -> None:
    geometry.require_countable(rows.rows_a_page * pieces_a_row, "src_pool")
    own = params["rows"]
    fill(own, rows, pieces_a_row, lanes.bit_length() - 1)
    for name, num_pages in (("src", src_pages), ("dst", dst_pages)):
        own[f"{name}_num_pages"] = num_pages
        own[f"{name}_operation"] = faults.operation_id("transfer_pages", f"{name}_pages")


def _pair(of_arrays: Sequence[int]) -> tuple[int, int, int, int]:
    """Return (source of K, of V, target of K, of V), where one part stands for both."""
    half = len(of_arrays) // 2
    return of_arrays[0], of_arrays[half - 1], of_arrays[half], of_arrays[-1]


def _lanes(words: int, warp_lanes: int) -> int:
    """Return the threads that share a row: as many as leave at most a quarter of them idle."""
    lanes = warp_lanes
    while lanes > 1 and -(-words // lanes) * lanes * 3 > words * 4:
        lanes //= 2
    return lanes


def reached(device: Device, views: Sequence[ArrayView]) -> list[int] | None:
    """Return where kernels find the views; None if one of them is out of their reach."""
    addresses = [device.address(view) for view in views]
    return None if None in addresses else [a for a in addresses if a is not None]


def _offset(dtype: np.dtype[Any], field: str) -> int:
    assert dtype.fields is not None
    return dtype.fields[field][1]


def blocks(device: Device, max_blocks: int | None, *, over_link: bool) -> int:
    """Return how many blocks a launch may have."""
    if max_blocks is not None:
        return max_blocks
    if over_link:
        return bounded_blocks(device)
    return _BLOCKS_A_MULTIPROCESSOR * device.multiprocessors
