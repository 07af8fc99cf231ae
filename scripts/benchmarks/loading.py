"""Measure what a first call costs: compiling its kernel, or loading it from the disk cache.

Each measurement is a separate process and begins when the kernel is requested: imports are
excluded, the search for compiler and headers is included. Cold: with an empty cache directory.
Warm: with what the cold process left there. `sm_90` needs NVRTC but no GPU, and loads nothing.

    python scripts/bench.py loading
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common.report import format_table

from kvcupy.commands.doctor import environment
from kvcupy.errors import CompileError
from kvcupy.kernels import Specialisation
from kvcupy.ops import specialisations

KERNELS = (
    "store_copy<16>",
    "store_convert<bfloat16, fp8_e4m3, 8>",
    "rope_store<bfloat16, bfloat16, 8, false>",
)
ARCH = "sm_90"


def specialisation(expression: str) -> Specialisation:
    """Return the specialisation that `expression` names."""
    return next(s for s in specialisations() if s.expression == expression)


def load_once(where: str, expression: str) -> dict[str, Any]:
    """Time what the first call of a process does, in ms: `where` is a device, or `sm_90`."""
    kernel = specialisation(expression)
    if where.startswith("sm_"):
        from kvcupy.devices import nvrtc

        nvrtc.nvrtc_version()  # CuPy is imported
        start = time.perf_counter()
        image = nvrtc.compile_cubin(kernel, where).image
        return {"ms": (time.perf_counter() - start) * 1e3, "bytes": len(image)}
    import kvcupy as kv

    device = kv.device(where)
    start = time.perf_counter()
    device.load(kernel)
    return {"ms": (time.perf_counter() - start) * 1e3}


def measure(where: str, expression: str, rounds: int, warm_rounds: int) -> dict[str, Any]:
    """Load a kernel in fresh processes, cold and then warm; return medians and least times in ms.

    Raises
    ------
    RuntimeError : a process failed; the message is its last line
    """
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for kind, count in (("cold", 1), ("warm", warm_rounds)):
                times[kind] += [_child(where, expression, Path(folder)) for _ in range(count)]
    return {
        "where": where,
        "kernel": expression,
        **{f"{kind}_ms": median(values) for kind, values in times.items()},
        **{f"least_{kind}_ms": min(values) for kind, values in times.items()},
    }


def _child(where: str, expression: str, cache: Path) -> float:
    result = subprocess.run(
        [sys.executable, "-m", __name__, where, expression],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        check=False,
        env={**environment(), "KVCUPY_CACHE_DIR": str(cache)},
    )
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{expression} on {where}: {last}")
    return float(json.loads(result.stdout)["ms"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing to the common options."""


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measure every kernel of `KERNELS` on `device` and, where NVRTC is found, for `sm_90`."""
    rows, notes = [], []
    for where in (device.name, ARCH):
        for expression in KERNELS[: 1 if options.quick else None]:
            try:
                rows.append(measure(where, expression, 1 if options.quick else 3, 2))
            except RuntimeError as error:  # no compiler, or no NVRTC
                notes.append(f"not measured: {error}")
                break
    return {"rows": rows, "notes": notes}


def render(report: dict[str, Any]) -> str:
    columns = ("kernel", "where", "compile ms", "from disk ms")
    cells = [(r["kernel"], r["where"], r["cold_ms"], r["warm_ms"]) for r in report["rows"]]
    return "\n".join([format_table(columns, cells), *report["notes"]])


def main(argv: Sequence[str] | None = None) -> int:
    """Make one measurement, in this process."""
    parser = argparse.ArgumentParser(description="Load one kernel, once, and print the time")
    parser.add_argument("where", help=f"a device, such as host or cuda:0, or {ARCH}")
    parser.add_argument("kernel", choices=KERNELS, help="what to load, once")
    arguments = parser.parse_args(argv)
    try:
        print(json.dumps(load_once(arguments.where, arguments.kernel)))
    except CompileError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return os.EX_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
