"""Arguments and calls for caches of the four-bit formats."""

from __future__ import annotations

import numpy as np
from helpers import Arg, Case, from_values, random_elements

import kvcupy as kv
from kvcupy import formats, reference

FOUR_BIT = tuple(formats.FOUR_BIT)
#: One of each kind of group: a thread's own, two threads', by a table, the largest.
KINDS = ("nvfp4", "mxfp4", "int4", "int4_g128")
FLOATS = ("fp32", "fp16", "bf16")
LARGEST_GROUP = 128


def hard_rows(case: Case, fmt: str, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of which some have elements around every boundary of codes, some any bits, some none."""
    rng, count = case.rng, int(np.prod(shape))
    ratios = rng.choice(np.arange(-7.5, 7.75, 0.25), count).reshape(shape)
    nudge = rng.choice([1, 1, 1 + 2.0**-8, 1 - 2.0**-9, 1 + 2.0**-11], shape)
    scale = np.exp2(rng.integers(-12, 8, (*shape[:-1], 1)))
    rows = from_values(np.clip(ratios * nudge * scale, -6e4, 6e4), fmt)
    any_bits = random_elements(rng, fmt, count).reshape(shape)
    kinds = rng.integers(0, 6, (*shape[:-1], 1))
    bits = f"u{rows.dtype.itemsize}"
    mixed = np.where(kinds == 0, any_bits.view(bits), rows.view(bits)).view(rows.dtype)
    mixed[np.broadcast_to(kinds == 1, shape) & (np.arange(shape[-1]) % 96 < 32)] = 0
    return mixed


def place_rows(case: Case, fmt: str, shape: tuple[int, ...], cut=None, **options) -> Arg:
    return case.place(hard_rows(case, fmt, shape), fmt, cut, **options)


def split_cache(
    case: Case, fmt: str, pages: int, page_size: int, heads: int, width: int, *, usual: bool = False
):
    """A cache as vLLM keeps one: a page is its codes, then its scales; device view and mirror.

    Of any bits, or with scales of a `usual` size.

    Returns
    -------
    what `kv.view_as` returned, the reference's rows, and the argument that both are over
    """
    form = formats.FOUR_BIT[fmt]
    rows = page_size * heads
    codes, scales = rows * width // 2, rows * width // form.group * form.scale_bytes
    bits = case.rng.integers(0, 256, (pages, codes + scales), dtype=np.uint8)
    if usual:
        ones = {"fp8_e4m3": [0x38], "e8m0": [127], "fp16": [0, 0x3C]}[form.scale_format]
        bits[:, codes:] = np.resize(ones, scales)
    whole = case.place(bits, "uint8", name="pages")

    own = reference.FOUR_BIT[fmt]
    mirror = reference.FourBitRows(*strided(whole.view, codes, own, page_size, heads, width), fmt)
    array = strided(whole.array, codes, own, page_size, heads, width)
    return kv.view_as(array[0], fmt, scales=array[1]), mirror, whole


def strided(array, codes, own, page_size, heads, width):
    """Codes and scales of pages, without a copy."""
    pages = array.shape[0]
    scales = array[:, codes:].view(own.scale_carrier)
    parts = []
    for part, columns in ((array[:, :codes], width // 2), (scales, width // own.group)):
        size = part.dtype.itemsize
        shape = pages, page_size, heads, columns
        strides = part.strides[0], heads * columns * size, columns * size, size
        parts.append(np.lib.stride_tricks.as_strided(part, shape, strides))
    return parts
