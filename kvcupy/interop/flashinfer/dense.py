"""FlashInfer's attention over K and V without pages. Import it from the package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import describe_tensor, require_none, require_shape
from .plan import (
    Masks,
    Plan,
    PlannedAttention,
    Rope,
    mask_of,
    require_dtypes,
    require_layout,
    rotations_of,
)


class BatchPrefillWithRaggedKVCacheWrapper(PlannedAttention):
    """Attend over K and V that lie end to end, of each sequence's keys: `kvcupy.paged_attention`.

    Parameters
    ----------
    float_workspace_buffer : only its device counts
    kv_layout : "NHD": K and V are (nnz_kv, H, D); "HND": (H, nnz_kv, D)
    use_cuda_graph : keep the tables of all plans in the same memory, so that a captured run attends
        by the last plan
    qo_indptr_buf, kv_indptr_buf : with use_cuda_graph: (B + 1,); a plan copies its offsets there
    jit_args : anything but None raises NotImplementedError
    others : ignored
    max_keys_per_sequence : only in kvcupy, and needed with use_cuda_graph: the most keys of one
        sequence, by which a captured launch is laid out

    Notes
    -----
    A key is a page of one token, so that nothing is copied; the table of a plan takes four bytes
    for each sequence and key of the longest. `plan` waits for the offsets on the host; `run` does
    not wait. `begin_forward` is `plan`. Source: FlashInfer `flashinfer.prefill`.

    Examples
    --------
    >>> wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    >>> starts = torch.tensor([0, 2, 3])
    >>> wrapper.plan(starts, starts, 2, 1, 8, causal=True, q_data_type=torch.float32)
    >>> k, v = torch.zeros(3, 1, 8), torch.arange(3.0).view(3, 1, 1).repeat(1, 1, 8)
    >>> wrapper.run(torch.zeros(3, 2, 8), k, v)[:, 0, 0].tolist()
    [0.0, 0.5, 2.0]
    """

    _cache_names = ("k", "v")

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        *,
        max_keys_per_sequence: int | None = None,
    ) -> None:
        buffers: dict[str, Tensor | None] = {}
        if use_cuda_graph:
            if max_keys_per_sequence is None:
                raise ValueError(
                    "max_keys_per_sequence: expected an int with use_cuda_graph, got None"
                )
            require_shape(kv_indptr_buf, "kv_indptr_buf", ("batch_size + 1",))
            assert kv_indptr_buf is not None
            count = len(kv_indptr_buf) - 1
            buffers = {
                "qo_indptr_buf": qo_indptr_buf,
                "kv_indptr_buf": kv_indptr_buf,
                "max_keys_per_sequence": kv_indptr_buf.new_empty(count * max_keys_per_sequence),
                "count": kv_indptr_buf.new_empty(count),
            }
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, buffers, max_keys_per_sequence,
            jit_args,
        )  # fmt: skip

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
    ) -> None:
        """Set the new tokens, keys and options of the next runs.

        Parameters
        ----------
        qo_indptr, kv_indptr : (B + 1,), where the new tokens and the keys of each sequence begin;
            the new tokens are its last ones
        seq_lens : ignored, as the keys follow from kv_indptr
        others : as in `BatchPrefillWithPagedKVCacheWrapper.plan`, and so are errors
        """
        require_none(
            "multi-item scoring is not offered", prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=max_item_len_ptr,
        )  # fmt: skip
        require_shape(kv_indptr, "kv_indptr", ("batch_size + 1",), torch.int32, torch.int64)
        num_keys = int(kv_indptr.max()) if len(kv_indptr) else 0
        keys = torch.arange(num_keys, dtype=kv_indptr.dtype, device=kv_indptr.device)
        tokens = torch.ones_like(kv_indptr[1:])
        self._set_plan(
            {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "keys": keys, "tokens": tokens},
            heads=(num_qo_heads, num_kv_heads), page_size=1,
            head_dims=(head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo),
            window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
            rope=(pos_encoding_mode, rope_scale, rope_theta), causal=causal,
            dtypes=(q_data_type, kv_data_type, o_data_type),
            masks=(custom_mask, packed_custom_mask),
        )  # fmt: skip
        self._num_keys = num_keys

    begin_forward = plan

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Call `run` with options that replace the plan's, here in FlashInfer's order too."""
        names = (
            "causal", "pos_encoding_mode", "use_fp16_qk_reduction", "window_left",
            "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta",
        )  # fmt: skip
        in_order = dict(zip(names, arguments[3:], strict=False))
        return super().forward(*arguments[:3], **in_order, **options)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *args: Any, enable_pdl: Any = None,
        kv_cache_sf: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Attend with the new tokens of all sequences over the keys of each.

        Parameters
        ----------
        q : (nnz, Hq, D), of the planned tokens, and perhaps further rows, which are not read
        k, v : (nnz_kv, H, D), (nnz_kv, H, Dv) or as the layout says, of the planned keys and
            perhaps further ones; of any strides whose last is 1
        kv_cache_sf : block scales of k and v of nvfp4, (nnz_kv, H, D / 16) each; these are then
            uint8, two elements in a byte
        others : as in `BatchPrefillWithPagedKVCacheWrapper.run`, and so are results and errors
        """
        plan, keys_axis = self._planned(), 0 if self._kv_layout == "NHD" else 1
        for x, name in ((k, "k"), (v, "v")):
            require_shape(x, name, _axes(self._kv_layout))
            if x.shape[keys_axis] < self._num_keys:
                got = describe_tensor(x)
                raise ValueError(f"{name}: expected at least {self._num_keys} keys, got {got}")
        scales = None if kv_cache_sf is None else tuple(map(self._paged, kv_cache_sf))
        return plan.run(q, self._paged(k), self._paged(v), args, kv_cache_sf=scales, **options)

    def _paged(self, x: Tensor) -> Tensor:
        """View keys as pages of one token, (keys, 1, heads, width) or (keys, heads, 1, width)."""
        return x[:, None] if self._kv_layout == "NHD" else x.transpose(0, 1)[:, :, None]


def _axes(kv_layout: str) -> tuple[str, str, str]:
    keys, heads = ("keys", "heads") if kv_layout == "NHD" else ("heads", "keys")
    return keys, heads, "head_dim"


def _attend_one(
    q: Any, k: Any, v: Any, kv_layout: str, *, rope: Rope, window_left: int,
    masks: Masks = (None, None), out_dtype: Any = None, kv_cache_sf: Any = None,
    causal: bool = True, sm_scale: float | None, logits_soft_cap: float | None, **options: Any,
) -> Any:  # fmt: skip
    """Attend over one sequence, whose keys are one page; the host waits for nothing."""
    require_layout(kv_layout)
    require_shape(k, "k", _axes(kv_layout))
    require_shape(v, "v", (*k.shape[:2], "head_dim"))
    keys, heads = k.shape[:2] if kv_layout == "NHD" else k.shape[1::-1]
    count, length = len(q), torch.full((1,), keys, dtype=torch.int32, device=q.device)
    plan = Plan(
        torch.zeros_like(length)[None], length, torch.full_like(length, count),
        mask_of(masks, torch.tensor([count]), torch.tensor([keys]), window_left),
        rotations_of(rope, keys, q.shape[2], q.device, {}), count, heads=(q.shape[1], heads),
        head_dims=(q.shape[2], v.shape[2] * (2 if v.dtype is torch.uint8 else 1)), page_size=keys,
        dtypes=require_dtypes(q.dtype, k.dtype, out_dtype), kv_layout=kv_layout,
        cache_names=("k", "v"), causal=causal, window_left=window_left, sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
    )  # fmt: skip
    scales = None if kv_cache_sf is None else tuple(x[None] for x in kv_cache_sf)
    return plan.run(q, k[None], v[None], kv_cache_sf=scales, **options)


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: Any = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Any:
    """Attend with the last tokens of one sequence over its keys: `kvcupy.paged_attention`.

    Parameters
    ----------
    q : fp32, fp16 or bf16 (qo_len, Hq, D)
    k, v : (kv_len, H, D), (kv_len, H, Dv), or with "HND" (H, kv_len, D), (H, kv_len, Dv)
    scale_q : anything but None raises NotImplementedError
    kv_cache_sf : block scales of k and v of nvfp4, of H and D / 16 instead of D; these are then
        uint8, two elements in a byte
    scale_k, scale_v : of fp8 K and V, float32 (H,), instead of k_scale and v_scale
    o_dtype : of the output: q's, or float32. None: q's
    custom_mask : bool (qo_len, kv_len), which keys a token sees, instead of causal
    packed_custom_mask : uint8, its bits in row order, the lowest of a byte first
    backend, use_fp16_qk_reduction : ignored
    others : as in `BatchPrefillWithPagedKVCacheWrapper.plan` and its `run`

    Returns
    -------
    (qo_len, Hq, Dv), or with return_lse a tuple of it and float32 (qo_len, Hq), whose base is 2

    Raises
    ------
    NotImplementedError : an option is not offered

    Examples
    --------
    >>> k, v = torch.zeros(3, 1, 8), torch.arange(3.0).view(3, 1, 1).repeat(1, 1, 8)
    >>> single_prefill_with_kv_cache(torch.zeros(2, 2, 8), k, v, causal=True)[:, 0, 0].tolist()
    [0.5, 1.0]
    """
    require_none("queries are not quantised", scale_q=scale_q)
    require_shape(q, "q", ("tokens", "heads", "head_dim"))
    return _attend_one(
        q, k, v, kv_layout, rope=(pos_encoding_mode, rope_scale, rope_theta),
        masks=(custom_mask, packed_custom_mask), out_dtype=o_dtype, causal=causal,
        sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
        return_lse=return_lse, kv_cache_sf=kv_cache_sf,
        k_scale=k_scale if scale_k is None else scale_k,
        v_scale=v_scale if scale_v is None else scale_v,
    )  # fmt: skip


def single_prefill_with_kv_cache_return_lse(*arguments: Any, **options: Any) -> Any:
    """Call `single_prefill_with_kv_cache` with return_lse."""
    options["return_lse"] = True
    return single_prefill_with_kv_cache(*arguments, **options)


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend with the last token of one sequence over its keys: `kvcupy.paged_attention`.

    Parameters
    ----------
    q : fp32, fp16 or bf16 (Hq, D)
    use_tensor_cores : ignored
    others : as in `single_prefill_with_kv_cache`, and so are errors

    Returns
    -------
    (Hq, Dv), or with return_lse a tuple of it and float32 (Hq,), whose base is 2

    Examples
    --------
    >>> k, v = torch.zeros(4, 1, 8), torch.arange(4.0).view(4, 1, 1).repeat(1, 1, 8)
    >>> single_decode_with_kv_cache(torch.zeros(2, 8), k, v)[:, 0].tolist()
    [1.5, 1.5]
    """
    require_shape(q, "q", ("heads", "head_dim"))
    result = _attend_one(
        q[None], k, v, kv_layout, rope=(pos_encoding_mode, rope_scale, rope_theta),
        sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
        return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    return tuple(x[0] for x in result) if return_lse else result[0]
