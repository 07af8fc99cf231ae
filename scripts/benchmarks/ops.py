"""Measure operations against array expressions, torch and the copy bandwidth, in all formats.

Stores, rotations, reads of caches and page tables (`kvcupy/bench/candidates.py` says how they are
measured), called from Python and as replays of graphs; then what it costs to inspect an argument,
and to load a kernel. `python -m kvcupy bench` measures shapes of models instead.

    python scripts/bench.py ops --json build/bench_ops.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from kvcupy.bench import candidates, pages, rope, store
from kvcupy.bench.candidates import MODES, Bench
from kvcupy.bench.models import MODELS

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


LLAMA = MODELS["llama-3.1-8b"]
CALL_COST = store.Shape("store_kv", LLAMA, 1, "bf16")
BANDWIDTH = store.Shape("store_kv", LLAMA, 4096, "bf16")
TOKENS = (1, 16, 128, 1024, 4096, 16384)
QUICK_TOKENS = (1, 128, 4096)
ROPE_TOKENS = (1, 64, 4096)
FORMATS = ("bf16", "fp8 static", "fp8 dynamic", "int8 static")
ROPE_FORMATS = ("bf16", "bf16 norm", "fp8 static", "fp8 dynamic")
ROPE_HEADLINES = tuple(
    rope.Shape("rope_store_kv", LLAMA, count, "bf16", fresh=True) for count in ROPE_TOKENS
)


def shapes(sections: Sequence[str], tokens: Sequence[int]) -> list[Any]:
    """Return the cases of some sections, the headlines of each first."""
    cases: list[Any] = []
    if "store" in sections:
        cases += [CALL_COST, BANDWIDTH, *store_shapes(tokens)]
    if "rope" in sections:
        cases += [*ROPE_HEADLINES, *rope_shapes()]
    if "pages" in sections:
        cases += page_shapes()
    return list({case.name: case for case in cases}.values())


def store_shapes(tokens: Sequence[int]) -> Iterator[store.Shape]:
    """Yield stores; past 4096 tokens, copies of one model alone."""
    for name in (LLAMA.name, "llama-3.1-70b-tp8", "deepseek-v3-mla"):
        model = MODELS[name]
        for fmt in FORMATS[:2] if model.mla else FORMATS:
            for count in tokens:
                if count > 4096 and (fmt != "bf16" or model is not LLAMA):
                    continue
                if fmt == "int8 static" and model is not LLAMA:
                    continue
                yield store.Shape("store_mla" if model.mla else "store_kv", model, count, fmt)


def rope_shapes() -> Iterator[rope.Shape]:
    """Yield rotations, alone and with the store."""
    for operation, name, formats in (
        ("apply_rope", LLAMA.name, ROPE_FORMATS[:2]),
        ("rope_store_kv", LLAMA.name, ROPE_FORMATS),
        ("rope_store_mla", "deepseek-v3-mla", ("bf16", "fp8 static")),
    ):
        for fmt in formats:
            for count in ROPE_TOKENS:
                yield rope.Shape(operation, MODELS[name], count, fmt)


def page_shapes() -> list[pages.Shape]:
    """Return what reads caches and page tables."""
    cases = [
        pages.Shape("gather_kv", count, fmt) for fmt in FORMATS[:3] for count in (1, 128, 4096)
    ]
    cases += [pages.Shape("copy_pages", count) for count in (1, 32, 512)]
    steps = ((1, 1), (64, 1), (256, 1), (1, 512), (16, 512))
    return cases + [pages.Shape("slot_mapping", n, append=append) for n, append in steps]


def headlines(report: dict[str, Any]) -> dict[str, float]:
    """Return the numbers that say most: what a call costs, what is moved, what a first call costs.

    Those beside torch are of calls from Python, on torch tensors in both.
    """
    values: dict[str, float] = {}
    for row in report["rows"]:
        if row["case"] == BANDWIDTH.name:
            values[f"store_kv T=4096: percent of copy, {row['mode']}"] = row["percent_of_copy"]
        torch, compiled = (row["ratios"].get(name) for name in ("torch", "torch.compile"))
        if row["mode"] != "eager" or torch is None:
            continue
        if row["case"] == CALL_COST.name:
            values["store_kv T=1: kvcupy's time over torch's"] = 1 / torch
        if row["case"] == BANDWIDTH.name:
            values["store_kv T=4096: times torch's bandwidth"] = torch
        for shape in ROPE_HEADLINES:
            if row["case"] == shape.name:
                name = f"{shape.operation} T={shape.tokens}: times as fast as torch"
                values[name] = torch
                if compiled is not None:
                    values[f"{name}.compile"] = compiled
    for row in report["views"]:
        values[f"probe of a {row['library']} array, ns"] = row["least_probe_ns"]
    for row in report["loading"]:
        what = f"{row['kernel']} on {row['where']}"
        values[f"compile {what}, ms"] = row["least_cold_ms"]
        values[f"load {what}, ms"] = row["least_warm_ms"]
    return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, help="default: all")
    parser.add_argument("--graph", action="store_true", help="graph replays only")
    parser.add_argument("--only", help="only cases whose name contains this")
    parser.add_argument("--torch-compile", action="store_true", help="another baseline; minutes")
    parser.add_argument(
        "--rotate-mb", type=int, help="size of the arguments that calls rotate over"
    )


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    sections = options.sections or SECTIONS
    bench = Bench(
        device, quick=options.quick, modes=MODES[1:] if options.graph else MODES,
        rotate_bytes=options.rotate_mb and options.rotate_mb * 1_000_000,
        with_compile=options.torch_compile,
    )  # fmt: skip
    cases = shapes(sections, QUICK_TOKENS if options.quick else TOKENS)
    chosen = [case for case in cases if options.only is None or options.only in case.name]
    report = bench.report(chosen) | {"views": [], "loading": []}
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
