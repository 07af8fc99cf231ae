"""Wrong arguments of `transfer_pages`: errors before anything is written."""

from __future__ import annotations

import re

import numpy as np
import pytest
from transfer_cases import METHODS, TransferCase

import kvcupy as kv

SRC, DST = [2, 5, 0], [4, 1, 3]
POOLS, PAGES = ("src_pool", "dst_pool"), ("src_pages", "dst_pages")


BOTH = (TypeError, ValueError)


def pool(layout="layer_first", encoding="bf16", **geometry):
    return lambda c: c.pool(layout, encoding, **geometry).pool


def ones(dtype, *shape):
    """Page numbers that exist, of any dtype and shape."""
    return lambda c: c.place(np.ones(shape, dtype), np.dtype(dtype).name).array


def formats(src, dst):
    return {"src_pool": pool(encoding=src), "dst_pool": pool(encoding=dst)}


def the_source(case):
    """The source of the valid call, as its target too."""
    return case.pools[0].pool


# fmt: off
UNLIKE = {
    "page_size": {"page_size": 5},
    "layers": {"layers": 4},
    "heads": {"heads": 3},
    "width of K": {"widths": (7, 6)},
    "width of V": {"widths": (8, 8)},
    "widths exchanged": {"widths": (6, 8)},
    "heads and widths of as many bytes": {"heads": 4, "widths": (4, 3)},
    "format": {"encoding": "fp16"},
    "quantised format": {"encoding": "int8"},
    "format of as many bytes": {"encoding": "fp8_e4m3", "widths": (16, 12)},
    "a latent of one head": {"latent": 8},
    "a latent of as many bytes": {"latent": 16},
}
#: Values that are refused, by the error and the argument.
VALUES = (
    (TypeError, POOLS, (None, "pool", 3, np.zeros((2, 3, 4, 2, 8), np.float32))),
    (ValueError, ("method",), ("fast", "", "KERNEL")),
    (BOTH, ("method",), (None, 3, ["kernel"])),
    (ValueError, ("layers",), (3, -1, 2**40, [0, 3], [-1], [1, 1], [0, 2, 0], np.int64(3))),
    (TypeError, ("layers",), (True, False, 1.0, "0", [True], [0, False], [0.0, 1.0], [[0, 1]],
                              [None], ["1"])),
    (ValueError, ("max_blocks",), (0, -1, -(2**40))),
    (TypeError, ("max_blocks",), (True, False, 2.0, "2", [2])),
    (BOTH, PAGES, ([0.0, 1.0, 2.0], [True, 1, 2], ["0", "1", "2"], [None] * 3, [[0], [1], [2]],
                   3, "012")),
    (TypeError, PAGES, (None,)),
    (TypeError, ("stream",), ("main", 7)),
)


