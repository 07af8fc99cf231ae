"""FlashInfer's names and signatures over kvcupy's operations. FlashInfer itself is not needed.

Tensors are torch's, on a GPU or the CPU. Tables are CSR: the pages of sequence b are
`kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`, of which the last holds `kv_last_page_len[b]` tokens,
those being appended included. Index tensors may be int32 or int64. The log-sum-exp has base 2.

What differs from FlashInfer everywhere: any even head_dim works; a batch index, position or page
below 0 is padding and skipped; a position past the pages of its sequence is skipped and raised by
`kvcupy.check_faults`; a TypeError or ValueError names the argument, before anything is written.

Examples
--------
>>> cache = torch.zeros(8, 2, 16, 1, 64)  # pages, K and V, slots of a page, heads, head_dim
>>> indptr, indices, last_page_len = (torch.tensor(x) for x in ([0, 2], [5, 3], [1]))
>>> rows, batch, positions = torch.ones(17, 1, 64), torch.zeros(17).int(), torch.arange(17)
>>> append_paged_kv_cache(rows, 2 * rows, batch, positions, cache, indices, indptr, last_page_len)
>>> float(cache[3, 1, 0, 0, 0]), float(cache[3, 1, 1, 0, 0])
(2.0, 0.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..formats import Layout
from ..ops.store import store_kv
from . import describe_tensor, require_indices, require_shape
from . import torch as _kv

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "merge_state",
    "merge_states",
]

PagedCache: TypeAlias = "Tensor | tuple[Tensor, Tensor]"

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
    k_cache, v_cache = _k_and_v(paged_kv_cache, kv_layout)
    page_size, heads = k_cache.shape[1:3]
    if kv_layout == "HND":
        heads, page_size = page_size, heads
    rows = {"append_key": append_key, "append_value": append_value}
    for (name, x), cache in zip(rows.items(), (k_cache, v_cache), strict=True):
        require_shape(x, name, ("nnz", heads, cache.shape[3]), cache.dtype)
    slots = _slots_of(
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
    slots = _slots_of(
        batch_indices, positions, kv_indices, kv_indptr, num_pages, page_size, rows,
        kv_last_page_len,
    )  # fmt: skip
    _kv.store_kv(
        append_ckv[:, None], append_kpe[:, None], ckv_cache[:, :, None], kpe_cache[:, :, None],
        slots,
    )  # fmt: skip


def _k_and_v(paged_kv_cache: Any, kv_layout: str) -> tuple[Tensor, Tensor]:
    """Return K and V of a cache that is one 5-D tensor or two of four dimensions."""
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: expected NHD or HND, got {kv_layout!r}")
    name = "paged_kv_cache"
    axes: tuple[str, ...] = ("page_size", "heads", "head_dim")
    if kv_layout == "HND":
        axes = ("heads", "page_size", "head_dim")
    if isinstance(paged_kv_cache, Tensor):
        require_shape(paged_kv_cache, name, ("pages", 2, *axes))
        return paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    if not isinstance(paged_kv_cache, (tuple, list)) or len(paged_kv_cache) != 2:
        got = describe_tensor(paged_kv_cache)
        raise TypeError(f"{name}: expected a tensor, or K and V as a tuple, got {got}")
    k_cache, v_cache = paged_kv_cache
    require_shape(k_cache, f"{name} (K)", ("pages", *axes))
    require_shape(v_cache, f"{name} (V)", (*k_cache.shape[:3], "head_dim"))
    return k_cache, v_cache


def _slots_of(
    batch_indices: Any, positions: Any, kv_indices: Any, kv_indptr: Any, num_pages: int,
    page_size: int, rows: Mapping[str, Tensor], kv_last_page_len: Any = None,
) -> Tensor:  # fmt: skip
    """Return the slot of each token: negative for padding, past the end for one without a page.

    It raises TypeError or ValueError unless the indices fit each other, and `rows` have as many
    tokens.
    """
    require_indices(batch_indices, "batch_indices")
    require_indices(positions, "positions", rows)
    require_indices(kv_indices, "kv_indices")
    require_indices(kv_indptr, "kv_indptr")
    require_shape(positions, "positions", (len(batch_indices),))
    num_sequences, num_entries = len(kv_indptr) - 1, len(kv_indices)
    if kv_last_page_len is not None:
        require_indices(kv_last_page_len, "kv_last_page_len")
        require_shape(kv_last_page_len, "kv_last_page_len", (num_sequences,))
    is_padding = torch.minimum(batch_indices, positions) < 0
    end = num_pages * page_size
    if not num_sequences or not num_entries:
        return torch.where(is_padding, -1, end)
    sequences = batch_indices.clamp(0, num_sequences - 1)
    entries = kv_indptr[sequences] + positions.div(page_size, rounding_mode="floor")
    has_page = (entries < kv_indptr[1:][sequences]) & (batch_indices < num_sequences)
    pages = kv_indices[entries.clamp_(0, num_entries - 1)].long()
    slots = torch.add(positions % page_size, pages, alpha=page_size)
    return torch.where(has_page, slots, end).masked_fill_(is_padding, -1)


# --- Rotations ------------------------------------------------------------------------------------


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
    largest position. Capture: illegal for that reason; use `kvcupy.apply_rope` with a table of
    `kvcupy.rope_table`.
    """
    require_shape(pos_ids, "pos_ids", ("nnz",))
    for x, name in ((q, "q"), (k, "k")):
        require_shape(x, name, ("nnz", "heads", "head_dim"))
    if not pos_ids.numel():
        return
    rotary_dim = q.shape[2] if rotary_dim is None else rotary_dim
    length = int(pos_ids.max()) + 1  # the host waits
    # Tables have a power of two of rows, so that growing sequences need few of them.
    rows = 1 << max(length - 1, 1023).bit_length()
    table = _rope_table(rows, rotary_dim, float(rope_theta), float(rope_scale), str(q.device))
    _kv.apply_rope(q, k, table, pos_ids, interleaved=interleave)


def apply_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor]:
    """Rotate copies of query and key, and return them: `apply_rope_pos_ids_inplace`.

    Examples
    --------
    >>> q, k = torch.ones(2, 2, 4), torch.ones(2, 1, 4)
    >>> apply_rope_pos_ids(q, k, torch.tensor([0, 7]))[1][0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    q, k = q.clone(), k.clone()
    apply_rope_pos_ids_inplace(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta)
    return q, k


@lru_cache(maxsize=16)
def _rope_table(rows: int, rotary_dim: int, theta: float, factor: float, device: str) -> Tensor:
    scaling = {"rope_type": "linear", "factor": factor}
    return _kv.rope_table(rows, rotary_dim, base=theta, scaling=scaling, device=device)


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
    require_shape(v_a, "v_a", ("seq_len", "heads", "head_dim"))
    require_shape(s_a, "s_a", tuple(v_a.shape[:2]))
    require_shape(v_b, "v_b", tuple(v_a.shape))
    require_shape(s_b, "s_b", tuple(v_a.shape[:2]))
    return _kv.merge_states(v_a, s_a.float(), v_b, s_b.float(), lse_base="2")


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
