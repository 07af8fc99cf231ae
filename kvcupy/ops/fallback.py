"""What the fallbacks of all operations share: number formats and faults in array code.

A fallback is what an operation runs where its kernel cannot be compiled: the same work with NumPy
or CuPy, slowly, and bit for bit what the kernels give (`kernels_src/numeric.cuh`). Each lies in the
module of its family.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .. import dtypes
from ..devices.protocol import Device

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
        table = np.arange(256, dtype=np.uint8).view(dtypes.FORMATS[name].numpy).astype(np.float32)
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
    return values.astype(dtypes.FORMATS[name].carrier)


def _encode_fp8(xp: Any, values: Any, name: str) -> Any:
    mantissa_bits, lowest = _FP8[name]
    unknown = xp.isnan(values)
    magnitude = xp.minimum(xp.abs(xp.where(unknown, 0, values)), dtypes.FORMATS[name].limit)
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
    limit = np.float32(dtypes.FORMATS[name].limit or 1)
    return xp.maximum(largest, np.float32(1e-6)).astype(xp.float32) / limit


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
