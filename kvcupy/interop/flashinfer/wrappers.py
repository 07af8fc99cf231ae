"""FlashInfer's attention over pages, by `kvcupy.paged_attention`. Import it from the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .. import require_none
from .. import torch as _kv
from .plan import PagedCache, PlannedAttention, k_and_v

# --- Paged caches ---------------------------------------------------------------------------------


class _PagedAttention(PlannedAttention):
    """The runs of the wrappers over pages."""

    def run(
        self, q: Tensor, paged_kv_cache: PagedCache, *args: Any, enable_pdl: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Attend with the new tokens of all sequences over the planned pages.

        Parameters
        ----------
        q : (nnz, Hq, D), of the planned tokens. The prefill wrapper accepts further rows, which are
            not read, and are 0 in new outputs
        paged_kv_cache : as in `append_paged_kv_cache`, of the planned dtype
        q_scale : a number that sm_scale is multiplied by
        k_scale, v_scale : dequantisation multipliers of an fp8 or nvfp4 cache: a number, or float32
            of one element or (H,). With another cache numbers, which scores and `out` are
            multiplied by; v_scale may be a tensor of one element
        out : (nnz, Hq, D), written in place; None: allocated
        lse : float32 (nnz, Hq), written in place with return_lse; None: allocated
        window_left : None, or as planned
        sinks : float32 logits (Hq,) that join the denominator of the softmax; not with return_lse
        kv_cache_sf : block scales of a cache of nvfp4, which is planned as torch.uint8; both as in
            `nvfp4_quantize_append_paged_kv_cache`
        enable_pdl : ignored
        args : must be empty; they are for FlashInfer's customised kernels

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
        plan = self._planned()
        return plan.run(q, *k_and_v(paged_kv_cache, self._kv_layout), args, **options)


class BatchDecodeWithPagedKVCacheWrapper(_PagedAttention):
    """Attend with one new token per sequence, or a few: `kvcupy.paged_attention`.

    Parameters
    ----------
    float_workspace_buffer : only its device counts
    kv_layout : "NHD" or "HND"
    use_cuda_graph : keep the tables of all plans in the same memory, so that a captured run attends
        over the pages of the last plan. Batch size and all other options stay as captured
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : with
        use_cuda_graph: (B + 1,), as many pages as a plan may have, (B,); a plan copies its table
        there. Else ignored
    use_tensor_cores, backend : ignored; shapes choose the kernel
    jit_args : anything but None raises NotImplementedError
    max_pages_per_sequence : only in kvcupy, with use_cuda_graph: the most pages of one sequence, by
        which a captured launch is laid out. None: all that the buffer holds, which takes
        4 B len(buffer) bytes, and leaves short sequences with fewer blocks

    Notes
    -----
    `plan` waits for the tables, which it makes rectangular, on the host; `run` does not wait.
    Each may be called any number of times; a plan that raises leaves the last one in place.
    `begin_forward` is `plan`.
    Source: FlashInfer `flashinfer.decode`.

    Examples
    --------
    See `kvcupy.interop.flashinfer`.
    """

    _is_decode = True

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
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, buffers, max_pages_per_sequence,
            jit_args,
        )  # fmt: skip
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
        """Set the pages and options of the next runs.

        Parameters
        ----------
        indptr, indices, last_page_len : (B + 1,), (indptr[-1],), (B,), on any device
        num_qo_heads, num_kv_heads, head_dim, page_size : of the tensors of the runs
        pos_encoding_mode : "NONE", or "ROPE_LLAMA": queries, in a copy, and keys of the cache, in
            the kernel, are rotated by their positions, halves apart. "ALIBI" raises
            NotImplementedError
        rope_scale, rope_theta : with "ROPE_LLAMA": positions are divided by rope_scale, 1; the base
            of the frequencies, 10000
        window_left : keys before its own position that a query sees; -1: all
        logits_soft_cap : None or 0: no cap
        q_data_type, kv_data_type, o_data_type : dtypes or their names. None: q_data_type. The query
            has 16 or 32 bits; out has its dtype, or float32
        data_type : of query and cache, where q_data_type and kv_data_type are None
        sm_scale : None: 1 / sqrt(head_dim)
        seq_lens : (B,), instead of the lengths that follow from last_page_len
        q_len_per_req : new tokens per sequence, causal among themselves; with use_cuda_graph the
            same in all plans. A sequence has as many keys, or none
        others : ignored

        Raises
        ------
        TypeError, ValueError : an argument does not fit, or the table's values do not
        NotImplementedError : an option is not offered
        """
        if q_len_per_req < 1:
            raise ValueError(f"q_len_per_req: expected at least 1, got {q_len_per_req}")
        if self.is_cuda_graph_enabled and self._plan and q_len_per_req != self._q_len_per_req:
            raise ValueError(
                f"q_len_per_req: expected {self._q_len_per_req} as in the first plan, which "
                f"captured runs keep, got {q_len_per_req}"
            )
        self._set_plan(
            {"indptr": indptr, "indices": indices, "last_page_len": last_page_len},
            heads=(num_qo_heads, num_kv_heads), head_dims=(head_dim, head_dim),
            page_size=page_size, window_left=window_left, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, rope=(pos_encoding_mode, rope_scale, rope_theta),
            dtypes=(
                data_type if q_data_type is None else q_data_type,
                data_type if kv_data_type is None else kv_data_type,
                o_data_type,
            ),
            seq_lens=seq_lens, q_len_per_req=q_len_per_req,
        )  # fmt: skip
        self._q_len_per_req = q_len_per_req

    begin_forward = plan


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """Attend with `use_cuda_graph`: `BatchDecodeWithPagedKVCacheWrapper` with its buffers by order.

    Parameters
    ----------
    workspace_buffer : only its device counts
    indptr_buffer, indices_buffer, last_page_len_buffer, others : as there

    Examples
    --------
    >>> import torch
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
    """Call `wrapper.plan`, which is no slower here; SGLang calls this function."""
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
    >>> import torch
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
        buffers = {
            "qo_indptr_buf": qo_indptr_buf, "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }  # fmt: skip
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, buffers, max_pages_per_sequence,
            jit_args,
        )  # fmt: skip

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
        """Set the new tokens, pages and options of the next runs.

        Parameters
        ----------
        qo_indptr : (B + 1,), where the new tokens of each sequence begin; they are its last ones
        head_dim_vo : None: head_dim_qk
        causal : a token sees keys up to its own position; else all of its sequence. As in
            FlashInfer, False is the default
        custom_mask : bool, which keys of its sequence each token sees, instead of causal: masks
            (new tokens, keys) of all sequences, end to end. Not with use_cuda_graph. A sequence has
            no more new tokens than keys then
        packed_custom_mask : uint8, instead: likewise, each mask as bits in whole bytes, the lowest
            bit first
        prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr : anything but None raises
            NotImplementedError
        use_fp16_qk_reduction : ignored; sums are float32
        seq_lens_q, max_token_per_sequence, max_sequence_kv : ignored; they follow from the tables
        others : as in `BatchDecodeWithPagedKVCacheWrapper.plan`, and so are errors
        """
        require_none(
            "multi-item scoring is not offered", prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=max_item_len_ptr,
        )  # fmt: skip
        self._set_plan(
            {
                "qo_indptr": qo_indptr, "paged_kv_indptr": paged_kv_indptr,
                "paged_kv_indices": paged_kv_indices,
                "paged_kv_last_page_len": paged_kv_last_page_len,
            },
            heads=(num_qo_heads, num_kv_heads), page_size=page_size,
            head_dims=(head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo),
            window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
            rope=(pos_encoding_mode, rope_scale, rope_theta), seq_lens=seq_lens, causal=causal,
            dtypes=(q_data_type, kv_data_type, o_data_type),
            masks=(custom_mask, packed_custom_mask),
        )  # fmt: skip

    begin_forward = plan


