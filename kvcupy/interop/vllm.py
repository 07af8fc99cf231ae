"""Names and signatures of `vllm._custom_ops` over kvcupy's operations. vLLM itself is not needed.

Tensors are torch's, on a GPU or the CPU. `kv_cache_dtype` is "auto", where rows have the cache's
dtype and are copied, or "fp8", "fp8_e4m3", "fp8_e5m2", where the cache is uint8 or a float8 dtype:
then `stored = x / scale`, in float32 with one rounding, saturating. Scales are float32 tensors of
one element or one per head, which "auto" ignores; numbers and None work too. The log-sum-exp is
natural.

What differs from vLLM everywhere: any width works; slots may be int32; a slot past the end is
skipped and raised by `kvcupy.check_faults`; a TypeError or ValueError names the argument, before
anything is written. `docs/moving_from_other_libraries.md` has a table of all calls.

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

import numpy as np
import torch
from torch import Tensor

from .. import devices
from ..ops.store import store_kv
from . import (
    describe_tensor,
    refuse_names,
    require_dtype,
    require_indices,
    require_none,
    require_shape,
)
from . import torch as _kv
from .rows import rows_of, transfer_rows

__all__ = [
    "concat_and_cache_mla",
    "concat_and_cache_mla_rope_fused",
    "cp_gather_cache",
    "gather_and_maybe_dequant_cache",
    "merge_attn_states",
    "reshape_and_cache_flash",
    "rotary_embedding",
    "swap_blocks",
    "swap_blocks_batch",
]

Scale: TypeAlias = "Tensor | float | None"

_FP8 = {
    "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip


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
    key_cache, k_scale = _by_dtype(
        key_cache, "key_cache", kv_cache_dtype, {"key": key}, k_scale, "k_scale", heads
    )
    value_cache, v_scale = _by_dtype(
        value_cache, "value_cache", kv_cache_dtype, {"value": value}, v_scale, "v_scale", heads
    )
    # Not by the operator, whose dispatch takes longer; compiled code traces it nevertheless.
    store_kv(key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)


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
    slot_mapping, kv_cache_dtype : as in `reshape_and_cache_flash`, and so are notes
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
    kv_cache, scale = _mla_cache(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale, "scale")
    _kv.store_mla(kv_c, k_pe, kv_cache, slot_mapping, scale=scale)


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
    float32 is converted at each call, as in `rotary_embedding`. Stream, Capture, Bytes: as
    `kvcupy.rope_store_mla`.

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
    kv_cache, scale = _mla_cache(
        kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, kv_cache_scale, "kv_cache_scale"
    )
    require_shape(q_pe, "q_pe", ("tokens", "heads", k_pe.shape[1]))
    require_shape(positions, "positions", ("tokens",))
    _kv.rope_store_mla(
        q_pe, kv_c, k_pe, _table(cos_sin_cache), positions, kv_cache, slot_mapping,
        interleaved=not is_neox, scale=scale,
    )  # fmt: skip


def _mla_cache(
    kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, kv_cache_dtype: Any, scale: Scale,
    scale_name: str,
) -> tuple[Tensor, Scale]:  # fmt: skip
    require_shape(kv_c, "kv_c", ("tokens", "kv_lora_rank"))
    require_shape(k_pe, "k_pe", ("tokens", "rope_dim"))
    width = kv_c.shape[1] + k_pe.shape[1]
    require_shape(kv_cache, "kv_cache", ("num_blocks", "block_size", width))
    rows = {"kv_c": kv_c, "k_pe": k_pe}
    require_indices(slot_mapping, "slot_mapping", rows)
    return _by_dtype(kv_cache, "kv_cache", kv_cache_dtype, rows, scale, scale_name)


def _by_dtype(
    cache: Tensor, name: str, kv_cache_dtype: Any, rows: dict[str, Tensor], scale: Scale,
    scale_name: str, heads: int = 1,
) -> tuple[Tensor, Scale]:  # fmt: skip
    """Return a cache as kv_cache_dtype says, and its scale: None with "auto"."""
    if kv_cache_dtype == "auto":
        for rows_name, x in rows.items():
            require_dtype(x, rows_name, cache.dtype)
        return cache, None
    if kv_cache_dtype not in _FP8:
        raise NotImplementedError(
            f"kv_cache_dtype: expected 'auto' or one of {', '.join(_FP8)}, got {kv_cache_dtype!r}"
            "; formats with scales among the codes are laid out by vLLM's own kernels"
        )
    require_dtype(cache, name, torch.uint8, _FP8[kv_cache_dtype])
    if isinstance(scale, Tensor):
        require_dtype(scale, scale_name, torch.float32)
        if scale.numel() != 1:
            require_shape(scale, scale_name, (heads,))
    return cache.view(_FP8[kv_cache_dtype]), scale


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

    Notes
    -----
    Arithmetic is float32 with one rounding, as in vLLM's kernels; its path in PyTorch rounds each
    product. Differs from vLLM: a position outside the table is a fault. A table that is not
    float32, or inverse, is converted by torch at each call: keep a float32 one. Stream, Capture: as
    `kvcupy.apply_rope`.

    Examples
    --------
    >>> table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> query, key = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[1.0, 2.0]])
    >>> rotary_embedding(torch.tensor([1]), query, key, 2, table, True)
    >>> query.tolist(), key.tolist()
    ([[-2.0, 1.0, -4.0, 3.0]], [[-2.0, 1.0]])
    """
    require_dtype(positions, "positions", torch.int32, torch.int64)
    table = _table(cos_sin_cache)
    most = head_size - table.shape[1]
    if not 0 <= rope_dim_offset <= most:
        raise ValueError(f"rope_dim_offset: expected 0 to {most}, got {rope_dim_offset}")
    if positions.ndim not in (1, 2):
        raise ValueError(f"positions: expected one or two axes, got {describe_tensor(positions)}")
    query_heads, key_heads = (
        None if x is None else _heads(x, name, positions, head_size)[..., rope_dim_offset:]
        for x, name in ((query, "query"), (key, "key"))
    )
    if inverse:
        cos, sin = table.chunk(2, dim=1)
        table = torch.cat((cos, -sin), dim=1)
    if key_heads is None:  # kvcupy rotates a key alone
        query_heads, key_heads = None, query_heads
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


