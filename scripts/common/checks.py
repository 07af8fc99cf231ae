"""Checks of results, byte by byte."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)


class WrongBytes(Exception):
    """A measured case did not compute what NumPy computes."""


def require_equal(case: str, got: Any, want: Any) -> None:
    """Compare two arrays byte by byte.

    Raises
    ------
    WrongBytes : they differ; the message names the first byte, both values and the number of bytes.
    """
    if got.shape != want.shape:
        raise WrongBytes(f"{case}: expected shape {want.shape}, got {got.shape}")
    got_bytes = np.ascontiguousarray(got).reshape(-1).view(np.uint8)
    want_bytes = np.ascontiguousarray(want).reshape(-1).view(np.uint8)
    wrong = np.flatnonzero(got_bytes != want_bytes)
    if wrong.size:
        at = int(wrong[0])
        index = np.unravel_index(at // want.itemsize, want.shape)
        raise WrongBytes(
            f"{case}: {wrong.size} of {want_bytes.size} bytes differ, the first at byte {at} "
            f"(element {tuple(map(int, index))}): got {got_bytes[at]}, want {want_bytes[at]}"
        )


def normal_bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the bits of normally distributed bf16, from a bank that repeats: cheap at any size."""
    bank = _bank()
    return np.resize(np.roll(bank, int(rng.integers(bank.size))), shape)


@cache
def _bank() -> np.ndarray[Any, Any]:
    values = np.random.default_rng(0).standard_normal(1 << 18, np.float32)
    return values.astype(BF16).view(np.uint16)
