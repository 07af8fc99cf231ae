"""Block stores in Redis, with real servers: refused, lost, late, dying, and replies that lie."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from concurrent import futures
from urllib.parse import quote

import numpy as np
import pytest
from block_store_cases import (
    Writer,
    block_hashes,
    block_of,
    content,
    key_of,
    new_pool,
    soon,
)
from redis_server import certificates, free_port, needs_redis, servers_in

import kvcupy as kv
from kvcupy.remote.stores import redis
from kvcupy.remote.stores.backend import BackendLost
from kvcupy.remote.stores.redis import RedisBackend
from kvcupy.remote.stores.store import HEADER_BYTES

PATTERN = 0xA5
SIZES = (17, 3000, 1, 5000, 2000)  # of the pieces of a block, the first of them its header
BLOCK_BYTES = sum(SIZES)
KEYS = [key_of(i) for i in range(9)]
HASHES = block_hashes(6)


@pytest.fixture
def redis_server(tmp_path):
    with servers_in(tmp_path) as start:
        yield start


class Memory:
    """Blocks as pieces of an array, with gaps between them."""

    def __init__(self, num_blocks, sizes=SIZES, gap=64):
        self.bytes = np.full(num_blocks * (sum(sizes) + gap * len(sizes)) + gap, PATTERN, np.uint8)
        self.inside = np.zeros(len(self.bytes), bool)
        self.blocks, start = [], gap
        for _ in range(num_blocks):
            pieces = []
            for size in sizes:
                pieces.append(memoryview(self.bytes)[start : start + size])
                self.inside[start : start + size] = True
                start += size + gap
            self.blocks.append(pieces)

    def block(self, i):
        return b"".join(self.blocks[i])

    @property
    def gaps_are_whole(self):
        return (self.bytes[~self.inside] == PATTERN).all()

    @property
    def is_untouched(self):
        return (self.bytes == PATTERN).all()


def open_backend(url, namespace=b"tenant", num_bytes=BLOCK_BYTES, *, connect=True):
    if not connect:
        opened = []
        real = RedisBackend.connect
        RedisBackend.connect = lambda self, deadline: opened.append(self)
        try:
            return open_backend(url, namespace, num_bytes)
        finally:
            RedisBackend.connect = real
    return redis.open_backend(
        url, namespace=namespace, num_bytes=num_bytes, capacity_bytes=None, deadline=soon()
    )


def ask(backend, *words):
    (reply,) = backend._run([words], soon())
    return reply


def put(backend, keys, sizes=SIZES, end=None):
    blocks = [block_of(key, sizes) for key in keys]
    return backend.put(keys, blocks, dict.fromkeys(keys, 0), end or soon())


def assert_there(backend, keys, sizes=SIZES):
    """Get blocks, and compare all of them and what lies between."""
    memory = Memory(len(keys), sizes)
    assert backend.get(keys, memory.blocks, {}, soon()) == [True] * len(keys)
    for i, key in enumerate(keys):
        assert memory.block(i) == content(key, sum(sizes))
    assert memory.gaps_are_whole


@needs_redis
class TestServer:
    def test_what_is_no_block_of_this_length_is_a_miss_and_makes_room(self, redis_server):
        backend = open_backend(redis_server().url)
        put(backend, KEYS[:2])
        for key, value in zip(KEYS[2:5], (b"", b"x" * 50, b"x" * (BLOCK_BYTES + 1)), strict=True):
            ask(backend, "SET", backend._key(key), value)
        ask(backend, "LPUSH", backend._key(KEYS[5]), "x")
        memory = Memory(7)
        assert backend.get(KEYS[:7], memory.blocks, {}, soon()) == [True] * 2 + [None] * 4 + [False]
        assert memory.gaps_are_whole
        assert backend.stats()["wrong_replies"] == 4
        assert put(backend, KEYS[:7]) == ["known"] * 2 + ["stored"] * 5
        assert_there(backend, KEYS[:7])

    def test_clear_takes_its_namespace_alone(self, redis_server):
        server = redis_server()
        one, other = open_backend(server.url, b"one"), open_backend(server.unix_url, b"on*")
        many = [key_of(i) for i in range(3000)]
        put(one, many, (8,))
        put(other, many, (8,))
        one.clear(soon())
        assert not any(one.exists(many, soon())) and all(other.exists(many, soon()))
        one.clear(soon())

    def test_full_and_evicting_servers(self, redis_server):
        server = redis_server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
        with Writer(server.url, num_pages=64, width=1024) as user:
            outcomes = user.put(*block_hashes(64))
            stored = outcomes.index("full")
            assert outcomes == ["stored"] * stored + ["full"] * (64 - stored)
            assert user.get(*block_hashes(stored)) == [True] * stored
            user.store.clear()
            assert user.put(*HASHES) == ["stored"] * 6
        server = redis_server("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
        with Writer(server.url, num_pages=64, width=1024) as user:
            for first in range(0, 256, 64):
                assert user.put(*block_hashes(64, first)) == ["stored"] * 64
            there = [user.get(block_hash)[0] for block_hash in block_hashes(256)]
            assert 0 < sum(there) < 256

    def test_threads(self, redis_server):
        backend = open_backend(redis_server().url)
        connections = ask(backend, "INFO", "stats")["total_connections_received"]

        def work(seed):
            order = random.Random(seed)
            for _ in range(20):
                keys = [key_of(order.randrange(60)) for _ in range(5)]
                assert set(put(backend, keys)) <= {"stored", "known"}
                assert_there(backend, keys)

        with futures.ThreadPoolExecutor(6) as threads:
            list(threads.map(work, range(6)))
        opened = ask(backend, "INFO", "stats")["total_connections_received"] - connections
        assert 0 <= opened <= 3


@needs_redis
class TestLost:
    def test_killed_and_started_again(self, redis_server):
        server = redis_server()
        backend = open_backend(server.url)
        put(backend, KEYS)
        server.kill()
        memory = Memory(9)
        for call in (
            lambda: put(backend, KEYS),
            lambda: backend.get(KEYS, memory.blocks, {}, soon()),
            lambda: backend.exists(KEYS, soon()),
            lambda: backend.clear(soon()),
        ):
            with pytest.raises(BackendLost, match=r"redis 127.0.0.1:\d+: .*refused") as caught:
                call()
            assert not caught.value.refused
        assert memory.is_untouched
        server.start()
        assert backend.get(KEYS, memory.blocks, {}, soon()) == [False] * 9
        assert put(backend, KEYS) == ["stored"] * 9

    def test_a_restart_between_calls_costs_nothing(self, redis_server):
        server = redis_server()
        backend = open_backend(server.url)
        put(backend, KEYS)
        server.kill()
        server.start()
        assert put(backend, KEYS) == ["stored"] * 9
        assert backend.stats()["errors"] == 0

    def test_killed_in_the_middle_of_replies(self, redis_server):
        server = redis_server()
        backend = open_backend(server.url)
        keys = [key_of(i) for i in range(40)]
        put(backend, keys, (1 << 20,))
        there, memory = [], Memory(40, (1 << 20,))

        def get():
            for i, key in enumerate(keys):
                try:
                    there.extend(backend.get([key], memory.blocks[i : i + 1], {}, soon()))
                except BackendLost:
                    there.append(None)

        thread = threading.Thread(target=get)
        thread.start()
        while memory.bytes[64] == PATTERN and thread.is_alive():  # SHAKE's first byte is another
            pass
        server.kill()
        thread.join()
        assert len(there) == 40
        for i, whole in enumerate(there):
            assert not whole or memory.block(i) == content(keys[i], 1 << 20)
        assert memory.gaps_are_whole

    @pytest.mark.parametrize("kind", ["tcp", "unix"])
    def test_nothing_lands_after_the_deadline(self, redis_server, kind):
        server = redis_server()
        backend = open_backend(server.url if kind == "tcp" else server.unix_url)
        put(backend, KEYS)
        server.pause()
        memory = Memory(9)
        for call in (
            lambda end: backend.get(KEYS, memory.blocks, {}, end),
            lambda end: backend.exists(KEYS, end),
            lambda end: put(backend, KEYS, end=end),
        ):
            start = time.monotonic()
            with pytest.raises(BackendLost, match="no answer in time"):
                call(time.monotonic() + 0.3)
            assert time.monotonic() - start < 20
        server.go_on()
        assert backend.exists(KEYS, soon()) == [True] * 9  # so it has gone through what came before
        assert memory.is_untouched
        assert backend.stats()["timeouts"] == 3

    def test_calls_wait_for_a_connection_until_their_deadline(self, redis_server, monkeypatch):
        monkeypatch.setattr(redis, "_MAX_CONNECTIONS", 1)
        backend = open_backend(redis_server().url)
        with futures.ThreadPoolExecutor(1) as other:
            calling = backend._calling(soon())
            other.submit(calling.__enter__).result()
            with pytest.raises(BackendLost, match="in time"):
                backend.exists(KEYS, time.monotonic() + 0.05)
            other.submit(calling.__exit__, None, None, None).result()
        assert backend.exists(KEYS, soon()) == [False] * 9

    def test_any_call_to_the_system_may_fail(self, redis_server, monkeypatch):
        """Each call of a socket fails once, in each of several ways: the next attempt succeeds."""
        server = redis_server()
        failing = Failing(monkeypatch)
        for error in (ConnectionResetError("gone"), TimeoutError(), OSError(105, "no buffers")):
            number, fired = 0, True
            while fired:
                number += 1
                backend, memory = open_backend(server.url, connect=False), Memory(9)
                failing.arm(number, error)
                for call in (
                    lambda: put(backend, KEYS),  # noqa: B023 - called at once
                    lambda: backend.get(KEYS, memory.blocks, {}, soon()),  # noqa: B023
                    lambda: backend.exists(KEYS, soon()),  # noqa: B023
                ):
                    try:
                        results = call()
                    except BackendLost:
                        continue
                    assert len(results) == 9
                    for i, whole in enumerate(results if memory.bytes[64] != PATTERN else []):
                        right = memory.block(i) == content(KEYS[i], BLOCK_BYTES)
                        assert whole is not True or right
                fired = failing.disarm()
                assert set(put(backend, KEYS)) <= {"stored", "known"}
                assert memory.gaps_are_whole
                assert_there(backend, KEYS)
                backend.clear(soon())
                backend.close()
            assert number > 12


class Failing:
    """Makes one numbered call to a socket of this process's clients fail."""

    NAMES = ("connect", "sendall", "recv_into", "recv", "setsockopt")

    def __init__(self, monkeypatch):
        self._number, self._count, self._error = 0, 0, None
        for name in self.NAMES:
            real = getattr(socket.socket, name)
            monkeypatch.setattr(socket.socket, name, self._wrapped(real), raising=False)

    def _wrapped(self, real):
        def call(*arguments, **options):
            self._count += 1
            if self._count == self._number:
                raise self._error
            return real(*arguments, **options)

        return call

    def arm(self, number, error):
        self._number, self._count, self._error = number, 0, error

    def disarm(self):
        fired, self._number = self._count >= self._number, 0
        return fired


