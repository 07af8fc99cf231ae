"""What the fallbacks of all operations share: number formats and faults in array code.

A fallback is what an operation runs where its kernel cannot be compiled: the same work with NumPy
or CuPy, slowly, and bit for bit what the kernels give (`kernels_src/numeric.cuh`). Each lies in the
module of its family.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .. import formats
from ..devices.protocol import Device
from ..formats import FourBitFormat

# Mantissa bits and smallest normal exponent.
_FP8 = {"fp8_e4m3": (3, -6), "fp8_e5m2": (2, -14)}

# Overflow to infinity and NaN are results like any other.
QUIET = np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore")


def module_of(array: Any) -> Any:
    """Return the module whose functions take `array`: numpy or cupy."""
    return sys.modules[type(array).__module__.partition(".")[0]]


@QUIET
def decode(carrier: Any, name: str) -> Any:
    """Return the float32 values of bits in the carrier dtype of a format."""
    xp = module_of(carrier)
    if name == "bf16":
        return (carrier.astype(xp.uint32) << 16).view(xp.float32)
    if name in _FP8:
        table = np.arange(256, dtype=np.uint8).view(formats.FORMATS[name].numpy).astype(np.float32)
        return xp.asarray(table)[carrier]
    return carrier.astype(xp.float32)


@QUIET
def encode(values: Any, name: str) -> Any:
    """Round float32 values to a format once, to nearest even; return bits in its carrier dtype."""
    xp = module_of(values)
    if name == "bf16":
        bits = values.view(xp.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return xp.where(xp.isnan(values), 0x7FFF, rounded).astype(xp.uint16)
    if name in _FP8:
        return _encode_fp8(xp, values, name)
    if name == "int8":
        bounded = xp.clip(xp.where(xp.isnan(values), 0, values), -127, 127)
        return xp.rint(bounded).astype(xp.int8)
    return values.astype(formats.FORMATS[name].carrier)


def _encode_fp8(xp: Any, values: Any, name: str) -> Any:
    mantissa_bits, lowest = _FP8[name]
    unknown = xp.isnan(values)
    magnitude = xp.minimum(xp.abs(xp.where(unknown, 0, values)), formats.FORMATS[name].limit)
    magnitude = magnitude.astype(xp.float32)
    # The exponent of zero is 0 for frexp, and the least one here.
    exponent = xp.where(magnitude > 0, xp.maximum(xp.frexp(magnitude)[1] - 1, lowest), lowest)
    steps = xp.rint(xp.ldexp(magnitude, mantissa_bits - exponent)).astype(xp.int32)
    # A carry out of the mantissa increments the exponent.
    code = ((exponent - lowest + 1) << mantissa_bits) + steps - (1 << mantissa_bits)
    code = xp.where(unknown, 0x7F, code) | (xp.signbit(values).astype(xp.int32) << 7)
    return code.astype(xp.uint8)


@QUIET
def divide(values: Any, scale: Any) -> Any:
    """Return float32 values divided by a scale, each quotient rounded once."""
    return values / scale


@QUIET
def multiply(values: Any, scale: Any) -> Any:
    """Return float32 values multiplied by a scale, each product rounded once."""
    return values * scale


@QUIET
def dynamic_scale(values: Any, name: str) -> Any:
    """Return the scale of each row of float32 values (last axis): max(absmax, 1e-6) / limit."""
    xp = module_of(values)
    known = xp.where(xp.isnan(values), 0, xp.abs(values))
    largest = xp.minimum(known.max(axis=-1), np.finfo(np.float32).max)
    limit = np.float32(formats.FORMATS[name].limit or 1)
    return xp.maximum(largest, np.float32(1e-6)).astype(xp.float32) / limit


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES = {  # values of the sixteen codes
    6.0: np.array([*_E2M1, *(-x for x in _E2M1)], np.float32),
    7.0: np.array([*range(8), *range(-8, 0)], np.float32),
}
_FLOAT_MAX, _TINY = np.finfo(np.float32).max, np.float32(2.0**-149)


def _group_scales(bits: Any, format: FourBitFormat) -> Any:
    """Return the float32 values of group scales, from arrays of their carrier dtype."""
    xp = module_of(bits)
    if format.scale_format == "e8m0":
        wide = bits.astype(xp.uint32)
        values = xp.where(wide == 0, 0x00400000, xp.where(wide == 255, 0x7FC00000, wide << 23))
        return values.astype(xp.uint32).view(xp.float32)
    return decode(bits, format.scale_format)


def _scale_of_groups(
    values: Any, limit: float, format: FourBitFormat, scale: Any
) -> tuple[Any, Any]:
    """Return the scales of groups, in their carrier dtype, and whether a group is zeros.

    Parameters
    ----------
    values : float32 (..., groups, group), without NaN
    limit : the code that the largest magnitude becomes
    scale : of the tensor or head, which goes with (..., groups)
    """
    xp = module_of(values)
    absmax = xp.minimum(xp.abs(values).max(axis=-1), _FLOAT_MAX).astype(xp.float32)
    quotient = (absmax / (np.float32(limit) * scale)).astype(xp.float32)
    is_zero = absmax == 0
    if format.scale_format == "e8m0":
        bits = quotient.view(xp.uint32).astype(xp.int64)
        powers = xp.minimum((bits + 0x007FFFFF) >> 23, 254)
        return xp.where(bits <= 0x00400000, 0, powers).astype(xp.uint8), is_zero
    if format.scale_format == "fp16":
        halves = xp.minimum(quotient, 65504).astype(xp.float16)
        smallest = xp.float16(2.0**-24)
        return xp.where(is_zero, 0, xp.maximum(halves, smallest)).astype(xp.float16), is_zero
    codes = encode(quotient, format.scale_format)
    return xp.where(is_zero, 0, xp.maximum(codes, 1)).astype(xp.uint8), is_zero


_ROTATED_LIMIT = np.float32(2.0**112)


@QUIET
def rotate(values: Any, rotated_width: int) -> Any:
    """Return float32 rows (..., width) whose first elements are rotated, or rotated back.

    The steps are those of `kvcupy.reference.four_bit`.
    """
    if not rotated_width:
        return values
    xp, block = module_of(values), formats.rotation_block(rotated_width)
    x, half = values[..., :rotated_width].reshape(-1, block), 1
    while half < block:
        pairs = x.reshape(-1, block // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        x = xp.stack([first + second, first - second], axis=2).reshape(-1, block)
        half *= 2
    rotated = (x * np.float32(block**-0.5)).reshape(*values.shape[:-1], rotated_width)
    return xp.concatenate([rotated, values[..., rotated_width:]], axis=-1)


@QUIET
def encode_groups(
    values: Any, format: FourBitFormat, scale: Any, rotated_width: int = 0,
    scale_rule: str = "absmax",
) -> tuple[Any, Any]:  # fmt: skip
    """Return codes, uint8 (..., width / 2), and group scales of float32 rows (..., width).

    The steps are those of `kvcupy.reference.four_bit`.

    Parameters
    ----------
    scale : of the tensor or head, which goes with (..., groups)
    """
    xp = module_of(values)
    known = xp.where(xp.isnan(values), 0, values).astype(xp.float32)
    if rotated_width:
        bounded = xp.clip(known, -_ROTATED_LIMIT, _ROTATED_LIMIT)
        known[..., :rotated_width] = bounded[..., :rotated_width]
        known = rotate(known, rotated_width)
    num_groups = known.shape[-1] // format.group
    groups = known.reshape(*known.shape[:-1], num_groups, format.group)
    codes, scales = _encode_by_largest(groups, format, scale, format.limit or 1)
    if scale_rule == "four_over_six":
        fours, others = _encode_by_largest(groups, format, scale, 4)
        errors = (
            _squared_error(groups, own, bits, format, scale)
            for own, bits in ((fours, others), (codes, scales))
        )
        prefers_four = next(errors) < next(errors)
        codes = xp.where(prefers_four[..., None], fours, codes)
        scales = xp.where(prefers_four, others, scales)
    codes = codes.reshape(known.shape)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def _squared_error(groups: Any, codes: Any, scales: Any, format: FourBitFormat, scale: Any) -> Any:
    """Return what codes leave of each group: squares, added one after another in float32."""
    xp = module_of(groups)
    step = (_group_scales(scales, format) * scale).astype(xp.float32)
    numbers = xp.asarray(_CODES[format.limit or 7.0])[codes]
    errors = (groups - (numbers * step[..., None]).astype(xp.float32)).astype(xp.float32)
    squares = (errors * errors).astype(xp.float32)
    total = squares[..., 0]
    for i in range(1, format.group):
        total = (total + squares[..., i]).astype(xp.float32)
    return total


def _encode_by_largest(
    groups: Any, format: FourBitFormat, scale: Any, limit: float
) -> tuple[Any, Any]:
    """Return a code for each element of groups, and scales that make `limit` the largest."""
    xp = module_of(groups)
    scales, is_zero = _scale_of_groups(groups, limit, format, scale)
    step = xp.maximum((_group_scales(scales, format) * scale).astype(xp.float32), _TINY)
    quotients = (groups / step[..., None]).astype(xp.float32)
    exact = xp.abs(quotients).astype(xp.float64)
    if format.limit == 6:
        exact = xp.minimum(xp.minimum(2 * exact, exact + 2), exact / 2 + 4)
    magnitudes = xp.rint(xp.minimum(exact, 7)).astype(xp.int64)
    negative = xp.signbit(groups)
    if format.limit == 6:
        codes = magnitudes | xp.where(negative, 8, 0)
    else:
        codes = xp.where(negative, -magnitudes, magnitudes) & 15
    return xp.where(is_zero[..., None], 0, codes).astype(xp.uint8), scales


@QUIET
def decode_groups(
    codes: Any, scales: Any, format: FourBitFormat, scale: Any, rotated_width: int = 0
) -> Any:
    """Return float32 rows (..., width) of codes and group scales, as `encode_groups` gives them."""
    xp = module_of(codes)
    values = xp.asarray(_CODES[format.limit or 7.0])
    both = xp.stack([values[codes & 15], values[codes >> 4]], axis=-1)
    groups = both.reshape(*scales.shape, format.group)
    width = format.group * scales.shape[-1]
    step = (_group_scales(scales, format) * scale).astype(xp.float32)
    rows = (groups * step[..., None]).astype(xp.float32)
    return rotate(rows.reshape(*scales.shape[:-1], width), rotated_width)


def split_rows(rows: Any, format: FourBitFormat) -> tuple[Any, Any]:
    """Return codes and group scales, as `encode_groups` does, of bytes (..., row_bytes)."""
    split = rows.shape[-1] // format.group_bytes * (format.group // 2)
    scales = module_of(rows).ascontiguousarray(rows[..., split:])
    carrier = {1: np.uint8, 2: np.float16}[format.scale_bytes]
    return rows[..., :split], scales.view(carrier)


def join_rows(codes: Any, scales: Any) -> Any:
    """Return bytes (..., row_bytes) of codes and group scales, as `encode_groups` returns them."""
    xp = module_of(codes)
    return xp.concatenate([codes, xp.ascontiguousarray(scales).view(np.uint8)], axis=-1)


def note_fault(device: Device, count: int, operation: int, position: Any, value: Any) -> None:
    """Note faults in the device's record, as `report_fault` of the kernels does.

    Array code too: reading the record on the host would wait for the stream.
    """
    record = device.fault_array()
    xp = module_of(record)
    first = record[:1] == 0
    for i, number in enumerate((operation, position, value), 1):
        record[i : i + 1] = xp.where(first, number, record[i : i + 1])
    record[:1] += count
