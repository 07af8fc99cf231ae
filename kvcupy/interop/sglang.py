"""SGLang's kernels by their names and signatures, over kvcupy's operations. SGLang is not needed.

These are functions of `sgl_kernel` (stores, RoPE with a fused store, transfers between device and
host pools) and functions that SGLang compiles at run time (`store_cache`, `set_mla_kv_buffer`,
`apply_rope_inplace`, `apply_rope_inplace_with_kvcache`). Tensors are torch's, on a GPU or the CPU.
Locations and indices may be int32 or int64.

What differs from SGLang everywhere: any width works; a negative location is skipped; one past the
end is skipped and raised by `kvcupy.check_faults`, where SGLang's kernels write outside; a
TypeError or ValueError names the argument, before anything is written. Options that tune SGLang's
kernels are ignored.
`docs/moving_from_other_libraries.md` has a table of all calls.

Transfers: `item_size` and `src_layout_dim` are bytes, per token and layer, and per token of all
layers. Each call wraps the memory again, in time that grows with the number of rows;
`kvcupy.TransferEngine` over pools of `KVPool.wrap` wraps it once.

Examples
--------
>>> k_cache, v_cache = torch.zeros(2, 32, 16)
>>> rows, locations = torch.ones(2, 16), torch.tensor([7, 0])
>>> store_cache(rows, 2 * rows, k_cache, v_cache, locations)  # slot 0 is never written
>>> float(v_cache[7, 0]), float(v_cache[0, 0])
(2.0, 0.0)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import (
    describe_tensor,
    refuse_names,
    require_cos_sin_cache,
    require_dtype,
    require_indices,
    require_shape,
    split_heads,
)
from . import torch as _kv
from .rows import merge, rows_of, transfer_rows

__all__ = [
    "FusedSetKVBufferArg",
    "apply_rope_inplace",
    "apply_rope_inplace_with_kvcache",
    "apply_rope_with_cos_sin_cache_inplace",
    "can_use_set_mla_kv_buffer",
    "can_use_store_cache",
    "merge_state",
    "merge_state_v2",
    "set_kv_buffer",
    "set_kv_buffer_kernel",
    "set_mla_kv_buffer",
    "store_cache",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_mla",
    "transfer_kv_per_layer_mla_pf_lf",
    "transfer_kv_per_layer_pf_lf",
]


# --- Stores ---------------------------------------------------------------------------------------


def set_kv_buffer_kernel(
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    k: Tensor,
    v: Tensor,
    fallback: bool = False,
) -> None:
    """Write rows of K and V to their locations: `kvcupy.store_kv`.

    Parameters
    ----------
    k_cache, v_cache : (slots, row) or (slots, H, D), written in place
    loc : (T,)
    k, v : (T', row) or (T', H, D), T' >= T, of the caches' dtypes; bits are copied
    fallback : ignored; any width has a kernel

    Notes
    -----
    Differs from SGLang: K and V may have different widths and strides, and no error makes it fall
    back. Stream, Capture, Bytes: as `kvcupy.store_kv`. Source: sgl-project/sglang pull 8884.

    Examples
    --------
    >>> k_cache, v_cache = torch.zeros(2, 32, 2, 8)
    >>> set_kv_buffer_kernel(
    ...     k_cache, v_cache, torch.tensor([3]), torch.ones(1, 2, 8), torch.ones(1, 2, 8)
    ... )
    >>> float(k_cache.sum())
    16.0
    """
    _store(k, v, k_cache, v_cache, loc, "loc")


def set_kv_buffer(
    k_buffer: Tensor,
    v_buffer: Tensor,
    loc: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Do as `set_kv_buffer` of SGLang's pools, for the buffers of a layer: `kvcupy.store_kv`.

    Parameters
    ----------
    k_buffer, v_buffer : (slots, H, D), (slots, H, Dv), written in place: of the rows' dtype, or
        another, or uint8 that holds `dtype`
    loc : (T,)
    cache_k, cache_v : (T', H, D), (T', H, Dv), T' >= T; not modified
    k_scale, v_scale : dequantisation multipliers: None, a number, or float32 of one element or
        (H,). Ignored where the rows have the buffers' dtype, as in SGLang
    dtype : of the pool, where the buffers are uint8: torch.float8_e4m3fn or torch.float8_e5m2

    Notes
    -----
    Differs from SGLang: `x / scale` is float32 with one rounding, and saturates, where SGLang
    divides the caller's rows in place, in their dtype, and then casts. Two streams for K and V are
    not needed. Stream, Capture, Bytes: as `kvcupy.store_kv`.

    Examples
    --------
    >>> buffers, rows = torch.zeros(2, 8, 1, 4, dtype=torch.uint8), torch.ones(1, 1, 4)
    >>> set_kv_buffer(
    ...     *buffers, torch.tensor([3]), rows, rows, 0.5, dtype=torch.float8_e4m3fn
    ... )
    >>> float(buffers[0].view(torch.float8_e4m3fn)[3, 0, 0])
    2.0
    """
    buffers = []
    for x, rows, part in ((k_buffer, cache_k, "k"), (v_buffer, cache_v, "v")):
        require_shape(x, f"{part}_buffer", ("slots", "heads", "head_dim"))
        require_shape(rows, f"cache_{part}", ("tokens", *x.shape[1:]))
        if x.dtype == torch.uint8:
            if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
                expected = f"float8_e4m3fn or float8_e5m2 with a uint8 {part}_buffer"
                raise TypeError(f"dtype: expected {expected}, got {dtype}")
            x = x.view(dtype)
        buffers.append(x)
    require_shape(v_buffer, "v_buffer", (*k_buffer.shape[:2], "head_dim"))
    require_indices(loc, "loc", {"cache_k": cache_k, "cache_v": cache_v})
    _kv.store_kv(
        cache_k, cache_v, buffers[0], buffers[1], loc,
        k_scale=None if cache_k.dtype == buffers[0].dtype else k_scale,
        v_scale=None if cache_v.dtype == buffers[1].dtype else v_scale,
    )  # fmt: skip


