"""Run tiers in a simulated world, a seed at a time.

Clock, threads, stores and processes are simulated; the code of kvcupy is the real one. A seed
decides the order of threads and every fault: processes that are killed in the middle of a call,
stores that fail, slow down or fill up, signals whose handlers raise. The result of each call is
compared with the permitted ones.

    python tests/simulate.py                                     # 200 seeds of each protocol
    python tests/simulate.py --protocol tiers --seeds 0:10000 --jobs 2
    python tests/simulate.py --protocol tiers --seeds 4711:4712   # repeat one

A failure is printed with its seed and the last events. The exit status is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simulation import PROTOCOLS
from support.world import search

import kvcupy as kv
from kvcupy.testing.report import describe, write_json

_SEEDS_PER_JOB = 100


def _run(job: tuple[str, int, int]) -> tuple[str, int, str]:
    """Run some seeds of a protocol; return its name, the number of seeds, and any failure."""
    name, start, stop = job
    failure = search(PROTOCOLS[name], range(start, stop))
    return name, stop - start, "" if failure is None else str(failure)


def _jobs(names: list[str], seeds: range) -> Iterator[tuple[str, int, int]]:
    for start in range(seeds.start, seeds.stop, _SEEDS_PER_JOB):
        for name in names:
            yield name, start, min(start + _SEEDS_PER_JOB, seeds.stop)


def _seed_range(text: str) -> range:
    start, _, stop = text.partition(":")
    return range(int(start), int(stop))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--protocol", choices=list(PROTOCOLS), action="append", help="repeatable")
    parser.add_argument("--seeds", type=_seed_range, default=range(200), metavar="FIRST:STOP")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--json", type=Path, help="write the number of seeds and the time here")
    options = parser.parse_args(arguments)
    names = options.protocol or list(PROTOCOLS)
    started = time.perf_counter()
    counts: dict[str, int] = dict.fromkeys(names, 0)
    failures: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=20) as pool:
        for name, count, failure in pool.imap_unordered(_run, _jobs(names, options.seeds)):
            counts[name] += count
            if failure:
                failures.append({"protocol": name, "failure": failure})
                print(f"{name}: {failure}\n", flush=True)
    seconds = time.perf_counter() - started
    for name, count in counts.items():
        print(f"{name:15} {count:8} seeds")
    print(f"{sum(counts.values())} runs, {len(failures)} failures, {seconds:.0f} s")
    if options.json:
        record = {
            **describe(kv.device("host")),
            "first_seed": options.seeds.start, "stop_seed": options.seeds.stop, "runs": counts,
            "failures": failures, "seconds": round(seconds),
        }  # fmt: skip
        write_json(options.json, record)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
