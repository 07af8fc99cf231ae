"""Pages moved by kernels: one launch for K and V, and one for the scales beside them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import faults
from .. import formats as dtypes
from ..arrays import ArrayView
from ..devices.protocol import Device, Stream
from ..kernels import Kernel, Specialisation, zeroed
from . import geometry, transfer_rows
from .cache_rows import PACK, WORDS
from .transfer_rows import ROWS, STRIDES, Rows

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
    return max(1, device.sm_count // 24)


@dataclass(frozen=True)
class Lists:
    """Page numbers where the kernels find them: address, byte stride and bytes of an index."""

    count: int
    src: tuple[int, int, int]
    dst: tuple[int, int, int]


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
    transfer_rows.fill(own, rows, pieces_a_row, lanes.bit_length() - 1)
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
    return _BLOCKS_A_MULTIPROCESSOR * device.sm_count
