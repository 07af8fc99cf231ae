"""kv.TieredCache over stores: fetches, puts, backpressure and failures."""

from __future__ import annotations

import gc
import multiprocessing
import random
import subprocess
import sys
import threading
import time
import weakref

import helpers
import numpy as np
import pytest
from engine_cases import PATIENCE_S, bits_of, parts_of, poll
from stream_cases import Gate, Log
from tiered_cases import Blocks, in_time
from tiered_store_cases import Held, MemoryStore, StoreBlocks, names

import kvcupy as kv
from kvcupy import observe
from kvcupy.cache.tiered import store_tier

A, B, C, D, E, F = range(1, 7)
SECONDS = 1.0 if helpers.full else 0.4
MIN_ROUNDS = 4  # of each thread, however long they take


@pytest.fixture
def blocks(device):
    return StoreBlocks(device)


def later(function, seconds=0.05):
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer


# What is known -----------------------------------------------------------------------------------


def test_match_asks_once_and_only_for_what_is_missing(blocks):
    """Local blocks behind one that is missing count, once that is known."""
    blocks.insert(names(A, C))
    blocks.idle()
    blocks.publish(B, D)
    del blocks.store.calls[:]
    match = blocks.cache.match(names(A, B, C, D, B, E))
    assert match == (1, 1, 5)
    assert blocks.store.calls == [("match", names(B, D, E))]
    assert blocks.cache.match(names(A)).stores == 1
    assert len(blocks.store.calls) == 1, "nothing is missing"
    assert blocks.cache.match([]).stores == 0


# From the store ----------------------------------------------------------------------------------


def test_two_caches_find_each_others_blocks(device):
    first = StoreBlocks(device)
    second = StoreBlocks(device, store=first.store)
    first.insert(names(A, B, C))
    first.cache.flush()
    assert second.cache.match(names(A, B, C, D)).stores == 3
    with second.cache.acquire(names(A, B, C, D)) as lease:
        for layer in range(second.device_pool.num_layers):
            lease.wait_layer(layer)
        second.assert_holds(lease, names(A, B, C))
    assert second.cache.match(names(A, B, C, D))[:2] == (3, 3)
    found = second.cache.stats()
    page = second.host_pool.page_bytes
    assert (found["store_hits"], found["host_hits"], found["misses"]) == (3, 0, 1)
    assert (found["store_misses"], found["store_get_bytes"]) == (1, 3 * page)
    assert first.counts("stored", "put_bytes", "queued") == (3, 3 * page, 0)
    second.evict_all()
    second.use(names(A, B, C), known=3)
    assert second.cache.stats()["host_hits"] == 3, "they are host blocks from now on"
    for blocks in (first, second):
        blocks.assert_no_leak()


@pytest.mark.parametrize("write", ["through", "back"])
def test_what_was_fetched_is_not_put_again(device, write):
    blocks = StoreBlocks(device, write=write)
    blocks.publish(A)
    for _ in range(3):
        blocks.use(names(A), known=1)
    blocks.evict_all()
    blocks.host_pool.allocator.free(blocks.cache.take_host_pages(8))
    blocks.cache.flush()
    assert blocks.store.asked("put") == []
    assert blocks.cache.stats()["lost"] == 0


class LateWrites:
    """Writes of a call that was given up: they may come at any time, or never."""

    unbounded, failure, over = True, None, False

    def done(self):
        return self.over

    def synchronize(self):
        raise AssertionError("nobody knows how long that would take")


def test_pages_that_a_store_may_still_write_are_not_counted_on(device):
    blocks = StoreBlocks(device, 4, 16)
    blocks.publish(A, B)
    late, allocator = LateWrites(), blocks.host_pool.allocator

    def give_up(hashes, pages, **options):
        allocator._mark_busy(pages, late)
        return [False] * len(pages)

    blocks.store.get = give_up
    assert in_time(lambda: blocks.cache.acquire(names(A, B))).num_blocks == 0
    blocks.idle()
    assert (allocator.num_free, allocator.num_available) == (14, 14)
    with pytest.raises(kv.CacheFull, match="n: expected room for 15 pages"):
        in_time(lambda: blocks.cache.take_host_pages(15))
    allocator.free(blocks.cache.take_host_pages(14))
    late.over = True
    assert allocator.num_available == 16
    blocks.assert_no_leak()


def test_acquire_waits_for_what_is_on_its_way(blocks):
    blocks.publish(A, B)
    gate = Held(blocks.store, "get")
    later(gate.open)
    with in_time(lambda: blocks.cache.acquire(names(A, B))) as lease:
        lease.wait()
        blocks.assert_holds(lease, names(A, B))
    assert blocks.counts("late") == (0,)


