"""The engine "nixl" between processes: pages arrive, and never after a pull was abandoned.

UCX is set to use TCP, over which a stopped owner of memory stops a READ too, as RDMA in software
does; by shared memory it would be over at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from concurrent import futures
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from helpers import full_only, without_collection
from line_process import LineProcess, poll
from tiered_cases import in_time

import kvcupy as kv
from kvcupy.arrays import bytes_of
from kvcupy.remote.migration import nixl, nixl_agents
from kvcupy.remote.migration.protocol import BEST_ALGORITHM

needs_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in nixl_agents.WHEELS),
    reason="needs NIXL: pip install --no-deps nixl-cu12",
)


PROGRAM = "import time; from nixl_world import *"


@pytest.fixture(scope="module")
def idle():
    """Processes that tests have left as they were, for others."""
    peers = []
    yield peers
    for peer in peers:
        peer.end()


@pytest.fixture
def peers(idle, tmp_path_factory):
    """A sender and a receiver with pools; the first has three pages to offer."""
    folder = tmp_path_factory.mktemp("nixl")
    started = [
        LineProcess(PROGRAM, folder / f"printed{i}", UCX_TLS="tcp") for i in range(2 - len(idle))
    ]
    for peer in started:
        idle.append(peer)
        peer.reply()
    sender, receiver = pair = idle.pop(), idle.pop()
    try:
        sender.send(f"""
w = World(8, page_size=64, width=256)
w.sender = kv.PageSender(w.pool, listen="unix:{folder}/s", engine="nixl")
w.pages = w.allocator.alloc(5)[[4, 0, 2]]
w.allocator.free([p for p in range(5) if p not in w.pages])
w.fill(w.pages, 1)
""")
        receiver.do("""
w = World(8, layout="page_first_direct", page_size=64, width=256)
w.receiver = kv.PageReceiver(w.pool, engine="nixl")
""")
        sender.reply()
        yield pair
        for peer in pair:
            assert Path(peer.printed).read_text() == ""
            if peer.is_as_it_was:
                peer.do("end = w.sender or w.receiver; end.close()")
                idle.append(peer)
    finally:
        for peer in pair:
            if peer not in idle:
                peer.end()


def offer(sender, **options):
    return sender.do(f"""
w.ticket = w.sender.offer(w.pages, **{options!r})
answer(w.ticket.hex())
""")


def start_pull(receiver, ticket, deadline_s=30.0):
    return receiver.do(f"""
w.pages = w.allocator.alloc(3)
w.pull = w.receiver.pull(bytes.fromhex("{ticket}"), w.pages, deadline_s={deadline_s})
""")


def assert_all_free(*peers):
    for peer in peers:
        assert peer.do("answer(poll(lambda: w.allocator.num_free == 8))"), "pages are missing"


def stop_in_a_read(sender, receiver, deadline_s=30.0, **options):
    """Begin a pull whose sender stops while its second layer is read."""
    sender.do("w.stop_after_layer(1)")
    receiver.do(f"w.read_when_stopped({sender.process.pid})")
    ticket = offer(sender, by_layer=True, **options)
    sender.do("w.sender.layer_done(w.ticket, 0)")
    start_pull(receiver, ticket, deadline_s)
    receiver.do("w.pull.wait_layer(0)")
    sender.send("[w.sender.layer_done(w.ticket, layer) for layer in (1, 2)]")
    sender.wait_stopped()
    # The READ is in flight, and no bytes have arrived.
    assert receiver.do("""
engine = w.receiver._engine
answer(poll(lambda: engine._pending() or w.pull.failure) and not w.pull.failure)
"""), receiver.do("answer(str(w.pull.failure))")
    receiver.do("time.sleep(0.1)")


@needs_nixl
def test_pages_come_over_and_are_free_once(peers):
    """Also by layer, twice over one connection, and between two layouts."""
    sender, receiver = peers
    start_pull(receiver, offer(sender))
    assert receiver.do("answer(w.outcome())") == "done"
    assert receiver.do("answer(w.holds(w.pages, 1))")
    assert_all_free(sender)
    sender.do("w.pages = w.allocator.alloc(3); w.fill(w.pages, 2)")
    ticket = offer(sender, by_layer=True)
    receiver.do("""
from kvcupy.remote.migration.nixl import Peer
Peer.decoded = None  # it has decoded what this sender says of itself
w.allocator.free(w.pages)
""")
    receiver.is_as_it_was = False
    start_pull(receiver, ticket)
    for layer in range(3):
        assert receiver.do("answer(w.pull.done())") is False
        sender.do(f"w.sender.layer_done(w.ticket, {layer})")
        receiver.do(f"w.pull.wait_layer({layer})")
        assert receiver.do(f"answer(w.holds(w.pages, 2, range({layer + 1})))")
    assert receiver.do("answer(w.outcome())") == "done"
    receiver.do("w.allocator.free(w.pages)")
    assert_all_free(sender, receiver)
    stats = receiver.do("answer(w.receiver.stats())")
    assert stats["completed"] == 2 and stats["received_bytes"] == 2 * 3 * 3 * 2 * 64 * 2 * 256 * 4
    sender.do("w.sender.close()")
    receiver.do("w.receiver.close()")


@needs_nixl
@pytest.mark.full
def test_a_receiver_with_another_checksum(peers):
    """The sender calculates that for it, whatever it has calculated ahead."""
    sender, receiver = peers
    receiver.is_as_it_was = False
    receiver.do("from kvcupy.remote.migration import protocol; protocol._SUPPORTED = 1 << 2")
    ticket = offer(sender)
    start_pull(receiver, ticket)
    assert receiver.do("answer(w.outcome())") == "done"
    assert receiver.do("answer(w.holds(w.pages, 1))")
    assert receiver.do("""
