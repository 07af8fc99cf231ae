"""Pages: slot mappings and page tables from block tables, and copies between pools.

Pages of layers are converted on the way where the formats of the pools differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


def slot_mapping(block_table: Array, seq_lens: Array, append_lens: Array, page_size: int) -> Int64:
    """Return the slots of the last ``append_lens[b]`` tokens of each sequence, in order."""
    slots = np.empty(int(append_lens.sum()), np.int64)
    fill_slot_mapping(block_table, seq_lens, append_lens, page_size, slots)
    return slots


def fill_slot_mapping(
    block_table: Array, seq_lens: Array, append_lens: Array, page_size: int, out: Array
) -> tuple[Faults, Faults]:
    """Write the slots of `slot_mapping` to `out`, int64, whatever the numbers are.

    A token that has no page, or whose page is negative, gets -1, and so does what is left of `out`.
    Slots are at most the largest int64. Return (sequence, length) for each token that has no entry
    in the table, and (sequence, appended) of those that append a negative number, or more than
    `out` has room for.
    """
    past: Faults = []
    misfits: Faults = []
    out[...] = -1
    first = 0
    for b, (length, appended) in enumerate(
        zip(seq_lens.tolist(), append_lens.tolist(), strict=True)
    ):
        slots = out[first : first + max(appended, 0)]
        start = max(length, -1) - max(appended, 0)
        if len(slots) != appended:
            misfits.append((b, appended))
        for i in range(len(slots)):
            entry, offset = divmod(start + i, page_size)
            if not 0 <= entry < block_table.shape[1]:
                past.append((b, length))
                continue
            page = int(block_table[b, entry])
            slots[i] = -1 if page < 0 else min(page * page_size + offset, 2**63 - 1)
        first += len(slots)
    return past, misfits


def page_table_csr(
    block_table: Array, seq_lens: Array, page_size: int
) -> tuple[Int32, Int32, Int32]:
    """Return `indptr`, `indices` and `last_page_len`, the page table in FlashInfer's form.

    Sequence b has the pages ``indices[indptr[b]:indptr[b + 1]]``, and ``last_page_len[b]`` tokens
    in the last one: from 1 to `page_size`, or 0 for an empty sequence, which has no page.
    """
    indptr, indices, last = [0], [], []
    for pages, tokens in zip(block_table, seq_lens.tolist(), strict=True):
        used = -(-tokens // page_size)
        indices += [int(page) for page in pages[:used]]
        indptr.append(len(indices))
        last.append(tokens - (used - 1) * page_size if used else 0)
    return np.array(indptr, np.int32), np.array(indices, np.int32), np.array(last, np.int32)


def find_duplicate_slots(slot_mapping: Array) -> Int64:
    """Return the slots, padding aside, that occur more than once, in ascending order."""
    slots, counts = np.unique(slot_mapping[slot_mapping >= 0], return_counts=True)
    return slots[counts > 1].astype(np.int64)


def _convert_page(
    page: Rows, target: Rows, scales: Array | None, target_scales: Array | None
) -> None:
    """Write one page of one layer, (page_size, H, D), to `target`, of another format.

    `scales` (page_size, H) are what the elements of `page` are multiplied by, None for 1;
    `target_scales` (page_size, H) receive the scales of `target`, None for 1.
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
    if row_format(src) == row_format(dst):  # the bits are copied, with the scales
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
    """Write page ``src_pages[i]`` of some layers of `src` to page ``dst_pages[i]`` of `dst`.

    `src` and `dst` are K and V, or one latent, each ``(layers, pages, page_size, H, D)``, of any
    strides; where their formats differ, elements are converted. Scales, float32 ``(layers, pages,
    page_size, H)``, are read or written for each; those written come from the row itself, as in
    `store_kv`. Return (position, page) past the end, of `src_pages` and of `dst_pages`.
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
