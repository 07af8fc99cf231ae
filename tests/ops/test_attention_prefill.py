"""Attention of many new tokens on tensor cores: tiles of 64 and of 128 rows, over caches of 16, 8
and 4 bits; the matrix operations of a warp; and that Python plans with the kernels' geometry."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attention_cases import AttentionCase
from helpers import DTYPE, QUANTISED, address, compile_for_gpu, from_values, full_only

from kvcupy import reference
from kvcupy.config import SHARED_BYTES, shared_bytes
from kvcupy.devices import cxx
from kvcupy.kernels import Kernel
from kvcupy.ops import attention_choice, call
from kvcupy.ops import attention_kernels as kernels

FORMATS = {"fp16": "half", "bf16": "bfloat16"}
MMA = np.dtype([("a", "u8"), ("b", "u8"), ("c", "u8"), ("rows", "i4")], align=True)


# Matrices ------------------------------------------------------------------------------------


def launch_mma(device, name, arguments, block, smem, *, rows=0, **arrays):
    params = np.zeros((), MMA)
    params["rows"] = rows
    for key, array in arrays.items():
        params[key] = address(array)
    function = device.load(
        Kernel("mma.cu", name, MMA, "MmaParams", barriers=True).specialise(*arguments)
    )
    stream = device.as_stream(None)
    device.launch(function, (1, 1, 1), block, smem, params.tobytes(), stream, tuple(arrays))


@pytest.fixture
def own_device(kernel_sources):
    """A host device with the kernels of `mma.cu` too."""
    kernel_sources.add("mma.cu")
    return kernel_sources.device()


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_warp_multiplies_matrices(own_device, fmt):
    """Two warps with different matrices, in many orders of their lanes."""
    rng = np.random.default_rng(1)
    a = rng.standard_normal((2, 16, 16)).astype(DTYPE[fmt])
    b = rng.standard_normal((2, 16, 8)).astype(DTYPE[fmt])
    before = rng.standard_normal((2, 16, 8)).astype(np.float32)
    want = before + a.astype(np.float64) @ b.astype(np.float64)
    for seed in range(20):
        own_device.thread_order_seed = seed
        c = before.copy()
        launch_mma(own_device, "multiply", (FORMATS[fmt],), (32, 2, 1), 0, a=a, b=b, c=c)
        np.testing.assert_allclose(c, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_warp_loads_matrices(own_device, transposed):
    matrices = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    want = matrices.copy()
    want.reshape(32, 8)[21:] = 0
    want = want.swapaxes(1, 2) if transposed else want
    for seed in range(20):
        own_device.thread_order_seed = seed
        got = np.zeros((4, 8, 4, 2), np.uint16)
        source = own_device.asarray(matrices)
        arguments = (str(transposed).lower(),)
        launch_mma(own_device, "load", arguments, (32, 1, 1), 512, b=source, c=got, rows=21)
        np.testing.assert_array_equal(got.reshape(4, 8, 8), want)


# Geometry --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["", "sm_80", "sm_86", "sm_90"])
def test_the_geometry_of_decode_is_the_kernels(arch):
    """Of the host device ("") and of GPUs; they differ in their shared memory and its stages."""
    program = [
        '#include "attention_decode_mma.cu"',
        f'static_assert(kDecodeRows == {kernels.DECODE_MMA_ROWS}, "rows");',
        f'static_assert(kDecodeThreads == {kernels.DECODE_MMA_THREADS}, "threads");',
    ]
    for fmt, widths, rows in itertools.product(
        kernels.DECODE_MMA_FORMATS, kernels.PREFILL_WIDTHS, kernels.DECODE_MMA_ROW_COUNTS
    ):
        specialisation = kernels.decode_mma_specialisation(fmt, *widths, rows=rows)
        shape = f"DecodeShape<{', '.join(specialisation.arguments)}>"
        size = kernels.decode_mma_smem_bytes(specialisation, arch)
        assert size <= 99 * 1024, "the limit of a block on every architecture from sm_80 on"
        program.append(f'static_assert({shape}::kBytes == {size}, "bytes");')
        blocks = kernels.decode_mma_blocks(specialisation)
        if (rows, *widths) != (16, 64, 64):  # of which fewer are planned than fit
            program.append(f'static_assert({shape}::kMostBlocks == {blocks}, "blocks");')
        if arch:
            fitting = kernels.blocks_per_sm(size, shared_bytes(arch))
            program.append(f'static_assert({shape}::kFitting == {fitting}, "fitting blocks");')
        rest = kernels.decode_mma_rest_bytes(specialisation)
        program.append(f'static_assert({shape}::kRotatedBytes == {size + rest}, "bytes");')
    compile_for_gpu("\n".join(program), arch) if arch else cxx.check("\n".join(program))


def test_the_geometry_of_wide_rows_is_the_kernels():
    program = ['#include "attention_decode_latent.cu"']
    program.append(f'static_assert(kLatentWidth == {kernels.LATENT_WIDTHS[0]}, "width of K");')
    program.append(f'static_assert(kLatentWidthV == {kernels.LATENT_WIDTHS[1]}, "width of V");')
    for fmt in (*kernels.LATENT_FORMATS, kernels.WIDE_FOUR_BIT):
        specialisation = kernels.latent_specialisation(fmt)
        size = kernels.latent_smem_bytes(specialisation)
        assert size <= 99 * 1024, "the limit of a block on every architecture from sm_80 on"
        named = specialisation.arguments[0]
        program.append(f'static_assert(LatentShape<{named}>::kBytes == {size}, "bytes");')
    cxx.check("\n".join(program))


def test_the_geometry_of_many_heads_is_the_kernels():
    program = [
        '#include "attention_decode_heads.cu"',
        f'static_assert(kHeadsRows == {kernels.HEADS_ROWS}, "rows");',
        f'static_assert(kHeadsThreads == {kernels.HEADS_THREADS}, "threads");',
    ]
    for fmt, arch in itertools.product(kernels.LATENT_FORMATS, SHARED_BYTES):
        if arch == "sm_75":
            continue
        specialisation = kernels.heads_specialisation(fmt, SHARED_BYTES[arch])
        size = kernels.heads_smem_bytes(specialisation)
        assert size <= SHARED_BYTES[arch]
        assert kernels.is_reachable(specialisation, arch)
        named = ", ".join(specialisation.arguments)
        program.append(f'static_assert(HeadsShape<{named}>::kBytes == {size}, "bytes");')
    for arch, keys in {"sm_103": "32", "sm_87": "32", "sm_121": "16", "sm_999": "16"}.items():
        assert kernels.heads_specialisation("bf16", shared_bytes(arch)).arguments[1] == keys
    cxx.check("\n".join(program))


def test_the_geometry_of_a_launch_is_the_kernels():
    program = [
        '#include "attention_prefill.cu"',
        f'static_assert(kPrefillThreads == {kernels.PREFILL_THREADS}, "threads");',
    ]
    for specialisation in kernels.specialisations():
        if specialisation.kernel is not kernels.PREFILL or specialisation.arguments[0] != "half":
            continue
        named = ", ".join(specialisation.arguments[1:])
        size = kernels.prefill_smem_bytes(specialisation)
        assert size <= 99 * 1024, "the limit of a block on every architecture from sm_80 on"
        program.append(f'static_assert(PrefillShape<{named}>::kBytes == {size}, "bytes");')
    cxx.check("\n".join(program))


# Tiles of 64 and 128 rows ---------------------------------------------------------------------

LENS, NEW = [70, 5, 131, 0], [70, 3, 60, 0]


@pytest.fixture(params=kernels.PREFILL_ROWS)
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
    prefills = [s for s in launched if s.kernel is kernels.PREFILL]
    assert prefills
    if device.kind == "host":
        assert {kernels.prefill_rows(s) for s in prefills} == {request.param}


WINDOW, KEPT = {"window": 20}, {"window": 16, "sink_tokens": 100}
CALLS = {  # lengths, new tokens, arguments, and options
    "one new sequence": ([64], [64], {"heads": (1, 1)}, {}),
    "one more than a tile": ([65], [65], {"heads": (1, 1)}, {}),
    "nothing new in between": ([30, 30, 0, 40], [29, 0, 0, 37], {}, {}),
    "rows of no sequence": (LENS, NEW, {"padding": 70}, {}),
    "heads that tiles cut": ([30, 90], [29, 14], {"heads": (10, 2)}, {}),
    "many queries per key": ([40, 3], [2, 2], {"heads": (72, 1)}, {}),
    "not causal": ([5, 40], [70, 12], {}, {"causal": False}),
    "window": (LENS, NEW, {}, WINDOW),
    "window of one": ([100], [100], {}, {"window": 1}),
    "window, not causal": (LENS, NEW, {}, {"window": 33, "causal": False}),
    "many kept keys": ([260], [40], {}, KEPT),
    "soft cap": (LENS, NEW, {}, {"logits_soft_cap": 2.0}),
    "large scores": (LENS, NEW, {}, {"sm_scale": 3.0}),
    "pages of five": (LENS, NEW, {"page_size": 5}, {}),
    "one slot per page": (LENS, NEW, {"page_size": 1, "index": ("int64", "int64")}, {}),
    "width 80": (LENS, NEW, {"widths": (80, 80)}, {}),
    "width 8": (LENS, NEW, {"widths": (8, 24)}, {}),
    "width 128": (LENS, NEW, {"widths": (128, 128)}, {}),
    "widths 192 and 128": ([90], [20], {"widths": (192, 128)}, {}),
    "widths 256 and 200": ([90], [20], {"widths": (256, 200)}, {}),
    "pieces": ([2600, 5], [20, 5], {"padding": 3, "heads": (2, 1), "page_size": 64}, {}),
}


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("name", CALLS)
def test_calls(device, name):
    lens, new, arguments, options = CALLS[name]
    case = AttentionCase(device, 11)
    fmt = "bf16" if len(name) % 2 else "fp16"
    arguments = {"heads": (4, 2), "widths": (64, 64), "page_size": 16, **arguments}
    args = case.arguments(lens, new, fmt=fmt, **arguments)
    case.attend(args, **options)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("window", [None, 50])
def test_trees_learned_sinks_and_missing_pages(device, window):
    case = AttentionCase(device, 12)
    lens, new = [150, 40], [30, 40]
    args = case.arguments(lens, new, fmt="bf16", heads=(3, 1), widths=(64, 64), page_size=16)
    args["block_table"].view[0, 1] = -1
    args["block_table"].buffer.restore()
    case.attend(args, tree_mask=case.tree(new), sinks=case.sinks(3), window=window)


# Caches of 8 and 4 bits -----------------------------------------------------------------------

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


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    "pair, shape",
    [each if i % 3 == 0 else full_only(*each) for i, each in enumerate(combinations())], ids=str,
)  # fmt: skip
def test_formats_and_widths(device, pair, shape):
    fmt, cache_fmt = pair
    case = AttentionCase(device, 1)
    scales = ("per head", "float")
    case.attend(case.arguments(LENS, NEW, fmt=fmt, cache_fmt=cache_fmt, page_size=16,
                               scales=scales, loud=1.0, **SHAPES[shape]))  # fmt: skip


@pytest.mark.usefixtures("rows")
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


@pytest.mark.usefixtures("rows")
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


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "cache_fmt, scales", [("fp8_e4m3", "float"), ("int8", "dynamic"), ("nvfp4", "float")]
)
def test_masks(device, cache_fmt, scales, mask):
    case = AttentionCase(device, 5)
    args = case.arguments(LENS, NEW, fmt="bf16", cache_fmt=cache_fmt, page_size=16, loud=1.0,
                          scales=(scales, scales), **SHAPES["64"])  # fmt: skip
    case.attend(args, **MASKS[mask])


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("cache_fmt", ["int8", "mxfp4"])
def test_trees_and_learned_sinks(device, cache_fmt):
    case = AttentionCase(device, 6)
    lens, new = [70, 30, 131], [20, 30, 9]
    args = case.arguments(lens, new, fmt="bf16", cache_fmt=cache_fmt, page_size=16, loud=1.0,
                          scales=("per head", "per head"), **SHAPES["128"])  # fmt: skip
    args |= {"tree_mask": case.tree(new), "sinks": case.sinks(8)}
    case.attend(args)


@pytest.mark.usefixtures("rows")
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


@pytest.mark.usefixtures("rows")
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


@pytest.mark.usefixtures("rows")
def test_long_sequences_are_cut_into_pieces(device):
    case = AttentionCase(device, 9)
    scales = ("dynamic", "dynamic")
    case.attend(case.arguments([2600, 900], [20, 40], fmt="bf16", cache_fmt="fp8_e4m3",
                               page_size=64, loud=0.5, scales=scales, **SHAPES["64"]))  # fmt: skip


@pytest.mark.usefixtures("rows")
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
