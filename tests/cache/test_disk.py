"""The disk tier as its user sees it: blocks come back as written, one or several at a time."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from disk_cases import PAGE_BYTES, contents, open_tier, reads, run, write

from kvcupy.cache.tiered.disk_format import Layout


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tier"


@pytest.fixture
def tier(path):
    with open_tier(path) as tier:
        yield tier


# --- Round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_bytes", [1, 8, 1024, 4095, 4096, 4097, 65536, 3 * 2**20 + 1])
def test_blocks_come_back_as_written(path, page_bytes):
    hashes = [0, 2**128 - 1, 2**64 - 1, 2**127, 7]
    with open_tier(path, 5, page_bytes) as tier:
        for slot, block_hash in enumerate(hashes):
            write(tier, slot, block_hash)
        assert all(reads(tier, slot, h) for slot, h in reversed([*enumerate(hashes)]))
    with open_tier(path, 5, page_bytes) as tier:
        assert tier.entries() == [(h, slot) for slot, h in enumerate(hashes)]
        assert all(reads(tier, slot, h) for slot, h in enumerate(hashes))


def test_hashes_of_numpy_and_pages_of_its_arrays(tier):
    page = np.arange(PAGE_BYTES // 2).astype(ml_dtypes.bfloat16).reshape(2, -1)
    into = np.zeros_like(page)
    tier.write(np.int32(2), np.uint64(2**64 - 3), memoryview(page.view(np.uint16)))
    assert tier.read(2, 2**64 - 3, memoryview(into.view(np.uint16)))
    assert into.tobytes() == page.tobytes()


def test_parts_may_be_divided_otherwise_when_they_are_read(tier):
    whole = contents(5)
    empty = memoryview(np.zeros((0, 4), np.uint8))
    views = [whole[:1], empty, whole[1:4097], whole[4097:]]
    tier.write(0, 5, views)
    tier.write(1, 5, [whole[i : i + 1] for i in range(PAGE_BYTES)])  # more than one call takes
    for slot in (0, 1):
        assert reads(tier, slot, 5)
        for edges in ([0, 4096, PAGE_BYTES], range(PAGE_BYTES + 1)):
            into = np.zeros(PAGE_BYTES, np.uint8)
            assert tier.read(slot, 5, [memoryview(into[a:b]) for a, b in pairwise(edges)])
            assert into.tobytes() == whole.tobytes()


def test_the_system_may_move_less_than_was_asked_for(tier, monkeypatch):
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda f, parts, at, real=real: real(f, [parts[0][:999]], at))
    whole = contents(5)
    tier.write(3, 5, [whole[:1500], whole[1500:]])
    assert reads(tier, 3, 5)


def test_a_slot_has_what_was_written_last(tier):
    write(tier, 3, 1)
    write(tier, 3, 2)
    assert not reads(tier, 3, 1)
    assert reads(tier, 3, 2)  # asking for another hash does not empty it
    tier.drop(3)
    tier.drop(3)
    assert not reads(tier, 3, 2)
    assert tier.entries() == []


def test_reopening_gives_the_oldest_first(path):
    with open_tier(path) as tier:
        for slot, block_hash in ((4, 40), (1, 10), (3, 30), (0, 99)):
            write(tier, slot, block_hash)
        write(tier, 4, 41)
        tier.drop(0)
        assert tier.entries() == [(10, 1), (30, 3), (41, 4)]
    with open_tier(path) as tier:
        assert tier.entries() == [(10, 1), (30, 3), (41, 4)]
        write(tier, 1, 11)  # newer than all of the process before
    with open_tier(path) as tier:
        assert tier.entries() == [(30, 3), (41, 4), (11, 1)]
        assert "3 of 6 slots" in repr(tier)


# --- Several at a time ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 37])
def test_many_blocks_with_a_result_for_each(path, num_threads, count):
    order = np.random.default_rng(count).permutation(40)[:count].tolist()
    into = np.zeros((count + 1, PAGE_BYTES), np.uint8)
    with open_tier(path, 40, num_threads=num_threads) as tier:
        assert tier.write_many([(s, 100 + s, contents(100 + s)) for s in order]) == [None] * count
        assert tier.entries() == [(100 + s, s) for s in order]
        requests = [(s, 100 + s + s % 2, memoryview(into[i])) for i, s in enumerate(order)]
        assert tier.read_many(iter(requests)) == [s % 2 == 0 for s in order]
    for i, slot in enumerate(order):
        assert slot % 2 or into[i].tobytes() == contents(100 + slot).tobytes(), slot


def test_a_write_that_fails_leaves_the_others_of_its_batch(tier, monkeypatch):
    real = os.pwritev
    full = Layout(tier.num_slots, PAGE_BYTES).payload_at(2)

    def pwritev(descriptor, parts, offset):
        if offset == full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, parts, offset)

    write(tier, 2, 50)
    monkeypatch.setattr(os, "pwritev", pwritev)
    results = tier.write_many([(s, s, contents(s)) for s in range(5)])
    assert [r and r.errno for r in results] == [None, None, errno.ENOSPC, None, None]
    assert results[2].filename == str(tier.path)
    assert tier.entries() == [(s, s) for s in (0, 1, 3, 4)]
    assert not reads(tier, 2, 50)


def test_threads_share_a_tier_and_no_read_is_wrong(path):
    """All threads write and read the same few slots, in no order."""
    served = [0] * 4

    def work(me):
        rng = np.random.default_rng(me)
        for _ in range(60):
            slots = rng.permutation(4)[:3].tolist()
            chosen = [(s, int(rng.integers(3))) for s in slots]
            if rng.random() < 0.5:
                assert tier.write_many([(s, h, contents(h)) for s, h in chosen]) == [None] * 3
            into = [memoryview(bytearray(PAGE_BYTES)) for _ in chosen]
            items = [(s, h, room) for (s, h), room in zip(chosen, into, strict=True)]
            for (_, h, room), good in zip(items, tier.read_many(items), strict=True):
                served[me] += good
                assert not good or room == contents(h)

    with open_tier(path, 4, num_threads=3) as tier, ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, me) for me in range(4)]:
            future.result()
        for slot in range(4):  # nothing is stuck
            write(tier, slot, 8)
            assert reads(tier, slot, 8)
    assert min(served) > 0


def test_a_read_that_a_write_overtakes_leaves_the_new_block(tier, monkeypatch):
    write(tier, 1, 10)
    real = os.preadv

    def preadv(descriptor, parts, offset):
        monkeypatch.setattr(os, "preadv", real)
        write(tier, 1, 11)
        return real(descriptor, parts, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert not reads(tier, 1, 10)
    assert reads(tier, 1, 11)


def test_a_batch_that_is_interrupted_returns_when_no_thread_uses_its_memory(path, monkeypatch):
    me, working = threading.get_ident(), threading.Semaphore(0)
    done = []

    def preadv(descriptor, parts, offset):
        if threading.get_ident() == me:
            assert working.acquire(timeout=10)  # other threads are reading
            raise KeyboardInterrupt
        working.release()
        time.sleep(0.05)
        done.append(offset)
        return len(parts[0])

    with open_tier(path, num_threads=2) as tier:
        tier.write_many([(s, s, contents(s)) for s in range(4)])
        into = [(s, s, memoryview(bytearray(PAGE_BYTES))) for s in range(4)]
        monkeypatch.setattr(os, "preadv", preadv)
        with pytest.raises(KeyboardInterrupt):
            tier.read_many(into)
        assert 1 <= len(done) <= 3, "the other thread ends its block"


def test_close_waits_for_calls_of_other_threads(path, monkeypatch):
    tier = open_tier(path)
    inside, go_on = threading.Event(), threading.Event()
    real = os.pwritev

    def pwritev(descriptor, parts, offset):
        if parts[0].nbytes == PAGE_BYTES:
            inside.set()
            assert go_on.wait(10)
        return real(descriptor, parts, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(tier.write_many, [(s, s, contents(s)) for s in range(6)])
        assert inside.wait(10)
        closing = pool.submit(tier.close)
        with pytest.raises(TimeoutError):
            closing.result(0.05)
        go_on.set()
        assert writing.result() == [None] * 6
        closing.result()
    with open_tier(path) as tier:
        assert all(reads(tier, s, s) for s in range(6))


def test_after_close_every_call_says_so_and_no_thread_is_left(path):
    tier = open_tier(path)
    tier.write_many([(s, s, contents(s)) for s in range(6)])
    tier.close()
    tier.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("kvcupy disk")]
    into = memoryview(bytearray(PAGE_BYTES))
    for call in (
        tier.entries,
        tier.flush,
        lambda: tier.drop(0),
        lambda: write(tier, 0, 1),
        lambda: tier.read(0, 1, into),
        lambda: tier.write_many([(0, 1, into)]),
        lambda: tier.read_many([(0, 1, into)]),
    ):
        with pytest.raises(
            ValueError, match=r"disk: expected an open tier, got .*tier after close"
        ):
            call()


def test_blocks_can_be_written_at_the_end_of_the_interpreter(path):
    program = (
        "import atexit; from disk_cases import *\n"
        f"tier = open_tier({str(path)!r})\n"
        "blocks = [(s, s, contents(s)) for s in range(6)]\n"
        "atexit.register(lambda: print(tier.write_many(blocks)))"
    )
    assert run(program) == f"{[None] * 6}\n"
    with open_tier(path) as tier:
        assert all(reads(tier, s, s) for s in range(6))
