"""Block stores in Mooncake, with real masters and nodes: stopped, killed, full; and late bytes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
from block_store_cases import (
    Writer,
    block_hashes,
    block_of,
    content,
    empty_block,
    key_of,
    new_pool,
    soon,
)
from line_process import poll
from mooncake_servers import free_ports, needs_mooncake, pause, servers_in

import kvcupy as kv
from kvcupy.remote.stores import mooncake
from kvcupy.remote.stores.backend import BackendLost

MEBIBYTE = 1 << 20
SIZES = (56, 60_000, 5_480)
BLOCK_BYTES = sum(SIZES)
KEYS = [key_of(i) for i in range(8)]
HASHES = block_hashes(8)


@pytest.fixture
def servers(tmp_path):
    with servers_in(tmp_path) as start:
        yield start


def open_backend(url, namespace=b"tenant", deadline=None):
    return mooncake.open_backend(
        f"{url}?host=127.0.0.1", namespace=namespace, num_bytes=BLOCK_BYTES, capacity_bytes=None,
        deadline=deadline or soon(),
    )  # fmt: skip


@pytest.fixture
def backend_of():
    opened = []

    def open_one(started):
        opened.append(open_backend(started.url))
        return opened[-1]

    yield open_one
    for backend in opened:
        backend.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Backends by namespace, of one process, on a store that nobody harms."""
    opened = {}
    with servers_in(tmp_path_factory.mktemp("store")) as start:
        started = start()
        started.add_node(256 * MEBIBYTE)

        def backend(namespace):
            if namespace not in opened:
                opened[namespace] = open_backend(started.url, namespace)
            opened[namespace].clear(soon())
            return opened[namespace]

        yield backend
        for each in opened.values():
            each.close()


def put(backend, keys, end=None):
    blocks = [block_of(key, SIZES) for key in keys]
    return backend.put(keys, blocks, dict.fromkeys(keys, 0), end or soon())


def get(backend, keys, end=None):
    """Return which blocks arrived, after checking their contents."""
    blocks = [empty_block(SIZES) for _ in keys]
    there = backend.get(keys, blocks, {}, end or soon())
    for key, block, whole in zip(keys, blocks, there, strict=True):
        assert not whole or b"".join(block) == content(key, BLOCK_BYTES)
    return there


@needs_mooncake
class TestStore:
    def test_blocks_come_back(self, store):
        backend, other = store(b"one"), store(b"other")
        assert backend.exists(KEYS, soon()) == [False] * 8
        assert put(backend, KEYS[:7]) == ["stored"] * 7
        assert get(backend, KEYS) == [True] * 7 + [False]
        assert backend.exists(KEYS, soon()) == [True] * 7 + [False]
        backend.discard(KEYS[2:4], soon())
        assert backend.exists(KEYS[:6], soon()) == [True] * 2 + [False] * 2 + [True] * 2
        put(other, KEYS[:2])
        backend.clear(soon())
        assert not any(backend.exists(KEYS, soon()))
        assert get(other, KEYS[:3]) == [True, True, False]
        assert backend.stats() == {
            "clients": 1, "late": 0, "failed_transfers": 0, "errors": 0, "draining": 0,
        }  # fmt: skip

    @pytest.mark.full
    def test_full(self, servers, backend_of):
        started = servers()
        started.add_node(16 * MEBIBYTE)
        backend, outcomes = backend_of(started), []
        for first in range(0, 512, 64):
            outcomes += put(backend, [key_of(i) for i in range(first, first + 64)])
        assert set(outcomes) == {"stored", "full"}
        assert outcomes.index("full") * BLOCK_BYTES > 8 * MEBIBYTE


