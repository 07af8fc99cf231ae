"""Forward steps whose K/V come from pinned memory: in sequence, or ahead on a copy stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from common.measure import random_bits, run_named
from common.workload import Step

import kvcupy as kv
from kvcupy.bench.models import Model
from kvcupy.bench.timers import named_stream, wall_us

from .kv_layers import LAYERS, KVLayers

SOURCES = 3  # pinned buffers that the steps use round-robin


class Steps:
    """Steps that each copy K, V and slots from pinned memory, compute, and store."""

    def __init__(self, device: Any, model: Model, steps: Sequence[Step]) -> None:
        rng = np.random.default_rng(1)
        self.device, self.model = device, model
        self.counts = [step.tokens for step in steps]
        most = max(self.counts)
        self.layers = KVLayers(device, model, 2 * most)
        shape = (most, LAYERS, self.layers.row_width)
        self.pinned_rows = [device.empty_pinned(shape, np.uint16) for _ in range(SOURCES)]
        for array in self.pinned_rows:
            array[...] = random_bits(rng, shape)
        self.pinned_slots = [device.empty_pinned((n,), np.int64) for n in self.counts]
        for array in self.pinned_slots:
            array[...] = rng.permutation(2 * most)[: array.size]
        self.rows = [device.empty(shape, np.uint16) for _ in range(2)]
        self.slots = [device.empty((most,), np.int64) for _ in range(2)]
        self.main, self.copier = named_stream(device, "main"), named_stream(device, "copy")
        self.launches = [self._launches(step) for step in range(len(steps))]
        self.compute = Compute(device, model, most)
        self.ends = [device.event(timing=True) for _ in range(len(steps) + 1)]

    def _launches(self, step: int) -> list[Callable[..., None]]:
        n, side = self.counts[step], step % 2
        rows, slots = self.rows[side][:n], self.slots[side][:n]
        return [self.layers.launch(rows, slots, layer) for layer in range(LAYERS)]

    def copy(self, step: int, stream: Any) -> None:
        n, side = self.counts[step], step % 2
        self.device.copy(self.rows[side][:n], self.pinned_rows[step % SOURCES][:n], stream=stream)
        self.device.copy(self.slots[side][:n], self.pinned_slots[step], stream=stream)

    def work(self, step: int) -> None:
        run_named(self.device, "matmul", self.compute.product(self.counts[step]), self.main)
        for launch in self.launches[step]:
            launch(stream=self.main)

    def copy_alone(self) -> None:
        for step in self._steps(self.copier):
            self.copy(step, self.copier)

    def work_alone(self) -> None:
        for step in self._steps(self.main):
            self.work(step)

    def in_sequence(self) -> None:
        for step in self._steps(self.main):
            self.copy(step, self.main)
            self.work(step)

    def overlapped(self) -> None:
        """Copy ahead by one step. `read[i]` guards buffer i: no copy into it before that event."""
        kv.fork(self.main, self.copier)
        read: list[Any] = [None, None]
        arrived: list[Any] = [None, None]

        def fetch(step: int) -> None:
            if read[step % 2] is not None:
                self.copier.wait(read[step % 2])
            self.copy(step, self.copier)
            arrived[step % 2] = self.copier.record()

        for step in self._steps(self.main):
            if step == 0:
                fetch(0)
            if step + 1 < len(self.counts):
                fetch(step + 1)
            self.main.wait(arrived[step % 2])
            self.work(step)
            read[step % 2] = self.main.record()
        kv.join(self.main, self.copier)

    def _steps(self, stream: Any) -> Iterator[int]:
        """Go through the steps, and record on `stream` when each has ended."""
        stream.record(self.ends[0])
        for step in range(len(self.counts)):
            yield step
            stream.record(self.ends[step + 1])

    def step_times_us(self, work: Callable[[], None]) -> list[float]:
        """Run one of the ways to do all steps; return the time from the end of each to the next."""
        self.device.synchronize()
        work()
        self.device.synchronize()
        return [float(end.elapsed_us(start)) for start, end in pairwise(self.ends)]

    def check(self, case: str) -> None:
        writes = [
            (self.pinned_rows[step % SOURCES][:n], self.pinned_slots[step])
            for step, n in enumerate(self.counts)
        ]
        self.layers.check(case, writes)


class Compute:
    """A matrix product of the model's hidden size that takes somewhat longer than a step's copy.

    Its size grows until it takes long enough, at most to all tokens and the whole projection, and
    it is repeated if that is still too short. Its inner size is the model's.
    """

    def __init__(self, device: Any, model: Model, tokens: int) -> None:
        self.device, self.tokens = device, tokens
        self.inner, self.most_columns = model.projection
        self.dtype = self._fast_dtype()
        self.repeats = 1
        self._allocate(min(64, tokens), model.head_dim)

    def _allocate(self, rows: int, columns: int) -> None:
        rng = np.random.default_rng(2)
        self.rows, self.columns = rows, columns
        self.a, self.b = (
            self.device.asarray(rng.random(shape, np.float32).astype(self.dtype))
            for shape in ((rows, self.inner), (self.inner, columns))
        )
        self.c = self.device.empty((rows, columns), self.dtype)

    def _fast_dtype(self) -> Any:
        """Return float16 where its products are no slower than float32's.

        Sizes grow, so that a processor without float16 arithmetic is detected cheaply.
        """
        for size, slack in ((64, 4.0), (128, 4.0), (256, 4.0), (512, 4.0), (2048, 1.0)):
            times = []
            for dtype in (np.float16, np.float32):
                a = self.device.asarray(np.ones((size, size), dtype))
                product = partial(a.dot, a, out=self.device.empty((size, size), dtype))
                times.append(min(wall_us(self.device, product) for _ in range(3)))
            if times[0] > slack * times[1]:
                return np.dtype(np.float32)
        return np.dtype(np.float16)

    def fit(self, stream: Any, target_us: float) -> None:
        """Choose the size, then the number of repeats, so that a full step takes `target_us`."""
        while (us := self._measure(stream)) < target_us:
            if self.rows < self.tokens:
                self._allocate(min(2 * self.rows, self.tokens), self.columns)
            elif self.columns < self.most_columns:
                self._allocate(self.rows, min(2 * self.columns, self.most_columns))
            else:
                self.repeats = round(target_us / us) or 1
                return
        self._allocate(math.ceil(self.rows * target_us / us), self.columns)

    def _measure(self, stream: Any) -> float:
        work = partial(self.device.run, self.product(self.tokens), stream)
        work()
        return min(wall_us(self.device, work) for _ in range(3))

    def product(self, tokens: int) -> Callable[[], None]:
        """Return the work of a step of `tokens` tokens, in proportion to a full step's."""
        rows = max(1, round(self.rows * tokens / self.tokens))
        a, b, c = self.a[:rows], self.b, self.c[:rows]

        def matmul() -> None:
            for _ in range(self.repeats):
                a.dot(b, out=c)

        return matmul

    def __str__(self) -> str:
        shape = f"({self.rows}, {self.inner}) x ({self.inner}, {self.columns}) {self.dtype}"
        return f"{shape} x {self.repeats}"


def hidden_fraction(sequence_us: float, overlap_us: float, copy_us: float) -> float:
    """Return the part of the copy time that the overlap hides, between 0 and 1.

    >>> hidden_fraction(30.0, 22.0, 10.0)
    0.8
    """
    return min(max((sequence_us - overlap_us) / copy_us, 0.0), 1.0)
