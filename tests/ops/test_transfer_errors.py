"""Wrong arguments of `transfer_pages`: errors before anything is written."""

from __future__ import annotations

import re

import numpy as np
import pytest
from transfer_cases import METHODS, TransferCase

import kvcupy as kv

BOTH = (TypeError, ValueError)
SRC, DST = [2, 5, 0], [4, 1, 3]


def giving(**changes):
    return lambda c: changes


def other_pool(side, **geometry):
    """Replace one of the pools."""
    return lambda c: {side: c.pool(**{"pages": 7, **geometry}).pool}


def quantised(src_scales, dst_scales, **options):
    return lambda c: {
        "src_pool": c.pool(fmt="int8", scales=src_scales).pool,
        "dst_pool": c.pool("page_first", "int8", scales=dst_scales).pool,
        **options,
    }


def formats(src, dst, **options):
    return lambda c: {"src_pool": c.pool(fmt=src).pool, "dst_pool": c.pool(fmt=dst).pool, **options}


def error_cases():
    """Yield (id, error, the argument that the message names, changes to a valid call)."""
    for side in ("src_pool", "dst_pool"):
        for value in (None, "pool", 3, np.zeros((2, 3, 4, 2, 8), np.float32)):
            yield f"{side} {type(value).__name__}", TypeError, side, giving(**{side: value})
        yield (
            f"{side} an array of a pool",
            TypeError,
            side,
            lambda c, s=side: {s: c.pool().pool.k(0)},
        )

    unlike = {
        "page_size": {"page_size": 5},
        "layers": {"layers": 4},
        "heads": {"heads": 3},
        "width of K": {"widths": (7, 6)},
        "width of V": {"widths": (8, 8)},
        "widths exchanged": {"widths": (6, 8)},
        "heads and widths of as many bytes": {"heads": 4, "widths": (4, 3)},
        "format": {"fmt": "fp16"},
        "quantised format": {"fmt": "int8"},
        "format of as many bytes": {"fmt": "fp8_e4m3", "widths": (16, 12)},
        "a latent of one head": {"latent": 8},
        "a latent of as many bytes": {"latent": 16},
    }
    for name, geometry in unlike.items():
        for convert in (False, True):
            if convert and geometry.keys() == {"fmt"}:
                continue  # that is what converting is for
            for side in ("src_pool", "dst_pool"):
                yield (
                    f"{side} {name} {convert}",
                    ValueError,
                    "dst_pool",
                    lambda c, s=side, g=geometry, v=convert: {
                        **other_pool(s, **g)(c),
                        "convert": v,
                    },
                )
    yield (
        "latents of unlike widths",
        ValueError,
        "dst_pool",
        lambda c: {"src_pool": c.pool(latent=8).pool, "dst_pool": c.pool(latent=9).pool},
    )
    for src_scales, convert in ((a, b) for a in (False, True) for b in (False, True)):
        yield (
            f"scales of one side {src_scales} {convert}",
            ValueError,
            "dst_pool",
            quantised(src_scales, not src_scales, convert=convert),
        )
    yield "unlike 8-bit formats", ValueError, "dst_pool", formats("fp8_e4m3", "fp8_e5m2")
    for src, dst in (("bf16", "fp16"), ("bf16", "int8"), ("fp8_e4m3", "int8")):
        yield (
            f"copy that converts {src} to {dst}",
            ValueError,
            "method",
            formats(src, dst, convert=True, method="copy"),
        )

    for method in ("fast", "", "KERNEL"):
        yield f"method {method!r}", ValueError, "method", giving(method=method)
    for method in (None, 3, ["kernel"]):
        yield f"method {method}", BOTH, "method", giving(method=method)
    for layers in (3, -1, 2**40, [0, 3], [-1], [1, 1], [0, 2, 0], np.int64(3)):
        yield f"layers {layers!r}", ValueError, "layers", giving(layers=layers)
    for layers in (True, False, 1.0, "0", [True], [0, False], [0.0, 1.0], [[0, 1]], [None], ["1"]):
        yield f"layers {layers!r}", TypeError, "layers", giving(layers=layers)
    for max_blocks in (0, -1, -(2**40)):
        yield (
            f"max_blocks {max_blocks}",
            ValueError,
            "max_blocks",
            giving(max_blocks=max_blocks),
        )
    for max_blocks in (True, False, 2.0, "2", [2]):
        yield (
            f"max_blocks {max_blocks}",
            TypeError,
            "max_blocks",
            giving(max_blocks=max_blocks),
        )

    for side in ("src_pages", "dst_pages"):
        pages = SRC if side == "src_pages" else DST
        for dtype in (np.float32, np.float64, np.int16, np.uint8, np.uint64, np.bool_):
            yield (
                f"{side} {np.dtype(dtype).name}",
                TypeError,
                side,
                lambda c, s=side, d=dtype: {s: c.device.zeros((3,), d)},
            )
        for shape in ((3, 1), (1, 3), (), (3, 0)):
            yield (
                f"{side} of shape {shape}",
                ValueError,
                side,
                lambda c, s=side, n=shape: {s: c.device.zeros(n, np.int64)},
            )
        for value in ([0.0, 1.0, 2.0], [True, 1, 2], ["0", "1", "2"], [None] * 3, [[0], [1], [2]]):
            yield f"{side} {value}", BOTH, side, giving(**{side: value})
        yield f"{side} a number", BOTH, side, giving(**{side: 3})
        yield f"{side} None", TypeError, side, giving(**{side: None})
        yield f"{side} a string", BOTH, side, giving(**{side: "012"})
        yield (
            f"{side} longer",
            ValueError,
            "src_pages|dst_pages",
            giving(**{side: [*pages, 6]}),
        )
        yield f"{side} empty", ValueError, "src_pages|dst_pages", giving(**{side: []})
        yield (
            f"{side} shorter array",
            ValueError,
            "src_pages|dst_pages",
            lambda c, s=side: {s: c.indices([0, 1]).array},
        )
    for stream in ("main", 7):
        yield f"stream {stream}", TypeError, "stream", giving(stream=stream)