@needs_mooncake
class TestLost:
    def test_no_master(self):
        start = time.monotonic()
        with pytest.raises(ConnectionError, match="no answer"):
            kv.BlockStore.open(f"mooncake://127.0.0.1:{free_ports(1)[0]}", new_pool())
        assert time.monotonic() - start < 30  # Mooncake itself takes 90 s, and holds Python's lock

    def test_a_stopped_master(self, servers):
        started = servers()
        pause(started.master)
        start = time.monotonic()
        with pytest.raises(BackendLost, match="in time"):
            open_backend(started.url, deadline=soon(0.3))
        assert time.monotonic() - start < 20

    @pytest.mark.full
    def test_a_killed_master(self, servers, backend_of):
        started = servers()
        started.add_node(64 * MEBIBYTE)
        backend = backend_of(started)
        put(backend, KEYS)
        started.master.kill()
        started.master.wait()
        for call in (lambda: backend.exists(KEYS, soon(1.0)), lambda: get(backend, KEYS, soon(1))):
            with pytest.raises(BackendLost):
                call()
        started.start_master()
        end = soon()
        while True:  # the node finds the new master by itself
            try:
                if set(put(backend, KEYS)) == {"stored"}:
                    break
            except BackendLost:
                assert time.monotonic() < end
            time.sleep(0.05)
        assert get(backend, KEYS) == [True] * 8

    @pytest.mark.full
    def test_a_killed_node(self, servers, backend_of):
        started = servers()
        node = started.add_node(64 * MEBIBYTE)
        backend = backend_of(started)
        put(backend, KEYS)
        node.kill()
        node.wait()
        with pytest.raises(BackendLost, match="-800"):
            get(backend, KEYS)
        assert backend.stats()["failed_transfers"] == 1

    def test_nothing_reaches_a_page_after_the_deadline(self, servers):
        """Bytes that come late land in a buffer of the client that is then closed."""
        started = servers()
        node = started.add_node(64 * MEBIBYTE)
        with Writer(f"{started.url}?host=127.0.0.1") as user:
            assert user.put(*HASHES) == ["stored"] * 8
            user.pool.k(0)[:] = user.pool.v(0)[:] = 7
            user.pool.k(1)[:] = user.pool.v(1)[:] = 7
            pause(node)
            assert user.store.get(HASHES, range(8), deadline_s=0.3) == [False] * 8
            assert len(user.backend._clients._draining) == 1
            node.send_signal(signal.SIGCONT)
            assert poll(lambda: not user.backend._clients._draining)
            for part in (user.pool.k(0), user.pool.v(0), user.pool.k(1), user.pool.v(1)):
                assert (np.asarray(part) == 7).all()
            user.ask_again()
            assert user.get(*HASHES) == [True] * 8
            stats = user.store.stats()
            assert (stats["clients"], stats["draining"]) == (2, 0)

    @pytest.mark.full
    def test_calls_that_do_not_come_back_are_bounded(self, servers, backend_of):
        started = servers()
        node = started.add_node(64 * MEBIBYTE)
        backend = backend_of(started)
        put(backend, KEYS)
        pause(node)
        for _ in range(2):
            with pytest.raises(BackendLost, match="in time"):
                get(backend, KEYS[:1], time.monotonic() + 0.1)
        start = time.monotonic()
        with pytest.raises(BackendLost, match="have not returned"):
            get(backend, KEYS[:1], soon(600))
        assert time.monotonic() - start < 60
        node.send_signal(signal.SIGCONT)
        assert poll(lambda: backend.stats()["draining"] == 0)
        assert get(backend, KEYS[:1]) == [True]

    @pytest.mark.full
    def test_a_process_may_end_while_a_call_is_in_flight(self, servers):
        started = servers()
        node = started.add_node(64 * MEBIBYTE)
        program = f"""
import os, signal, threading, time
import kvcupy as kv

pool = kv.KVPool(8, 16, 4, 8, 64, layout="page_first_direct", device="host")
hashes = kv.block_hashes(range(128), 16)
store = kv.BlockStore.open({started.url!r} + "?host=127.0.0.1", pool)
print(store.put(hashes, range(8)))
os.kill({node.pid}, signal.SIGSTOP)
print(store.get(hashes, range(8), deadline_s=0.2))
threading.Thread(target=lambda: (time.sleep(0.5), os.kill({node.pid}, signal.SIGCONT))).start()
"""
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        assert str([False] * 8) in ended.stdout


ARGUMENTS = [
    ("mooncake://", {}), ("mooncake://h", {}), ("mooncake://h:x", {}), ("mooncake://u@h:1", {}),
    ("mooncake://h:1/x", {}), ("mooncake://h:1?protocol=udp", {}), ("mooncake://h:1?colour=1", {}),
]  # fmt: skip


@pytest.mark.parametrize("url, options", ARGUMENTS)
def test_urls_that_do_not_fit(url, options):
    with pytest.raises(ValueError, match="url: expected"):
        kv.BlockStore.open(url, new_pool(), **options)


def test_a_capacity_is_the_servers():
    with pytest.raises(ValueError, match="capacity_bytes"):
        kv.BlockStore.open("mooncake://h:1", new_pool(), capacity_bytes=1)


