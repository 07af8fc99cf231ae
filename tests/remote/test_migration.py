"""`PageSender` and `PageReceiver`: transfers, their order, and the ownership of pages."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import socket
import ssl
import struct
import threading
import time
import weakref
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import without_collection
from line_process import poll
from migration_cases import (
    HEADS,
    PATIENCE_S,
    SECRET,
    assert_pulled,
    eventually,
    fill,
    filled,
    is_poisoned,
    keep_leases,
    pair,
    poison,
    pool_of,
    reason_of,
)
from stream_cases import Gate
from tiered_cases import in_time

import kvcupy as kv
from kvcupy.remote.migration import engines, protocol
from kvcupy.remote.migration import receiver as receivers
from kvcupy.remote.migration import sender as senders

LAYERS = range(3)


def test_wrapped_arrays():
    """HND, with K and V in one array per layer: no part is in wire order."""

    def wrapped():
        arrays = [np.zeros((12, 2, HEADS, 4, 16), np.float16) for _ in LAYERS]
        by_slot = [a.transpose(0, 1, 3, 2, 4) for a in arrays]
        return kv.KVPool.wrap([a[:, 0] for a in by_slot], [a[:, 1] for a in by_slot], device="host")

    source = wrapped()
    fill(source)
    with pair(source, pool_of(v_head_dim=16)) as (sender, receiver, _, target):
        receiver.pull(sender.offer(source.allocator.alloc(2)), [1, 0]).synchronize()
        assert_pulled(target, [1, 0], [0, 1])
    target = wrapped()
    with pair(filled(v_head_dim=16), target) as (sender, receiver, source, _):
        receiver.pull(sender.offer(source.allocator.alloc(2)), [1, 0]).synchronize()
        assert_pulled(target, [1, 0], [0, 1])


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_slow_pull_leaves_others_staging_pages(side, monkeypatch):
    """One hangs in the middle of a layer, and holds staging pages; another completes."""
    name = {"sender": "send_data", "receiver": "receive_data"}[side]
    method, first, opened = getattr(protocol.Channel, name), [], threading.Event()

    def moving(channel, *arguments):
        first.append(channel)
        if channel is first[0]:
            assert opened.wait(PATIENCE_S)
        method(channel, *arguments)

    monkeypatch.setattr(protocol.Channel, name, moving)
    with pair(**{side: {"staging_pages": 4}}) as (sender, receiver, source, target):
        tickets = [sender.offer(source.allocator.alloc(5)) for _ in range(2)]
        slow = receiver.pull(tickets[0], range(5))
        eventually(lambda: first)
        receiver.pull(tickets[1], range(5, 10)).synchronize()
        assert_pulled(target, range(5, 10), range(5, 10))
        assert not slow.done()
        opened.set()
        slow.synchronize()
        assert_pulled(target, range(5), range(5))


# --- Heads ---


def test_two_senders_to_four_receivers():
    """Tensor parallelism 2 to 4: each receiver has half of the heads of one sender."""
    halves, quarters = [range(0, 2), range(2, 4)], [range(i, i + 1) for i in range(4)]
    sources = [filled(heads) for heads in halves]
    targets = [pool_of(heads) for heads in quarters]
    senders = [
        kv.PageSender(pool, heads=(heads.start, HEADS))
        for pool, heads in zip(sources, halves, strict=True)
    ]
    tickets = [
        sender.offer(pool.allocator.alloc(4), pulls=2)
        for sender, pool in zip(senders, sources, strict=True)
    ]
    for i, target in enumerate(targets):
        with kv.PageReceiver(target, heads=(i, HEADS)) as receiver:
            pull = receiver.pull(tickets[i // 2], [7, 3, 2, 9])
            pull.synchronize()
            assert pull.num_bytes == 4 * target.page_bytes
        assert_pulled(target, [7, 3, 2, 9], range(4), quarters[i])
        # The pages are free when the last of two pulls is through.
        expected = 12 if i % 2 else 8
        eventually(lambda pool=sources[i // 2], n=expected: pool.allocator.num_free == n)
    for sender in senders:
        sender.close()


def test_four_senders_to_one_receiver():
    """Tensor parallelism 4 to 1: one pull has a ticket of each sender."""
    sources = [filled(range(i, i + 1)) for i in range(4)]
    senders = [kv.PageSender(pool, heads=(i, HEADS)) for i, pool in enumerate(sources)]
    tickets = [s.offer(p.allocator.alloc(3)) for s, p in zip(senders, sources, strict=True)]
    target = pool_of()
    with kv.PageReceiver(target) as receiver:
        for several, message in [
            (tickets[:3], r"expected 0 to 3, each once, got \[0, 1, 2\]"),
            ([*tickets, tickets[2]], r"got \[0, 1, 2, 2, 3\]"),
        ]:
            with pytest.raises(kv.TransferError, match=message) as caught:
                receiver.pull(several, [1, 2, 3])
            assert caught.value.reason == "identity"
        receiver.pull(tickets[::-1], [5, 6, 2]).synchronize()
        assert_pulled(target, [5, 6, 2], range(3))
    for sender, source in zip(senders, sources, strict=True):
        sender.close()
        source.allocator.check_leaks()


# --- Layers and streams ---


@pytest.fixture
def messages(monkeypatch):
    """Kind and payload of each message that is sent."""
    sent, message = [], protocol.Channel._message

    def recorded(channel, kind, payload):
        sent.append((kind, bytes(payload)))
        return message(channel, kind, payload)

    monkeypatch.setattr(protocol.Channel, "_message", recorded)
    return sent


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(3, [(0, 1), (1, 2)]), (1, [(0, 1), (1, 1), (2, 1)])]
)
def test_small_layers_that_are_ready_go_together(num_layers, expected, messages, monkeypatch):
    """Groups have a maximum size, and no ready layer waits for another."""
    with pair() as (sender, receiver, source, target):
        layer_bytes = 4 * source.page_bytes // source.num_layers
        monkeypatch.setattr(engines, "_MAX_GROUP_BYTES", num_layers * layer_bytes)
        offered = source.allocator.alloc(4)
        ticket = sender.offer(offered, by_layer=True)
        pull = receiver.pull(ticket, [0, 1, 2, 3])
        sender.layer_done(ticket, 0)
        pull.wait_layer(0)  # which is here although others that would go with it are not written
        sender.layer_done(ticket, 2)
        sender.layer_done(ticket, 1)
        pull.synchronize()
        assert_pulled(target, range(4), offered)
    starts = {protocol.LAYER: 0, protocol.CHECKSUM: 16}  # a checksum announces those that follow
    assert expected == [
        struct.unpack_from(">II", payload, starts[kind])
        for kind, payload in messages
        if kind in starts and len(payload) > starts[kind]
    ]


def test_layers_that_are_ready_need_no_message_of_their_own(messages, monkeypatch):
    """A pull of several groups needs one grant, and one checksum per group."""
    monkeypatch.setattr(engines, "_MAX_GROUP_BYTES", 1)
    with pair() as (sender, receiver, source, target):
        receiver.pull(sender.offer(source.allocator.alloc(4)), range(4)).synchronize()
        assert_pulled(target, range(4), range(4))
        eventually(lambda: source.allocator.num_free == 12)
        eventually(lambda: len(messages) == 8)
    assert sorted(protocol.NAMES[kind] for kind, _ in messages) == sorted(
        ["PULL", "GRANT", "LAYER", "CHECKSUM", "CHECKSUM", "CHECKSUM", "DONE", "CONFIRMED"]
    )


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_sender_that_announces_other_layers_is_left(count, monkeypatch):
    """More layers than exist, fewer than the bytes, or no layers."""
    layers = engines._LAYER
    forged = SimpleNamespace(
        pack=lambda first, _, num_bytes: layers.pack(first, count, num_bytes),
        unpack=layers.unpack, size=layers.size,
    )  # fmt: skip
    monkeypatch.setattr(engines, "_LAYER", forged)
    with pair() as (sender, receiver, source, target):
        poison(target, range(12))
        pull = receiver.pull(sender.offer(source.allocator.alloc(4)), [0, 1, 2, 3])
        assert reason_of(pull) == "lost"
        assert is_poisoned(target, range(12))


def test_a_stream_that_waits_fails_with_the_pull():
    with pair() as (sender, receiver, source, _):
        ticket = sender.offer(source.allocator.alloc(2), by_layer=True)
        pull = receiver.pull(ticket, [5, 6])
        stream, seen = kv.device("host").stream(), []
        pull.wait(stream)
        stream.call(lambda: seen.append(1))
        pull.cancel()
        with pytest.raises(kv.DeviceError, match="cancelled"):
            stream.synchronize()
        assert seen == []
        assert reason_of(pull) == "cancelled"
        for wait in (pull.wait, lambda: pull.wait_layer(0), pull.done, lambda: pull.wait(stream)):
            with pytest.raises(kv.TransferError, match="cancelled"):
                wait()
        sender.withdraw(ticket)
        eventually(lambda: sender.stats()["pulls"] == 0)
        for layer in LAYERS:  # pages are not free while something may write them
            assert source.allocator.num_free == 10
            sender.layer_done(ticket, layer)


LARGE = {"head_dim": 512, "v_head_dim": 512, "page_size": 64, "num_layers": 1}


def test_an_offer_that_ends_does_not_wait_for_a_stopped_receiver(monkeypatch):
    """Also if only the last bytes of a layer are blocked."""
    send_data, blocked = protocol.Channel.send_data, threading.Event()

    def blocking(channel, views, num_bytes, deadline, end=None):
        send_data(channel, views, num_bytes, deadline)
        if end is not None:  # as if there were no room for it
            blocked.set()
            channel.receive(deadline, protocol.REFUSED)

    with pair() as (sender, receiver, source, _):
        ticket = sender.offer(source.allocator.alloc(2), by_layer=True, lease_s=1000)
        sender.layer_done(ticket, 0)
        with monkeypatch.context() as patch:
            patch.setattr(protocol.Channel, "send_data", blocking)
            pull = receiver.pull(ticket, [0, 1], deadline_s=1000)
            assert blocked.wait(PATIENCE_S)
            for layer in (1, 2):
                sender.layer_done(ticket, layer)
            sender.withdraw(ticket)
            eventually(lambda: source.allocator.num_free == 12)
        pull.cancel()


def test_work_that_fails_ends_the_offer():
    with pair() as (sender, receiver, source, _):
        writer = kv.device("host").stream()
        writer.call(lambda: 1 / 0)
        ticket = sender.offer(source.allocator.alloc(2), after=writer)
        assert reason_of(receiver.pull(ticket, [0, 1])) == "failed"
        eventually(lambda: source.allocator.num_free == 12)
        assert reason_of(receiver.pull(ticket, [0, 1])) == "failed"
        with pytest.raises(kv.DeviceError, match="division"):
            writer.synchronize()


@pytest.mark.races("without")
@pytest.mark.parametrize("waits", [True, False], ids=["with", "without"])
def test_order_is_checked(waits):
    """A stream that writes to a page must wait for the pull; the wait is the edge."""
    with (
        kv.order_checker(action="record") as checker,
        pair() as (sender, receiver, source, target),
    ):
        ticket = sender.offer(source.allocator.alloc(1), by_layer=True)
        pull = receiver.pull(ticket, [2])
        stream = kv.device("host").stream()
        key, value = (np.zeros((1, HEADS, width), np.float16) for width in (16, 24))
        if waits:
            pull.wait_layer(0, stream)
        kv.store_kv(key, value, target.k(0), target.v(0), np.array([8]), stream=stream)
        if not waits:  # else what has come could be written over before its checksum is compared
            stream.synchronize()
        for layer in LAYERS:
            sender.layer_done(ticket, layer)
        pull.synchronize()
        stream.synchronize()
    assert bool(checker.reports) is not waits


# --- Leases and endings ---


def wait_for_layers(sender, receiver):
    return {"by_layer": True}, {}, lambda ticket: [sender.layer_done(ticket, n) for n in LAYERS]


def wait_for_a_stream(sender, receiver):
    user = kv.device("host").stream()
    gate = Gate(user)
    return {}, {"after": user}, lambda ticket: gate.open()


def wait_for_staging(side):
    def begin(*ends):
        staging = ends[side]._staging.pool.allocator
        held = staging.alloc(4)
        return {}, {}, lambda ticket: staging.free(held)

    return begin


PAUSES = {  # what a pull waits for, the pages of both pools, and how many are pulled
    "layers": (wait_for_layers, {}, 3),
    "a stream": (wait_for_a_stream, LARGE, 12),  # more bytes than sockets buffer
    "staging of the sender": (wait_for_staging(0), {}, 4),
    "staging of the receiver": (wait_for_staging(1), {}, 4),
}


@contextmanager
def pausing(name, lease_s, **options):
    """Begin a pull that waits; yield it, its pools, the sender, and a function that lets it go."""
    begin, shape, count = PAUSES[name]
    ends = {"sender": {}, "receiver": {}}
    if "staging" in name:
        ends[name.split()[-1]]["staging_pages"] = 4
    with pair(filled(**shape), pool_of(**shape), **ends) as (sender, receiver, source, target):
        poison(target, range(12))
        of_offer, of_pull, let_go = begin(sender, receiver)
        ticket = sender.offer(source.allocator.alloc(count), lease_s=lease_s, **of_offer, **options)
        pull = partial(receiver.pull, ticket, range(count), deadline_s=600, **of_pull)
        yield sender, source, target, pull, partial(let_go, ticket)


@pytest.mark.parametrize("name", PAUSES)
def test_a_pull_that_waits_renews_the_lease(name):
    """For longer than the lease, and no byte is sent before it may land."""
    with pausing(name, 0.6) as (sender, _, target, start, let_go):
        offer = keep_leases(sender)
        end = offer.expires
        pull = start()
        eventually(lambda: offer.expires > end + 0.8 or offer.ended)  # again and again
        assert not offer.ended and pull.failure is None
        if "stream" in name:
            assert sender.stats()["sent_bytes"] == 0
        let_go()
        pull.synchronize()
        assert_pulled(target, range(pull.num_pages), range(pull.num_pages))
        eventually(lambda: sender.stats()["completed"] == 1)


def test_renewals_have_a_limit():
    """A receiver that never ends its pull keeps no pages for longer than the sender allows."""
    with pair(sender={"max_lease_s": 0.6}) as (sender, receiver, source, _):
        ticket = sender.offer(source.allocator.alloc(1), lease_s=0.3, by_layer=True)
        start = time.monotonic()
        assert reason_of(receiver.pull(ticket, [0])) == "expired"
        assert 0.55 < time.monotonic() - start < 5
        for layer in LAYERS:
            sender.layer_done(ticket, layer)
        sender.offer(source.allocator.alloc(1), lease_s=100)
        (offer,) = sender._offers.values()
        offer.renew()
        assert 90 < offer.expires - time.monotonic() <= 100


@pytest.mark.parametrize("name", [name for name in PAUSES if name != "staging of the receiver"])
def test_without_renewals_the_lease_ends(name, monkeypatch):
    """A control: the pages are released, once, while the pull still waits."""
    monkeypatch.setattr(engines.PullTask, "renew_if_due", lambda task: time.sleep(0.01))
    released = []
    with pausing(name, 0.1, release=released.append) as (sender, source, target, start, let_go):
        pull = start()
        eventually(lambda: sender.stats()["expired"] == 1)
        if name != "layers":  # those that are not written yet keep the pages
            eventually(lambda: released)
        let_go()
        assert reason_of(pull) in ("expired", "lost")
        assert "stream" not in name or is_poisoned(target, range(12))
        eventually(lambda: released)
        assert len(released) == 1
        source.allocator.free(released[0])


def test_how_offers_have_ended(monkeypatch):
    monkeypatch.setattr(senders, "_MAX_ENDED_OFFERS", 3)
    with pair() as (sender, receiver, source, _):
        tickets = {}
        for outcome in ("expired", "withdrawn", "completed", "closed"):
            ticket = sender.offer(
                source.allocator.alloc(1), lease_s=0.05 if outcome == "expired" else 30.0
            )
            assert sender.outcome(ticket) == ""
            tickets[outcome] = ticket
            if outcome == "withdrawn":
                sender.withdraw(ticket)
            if outcome == "completed":
                receiver.check(ticket)
                receiver.pull(ticket, [0]).synchronize()
            if outcome == "closed":
                sender.close()
            eventually(lambda o=outcome: sender.outcome(tickets[o]) == o)
        assert sender.outcome(tickets["expired"]) == "unknown", "three have ended since"
        with pytest.raises(TypeError, match="ticket"):
            sender.outcome("ticket")
        with kv.PageSender(source) as other, pytest.raises(kv.TransferError, match="ticket"):
            other.outcome(ticket)


def test_a_lease_ends():
    with pair() as (sender, receiver, source, _):
        ticket = sender.offer(source.allocator.alloc(3), lease_s=0.05)
        eventually(lambda: source.allocator.num_free == 12)
        assert reason_of(receiver.pull(ticket, [0, 1, 2])) == "expired"
        assert sender.stats()["expired"] == 1
        assert sender.withdraw(ticket) is False


def test_what_a_receiver_takes_renews_the_lease(monkeypatch):
    """After each part of a layer, long before the receiver renews it."""
    send, ends = protocol.Channel.send_data, []

    def sending(channel, *arguments):
        ends.append(offer.expires)
        send(channel, *arguments)

    monkeypatch.setattr(protocol.Channel, "send_data", sending)
    with pair(filled(**LARGE), pool_of(**LARGE)) as (sender, receiver, source, target):
        ticket = sender.offer(source.allocator.alloc(12), lease_s=600)
        (offer,) = sender._offers.values()
        receiver.pull(ticket, range(12)).synchronize()
        assert_pulled(target, range(12), range(12))
    assert len(ends) > 2 and all(end < later for end, later in itertools.pairwise(ends))


@pytest.mark.parametrize("said", ["RENEW, REFUSED", "RENEW", ""])
def test_why_a_peer_has_ended_the_connection(said):
    """A send that fails reports the peer's refusal."""
    ends = socket.socketpair()
    keys = [b"a" * 32, b"b" * 32]
    one, other = (
        protocol.Channel(end, *order, b"data", protocol.BEST_ALGORITHM, b"")
        for end, order in zip(ends, (keys, keys[::-1]), strict=True)
    )
    for name in filter(None, said.split(", ")):
        if name == "REFUSED":
            other.refuse("expired", "the offer: expired", time.monotonic() + 5)
        else:
            other.send(protocol.RENEW, b"", time.monotonic() + 5)
    other.close()
    expected = kv.TransferError if "REFUSED" in said else protocol.Lost
    with pytest.raises(expected, match="expired" if "REFUSED" in said else "ended"):
        for _ in range(3):
            one.send(protocol.DONE, b"", time.monotonic() + 5)


