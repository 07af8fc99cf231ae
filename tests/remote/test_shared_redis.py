"""The Redis backend with real servers: what is stored, refused, lost, late or nonsense."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import socket
import threading
import time

import numpy as np
import pytest
from redis_server import certificates, needs_redis, servers_in

from kvcupy.remote.stores.backend import BackendLost
from kvcupy.remote.stores.redis import RedisBackend, redis_address

PATTERN = 0xA5
SIZES = (3000, 1, 5000, 2000)  # of the pieces of a block
BLOCK_BYTES = sum(SIZES)
HEADER = b"header of a block"


@pytest.fixture
def redis_server(tmp_path):
    with servers_in(tmp_path) as start:
        yield start


def soon(seconds=30.0):
    return time.monotonic() + seconds


def content(key, num_bytes=BLOCK_BYTES):
    return hashlib.shake_128(key).digest(num_bytes)


def key_of(number):
    return hashlib.blake2b(b"%d" % number, digest_size=32).digest()


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


def filled(keys, sizes=SIZES):
    return Memory(len(keys), sizes).fill(keys).blocks


def open_backend(url, namespace=b"tenant", *, connect=True, ttl_s=None, **options):
    backend = RedisBackend(redis_address(url, **options), namespace, ttl_s=ttl_s)
    if connect:
        backend.connect(soon())
    return backend


def put(backend, keys, sizes=SIZES):
    return backend.put(keys, filled(keys, sizes), [HEADER] * len(keys), soon())


KEYS = [key_of(i) for i in range(9)]


@needs_redis
class TestServer:
    @pytest.mark.parametrize("kind", ["tcp", "unix"])
    def test_blocks_come_back_in_place(self, redis_server, kind):
        server = redis_server()
        backend = open_backend(server.url if kind == "tcp" else server.unix_url)
        assert backend.exists(KEYS, soon()) == [False] * 9
        assert put(backend, KEYS[:8]) == ["stored"] * 8
        assert put(backend, KEYS) == ["known"] * 8 + ["stored"]
        assert put(backend, []) == backend.get([], [], soon()) == backend.exists([], soon()) == []
        backend.remove(soon())
        assert backend.exists(KEYS, soon()) == [False] * 9
        put(backend, KEYS[1:])
        memory = Memory(9)
        assert backend.get(KEYS, memory.blocks, soon()) == [None] + [HEADER] * 8
        assert memory.block(0) == bytes([PATTERN]) * BLOCK_BYTES
        assert [memory.block(i) for i in range(1, 9)] == [content(key) for key in KEYS[1:]]
        assert memory.gaps_are_whole
        assert backend.stats() == {
            "connections": 1, "opened": 1, "timeouts": 0, "wrong_replies": 0, "errors": 0,
        }  # fmt: skip

    def test_other_pieces_of_the_same_block(self, redis_server):
        backend = open_backend(redis_server().url)
        put(backend, KEYS)
        memory = Memory(9, (BLOCK_BYTES - 700, *[1] * 700))
        assert backend.get(KEYS, memory.blocks, soon()) == [HEADER] * 9
        assert [memory.block(i) for i in range(9)] == [content(key) for key in KEYS]
        assert memory.gaps_are_whole

    def test_the_first_writer_wins(self, redis_server):
        backend = open_backend(redis_server().url)
        put(backend, KEYS[:1])
        assert backend.put(KEYS[:1], filled(KEYS[1:2]), [b"other"], soon()) == ["known"]
        memory = Memory(1)
        assert backend.get(KEYS[:1], memory.blocks, soon()) == [HEADER]
        assert memory.block(0) == content(KEYS[0])

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
        assert [memory.block(i) for i in (0, 1, 5, 6, 7, 8)] == [
            content(KEYS[i]) for i in (0, 1, 5, 6, 7, 8)
        ]

    def test_damaged_blocks_are_discarded(self, redis_server):
        backend = open_backend(redis_server().url)
        put(backend, KEYS)
        backend.discard(KEYS[2:4], soon())
        assert backend.exists(KEYS, soon()) == [True] * 2 + [False] * 2 + [True] * 5
        assert backend.busy(KEYS) is None

    def test_a_key_of_another_type_is_a_miss(self, redis_server):
        backend = open_backend(redis_server().url)
        backend._ask(soon(), b"LPUSH", backend._key(KEYS[0]), b"x")
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
        memory = Memory(stored, (1 << 20,))
        assert backend.get(keys[:stored], memory.blocks, soon()) == [HEADER] * stored
        assert memory.block(0) == content(keys[0], 1 << 20)
        backend.remove(soon())
        assert put(backend, keys[:1], (1 << 20,)) == ["stored"]

    def test_threads(self, redis_server):
        backend = open_backend(redis_server().url)
        failures = []

        def work(seed):
            order = random.Random(seed)
            try:
                for _ in range(20):
                    keys = [key_of(order.randrange(60)) for _ in range(5)]
                    assert set(put(backend, keys)) <= {"stored", "known"}
                    memory = Memory(5)
                    assert backend.get(keys, memory.blocks, soon()) == [HEADER] * 5
                    assert [memory.block(i) for i in range(5)] == [content(key) for key in keys]
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert 1 <= backend.stats()["opened"] <= 4

    def test_a_child_opens_connections_of_its_own(self, redis_server):
        backend = open_backend(redis_server().url)
        put(backend, KEYS)
        inherited = backend._pool._idle[0]._socket
        child = os.fork()
        if child == 0:  # no assertion: pytest would go on in two processes
            status = 1
            try:
                fine = backend.exists(KEYS, soon()) == [True] * 9 and inherited.fileno() == -1
                status = 0 if fine and backend.stats()["opened"] == 1 else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        memory = Memory(9)
        assert backend.get(KEYS, memory.blocks, soon()) == [HEADER] * 9
        assert backend.stats()["opened"] == 1


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
                results.extend(error.results)

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
            lambda end: put_before(backend, end),
        ):
            start = time.monotonic()
            with pytest.raises(BackendLost, match="did not answer in time"):
                call(time.monotonic() + 0.3)
            assert time.monotonic() - start < 20
        server.go_on()
        assert backend.exists(KEYS, soon()) == [True] * 9  # so it has gone through what came before
        assert memory.is_untouched
        assert backend.stats()["timeouts"] == 3

    def test_calls_in_flight_end_when_it_is_closed(self, redis_server):
        server = redis_server()
        backend = open_backend(server.url)
        server.pause()
        memory, errors = Memory(9), []

        def get():
            try:
                backend.get(KEYS, memory.blocks, soon(600))
            except BackendLost as error:
                errors.append(error)

        thread = threading.Thread(target=get)
        thread.start()
        end = soon()
        while backend._pool._idle and time.monotonic() < end:
            time.sleep(0.001)
        backend.close()
        thread.join(30)
        assert len(errors) == 1
        with pytest.raises(BackendLost, match="closed"):
            backend.exists(KEYS, soon())

    def test_calls_wait_for_a_connection_until_their_deadline(self, redis_server):
        backend = RedisBackend(redis_address(redis_server().url), b"t", max_connections=1)
        taken = backend._pool.take(soon())
        with pytest.raises(BackendLost, match="in time"):
            backend.exists(KEYS, time.monotonic() + 0.05)
        backend._pool.give_back(taken)
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
                    assert len(results) == 9 and {type(r) for r in results} <= {
                        type(nothing), bytes, str, bool
                    }  # fmt: skip
                    if nothing is None:
                        for i, header in enumerate(results):
                            assert header is None or memory.block(i) == content(KEYS[i])
                fired = failing.disarm()
                assert set(put(backend, KEYS)) <= {"stored", "known"}
                assert backend.get(KEYS, memory.blocks, soon()) == [HEADER] * 9
                assert [memory.block(i) for i in range(9)] == [content(key) for key in KEYS]
                assert memory.gaps_are_whole
                assert backend.stats()["connections"] == 1
                backend.remove(soon())
                backend.close()
                if not fired:
                    break
            assert number > 12


class Failing:
    """Makes the call of a number to any socket fail, of those of this process' clients."""

    NAMES = ("connect", "sendmsg", "recv_into", "recvmsg_into", "recv", "setsockopt")

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


