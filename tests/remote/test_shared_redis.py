"""The Redis backend with real servers: stored, refused, lost, late and invalid replies."""

from __future__ import annotations

import random
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
from concurrent import futures
from contextlib import suppress
from urllib.parse import quote

import numpy as np
import pytest
from forks import in_child, refused
from redis_server import certificates, cluster_in, needs_redis, sentinel_in, servers_in
from shared_cases import content, key_of, new_pool, soon

# isort: split
from redis.connection import SSLConnection

import kvcupy as kv
from kvcupy.remote.stores import redis
from kvcupy.remote.stores.backend import BackendLost
from kvcupy.remote.stores.redis import RedisBackend

PATTERN = 0xA5
SIZES = (3000, 1, 5000, 2000)  # of the pieces of a block
BLOCK_BYTES = sum(SIZES)
HEADER = b"header of a block"


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

    def fill(self, keys):
        for pieces, key in zip(self.blocks, keys, strict=True):
            rest = content(key, sum(map(len, pieces)))
            for piece in pieces:
                piece[:], rest = rest[: len(piece)], rest[len(piece) :]
        return self

    def block(self, i):
        return b"".join(self.blocks[i])

    @property
    def gaps_are_whole(self):
        return (self.bytes[~self.inside] == PATTERN).all()

    @property
    def is_untouched(self):
        return (self.bytes == PATTERN).all()


def assert_there(backend, keys, sizes=SIZES):
    """Get blocks, and compare all of them and what lies between."""
    memory = Memory(len(keys), sizes)
    assert backend.get(keys, memory.blocks, soon()) == [HEADER] * len(keys)
    for i, key in enumerate(keys):
        assert memory.block(i) == content(key, sum(sizes))
    assert memory.gaps_are_whole


def filled(keys, sizes=SIZES):
    return Memory(len(keys), sizes).fill(keys).blocks


def open_backend(url, namespace=b"tenant", *, connect=True, ttl_s=None, **options):
    if not connect:
        return RedisBackend(redis._server(url, options).connect(), namespace, ttl_s=ttl_s)
    return redis.open_backend(
        url, None, namespace=namespace, capacity_bytes=None, deadline=soon(), ttl_s=ttl_s, **options
    )


def ask(backend, *words):
    (reply,) = backend._run([words], soon())
    return reply


def put(backend, keys, sizes=SIZES):
    return backend.put(keys, filled(keys, sizes), [HEADER] * len(keys), soon())


KEYS = [key_of(i) for i in range(9)]


