"""`gather_kv`, by what a user sees of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import FORMATS, LAYOUTS, QUANTISED, Case, all_patterns, cache_shape
from kernel_checks import check_gather_allocated
from store_calls import TWO_HEAD_SCALES, telling_values

import kvcupy as kv
from kvcupy import reference
from kvcupy.arrays import view

SLOTS = (7, 0, -1, 11, 3, 4, 7)


def gather(case, caches, slots, outs, **options):
    case.call("gather_kv", *caches, slots, k_out=outs[0], v_out=outs[1], **options)


def dynamic_scales(case, sides="kv"):
    """Scales of twelve slots."""
    return {
        f"{side}_scale_cache": case.place(
            case.rng.uniform(1e-3, 9, (12, 2)).astype(np.float32), "fp32"
        )
        for side in sides
    }


@pytest.mark.covering
@pytest.mark.parametrize("destination", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_every_pair_of_formats(device, source, destination):
    """Ties, subnormals, overflow, saturation, infinities, NaN and -0, unscaled and scaled."""
    values = telling_values(source, destination)
    values = np.resize(values, (-(-values.size // 512), 2, 256))
    for scales in ((None, 1.0), (0.37, np.float32([3.0, 1 / 3])))[: 1 + (source in QUANTISED)]:
        case = Case(device)
        caches = [case.place(values, source), case.place(values[::-1], source)]
        outs = [case.output(destination, values.shape) for _ in range(2)]
        slots = case.rng.permutation(len(values))
        gather(case, caches, slots, outs, k_scale=scales[0], v_scale=scales[1])


@pytest.mark.parametrize("destination", FORMATS)
@pytest.mark.parametrize("source", QUANTISED)
def test_dynamic_scales(device, source, destination):
    """A slot past the end reads no scale."""
    for layout in ("NHD", "HND", "slots"):
        case = Case(device, 1)
        caches = [case.input(source, cache_shape(layout, 3, 4, 2, w)) for w in (40, 24)]
        outs = [case.output(destination, (7, 2, w)) for w in (40, 24)]
        options = {"layout": layout} if layout in LAYOUTS else {}
        gather(case, caches, [7, 0, -1, 12, 3, 2**40, 7], outs, **dynamic_scales(case), **options)


def by_division(x, scale):
    """Divide by the reciprocal."""
    return x / (np.float32(1) / scale)


def in_float64(x, scale):
    """Multiply without rounding to float32 in between."""
    return x.astype(np.float64) * np.float64(scale)


@pytest.mark.parametrize("wrong", [by_division, in_float64])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int8"])
def test_dequantisation_is_one_float32_product(device, fmt, wrong):
    """With scales for which anything else gives other bits, in fp32 or after the rounding."""
    rng = np.random.default_rng(2)
    values = all_patterns(fmt)
    values = values[np.isfinite(reference.decode(values, fmt))]
    x = reference.decode(values, fmt).astype(np.float32)
    destination = "fp32" if wrong is by_division else "bf16"

    def told(scale):
        right = reference.encode(x * scale, destination)
        return int((right != reference.encode(wrong(x, scale), destination)).sum())

    scales = rng.uniform(0.01, 4, 4000).astype(np.float32)
    if wrong is in_float64:  # Let a product be next to halfway between two of bf16.
        halfway = np.float32(1 + 2.0**-8) * np.exp2(rng.integers(-3, 3, 400))
        scales = (halfway[:, None] / np.float32([3, 5, 7, 9, 11, 13])).ravel().astype(np.float32)
    scale = max(scales, key=told)
    assert told(scale) >= 1, "the input tells nothing"
    case = Case(device, 2)
    cache = case.place(np.resize(values, (8, 1, 32)), fmt)
    outs = [case.output(destination, (8, 1, 32)) for _ in range(2)]
    gather(case, (cache, cache), range(8), outs, k_scale=float(scale), v_scale=np.float32([scale]))


@pytest.mark.parametrize(("k", "v"), [*itertools.permutations([*TWO_HEAD_SCALES, "dynamic"], 2)])
def test_scales_differ_for_key_and_value(device, k, v):
    case = Case(device, 3)
    caches = [case.input("int8", (3, 4, 2, w)) for w in (16, 10)]
    options = {}
    for side, name in (("k", k), ("v", v)):
        scale = {f"{side}_scale": TWO_HEAD_SCALES.get(name)}
        options |= dynamic_scales(case, side) if name == "dynamic" else scale
    gather(case, caches, SLOTS, [case.output("bf16", (7, 2, w)) for w in (16, 10)], **options)


def test_same_format_ignores_scales(device):
    for fmt in QUANTISED:
        case = Case(device, 4)
        caches = [case.input(fmt, (12, 2, 16)) for _ in range(2)]
        outs = [case.output(fmt, (7, 2, 16)) for _ in range(2)]
        gather(case, caches, SLOTS, outs, k_scale=3.0, **dynamic_scales(case, "v"))


def test_format_of_outputs_that_are_allocated(device):
    """`dtype`, else the format of the other output or of the cache, bf16 for a quantised one."""
    for fmt in FORMATS:
        case = Case(device, 5)
        caches = [case.input(fmt, (12, 2, 16)).array for _ in range(2)]
        slots = device.asarray(np.array(SLOTS))
        out = case.output("fp16", (7, 2, 16)).array
        default = "bf16" if fmt in QUANTISED else fmt
        for options, want in (
            ({}, default), ({"dtype": "fp16"}, "fp16"), ({"dtype": fmt}, fmt),
            ({"k_out": out}, "fp16"), ({"v_out": out}, "fp16"),
        ):  # fmt: skip
            outs = kv.gather_kv(*caches, slots, **options)
            assert [view(each).format for each in outs] == [want, want]


def test_key_and_value_follow_their_own_formats(device):
    for k_pair, v_pair in (
        (("fp8_e4m3", "bf16"), ("int8", "fp16")),
        (("bf16", "bf16"), ("fp8_e5m2", "fp32")),
        (("fp32", "int8"), ("fp16", "fp16")),
    ):
        case = Case(device, 6)
        caches = [case.input(pair[0], (12, 2, 16)) for pair in (k_pair, v_pair)]
        outs = [case.output(pair[1], (7, 2, 16)) for pair in (k_pair, v_pair)]
        gather(case, caches, SLOTS, outs)


def test_repeated_slots_and_many_tokens(device):
    for source, target, shape in (
        ("bf16", "bf16", (300, 1, 8)), ("fp8_e4m3", "bf16", (3, 130, 16)),
        ("fp8_e4m3", "bf16", (70, 5, 64)),
    ):  # fmt: skip
        case = Case(device, 11)
        caches = [case.input(source, (9, *shape[1:])) for _ in range(2)]
        outs = [case.output(target, shape) for _ in range(2)]
        gather(case, caches, case.rng.integers(-1, 9, shape[0]), outs)


@pytest.mark.parametrize(
    ("source", "destination"),
    [("bf16", "bf16"), ("fp8_e4m3", "fp32"), ("fp16", "int8"), ("nvfp4", "fp16"),
     ("nvfp4", "nvfp4")],
)  # fmt: skip
def test_allocated_rows_of_skipped_slots_are_zeros(device, source, destination):
    check_gather_allocated(device, source, destination)
