"""Attention over a paged cache."""

from __future__ import annotations

from typing import Any

from ..arrays import view
from . import checks, outputs, plan
from .attention_checks import ALL_NAMES, NAMES, NUM_ROWS, Options, check_query
from .attention_plan import AttentionPlan, make_plan


def paged_attention(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    query_lens: Any = None,
    layout: str = "NHD",
    sm_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: Any = None,
    logits_soft_cap: float | None = None,
    tree_mask: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_scale_cache: Any = None,
    v_scale_cache: Any = None,
    out: Any = None,
    lse_out: Any = None,
    stream: Any = None,
) -> Any:
    """Attend with the last tokens of sequences over the pages of each.

    Parameters
    ----------
    query : fp32, fp16 or bf16 (T, Hq, D), the new tokens of all sequences, one after another
    k_cache, v_cache : any format, (num_pages, page_size, H, D) and (..., Dv) in the layout; widths
        up to 768. Hq is a multiple of H. For MLA, both are views of one latent cache, H = 1
    block_table : int32 or int64 (B, max_pages), the pages of each sequence; entries past its end
        are not read. A negative page is not seen; one past the end likewise, and raised by
        `check_faults`
    seq_lens : int32 or int64 (B,), the new tokens included, which are in the cache already
    query_lens : int32 or int64 (B,), new tokens of each sequence; None: one each. T may be more
        than their sum: what is beyond is left alone
    layout : "NHD" or "HND"
    sm_scale : what scores are multiplied by; None: 1 / sqrt(D)
    causal : a query sees its own position and those before, not those after; where it is False,
        sequences may have more new tokens than keys
    window : a query at position p sees keys p - window + 1 to p
    sinks : an int, how many of the first keys stay visible past the window; or float32 logits
        (Hq,) that join the denominator, unscaled, and bring no value
    logits_soft_cap : scores become cap * tanh(score / cap)
    tree_mask : bool (T, max(query_lens)), which new tokens of its sequence each query sees; all
        older tokens are visible. It takes the place of `causal`
    k_scale, v_scale, k_scale_cache, v_scale_cache : as in `store_kv`, of a quantised cache
    out : (T, Hq, Dv) of the query's format or float32, written in place; None: allocated, of the
        query's, zero where nothing is written
    lse_out : float32 (T, Hq), written in place: the natural logarithm of the sum of exponentials
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Returns
    -------
    (T, Hq, Dv) : `out`, or an array of the query's library

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled and `config.fallback` is "error"

    Notes
    -----
    Arithmetic is float32, the output is rounded once. A query that sees no key gives 0, and -inf
    in `lse_out`. Stream: up to three kernels, in order. Capture: legal with outputs given; grid and
    workspace depend on shapes alone. Bytes: visible K and V once for all query heads of a KV head
    in decode. Source: FlashInfer, Ye et al. 2025; Flash-Decoding, Dao et al. 2023.

    Examples
    --------
    >>> import numpy as np
    >>> k, v = np.ones((4, 2, 1, 8), np.float32), np.arange(64, dtype=np.float32)
    >>> query = np.ones((1, 2, 8), np.float32)
    >>> out = paged_attention(query, k, v.reshape(4, 2, 1, 8), np.array([[2, 0]]), np.array([3]))
    >>> float(out[0, 1, 0])  # the mean of 32, 40 and 0, over pages 2 and 0
    24.0
    """
    options = Options.of(layout, sm_scale, causal, window, sinks, logits_soft_cap)
    if out is None:
        out = _allocate(query, v_cache, stream)
    learned = sinks if checks.is_array(sinks) else None
    arrays = (
        query, k_cache, v_cache, out, lse_out, block_table, seq_lens, query_lens, k_scale, v_scale,
        k_scale_cache, v_scale_cache, learned, tree_mask,
    )  # fmt: skip
    return _issue(NAMES, NUM_ROWS, arrays, options, out, stream)


def attend(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    query_lens: Any = None,
    layout: str = "NHD",
    sm_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: Any = None,
    logits_soft_cap: float | None = None,
    tree_mask: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_scale_cache: Any = None,
    v_scale_cache: Any = None,
    hole_starts: Any = None,
    holes: Any = None,
    key_starts: Any = None,
    tree_lens: Any = None,
    rope_table: Any = None,
    interleaved: bool = False,
    rotary_start: int = 0,
    tail_positions: Any = None,
    out: Any = None,
    lse_out: Any = None,
    stream: Any = None,
) -> Any:
    """Attend as `paged_attention` does, over what a cache of several steps makes of its pages.

    Parameters
    ----------
    hole_starts, holes : int32 (B,), both or neither: the key at position p lies at slot p of the
        pages of sequence b, or from position hole_starts[b] on at slot p + holes[b]. Only this goes
        by slots; masks, window, sinks and lengths go by positions
    key_starts : int32 (B,), keys before it are not looked at, sinks among them
    tree_lens : int32 (B,), with `tree_mask`, which then decides about the last tree_lens[b] keys:
        column c is about key seq_lens[b] - tree_lens[b] + c. Not less than the new tokens of a
        sequence, or 0: this one is as without a mask. None: `query_lens`
    rope_table : float32 (max_positions, rotary_dim), see `kvcupy.rope_table`: keys are cached raw,
        and elements rotary_start to rotary_start + rotary_dim - 1 of each turn by its position
        before the score. The query comes turned. Positions past the table are its last
    interleaved : pairs that turn together are neighbours, not halves apart
    rotary_start : see `rope_table`
    tail_positions : int32 (B, max(tree_lens)), positions by which the keys that `tree_mask` decides
        about turn, in place of their own

    Notes
    -----
    All else, what is raised among it, is as in `paged_attention`. Negative entries of the counts
    are 0. Keys of a 16-bit cache are rounded once they have turned, where tensor cores meet them.
    """
    options = Options.of(
        layout, sm_scale, causal, window, sinks, logits_soft_cap, interleaved, rotary_start
    )
    if out is None:
        out = _allocate(query, v_cache, stream)
    learned = sinks if checks.is_array(sinks) else None
    arrays = (
        query, k_cache, v_cache, out, lse_out, block_table, seq_lens, query_lens, k_scale, v_scale,
        k_scale_cache, v_scale_cache, learned, tree_mask,
    )  # fmt: skip
    more = (hole_starts, holes, key_starts, tree_lens, tail_positions)
    if rope_table is None and all(array is None for array in more):
        return _issue(NAMES, NUM_ROWS, arrays, options, out, stream)
    return _issue(ALL_NAMES, NUM_ROWS + 1, (rope_table, *arrays, *more), options, out, stream)


def _issue(
    names: tuple[str, ...], num_rows: int, arrays: tuple[Any, ...], options: Options, out: Any,
    stream: Any,
) -> Any:  # fmt: skip
    """Run the plan of a call; of its arrays, the first `num_rows` are read or written in words."""
    pointers, made = plan.obtain(
        "paged_attention", names, arrays, num_rows, (options,),
        lambda given, alignment: make_plan(names, given, options, alignment),
    )  # fmt: skip
    assert isinstance(made, AttentionPlan)
    made.run(pointers, arrays, stream)
    return out


def _allocate(query: Any, v_cache: Any, stream: Any) -> Any:
    """Allocate the output; other arguments that do not fit are told by the checks of the plan."""
    rows, cache = view(query, "query"), view(v_cache, "v_cache")
    check_query(rows)
    width = cache.shape[-1] if cache.ndim else 0
    return outputs.zeros(rows, (*rows.shape[:2], width), rows.format, stream)
