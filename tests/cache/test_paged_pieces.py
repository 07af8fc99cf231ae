"""The pieces of keys that attention takes are cut once a step, by the lengths that it has."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import kvcupy as kv
from kvcupy import devices
from kvcupy.devices.host import HostDevice
from kvcupy.ops import call

LAYERS = 3


class Counted(HostDevice):
    """A host device that counts the launches of kernels."""

    def __init__(self):
        super().__init__()
        self.launched = Counter()

    def launch(self, function, *arguments, **options):
        self.launched[function.specialisation.kernel.name] += 1
        super().launch(function, *arguments, **options)


@pytest.fixture
def cache(monkeypatch):
    """A long sequence and a short one."""
    device = Counted()
    monkeypatch.setitem(devices._devices, "host", device)
    monkeypatch.setattr(call, "_plans", {})
    cache = kv.PagedKVCache(
        num_pages=200, num_layers=LAYERS, num_q_heads=4, num_kv_heads=2, head_dim=16,
        dtype="fp32", device=device,
    )  # fmt: skip
    for name, length in (("long", 900), ("short", 5)):
        cache.add_sequence(name)
        cache.begin_forward([name], [length])
        cache.end_forward()
    return cache


def launched_by(cache, names, lens, **windows):
    """The launches of a step; a layer may have a window."""
    cache.device.launched.clear()
    rows = [np.zeros((sum(lens), heads, 16), np.float32) for heads in (4, 2, 2)]
    with cache.forward(names, lens):
        for layer in range(LAYERS):
            cache.attention(layer, *rows, window=windows.get(f"layer_{layer}"))
    return cache.device.launched


def test_once_for_all_layers_of_a_step(cache):
    for names, lens in ((["long", "short"], [1, 1]), (["short", "long"], [3, 2]), (["long"], [1])):
        launched = launched_by(cache, names, lens)
        assert launched["attention_schedule"] == 1
        assert launched["attention_decode"] == launched["merge_many"] == LAYERS


def test_once_for_each_kind_of_call(cache):
    """A window changes what is visible, and so the pieces."""
    assert launched_by(cache, ["long"], [1], layer_1=600)["attention_schedule"] == 2
