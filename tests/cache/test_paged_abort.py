"""Steps that are taken back, by `abort_forward` or by an exception in `forward`, at any point."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from groups_model import HEADS, Mixture, full, latent, recurrent, sliding
from paged_cases import Twin

import kvcupy as kv

# --- Nothing is left of a step ---


def test_no_step(device):
    """It may stand behind any exception, of `begin_forward` too."""
    cache = Twin(device).cache
    cache.abort_forward()
    cache.add_sequence("a")
    with pytest.raises(kv.CacheFull):
        cache.begin_forward(["a"], [1000])
    cache.abort_forward()
    cache.begin_forward(["a"], [5])
    with pytest.raises(kv.KvcupyError, match="end_forward or abort_forward"):
        cache.begin_forward(["a"], [5])
    cache.abort_forward()
    assert cache.sequence_length("a") == 0 and cache.num_available_pages == 40
    with pytest.raises(kv.KvcupyError, match="no step"):
        cache.end_forward()


# --- Strict mode: layers that were forgotten ---


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setattr(kv.config, "_strict", True)


def warnings(caplog):
    found = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    caplog.clear()
    return found


def attend(cache, count, layers):
    rows = [cache.device.zeros((count, heads, 8), "fp32") for heads in (4, 2, 2)]
    with cache.forward(["a"], [count]):
        for layer in layers:
            cache.attention(layer, *rows)


def test_layers_without_attention_are_named(device, strict, caplog):
    cache = Twin(device, num_layers=4).cache
    cache.add_sequence("a")
    attend(cache, 3, [np.int64(1), 0])
    (said,) = warnings(caplog)
    assert "layers 2, 3 " in said and "set_kv" in said
    attend(cache, 1, [0, 1])
    attend(cache, 1, range(4))
    assert not warnings(caplog), "once, and not if all have attended"
    attend(cache, 1, [3])
    assert "layers 0, 1, 2 " in warnings(caplog)[0]
    attend(cache, 1, range(1, 4))
    assert "layer 0 did not attend in a step in which others did: its keys" in warnings(caplog)[0]
    kv.config.strict = False
    attend(cache, 1, [2])
    assert not warnings(caplog)


def test_steps_for_tokens_from_elsewhere_are_silent(device, strict, caplog):
    """begin_forward, end_forward, set_kv; and a step that is taken back."""
    twin = Twin(device)
    twin.add("a")
    twin.step(["a"], [5], layers=[], contents=False)
    twin.set_kv("a", 0, 5)
    with pytest.raises(ZeroDivisionError), twin.cache.forward(["a"], [1]):
        rows = [device.zeros((1, heads, 8), "fp32") for heads in (4, 2, 2)]
        twin.cache.attention(0, *rows)
        raise ZeroDivisionError
    assert not warnings(caplog)


def test_layers_of_groups_have_their_numbers_of_the_model(device, strict, caplog):
    groups = [full(4, 7), latent(9), sliding(5, 2, window=9), recurrent(3)]
    cache = Mixture(groups, device).cache
    cache.add_sequence("a")
    rows = [device.zeros((2, heads, 8), "fp32") for heads in (HEADS, 2, 2)]
    with cache.forward(["a"], [2]):
        cache.attention(7, *rows)
    assert "layers 2, 4, 5, 9 " in warnings(caplog)[0]


def test_a_graph_may_attend_in_every_layer(device, strict, caplog):
    cache = Twin(device).cache
    cache.add_sequence("a")
    rows = [device.zeros((1, heads, 8), "fp32") for heads in (4, 2, 2)]
    out, stream = device.zeros((1, 4, 8), "fp32"), device.stream()
    with cache.forward(["a"], [1]), stream.capture() as graph:
        cache.attention(1, *rows, out=out, stream=stream)
    assert "layer 0 " in warnings(caplog)[0]
    with cache.forward(["a"], [1]):
        cache.attention(0, *rows, out=out, stream=stream)
        graph.launch(stream)
    stream.synchronize()
    assert not warnings(caplog)
