"""`store_kv` and the helpers around it, by what a user sees of them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import FORMATS, QUANTISED, Case
from store_calls import shuffled_slots, telling_values

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


# The checks themselves -----------------------------------------------------------------------


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
