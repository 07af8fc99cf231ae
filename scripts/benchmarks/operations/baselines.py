"""Baselines: torch and other projects' kernels, over the same memory.

A case lends its arrays out through a `Wrap`. Projects that are not installed, or refuse a case, are
reported as not measured (`candidates.py`); none is a requirement.

Sources: flashinfer-ai/flashinfer `flashinfer/page.py`, `decode.py`, `prefill.py`, `mla.py`;
sgl-project/sglang `python/sglang/jit_kernel/kvcache.py`; vllm-project/vllm
`vllm/v1/attention/backends/cpu_attn.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from common.timers import Call

from kvcupy.arrays import view_as
from kvcupy.formats import numpy_dtype

Wrap = Callable[[Any, str], Any]  # an array of bits, in the dtype of a format
Builder = Callable[[], list[Call]]


class NotMeasured(Exception):
    """A baseline has no way to do what a case does; the message says why."""


# --- Arrays ---------------------------------------------------------------------------------------


class TorchArrays:
    """Torch tensors over a device's arrays, where torch is installed and can reach them.

    Attributes
    ----------
    torch : the module, None where it cannot be used
    missing : why not
    """

    def __init__(self, device: Any) -> None:
        self.torch: Any = None
        self.missing = ""
        try:
            import torch

            self.torch = torch
            self.wrap(device.zeros((2,), np.uint16), "bf16")
        except (ImportError, RuntimeError, BufferError, AssertionError) as error:
            self.torch, self.missing = None, f"{type(error).__name__}: {error}"

    def wrap(self, array: Any, fmt: str) -> Any:
        """Return a tensor over the same memory, in a format, or as plain integers for "bits"."""
        torch = self.torch
        signed = {1: np.uint8, 2: np.int16}.get(array.dtype.itemsize, array.dtype)
        tensor = torch.from_dlpack(array.view(signed))
        dtypes = {
            "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8,
            "fp16": torch.float16, "fp32": torch.float32,
        }  # fmt: skip
        return tensor.view(dtypes[fmt]) if fmt in dtypes else tensor


def own_arrays(array: Any, fmt: str) -> Any:
    """Return the array in the dtype of a format, tagged where its library has none."""
    try:
        return array.view(numpy_dtype(fmt))
    except (TypeError, ValueError):
        return view_as(array, fmt)


def upload(device: Any, array: np.ndarray[Any, Any]) -> Any:
    """Return a copy of an array on a device, in memory of the device's own alignment."""
    copy = device.empty(array.shape, array.dtype)
    device.copy(copy, device.asarray(array))
    return copy


# --- Calls ----------------------------------------------------------------------------------------


def on_stream(bound: Callable[..., Any], stream: Any) -> Any:
    """Call one of kvcupy's operations."""
    return bound(stream=stream)


def ignoring_stream(bound: Callable[[], Any], stream: Any) -> Any:
    """Call torch, or what runs on torch's current stream."""
    return bound()


# --- Stores of other projects ---------------------------------------------------------------------

Store = Callable[[Any, Any, Any], Any]  # key, value and slots; returns where they are, if elsewhere


def flashinfer_store(torch: Any, caches: list[Any], page_size: int) -> Store:
    """Return FlashInfer's append to bf16 caches (slots, H, D).

    All pages belong to one request, in order, so that positions are slots.
    """
    append = importlib.import_module("flashinfer.page").append_paged_kv_cache
    paged = tuple(cache.view(-1, page_size, *cache.shape[1:]) for cache in caches)
    device, num_pages = caches[0].device, len(paged[0])
    numbers = partial(torch.tensor, dtype=torch.int32, device=device)
    pages, indptr, last = numbers(range(num_pages)), numbers([0, num_pages]), numbers([page_size])
    known: dict[int, tuple[Any, Any]] = {}  # a step looks its positions up once for all layers

    def store(key: Any, value: Any, slots: Any) -> None:
        if slots.data_ptr() not in known:
            known[slots.data_ptr()] = torch.zeros_like(slots, dtype=torch.int32), slots.int()
        append(key, value, *known[slots.data_ptr()], paged, pages, indptr, last)

    return store


