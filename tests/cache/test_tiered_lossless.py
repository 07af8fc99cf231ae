"""kv.TieredCache: while the stores have room no inserted block is lost, and nothing waits for long.

Each guard has a control that removes it and sees its test fail.
"""

from __future__ import annotations

import logging
import threading
import time

import pytest
from engine_cases import PATIENCE_S, poll
from tiered_cases import Blocks, in_time
from tiered_store_cases import Held, MemoryStore, StoreBlocks, names

import kvcupy as kv
from kvcupy.cache.tiered import store_tier, tiers
from kvcupy.cache.tiered.page_tier import PageTier
from kvcupy.cache.tiered.store_tier import StoreTier

POLICIES = pytest.mark.parametrize("write", ["through", "back"])


def insert_quickly(blocks, hashes, at_once=2):
    """Insert blocks one after the other, evicting others from the device when it is full."""
    for i in range(0, len(hashes), at_once):
        some = hashes[i : i + at_once]
        blocks.cache.evict(max(0, len(some) - blocks.device_pool.allocator.num_free))
        blocks.insert(some)


def assert_found(blocks, hashes, at_once=2):
    """Every block can be acquired, and is whole."""
    assert blocks.cache.match(hashes).stores == len(hashes)
    for i in range(0, len(hashes), at_once):
        some = hashes[i : i + at_once]
        blocks.use(some, known=len(some))


# Nothing is lost ---------------------------------------------------------------------------------


def sixty_blocks(device, write, number, capacity=256, *, is_late=False):
    blocks = StoreBlocks(device, 4, 6, write=write, stores=[None] * number)
    for store in blocks.stores:
        store.capacity = capacity
    gate = Held(blocks.store, "put") if is_late else None
    hashes = names(*range(60))
    in_time(lambda: insert_quickly(blocks, hashes))
    if gate is not None:
        gate.open()
        blocks.idle()
    return blocks, hashes


@POLICIES
@pytest.mark.parametrize("number", [1, 2, 3])
def test_sixty_blocks_through_six_host_pages(device, write, number):
    blocks, hashes = sixty_blocks(device, write, number)
    assert_found(blocks, hashes)
    assert blocks.cache.stats()["lost"] == 0
    assert blocks.cache.flush() == 0
    for store in blocks.stores:
        assert set(store.blocks) == set(hashes)
    blocks.assert_no_leak()


@POLICIES
def test_without_backpressure_sixty_blocks_are_not_all_found(device, write, monkeypatch):
    monkeypatch.setattr(StoreTier, "usable_bits", 0)
    blocks, hashes = sixty_blocks(device, write, 1, is_late=True)
    assert blocks.cache.match(hashes).stores < 60 and blocks.cache.stats()["lost"] > 0


def save_in_pieces(blocks, hashes):
    """What an engine saves that owns the device's pages: `flush` makes room for more."""
    pages = blocks.device_pool.allocator.alloc(4)
    for i in range(0, len(hashes), 4):
        some = hashes[i : i + 4]
        for page, hash in zip(pages.tolist(), some, strict=True):
            blocks.fill(page, hash)
        blocks.device.synchronize()
        blocks.cache.save(some, pages).synchronize()
        assert blocks.cache.flush() == 0
    blocks.device_pool.allocator.free(pages)


@POLICIES
def test_saved_blocks_reach_the_store(device, write):
    blocks, hashes = StoreBlocks(device, 4, 6, write=write), names(*range(40))
    in_time(lambda: save_in_pieces(blocks, hashes))
    assert set(blocks.store.blocks) == set(hashes)
    blocks.assert_no_leak()


