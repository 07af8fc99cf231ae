"""Block stores in files: killed writers, full and failing disks, damaged and foreign files."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from block_store_cases import (
    Writer,
    block_hashes,
    block_of,
    empty_block,
    holds,
    key_of,
    new_pool,
    soon,
)
from helpers import examples

import kvcupy as kv
from kvcupy.remote.stores import file
from kvcupy.remote.stores import store as store_module
from kvcupy.remote.stores.file import FileBackend

HERE = Path(__file__).resolve().parent
HASHES = block_hashes(24)
BLOCK = 8192  # of disk space, of a block of 4 KiB and its header


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def opened(folder):
    """Open users of one directory."""
    users = []

    def open_one(**options):
        users.append(Writer(f"file:{folder}", **{"num_pages": 24, **options}))
        return users[-1]

    yield open_one
    for user in users:
        user.store.close()


def files(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.parent.name != "writers")


def partial(folder):
    """Return the files that are not written to their ends."""
    return [p for p in files(folder) if not p.stat().st_mode & 0o400]


def on_disk(folder):
    return sum(-(-p.stat().st_size // 4096) * 4096 for p in files(folder))


def failing(monkeypatch, name, code, *, times=10**9, after=0, partly=0):
    """Let a call of the system fail; return a list with an item for each failure."""
    real, calls, failed = getattr(os, name), [], []

    def fail(*arguments, **options):
        calls.append(name)
        if after < len(calls) <= after + times:
            failed.append(name)
            if partly:
                real(arguments[0], [arguments[1][0][:partly]], arguments[2])
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    monkeypatch.setattr(file.os, name, fail)
    return failed


# --- Directory, names, access ---


def test_blocks_are_files_of_this_user_by_key_and_stay(opened, folder):
    umask = os.umask(0)
    try:
        user = opened()
        assert user.put(*HASHES[:6]) == ["stored"] * 6
    finally:
        os.umask(umask)
    assert len(files(folder)) == 6
    for block_hash in HASHES[:6]:
        path = user.path(block_hash)
        assert path.parent == folder / path.name[:2]
        assert path.name.startswith(user.key(block_hash).hex())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    folders = [folder, *(p for p in folder.rglob("*") if p.is_dir())]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o700 for p in folders)
    user.store.close()
    assert not list((folder / "writers").iterdir())
    assert opened(layout="layer_first").get(*HASHES[:7]) == [True] * 6 + [False]


@pytest.mark.parametrize("url", ["file:", "file://host/path", "file:a\0b"])
def test_paths_that_are_none(url):
    with pytest.raises(ValueError, match="url: expected file:PATH"):
        kv.BlockStore.open(url, new_pool())


def test_forms_of_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for number, url in enumerate(
        ("file:store", f"file://{tmp_path}/store", "file:x/../store", "file:~/store")
    ):
        with Writer(url) as user:
            assert user.put(HASHES[0]) == (["known"] if number else ["stored"])
    assert len(files(tmp_path / "store")) == 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, "another user's"])
def test_a_directory_that_others_may_write_to_is_refused(opened, folder, monkeypatch, mode):
    opened()
    if mode != "another user's":
        folder.chmod(mode)
    elif os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    else:
        os.chown(folder, 12345, -1)
    with pytest.raises(PermissionError, match=r"others can write|belongs to user"):
        opened()


@pytest.mark.parametrize("make", ["file", "parent"])
def test_a_place_that_cannot_be_a_directory_is_refused(tmp_path, make):
    (tmp_path / "x").write_text("foreign")
    with pytest.raises(OSError, match="x"):
        Writer(f"file:{tmp_path}/x" + ("/below" if make == "parent" else ""))
    assert (tmp_path / "x").read_text() == "foreign"


def test_a_directory_that_cannot_be_written_is_refused_unless_it_is_full(
    opened, folder, monkeypatch
):
    opened().put(HASHES[0])
    with monkeypatch.context() as patch:
        failing(patch, "open", errno.EROFS)
        with pytest.raises(OSError, match="Read-only"):
            opened()
    with monkeypatch.context() as patch:
        failing(patch, "open", errno.ENOSPC)
        user = opened()
    assert user.get(HASHES[0]) == [True]


# --- Damaged, truncated and foreign files ---


def test_truncated_and_longer_files_are_misses_at_every_length(opened):
    user = opened()
    user.put(*HASHES[:2])
    path = user.path(HASHES[0])
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 1 if examples(2) > 1 else 5), len(whole) - 1):
        path.write_bytes(whole[:length])
        user.ask_again()
        assert user.store.match(HASHES[:2]) == 0
        assert user.get(*HASHES[:2]) == [False, True], f"{length} bytes"
        assert not path.exists()
    path.write_bytes(whole + b"x")
    user.ask_again()
    assert user.get(HASHES[0]) == [False]
    path.write_bytes(whole[:-1])
    assert user.put(HASHES[0]) == ["stored"], "it takes the place of a damaged file"
    assert user.get(HASHES[0]) == [True]


def test_a_file_that_is_truncated_while_it_is_read_is_a_miss(opened, monkeypatch):
    user = opened()
    user.put(*HASHES[:2])
    real = os.preadv

    def truncate(descriptor, pieces, start):
        os.truncate(user.path(HASHES[0]), 2000)
        return real(descriptor, pieces, start)

    with monkeypatch.context() as patch:
        patch.setattr(file.os, "preadv", truncate)
        assert user.get(HASHES[0]) == [False]
    assert user.get(HASHES[1]) == [True]


def test_short_reads_and_writes_go_on(opened, monkeypatch):
    user, (read, write) = opened(layout="page_first_direct"), (os.preadv, os.pwritev)
    monkeypatch.setattr(file.os, "preadv", lambda f, p, s: read(f, [p[0][:999]], s))
    monkeypatch.setattr(file.os, "pwritev", lambda f, p, s: write(f, [p[0][:777]], s))
    assert user.put(*HASHES[:3]) == ["stored"] * 3
    assert user.get(*HASHES[:3]) == [True] * 3


def test_more_pieces_than_a_call_of_the_system_takes(folder):
    folder.mkdir(mode=0o700)
    sizes = [3] * 2500
    backend = FileBackend(folder, bytes(16), sum(sizes), None)
    key, target = key_of(1), empty_block(sizes)
    assert backend.put([key], [block_of(key, sizes)], {key: 1}, soon()) == ["stored"]
    assert backend.get([key], [target], {key: 2}, soon()) == [True]
    assert b"".join(target) == b"".join(block_of(key, sizes))


def foreign_things(path):
    """Put something else in the place of a block, one after the other."""
    path.unlink(missing_ok=True)
    yield "a link", path.symlink_to("/etc/passwd")
    path.unlink(missing_ok=True)
    yield "a link to nothing", path.symlink_to("/nowhere")
    path.unlink(missing_ok=True)
    yield "a FIFO", os.mkfifo(path)
    path.unlink(missing_ok=True)
    yield "a folder", path.mkdir()
    path.rmdir()
    yield "an empty file", path.touch()


def test_what_is_no_file_in_the_place_of_a_block_is_a_miss(opened):
    user = opened()
    user.put(*HASHES[:2])
    for what, _ in foreign_things(user.path(HASHES[0])):
        user.ask_again()
        assert user.store.match(HASHES[:2]) == 0, what
        assert user.get(*HASHES[:2]) == [False, True], what
        outcome = user.put(HASHES[0])
        assert outcome == (["failed"] if what == "a folder" else ["stored"]), what
        if outcome == ["stored"]:
            assert user.get(HASHES[0]) == [True], what
            user.path(HASHES[0]).unlink()
    assert Path("/etc/passwd").stat().st_size


def test_foreign_files_are_neither_counted_nor_deleted(opened, folder):
    user = opened(capacity_bytes=4 * BLOCK)
    user.put(*HASHES[:4])
    shard, name = user.path(HASHES[0]).parent, user.path(HASHES[0]).name
    foreign = [
        folder / "README", folder / "data" / name, shard / "x", shard / f"{name}.old",
        shard / name[:-1], folder / "writers" / "mine", shard / name.upper(),
    ]  # fmt: skip
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100_000))
        os.utime(path, (0, 0))
    user.store.close()
    user = opened(capacity_bytes=4 * BLOCK)
    assert user.put(*HASHES[4:8]) == ["stored"] * 4
    user.store.clear()
    assert files(folder) == sorted(p for p in foreign if p.parent.name != "writers")
    assert all(path.stat().st_size == 100_000 for path in foreign)


def test_links_in_the_place_of_folders_are_not_followed(opened, folder, tmp_path):
    user = opened()
    victim = tmp_path / "victim"
    victim.mkdir()
    shard = user.path(HASHES[0]).parent
    shard.symlink_to(victim)
    other = victim / user.path(HASHES[0]).name
    other.write_bytes(bytes(5000))
    user.store.clear()
    assert other.exists()


def test_a_directory_that_is_deleted_is_made_again(opened, folder):
    user = opened()
    user.put(HASHES[0])
    shutil.rmtree(folder)
    assert user.get(HASHES[0]) == [False] and user.store.match(HASHES) == 0
    assert user.put(*HASHES[:2]) == ["stored"] * 2
    assert user.get(*HASHES[:2]) == [True] * 2


# --- Capacity ---


def test_the_least_recently_used_go_first(opened):
    user = opened(capacity_bytes=4 * BLOCK)
    for block_hash in HASHES[:4]:
        user.put(block_hash)
    user.get(HASHES[0])
    user.get(HASHES[2])
    assert user.put(HASHES[4]) == ["stored"]
    assert user.store.contains(HASHES[:5]) == [True, False, True, True, True]
    assert user.put(HASHES[5], HASHES[6]) == ["stored"] * 2
    assert user.store.contains(HASHES[:7]) == [False, False, True, False, True, True, True]
    assert user.store.stats()["evicted"] == 3


def test_control_without_uses_the_oldest_go_first(opened, monkeypatch):
    user = opened(capacity_bytes=4 * BLOCK)
    for block_hash in HASHES[:4]:
        user.put(block_hash)
    with monkeypatch.context() as patch:
        patch.setattr(file.os, "utime", lambda *arguments, **options: None)
        user.get(HASHES[0])
    user.put(HASHES[4])
    assert user.store.contains(HASHES[:1]) == [False]


def test_one_process_never_exceeds_its_capacity(opened, folder):
    user = opened(capacity_bytes=5 * BLOCK + 4095)
    for start in range(0, 24, 3):
        assert user.put(*HASHES[start : start + 3]) == ["stored"] * 3
        assert on_disk(folder) <= 5 * BLOCK
    assert on_disk(folder) == 5 * BLOCK == user.store.stats()["used_bytes"]
    user.store.close()
    user = opened(capacity_bytes=2 * BLOCK)  # smaller than what is there
    assert user.put(HASHES[0]) == ["stored"]
    assert on_disk(folder) == 2 * BLOCK and user.get(HASHES[0]) == [True]


def test_blocks_of_one_put_do_not_evict_each_other(opened):
    user = opened(capacity_bytes=4 * BLOCK)
    user.put(*HASHES[:4])
    assert user.put(HASHES[0], *HASHES[4:10]) == ["known", *["stored"] * 3, *["full"] * 3]
    assert user.get(HASHES[0], *HASHES[4:7]) == [True] * 4


def test_a_put_without_room_leaves_no_file(opened, folder):
    """It has evicted some blocks, and may not evict the others."""
    opened().put(*HASHES[:4])
    user = opened(capacity_bytes=2 * BLOCK)
    assert user.put(*HASHES[:2], HASHES[4]) == ["known", "known", "full"]
    assert not partial(folder)
    assert on_disk(folder) == user.store.stats()["used_bytes"] == 2 * BLOCK


def test_control_without_keep_they_do(opened, monkeypatch):
    real = FileBackend._evict_known
    monkeypatch.setattr(
        FileBackend, "_evict_known", lambda self, n, keep, write: real(self, n, (), write)
    )
    user = opened(capacity_bytes=4 * BLOCK)
    assert user.put(*HASHES[:8]) == ["stored"] * 8
    assert sum(user.get(*HASHES[:8])) == 4


def test_several_processes_exceed_it_by_a_bounded_part(opened, folder):
    capacity = 64 * BLOCK
    users = [opened(capacity_bytes=capacity) for _ in range(3)]
    hashes, most = block_hashes(400, 1000), 0
    for number, block_hash in enumerate(hashes):
        assert users[number % 3].put(block_hash) == ["stored"]
        if number % 8 == 0:
            most = max(most, on_disk(folder))
    assert most <= capacity * (1 + 2 / 16)
    assert on_disk(folder) >= capacity * 0.8, "they do not delete each other's blocks in vain"


def test_counters_spare_a_process_from_listing(opened, monkeypatch):
    """It lists for its first put, once others have put as much as fits, and when one has ended."""
    lists, real = [], FileBackend._list
    monkeypatch.setattr(FileBackend, "_list", lambda self: (lists.append(self), real(self)))
    users = [opened(capacity_bytes=64 * BLOCK) for _ in range(2)]
    for number, block_hash in enumerate(block_hashes(512, 1000)):
        assert users[number % 2].put(block_hash) == ["stored"]
    assert 2 + 2 * 256 // 100 <= len(lists) <= 2 + 2 * 256 // 60
    lists.clear()
    users[0].store.close()
    for block_hash in block_hashes(5, 2000):
        users[1].put(block_hash)
    assert lists == [users[1].backend]


def test_others_count_again_after_a_clear(opened, folder):
    one, other = (opened(capacity_bytes=32 * BLOCK) for _ in range(2))
    for user, count, first in ((one, 12, 0), (other, 3, 100), (one, 0, 0), (other, 3, 200),
                               (one, 4, 300), (other, 3, 400)):  # fmt: skip
        if not count:
            user.store.clear()
        for block_hash in block_hashes(count, first):
            assert user.put(block_hash) == ["stored"]
    assert other.store.stats()["used_bytes"] == on_disk(folder) == 10 * BLOCK


def test_a_file_that_is_being_written_is_a_miss_for_users_who_may_not_read_it(opened, monkeypatch):
    user = opened()
    user.put(HASHES[0])
    with monkeypatch.context() as patch:
        failing(patch, "open", errno.EACCES)
        assert user.get(HASHES[0]) == [False]
    assert user.store.stats()["errors"] == 0
    assert user.store.match(HASHES[:1]) == 1 and user.get(HASHES[0]) == [True]


def test_the_counter_of_a_killed_process_is_deleted(opened, folder, process_of):
    user = opened(capacity_bytes=12 * BLOCK)
    process = process_of(1)
    assert process.stdout.readline() == "open\n"
    assert user.put(*block_hashes(1, 500)) == ["stored"]
    assert len(user.backend._others) == 1
    process.kill()
    process.wait()
    for block_hash in block_hashes(12, 1000):
        assert user.put(block_hash) == ["stored"]
    assert user.backend._others == {} and len(list((folder / "writers").iterdir())) == 1
    assert on_disk(folder) <= 12 * BLOCK


def test_control_without_listing_again_they_exceed_it(opened, folder, monkeypatch):
    monkeypatch.setattr(file, "_LOOKS_PER_CAPACITY", 0)
    users = [opened(capacity_bytes=64 * BLOCK) for _ in range(3)]
    for number, block_hash in enumerate(block_hashes(400, 1000)):
        users[number % 3].put(block_hash)
    assert on_disk(folder) > 64 * BLOCK * (1 + 2 / 16)


@pytest.mark.parametrize("is_dead", [False, True])
def test_files_of_dead_writers_are_evicted_and_those_of_living_ones_are_not(
    opened, folder, is_dead
):
    user = opened(capacity_bytes=4 * BLOCK)
    user.put(*HASHES[:4])
    path = user.path(HASHES[0])
    path.write_bytes(path.read_bytes()[:-16] + bytes(16))  # the end of an evicted file
    path.chmod(0o200)
    os.utime(path, (time.time() - 61 * is_dead,) * 2)
    user.store.close()
    user = opened(capacity_bytes=4 * BLOCK)
    assert user.store.contains(HASHES[:4]) == [False, True, True, True] == user.get(*HASHES[:4])
    assert user.put(*HASHES[4:7]) == ["stored"] * 3
    assert path.exists() != is_dead and on_disk(folder) == 4 * BLOCK
    assert user.store.contains(HASHES[1:4]) == [is_dead, False, False]
    assert user.put(HASHES[0]) == ["stored"] and user.get(HASHES[0]) == [True]


def test_later_blocks_of_a_prefix_go_first(opened):
    """Without the blocks before them they are of no use."""
    user = opened(capacity_bytes=20 * BLOCK)
    user.backend.blocks_per_call = 3
    user.put(*HASHES[:8])
    user.put(*HASHES[8:18])
    assert user.put(*HASHES[18:24]) == ["stored"] * 6
    assert user.store.contains(HASHES[:8]) == [True] * 4 + [False] * 4
    assert user.store.match(HASHES[8:]) == 16
    user.get(*HASHES[8:18])
    assert user.put(*block_hashes(10, 100)) == ["stored"] * 10
    assert user.store.match(HASHES[:8]) == 0 and user.store.match(HASHES[18:]) == 0
    assert user.put(*block_hashes(4, 200)) == ["stored"] * 4
    assert user.store.match(HASHES[8:18]) == 6


def test_control_with_equal_times_the_first_blocks_go(opened, monkeypatch):
    monkeypatch.setattr(
        store_module, "_times_of_use", lambda keys: {key: time.time_ns() for key in keys}
    )
    user = opened(capacity_bytes=10 * BLOCK)
    user.put(*HASHES[:8])
    user.put(*HASHES[8:12])
    assert user.store.match(HASHES[:8]) == 0


# --- A full or failing disk ---


@pytest.mark.parametrize("partly", [0, 1000])
@pytest.mark.parametrize("capacity", [None, 20 * BLOCK])
def test_a_full_disk_evicts_or_is_full(opened, folder, monkeypatch, capacity, partly):
    user = opened(capacity_bytes=capacity)
    user.put(*HASHES[:4])
    with monkeypatch.context() as patch:
        failing(patch, "pwritev", errno.ENOSPC, times=1, partly=partly)
        assert user.put(HASHES[4]) == ["stored"]
    assert user.store.contains(HASHES[:5]) == [True, True, True, False, True]
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with monkeypatch.context() as patch:
            failing(patch, "pwritev", code, partly=partly)
            assert user.put(HASHES[5]) == ["full"]
    assert not partial(folder)
    assert capacity is None or user.store.stats()["used_bytes"] == on_disk(folder)
    user.store.clear()
    with monkeypatch.context() as patch:
        failing(patch, "pwritev", errno.ENOSPC)
        assert user.put(*HASHES[:2]) == ["full"] * 2, "nothing to evict"
    assert user.put(*HASHES[:2]) == ["stored"] * 2 and user.get(*HASHES[:2]) == [True] * 2


@pytest.mark.parametrize("name", ["open", "pwritev", "utime", "fchmod", "close"])
def test_a_failing_call_of_the_system_fails_the_put(opened, folder, monkeypatch, name, caplog):
    user = opened()
    user.put(HASHES[0])
    with monkeypatch.context() as patch:
        assert failing(patch, name, errno.EIO) == []
        assert user.put(*HASHES[1:3]) == ["failed"] * 2
    assert "cannot write a block" in caplog.text
    assert user.store.stats()["errors"] == 2
    assert user.put(*HASHES[:3]) == ["known", "stored", "stored"]
    assert user.get(*HASHES[:3]) == [True] * 3


@pytest.mark.parametrize("name", ["open", "preadv"])
def test_an_error_of_a_read_is_a_miss_and_not_a_deletion(opened, monkeypatch, name, caplog):
    user = opened()
    user.put(*HASHES[:2])
    with monkeypatch.context() as patch:
        failing(patch, name, errno.EIO)
        assert user.get(*HASHES[:2]) == [False, False]
    assert "cannot read a block" in caplog.text
    assert user.store.match(HASHES[:2]) == 0, "it is not promised again at once"
    user.ask_again()
    assert user.get(*HASHES[:2]) == [True, True]


def test_a_hit_needs_no_right_to_record_it(opened, monkeypatch):
    user = opened()
    user.put(HASHES[0])
    failing(monkeypatch, "utime", errno.EROFS)
    assert user.get(HASHES[0]) == [True]


@pytest.mark.parametrize("name", ["scandir", "rename", "fstat", "fchmod"])
def test_errors_of_an_eviction_are_outcomes(opened, monkeypatch, name):
    user = opened(capacity_bytes=4 * BLOCK)
    if name != "scandir":
        user.put(*HASHES[:4])
    with monkeypatch.context() as patch:
        failing(patch, name, errno.EIO)
        outcomes = user.put(*HASHES[4:6])
    assert outcomes[0] in ("failed", "full")
    assert user.put(*HASHES[5:8]) == [
        ("known" if outcomes[1] == "stored" else "stored"),
        *["stored"] * 2,
    ]
    assert user.put(HASHES[4]) == ["stored"]
    assert user.get(*HASHES[4:8]) == [True] * 4


# --- Several processes, killed at any moment ---


PROGRAM = """
import random, sys
sys.path.insert(0, {here!r})
from block_store_cases import Writer, block_hashes
hashes, order = block_hashes(24), random.Random(sys.argv[2])
with Writer(sys.argv[1], capacity_bytes={capacity}, num_pages=8) as user:
    print("open", flush=True)
    while True:
        user.put(*order.sample(hashes, 4))
        user.ask_again()
        user.get(*order.sample(hashes, 4))
        assert user.store.stats()["damaged"] == 0