@needs_redis
class TestAccess:
    def test_password(self, redis_server):
        server = redis_server("--requirepass", "s3cr@t 1")
        quoted = "s3cr%40t%201"
        for url in (
            server.url.replace("//", f"//:{quoted}@"),
            f"{server.url}?password={quoted}",
            f"{server.unix_url}?password={quoted}",
        ):
            backend = open_backend(url)
            assert "s3cr" not in repr(backend) + backend._address
            assert set(put(backend, KEYS)) <= {"stored", "known"}
        for url in (
            f"{server.url}?password=wr0ng",
            server.url.replace("//", "//:wr0ng@"),
            server.url.replace("//", "//nobody:wr0ng@"),
            server.url,
        ):
            with pytest.raises(BackendLost) as caught:
                open_backend(url)
            assert caught.value.refused and "wr0ng" not in str(caught.value)
            with pytest.raises(PermissionError) as refusal:
                kv.BlockStore.open(url, new_pool())
            assert "wr0ng" not in "".join(traceback.format_exception(refusal.value))
        with pytest.raises(BackendLost, match="Authentication required"):
            put(open_backend(server.url, connect=False), KEYS)

    @pytest.mark.parametrize("password", ["s3cr-et/wörd'", "s3cr" * 200])
    def test_no_error_contains_the_password(self, redis_server, password, caplog):
        server = redis_server("--rename-command", "AUTH", "")  # it repeats the words of AUTH
        quoted = quote(password, safe="")
        for url in (
            server.url.replace("//", f"//:{quoted}@"),
            f"{server.url}?password={quoted}",
            f"{server.unix_url}?password={quoted}",
        ):
            with pytest.raises(BackendLost, match="whose text may contain") as caught:
                open_backend(url)
            assert "s3cr" not in "".join(traceback.format_exception(caught.value))
            with pytest.raises(ConnectionError) as caught:
                kv.BlockStore.open(url, new_pool())
            assert "s3cr" not in "".join(traceback.format_exception(caught.value))
            backend = open_backend(url, connect=False)
            with Writer(server.unix_url) as user:
                user.store._backend = backend
                assert [user.store.match(HASHES) for _ in range(4)] == [0] * 4
                assert "s3cr" not in repr(user.store) + str(user.store.stats())
        assert "skipping" in caplog.text and "s3cr" not in caplog.text
        with pytest.raises(BackendLost, match="unknown command"):
            ask(open_backend(server.url), "UNKNOWN", "and its words")

    def test_user_with_the_documented_rights(self, redis_server):
        rights = ["+auth", "+select", "+ping", "+exists", "+get", "+set", "+scan", "+unlink"]
        server = redis_server(
            "--user", "default", "off", "--user", "cache", "on", ">secret", "~kvcupy:*", *rights
        )
        url = server.url.replace("//", "//cache:secret@")
        backend = open_backend(url + "/3")
        assert put(backend, KEYS) == ["stored"] * 9
        assert_there(backend, KEYS)
        assert open_backend(url).exists(KEYS, soon()) == [False] * 9
        backend.clear(soon())
        assert not any(backend.exists(KEYS, soon()))
        with pytest.raises(BackendLost, match="DB index is out of range"):
            open_backend(url + "/99")
        with pytest.raises(BackendLost, match="no permissions"):
            ask(backend, "FLUSHALL")

    @pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
    def test_tls(self, redis_server, tmp_path):
        ca, certificate, key = certificates(tmp_path)
        server = redis_server(
            "--tls-cert-file", str(certificate), "--tls-key-file", str(key),
            "--tls-ca-cert-file", str(ca), "--tls-auth-clients", "no", tls=True,
        )  # fmt: skip
        url = server.url.replace("redis:", "rediss:")
        for _ in range(40):  # session tickets, which come at any time, are no reply
            open_backend(f"{url}?ssl_ca_certs={ca}").close()
        backend = open_backend(f"{url}?ssl_ca_certs={ca}")
        assert put(backend, KEYS) == ["stored"] * 9
        assert_there(backend, KEYS)
        assert open_backend(f"{url}?ssl_cert_reqs=none").exists(KEYS, soon()) == [True] * 9
        with pytest.raises(BackendLost, match="certificate verify failed"):
            open_backend(url)
        with pytest.raises(BackendLost, match=r"certificate verify failed: (IP|Hostname)"):
            open_backend(f"{url.replace('127.0.0.1', 'localhost')}?ssl_ca_certs={ca}")
        with pytest.raises(BackendLost):
            open_backend(server.url)
        server.pause()
        with pytest.raises(BackendLost, match="in time"):
            backend.get(KEYS, Memory(9).blocks, {}, soon(0.3))


