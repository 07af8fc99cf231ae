"""kv.TieredCache under random calls and failures: no block is lost, mixed up or leaked."""

from __future__ import annotations

import errno
import itertools
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from helpers import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from stream_cases import Log
from tiered_cases import Blocks, in_time, snapshot
from tiered_store_cases import Held, MemoryStore, SharedBlocks

import kvcupy as kv
from kvcupy import observe

NUM_DEVICE = 5
SEQUENCES = st.integers(10**19 + 1, 10**19 + 3)  # their blocks have hashes of 128 bits
# Mostly prefixes of three sequences, sometimes blocks in any order.
CHAINS = st.builds(
    lambda chain, count: [10 * chain + i for i in range(count)],
    SEQUENCES,
    st.integers(1, 5),
)
HASH = st.builds(lambda chain, i: 10 * chain + i, SEQUENCES, st.integers(0, 4))
HASHES = st.one_of(CHAINS, CHAINS, CHAINS, st.lists(HASH, max_size=5))
LAYOUTS = st.sampled_from(["layer_first", "page_first", "page_first_direct", "page_head"])


class Machine(RuleBasedStateMachine):
    """15 blocks, a device pool of 5 pages, 1 to 14 host pages, and up to 6 slots on disk."""

    device = None

    @initialize(
        on_host=st.integers(1, 14), slots=st.integers(0, 6), layout=LAYOUTS,
        write=st.sampled_from(["through", "back"]), calm=st.booleans(),
        placement=st.sampled_from(["pinned", "pageable"]), alone=st.booleans(),
    )  # fmt: skip
    def start(self, on_host, slots, write, calm, alone, layout, placement):
        self.calm = calm  # no failures are injected
        self.alone = alone  # the cache is the only user of the host pool
        self.stack = ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.options = {"write": write}
        if slots:
            self.options |= {"disk": folder / "kv", "disk_bytes": 4096 * (2 + slots)}
        host = {"layout": layout, "placement": placement}
        self.blocks = self.make(NUM_DEVICE, on_host, host=host)
        self.leases = []  # (blocks, lease, hashes that it should hold)
        self.inserted = set()  # since the cache was made or cleared
        self.failures = self.reopened = False  # since then
        self.mine, self.mine_on_host = [], []  # pages that the test has allocated
        self.come_to_rest()

    def come_to_rest(self):
        """Wait for background work."""

    def in_reach(self, hashes):
        """Count the leading blocks that can be acquired."""
        return self.blocks.cache.match(hashes).disk

    def known_elsewhere(self):
        """Return the blocks that are in no tier, but can be acquired."""
        return set()

    def make(self, *sizes, **pools):
        return Blocks(self.device, *sizes, **pools, **self.options)

    def call(self, function, *args, **options):
        result = in_time(lambda: function(*args, **options), 30)
        self.come_to_rest()
        return result

    def unchanged_if_full(self, function, *args, still=True):
        """Call a function; after CacheFull check that nothing has changed, and return None.

        Without `still`, transfers may be in flight, and the state changes as they end.
        """
        before = None
        if still:
            self.blocks.settle_quietly()
            before = snapshot(self.blocks)
        try:
            return self.call(function, *args)
        except kv.CacheFull:
            if still and not self.failures:
                assert snapshot(self.blocks) == before
            return None

    def verify(self, lease, hashes):
        """Check that the blocks are whole, or that the lease reports a failure."""
        try:
            self.call(lease.wait)
        except kv.DeviceError:
            assert self.failures, "no failure was injected"
            return
        self.blocks.assert_holds(lease, hashes)

    # --- Rules ---

    @rule(hashes=HASHES)
    def match(self, hashes):
        device, host, disk = self.blocks.blocks()
        expected = [
            len(list(itertools.takewhile(known.__contains__, hashes)))
            for known in (device, device | host, device | host | disk)
        ]
        self.blocks.settle_quietly()
        if not self.failures:
            before = snapshot(self.blocks)
            assert list(self.call(self.blocks.cache.match, hashes))[:3] == expected
            assert snapshot(self.blocks) == before

    @rule(hashes=HASHES, keep=st.booleans(), still=st.booleans())
    def acquire(self, hashes, keep, still=True):
        known = self.in_reach(hashes)
        loads = set(hashes[:known]) - self.blocks.blocks()[0]
        before = self.hits()
        lease = self.unchanged_if_full(self.blocks.cache.acquire, hashes, still=still)
        if lease is None:
            return
        assert lease.num_blocks <= known
        if not self.failures:
            assert lease.num_blocks == known
            hits = known - len(loads), len(loads), len(hashes) - known, len(loads)
            self.blocks.settle_quietly()
            assert hits == tuple(np.subtract(self.hits(), before))
        if keep:
            self.leases.append((self.blocks, lease, hashes[: lease.num_blocks]))
        else:
            self.verify(lease, hashes[: lease.num_blocks])
            self.call(lease.release)

    def hits(self):
        """Count hits on the device, hits in lower tiers, misses, and loaded blocks."""
        self.blocks.settle_quietly()
        stats = self.blocks.cache.stats()
        below = stats["host_hits"] + stats["disk_hits"]
        loaded = stats["load_bytes"] // self.blocks.device_pool.page_bytes
        return stats["device_hits"], below, stats["misses"], loaded

    @rule(hashes=CHAINS, still=st.booleans())
    def serve(self, hashes, still):
        """Acquire, insert the missing blocks and release, as a server does."""
        lease = self.unchanged_if_full(self.blocks.cache.acquire, hashes, still=still)
        if lease is not None:
            self.leases.append((self.blocks, lease, hashes[: lease.num_blocks]))
            self.insert(hashes[lease.num_blocks :])
            self.leases.pop()
            self.verify(lease, hashes[: lease.num_blocks])
            self.call(lease.release)

    @rule(chain=SEQUENCES, still=st.booleans())
    def use_all(self, chain, still):
        """Acquire a whole sequence, which evicts others."""
        self.acquire([10 * chain + i for i in range(NUM_DEVICE)], False, still)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99), wait=st.booleans())
    def release(self, pick, wait):
        blocks, lease, hashes = self.leases.pop(pick % len(self.leases))
        if wait and blocks is self.blocks:
            self.verify(lease, hashes)
        self.call(lease.release)
        self.call(lease.release)

    @rule(hashes=HASHES)
    def insert(self, hashes):
        allocator = self.blocks.device_pool.allocator
        short = len(hashes) - (allocator.num_pages - allocator.num_allocated)
        if 0 < short <= self.num_unleased():
            self.unchanged_if_full(self.blocks.cache.evict, short, still=False)
        hashes = hashes[: allocator.num_pages - allocator.num_allocated]
        pages = self.call(allocator.alloc, len(hashes))
        for page, hash in zip(pages.tolist(), hashes, strict=True):
            self.blocks.fill(page, hash)
        allocator.free(self.call(self.blocks.cache.insert, hashes, pages))
        self.inserted |= set(hashes)

    @rule(count=st.integers(0, NUM_DEVICE), still=st.booleans())
    def evict(self, count, still):
        self.blocks.settle_quietly()
        device = self.blocks.tiers.device
        unpinned = [h for h in device.order if device.pages[h] not in device.pins]
        before = self.blocks.blocks()[0]
        evicted = self.unchanged_if_full(
            lambda: self.blocks.cache.evict(count) is None, still=still
        )  # fmt: skip
        if evicted and not self.failures:
            assert before - self.blocks.blocks()[0] == set(unpinned[:count])

    @precondition(lambda self: not self.alone)
    @rule(count=st.integers(0, 4))
    def take_host_pages(self, count):
        """Pages that the cache hands out are the caller's, also after they are freed."""
        pages = self.unchanged_if_full(self.blocks.cache.take_host_pages, count, still=False)
        if pages is not None:
            assert len(pages) == count and not self.blocks.tiers.host.owned[pages].any()
            self.blocks.host_pool.allocator.free(pages)

    @rule(name=st.sampled_from(["load_stream", "save_stream"]))
    def slow(self, name):
        """Delay transfers."""
        getattr(self.blocks.engine, name).call(lambda: time.sleep(0.005))

    @rule(take=st.integers(0, 2), take_on_host=st.integers(0, 2))
    def other_users(self, take, take_on_host):
        """Other users of the pools allocate and free pages."""
        self.mine = self.exchange(self.blocks.device_pool.allocator, self.mine, take)
        if not self.alone:
            host = self.blocks.host_pool.allocator
            self.mine_on_host = self.exchange(host, self.mine_on_host, take_on_host)

    @staticmethod
    def exchange(allocator, pages, take):
        """Free pages, and allocate others."""
        allocator.free(pages)
        return allocator.alloc(min(take, allocator.num_free)).tolist()

    @rule()
    def flush(self):
        self.call(self.blocks.cache.flush)

    @rule(how=st.sampled_from(["clear", "reopen", "not now", "nor now", "nor now either"]))
    def renew(self, how):
        if how in ("clear", "reopen"):
            getattr(self, how)()

    def clear(self):
        self.blocks.settle_quietly()  # so that a failure does not affect later calls
        before = snapshot(self.blocks)
        try:
            self.call(self.blocks.cache.clear)
        except kv.KvcupyError:
            assert self.leases and snapshot(self.blocks) == before
            return
        assert self.blocks.blocks() == (set(), set(), set())
        self.inserted, self.failures, self.reopened = self.known_elsewhere(), False, False

    def reopen(self):
        """Close the cache, with or without leases, and make another over its pools and file."""
        blocks = self.blocks
        self.call(blocks.cache.flush)
        on_disk = set(blocks.blocks()[2])
        self.call(blocks.cache.close)
        pools = blocks.device_pool, blocks.host_pool
        self.blocks = self.make(pools=pools)
        assert self.blocks.blocks() == (set(), set(), on_disk)
        self.inserted, self.reopened = on_disk | self.known_elsewhere(), True

    # --- Failures ---

    def make_way(self):
        """Evict all blocks that are not leased, so that acquired blocks must be loaded."""
        self.unchanged_if_full(self.blocks.cache.evict, self.num_unleased())

    def num_unleased(self):
        device = self.blocks.tiers.device
        return sum(page not in device.pins for page in device.pages.values())

    @precondition(lambda self: not self.calm)
    @rule(hashes=CHAINS, which=st.sampled_from(["load 0", "load 2", "save"]), keep=st.booleans())
    def refused(self, hashes, which, keep):
        """The device refuses the transfers of a call."""
        self.failures = True
        if which != "save":
            self.make_way()
        with observe.attached(Log(refuse=which)):
            self.acquire(hashes, keep)
            if which == "save":
                self.make_way()

    @precondition(lambda self: not self.calm)
    @rule(hashes=CHAINS, name=st.sampled_from(["load", "save"]), empty=st.integers(0, NUM_DEVICE))
    def raising(self, hashes, name, empty):
        """The engine raises when it is called."""
        self.failures = True
        self.unchanged_if_full(self.blocks.cache.evict, empty)

        def fail(*args, **options):
            raise MemoryError("not now")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.blocks.engine, name, fail)
            with suppress(MemoryError):
                self.acquire(hashes, True)

    @precondition(lambda self: not self.calm)
    @rule(hashes=CHAINS, name=st.sampled_from(["load_stream", "save_stream"]), keep=st.booleans())
    def failing_work(self, hashes, name, keep):
        """Work of a stream fails, and later work is skipped until the failure is noticed."""
        if self.device.kind != "host":
            return
        self.failures = True

        def boom():
            raise OSError("no such luck")

        if name == "load_stream":
            self.make_way()
        self.blocks.settle_quietly()
        getattr(self.blocks.engine, name).call(boom)
        self.acquire(hashes, keep, still=False)

    @precondition(lambda self: not self.calm)
    @rule(hashes=HASHES)
    def failing_compute(self, hashes):
        """Insert pages whose compute stream fails before it writes them."""
        if self.device.kind != "host":
            return
        self.failures = True
        compute, allocator = self.device.stream(), self.blocks.device_pool.allocator
        compute.call(lambda: 1 / 0)
        pages = allocator.alloc(min(len(hashes), allocator.num_free))
        unneeded = self.call(self.blocks.cache.insert, hashes[: len(pages)], pages, after=compute)
        allocator.free(unneeded)
        with pytest.raises(kv.DeviceError):
            compute.synchronize()
        self.inserted |= set(hashes[: len(pages)])

    @precondition(lambda self: not self.calm and self.blocks.tiers.disk is not None)
    @rule(hashes=HASHES)
    def failing_disk(self, hashes):
        self.failures = True
        file = self.blocks.tiers.disk._file

        def write_many(items):
            for slot, *_ in items:
                file.drop(slot)  # as a write that fails does
            return [OSError(errno.EIO, "broken") for _ in items]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file, "write_many", write_many)
            self.unchanged_if_full(self.blocks.cache.evict, len(hashes))

    @precondition(lambda self: not self.calm and self.blocks.tiers.disk is not None)
    @rule(pick=st.integers(0, 99), keep=st.booleans())
    def damage(self, pick, keep):
        """Flip a byte of a block on disk, and acquire the block."""
        _, host, disk = self.blocks.blocks()
        candidates = sorted(disk - host)
        if not candidates:
            return
        self.failures = True
        hash = candidates[pick % len(candidates)]
        self.make_way()
        there = self.options["disk"].read_bytes()
        at = there.find(self.blocks.first_bytes_on_disk(hash))
        if at > 0:  # else it is damaged already
            with self.options["disk"].open("r+b") as file:
                file.seek(at)
                file.write(bytes([there[at] ^ 1]))
        self.acquire([hash - hash % 10 + i for i in range(5)], keep)

    # --- What always holds ---

    @invariant()
    def whole(self):
        tiers = self.blocks.tiers
        leased = [
            p for b, lease, _ in self.leases for p in lease.pages.tolist() if lease.pages.size
        ]
        for tier in (tiers.device, tiers.host):
            pages = list(tier.pages.values())
            assert len(set(pages)) == len(pages)
            ordered = list(tier.order)
            aside = {hash for hash, page in tier.pages.items() if page in tier.pins} - set(ordered)
            assert sorted([*ordered, *aside]) == sorted(tier.pages)
            owned = set(np.flatnonzero(tier.owned).tolist())
            assert set(pages) <= owned
            out = set(tier.pool.allocator.allocated().tolist())
            assert owned <= out
            if tier is tiers.device:
                assert owned - set(pages) <= set(leased), "pages of failed loads that are leased"
                assert out == owned | set(self.mine) | set(leased)
            else:
                assert owned == set(pages) and out == owned | set(self.mine_on_host)
        if tiers.disk is not None:
            slots = list(tiers.disk.slots.values())
            assert sorted(slots + tiers.disk._free) == list(range(tiers.disk.num_slots))
            assert sorted(tiers.disk.order) == sorted(tiers.disk.slots)

    @invariant()
    def leased(self):
        """Leased blocks stay; pages of failed loads belong to their leases."""
        pins = {id(blocks): Counter() for blocks in (self.blocks, *(b for b, _, _ in self.leases))}
        for blocks, lease, hashes in self.leases:
            device = blocks.tiers.device
            assert lease._hashes == hashes
            pages = lease.pages.tolist()
            pins[id(blocks)].update(pages)
            assert device.owned[pages].all()
            known = [device.pages.get(h) == p for h, p in zip(hashes, pages, strict=True)]
            assert all(known) or blocks.cache._shared.closed or self.failures
        for blocks in (self.blocks, *(b for b, _, _ in self.leases)):
            assert blocks.tiers.device.pins == pins[id(blocks)]
        mine = sum(len(h) for b, _, h in self.leases if b is self.blocks)
        assert self.blocks.tiers.num_leased == mine

    @invariant()
    def nothing_lost(self):
        """Blocks are lost only by failures and for lack of space."""
        known = set.union(*self.blocks.blocks()) | self.known_elsewhere()
        gone = self.inserted - known
        if not self.failures:
            found = self.blocks.cache.stats()
            assert len(gone) <= found["lost"]
            # After reopening, some blocks are only on disk, and are lost when that is full.
            disk = self.blocks.tiers.disk
            room = 0 if self.reopened else self.blocks.host_pool.num_pages
            room = max(room, 0 if disk is None else disk.num_slots)
            if self.alone and len(self.inserted) <= room:
                assert not gone, gone
        assert known <= self.inserted

    def teardown(self):
        if not hasattr(self, "stack"):
            return
        with self.stack:
            for _, lease, _ in self.leases:
                self.call(lease.release)
            self.blocks.settle_quietly()
            self.blocks.device_pool.allocator.free(self.mine)
            self.blocks.host_pool.allocator.free(self.mine_on_host)
            on_device = list(self.blocks.blocks()[0])
            for hash in on_device:
                try:
                    with self.call(self.blocks.cache.acquire, [hash]) as lease:
                        self.verify(lease, [hash][: lease.num_blocks])
                except kv.CacheFull:
                    pass
            self.call(self.blocks.assert_no_leak)
            self.call(self.blocks.cache.close)


