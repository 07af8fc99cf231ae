"""Prove the specification of `transfer_pages`: element by element, by hand, and by composition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import DTYPE, FORMATS, QUANTISED, UNSIGNED, from_values, random_elements

from kvcupy import reference

LAYERS, SIZE, HEADS, WIDTHS = 3, 2, 2, (5, 3)
SRC, DST = np.array([4, -1, 0, 2, 1, 5, 3]), np.array([1, 0, 6, -3, 7, 2, 3])
"""Of five pages here and six there: 4 to 1 and 3 to 3 are whole, the rest is skipped or past."""
WHOLE = {4: 1, 3: 3}


def parts(rng, fmt, pages):
    """K and V with any bits, as transposed views, so that strides are nobody's guess."""
    shapes = [(pages, HEADS, LAYERS, width, SIZE) for width in WIDTHS]
    drawn = [random_elements(rng, fmt, int(np.prod(s))).reshape(s) for s in shapes]
    return [a.transpose(2, 0, 4, 1, 3) for a in drawn]


def scales(rng, pages):
    values = rng.uniform(0.01, 9, (2, LAYERS, pages, SIZE, HEADS)).astype(np.float32)
    values[:, 1, :, 0] = 1e-30
    return list(values)


def bits(array):
    return array.view(UNSIGNED[array.dtype.itemsize])


def copies(arrays):
    return [a.copy() for a in arrays]


@pytest.mark.parametrize("layers", [None, 1, [2, 0], (1,), range(0, 3, 2), []])
@pytest.mark.parametrize("fmt", FORMATS)
def test_one_format_copies_bits(fmt, layers):
    """Element by element, and everything else stays."""
    rng = np.random.default_rng(1)
    src, dst = parts(rng, fmt, 5), parts(rng, fmt, 6)
    src_scales, dst_scales = scales(rng, 5), scales(rng, 6)
    before, want = copies(src), copies(dst)
    want_scales = copies(dst_scales)
    chosen = (
        {None: [0, 1, 2], 1: [1]}.get(layers, layers) if not isinstance(layers, list) else layers
    )
    for layer, (of, to), offset, head in itertools.product(
        chosen, WHOLE.items(), range(SIZE), range(HEADS)
    ):
        for part, width in enumerate(WIDTHS):
            for i in range(width):
                at = (offset, head, i)
                bits(want[part])[(layer, to, *at)] = bits(src[part])[(layer, of, *at)]
            want_scales[part][layer, to, offset, head] = src_scales[part][layer, of, offset, head]
    reference.transfer_pages(
        src, dst, SRC, DST, layers=layers, src_scales=src_scales, dst_scales=dst_scales
    )
    for got, expected in zip([*dst, *src], [*want, *before], strict=True):
        assert np.array_equal(bits(got), bits(expected))
    assert all(map(np.array_equal, dst_scales, want_scales))


def test_faults_are_positions_and_pages():
    """On either side, or both in one pair; a negative page excuses the page beside it."""
    rng = np.random.default_rng(2)
    src, dst = parts(rng, "int8", 5), parts(rng, "int8", 6)
    assert reference.transfer_pages(src, dst, SRC, DST) == ([(5, 5)], [(2, 6), (4, 7)])
    both = np.array([2**40, -1, 5]), np.array([6, 6, -1])
    before = copies(dst)
    assert reference.transfer_pages(src, dst, *both) == ([(0, 2**40)], [])  # a pair counts once
    assert all(map(np.array_equal, dst, before))
    nothing = np.array([], np.int64)
    assert reference.transfer_pages(src, dst, nothing, nothing) == ([], [])


@pytest.mark.parametrize("pair", list(itertools.permutations(FORMATS, 2)), ids="-".join)
def test_conversion_is_a_gather_and_a_store(pair):
    """Into float32 by `gather_kv`, out of it by `store_kv`, with the scales that there are."""
    rng = np.random.default_rng(4)
    of, to = pair
    src, dst = parts(rng, of, 5), parts(rng, to, 6)
    src_scales = scales(rng, 5) if of in QUANTISED else None
    for dst_scales in (None, scales(rng, 6)) if to in QUANTISED else (None,):
        want, want_scales = copies(dst), copies(dst_scales or [])
        slots_of, slots_to = (
            np.concatenate([np.arange(p * SIZE, (p + 1) * SIZE) for p in pages])
            for pages in zip(*WHOLE.items(), strict=True)
        )
        for layer in (0, 2):
            rows = [np.zeros((len(slots_of), HEADS, w), np.float32) for w in WIDTHS]
            by = {} if src_scales is None else scale_caches(src_scales, layer)
            k_of, v_of = (a[layer] for a in src)
            reference.gather_kv(k_of, v_of, slots_of, k_out=rows[0], v_out=rows[1], **by)
            by = {} if dst_scales is None else scale_caches(want_scales, layer)
            reference.store_kv(*rows, *(a[layer] for a in want), slots_to, **by)
        reference.transfer_pages(
            src, dst, SRC, DST, layers=[2, 0], src_scales=src_scales, dst_scales=dst_scales
        )
        for got, expected in zip(dst, want, strict=True):
            assert np.array_equal(bits(got), bits(expected))
        assert all(map(np.array_equal, dst_scales or [], want_scales))


