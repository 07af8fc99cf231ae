"""The slots that FlashInfer's appends write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import require_indices, require_shape


def slots_of(
    batch_indices: Any, positions: Any, kv_indices: Any, kv_indptr: Any, num_pages: int,
    page_size: int, rows: Mapping[str, Tensor], kv_last_page_len: Any = None,
) -> Tensor:  # fmt: skip
    """Return the slot of each token: negative for padding, past the end for one without a page.

    It raises TypeError or ValueError unless the indices fit each other, and `rows` have as many
    tokens.
    """
    require_indices(batch_indices, "batch_indices")
    require_indices(positions, "positions", rows)
    require_indices(kv_indices, "kv_indices")
    require_indices(kv_indptr, "kv_indptr")
    require_shape(positions, "positions", (len(batch_indices),))
    num_sequences, num_entries = len(kv_indptr) - 1, len(kv_indices)
    if kv_last_page_len is not None:
        require_indices(kv_last_page_len, "kv_last_page_len")
        require_shape(kv_last_page_len, "kv_last_page_len", (num_sequences,))
    is_padding = torch.minimum(batch_indices, positions) < 0
    end = num_pages * page_size
    if not num_sequences or not num_entries:
        return torch.where(is_padding, -1, end)
    sequences = batch_indices.clamp(0, num_sequences - 1)
    entries = kv_indptr[sequences] + positions.div(page_size, rounding_mode="floor")
    has_page = (entries < kv_indptr[1:][sequences]) & (batch_indices < num_sequences)
    pages = kv_indices[entries.clamp_(0, num_entries - 1)].long()
    slots = torch.add(positions % page_size, pages, alpha=page_size)
    return torch.where(has_page, slots, end).masked_fill_(is_padding, -1)
