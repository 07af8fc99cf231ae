"""kv.SharedStore over memory of this machine: several users of one file."""

from __future__ import annotations

import copy
import errno
import fcntl
import math
import os
import pickle
import random
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import helpers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_cases import Writer, block_hashes, fill, holds, new_pool, soon

import kvcupy as kv
from kvcupy.remote.stores import shm, shm_file
from kvcupy.remote.stores.shm import Layout, ShmBackend

PAGE_BYTES = new_pool(1).page_bytes


def num_descriptors():
    return len([*Path("/proc/self/fd").iterdir()])


def capacity(num_blocks):
    return Layout(PAGE_BYTES, num_blocks).num_bytes


@pytest.fixture
def shared(tmp_path):
    """Opens users of one store."""
    users = []

    def opened(num_blocks=16, **options):
        size = None if num_blocks is None else capacity(num_blocks)
        users.append(Writer("shm:test", capacity_bytes=size, folder=tmp_path, **options))
        return users[-1]

    yield opened
    for user in users:
        user.store.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kvcupy-test"


# --- What is there ---


def test_pools_that_differ_and_tenants_share_nothing(shared):
    hashes = block_hashes(3)
    users = [
        shared(), shared(tenant="a"), shared(tenant="b"), shared(model="m"),
        shared(layout="page_head"), shared(total_kv_heads=4),
        shared(total_kv_heads=4, head_start=2),
    ]  # fmt: skip
    for i, user in enumerate(users):
        assert [u.store.match(hashes[:1]) for u in users] == [1] * i + [0] * (len(users) - i)
        assert user.put(hashes[0]) == ["stored"]
    assert shared(tenant="a").get(*hashes) == [True, False, False]
    assert users[0].store.stats()["blocks"] == len(users)


def test_blocks_outlive_their_writers_until_they_are_removed(shared, path):
    hashes = block_hashes(2)
    with shared() as one:
        one.put(*hashes)
    with pytest.raises(kv.KvcupyError, match=r"^store: expected an open store"):
        one.store.match(hashes)
    other = shared(None)
    assert other.get(*hashes) == [True, True]
    other.store.remove()
    other.store.remove()
    assert not path.exists()
    assert other.get(*hashes) == [True, True], "who has it open goes on with it"
    fresh = shared()
    assert fresh.store.match(hashes) == 0
    other.store.remove()
    assert path.exists(), "it belongs to others now"
    assert not [p for p in path.parent.iterdir() if p != path], "nothing else is left"


def test_it_is_private(shared, path):
    shared()
    assert path.stat().st_mode & 0o777 == 0o600


# --- Space ---


def test_when_it_is_full_blocks_go_that_were_not_used(shared):
    user = shared(6)
    hashes = block_hashes(12)
    assert user.put(*hashes[:6]) == ["stored"] * 6
    assert user.get(hashes[0], hashes[3]) == [True, True]
    assert user.store.stats()["evicted"] == 0
    assert user.put(*hashes[6:10]) == ["stored"] * 4
    stats = user.store.stats()
    assert (stats["blocks"], stats["capacity_blocks"], stats["evicted"]) == (6, 6, 4)
    there = [user.store.match([h]) for h in hashes]
    assert there == [1, 0, 0, 1, 0, 0, 1, 1, 1, 1, 0, 0]


def test_it_takes_no_more_than_its_capacity_and_only_what_it_uses(shared, path):
    user = shared(64)
    assert path.stat().st_size == capacity(64)
    empty = user.store.stats()["bytes"]
    user.put(*block_hashes(8))
    used = user.store.stats()["bytes"] - empty
    assert 8 * PAGE_BYTES <= used < 24 * PAGE_BYTES, "with what the file system needs"
    for first in range(0, 200, 8):
        assert user.put(*block_hashes(8, first)) != ["full"] * 8
    assert path.stat().st_size == capacity(64)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 17])
def test_every_key_is_found_however_many_come_and_go(shared, num_blocks):
    """The model: what was put last, and is still there, is right; the index finds all of it."""
    one, other = shared(num_blocks), shared(num_blocks)
    hashes = block_hashes(60)
    for step in range(150):
        user = (one, other)[step % 2]
        user.put(hashes[step * 7 % 60])
        if step % 5 == 0:
            user.get(hashes[step * 11 % 60])
    known = [h for h in hashes if one.store.match([h])]
    assert len(known) == one.store.stats()["blocks"] == num_blocks
    assert all(all(other.get(h)) for h in known)


def test_capacity_is_the_first_users(shared):
    shared(16)
    shared(None)
    shared(16)
    with pytest.raises(
        ValueError, match=r"^capacity_bytes: expected None or a capacity of 16 blocks"
    ):
        shared(15)


def test_pools_with_pages_of_another_length_need_another_name(shared, tmp_path):
    shared(16)
    with pytest.raises(ValueError, match=r"^host_pool: expected pages of 4096 .*got 8192; use"):
        shared(16, width=128)
    with Writer("shm:other", capacity_bytes=2**20, folder=tmp_path, width=128) as other:
        assert other.put(*block_hashes(1)) == ["stored"]


@pytest.mark.parametrize("num_bytes", [-1, 0, 4096, Layout(4096, 1).num_bytes - 1, 2**62])
def test_capacities_that_are_refused(num_bytes, tmp_path):
    with pytest.raises(ValueError, match=r"^capacity_bytes: expected at least"):
        Writer("shm:test", capacity_bytes=num_bytes, folder=tmp_path)
    assert not [*tmp_path.iterdir()]


def test_layouts_fit():
    for num_bytes in range(Layout(5000, 1).num_bytes, 300_000, 997):
        layout = Layout.fit(num_bytes, 5000)
        assert layout.num_bytes <= num_bytes < Layout(5000, layout.num_slots + 1).num_bytes
        assert layout.num_buckets >= 2 * layout.num_slots
        assert layout.records_at >= 4096 + 8 * layout.num_buckets