def settings(protocol="tcp"):
    return mooncake._Settings("127.0.0.1:1", "127.0.0.1", protocol, "", 64)


def test_a_system_without_threads_is_a_lost_store_until_it_has_some(monkeypatch):
    clients = mooncake._Clients(settings())

    def fail(thread):
        raise RuntimeError("can't start new thread")

    def call():
        with clients.buffer(soon()) as buffer:
            return buffer.call(lambda store: [0], soon())

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(BackendLost, match="can't start new thread"):
            call()
    monkeypatch.setattr(mooncake._Client, "store", lambda client: None)
    assert call() == [0]
    assert clients.close(60.0), "no thread is waited for that never ran"


class Library:
    """What Mooncake's client does, by a dictionary; `hold` keeps a get from ending."""

    objects: ClassVar = {}

    def __init__(self):
        self.registered, self.is_open, self.hold = [], True, None
        self.code = None

    def setup(self, *arguments):
        return 0

    def register_buffer(self, pointer, num_bytes):
        self.registered.append((pointer, num_bytes))
        return 0

    def close(self):
        self.is_open = False

    def batch_is_exist(self, names):
        return [int(name in self.objects) for name in names]

    def batch_put_from_multi_buffers(self, names, pointers, sizes):
        for name, [pointer], [size] in zip(names, pointers, sizes, strict=True):
            self.objects[name] = memory(pointer, size).tobytes()
        return [0] * len(names)

    def batch_get_into_multi_buffers(self, names, pointers, sizes):
        if self.hold is not None:
            self.hold.wait()
        if self.code is not None:
            return [self.code] * len(names)
        codes = []
        for name, [pointer], [size] in zip(names, pointers, sizes, strict=True):
            value = self.objects.get(name)
            if value is not None:
                memory(pointer, size)[: len(value)] = np.frombuffer(value, np.uint8)
            codes.append(-704 if value is None else len(value))
        return codes


def memory(pointer, num_bytes):
    return np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * num_bytes).from_address(pointer))


@pytest.fixture
def library(monkeypatch):
    made = []

    def make():
        made.append(Library())
        return made[-1]

    monkeypatch.setattr(Library, "objects", {})
    monkeypatch.setattr(mooncake, "_store_class", lambda: make)
    monkeypatch.setattr(mooncake, "_is_alive", lambda master: True)
    return made


def fake_user():
    return Writer("mooncake://127.0.0.1:1?host=127.0.0.1")


def test_late_bytes_reach_no_page(library):
    with fake_user() as user:
        user.put(*HASHES)
        library[0].hold = threading.Event()
        user.pool.k(0)[:] = 7
        assert user.store.get(HASHES[:2], [0, 1], deadline_s=0.05) == [False, False]
        user.ask_again()
        assert user.get(*HASHES[2:4]) == [True, True], "another client serves"
        user.pool.k(0)[:2] = 7
        assert library[0].is_open, "as long as the call is in progress"
        library[0].hold.set()
        assert poll(lambda: not library[0].is_open)
        assert (np.asarray(user.pool.k(0)[:2]) == 7).all()
        assert user.store.stats()["late"] == 1


@pytest.mark.parametrize("code", [-800, -1, -900, -12345])
def test_after_a_code_with_which_bytes_may_still_come_the_client_is_replaced(library, code):
    with fake_user() as user:
        user.put(*HASHES)
        library[0].code = code
        assert user.get(*HASHES[:2]) == [False, False]
        assert poll(lambda: not library[0].is_open)
        user.ask_again()
        assert user.get(*HASHES[:2]) == [True, True]
        assert len(library) == 2


def test_objects_of_another_length_and_damaged_ones_are_misses(library):
    with fake_user() as user:
        user.put(*HASHES)
        names = list(Library.objects)
        Library.objects[names[0]] = Library.objects[names[0]][:-1]
        changed = bytearray(Library.objects[names[1]])
        changed[100] ^= 1
        Library.objects[names[1]] = bytes(changed)
        assert user.get(*HASHES) == [False, False] + [True] * 6
        assert len(library) == 1


def test_rdma_registers_the_buffers_alone(library):
    client = mooncake._Client(settings("rdma"))
    client.store()
    [made] = library
    assert made.registered == [(client._rows.ctypes.data, client._rows.nbytes)]
    tcp = mooncake._Client(settings())
    tcp.store()
    assert not library[1].registered


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ImportError, match=r"\[mooncake\].*libibverbs1"):
        kv.BlockStore.open("mooncake://127.0.0.1:1", new_pool())
