"""`python -m kvcupy store`: list, size, empty, drain and verify the blocks of a store."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from cache import disk_cases
from redis_server import Redis, cluster_in, free_port, needs_redis, servers_in
from shared_cases import Writer, block_hashes

from kvcupy.__main__ import main
from kvcupy.cache.tiered.disk_format import RECORD_BYTES, VERSION, Layout
from kvcupy.remote.stores.shm import ShmBackend
from kvcupy.remote.stores.store import HEADER_BYTES

HASHES = block_hashes(6)


@pytest.fixture
def store(capsys):
    """Run a command, and return its exit status and its report."""

    def run(*arguments):
        status = main(["store", *map(str, arguments), "--json"])
        written = capsys.readouterr()
        return status, json.loads(written.out) if written.out else written.err

    return run


@pytest.fixture
def memory(tmp_path):
    """A store in memory with the blocks of HASHES, and the arguments that name it."""
    with Writer("shm:test", capacity_bytes=2**20, folder=tmp_path) as user:
        user.put(*HASHES)
        yield user, ["shm:test", "--folder", tmp_path]


def test_memory_is_listed_and_sized(memory, store):
    user, where = memory
    user.get(*HASHES[:2])
    keys = [key.hex() for key in user.store._keys.keys(HASHES)]
    tenant = user.store._keys.namespace.hex()
    expected = [
        {"key": key, "bytes": user.pool.page_bytes, "idle_s": None, "tenant": tenant}
        for key in keys
    ]
    status, listed = store("list", *where)
    assert status == 0 and listed == expected[2:] + expected[:2], "the next to be evicted first"
    status, sizes = store("stat", *where)
    assert status == 0
    assert (sizes["blocks"], sizes["evicted"], sizes["draining"]) == (6, 0, False)
    assert sizes["blocks_of_tenants"] == {tenant: 6}
    assert sizes["block_bytes"] == user.pool.page_bytes and sizes["bytes"] > 6 * 4096


def test_memory_is_verified_and_damaged_blocks_are_dropped(memory, store):
    user, where = memory
    backend = user.store._backend
    keys = user.store._keys.keys(HASHES)
    assert store("verify", *where)[1] == {
        "blocks": 6, "damaged": 0, "unverified": 0, "dropped": 0, "damaged_keys": []
    }  # fmt: skip
    used = [backend._records[backend._find(key) * 32 + 8] for key in keys]
    assert not any(used), "reads of an operator are no use"
    backend._bytes[backend._layout.payload_at(backend._find(keys[3])) + 100] ^= 1
    status, report = store("verify", *where)
    assert (status, report["damaged"], report["dropped"]) == (1, 1, 0)
    assert report["damaged_keys"] == [keys[3].hex()]
    assert store("verify", "--drop", *where)[1]["dropped"] == 1
    assert store("verify", *where)[0] == 0
    assert user.get(*HASHES) == [True] * 3 + [False] + [True] * 2
    assert user.store.stats()["damaged"] == 0


def test_blocks_without_checksums_are_not_verified(tmp_path, store):
    with Writer("shm:test", capacity_bytes=2**20, folder=tmp_path, checksum="none") as user:
        user.put(*HASHES)
        assert store("verify", "shm:test", "--folder", tmp_path)[1]["unverified"] == 6


def test_encrypted_blocks_are_not_verified(tmp_path, store):
    with Writer(
        "shm:test", capacity_bytes=2**20, folder=tmp_path, encryption_key=bytes(32)
    ) as user:
        user.put(*HASHES)
        _, report = store("verify", "--drop", "shm:test", "--folder", tmp_path)
        assert (report["unverified"], report["damaged"], report["dropped"]) == (6, 0, 0)
        assert all(user.get(*HASHES))


def test_memory_is_emptied(memory, store):
    user, where = memory
    user.get(HASHES[0])
    assert store("evict", where[0], 2, *where[1:]) == (0, {"dropped": 2})
    assert [user.store.match([h]) for h in HASHES] == [1, 0, 0, 1, 1, 1]
    status, error = store("clear", *where)
    assert status == 1 and "expected --yes" in error
    assert user.store.match(HASHES[3:]) == 3
    assert store("clear", "--yes", *where) == (0, {"dropped": 4})
    assert user.store.match(HASHES[3:]) == 0 and user.store.stats()["blocks"] == 0
    assert user.put(*HASHES) == ["stored"] * 6
    path = user.store._backend.path
    assert store("clear", "--yes", "--remove-file", *where) == (0, {"dropped": 6})
    assert not path.exists()
    status, error = store("stat", *where)
    assert status == 1 and "the store does not exist" in error


def test_one_tenant_of_a_memory_is_emptied(memory, store):
    user, where = memory
    with Writer("shm:test", folder=where[-1], tenant="another") as other:
        other.put(*HASHES[:2])
        tenant = other.store._keys.namespace.hex()
        status, error = store("clear", "--yes", "--remove-file", "--tenant", tenant, *where)
        assert status == 1 and "--remove-file: expected" in error
        assert (user.store.match(HASHES), other.store.match(HASHES[:2])) == (6, 2)
        assert store("stat", *where)[1]["blocks_of_tenants"][tenant] == 2
        assert store("clear", "--yes", "--tenant", tenant, *where) == (0, {"dropped": 2})
        assert (user.store.match(HASHES), other.store.match(HASHES)) == (6, 0)


def test_a_drained_store_takes_no_puts(memory, store):
    user, where = memory
    assert store("drain", *where) == (0, {"draining": True})
    new = block_hashes(2, 100)
    assert user.put(HASHES[0], *new) == ["known", "full", "full"]
    assert user.get(*HASHES) == [True] * 6
    assert store("stat", *where)[1]["draining"] is True
    assert store("drain", "--undo", *where) == (0, {"draining": False})
    assert user.put(*new) == ["stored"] * 2


def test_draining_waits_for_a_put_until_its_deadline(memory, store, monkeypatch):
    user, where = memory
    read_end, write_end = os.pipe()
    writer = os.fork()
    if not writer:
        try:
            with Writer("shm:test", folder=where[-1]) as other:
                monkeypatch.setattr(ShmBackend, "_at", lambda *_: stop(write_end))
                other.put(*block_hashes(1, 100))
        finally:
            os._exit(0)
    try:
        os.read(read_end, 1)
        status, error = store("drain", "--deadline", 0.2, *where)
        assert status == 1 and "another process holds its lock" in error
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert user.store.stats()["draining"] is False
    assert store("drain", *where)[0] == 0


def stop(write_end):
    os.write(write_end, b".")
    os.kill(os.getpid(), signal.SIGSTOP)


# --- The file of a disk tier ---


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "blocks.kv"
    disk_cases.filled(path, {0: 11, 3: 12, 5: 13}, num_slots=6)
    return path


LAYOUT = Layout(6, disk_cases.PAGE_BYTES)


def change(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def hashes_of(listed):
    return [int(block["key"][:32], 16) for block in listed]


def test_a_disk_file_is_listed_sized_and_emptied(disk, store):
    assert hashes_of(store("list", disk)[1]) == [11, 12, 13], "the oldest first"
    status, sizes = store("stat", disk)
    assert status == 0 and sizes["file_bytes"] == disk.stat().st_size
    assert (sizes["blocks"], sizes["capacity_blocks"], sizes["file_version"]) == (3, 6, VERSION)
    assert sizes["block_bytes"] == disk_cases.PAGE_BYTES
    assert store("evict", disk, 1) == (0, {"dropped": 1})
    assert hashes_of(store("list", disk)[1]) == [12, 13]
    with disk_cases.open_tier(disk, 6) as tier:
        assert sorted(tier.entries()) == [(12, 3), (13, 5)]
        status, error = store("clear", "--yes", disk)
        assert status == 1 and "no process has open" in error
        assert hashes_of(store("list", disk)[1]) == [12, 13]
    assert store("clear", "--yes", "--remove-file", disk) == (0, {"dropped": 2})
    assert not disk.exists()


def test_a_disk_file_is_verified(disk, store):
    change(disk, LAYOUT.payload_at(3) + 4999)
    status, report = store("verify", disk)
    assert (status, report["blocks"], report["damaged"]) == (1, 3, 1)
    assert int(report["damaged_keys"][0][:32], 16) == 12
    assert store("verify", "--drop", disk)[1]["dropped"] == 1
    change(disk, LAYOUT.record_at(5))
    assert store("verify", disk) == (
        0, {"blocks": 1, "damaged": 0, "unverified": 0, "dropped": 0, "damaged_keys": []}
    )  # fmt: skip
    assert disk.read_bytes()[LAYOUT.record_at(3) :][:RECORD_BYTES] == bytes(RECORD_BYTES)
    assert store("drain", disk)[0] == 1


def test_a_disk_file_of_the_previous_version_is_verified(tmp_path, store):
    path = tmp_path / "blocks.kv"
    disk_cases.filled_by_previous(path, {0: 11, 3: 12})
    assert store("verify", path)[1]["damaged"] == 0
    change(path, LAYOUT.payload_at(3) + 4999)
    status, report = store("verify", path)
    assert (status, report["blocks"], report["damaged"]) == (1, 2, 1)


# --- Errors ---


def test_errors(tmp_path, store, memory):
    (tmp_path / "other").write_bytes(b"something else")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    (tmp_path / "kvcupy-other").write_bytes(b"something else")
    for arguments, message in (
        (["list", "shm:nothing", "--folder", tmp_path], "does not exist"),
        (["list", "shm:other", "--folder", tmp_path], "expected a shared store"),
        (["list", "shm:/"], "url: expected shm:NAME"),
        (["list", "mooncake://h"], "url: expected"),
        (["list", tmp_path / "other"], "expected a file of a disk tier"),
        (["list", tmp_path / "link"], "link"),
        (["list", tmp_path / "nothing"], "No such file"),
        (["evict", "shm:test", 0, "--folder", tmp_path], "expected at least 1"),
        (["stat", "redis://:p@another-host"], "expected TLS"),
        (["stat", "shm:test", "--folder", tmp_path, "--option", "db=2"], "options: expected none"),
    ):
        status, error = store(*arguments)
        assert status == 1 and error.startswith("store: ") and message in error, arguments
    for option in (
        ["--deadline", "-1"], ["--deadline", "nan"], ["--deadline", "x"], ["--tenant", "somebody"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            store("clear", "--yes", "shm:test", *option)
        assert caught.value.code == 2


def test_it_is_printed_as_text(memory, capsys):
    user, (url, *folder) = memory
    assert main(["store", "stat", url, *map(str, folder)]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["draining", "False"] in shown
    assert ["blocks", "of", "tenants", user.store._keys.namespace.hex(), "6"] in shown
    assert main(["store", "verify", url, *map(str, folder)]) == 0
    assert "damaged keys  none" in capsys.readouterr().out
    assert main(["store", "list", url, *map(str, folder)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


# --- A server ---


@needs_redis
class TestServer:
    @pytest.fixture
    def server(self, tmp_path):
        with servers_in(tmp_path) as start:
            server = start("--requirepass", "secret")
            server.where = [server.url, "--password-file", tmp_path / "password"]
            (tmp_path / "password").write_text("secret\n")
            yield server

    @pytest.fixture
    def users(self, server):
        """Two tenants, of which the second has three blocks."""
        with (
            Writer(server.url, password="secret", tenant="a") as one,
            Writer(server.url, password="secret", tenant="b") as two,
        ):
            one.put(*HASHES)
            two.put(*HASHES[:3])
            yield one, two

    def test_it_is_listed_and_sized_by_tenant(self, server, users, store):
        status, listed = store("list", *server.where)
        tenants = [user.store._keys.namespace.hex() for user in users]
        assert status == 0 and sorted(b["tenant"] for b in listed) == sorted(
            [tenants[0]] * 6 + [tenants[1]] * 3
        )
        block_bytes = users[0].pool.page_bytes + HEADER_BYTES
        assert all(block_bytes < b["bytes"] < 2 * block_bytes for b in listed)
        assert {b["idle_s"] for b in listed} <= {0, 1, 2}
        status, sizes = store("stat", *server.where)
        assert (sizes["blocks"], sizes["bytes"]) == (9, sum(b["bytes"] for b in listed))
        assert sizes["blocks_of_tenants"] == {tenants[0]: 6, tenants[1]: 3}
        assert sizes["used_memory"] > sizes["bytes"] and sizes["maxmemory"] == 0

    def test_tenants_are_emptied(self, server, users, store):
        one, two = users
        tenant = one.store._keys.namespace.hex()
        assert store("clear", "--tenant", tenant, *server.where)[0] == 1
        dropped = store("clear", "--tenant", tenant, "--yes", *server.where)
        assert dropped == (0, {"dropped": 6})
        assert (one.store.match(HASHES), two.store.match(HASHES)) == (0, 3)
        assert store("evict", server.url, 2, *server.where[1:]) == (0, {"dropped": 2})
        assert store("clear", "--yes", *server.where) == (0, {"dropped": 1})
        assert store("drain", *server.where)[0] == 1

    def test_the_oldest_are_evicted(self, server, users, store):
        one, two = users
        time.sleep(2.1)  # seconds are what the server knows
        assert all(one.get(*HASHES[2:]))
        assert store("evict", server.url, 5, *server.where[1:]) == (0, {"dropped": 5})
        assert [one.store.match([h]) for h in HASHES] == [0, 0, 1, 1, 1, 1]
        assert two.store.match(HASHES) == 0

    def test_it_is_verified(self, server, users, store):
        one, two = users
        client = Redis(port=server.port, password="secret")
        key = two.store._backend._key(two.store._keys.keys(HASHES[1:2])[0])
        client.setrange(key, HEADER_BYTES + 100, b"other")
        client.set("kvcupy:something:else", b"x" * 100)
        status, report = store("verify", *server.where)
        assert status == 1 and (report["blocks"], report["damaged"]) == (10, 2)
        assert sorted(report["damaged_keys"]) == sorted([key.decode(), "kvcupy:something:else"])
        assert store("verify", "--drop", *server.where)[1]["dropped"] == 2
        assert store("verify", *server.where)[0] == 0
        assert all(one.get(*HASHES)) and two.get(*HASHES[:3]) == [True, False, True]

    def test_encrypted_blocks_are_not_verified(self, server, users, store):
        with Writer(server.url, password="secret", encryption_key=bytes(32)) as user:
            user.put(*HASHES)
            _, report = store("verify", "--drop", *server.where)
            assert (report["unverified"], report["damaged"], report["dropped"]) == (6, 0, 0)
            assert all(user.get(*HASHES))

    def test_a_cluster(self, tmp_path, store):
        with cluster_in(tmp_path) as nodes:
            url = nodes[0].url.replace("redis:", "redis+cluster:")
            with Writer(url) as user:
                user.put(*HASHES)
                assert len(store("list", url)[1]) == store("stat", url)[1]["blocks"] == 6
                assert store("verify", url)[0] == 0
                assert store("evict", url, 2) == (0, {"dropped": 2})
                assert store("clear", "--yes", url) == (0, {"dropped": 4})
                assert user.store.match(HASHES) == 0

    def test_errors(self, server, store):
        for arguments, message in (
            ([server.url], "Authentication required"),
            ([server.url, "--option", "password=wrong"], "invalid"),
            ([f"redis://127.0.0.1:{free_port()}"], "refused"),
        ):
            status, error = store("stat", *arguments)
            assert status == 1 and error.startswith("store: redis ") and message in error
