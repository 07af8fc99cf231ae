"""FlashInfer's names and signatures over kvcupy's operations. FlashInfer itself is not needed.

Tensors are torch's, on a GPU or the CPU. Tables are CSR: the pages of sequence b are
`kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`, of which the last holds `kv_last_page_len[b]` tokens,
those being appended included. Index tensors may be int32 or int64. The log-sum-exp has base 2.

What differs from FlashInfer everywhere: any even head_dim works; a batch index, position or page
below 0 is padding and skipped; a position past the pages of its sequence is skipped and raised by
`kvcupy.check_faults`; errors name the argument. Workspaces are kvcupy's own, so that those of the
wrappers only say the device. `docs/moving_from_other_libraries.md` has a table of all calls.

Examples
--------
>>> cache = torch.zeros(8, 2, 16, 1, 64)  # pages, K and V, slots of a page, heads, head_dim
>>> indptr, indices, last_page_len = (torch.tensor(x) for x in ([0, 2], [5, 3], [1]))
>>> rows = torch.ones(17, 1, 64)
>>> batch, positions = get_batch_indices_positions(
...     torch.tensor([0, 17]), get_seq_lens(indptr, last_page_len, 16), 17
... )
>>> append_paged_kv_cache(rows, 2 * rows, batch, positions, cache, indices, indptr, last_page_len)
>>> wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
>>> wrapper.plan(indptr, indices, last_page_len, 4, 1, 64, 16, q_data_type="float32")
>>> float(wrapper.run(torch.ones(1, 4, 64), cache)[0, 3, 0])
2.0
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import (
    describe_tensor,
    refuse_names,
    require_cos_sin_cache,
    require_dtype,
    require_shape,
    require_states,
    split_heads,
)
from . import torch as _kv

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]

PagedCache: TypeAlias = "Tensor | tuple[Tensor, Tensor]"

_LOG2_E = math.log2(math.e)


# --- Indices --------------------------------------------------------------------------------------


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Return the tokens of each sequence, from its pages and what the last of them holds.

    Examples
    --------
    >>> get_seq_lens(torch.tensor([0, 2, 3]), torch.tensor([1, 4]), 16).tolist()
    [17, 4]
    """
    full_pages = (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0)
    return full_pages * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return sequence and position of each appended token, as int32 tensors.

    Parameters
    ----------
    append_indptr : (B + 1,), where the appended tokens of each sequence begin
    seq_lens : (B,), the appended tokens included
    nnz : how many tokens; those past append_indptr[-1] get -1 and -1, which `append_paged_kv_cache`
        skips
    batch_indices, positions : int32 (nnz,), written in place; None: allocated

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written

    Examples
    --------
    >>> append_indptr, seq_lens = torch.tensor([0, 1, 3]), torch.tensor([5, 2])
    >>> [x.tolist() for x in get_batch_indices_positions(append_indptr, seq_lens, 4)]
    [[0, 1, 1, -1], [4, 0, 1, -1]]
    """
    require_shape(seq_lens, "seq_lens", (len(append_indptr) - 1,))
    for out, name in ((batch_indices, "batch_indices"), (positions, "positions")):
        if out is not None:
            require_shape(out, name, (nnz,))
            require_dtype(out, name, torch.int32)
    ends = append_indptr[1:].to(torch.int64)
    tokens = torch.arange(nnz, device=append_indptr.device)
    sequences = torch.searchsorted(ends, tokens, right=True)
    is_padding = sequences >= len(ends)
    if not len(ends):
        ends = seq_lens = tokens.new_zeros(1)
    known = sequences.clamp(max=len(ends) - 1)
    places = seq_lens.to(ends)[known] - ends[known] + tokens
    results = [x.masked_fill(is_padding, -1).int() for x in (sequences, places)]
    if batch_indices is not None:
        results[0] = batch_indices.copy_(results[0])
    if positions is not None:
        results[1] = positions.copy_(results[1])
    return results[0], results[1]


def _slots(
    batch_indices: Tensor, positions: Tensor, kv_indices: Tensor, kv_indptr: Tensor,
    num_pages: int, page_size: int,
) -> Tensor:  # fmt: skip
    """Return the slot of each token: negative for padding, past the end for one without a page."""
    num_sequences = len(kv_indptr) - 1
    sequences, places = batch_indices.long(), positions.long()
    is_padding = (sequences < 0) | (places < 0)
    known = sequences.clamp(0, max(num_sequences - 1, 0))
    if not num_sequences or not len(kv_indices):
        return torch.where(is_padding, -1, num_pages * page_size)
    entries = kv_indptr.long()[known] + places.clamp(min=0) // page_size
    has_page = (sequences < num_sequences) & (entries < kv_indptr.long()[known + 1])
    pages = kv_indices.long()[entries.clamp(0, len(kv_indices) - 1)]
    slots = torch.where(has_page, pages * page_size + places % page_size, num_pages * page_size)
    return slots.masked_fill(is_padding, -1)


def _require_append(
    batch_indices: Any, positions: Any, kv_indices: Any, kv_indptr: Any, kv_last_page_len: Any
) -> None:
    indices = {
        "batch_indices": (batch_indices, "nnz"), "positions": (positions, "nnz"),
        "kv_indices": (kv_indices, "num_pages"), "kv_indptr": (kv_indptr, "batch_size + 1"),
        "kv_last_page_len": (kv_last_page_len, "batch_size"),
    }  # fmt: skip
    for name, (x, length) in indices.items():
        require_shape(x, name, (length,))
        require_dtype(x, name, torch.int32, torch.int64)
    require_shape(positions, "positions", (len(batch_indices),))
    require_shape(kv_last_page_len, "kv_last_page_len", (len(kv_indptr) - 1,))


def _k_and_v(paged_kv_cache: Any, kv_layout: str, name: str = "paged_kv_cache") -> Any:
    """Return K and V of a cache that is one 5-D tensor or two of four dimensions."""
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: expected 'NHD' or 'HND', got {kv_layout!r}")
    if isinstance(paged_kv_cache, Tensor):
        require_shape(paged_kv_cache, name, ("pages", 2, *_page_axes(kv_layout)))
        return paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    if not isinstance(paged_kv_cache, (tuple, list)) or len(paged_kv_cache) != 2:
        got = describe_tensor(paged_kv_cache)
        raise TypeError(f"{name}: expected a tensor, or K and V as a tuple, got {got}")
    for x, part in zip(paged_kv_cache, ("K", "V"), strict=True):
        require_shape(x, f"{name} ({part})", ("pages", *_page_axes(kv_layout)))
    k_cache, v_cache = paged_kv_cache
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"{name} (V): expected pages, slots and heads like K {describe_tensor(k_cache)}, "
            f"got {describe_tensor(v_cache)}"
        )
    return k_cache, v_cache


def _page_axes(kv_layout: str) -> tuple[str, str, str]:
    return (
        ("page_size", "heads", "head_dim")
        if kv_layout == "NHD"
        else ("heads", "page_size", "head_dim")
    )


# --- Appends --------------------------------------------------------------------------------------


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: PagedCache,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write K and V of the tokens that are appended into their pages: `kvcupy.store_kv`.

    Parameters
    ----------
    append_key, append_value : (nnz', H, D), nnz' >= nnz, of the cache's dtype; bits are copied
    batch_indices, positions : (nnz,), sequence and position of each token
    paged_kv_cache : (pages, 2, page_size, H, D), or K and V (pages, page_size, H, D); "HND" has the
        heads before the slots. Written in place. Strides of K and V may differ, and D too
    kv_indices, kv_indptr, kv_last_page_len : the pages, which have the appended tokens already

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written

    Notes
    -----
    Differs from FlashInfer: a dtype other than the cache's is refused, where FlashInfer reads it as
    the cache's; see the module for padding and positions without a page. kv_last_page_len only has
    its shape checked. Stream: torch's current one; slots are computed by torch, without a sync.
    Capture: legal in `torch.cuda.graph`. Source: FlashInfer `flashinfer.page`.

    Examples
    --------
    See the module.
    """
    k_cache, v_cache = _k_and_v(paged_kv_cache, kv_layout)
    _require_append(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    heads, page_size = k_cache.shape[2], k_cache.shape[1]
    if kv_layout == "HND":
        heads, page_size = page_size, heads
    for rows, name, cache in (
        (append_key, "append_key", k_cache), (append_value, "append_value", v_cache),
    ):  # fmt: skip
        require_shape(rows, name, ("nnz", heads, cache.shape[3]))
        require_dtype(rows, name, cache.dtype)
    _require_rows(append_key, "append_key", len(positions))
    _require_rows(append_value, "append_value", len(positions))
    slots = _slots(batch_indices, positions, kv_indices, kv_indptr, len(k_cache), page_size)
    _kv.store_kv(append_key, append_value, k_cache, v_cache, slots, layout=kv_layout)


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Write latents and rotated keys of MLA into their pages: `kvcupy.store_kv`, one head.

    Parameters
    ----------
    append_ckv, append_kpe : (nnz', R), (nnz', P), of the caches' dtypes
    ckv_cache, kpe_cache : (pages, page_size, R), (pages, page_size, P), written in place; they may
        be slices of one cache
    others : as in `append_paged_kv_cache`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written

    Notes
    -----
    Differs from FlashInfer: any R and P work, where FlashInfer has 512 and 64; both caches are
    needed. Otherwise as `append_paged_kv_cache`.

    Examples
    --------
    >>> cache = torch.zeros(4, 16, 12)
    >>> latent, key = torch.ones(1, 8), torch.full((1, 4), 2.0)
    >>> batch, positions, pages, last_page_len = torch.tensor([[0], [0], [1], [1]])
    >>> append_paged_mla_kv_cache(
    ...     latent, key, batch, positions, cache[..., :8], cache[..., 8:],
    ...     pages, torch.tensor([0, 1]), last_page_len,
    ... )
    >>> float(cache[1, 0].sum())
    16.0
    """
    _require_append(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    require_shape(ckv_cache, "ckv_cache", ("pages", "page_size", "ckv_dim"))
    num_pages, page_size = ckv_cache.shape[:2]
    require_shape(kpe_cache, "kpe_cache", (num_pages, page_size, "kpe_dim"))
    for rows, name, cache in (
        (append_ckv, "append_ckv", ckv_cache), (append_kpe, "append_kpe", kpe_cache),
    ):  # fmt: skip
        require_shape(rows, name, ("nnz", cache.shape[2]))
        require_dtype(rows, name, cache.dtype)
        _require_rows(rows, name, len(positions))
    slots = _slots(batch_indices, positions, kv_indices, kv_indptr, num_pages, page_size)
    _kv.store_kv(
        append_ckv[:, None], append_kpe[:, None], ckv_cache[:, :, None], kpe_cache[:, :, None],
        slots,
    )  # fmt: skip


def _require_rows(rows: Tensor, name: str, least: int) -> None:
    if len(rows) < least:
        raise ValueError(f"{name}: expected at least {least} rows, got {describe_tensor(rows)}")


# --- Rotations ------------------------------------------------------------------------------------


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    """Rotate query and key in place by a table: `kvcupy.apply_rope`.

    Parameters
    ----------
    positions : (nnz,)
    query, key : (nnz, Hq * head_size), (nnz, H * head_size), rotated in place
    cos_sin_cache : float32 (max_seq_len, rotary_dim), `[cos | sin]`; the first rotary_dim elements
        of each head are rotated
    is_neox : pairs are (i, i + rotary_dim / 2), else (2i, 2i + 1)

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written

    Notes
    -----
    Differs from FlashInfer: a position outside the table is a fault, and its token stays as it is;
    query and key may have different dtypes. Stream, Capture: as `kvcupy.apply_rope`.

    Examples
    --------
    >>> table = _kv.rope_table(8, 4, device="cpu")
    >>> query, key = torch.ones(1, 8), torch.ones(1, 4)
    >>> apply_rope_with_cos_sin_cache_inplace(torch.tensor([0]), query, key, 4, table)
    >>> key.tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    require_cos_sin_cache(cos_sin_cache)
    q, k = split_heads(query, "query", head_size), split_heads(key, "key", head_size)
    _kv.apply_rope(q, k, cos_sin_cache, positions, interleaved=not is_neox)


def apply_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Rotate query and key of several sequences in place: `kvcupy.apply_rope`.

    Parameters
    ----------
    q, k : (nnz, Hq, D), (nnz, H, D), rotated in place
    indptr : (B + 1,), where the tokens of each sequence begin
    offsets : (B,), position of the first token of each
    rotary_dim : how many leading elements of a head are rotated; None: all
    interleave : pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
    rope_scale, rope_theta : positions are divided by rope_scale; the base of the frequencies

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written

    Notes
    -----
    Differs from FlashInfer: angles come from a table, computed in float64 and kept for further
    calls, where FlashInfer computes them in the kernel with fast sines. The host waits for the
    largest position. Capture: illegal for that reason; use `apply_rope_with_cos_sin_cache_inplace`,
    with a table of `kvcupy.rope_table`.

    Examples
    --------
    >>> q, k = torch.ones(3, 2, 4), torch.ones(3, 1, 4)
    >>> apply_rope_inplace(q, k, torch.tensor([0, 1, 3]), torch.tensor([7, 0]))
    >>> k[1, 0].tolist()  # position 0 of the second sequence
    [1.0, 1.0, 1.0, 1.0]
    """
    _rotate(q, k, _ragged(q, indptr, offsets), rotary_dim, interleave, rope_theta,
            ("linear", float(rope_scale)))  # fmt: skip


def apply_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Rotate query and key in place, with the position of each token.

    Parameters
    ----------
    pos_ids : (nnz,)
    others : as in `apply_rope_inplace`, and so are errors and notes
    """
    require_shape(pos_ids, "pos_ids", ("nnz",))
    _rotate(q, k, pos_ids, rotary_dim, interleave, rope_theta, ("linear", float(rope_scale)))


def apply_llama31_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Rotate query and key of several sequences in place, as Llama 3.1 does.

    Parameters
    ----------
    rope_scale, low_freq_factor, high_freq_factor, old_context_len : factor, low_freq_factor,
        high_freq_factor and original_max_position_embeddings of "llama3" in `kvcupy.rope_table`
    others : as in `apply_rope_inplace`, and so are errors and notes
    """
    llama3 = "llama3", float(rope_scale), low_freq_factor, high_freq_factor, old_context_len
    _rotate(q, k, _ragged(q, indptr, offsets), rotary_dim, interleave, rope_theta, llama3)


def apply_llama31_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Rotate query and key in place, as Llama 3.1 does, with the position of each token.

    Parameters
    ----------
    pos_ids : (nnz,)
    others : as in `apply_llama31_rope_inplace`, and so are errors and notes
    """
    require_shape(pos_ids, "pos_ids", ("nnz",))
    llama3 = "llama3", float(rope_scale), low_freq_factor, high_freq_factor, old_context_len
    _rotate(q, k, pos_ids, rotary_dim, interleave, rope_theta, llama3)


def apply_rope_with_cos_sin_cache(
    positions: Tensor, query: Tensor, key: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Rotate copies, and return them: `apply_rope_with_cos_sin_cache_inplace`."""
    query, key = query.clone(), key.clone()
    apply_rope_with_cos_sin_cache_inplace(positions, query, key, *arguments, **options)
    return query, key


def apply_rope(q: Tensor, k: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Rotate copies, and return them: `apply_rope_inplace`.

    Examples
    --------
    >>> q, k = torch.ones(3, 2, 4), torch.ones(3, 1, 4)
    >>> rotated = apply_rope(q, k, torch.tensor([0, 1, 3]), torch.tensor([7, 0]))[1]
    >>> bool((rotated[0] != k[0]).all()), bool((rotated[1] == k[1]).all())  # positions 7 and 0
    (True, True)
    """
    q, k = q.clone(), k.clone()
    apply_rope_inplace(q, k, *arguments, **options)
    return q, k


def apply_rope_pos_ids(
    q: Tensor, k: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Rotate copies, and return them: `apply_rope_pos_ids_inplace`."""
    q, k = q.clone(), k.clone()
    apply_rope_pos_ids_inplace(q, k, *arguments, **options)
    return q, k


def apply_llama31_rope(
    q: Tensor, k: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Rotate copies, and return them: `apply_llama31_rope_inplace`."""
    q, k = q.clone(), k.clone()
    apply_llama31_rope_inplace(q, k, *arguments, **options)
    return q, k


def apply_llama31_rope_pos_ids(
    q: Tensor, k: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Rotate copies, and return them: `apply_llama31_rope_pos_ids_inplace`."""
    q, k = q.clone(), k.clone()
    apply_llama31_rope_pos_ids_inplace(q, k, *arguments, **options)
    return q, k


def _ragged(q: Any, indptr: Any, offsets: Any) -> Tensor:
    """Return the position of each token of sequences that begin at offsets."""
    require_shape(q, "q", ("nnz", "heads", "head_dim"))
    require_shape(indptr, "indptr", ("batch_size + 1",))
    require_shape(offsets, "offsets", (len(indptr) - 1,))
    tokens = torch.arange(len(q), device=indptr.device)
    if not len(offsets):
        return tokens[:0]
    sequences = torch.searchsorted(indptr[1:].long(), tokens, right=True)
    is_known = sequences < len(offsets)
    known = sequences.clamp(max=len(offsets) - 1)
    positions = offsets.long()[known] + tokens - indptr.long()[known]
    return positions[is_known]  # tokens past the last sequence are not rotated


def _rotate(
    q: Any, k: Any, positions: Tensor, rotary_dim: int | None, interleave: bool, theta: float,
    scaling: tuple[Any, ...],
) -> None:  # fmt: skip
    for x, name in ((q, "q"), (k, "k")):
        require_shape(x, name, ("nnz", "heads", "head_dim"))
    rotary_dim = q.shape[2] if rotary_dim is None else rotary_dim
    if not positions.numel():
        return
    longest = int(positions.max()) + 1  # the host waits
    # A power of two, so that growing sequences need few tables.
    rows = 1 << max(longest - 1, 1023).bit_length()
    table = _table(rows, rotary_dim, float(theta), scaling, str(q.device))
    _kv.apply_rope(q, k, table, positions, interleaved=interleave)


@lru_cache(maxsize=16)
def _table(
    rows: int, rotary_dim: int, theta: float, scaling: tuple[Any, ...], device: str
) -> Tensor:
    names = "rope_type factor low_freq_factor high_freq_factor original_max_position_embeddings"
    config = dict(zip(names.split(), scaling, strict=False))
    return _kv.rope_table(rows, rotary_dim, base=theta, scaling=config, device=device)


# --- States ---------------------------------------------------------------------------------------


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention of the same queries over two sets of keys: `kvcupy.merge_states`, base 2.

    Parameters
    ----------
    v_a, v_b : (seq_len, H, D) fp32, fp16 or bf16
    s_a, s_b : (seq_len, H), log-sum-exp in base 2

    Returns
    -------
    (V, S) : new tensors; S is float32

    Notes
    -----
    Differs from FlashInfer: two states without a key, whose S is minus infinity, give 0 and minus
    infinity, where its reference gives NaN. Stream, Capture: as `kvcupy.merge_states`.

    Examples
    --------
    >>> zero = torch.zeros(1, 1)
    >>> v, s = merge_state(torch.ones(1, 1, 2), zero, torch.full((1, 1, 2), 3.0), zero)
    >>> v.tolist(), float(s)
    ([[[2.0, 2.0]]], 1.0)
    """
    require_states(v_a, s_a, ("v_a", "s_a"))
    require_states(v_b, s_b, ("v_b", "s_b"), v_a)
    return _kv.merge_states(v_a, s_a.float(), v_b, s_b.float(), lse_base="2")


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None
) -> None:
    """Merge another state into a state: `kvcupy.merge_states`, base 2.

    Parameters
    ----------
    v, s : (seq_len, H, D), and float32 (seq_len, H); written in place
    v_other, s_other : the other state
    mask : bool (seq_len,), which tokens are merged; None: all

    Notes
    -----
    Differs from FlashInfer: s that is not float32 is refused, where FlashInfer updates a copy of
    it. With a mask, torch copies the tokens that are merged.

    Examples
    --------
    >>> v, s = torch.ones(2, 1, 2), torch.zeros(2, 1)
    >>> merge_state_in_place(v, s, 3 * v, s.clone(), torch.tensor([True, False]))
    >>> v[:, 0, 0].tolist(), s[:, 0].tolist()
    ([2.0, 1.0], [1.0, 0.0])
    """
    require_states(v, s, ("v", "s"))
    require_dtype(s, "s", torch.float32)
    require_states(v_other, s_other, ("v_other", "s_other"), v)
    if mask is None:
        _kv.merge_states(v, s, v_other, s_other.float(), out=v, lse_out=s, lse_base="2")
        return
    require_shape(mask, "mask", (len(v),))
    merged, lse = _kv.merge_states(v, s, v_other, s_other.float(), lse_base="2")
    is_merged = mask.bool()
    v.copy_(torch.where(is_merged[:, None, None], merged, v))
    s.copy_(torch.where(is_merged[:, None], lse, s))


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge several states of the same queries: `kvcupy.merge_states`, base 2.

    Parameters
    ----------
    v : (seq_len, num_states, H, D)
    s : (seq_len, num_states, H), log-sum-exp in base 2

    Returns
    -------
    (V, S) : (seq_len, H, D), and float32 (seq_len, H)

    Notes
    -----
    As `merge_state`.

    Examples
    --------
    >>> v, s = merge_states(torch.ones(1, 4, 1, 2), torch.zeros(1, 4, 1))
    >>> v.tolist(), float(s)
    ([[[1.0, 1.0]]], 2.0)
    """
    require_shape(v, "v", ("seq_len", "num_states", "heads", "head_dim"))
    require_shape(s, "s", tuple(v.shape[:3]))
    states, lse = v.transpose(0, 1), s.float().transpose(0, 1)
    return _kv.merge_states(states, lse, None, None, lse_base="2")


# --- Attention ------------------------------------------------------------------------------------


class _PagedAttention:
    """What the wrappers share: tables of the last plan, and `kvcupy.paged_attention` over them."""

    _prefix = ""  # of the names of the table's arguments

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str, jit_args: Any,
        graph_tables: _GraphTables | None,
    ) -> None:  # fmt: skip
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f"kv_layout: expected 'NHD' or 'HND', got {kv_layout!r}")
        if jit_args is not None:
            raise NotImplementedError("jit_args: kvcupy compiles its own kernels")
        _require_aligned(float_workspace_buffer, "float_workspace_buffer")
        self.device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._graph_tables = graph_tables
        self._planned, self._causal = False, True

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made with `use_cuda_graph`."""
        return self._graph_tables is not None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        """Check that both begin at a multiple of 16 bytes; kvcupy has workspaces of its own."""
        _require_aligned(float_workspace_buffer, "float_workspace_buffer")
        _require_aligned(int_workspace_buffer, "int_workspace_buffer")

    def workspace_size(self, *arguments: Any, **options: Any) -> tuple[int, int]:
        """Return bytes of the two workspaces of a `plan` with these arguments: any will do."""
        return 16, 16

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *,
        causal: bool = True,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        **options: Any,
    ) -> Any:
        """Do as `run` does with options in place of those of the plan; FlashInfer deprecates it.

        Parameters
        ----------
        q, paged_kv_cache, options : as in `run`
        causal : of the prefill wrapper
        others : as in `plan`, and kept for further runs
        """
        _require_no_rotation(pos_encoding_mode)
        self._window_left, self._sm_scale, self._causal = window_left, sm_scale, causal
        self._soft_cap = logits_soft_cap
        return self.run(q, paged_kv_cache, **options)

    def forward_return_lse(self, *arguments: Any, **options: Any) -> Any:
        """Do as `forward` does with return_lse."""
        return self.forward(*arguments, return_lse=True, **options)

    def end_forward(self) -> None:
        """Do nothing, as in FlashInfer, which deprecates it."""

    def run(self, *arguments: Any, **options: Any) -> Any:
        """Attend. Each wrapper has its own."""
        raise NotImplementedError

    def _plan(
        self, indptr: Any, indices: Any, last_page_len: Any, *, heads: tuple[int, int],
        head_dims: tuple[int, int], page_size: int, pos_encoding_mode: str, window_left: int,
        logits_soft_cap: float | None, sm_scale: float | None, dtypes: tuple[Any, Any, Any],
        seq_lens: Any, query_lens: Tensor | None, min_keys: int = 1,
    ) -> None:  # fmt: skip
        """Keep tables and options; a sequence that has keys has at least `min_keys`."""
        _require_no_rotation(pos_encoding_mode)
        q_dtype, kv_dtype, out_dtype = (
            None if dtype is None else _dtype(dtype, name)
            for dtype, name in zip(
                dtypes, ("q_data_type", "kv_data_type", "o_data_type"), strict=True
            )
        )
        if q_dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise NotImplementedError(f"q_data_type: expected 16 or 32 bits, got {q_dtype}")
        if out_dtype not in (None, q_dtype, torch.float32):
            raise NotImplementedError(
                f"o_data_type: expected q_data_type or float32, got {out_dtype}"
            )
        table, lengths = self._tables(indptr, indices, last_page_len, page_size)
        if seq_lens is not None:
            require_shape(seq_lens, "seq_lens", (len(lengths),))
            lengths = seq_lens.to(lengths)
        if min_keys > 1 and bool(((lengths > 0) & (lengths < min_keys)).any()):
            expected = f"none or at least q_len_per_req {min_keys} keys per sequence"
            raise ValueError(f"last_page_len: expected {expected}, got {lengths.tolist()}")
        if query_lens is not None:
            query_lens = query_lens.to(lengths)
        if self._graph_tables is not None:
            csr = indptr, indices, last_page_len
            table, lengths, query_lens = self._graph_tables.take(csr, table, lengths, query_lens)
        # All checks are done: a plan that raises leaves the last one as it was.
        self._block_table, self._seq_lens, self._query_lens = table, lengths, query_lens
        self._heads, self._head_dims, self._page_size = heads, head_dims, page_size
        self._q_dtype, self._kv_dtype, self._out_dtype = q_dtype, kv_dtype or q_dtype, out_dtype
        self._window_left = window_left
        self._soft_cap, self._sm_scale = logits_soft_cap, sm_scale
        self._planned = True

    def _tables(
        self, indptr: Any, indices: Any, last_page_len: Any, page_size: int
    ) -> tuple[Tensor, Tensor]:
        """Return pages by sequence, and lengths, from a CSR table. The host waits for it."""
        names = [f"{self._prefix}{name}" for name in ("indptr", "indices", "last_page_len")]
        for x, name in zip((indptr, indices, last_page_len), names, strict=True):
            require_shape(x, name, ("length",))
            require_dtype(x, name, torch.int32, torch.int64)
        require_shape(last_page_len, names[2], (len(indptr) - 1,))
        starts, last = indptr.cpu().long(), last_page_len.cpu().long()
        counts = starts[1:] - starts[:-1]
        if len(starts) and (int(starts[0]) < 0 or bool((counts < 0).any())):
            raise ValueError(f"{names[0]}: expected ascending offsets, got {starts.tolist()}")
        if len(starts) and int(starts[-1]) > len(indices):
            raise ValueError(
                f"{names[1]}: expected at least {int(starts[-1])} pages, got {len(indices)}"
            )
        if bool(((last > page_size) | (last < (counts > 0))).any()):
            raise ValueError(
                f"{names[2]}: expected 1 to page_size {page_size}, got {last.tolist()}"
            )
        lengths = torch.where(counts > 0, get_seq_lens(starts, last, page_size), 0)
        columns = torch.arange(max(int(counts.max()) if len(counts) else 0, 1))
        entries = (starts[:-1, None] + columns).clamp(max=max(len(indices) - 1, 0))
        pages = indices.to(self.device).int()
        table = pages[entries.to(self.device)] if len(indices) else entries.int().to(self.device)
        return table, lengths.int().to(self.device)

    def _run(
        self, q: Any, paged_kv_cache: Any, *, query_lens: Tensor | None, causal: bool,
        q_scale: Any, k_scale: Any, v_scale: Any, out: Any, lse: Any, return_lse: bool,
        window_left: int | None, sinks: Any, arguments: tuple[Any, ...],
    ) -> Any:  # fmt: skip
        if not self._planned:
            raise RuntimeError("run: expected a plan before it, call plan first")
        if arguments:
            raise NotImplementedError("*args: those of a customised kernel, of which there is none")
        k_cache, v_cache = _k_and_v(paged_kv_cache, self._kv_layout)
        self._require_planned(q, k_cache, v_cache, window_left)
        if isinstance(q_scale, Tensor):
            raise NotImplementedError("q_scale: a number, which sm_scale is multiplied by")
        sm_scale = self._sm_scale
        if sm_scale is None:
            sm_scale = 1 / math.sqrt(self._head_dims[0])
        if q_scale is not None:
            sm_scale *= float(q_scale)
        out_scale = None
        if k_cache.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            # As FlashInfer does: the scales multiply scores and outputs.
            if isinstance(k_scale, Tensor):
                raise NotImplementedError("k_scale: a number beside a cache that is not fp8")
            if k_scale is not None:
                sm_scale *= k_scale
            k_scale, v_scale, out_scale = None, None, v_scale
        if sinks is not None and return_lse:
            raise NotImplementedError("return_lse: not beside sinks, which are no keys")
        shape = (len(q), self._heads[0], self._head_dims[1])
        if out is None:
            # Rows past the last sequence are not written.
            out = q.new_zeros(shape, dtype=self._out_dtype or q.dtype)
        require_shape(out, "out", shape)
        require_dtype(out, "out", q.dtype, torch.float32)
        if return_lse and lse is None:
            lse = q.new_zeros(shape[:2], dtype=torch.float32)
        if return_lse:
            require_shape(lse, "lse", shape[:2])
            require_dtype(lse, "lse", torch.float32)
        _kv.paged_attention(
            q, k_cache, v_cache, self._block_table, self._seq_lens, query_lens=query_lens,
            layout=self._kv_layout, causal=causal, sinks=sinks, sm_scale=sm_scale,
            window=self._window_left + 1 if self._window_left >= 0 else None,
            logits_soft_cap=self._soft_cap if self._soft_cap and self._soft_cap > 0 else None,
            k_scale=k_scale, v_scale=v_scale, out=out,
            lse_out=lse if return_lse else None,
        )  # fmt: skip
        if out_scale is not None and (isinstance(out_scale, Tensor) or out_scale != 1):
            out.mul_(out_scale)
        return (out, lse.mul_(_LOG2_E)) if return_lse else out

    def _require_planned(
        self, q: Any, k_cache: Tensor, v_cache: Tensor, window_left: int | None
    ) -> None:
        """Raise unless the tensors are those that the plan was made for."""
        (q_heads, kv_heads), (k_width, v_width) = self._heads, self._head_dims
        require_shape(q, "q", ("tokens", q_heads, k_width))
        axes = (self._page_size, kv_heads)
        axes = axes if self._kv_layout == "NHD" else axes[::-1]
        for x, part, width in ((k_cache, "K", k_width), (v_cache, "V", v_width)):
            require_shape(x, f"paged_kv_cache ({part})", ("pages", *axes, width))
        for x, name, dtype in (
            (q, "q", self._q_dtype), (k_cache, "paged_kv_cache", self._kv_dtype),
        ):  # fmt: skip
            if x.dtype != dtype:  # a ValueError in FlashInfer too
                planned = str(dtype).removeprefix("torch.")
                raise ValueError(f"{name}: expected {planned} as planned, got {describe_tensor(x)}")
        if window_left not in (None, self._window_left):
            raise ValueError(
                f"window_left: expected None or {self._window_left} as planned, got {window_left}"
            )


def _require_aligned(workspace: Tensor, name: str) -> None:
    if workspace.data_ptr() % 16:
        raise ValueError(f"{name} must be 16-byte aligned, got address {workspace.data_ptr()}")


def _require_no_rotation(pos_encoding_mode: str) -> None:
    if pos_encoding_mode != "NONE":
        raise NotImplementedError(
            f"pos_encoding_mode: {pos_encoding_mode!r} rotates or biases in the kernel; rotate "
            "query and key before (kvcupy.rope_store_kv), ALiBi is not offered"
        )


class _GraphTables:
    """Tables that stay where they are, so that a captured run finds those of each new plan.

    Parameters
    ----------
    indptr, indices, last_page_len : buffers of the caller's, with their names: how many sequences
        and pages there can be
    max_pages : of one sequence
    """

    def __init__(
        self, indptr: Any, indices: Any, last_page_len: Any, max_pages: int | None,
        names: tuple[str, ...], device: torch.device,
    ) -> None:  # fmt: skip
        for buffer, name in zip((indptr, indices, last_page_len), names, strict=True):
            if not isinstance(buffer, Tensor):
                got = type(buffer).__name__
                raise ValueError(f"{name}: expected a tensor with use_cuda_graph, got {got}")
            require_shape(buffer, name, ("length",))
        count = len(last_page_len)
        require_shape(indptr, names[0], (count + 1,))
        if max_pages is not None and not 1 <= max_pages <= len(indices):
            expected = f"1 to the {len(indices)} of {names[1]}"
            raise ValueError(f"max_pages_per_sequence: expected {expected}, got {max_pages}")
        self._buffers, self._names = (indptr, indices, last_page_len), names
        pages = len(indices) if max_pages is None else max_pages
        options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._block_table = torch.zeros((count, max(pages, 1)), **options)
        self._seq_lens, self._query_lens = torch.zeros((2, count), **options)

    def take(
        self, csr: tuple[Tensor, Tensor, Tensor], table: Tensor, lengths: Tensor,
        query_lens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Copy the tables of a plan into those that stay, and return these.

        Raises
        ------
        ValueError : there are other sequences, or more pages, than the buffers have; nothing has
            changed
        """
        count, width = self._block_table.shape
        if len(lengths) != count:
            expected = f"the {count} sequences of {self._names[2]}"
            raise ValueError(f"last_page_len: expected {expected}, got {len(lengths)}")
        if len(csr[1]) > len(self._buffers[1]):
            expected = f"at most the {len(self._buffers[1])} pages of {self._names[1]}"
            raise ValueError(f"indices: expected {expected}, got {len(csr[1])}")
        if table.shape[1] > width:
            expected = f"at most {width} pages of a sequence (max_pages_per_sequence)"
            raise ValueError(f"indptr: expected {expected}, got {table.shape[1]}")
        for buffer, values in zip(self._buffers, csr, strict=True):
            buffer[: len(values)].copy_(values)
        self._block_table[:, : table.shape[1]].copy_(table)
        self._seq_lens.copy_(lengths)
        if query_lens is None:
            return self._block_table, self._seq_lens, None
        self._query_lens.copy_(query_lens)
        return self._block_table, self._seq_lens, self._query_lens


def _dtype(dtype: Any, name: str) -> torch.dtype:
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype):
        raise TypeError(f"{name}: expected a torch dtype or its name, got {dtype!r}")
    return named


class BatchDecodeWithPagedKVCacheWrapper(_PagedAttention):
    """Attend with one new token per sequence, or a few: `kvcupy.paged_attention`.

    Parameters
    ----------
    float_workspace_buffer : only its device counts
    kv_layout : "NHD" or "HND"
    use_cuda_graph : keep the tables of all plans in the same memory, so that a captured run attends
        over the pages of the last plan. Batch size and all other options are those of the capture
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : with
        use_cuda_graph: (B + 1,), as many pages as a plan may have, (B,); a plan copies its table
        there. Else ignored
    use_tensor_cores, backend : ignored; shapes choose the kernel
    jit_args : anything but None raises NotImplementedError
    max_pages_per_sequence : kvcupy's own, with use_cuda_graph: the most pages of one sequence, by
        which a captured launch is laid out. None: all that the buffer holds, which takes
        4 B len(buffer) bytes, and leaves short sequences with fewer blocks

    Notes
    -----
    `plan` waits for the tables, which it makes rectangular, on the host; `run` does not wait.
    Each may be called any number of times; a plan that raises leaves the last one as it was.
    `begin_forward` is `plan`.
    Source: FlashInfer `flashinfer.decode`.

    Examples
    --------
    See the module.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        *,
        max_pages_per_sequence: int | None = None,
    ) -> None:
        names = tuple(f"paged_kv_{n}_buffer" for n in ("indptr", "indices", "last_page_len"))
        tables = _GraphTables(
            paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer,
            max_pages_per_sequence, names, float_workspace_buffer.device,
        ) if use_cuda_graph else None  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, jit_args, tables)
        self.use_tensor_cores = use_tensor_cores
        self._q_len_per_req = 1

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        """Say which pages the next runs attend over, and how.

        Parameters
        ----------
        indptr, indices, last_page_len : (B + 1,), (indptr[-1],), (B,), on any device
        num_qo_heads, num_kv_heads, head_dim, page_size : of the tensors of the runs
        pos_encoding_mode : other than "NONE" raises NotImplementedError
        window_left : keys before its own position that a query sees; -1: all
        logits_soft_cap : None or 0 is none
        q_data_type, kv_data_type, o_data_type : dtypes or their names. None: q_data_type. The query
            has 16 or 32 bits; out has its dtype, or float32
        data_type : of query and cache, where those of their own are None
        sm_scale : None: 1 / sqrt(head_dim)
        seq_lens : (B,), instead of the lengths that follow from last_page_len
        q_len_per_req : new tokens per sequence, causal among themselves; with use_cuda_graph that
            of the first plan. A sequence has as many keys, or none
        others : ignored

        Raises
        ------
        TypeError, ValueError : an argument does not fit, or the table's values do not
        NotImplementedError : an option is not offered
        """
        if q_len_per_req < 1:
            raise ValueError(f"q_len_per_req: expected at least 1, got {q_len_per_req}")
        if self.is_cuda_graph_enabled and self._planned and q_len_per_req != self._q_len_per_req:
            raise ValueError(
                f"q_len_per_req: expected {self._q_len_per_req} as in the first plan, which "
                f"captured runs keep, got {q_len_per_req}"
            )
        q_dtype = data_type if q_data_type is None else q_data_type
        kv_dtype = data_type if kv_data_type is None else kv_data_type
        require_shape(last_page_len, "last_page_len", ("batch_size",))
        count = len(last_page_len)
        self._plan(
            indptr, indices, last_page_len, heads=(num_qo_heads, num_kv_heads),
            head_dims=(head_dim, head_dim), page_size=page_size,
            pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
            dtypes=(q_dtype, kv_dtype, o_data_type), seq_lens=seq_lens,
            query_lens=torch.full((count,), q_len_per_req) if q_len_per_req > 1 else None,
            min_keys=q_len_per_req,
        )  # fmt: skip
        self._num_tokens, self._q_len_per_req = count * q_len_per_req, q_len_per_req

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
    ) -> Any:
        """Attend with a query per token over the planned pages.

        Parameters
        ----------
        q : (B * q_len_per_req, Hq, D)
        paged_kv_cache : as in `append_paged_kv_cache`, of the planned dtype
        q_scale : what sm_scale is multiplied by, a number
        k_scale, v_scale : dequantisation multipliers of an fp8 cache: a number, or float32 of one
            element or (H,). Beside another cache numbers, which scores and `out` are multiplied by;
            v_scale may be a tensor of one element
        out : (B * q_len_per_req, Hq, D), written in place; None: allocated
        lse : float32 (B * q_len_per_req, Hq), written in place with return_lse; None: allocated
        window_left : None, or as planned
        sinks : float32 logits (Hq,) that join the denominator of the softmax; not with return_lse
        enable_pdl : ignored
        args : none

        Returns
        -------
        out, or with return_lse (out, lse), whose base is 2

        Raises
        ------
        RuntimeError : there is no plan
        TypeError, ValueError : an argument does not fit, or not to the plan; nothing was written
        NotImplementedError : an option is not offered

        Notes
        -----
        A sequence without keys gives 0, and minus infinity in lse. Stream: torch's current one.
        """
        if self._planned:
            require_shape(q, "q", (self._num_tokens, "heads", "head_dim"))
        return self._run(
            q, paged_kv_cache, query_lens=self._query_lens if self._planned else None, causal=True,
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
            return_lse=return_lse, window_left=window_left, sinks=sinks, arguments=args,
        )  # fmt: skip

    def run_return_lse(self, *args: Any, **options: Any) -> Any:
        """Do as `run` does with return_lse."""
        return self.run(*args, return_lse=True, **options)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """Attend with `use_cuda_graph`: `BatchDecodeWithPagedKVCacheWrapper` with its buffers by order.

    Parameters
    ----------
    workspace_buffer : only its device counts
    indptr_buffer, indices_buffer, last_page_len_buffer, others : as there

    Examples
    --------
    >>> buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 8, 2)]
    >>> workspace = torch.empty(0, dtype=torch.uint8)
    >>> CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers).is_cuda_graph_enabled
    True
    """

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
        *,
        max_pages_per_sequence: int | None = None,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer,
            last_page_len_buffer, max_pages_per_sequence=max_pages_per_sequence,
        )  # fmt: skip


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    *arguments: Any,
    global_override_indptr_cpu: Tensor | None = None,
    **options: Any,
) -> None:
    """Do as `wrapper.plan` does, which is no slower here; SGLang calls it."""
    wrapper.plan(*arguments, **options)