kept = w.receiver._idle
answer(poll(lambda: kept) and [c.algorithm for channels in kept.values() for c in channels])
""") == [2]


@needs_nixl
@pytest.mark.parametrize("way", ["cancelled", full_only("late")])
def test_nothing_lands_in_pages_that_are_used_again(peers, way):
    """The sender stops while its second layer is read; the pages wait for the READ to end."""
    sender, receiver = peers
    stop_in_a_read(sender, receiver, 30.0 if way == "cancelled" else 1.0)
    if way == "cancelled":
        receiver.do("w.pull.cancel()")
    assert receiver.do("answer(poll(lambda: w.pull.failure is not None))")
    receiver.do("w.allocator.free(w.pages)")
    assert receiver.do("time.sleep(0.3); answer(w.allocator.num_free)") == 5
    assert receiver.do("answer(w.allocator.num_available)") == 5, "nobody waits for the others"
    assert receiver.do("answer(w.receiver.stats()['quarantined_pages'])") == 3
    sender.go_on()
    sender.reply()
    assert receiver.do("answer(w.outcome())") == way
    assert_all_free(receiver)
    receiver.do("w.reused = w.allocator.alloc(8); w.set_all(w.reused, 5.0); time.sleep(0.3)")
    assert receiver.do("w.receiver._engine.poll(); answer(w.is_all(w.reused, 5.0))")
    receiver.do("w.allocator.free(w.reused)")
    sender.do("w.sender.withdraw(w.ticket)")
    assert_all_free(sender, receiver)


@needs_nixl
def test_without_quarantine_it_would(peers):
    """A control: the pages are used again at once, and the READ overwrites them."""
    sender, receiver = peers
    receiver.is_as_it_was = False
    receiver.do("type(w.receiver._engine).quiet = lambda self, task: True")
    stop_in_a_read(sender, receiver)
    receiver.do("w.pull.cancel(); w.allocator.free(w.pages)")
    assert_all_free(receiver)
    receiver.do("w.reused = w.allocator.alloc(8); w.set_all(w.reused, 5.0)")
    sender.go_on()
    sender.reply()
    assert receiver.do("""
engine = w.receiver._engine
answer(poll(lambda: [engine._pending()] and not w.is_all(w.reused, 5.0), 5))
"""), receiver.do("answer(str(engine._pending()))")


@needs_nixl
@pytest.mark.parametrize("moment", [full_only("before"), "during"])
def test_a_sender_that_is_killed(peers, moment):
    sender, receiver = peers
    if moment == "during":
        stop_in_a_read(sender, receiver)
    else:
        ticket = offer(sender, by_layer=True)
        sender.do("w.sender.layer_done(w.ticket, 0)")
        start_pull(receiver, ticket)
        receiver.do("w.pull.wait_layer(0)")
    sender.kill()
    assert receiver.do("answer(w.outcome())") == "lost"
    receiver.do("w.allocator.free(w.pages)")
    assert_all_free(receiver)
    receiver.do("w.receiver.close()")


@needs_nixl
@pytest.mark.full
def test_a_receiver_that_is_killed(peers):
    sender, receiver = peers
    start_pull(receiver, offer(sender, by_layer=True, lease_s=0.5))
    sender.do("w.sender.layer_done(w.ticket, 0)")
    receiver.do("w.pull.wait_layer(0)")
    receiver.kill()
    sender.do("[w.sender.layer_done(w.ticket, layer) for layer in (1, 2)]")
    assert_all_free(sender)


@needs_nixl
def test_a_lease_that_ends_during_a_read(peers):
    """The pages are others' by the time that they are read: the sender does not confirm."""
    sender, receiver = peers
    stop_in_a_read(sender, receiver, lease_s=0.3)
    receiver.stop()
    time.sleep(0.5)
    sender.go_on()
    sender.reply()
    assert_all_free(sender)
    sender.do("w.set_all(w.allocator.alloc(8), 9.0)")
    receiver.go_on()
    assert receiver.do("answer(w.outcome())") in ("expired", "lost")
    receiver.do("w.allocator.free(w.pages)")
    assert_all_free(receiver)


