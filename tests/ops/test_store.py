"""`store_kv`, `store_mla` and the helpers around them, by what a user sees of them."""

from __future__ import annotations

import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from helpers import (
    DTYPE,
    FORMATS,
    POISON_SLOT,
    QUANTISED,
    UNSIGNED,
    Case,
    all_patterns,
    check_faults,
    compare,
    from_values,
    random_elements,
    repeat_rows,
    rounding_boundaries,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcupy as kv
from kvcupy import reference

LAYOUTS = ("NHD", "HND")
#: A copy of each element size, and conversions of each kind, where all 36 pairs would be too many.
PAIRS = (
    ("bf16", "bf16"),
    ("fp8_e5m2", "fp8_e5m2"),
    ("fp32", "fp32"),
    ("bf16", "fp8_e4m3"),
    ("fp32", "int8"),
    ("fp8_e4m3", "fp16"),
)


def cache_shape(layout: str, pages: int, size: int, heads: int, width: int) -> tuple[int, ...]:
    """The base shape of a cache: paged in either layout, by slots, or of two dimensions."""
    return {
        "NHD": (pages, size, heads, width),
        "HND": (pages, heads, size, width),
        "slots": (pages * size, heads, width),
        "2-D": (pages * size, width),
    }[layout]


def shuffled_slots(case: Case, tokens: int, num_slots: int) -> np.ndarray:
    """Distinct slots, the first and the last among them, and about one in four negative."""
    slots = case.rng.permutation(num_slots)[:tokens]
    slots[case.rng.random(len(slots)) < 0.25] = -1
    if tokens >= 4:
        slots = slots[~np.isin(slots, (0, num_slots - 1))]
        slots = np.concatenate([[num_slots - 1], slots, [0]])[-tokens:]
    return slots


# Formats -------------------------------------------------------------------------------------


def telling_values(source: str, destination: str) -> np.ndarray:
    """All patterns of a source of 8 or 16 bits; from fp32, all rounding boundaries and noise."""
    if source != "fp32":
        return all_patterns(source)
    noise = random_elements(np.random.default_rng(1), "fp32", 4096)
    if destination == "fp32":
        return noise
    return np.concatenate([rounding_boundaries(destination), noise])


@pytest.mark.parametrize("destination", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_every_pair_of_formats(device, source, destination):
    """Ties, subnormals, overflow, saturation, infinities, NaN and -0, unscaled and scaled."""
    values = telling_values(source, destination)
    values = np.resize(values, (-(-values.size // 512), 2, 256))
    scales = ((None, 1.0),)
    if destination in QUANTISED:
        scales += ((0.37, np.float32([3.0, 1 / 3])),)
    for k_scale, v_scale in scales:
        case = Case(device)
        tokens = len(values)
        key = case.place(values, source, name="key")
        value = case.place(values[::-1], source, name="value")
        k_cache = case.output(destination, (tokens, 2, 256), name="k_cache")
        v_cache = case.output(destination, (tokens, 2, 256), name="v_cache")
        slots = case.rng.permutation(tokens)
        case.store_kv(key, value, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize("destination", QUANTISED)
@pytest.mark.parametrize("source", FORMATS)
def test_every_pair_of_formats_dynamic(device, source, destination):
    case = Case(device, 1)
    values = telling_values(source, destination)[:65536]
    values = np.resize(case.rng.permutation(values), (96, 3, 40))
    values[::3] = np.where(np.isfinite(reference.decode(values[::3], source)), values[::3], 1)
    key = case.place(values, source, name="key")
    value = case.input(source, (96, 3, 24), name="value")
    k_cache = case.output(destination, (25, 4, 3, 40), name="k_cache")
    v_cache = case.output(destination, (25, 4, 3, 24), name="v_cache")
    case.store_kv(
        key,
        value,
        k_cache,
        v_cache,
        shuffled_slots(case, 96, 100),
        k_scale_cache=case.output("fp32", (100, 3), name="k_scale_cache"),
        v_scale_cache=case.output("fp32", (100, 3), name="v_scale_cache"),
    )


@pytest.mark.parametrize(
    "pairs",
    [
        (("bf16", "fp8_e4m3"), ("fp16", "int8")),
        (("fp16", "fp16"), ("fp32", "fp8_e5m2")),
        (("fp8_e4m3", "fp8_e4m3"), ("bf16", "bf16")),
        (("int8", "fp32"), ("fp32", "bf16")),
    ],
    ids=str,
)
def test_key_and_value_follow_their_own_formats(device, pairs):
    case = Case(device, 2)
    sides = [
        (case.input(source, (9, 2, 16)), case.output(destination, (4, 4, 2, 16)))
        for source, destination in pairs
    ]
    (key, k_cache), (value, v_cache) = sides
    case.store_kv(key, value, k_cache, v_cache, shuffled_slots(case, 9, 16))


def test_untagged_bits_are_tagged_with_view_as(device):
    for fmt in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8"):
        case = Case(device, 3)
        key, value = case.input("bf16", (5, 2, 8)), case.input("bf16", (5, 2, 8))
        caches = [case.output(fmt, (8, 2, 8)) for _ in range(2)]
        for arg in (key, value, *caches):
            arg.array = kv.view_as(arg.raw_array, arg.fmt)
        case.store_kv(key, value, *caches, [3, 0, 7, -1, 2])


def test_view_as_refuses_what_cannot_be(device):
    for dtype, fmt in ((np.uint8, "bf16"), (np.uint16, "fp8_e4m3"), (np.uint16, "float99")):
        with pytest.raises((TypeError, ValueError)):
            kv.view_as(device.zeros((4, 4), dtype), fmt)


# Rounding and scales -------------------------------------------------------------------------


def by_reciprocal(x, scale):
    """Multiply by 1 / scale: rounded twice."""
    return x * (np.float32(1) / scale)


def in_float64(x, scale):
    """Divide without rounding to float32 in between."""
    return x.astype(np.float64) / np.float64(scale)


def traps(fmt: str, wrong, scales) -> tuple[np.float32, np.ndarray]:
    """Find the scale for which `wrong` rounds most halfway values to another side, and those."""
    boundaries = rounding_boundaries(fmt)
    boundaries = boundaries[: (boundaries.size - 4) // 3]
    boundaries = boundaries[np.abs(boundaries) < reference.LIMIT[fmt] * 0.99]
    best = (np.float32(1), np.empty(0, np.float32))
    for scale in scales:
        x = boundaries * scale
        right = reference.encode(x / scale, fmt)
        x = x[right != reference.encode(wrong(x, scale), fmt)]
        if x.size > best[1].size:
            best = (scale, x)
    return best


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
        key,
        value,
        k_cache,
        v_cache,
        range(6),
        k_scale=float(k_scale),
        v_scale=np.float32([v_scale]),
    )


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
    scale_caches = [case.output("fp32", (64, 1)) for _ in range(2)]
    case.store_kv(
        key, value, *caches, range(64), k_scale_cache=scale_caches[0], v_scale_cache=scale_caches[1]
    )


SCALES = {
    "none": None,
    "float": 0.7,
    "one element": np.float32([1.3]),
    "per head": np.float32([0.2, 5.0, 1e-3]),
    "dynamic": "dynamic",
}


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
        options = {f"{side}_scale_cache": case.output("fp32", (8, 1)) for side in "kv"}
    case.store_kv(key, value, k_cache, v_cache, [4, 0, -1, 7, 5], **options)


def test_same_format_ignores_a_static_scale(device):
    """Bits are copied: what is quantised already is not scaled again."""
    for fmt in QUANTISED:
        case = Case(device, 8)
        patterns = np.resize(all_patterns(fmt), (8, 2, 16))
        key, value = case.place(patterns, fmt), case.place(patterns[::-1], fmt)
        caches = [case.output(fmt, (8, 2, 16)) for _ in range(2)]
        case.store_kv(key, value, *caches, range(8), k_scale=3.0, v_scale=np.float32([2, 0.5]))


def test_unit_scale_is_allowed_on_any_cache(device):
    case = Case(device, 9)
    key, value = case.input("fp32", (3, 2, 8)), case.input("fp32", (3, 2, 8))
    caches = [case.output("bf16", (4, 2, 8)) for _ in range(2)]
    case.store_kv(key, value, *caches, [2, 1, 0], k_scale=1.0, v_scale=None)


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
    scale_caches = [case.output("fp32", (tokens + 1, 2)) for _ in range(2)]
    case.store_kv(
        key,
        value,
        *caches,
        np.roll(range(tokens), 1),
        k_scale_cache=scale_caches[0],
        v_scale_cache=scale_caches[1],
    )


@pytest.mark.parametrize("fmt", QUANTISED)
def test_dynamic_scale_of_special_rows(device, fmt):
    big, inf, nan = np.finfo(np.float32).max, np.inf, np.nan
    rows = [
        [0] * 5,
        [-0.0] * 5,
        [nan] * 5,
        [inf, 1, -1, 0, 2],
        [nan, -inf, 1e30, 0, -3e38],
        [1e-7, -1e-7, 0, 0, 1e-9],
        [1e-6, 0, 0, 0, 0],
        [1e-42, 0, 0, 0, -1e-45],
        [big, -big, 1, 0, 1e36],
        [nan, 3, -4, 0, 1],
        [np.float32(1.1e-6), 0, 0, 0, 0],
    ]
    case = Case(device, 10)
    key = case.place(np.float32(rows)[:, None], "fp32")
    caches = [case.output(fmt, (12, 1, 5)) for _ in range(2)]
    scale_caches = [case.output("fp32", (12, 1)) for _ in range(2)]
    case.store_kv(
        key,
        key,
        *caches,
        range(11, 0, -1),
        k_scale_cache=scale_caches[0],
        v_scale_cache=scale_caches[1],
    )


@pytest.mark.parametrize("bits", [0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF])
def test_dynamic_scale_passes_over_every_nan(device, bits):
    """A signalling one too, which C's fmaxf lets win."""
    rows = np.full((4, 2, 256), 0.5, np.float32)
    rows[:, :, 0] = 7
    rows.view(np.uint32)[1, :, 1:] = bits
    rows.view(np.uint32)[2, :, 128::2] = bits
    rows.view(np.uint32)[3, :, 64] = bits
    case = Case(device, bits)
    key, value = case.place(rows, "fp32"), case.place(rows[:, :, ::-1], "fp32")
    caches = [case.output("int8", (5, 2, 256)) for _ in range(2)]
    case.store_kv(
        key,
        value,
        *caches,
        range(4),
        k_scale_cache=case.output("fp32", (5, 2)),
        v_scale_cache=case.output("fp32", (5, 2)),
    )


def test_tiny_and_huge_scales(device):
    """Quotients that overflow float32 saturate, subnormal ones are not flushed before rounding."""
    for fmt, scale in itertools.product(QUANTISED, (1e-38, 1e-30, 1e38, 2e-45)):
        case = Case(device, 11)
        values = from_values(np.outer([1e38, 1e-38, 1e-44, 3e-45, 1.0, 0.0], [1, -1, 2.5]), "fp32")
        key = case.place(values[:, None], "fp32")
        caches = [case.output(fmt, (6, 1, 3)) for _ in range(2)]
        case.store_kv(key, key, *caches, range(6), k_scale=scale, v_scale=np.float32([scale]))


def test_scale_cache_may_be_a_strided_view(device):
    case = Case(device, 12)
    key, value = case.input("bf16", (6, 3, 8)), case.input("bf16", (6, 3, 8))
    caches = [case.output("int8", (2, 4, 3, 8)) for _ in range(2)]
    both = case.output("fp32", (8, 2, 5))
    case.store_kv(
        key,
        value,
        *caches,
        [5, 7, -1, 0, 2, 6],
        k_scale_cache=both.sub(lambda a: a[:, 0, :3]),
        v_scale_cache=both.sub(lambda a: a[:, 1, 1:4]),
    )


# Layouts, strides and widths -----------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("layout", ["NHD", "HND", "slots", "2-D"])
def test_layouts(device, layout, pair):
    case = Case(device, 13)
    rows = (lambda width: (9, width)) if layout == "2-D" else (lambda width: (9, 3, width))
    key, value = case.input(pair[0], rows(24)), case.input(pair[0], rows(16))
    k_cache = case.output(pair[1], cache_shape(layout, 4, 3, 3, 24), name="k_cache")
    v_cache = case.output(pair[1], cache_shape(layout, 4, 3, 3, 16), name="v_cache")
    options = {"layout": layout} if layout in LAYOUTS else {}
    case.store_kv(key, value, k_cache, v_cache, shuffled_slots(case, 9, 12), **options)


def combined(case, layout, fmt, kind, *, pages=4, size=4, heads=2, width=16):
    """K and V caches cut from one array, in the ways that engines do."""
    base = cache_shape(layout, pages, size, heads, width)
    if kind == "pages":  # (num_pages, 2, ...)
        both = case.output(fmt, (pages, 2, *base[1:]))
        return both.sub(lambda a: a[:, 0]), both.sub(lambda a: a[:, 1])
    if kind == "first":  # (2, num_pages, ...)
        both = case.output(fmt, (2, *base))
        return both.sub(lambda a: a[0]), both.sub(lambda a: a[1])
    if kind == "last":  # (..., D + Dv)
        both = case.output(fmt, (*base[:-1], 2 * width))
        return both.sub(lambda a: a[..., :width]), both.sub(lambda a: a[..., width:])
    both = case.output(fmt, (pages, 3, 2, *base[1:]))  # one layer of a pool whose pages come first
    return both.sub(lambda a: a[:, 1, 0]), both.sub(lambda a: a[:, 1, 1])


@pytest.mark.parametrize("pair", PAIRS[::3], ids="-".join)
@pytest.mark.parametrize("kind", ["pages", "first", "last", "layer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_combined_caches(device, layout, kind, pair):
    case = Case(device, 14)
    k_cache, v_cache = combined(case, layout, pair[1], kind)
    key, value = case.input(pair[0], (8, 2, 16)), case.input(pair[0], (8, 2, 16))
    case.store_kv(key, value, k_cache, v_cache, shuffled_slots(case, 8, 16), layout=layout)


INPUT_VIEWS = {
    "packed QKV": ((7, 8, 12), lambda a: a[:, 4:6]),
    "every other token": ((14, 2, 12), lambda a: a[::2]),
    "heads first": ((2, 7, 12), lambda a: a.transpose(1, 0, 2)),
    "wider rows": ((7, 2, 17), lambda a: a[..., 3:15]),
    "tokens reversed": ((7, 2, 12), lambda a: a[::-1]),
    "heads reversed": ((7, 2, 12), lambda a: a[:, ::-1]),
    "one token for all": ((1, 2, 12), lambda a: np.broadcast_to(a, (7, 2, 12))),
    "one head for all": ((7, 1, 12), lambda a: np.broadcast_to(a, (7, 2, 12))),
    "one row for all": ((1, 1, 12), lambda a: np.broadcast_to(a, (7, 2, 12))),
}


@pytest.mark.parametrize("pair", PAIRS[::3], ids="-".join)
@pytest.mark.parametrize("view", INPUT_VIEWS)
def test_strided_inputs(device, view, pair):
    """K through the view and V through the next one, so that their strides differ."""
    names = list(INPUT_VIEWS)
    other = names[(names.index(view) + 1) % len(names)]
    case = Case(device, 15)
    key = case.input(pair[0], *INPUT_VIEWS[view])
    value = case.input(pair[0], *INPUT_VIEWS[other])
    k_cache = case.output(pair[1], (3, 4, 2, 12))
    v_cache = case.output(pair[1], (3, 4, 2, 12))
    case.store_kv(key, value, k_cache, v_cache, shuffled_slots(case, 7, 12))


@pytest.mark.parametrize("pair", PAIRS[::3], ids="-".join)
def test_key_and_value_packed_in_one_array(device, pair):
    case = Case(device, 16)
    qkv = case.input(pair[0], (6, 4 + 2 + 2, 32))
    caches = [case.output(pair[1], (5, 2, 2, 32)) for _ in range(2)]
    case.store_kv(
        qkv.sub(lambda a: a[:, 4:6]),
        qkv.sub(lambda a: a[:, 6:]),
        *caches,
        shuffled_slots(case, 6, 10),
    )


def test_key_and_value_have_strides_of_their_own(device):
    """All five strides differ between K and V, in the input and in the cache."""
    case = Case(device, 17)
    key = case.input("bf16", (6, 5, 20), lambda a: a[:, 1:4, :12])
    value = case.input("bf16", (3, 9, 7), lambda a: a[:, 2:8].transpose(1, 0, 2))
    k_cache = case.output("bf16", (4, 3, 5, 6, 13), lambda a: a[:, 1, :, 2:5, 1:])
    v_cache = case.output("bf16", (3, 5, 4, 9), lambda a: a.transpose(2, 1, 0, 3)[..., :7])
    case.store_kv(key, value, k_cache, v_cache, shuffled_slots(case, 6, 20))


@pytest.mark.parametrize("view", ["slots", "2-D"])
def test_strided_caches_by_slot(device, view):
    case = Case(device, 18)
    if view == "slots":
        key, value = case.input("fp16", (5, 2, 8)), case.input("fp16", (5, 2, 6))
        k_cache = case.output("fp16", (8, 5, 11), lambda a: a[:, 1:5:3, 2:10])
        v_cache = case.output("fp16", (16, 2, 6), lambda a: a[1::2])
    else:
        key, value = case.input("fp16", (5, 20), lambda a: a[:, 3:]), case.input("fp16", (5, 6))
        k_cache = case.output("fp16", (8, 30), lambda a: a[:, 5:22])
        v_cache = case.output("fp16", (24, 6), lambda a: a[2::3])
    case.store_kv(key, value, k_cache, v_cache, [7, 3, -1, 0, 2])


def test_dimensions_of_one_element_may_have_any_stride(device):
    case = Case(device, 19)
    key = case.input("bf16", (4, 2, 6), lambda a: a[..., ::6])
    value = case.input("bf16", (4, 3, 5), lambda a: a[:, 1::2][:, :1])
    k_cache = case.output("bf16", (8, 2, 3), lambda a: a[..., ::3])
    v_cache = case.output("bf16", (8, 1, 5))
    wide_value = value.sub(lambda a: np.broadcast_to(a, (4, 2, 5)))
    wide_cache = case.output("bf16", (8, 2, 5))
    case.store_kv(key, wide_value, k_cache, wide_cache, [3, 1, 0, 6])
    case.store_kv(
        key.sub(lambda a: a[:, ::2]), value, k_cache.sub(lambda a: a[:, ::2]), v_cache, [2, 7, 5, 4]
    )


WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 31, 32, 33, 64, 80, 96, 98, 100, 128, 192, 576, 656)


@pytest.mark.parametrize("misalign", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_widths_and_alignment(device, pair, misalign):
    """Rows of any width at any element; each array is misaligned on its own."""
    for index, width in enumerate(WIDTHS):
        case = Case(device, (misalign, width))
        v_width = WIDTHS[-1 - index]
        off = [misalign, misalign, 0, 0]
        off = [off[(index + i) % 4] for i in range(4)]
        key = case.input(pair[0], (4, 2, width), misalign=off[0], name="key")
        value = case.input(pair[0], (4, 2, v_width), misalign=off[1], name="value")
        k_cache = case.output(pair[1], (6, 2, width), misalign=off[2], name="k_cache")
        v_cache = case.output(pair[1], (6, 2, v_width), misalign=off[3], name="v_cache")
        case.store_kv(key, value, k_cache, v_cache, [4, 5, -1, 0])


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_odd_strides_between_aligned_rows(device, pair):
    """The base is aligned and the width is even, but each next row or head is not aligned."""
    for pad, width in itertools.product((1, 2, 4, 8), (64, 128)):
        case = Case(device, (pad, width))
        key = case.input(pair[0], (3, 2, width + pad), lambda a, w=width: a[..., :w])
        value = case.input(
            pair[0], (3, 2 * width + pad), lambda a, w=width: a[:, : 2 * w].reshape(3, 2, w)
        )
        k_cache = case.output(pair[1], (5, 2, width))
        v_cache = case.output(pair[1], (5, 2, width + pad), lambda a, w=width: a[..., :w])
        case.store_kv(key, value, k_cache, v_cache, [4, 1, 0])


def test_many_heads_and_tokens(device):
    for pair, shape in ((PAIRS[0], (300, 1, 8)), (PAIRS[0], (3, 130, 16)), (PAIRS[3], (70, 5, 64))):
        case = Case(device, 20)
        tokens, heads, width = shape
        key, value = case.input(pair[0], shape), case.input(pair[0], shape)
        caches = [case.output(pair[1], (tokens + 3, heads, width)) for _ in range(2)]
        case.store_kv(key, value, *caches, shuffled_slots(case, tokens, tokens + 3))


def test_offsets_past_two_gigabytes(device):
    """Caches and an input larger than 2**31 bytes and elements, touched at a few rows only."""
    width, num_slots = 64, 2**31 // 64 + 100
    caches = [device.empty((num_slots, 1, width), np.int8) for _ in range(2)]
    rows = np.random.default_rng(21).integers(-128, 128, (2, 3, 1, width), dtype=np.int8)
    wide = device.empty((3, 1, 2**30 + 64), np.int8)[..., :width]
    wide[...] = device.asarray(rows[0])
    last = num_slots - 1
    untouched = (0, last - 1, last % (2**31 // width), (last + 1) % (2**31 // width))
    for cache, slot in itertools.product(caches, untouched):
        cache[slot] = 77
    slots = device.asarray(np.array([last, -1, 5], np.int64))
    kv.store_kv(wide, device.asarray(rows[1].copy()), *caches, slots)
    kv.check_faults(device)
    for cache, source in zip(caches, rows, strict=True):
        assert np.array_equal(device.to_numpy(cache[last]), source[0])
        assert np.array_equal(device.to_numpy(cache[5]), source[2])
        for slot in untouched:
            assert (device.to_numpy(cache[slot]) == 77).all()


# Slots ---------------------------------------------------------------------------------------


def small(case, *, tokens=6, fmt="bf16", cache_fmt="bf16", num_slots=8, layout="slots"):
    """K, V and their caches, of different widths."""
    return (
        case.input(fmt, (tokens, 2, 8), name="key"),
        case.input(fmt, (tokens, 2, 6), name="value"),
        case.output(cache_fmt, cache_shape(layout, num_slots // 4, 4, 2, 8), name="k_cache"),
        case.output(cache_fmt, cache_shape(layout, num_slots // 4, 4, 2, 6), name="v_cache"),
    )


@pytest.mark.parametrize("step", [1, 2, 3, -1, -2])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_slot_mapping_of_any_type_and_stride(device, dtype, step):
    case = Case(device, 22)
    case.store_kv(*small(case), case.slots([7, -1, 3, 0, 4, 2], dtype, step))


@pytest.mark.parametrize("layout", ["slots", *LAYOUTS])
@pytest.mark.parametrize("negative", [-1, -2, -8, -9, -(2**31), -(2**32) + 3, -(2**63)])
def test_negative_slots_are_skipped_never_wrapped(device, negative, layout):
    case = Case(device, 23)
    options = {"layout": layout} if layout in LAYOUTS else {}
    case.store_kv(*small(case, layout=layout), [1, negative, 3, negative, 0, 2], **options)
    if negative >= -(2**31):
        case.store_kv(
            *small(case, layout=layout),
            case.slots([negative, 1, 3, 6, negative, 2], "int32"),
            **options,
        )


@pytest.mark.parametrize("layout", ["slots", *LAYOUTS])
@pytest.mark.parametrize("slot", [8, 9, 7777, 2**31 - 1, 2**31, 2**32 + 3, 2**63 - 1])
def test_slot_past_the_end_is_a_fault(device, slot, layout):
    """The rest is written; the fault names operation, position and value, and is raised once."""
    case = Case(device, 24)
    options = {"layout": layout} if layout in LAYOUTS else {}
    args = small(case, tokens=16, layout=layout)
    slots = np.full(16, -1)
    slots[[2, 7, 13, 15]] = [7, 0, slot, 3]
    case.store_kv(*args, slots, **options)
    case.store_kv(*args, [1], **options)


def test_fault_writes_no_scale(device):
    case = Case(device, 25)
    scale_caches = [case.output("fp32", (8, 2)) for _ in range(2)]
    case.store_kv(
        *small(case, cache_fmt="int8"),
        [3, 8, -1, 2**40, 7, 0],
        k_scale_cache=scale_caches[0],
        v_scale_cache=scale_caches[1],
    )


def test_faults_of_several_calls_are_raised_together(device):
    case = Case(device, 26)
    args = [arg.array for arg in small(case)]
    for slots in ([0, 41], [1, 2], [3, 4, 42]):
        kv.store_kv(*args, device.asarray(np.array(slots, np.int64)))
    check_faults(device, "store_kv", [(1, 41), (2, 42)])
    kv.check_faults(device)


def test_faults_are_errors_of_this_package():
    assert issubclass(kv.IndexFault, kv.KvcupyError)


def test_every_slot_past_the_end(device):
    case = Case(device, 27)
    case.store_kv(*small(case), [8, 9, 10, 11, 12, 13])


def test_cache_without_slots(device):
    case = Case(device, 28)
    key, value = case.input("bf16", (2, 2, 8)), case.input("bf16", (2, 2, 8))
    caches = [case.output("bf16", (0, 2, 8)) for _ in range(2)]
    case.store_kv(key, value, *caches, [-1, 5])


@pytest.mark.parametrize("layout", ["slots", *LAYOUTS])
@pytest.mark.parametrize("skip", [0, 5, 7])
def test_skip_slot_is_never_written(device, skip, layout):
    """Padding may name the sink any number of times."""
    case = Case(device, 29)
    options = {"layout": layout} if layout in LAYOUTS else {}
    first, second, third = [slot for slot in (5, 0, 7, 1, 3) if slot != skip][:3]
    slots = [first, skip, second, skip, skip, third]
    case.store_kv(*small(case, layout=layout), slots, skip_slot=skip, **options)
    scale_caches = [case.output("fp32", (8, 2)) for _ in range(2)]
    case.store_kv(
        *small(case, cache_fmt="fp8_e4m3", layout=layout),
        slots,
        skip_slot=skip,
        k_scale_cache=scale_caches[0],
        v_scale_cache=scale_caches[1],
        **options,
    )


def test_skip_slot_beside_padding_and_faults(device):
    case = Case(device, 58)
    case.store_kv(*small(case), [5, 0, 7, -1, 8, 1], skip_slot=7)
    case.store_kv(*small(case), [5, 0, 7, -1, 3, 1], skip_slot=-1)


@pytest.mark.parametrize(
    ("skip", "error"),
    [
        (5.0, TypeError),
        (True, TypeError),
        ("5", TypeError),
        (2**63, ValueError),
        (-(2**70), ValueError),
    ],
    ids=str,
)
def test_skip_slot_is_a_64_bit_int(device, skip, error):
    """Also after a call with an equal one: 5 == 5.0, 1 == True."""
    case = Case(device, 60)
    args = small(case)
    for good in (5, 1, np.int64(5), np.int32(1)):
        case.store_kv(*args, [2, 0, 5, -1, 1, 7], skip_slot=good)
        with pytest.raises(error, match="skip_slot"):
            kv.store_kv(*(a.array for a in args), case.slots(range(6)).array, skip_slot=skip)
    case.check("", [])


def test_zero_tokens(device):
    case = Case(device, 30)
    case.store_kv(*small(case, tokens=0), [])
    case.store_kv(*small(case, tokens=3), [])
    scale_caches = [case.output("fp32", (8, 2)) for _ in range(2)]
    case.store_kv(
        *small(case, tokens=0, cache_fmt="int8"),
        case.slots([], "int32"),
        k_scale_cache=scale_caches[0],
        v_scale_cache=scale_caches[1],
    )


@pytest.mark.parametrize("cache_fmt", ["bf16", "fp8_e4m3"])
def test_rows_past_the_slots_are_padding(device, cache_fmt):
    """They hold NaN, which must reach neither the cache nor a dynamic scale."""
    case = Case(device, 31)
    key, value, k_cache, v_cache = small(case, tokens=9, cache_fmt=cache_fmt)
    for arg in (key, value):
        rows = random_elements(case.rng, "bf16", arg.view.size).reshape(arg.view.shape)
        rows[np.isnan(rows)] = 1
        rows[4:] = np.nan
        padded = case.place(rows, "bf16")
        key, value = (padded, value) if arg is key else (key, padded)
    options = {}
    if cache_fmt in QUANTISED:
        options = {f"{side}_scale_cache": case.output("fp32", (8, 2)) for side in "kv"}
    case.store_kv(key, value, k_cache, v_cache, [6, 1, -1, 0], **options)
    for cache in (k_cache, v_cache):
        assert not np.isnan(cache.view[[6, 1, 0]].astype(np.float64)).any()


def test_caller_may_reuse_one_signature_with_other_data(device):
    """A second call of the same shapes reads its own arrays, slots and scales."""
    case = Case(device, 32)
    for scale in (0.5, 2.0):
        for slots in ([0, 1, 2, 3, 4, 5], [7, 6, 5, -1, 3, 8]):
            case.store_kv(
                *small(case, cache_fmt="fp8_e5m2"),
                slots,
                k_scale=scale,
                v_scale=np.float32([scale * 3]),
            )


def test_find_duplicate_slots(device):
    cases = (
        [],
        [3],
        [3, 3],
        [5, 1, 5, 2, 1, 5],
        [-1, -1, -7, -7, 4],
        [0, 0, -1, 2**40, 2**40],
        list(range(100)) + list(range(0, 100, 9)),
    )
    for slots in cases:
        case = Case(device, 33)
        for dtype, step in itertools.product(("int32", "int64"), (1, 2, -1)):
            if dtype == "int32" and max(slots, default=0) >= 2**31:
                continue
            placed = case.slots(slots, dtype, step)
            got = np.asarray(device.to_numpy(kv.find_duplicate_slots(placed.array)))
            want = reference.find_duplicate_slots(placed.view)
            assert got.ndim == 1 and got.tolist() == want.tolist()
        case.check("find_duplicate_slots", [])


# Errors --------------------------------------------------------------------------------------


def reshaped(arg, cut):
    return arg.sub(cut).array


def error_cases():
    """Yield (id, error, what the message matches, changes to a valid call)."""
    both = (TypeError, ValueError)
    for side, cache in (("key", "k_cache"), ("value", "v_cache")):
        width = 8 if side == "key" else 6
        yield f"{side} 1-D", ValueError, side, lambda c, s=side: {s: c.input("bf16", (6,)).array}
        yield (
            f"{side} 4-D",
            ValueError,
            side,
            lambda c, s=side, w=width: {s: c.input("bf16", (6, 2, 1, w)).array},
        )
        yield (
            f"{side} 2-D",
            ValueError,
            f"{side}|{cache}",
            lambda c, s=side, w=width: {s: c.input("bf16", (6, 2 * w)).array},
        )
        yield (
            f"{side} heads",
            ValueError,
            f"{side}|{cache}",
            lambda c, s=side, w=width: {s: c.input("bf16", (6, 3, w)).array},
        )
        yield (
            f"{side} width",
            ValueError,
            f"{side}|{cache}",
            lambda c, s=side, w=width: {s: c.input("bf16", (6, 2, w + 1)).array},
        )
        yield (
            f"{side} float64",
            TypeError,
            side,
            lambda c, s=side, w=width: {s: c.device.zeros((6, 2, w), np.float64)},
        )
        yield (
            f"{side} untagged",
            TypeError,
            side,
            lambda c, s=side, w=width: {s: c.device.zeros((6, 2, w), np.uint16)},
        )
        yield f"{side} list", TypeError, side, lambda c, s=side: {s: [[[1.0]]]}
        yield f"{side} None", TypeError, side, lambda c, s=side: {s: None}
        yield (
            f"{side} few",
            ValueError,
            f"{side}|slot_mapping",
            lambda c, s=side, w=width: {s: c.input("bf16", (5, 2, w)).array},
        )
        yield (
            f"{side} last dimension strided",
            ValueError,
            side,
            lambda c, s=side, w=width: {
                s: c.input("bf16", (6, 2, 2 * w), lambda a: a[..., ::2]).array
            },
        )
        yield (
            f"{side} last dimension reversed",
            ValueError,
            side,
            lambda c, s=side, w=width: {
                s: c.input("bf16", (6, 2, w), lambda a: a[..., ::-1]).array
            },
        )
        yield (
            f"{cache} 1-D",
            ValueError,
            cache,
            lambda c, s=cache: {s: c.output("bf16", (16,)).array},
        )
        yield (
            f"{cache} 5-D",
            ValueError,
            cache,
            lambda c, s=cache, w=width: {s: c.output("bf16", (2, 4, 1, 2, w)).array},
        )
        yield (
            f"{cache} heads",
            ValueError,
            cache,
            lambda c, s=cache, w=width: {s: c.output("bf16", (8, 3, w)).array},
        )
        yield (
            f"{cache} width",
            ValueError,
            cache,
            lambda c, s=cache, w=width: {s: c.output("bf16", (8, 2, w - 1)).array},
        )
        yield (
            f"{cache} slots",
            ValueError,
            "k_cache|v_cache",
            lambda c, s=cache, w=width: {s: c.output("bf16", (9, 2, w)).array},
        )
        yield (
            f"{cache} float64",
            TypeError,
            cache,
            lambda c, s=cache, w=width: {s: c.device.zeros((8, 2, w), np.float64)},
        )
        yield (
            f"{cache} untagged",
            TypeError,
            cache,
            lambda c, s=cache, w=width: {s: c.device.zeros((8, 2, w), np.uint16)},
        )
        yield f"{cache} list", TypeError, cache, lambda c, s=cache: {s: [[[1.0]]]}
        yield (
            f"{cache} last dimension strided",
            ValueError,
            cache,
            lambda c, s=cache, w=width: {
                s: c.output("bf16", (8, 2, 2 * w), lambda a: a[..., ::2]).array
            },
        )
        yield (
            f"{cache} zero stride over slots",
            ValueError,
            cache,
            lambda c, s=cache, w=width: {
                s: c.output("bf16", (1, 2, w), lambda a: repeat_rows(a, 8)).array
            },
        )
        yield (
            f"{cache} zero stride over heads",
            ValueError,
            cache,
            lambda c, s=cache, w=width: {
                s: c.output("bf16", (1, 8, w), lambda a: repeat_rows(a, 2).swapaxes(0, 1)).array
            },
        )
    yield (
        "heads of K and V differ",
        ValueError,
        "key|value|k_cache|v_cache",
        lambda c: {
            "value": c.input("bf16", (6, 3, 6)).array,
            "v_cache": c.output("bf16", (8, 3, 6)).array,
        },
    )
    yield (
        "slots float",
        TypeError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((6,), np.float32)},
    )
    yield (
        "slots uint32",
        TypeError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((6,), np.uint32)},
    )
    yield (
        "slots int16",
        TypeError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((6,), np.int16)},
    )
    yield "slots list", TypeError, "slot_mapping", lambda c: {"slot_mapping": [0] * 6}
    yield (
        "slots 2-D",
        ValueError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((6, 1), np.int64)},
    )
    yield (
        "slots 0-D",
        ValueError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((), np.int64)},
    )
    yield (
        "slots longer than rows",
        ValueError,
        "slot_mapping|key",
        lambda c: {"slot_mapping": c.device.zeros((7,), np.int64)},
    )
    yield "layout", ValueError, "layout", lambda c: {"layout": "NDH"}
    yield "skip_slot", both, "skip_slot", lambda c: {"skip_slot": 1.5}


ERRORS = list(error_cases())


def refused(device, case, call, error, name):
    """Assert that `call` raises `error`, names the argument, and changed nothing."""
    with pytest.raises(error) as caught:
        call()
    assert re.search(rf"\b({name})\b", str(caught.value)), f"{name} not in {caught.value}"
    case.check("", [])


@pytest.mark.parametrize(
    ("error", "name", "change"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS]
)
def test_wrong_arguments(device, error, name, change):
    case = Case(device, 34)
    args = dict(
        zip(("key", "value", "k_cache", "v_cache"), (a.array for a in small(case)), strict=True)
    )
    args["slot_mapping"] = case.slots(range(6)).array
    args.update(change(case))
    refused(device, case, lambda: kv.store_kv(**args), error, name)


BAD_SCALES = {
    "zero": (0.0, ValueError),
    "negative": (-1.0, ValueError),
    "nan": (float("nan"), ValueError),
    "inf": (float("inf"), ValueError),
    "too small for float32": (1e-60, ValueError),
    "string": ("1.0", TypeError),
    "three for two heads": (np.ones(3, np.float32), ValueError),
    "2-D": (np.ones((2, 2), np.float32), ValueError),
    "float64": (np.ones(2, np.float64), TypeError),
    "integers": (np.ones(2, np.int32), TypeError),
}


@pytest.mark.parametrize("side", "kv")
@pytest.mark.parametrize("bad", BAD_SCALES)
def test_wrong_scales(device, side, bad):
    scale, error = BAD_SCALES[bad]
    case = Case(device, 35)
    args = [a.array for a in small(case, cache_fmt="fp8_e4m3")]
    slots = case.slots(range(6)).array
    scale = device.asarray(scale) if isinstance(scale, np.ndarray) else scale
    refused(
        device,
        case,
        lambda: kv.store_kv(*args, slots, **{f"{side}_scale": scale}),
        error,
        f"{side}_scale",
    )


@pytest.mark.parametrize("side", "kv")
@pytest.mark.parametrize("cache_fmt", ["fp32", "fp16", "bf16"])
def test_scales_belong_to_quantised_caches(device, cache_fmt, side):
    case = Case(device, 36)
    args = [a.array for a in small(case, cache_fmt=cache_fmt)]
    slots = case.slots(range(6)).array
    dynamic = case.output("fp32", (8, 2)).array
    for option, given_ in (
        (f"{side}_scale", 2.0),
        (f"{side}_scale", device.asarray(np.float32([2.0, 3.0]))),
        (f"{side}_scale_cache", dynamic),
    ):
        refused(
            device,
            case,
            lambda option=option, given_=given_: kv.store_kv(*args, slots, **{option: given_}),
            ValueError,
            option,
        )


@pytest.mark.parametrize("side", "kv")
def test_wrong_scale_caches(device, side):
    case = Case(device, 37)
    args = [a.array for a in small(case, cache_fmt="int8", layout="NHD")]
    slots = case.slots(range(6)).array
    name = f"{side}_scale_cache"

    def refuse(error, **options):
        refused(device, case, lambda: kv.store_kv(*args, slots, **options), error, name)

    for shape in ((8, 3), (7, 2), (9, 2), (16,), (2, 4, 2)):
        refuse(ValueError, **{name: case.output("fp32", shape).array})
    refuse(TypeError, **{name: device.zeros((8, 2), np.float64)})
    refuse(TypeError, **{name: device.zeros((8, 2), np.int32)})
    refuse(TypeError, **{name: 1.0})
    refuse(ValueError, **{name: case.output("fp32", (8, 4), lambda a: a[:, ::2]).array})
    refuse(ValueError, **{name: case.output("fp32", (1, 2), lambda a: repeat_rows(a, 8)).array})
    good = case.output("fp32", (8, 2)).array
    refuse(ValueError, **{name: good, f"{side}_scale": 2.0})
    refuse(ValueError, **{name: good, f"{side}_scale": device.asarray(np.float32([2.0, 3.0]))})


def test_scale_caches_may_not_be_one(device):
    case = Case(device, 38)
    args = [a.array for a in small(case, cache_fmt="int8")]
    both = case.output("fp32", (9, 2))
    first, second = both.sub(lambda a: a[:8]).array, both.sub(lambda a: a[1:]).array
    slots = case.slots(range(6)).array
    for other in (first, second):
        refused(
            device,
            case,
            lambda other=other: kv.store_kv(*args, slots, k_scale_cache=first, v_scale_cache=other),
            ValueError,
            "k_scale_cache|v_scale_cache",
        )


def test_overlapping_arrays_are_refused(device):
    case = Case(device, 39)
    memory = case.output("bf16", (40, 2, 8))
    free = [case.output("bf16", (8, 2, 8)).array for _ in range(2)]
    rows = [case.input("bf16", (6, 2, 8)).array for _ in range(2)]
    slots = case.slots(range(6)).array

    def part(start, count):
        return memory.sub(lambda a: a[start : start + count]).array

    def refuse(names, *args):
        refused(device, case, lambda: kv.store_kv(*args, slots), ValueError, names)

    refuse("k_cache|v_cache", *rows, part(0, 8), part(0, 8))
    refuse("k_cache|v_cache", *rows, part(0, 8), part(7, 8))
    refuse("key|k_cache", part(0, 6), rows[1], part(0, 8), free[1])
    refuse("key|k_cache", part(7, 6), rows[1], part(0, 8), free[1])
    refuse("key|v_cache", part(12, 6), rows[1], free[0], part(10, 8))
    refuse("value|k_cache", rows[0], part(5, 6), part(10, 8), free[1])
    refuse("value|v_cache", rows[0], part(5, 6), free[0], part(10, 8))


def test_neighbours_and_shared_inputs_are_allowed(device):
    """Touching is not overlapping, and inputs may share their bytes."""
    case = Case(device, 40)
    memory = case.output("bf16", (22, 2, 8))
    key = memory.sub(lambda a: a[:6])
    caches = [memory.sub(lambda a, s=start: a[s : s + 8]) for start in (6, 14)]
    case.store_kv(key, key, *caches, [3, 7, 0, -1, 1, 5])


@pytest.mark.parametrize("output", ["k_cache", "v_cache", "k_scale_cache", "v_scale_cache"])
def test_read_only_outputs_are_refused(device, output):
    case = Case(device, 41)
    key, value, k_cache, v_cache = (a.array for a in small(case, cache_fmt="int8"))
    args = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k_scale_cache": case.output("fp32", (8, 2)).array,
        "v_scale_cache": case.output("fp32", (8, 2)).array,
    }
    if not isinstance(args[output], np.ndarray):
        pytest.skip("this array library has no read-only arrays")
    args[output].flags.writeable = False
    slots = case.slots(range(6)).array
    refused(
        device,
        case,
        lambda: kv.store_kv(key, value, slot_mapping=slots, **args),
        ValueError,
        output,
    )


def test_read_only_inputs_are_fine(device):
    case = Case(device, 42)
    args = small(case)
    slots = case.slots(range(6))
    for arg in (*args[:2], slots):
        if isinstance(arg.array, np.ndarray):
            arg.array.flags.writeable = False
    case.store_kv(*args, slots)


def test_arguments_after_the_slots_are_keywords(device):
    case = Case(device, 43)
    args = [a.array for a in small(case)]
    with pytest.raises(TypeError):
        kv.store_kv(*args, case.slots(range(6)).array, "NHD")
    case.check("", [])


# Streams and other exporters -----------------------------------------------------------------


def test_explicit_stream(device):
    case = Case(device, 44)
    stream = device.stream()
    for cache_fmt in ("bf16", "fp8_e4m3"):
        case.store_kv(*small(case, cache_fmt=cache_fmt), [3, 9, -1, 0, 7, 2], stream=stream)


def test_two_stores_on_a_stream_keep_their_order(device):
    case = Case(device, 45)
    stream = device.stream()
    args = small(case, tokens=12)
    later = [arg.sub(lambda a: a[6:]) for arg in args[:2]]
    slots = case.slots(range(6))
    device.synchronize()
    kv.store_kv(*(a.array for a in args), slots.array, stream=stream)
    kv.store_kv(*(a.array for a in (*later, *args[2:])), slots.array, stream=stream)
    stream.synchronize()
    reference.store_kv(*(a.view for a in (*later, *args[2:])), slots.view)
    case.check("store_kv", [])


def test_in_a_graph(device):
    """A captured store runs at replay, and reads its arrays then."""
    case = Case(device, 46)
    stream = device.stream()
    key, value, k_cache, v_cache = small(case)
    slots = case.slots([5, 2, -1, 0, 7, 1])
    case.store_kv(key, value, k_cache, v_cache, slots, stream=stream)
    arrays = [a.array for a in (key, value, k_cache, v_cache, slots)]
    with stream.capture() as graph:
        kv.store_kv(*arrays, stream=stream)
    for arg in (key, value):
        fresh = np.frombuffer(case.rng.bytes(arg.view.nbytes // 4), np.uint8)
        arg.buffer.want[arg.buffer.start :][: fresh.size] = fresh
        arg.buffer.raw[...] = device.asarray(arg.buffer.want.copy())
    device.synchronize()
    for cache in (k_cache, v_cache):
        cache.buffer.check()  # nothing has run yet
    graph.launch(stream)
    stream.synchronize()
    reference.store_kv(*(a.view for a in (key, value, k_cache, v_cache, slots)))
    case.check("store_kv", [])


class OnlyDLPack:
    """An array that shows nothing but DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_any_exporter_of_dlpack(device):
    case = Case(device, 47)
    args = (*small(case, fmt="fp32", cache_fmt="fp32"), case.slots([1, 7, -1, 3, 0, 9], "int32"))
    for arg in args:
        arg.array = OnlyDLPack(arg.array)
    case.store_kv(*args)


def torch_tensor(torch, device, array, dtype):
    """A torch tensor of `dtype` with the bits of a NumPy array, on `device`."""
    bits = torch.from_numpy(array.view(np.uint8).copy()).view(dtype)
    return bits.cuda() if device.kind == "cuda" else bits


@pytest.mark.parametrize(
    "pair",
    [
        ("fp32", "fp32"),
        ("bf16", "bf16"),
        ("fp16", "fp8_e4m3"),
        ("bf16", "fp8_e5m2"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp32", "int8"),
    ],
    ids="-".join,
)
def test_torch_tensors(device, pair):
    torch = pytest.importorskip("torch")
    if device.kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    kinds = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "int8": torch.int8,
    }
    rng = np.random.default_rng(48)
    qkv = random_elements(rng, pair[0], 5 * 6 * 8).reshape(5, 6, 8)
    mirror = random_elements(rng, pair[1], 4 * 2 * 2 * 2 * 8).reshape(4, 2, 2, 2, 8)
    slots = np.array([7, -1, 3, 0, 4], np.int32)
    scale = 0.5 if pair[1] in QUANTISED else None
    on_torch = torch_tensor(torch, device, qkv, kinds[pair[0]])
    cache = torch_tensor(torch, device, mirror, kinds[pair[1]])
    kv.store_kv(
        on_torch[:, 2:4],
        on_torch[:, 4:],
        cache[:, 0],
        cache[:, 1],
        torch.from_numpy(slots).to(cache.device),
        k_scale=scale,
    )
    kv.check_faults(device)
    reference.store_kv(qkv[:, 2:4], qkv[:, 4:], mirror[:, 0], mirror[:, 1], slots, k_scale=scale)
    for name, tensor, want in (("qkv", on_torch, qkv), ("cache", cache, mirror)):
        got = tensor.cpu().contiguous().view(torch.uint8).numpy().view(want.dtype)
        compare(got, want, pair[name == "cache"], exact=pair[0] == pair[1], name=name, seed=48)


def test_torch_and_numpy_in_one_call(device):
    torch = pytest.importorskip("torch")
    if device.kind != "host":
        pytest.skip("NumPy arrays live on the host device")
    case = Case(device, 49)
    args = small(case, fmt="fp32", cache_fmt="fp16")
    args[0].array = torch.from_numpy(args[0].array)
    args[3].array = torch.from_numpy(args[3].array)
    case.store_kv(*args, [2, 0, -1, 7, 6, 1])


@pytest.mark.gpu
def test_streams_of_cupy():
    """A CuPy stream is accepted as it is."""
    import cupy

    case = Case(kv.device("cuda"), 50)
    case.store_kv(*small(case), [2, 0, -1, 7, 8, 1], stream=cupy.cuda.Stream(non_blocking=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["key", "value", "k_cache", "v_cache", "slot_mapping"])
def test_arrays_of_two_devices_are_refused(name):
    case, other = Case(kv.device("cuda"), 59), Case(kv.device("host"), 59)
    names = ("key", "value", "k_cache", "v_cache", "slot_mapping")
    args, foreign = (
        dict(zip(names, (a.array for a in (*small(c), c.slots(range(6)))), strict=True))
        for c in (case, other)
    )
    args[name] = foreign[name]
    with pytest.raises((TypeError, ValueError)):
        kv.store_kv(**args)
    case.check("", [])
    other.check("", [])


# store_mla -----------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    "pair", [*PAIRS, ("fp16", "bf16"), ("bf16", "int8"), ("fp32", "fp8_e5m2")], ids="-".join
)
def test_mla(device, pair, paged):
    for rank, rope in ((512, 64), (7, 3), (1, 1), (16, 5), (5, 16), (96, 32), (512, 144)):
        case = Case(device, (rank, rope))
        latent = case.input(pair[0], (6, rank), name="latent")
        rope_key = case.input(pair[0], (6, rope), name="rope_key")
        shape = (3, 4, rank + rope) if paged else (12, rank + rope)
        cache = case.output(pair[1], shape, name="cache")
        scale = 0.37 if pair[1] in QUANTISED else None
        case.store_mla(latent, rope_key, cache, shuffled_slots(case, 6, 12), scale=scale)


@pytest.mark.parametrize("misalign", [1, 2, 4, 8])
@pytest.mark.parametrize("pair", PAIRS[::3], ids="-".join)
def test_mla_alignment(device, pair, misalign):
    for which, (rank, rope) in itertools.product(range(3), ((64, 32), (24, 8))):
        case = Case(device, (which, rank))
        off = [misalign if i == which else 0 for i in range(3)]
        latent = case.input(pair[0], (4, rank), misalign=off[0])
        rope_key = case.input(pair[0], (4, rope), misalign=off[1])
        cache = case.output(pair[1], (6, rank + rope), misalign=off[2])
        case.store_mla(latent, rope_key, cache, [4, 5, -1, 0])


MLA_VIEWS = {
    "one projection": lambda c: (
        lambda both: (both.sub(lambda a: a[:, :24]), both.sub(lambda a: a[:, 24:]))
    )(c.input("bf16", (5, 32))),
    "reversed and broadcast": lambda c: (
        c.input("bf16", (5, 24), lambda a: a[::-1]),
        c.input("bf16", (1, 8), lambda a: np.broadcast_to(a, (5, 8))),
    ),
    "every other row": lambda c: (
        c.input("bf16", (10, 24), lambda a: a[1::2]),
        c.input("bf16", (15, 9), lambda a: a[::3, 1:]),
    ),
    "more rows than slots": lambda c: (c.input("bf16", (8, 24)), c.input("bf16", (8, 8))),
}


@pytest.mark.parametrize("cache_view", ["slots", "pages", "layer", "wider"])
@pytest.mark.parametrize("view", MLA_VIEWS)
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
def test_mla_views(device, fmt, view, cache_view):
    case = Case(device, 51)
    latent, rope_key = MLA_VIEWS[view](case)
    cache = {
        "slots": lambda: case.output(fmt, (8, 32)),
        "pages": lambda: case.output(fmt, (2, 4, 32)),
        "layer": lambda: case.output(fmt, (2, 3, 4, 32), lambda a: a[:, 1]),
        "wider": lambda: case.output(fmt, (2, 4, 37), lambda a: a[..., 3:35]),
    }[cache_view]()
    case.store_mla(latent, rope_key, cache, case.slots([7, 0, -1, 4, 3], "int32", 2))


@pytest.mark.parametrize("fmt", QUANTISED)
def test_mla_scale(device, fmt):
    for scale in (None, 1.0, 0.013, np.float32([0.7])):
        case = Case(device, 52)
        values = np.resize(telling_values("fp32", fmt), (8, 128))
        latent = case.place(values[:, :96], "fp32")
        rope_key = case.place(values[:, 96:], "fp32")
        case.store_mla(latent, rope_key, case.output(fmt, (8, 128)), range(8), scale=scale)


def test_mla_scaling_is_one_float32_division(device):
    rng = np.random.default_rng(53)
    scale, values = traps("fp8_e4m3", by_reciprocal, rng.uniform(0.01, 4, 200).astype(np.float32))
    assert values.size >= 8, "the input tells nothing"
    case = Case(device, 53)
    latent = case.place(np.resize(values, (2, 40)), "fp32")
    rope_key = case.place(np.resize(values[::-1], (2, 24)), "fp32")
    case.store_mla(latent, rope_key, case.output("fp8_e4m3", (2, 64)), [1, 0], scale=float(scale))


def mla(case, fmt="bf16"):
    return (case.input("bf16", (6, 8)), case.input("bf16", (6, 4)), case.output(fmt, (2, 4, 12)))


def test_mla_slots(device):
    case = Case(device, 54)
    case.store_mla(*mla(case), [3, -5, 7, 0, 5, 2], skip_slot=5)
    case.store_mla(*mla(case), [3, 8, -1, 0, 2**32 + 1, 2])
    case.store_mla(*mla(case), [3, 6, -(2**32) + 1, 0, 1, 777])
    case.store_mla(*mla(case), [])
    case.store_mla(*mla(case), [7, 2], stream=device.stream())


MLA_ERRORS = {
    "latent 3-D": (ValueError, "latent", lambda c: {"latent": c.input("bf16", (6, 1, 8)).array}),
    "rope_key 1-D": (ValueError, "rope_key", lambda c: {"rope_key": c.input("bf16", (6,)).array}),
    "latent width": (
        ValueError,
        "latent|rope_key|cache",
        lambda c: {"latent": c.input("bf16", (6, 9)).array},
    ),
    "rope_key width": (
        ValueError,
        "latent|rope_key|cache",
        lambda c: {"rope_key": c.input("bf16", (6, 3)).array},
    ),
    "cache 1-D": (ValueError, "cache", lambda c: {"cache": c.output("bf16", (12,)).array}),
    "cache 4-D": (ValueError, "cache", lambda c: {"cache": c.output("bf16", (2, 4, 1, 12)).array}),
    "few latents": (
        ValueError,
        "latent|slot_mapping",
        lambda c: {"latent": c.input("bf16", (5, 8)).array},
    ),
    "few rope keys": (
        ValueError,
        "rope_key|slot_mapping",
        lambda c: {"rope_key": c.input("bf16", (5, 4)).array},
    ),
    "latent float64": (
        TypeError,
        "latent",
        lambda c: {"latent": c.device.zeros((6, 8), np.float64)},
    ),
    "rope_key untagged": (
        TypeError,
        "rope_key",
        lambda c: {"rope_key": c.device.zeros((6, 4), np.uint16)},
    ),
    "cache float64": (
        TypeError,
        "cache",
        lambda c: {"cache": c.device.zeros((2, 4, 12), np.float64)},
    ),
    "latent strided": (
        ValueError,
        "latent",
        lambda c: {"latent": c.input("bf16", (6, 16), lambda a: a[:, ::2]).array},
    ),
    "rope_key reversed": (
        ValueError,
        "rope_key",
        lambda c: {"rope_key": c.input("bf16", (6, 4), lambda a: a[:, ::-1]).array},
    ),
    "cache strided": (
        ValueError,
        "cache",
        lambda c: {"cache": c.output("bf16", (2, 4, 24), lambda a: a[..., ::2]).array},
    ),
    "cache zero stride": (
        ValueError,
        "cache",
        lambda c: {"cache": c.output("bf16", (1, 4, 12), lambda a: repeat_rows(a, 2)).array},
    ),
    "slots float": (
        TypeError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((6,), np.float32)},
    ),
    "slots 2-D": (
        ValueError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((6, 1), np.int64)},
    ),
    "scale without need": (ValueError, "scale", lambda c: {"scale": 2.0}),
    "overlap": (
        ValueError,
        "latent|cache",
        lambda c: (
            lambda both: {"latent": both.sub(lambda a: a[:6, :8]).array, "cache": both.array}
        )(c.output("bf16", (8, 12))),
    ),
}


@pytest.mark.parametrize("wrong", MLA_ERRORS)
def test_mla_wrong_arguments(device, wrong):
    error, name, change = MLA_ERRORS[wrong]
    case = Case(device, 55)
    args = dict(zip(("latent", "rope_key", "cache"), (a.array for a in mla(case)), strict=True))
    args["slot_mapping"] = case.slots(range(6)).array
    args.update(change(case))
    refused(device, case, lambda: kv.store_mla(**args), error, name)


@pytest.mark.parametrize("bad", BAD_SCALES)
def test_mla_wrong_scales(device, bad):
    scale, error = BAD_SCALES[bad]
    case = Case(device, 56)
    args = [a.array for a in mla(case, "int8")]
    slots = case.slots(range(6)).array
    scale = device.asarray(scale) if isinstance(scale, np.ndarray) else scale
    refused(device, case, lambda: kv.store_mla(*args, slots, scale=scale), error, "scale")


# Anything ------------------------------------------------------------------------------------


@st.composite
def store_calls(draw):
    """Shapes, strides, layouts and formats of one `store_kv` call."""
    sizes = st.integers(1, 5)
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "pair": draw(st.sampled_from(PAIRS)),
        "layout": draw(st.sampled_from(["NHD", "HND", "slots"])),
        "tokens": draw(st.integers(0, 9)),
        "padding": draw(st.integers(0, 2)),
        "heads": draw(sizes),
        "widths": (draw(st.integers(1, 70)), draw(st.integers(1, 70))),
        "pages": draw(sizes),
        "page_size": draw(sizes),
        "views": (draw(st.integers(0, 4)), draw(st.integers(0, 4))),
        "wider": (draw(st.integers(0, 3)), draw(st.integers(0, 3))),
        "misalign": tuple(draw(st.integers(0, 9)) for _ in range(4)),
        "index": (draw(st.sampled_from(["int32", "int64"])), draw(st.sampled_from([1, 2, -1]))),
        "scales": (draw(st.sampled_from(list(SCALES))), draw(st.sampled_from(list(SCALES)))),
        "skip": draw(st.booleans()),
    }


def drawn_input(case, fmt, view, shape, misalign):
    """An input of `shape` behind one of five kinds of strides."""
    tokens, heads, width = shape
    base, cut = {
        0: (shape, None),
        1: ((tokens, heads + 3, width), lambda a: a[:, 1 : heads + 1]),
        2: (shape, lambda a: a[::-1, ::-1]),
        3: ((tokens, 1, width), lambda a: np.broadcast_to(a, shape)),
        4: ((heads, tokens, width + 1), lambda a: a.transpose(1, 0, 2)[..., 1:]),
    }[view]
    return case.input(fmt, base, cut, misalign=misalign)


@settings(max_examples=150, deadline=None, database=None)
@given(call=store_calls())
def test_any_call(device, call):
    case = Case(device, call["seed"])
    (source, destination), heads = call["pair"], call["heads"]
    num_slots = call["pages"] * call["page_size"]
    args, options = [], {}
    for side in (0, 1):
        shape = (call["tokens"] + call["padding"], heads, call["widths"][side])
        args.append(drawn_input(case, source, call["views"][side], shape, call["misalign"][side]))
    for side, letter in enumerate("kv"):
        base = cache_shape(
            call["layout"],
            call["pages"],
            call["page_size"],
            heads,
            call["widths"][side] + call["wider"][side],
        )
        args.append(
            case.output(
                destination,
                base,
                lambda a, s=side: a[..., : call["widths"][s]],
                misalign=call["misalign"][2 + side],
            )
        )
        scale = call["scales"][side]
        if destination not in QUANTISED or scale == "none":
            continue
        if scale == "dynamic":
            options[f"{letter}_scale_cache"] = case.output("fp32", (num_slots, heads))
        elif scale == "per head":
            options[f"{letter}_scale"] = case.rng.uniform(0.1, 3, heads).astype(np.float32)
        else:
            options[f"{letter}_scale"] = SCALES[scale]
    # Distinct slots, from below the first to past the last.
    slots = case.rng.permutation(np.arange(-2, num_slots + call["tokens"]))[: call["tokens"]]
    if call["skip"]:
        options["skip_slot"] = int(case.rng.integers(num_slots))
    if call["layout"] in LAYOUTS:
        options["layout"] = call["layout"]
    case.store_kv(*args, case.slots(slots, *call["index"]), **options)


# The checks themselves -----------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before", "after", "gap", "element", "input"])
def test_comparison_sees_one_changed_bit(device, place):
    """Canaries, gaps, results and inputs are really compared."""
    case = Case(device, 57)
    key = case.input("bf16", (4, 2, 8))
    cache = case.output("bf16", (4, 2, 11), lambda a: a[..., :8])
    case.check("", [])
    buffer = (key if place == "input" else cache).buffer
    at = {
        "before": buffer.start - 1,
        "after": buffer.stop,
        "gap": buffer.start + 17,
        "element": buffer.start + 3,
        "input": buffer.start,
    }[place]
    buffer.raw[at : at + 1] ^= 1
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        case.check("", [])


def test_poison_slot_is_past_every_cache_here():
    assert POISON_SLOT > 2**31 // 64 + 100
    assert {d.itemsize for d in DTYPE.values()} <= set(UNSIGNED)
    assert ml_dtypes.bfloat16 == DTYPE["bf16"].type
