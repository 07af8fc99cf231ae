"""kv.TieredCache over a disk that is slow or fails: only calls that need it wait."""

from __future__ import annotations

import errno
import logging
import threading
import time
from types import SimpleNamespace

import pytest
from tiered_cases import Blocks, in_time

import kvcupy as kv
from kvcupy.cache.tiered import disk_blocks
from kvcupy.cache.tiered.disk import DiskTier

A, B, C, D, E, F, G, H = (2**64 + number for number in range(8))


class SlowDisk:
    """Holds up the reads or the writes of a file until it is opened."""

    def __init__(self, monkeypatch, name):
        self.calls = []  # the hashes of each call
        self.began, self._gate = threading.Semaphore(0), threading.Event()
        real = getattr(DiskTier, name)

        def call(tier, items):
            items = list(items)
            self.calls.append([hash for _, hash, _ in items])
            self.began.release()
            assert self._gate.wait(10)
            return real(tier, items)

        monkeypatch.setattr(DiskTier, name, call)

    def wait_for_call(self):
        assert self.began.acquire(timeout=5)

    def open(self):
        self._gate.set()


class Background:
    """A call in another thread."""

    def __init__(self, function):
        self._outcome = []
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function):
        try:
            self._outcome.append((function(), None))
        except BaseException as error:
            self._outcome.append((None, error))

    def is_over(self, patience_s=0.1):
        self._thread.join(patience_s)
        return bool(self._outcome)

    def result(self):
        self._thread.join(10)
        result, error = self._outcome[0]
        if error is not None:
            raise error
        return result


def file_of(slots):
    return 4096 * (2 + slots)


def write_down(blocks, hashes):
    for hash in hashes:
        blocks.insert([hash])
        blocks.evict_all()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def on_disk(device, path):
    """A cache with A and B on disk, C to F also in host memory, and E on the device."""
    blocks = Blocks(device, 4, 4, disk=path, disk_bytes=file_of(8))
    write_down(blocks, [A, B, C, D, E, F])
    assert blocks.blocks() == (set(), {C, D, E, F}, {A, B})
    blocks.use([E], known=1)
    return blocks


# --- Calls that wait ---


def test_hot_blocks_do_not_wait_for_a_slow_read(on_disk, monkeypatch):
    slow = SlowDisk(monkeypatch, "read_many")
    cold = Background(lambda: on_disk.cache.acquire([A]))
    slow.wait_for_call()
    cache = on_disk.cache
    assert in_time(lambda: cache.match([E])) == (1, 1, 1, 1)
    in_time(lambda: on_disk.use([E], known=1))  # on the device
    in_time(lambda: on_disk.use([D], known=1))  # in host memory
    in_time(lambda: on_disk.insert([G]))
    in_time(lambda: cache.evict(1))
    in_time(cache.stats)
    assert not cold.is_over()
    slow.open()
    with cold.result() as lease:
        lease.wait()
        on_disk.assert_holds(lease, [A])
    assert cache.stats()["lost"] == 0 and cache.stats()["disk_hits"] == 1
    on_disk.assert_no_leak()


def test_hot_blocks_do_not_wait_for_a_slow_write(device, path, monkeypatch):
    blocks = Blocks(device, 4, 2, disk=path, disk_bytes=file_of(8), write="back")
    write_down(blocks, [A, B])
    blocks.insert([C])  # has no page in host memory, unless A goes to disk
    slow = SlowDisk(monkeypatch, "write_many")
    eviction = Background(lambda: blocks.cache.evict(1))
    slow.wait_for_call()
    assert slow.calls == [[A]]
    in_time(lambda: blocks.use([B], known=1))
    in_time(lambda: blocks.use([A], known=1))  # still in host memory
    in_time(lambda: blocks.use([C], known=1))
    assert not eviction.is_over()
    slow.open()
    eviction.result()
    for hash in (A, B, C):
        blocks.use([hash], known=1)
    assert blocks.cache.stats()["lost"] == 0
    blocks.assert_no_leak()


def test_an_eviction_waits_for_pages_in_use_by_a_read_and_loses_nothing(device, path, monkeypatch):
    blocks = Blocks(device, 4, 2, disk=path, disk_bytes=file_of(8), write="back")
    write_down(blocks, [A, B, C, D])
    blocks.insert([E])
    slow = SlowDisk(monkeypatch, "read_many")
    cold = Background(lambda: blocks.cache.acquire([A, B]))  # in both host pages
    slow.wait_for_call()
    eviction = Background(lambda: blocks.cache.evict(1))
    assert not eviction.is_over()
    slow.open()
    cold.result().release()
    eviction.result()
    for hash in (A, B, C, D, E):
        blocks.use([hash], known=1)
    assert blocks.cache.stats()["lost"] == 0
    blocks.assert_no_leak()


# --- Transactions stay whole ---


