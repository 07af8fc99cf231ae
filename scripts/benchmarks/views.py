"""Measure what it costs to inspect an argument: `probe` on every call, `view` on the first.

python scripts/bench.py views
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvcupy.arrays import probe, view
from kvcupy.bench.baselines import TorchArrays, own_arrays
from kvcupy.bench.report import format_table
from kvcupy.bench.timers import interleave, medians, minima

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing to the common options."""


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    return {"rows": view_rows(device, TorchArrays(device), 5 if options.quick else 25)}


def render(report: dict[str, Any]) -> str:
    return view_table(report["rows"])


def view_table(rows: list[dict[str, Any]]) -> str:
    """Return rows of `view_rows` as a table."""
    columns = ("array of", "probe ns", "view ns")
    return format_table(columns, [(r["library"], r["probe_ns"], r["view_ns"]) for r in rows])