# --- Gathers --------------------------------------------------------------------------------------


def gather_and_maybe_dequant_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    token_to_seq: Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: Scale,
    seq_starts: Tensor | None = None,
) -> None:
    """Read the rows of sequences from their blocks, end to end: `kvcupy.gather_kv`.

    Parameters
    ----------
    src_cache : (num_blocks, block_size, width); further axes are part of a row
    dst : (T', width), T' >= num_tokens, written in place
    block_table : int32 or int64 (B, max_blocks)
    cu_seq_lens : int32 or int64 (B + 1,), where the rows of each sequence begin in dst
    token_to_seq : ignored; it follows from cu_seq_lens
    num_tokens : rows of dst that may be written
    kv_cache_dtype, scale : as in `reshape_and_cache_flash`; scale has one element
    seq_starts : (B,), the first token of each sequence that is read; None: 0

    Raises
    ------
    NotImplementedError : another kv_cache_dtype

    Notes
    -----
    Differs from vLLM: a row has any width from 2; seq_starts need not be multiples of block_size; a
    sequence past its row of the table is a fault. Stream: two kernels, in order, after what torch
    computes of the lengths. Capture: legal. Source: vLLM `csrc/cache_kernels.cu`.

    Examples
    --------
    >>> cache, dst = torch.arange(16.0).view(4, 2, 2), torch.zeros(3, 2)
    >>> table, starts = torch.tensor([[3, 0], [1, 2]]), torch.tensor([0, 1, 3])
    >>> sequences = torch.tensor([0, 1, 1])
    >>> gather_and_maybe_dequant_cache(cache, dst, table, starts, sequences, 3, "auto", None)
    >>> dst.tolist()
    [[12.0, 13.0], [4.0, 5.0], [6.0, 7.0]]
    """
    src_cache, dst = _require_gather(src_cache, dst, block_table, cu_seq_lens, seq_starts)
    if not 0 <= num_tokens <= len(dst):
        raise ValueError(f"num_tokens: expected 0 to the {len(dst)} of dst, got {num_tokens}")
    src_cache, scale = _by_dtype(
        src_cache, "src_cache", kv_cache_dtype, {"dst": dst}, scale, "scale"
    )
    _gather(src_cache, dst, block_table, cu_seq_lens, int(num_tokens), seq_starts, scale)


