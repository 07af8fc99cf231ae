"""Orders of eviction: which block of a tier goes first."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from itertools import islice

import pytest

from kvcupy.cache.tiered import policies

NAMES = ("lru", "fifo", "lfu", "2q")


def order_of(name, calls):
    """The order after calls like "+a" (add), "a" (touch), "-a" (remove)."""
    order = policies.make(name)
    for call in calls.split():
        if call[0] == "+":
            order.add(call[1:])
        elif call[0] == "-":
            order.remove(call[1:])
        else:
            order.touch(call)
    return "".join(order.victims())


@pytest.mark.parametrize(
    ("name", "calls", "victims"),
    [
        ("lru", "+a +b +c", "abc"),
        ("lru", "+a +b +c a", "bca"),
        ("lru", "+a +b +c a b -c", "ab"),
        ("lru", "+a +b -a +a", "ba"),
        ("fifo", "+a +b +c a a", "abc"),
        ("fifo", "+a +b -a +a", "ba"),
        ("lfu", "+a +b +c", "abc"),
        ("lfu", "+a +b +c a a c", "bca"),
        ("lfu", "+a +b +c b a c", "bac"),
        ("lfu", "+a +b a a -a +a", "ba"),
        ("lfu", "+a +b +c a b c a b a -b", "ca"),
        # Used once, in order of arrival, but for a quarter; then used again; then the quarter.
        ("2q", "+a +b +c +d", "abcd"),
        ("2q", "+a +b +c +d a", "bcad"),
        ("2q", "+a +b +c +d a b a c d", "bacd"),
        ("2q", "+a +b +c +d +e +f +g +h a b", "cdefabgh"),
        # One that comes again soon after it has gone is one that is used again.
        ("2q", "+a +b +c +d -a +a", "bcad"),
        ("2q", "+a +b +c +d a -a +a", "bcda"),
    ],
)
def test_order(name, calls, victims):
    assert order_of(name, calls) == victims


def test_a_scan_does_not_push_out_what_is_used_again():
    """Nor does LFU, but the least recently used order does."""

    def survivors(name):
        order = policies.make(name)
        present = set()

        def use(key):
            if key in present:
                order.touch(key)
                return
            if len(present) == 20:
                victim = next(order.victims())
                order.remove(victim)
                present.remove(victim)
            order.add(key)
            present.add(key)

        for _ in range(3):
            for key in range(10):
                use(key)
        for key in range(1000, 1100):
            use(key)
        return len(present & set(range(10)))

    assert {name: survivors(name) for name in NAMES} == {"lru": 0, "fifo": 0, "lfu": 10, "2q": 10}


def test_ghosts_are_no_more_than_the_blocks():
    order = policies.make("2q")
    for key in range(1000):
        order.add(key)
        if key >= 8:
            order.remove(next(order.victims()))
    assert len(order._ghosts) <= 9


@pytest.mark.parametrize("name", NAMES)
def test_every_key_comes_once_and_asking_changes_nothing(name):
    rng = random.Random(5)
    order, present = policies.make(name), []
    for step in range(3000):
        chance = rng.random()
        if chance < 0.5 or not present:
            order.add(step)
            present.append(step)
        elif chance < 0.8:
            order.touch(rng.choice(present))
        else:
            order.remove(present.pop(rng.randrange(len(present))))
        if step % 50 == 0:
            first = list(order.victims())
            assert sorted(first) == sorted(present)
            list(islice(order.victims(), 3))
            assert list(order.victims()) == first


@pytest.mark.parametrize("late", [0, 1, 20, 40])
@pytest.mark.parametrize("name", NAMES)
def test_what_was_given_may_be_removed_while_one_goes_on(name, late):
    """At once, or any time later."""
    rng = random.Random(6)
    order = policies.make(name)
    for key in range(200):
        order.add(key)
    for _ in range(300):
        order.touch(rng.randrange(200))
    expected, given = list(order.victims()), []
    removed = set()
    for key in order.victims():
        given.append(key)
        if len(given) > late and len(given) % 3:
            removed.add(given[-1 - late])
            order.remove(given[-1 - late])
    assert given == expected
    assert sorted(order.victims()) == sorted(set(expected) - removed)


@pytest.mark.parametrize("name", NAMES)
def test_a_victim_costs_the_same_among_many(name):
    """A hundred times the blocks is not a hundred times the CPU time for each."""

    def time_of(count):
        order = policies.make(name)
        for key in range(count):
            order.add(key)
        for key in range(0, count, 3):
            order.touch(key)
        started = time.thread_time()
        for key in range(1000):
            order.remove(next(order.victims()))
            order.add(count + key)
            order.touch(count + key)
        return time.thread_time() - started

    assert min(time_of(200_000) for _ in range(3)) < 20 * min(time_of(2000) for _ in range(3))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_keys_that_are_set_aside_come_back_to_their_places(name, seed):
    """Victims equal an order in which every eviction skips all leased keys instead."""
    rng = random.Random(seed)
    order, passing = policies.make(name), policies.make(name)
    present, leased, aside, num_aside = [], [], {}, 0

    def use(key):
        if key in aside:
            order.put_back(key, aside.pop(key))
        order.touch(key)
        passing.touch(key)

    def evict(count, is_carried_out=True):
        nonlocal num_aside
        passed, victims = [], []
        for key in order.victims():
            if key in leased:
                passed.append(key)
            else:
                victims.append(key)
                if len(victims) == count:
                    break
        for key in passed:
            if (place := order.set_aside(key)) is not None:
                aside[key] = place
                num_aside += 1
        unleased = (key for key in passing.victims() if key not in leased)
        assert victims == list(islice(unleased, count))
        for key in victims if is_carried_out else ():
            order.remove(key)
            passing.remove(key)
            present.remove(key)

    for step in range(3000):
        chance = rng.random()
        if chance < 0.4:
            key = rng.choice([step, rng.randrange(step + 1)])  # perhaps one that has gone before
            if key not in present:
                order.add(key)
                passing.add(key)
                present.append(key)
                if rng.random() < 0.2:  # it is loaded for a lease
                    leased.append(key)
        elif chance < 0.45 and present:
            use(rng.choice(present))
        elif chance < 0.65 and present:
            leased.append(rng.choice(present))
            use(leased[-1])
        elif chance < 0.7 and len(leased) > 20:
            for _ in range(rng.randrange(1, 8)):
                key = leased.pop(rng.randrange(len(leased)))
                if key not in leased:
                    use(key)
        else:
            evict(rng.choice([1, 1, 3, 10, 300]), is_carried_out=rng.random() < 0.8)
    assert num_aside


def test_names_and_classes():
    assert isinstance(policies.make("lru"), policies.Lru)
    assert isinstance(policies.make(policies.Fifo), policies.Fifo)
    with pytest.raises(ValueError, match=r"^policy: expected one of lru, fifo, lfu, 2q, got"):
        policies.make("mru")
    for wrong in (3, None, policies.Lru(), dict, lambda: None):
        with pytest.raises(TypeError, match=r"^policy: expected"):
            policies.make(wrong)


def test_lru_is_exact_after_many_uses():
    """Most entries of its pieces are stale by then, and pieces were merged."""
    rng = random.Random(7)
    order, expected, recent = policies.make("lru"), OrderedDict(), []
    for step in range(60_000):
        chance = rng.random()
        if len(expected) < 3000 or chance < 0.02:
            order.add(step)
            expected[step] = None
        elif chance < 0.03:
            victim = next(order.victims())
            assert victim == expected.popitem(last=False)[0]
            order.remove(victim)
        else:
            if step % 100 == 0 or not recent:
                recent = list(islice(reversed(expected), 1000))
            key = rng.choice(recent)
            if key in expected:
                order.touch(key)
                expected.move_to_end(key)
        if step % 5000 == 0:
            assert list(order.victims()) == list(expected)
    order.touch_all(reversed(expected))
    assert list(order.victims()) == list(reversed(expected))


def test_lru_keeps_few_stale_entries():
    """It merges pieces, and an entry that is stale in one of them stays so."""
    rng = random.Random(9)
    order, expected = policies.make("lru"), OrderedDict()
    for key in range(20_000):
        order.add(key)
        expected[key] = None
    for use in range(300_000):  # of keys that leave few behind in each piece, which stay for long
        key = rng.randrange(10_000 if use % 50 else 20_000)
        order.touch(key)
        expected.move_to_end(key)
        if use % 20_000 == 0:
            assert list(order.victims()) == list(expected)
    assert sum(map(len, order._pieces.values())) < 3 * 20_000
    assert list(order.victims()) == list(expected)


def test_no_call_of_lru_rebuilds_a_table_of_all_keys():
    """CPU times of calls by a thousand, with random keys as hashes are."""
    rng = random.Random(8)
    keys = [rng.getrandbits(128) for _ in range(400_000)]
    order, times = policies.make("lru"), []
    for first in range(0, len(keys), 1000):
        started = time.thread_time()
        for key in keys[first : first + 1000]:
            order.add(key)
        times.append(time.thread_time() - started)
    assert sorted(times)[-2] < 20 * sorted(times)[len(times) // 2]
