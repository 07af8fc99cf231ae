"""Formats and scales of `paged_attention`, for every pair of query and cache format."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attention_cases import FLOATS, AttentionCase
from helpers import FORMATS, QUANTISED, Arg, all_patterns, from_values
from kernel_checks import check_visible_nan

import kvcupy as kv
from kvcupy import reference
from kvcupy.testing.tolerances import slot_values

LENS, NEW = [6, 1, 9], [2, 1, 5]
both = pytest.mark.parametrize("new", [None, NEW], ids=["decode", "append"])


@both
@pytest.mark.parametrize(
    "pair",
    [("fp8_e4m3", "bf16"), ("bf16", "int8"), ("fp32", "fp16"), ("fp8_e5m2", "fp8_e4m3"),
     ("int8", "fp8_e5m2"), ("fp16", "fp32")],
    ids="-".join,
)  # fmt: skip
def test_key_and_value_follow_their_own_formats(device, pair, new):
    for fmt in ("fp32", "bf16"):
        case = AttentionCase(device, 4)
        kinds = ["per head" if f in QUANTISED else "none" for f in pair]
        case.attend(case.arguments(LENS, new, fmt=fmt, cache_fmt=pair, scales=kinds))


@both
@pytest.mark.parametrize("fmt", QUANTISED)
def test_quantised_rows_of_any_width(device, fmt, new):
    for widths in ((1, 5), (5, 1), (64, 100), (100, 64), (128, 128)):
        case = AttentionCase(device, (5, widths[0]))
        case.attend(
            case.arguments(LENS, new, fmt="bf16", cache_fmt=fmt, widths=widths,
                           scales=("per head", "float"))
        )  # fmt: skip


@pytest.mark.parametrize("query_fmt", FLOATS)
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "fp32"])
def test_every_value_of_a_format(device, fmt, query_fmt):
    """One key per sequence, so that the output is the value, rounded to the query's format once."""
    patterns = all_patterns(fmt)
    exact = reference.decode(patterns, fmt)
    with np.errstate(over="ignore"):
        fits = np.isfinite(reference.decode(reference.encode(exact, query_fmt), query_fmt))
    values = patterns[np.isfinite(exact) & fits]
    values = np.resize(values[:: max(1, values.size // 512)], (8, 1, 1, 64))
    case = AttentionCase(device, 6)
    args = case.arguments([1] * 8, fmt=query_fmt, cache_fmt=fmt, heads=(1, 1), page_size=1)
    args["v_cache"] = case.place(values, fmt, name="v_cache")
    args["k_cache"] = case.place(from_values(np.ones((8, 1, 1, 16)), fmt), fmt, name="k_cache")
    args["block_table"] = case.table(np.arange(8)[:, None])
    out, _ = case.attend(args)
    want = reference.encode(reference.decode(values, fmt)[:, 0], query_fmt)
    got = reference.decode(out.view, query_fmt)
    assert np.array_equal(got, reference.decode(want, query_fmt))


def test_scores_are_not_rounded(device):
    """Products of 16-bit elements are summed in float32: two keys an eighth of a unit apart."""
    for fmt, new in itertools.product(("fp16", "bf16"), (None, [1, 1])):
        case = AttentionCase(device, 7)
        args = case.arguments([2, 2], new, fmt=fmt, heads=(1, 1), widths=(64, 2), page_size=2)
        query = np.zeros((2, 1, 64))
        query[..., 0], query[..., 1] = 16.0, 0.125
        keys = np.zeros((2, 2, 1, 64))
        keys[..., 0], keys[:, 1, :, 1] = 16.0, 1.0
        args["query"] = case.place(from_values(query, fmt), fmt)
        args["k_cache"] = case.place(from_values(keys, fmt), fmt)
        args["v_cache"] = case.place(from_values(np.tile(np.eye(2), (2, 1, 1)), fmt).reshape(
            2, 2, 1, 2), fmt)  # fmt: skip
        args["block_table"] = case.table([[0], [1]])
        out, lse = case.attend(args, sm_scale=1.0)
        assert (out.view[..., 1].astype(float) - out.view[..., 0].astype(float) > 0.05).all()
        np.testing.assert_allclose(lse.view, 256 + np.log(1 + np.exp(0.125)), rtol=1e-6)


def test_sums_of_many_values_are_not_rounded(device):
    """Ones, which a 16-bit sum would lose from 256 on."""
    for fmt, new in itertools.product(("fp16", "bf16"), (None, [1])):
        case = AttentionCase(device, 8)
        args = case.arguments([3000], new, fmt=fmt, heads=(1, 1), widths=(2, 2), page_size=64,
                              loud=0.01)  # fmt: skip
        args["v_cache"].view[...] = from_values(1.0, fmt)
        args["v_cache"].buffer.restore()
        out, _ = case.attend(args)
        np.testing.assert_allclose(out.view.astype(float), 1.0, atol=1e-3)


@pytest.mark.parametrize("new", [None, [3, 2]])
def test_infinities_of_fp16(device, new):
    """Values near the largest of fp16 average to one, not to infinity."""
    case = AttentionCase(device, 9)
    args = case.arguments([9, 5], new, fmt="fp16")
    args["v_cache"].view[...] = np.float16(60000.0)
    args["v_cache"].buffer.restore()
    out, _ = case.attend(args)
    assert np.isfinite(out.view).all()


TENSOR_CORE_SHAPES = {
    "narrow": {"heads": (4, 2), "widths": (64, 64)},
    "padded": {"heads": (16, 1), "widths": (96, 128)},
    "wide": {"heads": (6, 1), "widths": (320, 288)},
    "many heads": {"heads": (40, 1), "widths": (320, 288)},
}


def reference_of(args):
    with np.errstate(invalid="ignore"):
        return reference.paged_attention(
            **{name: a.view if isinstance(a, Arg) else a for name, a in args.items()}
        )


@pytest.mark.covering(2)
@pytest.mark.parametrize("alike", [True, False], ids=["weights of one", "any weights"])
@pytest.mark.parametrize("shape", TENSOR_CORE_SHAPES)
@pytest.mark.parametrize("formats", [("bf16", "bf16"), ("fp16", "fp16"), ("fp16", "fp8_e5m2")],
                         ids="-".join)  # fmt: skip
def test_an_infinity_in_v_stays_one(device, formats, shape, alike):
    """It reaches only the column and the sequence it is in; two of opposite sign make NaN."""
    fmt, cache_fmt = formats
    case = AttentionCase(device, 10)
    args = case.arguments([33, 1, 70], fmt=fmt, cache_fmt=cache_fmt, loud=0.5, page_size=16,
                          **TENSOR_CORE_SHAPES[shape])  # fmt: skip
    if alike:
        args["query"].view[...] = from_values(0.0, fmt)
        args["query"].buffer.restore()
    table, values = args["block_table"].view, args["v_cache"].view
    infinity = {"bf16": 0x7F80, "fp16": 0x7C00, "fp8_e5m2": 0x7C}[cache_fmt]
    bits = reference.bits_of(values, cache_fmt)  # rounding would make e5m2 saturate
    negative = infinity | 1 << 8 * bits.itemsize - 1
    for sequence, key, column, value in (
        (0, 3, 3, infinity), (0, 32, 17, negative), (1, 0, 3, infinity), (2, 20, 9, infinity),
        (2, 20, 60, infinity), (2, 69, 60, negative),
    ):  # fmt: skip
        bits[table[sequence, key // 16], key % 16, :, column] = value
    args["v_cache"].buffer.restore()
    want = reference_of(args)[0]
    assert np.isinf(want[0][:, [3, 17]]).all()
    assert np.isnan(want[2, :, 60]).all()
    out = case.output(fmt, want.shape)
    case.issue(args, out)
    got = reference.decode(np.ascontiguousarray(out.live()), fmt)
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)


@pytest.mark.covering(2)
@pytest.mark.parametrize("power", [14, 22, 29, 36])
@pytest.mark.parametrize("shape", TENSOR_CORE_SHAPES)
@pytest.mark.parametrize("cache_fmt", [*QUANTISED, "int4", "nvfp4"])
def test_small_elements_of_queries_count(device, cache_fmt, shape, power):
    """Beside one up to 2**29 times as large, which meets zeros; then errors have a bound."""
    case = AttentionCase(device, 12)
    args = case.arguments([33, 70], fmt="bf16", cache_fmt=cache_fmt, page_size=16, loud=1.0,
                          **TENSOR_CORE_SHAPES[shape])  # fmt: skip
    keys, query = args["k_cache"].view, args["query"].view
    if cache_fmt in QUANTISED:
        keys[..., 0] = from_values(0.0, cache_fmt)
    else:
        keys.codes[..., 0] &= 0xF0
    query[...] = from_values(1.0 + case.rng.integers(0, 128, query.shape) / 128, "bf16")
    query[..., 0] = from_values(2.0**power * 1.9, "bf16")
    for name in ("query", "k_cache"):
        args[name].buffer.restore()
    lse = case.output("fp32", query.shape[:2])
    case.issue(args, None, lse)
    within = 2e-5
    if power > 29:
        values = slot_values({name: args[name].view for name in ("k_cache",)}, "k")
        longest = np.nanmax(np.abs(values[np.isfinite(values).all((1, 2))]).sum(2))
        within += 2.0**-39 * 2.0 ** (power + 1) * longest / np.sqrt(query.shape[2])
    np.testing.assert_allclose(lse.live(), reference_of(args)[1], rtol=2e-5, atol=within)


@pytest.mark.parametrize("fmt", QUANTISED)
def test_what_store_kv_writes(device, fmt):
    """Attention over what `store_kv` wrote, with its dynamic scales."""
    case = AttentionCase(device, 10)
    args = case.arguments([9, 5], [3, 2], fmt="bf16", cache_fmt=fmt, scales=("dynamic",) * 2)
    slots = np.arange(9)
    table = args["block_table"].view
    slots = table[0, slots // 4].astype(np.int64) * 4 + slots % 4
    rows = [from_values(case.rng.standard_normal((9, 2, 16)) * 2, "bf16") for _ in "kv"]
    names = ("k_cache", "v_cache", "k_scale_cache", "v_scale_cache")
    options = {name: args[name].array for name in names}
    kv.store_kv(*map(case.to_pass, map(lambda r: case.place(r, "bf16"), rows)),
                slot_mapping=device.asarray(slots), **options)  # fmt: skip
    for name in names:
        args[name].view[...] = args[name].live()
    views = {n: a.view if hasattr(a, "view") else a for n, a in args.items()}
    stored = slot_values(views, "k")[slots]
    step = {"fp8_e4m3": 1 / 16, "fp8_e5m2": 1 / 8, "int8": 1 / 127}[fmt]
    assert np.abs(stored - rows[0].astype(float)).max() <= 8 * step
    case.attend(args)


@pytest.mark.parametrize("arch", [0, 75, 89])
def test_a_visible_nan_is_seen(kernel_sources, arch):
    check_visible_nan(kernel_sources.device("-O0", f"-DKVCUPY_ARCH={10 * arch}"))
