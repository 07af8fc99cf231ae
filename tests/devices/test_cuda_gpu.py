"""The GPU device on a GPU: that CUDA behaves as `test_cuda.py` takes it to.

`test_device_streams.py` and `test_device_runs.py` run here too, with --device cuda.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from test_device_runs import SIDES, Pieces

import kvcupy as kv
from kvcupy import scratch
from kvcupy.devices import nvrtc
from kvcupy.devices.cuda_memory import RegisteredPages, numa_node
from kvcupy.devices.cuda_streams import Stream
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
    really = nvrtc.compile_cubin
    monkeypatch.setattr(
        nvrtc, "compile_cubin", lambda s, arch: really(s, arch, kernels_dir=KERNELS)
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


def test_the_fallback_launch_computes_too(device, load, monkeypatch):
    source, out = device.asarray(np.ones(128, np.float32)), device.zeros(128, "fp32")
    monkeypatch.setattr(device.context.api, "can_launch_packed", False)
    stream = device.stream()
    scale(device, load("scale"), out, source, 3.0, stream)
    stream.synchronize()
    np.testing.assert_array_equal(device.to_numpy(out), 3.0)


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


def test_a_refused_launch_tells_everything_and_harms_nothing(device, load):
    stream = device.stream()
    with pytest.raises(kv.DeviceError, match=r"scale<128>.*block \(4096, 1, 1\)"):
        device.launch(load("scale"), (1, 1, 1), (4096, 1, 1), 0, params(0, 0), stream)
    stream.synchronize()


def test_priorities_reach_cuda(device, cupy):
    high, low = device.stream(priority=-1), device.stream(priority=0)
    assert cupy.cuda.runtime.streamGetPriority(high.pointer) < 0
    assert cupy.cuda.runtime.streamGetPriority(low.pointer) == 0


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


def test_torch_streams(device, torch, load):
    foreign, function = torch.cuda.Stream(), load("scale")
    with torch.cuda.stream(foreign):
        current = device.as_stream(None, "torch")
        assert current.pointer == foreign.cuda_stream
        tensor = torch.ones(128, device="cuda")
        scale(device, function, tensor, tensor, 3.0, current)
        assert float(tensor.sum()) == 384.0
    assert device.as_stream(foreign).pointer == foreign.cuda_stream
    ours = device.stream()
    with torch.cuda.stream(torch.cuda.ExternalStream(ours.pointer)):
        assert device.as_stream(None, "torch") == ours


def test_a_launch_inside_torchs_capture(device, torch, load):
    tensor, function = torch.ones(128, device="cuda"), load("scale")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(device, function, tensor, tensor, 2.0, device.as_stream(None, "torch"))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert float(tensor[0]) == 8.0


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
        monkeypatch.setattr(device._launcher, "_functions", {})
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


def test_other_calls_while_torch_captures(device, torch, delay):
    """On this thread and another; none of them is part of the graph, and none spoils it."""
    stream, event, failures = device.stream(), device.event(), []
    side = device.stream()
    tensor = torch.zeros(4, device="cuda:0")

    def calls():
        try:
            array = device.zeros(1 << 22, "fp32")
            assert device.to_numpy(device.asarray(np.arange(5))).tolist() == [0, 1, 2, 3, 4]
            assert not device.to_numpy(array).any()
            device.empty_pinned(1 << 16, "fp32")
            device.run(lambda: None, stream, (array,))
            stream.record(event)
            event.synchronize()
            assert event.done()
            side.wait(stream)
            side.synchronize()
            assert side.done()
        except Exception as error:
            failures.append(error)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor += 1
        calls()
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
    assert failures == []
    graph.replay()
    torch.cuda.synchronize()
    assert tensor.tolist() == [1, 1, 1, 1]


def test_an_event_of_torchs_capture_is_usable_after_it(device, torch):
    tensor, graph = torch.zeros(4, device="cuda:0"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor += 1
        event = device.as_stream(None, "torch").record()
        with pytest.raises(kv.CaptureError):
            event.done()
    assert event.done()
    stream = device.stream()
    stream.wait(event)
    stream.record(event)
    event.synchronize()


def test_torchs_capture_beside_one_of_ours(device, torch):
    ours, tensor = device.stream(), torch.zeros(4, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), ours.capture() as own:  # torch synchronises when it begins
        tensor += 1
        foreign = device.as_stream(None, "torch")
        assert foreign.capturing
        assert not foreign.retains_owners
        assert ours.retains_owners
        for one, other in ((ours, foreign), (foreign, ours)):
            with pytest.raises(kv.CaptureError, match="two captures"):
                one.wait(other)
    own.launch(ours)
    graph.replay()
    device.synchronize()


# --- A GPU that is not the current one ---


@pytest.fixture
def second(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    assert cupy.cuda.runtime.getDevice() == 0
    yield kv.device("cuda:1")
    assert cupy.cuda.runtime.getDevice() == 0


def test_arrays_of_the_other_gpu(second):
    for _ in range(20):
        array = second.zeros(1 << 22, "fp32")
        assert not second.to_numpy(array).any()
        second.copy(array, np.ones(1 << 22, np.float32), stream=second.stream())
        second.synchronize()
        del array
    source = np.arange(100, dtype=np.float32)
    np.testing.assert_array_equal(second.to_numpy(second.asarray(source)), source)


@pytest.mark.parametrize("pointer", [0, 1, 2])
def test_default_streams_of_the_other_gpu(second, pointer):
    stream, array = Stream(second.context, pointer), second.zeros(1 << 20, "fp32")
    second.copy(array, np.ones(1 << 20, np.float32), stream=stream)
    event = stream.record()
    second.run(lambda: None, stream, (object(),))
    second.stream().wait(stream)
    stream.wait(second.stream())
    assert not stream.capturing
    event.synchronize()
    stream.synchronize()
    assert stream.done()
    assert (second.to_numpy(array) == 1).all()


def test_an_engine_of_the_other_gpu(second):
    shape = {"page_size": 4, "num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": "fp16"}
    near = kv.KVPool(8, **shape, device=second)
    far = kv.KVPool(8, **shape, placement="pinned", device=second)
    engine = kv.TransferEngine(near, far)
    values = np.random.default_rng(1).standard_normal((4, 2, 8)).astype(np.float16)
    second.copy(near.k(1)[3], values)
    engine.save([3], [5]).synchronize()
    np.testing.assert_array_equal(np.asarray(far.k(1))[5], values)
    engine.load([5], [0]).synchronize()
    np.testing.assert_array_equal(second.to_numpy(near.k(1)[0]), values)


def test_a_tensor_of_the_other_gpu_by_dlpack(second, torch):
    tensor = torch.arange(8, device="cuda:1", dtype=torch.float32)

    class Exporter:
        __dlpack__, __dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__

    found = kv.arrays.view(Exporter())
    assert (found.device, found.pointer) == ("cuda:1", tensor.data_ptr())


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


def test_no_memory_is_a_device_error(device):
    with pytest.raises(kv.DeviceError, match=r"array of 1,125,899,906,842,624 bytes .* are free"):
        device.empty(1 << 50, "int8")


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


def test_pinned_memory_lies_where_the_gpu_is(device):
    node, maps = numa_node(device.context), Path("/proc/self/numa_maps")
    if node is None or not maps.exists():
        pytest.skip("the system does not say where the GPU is, or where pages are")
    array = device.empty_pinned(64 << 20, "int8")
    array[...] = 1
    start = f"{array.ctypes.data:x} "
    lines = [line for line in maps.read_text().splitlines() if line.startswith(start)]
    if not lines or "prefer" not in lines[0]:
        pytest.skip("the pages are CUDA's own, or the system does not take wishes for nodes")
    pages = {f.split("=")[0]: int(f.split("=")[1]) for f in lines[0].split() if f[0] == "N"}
    assert pages[f"N{node}"] > 0.9 * sum(pages.values())


def test_the_model_and_the_addresses(device, cupy):
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"]
    assert device.model == name.decode()
    own, pageable = kv.arrays.view(device.zeros(8, "fp32")), kv.arrays.view(np.zeros(8))
    assert device.address(own) == own.pointer
    assert device.address(pageable) is None


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


def test_a_driver_of_12_8_has_batches(device):
    version = device.context.api.runtime.driverGetVersion()
    assert (device.context.api.memcpy_batch is not None) == (version >= 12080)


def runs_of(device, sides, count):
    """Runs of up to 4 KiB, one of which is empty."""
    sizes = np.random.default_rng(count).integers(1, 4097, count)
    sizes[count // 2] = 0
    return Pieces(device, sizes.tolist(), sides)


@pytest.mark.parametrize("sides", SIDES)
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


@pytest.mark.parametrize("pointer", [0, 1, 2])
def test_runs_on_the_default_streams(device, batches, pointer):
    """The driver refuses batches on the legacy one, by either name, but not on the thread's own."""
    runs, stream = runs_of(device, "device pinned", 20), Stream(device.context, pointer)
    runs.enqueue(stream)
    stream.synchronize()
    runs.check()
    if device.context.api.memcpy_batch is not None:
        assert len(batches) == (pointer == 2)


