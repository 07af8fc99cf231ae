"""Print what each protocol between streams needs: the waits whose absence is a race.

Each protocol (tests/order/catalogue.py) runs under many orders of its streams, on a simulated host
device, with the order checker on: the bytes must be the same, and the checker silent. Then each
edge is left out in turn - a wait, a record, a look whether something is done - and the checker must
report it, and one of the orders come out wrong.

edges       what the protocol needs
reported    those whose absence the order checker reports
corrupted   those without which one of the orders gives other bytes, or fails
schedules   orders in which the whole protocol was run, without a report and with the same bytes

    python scripts/order_table.py --schedules 1000 --json scripts/results/order_table.json

The programs are part of the tests, which need `pip install -e ".[test]"`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from common.tests import use_tests

use_tests("order", "cache")

import catalogue  # noqa: E402
from common import frame  # noqa: E402
from common.report import format_table  # noqa: E402

import kvcupy as kv  # noqa: E402

COLUMNS = ("protocol", "edges", "reported", "corrupted", "schedules")


def chosen(only: str) -> list[catalogue.Protocol]:
    """Return the protocol of a name, or those that have it in theirs."""
    named = [protocol for protocol in catalogue.PROTOCOLS if protocol.name == only]
    return named or [protocol for protocol in catalogue.PROTOCOLS if only in protocol.name]


def row_of(protocol: catalogue.Protocol, options: argparse.Namespace) -> catalogue.Row:
    """Run a protocol, in a separate process if there are several at a time."""
    started = time.monotonic()
    if options.jobs > 1:
        row = row_of_a_process(protocol, options)
    else:
        row = catalogue.survey(protocol, options.schedules, options.tries, options.seed)
    print(f"{row.protocol}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return row


def row_of_a_process(protocol: catalogue.Protocol, options: argparse.Namespace) -> catalogue.Row:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        numbers = {name: getattr(options, name) for name in ("schedules", "tries", "seed")}
        command = [sys.executable, __file__, "--only", protocol.name, "--json", str(file)]
        command += [text for name, n in numbers.items() for text in (f"--{name}", str(n))]
        done = subprocess.run(command, capture_output=True, text=True)
        if not file.exists():
            raise RuntimeError(f"{protocol.name}: {done.stderr}")
        (row,) = json.loads(file.read_text())["rows"]
        return catalogue.Row(**row)


def render(report: dict[str, Any]) -> str:
    rows = [*report["rows"], {"protocol": "all", **report["sums"]}]
    return format_table(COLUMNS, [tuple(row[name] for name in COLUMNS) for row in rows])


def problems(report: dict[str, Any]) -> list[str]:
    return [
        f"{row['protocol']}: {problem}" for row in report["rows"] for problem in row["problems"]
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--schedules", type=int, default=1000, help="of each whole protocol")
    add("--tries", type=int, default=400, help="schedules without an edge, at most")
    add("--only", default="", help="protocols that have this in their names")
    add("--seed", type=int, default=0, help="of the first schedule")
    add("--jobs", type=int, default=1, help="processes at a time")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.protocols = chosen(options.only)
    if not options.protocols:
        parser.error(f"--only: no protocol has {options.only!r} in its name")


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the table, its sums, and what is needed to repeat it."""
    kv.config.fallback = "error"
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(partial(row_of, options=options), options.protocols))
    return {
        "seed": options.seed,
        "schedules_per_protocol": options.schedules,
        "most_schedules_per_edge": options.tries,
        "rows": [asdict(row) for row in rows],
        "sums": {name: sum(getattr(row, name) for row in rows) for name in COLUMNS[1:]},
    }


def main(argv: Sequence[str] | None = None) -> int:
    return frame.main(sys.modules[__name__], argv, has_device=False, has_quick=False)


if __name__ == "__main__":
    sys.exit(main())
