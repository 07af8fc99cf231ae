"""What it costs to look at an argument: `probe` on every call, `view` on the first of its kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from bench_timers import TorchArrays, own_arrays
from benchlib import interleave, medians, minima

from kvcupy.arrays import probe, view

REPEAT = 2000


def view_rows(device: Any, torch: TorchArrays, rounds: int) -> list[dict[str, Any]]:
    """Measure `probe` and `view` of a K cache in each library's hands, in ns."""
    bits = device.zeros((64, 16, 8, 128), np.uint16)
    arrays = {type(bits).__module__.partition(".")[0]: own_arrays(bits, "bf16")}
    arrays["numpy"] = np.zeros(bits.shape, np.float16)
    if torch.torch is not None:
        arrays["torch"] = torch.wrap(bits, "bf16")
    timers = {
        (library, function.__name__): _timer(function, array)
        for library, array in arrays.items()
        for function in (probe, view)
    }
    samples = interleave(timers, rounds)
    times, least = medians(samples), minima(samples)
    return [
        {
            "library": library,
            **{f"{name}_ns": times[library, name] for name in ("probe", "view")},
            **{f"least_{name}_ns": least[library, name] for name in ("probe", "view")},
        }
        for library in arrays
    ]


def _timer(function: Callable[[Any], Any], array: Any) -> Callable[[], float]:
    def measure() -> float:
        start = time.perf_counter_ns()
        for _ in range(REPEAT):
            function(array)
        return (time.perf_counter_ns() - start) / REPEAT

    return measure