def run(machine, test_device, count):
    class OnDevice(machine):
        device = test_device

    run_state_machine_as_test(
        OnDevice,
        settings=settings(
            max_examples=examples(count), stateful_step_count=40, deadline=None, print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


def test_any_sequence_of_calls(device):
    run(Machine, device, 100)


class SharingMachine(Machine):
    """The same over a shared store that fails, and to which other processes add blocks."""

    @initialize(
        on_host=st.integers(1, 14), slots=st.sampled_from([0, 0, 4]),
        write=st.sampled_from(["through", "back"]), calm=st.booleans(), alone=st.booleans(),
        shared_write=st.sampled_from(["through", "back", "second_use"]), layout=LAYOUTS,
        share=st.sampled_from([0.25, 1.0]), capacity=st.sampled_from([3, 100]),
    )  # fmt: skip
    def start(self, on_host, slots, write, calm, alone, shared_write, layout, share, capacity):
        self.store = MemoryStore(capacity=capacity)
        self.sharing = {"shared_write": shared_write, "shared_prefetch": share}
        super().start(on_host, slots, write, calm, alone, layout, "pinned")

    def make(self, *sizes, **pools):
        made = SharedBlocks(
            self.device, *sizes, **pools, **self.options, **self.sharing, store=self.store
        )
        made.store.lacking, made.store.fail = self.store.lacking, self.store.fail
        return made

    def come_to_rest(self):
        if not self.blocks.cache.closed:
            self.blocks.idle()

    def in_reach(self, hashes):
        return self.blocks.cache.match(hashes).shared

    def known_elsewhere(self):
        return set(self.store.blocks)

    def clear(self):
        super().clear()
        if not self.failures:  # it was cleared: no failures from here on
            self.store.fail.clear()
            self.store.lacking.clear()

    def unchanged_if_full(self, function, *args, still=True):
        """Blocks that an acquire has fetched stay in host memory; the device is as before."""
        if function != self.blocks.cache.acquire or not still:
            return super().unchanged_if_full(function, *args, still=still)
        self.blocks.settle_quietly()
        before = snapshot(self.blocks)["device"]
        lease = super().unchanged_if_full(function, *args, still=False)
        if lease is None and not self.failures:
            assert snapshot(self.blocks)["device"] == before
        return lease

    @rule(hashes=HASHES)
    def match(self, hashes):
        super().match(hashes)
        known = set.union(*self.blocks.blocks(), self.store.blocks)
        expected = len(list(itertools.takewhile(known.__contains__, hashes)))
        if not self.failures:
            assert self.call(self.blocks.cache.match, hashes).shared == expected

    @rule(hashes=HASHES, keep=st.booleans(), still=st.booleans())
    def acquire(self, hashes, keep, still=True):
        """Too few pages for blocks from the store do not raise CacheFull."""
        before = self.in_reach(hashes)
        try:
            lease = self.call(self.blocks.cache.acquire, hashes)
        except kv.CacheFull:
            return
        assert lease.num_blocks <= before
        known = hashes[: lease.num_blocks]
        if keep:
            self.leases.append((self.blocks, lease, known))
        else:
            self.verify(lease, known)
            self.call(lease.release)

    @rule(hashes=HASHES, wait=st.sampled_from(["best_effort", "timeout"]))
    def acquire_in_time(self, hashes, wait):
        """Acquire while the store does not answer."""
        gate = Held(self.blocks.store, "match")
        try:
            lease = in_time(lambda: self.blocks.cache.acquire(hashes, wait=wait, deadline_s=0.001))
        except kv.CacheFull:
            return
        finally:
            gate.open()
            self.come_to_rest()
        self.verify(lease, hashes[: lease.num_blocks])
        self.call(lease.release)

    @rule(hashes=HASHES)
    def prefetch(self, hashes):
        self.call(self.blocks.cache.prefetch, hashes)

    @rule(hashes=CHAINS)
    def publish(self, hashes):
        """Another process puts blocks into the store."""
        self.store.blocks.update((hash, self.blocks.stored(hash)) for hash in hashes)
        self.inserted |= set(hashes)

    @precondition(lambda self: not self.calm)
    @rule(calls=st.sets(st.sampled_from(["match", "get", "put"])))
    def failing_store(self, calls):
        """Calls raise, until this rule runs again."""
        self.failures = True
        self.store.fail.clear()
        self.store.fail.update({name: ConnectionError("lost") for name in calls})

    @precondition(lambda self: not self.calm)
    @rule(hashes=CHAINS)
    def losing_store(self, hashes):
        """The store fails to deliver some blocks."""
        self.failures = True
        self.store.lacking.clear()
        self.store.lacking.update(hashes)

    @precondition(lambda self: not self.calm)
    @rule()
    def evicting_store(self):
        """The store evicts blocks."""
        self.failures = True
        for hash in list(self.store.blocks)[:3]:
            del self.store.blocks[hash]


def test_any_sequence_of_calls_with_a_shared_store(device):
    run(SharingMachine, device, 100)
