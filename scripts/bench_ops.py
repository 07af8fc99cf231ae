"""Measure `kv.store_kv` and `kv.store_mla` against array expressions and the copy bandwidth.

Candidates of a case take turns, round by round, so that noise hits all alike. Two ways to run:

eager   calls from Python, wall clock around many of them and one synchronisation: what a call costs
graph   calls captured over rotated sets of arguments, replayed between two timing events: what the
        device needs

GB/s counts the bytes that have to be read and written. Ratios are of the least times: other
programs disturb those least, and threaded baselines most. Each candidate is checked byte by byte.

    python scripts/bench_ops.py --json scripts/results/bench_ops.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from benchlib import (
    describe,
    event_us,
    format_table,
    interleave,
    medians,
    minima,
    named_stream,
    repeats_for,
    wall_us,
    write_json,
)
from store_cases import FORMATS, Call, Shape, StoreCase
from workload import MODELS

import kvcupy as kv
from kvcupy.dtypes import numpy_dtype

TOKENS = (1, 16, 128, 1024, 4096, 16384)
QUICK_TOKENS = (1, 128, 4096)
BENCHED = ("llama-3.1-8b", "llama-3.1-70b-tp8", "deepseek-v3-mla")
CALL_COST = Shape("store_kv", MODELS["llama-3.1-8b"], 1, "bf16")
BANDWIDTH = Shape("store_kv", MODELS["llama-3.1-8b"], 4096, "bf16")


def shapes(tokens: Sequence[int], only: str | None) -> list[Shape]:
    """Return the cases, the two headlines first, of which `only` is part of the name."""
    found = {CALL_COST.name: CALL_COST, BANDWIDTH.name: BANDWIDTH}
    for model in (MODELS[name] for name in BENCHED):
        operation = "store_mla" if model.mla else "store_kv"
        for fmt in FORMATS[:2] if model.mla else FORMATS:
            for count in tokens:
                shape = Shape(operation, model, count, fmt)
                found.setdefault(shape.name, shape)
    return [shape for name, shape in found.items() if only is None or only in name]


def copy_gb_per_s(device: Any, size: int, rounds: int) -> float:
    """Measure the device's own copy of a large buffer: the bytes read and written, at best."""
    source, target = device.zeros((size,), np.uint8), device.zeros((size,), np.uint8)
    copy = partial(device.copy, target, source)
    copy()
    return 2 * size / min(wall_us(device, copy, 2) for _ in range(rounds)) / 1e3


class TorchArrays:
    """torch's view of a device's arrays, where torch is there and can see them."""

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
        """Return a tensor on the same memory, of a format, or of plain integers for "bits"."""
        torch = self.torch
        signed = {1: np.uint8, 2: np.int16}.get(array.dtype.itemsize, array.dtype)
        tensor = torch.from_dlpack(array.view(signed))
        dtypes = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
        return tensor.view(dtypes[fmt]) if fmt in dtypes else tensor


def own_arrays(array: Any, fmt: str) -> Any:
    """Return the device's own array in the dtype of a format, tagged where it has none."""
    try:
        return array.view(numpy_dtype(fmt))
    except (TypeError, ValueError):
        return kv.view_as(array, fmt)


def eager(device: Any, calls: list[Call], target_us: float) -> Callable[[], float]:
    """Return a measurement of a call from Python, in us."""
    repeat = repeats_for(device, partial(calls[0], None), target_us)
    turns = list(islice(cycle(calls), repeat))

    def sweep() -> None:
        for call in turns:
            call(None)

    return lambda: wall_us(device, sweep) / repeat


def replayed(device: Any, stream: Any, calls: list[Call], target_us: float) -> Callable[[], float]:
    """Capture the calls; return a measurement of one of them in a replay, in us."""
    # All of them, unless one alone takes so long that a few tell as much.
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