def put_before(backend, end):
    return backend.put(KEYS, filled(KEYS), [HEADER] * 9, end)


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
            assert "s3cr" not in repr(backend) + repr(backend._address)
            assert set(put(backend, KEYS)) <= {"stored", "known"}
        for url, options in (
            (server.url, {"password": "wr0ng"}),
            (server.url.replace("//", "//:wr0ng@"), {}),
            (server.url, {"user": "nobody", "password": "wr0ng"}),
            (server.url, {}),
        ):
            with pytest.raises(BackendLost) as caught:
                open_backend(url, **options)
            assert caught.value.refused and "wr0ng" not in str(caught.value)
        with pytest.raises(BackendLost, match="NOAUTH"):
            put(open_backend(server.url, connect=False), KEYS)

    def test_user_with_the_documented_rights(self, redis_server):
        rights = ["+auth", "+select", "+ping", "+exists", "+get", "+set", "+scan", "+unlink"]
        server = redis_server(
            "--user", "default", "off", "--user", "cache", "on", ">secret", "~kvcupy:*", *rights
        )
        url = server.url.replace("//", "//cache:secret@")
        backend = open_backend(url + "/3")
        assert put(backend, KEYS) == ["stored"] * 9
        assert backend.get(KEYS, Memory(9).blocks, soon()) == [HEADER] * 9
        assert open_backend(url).exists(KEYS, soon()) == [False] * 9
        assert backend.remove(soon()) == 9
        with pytest.raises(BackendLost, match="no database 99"):
            open_backend(url + "/99")
        with pytest.raises(BackendLost, match="NOPERM"):
            backend._ask(soon(), b"FLUSHALL")

    @pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
    def test_tls(self, redis_server, tmp_path):
        ca, certificate, key = certificates(tmp_path)
        server = redis_server(
            "--tls-cert-file", str(certificate), "--tls-key-file", str(key),
            "--tls-ca-cert-file", str(ca), "--tls-auth-clients", "no", tls=True,
        )  # fmt: skip
        url = server.url.replace("redis:", "rediss:")
        backend = open_backend(url, ca_file=ca)
        assert put(backend, KEYS) == ["stored"] * 9
        memory = Memory(9)
        assert backend.get(KEYS, memory.blocks, soon()) == [HEADER] * 9
        assert [memory.block(i) for i in range(9)] == [content(key) for key in KEYS]
        assert open_backend(url, verify=False).exists(KEYS, soon()) == [True] * 9
        with pytest.raises(BackendLost, match="certificate verify failed"):
            open_backend(url)
        with pytest.raises(BackendLost, match=r"certificate verify failed: (IP|Hostname)"):
            open_backend(url.replace("127.0.0.1", "localhost"), ca_file=ca)
        with pytest.raises(BackendLost):
            open_backend(server.url)
        server.pause()
        with pytest.raises(BackendLost, match="in time"):
            backend.get(KEYS, memory.blocks, time.monotonic() + 0.3)