def test_without_time_acquire_takes_what_has_arrived(blocks):
    blocks.insert(names(A))
    blocks.publish(B)
    gate = Held(blocks.store, "get")
    with in_time(lambda: blocks.cache.acquire(names(A, B), deadline_s=0)) as lease:
        assert lease.num_blocks == 1
        assert gate.entered.wait(PATIENCE_S)
        assert blocks.counts("late") == (1,)
        gate.open()
        blocks.idle()
    assert blocks.cache.match(names(A, B))[:2] == (1, 2)
    with blocks.cache.acquire(names(A, B), deadline_s=0) as lease:
        lease.wait()
        blocks.assert_holds(lease, names(A, B))
    assert blocks.cache.stats()["store_hits"] == 1
    blocks.assert_no_leak()


def test_what_is_late_is_missing_and_comes_for_others(device):
    """Of two calls of the store, the first is in time: the deadline passes during the second."""
    blocks = StoreBlocks(device, 4, 8)
    assert blocks.tier.blocks_per_call == 1
    blocks.publish(A, B, C)
    gates = []
    genuine = blocks.store._get

    def get(hash, page):
        if hash == names(B)[0]:
            gates.append(Held(blocks.store, "get", after=True))
            for arrivals in blocks.tier._arrivals:
                arrivals.over.set()  # waiting threads continue, as at the deadline
        return genuine(hash, page)

    blocks.store._get = get
    with in_time(lambda: blocks.cache.acquire(names(A, B, C), deadline_s=600)) as lease:
        lease.wait()
        blocks.assert_holds(lease, names(A))
    assert blocks.counts("late", "hits") == (2, 1)
    gates[0].open()
    blocks.idle()
    assert blocks.cache.match(names(A, B, C))[:2] == (1, 3)
    blocks.use(names(A, B, C), known=3)
    blocks.assert_no_leak()


def test_two_that_wait_share_one_call(device):
    blocks = StoreBlocks(device, 4, 16)
    blocks.publish(A, B, C)
    gate = Held(blocks.store, "get")
    leases = []

    def acquire(hashes):
        leases.append((blocks.cache.acquire(hashes), hashes))

    threads = [threading.Thread(target=acquire, args=(names(*n),), daemon=True)
               for n in ((A, B), (A, B), (A, B, C))]  # fmt: skip
    for thread in threads:
        thread.start()
    assert gate.entered.wait(PATIENCE_S)
    assert poll(lambda: len(blocks.tier._arrivals) == 3, PATIENCE_S)
    gate.open()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(leases) == 3
    for lease, _ in leases:
        lease.wait()
    for lease, hashes in leases:
        blocks.assert_holds(lease, hashes)
        lease.release()
    fetched = [hash for hashes in blocks.store.asked("get") for hash in hashes]
    assert sorted(fetched) == names(A, B, C)
    blocks.assert_no_leak()


def test_an_acquire_overtakes_prefetches(device):
    blocks = StoreBlocks(device, 4, 32)
    blocks.publish(*range(1, 9))
    gate = Held(blocks.store, "match")
    blocks.cache.prefetch(names(A))
    assert gate.entered.wait(PATIENCE_S)
    blocks.cache.prefetch(names(B, C))
    blocks.cache.prefetch(names(D, E))
    waiting = threading.Thread(target=lambda: blocks.use(names(D, E), known=2), daemon=True)
    waiting.start()
    assert poll(lambda: blocks.tier._arrivals, PATIENCE_S)
    gate.open()
    waiting.join(PATIENCE_S)
    blocks.idle()
    asked = blocks.store.asked("match")
    assert asked.index(names(D, E)) < asked.index(names(B, C))


def test_blocks_on_their_way_take_a_share_of_the_host_pool(device):
    blocks = StoreBlocks(device, 8, 8)
    blocks.insert([*names(*range(11, 19))])
    blocks.cache.flush()
    blocks.evict_all()
    blocks.publish(A, B, C, D, E, F)
    blocks.use(names(A, B, C, D, E, F), known=6)
    assert blocks.counts("skipped") == (2,), "first four, then the others"
    assert blocks.cache.stats()["host_evicted"] == 6
    blocks.assert_no_leak()


def test_a_prefix_longer_than_host_memory_is_fetched_in_parts(device):
    """Each is loaded to the device before the next one is fetched."""
    blocks = StoreBlocks(device, 12, 4)
    blocks.publish(*range(12))
    with blocks.cache.acquire(names(*range(11), 99)) as lease:
        lease.wait()
        blocks.assert_holds(lease, names(*range(11)))
    assert blocks.counts("hits") == (11,) and blocks.cache.stats()["misses"] == 1
    blocks.use(names(*range(12)), known=12)
    small = StoreBlocks(device, 6, 4, store=blocks.store)
    small.use(names(*range(12)), known=6)  # the device has no more pages
    for each in (blocks, small):
        each.assert_no_leak()


