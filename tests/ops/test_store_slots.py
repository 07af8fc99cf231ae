"""Slots of `store_kv`, and those that occur twice."""

from __future__ import annotations

import itertools

import numpy as np
from helpers import Case, check_faults
from store_calls import small

import kvcupy as kv
from kvcupy import reference


def test_faults_of_several_calls_are_raised_together(device):
    case = Case(device, 26)
    args = [arg.array for arg in small(case)]
    for slots in ([0, 41], [1, 2], [3, 4, 42]):
        kv.store_kv(*args, device.asarray(np.array(slots, np.int64)))
    check_faults(device, "store_kv", {"slot_mapping": [(1, 41), (2, 42)]})
    kv.check_faults(device)


def test_cache_without_slots(device):
    case = Case(device, 28)
    key, value = case.input("bf16", (2, 2, 8)), case.input("bf16", (2, 2, 8))
    caches = [case.output("bf16", (0, 2, 8)) for _ in range(2)]
    case.store_kv(key, value, *caches, [-1, 5])


def test_skip_slot_beside_padding_and_faults(device):
    case = Case(device, 58)
    case.store_kv(*small(case), [5, 0, 7, -1, 8, 1], skip_slot=7)
    case.store_kv(*small(case), [5, 0, 7, -1, 3, 1], skip_slot=-1)
    for kind in (np.int32, np.int64):
        case.store_kv(*small(case), [5, 0, 7, -1, 3, 1], skip_slot=kind(7))


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
