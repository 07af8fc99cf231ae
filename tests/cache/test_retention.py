"""Which blocks go first: the eviction order, and retain, release and prefetch of kv.TieredCache."""

from __future__ import annotations

import random
import time
from itertools import islice

import pytest
from tiered_cases import Blocks, StoreBlocks, names

from kvcupy.cache.tiered import cache, tiers
from kvcupy.cache.tiered.order import EvictionOrder

A, B, C, D, E, F = names(*range(1, 7))


# --- The order ---


def test_order_is_exact_with_priorities():
    """Against a list, sorted by priority and by the last touch; and asking changes nothing."""
    rng = random.Random(5)
    priorities = {}
    order, touched, filed = EvictionOrder(range(40), priorities), {}, {}
    for step in range(5000):
        chance, key = rng.random(), rng.randrange(40)
        if chance < 0.6:
            keys = [key, rng.randrange(40)]
            order.touch(keys)
            for each in keys:
                touched.pop(each, None)
                touched[each] = step
                filed[each] = priorities.get(each, -0.5)
        elif chance < 0.8:
            order.remove([key])
            touched.pop(key, None)
        elif chance < 0.9:
            priorities[key] = rng.randrange(-2, 3)  # counts from the next touch on
        else:
            priorities.pop(key, None)
        expected = sorted(touched, key=lambda key: filed[key])
        assert list(islice(order, 3)) == expected[:3]
        assert list(order) == expected
    assert len(order._lists) <= 6


def test_no_call_stalls():
    """CPU times of calls by a thousand: no table of all pages is ever rebuilt."""
    pages = random.Random(8).sample(range(400_000), 400_000)
    order, times = EvictionOrder(range(400_000), {}), []
    for first in range(0, len(pages), 1000):
        started = time.thread_time()
        order.touch(pages[first : first + 1000])
        times.append(time.thread_time() - started)
    assert sorted(times)[-2] < 20 * sorted(times)[len(times) // 2]


# --- Retention ---


@pytest.fixture
def blocks(device):
    return Blocks(device, 6, 8)


class Clock:
    """The module `time`, whose time a test sets."""

    now = 1000.0
    perf_counter = staticmethod(time.perf_counter)

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (cache, tiers):
        monkeypatch.setattr(module, "time", clock)
    return clock


def insert_each(blocks, *hashes):
    for hash in hashes:
        blocks.insert([hash])


def retained(blocks):
    return set(blocks.tiers._retentions.priorities)


def test_priorities(blocks):
    insert_each(blocks, A, B, C, D, E, F)
    for hash, priority in [(A, 2), (B, 1), (C, 0), (E, -1)]:
        blocks.cache.retain([hash], priority=priority)
    assert blocks.order("device") == [E, D, F, C, B, A]
    blocks.cache.retain([A], priority=-2)  # the later call counts
    assert blocks.order("device") == blocks.order("host") == [A, E, D, F, C, B]
    blocks.use([E], known=1)
    assert blocks.order("device") == [A, E, D, F, C, B]


def test_the_least_recently_used_of_a_priority_goes_first(blocks):
    insert_each(blocks, A, B, C)
    blocks.cache.retain([A, B, C], priority=3)
    blocks.use([C], known=1)
    assert blocks.order("device") == blocks.order("host") == [B, A, C]


def test_retention_ends_after_its_time(blocks, clock):
    insert_each(blocks, A, B, C)
    blocks.cache.retain([A, B], ttl_s=10)
    assert blocks.order("device") == [C, B, A]
    clock.now += 9.9
    blocks.cache.stats()
    assert blocks.order("device") == [C, B, A]
    blocks.cache.retain([A], ttl_s=10)
    clock.now += 0.2
    blocks.cache.stats()
    assert blocks.order("device") == [C, B, A] and retained(blocks) == {A}
    clock.now += 10
    blocks.cache.stats()
    assert not retained(blocks)


def test_a_later_call_without_a_time_lasts(blocks, clock):
    insert_each(blocks, A, B)
    blocks.cache.retain([A], ttl_s=1)
    blocks.cache.retain([A])
    clock.now += 1e9
    blocks.cache.stats()
    assert blocks.order("device") == [B, A] and retained(blocks) == {A}


def test_release(blocks):
    insert_each(blocks, A, B, C)
    blocks.cache.retain([A, B])
    assert blocks.cache.release([A, C, F]) is None
    assert blocks.order("device") == blocks.order("host") == [C, A, B]


def test_clear_ends_retention(blocks, clock):
    insert_each(blocks, A, B)
    blocks.cache.retain([A], ttl_s=5)
    blocks.cache.clear()
    insert_each(blocks, A, B)
    clock.now += 6
    assert blocks.order("device") == [A, B] and not retained(blocks)
    blocks.cache.stats()
    assert blocks.order("device") == [A, B]


def test_prefetch(device):
    alone = Blocks(device, 4, 4)
    alone.insert([A])
    assert alone.cache.prefetch([A, B]) is None  # nothing to fetch from
    sharing = StoreBlocks(device, 4, 2)
    sharing.publish(*range(1, 4))
    assert sharing.cache.prefetch([A, B]) is None
    sharing.idle()
    assert sharing.blocks()[1]
    before = sharing.cache.stats()["store_skipped"]
    sharing.cache.prefetch(names(*range(100, 120)))  # more than the queue has room for
    assert sharing.cache.stats()["store_skipped"] > before
