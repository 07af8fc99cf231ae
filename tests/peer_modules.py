"""Stand-ins for the projects that kvcupy is compared with: their signatures, computed by torch.

A benchmark's arguments are checked by the results that they leave.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch


def attend(query, keys, values, window, scale):
    """Attend with the last rows of a sequence, (new, Hq, D), over its keys (context, H, D)."""
    new, context = len(query), len(keys)
    ends = torch.arange(context - new, context, device=query.device)[:, None]
    at = torch.arange(context, device=query.device)[None]
    mask = (at <= ends) & (at > ends - (window or context))
    parts = (x.transpose(0, 1)[None] for x in (query, keys, values))
    attention = torch.nn.functional.scaled_dot_product_attention
    out = attention(*parts, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


# flashinfer


def append_paged_kv_cache(key, value, batch_indices, positions, paged, indices, indptr, last):
    assert batch_indices.dtype == positions.dtype == indices.dtype == indptr.dtype == torch.int32
    size = paged[0].shape[1]
    pages = indices[indptr[batch_indices] + positions // size]
    assert (last >= 1).all() and (last <= size).all()
    for cache, rows in zip(paged, (key, value), strict=True):
        cache[pages, positions % size] = rows


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, workspace, kv_layout, use_tensor_cores=False):
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(self, indptr, indices, last, q_heads, kv_heads, width, page_size, *, window_left,
             q_data_type, kv_data_type):  # fmt: skip
        self.indptr, self.indices, self.last = indptr, indices, last
        self.window, self.page_size = window_left + 1, page_size

    def run(self, query, caches):
        return self.attend(query[:, None], caches)

    def attend(self, queries, caches):
        outs = []
        for i, rows in enumerate(queries):
            pages = self.indices[self.indptr[i] : self.indptr[i + 1]]
            length = (len(pages) - 1) * self.page_size + self.last[i]
            keys, values = (cache[pages].flatten(0, 1)[:length] for cache in caches)
            outs.append(attend(rows, keys, values, self.window, None))
        return torch.cat(outs)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, workspace, kv_layout, *, backend):
        assert workspace.dtype == torch.uint8 and (kv_layout, backend) == ("NHD", "auto")

    def plan(self, starts, indptr, indices, last, q_heads, kv_heads, width, page_size, *, causal,
             window_left, q_data_type, kv_data_type):  # fmt: skip
        assert causal
        workspace = torch.empty(0, dtype=torch.uint8)
        self.starts, self.decode = starts, BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        self.decode.plan(
            indptr, indices, last, q_heads, kv_heads, width, page_size, window_left=window_left,
            q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip

    def run(self, query, caches):
        pairs = zip(self.starts[:-1], self.starts[1:], strict=True)
        return self.decode.attend([query[a:b] for a, b in pairs], caches)


class BatchMLAPagedAttentionWrapper:
    def __init__(self, workspace, *, backend):
        assert workspace.dtype == torch.uint8 and backend == "auto"

    def plan(self, *, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv,
             head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type):  # fmt: skip
        assert causal
        self.starts, self.indptr, self.indices = qo_indptr, kv_indptr, kv_indices
        self.lengths, self.scale = kv_len_arr, sm_scale

    def run(self, *, q_nope, q_pe, ckv_cache, kpe_cache):
        outs = []
        for i, length in enumerate(self.lengths):
            pages = self.indices[self.indptr[i] : self.indptr[i + 1]]
            latent, rope = (c[pages].flatten(0, 1)[:length, None] for c in (ckv_cache, kpe_cache))
            rows = slice(self.starts[i], self.starts[i + 1])
            query, keys = torch.cat((q_nope, q_pe), -1)[rows], torch.cat((latent, rope), -1)
            outs.append(attend(query, keys, latent, 0, self.scale))
        return torch.cat(outs)


# vllm on a CPU: pages are (H, N, D), K transposed.


def _get_attn_isa(dtype, block_size, head_size, kv_cache_dtype):
    assert kv_cache_dtype == "auto" and dtype.is_floating_point
    return "vec"


def _keys(k_cache):
    pages, heads, size, width = k_cache.shape
    return k_cache.view(pages, heads, width, size).permute(0, 3, 1, 2)


def cpu_attn_reshape_and_cache(key, value, k_cache, v_cache, slots, isa):
    assert isa == "vec"
    size = k_cache.shape[2]
    for cache, rows in ((_keys(k_cache), key), (v_cache.transpose(1, 2), value)):
        cache[slots // size, slots % size] = rows


def cpu_attn_get_scheduler_metadata(
    *, num_reqs, num_heads, num_kv_heads, head_dim, seq_lens, dtype, query_start_loc, causal,
    sliding_window_size, isa, enable_kv_split,
):  # fmt: skip
    assert len(seq_lens) == len(query_start_loc) - 1 == num_reqs and causal and isa == "vec"
    return sliding_window_size


def cpu_attention_with_kv_cache(
    query, k_cache, v_cache, out, starts, lens, scale, causal, alibi, window, table, cap, plan,
    sinks,
):  # fmt: skip
    assert causal and plan == window and cap == 0 and alibi is sinks is None
    for number, row in enumerate(table.long()):
        own = slice(int(starts[number]), int(starts[number + 1]))
        caches = (_keys(k_cache), v_cache.transpose(1, 2))
        keys, values = (cache[row].flatten(0, 1)[: lens[number]] for cache in caches)
        out[own] = attend(query[own], keys, values, max(window, 0), scale)


MODULES = {
    "flashinfer.page": (append_paged_kv_cache,),
    "flashinfer.decode": (BatchDecodeWithPagedKVCacheWrapper,),
    "flashinfer.prefill": (BatchPrefillWithPagedKVCacheWrapper,),
    "flashinfer.mla": (BatchMLAPagedAttentionWrapper,),
    "vllm.v1.attention.backends.cpu_attn": (_get_attn_isa,),
    "vllm._custom_ops": (
        cpu_attn_reshape_and_cache, cpu_attn_get_scheduler_metadata, cpu_attention_with_kv_cache,
    ),
}  # fmt: skip


def install(monkeypatch, replaced=None):
    """Let the projects be imported; `replaced` are functions of other behaviour, by name."""
    for path, functions in MODULES.items():
        names = path.split(".")
        for i in range(1, len(names)):
            package = ".".join(names[:i])
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        module = ModuleType(path)
        for function in functions:
            name = function.__name__
            setattr(module, name, (replaced or {}).get(name, function))
        monkeypatch.setitem(sys.modules, path, module)
