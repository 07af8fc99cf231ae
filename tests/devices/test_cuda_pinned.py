"""Pinned memory: near its GPU where the system tells where, and for as long as it is used."""

from __future__ import annotations

import faulthandler
import gc
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import FakeApi, Memory, log

from kvcupy.arrays import is_pinned
from kvcupy.devices import cuda, cuda_memory, host_memory
from kvcupy.errors import DeviceError

PAGE = host_memory.PAGE_BYTES
PORTABLE, MAPPED = 1, 2

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="NUMA nodes are looked up as Linux has them"
)


@pytest.fixture
def api(monkeypatch, tmp_path):
    api = FakeApi()
    api.install(monkeypatch)
    api.pci_devices = tmp_path
    return api


@pytest.fixture
def device(api):
    return cuda.CudaDevice(0, api)


@pytest.fixture
def wishes(monkeypatch):
    """What the system is asked for; this machine may have no such node."""
    calls = []
    monkeypatch.setattr(host_memory, "prefer_node", lambda *wish: calls.append(wish))
    return calls


@pytest.fixture
def unmapped(api, monkeypatch):
    """What is given back to the system, with what is registered then."""
    seen, unmap = [], host_memory.unmap

    def watched(pointer, num_bytes):
        seen.append((pointer, num_bytes, dict(api.runtime.registered)))
        unmap(pointer, num_bytes)

    monkeypatch.setattr(host_memory, "unmap", watched)
    return seen


def attach(api, text="1\n", bus_id="0000:3b:00.0"):
    folder = api.pci_devices / bus_id
    folder.mkdir()
    (folder / "numa_node").write_text(text)


# --- Near the GPU ---


@pytest.mark.parametrize("extra", [0, 1, PAGE - 1])
def test_pages_are_registered_where_the_gpu_is(api, device, wishes, extra):
    attach(api)
    num_bytes = 3 * PAGE + extra
    array = device.empty_pinned(num_bytes, "int8")
    rounded = 3 * PAGE if extra == 0 else 4 * PAGE
    ((pointer, size, flags),) = log(api, "register")
    assert (pointer, size, flags) == (array.ctypes.data, rounded, PORTABLE | MAPPED)
    assert wishes == [(pointer, rounded, 1)]
    assert pointer % PAGE == 0
    assert array.nbytes == num_bytes
    array[:] = 7
    assert array.sum(dtype=int) == 7 * num_bytes


def test_every_view_is_known_as_pinned_and_keeps_the_pages(api, device, wishes, unmapped):
    attach(api)
    array = device.empty_pinned((4, PAGE), "bf16")
    view = array[2:].view(np.uint8)[:, ::2]
    assert is_pinned(array)
    assert is_pinned(view)
    del array
    gc.collect()
    assert unmapped == []
    view[...] = 3
    del view
    assert len(unmapped) == 1


def test_pages_are_unregistered_once_then_given_back(api, wishes, unmapped):
    attach(api)
    device = cuda.CudaDevice(1, api)
    array = device.empty_pinned(PAGE, "int8")
    pointer = array.ctypes.data
    assert log(api, "unregister") == []
    del array
    gc.collect()
    assert log(api, "unregister") == [(pointer, 1)]  # while its own device is current
    assert unmapped == [(pointer, PAGE, {})]
    assert api.runtime.current == 0


def test_pages_that_cuda_does_not_let_go_of_stay(api, device, wishes, unmapped):
    attach(api)
    array = device.empty_pinned(PAGE, "int8")
    api.runtime.refused_unregistration = 700
    del array
    assert len(log(api, "unregister")) == 1
    assert unmapped == []


def test_when_python_ends_functions_are_called_and_memory_is_left_alone():
    """A stream would wait for the function for ever; a global array outlives everything."""
    program = """
import sys, tempfile
from pathlib import Path
from fake_cuda import FakeApi
from kvcupy.devices import cuda
from kvcupy.cuda_api import CudaApi
for name in ("failure", "query", "is_capturing"):
    setattr(FakeApi, name, getattr(CudaApi, name))
api = FakeApi()
api.pci_devices = Path(tempfile.mkdtemp())
(api.pci_devices / "0000:3b:00.0").mkdir()
(api.pci_devices / "0000:3b:00.0" / "numa_node").write_text("0")
api.runtime.hostUnregister = lambda pointer: print("unregistered", flush=True)
device = cuda.CudaDevice(0, api)
early = device.empty_pinned(1 << 16, "int8")
kept = device.empty_pinned(1 << 16, "int8")
del early
stream = device.stream()
stream.call(lambda: print("called", flush=True))
print("ending", flush=True)
"""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent.parent)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["unregistered", "ending", "called"]), (
        done.stderr
    )


# --- Forks ---


def exit_of_child(work):
    """Run a function in a forked child; return how that ended: 0, or minus the signal."""
    child = os.fork()
    if not child:
        code = 1
        faulthandler.disable()  # a crash here is an answer
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_does_not_have_pages_that_a_gpu_may_write(api, device, wishes):
    attach(api)
    array = device.empty_pinned(2 * PAGE, "int8")
    array[:] = 3
    ordinary = np.full(2 * PAGE, 3, np.int8)
    assert exit_of_child(lambda: ordinary.sum()) == 0
    assert exit_of_child(lambda: array.sum()) == -signal.SIGSEGV
    assert (array == 3).all()


