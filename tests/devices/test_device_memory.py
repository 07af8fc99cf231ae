"""Arrays, copies and copies of runs: what every device does, on the device of ``--device`` and on
the stand-in for CUDA."""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
from stream_cases import Gate

from kvcupy import arrays, formats
from kvcupy.arrays import is_pinned


@pytest.fixture
def device(each_device):
    return each_device


@pytest.mark.parametrize("name", [*formats.FORMATS, "int64", "int32"])
def test_arrays_of_every_format_go_there_and_back(device, name):
    source = np.arange(24).reshape(4, 6).astype(formats.numpy_dtype(name)).T
    there = device.asarray(source)
    assert arrays.view(there).format == name
    assert arrays.view(device.empty((3, 4), name)).format == name
    np.testing.assert_array_equal(device.to_numpy(there), source)
    assert not device.to_numpy(device.zeros((4, 6), name)).view(np.uint8).any()


def test_four_bit_arrays_are_views_of_bytes(device):
    """With scales in a separate array they are copied in two parts."""
    raw = np.random.default_rng(0).integers(0, 256, (3, 2, 72), dtype=np.uint8)
    source = arrays.view_as(device.asarray(raw), "nvfp4")
    assert source.shape == (3, 2, 128)
    target, pinned = device.zeros((3, 2, 128), "nvfp4"), device.empty_pinned((3, 2, 128), "nvfp4")
    assert (target.format, target.packed.shape, pinned.pinned) == ("nvfp4", (3, 2, 72), True)
    np.testing.assert_array_equal(device.to_numpy(target), 0)
    codes, scales = (device.zeros((3, 2, n), np.uint8) for n in (64, 8))
    apart = arrays.view_as(codes, "nvfp4", scales=scales)
    device.copy(apart, source)
    device.copy(target, apart)
    device.copy(pinned, target)
    device.synchronize()
    np.testing.assert_array_equal(device.to_numpy(pinned), raw)
    np.testing.assert_array_equal(device.to_numpy(target), raw)


@pytest.mark.parametrize("shape", [0, 5, (3, 0, 2), (7, 33)])
def test_shapes_and_pinned_memory(device, shape):
    for make in (device.empty, device.zeros, device.empty_pinned):
        array = arrays.view(make(shape, "bf16"))
        assert (array.shape, array.format) == (np.empty(shape).shape, "bf16")
    pinned = device.empty_pinned(shape, "bf16")
    assert pinned.dtype == ml_dtypes.bfloat16
    if pinned.size:
        assert all(map(is_pinned, (pinned, pinned[1:], pinned.view(np.uint16), pinned.T)))
        assert not is_pinned(pinned.copy())


