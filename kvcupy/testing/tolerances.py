"""How far float32 arithmetic and one rounding may be from the float64 references.

Copies, stores and conversions have no tolerance: they are compared bit for bit. These are for
arithmetic, and each bound says what it counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import reference

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

MANTISSA_BITS = {"fp32": 23, "fp16": 10, "bf16": 7, "fp8_e4m3": 3, "fp8_e5m2": 2}
LOWEST_EXPONENT = {"fp32": -126, "fp16": -14, "bf16": -126, "fp8_e4m3": -6, "fp8_e5m2": -14}

ROUNDING = 2.0**-24
"""The relative error of one float32 operation."""
TINY = 2.0**-147
"""What float32 loses where its results are subnormal."""
NORM_ROUNDINGS = 32
"""What a normalised element has been through in float32: sums of up to 256 squares in a warp, a
root and a division, which the GPU may do with two units of error, and two products."""
FEW = 8
"""Roundings of a value outside of sums: products with scales, exponential, division."""
WEIGHT_ROUNDING = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Relative error of what is rounded for a tensor core, half a unit: softmax weights of many new
tokens, and rotated keys."""
VALUE_ROUNDING = {
    fmt: 2.0**-11 if form.code != "e2m1" else 0.0 for fmt, form in reference.FOUR_BIT.items()
}
"""Relative error of values that tensor cores take, half a unit of fp16: a code of int4 times its
scale has 14 bits. Products of the other formats with their scales are exact."""
TRUNCATION = {"fp32": 0.0, "fp16": 0.25, "bf16": 0.25}
"""Units that a score loses per element where tensor cores, which truncate, sum its products."""


def ulp(values: Array, fmt: str) -> Float64:
    """Return the unit in the last place of a floating-point format at each value.

    Examples
    --------
    >>> ulp(np.array([1.0, 3.0, 0.0]), "bf16").tolist()
    [0.0078125, 0.015625, 9.183549615799121e-41]
    """
    usual = np.isfinite(values) & (values != 0)
    exponent = np.where(usual, np.frexp(np.where(usual, values, 1.0))[1] - 1, -2000)
    exponent = np.maximum(exponent, LOWEST_EXPONENT[fmt]) - MANTISSA_BITS[fmt]
    return np.asarray(np.ldexp(1.0, exponent), np.float64)


def rotation_errors(
    exact: Float64,
    rows: Array,
    cosine: Float64,
    sine: Float64,
    fmt: str,
    *,
    norm: Array | None = None,
    interleaved: bool = False,
    eps: float = 1e-6,
) -> Float64:
    """Return how far float32 arithmetic and one rounding may be from rotated rows.

    `x cos - y sin` is two products and a sum, each of them rounded to float32, and then the one
    rounding to the format. So it is half a unit of the format, plus a float32 rounding of each
    product; their sum is at most |(x, y)| times |(cos, sin)|. Without
    cancellation this is less than one unit for fp16 and bf16, and less than two for fp32, where
    the products' own errors are as large as the last rounding.

    Parameters
    ----------
    exact : what `reference.rotate` returns for the other arguments
    rows, cosine, sine, norm, interleaved, eps : as in `reference.rotate`
    fmt : the format that the result is rounded to
    """
    ones, zeros = np.ones_like(cosine), np.zeros_like(cosine)

    def moved(keep: Float64, swap: Float64) -> Float64:
        return reference.rotate(rows, keep, swap, norm=norm, interleaved=interleaved, eps=eps)

    length = np.hypot(cosine, sine)
    spread = np.repeat(length, 2, 1) if interleaved else np.tile(length, 2)
    spread = np.concatenate(
        [spread, np.ones((len(spread), rows.shape[-1] - spread.shape[1]))], axis=1
    )
    radius = np.hypot(moved(ones, zeros), moved(zeros, ones))
    radius = radius * (spread[:, None] if rows.ndim == 3 else spread)
    before = ROUNDING * (radius * (1 if norm is None else 1 + NORM_ROUNDINGS) + np.abs(exact))
    return np.asarray(ulp(exact, fmt) / 2 + before + TINY)


def slot_values(args: Mapping[str, Any], side: str) -> Float64:
    """Return the values of a cache, float64 (num_slots, H, D), NaN where it is poisoned."""
    pages = args[f"{side}_cache"]
    if args.get("layout") == "HND":
        pages = pages.swapaxes(1, 2)
    if isinstance(pages, reference.FourBitRows):
        static = args.get(f"{side}_scale")
        scales = np.asarray(1.0 if static is None else static, np.float32).reshape(-1)
        values = reference.dequantise_rows(pages, np.broadcast_to(scales, pages.shape[2]))
        return values.reshape(-1, *pages.shape[2:]).astype(np.float64)
    stored = reference.decode(pages, reference.format_of(pages)).reshape(-1, *pages.shape[2:])
    scale = args.get(f"{side}_scale_cache")
    if scale is None:
        scale = np.asarray(1.0 if args.get(f"{side}_scale") is None else args[f"{side}_scale"])
    return np.asarray(stored * scale[..., None])


