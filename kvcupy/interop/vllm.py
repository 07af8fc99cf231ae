"""Names and signatures of `vllm._custom_ops` over kvcupy's operations. vLLM itself is not needed.

Tensors are torch's, on a GPU or the CPU. `kv_cache_dtype` is "auto", where rows have the cache's
dtype and are copied, or "fp8", "fp8_e4m3", "fp8_e5m2", where the cache is uint8 or a float8 dtype:
then `stored = x / scale`, in float32 with one rounding, saturating. Scales are float32 tensors of
one element or one per head, which "auto" ignores; numbers and None work too. The log-sum-exp is
natural.

What differs from vLLM everywhere: any width works; slots may be int32; a slot past the end is
skipped and raised by `kvcupy.check_faults`; errors name the argument.
`docs/moving_from_other_libraries.md` has a table of all calls.

Examples
--------
>>> key_cache, value_cache = torch.zeros(2, 4, 16, 2, 8, dtype=torch.uint8)
>>> rows, scale = torch.ones(2, 2, 8, dtype=torch.bfloat16), torch.tensor([0.5])
>>> slots = torch.tensor([17, -1])
>>> reshape_and_cache_flash(rows, rows, key_cache, value_cache, slots, "fp8", scale, scale)
>>> float(key_cache.view(torch.float8_e4m3fn)[1, 1, 0, 0])
2.0
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import describe_tensor, refuse_names, require_dtype, require_indices, require_shape
from . import torch as _kv

__all__ = [
    "concat_and_cache_mla",
    "concat_and_cache_mla_rope_fused",
    "merge_attn_states",
    "reshape_and_cache_flash",
    "rotary_embedding",
]

Scale: TypeAlias = "Tensor | float | None"

_FORMATS = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


# --- Stores ---------------------------------------------------------------------------------------


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """Write K and V of tokens into the slots of a paged cache: `kvcupy.store_kv`.

    Parameters
    ----------
    key, value : (T', H, D), T' >= T
    key_cache, value_cache : (num_blocks, block_size, H, D) of any strides, so that a permuted view
        of (num_blocks, H, block_size, D) is fine; written in place
    slot_mapping : int32 or int64 (T,); negative slots are skipped
    kv_cache_dtype : "auto", "fp8", "fp8_e4m3", "fp8_e5m2"
    k_scale, v_scale : dequantisation multipliers, as in the module

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    NotImplementedError : another kv_cache_dtype

    Notes
    -----
    Differs from vLLM: with "auto" a dtype other than the cache's is refused, where vLLM reads it as
    the cache's; D of key and value may differ. fp8 rows of the cache's own format are copied bit
    for bit. Stream, Capture, Bytes: as `kvcupy.store_kv`. Source: vLLM `csrc/cache_kernels.cu`.

    Examples
    --------
    See the module.
    """
    require_shape(key_cache, "key_cache", ("num_blocks", "block_size", "heads", "head_size"))
    blocks, size, heads, width = key_cache.shape
    require_shape(value_cache, "value_cache", (blocks, size, heads, "head_size"))
    require_shape(key, "key", ("tokens", heads, width))
    require_shape(value, "value", ("tokens", heads, value_cache.shape[3]))
    require_indices(slot_mapping, "slot_mapping", {"key": key, "value": value})
    format = _format(kv_cache_dtype)
    _require_format(key_cache, "key_cache", format, {"key": key})
    _require_format(value_cache, "value_cache", format, {"value": value})
    _kv.store_kv(
        key, value, key_cache, value_cache, slot_mapping, format=format,
        k_scale=_scale(k_scale, "k_scale", heads, format),
        v_scale=_scale(v_scale, "v_scale", heads, format),
    )  # fmt: skip


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Scale,
) -> None:
    """Write latent and rotated key of MLA side by side: `kvcupy.store_mla`.

    Parameters
    ----------
    kv_c, k_pe : (T', R), (T', P), T' >= T
    kv_cache : (num_blocks, block_size, R + P), written in place
    slot_mapping, kv_cache_dtype : as in `reshape_and_cache_flash`, and so are errors and notes
    scale : as k_scale there, of one element

    Notes
    -----
    "fp8_ds_mla", with scales among the bytes of a row, raises NotImplementedError.

    Examples
    --------
    >>> cache, latent, key = torch.zeros(2, 16, 6), torch.ones(1, 4), torch.full((1, 2), 2.0)
    >>> concat_and_cache_mla(latent, key, cache, torch.tensor([17]), "auto", torch.ones(1))
    >>> cache[1, 1].tolist()
    [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    """
    format = _require_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype)
    scale = _scale(scale, "scale", 1, format)
    _kv.store_mla(kv_c, k_pe, kv_cache, slot_mapping, format=format, scale=scale)


def concat_and_cache_mla_rope_fused(
    positions: Tensor,
    q_pe: Tensor,
    k_pe: Tensor,
    kv_c: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    kv_cache_dtype: str,
    kv_cache_scale: Scale,
) -> None:
    """Rotate the rope parts of an MLA query and key, and write the cache: `kvcupy.rope_store_mla`.

    Parameters
    ----------
    positions : int32 or int64 (T,)
    q_pe, k_pe : (T, Hq, P), (T, P), or (T, 1, P), rotated in place
    kv_c : (T, R)
    cos_sin_cache, is_neox : as in `rotary_embedding`
    slot_mapping, kv_cache, kv_cache_dtype, kv_cache_scale : as in `concat_and_cache_mla`

    Notes
    -----
    What is cached is the rotated key as it was rounded to its own dtype. A table that is not
    float32 is converted at each call, as in `rotary_embedding`. Errors: as
    `reshape_and_cache_flash`. Stream, Capture, Bytes: as `kvcupy.rope_store_mla`.

    Examples
    --------
    >>> cache, table = torch.zeros(2, 16, 6), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> q, key, latent = torch.ones(1, 4, 2), torch.tensor([[1.0, 2.0]]), torch.ones(1, 4)
    >>> concat_and_cache_mla_rope_fused(
    ...     torch.tensor([1]), q, key, latent, table, True, torch.tensor([0]), cache, "auto", None
    ... )
    >>> cache[0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0, -2.0, 1.0]
    """
    if isinstance(k_pe, Tensor) and k_pe.ndim == 3:
        require_shape(k_pe, "k_pe", ("tokens", 1, "width"))
        k_pe = k_pe[:, 0]
    format = _require_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype)
    require_shape(q_pe, "q_pe", ("tokens", "heads", k_pe.shape[1]))
    require_shape(positions, "positions", ("tokens",))
    scale = _scale(kv_cache_scale, "kv_cache_scale", 1, format)
    _kv.rope_store_mla(
        q_pe, kv_c, k_pe, _table(cos_sin_cache), positions, kv_cache, slot_mapping,
        interleaved=not is_neox, format=format, scale=scale,
    )  # fmt: skip


def _require_mla(
    kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, kv_cache_dtype: Any
) -> str | None:
    require_shape(kv_c, "kv_c", ("tokens", "kv_lora_rank"))
    require_shape(k_pe, "k_pe", ("tokens", "rope_dim"))
    width = kv_c.shape[1] + k_pe.shape[1]
    format = _format(kv_cache_dtype)
    require_shape(kv_cache, "kv_cache", ("num_blocks", "block_size", width))
    require_indices(slot_mapping, "slot_mapping", {"kv_c": kv_c, "k_pe": k_pe})
    _require_format(kv_cache, "kv_cache", format, {"kv_c": kv_c, "k_pe": k_pe})
    return format


def _format(kv_cache_dtype: Any) -> str | None:
    """Return the format of a cache; None: the format of the rows."""
    if kv_cache_dtype == "auto":
        return None
    if kv_cache_dtype in _FORMATS:
        return _FORMATS[kv_cache_dtype]
    raise NotImplementedError(
        f"kv_cache_dtype: expected 'auto' or one of {', '.join(_FORMATS)}, got {kv_cache_dtype!r}"
        "; formats with scales among the codes are laid out by vLLM's own kernels"
    )


def _require_format(cache: Tensor, name: str, format: str | None, rows: dict[str, Tensor]) -> None:
    if format is not None:
        require_dtype(cache, name, torch.uint8, _FP8[format])
        return
    for rows_name, x in rows.items():
        require_dtype(x, rows_name, cache.dtype)


def _scale(scale: Any, name: str, heads: int, format: str | None) -> Any:
    """Return a scale, or None for a cache of the rows' dtype."""
    if format is None:
        return None
    if isinstance(scale, Tensor):
        require_dtype(scale, name, torch.float32)
        if scale.numel() != 1:
            require_shape(scale, name, (heads,))
    return scale


# --- Rotations ------------------------------------------------------------------------------------


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate query and key in place: `kvcupy.apply_rope`.

    Parameters
    ----------
    positions : int32 or int64 (T,), or (batch, tokens)
    query, key : (T, Hq * head_size), (T, H * head_size), or with a separate axis of heads; or with
        the two axes of positions in front. Rotated in place. key may be None
    head_size : elements of a head
    cos_sin_cache : (max_position, rotary_dim), `[cos | sin]`
    is_neox : pairs are (i, i + rotary_dim / 2), else (2i, 2i + 1)
    rope_dim_offset : elements of a head in front of those that are rotated
    inverse : rotate back

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written

    Notes
    -----
    Differs from vLLM: arithmetic is float32 whatever the table's dtype is, with one rounding; a
    position outside the table is a fault. A table that is not float32, or inverse, is converted by
    torch at each call: keep a float32 one. Stream, Capture: as `kvcupy.apply_rope`.

    Examples
    --------
    >>> table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> query, key = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[1.0, 2.0]])
    >>> rotary_embedding(torch.tensor([1]), query, key, 2, table, True)
    >>> query.tolist(), key.tolist()
    ([[-2.0, 1.0, -4.0, 3.0]], [[-2.0, 1.0]])
    """
    require_dtype(positions, "positions", torch.int32, torch.int64)
    require_shape(cos_sin_cache, "cos_sin_cache", ("max_position", "rotary_dim"))
    end = rope_dim_offset + cos_sin_cache.shape[1]
    if rope_dim_offset < 0 or end > head_size:
        raise ValueError(
            f"rope_dim_offset: expected 0 to {head_size - cos_sin_cache.shape[1]}, "
            f"got {rope_dim_offset}"
        )
    if positions.ndim not in (1, 2):
        raise ValueError(f"positions: expected one or two axes, got {describe_tensor(positions)}")
    heads = [
        None if x is None else _heads(x, name, positions, head_size)[..., rope_dim_offset:]
        for x, name in ((query, "query"), (key, "key"))
    ]
    table = _table(cos_sin_cache)
    if inverse:
        cos, sin = table.chunk(2, dim=1)
        table = torch.cat((cos, -sin), dim=1)
    query_heads, key_heads = heads
    if key_heads is None:
        query_heads, key_heads = None, query_heads  # kvcupy rotates a key alone
    assert key_heads is not None
    _kv.apply_rope(
        query_heads, key_heads, table, positions.flatten(), interleaved=not is_neox
    )  # fmt: skip


def _heads(x: Any, name: str, positions: Tensor, head_size: int) -> Tensor:
    """View a query or key as (tokens, heads, head_size)."""
    axes = positions.ndim
    if not isinstance(x, Tensor) or tuple(x.shape[:axes]) != tuple(positions.shape):
        got = describe_tensor(x)
        raise ValueError(f"{name}: expected rows of {tuple(positions.shape)} tokens, got {got}")
    if x.ndim == axes + 1 and x.shape[-1] % head_size == 0:
        x = x.unflatten(-1, (-1, head_size))
    if x.ndim != axes + 2 or x.shape[-1] != head_size:
        raise ValueError(
            f"{name}: expected heads of head_size {head_size}, got {describe_tensor(x)}"
        )
    if axes == 2:
        try:
            return x.view(-1, *x.shape[2:])
        except RuntimeError:
            raise ValueError(
                f"{name}: expected tokens at one stride, got strides {x.stride()}"
            ) from None
    return x


def _table(cos_sin_cache: Any) -> Tensor:
    require_shape(cos_sin_cache, "cos_sin_cache", ("max_position", "rotary_dim"))
    table: Tensor = cos_sin_cache.float()
    return table


# --- States ---------------------------------------------------------------------------------------


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Tensor | None = None,
) -> None:
    """Merge attention over a prefix and over a suffix: `kvcupy.merge_states`.

    Parameters
    ----------
    output : (T, H, D), written in place
    prefix_output, suffix_output : (T, H, D), of output's dtype
    prefix_lse, suffix_lse : float32 (H, T), natural log-sum-exp
    output_lse : float32 (H, T), written in place; or None
    prefill_tokens_with_context : tokens from this one on have no prefix, and take the suffix
    output_scale : anything but None raises NotImplementedError

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written

    Notes
    -----
    An lse of plus infinity, which FlashAttention gives where there are no keys, counts as minus
    infinity. Differs from vLLM: where neither state has keys, output is 0, not the prefix's. torch
    replaces infinities first, in copies. Stream, Capture: as `kvcupy.merge_states`.

    Examples
    --------
    >>> output, zero = torch.empty(1, 1, 2), torch.zeros(1, 1)
    >>> merge_attn_states(output, torch.ones(1, 1, 2), zero, torch.full((1, 1, 2), 3.0), zero)
    >>> output.tolist()
    [[[2.0, 2.0]]]
    """
    if output_scale is not None:
        raise NotImplementedError("output_scale: merged outputs are not quantised")
    require_shape(output, "output", ("tokens", "heads", "head_size"))
    tokens, heads, _ = output.shape
    for x, name in ((prefix_output, "prefix_output"), (suffix_output, "suffix_output")):
        require_shape(x, name, tuple(output.shape))
        require_dtype(x, name, output.dtype)
    lse = []
    for x, name in ((prefix_lse, "prefix_lse"), (suffix_lse, "suffix_lse")):
        require_shape(x, name, (heads, tokens))
        require_dtype(x, name, torch.float32)
        lse.append(torch.where(x == torch.inf, -torch.inf, x).T)
    if prefill_tokens_with_context is not None:
        if not 0 <= prefill_tokens_with_context <= tokens:
            raise ValueError(
                f"prefill_tokens_with_context: expected 0 to {tokens}, "
                f"got {prefill_tokens_with_context}"
            )
        lse[0][prefill_tokens_with_context:] = -torch.inf
    if output_lse is not None:
        require_shape(output_lse, "output_lse", (heads, tokens))
        require_dtype(output_lse, "output_lse", torch.float32)
    _kv.merge_states(
        prefix_output, lse[0], suffix_output, lse[1], out=output,
        lse_out=None if output_lse is None else output_lse.T,
    )  # fmt: skip


# --- Not offered ----------------------------------------------------------------------------------

_GATHER = "kvcupy.gather_kv reads and dequantises the rows of slots"
_INDEXER = "kvcupy has no cache of an indexer of sparse attention"
_SPLIT_KEYS = "its keys are split in groups across a block; "

refuse_names(__name__, {
    "reshape_and_cache": _SPLIT_KEYS + "reshape_and_cache_flash has whole rows",
    "paged_attention_v1 paged_attention_v2 paged_attention_rocm":
        _SPLIT_KEYS + "kvcupy.paged_attention reads caches of reshape_and_cache_flash",
    "gather_and_maybe_dequant_cache cp_gather_cache cp_gather_and_upconvert_fp8_kv_cache": _GATHER,
    "indexer_k_quant_and_cache cp_gather_indexer_k_quant_cache": _INDEXER,
    "concat_and_cache_mla_grouped":
        "it takes addresses of caches without their lengths; call concat_and_cache_mla by layer",
    "concat_mla_q": "torch.cat((ql_nope, q_pe), dim=-1, out=q_out) does it",
    "swap_blocks swap_blocks_batch":
        "wrap the caches with kvcupy.KVPool.wrap, and call kvcupy.transfer_pages",
    "copy_blocks copy_blocks_mla": "call kvcupy.copy_pages",
    "convert_fp8": "kvcupy.transfer_pages converts with convert=True",
})  # fmt: skip
