"""Copies of runs: what every device does, on the device of ``--device`` and on the stand-in."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from stream_cases import Gate

from kvcupy import arrays

SIDES = ["pinned pinned", "device pinned", "pinned device", "device device", "device pageable",
         "pageable device"]  # fmt: skip


@pytest.fixture
def device(each_device):
    return each_device


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


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("on_stream", [False, True], ids=["current", "stream"])
@pytest.mark.parametrize("sizes", [(3, 0, 1, 40, 17), (5,), (0, 0), (), (1,) * 200])
def test_runs_are_copied_exactly(device, sizes, on_stream, sides):
    pieces = Pieces(device, sizes, sides)
    pieces.enqueue(device.stream() if on_stream else device.as_stream(None))
    device.synchronize()
    pieces.check()


def test_strided_lists_of_runs(device):
    pieces = Pieces(device)
    pieces.enqueue(device.as_stream(None), [np.repeat(array, 2)[::2] for array in pieces.runs])
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


def test_runs_are_in_order_among_other_work(device):
    pieces, stream, seen = Pieces(device), device.stream(), []
    pieces.enqueue(stream)
    stream.call(lambda: seen.append(pieces.dst.copy()))
    stream.call(lambda: pieces.dst.fill(0))
    pieces.enqueue(stream)
    stream.synchronize()
    pieces.check()
    np.testing.assert_array_equal(seen[0], pieces.dst)


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
