"""The Mooncake backend with real masters and nodes: stopped, killed, full; and late bytes."""

from __future__ import annotations

import gc
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from line_process import poll
from mooncake_servers import free_ports, needs_mooncake, pause, servers_in
from shared_cases import content, key_of, soon

import kvcupy as kv
from kvcupy.remote.stores import mooncake
from kvcupy.remote.stores.backend import BackendLost, SummedBlock
from kvcupy.remote.wire import WirePages, checksum

PATTERN = 0xA5
HEADER = b"header of a block"
MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def in_place(monkeypatch):
    """Blocks come and go where they lie, as longer ones do, which is where bytes can land late."""
    monkeypatch.setattr(mooncake, "_MAX_STAGED_BYTES", 0)


@pytest.fixture
def servers(tmp_path):
    with servers_in(tmp_path) as start:
        yield start


KEYS = [key_of(i) for i in range(8)]
SHAPE = {"page_size": 16, "num_layers": 4, "num_kv_heads": 8, "head_dim": 64, "device": "host"}
BLOCK_BYTES = 2 * 16 * 4 * 8 * 64 * 2


class Pages:
    """A pool whose pages are filled by key, or with a pattern."""

    def __init__(self, num_pages=8, layout="page_first_direct"):
        self.pool = kv.KVPool(num_pages, layout=layout, **SHAPE)
        self.wire = WirePages(self.pool)
        self.blocks = []
        if self.wire.is_direct:
            self.blocks = [self.wire.pieces(page) for page in range(num_pages)]

    def fill(self, keys):
        for page, key in enumerate(keys):
            self.wire.write_from(page, content(key, BLOCK_BYTES))
        return self.blocks

    def wipe(self):
        for page in range(self.pool.num_pages):
            self.wire.write_from(page, bytes([PATTERN]) * BLOCK_BYTES)
        return self.blocks

    def block(self, page):
        block = np.empty(BLOCK_BYTES, np.uint8)
        self.wire.read_into(page, block)
        return block.tobytes()

    def has(self, keys):
        return all(self.block(page) == content(key, BLOCK_BYTES) for page, key in enumerate(keys))

    @property
    def is_wiped(self):
        wiped = bytes([PATTERN]) * BLOCK_BYTES
        return all(self.block(page) == wiped for page in range(self.pool.num_pages))


def open_backend(url="mooncake://127.0.0.1:1", wire=None, **options):
    options = {"namespace": b"tenant", "capacity_bytes": None, "deadline": soon(), **options}
    return mooncake.open_backend(url, wire or Pages().wire, **options)


@pytest.fixture
def backend_of():
    opened = []

    def open_one(servers, pages, **options):
        opened.append(open_backend(servers.url, pages.wire, host="127.0.0.1", **options))
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
                opened[namespace] = open_backend(started.url, namespace=namespace, host="127.0.0.1")
            opened[namespace].remove(soon())
            return opened[namespace]

        yield backend
        for each in opened.values():
            each.close()


def put(backend, pages, keys):
    return backend.put(keys, pages.fill(keys)[: len(keys)], [HEADER] * len(keys), soon())


