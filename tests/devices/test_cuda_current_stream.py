"""Whose current stream is meant where none is given and the arrays do not say."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cuda import FakeApi

import kvcupy as kv
from kvcupy.cache.hazards import CopyStream
from kvcupy.cache.paged.tables import TableBuffer
from kvcupy.devices import cuda

DEFAULT = 0


@pytest.fixture
def api(monkeypatch):
    api = FakeApi()
    api.install(monkeypatch)
    monkeypatch.setattr(cuda.CudaDevice, "fault_pointer", 1)
    return api


@pytest.fixture
def gpu(api):
    return cuda.CudaDevice(0, api)


class Torch:
    """What is asked of torch: its current stream, which may be set."""

    def __init__(self):
        self.initialised, self.pointer, self.asked = True, DEFAULT, []
        self.cuda = SimpleNamespace(
            is_initialized=lambda: self.initialised, current_stream=self._current
        )

    def _current(self, index):
        assert self.initialised, "asking makes torch set up every GPU"
        self.asked.append(index)
        return SimpleNamespace(cuda_stream=self.pointer)


@pytest.fixture
def torch(monkeypatch):
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def pools_of(gpu):
    shape = {"page_size": 2, "num_layers": 3, "num_kv_heads": 2, "head_dim": 4, "dtype": "fp16"}
    return (
        kv.KVPool(8, **shape, device=gpu),
        kv.KVPool(12, **shape, layout="page_first_direct", placement="pinned", device=gpu),
    )


def streams_of_copies(api):
    return {entry[2] for entry in api.runtime.log if entry[0] == "copy"}


def current_in_cupy(api, stream):
    api.currents[0] = stream.cupy


# The stream that was made current: by torch, CuPy, neither, and which one is then meant.
CASES = {
    "neither": (False, False, "default"),
    "torch": (True, False, "foreign"),
    "cupy": (False, True, "ours"),
}


@pytest.fixture(params=CASES)
def meant(request, api, gpu, torch):
    """Make streams current; return the address of the one that is meant."""
    by_torch, by_cupy, which = CASES[request.param]
    ours, foreign = gpu.stream(), gpu.stream()
    gpu.alive = ours, foreign
    torch.pointer = foreign.pointer if by_torch else DEFAULT
    if by_cupy:
        current_in_cupy(api, ours)
    return {"default": DEFAULT, "ours": ours.pointer, "foreign": foreign.pointer}[which]


@pytest.mark.parametrize("lists", [list, np.array])
def test_a_transfer_goes_to_the_stream_that_is_current(api, gpu, meant, lists):
    src, dst = pools_of(gpu)
    kv.transfer_pages(src, dst, lists([1, 5]), lists([2, 7]), method="copy")
    assert streams_of_copies(api) == {meant}


def test_a_transfer_of_an_engine_is_behind_the_stream_that_is_current(api, gpu, meant):
    engine = kv.TransferEngine(*pools_of(gpu), method="copy")
    for call in (engine.save, engine.load):
        api.runtime.log.clear()
        call([1], [2])
        assert [entry[2] for entry in api.runtime.log if entry[0] == "record"] == [meant]


def test_what_waits_for_a_transfer_is_the_stream_that_is_current(api, gpu, meant):
    engine = kv.TransferEngine(*pools_of(gpu), method="copy")
    load = engine.load([1], [2])
    load.synchronize()
    load = engine.load([1], [3])
    api.runtime.log.clear()
    load.wait_layer(0, None)
    waits = {entry[1] for entry in api.runtime.log if entry[0] == "wait"}
    assert waits == {engine.load_stream.pointer, meant}


def test_torchs_capture_gets_the_copies(api, gpu, torch):
    """Inside `torch.cuda.graph` the captured stream is torch's current one."""
    src, dst = pools_of(gpu)
    stream = gpu.stream()
    torch.pointer = stream.pointer
    stream.cupy.begin_capture(0)
    kv.transfer_pages(src, dst, [1], [2], method="copy")
    assert streams_of_copies(api) == {stream.pointer}
    stream.cupy.end_capture()


def test_one_stream_current_in_both_is_that_stream(api, gpu, torch):
    stream = gpu.stream()
    current_in_cupy(api, stream)
    torch.pointer = stream.pointer
    assert gpu.as_stream(None) == stream


