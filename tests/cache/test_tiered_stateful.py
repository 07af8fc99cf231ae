"""kv.TieredCache under random calls and failures: no block is lost, mixed up or leaked."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

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
from tiered_cases import Blocks, Held, MemoryStore, StoreBlocks, in_time, snapshot

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
    """15 blocks, a device pool of 5 pages, and 1 to 14 host pages."""

    device = None

    @initialize(
        on_host=st.integers(1, 14), layout=LAYOUTS,
        write=st.sampled_from(["through", "back"]), calm=st.booleans(),
        placement=st.sampled_from(["pinned", "pageable"]), alone=st.booleans(),
    )  # fmt: skip
    def start(self, on_host, write, calm, alone, layout, placement):
        self.calm = calm  # no failures are injected
        self.alone = alone  # the cache is the only user of the host pool
        self.options = {"write": write}
        host = {"layout": layout, "placement": placement}
        self.blocks = self.make(NUM_DEVICE, on_host, host=host)
        self.leases = []  # (blocks, lease, hashes that it should hold)
        self.holds = []  # (HeldBlocks, their hashes)
        self.inserted = set()  # since the cache was made or cleared
        self.failures = False  # since then
        self.mine, self.mine_on_host = [], []  # pages that the test has allocated
        self.come_to_rest()

    def come_to_rest(self):
        """Wait for background work."""

    def in_reach(self, hashes):
        """Count the leading blocks that can be acquired."""
        return self.blocks.cache.match(hashes).stores

    def known_elsewhere(self):
        """Return the blocks that are in no tier, but can be acquired."""
        return set()

    def room(self):
        """Return how many blocks surely fit below the device."""
        return self.blocks.host_pool.num_pages

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
        device, host = self.blocks.blocks()
        expected = [
            len(list(itertools.takewhile(known.__contains__, hashes)))
            for known in (device, device | host, device | host | self.known_elsewhere())
        ]
        self.blocks.settle_quietly()
        if not self.failures:
            before = snapshot(self.blocks)
            assert list(self.call(self.blocks.cache.match, hashes)) == expected
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
        below = stats["host_hits"]
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
        unpinned = [device.hashes[page] for page in device.order if page not in device.pins]
        before = self.blocks.blocks()[0]
        evicted = self.unchanged_if_full(
            lambda: self.blocks.cache.evict(count) is None, still=still
        )  # fmt: skip
        if evicted and not self.failures:
            assert before - self.blocks.blocks()[0] == set(unpinned[:count])

    @rule(hashes=HASHES)
    def save(self, hashes):
        """Save blocks of an engine, which keeps its pages; there may be no room for some."""
        allocator = self.blocks.device_pool.allocator
        hashes = hashes[: allocator.num_free]
        pages = allocator.alloc(len(hashes))
        for page, hash in zip(pages.tolist(), hashes, strict=True):
            self.blocks.fill(page, hash)
        self.call(lambda: self.blocks.cache.save(hashes, pages).synchronize())
        allocator.free(pages)
        self.inserted |= set(hashes) & self.blocks.blocks()[1]

    @rule(hashes=HASHES, keep=st.booleans())
    def hold(self, hashes, keep):
        """Hold blocks in host memory for an engine."""
        held = self.call(self.blocks.cache.hold, hashes)
        assert held.num_blocks <= len(hashes)
        self.holds.append((held, hashes[: held.num_blocks]))
        if not keep:
            self.end_hold(-1)

    @precondition(lambda self: self.holds)
    @rule(pick=st.integers(0, 99))
    def end_hold(self, pick):
        """Load held blocks into pages of the engine, and release them."""
        held, hashes = self.holds.pop(pick % len(self.holds))
        allocator = self.blocks.device_pool.allocator
        pages = allocator.alloc(min(len(hashes), allocator.num_free))
        lease = SimpleNamespace(num_blocks=len(pages), pages=pages)
        lease.wait = held.load(pages).wait
        self.verify(lease, hashes[: len(pages)])
        held.release()
        allocator.free(pages)

    def end_holds(self):
        for held, _ in self.holds:
            held.release()
        self.holds = []

    @rule(hashes=HASHES, priority=st.integers(-1, 1), ttl_s=st.sampled_from([None, 0, 1000]))
    def retain(self, hashes, priority, ttl_s):
        self.call(lambda: self.blocks.cache.retain(hashes, priority=priority, ttl_s=ttl_s))

    @rule(hashes=HASHES)
    def end_retention(self, hashes):
        self.call(self.blocks.cache.release, hashes)

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
        self.end_holds()
        self.blocks.settle_quietly()  # so that a failure does not affect later calls
        before = snapshot(self.blocks)
        try:
            self.call(self.blocks.cache.clear)
        except kv.KvcupyError:
            assert self.leases and snapshot(self.blocks) == before
            return
        assert self.blocks.blocks() == (set(), set())
        self.inserted, self.failures = self.known_elsewhere(), False

    def reopen(self):
        """Close the cache, with or without leases, and make another over its pools."""
        blocks = self.blocks
        self.end_holds()
        self.call(blocks.cache.close)
        pools = blocks.device_pool, blocks.host_pool
        self.blocks = self.make(pools=pools)
        assert self.blocks.blocks() == (set(), set())
        self.inserted = self.known_elsewhere()

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
            ordered = [tier.hashes[page] for page in tier.order]
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
                held = {page for each, _ in self.holds for page in each.pages.tolist()}
                assert owned - set(pages) <= held, "pages of failed saves that are held"
                assert out == owned | set(self.mine_on_host)
        host = tiers.host
        states = set(host.unwritten) | host.stored | set(host.refused) | host.fetched
        assert states <= set(host.pages.values())
        assert tiers.device.stored <= set(tiers.device.pages.values())

    @invariant()
    def leased(self):
        """Leased blocks stay; pages of failed loads belong to their leases."""
        pins = {id(blocks): Counter() for blocks in (self.blocks, *(b for b, _, _ in self.leases))}
        for blocks, lease, hashes in self.leases:
            device = blocks.tiers.device
            assert blocks.cache.closed or [device.hashes[p] for p in lease._pinned] == hashes
            pages = lease.pages.tolist()
            pins[id(blocks)].update(pages)
            assert device.owned[pages].all()
            known = [device.pages.get(h) == p for h, p in zip(hashes, pages, strict=True)]
            assert all(known) or blocks.cache.closed or self.failures
        for blocks in (self.blocks, *(b for b, _, _ in self.leases)):
            assert blocks.tiers.device.pins == pins[id(blocks)]
        mine = sum(len(h) for b, _, h in self.leases if b is self.blocks)
        assert self.blocks.tiers.num_leased == mine

    @invariant()
    def in_order_of_priority(self):
        tiers, priorities = self.blocks.tiers, self.blocks.tiers._retentions.priorities
        assert all(hash in tiers for hash in priorities)
        for tier in (tiers.device, tiers.host):
            order = [priorities.get(tier.hashes[page], -0.5) for page in tier.order]
            assert order == sorted(order)

    @invariant()
    def nothing_lost(self):
        """Blocks are lost only by failures and for lack of space."""
        known = set.union(*self.blocks.blocks()) | self.known_elsewhere()
        gone = self.inserted - known
        if not self.failures:
            found = self.blocks.cache.stats()
            assert len(gone) <= found["lost"]
            if self.alone and len(self.inserted) <= self.room():
                assert not gone, gone
        assert known <= self.inserted

    def teardown(self):
        if not hasattr(self, "blocks"):
            return
        self.end_holds()
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


class StoresMachine(Machine):
    """The same over one to three stores that fail, and to which other processes add blocks."""

    @initialize(
        on_host=st.integers(1, 14), write=st.sampled_from(["through", "back"]), calm=st.booleans(),
        alone=st.booleans(), layout=LAYOUTS,
        capacities=st.lists(st.sampled_from([3, 100]), min_size=1, max_size=3),
    )  # fmt: skip
    def start(self, on_host, write, calm, alone, layout, capacities):
        self.stores = [MemoryStore(capacity=capacity) for capacity in capacities]
        super().start(on_host, write, calm, alone, layout, "pinned")

    def make(self, *sizes, **pools):
        made = StoreBlocks(self.device, *sizes, **pools, **self.options, stores=self.stores)
        for store, own in zip(made.stores, self.stores, strict=True):
            store.lacking, store.fail = own.lacking, own.fail
        return made

    def come_to_rest(self):
        if not self.blocks.cache.closed:
            self.blocks.idle()

    def known_elsewhere(self):
        return set().union(*(store.blocks for store in self.stores))

    def room(self):
        """Every store gets all blocks, so that one with room suffices."""
        return max(store.capacity for store in self.stores)

    def clear(self):
        super().clear()
        if not self.failures:  # it was cleared: no failures from here on
            for store in self.stores:
                store.fail.clear()
                store.lacking.clear()
            for state in self.blocks.tier.states:
                state.note(None)

    def reopen(self):
        self.end_holds()
        self.blocks.settle_quietly()
        here, elsewhere = set.union(*self.blocks.blocks()), self.known_elsewhere()
        unwritten = self.call(self.blocks.cache.flush)
        has_room = min(store.capacity for store in self.stores) == 100
        if not self.failures and has_room and not len(self.mine_on_host):  # a page to pass through
            assert unwritten == 0
            assert set(self.stores[0].blocks) >= here
            assert self.known_elsewhere() >= here | elsewhere
        super().reopen()

    def unchanged_if_full(self, function, *args, still=True):
        """Blocks may have been fetched to host memory, or moved down to the stores."""
        return super().unchanged_if_full(function, *args, still=False)

    @rule(hashes=HASHES, keep=st.booleans(), still=st.booleans())
    def acquire(self, hashes, keep, still=True):
        """Too few pages for blocks from stores do not raise CacheFull."""
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

    @rule(hashes=HASHES)
    def acquire_in_time(self, hashes):
        """Acquire while a store does not answer."""
        gate = Held(self.blocks.store, "match")
        try:
            lease = in_time(lambda: self.blocks.cache.acquire(hashes, deadline_s=0.001))
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

    @rule(hashes=CHAINS, number=st.integers(0, 2))
    def publish(self, hashes, number):
        """Another process puts blocks into a store."""
        store = self.stores[number % len(self.stores)]
        store.blocks.update((hash, self.blocks.stored(hash)) for hash in hashes)
        self.inserted |= set(hashes)

    @precondition(lambda self: not self.calm)
    @rule(calls=st.sets(st.sampled_from(["match", "get", "put"])), number=st.integers(0, 2))
    def failing_store(self, calls, number):
        """Calls raise, until this rule runs again."""
        self.failures = True
        store = self.stores[number % len(self.stores)]
        store.fail.clear()
        store.fail.update({name: ConnectionError("lost") for name in calls})

    @precondition(lambda self: not self.calm)
    @rule(hashes=CHAINS, number=st.integers(0, 2))
    def losing_store(self, hashes, number):
        """A store fails to deliver some blocks."""
        self.failures = True
        store = self.stores[number % len(self.stores)]
        store.lacking.clear()
        store.lacking.update(hashes)

    @precondition(lambda self: not self.calm)
    @rule(number=st.integers(0, 2))
    def evicting_store(self, number):
        """A store evicts blocks."""
        self.failures = True
        blocks = self.stores[number % len(self.stores)].blocks
        for hash in list(blocks)[:3]:
            del blocks[hash]


def test_any_sequence_of_calls_with_stores(device):
    run(StoresMachine, device, 100)