def test_a_refusal_of_the_pull_before(monkeypatch):
    """The offer was withdrawn after the last layer: the next pull uses another connection."""
    serve = engines.SocketEngine.serve

    def serve_and_withdraw(engine, service):
        serve(engine, service)
        monkeypatch.setattr(engines.SocketEngine, "serve", serve)
        sender.withdraw(tickets[0])

    monkeypatch.setattr(engines.SocketEngine, "serve", serve_and_withdraw)
    monkeypatch.setattr(protocol.Channel, "has_ended", lambda channel: False)
    with pair() as (sender, receiver, source, target):
        pages = [source.allocator.alloc(2) for _ in range(2)]
        tickets = [sender.offer(each) for each in pages]
        receiver.pull(tickets[0], [0, 1]).synchronize()
        eventually(lambda: sender.stats()["refused_pulls"] == 1 and receiver.stats()["connections"])
        eventually(lambda: sender.stats()["connections"] == 0)
        receiver.pull(tickets[1], [2, 3]).synchronize()
        assert_pulled(target, [2, 3], pages[1])
        eventually(lambda: sender.stats()["completed"] == 1)
        assert sender.stats()["withdrawn"] == 1


def test_a_refusal_behind_the_last_layer(monkeypatch):
    """The receiver has all layers but cannot confirm: the pull is done, and its thread stays."""
    send = protocol.Channel.send

    def refused(channel, kind, *arguments, **options):
        if kind == protocol.DONE:
            raise kv.TransferError("the offer: expired", "expired")
        send(channel, kind, *arguments, **options)

    with pair() as (sender, receiver, source, target):
        monkeypatch.setattr(protocol.Channel, "send", refused)
        offered = source.allocator.alloc(2)
        receiver.pull(sender.offer(offered), [0, 1]).synchronize()
        assert_pulled(target, [0, 1], offered)
        (thread,) = receiver._workers._threads
        eventually(lambda: receiver._workers._num_idle == 1)
        assert thread.is_alive() and receiver.stats()["connections"] == 0


