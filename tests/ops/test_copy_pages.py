"""`copy_pages`, by what a user sees of it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from page_cases import PagesCase

import kvcupy as kv
from kvcupy import reference

SRC, DST = (2, 7, 0), (5, 1, 3)


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int8, np.float16, np.float32, np.float64, np.int64, np.bool_]
)
def test_any_dtype(device, dtype):
    """Bits are copied, whatever they mean; bool holds 0 and 1 alone."""
    case = PagesCase(device, 1)
    cache = case.pages((8, 4, 2, 6), dtype=np.uint8 if dtype is np.bool_ else dtype)
    if dtype is np.bool_:
        cache.view[...] &= 1
        cache.buffer.restore()
        cache.array = cache.array.view(np.bool_)
    case.copy(cache, SRC, DST)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "fp8_e5m2"])
def test_formats_that_numpy_does_not_know(device, fmt):
    case = PagesCase(device, 2)
    caches = tuple(case.input(fmt, (8, 4, 2, 6)) for _ in range(2))
    case.copy(caches, SRC, DST)
    tagged = case.input(fmt, (8, 3, 5))
    tagged.array = kv.view_as(tagged.raw_array, fmt)
    case.copy(tagged, SRC, DST)


@pytest.mark.parametrize("misalign", [0, 1, 4])
@pytest.mark.parametrize("page_bytes", [1, 2, 3, 5, 8, 15, 16, 17, 31, 64, 100, 257, 4096, 4099])
def test_pages_of_any_size(device, page_bytes, misalign):
    """One byte beside a page belongs to the next page, or is a canary."""
    case = PagesCase(device, (page_bytes, misalign))
    case.copy(case.pages((8, page_bytes), misalign=misalign), SRC, DST)
    wide = case.pages((8, page_bytes + 3), lambda a: a[:, :page_bytes], misalign=misalign)
    case.copy(wide, SRC, DST)
    case.copy(case.pages((8, page_bytes, 3), dtype=np.float16), [7], [0])


def test_one_dimension_has_pages_of_one_element(device):
    case = PagesCase(device, 3)
    case.copy(case.pages((8,), dtype=np.float32), SRC, DST)


STRIDED = {
    "kv[:, 0]": ((8, 2, 4, 2, 6), lambda a: a[:, 0]),
    "kv[:, 1]": ((8, 2, 4, 2, 6), lambda a: a[:, 1]),
    "every other page": ((16, 4, 2, 6), lambda a: a[1::2]),
    "one layer of pages first": ((8, 3, 2, 4, 6), lambda a: a[:, 1, 1]),
    "some heads": ((8, 4, 5, 6), lambda a: a[:, :, 1:3]),
    "wider rows": ((8, 4, 2, 9), lambda a: a[..., 2:8]),
    "heads first": ((8, 2, 4, 6), lambda a: a.transpose(0, 2, 1, 3)),
}


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
@pytest.mark.parametrize("view", STRIDED)
def test_strided_pages(device, view, dtype):
    case = PagesCase(device, 4)
    case.copy(case.pages(*STRIDED[view], dtype=dtype), SRC, DST)


def test_a_tuple_of_arrays(device):
    """One launch, arrays of any dtype, shape and strides, the same pages of each."""
    case = PagesCase(device, 5)
    both = case.pages((8, 2, 4, 6), dtype=np.float16)
    case.copy(
        (
            case.pages((8, 4, 2, 6), dtype=np.float32),
            case.pages((8, 5)),
            both.sub(lambda a: a[:, 0]),
            both.sub(lambda a: a[:, 1]),
            case.pages((8, 7), dtype=np.int64),
        ),
        SRC,
        DST,
    )
    case.copy(tuple(case.pages((8, 33)) for _ in range(70)), SRC, DST)
    case.copy((case.pages((8, 3)),), SRC, DST)


@pytest.mark.parametrize("step", [1, 2, -1])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_indices_of_any_type_and_stride(device, dtype, step):
    case = PagesCase(device, 6)
    cache = case.pages((8, 20))
    case.copy(cache, case.indices(SRC, dtype, step), case.indices(DST, "int64", -step))
    case.copy(cache, case.indices(SRC, "int32", 3), case.indices(DST, dtype, step))


def test_one_page_to_many(device):
    case = PagesCase(device, 7)
    case.copy(case.pages((8, 4, 6), dtype=np.float16), [3] * 7, [0, 1, 2, 4, 5, 6, 7])


def test_many_pages(device):
    case = PagesCase(device, 8)
    order = case.rng.permutation(600)
    case.copy(case.pages((600, 48)), order[:300], order[300:])


@pytest.mark.parametrize("negative", [-1, -8, -9, -(2**31), -(2**32) + 3, -(2**63)])
def test_negative_pages_are_skipped(device, negative):
    """On either side, and on both."""
    case = PagesCase(device, 9)
    cache = case.pages((8, 20))
    case.copy(cache, [2, negative, 0, negative], [5, 1, negative, negative])


@pytest.mark.parametrize("page", [8, 9, 7777, 2**31 - 1, 2**31, 2**32 + 3, 2**63 - 1])
def test_page_past_the_end_is_a_fault(device, page):
    """Of the side that it is on; the rest is copied."""
    case = PagesCase(device, 10)
    cache = case.pages((8, 20))
    case.copy(cache, [2, page, 0], [5, 1, 3])
    case.copy(cache, [2, 7, 0], [5, page, 3])
    case.copy(cache, [2, page, 0, 1], [page, page, 3, 4])
    case.copy((cache, case.pages((8, 3))), [page, 6], [5, 7])
    case.copy(cache, SRC, DST)


def test_zero_pages(device):
    case = PagesCase(device, 11)
    case.copy(case.pages((8, 20)), [], [])
    case.copy(case.pages((0, 20)), [], [])
    case.copy(case.pages((0, 20)), [-1], [0])
    case.copy(case.pages((8, 0)), [1], [0])


def test_offsets_past_two_gigabytes(device):
    page_bytes = 2**20
    cache = device.empty((2**31 // page_bytes + 4, page_bytes), np.uint8)
    rng = np.random.default_rng(12)
    pages = rng.integers(0, 256, (2, page_bytes), dtype=np.uint8)
    last = cache.shape[0] - 1
    cache[last], cache[1] = device.asarray(pages[0].copy()), device.asarray(pages[1].copy())
    cache[3] = 77
    kv.copy_pages(
        cache, device.asarray(np.array([last, 1])), device.asarray(np.array([2, last - 1]))
    )
    kv.check_faults(device)
    for index, want in ((last, pages[0]), (2, pages[0]), (1, pages[1]), (last - 1, pages[1])):
        assert np.array_equal(device.to_numpy(cache[index]), want)
    assert (device.to_numpy(cache[3]) == 77).all()


@st.composite
def copies(draw):
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "num_pages": draw(st.integers(1, 12)),
        "arrays": draw(
            st.lists(
                st.tuples(
                    st.integers(1, 70),
                    st.integers(1, 3),
                    st.integers(0, 3),
                    st.integers(0, 9),
                    st.sampled_from([np.uint8, np.float16, np.float32, np.int64]),
                ),
                min_size=1,
                max_size=4,
            )
        ),
        "index": tuple(
            (draw(st.sampled_from(["int32", "int64"])), draw(st.sampled_from([1, 2, -1])))
            for _ in range(2)
        ),
    }


@settings(max_examples=examples(60), deadline=None, database=None)
@given(call=copies())
def test_any_copy(device, call):
    """Sources and targets are disjoint, and each target occurs once."""
    case = PagesCase(device, call["seed"])
    count = call["num_pages"]
    cache = tuple(
        case.pages(
            (count, rows, width + pad),
            lambda a, w=width: a[..., :w],
            dtype=dtype,
            misalign=misalign,
        )
        for width, rows, pad, misalign, dtype in call["arrays"]
    )
    order = case.rng.permutation(count)
    cut = int(case.rng.integers(0, count + 1))
    dst = order[cut:]
    src = case.rng.choice(order[:cut], len(dst)) if cut else np.full(len(dst), -1)
    past = case.rng.random(len(dst)) < 0.1
    dst, src = np.where(past, -1, dst), np.where(case.rng.random(len(dst)) < 0.1, count, src)
    case.copy(cache, case.indices(src, *call["index"][0]), case.indices(dst, *call["index"][1]))


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
    """All of a page goes over: every layer of K and V, which differ in width, and the scales."""
    pool, contents = filled_pool(device, kind, layout, fmt, scales=scales, placement=placement)
    assert len(contents) == (2 if kind == "kv" else 1) * (2 if scales else 1)
    where = kv.device(pool.parts[0].device)
    src, dst = [2, 7, -1, 0, 8], [5, 1, 3, 9, 4]
    kv.copy_pages(pool, where.asarray(np.array(src)), where.asarray(np.int32(dst)))
    faults = reference.copy_pages(contents, np.array(src), np.array(dst))
    assert faults == ([(4, 8)], [(3, 9)])
    with pytest.raises(kv.IndexFault, match="copy_pages"):
        kv.check_faults(where)
    check_pool(pool, contents)


def test_a_pool_on_a_stream_and_in_a_graph(device):
    pool, contents = filled_pool(device, "kv", "page_head", "int8", scales=True)
    src, dst = device.asarray(np.array(SRC)), device.asarray(np.array(DST))
    device.synchronize()
    stream = device.stream()
    with stream.capture() as graph:
        kv.copy_pages(pool, src, dst, stream=stream)
    check_pool(pool, contents)
    graph.launch(stream)
    stream.synchronize()
    reference.copy_pages(contents, np.array(SRC), np.array(DST))
    check_pool(pool, contents)


def test_what_only_looks_like_a_pool(device):
    """Whatever has `parts`; without scales they may be missing."""

    class Parts:
        parts = (device.zeros((8, 3), np.float32), device.zeros((8, 4), np.int8))

    Parts.parts[1][2] = 5
    kv.copy_pages(Parts(), *(device.asarray(np.array(pages)) for pages in (SRC, DST)))
    assert device.to_numpy(Parts.parts[1])[[2, 5, 1]].tolist() == [[5] * 4, [5] * 4, [0] * 4]
