"""Copying pages of layers from one pool to another, converted where the formats differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .formats import Array, format_of
from .four_bit import FourBitRows, quantise_rows
from .store import (
    Faults,
    Rows,
    copy_bits,
    divide,
    dynamic_scales,
    row_format,
    scaled,
    split_pages,
    write_rounded,
)


def _convert_page(
    page: Rows, target: Rows, scales: Array | None, target_scales: Array | None
) -> None:
    """Write one page of one layer, (page_size, H, D), to `target`, of another format.

    `scales` (page_size, H) are what the elements of `page` are multiplied by, None for 1;
    `target_scales` (page_size, H) receive those of `target`, None for 1.
    """
    x = scaled(page, scales)
    divisors = np.ones(x.shape[:-1], np.float32)
    if isinstance(target, FourBitRows):
        quantise_rows(x, target, divisors)
        return
    if target_scales is not None:
        divisors = dynamic_scales(x, format_of(target))
        target_scales[...] = divisors
    write_rounded(divide(x, divisors), target)


def _transfer_page(src: Rows, dst: Rows, scales: Array | None, target_scales: Array | None) -> None:
    """Transfer one page of one layer, ``(page_size, H, D)``, with scales ``(page_size, H)``."""
    if row_format(src) == row_format(dst):  # the bits are copied, those of the scales too
        copy_bits(src, dst)
        if scales is not None and target_scales is not None:
            copy_bits(scales, target_scales)
        return
    _convert_page(src, dst, scales, target_scales)


def transfer_pages(
    src: Sequence[Rows],
    dst: Sequence[Rows],
    src_pages: Array,
    dst_pages: Array,
    *,
    layers: int | Sequence[int] | None = None,
    src_scales: Sequence[Array] | None = None,
    dst_scales: Sequence[Array] | None = None,
) -> tuple[Faults, Faults]:
    """Write page ``src_pages[i]`` of each layer of `src` to page ``dst_pages[i]`` of `dst`.

    Parameters
    ----------
    src, dst
        K and V, or one latent, each ``(layers, pages, page_size, H, D)``, of any strides. The two
        pools may differ in the number of pages, and in format: then elements are converted.
        `FourBitRows` where the format is one of four bits.
    src_pages, dst_pages
        Integers; a pair with a negative page, or with one past the end, is skipped. No page may be
        both read and written, or written twice.
    layers
        None for all, an index, or several, each once.
    src_scales, dst_scales
        float32 ``(layers, pages, page_size, H)``, for each of `src` or of `dst`: what a stored
        element is multiplied by. Scales written come from the row itself, as in `store_kv`.

    Returns
    -------
    list of (position, page), list of (position, page)
        The pages past the end, of `src_pages` and of `dst_pages`.
    """
    chosen = range(src[0].shape[0]) if layers is None else np.atleast_1d(layers).tolist()
    ends = (src[0].shape[1], dst[0].shape[1])
    pairs, faults = split_pages(src_pages, dst_pages, ends)
    for src_page, dst_page in pairs:
        for layer in chosen:
            for part in range(len(src)):
                _transfer_page(
                    src[part][layer, src_page],
                    dst[part][layer, dst_page],
                    None if src_scales is None else src_scales[part][layer, src_page],
                    None if dst_scales is None else dst_scales[part][layer, dst_page],
                )
    return faults
