"""`transfer_pages`: every bit of both pools, for pools, page lists and options of every kind.

Which values come of conversions is in `test_transfer_convert.py`, streams and graphs are in
`test_transfer_streams.py`, large and guarded pools in `test_transfer_sizes.py`, memory that kernels
do not reach in `test_transfer_reach.py`, wrong arguments in `test_transfer_errors.py`.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import FORMATS, QUANTISED, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_cases import (
    FOUR_BIT,
    KINDS,
    METHODS,
    PLACEMENTS,
    POOL_LAYOUTS,
    TransferCase,
    ones,
    pools,
    reaches,
)

SRC, DST = [1, 2, 3, 6, 5, 0], [4, 5, 6, 1, 0, 8]
"""A run, a reversed run, and a single page."""
LAYOUT_PAIRS = list(itertools.product(POOL_LAYOUTS, repeat=2))
SOME_PAIRS = [
    ("layer_first", "layer_first"),
    ("layer_first", "page_first"),
    ("page_first_direct", "layer_first"),
    ("page_head", "page_first_direct"),
]
ENCODINGS = (
    *FORMATS, *FOUR_BIT, "nvfp4+hadamard", "int4+hadamard", "nvfp4+four_over_six",
    "nvfp4+hadamard+four_over_six",
)  # fmt: skip

every_pair = pytest.mark.parametrize("layouts", LAYOUT_PAIRS, ids="-".join)
some_pairs = pytest.mark.parametrize("layouts", SOME_PAIRS, ids="-".join)
every_method = pytest.mark.parametrize("method", METHODS)


def kinds(method):
    """Yield the encodings of `KINDS` that a method takes: the copy engine converts nothing."""
    return [each for each in KINDS.values() if method != "copy" or isinstance(each, str)]


def methods(encodings):
    return [method for method in METHODS if encodings in kinds(method)]


# Pools ----------------------------------------------------------------------------------------


@every_pair
@every_method
def test_every_pair_of_layouts(device, layouts, method):
    """All bytes of the pages and no others; scales go along, or are made."""
    for encodings in kinds(method):
        case = TransferCase(device, 1)
        both = pools(case, encodings, layouts, pages=(7, 9), heads=3, page_size=3)
        case.transfer(*both, SRC, DST, method=method)


@pytest.mark.covering
@pytest.mark.parametrize("target", ENCODINGS)
@pytest.mark.parametrize("source", ENCODINGS)
def test_every_pair_of_encodings(device, source, target):
    """With scales and without, on each side that is quantised; latents, of which a part rotates."""
    turn = ENCODINGS.index(source) + 5 * ENCODINGS.index(target)
    for scales in itertools.product((True, False), repeat=2):
        if source == target and scales[0] != scales[1]:
            continue
        case = TransferCase(device, turn)
        layouts = LAYOUT_PAIRS[(turn + 7 * scales[0]) % len(LAYOUT_PAIRS)]
        geometry = {"layers": 2, "page_size": 3, "pages": (4, 5), "scales": scales}
        for method in ("kernel", "staged"):
            both = pools(case, (source, target), layouts, **geometry)
            case.transfer(*both, [1, -1, 2, 0], [3, 0, 0, 1], method=method)
    case = TransferCase(device, turn)
    both = pools(case, (source, target), layouts, latent=128, rope=64, pages=(4, 5))
    case.transfer(*both, [1, 2, 0], [3, 0, 1])


GEOMETRIES = [
    *(
        (fmt, {"widths": widths, "heads": heads})
        for widths in ((1, 1), (1, 2), (16, 1), (7, 64), (33, 31), (128, 96), (576, 512))
        for fmt, heads in (("bf16", 3), ("int8", 1))
    ),
    *(
        (fmt, {"latent": latent})
        for fmt, latent in (
            ("bf16", 576), ("int8", 656), ("fp8_e4m3", 1), ("int8", 3), ("fp32", 5),
            (("bf16", "fp8_e4m3"), 576), (("int8", "bf16"), 656), (("fp32", "int8"), 1),
            (("nvfp4", "bf16"), 576), (("int8", "int4"), 1152),
        )
    ),
    *(("bf16", {"layers": layers, "page_size": 3}) for layers in (1, 40)),
    *(("bf16", {"heads": heads}) for heads in (1, 5)),
    *(("bf16", {"page_size": size, "widths": (2, 6)}) for size in (1, 16, 64)),
    *(
        (pair, {"widths": widths, "page_size": 2})
        for pair in (("bf16", "mxfp4"), ("int4", "int8"), ("int8", "nvfp4"))
        for widths in ((32, 32), (32, 128), (160, 64), (384, 288))
    ),
]  # fmt: skip
"""An encoding or two, and sizes: rows down to a byte, a lone group, and as wide as in models."""


@pytest.mark.covering
@every_method
@pytest.mark.parametrize(
    ("encodings", "geometry"), GEOMETRIES, ids=[str(i) for i in range(len(GEOMETRIES))]
)
def test_pools_of_any_size(device, encodings, geometry, method):
    if method == "copy" and not isinstance(encodings, str):
        method = "staged"
    for layouts in SOME_PAIRS:
        case = TransferCase(device, 2)
        case.transfer(*pools(case, encodings, layouts, **geometry), SRC, DST, method=method)


@every_method
@pytest.mark.parametrize("placements", list(itertools.product(PLACEMENTS, repeat=2)), ids="-".join)
def test_placements(device, placements, method):
    for encodings, layouts in zip(kinds(method), itertools.cycle(SOME_PAIRS), strict=False):
        case = TransferCase(device, 3)
        src, dst = pools(case, encodings, layouts, placements=placements)
        converts = not isinstance(encodings, str)
        if not reaches(device, method, placements, convert=converts):
            case.refuse(src, dst, SRC, DST, method=method)
            continue
        case.transfer(src, dst, SRC, DST, method=method)
        case.transfer(dst, src, [7, 3], [8, 7], method=method, layers=[2, 0])


@every_method
@pytest.mark.parametrize("layout", POOL_LAYOUTS)
def test_within_one_pool(device, layout, method):
    """The pages that are read are not those that are written."""
    case = TransferCase(device, 6)
    pool = case.pool(layout, "int8", scales=True)
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
    "a page that only the target has": ([6, 7, 0], [7, 8, 1]),
    "pages past either end": ([4, 9, 0, -1, 2], [6, 1, 3, 9, 7]),
}


@pytest.mark.covering(2)
@every_method
@pytest.mark.parametrize("name", LISTS)
@some_pairs
def test_page_lists(device, layouts, name, method):
    """As lists, and as arrays on the device, strided, with poison between their elements."""
    src_pages, dst_pages = map(list, LISTS[name])
    for encodings in kinds(method):
        case = TransferCase(device, len(name))
        both = pools(case, encodings, layouts, pages=(7, 9), multipliers=ones)
        case.transfer(*both, src_pages, dst_pages, method=method)
        placed = case.indices(src_pages, "int64", -2), case.indices(dst_pages)
        case.transfer(*both, *placed, method=method)


@pytest.mark.parametrize(
    "page",
    [-1, -9, -(2**31), -(2**32) + 3, -(2**63), 9, 7777, 2**31 - 1, 2**31, 2**32 + 3, 2**63 - 1],
)
@every_method
def test_pages_that_do_not_exist(device, page, method):
    """Negative ones are skipped, those past the end reported for their own list, once for all
    layers; other pages are transferred."""
    case = TransferCase(device, 10)
    both = pools(case, pages=(7, 9))
    for pages in (
        ([2, page, 0], [5, 1, 3]),
        ([2, 5, 0], [5, page, 3]),
        ([2, page, 0, page, 9, 5], [page, 1, 3, page, -1, 6]),
        ([page], [page]),
        (SRC, DST),
    ):
        case.transfer(*both, *pages, method=method)
        case.transfer(*both, *map(case.indices, pages), method=method)


@every_method
def test_index_arrays(device, method):
    """Of either type, strided, of a subclass, on the device and of the host; lists; in any pair."""
    case = TransferCase(device, 8)
    both = pools(case, layouts=("page_first", "layer_first"))
    makers = [
        list, np.array, lambda p: np.array(p, np.int32), lambda p: np.repeat(p, 2)[::2],
        case.indices, lambda p: case.indices(p, "int32"), lambda p: case.indices(p, "int32", -3),
        lambda p: case.indices(p, "int64", 2), lambda p: np.array(p, np.int32).view(np.recarray),
    ]  # fmt: skip
    for of, to in itertools.product(makers, repeat=2):
        case.transfer(*both, of(SRC), to(DST), method=method)
    case.transfer(*both, [np.int64(3), np.int32(4)], [2, np.int64(7)], method=method)


# Options --------------------------------------------------------------------------------------

LAYERS = [
    0, 2, 4, np.int64(3), [1], (4, 0), [3, 1, 2], [4, 3, 2, 1, 0], range(0, 5, 2), range(1, 4),
    [0, 1, 3], [np.int64(2), 4], [], None,
]  # fmt: skip


@pytest.mark.covering(2)
@pytest.mark.parametrize("layers", LAYERS, ids=str)
@every_method
@some_pairs
def test_layers(device, layers, method, layouts):
    """One, or several in any order, evenly spaced or not; others and their scales are kept."""
    for encodings in kinds(method)[::3]:
        case = TransferCase(device, 13)
        both = pools(case, encodings, layouts, layers=5, page_size=2)
        case.transfer(*both, SRC, DST, method=method, layers=layers)


@every_method
def test_a_fault_is_reported_once_for_layers_of_several_launches(device, method):
    case = TransferCase(device, 14)
    both = pools(case, layers=12, page_size=1)
    case.transfer(*both, [2, 9, 0], [5, 1, 3], method=method, layers=[0, 1, 3, 8, 4, 11])


@pytest.mark.covering
@some_pairs
@pytest.mark.parametrize("max_blocks", [None, 1, 2, 7, np.int64(3), 10**6])
@every_method
def test_max_blocks(device, max_blocks, method, layouts):
    """However few blocks share the work, all of it is done."""
    options = {"method": method, "max_blocks": max_blocks}
    for encodings in kinds(method):
        case = TransferCase(device, 15)
        both = pools(case, encodings, layouts, pages=(33, 30), page_size=5, heads=3)
        src_pages, dst_pages = (case.rng.permutation(n)[:25] for n in (33, 30))
        case.transfer(*both, src_pages, dst_pages, **options)
    narrow = pools(case, "int8", layouts, latent=3, page_size=3)
    case.transfer(*narrow, SRC, DST, layers=[0, 2], **options)


# Anything -------------------------------------------------------------------------------------


@st.composite
def transfers(draw):
    encodings = draw(st.sampled_from([*FORMATS, *FOUR_BIT, *KINDS.values()]))
    pair = (encodings, encodings) if isinstance(encodings, str) else encodings
    latent = draw(st.none() | st.integers(1, 70))
    widths = st.integers(1, 40)
    if not FOUR_BIT.keys().isdisjoint(pair):
        latent, widths = latent and 32 * latent, st.integers(1, 6).map(lambda n: 32 * n)
    layers = draw(st.integers(1, 6))
    chosen = draw(st.permutations(range(layers)))[: draw(st.integers(1, layers))]
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "encodings": encodings,
        "layouts": draw(st.sampled_from(LAYOUT_PAIRS)),
        "geometry": {
            "layers": layers, "latent": latent, "widths": draw(st.tuples(widths, widths)),
            "page_size": draw(st.integers(1, 20)),
            "heads": 1 if latent else draw(st.integers(1, 4)),
            "placements": draw(st.tuples(*[st.sampled_from(PLACEMENTS)] * 2)),
            "pages": draw(st.tuples(st.integers(1, 12), st.integers(1, 12))),
            "scales": pair[0] not in QUANTISED or draw(st.booleans()),
        },
        "index": draw(st.tuples(*[st.sampled_from(["list", "int32", "int64"])] * 2)),
        "steps": draw(st.tuples(*[st.sampled_from([1, 2, -1])] * 2)),
        "options": {
            "method": draw(st.sampled_from(methods(encodings))) if encodings in KINDS.values()
            else draw(st.sampled_from(METHODS)),
            "layers": draw(st.sampled_from([None, chosen, chosen[0]])),
            "max_blocks": draw(st.sampled_from([None, 1, 5])),
        },
    }  # fmt: skip


@settings(max_examples=examples(320), deadline=None, database=None)
@given(call=transfers())
def test_any_transfer(device, call):
    """Targets are distinct; some pages are negative, some past the end."""
    case = TransferCase(device, call["seed"])
    both = pools(case, call["encodings"], call["layouts"], **call["geometry"])
    num_src, num_dst = (each.pool.num_pages for each in both)
    count = int(case.rng.integers(0, num_dst + 1))
    pages = [case.rng.integers(0, num_src, count), case.rng.permutation(num_dst)[:count]]
    for side, num_pages in zip(pages, (num_src, num_dst), strict=True):
        side[case.rng.random(count) < 0.1] = -3
        side[case.rng.random(count) < 0.1] = num_pages + 1
    options, placements = call["options"], call["geometry"]["placements"]
    if not reaches(device, options["method"], placements):
        options["method"] = "auto"
    lists = [
        side.tolist() if kind == "list" else case.indices(side, kind, step)
        for side, kind, step in zip(pages, call["index"], call["steps"], strict=True)
    ]
    case.transfer(*both, *lists, **options)


# The checks themselves ------------------------------------------------------------------------