def store_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    *,
    row_bytes: int = 0,
    v_row_bytes: int = 0,
    num_split: int = 0,
    size_limit: int = 0,
    reserved_skip_index: int = 0,
) -> None:
    """Write rows of K and V to their indices: `kvcupy.store_kv` with skip_slot.

    Parameters
    ----------
    k, v, k_cache, v_cache : as in `set_kv_buffer_kernel`
    indices : (T,), of any stride
    row_bytes, v_row_bytes : 0, or bytes of a row of k and of v
    num_split : ignored
    size_limit : how many slots may be written, the others are past the end; 0: all
    reserved_skip_index : a slot that is never written, by default 0; -1: none

    Notes
    -----
    The signature is from SGLang 0.5.23. In 0.5.12 it has no reserved_skip_index and slot 0 is
    written; such calls look the same, so a program written for 0.5.12 must pass -1.

    Examples
    --------
    See the module.
    """
    for name, x, count in (("row_bytes", k, row_bytes), ("v_row_bytes", v, v_row_bytes)):
        if isinstance(x, Tensor) and count not in (0, expected := x[:1].nbytes):
            raise ValueError(f"{name}: expected 0 or {expected}, got {count}")
    if size_limit:
        if not 0 < size_limit <= len(k_cache):
            raise ValueError(f"size_limit: expected 0 to {len(k_cache)}, got {size_limit}")
        k_cache, v_cache = k_cache[:size_limit], v_cache[:size_limit]
    _store(k, v, k_cache, v_cache, indices, "indices", reserved_skip_index)


def can_use_store_cache(k_row_bytes: int, v_row_bytes: int = 0, num_threads: int = 0) -> bool:
    """Return whether `store_cache` takes rows of so many bytes: it takes all."""
    return True


def can_use_set_mla_kv_buffer(nope_bytes: int, rope_bytes: int) -> bool:
    """Return whether `set_mla_kv_buffer` takes rows of so many bytes: it takes all."""
    return True


