"""Attention over paged sequences, and merging states of it.

Everything is float64, from the exact values of the formats to the results, which are not rounded.
"""

from __future__ import annotations

import numpy as np

from .formats import Array, Float64, decode, format_of
from .rope import rotate_values
from .store import Faults, Rows, Scale, scale_per_head, scaled, slots_of


def _rows_at(
    cache: Rows, slots: Array, layout: str, scale: Scale, scale_cache: Array | None
) -> Float64:
    """Return the values of some slots of a paged cache, (n, H, D)."""
    pages, where = slots_of(cache, slots, layout)
    scales = scale_per_head(scale, pages.shape[2]) if scale_cache is None else scale_cache[slots]
    rows = pages[where]
    return scaled(rows, np.broadcast_to(scales, rows.shape[:-1])).astype(np.float64)


def rotate_keys(
    rows: Float64, table: Array, positions: Array, *, interleaved: bool = False, start: int = 0
) -> Float64:
    """Return keys ``(n, H, D)`` rotated by their positions ``(n,)``, clamped to the table."""
    pairs = table.shape[1] // 2
    angles = table[np.clip(positions, 0, len(table) - 1)].astype(np.float64)[:, None]
    cosine, sine = angles[..., :pairs], angles[..., pairs:]
    return rotate_values(rows, cosine, sine, interleaved=interleaved, start=start)


def sees(
    key: Array,
    position: Array,
    new_from: int,
    *,
    causal: bool = True,
    window: int | None = None,
    first_keys: int = 0,
    tree: Array | None = None,
    tree_positions: Array | None = None,
) -> Array:
    """Return which queries of a sequence see which keys, ``(T, n)``.

    A query before the first position sees nothing, unless nothing depends on positions.

    Parameters
    ----------
    key : the positions of keys, ``(n,)``
    position : the positions of queries, ``(T, 1)``
    new_from : the first key that a tree mask is about: the position of the first query of the
        sequence, or one before it
    window, first_keys : keys at ``position - window`` and before are hidden, except the first ones
    tree : the rows of the tree mask, ``tree[t, c]`` for query t and the new key c. It alone decides
        about new keys; those past its end are hidden.
    tree_positions : the positions of keys where new ones are nodes of a tree, ``(n,)``, by which
        the window hides new keys too, except first ones
    """
    seen = np.ones((len(position), len(key)), bool)
    if window is not None:
        seen &= (key > position - window) | (key < first_keys)
    if causal and tree is None:
        seen &= key <= position
    if tree is not None:
        in_tree = np.zeros_like(seen)
        columns = key - new_from
        new = (columns >= 0) & (columns < tree.shape[1])
        in_tree[:, new] = tree[:, columns[new]]
        if window is not None and tree_positions is not None:
            in_tree &= (tree_positions > position - window) | (tree_positions < first_keys)
        seen = np.where(columns >= 0, in_tree, seen)
    if causal or window is not None or tree is not None:
        seen &= position >= 0
    return seen


def _in_tree(keys: Array, tree_from: int, tail: Array | None) -> Array:
    """Return the positions of keys: `tail` from `tree_from` on, elsewhere their numbers."""
    positions = keys.copy()
    if tail is not None:
        new = (keys >= tree_from) & (keys < tree_from + len(tail))
        positions[new] = tail[keys[new] - tree_from]
    return positions


