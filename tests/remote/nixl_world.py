"""The state of a sender or receiver in a separate process (`line_process`)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
from line_process import poll

import kvcupy as kv
from kvcupy.remote.migration.protocol import LAYER, Channel

LAYERS, PAGE, HEADS, WIDTH = 3, 4, 2, 64


class World:
    """Names for the lines."""

    def __init__(self, num_pages, layout="layer_first", page_size=PAGE, width=WIDTH):
        self.pool = kv.KVPool(
            num_pages, page_size, LAYERS, HEADS, width, dtype="fp32", layout=layout, device="host"
        )
        self.allocator = self.pool.allocator
        self.sender = self.receiver = self.pull = self.ticket = self.pages = None

    def fill(self, pages, seed):
        """Write what follows from the seed and the order of the pages."""
        for layer in range(LAYERS):
            for side, view in enumerate((self.pool.k(layer), self.pool.v(layer))):
                view[pages] = self.content(len(pages), seed, layer, side)

    def content(self, count, seed, layer, side):
        rng = np.random.default_rng((seed, layer, side))
        return rng.standard_normal((count, *self.pool.k(0).shape[1:])).astype(np.float32)

    def holds(self, pages, seed, layers=range(LAYERS)):
        """Whether pages hold what `fill` would write."""
        return all(
            np.array_equal(view[pages], self.content(len(pages), seed, layer, side))
            for layer in layers
            for side, view in enumerate((self.pool.k(layer), self.pool.v(layer)))
        )

    def is_all(self, pages, value):
        return all(
            bool((view[pages] == value).all())
            for layer in range(LAYERS)
            for view in (self.pool.k(layer), self.pool.v(layer))
        )

    def set_all(self, pages, value):
        for layer in range(LAYERS):
            self.pool.k(layer)[pages] = self.pool.v(layer)[pages] = value

    def stop_after_layer(self, layer):
        """Stop this process when it has said that a layer is ready, before it helps to read it."""
        send = Channel.send

        def send_and_stop(channel, kind, payload, deadline, **options):
            is_it = kind == LAYER and int.from_bytes(payload[:4], "big") == layer
            send(channel, kind, payload, deadline, **({} if is_it else options))
            if is_it:
                Channel.send = send
                os.kill(os.getpid(), signal.SIGSTOP)

        Channel.send = send_and_stop

    def read_when_stopped(self, pid):
        """Put off every READ but the first until that process is stopped."""
        engine = self.receiver._engine
        begin, stat, calls = engine._agent.begin, Path(f"/proc/{pid}/stat"), []

        def begin_late(reading):
            calls.append(reading)
            if len(calls) > 1:
                assert poll(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
            begin(reading)

        engine._agent.begin = begin_late

    def outcome(self):
        """How the pull ended, once nothing lands any more."""
        try:
            self.pull.synchronize()
        except kv.TransferError as error:
            return error.reason
        return "done"