def test_a_fetch_does_not_evict_its_own_prefix(device):
    blocks = StoreBlocks(device, 8, 4)
    blocks.insert(names(A, B, 9))
    blocks.cache.flush()
    blocks.evict_all()
    blocks.publish(C, D, E)
    blocks.use(names(A, B, C, D, E), known=5)
    assert blocks.cache.stats()["host_hits"] == 2
    blocks.assert_no_leak()


def test_what_arrives_is_kept_until_the_rest_has(device):
    """Others need host pages meanwhile."""
    blocks = StoreBlocks(device, 4, 8)
    blocks.publish(A, B)
    gates = []
    genuine = blocks.store._get

    def get(hash, page):
        if hash == names(B)[0] and not gates:
            gates.append(Held(blocks.store, "get", after=True))
        return genuine(hash, page)

    blocks.store._get = get
    waiting = threading.Thread(target=lambda: blocks.use(names(A, B), known=2), daemon=True)
    waiting.start()
    assert poll(lambda: gates and gates[0].entered.is_set(), PATIENCE_S)
    taken = in_time(lambda: blocks.cache.take_host_pages(6))
    later(gates[0].open)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert blocks.counts("hits") == (2,)
    blocks.host_pool.allocator.free(taken)
    blocks.assert_no_leak()


def test_no_page_is_anybody_elses_while_a_get_may_write_it(device):
    blocks = StoreBlocks(device, 4, 4)
    blocks.publish(A, B)
    gate = Held(blocks.store, "get")
    assert blocks.cache.acquire(names(A, B), deadline_s=0).num_blocks == 0
    assert gate.entered.wait(PATIENCE_S)
    assert blocks.tier._num_getting == 1
    taken, more = blocks.cache.take_host_pages(3), []
    waiting = threading.Thread(
        target=lambda: more.append(blocks.cache.take_host_pages(1)), daemon=True
    )
    waiting.start()
    assert not poll(lambda: more, 0.05), "it waits for the call"
    gate.open()
    waiting.join(PATIENCE_S)
    blocks.idle()
    assert len(more) == 1
    for pages in (taken, *more):
        blocks.host_pool.allocator.free(pages)
    blocks.assert_no_leak()


class Landing:
    """What an engine still writes after a get has given up."""

    def __init__(self):
        self.over = False

    def done(self):
        return self.over

    def synchronize(self):
        assert self.over, "nobody has to wait for it"


@pytest.mark.parametrize("raises", [False, True])
def test_pages_in_which_bytes_may_still_land_are_used_for_nothing(device, monkeypatch, raises):
    blocks = StoreBlocks(device, 4, 4)
    blocks.publish(A, B)
    blocks.store.lacking = {*names(A, B)}
    landing, allocator, used = Landing(), blocks.host_pool.allocator, []
    real = blocks.store.get

    def give_up(hashes, pages, **options):
        answer = real(hashes, pages)
        used.extend(pages)
        allocator._mark_busy(pages, landing)
        if raises:
            raise OSError("gone")
        return answer

    monkeypatch.setattr(blocks.store, "get", give_up)
    assert blocks.cache.acquire(names(A, B)).num_blocks == 0
    blocks.idle()
    assert used and allocator.num_free == 4 - len(used)
    blocks.insert(names(C, D, E, F))
    blocks.cache.flush()
    others = list(blocks.tiers.host.pages.values())
    assert len(others) == 4 - len(used) and not {*others} & {*used}
    landing.over = True
    assert allocator.num_free == len(used)
    blocks.assert_no_leak()


def test_a_call_that_does_not_end_makes_the_cache_full(device, monkeypatch):
    monkeypatch.setattr(store_tier, "_STORE_TIMEOUT_S", 0.05)
    blocks = StoreBlocks(device, 4, 4)
    blocks.publish(A)
    gate = Held(blocks.store, "get")
    blocks.cache.prefetch(names(A))
    assert gate.entered.wait(PATIENCE_S)
    with pytest.raises(kv.CacheFull, match="room for 4"):
        in_time(lambda: blocks.cache.take_host_pages(4))
    gate.open()
    blocks.idle()
    blocks.host_pool.allocator.free(blocks.cache.take_host_pages(4))
    blocks.assert_no_leak()


@pytest.mark.parametrize("call", ["get", "put"])
def test_nothing_waits_for_a_call_that_does_not_end(device, monkeypatch, call):
    monkeypatch.setattr(store_tier, "_STORE_TIMEOUT_S", 0.05)
    blocks = StoreBlocks(device)
    blocks.publish(A, B)
    gate = Held(blocks.store, call)
    blocks.insert(names(C))
    if call == "get":
        blocks.cache.prefetch(names(A))
    assert gate.entered.wait(PATIENCE_S)
    for number in (A, B):
        lease = in_time(lambda number=number: blocks.cache.acquire(names(number), deadline_s=1e6))
        assert lease.num_blocks == 0
    gate.open()
    blocks.idle()
    blocks.use(names(A, B), known=2)
    blocks.assert_no_leak()


