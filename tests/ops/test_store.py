"""`store_kv` and the helpers around it, by what a user sees of them."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from helpers import (
    DTYPE,
    FORMATS,
    LAYOUTS,
    POISON_SLOT,
    QUANTISED,
    UNSIGNED,
    Case,
    cache_shape,
    examples,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from store_calls import COMBINED, PAIRS, SCALES, shuffled_slots, telling_values

import kvcupy as kv
from kvcupy import reference

# Formats -------------------------------------------------------------------------------------


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
        key, value, k_cache, v_cache, shuffled_slots(case, 96, 100), **case.scale_caches(100, 3)
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


@pytest.mark.parametrize("pair", PAIRS[::3], ids="-".join)
@pytest.mark.parametrize("kind", COMBINED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_combined_caches(device, layout, kind, pair):
    case = Case(device, 14)
    shape, cuts = COMBINED[kind](*cache_shape(layout, 4, 4, 2, 16))
    both = case.output(pair[1], shape)
    key, value = case.input(pair[0], (8, 2, 16)), case.input(pair[0], (8, 2, 16))
    case.store_kv(key, value, *map(both.sub, cuts), shuffled_slots(case, 8, 16), layout=layout)


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


@settings(max_examples=examples(150), deadline=None, database=None)
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


def test_no_tokens_in_a_plain_numpy_array():
    """Whose strides NumPy may give as zeros where it has no elements."""
    empty = np.ndarray((0, 2, 8), np.float16, strides=(0, 0, 0))
    k_cache, v_cache = np.ones((4, 2, 8), np.float16), np.ones((4, 2, 8), np.float16)
    kv.store_kv(empty, empty, k_cache, v_cache, np.zeros(0, np.int64))
    assert (k_cache == 1).all() and (v_cache == 1).all()


def test_neighbours_and_shared_inputs_are_allowed(device):
    """Touching is not overlapping, and inputs may share their bytes."""
    case = Case(device, 40)
    memory = case.output("bf16", (22, 2, 8))
    key = memory.sub(lambda a: a[:6])
    caches = [memory.sub(lambda a, s=start: a[s : s + 8]) for start in (6, 14)]
    case.store_kv(key, key, *caches, [3, 7, 0, -1, 1, 5])
