"""WirePages: the bytes of pages in wire order, from pools of every layout, and checksums."""

from __future__ import annotations

import itertools

import helpers
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcupy as kv
from kvcupy.arrays import array_at, bytes_of
from kvcupy.remote.wire import WirePages, checksum

PAGES, SIZE, LAYERS, HEADS = 3, 4, 3, 2
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def kv_pool(layout, *, dtype="fp16", scales=False, width=8, **options):
    return kv.KVPool(
        PAGES, SIZE, LAYERS, HEADS, width, v_head_dim=width // 2, dtype=dtype, layout=layout,
        device="host", scales=scales, **options,
    )  # fmt: skip


def wrapped(kind):
    """K and V where others keep them: gaps, heads first, backwards, a list of layers."""
    rng = np.random.default_rng(0)

    def array(*shape):
        return rng.integers(0, 255, (*shape, 16), np.uint8).view(np.float16)

    if kind == "four-bit":
        layers = [rng.integers(0, 255, (2, PAGES, SIZE, HEADS, 36), np.uint8) for _ in "123"]
        views = [kv.view_as(layer, "nvfp4") for layer in layers]
        return kv.KVPool.wrap([layer[0] for layer in views], [layer[1] for layer in views])
    if kind == "list":  # in separate allocations
        both = [[array(PAGES, SIZE, HEADS) for _ in range(LAYERS)] for _ in range(2)]
    elif kind == "combined":  # vLLM: K and V of a layer in one array
        layers = [array(2, PAGES, SIZE, HEADS) for _ in range(LAYERS)]
        both = [[layer[part] for layer in layers] for part in range(2)]
    elif kind == "heads first":
        both = [[array(PAGES, HEADS, SIZE).transpose(0, 2, 1, 3) for _ in range(LAYERS)]] * 1
        both.append([array(PAGES, HEADS, SIZE).transpose(0, 2, 1, 3) for _ in range(LAYERS)])
    elif kind == "backwards":
        both = [[array(2 * PAGES, SIZE, HEADS)[::-2, ::-1] for _ in range(LAYERS)] for _ in "kv"]
    else:  # layers and pages far apart in one array
        return kv.KVPool.wrap(*(array(LAYERS, 2 * PAGES, SIZE, HEADS)[:, ::2] for _ in "kv"))
    return kv.KVPool.wrap(*both)


def planes(pool):
    """K and V, or the latent, and scales: (layers, page_size, heads, width) of each page."""

    def bits(v):
        v = bytes_of(v)
        return array_at(v.owner, v.pointer, v.shape, np.dtype(f"u{v.itemsize}"), v.strides)

    num_parts = len(pool.views(0))
    for part in range(num_parts):
        yield np.stack([bits(pool.views(i)[part]) for i in range(pool.num_layers)], 1)
    for scale in (pool.k_scale, pool.v_scale)[: num_parts if pool.scale_parts else 0]:
        rows = [scale(i).reshape(pool.num_pages, SIZE, -1, 1) for i in range(pool.num_layers)]
        yield np.stack(rows, 1).view(np.uint32)


def in_wire_order(pool, page):
    """The bytes of a page, by indexing the views that users see."""
    axes = (2, 1, 0, 3) if pool.layout == "page_head" else (0, 1, 2, 3)
    return b"".join(plane[page].transpose(axes).tobytes() for plane in planes(pool))


def fill(pool, seed):
    rng = np.random.default_rng(seed)
    for part in (*pool.parts, *pool.scale_parts):
        part = bytes_of(part)
        words = np.dtype(f"u{part.itemsize}")
        array = array_at(part.owner, part.pointer, part.shape, words, part.strides)
        array[...] = rng.integers(0, 2**words.itemsize * 8 - 1, part.shape).astype(words)


