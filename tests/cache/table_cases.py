"""Steps with random tables, readers that copy them away, and waits that are left out."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
from engine_cases import PATIENCE_S

import kvcupy as kv
from kvcupy.cache.hazards import CopyStream
from kvcupy.cache.paged.tables import TableRing

HOLD_S = 0.03  # for so long something is held up, that must be waited for
POISON = 0x5A


class Source:
    """A step of `count` tokens whose tables are random numbers. `refuse` raises instead."""

    def __init__(self, seed, count=5, pages=4, refuse=None):
        rng = np.random.default_rng(seed)
        self.refuse = refuse
        self.asked = self.asked_shapes = 0
        self.arrays = {
            "slots": rng.integers(-(2**62), 2**62, count, np.int64),
            "mask": rng.integers(0, 2, (count, 3)).astype(bool),
            "positions": rng.integers(-(2**30), 2**30, count, np.int32),
            "none": np.zeros((count, 0), np.int32),
            "table": rng.integers(-(2**30), 2**30, (pages, count), np.int32),
        }

    def tables(self):
        self.asked += 1
        if self.refuse is not None:
            raise self.refuse
        return self.arrays

    def captured_shapes(self):
        self.asked_shapes += 1
        if self.refuse is not None:
            raise self.refuse
        shapes = {name: (a.shape, kv.formats.tag(a.dtype)) for name, a in self.arrays.items()}
        pages, count = self.arrays["table"].shape
        return {**shapes, "table": ((pages + 3, count), "int32")}

    def captured_tables(self, shapes):
        if shapes["table"][0][1] != self.arrays["table"].shape[1]:
            raise ValueError("seqs: expected as many as in the captured step")
        return self.tables()

    def before_launch(self, stream):
        pass


class World:
    """A ring, two compute streams, and all that they have read.

    `read` puts a reader on a stream, `check` compares what every reader has seen, once the device
    has been synchronised.
    """

    def __init__(self, device, num_slots=1, copy_stream=None, copies=None):
        self.device = device
        self.entered = []
        copies = copies or CopyStream(device, copy_stream)
        self.ring = TableRing(copies, num_slots, self.entered.append)
        self.compute, self.other = device.stream(), device.stream()
        self.compute.name, self.other.name = "compute", "other"
        self.reads = []

    @property
    def copy_stream(self):
        return self.ring.copies.stream

    @property
    def streams(self):
        return {"copy": self.copy_stream, "compute": self.compute, "other": self.other}

    def private(self, view):
        dtype = kv.formats.numpy_dtype(view.format)
        poison = np.full(view.shape, POISON, np.uint8 if dtype.kind == "b" else dtype)
        return self.device.asarray(poison.view(dtype))

    def read(self, source, views, stream):
        """Let a stream copy the tables away."""
        copies = {}
        for name, view in views.items():
            array = source.arrays[name]
            part = view[: array.shape[0]]  # of a captured table that has space for more
            copies[name] = self.private(part)
            self.device.copy(copies[name], part, stream=stream)
        self.reads.append((source, copies))

    def step(self, seed, *streams, **source):
        """A step that is read on streams, in order."""
        step_source = Source(seed, **source)
        tables = self.ring.open(step_source)
        try:
            for stream in streams or (self.compute,):
                self.read(step_source, tables.on(stream), stream)
        finally:
            tables.close()
        return tables

    def capture(self, seed, stream=None, **source):
        """A graph that copies its tables away; returns it and where to."""
        step_source, on = Source(seed, **source), stream or self.compute
        tables = self.ring.open(step_source)
        with on.capture() as graph:
            views = tables.on(on)
            outs = {name: self.private(view) for name, view in views.items()}
            for name, view in views.items():
                self.device.copy(outs[name], view, stream=on)
        tables.close()
        return graph, outs

    def launch(self, graph, outs, source, stream):
        """Launch a graph within the open step; the stream then takes away what it has read."""
        graph.launch(stream)
        copies = {}
        for name, out in outs.items():
            part = kv.arrays.view(out)[: source.arrays[name].shape[0]]
            copies[name] = self.private(part)
            self.device.copy(copies[name], part, stream=stream)
        self.reads.append((source, copies))

    def graph_step(self, seed, graph, outs, *streams, **source):
        step_source = Source(seed, **source)
        tables = self.ring.open(step_source)
        try:
            for stream in streams or (self.compute,):
                self.launch(graph, outs, step_source, stream)
        finally:
            tables.close()
        return tables

    def check(self, first=0):
        """Every reader has seen the tables of the right step."""
        self.device.synchronize()
        for number, (source, copies) in enumerate(self.reads[first:], start=first):
            for name, copy in copies.items():
                got, want = self.device.to_numpy(copy), source.arrays[name]
                assert got.dtype == want.dtype
                assert np.array_equal(got, want), f"read {number}, {name}: got {got}, want {want}"


@contextmanager
def background(work):
    """Run a function on another thread for the length of a block; its exception is raised."""
    failures = []

    def run():
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it never came to its end"
    if failures:
        raise failures[0]


@contextmanager
def dropped_host_wait(monkeypatch, device, index):
    """Let one wait of the host for an event, counted from 0, not happen. Yields those seen."""
    kind, seen = type(device.event()), []
    genuine = kind.synchronize

    def synchronize(self):
        seen.append(self)
        if len(seen) - 1 != index:
            genuine(self)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "synchronize", synchronize)
        yield seen
