"""What the charts of all scripts have in common. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcupy.timelines import pictures


def panels_of(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Any, Any]:
    """Return a figure and its axes, row by row; `options` go to `subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=130, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options).ravel()


def tidy(axes: Any, grid: str = "y") -> None:
    """Draw thin grid lines behind the data, and no frame."""
    axes.grid(axis=grid, color="#E2E2E2", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def stacked_bars(
    axes: Any, names: Sequence[str], shares: Mapping[str, Sequence[float]], colours: Sequence[str]
) -> None:
    """Draw a bar per name, with a part per key of `shares`, and the sum above it."""
    below = [0.0] * len(names)
    for (label, heights), colour in zip(shares.items(), colours, strict=False):
        axes.bar(names, heights, 0.6, bottom=below, color=colour, label=label)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    for place, height in enumerate(below):
        axes.text(place, height, f"{height:.1f}", ha="center", va="bottom")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    tidy(axes)


def save(figure: Any, path: Path, title: str = "") -> None:
    if title:
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures.save(figure, path)
