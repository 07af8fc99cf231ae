"""Argument checks that operations share: rows, caches, index arrays and scales.

Each check names the argument, what was expected and what came, before anything is launched.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .. import formats as dtypes
from ..arrays import ArrayView, describe, overlap, view


class Rows(NamedTuple):
    """Input rows: `num_tokens` of `num_heads` times `width` elements, by byte strides."""

    num_tokens: int
    num_heads: int
    width: int
    token_bytes: int
    head_bytes: int


class Cache(NamedTuple):
    """A cache by byte strides. A slot is `page * page_size + offset`."""

    num_slots: int
    page_size: int
    num_heads: int
    width: int
    page_bytes: int
    offset_bytes: int
    head_bytes: int

    @property
    def page_shift(self) -> int:
        """log2 of the page size, -1 if it is no power of two."""
        size = self.page_size
        return size.bit_length() - 1 if size & (size - 1) == 0 else -1

    def flattened(self) -> Cache:
        """Return the same cache with pages of one slot, where slots are evenly spaced anyway."""
        if self.page_bytes != self.page_size * self.offset_bytes:
            return self
        return Cache(
            self.num_slots, 1, self.num_heads, self.width, self.offset_bytes, 0, self.head_bytes
        )


def number_format(v: ArrayView, name: str) -> dtypes.Format:
    """Return the number format of an argument."""
    if v.format not in dtypes.FORMATS:
        hint = "; tag it with kv.view_as" if v.format in ("uint8", "uint16") else ""
        if v.format == "float64":
            hint = "; convert it with .astype(np.float32) or .float()"
        known = ", ".join(dtypes.FORMATS)
        raise TypeError(f"{name}: expected one of the formats {known}, got {v.format}{hint}")
    return dtypes.FORMATS[v.format]


def rows(v: ArrayView, name: str) -> Rows:
    """Read an argument as (tokens, heads, width) or (tokens, width)."""
    if v.ndim not in (2, 3):
        raise ValueError(
            f"{name}: expected (tokens, heads, width) or (tokens, width), got {describe(v)}"
        )
    require_contiguous(v, name)
    _require_width(v, name)
    if v.ndim == 2:
        return Rows(v.shape[0], 1, v.shape[1], v.strides[0], 0)
    return Rows(*v.shape, *v.strides[:2])


def cache(v: ArrayView, name: str, layout: str, rows_ndim: int, *, written: bool = True) -> Cache:
    """Read an argument as a cache for rows of `rows_ndim` dimensions."""
    require_contiguous(v, name)
    _require_width(v, name)
    if written:
        require_output(v, name)
    if rows_ndim == 2:
        if v.ndim == 2:
            return Cache(v.shape[0], 1, 1, v.shape[1], v.strides[0], 0, 0)
        raise ValueError(f"{name}: expected (num_slots, width) for 2-D rows, got {describe(v)}")
    if v.ndim == 3:
        return Cache(v.shape[0], 1, v.shape[1], v.shape[2], v.strides[0], 0, v.strides[1])
    if v.ndim == 4:
        offset, head = (1, 2) if layout == "NHD" else (2, 1)
        return Cache(
            num_slots=v.shape[0] * v.shape[offset],
            page_size=max(1, v.shape[offset]),
            num_heads=v.shape[head],
            width=v.shape[3],
            page_bytes=v.strides[0],
            offset_bytes=v.strides[offset],
            head_bytes=v.strides[head],
        )
    paged = "page_size, heads" if layout == "NHD" else "heads, page_size"
    raise ValueError(
        f"{name}: expected (num_slots, heads, width) or (num_pages, {paged}, width), "
        f"got {describe(v)}"
    )


def _require_width(v: ArrayView, name: str) -> None:
    if v.ndim and v.shape[-1] == 0:
        raise ValueError(f"{name}: expected a width of at least 1, got {describe(v)}")


def mla_cache(v: ArrayView, name: str) -> Cache:
    """Read an argument as an MLA cache, (num_slots, width) or (num_pages, page_size, width)."""
    require_contiguous(v, name)
    _require_width(v, name)
    require_output(v, name)
    if v.ndim == 2:
        return Cache(v.shape[0], 1, 1, v.shape[1], v.strides[0], 0, 0)
    if v.ndim == 3:
        pages, page_size, width = v.shape
        return Cache(pages * page_size, max(1, page_size), 1, width, v.strides[0], v.strides[1], 0)
    raise ValueError(
        f"{name}: expected (num_slots, width) or (num_pages, page_size, width), got {describe(v)}"
    )


def layout_name(layout: object) -> str:
    """Check a layout argument."""
    if layout not in ("NHD", "HND"):
        raise ValueError(f'layout: expected "NHD" or "HND", got {layout!r}')
    return str(layout)


def indices(v: ArrayView, name: str) -> int:
    """Check an index array, int32 or int64 of one dimension; return bytes an index."""
    if v.format not in ("int32", "int64"):
        hint = "; convert it with .astype(np.int64) or .long()"
        raise TypeError(f"{name}: expected int32 or int64, got {describe(v)}{hint}")
    if v.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got {describe(v)}")
    return v.itemsize


def length_of(v: ArrayView, name: str) -> int:
    """Check an index array; return how many indices it has."""
    indices(v, name)
    return v.shape[0]


def slot_number(value: Any, name: str) -> int:
    """Check an optional slot number; None becomes -1, which no slot to be written has."""
    if value is None:
        return -1
    require_int(value, name)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: expected a 64-bit int, got {value!r}")
    return int(value)


def require_int(value: Any, name: str) -> None:
    """Refuse what is no integer (a bool is none)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an int, got {value!r}")


