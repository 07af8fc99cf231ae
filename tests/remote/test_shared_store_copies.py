"""How blocks of a shared store in memory are copied: in parts, by threads, mapped at once."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from shared_cases import Writer, block_hashes, bytes_of, contents, fill, holds, new_pool

import kvcupy as kv
from kvcupy.cache.threads import Helpers
from kvcupy.remote.stores import shm
from kvcupy.remote.stores.backend import SummedBlock
from kvcupy.remote.wire import WirePages, checksum

WIDTH = 4096  # a page is 256 KiB, in pieces of 128 KiB each, which are copied without Python's lock
BLOCKS = 8


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Open stores of blocks of 256 KiB, on which helpers work whatever there is to copy."""
    monkeypatch.setattr(shm, "_MIN_THREADED_BYTES", 0)
    users = []

    def open_one(num_blocks=2 * BLOCKS, folder=tmp_path, **options):
        page_bytes = 2 * 4 * 2 * 2 * WIDTH * 2
        capacity = shm.Layout(page_bytes, num_blocks).num_bytes
        users.append(
            Writer(
                "shm:copies", width=WIDTH, num_pages=BLOCKS, capacity_bytes=capacity,
                folder=folder, **options,
            )
        )  # fmt: skip
        return users[-1]

    yield open_one
    for user in users:
        user.store.close()


def helper_threads():
    return [t for t in threading.enumerate() if t.name.startswith("kvcupy-shared")]


@pytest.fixture
def copiers(monkeypatch):
    """Names of the threads that have copied a block, each of which waits for another to come."""
    names, both = [], threading.Barrier(2)

    def meet(copy):
        def copy_after_another_came(parts):
            names.append(threading.current_thread().name)
            if len(names) <= 2:
                both.wait(30)
            copy(parts)

        return copy_after_another_came

    for name in ("_read_parts", "_write_parts"):
        monkeypatch.setattr(shm, name, meet(getattr(shm, name)))
    return names


# --- Threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["put", "get"])
def test_threads_copy_the_blocks_of_one_call(opened, request, call):
    user, hashes = opened(threads=2), block_hashes(BLOCKS)
    if call == "get":
        opened(threads=1).put(*hashes)
    names = request.getfixturevalue("copiers")
    if call == "put":
        assert user.put(*hashes) == ["stored"] * BLOCKS
    assert user.get(*hashes) == [True] * BLOCKS, "and they are right"
    assert {name.startswith("kvcupy-shared") for name in names[:2]} == {True, False}


def test_threads_end_with_the_store_and_are_started_when_they_are_needed(opened):
    before = len(helper_threads())
    user, hashes = opened(threads=3), block_hashes(BLOCKS)
    assert user.put(hashes[0]) == ["stored"] and user.get(hashes[0]) == [True]
    assert len(helper_threads()) == before, "for one block"
    user.put(*hashes)
    assert before < len(helper_threads()) <= before + 2
    user.store.close()
    assert len(helper_threads()) == before


def test_small_calls_and_small_pieces_are_the_callers(opened, monkeypatch, tmp_path):
    before = len(helper_threads())
    hashes = block_hashes(BLOCKS)
    with Writer("shm:small", capacity_bytes=2**20, folder=tmp_path, threads=4) as small:
        small.put(*hashes)
        assert small.get(*hashes) == [True] * BLOCKS
    monkeypatch.setattr(shm, "_MIN_THREADED_BYTES", 2**30)
    user = opened(threads=4)
    user.put(*hashes)
    assert user.get(*hashes) == [True] * BLOCKS
    assert len(helper_threads()) == before


def test_a_system_without_threads_copies_in_the_callers(opened, monkeypatch):
    user, hashes = opened(threads=4), block_hashes(BLOCKS)

    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert user.put(*hashes) == ["stored"] * BLOCKS
    assert user.get(*hashes) == [True] * BLOCKS