class Impostor:
    """A server that answers each connection with the same bytes, and closes it."""

    def __init__(self, folder):
        self.reply = b""
        self.pause_s = 0.0  # before each byte
        self.path = folder / "impostor.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                try:
                    for piece in [bytes([b]) for b in self.reply] if self.pause_s else [self.reply]:
                        time.sleep(self.pause_s)
                        connection.sendall(piece)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass
                except OSError:
                    continue

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def impostor(tmp_path):
    server = Impostor(tmp_path)
    yield server
    server.close()


NONSENSE = [
    b"", b"\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$", b"$\r\n", b"$-2\r\n", b"+OK",
    b"$+5\r\nabcde\r\n", b"$99999999999999999999999999\r\n", b"$0\r\n\r\n", b"$ 10018\r\n",
    b"$999999999999\r\n" + b"x" * 100000, b"$1_0\r\n", b"*1\r\n$1\r\nx\r\n", b":1\r\n" * 7,
    b"+" + b"x" * 100000, b"-ERR\r\n", b"-LOADING Redis is loading\r\n",
    b"-MOVED 3999 127.0.0.1:1\r\n", bytes(range(256)) * 400, b"$-1\r\n" * 5, b"%1\r\n",
    b"\xff" * 5000, b"$10018\n" + b"y" * 10018,
]  # fmt: skip