@needs_redis
class TestServer:
    def test_other_pieces_of_the_same_block(self, redis_server):
        backend = open_backend(redis_server().url)
        put(backend, KEYS)
        assert_there(backend, KEYS, (BLOCK_BYTES - 700, *[1] * 700))

    def test_the_first_writer_wins(self, redis_server):
        backend = open_backend(redis_server().url)
        put(backend, KEYS[:1])
        assert backend.put(KEYS[:1], filled(KEYS[1:2]), [b"other"], soon()) == ["known"]
        assert_there(backend, KEYS[:1])

    def test_a_value_of_another_size_is_a_miss(self, redis_server):
        backend = open_backend(redis_server().url)
        put(backend, KEYS[:2])
        put(backend, KEYS[2:3], (5000, 5002))
        put(backend, KEYS[3:4], (50,))
        put(backend, KEYS[4:5], (20000,))
        put(backend, KEYS[5:])
        memory = Memory(9)
        small, large = [None], [None]
        expected = [HEADER] * 2 + [HEADER] + small + large + [HEADER] * 4
        # 10,002 bytes are a payload of 10,001 behind a header that is one byte longer: the header's
        # reader finds that.
        headers = backend.get(KEYS, memory.blocks, soon())
        assert [h and h[: len(HEADER)] for h in headers] == expected
        assert headers[2] != HEADER
        assert memory.gaps_are_whole
        assert backend.stats()["wrong_replies"] == 2
        for i in (0, 1, 5, 6, 7, 8):
            assert memory.block(i) == content(KEYS[i], BLOCK_BYTES)

    def test_a_key_of_another_type_is_a_miss(self, redis_server):
        backend = open_backend(redis_server().url)
        ask(backend, "LPUSH", backend._key(KEYS[0]), "x")
        memory = Memory(1)
        assert backend.get(KEYS[:1], memory.blocks, soon()) == [None]
        assert memory.is_untouched

    def test_remove_takes_its_namespace_alone(self, redis_server):
        server = redis_server()
        one, other = open_backend(server.url, b"one"), open_backend(server.unix_url, b"on*")
        many = [key_of(i) for i in range(3000)]
        put(one, many, (8,))
        put(other, many, (8,))
        assert one.remove(soon()) == 3000
        assert not any(one.exists(many, soon())) and all(other.exists(many, soon()))
        assert one.remove(soon()) == 0

    def test_blocks_expire(self, redis_server):
        server = redis_server()
        lasting, brief = open_backend(server.url), open_backend(server.url, b"brief", ttl_s=0.2)
        put(lasting, KEYS), put(brief, KEYS)
        end = soon()
        while any(brief.exists(KEYS, soon())) and time.monotonic() < end:
            time.sleep(0.02)
        assert not any(brief.exists(KEYS, soon()))
        assert lasting.exists(KEYS, soon()) == [True] * 9

    def test_full(self, redis_server):
        server = redis_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
        backend = open_backend(server.url)
        keys = [key_of(i) for i in range(8)]
        outcomes = put(backend, keys, (1 << 20,))
        stored = outcomes.index("full")
        assert 0 < stored < 8
        assert outcomes == ["stored"] * stored + ["full"] * (8 - stored)
        assert_there(backend, keys[:stored], (1 << 20,))
        backend.remove(soon())
        assert put(backend, keys[:1], (1 << 20,)) == ["stored"]

    def test_threads(self, redis_server):
        backend = open_backend(redis_server().url)
        connections = ask(backend, "INFO", "stats")["total_connections_received"]
        failures = []

        def work(seed):
            order = random.Random(seed)
            try:
                for _ in range(20):
                    keys = [key_of(order.randrange(60)) for _ in range(5)]
                    assert set(put(backend, keys)) <= {"stored", "known"}
                    assert_there(backend, keys)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        opened = ask(backend, "INFO", "stats")["total_connections_received"] - connections
        assert 0 <= opened <= 3

    def test_a_child_opens_connections_of_its_own(self, redis_server):
        url = redis_server().url
        backend = open_backend(url)
        put(backend, KEYS)

        def work():
            refused(lambda: backend.exists(KEYS, soon()), "RedisBackend")
            assert open_backend(url).exists(KEYS, soon()) == [True] * 9

        in_child(work)
        assert_there(backend, KEYS)
        assert backend.stats()["errors"] == 0


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
            lambda: backend.get(KEYS, memory.blocks, soon()),
            lambda: backend.exists(KEYS, soon()),
            lambda: backend.remove(soon()),
        ):
            with pytest.raises(BackendLost, match=r"redis 127.0.0.1:\d+: .*refused") as caught:
                call()
            assert not caught.value.refused
        assert memory.is_untouched
        server.start()
        assert backend.get(KEYS, memory.blocks, soon()) == [None] * 9
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
        results, memory = [], Memory(40, (1 << 20,))

        def get():
            try:
                results.extend(backend.get(keys, memory.blocks, soon()))
            except BackendLost as error:
                results.extend(error.results or [None] * 40)

        thread = threading.Thread(target=get)
        thread.start()
        while memory.bytes[64] == PATTERN and thread.is_alive():  # SHAKE's first byte is another
            pass
        server.kill()
        thread.join()
        assert len(results) == 40
        for i, header in enumerate(results):
            assert header is None or memory.block(i) == content(keys[i], 1 << 20)
        assert memory.gaps_are_whole

    @pytest.mark.parametrize("kind", ["tcp", "unix"])
    def test_nothing_lands_after_the_deadline(self, redis_server, kind):
        server = redis_server()
        backend = open_backend(server.url if kind == "tcp" else server.unix_url)
        put(backend, KEYS)
        server.pause()
        memory = Memory(9)
        for call in (
            lambda end: backend.get(KEYS, memory.blocks, end),
            lambda end: backend.exists(KEYS, end),
            lambda end: backend.put(KEYS, filled(KEYS), [HEADER] * 9, end),
        ):
            start = time.monotonic()
            with pytest.raises(BackendLost, match="no answer in time"):
                call(time.monotonic() + 0.3)
            assert time.monotonic() - start < 20
        server.go_on()
        assert backend.exists(KEYS, soon()) == [True] * 9  # so it has gone through what came before
        assert memory.is_untouched
        assert backend.stats()["timeouts"] == 3

    def test_calls_wait_for_a_connection_until_their_deadline(self, redis_server):
        backend = open_backend(redis_server().url, max_connections=1)
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
            number = 0
            while True:
                number += 1
                backend = open_backend(server.url, connect=False)
                memory = Memory(9)
                failing.arm(number, error)
                for call, nothing in (
                    (lambda: put(backend, KEYS), "failed"),  # noqa: B023 - called at once
                    (lambda: backend.get(KEYS, memory.blocks, soon()), None),  # noqa: B023
                    (lambda: backend.exists(KEYS, soon()), False),  # noqa: B023
                ):
                    try:
                        results = call()
                    except BackendLost as lost:
                        results = lost.results
                    assert len(results) in (0, 9)
                    assert {type(r) for r in results} <= {type(nothing), bytes, str, bool}
                    if nothing is None:
                        for i, header in enumerate(results):
                            whole = memory.block(i) == content(KEYS[i], BLOCK_BYTES)
                            assert header is None or whole
                fired = failing.disarm()
                assert set(put(backend, KEYS)) <= {"stored", "known"}
                assert memory.gaps_are_whole
                assert_there(backend, KEYS)
                backend.remove(soon())
                backend.close()
                if not fired:
                    break
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
        for url, options in (
            (server.url.replace("//", "//:s3cr%40t%201@"), {}),
            (server.url, {"password": "s3cr@t 1"}),
            (server.unix_url, {"password": "s3cr@t 1"}),
        ):
            backend = open_backend(url, **options)
            assert "s3cr" not in repr(backend) + backend._address
            assert set(put(backend, KEYS)) <= {"stored", "known"}
        for url, options in (
            (server.url, {"password": "wr0ng"}),
            (server.url.replace("//", "//:wr0ng@"), {}),
            (server.url, {"username": "nobody", "password": "wr0ng"}),
            (server.url, {}),
        ):
            with pytest.raises(BackendLost) as caught:
                open_backend(url, **options)
            assert caught.value.refused and "wr0ng" not in str(caught.value)
        with pytest.raises(BackendLost, match="Authentication required"):
            put(open_backend(server.url, connect=False), KEYS)

    @pytest.mark.parametrize("password", ["s3cr-et/wörd'", "s3cr" * 200])
    def test_no_error_contains_the_password(self, redis_server, password):
        server = redis_server("--rename-command", "AUTH", "")  # it repeats the words of AUTH
        quoted = quote(password, safe="")
        for url, options in (
            (server.url.replace("//", f"//:{quoted}@"), {}),
            (server.url, {"password": password}),
            (f"{server.url}?password={quoted}", {}),
            (f"{server.unix_url}?password={quoted}", {}),
        ):
            with pytest.raises(BackendLost, match="whose text may contain") as caught:
                open_backend(url, **options)
            assert "s3cr" not in "".join(traceback.format_exception(caught.value))
            with pytest.raises(ConnectionError) as caught:
                kv.SharedStore.open(url, new_pool(), **options)
            assert "s3cr" not in "".join(traceback.format_exception(caught.value))
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
        assert backend.remove(soon()) == 9
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
            open_backend(url, ssl_ca_certs=ca).close()
        backend = open_backend(url, ssl_ca_certs=ca)
        assert put(backend, KEYS) == ["stored"] * 9
        assert_there(backend, KEYS)
        assert open_backend(url, ssl_cert_reqs="none").exists(KEYS, soon()) == [True] * 9
        with pytest.raises(BackendLost, match="certificate verify failed"):
            open_backend(url)
        with pytest.raises(BackendLost, match=r"certificate verify failed: (IP|Hostname)"):
            open_backend(url.replace("127.0.0.1", "localhost"), ssl_ca_certs=ca)
        with pytest.raises(BackendLost):
            open_backend(server.url)
        server.pause()
        with pytest.raises(BackendLost, match="in time"):
            backend.get(KEYS, Memory(9).blocks, soon(0.3))


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
    b"$+5\r\nabcde\r\n", b"$99999999999999999999999999\r\n", b"$0\r\n\r\n", b"$ 10001\r\n",
    b"$999999999999\r\n" + b"x" * 100000, b"$1_0\r\n", b"*1\r\n$1\r\nx\r\n", b":1\r\n" * 7,
    b"+" + b"x" * 100000, b"-ERR\r\n", b"-LOADING Redis is loading\r\n",
    b"-MOVED 3999 127.0.0.1:1\r\n", bytes(range(256)) * 400, b"$-1\r\n" * 5, b"%1\r\n",
    b"\xff" * 5000, b"$10001\n" + b"y" * 10001,
]  # fmt: skip


