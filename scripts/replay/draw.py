"""Charts of replays: hits, occupancy and bytes over the trace; policies and sizes compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcupy.timelines import pictures

from .run import DIRECTIONS
from .simulation import TIERS

COLOURS = {"device": "#1F6F8B", "host": "#E2A33B", "disk": "#8C8C8C"}
LINES = ("#1F6F8B", "#E2A33B", "#B4436C", "#5B8E55", "#6B5CA5")


def draw_over_time(point: dict[str, Any], path: Path, title: str) -> None:
    """Draw one replay: cumulative hit rates, blocks in each tier, bytes in each direction."""
    from matplotlib.figure import Figure

    series = point["series"]
    minutes = [row["minutes"] for row in series]
    figure = Figure(figsize=(10, 9), dpi=130, layout="constrained")
    rates, filled, moved = figure.subplots(3, 1, sharex=True)

    tiers = [tier for tier in TIERS if point[f"{tier}_blocks"]]
    asked = [max(1, sum(row[f"hit.{t}"] for t in TIERS) + row["missed"]) for row in series]
    shares = [
        [100 * row[f"hit.{tier}"] / n for row, n in zip(series, asked, strict=True)]
        for tier in tiers
    ]
    rates.stackplot(minutes, *shares, labels=tiers, colors=[COLOURS[tier] for tier in tiers])
    rates.set_ylabel("hits so far, % of blocks")
    for tier in tiers:
        size = point[f"{tier}_blocks"]
        share = [100 * row[f"blocks.{tier}"] / size for row in series]
        filled.plot(minutes, share, color=COLOURS[tier], label=f"{tier}, of {size:,}")
    filled.set(ylabel="occupied, %", ylim=(0, 105))
    for direction, colour in zip(DIRECTIONS, LINES, strict=False):
        sums = [row[f"bytes.{direction}"] / 1e9 for row in series]
        if sums[-1]:
            moved.plot(minutes, sums, color=colour, label=direction)
    moved.set(ylabel="GB moved so far", xlabel="minutes of the trace")
    for axes in (rates, filled, moved):
        _plain(axes)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, path, title)


def draw_comparison(points: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw policies side by side where they were replayed, and over sizes where simulated."""
    from matplotlib.figure import Figure

    replayed = [point for point in points if point["replayed"]]
    simulated = [point for point in points if not point["replayed"]]
    figure = Figure(figsize=(11 if simulated else 7, 5), dpi=130, layout="constrained")
    panels = figure.subplots(1, 2 if simulated else 1, squeeze=False, sharey=True)[0]
    _bars(panels[0], replayed)
    if simulated:
        _lines(panels[1], replayed, simulated)
    _save(figure, path, title)


def _bars(axes: Any, points: Sequence[dict[str, Any]]) -> None:
    names = [_name(point) for point in points]
    below = [0.0] * len(points)
    for tier in TIERS:
        shares = [100 * point["hit_rate"][tier] for point in points]
        if not points[0][f"{tier}_blocks"]:
            continue
        axes.bar(names, shares, 0.6, bottom=below, color=COLOURS[tier], label=tier)
        below = [a + b for a, b in zip(below, shares, strict=True)]
    for place, height in enumerate(below):
        axes.text(place, height, f"{height:.1f}", ha="center", va="bottom")
    sizes = ", ".join(f"{points[0][f'{tier}_blocks']:,} on {tier}" for tier in TIERS)
    axes.set(ylabel="hits, % of blocks", title=f"replayed: {sizes}")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    _plain(axes)


def _lines(axes: Any, replayed: Sequence[Any], simulated: Sequence[Any]) -> None:
    for name, colour in zip(dict.fromkeys(map(_name, simulated)), LINES, strict=False):
        line = sorted((_blocks(p), 100 * p["hit_rate"]["total"])
                      for p in simulated if _name(p) == name)  # fmt: skip
        axes.plot(*zip(*line, strict=True), color=colour, marker=".", label=name)
        dots = [(_blocks(p), 100 * p["hit_rate"]["total"]) for p in replayed if _name(p) == name]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=colour, mfc="white", ms=9)
    sizes = sorted({_blocks(point) for point in simulated})
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="blocks that all tiers hold", title="simulated; rings: replayed")
    axes.legend(frameon=False)
    _plain(axes)


def _name(point: dict[str, Any]) -> str:
    return f"{point['policy']}, {point['write']}"


def _blocks(point: dict[str, Any]) -> int:
    return sum(point[f"{tier}_blocks"] for tier in TIERS)


def _plain(axes: Any) -> None:
    axes.grid(axis="y", color="#E2E2E2", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures.save(figure, path)
