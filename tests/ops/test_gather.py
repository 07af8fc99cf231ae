"""`gather_kv`, by what a user sees of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import (
    DTYPE,
    FORMATS,
    LAYOUTS,
    QUANTISED,
    Arg,
    Case,
    all_patterns,
    as_numpy,
    cache_shape,
    compare,
)
from kernel_checks import check_gather_allocated
from store_calls import TWO_HEAD_SCALES, telling_values

import kvcupy as kv
from kvcupy import reference

PAIRS = (
    ("bf16", "bf16"), ("fp8_e5m2", "fp8_e5m2"), ("fp32", "fp32"), ("fp8_e4m3", "bf16"),
    ("int8", "fp32"), ("fp16", "fp8_e4m3"),
)  # fmt: skip
SLOTS = (7, 0, -1, 11, 3, 4, 7)


class GatherCase(Case):
    """The buffers of one test, with a call of `gather_kv` that checks everything."""

    def gather(
        self, k_cache, v_cache, slots, k_out=None, v_out=None, *, stream=None, dtype=None, **options
    ):
        """Check one call; outputs that are not given are allocated by it, zero where skipped."""
        slots = slots if isinstance(slots, Arg) else self.slots(slots)

        if stream is not None:
            self.device.synchronize()
        got = kv.gather_kv(
            k_cache.array, v_cache.array, slots.array,
            k_out=self.to_pass(k_out), v_out=self.to_pass(v_out), dtype=dtype, stream=stream,
            **{name: self.to_pass(value) for name, value in options.items()},
        )  # fmt: skip
        if stream is not None:
            stream.synchronize()
        assert len(got) == 2
        wants = []
        for given_out, cache in zip((k_out, v_out), (k_cache, v_cache), strict=True):
            if given_out is not None:
                given_out.buffer.exact &= given_out.fmt == cache.fmt
                wants.append(given_out.view)
                continue
            fmt = dtype or next((o.fmt for o in (k_out, v_out) if o is not None), None)
            fmt = fmt or ("bf16" if cache.fmt in QUANTISED else cache.fmt)
            heads = () if cache.view.ndim == 2 else (heads_of(cache.view, options),)
            wants.append(np.zeros((len(slots.view), *heads, cache.view.shape[-1]), DTYPE[fmt]))
        faults = reference.gather_kv(
            k_cache.view,
            v_cache.view,
            slots.view,
            k_out=wants[0],
            v_out=wants[1],
            **{
                name: value.view if isinstance(value, Arg) else value
                for name, value in options.items()
            },
        )
        for name, out, given_out, want, cache in zip(
            "KV", got, (k_out, v_out), wants, (k_cache, v_cache), strict=True
        ):
            fmt = reference.format_of(want)
            if given_out is None:
                compare(
                    as_numpy(self.device, out, fmt), want, fmt, exact=fmt == cache.fmt, name=name,
                    seed=self.seed,
                )  # fmt: skip
            else:
                assert tuple(out.shape) == want.shape
        self.check("gather_kv", faults)


def heads_of(cache, options):
    return cache.shape[1] if options.get("layout") == "HND" or cache.ndim == 3 else cache.shape[2]


# Formats and scales --------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("destination", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_every_pair_of_formats(device, source, destination):
    """Ties, subnormals, overflow, saturation, infinities, NaN and -0, unscaled and scaled."""
    values = telling_values(source, destination)
    values = np.resize(values, (-(-values.size // 512), 2, 256))
    scales = ((None, 1.0),)
    if source in QUANTISED:
        scales += ((0.37, np.float32([3.0, 1 / 3])),)
    for (k_scale, v_scale), allocate in itertools.product(scales, (False, True)):
        case = GatherCase(device)
        tokens = len(values)
        caches = [case.place(values, source), case.place(values[::-1], source)]
        outs = [None if allocate else case.output(destination, values.shape) for _ in range(2)]
        case.gather(
            *caches, case.rng.permutation(tokens), *outs, k_scale=k_scale, v_scale=v_scale,
            dtype=destination if allocate else None,
        )  # fmt: skip


@pytest.mark.parametrize("destination", FORMATS)
@pytest.mark.parametrize("source", QUANTISED)
def test_dynamic_scales(device, source, destination):
    for layout in ("NHD", "HND", "slots"):
        case = GatherCase(device, 1)
        caches = [case.input(source, cache_shape(layout, 3, 4, 2, w)) for w in (40, 24)]
        scales = {
            f"{side}_scale_cache": case.place(
                case.rng.uniform(1e-3, 9, (12, 2)).astype(np.float32), "fp32"
            )
            for side in "kv"
        }
        outs = [case.output(destination, (7, 2, w)) for w in (40, 24)]
        options = {"layout": layout} if layout in LAYOUTS else {}
        case.gather(*caches, SLOTS, *outs, **scales, **options)


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
    case = GatherCase(device, 2)
    cache = case.place(np.resize(values, (8, 1, 32)), fmt)
    outs = [case.output(destination, (8, 1, 32)) for _ in range(2)]
    case.gather(cache, cache, range(8), *outs, k_scale=float(scale), v_scale=np.float32([scale]))


@pytest.mark.parametrize(("k", "v"), [*itertools.permutations([*TWO_HEAD_SCALES, "dynamic"], 2)])
def test_scales_differ_for_key_and_value(device, k, v):
    case = GatherCase(device, 3)
    caches = [case.input("int8", (3, 4, 2, w)) for w in (16, 10)]
    options = {}
    for side, name in (("k", k), ("v", v)):
        if name == "dynamic":
            options[f"{side}_scale_cache"] = case.place(
                case.rng.uniform(0.01, 3, (12, 2)).astype(np.float32), "fp32"
            )
        else:
            options[f"{side}_scale"] = TWO_HEAD_SCALES[name]
    case.gather(*caches, SLOTS, *(case.output("bf16", (7, 2, w)) for w in (16, 10)), **options)


def test_same_format_ignores_scales(device):
    for fmt in QUANTISED:
        case = GatherCase(device, 4)
        caches = [case.input(fmt, (12, 2, 16)) for _ in range(2)]
        outs = [case.output(fmt, (7, 2, 16)) for _ in range(2)]
        scales = case.place(np.full((12, 2), 2, np.float32), "fp32")
        case.gather(*caches, SLOTS, *outs, k_scale=3.0, v_scale_cache=scales)


def test_format_of_outputs_that_are_allocated(device):
    """`dtype`, else the format of the cache, or bf16 if that is quantised."""
    for fmt in FORMATS:
        case = GatherCase(device, 5)
        caches = [case.input(fmt, (12, 2, 16)) for _ in range(2)]
        case.gather(*caches, SLOTS)
        case.gather(*caches, SLOTS, dtype="fp16")
        case.gather(*caches, SLOTS, dtype=fmt)
        case.gather(*caches, SLOTS, case.output("fp16", (7, 2, 16)))
        case.gather(*caches, SLOTS, None, case.output("fp32", (7, 2, 16)))


def test_key_and_value_follow_their_own_formats(device):
    for k_pair, v_pair in (
        (("fp8_e4m3", "bf16"), ("int8", "fp16")),
        (("bf16", "bf16"), ("fp8_e5m2", "fp32")),
        (("fp32", "int8"), ("fp16", "fp16")),
    ):
        case = GatherCase(device, 6)
        caches = [case.input(pair[0], (12, 2, 16)) for pair in (k_pair, v_pair)]
        outs = [case.output(pair[1], (7, 2, 16)) for pair in (k_pair, v_pair)]
        case.gather(*caches, SLOTS, *outs)


# Layouts, strides, widths --------------------------------------------------------------------


def test_repeated_slots_and_many_tokens(device):
    for pair, shape in ((PAIRS[0], (300, 1, 8)), (PAIRS[3], (3, 130, 16)), (PAIRS[3], (70, 5, 64))):
        case = GatherCase(device, 11)
        caches = [case.input(pair[0], (9, *shape[1:])) for _ in range(2)]
        outs = [case.output(pair[1], shape) for _ in range(2)]
        case.gather(*caches, case.rng.integers(-1, 9, shape[0]), *outs)


# Slots ---------------------------------------------------------------------------------------


def small(case, fmt="bf16", out_fmt="bf16", *, layout="slots", tokens=6):
    """Caches of eight slots, and outputs."""
    return (
        [case.input(fmt, cache_shape(layout, 2, 4, 2, w)) for w in (8, 6)],
        [case.output(out_fmt, (tokens, 2, w)) for w in (8, 6)],
    )


@pytest.mark.parametrize(
    ("source", "destination"),
    [("bf16", "bf16"), ("fp8_e4m3", "bf16"), ("fp8_e4m3", "fp32"), ("fp16", "int8"),
     ("nvfp4", "fp16"), ("nvfp4", "nvfp4")],
)  # fmt: skip
def test_allocated_rows_of_skipped_slots_are_zeros(device, source, destination):
    check_gather_allocated(device, source, destination)


def test_fault_reads_no_scale(device):
    case = GatherCase(device, 17)
    caches, outs = small(case, "int8")
    scales = {
        f"{side}_scale_cache": case.place(np.full((8, 2), 0.5, np.float32), "fp32") for side in "kv"
    }
    case.gather(*caches, [3, 8, -1, 2**40, 7, 0], *outs, **scales)
