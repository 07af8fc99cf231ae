"""Prefill over caches of 8 and 4 bits, whose tiles are dequantised once for all rows of a block."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import AttentionCase
from helpers import QUANTISED, from_values, full_only

from kvcupy import reference
from kvcupy.ops import attention_choice, call
from kvcupy.ops import attention_kernels as kernels

LENS, NEW = [70, 5, 131, 0], [70, 3, 60, 0]
EIGHT_BITS = [(fmt, cache) for fmt in ("bf16", "fp16") for cache in QUANTISED]
FOUR_BITS = [("bf16", "nvfp4"), ("bf16", "mxfp4"), ("fp16", "nvfp4")]
MIXED = [("bf16", ("fp8_e4m3", "int8")), ("fp16", ("int8", "fp8_e5m2"))]
SHAPES = {
    "64": {"widths": (64, 64), "heads": (4, 2)},
    "128": {"widths": (128, 128), "heads": (8, 1)},
    "192, 128": {"widths": (192, 128), "heads": (2, 2)},
    "256": {"widths": (256, 256), "heads": (2, 1)},
    "padded": {"widths": (80, 48), "heads": (6, 2)},
}


def combinations():
    """Yield formats of query and caches, and shapes; scales of four bits are whole words."""
    for pair in (*EIGHT_BITS, *FOUR_BITS, *MIXED):
        for shape, options in SHAPES.items():
            unit = {"nvfp4": 64, "mxfp4": 128}.get(pair[1], 1)
            if all(n % unit == 0 for n in options["widths"]):
                yield pair, shape


@pytest.fixture(params=kernels.PREFILL_ROWS, autouse=True)
def rows(device, request, monkeypatch):
    """Packed rows per tile; a test fails if no launch was of the prefill kernel for them."""
    if "256" in request.node.name and request.param > kernels.PREFILL_ROWS[0]:
        pytest.skip("registers do not hold the sums")
    if device.kind == "host":  # on a GPU its shared memory decides
        monkeypatch.setattr(kernels, "is_reachable", lambda *_: True)
        monkeypatch.setattr(attention_choice, "_choose_prefill_rows", lambda *_: request.param)
    monkeypatch.setattr(call, "_plans", {})
    launched = []
    launch = device.launch

    def record(function, *arguments, **options):
        launched.append(function.specialisation)
        return launch(function, *arguments, **options)

    monkeypatch.setattr(device, "launch", record)
    yield request.param
    prefills = [s for s in launched if s.kernel is kernels.PREFILL and s.arguments[-1] == "true"]
    assert prefills
    if device.kind == "host":
        assert {kernels.prefill_rows(s) for s in prefills} == {request.param}


@pytest.mark.parametrize(
    "pair, shape",
    [each if i % 3 == 0 else full_only(*each) for i, each in enumerate(combinations())], ids=str,
)  # fmt: skip
def test_formats_and_widths(device, rows, pair, shape):
    fmt, cache_fmt = pair
    case = AttentionCase(device, 1)
    scales = ("per head", "float")
    case.attend(case.arguments(LENS, NEW, fmt=fmt, cache_fmt=cache_fmt, page_size=16,
                               scales=scales, loud=1.0, **SHAPES[shape]))  # fmt: skip


@pytest.mark.parametrize(
    "kinds",
    [("dynamic", "dynamic"), ("dynamic", "per head"), ("one element", "dynamic"), ("none", "none")],
    ids="-".join,
)
@pytest.mark.parametrize("pair", EIGHT_BITS, ids="-".join)
def test_scales(device, pair, kinds):
    case = AttentionCase(device, 2)
    case.attend(case.arguments(LENS, NEW, fmt=pair[0], cache_fmt=pair[1], page_size=16,
                               scales=kinds, loud=1.0, **SHAPES["64"]))  # fmt: skip


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_dynamic_scales_that_rise_and_fall(device, fmt):
    """By 2**20 from tile to tile; weights of values are relative to the largest so far."""
    case = AttentionCase(device, 3)
    args = case.arguments([300], [40], fmt=fmt, cache_fmt="int8", page_size=16, loud=0.5,
                          scales=("dynamic", "dynamic"), heads=(2, 1), widths=(64, 64))  # fmt: skip
    table, scales = args["block_table"].view[0], args["v_scale_cache"].view
    for page, entry in enumerate(table[:19]):
        scales[entry * 16 : entry * 16 + 16] *= np.float32(2.0 ** [-10, 0, -20, 0][page // 4 % 4])
    args["v_scale_cache"].buffer.restore()
    case.attend(args)


MASKS = {
    "window": {"window": 9},
    "window and first keys": {"window": 9, "sink_tokens": 3},
    "soft cap": {"logits_soft_cap": 5.0},
    "not causal": {"causal": False},
    "another scale": {"sm_scale": 0.3},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "cache_fmt, scales", [("fp8_e4m3", "float"), ("int8", "dynamic"), ("nvfp4", "float")]
)
def test_masks(device, cache_fmt, scales, mask):
    case = AttentionCase(device, 5)
    args = case.arguments(LENS, NEW, fmt="bf16", cache_fmt=cache_fmt, page_size=16, loud=1.0,
                          scales=(scales, scales), **SHAPES["64"])  # fmt: skip
    case.attend(args, **MASKS[mask])


@pytest.mark.parametrize("cache_fmt", ["int8", "mxfp4"])
def test_trees_and_learned_sinks(device, cache_fmt):
    case = AttentionCase(device, 6)
    lens, new = [70, 30, 131], [20, 30, 9]
    args = case.arguments(lens, new, fmt="bf16", cache_fmt=cache_fmt, page_size=16, loud=1.0,
                          scales=("per head", "per head"), **SHAPES["128"])  # fmt: skip
    args |= {"tree_mask": case.tree(new), "sinks": case.sinks(8)}
    case.attend(args)


@pytest.mark.covering
@pytest.mark.parametrize("how", ["HND", "HND by strides", "combined HND", "every other page"])
@pytest.mark.parametrize("page_size", [1, 7, 64])
@pytest.mark.parametrize("cache_fmt", ["fp8_e5m2", "nvfp4"])
def test_layouts_and_page_sizes(device, cache_fmt, page_size, how):
    case = AttentionCase(device, 7)
    case.attend(case.arguments(
        LENS, NEW, fmt="bf16", cache_fmt=cache_fmt, page_size=page_size, how=how, loud=1.0,
        scales=("per head", "float"), index=("int64", "int32"), spare_heads=3, padding=2,
        heads=(8, 4), widths=(64, 64),
    ))  # fmt: skip


@pytest.mark.parametrize("cache_fmt", ["fp8_e4m3", "mxfp4"])
def test_what_a_step_has(device, cache_fmt):
    """Evicted spans, first keys, and pages that are missing."""
    case = AttentionCase(device, 8)
    args = case.arguments([70, 40], [30, 40], fmt="bf16", cache_fmt=cache_fmt, page_size=16,
                          loud=1.0, scales=("float", "float"), evicted=[(10, 33), (0, 16)],
                          key_starts=[3, 0], **SHAPES["128"])  # fmt: skip
    args["block_table"].view[1, 2] = -1
    args["block_table"].buffer.restore()
    case.attend(args)


def test_long_sequences_are_cut_into_pieces(device):
    case = AttentionCase(device, 9)
    scales = ("dynamic", "dynamic")
    case.attend(case.arguments([2600, 900], [20, 40], fmt="bf16", cache_fmt="fp8_e4m3",
                               page_size=64, loud=0.5, scales=scales, **SHAPES["64"]))  # fmt: skip


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_small_elements_of_queries_count(device, fmt):
    """Queries are not converted: small elements count beside any other."""
    case = AttentionCase(device, 10)
    args = case.arguments([40], [40], fmt=fmt, cache_fmt="fp8_e4m3", page_size=16, heads=(2, 1),
                          widths=(64, 64), loud=1.0)  # fmt: skip
    args["query"].view[..., 0] = from_values(2.0**15, fmt)
    bits = reference.bits_of(args["k_cache"].view, "fp8_e4m3")
    bits[..., 0] = 0
    for name in ("query", "k_cache"):
        args[name].buffer.restore()
    out, lse = case.results(args)
    case.issue(args, out, lse)
    views = {n: getattr(a, "view", a) for n, a in args.items()}
    want = reference.paged_attention(**views)[1]
    np.testing.assert_allclose(lse.live(), want, rtol=1e-5, atol=1e-5)