class TestNonsense:
    @pytest.mark.parametrize("number", range(len(NONSENSE)))
    def test_is_a_miss(self, impostor, number):
        impostor.reply, memory, keys = NONSENSE[number], Memory(3), KEYS[:3]
        backend, answers = open_backend(f"unix://{impostor.path}", connect=False), []
        for call in (
            lambda: backend.get(keys, memory.blocks, {}, soon()),
            lambda: backend.exists(keys, soon()),
            lambda: put(backend, keys),
            lambda: backend.clear(soon()),
            lambda: backend.connect(soon()),
        ):
            try:
                answers.append(call())
            except BackendLost:
                answers.append("lost")
        there, known, outcomes, _, connected = answers
        assert there == "lost" or True not in there
        assert memory.is_untouched
        assert known in ("lost", [False] * 3) or NONSENSE[number].startswith(b":1")
        assert outcomes == "lost" or set(outcomes) <= {"failed", "known"}
        assert connected == "lost"
        backend.close()

    def test_a_lying_server_is_a_miss_and_a_log_line(self, impostor, caplog):
        """Replies of the right form and length with other bytes; each costs a miss."""
        with Writer(f"file:{impostor.path.parent}/s") as user:
            length = HEADER_BYTES + user.block_bytes
            backend = open_backend(f"unix://{impostor.path}", num_bytes=length, connect=False)
            user.store._backend = backend
            for value in (bytes(length), content(KEYS[0], length)):
                impostor.reply = b"$%d\r\n%b\r\n" % (length, value)
                user.ask_again()
                assert user.get(HASHES[0]) == [False]
            assert user.store.stats()["damaged"] == 2
            assert "damaged blocks" in caplog.text

    def test_a_connection_with_more_replies_than_requests_is_closed(self, impostor):
        backend = open_backend(f"unix://{impostor.path}", connect=False)
        impostor.reply = b":1\r\n:0\r\n"
        assert backend.exists(KEYS[:1], soon()) == [True]
        impostor.reply = b":1\r\n"
        assert backend.exists(KEYS[:1], soon()) == [True]

    def test_a_reply_that_drips_ends_at_the_deadline(self, impostor):
        backend = open_backend(f"unix://{impostor.path}", connect=False)
        impostor.reply, impostor.pause_s, memory = b"$10018\r\n" + b"x" * 9000, 0.02, Memory(1)
        start = time.monotonic()
        with pytest.raises(BackendLost, match="in time"):
            backend.get(KEYS[:1], memory.blocks, {}, time.monotonic() + 0.3)
        assert time.monotonic() - start < 20  # it would take 180 s

    def test_a_reply_without_end_is_given_up(self, impostor, monkeypatch):
        monkeypatch.setattr(redis, "_MAX_EXTRA_REPLY_BYTES", 1 << 20)
        backend = open_backend(f"unix://{impostor.path}", connect=False)
        impostor.reply, memory = b"$%d\r\n" % (1 << 40) + b"x" * (8 << 20), Memory(1)
        with pytest.raises(BackendLost, match="longer than requested"):
            backend.get(KEYS[:1], memory.blocks, {}, soon())

    @pytest.mark.parametrize("page", [
        b"*2\r\n$1\r\n0\r\n*1\r\n:5\r\n", b"*2\r\n$1\r\n0\r\n$1\r\nx\r\n",
        b"*1\r\n*0\r\n", b"*2\r\n$-1\r\n*-1\r\n", b"*2\r\n" * 9, b"*60000\r\n", b"$70000\r\nx",
        b"*2\r\n$1\r\n0\r\n*1\r\n$257\r\n" + b"x" * 257 + b"\r\n",
        b"*2\r\n$1\r\n0\r\n*20000\r\n" + b"$1\r\nx\r\n" * 20000,
    ], ids=range(9))  # fmt: skip
    def test_pages_of_keys_that_are_none(self, impostor, page):
        backend = open_backend(f"unix://{impostor.path}", connect=False)
        impostor.reply = page
        with pytest.raises(BackendLost):
            backend.clear(soon())


