"""kv.TieredCache over stores: fetches, puts, backpressure, failures, and the end.

Any order of calls is walked through in `test_tiered_stateful.py`; slow, late and failing stores
beside other threads in the simulated world `tests/simulation/tiered.py`, whose controls take away
what keeps blocks from being lost.
"""

from __future__ import annotations

import gc
import logging
import random
import subprocess
import sys
import threading
import time
import weakref

import helpers
import numpy as np
import pytest
from engine_cases import PATIENCE_S, bits_of, contents, parts_of, poll
from stream_cases import Log
from tiered_cases import Blocks, Held, MemoryStore, StoreBlocks, in_time, names

import kvcupy as kv
from kvcupy import observe
from kvcupy.cache.tiered import store_tier, tiers

A, B, C, D, E, F = range(1, 7)
POLICIES = pytest.mark.parametrize("write", ["through", "back"])
SECONDS = 1.0 if helpers.full else 0.4
MIN_ROUNDS = 4  # of each thread, however long they take


@pytest.fixture
def blocks(device):
    return StoreBlocks(device)


# --- Lookups and fetches ---


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


# --- Several stores ---


def test_blocks_come_from_the_nearest_store_that_has_them(device):
    blocks = StoreBlocks(device, 8, 16, stores=[None, None, None])
    for number, some in enumerate(((0, 1), (1, 2, 5), (3, 4, 6))):
        blocks.stores[number].blocks.update({h: blocks.values(h) for h in names(*some)})
    hashes = names(*range(8))
    assert blocks.cache.match(hashes) == (0, 0, 7)
    blocks.use(hashes, known=7)
    fetched = [
        {hash for hashes in store.asked("get") for hash in hashes} for store in blocks.stores
    ]
    assert fetched == [set(names(*some)) for some in ((0, 1), (2, 5), (3, 4, 6))]
    blocks.idle()
    assert set(blocks.stores[0].blocks) == set(names(*range(7))), "put into the nearer ones"
    assert set(blocks.stores[1].blocks) == set(names(1, 2, 3, 4, 5, 6))
    assert set(blocks.stores[2].blocks) == set(names(3, 4, 6))
    for hash in names(*range(7)):
        for store in blocks.stores:
            if hash in store.blocks:
                found = [part.tobytes() for part in store.blocks[hash]]
                assert found == [part.tobytes() for part in blocks.values(hash)]
    blocks.assert_no_leak()


@pytest.mark.parametrize("how", ["lies", "raises", "answers nonsense"])
def test_what_the_nearest_store_does_not_deliver_comes_from_the_next(device, how):
    blocks = StoreBlocks(device, 4, 16, stores=[None, None])
    near, far = blocks.stores
    for store in blocks.stores:
        store.blocks.update({hash: blocks.values(hash) for hash in names(1, 2, 3)})
    if how == "lies":
        near.lacking = set(names(2))
    elif how == "raises":
        near.fail["get"] = OSError("gone")
    else:
        near.answer["get"] = ["yes"]
    blocks.use(names(1, 2, 3), known=3)
    assert names(2) in [hashes[:1] for hashes in far.asked("get")] or how != "lies"
    assert blocks.counts("hits", "misses") == (3, 0)
    blocks.assert_no_leak()


# --- Puts ---


def insert_quickly(blocks, hashes, at_once=2):
    """Insert blocks one after the other, evicting others from the device when it is full."""
    for i in range(0, len(hashes), at_once):
        some = hashes[i : i + at_once]
        blocks.cache.evict(max(0, len(some) - blocks.device_pool.allocator.num_free))
        blocks.insert(some)


@pytest.mark.parametrize("call", ["flush", "close"])
def test_what_could_not_be_written_is_reported(device, call, caplog):
    blocks = StoreBlocks(device, 8, 4, stores=[None, None])
    blocks.stores[1].capacity = 3
    blocks.insert(names(*range(8)))
    with caplog.at_level(logging.WARNING, "kvcupy"):
        outcome = in_time(getattr(blocks.cache, call))
    assert outcome == (5 if call == "flush" else None)
    logged = [record.getMessage() for record in caplog.records]
    expected = ["5 blocks of a closed cache are not in all of its stores"]
    assert logged == ([] if call == "flush" else expected)
    assert len(blocks.store.blocks) == 8
    if call == "flush":
        blocks.stores[1].capacity = 8
        assert blocks.cache.flush() == 0, "it is tried again"
        assert len(blocks.stores[1].blocks) == 8


