"""The checks of this suite notice kernels that are broken in one place.

Each mutation changes a copy of ``kernels_src``; then a store is checked as `ops/test_store.py`
checks it, and must fail. Unchanged, the copy passes the same check.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from helpers import Case

HEADS = 2


def caches(case: Case, fmt: str, widths: tuple[int, int], pages: int, page_size: int):
    """Two caches of `pages` pages, each in the middle of a buffer of three times as many.

    Pages have a gap between them. A row that misses its cache lands in the buffer, and is noticed.
    """
    return [
        case.output(fmt, (3 * pages, page_size + 1, HEADS, width),
                    lambda a: a[pages : 2 * pages, :page_size], name=name)
        for name, width in zip(("k_cache", "v_cache"), widths, strict=True)
    ]  # fmt: skip


def slots_of_every_kind(num_slots: int) -> list[int]:
    """All slots, from the last, 5 is to be skipped; negative ones; the first two past the end."""
    return [-1, num_slots, *range(num_slots - 1, -1, -1), -7, num_slots + 1]


def check_copy(device, page_size=4):
    """bf16 rows, V wider than K."""
    case = Case(device, 1)
    tokens = 5 * page_size + 4
    key, value = (case.input("bf16", (tokens, HEADS, width)) for width in (16, 40))
    k_cache, v_cache = caches(case, "bf16", (16, 40), 5, page_size)
    case.store_kv(key, value, k_cache, v_cache, slots_of_every_kind(5 * page_size), skip_slot=5)


def check_copy_of_odd_pages(device):
    check_copy(device, page_size=3)


def values_that_tell(scale: np.float32) -> np.ndarray:
    """Values that another rounding than that of x / scale takes to another int8, and others."""
    ties = (np.arange(-130, 130) + np.float32(0.5)) * scale
    near = np.concatenate([np.nextafter(ties, np.float32(side)) for side in (-1e9, 1e9)])
    x = np.concatenate([ties, near]).astype(np.float32)
    differs = np.rint(x / scale) != np.rint(x * (np.float32(1) / scale))
    assert differs.any(), "the input tells nothing"
    special = np.float32([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, -0.0, -129 * scale])
    return np.concatenate([np.resize(x[differs], 64), special, x])


def check_convert(device, fmt="int8"):
    """fp32 rows with a scale for K and one a head for V."""
    case = Case(device, 2)
    k_scale, v_scale = np.float32(0.37), np.float32([0.013, 1.9])
    key = case.place(np.resize(values_that_tell(k_scale), (24, HEADS, 40)), "fp32")
    value = case.place(np.resize(values_that_tell(v_scale[1]), (24, HEADS, 24)), "fp32")
    k_cache, v_cache = caches(case, fmt, (40, 24), 5, 4)
    case.store_kv(
        key,
        value,
        k_cache,
        v_cache,
        slots_of_every_kind(20),
        skip_slot=5,
        k_scale=float(k_scale),
        v_scale=v_scale,
    )


def check_convert_to_fp8(device):
    check_convert(device, "fp8_e4m3")


def check_dynamic(device):
    """Rows that several warps share, their largest element in any place, in any thread order."""
    device.multiprocessors = 132  # few rows for so many: more threads a row
    for seed in range(1, 13):
        device.thread_order_seed = seed
        case = Case(device, seed)
        rows = case.rng.standard_normal((2, 24, HEADS, 1024)).astype(np.float32)
        places = case.rng.integers(0, 1024, (2, 24, HEADS, 1))
        np.put_along_axis(rows, places, case.rng.uniform(5, 50, places.shape), axis=3)
        rows[:, 2, 0] = 1e-9  # under the smallest absmax
        key, value = case.place(rows[0], "fp32"), case.place(rows[1, :, :, :512], "fp32")
        k_cache, v_cache = caches(case, "int8", (1024, 512), 5, 4)
        scale_caches = {
            f"{side}_scale_cache": case.output("fp32", (60, HEADS), lambda a: a[20:40],
                                               name=f"{side}_scale_cache")
            for side in "kv"
        }  # fmt: skip
        case.store_kv(
            key, value, k_cache, v_cache, slots_of_every_kind(20), skip_slot=5, **scale_caches
        )


CHECKS = (check_copy, check_copy_of_odd_pages, check_convert, check_convert_to_fp8, check_dynamic)


@dataclass
class Mutation:
    """Text of the kernels, what stands there instead, and the check that must notice."""

    old: str
    new: str
    check: object


BARRIER = "    __syncthreads();\n"
REDUCE = "    for (int i = 0; i < warps; ++i) value = fmaxf(value, scratch[first_warp + i]);\n"
FAULT = "if (slot >= p.num_slots) {"
SKIP = "if (slot == p.skip_slot) slot = -1;"
K_ROW, V_ROW = "cache_row(p.k_cache, p.k, row, p)", "cache_row(p.v_cache, p.v, row, p)"
DIVIDE = "__fdiv_rn(x, scale)"
NAN = "x != x ? int8{0} : "
TAIL = "first < k_words || first < v_words"

MUTATIONS = {
    "no barrier before the maxima of warps are read": Mutation(
        BARRIER + REDUCE, REDUCE, check_dynamic),
    "no barrier after the maxima of warps are read": Mutation(
        REDUCE + BARRIER, REDUCE, check_dynamic),
    "the maxima of one warp too few": Mutation(
        "i < warps; ++i", "i + 1 < warps; ++i", check_dynamic),
    "half a warp reduced": Mutation(
        "distance = lanes / 2;", "distance = lanes / 4;", check_dynamic),
    "K by the strides of V": Mutation(
        K_ROW, K_ROW.replace("p.k,", "p.v,"), check_convert),  # narrower, so inside the buffer
    "V by the strides of K": Mutation(
        V_ROW, V_ROW.replace("p.v,", "p.k,"), check_copy),  # likewise
    "the heads of a row forgotten": Mutation(
        " +\n         row.head * side.cache.head_bytes;", ";", check_convert),
    "the end of the wider row forgotten": Mutation(
        TAIL, "first < k_words", check_copy),
    "pages of a power of two only": Mutation(
        "page_shift >= 0 ? slot >> page_shift : slot / page_size",
        "slot >> (page_shift >= 0 ? page_shift : 1)", check_copy_of_odd_pages),
    "multiply by the reciprocal": Mutation(
        DIVIDE, "x * __fdiv_rn(1.0f, scale)", check_convert),
    "round towards zero": Mutation(
        "rintf(", "truncf(", check_convert),
    "int8 of NaN undecided": Mutation(NAN, "", check_convert),
    "no saturation in fp8": Mutation(
        "__NV_SATFINITE, __NV_E4M3", "__NV_NOSAT, __NV_E4M3", check_convert_to_fp8),
    "no smallest scale": Mutation("1e-6f", "0.0f", check_dynamic),
    "negative slots count from the end": Mutation(
        FAULT, f"if (slot < 0) slot += p.num_slots;\n  {FAULT}", check_copy),
    "slots past the end written": Mutation(
        FAULT, "if (slot > 2 * p.num_slots) {", check_copy),
    "the slot just past the end written": Mutation(
        FAULT, "if (slot > p.num_slots) {", check_copy),
    "slots past the end not reported": Mutation(
        " report_fault(p.faults", " if (false) report_fault(p.faults", check_copy),
    "the skipped slot written": Mutation(SKIP, "", check_copy),
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_kernels_as_they_are(kernel_sources, check):
    """The control of the test below."""
    check(kernel_sources.device())


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_kernel_is_noticed(kernel_sources, mutation):
    broken = MUTATIONS[mutation]
    kernel_sources.replace_everywhere(broken.old, broken.new)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        broken.check(kernel_sources.device())