POOLS = {
    **{layout: lambda layout=layout: kv_pool(layout) for layout in LAYOUTS},
    **{f"{layout}, wide": lambda layout=layout: kv_pool(layout, width=1024) for layout in LAYOUTS},
    **{f"{layout}, scales": lambda layout=layout: kv_pool(layout, dtype="int8", scales=True)
       for layout in LAYOUTS},
    "pageable": lambda: kv_pool("layer_first", placement="pageable"),
    "pinned, bf16": lambda: kv_pool("page_first_direct", placement="pinned", dtype="bf16"),
    "fp8": lambda: kv_pool("layer_first", dtype="fp8_e4m3", scales=True),
    **{f"{layout}, {format}": lambda layout=layout, format=format, width=width: kv_pool(
           layout, dtype=format, width=width)
       for layout, format, width in zip(LAYOUTS, ("nvfp4", "mxfp4", "int4", "nvfp4"),
                                        (32, 64, 64, 128), strict=True)},
    "latent, nvfp4": lambda: kv.MLAPool(PAGES, SIZE, LAYERS, 48, dtype="nvfp4", device="host"),
    "latent": lambda: kv.MLAPool(PAGES, SIZE, LAYERS, 12, device="host"),
    "latent, page_first, scales": lambda: kv.MLAPool(
        PAGES, SIZE, LAYERS, 12, dtype="int8", layout="page_first", scales=True, device="host"),
    **{f"wrapped, {kind}": lambda kind=kind: wrapped(kind)
       for kind in ("list", "combined", "heads first", "backwards", "far apart", "four-bit")},
}  # fmt: skip


@pytest.fixture(params=POOLS)
def pool(request):
    pool = POOLS[request.param]()
    fill(pool, 1)
    return pool


def test_bytes_in_wire_order(pool):
    pages = WirePages(pool)
    assert pages.block_bytes == pool.page_bytes
    for page in range(PAGES):
        expected = in_wire_order(pool, page)
        buffer = bytearray(pages.block_bytes)
        pages.read_into(page, buffer)
        assert buffer == expected
        pieces = pages.pieces(page)
        assert len(pieces) == pages.num_pieces and b"".join(pieces) == expected
        assert not any(piece.readonly for piece in pieces)


def test_written_blocks_are_the_page_and_nothing_else(pool):
    pages = WirePages(pool)
    block = np.random.default_rng(2).bytes(pages.block_bytes)
    before = [in_wire_order(pool, page) for page in range(PAGES)]
    pages.write_from(1, block)
    assert [in_wire_order(pool, page) for page in range(PAGES)] == [before[0], block, before[2]]
    at = 0
    for piece in pages.pieces(2):
        piece[:] = block[at : at + piece.nbytes]
        at += piece.nbytes
    assert [in_wire_order(pool, page) for page in range(PAGES)] == [before[0], block, block]


def test_which_pools_have_pieces():
    def kind(layout, width=1024):
        pages = WirePages(kv_pool(layout, width=width))
        return pages.num_pieces, pages.is_direct

    assert kind("page_first_direct") == kind("page_head") == (2, True)
    assert kind("page_first_direct", 8) == (2, True), "one piece a part, however small"
    assert kind("layer_first") == (2 * LAYERS, True)
    assert kind("layer_first", 8) == (2 * LAYERS, False)
    assert kind("page_first") == (2 * LAYERS * SIZE, False)
    latents = [np.zeros((PAGES, SIZE, 512), np.float16) for _ in range(LAYERS)]
    pages = WirePages(kv.MLAPool.wrap(latents))
    assert (pages.num_pieces, pages.is_direct) == (LAYERS, True), "one head has no stride"
    layers = [np.zeros((PAGES, SIZE, HEADS, 4096), np.float16) for _ in range(2 * LAYERS)]
    apart = kv.KVPool.wrap(layers[:LAYERS], layers[LAYERS:])
    assert WirePages(apart).is_direct


def test_a_buffer_must_have_the_bytes_of_a_block():
    pages = WirePages(kv_pool("layer_first"))
    for buffer in (bytearray(pages.block_bytes - 1), bytearray(pages.block_bytes + 1)):
        with pytest.raises(ValueError, match=r"^buffer: expected"):
            pages.read_into(0, buffer)
        with pytest.raises(ValueError, match=r"^buffer: expected"):
            pages.write_from(0, buffer)


# --- Checksums ---


def test_checksums_are_the_same_for_ever():
    assert checksum([bytes(range(256)) * 40]) == 13852265625588812019


@given(data=st.data())
@settings(max_examples=helpers.examples(60), deadline=None)
def test_how_contents_are_divided_makes_no_difference(data):
    size = data.draw(st.integers(0, 20_000))
    contents = np.random.default_rng(size).integers(0, 255, size, np.uint8).tobytes()
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=6)))
    parts = [contents[a:b] for a, b in itertools.pairwise([0, *cuts, size])]
    expected = checksum([contents])
    assert checksum(parts) == expected
    if size:
        place = data.draw(st.integers(0, size - 1))
        changed = bytearray(contents)
        changed[place] ^= 1 << data.draw(st.integers(0, 7))
        assert checksum([changed]) != expected
    assert checksum([contents, b"\0"]) != expected
