"""kv.TieredCache: what is evicted when pages are needed, and that CacheFull changes nothing."""

from __future__ import annotations

import pytest
from stream_cases import Gate
from tiered_cases import Blocks, in_time, snapshot

import kvcupy as kv
from kvcupy.cache.tiered.tiers import PageTier

A, B, C, D, E, F, G, H = range(10, 18)


def insert_each(blocks, hashes):
    for hash in hashes:
        blocks.insert([hash])


# Order -------------------------------------------------------------------------------------------


def test_leaves_go_before_what_they_hang_on(device):
    blocks = Blocks(device)
    blocks.insert([A, B, C, D])
    for left in ({A, B, C}, {A, B}, {A}, set()):
        blocks.cache.evict(1)
        assert blocks.blocks()[0] == left


def test_a_suffix_that_was_inserted_under_a_lease_goes_before_its_prefix(device):
    """In both tiers: alone it would be of no use."""
    blocks = Blocks(device, 4, 4)
    blocks.insert([A, B])
    with blocks.cache.acquire([A, B]):
        blocks.insert([C, D])
    assert blocks.order("device") == blocks.order("host") == [D, C, B, A]


def test_host_pages_that_are_taken_are_the_callers(device):
    """The cache counts them as its own no more, not even once they are freed."""
    blocks = Blocks(device, 4, 4)
    blocks.insert([A, B, C])
    blocks.settle()
    pages = blocks.cache.take_host_pages(3)  # one is free, two blocks go
    host = blocks.tiers.host
    assert len(host.copies) == 1 and not host.owned[pages].any()
    assert host.owned.sum() == 1
    host.pool.allocator.free(pages)
    blocks.assert_no_leak()


@pytest.mark.parametrize(
    ("policy", "left"), [("lru", {A, D}), ("fifo", {C, D}), ("lfu", {A, D}), ("2q", {C, D})]
)
def test_policies(device, policy, left):
    blocks = Blocks(device, policy=policy)
    insert_each(blocks, [A, B, C, D])
    blocks.use([A])
    blocks.use([A])
    blocks.use([D])
    blocks.cache.evict(2)
    assert blocks.blocks()[0] == left


def test_a_policy_of_the_users_own(device):
    class Largest:
        def __init__(self):
            self.keys = set()

        def add(self, key):
            self.keys.add(key)

        def touch(self, key):
            assert key in self.keys

        def remove(self, key):
            self.keys.remove(key)

        def victims(self):
            return iter(sorted(self.keys, reverse=True))

    blocks = Blocks(device, 4, 4, policy=Largest)
    blocks.insert([C, A, D, B])
    blocks.cache.evict(2)
    assert blocks.blocks()[0] == {A, B}
    blocks.insert([E])
    assert blocks.blocks()[1] == {A, B, C, E}
    blocks.use([A, B, C], known=3)
    assert blocks.blocks()[0] == {A, B, C, E}
    blocks.assert_no_leak()


def test_acquire_evicts_for_itself(device):
    blocks = Blocks(device, 4, 8)
    blocks.insert([A, B, C, D])
    blocks.evict_all()
    blocks.insert([E, F, G])
    blocks.use([A, B, C], known=3)
    assert blocks.blocks()[0] == {A, B, C, E}
    blocks.use([E, F, G], known=3)
    assert blocks.cache.stats()["lost"] == 0


def test_what_is_asked_for_is_not_evicted_for_the_rest(device):
    """A and B are next to go, but belong to the lease that needs a page."""
    blocks = Blocks(device, 3, 8)
    blocks.insert([C])
    blocks.cache.evict(1)
    blocks.insert([B])
    blocks.insert([A])
    blocks.insert([D])
    assert blocks.order("device") == [B, A, D]
    blocks.use([A, B, C], known=3)
    assert blocks.blocks()[0] == {A, B, C}