# --- Files that are not as they should be ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "which starts b''"),
        (lambda data: b"a" * 10_000, "which starts b'aaaaaaaa'"),
        (lambda data: data[:10], "a damaged one"),
        (lambda data: data[:-1], "expected a file of"),
        (lambda data: data + b"\0", "expected a file of"),
        (lambda data: data[:9] + b"\1" + data[10:], "a damaged one"),
        (lambda data: data[:20] + b"\1" + data[21:], "a damaged one"),
    ],
)
def test_foreign_and_truncated_files_are_refused_and_left_alone(shared, path, change, message):
    shared().store.close()
    changed = change(path.read_bytes())
    path.write_bytes(changed)
    for num_blocks in (16, None):
        with pytest.raises(
            ValueError, match=f"^url: .*{message}.*kvcupy-test|^url: .*kvcupy-test.*{message}"
        ):
            shared(num_blocks)
    assert path.read_bytes() == changed


def test_other_versions_are_refused(shared, path, monkeypatch):
    monkeypatch.setattr(shm_file, "VERSION", 2)
    shared().store.close()
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"^url: expected version 1 of the file, got 2"):
        shared()


def make_link(path):
    target = path.with_name("elsewhere")
    target.write_bytes(b"untouched")
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (Path.mkdir, IsADirectoryError, "kvcupy-test"),
        (os.mkfifo, ValueError, "^url: expected a regular file"),
        (make_link, OSError, r"Too many levels.*kvcupy-test"),
    ],
)
def test_what_is_no_file_is_refused(shared, path, make, error, message):
    make(path)
    with pytest.raises(error, match=message):
        shared()
    assert make is not make_link or path.resolve().read_bytes() == b"untouched"


def test_files_of_other_users_are_refused(shared, monkeypatch):
    shared()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match=r"^url: expected a store of user"):
        shared()


def test_a_file_that_is_truncated_while_it_is_open_is_lost(shared, path):
    user, hashes = shared(), block_hashes(2)
    user.put(*hashes)
    with path.open("r+b") as file:
        file.truncate(capacity(16) - PAGE_BYTES)
    assert user.get(*hashes) == [False, False]
    assert user.put(*block_hashes(1, 9)) == ["failed"]
    assert user.store.match(hashes) == 0
    assert user.store.stats()["lost"] > 0


def test_no_byte_that_changes_makes_a_wrong_block(shared, path, caplog):
    """Whichever bit flips, no get is wrong, and the store stays usable."""
    user, hashes = shared(4), block_hashes(6)
    layout = Layout(PAGE_BYTES, 4)
    places = [
        *range(2048, 2048 + 64), *range(4096, 4096 + 8 * layout.num_buckets, 3),
        *range(layout.records_at, layout.records_at + 4 * shm.RECORD_BYTES, 5),
        *range(layout.payloads_at, layout.num_bytes, 509),
    ]  # fmt: skip
    served = 0
    for n, place in enumerate(places):
        user.put(*hashes[n % 3 :][:3])
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ (1 << n % 8)]))
        served += sum(user.get(*hashes))  # asserts that they are right
        user.store._retry_at.clear()
    assert served > len(places)
    assert user.store.stats()["damaged"] > 20
    logged = [record for record in caplog.records if record.msg.startswith("dropping")]
    assert 1 <= len(logged) < 10, "the rest is counted"
    fresh = shared(4)
    assert fresh.put(*block_hashes(4, 1000)) == ["stored"] * 4
    assert fresh.get(*block_hashes(4, 1000)) == [True] * 4


@pytest.mark.parametrize("num_blocks", [1, 3, 8])
def test_no_damage_makes_a_wrong_block_or_an_error(tmp_path, num_blocks):
    """Many bytes at random moments, most of them in what says where blocks are.

    Damage is noticed, what is whole is served, and the store stays usable.
    """
    layout = Layout(PAGE_BYTES, num_blocks)
    bookkeeping = [
        *range(2048, 2048 + 64), *range(4096, 4096 + 8 * layout.num_buckets),
        *range(layout.records_at, layout.records_at + shm.RECORD_BYTES * num_blocks),
    ]  # fmt: skip
    hashes, seen = block_hashes(20), Counter()
    for seed in range(helpers.examples(60)):
        rng = random.Random(f"damage {num_blocks} {seed}")
        url, options = f"shm:{seed}", {"capacity_bytes": layout.num_bytes, "folder": tmp_path}
        with Writer(url, **options) as one, Writer(url, **options) as other:
            memory = one.store._backend._bytes
            for _ in range(60):
                user, some = rng.choice([one, other]), rng.sample(hashes, rng.choice([1, 2, 3]))
                if rng.random() < 0.5:
                    assert "failed" not in user.put(*some), seed
                else:
                    user.get(*some)  # asserts that they are right
                user.store._retry_at.clear()
                for _ in range(rng.choice([0, 0, 1, 4, 64])):
                    place = rng.choice(bookkeeping)
                    if rng.random() < 0.2:
                        place = rng.randrange(layout.payloads_at, layout.num_bytes)
                    memory[place] = rng.choice(
                        [0, 255, memory[place] ^ 1 << rng.randrange(8), rng.randrange(256)]
                    )
            seen.update({name: one.store.stats()[name] for name in ("hits", "damaged")})
        with Writer(url, **options) as fresh:
            assert fresh.put(*block_hashes(1, 1000)) == ["stored"], seed
            assert fresh.get(*block_hashes(1, 1000)) == [True], seed
    assert min(seen["hits"], seen["damaged"]) > helpers.examples(60) / 10, seen


class Raw:
    """The numbers of a file, as a user of it has them."""

    def __init__(self, user):
        self.backend = user.store._backend
        self.header, self.records = self.backend._words, self.backend._records

    def word(self, slot, word):
        return self.records[slot * shm._RECORD_WORDS + word]

    def write(self, slot, word, value):
        self.records[slot * shm._RECORD_WORDS + word] = value


def all_there(user, hashes):
    """All that is found can be read, is right, and is what the store counts."""
    known = [h for h in hashes if user.store.match([h])]
    assert all(all(user.get(h)) for h in known)
    assert len(known) == user.store.stats()["blocks"]
    return len(known)


def test_a_slot_that_is_being_written_is_missed_and_given_up_by_the_next_writer(shared):
    user, hashes = shared(4, checksum="none"), block_hashes(3)
    user.put(*hashes[:2])
    raw = Raw(user)
    slot = raw.backend._find(user.store._keys.keys(hashes)[0])
    raw.write(slot, shm._GENERATION, raw.word(slot, shm._GENERATION) + 1)
    assert user.get(*hashes[:2]) == [False, True]
    assert [user.store.match([h]) for h in hashes] == [0, 1, 0]
    assert user.put(hashes[0]) == ["stored"]
    assert user.get(*hashes[:2]) == [True, True] and all_there(user, hashes) == 2


