"""What orders pages that move between processes: each wait left out, and what becomes of it.

The simulated scheduler runs streams, but no sockets and threads; so these programs run in real
time, and make sure by gates that what is left out is needed.
"""

from __future__ import annotations

import time

import pytest
import sites
from migration_cases import (
    assert_pulled,
    eventually,
    fill,
    filled,
    is_poisoned,
    pair,
    parts_of,
    poison,
    pool_of,
)
from stream_cases import Gate

import kvcupy as kv

SENDER, RECEIVER = "cache/migration/sender.py PageSender.", "cache/migration/receiver.py "
LAYERS = range(3)


def host_stream():
    return kv.device("host").stream()


def sent_when_written():
    source = pool_of()
    with pair(source) as (sender, receiver, _, target):
        writer = host_stream()
        gate = Gate(writer)
        writer.call(lambda: fill(source))
        pull = receiver.pull(sender.offer(source.allocator.alloc(2), after=writer), [3, 2])
        eventually(lambda: pull.done() or sender.stats()["pulls"])
        time.sleep(0.02)
        gate.open()
        pull.synchronize()
        writer.synchronize()
        assert_pulled(target, [3, 2], [0, 1])


def read_when_arrived():
    with pair() as (sender, receiver, source, target):
        ticket = sender.offer(source.allocator.alloc(2), by_layer=True)
        pull = receiver.pull(ticket, [3, 2])
        reader, seen = host_stream(), []
        pull.wait(reader)
        reader.call(lambda: seen.append([array[[3, 2]].copy() for _, _, array in parts_of(target)]))
        time.sleep(0.02)
        for layer in LAYERS:
            sender.layer_done(ticket, layer)
        pull.synchronize()
        reader.synchronize()
        expected = [array[[3, 2]] for _, _, array in parts_of(target)]
        assert all((a == b).all() for a, b in zip(seen[0], expected, strict=True))


def overwritten_when_used():
    with pair() as (sender, receiver, source, target):
        poison(target, range(12))
        user, seen = host_stream(), []
        gate = Gate(user)
        user.call(lambda: seen.append(is_poisoned(target, [0, 1])))
        pull = receiver.pull(sender.offer(source.allocator.alloc(2)), [0, 1], after=user)
        eventually(lambda: sender.stats()["sent_bytes"] or sender.stats()["pulls"])
        time.sleep(0.02)
        gate.open()
        pull.synchronize()
        user.synchronize()
        assert seen == [True]


def freed_when_written():
    with pair() as (sender, _, source, _):
        writer = host_stream()
        gate = Gate(writer)
        ticket = sender.offer(source.allocator.alloc(2), after=writer)
        sender.withdraw(ticket)
        free = source.allocator.num_free
        gate.open()
        writer.synchronize()
        assert free == 10
        assert source.allocator.num_free == 12


def freed_when_nothing_lands():
    with pair() as (sender, receiver, source, target):
        ticket = sender.offer(source.allocator.alloc(2), by_layer=True)
        pages = target.allocator.alloc(2)
        pull = receiver.pull(ticket, pages)
        target.allocator.free(pages)
        free = target.allocator.num_free
        for layer in LAYERS:
            sender.layer_done(ticket, layer)
        pull.synchronize()
        assert free == 10
        assert target.allocator.num_free == 12


class Late:
    """A prepared transfer that takes its time."""

    def __init__(self, prepared):
        self.prepared = prepared

    def issue(self, pairs, stream):
        stream.call(lambda: time.sleep(0.01))
        self.prepared.issue(pairs, stream)


def staged(side):
    def program():
        pools = filled(placement="device"), pool_of(placement="device")
        with pair(*pools, **{side: {"staging_pages": 2}}) as (sender, receiver, source, target):
            staging = (sender if side == "sender" else receiver)._staging
            staging._save = [Late(each) for each in staging._save]
            staging._load = [Late(each) for each in staging._load]
            offered = source.allocator.alloc(5)
            receiver.pull(sender.offer(offered), [4, 1, 9, 8, 0]).synchronize()
            assert_pulled(target, [4, 1, 9, 8, 0], offered)

    return program


CONTROLS = {
    SENDER + "_is_ready: completion.done()": sent_when_written,
    SENDER + "_written_by: self._pool.allocator._mark_busy(pages, completion)": freed_when_written,
    RECEIVER + "Pull._wait: waiting.wait(event)": read_when_arrived,
    RECEIVER + "Pull._event_of: stream.record()": read_when_arrived,
    RECEIVER + "Pull._is_used: self._after.done()": overwritten_when_used,
    RECEIVER + "PageReceiver.pull: self._pool.allocator._mark_busy(ordered, pull._landing)":
        freed_when_nothing_lands,
    "cache/migration/layers.py Staging.save: stream.synchronize()": staged("sender"),
    "cache/migration/layers.py Staging.load: stream.synchronize()": staged("receiver"),
}  # fmt: skip


@pytest.mark.parametrize("site", CONTROLS)
@pytest.mark.usefixtures("lenient_host")
def test_each_wait_is_needed(site):
    program = CONTROLS[site]
    with sites.watched() as seen:
        program()
    assert seen[site]
    with sites.watched(leave_out=site), pytest.raises((AssertionError, kv.KvcupyError)):
        program()
    kv.device("host").synchronize()