def test_pages_that_an_engine_reads_ahead_are_freed_behind_it():
    """An engine thread reads them when the offer is withdrawn, and reads none afterwards."""
    with pair() as (sender, _, source, _):
        free = source.allocator.num_free
        ticket = sender.offer(source.allocator.alloc(3))
        (offer,) = sender._offers.values()
        offered = offer.offered
        with offered.reading(), offered.reading():
            assert sender.withdraw(ticket)
            assert source.allocator.num_free == free - 3
            assert sender.stats()["offered_pages"] == 3
            with pytest.raises(kv.TransferError, match="withdrawn"):
                offered.check()
        assert source.allocator.num_free == free and sender.stats()["offered_pages"] == 0
        with pytest.raises(kv.TransferError, match="withdrawn"), offered.reading():
            raise AssertionError("the pages are others'")
        assert source.allocator.num_free == free


def test_a_closed_sender_has_no_files_open():
    pool = pool_of()
    before = set(Path("/proc/self/fd").iterdir())
    sender = kv.PageSender(pool)
    sender.close()
    assert set(Path("/proc/self/fd").iterdir()) <= before


def test_pools_are_not_kept_by_offers_that_are_over():
    """Not even until the garbage collector runs, since their memory is large."""
    with without_collection():
        with pair() as (sender, receiver, source, target):
            receiver.pull(sender.offer(source.allocator.alloc(3)), [0, 1, 2]).synchronize()
            sender.withdraw(sender.offer(source.allocator.alloc(1)))
            sender.offer(source.allocator.alloc(1))
        pools = [weakref.ref(pool) for pool in (source, target)]
        del sender, receiver, source, target
        assert poll(lambda: not any(pool() for pool in pools))


