"""The eviction order of a tier: priorities, and the least recently used blocks first."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from itertools import islice

import pytest

from kvcupy.cache.tiered.order import EvictionOrder, Lru, Retentions


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("a b c", "abc"),
        ("a b c a", "bca"),
        ("a b c a b -c", "ab"),
        ("a b -a a", "ba"),
        ("a -b", "a"),
    ],
)
def test_order(calls, expected):
    """Calls like "a" (touch) and "-a" (remove)."""
    order = EvictionOrder()
    for call in calls.split():
        (order.remove if call[0] == "-" else order.touch)(call[-1])
    assert "".join(order) == expected


def test_order_is_exact_with_priorities():
    """Against a list, sorted by priority and by the last touch; and asking changes nothing."""
    rng = random.Random(5)
    priorities = {}
    order, touched, filed = EvictionOrder(priorities), {}, {}
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
    assert sorted(order._groups) == order._sorted


def test_retentions_end_together():
    retentions = Retentions()
    retentions.put([1, 2, 3], 0, 10)
    retentions.put([3, 4], 5, 20)
    retentions.put([5], -1, float("inf"))
    retentions.drop(2)
    assert retentions.expire(9.9) == []
    assert retentions.expire(10) == [1]
    assert retentions.priorities == {3: 5, 4: 5, 5: -1}
    assert retentions.expire(1e9) == [3, 4]
    assert retentions.priorities == {5: -1} and not retentions._with


def test_replaced_retentions_leave_no_entries():
    retentions = Retentions()
    for _ in range(5000):
        retentions.put([1], 0, 1000)
    assert len(retentions._expirations) < 1100
    assert retentions.expire(1000) == [1]


@pytest.mark.parametrize("priority", [None, 0])
def test_a_victim_costs_the_same_among_many(priority):
    """A hundred times the blocks is not a hundred times the CPU time for each."""

    def time_of(count):
        keys = range(count + 1000)
        order = EvictionOrder({} if priority is None else dict.fromkeys(keys, priority))
        order.touch(keys[:count])
        order.touch(keys[:count:3])
        started = time.thread_time()
        for key in range(1000):
            order.remove([next(iter(order))])
            order.touch([count + key])
            order.touch([count + key])
        return time.thread_time() - started

    assert min(time_of(200_000) for _ in range(3)) < 20 * min(time_of(2000) for _ in range(3))


def test_lru_is_exact_after_many_uses():
    """Most entries of its pieces are stale by then, and pieces were merged."""
    rng = random.Random(7)
    order, expected, recent = Lru(), OrderedDict(), []
    for step in range(60_000):
        chance = rng.random()
        if len(expected) < 3000 or chance < 0.02:
            order.touch([step])
            expected[step] = None
        elif chance < 0.03:
            victim = next(iter(order))
            assert victim == expected.popitem(last=False)[0]
            order.remove([victim])
        else:
            if step % 100 == 0 or not recent:
                recent = list(islice(reversed(expected), 1000))
            key = rng.choice(recent)
            if key in expected:
                order.touch([key])
                expected.move_to_end(key)
        if step % 5000 == 0:
            assert list(order) == list(expected)
    order.touch(reversed(expected))
    assert list(order) == list(reversed(expected))


def test_lru_keeps_few_stale_entries():
    """It merges pieces, and an entry that is stale in one of them stays so."""
    rng = random.Random(9)
    order, expected = Lru(), OrderedDict()
    for key in range(20_000):
        order.touch([key])
        expected[key] = None
    for use in range(300_000):  # of keys that leave few behind in each piece, which stay for long
        key = rng.randrange(10_000 if use % 50 else 20_000)
        order.touch([key])
        expected.move_to_end(key)
        if use % 20_000 == 0:
            assert list(order) == list(expected)
    assert sum(map(len, order._pieces.values())) < 3 * 20_000
    assert list(order) == list(expected)


def test_no_call_of_lru_rebuilds_a_table_of_all_keys():
    """CPU times of calls by a thousand, with random keys as hashes are."""
    rng = random.Random(8)
    keys = [rng.getrandbits(128) for _ in range(400_000)]
    order, times = EvictionOrder(), []
    for first in range(0, len(keys), 1000):
        started = time.thread_time()
        order.touch(keys[first : first + 1000])
        times.append(time.thread_time() - started)
    assert sorted(times)[-2] < 20 * sorted(times)[len(times) // 2]
