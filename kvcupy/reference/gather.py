"""Reading rows of a cache by slot, and copying whole pages."""

from __future__ import annotations

import numpy as np

from .formats import Array, Float32, bits_of, decode, encode, format_of
from .store import Faults, Scale, num_slots, scale_per_head, slot_row, split_slots


def _gather_row(row: Array, target: Array, scales: Float32) -> None:
    """Write one token, `row` (H, D) of a cache, to `target`, multiplied by its scales."""
    source, destination = format_of(row), format_of(target)
    if source == destination:  # the bits are copied, unscaled
        bits_of(target, destination)[...] = bits_of(row, source)
        return
    stored = decode(row, source).astype(np.float32)  # exact: float32 holds every format here
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = np.asarray(stored * scales[:, None], np.float32)
    bits_of(target, destination)[...] = bits_of(encode(values, destination), destination)


def gather_kv(
    k_cache: Array,
    v_cache: Array,
    slots: Array,
    *,
    k_out: Array,
    v_out: Array,
    layout: str = "NHD",
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scale_cache: Array | None = None,
    v_scale_cache: Array | None = None,
) -> Faults:
    """Gather the rows of K and V at `slots`, dequantised, into the outputs.

    Rows are `stored * scale`, one float32 multiplication, rounded once to the output's format;
    where that is the cache's own format, bits are copied. Rows of negative slots, and of slots
    past the end, are left as they are. Shapes and scales are those of `store_kv`, with outputs
    ``(T, H, D)`` and ``(T, H, Dv)``, or ``(T, width)``.

    Returns
    -------
    list of (position, slot)
        The slots past the end.
    """
    reads, faults = split_slots(slots, num_slots(k_cache, layout), None)
    operands = ((k_cache, k_out, k_scale, k_scale_cache), (v_cache, v_out, v_scale, v_scale_cache))
    for cache, out, scale, scale_cache in operands:
        scales = scale_per_head(scale, out.shape[1] if out.ndim == 3 else 1)
        for token, slot in reads:
            row, target = slot_row(cache, slot, layout), np.atleast_2d(out[token])
            _gather_row(row, target, scales if scale_cache is None else scale_cache[slot])
    return faults


def copy_pages(
    cache: Array | tuple[Array, ...], src_pages: Array, dst_pages: Array
) -> tuple[Faults, Faults]:
    """Copy all bytes of page ``src_pages[i]`` to page ``dst_pages[i]``, in place.

    Pages are the first axis of the array, or of each of a tuple of arrays. Pairs with a negative
    page are skipped, and so are pairs with a page past the end. No page may be both read and
    written, or written twice.

    Returns
    -------
    list of (position, page), list of (position, page)
        The pages past the end, of `src_pages` and of `dst_pages`.
    """
    arrays = cache if isinstance(cache, tuple) else (cache,)
    num_pages = arrays[0].shape[0]
    faults: tuple[Faults, Faults] = ([], [])  # of src_pages, of dst_pages
    for position, pages in enumerate(zip(src_pages.tolist(), dst_pages.tolist(), strict=True)):
        if min(pages) < 0:
            continue
        for some, page in zip(faults, pages, strict=True):
            if page >= num_pages:
                some.append((position, page))
        if max(pages) < num_pages:
            for array in arrays:
                array[pages[1]] = array[pages[0]]
    return faults
