"""Measure the host's work for a step of PagedKVCache, against how many sequences the cache holds.

A step appends one token to each sequence of a batch: begin_forward finds slots and pages, the first
use of the tables packs them and puts their copy on its stream, end_forward closes the step. There
is no model and no attention: what is left is what the host pays for a step, whatever the model.
The other sequences of the cache, a page each, take no part. Work that went over all of them would
show as a time that grows with their number.

    python scripts/bench.py steps --json steps.json --plot steps.png
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common.measure import chosen_device, describe, format_table, named_stream, write_json

import kvcupy as kv

LIVE = (100, 1_000, 10_000, 100_000)
PARTS = ("begin", "tables", "end")
BLOCK = 1000  # sequences that are filled in one step
SECONDS = 20.0  # for all measurements, after which 20 of each do


class SteppedCache:
    """A cache with a batch of long sequences and many of one page beside them.

    Heads are as small as they can be, for only the tables matter.
    """

    def __init__(self, device: Any, live: int, batch: int, context: int, page_size: int) -> None:
        self.device, self.batch = device, [("batch", i) for i in range(batch)]
        self.stream = named_stream(device, "compute")
        pages = live + batch * (context // page_size + 1)
        self.cache = kv.PagedKVCache(
            num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=1, num_pages=pages,
            page_size=page_size, dtype="bf16", device=device, copy_stream=device.stream(),
            max_batch_tokens=max(BLOCK * page_size, context),
        )  # fmt: skip
        others = list(range(live))
        for first in range(0, live, BLOCK):
            self._fill(others[first : first + BLOCK], page_size)
        for name in self.batch:
            self._fill([name], context)

    def _fill(self, names: Sequence[Any], tokens: int) -> None:
        for name in names:
            self.cache.add_sequence(name)
        with self.cache.forward(names, [tokens] * len(names)):
            pass

    def step_us(self) -> tuple[float, ...]:
        """Append a token to each of the batch; return what each part took, and take it back."""
        cache, ones = self.cache, [1] * len(self.batch)
        marks = [time.perf_counter()]
        cache.begin_forward(self.batch, ones)
        marks.append(time.perf_counter())
        cache.slot_mapping(stream=self.stream)
        marks.append(time.perf_counter())
        cache.end_forward()
        marks.append(time.perf_counter())
        for name in self.batch:
            cache.pop_tokens(name, 1)
        self.device.synchronize()  # the tables' copy is no part of the host's work
        return tuple(float(us) for us in np.diff(marks) * 1e6)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all sizes in turn and return the report."""
    device = chosen_device(arguments.device)
    where = describe(device)  # now: the tree may change while this runs
    caches = {}
    for live in arguments.live:
        print(f"{live} sequences ...", file=sys.stderr, flush=True)
        shape = (arguments.batch, arguments.context, arguments.page_size)
        caches[live] = SteppedCache(device, live, *shape)
    samples: dict[int, list[tuple[float, ...]]] = {live: [] for live in caches}
    sizes, end = list(caches), time.perf_counter() + SECONDS
    for number in range(arguments.rounds + 1):  # the first warms up
        if number > 20 and time.perf_counter() > end:
            break
        shift = number % len(sizes)  # a disturbance hits all alike
        for live in sizes[shift:] + sizes[:shift]:
            samples[live].append(caches[live].step_us())
    return {
        **where,
        "batch": arguments.batch,
        "context": arguments.context,
        "page_size": arguments.page_size,
        "rows": [summary(live, np.array(found[1:])) for live, found in samples.items()],
    }


def summary(live: int, parts_us: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return medians and spread of one size, of times (steps, parts)."""
    total = parts_us.sum(axis=1)
    low, middle, high = np.percentile(total, (10, 50, 90))
    return {
        "live": live,
        "steps": len(total),
        "median_us": float(middle),
        "p10_us": float(low),
        "p90_us": float(high),
        "least_us": float(total.min()),
        **{
            f"{part}_us": float(us)
            for part, us in zip(PARTS, np.median(parts_us, axis=0), strict=True)
        },
    }


def render(report: dict[str, Any]) -> str:
    columns = ("other sequences", "us a step", "p10", "p90", "least", *PARTS, "to the first")
    first = report["rows"][0]["median_us"]
    rows = []
    for row in report["rows"]:
        times = [row[f"{name}_us"] for name in ("median", "p10", "p90", "least", *PARTS)]
        rows.append((f"{row['live']:,}", *times, f"{row['median_us'] / first:.2f}x"))
    return format_table(columns, rows)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the time of a step against the number of other sequences.

    Raises
    ------
    ImportError
        matplotlib is missing: `pip install matplotlib`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from error
    rows = report["rows"]
    live, middle = [row["live"] for row in rows], [row["median_us"] for row in rows]
    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    axes = figure.subplots()
    low, high = ([row[name] for row in rows] for name in ("p10_us", "p90_us"))
    axes.fill_between(
        live, low, high, color="#4C78A8", alpha=0.2, lw=0, label="10th to 90th percentile"
    )
    axes.plot(live, middle, "o-", color="#4C78A8", label="median")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.25 * max(high))
    axes.set_xlabel("sequences in the cache beside the batch, a page each")
    axes.set_ylabel("host time of a step, µs")
    axes.set_title(f"Tables of a step of {report['batch']} sequences, without a model", loc="left")
    axes.grid(color="#E2E2E2", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="host, cuda, cuda:1; default: a GPU if there is one")
    parser.add_argument("--live", type=int, nargs="+", default=LIVE, help="sequences beside it")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each of the batch")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page")
    parser.add_argument("--rounds", type=int, default=400, help="steps of each size at most")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    arguments = parser.parse_args(argv)
    report = run(arguments)
    print(
        f"{report['device']} ({report['gpu_and_driver'] or report['processor']}), "
        f"{report['date']}, commit {(report['commit'] or 'unknown')[:12]}\n"
        f"a step of {report['batch']} sequences of {report['context']} tokens, pages of "
        f"{report['page_size']}: medians of {report['rows'][0]['steps']}, calls included\n"
    )
    print(render(report))
    if arguments.json:
        write_json(arguments.json, report)
    if arguments.plot:
        plot(report, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