class TestNonsense:
    def calls(self, impostor, memory):
        backend = open_backend(f"unix://{impostor.path}", connect=False)
        keys = KEYS[:3]
        sent = filled(keys)
        for call in (
            lambda: backend.get(keys, memory.blocks, soon()),
            lambda: backend.exists(keys, soon()),
            lambda: backend.put(keys, sent, [HEADER] * 3, soon()),
            lambda: backend.remove(soon()),
            lambda: backend.connect(soon()),
        ):
            try:
                yield call()
            except BackendLost:
                yield None
        backend.close()

    @pytest.mark.parametrize("number", range(len(NONSENSE)))
    def test_is_a_miss(self, impostor, number):
        impostor.reply, memory = NONSENSE[number], Memory(3)
        headers, known, outcomes, removed, alive = self.calls(impostor, memory)
        assert headers in (None, [None] * 3) and memory.is_untouched
        assert known in (None, [False] * 3) or NONSENSE[number].startswith(b":1")
        assert outcomes is None or set(outcomes) <= {"failed", "known"}
        assert not removed and alive is None

    def test_a_connection_with_more_replies_than_requests_is_closed(self, impostor):
        backend = open_backend(f"unix://{impostor.path}", connect=False)
        impostor.reply = b":1\r\n:0\r\n"
        assert backend.exists(KEYS[:1], soon()) == [True]
        impostor.reply = b":1\r\n"
        assert backend.exists(KEYS[:1], soon()) == [True]

    def test_a_reply_that_drips_ends_at_the_deadline(self, impostor):
        backend = open_backend(f"unix://{impostor.path}", connect=False)
        impostor.reply, impostor.pause_s, memory = b"$10001\r\n" + b"x" * 9000, 0.02, Memory(1)
        start = time.monotonic()
        with pytest.raises(BackendLost, match="in time"):
            backend.get(KEYS[:1], memory.blocks, time.monotonic() + 0.3)
        assert time.monotonic() - start < 20  # it would take 180 s

    def test_a_reply_without_end_is_given_up(self, impostor, monkeypatch):
        monkeypatch.setattr(redis, "_MAX_EXTRA_REPLY_BYTES", 1 << 20)
        backend = open_backend(f"unix://{impostor.path}", connect=False)
        impostor.reply, memory = b"$%d\r\n" % (1 << 40) + b"x" * (8 << 20), Memory(1)
        with pytest.raises(BackendLost, match="longer than requested"):
            backend.get(KEYS[:1], memory.blocks, soon())

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
            backend.remove(soon())

    def test_mutated_replies_stay_within_the_buffers(self, impostor):
        order = random.Random(20261122)
        good = b"".join(
            b"$%d\r\n" % (BLOCK_BYTES + len(HEADER)) + HEADER + content(key, BLOCK_BYTES) + b"\r\n"
            for key in KEYS[:3]
        )
        honest = [good, b":1\r\n:0\r\n:1\r\n", b"+OK\r\n$-1\r\n-OOM full\r\n", b"+PONG\r\n"]
        backend = open_backend(f"unix://{impostor.path}", connect=False)
        sent = filled(KEYS[:3])
        whole = 0
        for _ in range(600):
            impostor.reply = reply = mutated(order, order.choice([good, good, *honest]))
            memory = Memory(3)
            try:
                headers = backend.get(KEYS[:3], memory.blocks, soon())
            except BackendLost:
                headers = [None] * 3
            assert memory.gaps_are_whole, reply[:200]
            assert len(headers) == 3
            for header in headers:
                assert header is None or len(header) <= 128
            whole += headers.count(HEADER)
            for call in (
                lambda: backend.exists(KEYS[:3], soon()),
                lambda: backend.put(KEYS[:3], sent, [HEADER] * 3, soon()),
            ):
                try:
                    results = call()
                except BackendLost:
                    continue
                assert len(results) == 3
                if "stored" in results:
                    assert b"+OK\r\n" in reply
        assert whole > 50  # it is not that everything is refused


