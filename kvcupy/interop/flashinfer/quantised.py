"""FlashInfer's calls that quantise what they write. Import them from the package."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...formats import Layout
from ...ops.store import store_kv
from .. import require_cos_sin_cache, require_dtype, require_indices, require_shape
from .. import torch as _kv
from .plan import FP8, PagedCache, k_and_v, nvfp4_views
from .slots import slots_of

# --- fp8, rotated ---------------------------------------------------------------------------------


def rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotate the rope parts of query and key, and quantise all parts: `kvcupy.rope_store_kv`.

    Parameters
    ----------
    q_rope, q_nope : fp16 or bf16 (nnz, Hq, P), (nnz, Hq, N), often parts of one tensor. Not written
    k_rope, k_nope : (nnz, H, P), (nnz, H, N), or of MLA (nnz, P), (nnz, N)
    cos_sin_cache : float32 (max_seq_len, P), `[cos | sin]`
    pos_ids : (nnz,)
    is_neox : pairs are (i, i + P / 2), else (2i, 2i + 1)
    quantize_dtype : torch.float8_e4m3fn or float8_e5m2; None: of the outputs, else e4m3
    quant_scale_q, quant_scale_kv : multipliers of the values
    q_rope_out, k_rope_out, q_nope_out, k_nope_out : of quantize_dtype, written in place; None:
        allocated
    enable_pdl, backend : ignored

    Returns
    -------
    (q_rope_out, k_rope_out, q_nope_out, k_nope_out) : without a part, its output has no elements

    Notes
    -----
    Differs from FlashInfer: rotated values are first rounded to their own dtype; values are divided
    by the inverse of the scale, and saturate; a position outside the table is a fault, and its row
    is 0 in new outputs. Stream: two kernels, in order. Capture: legal.
    Source: FlashInfer `flashinfer.rope`.

    Examples
    --------
    >>> table, q, k = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(1, 2, 2), torch.ones(1, 2)
    >>> parts = rope_quantize_fp8(q, k, None, None, table, torch.tensor([1]), quant_scale_q=2.0)
    >>> [x.float().tolist() for x in parts[:2]]
    [[[[-2.0, 2.0], [-2.0, 2.0]]], [[-1.0, 1.0]]]
    """
    outs = q_rope_out, k_rope_out, q_nope_out, k_nope_out
    dtype = _quantize_dtype(quantize_dtype, [x for x in outs if x is not None])
    _require_parts(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids)
    q_scale, kv_scale = _inverse("q", quant_scale_q), _inverse("kv", quant_scale_kv)
    rotation = cos_sin_cache, pos_ids, torch.arange(len(pos_ids), device=q_rope.device), is_neox
    query = _outputs("q", (q_rope, q_nope), (q_rope_out, q_nope_out), dtype)
    key = _outputs("k", (k_rope, k_nope), (k_rope_out, k_nope_out), dtype)
    _rotate_and_quantise((q_rope, q_nope), query, *rotation, q_scale)
    _rotate_and_quantise((k_rope, k_nope), key, *rotation, kv_scale)
    return query[0], key[0], query[1], key[1]