CUTS = {
    "contiguous": lambda a: a,
    "rows": lambda a: a[:, :, :5],
    "strided": lambda a: a[::2, :, 1:],
    "reversed": lambda a: a[::-1, :, ::-1],
    "transposed": lambda a: a.transpose((2, 0, 1)),
    "empty": lambda a: a[:0],
    "scalar": lambda a: a[1:2, 2:3, 3:4],
}
SIDES = ["pinned pinned", "pinned device", "device pinned", "pageable device", "device pageable",
         "device device", "pageable pageable"]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.uint8])
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("on_stream", [False, True], ids=["current", "stream"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.covering(2)
def test_copies_of_any_layout_are_exact(device, cut, sides, on_stream, dtype):
    shape, at = (6, 4, 8), CUTS[cut]
    values = np.random.default_rng(0).integers(1, 255, shape).astype(dtype)

    def make(kind, content):
        if kind == "device":
            return device.asarray(content)
        array = (device.empty_pinned if kind == "pinned" else np.empty)(shape, dtype)
        array[...] = content
        return array

    to, of = sides.split()
    stream = device.stream() if on_stream else None
    for dst_at, src_at in ((at, at), (at, None), (None, at)):
        whole = at(values)
        src = at(make(of, values)) if src_at else np.ascontiguousarray(whole)
        base = make(to, np.zeros_like(values))
        dst = at(base) if dst_at else np.zeros_like(whole)
        device.copy(dst, src, stream=stream)
        device.synchronize()
        expected = np.zeros_like(values)
        at(expected)[...] = whole
        np.testing.assert_array_equal(device.to_numpy(dst), whole)
        if dst_at:
            np.testing.assert_array_equal(device.to_numpy(base), expected)


def test_a_wrong_copy_is_refused_before_anything_is_copied(device):
    dst = np.zeros((2, 3), np.float32)
    for src in (np.ones((3, 2), np.float32), np.ones(6, np.float32), np.ones((2, 3), np.int32)):
        with pytest.raises(ValueError, match=r"^dst: expected \(.*got \(2, 3\) fp32"):
            device.copy(dst, src)
    with pytest.raises(TypeError, match=r"^src:"):
        device.copy(dst, 3.0)
    with pytest.raises(TypeError, match=r"^dst:"):
        device.copy([0.0], dst)
    dst.setflags(write=False)
    with pytest.raises(ValueError, match=r"^dst: expected a writable"):
        device.copy(dst, np.ones((2, 3), np.float32))
    device.synchronize()
    assert not dst.any()


PLACES = SIDES[:-1]  # a device need not copy runs within pageable memory


class Pieces:
    """Parts of `src` that go to `dst` in another order, a byte apart, among bytes that stay."""

    def __init__(self, device, sizes=(3, 0, 1, 40, 17), sides="pinned pinned"):
        self.device, self.pageable = device, "pageable" in sides
        to, of = sides.split()
        random = np.random.default_rng(len(sizes))
        self.values = random.integers(1, 256, max(1, sum(sizes)), np.uint8)
        self.src = self._place(of, self.values)
        self.dst = self._place(to, np.zeros(sum(sizes) + len(sizes) + 1, np.uint8))
        self.sizes = np.array(sizes, np.uint64)
        self.starts = np.cumsum([0, *sizes], dtype=np.uint64)[:-1]
        self.places = np.empty_like(self.starts)
        order = random.permutation(len(sizes))
        self.places[order] = np.cumsum([0, *(self.sizes[order] + 1)], dtype=np.uint64)[:-1]
        device.synchronize()

    def _place(self, where, content):
        if where == "device":
            return self.device.asarray(content)
        make = self.device.empty_pinned if where == "pinned" else np.empty
        array = make(content.shape, np.uint8)
        array[...] = content
        return array

    @property
    def runs(self):
        to, of = (np.uint64(arrays.view(array).pointer) for array in (self.dst, self.src))
        return to + self.places, of + self.starts, self.sizes

    def enqueue(self, stream, runs=None):
        keep = (self.src, self.dst)
        self.device.copy_runs(*(runs or self.runs), stream, keep, self.pageable)

    @property
    def copied(self):
        return self.device.to_numpy(self.dst).any()

    def check(self):
        expected = np.zeros(self.dst.shape, np.uint8)
        for to, of, size in zip(self.places, self.starts, self.sizes, strict=True):
            expected[int(to) : int(to + size)] = self.values[int(of) : int(of + size)]
        np.testing.assert_array_equal(self.device.to_numpy(self.dst), expected)


@pytest.mark.covering(2)
@pytest.mark.parametrize("sides", PLACES)
@pytest.mark.parametrize("on_stream", [False, True], ids=["current", "stream"])
@pytest.mark.parametrize("sizes", [(3, 0, 1, 40, 17), (5,), (0, 0), (), (1,) * 200])
def test_runs_are_copied_exactly(device, sizes, on_stream, sides):
    pieces = Pieces(device, sizes, sides)
    pieces.enqueue(device.stream() if on_stream else device.as_stream(None))
    device.synchronize()
    pieces.check()


def test_runs_wait_their_turn_and_the_lists_may_change(device):
    pieces, stream = Pieces(device), device.stream()
    gate = Gate(stream)
    lists = [array.copy() for array in pieces.runs]
    pieces.enqueue(stream, lists)
    for array in lists:
        array[...] = 0
    assert not pieces.copied and not stream.done()
    gate.open()
    stream.synchronize()
    pieces.check()


@pytest.mark.parametrize("captured", [False, True])
def test_owners_live_until_the_copies_are_done_and_no_longer(device, captured):
    pieces, stream = Pieces(device), device.stream()
    gone = weakref.ref(pieces.src)
    if captured:
        with stream.capture() as graph:
            pieces.enqueue(stream)
        graph.launch(stream)
    gate = Gate(stream)
    if captured:
        graph.launch(stream)
        graph = None
    else:
        pieces.enqueue(stream)
    pieces.src = None
    gc.collect()
    assert gone() is not None
    gate.open()
    device.synchronize()
    gc.collect()
    device.synchronize()
    assert gone() is None
    pieces.check()


def test_captured_runs_are_copied_at_each_replay(device):
    pieces, stream = Pieces(device), device.stream()
    with stream.capture() as graph:
        pieces.enqueue(stream)
    device.synchronize()
    assert not pieces.copied
    for _ in range(2):
        pieces.src[...] = pieces.values[...] = pieces.values[::-1].copy()
        graph.launch(stream)
        stream.synchronize()
        pieces.check()


@pytest.mark.parametrize("on_stream", [False, True], ids=["current", "stream"])
def test_lists_that_are_no_runs_are_refused_at_once(device, on_stream):
    good = np.zeros(3, np.uint64)
    stream = device.stream() if on_stream else device.as_stream(None)
    with pytest.raises(TypeError, match="src: expected a NumPy array of uint64, got int64"):
        device.copy_runs(good, good.astype(np.int64), good, stream)
    with pytest.raises(TypeError, match=r"dst: .* got list"):
        device.copy_runs([0], good, good, stream)
    with pytest.raises(ValueError, match=r"sizes: expected shape \(3,\), got \(4,\)"):
        device.copy_runs(good, good, np.zeros(4, np.uint64), stream)
    for dst in (good[0], good.reshape(1, 3)):
        with pytest.raises(ValueError, match=r"dst: expected shape \(runs,\), got \("):
            device.copy_runs(np.asarray(dst), good, good, stream)
    stream.synchronize()
