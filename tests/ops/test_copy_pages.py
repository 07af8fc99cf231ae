"""`copy_pages`, by what a user sees of it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import Case

import kvcupy as kv
from kvcupy import reference

SRC, DST = (2, 7, 0), (5, 1, 3)


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int8, np.float16, np.float32, np.float64, np.int64, np.bool_]
)
def test_any_dtype(device, dtype):
    """Bits are copied, whatever they mean; bool holds 0 and 1 alone."""
    case = Case(device, 1)
    cache = case.bits((8, 4, 2, 6), np.uint8 if dtype is np.bool_ else dtype)
    if dtype is np.bool_:
        cache.view[...] &= 1
        cache.buffer.restore()
        cache.array = cache.array.view(np.bool_)
    case.call("copy_pages", cache, SRC, DST)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "fp8_e5m2"])
def test_formats_that_numpy_lacks(device, fmt):
    case = Case(device, 2)
    case.call("copy_pages", tuple(case.input(fmt, (8, 4, 2, 6)) for _ in range(2)), SRC, DST)
    tagged = case.input(fmt, (8, 3, 5))
    tagged.array = kv.view_as(tagged.raw_array, fmt)
    case.call("copy_pages", tagged, SRC, DST)


@pytest.mark.covering
@pytest.mark.parametrize("misalign", [0, 1, 4])
@pytest.mark.parametrize("page_bytes", [1, 2, 3, 5, 8, 15, 16, 17, 31, 64, 100, 257, 4096, 4099])
def test_pages_of_any_size(device, page_bytes, misalign):
    """The byte after a page belongs to the next page, or is a canary."""
    case = Case(device, (page_bytes, misalign))
    case.call("copy_pages", case.bits((8, page_bytes), misalign=misalign), SRC, DST)
    wide = case.bits((8, page_bytes + 3), cut=lambda a: a[:, :page_bytes], misalign=misalign)
    case.call("copy_pages", wide, SRC, DST)
    case.call("copy_pages", case.bits((8, page_bytes, 3), np.float16), [7], [0])


def test_pages_of_one_element_and_one_page_to_many(device):
    case = Case(device, 3)
    case.call("copy_pages", case.bits((8,), np.float32), SRC, DST)
    case.call("copy_pages", case.bits((8, 4, 6)), [3] * 7, [0, 1, 2, 4, 5, 6, 7])


def filled_pool(device, kind, layout, fmt, **options):
    """A pool of random bits, and the bits of its parts and scales, pages first."""
    shape = (8, 4, 3)
    if kind == "mla":
        pool = kv.MLAPool(*shape, 6, dtype=fmt, layout=layout, device=device, **options)
    else:
        pool = kv.KVPool(
            *shape, 2, 6, v_head_dim=10, dtype=fmt, layout=layout, device=device, **options
        )
    rng, contents = np.random.default_rng(17), []
    for part in (*pool.parts, *pool.scale_parts):
        where = kv.device(part.device)
        bits = where.carrier(part)
        content = rng.integers(0, 256, (*part.shape, bits.itemsize), dtype=np.uint8)
        contents.append(content.view(f"u{bits.itemsize}")[..., 0])
        bits[...] = where.asarray(contents[-1].view(bits.dtype))
    return pool, tuple(contents)


def check_pool(pool, contents):
    for part, want in zip((*pool.parts, *pool.scale_parts), contents, strict=True):
        got = np.asarray(kv.device(part.device).to_numpy(part)).view(want.dtype)
        assert np.array_equal(got, want), f"{part}: first at {np.argwhere(got != want)[0]}"


@pytest.mark.covering(2)
@pytest.mark.parametrize("placement", ["device", "pinned", "pageable"])
@pytest.mark.parametrize(("fmt", "scales"), [("bf16", False), ("fp8_e4m3", False), ("int8", True)])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("kind", ["kv", "mla"])
def test_a_pool(device, kind, layout, fmt, scales, placement):
    """All of a page goes over: every layer of K and V, which differ in width, and the scales; in a
    graph, when it runs."""
    pool, contents = filled_pool(device, kind, layout, fmt, scales=scales, placement=placement)
    assert len(contents) == (2 if kind == "kv" else 1) * (2 if scales else 1)
    where = kv.device(pool.parts[0].device)
    src, dst = [2, 7, -1, 0, 8], [5, 1, 3, 9, 4]
    pages, stream = (where.asarray(np.array(src)), where.asarray(np.int32(dst))), where.stream()
    where.synchronize()
    with stream.capture() as graph:
        kv.copy_pages(pool, *pages, stream=stream)
    check_pool(pool, contents)
    graph.launch(stream)
    stream.synchronize()
    faults = reference.copy_pages(contents, np.array(src), np.array(dst))
    assert faults == ([(4, 8)], [(3, 9)])
    with pytest.raises(kv.IndexFault, match="copy_pages"):
        kv.check_faults(where)
    check_pool(pool, contents)


@pytest.mark.parametrize("as_array", [(), ("src",), ("dst",)])
def test_lists_of_a_pool(device, as_array):
    """As of `transfer_pages` and `shift_pages`."""
    pool, contents = filled_pool(device, "kv", "page_first", "int8", scales=True)
    pages = {"src": [2, -1, 0], "dst": range(5, 8)}
    for name in as_array:
        pages[name] = device.asarray(np.array(pages[name]))
    kv.copy_pages(pool, *pages.values(), stream=None)
    reference.copy_pages(contents, np.array([2, -1, 0]), np.arange(5, 8))
    check_pool(pool, contents)
    for wrong, error in (([2.0], TypeError), ([2**63], ValueError), ([1, 2], ValueError)):
        with pytest.raises(error, match=r"^(src|dst)_pages: "):
            kv.copy_pages(pool, wrong, [5])
    check_pool(pool, contents)


def test_what_only_looks_like_a_pool(device):
    """Whatever has `parts`; without scales they may be missing."""

    class Parts:
        parts = (device.zeros((8, 3), np.float32), device.zeros((8, 4), np.int8))

    Parts.parts[1][2] = 5
    kv.copy_pages(Parts(), *(device.asarray(np.array(pages)) for pages in (SRC, DST)))
    assert device.to_numpy(Parts.parts[1])[[2, 5, 1]].tolist() == [[5] * 4, [5] * 4, [0] * 4]