class Bench:
    """One device, its copy bandwidth, and how long to measure."""

    def __init__(self, device: Any, arguments: argparse.Namespace) -> None:
        quick = arguments.quick
        self.device, self.graph_only = device, arguments.graph
        self.rounds = 3 if quick else 9
        self.target_us = 2_000.0 if quick else 20_000.0
        self.rotate_bytes = (arguments.rotate_mb or (64 if quick else 256)) * 1_000_000
        self.stream = named_stream(device, "bench")
        self.torch = TorchArrays(device)
        self.notes: set[str] = set()
        self.copy_gb_per_s = copy_gb_per_s(device, max(self.rotate_bytes, 1 << 20), self.rounds)

    def measure(self, shape: Shape) -> list[dict[str, Any]]:
        """Check and measure every candidate of one case; return a row for each way to run."""
        sets = min(max(self.rotate_bytes // shape.bytes_moved, 2), 64)
        case = StoreCase(self.device, shape, sets)
        candidates: dict[str, list[Call] | None] = {
            "kvcupy": case.kvcupy(own_arrays),
            "expression": case.expressions(),
        }
        if self.torch.torch is not None:
            candidates["kvcupy, torch tensors"] = case.kvcupy(self.torch.wrap)
            candidates["torch"] = case.torch(self.torch.torch, self.torch.wrap)
        calls = {name: found for name, found in candidates.items() if found is not None}
        for name, found in calls.items():
            case.wipe()
            for call in found:
                call(None)
            case.check(name)

        rows = []
        if not self.graph_only:
            timers = {n: eager(self.device, c, self.target_us) for n, c in calls.items()}
            rows.append(self._row(shape, "eager", sets, interleave(timers, self.rounds)))
        rows.append(self._row(shape, "graph", sets, interleave(self._graphs(calls), self.rounds)))
        return rows

    def _graphs(self, calls: dict[str, list[Call]]) -> dict[str, Callable[[], float]]:
        """Capture what can be captured; say why for what cannot."""
        timers = {"kvcupy": replayed(self.device, self.stream, calls["kvcupy"], self.target_us)}
        builders: dict[str, Callable[[], Callable[[], float]]] = {}
        if "expression" in calls:
            builders["expression"] = partial(
                replayed, self.device, self.stream, calls["expression"], self.target_us
            )
        if "torch" in calls and self.torch.torch.cuda.is_available():
            builders["torch"] = partial(replayed_by_torch, self.torch.torch, calls["torch"])
        for name, build in builders.items():
            try:
                timers[name] = build()
            except Exception as error:  # a baseline's failure is a finding, not the end of the run
                self.notes.add(f"{name} cannot be captured: {type(error).__name__}: {error}")
        return timers

    def _row(
        self, shape: Shape, mode: str, sets: int, samples: dict[str, list[float]]
    ) -> dict[str, Any]:
        us, least = medians(samples), minima(samples)
        # Per call, compare like with like: torch tensors in both.
        beside_torch = least.get("kvcupy, torch tensors", least["kvcupy"])
        gb_per_s = shape.bytes_moved / us["kvcupy"] / 1e3
        return {
            "case": shape.name,
            "mode": mode,
            "sets": sets,
            "bytes": shape.bytes_moved,
            "us": us,
            "least_us": least,
            "gb_per_s": gb_per_s,
            "percent_of_copy": 100 * gb_per_s / self.copy_gb_per_s,
            "vs_expression": least["expression"] / least["kvcupy"] if "expression" in us else None,
            "vs_torch": least["torch"] / beside_torch if "torch" in us else None,
        }

    def headlines(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Return the two ratios that say most: the cost of a call, and bandwidth."""
        found: dict[str, float] = {}
        for row in rows:
            us, like = row["least_us"], "kvcupy, torch tensors"
            if row["mode"] == "eager" and "torch" in us:
                if row["case"] == CALL_COST.name:
                    found["call_cost_kvcupy_over_torch"] = us[like] / us["torch"]
                if row["case"] == BANDWIDTH.name:
                    found["bandwidth_kvcupy_over_torch"] = us["torch"] / us[like]
            if row["case"] == BANDWIDTH.name:
                found[f"bandwidth_percent_of_copy_{row['mode']}"] = row["percent_of_copy"]
        return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases asked for and return the report."""
    device = kv.device(arguments.device) if arguments.device else kv.default_device()
    bench = Bench(device, arguments)
    rows = []
    for shape in shapes(QUICK_TOKENS if arguments.quick else TOKENS, arguments.only):
        rows += bench.measure(shape)
    notes = sorted(bench.notes)
    if bench.torch.missing:
        notes.append(f"no torch baseline: {bench.torch.missing}")
    return {
        **describe(device),
        "copy_gb_per_s": bench.copy_gb_per_s,
        "rotate_bytes": bench.rotate_bytes,
        "rows": rows,
        "headlines": bench.headlines(rows),
        "notes": notes,
    }


def render(report: dict[str, Any]) -> str:
    """Return the report as one table, headlines and notes below."""
    columns = ("case", "run", "us (median)", "us (min)", "GB/s", "% of copy")
    columns += ("us, torch in", "torch us", "x expression", "x torch")
    rows = []
    for row in report["rows"]:
        us = row["us"]
        least = row["least_us"]["kvcupy"]
        measured = (us["kvcupy"], least, row["gb_per_s"], row["percent_of_copy"])
        torch = (us.get("kvcupy, torch tensors"), us.get("torch"))
        rows.append(
            (row["case"], row["mode"], *measured, *torch, row["vs_expression"], row["vs_torch"])
        )
    lines = [format_table(columns, rows), ""]
    lines += [
        f"{name.replace('_', ' ')}: {value:.2f}" for name, value in report["headlines"].items()
    ]
    return "\n".join(lines + report["notes"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="host, cuda, cuda:1; default: a GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds")
    parser.add_argument("--graph", action="store_true", help="graph replays only")
    parser.add_argument("--only", help="only cases whose name contains this")
    parser.add_argument(
        "--rotate-mb", type=int, help="size of the arguments that calls rotate over"
    )
    parser.add_argument("--json", type=Path, help="write the report here")
    arguments = parser.parse_args(argv)
    report = run(arguments)
    print(f"{report['device']} ({report['gpu_and_driver'] or report['processor']}), ", end="")
    print(f"copy {report['copy_gb_per_s']:.1f} GB/s; every candidate checked against NumPy\n")
    print(render(report))
    if arguments.json:
        write_json(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
