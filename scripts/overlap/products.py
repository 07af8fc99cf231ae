"""Matrix products of a chosen duration, which stand for a model's computation."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from common.measure import run_named
from common.models import Model
from common.timers import wall_us

FIRST_SIZE = (64, 32)  # rows and columns of the smallest product that is tried
MAX_ROWS = 1024
MUCH_FASTER = 1.3  # a product of twice the rows and columns is worth it from here


class Products:
    """The smallest matrix product that runs at full speed, repeated.

    Small, so that it stays in caches: on a GPU, whose memory is many times as fast as the link, a
    copy takes no bandwidth from a computation meanwhile. Its inner size is the model's hidden size.
    """

    def __init__(self, device: Any, model: Model) -> None:
        self.device = device
        self.inner, self.most_columns = model.projection
        self.dtype = self._fast_dtype()
        self._allocate(*FIRST_SIZE, repeats=1)

    def _allocate(self, rows: int, columns: int, *, repeats: int) -> None:
        rng = np.random.default_rng(2)
        self.rows, self.columns, self.repeats = rows, columns, repeats
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
        """Choose the size, then the number of repeats, so that all of it takes `target_us`."""
        best, us = (0, 0), math.inf
        rows, columns = FIRST_SIZE
        while (rows, columns) != best:
            self._allocate(rows, columns, repeats=1)
            run = partial(self.device.run, self._multiply, stream)
            run()
            now_us = min(wall_us(self.device, run) for _ in range(3))
            if rows * columns / now_us < MUCH_FASTER * math.prod(best) / us:
                break
            best, us = (rows, columns), now_us
            rows, columns = min(2 * rows, MAX_ROWS), min(2 * columns, self.most_columns)
        repeats = max(1, round(target_us / us))
        rows = max(1, round(best[0] * target_us / (us * repeats)))
        self._allocate(rows, best[1], repeats=repeats)

    def enqueue(self, stream: Any) -> None:
        run_named(self.device, "matmul", self._multiply, stream)

    def _multiply(self) -> None:
        for _ in range(self.repeats):
            self.a.dot(self.b, out=self.c)

    def __str__(self) -> str:
        shape = f"({self.rows}, {self.inner}) x ({self.inner}, {self.columns}) {self.dtype}"
        return f"{shape} x {self.repeats}"
