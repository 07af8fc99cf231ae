"""What all benchmarks share: their options, and what a report says of where it ran.

A benchmark is a module with `add_arguments(parser)` for the options that it alone has,
`run(device, options)`, which returns its part of the report ("rows", and what else there is to
say), and `render(report)`, which returns the report as text.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

from common.measure import chosen_device

from kvcupy.bench.report import describe, where, write_json


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has."""
    parser.add_argument("--device", help="host, cuda, cuda:1; default: a GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")


def run(name: str, benchmark: ModuleType, options: argparse.Namespace) -> int:
    """Run one benchmark: measure, print its tables and where they come from, write the JSON."""
    device = chosen_device(options.device)
    about = describe(device)  # now: the tree may change while this runs
    report = {"benchmark": name, **about, "quick": options.quick}
    report |= benchmark.run(device, options)
    print(benchmark.render(report))
    print(f"\n{where(report)}")
    if options.json:
        write_json(options.json, report)
    return 0
