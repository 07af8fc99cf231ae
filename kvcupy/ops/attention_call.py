"""A call of `paged_attention`, checked, and the Params that its kernels take."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypedDict

import numpy as np

from .. import faults
from ..arrays import ArrayView
from ..formats import CACHE_FORMATS
from .kv_operand import OPERAND_PARAMS, KVOperand
from .launch import Pointer, fields_of
from .store import Scale


class AttentionOptions(NamedTuple):
    """The options of a call, checked. Equal options share a plan.

    `sm_scale` None is 1 / sqrt(D); `window` and `soft_cap` 0 are none; the first `sink_keys` stay
    visible past the window. `interleaved` and `rotary_start` say which elements of a key a rope
    table rotates. `batch_invariant`: one kernel for all numbers of tokens, whose sums have an order
    that only the positions of keys decide.
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


class AttentionArrays(NamedTuple):
    """The arguments of a call that are arrays, as `paged_attention` and `StepAttention` say."""

    query: ArrayView
    k_cache: ArrayView
    v_cache: ArrayView
    block_table: ArrayView
    seq_lens: ArrayView
    out: ArrayView | None = None
    lse_out: ArrayView | None = None
    sinks: ArrayView | None = None
    k_scale: Scale = None
    v_scale: Scale = None
    k_scale_cache: ArrayView | None = None
    v_scale_cache: ArrayView | None = None
    query_lens: ArrayView | None = None
    tree_mask: ArrayView | None = None
    evicted_starts: ArrayView | None = None
    evicted_lens: ArrayView | None = None
    key_starts: ArrayView | None = None
    tree_lens: ArrayView | None = None
    tree_positions: ArrayView | None = None
    rope_table: ArrayView | None = None
    cu_query_lens: ArrayView | None = None


