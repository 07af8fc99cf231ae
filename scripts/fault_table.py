"""Let every call of the device, the compiler and the system fail in turn, and count the outcomes.

Programs over the public classes run once for each call that a fault point meets; that call fails.
The state must then be the one before, or the documented one, the error must name the cause, and the
same call must succeed. Runs on the host device and on the tests' stand-in for CUDA. With --kills a
process that writes blocks to disk is killed with SIGKILL so many times, and every block that its
file then serves is compared.

    python scripts/fault_table.py --json scripts/results/fault_table.json --kills 200
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.tests import use_tests

import kvcupy as kv
from kvcupy.bench.report import describe, format_table, where, write_json

COLUMNS = ("fault point", "programs", "faults", "raised", "served", "states", "retries")


def main(argv: Sequence[str] | None = None) -> int:
    use_tests("faults", "cache")
    from fault_programs import PROGRAMS

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, metavar="PROGRAM",
                        help="some of the programs: " + ", ".join(PROGRAMS))  # fmt: skip
    parser.add_argument("--on", nargs="+", choices=("host", "cuda"), default=["host", "cuda"],
                        help="the host device, the stand-in for CUDA, or both")  # fmt: skip
    parser.add_argument("--most", type=int, metavar="N", help="calls of a point and a program")
    parser.add_argument(
        "--seed", type=int, default=0, help="of what --most draws, and of the kills"
    )
    parser.add_argument(
        "--kills", type=int, default=0, metavar="N", help="of a process that writes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    options = parser.parse_args(argv)

    logging.getLogger("kvcupy").setLevel(logging.CRITICAL)  # warnings of what is injected
    about = describe(kv.device("host"))
    report: dict[str, Any] = {**about, "seed": options.seed, "most": options.most}
    for name in options.on:
        report[name] = survey(name, options.only or list(PROGRAMS), options.most, options.seed)
        if report[name]["points"]:  # else none of those chosen runs on it
            print(render(name, report[name]), flush=True)
    if options.kills:
        report["kills"] = killed(options.kills, options.seed)
        print(f"\nkills: {report['kills']}")
    print(f"\n{where(report)}")
    if options.json:
        write_json(options.json, report)
    kills = report.get("kills", {"wrong": 0, "lost": 0})
    return int(kills["wrong"] + kills["lost"] > 0)


def survey(name: str, programs: Sequence[str], most: int | None, seed: int) -> dict[str, Any]:
    """Return the counts of each point on a device, and the names of the programs."""
    from fault_cuda import cuda_world
    from fault_programs import HOST_ALONE, PROGRAMS
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


def killed(times: int, seed: int) -> dict[str, int]:
    """Kill a writer so many times; return what its file then served."""
    import disk_killed

    with tempfile.TemporaryDirectory() as folder:
        return disk_killed.survey(Path(folder) / "tier", times, "whole", seed)


def render(name: str, survey: dict[str, Any]) -> str:
    """Return the counts of a device as a table."""
    device = {"host": "the host device", "cuda": "the stand-in for CUDA"}[name]
    rows = [(point, *counts.values()) for point, counts in survey["points"].items()]
    # Programs meet several points.
    sums = [sum(column) for column in list(zip(*rows, strict=True))[2:]]
    rows.append(("all", len(survey["programs"]), *sums))
    return f"\n{device}\n\n{format_table(COLUMNS, rows)}"


if __name__ == "__main__":
    sys.exit(main())
