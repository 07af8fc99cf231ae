"""NVTX ranges: around each operation while `config.nvtx` is set, balanced whatever raises."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import kvcupy as kv
from kvcupy import observe
from kvcupy.timelines import nvtx

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def ranges(monkeypatch):
    """What is pushed and popped, by stand-ins for CuPy's bindings."""
    calls = []
    bindings = ModuleType("cupy.cuda.nvtx")
    bindings.RangePush = lambda name: calls.append(name)
    bindings.RangePop = lambda: calls.append("pop")
    cuda, cupy = ModuleType("cupy.cuda"), ModuleType("cupy")
    cupy.cuda, cuda.nvtx = cuda, bindings
    for module in (cupy, cuda, bindings):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(nvtx._ranges, "_nvtx", None)
    yield calls
    kv.config.nvtx = False
    nvtx._ranges._nvtx = None


def store(stream=None):
    rows, cache = np.ones((1, 1, 4), np.float16), np.zeros((4, 1, 4), np.float16)
    kv.store_kv(rows, rows, cache, cache.copy(), np.array([0]), stream=stream)


@pytest.mark.usefixtures("lenient_host")
def test_operations_are_ranges_while_it_is_set(ranges):
    store()
    kv.config.nvtx = True
    kv.config.nvtx = True
    assert kv.config.nvtx
    store()
    device = kv.device("host")
    stream, arrays = device.stream(), (np.zeros(4, np.float32), np.ones(4, np.float32))
    device.copy(*arrays)
    stream.call(lambda: None)
    stream.synchronize()
    with stream.capture() as graph:
        device.copy(*arrays, stream=stream)
    captured = len(ranges)
    graph.launch(stream)
    stream.synchronize()
    kv.config.nvtx = False
    store()
    names = ["store_kv", "copy", "call"]
    assert ranges[:6] == [x for name in names for x in (f"kvcupy.{name}", "pop")]
    assert ranges[captured:] == ["kvcupy.graph", "pop"]


def test_a_range_ends_when_the_operation_raises(ranges):
    kv.config.nvtx = True
    operation = observe.Operation("store_kv", None)
    with pytest.raises(ZeroDivisionError):
        observe.issue(lambda: operation, lambda: 1 / 0)
    assert ranges == ["kvcupy.store_kv", "pop"]


def test_without_cupy_it_is_logged_once(ranges, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    kv.config.nvtx = True
    store()
    store()
    assert [r.getMessage().split(",")[0] for r in caplog.records if "nvtx" in r.getMessage()] == [
        "config.nvtx has no effect"
    ]
