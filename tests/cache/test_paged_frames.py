"""`PagedKVCache.attention`: how many Python frames a call costs, once its signature is known."""

from __future__ import annotations

import numpy as np
import pytest
from paged_cases import rope_of

import kvcupy as kv
from kvcupy.cache.paged import layers

NUM_LAYERS = 3


@pytest.mark.usefixtures("scripts_on_path", "lenient_host", "only_numpy")
@pytest.mark.parametrize(
    ("rope", "first", "later"), [(None, 102, 23), (rope_of(64), 120, 24)], ids=["plain", "rotated"]
)
def test_a_warm_layer_takes_few_python_frames(device, rope, first, later):
    """The first layer of a step uploads the tables; the others find them."""
    if device.kind != "host":
        pytest.skip("frames are counted on the host device")
    from benchmarks.frames import frames_of, own

    cache = kv.PagedKVCache(
        num_layers=NUM_LAYERS, num_q_heads=4, num_kv_heads=2, head_dim=64, num_pages=16,
        dtype="fp16", rope=rope, device=device,
    )  # fmt: skip
    rows = [np.zeros((2, heads, 64), np.float16) for heads in (4, 2, 2, 4)]
    for name in "ab":
        cache.add_sequence(name)
    for _ in range(3):
        with cache.forward(["a", "b"], [1, 1]):
            called = [
                own(frames_of(lambda layer=layer: cache.attention(layer, *rows[:3], out=rows[3])))
                for layer in range(NUM_LAYERS)
            ]
    assert 0 < len(called[0]) <= first, "\n".join(called[0])
    for names in called[1:]:
        assert 0 < len(names) <= later, "\n".join(names)


def test_layers_share_scratch_memory_but_for_those_of_a_graph(device, lenient_host, monkeypatch):
    """A graph outlives the step whose other layers would use its memory."""
    cache = kv.PagedKVCache(
        num_layers=NUM_LAYERS, num_q_heads=4, num_kv_heads=2, head_dim=64, num_pages=16,
        dtype="fp16", rope=device.asarray(np.asarray(rope_of(64))), device=device,
    )  # fmt: skip
    borrowed = []
    borrow = layers.borrow
    monkeypatch.setattr(layers, "borrow", lambda *a: borrowed.append(a) or borrow(*a))
    rows = [device.zeros((1, heads, 64), "fp16") for heads in (4, 2, 2, 4)]
    first, second = device.stream(), device.stream()
    cache.add_sequence("a")

    def attend(stream):
        for layer in range(NUM_LAYERS):
            cache.attention(layer, *rows[:3], out=rows[3], stream=stream)
        return len(borrowed)

    with cache.forward(["a"], [1]):
        assert (attend(first), attend(first), attend(second)) == (1, 1, 2)
        with first.capture():
            assert attend(first) == 2 + NUM_LAYERS
        assert attend(second) == 3 + NUM_LAYERS
    device.synchronize()