def refused_calls():
    """Yield (id, changes to a valid call, error, the argument that the message names)."""
    for error, arguments, values in VALUES:
        for name, value in ((name, value) for name in arguments for value in values):
            shown = type(value).__name__ if name in POOLS else repr(value)
            yield f"{name} {shown}", {name: value}, error, name

    # Pools
    for name in POOLS:
        part_of_pool = {name: lambda c: c.pool().pool.k(0)}
        yield f"{name} an array of a pool", part_of_pool, TypeError, name
        for unlike, geometry in UNLIKE.items():
            for convert in (False, True):
                if convert and geometry.keys() == {"encoding"}:
                    continue  # that is what converting is for
                changes = {name: pool(pages=7, **geometry), "convert": convert}
                yield f"{name} {unlike} {convert}", changes, ValueError, "dst_pool"
    latents = {"src_pool": pool(latent=8), "dst_pool": pool(latent=9)}
    yield "latents of unlike widths", latents, ValueError, "dst_pool"
    for scales, convert in ((a, b) for a in (False, True) for b in (False, True)):
        scaled = {
            "src_pool": pool(encoding="int8", scales=scales),
            "dst_pool": pool("page_first", "int8", scales=not scales),
        }
        wrong = f"scales of one side {scales} {convert}"
        yield wrong, scaled | {"convert": convert}, ValueError, "dst_pool"
    yield "unlike 8-bit formats", formats("fp8_e4m3", "fp8_e5m2"), ValueError, "dst_pool"
    for src, dst in (
        ("bf16", "fp16"), ("bf16", "int8"), ("fp8_e4m3", "int8"), ("bf16", "nvfp4"),
        ("nvfp4", "int4"),
    ):
        wide = {"widths": (64, 64)} if "4" in dst[-1] else {}
        unlike = {"src_pool": pool(encoding=src, **wide), "dst_pool": pool(encoding=dst, **wide)}
        yield f"{src} and {dst}", unlike, ValueError, "dst_pool.*convert=True"
        copied = unlike | {"convert": True, "method": "copy"}
        yield f"copy that converts {src} to {dst}", copied, ValueError, "method"

    # Pages
    for name, pages in zip(PAGES, (SRC, DST), strict=True):
        for dtype in (np.float32, np.float64, np.int16, np.uint8, np.uint64, np.bool_):
            yield f"{name} {np.dtype(dtype).name}", {name: ones(dtype, 3)}, TypeError, name
        for shape in ((3, 1), (1, 3), (), (3, 0)):
            yield f"{name} of shape {shape}", {name: ones(np.int64, *shape)}, ValueError, name
        shorter = {name: lambda c: c.indices([0, 1]).array}
        for wrong, changes in (
            ("longer", {name: [*pages, 6]}), ("empty", {name: []}), ("shorter array", shorter),
        ):
            yield f"{name} {wrong}", changes, ValueError, "src_pages|dst_pages"

    # An error comes before a fault, and if there is nothing to do
    outside = {"src_pages": [0, 99], "dst_pages": [1, 2], "dst_pool": pool()}
    no_pages = {"src_pages": [], "dst_pages": []}
    for method in METHODS:
        for name, value in (("layers", [0, 7]), ("max_blocks", 0)):
            changes = outside | {"method": method, name: value}
            yield f"{name} by {method}, and a page outside", changes, ValueError, name
    yield "other format, no pages", no_pages | formats("bf16", "fp16"), ValueError, "dst_pool"
    for name, value in (("method", "fast"), ("layers", 3)):
        changes = no_pages | {"dst_pool": the_source, name: value}
        yield f"{name} of one pool, no pages", changes, ValueError, name
# fmt: on


def refused(case, call, error, name):
    """The call raises, names the argument, changes no memory and records no fault."""
    with pytest.raises(error) as caught:
        kv.transfer_pages(**call)
    assert not isinstance(caught.value, kv.KvcupyError), caught.value
    assert re.search(rf"\b({name})(?!\w)", str(caught.value)), f"{name} not in {caught.value}"
    case.finish()


@pytest.mark.parametrize(
    ("changes", "error", "name"), [pytest.param(*row, id=wrong) for wrong, *row in refused_calls()]
)
def test_wrong_arguments(device, changes, error, name):
    case = TransferCase(device, 1)
    src, dst = case.pool(pages=9).pool, case.pool("page_first", pages=7).pool
    call = {"src_pool": src, "dst_pool": dst, "src_pages": SRC, "dst_pages": DST}
    call |= {n: value(case) if callable(value) else value for n, value in changes.items()}
    refused(case, call, error, name)


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


@pytest.mark.gpu
def test_pools_that_a_gpu_does_not_reach():
    """Pageable memory, and memory of another device: the error comes before the launch."""
    device = kv.device("cuda")
    case, other = TransferCase(device, 6), TransferCase(kv.device("host"), 7)
    far, near = case.pool(placement="pageable").pool, case.pool().pool
    for src, dst, options, name in (
        (far, near, {"method": "kernel"}, "method|src_pool|dst_pool"),
        (near, far, {"method": "kernel"}, "method|src_pool|dst_pool"),
        (near, other.pool().pool, {}, "dst_pool"),
    ):
        call = {"src_pool": src, "dst_pool": dst, "src_pages": SRC, "dst_pages": DST}
        refused(case, call | options, ValueError, name)
    other.finish()