mla_rope_quantize_fp8 = rope_quantize_fp8


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: Layout = "NHD",
    q_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate, quantise, and write K and V into their pages: `kvcupy.rope_store_kv`.

    Parameters
    ----------
    q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q,
    quant_scale_kv, q_rope_out, q_nope_out : as in `rope_quantize_fp8`
    v : (nnz, H, Dv); None of MLA
    paged_kv_cache : K (pages, page_size, H, P + N), rope part first, and V (pages, page_size, H,
        Dv), with "HND" the heads before the slots; of MLA (pages, page_size, N) and (pages,
        page_size, P), the latents first. Of quantize_dtype, written in place
    kv_indices, kv_indptr, batch_indices, positions : as in `append_paged_kv_cache`
    page_size : slots of a page of the cache
    enable_pdl : ignored

    Returns
    -------
    (q_rope_out, q_nope_out)

    Notes
    -----
    As `rope_quantize_fp8` and `append_paged_kv_cache`. Stream: two kernels, and a third for V where
    keys have both parts, in order.

    Examples
    --------
    >>> table, q, k = torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, 2), torch.ones(1, 1, 2)
    >>> caches = torch.zeros(2, 4, 16, 1, 2, dtype=torch.float8_e4m3fn)
    >>> at, indptr, indices = torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([3])
    >>> q_rope, _ = rope_quantize_fp8_append_paged_kv_cache(
    ...     q, k, None, None, 3 * k, table, at, tuple(caches), indices, indptr, at, at
    ... )
    >>> caches[1, 3, 0].float().tolist()
    [[3.0, 3.0]]
    """
    is_mla = k_rope.ndim == 2
    _require_parts(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids)
    rope_dim = k_rope.shape[-1]
    if is_mla:
        if v is not None or k_nope is None:
            raise ValueError("k_nope: expected latents, and v None, with keys (nnz, rope_dim)")
        ckv_cache, kpe_cache = paged_kv_cache
        require_shape(ckv_cache, "paged_kv_cache (ckv)", ("pages", page_size, k_nope.shape[1]))
        require_shape(kpe_cache, "paged_kv_cache (kpe)", (*ckv_cache.shape[:2], rope_dim))
        k_cache, v_cache = kpe_cache[:, :, None], ckv_cache[:, :, None]
        kv_layout = "NHD"
    else:
        if v is None:
            raise ValueError("v: expected values with keys (nnz, heads, rope_dim), got None")
        k_cache, v_cache = k_and_v(paged_kv_cache, kv_layout)
        heads, width = k_rope.shape[1], rope_dim + (0 if k_nope is None else k_nope.shape[2])
        axes = (page_size, heads) if kv_layout == "NHD" else (heads, page_size)
        require_shape(k_cache, "paged_kv_cache (K)", ("pages", *axes, width))
        require_shape(v, "v", (len(k_rope), heads, v_cache.shape[3]), k_rope.dtype)
    dtype = _quantize_dtype(quantize_dtype, [k_cache, v_cache])
    for x, part in ((k_cache, "first"), (v_cache, "second")):
        require_dtype(x, f"paged_kv_cache ({part})", dtype)
    slots = slots_of(
        batch_indices, positions, kv_indices, kv_indptr, len(k_cache), page_size,
        {"k_rope": k_rope},
    )  # fmt: skip
    q_scale, kv_scale = _inverse("q", quant_scale_q), _inverse("kv", quant_scale_kv)
    query = _outputs("q", (q_rope, q_nope), (q_rope_out, q_nope_out), dtype)
    rows = torch.arange(len(pos_ids), device=q_rope.device)
    _rotate_and_quantise((q_rope, q_nope), query, cos_sin_cache, pos_ids, rows, is_neox, q_scale)
    nope, into = k_nope, (k_cache, v_cache)
    if not is_mla and (nope is None or not nope.shape[-1]):
        nope = v
    elif not is_mla:
        into = k_cache[..., :rope_dim], k_cache[..., rope_dim:]
    _rotate_and_quantise(
        (k_rope, nope), into, cos_sin_cache, pos_ids, slots, is_neox, kv_scale, kv_layout
    )
    if v is not None and nope is not v:  # as two parts of each row, since K is written
        cut = v.shape[2] // 2
        _kv.store_kv(
            v[..., :cut], v[..., cut:], v_cache[..., :cut], v_cache[..., cut:], slots,
            layout=kv_layout, k_scale=kv_scale, v_scale=kv_scale,
        )  # fmt: skip
    return query


def _require_parts(
    q_rope: Any, k_rope: Any, q_nope: Any, k_nope: Any, cos_sin_cache: Any, pos_ids: Any
) -> None:
    require_cos_sin_cache(cos_sin_cache)
    require_indices(pos_ids, "pos_ids")
    count, width = len(pos_ids), cos_sin_cache.shape[1]
    require_shape(q_rope, "q_rope", (count, "heads", width))
    key = (count, width) if getattr(k_rope, "ndim", 3) == 2 else (count, "heads", width)
    require_shape(k_rope, "k_rope", key)
    for nope, rope, name in ((q_nope, q_rope, "q"), (k_nope, k_rope, "k")):
        require_dtype(rope, f"{name}_rope", torch.float16, torch.bfloat16, torch.float32)
        if nope is not None:
            require_shape(nope, f"{name}_nope", (*rope.shape[:-1], "width"), rope.dtype)


def _quantize_dtype(dtype: torch.dtype | None, tensors: list[Tensor]) -> torch.dtype:
    if dtype is None:
        dtype = tensors[0].dtype if tensors else torch.float8_e4m3fn
    if dtype not in FP8:
        raise TypeError(f"quantize_dtype: expected float8_e4m3fn or float8_e5m2, got {dtype}")
    return dtype


def _inverse(name: str, scale: Any) -> float:
    """Return what kvcupy divides by."""
    if not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0):
        raise ValueError(f"quant_scale_{name}: expected a positive number, got {scale!r}")
    return 1 / scale


def _outputs(
    name: str, parts: tuple[Tensor, Tensor | None], outs: tuple[Tensor | None, Tensor | None],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the outputs of both parts of a query or key."""
    rope, nope = parts[0], parts[0][..., :0] if parts[1] is None else parts[1]
    rope_out, nope_out = (
        x.new_zeros(x.shape, dtype=dtype) if out is None else out
        for x, out in zip((rope, nope), outs, strict=True)
    )
    require_shape(rope_out, f"{name}_rope_out", tuple(rope.shape), dtype)
    require_shape(nope_out, f"{name}_nope_out", tuple(nope.shape), dtype)
    return rope_out, nope_out