def test_blocks_of_another_length_are_missed(shared):
    user, [block_hash] = shared(), block_hashes(1)
    user.put(block_hash)
    backend, [key] = user.store._backend, user.store._keys.keys([block_hash])
    for num_bytes in (0, PAGE_BYTES - 1, PAGE_BYTES + 1):
        into = bytearray(num_bytes)
        assert backend.get([key], [[memoryview(into)]], time.monotonic() + 60) == [None]
        assert into == bytes(num_bytes), "nothing is written"
    [header] = backend.get([key], [[memoryview(bytearray(PAGE_BYTES))]], time.monotonic() + 60)
    assert header is not None
    too_long = [memoryview(bytes(4097))]
    assert backend.put([b"k" * 32], [too_long], [header], time.monotonic() + 60) == ["full"]


@pytest.mark.parametrize("word", ["_LENGTH", "_HEADER_LENGTH"])
@pytest.mark.parametrize("value", [0, 17, 2**40])
def test_a_block_that_no_get_can_have_is_not_known(shared, word, value):
    """Else it could be neither read nor stored again for as long as it is asked for."""
    one, other = shared(4), shared(4)
    hashes = block_hashes(3)
    one.put(*hashes[:2])
    raw = Raw(one)
    if (word, value) == ("_HEADER_LENGTH", 17):
        value = shm.MAX_HEADER_BYTES + 1
    raw.write(raw.backend._find(one.store._keys.keys(hashes)[0]), getattr(shm, word), value)
    assert one.get(*hashes[:2]) == [False, True]
    assert [other.store.match([h]) for h in hashes] == [0, 1, 0]
    assert other.put(*hashes) == ["stored", "known", "stored"]
    assert one.get(*hashes) == [True] * 3 and all_there(one, hashes) == 3


def test_numbers_that_were_damaged_are_counted_again(shared):
    user, hashes = shared(6), block_hashes(12)
    user.put(*hashes[:4])
    raw = Raw(user)
    raw.header[shm._HIGH_WATER] = 1  # slots above are in use
    assert user.put(hashes[4]) == ["stored"] and all_there(user, hashes) == 5
    raw.header[shm._FREE] = 2  # that slot is in use too
    assert user.put(hashes[5]) == ["stored"] and all_there(user, hashes) == 6
    raw.header[shm._FREE] = 2**40
    assert user.put(hashes[6]) == ["stored"] and all_there(user, hashes) == 6
    raw.header[shm._NUM_BLOCKS] = 0
    assert user.put(hashes[7]) == ["stored"], "in the place of another"
    raw.header[shm._DIRTY] = 1
    assert user.put(hashes[8]) == ["stored"] and all_there(user, hashes) == 6
    buckets = raw.backend._buckets
    for i in range(len(buckets)):
        buckets[i] = 0  # nothing is found, and no victim is where it should be
    assert {*user.put(*hashes[:3])} <= {"stored", "known"} and all_there(user, hashes) >= 3
    assert user.store.stats()["recovered"] >= 4


def test_the_generation_of_a_free_slot_may_be_damaged(shared):
    user, [block_hash] = shared(), block_hashes(1)
    Raw(user).write(0, shm._GENERATION, 2**40 + 1)
    assert user.put(block_hash) == ["stored"]
    assert user.get(block_hash) == [True]


def test_of_two_copies_of_a_block_one_is_kept(shared):
    user, hashes = shared(6), block_hashes(4)
    user.put(*hashes[:2])
    raw = Raw(user)
    bucket = raw.backend._bucket(user.store._keys.keys(hashes)[0])
    raw.backend._buckets[bucket] ^= 1 << 40  # it is not found, and stored again
    assert user.put(hashes[0]) == ["stored"]
    raw.header[shm._DIRTY] = 1
    assert user.put(hashes[2]) == ["stored"]
    assert all_there(user, hashes) == 3
    assert user.put(*block_hashes(3, 50)) == ["stored"] * 3
    assert user.store.stats()["evicted"] == 0, "the other copy's slot is free"


def test_the_slot_of_a_dropped_block_is_used_next(shared, path):
    user, hashes = shared(3), block_hashes(4)
    user.put(*hashes[:3])
    slot = Raw(user).backend._find(user.store._keys.keys(hashes)[1])
    with path.open("r+b") as file:
        file.seek(Layout(PAGE_BYTES, 3).payload_at(slot))
        file.write(b"damaged")
    assert user.get(*hashes[:3]) == [True, False, True]
    assert user.put(hashes[3]) == ["stored"]
    assert user.get(hashes[0], hashes[2], hashes[3]) == [True] * 3, "nothing had to go"
    stats = user.store.stats()
    assert (stats["evicted"], stats["recovered"], stats["blocks"]) == (0, 0, 3)


def test_blocks_with_a_former_checksum_are_misses(shared, monkeypatch):
    from kvcupy.remote.stores import store

    one, other = shared(), shared(checksum="none")
    hashes = block_hashes(2)
    monkeypatch.setattr(store, "_XXH3_64", 2)  # sum64
    one.put(*hashes)
    assert one.get(*hashes) == [True, True]
    monkeypatch.undo()
    for user in (one, other):
        assert user.get(*hashes) == [False, False]
        assert user.store.stats()["unverified"] == 2
    assert one.store.match(hashes) == 2, "they are not dropped"


def test_blocks_expire(shared, monkeypatch):
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    lasting, brief, hashes = shared(6), shared(6, ttl_s=10), block_hashes(6)
    lasting.put(*hashes[:2])
    brief.put(*hashes[2:5])
    assert lasting.put(*hashes[:5]) == ["known"] * 5
    now_ns += 10 * 10**9 - 1
    assert lasting.get(*hashes[:5]) == [True] * 5
    now_ns += 1
    for user in (lasting, brief):
        assert user.get(*hashes[:5]) == [True] * 2 + [False] * 3
        assert user.store.match(hashes[:5]) == 2
    assert lasting.put(hashes[2], hashes[5]) == ["stored"] * 2, "in the place of the expired one"
    now_ns += 10**12
    assert brief.get(*hashes) == [True] * 3 + [False] * 2 + [True]
    stats = brief.store.stats()
    assert (stats["blocks"], stats["evicted"], stats["recovered"]) == (6, 0, 0)