def test_what_a_thread_takes_late_is_waited_for(monkeypatch):
    """An executor that could not start a thread has the call in its queue all the same."""
    submitted, copied = [], []
    begun, gate = threading.Event(), threading.Event()

    class Crowded:
        def submit(self, call):
            submitted.append(call)
            raise RuntimeError("can't start new thread")

    def copy(item):
        if item == 0:  # the caller's; the other is taken now
            threading.Thread(target=submitted[0]).start()
            begun.wait()
        else:
            begun.set()
            gate.wait()
        copied.append(item)

    helpers = Helpers(1, "kvcupy-shared")
    monkeypatch.setattr(helpers, "_executor", Crowded())
    caller = threading.Thread(target=helpers.each, args=(copy, [0, 1], 1))
    caller.start()
    caller.join(0.2)
    is_waiting = caller.is_alive()
    gate.set()
    caller.join()
    assert is_waiting and copied == [0, 1]


def test_a_call_that_fails_returns_when_no_thread_copies_any_more(opened, monkeypatch):
    """If one thread fails, the others finish their current block, and take no more."""
    user, hashes = opened(threads=2), block_hashes(BLOCKS)
    user.put(*hashes)
    real, begun, copied, both = shm._read_parts, [], [], threading.Barrier(2)

    def read(parts):
        begun.append(parts)
        if len(begun) <= 2 and both.wait(30) == 0:
            raise OSError("one of them fails")
        time.sleep(0.2)  # longer than the caller needs to return, if it did not wait
        real(parts)
        copied.append(parts)

    monkeypatch.setattr(shm, "_read_parts", read)
    with pytest.raises(OSError, match="one of them fails"):
        user.store._backend.get(
            user.store._keys.keys(hashes),
            [WirePages(user.pool).pieces(page) for page in range(BLOCKS)],
            time.monotonic() + 60,
        )
    assert len(begun) == 2 and len(copied) == 1
    monkeypatch.setattr(shm, "_read_parts", real)
    assert user.get(*hashes) == [True] * BLOCKS


def test_a_put_that_fails_in_a_thread_leaves_whole_blocks(opened, monkeypatch):
    user, other, hashes = opened(threads=2), opened(threads=2), block_hashes(BLOCKS + 1)
    user.put(*hashes[:3])

    def fail(parts):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(shm, "_write_parts", fail)
        with pytest.raises(MemoryError):
            user.put(*hashes[:BLOCKS])
    assert other.get(*hashes[:5]) == [True] * 3 + [False] * 2
    assert other.put(hashes[BLOCKS]) == ["stored"], "it repairs what was left"
    assert other.store.stats()["recovered"] == 1 and other.store.stats()["blocks"] == 4
    assert user.put(*hashes[:BLOCKS]) == ["known"] * 3 + ["stored"] * 5