@needs_nixl
@pytest.mark.parametrize("group_bytes", [1, 8 << 20])
@pytest.mark.parametrize("is_ahead", [True, False])
def test_bytes_that_differ_are_noticed(peers, group_bytes, is_ahead):
    """What is read is not what the sender has: its own checksum says so, whether it was calculated
    before the pull or for it; and however many layers and READs it is of."""
    sender, receiver = peers
    sender.is_as_it_was = receiver.is_as_it_was = False
    receiver.do("from kvcupy.remote.migration import nixl; nixl._READ_BYTES = 100_000")
    sender.do(f"from kvcupy.remote.migration import nixl; nixl._GROUP_BYTES = {group_bytes}")
    if not is_ahead:
        sender.do("nixl._ChecksumWorker.add = lambda *_: None")
    ticket = offer(sender)
    if is_ahead:
        assert sender.do("""
(offer,) = w.sender._offers.values()
(groups,) = offer.offered.prepared.values()
answer(poll(lambda: groups.is_complete))
""")
        sender.do("nixl._LayerGroup._calculate = None")  # which nobody needs any more
    sender.do("view = w.pool.v(1); view[w.pages[2], 3, 1, 200] += 1")
    if not is_ahead:
        sender.do("""
calculate = nixl._LayerGroup._calculate
def of_others(group, meanwhile):
    view[w.pages[2], 3, 1, 200] -= 1
    digest = calculate(group, meanwhile)
    view[w.pages[2], 3, 1, 200] += 1
    return digest
nixl._LayerGroup._calculate = of_others
""")
    start_pull(receiver, ticket)
    assert receiver.do("answer(w.outcome())") == "corrupt"
    layers = "layer 1:" if group_bytes == 1 else "layer 0 to 2:"
    assert layers in receiver.do("answer(str(w.pull.failure))")
    receiver.do("w.allocator.free(w.pages)")
    assert_all_free(receiver)


@needs_nixl
@pytest.mark.full
def test_closing_a_receiver_that_waits_for_a_read(peers):
    """What cannot end stays for the life of the process: nothing is deregistered under a READ."""
    sender, receiver = peers
    receiver.is_as_it_was = False
    stop_in_a_read(sender, receiver)
    receiver.do("w.receiver.close(deadline_s=0.2)")
    assert (
        receiver.do("from kvcupy.remote.migration import nixl; answer(len(nixl._abandoned))") == 1
    )
    receiver.do("w.allocator.free(w.pages)")
    assert receiver.do("answer(w.allocator.num_free)") == 5
    sender.go_on()
    assert_all_free(receiver)


def value_of(tag, layer, side, i):
    """What is in a page, by its pull, place and number."""
    return np.float32(1000 * tag + 10 * layer + side + i / 100)


class Puller:
    """Offers and pulls at random, and checks what comes."""

    def __init__(self, sender, receiver, seed):
        self.sender, self.receiver, self.seed = sender, receiver, seed
        self.outcomes = Counter()
        self.wrong = []

    def run(self, count):
        rng = random.Random(self.seed)
        for number in range(count):
            try:
                self.pull(rng, 1000 * self.seed + number)
            except kv.CacheFull:  # others have the pages
                time.sleep(0.001)

    def write(self, pages, tag, layer):
        pool = self.sender.pool
        for side, view in enumerate((pool.k(layer), pool.v(layer))):
            for i, page in enumerate(pages):
                view[page] = value_of(tag, layer, side, i)

    def pull(self, rng, tag):
        source, target = self.sender.pool, self.receiver.pool
        layers = range(source.num_layers)
        pages = source.allocator.alloc(rng.randint(1, 10))
        by_layer = rng.random() < 0.5
        if not by_layer:
            for layer in layers:
                self.write(pages, tag, layer)
        ticket = self.sender.offer(pages, by_layer=by_layer, lease_s=rng.choice([30, 0.05]))
        into = None
        try:
            into = target.allocator.alloc(len(pages))
            pull = self.receiver.pull(ticket, into, deadline_s=20)
            for layer in layers if by_layer else ():
                self.write(pages, tag, layer)
                self.sender.layer_done(ticket, layer)
            by_layer = False
            self.end(rng, ticket, pull)
            try:
                pull.synchronize()
            except kv.TransferError as error:
                self.outcomes[error.reason] += 1
                return
            self.outcomes["done"] += 1
            self.wrong += [
                (tag, layer, side, i)
                for layer in layers
                for side, view in enumerate((target.k(layer), target.v(layer)))
                for i, page in enumerate(into)
                if not (view[page] == value_of(tag, layer, side, i)).all()
            ]
        finally:
            for layer in layers if by_layer else ():
                self.sender.layer_done(ticket, layer)
            self.sender.withdraw(ticket)
            if into is not None:
                target.allocator.free(into)

    def end(self, rng, ticket, pull):
        """Leave it alone, mostly."""
        kind = rng.random()
        if kind < 0.3:
            time.sleep(0.003 * rng.random())
            if kind < 0.15:
                pull.cancel()
            elif kind < 0.25:
                self.sender.withdraw(ticket)
            else:
                with contextlib.suppress(kv.TransferError):
                    pull.wait_layer(rng.randrange(pull._pool.num_layers))


