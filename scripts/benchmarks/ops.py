"""Measure kvcupy's operations against array expressions, torch and the copy bandwidth.

Candidates of a case take turns, round by round, so that noise hits all alike. Two ways to run:

eager   calls from Python, wall clock around many of them and one synchronisation: what a call costs
graph   calls captured over rotated sets of arguments, replayed between two timing events: what the
        device needs

Arguments are rotated over more memory than the caches hold, but for the "fresh" cases, whose
arguments are as a layer finds them, just written.

GB/s counts the bytes that have to be read and written. Ratios are of the least times: other
programs disturb those least, and threaded baselines most. Here on the processor, torch's is the
better of one thread and all. Copies are checked byte by byte, rotations against float64.
Then: what it costs to look at an argument, and to load a kernel.

    python scripts/bench.py ops --json scripts/results/bench_ops.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.measure import chosen_device, describe, format_table, write_json

from . import pages, rope, store
from .candidates import Bench
from .loading import loading_rows
from .views import view_rows

TOKENS = (1, 16, 128, 1024, 4096, 16384)
QUICK_TOKENS = (1, 128, 4096)
SECTIONS = ("store", "rope", "pages", "views", "loading")
# What a headline should reach.
TARGETS = {
    "store_kv T=1: kvcupy's time over torch's": (None, 2.0),
    "store_kv T=4096: times torch's bandwidth": (1.0, None),
    "rope_store_kv T=1: times as fast as torch": (1.0, None),
    "rope_store_kv T=64: times as fast as torch": (2.0, None),
    "rope_store_kv T=4096: times as fast as torch": (2.0, None),
}


def shapes(sections: Sequence[str], tokens: Sequence[int], only: str | None) -> list[Any]:
    """Return the cases of some sections, of which `only` is part of the name."""
    found: list[Any] = []
    if "store" in sections:
        found += store.shapes(tokens)
    if "rope" in sections:
        found += rope.shapes()
    if "pages" in sections:
        found += pages.shapes()
    return [shape for shape in found if only is None or only in shape.name]


def headlines(report: dict[str, Any]) -> dict[str, float]:
    """Return the numbers that say most: what a call costs, what is moved, what a first call costs.

    Those beside torch are of calls from Python, on torch tensors in both.
    """
    found: dict[str, float] = {}
    for row in report["rows"]:
        if row["case"] == store.BANDWIDTH.name:
            found[f"store_kv T=4096: percent of copy, {row['mode']}"] = row["percent_of_copy"]
        if row["mode"] != "eager" or row["vs_torch"] is None:
            continue
        if row["case"] == store.CALL_COST.name:
            found["store_kv T=1: kvcupy's time over torch's"] = 1 / row["vs_torch"]
        if row["case"] == store.BANDWIDTH.name:
            found["store_kv T=4096: times torch's bandwidth"] = row["vs_torch"]
        for shape in rope.HEADLINES:
            if row["case"] == shape.name:
                name = f"{shape.operation} T={shape.tokens}: times as fast as torch"
                found[name] = row["vs_torch"]
                if row["vs_torch_compile"] is not None:
                    found[f"{name}.compile"] = row["vs_torch_compile"]
    for row in report["views"]:
        found[f"probe of a {row['library']} array, ns"] = row["least_probe_ns"]
    for row in report["loading"]:
        what = f"{row['kernel']} on {row['where']}"
        found[f"compile {what}, ms"] = row["least_cold_ms"]
        found[f"load {what}, ms"] = row["least_warm_ms"]
    return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all that is asked for and return the report."""
    device = chosen_device(arguments.device)
    where = describe(device)  # now: the tree may change while this runs
    sections = arguments.sections or SECTIONS
    bench = Bench(device, arguments)
    tokens = QUICK_TOKENS if arguments.quick else TOKENS
    rows = [
        row for shape in shapes(sections, tokens, arguments.only) for row in bench.measure(shape)
    ]
    views, loading, notes = [], [], sorted(bench.notes)
    if "views" in sections and not arguments.only:
        views = view_rows(device, bench.torch, bench.rounds)
    if "loading" in sections and not arguments.only:
        loading, failed = loading_rows(device, quick=arguments.quick)
        notes += failed
    if bench.torch.missing:
        notes.append(f"no torch baseline: {bench.torch.missing}")
    report = {
        **where,
        "quick": arguments.quick,
        "copy_gb_per_s": bench.copy_gb_per_s,
        "rotate_bytes": bench.rotate_bytes,
        "rows": rows,
        "views": views,
        "loading": loading,
        "notes": notes,
    }
    return report | {"headlines": headlines(report)}


def render(report: dict[str, Any]) -> str:
    """Return the report as tables, headlines and notes below."""
    columns = ("case", "run", "us (median)", "us (min)", "GB/s", "% of copy")
    columns += (
        "us, torch in",
        "torch us",
        "one thread",
        "x expression",
        "x torch",
        "x torch.compile",
    )
    rows = []
    for row in report["rows"]:
        us = row["us"]
        least = row["least_us"]["kvcupy"]
        measured = (us["kvcupy"], least, row["gb_per_s"], row["percent_of_copy"])
        torch = (us.get("kvcupy, torch tensors"), us.get("torch"), us.get("torch, one thread"))
        ratios = (row["vs_expression"], row["vs_torch"], row["vs_torch_compile"])
        rows.append((row["case"], row["mode"], *measured, *torch, *ratios))
    lines = [format_table(columns, rows), ""] if rows else []
    if report["views"]:
        columns = ("array of", "probe ns", "view ns")
        views = [(row["library"], row["probe_ns"], row["view_ns"]) for row in report["views"]]
        lines += [format_table(columns, views), ""]
    if report["loading"]:
        columns = ("kernel", "where", "compile ms", "from disk ms")
        loading = [
            (row["kernel"], row["where"], row["cold_ms"], row["warm_ms"])
            for row in report["loading"]
        ]
        lines += [format_table(columns, loading), ""]
    lines += [
        f"{name}: {value:.2f}{verdict(name, value)}" for name, value in report["headlines"].items()
    ]
    return "\n".join(lines + report["notes"])


def verdict(name: str, value: float) -> str:
    """Say whether a headline reaches its target, if it has one."""
    least, most = TARGETS.get(name, (None, None))
    if least is None and most is None:
        return ""
    wanted = f"at least {least:g}" if most is None else f"at most {most:g}"
    reached = value >= least if most is None else value <= most
    return f" (wanted: {wanted}{'' if reached else '; missed'})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="host, cuda, cuda:1; default: a GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds")
    parser.add_argument("--graph", action="store_true", help="graph replays only")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, help="default: all")
    parser.add_argument("--only", help="only cases whose name contains this")
    parser.add_argument("--torch-compile", action="store_true", help="a baseline more; minutes")
    parser.add_argument(
        "--rotate-mb", type=int, help="size of the arguments that calls rotate over"
    )
    parser.add_argument("--json", type=Path, help="write the report here")
    arguments = parser.parse_args(argv)
    report = run(arguments)
    print(f"{report['device']} ({report['gpu_and_driver'] or report['processor']}), ", end="")
    print(f"copy {report['copy_gb_per_s']:.1f} GB/s; every candidate checked")
    print("times are medians but for (min); ratios (x) and headlines are of the least times\n")
    print(render(report))
    if arguments.json:
        write_json(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