def mutated(order, reply):
    reply = bytearray(reply)
    for _ in range(order.randrange(3)):
        at = order.randrange(len(reply)) if order.random() < 0.5 else order.randrange(8)
        at = min(at, len(reply) - 1)
        kind = order.randrange(5)
        if kind == 0:
            reply[at] = order.randrange(256)
        elif kind == 1:
            del reply[at : at + order.choice([1, 2, 100, 5000])]
        elif kind == 2:
            reply[at:at] = order.choice([b"\r\n", b"$", b"9", b"-", b"*3\r\n", b"x" * 6000])
        elif kind == 3:
            del reply[at:]
        else:
            reply += reply[:at]
        reply = reply or bytearray(b"$")
    return bytes(reply)


URLS = [
    ("redis://h", {}, ("h", 6379, 0, None, None)),
    ("redis://h:1/2", {}, ("h", 1, 2, None, None)),
    ("redis://u:p%40@[::1]:7", {}, ("::1", 7, 0, "u", "p@")),
    ("redis://:p@h", {"db": 4}, ("h", 6379, 4, None, "p")),
    ("rediss://h?db=3", {}, ("h", 6379, 3, None, None)),
    ("unix:///run/r.sock", {"password": "p", "username": "u"}, ("/run/r.sock", None, 0, "u", "p")),
    ("unix:/run/r.sock", {"db": 1}, ("/run/r.sock", None, 1, None, None)),
]