@needs_nixl
@pytest.mark.full
@pytest.mark.parametrize("layouts", ["layer_first page_first_direct", "page_first_direct " * 2])
def test_pulls_at_random(layouts, monkeypatch, tmp_path):
    """By four threads, in many small READs: no wrong byte, and all pages are free at the end."""
    monkeypatch.setattr(nixl, "_READ_BYTES", 1 << 14)
    monkeypatch.setattr(nixl, "_GROUP_BYTES", 1 << 15)
    pools = [
        kv.KVPool(64, 4, 6, 2, 64, dtype="fp32", layout=layout, device="host")
        for layout in layouts.split()
    ]
    with (
        kv.PageSender(pools[0], engine="nixl", listen=f"unix:{tmp_path}/s") as sender,
        kv.PageReceiver(pools[1], engine="nixl", max_quarantined_pages=64) as receiver,
    ):
        pullers = [Puller(sender, receiver, seed) for seed in range(4)]
        with futures.ThreadPoolExecutor(4) as executor:
            for done in [executor.submit(puller.run, 200) for puller in pullers]:
                done.result()
        outcomes = sum((puller.outcomes for puller in pullers), Counter())
        assert [puller.wrong for puller in pullers] == [[]] * 4
        assert set(outcomes) <= {"done", "cancelled", "withdrawn", "expired"}
        assert min(outcomes[name] for name in ("done", "cancelled", "withdrawn")) > 0
        assert poll(lambda: all(pool.allocator.num_free == 64 for pool in pools))


# --- Without another process ---


@pytest.mark.parametrize("layout", ["page_first", "page_head"])
def test_layouts_that_scatter_a_layer_are_refused(device, layout):
    pool = kv.KVPool(4, 4, 2, 2, 8, dtype="fp16", layout=layout, device="host")
    with pytest.raises(ValueError, match=r"^pool: .*layer_first"):
        nixl_agents.BlockAddresses(pool)


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
@pytest.mark.parametrize("kind", ["kv", "four-bit", "mla", "scales", "wrapped", "interleaved"])
def test_addresses_are_those_of_the_blocks(layout, kind):
    """Read as plain memory, they are the pages of the layers, part by part."""
    options = {"dtype": "int8", "layout": layout, "device": "host"}
    if kind == "kv":
        pool = kv.KVPool(6, 4, 3, 2, 8, v_head_dim=4, **options)
    elif kind == "four-bit":
        pool = kv.KVPool(6, 4, 3, 2, 64, v_head_dim=32, **{**options, "dtype": "nvfp4"})
    elif kind == "mla":
        pool = kv.MLAPool(6, 4, 3, 16, **options)
    elif kind == "scales":
        if layout != "layer_first":
            pytest.skip("scales of a page lie apart in this layout")
        pool = kv.KVPool(6, 4, 3, 2, 8, scales=True, **options)
    elif kind == "interleaved":
        both = [np.zeros((6, 2, 4, 2, 8), np.int8) for _ in range(3)]
        pool = kv.KVPool.wrap([array[:, 0] for array in both], [array[:, 1] for array in both])
    else:
        pool = kv.KVPool.wrap(*([np.zeros((6, 4, 2, 8), np.int8) for _ in range(3)] for _ in "kv"))
    rng = np.random.default_rng(0)
    parts = [*map(bytes_of, pool.parts), *pool.scale_parts]
    for part in parts:
        array = kv.device("host").to_numpy(part)
        array[...] = rng.integers(-100, 100, array.shape)
    blocks, pages, layers = nixl_agents.BlockAddresses(pool), np.array([4, 0, 5, 1]), range(1, 3)
    memory = []  # by layer and part
    for layer in layers:
        views = [pool.k(layer), *([] if kind == "mla" else [pool.v(layer)])]
        if kind == "four-bit":
            views = [kv.device("host").to_numpy(view) for view in views]
        if pool.scale_parts:
            views += [s.reshape(6, 4, 2) for s in (pool.k_scale(layer), pool.v_scale(layer))]
        memory.append(views)
    parts = range(len(memory[0]))
    orders = {
        True: [(part, page, i) for part in parts for page in pages for i in range(2)],
        False: [(part, page, i) for part in parts for i in range(2) for page in pages],
    }
    for by_page, order in orders.items():
        expected = [
            np.ascontiguousarray(memory[i][part][page]).tobytes() for part, page, i in order
        ]
        addresses, sizes = blocks.regions.blocks(pages, layers, by_page=by_page)
        blocks_at = list(zip(addresses.tolist(), sizes.tolist(), strict=True))
        assert [ctypes.string_at(address, size) for address, size in blocks_at] == expected
        for address, size in blocks_at:
            assert any(a <= address and address + size <= a + n for a, n in blocks.memory)
        # Joined, cut, and as memory.
        both = blocks.regions, pages
        joined = nixl_agents.blocks_of(*both, *both, layers, by_page=by_page)
        assert len(joined[0]) <= len(addresses)
        for num_bytes in (10, 100, 1 << 20):
            mine, theirs, sizes, ends = nixl_agents.cut(*joined, num_bytes)
            assert mine.tolist() == theirs.tolist() and ends[-1] == len(sizes)
            groups = np.split(sizes, ends[:-1])
            assert all(0 < int(group.sum()) <= 2 * num_bytes for group in groups)
            assert b"".join(blocks.views(mine, sizes)) == b"".join(expected)
    side_by_side = layout == "page_first_direct" and kind not in ("wrapped", "interleaved")
    assert blocks.regions.is_by_page == side_by_side
    if kind == "interleaved":
        assert len(blocks.memory) <= 3 and sum(n for _, n in blocks.memory) == pool.num_bytes