@POLICIES
@pytest.mark.parametrize("call", ["flush", "close"])
@pytest.mark.parametrize("on_host", [2, 4, 16])
def test_flush_and_close_write_what_is_only_above(device, write, call, on_host):
    """On the device and in host memory, also where host memory has few pages."""
    blocks = StoreBlocks(device, 8, on_host, write=write, stores=[None, None])
    hashes = names(*range(8))
    blocks.insert(hashes)
    with blocks.cache.acquire(hashes[:1]):  # a leased block, too
        outcome = in_time(getattr(blocks.cache, call))
    assert outcome == (0 if call == "flush" else None)
    for store in blocks.stores:
        assert set(store.blocks) == set(hashes)
    again = StoreBlocks(device, 8, on_host, write=write, store=blocks.store)
    assert_found(again, hashes, at_once=1)
    for each in (blocks, again):
        each.cache.close()
        for pool in (each.device_pool, each.host_pool):
            pool.allocator.check_leaks()


def test_a_flush_that_only_waits_for_puts_leaves_blocks_above(device, monkeypatch):
    """The control of the test before: blocks that only the device has must be saved."""
    monkeypatch.setattr(tiers.GroupTiers, "only_on_device", lambda self, copies: [])
    blocks = StoreBlocks(device, 8, 16, write="back")
    blocks.insert(names(*range(8)))
    blocks.cache.flush()
    assert blocks.store.blocks == {}


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


def test_evicted_blocks_are_known_below(device):
    """A block that all stores have is neither saved nor put again when it leaves the device."""
    blocks = StoreBlocks(device, 4, 4)
    blocks.insert(names(1, 2, 3, 4))
    assert blocks.cache.flush() == 0
    blocks.host_pool.allocator.free(blocks.cache.take_host_pages(4))
    assert blocks.blocks() == (set(names(1, 2, 3, 4)), set())
    puts, saved = len(blocks.store.asked("put")), blocks.cache.stats()["save_bytes"]
    blocks.evict_all()
    assert blocks.cache.flush() == 0
    assert len(blocks.store.asked("put")) == puts
    assert blocks.cache.stats()["save_bytes"] == saved and blocks.cache.stats()["lost"] == 0
    assert_found(blocks, names(1, 2, 3, 4))
    blocks.assert_no_leak()


def test_a_block_that_a_store_lacks_is_saved_again(device):
    """Its host copy may go while the device has the block; then the device's may not."""
    blocks = StoreBlocks(device, 4, 2)
    gate = Held(blocks.store, "put")
    blocks.insert(names(1))
    assert gate.entered.wait(PATIENCE_S)
    blocks.insert(names(2))
    blocks.settle()
    blocks.host_pool.allocator.free(blocks.cache.take_host_pages(1))  # of block 2
    gate.open()
    blocks.idle()
    assert set(blocks.store.blocks) == set(names(1))
    blocks.evict_all()
    assert blocks.cache.flush() == 0
    assert set(blocks.store.blocks) == set(names(1, 2))


# Waits -------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    """Calls that need room wait for stores briefly."""
    run = tiers.GroupTiers.run

    def run_briefly(self, step, *, patience_s=5.0, **options):
        return run(self, step, patience_s=min(patience_s, 0.05), **options)

    monkeypatch.setattr(tiers.GroupTiers, "run", run_briefly)


def full_of_unwritten(device):
    """A cache whose host memory is full of blocks whose put does not end; the device has more."""
    blocks = StoreBlocks(device, 4, 2)
    gate = Held(blocks.store, "put")
    blocks.insert(names(1, 2))
    blocks.evict_all()
    blocks.insert(names(3, 4, 5, 6))
    assert gate.entered.wait(PATIENCE_S)
    blocks.settle()
    return blocks, gate


def test_calls_that_need_room_wait_for_the_store_and_then_raise(device, impatient):
    blocks, gate = full_of_unwritten(device)
    for call in (lambda: blocks.cache.evict(1), lambda: blocks.cache.take_host_pages(1)):
        with pytest.raises(kv.CacheFull, match=r"^(num_blocks|n): expected room"):
            in_time(call)
    assert blocks.blocks() == (set(names(3, 4, 5, 6)), set(names(1, 2)))
    assert blocks.cache.stats()["lost"] == 0
    gate.open()
    blocks.idle()
    blocks.evict_all()
    assert_found(blocks, names(1, 2, 3, 4, 5, 6), at_once=1)
    blocks.assert_no_leak()


