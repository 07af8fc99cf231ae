"""The kernels of decode, and of the plain path: `kernels_src/attention.cu`."""

from __future__ import annotations

import numpy as np

from .. import dtypes
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
_HOST_ROWS = (1, 4, 8)
_HOST_STEPS = (1, 2, 4, 8, 12, 16, 24, 32, 72, 96)  # where one thread has all of a row
_PACK = 8  # elements of a row that a lane loads at a time
_ANY = "AnyFormat"  # formats told at run time, rows of any alignment
_THREADS = 128


def specialisations() -> list[Specialisation]:
    """Return every specialisation that a GPU is asked for."""
    formats = [f.ctype for f in dtypes.FORMATS.values()]
    decodes = [
        DECODE[32].specialise(name, rows, steps)
        for name in (*formats, _ANY)
        for steps, row_counts in ROWS.items()
        for rows in row_counts
    ]
    return [*decodes, *(kernel.specialise(lanes) for lanes, kernel in STARTS.items())]


def decode_tiling(device: Device, call: Call, alignment: int) -> Tiling:
    """Lay the plain path over a call.

    Parameters
    ----------
    alignment : of the addresses of the caches, as `plan.alignment` gives it
    """
    row_counts: tuple[int, ...]
    packs = -(-max(call.k.cache.width, call.v.cache.width) // _PACK)
    if device.warp_lanes == 1:
        lanes, row_counts = 1, _HOST_ROWS
        steps = next(n for n in _HOST_STEPS if n >= packs)
    else:
        steps = next(n for n in ROWS if packs <= 32 * n)
        lanes, row_counts = min(32, 1 << (-(-packs // steps) - 1).bit_length()), ROWS[steps]
    # Rows that a sequence has to share what is loaded, as far as shapes tell.
    sharing = call.group * -(-call.num_tokens // call.num_sequences)
    rows = next((n for n in row_counts if n >= sharing), row_counts[-1])
    threads = 1 if device.warp_lanes == 1 else _THREADS
    groups = threads // lanes
    floats = groups * rows * (2 + lanes * _PACK * steps)
    form = call.k.cache_format
    plain = form is not call.v.cache_format or not _packed(call, alignment)
    kernel = DECODE[1 if device.warp_lanes == 1 else 32]
    return Tiling(
        kernel.specialise(_ANY if plain else form.ctype, rows, steps), rows, lanes, threads,
        0 if groups == 1 else 4 * floats,
    )  # fmt: skip


def _packed(call: Call, alignment: int) -> bool:
    """Return whether rows of both caches are whole packs at aligned addresses."""
    strides = [n for one in (call.k, call.v) for n in one.cache_strides]
    word = min(16, _PACK * call.k.cache_format.itemsize)
    whole = all(one.cache.width % _PACK == 0 for one in (call.k, call.v))
    return whole and geometry.widest((alignment, *map(abs, strides))) >= word
