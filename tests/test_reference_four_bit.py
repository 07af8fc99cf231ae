"""Prove the specification of the four-bit formats against ml_dtypes, bit by bit."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from kvcupy import formats, reference
from kvcupy.reference import FOUR_BIT, FourBitRows

CODES = {"e2m1": ml_dtypes.float4_e2m1fn, "int4": ml_dtypes.int4}
LIMITS = {"e2m1": (-6, 6), "int4": (-7, 7)}
SCALES = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "e8m0": ml_dtypes.float8_e8m0fnu, "fp16": np.float16}
LARGEST = {"fp8_e4m3": 448.0, "e8m0": 2.0**127, "fp16": 65504.0}


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Each element's four bits, low nibble first."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def of_nibbles(bits: np.ndarray, code: str) -> np.ndarray:
    """What ml_dtypes says that four bits mean."""
    if code == "int4":
        return ((bits.astype(np.int8) ^ 8) - 8).astype(ml_dtypes.int4).astype(np.float64)
    return bits.view(ml_dtypes.float4_e2m1fn).astype(np.float64)


@pytest.mark.parametrize("code", CODES)
def test_decode_of_every_byte(code):
    packed = np.arange(256, dtype=np.uint8)[:, None]
    want = of_nibbles(nibbles(packed), code)
    got = reference.decode_codes(packed, code)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize("code", CODES)
def test_encode_around_every_boundary(code):
    """To nearest even; beyond the largest, and infinities, saturate."""
    exact = np.unique(of_nibbles(np.arange(16, dtype=np.uint8), code))
    middle = ((exact[:-1] + exact[1:]) / 2).astype(np.float32)
    around = [np.nextafter(middle, np.float32(s * np.inf)) for s in (-1, 1)]
    rng = np.random.default_rng(0)
    values = np.concatenate([exact, middle, *around, rng.normal(0, 4, 2**14)]).astype(np.float32)
    values = np.concatenate([values, np.zeros(len(values) % 2, np.float32)])
    least, most = LIMITS[code]
    bounded = np.clip(values, least, most)
    want = (np.rint(bounded) if code != "e2m1" else bounded).astype(CODES[code])
    got = of_nibbles(nibbles(reference.encode_codes(values, code)), code)
    np.testing.assert_array_equal(got, want.astype(np.float64))
    special = np.array([np.inf, -np.inf, np.nan, -np.nan], np.float32)
    got = of_nibbles(nibbles(reference.encode_codes(special, code)), code)
    assert got.tolist() == [most, least, 0, 0]


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "int4"])
def test_decode_of_every_scale(fmt):
    form = FOUR_BIT[fmt]
    bits = np.arange(2 ** (8 * np.dtype(form.scale_carrier).itemsize)).astype(form.scale_carrier)
    want = bits.view(SCALES[form.scale]).astype(np.float32)
    np.testing.assert_array_equal(reference.decode_scales(bits, fmt), want)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "int4"])
def test_scales_are_rounded_as_stated(fmt):
    form, rng = FOUR_BIT[fmt], np.random.default_rng(1)
    exact = reference.decode_scales(
        np.arange(2 ** (8 * np.dtype(form.scale_carrier).itemsize)).astype(form.scale_carrier), fmt
    )
    exact = np.unique(exact[np.isfinite(exact) & (exact > 0)])
    middle = (exact[:-1].astype(np.float64) + exact[1:]) / 2
    values = np.concatenate([exact, middle, rng.uniform(0, 1, 4096) * 2.0 ** rng.integers(-40, 40)])
    values = np.concatenate([values, np.ldexp(1.0, rng.integers(-149, 128, 4096))])
    values = values.astype(np.float32)
    values = np.concatenate([values, np.nextafter(values, np.float32(np.inf)), [np.float32(1e-45)]])
    values = values.astype(np.float32)
    got = reference.decode_scales(reference.encode_scales(values, np.False_, fmt), fmt)
    if form.scale == "e8m0":
        kept = values <= 2.0**127
        assert (got[kept] >= values[kept]).all()
        above_least = kept & (got > 2.0**-127)
        assert (got[above_least] / 2 < values[above_least]).all()
        np.testing.assert_array_equal(np.frexp(got)[0], 0.5)
        assert (got[~kept] == 2.0**127).all()
    else:
        bounded = np.minimum(values, np.float32(LARGEST[form.scale]))
        want = bounded.astype(SCALES[form.scale]).astype(np.float32)
        want = np.maximum(want, np.float32(form.smallest_scale))
        np.testing.assert_array_equal(got, want)
    zero = reference.encode_scales(np.array([0.0, np.nan]), np.True_, fmt)
    assert zero.tolist() == [0, 0]
    assert reference.encode_scales(np.array([0.0, np.inf]), np.False_, fmt).tolist() == [
        0 if fmt == "mxfp4" else 1,
        {"nvfp4": 0x7E, "mxfp4": 254, "int4": 0x7BFF}[fmt],
    ]


def random_rows(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Rows of all magnitudes, with zeros, outliers and special values."""
    rows = rng.standard_normal((count, width)) * 10.0 ** rng.integers(-42, 38, (count, 1))
    rows[0] = 0
    rows[1] = rng.standard_normal(width)
    rows[2, ::5] = 0
    rows[3, 3], rows[4, 5], rows[5, 7] = np.inf, -np.inf, np.nan
    rows[6] = np.nan
    rows[7] = -0.0
    with np.errstate(over="ignore", under="ignore"):
        return rows.astype(np.float32)


