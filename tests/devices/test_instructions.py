"""The branches that GPUs run, for each architecture beside plain arithmetic, bit for bit; and the
plain versions of instructions beside NumPy and ml_dtypes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import helpers
import ml_dtypes
import numpy as np
import pytest
from test_host_numbers import pointer

from kvcupy.devices import cxx

SOURCE = Path(__file__).with_name("instructions.cpp")
ARCHS = (750, 800, 890, 900, 1000)
# Which take a number, or two of 16 bits, and run for all of them with --full.
EXHAUSTIVE = ("encode_one", "encode_fours", "decode_fours", "half_pairs", "pairs", "floats",
              "absmax", "spread", "widen", "power", "reciprocal")  # fmt: skip


def build(arch: int) -> ctypes.CDLL:
    flags = (f"-DKVCUPY_ARCH={arch}",)
    library = ctypes.CDLL(str(cxx._build(SOURCE.name, SOURCE.read_text(), flags)))
    library.name_of_check.restype = ctypes.c_char_p
    library.count_wrong.restype = ctypes.c_ulonglong
    return library


@pytest.fixture(scope="module", params=ARCHS, ids=lambda arch: f"sm_{arch // 10}")
def branches(request):
    return build(request.param)


@pytest.fixture(scope="module")
def instructions():
    """The plain versions of instructions: the same for every architecture."""
    return build(890)


def wrong(library: ctypes.CDLL, count: int, only: str = "") -> list[str]:
    """Return what is wrong, by check, of which `only` may name one."""
    found, number = [], 0
    while name := library.name_of_check(number):
        first = (ctypes.c_uint32 * 3)()
        words = 2**32 if helpers.full and name.decode().startswith(EXHAUSTIVE) else count
        if only in name.decode():
            total = library.count_wrong(number, ctypes.c_ulonglong(words), first)
            if total:
                word, got, expected = (f"{x:#010x}" for x in first)
                found.append(f"{name.decode()}({word}): {got}, expected {expected} ({total} wrong)")
        number += 1
    assert number > 30
    return found


def test_branches_give_what_plain_arithmetic_gives(branches):
    assert wrong(branches, 1 << 18) == []


# What is broken, for which architecture, and the check that notices.
MUTATIONS = {
    "a NaN of e4m3 widened to a number": (
        "mma.cuh", "(magnitude + 0x00800080u) & 0x40004000u", "0", 750, "half_pairs_fp8_e4m3"),
    "signs of NaN kept by fp8": (
        "fp8.cuh", "signs[i] == signs[i] ? __float_as_uint(signs[i]) : 0",
        "__float_as_uint(signs[i])", 750, "encode_quotients_fp8_e4m3"),
    "maxima that pass over a NaN": (
        "four_bit.cuh", "larger_or_nan<T>(top, magnitudes_of_pair<T>(pairs[i]))",
        "larger_of_pairs<T>(top, magnitudes_of_pair<T>(pairs[i]))", 800, "without_nan"),
    "codes above 1024 by a sixteenth too much": (
        "attention_decode_four_bit.cuh", "0xd480d480", "0xd490d490", 750, "spread_int4"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_branch_is_noticed(kernel_sources, name):
    file, old, new, arch, check = MUTATIONS[name]
    kernel_sources.replace(file, old, new)
    assert any(check in line for line in wrong(build(arch), 1 << 12, check))


# --- Plain versions of instructions --------------------------------------------------------------

OPERATIONS = (
    "multiply",
    "add",
    "subtract",
    "multiply_add",
    "exceed",
    "larger",
    "larger_or_nan",
    "larger_bf16",
    "larger_or_nan_bf16",
)
# Zeros, the smallest and largest subnormal and normal numbers, ones, infinities, NaN, and others.
HARD = [0x0000, 0x0001, 0x0002, 0x03FF, 0x0400, 0x0401, 0x3BFF, 0x3C00, 0x3C01, 0x3555, 0x4248,
        0x6400, 0x6408, 0x7000, 0x7BFE, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF, 0x7F80, 0x7F81,
        0x7FC0, 0x0080, 0x007F, 0x3F80]  # fmt: skip


def operands() -> list[np.ndarray]:
    """Pairs of hard numbers with each other, in both halves of words, and any others."""
    codes = np.array([*HARD, *(code | 0x8000 for code in HARD)], np.uint32)
    x, y, z = (grid.ravel() for grid in np.meshgrid(codes, codes, codes))
    lower = [x, y, z]
    upper = [np.roll(codes, 7 * i + 1) for i, codes in enumerate(lower)]
    rng = np.random.default_rng(6)
    others = rng.integers(0, 2**32, (3, 1 << 17), np.uint32)
    near = others[:, : 1 << 16] & 0x83FF83FF | 0x38003800  # sums that cancel, and ties
    return [
        np.concatenate([a | b << 16, c, d])
        for a, b, c, d in zip(lower, upper, others, near, strict=True)
    ]


def operate(library: ctypes.CDLL, name: str, words: list[np.ndarray]) -> np.ndarray:
    words = [np.ascontiguousarray(w) for w in words]
    out = np.empty(words[0].size, np.uint32)
    library.operate(
        OPERATIONS.index(name), *map(pointer, words), pointer(out), ctypes.c_long(out.size)
    )
    return out.view(np.uint16)


def with_one_nan(numbers: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(numbers.astype(np.float32)), 0x7FFF, numbers.view(np.uint16))


@pytest.mark.parametrize("name", ["multiply", "add", "subtract"])
def test_arithmetic_of_pairs_is_that_of_numpy(instructions, name):
    words = operands()
    x, y = (w.view(np.float16) for w in words[:2])
    with np.errstate(all="ignore"):
        want = getattr(np, name)(x, y)
    np.testing.assert_array_equal(operate(instructions, name, words), with_one_nan(want))


def test_a_product_and_a_sum_of_pairs_are_rounded_once(instructions):
    ties = np.array([[0x52DA, 0x6950, 0x3E80, 0x58BA], [0x426C, 0x1A06, 0x6C04, 0x3BD4],
                     [0x7AE2, 0x75D3, 0x0489, 0x716E]], np.uint32)  # fmt: skip
    words = [np.concatenate(both) for both in zip(operands(), ties, strict=True)]
    x, y, z = (w.view(np.float16).astype(np.float64) for w in words)
    with np.errstate(all="ignore"):
        want = (x * y + z).astype(np.float16)
        twice = (x * y + z).astype(np.float32).astype(np.float16)
    assert (want != twice)[-2 * ties.shape[1] :: 2].all()
    np.testing.assert_array_equal(operate(instructions, "multiply_add", words), with_one_nan(want))


@pytest.mark.parametrize("kind", ["", "_bf16"])
def test_comparisons_of_pairs_are_those_of_numpy(instructions, kind):
    words, dtype = operands(), ml_dtypes.bfloat16 if kind else np.float16
    with np.errstate(invalid="ignore"):  # signalling NaN
        x, y = (w.view(np.uint16).view(dtype).astype(np.float32) for w in words[:2])
    x_codes, y_codes = (w.view(np.uint16) for w in words[:2])
    x_first = (x > y) | ((x == y) & (x_codes <= y_codes))  # a positive zero is the larger one
    nan = np.isnan(x) | np.isnan(y)
    larger = np.where(x_first, x_codes, y_codes)
    number = np.where(np.isnan(x), np.where(np.isnan(y), 0x7FFF, y_codes), x_codes)
    for name, want in [
        (f"larger{kind}", np.where(nan, number, larger)),
        (f"larger_or_nan{kind}", np.where(nan, 0x7FFF, larger)),
    ]:
        np.testing.assert_array_equal(operate(instructions, name, words), want, name)
    if not kind:
        want = np.where(x > y, 0xFFFF, 0)
        np.testing.assert_array_equal(operate(instructions, "exceed", words), want)