@pytest.mark.parametrize(
    ("threads", "error"), [(0, ValueError), (65, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_numbers_of_threads_that_are_refused(tmp_path, threads, error):
    with pytest.raises(error, match="threads: expected"):
        kv.SharedStore.open(
            "shm:refused", new_pool(), capacity_bytes=2**20, folder=tmp_path, threads=threads
        )
    assert not list(tmp_path.iterdir())


# --- Several blocks for one lock ------------------------------------------------------------------


@pytest.mark.parametrize("per_lock", [1, 3, BLOCKS])
def test_blocks_that_are_asked_for_twice_or_have_no_space(opened, per_lock):
    user, hashes = opened(num_blocks=4), block_hashes(BLOCKS)
    user.store._backend.blocks_per_get = per_lock
    repeated = [hashes[0], hashes[1], hashes[0], hashes[2], hashes[1]]
    assert user.put(*repeated) == ["stored", "stored", "known", "stored", "known"]
    assert user.get(*hashes[:3]) == [True] * 3
    outcomes = user.put(*hashes[3:])
    assert outcomes == ["stored"] * 4 + ["full"], "blocks of one call do not evict each other"
    assert user.get(*hashes) == [False] * 3 + [True] * 4 + [False]
    stats = user.store.stats()
    assert (stats["full"], stats["evicted"], stats["recovered"]) == (1, 3, 0)


def test_a_repair_in_the_middle_of_a_put_keeps_the_blocks_that_it_has_slots_for(opened):
    """A damaged record makes the writer rebuild what there is, which frees slots without blocks."""
    user, hashes = opened(threads=2), block_hashes(BLOCKS)
    backend = user.store._backend
    user.put(hashes[5])
    slot = backend._find(user.store._keys.keys([hashes[5]])[0])
    backend._records[slot * shm._RECORD_WORDS + shm._LENGTH] = 1  # no get can have it
    assert user.put(*hashes) == ["stored"] * BLOCKS
    assert user.get(*hashes) == [True] * BLOCKS
    stats = user.store.stats()
    assert stats["recovered"] == 1 and stats["blocks"] == BLOCKS


# --- Checksums ------------------------------------------------------------------------------------


def test_checksums_are_calculated_once_while_blocks_are_copied(opened, monkeypatch):
    user, hashes = opened(threads=2), block_hashes(BLOCKS)

    def fail(*arguments):
        raise AssertionError("a block was read once more")

    monkeypatch.setattr("kvcupy.remote.stores.backend.checksum", fail)
    user.put(*hashes)
    assert user.get(*hashes) == [True] * BLOCKS


@pytest.mark.parametrize("part_bytes", [2**17, 3 * 2**15 + 8, 2**20])
def test_damage_is_noticed_whatever_the_parts(opened, monkeypatch, part_bytes):
    monkeypatch.setattr(shm, "_PART_BYTES", part_bytes)
    user, hashes = opened(), block_hashes(2)
    user.put(*hashes)
    backend = user.store._backend
    start = backend._layout.payload_at(backend._find(user.store._keys.keys(hashes)[1]))
    backend._bytes[start + 200_000] ^= 1
    other = opened()
    assert other.get(*hashes) == [True, False]
    assert other.store.stats()["damaged"] == 1


def test_a_summed_block():
    pieces = [memoryview(bytes(range(200))), memoryview(b"abc")]
    block = SummedBlock(pieces, is_summed=True)
    assert [*block] == pieces
    assert block.checksum() == checksum(pieces), "of the block"
    for _ in range(2):  # begun again, it has forgotten what came before
        update = block.begin()
        update(b"what was ")
        update(b"copied")
    assert block.checksum() == checksum([b"what was copied"])
    assert SummedBlock(pieces, is_summed=False).begin() is None


# --- Page faults ----------------------------------------------------------------------------------


@pytest.fixture
def in_memory():
    """A folder of an in-memory file system; other file systems cause additional faults."""
    if sys.platform != "linux" or not os.access("/dev/shm", os.W_OK):
        pytest.skip("counts page faults of /dev/shm, as Linux has them")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("call", ["put", "get"])
def test_memory_is_mapped_at_once(opened, call, in_memory):
    """Not by a fault for each page of 4 KiB, of which a block has 64."""
    import resource

    hashes = block_hashes(BLOCKS)
    if call == "get":
        opened(folder=in_memory).put(*hashes)
    user = opened(threads=1, folder=in_memory)
    fill(user.pool, range(BLOCKS), hashes)
    mapped = []
    real = user.store._backend._map_payload

    def map_payload(slot):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        real(slot)
        mapped.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    user.store._backend._map_payload = map_payload
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):  # the second time all is mapped
        if call == "put":
            user.store.put(hashes, range(BLOCKS))
        else:
            assert user.store.get(hashes, range(BLOCKS)) == [True] * BLOCKS
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before - sum(mapped)
    assert len(mapped) == BLOCKS
    assert faults < 64 * BLOCKS / 4, f"{faults} faults for {64 * BLOCKS} pages"


def test_a_system_that_cannot_map_at_once_copies_all_the_same(opened, monkeypatch):
    monkeypatch.setattr(shm, "_MADV_POPULATE_READ", 12345)
    user, hashes = opened(), block_hashes(3)
    user.put(*hashes)
    assert user.get(*hashes) == [True] * 3
    assert np.frombuffer(bytes_of(user.pool, 1), np.uint8).any()
    assert holds(user.pool, 1, hashes[1])
    assert len(contents(hashes[1], user.pool.page_bytes)) == user.pool.page_bytes