def test_a_quota_holds_for_one_tenant(shared):
    mine, hashes = shared(12, tenant="mine", quota_bytes=3 * 4096), block_hashes(12)
    theirs = shared(12, tenant="theirs")
    assert theirs.put(*hashes[:5]) == ["stored"] * 5
    for hash in hashes[:3]:
        assert mine.put(hash) == ["stored"]
    assert mine.get(*hashes[:3]) == [True] * 3
    assert mine.put(hashes[3]) == ["stored"]
    found = mine.get(*hashes[:4])
    assert sum(found) == 3 and found[3], "one of them was dropped"
    assert theirs.get(*hashes[:5]) == [True] * 5
    assert mine.put(*hashes[4:10]) == [*["stored"] * 3, *["full"] * 3]
    assert mine.get(*hashes[2:10]) == [*[False] * 2, *[True] * 3, *[False] * 3]
    assert theirs.put(*hashes[5:9]) == ["stored"] * 4
    assert theirs.get(*hashes[1:9]) == [True] * 8
    stats = theirs.store.stats()
    assert (stats["blocks"], stats["evicted"], stats["recovered"]) == (12, 4, 0)


def test_a_quota_drops_what_was_not_used(shared):
    user, hashes = shared(12, quota_bytes=4 * 4096), block_hashes(12)
    user.put(*hashes[:4])
    user.get(hashes[0], hashes[2])
    user.put(hashes[4])
    assert user.get(*hashes[:5]) == [True, False, True, True, True]


def test_a_quota_that_has_become_smaller(shared, monkeypatch):
    monkeypatch.setattr(shm, "_MAX_SWEEP", 2)
    before, hashes = shared(12), block_hashes(12)
    before.put(*hashes[:5])
    before.put(*hashes[5:10])
    after = shared(12, quota_bytes=2 * 4096)
    outcomes = [after.put(hashes[10])[0] for _ in range(3)]
    assert outcomes == ["full", "full", "stored"]
    assert after.store.stats()["blocks"] == 2


@pytest.mark.parametrize(("share", "is_kept"), [(math.inf, True), (1e-9, False)])
def test_processes_of_a_tenant_count_what_others_have_put(shared, monkeypatch, share, is_kept):
    """Before each put, or hardly ever."""
    monkeypatch.setattr(shm, "_COUNTING_SHARE", share)
    one, other = (shared(12, quota_bytes=4 * 4096) for _ in range(2))
    hashes = block_hashes(8)
    for i in range(0, 8, 2):
        assert one.put(hashes[i]) == other.put(hashes[i + 1]) == ["stored"]
    assert (one.store.stats()["blocks"] <= 4) == is_kept


def test_a_quota_drops_the_oldest_first(shared, monkeypatch):
    monkeypatch.setattr(shm, "_COUNTING_SHARE", math.inf)
    user, hashes = shared(12, quota_bytes=3 * 4096), block_hashes(7)
    for hash in hashes:
        assert user.put(hash) == ["stored"]
    assert user.get(*hashes) == [*[False] * 4, *[True] * 3]


def test_slots_that_an_earlier_release_has_reused_do_not_count(shared, monkeypatch):
    """They keep the tenant of their former blocks."""
    before, hashes = shared(12), block_hashes(6)
    before.put(*hashes[:3])
    backend = before.store._backend
    assert backend.drop([backend._key(slot) for slot in (1, 2)], time.monotonic() + 10) == 2
    with monkeypatch.context() as patch:
        patch.setattr(shm, "_OWNER", SimpleNamespace(pack_into=lambda *fields: None))
        shared(12, tenant="of the earlier release").put(*hashes[3:5])
    after = shared(12, quota_bytes=2 * 4096)
    assert after.put(hashes[5]) == ["stored"]
    assert after.get(hashes[0], hashes[5]) == [True, True]


def test_a_quota_counts_each_slot_once(shared, monkeypatch):
    monkeypatch.setattr(shm, "_COUNTING_SHARE", 1e-9)
    user, hashes = shared(12, quota_bytes=6 * 4096), block_hashes(3)
    user.put(*hashes)
    for _ in range(10):
        backend = user.store._backend
        assert backend.drop([backend._key(0)], time.monotonic() + 10) == 1
        assert user.put(hashes[0]) == ["stored"]
    assert user.get(*hashes) == [True] * 3


def test_a_quota_counts_each_hash_once(shared):
    user, hashes = shared(12, quota_bytes=3 * 4096), block_hashes(3)
    assert user.put(*hashes[:2]) == ["stored"] * 2
    assert user.put(hashes[2], hashes[2]) == ["stored", "known"]
    assert user.get(*hashes) == [True] * 3


def test_parts_of_a_put_do_not_drop_each_other_for_a_quota(shared, monkeypatch):
    monkeypatch.setattr(shm, "_MAX_BATCH_BLOCKS", 1)
    user, hashes = shared(12, quota_bytes=3 * 4096), block_hashes(5)
    assert user.put(*hashes) == [*["stored"] * 3, *["full"] * 2]
    assert user.get(*hashes) == [*[True] * 3, *[False] * 2]


def test_a_quota_leaves_alone_slots_that_another_tenant_has_now(shared, monkeypatch):
    monkeypatch.setattr(shm, "_COUNTING_SHARE", 1e-9)
    mine, hashes = shared(6, tenant="mine", quota_bytes=3 * 4096), block_hashes(12)
    theirs = shared(6, tenant="theirs")
    mine.put(*hashes[:3])
    theirs.put(*hashes[:6])
    backend = theirs.store._backend
    assert backend.drop([backend._key(slot) for slot in (3, 4, 5)], time.monotonic() + 10) == 3
    assert mine.put(*hashes[6:9]) == ["stored"] * 3
    assert theirs.get(*hashes[3:6]) == [True] * 3


def test_blocks_that_others_have_evicted_do_not_count(shared, monkeypatch):
    monkeypatch.setattr(shm, "_COUNTING_SHARE", 1e-9)
    mine, hashes = shared(4, tenant="mine", quota_bytes=3 * 4096), block_hashes(8)
    theirs = shared(4, tenant="theirs")
    mine.put(*hashes[:3])
    theirs.put(*hashes[:4])
    assert mine.get(*hashes[:3]) == [False] * 3
    assert mine.put(*hashes[3:6]) == ["stored"] * 3
    assert sum(theirs.get(*hashes[:4])) == 1