def set_mla_kv_buffer(
    kv_buffer: Tensor,
    loc: Tensor,
    cache_k_nope: Tensor,
    cache_k_rope: Tensor,
    num_warps: int = 0,
    *,
    reserved_skip_index: int = 0,
) -> None:
    """Write latent and rotated key of MLA side by side: `kvcupy.store_mla`.

    Parameters
    ----------
    kv_buffer : (slots, R + P) or (slots, 1, R + P), written in place
    loc : (T,)
    cache_k_nope, cache_k_rope : (T', R), (T', P), or with an axis of one head; of kv_buffer's dtype
    num_warps : ignored
    reserved_skip_index : as in `store_cache`

    Examples
    --------
    >>> cache = torch.zeros(8, 1, 6)
    >>> set_mla_kv_buffer(cache, torch.tensor([2]), torch.ones(1, 1, 4), torch.ones(1, 1, 2))
    >>> float(cache[2].sum())
    6.0
    """
    kv_buffer = _without_head(kv_buffer, "kv_buffer")
    nope = _without_head(cache_k_nope, "cache_k_nope")
    rope = _without_head(cache_k_rope, "cache_k_rope")
    require_shape(kv_buffer, "kv_buffer", ("slots", nope.shape[1] + rope.shape[1]))
    parts = {"cache_k_nope": nope, "cache_k_rope": rope}
    require_indices(loc, "loc", parts)
    for name, x in parts.items():
        require_dtype(x, name, kv_buffer.dtype)
    _kv.store_mla(
        _as_format(nope), _as_format(rope), _as_format(kv_buffer), loc,
        skip_slot=_skip_slot(reserved_skip_index),
    )  # fmt: skip


def _store(
    k: Any, v: Any, k_cache: Any, v_cache: Any, loc: Any, loc_name: str, skip_index: int = -1
) -> None:
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if not isinstance(cache, Tensor) or cache.ndim not in (2, 3):
            got = describe_tensor(cache)
            raise ValueError(f"{name}_cache: expected (slots, row) or (slots, H, D), got {got}")
        require_shape(x, name, ("tokens", *cache.shape[1:]), cache.dtype)
    require_indices(loc, loc_name, {"k": k, "v": v})
    arrays = map(_as_format, (k, v, k_cache, v_cache))
    _kv.store_kv(*arrays, loc, skip_slot=_skip_slot(skip_index))


def _as_format(x: Tensor) -> Tensor:
    """Return bytes, which quantised pools of SGLang are, as numbers that are copied bit for bit."""
    return x.view(torch.int8) if x.dtype == torch.uint8 else x


def _skip_slot(reserved_skip_index: int) -> int | None:
    return None if reserved_skip_index < 0 else reserved_skip_index


def _without_head(x: Any, name: str) -> Tensor:
    if isinstance(x, Tensor) and x.ndim == 3:
        require_shape(x, name, ("rows", 1, "width"))
        return x[:, 0]
    require_shape(x, name, ("rows", "width"))
    tensor: Tensor = x
    return tensor


# --- Rotations ------------------------------------------------------------------------------------


