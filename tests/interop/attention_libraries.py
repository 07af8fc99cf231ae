"""Stand-ins for FlashInfer and FlashAttention, which compute with `kvcupy.reference`.

They have the parameters of flashinfer-python 0.7.2, flash-attn 2.8.3 and the
`flash_attn_interface` of FlashAttention 3 in the same package, as far as kvcupy passes them.
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
"""(function, options) of each call."""
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


# --- FlashInfer -----------------------------------------------------------------------------------


class Wrapper:
    """What the wrappers of FlashInfer share."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, use_tensor_cores=False,
                 backend="auto"):  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
        CALLS.append(("__init__", {"backend": backend}))

    def planned(self, indptr, indices, lengths, query_lens, options):
        CALLS.append(("plan", options))
        require_int32(indptr, indices, *[x for x in lengths if isinstance(x, torch.Tensor)])
        self.table = from_csr(indptr.numpy(), indices.numpy())
        self.query_lens, self.options = query_lens, options


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        window_left=-1, q_data_type="float16", kv_data_type=None, sm_scale=None,
    ):  # fmt: skip
        options = {"window_left": window_left, "q_data_type": q_data_type,
                   "kv_data_type": kv_data_type, "sm_scale": sm_scale}  # fmt: skip
        lengths = (np.diff(indptr) - 1) * page_size + last_page_len.numpy()
        self.planned(indptr, indices, [last_page_len], np.ones(len(lengths), int), options)
        self.lengths = lengths

    def run(self, q, paged_kv_cache, *, k_scale=None, v_scale=None, out=None):
        CALLS.append(("run", {}))
        k_cache, v_cache = paged_kv_cache
        types, window = self.options, window_of(self.options["window_left"])
        assert (types["q_data_type"], types["kv_data_type"]) == (q.dtype, k_cache.dtype)
        assert out.dtype == q.dtype
        return out.copy_(
            attend(q, k_cache, v_cache, self.table, self.lengths, self.query_lens,
                   self.options["sm_scale"], window, (k_scale or 1.0, v_scale or 1.0))
        )  # fmt: skip


class BatchPrefillWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, *, causal=False, **options,
    ):  # fmt: skip
        assert causal
        require_int32(qo_indptr)
        super().plan(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, **options,
        )  # fmt: skip
        self.query_lens = np.diff(qo_indptr)


class BatchMLAPagedAttentionWrapper(Wrapper):
    def plan(
        self, *, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv,
        head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert causal and (head_dim_ckv, head_dim_kpe) == (512, 64)
        require_int32(qo_indptr)
        self.planned(kv_indptr, kv_indices, [kv_len_arr], np.diff(qo_indptr), {})
        self.lengths, self.scale = kv_len_arr.numpy(), sm_scale

    def run(self, *, q_nope, q_pe, ckv_cache, kpe_cache, out):
        CALLS.append(("run", {}))
        keys = torch.cat((ckv_cache, kpe_cache), -1)[:, :, None]
        return out.copy_(
            attend(torch.cat((q_nope, q_pe), -1), keys, ckv_cache[:, :, None], self.table,
                   self.lengths, self.query_lens, self.scale, None)
        )  # fmt: skip


# --- FlashAttention -------------------------------------------------------------------------------


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal, window_size
):
    """Of FlashAttention 2: queries (B, T, Hq, D)."""
    CALLS.append(("flash_attn_with_kvcache", {}))
    assert causal and k_cache.shape[1] % 256 == 0 and window_size[1] in (-1, 0)
    require_int32(cache_seqlens, block_table)
    query_lens = np.full(len(q), q.shape[1])
    return attend(q.flatten(0, 1), k_cache, v_cache, block_table, cache_seqlens, query_lens,
                  softmax_scale, window_of(window_size[0])).view_as(q)  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal,
    window_size, block_table,
):  # fmt: skip
    """Of FlashAttention 2."""
    CALLS.append(("flash_attn_varlen_func", {}))
    assert causal and k.shape[1] % 256 == 0 and window_size[1] in (-1, 0)
    require_int32(cu_seqlens_q, cu_seqlens_k, block_table)
    query_lens, lengths = np.diff(cu_seqlens_q), np.diff(cu_seqlens_k)
    assert (max_seqlen_q, max_seqlen_k) == (max(query_lens), max(lengths))
    return attend(q, k, v, block_table, lengths, query_lens, softmax_scale,
                  window_of(window_size[0]))  # fmt: skip


def _flash_attn_3_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q=None, max_seqlen_q=None,
    softmax_scale, causal, window_size,
):  # fmt: skip
    """Of FlashAttention 3: queries (B, T, Hq, D), or (T, Hq, D) with cu_seqlens_q."""
    CALLS.append(("flash_attn_with_kvcache", {}))
    assert causal and window_size[1] in (-1, 0)
    require_int32(cache_seqlens, page_table)
    if cu_seqlens_q is None:
        rows, query_lens = q.flatten(0, 1), np.full(len(q), q.shape[1])
    else:
        require_int32(cu_seqlens_q)
        rows, query_lens = q, np.diff(cu_seqlens_q)
        assert max_seqlen_q == max(query_lens)
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