class MultiLevelCascadeAttentionWrapper:
    """Attend over pages that groups of sequences share, level by level, and merge.

    Parameters
    ----------
    num_levels : of which the last has each sequence's own pages
    float_workspace_buffer, kv_layout, use_cuda_graph : as in `BatchPrefillWithPagedKVCacheWrapper`
    qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr,
    paged_kv_last_page_len_buf_arr : with use_cuda_graph, its buffers, of each level

    Notes
    -----
    A level is a `BatchPrefillWithPagedKVCacheWrapper`, so notes and errors are as there; kvcupy
    merges in float32 by `merge_state_in_place`. Source: FlashInfer `flashinfer.cascade`.

    Examples
    --------
    >>> import torch
    >>> cache = torch.ones(3, 2, 2, 1, 8)  # pages, K and V, slots of a page, heads, head_dim
    >>> wrapper = MultiLevelCascadeAttentionWrapper(2, torch.empty(0, dtype=torch.uint8))
    >>> wrapper.plan(  # two sequences share page 0, and have pages 1 and 2
    ...     [torch.tensor([0, 2]), torch.tensor([0, 1, 2])],
    ...     [torch.tensor([0, 1]), torch.tensor([0, 1, 2])],
    ...     [torch.tensor([0]), torch.tensor([1, 2])],
    ...     [torch.tensor([2]), torch.tensor([1, 2])],
    ...     2, 1, 8, 2, q_data_type="float32",
    ... )
    >>> wrapper.run(torch.ones(2, 2, 8), cache).shape
    torch.Size([2, 2, 8])
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[Tensor] | None = None,
    ) -> None:
        if num_levels < 1:
            raise ValueError(f"num_levels: expected at least 1, got {num_levels}")
        buffers: dict[str, Any] = {}
        if use_cuda_graph:
            buffers = {
                "qo_indptr_buf_arr": qo_indptr_buf_arr,
                "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
                "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
                "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
            }
        _require_levels(buffers, num_levels)
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, use_cuda_graph,
                **{name.removesuffix("_arr"): of_level[i] for name, of_level in buffers.items()},
            )
            for i in range(num_levels)
        ]  # fmt: skip

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made with `use_cuda_graph`."""
        return self._levels[0].is_cuda_graph_enabled

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffers: Sequence[Tensor]
    ) -> None:
        """Check that all begin at a multiple of 16 bytes; kvcupy has its own workspaces."""
        for level, buffer in zip(self._levels, int_workspace_buffers, strict=True):
            level.reset_workspace_buffer(float_workspace_buffer, buffer)

    def plan(
        self,
        qo_indptr_arr: Sequence[Tensor],
        paged_kv_indptr_arr: Sequence[Tensor],
        paged_kv_indices_arr: Sequence[Tensor],
        paged_kv_last_page_len: Sequence[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        *arguments: Any,
        **options: Any,
    ) -> None:
        """Set the pages and options of the next runs.

        Parameters
        ----------
        qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len : of each
            level, as in `BatchPrefillWithPagedKVCacheWrapper.plan`
        causal : of the last level; others see all of their keys
        arguments, options : what follows causal there, for all levels
        """
        tables = {
            "qo_indptr_arr": qo_indptr_arr, "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }  # fmt: skip
        _require_levels(tables, len(self._levels))
        for level, *of_level in zip(self._levels, *tables.values(), strict=True):
            level.plan(
                *of_level, num_qo_heads, num_kv_heads, head_dim, page_size, None, None, None,
                causal and level is self._levels[-1], *arguments, **options,
            )  # fmt: skip

    begin_forward = plan

    def run(self, q: Tensor, paged_kv_cache: PagedCache) -> Tensor:
        """Attend with the new tokens of all sequences over the pages of all levels.

        Parameters
        ----------
        q, paged_kv_cache : as in `BatchPrefillWithPagedKVCacheWrapper.run`, and so are errors

        Returns
        -------
        (nnz, Hq, D), a new tensor
        """
        *shared, own = self._levels
        out, lse = own.run(q, paged_kv_cache, return_lse=True)
        for level in shared:
            other, other_lse = level.run(q, paged_kv_cache, return_lse=True)
            _kv.merge_states(out, lse, other, other_lse, out=out, lse_out=lse, lse_base="2")
        merged: Tensor = out
        return merged

    forward = run

    def end_forward(self) -> None:
        """Do nothing, as in FlashInfer, which deprecates it."""


def _require_levels(tensors: Mapping[str, Any], count: int) -> None:
    for name, of_levels in tensors.items():
        if not isinstance(of_levels, (list, tuple)) or len(of_levels) != count:
            is_list = isinstance(of_levels, (list, tuple))
            got = len(of_levels) if is_list else type(of_levels).__name__
            raise ValueError(f"{name}: expected a tensor for each of {count} levels, got {got}")
