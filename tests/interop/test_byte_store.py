"""Blocks of bytes of several lengths in block stores, and what becomes of failures."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from engine_interfaces import store_url

from kvcupy.interop import byte_store
from kvcupy.interop.byte_store import ByteStore
from kvcupy.remote.stores.store import BlockStore


def opened(*urls, **options):
    return ByteStore(urls or [store_url()], **{"model": "m", **options})


def block(seed, num_bytes=1000):
    return np.random.default_rng(seed).integers(0, 256, num_bytes).astype(np.uint8)


def test_blocks_of_all_lengths_in_any_parts():
    store = opened()
    blocks = {n: block(n, n) for n in (1, 100, 4096, 65537)}
    for n, data in blocks.items():
        assert store.put(["a"], [np.array_split(data, 3)]) == [True]
        assert store.put(["a"], [[data]]) == [True]
        assert store.contains(["b", "a", "c"], n) == [False, True, False]
        copies = np.zeros((2, n + 1), np.uint8)
        assert store.get(["a", "b"], [[copies[0, 1:]], [copies[1, 1:]]]) == [True, False]
        assert (copies[0, 1:] == data).all() and not copies[1].any()
    assert sorted(store.stats()) == sorted(blocks)
    store.close()


def test_more_blocks_than_are_staged_at_once(monkeypatch):
    monkeypatch.setattr(byte_store, "_STAGING_BYTES", 2500)
    store = opened()
    blocks = [[block(i)] for i in range(7)]
    keys = [str(i) for i in range(7)]
    assert store.put(keys[3:5], blocks[3:5]) == [True] * 2
    assert store.put(keys, blocks) == [True] * 7
    copies = [[np.zeros(1000, np.uint8)] for _ in keys]
    assert store.get(keys, copies) == [True] * 7
    assert all((a == b).all() for [a], [b] in zip(blocks, copies, strict=True))
    store.close()


def test_threads_share_the_staging_buffer(monkeypatch):
    monkeypatch.setattr(byte_store, "_MAX_STAGED_BLOCKS", 1)
    store = opened(num_calls=2)
    wrong = []

    def work(number):
        for i in range(20):
            data, copy = block(100 * number + i), np.zeros(1000, np.uint8)
            key = f"{number} {i}"
            store.put([key], [[data]])
            if store.get([key], [[copy]]) != [True] or (copy != data).any():
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    store.close()


def test_a_damaged_block_does_not_reach_the_engine(tmp_path):
    store, data, copy = opened(f"file:{tmp_path}/s"), block(1), np.zeros(1000, np.uint8)
    store.put(["a"], [[data]])
    [path] = (each for each in tmp_path.rglob("*-*") if each.is_file())
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(data.tobytes()) + 7)
        file.write(bytes([data[7] ^ 1]))
    assert store.get(["a"], [[copy]]) == [False]
    assert not copy.any()
    store.close()


def test_an_unreachable_server_is_tried_again(monkeypatch):
    real, tried, now = BlockStore.open, [], [1000.0]

    def unreachable(*arguments, **options):
        tried.append(now[0])
        raise ConnectionError("no server")

    monkeypatch.setattr(byte_store.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(BlockStore, "open", unreachable)
    store, copy = opened(), np.zeros(1000, np.uint8)
    store.open(1000)
    assert store.put(["a"], [[block(1)]]) == [False]
    assert store.get(["a"], [[copy]]) == [False]
    assert store.contains(["a"], 1000) == [False]
    assert tried == [1000.0]
    now[0] += 31
    assert store.put(["a"], [[block(1)]]) == [False]
    assert tried == [1000.0, 1031.0]
    monkeypatch.setattr(BlockStore, "open", real)
    now[0] += 31
    assert store.put(["a"], [[block(1)]]) == [True]
    store.close()


def test_a_store_is_opened_once(monkeypatch):
    real, opens = BlockStore.open, []

    def counted(*arguments, **options):
        opens.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(BlockStore, "open", counted)
    store = opened()
    store.open(1000)
    store.open(1000)
    store.put(["a"], [[block(1)]])
    assert len(opens) == 1
    store.close()


def test_a_call_without_blocks():
    store = opened()
    assert store.put([], []) == [] == store.get([], [])
    assert store.stats() == {}
    store.close()


def test_other_identities_do_not_find_blocks():
    url = store_url()
    store, stranger = opened(url), opened(url, model="n")
    store.put(["a"], [[block(1)]])
    assert stranger.contains(["a"], 1000) == [False]
    stranger.close()
    store.close()


def test_several_stores_are_filled_and_asked_in_order(tmp_path):
    near, far = f"file:{tmp_path}/near", f"file:{tmp_path}/far"
    store, data, copy = opened(near, far), block(1), np.zeros(1000, np.uint8)
    assert store.put(["a"], [[data]]) == [True]
    for url in (near, far):
        only = opened(url)
        assert only.get(["a"], [[copy]]) == [True] and (copy == data).all()
        only.close()
    for path in (tmp_path / "near").rglob("*-*"):
        path.unlink()
    copy[:] = 0
    assert store.contains(["a", "b"], 1000) == [True, False]
    assert store.get(["a"], [[copy]]) == [True] and (copy == data).all()
    store.close()


def test_wrong_options_are_raised_when_the_store_is_opened():
    with pytest.raises(ValueError, match="url"):
        opened("ftp:x").open(100)
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        opened(encryption_key="xyz")
    with pytest.raises(ValueError, match="32 bytes"):
        opened(encryption_key="11").open(100)