def test_joined_blocks_move_the_same_bytes():
    rng = np.random.default_rng(3)
    for _ in range(200):
        size = int(rng.integers(1, 5))
        mine, theirs = (rng.permutation(12)[:8].astype(np.int64) for _ in range(2))
        if rng.random() < 0.5:
            theirs = mine + 3
        joined = nixl_agents.joined(mine * size, theirs * size, np.full(8, size))
        moved = {
            (int(a) + i, int(b) + i) for a, b, n in zip(*joined, strict=True) for i in range(int(n))
        }
        assert moved == {
            (a * size + i, b * size + i)
            for a, b in zip(mine.tolist(), theirs.tolist(), strict=True)
            for i in range(size)
        }


def test_layers_are_joined_only_where_they_lie_side_by_side_in_every_page():
    """The layers of the first page are contiguous; the second layer has another page stride."""
    pages, layers = np.array([0, 1]), range(2)
    regions = nixl_agents.Regions(*np.array([[[0, 10]], [[20, 40]], [[10, 10]]]))
    assert not regions.is_by_page
    addresses, _, sizes = nixl_agents.blocks_of(
        regions, pages, regions, pages, layers, by_page=True
    )
    assert (addresses.tolist(), sizes.tolist()) == ([0, 50], [30, 10])
    even = nixl_agents.Regions(*np.array([[[0, 10]], [[20, 20]], [[10, 10]]]))
    assert even.is_by_page
    addresses, _, sizes = nixl_agents.blocks_of(even, pages, even, pages, layers, by_page=True)
    assert (addresses.tolist(), sizes.tolist()) == ([0], [40])
    # Cached properties are not part of a sender's description.
    peer = nixl.Peer(b"opaque", nixl_agents.Process.own(), even)
    assert nixl.Peer.decoded(peer.encoded()).regions.is_by_page


class FakeOffer:
    """Pages of a pool, of whose layers those in `ready` are written."""

    number, generation, key = 1, 2, b"key"

    def __init__(self, pool, pages, ready=()):
        self.pool, self.pages, self.prepared = pool, np.array(pages), {}
        self.ready, self.num_looks, self.num_reading = set(ready), 0, 0
        self.over = False

    def is_ready(self, layer):
        assert self.num_reading
        self.num_looks += 1
        return layer in self.ready

    def check(self):
        if self.over:
            raise kv.TransferError("the offer: expired", "expired")

    @contextlib.contextmanager
    def reading(self):
        self.check()
        self.num_reading += 1
        yield
        self.num_reading -= 1


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_checksums_are_ahead_of_pulls(layout):
    """As layers become ready, those that are together as one; of offers that stand, in turn."""
    pools = [
        kv.KVPool(6, 4, 8, 2, 8, dtype="fp16", layout=each, device="host")
        for each in (layout, "layer_first")
    ]
    rng = np.random.default_rng(0)
    for layer in range(8):
        for views in ([pool.k(layer) for pool in pools], [pool.v(layer) for pool in pools]):
            values = rng.standard_normal(views[0].shape)
            for view in views:
                view[...] = values
    blocks = nixl_agents.BlockAddresses(pools[0])
    ahead = nixl._ChecksumWorker()
    offers = [FakeOffer(pools[0], [4, 0, 1], range(n)) for n in (1, 8, 0)]
    groups = [nixl._LayerGroups(offer, blocks, BEST_ALGORITHM) for offer in offers]
    for each in groups:
        ahead.add(each)
    assert poll(lambda: groups[1].is_complete and 0 in groups[0]._groups)
    assert not groups[0].is_complete and not groups[2]._groups
    offers[2].over = True
    assert poll(lambda: len(ahead._offers) == 1)
    offers[0].ready.update(range(8))
    assert poll(lambda: not ahead._offers)
    assert groups[0].is_complete and not groups[2].is_complete
    looks = [offer.num_looks for offer in offers]
    together = {0: [range(1), range(1, 8)], 1: [range(8)]}
    for number, expected in together.items():
        got = [group.layers for group in groups[number]._groups.values()]
        assert got == expected
        for group in groups[number]._groups.values():
            # What the other pool has, in the order that the first prefers.
            offer = FakeOffer(pools[1], [4, 0, 1])
            theirs, pages = nixl_agents.BlockAddresses(pools[1]), offer.pages
            _, addresses, sizes = nixl_agents.blocks_of(
                blocks.regions, pages, theirs.regions, pages, group.layers,
                by_page=blocks.regions.is_by_page,
            )  # fmt: skip
            checksum = nixl._new_checksum(BEST_ALGORITHM, offer, group.layers)
            for view in theirs.views(addresses, sizes):
                checksum.update(view)
            assert group.digest() == checksum.intdigest()
    assert [offer.num_looks for offer in offers] == looks  # of those that are over, and done
    ahead.close(time.monotonic() + 5)
    assert not ahead._thread.is_alive()


