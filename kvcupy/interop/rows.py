"""Transfers of rows as bytes, which SGLang and vLLM have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import devices
from ..arrays import ArrayView, note_written, view
from ..cache.pool import KVPool, MLAPool
from ..formats import Method
from ..ops.launch import require_countable, verified, widest
from ..ops.transfer import prepare
from ..ops.transfer_kernels import Axis, PageLaunch, PagePairs, PageRows, row_launch
from . import describe_tensor, require_indices, require_shape


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
    groups: list[tuple[list[ArrayView], list[ArrayView]]], src_indices: Tensor,
    dst_indices: Tensor, *, method: Method = "kernel", max_blocks: int | None = None,
) -> None:  # fmt: skip
    """Copy rows of groups of sources and targets, each K and V, or layers of rows of one size."""
    _require_pairs(src_indices, dst_indices)
    if not len(src_indices):
        return
    device = _device_of([v for group in groups for side in group for v in side])
    prepared = []
    for group in groups:
        src_pool, dst_pool = (
            KVPool.wrap([side[0]], [side[1]], device=device)
            if len(side) == 2
            else MLAPool.wrap(side, device=device)
            for side in group
        )
        prepared.append(prepare(src_pool, dst_pool, method=method, max_blocks=max_blocks))
    pairs = PagePairs(src_indices, dst_indices)
    for transfer in prepared:
        transfer.issue(pairs, None)


@dataclass(frozen=True)
class Side:
    """One side of `transfer_layers`: where the rows of layers and heads are."""

    # by argument name; K and V, or a latent: rows, or tables of the addresses of layers
    tensors: dict[str, Tensor]
    row_bytes: int  # between rows, and between the layers and heads of a row
    layer_bytes: int = 0
    head_bytes: int = 0
    offset: int = 0  # in bytes, of the first layer
    is_table: bool = False  # whether they are tables

    def views(self) -> list[ArrayView]:
        """Check the tensors, and view them."""
        views = []
        for name, x in self.tensors.items():
            if not self.is_table:
                views.append(rows_of(x, name, self.row_bytes, size_name="item_size"))
                continue
            require_shape(x, name, ("num_layers",), torch.uint64, torch.int64)
            if not x.is_contiguous():
                raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()}")
            views.append(view(x.view(torch.int64)))
        return views


def transfer_layers(
    src: Side, dst: Side, src_indices: Tensor, dst_indices: Tensor, item_size: int, *,
    num_layers: int, heads: int, max_blocks: int,
) -> None:  # fmt: skip
    """Copy rows of several layers and heads, by one launch, which reads tables on the device."""
    _require_pairs(src_indices, dst_indices)
    if max_blocks < 1:
        raise ValueError(f"block_quota: expected at least 1, got {max_blocks}")
    sides = (src, dst)
    views = [side.views() for side in sides]
    for side, own in zip(sides, views, strict=True):
        for name, v in zip(side.tensors, own, strict=True):
            if side.is_table and v.shape[0] < num_layers:
                raise ValueError(f"{name}: expected {num_layers} addresses, got {v.shape[0]}")
    if not len(src_indices):
        return
    device = devices.get(_device_of([*views[0], *views[1]]))
    arrays, by_array, addresses = [], [], []
    for side, own in zip(sides, views, strict=True):
        for name, v in zip(side.tensors, own, strict=True):
            address = device.address(v)
            if address is None:
                raise ValueError(f"{name}: expected memory that kernels of {device.name} reach")
            arrays.append(v)
            by_array.append(side)
            addresses.append(address + side.offset)
    rows = PageRows(
        (item_size // heads,) * len(src.tensors),
        (
            Axis(num_layers, tuple(side.layer_bytes for side in by_array)),
            Axis(1, (0,) * len(by_array)),
            Axis(heads, tuple(side.head_bytes for side in by_array)),
        ),
        tuple(side.row_bytes for side in by_array),
        tuple(addresses),
    )
    tables = src.is_table, dst.is_table
    # How many rows the layers of a table have is not known.
    counts = [_UNKNOWN if s.is_table else v[0].shape[0] for s, v in zip(sides, views, strict=True)]

    def make(alignment: int) -> list[PageLaunch]:
        word_bytes = widest((alignment, _TABLE_WORD_BYTES if any(tables) else 0))
        num_rows = counts[0], counts[1]
        return [row_launch(device, rows, num_rows, max_blocks, True, word_bytes, tables)]

    launches = verified(device, make, 0)
    pairs = PagePairs(src_indices, dst_indices)
    require_countable(pairs.count * launches[0].pieces_per_page, "src_indices")
    stream = device.as_stream(None, "torch")
    lists, owners = pairs.lists(device, stream)
    try:
        for launch in launches:
            launch.issue(lists, stream)
    finally:
        device.keep((*arrays, *owners), stream)
    if not dst.is_table:
        note_written(tuple(dst.tensors.values()))


_UNKNOWN = 1 << 62
_TABLE_WORD_BYTES = 8  # to which the addresses of layers are aligned, as SGLang requires


def _require_pairs(src_indices: Any, dst_indices: Any) -> None:
    require_indices(src_indices, "src_indices")
    require_indices(dst_indices, "dst_indices")
    require_shape(dst_indices, "dst_indices", (len(src_indices),))


def _device_of(views: list[ArrayView]) -> str:
    """Return the device of the transfer: host memory goes with a GPU's."""
    return max({v.device for v in views}, key=lambda name: name != "host")
