"""`paged_attention` over four-bit caches whose rows were rotated before they were stored."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import ARRANGEMENTS, FLOATS, AttentionCase, Views, as_rotated, rotated
from four_bit_cases import FOUR_BIT, KINDS, split_cache
from helpers import full_only

import kvcupy as kv
from kvcupy import formats, reference

LENS, NEW = [6, 1, 9], [2, 1, 5]
both = pytest.mark.parametrize("new", [None, NEW], ids=["decode", "append"])
SCALES = ("none", "float", "one element", "per head")


@pytest.mark.covering(2)
@both
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("cache_fmt", FOUR_BIT)
@pytest.mark.parametrize("fmt", FLOATS)
def test_formats(device, fmt, cache_fmt, scales, new):
    case = AttentionCase(device, 1)
    kinds = scales, SCALES[SCALES.index(scales) - 1]
    args = case.arguments(LENS, new, fmt=fmt, cache_fmt=cache_fmt, widths=(128, 256), scales=kinds)
    case.attend(rotated(args))


@pytest.mark.covering(1)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "int4", "int4_g64", "int4_g128"])
@pytest.mark.parametrize("query", ["fp32", "bf16"])
@pytest.mark.parametrize("width", [n for n in range(16, 257, 16)])
def test_widths(device, width, query, fmt):
    """Blocks of 16 to 256, on tensor cores and on the plain path; grouped heads, and splits."""
    if width % formats.FOUR_BIT[fmt].group:
        pytest.skip("not whole groups")
    case = AttentionCase(device, 2)
    args = case.arguments([70, 33], [2, 1], fmt=query, cache_fmt=fmt, widths=(width, width),
                          heads=(6, 2), page_size=16, scales=("float", "per head"))  # fmt: skip
    case.attend(rotated(args))
