"""Attention over a paged cache.

`paged_attention` is the public operation. A cache that keeps sequences from step to step uses
`StepAttention`, which has a few arguments more, and probes what all layers of a step share once.

Both make an `AttentionPlan` of a new signature: `check_call` checks the arguments, and
`attention_kernels` chooses the kernels.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from .. import devices
from ..arrays import ArrayView, describe
from ..checks import flag, require_int, require_number
from ..config import config
from ..formats import Layout
from ..observe import Access, DerivedSlots
from . import checks, kv_operand
from .attention_call import (
    PIECE,
    AttentionArrays,
    AttentionCall,
    AttentionOptions,
    AttentionPointers,
    attention_params,
    starts_params,
)
from .attention_choice import choose_schedule, choose_tiling, grid_of, merges_parts, num_tiles
from .attention_kernels import STARTS, schedule_specialisation, schedule_threads
from .call import Operation, Plan, Probed, StepOperation, Views, to_allocate
from .kv_operand import KVArrays, KVOperand
from .launch import Launch
from .merge import MergePointers, merge_launch, row_strides
from .spec import Argument
from .store import CACHES, SCALE_CACHES, SCALES, only_read

# What differs from call to call, what belongs to a layer of a cache, and what to a step.
_PER_CALL = (
    Argument("query", "sequences heads head_dim", words=True),
    Argument(
        "out", "sequences heads v_head_dim", output=True, fresh=True, words=True, returned=True
    ),
    Argument("lse_out", "sequences heads", output=True, fresh=True, returned_if="return_lse"),
    Argument("sinks", "heads", in_example=False),
)
_PER_LAYER = only_read(*CACHES, *SCALES, *SCALE_CACHES)
_PER_STEP = (
    Argument("block_table", "sequences max_pages", example=((1, 0), (0, 1))),
    Argument("seq_lens", "sequences", example=(7, 2)),
    Argument("query_lens", "sequences", in_example=False), Argument("tree_mask", in_example=False),
    Argument("evicted_starts"), Argument("evicted_lens"), Argument("key_starts"),
    Argument("tree_lens"), Argument("tree_positions"), Argument("rope_table", words=True),
    Argument("cu_query_lens", in_example=False),
)  # fmt: skip


def _attended(
    arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and format of the outputs that attention allocates."""
    query, v_cache = arguments["query"], arguments["v_cache"]
    rows = tuple(query.shape[:2])
    outputs = {"out": ((*rows, v_cache.shape[-1]), query.format)}
    if options.get("return_lse"):
        outputs["lse_out"] = rows, "fp32"
    return {name: each for name, each in outputs.items() if name not in arguments}


_ATTENTION = Operation("paged_attention", *_PER_CALL, *_PER_LAYER, *_PER_STEP, outputs_of=_attended)

_MAX_WIDTH = 768  # elements of a row that a warp, or a thread of the host device, has registers for


