"""Recognisable contents of pages."""

from __future__ import annotations

from typing import Any

import numpy as np


def stamp(pool: Any, pages: Any, value: float) -> None:
    """Write a value to all layers of some pages."""
    for layer in range(pool.num_layers):
        pool.k(layer)[pages] = value
        pool.v(layer)[pages] = value + 0.5


def assert_stamped(pool: Any, pages: Any, value: float, what: str) -> None:
    for layer in range(pool.num_layers):
        for array, expected in ((pool.k(layer), value), (pool.v(layer), value + 0.5)):
            got = np.asarray(array[pages], np.float64)
            assert (got == expected).all(), f"{what}: layer {layer}, expected {expected}, {got}"
