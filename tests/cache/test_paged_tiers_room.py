"""Sequences and cached blocks that need the same pages: what is evicted, and where to."""

from __future__ import annotations

import pytest
from paged_tiers_cases import PAGE, Prefixed, fresh, hashes_of, tokens_of
from stream_cases import Gate
from table_cases import background
from tiered_cases import MemoryStore

import kvcupy as kv

PROMPT = tokens_of(1, 14)
OTHER = PROMPT[:8] + tokens_of(2, 6)


def test_blocks_come_back_from_a_store(device):
    stores = {"stores": [lambda pool, model: MemoryStore(pool)]}
    one = Prefixed(device, num_pages=5, host_pages=8, tiers=stores)
    prompts = [tokens_of(seed, 13) for seed in range(4)]
    one.publish(*prompts)
    for tokens in prompts:
        assert one.known(tokens) == (12, fresh(device, tokens[:12])[1])
    assert one.tiers.stats()["store_hits"] > 0
    one.assert_no_leak()
    one.tiers.close()


@pytest.mark.parametrize("looks", range(5))
@pytest.mark.parametrize("blocks", [0, 3])
def test_pages_that_become_free_while_room_is_made(device, blocks, looks):
    """A transfer may end between any two looks, and its pages are then more than enough."""

    class Ending:
        looked = 0

        def done(self):
            self.looked += 1
            return self.looked > looks

        def synchronize(self):
            self.looked = looks

    one = Prefixed(device, num_pages=6)
    if blocks:
        one.publish(PROMPT[: blocks * PAGE])
        one.settle()
    allocator = one.cache.pool.allocator
    pages = allocator.alloc(6 - blocks)
    allocator._mark_busy(pages, Ending())
    allocator.free(pages)
    one.cache.add_sequence("s")
    one.step("s", tokens_of(6, 5 * PAGE))
    assert one.tiers.stats()["device_blocks"] <= 1
    one.assert_no_leak()


def test_full_when_everything_is_in_use(device):
    one = Prefixed(device, num_pages=6)
    one.publish(PROMPT)
    one.prefill("a", PROMPT)
    one.prefill("b", PROMPT)
    one.cache.fork_sequence("a", "c", 12)
    one.step("c", [1])
    before = one.state()
    calls = [
        lambda: one.cache.begin_forward(["a"], [3]),
        lambda: one.cache.fork_sequence("a", "d", 13),
        lambda: one.cache.set_kv("a", 0, *one.rows([1])[1:]),
    ]
    for call in calls:
        with pytest.raises(kv.CacheFull):
            call()
        assert one.state() == before
    one.step("a", [1, 2], "b", [3])
    one.assert_no_leak()


def test_pages_on_their_way_count_as_room(device):
    """Some pages are still being saved, the other blocks may go: together there are enough."""
    one = Prefixed(device, num_pages=6)
    one.publish(PROMPT)
    one.settle()
    one.cache.add_sequence("s")
    one.step("s", tokens_of(6, 3 * PAGE))
    gate = Gate(one.tiers.engine.save_stream)
    one.cache.offload("s")
    one.cache.add_sequence("t")
    failed = []

    def begin():
        try:
            one.cache.begin_forward(["t"], [5 * PAGE])
        except kv.CacheFull as error:
            failed.append(error)

    with background(begin):
        gate.open()
    assert not failed
    one.cache.end_forward()
    one.assert_no_leak()


class OverWhenAskedAgain:
    """A transfer that ends between two questions."""

    def __init__(self):
        self.asked = 0

    def done(self):
        self.asked += 1
        return self.asked > 1

    def synchronize(self):
        pass


def test_pages_that_become_free_meanwhile_are_not_evicted(device):
    """Too few were free at first, and more than enough when eviction began."""
    w = Prefixed(device)
    allocator = w.cache.pool.allocator
    pages = allocator.alloc(allocator.num_pages)
    allocator._mark_busy(pages[:3], OverWhenAskedAgain())
    allocator.free(pages[:3])
    w.prefill("a", tokens_of(1, 5))
    allocator.free(pages[3:])
    w.cache.remove_sequence("a")
    w.assert_no_leak()


def test_blocks_behind_a_shared_prefix_can_be_evicted(device):
    """Of a sequence that is gone, only the pages that others use stay leased."""
    one = Prefixed(device)
    one.publish(PROMPT, OTHER)
    for name, tokens in (("a", PROMPT), ("b", OTHER)):
        assert one.prefill(name, tokens) == 12
    one.cache.remove_sequence("a")
    one.settle()
    one.tiers.evict(1)  # the block of "a" behind the common prefix
    assert one.tiers.match(hashes_of(PROMPT)).device == 2
    with pytest.raises(kv.CacheFull):
        one.tiers.evict(1)
    one.cache.pop_tokens("b", 6)
    one.tiers.evict(1)
    one.assert_no_leak()
