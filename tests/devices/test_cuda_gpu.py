"""The GPU device on a GPU: that CUDA behaves as `test_cuda.py` takes it to.

`test_device_streams.py` and `test_device_memory.py` run here too, with --device cuda.
"""

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
from test_device_memory import PLACES, Pieces

import kvcupy as kv
from kvcupy import scratch
from kvcupy.devices import host_memory, nvrtc
from kvcupy.devices.cuda_memory import RegisteredPages
from kvcupy.kernels import Kernel
from kvcupy.ops import call as op_call

pytestmark = pytest.mark.gpu

PARAMS = np.dtype(
    [("in", np.uint64), ("out", np.uint64), ("count", np.int32), ("factor", np.float32)], align=True
)
KERNELS = Path(__file__).parent.parent / "kernels"
DELAY_KILOTICKS = 200_000  # about 0.1 s


@pytest.fixture(scope="module")
def device():
    return kv.device("cuda:0")


@pytest.fixture
def load(device, monkeypatch):
    """Load a kernel of `tests/kernels`."""
    compile_program = nvrtc.compile_program
    monkeypatch.setattr(
        nvrtc, "compile_cubin", lambda s, arch: compile_program([s], arch, kernels_dir=KERNELS)[0]
    )

    def load(name):
        return device.load(Kernel("scale.cu", name, PARAMS, "ScaleParams").specialise(128))

    return load


def params(out, count, factor=1.0, source=0):
    return np.array([(source, out, count, factor)], PARAMS).tobytes()


@pytest.fixture
def delay(device, load):
    """Keep a stream busy for a while."""
    function, scratch = load("delay"), device.zeros(1, "fp32")

    def delay(stream):
        packed = params(kv.arrays.view(scratch).pointer, DELAY_KILOTICKS)
        device.launch(function, (1, 1, 1), (32, 1, 1), 0, packed, stream, (scratch,))

    return delay