@pytest.mark.parametrize("which", ["sender", "receiver"])
def test_closing_in_the_middle(which):
    with pair() as (sender, receiver, source, target):
        ticket = sender.offer(source.allocator.alloc(2), by_layer=True)
        pages = target.allocator.alloc(2)
        pull = receiver.pull(ticket, pages)
        sender.layer_done(ticket, 0)
        pull.wait_layer(0)
        (sender if which == "sender" else receiver).close()
        assert reason_of(pull) in ("closed", "lost")
        target.allocator.free(pages)
        assert target.allocator.num_free == 12
        if which == "sender":
            assert source.allocator.num_free == 12
            with pytest.raises(kv.KvcupyError, match="PageSender: closed"):
                sender.offer(source.allocator.alloc(1))
            source.allocator.free([source.allocator.allocated()[0]])
        else:
            with pytest.raises(kv.KvcupyError, match="PageReceiver: closed"):
                receiver.pull(ticket, [0, 1])
        for layer in (1, 2):
            sender.layer_done(ticket, layer)


def test_cancelled_pages_stay_until_nothing_can_land(monkeypatch):
    """A stuck engine keeps pages in quarantine, and too many of them refuse new pulls."""
    from kvcupy.remote.migration.engines import SocketEngine

    quiet = threading.Event()
    monkeypatch.setattr(SocketEngine, "quiet", lambda engine, task: quiet.is_set())
    with pair(receiver={"max_quarantined_pages": 3}) as (sender, receiver, source, target):
        tickets = [sender.offer(source.allocator.alloc(3), by_layer=True) for _ in range(2)]
        pages = target.allocator.alloc(3)
        pull = receiver.pull(tickets[0], pages)
        sender.layer_done(tickets[0], 0)
        pull.wait_layer(0)
        pull.cancel()
        target.allocator.free(pages)
        assert receiver.stats()["quarantined_pages"] == 3
        assert target.allocator.num_free == 9
        with pytest.raises(kv.CacheFull, match="in quarantine"):
            receiver.pull(tickets[1], [6, 7, 8])
        quiet.set()
        assert reason_of(pull) == "cancelled"
        assert receiver.stats()["quarantined_pages"] == 0
        assert target.allocator.num_free == 12
        for ticket in tickets:
            sender.withdraw(ticket)
            for layer in LAYERS:
                if ticket != tickets[0] or layer:
                    sender.layer_done(ticket, layer)


@pytest.mark.parametrize("is_bounded", [True, False], ids=["bounded", "unbounded"])
def test_pages_that_an_engine_may_never_let_go_are_not_waited_for(monkeypatch, is_bounded):
    """Callers wait only for pages that are freed as soon as the engine stops."""
    quiet, asked = threading.Event(), threading.Event()

    def is_quiet(engine, task):
        asked.set()
        return quiet.is_set()

    monkeypatch.setattr(engines.SocketEngine, "quiet", is_quiet)
    monkeypatch.setattr(engines.SocketEngine, "bounded", is_bounded)
    with pair() as (sender, receiver, source, target):
        ticket = sender.offer(source.allocator.alloc(3), by_layer=True)
        allocator = target.allocator
        pages = allocator.alloc(3)
        pull = receiver.pull(ticket, pages)
        sender.layer_done(ticket, 0)
        pull.wait_layer(0)
        pull.cancel()
        assert asked.wait(PATIENCE_S)
        allocator.free(pages)
        assert allocator.num_available == (12 if is_bounded else 9)
        assert len(in_time(lambda: allocator.alloc(9))) == 9
        waiting = threading.Thread(target=lambda: allocator.alloc(3), daemon=True)
        if is_bounded:
            waiting.start()
            time.sleep(0.05)
            assert waiting.is_alive()
        else:
            with pytest.raises(kv.CacheFull):
                in_time(lambda: allocator.alloc(1))
            in_time(allocator._wait_for_freed)
        quiet.set()
        assert reason_of(pull) == "cancelled"
        if is_bounded:
            waiting.join(PATIENCE_S)
        else:
            allocator.alloc(3)
        assert allocator.num_allocated == 12
        allocator.free(range(12))
        sender.withdraw(ticket)
        for layer in LAYERS[1:]:
            sender.layer_done(ticket, layer)


