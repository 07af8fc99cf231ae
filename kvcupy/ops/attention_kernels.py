"""The attention kernels: which of them a call takes, how it is tiled, and their Params.

`attention_prefill` works on tiles of 64 or 128 packed rows with tensor cores, where query and cache
are fp16, or bf16, or the cache has 8 or 4 bits; `attention_decode_mma` on tiles of 16, also of
caches of 8 and 4 bits, and `attention_decode_latent` likewise where rows are wide, and
`attention_decode_heads` on tiles of 64 where many heads share those. `attention_decode` takes every
other call: a few packed rows per tile.
`attention_schedule` runs before them where sequences may be long: it cuts their keys into pieces, a
block for each. `attention_starts` runs first where sequences have several new tokens.

A packed row is one query head of one token. The heads that share a KV head, of one token after
another, are the rows of a tile, so that K and V are loaded once for all of them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .. import faults
from ..arrays import ArrayView
from ..config import shared_bytes
from ..devices.protocol import Device
from ..formats import CACHE_FORMATS, FORMATS, FOUR_BIT, FourBitFormat, bytes_per_element
from ..kernels import Kernel, Specialisation
from .checks import OPERAND_PARAMS, KVOperand
from .launch import require_countable, widest

# --- The call -------------------------------------------------------------------------------------


class AttentionOptions(NamedTuple):
    """What a call asks for beside its arrays, checked. Equal options share a plan.

    Attributes
    ----------
    sm_scale : None: 1 / sqrt(D)
    window : 0: none
    sink_keys : first keys that stay visible past the window
    soft_cap : 0: none
    interleaved, rotary_start : which elements of a key the rope table rotates, if there is one
    batch_invariant : one kernel for all numbers of tokens, whose sums have an order that only the
        positions of keys decide
    """

    layout: str
    sm_scale: float | None
    causal: bool
    window: int
    sink_keys: int
    soft_cap: float
    interleaved: bool = False
    rotary_start: int = 0
    batch_invariant: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """A call whose arguments fit together.

    Attributes
    ----------
    arguments : by name, without those that are None; scales may be numbers
    views : the arguments that are arrays
    k, v : the caches, with their scales
    num_tokens, num_heads, num_sequences, max_pages : T, Hq, B, pages per row of the block table
    """

    arguments: dict[str, Any]
    options: AttentionOptions
    k: KVOperand
    v: KVOperand
    num_tokens: int
    num_heads: int
    num_sequences: int
    max_pages: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.k.cache.num_heads

    @property
    def sm_scale(self) -> float:
        scale = self.options.sm_scale
        return 1.0 / math.sqrt(self.k.cache.width) if scale is None else scale

    @property
    def max_keys(self) -> int:
        """The most keys that a row of the block table holds."""
        return self.max_pages * self.k.cache.page_size

    @property
    def is_ragged(self) -> bool:
        """Whether sequences may have any number of new tokens, not one each."""
        return not {"query_lens", "cu_query_lens"}.isdisjoint(self.arguments)

    @property
    def rotates_keys(self) -> bool:
        """Whether keys are cached raw and rotated on the way to the score."""
        return "rope_table" in self.arguments

    @cached_property
    def views(self) -> dict[str, ArrayView]:
        return {n: a for n, a in self.arguments.items() if isinstance(a, ArrayView)}


# --- Params ---------------------------------------------------------------------------------------

ARRAYS = (
    "query", "k_cache", "v_cache", "block_table", "seq_lens", "cu_query_lens", "k_scale", "v_scale",
    "k_scale_cache", "v_scale_cache", "sinks", "tree_mask", "tree_lens", "evicted_starts",
    "evicted_lens", "key_starts", "rope_table", "tree_positions", "out", "lse", "pieces",
    "split_tiles", "partial_out", "partial_lse",
)  # fmt: skip

_INT64 = (
    "query_token_bytes", "query_head_bytes", "out_token_bytes", "out_head_bytes",
    "lse_token_bytes", "lse_head_bytes", "table_row_bytes", "table_entry_bytes", "seq_len_bytes",
    "sink_bytes", "mask_row_bytes", "mask_column_bytes", "tree_len_bytes", "evicted_start_bytes",
    "evicted_len_bytes", "key_start_bytes", "rope_row_bytes", "tree_position_row_bytes",
    "tree_position_column_bytes", "max_positions", "num_pages", "max_pages", "window", "sink_keys",
    "table_operation", "length_operation", "starts_operation",
)  # fmt: skip
_INT32 = (
    "num_tokens", "num_sequences", "num_tiles", "num_pieces", "num_split_tiles", "tile_rows",
    "num_running", "most_rounds", "least_keys", "min_keys", "state_rows", "key_block", "num_heads",
    "group",
    "page_size", "page_shift", "table_index_bytes", "length_index_bytes", "mask_columns",
    "tree_position_columns", "rotary_start", "rotary_dim", "interleaved", "causal",
    "query_format", "k_format", "v_format", "out_format", "lane_shift",
)  # fmt: skip

# AttentionParams of kernels_src/attention.cuh
PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in (*ARRAYS, "faults")),
        ("k", OPERAND_PARAMS),
        ("v", OPERAND_PARAMS),
        *((name, np.int64) for name in _INT64),
        *((name, np.float32) for name in ("score_scale", "soft_cap", "cap_scale", "inverse_cap")),
        *((name, np.int32) for name in _INT32),
    ],
    align=True,
)

# AttentionStartsParams of kernels_src/attention_schedule.cu
STARTS_PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in ("query_lens", "starts", "faults")),
        *((name, np.int64) for name in ("length_bytes", "operation")),
        *((name, np.int32) for name in ("num_sequences", "num_tokens", "index_bytes")),
    ],
    align=True,
)

# AttentionPiece of kernels_src/attention.cuh
PIECE = np.dtype(
    [("sequence", "i4"), ("first_row", "i4"), ("part", "u2"), ("parts", "u2"), ("state", "i4")]
)

FORMAT_NUMBERS = {
    name: i
    for i, name in enumerate(("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", *FOUR_BIT))
}

_LOG2_E = math.log2(math.e)

# Arrays of one dimension, and the fields that take their strides.
_STRIDE_FIELDS = {
    "sinks": "sink_bytes", "tree_lens": "tree_len_bytes", "key_starts": "key_start_bytes",
    "evicted_starts": "evicted_start_bytes", "evicted_lens": "evicted_len_bytes",
}  # fmt: skip


def attention_params(
    call: AttentionCall, schedule: Schedule | None, lanes: int, alignment: int
) -> dict[str, Any]:
    """Return the Params of a call, but for the addresses, whose words are of `alignment`.

    `schedule` is None where each tile is a piece.
    """
    options, cache, views = call.options, call.k.cache, call.views
    query, out = views["query"], views["out"]
    table, seq_lens = views["block_table"], views["seq_lens"]
    params = {
        **call.k.params("k", call.k.cache.width, alignment),
        **call.v.params("v", call.v.cache.width, alignment),
        "k_format": FORMAT_NUMBERS[call.k.cache_format.name],
        "v_format": FORMAT_NUMBERS[call.v.cache_format.name],
        "query_format": FORMAT_NUMBERS[query.format],
        "query_token_bytes": query.strides[0], "query_head_bytes": query.strides[1],
        "out_format": FORMAT_NUMBERS[out.format],
        "out_token_bytes": out.strides[0], "out_head_bytes": out.strides[1],
        "table_row_bytes": table.strides[0], "table_entry_bytes": table.strides[1],
        "table_index_bytes": table.itemsize,
        "table_operation": faults.operation_id("paged_attention", "block_table"),
        "seq_len_bytes": seq_lens.strides[0], "length_index_bytes": seq_lens.itemsize,
        "length_operation": faults.operation_id("paged_attention", "seq_lens"),
        "starts_operation": faults.operation_id("paged_attention", "cu_query_lens")
        if "cu_query_lens" in call.views
        else -1,
        "num_pages": cache.num_slots // cache.page_size, "max_pages": call.max_pages,
        "page_size": cache.page_size, "page_shift": cache.page_shift,
        "num_sequences": call.num_sequences, "num_tokens": call.num_tokens,
        "num_heads": call.num_heads,
        "group": call.group, "key_block": _KEY_BLOCK if options.batch_invariant else 0,
        "window": options.window, "sink_keys": options.sink_keys, "causal": int(options.causal),
        "soft_cap": options.soft_cap, "cap_scale": _float32(options.soft_cap * _LOG2_E),
        "inverse_cap": _float32(1 / options.soft_cap) if options.soft_cap else 0.0,
        "score_scale": _float32(call.sm_scale * (1.0 if options.soft_cap else _LOG2_E)),
        "lane_shift": lanes.bit_length() - 1,
    }  # fmt: skip
    if schedule is not None:
        params |= asdict(schedule)
    for name, field in _STRIDE_FIELDS.items():
        if name in views:
            params[field] = views[name].strides[0]
    if "lse_out" in views:
        params["lse_token_bytes"], params["lse_head_bytes"] = views["lse_out"].strides
    if "tree_mask" in views:
        mask = views["tree_mask"]
        params["mask_row_bytes"], params["mask_column_bytes"] = mask.strides
        params["mask_columns"] = mask.shape[1]
    if call.rotates_keys:
        rope = views["rope_table"]
        params["max_positions"], params["rotary_dim"] = rope.shape
        params["rope_row_bytes"] = rope.strides[0]
        params["rotary_start"] = options.rotary_start
        params["interleaved"] = int(options.interleaved)
    if "tree_positions" in views:
        tail = views["tree_positions"]
        params["tree_position_row_bytes"], params["tree_position_column_bytes"] = tail.strides
        params["tree_position_columns"] = tail.shape[1]
    return params


def _float32(value: float) -> float:
    """Round to float32, to infinity where that has no room for the value."""
    return value if abs(value) < 1e38 else float(np.float32(value))


def starts_params(call: AttentionCall) -> dict[str, Any]:
    """Return the Params of `attention_starts`, but for the addresses."""
    query_lens = call.views["query_lens"]
    return {
        "length_bytes": query_lens.strides[0],
        "index_bytes": query_lens.itemsize,
        "operation": faults.operation_id("paged_attention", "query_lens"),
        "num_sequences": call.num_sequences,
        "num_tokens": call.num_tokens,
    }


# --- Kernels --------------------------------------------------------------------------------------

# By the threads that run in lockstep: a warp, or one.
STARTS = {
    lanes: Kernel(
        "attention_schedule.cu", "attention_starts", STARTS_PARAMS, "AttentionStartsParams",
        barriers=lanes > 1,
    )
    for lanes in (32, 1)
}  # fmt: skip
_SCHEDULE_THREADS = 512
SCHEDULE = {
    lanes: Kernel(
        "attention_schedule.cu", "attention_schedule", PARAMS, "AttentionParams",
        barriers=lanes > 1,
    )
    for lanes in (32, 1)
}  # fmt: skip
DECODE = {
    lanes: Kernel("attention.cu", "attention_decode", PARAMS, "AttentionParams", barriers=lanes > 1)
    for lanes in (32, 1)
}
DECODE_MMA = Kernel(
    "attention_decode_mma.cu", "attention_decode_mma", PARAMS, "AttentionParams", barriers=True
)
DECODE_LATENT = Kernel(
    "attention_decode_latent.cu", "attention_decode_latent", PARAMS, "AttentionParams",
    barriers=True,
)  # fmt: skip
DECODE_HEADS = Kernel(
    "attention_decode_heads.cu", "attention_decode_heads", PARAMS, "AttentionParams", barriers=True
)
PREFILL = Kernel(
    "attention_prefill.cu", "attention_prefill", PARAMS, "AttentionParams", barriers=True
)

# Packed rows per tile of the plain kernel, by the packs of a row that a lane holds where a warp
# shares it. Tensor cores take most calls of 16 and 8 bits: what is left of those is bf16 on Turing,
# and queries of another format than a cache of 16 bits.
FOUR_BIT_CTYPES = tuple(dict.fromkeys(f.ctype for f in FOUR_BIT.values()))
_FOUR_BIT_KINDS = ("nvfp4", "mxfp4", "int4")  # one of each of them
# Codes times group scales are exact in fp16, unlike in other four-bit formats.
CODED_LATENT_FORMATS = ("nvfp4",)
_PACKS_PER_LANE = (1, 3)
_Rows = dict[str, dict[int, tuple[int, ...]]]
_DECODE_ROWS: _Rows = {
    "float": {1: (1, 4), 3: (1,)}, "half": {1: (1, 4)}, "bfloat16": {1: (1, 4)},
    **{name: {1: (1, 4), 3: (1,)} for name in FOUR_BIT_CTYPES},
    "AnyFormat": {1: (1, 4, 8), 3: (1, 2)},
}  # fmt: skip
# Keys of 16 bits are rotated on tensor cores, as most of 8 bits; keys of float32 are few.
_ROTATING_ROWS: _Rows = {
    "fp8_e4m3": {1: (1, 4)}, "fp8_e5m2": {1: (1, 4)}, "int8": {1: (1, 4)},
    **{name: {1: (1, 4), 3: (1,)} for name in FOUR_BIT_CTYPES},
    "AnyFormat": {1: (1, 4, 8), 3: (1,)},
}  # fmt: skip
_HOST_ROWS = (1, 4, 32)
_HOST_PACKS = (1, 2, 4, 8, 12, 16, 24, 32, 72, 96)  # where one thread holds all of a row
_PACK = 8  # elements of a row that a lane loads at a time; 16 bytes where they have 16 bits
_ANY_FORMAT = "AnyFormat"  # formats read at run time, rows of any alignment
_DECODE_THREADS = 128

# kDecodeRows and kDecodeThreads of the kernel.
DECODE_MMA_ROWS = 16
DECODE_MMA_THREADS = 128
_DECODE_WARPS = 4
_TILE_KEYS = {False: 16, True: 32}  # kKeys of the kernel; True: rows of 8 bits, which are narrow
_NARROW = 128  # elements

# kHeadsRows and kHeadsThreads of the kernel.
HEADS_ROWS = 64
HEADS_THREADS = 256
HEADS_KEYS = (32, 16)
"""Keys per tile of the kernel for many heads: the first where shared memory allows it."""

PREFILL_THREADS = 128  # kPrefillThreads of the kernel
PREFILL_ROWS = (64, 128)
"""Packed rows per tile of the prefill kernel: 16 or 32 per warp."""

# Rows of K and V for which a block of the prefill kernel holds two tiles each, where its own tile
# is large: wider ones take longer so on an H100.
_TWO_STAGES = (64, 64)

PREFILL_WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Widths of K and V on tensor cores; others are padded to the first that fits."""

