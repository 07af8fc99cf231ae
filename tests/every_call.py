"""One valid call of each operation, for what all of them have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from helpers import from_values

Call = dict[str, Any]
"""Arguments by name."""


def array(device: Any, *shape: int, fmt: str = "fp32", seed: int = 0) -> Any:
    values = np.random.default_rng((seed, *shape)).standard_normal(shape)
    return device.asarray(from_values(values, fmt))


def indices(device: Any, *values: int) -> Any:
    return device.asarray(np.array(values))


def kv_caches(device: Any, fmt: str = "int8", **scales: Any) -> Call:
    """Caches of eight slots in two pages, with scales of each kind."""
    dtype = from_values(0.0, fmt).dtype
    scales = scales or {
        "k_scale": device.asarray(np.float32([0.5, 0.25])),
        "v_scale_cache": device.asarray(np.ones((8, 2), np.float32)),
    }
    return {
        "k_cache": device.zeros((2, 4, 2, 8), dtype),
        "v_cache": device.zeros((2, 4, 2, 6), dtype),
        **scales,
    }


def store_kv(device: Any) -> Call:
    return {
        "key": array(device, 3, 2, 8), "value": array(device, 3, 2, 6), **kv_caches(device),
        "slot_mapping": indices(device, 5, -1, 0),
    }  # fmt: skip


def store_mla(device: Any) -> Call:
    return {
        "latent": array(device, 3, 12), "rope_key": array(device, 3, 4),
        "cache": device.zeros((2, 4, 16), np.int8), "slot_mapping": indices(device, 5, -1, 0),
        "scale": device.asarray(np.float32([0.5])),
    }  # fmt: skip


def apply_rope(device: Any) -> Call:
    return {
        "query": array(device, 3, 4, 8), "key": array(device, 3, 2, 8),
        "rope_table": array(device, 16, 4), "positions": indices(device, 15, 0, 7),
        "query_norm": array(device, 8), "key_norm": array(device, 8, seed=1),
        "query_out": device.zeros((3, 4, 8), np.float32),
    }  # fmt: skip


def rope_store_kv(device: Any) -> Call:
    return {**apply_rope(device), **store_kv(device)}


def rope_store_mla(device: Any) -> Call:
    return {
        **store_mla(device), "query": array(device, 3, 4, 4), "rope_table": array(device, 16, 4),
        "positions": indices(device, 15, 0, 7),
    }  # fmt: skip


def gather_kv(device: Any) -> Call:
    return {
        **kv_caches(device), "slots": indices(device, 5, -1, 0),
        "k_out": device.zeros((3, 2, 8), np.float32), "v_out": device.zeros((3, 2, 6), np.float32),
    }  # fmt: skip


def copy_pages(device: Any) -> Call:
    return {
        "cache": array(device, 4, 2, 3), "src_pages": indices(device, 0, 1),
        "dst_pages": indices(device, 3, 2),
    }  # fmt: skip


def slot_mapping(device: Any) -> Call:
    return {
        "block_table": device.asarray(np.array([[3, 1], [0, 2]])),
        "seq_lens": indices(device, 6, 3), "append_lens": indices(device, 3, 2), "page_size": 4,
        "out": device.zeros(8, np.int64),
    }  # fmt: skip


def paged_attention(device: Any) -> Call:
    return {
        "query": array(device, 2, 4, 8), **kv_caches(device),
        "block_table": device.asarray(np.array([[1, 0], [0, 1]])),
        "seq_lens": indices(device, 7, 2),
        "out": device.zeros((2, 4, 6), np.float32), "lse_out": device.zeros((2, 4), np.float32),
    }  # fmt: skip


def merge_states(device: Any) -> Call:
    return {
        "out_a": array(device, 3, 2, 8), "lse_a": array(device, 3, 2),
        "out_b": array(device, 3, 2, 8, seed=1), "lse_b": array(device, 3, 2, seed=1),
        "out": device.zeros((3, 2, 8), np.float32), "lse_out": device.zeros((3, 2), np.float32),
    }  # fmt: skip


CALLS: dict[str, Callable[[Any], Call]] = {
    make.__name__: make
    for make in (
        store_kv, store_mla, apply_rope, rope_store_kv, rope_store_mla, gather_kv, copy_pages,
        slot_mapping, paged_attention, merge_states,
    )
}  # fmt: skip
