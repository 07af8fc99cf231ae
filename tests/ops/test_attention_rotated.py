"""`paged_attention` over four-bit caches whose rows were rotated before they were stored."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import AttentionCase, Views, as_rotated, rotated
from helpers import full_only

from kvcupy import formats, reference

WIDTHS = [
    (fmt, width)
    for fmt, form in formats.FOUR_BIT.items()
    for width in range(form.group, 257, form.group)
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("fmt", "width"), WIDTHS)
@pytest.mark.parametrize(
    ("query", "heads"), [("fp32", (6, 2)), ("bf16", (6, 2)), ("bf16", (12, 2))]
)
def test_widths(device, fmt, width, query, heads):
    """Blocks of 16 to 256, on tensor cores and on the plain path; grouped heads."""
    case = AttentionCase(device, 2)
    args = case.arguments([70, 33], [2, 1], fmt=query, cache_fmt=fmt, widths=(width, width),
                          heads=heads, page_size=16, scales=("float", "per head"))  # fmt: skip
    case.attend(rotated(args))


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


@pytest.mark.parametrize("fmt", ["nvfp4", full_only("mxfp4"), "int4"])
def test_where_each_thread_takes_rows_of_its_own(users_device, fmt):
    case = AttentionCase(users_device, 10)
    for new in ([5, 0, 1], None, [33, 0, 2]):
        args = case.arguments([41, 0, 9], new, fmt="bf16", cache_fmt=fmt, widths=(128, 192),
                              heads=(6, 2), page_size=16, scales=("per head", "float"))  # fmt: skip
        case.attend(rotated(args))
        case.attend(rotated(args, "v_cache"))
        case.attend(args | {"k_cache": as_rotated(args["k_cache"], 64)})


@pytest.mark.parametrize("fmt", ["nvfp4", "int4"])
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