class Impostor:
    """A server that answers each connection with the same bytes, and closes it."""

    def __init__(self, folder):
        self.reply = b""
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
                    connection.sendall(self.reply)
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
        backend = open_backend(f"unix:{impostor.path}", connect=False)
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
            except BackendLost as error:
                yield list(error.results)
        backend.close()

    @pytest.mark.parametrize("number", range(len(NONSENSE)))
    def test_is_a_miss(self, impostor, number):
        impostor.reply, memory = NONSENSE[number], Memory(3)
        headers, known, outcomes, removed, alive = self.calls(impostor, memory)
        assert headers == [None] * 3 and memory.is_untouched
        assert known == [False] * 3 or NONSENSE[number].startswith(b":1")
        assert set(outcomes) <= {"failed"} | ({"known"} if b"$-1" in NONSENSE[number] else set())
        assert not any(removed) and not any(alive)

    def test_a_value_must_end_where_it_says(self, impostor):
        value = b"$%d\r\n" % (BLOCK_BYTES + len(HEADER)) + HEADER + content(KEYS[0])
        backend, memory = open_backend(f"unix:{impostor.path}", connect=False), Memory(1)
        impostor.reply = value + b"\r\n"
        assert backend.get(KEYS[:1], memory.blocks, soon()) == [HEADER]
        impostor.reply = value + b"xx"
        with pytest.raises(BackendLost, match="Redis server") as caught:
            backend.get(KEYS[:1], memory.blocks, soon())
        assert list(caught.value.results) == [None] and memory.gaps_are_whole

    def test_a_connection_with_more_replies_than_requests_is_closed(self, impostor):
        backend = open_backend(f"unix:{impostor.path}", connect=False)
        impostor.reply = b":1\r\n:0\r\n"
        assert backend.exists(KEYS[:1], soon()) == [True]
        assert backend.stats()["connections"] == 0
        impostor.reply = b":1\r\n"
        assert backend.exists(KEYS[:1], soon()) == [True]
        assert backend.stats()["connections"] == 1

    @pytest.mark.parametrize("page", [
        b"*2\r\n$1\r\n0\r\n*1\r\n:5\r\n", b"*2\r\n:0\r\n*0\r\n", b"*2\r\n$1\r\n0\r\n$1\r\nx\r\n",
        b"*1\r\n*0\r\n", b"*2\r\n$-1\r\n*-1\r\n", b"*2\r\n" * 9, b"*60000\r\n", b"$70000\r\nx",
        b"*2\r\n$1\r\n0\r\n*1\r\n$257\r\n" + b"x" * 257 + b"\r\n",
        b"*2\r\n$1\r\n0\r\n*20000\r\n" + b"$1\r\nx\r\n" * 20000,
    ], ids=range(10))  # fmt: skip
    def test_pages_of_keys_that_are_none(self, impostor, page):
        backend = open_backend(f"unix:{impostor.path}", connect=False)
        impostor.reply = page
        with pytest.raises(BackendLost):
            backend.remove(soon())

    def test_mutated_replies_stay_within_the_buffers(self, impostor):
        order = random.Random(20261122)
        good = b"".join(
            b"$%d\r\n" % (BLOCK_BYTES + len(HEADER)) + HEADER + content(key) + b"\r\n"
            for key in KEYS[:3]
        )
        honest = [good, b":1\r\n:0\r\n:1\r\n", b"+OK\r\n$-1\r\n-OOM full\r\n", b"+PONG\r\n"]
        backend = open_backend(f"unix:{impostor.path}", connect=False)
        sent = filled(KEYS[:3])
        whole = 0
        for _ in range(600):
            impostor.reply = reply = mutated(order, order.choice([good, good, *honest]))
            memory = Memory(3)
            try:
                headers = backend.get(KEYS[:3], memory.blocks, soon())
            except BackendLost as error:
                headers = error.results
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
                except BackendLost as error:
                    results = error.results
                assert len(results) == 3
                if "stored" in results:
                    assert b"+OK\r\n" in reply
        assert whole > 50  # it is not that everything is refused
        assert backend.stats()["connections"] == 0


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
    ("redis://h", {}, ("h", 6379, "", 0, "", "")),
    ("redis://h:1/2", {}, ("h", 1, "", 2, "", "")),
    ("redis://u:p%40@[::1]:7", {}, ("::1", 7, "", 0, "u", "p@")),
    ("redis://:p@h", {"db": 4}, ("h", 6379, "", 4, "", "p")),
    ("rediss://h", {}, ("h", 6379, "", 0, "", "")),
    ("unix:/run/r.sock", {"password": "p", "user": "u"}, ("", 0, "/run/r.sock", 0, "u", "p")),
]