def test_too_few_device_pages_for_what_the_store_has_too(device):
    """The lease then ends where it would without a store."""
    blocks = StoreBlocks(device, 3, 16)
    blocks.insert(names(A, B))
    blocks.publish(C, D)
    with blocks.cache.acquire(names(A, B, C, D)) as lease:
        blocks.assert_holds(lease, names(A, B))
    blocks.publish(E, F, 7, 8)
    with blocks.cache.acquire(names(E, F, 7, 8)) as lease:
        assert lease.num_blocks == 0
    taken = blocks.device_pool.allocator.alloc(1)
    with (
        blocks.cache.acquire(names(A, B)),
        pytest.raises(kv.CacheFull),
    ):
        blocks.cache.acquire(names(E, F))  # they are host blocks by now
    blocks.device_pool.allocator.free(taken)
    blocks.assert_no_leak()


# To the store ------------------------------------------------------------------------------------


def test_through_puts_what_is_whole_in_host_memory(blocks):
    pages = blocks.device_pool.allocator.alloc(2)
    for page, hash in zip(pages.tolist(), names(A, B), strict=True):
        blocks.fill(page, hash)
    blocks.device.synchronize()
    gate = Gate(blocks.engine.save_stream)
    blocks.cache.insert(names(A, B), pages)
    time.sleep(0.02)
    assert blocks.store.calls == []
    gate.open()
    assert poll(lambda: len(blocks.store.blocks) == 2, PATIENCE_S), "no other call is needed"
    for hash in names(A, B):
        for there, value in zip(blocks.store.blocks[hash], blocks.values(hash), strict=True):
            assert np.array_equal(there, value)


def test_a_save_that_failed_is_not_put(blocks):
    with observe.attached(Log(refuse="save")):
        blocks.insert(names(A))
        blocks.settle_quietly()
    blocks.idle()
    assert blocks.store.blocks == {} and blocks.counts("queued") == (0,)
    assert blocks.cache.flush() == 0
    assert set(blocks.store.blocks) == set(names(A)), "it was saved anew"


def test_what_the_store_knows_counts_as_such(device):
    blocks = StoreBlocks(device, 8, 64)
    blocks.publish(A, B, D)
    blocks.insert(names(A, B, C, D))
    blocks.cache.flush()
    assert blocks.counts("stored", "known") == (1, 3)
    assert blocks.counts("put_bytes") == (blocks.host_pool.page_bytes,)


@pytest.mark.parametrize("write", ["through", "back"])
def test_back_puts_what_leaves(device, write):
    blocks = StoreBlocks(device, 4, 4, write=write)
    for numbers in ((A, B, C, D), (11, 12, 13, 14), (21, 22, 23, 24)):
        short = len(numbers) - blocks.device_pool.allocator.num_free
        blocks.cache.evict(max(0, short))
        blocks.insert(names(*numbers))
        blocks.settle()
    blocks.evict_all()
    blocks.settle()
    assert write == "through" or len(blocks.store.blocks) < 12
    known = set.union(*blocks.blocks()) | set(blocks.store.blocks)
    everything = {*names(A, B, C, D), *names(11, 12, 13, 14), *names(21, 22, 23, 24)}
    assert known == everything
    assert blocks.cache.stats()["lost"] == 0
    for some in (names(A, B), names(C, D)):  # in half of the host pages
        blocks.use(some, known=2)
    blocks.assert_no_leak()


@pytest.mark.parametrize("how", ["raises", "full", "hangs"])
def test_back_with_a_store_that_takes_nothing(device, how, monkeypatch):
    monkeypatch.setattr(store_tier, "_STORE_TIMEOUT_S", 0.05)
    blocks = StoreBlocks(device, 4, 4, write="back")
    gate = None
    if how == "raises":
        blocks.store.fail["put"] = ConnectionError("gone")
    elif how == "full":
        blocks.store.capacity = 0
    else:
        gate = Held(blocks.store, "put")
    for start in (1, 11, 21):
        blocks.insert(names(*range(start, start + 4)))
        in_time(blocks.evict_all)
        blocks.settle()
    assert blocks.cache.stats()["lost"] >= 4
    if gate is not None:
        gate.open()
    blocks.assert_no_leak()


def test_a_page_stays_while_a_put_reads_it(device):
    blocks = StoreBlocks(device, 8, 4)
    gate = Held(blocks.store, "put", after=True)
    blocks.insert(names(A))
    assert gate.entered.wait(PATIENCE_S)
    blocks.settle()
    blocks.insert(names(B, C, D, E))
    blocks.settle()
    assert names(A)[0] in blocks.blocks()[1], "though it is the next to be evicted"
    assert len(blocks.blocks()[1]) == 4
    blocks.cache.clear()
    assert blocks.host_pool.allocator.num_allocated == 1, "until the put is over"
    gate.open()
    blocks.idle()
    blocks.assert_no_leak()