def _attend(
    scores: Float64, values: Float64, visible: Array, sinks: Float64 | None = None
) -> tuple[Float64, Float64]:
    """Return values averaged by the softmax of scores, and the log-sum-exp.

    Scores are ``(H, T, G, n)``, of the G query heads that read KV head h, and values ``(n, H,
    Dv)``. What a query does not see (`visible`, ``(T, n)``) counts for nothing, even NaN. `sinks`
    are logits that join the denominator, ``(H, 1, G)``.
    """
    scores = np.where(visible[:, None], scores, -np.inf)
    largest = scores.max(axis=-1, initial=-np.inf)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    origin = np.where(largest == -np.inf, 0.0, largest)  # else minus infinity less itself
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.exp(scores - origin[..., None])
        total = weights.sum(axis=-1)
        if sinks is not None:
            total = total + np.exp(sinks - origin)
        lse = origin + np.log(total)
        weights /= np.where(total == 0, 1.0, total)[..., None]
        by_head = values.transpose(1, 0, 2)
        if np.isfinite(values).all():
            out = weights @ by_head[:, None]
        else:  # nothing is multiplied by a weight of zero that stands for an unseen key
            out = np.stack(
                [weights[:, t][..., keys] @ by_head[:, keys] for t, keys in enumerate(visible)],
                axis=1,
            )
        return np.where((total == 0)[..., None], 0.0, out), np.asarray(lse)


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

    Arguments are as in `kvcupy.paged_attention`; a step of a cache has further ones:

    - evicted_starts, evicted_lens ``(B,)``: keys from position ``evicted_starts[b]`` on are stored
      ``evicted_lens[b]`` slots further on
    - key_starts ``(B,)``: keys before this one are not visible
    - tree_lens ``(B,)``: how many of the last keys `tree_mask` decides about; 0: the sequence has
      no mask. None: `query_lens`
    - rope_table, interleaved, rotary_start: rotate each key by its position, see `rotate_keys`
    - tree_positions ``(B, C)``: the positions that rotate the keys which `tree_mask` decides about

    Return out ``(T, Hq, Dv)`` and lse ``(T, Hq)``, unrounded, zeros in rows that belong to no
    sequence; and by argument (position, value) of what is past the end.
    """
    pages = k_cache if layout == "NHD" else k_cache.swapaxes(1, 2)
    num_pages, page_size, heads = pages.shape[:3]
    queries = decode(query, format_of(query))
    (rows, query_heads, width), max_pages = query.shape, block_table.shape[1]
    scaling = 1 / np.sqrt(width) if sm_scale is None else sm_scale
    logits = None if sinks is None else sinks.astype(np.float64).reshape(heads, 1, -1)
    appended = [1] * len(seq_lens) if query_lens is None else query_lens.tolist()

    out = np.zeros((rows, query_heads, v_cache.shape[-1]))
    lse = np.zeros((rows, query_heads))
    faults: dict[str, Faults] = {"block_table": [], "seq_lens": [], "query_lens": []}
    start = 0
    for sequence, (length, count) in enumerate(zip(seq_lens.tolist(), appended, strict=True)):
        if start + count > rows or count < 0:
            faults["query_lens"].append((sequence, count))
        count = min(max(count, 0), rows - start)
        tokens = slice(start, start + count)
        start = tokens.stop
        if tokens.start == tokens.stop:
            continue
        evicted_start, evicted_len = (
            (0, 0) if evicted_starts is None or evicted_lens is None
            else (max(int(evicted_starts[sequence]), 0), max(int(evicted_lens[sequence]), 0))
        )  # fmt: skip
        # A length past the table is a fault; all keys that the table has room for are looked at.
        keys = np.arange(min(max(length, 0), max_pages * page_size + 1))
        slots = np.where(keys < evicted_start, keys, keys + evicted_len)
        inside = slots < max_pages * page_size
        if not inside.all():
            faults["seq_lens"].append((sequence, length))
        length, keys, slots = max(length, -1), keys[inside], slots[inside]
        new_from = length - count
        nodes = count if tree_lens is None else max(int(tree_lens[sequence]), 0)
        tree_from = length - nodes
        positions = new_from + np.arange(tokens.stop - tokens.start)[:, None]
        tail = None
        if tree_positions is not None and nodes:
            tail = tree_positions[sequence, : min(nodes, tree_positions.shape[1])]
        key_positions = _in_tree(keys, tree_from, tail)
        if tail is not None and window is not None:
            first = max(tree_from, 0)
            placed = _in_tree(positions, tree_from, tail).clip(first, length - 1)
            positions = np.where(positions < first, positions, placed)
        visible = sees(
            keys, positions, tree_from, causal=causal, window=window, first_keys=sink_tokens or 0,
            tree=None if tree_mask is None or not nodes else tree_mask[tokens],
            tree_positions=None if tail is None else key_positions,
        )  # fmt: skip
        if key_starts is not None:
            visible &= keys >= int(key_starts[sequence])
        entries = slots // page_size
        page = block_table[sequence, entries].astype(np.int64)
        for entry in np.unique(entries[visible.any(axis=0) & (page >= num_pages)]).tolist():
            fault = sequence * max_pages + entry, int(block_table[sequence, entry])
            faults["block_table"].append(fault)
        visible &= (page >= 0) & (page < num_pages)
        used = visible.any(axis=0)
        keys, key_positions, visible = keys[used], key_positions[used], visible[:, used]
        slots = page[used] * page_size + slots[used] % page_size
        rows_of_keys = _rows_at(k_cache, slots, layout, k_scale, k_scale_cache)
        values = _rows_at(v_cache, slots, layout, v_scale, v_scale_cache)
        if rope_table is not None:
            rows_of_keys = rotate_keys(
                rows_of_keys, rope_table, key_positions,
                interleaved=interleaved, start=rotary_start,
            )  # fmt: skip
        grouped = queries[tokens].reshape(len(positions), heads, -1, width).swapaxes(0, 1)
        with np.errstate(invalid="ignore", over="ignore"):
            scores = grouped @ rows_of_keys.transpose(1, 2, 0)[:, None] * scaling
            if logits_soft_cap is not None:
                scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
        own_out, own_lse = _attend(scores, values, visible, logits)
        out[tokens] = own_out.swapaxes(0, 1).reshape(out[tokens].shape)
        lse[tokens] = own_lse.swapaxes(0, 1).reshape(lse[tokens].shape)
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
    Arguments are as in `kvcupy.merge_states`; results are unrounded.
    """
    if out_b is None or lse_b is None:
        outs, logarithms = list(out_a), list(lse_a)
    else:
        outs, logarithms = [out_a, out_b], [lse_a, lse_b]
    to_natural = np.log(2.0) if lse_base == "2" else 1.0
    natural = np.stack(logarithms).astype(np.float64) * to_natural
    seen = natural != -np.inf
    largest = natural.max(axis=0)
    origin = np.where(largest == -np.inf, 0.0, largest)
    with np.errstate(invalid="ignore", divide="ignore"):  # an infinity minus itself
        weights = np.where(seen, np.exp(natural - origin), 0.0)
        total = weights.sum(axis=0)
        weights /= np.where(total == 0, 1.0, total)
        out = np.zeros(outs[0].shape)
        for state, weight, is_seen in zip(outs, weights, seen, strict=True):
            rows = decode(state, format_of(state))
            out += np.where(is_seen[..., None], weight[..., None] * rows, 0.0)
        return out, np.asarray((origin + np.log(total)) / to_natural)