def test_blocks_of_an_earlier_release_do_not_expire(shared, monkeypatch):
    """It writes no expiry and no tenant: its records keep what the slot had before."""
    brief, earlier, hashes = shared(2, ttl_s=0.001), shared(2), block_hashes(4)
    brief.put(*hashes[:2])
    time.sleep(0.01)
    monkeypatch.setattr(shm, "_OWNER", SimpleNamespace(pack_into=lambda *fields: None))
    assert earlier.put(*hashes[2:]) == ["stored"] * 2
    monkeypatch.undo()
    assert earlier.store.stats()["evicted"] == 2, "in the same slots"
    assert brief.get(*hashes[2:]) == [True, True]
    assert [block.tenant for block in brief.store._backend.blocks()] == ["", ""]


def test_a_put_stays_marked_when_it_drops_an_expired_block(shared, monkeypatch):
    """If it dies then, a repair drops what it has reserved."""
    user, hashes = shared(6, ttl_s=0.001), block_hashes(3)
    user.put(hashes[1])
    time.sleep(0.01)
    marks = []

    def discard(backend, key, really=ShmBackend._discard):
        before = backend._words[shm._DIRTY]
        marks.append((before, really(backend, key), backend._words[shm._DIRTY]))

    monkeypatch.setattr(ShmBackend, "_discard", discard)
    assert user.put(*hashes) == ["stored"] * 3
    assert marks == [(1, True, 1)]
    assert user.store._backend._words[shm._DIRTY] == 0


# --- Repairs ---


@given(data=st.data())
@settings(max_examples=helpers.examples(100), deadline=None)
def test_a_repair_finds_all_whole_blocks(tmp_path_factory, data):
    """Records of any contents: equal keys, equal hashes, homes at the end of the buckets."""
    num_slots = data.draw(st.integers(1, 24))
    path = tmp_path_factory.mktemp("repair") / "kvcupy-test"
    backend = ShmBackend(path, PAGE_BYTES, capacity(num_slots))
    num_buckets = backend._layout.num_buckets
    starts = [0, 1, num_buckets - 1, num_buckets - 2, 2 * num_buckets - 1, 2**32 - 1]
    expected = {}
    for slot in range(num_slots):
        if data.draw(st.booleans()):
            continue
        start, rest = data.draw(st.sampled_from(starts)), data.draw(st.integers(0, 2))
        key = start.to_bytes(4, "little") + bytes([rest]) * 28
        generation = data.draw(st.sampled_from([2, 4, 7]))
        length = data.draw(st.sampled_from([PAGE_BYTES, PAGE_BYTES, 5]))
        shm._RECORD.pack_into(
            backend._map, backend._layout.record_at(slot), generation, length, key, 80
        )
        if generation % 2 == 0 and length == PAGE_BYTES:
            expected.setdefault(key, []).append(slot)
    backend._words[shm._DIRTY] = 1
    backend.discard([b"another key".ljust(32)], soon())
    stats = backend.stats()
    assert (stats["blocks"], stats["recovered"]) == (len(expected), 1)
    for key, slots in expected.items():
        assert backend._find(key) == slots[0], "of equal keys the first"
    assert sum(map(bool, backend._buckets)) == len(expected)
    new = [os.urandom(32) for _ in range(num_slots - len(expected))]
    blocks = [[memoryview(bytes(PAGE_BYTES))]] * len(new)
    assert backend.put(new, blocks, [b"header"] * len(new), soon()) == ["stored"] * len(new)
    assert all(backend.exists([*expected, *new], soon()))
    assert (backend.stats()["evicted"], backend.stats()["recovered"]) == (0, 1)
    backend.close()


def test_an_eviction_looks_at_few_of_many_used_blocks(shared, monkeypatch):
    monkeypatch.setattr(shm, "_MAX_SWEEP", 4)
    user, hashes = shared(12), block_hashes(18)
    for first in (0, 6):
        user.put(*hashes[first : first + 6])
        user.get(*hashes[first : first + 6])
    backend = user.store._backend
    used = backend._records[shm._USED :: shm._RECORD_WORDS]
    assert sum(used[:12]) == 12
    user.put(hashes[12])
    assert user.store.match([hashes[0]]) == 0 and sum(used[:12]) == 12 - 4
    user.put(*hashes[13:16])
    there = [user.store.match([h]) for h in hashes[:16]]
    assert there == [0] * 4 + [1] * 12, "in the order of the clock"


def test_a_put_of_many_small_blocks_has_the_lock_for_some_at_a_time(shared, monkeypatch):
    monkeypatch.setattr(shm, "_MAX_BATCH_BLOCKS", 2)
    user, other, hashes = shared(), shared(), block_hashes(6)
    seen = []
    really = shm.ShmBackend._yield_lock
    monkeypatch.setattr(
        shm.ShmBackend, "_yield_lock",
        lambda backend: (seen.append(other.store.match(hashes)), really(backend)),
    )  # fmt: skip
    assert user.put(*hashes) == ["stored"] * 6
    assert seen == [2, 4]


