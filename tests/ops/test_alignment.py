"""Words stay aligned at every head dim, layout, format and rotation.

Processors of this kind read and write 16 bytes anywhere; a GPU ends the context. So what counts
here is that the strict host device is silent while results are right: wide accesses are chosen from
strides and addresses, and each chooser has shapes that are only just wide enough.
"""

from __future__ import annotations

import numpy as np
import pytest
from gather_cases import GatherCase
from helpers import FORMATS, LAYOUTS, QUANTISED, Case, cache_shape, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_cases import FLOATS, RopeCase

WIDTHS = [*range(8, 137, 8), 20, 36, 184, 200, 264]
TOKENS, HEADS, PAGES, PAGE_SIZE = 3, 2, 3, 2

many = settings(max_examples=examples(100), deadline=None, database=None)
widths = st.sampled_from(WIDTHS)
layouts = st.sampled_from([*LAYOUTS, "slots"])
offsets = st.sampled_from([0, 0, 0, 8, 4, 16, 1])  # elements that an array begins after 64 bytes


def caches(case, fmt, layout, sizes, misalign=0):
    return [
        case.output(fmt, cache_shape(layout, PAGES, PAGE_SIZE, HEADS, size), misalign=misalign)
        for size in sizes
    ]


def options_of(layout, **more):
    return ({"layout": layout} if layout in LAYOUTS else {}) | more


@pytest.mark.covering
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("cache_fmt", FORMATS)
@pytest.mark.parametrize("fmt", FLOATS)
def test_rope_store_at_every_width(device, fmt, cache_fmt, interleaved):
    for i, width in enumerate(WIDTHS):
        case = RopeCase(device, i)
        rotary_dim = max(width // 16 * 16 if i % 2 else width // 2 // 16 * 16, 2)
        check_rope_store(case, fmt, cache_fmt, LAYOUTS[i % 2], width, rotary_dim,
                         interleaved=interleaved)  # fmt: skip


@many
@given(
    fmt=st.sampled_from(FLOATS), cache_fmt=st.sampled_from(FORMATS), layout=layouts, width=widths,
    share=st.sampled_from([1, 2, 4]), interleaved=st.booleans(), misalign=offsets,
    scale=st.sampled_from(["none", "static", "dynamic"]),
)  # fmt: skip
def test_rope_store(device, fmt, cache_fmt, layout, width, share, interleaved, misalign, scale):
    case = RopeCase(device, 1)
    more = {"interleaved": interleaved}
    if cache_fmt in QUANTISED and scale == "static":
        more |= {"k_scale": 0.5, "v_scale": 0.25}
    if cache_fmt in QUANTISED and scale == "dynamic":
        more |= {f"{side}_scale_cache": case.output("fp32", (PAGES * PAGE_SIZE, HEADS))
                 for side in "kv"}  # fmt: skip
    rotary_dim = 2 * max(width // share // 2, 1)
    check_rope_store(case, fmt, cache_fmt, layout, width, rotary_dim, misalign, **more)


def check_rope_store(case, fmt, cache_fmt, layout, width, rotary_dim, misalign=0, **more):
    positions = case.rng.integers(0, 16, TOKENS)
    table = case.table(rotary_dim, positions, 16)
    query, key, value = (
        case.rows(fmt, (TOKENS, heads, width), misalign=misalign) for heads in (4, HEADS, HEADS)
    )
    slots = case.rng.permutation(PAGES * PAGE_SIZE)[:TOKENS]
    case.store(
        query, key, value, table, case.positions(positions),
        *caches(case, cache_fmt, layout, (width, width), misalign), case.slots(slots),
        **options_of(layout, **more),
    )  # fmt: skip


@many
@given(
    fmt=st.sampled_from(FORMATS), cache_fmt=st.sampled_from(FORMATS), layout=layouts, width=widths,
    v_width=widths, misalign=offsets, dynamic=st.booleans(),
)  # fmt: skip
def test_store(device, fmt, cache_fmt, layout, width, v_width, misalign, dynamic):
    case = Case(device, 2)
    more = {}
    if cache_fmt in QUANTISED and dynamic:
        more = {f"{side}_scale_cache": case.output("fp32", (PAGES * PAGE_SIZE, HEADS))
                for side in "kv"}  # fmt: skip
    rows = [case.input(fmt, (TOKENS, HEADS, size), misalign=misalign) for size in (width, v_width)]
    slots = case.slots(case.rng.permutation(PAGES * PAGE_SIZE)[:TOKENS])
    targets = caches(case, cache_fmt, layout, (width, v_width), misalign)
    case.store_kv(*rows, *targets, slots, **options_of(layout, **more))


@many
@given(
    cache_fmt=st.sampled_from(FORMATS), out_fmt=st.sampled_from([None, "fp32", "fp16", "bf16"]),
    layout=layouts, width=widths, v_width=widths, misalign=offsets,
)  # fmt: skip
def test_gather(device, cache_fmt, out_fmt, layout, width, v_width, misalign):
    case = GatherCase(device, 3)
    sources = [
        case.input(cache_fmt, cache_shape(layout, PAGES, PAGE_SIZE, HEADS, size),
                   misalign=misalign)
        for size in (width, v_width)
    ]  # fmt: skip
    slots = case.slots(case.rng.integers(0, PAGES * PAGE_SIZE, TOKENS))
    case.gather(*sources, slots, dtype=out_fmt, **options_of(layout))


@many
@given(
    fmt=st.sampled_from(FORMATS), cache_fmt=st.sampled_from(FORMATS),
    latent=widths, rope=st.sampled_from([8, 16, 24, 64]), misalign=offsets,
)  # fmt: skip
def test_store_mla(device, fmt, cache_fmt, latent, rope, misalign):
    case = Case(device, 4)
    cache = case.output(cache_fmt, (PAGES * PAGE_SIZE, latent + rope), misalign=misalign)
    rows = [case.input(fmt, (TOKENS, size), misalign=misalign) for size in (latent, rope)]
    slots = case.slots(np.arange(TOKENS))
    case.store_mla(*rows, cache, slots)
