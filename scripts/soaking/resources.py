"""What a process holds, over steps: samples, and whether they grow.

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
