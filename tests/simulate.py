"""Run a tiered cache over stores in a simulated world, a seed at a time.

Clock, threads, stores and processes are simulated; the code of kvcupy is the real one. A seed
decides the order of threads and every fault: processes that are killed in the middle of a call,
stores that fail, slow down or fill up. The result of each call is compared with the permitted ones.

    python tests/simulate.py                            # 200 seeds
    python tests/simulate.py --seeds 0:10000 --jobs 2
    python tests/simulate.py --seeds 4711:4712          # repeat one

A failure is printed with its seed and the last events. The exit status is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path

from simulated_tiers import tiers
from support.world import search

import kvcupy as kv
from kvcupy.testing.report import describe, write_json

_SEEDS_PER_JOB = 100


def _run(seeds: range) -> tuple[int, str]:
    """Run some seeds; return their number, and any failure."""
    failure = search(tiers, seeds)
    return len(seeds), "" if failure is None else str(failure)


def _seed_range(text: str) -> range:
    start, _, stop = text.partition(":")
    return range(int(start), int(stop))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=_seed_range, default=range(200), metavar="FIRST:STOP")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--json", type=Path, help="write the number of seeds and the time here")
    options = parser.parse_args(arguments)
    seeds = options.seeds
    jobs = [seeds[i : i + _SEEDS_PER_JOB] for i in range(0, len(seeds), _SEEDS_PER_JOB)]
    started, num_runs, failures = time.perf_counter(), 0, list[str]()
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=20) as pool:
        for count, failure in pool.imap_unordered(_run, jobs):
            num_runs += count
            if failure:
                failures.append(failure)
                print(f"{failure}\n", flush=True)
    seconds = time.perf_counter() - started
    print(f"{num_runs} runs, {len(failures)} failures, {seconds:.0f} s")
    if options.json:
        record = {
            **describe(kv.device("host")),
            "first_seed": seeds.start, "stop_seed": seeds.stop, "runs": num_runs,
            "failures": failures, "seconds": round(seconds),
        }  # fmt: skip
        write_json(options.json, record)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
