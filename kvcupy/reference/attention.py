"""Attention over paged sequences, and merging states of it.

Everything is float64, from the exact values of the formats to the results, which are not rounded.
"""

from __future__ import annotations

import numpy as np

from .formats import Array, Float64, decode, format_of
from .four_bit import FourBitRows
from .rope import rotate_values
from .store import Faults, Rows, Scale, num_slots, scale_per_head, scaled


def _rows_of_slots(
    cache: Rows, layout: str, scale: Scale, scale_cache: Array | None
) -> tuple[Float64, int]:
    """Return the values of a paged cache, (num_slots, H, D), and the page size."""
    pages = cache if layout == "NHD" else cache.swapaxes(1, 2)
    shape = num_slots(cache, layout), *pages.shape[2:]
    scales = scale_per_head(scale, pages.shape[2]) if scale_cache is None else scale_cache
    if isinstance(pages, FourBitRows):
        return scaled(pages, scales).reshape(shape).astype(np.float64), int(pages.shape[1])
    return scaled(pages.reshape(shape), scales).astype(np.float64), int(pages.shape[1])


def rotate_keys(
    rows: Float64, table: Array, positions: Array, *, interleaved: bool = False, start: int = 0
) -> Float64:
    """Return keys rotated by their positions.

    Parameters
    ----------
    rows
        ``(n, H, D)``.
    table
        ``(max_positions, rotary_dim)``: cosines of the pairs, then sines.
    positions
        ``(n,)``; a position outside the table counts as its first or last.
    interleaved
        Whether pairs are neighbours, instead of halves apart.
    start
        The first element that is rotated.
    """
    pairs = table.shape[1] // 2
    angles = table[np.clip(positions, 0, len(table) - 1)].astype(np.float64)[:, None]
    cosine, sine = angles[..., :pairs], angles[..., pairs:]
    return rotate_values(rows, cosine, sine, interleaved=interleaved, start=start)


def sees(
    key: int,
    position: int,
    new_from: int,
    *,
    causal: bool = True,
    window: int | None = None,
    first_keys: int = 0,
    tree: Array | None = None,
) -> bool:
    """Return whether the query at `position` of a sequence sees the key at `key`.

    A query before the first position sees nothing, unless nothing depends on positions.

    Parameters
    ----------
    new_from
        The first key that a tree mask is about: the position of the first query of the sequence, or
        one before it.
    window, first_keys
        Keys at ``position - window`` and before are hidden, except the first ones.
    tree
        The row of the tree mask, ``tree[c]`` for the new key c. It alone decides about new keys;
        those past its end are hidden.
    """
    if position < 0 and (causal or window is not None or tree is not None):
        return False
    if tree is not None and key >= new_from:
        return key - new_from < len(tree) and bool(tree[key - new_from])
    if tree is None and causal and key > position:
        return False
    return window is None or key > position - window or key < first_keys


def _attend(
    scores: Float64, values: Float64, sink: float | None = None
) -> tuple[Float64, np.float64]:
    """Return `values` (n, Dv) averaged by the softmax of `scores` (n,), and the log-sum-exp."""
    logits = scores if sink is None else np.append(scores, sink)
    if (logits == -np.inf).all():  # every weight is zero, if there are any
        return np.zeros(values.shape[1]), np.float64(-np.inf)
    largest = logits.max()
    total = np.exp(logits - largest).sum()
    weights = np.exp(scores - largest) / total
    return weights @ values, np.float64(largest + np.log(total))


