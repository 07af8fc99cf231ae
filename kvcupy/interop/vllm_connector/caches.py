"""vLLM's KV caches as a pool of pages: the bytes of a block in each layer, or K and V of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...arrays import ArrayView, view
from ...cache.pool import MLAPool, Pool


@dataclass(frozen=True)
class Caches:
    """The blocks of an engine.

    Attributes
    ----------
    pool : a page is a block; a layer of the pool is the bytes of a block in one tensor
    layers : layers of the pool, by name of vLLM's layer
    layout : order and sizes of the axes in memory
    """

    pool: Pool
    layers: dict[str, tuple[int, ...]]
    layout: str


def wrap_caches(kv_caches: Mapping[str, Any], num_blocks: int) -> Caches:
    """Return the blocks of vLLM's tensors as rows of bytes, without a copy.

    Parameters
    ----------
    kv_caches : by layer, a tensor with the blocks on its first axis, or on its second behind K and
        V, in any layout whose blocks are runs of bytes; or a tuple of them, K and V
    num_blocks : blocks of each tensor

    Raises
    ------
    ValueError : a tensor has another shape, or blocks of different sizes

    Notes
    -----
    The order of axes within a block is not interpreted: a backend may transpose K, as vLLM's on a
    CPU does. Engines with another order must not exchange blocks; `layout` tells them apart.
    """
    planes: list[ArrayView] = []
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}  # of planes: layers may share a cache
    layers: dict[str, tuple[int, ...]] = {}
    layouts: list[str] = []
    for name, tensors in kv_caches.items():
        parts = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        own = []
        for part in parts:
            for plane in _planes(view(part, name), name, num_blocks):
                rows = _rows_of_bytes(plane, name)
                key = (rows.pointer, rows.shape)
                if key not in numbers:
                    numbers[key] = len(planes)
                    planes.append(rows)
                    layouts.append(_layout(plane))
                own.append(numbers[key])
        layers[name] = tuple(own)
    if not planes:
        raise ValueError("kv_caches: expected at least one layer, got none")
    if len({plane.shape for plane in planes}) > 1:
        sizes = sorted({plane.shape[1] * plane.shape[2] for plane in planes})
        raise ValueError(
            f"kv_caches: expected layers whose blocks have one size, got {sizes} bytes; models "
            "with several kinds of KV caches are not supported yet"
        )
    layout = "; ".join(dict.fromkeys(layouts))
    return Caches(MLAPool.wrap(planes), layers, f"{len(planes)} x {layout}")


def _planes(v: ArrayView, name: str, num_blocks: int) -> Sequence[ArrayView]:
    """Split a tensor into parts that have the blocks on their first axis."""
    if v.ndim >= 2 and v.shape[0] == num_blocks:
        return [v]
    if v.ndim >= 3 and v.shape[1] == num_blocks and v.shape[0] <= 2:
        return [v[i] for i in range(v.shape[0])]
    raise ValueError(
        f"kv_caches: expected {num_blocks} blocks on the first axis of {name}, or on its second "
        f"behind K and V, got {v.shape}"
    )


def _rows_of_bytes(v: ArrayView, name: str) -> ArrayView:
    """View (blocks, ...) as int8 (blocks, runs, bytes per run)."""
    num_bytes = v.itemsize
    axes = sorted(
        (stride, n) for n, stride in zip(v.shape[1:], v.strides[1:], strict=True) if n > 1
    )
    while axes and axes[0][0] == num_bytes:
        num_bytes *= axes.pop(0)[1]
    if len(axes) > 1 or any(stride <= 0 for stride, _ in axes):
        raise ValueError(
            f"kv_caches: expected blocks of {name} in one run of bytes, or in one run for each "
            f"head, got shape {v.shape} and strides {v.strides}"
        )
    step, runs = axes[0] if axes else (num_bytes, 1)
    return ArrayView(
        v.pointer, (v.shape[0], runs, num_bytes), (v.strides[0], step, 1), "int8", v.device,
        library=v.library, owner=v.owner,
    )  # fmt: skip


def _layout(v: ArrayView) -> str:
    """Describe a block: its axes, the outermost first, with their lengths."""
    order = sorted(range(1, v.ndim), key=lambda axis: (-v.strides[axis], axis))
    axes = " ".join(f"{axis}:{v.shape[axis]}" for axis in order)
    return f"{v.format} {axes}"