def scale_caches(arrays, layer):
    """The scales of one layer, as `gather_kv` and `store_kv` take them."""
    return {
        f"{side}_scale_cache": a[layer].reshape(-1, HEADS)
        for side, a in zip("kv", arrays, strict=True)
    }


@pytest.mark.parametrize("other", FORMATS)
@pytest.mark.parametrize("packed", reference.FOUR_BIT)
def test_conversion_of_four_bits_is_a_gather_and_a_store(packed, other):
    """Both ways, of rows of two groups; what has scales has them on both sides."""
    rng = np.random.default_rng(6)
    form = reference.FOUR_BIT[packed]
    shape = (LAYERS, 6, SIZE, HEADS, 2 * form.group)
    plain = random_elements(rng, other, int(np.prod(shape))).reshape(shape)
    raw = rng.integers(0, 256, (*shape[:-1], 2 * form.group_bytes), dtype=np.uint8)
    by = scales(rng, 6)[:1] if other in QUANTISED else None
    for narrows in (True, False):
        got, want = ((raw if narrows else plain).copy() for _ in range(2))
        got_by, want_by = (copies(by) if by else None for _ in range(2))
        got_rows, want_rows, rows = (
            reference.FourBitRows.packed(a, packed) if a.shape[-1] != shape[-1] else a
            for a in (got, want, (plain if narrows else raw)[:, :5])
        )
        reference.transfer_pages(
            [rows], [got_rows], SRC, DST, layers=1,
            src_scales=by if narrows else None, dst_scales=None if narrows else got_by,
        )  # fmt: skip
        for of, to in WHOLE.items():
            for offset in range(SIZE):
                row, target = rows[1, of, offset][None], want_rows[1, to, offset][None]
                of_row = None if by is None or not narrows else by[0][1, of, offset][None]
                floats = np.zeros((1, *shape[-2:]), np.float32)
                slot = np.array([0])
                options = {} if of_row is None else dict.fromkeys(SCALE_CACHES, of_row)
                reference.gather_kv(row, row, slot, k_out=floats, v_out=floats, **options)
                options = {}
                if want_by is not None and not narrows:
                    options = dict.fromkeys(SCALE_CACHES, want_by[0][1, to, offset][None])
                reference.store_kv(floats, floats, target, target, slot, **options)
        assert np.array_equal(bits(got), bits(want))
        if by is not None:
            assert np.array_equal(got_by, want_by)


SCALE_CACHES = ("k_scale_cache", "v_scale_cache")


def test_conversion_by_hand():
    """One token of two heads: int8 with scales to fp8 with scales, to fp16, and back to int8."""
    stored = np.int8([[127, -64, 0, 1], [0, 0, 0, 0]]).reshape(1, 1, 1, 2, 4)
    by = np.float32([0.5, 3.0]).reshape(1, 1, 1, 2)
    zero = np.array([0])

    fp8 = np.zeros(stored.shape, DTYPE["fp8_e4m3"])
    fp8_scales = np.zeros(by.shape, np.float32)
    reference.transfer_pages([stored], [fp8], zero, zero, src_scales=[by], dst_scales=[fp8_scales])
    # 63.5 is the largest of 63.5 -32 0 0.5, so that it becomes 448; a row of zeros keeps a scale.
    scale = np.float32(63.5) / np.float32(448)
    assert fp8_scales.ravel().tolist() == [scale, np.float32(1e-6) / np.float32(448)]
    want = from_values(np.float32([63.5, -32, 0, 0.5]) / scale, "fp8_e4m3")
    assert fp8.ravel()[:4].astype(np.float32).tolist() == want.astype(np.float32).tolist()
    assert fp8.ravel()[0] == 448 and not fp8.ravel()[4:].astype(np.float32).any()

    half = np.zeros(stored.shape, np.float16)
    reference.transfer_pages([stored], [half], zero, zero, src_scales=[by])
    assert half.ravel().tolist() == [63.5, -32, 0, 0.5, 0, 0, 0, 0]

    special = np.float16([np.nan, np.inf, -np.inf, 2.5, 3.5, -0.0, 127.5, 1e-7]).reshape(half.shape)
    back = np.full(stored.shape, 9, np.int8)
    reference.transfer_pages([special], [back], zero, zero)
    assert back.ravel().tolist() == [0, 127, -127, 2, 4, 0, 127, 0]
