"""`gather_kv`, by what a user sees of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from gather_cases import GatherCase, as_numpy
from helpers import (
    DTYPE,
    FORMATS,
    LAYOUTS,
    QUANTISED,
    all_patterns,
    cache_shape,
    examples,
    from_values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from operation_checks import check_gather_allocated
from store_calls import COMBINED, TWO_HEAD_SCALES, telling_values

import kvcupy as kv
from kvcupy import reference

PAIRS = (
    ("bf16", "bf16"),
    ("fp8_e5m2", "fp8_e5m2"),
    ("fp32", "fp32"),
    ("fp8_e4m3", "bf16"),
    ("int8", "fp32"),
    ("fp16", "fp8_e4m3"),
)
SLOTS = (7, 0, -1, 11, 3, 4, 7)


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
            *caches,
            case.rng.permutation(tokens),
            *outs,
            k_scale=k_scale,
            v_scale=v_scale,
            dtype=destination if allocate else None,
        )


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


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("layout", ["NHD", "HND", "slots", "2-D"])
def test_layouts(device, layout, pair):
    options = {"layout": layout} if layout in LAYOUTS else {}
    for allocate in (False, True):
        case = GatherCase(device, 7)
        heads = () if layout == "2-D" else (3,)
        caches = [case.input(pair[0], cache_shape(layout, 4, 3, 3, w)) for w in (24, 16)]
        outs = [None if allocate else case.output(pair[1], (7, *heads, w)) for w in (24, 16)]
        case.gather(*caches, SLOTS, *outs, dtype=pair[1] if allocate else None, **options)


@pytest.mark.parametrize("pair", PAIRS[::3], ids="-".join)
@pytest.mark.parametrize("kind", COMBINED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_combined_caches(device, layout, kind, pair):
    case = GatherCase(device, 8)
    shape, cuts = COMBINED[kind](*cache_shape(layout, 3, 4, 2, 16))
    both = case.input(pair[0], shape)
    outs = [case.output(pair[1], (7, 2, 16)) for _ in range(2)]
    case.gather(*map(both.sub, cuts), SLOTS, *outs, layout=layout)


OUTPUT_VIEWS = {
    "packed": ((7, 5, 12), lambda a: a[:, 1:3]),
    "every other token": ((14, 2, 12), lambda a: a[::2]),
    "heads first": ((2, 7, 12), lambda a: a.transpose(1, 0, 2)),
    "wider rows": ((7, 2, 17), lambda a: a[..., 3:15]),
    "tokens reversed": ((7, 2, 12), lambda a: a[::-1]),
}


@pytest.mark.parametrize("pair", PAIRS[::3], ids="-".join)
@pytest.mark.parametrize("view", OUTPUT_VIEWS)
def test_strided_outputs(device, view, pair):
    names = list(OUTPUT_VIEWS)
    other = names[(names.index(view) + 1) % len(names)]
    case = GatherCase(device, 9)
    caches = [
        case.input(pair[0], (3, 4, 2, 12)),
        case.input(pair[0], (3, 4, 5, 13), lambda a: a[:, :, 1:3, 1:]),
    ]
    outs = [case.output(pair[1], *OUTPUT_VIEWS[name]) for name in (view, other)]
    case.gather(*caches, SLOTS, *outs)


def test_keys_and_values_into_one_array(device):
    case = GatherCase(device, 10)
    caches = [case.input("fp8_e4m3", (12, 2, 8)) for _ in range(2)]
    both = case.output("bf16", (7, 2, 2, 8))
    case.gather(*caches, SLOTS, both.sub(lambda a: a[:, 0]), both.sub(lambda a: a[:, 1]))


@pytest.mark.covering
@pytest.mark.parametrize("misalign", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_widths_and_alignment(device, pair, misalign):
    widths = (1, 2, 3, 7, 8, 16, 31, 33, 64, 80, 100, 128, 192, 576)
    for index, width in enumerate(widths):
        case = GatherCase(device, (misalign, width))
        both = (width, widths[-1 - index])
        off = [misalign if i in (index % 4, (index + 1) % 4) else 0 for i in range(4)]
        caches = [case.input(pair[0], (6, 2, w), misalign=off[i]) for i, w in enumerate(both)]
        outs = [case.output(pair[1], (4, 2, w), misalign=off[2 + i]) for i, w in enumerate(both)]
        case.gather(*caches, [4, 5, -1, 0], *outs)


def test_repeated_slots_and_many_tokens(device):
    for pair, shape in ((PAIRS[0], (300, 1, 8)), (PAIRS[3], (3, 130, 16)), (PAIRS[3], (70, 5, 64))):
        case = GatherCase(device, 11)
        caches = [case.input(pair[0], (9, *shape[1:])) for _ in range(2)]
        outs = [case.output(pair[1], shape) for _ in range(2)]
        case.gather(*caches, case.rng.integers(-1, 9, shape[0]), *outs)


def test_offsets_past_two_gigabytes(device):
    width, num_slots = 64, 2**31 // 64 + 100
    caches = [device.empty((num_slots, 1, width), np.int8) for _ in range(2)]
    rows = np.random.default_rng(12).integers(-127, 128, (2, 1, width), dtype=np.int8)
    last = num_slots - 1
    for cache, sign in zip(caches, (1, -1), strict=True):
        cache[last], cache[5] = device.asarray(rows[0] // sign), device.asarray(rows[1] // sign)
    wide = device.empty((3, 1, 2**30 + 64), np.int8)[..., :width]
    out = device.zeros((3, 1, width), np.int8)
    kv.gather_kv(*caches, device.asarray(np.array([last, 5, last])), k_out=wide, v_out=out)
    kv.check_faults(device)
    for got, sign in ((wide, 1), (out, -1)):
        want = rows[[0, 1, 0]] // sign
        assert all(np.array_equal(device.to_numpy(got[i]), want[i]) for i in range(3))


# Slots ---------------------------------------------------------------------------------------


def small(case, fmt="bf16", out_fmt="bf16", *, layout="slots", tokens=6):
    """Caches of eight slots, and outputs."""
    return (
        [case.input(fmt, cache_shape(layout, 2, 4, 2, w)) for w in (8, 6)],
        [case.output(out_fmt, (tokens, 2, w)) for w in (8, 6)],
    )


@pytest.mark.parametrize("step", [1, 2, -1])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_slots_of_any_type_and_stride(device, dtype, step):
    case = GatherCase(device, 13)
    caches, outs = small(case)
    case.gather(*caches, case.slots([7, -1, 3, 0, 4, 2], dtype, step), *outs)
    case.gather(*caches, case.slots([7, -1, 3, 0, 4, 2], dtype, step), dtype="fp32")


@pytest.mark.parametrize("layout", ["slots", *LAYOUTS])
def test_negative_slots_leave_their_rows(device, layout):
    options = {"layout": layout} if layout in LAYOUTS else {}
    for pair in (("bf16", "bf16"), ("fp8_e4m3", "bf16")):
        case = GatherCase(device, 14)
        caches, outs = small(case, *pair, layout=layout)
        slots = [1, -1, 3, -(2**63), -8, -(2**32) + 3]
        case.gather(*caches, slots, *outs, **options)
        case.gather(*caches, slots, dtype=pair[1], **options)
        case.gather(*caches, [-1] * 6, **options)


@pytest.mark.parametrize(
    ("source", "destination"),
    [("bf16", "bf16"), ("fp8_e4m3", "bf16"), ("fp8_e4m3", "fp32"), ("fp16", "int8"),
     ("nvfp4", "fp16"), ("nvfp4", "nvfp4")],
)  # fmt: skip
def test_allocated_rows_of_skipped_slots_are_zeros(device, source, destination):
    check_gather_allocated(device, source, destination)


@pytest.mark.parametrize("layout", ["slots", *LAYOUTS])
@pytest.mark.parametrize("slot", [8, 9, 7777, 2**31 - 1, 2**31, 2**32 + 3, 2**63 - 1])
def test_slot_past_the_end_is_a_fault(device, slot, layout):
    options = {"layout": layout} if layout in LAYOUTS else {}
    case = GatherCase(device, 15)
    caches, outs = small(case, layout=layout)
    case.gather(*caches, [7, -1, slot, 0, 3, slot], *outs, **options)
    case.gather(*caches, [7, -1, slot, 0, 3, slot], **options)
    case.gather(*caches, [7, 1, 2, 0, 3, 7], *outs, **options)


def test_fault_reads_no_scale(device):
    case = GatherCase(device, 17)
    caches, outs = small(case, "int8")
    scales = {
        f"{side}_scale_cache": case.place(np.full((8, 2), 0.5, np.float32), "fp32") for side in "kv"
    }
    case.gather(*caches, [3, 8, -1, 2**40, 7, 0], *outs, **scales)


def test_zero_tokens_and_caches_without_slots(device):
    case = GatherCase(device, 18)
    caches, outs = small(case, tokens=0)
    case.gather(*caches, [], *outs)
    case.gather(*caches, [])
    empty = [case.input("bf16", (0, 2, w)) for w in (8, 6)]
    case.gather(*empty, [-1, 5], *(case.output("bf16", (2, 2, w)) for w in (8, 6)))


# With store_kv, anything ---------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip(device, layout, fmt):
    """Bitwise where the formats agree, within half a step of the format where they do not."""
    rng = np.random.default_rng(19)
    rows = [from_values(rng.standard_normal((9, 2, w)), "bf16") for w in (16, 10)]
    slots = device.asarray(rng.permutation(12)[:9])
    caches = [
        kv.view_as(
            device.zeros(cache_shape(layout, 3, 4, 2, w), f"u{DTYPE[fmt].itemsize}")
            if fmt not in ("fp32", "int8")
            else device.zeros(cache_shape(layout, 3, 4, 2, w), DTYPE[fmt]),
            fmt,
        )
        for w in (16, 10)
    ]
    scales = {}
    if fmt in QUANTISED:
        scales = {f"{side}_scale_cache": device.zeros((12, 2), np.float32) for side in "kv"}
    placed = [kv.view_as(device.asarray(r.view(np.uint16)), "bf16") for r in rows]
    kv.store_kv(*placed, *caches, slots, layout=layout, **scales)
    got = kv.gather_kv(*caches, slots, layout=layout, dtype="bf16", **scales)
    kv.check_faults(device)
    for out, want in zip(got, rows, strict=True):
        values = as_numpy(device, out, "bf16").astype(np.float64)
        want = want.astype(np.float64)
        largest = np.abs(want).max(axis=2, keepdims=True)
        step = {
            "fp32": 0,
            "fp16": 0,
            "bf16": 0,
            "int8": largest / 254,
            "fp8_e4m3": np.abs(want) / 16,
            "fp8_e5m2": np.abs(want) / 8,
        }[fmt]
        tiny = 0 if fmt in ("fp32", "bf16") else largest * 2.0**-8
        exact = fmt in ("fp32", "bf16")
        assert (np.abs(values - want) <= step + (0 if exact else tiny)).all()


@st.composite
def gather_calls(draw):
    sizes = st.integers(1, 5)
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "pair": draw(st.sampled_from(PAIRS)),
        "layout": draw(st.sampled_from(["NHD", "HND", "slots"])),
        "tokens": draw(st.integers(0, 9)),
        "heads": draw(sizes),
        "widths": (draw(st.integers(1, 70)), draw(st.integers(1, 70))),
        "pages": draw(sizes),
        "page_size": draw(sizes),
        "views": (draw(st.integers(0, 3)), draw(st.integers(0, 3))),
        "wider": (draw(st.integers(0, 3)), draw(st.integers(0, 3))),
        "misalign": tuple(draw(st.integers(0, 9)) for _ in range(4)),
        "index": (draw(st.sampled_from(["int32", "int64"])), draw(st.sampled_from([1, 2, -1]))),
        "scales": tuple(
            draw(st.sampled_from(["none", "float", "per head", "dynamic"])) for _ in range(2)
        ),
    }


@settings(max_examples=examples(100), deadline=None, database=None)
@given(call=gather_calls())
def test_any_call(device, call):
    case = GatherCase(device, call["seed"])
    (source, destination), heads = call["pair"], call["heads"]
    num_slots = call["pages"] * call["page_size"]
    caches, outs, options = [], [], {}
    for side, letter in enumerate("kv"):
        width = call["widths"][side]
        base = cache_shape(
            call["layout"], call["pages"], call["page_size"], heads, width + call["wider"][side]
        )
        caches.append(
            case.input(source, base, lambda a, w=width: a[..., :w], misalign=call["misalign"][side])
        )
        shape = (call["tokens"], heads, width)
        base, cut = {
            0: (shape, None),
            1: ((call["tokens"], heads + 3, width), lambda a: a[:, 1 : heads + 1]),
            2: (shape, lambda a: a[::-1, ::-1]),
            3: ((heads, call["tokens"], width + 1), lambda a: a.transpose(1, 0, 2)[..., 1:]),
        }[call["views"][side]]
        outs.append(case.output(destination, base, cut, misalign=call["misalign"][2 + side]))
        scale = call["scales"][side]
        if source not in QUANTISED or scale == "none":
            continue
        values = case.rng.uniform(0.1, 3, (num_slots, heads)).astype(np.float32)
        if scale == "dynamic":
            options[f"{letter}_scale_cache"] = case.place(values, "fp32")
        else:
            options[f"{letter}_scale"] = values[0] if scale == "per head" else 0.7
    slots = case.rng.integers(-2, num_slots + 2, call["tokens"])
    if call["layout"] in LAYOUTS:
        options["layout"] = call["layout"]
    case.gather(*caches, case.slots(slots, *call["index"]), *outs, **options)


# Streams, exporters, errors ------------------------------------------------------------------


def test_read_only_and_repeated_caches_are_fine(device):
    """A cache is an input here."""
    case = GatherCase(device, 25)
    caches, outs = small(case)
    caches[1] = case.input("bf16", (1, 2, 6), lambda a: np.broadcast_to(a, (8, 2, 6)))
    if isinstance(caches[0].array, np.ndarray):
        caches[0].array.flags.writeable = False
    case.gather(*caches, [3, 1, -1, 7, 0, 5], *outs)


def test_comparison_sees_one_changed_bit(device):
    case = GatherCase(device, 27)
    caches, outs = small(case)
    case.gather(*caches, [3, 1, -1, 7, 0, 5], *outs)
    kv.check_faults(device)
    outs[0].buffer.raw[outs[0].buffer.start : outs[0].buffer.start + 1] ^= 1
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        case.check("gather_kv", [])
