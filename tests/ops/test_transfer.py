"""`transfer_pages` within one number format: every bit of both pools.

Conversions are in `test_transfer_convert.py`, streams in `test_transfer_streams.py`, large and
guarded pools in `test_transfer_sizes.py`, wrong arguments in `test_transfer_errors.py`.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import FORMATS, QUANTISED, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_cases import METHODS, PLACEMENTS, POOL_LAYOUTS, TransferCase, reaches, two_pools

import kvcupy as kv

SRC, DST = [1, 2, 3, 6, 5, 0], [4, 5, 6, 1, 0, 8]
"""A run, a reversed run, and a single page."""
LAYOUT_PAIRS = list(itertools.product(POOL_LAYOUTS, repeat=2))
SOME_PAIRS = [
    ("layer_first", "layer_first"),
    ("layer_first", "page_first"),
    ("page_first_direct", "layer_first"),
    ("page_head", "page_first_direct"),
]
WIDTHS = {1: (8, 8), 3: (5, 3), 16: (16, 4), 64: (2, 6)}
"""Widths of K and V by page size: rows of 2 to 64 bytes, some of them odd."""

every_pair = pytest.mark.parametrize("layouts", LAYOUT_PAIRS, ids="-".join)
some_pairs = pytest.mark.parametrize("layouts", SOME_PAIRS, ids="-".join)
every_method = pytest.mark.parametrize("method", METHODS)


# Pools ----------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@every_pair
@every_method
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_pair_of_layouts(device, layouts, method, fmt):
    """All bytes of the pages and no others, whatever the bits mean."""
    for page_size, widths in WIDTHS.items():
        case = TransferCase(device, page_size)
        pools = two_pools(case, layouts, pages=(7, 9), fmt=fmt, page_size=page_size, widths=widths)
        case.transfer(*pools, SRC, DST, method=method)


@every_method
@pytest.mark.parametrize(
    "widths", [(1, 1), (1, 2), (16, 1), (7, 64), (33, 31), (128, 96), (576, 512)]
)
def test_widths_of_key_and_value(device, widths, method):
    for layouts in SOME_PAIRS:
        for fmt, heads in (("bf16", 3), ("int8", 1)):
            case = TransferCase(device, widths)
            pools = two_pools(case, layouts, fmt=fmt, heads=heads, widths=widths, layers=2)
            case.transfer(*pools, SRC, DST, method=method)


@every_pair
@every_method
def test_latents(device, layouts, method):
    """An MLA pool has one part; rows are as wide as in models, and down to a single byte."""
    for fmt, latent in (("bf16", 576), ("int8", 656), ("fp8_e4m3", 1), ("int8", 3), ("fp32", 5)):
        case = TransferCase(device, latent)
        case.transfer(
            *two_pools(case, layouts, fmt=fmt, latent=latent, layers=2), SRC, DST, method=method
        )


@every_method
@pytest.mark.parametrize("layers", [1, 40])
def test_numbers_of_layers(device, layers, method):
    for layouts in LAYOUT_PAIRS:
        case = TransferCase(device, layers)
        pools = two_pools(case, layouts, layers=layers, page_size=3)
        case.transfer(*pools, SRC, DST, method=method)


@every_method
@pytest.mark.parametrize("heads", [1, 5])
def test_numbers_of_heads(device, heads, method):
    for layouts in LAYOUT_PAIRS:
        case = TransferCase(device, heads)
        case.transfer(*two_pools(case, layouts, heads=heads), SRC, DST, method=method)


@every_method
@pytest.mark.parametrize("placements", list(itertools.product(PLACEMENTS, repeat=2)), ids="-".join)
def test_placements(device, placements, method):
    for layouts in SOME_PAIRS:
        case = TransferCase(device, 3)
        src, dst = (
            case.pool(layout, placement=placement, fmt="fp16")
            for layout, placement in zip(layouts, placements, strict=True)
        )
        if not reaches(device, method, placements):
            case.refuse(src, dst, SRC, DST, method=method)
            continue
        case.transfer(src, dst, SRC, DST, method=method)
        case.transfer(dst, src, [7, 3], [8, 7], method=method, layers=[2, 0])


@pytest.mark.covering(2)
@every_pair
@every_method
@pytest.mark.parametrize("fmt", QUANTISED)
def test_scales_go_along(device, layouts, method, fmt):
    """Bit for bit, and scales of other pages and layers stay."""
    case = TransferCase(device, 4)
    pools = two_pools(case, layouts, fmt=fmt, pages=(7, 9), heads=3, scales=True)
    case.transfer(*pools, SRC, DST, method=method)
    case.transfer(*pools, [6, 1], [2, 3], method=method, layers=[1])


@every_method
def test_scales_of_latents(device, method):
    for layouts in LAYOUT_PAIRS:
        case = TransferCase(device, 5)
        pools = two_pools(case, layouts, fmt="int8", latent=33, scales=True)
        case.transfer(*pools, SRC, DST, method=method, layers=[0, 2])


@every_method
@pytest.mark.parametrize("layout", POOL_LAYOUTS)
def test_within_one_pool(device, layout, method):
    """The pages that are read are not those that are written."""
    case = TransferCase(device, 6)
    pool = case.pool(layout, fmt="int8", scales=True)
    case.transfer(pool, pool, [0, 1, 7], [2, 3, 6], method=method)
    case.transfer(pool, pool, [8], [0], method=method, layers=2)


# Page lists -----------------------------------------------------------------------------------

LISTS = {
    "one run": (range(1, 7), range(3, 9)),
    "reversed": ([6, 5, 4, 3, 2, 1], range(3, 9)),
    "both reversed": ([6, 5, 4, 3, 2, 1], [8, 7, 6, 5, 4, 3]),
    "scattered": ([6, 0, 3, 1], [2, 8, 0, 5]),
    "every other page": ([0, 2, 4, 6], [1, 3, 5, 7]),
    "runs of source alone": ([0, 1, 2, 3], [8, 1, 6, 3]),
    "runs of target alone": ([5, 1, 6, 0], [4, 5, 6, 7]),
    "one page to many": ([3, 3, 3, 3], [1, 2, 3, 4]),
    "all": (range(7), [8, 7, 6, 5, 4, 3, 2]),
    "the first": ([0], [0]),
    "the last": ([6], [8]),
    "none": ([], []),
}


@every_method
@pytest.mark.parametrize("name", LISTS)
def test_page_lists(device, name, method):
    src_pages, dst_pages = map(list, LISTS[name])
    for layouts in SOME_PAIRS:
        case = TransferCase(device, len(name))
        pools = two_pools(case, layouts, pages=(7, 9))
        case.transfer(*pools, src_pages, dst_pages, method=method)


@pytest.mark.covering(2)
@every_method
@pytest.mark.parametrize(("src_step", "dst_step"), [(1, 1), (2, -1), (-1, 3), (-2, 2)])
@pytest.mark.parametrize(
    ("src_type", "dst_type"), list(itertools.product(["int32", "int64"], repeat=2))
)
def test_index_arrays(device, method, src_type, dst_type, src_step, dst_step):
    """On the device, strided, of either type; between their elements lies poison."""
    case = TransferCase(device, 7)
    pools = two_pools(case)
    src_pages = case.indices(SRC, src_type, src_step)
    case.transfer(*pools, src_pages, case.indices(DST, dst_type, dst_step), method=method)


@every_method
def test_index_arrays_of_the_host_and_lists(device, method):
    """As `alloc` returns them; both kinds in one call too."""
    case = TransferCase(device, 8)
    pools = two_pools(case, ("page_first", "layer_first"))
    given = [lambda p: p, np.array, lambda p: np.array(p, np.int32), lambda p: np.repeat(p, 2)[::2]]
    for of, to in itertools.product(given, repeat=2):
        case.transfer(*pools, of(SRC), to(DST), method=method)
    case.transfer(*pools, [np.int64(3), np.int32(4)], [2, np.int64(7)], method=method)
    src_pages, dst_pages = case.indices(SRC[::-1]), case.indices(DST)
    case.transfer(*pools, src_pages, np.array(DST), method=method)
    case.transfer(*pools, SRC, dst_pages, method=method)


@every_method
def test_index_arrays_of_torch_and_read_only_ones(device, method):
    torch = pytest.importorskip("torch")
    case = TransferCase(device, 18)
    pools = two_pools(case)
    fixed = np.array(DST)
    fixed.flags.writeable = False
    case.transfer(*pools, torch.tensor(SRC), fixed, method=method)
    case.transfer(*pools, fixed[::-2], torch.tensor(SRC, dtype=torch.int32)[:3], method=method)


@pytest.mark.covering(2)
@pytest.mark.parametrize("listed", [False, True], ids=["array", "list"])
@every_method
@pytest.mark.parametrize("negative", [-1, -7, -9, -(2**31), -(2**32) + 3, -(2**63)])
def test_negative_pages_are_skipped(device, negative, method, listed):
    """In either list, in both, and paired with a page past the end, which then is no fault."""
    case = TransferCase(device, 9)
    pools = two_pools(case, pages=(7, 9))
    pages = [2, negative, 0, negative, 9, 5], [5, 1, negative, negative, negative, 6]
    case.transfer(*pools, *(pages if listed else map(case.indices, pages)), method=method)
    case.transfer(*pools, [negative], [1], method=method)


@pytest.mark.covering(2)
@pytest.mark.parametrize("listed", [False, True], ids=["array", "list"])
@every_method
@pytest.mark.parametrize("page", [9, 10, 7777, 2**31 - 1, 2**31, 2**32 + 3, 2**63 - 1])
def test_page_past_the_end_is_a_fault(device, page, method, listed):
    """Reported for its own list, once for all layers; the other pages are transferred."""
    case = TransferCase(device, 10)
    pools = two_pools(case, pages=(7, 9))
    for pages in (
        ([2, page, 0], [5, 1, 3]),
        ([2, 5, 0], [5, page, 3]),
        ([2, page, 0, 1, 3], [page, page, 3, 4, page]),
        ([page], [page]),
        (SRC, DST),
    ):
        case.transfer(*pools, *(pages if listed else map(case.indices, pages)), method=method)


@every_method
def test_each_pool_has_its_own_end(device, method):
    """Page 7 exists in the larger pool only, whichever side that is on."""
    case = TransferCase(device, 11)
    small, large = two_pools(case, pages=(7, 9))
    case.transfer(small, large, [6, 7, 0], [7, 8, 1], method=method)
    case.transfer(large, small, [8, 6, 7], [1, 7, 2], method=method)


@every_method
def test_as_many_pages_as_there_are(device, method):
    case = TransferCase(device, 12)
    pools = two_pools(case, pages=(700, 600), page_size=1, layers=2, widths=(4, 2))
    src_pages, dst_pages = case.rng.permutation(700)[:600], case.rng.permutation(600)
    case.transfer(*pools, src_pages, dst_pages, method=method)
    case.transfer(*pools, list(range(50, 650)), list(range(600)), method=method)


# Options --------------------------------------------------------------------------------------

LAYERS = [
    0, 2, 4, np.int64(3), [1], (4, 0), [3, 1, 2], [4, 3, 2, 1, 0], range(0, 5, 2), range(1, 4),
    [0, 1, 3], [np.int64(2), 4], None,
]  # fmt: skip


@pytest.mark.covering(2)
@pytest.mark.parametrize("layers", LAYERS, ids=str)
@every_method
@some_pairs
def test_layers(device, layers, method, layouts):
    """One, or several in any order, evenly spaced or not; the others stay unchanged."""
    case = TransferCase(device, 13)
    case.transfer(
        *two_pools(case, layouts, layers=5, page_size=2), SRC, DST, method=method, layers=layers
    )


@every_method
def test_no_layers(device, method):
    """An empty selection is valid."""
    case = TransferCase(device, 14)
    pools = two_pools(case)
    case.transfer(*pools, SRC, DST, method=method, layers=[])


@pytest.mark.covering(2)
@some_pairs
@pytest.mark.parametrize("max_blocks", [None, 1, 2, 7, np.int64(3), 10**6])
@every_method
def test_max_blocks(device, max_blocks, method, layouts):
    """However few blocks share the work, all of it is done."""
    case = TransferCase(device, 15)
    pools = two_pools(case, layouts, pages=(70, 66), layers=4, page_size=5)
    src_pages, dst_pages = (case.rng.permutation(n)[:60] for n in (70, 66))
    case.transfer(*pools, src_pages, dst_pages, method=method, max_blocks=max_blocks)
    narrow = two_pools(case, layouts, fmt="int8", latent=3, page_size=3)
    case.transfer(*narrow, SRC, DST, method=method, max_blocks=max_blocks, layers=[0, 2])


@every_method
def test_convert_of_one_format_copies_bits(device, method):
    """With convert=True and nothing to convert."""
    case = TransferCase(device, 16)
    for options in ({"fmt": "bf16"}, {"fmt": "fp8_e5m2"}, {"fmt": "int8", "scales": True}):
        case.transfer(*two_pools(case, **options), SRC, DST, method=method, convert=True)


def test_method_is_chosen_unless_given(device):
    case = TransferCase(device, 17)
    case.transfer(*two_pools(case), SRC, DST)


# Anything -------------------------------------------------------------------------------------


@st.composite
def transfers(draw):
    latent = draw(st.one_of(st.none(), st.integers(1, 70)))
    fmt = draw(st.sampled_from(FORMATS))
    layers = draw(st.integers(1, 6))
    chosen = draw(st.permutations(range(layers)))[: draw(st.integers(1, layers))]
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "layouts": draw(st.tuples(*[st.sampled_from(list(POOL_LAYOUTS))] * 2)),
        "placements": draw(st.tuples(*[st.sampled_from(PLACEMENTS)] * 2)),
        "pages": draw(st.tuples(st.integers(1, 12), st.integers(1, 12))),
        "geometry": {
            "fmt": fmt, "layers": layers, "latent": latent,
            "page_size": draw(st.integers(1, 20)),
            "heads": 1 if latent else draw(st.integers(1, 4)),
            "widths": draw(st.tuples(st.integers(1, 40), st.integers(1, 40))),
            "scales": fmt in QUANTISED and draw(st.booleans()),
        },
        "index": draw(st.tuples(*[st.sampled_from(["list", "int32", "int64"])] * 2)),
        "steps": draw(st.tuples(*[st.sampled_from([1, 2, -1])] * 2)),
        "options": {
            "method": draw(st.sampled_from(METHODS)),
            "layers": draw(st.sampled_from([None, chosen, chosen[0]])),
            "max_blocks": draw(st.sampled_from([None, 1, 5])),
        },
    }  # fmt: skip


@settings(max_examples=examples(150), deadline=None, database=None)
@given(call=transfers())
def test_any_transfer(device, call):
    """Targets are distinct; some pages are negative, some past the end."""
    case = TransferCase(device, call["seed"])
    src, dst = (
        case.pool(layout, placement=placement, pages=pages, **call["geometry"])
        for layout, placement, pages in zip(
            call["layouts"], call["placements"], call["pages"], strict=True
        )
    )
    count = int(case.rng.integers(0, dst.pool.num_pages + 1))
    pages = [
        case.rng.integers(0, src.pool.num_pages, count),
        case.rng.permutation(dst.pool.num_pages)[:count],
    ]
    for side, pool in zip(pages, (src, dst), strict=True):
        side[case.rng.random(count) < 0.1] = -3
        side[case.rng.random(count) < 0.1] = pool.pool.num_pages + 1
    method = call["options"]["method"]
    if not reaches(device, method, call["placements"]):
        method = "auto"
    given_pages = [
        side.tolist() if kind == "list" else case.indices(side, kind, step)
        for side, kind, step in zip(pages, call["index"], call["steps"], strict=True)
    ]
    case.transfer(src, dst, *given_pages, **{**call["options"], "method": method})


# The checks themselves ------------------------------------------------------------------------


def one_page_on(src, dst, src_pages, dst_pages, **options):
    kv.transfer_pages(src, dst, src_pages, [*dst_pages[:-1], dst_pages[-1] + 1], **options)


def all_layers(src, dst, src_pages, dst_pages, *, layers, **options):
    kv.transfer_pages(src, dst, src_pages, dst_pages, **options)


def without_the_last(src, dst, src_pages, dst_pages, **options):
    kv.transfer_pages(src, dst, src_pages[:-1], dst_pages[:-1], **options)


def backwards(src, dst, src_pages, dst_pages, **options):
    kv.transfer_pages(dst, src, dst_pages, src_pages, **options)


def twice(src, dst, src_pages, dst_pages, **options):
    kv.transfer_pages(src, dst, src_pages, dst_pages, **options)
    kv.transfer_pages(dst, dst, dst_pages[:1], [0], **options)


@pytest.mark.parametrize("wrong", [one_page_on, all_layers, without_the_last, backwards, twice])
def test_what_is_wrong_is_noticed(device, monkeypatch, wrong):
    case = TransferCase(device, 21)
    pools = two_pools(case)
    monkeypatch.setattr(
        case,
        "issue",
        lambda src, dst, *pages, **options: wrong(src.pool, dst.pool, *pages, **options),
    )
    with pytest.raises(pytest.fail.Exception, match="elements differ"):
        case.transfer(*pools, [1, 2, 6], [3, 5, 7], layers=[0, 2])
