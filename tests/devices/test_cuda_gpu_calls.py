"""Host functions, pinned memory, batches and current streams on a GPU: what a stand-in takes for
granted. A program that could hang runs in a separate process, which says where it hangs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from test_cuda_gpu import owner_of

import kvcupy as kv
from kvcupy.devices import host_memory

pytestmark = pytest.mark.gpu

PATIENCE_S = 60
POOL = {"page_size": 4, "num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": "fp16"}


@pytest.fixture(scope="module")
def device():
    return kv.device("cuda:0")


def run_apart(program):
    """Run a program on the GPU in a separate process; fail with its threads if it hangs."""
    head = (
        "import faulthandler, os, sys, threading, time\n"
        f"faulthandler.dump_traceback_later({PATIENCE_S}, exit=True)\n"
        "import numpy as np\n"
        "import kvcupy as kv\n"
        "device = kv.device('cuda:0')\n"
        "stream = device.stream()\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", head + program],
        capture_output=True, text=True, timeout=2 * PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# --- Host functions ---

POLLING = {
    "the event": "event.done()",
    "the stream": "stream.done()",
    "an address": "device.address(pageable)",
    "with CuPy's own query": "cupy.cuda.runtime.eventQuery(event.pointer)",
    "free memory": "cupy.cuda.runtime.memGetInfo()",
}


@pytest.mark.parametrize("ask", POLLING)
def test_functions_are_called_while_cuda_is_queried(ask):
    program = f"""
import cupy
pageable, seen = kv.arrays.view(np.zeros(8)), []
for i in range(300):
    stream.call(lambda i=i: seen.append(i))
    event = stream.record()
    while len(seen) <= i:
        {POLLING[ask]}
stream.synchronize()
assert seen == list(range(300)), len(seen)
print("done")
"""
    assert run_apart(program) == ["done"]


def test_more_may_be_put_on_a_stream_than_it_takes_while_a_function_runs():
    """A thread that waits for room in the queue must not hold the GIL."""
    program = """
source, target = device.empty_pinned(64, "int8"), device.zeros(64, "int8")
for _ in range(3):
    stream.call(lambda: time.sleep(0.2))
    for i in range(6000):
        device.copy(target, source, stream=stream)
    stream.synchronize()
print("done")
"""
    assert run_apart(program) == ["done"]


def test_a_function_may_wait_for_another_thread_that_uses_the_gpu():
    program = """
gate, seen = threading.Event(), []
other, x = device.stream(), device.asarray(np.arange(1000, dtype=np.float32))
stream.call(lambda: seen.append(gate.wait(30)))
behind = stream.record()
for _ in range(100):
    x = device.asarray(np.arange(1000, dtype=np.float32))
    assert not behind.done()
    other.record().synchronize()
gate.set()
behind.synchronize()
assert seen == [True]
print("done")
"""
    assert run_apart(program) == ["done"]


def test_a_function_sees_what_was_before_and_is_seen_by_what_is_behind(device):
    source, middle, target = (device.empty_pinned(1 << 20, "int32") for _ in range(3))
    there, stream, wrong = device.zeros(1 << 20, "int32"), device.stream(), []
    for repeat in range(20):
        source[:], middle[:], target[:] = repeat, -1, -1
        device.copy(there, source, stream=stream)
        device.copy(middle, there, stream=stream)

        def double(repeat=repeat):
            wrong.extend(np.flatnonzero(middle != repeat)[:1])
            np.multiply(middle, 2, out=middle)

        stream.call(double)
        device.copy(there, middle, stream=stream)
        device.copy(target, there, stream=stream)
        stream.synchronize()
        assert not wrong
        assert (target == 2 * repeat).all()


def test_functions_on_the_default_streams_and_those_of_others(device, cupy):
    seen = []
    for stream in (
        device.as_stream(cupy.cuda.Stream.null), device.as_stream(cupy.cuda.Stream.ptds),
        device.as_stream(cupy.cuda.Stream(non_blocking=True)),
    ):  # fmt: skip
        stream.call(lambda stream=stream: seen.append(stream.pointer))
        stream.synchronize()
        assert seen.pop() == stream.pointer


@pytest.mark.parametrize("num_bytes", [100, 1 << 20])
def test_the_last_pinned_array_may_be_a_functions(device, cupy, num_bytes):
    """It is released, and the stream continues."""
    stream, array = device.stream(), device.empty_pinned(num_bytes, "int8")
    pointer, gone = array.ctypes.data, weakref.ref(owner_of(array))
    stream.call(lambda a=array: (time.sleep(0.05), a.fill(3)))
    del array
    gc.collect()
    assert gone() is not None
    stream.synchronize()
    gc.collect()
    assert gone() is None
    if num_bytes >= host_memory.PAGE_BYTES:
        until = time.monotonic() + PATIENCE_S
        while cupy.cuda.runtime.pointerGetAttributes(pointer).type != 0:
            assert time.monotonic() < until, "the pages are still locked"
    stream.call(lambda: None)
    stream.synchronize()


def test_functions_are_called_before_the_process_ends():
    assert run_apart("stream.call(lambda: (time.sleep(0.2), print('called', flush=True)))\n") == [
        "called"
    ]


# --- Pinned memory and forks ---


def test_pinned_memory_is_one_for_processor_and_gpu_after_a_fork():
    """The child lives on while the parent writes the pages again."""
    program = """