def paged_attention(
    query: Array,
    k_cache: Rows,
    v_cache: Rows,
    block_table: Array,
    seq_lens: Array,
    *,
    query_lens: Array | None = None,
    layout: str = "NHD",
    sm_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sink_tokens: int | None = None,
    sinks: Array | None = None,
    logits_soft_cap: float | None = None,
    tree_mask: Array | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scale_cache: Array | None = None,
    v_scale_cache: Array | None = None,
    evicted_starts: Array | None = None,
    evicted_lens: Array | None = None,
    key_starts: Array | None = None,
    tree_lens: Array | None = None,
    rope_table: Array | None = None,
    interleaved: bool = False,
    rotary_start: int = 0,
    tree_positions: Array | None = None,
) -> tuple[Float64, Float64, dict[str, Faults]]:
    """Attend with the newest tokens of each sequence over what it has in the cache.

    Parameters
    ----------
    query
        ``(T, Hq, D)``: ``query_lens[b]`` rows of each sequence b, in order.
    k_cache, v_cache
        ``(pages, page_size, H, D)`` and ``(.., Dv)``, or ``(pages, H, page_size, D)`` with
        `layout` ``"HND"``. Query head h reads KV head ``h // (Hq / H)``.
    block_table
        ``(B, max_pages)``, the pages of each sequence in order. Keys of a negative page, or of a
        page past the end of the cache, are not visible.
    seq_lens
        ``(B,)``, in tokens, new ones included.
    query_lens
        ``(B,)``, new tokens; None: one per sequence.
    sm_scale
        What ``q . k`` is multiplied by; None: ``1 / sqrt(D)``.
    causal, window, tree_mask
        See `sees`; `tree_mask` is bool ``(T, C)``.
    sink_tokens
        How many first keys stay visible past the window.
    sinks
        ``(Hq,)``, a logit per head that joins the denominator.
    logits_soft_cap
        Scores become ``cap * tanh(score / cap)``.
    k_scale, v_scale, k_scale_cache, v_scale_cache
        As in `store_kv`; a value is ``stored * scale``, rounded to float32.
    evicted_starts, evicted_lens
        ``(B,)``, the evicted span of each sequence: keys from position ``evicted_starts[b]`` on are
        stored ``evicted_lens[b]`` slots further on.
    key_starts
        ``(B,)``: keys before this one are not visible.
    tree_lens
        ``(B,)``: how many of the last keys `tree_mask` decides about; 0: the sequence has no
        mask. None: `query_lens`.
    rope_table, interleaved, rotary_start
        Rotate each key by its position before the score, see `rotate_keys`.
    tree_positions
        ``(B, C)``: the positions that rotate the keys which `tree_mask` decides about.

    Returns
    -------
    out ``(T, Hq, Dv)``, lse ``(T, Hq)``
        Unrounded; zeros in the rows that belong to no sequence.
    faults
        By argument, as (position, value): pages past the end that a query would have seen, each
        once, by position in the flattened table; lengths past the table; query lengths past the
        rows.
    """
    keys, page_size = _rows_of_slots(k_cache, layout, k_scale, k_scale_cache)
    values, _ = _rows_of_slots(v_cache, layout, v_scale, v_scale_cache)
    queries = decode(query, format_of(query))
    (rows, query_heads, width), max_pages = query.shape, block_table.shape[1]
    group = query_heads // keys.shape[1]
    scaling = 1 / np.sqrt(width) if sm_scale is None else sm_scale
    logits = None if sinks is None else sinks.astype(np.float64)
    appended = [1] * len(seq_lens) if query_lens is None else query_lens.tolist()

    out = np.zeros((rows, query_heads, values.shape[2]))
    lse = np.zeros((rows, query_heads))
    faults: dict[str, Faults] = {"block_table": [], "seq_lens": [], "query_lens": []}
    start = 0
    for sequence, (length, count) in enumerate(zip(seq_lens.tolist(), appended, strict=True)):
        if start + count > rows:
            faults["query_lens"].append((sequence, count))
        evicted_start, evicted_len = (
            (0, 0) if evicted_starts is None or evicted_lens is None
            else (int(evicted_starts[sequence]), int(evicted_lens[sequence]))
        )  # fmt: skip
        own_slots = [p if p < evicted_start else p + evicted_len for p in range(max(length, 0))]
        inside = [slot < max_pages * page_size for slot in own_slots]
        if count > 0 and not all(inside):
            faults["seq_lens"].append((sequence, length))
        new_from = length - count
        nodes = count if tree_lens is None else int(tree_lens[sequence])
        tree_from = length - nodes
        rotary_positions = np.arange(max(length, 0))
        if tree_positions is not None:
            tail = tree_positions[sequence, : min(nodes, tree_positions.shape[1])]
            rotary_positions[tree_from : tree_from + len(tail)] = tail
        first = 0 if key_starts is None else int(key_starts[sequence])
        for token in range(start, min(start + count, rows)):
            position = new_from + token - start
            tree = None if tree_mask is None or not nodes else tree_mask[token]
            slots, visible = [], []
            for key, own_slot in enumerate(own_slots):
                if key < first or not inside[key] or not sees(
                    key, position, tree_from, causal=causal, window=window,
                    first_keys=sink_tokens or 0, tree=tree,
                ):  # fmt: skip
                    continue
                entry, offset = divmod(own_slot, page_size)
                page = int(block_table[sequence, entry])
                if page >= len(keys) // page_size:
                    fault = (sequence * max_pages + entry, page)
                    if fault not in faults["block_table"]:
                        faults["block_table"].append(fault)
                elif page >= 0:
                    slots.append(page * page_size + offset)
                    visible.append(key)
            rows_of_keys = keys[slots]
            if rope_table is not None:
                rows_of_keys = rotate_keys(
                    rows_of_keys, rope_table, rotary_positions[visible],
                    interleaved=interleaved, start=rotary_start,
                )  # fmt: skip
            for head in range(query_heads):
                scores = rows_of_keys[:, head // group] @ queries[token, head] * scaling
                if logits_soft_cap is not None:
                    scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
                sink = None if logits is None else float(logits[head])
                out[token, head], lse[token, head] = _attend(
                    scores, values[slots, head // group], sink
                )
        start += count
    return out, lse, faults


def merge_states(
    out_a: Array,
    lse_a: Array,
    out_b: Array | None = None,
    lse_b: Array | None = None,
    *,
    lse_base: str = "e",
) -> tuple[Float64, Float64]:
    """Return the attention over several sets of keys, from the attention over each of them.

    A state whose lse is minus infinity saw no key: its output is ignored, whatever it holds.

    Parameters
    ----------
    out_a, lse_a, out_b, lse_b
        Two states, ``(T, Hq, Dv)`` and ``(T, Hq)``; or N of them in the first two, ``(N, ...)``.
    lse_base
        ``"e"`` or ``"2"``, of the logarithms in and out.

    Returns
    -------
    out ``(T, Hq, Dv)``, lse ``(T, Hq)``, unrounded
    """
    if out_b is None or lse_b is None:
        outs, logarithms = list(out_a), list(lse_a)
    else:
        outs, logarithms = [out_a, out_b], [lse_a, lse_b]
    to_natural = np.log(2.0) if lse_base == "2" else 1.0
    out, lse = np.zeros(outs[0].shape), np.zeros(outs[0].shape[:2])
    for token, head in np.ndindex(lse.shape):
        natural = [float(lse_of[token, head]) * to_natural for lse_of in logarithms]
        states = [state for state, value in enumerate(natural) if value != -np.inf]
        rows = np.zeros((len(states), out.shape[2]))
        for i, state in enumerate(states):
            row = outs[state][token, head]
            rows[i] = decode(row, format_of(row))
        with np.errstate(invalid="ignore"):  # an infinity minus itself
            out[token, head], total = _attend(np.array([natural[s] for s in states]), rows)
        lse[token, head] = total / to_natural
    return out, lse