@needs_mooncake
class TestStore:
    def test_blocks_come_back_in_place_whatever_the_layout(self, store):
        direct, by_layer = Pages(), Pages(layout="layer_first")
        assert (direct.wire.num_pieces, by_layer.wire.num_pieces) == (2, 8)
        backend = store(b"one")
        assert backend.exists(KEYS, soon()) == [False] * 8
        assert put(backend, direct, KEYS[:7]) == ["stored"] * 7
        assert put(backend, direct, KEYS[:7]) == ["known"] * 7
        blocks = by_layer.wipe()
        assert backend.get(KEYS[:7], blocks[:7], soon()) == [HEADER] * 7
        assert by_layer.has(KEYS[:7])
        assert backend.get(KEYS[7:], blocks[7:], soon()) == [None]
        assert by_layer.block(7) == bytes([PATTERN]) * BLOCK_BYTES
        assert backend.exists(KEYS, soon()) == [True] * 7 + [False]
        backend.discard(KEYS[2:4], soon())
        assert backend.exists(KEYS[:6], soon()) == [True] * 2 + [False] * 2 + [True] * 2
        assert put(backend, direct, []) == backend.get([], [], soon()) == []
        assert backend.busy(KEYS) is None
        assert backend.stats() == {
            "clients": 1, "late": 0, "failed_transfers": 0, "errors": 0, "draining": 0,
        }  # fmt: skip

    def test_small_blocks_go_through_a_buffer(self, servers, backend_of, monkeypatch):
        """In one piece, some at a time; the objects are the same as in place."""
        started = servers()
        started.add_node(64 * MEBIBYTE)
        in_place = backend_of(started, Pages())
        monkeypatch.setattr(mooncake, "_MAX_STAGED_BYTES", BLOCK_BYTES)
        monkeypatch.setattr(mooncake, "_STAGED_BLOCKS_PER_CALL", 3)
        staged = backend_of(started, Pages())
        pieces = []
        real = mooncake._addresses

        def addresses(rows, blocks):
            pointers, sizes = real(rows, blocks)
            pieces.append([len(lengths) for lengths in sizes])
            return pointers, sizes

        monkeypatch.setattr(mooncake, "_addresses", addresses)
        assert put(staged, Pages(), KEYS[:4]) == ["stored"] * 4
        assert pieces == [[1] * 3, [1]]
        assert put(in_place, Pages(), KEYS[:6]) == ["known"] * 4 + ["stored"] * 2
        assert pieces[2:] == [[3] * 2], "K, V and the header"
        for backend in (staged, in_place):
            pages = Pages(layout="layer_first")
            summed = [SummedBlock(block, is_summed=True) for block in pages.wipe()]
            expected = [HEADER] * 6 + [None] * 2
            assert backend.get(KEYS, summed, soon()) == expected
            assert all(pages.block(i) == content(KEYS[i], BLOCK_BYTES) for i in range(6))
            assert pages.block(7) == bytes([PATTERN]) * BLOCK_BYTES
            for key, block in zip(KEYS[:6], summed, strict=False):
                assert block.checksum() == checksum([content(key, BLOCK_BYTES)])
        assert pieces[3:] == [[1] * 3, [1] * 3, [1] * 2, [9] * 8]

    def test_the_first_writer_wins(self, store):
        pages, backend = Pages(), store(b"one")
        put(backend, pages, KEYS[:1])
        other = pages.fill(KEYS[1:2])[:1]
        assert backend.put(KEYS[:1], other, [b"other"], soon()) == ["known"]
        assert backend.get(KEYS[:1], pages.wipe()[:1], soon()) == [HEADER]
        assert pages.block(0) == content(KEYS[0], BLOCK_BYTES)

    def test_threads(self, store):
        backend, failures, misses = store(b"one"), [], []

        def work(seed):
            order, pages = np.random.default_rng(seed), Pages()
            try:
                for _ in range(10):
                    keys = [key_of(i) for i in order.choice(40, 8, replace=False)]
                    assert set(put(backend, pages, keys)) <= {"stored", "known"}
                    headers = backend.get(keys, pages.wipe(), soon())
                    for page, header in enumerate(headers):
                        if header is None:  # another thread is about to store it
                            misses.append(page)
                        else:
                            assert pages.block(page) == content(keys[page], BLOCK_BYTES)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(misses) < 240  # of 480
        assert backend.stats()["clients"] == 1

    @pytest.mark.full
    def test_a_process_with_a_segment(self, servers, backend_of):
        started = servers()
        pages = Pages()
        node = backend_of(started, pages, segment_bytes=64 * MEBIBYTE)
        assert put(node, pages, KEYS) == ["stored"] * 8
        client = backend_of(started, pages)
        pages.wipe()
        assert client.get(KEYS, pages.blocks, soon()) == [HEADER] * 8
        assert pages.has(KEYS)
        node.close()
        assert not any(client.exists(KEYS, soon()))
        with pytest.raises(BackendLost, match="closed"):
            node.exists(KEYS, soon())

    @pytest.mark.full
    def test_full(self, servers, backend_of):
        started = servers()
        started.add_node(16 * MEBIBYTE)
        pages = Pages(64)
        backend = backend_of(started, pages)
        outcomes = []
        for first in range(0, 512, 64):
            outcomes += put(backend, pages, [key_of(i) for i in range(first, first + 64)])
        assert set(outcomes) == {"stored", "full"}
        assert outcomes.index("full") * BLOCK_BYTES > 8 * MEBIBYTE

    @pytest.mark.full
    def test_a_lease_that_is_over_is_a_miss(self, servers, backend_of):
        started = servers("--default_kv_lease_ttl=1")
        started.add_node(64 * MEBIBYTE)
        pages = Pages(64)
        backend = backend_of(started, pages)
        keys = [key_of(i) for i in range(64)]
        put(backend, pages, keys)
        for _ in range(5):
            headers = backend.get(keys, pages.wipe(), soon())
            for page, header in enumerate(headers):
                if header is not None:
                    assert pages.block(page) == content(keys[page], BLOCK_BYTES)
            assert backend.busy(keys) is None

    def test_memory_of_a_pool_is_out_of_reach_of_others(self, store):
        backend = store(b"one")
        put(backend, Pages(), KEYS)
        opened = listening()
        assert opened  # it does listen
        pointers, sizes = backend._clients._pages.addresses(0)
        for port in opened:
            with socket.create_connection(("127.0.0.1", port), 5) as stranger:
                stranger.settimeout(0.5)
                request = np.array([sizes[0], pointers[0], 0], np.uint64).tobytes()
                stranger.sendall(request)
                try:
                    answer = stranger.recv(4096)
                except (TimeoutError, ConnectionError):
                    answer = b""
            assert answer == b""