def test_a_call_that_needs_room_gets_it_when_the_store_answers(device):
    blocks, gate = full_of_unwritten(device)
    waiting = threading.Thread(target=blocks.evict_all, daemon=True)
    waiting.start()
    assert not poll(lambda: not waiting.is_alive(), 0.1)
    gate.open()
    waiting.join(PATIENCE_S)
    assert blocks.blocks()[0] == set() and blocks.cache.stats()["lost"] == 0
    assert_found(blocks, names(1, 2, 3, 4, 5, 6), at_once=1)


def test_acquire_brings_fewer_blocks_where_room_is_lacking(device, impatient):
    """Of host memory, for what it replaces on the device: nothing is dropped for it."""
    blocks, gate = full_of_unwritten(device)
    with in_time(lambda: blocks.cache.acquire(names(1, 2))) as lease:
        assert lease.num_blocks == 0
    with in_time(lambda: blocks.cache.acquire([*names(3), *names(1)])) as lease:
        lease.wait()
        blocks.assert_holds(lease, names(3))
    assert blocks.cache.stats()["lost"] == 0
    gate.open()
    blocks.idle()
    for hash in names(1, 2):
        blocks.use([hash], known=1)


@pytest.mark.parametrize("call", ["match", "get", "put"])
def test_hot_blocks_do_not_wait_for_a_slow_store(device, call):
    blocks = StoreBlocks(device, 4, 8)
    blocks.insert(names(1, 2))
    assert blocks.cache.flush() == 0
    blocks.cache.evict(1)
    blocks.publish(9)
    gate = Held(blocks.store, call)
    if call == "put":
        blocks.insert(names(3))
    else:
        blocks.cache.prefetch(names(9))
    assert gate.entered.wait(PATIENCE_S)
    assert in_time(lambda: blocks.cache.match(names(1, 2))).host == 2
    in_time(lambda: blocks.use(names(1, 2), known=2))
    in_time(lambda: blocks.insert(names(4)))
    in_time(lambda: blocks.cache.evict(1))
    in_time(blocks.cache.stats)
    assert blocks.cache.stats()["lost"] == 0
    gate.open()
    blocks.assert_no_leak()


@pytest.mark.parametrize("call", ["match", "get", "put", "clear"])
def test_no_lock_is_held_during_a_call_of_a_store(device, call):
    blocks, free = StoreBlocks(device, 4, 4), []

    def look(name, when):
        if name == call:
            lock = blocks.cache._tiers[0].lock
            free.append(lock.acquire(timeout=PATIENCE_S))
            lock.release()

    blocks.store._pass = look
    blocks.publish(9)
    blocks.use(names(9), known=1)
    blocks.insert(names(1, 2))
    blocks.evict_all()
    blocks.idle()
    blocks.cache.match(names(1, 2, 3))
    blocks.cache.clear(stores=True)
    assert free and all(free)


# Stores that fail --------------------------------------------------------------------------------


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


def test_a_store_that_does_not_return_holds_up_others_only_briefly(device, monkeypatch):
    monkeypatch.setattr(store_tier, "_STORE_TIMEOUT_S", 0.05)
    blocks = StoreBlocks(device, 4, 4, stores=[None, None])
    gate = Held(blocks.store, "put")
    in_time(lambda: insert_quickly(blocks, names(*range(20))), 4)
    assert gate.entered.is_set() and blocks.cache.stats()["lost"] > 0
    gate.open()
    blocks.idle()
    blocks.assert_no_leak()


