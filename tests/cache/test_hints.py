"""Hints of kv.TieredCache: retained, pinned, demoted and prefetched blocks."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from test_tiered_stateful import HASHES, Machine, run
from tiered_cases import Blocks
from tiered_store_cases import SharedBlocks, names

import kvcupy as kv
from kvcupy.cache.tiered import cache, holds, leases, tiers

A, B, C, D, E, F = names(*range(1, 7))
ACCEPTED = kv.Hint("accepted")


@pytest.fixture
def blocks(device):
    return Blocks(device, 6, 8)


class Clock:
    """The module `time`, whose time a test sets."""

    now = 1000.0
    perf_counter = staticmethod(time.perf_counter)

    def monotonic(self):
        return self.now

    def time(self):
        return 5e8 + self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (cache, holds, leases, tiers):
        monkeypatch.setattr(module, "time", clock)
    return clock


def insert_each(blocks, *hashes):
    for hash in hashes:
        blocks.insert([hash])


def evicted(blocks, count):
    """Evict blocks from the device, and return them."""
    before = blocks.blocks()[0]
    blocks.cache.evict(count)
    return before - blocks.blocks()[0]


def test_retained_blocks_are_evicted_last(blocks):
    insert_each(blocks, A, B, C, D)
    assert blocks.cache.retain([A, B]) == ACCEPTED
    assert blocks.order("device") == blocks.order("host") == [C, D, B, A]
    assert evicted(blocks, 3) == {C, D, B}


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "2q"])
def test_priorities(device, policy):
    blocks = Blocks(device, 6, 8, policy=policy)
    insert_each(blocks, A, B, C, D, E, F)
    for hash, priority in [(A, 2), (B, 1), (C, 0), (E, -1)]:
        assert blocks.cache.retain([hash], priority=priority) == ACCEPTED
    assert blocks.order("device") == [E, D, F, C, B, A]
    blocks.cache.retain([A], priority=-2)  # the later hint counts
    assert blocks.order("device") == [A, E, D, F, C, B]


def test_the_farthest_resume_time_is_evicted_first(blocks, clock):
    insert_each(blocks, A, B, C, D, E)
    for hash, wait_s in [(A, 30), (B, 3600), (C, 5)]:
        blocks.cache.retain([hash], resume_at=clock.time() + wait_s)
    assert blocks.order("device") == blocks.order("host") == [D, E, B, A, C]


def test_the_nearest_session_counts(blocks, clock):
    insert_each(blocks, A, B)
    blocks.cache.retain([A], resume_at=clock.time() + 5)
    blocks.cache.retain([A], resume_at=clock.time() + 500)
    blocks.cache.retain([B], resume_at=clock.time() + 50)
    assert blocks.order("device") == [B, A]
    clock.now += 20  # the time has passed, so a later one replaces it
    blocks.cache.retain([A], resume_at=clock.time() + 500)
    assert blocks.order("device") == [A, B]


def test_acquire_ends_a_resume_time_and_a_negative_priority(blocks, clock):
    insert_each(blocks, A, B, C, D)
    blocks.cache.retain([A], resume_at=clock.time() + 5)
    blocks.cache.retain([B], resume_at=clock.time() + 9, priority=1)
    blocks.cache.retain([C], priority=-1, ttl_s=1000)
    clock.now += 8.5
    for hash in (A, B, C):
        blocks.use([hash], known=1)
    assert blocks.order("device") == [D, A, C, B]
    assert set(blocks.tiers.hints.retained) == {B}
    assert blocks.tiers.hints.retained[B].resumes_at == ()


def test_hold_ends_a_resume_time_and_a_negative_priority(blocks, clock):
    insert_each(blocks, A, B, C)
    blocks.cache.retain([A], resume_at=clock.time() + 5)
    blocks.cache.retain([B], priority=-1, ttl_s=1000)
    assert blocks.order("host") == [B, C, A]
    clock.now += 4.5
    for hash in (A, B):
        blocks.cache.hold([hash]).release()
    assert blocks.order("host") == [C, A, B]


def test_an_acquire_of_one_session_leaves_the_times_of_others(blocks, clock):
    """A sub-agent resumes before its parent, which shares the block."""
    insert_each(blocks, A, B)
    blocks.cache.retain([A], resume_at=clock.time() + 100)
    for wait_s in (5, 50, 6):
        blocks.cache.retain([A], resume_at=clock.time() + wait_s)
        clock.now += wait_s
        blocks.use([A], known=1)
        assert blocks.tiers.hints.retained[A].resumes_at == (1100,)
    assert blocks.order("device") == [B, A]
    clock.now += 39
    blocks.use([A], known=1)
    assert not blocks.tiers.hints.retained


def test_a_time_that_has_passed_counts_until_there_is_a_later_one(blocks, clock):
    insert_each(blocks, A, B)
    blocks.cache.retain([A, B], resume_at=clock.time() + 30)
    clock.now += 20
    blocks.use([A], known=1)  # earlier than expected
    blocks.cache.retain([A], resume_at=clock.time() + 40)
    assert blocks.tiers.hints.retained[A].resumes_at == (1030, 1060)
    clock.now += 11
    blocks.cache.stats()
    assert blocks.tiers.hints.retained[A].resumes_at == (1060,)
    assert blocks.order("device") == blocks.order("host") == [A, B]  # B is overdue


def test_hints_expire(blocks, clock):
    insert_each(blocks, A, B, C)
    blocks.cache.retain([A, B], ttl_s=10)
    assert blocks.order("device") == [C, B, A]
    clock.now += 9.9
    blocks.cache.stats()
    assert blocks.order("device") == [C, B, A]
    blocks.cache.retain([A], ttl_s=10)
    clock.now += 0.2
    blocks.cache.stats()
    assert blocks.order("device") == [C, B, A] and set(blocks.tiers.hints.retained) == {A}
    clock.now += 10
    blocks.cache.stats()
    assert not blocks.tiers.hints.retained


def test_a_block_that_another_session_keeps_does_not_prolong_hints(blocks, clock):
    insert_each(blocks, A, B)
    blocks.cache.retain([A], resume_at=clock.time() + 1000)
    blocks.cache.retain([A, B], resume_at=clock.time() + 100)
    for seconds in (150, 51):
        assert set(blocks.tiers.hints.retained) == {A, B}
        clock.now += seconds
        blocks.cache.stats()
    assert set(blocks.tiers.hints.retained) == {A}


def test_a_resume_time_without_ttl_expires_when_it_has_long_passed(blocks, clock):
    insert_each(blocks, A, B)
    blocks.cache.retain([A], resume_at=clock.time() + 100)
    blocks.cache.retain([B], resume_at=clock.time() - 7)  # due
    clock.now += 61
    blocks.cache.stats()
    assert set(blocks.tiers.hints.retained) == {A}
    clock.now += 140
    blocks.cache.stats()
    assert not blocks.tiers.hints.retained


def test_replaced_hints_leave_no_entries(blocks):
    blocks.insert([A])
    for _ in range(5000):
        blocks.cache.retain([A], ttl_s=1000)
    assert len(blocks.tiers.hints._changes) < 1100


def test_release(blocks):
    insert_each(blocks, A, B, C)
    blocks.cache.retain([A, B])
    assert blocks.cache.release([A, C, F]) == ACCEPTED
    assert blocks.order("device") == [C, A, B]


def test_a_leased_block_keeps_its_hint(blocks):
    insert_each(blocks, A, B, C)
    blocks.cache.retain([A])
    with blocks.cache.acquire([A]):
        blocks.cache.evict(1)  # sets A aside, or not
        blocks.cache.retain([A], priority=1)
        blocks.cache.evict(1)
    insert_each(blocks, D)
    assert blocks.order("device") == [D, A]


def test_hints_go_with_the_blocks(device):
    blocks = Blocks(device, 2, 2)
    insert_each(blocks, A, B)
    blocks.cache.retain([A])
    blocks.evict_all()
    insert_each(blocks, C)  # on the host, B leaves
    assert blocks.blocks()[1] == {A, C}
    blocks.use([A], known=1)
    assert blocks.order("device") == [C, A]


def test_a_block_that_is_gone_has_no_hint(device):
    blocks = Blocks(device, 2, 1)
    insert_each(blocks, A)
    blocks.cache.retain([A])
    blocks.evict_all()
    insert_each(blocks, B)
    assert A not in set.union(*blocks.blocks())
    assert not blocks.tiers.hints.retained
    insert_each(blocks, A)
    assert blocks.order("device") == [B, A]


def test_clear_ends_hints(blocks):
    insert_each(blocks, A, B)
    blocks.cache.retain([A], pin=True)
    blocks.cache.clear()
    insert_each(blocks, A, B)
    assert blocks.order("device") == [A, B]
    assert blocks.tiers.listeners == []


def test_hints_keep_no_cache_alive(device):
    blocks = Blocks(device, 4, 4)
    insert_each(blocks, A)
    blocks.cache.retain([A], pin=True, ttl_s=3)
    blocks.settle()
    pool = weakref.ref(blocks.host_pool)
    gc.collect()
    gc.disable()
    try:
        del blocks
        assert pool() is None
    finally:
        gc.enable()


# --- Pins ---


def test_a_pinned_block_is_not_evicted_from_host_memory(device):
    blocks = Blocks(device, 2, 4)
    insert_each(blocks, A)
    assert blocks.cache.retain([A], pin=True) == ACCEPTED
    for hash in names(*range(10, 30)):
        blocks.insert([hash])
        blocks.evict_all()
    assert A in blocks.blocks()[1] and blocks.cache.stats()["lost"] > 0
    blocks.use([A], known=1)
    blocks.cache.release([A])
    for hash in names(*range(10, 30)):
        blocks.insert([hash])
        blocks.evict_all()
    assert A not in set.union(*blocks.blocks())


def test_a_pinned_block_is_not_evicted_from_disk(device, tmp_path):
    blocks = Blocks(device, 2, 4, disk=tmp_path / "kv", disk_bytes=4096 * 4)
    insert_each(blocks, A)
    blocks.cache.flush()
    blocks.cache.retain([A], pin=True)
    for hash in names(*range(10, 30)):
        blocks.insert([hash])
        blocks.evict_all()
    assert A in blocks.blocks()[2]


def test_pins_have_a_budget(device):
    blocks = Blocks(device, 6, 8)
    page_bytes = blocks.host_pool.page_bytes
    blocks = Blocks(device, 6, 8, pin_bytes=3 * page_bytes + 1)
    blocks.insert([A, B, C, D, E])
    assert blocks.cache.retain([A, B], pin=True) == ACCEPTED
    assert blocks.cache.retain([A, B], pin=True, priority=3) == ACCEPTED  # once each
    clipped = blocks.cache.retain([C, D], pin=True)
    assert clipped == kv.Hint("clipped", "3 blocks may be pinned")
    assert blocks.tiers.hints.pinned == {A, B, C}
    assert blocks.order("device") == [E, D, B, A, C]  # D is retained
    refused = blocks.cache.retain([E], pin=True)
    assert refused == kv.Hint("refused", "3 blocks may be pinned, and are")
    assert E not in blocks.tiers.hints.retained
    blocks.cache.release([A])
    assert blocks.cache.retain([E], pin=True) == ACCEPTED


def test_no_more_is_pinned_than_host_memory_holds(device):
    blocks = Blocks(device, 4, 2, pin_bytes=2**40)
    blocks.insert([A, B, C])
    assert blocks.cache.retain([A, B, C], pin=True).outcome == "clipped"
    blocks.cache.evict(3)
    assert set(blocks.blocks()[1]) == {A, B} == blocks.tiers.hints.pinned


def test_the_default_budget_is_a_quarter_of_host_memory(device):
    blocks = Blocks(device, 6, 8)
    blocks.insert([A, B, C])
    assert blocks.cache.retain([A, B, C], pin=True).outcome == "clipped"
    assert blocks.tiers.hints.pinned == {A, B}
    none = Blocks(device, 6, 8, pin_bytes=0)
    none.insert([A])
    assert none.cache.retain([A], pin=True).outcome == "refused"


def test_other_hints_leave_pinned_blocks_alone(blocks, clock):
    blocks.insert([A, B])
    blocks.cache.retain([A], pin=True)
    blocks.cache.retain([A, B], resume_at=clock.time() + 1, ttl_s=1)
    blocks.use([A, B], known=2)
    clock.now += 100
    blocks.cache.stats()
    assert blocks.tiers.hints.pinned == set(blocks.tiers.hints.retained) == {A}


def test_a_pin_expires(blocks, clock):
    blocks.insert([A])
    blocks.cache.retain([A], pin=True, ttl_s=5)
    clock.now += 6
    blocks.cache.stats()
    assert not blocks.tiers.hints.pinned and not blocks.tiers.hints.retained


# --- Other hints ---


def test_demote(blocks):
    insert_each(blocks, A, B, C)
    with blocks.cache.acquire([A]):
        assert blocks.cache.demote([A, B, F]) == kv.Hint("clipped", "1 blocks are leased")
        assert blocks.cache.demote([A]) == kv.Hint("refused", "1 blocks are leased")
    assert blocks.blocks()[:2] == ({A, C}, {A, B, C})
    assert blocks.cache.demote([A]) == ACCEPTED
    assert blocks.cache.demote([A]) == kv.Hint("refused", "no block is on the device")
    blocks.use([A], known=1)


def test_demote_saves_what_is_only_on_the_device(device, tmp_path):
    blocks = Blocks(device, 4, 2, write="back", disk=tmp_path / "kv", disk_bytes=4096 * 10)
    blocks.insert([A, B, C, D])
    assert blocks.cache.demote([A, B, C, D]) == ACCEPTED
    assert blocks.blocks()[0] == set() and set.union(*blocks.blocks()) == {A, B, C, D}
    blocks.use([A, B], known=2)


def test_demote_without_space_below(device):
    blocks = Blocks(device, 4, 2, write="back")
    blocks.insert([A, B, C, D])
    hint = blocks.cache.demote([A, B, C, D])
    assert hint == kv.Hint("clipped", "there was no space for 2 blocks below the device")
    assert blocks.blocks()[1] == {A, B}


def test_prefetch(device, monkeypatch):
    alone = Blocks(device, 4, 4)
    alone.insert([A])
    assert alone.cache.prefetch([A]) == ACCEPTED
    assert alone.cache.prefetch([A, B]) == kv.Hint("refused", "there is no shared store")
    sharing = SharedBlocks(device, 4, 2)
    sharing.publish(*range(1, 4))
    assert sharing.cache.prefetch([A, B]) == ACCEPTED
    sharing.idle()
    assert sharing.blocks()[1]
    many = names(*range(100, 120))
    assert sharing.cache.prefetch(many).outcome == "clipped"


def test_what_is_not_cached(blocks):
    assert blocks.cache.retain([A]) == kv.Hint("refused", "no block is cached")
    assert blocks.cache.retain([]) == ACCEPTED
    blocks.insert([A])
    assert blocks.cache.retain([A, B]) == kv.Hint("clipped", "1 of 2 blocks are cached")


def test_arguments(device, blocks):
    for options, error, message in [
        ({"priority": 1.5}, TypeError, "priority"),
        ({"ttl_s": -1}, ValueError, "ttl_s"),
        ({"ttl_s": "1"}, TypeError, "ttl_s"),
        ({"pin": 1}, TypeError, "pin"),
        ({"resume_at": "soon"}, TypeError, "resume_at"),
        ({"resume_at": float("nan")}, ValueError, "resume_at"),
        ({"resume_at": 10**400}, ValueError, "resume_at"),
    ]:
        with pytest.raises(error, match=rf"^{message}: expected"):
            blocks.cache.retain([A], **options)
    for bad, error in [(-1, ValueError), (1.5, TypeError)]:
        with pytest.raises(error, match=r"^pin_bytes: "):
            Blocks(device, 2, 2, pin_bytes=bad)
    blocks.cache.close()
    for call in ("retain", "demote", "release", "prefetch"):
        with pytest.raises(kv.KvcupyError, match="closed"):
            getattr(blocks.cache, call)([A])


class HintedMachine(Machine):
    """Hints at any time: no block is lost, mixed up or leaked, and pinned ones stay."""

    @rule(
        hashes=HASHES, priority=st.integers(-1, 1), pin=st.booleans(),
        wait_s=st.one_of(st.none(), st.integers(0, 10)), ttl_s=st.sampled_from([None, 0, 1000]),
    )  # fmt: skip
    def retain(self, hashes, priority, pin, wait_s, ttl_s):
        resume_at = None if wait_s is None else time.time() + wait_s
        hint = self.call(
            lambda: self.blocks.cache.retain(
                hashes, priority=priority, pin=pin, ttl_s=ttl_s, resume_at=resume_at
            )
        )
        known = set.union(*self.blocks.blocks()) & set(hashes)
        assert (hint.outcome == "accepted") <= (known == set(hashes))
        assert (hint.outcome == "refused") >= (bool(hashes) and not known)

    @rule(hashes=HASHES)
    def release(self, hashes):
        self.call(self.blocks.cache.release, hashes)

    @rule(hashes=HASHES)
    def demote(self, hashes):
        before, *_ = self.blocks.blocks()
        hint = self.call(self.blocks.cache.demote, hashes)
        if hint.outcome == "accepted" and not self.failures:
            device, *_ = self.blocks.blocks()
            assert not device & set(hashes)
            assert set(hashes) & before <= set.union(*self.blocks.blocks())

    @invariant()
    def hinted(self):
        known = self.blocks.tiers
        if (hints := known.hints) is None:
            return
        assert all(hash in known for hash in hints.retained)
        assert hints.pinned <= set(hints.retained)
        assert len(hints.pinned) <= self.blocks.host_pool.num_pages // 4
        for tier in (known.device, known.host, known.disk):
            if tier is not None:
                places = [
                    tier.order._key_of.get(hash, (-0.5, 0.0)) for hash in tier.order.victims()
                ]
                assert places == sorted(places)


def test_any_sequence_of_calls_with_hints(device):
    run(HintedMachine, device, 100)