@pytest.mark.parametrize("url, options, expected", URLS)
def test_urls(url, options, expected):
    connection = redis._server(url, options).connect().connection_pool.make_connection()
    where = getattr(connection, "host", None), getattr(connection, "port", None)
    where = (connection.path, None) if url.startswith("unix") else where
    assert (*where, connection.db, connection.username, connection.password) == expected
    if url.startswith("rediss"):
        assert connection.check_hostname and connection.cert_reqs == ssl.CERT_REQUIRED


@pytest.mark.parametrize("secure", [False, True])
def test_urls_of_sentinels(secure):
    url = f"redis{'s' * secure}+sentinel://u:p%40@one,two:7,[::1]/cache/2"
    pool = redis._server(url, {"sentinel_kwargs": {"password": "s"}}).connect().connection_pool
    of_sentinels = [
        client.connection_pool.connection_kwargs for client in pool.sentinel_manager.sentinels
    ]
    assert [(o["host"], o["port"], o["password"]) for o in of_sentinels] == [
        ("one", 26379, "s"), ("two", 7, "s"), ("::1", 26379, "s"),
    ]  # fmt: skip
    connection = pool.make_connection()
    assert (connection.db, connection.username, connection.password) == (2, "u", "p@")
    assert pool.service_name == "cache"
    assert isinstance(connection, SSLConnection) == secure


EXPOSED = [
    ("redis://:p@h", {}, True), ("redis://h", {}, False), ("redis://h", {"password": "p"}, True),
    ("redis://h?password=p", {}, True), ("redis://?host=h&password=p", {}, True),
    ("redis://:p@10.0.0.1", {}, True), ("redis://:p@localhost:7", {}, False),
    ("redis://:p@127.0.0.3", {}, False), ("redis://:p@[::1]:7", {}, False),
    ("rediss://:p@h", {}, False), ("unix://:p@/run/r.sock", {}, False),
    ("redis://h", {"credential_provider": object()}, True),
    ("redis+cluster://:p@localhost", {}, True), ("redis+cluster://localhost", {}, False),
    ("rediss+cluster://:p@h", {}, False), ("redis+sentinel://:p@localhost/cache", {}, True),
    ("redis+sentinel://localhost/cache", {"sentinel_kwargs": {"password": "p"}}, True),
    ("rediss+sentinel://:p@h/cache", {}, False),
]  # fmt: skip


@pytest.mark.parametrize("url, options, exposes", EXPOSED)
def test_a_password_does_not_leave_the_machine_without_tls(url, options, exposes, monkeypatch):
    def connect(client, *arguments):
        raise BackendLost("it connects")

    monkeypatch.setattr(RedisBackend, "connect", connect)
    monkeypatch.setattr(redis, "RedisCluster", lambda **options: None)

    def opened(**more):
        return redis.open_backend(
            url, None, namespace=b"", capacity_bytes=None, deadline=soon(), **options, **more
        )

    if exposes:
        with pytest.raises(ValueError, match=r"^url: expected TLS"):
            opened()
    else:
        with pytest.raises(BackendLost, match="it connects"):
            opened()
    with pytest.raises(BackendLost, match="it connects"):
        opened(plaintext_password=True)