def _rotate_and_quantise(
    parts: tuple[Tensor, Tensor | None], outs: tuple[Tensor, Tensor], table: Tensor,
    positions: Tensor, slots: Tensor, is_neox: bool, scale: float, layout: Layout = "NHD",
) -> None:  # fmt: skip
    """Rotate the first part, and write both to slots of their outputs."""
    rope, nope = (x if x is None or x.ndim == 3 else x[:, None] for x in parts)
    rope_out, nope_out = (x[:, None] if x.ndim == 2 else x for x in outs)
    assert rope is not None
    if nope is None or not nope.shape[2]:  # a value is needed: an element, which goes nowhere
        nope = rope[..., :1]
        nope_out = torch.empty_like(nope, dtype=rope_out.dtype)
    _kv.rope_store_kv(
        None, rope, nope, table, positions, rope_out, nope_out, slots, interleaved=not is_neox,
        write_key=False, layout=layout, k_scale=scale, v_scale=scale,
    )  # fmt: skip


# --- nvfp4 ----------------------------------------------------------------------------------------


def nvfp4_quantize_append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: PagedCache,
    kv_cache_sf: PagedCache,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    k_scale: float,
    v_scale: float,
    kv_layout: Layout = "NHD",
) -> None:
    """Quantise K and V of appended tokens to nvfp4, and write them into their pages.

    Parameters
    ----------
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len : as in
        `append_paged_kv_cache`
    others : as in `nvfp4_quantize_append_paged_kv_cache_with_slot_mapping`, and so are notes
    """
    k_cache, _ = k_and_v(paged_kv_cache, kv_layout)
    page_size = k_cache.shape[1 if kv_layout == "NHD" else 2]
    rows = {"append_key": append_key, "append_value": append_value}
    slots = slots_of(
        batch_indices, positions, kv_indices, kv_indptr, len(k_cache), page_size, rows,
        kv_last_page_len,
    )  # fmt: skip
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        append_key, append_value, slots, paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout
    )


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: Tensor,
    append_value: Tensor,
    slot_mapping: Tensor,
    paged_kv_cache: PagedCache,
    kv_cache_sf: PagedCache,
    k_scale: float | Tensor,
    v_scale: float | Tensor,
    kv_layout: Layout = "NHD",
) -> None:
    """Quantise K and V to nvfp4, and write codes and block scales: `kvcupy.store_kv`.

    Parameters
    ----------
    append_key, append_value : (T', H, D), T' >= T, D a multiple of 16
    slot_mapping : int32 or int64 (T,); negative slots are skipped
    paged_kv_cache : uint8, as in `append_paged_kv_cache`, with rows of D / 2 bytes; written in
        place
    kv_cache_sf : float8_e4m3fn, likewise, with rows of D / 16 scales; written in place
    k_scale, v_scale : a number, or a float32 tensor of one element: value = code * block scale *
        scale

    Notes
    -----
    Rows are rounded as in other kvcupy caches of nvfp4. Stream, Capture,
    Bytes: as `kvcupy.store_kv`. Source: FlashInfer `flashinfer.page`.

    Examples
    --------
    >>> codes = torch.zeros(4, 2, 16, 1, 8, dtype=torch.uint8)
    >>> scales = torch.zeros(4, 2, 16, 1, 1, dtype=torch.float8_e4m3fn)
    >>> rows = torch.full((1, 1, 16), 6.0)
    >>> nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    ...     rows, rows, torch.tensor([17]), codes, scales, 1.0, 2.0
    ... )
    >>> codes[1, :, 1, 0, 0].tolist(), scales[1, :, 1, 0, 0].tolist()
    ([119, 119], [1.0, 0.5])
    """
    k_cache, v_cache = nvfp4_views(*k_and_v(paged_kv_cache, kv_layout), kv_cache_sf, kv_layout)
    rows = {"append_key": append_key, "append_value": append_value}
    require_indices(slot_mapping, "slot_mapping", rows)
    heads = k_cache.shape[2 if kv_layout == "NHD" else 1]
    for (name, x), cache in zip(rows.items(), (k_cache, v_cache), strict=True):
        require_shape(x, name, ("tokens", heads, cache.shape[3]))
    store_kv(
        append_key, append_value, k_cache, v_cache, slot_mapping, layout=kv_layout,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
