"""Nothing that is an address, a thread or a lock is pickled or copied; an error says what to do."""

from __future__ import annotations

import copy
import pickle
from contextlib import suppress
from unittest import mock

import numpy as np
import pytest
from agents import Network

import kvcupy as kv
from kvcupy.arrays import array_at, view
from kvcupy.interop.byte_store import ByteStore
from kvcupy.remote.migration import agent

WAYS = {
    "pickle": pickle.dumps,
    "pickle, the oldest": lambda x: pickle.dumps(x, 0),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def objects():
    device = kv.device("host")
    pools = [kv.KVPool(2, 2, 1, 1, 8, device=device) for _ in range(2)]
    engine = kv.TransferEngine(*pools)
    tiers = kv.TieredCache(*[kv.KVPool(2, 2, 1, 1, 8, device=device) for _ in range(2)])
    stream = device.stream()
    with stream.capture() as graph:
        pass
    yield kv.view_as(np.zeros((2, 2), np.uint16), "bf16")
    yield pools[0]
    yield kv.MLAPool(2, 2, 1, 8, device=device)
    yield pools[0].allocator
    yield engine
    yield engine.save([0], [1])
    yield tiers
    yield tiers.acquire([])
    with mock.patch.object(agent, "NixlAgent", Network(immediate=True).open_agent):
        ends = kv.PageSender(pools[0]), kv.PageReceiver(pools[1])
    with ends[0] as sender, ends[1] as receiver:
        yield sender
        yield receiver
        yield receiver.pull(sender.offer(pools[0].allocator.alloc(1)), [0])
    yield from (device, kv.config, tiers.acquire([]).completion)
    with suppress(ImportError), kv.events.Publisher("inproc://pickled") as publisher:
        yield publisher
    yield ByteStore(["file:pickled"], model="m")
    yield stream
    yield device.as_stream(None)
    yield device.event()
    yield graph
    yield kv.PagedKVCache(
        num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=8, num_pages=2, device=device
    )


@pytest.mark.parametrize("way", WAYS)
def test_refused_by_name(way):
    for one in objects():
        kind = type(one).__name__
        with pytest.raises(TypeError, match=rf"^{kind}: it cannot be pickled or copied; \w+"):
            WAYS[way](one)
        with pytest.raises(TypeError, match=rf"^{kind}: "):
            WAYS[way]({"within": [one]}) if way != "copy" else WAYS[way](one)


def test_arrays_over_memory_carry_their_bytes():
    """A pickled array has a copy of what it showed, and no address."""
    source = np.arange(8, dtype=np.uint8)
    array = array_at(source, source.ctypes.data, (8,), source.dtype)
    again = pickle.loads(pickle.dumps(array))
    source[:] = 0
    assert again.tolist() == list(range(8))
    pinned = kv.device("host").empty_pinned((4,), "fp32")
    pinned[:] = 3
    again = pickle.loads(pickle.dumps(pinned))
    assert again.tolist() == [3] * 4 and not view(again).pinned
    pool = kv.KVPool(2, 2, 1, 1, 8, device="host")
    pool.k(0)[1] = 5
    again = pickle.loads(pickle.dumps(pool.k(0)))
    assert again.dtype == pool.k(0).dtype and float(again[1].max()) == 5
    again[...] = 0
    assert float(pool.k(0)[1].max()) == 5