def test_host_copies_that_are_being_loaded_are_not_evicted_for_saves(device):
    """One exchange: the host copies that are loaded are not evicted for those that are saved."""
    blocks = Blocks(device, 2, 3, write="back")
    blocks.insert([A, B])
    blocks.evict_all()
    blocks.insert([C, D])
    lease = blocks.cache.acquire([A, B])
    assert blocks.blocks() == ({A, B}, {A, B, C}, set())
    assert blocks.cache.stats()["lost"] == 1
    lease.wait()
    blocks.assert_holds(lease, [A, B])
    lease.release()
    blocks.use([C], known=1)


# Nothing is lost while there is space ------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "2q"])
@pytest.mark.parametrize("write", ["through", "back"])
def test_nothing_is_lost_while_the_host_has_space(device, write, policy):
    blocks = Blocks(device, 4, 12, write=write, policy=policy)
    hashes = list(range(100, 112))
    for i in range(0, 12, 2):
        short = 2 - blocks.device_pool.allocator.num_free
        if short > 0:
            blocks.cache.evict(short)
        blocks.insert(hashes[i : i + 2])
    for _ in range(2):
        for i in range(0, 12, 3):
            blocks.use(hashes[i : i + 3], known=3)
    assert blocks.cache.stats()["lost"] == 0
    blocks.assert_no_leak()


def test_the_coldest_is_lost_when_there_is_no_space(device):
    blocks = Blocks(device, 2, 2, write="back")
    for hash in (A, B, C, D, E):
        if not blocks.device_pool.allocator.num_free:
            blocks.cache.evict(1)
        blocks.insert([hash])
    assert blocks.blocks() == ({D, E}, {B, C}, set())
    found = blocks.cache.stats()
    assert (found["lost"], found["device_evicted"], found["host_evicted"]) == (1, 3, 1)


def test_more_leave_the_device_than_the_host_can_take(device):
    blocks = Blocks(device, 4, 2, write="back")
    blocks.insert([A, B, C, D])
    blocks.cache.evict(4)
    assert blocks.blocks()[1] == {A, B}, "the last to go are kept"
    assert blocks.cache.stats()["lost"] == 2
    blocks.use([A, B], known=2)
    blocks.assert_no_leak()


def test_a_host_pool_that_others_use_too(device):
    blocks = Blocks(device, 4, 4)
    taken = blocks.host_pool.allocator.alloc(3)
    blocks.insert([A, B])
    assert blocks.blocks()[1] == {A}
    blocks.cache.evict(2)
    assert blocks.cache.match([A, B]) == (0, 1, 1, 1)
    blocks.host_pool.allocator.free(taken)
    blocks.assert_no_leak()


def test_pages_of_the_host_that_are_late_are_waited_for(device):
    """Rather than lose a block for which a page is free in a moment."""
    blocks = Blocks(device, 4, 2, write="back")
    blocks.insert([A, B])
    blocks.cache.evict(2)
    gate = Gate(blocks.engine.load_stream)
    blocks.cache.acquire([A, B]).release()
    with blocks.cache._shared.opened() as tiers:  # as if they had been lost to a failure
        copies = list(tiers.host.copies.values())
        tiers.host.forget(copies)
        tiers.host.give_back([copy.page for copy in copies])
    gate.open()
    in_time(lambda: blocks.cache.evict(2))
    assert blocks.cache.match([A, B]) == (0, 2, 2, 2)
    blocks.use([A, B], known=2)


# CacheFull ---------------------------------------------------------------------------------------


def full_of_leases(blocks):
    blocks.insert([A, B, C, D])
    blocks.evict_all()
    blocks.insert([E, F])
    return blocks.cache.acquire([E, F])


