"""Checks of arguments that are arrays, and of the options that belong to them.

Each check names the argument, what was expected and what came, before anything is launched.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from .. import formats
from ..arrays import ArrayView, describe, overlap
from ..checks import require_int
from ..formats import FOUR_BIT, Format

# --- Formats, index arrays and options ------------------------------------------------------------


def is_array(argument: object) -> bool:
    """Return whether an argument that may be a number is meant as an array."""
    return argument is not None and not isinstance(argument, numbers.Real)


def number_format(v: ArrayView, name: str, *, four_bit: bool = False) -> Format:
    """Return the number format of an argument; it may have four bits if `four_bit`."""
    known = formats.FORMATS.get(v.format)
    if v.format in FOUR_BIT:
        if four_bit:
            return FOUR_BIT[v.format]
        names = ", ".join(formats.FORMATS)
        raise ValueError(
            f"{name}: expected one of the formats {names}, got {v.format}, which this does not "
            "take; gather_kv widens it"
        )
    if known is None:
        hint = "; tag it with kv.view_as" if v.format in ("uint8", "uint16") else ""
        if v.format == "float64":
            hint = "; convert it with .astype(np.float32) or .float()"
        names = ", ".join(formats.FORMATS)
        raise TypeError(f"{name}: expected one of the formats {names}, got {v.format}{hint}")
    return known


def layout_name(layout: object) -> str:
    """Check a layout argument."""
    if not isinstance(layout, str) or layout not in ("NHD", "HND"):
        raise ValueError(f'layout: expected "NHD" or "HND", got {layout!r}')
    return str(layout)


def indices(v: ArrayView, name: str) -> int:
    """Check an index array, int32 or int64 of one dimension; return its length."""
    if v.format not in ("int32", "int64"):
        hint = "; convert it with .astype(np.int64) or .long()"
        raise TypeError(f"{name}: expected int32 or int64, got {describe(v)}{hint}")
    if v.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got {describe(v)}")
    return v.shape[0]


def sink_slot(skip_slot: Any) -> int:
    """Check a slot that is never accessed."""
    require_int(skip_slot, "skip_slot")
    if not -(2**63) <= skip_slot < 2**63:
        raise ValueError(f"skip_slot: expected a 64-bit int, got {skip_slot!r}")
    return int(skip_slot)


def block_table(v: ArrayView) -> tuple[int, int]:
    """Check a block table; return the number of sequences, and of pages per row."""
    require_format(v, "block_table", "int32", "int64")
    if v.ndim != 2:
        raise ValueError(f"block_table: expected (sequences, max_pages), got {describe(v)}")
    return v.shape[0], v.shape[1]


def rope_table(v: ArrayView, *, min_positions: int = 0) -> tuple[int, int]:
    """Check a table of cos and sin; return its positions and its width."""
    require_format(v, "rope_table", "fp32")
    if v.ndim != 2 or v.shape[0] < min_positions or v.shape[1] % 2 or v.shape[1] < 2:
        expected = "(max_positions, even rotary_dim)"
        raise ValueError(f"rope_table: expected {expected}, got {describe(v)}")
    require_contiguous(v, "rope_table")
    return v.shape[0], v.shape[1]


def require_format(v: ArrayView, name: str, *allowed: str, expected: str = "") -> None:
    """Raise TypeError unless an array has one of some formats; `expected` describes them."""
    if v.format not in allowed:
        known = expected or " or ".join(allowed).replace("fp32", "float32")
        raise TypeError(f"{name}: expected {known}, got {describe(v)}")


def require_shape(v: ArrayView, name: str, shape: tuple[int, ...], hint: str = "") -> None:
    """Raise ValueError unless an array has a shape; `hint` says why."""
    if v.shape != shape:
        raise ValueError(f"{name}: expected {shape}{hint}, got {describe(v)}")


# --- Arrays of a call -----------------------------------------------------------------------------


def require_arrays(views: Mapping[str, ArrayView], names: Iterable[str]) -> None:
    """Raise TypeError where None came for an argument that must be an array."""
    for name in names:
        if name not in views:
            raise TypeError(f"{name}: expected an array, got None")


def require_same_device(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for arrays of several devices in one call; numbers are passed over."""
    devices = [(name, v.device) for name, v in arguments.items() if isinstance(v, ArrayView)]
    for name, device in devices:
        first_name, first = devices[0]
        if device != first:
            raise ValueError(f"{name}: expected {first} like {first_name}, got {device}")


def require_output(v: ArrayView, name: str) -> None:
    """Raise ValueError for an array that cannot be written element by element."""
    if v.readonly:
        raise ValueError(
            f"{name}: expected a writable array, got a read-only one; pass a .copy() of it, or one "
            "of NumPy, CuPy or torch where it is immutable, as JAX's are"
        )
    if v.scales is not None:
        for part in v.memory:
            require_output(part, name)
        return
    repeats = 0 in v.strides and v.size
    if repeats and any(n > 1 and s == 0 for n, s in zip(v.shape, v.strides, strict=True)):
        raise ValueError(f"{name}: expected distinct elements, got a broadcast array")


def require_contiguous(v: ArrayView, name: str) -> None:
    """Raise ValueError for gaps between the elements of the last axis."""
    shape, strides = v.shape, v.strides
    if v.scales is not None:  # a view of rows that are
        return
    if shape and shape[-1] > 1 and strides[-1] != v.itemsize and v.size:
        raise ValueError(
            f"{name}: expected a contiguous last dimension ({v.itemsize} bytes a step), got "
            f"strides of {strides} bytes; .contiguous() or np.ascontiguousarray makes a copy that "
            "has one"
        )


def require_aligned(named: Sequence[tuple[str, ArrayView | None]]) -> None:
    """Raise ValueError for elements at addresses that are no multiples of their size.

    A GPU cannot read them.
    """
    for name, v in named:
        if v is not None and any(n % v.itemsize for n in (v.pointer, *v.strides)):
            raise ValueError(
                f"{name}: expected elements at multiples of {v.itemsize} bytes, "
                f"got address {v.pointer:#x} and strides of {v.strides} bytes"
            )


def require_disjoint(
    outputs: Sequence[tuple[str, ArrayView | None]], inputs: Sequence[tuple[str, ArrayView | None]]
) -> None:
    """Raise ValueError for outputs that share bytes with an input or with one another."""
    ranges = sorted(v.byte_range() for _, v in (*outputs, *inputs) if v is not None)
    if all(end <= start for (_, end), (start, _) in pairwise(ranges)):
        return  # many layers, say, one after the other
    for i, (name, output) in enumerate(outputs):
        for other_name, other in (*outputs[i + 1 :], *inputs):
            if output is not None and other is not None and overlap(output, other):
                raise ValueError(f"{name}: expected memory of its own, got some of {other_name}'s")