LATENT_WIDTHS = (576, 512)
"""The most elements of a row of K and of V that the kernel for wide rows takes."""

PREFILL_FORMATS = {"fp16": "half", "bf16": "bfloat16"}
LATENT_FORMATS = (*PREFILL_FORMATS, "fp8_e4m3", "fp8_e5m2", "int8")
DECODE_MMA_FORMATS = (*LATENT_FORMATS, *FOUR_BIT)

_WORD_BYTES = 16  # rows are copied to shared memory in words of this size
_KEY_BLOCK = 512  # keys that the groups of a block of the plain kernel take at a time, at most
_MIN_ROWS_PER_SEQUENCE = 16  # of prefill: with fewer, most of a tile would be empty
_TURING_SMEM_BYTES = 64 * 1024
_RESERVED_SMEM_BYTES = 1024  # of each block, by the driver
# Decode kernels for which an architecture has too few registers: they would spill.
_SPILLING = {
    ("sm_75", "int4x2", "192", "128"),
    ("sm_75", _ANY_FORMAT, "8", "1", "true"), ("sm_80", _ANY_FORMAT, "8", "1", "true"),
}  # fmt: skip
_MAX_GRID_Y = 65535
_DECODE_TILE_BYTES = 944  # a DecodeTile
_HEADS_TILE_BYTES = 2160  # a HeadsTile
_HEADS_DEPTH_STEPS, _HEADS_HELD_STEPS = 9, {32: 3, 16: 4}  # kDepthSteps, kHeldSteps by keys