def test_a_refused_run_is_a_device_error():
    """In a separate process, for the device may be lost afterwards."""
    done = in_a_process_of_its_own("""
import numpy as np
import kvcupy as kv

device = kv.device("cuda:0")
array, stream = device.zeros((20, 64), "fp32"), device.stream()
rows = np.uint64(kv.arrays.view(array).pointer) + np.arange(20, dtype=np.uint64) * 256
to, of, sizes = rows[:10], rows[10:], np.full(10, 256, np.uint64)
sizes[3] = 1 << 50  # past the end of its memory; an address that CUDA does not know is the host's
try:
    device.copy_runs(to, of, sizes, stream, (array,))
    stream.synchronize()
except kv.DeviceError as error:
    print("raised", error)
""")
    assert done.stdout.startswith("raised"), done.stderr
    if ", run " in done.stdout:  # the driver need not say which
        assert f", run 3: {1 << 50} bytes" in done.stdout


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


def in_a_process_of_its_own(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_a_fault_on_the_device_surfaces_everywhere():
    """In a separate process, for the device is lost afterwards."""
    done = in_a_process_of_its_own(f"""
import numpy as np
import kvcupy as kv
from pathlib import Path
from kvcupy.devices import nvrtc
from kvcupy.kernels import Kernel

really = nvrtc.compile_cubin
nvrtc.compile_cubin = lambda s, arch: really(s, arch, kernels_dir=Path({str(KERNELS)!r}))
dtype = np.dtype({PARAMS.descr!r})
device = kv.device("cuda:0")
stream = device.stream()
function = device.load(Kernel("scale.cu", "crash", dtype, "ScaleParams").specialise(128))
packed = np.array([(0, 16, 0, 1.0)], dtype).tobytes()
device.launch(function, (1, 1, 1), (32, 1, 1), 0, packed, stream)
event = None
for ask in (stream.synchronize, stream.done, device.synchronize):
    try:
        ask()
    except kv.DeviceError as error:
        assert "llegal" in str(error), error
    else:
        raise SystemExit(f"{{ask}} did not raise")
print("all raised")
""")
    assert "all raised" in done.stdout, done.stderr
