"""`transfer_pages` from and to four-bit pools: the very bits of the reference, NaN for NaN."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from four_bit_cases import FOUR_BIT, KINDS, content, hard_rows
from helpers import FORMATS, QUANTISED, full_only
from transfer_cases import POOL_LAYOUTS, TransferCase

import kvcupy as kv
from kvcupy import formats

SRC, DST = [1, -1, 2, 0], [3, 0, 0, 1]
METHODS = ("kernel", "staged", "auto")
LAYOUT_PAIRS = list(itertools.product(POOL_LAYOUTS, repeat=2))

every_method = pytest.mark.parametrize("method", METHODS)
each_way = pytest.mark.parametrize("narrows", [True, False], ids=["to", "from"])


def pools(case, packed, other, narrows, layouts=LAYOUT_PAIRS[1], *, scales=False, **geometry):
    """A source and a target, one of a four-bit format."""
    geometry = {
        "pages": 4, "page_size": 3, "layers": 2, "widths": (128, 256),
        "multipliers": case.multipliers, **geometry,
    }  # fmt: skip
    pair = (other, packed) if narrows else (packed, other)
    return [
        case.pool(
            layout, fmt, scales=scales and fmt in QUANTISED, content=content(case), **geometry
        )
        for layout, fmt in zip(layouts, pair, strict=True)
    ]


@pytest.mark.covering
@every_method
@each_way
@pytest.mark.parametrize("other", FORMATS)
@pytest.mark.parametrize("packed", FOUR_BIT)
def test_every_format(device, packed, other, narrows, method):
    """With scales and without; the layouts change from case to case."""
    start = 7 * FOUR_BIT.index(packed) + 3 * FORMATS.index(other) + METHODS.index(method)
    for scales in (False, True) if other in QUANTISED else (False,):
        case = TransferCase(device, (start, scales))
        layouts = LAYOUT_PAIRS[(start + 5 * scales) % len(LAYOUT_PAIRS)]
        both = pools(case, packed, other, narrows, layouts, scales=scales)
        case.transfer(*both, SRC, DST, method=method, convert=True)


@pytest.mark.covering
@each_way
@pytest.mark.parametrize("packed", KINDS)
@pytest.mark.parametrize("other", ["bf16", "int8"])
@pytest.mark.parametrize("groups", [(1, 1), (1, 4), (5, 2), (12, 9), (36, 0)], ids=str)
def test_rows_of_any_length(device, packed, other, groups, narrows):
    """A lone group, rows that lanes take in several steps, and latents."""
    group = formats.FOUR_BIT[packed].group
    widths = {"widths": tuple(n * group for n in groups)}
    if not groups[1]:
        widths = {"latent": groups[0] * group}
    case = TransferCase(device, groups)
    for scales in (False, True):
        both = pools(case, packed, other, narrows, scales=scales, **widths)
        case.transfer(*both, SRC, DST, method="kernel", convert=True)


@each_way
@pytest.mark.parametrize(
    ("packed", "other"),
    [
        (packed, other) if KINDS.index(packed) == i else full_only(packed, other)
        for i, other in enumerate(("int8", "fp8_e4m3", "fp32", "bf16"))
        for packed in KINDS
    ],
)
def test_every_format_as_users_run_it(users_device, packed, other, narrows):
    """A thread of the host device holds whole rows there."""
    case = TransferCase(users_device, 11)
    both = pools(case, packed, other, narrows, scales=True)
    case.transfer(*both, SRC, DST, method="kernel", convert=True)


@pytest.mark.covering
@each_way
@pytest.mark.parametrize("packed", KINDS)
def test_many_rows(device, packed, narrows):
    """More than a grid's threads take at once, with a grid of any size."""
    for max_blocks in (1, 3, None):
        case = TransferCase(device, 2)
        both = pools(case, packed, "bf16", narrows, pages=30, page_size=5, heads=3)
        src_pages, dst_pages = (case.rng.permutation(30)[:25] for _ in range(2))
        case.transfer(
            *both, src_pages, dst_pages, method="kernel", convert=True, max_blocks=max_blocks
        )


@pytest.mark.covering
@pytest.mark.parametrize("packed", FOUR_BIT)
@pytest.mark.parametrize("source", ["bf16", "fp16", "fp8_e4m3"])
def test_rows_are_those_that_store_kv_stores(device, packed, source):
    case = TransferCase(device, 3)
    src, dst = pools(case, packed, source, True)
    stored = case.pool("page_head", packed, pages=4, page_size=3, layers=2, widths=(128, 256))
    kv.transfer_pages(src.pool, dst.pool, range(4), range(4), convert=True)
    slots = device.asarray(np.arange(12))
    for layer in range(2):
        key, value = (
            kv.view_as(device.asarray(bits.reshape(12, *bits.shape[2:])), source)
            for bits in (
                np.ascontiguousarray(m.view[layer]).view(f"u{m.want.dtype.itemsize}")
                for m in src.parts
            )
        )
        kv.store_kv(key, value, stored.pool.k(layer), stored.pool.v(layer), slots)
    device.synchronize()
    for got, want in zip(dst.parts, stored.parts, strict=True):
        np.testing.assert_array_equal(got.by_layer(got.download()), want.by_layer(want.download()))


