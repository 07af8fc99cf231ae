"""A forked child of a process with a GPU, with the stand-in for CUDA."""

from __future__ import annotations

import gc
import os
import sys
from types import SimpleNamespace

import pytest
from fake_cuda.kernels import open_device
from forks import in_child, refused

import kvcupy as kv
from kvcupy.devices import host_memory

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def test_a_gpu_of_the_parent(monkeypatch, tmp_path):
    """CUDA works in no child: the error says so, and the driver is not called."""
    device = open_device(monkeypatch)
    runtime, own = device.context.api.runtime, SimpleNamespace()
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("0\n")
    device.context.api.pci_devices = tmp_path
    own.stream, own.event = device.stream(), device.event(timing=True)
    own.stream.record(own.event)
    with own.stream.capture() as own.graph:
        pass
    own.pinned = [device.empty_pinned(1 << size, "int8") for size in (4, 16)]
    own.pool = kv.KVPool(4, 2, 1, 1, 8, dtype="fp16", device=device)
    own.stream.call(lambda: None)
    own.stream.synchronize()

    def use():
        stream, event = own.stream, own.event
        for call in (
            stream.synchronize, stream.done, stream.record, event.synchronize, event.done,
            lambda: stream.wait(event), lambda: stream.call(lambda: None), device.synchronize,
            lambda: stream.capture().__enter__(), lambda: device.empty((2,), "fp16"),
            lambda: device.empty_pinned((2,), "fp16"), device.stream,
            lambda: device.zeros(2, "fp16"), lambda: kv.KVPool(4, 2, 1, 1, 8, device=device),
            lambda: stream.capturing,
        ):  # fmt: skip
            with pytest.raises(kv.KvcupyError, match=r"^CudaContext: .*; CUDA works in no forked"):
                call()
        refused(lambda: own.graph.launch(stream), "Graph")
        refused(lambda: own.pool.k(0), "KVPool")
        assert repr(stream) and repr(device) == "<kvcupy device cuda:0>" and stream == own.stream

    def work():
        def called(*arguments):
            print("the child has called", arguments, file=sys.stderr)

        for name in dir(runtime):
            if not name.startswith("_") and callable(getattr(runtime, name)):
                setattr(runtime, name, called)
        host_memory.unmap = called
        use()
        vars(own).clear()
        gc.collect()
        host = kv.device("host")
        stream = host.stream()
        host.copy(copy := host.zeros(2, "fp16"), host.zeros(2, "fp16") + 1, stream=stream)
        stream.synchronize()
        assert (copy == 1).all() and kv.metrics.collect() is not None

    in_child(work)
    own.stream.synchronize()
    assert own.event.done()