"""


@pytest.fixture
def process_of(folder):
    started = []

    def start(seed, capacity=12 * BLOCK):
        program = PROGRAM.format(here=str(HERE), capacity=capacity)
        environment = {
            **os.environ, "PYTHONPATH": str(HERE.parents[1]), "OPENBLAS_NUM_THREADS": "1",
        }  # fmt: skip
        started.append(subprocess.Popen(
            [sys.executable, "-c", program, f"file:{folder}", str(seed)], env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ))  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def check_killed(opened, folder, times):
    """Kill forked writers at random moments: blocks are whole or missing, also in between."""
    order, seen = random.Random(20261129), Counter()
    reader = opened()

    def read():
        reader.ask_again()
        found = reader.get(*HASHES)
        seen.update(found)
        return any(found)

    for number in range(times):
        ready_read, ready_write = os.pipe()
        child = os.fork()
        if not child:
            try:
                mine = random.Random(number)
                with Writer(f"file:{folder}", capacity_bytes=16 * BLOCK) as user:
                    user.store._helpers.count = 0
                    os.write(ready_write, b"1")
                    while True:
                        user.put(*mine.sample(HASHES, 4))
                        user.get(*mine.sample(HASHES, 4))
                        assert user.store.stats()["damaged"] == 0
            finally:
                os._exit(1)
        os.close(ready_write)
        assert os.read(ready_read, 1) == b"1"
        os.close(ready_read)
        pause, has_hit = time.monotonic() + order.uniform(0, 0.01), False
        while time.monotonic() < pause or not has_hit:
            has_hit |= read()
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        read()
    stats = reader.store.stats()
    assert stats["damaged"] == stats["wrong_files"] == stats["errors"] == 0
    assert seen[True] >= times and seen[False] >= times, "or it shows nothing"
    for left in partial(folder):
        os.utime(left, (0, 0))
    user = opened(capacity_bytes=16 * BLOCK)
    assert user.put(*HASHES[:16]).count("failed") == 0
    assert user.get(*HASHES[:16]) == [True] * 16
    assert on_disk(folder) <= 16 * BLOCK and not partial(folder)


def test_killed_writers_leave_whole_blocks(opened, folder):
    check_killed(opened, folder, examples(12))


@pytest.mark.slow
def test_200_killed_writers_leave_whole_blocks(opened, folder):
    check_killed(opened, folder, 200)


@pytest.mark.parametrize("mode", [0o200, 0o600])
def test_a_half_written_file_is_known_by_its_mode_and_not_without(
    opened, folder, monkeypatch, mode
):
    user = opened()
    monkeypatch.setattr(file, "_PARTIAL_MODE", mode)
    child = os.fork()
    if not child:
        real = os.pwritev
        monkeypatch.setattr(
            file.os,
            "pwritev",
            lambda f, p, s: (real(f, [p[0][:20]], s), os.kill(os.getpid(), signal.SIGKILL)),
        )
        with Writer(f"file:{folder}") as other:
            other.put(HASHES[0])
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert user.path(HASHES[0]).exists() and user.get(HASHES[0]) == [False]
    assert user.store.stats()["wrong_files"] == (mode == 0o600)
    if mode == 0o200:
        assert user.put(HASHES[0]) == ["stored"] and user.get(HASHES[0]) == [True]


def test_processes_share_a_directory(opened, folder, process_of):
    """Two put, get and evict beside this one; no wrong byte, no damage, no error."""
    processes = [process_of(seed) for seed in range(2)]
    for process in processes:
        assert process.stdout.readline() == "open\n"
    user = opened(num_pages=24, capacity_bytes=12 * BLOCK)
    hits = 0
    for _ in range(examples(60)):
        user.ask_again()
        hits += sum(user.get(*HASHES))
        user.put(*HASHES[:6])
    for process in processes:
        assert process.poll() is None, process.stderr.read()
        process.send_signal(signal.SIGKILL)
    assert hits and user.store.stats()["damaged"] == 0
    assert json.dumps(user.store.stats())


def test_a_stopped_process_holds_up_nobody(opened, process_of):
    process = process_of(1)
    assert process.stdout.readline() == "open\n"
    process.send_signal(signal.SIGSTOP)
    user = opened(capacity_bytes=12 * BLOCK)
    for start in range(0, 24, 6):
        assert user.put(*HASHES[start : start + 6]).count("failed") == 0
    assert user.get(*HASHES[18:24]) == [True] * 6
    process.send_signal(signal.SIGCONT)


def test_an_evicted_file_is_written_over(opened, folder):
    user = opened(capacity_bytes=2 * BLOCK)
    user.put(HASHES[0])
    user.put(HASHES[1])
    inode = user.path(HASHES[0]).stat().st_ino
    assert user.put(HASHES[2]) == ["stored"]
    assert user.path(HASHES[2]).stat().st_ino == inode
    assert user.get(*HASHES[:3]) == [False, True, True]
    assert on_disk(folder) == 2 * BLOCK and not partial(folder)


def test_a_file_with_a_second_name_or_another_length_is_not_written_over(opened, folder):
    user = opened(capacity_bytes=3 * BLOCK)
    for block_hash in HASHES[:3]:
        user.put(block_hash)
    other, cut = folder.parent / "other", user.path(HASHES[1])
    other.hardlink_to(user.path(HASHES[0]))
    before = other.read_bytes()
    cut_ns = cut.stat().st_mtime_ns
    os.truncate(cut, 6000)
    os.utime(cut, ns=(cut_ns, cut_ns))
    assert user.put(HASHES[3], HASHES[4]) == ["stored"] * 2
    assert other.read_bytes() == before
    assert user.get(*HASHES[:5]) == [False, False, True, True, True]


def read_during_an_eviction(user, monkeypatch):
    """Let a put evict the block that a get has just opened, and write over the first half of its
    file; return what the get says."""
    real, write = os.preadv, os.pwritev

    def write_half(descriptor, pieces, start):
        return write(descriptor, [pieces[0], pieces[1][:1000]], start) and 0

    def evict(descriptor, pieces, start):
        monkeypatch.setattr(file.os, "preadv", real)
        with monkeypatch.context() as patch:
            patch.setattr(file.os, "pwritev", write_half)
            assert user.store.put([HASHES[1]], [2]) == ["failed"]
        return real(descriptor, pieces, start)

    monkeypatch.setattr(file.os, "preadv", evict)
    return user.store.get([HASHES[0]], [5])


def test_a_file_that_is_being_read_is_not_written_over(opened, monkeypatch):
    user = opened(capacity_bytes=BLOCK)
    user.put(HASHES[0])
    assert read_during_an_eviction(user, monkeypatch) == [True]
    assert holds(user.pool, 5, HASHES[0])
    assert user.store.contains(HASHES[:2]) == [False, False]
    assert user.store.stats()["damaged"] == 0


def test_control_without_the_lock_it_is(opened, monkeypatch):
    monkeypatch.setattr(file.fcntl, "flock", lambda *arguments: None)
    user = opened(capacity_bytes=BLOCK)
    user.put(HASHES[0])
    assert read_during_an_eviction(user, monkeypatch) == [False], "the checksum notices it"
    assert user.store.stats()["damaged"] == 1


def test_an_old_file_that_is_written_over_is_not_taken_for_stale(opened, monkeypatch):
    """Another process deletes what dead writers have left, before the first byte is written."""
    opened().put(HASHES[0])
    user = opened(capacity_bytes=BLOCK)
    os.utime(user.path(HASHES[0]), (0, 0))
    real = os.pwritev

    def write(*arguments):
        monkeypatch.setattr(file.os, "pwritev", real)
        opened()
        return real(*arguments)

    monkeypatch.setattr(file.os, "pwritev", write)
    assert user.put(HASHES[1]) == ["stored"] and user.get(HASHES[1]) == [True]
    assert user.store.stats()["errors"] == 0


def test_a_listing_during_a_put_counts_its_block_once(opened, folder, monkeypatch):
    user = opened(capacity_bytes=2 * BLOCK)
    user.put(*HASHES[:2])
    real = os.pwritev

    def write(*arguments):
        user.backend._list()
        return real(*arguments)

    monkeypatch.setattr(file.os, "pwritev", write)
    assert user.put(HASHES[2]) == ["stored"]
    assert on_disk(folder) == user.store.stats()["used_bytes"] == 2 * BLOCK


def test_a_child_that_is_forked_during_a_put_does_not_hide_the_block(opened, monkeypatch):
    """It inherits the open file, and with it the lock."""
    user = opened(capacity_bytes=BLOCK)
    user.put(HASHES[0])
    real, inherited = os.pwritev, []

    def write(descriptor, *arguments):
        inherited.append(os.dup(descriptor))
        return real(descriptor, *arguments)

    monkeypatch.setattr(file.os, "pwritev", write)
    assert user.put(HASHES[1]) == ["stored"]
    assert user.get(HASHES[1]) == [True]
    for descriptor in inherited:
        os.close(descriptor)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_file_that_was_evicted_after_it_was_opened_is_a_miss(opened, monkeypatch, when):
    """Its name belongs to nothing, or the file has another name and other contents."""
    user = opened(capacity_bytes=BLOCK)
    user.put(HASHES[0])
    real = file._lock

    def evicted(descriptor, kind):
        monkeypatch.setattr(file, "_lock", real)
        user.store.put([HASHES[1]], [2])
        return real(descriptor, kind)

    def locked(descriptor, kind):
        return kind != file.fcntl.LOCK_SH and real(descriptor, kind)

    monkeypatch.setattr(file, "_lock", evicted if when == "before" else locked)
    assert user.store.get([HASHES[0]], [5]) == [False]
    assert {user.store.stats()[name] for name in ("damaged", "errors", "wrong_files")} == {0}


def test_a_file_system_without_locks_deletes_and_reads(opened, monkeypatch):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(file.fcntl, "flock", no_locks)
    user = opened(capacity_bytes=2 * BLOCK)
    for start in range(0, 6, 2):
        assert user.put(*HASHES[start : start + 2]) == ["stored"] * 2
        assert user.get(*HASHES[start : start + 2]) == [True] * 2


def test_threads_evict_within_the_capacity(opened, folder):
    user = opened(capacity_bytes=10 * BLOCK)

    def work(number):
        for block_hash in block_hashes(30, 1000 * number):
            user.store.put([block_hash], [number])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert on_disk(folder) == user.store.stats()["used_bytes"] == 10 * BLOCK
    assert user.put(*HASHES[:8]) == ["stored"] * 8
