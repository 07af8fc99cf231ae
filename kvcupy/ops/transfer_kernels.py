"""The kernels of a transfer: page lists, pages cut into rows, Params, and launches.

A page of a pool is at most three nested axes of rows (layers, offsets, heads), each contiguous in
both pools. Rows of K and V are copied by one launch and their scales by another; a conversion is
one launch for both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from .. import faults, formats, observe, scratch
from ..arrays import (
    ArrayView,
    address_of,
    array_at,
    bytes_of,
    contiguous_strides,
    recast,
    view,
)
from ..checks import require_int
from ..devices.protocol import Device, Stream
from ..kernels import Kernel, Specialisation
from . import checks
from .launch import Launch, require_countable, verified, widest
from .store import CODES_PER_THREAD, PACK, WORDS

_Numbers = np.ndarray[Any, Any]
_Params = dict[str, int]  # fields of a Params struct, `rows.num_pieces` of a nested one

# --- Page lists -----------------------------------------------------------------------------------

_NAMES = ("src_pages", "dst_pages")


@dataclass(slots=True)
class Lists:
    """Page lists as kernels read them: address, byte stride, and bytes of an index."""

    count: int
    src: tuple[int, int, int]
    dst: tuple[int, int, int]


@dataclass(frozen=True)
class PageRuns:
    """Runs of pages that are consecutive in both pools, in the order of their targets."""

    src: _Numbers
    dst: _Numbers
    lengths: _Numbers


def page_runs(src: _Numbers, dst: _Numbers) -> PageRuns:
    """Return the runs of pairs of pages, all of which exist.

    >>> page_runs(np.array([7, 3, 6]), np.array([2, 9, 1])).lengths
    array([2, 1])
    """
    order = dst.argsort(kind="stable")
    src, dst = src[order], dst[order]
    begins = np.ones(len(src), bool)
    begins[1:] = (src[1:] - src[:-1] != 1) | (dst[1:] - dst[:-1] != 1)
    (starts,) = begins.nonzero()
    lengths = np.full(len(starts), len(src))
    lengths[:-1] = starts[1:]
    return PageRuns(src[starts], dst[starts], lengths - starts)


class Existing:
    """Pairs of pages that exist in both pools: int64 host arrays."""

    def __init__(self, src: _Numbers, dst: _Numbers) -> None:
        self.src, self.dst = src, dst
        self.count = len(src)

    @cached_property
    def runs(self) -> PageRuns:
        """The pairs as runs of pages that are consecutive in both pools."""
        return page_runs(self.src, self.dst)


class PagePairs:
    """Pairs of pages: the source of each, and its target."""

    def __init__(self, src_pages: Any, dst_pages: Any, names: tuple[str, str] = _NAMES) -> None:
        src, self.src = page_list(src_pages, names[0])
        dst, self.dst = page_list(dst_pages, names[1])
        self._begin(src, dst)
        if dst.shape[0] != self.count:
            raise ValueError(
                f"{names[1]}: expected {self.count} like {names[0]}, got {dst.shape[0]}"
            )

    @classmethod
    def of_arrays(cls, src: _Numbers, dst: _Numbers) -> PagePairs:
        """Return the pairs of two contiguous int64 (N,) arrays of pageable host memory.

        The arrays are neither checked nor copied: they must not change until the transfers are
        done.
        """
        pairs = cls.__new__(cls)
        pairs.src, pairs.dst = src, dst
        pairs._begin(src, dst)
        return pairs

    def _begin(self, src: ArrayView | _Numbers, dst: ArrayView | _Numbers) -> None:
        self.sources = src, dst
        self.count: int = src.shape[0]
        self.on_device: tuple[Lists, tuple[object, ...]] | None = None
        self._existing: dict[tuple[int, int], Existing] = {}
        self.methods: dict[object, str] = {}

    @cached_property
    def views(self) -> tuple[ArrayView, ArrayView]:
        """ArrayViews of both lists."""
        return view(self.sources[0]), view(self.sources[1])

    def lists(self, device: Device, stream: Stream) -> tuple[Lists, tuple[object, ...]]:
        """Return the lists where kernels of `device` read them, and what must live until they have.

        Lists that kernels cannot reach are uploaded on `stream`, once. All calls are for one device
        and one stream.
        """
        if self.on_device is None:
            keep: tuple[object, ...] = self.sources
            on_host = self.src, self.dst
            places: list[tuple[int, int, int]] = []
            unreachable = []
            for i, (source, numbers) in enumerate(zip(self.sources, on_host, strict=True)):
                if source is numbers:  # a copy in pageable memory: no GPU need be asked
                    address = address_of(source) if device.name == "host" else None
                else:
                    address = device.address(self.views[i])
                if address is None:
                    unreachable.append(i)
                places.append((address or 0, source.strides[0], source.itemsize))
            if unreachable:
                uploaded, pinned = _upload(
                    [self.on_host(_NAMES[i]) for i in unreachable], device, stream
                )
                keep = (*keep, uploaded, pinned)
                for row, i in enumerate(unreachable):
                    places[i] = (uploaded.pointer + row * uploaded.strides[0], 8, 8)
            self.on_device = Lists(self.count, *places), keep
        return self.on_device

    def existing(self, src_count: int, dst_count: int) -> Existing:
        """Return the pairs whose pages exist in pools of `src_count` and `dst_count` pages."""
        key = src_count, dst_count
        if key not in self._existing:
            src, dst = self.on_host("src_pages"), self.on_host("dst_pages")
            # Negative ones are large as unsigned numbers.
            exist = (src.view(np.uint64) < src_count) & (dst.view(np.uint64) < dst_count)
            if not exist.all():
                src, dst = src[exist], dst[exist]
            self._existing[key] = Existing(src, dst)
        return self._existing[key]

    def on_host(self, name: str) -> _Numbers:
        """Return a list as host array; ValueError if it is in GPU memory."""
        pages = self.src if name == _NAMES[0] else self.dst
        if pages is None:
            raise ValueError(
                f"{name}: expected an array of the host, which the call can read, got one on "
                f"{self.views[_NAMES.index(name)].device}; only kernels read it there, between "
                "pools in memory that they reach"
            )
        return pages


def upload(lists: Sequence[_Numbers], device: Device, stream: Stream) -> ArrayView:
    """Upload host lists, int64 (N,) each, to where kernels of `device` read them, in one copy.

    They may change as soon as this returns. The result, int64 (lists, N), is borrowed memory, which
    is returned when the view is dropped.
    """
    uploaded, pinned = _upload(lists, device, stream)
    device.keep((uploaded, pinned), stream)
    return uploaded


def _upload(
    lists: Sequence[_Numbers], device: Device, stream: Stream
) -> tuple[ArrayView, ArrayView]:
    """Do as `upload`, and return the pinned memory too: the caller keeps both alive."""
    shape = len(lists), len(lists[0])
    num_bytes = 8 * shape[0] * shape[1]
    pinned = scratch.borrow(device, num_bytes, stream, pinned=True)
    rows = scratch.borrowed_array(pinned, shape, _INT64)
    for i, values in enumerate(lists):
        rows[i] = values
    uploaded = scratch.borrow(device, num_bytes, stream)
    if num_bytes:
        observe.issue(
            lambda: observe.copy_of(stream, pinned, uploaded),
            lambda: device.copy_bytes(uploaded.pointer, pinned.pointer, num_bytes, stream),
        )
    return recast(uploaded, shape, contiguous_strides(shape, 8), "int64"), pinned


_INT64 = np.dtype(np.int64)
_INDICES = np.dtype(np.int32), _INT64


def page_list(pages: Any, name: str) -> tuple[ArrayView | _Numbers, _Numbers | None]:
    """Return a page list as kernels read it, and as int64 host array, None for GPU memory."""
    if isinstance(pages, (list, tuple, range)):
        if not {int}.issuperset(map(type, pages)):  # isinstance of an ABC is slow
            for page in pages:
                require_int(page, name)
        try:
            array = np.array(pages, np.int64)
        except OverflowError:
            raise ValueError(f"{name}: expected 64-bit ints, got {pages!r}") from None
        return array, array
    is_usual = type(pages) is np.ndarray and pages.ndim == 1 and pages.dtype in _INDICES
    if is_usual and pages.flags.aligned:
        return pages, pages.astype(np.int64)
    v = view(pages, name)
    checks.indices(v, name)
    checks.require_aligned([(name, v)])
    if v.device != "host":
        return v, None
    array = array_at(v.owner, v.pointer, v.shape, np.dtype(v.format), v.strides)
    return v, array.astype(np.int64)


# --- Pages as rows --------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerPages:
    """The pages of a pool in evenly spaced layers, by address."""

    parts: tuple[ArrayView, ...]  # (pages, layers, page_size, heads, width); four-bit rows: bytes
    scales: tuple[ArrayView, ...]  # float32 (pages, layers, page_size, heads, 1), or empty
    on_device: bool  # not in host memory
    format: str
    rotated_widths: tuple[int, ...]
    scale_rule: str  # of pages that are converted into these

    @classmethod
    def of(
        cls, parts: Iterable[ArrayView], scales: Iterable[ArrayView], *, on_device: bool
    ) -> LayerPages:
        """Describe views of a pool, without keeping it alive."""
        views = tuple(parts)
        by_address, scales = (
            tuple(bytes_of(v).without_owner() for v in group) for group in (views, scales)
        )
        rotated = tuple(v.rotated_width for v in views)
        first = views[0]
        return cls(by_address, scales, on_device, first.format, rotated, first.scale_rule)

    @property
    def arrays(self) -> tuple[ArrayView, ...]:
        return (*self.parts, *self.scales)

    @property
    def num_pages(self) -> int:
        return self.parts[0].shape[0]

    @property
    def encoding(self) -> tuple[str, tuple[int, ...]]:
        """What the bytes of the parts mean: pages of one encoding are copied bit for bit."""
        return self.format, self.rotated_widths

    @property
    def described(self) -> str:
        """The encoding, for messages."""
        encodings = [formats.stored_as(self.format, width) for width in self.rotated_widths]
        return " and ".join(dict.fromkeys(encodings))

    @property
    def four_bit(self) -> formats.FourBitFormat | None:
        return formats.FOUR_BIT.get(self.format)

    @property
    def widths(self) -> list[int]:
        """Elements of a row, for each part."""
        group, size = (
            (1, 1) if self.four_bit is None else (self.four_bit.group, self.four_bit.group_bytes)
        )
        return [v.shape[-1] // size * group for v in self.parts]

    @property
    def shared_elements(self) -> int:
        """Elements of a row that depend on one another: a group, or a rotated block."""
        blocks = [formats.rotation_block(width) for width in self.rotated_widths]
        return max(self.four_bit.group if self.four_bit else 1, *blocks)

    def four_bit_params(self, side: str, alignment: int) -> _Params:
        """Return the fields of the `FourBitPool` of a name, whose rows are so aligned."""
        assert self.four_bit is not None
        params = {
            f"{side}.group_shift": self.four_bit.group.bit_length() - 1,
            f"{side}.code_word_bytes": min(8, alignment),
            f"{side}.four_over_six": self.scale_rule == "four_over_six",
        }
        for part, width in zip("kv", self.rotated_widths, strict=False):
            shift = max(0, formats.rotation_block(width).bit_length() - 1)
            params |= nested(f"{side}.{part}_rotated", _ROTATED, (width, shift))
        return params

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V in a page, without scales other than of groups."""
        return sum(v.size // v.shape[0] * v.itemsize for v in self.parts)

    def layers(self, layers: slice) -> LayerPages:
        """Return some of these layers."""
        parts, scales = (tuple(v[:, layers] for v in each) for each in (self.parts, self.scales))
        return replace(self, parts=parts, scales=scales)


@dataclass(frozen=True)
class Axis:
    """An axis of rows: how many, and the bytes between them in each array, sources first."""

    count: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class PageRows:
    """The rows of one or two parts (K and V) in source and target arrays.

    `axes` of the rows of a page are at most three, the outermost first. `page_strides` and
    `addresses`, like `Axis.strides`, list the source of each part, then the target of each part.
    """

    row_bytes: tuple[int, ...]
    axes: tuple[Axis, ...]
    page_strides: tuple[int, ...]
    addresses: tuple[int, ...]

    @cached_property
    def rows_per_page(self) -> int:
        return prod(axis.count for axis in self.axes)

    @property
    def layout(self) -> tuple[object, ...]:
        """Everything but the addresses: the same for all layers of two pools."""
        return self.row_bytes, self.axes, self.page_strides

    @cached_property
    def pages_are_contiguous(self) -> bool:
        """Whether neighbouring pages are contiguous in the source and in the target."""
        return self.page_strides == (*self.row_bytes, *self.row_bytes)

    @property
    def word_bytes(self) -> int:
        """The widest word (16, 8, 4, 2 or 1 bytes) in which all rows can be copied."""
        return widest((*self.row_bytes, self.alignment(range(len(self.addresses)))))

    def alignment(self, arrays: Iterable[int]) -> int:
        """Return the widest word to which all rows of some of the arrays are aligned."""
        offsets = []
        for i in arrays:
            steps = [axis.strides[i] for axis in self.axes if axis.count > 1]
            offsets += [self.addresses[i], self.page_strides[i], *steps]
        return widest(abs(n) for n in offsets)

    def count_pieces(self, num_pages: int, num_runs: int) -> tuple[int, int]:
        """Return how many contiguous pieces some pages have, and the bytes of one on average."""
        stretches = num_runs if self.pages_are_contiguous else num_pages
        pieces = stretches * self.rows_per_page * len(self.row_bytes)
        total_bytes = num_pages * self.rows_per_page * sum(self.row_bytes)
        return pieces, total_bytes // max(pieces, 1)

    def strides(self, array: int) -> tuple[int, int, int, int]:
        """Return the strides of one array as `TransferStrides` has them."""
        steps = [0] * (3 - len(self.axes)) + [axis.strides[array] for axis in self.axes]
        return self.page_strides[array], steps[0], steps[1], steps[2]


def head_rows(sources: Sequence[ArrayView], targets: Sequence[ArrayView]) -> PageRows:
    """Return a row for every (layer, offset, head).

    Of either pool come K and V, or one part, of equal shapes but for the pages.
    """
    arrays = (*sources, *targets)
    shape = arrays[0].shape
    return PageRows(
        tuple(v.shape[-1] * v.itemsize for v in sources),
        tuple(Axis(shape[i], tuple(v.strides[i] for v in arrays)) for i in (1, 2, 3)),
        tuple(v.strides[0] for v in arrays),
        tuple(v.pointer for v in arrays),
    )


def longest_rows(sources: Sequence[ArrayView], targets: Sequence[ArrayView]) -> PageRows:
    """Return rows as long as both pools keep them contiguous; parameters as of `head_rows`."""
    rows = head_rows(sources, targets)
    row_bytes = rows.row_bytes
    axes = [axis for axis in rows.axes if axis.count != 1]
    while inner := next((a for a in axes if a.strides == (*row_bytes, *row_bytes)), None):
        row_bytes = tuple(n * inner.count for n in row_bytes)
        axes.remove(inner)
    merged: list[Axis] = []
    for axis in sorted(axes, key=lambda axis: [-abs(s) for s in reversed(axis.strides)]):
        outer = merged[-1] if merged else None
        if outer and outer.strides == tuple(axis.count * s for s in axis.strides):
            merged[-1] = Axis(outer.count * axis.count, axis.strides)
        else:
            merged.append(axis)
    return replace(rows, row_bytes=row_bytes, axes=tuple(merged))


def contiguous_pieces(rows: PageRows, runs: PageRuns) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return (dst addresses, src addresses, sizes) of every contiguous piece, as uint64."""
    num_parts = len(rows.row_bytes)
    pieces: list[tuple[_Numbers, _Numbers, _Numbers]] = []
    for part, row_bytes in enumerate(rows.row_bytes):
        src = _row_addresses(rows, part, runs.src)
        dst = _row_addresses(rows, num_parts + part, runs.dst)
        if rows.pages_are_contiguous:
            sizes = np.repeat(runs.lengths * row_bytes, rows.rows_per_page)
        else:
            src = _all_pages(src, rows.page_strides[part], runs.lengths)
            dst = _all_pages(dst, rows.page_strides[num_parts + part], runs.lengths)
            sizes = np.full(src.size, row_bytes)
        pieces.append((dst.ravel(), src.ravel(), sizes))
    dst, src, sizes = (np.concatenate(c).astype(np.uint64) for c in zip(*pieces, strict=True))
    return dst, src, sizes


def _row_addresses(rows: PageRows, array: int, pages: _Numbers) -> _Numbers:
    """Return the addresses of all rows of some pages, (pages, rows)."""
    axes = tuple([(axis.count, axis.strides[array]) for axis in rows.axes])
    offsets: _Numbers = _row_offsets(axes) + rows.addresses[array]
    return pages[:, None] * rows.page_strides[array] + offsets


@lru_cache(maxsize=256)
def _row_offsets(axes: tuple[tuple[int, int], ...]) -> _Numbers:
    """Return where the rows of a page begin, from counts and strides of their axes."""
    offsets = np.zeros(1, np.int64)
    for count, stride in axes:
        offsets = (offsets[:, None] + np.arange(count) * stride).ravel()
    return offsets


def _all_pages(first: _Numbers, page_stride: int, lengths: _Numbers) -> _Numbers:
    """Return the rows of all pages of runs, from the rows of the first page of each."""
    if (lengths == 1).all():
        return first
    page_of_run = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    pages: _Numbers = np.repeat(first, lengths, axis=0) + page_of_run[:, None] * page_stride
    return pages


# --- Params ---------------------------------------------------------------------------------------

DIVISOR = np.dtype(
    [("divisor", np.uint32), ("multiplier", np.uint32), ("shift", np.int32)], align=True
)

STRIDES = np.dtype(
    [(name, np.int64) for name in ("page_bytes", "axis_bytes_0", "axis_bytes_1", "axis_bytes_2")],
    align=True,
)

ROWS = np.dtype(
    [
        *((f"{side}_{name}", np.int64) for name in ("stride_bytes", "num_pages", "operation")
          for side in ("src", "dst")),
        *((name, DIVISOR) for name in
          ("pieces_per_page", "pieces_per_row", "rows_per_step", "rows_2")),
        ("num_pieces", np.uint32),
        *((name, np.int32) for name in ("src_index_bytes", "dst_index_bytes", "lane_shift")),
    ],
    align=True,
)  # fmt: skip

_COPIED = ("src_k", "src_v", "dst_k", "dst_v")
_CONVERTED = ("src_k", "src_v", "src_k_scale", "src_v_scale",
              "dst_k", "dst_v", "dst_k_scale", "dst_v_scale")  # fmt: skip


def _params(arrays: tuple[str, ...], *sizes: tuple[str, Any]) -> np.dtype[Any]:
    return np.dtype(
        [
            *((name, np.uint64) for name in (*arrays, "src_pages", "dst_pages", "faults")),
            *((f"{name}_strides", STRIDES) for name in arrays),
            ("rows", ROWS),
            *sizes,
        ],
        align=True,
    )


_COPY_PARAMS = _params(
    _COPIED, ("k_words", np.int64), ("v_words", np.int64), ("piece_words", np.int32),
    ("src_is_table", np.int32), ("dst_is_table", np.int32),
)  # fmt: skip
_ROTATED = np.dtype([("width", np.int32), ("shift", np.int32)], align=True)
_FOUR_BIT_POOL = np.dtype(
    [
        ("group_shift", np.int32), ("code_word_bytes", np.int32),
        ("k_rotated", _ROTATED), ("v_rotated", _ROTATED), ("four_over_six", np.int32),
    ],
    align=True,
)  # fmt: skip
_CONVERT_PARAMS = _params(
    _CONVERTED, ("k_width", np.int32), ("v_width", np.int32),
    ("src", _FOUR_BIT_POOL), ("dst", _FOUR_BIT_POOL),
)  # fmt: skip

COPY = Kernel("transfer.cu", "transfer_copy", _COPY_PARAMS, "TransferCopyParams")

# By the lanes of a warp: where there are several they exchange values.
CONVERT, TO_FOUR_BIT, FROM_FOUR_BIT = (
    {
        lanes: Kernel("transfer.cu", name, _CONVERT_PARAMS, "TransferConvertParams",
                      barriers=lanes > 1)
        for lanes in (32, 1)
    }
    for name in ("transfer_convert", "transfer_to_four_bit", "transfer_from_four_bit")
)  # fmt: skip

_NOTE_PARAMS = np.dtype(
    [("faults", np.uint64), *((name, np.int64) for name in faults.RECORD_FIELDS)], align=True
)

NOTE = Kernel("faults.cu", "note_fault", _NOTE_PARAMS, "NoteFaultParams").specialise(1)

_COPY_THREADS = 512  # kTransferThreads
_CONVERT_THREADS = 256  # kConvertThreads
_IN_FLIGHT = 4  # kInFlight of transfer_copy
_LONGEST_PIECE_BYTES = 64 * 1024  # where a single thread copies a piece
_BLOCKS_PER_SM = 2
_BLOCKS_OF_ROTATION = 2  # rotating takes twice the instructions of converting


def specialisations() -> list[Specialisation]:
    """Return every specialisation that a transfer can ask for."""
    copies = [COPY.specialise(word, rows) for word in WORDS for rows in (1, _IN_FLIGHT)]
    copies += [COPY.specialise(word, 1, True) for word in WORDS if word <= 8]
    converts = [
        CONVERT[32].specialise(source.ctype, target.ctype, count)
        for source in formats.FORMATS.values()
        for target in formats.FORMATS.values()
        for count in pack_sizes(source)
        if source is not target
    ]
    ctypes = list(dict.fromkeys(format.ctype for format in formats.FOUR_BIT.values()))
    four_bit = [
        specialisation
        for packed in ctypes
        for other in formats.FORMATS.values()
        for count in (CODES_PER_THREAD, 1)
        for specialisation in (
            TO_FOUR_BIT[32].specialise(other.ctype, packed, count),
            FROM_FOUR_BIT[32].specialise(packed, other.ctype, count),
        )
    ]
    four_bit += [
        TO_FOUR_BIT[32].specialise(source, target, CODES_PER_THREAD)
        for source in ctypes
        for target in ctypes
    ]
    return [*copies, *converts, *four_bit, NOTE]


def pack_sizes(source: formats.Format) -> tuple[int, ...]:
    """Return the elements that a thread may load at once: 16 bytes of a format of 8 bits too."""
    return (2 * PACK, PACK, 1) if source.itemsize == 1 else (PACK, 1)


def divisor(n: int) -> tuple[int, int, int]:
    """Return the `Divisor` of `n`, for dividends below 2**31.

    >>> number, multiplier, shift = divisor(7)
    >>> [((i * multiplier >> 32) + i) >> shift for i in (6, 7, 700, 2**31 - 1)]
    [0, 1, 100, 306783378]
    """
    shift = (n - 1).bit_length()
    return n, (2**32 * (2**shift - n)) // n + 1, shift


# --- Launches -------------------------------------------------------------------------------------


def link_blocks(device: Device) -> int:
    """Return how many blocks a transfer between device and host memory uses by default.

    Few, so that the model keeps most SMs: 5 of 132.
    """
    return max(1, device.sm_count // 24)


def default_blocks(device: Device, src: LayerPages, dst: LayerPages) -> int:
    """Return how many blocks a launch may have unless the caller says so."""
    if src.on_device and dst.on_device:
        return _BLOCKS_PER_SM * device.sm_count
    rotates = src.encoding != dst.encoding and any((*src.rotated_widths, *dst.rotated_widths))
    return link_blocks(device) * (_BLOCKS_OF_ROTATION if rotates else 1)


def reaches(device: Device, *pages: LayerPages) -> bool:
    """Return whether kernels of a device can access all of some pages."""
    return all(device.address(v) is not None for each in pages for v in each.arrays)


class PageLaunch(Launch):
    """A launch that lacks only the page lists.

    `params` lack pointers and page lists; `arrays` are the addresses of the pools' arrays by
    pointer field. The grid has up to `max_blocks` of `threads`, each of `pieces_per_block` per
    iteration.
    """

    # What the page lists decide: neighbouring fields of the Params, and of `rows` in them.
    _ADDRESSES = struct.Struct("=2Q")  # src_pages, dst_pages
    _STRIDES = struct.Struct("=2q")  # src_stride_bytes, dst_stride_bytes
    _COUNTS = struct.Struct("=I2i")  # num_pieces, src_index_bytes, dst_index_bytes

    def __init__(
        self, device: Device, specialisation: Specialisation, params: _Params,
        arrays: dict[str, int], threads: int, pieces_per_page: int, pieces_per_block: int,
        max_blocks: int,
    ) -> None:  # fmt: skip
        lists = ("src_pages", "dst_pages")
        super().__init__(
            device, specialisation, (max_blocks, 1, 1), (threads, 1, 1), 0, params,
            {**arrays, **{name: name for name in lists}}, lists,
        )  # fmt: skip
        self.pieces_per_page = pieces_per_page
        self._pieces_per_block = pieces_per_block
        self._max_blocks = max_blocks
        self._params = self.pack((0, 0)) + self.tail + self.constants
        dtype = specialisation.kernel.params
        self._addresses, rows = _offset(dtype, "src_pages"), _offset(dtype, "rows")
        self._strides = rows + _offset(ROWS, "src_stride_bytes")
        self._counts = rows + _offset(ROWS, "num_pieces")

    def issue(self, lists: Lists, stream: Stream) -> None:
        """Launch for some pairs of pages, which the caller keeps alive."""
        num_pieces = lists.count * self.pieces_per_page
        (src, src_stride, src_bytes), (dst, dst_stride, dst_bytes) = lists.src, lists.dst
        params = bytearray(self._params)
        self._ADDRESSES.pack_into(params, self._addresses, src, dst)
        self._STRIDES.pack_into(params, self._strides, src_stride, dst_stride)
        self._COUNTS.pack_into(params, self._counts, num_pieces, src_bytes, dst_bytes)
        blocks = min(self._max_blocks, -(-num_pieces // self._pieces_per_block))
        self.device.launch(
            self.function, (blocks, 1, 1), self.block, self.smem_bytes, bytes(params), stream
        )


def launches(
    device: Device, src: LayerPages, dst: LayerPages, *, max_blocks: int, reports: bool
) -> list[PageLaunch]:
    """Return the launches that move pages from one pool to another, which kernels reach.

    If it `reports`, the first of them records pages past the end. CompileError if a kernel cannot
    be compiled.
    """
    pages = src.num_pages, dst.num_pages

    def make(alignment: int) -> list[PageLaunch]:
        if src.encoding != dst.encoding:
            return [_convert(device, src, dst, max_blocks, reports, alignment)]
        copies = [_copy(device, src.parts, dst.parts, pages, max_blocks, reports, alignment)]
        if src.scales and dst.scales:
            scales = src.scales, dst.scales
            copies.append(_copy(device, *scales, pages, max_blocks, False, alignment))
        return copies

    return verified(device, make, 0)


def _copy(
    device: Device, sources: Sequence[ArrayView], targets: Sequence[ArrayView],
    num_pages: tuple[int, int], max_blocks: int, reports: bool, alignment: int,
) -> PageLaunch:  # fmt: skip
    rows = _addressed(longest_rows(sources, targets), device, (*sources, *targets))
    return row_launch(device, rows, num_pages, max_blocks, reports, alignment)


def row_launch(
    device: Device, rows: PageRows, num_pages: tuple[int, int], max_blocks: int, reports: bool,
    alignment: int, tables: tuple[bool, bool] = (False, False),
) -> PageLaunch:  # fmt: skip
    """Return the launch that copies rows, whose addresses kernels can use.

    `tables` says of source and target whether the addresses are of tables of layer addresses; then
    the rows have three axes, and the first is the layers.
    """
    word = widest((rows.word_bytes, alignment))
    words = [n // word for n in rows.row_bytes]
    longest = max(words)
    lanes = _lanes(longest, device.warp_lanes)
    if lanes == 1 and device.warp_lanes == 1:
        rows_in_flight, piece_words = 1, min(longest, max(1, _LONGEST_PIECE_BYTES // word))
    elif any(tables) or longest >= lanes * _IN_FLIGHT:
        rows_in_flight, piece_words = 1, lanes * _IN_FLIGHT
    else:
        rows_in_flight, piece_words = _IN_FLIGHT, lanes
    pieces_per_row = -(-longest // piece_words)
    specialisation = COPY.specialise(word, rows_in_flight)
    if any(tables):
        specialisation = COPY.specialise(word, rows_in_flight, True)

    k_and_v = (0, len(words) - 1, len(words), -1)  # one part stands for both
    fields = dict(zip(_COPIED, k_and_v, strict=True))
    params = {
        "k_words": words[0],
        "v_words": words[1] if len(words) > 1 else 0,
        "piece_words": piece_words,
        "src_is_table": tables[0],
        "dst_is_table": tables[1],
        **rows_params(rows, pieces_per_row, lanes, num_pages, reports),
    }
    for name, array in fields.items():
        params |= nested(f"{name}_strides", STRIDES, rows.strides(array))
    return PageLaunch(
        device, specialisation, params,
        {name: rows.addresses[array] for name, array in fields.items()}, _COPY_THREADS,
        rows.rows_per_page * pieces_per_row, _COPY_THREADS // lanes * rows_in_flight, max_blocks,
    )  # fmt: skip


def _convert(
    device: Device, src: LayerPages, dst: LayerPages, max_blocks: int, reports: bool,
    alignment: int,
) -> PageLaunch:  # fmt: skip
    parts = (*src.parts, *dst.parts)
    rows = _addressed(head_rows(src.parts, dst.parts), device, parts)
    source, target = formats.CACHE_FORMATS[src.format], formats.CACHE_FORMATS[dst.format]
    num_parts, widths = len(src.parts), src.widths
    sides = (("src", src, source, 0), ("dst", dst, target, num_parts))
    alignments = {
        side: widest((rows.alignment(range(i, i + num_parts)), alignment))
        for side, _, _, i in sides
    }
    kernels, min_lanes = CONVERT, 1
    packed: _Params = {}
    if src.four_bit is None and dst.four_bit is None:
        elements = elements_per_lane = next(
            count for count in pack_sizes(source)
            if count == 1 or (all(n % count == 0 for n in widths) and all(
                alignments[side] >= min(16, count * format.itemsize)
                for side, _, format, _ in sides
            ))
        )  # fmt: skip
    else:
        kernels = TO_FOUR_BIT if dst.four_bit else FROM_FOUR_BIT
        others = [alignments[side] for side, pages, _, _ in sides if pages.four_bit is None]
        elements_per_lane = CODES_PER_THREAD
        elements = CODES_PER_THREAD if others in ([], [16]) else 1
        for side, pages, _, _ in sides:
            if pages.four_bit is not None:
                packed |= pages.four_bit_params(side, alignments[side])
                min_lanes = max(min_lanes, pages.shared_elements // CODES_PER_THREAD)
        min_lanes = min(min_lanes, device.warp_lanes)
    lanes = max(min_lanes, _lanes(-(-max(widths) // elements_per_lane), device.warp_lanes))

    params = {
        "k_width": widths[0],
        "v_width": widths[1] if num_parts > 1 else 0,
        **packed,
        **rows_params(rows, 1, lanes, (src.num_pages, dst.num_pages), reports),
    }
    arrays = {}
    for side, pages, _, first in sides:
        named = [("", rows, first)]
        if pages.scales:
            scales = _addressed(head_rows(pages.scales, ()), device, pages.scales)
            named.append(("_scale", scales, 0))
        for suffix, part_rows, k in named:
            for part, i in (("k", k), ("v", k + num_parts - 1)):
                name = f"{side}_{part}{suffix}"
                arrays[name] = part_rows.addresses[i]
                params |= nested(f"{name}_strides", STRIDES, part_rows.strides(i))
    kernel = kernels[1 if device.warp_lanes == 1 else 32]
    return PageLaunch(
        device, kernel.specialise(source.ctype, target.ctype, elements), params, arrays,
        _CONVERT_THREADS, rows.rows_per_page, _CONVERT_THREADS // lanes, max_blocks,
    )  # fmt: skip


def rows_params(
    rows: PageRows, pieces_per_row: int, lanes: int, num_pages: tuple[int, int], reports: bool, *,
    operation: str = "transfer_pages", names: tuple[str, str] = _NAMES,
) -> _Params:  # fmt: skip
    """Return the fields of a `TransferRows` that do not depend on the page lists.

    Pages past the end are reported as of the arguments `names` of `operation`.
    """
    require_countable(rows.rows_per_page * pieces_per_row, "src_pool")
    counts = [1] * (3 - len(rows.axes)) + [axis.count for axis in rows.axes]
    params = {"rows.lane_shift": lanes.bit_length() - 1}
    for name, n in (
        ("pieces_per_row", pieces_per_row),
        ("pieces_per_page", rows.rows_per_page * pieces_per_row),
        ("rows_per_step", counts[1] * counts[2]),
        ("rows_2", counts[2]),
    ):
        params |= nested(f"rows.{name}", DIVISOR, divisor(n))
    for side, count, name in zip(("src", "dst"), num_pages, names, strict=True):
        params[f"rows.{side}_num_pages"] = count
        fault_id = faults.operation_id(operation, name, faults.below(count)) if reports else -1
        params[f"rows.{side}_operation"] = fault_id
    return params


def nested(name: str, dtype: np.dtype[Any], values: tuple[int, ...]) -> _Params:
    """Return the fields of a nested struct."""
    return {f"{name}.{f}": v for f, v in zip(dtype.names or (), values, strict=True)}


def _addressed(rows: PageRows, device: Device, arrays: Sequence[ArrayView]) -> PageRows:
    """Return rows by the addresses at which kernels find the arrays."""
    addresses = [device.address(v) for v in arrays]
    return replace(rows, addresses=tuple(a for a in addresses if a is not None))


def _lanes(words: int, warp_lanes: int) -> int:
    """Return how many threads share a row: as many as leave at most a quarter of them idle."""
    lanes = warp_lanes
    while lanes > 1 and -(-words // lanes) * lanes * 3 > words * 4:
        lanes //= 2
    return lanes


def _offset(dtype: np.dtype[Any], field: str) -> int:
    assert dtype.fields is not None
    return dtype.fields[field][1]


def note_fault(device: Device, fault: tuple[int, int, int, int], stream: Stream) -> None:
    """Record on a stream a fault (`faults.RECORD_FIELDS`) that the host has found in a page list.

    The host neither reads the fault record nor waits for it; a replay records the fault again.
    """
    params = np.array((device.fault_pointer, *fault), _NOTE_PARAMS)
    device.launch(device.load(NOTE), (1, 1, 1), (1, 1, 1), 0, params.tobytes(), stream)