def test_two_acquires_of_one_block_read_it_once(on_disk, monkeypatch):
    slow = SlowDisk(monkeypatch, "read_many")
    first = Background(lambda: on_disk.cache.acquire([A, B]))
    slow.wait_for_call()
    second = Background(lambda: on_disk.cache.acquire([A]))
    assert not second.is_over()
    slow.open()
    for acquire, hashes in ((first, [A, B]), (second, [A])):
        with acquire.result() as lease:
            lease.wait()
            on_disk.assert_holds(lease, hashes)
    assert slow.calls == [[A, B]]
    stats = on_disk.cache.stats()
    assert (stats["disk_hits"], stats["disk_read_bytes"]) == (2, 2 * on_disk.host_pool.page_bytes)
    on_disk.assert_no_leak()


def test_a_block_that_is_being_read_keeps_its_slot(device, path, monkeypatch):
    """The disk is full, and A is the next to be evicted from it."""
    blocks = Blocks(device, 4, 2, disk=path, disk_bytes=file_of(2), write="back")
    write_down(blocks, [A, B, C, D])
    assert blocks.blocks() == (set(), {C, D}, {A, B}) and blocks.order("disk") == [A, B]
    slow = SlowDisk(monkeypatch, "read_many")
    cold = Background(lambda: blocks.cache.acquire([A]))  # C goes to disk for it
    slow.wait_for_call()
    assert blocks.blocks()[2] == {A, C}
    blocks.insert([E])
    in_time(lambda: blocks.cache.evict(1))  # D goes to disk
    assert blocks.blocks()[2] == {A, D}
    slow.open()
    with cold.result() as lease:
        lease.wait()
        blocks.assert_holds(lease, [A])
    blocks.assert_no_leak()


@pytest.mark.parametrize("call", ["clear", "close"])
@pytest.mark.parametrize("name", ["read_many", "write_many"])
def test_clear_and_close_wait_for_the_disk(device, path, monkeypatch, call, name):
    blocks = Blocks(device, 4, 2, disk=path, disk_bytes=file_of(8), write="back")
    write_down(blocks, [A, B, C])
    blocks.insert([D])
    slow = SlowDisk(monkeypatch, name)
    if name == "read_many":
        begun = Background(lambda: blocks.cache.acquire([A]).release())
    else:
        begun = Background(lambda: blocks.cache.evict(1))
    slow.wait_for_call()
    ended = Background(getattr(blocks.cache, call))
    assert not ended.is_over()
    slow.open()
    try:
        begun.result()
    except kv.KvcupyError as error:
        assert call == "close" and "closed" in str(error)
    try:
        ended.result()
    except kv.KvcupyError as error:
        assert "leased" in str(error)
        blocks.cache.clear()
    if call == "clear":
        assert blocks.cache.match([A]) == (0, 0, 0, 0)
        blocks.assert_no_leak()
        blocks.cache.close()
    for pool in (blocks.device_pool, blocks.host_pool):
        pool.allocator.check_leaks()
    again = Blocks(device, 4, 2, disk=path, disk_bytes=file_of(8))  # the file is closed
    assert again.cache.match([A])[2] == (call == "close")
    again.cache.close()


def test_an_interrupted_read_frees_its_pages(on_disk, monkeypatch):
    def interrupt(tier, items):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "read_many", interrupt)
        with pytest.raises(KeyboardInterrupt):
            on_disk.cache.acquire([A])
    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "write_many", interrupt)
        with pytest.raises(KeyboardInterrupt):
            on_disk.cache.flush()
    for hash in (A, B, C):
        on_disk.use([hash], known=1)
    assert on_disk.cache.stats()["disk_errors"] == 0
    on_disk.assert_no_leak()


# --- Failures ---


def clock(monkeypatch):
    """Replace the clock of the disk tier; return its time, in a list."""
    now = [1000.0]
    times = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(disk_blocks, "time", times)
    return now


def failing_reads(monkeypatch, hashes):
    """Let the disk fail to read blocks."""
    real = DiskTier.read_many

    def read_many(tier, items):
        items = list(items)
        results = real(tier, items)
        error = OSError(errno.EIO, "Input/output error")
        return [error if h in hashes else r for (_, h, _), r in zip(items, results, strict=True)]

    monkeypatch.setattr(DiskTier, "read_many", read_many)


def test_a_read_error_is_a_miss_and_forgets_nothing(on_disk, monkeypatch):
    before = on_disk.blocks()[2]
    with monkeypatch.context() as patch:
        failing_reads(patch, {B})
        with on_disk.cache.acquire([A, B]) as lease:
            lease.wait()
            on_disk.assert_holds(lease, [A])
    stats = on_disk.cache.stats()
    assert (stats["disk_errors"], stats["disk_hits"], stats["misses"], stats["lost"]) == (
        1, 1, 1, 0
    )  # fmt: skip
    assert on_disk.blocks()[2] >= before
    on_disk.use([A, B], known=2)
    on_disk.assert_no_leak()