def test_children_are_kept_out_before_cuda_locks_the_pages(api, device, wishes, monkeypatch):
    """In between, a fork of another thread's would share them."""
    attach(api)
    order, keep, register = [], host_memory.keep_from_children, api.runtime.hostRegister
    monkeypatch.setattr(
        host_memory, "keep_from_children", lambda *a: order.append(("keep", *a)) or keep(*a)
    )
    api.runtime.hostRegister = lambda *a: order.append(("register", *a[:2])) or register(*a)
    array = device.empty_pinned(PAGE, "int8")
    assert order == [("keep", array.ctypes.data, PAGE), ("register", array.ctypes.data, PAGE)]


# --- Elsewhere ---


def no_pages(api, monkeypatch):
    def refuse(num_bytes):
        raise OSError(12, "no")

    attach(api)
    monkeypatch.setattr(host_memory, "map_pages", refuse)


def no_bus_address(api, monkeypatch):
    attach(api)
    api.runtime.bus_id = ""


ELSEWHERE = {
    "no such file": lambda api, monkeypatch: None,
    "no node": lambda api, monkeypatch: attach(api, "-1\n"),
    "an empty file": lambda api, monkeypatch: attach(api, ""),
    "no number": lambda api, monkeypatch: attach(api, "none\n"),
    "no bus address": no_bus_address,
    "no pages": no_pages,
}


@pytest.mark.parametrize("why", ELSEWHERE)
def test_without_a_node_or_pages_cuda_allocates(api, device, wishes, monkeypatch, why):
    ELSEWHERE[why](api, monkeypatch)
    assert is_pinned(device.empty_pinned((2, PAGE), "int8"))
    assert log(api, "register") == wishes == []


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE - 1])
def test_less_than_a_page_comes_from_cuda(api, device, num_bytes):
    attach(api)
    array = device.empty_pinned(num_bytes, "int8")
    assert array.shape == (num_bytes,) and is_pinned(array)
    assert log(api, "register") == []


def test_where_registration_is_refused_cuda_allocates(api, device, wishes, unmapped):
    attach(api)
    api.runtime.refused_registration = 2
    asked = []
    api.cupy.cuda.PinnedMemory = lambda size, flags: asked.append((size, flags)) or Memory(size)
    array = device.empty_pinned(PAGE + 5, "int8")
    assert asked == [(PAGE + 5, PORTABLE | MAPPED)]
    assert is_pinned(array)
    assert [entry[:2] for entry in unmapped] == [(log(api, "register")[0][0], 2 * PAGE)]
    del array
    assert log(api, "unregister") == []


def test_exhausted_memory_is_a_device_error(api, device, wishes):
    def refuse(size, flags):
        api.runtime.check_status(2)

    attach(api)
    api.runtime.refused_registration = 2
    api.cupy.cuda.PinnedMemory = refuse
    with pytest.raises(DeviceError, match=f"{PAGE} bytes of pinned memory: cudaError 2"):
        device.empty_pinned(PAGE, "int8")


# --- The system ---


def test_the_node_is_found_by_the_address_in_lower_case(api, device):
    attach(api, "3\n")
    assert cuda_memory.numa_node(device.context) == 3
    assert host_memory.node_of_pci_device("0000:3B:00.0", api.pci_devices) == 3
    assert host_memory.node_of_pci_device("0000:3C:00.0", api.pci_devices) is None


@pytest.mark.parametrize(("node", "words"), [(0, [1]), (5, [32]), (63, [1 << 63]), (64, [0, 1])])
def test_the_wish_as_the_kernel_reads_it(monkeypatch, node, words):
    import ctypes
    from types import SimpleNamespace

    seen = []

    def syscall(number, address, num_bytes, mode, mask, bits, flags):
        count = (bits.value - 1) // 64  # the kernel takes one off
        read = list((ctypes.c_uint64 * count).from_address(mask.value))
        seen.append((number.value, address.value, num_bytes.value, mode.value, read, flags.value))
        return 0

    monkeypatch.setattr(host_memory, "_libc", lambda: SimpleNamespace(syscall=syscall))
    for machine, number in (("x86_64", 237), ("aarch64", 235)):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert host_memory.prefer_node(0x1000, 4 * PAGE, node)
        assert seen.pop() == (number, 0x1000, 4 * PAGE, 1, words, 0)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not host_memory.prefer_node(0x1000, PAGE, node)
    assert seen == []


def test_the_kernel_hears_the_wish_or_nothing_comes_of_it():
    pointer, num_bytes = host_memory.map_pages(2 * PAGE)
    try:
        heard = host_memory.prefer_node(pointer, num_bytes, 0)
        assert not host_memory.prefer_node(pointer, num_bytes, 1000), "there is no such node"
        maps = Path("/proc/self/numa_maps")
        if not heard or not maps.exists():
            pytest.skip("the system does not take, or does not show, wishes for nodes")
        (line,) = [ln for ln in maps.read_text().splitlines() if ln.startswith(f"{pointer:x} ")]
        assert "prefer" in line.split()[1]
        assert line.split()[1].endswith(":0")
    finally:
        host_memory.unmap(pointer, num_bytes)


def test_pages_are_fresh_whole_and_refused_where_there_are_none():
    import ctypes

    pointer, num_bytes = host_memory.map_pages(1)
    assert (pointer % PAGE, num_bytes) == (0, PAGE)
    assert ctypes.string_at(pointer, num_bytes) == bytes(PAGE)
    host_memory.unmap(pointer, num_bytes)
    with pytest.raises(OSError, match="mapping"):
        host_memory.map_pages(1 << 60)
