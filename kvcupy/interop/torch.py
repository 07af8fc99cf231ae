"""kvcupy's operations for torch: traced by `torch.compile` and `torch.export`, and in CUDA graphs.

The functions have the names, arguments and meaning of kvcupy's own, take torch tensors alone, and
call operators `torch.ops.kvcupy.*` (`torch_operators.TABLE`), whose schemas say what is written.

Formats: the tensors' dtypes, `torch.bfloat16` and `torch.float8_e4m3fn` say. A cache that is
`torch.uint8` goes with `format`, the name of what its bytes hold.

Streams: an operator runs on torch's current stream, as torch's own do; under `torch.compile` and in
`torch.cuda.graph` too. `stream=` takes any stream of kvcupy, CuPy or torch, where nothing is
traced. The tensors are then recorded on it (`Tensor.record_stream`), so that torch's allocator does
not hand their memory out before that stream is done. The stream is kept for as long as the process
lives, since the allocator uses it when a tensor is freed; one of kvcupy's serves again as a later
`device.stream()`.

Gradients: there is no backward. A tensor that requires one is refused, when it is traced or when
the operator runs, unless gradients are off.

Pools: `pool.torch_k(layer)` and `pool.torch_v(layer)` are tensors over a pool's memory, and
`kvcupy.KVPool.wrap` makes a pool over tensors. Take the tensors out of the pool before what is
traced: a graph knows tensors, not pools. For the same reason `transfer_pages`, `PagedKVCache`,
`TransferEngine` and `TieredCache` are no operators: they change what a graph has no notion of, page
lists, streams and transfers in flight. Call them between graphs. Calls that `kvcupy.bind` has
prepared are not traced either. Once this module is imported, compiled code traces kvcupy's own
functions of these names as these.

Examples
--------
>>> import torch
>>> cache = torch.zeros(2, 4, 16, 8, 64, dtype=torch.bfloat16)
>>> rows, slots = torch.ones(1, 8, 64, dtype=torch.bfloat16), torch.tensor([5])
>>> store_kv(rows, 2 * rows, cache[0], cache[1], slots)
>>> key, value = gather_kv(cache[0], cache[1], slots)
>>> float(key[0, 0, 0]), float(value[0, 0, 0])
(1.0, 2.0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

import kvcupy

from .. import devices, formats
from ..arrays import tensor_of, view
from ..ops.call import format_name
from ..ops.rope_table import rope_table as _rope_table
from .torch_operators import KERNELS, TABLE, merged, out_of_attention, rows_of_gather

__all__ = [
    "apply_rope",
    "as_tensor",
    "copy_pages",
    "find_duplicate_slots",
    "gather_kv",
    "merge_states",
    "page_table_csr",
    "paged_attention",
    "rope_store_kv",
    "rope_store_mla",
    "rope_table",
    "slot_mapping",
    "store_kv",
    "store_mla",
]

_ops = torch.ops.kvcupy

Stream = Any
Scale: TypeAlias = "Tensor | float | None"


# --- Stores and gathers ---------------------------------------------------------------------------


def store_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: str = "NHD",
    format: str | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    skip_slot: int | None = None,
    stream: Stream = None,
) -> None:
    """Write K and V rows into the slots of a cache, as `kvcupy.store_kv`.

    Parameters
    ----------
    format : of caches that are uint8, "fp8_e4m3" say; None: the dtype says it
    stream : None where the call is traced; see the module
    others : as in `kvcupy.store_kv`

    Raises
    ------
    TypeError, ValueError : an argument does not fit, or requires a gradient; nothing was written

    Notes
    -----
    Writes k_cache and v_cache, and the scale caches. Stream, Capture, Bytes, Source: as
    `kvcupy.store_kv`.

    Examples
    --------
    >>> cache = torch.zeros(2, 4, 16, 8, 64, dtype=torch.uint8)
    >>> rows = torch.ones(1, 8, 64, dtype=torch.bfloat16)
    >>> store_kv(rows, rows, cache[0], cache[1], torch.tensor([3]), format="fp8_e4m3", v_scale=0.5)
    >>> [float(each[0, 3, 0, 0]) for each in cache.view(torch.float8_e4m3fn)]
    [1.0, 2.0]
    """
    _call(
        _ops.store_kv.default, key, value, k_cache, v_cache, slot_mapping, layout, format,
        *_either(k_scale), *_either(v_scale), k_scale_cache, v_scale_cache, skip_slot,
        stream=stream,
    )  # fmt: skip


def store_mla(
    latent: Tensor,
    rope_key: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    format: str | None = None,
    scale: Scale = None,
    skip_slot: int | None = None,
    stream: Stream = None,
) -> None:
    """Write latent and rotated key of MLA side by side, as `kvcupy.store_mla`.

    Parameters
    ----------
    format, stream : as in `store_kv`
    others : as in `kvcupy.store_mla`

    Notes
    -----
    Writes cache. Errors: as `store_kv`. Stream, Capture, Bytes, Source: as `kvcupy.store_mla`.

    Examples
    --------
    >>> cache, latent, key = torch.zeros(16, 5), torch.ones(1, 4), torch.full((1, 1), 2.0)
    >>> store_mla(latent, key, cache, torch.tensor([7]))
    >>> cache[7].tolist()
    [1.0, 1.0, 1.0, 1.0, 2.0]
    """
    _call(
        _ops.store_mla.default, latent, rope_key, cache, slot_mapping, format, *_either(scale),
        skip_slot, stream=stream,
    )  # fmt: skip


def gather_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    layout: str = "NHD",
    format: str | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    k_out: Tensor | None = None,
    v_out: Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    stream: Stream = None,
) -> tuple[Tensor, Tensor]:
    """Read the K and V rows of slots, dequantised, as `kvcupy.gather_kv`.

    Parameters
    ----------
    format, stream : as in `store_kv`
    dtype : of the outputs that are allocated, a torch dtype or the name of a format
    others : as in `kvcupy.gather_kv`

    Returns
    -------
    (K, V) : k_out and v_out, or new tensors

    Notes
    -----
    Writes k_out and v_out. Errors: as `store_kv`. Stream, Capture, Bytes, Source: as
    `kvcupy.gather_kv`.

    Examples
    --------
    >>> cache = torch.arange(32.0).view(2, 4, 1, 4)
    >>> k, v = gather_kv(cache, -cache, torch.tensor([2, -1]))
    >>> k[:, 0, 0].tolist(), v[:, 0, 3].tolist()
    ([8.0, 0.0], [-11.0, 0.0])
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, formats.numpy_dtype(format_name(dtype)).name)
    if dtype is None and (k_out is None) != (v_out is None):
        dtype = (v_out if k_out is None else k_out).dtype  # type: ignore[union-attr]
    arguments = (
        k_cache, v_cache, slots, layout, format, *_either(k_scale), *_either(v_scale),
        k_scale_cache, v_scale_cache, dtype,
    )  # fmt: skip
    if k_out is None and v_out is None:
        k_out, v_out = _call(_ops.gather_kv.default, *arguments, stream=stream)
        return k_out, v_out
    if k_out is None or v_out is None:
        caches = {"k_cache": k_cache, "v_cache": v_cache}
        values = {**caches, "slots": slots, "layout": layout, "format": format, "dtype": dtype}
        rows = rows_of_gather(values)  # those of a skipped slot stay zero
        k_out, v_out = (
            new.zero_() if out is None else out
            for out, new in zip((k_out, v_out), rows, strict=True)
        )
    _call(_ops.gather_kv_out.default, *arguments, stream=stream, k_out=k_out, v_out=v_out)
    return k_out, v_out


