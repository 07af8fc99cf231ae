"""Check and measure the candidates of a case: kvcupy, array expressions, torch, torch.compile.

Candidates are measured round by round, so that noise affects all alike. Two modes:

eager   calls from Python, wall clock around many of them and one synchronisation: what a call costs
graph   calls captured over rotated sets of arguments, replayed between two timing events: what the
        device needs

Arguments are rotated over more memory than the caches hold, except in the "fresh" cases, whose
arguments are as a layer finds them, just written. GB/s counts the bytes that have to be read and
written. Ratios are of the least times: other programs disturb those least, and threaded baselines
most. On the host device, torch's time is the better of one thread and all. Copies are checked byte
by byte, rotations against float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from common.measure import WrongBytes, format_table, interleave, medians, minima, named_stream

from .command import TIMES
from .timers import (
    Call,
    TorchArrays,
    copy_gb_per_s,
    eager,
    own_arrays,
    replayed,
    replayed_by_torch,
)

SECONDS = 1.5  # for all candidates of a case, after which three rounds suffice


def check(case: Any, name: str, calls: list[Call]) -> None:
    """Make each call once, on fresh arguments, and compare what it leaves or returns."""
    case.wipe()
    case.check(name, [call(None) for call in calls])


@contextmanager
def one_thread(torch: Any) -> Iterator[None]:
    """Let torch compute on one core, which is fastest for small work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Bench:
    """One device, its copy bandwidth, and how long to measure."""

    def __init__(self, device: Any, options: argparse.Namespace) -> None:
        quick = options.quick
        self.device, self.graph_only = device, options.graph
        self.compiles, self.only = options.torch_compile, options.only
        self.rounds = 5 if quick else 25
        self.target_us = 2_000.0 if quick else 5_000.0
        self.rotate_bytes = (options.rotate_mb or (64 if quick else 256)) * 1_000_000
        self.stream = named_stream(device, "bench")
        self.torch = TorchArrays(device)
        self.notes: set[str] = set()
        self.copy_gb_per_s = copy_gb_per_s(device, max(self.rotate_bytes, 1 << 20), self.rounds)

    def report(self, shapes: Sequence[Any]) -> dict[str, Any]:
        """Measure the cases that `--only` leaves; return the report's rows and notes."""
        chosen = [shape for shape in shapes if self.only is None or self.only in shape.name]
        rows = [row for shape in chosen for row in self.measure(shape)]
        notes = sorted(self.notes)
        if self.torch.missing:
            notes.append(f"no torch baseline: {self.torch.missing}")
        return {
            "copy_gb_per_s": self.copy_gb_per_s,
            "rotate_bytes": self.rotate_bytes,
            "rows": rows,
            "notes": notes,
        }

    def measure(self, shape: Any) -> list[dict[str, Any]]:
        """Check and measure every candidate of one case; return a row per mode.

        `shape` has a name, counts the bytes that a call moves, and builds the case's arguments.
        """
        sets = min(max(self.rotate_bytes // shape.bytes_moved, 2), 64)
        if getattr(shape, "fresh", False):
            sets = 2
        case = shape.build(self.device, sets)
        candidates: dict[str, list[Call] | None] = {
            "kvcupy": case.kvcupy(own_arrays),
            "expression": case.expressions(),
        }
        if self.torch.torch is not None:
            candidates["kvcupy, torch tensors"] = case.kvcupy(self.torch.wrap)
            candidates["torch"] = case.torch(self.torch.torch, self.torch.wrap)
        calls = {name: theirs for name, theirs in candidates.items() if theirs is not None}
        for name, theirs in calls.items():
            check(case, name, theirs)
        if self.compiles and self.torch.torch is not None and getattr(shape, "compiles", False):
            calls |= self._compiled(shape, case)

        rows = []
        if not self.graph_only:
            timers = {n: eager(self.device, c, self.target_us) for n, c in calls.items()}
            if "torch" in calls and self.device.kind == "host":
                with one_thread(self.torch.torch):
                    alone = eager(self.device, calls["torch"], self.target_us)
                timers["torch, one thread"] = partial(self._alone, alone)
            rows.append(self._row(shape, "eager", sets, self._interleaved(timers)))
        rows.append(self._row(shape, "graph", sets, self._interleaved(self._graphs(calls))))
        return rows

    def _interleaved(self, timers: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
        return interleave(timers, self.rounds, seconds=SECONDS)

    def _alone(self, measure: Callable[[], float]) -> float:
        with one_thread(self.torch.torch):
            return measure()

    def _compiled(self, shape: Any, case: Any) -> dict[str, list[Call]]:
        """Compile torch's calls, if that works here; say why if not."""
        try:
            calls = case.torch(self.torch.torch, self.torch.wrap, compiled=True)
            check(case, "torch.compile", calls)
        except WrongBytes:
            raise
        except Exception as error:  # a baseline that fails is reported, and the others go on
            first = (str(error).splitlines() or [""])[0]
            self.notes.add(f"{shape.name}: no torch.compile: {type(error).__name__}: {first}")
            return {}
        return {"torch.compile": calls}

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
            except Exception as error:  # a baseline that fails is reported, and the others go on
                self.notes.add(f"{name} cannot be captured: {type(error).__name__}: {error}")
        return timers

    def _row(
        self, shape: Any, mode: str, sets: int, samples: dict[str, list[float]]
    ) -> dict[str, Any]:
        us, least = medians(samples), minima(samples)
        # Per call, compare like with like: torch tensors in both.
        beside_torch = least.get("kvcupy, torch tensors", least["kvcupy"])
        torch = [least[name] for name in ("torch", "torch, one thread") if name in us]
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
            "vs_torch": min(torch) / beside_torch if torch else None,
            "vs_torch_compile": (
                least["torch.compile"] / beside_torch if "torch.compile" in us else None
            ),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of benchmarks that compare candidates."""
    parser.add_argument("--graph", action="store_true", help="graph replays only")
    parser.add_argument("--only", help="only cases whose name contains this")
    parser.add_argument("--torch-compile", action="store_true", help="another baseline; minutes")
    parser.add_argument(
        "--rotate-mb", type=int, help="size of the arguments that calls rotate over"
    )


def render(report: dict[str, Any]) -> str:
    """Return a report as a table, with notes below."""
    lines = [table(report["rows"]), ""] if report["rows"] else []
    lines.append(f"copy {report['copy_gb_per_s']:.1f} GB/s; every candidate checked; times are")
    lines[-1] += " medians but for (min); ratios (x) are of the least times"
    return "\n".join(lines + report["notes"])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows of `Bench.measure` as a table."""
    columns = ("case", "run", *TIMES, "us, torch in", "torch us", "one thread")
    columns += ("x expression", "x torch", "x torch.compile")
    cells = []
    for row in rows:
        us, least = row["us"], row["least_us"]["kvcupy"]
        measured = (us["kvcupy"], least, row["gb_per_s"], row["percent_of_copy"])
        torch = (us.get("kvcupy, torch tensors"), us.get("torch"), us.get("torch, one thread"))
        ratios = (row["vs_expression"], row["vs_torch"], row["vs_torch_compile"])
        cells.append((row["case"], row["mode"], *measured, *torch, *ratios))
    return format_table(columns, cells)