URLS = [
    ("redis://h", ("h", 6379, 0, None, None)),
    ("redis://h:1/2", ("h", 1, 2, None, None)),
    ("redis://u:p%40@[::1]:7", ("::1", 7, 0, "u", "p@")),
    ("rediss://h?db=3", ("h", 6379, 3, None, None)),
    ("unix:///run/r.sock?password=p&username=u", ("/run/r.sock", None, 0, "u", "p")),
    ("unix:/run/r.sock?db=1", ("/run/r.sock", None, 1, None, None)),
]


@pytest.mark.parametrize("url, expected", URLS)
def test_urls(url, expected):
    connection = open_backend(url, connect=False)._client.connection_pool.make_connection()
    where = getattr(connection, "host", None), getattr(connection, "port", None)
    where = (connection.path, None) if url.startswith("unix") else where
    assert (*where, connection.db, connection.username, connection.password) == expected


EXPOSED = [
    ("redis://:p@h", True), ("redis://h", False), ("redis://h?password=p", True),
    ("redis://?host=h&password=p", True), ("redis://:p@10.0.0.1", True),
    ("redis://:p@localhost:7", False), ("redis://:p@127.0.0.3", False),
    ("redis://:p@[::1]:7", False), ("rediss://:p@h", False), ("unix://:p@/run/r.sock", False),
]  # fmt: skip