def sglang_store(torch: Any, caches: list[Any], page_size: int) -> Store:
    """Return the store of SGLang's JIT kernels to caches (slots, H, D), which drops slot 0."""
    store_cache = importlib.import_module("sglang.jit_kernel.kvcache").store_cache
    flat = [cache.flatten(1) for cache in caches]
    return lambda key, value, slots: store_cache(key.flatten(1), value.flatten(1), *flat, slots)


def vllm_cpu_store(torch: Any, caches: list[Any], page_size: int) -> Store:
    """Return vLLM's store on a CPU, into separate pages: K is transposed within a page.

    It returns views of K and V, (pages, page_size, H, D).
    """
    slots, heads, width = caches[0].shape
    pages = -(-slots // _VLLM_CPU_PAGE)
    ops, isa, paged = _vllm_cpu_cache(torch, (pages, heads, _VLLM_CPU_PAGE, width), caches[0].dtype)
    k = paged[0].view(pages, heads, width, _VLLM_CPU_PAGE).permute(0, 3, 1, 2)
    stored = [k, paged[1].transpose(1, 2)]

    def store(key: Any, value: Any, slots: Any) -> Any:
        ops.cpu_attn_reshape_and_cache(key, value, *paged, slots, isa)
        return stored

    return store


_VLLM_CPU_PAGE = 32


def _vllm_cpu_cache(torch: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, str, list[Any]]:
    """Return vLLM's operations, its instruction set, and caches of K and V: (pages, H, N, D)."""
    backend = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
    pages, heads, page_size, width = shape
    cache = torch.zeros(pages, heads, 2 * page_size, width, dtype=dtype)
    isa = backend._get_attn_isa(dtype, page_size, width, "auto")
    return importlib.import_module("vllm._custom_ops"), isa, list(cache.chunk(2, dim=2))


STORES: dict[str, Callable[[Any, list[Any], int], Store]] = {
    "flashinfer": flashinfer_store, "sglang": sglang_store,
}  # fmt: skip
"""Of bf16 K and V."""


# --- Attention of other projects ------------------------------------------------------------------


def flashinfer_attention(
    torch: Any, query: Any, caches: list[Any], tables: Any, context: int, window: int
) -> list[Callable[[], Any]]:
    """Return FlashInfer's decode or causal prefill, planned: a call for each of the page tables.

    Parameters
    ----------
    query : (sets, T, Hq, D), of sequences that have equally many new tokens
    caches : (pages, page_size, H, D)
    tables : int32 (sets, B, pages of a sequence)
    """
    page_size, heads, width = caches[0].shape[1:]
    indptr, last = _flashinfer_pages(torch, tables, context, page_size)
    q_heads, new = query.shape[2], query.shape[1] // tables.shape[1]
    starts: tuple[Any, ...] = ()
    options: dict[str, Any] = {
        "window_left": window - 1, "q_data_type": query.dtype, "kv_data_type": caches[0].dtype
    }  # fmt: skip
    if new == 1:
        wrapper = importlib.import_module("flashinfer.decode").BatchDecodeWithPagedKVCacheWrapper
        make = partial(wrapper, use_tensor_cores=q_heads >= 4 * heads)
    else:
        wrapper = importlib.import_module("flashinfer.prefill").BatchPrefillWithPagedKVCacheWrapper
        make = partial(wrapper, backend=_flashinfer_backend(torch, query))
        starts = (new * torch.arange(len(indptr), dtype=torch.int32, device=query.device),)
        options["causal"] = True
    calls: list[Callable[[], Any]] = []
    for rows, table in zip(query, tables, strict=True):
        planned = make(_flashinfer_workspace(torch, query), "NHD")
        planned.plan(
            *starts, indptr, table.flatten(), last, q_heads, heads, width, page_size, **options
        )
        calls.append(partial(planned.run, rows, tuple(caches)))
    return calls


def flashinfer_mla(
    torch: Any, query: Any, caches: list[Any], tables: Any, context: int, sm_scale: float
) -> list[Callable[[], Any]]:
    """Return FlashInfer's attention over latents, planned; `caches` are whole rows and latents."""
    wrapper = importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
    page_size, latent = caches[0].shape[1], caches[1].shape[-1]
    indptr, _ = _flashinfer_pages(torch, tables, context, page_size)
    batch = len(indptr) - 1
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    starts *= query.shape[1] // batch
    lengths = torch.full((batch,), context, dtype=torch.int32, device=query.device)
    parts = {"ckv_cache": caches[1][:, :, 0], "kpe_cache": caches[0][:, :, 0, latent:]}
    calls: list[Callable[[], Any]] = []
    for rows, table in zip(query, tables, strict=True):
        planned = wrapper(
            _flashinfer_workspace(torch, query), backend=_flashinfer_backend(torch, query)
        )
        planned.plan(
            qo_indptr=starts, kv_indptr=indptr, kv_indices=table.flatten(), kv_len_arr=lengths,
            num_heads=rows.shape[1], head_dim_ckv=latent, head_dim_kpe=rows.shape[2] - latent,
            page_size=page_size, causal=True, sm_scale=sm_scale, q_data_type=rows.dtype,
            kv_data_type=caches[0].dtype,
        )  # fmt: skip
        query_parts = {"q_nope": rows[..., :latent], "q_pe": rows[..., latent:]}
        calls.append(partial(planned.run, **query_parts, **parts))
    return calls


def _flashinfer_pages(torch: Any, tables: Any, context: int, page_size: int) -> tuple[Any, Any]:
    """Return indptr and the lengths of last pages of sequences of equal lengths."""
    batch, pages = tables.shape[1:]
    indptr = pages * torch.arange(batch + 1, dtype=torch.int32, device=tables.device)
    last = torch.full((batch,), (context - 1) % page_size + 1, dtype=torch.int32)
    return indptr, last.to(tables.device)


def _flashinfer_workspace(torch: Any, query: Any) -> Any:
    return torch.empty(128 << 20, dtype=torch.uint8, device=query.device)


def _flashinfer_backend(torch: Any, query: Any) -> str:
    """Return the backend with the instructions of Hopper there, else FlashInfer's choice."""
    if query.is_cuda and torch.cuda.get_device_capability(query.device)[0] == 9:
        return "fa3"
    return "auto"


def vllm_cpu_attention(
    torch: Any, query: Any, caches: list[Any], tables: Any, context: int, window: int
) -> list[Callable[[], Any]]:
    """Return vLLM's attention on a CPU, planned, over copies of the pages in its own layout."""
    pages, page_size, heads, width = caches[0].shape
    shape = pages, heads, page_size, width
    ops, isa, paged = _vllm_cpu_cache(torch, shape, caches[0].dtype)
    rows = [cache.flatten(0, 1) for cache in caches]
    ops.cpu_attn_reshape_and_cache(*rows, *paged, torch.arange(pages * page_size), isa)
    batch, new = tables.shape[1], query.shape[1] // tables.shape[1]
    starts = new * torch.arange(batch + 1, dtype=torch.int32)
    lengths = torch.full((batch,), context, dtype=torch.int32)
    left = window or -1
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch, num_heads=query.shape[2], num_kv_heads=heads, head_dim=width,
        seq_lens=lengths, dtype=query.dtype, query_start_loc=starts, causal=True,
        sliding_window_size=left, isa=isa, enable_kv_split=True,
    )  # fmt: skip

    def work(rows: Any, out: Any, table: Any) -> Any:
        ops.cpu_attention_with_kv_cache(
            rows, *paged, out, starts, lengths, width**-0.5, True, None, left, table, 0.0, plan,
            None,
        )  # fmt: skip
        return out

    outs = torch.empty_like(query)
    return [partial(work, *each) for each in zip(query, outs, tables, strict=True)]
