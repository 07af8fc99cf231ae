"""Views of the four-bit formats: shapes, parts, bytes, exchange with other libraries, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from four_bit_cases import FOUR_BIT

import kvcupy as kv
from kvcupy import arrays, formats

ROW_BYTES = {"nvfp4": 72, "mxfp4": 68, "int4": 72}


def packed(*shape, fmt="nvfp4", width=128):
    return np.zeros((*shape, formats.FOUR_BIT[fmt].row_bytes(width)), np.uint8)


def split(fmt="nvfp4", rows=6, width=128):
    """Codes and scales in separate arrays."""
    form = formats.FOUR_BIT[fmt]
    carrier = {1: np.uint8, 2: np.uint16}[form.scale_bytes]
    return np.zeros((rows, width // 2), np.uint8), np.zeros((rows, width // form.group), carrier)


@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_a_row_is_codes_and_scales(fmt):
    form, raw = formats.FOUR_BIT[fmt], packed(4, 3, fmt=fmt)
    v = kv.view_as(raw, fmt)
    assert raw.shape[-1] == form.row_bytes(128) == ROW_BYTES[fmt]
    assert (v.shape, v.format, v.strides[:2]) == ((4, 3, 128), fmt, raw.strides[:2])
    assert v.num_bytes == raw.nbytes
    assert v.codes.shape == (4, 3, 64)
    assert v.scales.shape == (4, 3, 128 // form.group)
    assert v.scales.pointer == raw.ctypes.data + 64
    assert v.packed.shape == raw.shape
    assert v.byte_range() == (raw.ctypes.data, raw.ctypes.data + raw.nbytes)
    assert formats.bytes_per_element(fmt) * 128 == raw.shape[-1]


def test_rows_are_indexed_whole():
    raw = packed(4, 3)
    v = kv.view_as(raw, "nvfp4")
    for index in (1, (slice(None), 2), (..., slice(None)), (-1, slice(None, None, -2)), (0, 1, ...),
                  (0, None, slice(1, 3), slice(None))):  # fmt: skip
        part, want = v[index], raw[index]
        assert part.shape == (*want.shape[:-1], 128), index
        assert part.packed.strides == want.strides, index
        assert part.pointer == want.ctypes.data, index
    for index in ((0, 0, 5), (..., slice(0, 72)), (..., None), (0, 0, slice(None), None),
                  (..., slice(None, None, 2)), (..., -1), (..., slice(8, 128)), (..., slice(1.5)),
                  (..., slice(0, 16, 0)), (..., slice(64, 32)), (..., slice(16, 16))):  # fmt: skip
        with pytest.raises(ValueError, match=r"index: .*whole"):
            v[index]


def test_whole_groups_of_rows_are_views():
    raw = packed(4, 3)
    v = kv.view_as(raw, "nvfp4")
    for index, codes, scales in (
        ((..., slice(0, 64)), raw[..., :32], raw[..., 64:68]),
        ((1, slice(None), slice(-32, None)), raw[1, :, 48:64], raw[1, :, 70:]),
    ):
        part = v[index]
        assert part.shape == (*codes.shape[:-1], 2 * codes.shape[-1])
        assert (part.pointer, part.scales.pointer) == (codes.ctypes.data, scales.ctypes.data)
        assert part.strides[:-1] == codes.strides[:-1]
        assert part.scales.shape == scales.shape


@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_arrays_of_a_device(device, fmt):
    for make in (device.empty, device.zeros, device.empty_pinned):
        v = make((3, 2, 128), fmt)
        assert (v.format, v.shape, v.packed.shape) == (fmt, (3, 2, 128), (3, 2, ROW_BYTES[fmt]))
        assert v.pinned == (make == device.empty_pinned)
    raw = device.to_numpy(device.zeros((3, 2, 128), fmt))
    assert (raw.dtype, raw.shape, raw.any()) == (np.uint8, (3, 2, ROW_BYTES[fmt]), False)
    assert device.zeros(128, fmt).shape == (128,)
    for shape in ((3, 100), (3, 2.5), "128"):
        with pytest.raises((TypeError, ValueError), match="shape"):
            device.zeros(shape, fmt)


def test_other_libraries_get_bytes():
    torch = pytest.importorskip("torch")
    raw = np.random.default_rng(1).integers(0, 256, (4, 72), dtype=np.uint8)
    v = kv.view_as(raw, "nvfp4")
    np.testing.assert_array_equal(np.from_dlpack(v), raw)
    tensor = torch.from_dlpack(v)
    assert tensor.data_ptr() == raw.ctypes.data
    assert tensor.dtype == torch.uint8
    again = kv.view_as(tensor, "nvfp4")
    assert (again.library, again.pointer, again.shape) == ("torch", v.pointer, v.shape)
    assert arrays.tensor_of(v).shape == (4, 72)
    scales = torch.zeros((4, 8), dtype=torch.float8_e4m3fn)
    apart = kv.view_as(torch.zeros((4, 64), dtype=torch.uint8), "nvfp4", scales=scales)
    with pytest.raises(BufferError, match="scales"):
        apart.__dlpack__()
    with pytest.raises(ValueError, match=r"\.codes and \.scales"):
        kv.device("host").to_numpy(apart)
    assert torch.from_dlpack(apart.codes).shape == (4, 64)
    assert torch.from_dlpack(apart.scales).dtype == torch.float8_e4m3fn


REFUSED = {
    "rows of no whole groups": (lambda: kv.view_as(packed(3)[:, :70], "nvfp4"),
                                "array: .* 9 bytes"),
    "no elements": (lambda: kv.view_as(packed(3)[:, :0], "nvfp4"), "array: "),
    "a strided row": (lambda: kv.view_as(packed(3)[:, ::2], "nvfp4"), "array: .*contiguous"),
    "a number": (lambda: kv.view_as(np.array(3, np.uint8), "nvfp4"), "array: .*last axis"),
    "wide integers": (lambda: kv.view_as(np.zeros((3, 72), np.uint16), "nvfp4"), "array: .*uint8"),
    "odd rows": (lambda: kv.view_as(np.zeros(1 + 2 * 72, np.uint8)[1:].reshape(2, 72), "int4"),
                 "array: .*multiples of 2"),
    "odd strides": (lambda: kv.view_as(np.zeros((3, 73), np.uint8)[:, :72], "int4"),
                    "array: .*multiples of 2"),
    "scales of another shape": (lambda: kv.view_as(split()[0], "nvfp4", scales=split(rows=5)[1]),
                                r"scales: expected \(6, 8\)"),
    "scales of another type": (lambda: kv.view_as(split()[0], "nvfp4",
                                                  scales=np.zeros((6, 8), np.float32)), "scales: "),
    "scales of bytes": (lambda: kv.view_as(split()[0], "nvfp4", scales=split()[1].astype(bool)),
                        "scales: .*fp8_e4m3"),
    "strided scales": (lambda: kv.view_as(split()[0], "nvfp4", scales=split(width=256)[1][:, ::2]),
                       "scales: .*contiguous"),
    "scales of fp8": (lambda: kv.view_as(np.zeros((3, 4), np.uint8), "fp8_e4m3", scales=1),
                      "scales: expected None"),
    "an unknown format": (lambda: kv.view_as(packed(3), "fp4"), "dtype: .*nvfp4"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what):
    call, message = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# Which bytes are touched ---------------------------------------------------------------------


def test_overlaps_are_those_of_the_bytes():
    raw = packed(8)
    v = kv.view_as(raw, "nvfp4")
    assert arrays.overlap(v[2:4], v[3:5])
    assert not arrays.overlap(v[::2], v[1::2])
    assert arrays.overlap(v[:2], arrays.view(raw[1, 71:]))
    codes = kv.view_as(raw[:, :64], "nvfp4", scales=np.zeros((8, 8), np.uint8))
    assert not arrays.overlap(codes, v.scales)
    assert arrays.overlap(codes, v)
    assert not arrays.overlaps_itself(v)
    assert arrays.overlaps_itself(
        kv.view_as(np.lib.stride_tricks.as_strided(raw, (3, 72), (64, 1)), "nvfp4")
    )


def test_caches_that_share_rows_are_refused():
    cache = kv.view_as(packed(8), "nvfp4")
    key = np.zeros((2, 128), np.float32)
    slots = np.array([0, 1])
    kv.store_kv(key, key, cache[:4], cache[4:], slots)
    kv.store_kv(key, key, cache[::2], cache[1::2], slots)
    with pytest.raises(ValueError, match="cache: expected memory of its own"):
        kv.store_kv(key, key, cache[:4], cache[3:7], slots)
    for apart in (cache.scales, split()[1][:4]):  # one call of each plan
        codes = kv.view_as(split()[0][:4], "nvfp4", scales=np.zeros((4, 8), np.uint8))
        taken = kv.view_as(split()[0][:4], "nvfp4", scales=arrays.view(apart)[:4])
        kv.store_kv(key, key, codes, taken, slots)
    shared = kv.view_as(split()[0][:4], "nvfp4", scales=cache.scales[2:6])
    with pytest.raises(ValueError, match="cache: expected memory of its own"):
        kv.store_kv(key, key, cache[:4], shared, slots)
