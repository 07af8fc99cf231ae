"""The four-bit formats: two codes a byte, and a scale for each group of elements of a row.

All arithmetic is float32, step by step, each step rounded once, to nearest even, so that a kernel
can give the same bits. For a group of a row, with the `scale` of the tensor or head:

1. x: the elements as float32, NaN as 0; absmax: the largest magnitude, at most the largest float32
2. divisor = float32(limit * scale), with the largest code as limit: 6, or 7 of int4
3. quotient = float32(absmax / divisor)
4. group scale = quotient in its format: to nearest even and at most the largest finite value (e4m3,
   fp16), or the power of two that is not below it, from 2**-127 to 2**127 (e8m0). At least the
   smallest positive value; but in a group of zeros 0, or 2**-127 in e8m0
5. step = float32(group scale * scale), at least 2**-149
6. code = the nearest even code of float32(x / step), with its sign, saturating: E2M1, or integers
   from -7 to 7. In a group of zeros 0

A code stands for float32(code * float32(group scale * scale)).

Rows may be rotated: their first elements, `rotated_width` of them, are multiplied by an orthonormal
Hadamard matrix in blocks of the largest power of two that divides their number. Before step 1, NaN
as 0 and magnitudes as at most 2**112, so that sums stay finite; and again, without those bounds,
when codes have become numbers. In each block of B elements, for half = 1, 2, 4, ... below B:
x[i], x[i + half] = float32(x[i] + x[i + half]), float32(x[i] - x[i + half]) for all i of which the
bit `half` is 0. Then each is multiplied by float32(1 / sqrt(B)). All later steps see the result.

With the scale rule "four_over_six" (arXiv 2512.02010; nvfp4 alone) a group goes through steps 2 to
6 twice, with limits of 6 and of 4. Of what either stands for, the squares of the differences from x
are added in the order of elements, from 0 on: error = float32(error + float32(d * d)),
d = float32(x - float32(code * step)). The limit 4 is taken where its error is the smaller of two
numbers; where they are equal, or one is NaN, it is 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .formats import Array, Float32, Float64, decode, encode

#: The largest magnitude of a number that is rotated.
ROTATED_LIMIT = np.float32(2.0**112)

#: The smallest positive float32.
TINY = np.float32(2.0**-149)


@dataclass(frozen=True)
class FourBitFormat:
    """How a four-bit format is stored."""

    code: str
    """"e2m1", or "int4": two's complement."""
    group: int
    """Elements that share a scale."""
    scale: str
    """The format of group scales: "fp8_e4m3", "e8m0" or "fp16"."""
    scale_carrier: str
    """The dtype of their bits."""
    smallest_scale: float

    @property
    def limit(self) -> float:
        """The largest magnitude of a code."""
        return {"e2m1": 6.0, "int4": 7.0}[self.code]

    @property
    def group_bytes(self) -> int:
        """Bytes of a group with its scale."""
        return self.group // 2 + np.dtype(self.scale_carrier).itemsize


FOUR_BIT = {
    "nvfp4": FourBitFormat("e2m1", 16, "fp8_e4m3", "uint8", 2.0**-9),
    "mxfp4": FourBitFormat("e2m1", 32, "e8m0", "uint8", 2.0**-127),
    "int4": FourBitFormat("int4", 32, "fp16", "uint16", 2.0**-24),
}


