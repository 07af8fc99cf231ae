"""TVM's calls of a paged KV cache, `vm.builtin.*`, over `kvcupy.PagedKVCache`. TVM is not needed.

The functions have the names of TVM's global functions, and `get_global_func` returns them as
`tvm.get_global_func` does. The cache is made by `paged_attention_kv_cache_create`, or is any
`kvcupy.PagedKVCache`. Arrays are torch tensors on its device; where TVM takes a ShapeTuple, any
sequence of ints.

What differs from TVM everywhere: a call that raises leaves the cache as it was; attention needs a
step that is running, and begin_forward one that has ended; a sequence comes once in a batch; each
call runs on torch's current stream. `docs/moving_from_other_libraries.md` has a table of all calls.

Examples
--------
>>> cache = paged_attention_kv_cache_create(
...     [4, 64, 32, 16, 0], [0, 1], 4, 2, 8, 8, [0], False, 0, 1.0, 1e4, None, torch.zeros(())
... )
>>> kv_state_add_sequence(cache, 0)
>>> kv_state_begin_forward(cache, [0], [3])
>>> qkv, out = torch.ones(3, 4 + 2 + 2, 8), torch.empty(3, 4, 8)
>>> get_global_func("vm.builtin.attention_kv_cache_attention_with_fused_qkv")(
...     cache, 0, 8**-0.5, qkv, out
... )
>>> kv_state_end_forward(cache)
>>> float(out.min()), attention_kv_cache_get_total_sequence_length(cache)
(1.0, 3)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache.paged.cache import PagedKVCache
from . import StandIn, refuse_names, require_dtype, require_shape
from . import torch as _kv

_MHA, _ROPE_MODES = 0, ("none", "normal", "inline")


# --- Sequences and steps --------------------------------------------------------------------------


def paged_attention_kv_cache_create(
    cache_config: Sequence[int],
    layer_indptr: Sequence[int],
    num_qo_heads: int,
    num_kv_heads: int,
    qk_head_dim: int,
    v_head_dim: int,
    attn_kinds: Sequence[int],
    enable_kv_transfer: bool,
    rope_mode: int,
    rope_scale: float,
    rope_theta: float,
    rope_ext_factors: Any,
    init: Tensor,
    *kernels: Any,
    rotary_dim: int | None = None,
    rope_scaling: dict[str, Any] | None = None,
    max_positions: int | None = None,
) -> PagedKVCache:
    """Return a cache with the pages that TVM's would have.

    Parameters
    ----------
    cache_config : reserved_num_seqs, total_token_capacity, prefill_chunk_size, page_size,
        support_sliding_window (0 or 1), and perhaps the window of sliding layers, which is ignored
    layer_indptr : [0, layers]; more pipeline stages raise NotImplementedError
    num_qo_heads, num_kv_heads, qk_head_dim, v_head_dim : of all layers
    attn_kinds : of each layer; other than 0 (MHA) raises NotImplementedError
    enable_kv_transfer, rope_ext_factors : anything but False and None raises NotImplementedError
    rope_mode : 0 none, 1 normal, 2 inline. With support_sliding_window, 1 means 2
    rope_scale, rope_theta : positions are multiplied by rope_scale; the base of the frequencies
    init : a tensor that says dtype and device
    kernels : ignored; kvcupy has its own
    rotary_dim, rope_scaling : what TVM's kernels have compiled in: the elements that are rotated
        (None: qk_head_dim), and a dictionary as `kvcupy.rope_table` takes it, with rope_scale 1
    max_positions : the longest sequence, for which kvcupy has a table of rotations, float32 of
        rotary_dim each; None: as long as all pages

    Raises
    ------
    TypeError, ValueError : an argument does not fit
    NotImplementedError : an option is not offered
    DeviceError, MemoryError : there is not enough memory

    Notes
    -----
    Pages: ceil(capacity / page_size) + 1, and two more for each sequence with sliding windows. A
    step may have prefill_chunk_size tokens, and one for each sequence.

    Examples
    --------
    See the module.
    """
    if len(cache_config) not in (5, 6):
        raise ValueError(f"cache_config: expected 5 or 6 numbers, got {list(cache_config)}")
    num_seqs, capacity, chunk, page_size, sliding = (int(n) for n in cache_config[:5])
    if len(layer_indptr) != 2 or layer_indptr[0] != 0:
        raise NotImplementedError(
            f"layer_indptr: one pipeline stage, [0, layers], got {list(layer_indptr)}"
        )
    if len(attn_kinds) != layer_indptr[1]:
        raise ValueError(
            f"attn_kinds: expected one for each of {layer_indptr[1]} layers, got {len(attn_kinds)}"
        )
    if any(kind != _MHA for kind in attn_kinds):
        raise NotImplementedError(
            f"attn_kinds: 0 (MHA), got {list(attn_kinds)}; for MLA make a kvcupy.PagedKVCache with "
            "latent_dim, and for sliding layers pass window to its attention"
        )
    for name, value in (
        ("enable_kv_transfer", enable_kv_transfer), ("rope_ext_factors", rope_ext_factors),
    ):  # fmt: skip
        if value is not None and value is not False:
            hint = "rope_scaling takes longrope" if name == "rope_ext_factors" else "of NVSHMEM"
            raise NotImplementedError(f"{name}: not offered; {hint}")
    if rope_mode not in (0, 1, 2):
        raise ValueError(f"rope_mode: expected 0, 1 or 2, got {rope_mode}")
    if rope_scaling is not None and rope_scale != 1:
        raise ValueError(f"rope_scale: expected 1 beside rope_scaling, got {rope_scale}")
    if not isinstance(init, Tensor):
        raise TypeError(f"init: expected a tensor of the cache's dtype, got {type(init).__name__}")
    mode = _ROPE_MODES[2 if sliding and rope_mode else rope_mode]
    num_pages = -(-capacity // page_size) + 1 + (2 * num_seqs if sliding else 0)
    table = None
    if rope_mode:
        scaling = rope_scaling or {"rope_type": "linear", "factor": 1 / rope_scale}
        width = qk_head_dim if rotary_dim is None else rotary_dim
        positions = num_pages * page_size if max_positions is None else max_positions
        table = _kv.rope_table(
            positions, width, base=rope_theta, scaling=scaling, device=init.device
        )
    return PagedKVCache(
        num_layers=len(attn_kinds), num_q_heads=num_qo_heads, num_kv_heads=num_kv_heads,
        head_dim=qk_head_dim, v_head_dim=v_head_dim, num_pages=num_pages, page_size=page_size,
        dtype=init.dtype, rope=table, rope_mode=mode, max_batch_tokens=chunk + num_seqs,
        device=str(init.device).replace("cpu", "host"),
    )  # fmt: skip


def kv_state_clear(state: PagedKVCache) -> None:
    """Drop all sequences: `clear`."""
    state.clear()


def kv_state_add_sequence(state: PagedKVCache, seq_id: int) -> None:
    """Add an empty sequence: `add_sequence`. One that exists raises ValueError."""
    state.add_sequence(seq_id)


def kv_state_remove_sequence(state: PagedKVCache, seq_id: int) -> None:
    """Remove a sequence, in any order: `remove_sequence`."""
    state.remove_sequence(seq_id)


def kv_state_fork_sequence(
    state: PagedKVCache, parent_seq_id: int, child_seq_id: int, fork_pos: int = -1
) -> None:
    """Add a sequence with the first tokens of another: `fork_sequence(inherit_window=False)`.

    Parameters
    ----------
    fork_pos : how many tokens; -1: all. Of a parent with a sliding window at most its sinks

    Notes
    -----
    As in TVM the child has no sliding window of its own until one is enabled for it.

    Examples
    --------
    >>> cache = PagedKVCache(
    ...     num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=8, num_pages=4, device="host"
    ... )
    >>> kv_state_add_sequence(cache, 0)
    >>> kv_state_fork_sequence(cache, 0, 1)
    >>> 1 in cache
    True
    """
    if fork_pos < -1:
        raise ValueError(f"fork_pos: expected -1 or a position, got {fork_pos}")
    at = None if fork_pos == -1 else fork_pos
    state.fork_sequence(parent_seq_id, child_seq_id, at, inherit_window=False)


def kv_state_popn(state: PagedKVCache, seq_id: int, n: int) -> None:
    """Drop the last n tokens of a sequence: `pop_tokens`."""
    state.pop_tokens(seq_id, n)


def kv_state_begin_forward(
    state: PagedKVCache,
    seq_ids: Sequence[int],
    append_lengths: Sequence[int],
    token_tree_parent_ptr: Sequence[int] | None = None,
) -> None:
    """Begin a step: `begin_forward`.

    Parameters
    ----------
    seq_ids, append_lengths : sequences, and new tokens of each
    token_tree_parent_ptr : parents of all new tokens, one sequence after another, each numbered
        within the tree of its sequence; -1: a root. None: no trees

    Raises
    ------
    UnknownSequence, TypeError, ValueError, CacheFull, KvcupyError : nothing has changed, where
        TVM's lengths have grown

    Examples
    --------
    >>> cache = PagedKVCache(
    ...     num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=8, num_pages=4, device="host"
    ... )
    >>> kv_state_add_sequence(cache, 0)
    >>> kv_state_begin_forward(cache, [0], [3], [-1, 0, 0])
    >>> attention_kv_cache_get_query_positions(cache).tolist()
    [0, 1, 1]
    """
    trees = None
    if token_tree_parent_ptr is not None:
        parents, trees, start = [int(n) for n in token_tree_parent_ptr], [], 0
        if len(parents) != sum(append_lengths):
            raise ValueError(
                f"token_tree_parent_ptr: expected {sum(append_lengths)} parents, one per token, "
                f"got {len(parents)}"
            )
        for count in append_lengths:
            trees.append(parents[start : start + count])
            start += count
    state.begin_forward(list(seq_ids), list(append_lengths), token_tree=trees)


def kv_state_end_forward(state: PagedKVCache) -> None:
    """End the step: `end_forward`. With none running it raises KvcupyError."""
    state.end_forward()


def attention_kv_cache_commit_accepted_token_tree_nodes(
    cache: PagedKVCache, seq_ids: Sequence[int], leaf_indices: Sequence[int]
) -> None:
    """Keep the path from the root to a leaf of each tree: `commit_token_tree`.

    Parameters
    ----------
    seq_ids : sequences with a tree, in any order
    leaf_indices : of each, a node of its whole tree: nodes are numbered on over all steps since the
        last commit. -1: no node is kept

    Notes
    -----
    Differs from TVM where the tree grew over several steps: all nodes that are not on the path are
    dropped, those of earlier steps too. TVM drops as many tokens as the last step appended, less
    the path, so that nodes of earlier steps that were not accepted stay in the sequence.
    """
    cache.commit_token_tree(list(seq_ids), list(leaf_indices))


def attention_kv_cache_enable_sliding_window_for_seq(
    cache: PagedKVCache, seq_id: int, sliding_window_size: int, attn_sink_size: int
) -> None:
    """Keep only the first and the last tokens of a sequence: `enable_sliding_window`.

    Notes
    -----
    Differs from TVM: a window may be enabled again, with another size; of a prefix that is shared
    with other sequences, tokens past the sinks are evicted too, where TVM keeps all of it.
    """
    cache.enable_sliding_window(seq_id, sliding_window_size, attn_sink_size)


# --- Attention ------------------------------------------------------------------------------------


def attention_kv_cache_attention_with_fused_qkv(
    cache: PagedKVCache, layer_id: int, sm_scale: float, qkv_data: Tensor, o_data: Tensor
) -> None:
    """Write K and V of the step's tokens, and attend with their queries: `attention_qkv`.

    Parameters
    ----------
    layer_id, sm_scale : the layer, and what scores are multiplied by
    qkv_data : (N, Hq + 2 H, D), at least the tokens of the step; not modified
    o_data : (N, Hq, D), written in place

    Raises
    ------
    KvcupyError : no step is running
    TypeError, ValueError : an argument does not fit; nothing was written

    Examples
    --------
    See the module.
    """
    cache.attention_qkv(layer_id, qkv_data, out=o_data, sm_scale=sm_scale)


def attention_kv_cache_merge_attn_output_inplace(
    cache: PagedKVCache,
    o_self_attn: Tensor,
    lse_self_attn: Tensor,
    o_cross_attn: Tensor,
    lse_cross_attn: Tensor,
) -> tuple[Tensor, Tensor]:
    """Merge another state of attention into a state: `kvcupy.merge_states`, base 2.

    Parameters
    ----------
    cache : not used
    o_self_attn, lse_self_attn : (N, Hq, Dv), and float32 (N, Hq); written in place
    o_cross_attn, lse_cross_attn : the other state

    Returns
    -------
    o_self_attn, lse_self_attn

    Notes
    -----
    Two states without keys give 0 and minus infinity.

    Examples
    --------
    >>> o, lse = torch.ones(1, 1, 2), torch.zeros(1, 1)
    >>> attention_kv_cache_merge_attn_output_inplace(None, o, lse, 3 * o, lse.clone())
    (tensor([[[2., 2.]]]), tensor([[1.]]))
    """
    require_shape(o_self_attn, "o_self_attn", ("tokens", "heads", "head_dim"))
    require_shape(o_cross_attn, "o_cross_attn", tuple(o_self_attn.shape))
    for x, name in ((lse_self_attn, "lse_self_attn"), (lse_cross_attn, "lse_cross_attn")):
        require_shape(x, name, tuple(o_self_attn.shape[:2]))
        require_dtype(x, name, torch.float32)
    return _kv.merge_states(
        o_self_attn, lse_self_attn, o_cross_attn, lse_cross_attn, out=o_self_attn,
        lse_out=lse_self_attn, lse_base="2",
    )  # fmt: skip


# --- What a cache says of itself ------------------------------------------------------------------


def attention_kv_cache_get_query_positions(cache: PagedKVCache) -> Tensor:
    """Return the position of each token of the step, int32: `query_positions`."""
    return _kv.as_tensor(cache.query_positions())


def attention_kv_cache_get_num_available_pages(cache: PagedKVCache) -> int:
    """Return how many pages are free: `num_available_pages`."""
    return cache.num_available_pages


def attention_kv_cache_get_total_sequence_length(cache: PagedKVCache) -> int:
    """Return the tokens of all sequences, shared prefixes counted for each: `total_length`."""
    return cache.total_length


def attention_kv_cache_empty(cache: PagedKVCache) -> bool:
    """Return whether no sequence has tokens and all pages are free.

    In TVM a sequence without tokens counts too.
    """
    return cache.total_length == 0 and cache.num_available_pages == cache.pool.num_pages


def attention_kv_cache_debug_get_kv(
    cache: PagedKVCache, seq_id: int, start_pos: int, end_pos: int, k_data: Tensor, v_data: Tensor
) -> None:
    """Copy K and V of some tokens, all layers: `get_kv`.

    Parameters
    ----------
    start_pos, end_pos : 0 <= start_pos <= end_pos <= length; end_pos is not included
    k_data, v_data : (L, n, H, D), (L, n, H, Dv), written in place
    """
    num_tokens, pool = end_pos - start_pos, cache.pool
    shape = pool.num_layers, num_tokens, pool.num_kv_heads
    require_shape(k_data, "k_data", (*shape, pool.head_dim))
    require_shape(v_data, "v_data", (*shape, pool.v_head_dim))
    for x, rows in zip((k_data, v_data), cache.get_kv(seq_id, start_pos, end_pos), strict=True):
        x.copy_(_kv.as_tensor(rows))


# --- Not offered ----------------------------------------------------------------------------------

_STEPWISE = "kvcupy.PagedKVCache writes and attends in one call, attention or attention_mla"
_DISAGG = "NVSHMEM is not used; PagedKVCache.export_sequence moves sequences between processes"
_SHARED = "kvcupy.paged_attention attends over cache.pool.k(layer) and cache.block_table()"
_PAGE_GROUPS = "PagedKVCache.save_sequence and load_sequence keep sequences in files"

_NOT_OFFERED = {
    "attention_kv_cache_self_attention attention_kv_cache_cross_attention": _STEPWISE,
    "attention_kv_cache_append_mla_kv": _STEPWISE,
    "attention_kv_cache_attention_with_shared_kv": _SHARED,
    "attention_kv_cache_disagg_prepare_recv attention_kv_cache_disagg_mark_send": _DISAGG,
    "attention_kv_cache_debug_get_kv_mla": "PagedKVCache.get_kv copies rows of a latent cache",
    "attention_kv_cache_get_checkpoint_metadata attention_kv_cache_get_layout_hash": _PAGE_GROUPS,
    "attention_kv_cache_export_page_group attention_kv_cache_prepare_import": _PAGE_GROUPS,
    "attention_kv_cache_import_page_group attention_kv_cache_finish_import": _PAGE_GROUPS,
}
refuse_names(__name__, _NOT_OFFERED)

_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    attention_kv_cache_attention_with_fused_qkv,
    attention_kv_cache_commit_accepted_token_tree_nodes,
    attention_kv_cache_debug_get_kv,
    attention_kv_cache_empty,
    attention_kv_cache_enable_sliding_window_for_seq,
    attention_kv_cache_get_num_available_pages,
    attention_kv_cache_get_query_positions,
    attention_kv_cache_get_total_sequence_length,
    attention_kv_cache_merge_attn_output_inplace,
    kv_state_add_sequence,
    kv_state_begin_forward,
    kv_state_clear,
    kv_state_end_forward,
    kv_state_fork_sequence,
    kv_state_popn,
    kv_state_remove_sequence,
    paged_attention_kv_cache_create,
)
_BY_NAME = {f"vm.builtin.{function.__name__}": function for function in _FUNCTIONS}
_BY_NAME |= {
    f"vm.builtin.{name}": StandIn(name, reason)
    for names, reason in _NOT_OFFERED.items()
    for name in names.split()
}

__all__ = ["get_global_func"]
__all__ += [function.__name__ for function in _FUNCTIONS]


def get_global_func(name: str, allow_missing: bool = False) -> Callable[..., Any] | None:
    """Return the function that TVM knows by a global name.

    Parameters
    ----------
    name : "vm.builtin.kv_state_add_sequence", say
    allow_missing : return None for a name that is not here

    Raises
    ------
    NotImplementedError : this is no function of TVM's cache. One that is not offered is returned,
        and raises when it is called

    Examples
    --------
    >>> get_global_func("vm.builtin.kv_state_popn").__name__
    'kv_state_popn'
    """
    if name not in _BY_NAME and not allow_missing:
        raise NotImplementedError(f"name: {name!r} is not one of the cache's functions")
    return _BY_NAME.get(name)
