"""Number formats in array code, against the reference and ml_dtypes, pattern by pattern."""

from __future__ import annotations

import sys
import types
import warnings

import numpy as np
import pytest
from helpers import (
    DTYPE,
    FORMATS,
    QUANTISED,
    all_patterns,
    compare,
    examples,
    random_elements,
    rounding_boundaries,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvcupy import reference
from kvcupy.formats import FORMATS as KNOWN
from kvcupy.ops import fallback


@pytest.fixture(autouse=True)
def warnings_are_errors():
    """What overflows or is NaN is a result, and nothing to be told of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def patterns(fmt):
    """Every bit pattern of a format; of float32, every 2**14th and the telling ones."""
    if fmt != "fp32":
        return all_patterns(fmt)
    spread = np.arange(0, 2**32, 2**14 + 1, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return np.concatenate([spread, random_elements(np.random.default_rng(1), fmt, 4096)])


def carrier(array, fmt):
    return array.view(KNOWN[fmt].carrier)


@pytest.mark.parametrize("fmt", FORMATS)
def test_decode_every_pattern(fmt):
    bits = patterns(fmt)
    got = fallback.decode(carrier(bits, fmt), fmt)
    assert got.dtype == np.float32
    want = reference.decode(bits, fmt)
    assert np.array_equal(got, want, equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(want))
    with np.errstate(invalid="ignore"):
        native = bits.astype(np.float32)  # ml_dtypes' or NumPy's own
    assert np.array_equal(got, native, equal_nan=True)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_pattern_survives_a_round_trip(fmt):
    bits = patterns(fmt)
    values = fallback.decode(carrier(bits, fmt), fmt)
    if fmt in QUANTISED:  # infinities saturate, and so does int8's odd one out
        bits, values = bits[np.isfinite(values)], values[np.isfinite(values)]
        limit = KNOWN[fmt].limit
        bits, values = bits[np.abs(values) <= limit], values[np.abs(values) <= limit]
    got = fallback.encode(values, fmt)
    assert got.dtype == KNOWN[fmt].carrier
    compare(got.view(DTYPE[fmt]), bits, fmt, exact=False, name="round trip", seed=None)


def encoded(values, fmt):
    """Compare what `encode` makes of float32 values with what the reference makes of them."""
    got = fallback.encode(values, fmt)
    assert got.dtype == KNOWN[fmt].carrier
    want = reference.encode(values, fmt)
    compare(got.view(DTYPE[fmt]), want.view(DTYPE[fmt]), fmt, exact=False, name=fmt, seed=None)
    return got


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_encode_every_value_of_every_format(source, target):
    with np.errstate(invalid="ignore"):
        encoded(patterns(source).astype(np.float32), target)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "fp32"])
def test_encode_rounds_ties_to_even(fmt):
    """Every halfway point of a format and its two neighbours, past the largest value too."""
    encoded(rounding_boundaries(fmt), fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_encode_of_what_is_special(fmt):
    tiny, big = np.float32(1e-45), np.finfo(np.float32).max
    values = np.float32([0, -0.0, tiny, -tiny, big, -big, np.inf, -np.inf, np.nan, -np.nan, 1, -1])
    got = encoded(values, fmt)
    zeros = got[:2].view(DTYPE[fmt]).astype(np.float32)
    assert (zeros == 0).all()
    if fmt != "int8":
        assert np.signbit(zeros).tolist() == [False, True]


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp8_e5m2"])
def test_encode_agrees_with_ml_dtypes(fmt):
    """Where nothing saturates, theirs is the same rounding."""
    values = rounding_boundaries(fmt)
    values = values[np.abs(values) < np.max(np.abs(reference.decode(all_patterns(fmt), fmt)[
        np.isfinite(reference.decode(all_patterns(fmt), fmt))]))]  # fmt: skip
    got = fallback.encode(values, fmt).view(DTYPE[fmt])
    compare(got, values.astype(DTYPE[fmt]), fmt, exact=False, name=fmt, seed=None)


@settings(max_examples=examples(200), deadline=None, database=None)
@given(
    bits=hnp.arrays(np.uint32, st.integers(1, 64)),
    fmt=st.sampled_from([f for f in FORMATS if f != "fp32"]),
)
def test_encode_any_float(bits, fmt):
    encoded(bits.view(np.float32), fmt)


@pytest.mark.parametrize("fmt", QUANTISED)
def test_division_and_dynamic_scales(fmt):
    rng = np.random.default_rng(2)
    rows = random_elements(rng, "fp32", 512 * 24).reshape(512, 24)
    rows[::5] = np.where(np.isfinite(rows[::5]), rows[::5], 0)
    rows[::7] *= np.float32(1e-30)
    rows[0], rows[1], rows[2] = 0, np.nan, np.inf
    scales = fallback.dynamic_scale(rows, fmt)
    want = reference.dynamic_scales(rows, fmt)
    assert scales.dtype == np.float32
    assert scales.tobytes() == want.tobytes()
    assert (scales > 0).all()
    assert np.isfinite(scales).all()
    got = fallback.divide(rows, scales[:, None])
    assert got.dtype == np.float32
    assert np.array_equal(got, reference.divide(rows, want), equal_nan=True)


def test_empty_arrays():
    for fmt in FORMATS:
        empty = np.zeros((0, 3), KNOWN[fmt].carrier)
        assert fallback.decode(empty, fmt).shape == (0, 3)
        assert fallback.encode(np.zeros((0, 3), np.float32), fmt).shape == (0, 3)
    assert fallback.dynamic_scale(np.zeros((0, 2, 3), np.float32), "int8").shape == (0, 2)


def test_inputs_are_not_written():
    for fmt in FORMATS:
        bits = carrier(patterns(fmt).copy(), fmt)
        values = fallback.decode(bits, fmt).copy()
        before = bits.tobytes(), values.tobytes()
        fallback.decode(bits, fmt)
        fallback.encode(values, fmt)
        fallback.dynamic_scale(values, fmt)
        assert (bits.tobytes(), values.tobytes()) == before


def test_the_module_is_that_of_the_array(monkeypatch):
    fake = types.ModuleType("cupy")
    monkeypatch.setitem(sys.modules, "cupy", fake)
    array = type("ndarray", (), {"__module__": "cupy._core.core"})()
    assert fallback.module_of(array) is fake
    assert fallback.module_of(np.zeros(1)) is np
