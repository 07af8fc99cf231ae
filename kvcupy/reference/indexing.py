"""Slot mappings and page tables, computed from block tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .formats import Array

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


def slot_mapping(block_table: Array, seq_lens: Array, append_lens: Array, page_size: int) -> Int64:
    """Return the slots of the last ``append_lens[b]`` tokens of each sequence b, one after another.

    Parameters
    ----------
    block_table
        ``(B, max_pages)``, the pages of each sequence in order; entries past its last page are
        not read.
    seq_lens
        ``(B,)``, in tokens, appended ones included.
    """
    slots = []
    for pages, length, appended in zip(block_table, seq_lens, append_lens, strict=True):
        for token in range(int(length) - int(appended), int(length)):
            slots.append(int(pages[token // page_size]) * page_size + token % page_size)
    return np.array(slots, np.int64)


def page_table_csr(
    block_table: Array, seq_lens: Array, page_size: int
) -> tuple[Int32, Int32, Int32]:
    """Return `indptr`, `indices` and `last_page_len`, the page table as FlashInfer takes it.

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