def test_a_disk_that_keeps_failing_is_skipped_for_a_while(on_disk, monkeypatch, caplog):
    now = clock(monkeypatch)
    cache, slots = on_disk.cache, dict(on_disk.tiers.disk.slots)
    with caplog.at_level(logging.WARNING, "kvcupy"), monkeypatch.context() as patch:
        failing_reads(patch, {A, B})
        for _ in range(5):
            assert cache.match([A])[2] == 1
            on_disk.use([A], known=0)
        assert cache.match([A])[2] == 0
        on_disk.use([A], known=0)
        assert cache.stats()["disk_errors"] == 5
    assert len(caplog.records) == 1, "the log is bounded"
    on_disk.use([D], known=1)  # other tiers serve
    now[0] += 11
    assert on_disk.tiers.disk.slots.items() >= slots.items()
    on_disk.use([A], known=1)
    on_disk.use([B], known=1)
    on_disk.assert_no_leak()


def test_a_disk_that_fails_again_is_skipped_again_at_once(on_disk, monkeypatch):
    now = clock(monkeypatch)
    failing_reads(monkeypatch, {A})
    for _ in range(5):
        on_disk.use([A], known=0)
    now[0] += 11
    on_disk.use([A], known=0)
    assert on_disk.cache.match([A])[2] == 0
    now[0] += 11
    on_disk.use([B], known=1)
    on_disk.use([A], known=0)
    assert on_disk.cache.match([A])[2] == 1, "one failure after a success"


def test_what_is_skipped_is_not_written_either(device, path, monkeypatch):
    blocks = Blocks(device, 2, 1, disk=path, disk_bytes=file_of(8), write="back")
    calls = []

    def write_many(tier, items):
        calls.append(len(items))
        return [OSError(errno.ENOSPC, "No space left on device") for _ in items]

    monkeypatch.setattr(DiskTier, "write_many", write_many)
    write_down(blocks, [A, B, C, D, E, F, G, H])
    assert calls == [1] * 5
    assert blocks.cache.stats()["lost"] == 7
    with pytest.raises(OSError, match="No space left"):
        blocks.insert([A])
        blocks.evict_all()
        blocks.cache._through = True  # then a flush writes what is in host memory
        blocks.cache.flush()
    blocks.assert_no_leak()


def test_an_interrupt_before_a_write_leaves_nothing_behind(device, path, monkeypatch):
    """Between the plan and the write; otherwise the next call waits for ever."""
    blocks = Blocks(device, 2, 1, disk=path, disk_bytes=file_of(8), write="back")
    write_down(blocks, [A])
    blocks.insert([B])

    def interrupt(move):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(blocks.cache._shared, "carry_out", interrupt)
        with pytest.raises(KeyboardInterrupt):
            blocks.cache.evict(1)
    in_time(lambda: blocks.cache.evict(1))
    for hash in (A, B):
        in_time(lambda hash=hash: blocks.use([hash], known=1))
    blocks.assert_no_leak()


def test_an_interrupt_before_a_flush_writes_leaves_nothing_behind(device, path, monkeypatch):
    blocks = Blocks(device, 2, 2, disk=path, disk_bytes=file_of(8))
    write_down(blocks, [A])

    def interrupt(move):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(blocks.cache._shared, "carry_out", interrupt)
        with pytest.raises(KeyboardInterrupt):
            blocks.cache.flush()
    in_time(blocks.cache.flush)  # in another thread, which waits for moves of this one
    assert blocks.blocks() == (set(), {A}, {A})
    blocks.assert_no_leak()


def test_blocks_inserted_during_a_read_are_not_lost(device, path, monkeypatch):
    """The read has the only host page, which B needs on its way to the disk."""
    blocks = Blocks(device, 2, 1, disk=path, disk_bytes=file_of(8), write="back")
    write_down(blocks, [A, D])
    slow = SlowDisk(monkeypatch, "read_many")
    cold = Background(lambda: blocks.cache.acquire([A]))
    slow.wait_for_call()
    blocks.insert([B, C])
    slow.open()
    with cold.result() as lease:
        lease.wait()
        blocks.assert_holds(lease, [A])
    assert blocks.cache.stats()["lost"] == 0
    for hash in (A, B, C, D):
        blocks.use([hash], known=1)
    blocks.assert_no_leak()


def test_host_pages_of_a_read_may_be_evicted_as_soon_as_another_call_can(on_disk, monkeypatch):
    """Before the acquire has returned; it must not free them again."""
    blocks, host = on_disk, on_disk.host_pool.allocator
    send, taken = blocks.engine._send, []

    def evicted():
        send()
        if A in blocks.tiers.device.pages and not taken:  # between two sections of the lock
            taken.append(None)
            taken.extend(blocks.cache.take_host_pages(host.num_pages).tolist())

    monkeypatch.setattr(blocks.engine, "_send", evicted)
    with blocks.cache.acquire([A, B]) as lease:
        lease.wait()
        blocks.assert_holds(lease, [A, B])
    assert host.allocated().tolist() == sorted(taken[1:])
    host.free(taken[1:])
    blocks.assert_no_leak()
