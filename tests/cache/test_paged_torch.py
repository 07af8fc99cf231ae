"""Tensors of torch into a paged cache and out of it: the bits of NumPy arrays, and no copies."""

from __future__ import annotations

import numpy as np
import pytest
from paged_cases import SMALL, rope_of
from stream_cases import Gate, Log

import kvcupy as kv
from kvcupy import observe

torch = pytest.importorskip("torch")

MODES = ["none", "normal", "inline"]


@pytest.fixture(autouse=True)
def on_the_host(device):
    if device.kind != "host":
        pytest.skip("CPU tensors are the host device's")


def cache_of(device, mode="none", **options):
    rope = {} if mode == "none" else {"rope": device.asarray(rope_of(8)), "rope_mode": mode}
    cache = kv.PagedKVCache(**{**SMALL, **options}, **rope, device=device)
    cache.add_sequence("a")
    return cache


def rows_of(seed, count):
    """Query, key and value of all layers, float32 (L, count, heads, D)."""
    rng = np.random.default_rng(seed)
    return [np.float32(rng.standard_normal((2, count, heads, 8))) for heads in (4, 2, 2)]


def decode(cache, make, stream=None, steps=6):
    """A prefill and steps of one token, by rows that `make` makes; return what comes out."""
    outs = []
    for number in range(steps):
        rows = [make(a) for a in rows_of(number, 1 if number else 7)]
        with cache.forward(["a"], [rows[0].shape[1]]):
            for layer in range(2):
                outs.append(cache.attention(layer, *(a[layer] for a in rows), stream=stream))
        del rows
    return outs


def contents(cache, stop):
    return [np.array(a) for a in cache.get_kv("a", 0, stop)]


def same(device, mode, outs, cache):
    """Compare with the same steps on arrays of NumPy."""
    other = cache_of(device, mode)
    for got, want in zip(outs, decode(other, np.copy), strict=True):
        assert isinstance(got, torch.Tensor) and got.dtype == torch.float32
        assert isinstance(want, np.ndarray)
        np.testing.assert_array_equal(got.numpy(), want)
    for got, want in zip(contents(cache, 12), contents(other, 12), strict=True):
        np.testing.assert_array_equal(got, want)


def tensor(array):
    return torch.from_numpy(array.copy())


@pytest.mark.parametrize("mode", MODES)
def test_on_a_stream(device, mode):
    """It keeps the tensors that it is still to read alive, even if no one else does."""
    cache, stream = cache_of(device, mode, slots_in_flight=4), device.stream()
    gate = Gate(stream)
    outs = decode(cache, tensor, stream)
    litter = [torch.full((2, count, 4, 8), 9.0) for count in (7, 1, 1, 1, 1, 1)]
    assert not stream.done() and not any(out.any() for out in outs)
    gate.open()
    stream.synchronize()
    same(device, mode, outs, cache)
    del litter


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_copied_or_changed(device, mode):
    """Kernels read the tensors and write the output where they are."""
    cache = cache_of(device, mode)
    rows = [tensor(a[0]) for a in rows_of(0, 5)]
    before = [a.clone() for a in rows]
    out = torch.full((5, 4, 8), 7.0)
    with cache.forward(["a"], [5]), observe.attached(Log()) as log:
        assert cache.attention(0, *rows, out=out) is out
    names = [operation.name for operation in log.operations]
    assert names.count("copy") == 1, "that of the tables"
    reads = {access.view.pointer for one in log.operations for access in one.reads}
    writes = {access.view.pointer for one in log.operations for access in one.writes}
    assert {a.data_ptr() for a in rows} <= reads
    assert out.data_ptr() in writes and not {a.data_ptr() for a in rows} & writes
    assert all(map(torch.equal, rows, before))


def test_a_graph_of_tensors(device):
    """Captured with tensors that stay, which are refilled before each launch."""
    cache, stream = cache_of(device), device.stream()
    shapes = [(2, 1, heads, 8) for heads in (4, 2, 2, 4)]
    query, key, value, out = (torch.zeros(shape) for shape in shapes)
    with cache.forward(["a"], [1]), stream.capture() as graph:
        for layer in range(2):
            cache.attention(
                layer, query[layer], key[layer], value[layer], out=out[layer], stream=stream
            )
    cache.pop_tokens("a", 1)
    outs = decode(cache, tensor, steps=1)
    for number in range(1, 6):
        for into, rows in zip((query, key, value), rows_of(number, 1), strict=True):
            into.copy_(torch.from_numpy(rows))
        with cache.forward(["a"], [1]):
            graph.launch(stream)
        stream.synchronize()
        outs += [a.clone() for a in out]
    same(device, "none", outs, cache)
