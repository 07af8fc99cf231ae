"""The L2 adapter of LMCache stores, finds and loads chunks in threads, and reports every task."""

from __future__ import annotations

import os
import select
from types import SimpleNamespace

import numpy as np
import pytest
from engine_interfaces import LMCACHE, Chunk, ObjectKey, TorchDtype, adapter, store_url

SHAPE = (2, 4, 16, 8)
BF16, UINT8 = TorchDtype("bfloat16"), TorchDtype("uint8", 1)


@pytest.fixture
def lmcache():
    with adapter("lmcache_backend", LMCACHE) as module:
        yield module


@pytest.fixture
def server(lmcache):
    server = Server(lmcache)
    yield server
    server.close()


class Server:
    """What LMCache's controllers do with adapters on one store."""

    def __init__(self, lmcache):
        self._lmcache, self.url, self._made = lmcache, store_url(), []

    def adapter(self, **options):
        options = {"stores": [self.url], **options}
        self._made.append(self._lmcache.KvcupyL2Adapter(options, l1_memory_desc=None))
        return self._made[-1]

    def close(self):
        for each in self._made:
            each.close()


def store(adapter, keys, chunks):
    number = adapter.submit_store_task(keys, chunks)
    wait(adapter.get_store_event_fd())
    [(popped, result)] = adapter.pop_completed_store_tasks().items()
    assert popped == number
    assert adapter.pop_completed_store_tasks() == {}
    return result.is_successful(), result.bytes_transferred()


def lookup(adapter, keys, shape=SHAPE, dtype=BF16, groups=(0,)):
    layout = SimpleNamespace(shapes=[shape], dtypes=[dtype])
    number = adapter.submit_lookup_and_lock_task(keys, dict.fromkeys(groups, layout))
    wait(adapter.get_lookup_and_lock_event_fd())
    bits = adapter.query_lookup_and_lock_result(number)
    assert adapter.query_lookup_and_lock_result(number) is None
    adapter.submit_unlock(keys)
    return [bits.test(i) for i in range(len(keys))]


def load(adapter, keys, chunks):
    number = adapter.submit_load_task(keys, chunks)
    wait(adapter.get_load_event_fd())
    bits = adapter.query_load_result(number)
    assert adapter.query_load_result(number) is None
    return [bits.test(i) for i in range(len(keys))]


def wait(descriptor):
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(10_000)
    os.read(descriptor, 8)


def chunk(seed=None, shape=SHAPE, dtype=BF16):
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    data = np.zeros(num_bytes, np.uint8)
    if seed is not None:
        data[:] = np.random.default_rng(seed).integers(0, 256, num_bytes)
    return Chunk(data, [shape], [dtype])


KEYS = [ObjectKey(bytes([i]) * 32) for i in range(5)]


def test_chunks_move_between_servers(server):
    one, other = server.adapter(), server.adapter()
    chunks = [chunk(i) for i in range(3)]
    assert store(one, KEYS[:3], chunks) == (True, 3 * chunks[0].get_size())
    assert store(one, KEYS[:1], chunks[:1]) == (True, chunks[0].get_size())  # known
    assert lookup(other, KEYS) == [True, True, True, False, False]
    copies = [chunk() for _ in range(4)]
    assert load(other, [KEYS[2], KEYS[4], KEYS[0], KEYS[1]], copies) == [True, False, True, True]
    wanted = [chunks[2], chunk(), chunks[0], chunks[1]]
    assert all((a.data == b.data).all() for a, b in zip(copies, wanted, strict=True))
    assert other.report_status()["is_healthy"]


def test_chunks_of_several_lengths_in_one_task(server):
    adapter = server.adapter()
    keys = [ObjectKey(bytes(32), object_group_id=i % 2) for i in range(2)]
    chunks = [chunk(0), chunk(1, (7, 3))]
    assert store(adapter, keys, chunks)[0]
    copies = [chunk(), chunk(None, (7, 3))]
    assert load(adapter, keys, copies) == [True, True]
    assert all((a.data == b.data).all() for a, b in zip(copies, chunks, strict=True))
    assert lookup(adapter, keys) == [True, False]  # no layout is known of group 1
    assert lookup(adapter, keys, groups=(0, 1)) == [True, False]  # another layout


@pytest.mark.parametrize(
    "other",
    [{"model_name": "n"}, {"kv_rank": 1}, {"object_group_id": 1}, {"cache_salt": "s"}],
    ids=str,
)
def test_other_keys_do_not_find_chunks(server, other):
    adapter = server.adapter()
    store(adapter, KEYS[:1], [chunk(0)])
    assert lookup(adapter, [ObjectKey(KEYS[0].chunk_hash, **other)], groups=(0, 1)) == [False]


def test_other_layouts_do_not_find_chunks(server):
    adapter = server.adapter()
    store(adapter, KEYS[:1], [chunk(0)])
    assert lookup(adapter, KEYS[:1], dtype=TorchDtype("float16")) == [False]
    assert lookup(adapter, KEYS[:1], shape=SHAPE[::-1]) == [False]
    assert lookup(server.adapter(model="other"), KEYS[:1]) == [False]


def test_a_cache_of_8_bits_must_be_named(server):
    unnamed, named = server.adapter(), server.adapter(model="fp8_e4m3")
    chunks = [chunk(0, dtype=UINT8)]
    assert store(unnamed, KEYS[:1], chunks) == (False, 0)
    assert lookup(unnamed, KEYS[:1], dtype=UINT8) == [False]
    assert store(named, KEYS[:1], chunks)[0]
    assert lookup(named, KEYS[:1], dtype=UINT8) == [True]


def test_a_failing_store_is_reported(server, monkeypatch):
    adapter = server.adapter()
    store(adapter, KEYS[:1], [chunk(0)])

    def broken(*arguments):
        raise RuntimeError("the store broke")

    with monkeypatch.context() as patch:
        for name in ("contains", "put", "get"):
            patch.setattr(adapter._store, name, broken)
        assert store(adapter, KEYS[:1], [chunk(0)]) == (False, 0)
        assert lookup(adapter, KEYS[:1]) == [False]
        assert load(adapter, KEYS[:1], [chunk()]) == [False]
    with monkeypatch.context() as patch:
        patch.setattr(adapter._store, "put", lambda keys, blocks: [False, False])
        assert store(adapter, KEYS[1:3], [chunk(1), chunk(2)]) == (False, 0)
    assert load(adapter, KEYS[:1], [chunk()]) == [True]


def test_event_descriptors_differ(server):
    adapters = [server.adapter(), server.adapter()]
    descriptors = {
        function()
        for each in adapters
        for function in (
            each.get_store_event_fd, each.get_lookup_and_lock_event_fd, each.get_load_event_fd,
        )
    }  # fmt: skip
    assert len(descriptors) == 6


def test_a_store_is_required(lmcache):
    with pytest.raises(TypeError, match="stores: expected a list of URLs"):
        lmcache.KvcupyL2Adapter({})