def test_acquire_without_pages_changes_nothing(device):
    blocks = Blocks(device, 4, 8)
    lease = full_of_leases(blocks)
    blocks.insert([G])
    blocks.settle()
    before = snapshot(blocks)
    with pytest.raises(kv.CacheFull, match=r"^hashes: expected at most 2 blocks to load.* got 3"):
        blocks.cache.acquire([A, B, C])
    assert snapshot(blocks) == before
    blocks.use([A, B], known=2)
    lease.release()
    blocks.use([A, B, C, D], known=4)


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "2q"])
def test_evicting_too_many_changes_nothing(device, policy):
    blocks = Blocks(device, 4, 8, policy=policy)
    lease = full_of_leases(blocks)
    blocks.insert([G])
    blocks.settle()
    before = snapshot(blocks)
    with pytest.raises(kv.CacheFull, match=r"^num_blocks: expected at most 1,.* got 2"):
        blocks.cache.evict(2)
    assert snapshot(blocks) == before
    lease.release()
    blocks.cache.evict(3)


def test_more_blocks_than_the_device_has_pages(device):
    blocks = Blocks(device, 2, 8)
    for hashes in ([A, B], [C, D]):
        blocks.insert(hashes)
        blocks.evict_all()
        blocks.settle()
    before = snapshot(blocks)
    with pytest.raises(kv.CacheFull):
        blocks.cache.acquire([A, B, C])
    assert snapshot(blocks) == before


def test_pages_of_others_are_not_the_caches(device):
    blocks = Blocks(device, 4, 8)
    blocks.insert([A, B])
    blocks.evict_all()
    blocks.settle()
    taken = blocks.device_pool.allocator.alloc(3)
    before = snapshot(blocks)
    with pytest.raises(kv.CacheFull, match="at most 1"):
        blocks.cache.acquire([A, B])
    assert snapshot(blocks) == before
    blocks.device_pool.allocator.free(taken)
    blocks.use([A, B], known=2)


# Transfers in flight -----------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_page_that_becomes_free_in_the_middle_of_a_call(device, monkeypatch, tier):
    """A transfer ends between two looks at the allocator: the call looks again."""
    blocks = Blocks(device, 2, 2, write="back")
    blocks.insert([A])
    if tier == "device":
        blocks.cache.evict(1)
    blocks.settle()
    genuine, looks = PageTier.num_free.fget, []

    def num_free(self):
        if self.name == tier and not looks:
            looks.append(0)
            return 0
        return genuine(self)

    monkeypatch.setattr(PageTier, "num_free", property(num_free))
    if tier == "device":
        blocks.use([A], known=1)
    else:
        blocks.cache.evict(1)
        assert blocks.cache.match([A]) == (0, 1, 1, 1)
    assert looks


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_chain_of_exchanges_without_waiting(device, write):
    """Pages of both pools change hands again and again while all transfers are held up."""
    blocks = Blocks(device, 2, 6, write=write)
    for hashes in ([A, B], [C, D], [E, F]):
        if blocks.tiers.device.copies:
            blocks.cache.evict(2)
        blocks.insert(hashes)
    blocks.settle()
    gates = [Gate(blocks.engine.load_stream), Gate(blocks.engine.save_stream)]
    for hashes in ([A, B], [C, D], [E, F], [C, D], [A, B]):
        in_time(blocks.cache.acquire(hashes).release)
    lease = blocks.cache.acquire([A, B])
    for gate in gates:
        gate.open()
    lease.wait()
    blocks.assert_holds(lease, [A, B])
    lease.release()
    for hashes in ([E, F], [C, D]):
        blocks.use(hashes, known=2)
    blocks.assert_no_leak()


def test_a_host_page_that_is_being_read_is_not_overwritten(device):
    """B takes the host page of A, while A is still on its way up from there."""
    blocks = Blocks(device, 4, 1)
    blocks.insert([A])
    blocks.evict_all()
    blocks.settle()
    gate = Gate(blocks.engine.load_stream)
    lease = blocks.cache.acquire([A])
    pages = blocks.device_pool.allocator.alloc(1)
    blocks.fill(int(pages[0]), B)
    blocks.cache.insert([B], pages)
    if blocks.blocks()[1] == {A}:  # the copy is made when B leaves
        blocks.cache.evict(1)
    gate.open()
    lease.wait()
    blocks.assert_holds(lease, [A])
    lease.release()
    blocks.settle()
    assert blocks.blocks()[1] == {B}
    blocks.use([B], known=1)