@dataclass(frozen=True)
class AttentionCall:
    """A call whose arguments fit together: T, Hq, B, and the pages per row of the block table."""

    arrays: AttentionArrays
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

    @cached_property
    def fault_ids(self) -> dict[str, int]:
        """Numbers of faults in arguments, by name."""
        cache, evicted = self.k.cache, self.arrays.evicted_starts is not None
        bounds = {
            "block_table": faults.below(cache.num_slots // cache.page_size),
            "seq_lens": f"0 to {self.max_keys}" + " less evicted_lens" * evicted,
            "query_lens": f"0 to {self.num_tokens} in all",
            "cu_query_lens": faults.starts(self.num_tokens),
        }
        return {a: faults.operation_id("paged_attention", a, b) for a, b in bounds.items()}

    @property
    def out(self) -> ArrayView:
        assert self.arrays.out is not None
        return self.arrays.out

    @property
    def is_ragged(self) -> bool:
        """Whether sequences may have any number of new tokens, not one each."""
        return self.arrays.query_lens is not None or self.arrays.cu_query_lens is not None

    @property
    def rotates_keys(self) -> bool:
        """Whether keys are cached raw and rotated on the way to the score."""
        return self.arrays.rope_table is not None


@dataclass(frozen=True)
class Schedule:
    """How `attention_schedule` cuts the keys of a call into pieces, whatever its lengths are.

    `num_tiles`, `num_pieces` (and blocks for each KV head) and `num_split_tiles`, of several
    pieces, are maxima. `num_running` pieces of one KV head run at a time; long sequences are cut
    into pieces of at most `most_rounds` rounds and at least `least_keys` keys, and none has less
    than `min_keys`. A tile has `tile_rows` packed rows, a piece up to `state_rows`.
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


# --- Params ---------------------------------------------------------------------------------------


class AttentionPointers(TypedDict, total=False):
    """The pointers of AttentionParams in kernels_src/attention.cuh."""

    query: Pointer
    k_cache: Pointer
    v_cache: Pointer
    block_table: Pointer
    seq_lens: Pointer
    cu_query_lens: Pointer
    k_scale: Pointer
    v_scale: Pointer
    k_scale_cache: Pointer
    v_scale_cache: Pointer
    sinks: Pointer
    tree_mask: Pointer
    tree_lens: Pointer
    evicted_starts: Pointer
    evicted_lens: Pointer
    key_starts: Pointer
    rope_table: Pointer
    tree_positions: Pointer
    out: Pointer
    lse: Pointer
    pieces: Pointer
    split_tiles: Pointer
    partial_out: Pointer
    partial_lse: Pointer
    counters: Pointer
    faults: Pointer


_INT64 = (
    "query_token_bytes query_head_bytes out_token_bytes out_head_bytes lse_token_bytes "
    "lse_head_bytes table_row_bytes table_entry_bytes seq_len_bytes sink_bytes mask_row_bytes "
    "mask_column_bytes tree_len_bytes evicted_start_bytes evicted_len_bytes key_start_bytes "
    "rope_row_bytes tree_position_row_bytes tree_position_column_bytes max_positions num_pages "
    "max_pages window sink_keys table_operation length_operation starts_operation"
)
_INT32 = (
    "num_tokens num_sequences num_tiles num_pieces num_split_tiles tile_rows num_running "
    "most_rounds least_keys min_keys state_rows key_block num_heads group page_size page_shift "
    "table_index_bytes length_index_bytes mask_columns tree_position_columns rotary_start "
    "rotary_dim interleaved causal query_format k_format v_format out_format lane_shift"
)

# AttentionParams
PARAMS = np.dtype(
    [
        *fields_of(np.uint64, AttentionPointers.__annotations__),
        ("k", OPERAND_PARAMS),
        ("v", OPERAND_PARAMS),
        *fields_of(np.int64, _INT64),
        *fields_of(np.float32, "score_scale soft_cap cap_scale inverse_cap"),
        *fields_of(np.int32, _INT32),
    ],
    align=True,
)

# AttentionStartsParams of kernels_src/attention_schedule.cu
STARTS_PARAMS = np.dtype(
    [
        *fields_of(np.uint64, "query_lens starts faults"),
        *fields_of(np.int64, "length_bytes operation"),
        *fields_of(np.int32, "num_sequences num_tokens index_bytes"),
    ],
    align=True,
)

# AttentionPiece of kernels_src/attention.cuh
PIECE = np.dtype(
    [("sequence", "i4"), ("first_row", "i4"), ("part", "u2"), ("parts", "u2"), ("state", "i4")]
)

FORMAT_NUMBERS = {name: number for number, name in enumerate(CACHE_FORMATS)}

_KEY_BLOCK = 512  # keys that the groups of a block of the plain kernel take at a time, at most
_LOG2_E = math.log2(math.e)

# The fields that take the strides of an array; a last axis without one is contiguous.
_STRIDE_FIELDS = {
    "query": ("query_token_bytes", "query_head_bytes"),
    "out": ("out_token_bytes", "out_head_bytes"),
    "lse_out": ("lse_token_bytes", "lse_head_bytes"),
    "block_table": ("table_row_bytes", "table_entry_bytes"), "seq_lens": ("seq_len_bytes",),
    "sinks": ("sink_bytes",), "tree_lens": ("tree_len_bytes",), "key_starts": ("key_start_bytes",),
    "evicted_starts": ("evicted_start_bytes",), "evicted_lens": ("evicted_len_bytes",),
    "tree_mask": ("mask_row_bytes", "mask_column_bytes"), "rope_table": ("rope_row_bytes",),
    "tree_positions": ("tree_position_row_bytes", "tree_position_column_bytes"),
}  # fmt: skip


def attention_params(
    call: AttentionCall, schedule: Schedule | None, lanes: int, alignment: int
) -> dict[str, Any]:
    """Return the Params of a call, but for the addresses, whose words are of `alignment`.

    `schedule` is None where each tile is a piece.
    """
    options, cache, arrays = call.options, call.k.cache, call.arrays
    query, out, table, seq_lens = arrays.query, call.out, arrays.block_table, arrays.seq_lens
    params = {
        **call.k.params("k", call.k.cache.width, alignment),
        **call.v.params("v", call.v.cache.width, alignment),
        "k_format": FORMAT_NUMBERS[call.k.cache_format.name],
        "v_format": FORMAT_NUMBERS[call.v.cache_format.name],
        "query_format": FORMAT_NUMBERS[query.format],
        "out_format": FORMAT_NUMBERS[out.format],
        "table_index_bytes": table.itemsize,
        "table_operation": call.fault_ids["block_table"],
        "length_index_bytes": seq_lens.itemsize,
        "length_operation": call.fault_ids["seq_lens"],
        "starts_operation": (
            -1 if arrays.cu_query_lens is None else call.fault_ids["cu_query_lens"]
        ),
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
    for name, fields in _STRIDE_FIELDS.items():
        if (v := getattr(arrays, name)) is not None:
            params |= zip(fields, v.strides, strict=False)
    if arrays.tree_mask is not None:
        params["mask_columns"] = arrays.tree_mask.shape[1]
    if arrays.tree_positions is not None:
        params["tree_position_columns"] = arrays.tree_positions.shape[1]
    if arrays.rope_table is not None:
        params["max_positions"], params["rotary_dim"] = arrays.rope_table.shape
        params["rotary_start"] = options.rotary_start
        params["interleaved"] = int(options.interleaved)
    return params


def _float32(value: float) -> float:
    """Round to float32, to infinity where that has no room for the value."""
    return value if abs(value) < 1e38 else float(np.float32(value))


def starts_params(call: AttentionCall, query_lens: ArrayView) -> dict[str, Any]:
    """Return the Params of `attention_starts`, but for the addresses."""
    return {
        "length_bytes": query_lens.strides[0],
        "index_bytes": query_lens.itemsize,
        "operation": call.fault_ids["query_lens"],
        "num_sequences": call.num_sequences,
        "num_tokens": call.num_tokens,
    }
