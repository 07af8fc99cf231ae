"""Slots of `store_kv`, and those that occur twice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import LAYOUTS, QUANTISED, Case, check_faults, random_elements
from store_calls import small

import kvcupy as kv
from kvcupy import reference


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
    case.store_kv(*small(case, cache_fmt="int8"), [3, 8, -1, 2**40, 7, 0], **case.scale_caches(8))


def test_faults_of_several_calls_are_raised_together(device):
    case = Case(device, 26)
    args = [arg.array for arg in small(case)]
    for slots in ([0, 41], [1, 2], [3, 4, 42]):
        kv.store_kv(*args, device.asarray(np.array(slots, np.int64)))
    check_faults(device, "store_kv", {"slot_mapping": [(1, 41), (2, 42)]})
    kv.check_faults(device)


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
    case.store_kv(
        *small(case, cache_fmt="fp8_e4m3", layout=layout),
        slots,
        skip_slot=skip,
        **case.scale_caches(8),
        **options,
    )


def test_skip_slot_beside_padding_and_faults(device):
    case = Case(device, 58)
    case.store_kv(*small(case), [5, 0, 7, -1, 8, 1], skip_slot=7)
    case.store_kv(*small(case), [5, 0, 7, -1, 3, 1], skip_slot=-1)
    for kind in (np.int32, np.int64):
        case.store_kv(*small(case), [5, 0, 7, -1, 3, 1], skip_slot=kind(7))


def test_zero_tokens(device):
    case = Case(device, 30)
    case.store_kv(*small(case, tokens=0), [])
    case.store_kv(*small(case, tokens=3), [])
    case.store_kv(
        *small(case, tokens=0, cache_fmt="int8"), case.slots([], "int32"), **case.scale_caches(8)
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
        options = case.scale_caches(8)
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
