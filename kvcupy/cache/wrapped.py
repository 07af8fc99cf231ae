"""Arrays of others as the layers of a pool: K and V, or the latent, wherever each layer is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import formats as dtypes
from ..arrays import ArrayView, describe, first_overlap, overlaps_itself, reshaped, transposed, view
from ..ops import checks

Named = tuple[str, ArrayView]


def layers_of(
    given: dict[str, Any], order: str, page_size: int | None, *, has_heads: bool
) -> list[tuple[ArrayView, ...]]:
    """Return the arrays of each layer, (pages, page_size, heads, width), that go together.

    Parameters
    ----------
    given : K and V, or the latent, by name: one array, or a list of one array a layer
    order : of the axes of one array: Layers, Pages, Slots of a page, Heads, Dimensions of a head
    page_size : of arrays by slots; None: they are by pages
    has_heads : whether an axis of heads must be there; else it is of one head, and may be left out

    Raises
    ------
    TypeError, ValueError : an array does not fit, or shares bytes with another
    """
    parts = []
    for name, arrays in given.items():
        if isinstance(arrays, (list, tuple)):
            if not order.startswith("L"):
                raise ValueError(f"layout: expected layer_first with {name} as a list of layers")
            if not arrays:
                raise ValueError(f"{name}: expected at least one layer, got none")
            by_layer = [(f"{name}[{i}]", view(a, f"{name}[{i}]")) for i, a in enumerate(arrays)]
        else:
            by_layer = _split(view(arrays, name), name, order, page_size, has_heads)
        parts.append([(n, _by_page(v, n, page_size, has_heads)) for n, v in by_layer])
    _require_alike(parts, tuple(given))
    return [tuple(v for _, v in layer) for layer in zip(*parts, strict=True)]


def _split(
    v: ArrayView, name: str, order: str, page_size: int | None, has_heads: bool
) -> list[Named]:
    """Return the layers of one array, with axes as a list of them would have."""
    bare = order if has_heads else order.replace("H", "")
    if order.startswith("L"):
        least = len(bare) - (page_size is not None)  # by slots
        if least <= v.ndim <= len(order):
            return [(name, v[i]) for i in range(v.shape[0])]
    elif v.ndim in (len(bare), len(order)):
        axes = order if v.ndim == len(order) else bare
        by_page = transposed(v, [axes.index(axis) for axis in "PLSHD" if axis in axes])
        return [(name, by_page[:, i]) for i in range(by_page.shape[1])]
    words = {"L": "layers", "P": "pages", "S": "page_size", "H": "heads", "D": "width"}
    wanted = ", ".join(words[axis] for axis in bare)
    by_slots = ""
    if order.startswith("L"):
        by_slots = f", ({wanted.replace('pages, page_size', 'slots')}) with page_size=,"
    raise ValueError(
        f"{name}: expected ({wanted}){by_slots} or a list of one array a layer, got {describe(v)}"
    )


def _by_page(v: ArrayView, name: str, page_size: int | None, has_heads: bool) -> ArrayView:
    """View a layer as (pages, page_size, heads, width)."""
    pages = v
    wanted = "(pages, page_size, heads, width)" if has_heads else "(pages, page_size, width)"
    if not has_heads:
        slots = page_size is not None and v.ndim == 3 and v.shape[1] == 1 != page_size
        if v.ndim in (2, 3) and not slots:  # no axis of one head
            pages = reshaped(
                v, (*v.shape[:-1], 1, v.shape[-1]), (*v.strides[:-1], 0, v.strides[-1])
            )
    if pages.ndim == 3:
        if page_size is None:
            raise ValueError(
                f"{name}: expected {wanted}, or page_size= with slots first, got {describe(v)}"
            )
        count, step = pages.shape[0], pages.strides[0]
        if count % page_size:
            raise ValueError(
                f"page_size: expected a divisor of the {count} slots of {name}, got {page_size}"
            )
        shape = (count // page_size, page_size, *pages.shape[1:])
        pages = reshaped(pages, shape, (page_size * step, step, *pages.strides[1:]))
    if pages.ndim != 4:
        raise ValueError(f"{name}: expected {wanted}, got {describe(v)}")
    if not has_heads and pages.shape[2] != 1:
        raise ValueError(f"{name}: expected one head, got {describe(v)}")
    if page_size is not None and pages.shape[1] != page_size:
        raise ValueError(f"{name}: expected pages of {page_size} slots, got {describe(v)}")
    return pages


def _require_alike(parts: Sequence[Sequence[Named]], names: Sequence[str]) -> None:
    """Refuse layers that a pool cannot have: unlike, strided, read-only or sharing bytes."""
    if len(parts[-1]) != len(parts[0]):
        raise ValueError(
            f"{names[-1]}: expected {len(parts[0])} layers like {names[0]}, got {len(parts[-1])}"
        )
    first_name, first = parts[0][0]
    checks.number_format(first, first_name)
    for part in parts:
        for name, v in part:
            if not v.size:
                raise ValueError(f"{name}: expected at least one element, got {describe(v)}")
            if v.format != first.format:
                hint = "; tag it with kv.view_as" if v.format not in dtypes.FORMATS else ""
                raise ValueError(
                    f"{name}: expected {first.format} like {first_name}, got {v.format}{hint}"
                )
            if v.device != first.device:
                raise ValueError(
                    f"{name}: expected {first.device} like {first_name}, got {v.device}"
                )
            of_part = part[0][1].shape
            wanted = of_part if part is parts[0] else (*first.shape[:3], of_part[3])
            if v.shape != wanted:
                raise ValueError(
                    f"{name}: expected pages of {wanted} like {first_name}, got {v.shape}"
                )
            checks.require_contiguous(v, name)
            checks.require_output(v, name)
            checks.require_aligned([(name, v)])
            if overlaps_itself(v):
                raise ValueError(f"{name}: expected distinct elements, got overlapping strides")
    layers = [named for part in parts for named in part]
    shared = first_overlap([v for _, v in layers])
    if shared is not None:
        raise ValueError(
            f"{layers[shared[1]][0]}: expected memory of its own, got some of "
            f"{layers[shared[0]][0]}'s"
        )
