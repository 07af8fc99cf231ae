"""kv.TieredCache: what is evicted when pages are needed, and that CacheFull changes nothing."""

from __future__ import annotations

import pytest
from stream_cases import Gate
from tiered_cases import Blocks, in_time, snapshot
from tiered_store_cases import StoreBlocks, names

import kvcupy as kv
from kvcupy.cache.tiered.page_tier import PageTier

A, B, C, D, E, F, G, H = range(10, 18)


def insert_each(blocks, hashes):
    for hash in hashes:
        blocks.insert([hash])


# Order -------------------------------------------------------------------------------------------


def test_a_suffix_that_was_inserted_under_a_lease_goes_before_its_prefix(device):
    """In both tiers: alone it would be of no use."""
    blocks = Blocks(device, 4, 4)
    blocks.insert([A, B])
    with blocks.cache.acquire([A, B]):
        blocks.insert([C, D])
    assert blocks.order("device") == blocks.order("host") == [D, C, B, A]


def test_the_least_recently_used_go_first(device):
    blocks = Blocks(device)
    insert_each(blocks, [A, B, C, D])
    blocks.use([A])
    blocks.use([D])
    blocks.cache.evict(2)
    assert blocks.blocks()[0] == {A, D}


def test_without_a_number_all_that_may_go_are_evicted(device):
    """Also more than fit into host memory at once."""
    blocks = StoreBlocks(device, 6, 2, write="back")
    blocks.cache.evict()
    A, B, C, D, E = names(*range(5))
    insert_each(blocks, [A, B, C, D, E])
    with blocks.cache.acquire([B]):
        blocks.cache.evict()
        assert blocks.blocks()[0] == {B}
        blocks.cache.evict()
    blocks.cache.evict()
    assert blocks.blocks()[0] == set()
    assert blocks.blocks()[1] | set(blocks.store.blocks) == {A, B, C, D, E}
    assert blocks.cache.stats()["lost"] == 0
    blocks.settle()
    assert blocks.device_pool.allocator.num_free == 6


def test_the_end_of_a_block_of_code_closes_the_cache(device):
    blocks = Blocks(device, 4, 4)
    with pytest.raises(ZeroDivisionError), blocks.cache as cache:
        assert cache is blocks.cache
        blocks.insert([A])
        1 / 0  # noqa: B018
    assert cache.closed
    blocks.device_pool.allocator.check_leaks()
    blocks.host_pool.allocator.check_leaks()


# Nothing is lost while there is space ------------------------------------------------------------


def test_more_leave_the_device_than_the_host_can_take(device):
    blocks = Blocks(device, 4, 2, write="back")
    blocks.insert([A, B, C, D])
    blocks.cache.evict(4)
    assert blocks.blocks()[1] == {A, B}, "the last to go are kept"
    assert blocks.cache.stats()["lost"] == 2
    blocks.use([A, B], known=2)
    blocks.assert_no_leak()


def test_pages_of_the_host_that_are_late_are_waited_for(device):
    """Rather than lose a block for which a page is free in a moment."""
    blocks = Blocks(device, 4, 2, write="back")
    blocks.insert([A, B])
    blocks.cache.evict(2)
    gate = Gate(blocks.engine.load_stream)
    blocks.cache.acquire([A, B]).release()
    with blocks.cache._tiers[0].lock:  # as if they had been lost to a failure
        tiers = blocks.tiers
        tiers.require_open()
        pages = list(tiers.host.pages.values())
        tiers.host.forget(pages)
        tiers.host.give_back(pages)
    gate.open()
    in_time(lambda: blocks.cache.evict(2))
    assert blocks.cache.match([A, B]) == (0, 2, 2)
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


def test_evicting_too_many_changes_nothing(device):
    blocks = Blocks(device, 4, 8)
    lease = full_of_leases(blocks)
    blocks.insert([G])
    blocks.settle()
    before = snapshot(blocks)
    with pytest.raises(kv.CacheFull, match=r"^num_blocks: expected at most 1,.* got 2"):
        blocks.cache.evict(2)
    assert snapshot(blocks) == before
    lease.release()
    blocks.cache.evict(3)


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
        assert blocks.cache.match([A]) == (0, 1, 1)
    assert looks


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_chain_of_exchanges_without_waiting(device, write):
    """Pages of both pools change hands again and again while all transfers are held up."""
    blocks = Blocks(device, 2, 6, write=write)
    for hashes in ([A, B], [C, D], [E, F]):
        if blocks.tiers.device.pages:
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