# --- Rotations ------------------------------------------------------------------------------------


def rope_table(
    max_positions: int,
    rotary_dim: int,
    *,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    device: Any = None,
) -> Tensor:
    """Return `[cos | sin]` of every position, as `kvcupy.rope_table`.

    Parameters
    ----------
    device : a torch device, or its name; None: kvcupy's default device
    others : as in `kvcupy.rope_table`

    Returns
    -------
    float32 (max_positions, rotary_dim)

    Notes
    -----
    Make it before what is traced: it is computed by NumPy.

    Examples
    --------
    >>> rope_table(4096, 128, device="cpu").shape
    torch.Size([4096, 128])
    """
    if isinstance(device, (str, torch.device)):
        device = str(device).replace("cpu", "host")
    table = _rope_table(max_positions, rotary_dim, base=base, scaling=scaling, device=device)
    return as_tensor(table)


def apply_rope(
    query: Tensor | None,
    key: Tensor,
    rope_table: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
    query_out: Tensor | None = None,
    key_out: Tensor | None = None,
    stream: Stream = None,
) -> None:
    """Rotate query and key heads by position, as `kvcupy.apply_rope`.

    Parameters
    ----------
    stream : as in `store_kv`
    others : as in `kvcupy.apply_rope`

    Notes
    -----
    Writes query and key, or query_out and key_out. Errors: as `store_kv`. Stream, Capture, Bytes,
    Source: as `kvcupy.apply_rope`.

    Examples
    --------
    >>> query, key, rotated = torch.ones(1, 2, 4), torch.ones(1, 1, 4), torch.zeros(1, 2, 4)
    >>> table = rope_table(8, 4, device="cpu")
    >>> apply_rope(query, key, table, torch.tensor([0]), query_out=rotated)
    >>> torch.equal(query, rotated)
    True
    """
    outputs, operator = {}, _ops.apply_rope.default
    if query_out is not None:
        outputs["query_out"], operator = query_out, _ops.apply_rope_query_out.default
    if key_out is not None:
        outputs["key_out"] = key_out
        operator = (
            _ops.apply_rope_key_out.default if query_out is None
            else _ops.apply_rope_query_out_key_out.default
        )  # fmt: skip
    _call(
        operator, query, key, rope_table, positions, interleaved, sections, sections_interleaved,
        query_norm, key_norm, eps, stream=stream, **outputs,
    )  # fmt: skip


