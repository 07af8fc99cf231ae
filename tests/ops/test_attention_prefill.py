"""Attention on tensor cores: the matrix operations of a warp, and the kernel against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import DTYPE, QUANTISED, address, compile_for_gpu, full_only
from prefill_calls import Call

import kvcupy as kv
from kvcupy.arrays import view
from kvcupy.config import SHARED_BYTES, shared_bytes
from kvcupy.devices import cxx
from kvcupy.devices.host import HostDevice
from kvcupy.kernels import Kernel
from kvcupy.ops import attention_choice
from kvcupy.ops import attention_kernels as kernels
from kvcupy.ops.attention import check_call, check_options
from kvcupy.ops.attention_call import AttentionArrays

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
@pytest.mark.parametrize("by_shuffles", ["false", "true"])
def test_a_warp_multiplies_matrices(own_device, fmt, by_shuffles):
    """Two warps with different matrices, in many orders of their lanes."""
    rng = np.random.default_rng(1)
    a = rng.standard_normal((2, 16, 16)).astype(DTYPE[fmt])
    b = rng.standard_normal((2, 16, 8)).astype(DTYPE[fmt])
    before = rng.standard_normal((2, 16, 8)).astype(np.float32)
    want = before + a.astype(np.float64) @ b.astype(np.float64)
    for seed in range(20):
        own_device.thread_order_seed = seed
        c = before.copy()
        launch_mma(
            own_device, "multiply", (FORMATS[fmt], by_shuffles), (32, 2, 1), 0, a=a, b=b, c=c
        )
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


# The kernel ----------------------------------------------------------------------------------


@pytest.fixture
def shuffled(device):
    """The host device, whose order of threads a test may choose."""
    if not isinstance(device, HostDevice):
        pytest.skip("the order of threads on a GPU cannot be chosen")
    yield device
    device.thread_order_seed = 0


KERNELS = ("prefill", "prefill of 128 rows", "decode", "decode of 8 rows")
CALLS = {
    "ragged": Call(),
    "bf16": Call(fmt="bf16"),
    "one row": Call(seq_lens=(1,), query_lens=(1,), heads=(1, 1)),
    "a whole tile": Call(seq_lens=(64,), query_lens=(64,), heads=(1, 1)),
    "one more than a tile": Call(seq_lens=(65,), query_lens=(65,), heads=(1, 1)),
    "nothing new in between": Call(seq_lens=(9, 30, 0, 40), query_lens=(9, 0, 0, 17)),
    "rows of no sequence": Call(padding=70),
    "groups that tiles cut": Call(heads=(10, 2), seq_lens=(30, 90), query_lens=(29, 14)),
    "many queries per key": Call(heads=(72, 1), seq_lens=(40, 3), query_lens=(2, 2)),
    "not causal": Call(causal=False),
    "window": Call(window=20),
    "window of one": Call(window=1, seq_lens=(100,), query_lens=(100,)),
    "window, not causal": Call(window=33, causal=False),
    "kept keys": Call(window=20, sink_keys=4, seq_lens=(200, 30), query_lens=(30, 30)),
    "many kept keys": Call(window=16, sink_keys=100, seq_lens=(260,), query_lens=(40,)),
    "soft cap": Call(soft_cap=2.0),
    "learned sinks": Call(learned=True, heads=(4, 2)),
    "learned sinks alone": Call(learned=True, seq_lens=(0, 8), query_lens=(3, 8)),
    "tree": Call(tree=True, seq_lens=(100, 40), query_lens=(24, 40)),
    "tree in a whole tile": Call(tree=True, seq_lens=(64, 128), query_lens=(3, 3)),
    "tree, groups that tiles cut": Call(tree=True, heads=(3, 1), seq_lens=(100,), query_lens=(60,)),
    "tree, window": Call(tree=True, window=50, sink_keys=3, seq_lens=(150,), query_lens=(30,)),
    "more new than there is": Call(seq_lens=(5, 40), query_lens=(20, 12)),
    "more new, not causal": Call(seq_lens=(5, 40), query_lens=(70, 12), causal=False),
    "more new in a whole tile": Call(seq_lens=(70,), query_lens=(100,), causal=False),
    "past a tile by one": Call(seq_lens=(100,), query_lens=(38,)),
    "splits": Call(splits=3, seq_lens=(600, 5), query_lens=(20, 5), padding=3),
    "splits, learned sinks aside": Call(splits=2, seq_lens=(450,), query_lens=(33,), window=390),
    "pages of five": Call(page_size=5),
    "one slot per page": Call(page_size=1, index="int64"),
    "large pages": Call(page_size=256, index="int64"),
    "missing pages": Call(page_size=8, missing=((0, 2), (2, 9))),
    "a tile of missing pages": Call(
        seq_lens=(120,), missing=((0, 0), (0, 1), (0, 2), (0, 3)), query_lens=(9,)
    ),
    "negative scale": Call(sm_scale=-0.3),
    "large scores": Call(sm_scale=30.0),
    "width 80": Call(widths=(80, 80)),
    "width 128": Call(widths=(128, 128), fmt="bf16"),
    "width 8": Call(widths=(8, 24)),
    "widths 192 and 128": Call(widths=(192, 128), seq_lens=(90,), query_lens=(20,)),
    "width 256": Call(widths=(256, 200), seq_lens=(90,), query_lens=(20,)),
}


KERNELS_OF_CALLS = [
    (name, kernel) if (i + j) % 2 == 0 else full_only(name, kernel)
    for i, (name, call) in enumerate(CALLS.items()) for j, kernel in enumerate(KERNELS)
    if kernel != "prefill of 128 rows" or call.widths[1] <= 128
]  # fmt: skip
"""Registers do not hold the sums of 128 rows that are wider."""


@pytest.mark.parametrize(("name", "kernel"), KERNELS_OF_CALLS)
def test_the_kernel(device, name, kernel):
    replace(CALLS[name], kernel=kernel).check(device)


@pytest.mark.covering
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["ragged", "kept keys", "tree", "splits", "width 80"])
def test_in_any_order_of_threads(shuffled, name, kernel):
    for seed in (1, 2, 3, 4):
        shuffled.thread_order_seed = seed
        replace(CALLS[name], kernel=kernel).check(shuffled)


# By the architecture whose shared memory decides how many keys a tile has: 16, or 32.
HEADS = {
    "sm_86": ["ragged", "tree, window", "a tile of missing pages"],
    "sm_80": ["bf16", "kept keys", "splits", "tree, groups that tiles cut"],
}
MORE_HEADS = {
    "sm_86": [
        "groups that tiles cut", "many queries per key", "soft cap", "nothing new in between",
    ],
    "sm_80": [
        "one row", "rows of no sequence", "window, not causal", "learned sinks", "missing pages",
        "width 8", "more new, not causal", "large scores",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "name"),
    [(arch, name) for arch, some in HEADS.items() for name in some]
    + [full_only(arch, name) for arch, some in MORE_HEADS.items() for name in some],
)
def test_the_kernel_for_many_heads(device, monkeypatch, arch, name):
    """Values that lie elsewhere than keys."""
    monkeypatch.setattr(kv.config, "_strict_arch", arch)
    replace(CALLS[name], kernel="heads", arch=arch).check(device)


@pytest.mark.parametrize("arch", HEADS)
def test_many_heads_in_any_order_of_threads(shuffled, monkeypatch, arch):
    monkeypatch.setattr(kv.config, "_strict_arch", arch)
    call = Call(kernel="heads", arch=arch, heads=(50, 1), seq_lens=(70,), query_lens=(1,))
    for seed in (1, 2):
        shuffled.thread_order_seed = seed
        call.check(shuffled)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("splits", [1, 2])
def test_a_page_past_the_end_is_reported(device, splits, kernel):
    """It is visible to the last tile of rows only."""
    device.fault_array()[...] = 0
    call = Call(seq_lens=(90,), query_lens=(90,), missing=((0, 5),), wrong_page=1000, splits=splits,
                kernel=kernel)  # fmt: skip
    try:
        call.check(device)
        count, operation, position, value = np.asarray(device.to_numpy(device.fault_array()))
        assert count >= 1 and (operation, position, value) == (77, 5, 1000)
    finally:
        device.fault_array()[...] = 0


@pytest.mark.parametrize("arch", ["", "sm_75", "sm_80", "sm_86", "sm_90"])
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
        if arch > "sm_75":  # which reserves nothing
            fitting = kernels.blocks_per_sm(size, shared_bytes(arch))
            program.append(f'static_assert({shape}::kFitting == {fitting}, "fitting blocks");')
        rest = kernels.decode_mma_rest_bytes(specialisation)
        program.append(f'static_assert({shape}::kRotatedBytes == {size + rest}, "bytes");')
    compile_for_gpu("\n".join(program), arch) if arch else cxx.check("\n".join(program))


def test_an_a100_runs_more_blocks_of_fewer_stages():
    wide = kernels.decode_mma_specialisation("nvfp4", 256, 256, rows=8)
    sizes = {arch: kernels.decode_mma_smem_bytes(wide, arch) for arch in ("sm_80", "sm_90")}
    assert kernels.blocks_per_sm(sizes["sm_80"], shared_bytes("sm_80")) >= 2
    assert kernels.blocks_per_sm(sizes["sm_90"], shared_bytes("sm_80")) == 1
    # Memory binds these: they keep their stages.
    for fmt, widths, rows in (("int8", (128, 128), 8), ("bf16", (192, 128), 16)):
        other = kernels.decode_mma_specialisation(fmt, *widths, rows=rows)
        sizes = {kernels.decode_mma_smem_bytes(other, arch) for arch in ("sm_80", "sm_86")}
        assert len(sizes) == 1


def test_the_geometry_of_wide_rows_is_the_kernels():
    program = ['#include "attention_decode_latent.cu"']
    program.append(f'static_assert(kLatentWidth == {kernels.LATENT_WIDTHS[0]}, "width of K");')
    program.append(f'static_assert(kLatentWidthV == {kernels.LATENT_WIDTHS[1]}, "width of V");')
    for fmt in kernels.DECODE_MMA_FORMATS:
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


# Which calls take it ---------------------------------------------------------------------


def described(*, tokens=32, sequences=2, heads=(2, 1), fmt="fp16", widths=(64, 64), shift=0,
              cache_fmt=None, **more):  # fmt: skip
    """Describe a call; `shift` unused elements follow each row of the caches."""
    arrays = {
        "query": np.zeros((tokens, heads[0], widths[0]), DTYPE[fmt]),
        "out": np.zeros((tokens, heads[0], widths[1]), DTYPE[fmt]),
        "block_table": np.zeros((sequences, 4), np.int32),
        "seq_lens": np.zeros(sequences, np.int32),
        "query_lens": np.zeros(sequences, np.int32),
    }
    for name, width in zip(("k_cache", "v_cache"), widths, strict=True):
        whole = np.zeros((3, 16, heads[1], width + shift), DTYPE[cache_fmt or fmt])
        arrays[name] = whole[..., :width]
    arguments = {name: view(array, name) for name, array in arrays.items()}
    return check_call(
        AttentionArrays(**(arguments | more)), check_options("NHD", None, True, None, None, None)
    )


AMPERE = SimpleNamespace(warp_lanes=32, arch="sm_80", shared_bytes=163 << 10)
TURING = SimpleNamespace(warp_lanes=32, arch="sm_75", shared_bytes=64 << 10)  # fp16 alone
HOST = SimpleNamespace(warp_lanes=1, arch="host", shared_bytes=99 << 10)
FP32_OUT = {"out": view(np.zeros((32, 2, 64), np.float32), "out")}
MIXED = {"v_cache": view(np.zeros((3, 16, 1, 128), DTYPE["fp8_e4m3"]), "v_cache")}
SUITED = [  # a device, a call, and whether prefill takes it, and decode on tensor cores
    (AMPERE, {}, True, True),
    (AMPERE, {"fmt": "bf16", "widths": (192, 128), "heads": (8, 2), "tokens": 8}, True, True),
    (AMPERE, {"fmt": "bf16", "tokens": 2, "heads": (1, 1)}, False, True),
    (AMPERE, {"widths": (80, 8), "shift": 8}, True, True),
    (AMPERE, FP32_OUT, True, True),
    (TURING, {"widths": (192, 128)}, True, True),
    *(
        row for fmt in QUANTISED for row in (
            (AMPERE, {"fmt": "bf16", "cache_fmt": fmt, "widths": (192, 128), "k_scale": 0.5,
                      "tokens": 34}, True, True),
            (AMPERE, {"cache_fmt": fmt, "widths": (80, 16), "shift": 16, "tokens": 34}, True, True),
            (AMPERE, {"cache_fmt": fmt}, True, True),  # decode is slower from its second tile on
            (TURING, {"fmt": "bf16", "cache_fmt": fmt, "widths": (192, 128)}, False, True),
        )
    ),
    (AMPERE, {"cache_fmt": "int8", "widths": (128, 128), **MIXED}, True, False),
    (AMPERE, {"fmt": "fp32"}, False, False),
    (AMPERE, {"fmt": "fp32", "cache_fmt": "int8"}, False, False),
    (AMPERE, {"cache_fmt": "bf16"}, False, False),
    (AMPERE, {"cache_fmt": "fp8_e4m3", "tokens": 16}, False, True),  # one tile of decode
    (AMPERE, {"cache_fmt": "fp8_e4m3", "widths": (128, 128)}, False, True),  # two
    (AMPERE, {"cache_fmt": "fp8_e4m3", "widths": (72, 64)}, False, False),
    (AMPERE, {"cache_fmt": "fp8_e4m3", "shift": 8}, False, False),
    (AMPERE, {"widths": (264, 64)}, False, False),
    (AMPERE, {"widths": (64, 264)}, False, False),
    (AMPERE, {"widths": (68, 64)}, False, False),
    (AMPERE, {"shift": 4}, False, False),
    (AMPERE, {"alignment": 8}, False, False),
    (AMPERE, {"tokens": 15}, False, True),
    (AMPERE, {"sequences": 5}, False, True),
    (HOST, {}, False, False),
    (TURING, {"fmt": "bf16"}, False, False),
    (TURING, {"widths": (256, 256)}, False, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "call", "prefill", "decode"), SUITED, ids=[str(i) for i in range(len(SUITED))]
)
def test_what_kernels_on_tensor_cores_take(device, call, prefill, decode):
    call = dict(call)
    alignment = call.pop("alignment", 256)
    call = described(**call)
    assert attention_choice.suits_prefill(device, call, alignment) == prefill
    reason = attention_choice.decode_mma_unsupported_reason(device, call, alignment)
    assert bool(reason) != decode


def test_which_wide_rows_are_latents():
    wide = {"widths": (576, 512)}
    unsupported = attention_choice.latent_unsupported_reason
    for call in (wide, {"fmt": "bf16", "cache_fmt": "int8", **wide}):
        assert not unsupported(AMPERE, described(**call), 256)
    for call in ({"widths": (584, 512)}, {"widths": (576, 520)}, {"fmt": "fp32", **wide}):
        assert unsupported(AMPERE, described(**call), 256)
    assert unsupported(TURING, described(**wide), 256)
    assert unsupported(HOST, described(**wide), 256)