def test_flush_has_a_deadline_and_counts_what_is_late(device):
    blocks = StoreBlocks(device, 8, 8)
    gate = Held(blocks.store, "put")
    blocks.insert(names(1, 2, 3))
    assert in_time(lambda: blocks.cache.flush(deadline_s=0.02)) == 3
    gate.open()
    assert blocks.cache.flush() == 0


@POLICIES
def test_a_put_that_fails_once_loses_nothing(device, write):
    """It is repeated before the block may go."""
    blocks, failed = StoreBlocks(device, 4, 4, write=write), set()

    def put(hash, page, genuine=blocks.store._put):
        if hash not in failed:
            failed.add(hash)
            return "failed"
        return genuine(hash, page)

    blocks.store._put = put
    hashes = names(*range(24))
    # Every second block is put twice: a store that only fails is left alone for a while.
    failed.update(hashes[::2])
    blocks.tier.blocks_per_call = 2
    in_time(lambda: insert_quickly(blocks, hashes))
    assert blocks.cache.flush() == 0
    assert set(blocks.store.blocks) == set(hashes) and blocks.cache.stats()["lost"] == 0
    assert blocks.counts("failed") == (12,)


def test_calls_that_need_room_wait_for_the_store_and_then_raise(device, monkeypatch):
    """Host memory is full of blocks whose put does not end; the device has more."""
    run = tiers.GroupTiers.run
    monkeypatch.setattr(
        tiers.GroupTiers, "run",
        lambda self, step, *, patience_s=5.0, **options: run(
            self, step, patience_s=min(patience_s, 0.05), **options
        ),
    )  # fmt: skip
    blocks = StoreBlocks(device, 4, 2)
    gate = Held(blocks.store, "put")
    blocks.insert(names(1, 2))
    blocks.evict_all()
    blocks.insert(names(3, 4, 5, 6))
    assert gate.entered.wait(PATIENCE_S)
    blocks.settle()
    for call in (lambda: blocks.cache.evict(1), lambda: blocks.cache.take_host_pages(1)):
        with pytest.raises(kv.CacheFull, match=r"^(num_blocks|n): expected room"):
            in_time(call)
    assert blocks.blocks() == (set(names(3, 4, 5, 6)), set(names(1, 2)))
    assert blocks.cache.stats()["lost"] == 0
    gate.open()
    blocks.idle()
    blocks.evict_all()
    for hash in names(1, 2, 3, 4, 5, 6):
        blocks.use([hash], known=1)
    blocks.assert_no_leak()


@POLICIES
def test_a_store_that_is_down_is_left_alone_for_a_while(device, write, monkeypatch, caplog):
    """Its blocks are lost then, counted, and nothing waits; later it is tried again."""
    blocks = StoreBlocks(device, 4, 4, write=write)
    now = [1000.0]
    clock = type("Clock", (), {"monotonic": lambda: now[0], "perf_counter": time.perf_counter})
    monkeypatch.setattr(store_tier, "time", clock)
    blocks.store.fail["put"] = ConnectionError("down")
    hashes = names(*range(20))
    with caplog.at_level(logging.WARNING, "kvcupy"):
        in_time(lambda: insert_quickly(blocks, hashes))
    assert len(caplog.records) == 1, "the log is bounded"
    puts = len(blocks.store.asked("put"))
    assert puts == 3 and blocks.cache.stats()["lost"] >= 8
    del blocks.store.fail["put"]
    in_time(lambda: insert_quickly(blocks, names(100, 101, 102, 103)))
    blocks.settle()
    assert len(blocks.store.asked("put")) == puts
    now[0] += 11
    there = set.union(*blocks.blocks())
    in_time(lambda: insert_quickly(blocks, names(*range(200, 212))))
    assert blocks.cache.flush() == 0
    assert set(blocks.store.blocks) >= there | set(names(*range(200, 212)))
    blocks.assert_no_leak()


