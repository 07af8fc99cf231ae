"""State what every operation computes, in NumPy, one function an operation.

This module is the specification that the kernels are tested against. It is written to be read:
number formats are taken apart into their bits, tokens are visited one after another, and nothing
is done twice in two ways. It imports NumPy alone and checks no arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Scale = float | Array | None
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Faults = list[tuple[int, int]]

#: What `dtype.name` says, and the format that it names.
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

#: Dynamic scales never divide by a smaller absolute maximum than this.
SMALLEST_ABSMAX = np.float32(1e-6)


@dataclass(frozen=True)
class FloatFormat:
    """Describe a binary floating-point format of one sign bit, an exponent and a mantissa."""

    carrier: str
    """The unsigned integer type that holds the bits."""
    exponent_bits: int
    mantissa_bits: int
    largest: int
    """The bits of the largest finite value; with infinities, `largest + 1` is infinity."""
    has_infinity: bool
    overflow: int
    """The bits that a value too large becomes."""
    nan: int

    @property
    def bias(self) -> int:
        """The exponent field that stands for 2**0."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def sign(self) -> int:
        """The bit that makes a value negative."""
        return 1 << (self.exponent_bits + self.mantissa_bits)


FLOAT_FORMATS = {
    "fp32": FloatFormat("uint32", 8, 23, 0x7F7FFFFF, True, 0x7F800000, 0x7FC00000),
    "fp16": FloatFormat("uint16", 5, 10, 0x7BFF, True, 0x7C00, 0x7E00),
    "bf16": FloatFormat("uint16", 8, 7, 0x7F7F, True, 0x7F80, 0x7FC0),
    "fp8_e4m3": FloatFormat("uint8", 4, 3, 0x7E, False, 0x7E, 0x7F),
    "fp8_e5m2": FloatFormat("uint8", 5, 2, 0x7B, True, 0x7B, 0x7E),
}


def format_of(array: Array) -> str:
    """Name the number format of an array, from its dtype."""
    return FORMAT_OF_DTYPE[array.dtype.name]


def bits_of(array: Array, fmt: str) -> Array:
    """View the elements of `array` as unsigned integers, without a copy."""
    return array.view("uint8" if fmt == "int8" else FLOAT_FORMATS[fmt].carrier)


def decode(array: Array, fmt: str) -> Float64:
    """Give the exact values of an array's bits, which every format here fits into float64.

    The elements may be of any dtype of the format's width; only their bits are read.
    """
    if fmt == "int8":
        return array.view(np.int8).astype(np.float64)
    form = FLOAT_FORMATS[fmt]
    bits = bits_of(array, fmt).astype(np.int64)
    magnitude = bits & (form.sign - 1)
    exponent = magnitude >> form.mantissa_bits
    mantissa = magnitude & ((1 << form.mantissa_bits) - 1)

    # A zero exponent field means no hidden bit, at the exponent of field one.
    significand = mantissa + np.where(exponent > 0, 1 << form.mantissa_bits, 0)
    power = np.maximum(exponent, 1) - form.bias - form.mantissa_bits
    value = np.ldexp(significand.astype(np.float64), power.astype(np.int32))

    value = np.where(magnitude > form.largest, np.nan, value)
    if form.has_infinity:
        value = np.where(magnitude == form.largest + 1, np.inf, value)
    return np.asarray(np.copysign(value, np.where(bits & form.sign, -1.0, 1.0)), np.float64)


def encode(values: Array, fmt: str) -> Array:
    """Round values to a format, once, to the nearest, ties to even.

    Values too large become infinity in fp32, fp16 and bf16, and the largest finite value of the
    same sign in the quantised formats, infinities included. NaN stays NaN; in int8 it is 0.

    Returns
    -------
    array of the format's carrier: float32, uint16 (fp16, bf16), uint8 (fp8) or int8
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN like any other
        x = np.asarray(values, np.float64)
    if fmt == "int8":
        limit = LIMIT[fmt]
        return np.clip(np.rint(np.where(np.isnan(x), 0.0, x)), -limit, limit).astype(np.int8)
    form = FLOAT_FORMATS[fmt]
    finite = np.where(np.isfinite(x), np.abs(x), 0.0)

    # Round in units of the last place. Subnormals share the unit of the smallest normal number.
    lowest = 1 - form.bias
    exponent = np.where(finite > 0, np.maximum(np.frexp(finite)[1] - 1, lowest), lowest)
    units = np.rint(np.ldexp(finite, form.mantissa_bits - exponent)).astype(np.int64)

    # `units` carries the hidden bit, so adding it to the exponent field below sets both right,
    # also where rounding reached the next power of two.
    bits = (((exponent + form.bias - 1).astype(np.int64)) << form.mantissa_bits) + units
    bits = np.where((bits > form.largest) | np.isinf(x), form.overflow, bits)
    bits = np.where(np.isnan(x), form.nan, bits)
    bits = bits | np.where(np.signbit(x), form.sign, 0)
    stored = bits.astype(form.carrier)
    return stored.view(np.float32) if fmt == "fp32" else stored


def dynamic_scales(rows: Float32, fmt: str) -> Float32:
    """Give the scale of each row: `max(absmax, 1e-6) / limit`, in float32.

    NaN elements do not count, and an infinity counts as the largest float32, so that a scale is
    always finite and positive.
    `rows` is float32 ``(H, D)``; `fmt` is the quantised format that they will be stored in.
    """
    magnitude = np.where(np.isnan(rows), np.float32(0), np.abs(rows))
    magnitude = np.minimum(magnitude, np.finfo(np.float32).max)
    absmax = np.maximum(magnitude.max(axis=1), SMALLEST_ABSMAX)
    return np.asarray(absmax / np.float32(LIMIT[fmt]), np.float32)


def divide(rows: Float32, scales: Float32) -> Float32:
    """Divide each row by its scale: one true float32 division an element, rounded to nearest."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(rows / scales[:, None], np.float32)