# Failures ----------------------------------------------------------------------------------------

ERRORS = [OSError("lost"), MemoryError("no"), kv.KvcupyError("odd"), AssertionError("?")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", ["match", "get", "put"])
def test_a_store_that_raises(blocks, call, error):
    blocks.publish(A, B)
    blocks.store.fail[call] = error
    match = blocks.cache.match(names(A, B))
    assert match.stores == (0 if call == "match" else 2)
    lease = in_time(lambda: blocks.cache.acquire(names(A, B)))
    assert lease.num_blocks == (2 if call == "put" else 0)
    lease.release()
    blocks.insert(names(C, D))
    in_time(blocks.cache.flush)
    assert blocks.counts("errors")[0] >= 1
    assert (blocks.counts("failed")[0] >= 2) == (call == "put")
    blocks.use(names(C, D), known=2)
    del blocks.store.fail[call]
    blocks.tier.states[0].try_again()
    blocks.use(names(A, B), known=2)
    blocks.assert_no_leak()


@pytest.mark.parametrize("answer", [None, [], [True] * 9, "yes", 7, -1, [None, "stored"], [0, 1]])
@pytest.mark.parametrize("call", ["match", "get", "put"])
def test_an_answer_that_is_none(blocks, call, answer):
    blocks.publish(A, B)
    blocks.store.answer[call] = answer
    in_time(lambda: blocks.cache.match(names(A, B)))
    lease = in_time(lambda: blocks.cache.acquire(names(A, B)))
    assert lease.num_blocks == (2 if call == "put" else 0)
    lease.release()
    blocks.insert(names(C, D))
    in_time(blocks.cache.flush)
    blocks.use(names(C, D), known=2)
    blocks.store.answer.clear()
    blocks.tier.states[0].try_again()
    blocks.use(names(A, B), known=2)
    blocks.assert_no_leak()


def test_blocks_that_are_known_but_do_not_come(device):
    blocks = StoreBlocks(device, 4, 16)
    blocks.publish(A, B, C, D)
    blocks.store.lacking = set(names(B))
    assert blocks.tier.blocks_per_call == 2
    with blocks.cache.acquire(names(A, B, C, D)) as lease:
        lease.wait()
        blocks.assert_holds(lease, names(A))
    blocks.idle()
    assert blocks.counts("hits", "get_bytes") == (1, blocks.host_pool.page_bytes)
    assert names(D)[0] not in {hash for hashes in blocks.store.asked("get") for hash in hashes}
    assert blocks.cache.match(names(A))[:2] == (1, 1)
    blocks.assert_no_leak()


def test_the_host_needs_no_thread_to_go_on(blocks, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    blocks.publish(A)
    assert blocks.cache.acquire(names(A)).num_blocks == 0
    blocks.insert(names(B))
    blocks.cache.flush()
    assert blocks.counts("errors")[0] >= 1
    monkeypatch.undo()
    blocks.use(names(A), known=1)


def test_hashes_of_64_bits_are_refused(blocks):
    calls = (blocks.cache.match, blocks.cache.acquire, blocks.cache.prefetch,
             lambda hashes: blocks.cache.insert(hashes, [0, 1]))  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match="hashes: expected hashes of 128 bits"):
            call([*names(A), 2**64 - 1])
    assert blocks.store.calls == []


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"stores": [object()]}, TypeError, "stores"),
        ({"stores": [lambda pool, model: object()]}, TypeError, "stores"),
        ({"stores": "file:/kv"}, TypeError, "stores"),
        ({"stores": None}, TypeError, "stores"),
        ({"stores": np.array(0.5)}, TypeError, "stores"),
        ({"stores": "redis://:secret@h"}, TypeError, "stores"),
        ({"stores": [b"redis://:secret@h"]}, TypeError, "stores"),
        ({"stores": [["redis://:secret@h"]]}, TypeError, "stores"),
        ({"stores": ["mooncake://user:secret@h:1"]}, ValueError, "url"),
    ],
)
def test_wrong_options(device, blocks, options, error, name):
    pools = blocks.device_pool, blocks.host_pool
    with pytest.raises(error, match=rf"^{name}:") as caught:
        kv.TieredCache(*pools, **options)
    assert "secret" not in str(caught.value)


