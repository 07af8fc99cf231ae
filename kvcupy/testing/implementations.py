"""Implementations that the conformance cases can run: kvcupy, torch, and other projects.

All have the signatures of kvcupy's operations. torch is composed as in systems without kernels for
it; other projects are called as `bench.baselines` calls them. Where one of them cannot
do something, it raises `NotSupported`, or has no such parameter.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import kvcupy as kv

from ..bench import baselines
from ..bench.rope import rotation_by_torch
from .arrays import Argument
from .cases import OPERATIONS

_PEERS = {
    "flashinfer": ("store_kv", "rope_store_kv", "paged_attention"),
    "vllm": ("store_kv", "store_mla", "rope_store_kv", "paged_attention"),
    "sglang": ("store_kv", "rope_store_kv"),
}
"""Other projects, and the operations that they have."""
NAMES = ("kvcupy", "torch", *_PEERS)


class NotSupported(Exception):
    """An implementation has no way to do what a case asks for; the message says why."""


@dataclass
class Implementation:
    """Functions with kvcupy's signatures, by the names of the operations.

    Attributes
    ----------
    name : of the implementation
    functions : by operation. Outputs are written in place, and what is returned is ignored
    wrap : makes the array that a function takes of an `Argument`
    lacks : reasons by key of `cases.FEATURES`; cases that need one are not run
    rounded_weights : whether its attention rounds softmax weights to the query's format in decode
        too, for tensor cores; prefill always may
    has_fault : whether an index past the end was recorded since it was asked last; None: indices
        are not recorded
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]
    wrap: Callable[[Argument], Any] = field(default=lambda argument: argument.array)
    lacks: Mapping[str, str] = field(default_factory=dict)
    rounded_weights: bool = False
    has_fault: Callable[[Any], bool | None] = field(default=lambda device: None)


def load(name: str, device: Any) -> Implementation:
    """Return an implementation for the arrays of a device.

    Parameters
    ----------
    name : of `NAMES`, or a module whose functions have the names of kvcupy's operations, and which
        may have `lacks` and `wrap` as an `Implementation` has
    device : `Device` that arrays lie on

    Raises
    ------
    ImportError : it is not installed, or has no such function

    Examples
    --------
    >>> sorted(load("kvcupy", kv.device("host")).functions)[:3]
    ['apply_rope', 'copy_pages', 'gather_kv']
    """
    if name == "kvcupy":
        own = {operation: getattr(kv, operation) for operation in OPERATIONS}
        return Implementation(name, own, has_fault=_fault_of_kvcupy)
    if name in NAMES:
        return _of_torch(name, device)
    module = importlib.import_module(name)
    functions = {each: getattr(module, each) for each in OPERATIONS if hasattr(module, each)}
    if not functions:
        raise ImportError(f"{name} has none of {', '.join(OPERATIONS)}")
    own_module = Implementation(name, functions, lacks=getattr(module, "lacks", {}))
    if hasattr(module, "wrap"):
        own_module.wrap = module.wrap
    return own_module


def _fault_of_kvcupy(device: Any) -> bool:
    try:
        kv.check_faults(device)
    except kv.IndexFault:
        return True
    return False


# torch ----------------------------------------------------------------------------------------


def _of_torch(name: str, device: Any) -> Implementation:
    arrays = baselines.TorchArrays(device)
    if arrays.torch is None:
        raise ImportError(f"torch: {arrays.missing}")

    def wrap(argument: Argument) -> Any:
        return torch_tensor(arrays.torch, argument)

    if name == "torch":
        composed = Composition(arrays.torch)
        functions = {operation: getattr(composed, operation) for operation in OPERATIONS}
        return Implementation(name, functions, wrap)
    try:
        importlib.import_module(name)
    except (RuntimeError, OSError) as error:  # libraries of another CUDA, say
        raise ImportError(f"{type(error).__name__}: {error}") from None
    peer = Peer(name, arrays.torch)
    functions = {operation: getattr(peer, operation) for operation in _PEERS[name]}
    return Implementation(name, functions, wrap, _PEERS_LACK, rounded_weights=True)


def torch_tensor(torch: Any, argument: Argument) -> Any:
    """Return a tensor over the memory of an argument, in its format."""
    bits = argument.raw_array
    signed = {"uint8": "uint8", "uint16": "int16", "uint32": "int32", "uint64": "int64"}
    tensor = torch.from_dlpack(bits.view(signed[bits.dtype.name]))
    dtypes = {
        "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8,
        "bool": torch.bool, "int32": torch.int32, "int64": torch.int64,
    }  # fmt: skip
    return tensor.view(dtypes[argument.fmt])