def _scale_per_head(scale: Scale, num_heads: int) -> Float32:
    """Spread None, a float, or an array of one or `num_heads` elements over the heads."""
    values = np.asarray(1.0 if scale is None else scale, np.float32).reshape(-1)
    return np.broadcast_to(values, (num_heads,))


def _store_row(row: Array, target: Array, scales: Float32, scale_row: Array | None = None) -> None:
    """Write one token, `row` (H, D), to `target`, a view of its slot in the cache.

    With `scale_row` (H,), the scales come from the row itself and are recorded there.
    """
    source, destination = format_of(row), format_of(target)
    if source == destination:  # Nothing to round: the bits go over as they are, unscaled.
        bits_of(target, destination)[...] = bits_of(row, source)
        if scale_row is not None:
            scale_row[...] = np.float32(1)
        return
    x = decode(row, source).astype(np.float32)  # exact: float32 holds every format here
    if scale_row is not None:
        scales = dynamic_scales(x, destination)
        scale_row[...] = scales
    stored = encode(divide(x, scales), destination)
    bits_of(target, destination)[...] = bits_of(stored, destination)


def num_slots(cache: Array, layout: str = "NHD") -> int:
    """Count the tokens that a cache of 2, 3 or 4 dimensions holds."""
    if cache.ndim < 4:
        return int(cache.shape[0])
    return int(cache.shape[0] * cache.shape[1 if layout == "NHD" else 2])


def slot_row(cache: Array, slot: int, layout: str = "NHD") -> Array:
    """View the (H, D) elements of one slot; a 2-D cache has one head."""
    if cache.ndim < 4:
        return np.atleast_2d(cache[slot])
    pages = cache if layout == "NHD" else cache.swapaxes(1, 2)
    page, offset = divmod(slot, pages.shape[1])
    return np.asarray(pages[page, offset])


def _targets(
    slot_mapping: Array, slots_in_cache: int, skip_slot: int | None
) -> tuple[list[tuple[int, int]], Faults]:
    """Split (token, slot) pairs into those to write and those past the end; drop the skipped."""
    writes: list[tuple[int, int]] = []
    faults: Faults = []
    for position, slot in enumerate(slot_mapping.tolist()):
        if slot < 0 or slot == skip_slot:
            continue
        (faults if slot >= slots_in_cache else writes).append((position, slot))
    return writes, faults


def store_kv(
    key: Array,
    value: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    *,
    layout: str = "NHD",
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scale_cache: Array | None = None,
    v_scale_cache: Array | None = None,
    skip_slot: int | None = None,
) -> Faults:
    """Write the rows of K and V to their slots, in place.

    Parameters
    ----------
    key, value
        ``(T, H, D)`` and ``(T, H, Dv)``, or ``(T, width)``; rows past the slots are not read.
    k_cache, v_cache
        ``(num_slots, H, D)``, ``(num_slots, width)``, or paged as `layout` says.
    layout
        ``"NHD"`` ``(num_pages, page_size, H, D)`` or ``"HND"`` ``(num_pages, H, page_size, D)``.
    slot_mapping, skip_slot
        Integers, one a token; negative ones and those equal to `skip_slot` write nothing.
    k_scale, v_scale
        None, a float, or an array of one or H elements; for quantised caches.
    k_scale_cache, v_scale_cache
        float32 ``(num_slots, H)``, receiving the scale of each stored row and head.

    Returns
    -------
    list of (position, slot)
        The slots past the end, which wrote nothing.
    """
    writes, faults = _targets(slot_mapping, num_slots(k_cache, layout), skip_slot)
    sides = ((key, k_cache, k_scale, k_scale_cache), (value, v_cache, v_scale, v_scale_cache))
    for rows, cache, scale, scale_cache in sides:
        scales = _scale_per_head(scale, rows.shape[1] if rows.ndim == 3 else 1)
        for token, slot in writes:
            row, target = np.atleast_2d(rows[token]), slot_row(cache, slot, layout)
            _store_row(row, target, scales, None if scale_cache is None else scale_cache[slot])
    return faults


def store_mla(
    latent: Array,
    rope_key: Array,
    cache: Array,
    slot_mapping: Array,
    *,
    scale: Scale = None,
    skip_slot: int | None = None,
) -> Faults:
    """Write a latent ``(T, R)`` and its rotated key ``(T, P)`` side by side, in place.

    The cache is ``(num_slots, R + P)`` or ``(num_pages, page_size, R + P)``, with one scale for
    both parts. Slots, `skip_slot` and the faults returned are those of `store_kv`.
    """
    heads = cache[:, :, None] if cache.ndim == 3 else cache[:, None]
    writes, faults = _targets(slot_mapping, num_slots(heads), skip_slot)
    scales = _scale_per_head(scale, 1)
    rank = latent.shape[1]
    for token, slot in writes:
        target = slot_row(heads, slot)
        _store_row(latent[token][None], target[:, :rank], scales)
        _store_row(rope_key[token][None], target[:, rank:], scales)
    return faults


def find_duplicate_slots(slot_mapping: Array) -> npt.NDArray[np.int64]:
    """List the slots, padding aside, that occur twice or more, in rising order."""
    slots, counts = np.unique(slot_mapping[slot_mapping >= 0], return_counts=True)
    return slots[counts > 1].astype(np.int64)