@dataclass
class FusedSetKVBufferArg:
    """Where `apply_rope_with_cos_sin_cache_inplace` writes the rotated key, and the value.

    Parameters
    ----------
    value : (nnz, H * Dv), of key's dtype
    k_buffer, v_buffer : (slots, H * head_size), (slots, H * Dv); of key's dtype, or fp8 or int8
    k_scale, v_scale : dequantisation multipliers of quantised buffers: None, a number, or float32
        of one element or (H,). SGLang takes None alone
    cache_loc : int32 or int64 (T,)
    """

    value: Tensor
    k_buffer: Tensor
    v_buffer: Tensor
    k_scale: Tensor | float | None
    v_scale: Tensor | float | None
    cache_loc: Tensor


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
    fused_set_kv_buffer_arg: FusedSetKVBufferArg | None = None,
    enable_pdl: bool | None = None,
) -> None:
    """Rotate query and key in place, and store key and value: `apply_rope`, `rope_store_kv`.

    Parameters
    ----------
    positions : (nnz,)
    query, key : (nnz, Hq * head_size), (nnz, H * head_size)
    cos_sin_cache : float32 (max_position, rotary_dim), `[cos | sin]`
    is_neox : pairs are (i, i + rotary_dim / 2), else (2i, 2i + 1)
    fused_set_kv_buffer_arg : what to store, and where; None: only rotate
    enable_pdl : ignored

    Notes
    -----
    What is stored is the rotated key as it was rounded to its dtype. Differs from SGLang: buffers
    may be quantised (`x / scale` in float32, one rounding, saturating); any head_size; a position
    outside the table is a fault, and its token is neither rotated nor stored. Stream, Capture,
    Bytes: as `kvcupy.rope_store_kv`. Source: sgl-project/sglang pull 9077.

    Examples
    --------
    >>> table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> query, key, buffers = torch.ones(1, 4), torch.tensor([[1.0, 2.0]]), torch.zeros(2, 8, 2)
    >>> stored = FusedSetKVBufferArg(
    ...     torch.ones(1, 2), buffers[0], buffers[1], None, None, torch.tensor([5])
    ... )
    >>> apply_rope_with_cos_sin_cache_inplace(torch.tensor([1]), query, key, 2, table, True, stored)
    >>> buffers[:, 5].tolist()
    [[-2.0, 1.0], [1.0, 1.0]]
    """
    require_cos_sin_cache(cos_sin_cache)
    q, k = split_heads(query, "query", head_size), split_heads(key, "key", head_size)
    if fused_set_kv_buffer_arg is None:
        _kv.apply_rope(q, k, cos_sin_cache, positions, interleaved=not is_neox)
        return
    stored, count = fused_set_kv_buffer_arg, k.shape[1]
    require_shape(stored.k_buffer, "k_buffer", ("slots", k.shape[1] * head_size))
    require_indices(stored.cache_loc, "cache_loc", {"key": key, "value": stored.value})
    value, v_buffer = (
        _split(x, name, count)
        for x, name in ((stored.value, "value"), (stored.v_buffer, "v_buffer"))
    )
    require_shape(v_buffer, "v_buffer", (len(stored.k_buffer), count, value.shape[2]))
    for x, name in ((stored.k_buffer, "k_buffer"), (v_buffer, "v_buffer")):
        if x.dtype == torch.uint8:
            got = describe_tensor(x)
            raise TypeError(f"{name}: expected numbers, view bytes as their dtype, got {got}")
    _kv.rope_store_kv(
        q, k, value, cos_sin_cache, positions, _split(stored.k_buffer, "k_buffer", count), v_buffer,
        stored.cache_loc, interleaved=not is_neox, k_scale=stored.k_scale, v_scale=stored.v_scale,
    )  # fmt: skip


def apply_rope_inplace(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    is_neox: bool,
    rope_dim: int = 0,
) -> None:
    """Rotate query and key in place: `kvcupy.apply_rope`.

    Parameters
    ----------
    q, k : (nnz, Hq, D), (nnz, H, D)
    rope_dim : 0, or the table's width, which leads each head
    others : as in `apply_rope_with_cos_sin_cache_inplace`, and so are notes
    """
    _require_rope_dim(cos_sin_cache, rope_dim)
    for x, name in ((q, "q"), (k, "k")):
        require_shape(x, name, ("nnz", "heads", "head_dim"))
    _kv.apply_rope(q, k, cos_sin_cache, positions, interleaved=not is_neox)


