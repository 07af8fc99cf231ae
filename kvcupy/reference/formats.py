"""The number formats, taken apart into their bits: exact values in, one rounding out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

#: Formats by the name of their NumPy dtype.
FORMAT_OF_DTYPE = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "int8": "int8",
}

#: The largest magnitude that a quantised format stores; beyond it, values saturate.
LIMIT = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: one sign bit, an exponent and a mantissa."""

    carrier: str
    """The unsigned integer type that holds the bits."""
    exponent_bits: int
    mantissa_bits: int
    largest: int
    """The bits of the largest finite value; with infinities, `largest + 1` is infinity."""
    has_infinity: bool
    overflow: int
    """The bits of a value that is too large."""
    nan: int

    @property
    def bias(self) -> int:
        """The exponent field that stands for 2**0."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.exponent_bits + self.mantissa_bits)


FLOAT_FORMATS = {
    "fp32": FloatFormat("uint32", 8, 23, 0x7F7FFFFF, True, 0x7F800000, 0x7FC00000),
    "fp16": FloatFormat("uint16", 5, 10, 0x7BFF, True, 0x7C00, 0x7E00),
    "bf16": FloatFormat("uint16", 8, 7, 0x7F7F, True, 0x7F80, 0x7FC0),
    "fp8_e4m3": FloatFormat("uint8", 4, 3, 0x7E, False, 0x7E, 0x7F),
    "fp8_e5m2": FloatFormat("uint8", 5, 2, 0x7B, True, 0x7B, 0x7E),
    "e2m1": FloatFormat("uint8", 2, 1, 0x7, False, 0x7, 0x0),  # of four_bit.py: it has no NaN
}


def format_of(array: Array) -> str:
    """Return the number format of an array, from its dtype."""
    return FORMAT_OF_DTYPE[array.dtype.name]


def bits_of(array: Array, fmt: str) -> Array:
    """Return the elements of `array` as unsigned integers, without a copy."""
    return array.view("uint8" if fmt == "int8" else FLOAT_FORMATS[fmt].carrier)


def decode(array: Array, fmt: str) -> Float64:
    """Return the exact values of an array's bits: float64 holds every value of these formats.

    The elements may be of any dtype of the format's width; only their bits are read.
    """
    if fmt == "int8":
        return array.view(np.int8).astype(np.float64)
    if fmt == "fp32":
        with np.errstate(invalid="ignore"):  # signalling NaN
            return array.view(np.float32).astype(np.float64)
    values = _values_of_all_bits(fmt)[bits_of(array, fmt)]
    return np.asarray(values, np.float64)


@cache
def _values_of_all_bits(fmt: str) -> Float64:
    """Return the value of every pattern of a format of at most 16 bits."""
    carrier = FLOAT_FORMATS[fmt].carrier
    return _values_of_bits(np.arange(np.iinfo(carrier).max + 1, dtype=carrier), fmt)


def _values_of_bits(bits: Array, fmt: str) -> Float64:
    """Return the exact values of bits."""
    float_format = FLOAT_FORMATS[fmt]
    bits = bits.astype(np.int64)
    magnitude = bits & (float_format.sign - 1)
    exponent = magnitude >> float_format.mantissa_bits
    mantissa = magnitude & ((1 << float_format.mantissa_bits) - 1)

    # Subnormals: a zero exponent field has no hidden bit, and the exponent of field one.
    significand = mantissa + np.where(exponent > 0, 1 << float_format.mantissa_bits, 0)
    power = np.maximum(exponent, 1) - float_format.bias - float_format.mantissa_bits
    value = np.ldexp(significand.astype(np.float64), power.astype(np.int32))

    value = np.where(magnitude > float_format.largest, np.nan, value)
    if float_format.has_infinity:
        value = np.where(magnitude == float_format.largest + 1, np.inf, value)
    return np.asarray(np.copysign(value, np.where(bits & float_format.sign, -1.0, 1.0)), np.float64)


def encode(values: Array, fmt: str) -> Array:
    """Round values to a format once, to nearest, ties to even.

    Values too large become infinity in fp32, fp16 and bf16, and the largest finite value of the
    same sign in the quantised formats, infinities included. NaN stays NaN; in int8 it is 0.

    Returns
    -------
    array of the format's carrier: float32, uint16 (fp16, bf16), uint8 (fp8) or int8
    """
    with np.errstate(invalid="ignore"):  # signalling NaN
        x = np.asarray(values, np.float64)
    if fmt == "int8":
        limit = LIMIT[fmt]
        return np.clip(np.rint(np.where(np.isnan(x), 0.0, x)), -limit, limit).astype(np.int8)
    float_format = FLOAT_FORMATS[fmt]
    # Normal numbers: the bits of a float64, rounded where the mantissa of the format ends. A carry
    # increments the exponent.
    dropped = 52 - float_format.mantissa_bits
    bits = np.abs(x).view(np.int64)
    stored = (bits + ((bits >> dropped & 1) + (1 << dropped - 1) - 1)) >> dropped
    stored -= (1023 - float_format.bias) << float_format.mantissa_bits
    is_normal = (np.abs(x) >= 2.0 ** (1 - float_format.bias)) & (stored <= float_format.largest)
    stored |= np.where(np.signbit(x), float_format.sign, 0)
    if not is_normal.all():
        stored = np.where(is_normal, stored, 0)
        stored[~is_normal] = _encode_any(x[~is_normal], float_format)
    stored = stored.astype(float_format.carrier)
    return stored.view(np.float32) if fmt == "fp32" else stored


def _encode_any(x: Float64, float_format: FloatFormat) -> Array:
    """Return the bits of any float64, int64: of subnormals, infinities and NaN too."""
    finite = np.where(np.isfinite(x), np.abs(x), 0.0)

    # Round in units of the last place. Subnormals share the unit of the smallest normal number.
    lowest = 1 - float_format.bias
    exponent = np.where(finite > 0, np.maximum(np.frexp(finite)[1] - 1, lowest), lowest)
    units = np.rint(np.ldexp(finite, float_format.mantissa_bits - exponent)).astype(np.int64)

    # `units` includes the hidden bit, so that the sum has the right exponent also where rounding
    # reached the next power of two.
    field = (exponent + float_format.bias - 1).astype(np.int64)
    bits = (field << float_format.mantissa_bits) + units
    bits = np.where((bits > float_format.largest) | np.isinf(x), float_format.overflow, bits)
    bits = np.where(np.isnan(x), float_format.nan, bits)
    return np.asarray(bits | np.where(np.signbit(x), float_format.sign, 0))