class FourBitRows:
    """Rows of a four-bit format, in place: the codes and the scales of an array.

    Parameters
    ----------
    codes : uint8 ``(..., D / 2)``, element 2i in the low nibble of byte i
    scales : the bits of the group scales, ``(..., D / group)``: uint8, or uint16 for fp16
    rotated_width : the first elements of a row, which are stored rotated
    scale_rule : how groups get their scales: "absmax" or "four_over_six"
    """

    def __init__(
        self,
        codes: Array,
        scales: Array,
        fmt: str,
        rotated_width: int = 0,
        scale_rule: str = "absmax",
    ) -> None:
        self.codes, self.scales, self.fmt = codes, scales, fmt
        self.rotated_width, self.scale_rule = rotated_width, scale_rule
        self.shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        self.ndim = len(self.shape)

    @property
    def encoding(self) -> str:
        """What the bytes are: the format, and how many elements are rotated."""
        return f"{self.fmt}+hadamard:{self.rotated_width}" if self.rotated_width else self.fmt

    @classmethod
    def packed(
        cls, rows: Array, fmt: str, rotated_width: int = 0, scale_rule: str = "absmax"
    ) -> FourBitRows:
        """Return the rows of uint8 ``(..., row_bytes)``, each its codes and then its scales."""
        form = FOUR_BIT[fmt]
        split = rows.shape[-1] // form.group_bytes * (form.group // 2)
        scales = rows[..., split:].view(form.scale_carrier)
        return cls(rows[..., :split], scales, fmt, rotated_width, scale_rule)

    def _of(self, codes: Array, scales: Array, rotated_width: int) -> FourBitRows:
        return FourBitRows(codes, scales, self.fmt, rotated_width, self.scale_rule)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Any) -> FourBitRows:
        """Index the axes before the last."""
        return self._of(self.codes[index], self.scales[index], self.rotated_width)

    def __setitem__(self, index: Any, other: FourBitRows) -> None:
        self.codes[index], self.scales[index] = other.codes, other.scales

    def columns(self, start: int, stop: int) -> FourBitRows:
        """Return some elements of each row, whole groups, and all that are rotated or none."""
        group = FOUR_BIT[self.fmt].group
        codes = self.codes[..., start // 2 : stop // 2]
        scales = self.scales[..., start // group : stop // group]
        return self._of(codes, scales, 0 if start else self.rotated_width)

    def swapaxes(self, first: int, second: int) -> FourBitRows:
        """Exchange two axes before the last."""
        codes, scales = (a.swapaxes(first, second) for a in (self.codes, self.scales))
        return self._of(codes, scales, self.rotated_width)


def decode_codes(packed: Array, code: str) -> Float64:
    """Return the values of packed codes, uint8 ``(..., n)``, as float64 ``(..., 2n)``."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1)
    nibbles = nibbles.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    if code == "int4":
        signed = nibbles.astype(np.int64)
        return np.where(signed > 7, signed - 16, signed).astype(np.float64)
    return decode(nibbles, "e2m1")


def encode_codes(values: Array, code: str) -> Array:
    """Round values to codes once, to nearest even, saturating; NaN becomes 0."""
    known = np.where(np.isnan(values), 0.0, np.asarray(values, np.float64))
    if code == "int4":
        nibbles = np.clip(np.rint(known), -7, 7).astype(np.int64) & 15
    else:
        nibbles = encode(known, "e2m1")
    nibbles = nibbles.astype(np.uint8)
    return np.asarray(nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), np.uint8)


def decode_scales(bits: Array, fmt: str) -> Float32:
    """Return the values of the bits of group scales; float32 holds each of them."""
    form = FOUR_BIT[fmt]
    if form.scale == "e8m0":
        values = np.ldexp(1.0, bits.astype(np.int32) - 127)
        return np.where(bits == 255, np.nan, values).astype(np.float32)
    return decode(np.ascontiguousarray(bits), form.scale).astype(np.float32)


def encode_scales(quotients: Array, are_zero: Array, fmt: str) -> Array:
    """Return the bits of group scales, of quotients that are not negative (step 4)."""
    form = FOUR_BIT[fmt]
    if form.scale == "e8m0":
        wide = np.asarray(quotients, np.float64)
        mantissa, exponent = np.frexp(np.where(np.isinf(wide), 2.0**127, wide))
        exponent = np.where(mantissa > 0.5, exponent, exponent - 1)  # 2**exponent >= the quotient
        exponent = np.where((wide == 0) | are_zero, -127, np.clip(exponent, -127, 127))
        return np.asarray(exponent + 127, np.uint8)
    largest = 448.0 if form.scale == "fp8_e4m3" else 65504.0
    bounded = np.minimum(np.asarray(quotients, np.float64), largest)
    bits = encode(bounded, form.scale)  # the smallest positive value has the bits 1
    bits = np.where(are_zero, 0, np.maximum(bits, 1))
    return np.asarray(bits, form.scale_carrier)


def _quantise_by_largest(
    groups: Array, scale: Array, fmt: str, limit: float
) -> tuple[Array, Array]:
    """Return the quotients that are rounded to codes, and the bits of scales."""
    absmax = np.minimum(np.abs(groups).max(axis=-1), np.finfo(np.float32).max)
    divisor = np.asarray(np.float32(limit) * scale, np.float32)
    bits = encode_scales(np.asarray(absmax / divisor, np.float32), absmax == 0, fmt)
    step = np.asarray(decode_scales(bits, fmt) * scale, np.float32)
    quotients = np.asarray(groups / np.maximum(step, TINY)[..., None], np.float32)
    return np.where((absmax == 0)[..., None], np.float32(0), quotients), bits


def _squared_error(groups: Array, quotients: Array, bits: Array, scale: Array, fmt: str) -> Float32:
    """Return what is lost of each group, in float32, the squares added in order."""
    form = FOUR_BIT[fmt]
    codes = decode_codes(encode_codes(quotients, form.code), form.code).astype(np.float32)
    step = np.asarray(decode_scales(bits, fmt) * scale, np.float32)
    errors = np.asarray(groups - np.asarray(codes * step[..., None], np.float32), np.float32)
    squares = np.asarray(errors * errors, np.float32)
    total = np.zeros(squares.shape[:-1], np.float32)
    for i in range(form.group):
        total = np.asarray(total + squares[..., i], np.float32)
    return total


def quantise_rows(
    rows: Array, target: FourBitRows, scales: Array, *, limit: float | None = None
) -> None:
    """Store rows in a four-bit format, by the steps above."""
    form = FOUR_BIT[target.fmt]
    limit = form.limit if limit is None else limit
    with np.errstate(all="ignore"):
        x = np.where(np.isnan(rows), np.float32(0), rows.astype(np.float32))
        if target.rotated_width:
            bounded = np.clip(x, -ROTATED_LIMIT, ROTATED_LIMIT)
            x[..., : target.rotated_width] = bounded[..., : target.rotated_width]
            x = rotate_rows(x, target.rotated_width)
        groups = x.reshape(*x.shape[:-1], x.shape[-1] // form.group, form.group)
        scale = np.asarray(scales, np.float32)[..., None]
        quotients, bits = _quantise_by_largest(groups, scale, target.fmt, limit)
        if target.scale_rule == "four_over_six":
            four, other = _quantise_by_largest(groups, scale, target.fmt, 4.0)
            errors = (
                _squared_error(groups, *rounded, scale, target.fmt)
                for rounded in ((four, other), (quotients, bits))
            )
            prefers_four = next(errors) < next(errors)
            quotients = np.where(prefers_four[..., None], four, quotients)
            bits = np.where(prefers_four, other, bits)
    target.codes[...] = encode_codes(quotients.reshape(x.shape), form.code)
    target.scales[...] = bits


def dequantise_rows(rows: FourBitRows, scales: Array | None = None) -> Float32:
    """Return the values of rows, float32 ``(..., D)``."""
    form = FOUR_BIT[rows.fmt]
    codes = decode_codes(rows.codes, form.code).astype(np.float32)
    with np.errstate(all="ignore"):
        step = decode_scales(rows.scales, rows.fmt)
        if scales is not None:
            step = np.asarray(step * np.asarray(scales, np.float32)[..., None], np.float32)
        values = np.asarray(codes * np.repeat(step, form.group, axis=-1), np.float32)
        return rotate_rows(values, rows.rotated_width)


def rotate_rows(rows: Float32, rotated_width: int) -> Float32:
    """Rotate the first elements of rows in float32, step by step as above; again undoes it."""
    if not rotated_width:
        return rows
    block = rotated_width & -rotated_width
    x = np.asarray(rows[..., :rotated_width], np.float32).reshape(-1, block)
    half = 1
    with np.errstate(all="ignore"):
        while half < block:
            first, second = np.moveaxis(x.reshape(-1, block // (2 * half), 2, half), 2, 0)
            x = np.stack([first + second, first - second], axis=2).reshape(-1, block)
            half *= 2
        x = np.asarray(x * np.float32(1 / np.sqrt(block)), np.float32)
    rotated = x.reshape(*rows.shape[:-1], rotated_width)
    return np.concatenate([rotated, rows[..., rotated_width:]], axis=-1)


def hadamard(rows: Array) -> Float64:
    """Multiply the last dimension by an orthonormal Hadamard matrix, which is its own inverse.

    It spreads an outlier over its whole block, so that group scales follow the rest of the row.
    Queries multiplied by it have the same products with keys multiplied by it. In float64; what
    operations do in float32 is `rotate_rows`.
    """
    width = rows.shape[-1]
    block = width & -width
    x = np.asarray(rows, np.float64).reshape(-1, block)
    half = 1
    while half < block:
        first, second = np.moveaxis(x.reshape(-1, block // (2 * half), 2, half), 2, 0)
        x = np.stack([first + second, first - second], axis=2).reshape(-1, block)
        half *= 2
    return np.asarray(x.reshape(rows.shape) / np.sqrt(block), np.float64)
