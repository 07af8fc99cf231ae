"""NVTX ranges and metrics of a GPU: around what is put on its streams, outside of captures."""

from __future__ import annotations

import pytest

from kvcupy import config
from kvcupy.devices import cuda
from kvcupy.timelines import nvtx


class Bindings:
    """What CuPy's are, which also sees what has been put on the GPU by then."""

    def __init__(self):
        self.calls = []

    def RangePush(self, name):
        self.calls.append(name)

    def RangePop(self):
        self.calls.append("pop")


@pytest.fixture
def device(api):
    return cuda.CudaDevice(0, api)


@pytest.fixture
def bindings(monkeypatch):
    bindings = Bindings()
    monkeypatch.setattr(nvtx._ranges, "_nvtx", bindings)
    config.nvtx = True
    yield bindings
    config.nvtx = False


def copy(device, stream):
    device.copy(device.empty(8, "fp32"), device.empty(8, "fp32"), stream=stream)


def test_copies_functions_and_graphs_are_ranges(device, bindings):
    stream = device.stream()
    copy(device, stream)
    stream.call(lambda: bindings.calls.append("called"))
    stream.synchronize()
    assert [c for c in bindings.calls if c != "called"] == [
        "kvcupy.copy", "pop", "kvcupy.call", "pop",
    ]  # fmt: skip
    with stream.capture() as graph:
        copy(device, stream)
    del bindings.calls[:]
    graph.launch(stream)
    stream.synchronize()
    assert bindings.calls == ["kvcupy.graph", "pop"]


def test_a_copy_is_issued_within_its_range(api, device, bindings, monkeypatch):
    """From the first call of the driver to the last."""
    copied = api.runtime.memcpyAsync

    def copy_async(*arguments):
        bindings.calls.append("copied")
        return copied(*arguments)

    monkeypatch.setattr(api.runtime, "memcpyAsync", copy_async)
    copy(device, device.stream())
    assert bindings.calls == ["kvcupy.copy", "copied", "pop"]