def test_a_store_of_another_pool_is_refused(device, blocks):
    """It would write elsewhere."""
    other = StoreBlocks(device)
    with pytest.raises(ValueError, match=r"^stores: expected a store of host_pool"):
        kv.TieredCache(blocks.device_pool, blocks.host_pool, stores=[other.store])


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"deadline_s": -1}, ValueError, "deadline_s"),
        ({"deadline_s": float("nan")}, ValueError, "deadline_s"),
        ({"deadline_s": "1"}, TypeError, "deadline_s"),
        ({"deadline_s": -(10**400)}, ValueError, "deadline_s"),
    ],
)
def test_wrong_waits(blocks, options, error, name):
    with pytest.raises(error, match=rf"^{name}:"):
        blocks.cache.acquire(names(A), **options)
    if name == "deadline_s":
        for method in (blocks.cache.flush, blocks.cache.close):
            with pytest.raises(error, match=rf"^{name}:"):
                method(**options)
    assert not blocks.cache.closed and blocks.store.calls == []


def test_without_stores(device):
    blocks = Blocks(device)
    blocks.insert([A, B])
    with blocks.cache.acquire([A, B], deadline_s=10**400) as lease:
        assert lease.num_blocks == 2
    blocks.cache.prefetch([A, C])
    assert not [key for key in blocks.cache.stats() if key.startswith("store")]
    assert blocks.cache.flush() == 0


def test_64_bit_hashes_without_stores_need_no_warning(device, caplog):
    blocks = Blocks(device)
    assert blocks.cache.match([1]) == (0, 0, 0)
    assert not caplog.records


# The end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["match", "get", "put"])
def test_clearing_while_the_store_is_at_work(blocks, call):
    blocks.publish(A)
    gate = Held(blocks.store, call)
    blocks.insert(names(B))
    blocks.cache.acquire(names(A), deadline_s=0).release()
    assert gate.entered.wait(PATIENCE_S)
    blocks.settle()
    blocks.cache.clear()
    gate.open()
    blocks.idle()
    assert blocks.blocks() == (set(), set()), "what arrives now is of the past"
    blocks.assert_no_leak()


def test_clearing_between_two_steps_of_a_fetch(blocks, monkeypatch):
    """The worker has chosen its next step, and begins it after the cache was cleared."""
    blocks.publish(A, B)
    chosen, cleared = threading.Event(), threading.Event()
    real = store_tier.StoreTier._next

    def choose(tier, shared):
        step = real(tier, shared)
        if step is not None and blocks.store.asked("match"):
            chosen.set()
            assert cleared.wait(PATIENCE_S)
        return step

    monkeypatch.setattr(store_tier.StoreTier, "_next", choose)
    blocks.cache.prefetch(names(A))
    assert chosen.wait(PATIENCE_S)
    blocks.cache.clear()
    cleared.set()
    blocks.cache.prefetch(names(B))
    blocks.idle()
    assert blocks.store.asked("get") == [names(B)]
    assert blocks.blocks() == (set(), {*names(B)})


@pytest.mark.parametrize("call", ["match", "get", "put"])
def test_closing_while_the_store_is_at_work(blocks, call):
    blocks.publish(A)
    gate = Held(blocks.store, call)
    blocks.insert(names(B))
    outcome = []

    def acquire():
        try:
            blocks.cache.acquire(names(A))
        except kv.KvcupyError as error:
            outcome.append(str(error))

    waiting = threading.Thread(target=acquire, daemon=True)
    if call != "put":
        waiting.start()
    assert gate.entered.wait(PATIENCE_S)
    if call == "put":
        waiting.start()
    assert poll(lambda: blocks.tier._arrivals or not waiting.is_alive(), PATIENCE_S)
    in_time(lambda: blocks.cache.close(deadline_s=0.02))
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert outcome == ["TieredCache: the cache is closed"]
    worker = blocks.tier._thread
    assert worker.is_alive(), "it is in the call"
    gate.open()
    worker.join(PATIENCE_S)
    assert not worker.is_alive()
    for pool in (blocks.device_pool, blocks.host_pool):
        pool.allocator.check_leaks()
    assert not blocks.store.closed, "it is the user's"


def test_flush_has_a_deadline(blocks):
    gate = Held(blocks.store, "put")
    blocks.insert(names(A, B))
    assert gate.entered.wait(PATIENCE_S)
    in_time(lambda: blocks.cache.flush(deadline_s=0.02))
    gate.open()
    blocks.cache.flush()
    assert blocks.counts("stored", "queued") == (2, 0)


def test_closing_ends_the_thread(blocks):
    blocks.insert(names(A, B))
    worker = blocks.tier._thread
    assert worker.daemon
    blocks.cache.close()
    assert not worker.is_alive()
    assert set(blocks.store.blocks) == set(names(A, B)), "first it puts what is queued"
    blocks.cache.close()


