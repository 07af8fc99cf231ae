"""Calls that several peers have: transfers of rows as bytes, and merges of states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import ArrayView, view
from ..cache.pool import KVPool, MLAPool
from ..formats import Method
from ..ops.transfer import transfer_pages
from . import describe_tensor, require_indices, require_shape
from . import torch as _kv


def rows_of(
    x: Any, name: str, item_size: int, layer: int = 0, row_bytes: int | None = None, *,
    size_name: str = "item_size",
) -> ArrayView:  # fmt: skip
    """View a tensor as pages of one row of item_size bytes each, which are copied bit for bit.

    With row_bytes these are one layer of page_first memory, (slots, layers, item). `size_name` is
    item_size by the name of the caller's argument.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {describe_tensor(x)}")
    if not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()}")
    row_bytes = item_size if row_bytes is None else row_bytes
    for value, value_name in ((item_size, size_name), (row_bytes, "src_layout_dim")):
        if value < 1:
            raise ValueError(f"{value_name}: expected at least 1, got {value}")
    if not 0 <= layer < row_bytes // item_size:
        raise ValueError(
            f"layer_id: expected 0 to {row_bytes // item_size - 1}, for rows of {row_bytes} bytes "
            f"of layers of {item_size}, got {layer}"
        )
    device = view(x.view(torch.uint8) if x.element_size() == 1 else x).device
    shape = (int(x.numel() * x.element_size()) // row_bytes, 1, 1, item_size)
    return ArrayView(
        x.data_ptr() + layer * item_size, shape, (row_bytes, 0, 0, 1), "int8", device,
        library="torch", owner=x,
    )  # fmt: skip


def transfer_rows(
    src: list[ArrayView], dst: list[ArrayView], src_indices: Tensor, dst_indices: Tensor, *,
    method: Method = "kernel", max_blocks: int | None = None,
) -> None:  # fmt: skip
    """Copy rows of one layer, of K and V or of a latent."""
    require_indices(src_indices, "src_indices")
    require_indices(dst_indices, "dst_indices")
    require_shape(dst_indices, "dst_indices", (len(src_indices),))
    if not len(src_indices):
        return
    # Host memory goes with the GPU's pool.
    device = max({layer.device for layer in (*src, *dst)}, key=lambda name: name != "host")
    src_pool, dst_pool = (
        KVPool.wrap([side[0]], [side[1]], device=device)
        if len(side) == 2
        else MLAPool.wrap(side, device=device)
        for side in (src, dst)
    )
    transfer_pages(
        src_pool, dst_pool, src_indices, dst_indices, method=method, max_blocks=max_blocks
    )


def merge(
    v_a: Any, s_a: Any, v_b: Any, s_b: Any, *,
    names: tuple[str, ...] = ("v_a", "s_a", "v_b", "s_b"), **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Merge two states of attention, (tokens, heads, head_dim) and its log-sum-exp."""
    require_shape(v_a, names[0], ("tokens", "heads", "head_dim"))
    require_shape(s_a, names[1], tuple(v_a.shape[:2]))
    require_shape(v_b, names[2], tuple(v_a.shape))
    require_shape(s_b, names[3], tuple(v_a.shape[:2]))
    return _kv.merge_states(v_a, s_a.float(), v_b, s_b.float(), **options)