# --- Tickets and arguments ---


def test_a_ticket_says_what_is_offered():
    with pair(secret=SECRET) as (sender, receiver, source, _):
        hashes = kv.block_hashes(range(12), 4)
        ticket = sender.offer(
            source.allocator.alloc(3), hashes=hashes, attachment=b"more", lease_s=7
        )
        read = receiver.inspect(ticket)
        assert (read.num_pages, read.hashes, read.attachment) == (3, tuple(hashes), b"more")
        assert (read.lease_s, read.num_pulls, read.address) == (7.0, 1, sender.address)
        short = receiver.inspect(sender.offer(source.allocator.alloc(2), hashes=[1, 2]))
        assert short.hashes == (1, 2)
        pull = receiver.pull(ticket, [0, 1, 2])
        assert (pull.hashes, pull.attachment) == (tuple(hashes), b"more")
        pull.synchronize()


def test_damaged_tickets():
    with pair(secret=SECRET) as (sender, receiver, source, _):
        ticket = sender.offer(source.allocator.alloc(1), hashes=[5], attachment=b"x")
        for i in range(0, len(ticket), 3):
            damaged = bytearray(ticket)
            damaged[i] ^= 1 + i % 255
            with pytest.raises(kv.TransferError):
                receiver.inspect(damaged)
        for cut in (ticket[:-1], ticket + b"\0", ticket[:40], b"", os.urandom(500)):
            with pytest.raises(kv.TransferError):
                receiver.inspect(cut)
        with pytest.raises(TypeError, match="ticket: expected bytes, got str"):
            receiver.inspect("ticket")
        with pytest.raises(kv.TransferError, match="another secret") as caught:
            kv.PageReceiver(pool_of(), secret=b"0123456789abcdef").inspect(ticket)
        assert caught.value.reason == "secret"
        other = kv.PageSender(pool_of(), secret=SECRET)
        with pytest.raises(kv.TransferError, match="of this sender"):
            other.withdraw(ticket)
        other.close()


def test_tickets_whose_parts_do_not_add_up():
    """They are authentic, but from a defective sender."""
    from dataclasses import replace

    with pair() as (sender, receiver, source, _):
        ticket = receiver.inspect(sender.offer(source.allocator.alloc(2)))
        for broken in (
            replace(ticket, num_pages=protocol.MAX_PAGES + 1), replace(ticket, address="ftp:x"),
            replace(ticket, hashes=(1, 2, 3)),
        ):  # fmt: skip
            with pytest.raises((kv.TransferError, ValueError)):
                receiver.pull(broken.encoded(b""), [0, 1])
        eventually(lambda: True)


@pytest.mark.parametrize(
    ("options", "difference"),
    [({"page_size": 8}, "page_size: expected 8, got 4"), ({"num_layers": 2}, "num_layers"),
     ({"dtype": "bf16"}, "format"), ({"v_head_dim": 16}, "v_head_dim"),
     ({"kind": "mla"}, "kind: expected mla, got kv"), ({"model": "b"}, "model: expected b, got a")],
    ids=str,
)  # fmt: skip
def test_pools_and_models_that_differ(options, difference):
    own = {"model": options.pop("model", "a")}
    pools = None, pool_of(**options)
    with pair(*pools, sender={"model": "a"}, receiver=own) as (sender, receiver, source, target):
        ticket = sender.offer(source.allocator.alloc(2))
        poison(target, range(12))
        for call in (lambda: receiver.pull(ticket, [0, 1]), lambda: receiver.check(ticket)):
            with pytest.raises(kv.TransferError, match=difference) as caught:
                call()
            assert caught.value.reason == "identity"
        assert sender.stats()["connections"] == 0
        assert is_poisoned(target, range(12))


def test_arguments_of_offer():
    with pair() as (sender, _, source, _):
        pages = source.allocator.alloc(2)
        for error, message, arguments in [
            (ValueError, "pages", {"pages": [7]}), (ValueError, "pages", {"pages": []}),
            (ValueError, "pages", {"pages": [0, 0]}), (TypeError, "pages", {"pages": 1}),
            (ValueError, "hashes", {"hashes": [1]}), (TypeError, "hashes", {"hashes": ["a", "b"]}),
            (ValueError, "lease_s", {"lease_s": 0}), (TypeError, "lease_s", {"lease_s": "1"}),
            (ValueError, "lease_s", {"lease_s": float("nan")}), (ValueError, "pulls", {"pulls": 0}),
            (TypeError, "attachment", {"attachment": "x"}), (TypeError, "release", {"release": 1}),
            (TypeError, "after", {"after": "stream"}),
        ]:  # fmt: skip
            with pytest.raises(error, match=rf"^{message}: "):
                sender.offer(**{"pages": pages, **arguments})
        assert sender.stats()["offers"] == 0
        ticket = sender.offer(pages)
        with pytest.raises(ValueError, match=r"^pages: expected pages that are not offered, got 0"):
            sender.offer(pages[:1])
        sender.withdraw(ticket)
        layered = sender.offer(source.allocator.alloc(1), by_layer=True)
        for layer in LAYERS:
            sender.layer_done(layered, layer)
            if layer == 1:
                with pytest.raises(ValueError, match="layer: expected one that is not done"):
                    sender.layer_done(layered, layer)
        sender.withdraw(layered)
        pages = source.allocator.alloc(2)
        shared = [sender.offer(pages, release=lambda pages: None) for _ in range(2)]
        assert all(map(sender.withdraw, shared))
        source.allocator.free(pages)


def test_arguments_of_pull():
    with pair() as (sender, receiver, source, target):
        ticket = sender.offer(source.allocator.alloc(2))
        for error, message, arguments in [
            (ValueError, "pages", {"pages": [0]}), (ValueError, "pages", {"pages": [0, 12]}),
            (ValueError, "pages", {"pages": [-1, 0]}), (ValueError, "pages", {"pages": [3, 3]}),
            (TypeError, "pages", {"pages": None}), (ValueError, "ticket", {"ticket": []}),
            (ValueError, "deadline_s", {"deadline_s": -1}),
            (TypeError, "deadline_s", {"deadline_s": None}), (TypeError, "after", {"after": 1}),
        ]:  # fmt: skip
            with pytest.raises(error, match=rf"^{message}: "):
                receiver.pull(**{"ticket": ticket, "pages": [0, 1], **arguments})
        assert receiver.stats()["pulls"] == 0
        pull = receiver.pull(ticket, [0, 1])
        for layer in (3, -1):
            with pytest.raises(ValueError, match="layer: expected 0 to 2"):
                pull.wait_layer(layer)
        pull.synchronize()
        pull.cancel()  # too late to have an effect
        assert pull.done() and target.allocator.num_free == 12


