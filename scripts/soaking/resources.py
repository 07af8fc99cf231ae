"""What a process holds, over steps: samples, whether they grow, and a chart of them.

Memory fills until as many plans of calls are kept as ever are, each for its shapes; what it does
after that is judged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import charts

from kvcupy.ops import call

Array = np.ndarray[Any, Any]

WARM_UP = 0.2  # of the steps, at least

# How much more than after the warm-up there may be at the end, by a line through the samples.
SLACK = {"rss_bytes": 16 << 20, "threads": 16, "files": 6, "python_blocks": 20_000}

Sample = dict[str, float]


def sample() -> Sample:
    """Return resident bytes, threads, open files, and the memory blocks of the interpreter."""
    status = Path("/proc/self/statm").read_text().split()
    return {
        "rss_bytes": int(status[1]) * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "python_blocks": sys.getallocatedblocks(),
        "plans": len(call._plans),
    }


def warm_up(samples: Sequence[Sample]) -> float | None:
    """Return the step at which the warm-up is over, None if it never is."""
    full = next((s["step"] for s in samples if s["plans"] >= call._MAX_PLANS), None)
    return None if full is None else max(full, WARM_UP * samples[-1]["step"])


def line(samples: Sequence[Sample], name: str) -> tuple[Array, Array]:
    """Return the steps after the warm-up, and a line through what there was then."""
    warm = warm_up(samples)
    kept = [] if warm is None else [s for s in samples if s["step"] >= warm]
    steps = np.array([s["step"] for s in kept], np.float64)
    values = np.array([s[name] for s in kept], np.float64)
    if len(kept) < 2:
        return steps, values
    slope, start = np.polyfit(steps, values, 1)
    return steps, slope * steps + start


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Return by how much each resource has grown after the warm-up, if that was over."""
    lines = {name: line(samples, name)[1] for name in SLACK}
    return {name: float(fit[-1] - fit[0]) for name, fit in lines.items() if len(fit) > 1}


def beyond_slack(grown: dict[str, float]) -> list[str]:
    """Return a sentence on each resource that has grown by more than it may."""
    return [
        f"{name} grew by {grown[name]:,.0f} after the warm-up, expected at most {slack:,}"
        for name, slack in SLACK.items()
        if grown.get(name, 0) > slack
    ]


COLOURS = ("#1F6F8B", "#E2A33B", "#B4436C")
POOLS = {"device_pages": "device pages", "host_pages": "host pages", "disk_blocks": "disk blocks"}


def draw(samples: Sequence[Sample], sizes: dict[str, int], path: Path, title: str) -> None:
    """Draw memory, pools, and what else is held, over steps; `sizes` are the pools' sizes."""
    steps = [s["step"] for s in samples]
    figure, (memory, pools, others) = charts.panels_of(3, 1, (10, 8), sharex=True)
    memory.plot(steps, [s["rss_bytes"] / 2**20 for s in samples], color=COLOURS[0], lw=1)
    after, fitted = line(samples, "rss_bytes")
    if len(after) > 1:
        grown = (fitted[-1] - fitted[0]) / 2**20
        label = f"{grown:+.1f} MiB in {after[-1] - after[0]:,.0f} steps\nafter the warm-up"
        memory.plot(after, fitted / 2**20, color=COLOURS[2], lw=1.5, label=label)
    memory.set(ylabel="resident, MiB", ylim=(0, None))
    for (name, text), colour in zip(POOLS.items(), COLOURS, strict=True):
        shares = [100 * s[name] / sizes[name] for s in samples]
        pools.plot(steps, shares, color=colour, lw=0.8, label=f"{text}, of {sizes[name]}")
    pools.set(ylabel="in use, %", ylim=(0, 105))
    for name, colour in zip(("threads", "files"), COLOURS, strict=False):
        others.plot(steps, [s[name] for s in samples], color=colour, lw=1, label=name)
    plans = [s["plans"] / 100 for s in samples]
    others.plot(steps, plans, color=COLOURS[2], lw=1, label="plans of calls, hundreds")
    others.set(ylabel="held", xlabel="steps", ylim=(0, None))
    for axes in (memory, pools, others):
        charts.tidy(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    charts.save(figure, path, title)
