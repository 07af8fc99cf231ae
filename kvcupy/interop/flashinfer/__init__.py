"""FlashInfer's names and signatures over kvcupy's operations. FlashInfer itself is not needed.

Tensors are torch's, on a GPU or the CPU. Tables are CSR: the pages of sequence b are
`kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`, of which the last holds `kv_last_page_len[b]` tokens,
those being appended included. Index tensors may be int32 or int64. The log-sum-exp has base 2.

What differs from FlashInfer everywhere: any even head_dim works; a batch index, position or page
below 0 is padding and skipped; a position past the pages of its sequence is skipped and raised by
`kvcupy.check_faults`; a TypeError or ValueError names the argument, before anything is written.
kvcupy has its own workspaces, so that the wrappers take only the device from theirs.
`docs/moving_from_other_libraries.md` has a table of all calls.

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

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...formats import Layout
from ...ops.store import store_kv
from .. import (
    refuse_names,
    require_cos_sin_cache,
    require_shape,
    split_heads,
)
from .. import torch as _kv
from ..rows import merge
from .dense import (
    BatchPrefillWithRaggedKVCacheWrapper,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from .latent import BatchMLAPagedAttentionWrapper
from .plan import PagedCache, k_and_v, rope_table, rows_for
from .quantised import (
    mla_rope_quantize_fp8,
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache,
)
from .slots import slots_of
from .wrappers import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    fast_decode_plan,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
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
    "mla_rope_quantize_fp8",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]

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

    Examples
    --------
    >>> append_indptr, seq_lens = torch.tensor([0, 1, 3]), torch.tensor([5, 2])
    >>> [x.tolist() for x in get_batch_indices_positions(append_indptr, seq_lens, 4)]
    [[0, 1, 1, -1], [4, 0, 1, -1]]
    """
    require_shape(seq_lens, "seq_lens", (len(append_indptr) - 1,))
    for out, name in ((batch_indices, "batch_indices"), (positions, "positions")):
        if out is not None:
            require_shape(out, name, (nnz,), torch.int32)
    ends = append_indptr[1:].to(torch.int64)
    tokens = torch.arange(nnz, device=append_indptr.device)
    sequences = torch.searchsorted(ends, tokens, right=True)
    is_padding = sequences >= len(ends)
    if not len(ends):
        ends = seq_lens = tokens.new_zeros(1)
    known = sequences.clamp(max=len(ends) - 1)
    places = seq_lens.to(ends)[known] - ends[known] + tokens
    sequences, places = (x.masked_fill(is_padding, -1).int() for x in (sequences, places))
    return (
        sequences if batch_indices is None else batch_indices.copy_(sequences),
        places if positions is None else positions.copy_(places),
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
    kv_layout: Layout = "NHD",
) -> None:
    """Write K and V of the tokens that are appended into their pages: `kvcupy.store_kv`.

    Parameters
    ----------
    append_key, append_value : (nnz', H, D), nnz' >= nnz, of the cache's dtype; bits are copied
    batch_indices, positions : (nnz,), sequence and position of each token
    paged_kv_cache : (pages, 2, page_size, H, D), or K and V (pages, page_size, H, D); "HND" has the
        heads before the slots. Written in place. Strides of K and V may differ, and D too
    kv_indices, kv_indptr, kv_last_page_len : the pages, which have the appended tokens already

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
    k_cache, v_cache = k_and_v(paged_kv_cache, kv_layout)
    page_size, heads = k_cache.shape[1:3]
    if kv_layout == "HND":
        heads, page_size = page_size, heads
    rows = {"append_key": append_key, "append_value": append_value}
    for (name, x), cache in zip(rows.items(), (k_cache, v_cache), strict=True):
        require_shape(x, name, ("nnz", heads, cache.shape[3]), cache.dtype)
    slots = slots_of(
        batch_indices, positions, kv_indices, kv_indptr, len(k_cache), page_size, rows,
        kv_last_page_len,
    )  # fmt: skip
    # Not by the operator, whose dispatch takes longer; compiled code traces it nevertheless.
    store_kv(append_key, append_value, k_cache, v_cache, slots, layout=kv_layout)


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
    require_shape(ckv_cache, "ckv_cache", ("pages", "page_size", "ckv_dim"))
    num_pages, page_size = ckv_cache.shape[:2]
    require_shape(kpe_cache, "kpe_cache", (num_pages, page_size, "kpe_dim"))
    rows = {"append_ckv": append_ckv, "append_kpe": append_kpe}
    for (name, x), cache in zip(rows.items(), (ckv_cache, kpe_cache), strict=True):
        require_shape(x, name, ("nnz", cache.shape[2]), cache.dtype)
    slots = slots_of(
        batch_indices, positions, kv_indices, kv_indptr, num_pages, page_size, rows,
        kv_last_page_len,
    )  # fmt: skip
    _kv.store_kv(
        append_ckv[:, None], append_kpe[:, None], ckv_cache[:, :, None], kpe_cache[:, :, None],
        slots,
    )  # fmt: skip


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

    Notes
    -----
    Differs from FlashInfer: a position outside the table is a fault, and its token is not rotated;
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
    """Rotate query and key of several sequences in place.

    Parameters
    ----------
    indptr : (B + 1,), where the tokens of each sequence begin
    offsets : (B,), position of the first token of each
    others : as in `apply_rope_pos_ids_inplace`, and so are notes

    Examples
    --------
    >>> q, k = torch.ones(3, 2, 4), torch.ones(3, 1, 4)
    >>> apply_rope_inplace(q, k, torch.tensor([0, 1, 3]), torch.tensor([7, 0]))
    >>> k[1, 0].tolist()  # position 0 of the second sequence
    [1.0, 1.0, 1.0, 1.0]
    """
    pos_ids = _positions(q, indptr, offsets)
    apply_rope_pos_ids_inplace(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta)


def apply_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Rotate query and key in place, with the position of each token: `kvcupy.apply_rope`.

    Parameters
    ----------
    q, k : (nnz, Hq, D), (nnz, H, D), rotated in place
    pos_ids : (nnz,)
    rotary_dim : how many leading elements of a head are rotated; None: all
    interleave : pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
    rope_scale, rope_theta : positions are divided by rope_scale; the base of the frequencies

    Notes
    -----
    Differs from FlashInfer: angles come from a table, computed in float64 and kept for further
    calls, where FlashInfer computes them in the kernel with fast sines. The host waits for the
    largest position. Capture: illegal for that reason; use `apply_rope_with_cos_sin_cache_inplace`,
    with a table of `kvcupy.rope_table`.
    """
    linear = ("linear", float(rope_scale))
    _rotate(q, k, pos_ids, rotary_dim, interleave, rope_theta, linear)


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
    indptr, offsets : as in `apply_rope_inplace`
    others : as in `apply_llama31_rope_pos_ids_inplace`
    """
    apply_llama31_rope_pos_ids_inplace(
        q, k, _positions(q, indptr, offsets), rotary_dim, interleave, rope_scale, rope_theta,
        low_freq_factor, high_freq_factor, old_context_len,
    )  # fmt: skip


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
    rope_scale, low_freq_factor, high_freq_factor, old_context_len : factor, low_freq_factor,
        high_freq_factor and original_max_position_embeddings of "llama3" in `kvcupy.rope_table`
    others : as in `apply_rope_pos_ids_inplace`, and so are notes
    """
    llama3 = "llama3", float(rope_scale), low_freq_factor, high_freq_factor, old_context_len
    _rotate(q, k, pos_ids, rotary_dim, interleave, rope_theta, llama3)


