"""Attention over keys that are cached raw, and rotated when they are read.

The shapes "decode" and "few" take the decode kernel; "many" new tokens per sequence take tensor
cores in 16-bit formats.
"""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import SHAPES, AttentionCase, call_of, shapes

import kvcupy as kv


@pytest.mark.covering
@shapes
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("width", "dim", "start"),
    [(32, 16, 0), (32, 16, 16), (64, 48, 8), (40, 8, 32), (32, 24, 4), (36, 20, 3), (32, 2, 29),
     (128, 128, 0), (16, 6, 1), (192, 64, 128), (320, 64, 256)],
)  # fmt: skip
def test_part_of_a_row_is_rotated(device, width, dim, start, interleaved, shape):
    for fmt in ("fp32", "fp16"):
        case, args = call_of(
            device, 13, shape, fmt, widths=(width, 16), heads=(3, 1),
            rope={"dim": dim, "start": start, "interleaved": interleaved},
        )  # fmt: skip
        case.attend(args)


@shapes
def test_positions_past_the_table(device, shape):
    """They count as its last, or first; trees have any positions."""
    for fmt in ("fp32", "bf16"):
        lens, new = SHAPES[shape]
        case = AttentionCase(device, 14)
        args = case.arguments(lens, new, fmt=fmt, widths=(16, 16)) | case.rope(16, positions=6)
        case.attend(args)
        appended = [1] * len(lens) if new is None else new
        args |= case.nodes(lens, appended) | case.tail(lens, low=-4, high=12)
        case.attend(args)
        tail = args["tree_positions"].view.copy()
        tail[:, 0], tail[:, 1] = -(2**31), 2**31 - 1
        case.attend({**args, "tree_positions": case.place(tail, "int32")})


@shapes
@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_any_strides(device, interleaved, shape):
    """Rows apart, in reverse, and at addresses that are not aligned to words."""
    stores = {
        "every other": (lambda t: np.repeat(t, 2, axis=0), lambda a: a[::2]),
        "reversed": (lambda t: t[::-1], lambda a: a[::-1]),
        "wider": (lambda t: np.concatenate([t, t, t], 1), lambda a: a[:, 32:64]),
        "moved": (lambda t: np.concatenate([t[:, :1], t, t], 1), lambda a: a[:, 1:33]),
    }
    for store, cut in stores.values():
        case, args = call_of(
            device, 15, shape, "bf16", widths=(32, 32),
            rope={"dim": 32, "store": store, "cut": cut, "interleaved": interleaved},
        )  # fmt: skip
        case.attend(args)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("new", [None, [9, 6]])
def test_as_if_cached_rotated(device, interleaved, new):
    """`apply_rope` on keys, then attention, against keys that are rotated when read."""
    case = AttentionCase(device, 16)
    args = case.arguments([9, 6], new, heads=(2, 1), widths=(32, 16), page_size=16)
    rope = case.rope(32, interleaved=interleaved)
    out, lse = case.attend(args | rope)
    pages = args["k_cache"].view.copy()
    positions = np.tile(np.arange(16), len(pages))  # one page per sequence: offsets in it
    keys = device.asarray(np.nan_to_num(pages).reshape(-1, 1, 32))
    kv.apply_rope(
        None, keys, rope["rope_table"].array, device.asarray(positions), interleaved=interleaved
    )
    cached = np.asarray(device.to_numpy(keys)).reshape(pages.shape)
    got = case.attend({**args, "k_cache": case.place(cached, "fp32")})
    np.testing.assert_allclose(got[0].view, out.view, atol=2e-5)
    np.testing.assert_allclose(got[1].view, lse.view, atol=2e-5)


QUANTISED = [("int8", "dynamic", "dynamic"), ("fp8_e4m3", "dynamic", "per head"),
             ("fp8_e5m2", "per head", "dynamic"), ("int8", "float", "one element")]  # fmt: skip


@pytest.mark.covering
@shapes
@pytest.mark.parametrize(("cached", "k_scale", "v_scale"), QUANTISED)
def test_quantised_caches(device, cached, k_scale, v_scale, shape):
    for rope in ({"dim": 32}, {"dim": 16, "start": 16, "interleaved": True}, {"dim": 20}):
        case, args = call_of(
            device, 17, shape, "bf16", cache_fmt=cached, scales=(k_scale, v_scale), heads=(6, 3),
            evicted=True, starts=True, trees=True, rope=rope, page_size=3,
        )  # fmt: skip
        case.attend(args, window=9, sink_tokens=3)


@pytest.mark.parametrize(
    ("cached", "width", "rope"),
    [
        ("fp8_e4m3", 64, {"dim": 64}),
        ("int8", 128, {"dim": 64, "start": 48}),
        ("int8", 48, {"dim": 16, "start": 16, "interleaved": True}),
        ("fp8_e4m3", 192, {"dim": 128, "start": 64, "interleaved": True}),
        ("fp8_e5m2", 256, {"dim": 192, "start": 32}),
        ("fp8_e5m2", 128, {"dim": 128, "interleaved": True}),
    ],
    ids=str,
)
def test_bytes_on_tensor_cores(device, cached, width, rope):
    """Whole chunks of 16 elements, and queries whose rounding hides no other."""
    for shape in ("decode", "few"):
        case, args = call_of(
            device, 19, shape, "fp16", cache_fmt=cached, scales=("dynamic", "per head"),
            heads=(6, 2), widths=(width, 32), evicted=True, starts=True, trees=True, rope=rope,
        )  # fmt: skip
        case.attend(args, window=9, sink_tokens=3)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_largest_bytes(device, interleaved):
    """Rotated, 57344 twice is more than float16 has."""
    case = AttentionCase(device, 20)
    args = case.arguments([9, 70], fmt="fp16", cache_fmt="fp8_e5m2", heads=(2, 1), widths=(32, 32))
    keys = np.full_like(args["k_cache"].view, 57344)
    args["k_cache"] = case.place(keys, "fp8_e5m2", name="k_cache")
    case.attend(args | case.rope(32, interleaved=interleaved), sm_scale=1e-6)


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
@pytest.mark.parametrize("new", [None, [3, 2]])
def test_latent(device, fmt, new):
    """Rows of 576: the last 64 elements are rotated, the first 512 are values too."""
    case = AttentionCase(device, 18)
    args = case.arguments(
        [19, 6], new, fmt=fmt, heads=(16, 1), widths=(576, 1), page_size=16, loud=1.5,
        evicted=[(3, 5), (2, 1)],
    )  # fmt: skip
    latent = args["k_cache"].sub(lambda a: a[:, :, 0])
    args["k_cache"] = latent.sub(lambda a: a[:, :, None, :])
    args["v_cache"] = latent.sub(lambda a: a[:, :, None, :512])
    for interleaved in (False, True):
        rope = case.rope(64, start=512, interleaved=interleaved)
        case.attend(args | rope, sm_scale=192**-0.5)
