"""A picture of a soak: memory, pools, and what else a process holds, over steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcupy.timelines import pictures

from .resources import Sample, line

COLOURS = ("#1F6F8B", "#E2A33B", "#B4436C")
POOLS = {"device_pages": "device pages", "host_pages": "host pages", "disk_blocks": "disk blocks"}


def draw(samples: Sequence[Sample], sizes: dict[str, int], path: Path, title: str) -> None:
    """Draw samples; `sizes` are those of the pools."""
    from matplotlib.figure import Figure

    steps = [s["step"] for s in samples]
    figure = Figure(figsize=(10, 8), dpi=110, layout="constrained")
    memory, pools, others = figure.subplots(3, 1, sharex=True)
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
        _plain(axes)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures.save(figure, path)


def _plain(axes: Any) -> None:
    axes.grid(axis="y", color="#E2E2E2", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
