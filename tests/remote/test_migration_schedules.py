"""Random schedules of small migrations with random failures, against what must hold in each."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest
from helpers import full_only
from migration_cases import HEADS, assert_pulled, eventually, fill, pool_of

import kvcupy as kv
from kvcupy.remote.migration import protocol
from kvcupy.remote.migration.protocol import Channel, Lost

NUM_SCHEDULES = 200
REASONS = {
    "cancelled", "late", "expired", "withdrawn", "taken", "lost", "closed", "failed", "ticket",
}  # fmt: skip


class Failures:
    """Lets calls of channels fail now and then."""

    def __init__(self, monkeypatch):
        self.rng, self.share = random.Random(0), 0.0
        for name in ("send", "receive", "send_data", "receive_data"):
            monkeypatch.setattr(Channel, name, self.failing(getattr(Channel, name)))

    def failing(self, method):
        def called(channel, *arguments, **options):
            drawn = self.rng.random()
            if drawn < self.share:
                raise Lost("drawn") if drawn < self.share / 2 else TimeoutError("drawn")
            return method(channel, *arguments, **options)

        return called


class Schedule:
    """Offers and pulls of two pools, in any order, and what became of each."""

    def __init__(self, seed, failures):
        self.rng = rng = random.Random(seed)
        failures.rng, failures.share = random.Random(seed), rng.choice([0, 0, 0.01, 0.05])
        self.layouts = [rng.choice(["layer_first", "page_head"]) for _ in range(2)]
        self.source = pool_of(layout=self.layouts[0])
        self.target = pool_of(layout=self.layouts[1])
        fill(self.source)
        staging = rng.choice([None, None, 2])
        self.sender = kv.PageSender(self.source, staging_pages=staging)
        self.receiver = kv.PageReceiver(self.target, staging_pages=rng.choice([None, 3]))
        self.offers, self.pulls, self.released = [], [], {}

    def run(self):
        actions = [
            self.offer, self.offer, self.pull, self.pull, self.pull, self.layer, self.layer,
            self.layer, self.cancel, self.withdraw, self.pause, self.wait,
        ]  # fmt: skip
        for _ in range(self.rng.randrange(10, 30)):
            self.rng.choice(actions)()
        if self.rng.random() < 0.2:
            (self.sender if self.rng.random() < 0.5 else self.receiver).close()
        self.finish()

    def offer(self):
        count = self.rng.randrange(1, 4)
        if self.source.allocator.num_free < count:
            return
        pages, number = self.source.allocator.alloc(count), len(self.offers)

        def release(given):
            self.released[number] = self.released.get(number, 0) + 1
            self.source.allocator.free(given)

        by_layer = self.rng.random() < 0.5
        ticket = self.sender.offer(
            pages, by_layer=by_layer, lease_s=self.rng.choice([0.01, 5.0]),
            pulls=self.rng.choice([1, 1, 2]), release=release,
        )  # fmt: skip
        missing = list(range(3)) if by_layer else []
        self.rng.shuffle(missing)
        self.offers.append((ticket, pages.copy(), missing))

    def pull(self):
        if not self.offers:
            return
        ticket, sources, _ = self.rng.choice(self.offers)
        if self.target.allocator.num_free < len(sources):
            return
        pages = self.target.allocator.alloc(len(sources))
        deadline_s = self.rng.choice([0.02, 5.0, 5.0])
        try:
            pull = self.receiver.pull(ticket, pages, deadline_s=deadline_s)
        except kv.CacheFull:  # too much in quarantine
            self.target.allocator.free(pages)
        else:
            self.pulls.append((pull, pages, sources))

    def layer(self):
        if self.offers:
            ticket, _, missing = self.rng.choice(self.offers)
            if missing:
                self.sender.layer_done(ticket, missing.pop())

    def cancel(self):
        if self.pulls and self.rng.random() < 0.5:
            self.rng.choice(self.pulls)[0].cancel()

    def withdraw(self):
        if self.offers and self.rng.random() < 0.25:
            self.sender.withdraw(self.rng.choice(self.offers)[0])

    def pause(self):
        time.sleep(self.rng.random() * 0.004)

    def wait(self):
        """Let a stream wait for a layer, and see what it finds then."""
        if self.pulls and self.receiver._staging is None:  # else it is the host that would wait
            pull, _, _ = self.rng.choice(self.pulls)
            try:
                pull.wait_layer(self.rng.randrange(3), kv.device("host").stream())
            except kv.TransferError as error:
                assert error.reason in REASONS

    def finish(self):
        """Bring everything to an end, and check what must hold."""
        if self.rng.random() < 0.15:
            time.sleep(0.03)  # longer than short leases and deadlines
        for ticket, _, missing in self.offers:
            for layer in missing:
                self.sender.layer_done(ticket, layer)
        self.outcomes = outcomes = []
        for pull, pages, sources in self.pulls:
            if self.rng.random() < 0.2:
                pull.cancel()
            try:
                pull.synchronize()
                outcomes.append("completed")
                assert_pulled(self.target, pages, sources)
            except kv.TransferError as error:
                assert error.reason in REASONS
                outcomes.append(error.reason)
            assert pull._landing.done()
            self.target.allocator.free(pages)
        received = self.receiver.stats()
        self.receiver.close()
        self.sender.close()
        assert self.target.allocator.num_free == self.target.num_pages
        eventually(lambda: len(self.released) == len(self.offers))
        assert set(self.released.values()) <= {1}
        self.source.allocator.check_leaks()
        assert self.source.allocator.num_free == self.source.num_pages
        assert received["pulls"] == received["quarantined_pages"] == 0
        assert received["completed"] == outcomes.count("completed")
        assert received["completed"] + received["failed"] + received["cancelled"] == len(outcomes)
        sent = self.sender.stats()
        ends = ("completed", "expired", "withdrawn", "failed", "closed")
        assert sum(sent[name] for name in ends) == len(self.offers)
        assert sent["offers"] == sent["offered_pages"] == sent["pulls"] == 0


def own_threads():
    return {t for t in threading.enumerate() if t.name.startswith("kvcupy p")}


@pytest.mark.parametrize("part", [*range(4), *map(full_only, range(4, 8))])
def test_schedules(part, monkeypatch, lenient_host):
    assert HEADS == 4
    monkeypatch.setattr(protocol, "HANDSHAKE_S", 1.0)
    before = own_threads()  # of other tests in this process
    failures = Failures(monkeypatch)
    outcomes = Counter()
    for i in range(NUM_SCHEDULES // 4):
        seed = part * 1000 + i
        schedule = Schedule(seed, failures)
        try:
            schedule.run()
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
        outcomes.update(schedule.outcomes)
    failures.share = 0
    assert set(outcomes) >= {"completed", "cancelled"}
    eventually(lambda: own_threads() <= before, "all threads end")
