"""Arguments for `store_kv` and `store_mla`."""

from __future__ import annotations

import numpy as np
from helpers import Case, all_patterns, cache_shape, random_elements, rounding_boundaries

from kvcupy import reference

#: A copy of each element size, and conversions of each kind, where all 36 pairs would be too many.
PAIRS = (
    ("bf16", "bf16"),
    ("fp8_e5m2", "fp8_e5m2"),
    ("fp32", "fp32"),
    ("bf16", "fp8_e4m3"),
    ("fp32", "int8"),
    ("fp8_e4m3", "fp16"),
)

SCALES = {
    "none": None,
    "float": 0.7,
    "one element": np.float32([1.3]),
    "per head": np.float32([0.2, 5.0, 1e-3]),
    "dynamic": "dynamic",
}
TWO_HEAD_SCALES = {
    **{name: SCALES[name] for name in ("none", "float", "one element")},
    "per head": np.float32([0.2, 5.0]),
}


def shuffled_slots(case: Case, tokens: int, num_slots: int) -> np.ndarray:
    """Distinct slots, the first and the last among them, and about one in four negative."""
    slots = case.rng.permutation(num_slots)[:tokens]
    slots[case.rng.random(len(slots)) < 0.25] = -1
    if tokens >= 4:
        slots = slots[~np.isin(slots, (0, num_slots - 1))]
        slots = np.concatenate([[num_slots - 1], slots, [0]])[-tokens:]
    return slots


def telling_values(source: str, destination: str) -> np.ndarray:
    """All patterns of a source of 8 or 16 bits; from fp32, all rounding boundaries and noise."""
    if source != "fp32":
        return all_patterns(source)
    noise = random_elements(np.random.default_rng(1), "fp32", 4096)
    if destination == "fp32":
        return noise
    return np.concatenate([rounding_boundaries(destination), noise])


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


def small(case, *, tokens=6, fmt="bf16", cache_fmt="bf16", num_slots=8, layout="slots"):
    """K, V and their caches, of different widths."""
    return (
        case.input(fmt, (tokens, 2, 8), name="key"),
        case.input(fmt, (tokens, 2, 6), name="value"),
        case.output(cache_fmt, cache_shape(layout, num_slots // 4, 4, 2, 8), name="k_cache"),
        case.output(cache_fmt, cache_shape(layout, num_slots // 4, 4, 2, 6), name="v_cache"),
    )


# Rows for the scale of a row ------------------------------------------------------------------

NANS = (0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF)
"""Signalling ones, too, which C's fmaxf lets win."""


def special_rows(big: float) -> list[list[float]]:
    """Rows of nothing, of no number, of infinities, and around the smallest absmax."""
    inf, nan = np.inf, np.nan
    return [
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


def rows_with_nans(bits: int) -> np.ndarray:
    """Rows whose largest element is the first, followed by NaN of these bits."""
    rows = np.full((4, 256), 0.5, np.float32)
    rows[:, 0] = 7
    rows.view(np.uint32)[1, 1:] = bits
    rows.view(np.uint32)[2, 128::2] = bits
    rows.view(np.uint32)[3, 64] = bits
    return rows
