"""Arrays of integers tagged as a number format, and the memory of four-bit formats."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import formats
from ..formats import Encoding
from .views import ArrayView, describe, four_bit_view, recast, view


def view_as(array: Any, dtype: str | Encoding, *, scales: Any = None) -> ArrayView:
    """Tag an array of integers that holds the bits of a number format.

    Parameters
    ----------
    array : uint16 or uint8 array (also int16, int8) of any library, any shape and strides. Of a
        four-bit format: uint8 (..., row_bytes), whose rows are codes and then scales
        (`kvcupy.formats.FourBitFormat`), or with `scales` the codes alone, uint8 (..., width / 2);
        contiguous along a row
    dtype : an `Encoding`, or its string: one of "fp32 fp16 bf16 fp8_e4m3 fp8_e5m2 int8", or of the
        four-bit formats "nvfp4 mxfp4 int4", with "+hadamard" where their rows are rotated.
        Views of an encoding may be tagged with one that has another scale rule
    scales : of a four-bit format whose scales are in a separate array, (..., groups), with any
        strides but the last: uint8, or fp8_e4m3 for nvfp4 and fp16 for int4

    Returns
    -------
    ArrayView : the same memory, accepted wherever an array is; it keeps `array` alive. Of a
        four-bit format its last dimension counts elements

    Raises
    ------
    ValueError : unknown format, its size is not the array's, rows are no whole groups or not
        contiguous, or the scales of int4 are not at multiples of 2 bytes
    TypeError : `array` holds neither integers nor that format

    Notes
    -----
    Alignment of four-bit rows: none, but 2 bytes for int4. Kernels access codes in words of as many
    bytes, up to 8, as divide all strides and addresses: with a head of 128
    elements a row of nvfp4 is 72 bytes, and its words 8.

    Examples
    --------
    >>> view_as(np.zeros((4, 8), np.uint16), "bf16")
    <(4, 8) bf16 on host at 0x...>
    >>> view_as(np.zeros((4, 72), np.uint8), "nvfp4")
    <(4, 128) nvfp4 on host at 0x...>
    """
    if isinstance(dtype, str) and "+" not in dtype and dtype not in formats.CACHE_FORMATS:
        known = ", ".join(formats.CACHE_FORMATS)
        raise ValueError(f"dtype: expected one of {known}, got {dtype!r}")
    encoding = Encoding.of(dtype)
    format, v = encoding.format, view(array, "array")
    four_bit = formats.FOUR_BIT.get(format)
    if four_bit is not None:
        return _view_four_bit(v, four_bit, scales, encoding)
    if scales is not None:
        raise ValueError(f"scales: expected None for {format}, got an array")
    if v.format != format:
        if not v.format.startswith(("int", "uint")):
            raise TypeError(f"array: expected integers that hold {format} bits, got {v.format}")
        if v.itemsize != formats.FORMATS[format].itemsize:
            bits = 8 * formats.FORMATS[format].itemsize
            raise ValueError(f"array: expected {bits}-bit integers for {format}, got {v.format}")
    return recast(v, v.shape, v.strides, format)


def _view_four_bit(
    v: ArrayView, format: formats.FourBitFormat, scales: Any, encoding: Encoding
) -> ArrayView:
    """Return the elements of rows of bytes, with the scales after the codes or in another array."""
    if v.format == format.name and scales is None:
        if encoding.hadamard != bool(v.rotated_width):
            rows = "rotated rows" if encoding.hadamard else "rows that are not rotated"
            raise ValueError(f"array: expected bytes, or {rows}, got {describe(v)}")
        if encoding.scale_rule == v.scale_rule:
            return v
        return recast(
            v, v.shape, v.strides, v.format, scales=v.scales, scale_rule=encoding.scale_rule
        )  # fmt: skip
    if v.format not in ("uint8", "int8"):
        raise TypeError(f"array: expected uint8 that hold {format.name} rows, got {v.format}")
    _require_row_bytes(v, 1, "array")
    num_bytes = v.shape[-1]
    unit = format.group_bytes if scales is None else format.group // 2
    if num_bytes % unit or not num_bytes:
        what = "codes and scales" if scales is None else "codes"
        raise ValueError(
            f"array: expected rows of a multiple of {unit} bytes, the {what} of {format.group} "
            f"elements of {format.name}, got {describe(v)}"
        )
    num_groups = num_bytes // unit
    shape = (*v.shape[:-1], num_groups * format.group)
    rotated = encoding.rotated_elements(shape[-1])
    if scales is None:
        result = recast(
            v, shape, v.strides, format.name,
            rotated_width=rotated, scale_rule=encoding.scale_rule,
        )  # fmt: skip
        _require_row_bytes(result.scales or v, format.scale_bytes, "array")
        return result
    s = view(scales, "scales")
    allowed = {
        "fp8_e4m3": ("fp8_e4m3", "uint8"), "e8m0": ("float8_e8m0fnu", "uint8"),
        "fp16": ("fp16", "uint16"),
    }[format.scale_format]  # fmt: skip
    if s.format not in allowed:
        known = " or ".join(allowed)
        raise TypeError(f"scales: expected {known} for {format.name}, got {s.format}")
    if s.shape != (*v.shape[:-1], num_groups):
        expected = (*v.shape[:-1], num_groups)
        raise ValueError(f"scales: expected {expected} for {describe(v)}, got {describe(s)}")
    if s.device != v.device:
        raise ValueError(f"scales: expected {v.device} like array, got {s.device}")
    _require_row_bytes(s, format.scale_bytes, "scales")
    scales = recast(s, s.shape, s.strides, format.scale_carrier)
    return four_bit_view(v, scales, format.name, rotated, encoding.scale_rule)


def with_rotation(rows: ArrayView, rotated_width: int) -> ArrayView:
    """Return rows of a four-bit format of which the first elements are stored rotated; 0: none.

    Of a row of an `MLAPool` that is the latent.
    """
    return recast(
        rows, rows.shape, rows.strides, rows.format, scales=rows.scales,
        rotated_width=rotated_width,
    )  # fmt: skip


def four_bit_encoding(dtype: Any) -> Encoding | None:
    """Return the encoding that a dtype argument stands for if it has four bits, else None."""
    if isinstance(dtype, str) and ("+" in dtype or dtype in formats.FOUR_BIT):
        dtype = Encoding.of(dtype)
    is_four_bit = isinstance(dtype, Encoding) and dtype.format in formats.FOUR_BIT
    return dtype if is_four_bit else None


def four_bit_array(make: Callable[[Any, Any], Any], shape: Any, encoding: Encoding) -> ArrayView:
    """Return an array of a four-bit encoding over bytes that `make(shape, dtype)` allocates."""
    four_bit = formats.FOUR_BIT[encoding.format]
    try:
        *outer, width = (shape,) if isinstance(shape, (int, np.integer)) else shape
        width = operator.index(width)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"shape: expected an int or several, got {shape!r}") from None
    formats.require_groups(four_bit, width, "shape")
    if width < 0:
        raise ValueError(f"shape: expected sizes from 0 on, got {shape!r}")
    rotated = encoding.rotated_elements(width)
    raw = view(make((*outer, four_bit.row_bytes(width)), np.dtype(np.uint8)))
    return recast(
        raw, (*raw.shape[:-1], width), raw.strides, four_bit.name,
        rotated_width=rotated, scale_rule=encoding.scale_rule,
    )  # fmt: skip


def _require_row_bytes(v: ArrayView, size: int, name: str) -> None:
    """Raise ValueError unless rows are contiguous, of elements at multiples of their size."""
    if not v.shape:
        raise ValueError(f"{name}: expected rows along the last axis, got {describe(v)}")
    # CuPy gives arrays without elements strides of 0.
    if v.size and v.shape[-1] > 1 and v.strides[-1] != size:
        raise ValueError(
            f"{name}: expected a contiguous last dimension, got strides of {v.strides} bytes"
        )
    if any(n % size for n in (v.pointer, *v.strides)):
        raise ValueError(
            f"{name}: expected rows at multiples of {size} bytes, for the fp16 scales, got address "
            f"{v.pointer:#x} and strides of {v.strides} bytes"
        )
