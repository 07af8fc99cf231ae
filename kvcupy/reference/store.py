"""Store rows of K, V and states in their slots, quantised where a cache is; gather; copy pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from .formats import LIMIT, Array, Float32, bits_of, decode, encode, format_of
from .four_bit import FourBitRows, dequantise_rows, quantise_rows

Rows = Array | FourBitRows
Scale = float | Array | None
Faults = list[tuple[int, int]]

#: Dynamic scales never divide by a smaller absolute maximum than this.
SMALLEST_ABSMAX = np.float32(1e-6)


def dynamic_scales(rows: Float32, fmt: str) -> Float32:
    """Return the scale of each row ``(..., D)``: `max(absmax, 1e-6) / limit`, in float32.

    NaN elements do not count, and an infinity counts as the largest float32, so that a scale is
    always finite and positive.
    """
    magnitude = np.where(np.isnan(rows), np.float32(0), np.abs(rows))
    magnitude = np.minimum(magnitude, np.finfo(np.float32).max)
    absmax = np.maximum(magnitude.max(axis=-1), SMALLEST_ABSMAX)
    return np.asarray(absmax / np.float32(LIMIT[fmt]), np.float32)


def divide(rows: Float32, scales: Float32) -> Float32:
    """Divide each row by its scale: one float32 division per element, rounded to nearest."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(rows / scales[..., None], np.float32)


def scaled(rows: Rows, scales: Array | None) -> Float32:
    """Multiply stored rows by their scales, None for 1: one float32 multiplication per element."""
    if isinstance(rows, FourBitRows):
        return dequantise_rows(rows, scales)
    stored = decode(rows, format_of(rows)).astype(np.float32)  # exact: float32 holds every format
    if scales is None:
        return stored
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(stored * scales[..., None], np.float32)


def write_rounded(values: Array, target: Array) -> None:
    """Write values to `target`, rounded to its format."""
    fmt = format_of(target)
    bits_of(target, fmt)[...] = bits_of(encode(values, fmt), fmt)


def row_format(rows: Rows) -> str:
    """Return the number format of rows."""
    return rows.encoding if isinstance(rows, FourBitRows) else format_of(rows)


def copy_bits(source: Rows, target: Rows) -> None:
    """Copy elements between arrays of one format."""
    if isinstance(target, FourBitRows):
        assert isinstance(source, FourBitRows)
        target[...] = source
        return
    assert not isinstance(source, FourBitRows)
    fmt = format_of(source)
    bits_of(target, fmt)[...] = bits_of(source, fmt)


def scale_per_head(scale: Scale, num_heads: int) -> Float32:
    """Broadcast None, a float, or an array of one or `num_heads` elements over the heads."""
    values = np.asarray(1.0 if scale is None else scale, np.float32).reshape(-1)
    return np.broadcast_to(values, (num_heads,))


def _store_rows(
    rows: Rows, cache: Rows, where: tuple[Array, ...], scales: Float32, scale_rows: Array | None
) -> Array | None:
    """Write tokens `rows` (n, H, D) to their slots `where` in `cache`; return scales to record.

    With `scale_rows` (n, H), the scales come from the rows themselves.
    """
    if row_format(rows) == row_format(cache):  # the bits are copied, unscaled
        _copy_to(cache, where, rows)
        return None if scale_rows is None else np.ones_like(scale_rows)
    x = scaled(rows, None)
    if isinstance(cache, FourBitRows):
        stored = cache[where]
        quantise_rows(x, stored, np.broadcast_to(scales, x.shape[:-1]))
        cache[where] = stored
        return None
    fmt = format_of(cache)
    if scale_rows is not None:
        scales = dynamic_scales(x, fmt)
    bits_of(cache, fmt)[where] = bits_of(encode(divide(x, scales), fmt), fmt)
    return None if scale_rows is None else scales


def _copy_to(target: Rows, where: Any, rows: Rows) -> None:
    """Copy the bits of rows to some places of an array of their format."""
    if isinstance(target, FourBitRows):
        assert isinstance(rows, FourBitRows)
        target[where] = rows
        return
    assert not isinstance(rows, FourBitRows)
    fmt = format_of(target)
    bits_of(target, fmt)[where] = bits_of(rows, fmt)


def with_heads(rows: Any) -> Any:
    """Return rows (T, width) with a head axis of one."""
    return rows if rows.ndim > 2 else rows[:, None]


