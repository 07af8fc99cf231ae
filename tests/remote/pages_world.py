"""A sender and a receiver without threads, whose agents, clock and steps a test drives."""

from __future__ import annotations

import inspect
import textwrap

import numpy as np
from agents import Network

import kvcupy as kv
from kvcupy.remote.migration import receiver as receiving
from kvcupy.remote.migration import sender as sending

LAYERS, PAGE, PAGES, OFFERED = 3, 2, 10, 2
CANARY = -77.0
POISON = -99.0


def pool_of(num_pages=PAGES, layout="layer_first", device="host", **options):
    shape = {
        "page_size": PAGE,
        "num_layers": LAYERS,
        "num_kv_heads": 2,
        "head_dim": 4,
        "placement": "pinned",
        **options,
    }
    return kv.KVPool(num_pages, **shape, dtype="fp32", layout=layout, device=device)


def mutated(monkeypatch, owner, name, old, new):
    """Replace some text of a method."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, (name, old)
    made = {}
    exec(compile(source.replace(old, new), name, "exec"), function.__globals__, made)
    monkeypatch.setattr(owner, name, made[name])


class World:
    """One offer and pulls of it, on a stand-in network.

    Attributes
    ----------
    released : how often the pages of the offer were freed
    """

    def __init__(self, monkeypatch, *, secret=None, layouts=("layer_first", "page_first")):
        self.network = Network().install(monkeypatch)
        self.now = 0.0
        # So that each layer has its READ.
        monkeypatch.setattr(receiving, "_READ_BYTES", OFFERED * PAGE * 2 * 4 * 4 * 2)
        for module in (sending, receiving):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)
        for kind in (kv.PageSender, kv.PageReceiver):
            monkeypatch.setattr(kind, "_start_thread", lambda *_: None)
        self.source, self.target = (pool_of(layout=layout) for layout in layouts)
        self.sender = kv.PageSender(self.source, secret=secret)
        self.receiver = kv.PageReceiver(self.target, secret=secret)
        self.released, free = 0, self.source.allocator.free

        def freed(pages):
            self.released += 1
            free(pages)
            self.write(self.source, pages, POISON)
            self.at_release()

        self.source.allocator.free = freed
        self.pages = self.source.allocator.alloc(OFFERED)
        self.pulls, self.at_release = [], lambda: None

    def content(self, layer, side):
        rows = np.arange(OFFERED * PAGE * 2 * 4, dtype=np.float32) + 1
        return rows.reshape(OFFERED, PAGE, 2, 4) + 1000 * layer + 100 * side

    def views(self, pool, layer):
        return pool.k(layer), pool.v(layer)

    def write(self, pool, pages, value, layers=range(LAYERS)):
        for layer in layers:
            for view in self.views(pool, layer):
                view[pages] = value

    def fill(self, layer):
        for side, view in enumerate(self.views(self.source, layer)):
            view[self.pages] = self.content(layer, side)

    def offer(self, *, ready=LAYERS, lease_s=30.0):
        """Offer the pages, of which the first layers are written."""
        self.write(self.source, self.pages, POISON)
        for layer in range(ready):
            self.fill(layer)
        self.offered = self.sender._offer_parts(
            [(0, self.pages)], [(0, layer) for layer in range(LAYERS)], [None] * LAYERS,
            lambda: self.source.allocator.free(self.pages), lease_s, owns=True,
        )  # fmt: skip
        self.num_written = 0
        for _ in range(ready):
            self.announce()
        return self.offered.ticket

    def announce(self):
        """Write the next layer, and say so."""
        if self.num_written < LAYERS:
            if not self.offered.outcome:
                self.fill(self.num_written)
            self.offered.announce([self.num_written], self.source.device.as_stream(None))
            self.num_written += 1

    def pull(self, ticket, pages=None, **options):
        pages = self.target.allocator.alloc(OFFERED) if pages is None else pages
        made = self.receiver.pull(ticket, pages, **options)
        made.into = pages
        self.pulls.append(made)
        return made

    def check(self):
        """What was passed on is what was offered."""
        for pull in self.pulls:
            for layer in range(min(pull._num_arrived, LAYERS)):
                if pull.failure is not None:
                    continue
                for side, view in enumerate(self.views(self.target, layer)):
                    got, want = np.array(view[pull.into]), self.content(layer, side)
                    assert np.array_equal(got, want), f"layer {layer}: {got.ravel()[:4]}"
        assert self.released <= 1, "freed twice"

    def run(self, *, until=lambda: False, steps=200):
        """Advance everything, with READs delivered at once."""
        for _ in range(steps):
            self.sender._step()
            self.receiver._step()
            for reading in list(self.network.reads):
                reading.land()
            self.check()
            if until():
                return
            self.now += 1e-3