def specialisations() -> list[Specialisation]:
    """Return every specialisation that a call on a GPU can take."""
    decodes = [
        DECODE[32].specialise(name, rows, packs, _bool(rotates))
        for rotates, formats in ((False, _DECODE_ROWS), (True, _ROTATING_ROWS))
        for name, row_counts_by_packs in formats.items()
        for packs, row_counts in row_counts_by_packs.items()
        for rows in row_counts
    ]
    prefills = [
        prefill_specialisation(name, *widths, rows=rows, **kind)
        for kind in ({}, {"rotates": True}, {"quantised": True})
        for name in PREFILL_FORMATS
        for widths in PREFILL_WIDTHS
        for rows in PREFILL_ROWS
        if rows == PREFILL_ROWS[0] or widths[1] <= 128  # else registers do not hold the sums
    ]
    decodes += [
        decode_mma_specialisation(name, *widths)
        for name in (*LATENT_FORMATS, *_FOUR_BIT_KINDS)
        for widths in PREFILL_WIDTHS
        if name != "mxfp4" or widths[0] % 128 == 0  # else scales of a row are no whole words
    ]
    decodes += [latent_specialisation(name) for name in (*LATENT_FORMATS, *CODED_LATENT_FORMATS)]
    decodes += [
        DECODE_HEADS.specialise(FORMATS[name].ctype, keys)
        for name in LATENT_FORMATS
        for keys in HEADS_KEYS
    ]
    starts = [kernel.specialise(lanes) for lanes, kernel in STARTS.items()]
    schedules = [schedule_specialisation(lanes) for lanes in SCHEDULE]
    return [*decodes, *prefills, *starts, *schedules]


def is_reachable(specialisation: Specialisation, arch: str) -> bool:
    """Return whether a call on an architecture can take a specialisation.

    Turing has little shared memory and no bf16 in its tensor cores.
    """
    kernel, format = specialisation.kernel, specialisation.arguments[0]
    if kernel is DECODE_HEADS:
        keys = specialisation.arguments[1]
        return arch != "sm_75" and keys == str(_heads_keys(shared_bytes(arch)))
    if kernel in (DECODE_MMA, DECODE[32]) and (arch, *specialisation.arguments) in _SPILLING:
        return False
    if kernel is PREFILL and prefill_rows(specialisation) > PREFILL_ROWS[0]:
        # One block would leave the tensor cores idle while it weighs its scores.
        block_bytes = prefill_smem_bytes(specialisation) + _RESERVED_SMEM_BYTES
        if 2 * block_bytes > shared_bytes(arch) + _RESERVED_SMEM_BYTES:
            return False
    if arch != "sm_75" or kernel not in (PREFILL, DECODE_MMA, DECODE_LATENT):
        return True
    if kernel is PREFILL:
        smem_bytes = prefill_smem_bytes(specialisation)
    elif kernel is DECODE_MMA:
        smem_bytes = decode_mma_smem_bytes(specialisation, arch)
    else:
        smem_bytes = latent_smem_bytes(specialisation)
    return format != PREFILL_FORMATS["bf16"] and smem_bytes <= _TURING_SMEM_BYTES


