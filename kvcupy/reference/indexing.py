"""Slot mappings and page tables, computed from block tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .formats import Array
from .store import Faults

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
    slots = np.empty(int(append_lens.sum()), np.int64)
    fill_slot_mapping(block_table, seq_lens, append_lens, page_size, slots)
    return slots


def fill_slot_mapping(
    block_table: Array, seq_lens: Array, append_lens: Array, page_size: int, out: Array
) -> tuple[Faults, Faults]:
    """Write the slots of `slot_mapping` to `out`, int64, whatever the numbers are.

    A token that has no page, or whose page is negative, gets -1, and so does what is left of `out`.
    Slots are at most the largest int64.

    Returns
    -------
    list of (sequence, length), list of (sequence, appended)
        For each token that has no entry in the table, the length of its sequence; and sequences
        that append a negative number, or more than `out` has room for.
    """
    past: Faults = []
    misfits: Faults = []
    out[...] = -1
    first = 0
    for b, (length, appended) in enumerate(
        zip(seq_lens.tolist(), append_lens.tolist(), strict=True)
    ):
        own = out[first : first + max(appended, 0)]
        start = max(length, -1) - max(appended, 0)
        if len(own) != appended:
            misfits.append((b, appended))
        for i in range(len(own)):
            entry, offset = divmod(start + i, page_size)
            if not 0 <= entry < block_table.shape[1]:
                past.append((b, length))
                continue
            page = int(block_table[b, entry])
            own[i] = -1 if page < 0 else min(page * page_size + offset, 2**63 - 1)
        first += len(own)
    return past, misfits


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