def empty_rows(fmt: str, *shape: int) -> FourBitRows:
    bytes_per_row = formats.FOUR_BIT[fmt].row_bytes(shape[-1])
    return FourBitRows.packed(np.zeros((*shape[:-1], bytes_per_row), np.uint8), fmt)


def quantised_one_by_one(group: list[float], fmt: str, scale: float) -> tuple[float, list[float]]:
    """The group scale and the codes of finite elements, in exact fractions.

    The steps that are rounded to float32 are those that the specification says.
    """
    form = FOUR_BIT[fmt]
    single = lambda x: Fraction(float(np.float32(float(x))))  # noqa: E731
    values = [Fraction(x) for x in group]
    absmax = max(map(abs, values))
    if not absmax:
        return (2.0**-127 if form.scale == "e8m0" else 0.0), [0.0] * len(group)
    quotient = float(np.float32(float(absmax)) / np.float32(single(form.limit * Fraction(scale))))
    bounded = np.float32(min(quotient, LARGEST[form.scale]))
    if form.scale == "e8m0":
        own = 2.0**-127
        while own < bounded:
            own *= 2
    else:
        own = max(float(bounded.astype(SCALES[form.scale])), form.smallest_scale)
    step = np.float32(own) * np.float32(scale)
    codes = []
    for x in values:
        ratio = float(np.float32(float(x)) / step)
        bounded = min(max(ratio, -form.limit), form.limit)
        code = np.rint(bounded) if form.code == "int4" else np.float32(bounded)
        codes.append(float(np.asarray(code).astype(CODES[form.code]).astype(np.float32)))
    return own, codes


@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_rows_are_quantised_as_stated(fmt):
    form, rng = FOUR_BIT[fmt], np.random.default_rng(2)
    rows = random_rows(rng, 24, 2 * form.group)
    scales = np.where(np.arange(24) % 3, 1, 10.0 ** rng.uniform(-3, 3, 24)).astype(np.float32)
    target = empty_rows(fmt, *rows.shape)
    reference.quantise_rows(rows, target, scales)
    codes = of_nibbles(nibbles(target.codes), form.code)
    own = reference.decode_scales(target.scales, fmt)
    for i, row in enumerate(np.nan_to_num(rows, nan=0.0, posinf=None, neginf=None)):
        for g in range(2):
            part = slice(g * form.group, (g + 1) * form.group)
            with np.errstate(all="ignore"):
                want = quantised_one_by_one(row[part].tolist(), fmt, float(scales[i]))
            for at in np.flatnonzero(np.isinf(rows[i, part])):
                want[1][at] = float(np.copysign(form.limit, rows[i, part][at]))
            assert (float(own[i, g]), codes[i, part].tolist()) == want, (i, g)
    assert not target.codes[6:8].any() and not target.scales[6:8].any()  # NaN and -0.0 alone


@pytest.mark.parametrize("width, block", [(128, 128), (80, 16), (96, 32), (7, 1)])
def test_hadamard_by_the_signs_of_its_matrix(width, block):
    """Entry (i, j) of a block is -1 to the number of bits that i and j share, over its root."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
    matrix = np.kron(np.eye(width // block), signs) / np.sqrt(block)
    rows = np.random.default_rng(0).standard_normal((3, 2, width)).astype(np.float32)
    rotated = reference.hadamard(rows)
    np.testing.assert_allclose(rotated, rows.astype(np.float64) @ matrix, rtol=0, atol=1e-12)
    np.testing.assert_allclose(reference.hadamard(rotated), rows, rtol=0, atol=1e-12)
