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
    poison,
    pool_of,
)
from stream_cases import Gate, run_ahead

import kvcupy as kv

SENDER, RECEIVER = "remote/migration/sender.py PageSender.", "remote/migration/receiver.py "
LAYERS = range(3)


def pools(device):
    """Return a pool that is filled and one that is not, in host memory."""
    return filled(device=device), pool_of(device=device)


def copied(pool, device, **options):
    """Return another pool with the same bytes, in host memory unless `placement` says otherwise."""
    other = pool_of(device=device, **options)
    copy_all(pool, other, device)
    device.synchronize()
    return other


def copy_all(source, target, device, stream=None):
    for to, of in zip(target.parts, source.parts, strict=True):
        device.copy(to, of, stream=stream)


def sent_when_written(device, is_control):
    source = pool_of(device=device)
    with pair(source, pool_of(device=device)) as (sender, receiver, _, target):
        writer = device.stream()
        gate = Gate(writer)
        writer.call(lambda: fill(source))
        pull = receiver.pull(sender.offer(source.allocator.alloc(2), after=writer), [3, 2])
        eventually(lambda: pull.done() or sender.stats()["pulls"])
        run_ahead([gate], pull, is_control=is_control)
        pull.synchronize()
        writer.synchronize()
        assert_pulled(target, [3, 2], [0, 1])


def read_when_arrived(device, is_control):
    with pair(*pools(device)) as (sender, receiver, source, target):
        offered = source.allocator.alloc(2)
        ticket = sender.offer(offered, by_layer=True)
        pull = receiver.pull(ticket, [3, 2])
        # While a stream of a GPU waits, the host does too in calls that free or pin memory, and in
        # copies between host memory.
        reader, seen = device.stream(), pool_of(device=device, placement="device")
        pull.wait(reader)
        copy_all(target, seen, device, reader)
        run_ahead([], reader, is_control=is_control)
        for layer in LAYERS:
            sender.layer_done(ticket, layer)
        pull.synchronize()
        reader.synchronize()
        assert_pulled(copied(seen, device), [3, 2], offered)


def overwritten_when_used(device, is_control):
    with pair(*pools(device)) as (sender, receiver, source, target):
        poison(target, range(12))
        user, seen = device.stream(), []
        gate = Gate(user)
        user.call(lambda: seen.append(is_poisoned(target, [0, 1])))
        pull = receiver.pull(sender.offer(source.allocator.alloc(2)), [0, 1], after=user)
        eventually(lambda: sender.stats()["sent_bytes"] or sender.stats()["pulls"])
        run_ahead([gate], pull, is_control=is_control)
        pull.synchronize()
        user.synchronize()
        assert seen == [True]


def freed_when_written(device, is_control):
    with pair(*pools(device)) as (sender, _, source, _):
        writer = device.stream()
        gate = Gate(writer)
        ticket = sender.offer(source.allocator.alloc(2), after=writer)
        sender.withdraw(ticket)
        free = source.allocator.num_free
        gate.open()
        writer.synchronize()
        assert free == 10
        assert source.allocator.num_free == 12


def freed_when_nothing_lands(device, is_control):
    with pair(*pools(device)) as (sender, receiver, source, target):
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
    def program(device, is_control):
        on_device = [copied(pool, device, placement="device") for pool in pools(device)]
        with pair(*on_device, **{side: {"staging_pages": 2}}) as (sender, receiver, source, target):
            staging = (sender if side == "sender" else receiver)._staging
            staging._save = [Late(each) for each in staging._save]
            staging._load = [Late(each) for each in staging._load]
            offered = source.allocator.alloc(5)
            receiver.pull(sender.offer(offered), [4, 1, 9, 8, 0]).synchronize()
            assert_pulled(copied(target, device), [4, 1, 9, 8, 0], offered)

    return program


CONTROLS = {
    SENDER + "_is_ready: completion.done()": sent_when_written,
    SENDER + "_written_by: self._pool.allocator._mark_busy(pages, completion)": freed_when_written,
    RECEIVER + "Pull._wait: waiting.wait(event)": read_when_arrived,
    RECEIVER + "Pull._event_of: stream.record()": read_when_arrived,
    RECEIVER + "Pull._is_used: self._after.done()": overwritten_when_used,
    RECEIVER + "PageReceiver.pull: self._pool.allocator._mark_busy(ordered, pull._landing)":
        freed_when_nothing_lands,
    "remote/migration/layers.py Staging.save: stream.synchronize()": staged("sender"),
    "remote/migration/layers.py Staging.load: stream.synchronize()": staged("receiver"),
}  # fmt: skip


@pytest.mark.parametrize("site", CONTROLS)
@pytest.mark.usefixtures("lenient_host")
def test_each_wait_is_needed(device, site):
    program = CONTROLS[site]
    with sites.watched() as seen:
        program(device, is_control=False)
    assert seen[site]
    with sites.watched(leave_out=site), pytest.raises((AssertionError, kv.KvcupyError)):
        program(device, is_control=True)
    device.synchronize()
