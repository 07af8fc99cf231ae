"""Let every call of the device, the compiler and the system fail in turn, and count the outcomes.

Programs over the public classes run once for each call that a fault point meets; that call fails.
The state must then be the one before, or the documented one, the error must name the cause, and the
same call must succeed. Runs on the host device and on the tests' stand-in for CUDA.

    python scripts/fault_table.py --json build/fault_table.json
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from common.tests import use_tests

use_tests("faults", "cache")

from common import frame  # noqa: E402
from common.report import format_table  # noqa: E402
from fault_programs import PROGRAMS  # noqa: E402

import kvcupy as kv  # noqa: E402

COLUMNS = ("fault point", "programs", "faults", "raised", "served", "states", "retries")
DEVICES = {"host": "the host device", "cuda": "the stand-in for CUDA"}


def survey(name: str, programs: Sequence[str], most: int | None, seed: int) -> dict[str, Any]:
    """Return the counts of each point on a device, and the names of the programs."""
    from fault_cuda import cuda_world
    from fault_programs import HOST_ALONE
    from fault_runs import World, survey

    before = kv.config.fallback
    kv.config.fallback = "error"
    try:
        if name == "host":
            chosen = list(programs)
            counts = survey(World(kv.device("host")), [PROGRAMS[p] for p in chosen], most=most,
                            seed=seed, progress=said)  # fmt: skip
        else:
            chosen = [p for p in programs if p not in HOST_ALONE]
            with cuda_world() as world:
                counts = survey(
                    world, [PROGRAMS[p] for p in chosen], most=most, seed=seed, progress=said
                )
    finally:
        kv.config.fallback = before
    rows = {point: asdict(count) for point, count in counts.items() if count.faults}
    return {"programs": chosen, "points": rows}


def said(program: str) -> None:
    print(f"{program} ...", file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", nargs="+", choices=PROGRAMS, metavar="PROGRAM",
        help="some of the programs: " + ", ".join(PROGRAMS))  # fmt: skip
    add("--on", nargs="+", choices=DEVICES, default=list(DEVICES), help="default: both")
    add("--most", type=int, metavar="N", help="calls of a point and a program")
    add("--seed", type=int, default=0, help="of what --most draws")


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    logging.getLogger("kvcupy").setLevel(logging.CRITICAL)  # warnings of what is injected
    report: dict[str, Any] = {"seed": options.seed, "most": options.most}
    for name in options.on:
        report[name] = survey(name, options.only or list(PROGRAMS), options.most, options.seed)
    return report


def render(report: dict[str, Any]) -> str:
    """Return the counts of each device as a table."""
    parts = []
    for name, title in DEVICES.items():
        points = report.get(name, {}).get("points")
        if points:  # else none of the chosen programs runs on it
            rows = [(point, *counts.values()) for point, counts in points.items()]
            # Programs meet several points.
            sums = [sum(column) for column in list(zip(*rows, strict=True))[2:]]
            rows.append(("all", len(report[name]["programs"]), *sums))
            parts.append(f"{title}\n\n{format_table(COLUMNS, rows)}")
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    return frame.main(sys.modules[__name__], argv, has_device=False, has_quick=False)


if __name__ == "__main__":
    sys.exit(main())
