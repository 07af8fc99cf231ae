"""What orders pages that move between processes: each wait left out, and what becomes of it.

The simulated scheduler runs streams, but no threads; so these programs run in real time, and make
sure by gates that what is left out is needed.
"""

from __future__ import annotations

import numpy as np
import pytest
from agents import Network
from catalogue import watched
from line_process import poll
from pages_world import LAYERS, PAGES, pool_of
from stream_cases import Gate, run_ahead

import kvcupy as kv

SENDER, RECEIVER = "remote/migration/sender.py PageSender.", "remote/migration/receiver.py "


class Ends:
    """A sender of a pool that is filled, and a receiver."""

    def __init__(self, device, *, is_filled=True):
        self.device, self.source, self.target = device, *(pool_of(device=device) for _ in range(2))
        if is_filled:
            self.fill()
        self.sender, self.receiver = kv.PageSender(self.source), kv.PageReceiver(self.target)

    def fill(self):
        for layer in range(LAYERS):
            self.source.k(layer)[...] = self.source.v(layer)[...] = layer + 1

    def arrived(self, pages, layers=range(LAYERS)):
        return all(
            bool((view[pages] == layer + 1).all())
            for layer in layers for view in (self.target.k(layer), self.target.v(layer))
        )  # fmt: skip

    def offer_by_layer(self, pages):
        """Offer pages whose layers `offer.announce` announces."""
        return self.sender._offer_parts(
            [(0, pages)], [(0, layer) for layer in range(LAYERS)], [None] * LAYERS,
            lambda: self.source.allocator.free(pages), 30.0,
        )  # fmt: skip

    def announce(self, offer):
        offer.announce(range(LAYERS), self.device.as_stream(None))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.receiver.close()
        self.sender.close()


def sent_when_written(device, is_control):
    with Ends(device, is_filled=False) as ends:
        writer = device.stream()
        gate = Gate(writer)
        writer.call(ends.fill)
        pages = ends.source.allocator.alloc(2)
        pull = ends.receiver.pull(ends.sender.offer(pages, after=writer), [3, 2])
        run_ahead([gate], pull, is_control=is_control)
        pull.synchronize()
        writer.synchronize()
        assert ends.arrived([3, 2])


def sent_when_its_event_has_passed(device, is_control):
    with Ends(device, is_filled=False) as ends:
        writer = device.stream()
        gate = Gate(writer)
        writer.call(ends.fill)
        pages = ends.source.allocator.alloc(2)
        ticket = ends.sender.offer(pages, after=[writer.record() for _ in range(LAYERS)])
        pull = ends.receiver.pull(ticket, [3, 2])
        run_ahead([gate], pull, is_control=is_control)
        pull.synchronize()
        writer.synchronize()
        assert ends.arrived([3, 2])


def read_when_arrived(device, is_control):
    with Ends(device) as ends:
        offer = ends.offer_by_layer(ends.source.allocator.alloc(2))
        pull = ends.receiver.pull(offer.ticket, [3, 2])
        reader, page = device.stream(), ends.target.k(LAYERS - 1)[3]
        seen = device.empty_pinned(page.shape, ends.target.dtype)
        pull.wait(reader)
        device.copy(seen, page, stream=reader)
        run_ahead([], reader, is_control=is_control)
        ends.announce(offer)
        pull.synchronize()
        reader.synchronize()
        assert (seen == LAYERS).all()


def overwritten_when_used(device, is_control):
    with Ends(device) as ends:
        user, seen = device.stream(), []
        gate = Gate(user)
        user.call(lambda: seen.append(np.array(ends.target.k(0)[[0, 1]]).any()))
        ticket = ends.sender.offer(ends.source.allocator.alloc(2))
        decoded = ends.receiver.inspect(ticket)
        layers = {layer: layer for layer in range(LAYERS)}
        pull = ends.receiver._pull(decoded, [(0, np.array([0, 1]))], layers, 30.0, user)
        run_ahead([gate], pull, is_control=is_control)
        pull.synchronize()
        user.synchronize()
        assert seen == [False]


def freed_when_written(device, is_control):
    with Ends(device) as ends:
        writer = device.stream()
        gate = Gate(writer)
        ends.sender.offer(ends.source.allocator.alloc(2), after=writer, lease_s=1e-3)
        assert poll(lambda: not ends.sender.stats()["offered_pages"])
        free = ends.source.allocator.num_free
        gate.open()
        writer.synchronize()
        assert free == PAGES - 2
        assert ends.source.allocator.num_free == PAGES


def freed_when_nothing_lands(device, is_control):
    with Ends(device) as ends:
        offer = ends.offer_by_layer(ends.source.allocator.alloc(2))
        pages = ends.target.allocator.alloc(2)
        pull = ends.receiver.pull(offer.ticket, pages)
        ends.target.allocator.free(pages)
        free = ends.target.allocator.num_free
        ends.announce(offer)
        pull.synchronize()
        assert free == PAGES - 2
        assert ends.target.allocator.num_free == PAGES


CONTROLS = {
    SENDER + "_advance: completion.done()": sent_when_written,
    SENDER + "_hold_back: self.pools[part.pool].allocator._mark_busy(part.pages, completion)":
        freed_when_written,
    SENDER + "_written: stream.wait(event)": sent_when_its_event_has_passed,
    RECEIVER + "Pull._wait: waiting.wait(event)": read_when_arrived,
    RECEIVER + "Pull._event_of: stream.record()": read_when_arrived,
    RECEIVER + "PageReceiver._run: pull._after.done()": overwritten_when_used,
    RECEIVER + "PageReceiver._pull: "
    "target.memory.pool.allocator._mark_busy(target.pages, pull._landing)":
        freed_when_nothing_lands,
}  # fmt: skip


@pytest.mark.parametrize("site", CONTROLS)
@pytest.mark.usefixtures("lenient_host")
def test_each_wait_is_needed(device, monkeypatch, site):
    Network(immediate=True).install(monkeypatch)
    program = CONTROLS[site]
    with watched() as seen:
        program(device, is_control=False)
    assert seen[site], [each for each in seen if "migration" in each]
    with watched(leave_out=site), pytest.raises((AssertionError, kv.KvcupyError)):
        program(device, is_control=True)
    device.synchronize()