class Composition:
    """Each operation as torch calls, as models and servers without kernels for it have it."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self._limits = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}

    def _encode(self, rows: Any, dtype: Any, scale: Any) -> Any:
        if rows.dtype == dtype:
            return rows
        if dtype not in self._limits:
            return rows.to(dtype)
        limit, values = self._limits[dtype], rows.float() / _by_head(scale)
        values = values.round() if dtype == self.torch.int8 else values
        return values.clamp(-limit, limit).to(dtype)

    def _pages(self, cache: Any, layout: str) -> Any:
        """Return pages, offsets, heads; of fp8, which torch does not index, as bytes."""
        bits = cache.view(self.torch.uint8) if cache.dtype.itemsize == 1 else cache
        return bits.transpose(1, 2) if layout == "HND" else bits

    def _write(self, rows: Any, cache: Any, slots: Any, layout: str, scale: Any) -> None:
        pages = self._pages(cache, layout)
        size = pages.shape[1]
        pages[slots // size, slots % size] = self._encode(rows, cache.dtype, scale).view(
            pages.dtype
        )

    def store_kv(self, key: Any, value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, *,
                 layout: str = "NHD", k_scale: Any = None, v_scale: Any = None,
                 ) -> None:  # fmt: skip
        """Assign to `cache[page, offset]`."""
        count = len(slot_mapping)
        self._write(key[:count], k_cache, slot_mapping, layout, k_scale)
        self._write(value[:count], v_cache, slot_mapping, layout, v_scale)

    def store_mla(self, latent: Any, rope_key: Any, cache: Any, slot_mapping: Any, *,
                  scale: Any = None) -> None:  # fmt: skip
        """Assign both, side by side."""
        rows = self.torch.cat((latent, rope_key), dim=-1)
        paged = cache[:, None] if cache.ndim == 2 else cache
        self._write(rows, paged, slot_mapping, "NHD", scale)

    def gather_kv(self, k_cache: Any, v_cache: Any, slots: Any, *, k_out: Any, v_out: Any,
                  layout: str = "NHD", k_scale: Any = None, v_scale: Any = None,
                  ) -> None:  # fmt: skip
        """Index, and multiply by the scale."""
        for cache, out, scale in ((k_cache, k_out, k_scale), (v_cache, v_out, v_scale)):
            pages = self._pages(cache, layout)
            size = pages.shape[1]
            rows = pages[slots // size, slots % size].view(cache.dtype)
            out.copy_(rows if rows.dtype == out.dtype else rows.float() * _by_head(scale))

    def apply_rope(self, query: Any, key: Any, rope_table: Any, positions: Any, *,
                   interleaved: bool = False, query_out: Any = None, key_out: Any = None,
                   ) -> None:  # fmt: skip
        """Rotate bf16 as transformers does: in bf16, with a rounding per operation."""
        if key.dtype != self.torch.bfloat16:
            raise NotSupported("the composition rotates bf16 alone")
        width = rope_table.shape[1]
        rotate = rotation_by_torch(self.torch, rope_table[positions], interleaved, {})
        for name, rows, out in (("query", query, query_out), ("key", key, key_out)):
            rotated = rotate(rows[..., :width], name)
            target = rows if out is None else out
            target.copy_(self.torch.cat((rotated, rows[..., width:]), dim=-1))

    def rope_store_kv(self, query: Any, key: Any, value: Any, rope_table: Any, positions: Any,
                      k_cache: Any, v_cache: Any, slot_mapping: Any, *, interleaved: bool = False,
                      layout: str = "NHD", k_scale: Any = None, v_scale: Any = None,
                      ) -> None:  # fmt: skip
        """Rotate in place, then store."""
        self.apply_rope(query, key, rope_table, positions, interleaved=interleaved)
        self.store_kv(key, value, k_cache, v_cache, slot_mapping, layout=layout, k_scale=k_scale,
                      v_scale=v_scale)  # fmt: skip

    def paged_attention(
        self, query: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, *, out: Any,
        query_lens: Any = None, layout: str = "NHD", sm_scale: float | None = None,
        causal: bool = True, window: int | None = None, sink_tokens: int | None = None,
        sinks: Any = None, logits_soft_cap: float | None = None, tree_mask: Any = None,
        k_scale: Any = None, v_scale: Any = None, lse_out: Any = None,
    ) -> None:  # fmt: skip
        """Gather the pages of each sequence, then softmax in float32."""
        start = 0
        counts = [1] * len(seq_lens) if query_lens is None else query_lens.tolist()
        for table, length, count in zip(block_table, seq_lens.tolist(), counts, strict=True):
            rows = slice(start, start + count)
            keys, values = (
                self._gathered(cache, table, length, layout, scale)
                for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
            )
            group = query.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
            scaling = query.shape[2] ** -0.5 if sm_scale is None else sm_scale
            scores = self.torch.einsum("qhd,khd->qhk", query[rows].float(), keys) * scaling
            if logits_soft_cap is not None:
                scores = logits_soft_cap * self.torch.tanh(scores / logits_soft_cap)
            visible = self._visible(length, count, causal, window, sink_tokens, query.device)
            if tree_mask is not None:
                visible = self.torch.ones_like(visible)
                visible[:, length - count :] = tree_mask[rows, :count]
            scores = scores.masked_fill(~visible[:, None], float("-inf"))
            if sinks is not None:
                extra = sinks.expand(count, -1)[..., None]
                weights = self.torch.cat((scores, extra), dim=-1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            out[rows] = self.torch.einsum("qhk,khd->qhd", weights, values).to(out.dtype)
            if lse_out is not None:
                lse_out[rows] = scores.logsumexp(-1)
            start += count

    def _gathered(self, cache: Any, table: Any, length: int, layout: str, scale: Any) -> Any:
        pages = self._pages(cache, layout)
        used = table[: -(-length // pages.shape[1])]
        rows = pages[used].flatten(0, 1)[:length].view(cache.dtype).float()
        return rows * _by_head(scale)

    def _visible(self, length: int, count: int, causal: bool, window: int | None,
                 sink_tokens: int | None, device: Any) -> Any:  # fmt: skip
        keys = self.torch.arange(length, device=device)[None]
        ends = self.torch.arange(length - count, length, device=device)[:, None]
        visible = keys <= ends if causal else self.torch.ones_like(keys <= ends)
        if window is not None:
            visible = visible & ((keys > ends - window) | (keys < (sink_tokens or 0)))
        return visible

    def merge_states(self, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any,
                     lse_out: Any, lse_base: str = "e") -> None:  # fmt: skip
        """Weigh by `exp(lse - logaddexp)`."""
        exp, logaddexp = self.torch.exp, self.torch.logaddexp
        if lse_base == "2":
            exp, logaddexp = self.torch.exp2, self.torch.logaddexp2
        total = logaddexp(lse_a, lse_b)
        states = (lse_a, out_a), (lse_b, out_b)
        out.copy_(sum(exp(lse - total)[..., None] * own.float() for lse, own in states))
        lse_out.copy_(total)

    def copy_pages(self, cache: Any, src_pages: Any, dst_pages: Any) -> None:
        """Assign `cache[dst] = cache[src]`."""
        for each in cache if isinstance(cache, tuple) else (cache,):
            each[dst_pages] = each[src_pages]

    def shift_pages(self, pool: Any, pages: Any, delta: Any, rope_table: Any, *,
                    out_pages: Any = None, interleaved: bool = False) -> None:  # fmt: skip
        """Rotate as `apply_rope`, by the table's rows of the deltas without their factor."""
        if pool.dtype != self.torch.bfloat16:
            raise NotSupported("the composition rotates bf16 alone")
        width = rope_table.shape[1]
        deltas = self.torch.as_tensor(delta, device=pool.device).expand(len(pages))
        angles = rope_table[deltas.abs()] / rope_table[0, : width // 2].repeat(2)
        angles[:, width // 2 :] *= deltas.sign()[:, None]
        start = pool.shape[-1] - width if pool.ndim == 3 else 0
        rows = pool[pages].flatten(1, -2)
        rotate = rotation_by_torch(self.torch, angles, interleaved, {})
        rows[..., start : start + width] = rotate(rows[..., start : start + width], "pool")
        pool[pages if out_pages is None else out_pages] = rows.view(len(pages), *pool.shape[1:])

    def store_state(self, states: Any, caches: Any, slots: Any) -> None:
        """Assign `cache[slots] = rows`."""
        for rows, cache in zip(_as_tuple(states), _as_tuple(caches), strict=True):
            cache[slots] = rows

    def gather_state(self, caches: Any, slots: Any, *, out: Any) -> None:
        """Index."""
        for cache, rows in zip(_as_tuple(caches), _as_tuple(out), strict=True):
            rows.copy_(cache[slots])

    def update_conv_state(self, x: Any, cache: Any, slots: Any, cu_query_lens: Any) -> None:
        """Append the tokens of each sequence to its row, and keep the last ones."""
        sums = cu_query_lens.tolist()
        for slot, start, end in zip(slots.tolist(), sums, sums[1:], strict=False):
            inputs = self.torch.cat((cache[slot], x[start:end].T), dim=1)
            cache[slot] = inputs[:, end - start :]

    def slot_mapping(self, block_table: Any, seq_lens: Any, append_lens: Any, page_size: int, *,
                     out: Any) -> None:  # fmt: skip
        """Repeat sequences by their appended tokens, and index the table."""
        arange = self.torch.arange
        counts = append_lens.long()
        rows = self.torch.repeat_interleave(arange(len(counts), device=out.device), counts)
        first = (counts.cumsum(0) - counts)[rows]
        tokens = (seq_lens - append_lens)[rows] + arange(len(rows), device=out.device) - first
        out.copy_(block_table[rows, tokens // page_size] * page_size + tokens % page_size)


def _by_head(scale: Any) -> Any:
    """Return a scale as a factor of rows, (..., heads, width)."""
    if scale is None:
        return 1.0
    return scale[:, None] if hasattr(scale, "numel") else scale


def _as_tuple(arrays: Any) -> tuple[Any, ...]:
    return arrays if isinstance(arrays, tuple) else (arrays,)


# Other projects -------------------------------------------------------------------------------

_PEERS_LACK = {
    "past the end": "an index past the end is undefined for it",
    "poison": "it may read what the tables do not reach",
}


class Peer:
    """One project's kernels of `bench.baselines`, under kvcupy's signatures."""

    def __init__(self, name: str, torch: Any) -> None:
        self.name, self.torch = name, torch

    def _flat(self, cache: Any, rows: Any) -> Any:
        """Return a paged cache as (slots, ...), where a project takes it."""
        if not cache.is_contiguous() or cache.dtype != rows.dtype:
            raise NotSupported("called here with contiguous caches of the rows' own format")
        return cache.flatten(0, 1) if cache.ndim > 2 else cache

    def _stored(self, key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any) -> list[Any]:
        """Return both caches as (slots, H, D), after a look at what the project takes."""
        if k_cache.shape != v_cache.shape:
            raise NotSupported("K and V have one width")
        if key.dtype not in (self.torch.bfloat16, self.torch.float16):
            raise NotSupported("called here with fp16 and bf16")
        if len(key) != len(slots) or not key.is_contiguous():
            raise NotSupported("called here with a contiguous row per slot")
        if self.name != "vllm" and bool((slots < 0).any()):
            raise NotSupported("negative slots are undefined for it")
        return [self._flat(cache, rows) for cache, rows in ((k_cache, key), (v_cache, value))]

    def store_kv(self, key: Any, value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
        """Store with the project's own kernel."""
        caches = self._stored(key, value, k_cache, v_cache, slot_mapping)
        if len(slot_mapping):
            store = baselines.STORES[self.name](self.torch, caches, k_cache.shape[1])
            store(key, value, slot_mapping.long())

    def store_mla(self, latent: Any, rope_key: Any, cache: Any, slot_mapping: Any) -> None:
        """Store with vLLM's kernel."""
        if cache.ndim != 3:
            raise NotSupported("the cache is paged")
        store = baselines.vllm_store_mla(self.torch, [self._flat(cache, latent)], cache.shape[1])
        store(latent, rope_key, slot_mapping)

    def rope_store_kv(
        self, query: Any, key: Any, value: Any, rope_table: Any, positions: Any, k_cache: Any,
        v_cache: Any, slot_mapping: Any,
    ) -> None:  # fmt: skip
        """Rotate and store as the project does, in one launch or two."""
        if rope_table.shape[1] != key.shape[2] or key.dtype != self.torch.bfloat16:
            raise NotSupported("called here with bf16 heads that are rotated whole")
        caches = self._stored(key, value, k_cache, v_cache, slot_mapping)
        make = baselines.ROPE_STORES[self.name]
        work = make(self.torch, caches, k_cache.shape[1], rope_table)
        work(query, key, value, positions, slot_mapping)

    def paged_attention(
        self, query: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, *, out: Any,
        query_lens: Any = None, window: int | None = None,
    ) -> None:  # fmt: skip
        """Attend over sequences of one length, as the benchmarks do."""
        lengths = set(seq_lens.tolist())
        counts = {1} if query_lens is None else set(query_lens.tolist())
        (context, new) = (max(lengths), max(counts))
        if len(lengths) > 1 or len(counts) > 1 or context % k_cache.shape[1]:
            raise NotSupported("called here with sequences of one length, in whole pages")
        if query.dtype != self.torch.bfloat16 or k_cache.shape != v_cache.shape:
            raise NotSupported("called here with bf16, K and V of one width")
        if new > 1 and self.name == "flashinfer":
            raise NotSupported("called here for decode")
        attend = {
            "vllm": baselines.vllm_attention, "flashinfer": baselines.flashinfer_attention
        }[self.name]  # fmt: skip
        (call,) = attend(
            self.torch, query[None], [k_cache, v_cache], block_table[None], context, window or 0
        )
        out.copy_(call())