def scale(device, function, out, source, factor, stream):
    to, of = kv.arrays.view(out), kv.arrays.view(source)
    grid = (-(-of.size // 128), 1, 1)
    packed = params(to.pointer, of.size, factor, of.pointer)
    device.launch(function, grid, (128, 1, 1), 0, packed, stream, (out, source))


@pytest.mark.parametrize("smem_bytes", [0, 1024, 60 * 1024])
def test_a_launch_computes(device, load, smem_bytes):
    source = device.asarray(np.arange(1000, dtype=np.float32))
    out, stream = device.zeros(1000, "fp32"), device.stream()
    packed = params(kv.arrays.view(out).pointer, 1000, 2.5, kv.arrays.view(source).pointer)
    device.launch(load("scale"), (8, 1, 1), (128, 1, 1), smem_bytes, packed, stream, (out, source))
    stream.synchronize()
    np.testing.assert_array_equal(device.to_numpy(out), np.arange(1000, dtype=np.float32) * 2.5)


@pytest.mark.parametrize("work", ["a launch", "runs", "a function"])
def test_a_thread_that_never_used_cuda_can_work(device, load, work):
    source, out = device.asarray(np.ones(128, np.float32)), device.zeros(128, "fp32")
    function, stream, failures, seen = load("scale"), device.stream(), [], []
    runs = runs_of(device, "device pinned", 20)
    issue = {
        "a launch": lambda: scale(device, function, out, source, 4.0, stream),
        "runs": lambda: runs.enqueue(stream),
        "a function": lambda: stream.call(lambda: seen.append(1)),
    }[work]

    def issue_and_wait():
        try:
            issue()
            stream.record().synchronize()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=issue_and_wait)
    thread.start()
    thread.join()
    assert failures == []
    assert seen == [1] * (work == "a function")
    if work == "a launch":
        np.testing.assert_array_equal(device.to_numpy(out), 4.0)
    if work == "runs":
        runs.check()


# --- Other libraries ---


def test_cupy_streams(device, cupy, load, delay):
    foreign = cupy.cuda.Stream(non_blocking=True)
    with foreign:
        assert device.as_stream(None).pointer == foreign.ptr
        array = cupy.ones(128, cupy.float32)
        delay(device.as_stream(None))
        scale(device, load("scale"), array, array, 2.0, device.as_stream(None))
        assert float(array.sum()) == 256.0
    assert device.as_stream(None).pointer == cupy.cuda.get_current_stream().ptr
    ours = device.stream()
    assert cupy.cuda.Stream.from_external(ours).ptr == ours.pointer


# --- Captures of others ---


class Attention:
    """A call whose keys are split, so that it has a workspace and two launches."""

    def __init__(self, torch, seed=0):
        torch.manual_seed(seed)
        on_gpu = {"device": "cuda:0", "dtype": torch.float16}
        self.query = torch.randn((2, 8, 64), **on_gpu)
        self.k, self.v = (torch.randn((256, 16, 2, 64), **on_gpu) for _ in range(2))
        self.out = torch.zeros_like(self.query)
        self.table = torch.arange(256, device="cuda:0", dtype=torch.int32).reshape(2, 128)
        self.lens = torch.tensor([2000, 1500], device="cuda:0", dtype=torch.int32)

    def __call__(self, stream=None):
        kv.paged_attention(
            self.query, self.k, self.v, self.table, self.lens, out=self.out, stream=stream
        )


@pytest.fixture
def workspaces(monkeypatch):
    """The addresses of the buffers that were lent."""
    borrow, seen = scratch.borrow, []

    def watched(*arguments, **options):
        buffer = borrow(*arguments, **options)
        seen.append(buffer.pointer)
        return buffer

    monkeypatch.setattr(scratch, "borrow", watched)
    return seen


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("warm", [True, False])
def test_attention_twice_in_torchs_graph(device, torch, monkeypatch, workspaces, mode, warm):
    first, second = Attention(torch, 1), Attention(torch, 2)
    if warm:
        first()
    else:  # to be loaded, and the workspace allocated, in the capture
        op_call.forget()
        monkeypatch.setattr(device._launcher, "functions", {})
        monkeypatch.setattr(scratch, "_stores", weakref.WeakKeyDictionary())
    torch.cuda.synchronize()
    workspaces.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        first()
        second()
    assert len(workspaces) == 2
    assert len(set(workspaces)) == 1
    for seed in range(3):
        torch.manual_seed(seed)
        calls = (first, second)
        for call in calls:
            call.query.normal_()
            call.out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        got = [call.out.clone() for call in calls]
        for call in calls:
            call()
        torch.cuda.synchronize()
        for call, out in zip(calls, got, strict=True):
            assert torch.equal(call.out, out)


# --- Memory ---


@pytest.mark.parametrize("used", ["current", "explicit"])
def test_memory_of_another_current_stream_is_not_handed_out_again(device, cupy, load, delay, used):
    """CuPy's pool gives it back to the stream that was current when it was allocated."""
    function, stream = load("scale"), device.stream()
    source, out = device.asarray(np.full(1 << 16, 2, np.float32)), device.zeros(1 << 16, "fp32")
    delay(stream)
    if used == "current":
        with stream.cupy:
            scale(device, function, out, source, 1.0, device.as_stream(None, "cupy"))
    else:
        scale(device, function, out, source, 1.0, stream)
    del source
    for _ in range(4):
        cupy.full(1 << 16, 99, cupy.float32)
    stream.synchronize()
    np.testing.assert_array_equal(device.to_numpy(out), 2.0)


def resident_bytes():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def owner_of(array):
    while isinstance(array, np.ndarray):
        array = array.base
    return array.owner


@pytest.mark.parametrize("num_bytes", [1, 4095, 4097, (5 << 20) + 1])
def test_pinned_memory_is_reached_by_the_gpu_and_let_go(device, cupy, num_bytes):
    """Registered pages where the GPU's node is known, else CUDA's own: alike from outside."""
    array = device.empty_pinned(num_bytes, "int8")
    view = kv.arrays.view(array)
    assert (array.nbytes, view.pinned) == (num_bytes, True)
    assert (
        device.address(view) == cupy.cuda.runtime.pointerGetAttributes(view.pointer).devicePointer
    )
    array[...] = np.arange(num_bytes) % 100
    stream = device.stream()
    with stream.cupy:
        device.carrier(view)[...] += 1  # a kernel reads and writes it
    stream.synchronize()
    np.testing.assert_array_equal(array, np.arange(num_bytes) % 100 + 1)
    gone = weakref.ref(array)
    pointer, registered = view.pointer, isinstance(owner_of(array), RegisteredPages)
    del array, view
    device.synchronize()
    gc.collect()
    assert gone() is None
    if registered:
        assert cupy.cuda.runtime.pointerGetAttributes(pointer).type == 0


def test_pinned_memory_takes_no_more_than_it_holds(device):
    device.empty_pinned(1 << 20, "int8")
    num_bytes = (257 << 20) + 1  # to a power of two it would be 512 MiB
    before = resident_bytes()
    array = device.empty_pinned(num_bytes, "int8")
    array[...] = 1
    taken = resident_bytes() - before
    assert taken < num_bytes + (32 << 20)
    del array
    gc.collect()
    assert resident_bytes() < before + (32 << 20)


# --- Runs ---


@pytest.fixture
def batches(device, monkeypatch):
    """How many runs each batch had."""
    really, counts = device.context.api.memcpy_batch, []

    def counted(dst, src, sizes, count, *others):
        counts.append(count)
        return really(dst, src, sizes, count, *others)

    if really is not None:
        monkeypatch.setitem(vars(device.context.api), "memcpy_batch", counted)
    return counts


def runs_of(device, sides, count):
    """Runs of up to 4 KiB, one of which is empty."""
    sizes = np.random.default_rng(count).integers(1, 4097, count)
    sizes[count // 2] = 0
    return Pieces(device, sizes.tolist(), sides)


@pytest.mark.parametrize("sides", PLACES)
@pytest.mark.parametrize("count", [2, 7, 3000])
@pytest.mark.parametrize("has_batches", [True, False])
def test_runs_are_copied_exactly(device, monkeypatch, batches, sides, count, has_batches):
    """As one batch, but for pageable memory, which a call may have to read before it returns."""
    if not has_batches:
        monkeypatch.setitem(vars(device.context.api), "memcpy_batch", None)
    runs, stream = runs_of(device, sides, count), device.stream()
    runs.enqueue(stream)
    stream.synchronize()
    runs.check()
    is_batch = count > 2 and "pageable" not in sides
    if device.context.api.memcpy_batch is not None:
        assert batches == [count - 1] * is_batch  # one is empty


def test_copies_with_pinned_memory_do_not_block(device, delay):
    source, there = device.empty_pinned(1 << 22, "fp32"), device.empty(1 << 22, "fp32")
    source[:] = 1.0
    stream = device.stream()

    def copy():
        device.copy(there, source, stream=stream)
        device.copy(there[::2], source[::2], stream=stream)

    copy()  # CuPy compiles and loads what it needs at the first use
    stream.synchronize()
    delay(stream)
    copy()
    assert not stream.done()
    stream.synchronize()


PATIENCE_S = 60


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


def test_a_fault_on_the_device_surfaces_everywhere():
    """In a separate process, for the device is lost afterwards."""
    program = f"""
from pathlib import Path
from kvcupy.devices import nvrtc
from kvcupy.kernels import Kernel

folder = Path({str(KERNELS)!r})
nvrtc.compile_cubin = lambda s, arch: nvrtc.compile_program([s], arch, kernels_dir=folder)[0]
dtype = np.dtype({PARAMS.descr!r})
function = device.load(Kernel("scale.cu", "crash", dtype, "ScaleParams").specialise(128))
packed = np.array([(0, 16, 0, 1.0)], dtype).tobytes()
device.launch(function, (1, 1, 1), (32, 1, 1), 0, packed, stream)
for ask in (stream.synchronize, stream.done, device.synchronize):
    try:
        ask()
    except kv.DeviceError as error:
        assert "llegal" in str(error), error
        print("raised", flush=True)
os._exit(0)
"""
    assert run_apart(program) == ["raised"] * 3


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


def test_a_function_is_between_the_work_before_and_after_it(device):
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
