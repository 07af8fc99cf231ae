"""Prove the specification against sources that share no code with it.

Decoding is compared with ml_dtypes and NumPy over every bit pattern, encoding with their casts and
with torch's over every rounding boundary, and the rest with loops over single elements.
Rotary position embedding is in `test_reference_rope.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import (
    DTYPE,
    FORMATS,
    all_patterns,
    cache_shape,
    examples,
    random_elements,
    rounding_boundaries,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcupy import reference

QUANTISED = ("fp8_e4m3", "fp8_e5m2", "int8")


def same(got: np.ndarray, want: np.ndarray, message: str = "") -> None:
    """Values and signs agree; NaN agrees with NaN."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    wrong = (got != want) & ~(np.isnan(got) & np.isnan(want))
    wrong |= (np.signbit(got) != np.signbit(want)) & ~np.isnan(want)
    first = np.flatnonzero(wrong)[:1]
    assert not wrong.any(), f"{message} index {first}: got {got[first]}, want {want[first]}"


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


def cast(x, fmt):
    """Round float32 as ml_dtypes and NumPy do, clipped by hand."""
    if fmt == "int8":
        return np.clip(np.rint(np.nan_to_num(x, posinf=127, neginf=-127)), -127, 127).astype(
            np.int8
        )
    limit = reference.LIMIT.get(fmt, np.inf)
    with np.errstate(over="ignore"):
        return np.clip(x, -limit, limit).astype(DTYPE[fmt])


def rows_at(cache, slot, layout):
    """The rows of one slot, (heads, width)."""
    if layout in ("NHD", "HND"):
        page, offset = divmod(slot, PAGE_SIZE)
        return cache[page, offset] if layout == "NHD" else cache[page, :, offset]
    return cache[slot].reshape(-1, cache.shape[-1])


PAGE_SIZE, NUM_SLOTS = 4, 20
SCALES = st.sampled_from([None, 0.37, "by head"])


@settings(max_examples=examples(400), deadline=None, database=None)
@given(
    st.sampled_from(["NHD", "HND", "slots", "2-D"]), st.sampled_from(FORMATS),
    st.sampled_from(["fp32", "fp16", "bf16", None]), st.sampled_from(FORMATS), SCALES, SCALES,
    st.lists(st.integers(-2, NUM_SLOTS + 2), unique=True, max_size=9),
    st.sampled_from([None, 0, 3]), st.integers(0, 2**16),
)  # fmt: skip
def test_rows_are_stored_and_gathered_by_slot(
    layout, fmt, source, target, scale, read_scale, slots, skip, seed
):
    """One slot after the other; None: rows of the cache's format, of which bits are copied."""
    rng, heads, source = np.random.default_rng(seed), 1 if layout == "2-D" else 3, source or fmt
    by_head = rng.uniform(0.1, 9, heads).astype(np.float32)
    scale, read_scale = (by_head if x == "by head" else x for x in (scale, read_scale))
    if fmt not in QUANTISED:
        scale = read_scale = None
    options = {} if layout in ("slots", "2-D") else {"layout": layout}
    rows, caches = [], []
    for width in (5, 2):
        shape = cache_shape(layout, NUM_SLOTS // PAGE_SIZE, PAGE_SIZE, heads, width)
        caches.append(np.full(shape, 7, DTYPE[fmt]))
        drawn = random_elements(rng, source, 10 * heads * width).reshape(10, heads, width)
        rows.append(drawn[:, 0] if layout == "2-D" else drawn)
    want = [cache.copy() for cache in caches]
    stored = [(i, slot) for i, slot in enumerate(slots) if 0 <= slot < NUM_SLOTS and slot != skip]
    for cache, own in zip(want, rows, strict=True):
        for i, slot in stored:
            row = own[i].reshape(heads, -1)
            if source != fmt:
                by = np.full(heads, 1 if scale is None else scale, np.float32)
                with np.errstate(over="ignore", invalid="ignore"):
                    row = cast(row.astype(np.float32) / by[:, None], fmt)
            rows_at(cache, slot, layout)[...] = row
    faults = [(i, slot) for i, slot in enumerate(slots) if slot >= NUM_SLOTS]
    slots = np.array(slots, np.int64)
    assert faults == reference.store_kv(
        *rows, *caches, slots, skip_slot=skip, k_scale=scale, v_scale=scale, **options
    )
    for got, expected in zip(caches, want, strict=True):
        same(got.astype(np.float64).ravel(), expected.astype(np.float64).ravel())

    outs = [np.full_like(own, 7, DTYPE[target])[: len(slots)] for own in rows]
    by_slot = np.full((NUM_SLOTS, heads), 1 if read_scale is None else read_scale, np.float32)
    read = {"k_scale": read_scale, "v_scale": read_scale}
    if fmt in QUANTISED and seed % 2:
        by_slot = rng.uniform(0.1, 9, (NUM_SLOTS, heads)).astype(np.float32)
        read = {"k_scale_cache": by_slot, "v_scale_cache": by_slot}
    assert faults == reference.gather_kv(
        *caches, slots, k_out=outs[0], v_out=outs[1], **read, **options
    )
    for out, cache in zip(outs, caches, strict=True):
        for i, slot in enumerate(slots.tolist()):
            row = np.full((heads, out.shape[-1]), 7, DTYPE[target])
            if 0 <= slot < NUM_SLOTS:
                row = rows_at(cache, slot, layout)
                if target != fmt:
                    with np.errstate(over="ignore", invalid="ignore"):
                        row = cast(row.astype(np.float32) * by_slot[slot][:, None], target)
            same(out[i].astype(np.float64).ravel(), row.astype(np.float64).ravel())


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
    reference.store_kv(*caches[:, :2], *caches, np.array([1, 2]), k_scale_cache=scales)
    assert (scales[1:] == 1).all()  # bits of the same format


@pytest.mark.parametrize("paged", [False, True])
def test_store_mla(paged):
    latent = np.float32([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    rope_key = np.float32([[10], [11], [12]])
    cache = np.zeros((2, 2, 4) if paged else (4, 4), np.int8)
    assert reference.store_mla(latent, rope_key, cache, np.array([3, 4, 1]), scale=0.5) == [(1, 4)]
    assert cache.reshape(4, 4).tolist() == [[0] * 4, [14, 16, 18, 24], [0] * 4, [2, 4, 6, 20]]


# Gather, pages, indices ----------------------------------------------------------------------


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