# --- Failures ---


# A call raises, or returns an invalid answer.
WRONG = [OSError("lost"), AssertionError("?"), None, [], [True] * 9, 7, -1, [None, "stored"]]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("call", ["match", "get", "put"])
def test_a_store_that_fails(blocks, call, wrong):
    blocks.publish(A, B)
    how = blocks.store.fail if isinstance(wrong, Exception) else blocks.store.answer
    how[call] = wrong
    assert blocks.cache.match(names(A, B)).stores == (0 if call == "match" else 2)
    with in_time(lambda: blocks.cache.acquire(names(A, B))) as lease:
        assert lease.num_blocks == (2 if call == "put" else 0)
    blocks.insert(names(C, D))
    in_time(blocks.cache.flush)
    if isinstance(wrong, Exception):
        assert blocks.counts("errors")[0] >= 1
        assert (blocks.counts("failed")[0] >= 2) == (call == "put")
    blocks.use(names(C, D), known=2)
    how.clear()
    blocks.tier.states[0].try_again()
    blocks.use(names(A, B), known=2)
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


def test_stores_of_other_blocks_are_refused(device):
    plain = Blocks(device, 2, 2)
    pools, store = (plain.device_pool, plain.host_pool), MemoryStore(plain.host_pool)
    store.identity = kv.PoolIdentity.of(plain.host_pool, model="m")
    with kv.TieredCache(*pools, stores=[store]) as cache:
        assert not cache.closed
    kv.TieredCache(*pools, stores=[store], model="m").close()
    for options in ({"model": "other"}, {"model": "m", "heads": (0, 4)}):
        with pytest.raises(ValueError, match=r"^stores: expected a store of the same blocks"):
            kv.TieredCache(*pools, stores=[store], **options)
    with pytest.raises(ValueError, match=r"^stores: expected a store of host_pool"):
        kv.TieredCache(*pools, stores=[MemoryStore(Blocks(device, 2, 2).host_pool)])


# --- Engines that own the pages of the device ---


def saved(blocks, *numbers):
    """Save blocks from pages of an engine, which are free again."""
    pages = blocks.device_pool.allocator.alloc(len(numbers))
    for page, hash in zip(pages.tolist(), names(*numbers), strict=True):
        blocks.fill(page, hash)
    blocks.device.synchronize()
    completion = blocks.cache.save(names(*numbers), pages)
    blocks.device_pool.allocator.free(pages)
    return completion


def assert_loaded(blocks, pages, *numbers):
    found = contents(blocks.device_pool)
    for page, hash in zip(pages, names(*numbers), strict=True):
        assert np.array_equal(found[page], blocks.bits(hash)), f"page {page}"


def test_held_blocks(device):
    """They are loaded where the engine says, and stay in host memory until they are released."""
    blocks = Blocks(device, 8, 4)
    saved(blocks, A, B, C).synchronize()
    held = blocks.cache.hold(names(A, B, C, D))
    assert (held.num_blocks, held.sources) == (3, ["host"] * 3)
    assert repr(held) == "<HeldBlocks, 3 of 4, held>"
    saved(blocks, 11, 12, 13, 14).synchronize()
    assert [blocks.cache.match([hash]).host for hash in names(A, B, C, 11, 12)] == [1] * 4 + [0]
    pages = blocks.device_pool.allocator.alloc(2).tolist()
    held.load(pages, first=1).synchronize()
    assert_loaded(blocks, pages, B, C)
    held.load(pages, blocks=[2, 0]).synchronize()
    assert_loaded(blocks, pages, C, A)
    for arguments, message in (
        ({"pages": pages, "first": 2}, "pages: expected at most 3 blocks, got 2 from 2 on"),
        ({"pages": pages[:1], "blocks": [3]}, "pages: expected at most 3 blocks, got 1 from 3 on"),
        ({"pages": pages, "blocks": [0]}, "pages: expected 1 like blocks, got 2"),
        ({"pages": [8]}, "below 8"),
    ):
        with pytest.raises(ValueError, match=message):
            held.load(**arguments)
    blocks.device_pool.allocator.free(pages)
    for _ in range(2):
        held.release()
    with pytest.raises(kv.KvcupyError, match="released"):
        held.load([0])
    saved(blocks, 21, 22, 23, 24).synchronize()
    assert blocks.cache.match(names(A)).host == 0
    blocks.assert_no_leak()