def cp_gather_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
) -> None:
    """Read the rows of sequences from their blocks, bit for bit: `kvcupy.gather_kv`.

    Parameters
    ----------
    dst : (T, width), of src_cache's dtype, written in place
    batch_size : how many sequences of block_table are read
    others : as in `gather_and_maybe_dequant_cache`, and so are notes

    Examples
    --------
    >>> cache, dst = torch.arange(16.0).view(4, 2, 2), torch.zeros(1, 2)
    >>> cp_gather_cache(cache, dst, torch.tensor([[3]]), torch.tensor([0, 1]), 1, torch.tensor([1]))
    >>> dst.tolist()
    [[14.0, 15.0]]
    """
    if not 0 <= batch_size <= len(block_table):
        expected = f"0 to the {len(block_table)} of block_table"
        raise ValueError(f"batch_size: expected {expected}, got {batch_size}")
    cu_seq_lens, block_table = cu_seq_lens[: batch_size + 1], block_table[:batch_size]
    seq_starts = None if seq_starts is None else seq_starts[:batch_size]
    src_cache, dst = _require_gather(src_cache, dst, block_table, cu_seq_lens, seq_starts)
    require_dtype(dst, "dst", src_cache.dtype)
    if src_cache.element_size() == 1:  # bits are copied, whatever they mean
        src_cache, dst = src_cache.view(torch.int8), dst.view(torch.int8)
    _gather(src_cache, dst, block_table, cu_seq_lens, len(dst), seq_starts, None)


def _require_gather(
    src_cache: Any, dst: Any, block_table: Any, cu_seq_lens: Any, seq_starts: Any
) -> tuple[Tensor, Tensor]:
    """Return cache and output with rows of one axis."""
    if isinstance(src_cache, Tensor) and src_cache.ndim > 3:
        src_cache = src_cache.view(*src_cache.shape[:2], -1)
    if isinstance(dst, Tensor) and dst.ndim > 2:
        dst = dst.view(len(dst), -1)
    require_shape(src_cache, "src_cache", ("num_blocks", "block_size", "width"))
    require_shape(dst, "dst", ("tokens", src_cache.shape[2]))
    require_shape(block_table, "block_table", ("batch_size", "max_blocks"))
    require_indices(cu_seq_lens, "cu_seq_lens")
    require_shape(cu_seq_lens, "cu_seq_lens", (len(block_table) + 1,))
    if seq_starts is not None:
        require_indices(seq_starts, "seq_starts")
        require_shape(seq_starts, "seq_starts", (len(block_table),))
    return src_cache, dst


def _gather(
    src: Tensor, dst: Tensor, block_table: Tensor, cu_seq_lens: Tensor, num_tokens: int,
    seq_starts: Tensor | None, scale: Scale,
) -> None:  # fmt: skip
    if not len(block_table):
        return
    lengths = cu_seq_lens[1:] - cu_seq_lens[:-1]
    ends = lengths if seq_starts is None else lengths + seq_starts
    slots = torch.empty(num_tokens, dtype=torch.int64, device=dst.device)
    _kv.slot_mapping(block_table, ends, lengths, src.shape[1], out=slots)
    # A row is gathered as two parts, which begin at multiples of 16 elements.
    width = src.shape[2]
    cut = width // 2 // 16 * 16 or width // 2
    k_cache, v_cache = (src[:, :, None, part] for part in (slice(cut), slice(cut, None)))
    k_out, v_out = (dst[:, None, part] for part in (slice(cut), slice(cut, None)))
    _kv.gather_kv(
        k_cache, v_cache, slots, k_out=k_out, v_out=v_out, k_scale=scale, v_scale=scale
    )  # fmt: skip


# --- Transfers ------------------------------------------------------------------------------------


def swap_blocks(src: Tensor, dst: Tensor, block_size_in_bytes: int, block_mapping: Tensor) -> None:
    """Copy blocks of one tensor onto blocks of another: `kvcupy.transfer_pages`.

    Parameters
    ----------
    src, dst : contiguous tensors of blocks of block_size_in_bytes bytes, of any shape and dtype, on
        one GPU or the CPU; in pinned memory if the other is on a GPU
    block_mapping : int32 or int64 (n, 2), pairs of blocks of src and dst, of which no block is
        both read and written. A pair with a negative one is skipped

    Notes
    -----
    Differs from vLLM: both tensors may be on the CPU, and block_mapping anywhere; a block past the
    end is a fault. Stream: torch's current one. Capture: as `kvcupy.transfer_pages`. Each call
    wraps the tensors; `kvcupy.TransferEngine` wraps them once.

    Examples
    --------
    >>> src, dst = torch.arange(8.0).view(4, 2), torch.zeros(2, 2)
    >>> swap_blocks(src, dst, 8, torch.tensor([[3, 0]]))
    >>> dst.tolist()
    [[6.0, 7.0], [0.0, 0.0]]
    """
    require_shape(block_mapping, "block_mapping", ("n", 2), torch.int32, torch.int64)
    source, target = (
        rows_of(x, name, block_size_in_bytes, size_name="block_size_in_bytes")
        for x, name in ((src, "src"), (dst, "dst"))
    )
    transfer_rows([source], [target], *block_mapping.unbind(1), method="auto")


