"""Prove the specification against sources that share no code with it.

Decoding is compared with ml_dtypes and NumPy over every bit pattern, encoding with their casts and
with torch's over every rounding boundary, and the rest with loops over single elements.
Rotary position embedding is in `test_reference_rope.py`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import DTYPE, FORMATS, all_patterns, random_elements, rounding_boundaries

from kvcupy import reference

QUANTISED = ("fp8_e4m3", "fp8_e5m2", "int8")
FLOATS = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2")


def same(got: np.ndarray, want: np.ndarray, message: str = "") -> None:
    """Values and signs agree; NaN agrees with NaN."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    wrong = (got != want) & ~(np.isnan(got) & np.isnan(want))
    wrong |= (np.signbit(got) != np.signbit(want)) & ~np.isnan(want)
    first = np.flatnonzero(wrong)[:1]
    assert not wrong.any(), f"{message} index {first}: got {got[first]}, want {want[first]}"


def test_imports_numpy_alone():
    names = set()
    for path in Path(reference.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1, "the specification stands on nothing else of kvcupy"
    standard = {"__future__", "collections.abc", "dataclasses", "functools", "math", "typing"}
    assert names == standard | {"numpy", "numpy.typing"}


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "fp32"])
def test_decode_of_every_pattern(fmt):
    patterns = all_patterns(fmt)
    with np.errstate(invalid="ignore"):  # signalling NaNs are among them
        want = patterns.astype(np.float64)
    same(reference.decode(patterns, fmt), want, fmt)


def test_decode_of_fp32():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    edges = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000]
    bits[: 2 * len(edges)] = edges + [e | 0x80000000 for e in edges]
    with np.errstate(invalid="ignore"):
        same(reference.decode(bits, "fp32"), bits.view(np.float32).astype(np.float64))