CASES = {name: rest for name, *rest in error_cases()}


def refused(case, call, error, name):
    """The call raises, names the argument, changes no memory and records no fault."""
    with pytest.raises(error) as caught:
        kv.transfer_pages(**call)
    assert not isinstance(caught.value, kv.KvcupyError), caught.value
    assert re.search(rf"\b({name})\b", str(caught.value)), f"{name} not in {caught.value}"
    case.finish()


@pytest.mark.parametrize("wrong", CASES)
def test_wrong_arguments(device, wrong):
    error, name, change = CASES[wrong]
    case = TransferCase(device, 1)
    call = {
        "src_pool": case.pool(pages=9).pool,
        "dst_pool": case.pool("page_first", pages=7).pool,
        "src_pages": SRC,
        "dst_pages": DST,
        **change(case),
    }
    refused(case, call, error, name)


@pytest.mark.parametrize("method", METHODS)
def test_an_error_comes_before_a_fault(device, method):
    """With a wrong option, pages past the end are neither transferred nor recorded."""
    case = TransferCase(device, 2)
    src, dst = case.pool().pool, case.pool().pool
    call = {"src_pool": src, "dst_pool": dst, "src_pages": [0, 99], "dst_pages": [1, 2]}
    refused(case, {**call, "method": method, "layers": [0, 7]}, ValueError, "layers")
    refused(case, {**call, "method": method, "max_blocks": 0}, ValueError, "max_blocks")


def test_errors_of_nothing_to_do(device):
    """Arguments are checked even if there is no page to move."""
    case = TransferCase(device, 3)
    src, dst = case.pool().pool, case.pool(fmt="fp16").pool
    none = {"src_pages": [], "dst_pages": []}
    refused(case, {"src_pool": src, "dst_pool": dst, **none}, ValueError, "dst_pool")
    same = {"src_pool": src, "dst_pool": src, **none}
    refused(case, {**same, "method": "fast"}, ValueError, "method")
    refused(case, {**same, "layers": 3}, ValueError, "layers")


@pytest.mark.parametrize("name", ["src_pool", "dst_pool", "method", "layers", "max_blocks"])
def test_no_pool_is_kept_by_an_error(device, name):
    import gc
    import weakref

    case = TransferCase(device, 4)
    call = {"src_pool": case.pool().pool, "dst_pool": case.pool().pool, name: "wrong"}
    kept = [weakref.ref(case.pools[0].pool), weakref.ref(case.pools[1].pool)]
    with pytest.raises(BOTH):
        kv.transfer_pages(**call, src_pages=SRC, dst_pages=DST)
    del call, case
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_options_come_by_name_only(device):
    case = TransferCase(device, 5)
    with pytest.raises(TypeError):
        kv.transfer_pages(case.pool().pool, case.pool().pool, SRC, DST, [0])
    case.finish()


@pytest.mark.gpu
def test_kernels_of_a_gpu_reach_no_pageable_memory():
    """The error comes before the launch."""
    device = kv.device("cuda")
    case = TransferCase(device, 6)
    far, near = case.pool(placement="pageable").pool, case.pool().pool
    for src, dst in ((far, near), (near, far)):
        call = {"src_pool": src, "dst_pool": dst, "src_pages": SRC, "dst_pages": DST}
        refused(case, {**call, "method": "kernel"}, ValueError, "method|src_pool|dst_pool")


@pytest.mark.gpu
def test_pools_of_two_devices_are_refused():
    """One of a GPU, one of the host device."""
    device = kv.device("cuda")
    case, other = TransferCase(device, 7), TransferCase(kv.device("host"), 7)
    call = {"src_pool": case.pool().pool, "dst_pool": other.pool().pool}
    refused(case, {**call, "src_pages": SRC, "dst_pages": DST}, ValueError, "dst_pool")
    other.finish()