def attention_errors(
    args: Mapping[str, Any],
    out: Float64,
    lse: Float64,
    out_fmt: str | None = None,
    *,
    rounded_weights: bool = False,
) -> tuple[Float64, Float64]:
    """Return how far float32 arithmetic and one rounding may be from `out` and `lse`.

    A score is a sum of D products. Each is at most |q| |k| in all, and float32 loses a unit of that
    with every addition; as errors do not conspire, about the square root of their number. A change
    of a score by x changes each weight by a factor of at most exp(x), and the denominator by
    another. Weights are then summed over n keys, with and without values, which loses about the
    square root of n units. Values are at most the largest in the cache, by head and element. Keys
    that are rotated on their way to tensor cores are rounded: the square root of the width counts.
    What queries lose as fp16, over caches of 8 and 4 bits, is at most 2**-39 of the largest element
    and so within the units of |q| |k|.

    Parameters
    ----------
    args : the arguments of `reference.paged_attention`, by name
    out, lse : what it returns
    out_fmt : the format that `out` is rounded to; None: the query's
    rounded_weights : whether softmax weights are rounded to the query's format, as a tensor core
        takes them. With ``query_lens`` they are.
    """
    fmt = reference.format_of(args["query"])
    query, keys, values = (
        reference.decode(args["query"], fmt), slot_values(args, "k"), slot_values(args, "v")
    )  # fmt: skip
    width, group = query.shape[2], query.shape[1] // keys.shape[1]
    longest = np.fmax.reduce(np.sqrt((keys**2).sum(2)), axis=0, initial=0.0)
    largest = np.fmax.reduce(np.abs(values), axis=0, initial=0.0)
    scaling = args.get("sm_scale") or 1 / np.sqrt(width)
    size = np.sqrt((query**2).sum(2)) * np.repeat(longest, group) * abs(scaling)
    cap = args.get("logits_soft_cap") or 0.0
    units = FEW + 2 * np.sqrt(width) + TRUNCATION[fmt] * width
    of_score = ROUNDING * (size * units + FEW * cap)
    rounded_weights = rounded_weights or args.get("query_lens") is not None
    rounded = WEIGHT_ROUNDING[fmt] if rounded_weights else 0.0
    if fmt != "fp32" and isinstance(args["v_cache"], reference.FourBitRows):
        rounded += VALUE_ROUNDING[args["v_cache"].fmt]
    if args.get("rope_table") is not None:
        share = min(1.0, 4 / np.sqrt(args["rope_table"].shape[1]))
        of_score = of_score + size * WEIGHT_ROUNDING[fmt] * share
    most_keys = max(int(args["seq_lens"].max(initial=1)), 1)
    of_sums = ROUNDING * (2 * FEW + 2 * np.sqrt(most_keys))
    of_weights = (2 * of_score + of_sums + rounded)[..., None] * np.repeat(largest, group, axis=0)
    with np.errstate(invalid="ignore"):
        of_lse = of_score + of_sums + FEW * ROUNDING * np.abs(lse)
    return of_weights * 1.01 + ulp(out, out_fmt or fmt) / 2 + TINY, of_lse


def merge_errors(
    outs: Float64, lses: Float64, out: Float64, lse: Float64, fmt: str
) -> tuple[Float64, Float64]:
    """Return how far float32 arithmetic and one rounding may be from the merged `out` and `lse`.

    A weight is exp of a difference of two lse, whose rounding is a unit of each of them; n states
    are summed one after another.

    Parameters
    ----------
    outs, lses : the exact values of the states, ``(N, T, Hq, Dv)`` and ``(N, T, Hq)``
    out, lse : what `reference.merge_states` returns
    fmt : the format that `out` is rounded to
    """
    visible = np.isfinite(lses)
    units = 2 * FEW + len(outs) + 4 * np.abs(np.where(visible, lses, 0)).max(0)
    largest = np.abs(np.where(visible[..., None], outs, 0)).max(0)
    with np.errstate(invalid="ignore"):
        of_lse = ROUNDING * (units + FEW * np.abs(lse))
    return ROUNDING * units[..., None] * largest + ulp(out, fmt) / 2 + TINY, of_lse
