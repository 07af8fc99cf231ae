"""Matrix products of a chosen duration, which stand for a model's computation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvcupy.bench.models import Model
from kvcupy.bench.timers import wall_us

FIRST_SIZE = (64, 32)  # rows and columns of the smallest product that is tried
MOST_ROWS = 1024
MUCH_FASTER = 1.3  # a product of twice the rows and columns is worth it from here


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


class LayerProducts(Compute):
    """The smallest matrix product that runs at full speed, repeated.

    Small, so that it stays in caches: on a GPU, whose memory is many times as fast as the link, a
    copy takes no bandwidth from a computation beside it. Its inner size is the model's hidden size.
    """

    def __init__(self, device: Any, model: Model) -> None:
        super().__init__(device, model, MOST_ROWS)

    def fit(self, stream: Any, target_us: float) -> None:
        """Choose the size, then the number of repeats, so that all of it takes `target_us`."""
        self.repeats = 1
        best, us = (0, 0), math.inf
        rows, columns = FIRST_SIZE
        while (rows, columns) != best:
            self._allocate(rows, columns)
            now_us = self._measure(stream)
            if rows * columns / now_us < MUCH_FASTER * math.prod(best) / us:
                break
            best, us = (rows, columns), now_us
            rows, columns = min(2 * rows, MOST_ROWS), min(2 * columns, self.most_columns)
        repeats = max(1, round(target_us / us))
        self._allocate(max(1, round(best[0] * target_us / (us * repeats))), best[1])
        self.repeats = repeats