def test_a_closed_cache_is_gone_without_the_garbage_collector(device):
    """As it is without a store: its pools and streams go with the last reference."""
    gone = []
    gc.disable()
    try:
        for used in (False, True):
            blocks = StoreBlocks(device)
            if used:
                blocks.insert(names(A))
                blocks.use(names(A))
            blocks.cache.close()
            gone.append(weakref.ref(blocks.tiers))
            gone.append(weakref.ref(blocks.tier))
            del blocks
        assert [ref() for ref in gone] == [None] * 4
    finally:
        gc.enable()


def test_a_forked_child_is_refused(blocks):
    if blocks.device.kind != "host":
        pytest.skip("CUDA does not survive a fork")
    blocks.insert(names(A))
    blocks.cache.flush()

    def child(results):
        for call in (
            lambda: blocks.cache.match(names(A)),
            lambda: blocks.cache.acquire(names(A)),
            lambda: blocks.cache.prefetch(names(A)),
            lambda: blocks.cache.stats(),
            lambda: blocks.cache.flush(),
        ):
            try:
                call()
                results.put("nothing")
            except kv.KvcupyError as error:
                results.put(str(error))

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=child, args=(results,), daemon=True)
    process.start()
    try:
        said = [results.get(timeout=PATIENCE_S) for _ in range(5)]
    finally:
        process.kill()
        process.join(PATIENCE_S)
    assert all(each.startswith("TieredCache: expected the process that made it") for each in said)
    blocks.use(names(A), known=1)


AT_EXIT = """
import sys, time
sys.path[:0] = {path!r}
import numpy as np
import kvcupy as kv
from tiered_store_cases import StoreBlocks, names
blocks = StoreBlocks(kv.device("host"))
blocks.publish(1)
blocks.store._get = lambda hash, page: time.sleep({seconds}) or True
blocks.cache.prefetch(names(1))
blocks.insert(names(2, 3))
time.sleep(0.02)
"""


@pytest.mark.parametrize("seconds", [helpers.full_only(0), helpers.full_only(0.1), 60])
def test_the_interpreter_ends_cleanly(seconds):
    """With a call of the store in progress, too."""
    code = AT_EXIT.format(path=sys.path, seconds=seconds)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# Metrics -----------------------------------------------------------------------------------------


def test_metrics(blocks):
    value = kv.metrics.value
    before = {
        "hits": value("kvcupy_cache_hits_total", tier="store"),
        "bytes": value("kvcupy_cache_moved_bytes_total", move="store_get"),
        "stored": value("kvcupy_cache_store_puts_total", outcome="stored"),
        "absent": value("kvcupy_cache_store_misses_total", why="absent"),
    }
    assert set(blocks.cache.stats()) == set(kv.metrics.CACHE_STATS)
    blocks.publish(A)
    blocks.use(names(A, B), known=1)
    blocks.insert(names(C))
    blocks.cache.flush()
    page = blocks.host_pool.page_bytes
    for _ in range(2):  # while the cache lives, and when it is gone
        assert value("kvcupy_cache_hits_total", tier="store") == before["hits"] + 1
        moved = value("kvcupy_cache_moved_bytes_total", move="store_get")
        assert moved == before["bytes"] + page
        stored = value("kvcupy_cache_store_puts_total", outcome="stored")
        assert stored == before["stored"] + 1
        absent = value("kvcupy_cache_store_misses_total", why="absent")
        assert absent == before["absent"] + 1
        blocks = None
        gc.collect()


def test_a_store_of_memory_meets_the_protocol(device):
    """The stand-in of these tests does what `BlockStore` says."""
    blocks = StoreBlocks(device)
    store = MemoryStore(blocks.host_pool, capacity=2)
    pages = blocks.host_pool.allocator.alloc(3)
    assert store.put(names(A, B, C), pages) == ["stored", "stored", "full"]
    assert store.put(names(A), pages[:1]) == ["known"]
    assert store.match(names(A, B, C)) == 2
    assert store.get(names(B, C), pages[:2]) == [True, False]
    blocks.host_pool.allocator.free(pages)


# Threads -----------------------------------------------------------------------------------------


class Shaky(MemoryStore):
    """Now and then it is slow, raises, or does not have what it knew."""

    def __init__(self, pool, blocks, rng):
        super().__init__(pool, blocks)
        self.rng = rng

    def _pass(self, name, when):
        chance = self.rng.random()
        if chance < 0.05:
            time.sleep(0.002)
        elif chance < 0.1:
            raise ConnectionError("lost")

    def _get(self, hash, page):
        return super()._get(hash, page) if self.rng.random() < 0.97 else False