# --- The memory of a container ---


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Return a function that lets this process have memory limits: (cgroup line, {file: text})."""

    def limited(line, files, available_kb=2**30):
        folder = tmp_path / "cgroup"
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"{text}\n")
        (tmp_path / "of this process").write_text(f"9:name=systemd:/\n{line}\n1:cpu:/\n")
        (tmp_path / "meminfo").write_text(f"MemFree: 1 kB\nMemAvailable:   {available_kb} kB\n")
        monkeypatch.setattr(shm_file, "_CGROUPS_OF_THIS_PROCESS", str(tmp_path / "of this process"))
        monkeypatch.setattr(shm_file, "_CGROUP_FOLDER", str(folder))
        monkeypatch.setattr(shm_file, "_MEMORY_INFO", str(tmp_path / "meminfo"))

    return limited


LIMITS = {
    "v2": ("0::/pod/box", "pod/box/memory.max"),
    "v2, of a parent": ("0::/pod/box", "pod/memory.max"),
    "v2, in its own namespace": ("0::/", "memory.max"),
    "v1": ("4:memory,pids:/pod/box", "memory/pod/box/memory.limit_in_bytes"),
    "v1, mounted from a parent": ("4:memory:/elsewhere", "memory/memory.limit_in_bytes"),
}


@pytest.mark.parametrize("where", LIMITS)
def test_a_capacity_above_the_memory_limit_is_refused(shared, container, where, path, caplog):
    line, file = LIMITS[where]
    container(line, {"pod/box/memory.max": "max", file: capacity(16) - 1})
    with pytest.raises(ValueError, match=rf"^capacity_bytes: expected at most {capacity(16) - 1},"):
        shared(16)
    assert not path.exists()
    shared(8)
    assert f"up to {capacity(8)} bytes of the {capacity(16) - 1}" in caplog.text
    caplog.clear()
    shared(None)
    assert "bytes of the" in caplog.text
    with pytest.raises(ValueError, match=r"^capacity_bytes: expected at most"):
        shared(16)


def test_no_memory_limit_no_warning(shared, container, path, caplog):
    unlimited = 2**63 - 4096  # as version 1 writes it
    container(
        "4:memory:/", {"memory.max": "max", "memory/memory.limit_in_bytes": unlimited},
        available_kb=2 * capacity(16) // 1024 + 1,
    )  # fmt: skip
    shared(16)
    assert caplog.text == ""
    container("4:memory:/", {}, available_kb=capacity(16) // 1024)
    shared(16)
    assert f"the system has {capacity(16) // 1024 * 1024} available" in caplog.text


# --- Failures of the system ---


def failing(monkeypatch, name, code, *, owner=os):
    def fail(*arguments, **options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(owner, name, fail)


def at_step(monkeypatch, name, action):
    """Let a thread do something when it comes to a step of a put, a get or a repair."""

    def at(backend, step):
        if step == name:
            action(backend)

    monkeypatch.setattr(shm.ShmBackend, "_at", at)


def interrupt(backend):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["ftruncate", "posix_fallocate", "pwrite", "link", "open"])
def test_a_store_that_cannot_be_made_leaves_nothing(shared, path, monkeypatch, name):
    descriptors = num_descriptors()
    failing(monkeypatch, name, errno.ENOSPC)
    with pytest.raises(OSError, match="kvcupy-test") as caught:
        shared()
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert not [*path.parent.iterdir()]
    assert num_descriptors() == descriptors
    assert shared().put(*block_hashes(2)) == ["stored", "stored"]


def make_no_unnamed_files(monkeypatch):
    """Let the file system make no file without a name."""

    def open_named(path, flags, *mode, really=os.open, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return really(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", open_named)


@pytest.mark.parametrize("has_unnamed_files", [True, False])
def test_a_process_killed_while_it_makes_a_store_leaves_nothing(
    shared, path, monkeypatch, has_unnamed_files
):
    if not has_unnamed_files:
        make_no_unnamed_files(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        killed = os.fork()
        if not killed:
            with suppress(BaseException):
                shared()
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == -signal.SIGKILL
    left = [*path.parent.iterdir()]
    assert not path.exists() and len(left) == (not has_unnamed_files)
    unfinished = path.with_name(f".{path.name}.1.live")
    with unfinished.open("wb") as of_another:
        fcntl.flock(of_another, fcntl.LOCK_EX)
        user = shared()
        assert {*path.parent.iterdir()} == {path, unfinished}, "a process that lives makes it"
    assert user.put(*block_hashes(2)) == ["stored"] * 2
    assert shared().get(*block_hashes(2)) == [True] * 2


def test_a_file_taken_for_a_leftover_before_it_is_locked_is_made_again(shared, path, monkeypatch):
    make_no_unnamed_files(monkeypatch)
    removed = []

    def remove_first(descriptor, operation, really=fcntl.flock):
        if not removed and operation == fcntl.LOCK_EX:
            removed.extend(path.parent.iterdir())
            removed[0].unlink()
        really(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    assert shared().put(*block_hashes(2)) == ["stored"] * 2
    assert removed and [*path.parent.iterdir()] == [path]


def test_a_store_that_cannot_be_mapped_stays_as_it_was(shared, path, monkeypatch):
    one = shared()
    one.put(*block_hashes(2))
    before = path.read_bytes()
    descriptors = num_descriptors()

    failing(monkeypatch, "mmap", errno.ENOMEM, owner=shm.mmap)
    with pytest.raises(OSError, match="kvcupy-test"):
        shared()
    assert num_descriptors() == descriptors
    assert path.read_bytes() == before


def test_memory_that_runs_out_is_full_or_makes_room(shared, monkeypatch):
    user, hashes = shared(), block_hashes(6)
    with monkeypatch.context() as patched:
        failing(patched, "posix_fallocate", errno.ENOSPC)
        assert user.put(*hashes[:2]) == ["full", "full"]
    assert user.put(*hashes[:2]) == ["stored", "stored"]
    failing(monkeypatch, "posix_fallocate", errno.ENOSPC)
    assert user.put(*hashes[2:5]) == ["stored", "stored", "full"], "instead of the first two"
    assert [user.store.match([h]) for h in hashes] == [0, 0, 1, 1, 0, 0]
    assert user.get(*hashes[2:4]) == [True, True]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EIO])
def test_a_lock_that_fails_is_a_lost_store(shared, monkeypatch, code):
    user, hashes = shared(), block_hashes(3)
    user.put(*hashes[:1])

    with monkeypatch.context() as patched:
        failing(patched, "flock", code, owner=shm.fcntl)
        assert user.put(*hashes) == ["known", "failed", "failed"]
        assert user.get(*hashes) == [True, False, False], "readers need no lock"
        assert user.store.stats()["lost"] == 2, "the call, and once more"
        with pytest.raises(OSError, match=r"^remove: .*cannot lock"):
            user.store.remove()
    assert user.put(*hashes) == ["known", "stored", "stored"]


def test_an_interrupted_put_leaves_whole_blocks(shared, monkeypatch):
    one, other = shared(4), shared(4)
    hashes = block_hashes(9, 5000)
    steps = ["chosen", "erased", "marked", "odd", "piece", "described", "even", "inserted", "clean"]
    for n, step in enumerate(steps):
        one.put(*block_hashes(4, 100 * n))
        with monkeypatch.context() as patched:
            at_step(patched, step, interrupt)
            with pytest.raises(KeyboardInterrupt):
                one.put(hashes[n])
        for user in (one, other):
            user.get(hashes[n], *block_hashes(4, 100 * n))  # asserts that they are right
        assert other.put(*block_hashes(2, 100 * n + 50)) == ["stored"] * 2, step
        there = [h for h in (*hashes, *block_hashes(1000)) if other.store.match([h])]
        assert len(there) == one.store.stats()["blocks"] <= 4, step
    assert one.store.stats()["recovered"] == len(steps) - 1, "all but the last were in the middle"


def test_a_repair_that_is_interrupted_is_made_again_and_its_store_can_be_closed(
    shared, monkeypatch
):
    user, hashes = shared(), block_hashes(3)
    user.put(*hashes[:2])
    Raw(user).header[shm._DIRTY] = 1
    descriptors = num_descriptors()

    with monkeypatch.context() as patched:
        at_step(patched, "rebuilt", interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            user.put(hashes[2])
    user.store.close()  # while the traceback has arrays over its memory
    assert caught.tb is not None and num_descriptors() < descriptors
    other = shared()
    assert other.put(hashes[2]) == ["stored"] and other.get(*hashes) == [True] * 3
    assert other.store.stats()["recovered"] == 2


def test_a_system_without_what_it_needs_is_named(shared, monkeypatch):
    monkeypatch.setattr(shm, "fcntl", None)
    with pytest.raises(OSError, match=r"url: expected a system with flock"):
        shared()


def test_a_block_that_is_replaced_while_it_is_read_is_missed(shared, monkeypatch):
    """By the generation alone: there are no checksums."""
    one, other = shared(2, checksum="none"), shared(2, checksum="none")
    hashes = block_hashes(8)
    one.put(*hashes[:2])
    replaced = []

    def replace(backend):
        if backend is one.store._backend and not replaced:
            replaced.append(other.put(*hashes[2:4]))

    at_step(monkeypatch, "copying", replace)
    assert one.get(hashes[0]) == [False]
    assert replaced == [["stored", "stored"]]
    assert one.store.stats()["torn"] == 1
    assert one.get(*hashes[2:4]) == [True, True]


# --- Turns at the lock ---


@pytest.mark.parametrize(
    ("waits_for_ms", "seen_ms_ago", "takes_it"),
    [(500, 0, False), (1, 0, True), (500, 60_000, True), (-1000, 0, True)],
    ids=["waits for long", "waits briefly", "has died", "is younger"],
)
def test_a_process_lets_one_that_waits_for_long_take_the_lock(
    shared, monkeypatch, waits_for_ms, seen_ms_ago, takes_it
):
    monkeypatch.setattr(shm, "_WAITING_TTL_NS", 30 * 10**9)
    user, (block_hash,) = shared(deadline_s=0.1), block_hashes(1)
    words, now_ns = user.store._backend._words, time.monotonic_ns()
    words[shm._WAITING] = now_ns - seen_ms_ago * 10**6
    words[shm._WAITING_SINCE] = now_ns - waits_for_ms * 10**6
    assert user.put(block_hash) == (["stored"] if takes_it else ["failed"])
    words[shm._WAITING] = 0
    assert user.put(block_hash) == (["known"] if takes_it else ["stored"])


def test_the_process_that_waits_longest_is_known(shared, monkeypatch):
    monkeypatch.setattr(shm, "_WAITING_TTL_NS", 30 * 10**9)
    user, other = shared(), shared()
    backend = user.store._backend
    words = backend._words
    with open_locked(backend.path):
        waiting = threading.Thread(target=other.put, args=block_hashes(1))
        waiting.start()
        end = soon()
        while not words[shm._WAITING] and time.monotonic() < end:
            time.sleep(0.001)
        since_ns = words[shm._WAITING_SINCE]
        assert 0 < since_ns <= words[shm._WAITING]
        user.store._deadline_s = 0.05
        assert user.put(*block_hashes(1, 100)) == ["failed"]
        assert words[shm._WAITING_SINCE] == since_ns, "it waits for less long"
    waiting.join(60)
    assert words[shm._WAITING] == 0 and user.store.match(block_hashes(1)) == 1


@contextmanager
def open_locked(path):
    """Have the lock of a store, as another process has it."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- Arguments, and the rules of other objects of a process ---


