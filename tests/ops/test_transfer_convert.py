"""`transfer_pages` between number formats: the very bits of the reference, NaN for NaN."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from four_bit_cases import FOUR_BIT, content
from helpers import FORMATS, QUANTISED, examples, from_values, full_only
from hypothesis import given, settings
from hypothesis import strategies as st
from store_calls import (
    NANS,
    by_reciprocal,
    in_float64,
    rows_with_nans,
    special_rows,
    telling_values,
    traps,
)
from transfer_cases import PLACEMENTS, POOL_LAYOUTS, TransferCase, reaches

from kvcupy import reference
from kvcupy.formats import FOUR_BIT as FOUR_BIT_FORMATS

SRC, DST = [1, -1, 2, 0], [3, 0, 0, 1]
METHODS = ("kernel", "staged", "auto")
LAYOUT_PAIRS = list(itertools.product(POOL_LAYOUTS, repeat=2))
PAIRS = list(itertools.permutations(FORMATS, 2))

every_method = pytest.mark.parametrize("method", METHODS)
every_pair = pytest.mark.parametrize("pair", PAIRS, ids="-".join)


def scale_options(pair):
    """With scales and without, on each side that is quantised."""
    return itertools.product(*[(False, True) if fmt in QUANTISED else (False,) for fmt in pair])


def pools(case, pair, scales=(False, False), layouts=("layer_first", "page_first"), **geometry):
    """A source of usual and special values, with usual and extreme scales, and a target."""
    four_bit = not set(pair).isdisjoint(FOUR_BIT)
    geometry = {
        "pages": 4, "page_size": 3, "layers": 2, "multipliers": case.multipliers,
        "content": content(case) if four_bit else case.values, **geometry,
    }  # fmt: skip
    if four_bit and "latent" not in geometry:
        geometry = {"widths": (128, 256), **geometry}
    placements, pages = geometry.pop("placements", ("device",) * 2), geometry.pop("pages")
    pages = pages if isinstance(pages, tuple) else (pages, pages)
    return [
        case.pool(layout, fmt, scales=has, placement=placement, pages=count, **geometry)
        for layout, fmt, has, placement, count in zip(
            layouts, pair, scales, placements, pages, strict=True
        )
    ]


def repeated(values):
    """Content that goes through `values`, row after row."""
    return lambda fmt, count: np.resize(np.asarray(from_values(values, fmt)), count)


def ones(_, count):
    return np.ones(count, np.float32)


# Formats --------------------------------------------------------------------------------------


@pytest.mark.covering
@every_pair
@every_method
def test_every_pair_of_formats(device, pair, method):
    """With every kind of scales; the layouts change from case to case."""
    start = PAIRS.index(pair) + 5 * METHODS.index(method)
    for turn, scales in enumerate(scale_options(pair)):
        case = TransferCase(device, (start, turn))
        layouts = LAYOUT_PAIRS[(start + 7 * turn) % len(LAYOUT_PAIRS)]
        both = pools(case, pair, scales, layouts, heads=3, widths=(16, 10))
        case.transfer(*both, SRC, DST, method=method, convert=True)


@pytest.mark.covering
@every_method
@pytest.mark.parametrize("layouts", LAYOUT_PAIRS, ids="-".join)
def test_every_pair_of_layouts(device, layouts, method):
    for pair, scales, widths in (
        (("bf16", "fp8_e4m3"), (False, True), (8, 5)),
        (("int8", "fp16"), (True, False), (8, 5)),
        (("fp8_e5m2", "int8"), (True, True), (8, 5)),
        (("bf16", "nvfp4"), (False, False), (96, 64)),
        (("nvfp4", "bf16"), (False, False), (96, 64)),
        (("fp8_e4m3", "int4"), (True, False), (96, 64)),
        (("int4", "fp8_e4m3"), (False, True), (96, 64)),
    ):
        case = TransferCase(device, 2)
        both = pools(case, pair, scales, layouts, heads=3, widths=widths)
        case.transfer(*both, SRC, DST, method=method, convert=True)


# All values of each format are decoded; boundaries (of fp32) and all values of 16 bits are encoded.
@pytest.mark.parametrize(
    "pair", [p if "fp32" in p or p[0] == "bf16" else full_only(p) for p in PAIRS], ids="-".join
)
def test_every_value(device, pair):
    """All patterns of 8 and 16 bits, and from fp32 all boundaries of rounding, unscaled."""
    values = telling_values(*pair)
    if pair[0] == "fp32":
        values = values.astype(np.float32)
    width = 128
    rows = -(-values.size // width)
    case = TransferCase(device, 3)
    src = case.pool(
        fmt=pair[0], pages=2, page_size=rows, layers=1, heads=1, widths=(width, width),
        content=lambda _, count: np.resize(values, count),
    )  # fmt: skip
    dst = case.pool(fmt=pair[1], pages=1, page_size=rows, layers=1, heads=1, widths=(width, width))
    case.transfer(src, dst, [1], [0], method="kernel", convert=True)


def products_that_tell(fmt):
    """Values of a format, and for each a scale whose product in float32 is halfway between two
    bf16, where the exact product is not."""
    rng = np.random.default_rng(4)
    values = from_values(rng.uniform(1, 100, 2**21), fmt)
    by = rng.uniform(0.5, 1, values.size).astype(np.float32)
    exact = reference.decode(values, fmt) * by
    rounded = exact.astype(np.float32)
    tells = (rounded != exact) & (rounded.view(np.uint32) & 0xFFFF == 0x8000)
    assert tells.sum() >= 8, "the input tells nothing"
    return values[tells][:64], by[tells][:64]


@pytest.mark.parametrize("fmt", QUANTISED)
@every_method
def test_a_product_is_rounded_to_float32(device, fmt, method):
    """And that to bf16, which twice rounds to another value than once."""
    values, by = products_that_tell(fmt)
    rows = len(values)
    stored = np.repeat(values[:, None], 40, axis=1)
    stored[:, 8:] = np.resize(telling_values(fmt, "bf16"), (rows, 32))
    case = TransferCase(device, 4)
    geometry = {"pages": 1, "page_size": rows, "layers": 1, "heads": 1, "widths": (40, 40)}
    src = case.pool(
        "layer_first", fmt, scales=True, content=lambda *_: stored, multipliers=lambda *_: by,
        **geometry,
    )  # fmt: skip
    dst = case.pool("page_head", "bf16", **geometry)
    case.transfer(src, dst, [0], [0], method=method, convert=True)


# Scales that the target gets --------------------------------------------------------------------


@pytest.mark.parametrize("fmt", QUANTISED)
@every_method
def test_scaling_is_two_float32_divisions(device, fmt, method):
    """absmax / limit, then x / that: neither by the reciprocal nor in float64."""
    limit = np.float32(reference.LIMIT[fmt])
    rng = np.random.default_rng(5)
    rows, found = [], 0
    for absmax in rng.uniform(0.5, 900, 96).astype(np.float32):
        for wrong in (by_reciprocal, in_float64):
            _, x = traps(fmt, wrong, [absmax / limit])
            found += x.size
            rows.append(np.concatenate([[-absmax], np.resize(x if x.size else [0], 63)]))
    assert found >= 50, "the input tells nothing"
    case = TransferCase(device, 5)
    both = pools(
        case, ("fp32", fmt), (False, True), pages=2, page_size=96, layers=1, heads=1,
        widths=(64, 64), content=repeated(np.float32(rows)),
    )  # fmt: skip
    case.transfer(*both, [0, 1], [1, 0], method=method, convert=True)


@pytest.mark.covering(2)
@pytest.mark.parametrize("fmt", QUANTISED)
@pytest.mark.parametrize("source", ["fp32", "fp16", "bf16"])
@every_method
def test_special_rows(device, fmt, source, method):
    rows = special_rows(3e38 if source != "fp16" else 65504)
    case = TransferCase(device, 6)
    for scales in (True, False):
        both = pools(
            case, (source, fmt), (False, scales), page_size=11, heads=1, widths=(5, 5),
            content=repeated(rows),
        )  # fmt: skip
        case.transfer(*both, SRC, DST, method=method, convert=True)


@pytest.mark.parametrize("bits", NANS)
def test_scales_pass_over_every_nan(device, bits):
    """A signalling one too, which C's fmaxf lets win."""
    rows = rows_with_nans(bits)
    case = TransferCase(device, bits)
    src = case.pool(
        pages=2, fmt="fp32", widths=(256, 256), content=lambda _, count: np.resize(rows, count)
    )
    dst = case.pool(pages=2, fmt="int8", widths=(256, 256), scales=True)
    for method in METHODS:
        case.transfer(src, dst, [0], [1], method=method, convert=True)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("source", "fmt"), [("fp32", "fp8_e4m3"), ("bf16", "int8"), ("fp16", "fp8_e5m2")]
)
@pytest.mark.parametrize("width", [4096, 1000, 544, 128, 33, 1])
def test_scales_see_every_element(device, source, fmt, width):
    """The largest magnitude stands in each 32-element segment, at changing places and signs."""
    count = -(-width // 32)
    rows = np.random.default_rng(width).uniform(-1, 1, (count, width))
    for row in range(count):
        rows[row, min(32 * row + 7 * row % 32, width - 1)] = (-1) ** row * (2 + row)
    for layouts in (("page_first", "layer_first"), ("layer_first", "page_head")):
        case = TransferCase(device, width)
        both = pools(
            case, (source, fmt), (False, True), layouts, pages=2, page_size=count, layers=1,
            widths=(width, width), content=repeated(rows),
        )  # fmt: skip
        case.transfer(*both, [0, 1], [1, 0], method="kernel", convert=True)


@pytest.mark.parametrize(("source", "width"), [("bf16", 2048), ("fp32", 1024), ("int8", 4096)])
def test_wide_rows_are_read_once(kernel_sources, source, width):
    """Each read crosses the bus where the source is in pinned memory."""
    kernel_sources.replace("transfer.cu", "convert(load(i), i);", "__builtin_trap();")
    kernel_sources.replace("transfer.cu", "products(to_floats(load(i)), factor)", "{}")
    case = TransferCase(kernel_sources.device("-O0"), width)
    both = pools(
        case, (source, "fp8_e4m3"), (source == "int8", True), ("page_first", "layer_first"),
        pages=2, page_size=3, layers=1, widths=(width, width),
    )  # fmt: skip
    case.transfer(*both, [0, 1], [1, 0], method="kernel", convert=True)


def test_scales_to_scales(device):
    """The values of fp8 rows go to int8; the scale of a row does not affect its neighbour's."""
    case = TransferCase(device, 7)
    for method, (layouts, by) in itertools.product(
        METHODS, zip(LAYOUT_PAIRS[::5], ("usual", "ones", "tiny", "huge"), strict=True)
    ):
        multipliers = {
            "usual": case.multipliers,
            "ones": ones,
            "tiny": lambda _, count: np.resize(np.float32([1e-38, 2e-45, 1e-30]), count),
            "huge": lambda _, count: np.resize(np.float32([1e38, 3e38, 1e30]), count),
        }[by]
        both = pools(
            case, ("fp8_e4m3", "int8"), (True, True), layouts, heads=3, multipliers=multipliers
        )
        case.transfer(*both, SRC, DST, method=method, convert=True)


# Everything else --------------------------------------------------------------------------------


@every_method
def test_latents(device, method):
    for (latent, pair), scales in itertools.product(
        [(576, ("bf16", "fp8_e4m3")), (656, ("int8", "bf16")), (1, ("fp32", "int8"))], [False, True]
    ):
        case = TransferCase(device, latent)
        has = [scales and fmt in QUANTISED for fmt in pair]
        for layouts in LAYOUT_PAIRS[1::5]:
            case.transfer(
                *pools(case, pair, has, layouts, latent=latent, page_size=2), SRC, DST,
                method=method, convert=True,
            )  # fmt: skip


@every_method
@pytest.mark.parametrize("placements", list(itertools.product(PLACEMENTS, repeat=2)), ids="-".join)
def test_placements(device, placements, method):
    case = TransferCase(device, 8)
    is_supported = reaches(device, method, placements, convert=True)
    transfer = case.transfer if is_supported else case.refuse
    for pair, scales in (
        (("fp16", "int8"), (False, True)),
        (("fp8_e4m3", "fp32"), (True, False)),
        (("fp16", "mxfp4"), (False, False)),
        (("mxfp4", "fp16"), (False, False)),
    ):
        both = pools(case, pair, scales, ("layer_first", "page_head"), placements=placements)
        transfer(*both, SRC, DST, method=method, convert=True)


@every_method
@pytest.mark.parametrize("layers", [0, [2, 0], [4, 1, 2], range(0, 5, 2), [], None], ids=str)
def test_layers(device, layers, method):
    """Scales of other layers stay too."""
    for pair, scales in (
        (("bf16", "int8"), (False, True)),
        (("fp32", "int4"), (False, False)),
        (("int4", "fp32"), (False, False)),
    ):
        case = TransferCase(device, 9)
        both = pools(case, pair, scales, layers=5)
        case.transfer(*both, SRC, DST, method=method, convert=True, layers=layers)


@every_method
@pytest.mark.parametrize(
    ("pair", "scales"),
    [
        (("bf16", "int8"), (False, True)),
        (("fp8_e5m2", "fp32"), (True, False)),
        (("bf16", "nvfp4"), (False, False)),
        (("nvfp4", "bf16"), (False, False)),
    ],
    ids=str,
)
def test_pages_of_every_kind(device, pair, scales, method):
    """Past the end on either side, negative, none; arrays of any type and stride."""
    case = TransferCase(device, 10)
    both = pools(case, pair, scales, pages=(5, 7), multipliers=ones)
    for src, dst in (
        ([4, 5, 0, -1, 2], [6, 1, 3, 9, 7]),
        ([2**31, 1], [1, 2**63 - 1]),
        ([], []),
        ([0, 0, 0], [5, 4, 0]),
    ):
        case.transfer(*both, src, dst, method=method, convert=True)
        placed = case.indices(src, "int64", -2), case.indices(dst)
        case.transfer(*both, *placed, method=method, convert=True)


@pytest.mark.parametrize("max_blocks", [1, 2, 7])
@every_method
def test_max_blocks(device, method, max_blocks):
    case = TransferCase(device, 11)
    both = pools(case, ("fp16", "fp8_e4m3"), (False, True), pages=30, page_size=5)
    src_pages, dst_pages = (case.rng.permutation(30)[:25] for _ in range(2))
    case.transfer(*both, src_pages, dst_pages, method=method, convert=True, max_blocks=max_blocks)


@pytest.mark.parametrize("method", ["kernel", "staged"])
@pytest.mark.parametrize(
    ("pair", "scales"),
    [(("fp32", "int8"), (False, True)), (("fp8_e5m2", "bf16"), (True, False))],
    ids=["to int8", "from fp8"],
)
def test_more_than_a_staging_buffer_holds(device, pair, scales, method):
    """Counted in the wider format or in the narrower one: 48 MiB of fp32, or of bf16."""
    width = 16384 if "fp32" in pair else 32768
    case = TransferCase(device, 12)
    rng = case.rng
    both = pools(
        case, pair, scales, ("page_first", "layer_first"), pages=12, page_size=16, heads=1,
        widths=(width, width), layers=2, multipliers=ones,
        content=lambda fmt, count: np.resize(
            from_values(rng.standard_normal(99_991), fmt), count
        ),
    )  # fmt: skip
    case.transfer(*both, rng.permutation(12), rng.permutation(12), method=method, convert=True)


FOUR_BIT_PAIRS = [
    pair
    for packed, other in itertools.product(FOUR_BIT, FORMATS)
    for pair in ((packed, other), (other, packed))
]


@st.composite
def conversions(draw):
    pair = draw(st.one_of(st.sampled_from(PAIRS), st.sampled_from(FOUR_BIT_PAIRS)))
    group = max(FOUR_BIT_FORMATS[fmt].group if fmt in FOUR_BIT else 1 for fmt in pair)
    width = st.integers(1, 40) if group == 1 else st.integers(1, 6).map(lambda n: n * group)
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "pair": pair,
        "scales": [fmt in QUANTISED and draw(st.booleans()) for fmt in pair],
        "layouts": draw(st.sampled_from(LAYOUT_PAIRS)),
        "method": draw(st.sampled_from(METHODS)),
        "geometry": {
            "pages": draw(st.integers(1, 5)),
            "page_size": draw(st.integers(1, 5)),
            "layers": draw(st.integers(1, 3)),
            "widths": draw(st.tuples(width, width)),
            "heads": draw(st.integers(1, 3)),
        },
    }


@settings(max_examples=examples(120), deadline=None, database=None)
@given(call=conversions())
def test_any_conversion(device, call):
    case = TransferCase(device, call["seed"])
    both = pools(case, call["pair"], call["scales"], call["layouts"], **call["geometry"])
    count = call["geometry"]["pages"]
    src_pages = case.rng.integers(-1, count + 1, count)
    layers = int(case.rng.integers(0, call["geometry"]["layers"]))
    case.transfer(
        *both, src_pages, case.rng.permutation(count), method=call["method"], convert=True,
        layers=case.rng.choice([None, layers]),
    )  # fmt: skip