@pytest.mark.parametrize("write", ["through", "back"])
def test_many_threads_of_two_caches(device, write):
    """Requests with shared prefixes: acquire, verify, compute the rest, insert, release."""
    both, stored, errors, done = [], {}, [], []
    for seed in range(2):
        plain = StoreBlocks(device, 24, 24)
        pools = plain.device_pool, plain.host_pool
        plain.cache.close()
        blocks = Blocks(
            device, pools=pools, stores=[Shaky(pools[1], stored, random.Random(seed))], write=write
        )  # fmt: skip
        both.append(blocks)
    until = time.monotonic() + SECONDS

    def is_over():
        """Return whether time is up and each cache has had blocks of the other, or one failed."""
        hits = [blocks.cache.stats()["store_hits"] for blocks in both]
        now = time.monotonic()
        served = now >= until and (write == "back" or all(hits))
        return served or bool(errors) or now >= until + PATIENCE_S

    def serve(seed):
        rng, rounds, stream = random.Random(seed), 0, device.stream()
        blocks = both[seed % 2]
        cache, allocator = blocks.cache, blocks.device_pool.allocator
        try:
            while rounds < MIN_ROUNDS or not is_over():
                user = rng.randrange(8)
                hashes = names(user // 4, *(100 * user + i for i in range(rng.randrange(1, 5))))
                try:
                    lease = cache.acquire(hashes, after=stream, deadline_s=rng.choice([0, 0.05]))
                except kv.CacheFull:
                    continue
                with lease:
                    lease.wait(stream)
                    stream.synchronize()
                    parts = parts_of(blocks.device_pool)
                    for page, hash in zip(lease.pages.tolist(), hashes, strict=False):
                        there = bits_of([device.to_numpy(part[page]) for part in parts])
                        assert (there == blocks.bits(hash)).all(), f"block {hash}"
                    rest = hashes[lease.num_blocks :]
                    try:
                        cache.evict(max(0, len(rest) - allocator.num_free))
                        pages = allocator.alloc(len(rest))
                    except kv.CacheFull:
                        continue
                    for page, hash in zip(pages.tolist(), rest, strict=True):
                        blocks.fill(page, hash, stream=stream)
                    stream.synchronize()
                    allocator.free(cache.insert(rest, pages, after=stream))
                if rng.random() < 0.1:
                    cache.prefetch(hashes)
                rounds += 1
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            done.append(rounds)

    threads = [threading.Thread(target=serve, args=(i,), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 2 * PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), f"a deadlock: rounds {done}"
    assert not errors, errors
    for blocks in both:
        blocks.settle()
        found = blocks.cache.stats()
        assert found["failed_loads"] == found["failed_saves"] == 0
        assert write == "back" or found["store_hits"] > 0
        blocks.cache.close()
        for pool in (blocks.device_pool, blocks.host_pool):
            pool.allocator.check_leaks()


# Below a paged cache -----------------------------------------------------------------------------


def test_a_prompt_that_another_process_has_computed(device):
    """A sequence begins with the blocks of another paged cache, bit for bit."""
    prompt, stored, seen = np.arange(14), {}, []
    hashes = kv.block_hashes(prompt, 4)
    for known in (0, 12):
        cache = kv.PagedKVCache(
            num_layers=2, num_q_heads=2, num_kv_heads=1, head_dim=8, num_pages=8, page_size=4,
            dtype="fp16", device=device,
        )  # fmt: skip
        host = kv.KVPool(8, 4, 2, 1, 8, dtype="fp16", placement="pinned", device=device)
        tiers = kv.TieredCache(cache.pool, host, stores=[MemoryStore(host, stored)])
        cache.attach(tiers)
        cache.add_sequence("a", hashes=hashes)
        assert cache.sequence_length("a") == known
        rng = np.random.default_rng(5)
        rows = rng.standard_normal((2, 14, 4, 8)).astype(np.float16)[:, known:]
        with cache.forward(["a"], [14 - known]):
            for layer, of_layer in enumerate(rows):
                parts = np.split(of_layer, [2, 3], axis=1)
                cache.attention(layer, *map(device.asarray, parts))
        device.synchronize()
        seen.append([device.to_numpy(part) for part in cache.get_kv("a", 0, 14)])
        cache.remove_sequence("a")
        tiers.close()
    for one, other in zip(*seen, strict=True):
        assert np.array_equal(one.view(np.uint16), other.view(np.uint16))
    assert set(stored) == set(hashes)


def test_a_cache_that_remembers_a_failure_is_collected(device):
    """Its tiers and its pool remember it; the worker, which has both, must not hold the cache."""

    def fail():
        blocks = StoreBlocks(device)
        blocks.insert(names(A, B))
        blocks.cache.flush()
        blocks.evict_all()
        blocks.settle()
        with observe.attached(Log(refuse="load 0")):
            lease = blocks.cache.acquire(names(A, B))
        with pytest.raises(kv.DeviceError, match="refused"):
            lease.wait()
        lease.release()
        return weakref.ref(blocks.cache), blocks.tier._thread

    gone, worker = fail()
    gc.collect()
    assert gone() is None
    worker.join(PATIENCE_S)
    assert not worker.is_alive()
