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


WIDTHS = [
    (fmt, width)
    for fmt, form in formats.FOUR_BIT.items()
    for width in range(form.group, 257, form.group)
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("fmt", "width"), WIDTHS)
@pytest.mark.parametrize("query", ["fp32", "bf16"])
def test_widths(device, fmt, width, query):
    """Blocks of 16 to 256, on tensor cores and on the plain path; grouped heads."""
    case = AttentionCase(device, 2)
    args = case.arguments([70, 33], [2, 1], fmt=query, cache_fmt=fmt, widths=(width, width),
                          heads=(6, 2), page_size=16, scales=("float", "per head"))  # fmt: skip
    case.attend(rotated(args))


@pytest.mark.covering(1)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "int4"])
@pytest.mark.parametrize("which", [("k_cache",), ("v_cache",), ("k_cache", "v_cache")])
@pytest.mark.parametrize(
    "widths", [(64, 64), (192, 128), (256, 256), (192, 64), (64, 256)], ids=str
)
def test_k_and_v_by_themselves(device, widths, which, fmt):
    """Padded and not, on tensor cores; mxfp4 with scales of two bytes on the plain path."""
    case = AttentionCase(device, 3)
    args = case.arguments([70, 33], [2, 1], fmt="fp16", cache_fmt=fmt, widths=widths, heads=(4, 2),
                          page_size=16, scales=("float", "per head"))  # fmt: skip
    case.attend(rotated(args, *which))


@pytest.mark.covering(1)
@both
@pytest.mark.parametrize("fmt", ["nvfp4", "int4"])
@pytest.mark.parametrize("how", [a for a in ARRANGEMENTS if a != "wider rows"])
def test_arrangements(device, how, fmt, new):
    case = AttentionCase(device, 4)
    args = case.arguments(LENS, new, fmt="bf16", cache_fmt=fmt, widths=(64, 64), how=how)
    case.attend(rotated(args))


def test_rows_at_any_byte(device):
    for fmt, widths, how in (
        ("nvfp4", (16, 32), "NHD"), ("nvfp4", (48, 64), "HND"), ("nvfp4", (32, 32), "wider rows"),
        ("int4", (32, 96), "NHD"),
    ):  # fmt: skip
        case = AttentionCase(device, 5)
        args = case.arguments(LENS, NEW, fmt="bf16", cache_fmt=fmt, widths=widths, how=how,
                              scales=("per head", "float"), heads=(6, 3), page_size=3)  # fmt: skip
        case.attend(rotated(args))


@pytest.mark.parametrize("fmt", ["nvfp4", full_only("int4")])
def test_scales_in_an_array_of_their_own(device, fmt):
    """Pages of vLLM: the codes of a page, then its scales."""
    if device.kind != "host":
        pytest.skip("the case views NumPy arrays")
    case = AttentionCase(device, 6)
    args = case.arguments([9, 5], fmt="bf16", cache_fmt="nvfp4", widths=(128, 128))
    pages, page_size = args["k_cache"].view.shape[:2]
    for name in ("k_cache", "v_cache"):
        array, mirror, _ = split_cache(case, fmt, pages, page_size, 2, 128, usual=True)
        args[name] = Views(array, mirror)
    case.attend(rotated(args))


@both
@pytest.mark.parametrize("fmt", [full_only(f) if f == "int4_g128" else f for f in KINDS])
def test_masks(device, fmt, new):
    case = AttentionCase(device, 7)
    lens, new = [75, 0, 40, 13], new and [9, 0, 3, 13]
    args = rotated(case.arguments(
        lens, new, fmt="fp16", cache_fmt=fmt, widths=(128, 128), heads=(6, 2), page_size=16,
        padding=2 if new else 0, scales=("per head", "float"),
    ))  # fmt: skip
    case.attend(args, window=17, sink_tokens=5)
    case.attend(args, sinks=case.sinks(6), logits_soft_cap=6.0)
    if new:
        case.attend(args, causal=False)
        case.attend(args, tree_mask=case.tree(new, sum(new) + 2, 15), window=20, sink_tokens=2)


def test_splits(device):
    """Each split undoes the rotation of what it has, and those without keys have nothing."""
    for heads, width, fmt in (((8, 1), 128, "bf16"), ((2, 1), 96, "fp32")):
        case = AttentionCase(device, 8)
        args = case.arguments([1300, 0, 5, 700], fmt=fmt, cache_fmt="nvfp4", heads=heads,
                              widths=(width, width), page_size=16)  # fmt: skip
        case.attend(rotated(args))


