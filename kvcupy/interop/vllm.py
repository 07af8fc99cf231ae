"""Names and signatures of `vllm._custom_ops` over kvcupy's operations. vLLM itself is not needed.

Tensors are torch's, on a GPU or the CPU. `kv_cache_dtype` is "auto", where rows have the cache's
dtype and are copied, or "fp8", "fp8_e4m3", "fp8_e5m2", where the cache is uint8 or a float8 dtype:
then `stored = x / scale`, in float32 with one rounding, saturating. Scales are float32 tensors of
one element or one per head, which "auto" ignores; numbers and None work too.

What differs from vLLM everywhere: any width works; slots may be int32; a slot past the end is
skipped and raised by `kvcupy.check_faults`; a TypeError or ValueError names the argument, before
anything is written.

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

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..ops.store import store_kv
from . import describe_tensor, require_dtype, require_indices, require_shape
from . import torch as _kv
from .rows import rows_of, transfer_rows

__all__ = [
    "concat_and_cache_mla",
    "copy_blocks",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
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


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """Write K and V of tokens into caches with split rows: `kvcupy.store_kv`, once for each.

    Parameters
    ----------
    key_cache : (num_blocks, H, D / x, block_size, x), where x elements have 16 bytes
    value_cache : (num_blocks, H, D, block_size)
    k_scale, v_scale : as in `reshape_and_cache_flash`, of one element
    others : as in `reshape_and_cache_flash`, and so are notes

    Notes
    -----
    Neighboring elements of a value are in different rows of the cache, so that each is written
    alone; `reshape_and_cache_flash` writes whole rows.

    Examples
    --------
    >>> key_cache, value_cache = torch.zeros(2, 1, 2, 16, 4), torch.zeros(2, 1, 8, 16)
    >>> rows, slots = torch.arange(8.0).view(1, 1, 8), torch.tensor([17])
    >>> reshape_and_cache(rows, rows, key_cache, value_cache, slots, "auto", None, None)
    >>> key_cache[1, 0, 1, 1].tolist(), value_cache[1, 0, 5:, 1].tolist()
    ([4.0, 5.0, 6.0, 7.0], [5.0, 6.0, 7.0])
    """
    shape = "num_blocks", "heads", "head_size / x", "block_size", "x"
    require_shape(key_cache, "key_cache", shape)
    blocks, heads, pieces, size, x = key_cache.shape
    if x % 2:
        raise ValueError(f"key_cache: expected an even x, got {describe_tensor(key_cache)}")
    require_shape(value_cache, "value_cache", (blocks, heads, pieces * x, size))
    for rows, name in ((key, "key"), (value, "value")):
        require_shape(rows, name, ("tokens", heads, pieces * x))
    require_indices(slot_mapping, "slot_mapping", {"key": key, "value": value})
    key_cache, k_scale = _by_dtype(
        key_cache, "key_cache", kv_cache_dtype, {"key": key}, k_scale, "k_scale"
    )
    value_cache, v_scale = _by_dtype(
        value_cache, "value_cache", kv_cache_dtype, {"value": value}, v_scale, "v_scale"
    )
    # A piece of a key counts as a head of x elements, and an element of a value as a head of one.
    # One call writes two halves of them.
    keys = key.unflatten(2, (pieces, x)).flatten(1, 2)
    key_pieces = key_cache.flatten(1, 2).transpose(1, 2)
    half = x // 2
    store_kv(
        keys[..., :half], keys[..., half:], key_pieces[..., :half], key_pieces[..., half:],
        slot_mapping, k_scale=k_scale, v_scale=k_scale,
    )  # fmt: skip
    values = value.flatten(1)[..., None]
    elements = value_cache.flatten(1, 2).transpose(1, 2)[..., None]
    store_kv(
        values[:, ::2], values[:, 1::2], elements[:, :, ::2], elements[:, :, 1::2], slot_mapping,
        k_scale=v_scale, v_scale=v_scale,
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


# --- Blocks ---------------------------------------------------------------------------------------


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
    transfer_rows([([source], [target])], *block_mapping.unbind(1), method="auto")


def copy_blocks(
    key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], block_mapping: Tensor
) -> None:
    """Copy blocks of each layer onto other blocks of it: `kvcupy.copy_pages`.

    Parameters
    ----------
    key_caches, value_caches : a tensor for each layer, with the blocks on its first axis; written
        in place
    block_mapping : int32 or int64 (n, 2), pairs of blocks read and written, of which no block is
        both. A pair with a negative one is skipped

    Notes
    -----
    Stream, Capture, Bytes: as `kvcupy.copy_pages`.

    Examples
    --------
    >>> keys, values = torch.arange(4.0).view(4, 1), torch.ones(4, 1)
    >>> copy_blocks([keys], [values], torch.tensor([[3, 0]]))
    >>> keys[:, 0].tolist()
    [3.0, 1.0, 2.0, 3.0]
    """
    require_shape(block_mapping, "block_mapping", ("n", 2), torch.int32, torch.int64)
    if len(key_caches) != len(value_caches):
        expected = f"{len(key_caches)} layers like key_caches"
        raise ValueError(f"value_caches: expected {expected}, got {len(value_caches)}")
    if len(key_caches):
        _kv.copy_pages([*key_caches, *value_caches], *block_mapping.unbind(1))