@pytest.mark.parametrize("url, exposes", EXPOSED)
def test_a_password_does_not_leave_the_machine_without_tls(url, exposes, monkeypatch):
    def connect(client, *arguments):
        raise BackendLost("it connects")

    monkeypatch.setattr(RedisBackend, "connect", connect)
    if exposes:
        with pytest.raises(ValueError, match=r"^url: expected TLS"):
            open_backend(url)
    else:
        with pytest.raises(BackendLost, match="it connects"):
            open_backend(url)
    allowed = f"{url}{'&' if '?' in url else '?'}plaintext_password=1"
    with pytest.raises(BackendLost, match="it connects"):
        open_backend(allowed)


WRONG = [
    ("redis://h:x", {}, ValueError, "url: expected redis://"),
    ("redis://:p@h:99999", {}, ValueError, "url: expected redis://"),
    ("redis://:secret/@h", {}, ValueError, "url: expected redis://"),
    ("redis://:secret@h?x", {}, ValueError, "url: expected redis://"),
    ("unix:run/r.sock", {}, ValueError, "url: expected .* unix:/path"),
    ("redis://127.0.0.1?unknown=1", {}, TypeError, "url: .*unknown"),
    ("redis://h", {"capacity_bytes": 2**20}, ValueError, "capacity_bytes"),
]


@pytest.mark.parametrize("url, options, error, name", WRONG)
def test_arguments_that_do_not_fit(url, options, error, name):
    with pytest.raises(error, match=name) as caught:
        kv.BlockStore.open(url, new_pool(), **options)
    assert "secret" not in str(caught.value)
    assert not name.startswith("url") or caught.value.__suppress_context__


def test_an_unreachable_server_is_a_connection_error(tmp_path):
    for url in (f"redis://127.0.0.1:{free_port()}", f"unix:{tmp_path}/nothing"):
        with pytest.raises(ConnectionError, match="url: redis"):
            kv.BlockStore.open(url, new_pool())


def test_a_missing_library_is_one_clear_error():
    program = (
        "import sys; sys.modules['redis'] = None\n"
        "import kvcupy as kv\n"
        "pool = kv.KVPool(1, 16, 1, 1, 64, device='host')\n"
        "kv.BlockStore.open('redis://h', pool)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: url: Redis needs redis-py, pip install ")


def test_a_value_of_several_buffers_is_one_word():
    packed = redis._Packer().pack("SET", b"k", [b"ab", memoryview(b"cde")], b"NX")
    assert b"".join(packed) == b"*4\r\n$3\r\nSET\r\n$1\r\nk\r\n$5\r\nabcde\r\n$2\r\nNX\r\n"