def test_a_torch_that_has_used_no_gpu_is_not_asked(api, gpu, torch):
    torch.initialised = False
    assert gpu.as_stream(None).pointer == DEFAULT
    assert torch.asked == []


def test_without_torch_or_with_half_of_it_it_is_cupys(api, gpu, monkeypatch):
    stream = gpu.stream()
    current_in_cupy(api, stream)
    for module in (None, SimpleNamespace()):  # an import that failed, or is running
        monkeypatch.setitem(sys.modules, "torch", module)
        assert gpu.as_stream(None) == stream


def test_two_different_streams_are_refused_and_nothing_is_moved(api, gpu, torch):
    src, dst = pools_of(gpu)
    engine = kv.TransferEngine(src, dst, method="copy")
    ours, foreign = gpu.stream(), gpu.stream()
    current_in_cupy(api, ours)
    torch.pointer = foreign.pointer
    api.runtime.log.clear()
    message = f"expected one of cuda:0, got None while .* {ours.pointer:#x} .* {foreign.pointer:#x}"
    with pytest.raises(ValueError, match=f"^stream: {message}"):
        kv.transfer_pages(src, dst, [1], [2], method="copy")
    for call in (engine.save, engine.load):
        with pytest.raises(ValueError, match=f"^after: {message}"):
            call([1], [2])
    engine._flush()
    assert api.runtime.log == []
    kv.transfer_pages(src, dst, [1], [2], method="copy", stream=ours)
    assert streams_of_copies(api) == {ours.pointer}


def test_memory_for_tables_is_behind_the_stream_whose_arena_it_came_from(api, gpu, torch):
    """CuPy's, whatever torch has made current."""
    ours, foreign = gpu.stream(), gpu.stream()
    torch.pointer = foreign.pointer
    for current in (None, ours):
        if current is not None:
            current_in_cupy(api, current)
        copies, copier = CopyStream(gpu), gpu.stream()
        buffer = TableBuffer(copies, shapes={"slots": ((100,), "int32")})
        api.runtime.log.clear()
        buffer.readers.take_over(copier)
        recorded = [entry[2] for entry in api.runtime.log if entry[0] == "record"]
        assert recorded == [DEFAULT if current is None else ours.pointer]


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_page_lists_of_a_gpu_say_whose_stream_it_is(gpu, api, torch, library, monkeypatch):
    """Though both libraries have made a stream current."""
    src, dst = pools_of(gpu)
    ours, foreign = gpu.stream(), gpu.stream()
    current_in_cupy(api, ours)
    torch.pointer = foreign.pointer
    numbers = np.array([1, 2])
    pages = kv.ArrayView(
        numbers.ctypes.data, (2,), (8,), "int64", "cuda:0", library=library, owner=numbers
    )
    seen = []
    monkeypatch.setattr(
        type(gpu), "launch", lambda self, f, g, b, m, p, stream, keep=(): seen.append(stream)
    )
    monkeypatch.setattr(type(gpu), "load", lambda self, specialisation: None)
    kv.transfer_pages(src, dst, pages, pages, method="kernel")
    assert set(seen) == {foreign if library == "torch" else ours}


@pytest.mark.parametrize("torchs", [True, False])
def test_the_default_stream_of_a_thread_is_no_choice_where_it_is_cupys_default(
    api, gpu, torch, torchs
):
    """As with CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1."""
    stream = gpu.stream()
    torch.pointer = stream.pointer if torchs else DEFAULT
    api.default_stream = 2
    assert gpu.as_stream(None).pointer == (stream.pointer if torchs else 2)
    api.default_stream = DEFAULT
    current_in_cupy(api, cuda.Stream(gpu.context, 2))
    if torchs:
        with pytest.raises(ValueError, match="expected one of cuda:0, got None"):
            gpu.as_stream(None)


def test_cupys_default_stream_is_the_one_that_its_variable_says(cupy):
    """CuPy reads the variable when it is imported."""
    program = "from kvcupy.cuda_api import CudaApi; print(CudaApi().default_stream)"
    variables = {**os.environ, "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1"}
    output = subprocess.check_output([sys.executable, "-c", program], env=variables, text=True)
    assert output == "2\n"