def swap_blocks_batch(
    src_ptrs: Tensor,
    dst_ptrs: Tensor,
    sizes: Tensor,
    is_src_access_order_any: bool = False,
) -> None:
    """Copy bytes between addresses, as one batch where the driver can.

    Parameters
    ----------
    src_ptrs, dst_ptrs, sizes : int64 (n,) on the CPU: addresses, of memory of torch's current GPU
        and pinned memory, and bytes. They are read during the call; the copies must not overlap
    is_src_access_order_any : ignored: sources are read in the order of the stream, which is safe

    Notes
    -----
    Addresses are not checked, and the order checker does not know what the copies touch; nor does
    kvcupy keep the memory alive: see `kvcupy.keep_alive`. Stream: torch's current one, or without a
    GPU the calling thread. Capture: legal.

    Examples
    --------
    >>> src, dst = torch.ones(4), torch.zeros(4)
    >>> swap_blocks_batch(*(torch.tensor([n]) for n in (src.data_ptr(), dst.data_ptr(), 8)))
    >>> dst.tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    runs = []
    for x, name in ((src_ptrs, "src_ptrs"), (dst_ptrs, "dst_ptrs"), (sizes, "sizes")):
        require_shape(x, name, (len(src_ptrs),), torch.int64)
        if x.device.type != "cpu":
            raise ValueError(f"{name}: expected a tensor on the CPU, got one on {x.device}")
        runs.append(x.numpy().astype(np.uint64))
    if len(sizes) and int(sizes.min()) < 0:
        raise ValueError(f"sizes: expected no negative sizes, got {int(sizes.min())}")
    name = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "host"
    device, (src, dst, lengths) = devices.get(name), runs
    device.copy_runs(dst, src, lengths, device.as_stream(None, "torch"))


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
    require_none("merged outputs are not quantised", output_scale=output_scale)
    require_shape(output, "output", ("tokens", "heads", "head_size"))
    tokens, heads, _ = output.shape
    for x, name in ((prefix_output, "prefix_output"), (suffix_output, "suffix_output")):
        require_shape(x, name, tuple(output.shape), output.dtype)
    lse = []
    for x, name in ((prefix_lse, "prefix_lse"), (suffix_lse, "suffix_lse")):
        require_shape(x, name, (heads, tokens), torch.float32)
        lse.append(torch.where(x == torch.inf, -torch.inf, x).T)
    if prefill_tokens_with_context is not None:
        if not 0 <= prefill_tokens_with_context <= tokens:
            raise ValueError(
                f"prefill_tokens_with_context: expected 0 to {tokens}, "
                f"got {prefill_tokens_with_context}"
            )
        lse[0][prefill_tokens_with_context:] = -torch.inf
    if output_lse is not None:
        require_shape(output_lse, "output_lse", (heads, tokens), torch.float32)
    _kv.merge_states(
        prefix_output, lse[0], suffix_output, lse[1], out=output,
        lse_out=None if output_lse is None else output_lse.T,
    )  # fmt: skip


# --- Not offered ----------------------------------------------------------------------------------

_INDEXER = "kvcupy has no cache of an indexer of sparse attention"
_SPLIT_KEYS = "its keys are split in groups across a block; "

refuse_names(__name__, {
    "reshape_and_cache": _SPLIT_KEYS + "reshape_and_cache_flash has whole rows",
    "paged_attention_v1 paged_attention_v2 paged_attention_rocm":
        _SPLIT_KEYS + "kvcupy.paged_attention reads caches of reshape_and_cache_flash",
    "cp_gather_and_upconvert_fp8_kv_cache cp_gather_and_upconvert_nvfp4_kv_cache":
        "its rows have scales among the codes; gather_and_maybe_dequant_cache reads whole rows",
    "indexer_k_quant_and_cache cp_gather_indexer_k_quant_cache": _INDEXER,
    "concat_and_cache_mla_grouped":
        "it takes addresses of caches without their lengths; call concat_and_cache_mla by layer",
    "concat_mla_q": "torch.cat((ql_nope, q_pe), dim=-1, out=q_out) does it",
    "copy_blocks copy_blocks_mla": "call kvcupy.copy_pages",
    "convert_fp8": "kvcupy.transfer_pages converts with convert=True",
})  # fmt: skip
