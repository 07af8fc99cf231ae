"""`SharedStore` over a Redis server: what users see of tenants, damage, loss and kills."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import helpers
import pytest
from redis_server import free_port, needs_redis, servers_in
from shared_cases import Writer, block_hashes, bytes_of, new_pool

import kvcupy as kv

HASHES = block_hashes(6)

pytestmark = needs_redis


@pytest.fixture
def redis_server(tmp_path):
    with servers_in(tmp_path) as start:
        yield start


def stats_of(user, *names):
    stats = user.store.stats()
    return tuple(stats[name] for name in names)


def ask(user, *words):
    (reply,) = user.store._backend._run([words], time.monotonic() + 30)
    return reply


def key_of(user, block_hash):
    (key,) = user.store._keys.keys([block_hash])
    return user.store._backend._key(key)


DAMAGES = {
    "a byte of the payload": lambda user, key: ask(user, b"SETRANGE", key, b"2000", b"?!"),
    "a byte of the header": lambda user, key: ask(user, b"SETRANGE", key, b"20", b"?!"),
    "longer": lambda user, key: ask(user, b"APPEND", key, b"x"),
    "much longer": lambda user, key: ask(user, b"SETRANGE", key, b"1000000", b"x"),
    "shorter": lambda user, key: ask(user, b"SET", key, b"short"),
    "empty": lambda user, key: ask(user, b"SET", key, b""),
    "no string": lambda user, key: (ask(user, b"UNLINK", key), ask(user, b"LPUSH", key, b"x")),
    "gone": lambda user, key: ask(user, b"UNLINK", key),
    "of another key": lambda user, key: ask(
        user, b"COPY", key_of(user, HASHES[0]), key, b"REPLACE"
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_blocks_are_misses(redis_server, name):
    with Writer(redis_server().url, num_pages=10) as user:
        user.put(*HASHES)
        DAMAGES[name](user, key_of(user, HASHES[3]))
        guard = bytes_of(user.pool, 9)
        assert user.get(*HASHES) == [True] * 3 + [False] + [True] * 2
        assert bytes_of(user.pool, 9) == guard
        assert stats_of(user, "lost", "hits", "misses") == (0, 5, 1)


def test_a_lost_server_is_left_alone_for_a_while(redis_server, monkeypatch):
    server = redis_server()
    with Writer(server.url, retries=0) as user:
        user.put(*HASHES)
        server.kill()
        assert user.get(*HASHES) == [False] * 6
        assert user.put(*HASHES) == ["failed"] * 6
        assert stats_of(user, "lost", "failed") == (3, 6)
        server.start()
        assert user.store.match(HASHES) == 0
        assert stats_of(user, "skipped") > (0,)
        monkeypatch.setattr(user.store, "_skipped_until", 0.0)
        monkeypatch.setattr(user.store, "_retry_at", {})
        assert user.put(*HASHES) == ["stored"] * 6
        assert user.get(*HASHES) == [True] * 6


def test_a_stopped_server_costs_a_deadline(redis_server):
    server = redis_server()
    with Writer(server.url) as user:
        user.put(*HASHES)
        before = [bytes_of(user.pool, page) for page in range(8)]
        server.pause()
        start = time.monotonic()
        assert user.store.get(HASHES, range(2, 8), deadline_s=0.2) == [False] * 6
        assert time.monotonic() - start < 20
        server.go_on()
        ask(user, b"PING")  # so that it has answered what came before
        assert [bytes_of(user.pool, page) for page in range(8)] == before
        assert user.pool.allocator.num_free == 8


def test_what_is_full_is_an_outcome(redis_server):
    server = redis_server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    with Writer(server.url, num_pages=64, width=1024) as user:
        outcomes = user.put(*block_hashes(64))
        assert set(outcomes) == {"stored", "full"}
        stored = outcomes.index("full")
        assert user.get(*block_hashes(stored)) == [True] * stored


def test_servers_that_evict(redis_server):
    server = redis_server("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    with Writer(server.url, num_pages=64, width=1024) as user:
        for first in range(0, 256, 64):
            assert user.put(*block_hashes(64, first)) == ["stored"] * 64
        there = [user.get(block_hash)[0] for block_hash in block_hashes(256)]
        assert 0 < sum(there) < 256


def test_errors_of_open(redis_server, tmp_path):
    server = redis_server("--requirepass", "secret")
    for url, options, error in (
        (server.url, {}, PermissionError),
        (server.url, {"password": "wrong"}, PermissionError),
        (f"redis://127.0.0.1:{free_port()}", {}, ConnectionError),
        (f"unix://{tmp_path / 'nothing'}", {}, ConnectionError),
        ("redis://127.0.0.1:x", {}, ValueError),
        (server.url, {"capacity_bytes": 1}, ValueError),
        (server.url, {"unknown": 1}, TypeError),
        (server.url, {"ttl_s": -1}, ValueError),
    ):
        with pytest.raises(error) as caught:
            kv.SharedStore.open(url, new_pool(), **options)
        assert "secret" not in str(caught.value)
    with Writer(server.url, password="secret") as user:
        assert user.put(*HASHES) == ["stored"] * 6
        assert "secret" not in repr(user.store)


def test_a_child_has_a_store_of_its_own(redis_server):
    url = redis_server().url
    with Writer(url) as user:
        user.put(*HASHES)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with Writer(url) as another:
                    fine = another.get(*HASHES) == [True] * 6
                try:
                    user.store.match(HASHES)
                except kv.KvcupyError:
                    status = 0 if fine else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert user.get(*HASHES) == [True] * 6


def test_no_block_is_wrong_whatever_is_killed(redis_server):
    server = redis_server()
    users = [start_user(server.url, seed, 60) for seed in range(2)]
    users.append(start_user(server.url, 9, 3.0 if helpers.full else 1.0))
    try:
        for user in users:
            assert user.stdout.readline() == "open\n"
        users[0].kill()
        for _ in range(2):
            server.kill()
            server.start()
            time.sleep(0.2)
        output, errors = users[2].communicate(timeout=120)
        assert users[2].returncode == 0, errors
        hits, lost = map(int, output.split())
        assert hits > 100 and lost > 0
        assert users[1].poll() is None  # or it would have found a wrong block
    finally:
        for user in users:
            user.kill()
            user.communicate()


def start_user(url, seed, seconds):
    program = Path(__file__).with_name("shared_users.py")
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(
        [sys.executable, program, url, str(seed), str(seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": f"{root}:{Path(__file__).parent}"},
    )  # fmt: skip
