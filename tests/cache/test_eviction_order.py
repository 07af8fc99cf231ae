"""The eviction order of a tier: priorities, and the least recently used blocks first."""

from __future__ import annotations

import random
import time
from itertools import islice

import pytest

from kvcupy.cache.tiered.order import EvictionOrder, Retentions


def order_of(num_pages, priorities=None):
    """Return an order of blocks whose hashes are their pages."""
    return EvictionOrder(range(num_pages), priorities or {})


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
    order = order_of(3)
    for call in calls.split():
        page = "abc".index(call[-1])
        if call[0] == "-":
            order.remove([page])
        else:
            order.touch([page])
    assert "".join("abc"[page] for page in order) == expected


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
        order = order_of(
            len(keys), {} if priority is None else dict.fromkeys(range(len(keys)), priority)
        )
        order.touch(keys[:count])
        order.touch(keys[:count:3])
        started = time.thread_time()
        for key in range(1000):
            order.remove([next(iter(order))])
            order.touch([count + key] * 2)
        return time.thread_time() - started

    assert min(time_of(200_000) for _ in range(3)) < 20 * min(time_of(2000) for _ in range(3))


def test_no_call_stalls():
    """CPU times of calls by a thousand: no table of all pages is ever rebuilt."""
    pages = random.Random(8).sample(range(400_000), 400_000)
    order, times = order_of(400_000), []
    for first in range(0, len(pages), 1000):
        started = time.thread_time()
        order.touch(pages[first : first + 1000])
        times.append(time.thread_time() - started)
    assert sorted(times)[-2] < 20 * sorted(times)[len(times) // 2]