@pytest.mark.parametrize("fmt", FORMATS)
def test_decode_reads_bits_of_any_carrier_and_stride(fmt):
    values = random_elements(np.random.default_rng(1), fmt, 64)[::-3]
    same(reference.decode(values, fmt), reference.decode(reference.bits_of(values, fmt), fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_encode_inverts_decode(fmt):
    """Every value goes back to its own bits, save those that the contract changes."""
    rng = np.random.default_rng(2)
    patterns = random_elements(rng, fmt, 50_000) if fmt == "fp32" else all_patterns(fmt)
    value = reference.decode(patterns, fmt)
    back = reference.encode(value, fmt)
    carrier = {"fp32": "float32", "fp16": "uint16", "bf16": "uint16", "int8": "int8"}
    assert back.dtype == carrier.get(fmt, "uint8")
    if fmt in QUANTISED:
        value = np.clip(value, -reference.LIMIT[fmt], reference.LIMIT[fmt])
    same(reference.decode(back, fmt), value, fmt)
    kept = np.isfinite(value) & (np.abs(value) <= reference.LIMIT.get(fmt, np.inf))
    if fmt == "int8":
        kept &= patterns != -128
    original = reference.bits_of(patterns, fmt)
    kept &= ~np.isinf(reference.decode(patterns, fmt))
    assert np.array_equal(reference.bits_of(back, fmt)[kept], original[kept])


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_encode_rounds_as_others_do(fmt):
    """Every boundary between two neighbours, a float32 step below and above it, and noise."""
    rng = np.random.default_rng(3)
    noise = random_elements(rng, "fp32", 100_000)
    x = np.concatenate([rounding_boundaries(fmt), noise, np.float32([0.0, -0.0])])
    got = reference.decode(reference.encode(x, fmt), fmt)
    if fmt == "int8":
        whole = [
            0 if np.isnan(v) else int(max(-127, min(127, round(v) if abs(v) < 1e9 else v)))
            for v in x.tolist()
        ]  # Python's round() takes ties to even
        assert got.tolist() == whole
        return
    limit = reference.LIMIT.get(fmt, np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(DTYPE[fmt]).astype(np.float64)
    # ml_dtypes turns what is too large for fp8 into NaN or infinity; here it saturates.
    beyond = (np.abs(x) > limit) & ~np.isnan(x)
    want[beyond] = np.copysign(limit, x[beyond])
    same(got, want, fmt)

    torch = pytest.importorskip("torch")
    kind = {
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }[fmt]
    by_torch = torch.from_numpy(x).to(kind).to(torch.float64).numpy()
    same(got[~beyond], by_torch[~beyond], f"{fmt} against torch")


@pytest.mark.parametrize("fmt", ["fp32", "fp16"])
def test_encode_rounds_float64_once(fmt):
    """float64 to fp16 through fp32 would round twice; NumPy's own cast does not."""
    fine = np.finfo(DTYPE[fmt])
    ties = 1.0 + fine.eps * (np.arange(50) + 0.5)
    x = np.concatenate([ties * (1 + 2.0**-45), ties * (1 - 2.0**-45), ties])
    x = np.concatenate([x, x * float(fine.smallest_subnormal), -x])
    same(reference.decode(reference.encode(x, fmt), fmt), x.astype(DTYPE[fmt]).astype(np.float64))


def test_encode_of_what_does_not_fit():
    inf, nan = np.inf, np.nan
    x = np.array([inf, -inf, nan, 1e39, -1e39, 464.0, 464.1, 61440.0, 65519.0, 65520.0, 127.5])
    expected = {
        "fp32": [inf, -inf, nan, inf, -inf, 464, np.float32(464.1), 61440, 65519, 65520, 127.5],
        "fp16": [inf, -inf, nan, inf, -inf, 464, 464, 61440, 65504, inf, 127.5],
        "bf16": [inf, -inf, nan, inf, -inf, 464, 464, 61440, 65536, 65536, 127.5],
        "fp8_e4m3": [448, -448, nan, 448, -448, 448, 448, 448, 448, 448, 128],
        "fp8_e5m2": [57344, -57344, nan, 57344, -57344, 448, 448, 57344, 57344, 57344, 128],
        "int8": [127, -127, 0, 127, -127, 127, 127, 127, 127, 127, 127],
    }
    for fmt, want in expected.items():
        same(reference.decode(reference.encode(x, fmt), fmt), want, fmt)


@pytest.mark.parametrize("fmt", FLOATS)
def test_encode_keeps_the_sign_of_zero(fmt):
    tiny = np.array([0.0, -0.0, 1e-60, -1e-60])
    same(reference.decode(reference.encode(tiny, fmt), fmt), [0.0, -0.0, 0.0, -0.0], fmt)


@pytest.mark.parametrize("fmt", QUANTISED)
def test_limits_are_the_largest_finite_values(fmt):
    want = 127 if fmt == "int8" else float(ml_dtypes.finfo(DTYPE[fmt]).max)
    assert reference.LIMIT[fmt] == want


def test_dynamic_scales():
    big = np.float32(np.finfo(np.float32).max)
    rows = np.float32(
        [
            [1, -3, 2],
            [0, -0.0, 0],
            [np.nan, 5, -6],
            [np.inf, 1, np.nan],
            [np.nan] * 3,
            [-big, 0, 1],
            [1e-7, 0, 0],
        ]
    )
    floor = np.float32(1e-6)
    for fmt, limit in reference.LIMIT.items():
        want = [np.float32(m) / np.float32(limit) for m in (3, floor, 6, big, floor, big, floor)]
        got = reference.dynamic_scales(rows, fmt)
        assert got.dtype == np.float32
        assert got.tolist() == [float(w) for w in want]
        assert np.isfinite(got).all() and (got > 0).all()


def test_divide_is_float32_division():
    """Against exact rational arithmetic, rounded once."""
    from fractions import Fraction

    rng = np.random.default_rng(4)
    x = rng.standard_normal((20, 50)).astype(np.float32)
    scales = rng.uniform(1e-3, 3, 20).astype(np.float32)
    got = reference.divide(x, scales)
    for i, j in np.ndindex(*x.shape):
        exact = Fraction(float(x[i, j])) / Fraction(float(scales[i]))
        error = abs(Fraction(float(got[i, j])) - exact)
        for side in (-np.inf, np.inf):
            other = np.nextafter(got[i, j], np.float32(side))
            assert error <= abs(Fraction(float(other)) - exact)


def naive_store(rows, cache, slots, layout, scale, skip):
    """One element at a time; casts by ml_dtypes, after clipping by hand."""
    faults = []
    for token, slot in enumerate(slots):
        if slot < 0 or slot == skip:
            continue
        size = cache.shape[1] if layout == "NHD" else cache.shape[2]
        if slot >= cache.shape[0] * size:
            faults.append((token, slot))
            continue
        for h in range(rows.shape[1]):
            for d in range(rows.shape[2]):
                q = np.float32(rows[token, h, d]) / np.float32(scale[h])
                q = np.clip(q, np.float32(-448), np.float32(448))
                where = (slot // size, slot % size, h, d)
                if layout == "HND":
                    where = (slot // size, h, slot % size, d)
                cache[where] = ml_dtypes.float8_e4m3fn(q)
    return faults


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_store_kv_against_a_loop_over_elements(layout):
    rng = np.random.default_rng(5)
    heads, size, pages = 3, 4, 5
    key = (rng.standard_normal((7, heads, 5)) * 100).astype(ml_dtypes.bfloat16)
    value = (rng.standard_normal((9, heads, 2)) * 100).astype(np.float16)
    slots = np.array([3, -1, 19, 20, 0, 11, 7])

    def shape(width):
        return (pages, size, heads, width) if layout == "NHD" else (pages, heads, size, width)

    k_cache = np.full(shape(5), 7, ml_dtypes.float8_e4m3fn)
    v_cache = np.full(shape(2), 7, ml_dtypes.float8_e4m3fn)
    k_want, v_want = k_cache.copy(), v_cache.copy()
    k_scale, v_scale = 0.3, np.float32([0.5, 2, 9])
    faults = reference.store_kv(
        key,
        value,
        k_cache,
        v_cache,
        slots,
        layout=layout,
        k_scale=k_scale,
        v_scale=v_scale,
        skip_slot=11,
    )
    assert faults == naive_store(key, k_want, slots, layout, [k_scale] * 3, 11) == [(3, 20)]
    naive_store(value, v_want, slots, layout, v_scale, 11)
    same(k_cache.astype(np.float64).ravel(), k_want.astype(np.float64).ravel())
    same(v_cache.astype(np.float64).ravel(), v_want.astype(np.float64).ravel())


def test_store_kv_copies_bits_of_the_same_format():
    patterns = all_patterns("fp8_e4m3").reshape(16, 2, 8)
    k_cache, v_cache = np.zeros((2, 16, 2, 8), patterns.dtype)
    scale_cache = np.zeros((16, 2), np.float32)
    reference.store_kv(
        patterns,
        patterns,
        k_cache,
        v_cache,
        np.arange(16)[::-1],
        k_scale=3.0,
        v_scale_cache=scale_cache,
    )
    for cache in (k_cache, v_cache):
        assert np.array_equal(cache[::-1].view(np.uint8), patterns.view(np.uint8))
    assert (scale_cache == 1).all()


def test_store_kv_dynamic():
    key = np.float32([[[1, -2], [30, 4]], [[0, 0], [np.nan, 5]]])
    caches = np.full((2, 3, 2, 2), 99, np.int8)
    scales = np.full((3, 2), -1, np.float32)
    reference.store_kv(key, key, *caches, np.array([2, 0]), k_scale_cache=scales)
    third = [np.float32(2) / np.float32(127), np.float32(30) / np.float32(127)]
    first = [np.float32(1e-6) / np.float32(127), np.float32(5) / np.float32(127)]
    assert scales.tolist() == [[float(s) for s in first], [-1, -1], [float(s) for s in third]]
    assert caches[0].tolist() == [[[0, 0], [0, 127]], [[99, 99]] * 2, [[64, -127], [127, 17]]]
    assert caches[1].tolist() == [[[0, 0], [0, 5]], [[99, 99]] * 2, [[1, -2], [30, 4]]]


def test_store_of_two_dimensions():
    key = np.arange(6, dtype=np.float32).reshape(3, 2)
    caches = np.zeros((2, 4, 2), np.float16)
    assert reference.store_kv(key, -key, *caches, np.array([3, 4, 1])) == [(1, 4)]
    assert caches[0].tolist() == [[0, 0], [4, 5], [0, 0], [0, 1]]
    assert caches[1].tolist() == [[0, 0], [-4, -5], [0, 0], [0, -1]]


@pytest.mark.parametrize("paged", [False, True])
def test_store_mla(paged):
    latent = np.float32([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    rope_key = np.float32([[10], [11], [12]])
    cache = np.zeros((2, 2, 4) if paged else (4, 4), np.int8)
    assert reference.store_mla(latent, rope_key, cache, np.array([3, 4, 1]), scale=0.5) == [(1, 4)]
    assert cache.reshape(4, 4).tolist() == [[0] * 4, [14, 16, 18, 24], [0] * 4, [2, 4, 6, 20]]


def test_find_duplicate_slots():
    rng = np.random.default_rng(6)
    for _ in range(50):
        slots = rng.integers(-3, 12, rng.integers(0, 20)).astype(rng.choice([np.int32, np.int64]))
        listed = slots.tolist()
        want = sorted({s for s in listed if s >= 0 and listed.count(s) > 1})
        assert reference.find_duplicate_slots(slots).tolist() == want


# Gather, pages, indices ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_gather_kv_against_a_loop_over_elements(layout):
    """float32 products, cast by ml_dtypes after clipping by hand."""
    rng = np.random.default_rng(7)
    heads, size, pages, width = 3, 4, 5, 6
    shape = (pages, size, heads, width) if layout == "NHD" else (pages, heads, size, width)
    k_cache = rng.integers(-127, 128, shape).astype(np.int8)
    v_cache = (rng.standard_normal(shape) * 9).astype(ml_dtypes.float8_e4m3fn)
    k_scale, v_scales = 0.37, rng.uniform(0.1, 9, (pages * size, heads)).astype(np.float32)
    slots = np.array([3, -1, 19, 20, 0, 11, -7])
    k_out = np.full((7, heads, width), 7, ml_dtypes.bfloat16)
    v_out = np.full((7, heads, width), 7, ml_dtypes.float8_e5m2)
    faults = reference.gather_kv(
        k_cache,
        v_cache,
        slots,
        k_out=k_out,
        v_out=v_out,
        layout=layout,
        k_scale=k_scale,
        v_scale_cache=v_scales,
    )
    assert faults == [(3, 20)]
    for token, head, d in np.ndindex(k_out.shape):
        slot = int(slots[token])
        where = (slot // size, slot % size, head, d)
        if layout == "HND":
            where = (slot // size, head, slot % size, d)
        if token in (1, 3, 6):
            want = (7, 7)
        else:
            v = np.float32(v_cache[where]) * v_scales[slot, head]
            want = (
                ml_dtypes.bfloat16(np.float32(k_cache[where]) * np.float32(k_scale)),
                ml_dtypes.float8_e5m2(np.clip(v, -57344, 57344)),
            )
        assert (k_out[token, head, d], v_out[token, head, d]) == want


def test_gather_kv_copies_bits_of_the_same_format():
    patterns = all_patterns("fp8_e5m2").reshape(16, 2, 8)
    outs = [np.zeros_like(patterns) for _ in range(2)]
    reference.gather_kv(
        patterns,
        patterns,
        np.arange(16)[::-1],
        k_out=outs[0],
        v_out=outs[1],
        k_scale=3.0,
        v_scale_cache=np.full((16, 2), 2, np.float32),
    )
    for out in outs:
        assert np.array_equal(out[::-1].view(np.uint8), patterns.view(np.uint8))


def test_gather_kv_of_two_dimensions():
    caches = np.arange(16, dtype=np.float16).reshape(2, 4, 2)
    outs = np.full((2, 3, 2), -1, np.float32)
    slots = np.array([3, 4, 1])
    assert reference.gather_kv(*caches, slots, k_out=outs[0], v_out=outs[1]) == [(1, 4)]
    assert outs.tolist() == [[[6, 7], [-1, -1], [2, 3]], [[14, 15], [-1, -1], [10, 11]]]


def test_gather_kv_inverts_store_kv():
    rng = np.random.default_rng(8)
    key = (rng.standard_normal((5, 2, 8)) * 3).astype(np.float32)
    caches = np.zeros((2, 4, 2, 2, 8), np.int8)
    scales = np.zeros((2, 8, 2), np.float32)
    slots = np.array([6, 0, 3, 7, 2])
    reference.store_kv(key, -key, *caches, slots, k_scale_cache=scales[0], v_scale_cache=scales[1])
    outs = np.zeros((2, 5, 2, 8), np.float32)
    reference.gather_kv(
        *caches,
        slots,
        k_out=outs[0],
        v_out=outs[1],
        k_scale_cache=scales[0],
        v_scale_cache=scales[1],
    )
    assert np.array_equal(outs[0], -outs[1])
    absmax = np.abs(key).max(axis=2, keepdims=True)
    assert (np.abs(outs[0] - key) <= absmax / 127 * 0.5001).all()


def test_copy_pages():
    first, second = np.arange(12).reshape(6, 2), np.arange(6, dtype=np.int8)
    src, dst = np.array([5, -1, 0, 6, 1, 2]), np.array([3, 4, -2, 4, 7, 4])
    assert reference.copy_pages((first, second), src, dst) == ([(3, 6)], [(4, 7)])
    assert second.tolist() == [0, 1, 2, 5, 2, 5]
    assert (first == 2 * second[:, None] + np.arange(2)).all()


def test_slot_mapping():
    table = np.array([[4, 1, 99], [99, 99, 99], [0, 2, 3]])
    got = reference.slot_mapping(table, np.array([6, 0, 9]), np.array([3, 0, 2]), 4)
    assert got.dtype == np.int64
    assert got.tolist() == [19, 4, 5, 11, 12]


def test_page_table_csr():
    """The length that FlashInfer reads back is the length that went in."""
    rng = np.random.default_rng(9)
    for page_size in (1, 3, 16):
        table = rng.integers(0, 1000, (6, 8))
        lengths = np.array([0, 1, page_size, page_size + 1, 8 * page_size, 0])
        indptr, indices, last = reference.page_table_csr(table, lengths, page_size)
        assert {a.dtype for a in (indptr, indices, last)} == {np.dtype(np.int32)}
        pages = np.diff(indptr)
        assert indptr[0] == 0 and indptr[-1] == len(indices)
        some = lengths > 0
        assert ((pages - 1) * page_size + last)[some].tolist() == lengths[some].tolist()
        assert (last[some] >= 1).all() and (last <= page_size).all()
        assert not last[~some].any() and not pages[~some].any()
        for b, row in enumerate(table):
            assert indices[indptr[b] : indptr[b + 1]].tolist() == row[: pages[b]].tolist()