class BatchPrefillWithPagedKVCacheWrapper(_PagedAttention):
    """Attend with the new tokens of each sequence: `kvcupy.paged_attention`.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, jit_args, max_pages_per_sequence : as in
        `BatchDecodeWithPagedKVCacheWrapper`, and so are notes
    qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf : with
        use_cuda_graph, likewise
    others : ignored

    Examples
    --------
    >>> cache = torch.ones(2, 2, 4, 1, 8)  # pages, K and V, slots of a page, heads, head_dim
    >>> wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    >>> qo_indptr, indptr, pages, last = (torch.tensor(x) for x in ([0, 3], [0, 1], [1], [3]))
    >>> wrapper.plan(
    ...     qo_indptr, indptr, pages, last, 2, 1, 8, 4, causal=True, q_data_type=torch.float32
    ... )
    >>> out, lse = wrapper.run(torch.zeros(3, 2, 8), cache, return_lse=True)
    >>> (2 ** lse[:, 0]).tolist()  # how many keys each token sees, of equal scores
    [1.0, 2.0, 3.0]
    """

    _prefix = "paged_kv_"

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        *,
        max_pages_per_sequence: int | None = None,
    ) -> None:
        names = tuple(f"paged_kv_{n}_buf" for n in ("indptr", "indices", "last_page_len"))
        tables = _GraphTables(
            paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf,
            max_pages_per_sequence, names, float_workspace_buffer.device,
        ) if use_cuda_graph else None  # fmt: skip
        if use_cuda_graph and paged_kv_last_page_len_buf is not None:
            require_shape(qo_indptr_buf, "qo_indptr_buf", (len(paged_kv_last_page_len_buf) + 1,))
        self._qo_indptr_buf = qo_indptr_buf
        super().__init__(float_workspace_buffer, kv_layout, jit_args, tables)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Say which tokens attend over which pages in the next runs, and how.

        Parameters
        ----------
        qo_indptr : (B + 1,), where the new tokens of each sequence begin; they are its last ones
        head_dim_vo : None: head_dim_qk
        causal : a token sees keys up to its own position; else all of its sequence. As in
            FlashInfer, False is the default
        custom_mask, packed_custom_mask, prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr :
            anything but None raises NotImplementedError
        use_fp16_qk_reduction : ignored; sums are float32
        seq_lens_q, max_token_per_sequence, max_sequence_kv : ignored; they follow from the tables
        others : as in `BatchDecodeWithPagedKVCacheWrapper.plan`, and so are errors
        """
        for name, value in (
            ("custom_mask", custom_mask), ("packed_custom_mask", packed_custom_mask),
        ):  # fmt: skip
            if value is not None:
                raise NotImplementedError(
                    f"{name}: a mask over all keys; kvcupy.paged_attention takes tree_mask, over "
                    "the new tokens of a sequence"
                )
        for name, value in (
            ("prefix_len_ptr", prefix_len_ptr), ("token_pos_in_items_ptr", token_pos_in_items_ptr),
            ("max_item_len_ptr", max_item_len_ptr),
        ):  # fmt: skip
            if value is not None:
                raise NotImplementedError(f"{name}: multi-item scoring is not offered")
        require_shape(paged_kv_indptr, "paged_kv_indptr", ("batch_size + 1",))
        require_shape(qo_indptr, "qo_indptr", (len(paged_kv_indptr),))
        starts = qo_indptr.cpu().long()
        query_lens = starts[1:] - starts[:-1]
        if len(starts) and (int(starts[0]) != 0 or bool((query_lens < 0).any())):
            raise ValueError(f"qo_indptr: expected ascending offsets from 0, got {starts.tolist()}")
        width = head_dim_qk if head_dim_vo is None else head_dim_vo
        self._plan(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
            heads=(num_qo_heads, num_kv_heads), head_dims=(head_dim_qk, width),
            page_size=page_size, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
            dtypes=(q_data_type, kv_data_type, o_data_type), seq_lens=seq_lens,
            query_lens=query_lens,
        )  # fmt: skip
        if self.is_cuda_graph_enabled and self._qo_indptr_buf is not None:
            self._qo_indptr_buf.copy_(qo_indptr)
        self._num_tokens, self._causal = int(starts[-1]), causal

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
    ) -> Any:
        """Attend with the new tokens of all sequences over the planned pages.

        Parameters
        ----------
        q : (nnz', Hq, D), nnz' >= qo_indptr[-1]; rows past that are not read, and 0 in new outputs
        others : as in `BatchDecodeWithPagedKVCacheWrapper.run`, and so are returns, errors, notes
        """
        if self._planned and hasattr(q, "shape") and len(q) < self._num_tokens:
            raise ValueError(
                f"q: expected at least {self._num_tokens} tokens, got {describe_tensor(q)}"
            )
        return self._run(
            q, paged_kv_cache, query_lens=self._query_lens if self._planned else None,
            causal=self._causal, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out,
            lse=lse, return_lse=return_lse, window_left=window_left, sinks=sinks, arguments=args,
        )  # fmt: skip

    def run_return_lse(self, *args: Any, **options: Any) -> Any:
        """Do as `run` does with return_lse."""
        return self.run(*args, return_lse=True, **options)


# --- Not offered ----------------------------------------------------------------------------------

_FP8_QUERY = "no kvcupy operation writes or reads an fp8 query; kvcupy.rope_store_kv rotates and "
_FP8_QUERY += "stores K and V in fp8"
_RAGGED = "attention is over pages: store K and V and use BatchPrefillWithPagedKVCacheWrapper"
_CASCADE = "attend each level with BatchPrefillWithPagedKVCacheWrapper, and merge with merge_state"
_MLA = "kvcupy.paged_attention attends over a latent cache, of which K and V are views"
_NVFP4 = "FlashInfer keeps scales of blocks in a tensor of their own, which no kvcupy cache does"
_NO_CACHE = "it has no operation on a KV cache; import it from FlashInfer itself"

refuse_names(__name__, {
    "rope_quantize_fp8 mla_rope_quantize_fp8 rope_quantize_fp8_append_paged_kv_cache": _FP8_QUERY,
    "nvfp4_quantize_append_paged_kv_cache nvfp4_quantize_append_paged_mla_kv_cache": _NVFP4,
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping nvfp4_quantize_paged_kv_cache": _NVFP4,
    "BatchPrefillWithRaggedKVCacheWrapper single_prefill_with_kv_cache": _RAGGED,
    "single_prefill_with_kv_cache_return_lse single_decode_with_kv_cache": _RAGGED,
    "MultiLevelCascadeAttentionWrapper": _CASCADE,
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper": _CASCADE,
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper": _CASCADE,
    "BatchMLAPagedAttentionWrapper BatchDecodeMlaWithPagedKVCacheWrapper concat_mla_k": _MLA,
    "BatchAttention BatchAttentionWithAttentionSinkWrapper PODWithPagedKVCacheWrapper":
        "BatchPrefillWithPagedKVCacheWrapper takes prefill and decode in one batch",
    "BatchPODWithPagedKVCacheWrapper":
        "BatchPrefillWithPagedKVCacheWrapper takes prefill and decode in one batch",
    "BlockSparseAttentionWrapper VariableBlockSparseAttentionWrapper sparse":
        "attention over blocks that a mask selects is not offered",
    "activation aot autotuner comm fused_moe gemm jit norm quantization sampling topk": _NO_CACHE,
})  # fmt: skip

# FlashInfer's modules, whose names are here: `flashinfer.decode.X`, `from ...rope import X`.
for _name in ("attention", "cascade", "decode", "mla", "page", "pod", "prefill", "rope"):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = sys.modules[__name__]
