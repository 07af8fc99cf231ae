"""SGLang's kernels by their names and signatures, over kvcupy's operations. SGLang is not needed.

These are functions of `sgl_kernel` (stores, RoPE with a fused store, transfers between device and
host pools) and `store_cache`, which SGLang compiles at run time. Tensors are torch's, on a GPU or
the CPU. Locations and indices may be int32 or int64.

What differs from SGLang everywhere: any width works; a negative location is skipped; one past the
end is skipped and raised by `kvcupy.check_faults`, where SGLang's kernels write outside; a
TypeError or ValueError names the argument, before anything is written. Options that tune SGLang's
kernels are ignored.

Transfers: `item_size`, `src_layout_dim` and `dst_layout_dim` are bytes, per token and layer, and
per token of all layers. Each call wraps the memory again; `kvcupy.TransferEngine` over pools of
`KVPool.wrap` wraps it once. Each `transfer_kv_all_layer` that takes tables of the addresses of
layers reads them on the device. kvcupy does not check these addresses, keep their memory alive, or
notice an index past the end of a layer. These and `transfer_kv_per_layer_ph_lf` are not seen by the
order checker, and need a compiler, or raise CompileError.

Examples
--------
>>> k_cache, v_cache = torch.zeros(2, 32, 16)
>>> rows, locations = torch.ones(2, 16), torch.tensor([7, 0])
>>> store_cache(rows, 2 * rows, k_cache, v_cache, locations)  # slot 0 is never written
>>> float(v_cache[7, 0]), float(v_cache[0, 0])
(2.0, 0.0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import (
    describe_tensor,
    require_cos_sin_cache,
    require_indices,
    require_shape,
    split_heads,
)
from . import torch as _kv
from .rows import Side, rows_of, transfer_layers, transfer_rows

__all__ = [
    "FusedSetKVBufferArg",
    "apply_rope_with_cos_sin_cache_inplace",
    "set_kv_buffer_kernel",
    "store_cache",
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_all_layer_lf_pf",
    "transfer_kv_all_layer_lf_ph",
    "transfer_kv_all_layer_mla",
    "transfer_kv_all_layer_mla_lf_pf",
    "transfer_kv_direct",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_direct_pf_lf",
    "transfer_kv_per_layer_mla",
    "transfer_kv_per_layer_mla_pf_lf",
    "transfer_kv_per_layer_pf_lf",
    "transfer_kv_per_layer_ph_lf",
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


def _store(
    k: Any, v: Any, k_cache: Any, v_cache: Any, loc: Any, loc_name: str, skip_index: int = -1
) -> None:
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if not isinstance(cache, Tensor) or cache.ndim not in (2, 3):
            got = describe_tensor(cache)
            raise ValueError(f"{name}_cache: expected (slots, row) or (slots, H, D), got {got}")
        require_shape(x, name, ("tokens", *cache.shape[1:]), cache.dtype)
    require_indices(loc, loc_name, {"k": k, "v": v})
    _kv.store_kv(
        _as_format(k), _as_format(v), _as_format(k_cache), _as_format(v_cache), loc,
        skip_slot=_skip_slot(skip_index),
    )  # fmt: skip


def _as_format(x: Tensor) -> Tensor:
    """Return bytes, which quantised pools of SGLang are, as numbers that are copied bit for bit."""
    return x.view(torch.int8) if x.dtype == torch.uint8 else x


def _skip_slot(reserved_skip_index: int) -> int | None:
    return None if reserved_skip_index < 0 else reserved_skip_index


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


def transfer_kv_per_layer_ph_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy rows of one layer from page_head memory, (pages, heads, page_size, layers, head_dim).

    Parameters
    ----------
    src_indices : (n,), tokens: each is in a page of page_size
    page_size, head_num : of src
    others : as in `transfer_kv_per_layer_pf_lf`, and so are notes
    """
    if item_size > 0 and not 0 <= layer_id < src_layout_dim // item_size:
        expected = f"0 to {src_layout_dim // item_size - 1}"
        raise ValueError(f"layer_id: expected {expected}, got {layer_id}")
    src = {"src_k": src_k, "src_v": src_v}
    side = _by_head(src, item_size, 1, "src_layout_dim", src_layout_dim, page_size, head_num)
    side = replace(side, offset=layer_id * (item_size // head_num))
    target = Side({"dst_k": dst_k, "dst_v": dst_v}, item_size, head_bytes=item_size // head_num)
    transfer_layers(
        side, target, _by_head_index(src_indices, "src_indices", page_size, head_num), dst_indices,
        item_size, num_layers=1, heads=head_num, max_blocks=block_quota,
    )  # fmt: skip


def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy rows of K and V of all layers, by one launch.

    Parameters
    ----------
    src_k_layers, dst_k_layers, src_v_layers, dst_v_layers : uint64 or int64 (num_layers,), the
        addresses of each layer, multiples of 8 as kernels see them; on the device
    num_layers : how many layers
    others : as in `transfer_kv_per_layer`

    Notes
    -----
    Differs from SGLang: item_size need not be a multiple of 8. Stream: torch's current one.
    Capture: legal; a replay reads tables and indices again. The module has what is not checked.

    Examples
    --------
    >>> src, dst = torch.ones(3, 2, 8, 16), torch.zeros(3, 2, 4, 16)  # layers, K and V, rows
    >>> tables = [
    ...     torch.tensor([layer[part].data_ptr() for layer in x]) for part in (0, 1)
    ...     for x in (src, dst)
    ... ]
    >>> rows = torch.tensor([7]), torch.tensor([2])
    >>> transfer_kv_all_layer(*tables, *rows, item_size=64, num_layers=3)
    >>> dst[2, :, :, 0].tolist()
    [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    """
    _all_layers(
        {"src_k_layers": src_k_layers, "src_v_layers": src_v_layers},
        {"dst_k_layers": dst_k_layers, "dst_v_layers": dst_v_layers},
        src_indices, dst_indices, item_size, num_layers, block_quota,
    )  # fmt: skip


def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy rows of the latent of all layers, as `transfer_kv_all_layer` copies K and V."""
    _all_layers(
        {"src_layers": src_layers}, {"dst_layers": dst_layers}, src_indices, dst_indices,
        item_size, num_layers, block_quota,
    )  # fmt: skip


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy rows of all layers into page_first memory, whose rows hold all layers of a token.

    Parameters
    ----------
    dst_k, dst_v : contiguous, rows of dst_layout_dim bytes
    dst_layout_dim : bytes of a row of all layers
    others : as in `transfer_kv_all_layer`, and so are notes
    """
    _all_layers(
        {"src_k_layers": src_k_layers, "src_v_layers": src_v_layers},
        {"dst_k": dst_k, "dst_v": dst_v},
        src_indices, dst_indices, item_size, num_layers, block_quota, dst_layout_dim,
    )  # fmt: skip


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy rows of the latent of all layers, as `transfer_kv_all_layer_lf_pf` copies K and V."""
    _all_layers(
        {"src_layers": src_layers}, {"dst": dst}, src_indices, dst_indices, item_size, num_layers,
        block_quota, dst_layout_dim,
    )  # fmt: skip


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Copy rows of all layers into page_head memory, as in `transfer_kv_per_layer_ph_lf`.

    Parameters
    ----------
    dst_indices : (n,), tokens: each is in a page of page_size
    page_size, head_num : of dst
    others : as in `transfer_kv_all_layer_lf_pf`, and so are notes
    """
    dst, sizes = {"dst_k": dst_k, "dst_v": dst_v}, (page_size, head_num)
    side = _by_head(dst, item_size, num_layers, "dst_layout_dim", dst_layout_dim, *sizes)
    tables = {"src_k_layers": src_k_layers, "src_v_layers": src_v_layers}
    transfer_layers(
        Side(tables, item_size, head_bytes=item_size // head_num, is_table=True), side, src_indices,
        _by_head_index(dst_indices, "dst_indices", page_size, head_num), item_size,
        num_layers=num_layers, heads=head_num, max_blocks=block_quota,
    )  # fmt: skip


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy rows of several tensors: `kvcupy.transfer_pages` with method "auto".

    Parameters
    ----------
    src_layers, dst_layers : contiguous tensors, pairwise of rows of as many bytes
    src_indices, dst_indices : (n,), rows; a pair with a negative one is skipped. Where they are on
        the CPU, runs of rows may be copied by the copy engine
    page_size : ignored

    Notes
    -----
    Stream, Capture: as `kvcupy.transfer_pages`.
    """
    if len(src_layers) != len(dst_layers):
        expected = f"{len(src_layers)} tensors like src_layers"
        raise ValueError(f"dst_layers: expected {expected}, got {len(dst_layers)}")
    by_size: dict[int, tuple[list[Any], list[Any]]] = {}
    for i, (src, dst) in enumerate(zip(src_layers, dst_layers, strict=True)):
        sizes = _row_bytes(src, f"src_layers[{i}]"), _row_bytes(dst, f"dst_layers[{i}]")
        if sizes[0] != sizes[1]:
            raise ValueError(f"dst_layers[{i}]: expected rows of {sizes[0]} bytes, got {sizes[1]}")
        group = by_size.setdefault(sizes[0], ([], []))
        for own, x, name in zip(group, (src, dst), ("src_layers", "dst_layers"), strict=True):
            own.append(rows_of(x, f"{name}[{i}]", sizes[0]))
    transfer_rows(list(by_size.values()), src_indices, dst_indices, method="auto")


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy pages of layers from page_first_direct memory, (pages, layers, page_size, ...).

    Parameters
    ----------
    src_ptrs : contiguous K and V, or a latent alone
    dst_ptrs : contiguous layers of slots, from layer_id on: of K, and then as many of V
    src_indices, dst_indices : (n,), the tokens of whole pages, of which the first of each page
        counts; a page with a negative one is skipped
    layer_id : the first layer of src that is copied
    page_size : tokens of a page

    Notes
    -----
    Differs from SGLang: pages begin at multiples of page_size on both sides, and the indices may
    stay on the GPU. Otherwise as `transfer_kv_direct`.
    """
    groups = _direct_pages(src_ptrs, dst_ptrs, ("src_ptrs", "dst_ptrs"), layer_id, page_size)
    indices = _page_indices(src_indices, dst_indices, page_size)
    transfer_rows(groups, *indices, method="auto")


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy pages of layers into page_first_direct memory, (pages, layers, page_size, ...).

    Parameters
    ----------
    src_ptrs : contiguous layers of slots: of K, and then as many of V
    dst_ptrs : contiguous K and V, or a latent alone
    others : as in `transfer_kv_per_layer_direct_pf_lf`, and so are notes
    """
    groups = _direct_pages(dst_ptrs, src_ptrs, ("dst_ptrs", "src_ptrs"), 0, page_size)
    indices = _page_indices(src_indices, dst_indices, page_size)
    transfer_rows([(src, dst) for dst, src in groups], *indices, method="auto")


def _transfer(
    src: dict[str, Tensor], dst: dict[str, Tensor], src_indices: Tensor, dst_indices: Tensor,
    item_size: int, block_quota: int, layer: int = 0, row_bytes: int | None = None,
) -> None:  # fmt: skip
    sources = [rows_of(x, name, item_size, layer, row_bytes) for name, x in src.items()]
    targets = [rows_of(x, name, item_size) for name, x in dst.items()]
    transfer_rows([(sources, targets)], src_indices, dst_indices, max_blocks=block_quota)


def _all_layers(
    src: dict[str, Tensor], dst: dict[str, Tensor], src_indices: Tensor, dst_indices: Tensor,
    item_size: int, num_layers: int, block_quota: int, dst_layout_dim: int | None = None,
) -> None:  # fmt: skip
    """Copy from tables of layers to others, or into rows of all layers."""
    _require_layers(item_size, num_layers, "dst_layout_dim", dst_layout_dim)
    target = Side(dst, item_size, is_table=True)
    if dst_layout_dim is not None:
        target = Side(dst, dst_layout_dim, item_size)
    transfer_layers(
        Side(src, item_size, is_table=True), target, src_indices, dst_indices, item_size,
        num_layers=num_layers, heads=1, max_blocks=block_quota,
    )  # fmt: skip


def _require_layers(
    item_size: int, num_layers: int, layout_name: str, layout_dim: int | None
) -> None:
    for value, name in ((item_size, "item_size"), (num_layers, "num_layers")):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    least = item_size * num_layers
    if layout_dim is not None and layout_dim < least:
        raise ValueError(f"{layout_name}: expected at least {least}, got {layout_dim}")


def _by_head(
    tensors: dict[str, Tensor], item_size: int, num_layers: int, layout_name: str, layout_dim: int,
    page_size: int, head_num: int,
) -> Side:  # fmt: skip
    """Return page_head memory by the row of the first head of each token."""
    _require_layers(item_size, num_layers, layout_name, layout_dim)
    for value, name in ((page_size, "page_size"), (head_num, "head_num")):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    for value, name in ((item_size, "item_size"), (layout_dim, layout_name)):
        if value % head_num:
            raise ValueError(f"{name}: expected a multiple of head_num {head_num}, got {value}")
    row_bytes = layout_dim // head_num
    return Side(tensors, row_bytes, item_size // head_num, row_bytes * page_size)


def _by_head_index(indices: Any, name: str, page_size: int, head_num: int) -> Tensor:
    """Return the row of the first head of each token: a page has page_size rows of each head."""
    require_indices(indices, name)
    tokens: Tensor = indices.long()
    return tokens + tokens.div(page_size, rounding_mode="floor") * ((head_num - 1) * page_size)


def _row_bytes(x: Any, name: str, axis: int = 0) -> int:
    """Return the bytes of what follows an axis."""
    if not isinstance(x, Tensor) or x.ndim <= axis:
        raise TypeError(f"{name}: expected a tensor of rows, got {describe_tensor(x)}")
    num_bytes: int = math.prod(x.shape[axis + 1 :]) * x.element_size()
    return num_bytes


def _direct_pages(
    page_first: Sequence[Tensor], layers: Sequence[Tensor], names: tuple[str, str], layer_id: int,
    page_size: int,
) -> list[tuple[list[Any], list[Any]]]:  # fmt: skip
    """Return pages of layers of page_first_direct memory, and of layers of slots, by part."""
    if page_size < 1:
        raise ValueError(f"page_size: expected at least 1, got {page_size}")
    if len(page_first) not in (1, 2):
        raise ValueError(f"{names[0]}: expected one or two tensors, got {len(page_first)}")
    num_layers, rest = divmod(len(layers), len(page_first))
    if rest or not num_layers:
        expected = f"layers of {len(page_first)} tensors of {names[0]}"
        raise ValueError(f"{names[1]}: expected {expected}, got {len(layers)}")
    groups = []
    for i, pages in enumerate(page_first):
        name = f"{names[0]}[{i}]"
        page_bytes = page_size * _row_bytes(pages, name, 2)
        if pages.shape[2] != page_size:
            got = describe_tensor(pages)
            raise ValueError(f"{name}: expected (pages, layers, {page_size}, ...), got {got}")
        own: tuple[list[Any], list[Any]] = ([], [])
        for j in range(num_layers):
            n = i * num_layers + j
            sizes = page_bytes // page_size, _row_bytes(layers[n], f"{names[1]}[{n}]")
            if sizes[0] != sizes[1]:
                expected = f"rows of {sizes[0]} bytes"
                raise ValueError(f"{names[1]}[{n}]: expected {expected}, got {sizes[1]}")
            whole = pages.shape[1] * page_bytes
            own[0].append(rows_of(pages, name, page_bytes, layer_id + j, whole))
            own[1].append(rows_of(layers[n], f"{names[1]}[{n}]", page_bytes))
        groups.append(own)
    return groups


def _page_indices(src_indices: Any, dst_indices: Any, page_size: int) -> tuple[Tensor, Tensor]:
    """Return the pages of tokens, page by page."""
    pages = []
    for indices, name in ((src_indices, "src_indices"), (dst_indices, "dst_indices")):
        require_indices(indices, name)
        require_shape(indices, name, (len(src_indices),))
        if len(indices) % page_size:
            got = describe_tensor(indices)
            raise ValueError(f"{name}: expected a multiple of page_size {page_size}, got {got}")
        pages.append(indices[::page_size].div(page_size, rounding_mode="floor"))
    return pages[0], pages[1]