def apply_rope_inplace_with_kvcache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    out_loc: Tensor,
    *,
    is_neox: bool,
    rope_dim: int = 0,
) -> None:
    """Rotate query and key in place, and store key and value: `kvcupy.rope_store_kv`.

    Parameters
    ----------
    q, k, v : (nnz, Hq, D), (nnz, H, D), (nnz, H, Dv)
    k_cache, v_cache : (slots, H * D), (slots, H * Dv), of the rows' dtypes
    out_loc : (T,)
    others : as in `apply_rope_inplace`

    Notes
    -----
    Differs from SGLang: partial rotation and any D work; positions and out_loc may have different
    dtypes. Slot 0 is a slot like others, as it is in SGLang's kernel.

    Examples
    --------
    >>> table, rows = torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, 2)
    >>> k_cache, v_cache = torch.zeros(2, 8, 4)
    >>> place = torch.tensor([0]), torch.tensor([5])
    >>> apply_rope_inplace_with_kvcache(
    ...     rows.clone(), rows.clone(), rows, k_cache, v_cache, table, *place, is_neox=True
    ... )
    >>> float(k_cache[5].sum()), float(v_cache.sum())
    (4.0, 4.0)
    """
    _require_rope_dim(cos_sin_cache, rope_dim)
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        require_shape(x, name, ("nnz", "heads", "head_dim"))
    heads = k.shape[1]
    require_shape(v, "v", (len(k), heads, "head_dim"))
    for x, cache, name in ((k, k_cache, "k_cache"), (v, v_cache, "v_cache")):
        require_shape(cache, name, ("slots", heads * x.shape[2]), x.dtype)
    require_indices(out_loc, "out_loc", {"k": k, "v": v})
    _kv.rope_store_kv(
        q, k, v, cos_sin_cache, positions, _split(k_cache, "k_cache", heads),
        _split(v_cache, "v_cache", heads), out_loc, interleaved=not is_neox,
    )  # fmt: skip


def _require_rope_dim(cos_sin_cache: Any, rope_dim: int) -> None:
    require_cos_sin_cache(cos_sin_cache)
    if rope_dim not in (0, cos_sin_cache.shape[1]):
        raise ValueError(f"rope_dim: expected 0 or {cos_sin_cache.shape[1]}, got {rope_dim}")


def _split(x: Any, name: str, heads: int) -> Tensor:
    """View (rows, heads * width) as (rows, heads, width)."""
    require_shape(x, name, ("rows", "heads * width"))
    if x.shape[1] % heads:
        raise ValueError(f"{name}: expected rows of {heads} heads, got {describe_tensor(x)}")
    rows: Tensor = x.unflatten(1, (heads, -1))
    return rows