@pytest.mark.parametrize(
    "url", ["shm:", "shm:a/b", "shm:..", "shm:.a", "shm:-a", "shm:a b", "shm:\0", "shm://a",
            "shm:\u00e9", "shm:a\n", "shm:" + "a" * 101],
)  # fmt: skip
def test_names_that_are_refused(url, tmp_path):
    with pytest.raises(ValueError, match=r"^url: expected shm:NAME"):
        Writer(url, capacity_bytes=2**20, folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"url": 5}, TypeError, "url: expected a str"),
        ({"url": "http://a"}, ValueError, "url: expected one that starts with one of shm, redis"),
        ({"url": ""}, ValueError, "url: expected one"),
        ({"host_pool": None}, TypeError, "host_pool: expected a KVPool"),
        ({"capacity_bytes": "1"}, TypeError, "capacity_bytes: expected an int"),
        ({"tenant": 5}, TypeError, "tenant: expected"),
        ({"head_start": 1}, ValueError, "head_start: expected"),
        (
            {"total_kv_heads": 1},
            ValueError,
            "total_kv_heads: expected at least the 2 heads of pool",
        ),
        ({"model": 5}, TypeError, "model: expected"),
        ({"deadline_s": "1"}, TypeError, "deadline_s: expected seconds"),
        ({"deadline_s": None}, TypeError, "deadline_s: expected seconds"),
        ({"deadline_s": -1}, ValueError, "deadline_s: expected 0"),
        ({"deadline_s": float("nan")}, ValueError, "deadline_s: expected 0"),
        ({"checksum": "md5"}, ValueError, "checksum: expected xxh3_64 or none, "),
        ({"checksum": []}, ValueError, "checksum: expected xxh3_64 or none, "),
        ({"retries": -1}, ValueError, "retries: expected 0 to 100"),
        ({"retries": 1.0}, TypeError, "retries: expected an int"),
        ({"folder": 5}, TypeError, "folder: expected"),
        ({"ttl_s": 0}, ValueError, "ttl_s: expected"),
        ({"ttl_s": "1"}, TypeError, "ttl_s: expected"),
        ({"quota_bytes": 1}, ValueError, "quota_bytes: expected at least [0-9]+, one block, got 1"),
        ({"quota_bytes": 1e9}, TypeError, "quota_bytes: expected"),
    ],
)
def test_arguments_of_open(options, error, message, tmp_path):
    arguments = {
        "url": "shm:test", "host_pool": new_pool(), "capacity_bytes": 2**20, "folder": tmp_path,
    } | options  # fmt: skip
    with pytest.raises(error, match=f"^{message}"):
        kv.SharedStore.open(arguments.pop("url"), arguments.pop("host_pool"), **arguments)
    assert not [*tmp_path.iterdir()]


