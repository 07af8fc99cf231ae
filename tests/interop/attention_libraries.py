"""Stand-ins for FlashInfer and FlashAttention, which compute with `kvcupy.reference`.

They have the parameters of flashinfer-python 0.7.2, flash-attn 2.8.3 and the `flash_attn_interface`
of FlashAttention 3 in the same package. They record their calls, so that a test can bind these to
the signatures of installed packages.
"""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import torch

import kvcupy as kv
from kvcupy import reference
from kvcupy.arrays import view

CALLS = []
"""(module, class or None, function, arguments, options) of each call."""
ERROR = None
"""What `run` and functions raise, if it is an exception."""


def as_numpy(tensor):
    """Return an array over a tensor's memory; the order checker takes it for the stream's work."""
    v = view(tensor)
    return kv.device("host").carrier(v).view(kv.formats.numpy_dtype(v.format))


def attend(query, k_cache, v_cache, table, seq_lens, query_lens, scale, window, factors=(1, 1)):
    """Return attention over pages as a tensor like the query."""
    if ERROR is not None:
        raise ERROR
    query, k_cache, v_cache = map(as_numpy, (query, k_cache, v_cache))
    out, _, _ = reference.paged_attention(
        query, k_cache, v_cache, np.asarray(table), np.asarray(seq_lens),
        query_lens=np.asarray(query_lens), sm_scale=scale, window=window,
        k_scale=factors[0], v_scale=factors[1],
    )  # fmt: skip
    rounded = reference.encode(out, reference.format_of(query))
    bits = torch.from_numpy(np.ascontiguousarray(rounded).view(np.int16).copy())
    return bits.view({"bfloat16": torch.bfloat16, "float16": torch.float16}[query.dtype.name])


def from_csr(indptr, indices):
    """Return a block table, padded with pages that must not be read."""
    counts = np.diff(indptr)
    table = np.full((len(counts), max(counts)), 2**30, np.int32)
    for row, start, count in zip(table, indptr, counts, strict=False):
        row[:count] = indices[start : start + count]
    return table


def window_of(window_left):
    return None if window_left < 0 else window_left + 1


def require_int32(*tensors):
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in tensors)


class Recorded:
    """Records calls of the methods of a subclass."""

    module = ""

    def record(self, function, arguments, options):
        CALLS.append((self.module, type(self).__name__, function, arguments, options))


# --- FlashInfer -----------------------------------------------------------------------------------


class BatchDecodeWithPagedKVCacheWrapper(Recorded):
    module = "flashinfer.decode"

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None, backend="auto", jit_args=None,
    ):  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
        self.record("__init__", (float_workspace_buffer, kv_layout),
                    {"use_tensor_cores": use_tensor_cores})  # fmt: skip

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        pos_encoding_mode="NONE", window_left=-1, window_right=0, logits_soft_cap=None,
        q_data_type="float16", kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None,
        rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None,
        fixed_split_size=None, disable_split_kv=False, q_len_per_req=1, is_causal=None,
    ):  # fmt: skip
        self.record(
            "plan",
            (indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size),
            {"window_left": window_left, "sm_scale": sm_scale, "q_data_type": q_data_type,
             "kv_data_type": kv_data_type},
        )  # fmt: skip
        require_int32(indptr, indices, last_page_len)
        self.table = from_csr(indptr.numpy(), indices.numpy())
        self.lengths = (np.diff(indptr) - 1) * page_size + last_page_len.numpy()
        self.query_lens, self.types = np.ones(len(self.lengths), int), (q_data_type, kv_data_type)
        self.scale, self.window = sm_scale, window_of(window_left)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None,
        lse=None, return_lse=False, enable_pdl=None, window_left=None, sinks=None,
        q_len_per_req=None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None,
    ):  # fmt: skip
        scales = {} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}
        self.record("run", (q, paged_kv_cache), {"out": out, **scales})
        k_cache, v_cache = paged_kv_cache
        assert self.types == (q.dtype, k_cache.dtype) and out.dtype == q.dtype
        return out.copy_(
            attend(q, k_cache, v_cache, self.table, self.lengths, self.query_lens, self.scale,
                   self.window, (k_scale or 1.0, v_scale or 1.0))
        )  # fmt: skip


class BatchPrefillWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    module = "flashinfer.prefill"

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
        custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
        variant_owns_mask=False,
    ):  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
        self.record("__init__", (float_workspace_buffer, kv_layout), {"backend": backend})

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None,
        token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None, seq_lens_q=None,
        block_tables=None, max_token_per_sequence=None, max_sequence_kv=None,
        fixed_split_size=None, disable_split_kv=False, uniform_q_len=None,
    ):  # fmt: skip
        pages = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self.record(
            "plan", (qo_indptr, *pages, num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            {"causal": causal, "window_left": window_left, "sm_scale": sm_scale,
             "q_data_type": q_data_type, "kv_data_type": kv_data_type},
        )  # fmt: skip
        assert causal
        require_int32(qo_indptr, *pages)
        self.table = from_csr(paged_kv_indptr.numpy(), paged_kv_indices.numpy())
        self.lengths = (np.diff(paged_kv_indptr) - 1) * page_size + paged_kv_last_page_len.numpy()
        self.query_lens, self.types = np.diff(qo_indptr), (q_data_type, kv_data_type)
        self.scale, self.window = sm_scale, window_of(window_left)


class BatchMLAPagedAttentionWrapper(Recorded):
    module = "flashinfer.mla"

    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None,
        kv_indices=None, kv_len_arr=None, backend="auto",
    ):  # fmt: skip
        self.record("__init__", (float_workspace_buffer,), {"backend": backend})

    def plan(
        self, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, num_heads=None,
        head_dim_ckv=None, head_dim_kpe=None, page_size=None, causal=None, sm_scale=None,
        q_data_type=None, kv_data_type=None, use_profiler=False, *, metadata=None,
        cum_seq_lens_q=None, block_tables=None, seq_lens=None, max_q_len=None, query_layout=None,
        kv_cache_layout=None, lse_mode="none", output_dtype=None, output_scale="none",
        scale_mode="default", skip_softmax=False, enable_pdl=None, use_sinks=False,
    ):  # fmt: skip
        self.record(
            "plan", (),
            {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices,
             "kv_len_arr": kv_len_arr, "num_heads": num_heads, "head_dim_ckv": head_dim_ckv,
             "head_dim_kpe": head_dim_kpe, "page_size": page_size, "causal": causal,
             "sm_scale": sm_scale, "q_data_type": q_data_type, "kv_data_type": kv_data_type},
        )  # fmt: skip
        assert causal and (head_dim_ckv, head_dim_kpe) == (512, 64)
        require_int32(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        self.table = from_csr(kv_indptr.numpy(), kv_indices.numpy())
        self.lengths, self.query_lens = kv_len_arr.numpy(), np.diff(qo_indptr)
        self.scale = sm_scale

    def run(
        self, q_nope=None, q_pe=None, ckv_cache=None, kpe_cache=None, out=None, lse=None,
        return_lse=False, profiler_buffer=None, kv_len=None, page_table=None,
        return_lse_base_on_e=False, o_scale=None, *, query=None, kv_cache=None, ckv_scale=None,
        ckv_scale_arr=None, kpe_scale=None, sinks=None, skip_softmax_threshold_scale_factor=None,
        bmm1_scale=None, bmm2_scale=None,
    ):  # fmt: skip
        parts = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
        self.record("run", (), {**parts, "out": out})
        keys = torch.cat((ckv_cache, kpe_cache), -1)[:, :, None]
        return out.copy_(
            attend(torch.cat((q_nope, q_pe), -1), keys, ckv_cache[:, :, None], self.table,
                   self.lengths, self.query_lens, self.scale, None)
        )  # fmt: skip


# --- FlashAttention -------------------------------------------------------------------------------


def _record(module, function, arguments, options):
    CALLS.append((module, None, function, arguments, options))


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    """Of FlashAttention 2: queries (B, T, Hq, D)."""
    _record("flash_attn.flash_attn_interface", "flash_attn_with_kvcache", (q, k_cache, v_cache),
            {"cache_seqlens": cache_seqlens, "block_table": block_table,
             "softmax_scale": softmax_scale, "causal": causal,
             "window_size": window_size})  # fmt: skip
    assert causal and k_cache.shape[1] % 256 == 0 and window_size[1] in (-1, 0)
    require_int32(cache_seqlens, block_table)
    query_lens = np.full(len(q), q.shape[1])
    return attend(q.flatten(0, 1), k_cache, v_cache, block_table, cache_seqlens, query_lens,
                  softmax_scale, window_of(window_size[0])).view_as(q)  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """Of FlashAttention 2."""
    _record("flash_attn.flash_attn_interface", "flash_attn_varlen_func",
            (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            {"block_table": block_table, "softmax_scale": softmax_scale, "causal": causal,
             "window_size": window_size})  # fmt: skip
    assert causal and k.shape[1] % 256 == 0 and window_size[1] in (-1, 0)
    require_int32(cu_seqlens_q, cu_seqlens_k, block_table)
    query_lens, lengths = np.diff(cu_seqlens_q), np.diff(cu_seqlens_k)
    assert (max_seqlen_q, max_seqlen_k) == (max(query_lens), max(lengths))
    return attend(q, k, v, block_table, lengths, query_lens, softmax_scale,
                  window_of(window_size[0]))  # fmt: skip


def _flash_attn_3_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """Of FlashAttention 3: queries (B, T, Hq, D), or (T, Hq, D) with cu_seqlens_q."""
    ragged = {} if cu_seqlens_q is None else {
        "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q
    }  # fmt: skip
    _record("flash_attn_interface", "flash_attn_with_kvcache", (q, k_cache, v_cache),
            {"cache_seqlens": cache_seqlens, "page_table": page_table,
             "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size,
             **ragged})  # fmt: skip
    assert causal and window_size[1] in (-1, 0)
    require_int32(cache_seqlens, page_table)
    rows, query_lens = q, np.diff(cu_seqlens_q) if ragged else np.full(len(q), q.shape[1])
    if ragged:
        require_int32(cu_seqlens_q)
        assert max_seqlen_q == max(query_lens)
    else:
        rows = q.flatten(0, 1)
    return attend(rows, k_cache, v_cache, page_table, cache_seqlens, query_lens, softmax_scale,
                  window_of(window_size[0])).view_as(q)  # fmt: skip


MODULES = {
    "flashinfer": {
        "flashinfer.decode": (BatchDecodeWithPagedKVCacheWrapper,),
        "flashinfer.prefill": (BatchPrefillWithPagedKVCacheWrapper,),
        "flashinfer.mla": (BatchMLAPagedAttentionWrapper,),
    },
    "flash_attn": {
        "flash_attn.flash_attn_interface": (flash_attn_with_kvcache, flash_attn_varlen_func),
    },
    "flash_attn_interface": {"flash_attn_interface": (_flash_attn_3_with_kvcache,)},
}


def install(monkeypatch, *packages):
    """Let these packages be imported, and none of the others."""
    CALLS.clear()
    for package, modules in MODULES.items():
        for path, functions in modules.items():
            if package not in packages:
                monkeypatch.setitem(sys.modules, path, None)
                continue
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
            module = ModuleType(path)
            for function in functions:
                setattr(module, function.__name__.replace("_flash_attn_3", "flash_attn"), function)
            monkeypatch.setitem(sys.modules, path, module)
