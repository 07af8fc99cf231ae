"""Launches: kernels with their geometry and all of their Params but the addresses."""

from __future__ import annotations

import operator
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from ..arrays import ArrayView, taking
from ..config import config
from ..devices.protocol import Device, Stream
from ..kernels import Specialisation

Pointer = ArrayView | str | tuple[ArrayView | str, int] | int | None
"""Where a pointer field takes its address from: an argument, or the name of an address of the call
that is none; one of these and how many bytes further; an address that no call changes; or null."""

_Bound = tuple[str, str | int, int]  # a pointer field, the name or the address, and an offset


class Launch:
    """A loaded kernel, its geometry, and its Params but for the addresses.

    `params` are by field, `k.cache.page_bytes` for one of a nested struct; what is left out is 0 or
    null, and the last pointer field takes the device's fault record. A `provisional` launch must
    choose its kernel again in the next call, see `verified`.
    """

    def __init__(
        self, device: Device, specialisation: Specialisation,
        grid: tuple[int, int, int], block: tuple[int, int, int], smem_bytes: int,
        params: Mapping[str, Any] | np.ndarray[Any, Any],
        pointers: Mapping[str, Any], names: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.device = device
        self.grid, self.block, self.smem_bytes = grid, block, smem_bytes
        self.specialisation, self.provisional = specialisation, False
        kernel = specialisation.kernel
        named = tuple([_named(field, p) for field, p in pointers.items() if p is not None])
        bound = _bind(kernel.params, kernel.num_pointers, named, names)
        self._struct, self._choose, self._fixed, self._offsets = bound
        packed = params.tobytes() if isinstance(params, np.ndarray) else pack(kernel.params, params)
        self.constants = packed[8 * kernel.num_pointers :]
        self.function = device.load(specialisation)
        nulls = 8 * (kernel.num_pointers - 1) - self._struct.size
        self.tail = bytes(nulls) + device.fault_pointer.to_bytes(8, sys.byteorder)
        self._rest = self.tail + self.constants
        self._last: tuple[object, bytes] = None, b""  # addresses, and the Params with them

    def enqueue(self, addresses: tuple[int, ...], stream: Stream, keep: Sequence[object]) -> None:
        """Launch on a stream; `keep` lives until the kernel has run."""
        last, params = self._last
        if last is not addresses:
            chosen = self._choose(addresses + self._fixed)
            if self._offsets is not None:
                chosen = tuple(map(operator.add, chosen, self._offsets))
            params = self._struct.pack(*chosen) + self._rest
            self._last = addresses, params
        self.device.launch(
            self.function, self.grid, self.block, self.smem_bytes, params, stream, keep
        )

    def pack(self, addresses: tuple[int, ...]) -> bytes:
        """Return the pointer fields of the Params but for `tail`, for the addresses of a call."""
        chosen = self._choose(addresses + self._fixed if self._fixed else addresses)
        if self._offsets is not None:
            chosen = tuple(map(operator.add, chosen, self._offsets))
        return self._struct.pack(*chosen)


def _named(field: str, pointer: Any) -> _Bound:
    if isinstance(pointer, int):
        return field, pointer, 0
    v, offset = pointer if isinstance(pointer, tuple) else (pointer, 0)
    return field, v if isinstance(v, str) else v.name, offset


@lru_cache(maxsize=1024)
def _bind(
    dtype: np.dtype[Any], num_pointers: int, pointers: tuple[_Bound, ...], names: tuple[str, ...],
) -> tuple[struct.Struct, Callable[[Any], tuple[Any, ...]], tuple[Any, ...], Any]:  # fmt: skip
    """Resolve the names of addresses to positions.

    Returns the struct of the pointer fields up to the last that is not null, what chooses their
    values from the addresses of a call followed by the fixed ones, the latter, and the bytes to add
    or None.
    """
    assert dtype.names is not None
    fields = dtype.names[: num_pointers - 1]
    by_field = {field: (source, offset) for field, source, offset in pointers}
    assert by_field.keys() <= set(fields), f"not pointer fields: {by_field.keys() - set(fields)}"
    fixed = [source for source, _ in by_field.values() if isinstance(source, int)]
    positions, offsets, form = [], [], ""
    for field in fields:
        if field not in by_field:
            form += "8x"
            continue
        source, offset = by_field[field]
        if isinstance(source, str):
            positions.append(names.index(source))
        else:  # from the end: a call may have more addresses than this launch
            positions.append(fixed.index(source) - len(fixed))
        offsets.append(offset)
        form += "Q"
    return (
        struct.Struct("=" + form[: form.rindex("Q") + 1]),
        taking(positions),
        tuple(fixed),
        tuple(offsets) if any(offsets) else None,
    )


def fields_of(type: Any, names: str | Iterable[str]) -> list[tuple[str, Any]]:
    """Return the fields of a Params dtype that are of one type."""
    return [(name, type) for name in (names.split() if isinstance(names, str) else names)]


def pack(dtype: np.dtype[Any], values: Mapping[str, Any]) -> bytes:
    r"""Return one record of a Params dtype.

    Examples
    --------
    >>> inner = np.dtype([("a", np.int32), ("b", np.int64)], align=True)
    >>> pack(np.dtype([("x", inner), ("y", np.float32)], align=True), {"x.b": 7, "y": 0.5})[8:]
    b'\x07\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00?\x00\x00\x00\x00'
    """
    record, zeroed, in_order = _record(dtype)
    filled = zeroed | values if isinstance(values, dict) else {**zeroed, **values}
    assert len(filled) == len(zeroed), f"no fields of Params: {filled.keys() - zeroed.keys()}"
    return record.pack(*in_order(filled))


@lru_cache(maxsize=64)
def _record(dtype: np.dtype[Any]) -> tuple[struct.Struct, dict[str, int], Callable[..., Any]]:
    """Return the layout of a Params dtype: its struct, its fields as 0, and their order."""
    fields = sorted(_fields(dtype, "", 0), key=lambda field: field[1])
    form, end = "=", 0
    for _, offset, kind in fields:
        form += f"{offset - end}x{_CODES[kind]}"
        end = offset + kind.itemsize
    names = [name for name, _, _ in fields]
    return (
        struct.Struct(f"{form}{dtype.itemsize - end}x"), dict.fromkeys(names, 0),
        operator.itemgetter(*names),
    )  # fmt: skip


_CODES = {np.dtype(name): code for name, code in zip(
    ("u8", "i8", "u4", "i4", "f4", "f8"), "QqIifd", strict=True
)}  # fmt: skip


def _fields(dtype: np.dtype[Any], prefix: str, start: int) -> Iterable[tuple[str, int, Any]]:
    for name, (field, offset, *_) in (dtype.fields or {}).items():
        if field.names:
            yield from _fields(field, f"{prefix}{name}.", start + offset)
        else:
            yield f"{prefix}{name}", start + offset, field


# --- Kernels that are verified before their first use ---------------------------------------------

VERIFIED_KINDS = {"cuda"}
"""The kinds of devices on which `config.verify` acts."""


def _taken_to_be_right(device: Device, specialisation: Specialisation) -> bool | None:
    return True


verifier = _taken_to_be_right
"""Returns whether a kernel is right on a device; None while a capture prevents the check. Set by
the package to `kvcupy.testing.verification.is_verified`, which itself calls operations."""


class _Thread(threading.local):
    taken: list[Specialisation] | None = None  # kernels, while `unverified`


_thread = _Thread()
_L = TypeVar("_L", bound=Launch)


def verified(device: Device, make: Callable[[int], list[_L]], alignment: int) -> list[_L]:
    """Return the launches of `make` for an alignment, or launches of the plainest kernels.

    The latter are what `make` returns for arrays that are aligned to nothing: they serve where a
    kernel differs from its reference, and in a capture before that is verified.
    """
    launches = make(alignment)
    provisional = _thread.taken is not None
    if _thread.taken is not None:
        _thread.taken += [launch.specialisation for launch in launches]
    elif config.verify == "first_use" and device.kind in VERIFIED_KINDS:
        verdicts = [verifier(device, launch.specialisation) for launch in launches]
        if not all(verdicts):
            launches, provisional = make(1), None in verdicts
    for launch in launches:
        launch.provisional = provisional
    return launches


@contextmanager
def unverified() -> Iterator[list[Specialisation]]:
    """Let new plans of this thread take any kernels in a with block, and not outlast their call.

    Yields the list of those kernels.
    """
    before, taken = _thread.taken, list[Specialisation]()
    _thread.taken = taken
    try:
        yield taken
    finally:
        _thread.taken = before


# --- Geometry -------------------------------------------------------------------------------------

_BLOCK = 128
_SMALLEST_BLOCK_ALONE = 8  # where each row has one thread
_BLOCKS_PER_WORKER = 4
_MAX_LANES = 512
_UNROLL = 4  # words that a thread has in flight, as in kernels_src/store.cu


@dataclass(frozen=True)
class Geometry:
    """`lanes` threads (a power of two) share a row; a block holds whole groups of lanes."""

    lanes: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def lane_shift(self) -> int:
        return self.lanes.bit_length() - 1


def widest(numbers: Iterable[int]) -> int:
    """Return the widest word (16, 8, 4, 2 or 1 bytes) that divides all of the numbers.

    >>> widest([256, 24, 0])
    8
    """
    together = 16
    for n in numbers:
        together |= n
    return together & -together


def spread(
    num_rows: int, words: int, sm_count: int, *,
    warp_lanes: int = 32, whole_warps: bool = False, max_lanes: int = _MAX_LANES,
) -> Geometry:  # fmt: skip
    """Lay threads over `num_rows` rows of `words` words.

    Where threads do not run in lockstep (`warp_lanes` 1) each row has one. Else a row gets one lane
    per word up to a warp, so that a warp's accesses are whole sectors, then more warps so that no
    thread has more than four words in flight at a time; and as many as it can use when there are
    too few rows to occupy the device. Small work goes in small blocks, so that it spreads over all
    multiprocessors; where threads do not run in lockstep, in blocks of a few rows, so that several
    workers can share what is left of work that turns out to be long.
    """
    lanes = min(1 << max(0, words - 1).bit_length(), warp_lanes)
    max_lanes = 1 if warp_lanes == 1 else max_lanes
    while lanes < max_lanes and lanes * _UNROLL < words:
        lanes *= 2
    while lanes < min(max_lanes, words) and num_rows * lanes < sm_count * 2 * _BLOCK:
        lanes *= 2
    alone = warp_lanes == 1 and not whole_warps
    smallest = max(lanes, _SMALLEST_BLOCK_ALONE if alone else 32)
    min_blocks = sm_count * (_BLOCKS_PER_WORKER if alone else 1)
    block = max(smallest, _BLOCK)
    while block > smallest and num_rows * lanes < min_blocks * block:
        block //= 2
    rows_per_block = block // lanes
    return Geometry(lanes, (-(-num_rows // rows_per_block), 1, 1), (block, 1, 1))


_STAGED_BYTES = 48 * 1024  # of a block, at most: what every GPU has without asking


def staging(
    geometry: Geometry, row_bytes: int, num_rows: int, name: str, *, min_threads: int = 32
) -> tuple[Geometry, int]:
    """Return blocks so small that their rows fit in shared memory, and the bytes of a block."""
    threads = geometry.block[0]
    while threads > min_threads and threads // geometry.lanes * row_bytes > _STAGED_BYTES:
        threads //= 2
    rows = threads // geometry.lanes
    if rows * row_bytes > _STAGED_BYTES:
        most = _STAGED_BYTES // rows
        raise ValueError(
            f"{name}: expected rows of at most {most} bytes for a four-bit cache, got {row_bytes}"
        )
    grid = (-(-num_rows // rows), 1, 1)
    return Geometry(geometry.lanes, grid, (threads, 1, 1)), rows * row_bytes


MAX_ROWS = 2**31 - 1024
"""The most rows that a kernel counts in an int, with a block to spare."""


def require_countable(num_rows: int, name: str) -> None:
    """Raise ValueError for more rows than a kernel counts."""
    if num_rows > MAX_ROWS:
        expected = f"at most {MAX_ROWS} rows (tokens times heads)"
        raise ValueError(f"{name}: expected {expected}, got {num_rows}")
