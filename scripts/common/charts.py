"""What the charts of all scripts have in common. Needs matplotlib."""

from __future__ import annotations

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


def save(figure: Any, path: Path, title: str = "") -> None:
    if title:
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures.save(figure, path)