def slots_of(cache: Any, slots: Array, layout: str = "NHD") -> tuple[Any, tuple[Array, ...]]:
    """Return a view of a cache that `slots`, and what indexes its (n, H, D) elements there."""
    if cache.ndim < 4:
        return with_heads(cache), (slots,)
    pages = cache if layout == "NHD" else cache.swapaxes(1, 2)
    return pages, np.divmod(slots, pages.shape[1])


def num_slots(cache: Rows, layout: str = "NHD") -> int:
    """Return how many tokens a cache of 2, 3 or 4 dimensions has slots for."""
    if cache.ndim < 4:
        return int(cache.shape[0])
    return int(cache.shape[0] * cache.shape[1 if layout == "NHD" else 2])


def split_slots(
    slot_mapping: Array, num_slots: int, skip_slot: int | None
) -> tuple[Array, Array, Faults]:
    """Return tokens and slots to write, and (token, slot) past the end; drop the skipped."""
    taken = slot_mapping >= 0
    if skip_slot is not None:
        taken &= slot_mapping != skip_slot
    tokens = np.flatnonzero(taken)
    slots = slot_mapping[tokens]
    past = slots >= num_slots
    faults = list(zip(tokens[past].tolist(), slots[past].tolist(), strict=True))
    return tokens[~past], slots[~past], faults


def split_pages(
    src_pages: Array, dst_pages: Array, ends: tuple[int, int]
) -> tuple[list[tuple[int, int]], tuple[Faults, Faults]]:
    """Split pairs of pages into those to copy and, by position, pages past the end of each pool.

    Pairs with a negative page are dropped; one of two pages past the end counts for the first.
    """
    pairs: list[tuple[int, int]] = []
    faults: tuple[Faults, Faults] = ([], [])  # of src_pages, of dst_pages
    for position, pair in enumerate(zip(src_pages.tolist(), dst_pages.tolist(), strict=True)):
        if min(pair) < 0:
            continue
        past = [page >= end for page, end in zip(pair, ends, strict=True)]
        if any(past):
            side = past.index(True)
            faults[side].append((position, pair[side]))
        else:
            pairs.append(pair)
    return pairs, faults


def store_kv(
    key: Rows,
    value: Rows,
    k_cache: Rows,
    v_cache: Rows,
    slot_mapping: Array,
    *,
    layout: str = "NHD",
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scale_cache: Array | None = None,
    v_scale_cache: Array | None = None,
    skip_slot: int | None = None,
) -> Faults:
    """Write the rows of K and V to their slots, in place; return (position, slot) past the end.

    Arguments are as in `kvcupy.store_kv`; caches of a four-bit format are `FourBitRows`, and scale
    each block of elements themselves.
    """
    tokens, slots, faults = split_slots(slot_mapping, num_slots(k_cache, layout), skip_slot)
    operands = ((key, k_cache, k_scale, k_scale_cache), (value, v_cache, v_scale, v_scale_cache))
    for rows, cache, scale, scale_cache in operands:
        pages, where = slots_of(cache, slots, layout)
        scales = scale_per_head(scale, with_heads(rows).shape[1])
        scale_rows = None if scale_cache is None else scale_cache[slots]
        written = _store_rows(with_heads(rows)[tokens], pages, where, scales, scale_rows)
        if scale_cache is not None and written is not None:
            scale_cache[slots] = written
    return faults


def store_mla(
    latent: Rows,
    rope_key: Rows,
    cache: Rows,
    slot_mapping: Array,
    *,
    scale: Scale = None,
    skip_slot: int | None = None,
) -> Faults:
    """Write a latent ``(T, R)`` and its rotated key ``(T, P)`` side by side, in place.

    The cache is ``(num_slots, R + P)`` or ``(num_pages, page_size, R + P)``, with one scale for
    both parts. Slots, `skip_slot` and the faults returned are as in `store_kv`.
    """
    heads: Any = cache[:, :, None] if cache.ndim == 3 else cache[:, None]
    tokens, slots, faults = split_slots(slot_mapping, num_slots(heads), skip_slot)
    pages, where = slots_of(heads, slots)
    rank = latent.shape[1]
    if isinstance(pages, FourBitRows):
        parts = pages.columns(0, rank), pages.columns(rank, pages.shape[-1])
    else:
        parts = pages[..., :rank], pages[..., rank:]
    for rows, part in zip((latent, rope_key), parts, strict=True):
        _store_rows(with_heads(rows)[tokens], part, where, scale_per_head(scale, 1), None)
    return faults