def test_a_store_that_is_not_there(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="url: the store does not exist; capacity_bytes creates it"
    ):
        Writer("shm:test", folder=tmp_path)
    with pytest.raises(FileNotFoundError, match="no-folder"):
        Writer("shm:test", capacity_bytes=2**20, folder=tmp_path / "no-folder")
    with pytest.raises(
        TypeError, match=r"^options: expected some of folder, threads, ttl_s, quota_bytes, got max"
    ):
        Writer("shm:test", capacity_bytes=2**20, folder=tmp_path, max_connections=1)


CALLS = [
    ("match", (5,), TypeError, "hashes: expected"),
    ("match", ([5],), ValueError, "hashes: expected hashes of 128 bits"),
    ("put", ([2**127], [0, 1]), ValueError, "pages: expected 1, one for each hash, got 2"),
    ("put", ([2**127], [8]), ValueError, "pages: expected 0 to 7, got 8"),
    ("put", ([2**127], [-1]), ValueError, "pages: expected 0 to 7, got -1"),
    ("put", ([2**127], [0.5]), ValueError, "pages: expected integers"),
    ("put", ([2**127], 0), TypeError, "pages: expected a list"),
    ("get", ([2**127, 2**126], [3, 3]), ValueError, "pages: expected each page once"),
    ("get", ([2**127], [2**70]), ValueError, "pages: expected 0 to 7, got"),
]


@pytest.mark.parametrize(("name", "arguments", "error", "message"), CALLS)
def test_arguments_of_calls(shared, name, arguments, error, message):
    user = shared()
    with pytest.raises(error, match=f"^{message}"):
        getattr(user.store, name)(*arguments)
    for call in (user.store.get, user.store.put):
        with pytest.raises(TypeError, match=r"^deadline_s: expected seconds"):
            call([2**127], [0], deadline_s="x")
    assert user.store.stats()["blocks"] == 0


def test_memory_of_a_gpu_is_refused(shared):
    pool = new_pool()
    pool.parts = tuple(part.without_owner() for part in pool.parts)
    for part in pool.parts:
        part.device = "cuda:0"
    with pytest.raises(ValueError, match=r"^host_pool: expected memory of the host"):
        kv.SharedStore.open("shm:test", pool, capacity_bytes=2**20)


def test_it_belongs_to_its_process(shared):
    store = shared().store
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="SharedStore: it cannot be pickled"):
            attempt(store)


def test_threads_share_a_store(shared):
    user = shared(8, num_pages=64)
    hashes = block_hashes(24)
    fill(user.pool, range(24), hashes)
    errors, hits = [], []

    def work(n):
        for i in range(40):
            k = (5 * i + 7 * n) % 24
            user.store.put([hashes[k]], [k])
            page = 32 + n
            if user.store.get([hashes[k]], [page])[0]:
                hits.append(k)
                if not holds(user.pool, page, hashes[k]):
                    errors.append(k)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and len(hits) > 40
    assert user.store.stats()["blocks"] == 8 and user.store.stats()["recovered"] == 0


def test_descriptors_and_memory_are_given_back(shared, path):
    def usage():
        maps = Path("/proc/self/maps").read_text().count("kvcupy-test")
        return num_descriptors(), maps

    before = usage()
    for _ in range(3):
        user = shared()
        user.put(*block_hashes(3))
        user.store.close()
        user.store.close()
    assert usage() == before
    forgotten = Writer("shm:test", folder=path.parent)
    del forgotten
    assert usage() == before


def test_stats_and_metrics(shared):
    labels = {"call": "put", "outcome": "stored"}
    before = kv.metrics.value("kvcupy_shared_blocks_total", **labels)
    user, hashes = shared(4), block_hashes(3)
    user.put(*hashes)
    user.put(*hashes)
    user.get(*hashes, *block_hashes(1, 9))
    stats = user.store.stats()
    assert (stats["stored"], stats["known"], stats["hits"], stats["misses"]) == (3, 3, 3, 1)
    assert stats["put_bytes"] == stats["get_bytes"] == 3 * PAGE_BYTES
    assert stats["put_s"] > 0 and stats["get_s"] > 0
    for name in ("full", "failed", "damaged", "unverified", "late", "lost", "slow", "skipped"):
        assert stats[name] == 0
    assert kv.metrics.value("kvcupy_shared_blocks_total", **labels) == before + 3
    assert kv.metrics.value("kvcupy_shared_bytes_total", call="get") >= 3 * PAGE_BYTES
    user.store.close()
    del user
    assert kv.metrics.value("kvcupy_shared_blocks_total", **labels) >= before + 3


@pytest.mark.races
def test_the_order_checker_is_told_of_pages(shared):
    user, hashes = shared(), block_hashes(2)
    user.put(*hashes)
    with kv.order_checker(action="record") as checker:
        user.get(*hashes)
        stream = kv.device("host").stream()
        with kv.declare(reads=[user.pool.k(0)], stream=stream):
            pass
        assert not checker.reports
        with kv.declare(writes=[user.pool.k(0)], stream=stream):
            pass
        user.store.get(hashes, [0, 1])
        [report, *_] = checker.reports
        assert "get shared" in str(report)


def test_calls_are_timed_by_their_worst_outcome(shared):
    user, hashes = shared(), block_hashes(4)

    def count(call, outcome):
        timed = kv.metrics.value("kvcupy_shared_call_seconds", call=call, outcome=outcome)
        return timed.count if timed else 0

    expected = [("put", "stored"), ("put", "known"), ("get", "hits"), ("get", "misses")]
    kv.metrics.enable()
    try:
        before = [count(*labels) for labels in expected]
        user.put(*hashes[:2])
        user.put(*hashes[:2])
        user.put(*hashes[1:3])
        user.get(*hashes[:2])
        user.get(*hashes[2:])
        assert [count(*labels) for labels in expected] == [
            n + more for n, more in zip(before, (2, 1, 1, 1), strict=True)
        ]
    finally:
        kv.metrics.disable()
    user.get(*hashes[:2])
    assert count("get", "hits") == before[2] + 1