@pytest.mark.parametrize("url, options, expected", URLS)
def test_urls(url, options, expected):
    address = redis_address(url, **options)
    fields = (address.host, address.port, address.path, address.db, address.user, address.password)
    assert fields == expected
    assert (address.tls is not None) == url.startswith("rediss")


WRONG = [
    ("http://h", {}, ValueError, "url"),
    ("redis://", {}, ValueError, "url"),
    ("redis://h:x", {}, ValueError, "url"),
    ("redis://h:99999", {}, ValueError, "url"),
    ("redis://h/x", {}, ValueError, "url"),
    ("redis://h/1?x=1", {}, ValueError, "url"),
    ("redis://a..b", {}, ValueError, "url: expected"),
    ("redis://" + "a" * 64, {}, ValueError, "url: expected"),
    ("redis://h", {"password": "\ud800"}, ValueError, "password: expected"),
    ("redis://h", {"user": "\udfff", "password": "p"}, ValueError, "user: expected"),
    ("unix:", {}, ValueError, "url"),
    (b"redis://h", {}, TypeError, "url"),
    ("redis://:p@h", {"password": "q"}, ValueError, "password"),
    ("redis://h/1", {"db": 1}, ValueError, "db"),
    ("redis://h", {"db": -1}, ValueError, "db"),
    ("redis://h", {"db": True}, ValueError, "db"),
    ("redis://h", {"user": "u"}, ValueError, "password"),
    ("redis://h", {"password": 3}, TypeError, "password"),
    ("redis://h", {"verify": False}, ValueError, "rediss"),
    ("rediss://h", {"verify": 1}, TypeError, "verify"),
    ("rediss://h", {"ca_file": "/nowhere.pem"}, FileNotFoundError, "ca_file"),
    ("rediss://h", {"key_file": "/dev/null"}, (ValueError, FileNotFoundError), "key_file"),
]


@pytest.mark.parametrize("url, options, error, name", WRONG)
def test_urls_that_do_not_fit(url, options, error, name):
    with pytest.raises(error, match=name) as caught:
        redis_address(url, **options)
    assert ":p@" not in str(caught.value)
    assert caught.value.__context__ is None or ":p@" not in str(caught.value.__context__)


@pytest.mark.parametrize(
    "options, error",
    [
        ({"ttl_s": 0}, ValueError), ({"ttl_s": -1}, ValueError), ({"ttl_s": "1"}, TypeError),
        ({"max_connections": 0}, ValueError), ({"max_connections": 1.5}, TypeError),
        ({"max_connections": "4"}, TypeError),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(options, error):
    with pytest.raises(error, match=f"^{next(iter(options))}: expected"):
        RedisBackend(redis_address("redis://h"), b"", **options)
