"""Timing of calls that rotate over sets of arguments, and torch tensors over a device's arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
from common.measure import event_us, repeats_for, wall_us

import kvcupy as kv
from kvcupy.formats import numpy_dtype

Call = Callable[[Any], Any]  # takes the stream, None for the current one
Wrap = Callable[[Any, str], Any]  # an array of bits, in the dtype of a format


def copy_gb_per_s(device: Any, size: int, rounds: int) -> float:
    """Measure the device's own copy of a large buffer: bytes read and written, at least time."""
    source, target = device.zeros((size,), np.uint8), device.zeros((size,), np.uint8)
    copy = partial(device.copy, target, source)
    copy()
    return 2 * size / min(wall_us(device, copy, 2) for _ in range(rounds)) / 1e3


class TorchArrays:
    """Torch tensors over a device's arrays, where torch is installed and can reach them."""

    def __init__(self, device: Any) -> None:
        self.torch: Any = None
        self.missing = ""
        try:
            import torch

            self.torch = torch
            self.wrap(device.zeros((2,), np.uint16), "bf16")
        except (ImportError, RuntimeError, BufferError, AssertionError) as error:
            self.torch, self.missing = None, f"{type(error).__name__}: {error}"

    def wrap(self, array: Any, fmt: str) -> Any:
        """Return a tensor over the same memory, in a format, or as plain integers for "bits"."""
        torch = self.torch
        signed = {1: np.uint8, 2: np.int16}.get(array.dtype.itemsize, array.dtype)
        tensor = torch.from_dlpack(array.view(signed))
        dtypes = {
            "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8
        }  # fmt: skip
        return tensor.view(dtypes[fmt]) if fmt in dtypes else tensor


def own_arrays(array: Any, fmt: str) -> Any:
    """Return the array in the dtype of a format, tagged where its library has none."""
    try:
        return array.view(numpy_dtype(fmt))
    except (TypeError, ValueError):
        return kv.view_as(array, fmt)


def upload(device: Any, array: np.ndarray[Any, Any]) -> Any:
    """Return a copy of an array on a device, in memory of the device's own alignment."""
    copy = device.empty(array.shape, array.dtype)
    device.copy(copy, device.asarray(array))
    return copy


def on_stream(bound: Callable[..., Any], stream: Any) -> Any:
    """Call one of kvcupy's operations."""
    return bound(stream=stream)


def by_device(device: Any, work: Callable[[], Any], stream: Any) -> Any:
    """Call array expressions of the device's library."""
    return work() if stream is None else device.run(work, stream)


def ignoring_stream(bound: Callable[[], Any], stream: Any) -> Any:
    """Call torch, which has a current stream of its own."""
    return bound()


def eager(device: Any, calls: list[Call], target_us: float) -> Callable[[], float]:
    """Return a measurement of a call from Python, in us."""
    repeat = repeats_for(device, partial(calls[0], None), target_us)
    rotation = list(islice(cycle(calls), repeat))

    def sweep() -> None:
        for call in rotation:
            call(None)

    return lambda: wall_us(device, sweep) / repeat


def replayed(device: Any, stream: Any, calls: list[Call], target_us: float) -> Callable[[], float]:
    """Capture the calls; return a measurement of one of them in a replay, in us."""
    # All of them, or a few where a single one takes long.
    calls = calls[: max(2, repeats_for(device, partial(calls[0], stream), 4 * target_us))]
    with stream.capture() as graph:
        for call in calls:
            call(stream)
    repeat = repeats_for(device, partial(graph.launch, stream), target_us)

    def replay() -> None:
        for _ in range(repeat):
            graph.launch(stream)

    return lambda: event_us(device, stream, replay) / (repeat * len(calls))


def replayed_by_torch(torch: Any, calls: list[Call], repeat: int = 4) -> Callable[[], float]:
    """Capture torch's calls with torch's own graphs; return a measurement of one of them, in us."""
    calls[0](None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call(None)

    def measure() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeat):
            graph.replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3 / (repeat * len(calls))

    return measure