# --- Transfers ------------------------------------------------------------------------------------


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy rows of K and V of one layer, by one launch: `kvcupy.transfer_pages`.

    Parameters
    ----------
    src_k, dst_k, src_v, dst_v : contiguous tensors of rows of item_size bytes, of any shape and
        dtype; on the CPU, in pinned memory if the others are on a GPU
    src_indices, dst_indices : (n,), rows; a pair with a negative one is skipped
    item_size : bytes of a row
    block_quota : blocks of the kernel
    num_warps_per_block : ignored

    Notes
    -----
    Differs from SGLang: item_size need not be a multiple of 8. Stream: torch's current one.
    Capture: as `kvcupy.transfer_pages`. Bytes: each row read once and written once. Source:
    sgl-project/sglang pull 7313.

    Examples
    --------
    >>> src, dst = torch.ones(2, 8, 16), torch.zeros(2, 4, 16)
    >>> rows = torch.tensor([7]), torch.tensor([2])
    >>> transfer_kv_per_layer(src[0], dst[0], src[1], dst[1], *rows, item_size=64)
    >>> dst[:, :, 0].tolist()
    [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    """
    src, dst = {"src_k": src_k, "src_v": src_v}, {"dst_k": dst_k, "dst_v": dst_v}
    _transfer(src, dst, src_indices, dst_indices, item_size, block_quota)


def transfer_kv_per_layer_mla(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy rows of the latent of one layer, as `transfer_kv_per_layer` copies K and V."""
    _transfer({"src": src}, {"dst": dst}, src_indices, dst_indices, item_size, block_quota)


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy rows of one layer from page_first memory, whose rows hold all layers of a token.

    Parameters
    ----------
    src_k, src_v : contiguous, rows of src_layout_dim bytes
    layer_id : which layer of src
    src_layout_dim : bytes of a row of all layers
    others : as in `transfer_kv_per_layer`, and so are notes
    """
    src, dst = {"src_k": src_k, "src_v": src_v}, {"dst_k": dst_k, "dst_v": dst_v}
    layer = layer_id, src_layout_dim
    _transfer(src, dst, src_indices, dst_indices, item_size, block_quota, *layer)


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy rows of the latent of one layer, as `transfer_kv_per_layer_pf_lf` copies K and V."""
    arrays, layer = ({"src": src}, {"dst": dst}), (layer_id, src_layout_dim)
    _transfer(*arrays, src_indices, dst_indices, item_size, block_quota, *layer)


def _transfer(
    src: dict[str, Tensor], dst: dict[str, Tensor], src_indices: Tensor, dst_indices: Tensor,
    item_size: int, block_quota: int, layer: int = 0, row_bytes: int | None = None,
) -> None:  # fmt: skip
    sources = [rows_of(x, name, item_size, layer, row_bytes) for name, x in src.items()]
    targets = [rows_of(x, name, item_size) for name, x in dst.items()]
    transfer_rows(sources, targets, src_indices, dst_indices, max_blocks=block_quota)


# --- States ---------------------------------------------------------------------------------------


def merge_state(
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    v_merged: Tensor | None = None,
    s_merged: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge attention of the same queries over two sets of keys: `kvcupy.merge_states`, base 2.

    Parameters
    ----------
    v_a, v_b : (T, H, D) fp32, fp16 or bf16
    s_a, s_b : (T, H), log-sum-exp in base 2
    v_merged, s_merged : (T, H, D), and float32 (T, H), written in place; None: allocated

    Returns
    -------
    v_merged, s_merged

    Notes
    -----
    Two states without keys give 0 and minus infinity. Stream, Capture: as `kvcupy.merge_states`.

    Examples
    --------
    >>> zero = torch.zeros(1, 1)
    >>> v, s = merge_state(torch.ones(1, 1, 2), zero, torch.full((1, 1, 2), 3.0), zero)
    >>> v.tolist(), float(s)
    ([[[2.0, 2.0]]], 1.0)
    """
    return merge(v_a, s_a, v_b, s_b, out=v_merged, lse_out=s_merged, lse_base="2")


def merge_state_v2(
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    v_merged: Tensor | None = None,
    s_merged: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge two states as `merge_state` does, of natural log-sum-exp.

    Notes
    -----
    An s of plus infinity, which FlashAttention gives where there are no keys, counts as minus
    infinity; torch replaces it first, in copies.
    """
    s_a, s_b = (torch.where(s == torch.inf, -torch.inf, s) for s in (s_a, s_b))
    return merge(v_a, s_a, v_b, s_b, out=v_merged, lse_out=s_merged, lse_base="e")


# --- Not offered ----------------------------------------------------------------------------------

refuse_names(__name__, {
    "transfer_kv_all_layer transfer_kv_all_layer_mla transfer_kv_all_layer_lf_pf "
    "transfer_kv_all_layer_mla_lf_pf transfer_kv_all_layer_lf_ph transfer_kv_per_layer_ph_lf "
    "transfer_kv_direct transfer_kv_per_layer_direct_pf_lf transfer_kv_all_layer_direct_lf_pf":
        "the host would have to read addresses or indices, and wait for the GPU; "
        "kvcupy.TransferEngine moves all layers between pools that KVPool.wrap makes",
    "transfer_hicache_one_layer transfer_hicache_all_layer":
        "kvcupy.transfer_pages moves rows of any stride between pools that KVPool.wrap makes",
    "fused_fp8_qkv_kv_cache":
        "kvcupy.rope_store_kv stores K and V in fp8; no operation writes an fp8 query",
    "concat_mla_k concat_mla_absorb_q": "kvcupy.store_mla stores both parts side by side",
    "set_kv_buffer_prefix_valid":
        "give the tokens that are not committed the slot -1 in kvcupy.store_kv",
})  # fmt: skip
