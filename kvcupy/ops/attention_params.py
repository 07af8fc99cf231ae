"""The one argument of the attention kernels, as `kernels_src/attention.cuh` has it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..kernels import Specialisation
from . import side

ARRAYS = (
    "query", "k_cache", "v_cache", "block_table", "seq_lens", "query_starts", "k_scale", "v_scale",
    "k_scale_cache", "v_scale_cache", "sinks", "tree_mask", "out", "lse", "partial_out",
    "partial_lse",
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
