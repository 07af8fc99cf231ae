"""`PagedKVCache`: what is queued on streams that are held up comes out as if each call had waited.

The model runs each call at once; results are compared when the streams have caught up.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from gather_cases import as_numpy
from paged_cases import BINARY, Twin, rope_of
from stream_cases import Gate, delay

import kvcupy as kv
from kvcupy.testing.arrays import assert_near

MOST = 16
"""Rows that every step brings, however few tokens it has."""


class Queue:
    """A cache and its model, and steps of the cache on streams, not waited for.

    Everything that steps bring is on the device before the first of them.
    """

    def __init__(self, device, *, steps=12, **options):
        self.device, self.twin = device, Twin(device, **{"rope": rope_of(8), **options})
        self.cache, self.model = self.twin.cache, self.twin.model
        rng = np.random.default_rng(100)
        count = steps * len(self.twin.layers)
        self.rows = [
            [np.float32(rng.standard_normal((MOST, h, 8)) * 2) for h in (4, 2, 2)]
            for _ in range(count)
        ]
        self.placed = [[device.asarray(a.copy()) for a in rows] for rows in self.rows]
        self.outs = [device.zeros((MOST, 4, 8), np.float32) for _ in range(count)]
        self.late = []

    def step(self, stream, names, lens, trees=None):
        self.twin.both("begin", list(names), lens, trees)
        for layer in self.twin.layers:
            out = self.outs.pop()
            self.cache.attention(layer, *self.placed.pop(), out=out, stream=stream)
            self.late.append((out, *self.model.attention(layer, *self.rows.pop())))
        self.twin.both("end")

    def settle(self):
        """Wait for all, and compare all."""
        self.device.synchronize()
        for number, (out, want, allowed) in enumerate(self.late):
            got = as_numpy(self.device, out, "fp32")[: len(want)]
            assert_near(f"out of call {number}", got, want, allowed, self.twin.seed)
        self.twin.check()


def prefilled(device, **options):
    """Sequences a, of 9 tokens, and b, of 5, that are there already."""
    queue = Queue(device, **options)
    queue.twin.prefill("a", 9, "b", 5)
    device.synchronize()
    return queue


def test_two_steps_in_flight(device):
    """The second is prepared and queued while the first has not begun."""
    queue, stream = prefilled(device), device.stream()
    gate = Gate(stream)
    queue.step(stream, "ab", [3, 1])
    queue.step(stream, "ba", [1, 2])
    gate.open()
    queue.settle()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_more_steps_than_slots(device, slots):
    """Each waits for the slot that it takes, not for all; on a stream that is always late."""
    queue, stream = prefilled(device, slots_in_flight=slots), device.stream()
    for lens in ([3, 1], [1, 1], [2, 5], [1, 1], [1, 1], [4, 2]):
        delay(stream)
        queue.step(stream, "ab", lens)
    queue.settle()


def fork_of_a_step_to_come(queue, stream, gate_of=Gate):
    gate = gate_of(stream)
    queue.step(stream, "ab", [3, 2])
    queue.twin.both("fork", "a", "c", 11)
    queue.twin.both("fork", "b", "d")
    queue.step(stream, "dcb", [1, 2, 1])
    gate.open()
    queue.settle()


def tree_of_a_step_to_come(queue, stream, gate_of=Gate):
    gate = gate_of(stream)
    queue.step(stream, "ab", [7, 1], [BINARY, None])
    queue.twin.both("commit", ["a"], [6])
    queue.step(stream, "ba", [1, 2])
    gate.open()
    queue.settle()


ORDER_CASES = [fork_of_a_step_to_come, tree_of_a_step_to_come]


def load_kernels(device, case):
    """Run a case whose stream nothing holds up: a first load waits for the device."""
    if device.kind == "cuda":
        case(prefilled(device), device.stream(), lambda stream: Opened())


class Opened:
    def open(self): ...


@pytest.mark.parametrize("case", ORDER_CASES)
def test_copies_wait_for_what_they_read(device, case):
    """A fork within a page, and a tree that is compacted, read what the step is yet to write."""
    load_kernels(device, case)
    case(prefilled(device), device.stream())


@pytest.mark.races
@pytest.mark.parametrize("case", ORDER_CASES)
def test_without_waits_they_do_not(device, monkeypatch, case):
    """The control: where no stream waits for another, the same cases end wrongly."""
    load_kernels(device, case)
    queue, stream = prefilled(device), device.stream()
    monkeypatch.setattr(type(stream), "wait", lambda self, other: None)
    with pytest.raises((AssertionError, pytest.fail.Exception, kv.IndexFault)):
        case(queue, stream)
    monkeypatch.undo()
    device.synchronize()
    with suppress(kv.IndexFault):  # of tables that were read before they came
        kv.check_faults(device)


def test_steps_on_two_streams(device):
    """A step on one reads what one on the other wrote, and writes where that one has read."""
    queue, streams = prefilled(device, slots_in_flight=4), [device.stream(), device.stream()]
    gate = Gate(streams[0])
    queue.step(streams[0], "ab", [3, 1])
    queue.step(streams[1], "a", [2])
    queue.twin.both("pop", "a", 4)
    queue.step(streams[1], "ba", [1, 3])
    queue.twin.both("remove", "b")
    queue.twin.both("add", "c")
    gate.open()
    queue.step(streams[0], "ca", [9, 1])
    queue.settle()


def test_pages_change_hands_between_streams(device):
    """What a removed sequence's step still reads is not yet the next one's."""
    queue = prefilled(device, num_pages=5)
    streams = [device.stream(), device.stream()]
    gate = Gate(streams[0])
    queue.step(streams[0], "a", [3])
    queue.twin.both("remove", "a")
    queue.twin.both("add", "c")
    queue.step(streams[1], "c", [12])
    gate.open()
    queue.settle()


def test_contents_of_a_step_to_come(device):
    """`get_kv` and `set_kv` on another stream come after it, and before the next."""
    queue, streams = prefilled(device, slots_in_flight=4), [device.stream(), device.stream()]
    rows = [np.float32(queue.twin.rng.standard_normal((2, 3, 2, 8))) for _ in "kv"]
    placed = [device.asarray(a) for a in rows]
    queue.cache.set_kv("a", 0, *placed)  # loads the kernel
    queue.model.set_kv("a", 0, *rows)
    gate = Gate(streams[0])
    queue.step(streams[0], "ab", [3, 2])
    before = queue.cache.get_kv("a", 8, 12, stream=streams[1])
    want = [a.copy() for a in queue.model.get_kv("a", 8, 12)]
    queue.cache.set_kv("a", 8, *placed, stream=streams[1])
    queue.model.set_kv("a", 8, *rows)
    queue.step(streams[0], "ba", [1, 1])
    gate.open()
    queue.settle()
    for side, array, values in zip("KV", before, want, strict=True):
        queue.twin.compare_rows(side, array, values, "fp32", side)


def test_a_file_of_a_step_to_come(device, tmp_path):
    """Saving waits; what is loaded is there for a step on a stream of its own."""
    pytest.importorskip("safetensors")
    queue, stream = prefilled(device), device.stream()
    delay(stream)
    queue.step(stream, "a", [3])
    queue.cache.save_sequence("a", tmp_path / "a")
    queue.cache.load_sequence("c", tmp_path / "a")
    queue.model.load("c", queue.model.sequences["a"])
    queue.step(device.stream(), "ca", [2, 1])
    queue.settle()


def test_tables_on_a_stream(device):
    """They are copies in order: another step's tables do not show through."""
    queue, stream = prefilled(device, slots_in_flight=2), device.stream()
    seen = []
    for lens in ([1, 2], [3, 1], [1, 1], [2, 2]):
        delay(stream)
        queue.twin.both("begin", ["a", "b"], lens, None)
        copy = device.zeros((sum(lens),), np.int32)
        positions = queue.cache.query_positions(stream=stream)
        device.copy(copy, positions, stream=stream)
        seen.append((copy, queue.model.query_positions()))
        for layer in queue.twin.layers:
            out = queue.outs.pop()
            queue.cache.attention(layer, *queue.placed.pop(), out=out, stream=stream)
            queue.late.append((out, *queue.model.attention(layer, *queue.rows.pop())))
        queue.twin.both("end")
    queue.settle()
    for copy, want in seen:
        np.testing.assert_array_equal(device.to_numpy(copy), want)
