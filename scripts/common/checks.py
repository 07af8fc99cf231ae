"""Checks of results: copies byte by byte, rotations against float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from kvcupy.reference import rope as reference

BF16 = np.dtype(ml_dtypes.bfloat16)
MAX_POSITIONS = 8192
ROPE_BASE = 500_000.0
CHECKED_TOKENS = 128  # of each call: float64 is slow, and all tokens are treated the same way
# float32 arithmetic and one rounding. Where a pair cancels, what float32 loses is more than an ulp
# of the small result, but little compared with the pair.
FLOAT32_LOSS = 2.0**-21


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


def sample(tokens: int) -> np.ndarray[Any, Any]:
    """Return the tokens to check against float64: up to `CHECKED_TOKENS`, evenly spread."""
    return np.linspace(0, tokens - 1, min(tokens, CHECKED_TOKENS)).round().astype(np.int64)


@dataclass
class Rotation:
    """Rows of one call, rotated in float64, to compare results with."""

    exact: np.ndarray[Any, Any]
    pair: np.ndarray[Any, Any]  # magnitudes of the two elements that each result combines

    @classmethod
    def of(
        cls,
        bits: np.ndarray[Any, Any],
        table: np.ndarray[Any, Any],
        positions: np.ndarray[Any, Any],
        *,
        interleaved: bool = False,
        norm: np.ndarray[Any, Any] | None = None,
    ) -> Rotation:
        """Rotate bf16 rows (T, H, D) by all pairs of a table, after the norm if there is one."""
        rows = bits.view(BF16)
        cosine, sine = reference.cos_sin(table, positions)
        exact = reference.rotate(rows, cosine, sine, interleaved=interleaved, norm=norm)
        identity = np.ones_like(cosine), np.zeros_like(sine)
        size = np.abs(reference.rotate(rows, *identity, interleaved=interleaved, norm=norm))
        if interleaved:
            pair = np.repeat(size[..., 0::2] + size[..., 1::2], 2, axis=-1)
        else:
            half = size.shape[-1] // 2
            pair = np.tile(size[..., :half] + size[..., half:], 2)
        return cls(exact, pair)

    def require(self, case: str, bits: np.ndarray[Any, Any], roundings: int | None = None) -> None:
        """Compare bf16 rows with the exact ones.

        Parameters
        ----------
        roundings : intermediate roundings to bf16, of values no larger than the pair; None: one, at
            the end, so that the result is within an ulp of the exact one

        Raises
        ------
        WrongBytes : a row is further off
        """
        got = np.ascontiguousarray(bits).view(BF16).astype(np.float64)
        if roundings is None:
            exponent = np.frexp(np.maximum(np.abs(self.exact), 2.0**-126))[1] - 1
            allowed = np.exp2(exponent - 7.0) + FLOAT32_LOSS * self.pair
        else:
            allowed = roundings * 2.0**-8 * self.pair
        off = np.abs(got - self.exact)
        wrong = np.argwhere(~(off <= allowed))
        if len(wrong):
            at = tuple(map(int, wrong[0]))
            raise WrongBytes(
                f"{case}: {len(wrong)} of {got.size} elements are too far off, the first at {at}: "
                f"got {got[at]}, want {self.exact[at]} within {allowed[at]:.3g}"
            )
