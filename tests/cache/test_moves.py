"""Copies within a pool, against a loop in NumPy over all of the pool's bytes."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import Gate, Log

import kvcupy as kv
from kvcupy import observe
from kvcupy.cache.paged.moves import PageMover

PAGES, SIZE, LAYERS = 7, 4, 3
SLOTS = PAGES * SIZE


class Filled:
    """A pool of random bits, and the same bits by page, layer and offset on the host."""

    def __init__(self, device, kind="kv", fmt="bf16", seed=1, shape=(PAGES, SIZE, LAYERS), **more):
        if kind == "kv":
            pool = kv.KVPool(*shape, 2, 6, v_head_dim=10, dtype=fmt, device=device, **more)
        else:
            pool = kv.MLAPool(*shape, 6, dtype=fmt, device=device, **more)
        rng = np.random.default_rng(seed)
        self.pool, self.parts = pool, (*pool.parts, *pool.scale_parts)
        self.device = kv.device(self.parts[0].device)
        self.want = []
        for part in self.parts:
            carrier = self.device.carrier(part)
            bits = rng.integers(0, 256, (*part.shape, carrier.itemsize), dtype=np.uint8)
            self.want.append(bits)
            carrier[...] = self.device.asarray(bits.view(carrier.dtype)[..., 0])
        self.device.synchronize()
        self.mover = PageMover(pool)

    def copy_pages(self, src, dst):
        """Expect copies of pages."""
        for bits in self.want:
            for one, other in zip(src, dst, strict=True):
                bits[other] = bits[one]

    def move_slots(self, src, dst):
        """Expect moves of tokens, one after another."""
        for bits in self.want:
            for one, other in zip(src, dst, strict=True):
                (p, o), (q, r) = divmod(int(one), SIZE), divmod(int(other), SIZE)
                bits[q, :, r] = bits[p, :, o]

    def check(self, why=""):
        kv.check_faults(self.device)
        self.check_bits(why)

    def check_bits(self, why=""):
        """Compare without waiting for any stream."""
        for part, want in zip(self.parts, self.want, strict=True):
            whole = np.asarray(self.device.to_numpy(part))
            got = np.ascontiguousarray(whole).view(np.uint8).reshape(want.shape)
            assert np.array_equal(got, want), (
                f"{part}: first at (page, layer, offset, head, element, byte) "
                f"{np.argwhere(got != want)[0]} {why}"
            )


def issued(call):
    """How many copies, and how many launches, a call issues."""
    with observe.attached(Log()) as log:
        call()
    names = [operation.name for operation in log.operations]
    assert set(names) <= {"copy", "copy_pages"}
    return names.count("copy"), names.count("copy_pages")


# --- Slots ---


def longest_chain(src, dst):
    """How many launches an array there must be: by all pairs of moves, which is slow and plain."""
    moves = [(s, d) for s, d in zip(src, dst, strict=True) if s != d]
    place = []
    for i, (s, d) in enumerate(moves):
        behind = [place[j] + 1 for j in range(i) if moves[j][1] == s or moves[j][0] == d]
        beside = [place[j] for j in range(i) if moves[j][1] == d]
        place.append(max(1, *behind, *beside, 1))
    return max(place, default=0)


@settings(max_examples=examples(150), deadline=None, database=None)
@given(
    moves=st.lists(
        st.tuples(*[st.integers(0, SLOTS - 1) | st.integers(0, 5)] * 2), max_size=40
    ),
    kind=st.sampled_from(["kv", "mla"]),
    dtype=st.sampled_from([None, np.int32, np.int64]),
)  # fmt: skip
def test_any_moves(device, moves, kind, dtype):
    """Few slots, so that most moves have to do with one another; as few launches as can be."""
    filled = Filled(device, kind, "fp8_e5m2", scales=True)
    src, dst = [s for s, _ in moves], [d for _, d in moves]
    sides = (src, dst) if dtype is None else (np.array(src, dtype), np.array(dst, dtype))
    _, launches = issued(lambda: filled.mover.move_slots(*sides))
    assert launches == longest_chain(src, dst) * len(filled.parts)
    filled.move_slots(src, dst)
    filled.check()


# --- Streams and graphs ---


def load_kernels(device, **options):
    """A first load on a GPU may wait for the device, and that for a gate."""
    mover = Filled(device, **options).mover
    mover.move_slots([1], [0])
    mover.copy_pages([1], [2])
    device.synchronize()


@pytest.mark.races
def test_in_the_order_of_a_stream_with_lists_that_are_reused(device):
    """Behind a gate nothing is copied; lists and arrays may change before it opens."""
    load_kernels(device, fmt="int8", scales=True)
    filled, stream = Filled(device, fmt="int8", scales=True), device.stream()
    gate = Gate(stream)
    lists, arrays = ([1, 2, 3], [0, 1, 2]), tuple(np.array(n) for n in ([3, 6], [1, 4]))
    for _ in range(3):
        filled.mover.move_slots(*lists, stream)
        filled.mover.copy_pages(*arrays, stream)
    filled.check_bits("(before the gate opened)")
    for _ in range(3):
        filled.move_slots(*lists)
        filled.copy_pages(*arrays)
    for side in (*lists, *arrays):
        side[:] = [0] * len(side)
    gc.collect()
    gate.open()
    stream.synchronize()
    filled.check()


def test_a_graph_repeats_the_moves_that_it_captured(device):
    filled, stream = Filled(device, fmt="fp8_e4m3", scales=True), device.stream()
    src, dst, pages = np.array([1, 2, 3]), np.array([0, 1, 2]), np.array([2])
    with stream.capture() as graph:
        filled.mover.move_slots(src, dst, stream)
        filled.mover.copy_pages(pages, pages + 3, stream)
    filled.check("(nothing runs before the launch)")
    for _ in range(2):
        src[:], dst[:], pages[:] = 9, 10, 6
        filled.mover.move_slots([25, 26], [27, 25])  # takes other buffers
        filled.move_slots([25, 26], [27, 25])
        device.synchronize()
        graph.launch(stream)
        stream.synchronize()
        filled.move_slots([1, 2, 3], [0, 1, 2])
        filled.copy_pages([2], [5])
        filled.check()
