"""`paged_attention` over caches of the four-bit formats."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import FLOATS, AttentionCase, Views, rotated
from four_bit_cases import FOUR_BIT, split_cache
from helpers import from_values
from kernel_checks import check_attention

import kvcupy as kv
from kvcupy import reference

LENS, NEW = [6, 1, 9], [2, 1, 5]
both = pytest.mark.parametrize("new", [None, NEW], ids=["decode", "append"])
stored = pytest.mark.parametrize("stored", [lambda args: args, rotated], ids=["plain", "rotated"])
"""As rows are, or as rows that were rotated before they were stored."""


@both
@stored
def test_rows_at_any_byte(device, stored, new):
    """Rows of 9, 18, 27 and 36 bytes, at odd addresses too."""
    for fmt, widths, how in (
        ("nvfp4", (16, 32), "NHD"), ("nvfp4", (48, 64), "HND"), ("nvfp4", (32, 32), "wider rows"),
        ("mxfp4", (96, 32), "NHD"), ("int4", (32, 96), "NHD"),
    ):  # fmt: skip
        case = AttentionCase(device, 3)
        args = case.arguments(LENS, new, fmt="bf16", cache_fmt=fmt, widths=widths, how=how,
                              scales=("per head", "float"), heads=(6, 3), page_size=3)  # fmt: skip
        case.attend(stored(args))


@both
@stored
@pytest.mark.parametrize("how", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("fmt", "widths"),
    [
        ("mxfp4", (64, 64)), ("nvfp4", (96, 96)), ("int4", (96, 32)), ("mxfp4", (192, 128)),
        ("mxfp4", (96, 96)), ("mxfp4", (32, 64)), ("mxfp4", (160, 96)),
    ],
)  # fmt: skip
def test_rows_that_begin_within_words(device, fmt, widths, how, stored, new):
    """At even addresses, or of odd numbers of bytes at any; tensor cores take them."""
    case = AttentionCase(device, 21)
    lens, new = [75, 0, 40, 13], new and [9, 0, 3, 2]
    heads = (9, 3) if new else (6, 3)  # tiles of 16 rows, and of eight
    args = case.arguments(lens, new, fmt="bf16", cache_fmt=fmt, widths=widths, how=how,
                          heads=heads, page_size=5, scales=("per head", "float"))  # fmt: skip
    case.attend(stored(args))


@pytest.mark.covering(2)
@both
@stored
@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_scales_in_an_array_of_their_own(device, fmt, stored, new):
    """Pages of vLLM: the codes of a page, then its scales."""
    if device.kind != "host":
        pytest.skip("the case views NumPy arrays")
    case = AttentionCase(device, 4)
    args = case.arguments([9, 5], new and [2, 1], fmt="bf16", cache_fmt="nvfp4", widths=(128, 128))
    pages, page_size = args["k_cache"].view.shape[:2]
    for name in ("k_cache", "v_cache"):
        array, mirror, _ = split_cache(case, fmt, pages, page_size, 2, 128, usual=True)
        args[name] = Views(array, mirror)
    case.attend(stored(args))


@pytest.mark.covering(2)
@both
@stored
@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_masks(device, fmt, stored, new):
    case = AttentionCase(device, 5)
    lens, new = [75, 0, 40, 13], new and [9, 0, 3, 13]
    args = case.arguments(
        lens, new, fmt="fp16", cache_fmt=fmt, widths=(128, 128), heads=(6, 2), page_size=16,
        padding=2 if new else 0, scales=("per head", "float"),
    )  # fmt: skip
    args = stored(args)
    case.attend(args, window=17, sink_tokens=5)
    case.attend(args, sinks=case.sinks(6), logits_soft_cap=6.0)
    if new:
        case.attend(args, causal=False)
        case.attend(args, tree_mask=case.tree(new, sum(new) + 2, 15), window=20, sink_tokens=2)


@both
@pytest.mark.covering(1)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fmt", FOUR_BIT)
@pytest.mark.parametrize("query", FLOATS)
def test_rotated_keys(device, query, fmt, interleaved, new):
    """Whole rows, parts of them, and parts that cut packs."""
    for dim, start in ((128, 0), (64, 32), (24, 10)):
        case = AttentionCase(device, 6)
        lens, news = [41, 21], new and [5, 3]
        args = case.arguments(lens, news, fmt=query, cache_fmt=fmt, widths=(128, 128), page_size=16)
        case.attend(args | case.rope(dim, start=start, positions=25, interleaved=interleaved))


@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_every_code_and_scale(device, fmt):
    """One key per sequence, so that the output is the value: codes times any finite scale."""
    form = reference.FOUR_BIT[fmt]
    case = AttentionCase(device, 7)
    args = case.arguments([1] * 64, fmt="fp32", cache_fmt=fmt, heads=(1, 1), page_size=1,
                          widths=(128, 128))  # fmt: skip
    rows = args["v_cache"].view
    bits = case.rng.permutation(np.arange(2 ** (8 * rows.scales.itemsize)))[: rows.scales.size]
    rows.scales[...] = np.resize(bits, rows.scales.shape).astype(rows.scales.dtype)
    known = np.isfinite(reference.decode_scales(rows.scales, fmt))
    rows.scales[~known] = 1
    rows.codes[...] = np.resize(np.arange(256), rows.codes.shape)
    args["v_cache"].buffer.restore()
    assert form.group in (16, 32, 64, 128)
    out, _ = case.attend(args)
    table = args["block_table"].view[:, 0]
    want = reference.dequantise_rows(rows[table])[:, 0]
    assert np.array_equal(out.live(), want)


@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_what_store_kv_writes(device, fmt):
    case = AttentionCase(device, 8)
    args = case.arguments([9, 5], [3, 2], fmt="bf16", cache_fmt=fmt, widths=(128, 128))
    table = args["block_table"].view
    slots = table[0, np.arange(9) // 4].astype(np.int64) * 4 + np.arange(9) % 4
    rows = [from_values(case.rng.standard_normal((9, 2, 128)) * 2, "bf16") for _ in "kv"]
    caches = [args[name] for name in ("k_cache", "v_cache")]
    kv.store_kv(*(case.place(r, "bf16").array for r in rows), *(c.array for c in caches),
                device.asarray(slots))  # fmt: skip
    for row, cache in zip(rows, caches, strict=True):
        cache.take_over()
        stored = reference.dequantise_rows(cache.view).reshape(-1, 2, 128)[slots]
        assert np.abs(stored - row.astype(float)).max() < 1.5
    case.attend(args)


def test_the_columns_of_latents_are_whole_groups(device):
    case = AttentionCase(device, 9)
    args = case.arguments([3], fmt="bf16", cache_fmt="nvfp4", heads=(4, 1), widths=(576, 512))
    with pytest.raises(ValueError, match=r"index: .*whole groups"):
        args["k_cache"].array[..., :500]


WIDE = [(fmt, (576, 512)) for fmt in FOUR_BIT]
"""Rows wider than 256, on tensor cores: of 306 bytes in mxfp4."""


@both
@pytest.mark.covering(1)
@pytest.mark.parametrize(("cache_fmt", "widths"), WIDE)
@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_latents(device, fmt, cache_fmt, widths, new):
    """Values are part of the keys; scores reach 40, whose LSE would show a key that was rounded."""
    case = AttentionCase(device, 15)
    args = case.arguments([75, 0, 33], new and [2, 0, 9], fmt=fmt, cache_fmt=cache_fmt, loud=4.0,
                          heads=(5, 1), widths=widths, page_size=16,
                          scales=("float", "none"))  # fmt: skip
    keys = args["k_cache"]
    values = Views(keys.array[..., : widths[1]], keys.view.columns(0, widths[1]))
    args |= {"v_cache": values, "v_scale": args["k_scale"]}
    case.attend(args, *case.results(args, fmt="fp32"))


@both
@pytest.mark.covering(2)
@pytest.mark.parametrize(("cache_fmt", "widths"), WIDE)
@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("how", ["NHD", "HND", "combined HND"])
def test_wide_rows(device, how, fmt, cache_fmt, widths, new):
    """V is no part of K, and has another scale; masks."""
    if how == "combined HND":
        widths = widths[1:] * 2
    case = AttentionCase(device, 16)
    new = new and [9, 0, 3]
    args = case.arguments([75, 0, 40], new, fmt=fmt, cache_fmt=cache_fmt, how=how, heads=(6, 2),
                          widths=widths, page_size=16, scales=("per head", "float"),
                          padding=2 if new else 0)  # fmt: skip
    case.attend(args, window=17, sink_tokens=5, logits_soft_cap=6.0)
    case.attend(args, sinks=case.sinks(6))
    if new:
        case.attend(args, tree_mask=case.tree(new, sum(new) + 2, 15), window=20, sink_tokens=2)


@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_every_code_and_scale_of_wide_rows(device, fmt):
    """As `test_every_code_and_scale`; a NaN scale shows in the columns of its group."""
    case = AttentionCase(device, 17)
    args = case.arguments([1] * 64, fmt="bf16", cache_fmt=fmt, heads=(1, 1), page_size=1,
                          widths=(512, 512))  # fmt: skip
    rows = args["v_cache"].view
    bits = case.rng.permutation(np.arange(2 ** (8 * rows.scales.itemsize)))
    rows.scales[...] = np.resize(bits, rows.scales.shape).astype(rows.scales.dtype)
    scales = reference.decode_scales(rows.scales, fmt)
    rows.scales[np.isinf(scales)] = 1
    rows.codes[...] = np.resize(np.arange(256), rows.codes.shape)
    args["v_cache"].buffer.restore()
    out, _ = case.results(args, fmt="fp32")
    case.issue(args, out)
    table = args["block_table"].view[:, 0]
    want = reference.dequantise_rows(rows[table])[:, 0]
    assert np.isnan(want).any() == np.isnan(scales[table]).any()
    np.testing.assert_array_equal(out.live(), want)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "int4"])
def test_where_each_thread_takes_rows_of_its_own(users_device, fmt):
    case = AttentionCase(users_device, 10)
    args = case.arguments([41, 0, 9], [5, 0, 1], fmt="bf16", cache_fmt=fmt, widths=(128, 256),
                          heads=(6, 2), page_size=16, scales=("per head", "float"))  # fmt: skip
    case.attend(args)
    case.attend(args | case.rope(64, start=32, positions=25))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("fmt", "widths"), WIDE)
def test_wide_rows_where_each_thread_takes_rows_of_its_own(users_device, fmt, widths):
    case = AttentionCase(users_device, 18)
    args = case.arguments([41, 0, 9], [5, 0, 1], fmt="bf16", cache_fmt=fmt, widths=widths,
                          heads=(6, 1), page_size=16, scales=("float", "none"))  # fmt: skip
    keys = args["k_cache"]
    values = Views(keys.array[..., : widths[1]], keys.view.columns(0, widths[1]))
    case.attend(args | {"v_cache": values, "v_scale": args["k_scale"]})


def call(case, k_fmt="nvfp4", v_fmt="nvfp4", **more):
    return case.arguments([9, 6], fmt="bf16", cache_fmt=(k_fmt, v_fmt), widths=(128, 128)) | more


@pytest.mark.parametrize(
    ("k_fmt", "v_fmt"),
    [("nvfp4", "mxfp4"), ("int4", "mxfp4"), ("fp8_e4m3", "nvfp4"), ("mxfp4", "bf16")],
)
def test_two_formats_are_refused(device, k_fmt, v_fmt):
    case = AttentionCase(device, 11)
    args = call(case, k_fmt, v_fmt)
    with pytest.raises(ValueError, match=rf"v_cache: expected {k_fmt} like k_cache.* got {v_fmt}"):
        case.issue(args)


def test_scales_of_slots_are_refused(device):
    case = AttentionCase(device, 12)
    args = call(case)
    scales = case.place(np.ones((len(args["k_cache"].view) * 4, 2), np.float32), "fp32")
    with pytest.raises(ValueError, match=r"k_scale_cache: expected None for a nvfp4 cache"):
        case.issue(args | {"k_scale_cache": scales})


@pytest.mark.parametrize("encoding", ["nvfp4", "nvfp4+hadamard"])
def test_a_cache_without_pages(device, encoding):
    """Whose codes are not even copied for keys that are missing."""
    cache = kv.view_as(device.empty((0, 4, 2, 72), np.uint8), encoding)
    case = AttentionCase(device, 13)
    query = case.queries("bf16", 2, 4, 128).array
    table, lens = (device.asarray(np.array(x, np.int32)) for x in ([[-1, -1], [-1, -1]], [5, 7]))
    out = kv.paged_attention(query, cache, cache, table, lens)
    assert not device.to_numpy(out).astype(np.float32).any()
    kv.check_faults(device)


@pytest.mark.parametrize("heads", [(4, 1), (12, 1)])  # tiles of eight rows, and of 16
@pytest.mark.parametrize("check", ["large values of int4", "exponents of mxfp4 that rise"])
def test_scales_that_rise(device, check, heads):
    check_attention(device, check, heads=heads)


@pytest.mark.covering(2)
@pytest.mark.parametrize("how", ["plain", "rope", "k_cache", "v_cache", "k_cache v_cache"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "int4"])
@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (256, 256), (192, 64), (64, 256)])
@pytest.mark.parametrize("heads", [(4, 2), (12, 2)])  # tiles of eight rows, and of 16
def test_widths_of_tensor_cores(device, widths, fmt, how, heads):
    """Padded and not, in words of 4 bytes and of 8; words of 2 bytes take the plain path.

    Keys are rotated on read, or K, V or both were rotated before they were stored.
    """
    case = AttentionCase(device, 14)
    args = case.arguments([70, 33], [2, 1], fmt="fp16", cache_fmt=fmt, widths=widths, heads=heads,
                          page_size=16, scales=("float", "per head"))  # fmt: skip
    if how == "rope":
        args |= case.rope(64, positions=60)
    case.attend(rotated(args, *how.split()) if "cache" in how else args)
