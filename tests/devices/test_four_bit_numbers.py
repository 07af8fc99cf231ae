"""The arithmetic of the four-bit kernels on the host device, bit for bit beside the reference."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from kvcupy import reference
from kvcupy.devices import cxx
from kvcupy.reference import FOUR_BIT

SOURCE = Path(__file__).with_name("four_bit.cpp")
FORMATS = ("nvfp4", "mxfp4", "int4")


@pytest.fixture(scope="module", params=("native", "baseline"))
def library(request, tmp_path_factory):
    """The functions, with the vectors of this processor, or by integers as on any."""
    compiler = cxx.find_compiler()
    assert compiler is not None
    target = tmp_path_factory.mktemp("four_bit") / f"{request.param}.so"
    flags = (cxx._native(),) if request.param == "native" else ()
    cxx._compile(compiler, f'#include "{SOURCE}"\n', (*cxx._FLAGS, *flags), target)
    return ctypes.CDLL(str(target))


def call(library, name, count, *arguments):
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in arguments]
    getattr(library, name)(*pointers, ctypes.c_long(count))


def bits_equal(got, want):
    np.testing.assert_array_equal(got.view(np.uint32), want.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_are_decoded_in_every_place(library, fmt):
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (4096, 4), dtype=np.uint8)
    packed[:256] = np.arange(256)[:, None]
    words = packed.view(np.uint32).reshape(-1)
    halves = np.empty((4096, 8), np.float32)
    call(library, f"decode_{fmt}", 4096, words, halves)
    bits_equal(halves, reference.decode_codes(packed, FOUR_BIT[fmt].code))


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_group_scale_is_decoded(library, fmt):
    carrier = FOUR_BIT[fmt].scale_carrier
    bits = np.arange(2 ** (8 * np.dtype(carrier).itemsize))
    got = np.empty(bits.size, np.float32)
    call(library, f"scales_{fmt}", bits.size, bits.astype(np.uint32), got)
    want = reference.decode_scales(bits.astype(carrier), fmt)
    known = ~np.isnan(want)
    bits_equal(got[known], want[known])
    assert np.isnan(got[~known]).all()


@pytest.mark.parametrize("divisor", [6.0, 7.0, 1.0, 0.37, 1e-38, 3e38, 1e-45])
@pytest.mark.parametrize("fmt", FORMATS)
def test_group_scales_are_encoded_as_the_reference_does(library, fmt, divisor):
    rng, form = np.random.default_rng(1), FOUR_BIT[fmt]
    exact = reference.decode_scales(
        np.arange(2 ** (8 * np.dtype(form.scale_carrier).itemsize)).astype(form.scale_carrier), fmt
    )
    exact = exact[np.isfinite(exact) & (exact >= 0)]
    exact = np.unique(exact)
    with np.errstate(over="ignore", under="ignore"):
        middle = ((exact[:-1].astype(np.float64) + exact[1:]) / 2).astype(np.float32)
        quotients = np.concatenate([exact, middle, np.nextafter(middle, np.float32(np.inf)),
                                    np.nextafter(middle, np.float32(0))])  # fmt: skip
        absmax = (quotients.astype(np.float64) * divisor).astype(np.float32)
        any_bits = rng.integers(0, 0x7F800000, 4096, dtype=np.uint32).view(np.float32)
        absmax = np.concatenate([absmax[np.isfinite(absmax)], any_bits, [0.0, 1e-45]])
        absmax = absmax.astype(np.float32)
        quotient = absmax / np.float32(divisor)
    got = np.empty(absmax.size, np.uint32)
    function = getattr(library, f"encode_scales_{fmt}")
    function(
        absmax.ctypes.data_as(ctypes.c_void_p), got.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_long(absmax.size), ctypes.c_float(divisor),
    )  # fmt: skip
    want = reference.encode_scales(quotient, absmax == 0, fmt)
    np.testing.assert_array_equal(got, want)


def hard_rows(rng, count, steps):
    """Rows of elements around every boundary between codes, and of any bits."""
    ratios = rng.choice(np.arange(0, 8.25, 0.25), (count, 16)) * rng.choice([-1, 1], (count, 16))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rows = (ratios * steps[:, None]).astype(np.float32)
        bits = rows.view(np.uint32) + rng.integers(-2, 3, rows.shape).astype(np.uint32)
        rows = np.where(rng.integers(0, 2, rows.shape), rows, bits.view(np.float32))
    other = rng.integers(0, 2**32, rows.shape, dtype=np.uint32).view(np.float32)
    return np.where(rng.integers(0, 8, rows.shape), rows, other).astype(np.float32)


@pytest.mark.parametrize("rows_format", ["fp32", "fp16"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_are_the_references(library, fmt, rows_format):
    rng, count = np.random.default_rng(2), 8192
    steps = np.exp2(rng.uniform(-148, 120, count)).astype(np.float32)
    steps[:2048] = rng.choice([1.0, 0.75, 3.0, 0.1], 2048).astype(np.float32)
    steps[-64:] = 1e-45
    steps[-80:-64] = 0.0
    rows = hard_rows(rng, count, steps)
    rows[:8] = 0
    with np.errstate(over="ignore", invalid="ignore"):
        sent = rows.astype(np.float16) if rows_format == "fp16" else rows
        x = np.nan_to_num(sent.astype(np.float32), nan=0.0, posinf=np.inf, neginf=-np.inf)
        quotients = x / np.maximum(steps, reference.four_bit.TINY)[:, None]
    quotients[~np.abs(x).any(axis=1)] = 0
    want = reference.encode_codes(quotients, FOUR_BIT[fmt].code)
    got = np.empty((count, 8), np.uint8)
    name = f"encode_{fmt}" if rows_format == "fp32" else f"encode_halves_{fmt}"
    call(library, name, count, sent, steps, got)
    wrong = np.argwhere(got != want)
    assert not len(wrong), (wrong[0], rows[wrong[0][0]], steps[wrong[0][0]])
