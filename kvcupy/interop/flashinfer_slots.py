"""Where FlashInfer's appends write: the slot of each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import require_indices, require_shape


def slots_of(
    batch_indices: Tensor, positions: Tensor, kv_indices: Tensor, kv_indptr: Tensor,
    num_pages: int, page_size: int,
) -> Tensor:  # fmt: skip
    """Return the slot of each token: negative for padding, past the end for one without a page."""
    num_sequences = len(kv_indptr) - 1
    sequences, places = batch_indices.long(), positions.long()
    is_padding = (sequences < 0) | (places < 0)
    known = sequences.clamp(0, max(num_sequences - 1, 0))
    if not num_sequences or not len(kv_indices):
        return torch.where(is_padding, -1, num_pages * page_size)
    entries = kv_indptr.long()[known] + places.clamp(min=0) // page_size
    has_page = (sequences < num_sequences) & (entries < kv_indptr.long()[known + 1])
    pages = kv_indices.long()[entries.clamp(0, len(kv_indices) - 1)]
    slots = torch.where(has_page, pages * page_size + places % page_size, num_pages * page_size)
    return slots.masked_fill(is_padding, -1)


def require_append(
    batch_indices: Any, positions: Any, kv_indices: Any, kv_indptr: Any, rows: Mapping[str, Tensor],
    kv_last_page_len: Any = None,
) -> None:  # fmt: skip
    """Raise unless the indices of an append fit each other, and `rows` have as many tokens."""
    require_indices(batch_indices, "batch_indices", {})
    require_indices(positions, "positions", rows)
    require_indices(kv_indices, "kv_indices", {})
    require_indices(kv_indptr, "kv_indptr", {})
    require_shape(positions, "positions", (len(batch_indices),))
    if kv_last_page_len is not None:
        require_indices(kv_last_page_len, "kv_last_page_len", {})
        require_shape(kv_last_page_len, "kv_last_page_len", (len(kv_indptr) - 1,))