def test_the_sender_helps_reads_while_checksums_are_calculated(monkeypatch):
    """By the thread that serves the pull, or by another one."""
    monkeypatch.setattr(nixl, "_HASH_CHUNK_BYTES", 1000)
    pool = kv.KVPool(6, 4, 2, 2, 8, dtype="fp16", device="host")
    group = nixl._LayerGroup(
        FakeOffer(pool, [0, 2, 4]), nixl_agents.BlockAddresses(pool), range(2), BEST_ALGORITHM
    )
    calls, digests = [], []
    with group._lock:
        helping = threading.Thread(
            target=lambda: digests.append(group.digest(partial(calls.append, 1))), daemon=True
        )
        helping.start()
        assert poll(lambda: len(calls) >= 3)
        assert not digests
    helping.join(30)
    assert len(digests) == 1
    calls.clear()
    group._digest = None
    assert group.digest(partial(calls.append, 1)) == digests[0]
    assert group.num_bytes == 1536 and len(calls) == 2, "not for each block"
    assert group.digest(partial(calls.append, 1)) == digests[0]


@needs_nixl
def test_pages_are_released_by_the_thread_that_reads_ahead():
    """The caller closes the sender in `release`."""
    pool = kv.KVPool(2, 4, 2, 2, 8, dtype="fp16", device="host")
    sender, released = kv.PageSender(pool, engine="nixl"), []
    engine = sender._engine

    def release(pages):
        sender.close()
        released.append(threading.current_thread())
        pool.allocator.free(pages)

    def advance(groups):
        with groups._offered.reading():
            assert sender.withdraw(ticket)
        raise AssertionError("that was all")

    pages = pool.allocator.alloc(1)
    ahead = engine._checksum_worker
    with pytest.MonkeyPatch.context() as patched:
        # Only when there is a ticket.
        patched.setattr(ahead, "add", lambda groups: None)
        ticket = sender.offer(pages, release=release)
        patched.setattr(nixl._LayerGroups, "advance", advance)
        (offer,) = sender._offers.values()
        (groups,) = offer.offered.prepared.values()
        nixl._ChecksumWorker.add(ahead, groups)
        assert poll(lambda: released)
    assert released == [ahead._thread]
    ahead._thread.join(30)
    assert not ahead._thread.is_alive() and engine._agent._agent is None
    pool.allocator.check_leaks()


@pytest.mark.parametrize(
    "num_layers, pages, expected", [(3, 3, [3]), (32, 3, [32]), (8, 2000, [2] * 4)]
)
def test_layers_that_go_together(num_layers, pages, expected):
    """All of a small offer; of a large one at most a quarter, or 16 MiB."""
    pool = kv.KVPool(2000, 16, num_layers, 2, 64, dtype="fp32", device="host")
    offer = FakeOffer(pool, range(pages), range(num_layers))
    groups = nixl._LayerGroups(offer, nixl_agents.BlockAddresses(pool), BEST_ALGORITHM)
    counts, first = [], 0
    offer.num_reading = 1
    while first < num_layers:
        counts.append(len(groups.beginning_with(first).layers))
        first += counts[-1]
    assert counts == expected


def test_a_process_is_known_by_more_than_its_number():
    me = nixl_agents.Process.own()
    assert not me.is_dead()
    assert nixl_agents.Process(me.boot, me.namespace, me.pid, me.started + 1).is_dead()
    assert not nixl_agents.Process("another boot", me.namespace, me.pid, me.started + 1).is_dead()
    assert not nixl_agents.Process("", "", me.pid, 0).is_dead()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other = nixl_agents.Process(me.boot, me.namespace, child.pid, nixl_agents._started(child.pid))
    assert not other.is_dead()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie still has the number
    assert other.is_dead()
    child.communicate()
    assert other.is_dead()


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": 1}, {"metadata": "!"}, {"process": {}}, {"regions": 5},
        {"regions": {"pointers": [[1]], "sizes": [[3]]}},
        *({"regions": {"pointers": table, "page_strides": [[2]], "sizes": [[3]]}}
          for table in (5, [1], [["3"]], [[True]], [[2**80]], [[1], [2, 3]])),
        {"process": {"boot": "", "namespace": "", "pid": True, "started": 0}},
    ],
)  # fmt: skip
def test_what_a_sender_says_of_itself_is_checked(change):
    from kvcupy.remote.migration.protocol import Lost

    regions = nixl_agents.Regions(*(np.array([[number]]) for number in (1, 2, 3)))
    peer = nixl.Peer(b"opaque", nixl_agents.Process.own(), regions)
    assert nixl.Peer.decoded(peer.encoded()).encoded() == peer.encoded()
    with pytest.raises(Lost):
        nixl.Peer.decoded(json.dumps({**json.loads(peer.encoded()), **change}).encode())
    with pytest.raises(Lost):
        nixl.Peer.decoded(b"\xff")


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(nixl_agents, "WHEELS", ("kvcupy_has_no_such_wheel",))
    with pytest.raises(ImportError, match=re.escape("pip install --no-deps nixl-cu12")):
        nixl_agents.load()


