"""Measure kvcupy's operations against array expressions, torch and the copy bandwidth.

The sections are benchmarks of their own: stores, rotations, reads of caches and page tables (how
those are measured: `candidates.py`), then what it costs to inspect an argument, and to load a
kernel.

    python scripts/bench.py ops --json build/bench_ops.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from . import candidates, pages, rope, store
from .candidates import Bench
from .loading import loading_rows, loading_table
from .views import view_rows, view_table

SECTIONS = ("store", "rope", "pages", "views", "loading")
# What a headline should reach.
TARGETS = {
    "store_kv T=1: kvcupy's time over torch's": (None, 2.0),
    "store_kv T=4096: times torch's bandwidth": (1.0, None),
    "rope_store_kv T=1: times as fast as torch": (1.0, None),
    "rope_store_kv T=64: times as fast as torch": (2.0, None),
    "rope_store_kv T=4096: times as fast as torch": (2.0, None),
}


def shapes(sections: Sequence[str], tokens: Sequence[int]) -> list[Any]:
    """Return the cases of some sections."""
    cases: list[Any] = []
    if "store" in sections:
        cases += store.shapes(tokens)
    if "rope" in sections:
        cases += rope.shapes()
    if "pages" in sections:
        cases += pages.shapes()
    return cases


def headlines(report: dict[str, Any]) -> dict[str, float]:
    """Return the numbers that say most: what a call costs, what is moved, what a first call costs.

    Those beside torch are of calls from Python, on torch tensors in both.
    """
    values: dict[str, float] = {}
    for row in report["rows"]:
        if row["case"] == store.BANDWIDTH.name:
            values[f"store_kv T=4096: percent of copy, {row['mode']}"] = row["percent_of_copy"]
        if row["mode"] != "eager" or row["vs_torch"] is None:
            continue
        if row["case"] == store.CALL_COST.name:
            values["store_kv T=1: kvcupy's time over torch's"] = 1 / row["vs_torch"]
        if row["case"] == store.BANDWIDTH.name:
            values["store_kv T=4096: times torch's bandwidth"] = row["vs_torch"]
        for shape in rope.HEADLINES:
            if row["case"] == shape.name:
                name = f"{shape.operation} T={shape.tokens}: times as fast as torch"
                values[name] = row["vs_torch"]
                if row["vs_torch_compile"] is not None:
                    values[f"{name}.compile"] = row["vs_torch_compile"]
    for row in report["views"]:
        values[f"probe of a {row['library']} array, ns"] = row["least_probe_ns"]
    for row in report["loading"]:
        what = f"{row['kernel']} on {row['where']}"
        values[f"compile {what}, ms"] = row["least_cold_ms"]
        values[f"load {what}, ms"] = row["least_warm_ms"]
    return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, help="default: all")
    candidates.add_arguments(parser)


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    sections = options.sections or SECTIONS
    bench = Bench(device, options)
    tokens = store.QUICK_TOKENS if options.quick else store.TOKENS
    report = bench.report(shapes(sections, tokens)) | {"views": [], "loading": []}
    if "views" in sections and not options.only:
        report["views"] = view_rows(device, bench.torch, bench.rounds)
    if "loading" in sections and not options.only:
        report["loading"], notes = loading_rows(device, quick=options.quick)
        report["notes"] += notes
    return report | {"headlines": headlines(report)}


def render(report: dict[str, Any]) -> str:
    """Return the report as tables, headlines and notes below."""
    lines = [candidates.render(report), ""]
    if report["views"]:
        lines += [view_table(report["views"]), ""]
    if report["loading"]:
        lines += [loading_table(report["loading"]), ""]
    return "\n".join(
        lines + [f"{name}: {v:.2f}{verdict(name, v)}" for name, v in report["headlines"].items()]
    )


def verdict(name: str, value: float) -> str:
    """Say whether a headline reaches its target, if it has one."""
    least, most = TARGETS.get(name, (None, None))
    if least is None and most is None:
        return ""
    target = f"at least {least:g}" if most is None else f"at most {most:g}"
    reached = value >= least if most is None else value <= most
    return f" (wanted: {target}{'' if reached else '; missed'})"
