"""The attention kernels that there are, and which of them a call takes.

`attention_prefill` has tiles of 64 packed rows on tensor cores, for fp16 and bf16 of one kind.
`attention_decode` splits the keys of a few packed rows, and is the plain path of everything else.
`attention_starts` goes before both where queries are ragged.
"""

from __future__ import annotations

import numpy as np

from .. import formats as dtypes
from ..devices.protocol import Device
from ..kernels import Kernel, Specialisation
from . import geometry
from .attention_checks import Call
from .attention_params import PARAMS, Tiling

STARTS_PARAMS = np.dtype(
    [
        ("query_lens", np.uint64),
        ("starts", np.uint64),
        ("faults", np.uint64),
        ("length_bytes", np.int64),
        ("operation", np.int64),
        ("num_sequences", np.int32),
        ("num_tokens", np.int32),
        ("index_bytes", np.int32),
    ],
    align=True,
)

# By the threads that step together: a warp, or one.
STARTS = {
    lanes: Kernel(
        "attention.cu", "attention_starts", STARTS_PARAMS, "AttentionStartsParams",
        barriers=lanes > 1,
    )
    for lanes in (32, 1)
}  # fmt: skip
DECODE = {
    lanes: Kernel("attention.cu", "attention_decode", PARAMS, "AttentionParams", barriers=lanes > 1)
    for lanes in (32, 1)
}

# Packed rows a tile, by the packs of a row that a lane has where a warp shares it.
ROWS = {1: (1, 4, 8), 3: (1, 2)}
# Where keys turn, there are fewer kernels, and registers: this is for one of `_ANY` format.
_TURNING_ROWS = {1: (1, 4, 8), 3: (2,)}
_TURNING_ANY_ROWS = {1: (1, 4, 8), 3: (1,)}
_HOST_ROWS = (1, 4, 8)
_HOST_STEPS = (1, 2, 4, 8, 12, 16, 24, 32, 72, 96)  # where one thread has all of a row
_PACK = 8  # elements of a row that a lane loads at a time, and in a word of 16-bit ones
_ANY = "AnyFormat"  # formats told at run time, rows of any alignment
_NOT_TURNING = "float"  # keys of this format turn as those of any do: few caches have it
_DECODE_THREADS = 128

PREFILL = Kernel(
    "attention_prefill.cu", "attention_prefill", PARAMS, "AttentionParams", barriers=True
)

# kPrefillRows and kPrefillThreads of the kernel.
PREFILL_ROWS = 64
PREFILL_THREADS = 128

WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Widths of K and V that there are kernels for; others are padded to the first that has room."""

PREFILL_FORMATS = {"fp16": "half", "bf16": "bfloat16"}

_ALIGNMENT = 16  # bytes: rows are copied in words of so many
_ROWS_A_SEQUENCE = 16  # fewer leave most of a product of a tensor core to nothing
_TURING_SMEM_BYTES = 64 * 1024
_TILE_BYTES = 144  # a PrefillTile


def specialisations() -> list[Specialisation]:
    """Return every specialisation that a GPU is asked for."""
    formats = [*(f.ctype for f in dtypes.FORMATS.values()), _ANY]
    decodes = [
        DECODE[32].specialise(name, rows, steps, _bool(turns))
        for turns in (False, True)
        for name in formats
        if not turns or name != _NOT_TURNING
        for steps, row_counts in _row_counts(name, turns).items()
        for rows in row_counts
    ]
    prefills = [
        specialisation_for(name, *widths, turns=turns)
        for turns in (False, True)
        for name in PREFILL_FORMATS
        for widths in WIDTHS
    ]
    starts = [kernel.specialise(lanes) for lanes, kernel in STARTS.items()]
    return [*decodes, *prefills, *starts]


def tiling_of(device: Device, call: Call, alignment: int) -> Tiling:
    """Choose the kernel of a call, and lay it out: tensor cores where they suit.

    Parameters
    ----------
    alignment : of the addresses of query, caches and output, as `plan.alignment` gives it
    """
    if call.view("query_lens") is not None and suits(device, call, alignment):
        return prefill_tiling(call)
    return decode_tiling(device, call, alignment)


def decode_tiling(device: Device, call: Call, alignment: int) -> Tiling:
    """Lay the plain path over a call.

    Parameters
    ----------
    alignment : of the addresses of the caches, as `plan.alignment` gives it
    """
    turns = call.view("rope_table") is not None
    name = call.k.cache_format.ctype
    if call.k.cache_format is not call.v.cache_format or not (
        _packed(call, alignment) and _turns_in_packs(call, alignment)
    ):
        name = _ANY
    row_counts: tuple[int, ...]
    packs = -(-max(call.k.cache.width, call.v.cache.width) // _PACK)
    if device.warp_lanes == 1:
        lanes, row_counts = 1, _HOST_ROWS
        steps = next(n for n in _HOST_STEPS if n >= packs)
    else:
        if turns and name == _NOT_TURNING:
            name = _ANY
        steps = next(n for n in ROWS if packs <= 32 * n)
        lanes = min(32, 1 << (-(-packs // steps) - 1).bit_length())
        row_counts = _row_counts(name, turns)[steps]
    # Rows that a sequence has to share what is loaded, as far as shapes tell.
    sharing = call.group * -(-call.num_tokens // call.num_sequences)
    rows = next((n for n in row_counts if n >= sharing), row_counts[-1])
    threads = 1 if device.warp_lanes == 1 else _DECODE_THREADS
    groups = threads // lanes
    floats = groups * rows * (2 + lanes * _PACK * steps)
    kernel = DECODE[1 if device.warp_lanes == 1 else 32]
    return Tiling(
        kernel.specialise(name, rows, steps, _bool(turns)), rows, lanes, threads,
        0 if groups == 1 else 4 * floats,
    )  # fmt: skip


def _row_counts(name: str, turns: bool) -> dict[int, tuple[int, ...]]:
    """Return the packed rows a tile that there are kernels of a format for, by packs a lane."""
    if not turns:
        return ROWS
    return _TURNING_ANY_ROWS if name == _ANY else _TURNING_ROWS


def _bool(value: bool) -> str:
    """Return a template argument."""
    return "true" if value else "false"


def _packed(call: Call, alignment: int) -> bool:
    """Return whether rows of both caches are whole packs at aligned addresses."""
    strides = [n for one in (call.k, call.v) for n in one.cache_strides]
    word = min(16, _PACK * call.k.cache_format.itemsize)
    whole = all(one.cache.width % _PACK == 0 for one in (call.k, call.v))
    return whole and geometry.widest((alignment, *map(abs, strides))) >= word


def _turns_in_packs(call: Call, alignment: int) -> bool:
    """Return whether no pack of a row of K turns in part, and angles are at aligned addresses."""
    table = call.view("rope_table")
    if table is None:
        return True
    turning = table.shape[1] if call.options.interleaved else table.shape[1] // 2
    whole = call.options.rotary_start % _PACK == 0 and turning % _PACK == 0
    return whole and geometry.widest((alignment, abs(table.strides[0]))) == _ALIGNMENT


def padded_widths(k_width: int, v_width: int) -> tuple[int, int] | None:
    """Return the smallest widths of a kernel with room for rows of K and V; None if there is none.

    >>> padded_widths(80, 80), padded_widths(192, 128), padded_widths(576, 512)
    ((128, 128), (192, 128), None)
    """
    return next((w for w in WIDTHS if k_width <= w[0] and v_width <= w[1]), None)


def specialisation_for(
    format_name: str, k_width: int, v_width: int, *, turns: bool = False
) -> Specialisation:
    """Return the kernel for a format and rows of such widths, which it must have room for."""
    widths = padded_widths(k_width, v_width)
    if widths is None:
        raise ValueError(f"widths {k_width}, {v_width}: expected at most {WIDTHS[-1]}")
    return PREFILL.specialise(PREFILL_FORMATS[format_name], *widths, _bool(turns))


def smem_bytes(specialisation: Specialisation) -> int:
    """Return the dynamic shared memory of a block, `PrefillShape::kBytes` of the kernel."""
    k_width, v_width = map(int, specialisation.arguments[1:3])
    in_registers = k_width <= 192  # the queries
    keys = 64 if in_registers else 32
    k_bytes, v_bytes, query_bytes = (2 * n for n in (keys * k_width, keys * v_width, 64 * k_width))
    values = max(v_bytes, query_bytes) if in_registers else v_bytes + query_bytes
    angles = keys if specialisation.arguments[3] == _bool(True) else 1
    table_bytes = -(-(16 * keys + 8 * angles + 4 * (keys // 32)) // 8) * 8
    return k_bytes + values + 2 * table_bytes + _TILE_BYTES


def suits(device: Device, call: Call, alignment: int) -> bool:
    """Return whether a call may take the kernel.

    Parameters
    ----------
    call : `out` is of the format of `query`, or float32
    alignment : of the addresses of query, caches and output, as `plan.alignment` gives it

    Notes
    -----
    It may where lanes step together, everything is fp16 or bf16 of one kind and unscaled, rows are
    whole words at aligned addresses, and sequences have rows enough on average, as far as shapes
    tell. On Turing, which has little shared memory, the widest rows take the plain path, and so
    does bf16, which its tensor cores do not know.
    """
    query, out = call.view("query"), call.view("out")
    assert query is not None and out is not None
    names = {query.format, call.k.cache_format.name, call.v.cache_format.name}
    widths = padded_widths(call.k.cache.width, call.v.cache.width)
    if (
        device.warp_lanes != 32
        or len(names) != 1
        or query.format not in PREFILL_FORMATS
        or widths is None
    ):
        return False
    scales = ("k_scale", "v_scale", "k_scale_cache", "v_scale_cache")
    if any(call.given.get(name) is not None for name in scales):
        return False
    strides = [n for one in (call.k, call.v) for n in one.cache_strides]
    strides += [*query.strides[:2], *out.strides[:2]]
    whole = call.k.cache.width % _PACK == 0 and call.v.cache.width % _PACK == 0
    if not whole or geometry.widest((alignment, *map(abs, strides))) < _ALIGNMENT:
        return False
    if not _turns_in_packs(call, alignment):
        return False
    if device.arch == "sm_75":
        needed = smem_bytes(_prefill_kernel(call))
        if query.format == "bf16" or needed > _TURING_SMEM_BYTES:
            return False
    rows = call.num_tokens * call.group
    return rows >= _ROWS_A_SEQUENCE * max(1, call.num_sequences)


def prefill_tiling(call: Call) -> Tiling:
    """Lay the kernel over a call that it suits. Of `Tiling`, `lanes` means nothing to it."""
    chosen = _prefill_kernel(call)
    return Tiling(chosen, PREFILL_ROWS, 1, PREFILL_THREADS, smem_bytes(chosen))


def _prefill_kernel(call: Call) -> Specialisation:
    query = call.view("query")
    assert query is not None
    widths = call.k.cache.width, call.v.cache.width
    return specialisation_for(query.format, *widths, turns=call.view("rope_table") is not None)
