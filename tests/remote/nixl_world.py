"""The state of a sender or receiver in a separate process (`line_process`)."""

from __future__ import annotations

import numpy as np

import kvcupy as kv

LAYERS = 3


class World:
    """Names for the lines."""

    def __init__(self, num_pages=16, layout="layer_first", page_size=4, width=64, *, old=None):
        for end in (old.receiver, old.sender) if old else ():
            if end is not None:
                end.close()
        self.pool = kv.KVPool(
            num_pages, page_size, LAYERS, 2, width, dtype="fp32", layout=layout, device="host"
        )
        self.allocator = self.pool.allocator
        self.sender = self.receiver = self.pull = self.offered = self.pages = None

    def fill(self, pages, seed, layers=range(LAYERS)):
        """Write what follows from the seed and the order of the pages."""
        for layer in layers:
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

    def offer(self, seed, count=3, *, ready=LAYERS):
        """Offer pages, of which some layers are written; return the ticket."""
        self.sender = self.sender or kv.PageSender(self.pool)
        pages = self.pages = self.allocator.alloc(count)
        self.fill(pages, seed, range(ready))
        self.offered = self.sender._offer_parts(
            [(0, pages)], [(0, layer) for layer in range(LAYERS)], [None] * LAYERS,
            lambda: self.allocator.free(pages), 600.0,
        )  # fmt: skip
        self.announce(range(ready))
        return self.offered.ticket.hex()

    def announce(self, layers):
        self.offered.announce(list(layers), self.pool.device.as_stream(None))

    def expire(self):
        """End the lease, and announce what is left."""
        self.offered.expires = 0.0
        self.announce(range(LAYERS))

    def begin(self, ticket, pages, deadline_s=30.0):
        self.receiver = self.receiver or kv.PageReceiver(self.pool)
        self.pull = self.receiver.pull(bytes.fromhex(ticket), pages, deadline_s=deadline_s)

    def outcome(self):
        """How the pull ended, once nothing lands any more."""
        try:
            self.pull.synchronize()
        except kv.TransferError as error:
            return error.reason
        return "done"

    def failure(self):
        """Why the pull has failed, if it has, though READs may be in flight."""
        return self.pull.failure and self.pull.failure.reason


def as_json(value):
    return value.item() if isinstance(value, np.generic) else value
