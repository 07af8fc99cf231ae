"""Arguments and calls for caches of the four-bit formats."""

from __future__ import annotations

import numpy as np
from helpers import Arg, Case, from_values, random_elements

import kvcupy as kv
from kvcupy import formats, reference

FOUR_BIT = tuple(formats.FOUR_BIT)
FLOATS = ("fp32", "fp16", "bf16")


def hard_rows(case: Case, fmt: str, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of which some have elements around every boundary of codes, some any bits, some none.

    The largest element of every other 16 is the largest code times a scale that e4m3 and fp16 have,
    so that halfway values are met exactly where the scale of the tensor is 1.
    """
    rng, count = case.rng, int(np.prod(shape))
    limit = rng.choice([6, 7], (*shape[:-1], 1))
    ratios = rng.choice(np.arange(-6, 6.25, 0.25), count).reshape(shape)
    largest = np.arange(shape[-1]) % 16 == 3
    chosen = np.repeat(rng.random((*shape[:-1], shape[-1] // 16 + 1)) < 0.5, 16, axis=-1)
    largest = largest & chosen[..., : shape[-1]]
    ratios = np.where(largest, limit, np.where(ratios == limit, 1, ratios))
    nudge = rng.choice([1, 1, 1, 1 - 2.0**-8, 1 - 2.0**-20], shape)
    scale = rng.integers(8, 16, (*shape[:-1], 1)) * np.exp2(
        rng.choice([-30, -16, -9, -8, -6, -5, -4, -3, 0, 3], (*shape[:-1], 1))
    )
    rows = from_values(ratios * np.where(ratios == limit, 1, nudge) * scale, fmt)
    any_bits = random_elements(rng, fmt, count).reshape(shape)
    kinds = rng.integers(0, 6, (*shape[:-1], 1))
    bits = f"u{rows.dtype.itemsize}"
    mixed = np.where(kinds == 0, any_bits.view(bits), rows.view(bits)).view(rows.dtype)
    zeros = np.broadcast_to(kinds == 1, shape) & (np.arange(shape[-1]) % 96 < 32)
    mixed[zeros] = from_values(rng.choice([0.0, -0.0], int(zeros.sum())), fmt)
    return mixed


def place_rows(case: Case, fmt: str, shape: tuple[int, ...], cut=None, **options) -> Arg:
    return case.place(hard_rows(case, fmt, shape), fmt, cut, **options)


def check_gather(case, caches, slots, shapes, fmt, *, misalign=0, **options):
    """Gather into new outputs of a format, and compare them, NaN for NaN."""
    outs = [case.output(fmt, shape, misalign=misalign, name=f"out {shape[-1]}") for shape in shapes]
    for out in outs:
        out.buffer.exact = False
    case.call("gather_kv", *caches, slots, k_out=outs[0], v_out=outs[1], **options)


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