def test_a_sender_that_closes_has_cancelled_nothing():
    """The receiver's own reasons are "cancelled" and "closed", whatever a sender writes."""
    with pair() as (sender, receiver, source, target):
        ticket = sender.offer(source.allocator.alloc(1), by_layer=True)
        pull = receiver.pull(ticket, target.allocator.alloc(1))
        assert poll(lambda: sender.stats()["pulls"] == 1, PATIENCE_S)
        sender.close()
        assert reason_of(pull) == "lost"
        stats = receiver.stats()
        assert (stats["failed"], stats["cancelled"]) == (1, 0)
    key = bytes(32)
    ours, theirs = (protocol.Channel(s, key, key, key, 0, b"") for s in socket.socketpair())
    for reason, expected in (("closed", "lost"), ("cancelled", "lost"), ("expired", "expired")):
        theirs.refuse(reason, "why", time.monotonic() + PATIENCE_S)
        with pytest.raises(kv.TransferError, match="why") as caught:
            ours.receive(time.monotonic() + PATIENCE_S, protocol.GRANT)
        assert caught.value.reason == expected


def test_arguments_of_both(tmp_path):
    pool = pool_of()
    for error, message, arguments in [
        (TypeError, "pool", {"pool": 3}), (TypeError, "secret", {"secret": "text"}),
        (ValueError, "secret: expected at least 16 bytes", {"secret": b"short"}),
        (ValueError, "engine", {"engine": "pigeon"}), (TypeError, "engine", {"engine": None}),
        (TypeError, "heads", {"heads": 3}), (ValueError, "heads", {"heads": (1, 4)}),
        (TypeError, "model", {"model": b"x"}), (TypeError, "tls", {"tls": True}),
        (ValueError, "staging_pages", {"staging_pages": 0}),
    ]:  # fmt: skip
        for kind in (kv.PageSender, kv.PageReceiver):
            with pytest.raises(error, match=rf"^{message}"):
                kind(**{"pool": pool, **arguments})
    for error, message, listen in [
        (TypeError, "listen", 80), (ValueError, "listen", "tcp:nowhere"),
        (ValueError, "listen", "tcp:127.0.0.1:70000"), (ValueError, "listen", "unix:"),
        (ValueError, "listen: expected a path of at most 107 bytes", "unix:" + "x" * 108),
        (ValueError, "secret: expected one, or tls", "tcp:0.0.0.0:0"),
        (ValueError, "secret: expected one, or tls", "tcp:192.0.2.1:0"),
    ]:  # fmt: skip
        with pytest.raises(error, match=rf"^{message}"):
            kv.PageSender(pool, listen=listen)
    with pytest.raises(ValueError, match=r"^advertise: expected the address of this machine"):
        kv.PageSender(pool, listen="tcp:0.0.0.0:0", secret=SECRET)
    with pytest.raises(ValueError, match=r"^max_pulls: "):
        kv.PageReceiver(pool, max_pulls=0)
    for kind, role, other in (
        (kv.PageSender, "servers", ssl.PROTOCOL_TLS_CLIENT),
        (kv.PageReceiver, "clients", ssl.PROTOCOL_TLS_SERVER),
    ):
        with pytest.raises(ValueError, match=f"^tls: expected a context for {role}"):
            kind(pool, tls=ssl.SSLContext(other))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f": '{tmp_path / 'none'}'$"):
        kv.PageSender(pool_of(), listen=f"unix:{tmp_path}/none/pages")


@pytest.mark.parametrize("name", ["kvcupy pull", "kvcupy pages", "kvcupy page sender"])
def test_no_thread(name, monkeypatch, tmp_path):
    start = threading.Thread.start

    def refused(thread):
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    if name == "kvcupy page sender":
        with (
            monkeypatch.context() as patch,
            pytest.raises(kv.KvcupyError, match="cannot start a thread"),
        ):
            patch.setattr(threading.Thread, "start", refused)
            kv.PageSender(pool_of(), listen=f"unix:{tmp_path}/pages")
        assert not list(tmp_path.iterdir())
        return
    with pair() as (sender, receiver, source, target):
        ticket = sender.offer(source.allocator.alloc(2))
        pages = target.allocator.alloc(2)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            assert reason_of(receiver.pull(ticket, pages)) == "lost"
        receiver.pull(ticket, pages).synchronize()
        assert_pulled(target, pages, [0, 1])
        target.allocator.free(pages)
        assert target.allocator.num_free == 12


def test_no_thread_for_a_connection_while_the_sender_closes(monkeypatch):
    start, starting = threading.Thread.start, threading.Event()

    def refused(thread):
        if thread.name == "kvcupy pages":
            starting.set()
            eventually(lambda: sender._closed)
            time.sleep(0.05)  # `close` has listed the connections
            raise RuntimeError("can't start new thread")
        start(thread)

    with kv.PageSender(pool_of()) as sender:
        monkeypatch.setattr(threading.Thread, "start", refused)
        _, port = sender.address.rsplit(":", 1)
        with socket.create_connection(("127.0.0.1", int(port))):
            assert starting.wait(PATIENCE_S)
            sender.close()
        assert not sender._connections


@pytest.mark.parametrize("code", [errno.ECONNABORTED, errno.ETIMEDOUT], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["accept", "sendmsg", "recvmsg_into"])
def test_calls_of_the_system_that_fail(call, code, monkeypatch):
    """Each call fails once; a second pull succeeds."""
    method = getattr(socket.socket, call)
    for number in range(1, 12):
        calls = []

        def failing(connection, *arguments, calls=calls, number=number):
            calls.append(call)
            if len(calls) == number:
                raise OSError(code, "failed")
            return method(connection, *arguments)

        with pair() as (sender, receiver, source, target):
            ticket = sender.offer(source.allocator.alloc(2), lease_s=5, pulls=2)
            with monkeypatch.context() as patch:
                patch.setattr(socket.socket, call, failing)
                first = receiver.pull(ticket, [0, 1])
                eventually(first._landing.done)
            try:
                first.synchronize()
                assert_pulled(target, [0, 1], [0, 1])
            except kv.TransferError as error:
                assert error.reason == "lost"
            eventually(lambda sender=sender: sender.stats()["pulls"] == 0)
            receiver.pull(ticket, [3, 4]).synchronize()
            assert_pulled(target, [3, 4], [0, 1])
            sender.withdraw(ticket)
        if len(calls) < number:
            break


