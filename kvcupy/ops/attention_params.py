"""The one argument of the attention kernels, as `kernels_src/attention.cuh` has it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import faults
from ..kernels import Specialisation, zeroed
from . import side
from .attention_checks import Call

_LOG2_E = math.log2(math.e)

ARRAYS = (
    "query", "k_cache", "v_cache", "block_table", "seq_lens", "query_starts", "k_scale", "v_scale",
    "k_scale_cache", "v_scale_cache", "sinks", "tree_mask", "tree_lens", "hole_starts", "holes",
    "key_starts", "rope_table", "tail_positions", "out", "lse", "partial_out", "partial_lse",
)  # fmt: skip

PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in (*ARRAYS, "faults")),
        ("k", side.PARAMS),
        ("v", side.PARAMS),
        ("query_token_bytes", np.int64),
        ("query_head_bytes", np.int64),
        ("out_token_bytes", np.int64),
        ("out_head_bytes", np.int64),
        ("lse_token_bytes", np.int64),
        ("lse_head_bytes", np.int64),
        ("table_row_bytes", np.int64),
        ("table_entry_bytes", np.int64),
        ("seq_len_bytes", np.int64),
        ("sink_bytes", np.int64),
        ("mask_row_bytes", np.int64),
        ("mask_column_bytes", np.int64),
        ("tree_len_bytes", np.int64),
        ("hole_start_bytes", np.int64),
        ("hole_bytes", np.int64),
        ("key_start_bytes", np.int64),
        ("rope_row_bytes", np.int64),
        ("tail_row_bytes", np.int64),
        ("tail_column_bytes", np.int64),
        ("max_positions", np.int64),
        ("num_pages", np.int64),
        ("max_pages", np.int64),
        ("window", np.int64),
        ("sink_keys", np.int64),
        ("table_operation", np.int64),
        ("length_operation", np.int64),
        ("score_scale", np.float32),
        ("soft_cap", np.float32),
        ("cap_scale", np.float32),
        ("num_tokens", np.int32),
        ("num_sequences", np.int32),
        ("num_splits", np.int32),
        ("num_heads", np.int32),
        ("group", np.int32),
        ("page_size", np.int32),
        ("page_shift", np.int32),
        ("table_index_bytes", np.int32),
        ("length_index_bytes", np.int32),
        ("mask_columns", np.int32),
        ("tail_columns", np.int32),
        ("rotary_start", np.int32),
        ("rotary_dim", np.int32),
        ("interleaved", np.int32),
        ("causal", np.int32),
        ("query_format", np.int32),
        ("k_format", np.int32),
        ("v_format", np.int32),
        ("out_format", np.int32),
        ("lane_shift", np.int32),
    ],
    align=True,
)

FORMAT_NUMBERS = {
    name: i for i, name in enumerate(("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8"))
}


@dataclass(frozen=True)
class Tiling:
    """How a kernel is laid over a call.

    Parameters
    ----------
    specialisation : the kernel
    rows : packed rows a tile
    lanes : threads that share a key (the plain path)
    threads : a block
    smem_bytes : of dynamic shared memory a block
    """

    specialisation: Specialisation
    rows: int
    lanes: int
    threads: int
    smem_bytes: int


def fill(call: Call, num_splits: int, lanes: int) -> np.ndarray[Any, Any]:
    """Return the Params of a call without its addresses."""
    params = zeroed(PARAMS)
    options, cache = call.options, call.k.cache
    for name, one in (("k", call.k), ("v", call.v)):
        one.write(params[name], one.cache.width)
        params[f"{name}_format"] = FORMAT_NUMBERS[one.cache_format.name]
    query, out, lse, mask, sinks = (
        call.view(name) for name in ("query", "out", "lse_out", "tree_mask", "sinks")
    )
    table, lengths = call.view("block_table"), call.view("seq_lens")
    assert query is not None and out is not None and table is not None and lengths is not None
    for prefix, v in (("query", query), ("out", out), ("lse", lse)):
        if v is not None:
            params[f"{prefix}_token_bytes"], params[f"{prefix}_head_bytes"] = v.strides[:2]
    params["query_format"] = FORMAT_NUMBERS[query.format]
    params["out_format"] = FORMAT_NUMBERS[out.format]
    params["table_row_bytes"], params["table_entry_bytes"] = table.strides
    params["table_index_bytes"] = table.itemsize
    params["seq_len_bytes"], params["length_index_bytes"] = lengths.strides[0], lengths.itemsize
    params["table_operation"] = faults.operation_id("paged_attention", "block_table")
    params["length_operation"] = faults.operation_id("paged_attention", "seq_lens")
    if sinks is not None:
        params["sink_bytes"] = sinks.strides[0]
    if mask is not None:
        params["mask_row_bytes"], params["mask_column_bytes"] = mask.strides
        params["mask_columns"] = mask.shape[1]
    for name in ("tree_len", "hole_start", "hole", "key_start"):
        if (counts := call.view(f"{name}s")) is not None:
            params[f"{name}_bytes"] = counts.strides[0]
    _fill_rope(params, call)
    params["num_pages"] = cache.num_slots // cache.page_size
    params["page_size"], params["page_shift"] = cache.page_size, cache.page_shift
    params["max_pages"], params["num_sequences"] = call.max_pages, call.num_sequences
    params["num_tokens"], params["num_heads"] = call.num_tokens, call.num_heads
    params["group"], params["num_splits"] = call.group, num_splits
    params["window"], params["sink_keys"] = options.window, options.sink_keys
    params["causal"] = options.causal
    params["soft_cap"], params["cap_scale"] = options.soft_cap, options.soft_cap * _LOG2_E
    params["score_scale"] = call.sm_scale * (1.0 if options.soft_cap else _LOG2_E)
    params["lane_shift"] = lanes.bit_length() - 1
    return params


def _fill_rope(params: np.ndarray[Any, Any], call: Call) -> None:
    table, tail = call.view("rope_table"), call.view("tail_positions")
    if table is None:
        return
    params["max_positions"], params["rotary_dim"] = table.shape
    params["rope_row_bytes"] = table.strides[0]
    params["rotary_start"] = call.options.rotary_start
    params["interleaved"] = call.options.interleaved
    if tail is not None:
        params["tail_columns"] = tail.shape[1]
        params["tail_row_bytes"], params["tail_column_bytes"] = tail.strides
