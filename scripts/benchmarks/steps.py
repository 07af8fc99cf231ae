"""Measure the host's work for a step of PagedKVCache, against how many sequences the cache holds.

A step appends one token to each sequence of a batch: begin_forward allocates slots and pages, the
first use of the tables packs them and enqueues their upload, end_forward closes the step. There is
no model and no attention, so that what is left is the host's overhead per step. The other sequences
of the cache have a page each and take no part: work over all of them would show as a time that
grows with their number.

    python scripts/bench.py steps --json steps.json --plot steps.png
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import kvcupy as kv
from kvcupy import pictures
from kvcupy.bench.report import format_table
from kvcupy.bench.timers import named_stream

LIVE = (100, 1_000, 10_000, 100_000)
PARTS = ("begin", "tables", "end")
BLOCK = 1000  # sequences that are filled in one step
SECONDS = 20.0  # for all measurements, after which 20 of each suffice


class SteppedCache:
    """A cache with a batch of long sequences and many of one page beside them.

    Heads are as small as possible: only the tables matter.
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
        most = max(1, BLOCK * page_size // context)
        for start in range(0, batch, most):
            names = self.batch[start : start + most]
            self._fill(names, context)

    def _fill(self, names: Sequence[Any], tokens: int) -> None:
        for name in names:
            self.cache.add_sequence(name)
        with self.cache.forward(names, [tokens] * len(names)):
            pass

    def step_us(self, count: int | None = None) -> tuple[float, ...]:
        """Append a token to the first `count` of the batch, or all, and return each part's time.

        The tokens are popped again.
        """
        cache, names = self.cache, self.batch[:count]
        ones = [1] * len(names)
        marks = [time.perf_counter()]
        cache.begin_forward(names, ones)
        marks.append(time.perf_counter())
        cache.slot_mapping(stream=self.stream)
        marks.append(time.perf_counter())
        cache.end_forward()
        marks.append(time.perf_counter())
        for name in names:
            cache.pop_tokens(name, 1)
        self.device.synchronize()  # the upload of the tables is not host work
        return tuple(float(us) for us in np.diff(marks) * 1e6)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--live", type=int, nargs="+", help="sequences beside the batch; default: 100 to 100,000")
    add("--batch", type=int, default=32, help="sequences of a step")
    add("--context", type=int, default=1024, help="tokens of each of the batch")
    add("--page-size", type=int, default=16, help="tokens per page")
    add("--rounds", type=int, help="steps of each size at most; default: 400")
    add("--plot", type=Path, metavar="FILE", help="write a picture here")


def run(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all sizes in rotation."""
    if options.plot and find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install matplotlib")
    rounds = options.rounds or (50 if options.quick else 400)
    shape = (options.batch, options.context, options.page_size)
    caches = {}
    for live in options.live or (LIVE[:2] if options.quick else LIVE):
        print(f"{live} sequences ...", file=sys.stderr, flush=True)
        caches[live] = SteppedCache(device, live, *shape)
    samples: dict[int, list[tuple[float, ...]]] = {live: [] for live in caches}
    sizes, end = list(caches), time.perf_counter() + SECONDS
    for number in range(rounds + 1):  # the first warms up
        if number > 20 and time.perf_counter() > end:
            break
        shift = number % len(sizes)  # a disturbance affects all alike
        for live in sizes[shift:] + sizes[:shift]:
            samples[live].append(caches[live].step_us())
    report = {
        "batch": options.batch,
        "context": options.context,
        "page_size": options.page_size,
        "rows": [summary(live, np.array(times[1:])) for live, times in samples.items()],
    }
    if options.plot:
        plot(report, options.plot)
    return report


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
    columns = ("other sequences", "us (median)", "us (p10)", "us (p90)", "us (min)")
    columns += (*(f"{part} us" for part in PARTS), "to the first")
    first = report["rows"][0]["median_us"]
    rows = []
    for row in report["rows"]:
        times = [row[f"{name}_us"] for name in ("median", "p10", "p90", "least", *PARTS)]
        rows.append((f"{row['live']:,}", *times, f"{row['median_us'] / first:.2f}x"))
    return (
        f"{format_table(columns, rows)}\n\na step of {report['batch']} sequences of "
        f"{report['context']} tokens, {report['page_size']} tokens per page; parts are medians"
    )


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the time of a step against the number of other sequences."""
    from matplotlib.figure import Figure

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
    pictures.save(figure, path)