def rope_store_kv(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    rope_table: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
    write_key: bool = True,
    query_out: Tensor | None = None,
    layout: str = "NHD",
    format: str | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    skip_slot: int | None = None,
    alt_stream: Stream = None,
    stream: Stream = None,
) -> None:
    """Rotate query and key, and write key and value into a cache, as `kvcupy.rope_store_kv`.

    Parameters
    ----------
    format, stream : as in `store_kv`
    alt_stream : None where the call is traced
    others : as in `kvcupy.rope_store_kv`

    Notes
    -----
    Writes query or query_out, key unless `write_key` is False, k_cache and v_cache, and the scale
    caches. Errors: as `store_kv`. Stream, Capture, Bytes, Source: as `kvcupy.rope_store_kv`.

    Examples
    --------
    >>> query, key, value = (torch.ones(1, 2, 8) for _ in range(3))
    >>> k_cache, v_cache = torch.zeros(2, 2, 16, 2, 8)
    >>> table = rope_table(32, 8, device="cpu")
    >>> slots, positions = torch.tensor([5]), torch.tensor([9])
    >>> rope_store_kv(query, key, value, table, positions, k_cache, v_cache, slots)
    >>> torch.equal(k_cache[0, 5], key[0]), float(v_cache[0, 5, 0, 0])
    (True, 1.0)
    """
    arguments = (
        query, key, value, rope_table, positions, k_cache, v_cache, slot_mapping, interleaved,
        sections, sections_interleaved, query_norm, key_norm, eps, layout, format,
        *_either(k_scale), *_either(v_scale), k_scale_cache, v_scale_cache, skip_slot,
    )  # fmt: skip
    if query_out is None:
        operator = _ops.rope_store_kv if write_key else _ops.rope_store_kv_keep_key
        outputs = {}
    else:
        operator = (
            _ops.rope_store_kv_query_out if write_key else _ops.rope_store_kv_query_out_keep_key
        )
        outputs = {"query_out": query_out}
    if alt_stream is None:
        _call(operator.default, *arguments, stream=stream, **outputs)
    else:
        streams = {"stream": stream, "alt_stream": alt_stream}
        _on_streams(operator.default, arguments, outputs, streams)