def listening():
    """Return the TCP ports that this process listens on."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(entry.readlink()))
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


@needs_mooncake
class TestLost:
    def test_no_master(self):
        start = time.monotonic()
        with pytest.raises(BackendLost, match="no answer"):
            open_backend(f"mooncake://127.0.0.1:{free_ports(1)[0]}")
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
        pages = Pages()
        backend = backend_of(started, pages)
        put(backend, pages, KEYS)
        started.master.kill()
        started.master.wait()
        pages.wipe()
        with pytest.raises(BackendLost):
            backend.exists(KEYS, soon(1.0))
        with pytest.raises(BackendLost) as caught:
            backend.get(KEYS, pages.blocks, soon(1.0))
        assert list(caught.value.results) == [None] * 8
        assert pages.is_wiped
        while (completion := backend.busy(KEYS)) is not None:
            completion.synchronize()
        started.start_master()
        end = soon()
        while True:  # the node finds the new master by itself
            try:
                if set(put(backend, pages, KEYS)) == {"stored"}:
                    break
            except BackendLost:
                assert time.monotonic() < end
            time.sleep(0.05)
        assert backend.get(KEYS, pages.wipe(), soon()) == [HEADER] * 8
        assert pages.has(KEYS)

    @pytest.mark.full
    def test_a_killed_node(self, servers, backend_of):
        started = servers()
        node = started.add_node(64 * MEBIBYTE)
        pages = Pages()
        backend = backend_of(started, pages)
        put(backend, pages, KEYS)
        node.kill()
        node.wait()
        pages.wipe()
        with pytest.raises(BackendLost, match="-800") as caught:
            backend.get(KEYS, pages.blocks, soon())
        assert list(caught.value.results) == [None] * 8
        assert not caught.value.repeatable, "it would cost another client"
        completion = backend.busy(KEYS)
        if completion is not None:  # else it is over already
            completion.synchronize()
            assert completion.done()
        assert backend.busy(KEYS) is None
        assert pages.is_wiped
        assert backend.stats()["failed_transfers"] == 1

    def test_nothing_lands_after_quarantine(self, servers, backend_of):
        started = servers()
        node = started.add_node(256 * MEBIBYTE)
        pages = Pages(64)
        keys = [key_of(i) for i in range(64)]
        backend = backend_of(started, pages)
        put(backend, pages, keys)
        pages.wipe()
        pause(node)
        with pytest.raises(BackendLost, match="in time"):
            backend.get(keys, pages.blocks, time.monotonic() + 0.3)
        completion = backend.busy(keys[5:6])
        assert completion is not None and not completion.done()
        assert backend.busy([b"another key"]) is None
        pages.pool.allocator.alloc(64)
        pages.pool.allocator._mark_busy(range(64), completion)
        pages.pool.allocator.free(range(64))
        assert pages.pool.allocator.num_free == 0
        # Another get into the same pages would be overwritten by what comes late.
        with pytest.raises(BackendLost, match="may still write"):
            backend.get(keys[:1], pages.blocks[:1], soon())
        node.send_signal(signal.SIGCONT)
        completion.synchronize()
        assert completion.done() and backend.busy(keys) is None
        assert pages.pool.allocator.num_free == 64
        pages.wipe()
        time.sleep(0.2)
        assert pages.is_wiped
        assert backend.get(keys, pages.blocks, soon()) == [HEADER] * 64
        assert pages.has(keys)
        assert backend.stats() == {
            "clients": 2, "late": 1, "failed_transfers": 0, "errors": 0, "draining": 0,
        }  # fmt: skip

    @pytest.mark.slow  # Mooncake itself gives up after 60 s
    def test_nothing_lands_after_a_call_that_has_failed(self, servers, backend_of):
        started = servers("--client_ttl=600")
        node = started.add_node(256 * MEBIBYTE)
        pages = Pages(64)
        keys = [key_of(i) for i in range(64)]
        backend = backend_of(started, pages)
        put(backend, pages, keys)
        pages.wipe()
        pause(node)
        with pytest.raises(BackendLost, match="-800"):
            backend.get(keys, pages.blocks, soon(300))
        if (completion := backend.busy(keys)) is not None:
            completion.synchronize()
        node.send_signal(signal.SIGCONT)
        time.sleep(2)
        assert pages.is_wiped
        assert backend.get(keys, pages.blocks, soon()) == [HEADER] * 64
        assert pages.has(keys)

    @pytest.mark.full
    def test_calls_that_do_not_come_back_are_bounded_and_keep_their_memory(
        self, servers, backend_of
    ):
        started = servers()
        node = started.add_node(64 * MEBIBYTE)
        pages = Pages()
        backend = backend_of(started, pages)
        put(backend, pages, KEYS)
        arrays = [np.full(BLOCK_BYTES, PATTERN, np.uint8) for _ in range(3)]
        pause(node)
        for array in arrays[:2]:
            with pytest.raises(BackendLost, match="in time"):
                backend.get(KEYS[:1], [[memoryview(array)]], time.monotonic() + 0.1)
            assert sys.getrefcount(array) > 3
        del array
        start = time.monotonic()
        with pytest.raises(BackendLost, match="have not returned"):
            backend.get(KEYS[:1], [[memoryview(arrays[2])]], soon(600))
        assert time.monotonic() - start < 60
        node.send_signal(signal.SIGCONT)
        while (completion := backend.busy(KEYS)) is not None:
            completion.synchronize()
        assert backend.get(KEYS[:1], [[memoryview(arrays[2])]], soon()) == [HEADER]
        assert arrays[2].tobytes() == content(KEYS[0], BLOCK_BYTES)
        gc.collect()  # what was raised refers to the frames of the calls
        assert [sys.getrefcount(array) for array in arrays] == [3, 3, 3]  # list, loop, argument

    @pytest.mark.full
    def test_a_process_may_end_while_a_call_is_in_flight(self, servers):
        started = servers()
        node = started.add_node(64 * MEBIBYTE)
        program = f"""