@pytest.mark.parametrize(
    ("fmt", "latent", "rope"),
    [
        ("nvfp4", 512, 64),
        full_only("int4", 512, 64),
        ("nvfp4", 128, 64),
        full_only("nvfp4", 384, 16),
    ],
)
def test_latents(device, fmt, latent, rope):
    """The latent alone is rotated, of keys and of queries; what comes out is a latent."""
    case = AttentionCase(device, 9)
    args = case.arguments([21, 3], [2, 1], fmt="bf16", cache_fmt=fmt, heads=(4, 1),
                          widths=(latent + rope, latent), page_size=16,
                          scales=("float", "none"))  # fmt: skip
    k = as_rotated(args["k_cache"], latent)
    v = Views(k.array[..., :latent], k.view.columns(0, latent))
    args |= {"k_cache": k, "v_cache": v, "v_scale": args["k_scale"]}
    case.attend(args)
    for interleaved in (False, True):  # the rope part may still be raw
        case.attend(args | case.rope(rope, start=latent, positions=25, interleaved=interleaved))


@pytest.mark.parametrize("fmt", ["nvfp4", full_only("mxfp4"), "int4_g64"])
def test_where_each_thread_takes_rows_of_its_own(users_device, fmt):
    case = AttentionCase(users_device, 10)
    for new in ([5, 0, 1], None, [33, 0, 2]):
        args = case.arguments([41, 0, 9], new, fmt="bf16", cache_fmt=fmt, widths=(128, 192),
                              heads=(6, 2), page_size=16, scales=("per head", "float"))  # fmt: skip
        case.attend(rotated(args))
        case.attend(rotated(args, "v_cache"))
        case.attend(args | {"k_cache": as_rotated(args["k_cache"], 64)})


@pytest.mark.parametrize("fmt", ["nvfp4", "int4_g64"])
def test_rows_that_were_rotated_by_the_reference(device, fmt):
    """As attention over plain rows, with `reference.hadamard` around it."""
    case = AttentionCase(device, 11)
    args = case.arguments([150, 37], fmt="bf16", cache_fmt=fmt, widths=(128, 128), heads=(8, 2),
                          page_size=16)  # fmt: skip
    view = {name: arg.view for name, arg in args.items() if name != "layout"}
    query = reference.decode(view["query"], "bf16")
    k, v = (reference.dequantise_rows(view[name]) for name in ("k_cache", "v_cache"))
    plain, _, _ = reference.paged_attention(
        reference.hadamard(query).astype(np.float32), k, v, view["block_table"], view["seq_lens"]
    )
    want = reference.hadamard(plain)
    out = case.results(args, fmt="fp32")[0]
    case.issue(rotated(args), out)
    rows = out.live().astype(np.float64)
    np.testing.assert_allclose(rows, want, rtol=0, atol=2e-3 if fmt != "nvfp4" else 2e-4)
    out.view[...] = out.live()


def refusals(case):
    args = rotated(case.arguments([9, 6], fmt="bf16", cache_fmt="nvfp4", widths=(128, 128)))
    partly = args | {"k_cache": as_rotated(args["k_cache"], 64)}
    return {
        "rope_table": args | case.rope(64),
        "rope_table, a part": partly | case.rope(64, start=48),
    }


@pytest.mark.parametrize("name", ["rope_table", "rope_table, a part"])
def test_keys_are_not_rotated_by_rope_after_they_are_stored_rotated(device, name):
    case = AttentionCase(device, 12)
    with pytest.raises(ValueError, match=r"^rope_table: expected None.* rotated"):
        case.issue(refusals(case)[name])
    partly = refusals(case)["rope_table, a part"]
    case.attend(partly | {"rotary_start": 64})


def test_infinite_and_missing_numbers_stay_in_their_rows(device):
    case = AttentionCase(device, 13)
    args = rotated(case.arguments([40, 33], fmt="bf16", cache_fmt="nvfp4", widths=(128, 128),
                                  heads=(4, 2), page_size=16))  # fmt: skip
    want = device.to_numpy(case.issue(args))
    query = args["query"].view.copy()
    query[0, 1, 3], query[1, 2, 5] = np.nan, np.inf
    got = device.to_numpy(case.issue(args | {"query": case.place(query, "bf16")}))
    touched = np.zeros((2, 4), bool)
    touched[0, 1] = touched[1, 2] = True
    assert np.isnan(reference.decode(got, "bf16")[touched]).all()
    np.testing.assert_array_equal(got[~touched], want[~touched])


def test_a_cache_without_pages(device):
    cache = kv.view_as(device.empty((0, 4, 2, 72), np.uint8), "nvfp4+hadamard")
    case = AttentionCase(device, 14)
    query = case.queries("bf16", 2, 4, 128).array
    table, lens = (device.asarray(np.array(x, np.int32)) for x in ([[-1, -1], [-1, -1]], [5, 7]))
    out = kv.paged_attention(query, cache, cache, table, lens)
    assert not device.to_numpy(out).astype(np.float32).any()
    kv.check_faults(device)