@POLICIES
def test_blocks_that_a_full_store_refuses_may_go(device, write):
    blocks = StoreBlocks(device, 4, 4, write=write)
    blocks.store.capacity = 5
    hashes = names(*range(20))
    in_time(lambda: insert_quickly(blocks, hashes))
    blocks.idle()
    known = set.union(*blocks.blocks()) | set(blocks.store.blocks)
    lost = blocks.cache.stats()["lost"]
    assert lost == 20 - len(known) > 0
    assert blocks.counts("full")[0] >= lost
    blocks.assert_no_leak()


# Several stores ----------------------------------------------------------------------------------


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


def test_a_block_that_no_store_delivers_ends_the_lease(device):
    blocks = StoreBlocks(device, 4, 16, stores=[None, None])
    for store in blocks.stores:
        store.blocks.update({hash: blocks.values(hash) for hash in names(1, 2, 3)})
        store.lacking = set(names(2))
    blocks.use(names(1, 2, 3), known=1)
    blocks.idle()
    blocks.assert_no_leak()


def test_a_slow_first_store_leaves_blocks_of_the_second_for_later(device):
    blocks = StoreBlocks(device, 4, 8, stores=[None, None])
    blocks.stores[1].blocks.update({hash: blocks.values(hash) for hash in names(1, 2)})
    gate = Held(blocks.store, "match")
    with in_time(lambda: blocks.cache.acquire(names(1, 2), deadline_s=0.02)) as lease:
        assert lease.num_blocks == 0
    gate.open()
    blocks.idle()
    assert blocks.cache.match(names(1, 2)).host == 2, "late blocks arrive"
    blocks.use(names(1, 2), known=2)


# Opening, clearing and closing -------------------------------------------------------------------


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


def test_a_put_in_progress_is_over_before_the_stores_are_cleared(device):
    blocks = StoreBlocks(device, 4, 4)
    gate = Held(blocks.store, "put")
    blocks.insert(names(1))
    assert gate.entered.wait(PATIENCE_S)
    blocks.settle()
    clearing = threading.Thread(target=lambda: blocks.cache.clear(stores=True), daemon=True)
    clearing.start()
    assert poll(lambda: blocks.blocks()[1] == set(), PATIENCE_S)
    assert blocks.store.asked("clear") == []
    gate.open()
    clearing.join(PATIENCE_S)
    assert blocks.store.blocks == {}
    blocks.assert_no_leak()


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


def test_a_store_that_is_in_a_call_is_closed_after_it(device):
    plain = Blocks(device, 2, 2)
    store = MemoryStore(plain.host_pool)
    blocks = Blocks(device, pools=(plain.device_pool, plain.host_pool), stores=[lambda *_: store])
    gate = Held(store, "put")
    blocks.insert(names(1))
    assert gate.entered.wait(PATIENCE_S)
    in_time(lambda: blocks.cache.close(deadline_s=0.02))
    assert not store.closed
    gate.open()
    assert poll(lambda: store.closed, PATIENCE_S)


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


# Controls ----------------------------------------------------------------------------------------


def forgetting(name):
    """Let a page tier forget what its attribute has, as if nothing had been noted."""
    genuine = PageTier.choose

    def choose(self, *arguments, **options):
        getattr(self, name).clear()
        return genuine(self, *arguments, **options)

    return choose


@POLICIES
def test_without_the_marks_of_unwritten_blocks_some_are_lost(device, write, monkeypatch):
    monkeypatch.setattr(PageTier, "choose", forgetting("unwritten"))
    blocks, _ = sixty_blocks(device, write, 1, is_late=True)
    known = set.union(*blocks.blocks()) | set(blocks.store.blocks)
    assert len(known) < 60


def test_a_put_that_is_not_repeated_loses_blocks(device, monkeypatch):
    genuine = StoreTier._note_put

    def note_put(self, on, state, page, outcome):
        state.retried.add(on.host.hashes[page])
        genuine(self, on, state, page, outcome)

    monkeypatch.setattr(StoreTier, "_note_put", note_put)
    with pytest.raises(AssertionError):
        test_a_put_that_fails_once_loses_nothing(device, "through")