def test_held_blocks_come_from_a_store(device):
    """As many as half of host memory; one that does not come ends the prefix."""
    blocks = StoreBlocks(device, 4, 6)
    blocks.publish(A, B, C, D)
    pages = blocks.device_pool.allocator.alloc(3).tolist()
    with blocks.cache.hold(names(A, B, C, D)) as held:
        assert (held.num_blocks, held.sources) == (3, ["store"] * 3)
        held.load(pages).synchronize()
    assert_loaded(blocks, pages, A, B, C)
    blocks.publish(11, 12, 13)
    blocks.store.lacking = set(names(12))
    with blocks.cache.hold(names(11, 12, 13)) as held:
        assert held.num_blocks == 1
    blocks.device_pool.allocator.free(pages)
    blocks.assert_no_leak()


def test_a_save_does_not_wait_for_the_store(device):
    blocks = StoreBlocks(device, 4, 4)
    gate = Held(blocks.store, "put")
    saved(blocks, A, B, C, D).synchronize()
    assert saved(blocks, E, F).done(), "each other block must be put first"
    assert blocks.cache.match(names(E, F)).host == 0
    gate.open()
    assert blocks.cache.flush() == 0
    saved(blocks, E, F).synchronize()
    assert blocks.cache.match(names(E, F)).host == 2
    blocks.cache.flush()
    assert len(blocks.store.blocks) == 6
    blocks.assert_no_leak()


# --- Clearing and closing ---


def test_clear_leaves_the_stores_unless_they_are_to_be_cleared(device):
    blocks = StoreBlocks(device, 4, 4, stores=[None, None])
    for stores in (False, True):
        blocks.insert(names(1, 2))
        assert blocks.cache.flush() == 0
        blocks.cache.clear(stores=stores)
        assert blocks.cache.match(names(1, 2)) == (0, 0, 0 if stores else 2)
        assert blocks.blocks() == (set(), set())
    with pytest.raises(TypeError, match="stores"):
        blocks.cache.clear(stores=1)
    blocks.store.fail["clear"] = OSError("gone")
    blocks.cache.clear(stores=True)
    assert blocks.counts("errors") == (1,)


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


def test_what_the_cache_opens_it_closes(device, monkeypatch):
    plain = Blocks(device, 2, 2)
    opened = []

    def open_store(url, pool, *, model, heads):
        opened.append((url, model, heads, MemoryStore(pool)))
        return opened[-1][-1]

    monkeypatch.setattr(store_tier, "opener", open_store)
    mine, made = MemoryStore(plain.host_pool), []

    def make(pool, model):
        made.append((model, MemoryStore(pool)))
        return made[-1][1]

    pools = plain.device_pool, plain.host_pool
    blocks = Blocks(
        device, pools=pools, stores=["file:/kv", make, mine], model="m", heads=(1, 4)
    )  # fmt: skip
    assert [each[:3] for each in opened] == [("file:/kv", "m", (1, 4))]
    assert [model for model, _ in made] == ["m"]
    assert repr(blocks.cache) == "<TieredCache of 0 device, 0 host blocks, 3 stores>"
    blocks.insert(names(1))
    blocks.cache.close()
    assert [set(s.blocks) for s in (opened[0][-1], made[0][1], mine)] == [set(names(1))] * 3
    assert opened[0][-1].closed and made[0][1].closed and not mine.closed


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


AT_EXIT = """
import sys, time
sys.path[:0] = {path!r}
import numpy as np
import kvcupy as kv
from tiered_cases import StoreBlocks, names
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


# --- Metrics and threads ---


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
