"""Rounding of `store_kv`, and its scales."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import LAYOUTS, QUANTISED, Case, all_patterns, cache_shape, from_values
from store_calls import (
    NANS,
    SCALES,
    by_reciprocal,
    in_float64,
    rows_with_nans,
    shuffled_slots,
    special_rows,
    traps,
)

from kvcupy import reference


@pytest.mark.parametrize("wrong", [by_reciprocal, in_float64])
@pytest.mark.parametrize("fmt", QUANTISED)
def test_scaling_is_one_float32_division(device, fmt, wrong):
    rng = np.random.default_rng(4)
    k_scale, k_values = traps(fmt, wrong, rng.uniform(0.01, 4, 200).astype(np.float32))
    v_scale, v_values = traps(fmt, wrong, rng.uniform(0.01, 4, 200).astype(np.float32))
    assert k_scale != v_scale and min(k_values.size, v_values.size) >= 8, "the input tells nothing"
    case = Case(device, 4)
    key = case.place(np.resize(k_values, (6, 1, 48)), "fp32")
    value = case.place(np.resize(v_values, (6, 1, 33)), "fp32")
    k_cache, v_cache = case.output(fmt, (6, 1, 48)), case.output(fmt, (6, 1, 33))
    case.store_kv(
        key, value, k_cache, v_cache, range(6), k_scale=float(k_scale),
        v_scale=np.float32([v_scale]),
    )  # fmt: skip


@pytest.mark.parametrize("fmt", QUANTISED)
def test_dynamic_scaling_divides_twice(device, fmt):
    """absmax / limit, then x / that; not x * (limit / absmax)."""
    limit = np.float32(reference.LIMIT[fmt])
    rng = np.random.default_rng(5)
    rows, found = [], 0
    for absmax in rng.uniform(0.5, 900, 64).astype(np.float32):

        def by_inverse_scale(x, _, absmax=absmax):
            return x * (limit / absmax)

        _, x = traps(fmt, by_inverse_scale, [absmax / limit])
        found += x.size
        rows.append(np.concatenate([[-absmax], np.resize(x if x.size else [0], 63)]))
    assert found >= 50, "the input tells nothing"
    case = Case(device, 5)
    key = case.place(np.float32(rows)[:, None], "fp32")
    value = case.place(np.float32(rows)[::-1, None], "fp32")
    caches = [case.output(fmt, (64, 1, 64)) for _ in range(2)]
    case.store_kv(key, value, *caches, range(64), **case.scale_caches(64, 1))


@pytest.mark.covering
@pytest.mark.parametrize("layout", ["NHD", "HND", "slots"])
@pytest.mark.parametrize(("k", "v"), [*itertools.permutations(SCALES, 2), ("per head",) * 2])
def test_scales_differ_for_key_and_value(device, layout, k, v):
    case = Case(device, 6)
    key, value = case.input("bf16", (7, 3, 16)), case.input("bf16", (7, 3, 10))
    k_cache = case.output("fp8_e4m3", cache_shape(layout, 3, 4, 3, 16))
    v_cache = case.output("fp8_e4m3", cache_shape(layout, 3, 4, 3, 10))
    options = {}
    for side, name in (("k", k), ("v", v)):
        if name == "dynamic":
            options[f"{side}_scale_cache"] = case.output("fp32", (12, 3))
        else:
            options[f"{side}_scale"] = SCALES[name]
    if k == v == "per head":
        options["v_scale"] = options["v_scale"][::-1].copy()
    if layout in LAYOUTS:
        options["layout"] = layout
    case.store_kv(key, value, k_cache, v_cache, shuffled_slots(case, 7, 12), **options)


@pytest.mark.parametrize("scale", ["per head", "dynamic"])
def test_two_dimensions_have_one_head(device, scale):
    case = Case(device, 7)
    key, value = case.input("fp32", (5, 48)), case.input("fp32", (5, 20))
    k_cache, v_cache = case.output("int8", (8, 48)), case.output("int8", (8, 20))
    options = {"k_scale": np.float32([0.3]), "v_scale": np.float32([2.0])}
    if scale == "dynamic":
        options = case.scale_caches(8, 1)
    case.store_kv(key, value, k_cache, v_cache, [4, 0, -1, 7, 5], **options)


def test_same_format_ignores_a_static_scale(device):
    """Bits are copied: what is quantised already is not scaled again."""
    for fmt in QUANTISED:
        case = Case(device, 8)
        patterns = np.resize(all_patterns(fmt), (8, 2, 16))
        key, value = case.place(patterns, fmt), case.place(patterns[::-1], fmt)
        caches = [case.output(fmt, (8, 2, 16)) for _ in range(2)]
        case.store_kv(key, value, *caches, range(8), k_scale=3.0, v_scale=np.float32([2, 0.5]))


@pytest.mark.parametrize(
    ("source", "fmt"), [("fp32", "fp8_e4m3"), ("bf16", "int8"), ("fp16", "fp8_e5m2")]
)
@pytest.mark.parametrize("width", [4096, 1000, 544, 128, 33, 1])
def test_dynamic_scale_sees_every_element(device, source, fmt, width):
    """The largest magnitude stands in each 32-element segment, at changing places and signs."""
    rng = np.random.default_rng(width)
    tokens = -(-width // 32)
    rows = rng.uniform(-1, 1, (tokens, 2, width))
    for token, head in np.ndindex(tokens, 2):
        place = min(32 * token + (7 * token + 13 * head) % 32, width - 1)
        rows[token, head, place] = (-1) ** token * (2 + token + head)
        if width > 1:
            rows[token, head, place - 1] = np.nan if token % 3 == 0 else 0
    case = Case(device, width)
    key = case.place(from_values(rows, source), source)
    value = case.place(from_values(rows[:, ::-1, ::-1], source), source)
    caches = [case.output(fmt, (tokens + 1, 2, width)) for _ in range(2)]
    case.store_kv(key, value, *caches, np.roll(range(tokens), 1), **case.scale_caches(tokens + 1))


@pytest.mark.parametrize("fmt", QUANTISED)
def test_dynamic_scale_of_special_rows(device, fmt):
    rows = special_rows(np.finfo(np.float32).max)
    case = Case(device, 10)
    key = case.place(np.float32(rows)[:, None], "fp32")
    caches = [case.output(fmt, (12, 1, 5)) for _ in range(2)]
    case.store_kv(key, key, *caches, range(11, 0, -1), **case.scale_caches(12, 1))


@pytest.mark.parametrize("bits", NANS)
def test_dynamic_scale_passes_over_every_nan(device, bits):
    """A signalling one too, which C's fmaxf lets win."""
    rows = np.repeat(rows_with_nans(bits)[:, None], 2, axis=1)
    case = Case(device, bits)
    key, value = case.place(rows, "fp32"), case.place(rows[:, :, ::-1], "fp32")
    caches = [case.output("int8", (5, 2, 256)) for _ in range(2)]
    case.store_kv(
        key, value, *caches, range(4), k_scale_cache=case.output("fp32", (5, 2)),
        v_scale_cache=case.output("fp32", (5, 2)),
    )  # fmt: skip


def test_tiny_and_huge_scales(device):
    """Quotients that overflow float32 saturate, subnormal ones are not flushed before rounding."""
    for fmt, scale in itertools.product(QUANTISED, (1e-38, 1e-30, 1e38, 2e-45)):
        case = Case(device, 11)
        values = from_values(np.outer([1e38, 1e-38, 1e-44, 3e-45, 1.0, 0.0], [1, -1, 2.5]), "fp32")
        key = case.place(values[:, None], "fp32")
        caches = [case.output(fmt, (6, 1, 3)) for _ in range(2)]
        case.store_kv(key, key, *caches, range(6), k_scale=scale, v_scale=np.float32([scale]))