import os, signal, threading, time
import kvcupy as kv
from kvcupy.remote.stores.backend import BackendLost
from kvcupy.remote.wire import WirePages
from kvcupy.remote.stores import mooncake

pool = kv.KVPool(8, 16, 4, 8, 64, layout="page_first_direct", device="host")
pages = WirePages(pool)
blocks = [pages.pieces(page) for page in range(8)]
keys = [bytes([page]) * 32 for page in range(8)]
backend = mooncake.open_backend(
    {started.url!r}, pages, namespace=b"t", capacity_bytes=None, deadline=time.monotonic() + 60,
    host="127.0.0.1",
)
print(backend.put(keys, blocks, [b"header"] * 8, time.monotonic() + 60))
os.kill({node.pid}, signal.SIGSTOP)
try:
    backend.get(keys, blocks, time.monotonic() + 0.2)
except BackendLost as error:
    print(error)
threading.Thread(target=lambda: (time.sleep(0.5), os.kill({node.pid}, signal.SIGCONT))).start()
"""
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        assert "in time" in ended.stdout


HASHES = [int.from_bytes(key[:16], "little") for key in KEYS]


def shared_store(started, pages, **options):
    return kv.SharedStore.open(started.url, pages.pool, host="127.0.0.1", **options)


@needs_mooncake
class TestSharedStore:
    @pytest.mark.full
    def test_pages_of_a_late_call_are_held_back(self, servers):
        started = servers()
        node = started.add_node(64 * MEBIBYTE)
        pages = Pages()
        pages.fill(KEYS)
        with shared_store(started, pages) as store:
            assert store.put(HASHES[:4], range(4)) == ["stored"] * 4
            allocator = pages.pool.allocator
            allocated = allocator.alloc(8)
            pause(node)
            assert store.get(HASHES[:4], range(4), deadline_s=0.2) == [False] * 4
            allocator.free(allocated)
            assert allocator.num_free == allocator.num_available == 4  # others are held back
            with pytest.raises(kv.CacheFull):  # and not waited for: who knows how long
                allocator.alloc(5)
            node.send_signal(signal.SIGCONT)
            assert poll(lambda: allocator.num_free == 8)
            assert len(allocator.alloc(8)) == 8
            pages.wipe()
            time.sleep(0.2)
            assert pages.is_wiped
            assert store.get(HASHES[:4], range(4)) == [True] * 4
            assert all(pages.block(page) == content(KEYS[page], BLOCK_BYTES) for page in range(4))


ARGUMENTS = [
    ({"url": "mooncake://"}, ValueError, "url"),
    ({"url": "mooncake://h"}, ValueError, "url"),
    ({"url": "mooncake://h:x"}, ValueError, "url"),
    ({"url": "mooncake://u@h:1"}, ValueError, "url"),
    ({"url": "mooncake://h:1/x"}, ValueError, "url"),
    ({"url": 3}, TypeError, "url"),
    ({"capacity_bytes": 1}, ValueError, "capacity_bytes"),
    ({"segment_bytes": -1}, ValueError, "segment_bytes"),
    ({"segment_bytes": 1.5}, TypeError, "segment_bytes"),
    ({"protocol": "udp"}, ValueError, "protocol"),
    ({"devices": None}, TypeError, "devices"),
]


@pytest.mark.parametrize("arguments, error, name", ARGUMENTS)
def test_arguments_that_do_not_fit(arguments, error, name):
    with pytest.raises(error, match=name):
        open_backend(**arguments)


def test_a_system_without_threads_is_a_lost_store_until_it_has_some(monkeypatch):
    settings = mooncake._Settings("127.0.0.1:1", "127.0.0.1", "tcp", "", ())
    clients = mooncake._Clients(settings, Pages().wire)

    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(BackendLost, match="can't start new thread"):
            clients.call(lambda store, headers: [0], (), (), soon())
    monkeypatch.setattr(mooncake._Client, "store", lambda client, job: None)
    assert clients.call(lambda store, headers: [0], (), (), soon()) == [0]
    assert clients.close(60.0), "no thread is waited for that never ran"


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ImportError, match=r"\[mooncake\].*libibverbs1"):
        open_backend()


def test_rdma_registers_the_pool_alone():
    pool = kv.KVPool(8, layout="page_first_direct", **SHAPE)
    regions = mooncake._regions(WirePages(pool))
    assert sum(num_bytes for _, num_bytes in regions) == pool.num_bytes
    assert {pointer for pointer, _ in regions} <= {part.pointer for part in pool.parts}
    both = np.zeros((8, 2, 16, 8, 64), np.float16)
    wrapped = kv.KVPool.wrap([both[:, 0]], [both[:, 1]])
    ((pointer, num_bytes),) = mooncake._regions(WirePages(wrapped))
    assert (pointer, num_bytes) == (both.ctypes.data, both.nbytes)
    with pytest.raises(ValueError, match="host_pool"):
        open_backend(wire=WirePages(kv.KVPool(8, layout="page_first", **SHAPE)), protocol="rdma")