def gather_kv(
    k_cache: Rows,
    v_cache: Rows,
    slots: Array,
    *,
    k_out: Rows,
    v_out: Rows,
    layout: str = "NHD",
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scale_cache: Array | None = None,
    v_scale_cache: Array | None = None,
) -> Faults:
    """Gather the rows of K and V at `slots`, dequantised; return (position, slot) past the end.

    Rows are `stored * scale`, one float32 multiplication, rounded once to the output's format;
    where that is the cache's own format, bits are copied. Rows of negative slots, and of slots
    past the end, are left unchanged. Arguments are as in `kvcupy.gather_kv`.
    """
    tokens, chosen, faults = split_slots(slots, num_slots(k_cache, layout), None)
    operands = ((k_cache, k_out, k_scale, k_scale_cache), (v_cache, v_out, v_scale, v_scale_cache))
    for cache, out, scale, scale_cache in operands:
        pages, where = slots_of(cache, chosen, layout)
        rows, target = pages[where], with_heads(out)
        if row_format(rows) != row_format(target):
            assert not isinstance(target, FourBitRows)
            factors = scale_per_head(scale, rows.shape[1])
            if scale_cache is not None:
                factors = scale_cache[chosen]
            fmt = format_of(target)
            values = scaled(rows, np.broadcast_to(factors, rows.shape[:-1]))
            rows = encode(values, fmt).view(target.dtype)
        _copy_to(target, tokens, rows)
    return faults


def copy_pages(
    cache: Array | tuple[Array, ...], src_pages: Array, dst_pages: Array
) -> tuple[Faults, Faults]:
    """Copy all bytes of page ``src_pages[i]`` to page ``dst_pages[i]``, in place.

    Pages are the first axis of the array, or of each of a tuple of arrays. Pairs with a negative
    page are skipped. Return (position, page) past the end, of `src_pages` and of `dst_pages`.
    """
    arrays = _as_tuple(cache)
    pairs, faults = split_pages(src_pages, dst_pages, (len(arrays[0]), len(arrays[0])))
    for src, dst in pairs:
        for array in arrays:
            array[dst] = array[src]
    return faults


def store_state(
    states: Array | tuple[Array, ...], caches: Array | tuple[Array, ...], slots: Array, *,
    skip_slot: int | None = None,
) -> Faults:  # fmt: skip
    """Copy row ``states[i]`` to slot ``slots[i]`` of a cache, in place; of each array of a tuple.

    Negative slots and `skip_slot` write nothing. Return (position, slot) past the end.
    """
    faults: Faults = []
    for rows, cache in zip(_as_tuple(states), _as_tuple(caches), strict=True):
        tokens, chosen, faults = split_slots(slots, len(cache), skip_slot)
        cache[chosen] = rows[tokens]
    return faults


def gather_state(
    caches: Array | tuple[Array, ...], slots: Array, *, out: Array | tuple[Array, ...],
    skip_slot: int | None = None,
) -> Faults:  # fmt: skip
    """Copy slot ``slots[i]`` of a cache to row ``out[i]``; of each array of a tuple.

    Rows of negative slots, of `skip_slot` and of slots past the end become zeros. Return (position,
    slot) past the end.
    """
    faults: Faults = []
    for cache, rows in zip(_as_tuple(caches), _as_tuple(out), strict=True):
        tokens, chosen, faults = split_slots(slots, len(cache), skip_slot)
        rows[...] = 0
        rows[tokens] = cache[chosen]
    return faults


def update_conv_state(
    x: Array, cache: Array, slots: Array, cu_query_lens: Array, *, skip_slot: int | None = None
) -> tuple[Faults, Faults]:
    """Append the tokens of each sequence to its slot, which keeps the last ones, in place.

    Arguments are as in `kvcupy.update_conv_state`. Return (position, slot) past the end, and
    (position, sum) of sums outside `x` or before the one before them; their sequences are skipped.
    """
    sequences, _, past = split_slots(slots, len(cache), skip_slot)
    misplaced: Faults = []
    for i in sequences.tolist():
        start, end = cu_query_lens[i : i + 2].tolist()
        if not 0 <= start <= len(x):
            misplaced.append((i, start))
        elif not start <= end <= len(x):
            misplaced.append((i + 1, end))
        elif start < end:
            inputs = np.concatenate([cache[slots[i]], x[start:end].T], axis=1)
            cache[slots[i]] = inputs[:, inputs.shape[1] - cache.shape[2] :]
    return past, misplaced


def _as_tuple(arrays: Array | tuple[Array, ...]) -> tuple[Array, ...]:
    return arrays if isinstance(arrays, tuple) else (arrays,)
