"""Baselines: torch and other projects' kernels, over the same memory.

A case lends its arrays out through a `Wrap`. Projects that are not installed, or refuse a case, are
reported as not measured (`measure.py`); none is a requirement.

Sources: flashinfer-ai/flashinfer `flashinfer/page.py`, `decode.py`, `prefill.py`, `mla.py`;
vllm-project/vllm `vllm/v1/attention/backends/cpu_attn.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
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


def without_stream(bound: Callable[[], Any], stream: Any) -> Any:
    """Call torch, or what runs on torch's current stream."""
    return bound()


# --- Rotations ------------------------------------------------------------------------------------


def rotation(torch: Any, table: Any, interleaved: bool) -> Callable[[Any], Any]:
    """Return the rotation of bf16 tensors by rows `[cos | sin]` (T, D), as transformers does it.

    The cos and sin of the tokens were looked up beforehand, as a model does once for all layers.
    """
    half = table.shape[1] // 2
    cosine, sine = table[:, :half].bfloat16(), table[:, half:].bfloat16()
    if not interleaved:
        cosine, sine = torch.cat((cosine, cosine), dim=-1), torch.cat((sine, sine), dim=-1)

    def rotate(x: Any) -> Any:
        cos, sin = (cosine, sine) if x.ndim == 2 else (cosine[:, None], sine[:, None])
        if interleaved:
            first, second = x[..., 0::2], x[..., 1::2]
            pairs = first * cos - second * sin, second * cos + first * sin
            return torch.stack(pairs, dim=-1).flatten(-2)
        first, second = x[..., :half], x[..., half:]
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return rotate


# --- Stores of other projects ---------------------------------------------------------------------

Store = Callable[[Any, Any, Any], Any]  # key, value and slots; returns where they are, if elsewhere


def flashinfer_store(torch: Any, caches: list[Any]) -> Store:
    """Return FlashInfer's append to bf16 caches (slots, H, D).

    All pages belong to one request, in order, so that positions are slots.
    """
    page_size = 16
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


def vllm_cpu_store(torch: Any, caches: list[Any]) -> Store:
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


# --- Attention of other projects ------------------------------------------------------------------


Sets = list[tuple[Any, Any]]
"""Of each set the query (T, Hq, D), and the page table int32 (B, pages of a sequence)."""


def flashinfer_attention(
    torch: Any, sets: Sets, caches: list[Any], context: int, window: int
) -> Iterator[Callable[[], Any]]:
    """Yield FlashInfer's decode or causal prefill, planned, for each set."""
    page_size, heads, width = caches[0].shape[1:]
    for query, table in sets:
        indptr, last = _flashinfer_pages(torch, table, context, page_size)
        q_heads, new = query.shape[1], len(query) // len(table)
        starts: tuple[Any, ...] = ()
        options: dict[str, Any] = {
            "window_left": window - 1, "q_data_type": query.dtype, "kv_data_type": caches[0].dtype
        }  # fmt: skip
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=query.device)
        if new == 1:
            decode = importlib.import_module("flashinfer.decode").BatchDecodeWithPagedKVCacheWrapper
            planned = decode(workspace, "NHD", use_tensor_cores=q_heads >= 4 * heads)
        else:
            module = importlib.import_module("flashinfer.prefill")
            backend = _flashinfer_backend(torch, query)
            planned = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
            starts = (new * torch.arange(len(indptr), dtype=torch.int32, device=query.device),)
            options["causal"] = True
        planned.plan(
            *starts, indptr, table.flatten(), last, q_heads, heads, width, page_size, **options
        )
        yield partial(planned.run, query, tuple(caches))


def flashinfer_mla(
    torch: Any, sets: Sets, caches: list[Any], context: int, sm_scale: float
) -> Iterator[Callable[[], Any]]:
    """Yield FlashInfer's attention over latents, planned; `caches` are whole rows and latents."""
    wrapper = importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
    page_size, latent = caches[0].shape[1], caches[1].shape[-1]
    parts = {"ckv_cache": caches[1][:, :, 0], "kpe_cache": caches[0][:, :, 0, latent:]}
    for query, table in sets:
        indptr, _ = _flashinfer_pages(torch, table, context, page_size)
        batch = len(table)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        starts *= len(query) // batch
        lengths = torch.full((batch,), context, dtype=torch.int32, device=query.device)
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=query.device)
        planned = wrapper(workspace, backend=_flashinfer_backend(torch, query))
        planned.plan(
            qo_indptr=starts, kv_indptr=indptr, kv_indices=table.flatten(), kv_len_arr=lengths,
            num_heads=query.shape[1], head_dim_ckv=latent, head_dim_kpe=query.shape[2] - latent,
            page_size=page_size, causal=True, sm_scale=sm_scale, q_data_type=query.dtype,
            kv_data_type=caches[0].dtype,
        )  # fmt: skip
        yield partial(planned.run, q_nope=query[..., :latent], q_pe=query[..., latent:], **parts)


def _flashinfer_pages(torch: Any, table: Any, context: int, page_size: int) -> tuple[Any, Any]:
    """Return indptr and the lengths of last pages of sequences of equal lengths."""
    batch, pages = table.shape
    indptr = pages * torch.arange(batch + 1, dtype=torch.int32, device=table.device)
    last = torch.full((batch,), (context - 1) % page_size + 1, dtype=torch.int32)
    return indptr, last.to(table.device)


def _flashinfer_backend(torch: Any, query: Any) -> str:
    """Return the backend with the instructions of Hopper there, else FlashInfer's choice."""
    if query.is_cuda and torch.cuda.get_device_capability(query.device)[0] == 9:
        return "fa3"
    return "auto"


def vllm_cpu_attention(
    torch: Any, sets: Sets, caches: list[Any], context: int, window: int
) -> Iterator[Callable[[], Any]]:
    """Yield vLLM's attention on a CPU, planned, over copies of the pages in its own layout."""
    pages, page_size, heads, width = caches[0].shape
    shape = pages, heads, page_size, width
    ops, isa, paged = _vllm_cpu_cache(torch, shape, caches[0].dtype)
    rows = [cache.flatten(0, 1) for cache in caches]
    ops.cpu_attn_reshape_and_cache(*rows, *paged, torch.arange(pages * page_size), isa)
    left = window or -1
    for query, table in sets:
        batch, out = len(table), torch.empty_like(query)
        starts = len(query) // batch * torch.arange(batch + 1, dtype=torch.int32)
        lengths = torch.full((batch,), context, dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=batch, num_heads=query.shape[1], num_kv_heads=heads, head_dim=width,
            seq_lens=lengths, dtype=query.dtype, query_start_loc=starts, causal=True,
            sliding_window_size=left, isa=isa, enable_kv_split=True,
        )  # fmt: skip

        def work(query: Any = query, out: Any = out, table: Any = table, plan: Any = plan,
                 starts: Any = starts, lengths: Any = lengths) -> Any:  # fmt: skip
            ops.cpu_attention_with_kv_cache(
                query, *paged, out, starts, lengths, width**-0.5, True, None, left, table, 0.0,
                plan, None,
            )  # fmt: skip
            return out

        yield work