@_ATTENTION.public
def paged_attention(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    query_lens: Any = None,
    cu_query_lens: Any = None,
    layout: Layout = "NHD",
    sm_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sink_tokens: int | None = None,
    sinks: Any = None,
    logits_soft_cap: float | None = None,
    tree_mask: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_scale_cache: Any = None,
    v_scale_cache: Any = None,
    batch_invariant: bool | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse_out: Any = None,
    stream: Any = None,
) -> Any:
    """Attend with the newest tokens of each sequence over the pages of that sequence.

    Parameters
    ----------
    query : fp32, fp16 or bf16 (T, Hq, D), the new tokens of all sequences, one after another
    k_cache, v_cache : any format, (num_pages, page_size, H, D) and (..., Dv) in the layout; widths
        up to 768. Hq is a multiple of H. For MLA, both are views of one latent cache, H = 1. K and
        V of four bits have one format; each may be stored rotated, see `kvcupy.view_as`
    block_table : int32 or int64 (B, max_pages), the pages of each sequence; entries past its end
        are not read. Keys of a negative page are not visible; nor are keys of a page past the end
        of the cache, which `check_faults` raises
    seq_lens : int32 or int64 (B,), the new tokens included, whose K and V are already in the cache
    query_lens : int32 or int64 (B,), new tokens of each sequence; None: one each. T may be more
        than their sum: rows past it are not written. Tokens past T are left out, as if their
        sequence had fewer, and `check_faults` reports them
    cu_query_lens : int32 (B + 1,) instead of query_lens: 0 and the sums of the lengths, contiguous,
        as FlashAttention's `cu_seqlens_q` and FlashInfer's `qo_indptr`. It saves the launch that
        sums them. Negative entries count as 0, those past T as T, a sequence whose end is before
        its start has no rows, and `check_faults` reports all three
    layout : "NHD" or "HND"
    sm_scale : what scores are multiplied by; None: 1 / sqrt(D)
    causal : a query sees the keys up to its own position. With False it sees all keys, and a
        sequence may have more new tokens than keys
    window : a query at position p sees keys from p - window + 1 on; up to p, if `causal`
    sink_tokens : how many of the first keys stay visible past the window
    sinks : float32 logits (Hq,), learned, which join the softmax denominator, unscaled, without a
        value
    logits_soft_cap : scores become cap * tanh(score / cap)
    tree_mask : bool (T, max(query_lens)), which new tokens of its sequence each query sees, instead
        of `causal`; all older tokens are visible
    k_scale, v_scale, k_scale_cache, v_scale_cache : of a quantised cache, as in `store_kv`
    out : (T, Hq, Dv) of the query's format or float32, written in place; None: allocated in the
        query's format, zero where nothing is written
    batch_invariant : whether the bits of a sequence's output depend on that sequence alone; None:
        `kvcupy.config.batch_invariant`
    return_lse : return the natural log-sum-exp of the scores, and of `sinks`, too
    lse_out : float32 (T, Hq), written in place: that; with return_lse None: allocated, zero where
        nothing is written
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Returns
    -------
    (T, Hq, Dv) : `out`, or an array of the query's library; with return_lse a tuple of it and the
        float32 log-sum-exp (T, Hq)

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled, on a GPU or while `config.fallback` is "error"

    Notes
    -----
    Sums are float32, and the output is rounded once. On tensor cores products of 16-bit numbers are
    exact. Softmax weights are rounded to the 16-bit format where a sequence has many new tokens (of
    MLA, several), and to twice its bits where it has few. There values of int4 in rows of up to 256
    elements are rounded to fp16 once, and four bits are otherwise exact. Over caches of 8 and 4
    bits queries become fp16 there (over wider rows of mxfp4 and int4 two bf16, exactly), scaled by
    row: of bf16, elements down to 2**-29 of the largest of a row are exact, and no error is above
    2**-39 of it. An infinity in V gives an infinity, but there NaN in rows whose weight for that
    key is zero in float32, or, unless the cache is bf16, below 2**-23, and in rows that do not see
    the key but share its tile with one that does. Over keys that are stored rotated the query is
    rotated too, and over such values the output is rotated back, in float32, once per piece. A
    query that sees no key gives 0, and in `lse_out` -inf, or its sink.
    Where sequences may be long, a kernel cuts their keys into pieces by `seq_lens`, and what their
    blocks computed is merged: a sequence may round differently in a batch with others.
    With `batch_invariant` it does not: the output of a token has the same bits in any batch, for
    any number of new tokens, in any pages and layout, on any number of multiprocessors. Keys are
    not cut then, so that a few long sequences leave most of a GPU idle, and prefill runs in the
    tiles of decode; caches with `v_scale_cache`, and of mxfp4 and int4 with rows of up to 256
    elements, run without tensor cores.
    Stream: up to four kernels, in order. Capture: legal with outputs given; grids and workspace
    depend on shapes alone, so a graph serves all lengths. Bytes: in decode, visible K and V are
    read once for all query heads of a KV head. Source: FlashInfer, Ye et al. 2025; Flash-Decoding,
    Dao et al. 2023.

    Examples
    --------
    >>> import numpy as np
    >>> k, v = np.ones((4, 2, 1, 8), np.float32), np.arange(64, dtype=np.float32)
    >>> query = np.ones((1, 2, 8), np.float32)
    >>> out = paged_attention(query, k, v.reshape(4, 2, 1, 8), np.array([[2, 0]]), np.array([3]))
    >>> float(out[0, 1, 0])  # the mean of 32, 40 and 0, over pages 2 and 0
    24.0
    """
    options = check_options(
        layout, sm_scale, causal, window, sink_tokens, logits_soft_cap,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    if query_lens is not None and cu_query_lens is not None:
        raise ValueError("query_lens: expected None with cu_query_lens, got an array")
    arrays = (
        query, out, lse_out, sinks,
        k_cache, v_cache, k_scale, v_scale, k_scale_cache, v_scale_cache,
        block_table, seq_lens, query_lens, tree_mask,
        None, None, None, None, None, None,  # evicted_starts to rope_table: `StepAttention` alone
        cu_query_lens,
    )  # fmt: skip
    with_lse = () if return_lse is False else (flag(return_lse, "return_lse"),)
    return _ATTENTION.run(arrays, (options, *with_lse), AttentionPlan, stream)


# --- Layer by layer -------------------------------------------------------------------------------


class LayerArrays(Probed):
    """K and V of a layer, with their scales, as in `paged_attention`: probed once for all steps."""

    def __init__(
        self, k_cache: Any, v_cache: Any, k_scale: Any = None, v_scale: Any = None,
        k_scale_cache: Any = None, v_scale_cache: Any = None,
    ) -> None:  # fmt: skip
        arrays = k_cache, v_cache, k_scale, v_scale, k_scale_cache, v_scale_cache
        super().__init__(_PER_LAYER, arrays)


class StepAttention(StepOperation):
    """Attention over the sequences of one step of a cache: their tables, probed for all layers.

    Parameters
    ----------
    block_table, seq_lens, query_lens, tree_mask : as in `paged_attention`
    evicted_starts, evicted_lens : int32 (B,), both or neither: the evicted span of each
        sequence. The key at position p is in slot p of the sequence's pages, and from position
        evicted_starts[b] on in slot p + evicted_lens[b]. Masks, window, sink_tokens
        and lengths go by position all the same
    key_starts : int32 (B,), keys before it are not visible, not even as sink tokens
    tree_lens : int32 (B,), with `tree_mask`, which then decides about the last tree_lens[b] keys:
        column c is about key seq_lens[b] - tree_lens[b] + c. At least the new tokens of a
        sequence, or 0, which leaves it without a mask. None: `query_lens`
    rope_table : float32 (max_positions, rotary_dim), see `kvcupy.rope_table`, for a cache of keys
        that are not rotated: each is rotated by its position before the score. The query comes
        rotated. A position past the table counts as its last. Two options belong to it:
        `interleaved`, whether pairs that rotate together are neighbours or halves apart, and
        `rotary_start`, the first of the rotary_dim elements of a key that are rotated. Elements
        that a four-bit cache stores rotated are not among those
    tree_positions : int32 (B, max(tree_lens)), the positions of the keys that `tree_mask` decides
        about, instead of their index: keys are rotated by them, and a window counts from the
        query's and hides tree keys too, except those at positions before sink_tokens. For windows,
        positions of queries are clipped to the indices of the tree keys
    cu_query_lens : int32 (B + 1,), 0 and the sums of `query_lens`, contiguous; None: each call sums
        them up by a separate launch. Wrong entries count as in `paged_attention`
    outlives_step : whether later steps use the same arrays, for graphs that read them

    Notes
    -----
    Layers with equal calls cut keys into pieces once. Lengths must not change between them,
    unless the arrays outlive the step: then this holds within a capture, whose graph cuts again in
    each replay.
    Negative counts are 0. Tensor cores take rotated keys rounded to the 16-bit format of the cache,
    and to fp16 where that has 8 bits.
    """

    def __init__(
        self, *, block_table: Any, seq_lens: Any, query_lens: Any = None, tree_mask: Any = None,
        evicted_starts: Any = None, evicted_lens: Any = None, key_starts: Any = None,
        tree_lens: Any = None, tree_positions: Any = None, rope_table: Any = None,
        cu_query_lens: Any = None, outlives_step: bool = False,
    ) -> None:  # fmt: skip
        arrays = (
            block_table, seq_lens, query_lens, tree_mask, evicted_starts, evicted_lens, key_starts,
            tree_lens, tree_positions, rope_table, cu_query_lens,
        )  # fmt: skip
        super().__init__(
            _ATTENTION, AttentionPlan, len(_PER_CALL), arrays, outlives_step=outlives_step
        )

    def run(
        self, layer: LayerArrays, query: Any, out: Any, options: AttentionOptions, *,
        lse_out: Any = None, sinks: Any = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Attend in one layer, as `paged_attention` does; a cache calls `issue`.

        `options` come from `check_options`.
        """
        arrays = query, out, lse_out, sinks, *layer.arrays, *self.arrays
        return _ATTENTION.run(arrays, (options,), AttentionPlan, stream)


# --- Checks ---------------------------------------------------------------------------------------


def check_options(
    layout: Any, sm_scale: Any, causal: Any, window: Any, sink_tokens: Any, logits_soft_cap: Any,
    interleaved: Any = False, rotary_start: Any = 0, batch_invariant: Any = None,
) -> AttentionOptions:  # fmt: skip
    """Check the options of a call; `batch_invariant` None is the setting of `kvcupy.config`."""
    if batch_invariant is None:
        batch_invariant = config._batch_invariant  # a property would cost each call a frame
    arguments = (
        layout, sm_scale, causal, window, sink_tokens, logits_soft_cap, interleaved, rotary_start,
        batch_invariant,
    )  # fmt: skip
    try:
        return _checked_options(*arguments)
    except TypeError:  # perhaps unhashable: let the checks name it
        pass
    return _checked_options.__wrapped__(*arguments)


@lru_cache(maxsize=1024, typed=True)
def _checked_options(
    layout: Any, sm_scale: Any, causal: Any, window: Any, sink_tokens: Any, logits_soft_cap: Any,
    interleaved: Any, rotary_start: Any, batch_invariant: Any,
) -> AttentionOptions:  # fmt: skip
    layout = checks.layout_name(layout)
    if window is not None:
        require_int(window, "window")
        if not 1 <= window < 2**63:
            hint = "; None is no window" if window in (-1, 0) else ""  # "off" in other libraries
            raise ValueError(f"window: expected None or at least 1, got {window}{hint}")
    if sink_tokens is not None:
        require_int(sink_tokens, "sink_tokens")
        if not 0 <= sink_tokens < 2**63:
            raise ValueError(f"sink_tokens: expected at least 0, got {sink_tokens}")
    require_int(rotary_start, "rotary_start")
    if rotary_start < 0:
        raise ValueError(f"rotary_start: expected at least 0, got {rotary_start}")
    return AttentionOptions(
        layout, _float32(sm_scale, "sm_scale"), flag(causal, "causal"), int(window or 0),
        int(sink_tokens or 0), _float32(logits_soft_cap, "logits_soft_cap", positive=True) or 0.0,
        flag(interleaved, "interleaved"), int(rotary_start),
        flag(batch_invariant, "batch_invariant"),
    )  # fmt: skip


def _float32(value: Any, name: str, *, positive: bool = False) -> float | None:
    """Check an optional number, which kernels get as float32."""
    if value is None:
        return None
    if type(value) is float and 1e-30 < value < 1e30:  # the usual case, within float32's range
        return value
    require_number(value, name)
    assert isinstance(value, numbers.Real)
    try:
        with np.errstate(over="ignore"):
            rounded = np.float32(value)
    except OverflowError:  # of an int
        rounded = np.float32(math.inf)
    if not np.isfinite(rounded) or (positive and not rounded > 0):
        expected = "a finite float32 above zero" if positive else "a finite float32"
        hint = "; None is no cap" if positive and value == 0 else ""
        raise ValueError(f"{name}: expected {expected}, got {value!r}{hint}")
    return float(value)


def check_call(
    arrays: AttentionArrays, options: AttentionOptions, returns_lse: bool = False
) -> AttentionCall:
    """Check all arguments, and describe the outputs that are to be allocated."""
    query, k_cache, v_cache = arrays.query, arrays.k_cache, arrays.v_cache
    check_query(query)
    num_tokens, num_heads, _ = query.shape
    k = _check_cache(
        KVArrays(None, k_cache, "k_scale", arrays.k_scale, arrays.k_scale_cache), options.layout
    )
    v = _check_cache(
        KVArrays(None, v_cache, "v_scale", arrays.v_scale, arrays.v_scale_cache), options.layout
    )
    if (v.cache.num_slots, v.cache.page_size, v.cache.num_heads) != (
        k.cache.num_slots, k.cache.page_size, k.cache.num_heads
    ):  # fmt: skip
        raise ValueError(
            f"v_cache: expected pages and heads as in k_cache {describe(k_cache)}, "
            f"got {describe(v_cache)}"
        )
    if (k.four_bit or v.four_bit) and k.cache_format is not v.cache_format:
        raise ValueError(
            f"v_cache: expected {k.cache_format.name} like k_cache, as one of them has four bits, "
            f"got {v.cache_format.name}"
        )
    num_kv_heads, width = k.cache.num_heads, k.cache.width
    if query.shape[2] != width:
        raise ValueError(
            f"query: expected width {width} like k_cache {describe(k_cache)}, got {describe(query)}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"query: expected a multiple of the {num_kv_heads} heads of k_cache, got {num_heads}"
        )
    num_sequences, max_pages = _check_tables(arrays, num_tokens)
    if arrays.out is None:
        shape = num_tokens, num_heads, v_cache.shape[-1]
        arrays = arrays._replace(out=to_allocate(query, shape, query.format, "out"))
    if arrays.lse_out is None and returns_lse:
        sums = to_allocate(query, (num_tokens, num_heads), "fp32", "lse_out")
        arrays = arrays._replace(lse_out=sums)
    _check_outputs(arrays, (num_tokens, num_heads, v.cache.width))
    _check_masks(arrays, num_tokens, num_heads, num_sequences)
    _check_rope(arrays, options.rotary_start, width, num_sequences)
    return AttentionCall(arrays, options, k, v, num_tokens, num_heads, num_sequences, max_pages)


def check_query(query: ArrayView, name: str = "query") -> None:
    """Raise unless an array can be a query, whatever the other arguments are."""
    checks.require_format(query, name, "fp32", "fp16", "bf16", expected="fp32, fp16 or bf16")
    if query.ndim != 3 or 0 in query.shape[1:]:
        raise ValueError(
            f"{name}: expected (tokens, heads, width) of at least one head and element, "
            f"got {describe(query)}"
        )
    checks.require_contiguous(query, name)


def _check_cache(arrays: KVArrays, layout: str) -> KVOperand:
    array, name = arrays.cache, arrays.cache.name
    cache_format = checks.number_format(array, name, four_bit=True)
    if array.ndim not in (3, 4):
        raise ValueError(
            f"{name}: expected (num_pages, page_size, heads, width) by layout, "
            f"got {describe(array)}"
        )
    cache = kv_operand.cache(array, name, layout, 3, written=False)
    if 0 in (cache.num_heads, cache.width):
        raise ValueError(f"{name}: expected heads and width, got {describe(array)}")
    if cache.width > _MAX_WIDTH:
        raise ValueError(f"{name}: expected rows of at most {_MAX_WIDTH}, got {cache.width}")
    scale = kv_operand.checked_scale(arrays, cache, cache_format, written=False)
    rows = kv_operand.Rows(0, cache.num_heads, cache.width, 0, 0)  # there are none
    return KVOperand(
        rows, cache, cache_format, cache_format, scale, arrays, rotated_width=array.rotated_width
    )


def _check_tables(arrays: AttentionArrays, num_tokens: int) -> tuple[int, int]:
    """Check block table and lengths; return the number of sequences, and of pages per row."""
    num_sequences, max_pages = checks.block_table(arrays.block_table)
    for lens in (arrays.seq_lens, arrays.query_lens):
        if lens is not None and checks.indices(lens, lens.name) != num_sequences:
            raise ValueError(
                f"{lens.name}: expected {num_sequences} like block_table, got {describe(lens)}"
            )
    starts = arrays.cu_query_lens
    if starts is not None:
        checks.require_format(starts, "cu_query_lens", "int32")
        hint = ", one more than block_table has rows"
        checks.require_shape(starts, "cu_query_lens", (num_sequences + 1,), hint)
        checks.require_contiguous(starts, "cu_query_lens")
    if starts is None and arrays.query_lens is None and num_tokens != num_sequences:
        raise ValueError(
            f"query: expected {num_sequences} tokens, one per sequence, got {num_tokens}"
        )
    return num_sequences, max_pages


def _check_outputs(arrays: AttentionArrays, shape: tuple[int, int, int]) -> None:
    query, out, lse = arrays.query, arrays.out, arrays.lse_out
    assert out is not None
    formats = f"{query.format} like query, or fp32"
    checks.require_format(out, "out", query.format, "fp32", expected=formats)
    checks.require_shape(out, "out", shape)
    checks.require_contiguous(out, "out")
    checks.require_output(out, "out")
    if lse is None:
        return
    checks.require_format(lse, "lse_out", "fp32")
    checks.require_shape(lse, "lse_out", shape[:2])
    checks.require_output(lse, "lse_out")


def _check_masks(
    arrays: AttentionArrays, num_tokens: int, num_heads: int, num_sequences: int
) -> None:
    """Check learned sinks, the tree mask, and the arrays of one int32 per sequence."""
    if (sinks := arrays.sinks) is not None:
        checks.require_format(sinks, "sinks", "fp32", expected="float32 logits")
        checks.require_shape(sinks, "sinks", (num_heads,), " like the query")
    if (mask := arrays.tree_mask) is not None:
        checks.require_format(mask, "tree_mask", "bool")
        if mask.ndim != 2 or mask.shape[0] != num_tokens:
            raise ValueError(
                f"tree_mask: expected ({num_tokens}, max(query_lens)), got {describe(mask)}"
            )
    starts, lens = arrays.evicted_starts, arrays.evicted_lens
    for counts in (starts, lens, arrays.key_starts, arrays.tree_lens):
        if counts is None:
            continue
        checks.require_format(counts, counts.name, "int32")
        checks.require_shape(counts, counts.name, (num_sequences,), " like block_table")
    if (starts is None) != (lens is None):
        missing, other = _EVICTED if starts is None else _EVICTED[::-1]
        raise ValueError(f"{missing}: expected an array beside {other}, got None")
    if arrays.tree_lens is not None and mask is None:
        raise ValueError("tree_lens: expected None without tree_mask, got an array")


def _check_rope(arrays: AttentionArrays, rotary_start: int, width: int, num_sequences: int) -> None:
    """Check the rope table against keys of `width` elements, and the positions of a tree."""
    keys, table, tail = arrays.k_cache, arrays.rope_table, arrays.tree_positions
    if table is not None:
        _, rotary_dim = checks.rope_table(table, min_positions=1)
        if rotary_start < keys.rotated_width:
            raise ValueError(
                "rope_table: expected None, as RoPE of a key cannot follow the rotation that it is "
                f"stored with, got an array for k_cache {describe(keys)}"
            )
        if rotary_start + rotary_dim > width:
            raise ValueError(
                f"rotary_start: expected at most {width - rotary_dim}, to rotate {rotary_dim} of "
                f"the {width} elements of k_cache, got {rotary_start}"
            )
    if tail is None:
        return
    if arrays.tree_mask is None:
        raise ValueError("tree_positions: expected None without tree_mask, got an array")
    checks.require_format(tail, "tree_positions", "int32")
    if tail.ndim != 2 or tail.shape[0] != num_sequences:
        raise ValueError(
            f"tree_positions: expected ({num_sequences}, max(tree_lens)), got {describe(tail)}"
        )


_EVICTED = ("evicted_starts", "evicted_lens")

# --- Plan -----------------------------------------------------------------------------------------

_WORKSPACE_ALIGNMENT = 256  # of each part
_SPLIT_TILE_BYTES = 16  # SplitTile of kernels_src/split_tile.cuh


class AttentionPlan(Plan):
    """Attention for one signature."""

    def __init__(
        self, alignment: int, options: AttentionOptions, returns_lse: bool = False, *,
        query: ArrayView, k_cache: ArrayView, v_cache: ArrayView, block_table: ArrayView,
        seq_lens: ArrayView, **others: Any,
    ) -> None:  # fmt: skip
        arrays = AttentionArrays(query, k_cache, v_cache, block_table, seq_lens, **others)
        self.call = check_call(arrays, options, returns_lse)
        super().__init__(_ATTENTION, devices.get(query.device), query.library)
        if returns_lse:
            self.returned = operator.itemgetter(*map(_ATTENTION.names.index, ("out", "lse_out")))
        self.fault_ids = self.call.fault_ids
        if arrays.out is None:
            self.allocated["out"] = self.call.out
        if arrays.lse_out is None and self.call.arrays.lse_out is not None:
            self.allocated["lse_out"] = self.call.arrays.lse_out
        if self.call.num_tokens == 0 or self.call.num_sequences == 0:
            return
        self.load(self._lay_out, alignment)
        if self.cause is not None:
            return
        self.zeroed = self.call.is_ragged  # else every row is some sequence's, and written
        # Not the tiling of the launches, which verification may have replaced.
        reason = choose_tiling(self.device, self.call, alignment).slow_path_reason
        if reason and self.lasting:
            config.warn_once(f"paged_attention runs without tensor cores: {reason}")

    def access(self, name: str, views: Views) -> Access:
        """Return the slots of the sequences in caches and their scales, and all of other arrays."""
        call = self.call
        for operand in (call.k, call.v):
            is_cache = name == operand.arrays.cache.name
            view = operand.cache_view(views) if is_cache else views[name]
            access = operand.slots_of(name, view, self._visible_slots(views))
            if access is not None:
                return access
        return super().access(name, views)

    def _visible_slots(self, views: Views) -> DerivedSlots:
        """Return the slots of all keys of the sequences, which is where attention reads a cache."""
        tables = [n for n in ("block_table", "seq_lens", *_EVICTED) if n in views]
        page_size = self.call.k.cache.page_size

        def choose(
            table: np.ndarray[Any, Any], seq_lens: np.ndarray[Any, Any],
            *evicted: np.ndarray[Any, Any],
        ) -> np.ndarray[Any, Any]:  # fmt: skip
            keys = np.arange(table.shape[1] * page_size)[None]
            start, length = (e[:, None] for e in evicted) if evicted else (keys.size, 0)
            last = seq_lens[:, None] + np.maximum(length, 0)
            visible = (keys < np.minimum(start, seq_lens[:, None])) | (
                (keys >= start + length) & (keys < last)
            )
            pages = np.repeat(table.astype(np.int64), page_size, axis=1)
            slots = np.where(pages < 0, -1, pages * page_size + keys % page_size)
            listed: np.ndarray[Any, Any] = slots[visible]
            return listed

        return DerivedSlots(tuple([views[n] for n in tables]), choose)

    def _lay_out(self, alignment: int) -> list[Launch]:
        """Load the kernels, and lay out their launches and the workspace."""
        call, device = self.call, self.device
        launches: list[Launch] = []
        self.workspace_bytes = 0
        tiling = choose_tiling(device, call, alignment)
        tiles, num_kv_heads = num_tiles(call, tiling.rows), call.k.cache.num_heads
        schedule = choose_schedule(device, call, tiling)
        names = (*_ATTENTION.names, "workspace")
        arrays = call.arrays
        pointers: AttentionPointers = {
            "query": arrays.query, "k_cache": arrays.k_cache, "v_cache": arrays.v_cache,
            "block_table": arrays.block_table, "seq_lens": arrays.seq_lens,
            "cu_query_lens": arrays.cu_query_lens,
            "k_scale": call.k.scale.array, "v_scale": call.v.scale.array,
            "k_scale_cache": arrays.k_scale_cache, "v_scale_cache": arrays.v_scale_cache,
            "sinks": arrays.sinks, "tree_mask": arrays.tree_mask, "tree_lens": arrays.tree_lens,
            "evicted_starts": arrays.evicted_starts, "evicted_lens": arrays.evicted_lens,
            "key_starts": arrays.key_starts, "rope_table": arrays.rope_table,
            "tree_positions": arrays.tree_positions, "out": arrays.out, "lse": arrays.lse_out,
        }  # fmt: skip
        if arrays.query_lens is not None and arrays.cu_query_lens is None:
            pointers["cu_query_lens"] = self._reserve(4 * (call.num_sequences + 1))
            lanes = device.warp_lanes
            starts = {"query_lens": arrays.query_lens, "starts": pointers["cu_query_lens"]}
            launches.append(
                Launch(
                    device, STARTS[lanes].specialise(lanes), (1, 1, 1), (lanes, 1, 1), 0,
                    starts_params(call, arrays.query_lens), starts, names,
                )
            )  # fmt: skip
        params = attention_params(call, schedule, tiling.lanes, alignment)
        launches_merge = schedule is not None and not merges_parts(tiling.specialisation)
        if schedule is not None:
            pointers["pieces"] = self._reserve(PIECE.itemsize * schedule.num_pieces)
            states = schedule.num_states * num_kv_heads
            if launches_merge:
                tiles_bytes = _SPLIT_TILE_BYTES * schedule.num_split_tiles
                pointers["split_tiles"] = self._reserve(tiles_bytes)
            else:
                pointers["counters"] = self._reserve(4 * states)
            rows = states * schedule.state_rows
            pointers["partial_out"] = self._reserve(4 * rows * call.v.cache.width)
            pointers["partial_lse"] = self._reserve(4 * rows)
            launches.append(
                Launch(
                    device, schedule_specialisation(device.warp_lanes), (1, 1, 1),
                    (schedule_threads(device.warp_lanes), 1, 1), 0, params, pointers, names,
                )
            )  # fmt: skip
        self.num_step_launches = len(launches)
        launches.append(
            Launch(
                device, tiling.specialisation,
                grid_of(
                    tiling.specialisation, tiles if schedule is None else schedule.num_pieces,
                    num_kv_heads,
                ),
                (tiling.threads, 1, 1), tiling.smem_bytes, params, pointers, names,
            )
        )  # fmt: skip
        if schedule is not None and launches_merge:
            out, lse, sinks = call.out, arrays.lse_out, arrays.sinks
            merged: MergePointers = {
                "out_a": pointers["partial_out"], "lse_a": pointers["partial_lse"],
                "split_tiles": pointers["split_tiles"], "out": out, "lse": lse, "sinks": sinks,
            }  # fmt: skip
            rows = num_kv_heads * schedule.state_rows
            width = call.v.cache.width
            merge_params = {
                "num_states": schedule.most_parts, "state_rows": schedule.state_rows,
                "group": call.group, "num_heads": call.num_heads,
                "sink_bytes": 4 if sinks is None else sinks.strides[0],
                "out_state_bytes": 4 * rows * width, "lse_state_bytes": 4 * rows,
                **row_strides("out_a", (0, 4 * width)), **row_strides("lse_a", (0, 4)),
                **row_strides("out", out.strides[:2]),
                **row_strides("lse", (0, 0) if lse is None else lse.strides),
            }  # fmt: skip
            launches.append(
                merge_launch(
                    device, merge_params, "fp32", out.format, schedule.num_split_tiles * rows,
                    width, alignment, merged, names,
                )
            )  # fmt: skip
        return launches

    def _reserve(self, num_bytes: int) -> tuple[str, int]:
        """Reserve the next part of the workspace."""
        start = self.workspace_bytes
        self.workspace_bytes += -(-num_bytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
        return "workspace", start