def require_number(value: Any, name: str) -> None:
    """Refuse what is no real number (a bool is none)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")


def is_array(argument: object) -> bool:
    """Return whether a scale argument is meant as an array."""
    return argument is not None and not isinstance(argument, numbers.Real)


class Scale(NamedTuple):
    """A static scale: one number, or a device array with `head_bytes` between heads."""

    value: float
    array: ArrayView | None
    head_bytes: int


def scale(argument: Any, name: str, num_heads: int, target: dtypes.Format) -> Scale:
    """Check a static scale for a cache of format `target`."""
    if argument is None:
        return Scale(1.0, None, 0)
    if not is_array(argument):
        value = float(argument)
        if not target.quantised and value != 1.0:
            raise ValueError(f"{name}: expected None or 1.0 for a {target.name} cache, got {value}")
        with np.errstate(over="ignore", under="ignore"):
            in_kernel = np.float32(value)
        if not (in_kernel > 0 and np.isfinite(in_kernel)):
            raise ValueError(f"{name}: expected a finite float32 above zero, got {value}")
        return Scale(value, None, 0)
    v = view(argument, name).without_owner()
    if v.format != "fp32":
        raise TypeError(f"{name}: expected float32, got {describe(v)}")
    if not target.quantised:
        raise ValueError(f"{name}: expected None or 1.0 for a {target.name} cache, got an array")
    if v.size == 1:
        return Scale(1.0, v, 0)
    if v.shape != (num_heads,):
        raise ValueError(f"{name}: expected one element or ({num_heads},), got {describe(v)}")
    return Scale(1.0, v, v.strides[0])


def scale_cache(
    argument: Any,
    name: str,
    static: tuple[str, Any],
    target: Cache,
    format: dtypes.Format,
    *,
    written: bool = True,
) -> ArrayView | None:
    """Check the cache of dynamic scales, float32 (num_slots, num_heads)."""
    if argument is None:
        return None
    v = view(argument, name).without_owner()
    if v.format != "fp32":
        raise TypeError(f"{name}: expected float32, got {describe(v)}")
    if not format.quantised:
        raise ValueError(f"{name}: expected None for a {format.name} cache, got an array")
    if static[1] is not None:
        raise ValueError(f"{name}: expected None beside {static[0]}, got an array")
    if v.shape != (target.num_slots, target.num_heads):
        wanted = f"({target.num_slots}, {target.num_heads})"
        raise ValueError(f"{name}: expected {wanted} fp32, got {describe(v)}")
    require_contiguous(v, name)
    if written:
        require_output(v, name)
    return v


def require_given(views: Mapping[str, ArrayView], names: Iterable[str]) -> None:
    """Refuse None, or a number, for what must be an array."""
    for name in names:
        if name not in views:
            raise TypeError(f"{name}: expected an array, got None")


def require_output(v: ArrayView, name: str) -> None:
    """Refuse what cannot be written element by element."""
    if v.readonly:
        raise ValueError(
            f"{name}: expected a writable array, got a read-only one; pass a .copy() of it, or one "
            "of NumPy, CuPy or torch where it is immutable, as JAX's are"
        )
    steps = zip(v.shape, v.strides, strict=True)
    if 0 in v.strides and v.size and any(n > 1 and s == 0 for n, s in steps):
        raise ValueError(f"{name}: expected distinct elements, got a broadcast array")


def require_same_device(given: Mapping[str, Any]) -> None:
    """Refuse arrays of several devices in one call."""
    arrays = [(name, a) for name, a in given.items() if isinstance(a, ArrayView)]
    for name, array in arrays[1:]:
        first_name, first = arrays[0]
        if array.device != first.device:
            wanted = f"{first.device} like {first_name}"
            raise ValueError(f"{name}: expected {wanted}, got {array.device}")


def require_aligned(named: Sequence[tuple[str, ArrayView | None]]) -> None:
    """Refuse elements at addresses that are no multiples of their size, which a GPU cannot read."""
    for name, v in named:
        if v is not None and any(n % v.itemsize for n in (v.pointer, *v.strides)):
            raise ValueError(
                f"{name}: expected elements at multiples of {v.itemsize} bytes, "
                f"got address {v.pointer:#x} and strides of {v.strides} bytes"
            )


def require_disjoint(
    outputs: Sequence[tuple[str, ArrayView | None]], inputs: Sequence[tuple[str, ArrayView | None]]
) -> None:
    """Refuse outputs that share bytes with an input or with one another."""
    ranges = sorted(v.byte_range() for _, v in (*outputs, *inputs) if v is not None)
    if all(end <= start for (_, end), (start, _) in pairwise(ranges)):
        return  # many layers, say, one behind the other
    for i, (name, output) in enumerate(outputs):
        for other_name, other in (*outputs[i + 1 :], *inputs):
            if output is not None and other is not None and overlap(output, other):
                raise ValueError(f"{name}: expected memory of its own, got some of {other_name}'s")


def require_contiguous(v: ArrayView, name: str) -> None:
    """Refuse gaps between the elements of the last axis."""
    if v.ndim and v.shape[-1] > 1 and v.strides[-1] != v.itemsize and v.size:
        raise ValueError(
            f"{name}: expected a contiguous last dimension ({v.itemsize} bytes a step), "
            f"got strides of {v.strides} bytes; .contiguous() or np.ascontiguousarray makes a copy "
            "that has one"
        )