def rope_store_mla(
    query: Tensor | None,
    latent: Tensor,
    rope_key: Tensor,
    rope_table: Tensor,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    write_key: bool = True,
    query_out: Tensor | None = None,
    format: str | None = None,
    scale: Scale = None,
    skip_slot: int | None = None,
    stream: Stream = None,
) -> None:
    """Rotate an MLA query and key, and write latent and key, as `kvcupy.rope_store_mla`.

    Parameters
    ----------
    format, stream : as in `store_kv`
    others : as in `kvcupy.rope_store_mla`

    Notes
    -----
    Writes query or query_out, rope_key unless `write_key` is False, and cache. Errors: as
    `store_kv`. Stream, Capture, Bytes, Source: as `kvcupy.rope_store_mla`.

    Examples
    --------
    >>> cache, latent, key = torch.zeros(16, 12), torch.ones(1, 8), torch.ones(1, 4)
    >>> table = rope_table(32, 4, device="cpu")
    >>> rope_store_mla(None, latent, key, table, torch.tensor([0]), cache, torch.tensor([3]))
    >>> float(cache[3].sum())
    12.0
    """
    arguments = (
        query, latent, rope_key, rope_table, positions, cache, slot_mapping, interleaved, format,
        *_either(scale), skip_slot,
    )  # fmt: skip
    if query_out is None:
        operator = _ops.rope_store_mla if write_key else _ops.rope_store_mla_keep_key
        _call(operator.default, *arguments, stream=stream)
    else:
        operator = (
            _ops.rope_store_mla_query_out if write_key else _ops.rope_store_mla_query_out_keep_key
        )
        _call(operator.default, *arguments, stream=stream, query_out=query_out)


# --- Attention ------------------------------------------------------------------------------------


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    query_lens: Tensor | None = None,
    layout: str = "NHD",
    sm_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | int | None = None,
    logits_soft_cap: float | None = None,
    tree_mask: Tensor | None = None,
    format: str | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
    stream: Stream = None,
) -> Tensor:
    """Attend over the pages of each sequence, as `kvcupy.paged_attention`.

    Parameters
    ----------
    format, stream : as in `store_kv`
    others : as in `kvcupy.paged_attention`

    Returns
    -------
    (T, Hq, Dv) : out, or a new tensor of the query's dtype

    Notes
    -----
    Writes out and lse_out. Errors: as `store_kv`. Stream, Capture, Bytes, Source: as
    `kvcupy.paged_attention`.

    Examples
    --------
    >>> k, v = torch.ones(4, 2, 1, 8), torch.arange(64.0).view(4, 2, 1, 8)
    >>> pages, lengths = torch.tensor([[2, 0]]), torch.tensor([3])
    >>> out = paged_attention(torch.ones(1, 2, 8), k, v, pages, lengths)
    >>> float(out[0, 1, 0])  # the mean of 32, 40 and 0, over pages 2 and 0
    24.0
    """
    arguments = (
        query, k_cache, v_cache, block_table, seq_lens, query_lens, layout, sm_scale, causal,
        window, *_either(sinks), logits_soft_cap, tree_mask, format, *_either(k_scale),
        *_either(v_scale), k_scale_cache, v_scale_cache,
    )  # fmt: skip
    if out is None and lse_out is None:
        new: Tensor = _call(_ops.paged_attention.default, *arguments, stream=stream)
        return new
    if out is None:
        new = out_of_attention({"query": query, "v_cache": v_cache, "format": format})
        out = new.zero_()  # of rows past the last sequence nothing is written
    _call(_ops.paged_attention_out.default, *arguments, stream=stream, out=out, lse_out=lse_out)
    return out


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor | None,
    lse_b: Tensor | None,
    *,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
    lse_base: str = "e",
    stream: Stream = None,
) -> tuple[Tensor, Tensor]:
    """Combine the attention of the same queries over different keys, as `kvcupy.merge_states`.

    Parameters
    ----------
    stream : as in `store_kv`
    others : as in `kvcupy.merge_states`

    Returns
    -------
    (out, lse) : out and lse_out, or new tensors

    Notes
    -----
    Writes out and lse_out. Errors: as `store_kv`. Stream, Capture, Bytes, Source: as
    `kvcupy.merge_states`.

    Examples
    --------
    >>> zero = torch.zeros(1, 1)
    >>> out, lse = merge_states(torch.ones(1, 1, 2), zero, torch.full((1, 1, 2), 3.0), zero)
    >>> out.tolist()
    [[[2.0, 2.0]]]
    """
    arguments = (out_a, lse_a, out_b, lse_b, lse_base)
    if out is None and lse_out is None:
        out, lse_out = _call(_ops.merge_states.default, *arguments, stream=stream)
        return out, lse_out
    if out is None or lse_out is None:
        new_out, new_lse = merged({"out_a": out_a, "lse_a": lse_a, "out_b": out_b})
        out = new_out if out is None else out
        lse_out = new_lse if lse_out is None else lse_out
    _call(_ops.merge_states_out.default, *arguments, stream=stream, out=out, lse_out=lse_out)
    return out, lse_out


