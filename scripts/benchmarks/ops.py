"""Measure operations against array expressions, torch and the copy bandwidth, in all formats.

Stores, rotations, reads of caches and page tables (`benchmarks/operations/candidates.py` says how
they are measured), called from Python and as replays of graphs. `scripts/bench.py models` measures
shapes of models instead.

    python scripts/bench.py ops --json build/bench_ops.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from common.models import MODELS

from benchmarks.operations import candidates, pages, rope, store
from benchmarks.operations.candidates import MODES, Bench

SECTIONS = ("store", "rope", "pages")
LLAMA = MODELS["llama-3.1-8b"]
TOKENS = (1, 16, 128, 1024, 4096, 16384)
QUICK_TOKENS = (1, 128, 4096)
ROPE_TOKENS = (1, 64, 4096)
FORMATS = ("bf16", "fp8 static", "fp8 dynamic", "int8 static")
ROPE_FORMATS = ("bf16", "bf16 norm", "fp8 static", "fp8 dynamic")


def shapes(sections: Sequence[str], tokens: Sequence[int]) -> list[Any]:
    """Return the cases of some sections."""
    cases: list[Any] = []
    if "store" in sections:
        cases += store_shapes(tokens)
    if "rope" in sections:
        cases += rope_shapes()
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
    """Yield rotations, alone and with the store; of Llama also of rows that were just written."""
    for count in ROPE_TOKENS:
        yield rope.Shape("rope_store_kv", LLAMA, count, "bf16", fresh=True)
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
    for operation in ("copy_pages", "shift_pages"):
        cases += [pages.Shape(operation, count) for count in (1, 32, 512)]
    steps = ((1, 1), (64, 1), (256, 1), (1, 512), (16, 512))
    return cases + [pages.Shape("slot_mapping", n, append=append) for n, append in steps]


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
    return bench.report(chosen)


render = candidates.render