@each_way
@pytest.mark.parametrize("offsets", list(itertools.product([0, 1, 2, 4, 8], [0, 1])), ids=str)
def test_wrapped_pools_of_any_alignment(offsets, narrows):
    """Codes in words of 1, 2, 4 and 8 bytes, beside rows in words and element by element."""
    host = kv.device("host")
    case = TransferCase(host, offsets)
    rows = hard_rows(case, "fp16", (2, 3, 4, 2, 64))
    wide, packed, wanted = (
        [np.zeros((3, 4, 2, n * size + 16), np.uint8) for _ in "kv"]
        for n, size in ((64, 2), (36, 1), (36, 1))
    )
    halves = [a[..., 2 * offsets[1] : 2 * offsets[1] + 128].view(np.float16) for a in wide]
    bytes_, expected = (
        [a[..., offsets[0] : offsets[0] + 36] for a in part] for part in (packed, wanted)
    )
    for half, content_ in zip(halves, rows, strict=True):
        half[...] = content_
    slots = [half.reshape(12, 2, 64) for half in halves]
    kv.store_kv(*slots, *[kv.view_as(a, "nvfp4") for a in expected], np.arange(12))
    floats = kv.KVPool.wrap(*[[half] for half in halves])
    codes = kv.KVPool.wrap(*[[kv.view_as(a, "nvfp4")] for a in bytes_])
    if narrows:
        kv.transfer_pages(floats, codes, [0, 2], [0, 2], convert=True, method="kernel")
        for part, whole in zip(packed, wanted, strict=True):
            np.testing.assert_array_equal(part[[0, 2]], whole[[0, 2]])
            assert not part[1].any()
        return
    for part, whole in zip(packed, wanted, strict=True):
        part[...] = whole
    before = [a.copy() for a in wide]
    kv.transfer_pages(codes, floats, [0, 2], [0, 2], convert=True, method="kernel")
    got = [half.copy() for half in halves]
    outs = [np.zeros((12, 2, 64), np.float16) for _ in "kv"]
    kv.gather_kv(
        *[kv.view_as(a, "nvfp4") for a in expected], np.arange(12), k_out=outs[0], v_out=outs[1]
    )
    for part, old, half, out in zip(wide, before, got, outs, strict=True):
        np.testing.assert_array_equal(half[[0, 2]], out.reshape(half.shape)[[0, 2]])
        np.testing.assert_array_equal(part[1], old[1])


def bytes_copied(monkeypatch, device):
    """Count what the copy engine moves from now on."""
    sizes = []
    copy_runs = type(device).copy_runs

    def counting(self, dst, src, num_bytes, *args):
        sizes.append(int(num_bytes.sum()))
        return copy_runs(self, dst, src, num_bytes, *args)

    monkeypatch.setattr(type(device), "copy_runs", counting)
    return sizes


@pytest.mark.parametrize("packed", FOUR_BIT)
def test_a_quarter_of_the_bytes_crosses_the_link(device, packed, monkeypatch):
    """By way of the staging buffer, where the copy engine says how many: codes and group scales."""
    case = TransferCase(device, 7)
    near = case.pool(fmt="bf16", pages=4, widths=(128, 128), content=case.values)
    far = case.pool("page_first", packed, pages=4, widths=(128, 128), placement="pinned")
    sizes = bytes_copied(monkeypatch, device)
    case.transfer(near, far, [0, 2], [3, 1], method="staged", convert=True)
    case.transfer(far, near, [3], [1], method="staged", convert=True)
    assert sizes == [2 * far.pool.page_bytes, far.pool.page_bytes]
    ratio = formats.bytes_per_element(packed) / 2
    assert far.pool.page_bytes == ratio * near.pool.page_bytes
    assert 1 / 4 < ratio < 2 / 7


@pytest.mark.parametrize("packed", KINDS)
def test_an_engine_narrows_and_widens(device, packed):
    case = TransferCase(device, 8)
    geometry = {"pages": 5, "widths": (128, 128)}
    near = case.pool(fmt="bf16", content=content(case), **geometry)
    far = case.pool("page_first_direct", packed, placement="pinned", **geometry)
    engine = kv.TransferEngine(near.pool, far.pool, convert=True)
    saved = engine.save([1, 4], [0, 3])
    loaded = engine.load([3, 0], [2, 0])
    loaded.synchronize()
    case.expect(near, far, np.array([1, 4]), np.array([0, 3]))
    case.expect(far, near, np.array([3, 0]), np.array([2, 0]))
    case.finish()
    assert saved.num_bytes == 2 * near.pool.page_bytes
    assert loaded.num_bytes == 2 * far.pool.page_bytes


def test_two_four_bit_formats(device):
    case = TransferCase(device, 9)
    src, dst = (case.pool(fmt=fmt, widths=(64, 64)) for fmt in ("nvfp4", "int4"))
    with pytest.raises(ValueError, match=r"^dst_pool: .*nvfp4.*int4.*convert=True"):
        kv.transfer_pages(src.pool, dst.pool, [0], [0])
    case.finish()
    case.transfer(src, dst, [0], [0], convert=True)


def test_what_does_not_fit_is_refused(device):
    case = TransferCase(device, 10)
    src = case.pool(fmt="bf16", widths=(64, 64))
    dst = case.pool(fmt="nvfp4", widths=(64, 64))
    wider = case.pool(fmt="nvfp4", widths=(64, 96))
    with pytest.raises(ValueError, match=r"^dst_pool: .*bf16.*convert=True"):
        kv.transfer_pages(src.pool, dst.pool, [0], [0])
    with pytest.raises(ValueError, match=r'^method: .*"copy"'):
        kv.transfer_pages(src.pool, dst.pool, [0], [0], convert=True, method="copy")
    with pytest.raises(ValueError, match=r"^dst_pool: .*64\).* like V .*96\)"):
        kv.transfer_pages(src.pool, wider.pool, [0], [0], convert=True)
    case.finish()
