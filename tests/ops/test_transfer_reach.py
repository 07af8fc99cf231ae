"""Transfers between memory that kernels do not all reach, as on a GPU.

`Picky` is a host device whose kernels reach what it allocated itself, and pinned memory: so page
lists must be sent to it, and pageable pools go by the copy engine.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from transfer_cases import TransferCase

import kvcupy as kv
from kvcupy.arrays import view
from kvcupy.devices.host import HostDevice

POOL = {"num_pages": 12, "page_size": 4, "num_layers": 3, "num_kv_heads": 2, "head_dim": 8}
PAIRS = ([3, 11, 0, 4, 5], [7, 0, 11, 3, 2])


class Picky(HostDevice):
    """A host device with separate memory, and defaults as for a copy engine."""

    has_copy_engine = True

    def __init__(self) -> None:
        super().__init__()
        self.own: list[tuple[int, int]] = []
        self.launched = 0

    def zeros(self, shape, dtype):
        array = super().zeros(shape, dtype)
        self.own.append(view(array).byte_range())
        return array

    def allocate(self, *arguments, **options):
        array = super().allocate(*arguments, **options)
        self.own.append(view(array).byte_range())
        return array

    def empty_pinned(self, shape, dtype):
        array = super().empty_pinned(shape, dtype)
        self.own.append(view(array).byte_range())
        return array

    def address(self, v):
        low, high = v.byte_range()
        mine = any(first <= low and high <= end for first, end in self.own)
        return v.pointer if mine or v.size == 0 else None

    def launch(self, function, grid, block, smem_bytes, params, stream, keep=()):
        self.launched += 1
        super().launch(function, grid, block, smem_bytes, params, stream, keep)


@pytest.fixture
def picky():
    kv.config.fallback = "error"
    device = Picky()
    device.warp_lanes = 32
    return device


def pool(device, placement, layout="layer_first", seed=0, **options):
    """A pool of random values."""
    built = kv.KVPool(**POOL, dtype=options.pop("dtype", "fp16"), layout=layout,
                     placement=placement, device=device, **options)  # fmt: skip
    rng = np.random.default_rng(seed)
    for part in built.parts:
        bits = device.carrier(part)
        bits[...] = rng.standard_normal(bits.shape).astype(bits.dtype)
    return built


def moved(device, src, dst, pairs):
    """The expected content of the target."""
    parts = [device.carrier(p).copy() for p in dst.parts]
    for part, source in zip(parts, src.parts, strict=True):
        part[pairs[1]] = device.carrier(source)[pairs[0]]
    return parts


def check(device, dst, parts):
    for got, want in zip(dst.parts, parts, strict=True):
        np.testing.assert_array_equal(device.carrier(got), want)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("method", ["kernel", "staged", "copy", "auto"])
def test_page_lists_are_sent_to_the_kernels(picky, method, layout):
    near, far = pool(picky, "device"), pool(picky, "pinned", layout, 1)
    for src, dst in ((near, far), (far, near)):
        want = moved(picky, src, dst, PAIRS)
        kv.transfer_pages(src, dst, *PAIRS, method=method)
        check(picky, dst, want)


def test_lists_in_flight_are_not_overwritten(picky):
    """Two transfers wait on a stream: the second has another list."""
    near, far = pool(picky, "device"), pool(picky, "pinned", seed=1)
    kv.transfer_pages(far, near, [0], [0], method="kernel")  # a buffer comes back from here
    want = moved(picky, near, far, ([1, 3], [2, 4]))
    gate, stream = threading.Event(), picky.stream()
    stream.call(gate.wait)
    kv.transfer_pages(near, far, [1], [2], method="kernel", stream=stream)
    kv.transfer_pages(near, far, [3], [4], method="kernel", stream=stream)
    gate.set()
    stream.synchronize()
    check(picky, far, want)


def test_buffers_come_back(picky):
    near, far = pool(picky, "device"), pool(picky, "pinned", "page_first", 1)
    for method in ("kernel", "staged"):
        kv.transfer_pages(near, far, *PAIRS, method=method)
        allocated = len(picky.own)
        for _ in range(5):
            kv.transfer_pages(near, far, *PAIRS, method=method)
        assert len(picky.own) == allocated


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_head"])
@pytest.mark.parametrize("method", ["staged", "copy", "auto"])
def test_pageable_pools_go_by_the_copy_engine(picky, method, layout):
    near, far = pool(picky, "device"), pool(picky, "pageable", layout, 1)
    for src, dst in ((near, far), (far, near)):
        want = moved(picky, src, dst, PAIRS)
        kv.transfer_pages(src, dst, *PAIRS, method=method)
        check(picky, dst, want)


def test_auto_stages_short_pieces_for_a_pageable_pool(picky):
    """Even if the thresholds prefer the kernel, which cannot access such memory."""
    wide = {**POOL, "num_kv_heads": 8, "head_dim": 64, "num_pages": 40, "page_size": 16}
    near = kv.KVPool(**wide, device=picky)
    far = kv.KVPool(**wide, layout="page_first", placement="pageable", device=picky)
    pages = np.arange(0, 40, 2)
    before = picky.launched
    kv.transfer_pages(far, near, pages, pages)
    assert picky.launched > before


@pytest.mark.parametrize("method", ["copy", "auto"])
def test_from_pageable_to_pageable(picky, method):
    src, dst = pool(picky, "pageable"), pool(picky, "pageable", "page_head", 1)
    want = moved(picky, src, dst, PAIRS)
    kv.transfer_pages(src, dst, *PAIRS, method=method)
    check(picky, dst, want)
    assert picky.launched == 0


@pytest.mark.parametrize(
    ("placements", "options", "name"),
    [
        (("device", "pageable"), {"method": "kernel"}, "method"),
        (("pageable", "device"), {"method": "kernel"}, "method"),
        (("pageable", "pageable"), {"method": "kernel"}, "method"),
        (("pageable", "pageable"), {"method": "staged"}, "method"),
    ],
)
def test_what_kernels_cannot_reach_is_refused(picky, placements, options, name):
    src, dst = (pool(picky, placement, seed=i) for i, placement in enumerate(placements))
    before = [picky.carrier(p).copy() for p in dst.parts]
    with pytest.raises(ValueError, match=rf"^{name}: "):
        kv.transfer_pages(src, dst, *PAIRS, **options)
    check(picky, dst, before)
    if "device" in placements:  # the engine says so when it is made
        pools = (src, dst) if placements[0] == "device" else (dst, src)
        with pytest.raises(ValueError, match=rf"^{name}: "):
            kv.TransferEngine(*pools, **options)


def test_converting_between_pageable_pools_is_refused(picky):
    src, dst = pool(picky, "pageable"), pool(picky, "pageable", dtype="int8", scales=True)
    with pytest.raises(ValueError, match=r"^convert: "):
        kv.transfer_pages(src, dst, *PAIRS, convert=True)


def test_more_pieces_than_a_launch_counts_are_refused_before_the_first(device, monkeypatch):
    """The second set of layers has too many: the first is not moved either."""
    from kvcupy.ops import transfer

    case = TransferCase(device, 60)
    src, dst = case.pool("page_first", layers=6), case.pool("page_head", layers=6, pages=13)
    counted = transfer.require_countable

    def few(num_rows, name):
        if num_rows > 60:
            raise ValueError(f"{name}: expected at most 60 rows, got {num_rows}")
        counted(num_rows, name)

    monkeypatch.setattr(transfer, "require_countable", few)
    monkeypatch.setattr(transfer, "MAX_ROWS", 60)
    options = {"layers": [0, 2, 3, 4, 5], "method": "kernel"}
    for _ in range(2):  # also after fewer pages, for which the kernels were loaded
        with pytest.raises(ValueError, match="src_pages: expected at most 60"):
            case.issue(src, dst, [3, 5, 7], [1, 2, 12], **options)
        case.finish()
        case.transfer(src, dst, [3], [1], **options)


@pytest.mark.parametrize(("source", "target"), [
    ("pinned", "pinned"), ("pageable", "pinned"), ("pinned", "pageable"), ("device", "pageable"),
    ("pageable", "device"),
])  # fmt: skip
@pytest.mark.parametrize("pair", [("fp16", "bf16"), ("bf16", "fp8_e4m3")], ids="-".join)
def test_pools_convert(picky, source, target, pair):
    """By way of a staging buffer of the device where kernels reach but one of them."""
    src = pool(picky, source, "page_first", dtype=pair[0])
    got, want = (
        kv.KVPool(**POOL, dtype=pair[1], layout="page_first_direct", placement=placement,
                  device=device)
        for device, placement in ((picky, target), (kv.device("host"), "device"))
    )  # fmt: skip
    plain = kv.KVPool(**POOL, dtype=pair[0], device="host")
    for layer in range(POOL["num_layers"]):
        plain.k(layer)[...], plain.v(layer)[...] = src.k(layer), src.v(layer)
    kv.transfer_pages(plain, want, *PAIRS, convert=True)
    kv.transfer_pages(src, got, *PAIRS, convert=True)
    picky.synchronize()
    for there, expected in zip(got.parts, want.parts, strict=True):
        a, b = (
            np.ascontiguousarray(d.carrier(p))
            for d, p in ((picky, there), (kv.device("host"), expected))
        )
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
