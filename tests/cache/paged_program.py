"""Random programs on a paged cache whose streams are late at random."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import numpy as np
from paged_cases import random_tree

import kvcupy as kv

MAX_TOKENS = 24  # of a step


class Program:
    """Makes calls at random. Two of the same seed make the same calls, on whatever streams.

    Parameters
    ----------
    decoders : captured steps, by how many sequences they are for, which then take part
    """

    def __init__(self, world, seed, decoders=None):
        self.world, self.cache, self.decoders = world, world.cache, decoders or {}
        self.rng = np.random.default_rng(seed)
        self.names, self.num_added = [], 0
        self.pending = {}  # nodes of trees to be committed
        self.busy = []  # the sequences of the running step

    def run(self, count):
        calls = [
            self.add, self.step, self.step, self.step, self.step, self.commit, self.fork,
            self.pop, self.remove, self.slide, self.read, self.write, self.late, self.late,
        ]  # fmt: skip
        for _ in range(count):
            call = calls[self.rng.integers(len(calls))]
            try:
                call()
            except kv.CacheFull:
                self.remove()
        self.commit(everyone=True)
        return self.world.results(self.names)

    # Choices

    def chance(self, part):
        return self.rng.random() < part

    def some(self, names, most):
        chosen = self.rng.permutation(len(names))[: self.rng.integers(1, most + 1)]
        return [names[i] for i in chosen]

    def one(self):
        """A sequence that is in no step and has no tree to be committed, or None."""
        names = [name for name in self.names if name not in {*self.pending, *self.busy}]
        return names[self.rng.integers(len(names))] if names else None

    def stream(self):
        return ("compute", "compute", "other", "inline")[self.rng.integers(4)]

    # Calls

    def add(self):
        name = f"s{self.num_added}"
        self.num_added += 1
        self.cache.add_sequence(name)
        self.names.append(name)
        self.world.step([name], [int(self.rng.integers(1, 12))], self.stream())

    def step(self):
        names = self.some(self.names, 4) if self.names else []
        if not names:
            return
        is_decode = self.chance(0.6)
        lens = [1 if is_decode else int(self.rng.integers(1, 6)) for _ in names]
        in_tree = [name in self.pending or self.chance(0.15) for name in names]
        trees = [
            random_tree(self.rng, count, self.pending.get(name, 0)) if tree else None
            for name, count, tree in zip(names, lens, in_tree, strict=True)
        ]
        kept = self.chance(0.9)
        on = (self.stream(), self.stream()) if self.chance(0.2) else self.stream()
        trees = trees if any(in_tree) else None
        self.busy = names
        sizes = [size for size in self.decoders if size >= len(names)]
        try:
            if is_decode and trees is None and sizes and self.chance(0.8):
                decoder = self.decoders[min(sizes)]
                decoder.step(names, on, keep=kept, aside=self.aside)
            else:
                self.world.step(names, lens, on, trees, keep=kept, aside=self.aside)
        finally:
            self.busy = []
        for name, count, tree in zip(names, lens, in_tree, strict=True):
            if tree and kept:
                self.pending[name] = self.pending.get(name, 0) + count

    def aside(self):
        """Do something with other sequences while a step is running."""
        if self.chance(0.3):
            calls = [self.fork, self.pop, self.remove, self.read, self.write]
            with suppress(kv.CacheFull):
                calls[self.rng.integers(len(calls))]()

    def commit(self, everyone=False):
        names = [*self.pending] if everyone else self.some([*self.pending], 3)
        if names:
            leaves = [int(self.rng.integers(-1, self.pending.pop(name))) for name in names]
            self.cache.commit_token_tree(names, leaves)

    def fork(self):
        parent = self.one()
        if parent is not None:
            child = f"s{self.num_added}"
            self.num_added += 1
            length = self.cache.sequence_length(parent)
            at = length if self.chance(0.5) else int(self.rng.integers(length + 1))
            self.cache.fork_sequence(parent, child, at)
            self.names.append(child)

    def pop(self):
        name = self.one()
        if name is not None:
            most = min(5, self.cache.sequence_length(name))
            self.cache.pop_tokens(name, int(self.rng.integers(most + 1)))

    def remove(self):
        names = [name for name in self.names if name not in self.busy]
        if len(names) > 2:
            name = names[self.rng.integers(len(names))]
            self.names.remove(name)
            self.pending.pop(name, None)
            self.cache.remove_sequence(name)

    def slide(self):
        name = self.one()
        if name is not None and self.chance(0.5):
            self.cache.enable_sliding_window(name, int(self.rng.integers(3, 28)), 2)

    def read(self):
        name = self.one()
        if name is not None:
            self.world.read(name, self.stream())

    def write(self):
        name = self.one()
        if name is not None and (length := self.cache.sequence_length(name)):
            start = int(self.rng.integers(length))
            count = int(self.rng.integers(1, min(9, length - start) + 1))
            self.world.write(name, start, count, self.stream())

    def late(self):
        """Hold a stream up for a while, by work on it or until another thread opens a gate."""
        which, seconds = self.rng.integers(5), self.rng.integers(1, 5) / 1000
        name = ("compute", "compute", "other", "copy", "copy")[which]
        by_gate = self.chance(0.5)
        if self.world.live and by_gate:
            threading.Timer(seconds, self.world.gate(name).open).start()
        elif self.world.live:
            self.world.streams[name].call(lambda: time.sleep(seconds))