class nixlRemoteDisconnectError(Exception):
    pass


class FakeAgent:
    """Says of a READ what a list says, and then the last of it for ever."""

    def __init__(self, *states):
        self.states, self.released = list(states), 0

    def state_of(self, handle):
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return state

    def release(self, handle):
        self.released += 1


def begun_reading(agent, process):
    reading = nixl_agents.Reading(agent, process, "handle")
    reading.state = "PROC"
    return reading


def test_a_read_ends_when_nixl_says_so_or_the_sender_has_been_dead_for_a_while(monkeypatch):
    me = nixl_agents.Process.own()
    agent = FakeAgent("PROC", "PROC", "DONE")
    reading = begun_reading(agent, me)
    assert [reading.done() for _ in range(3)] == [False, False, True]
    assert reading.failure is None and agent.released == 1 and reading.done()
    # An error that leaves it open whether bytes are under way does not end it.
    agent = FakeAgent(ValueError("it was invalidated"))
    reading = begun_reading(agent, me)
    assert not reading.done() and isinstance(reading.failure, ValueError)
    agent.states = [nixlRemoteDisconnectError()]
    assert reading.done() and agent.released == 1
    # What a dead sender had sent may still arrive.
    dead = nixl_agents.Process(me.boot, me.namespace, me.pid, me.started + 1)
    agent = FakeAgent("PROC")
    reading = begun_reading(agent, dead)
    time.sleep(nixl_agents._LIVENESS_INTERVAL_S)
    assert not reading.done() and not reading.done()
    monkeypatch.setattr(nixl_agents, "_DRAIN_AFTER_DEATH_S", -1.0)
    assert not reading.done()  # it does not look all the time
    time.sleep(nixl_agents._LIVENESS_INTERVAL_S)
    assert reading.done() and "dead" in str(reading.failure)


def test_no_read_begins_once_an_engine_has_looked_for_the_last():
    calls = []
    engine = object.__new__(nixl.NixlEngine)
    engine._checksum_worker = nixl._ChecksumWorker()
    engine._verifiers = futures.ThreadPoolExecutor(1)
    engine._agent = SimpleNamespace(
        stop=lambda: calls.append("stop"), close=lambda: calls.append("close")
    )
    engine._pending = lambda: calls.append("pending")
    engine.close(time.monotonic() + 5)
    assert calls == ["stop", "pending", "close"]


@pytest.mark.parametrize("count", [40, 70])
def test_idle_peers_stay_connected(count, monkeypatch):
    """As many as are allowed; those that have been idle longest are forgotten."""

    class Fake:
        forgotten: ClassVar = []

        def add_remote_agent(self, metadata):
            return metadata

        def remove_remote_agent(self, name):
            self.forgotten.append(int(name))

    agent = object.__new__(nixl_agents.Agent)
    agent._lock, agent._agent, agent._peers = threading.Lock(), Fake(), {}
    monkeypatch.setattr(Fake, "forgotten", [])
    for i in range(count):
        agent.add_peer(str(i).encode())
        agent.release_peer(str(i).encode(), failed=False)
    assert Fake.forgotten == list(range(max(0, count - nixl_agents._MAX_IDLE_PEERS)))


class FakeNixl:
    """What an `Agent` calls, and nobody without its lock."""

    def __init__(self, lock, num_good=100):
        self.lock, self.num_good, self.kept = lock, num_good, []
        self.entered, self.left = threading.Event(), threading.Event()

    def prep_xfer_dlist(self, *_):
        return self.make_prepped_xfer()

    def make_prepped_xfer(self, *_):
        assert self.lock.locked()
        if len(self.kept) == self.num_good:
            raise ValueError("the peer is gone")
        self.kept.append(FakeHandle(self))
        return self.kept[-1]

    def transfer(self, handle):
        self.entered.set()
        assert self.left.wait(30)
        return "PROC"


class FakeHandle:
    def __init__(self, agent):
        self.agent = agent

    def release(self):
        assert self.agent.lock.locked()
        if self is self.agent.kept[0]:
            raise ValueError("it cannot be released")
        self.agent.kept.remove(self)


def fake_agent(**options):
    agent = object.__new__(nixl_agents.Agent)
    agent._lock, agent._unreleased, agent._has_stopped = threading.Lock(), [], False
    agent._agent = FakeNixl(agent._lock, **options)
    return agent


@pytest.mark.parametrize("num_good", range(4))
def test_what_was_prepared_before_a_failure_is_released_with_the_lock(num_good):
    """Finalizers of NIXL's would do so later, and without it."""
    agent = fake_agent(num_good=num_good)
    blocks = np.arange(2) * 8
    with pytest.raises(ValueError, match="gone"):
        agent.prepare("peer", nixl_agents.Process.own(), blocks, blocks, blocks, [(0, 1), (1, 2)])
    assert agent._agent.kept == agent._unreleased, "only what could not be"
    assert len(agent._unreleased) == min(1, num_good)