def schedule_specialisation(warp_lanes: int) -> Specialisation:
    """Return the schedule of a device whose threads run in lockstep by so many."""
    return SCHEDULE[warp_lanes].specialise(schedule_threads(warp_lanes))


def schedule_threads(warp_lanes: int) -> int:
    """Return the threads of its block."""
    return 1 if warp_lanes == 1 else _SCHEDULE_THREADS


def prefill_specialisation(
    format_name: str, k_width: int, v_width: int, *, rows: int = 64, rotates: bool = False,
    quantised: bool = False,
) -> Specialisation:  # fmt: skip
    """Return the prefill kernel of a query's format whose padded widths fit rows of K and V.

    `rows` is one of `PREFILL_ROWS`. Of quantised caches no keys are rotated.
    """
    widths = padded_widths(k_width, v_width)
    if widths is None:
        raise ValueError(f"widths {k_width}, {v_width}: expected at most {PREFILL_WIDTHS[-1]}")
    stages = 1 + (rows > 64 and widths == _TWO_STAGES and not quantised)
    return PREFILL.specialise(
        PREFILL_FORMATS[format_name], *widths, _bool(rotates), rows, stages, _bool(quantised)
    )


def prefill_rows(specialisation: Specialisation) -> int:
    """Return the packed rows per tile of a prefill kernel."""
    return int(specialisation.arguments[4])


def decode_mma_specialisation(format_name: str, k_width: int, v_width: int) -> Specialisation:
    """Return the decode kernel of a cache's format whose padded widths fit rows of K and V."""
    widths = padded_widths(k_width, v_width)
    if widths is None:
        raise ValueError(f"widths {k_width}, {v_width}: expected at most {PREFILL_WIDTHS[-1]}")
    return DECODE_MMA.specialise(CACHE_FORMATS[format_name].ctype, *widths)