def _of_copies(in_place: Callable[..., None]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function that rotates copies of query and key, and returns them."""
    signature = inspect.signature(in_place)

    def rotate(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        bound = signature.bind(*arguments, **options)
        copies = {
            n: x.clone() for n, x in bound.arguments.items() if n in ("query", "key", "q", "k")
        }
        bound.arguments.update(copies)
        in_place(*bound.args, **bound.kwargs)
        query, key = copies.values()
        return query, key

    rotate.__name__ = rotate.__qualname__ = in_place.__name__.removesuffix("_inplace")
    rotate.__doc__ = f"Rotate copies, and return them: `{in_place.__name__}`."
    rotate.__signature__ = signature  # type: ignore[attr-defined]
    return rotate


apply_rope_with_cos_sin_cache = _of_copies(apply_rope_with_cos_sin_cache_inplace)
apply_rope = _of_copies(apply_rope_inplace)
apply_rope_pos_ids = _of_copies(apply_rope_pos_ids_inplace)
apply_llama31_rope = _of_copies(apply_llama31_rope_inplace)
apply_llama31_rope_pos_ids = _of_copies(apply_llama31_rope_pos_ids_inplace)


def _positions(q: Any, indptr: Any, offsets: Any) -> Tensor:
    """Return the position of each token of sequences that begin at offsets."""
    require_shape(q, "q", ("nnz", "heads", "head_dim"))
    require_shape(indptr, "indptr", ("batch_size + 1",))
    require_shape(offsets, "offsets", (len(indptr) - 1,))
    ends = offsets + indptr[1:] - indptr[:-1]
    sequences, positions = get_batch_indices_positions(indptr, ends, len(q))
    return positions[sequences >= 0]  # tokens past the last sequence are not rotated


def _rotate(
    q: Any, k: Any, positions: Tensor, rotary_dim: int | None, interleave: bool, theta: float,
    scaling: tuple[Any, ...],
) -> None:  # fmt: skip
    require_shape(positions, "pos_ids", ("nnz",))
    for x, name in ((q, "q"), (k, "k")):
        require_shape(x, name, ("nnz", "heads", "head_dim"))
    rotary_dim = q.shape[2] if rotary_dim is None else rotary_dim
    if not positions.numel():
        return
    longest = int(positions.max()) + 1  # the host waits
    table = rope_table(rows_for(longest), rotary_dim, float(theta), scaling, str(q.device))
    _kv.apply_rope(q, k, table, positions, interleaved=interleave)


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
    return merge(v_a, s_a, v_b, s_b, lse_base="2")


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
    require_shape(s, "s", ("seq_len", "heads"), torch.float32)
    names = "v", "s", "v_other", "s_other"
    if mask is None:
        merge(v, s, v_other, s_other, names=names, out=v, lse_out=s, lse_base="2")
        return
    merged, lse = merge(v, s, v_other, s_other, names=names, lse_base="2")
    require_shape(mask, "mask", (len(v),))
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


# --- Not offered ----------------------------------------------------------------------------------

_CASCADE = "MultiLevelCascadeAttentionWrapper, which replaces it, has shared pages as a level"

refuse_names(__name__, {
    "nvfp4_quantize_append_paged_mla_kv_cache":
        "its rows are nvfp4 beside fp8; kvcupy.store_mla keeps both parts in one format",
    "nvfp4_quantize_paged_kv_cache":
        "kvcupy.transfer_pages converts pages to nvfp4 with convert=True",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper": _CASCADE,
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper": _CASCADE,
    "BatchDecodeMlaWithPagedKVCacheWrapper": "BatchMLAPagedAttentionWrapper replaces it",
    "concat_mla_k": "torch.cat((k_nope, k_rope.expand(-1, heads, -1)), dim=-1, out=k) does it",
    "BatchAttention BatchAttentionWithAttentionSinkWrapper PODWithPagedKVCacheWrapper "
    "BatchPODWithPagedKVCacheWrapper":
        "BatchPrefillWithPagedKVCacheWrapper takes prefill and decode in one batch",
    "BlockSparseAttentionWrapper VariableBlockSparseAttentionWrapper sparse":
        "attention over blocks that a mask selects is not offered",
    "activation aot autotuner comm fused_moe gemm jit norm quantization sampling topk":
        "it has no operation on a KV cache; import it from FlashInfer itself",
})  # fmt: skip

# FlashInfer's modules, whose names are here: `flashinfer.decode.X`, `from ...rope import X`.
for _name in ("attention", "cascade", "decode", "mla", "page", "pod", "prefill", "rope"):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = sys.modules[__name__]