def test_pulls_and_connections_by_reason():
    """At both ends, in `stats` and as metrics."""
    name = "kvcupy_migration_failed_pulls_total"
    ends = "sender", "receiver"
    before = [kv.metrics.value(name, end=end, reason="withdrawn") for end in ends]
    was_enabled = kv.metrics.enabled
    kv.metrics.enable()
    try:
        with pair() as (sender, receiver, source, _):
            ticket = sender.offer(source.allocator.alloc(1), by_layer=True)
            sender.layer_done(ticket, 0)
            pull = receiver.pull(ticket, [0])
            pull.wait_layer(0)
            sender.withdraw(ticket)
            assert reason_of(pull) == "withdrawn"
            for layer in (1, 2):
                sender.layer_done(ticket, layer)
            eventually(lambda: sender.stats()["pull_failures"] == {"withdrawn": 1})
            assert receiver.stats()["pull_failures"] == {"withdrawn": 1}
            with socket.create_connection(("127.0.0.1", int(sender.address.split(":")[-1]))) as it:
                it.sendall(b"GET / HTTP/1.1\r\n" * 8)
                eventually(lambda: sender.stats()["connection_drops"] == {"stranger": 1})
            assert sender.stats()["dropped_connections"] == 1
    finally:
        if not was_enabled:
            kv.metrics.disable()
    after = [kv.metrics.value(name, end=end, reason="withdrawn") for end in ends]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1]
    assert kv.metrics.value("kvcupy_migration_pull_seconds", outcome="failed").count >= 1
    name = "kvcupy_migration_dropped_connections_total"
    assert kv.metrics.value(name, end="sender", reason="stranger") >= 1


def test_metrics_of_senders_and_receivers_that_are_gone():
    """Totals never decrease, which a scraper would take for a restart."""

    def totals():
        return [
            kv.metrics.value("kvcupy_migration_pulls_total", outcome="completed"),
            kv.metrics.value("kvcupy_migration_offers_total", outcome="completed"),
            kv.metrics.value("kvcupy_migration_bytes_total", direction="sent"),
            kv.metrics.value("kvcupy_migration_bytes_total", direction="received"),
        ]

    gc.collect()
    before = totals()
    source, target = filled(), pool_of()
    with kv.PageSender(source) as sender, kv.PageReceiver(target) as receiver:
        receiver.pull(sender.offer(source.allocator.alloc(2)), [0, 1]).synchronize()
        eventually(lambda: source.allocator.num_free == 12)
    num_bytes = 2 * target.page_bytes
    del sender, receiver
    gc.collect()
    moved = [b - a for a, b in zip(before, totals(), strict=True)]
    assert moved == [1, 1, num_bytes, num_bytes]


def test_an_idle_connection_makes_place():
    """A sender closes the connection idle longest; its receiver then reconnects."""
    pools = [pool_of() for _ in range(3)]
    with pair(sender={"max_connections": 2}) as (sender, receiver, source, _):
        others = [kv.PageReceiver(pool) for pool in pools]
        for each in (receiver, *others, receiver, others[0]):
            pages = source.allocator.alloc(2)
            each.pull(sender.offer(pages), [3, 4]).synchronize()
            assert_pulled(each.pool, [3, 4], pages)
            eventually(lambda: source.allocator.num_free == 12)
            eventually(lambda: all(c.state == "idle" for c in sender._open_connections()))
        stats = sender.stats()
        assert (stats["connections"], stats["dropped_connections"]) == (2, 0)
        eventually(lambda: len(sender._connections) == 2)
        # Those that are at work stay; the third waits for one of them.
        tickets = [sender.offer(source.allocator.alloc(1), by_layer=True) for _ in range(3)]
        pulls = [each.pull(t, [5]) for each, t in zip(others[:2], tickets, strict=False)]
        eventually(lambda: sender.stats()["pulls"] == 2)
        pulls.append(others[2].pull(tickets[2], [5]))
        for layer in LAYERS:
            sender.layer_done(tickets[2], layer)
        eventually(lambda: sender._is_crowded)
        assert sender.stats()["pulls"] == 2
        for ticket in tickets[:2]:
            for layer in LAYERS:
                sender.layer_done(ticket, layer)
        for pull in pulls:
            pull.synchronize()
        assert sender.stats()["dropped_connections"] == 0
        for each in others:
            each.close()


def test_a_connection_is_used_again_before_it_is_confirmed(monkeypatch):
    """The sender confirms late; the next pull reads the confirmation first."""
    send, heard = protocol.Channel.send, threading.Event()

    def sending(channel, kind, *arguments, **options):
        if kind == protocol.CONFIRMED:
            assert heard.wait(PATIENCE_S)
        send(channel, kind, *arguments, **options)

    monkeypatch.setattr(protocol.Channel, "send", sending)
    connected, connect = [], protocol.Address.connect
    monkeypatch.setattr(
        protocol.Address, "connect", lambda *a: connected.append(a) or connect(*a)
    )  # fmt: skip
    with pair() as (sender, receiver, source, target):
        pages = [source.allocator.alloc(2) for _ in range(2)]
        receiver.pull(sender.offer(pages[0]), [0, 1]).synchronize()
        eventually(lambda: receiver.stats()["connections"] == 1)
        second = receiver.pull(sender.offer(pages[1]), [2, 3])
        assert receiver.stats()["connections"] == 0
        heard.set()
        second.synchronize()
        assert_pulled(target, range(4), [*pages[0], *pages[1]])
        assert len(connected) == 1


def test_nobody_waits_for_a_sender_that_stops_while_it_confirms(monkeypatch):
    """Half of a confirmation has arrived: neither other pulls nor `stats` wait for the rest."""
    send, opened, halves = protocol.Channel.send, threading.Event(), []

    def sending(channel, kind, payload, deadline, **options):
        if kind != protocol.CONFIRMED or channel.socket.getsockname()[1] != stopped_port:
            send(channel, kind, payload, deadline, **options)
            return
        message = channel._message(kind, payload)
        channel.socket.sendall(message[:10])
        halves.append(channel)
        assert opened.wait(PATIENCE_S)
        channel.socket.sendall(message[10:])

    monkeypatch.setattr(protocol.Channel, "send", sending)
    monkeypatch.setattr(receivers, "_CONFIRM_TIMEOUT_S", 10.0 * PATIENCE_S)
    with pair() as (sender, receiver, source, target), kv.PageSender(filled()) as other:
        stopped_port = int(sender.address.rpartition(":")[2])
        pages = [
            source.allocator.alloc(2),
            other.pool.allocator.alloc(1),
            source.allocator.alloc(2),
        ]
        first, ticket, second = (
            each.offer(numbers, pulls=2)
            for each, numbers in zip((sender, other, sender), pages, strict=True)
        )
        try:
            receiver.pull(first, [0, 1]).synchronize()
            eventually(lambda: halves)
            eventually(lambda: receiver.stats()["connections"] == 1)
            for _ in range(2):
                in_time(lambda: receiver.pull(ticket, [2]).synchronize())
                eventually(lambda: in_time(receiver.stats)["connections"] == 2)
            pull = in_time(lambda: receiver.pull(second, [3, 4]))
            assert in_time(receiver.stats)["connections"] == 1, "it is used again"
        finally:
            opened.set()
        pull.synchronize()
        assert_pulled(target, range(5), np.concatenate(pages))