def test_who_closes_an_engine_waits_for_a_read_that_is_about_to_begin():
    """And none begins later: it would land in memory that is not registered any more."""
    agent = fake_agent()
    blocks = np.arange(2) * 8
    first, second = agent.prepare(
        "peer", nixl_agents.Process.own(), blocks, blocks, blocks, [(0, 1), (1, 2)]
    )
    reader = object.__new__(nixl._Reader)
    reader._agent, reader._named, reader._begun = agent, deque(), deque()
    reader._prepared = deque(
        nixl._Read(each, range(1), None, None, b"") for each in (first, second)
    )
    assert not reader.pending()
    begins = threading.Thread(target=reader._begin_read, daemon=True)
    begins.start()
    assert agent._agent.entered.wait(30)
    assert [read.reading for read in reader._begun] == [first] and first.state == "PROC"
    agent._agent.left.set()
    begins.join(30)
    agent.stop()
    agent._agent.entered.clear()
    assert reader._begin_read() and not agent._agent.entered.is_set()
    assert second.done() and "closed" in str(second.failure)


@needs_nixl
def test_pools_are_not_kept_by_offers_that_are_over():
    """Nor by those that are not read ahead any more."""
    with without_collection():
        pool = kv.KVPool(6, 4, 2, 2, 8, dtype="fp16", device="host")
        with kv.PageSender(pool, engine="nixl") as sender:
            sender.withdraw(sender.offer(pool.allocator.alloc(3)))
            sender.offer(pool.allocator.alloc(1), by_layer=True)
        alive = weakref.ref(pool)
        del sender, pool
        assert poll(lambda: not alive())


class FakeTask:
    """A pull that is to be kept every so often, whose sender says nothing."""

    deadline = float("inf")

    def __init__(self, next_keep_s=1e-3):
        self.next_keep_s, self.num_kept, self.pauses_s = next_keep_s, 0, []
        self.channel, self.pool, self.pages = self, self, np.arange(1)
        self.num_layers = 1

    def keep(self):
        self.num_kept += 1
        if self.num_kept == 20:
            raise TimeoutError("timed out")

    def readable(self, seconds):
        self.pauses_s.append(seconds)
        return False


class BusyExecutor:
    """Its threads have other things to do, and the system has no more."""

    def __init__(self):
        self.submitted = []

    def submit(self, function):
        self.submitted.append(function)  # the one of Python does so, too
        raise RuntimeError("can't start new thread")


def test_what_a_thread_takes_late_is_not_done_beside_the_pull():
    executor, done = BusyExecutor(), []
    verification = nixl._Verification(FakeTask(), None, executor)
    entered, leave = threading.Event(), threading.Event()

    def slow():
        entered.set()
        assert leave.wait(30)
        done.append("slow")

    def verify():
        verification.submit()
        verification.finish()

    verification._add(slow)
    verification._add(partial(done.append, "next"))
    pull = threading.Thread(target=verify, daemon=True)
    pull.start()
    assert entered.wait(30)
    in_time(executor.submitted[0])
    assert done == []
    leave.set()
    pull.join(30)
    assert done == ["slow", "next"]


def test_a_pull_keeps_its_lease_and_deadline_while_another_thread_verifies():
    with futures.ThreadPoolExecutor(1) as executor:
        task, leave = FakeTask(), threading.Event()
        verification = nixl._Verification(task, None, executor)
        verification._add(lambda: leave.wait(30))
        verification.submit()
        assert poll(lambda: verification._is_working)
        try:
            with pytest.raises(TimeoutError):
                in_time(verification.finish)
        finally:
            leave.set()
        assert task.num_kept == 20


def test_a_failure_is_raised_while_there_are_reads_to_begin():
    task = FakeTask()
    with futures.ThreadPoolExecutor(1) as executor:
        verification = nixl._Verification(task, None, executor)
        verification._add(lambda: 1 // 0)
        verification.submit()
        assert poll(lambda: verification._failure)
        with pytest.raises(ZeroDivisionError):
            verification.submit()


@pytest.mark.parametrize("is_reading", [True, False])
def test_a_reader_waits_no_longer_than_its_lease_allows(is_reading):
    """And sees to it that what has come is verified while the next comes."""
    task, beside = FakeTask(next_keep_s=0.01), []
    verification = nixl._Verification(task, None, None)
    verification.submit = lambda: beside.append(1)
    reader = nixl._Reader(task, None, None, None, None, None, verification)
    if is_reading:
        reading = nixl_agents.Reading(FakeAgent("PROC"), nixl_agents.Process.own(), "handle")
        reader._begun.append(nixl._Read(reading, range(1), None, None, b""))
    with pytest.raises(TimeoutError):
        reader.run()
    assert len(beside) == 19 * is_reading
    assert max(task.pauses_s) <= task.next_keep_s