# --- Pages and slots ------------------------------------------------------------------------------


def copy_pages(
    cache: Tensor | Sequence[Tensor],
    src_pages: Tensor,
    dst_pages: Tensor,
    *,
    stream: Stream = None,
) -> None:
    """Copy pages onto other pages of the same tensor, or of each, as `kvcupy.copy_pages`.

    Parameters
    ----------
    cache : a tensor of any dtype with pages on its first axis, or a list or tuple of them, the
        layers of K and V say. For a pool `[pool.torch_k(layer), pool.torch_v(layer), ...]`
    stream : as in `store_kv`
    others : as in `kvcupy.copy_pages`

    Notes
    -----
    Writes every tensor of cache. Errors: as `store_kv`. Stream, Capture, Bytes, Source: as
    `kvcupy.copy_pages`.

    Examples
    --------
    >>> cache = torch.arange(12).view(4, 3)
    >>> copy_pages(cache, torch.tensor([0]), torch.tensor([3]))
    >>> cache[3].tolist()
    [0, 1, 2]
    """
    if isinstance(cache, Tensor):
        cache = [cache]
    elif not isinstance(cache, (list, tuple)):
        got = type(cache).__name__
        hint = "; of a pool, take pool.torch_k(layer) and pool.torch_v(layer)"
        raise TypeError(f"cache: expected a tensor, or a list or tuple of them, got {got}{hint}")
    _call(_ops.copy_pages.default, list(cache), src_pages, dst_pages, stream=stream)


def slot_mapping(
    block_table: Tensor,
    seq_lens: Tensor,
    append_lens: Tensor,
    page_size: int,
    *,
    out: Tensor | None = None,
    stream: Stream = None,
) -> Tensor:
    """Return the slots of the tokens that a step appends, as `kvcupy.slot_mapping`.

    Parameters
    ----------
    out : int64 (T,). None: a new tensor, whose length depends on the values of append_lens, so that
        the host waits for them. To trace that with `fullgraph=True`, set
        `torch._dynamo.config.capture_dynamic_output_shape_ops`; no CUDA graph can hold it
    stream : as in `store_kv`
    others : as in `kvcupy.slot_mapping`

    Returns
    -------
    int64 (T,) : out, or a new tensor

    Notes
    -----
    Writes out. Errors: as `store_kv`. Stream, Capture, Bytes: as `kvcupy.slot_mapping`.

    Examples
    --------
    >>> table = torch.tensor([[7, 3], [5, 0]])
    >>> slot_mapping(table, torch.tensor([5, 2]), torch.tensor([2, 2]), 4).tolist()
    [31, 12, 20, 21]
    """
    arguments = (block_table, seq_lens, append_lens, page_size)
    if out is None:
        new: Tensor = _call(_ops.slot_mapping.default, *arguments, stream=stream)
        return new
    _call(_ops.slot_mapping_out.default, *arguments, stream=stream, out=out)
    return out


