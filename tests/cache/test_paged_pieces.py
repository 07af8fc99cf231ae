"""The pieces of keys that attention takes are cut once a step, by the lengths that it has."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import kvcupy as kv
from kvcupy import devices
from kvcupy.devices.host import HostDevice
from kvcupy.ops import call

LAYERS, HEADS, WIDTH = 3, 4, 16
ROWS = (HEADS, 2, 2)  # of query, key and value


class Counted(HostDevice):
    """A host device that counts the launches of kernels, and refuses some."""

    def __init__(self):
        super().__init__()
        self.launched = Counter()
        self.refused = None

    def launch(self, function, *arguments, **options):
        name = function.specialisation.kernel.name
        if name == self.refused:
            raise kv.DeviceError(f"{name} is refused")
        self.launched[name] += 1
        super().launch(function, *arguments, **options)


@pytest.fixture
def host(monkeypatch):
    device = Counted()
    monkeypatch.setitem(devices._devices, "host", device)
    monkeypatch.setattr(call, "_plans", {})
    return device


class Model:
    """Random rows of K and V, and what attention over all of them gives."""

    def __init__(self, device, lens, dtype=np.float32):
        self.device, self.dtype = device, np.dtype(dtype)
        self.cache = kv.PagedKVCache(
            num_pages=200, page_size=16, num_layers=LAYERS, num_kv_heads=2, head_dim=WIDTH,
            num_q_heads=HEADS, dtype=self.dtype, device=device,
        )  # fmt: skip
        self.rng = np.random.default_rng(7)
        self.past = {name: [[] for _ in range(LAYERS)] for name in lens}
        for name in lens:
            self.cache.add_sequence(name)
        self.step(list(lens), list(lens.values()))

    def rows(self, count):
        shapes = [(LAYERS, count, heads, WIDTH) for heads in ROWS]
        return [self.rng.standard_normal(shape).astype(self.dtype) for shape in shapes]

    def expected(self, names, news, query, key, value):
        """Append rows, and return the output of each layer in float64."""
        outs, start = np.zeros(query.shape), 0
        for name, new in zip(names, news, strict=True):
            rows = slice(start, start + new)
            for layer in range(LAYERS):
                past = self.past[name][layer]
                past += zip(key[layer, rows], value[layer, rows], strict=True)
                k, v = (
                    np.repeat(np.array(x, np.float64), 2, axis=1) for x in zip(*past, strict=True)
                )
                for i, q in enumerate(query[layer, rows].astype(np.float64)):
                    seen = len(past) - new + i + 1
                    scores = np.einsum("hd,nhd->hn", q, k[:seen]) / WIDTH**0.5
                    weights = np.exp(scores - scores.max(1, keepdims=True))
                    weights /= weights.sum(1, keepdims=True)
                    outs[layer, start + i] = np.einsum("hn,nhd->hd", weights, v[:seen])
            start += new
        return outs

    def step(self, names, news, **options):
        query, key, value = self.rows(sum(news))
        with self.cache.forward(list(names), news):
            got = [
                self.cache.attention(n, query[n], key[n], value[n], **options)
                for n in range(LAYERS)
            ]
        self.device.synchronize()
        wanted = self.expected(names, news, query, key, value)
        near = 2.0**-10 if self.dtype == np.float16 else 1e-5  # a rounding of the output
        np.testing.assert_allclose(np.stack(got), wanted, rtol=10 * near, atol=near)


def test_once_for_all_layers_of_a_step(host):
    launched = host.launched
    model = Model(host, {"long": 900, "short": 5})
    for names, news in ((["long", "short"], [1, 1]), (["short", "long"], [3, 2]), (["long"], [1])):
        launched.clear()
        model.step(names, news)
        assert launched["attention_schedule"] == 1
        assert launched["attention_decode"] == launched["merge_many"] == LAYERS


def test_once_for_each_kind_of_call(host):
    """A window changes what is visible, and so the pieces."""
    launched = host.launched
    model = Model(host, {"long": 900})
    query, key, value = model.rows(1)
    launched.clear()
    with model.cache.forward(["long"], [1]):
        for layer in range(LAYERS):
            options = {"window": 600} if layer == 1 else {}
            model.cache.attention(layer, query[layer], key[layer], value[layer], **options)
    assert launched["attention_schedule"] == 2


@pytest.mark.parametrize("graphs", [1, LAYERS])
def test_in_each_replay_of_a_graph(host, graphs):
    """A captured step cuts keys by the lengths of each replay, not of the capture."""
    launched = host.launched
    model = Model(host, {"a": 900, "b": 5})
    stream = host.stream()
    query, key, value = (host.asarray(rows) for rows in model.rows(2))
    out = host.zeros((LAYERS, 2, HEADS, WIDTH), "fp32")

    def attend(layers):
        for n in layers:
            model.cache.attention(n, query[n], key[n], value[n], out=out[n], stream=stream)

    captured = []
    model.cache.add_sequence("c")
    model.cache.add_sequence("d")
    with model.cache.forward(["c", "d"], [1, 1]):
        attend(range(LAYERS))  # plain calls before leave nothing to the graph
        launched.clear()
        for layers in [range(LAYERS)] if graphs == 1 else [[n] for n in range(LAYERS)]:
            with stream.capture() as graph:
                attend(layers)
            captured.append(graph)
        assert launched["attention_schedule"] == LAYERS, "streams of a host have no capture_id"
    model.cache.remove_sequence("c")
    model.cache.remove_sequence("d")
    for names in (["a", "b"], ["b", "a"]):
        rows = model.rows(2)
        for array, new in zip((query, key, value), rows, strict=True):
            array[...] = new
        with model.cache.forward(list(names), [1, 1]):
            for graph in captured:
                graph.launch(stream)
        stream.synchronize()
        wanted = model.expected(names, [1, 1], *rows)
        np.testing.assert_allclose(host.to_numpy(out), wanted, rtol=1e-4, atol=1e-5)