WRONG = [
    ("redis://h:x", {}, ValueError, "url: expected redis://"),
    ("redis://:p@h:99999", {}, ValueError, "url: expected redis://"),
    ("redis://:secret/@h", {}, ValueError, "url: expected redis://"),
    ("unix:run/r.sock", {}, ValueError, "url: expected .* unix:/path"),
    ("redis+sentinel://:p@h", {}, ValueError, r"url: expected redis\+sentinel://"),
    ("redis+sentinel://:p@h:x/cache", {}, ValueError, r"url: expected redis\+sentinel://"),
    ("redis://h", {"unknown": 1}, TypeError, "options: .*unknown"),
    (
        "redis://:p@h",
        {"plaintext_password": "no"},
        TypeError,
        "plaintext_password: expected a bool",
    ),
    ("redis://h", {"capacity_bytes": 1}, ValueError, "capacity_bytes"),
    ("redis://h", {"ttl_s": 0}, ValueError, "ttl_s: expected"),
    ("redis://h", {"ttl_s": -1}, ValueError, "ttl_s: expected"),
    ("redis://h", {"ttl_s": "1"}, TypeError, "ttl_s: expected"),
    ("redis://h", {"quota_bytes": 1}, TypeError, "quota_bytes: expected a store in shm:"),
    ("redis://h", {"max_connections": 0}, ValueError, "max_connections: expected"),
    ("redis://h", {"max_connections": 1.5}, TypeError, "max_connections: expected"),
]


@pytest.mark.parametrize("url, options, error, name", WRONG)
def test_arguments_that_do_not_fit(url, options, error, name):
    options = {"capacity_bytes": None, **options}
    with pytest.raises(error, match=name) as caught:
        redis.open_backend(url, None, namespace=b"", deadline=soon(), **options)
    assert "secret" not in str(caught.value)
    assert not name.startswith("url") or caught.value.__suppress_context__


def test_a_missing_library_is_one_clear_error():
    program = (
        "import sys; sys.modules['redis'] = None\n"
        "import kvcupy as kv\n"
        "pool = kv.KVPool(1, 16, 1, 1, 64, device='host')\n"
        "kv.SharedStore.open('redis://h', pool)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: url: Redis needs redis-py, pip install ")


@needs_redis
class TestSeveralServers:
    def test_a_cluster(self, tmp_path):
        with cluster_in(tmp_path) as nodes:
            url = nodes[0].url.replace("redis:", "redis+cluster:")
            backend, other = open_backend(url), open_backend(url, b"other")
            many = [key_of(i) for i in range(300)]
            assert put(backend, many) == ["stored"] * 300
            assert put(backend, many) == ["known"] * 300
            assert put(other, KEYS) == ["stored"] * 9
            assert_there(backend, many)
            sizes = [ask(open_backend(node.url), "DBSIZE") for node in nodes]
            assert min(sizes) > 50 and sum(sizes) == 309
            backend.discard(many[:2], soon())
            assert backend.exists(many, soon()) == [False] * 2 + [True] * 298
            assert backend.remove(soon()) == 298
            assert other.exists(KEYS, soon()) == [True] * 9
            with pytest.raises(BackendLost, match=r"redis\+cluster://"):
                put(open_backend(nodes[0].url), many)
            for node in nodes:
                node.pause()
            start = time.monotonic()
            with pytest.raises(BackendLost):
                other.exists(KEYS, time.monotonic() + 0.3)
            assert time.monotonic() - start < 20
            for node in nodes:
                node.go_on()
            assert other.exists(KEYS, soon()) == [True] * 9

    def test_a_cluster_needs_a_node(self, redis_server):
        server = redis_server()
        url = server.url.replace("redis:", "redis+cluster:")
        with pytest.raises(BackendLost, match="luster"):
            open_backend(url)
        server.kill()
        with pytest.raises(BackendLost, match="refused"):
            open_backend(url)

    def test_a_master_behind_sentinels(self, tmp_path):
        with sentinel_in(tmp_path) as (master, replica, url):
            backend = open_backend(url)
            assert put(backend, KEYS) == ["stored"] * 9
            assert open_backend(master.url).exists(KEYS, soon()) == [True] * 9
            replicated = open_backend(replica.url)
            end = soon()
            while not all(replicated.exists(KEYS, soon())) and time.monotonic() < end:
                time.sleep(0.02)
            master.kill()
            memory, headers = Memory(9), None
            while headers is None and time.monotonic() < end:
                with suppress(BackendLost):
                    headers = backend.get(KEYS, memory.blocks, soon(2))
            assert headers == [HEADER] * 9
            assert_there(backend, KEYS)
            assert put(backend, [key_of(99)]) == ["stored"]
