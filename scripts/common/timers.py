"""Timing: calls that rotate over sets of arguments, from Python or as replays of graphs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any, TypeVar

import numpy as np

Call = Callable[[Any], Any]  # takes the stream, None for the current one
T = TypeVar("T")

TO_DEVICE, TO_HOST = "to device", "to host"
DIRECTIONS = (TO_DEVICE, TO_HOST)


def wall_us(device: Any, work: Callable[[], object], repeat: int = 1) -> float:
    """Time `repeat` calls of `work` and what they enqueue on the device, in us per call."""
    device.synchronize()
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    device.synchronize()
    return (time.perf_counter() - start) * 1e6 / repeat


def event_us(device: Any, stream: Any, work: Callable[[], object]) -> float:
    """Time what `work` enqueues on `stream`, between two timing events."""
    start, stop = device.event(timing=True), device.event(timing=True)
    stream.record(start)
    work()
    stream.record(stop)
    stop.synchronize()
    return float(stop.elapsed_us(start))


def interleave(
    candidates: dict[str, Callable[[], T]], rounds: int, *, seconds: float = math.inf
) -> dict[str, list[T]]:
    """Measure all candidates round by round, for `rounds` rounds; return what each measured.

    Each candidate times itself. A first round warms up and is not counted. The order rotates from
    round to round, so that a disturbance affects all of them. After `seconds`, three rounds are
    enough.
    """
    end = time.perf_counter() + seconds
    for measure in candidates.values():
        measure()
    samples: dict[str, list[T]] = {name: [] for name in candidates}
    names = list(candidates)
    for number in range(rounds):
        if number >= 3 and time.perf_counter() > end:
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(candidates[name]())
    return samples


def medians(samples: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of each candidate's measurements."""
    return {name: median(values) for name, values in samples.items()}


def minima(samples: dict[str, list[float]]) -> dict[str, float]:
    """Return each candidate's least measurement, which other programs disturb least."""
    return {name: min(values) for name, values in samples.items()}


def repeats_for(device: Any, work: Callable[[], object], target_us: float) -> int:
    """Return how many calls of `work` take about `target_us`, at least one."""
    work()
    once_us = wall_us(device, work)
    if once_us < target_us / 4:
        once_us = wall_us(device, work, 4)
    return max(1, int(target_us / max(once_us, 0.1)))


def named_stream(device: Any, name: str) -> Any:
    """Return a new stream whose lane in a timeline is `name`."""
    stream = device.stream()
    stream.name = name
    return stream


def copy_gb_per_s(device: Any, size: int, rounds: int) -> float:
    """Measure the device's own copy of a large buffer: bytes read and written, at least time."""
    source, target = device.zeros((size,), np.uint8), device.zeros((size,), np.uint8)
    copy = partial(device.copy, target, source)
    copy()
    return 2 * size / min(wall_us(device, copy, 2) for _ in range(rounds)) / 1e3


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


def link_gb_per_s(device: Any, stream: Any, size: int, rounds: int) -> dict[str, float]:
    """Measure one large copy to and from pinned memory, at least time, by direction."""
    on_device = device.zeros((size,), np.uint8)
    pinned = device.empty_pinned((size,), np.uint8)
    pinned[...] = 1
    arrays = {TO_DEVICE: (on_device, pinned), TO_HOST: (pinned, on_device)}
    timers: dict[str, Callable[[], float]] = {
        name: partial(event_us, device, stream, partial(device.copy, *pair, stream=stream))
        for name, pair in arrays.items()
    }
    device.synchronize()
    return {name: size / us / 1e3 for name, us in minima(interleave(timers, rounds)).items()}