def decode_mma_smem_bytes(specialisation: Specialisation, arch: str = "") -> int:
    """Return the dynamic shared memory of a block, `DecodeShape::kBytes` of the kernel."""
    ctype, *widths = specialisation.arguments
    k_width, v_width = map(int, widths)
    four_bit = next((f for f in FOUR_BIT.values() if f.ctype == ctype), None)
    itemsize = next((f.itemsize for f in FORMATS.values() if f.ctype == ctype), 1)
    keys = _TILE_KEYS[four_bit is not None or (itemsize == 1 and max(k_width, v_width) <= _NARROW)]
    tile_bytes = keys * itemsize * (k_width + v_width) // (1 if four_bit is None else 2)
    stages = 4 if tile_bytes <= 2048 else 2 if tile_bytes <= 10240 else 1
    if arch == "sm_75":
        stages = 1
    merge_bytes = DECODE_MMA_ROWS * (v_width + 8) * 4
    if four_bit is None:
        per_key = 8 * (2 * stages + (stages if itemsize == 2 else 1)) + 8 * stages
        table_bytes = -(-(keys * per_key + 4 * stages) // 8) * 8
    else:
        table_bytes = _four_bit_table_bytes(four_bit, stages, keys, k_width, v_width)
    per_warp = max(stages * tile_bytes, merge_bytes) + table_bytes
    return _DECODE_WARPS * per_warp + DECODE_MMA_ROWS * k_width * 2 + _DECODE_TILE_BYTES


def decode_mma_rest_bytes(specialisation: Specialisation) -> int:
    """Return what a block takes more where keys are stored rotated, up to `kRotatedBytes`."""
    k_width = int(specialisation.arguments[1])
    return DECODE_MMA_ROWS * k_width * 2 if k_width > _NARROW else 0


def _four_bit_table_bytes(
    format: FourBitFormat, stages: int, keys: int, k_width: int, v_width: int
) -> int:
    """Return the bytes of a `DecodeTable` of a four-bit format."""
    scales = [-(-n // format.group * format.scale_bytes // 4) * 4 for n in (k_width, v_width)]
    prepared = 16 + 4  # a float at a multiple of 16 bytes, and two fp16
    if format.group != 16:
        prepared = keys * (k_width // 32 * 4 + v_width // 32 * 2)
    total = stages * (keys * (16 + sum(scales)) + 4) + prepared
    return -(-total // 16) * 16


def latent_specialisation(format_name: str) -> Specialisation:
    """Return the kernel of a cache's format for rows up to `LATENT_WIDTHS`."""
    return DECODE_LATENT.specialise(CACHE_FORMATS[format_name].ctype)


def latent_smem_bytes(specialisation: Specialisation) -> int:
    """Return the dynamic shared memory of a block, `LatentShape::kBytes` of the kernel."""
    formats = {f.ctype: f.itemsize for f in FORMATS.values()}
    coded = specialisation.arguments[0] in FOUR_BIT_CTYPES  # whose tiles are fp16
    itemsize = 2 if coded else formats[specialisation.arguments[0]]
    keys, stages, width = 32, 2, LATENT_WIDTHS[0]
    tables = stages + 1 + coded
    angles = tables * keys if itemsize == 2 and not coded else keys
    table_bytes = tables * (keys * (2 * 8 + 2 * 4) + 4) + 8 * angles
    scores_bytes = DECODE_MMA_ROWS * (keys + 8) * 4
    tiles_bytes = (stages * keys * itemsize + DECODE_MMA_ROWS * 2) * width
    return tiles_bytes + scores_bytes + -(-table_bytes // 8) * 8 + _DECODE_TILE_BYTES


def heads_specialisation(format_name: str, fitting: int) -> Specialisation:
    """Return the kernel of a cache's format for many heads and rows up to `LATENT_WIDTHS`.

    `fitting` is the most shared memory of a block.
    """
    return DECODE_HEADS.specialise(FORMATS[format_name].ctype, _heads_keys(fitting))


def _heads_keys(fitting: int) -> int:
    """Return the most keys per tile that shared memory has room for, whatever the format."""
    widest_format = FORMATS["bf16"].ctype
    return next(
        n for n in HEADS_KEYS
        if n == HEADS_KEYS[-1]
        or heads_smem_bytes(DECODE_HEADS.specialise(widest_format, n)) <= fitting
    )  # fmt: skip


def heads_smem_bytes(specialisation: Specialisation) -> int:
    """Return the dynamic shared memory of a block, `HeadsShape::kBytes` of the kernel."""
    ctype, keys_per_tile = specialisation.arguments
    keys = int(keys_per_tile)
    itemsize = next(f.itemsize for f in FORMATS.values() if f.ctype == ctype)
    stages, warps, width = 2, HEADS_THREADS // 32, LATENT_WIDTHS[0]
    query_bytes = warps * (_HEADS_DEPTH_STEPS - _HEADS_HELD_STEPS[keys]) * 2 * 512
    sums_bytes = warps * 3 * 32 * keys
    angles = (stages + 1) * keys if itemsize == 2 else keys
    table_bytes = (stages + 1) * (keys * (2 * 8 + 2 * 4) + 4) + 8 * angles
    tiles_bytes = stages * keys * itemsize * width
    weights_bytes = HEADS_ROWS * keys * 4
    in_tables = -(-table_bytes // 8) * 8 + _HEADS_TILE_BYTES
    return tiles_bytes + query_bytes + sums_bytes + weights_bytes + in_tables


def padded_widths(k_width: int, v_width: int) -> tuple[int, int] | None:
    """Return the smallest widths of `PREFILL_WIDTHS` that fit rows of K and V, or None.

    >>> padded_widths(80, 80), padded_widths(192, 128), padded_widths(576, 512)
    ((128, 128), (192, 128), None)
    """
    return next((w for w in PREFILL_WIDTHS if k_width <= w[0] and v_width <= w[1]), None)


def prefill_smem_bytes(specialisation: Specialisation) -> int:
    """Return the dynamic shared memory of a block, `PrefillShape::kBytes` of the kernel."""
    k_width, v_width = map(int, specialisation.arguments[1:3])
    rows, stages = map(int, specialisation.arguments[4:6])
    rotates, quantised = (specialisation.arguments[i] == _bool(True) for i in (3, 6))
    keys = 64 if k_width <= 192 else 32
    k_bytes, v_bytes = stages * 2 * keys * k_width, stages * 2 * keys * v_width
    query_bytes = 2 * rows * k_width
    query_moves = k_width * (rows // PREFILL_ROWS[0]) <= 192 and stages == 1  # on, to registers
    per_key = 16
    if quantised:  # keys and values take turns, and arrive in another place
        v_bytes, k_bytes = max(k_bytes, v_bytes), keys * max(k_width, v_width)
        per_key += 8 + (k_width + v_width) // 16
    values = max(v_bytes, query_bytes) if query_moves else v_bytes + query_bytes
    table_bytes = -(-(per_key * keys + 8 * (keys if rotates else 1) + 4 * (keys // 32)) // 8) * 8
    entries_bytes = 2 * 8 * keys
    tile_bytes = 136 + (16 + 4 * PREFILL_THREADS // PREFILL_ROWS[0]) * rows  # a PrefillTile
    tables_bytes = (stages + 1) * table_bytes + entries_bytes
    return k_bytes + values + tables_bytes + tile_bytes


def _bool(value: bool) -> str:
    """Return a template argument."""
    return "true" if value else "false"


# --- The kernel of a call -------------------------------------------------------------------------

# A piece has at least 256 keys, or 128 KiB of them. Where sequences are long it has at least 512
# keys, 384 KiB of them, and 16 times the bytes of its state: on an H100 a piece that reads nothing
# takes as long as one that reads 96 KiB while all blocks read.
_MIN_KEYS, _MIN_BYTES = 256, 128 << 10
_MIN_KEYS_OF_LONG, _MIN_BYTES_OF_LONG, _MIN_BYTES_PER_STATE_BYTE = 512, 384 << 10, 16


@dataclass(frozen=True)
class Tiling:
    """The kernel of a call, and its tiles.

    Attributes
    ----------
    rows : packed rows per tile
    lanes : threads that share a key, in the decode kernel
    threads : per block
    smem_bytes : of dynamic shared memory per block
    blocks_per_sm : that run at a time; with 4, short sequences do not leave an SM idle
    slow_path_reason : why the call runs on a GPU without tensor cores; "" otherwise
    """

    specialisation: Specialisation
    rows: int
    lanes: int
    threads: int
    smem_bytes: int
    blocks_per_sm: int = 4
    slow_path_reason: str = ""


def choose_tiling(device: Device, call: AttentionCall, alignment: int) -> Tiling:
    """Choose the kernel of a call: prefill on tensor cores where it can take the call.

    `alignment` is the common alignment of query, caches, output and rope table, as a plan gets it.
    """
    invariant = call.options.batch_invariant
    if call.is_ragged and not invariant and suits_prefill(device, call, alignment):
        rows = _choose_prefill_rows(device, call)
        chosen = _prefill_specialisation_of(call, rows)
        smem_bytes = prefill_smem_bytes(chosen)
        resident = _resident_blocks(device, smem_bytes, 2)
        return Tiling(chosen, rows, 1, PREFILL_THREADS, smem_bytes, resident)
    reason = _invariance_reason(call) or decode_mma_unsupported_reason(device, call, alignment)
    if not reason:
        chosen = _decode_mma_specialisation_of(call)
        smem_bytes = _decode_mma_smem_bytes_of(call, device.arch)
        is_small = call.k.cache_format.name in PREFILL_FORMATS and max(_widths(call)) <= 64
        resident = _resident_blocks(device, smem_bytes, 3 if is_small else 2)
        return Tiling(chosen, DECODE_MMA_ROWS, 1, DECODE_MMA_THREADS, smem_bytes, resident)
    if padded_widths(*_widths(call)) is None:
        reason = _invariance_reason(call) or latent_unsupported_reason(device, call, alignment)
    if not reason:
        # No more blocks than an SM holds: a piece writes as many bytes as 114 latents have.
        coded = call.k.four_bit is not None
        many = has_many_rows(call) and not invariant
        if many and device.arch != "sm_75" and not coded:
            chosen = heads_specialisation(call.k.cache_format.name, device.shared_bytes)
            smem_bytes = heads_smem_bytes(chosen)
            return Tiling(chosen, HEADS_ROWS, 1, HEADS_THREADS, smem_bytes, blocks_per_sm=1)
        chosen = latent_specialisation(call.k.cache_format.name)
        smem_bytes = latent_smem_bytes(chosen)
        resident = _resident_blocks(device, smem_bytes, 2)
        return Tiling(chosen, DECODE_MMA_ROWS, 1, DECODE_MMA_THREADS, smem_bytes, resident)
    tiling = _decode_tiling(device, call, alignment)
    return replace(tiling, slow_path_reason=reason) if device.warp_lanes == 32 else tiling


def _resident_blocks(device: Device, smem_bytes: int, most: int) -> int:
    """Return how many blocks an SM holds; registers have room for `most`."""
    return max(1, min(most, device.shared_bytes // (smem_bytes + _RESERVED_SMEM_BYTES)))


def _invariance_reason(call: AttentionCall) -> str:
    """Return why no kernel on tensor cores is batch-invariant for a call that must be, or "".

    Its weights are rounded in units of the largest scale of a tile's values, and a tile of more
    tokens has later keys.
    """
    if not call.options.batch_invariant:
        return ""
    if "v_scale_cache" in call.arguments:
        return "batch_invariant does not support v_scale_cache"
    if call.v.four_bit is not None and call.v.cache_format.name not in CODED_LATENT_FORMATS:
        return f"batch_invariant does not support {call.v.cache_format.name} caches"
    return ""


def latent_unsupported_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    """Return why the kernel for wide rows, such as latents, does not support a call, or "".

    Formats and alignment must be as for decode on tensor cores. It does not rotate keys, and Turing
    lacks the shared memory.
    """
    widths = _widths(call)
    if any(n > most for n, most in zip(widths, LATENT_WIDTHS, strict=True)):
        return f"head dims {widths} of K and V exceed {LATENT_WIDTHS}"
    if call.rotates_keys:
        return f"RoPE on read is not supported for head dims {widths}"
    if call.k.four_bit is not None:
        return _four_bit_latent_reason(device, call, alignment)
    if reason := _format_or_alignment_reason(device, call, alignment):
        return reason
    return _arch_reason(device, latent_specialisation(call.k.cache_format.name))


def _four_bit_latent_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    """Return why the kernel for wide rows does not support a call over four-bit caches, or "".

    Codes must be whole words of 4 bytes at aligned addresses, and scales have their strides.
    """
    if reason := _query_or_row_reason(device, call, alignment):
        return reason
    name, widths = call.k.cache_format.name, _widths(call)
    if name not in CODED_LATENT_FORMATS:
        return f"{name} caches are not supported for head dims {widths}"
    if call.k.rotated_width or call.v.rotated_width:
        return f"caches that are stored rotated are not supported for head dims {widths}"
    for operand in (call.k, call.v):
        scales = operand.cache.scales
        assert scales is not None
        axes = 2 if operand.cache.num_heads == 1 else 3
        if operand.code_word_bytes(alignment) < 4:
            return f"codes of {operand.names.cache} are not whole aligned 4-byte words"
        if tuple(scales.strides[:axes]) != tuple(operand.cache_strides[:axes]):
            return f"codes and scales of {operand.names.cache} have other strides"
    return _arch_reason(device, latent_specialisation(name))


def _query_or_row_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    query, out = call.views["query"], call.views["out"]
    if reason := _query_reason(device, call):
        return reason
    if widest((alignment, *map(abs, (*query.strides[:2], *out.strides[:2])))) < _WORD_BYTES:
        return _UNALIGNED
    return ""


def has_many_rows(call: AttentionCall) -> bool:
    """Return whether sequences have more rows than a tile of few, as far as shapes tell."""
    return call.group * -(-call.num_tokens // max(1, call.num_sequences)) > DECODE_MMA_ROWS


def decode_mma_unsupported_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    """Return why the decode kernel on tensor cores does not support a call, or "".

    It does where threads run in warps, queries are fp16 or bf16, both caches have their format or
    one of 8 bits, and rows are whole 16-byte words at aligned addresses. One row alone wastes most
    of each product, which still takes less time than float32 arithmetic. `is_reachable` says what
    Turing lacks. Of four bits: `_four_bit_reason`.
    """
    if padded_widths(*_widths(call)) is None:
        return f"head dims {_widths(call)} of K and V exceed {PREFILL_WIDTHS[-1]}"
    if call.k.four_bit is not None:
        return _four_bit_reason(device, call, alignment)
    if reason := _format_or_alignment_reason(device, call, alignment):
        return reason
    if call.k.cache_format.itemsize == 1:
        if call.rotates_keys and not _has_rotary_packs(call, alignment, 2 * _PACK):
            return _rotary_reason(2 * _PACK)
    elif not _has_whole_packs(call, alignment):
        return _rotary_reason(_PACK)
    return _arch_reason(device, _decode_mma_specialisation_of(call))


def _four_bit_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    """Return why decode on tensor cores does not support a call over four-bit caches, or "".

    Codes and the group scales of a row must be whole words of 4 bytes at aligned addresses, and
    keys that RoPE rotates on their way whole chunks of 32 elements. Those are not stored rotated.
    """
    if reason := _query_or_row_reason(device, call, alignment):
        return reason
    if reason := _code_reason(call.k, alignment) or _code_reason(call.v, alignment):
        return reason
    if call.rotates_keys and call.k.rotated_width:
        return "RoPE on read is not supported for a k_cache that is stored rotated"
    if call.rotates_keys and not _has_rotary_packs(call, alignment, 4 * _PACK):
        return _rotary_reason(4 * _PACK)
    chosen = _decode_mma_specialisation_of(call)
    smem_bytes = _decode_mma_smem_bytes_of(call, device.arch)
    if call.k.rotated_width and smem_bytes > device.shared_bytes:
        return f"{device.arch} has too little shared memory for a cache that is stored rotated"
    return _arch_reason(device, chosen)


def _code_reason(operand: KVOperand, alignment: int) -> str:
    """Return why codes and scales of a four-bit cache cannot be copied in words, or ""."""
    format, scales = operand.four_bit, operand.cache.scales
    assert format is not None
    assert scales is not None
    scale_bytes = operand.cache.width // format.group * format.scale_bytes
    steps = (scale_bytes, scales.start_bytes, *scales.strides)
    if operand.code_word_bytes(alignment) >= 4 and not any(n % 4 for n in steps):
        return ""
    return (
        f"codes or scales of {operand.names.cache} ({scale_bytes} bytes of scales per row) "
        "are not whole aligned 4-byte words"
    )


_UNALIGNED = "rows of query, out or the caches are not whole aligned 16-byte words"


def _rotary_reason(elements: int) -> str:
    return f"RoPE on read needs rotary dims in whole aligned chunks of {elements} elements"


def _arch_reason(device: Device, specialisation: Specialisation) -> str:
    if is_reachable(specialisation, device.arch):
        return ""
    if device.arch == "sm_75" and specialisation.arguments[0] == PREFILL_FORMATS["bf16"]:
        return "sm_75 tensor cores do not support bf16"
    return f"{device.arch} has too few registers or too little shared memory for {specialisation}"


def _query_reason(device: Device, call: AttentionCall) -> str:
    if device.warp_lanes != 32:
        return "the device has no warps"
    query = call.views["query"]
    if query.format not in PREFILL_FORMATS:
        return f"query is {query.format}, expected {' or '.join(PREFILL_FORMATS)}"
    return ""


def _decode_mma_specialisation_of(call: AttentionCall) -> Specialisation:
    return decode_mma_specialisation(call.k.cache_format.name, *_widths(call))


def _decode_mma_smem_bytes_of(call: AttentionCall, arch: str) -> int:
    """Return the dynamic shared memory of a block, with `rest` of queries over rotated keys."""
    chosen = _decode_mma_specialisation_of(call)
    rest_bytes = decode_mma_rest_bytes(chosen) if call.k.rotated_width else 0
    return decode_mma_smem_bytes(chosen, arch) + rest_bytes


def _format_or_alignment_reason(device: Device, call: AttentionCall, alignment: int) -> str:
    """Return why formats or alignment do not suit decode on tensor cores, or ""."""
    query, out = call.views["query"], call.views["out"]
    cache_format = call.k.cache_format
    if reason := _query_reason(device, call):
        return reason
    if cache_format is not call.v.cache_format:
        return f"k_cache is {cache_format.name} but v_cache is {call.v.cache_format.name}"
    if cache_format.name not in LATENT_FORMATS:
        return f"{cache_format.name} caches are not supported for head dims {_widths(call)}"
    if cache_format.itemsize == 2 and query.format != cache_format.name:
        return f"query is {query.format} but the caches are {cache_format.name}"
    strides = (*query.strides[:2], *out.strides[:2], *call.k.cache_strides, *call.v.cache_strides)
    row_bytes = [operand.cache.width * cache_format.itemsize for operand in (call.k, call.v)]
    whole = widest((alignment, *map(abs, strides), *row_bytes)) == _WORD_BYTES
    return "" if whole else _UNALIGNED


def _widths(call: AttentionCall) -> tuple[int, int]:
    return call.k.cache.width, call.v.cache.width


def suits_prefill(device: Device, call: AttentionCall, alignment: int) -> bool:
    """Return whether the prefill kernel can take a ragged call.

    It can where threads run in warps, query and caches are all fp16 or all bf16, or the caches have
    8 or 4 bits, rows are whole words at aligned addresses, the kernel `is_reachable` on the
    architecture, and sequences have rows enough on average, as far as shapes tell.
    """
    if _query_or_row_reason(device, call, alignment) or padded_widths(*_widths(call)) is None:
        return False
    query_format = call.views["query"].format
    if _is_quantised(call):
        suitable = has_many_rows(call) and not call.rotates_keys  # few fit a tile of decode
        suitable &= all(_is_dequantised(v, query_format, alignment) for v in (call.k, call.v))
    else:
        formats = {operand.cache_format.name for operand in (call.k, call.v)}
        suitable = formats == {query_format} and _has_whole_packs(call, alignment)
    chosen = _prefill_specialisation_of(call, PREFILL_ROWS[0])
    if not suitable or not is_reachable(chosen, device.arch):
        return False
    rows = call.num_tokens * call.group
    return rows >= _MIN_ROWS_PER_SEQUENCE * max(1, call.num_sequences)


def _is_quantised(call: AttentionCall) -> bool:
    return call.k.cache_format.quantised and call.v.cache_format.quantised


def _is_dequantised(operand: KVOperand, query_format: str, alignment: int) -> bool:
    """Return whether prefill can dequantise a cache to the format of the query, exactly."""
    if operand.four_bit is None:
        strides = map(abs, operand.cache_strides)
        return widest((alignment, operand.cache.width, *strides)) == _WORD_BYTES
    exact = CODED_LATENT_FORMATS if query_format == "fp16" else (*CODED_LATENT_FORMATS, "mxfp4")
    if operand.cache_format.name not in exact:
        return False
    return not operand.rotated_width and not _code_reason(operand, alignment)


def _prefill_specialisation_of(call: AttentionCall, rows: int) -> Specialisation:
    return prefill_specialisation(
        call.views["query"].format, *_widths(call), rows=rows, rotates=call.rotates_keys,
        quantised=_is_quantised(call),
    )  # fmt: skip


def _choose_prefill_rows(device: Device, call: AttentionCall) -> int:
    """Return how many packed rows a tile of the prefill kernel has.

    With 128, matrices of K and V that are loaded from shared memory are multiplied twice. But tiles
    of sequences that have fewer rows are half empty, and where neither tiles nor pieces of their
    keys fill the device, twice as many tiles do.
    """
    few, many = PREFILL_ROWS
    widths = padded_widths(*_widths(call))
    if widths is None or widths[1] > 128:
        return few
    if not is_reachable(_prefill_specialisation_of(call, many), device.arch):
        return few
    if call.num_tokens * call.group <= few * call.num_sequences:
        return few
    blocks = call.num_tokens * call.group * call.k.cache.num_heads / many
    return many if blocks * max(1, call.max_keys / _MIN_KEYS_OF_LONG) >= device.sm_count else few


def _decode_tiling(device: Device, call: AttentionCall, alignment: int) -> Tiling:
    name = call.k.cache_format.ctype
    if call.k.four_bit is None and (
        call.k.cache_format is not call.v.cache_format or not _has_whole_packs(call, alignment)
    ):
        name = _ANY_FORMAT
    row_counts: tuple[int, ...]
    packs = -(-max(call.k.cache.width, call.v.cache.width) // _PACK)
    if device.warp_lanes == 1:
        kernel, threads, lanes, row_counts = DECODE[1], 1, 1, _HOST_ROWS
        packs_per_lane = next(n for n in _HOST_PACKS if n >= packs)
    else:
        kernel, threads = DECODE[32], _DECODE_THREADS
        packs_per_lane = next(n for n in _PACKS_PER_LANE if packs <= 32 * n)
        lanes = min(32, 1 << (-(-packs // packs_per_lane) - 1).bit_length())
        formats = _ROTATING_ROWS if call.rotates_keys else _DECODE_ROWS
        if packs_per_lane not in formats.get(name, {}):
            name = _ANY_FORMAT
        rotates = _bool(call.rotates_keys)
        row_counts = tuple(
            n for n in formats[name][packs_per_lane]
            if (device.arch, name, str(n), str(packs_per_lane), rotates) not in _SPILLING
        )  # fmt: skip
    # Rows of a sequence that can share what is loaded, as far as shapes tell.
    tokens = 1 if call.options.batch_invariant else -(-call.num_tokens // call.num_sequences)
    sharing = call.group * tokens
    rows = next((n for n in row_counts if n >= sharing), row_counts[-1])
    groups = threads // lanes
    smem_floats = groups * rows * (2 + lanes * _PACK * packs_per_lane)
    return Tiling(
        kernel.specialise(name, rows, packs_per_lane, _bool(call.rotates_keys)), rows, lanes,
        threads, 0 if groups == 1 else 4 * smem_floats,
    )  # fmt: skip


def _has_whole_packs(call: AttentionCall, alignment: int) -> bool:
    """Return whether rows of both caches are whole packs at aligned addresses.

    With keys that are rotated, their rotated elements and the angles too.
    """
    strides = [n for operand in (call.k, call.v) for n in operand.cache_strides]
    word_bytes = min(_WORD_BYTES, _PACK * call.k.cache_format.itemsize)
    whole = all(operand.cache.width % _PACK == 0 for operand in (call.k, call.v))
    if not whole or widest((alignment, *map(abs, strides))) < word_bytes:
        return False
    return not call.rotates_keys or _has_rotary_packs(call, alignment, _PACK)


def _has_rotary_packs(call: AttentionCall, alignment: int, elements: int) -> bool:
    """Return whether rotated elements are whole packs, and their angles at aligned addresses."""
    table = call.views["rope_table"]
    rotated = table.shape[1] if call.options.interleaved else table.shape[1] // 2
    whole = call.options.rotary_start % elements == 0 and rotated % elements == 0
    return whole and widest((alignment, abs(table.strides[0]))) == _WORD_BYTES


def num_tiles(call: AttentionCall, rows: int) -> int:
    """Return a bound on the tiles of all sequences, as `find_tile` of the kernels numbers them."""
    packed = call.num_tokens * call.group
    require_countable(packed, "query")
    if not call.is_ragged:
        return call.num_sequences * -(-call.group // rows)
    return packed // rows + call.num_sequences


def grid_of(
    specialisation: Specialisation, num_pieces: int, num_kv_heads: int
) -> tuple[int, int, int]:
    """Return the grid of an attention kernel: in decode, heads run fastest."""
    if specialisation.kernel is PREFILL:
        return num_pieces, num_kv_heads, 1
    num_layers = -(-num_pieces // _MAX_GRID_Y)
    return num_kv_heads, -(-num_pieces // num_layers), num_layers


@dataclass(frozen=True)
class Schedule:
    """How `attention_schedule` cuts the keys of a call into pieces, whatever its lengths are.

    Attributes
    ----------
    num_tiles : tiles that there may be
    num_pieces : pieces that there may be, and blocks for each KV head
    num_split_tiles : tiles of several pieces that there may be
    tile_rows : packed rows per tile
    num_running : pieces of one KV head that run at a time
    most_rounds : of pieces that long sequences are cut into
    least_keys : of a piece of long sequences
    min_keys : of any piece
    state_rows : packed rows that a piece may have
    """

    num_tiles: int
    num_pieces: int
    num_split_tiles: int
    tile_rows: int
    num_running: int
    most_rounds: int
    least_keys: int
    min_keys: int
    state_rows: int

    @property
    def num_states(self) -> int:
        """Pieces of split tiles that there may be: each of the tiles rounds up to one more."""
        return self.num_pieces - self.num_tiles + self.num_split_tiles

    @property
    def most_parts(self) -> int:
        """Pieces of one tile that there may be."""
        return self.num_pieces - self.num_tiles + 1


def choose_schedule(device: Device, call: AttentionCall, tiling: Tiling) -> Schedule | None:
    """Return the bounds of a call's pieces, from shapes alone, or None where no tile needs two."""
    if call.options.batch_invariant:
        return None
    tiles, cache = num_tiles(call, tiling.rows), call.k.cache
    options, visible_keys = call.options, call.max_keys
    if options.window and options.causal and "tree_mask" not in call.arguments:
        tokens = -(-tiling.rows // call.group) + 1 if call.is_ragged else 1  # of a tile, at most
        visible_keys = min(visible_keys, options.window + tokens - 1 + options.sink_keys)
    row_bytes = [
        operand.cache.width * bytes_per_element(operand.cache_format.name)
        for operand in (call.k, call.v)
    ]
    state_rows = tiling.rows if call.is_ragged else min(tiling.rows, call.group)
    state_bytes = 2 * 4 * state_rows * call.v.cache.width  # written and read
    # Pieces of wide rows may have fewer keys, but as many bytes as their states.
    min_bytes = max(_MIN_BYTES, state_bytes)
    min_keys = min(_MIN_KEYS, math.ceil(min_bytes / max(row_bytes)))
    if visible_keys <= min_keys:
        return None
    num_running = max(1, tiling.blocks_per_sm * device.sm_count // cache.num_heads)
    # Finer pieces end more evenly, and need a larger workspace for their states.
    most_rounds = 4 if state_rows <= DECODE_MMA_ROWS else 2
    long_bytes = max(_MIN_BYTES_OF_LONG, _MIN_BYTES_PER_STATE_BYTE * state_bytes)
    least_keys = max(_MIN_KEYS_OF_LONG, int(long_bytes / sum(row_bytes)))
    # More pieces than tiles: see least_piece_keys of the kernel.
    all_keys = tiles * visible_keys
    more = max(num_running, min(num_running * most_rounds, all_keys // least_keys))
    more = min(more, all_keys // min_keys)
    num_pieces = tiles + more
    num_layers = -(-num_pieces // _MAX_GRID_Y)
    num_pieces = -(-num_pieces // num_layers) * num_layers
    return Schedule(
        tiles, num_pieces, min(tiles, more), tiling.rows, num_running, most_rounds, least_keys,
        min_keys, state_rows,
    )  # fmt: skip
