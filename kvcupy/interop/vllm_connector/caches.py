"""vLLM's KV caches as a pool of pages: the bytes of a block in each layer, or its K and V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...arrays import ArrayView, transposed, view
from ...cache.pool import KVPool, MLAPool, Pool
from .groups import Groups


@dataclass(frozen=True)
class Caches:
    """The blocks of an engine."""

    pool: Pool  # a page is a block; a layer of the pool is the bytes of a block in one tensor
    layers: dict[str, tuple[int, ...]]  # layers of the pool, by name of vLLM's layer
    layout: str  # order and sizes of the axes in memory


def wrap_caches(kv_caches: Mapping[str, Any], num_blocks: int, groups: Groups) -> Caches:
    """Return the blocks of vLLM's tensors as rows of bytes, without a copy."""
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
    if len(groups) > 1:
        pages = _shared_pages(planes)
        layout = "; ".join([groups.describe(), *layouts])
        return Caches(MLAPool.wrap(pages), {}, f"{len(pages)} x {layout}")
    if len({plane.shape for plane in planes}) > 1:
        sizes = sorted({plane.shape[1] * plane.shape[2] for plane in planes})
        raise ValueError(
            f"kv_caches: expected layers whose blocks have one size, got {sizes} bytes; models "
            "with several sizes in one group are not supported"
        )
    layout = "; ".join(dict.fromkeys(layouts))
    return Caches(MLAPool.wrap(planes), layers, f"{len(planes)} x {layout}")


def _shared_pages(planes: Sequence[ArrayView]) -> list[ArrayView]:
    """Return the memory of a block that layers of several groups share, as rows of bytes.

    Layers of different groups lie over each other, and a layer may have several tensors in a page.
    Whatever lies within one stride of the blocks is copied together.
    """
    steps = {plane.strides[0] for plane in planes}
    if len(steps) > 1 or any(plane.shape[1] > 1 for plane in planes):
        raise ValueError(
            "kv_caches: expected one stride and contiguous blocks in all layers of a model with "
            f"several groups, got strides of {sorted(steps)} bytes"
        )
    (step,) = steps
    pages: list[ArrayView] = []
    for plane in sorted(planes, key=lambda plane: plane.pointer):
        if not pages or plane.pointer >= pages[-1].pointer + step:
            pages.append(_as(plane, (plane.shape[0], 1, step), (step, step, 1), "int8"))
        if plane.pointer + plane.shape[2] > pages[-1].pointer + step:
            raise ValueError("kv_caches: expected layers whose pages do not overlap in part")
    return pages


def _planes(v: ArrayView, name: str, num_blocks: int) -> Sequence[ArrayView]:
    """Split a tensor into parts that have the blocks on their first axis."""
    if v.ndim >= 2 and v.shape[0] % num_blocks == 0 and v.shape[0]:
        count = v.shape[0] // num_blocks  # an attention kernel may have smaller blocks
        shape = (num_blocks, count, *v.shape[1:])
        strides = (count * v.strides[0], v.strides[0], *v.strides[1:])
        return [v if count == 1 else _as(v, shape, strides, v.format)]
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
    return _as(v, (v.shape[0], runs, num_bytes), (v.strides[0], step, 1), "int8")


def _as(
    v: ArrayView, shape: tuple[int, ...], strides: tuple[int, ...], format: str
) -> ArrayView:  # fmt: skip
    """View the memory at the address of a view in another way."""
    return ArrayView(
        v.pointer, shape, strides, format, v.device, library=v.library, owner=v.owner
    )  # fmt: skip


def _layout(v: ArrayView) -> str:
    """Describe a block: its axes, the outermost first, with their lengths."""
    order = sorted(range(1, v.ndim), key=lambda axis: (-v.strides[axis], axis))
    axes = " ".join(f"{axis}:{v.shape[axis]}" for axis in order)
    return f"{v.format} {axes}"


# --- K and V ---


def wrap_values(
    kv_caches: Mapping[str, Any], num_blocks: int, block_tokens: int, heads: int, head_dim: int
) -> Caches:
    """Return the blocks of vLLM's tensors as K and V of tokens and heads, to be converted."""
    keys: list[ArrayView] = []
    values: list[ArrayView] = []
    numbers: dict[int, int] = {}  # of layers, by address: layers may share a cache
    layers: dict[str, tuple[int, ...]] = {}
    for name, tensors in kv_caches.items():
        parts = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        planes = [p for part in parts for p in _planes(view(part, name), name, num_blocks)]
        if planes[0].pointer not in numbers:
            numbers[planes[0].pointer] = len(keys)
            k, v = _keys_and_values(planes, name, block_tokens, heads, head_dim)
            keys.append(k)
            values += [] if v is None else [v]
        layers[name] = (numbers[planes[0].pointer],)
    pool = KVPool.wrap(keys, values) if values else MLAPool.wrap(keys)
    return Caches(pool, layers, "values")


def _keys_and_values(
    planes: Sequence[ArrayView], name: str, tokens: int, heads: int, head_dim: int
) -> tuple[ArrayView, ArrayView | None]:
    """Return K and V (blocks, tokens, heads, width), or a latent and None, of one layer."""
    first = planes[0]
    if len(planes) == 2:  # K and V apart
        k, v = (_by_token(plane, tokens, heads) for plane in planes)
        return _found(k, name, first), v
    if first.ndim == 3 and first.shape[1] == tokens:  # a latent
        return first, None
    if first.ndim == 5 and first.shape[1] == 2:
        k, v = (_by_token(first[:, i], tokens, heads) for i in range(2))
        return _found(k, name, first), v
    if (both := _by_token(first, tokens, heads)) is not None:
        if both.shape[-1] > head_dim:  # K and V side by side
            return both[..., :head_dim], both[..., head_dim:]
        if heads == 1:
            return both[:, :, 0], None
    both = _found(_by_token(first, tokens, 2 * heads), name, first)  # heads of K, then of V
    return both[:, :, :heads], both[:, :, heads:]


def _by_token(v: ArrayView, tokens: int, heads: int) -> ArrayView | None:
    """View NHD or HND blocks as (blocks, tokens, heads, width); None if the shape is another."""
    if v.ndim != 4 or v.strides[-1] != v.itemsize:
        return None
    if v.shape[1:3] == (heads, tokens) and (heads != tokens or v.strides[1] >= v.strides[2]):
        return transposed(v, (0, 2, 1, 3))
    return v if v.shape[1:3] == (tokens, heads) else None


def _found(v: ArrayView | None, name: str, first: ArrayView) -> ArrayView:
    if v is None:
        raise ValueError(
            f"kv_caches: expected {name} with K and V of tokens and heads, got shape {first.shape}"
        )
    return v