def test_an_offer_that_ends_before_a_pull_is_confirmed(monkeypatch):
    """The refusal concerns the previous pull, which is done: the next one reconnects."""
    told = []
    receive = protocol.Channel.receive

    def receiving(channel, deadline, *kinds):
        received = receive(channel, deadline, *kinds)
        if received[0] == protocol.DONE and not told:
            told.append(channel)
            raise kv.TransferError("the offer: expired", "expired")
        return received

    monkeypatch.setattr(protocol.Channel, "receive", receiving)
    with pair() as (sender, receiver, source, target):
        ticket = sender.offer(source.allocator.alloc(2))
        receiver.pull(ticket, [0, 1]).synchronize()
        eventually(lambda: sender.stats()["refused_pulls"] == 1)
        receiver.pull(sender.offer(source.allocator.alloc(2)), [2, 3]).synchronize()
        assert_pulled(target, range(4), range(4))
        sender.withdraw(ticket)


def test_a_ticket_is_read_once(monkeypatch):
    """Not once per layer, since it may have the hashes of all pages."""
    read, decoded = [], protocol.Ticket.decoded

    def counting(data, secret):
        read.append(data)
        return decoded(data, secret)

    monkeypatch.setattr(protocol.Ticket, "decoded", counting)
    with pair(secret=SECRET) as (sender, _, source, _):
        ticket = sender.offer(source.allocator.alloc(2), hashes=[1, 2], by_layer=True)
        copied = bytes(bytearray(ticket))
        for layer in LAYERS:
            sender.layer_done(copied if layer == 1 else ticket, layer)
        assert read == []
        with pytest.raises(kv.TransferError, match="another secret"):
            sender.withdraw(ticket[:-1] + bytes([ticket[-1] ^ 1]))
        assert sender.withdraw(bytearray(ticket))
        assert len(read) == 2 and sender._by_ticket == {}
        assert sender.withdraw(ticket) is False


def test_connections_to_senders_that_are_gone_are_closed():
    """A receiver outlives many senders with different identities."""
    with pair() as (sender, receiver, source, _):
        for _ in range(3):
            pool = filled()
            with kv.PageSender(pool) as short:
                receiver.pull(short.offer(pool.allocator.alloc(1)), [0]).synchronize()
                eventually(lambda pool=pool: pool.allocator.num_free == 12)
                eventually(lambda: receiver.stats()["connections"] >= 1)
        receiver.pull(sender.offer(source.allocator.alloc(1)), [0]).synchronize()
        eventually(lambda: receiver.stats()["connections"] == 1)


@pytest.mark.races
def test_a_pull_that_cannot_start_is_over():
    """For example if the order checker raises: it is not counted, and holds no pages."""
    with pair() as (sender, receiver, source, target):
        ticket = sender.offer(source.allocator.alloc(2))
        pages = target.allocator.alloc(2)
        writer = kv.device("host").stream()
        with kv.order_checker(action="raise"):
            values = np.ones((1, HEADS, 16), np.float16), np.ones((1, HEADS, 24), np.float16)
            slots = np.array([int(pages[0]) * 4], np.int64)
            kv.store_kv(*values, target.k(0), target.v(0), slots, stream=writer)
            with pytest.raises(kv.OrderError):
                receiver.pull(ticket, pages)
            writer.synchronize()
        stats = receiver.stats()
        assert (stats["pulls"], stats["quarantined_pages"], stats["failed"]) == (0, 0, 1)
        target.allocator.free(pages)
        assert target.allocator.num_free == 12
        receiver.pull(ticket, [0, 1]).synchronize()


def test_an_engine_that_fails_to_poll(monkeypatch):
    """The keeper thread continues, and ends leases."""
    with pair() as (sender, receiver, source, _):
        polls = []

        def poll():
            polls.append(None)
            raise OSError("a peer has disconnected")

        monkeypatch.setattr(sender._engine, "poll", poll)
        monkeypatch.setattr(sender._engine, "poll_s", 0.01)
        sender._notify()
        eventually(lambda: len(polls) > 1)
        sender.offer(source.allocator.alloc(1), lease_s=0.02)
        eventually(lambda: sender.stats()["expired"] == 1)
        receiver.pull(sender.offer(source.allocator.alloc(1)), [0]).synchronize()


def test_layers_are_announced_while_the_sender_closes(monkeypatch):
    """Layers may be announced after all pages were freed, without effect."""
    with pair() as (_, _, source, _):
        for when in ("_offer_of", "_written_by"):
            with kv.PageSender(source) as closing:
                ticket = closing.offer(source.allocator.alloc(2), by_layer=True)
                method = getattr(closing, when)

                def then_close(*arguments, method=method, closing=closing):
                    found = method(*arguments)
                    closing.close()
                    return found

                monkeypatch.setattr(closing, when, then_close)
                closing.layer_done(ticket, 0)
                assert source.allocator.num_free == 12


# No staging pages are free -----------------------------------------------------------------------


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_who_waits_for_staging_gives_up_at_once(side):
    with pair(sender={"staging_pages": 4}, receiver={"staging_pages": 4}) as made:
        sender, receiver, source, _ = made
        staging = made[side == "receiver"]._staging.pool.allocator
        held = staging.alloc(4)  # as by pulls whose peers are slow
        ticket = sender.offer(source.allocator.alloc(2), lease_s=600)
        pull = receiver.pull(ticket, [0, 1], deadline_s=600)
        eventually(lambda: sender.stats()["pulls"])
        if side == "sender":
            assert sender.withdraw(ticket)
            eventually(lambda: not sender.stats()["offered_pages"])
        else:
            pull.cancel()
            eventually(lambda: not receiver.stats()["pulls"])
        assert reason_of(pull) in ("withdrawn", "cancelled", "lost")
        staging.free(held)
        sender.withdraw(ticket)