for num_bytes in (100, 1 << 20):
    array, there = device.empty_pinned(num_bytes, "int8"), device.zeros(num_bytes, "int8")
    array[:] = 1
    device.copy(there, array, stream=stream)
    stream.synchronize()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)  # until the parent is done
        os._exit(0)
    for value in (2, 3):
        array[:] = value
        device.copy(there, array, stream=stream)
        stream.synchronize()
        assert (device.to_numpy(there) == value).all(), (num_bytes, value)
        with stream.cupy:
            there += 10
        device.copy(array, there, stream=stream)
        stream.synchronize()
        assert (array == value + 10).all(), (num_bytes, value)
    os.close(write)
    os.waitpid(child, 0)
print("done")
"""
    assert run_apart(program) == ["done"]


# --- Faults that the host knows of ---


@pytest.mark.parametrize("method", ["copy", "staged"])
def test_pages_past_the_end_are_noted_without_waiting_and_at_each_replay(device, method):
    src = kv.KVPool(8, **POOL, device=device)
    dst = kv.KVPool(12, **POOL, layout="page_first", placement="pinned", device=device)
    stream, gate = device.stream(), threading.Event()
    lists = [1, 8, -1, 2], [2, 1, 50, 3]
    kv.check_faults(device)
    for is_open in (True, False):  # first loads wait for the device, which waits for the gate
        if not is_open:
            stream.call(lambda: gate.wait(PATIENCE_S))
        kv.transfer_pages(src, dst, *lists, method=method, stream=stream)
        if is_open:
            stream.synchronize()
            with pytest.raises(kv.IndexFault):
                kv.check_faults(device)
    assert not stream.done()
    gate.set()
    stream.synchronize()
    with pytest.raises(kv.IndexFault, match=r"src_pages\[1\]: expected 0 to 7, got 8"):
        kv.check_faults(device)
    with stream.capture() as graph:
        kv.transfer_pages(src, dst, *lists, method=method, stream=stream)
    kv.check_faults(device)
    for _ in range(2):
        graph.launch(stream)
        stream.synchronize()
        with pytest.raises(kv.IndexFault, match=r"src_pages\[1\]: expected 0 to 7, got 8"):
            kv.check_faults(device)


# --- Current streams ---


def test_transfers_follow_torchs_current_stream(device, torch):
    src = kv.KVPool(8, **POOL, device=device)
    dst = kv.KVPool(8, **POOL, layout="page_first", placement="pinned", device=device)
    engine, foreign = kv.TransferEngine(src, dst), torch.cuda.Stream()
    device.copy(src.k(0)[3], device.asarray(np.full(src.k(0).shape[1:], 2, np.float16)))
    kv.transfer_pages(src, dst, [0], [0], method="copy")  # loads what waits for the device
    engine.save([0], [0]).synchronize()
    device.synchronize()
    with torch.cuda.stream(foreign):
        assert device.as_stream(None).pointer == foreign.cuda_stream
        gate = threading.Event()
        device.as_stream(foreign).call(lambda: gate.wait(PATIENCE_S))
        kv.transfer_pages(src, dst, [3], [5], method="copy")
        save = engine.save([3], [6])
        assert not save.done()
        gate.set()
        foreign.synchronize()
        assert (dst.k(0)[5] == 2).all()
        save.synchronize()
        assert (dst.k(0)[6] == 2).all()


def test_transfers_are_captured_by_torch(device, torch):
    src = kv.KVPool(8, **POOL, device=device)
    dst = kv.KVPool(8, **POOL, layout="page_first", placement="pinned", device=device)
    value = device.asarray(np.full(src.k(0).shape[1:], 3, np.float16))
    kv.transfer_pages(src, dst, [3], [5], method="copy")
    device.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv.transfer_pages(src, dst, [3], [5], method="copy")
    device.copy(src.k(0)[3], value)
    device.synchronize()
    assert not (dst.k(0)[5] == 3).all()
    graph.replay()
    torch.cuda.synchronize()
    assert (dst.k(0)[5] == 3).all()