def page_table_csr(
    block_table: Tensor, seq_lens: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a page table in the form that FlashInfer takes, as `kvcupy.page_table_csr`.

    Returns
    -------
    indptr, indices, last_page_len : int32 (B + 1,), (indptr[-1],) and (B,)

    Notes
    -----
    How many pages there are depends on values: as for `slot_mapping` without `out`.

    Examples
    --------
    >>> table = torch.tensor([[7, 3], [5, 0]])
    >>> [each.tolist() for each in page_table_csr(table, torch.tensor([5, 2]), 4)]
    [[0, 2, 3], [7, 3, 5], [1, 2]]
    """
    indptr, indices, last_page_len = _ops.page_table_csr.default(block_table, seq_lens, page_size)
    return indptr, indices, last_page_len


def find_duplicate_slots(slot_mapping: Tensor) -> Tensor:
    """Return the slots that occur more than once, as `kvcupy.find_duplicate_slots`.

    Returns
    -------
    tensor of the same dtype on the CPU, sorted

    Notes
    -----
    How many there are depends on values: as for `slot_mapping` without `out`.

    Examples
    --------
    >>> find_duplicate_slots(torch.tensor([4, 1, 4, -1, -1]))
    tensor([4])
    """
    duplicates: Tensor = _ops.find_duplicate_slots.default(slot_mapping)
    return duplicates


# --- Memory ---------------------------------------------------------------------------------------


def as_tensor(array: Any) -> Tensor:
    """Return the memory of an array as a tensor, without a copy.

    Parameters
    ----------
    array : whatever kvcupy takes: `device.zeros((4, 8), "bf16")`, `pool.k_scale(layer)`, an
        ArrayView of `kvcupy.view_as`, an array of NumPy, CuPy or any exporter of DLPack

    Returns
    -------
    tensor that shares the memory and keeps it alive; bf16 and fp8 have torch's dtypes of those

    Raises
    ------
    TypeError : not an array
    ValueError : a stride is negative, which torch does not support

    Examples
    --------
    >>> import kvcupy as kv
    >>> cache = as_tensor(kv.device("host").zeros((4, 8), "bf16"))
    >>> cache.dtype, cache.shape
    (torch.bfloat16, torch.Size([4, 8]))
    """
    if isinstance(array, Tensor):
        return array
    tensor: Tensor = tensor_of(view(array, "array"))
    return tensor


# --- Calls ----------------------------------------------------------------------------------------


def _either(value: Any) -> tuple[Any, Any]:
    """Return the two arguments of an operator that stand for a tensor or a number."""
    return (value, None) if isinstance(value, Tensor) else (None, value)


def _call(operator: Any, *arguments: Any, stream: Stream, **outputs: Tensor) -> Any:
    if stream is None:
        return operator(*arguments, **outputs)
    return _on_streams(operator, arguments, outputs, {"stream": stream})


def _on_streams(
    operator: Any, arguments: tuple[Any, ...], outputs: dict[str, Tensor],
    streams: dict[str, Stream],
) -> Any:  # fmt: skip
    """Run an operator's kernel on streams of any library, and let torch's allocator know."""
    if torch.compiler.is_compiling():
        name = next(iter(streams)) if streams["stream"] is not None else "alt_stream"
        raise TypeError(
            f"{name}: expected None in torch.compile and torch.export, where an operator runs on "
            "torch's current stream"
        )
    result = KERNELS[operator](*arguments, **outputs, **streams)
    returned = result if isinstance(result, tuple) else (result,)
    for value in (*arguments, *outputs.values(), *returned):
        for x in value if isinstance(value, list) else (value,):
            if isinstance(x, Tensor) and x.is_cuda:
                _record(x, streams.values())
    return result


def _record(tensor: Tensor, streams: Any) -> None:
    """Keep torch's allocator from reusing a tensor's memory before the streams have passed.

    kvcupy keeps its arguments by itself, but not in a capture that torch began, whose allocator
    reuses what is freed meanwhile for later work of the same capture. The allocator records an
    event on each stream when the tensor is freed, so the streams must not be destroyed before.
    """
    for stream in streams:
        if stream is None:
            continue
        known: Any = devices.get(f"cuda:{tensor.device.index}").as_stream(stream)
        known.lend()
        if not isinstance(stream, torch.cuda.Stream):
            stream = torch.cuda.ExternalStream(known.pointer, tensor.device)
        tensor.record_stream(stream)


# torch's tracer inlines the function that this attribute names; nothing else reads it. Without it
# the tracer breaks the graph at each of kvcupy's own functions and compiles pieces of their Python,
# which then take milliseconds per call.
for _row in TABLE:
    getattr(kvcupy, _row.name).__dict__["_torchdynamo_inline"] = globals()[_row.name]
